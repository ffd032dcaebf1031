"""A weight's recipe -> the recipes of its parts, for weights that keep their published format."""

import math

import torch

from formats import FORMATS, PLAIN
from formats.words import bytes_to_words
from models.published_tensors import SCALE, PublishedTensors
from models.published_weights import PublishedWeight
from models.quantization import NEAREST
from models.tensors import Recipe, Recipes


def place_shape(shape: tuple[int, ...], place: tuple) -> tuple[int, ...]:
    """Return the shape of what has this place (ints and slices) in a tensor of that shape."""
    sizes = (
        len(range(n)[at]) for n, at in zip(shape, place, strict=False) if isinstance(at, slice)
    )
    return *sizes, *shape[len(place) :]


def block_recipes(ours: str, recipe: Recipe, tensors: PublishedTensors) -> Recipes:
    """Turn a weight's recipe into those of its codes and scales in block FP8.

    Raises ValueError if the published blocks are not whole ones of ours.
    """
    group, path = FORMATS["fp8b"].group, ours.removesuffix(".weight")
    shape, dtype = FORMATS["fp8b"].layout(recipe.shape, group)["scale"]
    transform = recipe.transform or (lambda t: t)
    rows = torch.arange(recipe.shape[-2]).unsqueeze(1)
    blocks = transform(rows).flatten() // group  # the block that each row of ours comes from
    order = blocks[::group]
    if not torch.equal(blocks, order.repeat_interleave(group)[: len(rows)]):
        raise ValueError(
            f"{ours}: rows would leave their blocks of {group}; fetch the original bf16 checkpoint"
        )
    scales = {}
    for name, place in recipe.sources.items():
        sizes = place_shape(recipe.shape, place)
        begin = next((at.start for at in place if isinstance(at, slice)), 0)
        if begin % group or sizes[-1] % group:
            what = (
                f"{tensors.original(name)} {list(sizes)} has no place among whole blocks of {group}"
            )
            fix = "fetch the original bf16 checkpoint"
            raise ValueError(f"{what}, at row {begin} of {ours}; {fix}")
        scales[name + SCALE] = tuple(
            slice(at.start // group, -(-at.stop // group)) if isinstance(at, slice) else at
            for at in place
        )

    codes = recipe._replace(
        transform=lambda t: bytes_to_words(transform(t), group),
        dtype=torch.float8_e4m3fn,
    )
    scale = Recipe(shape, scales, lambda t: t.index_select(-2, order), dtype)
    return {f"{path}.codes": codes, f"{path}.scale": scale}


def part_recipes(
    ours: str, recipe: Recipe, weights: dict[str, PublishedWeight], tensors: PublishedTensors
) -> tuple[Recipes, dict]:
    """Turn a weight's recipe into those of its parts in a published format; return its spec, too.

    Raises ValueError unless all sources have the same format, and a row stays a row.
    """
    first = next(iter(weights.values()))
    for name in recipe.sources:
        spec = weights[name].spec if name in weights else {"format": PLAIN}
        if spec != first.spec:
            what = f"is in {describe(spec)} beside others in {describe(first.spec)}, of which one"
            raise tensors.refusal(name, f"{what} weight is made; {NEAREST}")
    rows = torch.arange(math.prod(recipe.shape[:-1])).view(*recipe.shape[:-1], 1)
    moved = recipe.transform(rows) if recipe.transform else rows
    if not torch.equal(moved.flatten().sort().values, rows.flatten()):
        raise tensors.refusal(next(iter(weights)), f"cannot be kept as published; {NEAREST}")
    path, recipes = ours.removesuffix(".weight"), {}
    for leaf, part in first.parts.items():
        shape = *recipe.shape[:-1], part.shape[-1]
        sources = {}
        for name, place in recipe.sources.items():
            found = weights[name].parts[leaf]
            tensors.parts[found.sources[0]] = found
            sources[found.sources[0]] = place
        recipes[f"{path}.{leaf}"] = Recipe(
            shape, sources, recipe.transform, part.dtype, part.is_valid
        )
    return recipes, first.spec


def describe(spec: dict) -> str:
    """Return a format with its group and the dtype of its scales, in words."""
    group = f" in groups of {spec['group_size']}" if "group_size" in spec else ""
    return spec["format"] + group + (f" with scales in {spec['scale']}" if "scale" in spec else "")
