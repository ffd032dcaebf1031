"""GLM-4.5 and GLM-4.5-Air: sigmoid routing, a shared expert, half of each head rotated."""

from dataclasses import dataclass

from model import Block, Linear
from models.config import HFConfig
from models.family import ONE_MORE_LAYER
from models.gguf import NEXT, POST_ATTENTION_NORM, Values, dense_config
from models.layers.group_routing import SigmoidRoutedMoE
from models.layers.partial_rope import (
    PartialRopeArgs,
    PartialRopeFamily,
    PartialRopeTransformer,
)


@dataclass(frozen=True)
class Glm4MoeArgs(PartialRopeArgs):
    qkv_bias: bool = False
    shared_intermediate: int = 0  # intermediate dim of the shared expert; 0: none
    routed_scale: float = 1.0  # of routing weights


class Glm4MoeTransformer(PartialRopeTransformer):
    args: Glm4MoeArgs

    def make_block(self, args: Glm4MoeArgs, layer: int) -> Block:
        block = super().make_block(args, layer)
        qkv_dim = (args.n_head + 2 * args.n_kv_head) * args.head_dim
        block.attention.wqkv = Linear(args.dim, qkv_dim, bias=args.qkv_bias)
        if layer not in args.dense_layers:
            block.ffn = SigmoidRoutedMoE(args)
        return block


class Glm4Moe(PartialRopeFamily):
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
    only = {"scoring_func": "sigmoid"}
    has_score_bias = True
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
        config = super().gguf_config(values) | dense_config(values)
        config.pop("mlp_only_layers", None)  # first_k_dense_replace says the same
        return config | {"use_qk_norm": values.has("attn_q_norm.weight")}

    def arg_fields(self, c: HFConfig) -> dict:
        fields = super().arg_fields(c)
        return fields | {"qk_norm": "head" if c.flag("use_qk_norm") else "none"}

    shapes = {"GLM-4.5-Air": dict(head_dim=128, rope_theta=1e6, attention_bias=True)}
