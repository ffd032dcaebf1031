"""Qwen3-MoE (Yang et al. 2025), such as 30B-A3B: the model of model.py with per-head q/k norms."""

from model import ModelArgs
from models.config import HFConfig, common_fields, dense_fields, window_field
from models.family import Family


class Qwen3Moe(Family):
    name = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    defaults = dict(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=24,
        max_position_embeddings=32768,
        num_attention_heads=32,
        num_key_value_heads=4,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        intermediate_size=6144,
        use_sliding_window=False,
        sliding_window=4096,
    )

    def fields(self, c: HFConfig) -> dict:
        fields = common_fields(c, "moe_intermediate_size") | dense_fields(c) | window_field(c)
        return fields | {
            "qk_norm": "head",
            "norm_topk": c.flag("norm_topk_prob"),
            "attention_bias": c.flag("attention_bias"),
        }

    def to_hf(self, args: ModelArgs) -> dict:
        return super().to_hf(args) | {
            "num_experts": args.n_expert,
            "moe_intermediate_size": args.intermediate,
            "norm_topk_prob": args.norm_topk,
            "attention_bias": args.attention_bias,
            "mlp_only_layers": list(args.dense_layers),
            "use_sliding_window": args.sliding_window is not None,
            "sliding_window": args.sliding_window,
        }

    shapes = {
        "Qwen3-30B-A3B": ModelArgs(
            "qwen3_moe",
            dim=2048,
            n_layer=48,
            n_head=32,
            n_kv_head=4,
            head_dim=128,
            intermediate=768,
            n_expert=128,
            n_active=8,
            vocab_size=151936,
            max_position=40960,
            rope_theta=1e6,
            norm_eps=1e-6,
            qk_norm="head",
        ),
    }
