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
from conftest import FP8
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
from benchmark import ARCHITECTURES
from checkpoint import Checkpoint
from convert_hf_checkpoint import convert
from families import FAMILIES, args_from_hf
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
    """config.json as the hub has it: keys of transformers 4, and what the class knows anyway left out."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    config |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    kind = rope.pop("rope_type")  # longrope has it under an older name
    rope |= {"type" if kind == "longrope" else "rope_type": kind}
    config |= {"rope_scaling": rope if kind != "default" else None, "torch_dtype": config.pop("dtype")}
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    fresh = AutoConfig.for_model(config["model_type"]).to_dict()
    return {
        key: value
        for key, value in config.items()
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


def test_mxfp4_gives_the_directory_its_name(published, tmp_path):
    directory = Path(shutil.copytree(published[0], tmp_path / "hf"))
    output = convert(directory, progress=False)
    assert output == directory / "model_mxfp4"
    opened = Checkpoint(output)
    assert opened.tensors["embedding.weight"][1] == opened.tensors["layers.0.attention.sinks"][1] == torch.bfloat16
    assert opened.tensors["layers.0.ffn.experts.w2.scale"] == ((4, 64, 3), torch.uint8)


BLOCKS, SCALES = (f"model.layers.1.mlp.experts.gate_up_proj_{part}" for part in ("blocks", "scales"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (BLOCKS, dict.pop, f"{BLOCKS} is missing"),
        (SCALES, dict.pop, f"{SCALES} is missing"),
        (BLOCKS, lambda t, n: t.update({n: t[n].int()}), f"{BLOCKS} has dtype int32 where uint8 belongs"),
        (BLOCKS, lambda t, n: t.update({n: t[n][:, :-1].contiguous()}), f"{BLOCKS} has shape"),
        (SCALES, lambda t, n: t[n][0, 0].fill_(255), f"{SCALES} holds NaN or infinity"),
    ],
)
def test_mxfp4_that_is_damaged_is_one_line(published, tmp_path, name, change, message):
    directory = Path(shutil.copytree(published[0], tmp_path / "hf"))
    edit_tensors(directory, name, change)
    with pytest.raises(ValueError, match=message) as error:
        convert(directory, progress=False)
    assert "\n" not in str(error.value) and not list(directory.glob("*model_*"))


# config.json alone


@pytest.mark.parametrize("architecture", FAMILIES)
def test_absent_keys_mean_what_they_mean_to_transformers(architecture):
    config = AutoConfig.for_model(FAMILIES[architecture].model_type)
    said = {"head_dim": 128} if config.hidden_size % config.num_attention_heads else {}  # GLM's files always say it
    if architecture == "DeepseekV2ForCausalLM":  # and these, of which the class knows no or an odd number
        said = {"num_experts_per_tok": 6, "moe_intermediate_size": 1408}
    given = config.to_dict() | said
    assert args_from_hf({"architectures": [architecture], **said}) == args_from_hf(given)
    assert args_from_hf({"model_type": config.model_type, **said}) == args_from_hf(given)
    for key, value in FAMILIES[architecture].defaults.items():
        if key in ("rope_theta", "rope_type", "partial_rotary_factor"):
            assert config.rope_parameters[key] == value
        elif key != "sliding_window":
            assert getattr(config, key) == value, key
    for key, value in FAMILIES[architecture].rope.items():
        assert config.rope_parameters[key] == value, key
    assert config.rope_parameters["rope_theta"] == args_from_hf(given).rope_theta


def test_configs_as_they_are_on_the_hub():
    mixtral = {
        "architectures": ["MixtralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
    }  # fmt: skip
    assert args_from_hf(mixtral) == ModelArgs(
        4096, 32, 32, 8, 128, 14336, 8, 2, 32000, 32768, rope_theta=1e6, norm_eps=1e-5
    )
    qwen3 = {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 151936,
    }  # fmt: skip
    assert args_from_hf(qwen3) == ModelArgs(
        2048, 48, 32, 4, 128, 768, 128, 8, 151936, 40960, rope_theta=1e6, norm_eps=1e-6, qk_norm="head"
    )
    olmoe = {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
        "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 50304,
    }  # fmt: skip
    assert args_from_hf(olmoe) == ModelArgs(
        2048, 16, 16, 16, 128, 1024, 64, 8, 50304, 4096, qk_norm="full", norm_topk=False
    )

    kinds = ["sliding_attention", "full_attention"]
    gpt_oss = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880, "layer_types": kinds * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05, "rope_theta": 150000, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        }, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    }  # fmt: skip
    assert args_from_hf(gpt_oss) == ARCHITECTURES["gpt-oss-20b"]
    gpt_oss |= {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": kinds * 18}
    assert args_from_hf(gpt_oss) == ARCHITECTURES["gpt-oss-120b"]


def test_newer_configs_as_they_are_on_the_hub():
    granite = {
        "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
        "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 1536,
        "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 131072, "model_type": "granitemoe",
        "num_attention_heads": 24, "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 40, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 10000000.0, "tie_word_embeddings": True, "vocab_size": 49155,
    }  # fmt: skip
    assert args_from_hf(granite) == ARCHITECTURES["Granite-3.1-3b-a800m"]
    phi = {
        "architectures": ["PhimoeForCausalLM"], "attention_bias": True, "bos_token_id": 1, "eos_token_id": 32000,
        "hidden_act": "silu", "hidden_size": 4096, "input_jitter_noise": 0.01, "intermediate_size": 6400,
        "lm_head_bias": True, "max_position_embeddings": 131072, "model_type": "phimoe", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 16,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "rope_scaling": SCALING | {"short_mscale": 1.243163121016122}, "router_jitter_noise": 0.01,
        "sliding_window": 131072, "tie_word_embeddings": False, "vocab_size": 32064,
    }  # fmt: skip
    assert args_from_hf(phi) == ARCHITECTURES["Phi-3.5-MoE"]
    glm = {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "eos_token_id": [151329, 151336, 151338],
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
        "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
    }  # fmt: skip
    assert args_from_hf(glm) == ARCHITECTURES["GLM-4.5-Air"]


def test_deepseeks_configs_as_they_are_on_the_hub():
    yarn = {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    }  # fmt: skip
    lite = {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001,
        "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": yarn, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
        "vocab_size": 102400,
    }  # fmt: skip
    assert args_from_hf(lite) == ARCHITECTURES["DeepSeek-V2-Lite"]
    v3 = {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "bos_token_id": 0, "ep_size": 1,
        "eos_token_id": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": FP8,
        "rms_norm_eps": 1e-06, "rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}, "rope_theta": 10000,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
        "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    }  # fmt: skip
    assert args_from_hf(v3) == ARCHITECTURES["DeepSeek-V3"]


MIXTRAL = {"architectures": ["MixtralForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3MoeForCausalLM"]}
OLMOE = {"architectures": ["OlmoeForCausalLM"]}
QWEN2 = {"architectures": ["Qwen2MoeForCausalLM"]}
GRANITE = {"architectures": ["GraniteMoeForCausalLM"]}
PHI = {"architectures": ["PhimoeForCausalLM"]}
SCALING = {
    "type": "longrope",
    "short_factor": [1.0] * 64,
    "short_mscale": 1.2,
    "original_max_position_embeddings": 4096,
}
GLM = {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 128}
GPT_OSS = {"architectures": ["GptOssForCausalLM"]}
V2 = {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
V3 = {"architectures": ["DeepseekV3ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (MIXTRAL, {"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM'.*MixtralForCausalLM, Qwen3Moe.*Olmoe"),
        (MIXTRAL, {"architectures": None, "model_type": "llama4"}, "'llama4'"),
        (MIXTRAL, {"kv_lora_rank": 512}, "kv_lora_rank = 512"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob = True"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'.*'greedy' and 'group_limited_greedy'"),
        (V2, {"topk_method": "group_limited_greedy"}, "n_group = None"),
        (V2, {"num_experts_per_tok": None}, "num_experts_per_tok = None"),
        (V2, {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        (V2, {"num_key_value_heads": 8}, "num_key_value_heads = 8"),
        (V2, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        (V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        (V3, {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        (V3, {"rope_interleave": False}, "rope_interleave = False"),
        (V3, {"attention_bias": True}, "attention_bias = True"),
        (V3, {"n_group": 7}, "n_group = 7"),
        (V3, {"n_group": 256}, "n_group = 256.*at least two"),
        (V3, {"topk_group": 9}, "topk_group = 9"),
        (V3, {"topk_group": 1, "num_experts_per_tok": 33}, "topk_group = 1"),
        (V3, {"v_head_dim": 256}, "v_head_dim = 256"),
        (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63"),
        (V3, {"kv_lora_rank": 0}, "kv_lora_rank = 0"),
        (V3, {"q_lora_rank": "x"}, "q_lora_rank = 'x'"),
        (V3, {"rope_scaling": YARN | {"mscale_all_dim": "x"}}, "mscale_all_dim = 'x'"),
        (MIXTRAL, {"architectures": []}, "architectures = "),
        (MIXTRAL, {"model_type": "qwen3_moe"}, "model_type = 'qwen3_moe'"),
        (MIXTRAL, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (MIXTRAL, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        (MIXTRAL, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        (QWEN3, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        (QWEN3, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type = 'llama3'"),
        (QWEN3, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        (QWEN3, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        (QWEN3, {"rope_parameters": "default"}, "rope parameters 'default'"),
        (MIXTRAL, {"rope_theta": 0}, "rope_theta = 0"),
        (MIXTRAL, {"rope_theta": "1e6"}, "rope_theta = '1e6'"),
        (MIXTRAL, {"mlp_bias": True}, "mlp_bias = True"),
        (MIXTRAL, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config = 'gptq'"),
        (MIXTRAL, {"quantization_config": {"quant_method": "awq"}}, "quantization_config = 'awq'"),
        (QWEN3, {"quantization_config": FP8 | {"quant_method": "compressed-tensors"}}, "config = 'compressed-tensors'"),
        (QWEN3, {"quantization_config": FP8 | {"fmt": "e5m2"}}, "quantization_config's fmt = 'e5m2'"),
        (QWEN3, {"quantization_config": FP8 | {"activation_scheme": "static"}}, "activation_scheme = 'static'"),
        (QWEN3, {"quantization_config": FP8 | {"weight_block_size": [1, 128]}}, r"weight_block_size = \[1, 128\]"),
        (QWEN3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config's fmt = None"),
        (QWEN3, {"quantization_config": "fp8"}, "quantization_config = 'fp8'"),
        (QWEN3, {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config = 'mxfp4'"),
        (GPT_OSS, {"quantization_config": FP8}, "quantization_config = 'fp8'"),
        (GPT_OSS, {"rope_scaling": YARN | {"factor": 0}}, "factor = 0 is not supported"),
        (GPT_OSS, {"rope_scaling": YARN | {"factor": "32"}}, "factor = '32'"),
        (GPT_OSS, {"rope_scaling": YARN | {"original_max_position_embeddings": None}}, "original_max_position"),
        (GPT_OSS, {"rope_scaling": YARN | {"truncate": 1}}, "truncate = 1"),
        (GPT_OSS, {"rope_scaling": YARN | {"beta_fast": [32]}}, r"beta_fast = \[32\]"),
        (GPT_OSS, {"rope_scaling": YARN | {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
        (GPT_OSS, {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types = .*'sliding_attention' or"),
        (GPT_OSS, {"layer_types": ["full_attention"]}, "layer_types = .*there are 36 layers"),
        (GPT_OSS, {"sliding_window": 0}, "sliding_window = 0"),
        (GPT_OSS, {"swiglu_limit": 0.0}, "swiglu_limit = 0.0"),
        (GPT_OSS, {"swiglu_alpha": "1.702"}, "swiglu_alpha = '1.702'"),
        (MIXTRAL, {"num_key_value_heads": 5}, "num_key_value_heads = 5"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok = 9"),
        (MIXTRAL, {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        (MIXTRAL, {"num_hidden_layers": 10**12}, "num_hidden_layers = 1000000000000"),
        (MIXTRAL, {"hidden_size": 4096.0}, "hidden_size = 4096.0"),
        (MIXTRAL, {"hidden_size": 4100}, "hidden_size = 4100"),
        (MIXTRAL, {"hidden_size": True}, "hidden_size = True"),
        (MIXTRAL, {"hidden_size": 4100, "head_dim": 128}, "hidden_size = 4100"),
        (QWEN3, {"moe_intermediate_size": 700}, "moe_intermediate_size = 700"),
        (MIXTRAL, {"vocab_size": "32000"}, "vocab_size = '32000'"),
        (MIXTRAL, {"head_dim": 127}, "head_dim = 127"),
        (MIXTRAL, {"sliding_window": -1}, "sliding_window = -1"),
        (MIXTRAL, {"rms_norm_eps": -1e-5}, "rms_norm_eps = -1e-05"),
        (MIXTRAL, {"tie_word_embeddings": 1}, "tie_word_embeddings = 1"),
        (OLMOE, {"clip_qkv": 0}, "clip_qkv = 0"),
        (OLMOE, {"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes'"),
        (QWEN3, {"mlp_only_layers": 3}, "mlp_only_layers = 3"),
        (QWEN3, {"mlp_only_layers": [True]}, r"mlp_only_layers = \[True\]"),
        (QWEN3, {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
        (QWEN3, {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size = 512"),
        (QWEN3, {"use_qk_norm": True}, "use_qk_norm = True"),
        (QWEN3, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
        (QWEN3, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        (QWEN3, {"first_k_dense_replace": 1}, "first_k_dense_replace = 1"),
        (QWEN3, {"qkv_bias": True}, "qkv_bias = True"),
        (QWEN2, {"qkv_bias": "yes"}, "qkv_bias = 'yes'"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window = True"),
        (QWEN2, {"use_qkv_bias": True}, "use_qkv_bias = True"),
        (QWEN2, {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size = -1"),
        (QWEN2, {"n_shared_experts": 1}, "n_shared_experts = 1"),
        (QWEN2, {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        (OLMOE, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (OLMOE, {"attention_bias": 0}, "attention_bias = 0"),
        (OLMOE, {"use_sliding_window": 1}, "use_sliding_window = 1"),
        (OLMOE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (MIXTRAL, {"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0"),
        (MIXTRAL, {"attention_multiplier": 0.1}, "attention_multiplier = 0.1"),
        (MIXTRAL, {"residual_multiplier": 0.2}, "residual_multiplier = 0.2"),
        (MIXTRAL, {"logits_scaling": 8}, "logits_scaling = 8"),
        (MIXTRAL, {"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        (GRANITE, {"residual_multiplier": 0}, "residual_multiplier = 0"),
        (GRANITE, {"attention_multiplier": "1"}, "attention_multiplier = '1'"),
        (GRANITE, {"embedding_multiplier": True}, "embedding_multiplier = True"),
        (GRANITE, {"logits_scaling": -1.0}, "logits_scaling = -1.0"),
        (GRANITE, {"num_local_experts": 1.5}, "num_local_experts = 1.5"),
        (GRANITE, {"shared_intermediate_size": 1024}, "shared_intermediate_size = 1024"),
        (GRANITE, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
        (GRANITE, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (GRANITE, {"mlp_bias": True}, "mlp_bias = True"),
        (MIXTRAL, {"lm_head_bias": True}, "lm_head_bias = True"),
        (MIXTRAL, {"rope_scaling": SCALING}, "rope_type = 'longrope'"),
        (PHI, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        (PHI, {"rope_scaling": SCALING | {"short_factor": [1.0] * 63}}, "short_factor = .*64 positive numbers"),
        (PHI, {"rope_scaling": SCALING | {"short_factor": [0.0] * 64}}, "short_factor = "),
        (PHI, {"rope_scaling": SCALING | {"short_mscale": None}}, "short_mscale = None"),
        (
            PHI,
            {"rope_scaling": SCALING | {"original_max_position_embeddings": None}},
            "original_max_position_emb.* = None",
        ),
        (PHI, {"num_experts_per_tok": 4}, "num_experts_per_tok = 4"),
        (PHI, {"router_jitter_noise": 0}, "router_jitter_noise = 0"),
        (PHI, {"lm_head_bias": 1}, "lm_head_bias = 1"),
        (PHI, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (PHI, {"num_local_experts": "16"}, "num_local_experts = '16'"),
        (GLM, {"n_group": 8}, "n_group = 8"),
        (GLM, {"topk_group": 4}, "topk_group = 4"),
        (GLM, {"partial_rotary_factor": 0.4}, "partial_rotary_factor = 0.4"),
        (GLM, {"rope_parameters": {"partial_rotary_factor": 0.375}}, "partial_rotary_factor = 0.375"),
        (GLM, {"n_routed_experts": 0}, "n_routed_experts = 0"),
        (GLM, {"n_shared_experts": -1}, "n_shared_experts = -1"),
        (GLM, {"first_k_dense_replace": "1"}, "first_k_dense_replace = '1'"),
        (GLM, {"routed_scaling_factor": 0}, "routed_scaling_factor = 0"),
        (GLM, {"attention_bias": 1}, "attention_bias = 1"),
        (GLM, {"use_qk_norm": 1}, "use_qk_norm = 1"),
        (GLM, {"norm_topk_prob": 1}, "norm_topk_prob = 1"),
        (GLM, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1"),
        (GLM, {"head_dim": None}, "hidden_size = 4096"),
        (GLM, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (GLM, {"quantization_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors'"),
    ],
)
def test_a_config_value_that_is_not_supported_is_named(family, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        args_from_hf(family | changes)
    assert "\n" not in str(error.value)


ANY_JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
ANY_JSON |= st.lists(ANY_JSON, max_size=2) | st.dictionaries(st.text(max_size=3), ANY_JSON, max_size=2)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_config_gives_arguments_or_a_value_error(data):
    model_types = [family.model_type for family in FAMILIES.values()]
    config = AutoConfig.for_model(data.draw(st.sampled_from(model_types))).to_dict()
    extra = ["rope_scaling", "layer_types", "head_dim", "partial_rotary_factor", "quantization_config"]
    keys = st.sampled_from(sorted(config) + extra)
    config |= data.draw(st.dictionaries(keys, ANY_JSON, max_size=3))
    try:
        args = args_from_hf(config)
    except ValueError as error:
        assert str(error)
    else:
        assert args.n_head % args.n_kv_head == 0 and args.n_active <= args.n_expert


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


BAD = {  # how the directory is spoilt, the message, and options of the command
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


def run_command(monkeypatch, capsys, *options: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["convert_hf_checkpoint.py", *options])
    code = convert_hf_checkpoint.main()
    out, err = capsys.readouterr()
    return code, out, err.split("\r")[-1].split("layer/s]")[-1].strip()  # what stands after the progress bar


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(mixtral, monkeypatch, capsys, case):
    spoil, message, *options = BAD[case]
    spoil(mixtral)
    before = tree(mixtral.parent)
    options = [option.format(mixtral) for option in options]
    code, out, err = run_command(monkeypatch, capsys, "--checkpoint_dir", str(mixtral), *options)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and "\n" not in err
    assert re.search(message, err)
    assert tree(mixtral.parent) == before


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
