"""Mellum 2: Qwen3-MoE with windows, and RoPE by kind of layer."""

from model import Block
from models.config import HFConfig, read_mlp_types
from models.family import APART
from models.layers.layer_rope import (
    LayerRopeArgs,
    LayerRopeAttention,
    LayerRopeFamily,
    LayerRopeTransformer,
)
from models.layers.windows import KINDS

HEADS = "num_nextn_predict_layers"


class MellumTransformer(LayerRopeTransformer):
    def make_block(self, args: LayerRopeArgs, layer: int) -> Block:
        block = Block(args, layer)
        block.attention = LayerRopeAttention(args, layer)
        return block


class Mellum(LayerRopeFamily):
    name = "mellum"
    model_class = MellumTransformer
    defaults = dict(
        vocab_size=98304,
        hidden_size=2304,
        num_hidden_layers=28,
        max_position_embeddings=131072,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        attention_bias=False,
        sliding_window=1024,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        moe_intermediate_size=896,
        intermediate_size=7168,
        partial_rotary_factor=1.0,
        num_nextn_predict_layers=None,
    )
    layer_ropes = {
        KINDS[0]: dict(rope_type="default", rope_theta=1e4),
        KINDS[1]: dict(rope_type="default", rope_theta=5e5),
    }
    field_of_key = {"norm_topk_prob": "norm_topk", "attention_bias": "attention_bias"}
    fixed = {"qk_norm": "head"}
    published_head = APART

    def arg_fields(self, c: HFConfig) -> dict:
        read_mlp_types(c, first_dense=0)
        if c[HEADS] is not None and c.count(HEADS) > 1:
            c.refuse(HEADS, "one head for multi-token prediction is")
        for key, kind in (("mtp_layer_types", KINDS[0]), ("mtp_mlp_layer_types", "sparse")):
            if c.get(key) not in (None, [kind]):
                c.refuse(key, f"only {[kind]!r} is")
        return super().arg_fields(c)

    shapes = {
        "Mellum2-12B-A2.5B": dict(  # as JetBrains publishes it
            layer_types=[KINDS[layer % 4 == 3] for layer in range(28)],
            rope_parameters={
                KINDS[0]: dict(rope_type="default", rope_theta=5e5),
                KINDS[1]: dict(
                    rope_type="yarn",
                    rope_theta=5e5,
                    factor=16.0,
                    original_max_position_embeddings=8192,
                    beta_fast=32.0,
                    beta_slow=1.0,
                    attention_factor=1.2772588722239782,
                ),
            },
        )
    }

    def head_fields(self, args: LayerRopeArgs) -> dict:
        """The head has the window."""
        return super().head_fields(args) | {"full_layers": ()}
