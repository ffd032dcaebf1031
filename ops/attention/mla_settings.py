"""Settings of the kernels of latent attention (ops/attention/mla.py), and their tensors.

Letters as there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ops.launch import triton

LONG_CACHE = 8192  # positions
TOKENS_AT_ONCE = 8  # T up to which each token has programs of its own


@dataclass(frozen=True)
class Tile:
    """How the three kernels divide their work."""

    block: int = 32  # positions at once
    stages: int = 3  # blocks in flight, and the one in use
    columns: int = 64  # of key weights, in a program of `_map_queries`
    values: int = 32  # rows of value weights, in a program of `_merge_values`


class LatentTensors(NamedTuple):
    """What the kernels read, and the cache that they append to."""

    q: Tensor  # [T, H * (N + R)], contiguous rows; mapped queries: [T, H * (r + R)]
    kv: Tensor | None  # [T, r + R], contiguous rows, before norm and RoPE
    rope: Tensor | None  # `model.Context.rope`
    positions: Tensor  # [B, Q], which rise by one
    cache: Tensor  # [1, rows, 1, S, r + R], of which the first B rows are used
    scales: Tensor | None  # [1, rows, 1, S, 1] of an int8 cache
    wkv: Tensor | None  # [H, N + V, r], in the dtype of q
    kv_norm: Tensor | None  # [r]


@dataclass(frozen=True)
class LatentSettings:
    """A layer of latent attention, then what a call adds: s."""

    heads: int
    unrotated: int  # N
    rotary_dim: int
    rank: int
    scale: float  # of scores
    value_dim: int = 0
    eps: float = 0.0  # added to the mean square of a latent
    maps: bool = True  # False: q is mapped and rotated, all parts have a result
    queries: int = 1
    tokens: int = 1  # T
    length: int = 0  # S
    q_row: int = 0  # numbers from one token's q to the next one's
    kv_row: int = 0
    parts: int = 1
    tile: Tile = Tile()

    @property
    def supported(self) -> bool:
        """Whether the kernels compute heads of these sizes."""
        return self.unrotated % 8 == 0 and has_tiles(self.rotary_dim, self.rank)

    @property
    def own(self) -> bool:
        """Whether `_attend_part` has the token itself, which is not yet in the cache."""
        return self.maps and self.queries == 1

    @property
    def head_dim(self) -> int:
        return self.unrotated + self.rotary_dim

    @property
    def width(self) -> int:
        """Numbers of a cached position."""
        return self.rank + self.rotary_dim

    @property
    def wkv_rows(self) -> int:
        return self.unrotated + self.value_dim

    @property
    def rows(self) -> int:
        """Rows of a sequence: heads of its queries."""
        return self.queries * self.heads

    @property
    def tile_rows(self) -> int:
        """M, at most what the registers of a program hold."""
        return min(32, max(16, triton.next_power_of_2(self.rows)))

    @property
    def each(self) -> int:
        """Tokens of a program of `_map_queries` and of `_merge_values`."""
        return triton.cdiv(self.tokens, TOKENS_AT_ONCE) if self.queries > 1 else 1


def has_tiles(rotary_dim: int, rank: int) -> bool:
    """Whether `_attend_part` computes latents of these sizes."""
    return all(16 <= n <= 512 and n & n - 1 == 0 for n in (rotary_dim, rank))


def choose_tile(length: int, itemsize: int, queries: int = 1) -> Tile:
    """Return the tile for a cache of this length, plain or int8.

    A short block is read sooner, a long one takes fewer instructions a position. In int8 a long one
    takes too many registers.
    """
    if queries > 1:
        return Tile(stages=2)
    return Tile(64, 2) if length > LONG_CACHE and itemsize > 1 else Tile()


def smaller_tiles(tile: Tile) -> Iterator[Tile]:
    """Yield the tile, then those that take less shared memory, the fastest first."""
    yield tile
    for block, stages in ((32, 3), (32, 2), (16, 3), (16, 2), (16, 1)):
        if (block, stages) < (tile.block, tile.stages):
            yield replace(tile, block=block, stages=stages)
