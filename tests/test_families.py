"""Families: what a config.json means to us, whichever keys it has, and what it may not say."""

import pytest
from conftest import FP8, any_json
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from families import FAMILIES, args_from_hf, published_format
from shapes import ARCHITECTURES

# What the files of these always say, and transformers' classes have no default for, or an odd one.
SAID = {
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
}
LONGROPE = {
    "short_factor": [1.0] * 64, "short_mscale": 1.2, "original_max_position_embeddings": 4096, "type": "longrope",
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
DEEPSEEK_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
HUB = {  # config.json of published models, by their name in ARCHITECTURES
    "Mixtral-8x7B": {
        "architectures": ["MixtralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "OLMoE-1B-7B": {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
        "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 50304,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880, "layer_types": KINDS * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05, "rope_theta": 150000, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        }, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    },
    "Granite-3.1-3b-a800m": {
        "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
        "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 1536,
        "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 131072, "model_type": "granitemoe",
        "num_attention_heads": 24, "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 40, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 10000000.0, "tie_word_embeddings": True, "vocab_size": 49155,
    },
    "Phi-3.5-MoE": {
        "architectures": ["PhimoeForCausalLM"], "attention_bias": True, "bos_token_id": 1, "eos_token_id": 32000,
        "hidden_act": "silu", "hidden_size": 4096, "input_jitter_noise": 0.01, "intermediate_size": 6400,
        "lm_head_bias": True, "max_position_embeddings": 131072, "model_type": "phimoe", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 16,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "rope_scaling": LONGROPE | {"short_mscale": 1.243163121016122}, "router_jitter_noise": 0.01,
        "sliding_window": 131072, "tie_word_embeddings": False, "vocab_size": 32064,
    },
    "GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "eos_token_id": [151329, 151336, 151338],
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
        "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001,
        "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": DEEPSEEK_YARN, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "bos_token_id": 0, "ep_size": 1,
        "eos_token_id": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": FP8,
        "rms_norm_eps": 1e-06, "rope_scaling": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    },
}  # fmt: skip
HUB["gpt-oss-120b"] = HUB["gpt-oss-20b"] | {
    "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": KINDS * 18
}  # fmt: skip
IN_FORMAT = {"gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4", "DeepSeek-V3": "fp8b"}


def config_of(family: str, changes: dict) -> dict:
    """A config.json that says no more than it must, and the changes; `family` without its "ForCausalLM"."""
    architecture = f"{family}ForCausalLM"
    return {"architectures": [architecture]} | SAID.get(architecture, {}) | changes


def but(parameters: dict, **change) -> dict:
    """The parameters with another value of one, as the last."""
    return {key: value for key, value in parameters.items() if key not in change} | change


# What is accepted


@pytest.mark.parametrize("architecture", FAMILIES)
def test_absent_keys_mean_what_they_mean_to_transformers(architecture):
    family, said = FAMILIES[architecture], SAID.get(architecture, {})
    config = AutoConfig.for_model(family.model_type)
    given = config.to_dict() | said
    assert args_from_hf({"architectures": [architecture], **said}) == args_from_hf(given)
    assert args_from_hf({"model_type": config.model_type, **said}) == args_from_hf(given)
    for key, value in family.defaults.items():
        if key in ("rope_theta", "rope_type", "partial_rotary_factor"):
            assert config.rope_parameters[key] == value
        elif key != "sliding_window":
            assert getattr(config, key) == value, key
    for key, value in family.rope.items():
        assert config.rope_parameters[key] == value, key
    assert config.rope_parameters["rope_theta"] == args_from_hf(given).rope_theta


@pytest.mark.parametrize("name", HUB)
def test_configs_as_they_are_on_the_hub(name):
    assert args_from_hf(HUB[name]) == ARCHITECTURES[name]
    assert published_format(HUB[name]) == IN_FORMAT.get(name)


def test_a_key_of_another_familys_router_changes_nothing():
    """Mixtral's files have it too, and only Phi's routers are a SparseMixer, of two experts."""
    args = args_from_hf(config_of("Mixtral", dict(router_jitter_noise=0.0, num_experts_per_tok=3)))
    assert (args.n_active, args.mixer_eps) == (3, None)


# What is refused

# The last item of each is named: of rope parameters, the last one of these.
REFUSED = {
    "Mixtral": [
        dict(model_type="qwen3_moe"), dict(hidden_act="gelu"), dict(mlp_bias=True), dict(lm_head_bias=True),
        dict(kv_lora_rank=512), dict(embedding_multiplier=12.0), dict(attention_multiplier=0.1),
        dict(residual_multiplier=0.2), dict(logits_scaling=8), dict(routed_scaling_factor=2.5),
        dict(rope_theta=0), dict(rope_theta="1e6"), dict(rope_scaling={"factor": 2.0, "type": "linear"}),
        dict(rope_scaling={"factor": 2.0, "rope_type": "dynamic"}), dict(rope_scaling=LONGROPE),
        dict(num_key_value_heads=5), dict(num_experts_per_tok=9), dict(num_hidden_layers=0),
        dict(num_hidden_layers=10**12), dict(hidden_size=4096.0), dict(hidden_size=True), dict(vocab_size="32000"),
        dict(head_dim=127), dict(sliding_window=-1), dict(rms_norm_eps=-1e-5), dict(tie_word_embeddings=1),
    ],
    "Qwen3Moe": [
        dict(rope_scaling={"factor": 4.0, "rope_type": "yarn"}),
        dict(rope_parameters={"rope_theta": 1e4, "rope_type": "llama3"}),
        dict(rope_parameters={"partial_rotary_factor": 0.5}), dict(moe_intermediate_size=700), dict(mlp_only_layers=3),
        dict(mlp_only_layers=[True]), dict(decoder_sparse_step=0), dict(layer_types=KINDS[::-1]),
        dict(shared_expert_intermediate_size=512), dict(use_qk_norm=True), dict(num_nextn_predict_layers=1),
        dict(scoring_func="sigmoid"), dict(first_k_dense_replace=1), dict(qkv_bias=True),
    ],
    "Qwen2Moe": [
        dict(qkv_bias="yes"), dict(use_qkv_bias=True), dict(use_sliding_window=True), dict(n_shared_experts=1),
        dict(shared_expert_intermediate_size=-1), dict(hidden_act="relu"),
    ],
    "Olmoe": [
        dict(clip_qkv=0), dict(norm_topk_prob="yes"), dict(hidden_act="gelu"), dict(attention_bias=0),
        dict(use_sliding_window=1), dict(partial_rotary_factor=0.5),
    ],
    "GraniteMoe": [
        dict(residual_multiplier=0), dict(attention_multiplier="1"), dict(embedding_multiplier=True),
        dict(logits_scaling=-1.0), dict(num_local_experts=1.5), dict(shared_intermediate_size=1024),
        dict(rope_scaling={"factor": 2.0, "type": "yarn"}), dict(hidden_act="gelu"), dict(mlp_bias=True),
    ],
    "Phimoe": [
        dict(rope_scaling={"factor": 2.0, "type": "linear"}), dict(num_experts_per_tok=4), dict(router_jitter_noise=0),
        dict(lm_head_bias=1), dict(hidden_act="gelu"), dict(num_local_experts="16"),
        dict(rope_scaling=but(LONGROPE, short_factor=[0.0] * 64)), dict(rope_scaling=but(LONGROPE, short_mscale=None)),
        dict(rope_scaling=but(LONGROPE, original_max_position_embeddings=None)),
    ],
    "Glm4Moe": [
        dict(n_group=8), dict(topk_group=4), dict(partial_rotary_factor=0.4), dict(n_routed_experts=0),
        dict(rope_parameters={"partial_rotary_factor": 0.375}), dict(n_shared_experts=-1),
        dict(first_k_dense_replace="1"), dict(routed_scaling_factor=0), dict(attention_bias=1), dict(use_qk_norm=1),
        dict(norm_topk_prob=1), dict(num_nextn_predict_layers=-1), dict(head_dim=None, hidden_size=4096),
        dict(hidden_act="gelu"),
    ],
    "GptOss": [
        dict(sliding_window=0), dict(swiglu_limit=0.0), dict(swiglu_alpha="1.702"),
        dict(rope_scaling=but(YARN, factor=0)), dict(rope_scaling=but(YARN, factor="32")),
        dict(rope_scaling=but(YARN, original_max_position_embeddings=None)), dict(rope_scaling=but(YARN, truncate=1)),
        dict(rope_scaling=but(YARN, beta_fast=[32])), dict(rope_scaling=but(YARN, rope_type="longrope")),
    ],
    "DeepseekV2": [
        dict(norm_topk_prob=True), dict(scoring_func="sigmoid"), dict(num_experts_per_tok=None), dict(moe_layer_freq=2),
        dict(topk_method="group_limited_greedy", n_group=None), dict(num_key_value_heads=8),
        dict(rope_scaling={"factor": 2.0, "type": "linear"}),
    ],
    "DeepseekV3": [
        dict(scoring_func="softmax"), dict(topk_method="greedy"), dict(rope_interleave=False),
        dict(attention_bias=True), dict(n_group=7), dict(topk_group=9), dict(num_experts_per_tok=33, topk_group=1),
        dict(v_head_dim=256), dict(qk_rope_head_dim=63), dict(kv_lora_rank=0), dict(q_lora_rank="x"),
        dict(rope_scaling=but(YARN, mscale_all_dim="x")),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("family", "changes"), [(family, row) for family, rows in REFUSED.items() for row in rows])
def test_a_value_that_is_not_supported_is_named(family, changes):
    key, value = list(changes.items())[-1]
    if isinstance(value, dict):
        key, value = list(value.items())[-1]
    with pytest.raises(ValueError) as error:
        args_from_hf(config_of(family, changes))
    named = f" {'rope_type' if key == 'type' else key} = {value!r:.80} is not supported"
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Llama", {}, "'LlamaForCausalLM'.*MixtralForCausalLM, Qwen3Moe.*Olmoe"),
        ("Mixtral", {"architectures": None, "model_type": "llama4"}, "'llama4'"),
        ("Mixtral", {"architectures": []}, r"architectures = \[\]"),
        ("Mixtral", {"hidden_size": 4100}, "hidden_size = 4100.*multiple of num_attention_heads = 32"),
        ("Mixtral", {"hidden_size": 4100, "head_dim": 128}, "hidden_size = 4100.*multiple of 8"),
        ("Qwen3Moe", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ("Qwen3Moe", {"rope_parameters": "default"}, "rope parameters 'default'"),
        ("Phimoe", {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 63}}, "short_factor = .*64 positive numbers"),
        ("GptOss", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types = .*'sliding_attention' or"),
        ("GptOss", {"layer_types": ["full_attention"]}, "layer_types = .*there are 36 layers"),
        ("DeepseekV2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'.*'greedy' and 'group_limited_greedy'"),
        ("DeepseekV3", {"n_group": 256}, "n_group = 256.*at least two"),
    ],
)
def test_what_is_not_supported_is_told_with_its_reason(family, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        args_from_hf(config_of(family, changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("Mixtral", {"quant_method": "gptq", "bits": 4}, " = 'gptq'"),
        ("Mixtral", {"quant_method": "awq"}, " = 'awq'"),
        ("Qwen3Moe", FP8 | {"quant_method": "compressed-tensors"}, " = 'compressed-tensors'"),
        ("Qwen3Moe", FP8 | {"fmt": "e5m2"}, "'s fmt = 'e5m2'"),
        ("Qwen3Moe", FP8 | {"activation_scheme": "static"}, "'s activation_scheme = 'static'"),
        ("Qwen3Moe", FP8 | {"weight_block_size": [1, 128]}, "'s weight_block_size = [1, 128]"),
        ("Qwen3Moe", {"quant_method": "fp8"}, "'s fmt = None"),
        ("Qwen3Moe", "fp8", " = 'fp8'"),
        ("Qwen3Moe", {"quant_method": "mxfp4"}, " = 'mxfp4'"),
        ("Glm4Moe", {"quant_method": "compressed-tensors"}, " = 'compressed-tensors'"),
        ("GptOss", FP8, " = 'fp8'"),
    ],
)
def test_a_published_format_that_is_not_run_is_named(family, given, message):
    config = config_of(family, {"quantization_config": given})
    for read in (args_from_hf, published_format):
        with pytest.raises(ValueError) as error:
            read(config)
        assert f": quantization_config{message} is not supported; fetch the original" in str(error.value)
        assert "\n" not in str(error.value)


ROPE_AND_FORMAT = "rope_type", "type", "rope_theta", "factor", "quant_method"


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_config_gives_arguments_or_a_value_error(data):
    model_types = [family.model_type for family in FAMILIES.values()]
    config = AutoConfig.for_model(data.draw(st.sampled_from(model_types))).to_dict()
    extra = ["rope_scaling", "layer_types", "head_dim", "partial_rotary_factor", "quantization_config"]
    keys = st.sampled_from(sorted(config) + extra)
    config |= data.draw(st.dictionaries(keys, any_json(*ROPE_AND_FORMAT), max_size=3))
    try:
        args = args_from_hf(config)
    except ValueError as error:
        assert str(error)
    else:
        assert args.n_head % args.n_kv_head == 0 and args.n_active <= args.n_expert
