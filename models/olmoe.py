"""OLMoE (Muennighoff et al. 2024): the model of model.py with q/k norms over all heads."""

from model import ModelArgs
from models.config import HFConfig, common_fields, refuse_windows
from models.family import Family


class Olmoe(Family):
    name = "olmoe"
    architecture = "OlmoeForCausalLM"
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

    def fields(self, c: HFConfig) -> dict:
        refuse_windows(c)
        return common_fields(c) | {
            "qk_norm": "full",
            "norm_topk": c.flag("norm_topk_prob"),
            "clip_qkv": c.optional("clip_qkv"),
            "attention_bias": c.flag("attention_bias"),
        }

    def to_hf(self, args: ModelArgs) -> dict:
        return super().to_hf(args) | {
            "num_experts": args.n_expert,
            "norm_topk_prob": args.norm_topk,
            "clip_qkv": args.clip_qkv,
            "attention_bias": args.attention_bias,
        }

    shapes = {
        "OLMoE-1B-7B": ModelArgs(
            "olmoe",
            dim=2048,
            n_layer=16,
            n_head=16,
            n_kv_head=16,
            head_dim=128,
            intermediate=1024,
            n_expert=64,
            n_active=8,
            vocab_size=50304,
            max_position=4096,
            norm_topk=False,
            qk_norm="full",
        ),
    }
