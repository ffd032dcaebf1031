"""Files that other programs quantized: every number is the published one, and the text is too."""

import json
from pathlib import Path

import pytest
import torch
from published_files import LAYOUTS, fp8_tensor, modelopt_nvfp4, write
from safetensors.torch import load_file, save_file

from checkpoint import Checkpoint
from formats.packed import Packed
from generate import load_model
from models.converter import convert
from runtime.sampling import Sampling
from runtime.session import Session

PROMPT = torch.randint(160, (1, 24), generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.usefixtures("few_threads")
# Widths of whole groups.
WIDTHS = {
    "qwen3_moe": {"moe_intermediate_size": 64, "attention_bias": False},
    "qwen3_5_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32},
    "qwen3_next": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32},
    "glm4_moe_lite": {"moe_intermediate_size": 64, "q_lora_rank": 32},
    "gemma4": {"moe_intermediate_size": 64},
    "mixtral": {},
}


def all_logits(model) -> torch.Tensor:
    model.setup_cache(1, 64)
    return model(PROMPT, torch.arange(PROMPT.shape[1])[None], all_positions=True)


def check_same(quantized: Path, plain: Path, formats: set[str]) -> None:
    """Compare a quantized checkpoint with one of the dequantized numbers, both in fp32."""
    ours, theirs = load_model(quantized, "cpu"), load_model(plain, "cpu")
    packed = {name: m for name, m in ours.named_modules() if isinstance(m, Packed)}
    assert {module.format for module in packed.values()} == formats
    for name, module in packed.items():
        weight = theirs.get_submodule(name).weight
        torch.testing.assert_close(module.unpack(), weight, rtol=3e-7, atol=0, msg=name)
    got, want = all_logits(ours), all_logits(theirs)
    assert ((got - want).norm() / want.norm()).item() < 1e-4
    texts = [
        list(Session(model, 128).stream(PROMPT[0].tolist(), 16, Sampling(temperature=0)))
        for model in (ours, theirs)
    ]
    assert texts[0] == texts[1]


def converted(directories: tuple[Path, Path]) -> tuple[Path, Path]:
    quantized, plain = (convert(path, dtype="fp32", progress=False) for path in directories)
    return quantized, plain


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_published_numbers_are_kept(make_family, tmp_path, name):
    """Qwen3-30B-A3B's names: `mlp.experts.N.gate_proj`."""
    function, config, format = LAYOUTS[name]
    source = make_family("qwen3_moe", **WIDTHS["qwen3_moe"]).hf_directory
    quantized, plain = converted(write(source, tmp_path, lambda name: function, config))
    assert quantized.name == f"model_{format}"
    check_same(quantized, plain, {format})


def of_vision(name: str) -> str:
    """The name in a file of a model with vision."""
    return name.replace("model.", "model.language_model.", 1)


def nest(directory: Path, model_type: str, architecture: str) -> None:
    """Make the config of a text model that of one with vision."""
    path = directory / "config.json"
    text = json.loads(path.read_text())
    whole = {"model_type": model_type, "architectures": [architecture], "text_config": text}
    if quantization := text.pop("quantization_config", None):
        whole["quantization_config"] = quantization
    path.write_text(json.dumps(whole))


# Family, layout, and the model with vision that its tensors are published in.
FAMILIES = (
    (
        "qwen3_5_moe",
        "ModelOpt NVFP4",
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    ),
    ("qwen3_next", "AWQ", None),
    ("glm4_moe_lite", "compressed zeros", None),
    ("gemma4", "compressed groups of 32", ("gemma4", "Gemma4ForConditionalGeneration")),
    ("mixtral", "compressed NVFP4", None),
)


@pytest.mark.parametrize(("family", "name", "whole"), FAMILIES)
def test_families(make_family, tmp_path, family, name, whole):
    """Rows of queries that RoPE reorders keep their scales. kv_b_proj becomes numbers."""
    function, config, format = LAYOUTS[name]
    source = make_family(family, **WIDTHS[family]).hf_directory
    rename = of_vision if whole else str
    directories = write(source, tmp_path, lambda name: function, config, rename)
    for directory in directories if whole else ():
        nest(directory, *whole)
    check_same(*converted(directories), {format})


def mixed(name: str):
    """Attention in FP8, experts in NVFP4, a dense layer in 16 bits."""
    if "self_attn" in name:
        return fp8_tensor
    return modelopt_nvfp4 if "experts" in name else None


def test_a_mixed_file_keeps_each_format(make_family, tmp_path):
    """hf_quant_config.json stands beside a config.json without quantization_config."""
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    source = make_family("qwen3_moe", **WIDTHS["qwen3_moe"]).hf_directory
    directories = write(source, tmp_path, mixed, config)
    tensors = load_file(directories[0] / "model.safetensors")
    for leaf in ("k_proj.k_scale", "v_proj.v_scale"):  # of an FP8 KV cache
        tensors[f"model.layers.0.self_attn.{leaf}"] = torch.tensor(1.0)
    save_file(tensors, directories[0] / "model.safetensors")
    (directories[0] / "config.json").write_text((directories[1] / "config.json").read_text())
    quantization = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    beside = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (directories[0] / "hf_quant_config.json").write_text(json.dumps(beside))
    quantized, plain = converted(directories)
    assert quantized.name == "model_nvfp4"
    check_same(quantized, plain, {"nvfp4", "fp8"})


def test_gate_and_up_keep_scales_of_their_own(make_family, tmp_path):
    """They are one weight here, of two tensors with an fp32 scale each."""

    def layout(name: str):
        larger = 3.0 if "up_proj" in name or "k_proj" in name else 1.0
        return lambda weight: modelopt_nvfp4(weight * larger)

    source = make_family("qwen3_moe", **WIDTHS["qwen3_moe"]).hf_directory
    quantized, plain = converted(write(source, tmp_path, layout, LAYOUTS["ModelOpt NVFP4"][1]))
    steps = Checkpoint(quantized).read("layers.0.ffn.experts.w13.scale_step")
    assert (steps[:, :64] * 2 < steps[:, 64:]).all()
    check_same(quantized, plain, {"nvfp4"})
