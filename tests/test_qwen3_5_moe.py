"""What is particular to Qwen3.5 and Qwen3.6: nested config, vision beside text, fused experts."""

import json
from pathlib import Path

import pytest
import torch
from chunks import all_logits, assert_compiled_is_eager, prompt
from conftest import COMMON, HYBRID, in_blocks, randomize
from published_files import assert_text_is_the_same
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
)

from checkpoint import Checkpoint
from models import ARCHITECTURES, args_from_hf, build_model
from models.converter import convert

VISION = dict(
    depth=1,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    out_hidden_size=64,
    num_position_embeddings=16,
)
TEXT = COMMON | HYBRID
M_ROPE = TEXT["rope_parameters"] | {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}


@pytest.fixture(scope="module")
def with_vision() -> Qwen3_5MoeForConditionalGeneration:
    """The published architecture, with weights that matter."""
    torch.manual_seed(0)
    config = Qwen3_5MoeConfig(text_config=TEXT | {"rope_parameters": M_ROPE}, vision_config=VISION)
    peer = Qwen3_5MoeForConditionalGeneration(config).eval()
    randomize(peer)
    return peer


def test_a_long_prompt_matches_transformers(make_family):
    family, tokens = make_family("qwen3_5_moe"), prompt(300)
    got = all_logits(family.directory, tokens)
    torch.testing.assert_close(got, family.peer(tokens).logits, rtol=0, atol=1e-4)


# The published layout -----------------------------------------------------------------------------


@pytest.mark.parametrize("fused", (False, True))
def test_the_text_part_of_a_model_with_vision(with_vision, tmp_path, capsys, fused):
    with_vision.save_pretrained(tmp_path, save_original_format=not fused)
    names = load_file(tmp_path / "model.safetensors").keys()
    vision = [name for name in names if name.startswith("model.visual.")]
    assert vision and all(
        name.startswith("model.language_model.") for name in {*names} - {*vision, "lm_head.weight"}
    )
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "eos_token_id" not in config and config["text_config"]["eos_token_id"] == 2
    directory = convert(tmp_path, dtype="fp32")
    log = f"left out, as they are not run: model.visual.* ({len(vision)} tensors)\n"
    assert capsys.readouterr().err.count(log) == 1
    tokens = prompt(60)
    want = with_vision(tokens).logits
    torch.testing.assert_close(all_logits(directory, tokens), want, rtol=0, atol=1e-4)
    assert not any("visual" in name for name in Checkpoint(directory).tensors)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_text_model_alone_gives_the_same(with_vision, tmp_path):
    """A model with vision, and its text model saved as Qwen3_5MoeForCausalLM."""
    config = Qwen3_5MoeTextConfig(**TEXT)
    text = Qwen3_5MoeForCausalLM(config).eval()
    assert_text_is_the_same(with_vision, text, "qwen3_5_moe_text", tmp_path)


def test_the_four_projections_become_two(make_family):
    family = make_family("qwen3_5_moe")
    ours, theirs = Checkpoint(family.directory), family.peer.state_dict()
    prefix = "model.layers.1.linear_attn.in_proj_"
    for name, parts in (("wqkvz", ("qkv", "z")), ("wba", ("b", "a"))):
        joined = torch.cat([theirs[f"{prefix}{part}.weight"] for part in parts])
        assert torch.equal(ours.read(f"layers.1.attention.{name}.weight"), joined)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": [1]}, r"text_config = \[1\]"),
        ({"text_config": {"hidden_act": "gelu"}}, "hidden_act = 'gelu'"),
        ({"text_config": {"attn_output_gate": False}}, "attn_output_gate = False"),
        ({"text_config": {"mlp_only_layers": [3]}}, r"mlp_only_layers = \[3\]"),
        ({"text_config": {"layer_types": ["linear_attention"]}}, "layer_types = .*40 layers"),
        ({"text_config": {"layer_types": ["mamba"] * 40}}, "layer_types = .*'linear_attention' or"),
        ({"text_config": {"full_attention_interval": 0}}, "full_attention_interval = 0"),
        ({"text_config": {"linear_num_value_heads": 24}}, "linear_num_value_heads = 24.*= 16"),
        ({"text_config": {"linear_conv_kernel_dim": 1}}, "linear_conv_kernel_dim = 1"),
        ({"text_config": {"rope_parameters": {"partial_rotary_factor": 0.3}}}, "partial_rotary_f"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config = 'hqq'"),
    ],
)
def test_a_nested_value_is_refused_by_its_key(changes, message):
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], **changes}
    with pytest.raises(ValueError, match=message) as error:
        args_from_hf(config)
    assert "\n" not in str(error.value)


def test_published_sizes():
    """34.66 B weights of text; the card's 35 B includes vision."""
    for name in ("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"):
        args = ARCHITECTURES[name]
        assert args.full_layers == tuple(range(3, 40, 4)) and args.rope_theta == 1e7
        weights = sum(p.numel() for p in build_model(args).parameters())
        assert weights == 34_660_610_688


# Running ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_tokens_are_the_same(make_family):
    """The decode step, and the prompt's pass with padding."""
    directory = make_family("qwen3_5_moe").directory
    assert_compiled_is_eager(directory, prompt(70)[0].tolist())


def test_published_fp8_gives_the_logits_of_its_weights(tmp_path):
    """As Qwen publishes it: experts one by one, b, a, router and convolution in bf16."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, num_attention_heads=2, num_key_value_heads=1, head_dim=128)
    sizes |= dict(linear_key_head_dim=128, linear_value_head_dim=128)
    sizes |= dict(moe_intermediate_size=128, shared_expert_intermediate_size=128)
    peer = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**TEXT | sizes)).eval()
    randomize(peer)
    peer.bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = "conv1d", "in_proj_a", "in_proj_b", "gate.weight", "embed", "lm_head"
    for name, tensor in list(tensors.items()):
        if tensor.dim() == 2 and not any(part in name for part in kept):
            tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(tensor.float())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    fp8 |= {"weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    directory = convert(tmp_path, dtype="fp32", progress=False)
    modules = Checkpoint(directory).format["modules"]
    assert {"layers.0.attention.wqkvz", "layers.3.attention.wqkv"} <= modules.keys()
    assert directory.name == "model_fp8b" and "layers.0.attention.wba" not in modules
    peer = load_dequantized(tmp_path, tensors)
    tokens = prompt(40)
    got, want = all_logits(directory, tokens), peer(tokens).logits
    assert (got - want).norm() < 1e-4 * want.norm()


def load_dequantized(directory: Path, tensors: dict[str, Tensor]) -> Qwen3_5MoeForCausalLM:
    """Return transformers' model with the numbers that FP8 codes and scales stand for."""
    plain = {}
    for name, tensor in tensors.items():
        if not name.endswith("_scale_inv"):
            plain[name] = tensor.float()
            if (scale := tensors.get(f"{name}_scale_inv")) is not None:
                expanded = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                plain[name] *= expanded[: tensor.shape[0], : tensor.shape[1]]
    target = directory / "plain"
    target.mkdir()
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return Qwen3_5MoeForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
