"""Gated short convolution: one kernel between a layer's projections, of any number of tokens.

A program has some channels of one token. A token's W - 1 inputs before it come from the ring, or
from `projected` where they belong to the same call. No program waits for another: the ring has
RING_SPARE more slots than the window, so that a call never writes a slot that it reads. A prompt's
chunk may be longer than the ring: its `past` is copied before.

Formulas, letters and the reference: models/layers/short_conv.py and ops/plain/short_conv.py.
T tokens of each sequence, R slots of the ring.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ops.attention.delta_state import count_real, memory_row, with_even_rows
from ops.inductor import custom_op
from ops.launch import await_previous, check_shapes, jit, launch, tl
from ops.plain.ring import RING_SPARE
from ops.sizes import cdiv

NAME = "_short_conv"
BLOCK, PROMPT_BLOCK = 128, 1024  # channels of a program


class ConvWeights(NamedTuple):
    """A layer's weights between its projections."""

    taps: Tensor  # [N, W]
    bias: Tensor | None = None  # [N]


class Place(NamedTuple):
    """Where a call's tokens are: arguments of `short_conv`."""

    positions: Tensor | None
    last: Tensor | None
    row: Tensor | None
    past: Tensor | None


@dataclass(frozen=True)
class ConvSettings:
    """Settings of `_short_conv`."""

    channels: int  # N
    width: int  # W
    slots: int  # R
    row: int  # numbers from one token's projected ones to the next one's
    is_one: bool  # a call has one token
    is_prompt: bool  # a call is a prompt's chunk
    block: int


# Grid [N / BLOCK, B, T]. Weights, position, last and the ring are read before the wait for the
# projection: the kernels between this one and the layer's last call have ended.
@jit
def _short_conv(
    projected, ring, weights, place, y, tokens, begin, s: tl.constexpr, PDL: tl.constexpr
):
    N: tl.constexpr = s.channels
    W: tl.constexpr = s.width
    channel = tl.program_id(0) * s.block + tl.arange(0, s.block)
    sequence, token = tl.program_id(1).to(tl.int64), tl.program_id(2)
    exists = channel < N
    if not s.is_prompt:
        begin = tl.load(place.positions + sequence * tokens)
    at, real = begin + token, count_real(place.last, sequence, tokens)
    ring += memory_row(place, sequence) * s.slots * N + channel
    total = tl.zeros([s.block], tl.float32)
    for n in tl.static_range(W - 1):
        back = W - 1 - n
        stored = channel < tl.where((token < back) & (at >= back), N, 0)
        if s.is_prompt:
            past = place.past + (tl.minimum(begin, W - 1) + token - back) * N + channel
            x = tl.load(past, mask=stored, other=0.0)
        else:
            x = tl.load(ring + (at - back) % s.slots * N, mask=stored, other=0.0)
        tap = tl.load(weights.taps + channel * W + n, mask=exists, other=0.0)
        total += x.to(tl.float32) * tap.to(tl.float32)
    newest = tl.load(weights.taps + channel * W + W - 1, mask=exists, other=0.0).to(tl.float32)
    if weights.bias is not None:
        total += tl.load(weights.bias + channel, mask=exists, other=0.0).to(tl.float32)
    await_previous(PDL)
    DTYPE: tl.constexpr = y.dtype.element_ty
    own = projected + (sequence * tokens + token) * s.row + channel
    gate = tl.load(own + N, mask=exists, other=0.0).to(tl.float32)
    new = _gated_input(own, exists, s, DTYPE)
    if not s.is_one:
        for n in tl.static_range(W - 1):
            back = W - 1 - n
            earlier = channel < tl.where(token >= back, N, 0)
            x = _gated_input(own - back * s.row, earlier, s, DTYPE)
            tap = tl.load(weights.taps + channel * W + n, mask=exists, other=0.0)
            total += x.to(tl.float32) * tap.to(tl.float32)
    total = (total + new.to(tl.float32) * newest).to(DTYPE).to(tl.float32)
    tl.store(y + (sequence * tokens + token) * N + channel, (gate * total).to(DTYPE), mask=exists)
    is_kept = token < real
    if s.is_prompt:  # later tokens have the slots of the others
        is_kept &= token >= real - s.slots
    tl.store(ring + at % s.slots * N, new, mask=channel < tl.where(is_kept, N, 0))


@jit
def _gated_input(own, mask, s: tl.constexpr, DTYPE: tl.constexpr):
    """Return a token's inputs of the convolution: b * x. own: pointers to its b."""
    b = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(own + 2 * s.channels, mask=mask, other=0.0).to(tl.float32)
    return (b * x).to(DTYPE)


@custom_op("moe_fast::short_conv", mutates_args=("ring",))
def short_conv(
    projected: Tensor,
    ring: Tensor,
    weights: list[Tensor],
    positions: Tensor | None,
    last: Tensor | None,
    row: Tensor | None = None,
    past: Tensor | None = None,
    begin: int = 0,
) -> Tensor:
    """Compute all between the projections of a short convolution, for T tokens of each sequence.

    projected [B, T, 3 N]: b, c and x. ring [rows, R, N]: inputs b * x by position, to which those
    of real tokens are added: up to index last [B] (`model.Context.last`); None: all. weights: a
    `ConvWeights`. positions int64 [B, T]: consecutive. Return c * conv(b * x) [B, T, N].

    positions None: a prompt's chunk from position `begin` on, in the ring's row int64 [1]. past:
    a copy of the min(begin, W - 1) inputs before it, [.., N]; None: there are none.

    Raises ValueError for a wrong shape, or more tokens than RING_SPARE that are no such chunk.
    """
    (B, T, _), (_, R, N), W = projected.shape, ring.shape, weights[0].shape[1]
    check_shapes(projected=(projected, (B, T, 3 * N)), taps=(weights[0], (N, W)))
    if is_prompt := positions is None:
        past = ring if past is None else past
        if begin:
            check_shapes(past=(past, (min(begin, W - 1), N)))
    else:
        check_shapes(positions=(positions, (B, T)))
        positions = positions.contiguous()
        if T > RING_SPARE:
            raise ValueError(f"{T} tokens, of which only {RING_SPARE} can be in one call")
    projected, block = with_even_rows(projected), PROMPT_BLOCK if is_prompt else BLOCK
    s = ConvSettings(N, W, R, projected.stride(1), T == 1, is_prompt, block)
    y, place = projected.new_empty(B, T, N), Place(positions, last, row, past)
    tensors = projected, ring, ConvWeights(*weights), place, y
    grid = cdiv(N, block), B, T
    # Without PDL the past is complete when the kernel starts.
    launch(_short_conv, grid, *tensors, T, begin, settings=s, pdl=not is_prompt)
    return y


@short_conv.register_fake
def _(projected: Tensor, ring: Tensor, *rest) -> Tensor:
    return projected.new_empty(*projected.shape[:2], ring.shape[2])
