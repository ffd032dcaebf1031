"""Files that other programs quantized: every number is the published one, and the text is too."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_files import LAYOUTS, compressed_bytes, fp8_tensor, modelopt_nvfp4, write
from safetensors.torch import load_file, save_file

from checkpoint import Checkpoint, SafetensorsFile
from formats.packed import Packed
from generate import load_model
from models.converter import Conversion, convert
from models.published_weights import find_weight
from models.quantization import Published
from offload.plan import OffloadSettings
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


@pytest.fixture(scope="module")
def directory_of(make_family, tmp_path_factory):
    """Map a layout to a cached directory in it."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            function, config, _ = LAYOUTS[name]
            source = make_family("qwen3_moe", **WIDTHS["qwen3_moe"]).hf_directory
            target = tmp_path_factory.mktemp("layout")
            made[name], _ = write(source, target, lambda name: function, config)
        return made[name]

    return make


# `make test` runs some; the others differ in one function or one key from them.
QUICK = "ModelOpt NVFP4", "compressed zeros", "compressed FP8", "GPTQ", "AWQ", "GPTQ of 8 bits"
QUICK += "qwen3_5_moe", "glm4_moe_lite"  # families


def thinned(cases) -> list:
    """Return the cases as pytest parameters, slow unless the first of their values is in QUICK."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    slow = pytest.mark.slow
    return [pytest.param(*row, marks=() if row[0] in QUICK else slow) for row in rows]


@pytest.mark.parametrize("name", thinned(LAYOUTS))
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


@pytest.mark.parametrize(("family", "name", "whole"), thinned(FAMILIES))
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
    for leaf in ("k_proj.k_scale", "v_proj.v_scale"):  # scales of an FP8 KV cache
        tensors[f"model.layers.0.self_attn.{leaf}"] = torch.tensor(1.0)
    save_file(tensors, directories[0] / "model.safetensors")
    (directories[0] / "config.json").write_text((directories[1] / "config.json").read_text())
    quantization = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    beside = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (directories[0] / "hf_quant_config.json").write_text(json.dumps(beside))
    quantized, plain = converted(directories)
    assert quantized.name == "model_nvfp4"
    check_same(quantized, plain, {"nvfp4", "fp8"})


@pytest.mark.parametrize("name", thinned(("AWQ", "compressed NVFP4", "compressed FP8")))
def test_offloading_changes_no_bit(directory_of, tmp_path, name):
    """Scales keep their dtype in host memory and in a pool of experts."""
    quantized = convert(directory_of(name), tmp_path / "out", "fp32", progress=False)
    whole = load_model(quantized, "cpu")
    offloaded = load_model(quantized, "cpu", experts=OffloadSettings(gpu_experts=4))
    assert torch.equal(all_logits(offloaded), all_logits(whole))


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


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_wide_groups_of_8_bits_become_several_with_one_scale(dtype):
    tensors, want = compressed_bytes(128, dtype)(torch.randn(8, 256))
    found = find_weight(FakeTensors(tensors), "q_proj.weight", 8, 256, Published("q8_0"))
    default = dtype is torch.float16
    assert found.spec["format"] == "q8_0" and ("scale" in found.spec) != default
    assert torch.equal(found.unpack(), want)


class FakeTensors:
    """The tensors of q_proj."""

    def __init__(self, tensors: dict):
        self.tensors = {f"q_proj.{leaf}": tensor for leaf, tensor in tensors.items()}

    def found(self, name: str):
        tensor = self.tensors.get(name)
        return None if tensor is None else (tuple(tensor.shape), tensor.dtype)

    def raw(self, name: str) -> torch.Tensor:
        return self.tensors[name]


# Damaged files, and what has no place in our formats ----------------------------------------------

EXPERT = "model.layers.0.mlp.experts.3.up_proj"
QUERY = "model.layers.2.self_attn.q_proj"


def without(name: str):
    return lambda tensors: tensors.pop(name)


def changed(name: str, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


def filled(name: str, value: float):
    return lambda tensors: tensors[name].view(-1)[:1].fill_(value)


def plain_query(tensors) -> None:
    for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        tensors.pop(f"{QUERY}.{leaf}")
    tensors[f"{QUERY}.weight"] = torch.ones(128, 64)


def in_wider_groups(tensors) -> None:
    function = LAYOUTS["compressed channels"][0]
    for leaf, part in function(torch.randn(128, 64))[0].items():
        tensors[f"{QUERY}.{leaf}"] = part


NVFP4, GPTQ, PACKED = "ModelOpt NVFP4", "GPTQ", "compressed groups of 32"
GPTQ_ZEROS, AWQ, FP8 = "GPTQ with zeros", "AWQ", "ModelOpt FP8"
BYTES = "compressed 8 bits in groups"
BAD = {
    "no block scales": (NVFP4, without(f"{EXPERT}.weight_scale"), "weight_scale is missing"),
    "no tensor scale": (NVFP4, without(f"{EXPERT}.weight_scale_2"), "weight_scale_2 is missing"),
    "block scales of 32": (
        NVFP4,
        changed(f"{EXPERT}.weight_scale", lambda t: t[:, ::2]),
        r"shape \[64, 2\] where \[64, 4\] is due",
    ),
    "block scales in bf16": (
        NVFP4,
        changed(f"{EXPERT}.weight_scale", lambda t: t.bfloat16()),
        "weight_scale has dtype bfloat16, which is not kept",
    ),
    "a block scale that is no number": (
        NVFP4,
        filled(f"{EXPERT}.weight_scale", float("nan")),
        "up_proj.weight_scale holds NaN",
    ),
    "a negative block scale": (
        NVFP4,
        filled(f"{EXPERT}.weight_scale", -1.0),
        "up_proj.weight_scale holds NaN",
    ),
    "a global scale of 0": (
        "compressed NVFP4",
        filled(f"{EXPERT}.weight_global_scale", 0.0),
        "weight_global_scale holds NaN or infinity",
    ),
    "queries in 16 bits beside keys in 4": (NVFP4, plain_query, "q_proj.weight is in bf16 beside"),
    "weights rotated before": (
        NVFP4,
        lambda tensors: tensors.update({f"{EXPERT}.pre_quant_scale": torch.ones(64)}),
        "pre_quant_scale .* has no place",
    ),
    "other groups of queries": (
        PACKED,
        in_wider_groups,
        "k_proj.weight is in int4 in groups of 32 beside others in int4 in groups of 64",
    ),
    "8 bits beside 4": (
        PACKED,
        changed(f"{EXPERT}.weight_packed", lambda t: t.repeat(1, 2)),
        "up_proj.weight is in q8_0 in groups of 32 with scales in bf16 beside others in int4",
    ),
    "8 bits in groups of 16": (
        BYTES,
        changed(f"{EXPERT}.weight_scale", lambda t: t.repeat(1, 2)),
        "has 4 groups of 8 bits for rows of 64, no multiples of 32; add :int8",
    ),
    "zeros of 8 bits": (
        BYTES,
        lambda tensors: tensors.update({f"{EXPERT}.weight_zero_point": torch.ones(16, 2).int()}),
        "weight_zero_point makes integers of 8 bits asymmetric; add :int8",
    ),
    "zeros in a symmetric file of 8 bits": (
        "GPTQ of 8 bits",
        filled(f"{EXPERT}.qzeros", 0),
        "qzeros has zeros other than 128",
    ),
    "8 bits ordered by activation": (
        "GPTQ of 8 bits",
        changed(f"{EXPERT}.g_idx", lambda t: t.flip(0)),
        "g_idx orders the groups by activation",
    ),
    "groups of 12": (
        PACKED,
        changed(f"{EXPERT}.weight_scale", lambda t: t.repeat(1, 3)[:, :5]),
        "has 5 groups for rows of 64, which are not of whole words",
    ),
    "no groups": (
        PACKED,
        changed(f"{EXPERT}.weight_scale", lambda t: t[:, :0]),
        "has 0 groups for rows of 64",
    ),
    "ordered by activation": (
        GPTQ,
        changed(f"{EXPERT}.g_idx", lambda t: t.flip(0)),
        "g_idx orders the groups by activation .desc_act., .*; fetch a file without desc_act",
    ),
    "zeros in a symmetric file": (
        GPTQ,
        filled(f"{EXPERT}.qzeros", 0),
        "qzeros has zeros other than 8",
    ),
    "no zeros": (GPTQ_ZEROS, without(f"{EXPERT}.qzeros"), "qzeros is missing"),
    "an infinite scale": (AWQ, filled(f"{EXPERT}.scales", float("inf")), "up_proj.scales holds"),
    "transposed codes": (
        AWQ,
        changed(f"{EXPERT}.qweight", lambda t: t.T),
        r"qweight has shape \[8, 64\] where \[64, 8\] is due",
    ),
    "an FP8 weight that is no number": (
        FP8,
        filled(f"{EXPERT}.weight", float("nan")),
        "up_proj.weight holds NaN",
    ),
    "an FP8 weight without a scale": (
        FP8,
        without(f"{EXPERT}.weight_scale"),
        "up_proj.weight_scale is missing",
    ),
}


def damage(source: Path, target: Path, change) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_kept_is_one_line_and_leaves_nothing(directory_of, tmp_path, case):
    name, change, message = BAD[case]
    damage(directory_of(name), tmp_path, change)
    with pytest.raises(ValueError, match=message) as error:
        convert(tmp_path, progress=False)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ("GPTQ", "AWQ"))
@pytest.mark.parametrize("other", ("ModelOpt NVFP4", "compressed zeros", "transformers FP8"))
def test_zeros_of_which_the_config_says_nothing_are_refused(directory_of, tmp_path, name, other):
    """They are stored as they are, or less 1; symmetric or not."""
    damage(directory_of(name), tmp_path, lambda tensors: None)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = LAYOUTS[other][1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="qweight is of GPTQ or AWQ, which store zeros in ways"):
        convert(tmp_path, progress=False)


DAMAGES = {
    "gone": lambda t: None,
    "empty": lambda t: t.reshape(-1)[:0],
    "a row less": lambda t: t[1:] if t.dim() else t.reshape(1, 1, 1),
    "flat": lambda t: t.reshape(-1),
    "twice": lambda t: torch.cat((t, t)) if t.dim() else t.expand(2),
    "int64": lambda t: t.float().nan_to_num().long(),
    "uint8": lambda t: t.float().nan_to_num().to(torch.uint8),
    "one more axis": lambda t: t.unsqueeze(0),
    "ones": lambda t: t.reshape(-1).contiguous().view(torch.uint8).fill_(255).view(t.dtype),
}


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_damage_is_one_line(directory_of, tmp_path_factory, data):
    directory = directory_of(data.draw(st.sampled_from(sorted(LAYOUTS))))
    tensors = load_file(directory / "model.safetensors")
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        changed = DAMAGES[data.draw(st.sampled_from(sorted(DAMAGES)))](tensors.pop(name))
        if changed is not None:
            tensors[name] = changed.contiguous().clone()
    target = tmp_path_factory.mktemp("damaged")
    save_file(tensors, target / "model.safetensors")
    config = (directory / "config.json").read_text()
    (target / "config.json").write_text(config)
    try:
        shards = {"model.safetensors": SafetensorsFile(target / "model.safetensors")}
        conversion = Conversion(target, shards, {}, "fp32")
        for file in conversion.plan.files:
            for name in conversion.layout(file):
                for _ in conversion.pieces(file, name):
                    pass
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
    shutil.rmtree(target)


SCHEMES = {
    "compressed NVFP4": dict(type="float", strategy="tensor_group", group_size=16),
    "compressed MXFP4": dict(type="float", strategy="group", group_size=32),
    "compressed groups of 32": dict(type="int", strategy="group", group_size=32),
    "compressed channels": dict(type="int", strategy="channel"),
    "compressed zeros": dict(type="int", strategy="group", group_size=32, symmetric=False),
    "compressed 8 bits in groups": dict(type="int", strategy="group", num_bits=8, group_size=32),
    "compressed 8-bit channels": dict(type="int", strategy="channel", num_bits=8),
    "compressed FP8": dict(type="float", strategy="channel", num_bits=8),
    "compressed int8": dict(type="int", strategy="channel", num_bits=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_the_layouts_are_those_of_the_package(name):
    """compressed-tensors reads what `published_files` writes. It rounds to the scales' dtype."""
    pytest.importorskip("compressed_tensors", reason="pip install 'moe-fast[oracles]'")
    base = importlib.import_module("compressed_tensors.compressors.base")
    quantization = importlib.import_module("compressed_tensors.quantization")
    function, config, _ = LAYOUTS[name]
    tensors, want = function(torch.randn(24, 64, generator=torch.Generator().manual_seed(0)))
    weights = quantization.QuantizationArgs(**{"num_bits": 4} | SCHEMES[name])
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = base.BaseCompressor.get_value_from_registry(config["format"])
    found = {leaf: part for leaf, part in tensors.items() if not leaf.startswith("input")}
    got = compressor.decompress(found, scheme)["weight"].float()
    exact = tensors["weight_scale"].dtype in (torch.float32, torch.uint8)
    torch.testing.assert_close(got, want, rtol=0 if exact else 2**-8, atol=0)
