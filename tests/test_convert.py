"""Conversion: exact for every family and layout, one layer in memory, one clear line for what cannot be converted."""

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
import torch
from conftest import hub_keys
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
from args import ModelArgs, Yarn
from checkpoint import Checkpoint
from convert_hf_checkpoint import convert
from generate import load_model
from packing import FORMATS

SMALL = dict(vocab_size=96, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
SMALL |= dict(max_position_embeddings=128, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1, 1.5, 2.0, 4.0], long_factor=[2.0, 3.0, 4.0, 9.0])
LONGROPE |= dict(short_mscale=1.2, long_mscale=1.4, original_max_position_embeddings=64)
LATENT = dict(num_key_value_heads=4, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
CONFIGS = {
    "mixtral": MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=4),
    "mixtral-tied": MixtralConfig(
        **SMALL, intermediate_size=24, num_local_experts=3, tie_word_embeddings=True, sliding_window=16, head_dim=6
    ),
    "qwen3": Qwen3MoeConfig(
        **SMALL, intermediate_size=40, moe_intermediate_size=24, num_experts=4, head_dim=12, norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
    "qwen3-bias": Qwen3MoeConfig(
        **SMALL, intermediate_size=40, moe_intermediate_size=24, num_experts=4, attention_bias=True,
        decoder_sparse_step=2, use_sliding_window=True, sliding_window=8,
    ),
    "qwen2": Qwen2MoeConfig(
        **SMALL, intermediate_size=40, moe_intermediate_size=24, num_experts=4, shared_expert_intermediate_size=20,
        mlp_only_layers=[2],
    ),
    "granite": GraniteMoeConfig(
        **SMALL, intermediate_size=24, num_local_experts=4, tie_word_embeddings=True, embedding_multiplier=12.0,
        attention_multiplier=0.25, residual_multiplier=0.22, logits_scaling=4,
    ),
    "phi": PhimoeConfig(
        **SMALL, intermediate_size=24, num_local_experts=4, attention_bias=True, lm_head_bias=True, sliding_window=64,
        original_max_position_embeddings=64, rope_parameters=LONGROPE,
    ),
    "glm": Glm4MoeConfig(
        **SMALL, intermediate_size=40, moe_intermediate_size=24, n_routed_experts=4, n_shared_experts=2, head_dim=8,
        first_k_dense_replace=2, attention_bias=True, routed_scaling_factor=2.5, num_nextn_predict_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    ),
    "deepseek-v2": DeepseekV2Config(
        **SMALL | LATENT, intermediate_size=40, moe_intermediate_size=24, n_routed_experts=4, n_shared_experts=2,
        q_lora_rank=None, first_k_dense_replace=1, rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
            "mscale": 0.5, "mscale_all_dim": 0.5,
        },
    ),
    "deepseek-v3": DeepseekV3Config(
        **SMALL | LATENT, intermediate_size=40, moe_intermediate_size=24, n_routed_experts=4, n_shared_experts=2,
        q_lora_rank=16, first_k_dense_replace=2, n_group=2, topk_group=1, num_mtp_layers=2, norm_topk_prob=False,
    ),
    "olmoe": OlmoeConfig(**SMALL, intermediate_size=24, num_experts=4, clip_qkv=0.5, norm_topk_prob=False),
    "gpt-oss": GptOssConfig(
        **SMALL, intermediate_size=24, num_local_experts=4, head_dim=8, sliding_window=16, swiglu_limit=3.0,
        layer_types=["full_attention", "sliding_attention", "full_attention"], rope_parameters={
            "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 4.0, "original_max_position_embeddings": 32,
            "mscale": 1.0, "mscale_all_dim": 0.5,
        },
    ),
    "olmoe-lone": OlmoeConfig(**SMALL | dict(num_experts_per_tok=1), intermediate_size=24, num_experts=1, clip_qkv=0.5),
}  # fmt: skip
ATTENTION = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)  # of its yarn
GPT_OSS_ARGS = dict(
    full_layers=(0, 2), attention_sinks=True, router_bias=True, expert_bias=True, swiglu_limit=3.0,
    yarn=Yarn(4.0, 32, attention=ATTENTION),
)  # fmt: skip
LAYOUTS = ("one file", "shards", "shards without index", "fused", "older keys")


@pytest.fixture(scope="module")
def models():
    """A random model of each configuration; biases and norms too, which are constant in a fresh model."""
    torch.manual_seed(0)
    found = {name: AutoModelForCausalLM.from_config(config).eval() for name, config in CONFIGS.items()}
    with torch.no_grad():
        for model in found.values():
            for tensor in itertools.chain(model.parameters(), model.buffers()):
                tensor.normal_()
    return found


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    """The directories in Hugging Face layout, to be read only."""
    root = tmp_path_factory.mktemp("saved")
    for name, model in models.items():
        model.save_pretrained(root / name, max_shard_size="12KB")
    return root


@pytest.fixture
def mixtral(saved, tmp_path) -> Path:
    """One of them, to be spoilt."""
    return Path(shutil.copytree(saved / "mixtral", tmp_path / "hf"))


def edit(path: Path, **changes):
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(value))


def edit_tensors(directory: Path, name: str, change):
    """Applies `change(tensors, name)` to the shard that holds the tensor `name`."""
    for path in directory.glob("*.safetensors"):
        if name in (tensors := load_file(path)):
            change(tensors, name)
            save_file(tensors, path)
            return path.name
    raise KeyError(name)


def older_keys(config: dict) -> dict:
    """config.json as the hub has it: its keys, and what the class knows anyway left out."""
    fresh = AutoConfig.for_model(config["model_type"]).to_dict()
    return {
        key: value
        for key, value in hub_keys(config).items()
        if key in ("model_type", "rope_theta", "partial_rotary_factor") or fresh.get(key) != value
    }


def latent(theirs: dict, at: str, config) -> dict:
    """What becomes of a layer's latent attention, row by row: neighbours are rotated as half with half here."""
    nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank

    def rows(name: str, heads: int, still: int) -> torch.Tensor:
        order = [*range(still), *range(still, still + rope, 2), *range(still + 1, still + rope, 2)]
        return theirs[f"{at}self_attn.{name}.weight"][[h * (still + rope) + n for h in range(heads) for n in order]]

    q = theirs.get(f"{at}self_attn.q_a_proj.weight")
    wq = rows("q_proj" if q is None else "q_b_proj", config.num_attention_heads, nope)
    ours = {} if q is None else {"wq.weight": wq, "q_norm.weight": theirs[f"{at}self_attn.q_a_layernorm.weight"]}
    return ours | {
        "wqkv.weight": torch.cat((wq if q is None else q, rows("kv_a_proj_with_mqa", 1, rank))),
        "kv_norm.weight": theirs[f"{at}self_attn.kv_a_layernorm.weight"],
        "wkv": theirs[f"{at}self_attn.kv_b_proj.weight"].view(config.num_attention_heads, -1, rank),
    }


def expected(model) -> dict:
    """Our tensors, put together from the state dict that transformers holds in memory."""
    theirs, ours = model.state_dict(), {}
    theirs = {name.replace(".block_sparse_moe.router.", ".mlp.gate."): tensor for name, tensor in theirs.items()}
    theirs = {name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in theirs.items()}
    theirs = {name.replace(".mlp.router.", ".mlp.gate."): tensor for name, tensor in theirs.items()}
    theirs = {name.replace(".shared_experts.", ".shared_expert."): tensor for name, tensor in theirs.items()}

    def join(*names):
        return torch.cat([theirs[name] for name in names])

    for i in range(model.config.num_hidden_layers):
        t, o = f"model.layers.{i}.", f"layers.{i}."
        for kind in ("weight", "bias"):
            if t + f"input_layernorm.{kind}" in theirs:
                ours[o + f"attention_norm.{kind}"] = theirs[t + f"input_layernorm.{kind}"]
                ours[o + f"ffn_norm.{kind}"] = theirs[t + f"post_attention_layernorm.{kind}"]
            if t + f"self_attn.k_proj.{kind}" in theirs:
                ours[o + f"attention.wqkv.{kind}"] = join(*(t + f"self_attn.{x}_proj.{kind}" for x in "qkv"))
            if t + f"self_attn.o_proj.{kind}" in theirs:
                ours[o + f"attention.wo.{kind}"] = theirs[t + f"self_attn.o_proj.{kind}"]
        if t + "self_attn.kv_b_proj.weight" in theirs:
            ours |= {f"{o}attention.{name}": tensor for name, tensor in latent(theirs, t, model.config).items()}
        for norm in ("q_norm", "k_norm"):
            if t + f"self_attn.{norm}.weight" in theirs:
                ours[o + f"attention.{norm}.weight"] = theirs[t + f"self_attn.{norm}.weight"]
        if t + "self_attn.sinks" in theirs:  # gpt-oss, in words other than the converter's
            ours[o + "attention.sinks"] = theirs[t + "self_attn.sinks"]
            for kind in ("weight", "bias"):
                ours[o + f"ffn.router.{kind}"] = theirs[t + f"mlp.gate.{kind}"]
            for name, source in (("w13", "gate_up_proj"), ("w2", "down_proj")):
                weight, bias = theirs[t + f"mlp.experts.{source}"].mT, theirs[t + f"mlp.experts.{source}_bias"]
                order = [*range(0, len(bias[0]), 2), *range(1, len(bias[0]), 2)] if name == "w13" else slice(None)
                ours[o + f"ffn.experts.{name}.weight"], ours[o + f"ffn.experts.{name}.bias"] = (
                    weight[:, order], bias[:, order]
                )  # fmt: skip
        elif t + "mlp.gate.weight" in theirs:
            ours[o + "ffn.router.weight"] = theirs[t + "mlp.gate.weight"]
            ours[o + "ffn.experts.w13.weight"] = theirs[t + "mlp.experts.gate_up_proj"]
            ours[o + "ffn.experts.w2.weight"] = theirs[t + "mlp.experts.down_proj"]
            if (shared := t + "mlp.shared_expert.") + "gate_proj.weight" in theirs:
                ours[o + "ffn.shared.w13.weight"] = join(shared + "gate_proj.weight", shared + "up_proj.weight")
                ours[o + "ffn.shared.w2.weight"] = theirs[shared + "down_proj.weight"]
                if (gate := t + "mlp.shared_expert_gate.weight") in theirs:
                    ours[o + "ffn.shared_gate.weight"] = theirs[gate]
            if (bias := t + "mlp.gate.e_score_correction_bias") in theirs:
                ours[o + "ffn.score_bias"] = theirs[bias]
        else:
            ours[o + "ffn.w13.weight"] = join(t + "mlp.gate_proj.weight", t + "mlp.up_proj.weight")
            ours[o + "ffn.w2.weight"] = theirs[t + "mlp.down_proj.weight"]
    ours["embedding.weight"], ours["norm.weight"] = theirs["model.embed_tokens.weight"], theirs["model.norm.weight"]
    ours |= {
        name: theirs[original]
        for name, original in {"norm.bias": "model.norm.bias", "head.bias": "lm_head.bias"}.items()
        if original in theirs
    }
    if not model.config.tie_word_embeddings:
        ours["head.weight"] = theirs["lm_head.weight"]
    return ours


def tree(directory: Path) -> dict:
    return {path: path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


# What is converted


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
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
    c, args = model.config, ModelArgs(**opened.args)
    assert args == ModelArgs(
        dim=32,
        n_layer=3,
        n_head=4,
        n_kv_head=1 if name.startswith("deepseek") else 2,
        head_dim={"mixtral-tied": 6, "qwen3": 12, "deepseek-v2": 12, "deepseek-v3": 12}.get(name, 8),
        intermediate=24,
        n_expert={"mixtral-tied": 3, "olmoe-lone": 1}.get(name, 4),
        n_active=1 if name == "olmoe-lone" else 2,
        vocab_size=96,
        max_position=64 if name == "phi" else 128,
        rope_theta=c.rope_parameters["rope_theta"],
        norm_eps=c.rms_norm_eps,
        norm_topk=name in ("mixtral", "mixtral-tied", "qwen3", "granite", "glm", "gpt-oss"),
        qk_norm={"qwen3": "head", "olmoe": "full"}.get(name.split("-")[0], "none"),
        clip_qkv=0.5 if name.startswith("olmoe") else None,
        attention_bias=name in ("qwen3-bias", "phi", "gpt-oss"),
        tied_embeddings=name in ("mixtral-tied", "granite"),
        sliding_window={"mixtral-tied": 16, "qwen3-bias": 8, "phi": 64, "gpt-oss": 16}.get(name),
        dense_layers={
            **{"qwen2": (2,), "qwen3": (0,), "qwen3-bias": (0, 2), "glm": (0, 1)},
            **{"deepseek-v2": (0,), "deepseek-v3": (0, 1)},
        }.get(name, ()),
        dense_intermediate=40 if name.startswith(("qwen", "glm", "deepseek")) else 0,
        qkv_bias=name in ("qwen2", "glm"),
        shared_intermediate={"qwen2": 20, "glm": 48, "deepseek-v2": 48, "deepseek-v3": 48}.get(name, 0),
        **{
            "glm": dict(shared_gated=False, scoring="sigmoid", routed_scale=2.5, rotary_dim=2),
            "phi": dict(
                layer_norm=True, head_bias=True, mixer_eps=0.01, rope_factors=(1.0, 1.5, 2.0, 4.0), rope_scale=1.2
            ),
            "granite": dict(embedding_scale=12.0, attention_scale=0.25, residual_scale=0.22, logit_scale=0.25),
            "gpt-oss": GPT_OSS_ARGS,
            "deepseek-v2": dict(
                shared_gated=False,
                rotary_dim=4,
                kv_rank=24,
                value_dim=6,
                yarn=Yarn(4.0, 32),
                attention_scale=12**-0.5 * (0.05 * math.log(4) + 1) ** 2,
            ),
            "deepseek-v3": dict(
                shared_gated=False,
                scoring="sigmoid",
                routed_scale=2.5,
                rotary_dim=4,
                kv_rank=24,
                q_rank=16,
                value_dim=6,
                n_group=2,
                n_active_group=1,
            ),
        }.get(name, {}),
    )


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
def test_layers_that_predict_further_tokens_are_left_out(models, saved, tmp_path, name):
    directory = Path(shutil.copytree(saved / name, tmp_path / "hf"))
    layer = {f"model.layers.{n}.eh_proj.weight": torch.ones(32, 64) for n in (3, 4)}
    save_file(layer, directory / "model-mtp.safetensors")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(layer, "model-mtp.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Checkpoint(convert(directory, progress=False)).tensors.keys() == expected(models[name]).keys()
    edit(directory / "config.json", num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"model\.layers\.4\.eh_proj\.weight .* has no place"):
        convert(directory, progress=False, force=True)


def test_files_and_side_files(mixtral):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (mixtral / name).write_text(f"the {name}")
    (mixtral / "README.md").write_text("not wanted")
    output = convert(mixtral, progress=False)
    side = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    weights = {"layer_00.safetensors", "layer_01.safetensors", "layer_02.safetensors", "rest.safetensors"}
    assert set(os.listdir(output)) == {"config.json", "index.json"} | side | weights
    assert (output / "tokenizer.json").read_text() == "the tokenizer.json"


@pytest.mark.parametrize(
    ("given", "in_config", "want"),
    [
        ({"eos_token_id": [5, 6], "top_k": 9}, {}, {"bos_token_id": 1, "eos_token_id": [5, 6], "top_k": 9}),
        ({"top_k": 9}, {"eos_token_id": [7, 8]}, {"bos_token_id": 1, "eos_token_id": [7, 8], "top_k": 9}),
        (None, {"eos_token_id": 7}, {"bos_token_id": 1, "eos_token_id": 7}),
        (None, {"eos_token_id": None}, {"bos_token_id": 1}),
    ],
)  # fmt: skip
def test_no_stop_id_is_lost(mixtral, given, in_config, want):
    edit(mixtral / "config.json", **in_config)
    (mixtral / "generation_config.json").unlink()
    if given is not None:
        (mixtral / "generation_config.json").write_text(json.dumps(given))
    output = convert(mixtral, progress=False)
    assert json.loads((output / "generation_config.json").read_text()) == want


def test_harmless_extras_are_left_out(mixtral, models):
    edit_tensors(mixtral, "model.norm.weight", lambda t, n: t.update({"model.rotary_emb.inv_freq": torch.ones(3)}))
    assert Checkpoint(convert(mixtral, progress=False)).tensors.keys() == expected(models["mixtral"]).keys()


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


# MXFP4, as gpt-oss is published


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A small gpt-oss with experts in MXFP4 blocks, and transformers' model with what transformers makes of them."""
    integrations = pytest.importorskip("transformers.integrations.mxfp4")
    small = SMALL | dict(hidden_size=64, num_attention_heads=4)
    config = GptOssConfig(**small, intermediate_size=96, num_local_experts=4, head_dim=24, sliding_window=8)
    torch.manual_seed(3)
    model, packed = AutoModelForCausalLM.from_config(config).eval(), {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((1.0 if name.endswith("norm.weight") else 0.0) + 0.2 * torch.randn_like(parameter))
        for name, tensor in model.state_dict().items():
            if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
                packed[name] = tensor.clone()
                continue
            experts, width, rows = tensor.shape
            blocks = torch.randint(256, (experts, rows, width // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 126, blocks.shape[:-1], dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensor.copy_(integrations.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    directory = tmp_path_factory.mktemp("gpt-oss-mxfp4")
    save_file(packed, directory / "model.safetensors")
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (directory / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": method}))
    return directory, model


def test_mxfp4_is_taken_over_without_quantising_again(published, tmp_path):
    """The same numbers to the bit, and transformers' logits."""
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
    assert opened.tensors.keys() == kept | {f"{path}.{part}" for path in experts for part in ("codes", "scale")}
    model, tokens = load_model(opened, "cpu"), torch.randint(96, (1, 40))
    model.setup_cache(1, 64)
    logits, theirs = model(tokens, torch.arange(40)[None], all_positions=True), peer(tokens).logits
    assert (logits - theirs).norm() / theirs.norm() < 1e-4
    step = model(tokens[:, -1:], torch.tensor([[39]]))
    assert (step - theirs[:, -1]).norm() / theirs[:, -1].norm() < 1e-4


@pytest.fixture
def gpt_oss(published, tmp_path) -> Path:
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(published[0], tmp_path / "hf"))


def test_mxfp4_gives_the_directory_its_name(gpt_oss):
    output = convert(gpt_oss, progress=False)
    assert output == gpt_oss / "model_mxfp4"
    opened = Checkpoint(output)
    assert opened.tensors["embedding.weight"][1] == opened.tensors["layers.0.attention.sinks"][1] == torch.bfloat16
    assert opened.tensors["layers.0.ffn.experts.w2.scale"] == ((4, 64, 3), torch.uint8)


# What cannot be converted, through the command


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
BLOCKS, SCALES = (f"model.layers.1.mlp.experts.gate_up_proj_{part}" for part in ("blocks", "scales"))


def config(**changes):
    return lambda directory: edit(directory / "config.json", **changes)


def tensor(name: str, change):
    return lambda directory: edit_tensors(directory, name, change)


def adding(name: str):
    return tensor(GATE, lambda tensors, _: tensors.update({name: torch.ones(32)}))


def filling(name: str, value: float):
    return tensor(name, lambda tensors, _: tensors[name][0].fill_(value))


def without_index(then):
    return lambda directory: ((directory / "model.safetensors.index.json").unlink(), then(directory))


def writing(file: str, text: str):
    return lambda directory: (directory / file).write_text(text)


def remove_shard(directory: Path):
    sorted(directory.glob("*.safetensors"))[2].unlink()


BAD = {  # how the directory of a Mixtral is spoilt, the message, and options of the command
    "a missing tensor": (tensor(EXPERT, dict.pop), f"lacks {EXPERT}"),
    "a missing tensor, no index": (without_index(tensor(EXPERT, dict.pop)), f"{EXPERT} is missing"),
    "an extra tensor": (adding("model.extra"), "model.extra"),
    "a bias not in the config": (adding("model.layers.0.self_attn.q_proj.bias"), "self_attn.q_proj.bias"),
    "another shape": (tensor(GATE, lambda t, n: t.update({n: t[n].T.contiguous()})), f"{GATE} has shape"),
    "integers": (tensor(GATE, lambda t, n: t.update({n: t[n].int()})), f"{GATE} has dtype int32"),
    "config of another shape": (config(intermediate_size=32), "has shape"),
    "more layers in the config": (config(num_hidden_layers=4), r"layers\.3\.input_layernorm\.weight is missing"),
    "fewer layers in the config": (config(num_hidden_layers=2), r"model\.layers\.2"),
    "more experts in the config": (config(num_local_experts=5), GATE.replace(".1.", ".0.")),
    "a quantised model": (config(quantization_config={"quant_method": "gptq"}), "'gptq'"),
    "NaN": (filling(EXPERT, float("nan")), f"{EXPERT} holds NaN"),
    "infinity": (filling("model.norm.weight", float("-inf")), "model.norm.weight holds NaN or inf"),
    "overflow in fp16": (filling(EXPERT, 1e5), f"{EXPERT} overflows fp16", "--dtype", "fp16"),
    "a tensor twice": (second_copy, "is there twice"),
    "a missing shard": (remove_shard, "1 of 15 shards missing; fetch model-00003"),
    "a missing shard, no index": (without_index(remove_shard), "1 of 15 shards missing; fetch model-00003"),
    "a truncated shard": (truncate, "model-00002-of-.* is damaged or truncated"),
    "an index without a map": (writing("model.safetensors.index.json", "{}"), "no weight_map"),
    "a .bin": (lambda d: only(d, ".bin"), "pickle is never loaded"),
    "a .pt": (lambda d: only(d, ".pt"), "pickle is never loaded"),
    "a .pth": (lambda d: only(d, ".pth"), "pickle is never loaded"),
    "a .gguf": (lambda d: only(d, ".gguf"), "GGUF is quantised"),
    "no weights": (lambda d: only(d, ".txt"), "no safetensors"),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "config not JSON": (writing("config.json", "{'a': 1}"), "config.json cannot be read"),
    "generation_config not JSON": (writing("generation_config.json", "["), "generation_config.json cannot be read"),
    "output exists": (lambda d: (d / "model_bf16/x").mkdir(parents=True), "--force"),
    "output in no directory": (lambda d: None, "cannot write", "--output_dir", "{}/none/out"),
    "force upon the source": (lambda d: None, "not replaced", "--output_dir", "{}", "--force"),
}
BAD_MXFP4 = {  # likewise of a gpt-oss in MXFP4
    "missing blocks": (tensor(BLOCKS, dict.pop), f"{BLOCKS} is missing"),
    "missing scales": (tensor(SCALES, dict.pop), f"{SCALES} is missing"),
    "blocks of integers": (
        tensor(BLOCKS, lambda t, n: t.update({n: t[n].int()})), f"{BLOCKS} has dtype int32 where uint8 belongs"
    ),
    "blocks of another shape": (
        tensor(BLOCKS, lambda t, n: t.update({n: t[n][:, :-1].contiguous()})), f"{BLOCKS} has shape"
    ),
    "an infinite scale": (tensor(SCALES, lambda t, n: t[n][0, 0].fill_(255)), f"{SCALES} holds NaN or infinity"),
}  # fmt: skip


def run_command(monkeypatch, capsys, *options: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["convert_hf_checkpoint.py", *options])
    code = convert_hf_checkpoint.main()
    out, err = capsys.readouterr()
    return code, out, err.split("\r")[-1].split("layer/s]")[-1].strip()  # what stands after the progress bar


@pytest.mark.parametrize(
    ("source", "case"), [("mixtral", case) for case in BAD] + [("gpt_oss", case) for case in BAD_MXFP4]
)
def test_bad_input_is_one_line_and_leaves_nothing(request, monkeypatch, capsys, source, case):
    directory = request.getfixturevalue(source)
    spoil, message, *options = (BAD | BAD_MXFP4)[case]
    spoil(directory)
    before = tree(directory.parent)
    options = [option.format(directory) for option in options]
    code, out, err = run_command(monkeypatch, capsys, "--checkpoint_dir", str(directory), *options)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and "\n" not in err
    assert re.search(message, err)
    assert tree(directory.parent) == before


def test_places_that_are_no_hugging_face_directory(mixtral, tmp_path, monkeypatch, capsys):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    output = convert(mixtral, progress=False)
    for place, message in [
        (tmp_path / "none", "no such"),
        (tmp_path / "x.gguf", "GGUF"),
        (output, "converted already"),
    ]:
        code, _, err = run_command(monkeypatch, capsys, "--checkpoint_dir", str(place))
        assert code == 2 and message in err


def test_the_command(mixtral, monkeypatch, capsys):
    code, out, err = run_command(monkeypatch, capsys, "--checkpoint_dir", str(mixtral))
    assert code == 0 and out == f"{mixtral}/model_bf16\n"
    assert re.fullmatch(r"[\d.]+ GB in [\d.]+ s, [\d.]+ GB/s", err)
    edit_tensors(mixtral, "model.norm.weight", lambda t, n: t[n].fill_(0.5))
    assert run_command(monkeypatch, capsys, "--checkpoint_dir", str(mixtral))[0] == 2
    assert run_command(monkeypatch, capsys, "--checkpoint_dir", str(mixtral), "--force")[0] == 0
    assert Checkpoint(mixtral / "model_bf16").read("norm.weight").unique().item() == 0.5


@pytest.mark.parametrize("force", [False, True])
def test_an_interrupted_conversion_leaves_what_was_there(mixtral, monkeypatch, capsys, force):
    if force:
        convert(mixtral, progress=False)
    before, assemble, calls = tree(mixtral), convert_hf_checkpoint.assemble, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return assemble(*arguments)

    monkeypatch.setattr(convert_hf_checkpoint, "assemble", interrupted)
    options = ["--force"] if force else []
    code, out, err = run_command(monkeypatch, capsys, "--checkpoint_dir", str(mixtral), *options)
    assert (code, out) == (130, "") and "nothing was written" in err
    assert len(calls) == 10 and tree(mixtral) == before


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_damage_gives_anything_but_a_value_error(saved, data):
    with tempfile.TemporaryDirectory() as root:
        directory = Path(shutil.copytree(saved / "olmoe", Path(root) / "hf"))
        path = directory / data.draw(st.sampled_from(sorted(os.listdir(directory))))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            place = data.draw(st.integers(0, min(len(content), 1500) - 1))
            content[place] = data.draw(st.sampled_from(b'09-"[]{},:e\x00\xff') | st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))])
        before = tree(Path(root))
        try:
            Checkpoint(convert(directory, progress=False))
        except ValueError as error:
            assert str(error)
            assert tree(Path(root)) == before


# Memory

MEASURE = """
import sys

import torch

from benchmarks.load_checkpoint import Peak
from convert_hf_checkpoint import convert

directory, warm_up = sys.argv[1:]
torch.set_num_threads(1)
convert(warm_up, warm_up + "/out", progress=False)
with Peak() as peak:
    convert(directory, progress=False)
print(peak.bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_memory_is_about_one_layer(mixtral, tmp_path):
    """604 MB in 12 layers, written shard by shard: the peak of anonymous memory stays under 2.5 layers."""
    D, I, E, L, V = 512, 1024, 16, 12, 2048
    directory = tmp_path / "large"
    directory.mkdir()
    config = dict(architectures=["MixtralForCausalLM"], hidden_size=D, intermediate_size=I, num_local_experts=E)
    config |= dict(num_hidden_layers=L, num_attention_heads=8, num_key_value_heads=4, vocab_size=V)
    (directory / "config.json").write_text(json.dumps(config))
    experts = {
        f"block_sparse_moe.experts.{e}.{w}.weight": torch.randn(D, I) for e in range(E) for w in ("w1", "w2", "w3")
    }
    layer = {name: (value if ".w2." in name else value.view(I, D)).bfloat16() for name, value in experts.items()}
    for name, rows, columns in (("q", D, D), ("k", D // 2, D), ("v", D // 2, D), ("o", D, D)):
        layer[f"self_attn.{name}_proj.weight"] = torch.randn(rows, columns).bfloat16()
    layer |= {"block_sparse_moe.gate.weight": torch.randn(E, D).bfloat16()}
    layer |= {f"{name}_layernorm.weight": torch.randn(D).bfloat16() for name in ("input", "post_attention")}
    rest = {"model.norm.weight": torch.randn(D).bfloat16()}
    rest |= {name: torch.randn(V, D).bfloat16() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    for i in range(L):
        shard = {f"model.layers.{i}.{name}": value for name, value in layer.items()}
        save_file(shard, directory / f"model-{i + 1:05d}-of-{L + 1:05d}.safetensors")
    save_file(rest, directory / f"model-{L + 1:05d}-of-{L + 1:05d}.safetensors")
    total = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert total >= 600e6
    command = [sys.executable, "-c", MEASURE, str(directory), str(mixtral)]
    root = Path(convert_hf_checkpoint.__file__).parent
    used = int(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout)
    bytes_of_layer = sum(value.nbytes for value in layer.values())
    assert 0.5 * bytes_of_layer < used < 2.5 * bytes_of_layer  # less would mean that the measurement saw nothing
