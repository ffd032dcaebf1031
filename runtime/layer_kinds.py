"""Which layers of a model are built alike, so that what is checked for one holds for all of them.

Kernels are chosen, and compiled, by classes, settings, shapes and dtypes. So layers that agree in
all of these launch the same kernels. A model of 48 layers has one to three kinds.
"""

import functools
import types
from collections.abc import Iterable

import torch
from torch import Tensor

CONTAINERS = list, tuple, set, frozenset, dict
PLAIN = bool, int, float, str, bytes, type, types.FunctionType, torch.dtype, torch.device


def kinds_of(layers: Iterable[object]) -> list[int]:
    """Return the kind of each layer, a number from 0 on."""
    known: dict[object, int] = {}
    return [known.setdefault(structure(layer), len(known)) for layer in layers]


def structure(value: object, seen: dict[int, int] | None = None) -> object:
    """Return nested tuples that are equal for objects built alike, whatever their tensors hold.

    An object of a kind that is not known here is like no other one.
    """
    if value is None or isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, CONTAINERS) and not value:  # a module has a dozen of them
        return type(value)
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape), value.stride(), value.dtype, value.device
    seen = {} if seen is None else seen
    if id(value) in seen:  # an object may contain itself
        return object, seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, list | tuple):
        return type(value), *(structure(part, seen) for part in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(structure(part, seen) for part in value)
    if isinstance(value, dict):
        pairs = ((structure(key, seen), structure(part, seen)) for key, part in value.items())
        return type(value), *pairs
    if isinstance(value, functools.partial):
        return functools.partial, structure([value.func, value.args, value.keywords], seen)
    if isinstance(value, types.MethodType):
        return types.MethodType, value.__func__, structure(value.__self__, seen)
    if isinstance(value, types.ModuleType) or not hasattr(value, "__dict__"):
        return object, "unknown", id(value)
    return type(value), structure(vars(value), seen)
