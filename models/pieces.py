"""Which tensors of ours are tensors of theirs, one after the other: these are copied in pieces."""

from math import prod

from models.tensors import Recipe


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
