"""Qwen2-MoE and Qwen1.5-MoE: a gated shared expert, biases of queries, keys and values alone."""

from dataclasses import dataclass

from model import Block, Linear
from models.config import HFConfig, listed_kinds
from models.gguf import Values, dense_config
from models.layers.scaled_rope import ScaledRopeArgs, ScaledRopeFamily, ScaledRopeTransformer
from models.layers.shared_expert import GatedSharedExpertMoE


@dataclass(frozen=True)
class Qwen2MoeArgs(ScaledRopeArgs):
    qkv_bias: bool = True
    shared_intermediate: int = 0  # intermediate dim of the shared expert; 0: none


class Qwen2MoeTransformer(ScaledRopeTransformer):
    def make_block(self, args: Qwen2MoeArgs, layer: int) -> Block:
        block = Block(args, layer)
        qkv_dim = (args.n_head + 2 * args.n_kv_head) * args.head_dim
        block.attention.wqkv = Linear(args.dim, qkv_dim, bias=args.qkv_bias)
        if layer not in args.dense_layers:
            block.ffn = GatedSharedExpertMoE(args)
        return block


class Qwen2Moe(ScaledRopeFamily):
    name = "qwen2_moe"
    args_class = Qwen2MoeArgs
    model_class = Qwen2MoeTransformer
    defaults = dict(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=24,
        max_position_embeddings=32768,
        num_attention_heads=16,
        num_key_value_heads=16,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        qkv_bias=True,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        intermediate_size=5632,
        shared_expert_intermediate_size=5632,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=28,
    )
    field_of_key = {
        "norm_topk_prob": "norm_topk",
        "qkv_bias": "qkv_bias",
        "shared_expert_intermediate_size": "shared_intermediate",
    }
    has_window = True
    has_shared_gate = True

    def window_fields(self, c: HFConfig) -> dict:
        """Return the window of all layers. Each has one by its layer_types alone."""
        kinds = listed_kinds(c, ("sliding_attention", "full_attention"))
        if c.flag("use_sliding_window") and kinds is None:
            why = "every other layer would have one, up to max_window_layers"
            c.refuse("use_sliding_window", why)
        if kinds and set(kinds) == {"full_attention"}:
            c["use_sliding_window"] = False
        return super().window_fields(c)

    gguf = "qwen2moe"
    gguf_keys = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}

    def gguf_config(self, values: Values) -> dict:
        """llama.cpp does not normalize the weights of experts."""
        config = super().gguf_config(values) | dense_config(values)
        shared = values.width("ffn_up_shexp.weight", 0) or 0
        config.setdefault("shared_expert_intermediate_size", shared)
        bias = config.pop("attention_bias", False)
        return config | {"qkv_bias": bias, "norm_topk_prob": False}

    shapes = {"Qwen1.5-MoE-A2.7B": dict(max_position_embeddings=8192, rope_theta=1e6)}
