"""Which modules of a model get which format, and writing a checkpoint in it.

A checkpoint's "format" is {"name", "dtype", "modules": {module: {"format", "group_size"}}}; without
"modules" nothing is packed. A module may have "scale", too: the dtype of published scales. "rows"
{module: [rows of each range]} has weights in several formats, whose ranges are the modules
"PATH.0", "PATH.1" and so on (formats/row_ranges.py). Functions here take the model that it belongs
to, on the meta device.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from math import gcd, prod
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import Checkpoint, Layout, Piece, Writer, is_finite, tensor_order
from formats import FORMATS, PLAIN
from formats.base import Parts
from formats.packed import Packed, PackedExpertLinear, PackedLinear
from formats.row_ranges import ExpertRowRanges, RowRanges
from host.pipeline import in_threads
from model import ExpertLinear, Linear, Transformer

# Dtypes of weights that are not packed.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACK_CHUNK = 1 << 22  # weights packed at a time: 150 MB in fp32, with the solver's temporaries
CPU_CHUNK = 1 << 17  # on a CPU: temporaries stay in its cache, and their memory is used again
SUGGESTED_GROUPS = 8, 16, 32, 64, 128, 256
# Small products of layers, which decide about others: gates, decays, step sizes, an index.
SMALL_PRODUCTS = ".wba", ".wdt", ".wfgb", ".wdecay", ".wgate", ".windex", ".inject"
NEVER_PACKED = ".router", ".shared_gate", *SMALL_PRODUCTS
LOOKED_UP = (".table",)  # rows are unpacked one by one: fp8, whatever the others get
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

    attention (and what else is no feed-forward layer), experts (and dense such layers), head: names
    in FORMATS, or PLAIN; the head's default is its format's. dtype: of everything else. Raises
    ValueError for an unknown name or a group size that does not fit.
    """
    main_format = FORMATS.get(experts) or FORMATS.get(attention)
    default_head = main_format.head_format if main_format else PLAIN
    head = head or default_head
    names = {"attention": attention, "experts": experts, "head": head}
    check_formats(names, group_size)
    modules = plan_modules(packable_sizes(model, names), group_size)
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


# The format of each module to pack, and the lengths that its groups must divide
Packable = dict[str, tuple[str, tuple[int, ...]]]


def packable_sizes(model: Transformer, names: dict[str, str]) -> Packable:
    """Return the modules to pack. names: format by role."""
    chosen = {}
    for path, module in model.named_modules():
        role = "head" if path == "head" else "experts" if ".ffn." in path else "attention"
        packable = isinstance(module, Linear | ExpertLinear) and not path.endswith(NEVER_PACKED)
        if packable and names[role] != PLAIN:
            sizes = [module.weight.shape[-1]]
            name = "fp8" if path.endswith(LOOKED_UP) else FORMATS[names[role]].name_for(sizes[0])
            if has_gate_and_up(module, path) and FORMATS[name].blocks:
                sizes.append(module.weight.shape[-2] // 2)  # each has blocks of its own
            chosen[path] = name, tuple(sizes)
    return chosen


def has_gate_and_up(module: nn.Module, path: str) -> bool:
    """Whether a module's rows are the gates of experts, then as many others."""
    return path.endswith("experts.w13") and getattr(module, "gated", True)


def plan_modules(chosen: Packable, group_size: int | None) -> dict[str, dict]:
    """Return the "modules" of a format. Raises ValueError for a group size that does not fit.

    group_size: None: the largest that fits each module.
    """
    modules = {}
    for path, (name, sizes) in chosen.items():
        format = FORMATS[name]
        try:
            if format.has_own_group or group_size is None:
                group = format.choose_group(gcd(*sizes), None)
            else:
                group = min(format.choose_group(size, group_size) for size in sizes)
        except ValueError as error:
            fix = suggest_fix(chosen, group_size)
            raise ValueError(f"{path} in {name}: {error}: {fix}") from None
        modules[path] = {"format": name, "group_size": group}
    return match_shared_experts(modules)


def match_shared_experts(modules: dict[str, dict]) -> dict[str, dict]:
    """Return the "modules" with groups of shared experts that divide those of the others.

    The fused kernels compute a shared expert as some more of the others.
    """
    matched = {}
    for path, spec in modules.items():
        other = modules.get(path.replace(".shared.", ".experts."), spec)
        if other["format"] == spec["format"]:
            spec = spec | {"group_size": gcd(spec["group_size"], other["group_size"])}
        matched[path] = spec
    return matched


def suggest_fix(chosen: Packable, group_size: int | None) -> str:
    """Name group sizes that would fit all modules, or else formats."""
    grouped = [(FORMATS[name], size) for name, sizes in chosen.values() for size in sizes]

    def fit(group: int | None) -> bool:
        return all(
            format.has_own_group or format.fits(size, group or format.default_group(size))
            for format, size in grouped
        )

    if group_size is None:
        return "choose another format"
    fitting = [str(n) for n in SUGGESTED_GROUPS if fit(n)]
    fixes = [f"--group_size {' or '.join(fitting)} would do"] if fitting else []
    fixes += ["leave it out"] if fit(None) else []
    return ", or ".join(fixes) or "choose another format"


def describe_groups(format: dict) -> str:
    """Return the sizes of groups in words, "" for a format without groups.

    The largest size of a format comes first; modules with smaller groups are named.
    """
    found: dict[str, Counter] = {}
    for path, spec in format.get("modules", {}).items():
        if not FORMATS[spec["format"]].has_own_group:
            leaf = re.sub(r"^layers\.\d+\.", "", path)
            found.setdefault(spec["format"], Counter())[spec["group_size"], leaf] += 1
    texts = []
    for name, counts in found.items():
        sizes = sorted({size for size, _ in counts}, reverse=True)
        parts = [str(sizes[0])]
        for size in sizes[1:]:
            leaves = ", ".join(sorted(leaf for other, leaf in counts if other == size))
            parts.append(f"{size} in {leaves}")
        texts.append(f"{name} in groups of {'; '.join(parts)}")
    return ", ".join(texts)


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
    return format.get("modules", {}) | {f"{MTP}.{path}": spec for path, spec in head.items()}


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
    name, group, scale = spec["format"], spec["group_size"], scale_dtype(spec)
    if type(group) is not int:
        raise TypeError
    if isinstance(module, ExpertLinear):
        packed = PackedExpertLinear(module, name, group, scale)
    elif isinstance(module, Linear):
        packed = PackedLinear(module, name, group, scale)
    else:
        raise TypeError
    blocks = FORMATS[name].blocks and has_gate_and_up(module, path)
    if blocks and module.weight.shape[1] % (2 * group):
        raise ValueError("gate and up are not of whole blocks")
    return packed


def scale_dtype(spec: dict) -> torch.dtype | None:
    """Return the dtype of a module's scales; None: its format's. Raises KeyError for another."""
    return DTYPES[spec["scale"]] if "scale" in spec else None


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
        for name, (shape, dtype) in format.layout(weight.shape, group, scale_dtype(spec)).items()
    }
    height, width = weight.shape[-2:]
    size = CPU_CHUNK if device.type == "cpu" else PACK_CHUNK
    step = max(group, size // width // group * group)  # whole blocks, if a format has blocks
    for expert, rows in enumerate(weight.reshape(-1, height, width)):  # experts are independent
        for start in range(0, height, step):
            chunk = rows[start : start + step].to(device)
            if not is_finite(chunk):
                raise ValueError("it holds numbers that are not finite")
            for name, part in format.pack(chunk.float(), group, **options).items():
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
        tqdm(total=packed_bytes(model, format, sizes), **show) as bar,
    ):
        writer.reserve(packed_bytes(model, format, sizes))
        packing = Packing(format, source.tensors, device, iterations)
        layouts, pieces = {}, []
        for file, names in source.by_file().items():
            layout = {name: source.tensors[name] for name in names}
            layouts[file] = packing.layout(layout)
            pieces.append(packing.pieces(layout, source.pieces))
        writer.write_pieces(layouts, chain.from_iterable(pieces), bar.update)
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


class Packing:
    """Packs tensors while they are written: pieces of a few are in memory.

    format: of the checkpoint to write. names: all tensors of its source. device: where weights are
    packed. iterations: of a format's solver; None: its default.
    """

    def __init__(
        self,
        format: dict,
        names: Collection[str],
        device: torch.device | str = "cpu",
        iterations: int | None = None,
    ):
        self.modules, self.names = modules_by_tensor(format), names
        self.device, self.iterations = torch.device(device), iterations

    def module(self, name: str) -> tuple[bool, str | None]:
        """Return whether a tensor is kept, and the module that is packed from it, or None."""
        path = name.removesuffix(".weight")
        is_kept = path not in self.modules
        if path == "embedding" and "head.weight" not in self.names:
            path = "head"  # it was tied to this tensor, and gets parts of its own
        return is_kept, path if path in self.modules else None

    def layout(self, layout: Layout) -> Layout:
        """Return the layout of a file with these tensors."""
        packed: Layout = {}
        for name, (shape, dtype) in layout.items():
            is_kept, path = self.module(name)
            if is_kept:
                packed[name] = shape, dtype
            if path:
                spec = self.modules[path]
                parts = FORMATS[spec["format"]].layout(torch.Size(shape), spec["group_size"])
                packed |= {f"{path}.{leaf}": part for leaf, part in parts.items()}
        return packed

    def order(self, layout: Layout) -> list[str]:
        """Return the tensors in the order to pack them: a file begins with codes."""
        return sorted(tensor_order(layout), key=lambda name: self.module(name)[1] is None)

    def pieces(self, layout: Layout, read: Callable[[str], Iterable[Piece]]) -> Iterator[Piece]:
        """Yield the pieces to write.

        layout: of the source's tensors of one file. read: returns a tensor in pieces.
        """
        for name in self.order(layout):
            is_kept, path = self.module(name)
            weights = read(name)
            if path is None:
                yield from weights
                continue
            if is_kept:
                weights = list(weights)
                yield from weights
            rows = whole_matrices((piece.rows for piece in weights), layout[name][0])
            for parts in self.pack_all(partial(self.pack, name, path), rows):
                for leaf, part in parts.items():
                    yield Piece(f"{path}.{leaf}", part)

    def pack_all(
        self, pack: Callable[[Tensor], Parts], weights: Iterable[Tensor]
    ) -> Iterator[Parts]:
        """Yield the parts of each weight. Each of a CPU's cores packs one of its own.

        That is several times as fast as operators that share all cores, which wait for each other.
        """
        if self.device.type != "cpu":
            yield from map(pack, weights)
            return
        cores = torch.get_num_threads()
        try:
            yield from in_threads(pack, weights, cores, partial(torch.set_num_threads, 1))
        finally:
            torch.set_num_threads(cores)

    def pack(self, name: str, path: str, weight: Tensor) -> Parts:
        """Return the parts of one or several matrices of a tensor."""
        try:
            return pack_weight(weight, self.modules[path], self.device, self.iterations)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; fetch and convert the checkpoint again") from None


def whole_matrices(pieces: Iterable[Tensor], shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield [n, out, in] or [out, in] of consecutive pieces of a tensor [..., out, in]."""
    matrix, found, count = prod(shape[-2:]), [], 0
    for piece in pieces:
        found.append(piece.reshape(-1))
        count += piece.numel()
        if count % matrix == 0 and count >= PACK_CHUNK:
            yield joined(found).view(-1, *shape[1:])
            found, count = [], 0
    if found:
        yield joined(found).view(-1, *shape[1:])


def joined(pieces: list[Tensor]) -> Tensor:
    """Return what pieces of one dimension are together."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


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
