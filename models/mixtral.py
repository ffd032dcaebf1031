"""Mixtral 8x7B and 8x22B (Jiang et al. 2024): the model of model.py as it is."""

from model import ModelArgs
from models.config import HFConfig, common_fields, window_field
from models.family import Family


class Mixtral(Family):
    name = "mixtral"
    architecture = "MixtralForCausalLM"
    defaults = dict(
        vocab_size=32000,
        hidden_size=4096,
        num_hidden_layers=32,
        max_position_embeddings=131072,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        num_experts=8,
        num_experts_per_tok=2,
        intermediate_size=14336,
        bos_token_id=1,
        eos_token_id=2,
    )
    renames = (
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    )

    def fields(self, c: HFConfig) -> dict:
        return common_fields(c) | window_field(c)

    def to_hf(self, args: ModelArgs) -> dict:
        return super().to_hf(args) | {
            "num_local_experts": args.n_expert,
            "sliding_window": args.sliding_window,
        }

    shapes = {
        "Mixtral-8x7B": ModelArgs(
            "mixtral",
            dim=4096,
            n_layer=32,
            n_head=32,
            n_kv_head=8,
            head_dim=128,
            intermediate=14336,
            n_expert=8,
            n_active=2,
            vocab_size=32000,
            max_position=32768,
            rope_theta=1e6,
        ),
        "Mixtral-8x22B": ModelArgs(
            "mixtral",
            dim=6144,
            n_layer=56,
            n_head=48,
            n_kv_head=8,
            head_dim=128,
            intermediate=16384,
            n_expert=8,
            n_active=2,
            vocab_size=32768,
            max_position=65536,
            rope_theta=1e6,
        ),
        "TinyMistral-6x248M": ModelArgs(
            "mixtral",
            dim=1024,
            n_layer=12,
            n_head=32,
            n_kv_head=8,
            head_dim=32,
            intermediate=4096,
            n_expert=6,
            n_active=2,
            vocab_size=32005,
            max_position=32768,
            norm_eps=1e-6,
        ),
    }
