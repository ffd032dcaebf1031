"""Mixtral 8x7B and 8x22B (Jiang et al. 2024): the model of model.py as it is."""

from model import ModelArgs
from models.family import Family
from models.gguf import MadeTable, rotated_in_pairs


class Mixtral(Family):
    name = "mixtral"
    defaults = dict(
        vocab_size=32000,
        hidden_size=4096,
        num_hidden_layers=32,
        max_position_embeddings=131072,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=14336,
        bos_token_id=1,
        eos_token_id=2,
    )
    renamed_keys = {"num_local_experts": "num_experts"}
    nullable = ("head_dim",)
    has_window = True
    renamed_tensors = (
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    )

    gguf = "llama"
    gguf_keys = {"sliding_window": "attention.sliding_window"}

    def gguf_layer(self, args: ModelArgs) -> MadeTable:
        return super().gguf_layer(args) | rotated_in_pairs(args.n_head, args.n_kv_head)

    shapes = {
        "Mixtral-8x7B": dict(max_position_embeddings=32768),
        "Mixtral-8x22B": dict(
            vocab_size=32768,
            hidden_size=6144,
            num_hidden_layers=56,
            max_position_embeddings=65536,
            num_attention_heads=48,
            intermediate_size=16384,
        ),
        "TinyMistral-6x248M": dict(
            vocab_size=32005,
            hidden_size=1024,
            num_hidden_layers=12,
            max_position_embeddings=32768,
            rope_theta=1e4,
            rms_norm_eps=1e-6,
            num_local_experts=6,
            intermediate_size=4096,
        ),
    }
