"""GLM-4.5 and GLM-4.5-Air: sigmoid routing, a shared expert, half of each head rotated."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model import Block, Linear, ModelArgs, Transformer
from models.config import HFConfig, common_fields, dense_fields, refuse_windows, rotary_dim
from models.family import Family, Layout, Shard, shared_expert_shards
from models.layers.group_routing import SigmoidRoutedMoE
from models.tensors import (
    Recipe,
    attention_recipes,
    expert_recipes,
    score_bias_recipe,
    shared_expert_recipes,
)
from ops.rope import rope_frequencies, rope_table


@dataclass(frozen=True)
class Glm4MoeArgs(ModelArgs):
    qkv_bias: bool = False
    shared_intermediate: int = 0  # intermediate dim of the shared expert; 0: none
    routed_scale: float = 1.0  # of routing weights
    rotary_dim: int | None = None  # the first numbers of a head that are rotated; None: all

    n_group = n_active_group = 1  # for SigmoidRoutedMoE: GLM has no groups of experts

    def constraints(self) -> dict[str, bool]:
        rotated = self.rotary_dim or 2
        fits = rotated % 2 == 0 and self.head_dim % rotated == 0
        return super().constraints() | {"rotary_dim": fits}


class Glm4MoeTransformer(Transformer):
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
        frequencies = rope_frequencies(rotated, self.args.rope_theta, device)
        return rope_table(frequencies, length, unrotated=self.args.head_dim - rotated)


class Glm4Moe(Family):
    name = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
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
    keys = {"n_routed_experts": "num_experts", "attention_bias": "qkv_bias"}
    only = {"scoring_func": "sigmoid"}
    renames = ((".mlp.shared_experts.", ".mlp.shared_expert."),)
    sharded_fields = ("dense_intermediate", "shared_intermediate")

    def fields(self, c: HFConfig) -> dict:
        refuse_windows(c)
        fields = common_fields(c, "moe_intermediate_size") | dense_fields(c)
        c.count("num_nextn_predict_layers")  # the converter leaves these layers out
        rotated = rotary_dim(c)
        return fields | {
            "qk_norm": "head" if c.flag("use_qk_norm") else "none",
            "norm_topk": c.flag("norm_topk_prob"),
            "qkv_bias": c.flag("qkv_bias"),
            "shared_intermediate": c.count("n_shared_experts") * fields["intermediate"],
            "routed_scale": c.number("routed_scaling_factor"),
            "rotary_dim": rotated if rotated < fields["head_dim"] else None,
        }

    def to_hf(self, args: Glm4MoeArgs) -> dict:
        config = super().to_hf(args) | {
            "n_routed_experts": args.n_expert,
            "moe_intermediate_size": args.intermediate,
            "n_shared_experts": args.shared_intermediate // args.intermediate,
            "first_k_dense_replace": len(args.dense_layers),
            "routed_scaling_factor": args.routed_scale,
            "norm_topk_prob": args.norm_topk,
            "attention_bias": args.qkv_bias,
            "use_qk_norm": args.qk_norm == "head",
            "num_nextn_predict_layers": 0,
        }
        factor = (args.rotary_dim or args.head_dim) / args.head_dim
        config["rope_parameters"]["partial_rotary_factor"] = factor
        return config

    def attention_recipes(self, args: Glm4MoeArgs) -> dict[str, Recipe]:
        return attention_recipes(args, args.qkv_bias)

    def expert_recipes(self, args: Glm4MoeArgs, layout: Layout) -> dict[str, Recipe]:
        experts = expert_recipes(args, layout.fused)
        return experts | shared_expert_recipes(args) | score_bias_recipe(args)

    def shard_table(self, args: Glm4MoeArgs) -> dict[str, Shard]:
        return super().shard_table(args) | shared_expert_shards(args)

    shapes = {
        "GLM-4.5-Air": Glm4MoeArgs(
            "glm4_moe",
            dim=4096,
            n_layer=46,
            n_head=96,
            n_kv_head=8,
            head_dim=128,
            intermediate=1408,
            n_expert=128,
            n_active=8,
            vocab_size=151552,
            max_position=131072,
            rope_theta=1e6,
            qkv_bias=True,
            dense_layers=(0,),
            dense_intermediate=10944,
            shared_intermediate=1408,
            rotary_dim=64,
        ),
    }
