"""Qwen3-MoE (Yang et al. 2025), such as 30B-A3B: the model of model.py with per-head q/k norms."""

from models.gguf import Values, dense_config
from models.layers.scaled_rope import ScaledRopeFamily


class Qwen3Moe(ScaledRopeFamily):
    name = "qwen3_moe"
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
    field_of_key = {"norm_topk_prob": "norm_topk", "attention_bias": "attention_bias"}
    fixed = {"qk_norm": "head"}
    has_window = True
    gguf = "qwen3moe"

    def gguf_config(self, values: Values) -> dict:
        """llama.cpp has no value for norm_topk_prob: it is true."""
        return super().gguf_config(values) | dense_config(values) | {"norm_topk_prob": True}

    shapes = {
        "Qwen3-30B-A3B": dict(
            num_hidden_layers=48,
            max_position_embeddings=40960,
            head_dim=128,
            rope_theta=1e6,
            norm_topk_prob=True,
        ),
        "Qwen3-30B-A3B-2507": dict(  # Instruct, Thinking and Coder
            num_hidden_layers=48,
            max_position_embeddings=262144,
            head_dim=128,
            rope_theta=1e7,
            norm_topk_prob=True,
        ),
    }
