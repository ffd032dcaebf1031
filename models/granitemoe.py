"""Granite-MoE: Mixtral with four multipliers."""

from models.layers.granite import GraniteFamily


class GraniteMoe(GraniteFamily):
    name = "granitemoe"
    gguf = "granitemoe"

    shapes = {
        "Granite-3.1-3b-a800m": dict(
            vocab_size=49155,
            hidden_size=1536,
            max_position_embeddings=131072,
            num_attention_heads=24,
            num_key_value_heads=8,
            rope_theta=1e7,
            tie_word_embeddings=True,
            num_local_experts=40,
            num_experts_per_tok=8,
            intermediate_size=512,
            attention_multiplier=0.015625,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=6.0,
        ),
    }
