"""Odd config.json files against transformers: the same logits, or a refusal that names the key.

Every key of every family is absent, null, 0, an empty object, an empty list and false. transformers
makes a model of the file, as far as it can, and the converter reads that model's weights.
"""

import copy
import dataclasses
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import FAMILIES as PEERS
from conftest import hub_keys, randomize
from odd_draws import draw
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from generate import load_model
from models import FAMILIES, args_from_hf
from models.config import ONLY, OPTIONAL, ROPE_KEYS
from models.converter import Conversion

ABSENT = object()
VALUES = (ABSENT, None, 0, {}, [], False)
TOKENS = torch.randint(3, 160, (1, 40), generator=torch.Generator().manual_seed(1))
# Keys that no logit depends on.
OTHERS = {
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "id2label"),
    *("label2id", "problem_type", "return_dict", "output_hidden_states", "is_encoder_decoder"),
    *("chunk_size_feed_forward", "use_cache", "initializer_range", "quantization_config"),
    *("attention_dropout", "bos_token_id", "pad_token_id", "eos_token_id", "pretraining_tp"),
    *("output_router_logits", "router_aux_loss_coef", "input_jitter_noise", "_name_or_path"),
    *("vocab_size_per_layer_input", "max_window_layers", "num_logits_to_keep"),
}
FURTHER = {
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
    *("head_dim", "num_local_experts", "num_experts", "n_routed_experts"),
    *("full_attention_interval", "global_head_dim", "num_global_key_value_heads"),
}
pytestmark = pytest.mark.usefixtures("few_threads")


# Both models of a config.json ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def bases() -> dict[str, tuple]:
    """Return family -> transformers' config.json, its config class and its model class."""
    found = {}
    for name, make in PEERS.items():
        peer = make()
        config = json.loads(json.dumps(peer.config.to_dict(), default=str))
        found[name] = (
            config | {"architectures": [type(peer).__name__]},
            type(peer.config),
            type(peer),
        )
    return found


def run_transformers(config: dict, config_class, model_class) -> tuple[dict[str, Tensor], Tensor]:
    """Return random weights, as files have them, and logits [1, Q, V] of transformers' model."""
    torch.manual_seed(0)
    peer = model_class(config_class.from_dict(copy.deepcopy(config))).eval()
    randomize(peer)
    with torch.no_grad():
        state, logits = peer.state_dict(), peer(TOKENS, use_cache=False).logits
    if config.get("model_type") == "kimi_linear":  # in memory its tensors have other names
        state = revert_weight_conversion(peer, state)
    return state, logits


class Weights:
    """A safetensors file, and then a converted checkpoint, in memory."""

    def __init__(self, directory: Path, state: dict[str, Tensor]):
        self.path, self.state = directory / "model.safetensors", state
        self.tensors = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}

    def read(self, name: str, index=None, device="cpu") -> Tensor:
        return self.state[name].clone() if index is None else self.state[name][index].clone()


def run_ours(config: dict, state: dict[str, Tensor], directory: Path) -> Tensor:
    """Return the logits [1, Q, V] of the converted weights. Raises ValueError for a refusal."""
    (directory / "config.json").write_text(json.dumps(config))
    published = {"model.safetensors": Weights(directory, state)}
    conversion = Conversion(directory, published, {}, "fp32")
    made: dict[str, Tensor] = {}
    for file in conversion.plan.files:
        for name, (shape, _) in conversion.layout(file).items():
            pieces = [piece.rows.reshape(-1) for piece in conversion.pieces(file, name)]
            made[name] = torch.cat(pieces).view(shape)
    source = Weights(directory, made)
    source.args, source.format = dataclasses.asdict(conversion.args), conversion.format
    model = load_model(source, "cpu")
    model.setup_cache(1, 64)
    with torch.no_grad():
        return model(TOKENS, torch.arange(TOKENS.shape[1])[None], all_positions=True)


def changed(config: dict, changes: dict) -> dict:
    """Return the config with changes; "a.b" is key b of a, ABSENT removes a key."""
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *outer, key = path.split(".")
        place = config
        for name in outer:
            place = place[name]
        place.pop(key, None)
        if value is not ABSENT:
            place[key] = copy.deepcopy(value)
    return config


def verdict(config: dict, config_class, model_class, directory: Path) -> str:
    """Return "same", "refused by ..." or "wrong by ..."; of a file that transformers cannot run,
    "refused by ..." or "accepted ...".
    """
    try:
        state, want = run_transformers(config, config_class, model_class)
    except Exception as theirs:
        try:
            args_from_hf(config)
        except ValueError as error:
            return f"refused by {error}"
        return f"accepted, where transformers has {type(theirs).__name__}: {theirs}"
    try:
        got = run_ours(config, state, directory)
    except ValueError as error:
        return f"refused by {error}"
    error = ((got - want).abs().max() / want.abs().max().clamp(min=1)).item()
    # Sizes of absent keys are those of a published model, whose sums round more.
    return (
        "same"
        if error < (1e-4 if config.get("hidden_size", 2048) < 512 else 2e-3)
        else f"wrong by {error}"
    )


# Values with a meaning ----------------------------------------------------------------------------

ROPE = "rope_parameters"
TOP = "original_max_position_embeddings"
FULL = ["full_attention"] * 3
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0) | {TOP: 32}
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
SAME = [
    ("mixtral", {"use_sliding_window": False}),
    ("mixtral", {"head_dim": None}),
    ("mixtral", {"sliding_window": None}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": None}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    ("qwen2_moe", {"use_sliding_window": True, "layer_types": FULL}),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}),
    ("qwen3_next", {f"{ROPE}.partial_rotary_factor": ABSENT, "partial_rotary_factor": None}),
    ("qwen3_next", {"shared_expert_intermediate_size": 0}),
    ("qwen3_5_moe", {f"{ROPE}.partial_rotary_factor": ABSENT, "partial_rotary_factor": None}),
    ("qwen3_5_moe", {"shared_expert_intermediate_size": 0}),
    ("qwen4_exp", {"layer_types": None, "full_attention_interval": 3}),
    ("qwen4_exp", {"output_gate_type": None, "hc_count": 5, "hc_lowrank": 3}),
    ("qwen4_exp", {"indexer_budget": 21, "indexer_compress_ratio": 7, "num_experts": 11}),
    ("gemma4", {"per_layer_config": {}}),
    ("gemma4", {"per_layer_config": None}),
    ("olmoe", {"num_key_value_heads": None}),
    ("gpt_oss", {ROPE: {}}),
    ("gpt_oss", {ROPE: None}),
    ("gpt_oss", {f"{ROPE}.truncate": None}),
    ("gpt_oss", {f"{ROPE}.beta_fast": None, f"{ROPE}.beta_slow": 0}),
    ("gpt_oss", {f"{ROPE}.factor": None}),
    ("gpt_oss", {TOP: 40}),
    ("gpt_oss", {f"{ROPE}.{TOP}": ABSENT}),
    ("gpt_oss", {"use_sliding_window": False}),
    ("granitemoe", {"attention_multiplier": None}),
    ("granitemoe", {"num_key_value_heads": None}),
    ("phimoe", {TOP: 64}),
    ("deepseek_v2", {"norm_topk_prob": None, "num_key_value_heads": None}),
    ("deepseek_v2", {TOP: 40}),
    ("deepseek_v2", {"n_shared_experts": 0}),
    ("deepseek_v2", {f"{ROPE}.mscale": None}),
    ("deepseek_v3", {"norm_topk_prob": None}),
    ("deepseek_v3", {"num_key_value_heads": None, "q_lora_rank": None}),
    ("deepseek_v3", {TOP: 40}),
    ("deepseek_v3", {"n_shared_experts": 0}),
    (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": 1},
    ),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 3, "first_k_dense_replace": 7}),
    ("glm4_moe_lite", {"mlp_layer_types": None, "q_lora_rank": None}),
    ("glm4_moe_lite", {"n_shared_experts": 0}),
    ("glm4_moe", {f"{ROPE}.partial_rotary_factor": ABSENT, "partial_rotary_factor": None}),
    ("glm4_moe", {"n_shared_experts": 0}),
    ("laguna", {"num_attention_heads_per_layer": None, "mlp_layer_types": None}),
    ("laguna", {"shared_expert_intermediate_size": 48, "partial_rotary_factor": 0.25}),
    ("laguna", {f"{ROPE}.{TOP}": 7, "sliding_window": 300}),
    ("mellum", {ROPE: None, "mlp_layer_types": None}),
    ("mellum", {"layer_types": FULL, f"{ROPE}.sliding_attention": ABSENT}),
    ("flint", {"mlp_only_layers": None}),
    ("flint", {"mlp_only_layers": [], "norm_topk_prob": False, "layer_types": None}),
    ("kolibri1", {"layer_types": FULL}),
    ("kolibri1", {"layer_types": None, "norm_topk_prob": True}),
    ("kimi_linear", {"layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 2}),
    ("kimi_linear", {"linear_attn_config": {"num_heads": 3, "head_dim": 8}, "q_lora_rank": 24}),
    ("kimi_linear", {"n_shared_experts": 0, "num_shared_experts": ABSENT}),
]
# Families with one mechanism of scaled RoPE, by what their rope parameters have besides.
SCALED = ("qwen3_moe", "qwen2_moe", "qwen3_next", "qwen3_5_moe", "olmoe", "gpt_oss", "granitemoe")
SCALED += ("qwen4_exp",)
SCALED += ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "flint", "kolibri1")
SCALED += ("lfm2_moe", "minimax_m2", "ernie4_5_moe", "afmoe")
KINDS = {
    "linear": dict(rope_type="linear", factor=2.5),
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, as cards say": dict(type="yarn", factor=4.0, original_max_position_embeddings=16),
    "linear with mscale": dict(rope_type="linear", factor=2.5, mscale_all_dim=0.8),
}
QUICK = [(name, ("linear", "llama3", "yarn")[n % 3]) for n, name in enumerate(SCALED)]
QUICK += [(name, "yarn") for name in ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm4_moe_lite")]
REFUSED = [
    ("mixtral", {"num_key_value_heads": None}, "num_key_value_heads = None"),
    ("mixtral", {"layer_types": []}, "layer_types = "),
    ("mixtral", {"is_causal": None}, "is_causal = None"),
    ("qwen2_moe", {"num_key_value_heads": None}, "num_key_value_heads = None"),
    ("mixtral", {"per_layer_config": {"1": {"sliding_window": 4}}}, "per_layer_config = "),
    ("mixtral", {"num_experts": 5}, "num_experts = 5 is not supported (num_local_experts is 6)"),
    ("mixtral", {ROPE: KINDS["linear"]}, "rope_type = 'linear'"),
    ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob = None"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window = 0"),
    ("qwen3_moe", {f"{ROPE}.rope_theta": None}, "rope_theta = None"),
    ("qwen3_moe", {f"{ROPE}.rope_type": None}, "rope_type = None"),
    ("qwen3_moe", {ROPE: YARN | {"rope_theta": 1}}, "rope_theta = 1 "),
    ("qwen3_moe", {ROPE: YARN, TOP: None}, f"{TOP} = None"),
    ("qwen3_moe", {ROPE: LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor = 1.0"),
    ("qwen3_moe", {ROPE: LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor = None"),
    ("qwen3_moe", {ROPE: dict(rope_type="linear")}, "factor = None"),
    ("qwen3_moe", {ROPE: []}, "rope parameters []"),
    ("qwen3_next", {f"{ROPE}.partial_rotary_factor": None}, "partial_rotary_factor = None"),
    ("qwen3_next", {"full_attention_interval": None}, "full_attention_interval = None"),
    ("qwen4_exp", {"indexer_budget": None}, "indexer_budget = None"),
    ("qwen4_exp", {"hc_count": 1}, "hc_count = 1"),
    ("gemma4", {"rope_scaling": None}, "rope_scaling = None"),
    ("gemma4", {ROPE: {}}, f"{ROPE} = {{}}"),
    ("gemma4", {f"{ROPE}.full_attention.rope_type": ABSENT}, "full_attention.rope_type"),
    ("gemma4", {"intermediate_size": 0}, "intermediate_size = 0"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window = None"),
    ("gpt_oss", {f"{ROPE}.{TOP}": None}, f"{TOP} = None"),
    ("gpt_oss", {TOP: True}, f"{TOP} = True"),
    ("granitemoe", {"residual_multiplier": None}, "residual_multiplier = None"),
    ("deepseek_v3", {"rope_interleave": None}, "rope_interleave = None"),
    ("kolibri1", {"layer_types": FULL, "sliding_window": None}, "sliding_window = None"),
    ("kolibri1", {"mlp_only_layers": [1]}, "mlp_only_layers = [1]"),
    ("flint", {"layer_types": ["linear_attention"] * 3}, "layer_types = "),
    ("flint", {"sliding_window": None}, "sliding_window = None"),
    ("mellum", {"mtp_layer_types": ["full_attention"]}, "mtp_layer_types = ['full_attention']"),
    ("mellum", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
    ("deepseek_v3", {"head_dim": 16}, "head_dim = 16"),
    ("deepseek_v3", {"attention_bias": 0}, "attention_bias = 0"),
    ("deepseek_v3", {"first_k_dense_replace": None}, "first_k_dense_replace = None"),
    ("kimi_linear", {"linear_attn_config": None}, "linear_attn_config = None"),
    ("kimi_linear", {"linear_attn_config": {"head_dim": 0.5}}, "linear_attn_config.head_dim = 0.5"),
    (
        "kimi_linear",
        {"layer_types": None, "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [3]}},
        "must name each of 4 layers once, from 1 on",
    ),
    (
        "glm4_moe_lite",
        {"first_k_dense_replace": 0, "mlp_layer_types": ABSENT},
        "first_k_dense_replace = 0",
    ),
]


def one_case(bases, tmp_path, name: str, changes: dict) -> str:
    config, *classes = bases[name]
    return verdict(changed(config, changes), *classes, tmp_path)


@pytest.mark.parametrize(("name", "changes"), SAME)
def test_the_logits_are_those_of_transformers(bases, tmp_path, name, changes):
    assert one_case(bases, tmp_path, name, changes) == "same"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in ((name, kind) for name in SCALED for kind in KINDS)
    ],
)
def test_scaled_rope_is_that_of_transformers(bases, tmp_path, name, kind):
    config, *classes = bases[name]
    theta_and_part = {"rope_theta": 1e4}
    if part := (config[ROPE] or {}).get("partial_rotary_factor"):
        theta_and_part["partial_rotary_factor"] = part
    config = changed(config, {ROPE: theta_and_part | KINDS[kind]})
    assert verdict(config, *classes, tmp_path) == "same"


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_a_value_without_a_meaning_is_refused_by_its_key(bases, name, changes, message):
    with pytest.raises(ValueError) as error:
        args_from_hf(changed(bases[name][0], changes))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_yarn_for_long_texts_raises_the_models_positions(bases):
    """Model cards tell to add YaRN alone: max_position_embeddings stays the length before it."""
    config = bases["qwen3_moe"][0]
    assert args_from_hf(changed(config, {ROPE: YARN | {TOP: 100}})).max_position == 400
    assert args_from_hf(changed(config, {ROPE: YARN})).max_position == 256
    assert args_from_hf(bases["gpt_oss"][0]).max_position == 256


@pytest.mark.parametrize("outer", (ABSENT, True, False))
@pytest.mark.parametrize("inner", (True, False))
def test_the_larger_model_says_whether_the_head_is_tied(bases, tmp_path, outer, inner):
    text = bases["qwen3_5_moe"][0] | {"tie_word_embeddings": inner}
    sizes = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2)
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": text,
        "vision_config": sizes | dict(out_hidden_size=64, num_position_embeddings=16),
    }
    config = changed(config, {"tie_word_embeddings": outer})
    classes = transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeForConditionalGeneration
    state, want = run_transformers(config, *classes)
    if outer is True:  # transformers saves no head then
        del state["lm_head.weight"]
    got = run_ours(config, state, tmp_path)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    text = bases["gemma4"][0] | {"tie_word_embeddings": inner}
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    args = args_from_hf(changed(config, {"tie_word_embeddings": outer}))
    assert args.tied_embeddings == (outer is not False)


# Every key ----------------------------------------------------------------------------------------


# Keys that transformers checks, and that no logit of ours depends on: LongRoPE beyond the original
# positions is not run, and a length beside the rope parameters wins over the one inside.
UNREAD = {
    "granitemoehybrid": ("mamba_chunk_size", "position_embedding_type", "time_step_limit"),
    "laguna": ("moe_router_logit_softcapping",),  # 0 is 0.0
    "minimax_m2": ("router_jitter_noise",),
    "mixtral": ("router_jitter_noise",),
    "nemotron_h": (
        *("chunk_size", "expand", "hidden_dropout", "mamba_ssm_cache_dtype", "use_mamba_kernels"),
        *("time_step_min", "time_step_max", "time_step_floor", "time_step_limit"),
        *("rescale_prenorm_residual", "residual_in_fp32", "moe_shared_expert_overlap"),
        *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_logits_to_keep"),
    ),
    "phimoe": ("factor", "long_factor", "long_mscale", TOP),
}


# The key's default makes a table of 10 GB.
LARGE = ("ngram_vocab_size_base",)


def variants(name: str, config: dict) -> list[tuple[str, dict]]:
    """Return each key, with each value, of the file and of its rope parameters."""
    family = FAMILIES[config["architectures"][0]]
    rope = "rope_scaling" if isinstance(config.get("rope_scaling"), dict) else ROPE
    keys = {*config, *ONLY, *OPTIONAL, *family.defaults, *family.only, *FURTHER} - OTHERS
    paths = sorted(key for key in keys if "." not in key)
    if name != "gemma4" and isinstance(config.get(rope), dict):
        inner = {*config[rope], "rope_theta", "rope_type", "type", "partial_rotary_factor"}
        paths += sorted(f"{rope}.{key}" for key in inner.union(*ROPE_KEYS.values()))
    values = {path: VALUES[path in LARGE :] for path in paths}  # the first is ABSENT
    return [(path, {path: value}) for path in paths for value in values[path]]


def is_fine(found: str, path: str, value) -> bool:
    """Whether the logits are the same, or the refusal names the key.

    An absent key has a published model's size, which other keys may not fit.
    """
    key = path.rsplit(".", 1)[-1]
    named = key in found or (key in (ROPE, "rope_scaling") and "rope parameter" in found)
    named = named or value is ABSENT
    return found == "same" or (found.startswith("refused by config.json: ") and named)


@pytest.mark.parametrize("layout", ("current", "hub"))
@pytest.mark.parametrize(
    "count", (pytest.param(4, id="some"), pytest.param(None, id="all", marks=pytest.mark.slow))
)
@pytest.mark.parametrize("name", PEERS)
def test_every_key_is_read_as_transformers_does_or_refused(bases, tmp_path, name, layout, count):
    config, *classes = bases[name]
    if layout == "hub":
        config = hub_keys(config | {"dtype": "float32"})
    cases = variants(name, config)
    if count:
        cases = random.Random(f"{name} {layout}").sample(cases, count)
    unread = UNREAD.get(name, ())
    failed = {}
    for path, changes in cases:
        found = verdict(changed(config, changes), *classes, tmp_path)
        is_unread = path.rsplit(".", 1)[-1] in unread and found.startswith("accepted")
        if not is_unread and not is_fine(found, path, changes[path]):
            failed[f"{path} = {changes[path]!r}"] = found
    assert not failed


# Many keys at once --------------------------------------------------------------------------------


def named(found: str, config: dict) -> bool:
    """Whether a refusal names a key of the config with its value, or one that it has not."""
    match = re.fullmatch(r"refused by config\.json: ([\w.]+) = (.*) is not supported.*", found)
    if found == f"refused by config.json: rope parameters {config.get(ROPE)!r} are not supported":
        return True
    if match is None:
        return False
    key, value = match[1].rsplit(".", 1)[-1], match[2]
    places = [config, *(inner for inner in config.values() if isinstance(inner, dict))]
    values = [f"{place[key]!r:.80}" for place in places if place.get(key) is not None]
    return value in values if values else True  # a default of transformers


def draw_config(base: dict, name: str, seed: int) -> dict:
    """Return a drawn config of a family. A third of them have one odd value."""
    rng, family = random.Random(f"{name} {seed}"), FAMILIES[base["architectures"][0]]
    single = {*ONLY, *family.only} - {*family.defaults, *family.renamed_keys}
    config = draw(base, rng, name in SCALED, kept=single)
    if rng.random() < 1 / 3:
        keys = sorted(config.keys() - {*OTHERS, *LARGE, *UNREAD.get(name, ())})
        config = changed(config, {rng.choice(keys): rng.choice(VALUES)})
    return config


def draws(bases, tmp_path, name: str, seeds: Iterable[int]) -> list[str]:
    """Return the verdicts of drawn configs of a family."""
    base, *classes = bases[name]
    found = []
    for seed in seeds:
        config = draw_config(base, name, seed)
        result = verdict(config, *classes, tmp_path)
        assert result == "same" or named(result, config), (seed, result, config)
        found.append(result)
    return found


@pytest.mark.parametrize("name", PEERS)
def test_a_drawn_config_is_read_as_transformers_does_or_refused(bases, tmp_path, name):
    draws(bases, tmp_path, name, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_many_drawn_configs_are_read_as_transformers_does_or_refused(bases, tmp_path, name):
    found = draws(bases, tmp_path, name, range(2, 80))
    assert found.count("same") > len(found) / 4
