"""DeepSeek-V2 and DeepSeek-V3: latent attention, groups of experts, shared experts."""

from models.family import ONE_MORE_LAYER
from models.gguf import Values
from models.latent_family import LatentFamily, LatentTransformer
from models.layers.group_routing import SigmoidRoutedMoE


class DeepseekV3Transformer(LatentTransformer):
    moe_class = SigmoidRoutedMoE


YARN_40 = dict(type="yarn", factor=40, original_max_position_embeddings=4096)


class DeepseekV2(LatentFamily):
    name = "deepseek_v2"
    defaults = dict(
        vocab_size=102400,
        hidden_size=4096,
        num_hidden_layers=32,
        max_position_embeddings=2048,
        num_attention_heads=32,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        bos_token_id=1,
        eos_token_id=2,
        n_routed_experts=64,
        moe_intermediate_size=1407,
        intermediate_size=11008,
        n_shared_experts=2,
        first_k_dense_replace=0,
        routed_scaling_factor=1.0,
        n_group=None,
        topk_group=None,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts_per_tok=None,
    )
    fixed = LatentFamily.fixed | {"norm_topk": False}
    only = {"attention_bias": False, "norm_topk_prob": False}
    nullable: tuple[str, ...] = "num_key_value_heads", "q_lora_rank", "norm_topk_prob", "head_dim"
    topk_methods: tuple[str, ...] = ("greedy", "group_limited_greedy")

    def is_gguf(self, values: Values) -> bool:
        return not values.has("exp_probs_b.bias")

    def gguf_config(self, values: Values) -> dict:
        config = super().gguf_config(values)
        return config | {"topk_method": self.topk_methods[config.get("n_group", 1) > 1]}

    shapes = {
        "DeepSeek-V2-Lite": dict(
            hidden_size=2048,
            num_hidden_layers=27,
            max_position_embeddings=163840,
            num_attention_heads=16,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            intermediate_size=10944,
            first_k_dense_replace=1,
            q_lora_rank=None,
            rope_scaling=YARN_40 | dict(mscale=0.707, mscale_all_dim=0.707),
        ),
    }


class DeepseekV3(DeepseekV2):
    name = "deepseek_v3"
    model_class = DeepseekV3Transformer
    defaults = DeepseekV2.defaults | dict(
        vocab_size=129280,
        hidden_size=7168,
        num_hidden_layers=61,
        max_position_embeddings=4096,
        num_attention_heads=128,
        num_key_value_heads=128,
        bos_token_id=0,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        intermediate_size=18432,
        n_shared_experts=1,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        eos_token_id=1,
        num_nextn_predict_layers=1,
    )
    field_of_key = LatentFamily.field_of_key | {"norm_topk_prob": "norm_topk"}
    fixed = LatentFamily.fixed
    only = {"attention_bias": False, "scoring_func": "sigmoid"}
    nullable = "num_key_value_heads", "q_lora_rank", "norm_topk_prob"
    topk_methods = ("noaux_tc",)
    has_score_bias = True
    published_head = ONE_MORE_LAYER

    def is_gguf(self, values: Values) -> bool:
        """GLM-4.7-Flash is of the same architecture, without groups."""
        return values.has("exp_probs_b.bias") and values.get("expert_group_count", 1) > 1

    def gguf_config(self, values: Values) -> dict:
        return LatentFamily.gguf_config(self, values)

    shapes = {
        "DeepSeek-V3": dict(
            max_position_embeddings=163840,
            rope_scaling=YARN_40 | dict(mscale=1.0, mscale_all_dim=1.0),
        ),
    }
