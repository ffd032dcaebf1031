"""A GGUF file as a checkpoint that `load_model` reads: no converted copy is written.

Weights stay in the formats that they are published in. A file may have several, and one weight of
ours may be made of tensors in several: then it is made of ranges of rows (formats/row_ranges.py).
"""

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from formats import FORMATS
from formats.base import Parts
from formats.quantizer import MTP, NEVER_PACKED
from gguf_files.container import PLAIN_TYPES, GGUFFile
from gguf_files.conversions import ROUNDED, as_blocks_of, format_for
from gguf_files.side_files import SideFiles
from gguf_files.views import Views, check_types, unpack
from model import ExpertLinear, Linear, ModelArgs
from models import build_model, family_of_gguf, head_args
from models.converter import ConversionPlan
from models.family import Family, PublishedLayout
from models.gguf import NEXT, REST, MadeTable, Values, made_of
from models.pieces import assemble
from models.published_tensors import PublishedTensors
from models.tensors import Recipe

# Weights whose blocks are read at once: temporaries in a core's cache, or few launches on a GPU.
CHUNK, GPU_CHUNK = 1 << 18, 1 << 24
GATE_AND_UP = ".w13"  # modules with the rows of both, which one kernel multiplies
NO_SENSE = TypeError, AttributeError, ZeroDivisionError, KeyError, IndexError, OverflowError
QUANT = re.compile(r"(UD-)?(I?Q\d\w*|[BM]?[FX]+P?\d+\w*)")  # the end of a file's name: UD-Q4_K_XL

log = logging.getLogger("moe_fast")


class GGUFPlan(ConversionPlan):
    """Which tensors of ours are made of which published ones, checked like a directory's."""

    def layout(self, layer: str) -> PublishedLayout:
        return PublishedLayout(fused=False, packed=False, separate=True)

    def with_blocks(self, ours: str, recipe: Recipe) -> dict[str, Recipe]:
        return {ours: recipe}


class Range(NamedTuple):
    """Rows `begin` to `end` of a weight. format: None for a plain type.

    types: of the file; several only if the format holds all.
    """

    types: tuple[str, ...]
    format: str | None
    begin: int
    end: int


class StoredWeight:
    """A weight of ours [..., out, in] that stays packed.

    tensors, rows [..., out]: where the file has each row. ranges: of one format each.
    """

    def __init__(self, views: Views, recipe: Recipe, together: bool = False):
        """together: have one range, if a format holds all types."""
        self.views, self.shape = views, recipe.shape
        ours = recipe.shape[:-1]
        self.tensors, self.rows = (torch.zeros(ours, dtype=torch.long) for _ in range(2))
        for name, place in recipe.sources.items():
            self.tensors[place], self.rows[place] = views.rows_of(name)
        if recipe.transform:
            self.tensors, self.rows = (
                recipe.transform(t.unsqueeze(-1)).squeeze(-1) for t in (self.tensors, self.rows)
            )
        self.ranges = self.find_ranges(together)

    def find_ranges(self, together: bool) -> list[Range]:
        """Return the ranges of one type; none if the weight cannot stay packed."""
        numbers = self.tensors.flatten(0, -2) if self.tensors.dim() > 1 else self.tensors[None]
        types = [self.views.type_of(n) for n in range(len(self.views.names))]
        kinds = sorted(set(types))
        kind = torch.tensor([kinds.index(type) for type in types])[numbers]
        experts_differ = not torch.equal(kind, kind[:1].expand_as(kind))
        if together or experts_differ:
            several = tuple(kinds[n] for n in kind.unique().tolist())
            if format := format_for(several):
                return [Range(several, format, 0, kind.shape[1])]
        if experts_differ:
            return []
        first = kind[0]
        breaks = (first[1:] != first[:-1]).nonzero().flatten() + 1
        edges = [0, *breaks.tolist(), len(first)]
        found = []
        for begin, end in pairwise(edges):
            type = kinds[first[begin].item()]
            found.append(Range((type,), format_for((type,)), begin, end))
        return found if any(found.format for found in found) else []

    def parts(self, of: Range, experts: slice | None, device: torch.device) -> Parts:
        """Return the parts of a range, of all experts or of some, a chunk of rows at a time."""
        tensors, rows = (t[..., of.begin : of.end] for t in (self.tensors, self.rows))
        if experts is not None:
            tensors, rows = tensors[experts], rows[experts]
        form, width = FORMATS[of.format], self.shape[-1]
        layout = form.layout(torch.Size((*rows.shape, width)), form.group)
        parts = {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in layout.items()
        }
        flat = {name: part.view(-1, part.shape[-1]) for name, part in parts.items()}
        step = max(1, (CHUNK if device.type == "cpu" else GPU_CHUNK) // width)
        every = zip(tensors.flatten().split(step), rows.flatten().split(step), strict=True)
        for number, (some_tensors, some_rows) in enumerate(every):
            chunk = {name: part[number * step :][: len(some_rows)] for name, part in flat.items()}
            for type, places in self.by_type(some_tensors, of):
                chosen_tensors, chosen_rows = some_tensors[places], some_rows[places]
                blocks = self.views.gather(chosen_tensors, chosen_rows).to(device)
                packed = self.pack(blocks, type, of.format)
                scale = self.views.scale_of(chosen_tensors, chosen_rows)
                if scale is not None:  # a tensor or an expert in NVFP4 has one
                    packed["scale_step"] = packed["scale_step"] * scale.to(device)
                for name, part in packed.items():
                    chunk[name][places] = part
        return parts

    def by_type(self, tensors: Tensor, of: Range) -> Iterator[tuple[str, slice | Tensor]]:
        """Yield the types of rows of these tensors [n], and where each of them is."""
        if len(of.types) == 1:
            yield of.types[0], slice(None)
            return
        for type in of.types:
            numbers = [n for n in tensors.unique().tolist() if self.views.type_of(n) == type]
            places = torch.isin(tensors, torch.tensor(numbers, dtype=torch.long))
            if numbers:
                yield type, places.nonzero().flatten()

    def pack(self, blocks: Tensor, type: str, format: str) -> Parts:
        """Return the parts of rows [n, bytes]. Raises ValueError for scales that are not finite."""
        form = FORMATS[format]
        if type in ROUNDED:
            parts = form.pack(unpack(blocks.cpu(), type).to(blocks.device), form.group)
        else:
            parts = form.from_blocks(as_blocks_of(format, blocks, type))
        for part in parts.values():
            if part.is_floating_point():
                self.views.check_finite(part)
        return parts

    def plain(self, of: Range) -> Tensor:
        """Return the rows of a range that is plain."""
        tensors, rows = (t[..., of.begin : of.end] for t in (self.tensors, self.rows))
        weight = unpack(self.views.gather(tensors.flatten(), rows.flatten()), of.types[0])
        return weight.view(*rows.shape, self.shape[-1])


class Part(NamedTuple):
    """Where a tensor that `read` returns comes from: `leaf` of a range's parts, or its rows."""

    weight: StoredWeight
    range: Range
    leaf: str


class GGUFCheckpoint:
    """A GGUF file with the interface of a Checkpoint: `args`, `format`, `directory` and `read`.

    path: of the file, or of any part of a split one. Raises ValueError, one line with the fix, for
    a file that is damaged or of a model that cannot be run.
    """

    plain_dtype = torch.bfloat16  # of weights that are not packed, unless the user asks for another

    def __init__(self, path: Path | str):
        self.file = GGUFFile(path)
        try:
            check_types(self.file)
            family, args, values = read_model(self.file)
        except ValueError as error:
            message = str(error).replace("config.json: ", "")
            raise ValueError(f"{self.file.path}: {message}") from None
        self.views = Views(self.file)
        heads = enter_tensors(self.views, family, args, values)
        shards = {self.file.path.name: self.views}
        published = PublishedTensors(self.file.path, (), shards, {})
        try:
            self.plan = GGUFPlan(family, args, published, None, heads)
        except ValueError as error:
            raise ValueError(str(error).replace("config.json", "its header")) from None
        self.published, self.args = published, dataclasses.asdict(args)
        self.recipes = {n: r for file in self.plan.files.values() for n, r in file.items()}
        self.parts: dict[str, Part] = {}
        self.cache: tuple[object, Parts] = (None, {})
        self.format = self.plan_format(args)
        self.side_files = SideFiles(self.file, args.vocab_size)
        self.files = {part.path.name: part.size for part in self.file.parts}
        self.log_nearest()

    @property
    def path(self) -> Path:
        """The file, or the first part of it."""
        return self.file.path

    @property
    def directory(self) -> Path:
        """The directory of the tokenizer's files, which is made in the user's cache."""
        return self.side_files.directory(self.format["name"])

    # Planning -------------------------------------------------------------------------------------

    def plan_format(self, args: ModelArgs) -> dict:
        """Return the checkpoint's "format", and enter the parts of packed weights."""
        label = format_label(self.file)
        common = {"name": label, "dtype": "bf16"}
        format = common | self.plan_modules(args, "")
        if args.tied_embeddings and "embedding.weight" in self.recipes:
            self.plan_weight("head", self.recipes["embedding.weight"], "", format)
        if f"{MTP}.fc.weight" in self.recipes:
            format[MTP] = common | self.plan_modules(head_args(args), f"{MTP}.")
        return format

    def plan_modules(self, args: ModelArgs, prefix: str) -> dict:
        """Return "modules" and "rows" of a model's format."""
        found: dict = {"modules": {}, "rows": {}}
        for path, module in build_model(args).named_modules():
            packable = isinstance(module, Linear | ExpertLinear) and not path.endswith(NEVER_PACKED)
            name = f"{prefix}{path}.weight"
            if packable and name in self.recipes:
                self.plan_weight(path, self.recipes[name], prefix, found)
        return found

    def plan_weight(self, path: str, recipe: Recipe, prefix: str, found: dict) -> None:
        """Enter one weight, if it stays packed, into "modules" and "rows"."""
        if any(self.views.views[name].made.values for name in recipe.sources):
            return
        weight = StoredWeight(self.views, recipe, together=path.endswith(GATE_AND_UP))
        for number, of in enumerate(weight.ranges):
            child = path if len(weight.ranges) == 1 else f"{path}.{number}"
            if of.format is None:
                self.parts[f"{prefix}{child}.weight"] = Part(weight, of, "weight")
                continue
            group = FORMATS[of.format].group
            found["modules"][child] = {"format": of.format, "group_size": group}
            for leaf in FORMATS[of.format].layout(torch.Size(weight.shape), group):
                self.parts[f"{prefix}{child}.{leaf}"] = Part(weight, of, leaf)
        if len(weight.ranges) > 1:
            found["rows"][path] = [of.end - of.begin for of in weight.ranges]
        if weight.ranges and path != "head":
            self.recipes.pop(f"{prefix}{path}.weight", None)

    def log_nearest(self) -> None:
        """Tell of types that become another format."""
        ranges = {part.range for part in self.parts.values()}
        pairs = {f"{t} as {of.format}" for of in ranges for t in of.types if t in ROUNDED}
        if pairs:
            listed = ", ".join(sorted(pairs))
            log.warning(f"{self.file.path.name}: weights are rounded again: {listed}")

    # Reading --------------------------------------------------------------------------------------

    def read(
        self, name: str, index: tuple[slice, ...] | None = None, device: str | torch.device = "cpu"
    ) -> Tensor:
        """Return a tensor, or its part `tensor[index]`, on `device`.

        Plain ones are in the dtype of the file. Raises KeyError for an unknown name, ValueError for
        numbers that are not finite.
        """
        if name not in self.parts:
            tensor = self.read_plain(self.recipes[name])
            return tensor[index or ()].contiguous().to(device)
        weight, of, leaf = self.parts[name]
        if of.format is None:
            rows = weight.plain(of)[index or ()].contiguous()
            return self.views.check_finite(rows).to(device)
        experts = index[0] if index and len(weight.shape) == 3 else None
        if experts is not None and len(range(*experts.indices(weight.shape[0]))) > 1:
            experts = None
        device = torch.device(device)
        key = id(weight), of, experts and (experts.start, experts.stop), device
        if self.cache[0] != key:
            self.cache = None, {}
            self.cache = key, weight.parts(of, experts, device)
        found = self.cache[1]
        part = found[leaf] if index is not None else found.pop(leaf)
        if not found:
            self.cache = None, {}
        if index is not None:
            part = part[index if experts is None else (slice(None), *index[1:])]
        return part.contiguous()

    def read_plain(self, recipe: Recipe) -> Tensor:
        """Return a tensor that is not packed, without rounding it."""
        views = [self.views.views[name] for name in recipe.sources]
        types = {self.file.tensors[name].type for view in views for name in view.made.names}
        exact = len(types) == 1 and not any(view.made.values for view in views)
        dtype = PLAIN_TYPES.get(types.pop(), torch.float32) if exact else torch.float32
        return assemble(recipe, self.published, dtype)

    def check_unchanged(self, name: str) -> None:
        """Raise ValueError if the file is gone or has changed since it was opened."""
        self.file.check_unchanged()


def read_model(file: GGUFFile) -> tuple[Family, ModelArgs, Values]:
    """Return family and args of a file. Raises ValueError for a model that cannot be run."""
    shapes = {name: info.shape for name, info in file.tensors.items()}
    values = Values(file.values, shapes, file.read)
    try:
        family = family_of_gguf(values)
        args = family.gguf_args(family.from_hf(family.gguf_config(values)))
        return family, args, values
    except NO_SENSE as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"its header makes no sense ({cause:.100}); fetch it again") from None


def enter_tensors(views: Views, family: Family, args: ModelArgs, values: Values) -> tuple[str, ...]:
    """Enter the file's tensors under their published names; return the prefixes of a head's."""
    table = family.gguf_layer(args)
    norm = made_of("output_norm.weight", values=family.gguf_norm)
    views.add_table(REST | {"model.norm.weight": norm} | dict(family.gguf_rest), "", "")
    layers = family.published_layers(args)
    for layer in range(layers):
        enter_layer(views, table, f"model.layers.{layer}.", layer, args.n_expert)
    views.used |= values.read_names
    extra = {name for name in views.names if is_beyond(name, layers)}
    if values.get(NEXT, 0) and extra and family.published_head:
        head = family.published_head.at(args)
        enter_layer(views, table, head.layer, args.n_layer, args.n_expert)
        norms: MadeTable = {
            ours: made_of(f"nextn.{theirs}.weight", values=family.gguf_norm)
            for ours, theirs in (
                (head.embedding_norm, "enorm"),
                (head.hidden_norm, "hnorm"),
                (head.norm, "shared_head_norm"),
            )
        }
        fc = {head.fc: made_of("nextn.eh_proj.weight")}
        views.add_table(norms | fc, "", f"blk.{args.n_layer}.")
    if values.get(NEXT, 0):
        views.used |= extra  # the model's own embedding and head, and further layers
    views.add_scales()
    views.add_unused()
    return (family.published_head.at(args).layer, f"{MTP}.") if family.published_head else ()


def enter_layer(views: Views, table: MadeTable, ours: str, layer: int, experts: int) -> None:
    views.add_table(table, ours, f"blk.{layer}.")
    views.add_experts(ours, f"blk.{layer}.", experts)


def is_beyond(name: str, n_layer: int) -> bool:
    """Whether a tensor belongs to a layer after the model's."""
    match = re.match(r"blk\.(\d{1,9})\.", name)
    return match is not None and int(match[1]) >= n_layer


def format_label(file: GGUFFile) -> str:
    """Return what to call a file's format: as its name ends, or its commonest type by bytes."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", file.path.stem)
    if match := re.search(rf"(?:^|[-._])({QUANT.pattern})$", stem, re.IGNORECASE):
        return match[1]
    sizes: Counter[str] = Counter()
    for info in file.tensors.values():
        sizes[info.type] += info.nbytes
    return max(sizes, key=sizes.__getitem__, default="GGUF")
