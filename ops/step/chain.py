"""The beginning of a chain of drafts by a head (runtime/mtp.py), in one Triton kernel.

The host writes what it knows to pinned memory, so that nothing is copied before the chain: a copy
costs 11 us on an H200.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ops.launch import await_previous, check_shapes, jit, launch, tl
from ops.sizes import cdiv, pow2

PROGRAMS = 64  # that copy `seen`


class Pairs(NamedTuple):
    """The pairs that a chain begins with: known ones, then padding."""

    tokens: Tensor  # int64 [1, W], each the one after its position
    positions: Tensor  # int64 [1, W]
    last: Tensor  # int64 [1], the index of the last known pair
    hidden: Tensor  # [1, W, D], the model's states at the positions


@dataclass(frozen=True)
class Chain:
    """Settings of the kernel."""

    width: int
    dim: int
    ring: int  # positions whose states are kept
    vocabulary: int

    block = property(lambda s: pow2(s.dim))
    cells = property(lambda s: pow2(cdiv(s.vocabulary, PROGRAMS)))  # of `seen`, by a program


# Grid [PROGRAMS]: the first ones make a pair each.
@jit
def _begin_chain(numbers, ring, seen, state, place, pairs, s: tl.constexpr, PDL: tl.constexpr):
    n = tl.program_id(0)
    await_previous(PDL)
    cell = n * s.cells + tl.arange(0, s.cells)
    inside = cell < s.vocabulary
    tl.store(state.seen + cell, tl.load(seen + cell, mask=inside), mask=inside)
    count, newest = tl.load(numbers + s.width), tl.load(numbers + s.width + 1)
    if n < s.width:
        position = newest + 1 - count + n
        at = tl.arange(0, s.block)
        x = tl.load(ring + position % s.ring * s.dim + at, mask=at < s.dim)
        tl.store(pairs.hidden + n * s.dim + at, x, mask=at < s.dim)
        tl.store(pairs.tokens + n, tl.load(numbers + n))
        tl.store(pairs.positions + n, position)
    if n == 0:
        tl.store(pairs.last, count - 1)
        tl.store(state.position, newest)
        tl.store(place, 0)


def begin_chain(numbers: Tensor, ring: Tensor, seen: Tensor, state: tuple, place: Tensor) -> Pairs:
    """`runtime.mtp.begin_chain`. The numbers may be in pinned host memory."""
    (R, D), W, device = ring.shape[1:], numbers.shape[1] - 2, ring.device
    check_shapes(seen=(seen, state.seen.shape), position=(state.position, (1, 1)))
    if W > PROGRAMS:
        raise ValueError(f"{W} pairs: a chain begins with {PROGRAMS} at most")
    pairs = Pairs(
        *(torch.empty(1, W, dtype=torch.int64, device=device) for _ in range(2)),
        torch.empty(1, dtype=torch.int64, device=device),
        ring.new_empty(1, W, D),
    )
    s = Chain(W, D, R, seen.shape[1])
    launch(_begin_chain, (PROGRAMS,), numbers, ring, seen, state, place, pairs, settings=s)
    return pairs
