"""Flint 40B-A2.5B: sinks, windows, full layers without RoPE, sigmoid routing, a shared expert."""

from dataclasses import dataclass

import torch

from model import Block
from models.config import HFConfig
from models.family import PublishedLayout
from models.layers.group_routing import SigmoidRoutedMoE
from models.layers.scaled_rope import ScaledRopeTransformer
from models.layers.sinks import SinkAttention, SinkFamily
from models.layers.windows import WindowedArgs, leave_full_unrotated
from models.tensors import Recipes, copy_of


@dataclass(frozen=True)
class FlintArgs(WindowedArgs):
    shared_intermediate: int = 0  # intermediate dim of the shared expert; 0: none


class FlintTransformer(ScaledRopeTransformer):
    args: FlintArgs

    def make_block(self, args: FlintArgs, layer: int) -> Block:
        block = Block(args, layer)
        block.attention = SinkAttention(args)
        leave_full_unrotated(block, args, layer)
        if layer not in args.dense_layers:
            block.ffn = SigmoidRoutedMoE(args)
        return block


class Flint(SinkFamily):
    name = "flint"
    args_class = FlintArgs
    model_class = FlintTransformer
    defaults = dict(
        vocab_size=150144,
        hidden_size=2048,
        num_hidden_layers=49,
        max_position_embeddings=262144,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        attention_bias=False,
        sliding_window=513,
        num_experts=256,
        num_experts_per_tok=6,
        norm_topk_prob=True,
        moe_intermediate_size=512,
        intermediate_size=6144,
        shared_expert_intermediate_size=1024,
        mlp_only_layers=[0, 1],
    )
    field_of_key = {
        "norm_topk_prob": "norm_topk",
        "attention_bias": "attention_bias",
        "shared_expert_intermediate_size": "shared_intermediate",
    }
    fixed = {"qk_norm": "head"}
    renamed_tensors = ((".self_attn.softmax_offset", ".self_attn.sinks"),)

    def usual_full(self, layer: int, n_layer: int) -> bool:
        return layer < 2 or layer % 4 == 1 or layer == n_layer - 1

    def arg_fields(self, c: HFConfig) -> dict:
        if c.is_null("mlp_only_layers"):
            c["mlp_only_layers"] = self.defaults["mlp_only_layers"]
        return super().arg_fields(c)

    def expert_recipes(self, args: FlintArgs, layout: PublishedLayout) -> Recipes:
        """The router has no bias that corrects the choice: it is zero."""
        router = copy_of(
            *("mlp.gate.weight", args.n_expert, args.dim),
            transform=lambda rows: rows.new_zeros(len(rows)),
            dtype=torch.float32,
        )
        return super().expert_recipes(args, layout) | {"ffn.score_bias": router}

    shapes = {"Flint-40B-A2.5B": {}}
