"""Conversion: exact for every family and layout, one layer in memory, one-line errors."""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import tokenizers
import torch
from conftest import hub_keys, smoke_diagonal
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

import convert_hf_checkpoint
import quantize
from checkpoint import Checkpoint
from formats import FORMATS
from generate import load_model
from models import args_from_json, family_named, pieces
from models.converter import convert
from models.layers.yarn import Yarn

ROOT = Path(__file__).parents[1]
SMALL = dict(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    num_experts_per_tok=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1, 1.5, 2.0, 4.0],
    long_factor=[2.0, 3.0, 4.0, 9.0],
    short_mscale=1.2,
    long_mscale=1.4,
    original_max_position_embeddings=64,
)
MOE = dict(intermediate_size=40, moe_intermediate_size=24)
DEEPSEEK_MOE = MOE | dict(n_routed_experts=4, n_shared_experts=2)
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
)
CONFIGS = {
    "mixtral": MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=4),
    "mixtral-tied": MixtralConfig(
        **SMALL,
        intermediate_size=24,
        num_local_experts=3,
        tie_word_embeddings=True,
        sliding_window=16,
        head_dim=6,
    ),
    "qwen3": Qwen3MoeConfig(
        **SMALL | MOE, num_experts=4, head_dim=12, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    "qwen3-bias": Qwen3MoeConfig(
        **SMALL | MOE,
        num_experts=4,
        attention_bias=True,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=8,
    ),
    "qwen2": Qwen2MoeConfig(
        **SMALL | MOE, num_experts=4, shared_expert_intermediate_size=20, mlp_only_layers=[2]
    ),
    "granite": GraniteMoeConfig(
        **SMALL,
        intermediate_size=24,
        num_local_experts=4,
        tie_word_embeddings=True,
        embedding_multiplier=12.0,
        attention_multiplier=0.25,
        residual_multiplier=0.22,
        logits_scaling=4,
    ),
    "phi": PhimoeConfig(
        **SMALL,
        intermediate_size=24,
        num_local_experts=4,
        attention_bias=True,
        lm_head_bias=True,
        sliding_window=64,
        original_max_position_embeddings=64,
        rope_parameters=LONGROPE,
    ),
    "glm": Glm4MoeConfig(
        **SMALL | DEEPSEEK_MOE,
        head_dim=8,
        first_k_dense_replace=2,
        attention_bias=True,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=2,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
    ),
    "deepseek-v2": DeepseekV2Config(
        **SMALL | LATENT | DEEPSEEK_MOE,
        q_lora_rank=None,
        first_k_dense_replace=1,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=4.0,
            original_max_position_embeddings=32,
            mscale=0.5,
            mscale_all_dim=0.5,
        ),
    ),
    "deepseek-v3": DeepseekV3Config(
        **SMALL | LATENT | DEEPSEEK_MOE,
        q_lora_rank=16,
        first_k_dense_replace=2,
        n_group=2,
        topk_group=1,
        num_mtp_layers=2,
        norm_topk_prob=False,
    ),
    "olmoe": OlmoeConfig(
        **SMALL, intermediate_size=24, num_experts=4, clip_qkv=0.5, norm_topk_prob=False
    ),
    "gpt-oss": GptOssConfig(
        **SMALL,
        intermediate_size=24,
        num_local_experts=4,
        head_dim=8,
        sliding_window=16,
        swiglu_limit=3.0,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1.5e5,
            factor=4.0,
            original_max_position_embeddings=32,
            mscale=1.0,
            mscale_all_dim=0.5,
        ),
    ),
    "olmoe-one-expert": OlmoeConfig(
        **SMALL | dict(num_experts_per_tok=1), intermediate_size=24, num_experts=1, clip_qkv=0.5
    ),
}
# Expected args: shared ones, then those that differ. rope_theta and norm_eps are the config's.
SMALL_ARGS = dict(
    dim=32,
    n_layer=3,
    n_head=4,
    n_kv_head=2,
    head_dim=8,
    intermediate=24,
    n_expert=4,
    n_active=2,
    vocab_size=96,
    max_position=128,
    norm_topk=True,
    qk_norm="none",
    clip_qkv=None,
    attention_bias=False,
    tied_embeddings=False,
    sliding_window=None,
    dense_layers=(),
    dense_intermediate=0,
)
LATENT_ARGS = dict(n_kv_head=1, head_dim=12, rotary_dim=4, kv_rank=24, value_dim=6)
YARN_SCALE = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)  # of gpt-oss
ARGS = {
    "mixtral": {},
    "mixtral-tied": dict(head_dim=6, n_expert=3, tied_embeddings=True, sliding_window=16),
    "qwen3": dict(head_dim=12, qk_norm="head", dense_layers=(0,), dense_intermediate=40),
    "qwen3-bias": dict(
        norm_topk=False,
        qk_norm="head",
        attention_bias=True,
        sliding_window=8,
        dense_layers=(0, 2),
        dense_intermediate=40,
    ),
    "qwen2": dict(
        norm_topk=False,
        qkv_bias=True,
        shared_intermediate=20,
        dense_layers=(2,),
        dense_intermediate=40,
    ),
    "granite": dict(
        tied_embeddings=True,
        embedding_scale=12.0,
        attention_scale=0.25,
        residual_scale=0.22,
        logit_scale=0.25,
    ),
    "phi": dict(
        max_position=64,
        norm_topk=False,
        attention_bias=True,
        sliding_window=64,
        head_bias=True,
        mixer_eps=0.01,
        rope_factors=(1.0, 1.5, 2.0, 4.0),
        rope_scale=1.2,
    ),
    "glm": dict(
        dense_layers=(0, 1),
        dense_intermediate=40,
        qkv_bias=True,
        shared_intermediate=48,
        routed_scale=2.5,
        rotary_dim=2,
    ),
    "deepseek-v2": LATENT_ARGS
    | dict(
        norm_topk=False,
        dense_layers=(0,),
        dense_intermediate=40,
        shared_intermediate=48,
        q_rank=None,
        yarn=Yarn(4.0, 32),
        attention_scale=12**-0.5 * (0.05 * math.log(4) + 1) ** 2,
    ),
    "deepseek-v3": LATENT_ARGS
    | dict(
        norm_topk=False,
        dense_layers=(0, 1),
        dense_intermediate=40,
        shared_intermediate=48,
        routed_scale=2.5,
        q_rank=16,
        n_group=2,
        n_active_group=1,
    ),
    "olmoe": dict(norm_topk=False, qk_norm="full", clip_qkv=0.5),
    "gpt-oss": dict(
        attention_bias=True,
        sliding_window=16,
        full_layers=(0, 2),
        swiglu_limit=3.0,
        yarn=Yarn(4.0, 32, attention=YARN_SCALE),
    ),
    "olmoe-one-expert": dict(norm_topk=False, qk_norm="full", clip_qkv=0.5, n_expert=1, n_active=1),
}
LAYOUTS = ("one file", "shards", "shards without index", "fused", "older keys")


@pytest.fixture(scope="module")
def models():
    """A model of each config; all tensors are random, also those that a new model has constant."""
    torch.manual_seed(0)
    made = {name: AutoModelForCausalLM.from_config(c).eval() for name, c in CONFIGS.items()}
    with torch.no_grad():
        for model in made.values():
            for tensor in itertools.chain(model.parameters(), model.buffers()):
                tensor.normal_()
    return made


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    """Return the folder of all models in Hugging Face layout. Do not write to it."""
    root = tmp_path_factory.mktemp("saved")
    for name, model in models.items():
        model.save_pretrained(root / name, max_shard_size="12KB")
    return root


@pytest.fixture
def mixtral(saved, tmp_path) -> Path:
    """Return a copy of the Mixtral, to be damaged."""
    return Path(shutil.copytree(saved / "mixtral", tmp_path / "hf"))


def edit(path: Path, **changes):
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(value))


def edit_tensors(directory: Path, name: str, change):
    """Apply `change(tensors, name)` to the shard that holds the tensor `name`; return its file."""
    for path in directory.glob("*.safetensors"):
        if name in (tensors := load_file(path)):
            change(tensors, name)
            save_file(tensors, path)
            return path.name
    raise KeyError(name)


def older_keys(config: dict) -> dict:
    """Return config.json as on the Hub: its keys, without those at transformers' default."""
    fresh = AutoConfig.for_model(config["model_type"]).to_dict()
    return {
        key: value
        for key, value in hub_keys(config).items()
        if key in ("model_type", "rope_theta", "partial_rotary_factor") or fresh.get(key) != value
    }


def latent(theirs: dict, prefix: str, config) -> dict:
    """Return the tensors of a layer's latent attention.

    Published rotated numbers are pairs of neighbours; ours are halves.
    """
    nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    heads, prefix = config.num_attention_heads, f"{prefix}self_attn."

    def rows(name: str, heads: int, kept: int) -> torch.Tensor:
        order = [*range(kept), *range(kept, kept + rope, 2), *range(kept + 1, kept + rope, 2)]
        order = [head * (kept + rope) + n for head in range(heads) for n in order]
        return theirs[f"{prefix}{name}.weight"][order]

    q = theirs.get(f"{prefix}q_a_proj.weight")
    wq = rows("q_proj" if q is None else "q_b_proj", heads, nope)
    ours = {}
    if q is not None:
        ours = {"wq.weight": wq, "q_norm.weight": theirs[f"{prefix}q_a_layernorm.weight"]}
    return ours | {
        "wqkv.weight": torch.cat((wq if q is None else q, rows("kv_a_proj_with_mqa", 1, rank))),
        "kv_norm.weight": theirs[f"{prefix}kv_a_layernorm.weight"],
        "wkv": theirs[f"{prefix}kv_b_proj.weight"].view(heads, -1, rank),
    }


RENAMES = (
    (".block_sparse_moe.router.", ".mlp.gate."),
    (".block_sparse_moe.", ".mlp."),
    (".mlp.router.", ".mlp.gate."),
    (".shared_experts.", ".shared_expert."),
)


def joined(theirs: dict, pattern: str, names) -> torch.Tensor:
    """Concatenate tensors along rows; `pattern` has one {}."""
    return torch.cat([theirs[pattern.format(name)] for name in names])


def expected_attention(theirs: dict, prefix: str, config) -> dict:
    """Return a layer's norms and attention, without its prefix."""
    attention, ours = f"{prefix}self_attn.", {}
    for leaf in ("weight", "bias"):
        if f"{prefix}input_layernorm.{leaf}" in theirs:
            ours[f"attention_norm.{leaf}"] = theirs[f"{prefix}input_layernorm.{leaf}"]
            ours[f"ffn_norm.{leaf}"] = theirs[f"{prefix}post_attention_layernorm.{leaf}"]
        if f"{attention}k_proj.{leaf}" in theirs:
            qkv = joined(theirs, f"{attention}{{}}_proj.{leaf}", "qkv")
            ours[f"attention.wqkv.{leaf}"] = qkv
        if f"{attention}o_proj.{leaf}" in theirs:
            ours[f"attention.wo.{leaf}"] = theirs[f"{attention}o_proj.{leaf}"]
    if f"{attention}kv_b_proj.weight" in theirs:
        table = latent(theirs, prefix, config)
        ours |= {f"attention.{name}": tensor for name, tensor in table.items()}
    for norm in ("q_norm", "k_norm"):
        if f"{attention}{norm}.weight" in theirs:
            ours[f"attention.{norm}.weight"] = theirs[f"{attention}{norm}.weight"]
    if f"{attention}sinks" in theirs:
        ours["attention.sinks"] = theirs[f"{attention}sinks"]
    return ours


def expected_gpt_oss_experts(theirs: dict, mlp: str) -> dict:
    """Return router and experts, independently of the converter's code."""
    ours = {f"ffn.router.{leaf}": theirs[f"{mlp}gate.{leaf}"] for leaf in ("weight", "bias")}
    for name, source in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        weight, bias = theirs[f"{mlp}experts.{source}"].mT, theirs[f"{mlp}experts.{source}_bias"]
        order = slice(None)
        if name == "w13":
            order = [*range(0, len(bias[0]), 2), *range(1, len(bias[0]), 2)]
        ours[f"ffn.experts.{name}.weight"] = weight[:, order]
        ours[f"ffn.experts.{name}.bias"] = bias[:, order]
    return ours


def expected_ffn(theirs: dict, mlp: str) -> dict:
    """Return a layer's experts or dense FFN, without its prefix."""
    gate_and_up = "gate_proj", "up_proj"
    if f"{mlp}gate.weight" not in theirs:
        return {
            "ffn.w13.weight": joined(theirs, f"{mlp}{{}}.weight", gate_and_up),
            "ffn.w2.weight": theirs[f"{mlp}down_proj.weight"],
        }
    ours = {
        "ffn.router.weight": theirs[f"{mlp}gate.weight"],
        "ffn.experts.w13.weight": theirs[f"{mlp}experts.gate_up_proj"],
        "ffn.experts.w2.weight": theirs[f"{mlp}experts.down_proj"],
    }
    shared = f"{mlp}shared_expert."
    if f"{shared}gate_proj.weight" in theirs:
        ours["ffn.shared.w13.weight"] = joined(theirs, f"{shared}{{}}.weight", gate_and_up)
        ours["ffn.shared.w2.weight"] = theirs[f"{shared}down_proj.weight"]
    optional = {
        "ffn.shared_gate.weight": f"{mlp}shared_expert_gate.weight",
        "ffn.score_bias": f"{mlp}gate.e_score_correction_bias",
    }
    return ours | {ours: theirs[name] for ours, name in optional.items() if name in theirs}


def expected(model) -> dict:
    """Return our tensors, made from the state dict of transformers' model."""
    theirs, ours = model.state_dict(), {}
    for before, after in RENAMES:
        theirs = {name.replace(before, after): tensor for name, tensor in theirs.items()}
    for i in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        layer = expected_attention(theirs, prefix, model.config)
        if "attention.sinks" in layer:
            layer |= expected_gpt_oss_experts(theirs, f"{prefix}mlp.")
        else:
            layer |= expected_ffn(theirs, f"{prefix}mlp.")
        ours |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    ours["embedding.weight"] = theirs["model.embed_tokens.weight"]
    ours["norm.weight"] = theirs["model.norm.weight"]
    optional = {"norm.bias": "model.norm.bias", "head.bias": "lm_head.bias"}
    ours |= {ours: theirs[name] for ours, name in optional.items() if name in theirs}
    if not model.config.tie_word_embeddings:
        ours["head.weight"] = theirs["lm_head.weight"]
    return ours


def tree(directory: Path) -> dict:
    return {path: path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


# Conversion ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), smoke_diagonal(CONFIGS, LAYOUTS))
def test_every_family_in_every_layout(models, tmp_path, name, layout):
    model = models[name]
    size = "1GB" if layout == "one file" else "12KB"
    model.save_pretrained(tmp_path, max_shard_size=size, save_original_format=layout != "fused")
    assert (len(list(tmp_path.glob("*.safetensors"))) == 1) == (layout == "one file")
    if layout == "shards without index":
        (tmp_path / "model.safetensors.index.json").unlink()
    if layout == "older keys":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(older_keys(config)))
    output = convert(tmp_path, dtype="fp32", progress=False)
    assert output == tmp_path / "model_fp32"
    opened, want = Checkpoint(output), expected(model)
    assert opened.format == {"name": "fp32"}
    assert opened.tensors.keys() == want.keys()
    for tensor, value in want.items():
        assert torch.equal(opened.read(tensor), value), tensor
    config = model.config
    read = dict(
        family=config.model_type,
        rope_theta=config.rope_parameters["rope_theta"],
        norm_eps=config.rms_norm_eps,
    )
    want = family_named(config.model_type).args_class(**read | SMALL_ARGS | ARGS[name])
    assert args_from_json(opened.args) == want


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["qwen3", "glm"])
def test_dtypes(models, saved, tmp_path, name, dtype):
    output = convert(saved / name, tmp_path / "out", dtype, progress=False)
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    opened = Checkpoint(output)
    for tensor, value in expected(models[name]).items():
        due = value if tensor.endswith("score_bias") else value.to(torch_dtype)
        assert torch.equal(opened.read(tensor), due), tensor


@pytest.mark.parametrize("name", ["glm", "deepseek-v3"])
def test_multi_token_prediction_layers_are_left_out(models, saved, tmp_path, name):
    directory = Path(shutil.copytree(saved / name, tmp_path / "hf"))
    layer = {f"model.layers.{n}.eh_proj.weight": torch.ones(32, 64) for n in (3, 4)}
    save_file(layer, directory / "model-mtp.safetensors")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(layer, "model-mtp.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    converted = Checkpoint(convert(directory, progress=False))
    assert converted.tensors.keys() == expected(models[name]).keys()
    edit(directory / "config.json", num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"model\.layers\.4\.eh_proj\.weight .* has no place"):
        convert(directory, progress=False, force=True)


def test_files_and_side_files(mixtral):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, "?"))
    library.save(str(mixtral / "tokenizer.json"))
    (mixtral / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    (mixtral / "chat_template.jinja").write_text("{{ messages }}")
    (mixtral / "README.md").write_text("not wanted")
    output = convert(mixtral, progress=False)
    side = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    made = {"config.json", "index.json", "generation_config.json"}
    weights = {f"{name}.safetensors" for name in ("layer_00", "layer_01", "layer_02", "rest")}
    assert set(os.listdir(output)) == made | side | weights
    for name in side:
        assert (output / name).read_bytes() == (mixtral / name).read_bytes()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "[", "not valid JSON"),
        ("tokenizer_config.json", '{"eos_token": 7}', "eos_token is 7"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": {}}, {"name": "default", "template": 5}]}',
            "chat_template",
        ),
        ("tokenizer_config.json", '{"add_bos_token": "yes"}', "add_bos_token"),
        ("chat_template.jinja", "{% for %}", "chat template is damaged"),
        ("generation_config.json", '{"eos_token_id": 96}', "eos_token_id 96 is not a token"),
        ("generation_config.json", '{"eos_token_id": [1, "x"]}', "eos_token_id 'x'"),
        ("generation_config.json", "{", "cannot be read as JSON"),
    ],
)
def test_damaged_side_files_are_found_before_the_weights(mixtral, file, content, words):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, "?"))
    library.save(str(mixtral / "tokenizer.json"))
    (mixtral / file).write_text(content)
    before = sorted(os.listdir(mixtral))
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        convert(mixtral, progress=False)
    assert "\n" not in str(error.value) and sorted(os.listdir(mixtral)) == before


def test_a_tokenizer_of_another_model_is_refused(mixtral):
    words = {"a": 0, "?": 5000}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "?")).save(
        str(mixtral / "tokenizer.json")
    )
    with pytest.raises(ValueError, match="beyond the model's 96 tokens"):
        convert(mixtral, progress=False)


@pytest.mark.parametrize(
    ("given", "in_config", "want"),
    [
        ({"eos_token_id": [5, 6], "top_k": 9}, {}, {"eos_token_id": [5, 6], "top_k": 9}),
        ({"top_k": 9}, {"eos_token_id": [7, 8]}, {"eos_token_id": [7, 8], "top_k": 9}),
        (None, {"eos_token_id": 7}, {"eos_token_id": 7}),
        (None, {"eos_token_id": None}, {}),
    ],
)
def test_no_stop_id_is_lost(mixtral, given, in_config, want):
    edit(mixtral / "config.json", **in_config)
    (mixtral / "generation_config.json").unlink()
    if given is not None:
        (mixtral / "generation_config.json").write_text(json.dumps(given))
    output = convert(mixtral, progress=False)
    want = {"bos_token_id": 1} | want
    assert json.loads((output / "generation_config.json").read_text()) == want


def test_rotary_constants_are_left_out(mixtral, models):
    constant = {"model.rotary_emb.inv_freq": torch.ones(3)}
    edit_tensors(mixtral, "model.norm.weight", lambda tensors, _: tensors.update(constant))
    converted = Checkpoint(convert(mixtral, progress=False))
    assert converted.tensors.keys() == expected(models["mixtral"]).keys()


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_beside_tied_embeddings(saved, tmp_path, equal):
    directory = Path(shutil.copytree(saved / "mixtral-tied", tmp_path / "hf"))

    def add_head(tensors, name):
        tensors["lm_head.weight"] = tensors[name].clone() if equal else tensors[name] + 1

    edit_tensors(directory, "model.embed_tokens.weight", add_head)
    opened = Checkpoint(convert(directory, dtype="fp32", progress=False))
    assert opened.args["tied_embeddings"] is equal
    assert ("head.weight" in opened.tensors) is not equal
    if not equal:
        assert torch.equal(opened.read("head.weight"), opened.read("embedding.weight") + 1)


# MXFP4, as gpt-oss is published -------------------------------------------------------------------


def in_mxfp4(model, dequantize) -> dict:
    """Return the state dict with experts as random MXFP4 blocks; set the model to their values."""
    packed = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = tensor.clone()
            continue
        experts, width, rows = tensor.shape
        blocks = torch.randint(256, (experts, rows, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 126, blocks.shape[:-1], dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensor.copy_(dequantize(blocks, scales, dtype=torch.float32))
    return packed


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A small gpt-oss with experts in MXFP4, and transformers' model of the same numbers."""
    integrations = pytest.importorskip("transformers.integrations.mxfp4")
    config = GptOssConfig(
        **SMALL | dict(hidden_size=64),
        intermediate_size=96,
        num_local_experts=4,
        head_dim=24,
        sliding_window=8,
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(mean + 0.2 * torch.randn_like(parameter))
        packed = in_mxfp4(model, integrations.convert_moe_packed_tensors)
    directory = tmp_path_factory.mktemp("gpt-oss-mxfp4")
    save_file(packed, directory / "model.safetensors")
    plain = ["model.layers.*.self_attn", "lm_head"]
    method = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    config = config.to_dict() | {"quantization_config": method}
    (directory / "config.json").write_text(json.dumps(config))
    return directory, model


def test_published_mxfp4_is_kept(published, tmp_path):
    """Values are bitwise equal, and logits match transformers."""
    directory, peer = published
    opened = Checkpoint(convert(directory, tmp_path / "out", dtype="fp32", progress=False))
    experts = {f"layers.{n}.ffn.experts.{w}" for n in range(3) for w in ("w13", "w2")}
    modules = {path: {"format": "mxfp4", "group_size": 32} for path in experts}
    assert opened.format == {"name": "mxfp4", "dtype": "fp32", "modules": modules}
    want = expected(peer)
    for name, tensor in want.items():
        path, leaf = name.rsplit(".", 1)
        if path in experts and leaf == "weight":
            parts = {part: opened.read(f"{path}.{part}") for part in ("codes", "scale")}
            assert torch.equal(FORMATS["mxfp4"].unpack(parts, 32), tensor), name
        else:
            assert torch.equal(opened.read(name), tensor), name
    kept = {name for name in want if name.removesuffix(".weight") not in experts}
    packed = {f"{path}.{part}" for path in experts for part in ("codes", "scale")}
    assert opened.tensors.keys() == kept | packed
    model, tokens = load_model(opened, "cpu"), torch.randint(96, (1, 40))
    model.setup_cache(1, 64)
    logits, theirs = model(tokens, torch.arange(40)[None], all_positions=True), peer(tokens).logits
    assert (logits - theirs).norm() / theirs.norm() < 1e-4
    step = model(tokens[:, -1:], torch.tensor([[39]]))
    assert (step - theirs[:, -1]).norm() / theirs[:, -1].norm() < 1e-4


@pytest.fixture
def gpt_oss(published, tmp_path) -> Path:
    """Return a copy of the MXFP4 checkpoint, to be damaged."""
    return Path(shutil.copytree(published[0], tmp_path / "hf"))


def test_the_directory_is_named_after_mxfp4(gpt_oss):
    output = convert(gpt_oss, progress=False)
    assert output == gpt_oss / "model_mxfp4"
    opened = Checkpoint(output)
    assert opened.tensors["embedding.weight"][1] == torch.bfloat16
    assert opened.tensors["layers.0.attention.sinks"][1] == torch.bfloat16
    assert opened.tensors["layers.0.ffn.experts.w2.scale"] == ((4, 64, 3), torch.uint8)


# Errors, through the command ----------------------------------------------------------------------


def only(directory: Path, suffix: str):
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    (directory / f"model{suffix}").write_bytes(b"x")


def truncate(directory: Path):
    path = sorted(directory.glob("*.safetensors"))[1]
    os.truncate(path, path.stat().st_size - 10)


def second_copy(directory: Path):
    def add(tensors, _):
        tensors["model.norm.weight"] = torch.ones(32)

    holder = edit_tensors(directory, "model.norm.weight", lambda *_: None)
    other = next(path for path in sorted(directory.glob("*.safetensors")) if path.name != holder)
    edit_tensors(directory, next(iter(load_file(other))), add)


GATE = "model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "model.layers.2.block_sparse_moe.experts.3.w1.weight"
BLOCKS, SCALES = (
    f"model.layers.1.mlp.experts.gate_up_proj_{part}" for part in ("blocks", "scales")
)


def config(**changes):
    return lambda directory: edit(directory / "config.json", **changes)


def tensor(name: str, change):
    return lambda directory: edit_tensors(directory, name, change)


def adding(name: str):
    return tensor(GATE, lambda tensors, _: tensors.update({name: torch.ones(32)}))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


def filling(name: str, value: float):
    return tensor(name, lambda tensors, _: tensors[name][0].fill_(value))


def without_index(then):
    return lambda directory: (
        (directory / "model.safetensors.index.json").unlink(),
        then(directory),
    )


def writing(file: str, text: str):
    return lambda directory: (directory / file).write_text(text)


def remove_shard(directory: Path):
    sorted(directory.glob("*.safetensors"))[2].unlink()


INDEX = "model.safetensors.index.json"
# How a Mixtral's directory is damaged, the message, and options of the command.
BAD = {
    "a missing tensor": (tensor(EXPERT, dict.pop), f"lacks {EXPERT}"),
    "a missing tensor, no index": (without_index(tensor(EXPERT, dict.pop)), f"{EXPERT} is missing"),
    "an extra tensor": (adding("model.extra"), "model.extra"),
    "a bias not in the config": (
        adding("model.layers.0.self_attn.q_proj.bias"),
        "self_attn.q_proj.bias",
    ),
    "another shape": (
        tensor(GATE, lambda t, n: t.update({n: t[n].T.contiguous()})),
        f"{GATE} has shape",
    ),
    "integers": (tensor(GATE, lambda t, n: t.update({n: t[n].int()})), f"{GATE} has dtype int32"),
    "config of another shape": (config(intermediate_size=32), "has shape"),
    "more layers in the config": (
        config(num_hidden_layers=4),
        r"layers\.3\.input_layernorm\.weight is missing",
    ),
    "fewer layers in the config": (config(num_hidden_layers=2), r"model\.layers\.2"),
    "more experts in the config": (config(num_local_experts=5), GATE.replace(".1.", ".0.")),
    "a quantized model": (config(quantization_config={"quant_method": "hqq"}), "'hqq'"),
    "NaN": (filling(EXPERT, float("nan")), f"{EXPERT} holds NaN"),
    "infinity": (
        filling("model.norm.weight", float("-inf")),
        "model.norm.weight holds NaN or inf",
    ),
    "overflow in fp16": (
        filling(EXPERT, 1e5),
        f"{EXPERT} overflows fp16; convert with --dtype bf16",
        *("--dtype", "fp16"),
    ),
    "overflow in bf16": (
        filling(EXPERT, 3.4e38),
        f"{EXPERT} overflows bf16; convert with --dtype fp32",
        *("--dtype", "bf16"),
    ),
    "a pointer of Git LFS": (
        lambda d: (d / "model-00002-of-00015.safetensors").write_text(POINTER),
        "model-00002-of-.* is a pointer of Git LFS: run git lfs pull in its folder",
    ),
    "a tensor twice": (second_copy, "is there twice"),
    "a missing shard": (remove_shard, "1 of 15 shards missing; fetch model-00003"),
    "a missing shard, no index": (
        without_index(remove_shard),
        "1 of 15 shards missing; fetch model-00003",
    ),
    "a truncated shard": (truncate, "model-00002-of-.* is damaged or truncated"),
    "an index without a map": (writing(INDEX, "{}"), "no weight_map"),
    "an index without a name": (writing(INDEX, '{"weight_map": {"a": ""}}'), "no weight_map"),
    "a .bin": (lambda d: only(d, ".bin"), "pickle is never loaded"),
    "a .pt": (lambda d: only(d, ".pt"), "pickle is never loaded"),
    "a .pth": (lambda d: only(d, ".pth"), "pickle is never loaded"),
    "a .gguf": (lambda d: only(d, ".gguf"), "GGUF is quantized"),
    "no weights": (lambda d: only(d, ".txt"), "no safetensors"),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "config not JSON": (writing("config.json", "{'a': 1}"), "config.json cannot be read"),
    "generation_config not JSON": (
        writing("generation_config.json", "["),
        "generation_config.json cannot be read",
    ),
    "output exists": (lambda d: (d / "model_bf16/x").mkdir(parents=True), "--force"),
    "output in no directory": (lambda d: None, "cannot write", "--output_dir", "{}/none/out"),
    "output is the source": (lambda d: None, "not replaced", "--output_dir", "{}", "--force"),
}
# The same for a gpt-oss in MXFP4.
BAD_MXFP4 = {
    "missing blocks": (tensor(BLOCKS, dict.pop), f"{BLOCKS} is missing"),
    "missing scales": (tensor(SCALES, dict.pop), f"{SCALES} is missing"),
    "blocks of integers": (
        tensor(BLOCKS, lambda t, n: t.update({n: t[n].int()})),
        f"{BLOCKS} has dtype int32 where uint8 belongs",
    ),
    "blocks of another shape": (
        tensor(BLOCKS, lambda t, n: t.update({n: t[n][:, :-1].contiguous()})),
        f"{BLOCKS} has shape",
    ),
    "an infinite scale": (
        tensor(SCALES, lambda t, n: t[n][0, 0].fill_(255)),
        f"{SCALES} holds NaN or infinity",
    ),
}


def run_command(monkeypatch, capsys, *options: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["convert_hf_checkpoint.py", *options])
    capsys.readouterr()  # drop what fixtures printed
    code = convert_hf_checkpoint.main()
    out, err = capsys.readouterr()
    # Drop the progress bar.
    return code, out, re.split(r"B/s\]", err.split("\r")[-1])[-1].strip()


@pytest.mark.parametrize(
    ("source", "case"),
    [("mixtral", case) for case in BAD] + [("gpt_oss", case) for case in BAD_MXFP4],
)
def test_bad_input_is_one_line_and_leaves_nothing(request, monkeypatch, capsys, source, case):
    directory = request.getfixturevalue(source)
    damage, message, *options = (BAD | BAD_MXFP4)[case]
    damage(directory)
    before = tree(directory.parent)
    options = [option.format(directory) for option in options]
    code, out, err = run_command(monkeypatch, capsys, "--checkpoint_dir", str(directory), *options)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and "\n" not in err
    assert re.search(message, err)
    assert tree(directory.parent) == before


def test_paths_without_a_hugging_face_checkpoint(mixtral, tmp_path, monkeypatch, capsys):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    output = convert(mixtral, progress=False)
    for path, message in [
        (tmp_path / "none", "no such"),
        (tmp_path / "x.gguf", "GGUF"),
        (output, "converted already"),
    ]:
        code, _, err = run_command(monkeypatch, capsys, "--checkpoint_dir", str(path))
        assert code == 2 and message in err


def test_the_command(mixtral, monkeypatch, capsys):
    code, out, err = run_command(monkeypatch, capsys, "--checkpoint_dir", str(mixtral))
    assert code == 0 and out == f"{mixtral}/model_bf16\n"
    assert re.fullmatch(r"[\d.]+ GB in [\d.]+ s, [\d.]+ GB/s", err)
    edit_tensors(mixtral, "model.norm.weight", lambda t, n: t[n].fill_(0.5))
    assert run_command(monkeypatch, capsys, "--checkpoint_dir", str(mixtral))[0] == 2
    assert run_command(monkeypatch, capsys, "--checkpoint_dir", str(mixtral), "--force")[0] == 0
    assert Checkpoint(mixtral / "model_bf16").read("norm.weight").unique().item() == 0.5


@pytest.mark.parametrize(("source", "mode"), (("mixtral", "int4"), ("olmoe", "hqq4")))
def test_published_files_are_packed_while_they_are_converted(
    request, saved, tmp_path, monkeypatch, capsys, source, mode
):
    """The same files as those of two steps; groups of 16, and of 8 with scales and zeros."""
    first = Path(shutil.copytree(saved / source, tmp_path / "first"))
    second = Path(shutil.copytree(saved / source, tmp_path / "second"))

    def quantized(path: Path) -> None:
        options = "--checkpoint_path", str(path), "--mode", mode, "--device", "cpu"
        monkeypatch.setattr(sys, "argv", ["quantize.py", *options])
        assert quantize.main() == 0, capsys.readouterr().err

    quantized(convert(first, progress=False))
    quantized(second)
    made, other = (Checkpoint(path / f"model_{mode}") for path in (first, second))
    other.verify(progress=False)
    assert (made.files, made.format, made.args) == (other.files, other.format, other.args)
    assert not (second / "model_bf16").exists()


@pytest.mark.parametrize("force", [False, True])
def test_an_interrupted_conversion_changes_nothing(mixtral, monkeypatch, capsys, force):
    if force:
        convert(mixtral, progress=False)
    before, check_values, calls = tree(mixtral), pieces.check_values, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return check_values(*arguments)

    monkeypatch.setattr(pieces, "check_values", interrupted)
    options = ["--force"] if force else []
    code, out, err = run_command(monkeypatch, capsys, "--checkpoint_dir", str(mixtral), *options)
    assert (code, out) == (130, "") and "nothing was written" in err
    assert len(calls) == 10 and tree(mixtral) == before


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_damaged_files_give_a_value_error(saved, data):
    with tempfile.TemporaryDirectory() as root:
        directory = Path(shutil.copytree(saved / "olmoe", Path(root) / "hf"))
        path = directory / data.draw(st.sampled_from(sorted(os.listdir(directory))))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            offset = data.draw(st.integers(0, min(len(content), 1500) - 1))
            byte = st.sampled_from(b'09-"[]{},:e\x00\xff') | st.integers(0, 255)
            content[offset] = data.draw(byte)
        size = data.draw(st.just(len(content)) | st.integers(0, len(content)))
        path.write_bytes(content[:size])
        before = tree(Path(root))
        try:
            Checkpoint(convert(directory, progress=False))
        except ValueError as error:
            assert str(error)
            assert tree(Path(root)) == before


# Memory -------------------------------------------------------------------------------------------

MEASURE = """
import sys

import torch

from benchmarks.load_checkpoint import Peak
from models.converter import convert

directory, warm_up, dtype = sys.argv[1:]
torch.set_num_threads(1)
convert(warm_up, f"{warm_up}/{dtype}", dtype, progress=False)
with Peak() as peak:
    convert(directory, dtype=dtype, progress=False)
print(peak.bytes)
"""


def save_large_mixtral(directory: Path) -> int:
    """Save a Mixtral of 604 MB in 12 layers, one shard a layer; return the bytes of a layer."""
    D, I, E, L, V = 512, 1024, 16, 12, 2048
    config = dict(
        architectures=["MixtralForCausalLM"],
        hidden_size=D,
        intermediate_size=I,
        num_local_experts=E,
        num_hidden_layers=L,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=V,
    )
    (directory / "config.json").write_text(json.dumps(config))
    layer = {}
    for expert in range(E):
        for name, shape in (("w1", (I, D)), ("w2", (D, I)), ("w3", (I, D))):
            layer[f"block_sparse_moe.experts.{expert}.{name}.weight"] = torch.randn(shape)
    for name, rows in (("q", D), ("k", D // 2), ("v", D // 2), ("o", D)):
        layer[f"self_attn.{name}_proj.weight"] = torch.randn(rows, D)
    layer["block_sparse_moe.gate.weight"] = torch.randn(E, D)
    for name in ("input", "post_attention"):
        layer[f"{name}_layernorm.weight"] = torch.randn(D)
    layer = {name: tensor.bfloat16() for name, tensor in layer.items()}
    rest = {"model.norm.weight": torch.randn(D).bfloat16()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rest[name] = torch.randn(V, D).bfloat16()
    for i in range(L):
        shard = {f"model.layers.{i}.{name}": value for name, value in layer.items()}
        save_file(shard, directory / f"model-{i + 1:05d}-of-{L + 1:05d}.safetensors")
    save_file(rest, directory / f"model-{L + 1:05d}-of-{L + 1:05d}.safetensors")
    return sum(value.nbytes for value in layer.values())


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads memory from Linux's /proc"
)
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "least", "most"), (("bf16", 0, 0.5), ("fp16", 0.5, 2.5)))
def test_memory_is_about_one_layer(mixtral, tmp_path, dtype, least, most):
    """The peak of anonymous memory, in layers. bf16 is copied from file to file: hardly any."""
    directory = tmp_path / "large"
    directory.mkdir()
    layer_bytes = save_large_mixtral(directory)
    total = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert total >= 600e6
    command = [sys.executable, "-c", MEASURE, str(directory), str(mixtral), dtype]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    # Less than half a layer in fp16 would mean that the measurement missed the peak.
    assert least * layer_bytes < int(run.stdout) < most * layer_bytes
