"""GLM-4.7-Flash: DeepSeek-V3's latent attention and sigmoid routing, without groups."""

from model import ModelArgs
from models.config import HFConfig, read_mlp_types, unsupported
from models.family import ONE_MORE_LAYER
from models.gguf import Values
from models.latent_family import LatentFamily, LatentTransformer
from models.layers.group_routing import SigmoidRoutedMoE


class Glm4MoeLiteTransformer(LatentTransformer):
    moe_class = SigmoidRoutedMoE


class Glm4MoeLite(LatentFamily):
    name = "glm4_moe_lite"
    model_class = Glm4MoeLiteTransformer
    defaults = dict(
        vocab_size=154880,
        hidden_size=2048,
        num_hidden_layers=47,
        max_position_embeddings=202752,
        num_attention_heads=20,
        num_key_value_heads=20,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=1,
        norm_topk_prob=True,
        n_routed_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
        intermediate_size=10240,
        n_shared_experts=1,
        routed_scaling_factor=1.8,
        n_group=1,
        topk_group=1,
        kv_lora_rank=512,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
    )
    field_of_key = LatentFamily.field_of_key | {"norm_topk_prob": "norm_topk"}
    nullable = ("q_lora_rank",)
    # transformers reads mlp_layer_types instead of first_k_dense_replace; absent, it means 1.
    only = {"attention_bias": False, "scoring_func": "sigmoid", "first_k_dense_replace": 1}
    topk_methods = ("noaux_tc",)
    has_score_bias = True
    published_head = ONE_MORE_LAYER

    def is_gguf(self, values: Values) -> bool:
        """DeepSeek-V3 is of the same architecture, with groups."""
        return values.has("exp_probs_b.bias") and values.get("expert_group_count", 1) == 1

    def gguf_config(self, values: Values) -> dict:
        config = super().gguf_config(values)
        first = config.pop("first_k_dense_replace", 1)
        sparse = range(first, values.layers) if type(first) is int else ()
        kinds = ["sparse" if n in sparse else "dense" for n in range(min(values.layers, 4096))]
        return config | {"mlp_layer_types": kinds}

    def from_hf(self, config: dict) -> ModelArgs:
        """Check the count of MTP layers, which transformers' config class lacks.

        The converter makes a head of the first of these layers.
        """
        count = config.get("num_nextn_predict_layers") or 0
        if type(count) is not int or not 0 <= count <= 4096:
            why = "an integer from 0 to 4096 is needed"
            raise unsupported("num_nextn_predict_layers", count, why)
        ignored = {"num_nextn_predict_layers"}
        if config.get("mlp_layer_types") is not None:
            ignored.add("first_k_dense_replace")
        return super().from_hf({k: v for k, v in config.items() if k not in ignored})

    def arg_fields(self, c: HFConfig) -> dict:
        read_mlp_types(c, first_dense=1)
        return super().arg_fields(c)

    # config.json of zai-org/GLM-4.7-Flash. It has the defaults but for RoPE's theta.
    shapes = {"GLM-4.7-Flash": dict(rope_theta=1e6, num_nextn_predict_layers=1)}
