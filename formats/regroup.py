"""Groups that fit one rank's shard of a packed weight.

The edge of a shard may lie within a group: half of Gemma 4's 704 numbers are 5.5 groups of 64. A
group is as well two of half its size with the same scale. So a rank reads whole groups, divides
them without changing a number, and keeps its own.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from formats.base import Format

REGROUP_CHUNK = 1 << 20  # words regrouped at a time: unpacked, 4 bits take eight times as much

Slices = tuple[slice, ...]


class Regrouping(NamedTuple):
    """A weight [..., out, in] with groups of `group` on disk, and of `smaller` in memory.

    They may be equal: a rank may have a part of a last block of rows, which is not full.
    """

    format: Format
    shape: tuple[int, ...]  # the whole weight's
    group: int
    smaller: int

    def read(
        self, read: Callable[[Slices], Tensor], name: str, slices: Sequence[Slices], axis: int
    ) -> Tensor:
        """Return the part `name` of these slices of the weight, concatenated along the axis.

        slices: each ends with one along the axis. read: returns a slice of the whole part.
        """
        if self.position(2 * self.group, name, axis, self.group) == 1:  # one value for a whole row
            return self.regroup(read((*slices[0][:-1], slice(None))), name)
        return torch.cat([self.read_slice(read, name, index, axis) for index in slices], axis)

    def read_slice(
        self, read: Callable[[Slices], Tensor], name: str, index: Slices, axis: int
    ) -> Tensor:
        """Return the part of one slice of the weight."""
        *lead, edges = index
        begin = edges.start // self.group * self.group
        end = min(-(-edges.stop // self.group) * self.group, self.shape[axis])
        place = (self.position(n, name, axis, self.group) for n in (begin, end))
        part = self.regroup(read((*lead, slice(*place))), name)
        start, stop = edges.start - begin, edges.stop - begin
        stop = self.position(stop, name, axis, self.smaller)
        if axis == len(self.shape) - 2:  # it may begin within the last block of rows
            start = self.position(start + 1, name, axis, self.smaller) - 1
        else:
            start = self.position(start, name, axis, self.smaller)
        return part.narrow(axis, start, stop - start)

    def position(self, n: int, name: str, axis: int, group: int) -> int:
        """Return where number n along the axis is in a part of groups of `group`."""
        shape = torch.Size((*self.shape[:axis], n, *self.shape[axis + 1 :]))
        return self.format.layout(shape, group)[name][0][axis] if n else 0

    def regroup(self, part: Tensor, name: str) -> Tensor:
        """Do what `Format.regroup` does, some rows at a time."""
        *lead, _, width = part.shape
        chunks = part.flatten(0, -2).split(max(1, REGROUP_CHUNK // width))
        made = [self.format.regroup(name, rows, self.group, self.smaller) for rows in chunks]
        rows = torch.cat(made).unflatten(0, (*lead, -1))
        # Less than a half of the last block of rows may be there.
        most = self.position(self.shape[-2], name, len(self.shape) - 2, self.smaller)
        return rows[..., :most, :]
