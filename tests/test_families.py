"""Families: the args of a config.json under old and new keys, and which values are refused."""

import json
from pathlib import Path

import pytest
from conftest import FP8, any_json
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, FineGrainedFP8Config

from cli.command import printable
from model import ModelArgs
from models import ARCHITECTURES, FAMILIES, args_from_hf, family_of_config

# Keys that these families' files always have, and for which transformers has no or an odd default.
GEMMA4 = {
    **dict(enable_moe_block=True, attention_k_eq_v=True, hidden_size_per_layer_input=0),
    **dict(num_experts=128, top_k_experts=8, moe_intermediate_size=704),
}
INDEXER = {
    **dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=256),
    **dict(indexer_budget=2048, indexer_compress_ratio=4),
}
REQUIRED = {
    "Qwen4ExpForCausalLM": INDEXER,
    "Qwen4ExpForConditionalGeneration": {"text_config": INDEXER},
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": {"text_config": GEMMA4},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * 16},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv"] * 32},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
}
LONGROPE = {
    "short_factor": [1.0] * 64,
    "short_mscale": 1.2,
    "original_max_position_embeddings": 4096,
    "type": "longrope",
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
KINDS = ["sliding_attention", "full_attention"]
# config.json of published models, by their name in ARCHITECTURES.
HUB = json.loads((Path(__file__).parent / "data" / "hub_configs.json").read_text())
IN_FORMAT = {"gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4", "DeepSeek-V3": "fp8b"}


AWQ = {"quant_method": "awq", "bits": 4}
GPTQ = {"quant_method": "gptq", "bits": 4}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def published_format(config: dict) -> str | None:
    return family_of_config(config).published_format(config)


def config_of(family: str, changes: dict) -> dict:
    """Return a minimal config.json with changes; `family` lacks its "ForCausalLM"."""
    architecture = f"{family}ForCausalLM"
    return {"architectures": [architecture]} | REQUIRED.get(architecture, {}) | changes


def but(parameters: dict, **change) -> dict:
    """Return the parameters with one changed value, as the last."""
    return {key: value for key, value in parameters.items() if key not in change} | change


# Accepted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", FAMILIES)
def test_absent_keys_have_the_defaults_of_transformers(architecture):
    family, required = FAMILIES[architecture], REQUIRED.get(architecture, {})
    config = AutoConfig.for_model(family.name)
    given, config = config.to_dict() | required, config.get_text_config()
    config.allow_global_per_layer_attribute_access = True
    assert args_from_hf({"architectures": [architecture], **required}) == args_from_hf(given)
    assert args_from_hf({"model_type": family.name, **required}) == args_from_hf(given)
    rope = getattr(config, "rope_parameters", None) or {}  # {}: no layer has RoPE
    rope = rope.get("sliding_attention", rope)  # Gemma 4 and Laguna have a set for each kind
    for key, value in family.defaults.items():
        if key in ("rope_theta", "rope_type", "partial_rotary_factor"):
            assert rope.get(key, 1.0) == value
        elif key != "sliding_window":
            assert getattr(config, key) == value, key
    for key, value in family.rope.items():
        assert config.rope_parameters[key] == value, key
    assert not rope or rope["rope_theta"] == args_from_hf(given).rope_theta


@pytest.mark.parametrize("name", HUB)
def test_configs_from_the_hub(name):
    assert args_from_hf(HUB[name]) == ARCHITECTURES[name]
    assert published_format(HUB[name]) == IN_FORMAT.get(name)


def test_a_key_of_another_familys_router_is_ignored():
    """Mixtral's files have router_jitter_noise too; only Phi routes by SparseMixer."""
    args = args_from_hf(config_of("Mixtral", dict(router_jitter_noise=0.0, num_experts_per_tok=3)))
    assert args.n_active == 3 and type(args) is ModelArgs and not hasattr(args, "mixer_eps")


# Refused ------------------------------------------------------------------------------------------

# The error names the last item of each; for rope parameters, the last of these.
REFUSED = {
    "Mixtral": [
        dict(model_type="qwen3_moe"),
        dict(hidden_act="gelu"),
        dict(mlp_bias=True),
        dict(lm_head_bias=True),
        dict(kv_lora_rank=512),
        dict(embedding_multiplier=12.0),
        dict(attention_multiplier=0.1),
        dict(residual_multiplier=0.2),
        dict(logits_scaling=8),
        dict(routed_scaling_factor=2.5),
        dict(rope_theta=0),
        dict(rope_theta="1e6"),
        dict(rope_scaling={"factor": 2.0, "type": "linear"}),
        dict(rope_scaling={"factor": 2.0, "rope_type": "dynamic"}),
        dict(rope_scaling=LONGROPE),
        dict(num_key_value_heads=5),
        dict(num_experts_per_tok=9),
        dict(num_hidden_layers=0),
        dict(num_hidden_layers=10**12),
        dict(hidden_size=4096.0),
        dict(hidden_size=True),
        dict(vocab_size="32000"),
        dict(head_dim=127),
        dict(sliding_window=-1),
        dict(rms_norm_eps=-1e-5),
        dict(tie_word_embeddings=1),
    ],
    "Qwen3Moe": [
        dict(rope_scaling={"factor": 4.0, "rope_type": "dynamic"}),
        dict(rope_parameters={"rope_theta": 1e4, "rope_type": "llama3"}),
        dict(rope_parameters={"partial_rotary_factor": 0.5}),
        dict(moe_intermediate_size=700),
        dict(mlp_only_layers=3),
        dict(mlp_only_layers=[True]),
        dict(decoder_sparse_step=0),
        dict(layer_types=KINDS[::-1]),
        dict(shared_expert_intermediate_size=512),
        dict(use_qk_norm=True),
        dict(num_nextn_predict_layers=1),
        dict(scoring_func="sigmoid"),
        dict(first_k_dense_replace=1),
        dict(qkv_bias=True),
    ],
    "Qwen2Moe": [
        dict(qkv_bias="yes"),
        dict(use_qkv_bias=True),
        dict(use_sliding_window=True),
        dict(n_shared_experts=1),
        dict(shared_expert_intermediate_size=-1),
        dict(hidden_act="relu"),
    ],
    "Qwen3Next": [
        dict(hidden_act="gelu"),
        dict(attention_bias=1),
        dict(head_dim=0),
        dict(norm_topk_prob=1),
        dict(partial_rotary_factor=0.3),
        dict(rope_scaling={"factor": 4.0, "rope_type": "dynamic"}),
        dict(layer_types=["linear_attention"] * 47),
        dict(layer_types=["sliding_attention"] * 48),
        dict(full_attention_interval=0),
        dict(linear_num_key_heads=0),
        dict(linear_num_value_heads=24),
        dict(linear_key_head_dim="128"),
        dict(linear_value_head_dim=-1),
        dict(linear_conv_kernel_dim=1),
        dict(num_experts_per_tok=513),
        dict(mlp_only_layers=[0.5]),
        dict(shared_expert_intermediate_size=-1),
        dict(num_nextn_predict_layers=1),
    ],
    "Qwen3_5Moe": [
        dict(attn_output_gate=False),
        dict(mlp_only_layers=[1]),
        dict(decoder_sparse_step=2),
        dict(rope_parameters={"rope_type": "dynamic"}),
        dict(moe_intermediate_size=100),
    ],
    "Qwen4Exp": [
        dict(hc_count=1),
        dict(hc_count="4"),
        dict(hc_lowrank=0),
        dict(output_gate_type="gelu"),
        dict(hidden_act="gelu"),
        dict(norm_topk_prob=1),
        dict(shared_expert_intermediate_size=0),
        dict(layer_types=["sliding_attention"] * 40),
        dict(indexer_n_heads=0),
        dict(indexer_kv_heads=2),
        dict(indexer_head_dim=62),
        dict(indexer_budget=2047),
        dict(indexer_compress_ratio=None),
        dict(mlp_only_layers=[1]),
        dict(rope_parameters={"rope_type": "dynamic"}),
    ],
    "Olmoe": [
        dict(clip_qkv=0),
        dict(norm_topk_prob="yes"),
        dict(hidden_act="gelu"),
        dict(attention_bias=0),
        dict(use_sliding_window=1),
        dict(partial_rotary_factor=0.5),
    ],
    "GraniteMoe": [
        dict(residual_multiplier=0),
        dict(attention_multiplier="1"),
        dict(embedding_multiplier=True),
        dict(logits_scaling=-1.0),
        dict(num_local_experts=1.5),
        dict(shared_intermediate_size=1024),
        dict(rope_scaling={"factor": 2.0, "type": "dynamic"}),
        dict(hidden_act="gelu"),
        dict(mlp_bias=True),
    ],
    "Phimoe": [
        dict(rope_scaling={"factor": 2.0, "type": "linear"}),
        dict(num_experts_per_tok=4),
        dict(router_jitter_noise=0),
        dict(lm_head_bias=1),
        dict(hidden_act="gelu"),
        dict(num_local_experts="16"),
        dict(rope_scaling=but(LONGROPE, short_factor=[0.0] * 64)),
        dict(rope_scaling=but(LONGROPE, short_mscale=None)),
        dict(rope_scaling=but(LONGROPE, original_max_position_embeddings=None)),
    ],
    "Glm4Moe": [
        dict(n_group=8),
        dict(topk_group=4),
        dict(partial_rotary_factor=0.4),
        dict(n_routed_experts=0),
        dict(rope_parameters={"partial_rotary_factor": 0.375}),
        dict(n_shared_experts=-1),
        dict(first_k_dense_replace="1"),
        dict(routed_scaling_factor=0),
        dict(attention_bias=1),
        dict(use_qk_norm=1),
        dict(norm_topk_prob=1),
        dict(num_nextn_predict_layers=-1),
        dict(head_dim=None, hidden_size=4096),
        dict(hidden_act="gelu"),
    ],
    "Glm4MoeLite": [
        dict(first_k_dense_replace=2),
        dict(num_nextn_predict_layers=-1),
        dict(num_nextn_predict_layers="1"),
        dict(mlp_layer_types=["sparse"] * 46),
        dict(mlp_layer_types=["sparse"] * 46 + ["moe"]),
        dict(mlp_layer_types="dense"),
        dict(rope_interleave=False),
        dict(attention_bias=True),
        dict(partial_rotary_factor=0.5),
        dict(scoring_func="softmax"),
        dict(topk_method="greedy"),
        dict(norm_topk_prob=1),
        dict(n_group=3),
        dict(topk_group=2),
        dict(num_key_value_heads=4),
        dict(v_head_dim=320),
        dict(qk_rope_head_dim=63),
        dict(q_lora_rank=0),
        dict(hidden_act="gelu"),
        dict(rope_scaling={"factor": 2.0, "rope_type": "dynamic"}),
    ],
    "Lfm2Moe": [
        dict(layer_types=None),
        dict(layer_types=["conv"] * 31),
        dict(layer_types=["conv"] * 31 + ["sliding_attention"]),
        dict(conv_L_cache=1),
        dict(conv_L_cache="3"),
        dict(conv_bias=0),
        dict(use_expert_bias=False),
        dict(num_dense_layers=-1),
        dict(routed_scaling_factor=0),
        dict(norm_eps=0),
        dict(tie_embedding=1),
        dict(hidden_act="gelu"),
        dict(rope_parameters={"rope_type": "dynamic"}),
    ],
    "KimiLinear": [
        dict(mla_use_nope=False),
        dict(use_grouped_topk=False),
        dict(moe_router_activation_func="softmax"),
        dict(moe_layer_freq=2),
        dict(moe_renormalize=1),
        dict(num_expert_group=3),
        dict(topk_group=2),
        dict(num_experts_per_token=257),
        dict(num_shared_experts=-1),
        dict(first_k_dense_replace=-1),
        dict(num_nextn_predict_layers=1),
        dict(linear_conv_kernel_dim=1),
        dict(linear_num_heads="32"),
        dict(linear_attn_config=[]),
        dict(layer_types=["sliding_attention"] * 27),
        dict(attention_bias=True),
        dict(qk_rope_head_dim=63),
        dict(rope_scaling={"rope_type": "yarn"}),
        dict(hidden_act="gelu"),
    ],
    "MiniMaxM2": [
        dict(rotary_dim=48),
        dict(rotary_dim=0),
        dict(rotary_dim="64"),
        dict(partial_rotary_factor=0.3),
        dict(scoring_func="softmax"),
        dict(use_qk_norm=False),
        dict(qk_norm_type="per_head"),
        dict(use_routing_bias=False),
        dict(shared_intermediate_size=1536),
        dict(num_local_experts=0),
        dict(rope_parameters={"rope_type": "dynamic"}),
    ],
    "Ernie4_5_Moe": [
        dict(use_bias=True),
        dict(moe_norm_min=0.1),
        dict(moe_k=65),
        dict(moe_k=None),
        dict(num_experts=32),
        dict(num_experts_per_tok=2),
        dict(moe_num_experts=0),
        dict(moe_num_shared_experts=-1),
        dict(moe_layer_start_index=-1),
        dict(moe_layer_end_index=-2),
        dict(moe_layer_end_index="27"),
        dict(moe_layer_interval=0),
        dict(moe_intermediate_size=100),
        dict(mlp_only_layers=[1]),
        dict(rope_parameters={"rope_type": "dynamic"}),
    ],
    "Afmoe": [
        dict(attention_bias=True),
        dict(score_func="softmax"),
        dict(route_norm=False),
        dict(route_scale=0),
        dict(mup_enabled=1),
        dict(num_dense_layers=-1),
        dict(num_shared_experts="2"),
        dict(global_attn_every_n_layers=0),
        dict(layer_types=["chunked_attention"] * 32),
        dict(sliding_window=0),
        dict(n_group=2),
        dict(rope_parameters={"rope_type": "dynamic"}),
    ],
    "GptOss": [
        dict(sliding_window=0),
        dict(swiglu_limit=0.0),
        dict(swiglu_alpha="1.702"),
        dict(rope_scaling=but(YARN, factor=0)),
        dict(rope_scaling=but(YARN, factor="32")),
        dict(rope_scaling=but(YARN, original_max_position_embeddings=None)),
        dict(rope_scaling=but(YARN, truncate=1)),
        dict(rope_scaling=but(YARN, beta_fast=[32])),
        dict(rope_scaling=but(YARN, rope_type="longrope")),
    ],
    "DeepseekV2": [
        dict(norm_topk_prob=True),
        dict(scoring_func="sigmoid"),
        dict(num_experts_per_tok=None),
        dict(moe_layer_freq=2),
        dict(topk_method="group_limited_greedy", n_group=None),
        dict(num_key_value_heads=8),
        dict(rope_scaling={"factor": 2.0, "type": "dynamic"}),
    ],
    "DeepseekV3": [
        dict(scoring_func="softmax"),
        dict(topk_method="greedy"),
        dict(rope_interleave=False),
        dict(attention_bias=True),
        dict(n_group=7),
        dict(topk_group=9),
        dict(num_experts_per_tok=33, topk_group=1),
        dict(v_head_dim=256),
        dict(qk_rope_head_dim=63),
        dict(kv_lora_rank=0),
        dict(q_lora_rank="x"),
        dict(rope_scaling=but(YARN, mscale_all_dim="x")),
    ],
}


@pytest.mark.parametrize(
    ("family", "changes"), [(family, row) for family, rows in REFUSED.items() for row in rows]
)
def test_an_unsupported_value_is_named(family, changes):
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
        ("Llama", {}, "'LlamaForCausalLM'.*mixtral, qwen3_moe.*kimi_linear$"),
        ("Mixtral", {"architectures": None, "model_type": "llama4"}, "'llama4'"),
        ("Mixtral", {"architectures": []}, r"architectures = \[\]"),
        (
            "Mixtral",
            {"hidden_size": 4100},
            "hidden_size = 4100.*multiple of num_attention_heads = 32",
        ),
        ("Mixtral", {"hidden_size": 4100, "head_dim": 128}, "hidden_size = 4100.*multiple of 8"),
        (
            "Qwen3Moe",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "full_attention",
        ),
        ("Qwen3Moe", {"rope_parameters": "default"}, "rope parameters 'default'"),
        (
            "Phimoe",
            {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 63}},
            "short_factor = .*64 positive numbers",
        ),
        (
            "GptOss",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types = .*'sliding_attention' or",
        ),
        ("GptOss", {"layer_types": [[]]}, "layer_types = .*'sliding_attention' or"),
        ("GptOss", {"layer_types": ["full_attention"]}, "layer_types = .*there are 36 layers"),
        (
            "DeepseekV2",
            {"topk_method": "noaux_tc"},
            "topk_method = 'noaux_tc'.*'greedy' and 'group_limited_greedy'",
        ),
        ("DeepseekV3", {"n_group": 256}, "n_group = 256.*at least two"),
    ],
)
def test_the_reason_of_a_refusal_is_given(family, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        args_from_hf(config_of(family, changes))
    assert printable(str(error.value)) == str(error.value), "a command would cut it"
    assert "\n" not in str(error.value)


def compressed_weights(**given) -> dict:
    """Return compressed-tensors' config_groups with these values."""
    weights = {"num_bits": 4, "strategy": "group", "symmetric": True} | given
    return {"config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("Mixtral", {"quant_method": "gptq", "bits": 3}, "'s bits = 3"),
        ("Mixtral", {"quant_method": "gptq", "bits": True}, "'s bits = True"),
        ("Mixtral", GPTQ | {"bits": 8, "sym": False}, "'s bits = 8 with zeros"),
        ("Mixtral", GPTQ | {"desc_act": True, "group_size": 128}, "'s desc_act = True"),
        ("Mixtral", COMPRESSED | compressed_weights(actorder="group"), "'s actorder = 'group'"),
        ("Mixtral", {"quant_method": "awq"}, "'s bits = None"),
        ("Mixtral", AWQ | {"version": "gemv"}, "'s version = 'gemv'"),
        ("Mixtral", AWQ | {"zero_point": 1}, "'s zero_point = 1"),
        ("Mixtral", {"quant_method": "bitsandbytes"}, " = 'bitsandbytes'"),
        ("Mixtral", {"quant_method": ["awq"]}, " = ['awq']"),
        ("Qwen3Moe", GPTQ | {"checkpoint_format": "marlin"}, "'s checkpoint_format = 'marlin'"),
        ("Qwen3Moe", GPTQ | {"quant_method": "auto-round", "data_type": "fp"}, "'s data_type"),
        ("Qwen3Moe", COMPRESSED | {"format": "marlin-24"}, "'s format = 'marlin-24'"),
        ("Qwen3Moe", COMPRESSED | {"transform_config": {"R1": {}}}, "'s transform_config"),
        ("Qwen3Moe", COMPRESSED | {"sparsity_config": {"format": "x"}}, "'s sparsity_config"),
        ("Qwen3Moe", {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'s quant_algo = 'W4"),
        ("Qwen3Moe", FP8 | {"fmt": "e5m2"}, "'s fmt = 'e5m2'"),
        ("Qwen3Moe", FP8 | {"activation_scheme": "none"}, "'s activation_scheme = 'none'"),
        ("Qwen3Moe", FP8 | {"weight_block_size": [1, 128]}, "'s weight_block_size = [1, 128]"),
        ("Qwen3Moe", "fp8", " = 'fp8'"),
        ("Qwen3Moe", {"quant_method": "mxfp4"}, " = 'mxfp4'"),
        ("GptOss", COMPRESSED, " = 'compressed-tensors'"),
        ("GptOss", FP8, " = 'fp8'"),
    ],
)
def test_an_unsupported_published_format_is_named(family, given, message):
    config = config_of(family, {"quantization_config": given})
    for read in (args_from_hf, published_format):
        with pytest.raises(ValueError) as error:
            read(config)
        text = str(error.value)
        assert f": quantization_config{message}" in text and "\n" not in text
        fix = text.partition(" is not supported; ")[2]
        fixes = "fetch the original", "only 4 ", "only gemm", "take a file without", "add :int8"
        assert fix.startswith(fixes)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (FP8 | {"activation_scheme": "static"}, "fp8b"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        (COMPRESSED, "int4"),
        (COMPRESSED | {"config_groups": {"g": {"weights": {"symmetric": False}}}}, "uint4"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "nvfp4"),
        (COMPRESSED | {"format": "mxfp4-pack-quantized"}, "mxfp4"),
        (AWQ, "uint4"),
        (AWQ | {"version": "GEMM", "zero_point": False}, "int4"),
        (COMPRESSED | compressed_weights(num_bits=8), "q8_0"),
        (COMPRESSED | compressed_weights(num_bits=8, strategy="channel"), "int8"),
        (COMPRESSED | compressed_weights(actorder="static"), "int4"),
        (COMPRESSED | compressed_weights(actorder="weight"), "int4"),
        (GPTQ, "int4"),
        (GPTQ | {"sym": False}, "uint4"),
        (GPTQ | {"desc_act": True, "group_size": -1}, "int4"),
        (GPTQ | {"desc_act": True, "group_size": 32, "static_groups": True}, "int4"),
        (GPTQ | {"bits": 8, "group_size": 32}, "q8_0"),
        (GPTQ | {"bits": 8, "group_size": -1}, "int8"),
        (GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, "int4"),
    ],
)
def test_published_formats_that_are_kept(given, name):
    assert published_format(config_of("Qwen3Moe", {"quantization_config": given})) == name


@pytest.mark.parametrize("fmt", [{}, {"fmt": None}, {"fmt": "e4m3"}])
def test_fp8_without_fmt_is_e4m3(fmt):
    """transformers' FineGrainedFP8Config writes no fmt."""
    given = json.loads(FineGrainedFP8Config().to_json_string()) | fmt
    config = config_of("Qwen3Moe", {"quantization_config": given})
    assert args_from_hf(config) and published_format(config) == "fp8b"


ROPE_AND_FORMAT = "rope_type", "type", "rope_theta", "factor", "quant_method"


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_config_gives_args_or_a_value_error(data):
    model_types = [family.name for family in FAMILIES.values()]
    config = AutoConfig.for_model(data.draw(st.sampled_from(model_types))).to_dict()
    extra = ["rope_scaling", "layer_types", "head_dim", "partial_rotary_factor"]
    extra.append("quantization_config")
    keys = st.sampled_from(sorted(config) + extra)
    config |= data.draw(st.dictionaries(keys, any_json(*ROPE_AND_FORMAT), max_size=3))
    try:
        args = args_from_hf(config)
    except ValueError as error:
        assert str(error)
    else:
        assert args.n_head % args.n_kv_head == 0 and args.n_active <= args.n_expert
