"""Small checkpoints in the layouts of other programs, written by hand, with what they stand for.

`LAYOUTS` maps a name to a function weight [out, in] -> (tensors by leaf, what they dequantize to).
`write` saves a Hugging Face directory in one of them, and one with the dequantized numbers.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint import Checkpoint
from models.converter import convert

E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
E4M3, AWQ_COLUMNS = torch.float8_e4m3fn, (0, 2, 4, 6, 1, 3, 5, 7)
Layout = tuple[dict[str, Tensor], Tensor]


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack 4-bit codes [..., n] in words of 8: code order[i] is in bits 4 i of its word."""
    total = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for place, code in enumerate(order):
        total |= codes[..., code::8].long() << 4 * place
    return total.to(torch.int32)


def nearest_e2m1(values: Tensor) -> Tensor:
    """Codes of the nearest e2m1 numbers."""
    magnitude = (values.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    return magnitude + 8 * (values < 0)


def e2m1(codes: Tensor) -> Tensor:
    return torch.cat((E2M1, -E2M1))[codes]


def two_a_byte(codes: Tensor) -> Tensor:
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, scales e4m3, the tensor's scale, and the dequantized weight."""
    tensor_scale = weight.abs().max() / (6 * 448)
    blocks = weight.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 / tensor_scale).to(E4M3)
    full = (scale.float() * tensor_scale).unsqueeze(-1)
    codes = nearest_e2m1(blocks / full.clamp(min=1e-12))
    return codes.flatten(-2), scale, tensor_scale, (e2m1(codes) * full).flatten(-2)


def modelopt_nvfp4(weight: Tensor) -> Layout:
    codes, scale, tensor_scale, numbers = nvfp4(weight)
    tensors = {"weight": two_a_byte(codes), "weight_scale": scale, "weight_scale_2": tensor_scale}
    return tensors | {"input_scale": torch.tensor(0.25)}, numbers


def compressed_nvfp4(weight: Tensor) -> Layout:
    codes, scale, tensor_scale, numbers = nvfp4(weight)
    tensors = {"weight_packed": two_a_byte(codes), "weight_scale": scale}
    tensors["weight_global_scale"] = (1 / tensor_scale).reshape(1)
    return tensors | {"input_global_scale": torch.tensor([4.0])}, numbers


def compressed_mxfp4(weight: Tensor) -> Layout:
    groups = weight.unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor().int() - 2
    full = torch.exp2(exponent.float()).unsqueeze(-1)
    codes = nearest_e2m1(groups / full)
    scale = (exponent + 127).to(torch.uint8)
    tensors = {"weight_packed": two_a_byte(codes.flatten(-2)), "weight_scale": scale}
    return tensors, (e2m1(codes) * full).flatten(-2)


def integers(weight: Tensor, group: int, dtype: torch.dtype, symmetric: bool) -> tuple[Tensor, ...]:
    """Return codes 0 to 15 [out, in], scales and zeros [out, groups], the dequantized weight."""
    groups = weight.unflatten(-1, (-1, group))
    if symmetric:
        scale = (groups.abs().amax(-1) / 7).to(dtype)
        zeros = torch.full(scale.shape, 8)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).to(dtype)
        zeros = (-low / scale.float()).round().clamp(1, 15).int()
    full = scale.float().unsqueeze(-1)
    codes = ((groups / full).round() + zeros.unsqueeze(-1)).clamp(0, 15).int()
    numbers = (codes - zeros.unsqueeze(-1)).float() * full
    return codes.flatten(-2), scale, zeros, numbers.flatten(-2)


def compressed_integers(
    group: int, dtype: torch.dtype = torch.bfloat16, symmetric: bool = True
) -> Callable[[Tensor], Layout]:
    def layout(weight: Tensor) -> Layout:
        size = group or weight.shape[1]
        codes, scale, zeros, numbers = integers(weight, size, dtype, symmetric)
        tensors = {"weight_packed": words(codes), "weight_scale": scale}
        tensors["weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            padded = torch.nn.functional.pad(zeros, (0, 0, 0, -len(zeros) % 8))
            tensors["weight_zero_point"] = words(padded.T).T.contiguous()
        return tensors, numbers

    return layout


def eight_bits(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return words of codes plus 128 [out, in / 4], scales, and the dequantized weight."""
    groups = weight.unflatten(-1, (-1, group or weight.shape[1]))
    scale = (groups.abs().amax(-1) / 127).to(dtype)
    codes = (groups / scale.float().unsqueeze(-1)).round().clamp(-128, 127)
    numbers = (codes * scale.float().unsqueeze(-1)).flatten(-2)
    return (codes + 128).to(torch.uint8).flatten(-2).view(torch.int32), scale, numbers


def compressed_bytes(group: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[Tensor], Layout]:
    def layout(weight: Tensor) -> Layout:
        words, scale, numbers = eight_bits(weight, group, dtype)
        shape = torch.tensor(weight.shape)
        return {"weight_packed": words, "weight_scale": scale, "weight_shape": shape}, numbers

    return layout


def gptq_bytes(group: int) -> Callable[[Tensor], Layout]:
    def layout(weight: Tensor) -> Layout:
        words, scale, numbers = eight_bits(weight, group, torch.float16)
        zeros = torch.full((scale.shape[1], len(weight)), 127, dtype=torch.uint8)
        return {
            "qweight": words.T.contiguous(),
            "qzeros": zeros.view(torch.int32),
            "scales": scale.T.contiguous(),
            "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
        }, numbers

    return layout


def gptq(
    group: int, symmetric: bool, less: int, dtype: torch.dtype = torch.float16
) -> Callable[[Tensor], Layout]:
    """less: the difference of zeros and stored zeros."""

    def layout(weight: Tensor) -> Layout:
        codes, scale, zeros, numbers = integers(weight, group, dtype, symmetric)
        return {
            "qweight": words(codes).T.contiguous(),
            "qzeros": words(zeros.T - less),
            "scales": scale.T.contiguous(),
            "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
        }, numbers

    return layout


def awq(group: int) -> Callable[[Tensor], Layout]:
    def layout(weight: Tensor) -> Layout:
        codes, scale, zeros, numbers = integers(weight, group, torch.float16, False)
        return {
            "qweight": words(codes.T, AWQ_COLUMNS),
            "qzeros": words(zeros.T, AWQ_COLUMNS),
            "scales": scale.T.contiguous(),
        }, numbers

    return layout


def fp8_tensor(weight: Tensor) -> Layout:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(E4M3)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return tensors, codes.float() * scale


def fp8_channel(weight: Tensor) -> Layout:
    scale = (weight.abs().amax(-1, keepdim=True) / 448).bfloat16()
    codes = (weight / scale.float()).clamp(-448, 448).to(E4M3)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def transformers_fp8(weight: Tensor) -> Layout:
    tensors, numbers = fp8_tensor(weight)
    return {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"]}, numbers


def int8_channel(weight: Tensor) -> Layout:
    scale = (weight.abs().amax(-1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
NOT_SYMMETRIC = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": False}}}}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True}
W8A16 = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "group"}}}}
CHANNELS = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}}}
ROUND = {"quant_method": "auto-round", "bits": 4, "sym": False, "data_type": "int"}
# Name -> its function, its quantization_config, and the format of ours.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Layout], dict, str]] = {
    "ModelOpt NVFP4": (modelopt_nvfp4, MODELOPT, "nvfp4"),
    "ModelOpt FP8": (fp8_tensor, MODELOPT | {"quant_algo": "FP8"}, "fp8"),
    "compressed NVFP4": (
        compressed_nvfp4,
        COMPRESSED | {"format": "nvfp4-pack-quantized"},
        "nvfp4",
    ),
    "compressed MXFP4": (
        compressed_mxfp4,
        COMPRESSED | {"format": "mxfp4-pack-quantized"},
        "mxfp4",
    ),
    "compressed groups of 32": (compressed_integers(32), COMPRESSED, "int4"),
    "compressed channels": (compressed_integers(0, torch.float32), COMPRESSED, "int4"),
    "compressed zeros": (
        compressed_integers(32, symmetric=False),
        COMPRESSED | NOT_SYMMETRIC,
        "uint4",
    ),
    "compressed 8 bits in groups": (compressed_bytes(32), COMPRESSED | W8A16, "q8_0"),
    "compressed 8-bit channels": (compressed_bytes(0), COMPRESSED | CHANNELS, "int8"),
    "GPTQ of 8 bits": (gptq_bytes(32), GPTQ | {"bits": 8, "group_size": 32}, "q8_0"),
    "compressed FP8": (fp8_channel, COMPRESSED | {"format": "float-quantized"}, "fp8"),
    "compressed int8": (int8_channel, COMPRESSED | {"format": "int-quantized"}, "int8"),
    "transformers FP8": (transformers_fp8, {"quant_method": "fp8"}, "fp8"),
    "GPTQ": (gptq(32, True, 1), GPTQ, "int4"),
    "GPTQ v2 with zeros": (
        gptq(64, False, 0),
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        "uint4",
    ),
    "GPTQ with zeros": (gptq(32, False, 1, torch.bfloat16), GPTQ | {"sym": False}, "uint4"),
    "AWQ": (awq(32), {"quant_method": "awq", "bits": 4, "version": "gemm"}, "uint4"),
    "AutoRound as GPTQ": (
        gptq(32, False, 1),
        ROUND | {"packing_format": "auto_round:auto_gptq"},
        "uint4",
    ),
    "AutoRound": (gptq(32, False, 0), ROUND | {"packing_format": "auto_round"}, "uint4"),
    "AutoRound as AWQ": (awq(32), ROUND | {"packing_format": "auto_round:auto_awq"}, "uint4"),
}


def with_experts_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give each expert tensors of its own, as published quantized files have them."""
    apart = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".experts.")
        if leaf not in ("gate_up_proj", "down_proj"):
            apart[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            halves = {leaf: weight}
            if leaf == "gate_up_proj":
                halves = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            for half, part in halves.items():
                apart[f"{path}.experts.{expert}.{half}.weight"] = part
    return apart


def is_quantized(name: str, weight: Tensor) -> bool:
    """Whether published files have this weight quantized: projections, but no router."""
    projection = "_proj" in name or ".block_sparse_moe.experts." in name
    small = "in_proj_ba" in name or "in_proj_a." in name or "in_proj_b." in name
    return weight.dim() == 2 and projection and not small and "router" not in name


def write(
    source: Path,
    target: Path,
    layout: Callable[[str], Callable[[Tensor], Layout] | None],
    config: dict,
    rename: Callable[[str], str] = lambda name: name,
) -> tuple[Path, Path]:
    """Write a directory in a layout, and one of the dequantized numbers; return both.

    layout: the function for a weight's name, None: it stays plain. rename: a tensor's name ->
    the published one.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    quantized, plain = {}, {}
    for name, tensor in with_experts_apart(tensors).items():
        function = layout(name) if is_quantized(name, tensor) else None
        numbers, name = tensor.float(), rename(name)
        if function is None:
            quantized[name] = numbers
        else:
            parts, numbers = function(numbers)
            path = name.removesuffix(".weight")
            quantized |= {f"{path}.{leaf}": part for leaf, part in parts.items()}
        plain[name] = numbers
    given = json.loads((source / "config.json").read_text())
    directories = target / "quantized", target / "plain"
    for directory, found in zip(directories, (quantized, plain), strict=True):
        directory.mkdir(parents=True)
        found = {name: tensor.clone().contiguous() for name, tensor in found.items()}
        save_file(found, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(given))
        for path in source.glob("tokenizer*"):
            shutil.copy(path, directory)
    (directories[0] / "config.json").write_text(json.dumps(given | {"quantization_config": config}))
    return directories


def assert_text_is_the_same(with_vision, text, family: str, directory: Path) -> None:
    """Convert transformers' model with vision, and its text model with the same weights."""
    state = {n.replace(".language_model.", "."): t for n, t in with_vision.state_dict().items()}
    text.load_state_dict({n: t for n, t in state.items() if ".visual." not in n})
    ours = []
    for name, peer in (("vision", with_vision), ("text", text)):
        peer.save_pretrained(directory / name)
        ours.append(Checkpoint(convert(directory / name, dtype="fp32", progress=False)))
    assert [opened.args["family"] for opened in ours] == [family] * 2
    assert ours[0].tensors == ours[1].tensors
    for name in ours[0].tensors:
        assert torch.equal(ours[0].read(name), ours[1].read(name)), name
