"""Tensors of ours in pieces, made of published ones and checked for NaN and infinity.

Where ours is some of theirs, one after the other, the pieces stay mapped from their files.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from checkpoint import NAMES, Piece, is_finite, split_rows
from models.published_tensors import SCALE, PublishedTensors
from models.published_weights import PLAIN_DTYPES
from models.tensors import WHOLE, Recipe


def assemble(recipe: Recipe, tensors: PublishedTensors, dtype: torch.dtype) -> Tensor:
    """Return the tensor of ours, in `dtype` unless it has its own, with finite values.

    A tensor that is one source unchanged stays mapped from its file.
    """
    dtype, assembled = recipe.dtype or dtype, None
    for name, place in recipe.sources.items():
        if place == WHOLE:
            assembled = part = tensors.read(name).to(dtype)
        else:
            if assembled is None:
                assembled = torch.empty(recipe.shape, dtype=dtype)
            part = assembled[place].copy_(tensors.read(name))
        check_values(recipe, name, part, tensors)
    return recipe.transform(assembled) if recipe.transform else assembled


def check_values(recipe: Recipe, name: str, part: Tensor, tensors: PublishedTensors) -> None:
    """Raise ValueError unless `part`, of the source `name`, holds neither NaN nor infinity."""
    if recipe.is_valid(part):
        return
    if part.dtype in PLAIN_DTYPES and is_finite(tensors.read(name)):
        what = f"{tensors.original(name)} overflows {NAMES[part.dtype]}"
        wider = "bf16" if part.dtype == torch.float16 else "fp32"
        raise ValueError(f"{what}; convert with --dtype {wider}")
    what = f"{tensors.original(name.removesuffix(SCALE))} holds NaN or infinity"
    raise ValueError(f"{what}; fetch its file again")


def tensor_pieces(
    ours: str, recipe: Recipe, tensors: PublishedTensors, dtype: torch.dtype
) -> Iterator[Piece]:
    """Yield the pieces of what `assemble` returns: mapped ones, where ours is theirs unchanged."""
    dtype, names = recipe.dtype or dtype, consecutive_sources(recipe)
    if names is None:
        yield from (Piece(ours, rows) for rows in split_rows(assemble(recipe, tensors, dtype)))
        return
    for name in names:
        whole, origin = tensors.read(name), tensors.origin(name)
        for theirs in split_rows(whole):
            rows = theirs.to(dtype)
            check_values(recipe, name, rows, tensors)
            is_theirs = origin is not None and rows is theirs
            yield Piece(ours, rows, origin if is_theirs else None)
            if is_theirs:
                origin = origin._replace(begin=origin.begin + rows.nbytes)


def consecutive_sources(recipe: Recipe) -> list[str] | None:
    """Return the sources in the order of their numbers in ours.

    None unless each source is a run of numbers, and ours is all these runs and no more.
    """
    if recipe.transform is not None:
        return None
    runs = {name: run_of(recipe.shape, place) for name, place in recipe.sources.items()}
    if any(run is None for run in runs.values()):
        return None
    names, end = sorted(runs, key=runs.get), 0
    for name in names:
        begin, count = runs[name]
        if begin != end:
            return None
        end += count
    return names if end == prod(recipe.shape) else None


def run_of(shape: tuple[int, ...], place: tuple) -> tuple[int, int] | None:
    """Return the first number and the count of what has this place; None: it is no run."""
    begin, count = 0, prod(shape)
    for axis, (size, at) in enumerate(zip(shape, place, strict=False)):
        count = count // size if size else 0
        if isinstance(at, slice):
            start, stop, _ = at.indices(size)
            return (
                None if axis + 1 < len(place) else (begin + start * count, (stop - start) * count)
            )
        begin += at * count
    return begin, count
