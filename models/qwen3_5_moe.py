"""Qwen3.5 and Qwen3.6 with experts, text alone: as Qwen3-Next, but for config and tensor names."""

import dataclasses
from functools import partial

import torch
from torch import Tensor

from models.gguf import MadeTable, log_of_negative, made_of
from models.layers.gated_hybrid import HybridArgs, HybridFamily


class Qwen3_5MoeText(HybridFamily):
    """The text model alone, as transformers saves Qwen3_5MoeForCausalLM."""

    name = "qwen3_5_moe_text"
    defaults = HybridFamily.defaults | dict(
        vocab_size=248320,
        num_hidden_layers=40,
        num_experts=256,
        num_experts_per_tok=8,
    )
    fixed = HybridFamily.fixed | {"norm_topk": True}
    only = {"mlp_only_layers": [], "decoder_sparse_step": 1, "attn_output_gate": True}

    gguf = "qwen35moe"

    def gguf_args(self, args: HybridArgs) -> HybridArgs:
        return dataclasses.replace(args, values_by_place=True)

    def gguf_layer(self, args: HybridArgs) -> MadeTable:
        """The file has value heads in another order: the first of each key head, the second ..."""
        K, H, _, Cv, _ = args.delta_sizes
        N = args.delta_sizes.channels - H * Cv  # queries and keys
        heads, wide = (partial(by_key_head, K=K, width=width) for width in (1, Cv))

        def after_keys(numbers: Tensor) -> Tensor:
            return torch.cat((numbers[:N], wide(numbers[N:])))

        made = {
            "in_proj_qkv.weight": made_of("attn_qkv.weight", rows=after_keys),
            "in_proj_z.weight": made_of("attn_gate.weight", rows=wide),
            "in_proj_b.weight": made_of("ssm_beta.weight", rows=heads),
            "in_proj_a.weight": made_of("ssm_alpha.weight", rows=heads),
            "conv1d.weight": made_of(
                "ssm_conv1d.weight", rows=after_keys, values=lambda t: t.unsqueeze(1)
            ),
            "A_log": made_of("ssm_a", rows=heads, values=log_of_negative),
            "dt_bias": made_of("ssm_dt.bias", rows=heads),
        }
        return super().gguf_layer(args) | {f"linear_attn.{k}": how for k, how in made.items()}


def by_key_head(numbers: Tensor, K: int, width: int) -> Tensor:
    """Reorder [H * width]: the value heads of each of K key heads come one after the other."""
    return numbers.unflatten(0, (-1, K, width)).transpose(0, 1).flatten()


class Qwen3_5Moe(Qwen3_5MoeText):
    """The model with vision, of which the text part is run. M-RoPE is RoPE for text."""

    name = "qwen3_5_moe"
    is_nested = True
    gguf = None  # such files have the text model alone
    renamed_tensors = (("model.language_model.", "model."),)
    left_out = ("model.visual.",)
    fixed = Qwen3_5MoeText.fixed | {"family": Qwen3_5MoeText.name}  # what is left is that model

    # As in text_config of Qwen/Qwen3.5-35B-A3B and Qwen/Qwen3.6-35B-A3B on the Hugging Face Hub.
    shapes = {
        name: dict(max_position_embeddings=262144, rope_theta=1e7)
        for name in ("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B")
    }
