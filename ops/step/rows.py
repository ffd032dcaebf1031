"""Copies between rows of a batch, in the memory of all layers at once.

On a GPU one Triton kernel does it: 48 layers' copies one by one keep the host busy for 1.5 ms,
while the GPU waits for the next prompt.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.launch import can_launch, jit, launch, tl

WORDS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}  # by bytes
PROGRAMS = 4  # programs of a plane


@dataclass(frozen=True)
class Move:
    """Settings of `_move`."""

    bytes: int  # bytes of a word
    exchange: bool
    block: int = 1024  # words that a program copies at once

    word = property(lambda s: getattr(tl, WORDS[s.bytes]))  # Triton's type of a word


# Grid [P, PROGRAMS]. A plane is memory [rows, S, words] with any distance from row to row.
@jit(do_not_specialize=("source", "target", "length"))
def _move(planes, source, target, length, s: tl.constexpr):
    plane = planes + 4 * tl.program_id(0)
    base = tl.load(plane).to(tl.pointer_type(s.word))
    row, token, positions = tl.load(plane + 1), tl.load(plane + 2), tl.load(plane + 3)
    one, other = base + source * row, base + target * row
    end = tl.minimum(length, positions) * token
    for start in range(tl.program_id(1) * s.block, end, tl.num_programs(1) * s.block):
        word = start + tl.arange(0, s.block)
        inside = word < end
        value = tl.load(one + word, mask=inside)
        if s.exchange:
            tl.store(one + word, tl.load(other + word, mask=inside), mask=inside)
        tl.store(other + word, value, mask=inside)


class RowMemory:
    """What all layers remember of a batch's rows.

    views: of each row the same tensors [..., S, N], whose last two dimensions are contiguous. S is
    positions, or 1 if the memory has none. Their addresses must not change.
    """

    def __init__(self, views: Sequence[Sequence[Tensor]]):
        self.views = views
        on_gpu = len(views) > 1 and can_launch(views[0][0])
        self.planes = make_planes(*views[:2]) if on_gpu else None

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first `length` positions of a row those of another."""
        self.move(source, target, length, exchange=False)

    def exchange(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two rows."""
        self.move(a, b, length, exchange=True)

    def move(self, source: int, target: int, length: int, exchange: bool) -> None:
        """Launch the kernel, once for each size of words; without it move each view."""
        for size, planes in (self.planes or {}).items():
            grid, settings = (len(planes), PROGRAMS), Move(size, exchange)
            launch(_move, grid, planes, source, target, length, settings=settings)
        if self.planes is None:
            for one, other in zip(self.views[source], self.views[target], strict=True):
                one, other = one[..., :length, :], other[..., :length, :]
                kept = other.clone() if exchange else None
                other[:] = one
                if exchange:
                    one[:] = kept


def make_planes(first: Sequence[Tensor], second: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the planes of all views, by the bytes of their words.

    int64 [P, 4]: address, words from row to row, words of a position, positions. first, second: the
    views of rows 0 and 1.
    """
    found = defaultdict(list)
    for view, other in zip(first, second, strict=True):
        size, (S, N) = view.itemsize, view.shape[-2:]
        word = math.gcd(N * size, 8)
        row = (other.data_ptr() - view.data_ptr()) // word
        for index in itertools.product(*map(range, view.shape[:-2])):
            offset = sum(i * stride for i, stride in zip(index, view.stride(), strict=False))
            found[word].append((view.data_ptr() + offset * size, row, N * size // word, S))
    return {word: torch.tensor(rows).to(first[0].device) for word, rows in found.items()}
