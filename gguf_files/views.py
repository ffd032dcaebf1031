"""The tensors of a GGUF file under their published names, as views of its rows.

A published tensor is some rows of one or two of the file's: an expert is a part of a stack of all,
and other rows have another order. `Views` has the interface of a SafetensorsFile whose tensors are
fp32, so that the converter's plan and recipes take it. `read` dequantizes; `gather` copies rows as
they are stored, for weights that stay packed.
"""

import importlib.util
import math
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint import is_finite
from formats import FORMATS
from gguf_files.container import PLAIN_TYPES, GGUFFile
from gguf_files.conversions import ROUNDED, as_blocks_of, format_for
from models import import_meta_kernels
from models.gguf import Made, MadeTable


def has_package() -> bool:
    """Whether the package `gguf` is installed, which dequantizes types that have no format here."""
    return importlib.util.find_spec("gguf") is not None


def unpack(blocks: Tensor, type: str) -> Tensor:
    """Dequantize blocks, uint8 [..., bytes of a row] -> [..., in] in fp32, or in a plain type."""
    if type in PLAIN_TYPES:
        return blocks.view(PLAIN_TYPES[type])
    if type in ROUNDED:
        import gguf

        kind = gguf.GGMLQuantizationType[type]
        return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))
    name = format_for((type,))
    parts = FORMATS[name].from_blocks(as_blocks_of(name, blocks, type))
    return FORMATS[name].unpack(parts, FORMATS[name].group)


def check_types(file: GGUFFile) -> None:
    """Raise ValueError for a type of which no weight can be made, before anything is read."""
    types = {info.type for info in file.tensors.values()}
    known = {type for type in types if type in PLAIN_TYPES or format_for((type,))}
    for type in sorted(types - known):
        raise ValueError(f"it has tensors in {type}, which cannot be run; take Q4_K_M or Q8_0")
    for type in sorted(known & set(ROUNDED)):
        if not has_package():
            raise ValueError(f"it has tensors in {type}, which take a package: pip install gguf")


class View(NamedTuple):
    """A published tensor. `made.names` are the file's whole names; part: one expert's rows."""

    made: Made
    shape: tuple[int, ...]
    part: slice | None = None  # along the first axis, or the rows of experts stacked


class Views:
    """Published name -> View. `tensors` and `read` are as in a SafetensorsFile."""

    def __init__(self, file: GGUFFile):
        self.file, self.path = file, file.path
        self.views: dict[str, View] = {}
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.used: set[str] = set()  # names of the file's tensors
        self.scales: dict[int, Tensor] = {}  # by tensor, of NVFP4
        self.numbers = {name: number for number, name in enumerate(file.tensors)}
        self.names = list(file.tensors)

    def add_table(self, table: MadeTable, ours: str, theirs: str) -> None:
        """Enter the tensors of a table that the file has. ours, theirs: prefixes."""
        for name, ways in table.items():
            for made in ways if isinstance(ways, tuple) and not isinstance(ways, Made) else (ways,):
                made = made._replace(names=tuple(theirs + name for name in made.names))
                if all(name in self.file.tensors for name in made.names):
                    self.add(ours + name, made)
                    break

    def add(self, name: str, made: Made, part: slice | None = None) -> None:
        """Enter one tensor. Raises ValueError for shapes that its making does not take."""
        shapes = [self.file.tensors[theirs].shape for theirs in made.names]
        try:
            shape = made_shape(made, shapes, part)
        except (RuntimeError, IndexError):  # another number of elements, or of axes
            what = f"{' and '.join(made.names)} cannot have the shape {list(shapes[0])}"
            raise ValueError(f"{self.path}: {what}; fetch it again") from None
        self.views[name] = View(made, shape, part)
        self.tensors[name] = shape, torch.float32
        self.used.update(made.names)

    def add_experts(self, ours: str, theirs: str, count: int) -> None:
        """Enter each expert's gate, up and down: of one stack each, or of gate and up together.

        Files of 2023 have a tensor for each expert.
        """
        tensors = self.file.tensors
        both = tensors.get(f"{theirs}ffn_gate_up_exps.weight")
        for kind in ("gate", "up", "down"):
            stack = f"{theirs}ffn_{kind}_exps.weight"
            for e in range(count):
                name = f"{ours}mlp.experts.{e}.{kind}_proj.weight"
                alone = f"{theirs}ffn_{kind}.{e}.weight"
                if alone in tensors:
                    self.add(name, Made((alone,)))
                elif info := tensors.get(stack):
                    rows = info.shape[-2] if len(info.shape) == 3 else 0
                    self.add_expert(name, stack, e * rows, rows)
                elif both and kind != "down" and len(both.shape) == 3:
                    rows = both.shape[1] // 2
                    begin = 2 * e * rows + (rows if kind == "up" else 0)
                    self.add_expert(name, f"{theirs}ffn_gate_up_exps.weight", begin, rows)

    def add_expert(self, name: str, stack: str, begin: int, rows: int) -> None:
        """Enter an expert of a stack [E, rows, in], if the stack has that many."""
        *lead, width = self.file.tensors[stack].shape
        self.used.add(stack)
        if begin + rows <= torch.Size(lead).numel():
            self.views[name] = View(Made((stack,)), (rows, width), slice(begin, begin + rows))
            self.tensors[name] = (rows, width), torch.float32

    def add_scales(self) -> None:
        """Take the scales of NVFP4 tensors, one each or one an expert; inputs' are of no use.

        Gemma's scales of experts are there already, as those of its router.
        """
        for name, info in self.file.tensors.items():
            stem = name.removesuffix(".weight")
            scale = f"{stem}.scale"
            if info.type == "NVFP4" and scale in self.file.tensors and scale not in self.used:
                self.scales[self.numbers[name]] = self.read_scale(scale, info.shape)
                self.used |= {scale}
            if info.type == "NVFP4":
                self.used |= {f"{stem}.input_scale"} & self.file.tensors.keys()

    def read_scale(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the scales of a weight of this shape, fp32 [1] or [experts]. Raises ValueError."""
        info = self.file.tensors[name]
        counts = {1, shape[0]} if len(shape) == 3 else {1}
        if info.type not in PLAIN_TYPES or math.prod(info.shape) not in counts:
            what = f"{name} is {list(info.shape)} in {info.type}, no scale of {list(shape)}"
            raise ValueError(f"{self.path}: {what}; fetch it again")
        return self.check_finite(self.file.read(name).float().flatten())

    def check_finite(self, numbers: Tensor) -> Tensor:
        """Return numbers of the file. Raises ValueError for NaN and infinity."""
        if not is_finite(numbers):
            raise ValueError(f"{self.path} holds NaN or infinity; fetch it again")
        return numbers

    def scale_of(self, tensors: Tensor, rows: Tensor) -> Tensor | None:
        """Return the factor of each of these rows [N, 1]; None: they have none."""
        numbers = tensors.unique().tolist()
        if not self.scales.keys() & numbers:
            return None
        found = torch.ones(len(rows))
        for number in self.scales.keys() & numbers:
            chosen, scale = tensors == number, self.scales[number]
            of_each = rows_in(self.file.tensors[self.names[number]].shape) // len(scale)
            found[chosen] = scale[rows[chosen] // of_each]
        return found.unsqueeze(-1)

    def add_unused(self) -> None:
        """Enter what is left under its own name, so that the plan refuses it by that."""
        for name in self.file.tensors.keys() - self.used:
            self.add(name, Made((name,)))

    # Reading --------------------------------------------------------------------------------------

    def rows_of(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the file's tensor and the row in it of each row of a published tensor, [R] each.

        Tensors are numbered as in `names`.
        """
        view = self.views[name]
        counts = [rows_in(self.file.tensors[theirs].shape) for theirs in view.made.names]
        tensors = torch.tensor([self.numbers[theirs] for theirs in view.made.names])
        if view.part is not None:
            rows = torch.arange(view.part.start, view.part.stop)
            return tensors.expand(len(rows)), rows
        tensors = tensors.repeat_interleave(torch.tensor(counts))
        rows = torch.cat([torch.arange(count) for count in counts])
        if view.made.rows is None:
            return tensors, rows
        order = view.made.rows(torch.arange(len(rows)))
        return tensors[order], rows[order]

    def type_of(self, tensor: int) -> str:
        """Return the type that `rows_of_tensor` has a tensor of the file in."""
        info = self.file.tensors[self.names[tensor]]
        return "F32" if len(info.shape) == 1 and info.type not in PLAIN_TYPES else info.type

    def gather(self, tensors: Tensor, rows: Tensor) -> Tensor:
        """Return these rows [N] of these tensors [N], all of one type: uint8 [N, bytes of a row].

        A range of one tensor is mapped; all else is copied, by ranges if they are long.
        """
        breaks = (tensors[1:] != tensors[:-1]) | (rows[1:] != rows[:-1] + 1)
        begins = [0, *(breaks.nonzero().flatten() + 1).tolist()]
        ends = [*begins[1:], len(rows)]
        sources = {number: self.rows_of_tensor(number) for number in tensors.unique().tolist()}
        if len(begins) == 1:
            return sources[tensors[0].item()][rows[0] : rows[-1] + 1]
        width = next(iter(sources.values())).shape[-1]
        out = torch.empty(len(rows), width, dtype=torch.uint8)
        if len(begins) * 8 < len(rows):
            for begin, end in zip(begins, ends, strict=True):
                first = rows[begin].item()
                source = sources[tensors[begin].item()]
                out[begin:end] = source[first : first + end - begin]
            return out
        for number, source in sources.items():
            places = (tensors == number).nonzero().flatten()
            out[places] = source[rows[places]]
        return out

    def rows_of_tensor(self, number: int) -> Tensor:
        """Return a tensor of the file as rows, uint8 [R, bytes of a row]; see `rows_in`.

        A packed tensor of one axis is dequantized: a block has several of its rows.
        """
        name = self.names[number]
        blocks, info = self.file.blocks(name), self.file.tensors[name]
        if blocks.dim() > 1:
            return blocks.flatten(0, -2)
        if info.type not in PLAIN_TYPES:
            blocks = unpack(blocks, info.type).float().view(torch.uint8)
        return blocks.view(info.shape[0], -1)

    def read(self, name: str) -> Tensor:
        """Return a published tensor as numbers, dequantized to fp32 unless it is plain."""
        view = self.views[name]
        made = view.made
        shapes = [self.file.tensors[theirs].shape for theirs in made.names]
        if len(shapes) == 1 or made.rows:
            rows = self.dequantize(*self.rows_of(name))
            parts = [rows if len(shapes) > 1 else rows.view(view.shape if view.part else shapes[0])]
        else:
            every = [torch.arange(rows_in(shape)) for shape in shapes]
            pairs = zip(made.names, every, shapes, strict=True)
            parts = [
                self.dequantize(torch.full_like(rows, self.numbers[n]), rows).view(shape)
                for n, rows, shape in pairs
            ]
        return made.values(*parts) if made.values else parts[0]

    def dequantize(self, tensors: Tensor, rows: Tensor) -> Tensor:
        """Return rows [N] of tensors [N] as numbers [N, in]; in fp32 if they differ in type."""
        numbers = tensors.unique().tolist()
        scale = self.scale_of(tensors, rows)
        if len({self.type_of(number) for number in numbers}) == 1:
            values = unpack(self.gather(tensors, rows), self.type_of(numbers[0]))
            return values if scale is None else values * scale
        out = None
        for number in numbers:
            chosen = tensors == number
            blocks = self.gather(tensors[chosen], rows[chosen])
            values = unpack(blocks, self.type_of(number)).float()
            out = torch.empty(len(rows), values.shape[-1]) if out is None else out
            out[chosen] = values
        return out if scale is None else out * scale


def rows_in(shape: tuple[int, ...]) -> int:
    """Return the number of rows; a tensor of one axis has one for each number."""
    return torch.Size(shape[:-1]).numel() if len(shape) > 1 else shape[0]


def made_shape(made: Made, shapes: list[tuple[int, ...]], part: slice | None) -> tuple[int, ...]:
    """Return the shape of a tensor made of tensors of these shapes.

    Raises RuntimeError, or IndexError.
    """
    import_meta_kernels()
    empty = [torch.empty(shape, device="meta") for shape in shapes]
    if made.rows and len(shapes) > 1:
        empty = [torch.cat([t.flatten(0, -2) for t in empty])]
    if made.rows:
        made.rows(torch.empty(rows_in(tuple(empty[0].shape)), device="meta"))
    return tuple((made.values(*empty) if made.values else empty[0]).shape)
