"""Granite 4.0 H: Mamba-2, few layers of attention without RoPE, a shared expert, multipliers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model import Block
from models.config import HFConfig, listed_kinds
from models.family import PublishedLayout
from models.gguf import Values
from models.layers.granite import GraniteFamily, GraniteMoeArgs, GraniteTransformer
from models.layers.mamba2 import Mamba2
from models.layers.mamba_hybrid import (
    ATTENTION,
    MAMBA,
    MambaArgs,
    MambaFamily,
    MambaTransformer,
)
from models.layers.shared_expert import SharedExpertMoE
from models.tensors import Recipes, copy_of, expert_recipes

# What both published models have.
COMMON: dict = dict(
    vocab_size=100352,
    num_hidden_layers=40,
    layer_types=[ATTENTION[1] if n % 10 == 5 else MAMBA[1] for n in range(40)],
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    position_embedding_type="nope",
    mamba_d_state=128,
    embedding_multiplier=12.0,
    attention_multiplier=0.0078125,
    residual_multiplier=0.22,
)


@dataclass(frozen=True)
class GraniteMoeHybridArgs(MambaArgs, GraniteMoeArgs):
    shared_intermediate: int = 0  # intermediate dim of the shared expert; 0: none
    has_rope: bool = False


class GraniteMoeHybridTransformer(MambaTransformer, GraniteTransformer):
    args: GraniteMoeHybridArgs

    def make_block(self, args: GraniteMoeHybridArgs, layer: int) -> Block:
        block = super().make_block(args, layer)
        block.ffn = SharedExpertMoE(args)
        if layer not in args.full_layers:
            block.attention = Mamba2(args)
        return block

    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        kind = GraniteTransformer if self.args.has_rope else MambaTransformer
        return kind.make_rope_table(self, length, device)


class GraniteMoeHybrid(MambaFamily, GraniteFamily):
    name = "granitemoehybrid"
    args_class = GraniteMoeHybridArgs
    model_class = GraniteMoeHybridTransformer
    defaults = GraniteFamily.defaults | dict(
        shared_intermediate_size=1024,
        position_embedding_type=None,
        mamba_n_heads=128,
        mamba_n_groups=1,
        mamba_d_state=256,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
    )
    field_of_key = GraniteFamily.field_of_key | {
        "shared_intermediate_size": "shared_intermediate",
        "mamba_n_heads": "mamba_heads",
        "mamba_d_head": "mamba_head_dim",
        "mamba_n_groups": "mamba_groups",
        "mamba_d_state": "mamba_state",
        "mamba_d_conv": "conv_width",
    }
    nullable = *GraniteFamily.nullable, "position_embedding_type"
    renamed_tensors = (
        *GraniteFamily.renamed_tensors,
        (".shared_mlp.input_linear.", ".mlp.shared_expert.gate_up_proj."),
        (".shared_mlp.output_linear.", ".mlp.shared_expert.down_proj."),
    )

    def arg_fields(self, c: HFConfig) -> dict:
        inner = c.integer("mamba_expand") * c.integer("hidden_size")
        heads = c.integer("mamba_n_heads")
        if c.setdefault("mamba_d_head", "auto") == "auto" and not c.is_null("mamba_d_head"):
            c["mamba_d_head"] = inner // heads
        if c.integer("mamba_d_head") * heads != inner:
            c.refuse("mamba_d_head", f"times mamba_n_heads = {heads}, {inner} is needed")
        if not c.flag("mamba_conv_bias"):
            c.refuse("mamba_conv_bias", "only true is")
        if c.flag("mamba_proj_bias"):
            c.refuse("mamba_proj_bias", "only false is")
        rope = c.setdefault("position_embedding_type", None)
        if not isinstance(rope, str | None):
            c.refuse("position_embedding_type", "a name or null is needed")
        self.check_mamba(c, "mamba_n_heads", "mamba_n_groups", "mamba_d_conv")
        if c["mamba_n_groups"] != 1:
            c.refuse("mamba_n_groups", "only 1 is: the gated norm is over all heads")
        return super().arg_fields(c) | {"has_rope": rope == "rope"}

    def window_fields(self, c: HFConfig) -> dict:
        """Return which layers have attention."""
        if c["layer_types"] is None:
            c["layer_types"] = c.get("layers_block_type")
        kinds = listed_kinds(c, (*MAMBA, *ATTENTION))
        if kinds is None or not any(kind in ATTENTION for kind in kinds):
            c.refuse("layer_types", "some layers must have attention")
        return {"full_layers": tuple(n for n, kind in enumerate(kinds) if kind in ATTENTION)}

    def expert_recipes(self, args: GraniteMoeHybridArgs, layout: PublishedLayout) -> Recipes:
        """Published with gate and up of the shared expert in one tensor; not so in GGUF files."""
        D, width, theirs = args.dim, args.shared_intermediate, "mlp.shared_expert."
        if layout.separate or not width:
            return super().expert_recipes(args, layout)
        return expert_recipes(args, layout.fused) | {
            "ffn.shared.w13.weight": copy_of(f"{theirs}gate_up_proj.weight", 2 * width, D),
            "ffn.shared.w2.weight": copy_of(f"{theirs}down_proj.weight", D, width),
        }

    gguf = "granitehybrid"
    gguf_keys = GraniteFamily.gguf_keys | {
        "shared_intermediate_size": "expert_shared_feed_forward_length",
        "mamba_n_heads": "ssm.time_step_rank",
        "mamba_n_groups": "ssm.group_count",
        "mamba_d_state": "ssm.state_size",
        "mamba_d_conv": "ssm.conv_kernel",
    }

    def gguf_config(self, values: Values) -> dict:
        """llama.cpp rotates if the file says that RoPE's scaling was trained."""
        config = super().gguf_config(values)
        heads, inner = config.get("mamba_n_heads"), values.get("ssm.inner_size")
        if type(heads) is int and type(inner) is int and heads > 0:
            config |= {
                "mamba_d_head": inner // heads,
                "mamba_expand": inner // config["hidden_size"],
            }
        if width := values.width("ffn_down_exps.weight", 2):
            config["intermediate_size"] = width
        kinds = [(ATTENTION[0], MAMBA[0])[values.has("ssm_a", n)] for n in values.layer_numbers]
        rope = "rope" if values.get("rope.scaling.finetuned") else None
        return config | {"layer_types": kinds, "position_embedding_type": rope}

    # As in config.json of ibm-granite/granite-4.0-h-tiny and -small on the Hugging Face Hub.
    shapes = {
        "Granite-4.0-H-Tiny": dict(
            hidden_size=1536,
            num_attention_heads=12,
            num_key_value_heads=4,
            num_local_experts=64,
            num_experts_per_tok=6,
            intermediate_size=512,
            shared_intermediate_size=1024,
            mamba_n_heads=48,
            logits_scaling=6.0,
            **COMMON,
        ),
        "Granite-4.0-H-Small": dict(
            num_attention_heads=32,
            num_key_value_heads=8,
            num_local_experts=72,
            num_experts_per_tok=10,
            intermediate_size=768,
            shared_intermediate_size=1536,
            logits_scaling=16.0,
            **COMMON,
        ),
    }
