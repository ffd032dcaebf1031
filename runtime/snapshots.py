"""Earlier lengths of sequences to which layers with a recurrent state can go back."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from runtime.sequence_state import SequenceState

MAX_SNAPSHOTS = 8  # kept for a sequence; each is as large as its recurrent states


class Snapshots:
    """Copies of each row's recurrent states, of all layers at once.

    Many small launches would keep the GPU waiting: a copy is one kernel for each dtype. Without
    recurrent layers nothing is copied, and a row can go back to any length.
    """

    def __init__(self, states: Sequence[SequenceState], rows: int):
        self.live = [by_dtype([t for s in states for t in s.recurrent(n)]) for n in range(rows)]
        # Of each row the copies by length: a flat tensor for each dtype. Rows may share them, since
        # they never change.
        self.taken: list[dict[int, list[Tensor]]] = [{} for _ in range(rows)]

    def take(self, row: int, length: int) -> None:
        """Copy a row's states, at `length` tokens.

        Of too many copies the second goes: the first may be of a system prompt.
        """
        if not self.live[row]:
            return
        taken = self.taken[row]
        taken[length] = [torch.cat([t.flatten() for t in group]) for group in self.live[row]]
        if len(taken) > MAX_SNAPSHOTS:
            del taken[sorted(taken)[1]]

    def go_back(self, row: int, length: int) -> int:
        """Forget the row's tokens past `length`; return how many remain, which may be fewer.

        Recurrent states become those of the latest copy of at most `length` tokens, or zeros.
        """
        if not self.live[row]:
            return length
        kept = max((n for n in self.taken[row] if n <= length), default=0)
        self.taken[row] = {n: copies for n, copies in self.taken[row].items() if n <= kept}
        if not kept:
            for group in self.live[row]:
                torch._foreach_zero_(group)
            return 0
        for group, copies in zip(self.live[row], self.taken[row][kept], strict=True):
            parts = copies.split([t.numel() for t in group])
            torch._foreach_copy_(group, [p.view_as(t) for p, t in zip(parts, group, strict=True)])
        return kept

    def assign(self, sources: Mapping[int, int]) -> None:
        """Give rows, the keys, the copies of others, the values."""
        taken = list(self.taken)
        for row, source in sources.items():
            self.taken[row] = dict(taken[source])

    def forget(self, row: int | None = None) -> None:
        """Drop a row's copies, or all."""
        for taken in self.taken if row is None else [self.taken[row]]:
            taken.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all copies. Those that rows share count for each."""
        return sum(t.nbytes for row in self.taken for copies in row.values() for t in copies)


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype: one kernel copies or zeroes a group."""
    groups = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    return list(groups.values())
