"""What is particular to GLM-4.7-Flash: sizes, MTP tensors, layer types, fp8 as published."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from chunks import all_logits, prompt, run
from conftest import save_in_fp8
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

from checkpoint import Checkpoint
from generate import load_model
from models import ARCHITECTURES, args_from_hf, build_model
from models.converter import convert


@pytest.mark.parametrize("sizes", ((40,), (300,), (64, 200, 36), (1, 2, 129, 168)))
def test_a_prompt_in_chunks_matches_transformers(make_family, sizes):
    family, tokens = make_family("glm4_moe_lite"), prompt(sum(sizes))
    got = all_logits(family.directory, tokens, *sizes)
    want = family.peer(tokens).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_published_sizes():
    """The model card says 30B-A3B; config.json gives 29.94 B without the MTP layer."""
    args = ARCHITECTURES["GLM-4.7-Flash"]
    assert (args.head_dim, args.value_dim, args.rotary_dim, args.q_rank) == (256, 256, 64, 768)
    assert args.dense_layers == (0,) and args.rope_theta == 1e6 and args.routed_scale == 1.8
    size = sum(p.numel() for p in build_model(args).parameters())
    assert size / 1e9 == pytest.approx(29.94, abs=0.005)


@pytest.mark.parametrize("kinds", (["sparse"] * 3, ["dense", "sparse", "dense"]))
def test_any_layer_may_be_dense(kinds):
    config = {"model_type": "glm4_moe_lite", "num_hidden_layers": 3, "mlp_layer_types": kinds}
    args = args_from_hf(config)
    assert args.dense_layers == tuple(n for n in range(3) if kinds[n] == "dense")


def test_mtp_tensors_are_left_out(make_family, tmp_path):
    family = make_family("glm4_moe_lite")
    directory = Path(shutil.copytree(family.hf_directory, tmp_path / "hf"))
    names = "eh_proj.weight", "shared_head.head.weight", "self_attn.q_a_proj.weight"
    layer = {f"model.layers.3.{name}": torch.ones(8, 8) for name in names}
    save_file(layer, directory / "model-mtp.safetensors")
    index_file, config_file = directory / "model.safetensors.index.json", directory / "config.json"
    index = json.loads(index_file.read_text())
    index["weight_map"] |= dict.fromkeys(layer, "model-mtp.safetensors")
    index_file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.layers\.3\.\S+ .* has no place"):
        convert(directory, tmp_path / "out", progress=False)
    config = json.loads(config_file.read_text()) | {"num_nextn_predict_layers": 1}
    config_file.write_text(json.dumps(config))
    converted = Checkpoint(convert(directory, tmp_path / "out", "fp32", progress=False))
    assert converted.tensors.keys() == Checkpoint(family.directory).tensors.keys()


def test_fp8_as_published_matches_transformers(tmp_path):
    """Codes stay as they are, but for wkv, which has no module of its own."""
    config = Glm4MoeLiteConfig(
        vocab_size=160,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        intermediate_size=384,
        max_position_embeddings=256,
    )
    torch.manual_seed(2)
    directory = save_in_fp8(Glm4MoeLiteForCausalLM(config), tmp_path / "hf")
    ours = Checkpoint(convert(directory, tmp_path / "out", "fp32", progress=False))
    modules = {name.split(".", 2)[2] for name in ours.format["modules"]}
    assert {"attention.wqkv", "attention.wq", "attention.wo", "ffn.experts.w13"} <= modules
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        codes, scale = name.removesuffix("_scale_inv"), tensors.pop(name)
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        rows, columns = tensors[codes].shape
        tensors[codes] = tensors[codes].float() * wide[:rows, :columns]
    plain = Glm4MoeLiteForCausalLM(config)
    plain.bfloat16().save_pretrained(tmp_path / "plain")
    save_file(tensors, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    peer = Glm4MoeLiteForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    model, tokens = load_model(ours, "cpu"), prompt(40)
    model.setup_cache(1, 64)
    want = peer(tokens).logits
    assert ((run(model, tokens) - want).norm() / want.norm()).item() < 1e-4
    steps = [model(tokens[:, n : n + 1], torch.tensor([[n]])) for n in range(40)]
    assert ((torch.stack(steps, dim=1) - want).norm() / want.norm()).item() < 1e-4
