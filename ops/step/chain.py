"""What a chain of drafts by a head (runtime/mtp.py) has beside the head's layer, in Triton kernels.

A pass, or the host, writes to pinned memory what a chain begins with, so that nothing is copied
before it: a copy costs 11 us on an H200.
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


class PairInputs(NamedTuple):
    """What `join_pairs` reads beside tokens and states."""

    embedding: Tensor  # [V, D]
    rope_table: Tensor  # fp32 [S, R]
    embedding_norm: Tensor  # [D]
    hidden_norm: Tensor  # [D]


@dataclass(frozen=True)
class Chain:
    """Settings of the kernel."""

    width: int
    dim: int
    ring: int  # positions whose states are kept
    vocabulary: int

    block = property(lambda s: pow2(s.dim))
    cells = property(lambda s: pow2(cdiv(s.vocabulary, PROGRAMS)))  # of `seen`, by a program


@dataclass(frozen=True)
class PairSettings:
    """Settings of `_join_pairs` and `_keep_states`."""

    dim: int
    rope: int = 0  # numbers of a position
    eps: float = 0.0
    ring: int = 0  # positions whose states are kept

    block = property(lambda s: pow2(s.dim))
    angles = property(lambda s: pow2(s.rope))


# Grid [PROGRAMS]: the first ones make a pair each.
@jit
def _begin_chain(numbers, ring, seen, state, place, pairs, s: tl.constexpr, PDL: tl.constexpr):
    n = tl.program_id(0)
    await_previous(PDL)
    cell = n * s.cells + tl.arange(0, s.cells)
    inside = cell < s.vocabulary
    tl.store(state.seen + cell, tl.load(seen + cell, mask=inside), mask=inside)
    count, newest = tl.maximum(tl.load(numbers), 1), tl.load(numbers + 1) - 1
    if n < s.width:
        position = newest + 1 - count + n
        at = tl.arange(0, s.block)
        x = tl.load(ring + position % s.ring * s.dim + at, mask=at < s.dim)
        tl.store(pairs.hidden + n * s.dim + at, x, mask=at < s.dim)
        # The answer ends where a token is -1, after this chain.
        token = tl.maximum(tl.load(numbers + 2 + tl.minimum(n, count - 1)), 0)
        tl.store(pairs.tokens + n, token)
        tl.store(pairs.positions + n, position)
    if n == 0:
        tl.store(pairs.last, count - 1)
        tl.store(state.position, newest)
        tl.store(place, 0)


# Grid [pairs, 2]: a program norms the state of a pair, or its embedding.
@jit
def _join_pairs(tokens, positions, hidden, inputs, x, rope, s: tl.constexpr, PDL: tl.constexpr):
    n, half, at = tl.program_id(0), tl.program_id(1), tl.arange(0, s.block)
    inside = at < s.dim
    norm, row = inputs.hidden_norm, hidden + n * s.dim
    if half == 1:
        norm = inputs.embedding_norm
    scale = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    await_previous(PDL)
    if half == 1:
        row = inputs.embedding + tl.maximum(tl.load(tokens + n), 0) * s.dim
    value = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / s.dim + s.eps) * scale
    tl.store(x + (2 * n + 1 - half) * s.dim + at, value, mask=inside)
    if half == 0:
        angle = tl.arange(0, s.angles)
        at_position = inputs.rope_table + tl.load(positions + n) * s.rope + angle
        angles = tl.load(at_position, mask=angle < s.rope)
        tl.store(rope + n * s.rope + angle, angles, mask=angle < s.rope)


# Grid [tokens].
@jit
def _keep_states(hidden, position, ring, s: tl.constexpr, PDL: tl.constexpr):
    n, at = tl.program_id(0), tl.arange(0, s.block)
    await_previous(PDL)
    row = (tl.load(position) + n) % s.ring
    x = tl.load(hidden + n * s.dim + at, mask=at < s.dim)
    tl.store(ring + row * s.dim + at, x, mask=at < s.dim)


def begin_chain(
    numbers: Tensor, width: int, ring: Tensor, seen: Tensor, state: tuple, place: Tensor
) -> Pairs:
    """`runtime.mtp.begin_chain`. The numbers may be in pinned host memory."""
    (R, D), W, device = ring.shape[1:], width, ring.device
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


def join_pairs(
    tokens: Tensor, positions: Tensor, hidden: Tensor, inputs: PairInputs, eps: float
) -> tuple[Tensor, Tensor]:
    """Return norm(embedding), norm(hidden) [B, Q, 2 D], and RoPE [B, Q, 1, R] at the positions.

    tokens, positions int64 [B, Q]; a token of -1 counts as 0. hidden [B, Q, D].
    """
    (B, Q), D, R = tokens.shape, hidden.shape[2], inputs.rope_table.shape[1]
    x, rope = hidden.new_empty(B, Q, 2 * D), inputs.rope_table.new_empty(B, Q, 1, R)
    settings = PairSettings(D, R, eps)
    launch(_join_pairs, (B * Q, 2), tokens, positions, hidden, inputs, x, rope, settings=settings)
    return x, rope


def store_hidden(ring: Tensor, position: Tensor, hidden: Tensor) -> None:
    """`runtime.mtp.store_hidden`."""
    settings = PairSettings(ring.shape[2], ring=ring.shape[1])
    launch(_keep_states, (hidden.shape[1],), hidden, position, ring, settings=settings)
