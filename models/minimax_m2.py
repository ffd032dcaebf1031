"""MiniMax-M2, M2.5 and M2.7: q/k norm over all heads, partial RoPE, sigmoid routing."""

from model import Block
from models.config import unsupported
from models.layers.group_routing import SigmoidRoutedMoE
from models.layers.partial_rope import (
    PartialRopeArgs,
    PartialRopeFamily,
    PartialRopeTransformer,
)


class MiniMaxM2Transformer(PartialRopeTransformer):
    def make_block(self, args: PartialRopeArgs, layer: int) -> Block:
        block = super().make_block(args, layer)
        block.ffn = SigmoidRoutedMoE(args)
        return block


class MiniMaxM2(PartialRopeFamily):
    name = "minimax_m2"
    args_class = PartialRopeArgs
    model_class = MiniMaxM2Transformer
    defaults = dict(
        vocab_size=200064,
        hidden_size=3072,
        num_hidden_layers=62,
        max_position_embeddings=196608,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=5e6,
        rms_norm_eps=1e-6,
        num_local_experts=256,
        num_experts_per_tok=8,
        intermediate_size=1536,
    )
    renamed_keys = {
        "num_local_experts": "num_experts",
        "partial_rotary_factor": "partial_rotary_factor",  # read, but without a default of its own
    }
    nullable = (*PartialRopeFamily.nullable, "rotary_dim")
    fixed = {"qk_norm": "full"}
    # The published files have these keys; transformers reads none.
    only = {
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
    }
    has_score_bias = True
    renamed_tensors = (
        (".block_sparse_moe.", ".mlp."),
        (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    )

    def text_config(self, config: dict) -> dict:
        """Published files have rotary_dim instead of partial_rotary_factor."""
        part, size = config.get("rotary_dim"), config.get("head_dim", self.defaults["head_dim"])
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        key = "partial_rotary_factor"
        if part is None or key in config or (isinstance(rope, dict) and key in rope):
            return config
        if type(part) is not int or type(size) is not int or not 0 < part <= size or size % part:
            raise unsupported("rotary_dim", part, f"a divisor of head_dim = {size!r:.40} is needed")
        return config | {key: part / size}

    gguf = "minimax-m2"

    # As in config.json of MiniMaxAI/MiniMax-M2.5 on the Hugging Face Hub.
    shapes = {"MiniMax-M2.5-230B-A10B": dict(rotary_dim=64)}
