"""Which modules of a model get which format, and writing a checkpoint in it.

A checkpoint's "format" is {"name", "dtype", "modules": {module: {"format", "group_size"}}}; without
"modules" nothing is packed. "rows" {module: [rows of each range]} has weights in several formats,
whose ranges are the modules "PATH.0", "PATH.1" and so on (formats/row_ranges.py). Functions here
take the model that it belongs to, on the meta device.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import Checkpoint, Writer
from formats import FORMATS, PLAIN, Format
from formats.base import Parts
from formats.packed import Packed, PackedExpertLinear, PackedLinear
from formats.row_ranges import ExpertRowRanges, RowRanges
from model import ExpertLinear, Linear, Transformer

# Dtypes of weights that are not packed.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACK_CHUNK = 1 << 22  # weights packed at a time: 150 MB in fp32, with the solver's temporaries
SUGGESTED_GROUPS = 8, 16, 32, 64, 128, 256
NEVER_PACKED = ".router", ".shared_gate", ".wba"
# A head for multi-token prediction: its key in "format", and the prefix of its tensors.
MTP = "mtp"

# Planning -----------------------------------------------------------------------------------------


def formats_of_mode(mode: str) -> tuple[str, str]:
    """Return the formats of attention and of experts that a --mode stands for."""
    return FORMATS[mode].attention_format or mode if mode in FORMATS else mode, mode


def plan_format(
    model: Transformer,
    attention: str,
    experts: str,
    head: str | None = None,
    group_size: int | None = None,
    dtype: str = "bf16",
) -> dict:
    """Return a checkpoint's "format" for this model.

    attention, experts (and dense feed-forward layers), head: names in FORMATS, or PLAIN; the head's
    default is its format's. dtype: of everything else. Raises ValueError for an unknown name or a
    group size that does not fit.
    """
    main_format = FORMATS.get(experts) or FORMATS.get(attention)
    default_head = main_format.head_format if main_format else PLAIN
    head = head or default_head
    names = {"attention": attention, "experts": experts, "head": head}
    check_formats(names, group_size)
    modules = plan_modules(packable_widths(model, names), group_size)
    name = experts if (attention, experts) == formats_of_mode(experts) else f"{attention}-{experts}"
    if head != default_head:
        name += f"-head_{head}"
    if group_size is not None:
        name += f"-g{group_size}"
    return {"name": name, "dtype": dtype, "modules": modules}


def check_formats(names: dict[str, str], group_size: int | None) -> None:
    """Raise ValueError for formats that are unknown, that pack nothing, or that have no groups."""
    for option, name in names.items():
        if name != PLAIN and name not in FORMATS:
            raise ValueError(f"--{option} {name}: it must be one of {', '.join((PLAIN, *FORMATS))}")
    packed = [FORMATS[name] for name in names.values() if name != PLAIN]
    if not packed:
        raise ValueError(
            "nothing is to be quantized: give --mode, --attention, --experts or --head a format"
        )
    if group_size is not None and all(format.has_own_group for format in packed):
        raise ValueError(
            f"--group_size {group_size}: none of these formats has groups, leave it out"
        )


def packable_widths(model: Transformer, names: dict[str, str]) -> dict[str, tuple[str, int]]:
    """Return each module to pack -> its format and the width of its rows. names: format by role."""
    chosen = {}
    for path, module in model.named_modules():
        role = "head" if path == "head" else "attention" if ".attention." in path else "experts"
        packable = isinstance(module, Linear | ExpertLinear) and not path.endswith(NEVER_PACKED)
        if packable and names[role] != PLAIN:
            chosen[path] = names[role], module.weight.shape[-1]
    return chosen


def plan_modules(chosen: dict[str, tuple[str, int]], group_size: int | None) -> dict[str, dict]:
    """Return the "modules" of a format. Raises ValueError for a group size that does not fit."""
    grouped = [(FORMATS[name], width) for name, width in chosen.values()]
    grouped = [(format, width) for format, width in grouped if not format.has_own_group]
    modules = {}
    for path, (name, width) in chosen.items():
        format = FORMATS[name]
        try:
            group = format.choose_group(width, None if format.has_own_group else group_size)
        except ValueError as error:
            fix = suggest_groups(grouped)
            raise ValueError(f"{path} in {name}: {error}: {fix}") from None
        modules[path] = {"format": name, "group_size": group}
    return modules


def suggest_groups(grouped: list[tuple[Format, int]]) -> str:
    """Name the group sizes that would fit all of these formats and widths."""
    fitting = [
        str(n) for n in SUGGESTED_GROUPS if all(format.fits(width, n) for format, width in grouped)
    ]
    if not grouped or not fitting:
        return "choose other formats"
    return f"--group_size {' or '.join(fitting)} would do"


def add_head(format: dict, names: Iterable[str]) -> dict:
    """Return a checkpoint's "format" with that of its head for multi-token prediction, if any.

    names: the checkpoint's tensors. The head's modules get the formats of the model's layers.
    """
    paths = [name.removeprefix(f"{MTP}.") for name in names if name.startswith(f"{MTP}.")]
    if not paths:
        return format
    specs = {re.sub(r"^layers\.\d+\.", "", p): spec for p, spec in format["modules"].items()}
    # `fc` has rows of two times D: any group of rows of D divides them.
    widths = (specs.get(name) for name in ("attention.wqkv", "ffn.experts.w13"))
    modules = {
        path: specs[key]
        for path in (name.removesuffix(".weight") for name in paths)
        if (key := path.removeprefix("layers.0.")) in specs
    }
    if spec := next(filter(None, widths), None):
        modules["fc"] = spec
    head = {"name": format["name"], "dtype": format["dtype"], "modules": modules}
    return format | {MTP: head}


def modules_by_tensor(format: dict) -> dict[str, dict]:
    """Return the packed modules of a "format", a head's under the names of their tensors."""
    head = format.get(MTP, {}).get("modules", {})
    return format["modules"] | {f"{MTP}.{path}": spec for path, spec in head.items()}


# Packing a model ----------------------------------------------------------------------------------


def pack_modules(model: Transformer, format: dict) -> None:
    """Replace the modules that a checkpoint's "format" names by packed ones, on the meta device.

    Raises ValueError for a format that does not fit the model.
    """
    modules, rows = format.get("modules", {}), format.get("rows", {})
    if not isinstance(modules, dict) or not isinstance(rows, dict):
        raise ValueError("the checkpoint's format does not map modules to formats: make it again")
    for path, spec in [*rows.items(), *modules.items()]:
        try:
            packed = packed_module(model.get_submodule(path), path, spec)
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            cause = repr(spec)
            if not isinstance(error, KeyError | TypeError):
                cause = f"{str(error).splitlines()[0]:.200}"
            raise ValueError(
                f"the checkpoint's format does not fit the model ({path!r}: {cause}): make it again"
            ) from None
        model.set_submodule(path, packed)


def packed_module(module: nn.Module, path: str, spec: dict | list) -> nn.Module:
    """Return the packed module that replaces this one. Raises one of the errors caught above.

    spec: {"format", "group_size"}, or how many rows each range of a weight in several formats has.
    """
    if isinstance(spec, list):
        kind = ExpertRowRanges if isinstance(module, ExpertLinear) else RowRanges
        return kind(module, spec)
    name, group = spec["format"], spec["group_size"]
    if type(group) is not int:
        raise TypeError
    if isinstance(module, ExpertLinear):
        packed = PackedExpertLinear(module, name, group)
    elif isinstance(module, Linear):
        packed = PackedLinear(module, name, group)
    else:
        raise TypeError
    gate_and_up = path.endswith("experts.w13") and FORMATS[name].blocks
    if gate_and_up and module.weight.shape[1] % (2 * group):
        raise ValueError("gate and up are not of whole blocks")
    return packed


def pack_weight(
    weight: Tensor, spec: dict, device: torch.device, iterations: int | None = None
) -> Parts:
    """Pack a weight [..., out, in], on any device, PACK_CHUNK at a time -> parts on `device`.

    spec: {"format", "group_size"}. iterations: of a format's solver, None: its default. Raises
    ValueError for weights that are not finite.
    """
    format, group = FORMATS[spec["format"]], spec["group_size"]
    options = {"iterations": iterations} if format.has_solver and iterations is not None else {}
    parts = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in format.layout(weight.shape, group).items()
    }
    height, width = weight.shape[-2:]
    step = max(group, PACK_CHUNK // width // group * group)  # whole blocks, if a format has blocks
    for expert, rows in enumerate(weight.reshape(-1, height, width)):  # experts are independent
        for start in range(0, height, step):
            chunk = rows[start : start + step].to(device).float()
            if not chunk.isfinite().all():
                raise ValueError("it holds numbers that are not finite")
            for name, part in format.pack(chunk, group, **options).items():
                whole = parts[name].view(-1, *parts[name].shape[-2:])[expert]
                whole.narrow(0, start * len(whole) // height, len(part)).copy_(part)
    return parts


# Writing a checkpoint -----------------------------------------------------------------------------


def quantize(
    source: Checkpoint,
    format: dict,
    model: Transformer,
    target: Path | str | None = None,
    device: torch.device | str = "cpu",
    force: bool = False,
    iterations: int | None = None,
    progress: bool = True,
) -> Path:
    """Write the checkpoint `source` in a format of `plan_format`; return the new directory.

    Holds about one layer in memory. model: of source's args, on the meta device; its modules are
    replaced by packed ones. target: by default model_<name of the format> beside the source. Raises
    ValueError for a source that is quantized already, and as `Writer` does; then nothing is left
    behind.
    """
    check_source(source, model)
    directory = source.directory.resolve()
    target = Path(target) if target else directory.parent / f"model_{format['name']}"
    if target.resolve() == directory:
        raise ValueError(f"{target} is what is to be quantized: name another --output_dir")
    sizes = {name: source.nbytes(name) for name in source.tensors}
    pack_modules(model, format)
    format = add_head(format, source.tensors)
    show = dict(desc="quantize", unit="B", unit_scale=True, file=sys.stderr, disable=not progress)
    with (
        Writer(target, source.args, format, force) as writer,
        tqdm(total=sum(sizes.values()), **show) as bar,
    ):
        writer.reserve(packed_bytes(model, format, sizes))
        modules = modules_by_tensor(format)
        for file, names in source.by_file().items():
            tensors = {}
            for name in names:
                tensors |= pack_tensor(source, name, modules, device, iterations)
                bar.update(sizes[name])
            writer.write(file, tensors)
        for path in source.side_files():
            writer.copy(path)
    return target


def check_source(source: Checkpoint, model: Transformer) -> None:
    """Raise ValueError unless the checkpoint has all parameters of the model in 16 or 32 bits."""
    if "modules" in source.format:
        raise ValueError(
            f"{source.directory} is quantized already ({source.format['name']}): "
            "use it or its bf16 original"
        )
    for name, parameter in model.named_parameters():
        shape, dtype = source.tensors.get(name, (None, None))
        if shape != parameter.shape or dtype not in DTYPES.values():
            raise ValueError(
                f"{name} is not there as {list(parameter.shape)} in 16 or 32 bits, "
                "as the args ask for: convert the original checkpoint again"
            )


def packed_bytes(model: Transformer, format: dict, sizes: dict[str, int]) -> int:
    """Return the bytes of the tensors to be written. sizes: bytes of the source's tensors."""
    packed = [module for module in model.modules() if isinstance(module, Packed)]
    parts = sum(part.nbytes for module in packed for part in module.parts().values())
    modules = format["modules"]
    kept = sum(size for name, size in sizes.items() if name.removesuffix(".weight") not in modules)
    return parts + kept


def pack_tensor(
    source: Checkpoint,
    name: str,
    modules: dict[str, dict],
    device: torch.device | str,
    iterations: int | None,
) -> dict[str, Tensor]:
    """Read one tensor of the source; return it, or its parts if it is to be packed, by name."""
    path, weight, tensors = name.removesuffix(".weight"), source.read(name), {}
    if path not in modules:
        tensors[name] = weight
    if path == "embedding" and "head" in modules and "head.weight" not in source.tensors:
        path = "head"  # it was tied to this tensor, and gets parts of its own
    if path in modules:
        try:
            parts = pack_weight(weight, modules[path], torch.device(device), iterations)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; fetch and convert the checkpoint again") from None
        tensors |= {f"{path}.{leaf}": part for leaf, part in parts.items()}
    return tensors


def bits_per_weight(checkpoint: Checkpoint, model: Transformer) -> tuple[float, float]:
    """Return bits a weight, scales included: of the packed weights, and of all of the model's.

    model: of the checkpoint's args, on the meta device, with nothing packed.
    """
    modules = checkpoint.format["modules"]
    weights = sum(model.get_submodule(path).weight.numel() for path in modules)
    names = [name for name in checkpoint.tensors if not name.startswith(f"{MTP}.")]
    sizes = {name: 8 * checkpoint.nbytes(name) for name in names}
    packed = sum(
        size
        for name, size in sizes.items()
        if name.rsplit(".", 1)[0] in modules and not name.endswith(".bias")
    )
    everything = sum(parameter.numel() for parameter in model.parameters())
    return packed / weights, sum(sizes.values()) / everything
