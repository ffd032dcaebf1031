"""Copies of states, with which a sequence goes back to an earlier length.

A recurrent state and the ring of a sliding window need them: neither can go back to any length. A
ring goes back by a few tokens without a copy, as long as the window before them is still there.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ops.plain.pending import MAX_SNAPSHOTS, MAX_TENTATIVE
from ops.plain.ring import RING_SPARE, Ring
from runtime.sequence_state import SequenceState

MAX_BYTES = 10**9  # copies of one sequence take no more, if two fit: large rings have fewer
RING_SLACK = RING_SPARE - MAX_TENTATIVE  # tokens by which rings go back without a copy


class Snapshots:
    """Copies of each row's recurrent states and rings, of all layers at once.

    Many small launches would keep the GPU waiting: a copy is one kernel for each dtype. Without
    such layers nothing is copied, and a row can go back to any length.
    """

    def __init__(self, states: Sequence[SequenceState], rows: int):
        self.live = [by_dtype([t for s in states for t in s.recurrent(n)]) for n in range(rows)]
        # By row, then by length: a flat tensor for each dtype. Rows may share copies, since these
        # never change.
        self.taken: list[dict[int, list[Tensor]]] = [{} for _ in range(rows)]
        self.written = [0] * rows  # tokens that each row's rings have taken in, at most
        limited = [state for state in states if state.recurrent(0)]
        only_rings = all(isinstance(state, Ring) for state in limited)
        self.slack = RING_SLACK if only_rings else 0  # tokens that need no copy
        size = sum(t.nbytes for group in self.live[0] for t in group)
        self.most = snapshots_kept(size)

    def take(self, row: int, length: int) -> None:
        """Copy a row's states, at `length` tokens.

        If there are too many copies, drop the second: the first may be that of a system prompt.
        """
        if not self.live[row]:
            return
        self.note(row, length)
        taken = self.taken[row]
        taken[length] = [torch.cat([t.flatten() for t in group]) for group in self.live[row]]
        if len(taken) > self.most:
            del taken[sorted(taken)[1]]

    def note(self, row: int, length: int) -> None:
        """Remember that the row has taken in `length` tokens."""
        self.written[row] = max(self.written[row], length)

    def go_back(self, row: int, length: int) -> int:
        """Forget the row's tokens past `length`; return how many remain, which may be fewer.

        Recurrent states become those of the latest copy of at most `length` tokens, or zeros. Call
        `note` before.
        """
        if not self.live[row] or (self.slack and self.written[row] - length <= self.slack):
            return length
        kept = max((n for n in self.taken[row] if n <= length), default=0)
        self.taken[row] = {n: copies for n, copies in self.taken[row].items() if n <= kept}
        self.written[row] = kept
        if not kept:
            for group in self.live[row]:
                torch._foreach_zero_(group)
            return 0
        for group, copies in zip(self.live[row], self.taken[row][kept], strict=True):
            parts = copies.split([t.numel() for t in group])
            torch._foreach_copy_(group, [p.view_as(t) for p, t in zip(parts, group, strict=True)])
        return kept

    def assign(self, sources: Mapping[int, int]) -> None:
        """Give each row, a key, the copies of another, its value."""
        taken, written = list(self.taken), list(self.written)
        for row, source in sources.items():
            self.taken[row], self.written[row] = dict(taken[source]), written[source]

    def forget(self, row: int | None = None) -> None:
        """Drop a row's copies, or all."""
        for each in range(len(self.taken)) if row is None else [row]:
            self.taken[each].clear()
            self.written[each] = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all copies. Those that rows share count for each."""
        return sum(t.nbytes for row in self.taken for copies in row.values() for t in copies)


def snapshots_kept(size: int) -> int:
    """Return how many copies of `size` bytes a sequence keeps, at most."""
    return min(MAX_SNAPSHOTS, max(2, MAX_BYTES // max(size, 1)))


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype: one kernel copies or zeroes a group."""
    groups = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    return list(groups.values())
