"""GLM-4.5 and GLM-4.5-Air: sigmoid routing, a shared expert, half of each head rotated."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model import Block, Linear
from models.config import HFConfig, rotary_dim
from models.family import ONE_MORE_LAYER, PublishedLayout
from models.gguf import NEXT, POST_ATTENTION_NORM, Values, dense_config, partial_rotary
from models.layers.group_routing import SigmoidRoutedMoE
from models.layers.scaled_rope import (
    ScaledRopeArgs,
    ScaledRopeFamily,
    ScaledRopeTransformer,
    scaled_rope_table,
)
from models.tensors import Recipes, score_bias_recipe


@dataclass(frozen=True)
class Glm4MoeArgs(ScaledRopeArgs):
    qkv_bias: bool = False
    shared_intermediate: int = 0  # intermediate dim of the shared expert; 0: none
    routed_scale: float = 1.0  # of routing weights
    rotary_dim: int | None = None  # the first numbers of a head that are rotated; None: all

    n_group = n_active_group = 1  # for SigmoidRoutedMoE: GLM has no groups of experts

    def constraints(self) -> dict[str, bool]:
        rotated = self.rotary_dim or 2
        fits = rotated % 2 == 0 and self.head_dim % rotated == 0
        return super().constraints() | {"rotary_dim": fits}


class Glm4MoeTransformer(ScaledRopeTransformer):
    args: Glm4MoeArgs

    def make_block(self, args: Glm4MoeArgs, layer: int) -> Block:
        block = Block(args, layer)
        qkv_dim = (args.n_head + 2 * args.n_kv_head) * args.head_dim
        block.attention.wqkv = Linear(args.dim, qkv_dim, bias=args.qkv_bias)
        block.attention.rotary_dim = args.rotary_dim or args.head_dim
        if layer not in args.dense_layers:
            block.ffn = SigmoidRoutedMoE(args)
        return block

    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        rotated = self.args.rotary_dim or self.args.head_dim
        unrotated = self.args.head_dim - rotated
        return scaled_rope_table(self.args, rotated, length, device, unrotated)


class Glm4Moe(ScaledRopeFamily):
    name = "glm4_moe"
    args_class = Glm4MoeArgs
    model_class = Glm4MoeTransformer
    defaults = dict(
        vocab_size=151552,
        hidden_size=4096,
        num_hidden_layers=46,
        max_position_embeddings=131072,
        num_attention_heads=96,
        num_key_value_heads=8,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        norm_topk_prob=True,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        intermediate_size=10944,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        partial_rotary_factor=0.5,
        attention_bias=False,
        use_qk_norm=False,
        num_nextn_predict_layers=1,
    )
    # attention_bias is of queries, keys and values alone.
    renamed_keys = {"n_routed_experts": "num_experts", "attention_bias": "qkv_bias"}
    field_of_key = {
        "norm_topk_prob": "norm_topk",
        "qkv_bias": "qkv_bias",
        "routed_scaling_factor": "routed_scale",
    }
    nullable = ("partial_rotary_factor",)
    only = {"scoring_func": "sigmoid"}
    published_head = ONE_MORE_LAYER
    renamed_tensors = ((".mlp.shared_experts.", ".mlp.shared_expert."),)

    gguf = "glm4moe"
    gguf_keys = {
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "num_nextn_predict_layers": NEXT,
    }
    gguf_tensors = POST_ATTENTION_NORM

    def gguf_config(self, values: Values) -> dict:
        config = super().gguf_config(values) | dense_config(values) | partial_rotary(values)
        config.pop("mlp_only_layers", None)  # first_k_dense_replace says the same
        return config | {"use_qk_norm": values.has("attn_q_norm.weight")}

    def arg_fields(self, c: HFConfig) -> dict:
        fields = super().arg_fields(c)
        rotated = rotary_dim(c)
        return fields | {
            "qk_norm": "head" if c.flag("use_qk_norm") else "none",
            "rotary_dim": rotated if rotated < c["head_dim"] else None,
        }

    def to_hf(self, args: Glm4MoeArgs) -> dict:
        config = super().to_hf(args) | {"use_qk_norm": args.qk_norm == "head"}
        factor = (args.rotary_dim or args.head_dim) / args.head_dim
        config["rope_parameters"]["partial_rotary_factor"] = factor
        return config

    def expert_recipes(self, args: Glm4MoeArgs, layout: PublishedLayout) -> Recipes:
        return super().expert_recipes(args, layout) | score_bias_recipe(args)

    shapes = {"GLM-4.5-Air": dict(head_dim=128, rope_theta=1e6, attention_bias=True)}
