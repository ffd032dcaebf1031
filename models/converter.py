"""Hugging Face layout -> our checkpoint, one layer at a time: 93 GB of Mixtral in 16 GB of memory.

Reads safetensors only. Everything that the config and the files' headers tell is checked before a
byte is written; values are checked for NaN and infinity on the way.
"""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from checkpoint import (
    DTYPES,
    SIDE_FILES,
    TOKENIZER_FILES,
    Layout,
    Piece,
    SafetensorsFile,
    Writer,
    is_checkpoint,
    nbytes_of,
    read_json,
)
from formats import FORMATS
from formats.quantizer import MTP, SMALL_PRODUCTS, Packing, add_head
from model import ModelArgs
from models import args_from_hf, family_of_config, import_meta_kernels
from models.family import Family, PublishedLayout
from models.multi_token import head_recipes
from models.pieces import tensor_pieces
from models.published_recipes import block_recipes, part_recipes, place_shape
from models.published_tensors import SCALE, PublishedTensors, read_config
from models.published_weights import (
    NOT_NEEDED,
    Part,
    PublishedWeight,
    find_weight,
)
from models.quantization import Published
from models.tensors import Recipe, Recipes
from models.tiktoken_file import TIKTOKEN, tiktoken_json
from tokenizer import load_tokenizer

DOWNLOAD = "python scripts/download.py --repo_id OWNER/NAME"
RUN_AS_IT_IS = "python generate.py --checkpoint_path"
HEAD_FILE = f"{MTP}.safetensors"
SMALL_BYTES = 1 << 20  # a tensor of this size is transformed in no time
# Weights that stay in block FP8.
PACKABLE = (
    *(".wqkv.weight", ".wq.weight", ".wo.weight", ".w13.weight", ".w2.weight", "head.weight"),
    *(".wqkvz.weight", ".wzx.weight", ".wbcx.weight", ".wout.weight", ".wqk.weight", ".fc.weight"),
    *(".wkv.weight", ".table.weight"),
    *(".down.weight", ".up.weight"),
)
# Dequantized: latent attention multiplies with wkv along either axis; the others are never packed.
DEQUANTIZED = ".wkv", *(f"{name}.weight" for name in SMALL_PRODUCTS)


def weight_files(
    directory: Path, names: Collection[str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the safetensors files to read, and the index's map from tensor to file (or {}).

    As in transformers: `model.safetensors`, else an index, else a bare set of shards. names: files
    that there are, here or on the Hub; None: those of the directory.
    """
    index = directory / "model.safetensors.index.json"
    if names is None:
        names = {path.name for path in directory.iterdir() if path.is_file()}
    if "model.safetensors" in names:
        return ["model.safetensors"], {}
    weight_map: dict[str, str] = {}
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or any(
            not file or Path(str(file)).name != file for file in weight_map.values()
        ):
            what = "has no weight_map from tensors to files beside it"
            raise ValueError(f"{index} {what}; fetch it again")
        files = sorted(set(weight_map.values()))
    else:
        files = unindexed_files(names)
    missing = [file for file in files if file not in names]
    if missing:
        what = f"{len(missing)} of {len(files)} shards missing"
        raise ValueError(f"{directory}: {what}; fetch {missing[0]} again")
    if not files:
        refuse_other_files(directory)
    return files, weight_map


def unindexed_files(names: Collection[str]) -> list[str]:
    """Return the names of all shards that a set without an index should have."""
    found = sorted(name for name in names if name.endswith(".safetensors"))
    files = [name for name in found if name.startswith("model-")] or found
    numbered = re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.safetensors)", files[0] if files else "")
    if numbered:
        before, after, count = numbered.groups()
        files = [f"{before}{i:05d}{after}" for i in range(1, int(count) + 1)]
    return files


def refuse_other_files(directory: Path) -> None:
    """Raise the ValueError for a directory without safetensors."""
    for path in sorted(directory.iterdir()):
        if path.suffix == ".gguf":
            raise ValueError(
                f"{directory} has {path.name}: GGUF is quantized already; "
                f"run it as it is: {RUN_AS_IT_IS} {path}"
            )
        if path.suffix in (".bin", ".pt", ".pth"):
            raise ValueError(
                f"{directory} has only {path.name}: pickle is never loaded; fetch the safetensors"
            )
    raise ValueError(f"{directory} has no safetensors files; fetch them: {DOWNLOAD}")


class ConversionPlan:
    """The recipes by file, and the modules that stay in the published format.

    heads: prefixes of tensors for multi-token prediction. One head is planned if it is complete;
    other tensors for it are left out. Raises ValueError unless every tensor that the other
    recipes need is there as they need it, and no other.
    """

    def __init__(
        self,
        family: Family,
        args: ModelArgs,
        tensors: PublishedTensors,
        published: Published | None,
        heads: tuple[str, ...] = (),
    ):
        self.tensors, self.published = tensors, published
        self.files: dict[str, Recipes] = {}
        self.modules: dict[str, dict] = {}  # as in a checkpoint's "format"
        self.used: set[str] = set()
        for layer in range(args.n_layer):
            layout = self.layout(f"model.layers.{family.experts_at(args, layer)}.")
            recipes = family.layer_recipes(args, layer, layout)
            self.add(f"layer_{layer:02d}.safetensors", recipes)
        self.add("rest.safetensors", family.rest_recipes(args))
        if heads and family.published_head:
            self.add_head(family, args)
        self.left_out = tensors.leave_out(heads, self.used)
        unused = tensors.tensors.keys() - self.used
        if extra := sorted(name for name in unused if not self.is_inert(name, args)):
            shard, original = tensors.tensors[extra[0]]
            what = f"{original} (of {len(extra)}) has no place in the model of config.json"
            raise ValueError(f"{shard.path}: {what}")

    @property
    def format_name(self) -> str | None:
        """The name of the published format, None for 16 or 32 bits."""
        return self.published and self.published.name

    def layout(self, layer: str) -> PublishedLayout:
        """Return how the experts of a layer are stored. layer: the prefix of its tensors."""
        names = frozenset(
            name.removeprefix(layer) for name in self.tensors.tensors if name.startswith(layer)
        )
        fused = not names.isdisjoint({"mlp.experts.gate_up_proj", "mlp.experts.up_proj"})
        return PublishedLayout(fused, self.format_name == "mxfp4", names=names)

    def add_head(self, family: Family, args: ModelArgs) -> None:
        """Plan the head for multi-token prediction, if it is there as its recipes need it.

        Quantized checkpoints may lack it, or have it in another format than the model.
        """
        layout = self.layout(family.published_head.at(args).layer)
        before = dict(self.modules), set(self.used), dict(self.tensors.dequantized)
        try:
            self.add(HEAD_FILE, head_recipes(family, args, layout))
        except ValueError:
            self.files.pop(HEAD_FILE)
            self.modules, self.used, self.tensors.dequantized = before

    def is_inert(self, name: str, args: ModelArgs) -> bool:
        """Whether a tensor has no effect: an empty one, or the gate of a shared expert of width 0.

        transformers makes and saves both for a shared expert of width 0.
        """
        shard, original = self.tensors.tensors[name]
        is_empty = 0 in shard.tensors[original][0]
        is_gate = name.endswith(".mlp.shared_expert_gate.weight")
        return is_empty or (is_gate and getattr(args, "shared_intermediate", None) == 0)

    def add(self, file: str, recipes: Recipes) -> None:
        """Plan one file."""
        planned: Recipes = {}
        self.files[file] = planned
        for ours, recipe in recipes.items():
            planned |= self.as_published(ours, recipe)
        for ours, recipe in planned.items():
            if ours.endswith(".codes"):
                path, name = ours.removesuffix(".codes"), self.format_name
                if path not in self.modules:  # a recipe of the family
                    self.modules[path] = {"format": name, "group_size": FORMATS[name].group}
            for name, place in recipe.sources.items():
                self.tensors.check(name, place_shape(recipe.shape, place), recipe.dtype)
                self.used.update(self.tensors.sources(name))

    def as_published(self, ours: str, recipe: Recipe) -> Recipes:
        """Return the recipe, or those of its parts if it is published in a format of ours."""
        if self.published is None or not ours.endswith((".weight", *DEQUANTIZED)):
            return {ours: recipe}
        found: dict[str, PublishedWeight] = {}
        for name, place in recipe.sources.items():
            sizes = place_shape(recipe.shape, place)
            weight = len(sizes) == 2 and find_weight(
                self.tensors, name, sizes[0], sizes[1], self.published
            )
            if weight:
                found[name] = weight
        if not found:
            return self.with_blocks(ours, recipe)
        if ours.endswith(PACKABLE) and not ours.endswith(DEQUANTIZED):
            recipes, spec = part_recipes(ours, recipe, found, self.tensors)
            self.modules[ours.removesuffix(".weight")] = spec
            return recipes
        for name, weight in found.items():
            shape = place_shape(recipe.shape, recipe.sources[name])
            sources = {source for part in weight.parts.values() for source in part.sources}
            part = Part(shape, torch.float32, tuple(sorted(sources)), weight.unpack)
            self.tensors.parts[name] = part
        return {ours: recipe}

    def with_blocks(self, ours: str, recipe: Recipe) -> Recipes:
        """Return the recipe, or those of codes and scales if it is published in block FP8."""
        in_blocks = self.format_name == "fp8b" or any(
            self.tensors.found(name + SCALE) for name in recipe.sources
        )
        if not (in_blocks and self.tensors.has_fp8(recipe)):
            return {ours: recipe}
        spec = {"format": "fp8b", "group_size": FORMATS["fp8b"].group}
        if ours.endswith(DEQUANTIZED):
            block = spec["group_size"]
            self.tensors.dequantized |= dict.fromkeys(recipe.sources, block)
            self.used.update(name + SCALE for name in recipe.sources)
        if ours.endswith(PACKABLE):
            self.modules[ours.removesuffix(".weight")] = spec
            return block_recipes(ours, recipe, self.tensors)
        return {ours: recipe}

    def format(self, dtype: str) -> dict:
        """Return the checkpoint's "format". dtype: of what is not packed."""
        found: dict = {"name": dtype}
        if self.modules:
            prefix, modules, head = f"{MTP}.", {}, {}
            for path, spec in self.modules.items():
                of_head = path.startswith(prefix)
                (head if of_head else modules)[path.removeprefix(prefix)] = spec
            found = {"name": self.most_common(), "dtype": dtype, "modules": modules}
        if HEAD_FILE in self.files:
            found[MTP] = found | ({"modules": head} if self.modules else {})
        return found

    def most_common(self) -> str:
        """Return the format that most packed numbers have."""
        counts: dict[str, int] = {}
        for recipes in self.files.values():
            for ours, recipe in recipes.items():
                if ours.endswith(".codes"):
                    name = self.modules[ours.removesuffix(".codes")]["format"]
                    numbers = math.prod(recipe.shape) * 8 // FORMATS[name].bits
                    counts[name] = counts.get(name, 0) + numbers
        return max(counts, key=lambda name: counts[name])

    def sizes(self, file: str, dtype: torch.dtype) -> dict[str, int]:
        """Return the bytes of each tensor to write into a file of ours."""
        recipes = self.files[file].items()
        return {
            ours: math.prod(recipe.shape) * (recipe.dtype or dtype).itemsize
            for ours, recipe in recipes
        }

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of all tensors to write."""
        return sum(sum(self.sizes(file, dtype).values()) for file in self.files)

    def shards(self, file: str) -> set[str]:
        """Return the published files that a file of ours is made from."""
        names = {name for recipe in self.files[file].values() for name in recipe.sources}
        sources = {source for name in names for source in self.tensors.sources(name)}
        return {self.tensors.tensors[source][0].path.name for source in sources}


def check_tie(args: ModelArgs, tensors: PublishedTensors) -> ModelArgs:
    """Return args for files with a head although the config ties it, as transformers does.

    The head is dropped if it equals the embedding; otherwise nothing is tied.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    for name in (head, embedding):
        tensors.check(name, (args.vocab_size, args.dim))
    a, b = tensors.read(head), tensors.read(embedding)
    if a.dtype != b.dtype or not torch.equal(a, b):
        return dataclasses.replace(args, tied_embeddings=False)
    del tensors.tensors[head]
    return args


def generation_config(directory: Path, config: dict) -> dict:
    """Return generation_config.json, with the stop ids that only config.json has."""
    path = directory / "generation_config.json"
    given = read_json(path) if path.is_file() else {}
    ids = {key: config.get(key) for key in ("bos_token_id", "eos_token_id")}
    return {key: value for key, value in (ids | given).items() if value is not None}


def check_side_files(directory: Path, config: dict, vocab_size: int) -> dict[str, Any] | None:
    """Raise ValueError for a damaged tokenizer, chat template or generation config.

    Otherwise the damage would show after hours, when text is generated. Return the tokenizer.json
    that is made of tiktoken.model if there is no other tokenizer.
    """
    ids = generation_config(directory, config).get("eos_token_id")
    for id in ids if isinstance(ids, list) else [ids]:
        if id is not None and (type(id) is not int or not 0 <= id < vocab_size):
            what = f"eos_token_id {id!r:.40} is not a token of the model"
            raise ValueError(f"{directory}: {what} (0 to {vocab_size - 1}); fetch its files again")
    if any((directory / name).is_file() for name in TOKENIZER_FILES):
        load_tokenizer(directory).check(vocab_size)
    elif (directory / TIKTOKEN).is_file():
        path = directory / "tokenizer_config.json"
        made = tiktoken_json(directory, read_json(path) if path.is_file() else {}, vocab_size)
        load_tokenizer(directory, json.dumps(made).encode()).check(vocab_size)
        return made
    return None


def check_small_files(directory: Path) -> None:
    """Raise ValueError for what can be known to fail without the weights.

    directory: has config.json and the side files.
    """
    config = read_config(directory)
    family = family_of_config(config)
    text_config = dict(family.defaults) | family.text_config(config)
    check_side_files(directory, text_config, family.from_hf(config).vocab_size)


def check_source(directory: Path, dtype: str) -> None:
    """Raise ValueError unless this is a directory of a Hugging Face checkpoint."""
    if dtype not in ("bf16", "fp16", "fp32"):
        raise ValueError(f"dtype {dtype!r} is not one of bf16, fp16, fp32")
    if directory.is_file():
        if directory.suffix == ".gguf":
            fix = f"run it as it is: {RUN_AS_IT_IS} {directory}"
            raise ValueError(f"{directory}: GGUF is quantized already; {fix}")
        fix = "give the directory of a Hugging Face checkpoint"
        raise ValueError(f"{directory}: it is a file; {fix}")
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory; fetch the model first: {DOWNLOAD}")
    if is_checkpoint(directory):
        command = f"python generate.py --checkpoint_path {directory}"
        raise ValueError(f"{directory} is converted already; use it: {command}")
    weight_files(directory)  # a directory without safetensors hears that first


class PackSettings(NamedTuple):
    """How weights are packed while they are converted.

    choose: returns the "format" to write, of args and the dtype of plain weights. device: where
    weights are packed. iterations: of a format's solver; None: its default.
    """

    choose: Callable[[ModelArgs, str], dict]
    device: torch.device | str = "cpu"
    iterations: int | None = None


class Conversion:
    """What config.json and the files' headers tell of a conversion; makes one file at a time.

    directory: has config.json and the side files. shards, weight_map: as for PublishedTensors.
    args, format: of the checkpoint to write. plan: its files. left_out: tensors that are not run,
    in words. Raises ValueError for anything missing or not supported.
    """

    def __init__(
        self,
        directory: Path,
        shards: Mapping[str, SafetensorsFile],
        weight_map: Mapping[str, str],
        dtype: str = "bf16",
    ):
        config = read_config(directory)
        family = family_of_config(config)
        args, published = family.from_hf(config), family.published_weights(config)
        self.directory = directory
        self.config = dict(family.defaults) | family.text_config(config)
        self.tensors = PublishedTensors(directory, family.renamed_tensors, shards, weight_map)
        if published:
            self.tensors.forget(NOT_NEEDED)
            self.tensors.name_block_scales()
            self.tensors.share_scales()
        left_out = self.tensors.leave_out(family.left_out)
        extra_layers = self.config.get("num_nextn_predict_layers") or 0
        first = family.published_layers(args)
        extra = range(first, first + extra_layers)
        heads = tuple(f"model.layers.{layer}." for layer in extra)
        heads += (f"{MTP}.",) if family.published_head else ()
        if args.tied_embeddings and "lm_head.weight" in self.tensors.tensors:
            args = check_tie(args, self.tensors)
        self.args, self.dtype = args, DTYPES[dtype][0]
        self.plan = ConversionPlan(family, args, self.tensors, published, heads)
        self.left_out = ", ".join(filter(None, (left_out, self.plan.left_out)))
        self.format = self.plan.format(dtype)
        self.tokenizer = check_side_files(directory, self.config, args.vocab_size)

    def layout(self, file: str) -> Layout:
        """Return shape and dtype of the tensors of one file of the plan."""
        layout = {}
        for ours, recipe in self.plan.files[file].items():
            dtype = recipe.dtype or self.dtype
            # Arithmetic on the meta device imports the compiler, which takes seconds.
            is_small = nbytes_of(recipe.shape, dtype) <= SMALL_BYTES and recipe.transform
            device = "cpu" if is_small else "meta"
            made = torch.empty(recipe.shape, dtype=dtype, device=device)
            if recipe.transform and not is_small:
                import_meta_kernels()
            made = recipe.transform(made) if recipe.transform else made
            layout[ours] = tuple(made.shape), made.dtype
        return layout

    def pieces(self, file: str, name: str) -> Iterator[Piece]:
        """Yield one tensor of a file."""
        return tensor_pieces(name, self.plan.files[file][name], self.tensors, self.dtype)

    def packing(self, pack: PackSettings) -> tuple[dict, Packing]:
        """Return the "format" to write, and what packs into it."""
        if "modules" in self.format:
            name = self.format["name"]
            raise ValueError(f"{self.directory} is quantized already ({name}): convert it as it is")
        names = [name for recipes in self.plan.files.values() for name in recipes]
        format = add_head(pack.choose(self.args, self.format["name"]), names)
        return format, Packing(format, names, pack.device, pack.iterations)

    def write_side_files(self, writer: Writer) -> None:
        """Copy or make the tokenizer's files, and write generation_config.json."""
        for path in (self.directory / name for name in SIDE_FILES):
            if path.is_file():
                writer.copy(path)
        values = generation_config(self.directory, self.config)
        writer.write_json("generation_config.json", values)
        if self.tokenizer:
            writer.write_json("tokenizer.json", self.tokenizer)


def convert(
    checkpoint_dir: Path | str,
    output_dir: Path | str | None = None,
    dtype: str = "bf16",
    force: bool = False,
    progress: bool = True,
    pack: PackSettings | None = None,
) -> Path:
    """Convert a Hugging Face directory; return the new one.

    output_dir: by default `checkpoint_dir/model_<format>`. Weights published in a format that we
    have keep it; dtype is of the rest. pack: into which format to pack what is published in 16
    bits. Raises ValueError, one line with nothing left behind, for anything missing, damaged or
    not supported.
    """
    directory = Path(checkpoint_dir)
    check_source(directory, dtype)
    args = args_from_hf(read_config(directory))
    if pack:
        pack.choose(args, dtype)  # refused, as other models are, before any header is read
    files, weight_map = weight_files(directory)
    shards = {file: SafetensorsFile(directory / file, keep_open=True) for file in files}
    conversion = Conversion(directory, shards, weight_map, dtype)
    if conversion.left_out and progress:
        left_out = f"left out, as they are not run: {conversion.left_out}"
        tqdm.write(left_out, file=sys.stderr)
    format, packing = conversion.format, Packing({}, ())
    if pack:
        format, packing = conversion.packing(pack)
    output = Path(output_dir) if output_dir else directory / f"model_{format['name']}"
    with Writer(output, dataclasses.asdict(conversion.args), format, force) as writer:
        theirs = {file: conversion.layout(file) for file in conversion.plan.files}
        layouts = {file: packing.layout(layout) for file, layout in theirs.items()}
        total = sum(nbytes_of(*entry) for layout in layouts.values() for entry in layout.values())
        writer.reserve(total)
        pieces = (
            piece
            for file, layout in theirs.items()
            for piece in packing.pieces(layout, partial(conversion.pieces, file))
        )
        show = dict(desc="convert", unit="B", unit_scale=True, file=sys.stderr)
        with tqdm(total=total, disable=not progress, **show) as bar:
            writer.write_pieces(layouts, pieces, bar.update)
        conversion.write_side_files(writer)
    return output
