"""OLMoE (Muennighoff et al. 2024): the model of model.py with q/k norms over all heads."""

from models.gguf import Values
from models.layers.scaled_rope import ScaledRopeFamily


class Olmoe(ScaledRopeFamily):
    name = "olmoe"
    defaults = dict(
        vocab_size=50304,
        hidden_size=2048,
        num_hidden_layers=16,
        max_position_embeddings=4096,
        num_attention_heads=16,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        num_experts=64,
        num_experts_per_tok=8,
        intermediate_size=2048,
        eos_token_id=50279,
    )
    field_of_key = {
        "norm_topk_prob": "norm_topk",
        "clip_qkv": "clip_qkv",
        "attention_bias": "attention_bias",
    }
    nullable = ("num_key_value_heads",)
    fixed = {"qk_norm": "full"}
    gguf = "olmoe"

    def gguf_config(self, values: Values) -> dict:
        """llama.cpp neither normalizes the weights of experts nor clips."""
        return super().gguf_config(values) | {"norm_topk_prob": False}

    shapes = {"OLMoE-1B-7B": dict(intermediate_size=1024)}
