"""The state of the gated delta rule as its kernel holds it: sizes, tiles, and a token's update.

Pending tokens, and the convolution, are Mamba-2's, too.

Formulas and reference: ops/plain/gated_delta.py; letters as there and in ops/attention/delta.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ops.launch import jit, tl, triton

COLUMNS = 32  # Cv columns of the state that a program has in a prompt
WARPS = 8  # a program of `_update_heads` has


class DeltaWeights(NamedTuple):
    """A layer's weights between its projections."""

    conv: Tensor  # [N, W]
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H], or [H Ck]: a decay for each channel
    norm: Tensor  # [Cv]


class Pending(NamedTuple):
    """What a sequence's state has not taken in: the tokens of its last call, if they were several.

    The position of the next call tells how many of them were accepted.
    """

    inputs: Tensor  # [B, W - 1 + M, N]: the state's last inputs, then those of the pending tokens
    gates: Tensor  # [B, M, 2 H or H + H Ck], b and a of the pending tokens; Mamba-2: dt [B, M, H]
    first: Tensor  # int64 [B, H]: 1 + the first pending token's position, 0 for none; equal
    row: Tensor | None = None  # int64 [B]: the rows of a call's sequences; None: the first


class Memory(NamedTuple):
    """A layer's memory, its weights, and where a call's tokens are: all is read before the wait."""

    state: Tensor
    pending: Pending
    weights: NamedTuple
    positions: Tensor  # int64 [B, T]
    last: Tensor | None  # int64 [B]


def layer_offsets(layers: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return where each layer's tensors are, from those of the first: int64 [L, N], in elements.

    layers: of each layer N tensors, of one size and dtype in all. So a kernel that is given the
    first layer's can find the others'.
    """
    pairs = [pair for layer in layers for pair in zip(layer, layers[0], strict=True)]
    found = [(one.data_ptr() - first.data_ptr()) // first.itemsize for one, first in pairs]
    return torch.tensor(found).view(len(layers), -1).to(layers[0][0].device)


@dataclass(frozen=True)
class DeltaSettings:
    """A layer's sizes, and how the kernels divide the state: s."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float  # the gated norm's
    is_one: bool  # a call has one token
    most: int  # M
    channel_decay: bool  # a head has a decay for each channel
    # Numbers from one token's qkv to the next one's, and of its `Gates`.
    row: int = 0
    b_row: int = 0
    a_row: int = 0
    output_row: int = 0
    sigmoid_gate: bool = False  # the output gate's activation; else SiLU
    own: int = 0  # most tokens of a call, which are one chunk; 0: one after the other
    joint: int = 0  # tokens of a call that are read at once; 0: one after the other
    plane_tokens: int = 0  # T of `planes.Planes`, in which results are stored; 0: they are not
    precision: str = "tf32"  # `PRECISION` of ops/attention/delta_prompt.py, of a chunk's products

    # A token's numbers in `Pending.gates`.
    gates = property(lambda s: s.heads * (1 + (s.key_dim if s.channel_decay else 1)))
    channels = property(lambda s: s.first_value + s.heads * s.value_dim)
    first_value = property(lambda s: 2 * s.key_heads * s.key_dim)  # the first channel of v
    warp_columns = property(lambda s: max(4, s.value_dim // WARPS))
    blocks = property(lambda s: s.value_dim // s.warp_columns)
    lane_rows = property(lambda s: min(s.key_dim, 128 // s.warp_columns))
    rows = property(lambda s: 16)  # tokens of a chunk, with padding: a tensor core's rows
    levels = property(lambda s: s.rows.bit_length() - 1)  # how often a chunk can be halved
    # Copies of q and k that give each thread one of their numbers.
    copies = property(lambda s: 1 if 2 * s.key_dim >= 32 * WARPS else 2)


def fit_tiles(*sizes: int, most: int = 128) -> bool:
    """Whether the kernels have tiles for heads of these sizes."""
    return triton is not None and all(16 <= C <= most and C & C - 1 == 0 for C in sizes)


def with_even_rows(x: Tensor) -> Tensor:
    """Return x [B, T, n] with all rows one distance apart, as those of a split are; or a copy."""
    B, T, _ = x.shape
    even = x.stride(2) == 1 and (B == 1 or x.stride(0) == T * x.stride(1))
    return x if even else x.contiguous()


# The state is a tile [Ck / lane_rows, Cv / warp_columns, lane_rows, warp_columns], which
# Triton gives to registers, warps, lanes, and lanes with four columns each. A warp has all rows of
# its columns, so sums over rows need no shared memory. It is loaded with the first three dimensions
# as one, since Triton 3.6 and 3.9 order dimensions of equal contiguity differently. Inputs and
# outputs of columns have the last three dimensions, as two. They are the same for all lane_rows,
# which makes them large enough for the same layout.


@jit
def tile_places(ROWS: tl.constexpr, s: tl.constexpr):
    """Return rows [n, 1] and columns [n, warp_columns] of a tile of ROWS rows of the state.

    n = ROWS * blocks. ROWS is Ck for the state, lane_rows for inputs and outputs of columns.
    """
    LANE_ROWS: tl.constexpr = s.lane_rows
    part = tl.arange(0, ROWS * s.blocks)[:, None]
    rows = part // (s.blocks * LANE_ROWS) * LANE_ROWS + part % LANE_ROWS
    columns = tl.arange(0, s.warp_columns)[None, :]
    return rows, part // LANE_ROWS % s.blocks * s.warp_columns + columns


@jit
def as_tile(x, s: tl.constexpr):
    """x [n, warp_columns], with places as in `tile_places` -> a tile of four dimensions."""
    ROWS: tl.constexpr = x.shape[0] // (s.blocks * s.lane_rows)
    return tl.reshape(x, [ROWS, s.blocks, s.lane_rows, x.shape[1]])


@jit
def like_tile(x, tile, s: tl.constexpr):
    """Return x as a tile of four dimensions if `tile` is one."""
    return as_tile(x, s) if len(x.shape) < len(tile.shape) else x


@jit
def key_channels(head, s: tl.constexpr):
    """Return the channels of a value head's q, then of its k, `copies` times [copies 2 Ck]."""
    SHARING: tl.constexpr = s.heads // s.key_heads
    NUMBERS: tl.constexpr = 2 * s.key_dim * s.copies
    qk = tl.arange(0, NUMBERS)
    return (head // SHARING + s.key_heads * (qk // s.key_dim % 2)) * s.key_dim + qk % s.key_dim


@jit
def softplus(x):
    """log(1 + exp(x)) without loss of digits where exp(x) is small (Goldberg 1991, theorem 4)."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    log1p = tl.where(whole == 1.0, small, tl.log(whole) * small / (whole - 1.0))
    return tl.maximum(x, 0.0) + log1p


@jit
def _add_five(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@jit
def channel_pair(x, s: tl.constexpr):
    """x [copies 2 Ck] as in `key_channels` -> its two numbers for each channel, [Ck] each."""
    if s.copies == 2:
        x, _ = tl.split(tl.trans(tl.reshape(x, [2, 2 * s.key_dim])))
    return tl.split(tl.trans(tl.reshape(x, [2, s.key_dim])))


@jit
def like_state(x, old, s: tl.constexpr):
    """A number for each channel of a key [Ck] -> for all numbers of the state."""
    shape: tl.constexpr = [s.key_dim // s.lane_rows, 1, s.lane_rows, 1]
    return tl.broadcast_to(tl.reshape(x, shape), old.shape)


@jit
def read_and_update(old, qk, v, decay, share, s: tl.constexpr):
    """Return what a token reads from the state `old`, and the state after it.

    qk: q and k [copies 2 Ck], as in `key_channels`.

    One reduction over rows has all sums, with q and k not yet normalized and the state not yet
    decayed: both are factors of the sums. q (S + k correction) = q S + (q . k) correction.
    q . q, k . k and q . k are summed for each column too, so that they have the layout of the
    others. The compiler adds the equal numbers of a thread's columns once.

    decay: of the head; or, as q and k, twice that of each channel, which the state takes at once.
    """
    q, k = channel_pair(qk, s)
    q, k = like_state(q, old, s), like_state(k, old, s)
    if s.channel_decay:
        decay, _ = channel_pair(decay, s)
        old, decay = old * like_state(decay, old, s), 1.0
    sums = (k * old, q * old, q * q, k * k, q * k)
    sums = tl.reduce(sums, 0, _add_five, keep_dims=True)
    k_read, q_read, qq, kk, qk = tl.reduce(sums, 2, _add_five, keep_dims=True)
    q_factor, k_factor = tl.rsqrt(qq + 1e-6) * s.key_dim**-0.5, tl.rsqrt(kk + 1e-6)
    correction = (v - decay * k_factor * k_read) * (share * k_factor)
    return q_factor * (decay * q_read + qk * correction), decay * old + k * correction


@jit
def norm_head(out, gate, s: tl.constexpr, DTYPE: tl.constexpr):
    """Normalize what a token has read of a head, or what several have [T, Cv].

    gate: its factor, with the norm's weight.
    """
    out = out.to(DTYPE).to(tl.float32)
    square = tl.sum(out * out, len(out.shape) - 1, keep_dims=True)
    if len(out.shape) == 4:
        square = tl.sum(square, 1, keep_dims=True)
    return out * (tl.rsqrt(square / s.value_dim + s.eps) * gate)


# A call's tokens, and the pending ones ------------------------------------------------------------


@jit
def memory_of_layer(memory, arrivals, offsets):
    """Return a layer's tensors: the state, inputs, gates and `first`; the weights; arrivals.

    The program names the layer. memory, arrivals: the first layer's. offsets: `layer_offsets` of
    all that is returned, in order.
    """
    WEIGHTS: tl.constexpr = len(memory.weights)
    pending, weights = memory.pending, ()
    offsets += tl.program_id(2) * (WEIGHTS + 5)
    # Whole allocations of PyTorch: they are further apart than what a thread loads at once.
    state = memory.state + tl.multiple_of(tl.load(offsets), 16)
    inputs = pending.inputs + tl.multiple_of(tl.load(offsets + 1), 16)
    gates, first = pending.gates + tl.load(offsets + 2), pending.first + tl.load(offsets + 3)
    for n in tl.static_range(WEIGHTS):
        weights = weights + (memory.weights[n] + tl.load(offsets + 4 + n),)
    arrivals += tl.load(offsets + 4 + WEIGHTS)
    return (state, inputs, gates, first), weights, arrivals


@jit
def count_real(last, sequence, tokens):
    """Return how many of the sequence's tokens are real."""
    return tl.load(last + sequence).to(tl.int32) + 1 if last is not None else tokens


@jit
def find_gates(tokens, sequence, head, Q, s: tl.constexpr):
    """Return what `decays_and_shares` takes of a prompt: `found`.

    tokens, s: as in ops/attention/delta_prompt.py.
    """
    rate = tl.exp(tl.load(tokens.a_log + head).to(tl.float32))
    bias = tl.load(tokens.dt_bias + head).to(tl.float32)
    ba = tokens.ba + sequence * Q * s.gate_row + head
    return ba, rate, bias, count_real(tokens.last, sequence, Q)


@jit
def decays_and_shares(found, rows, s: tl.constexpr):
    """Return g and beta [T] of a head for tokens `rows` of a prompt; 0 for those that are not real.

    g is of no use if each channel has a decay.
    """
    ba, rate, bias, real = found
    ba, is_real = ba + rows * s.gate_row, rows < real
    beta = softplus(tl.load(ba + s.shares, mask=is_real, other=0.0).to(tl.float32) + bias)
    g = tl.where(is_real, -rate * beta, 0.0)
    if s.is_delta:
        beta = tl.sigmoid(tl.load(ba, mask=is_real, other=0.0).to(tl.float32))
    return g, tl.where(is_real, beta, 0.0)


@jit
def count_accepted(first, place, real, s: tl.constexpr):
    """Return how many pending tokens the call at position `place` follows. first: `Pending`'s."""
    accepted = tl.where((first > 0) & (real > 0), place + 1 - first, 0)
    return tl.minimum(tl.maximum(accepted, 0), s.most).to(tl.int32)


@jit
def memory_row(pending, sequence):
    """Return the row of the memory that a sequence has."""
    return tl.load(pending.row + sequence) if pending.row is not None else sequence


@jit
def load_taps(weight, channels, s: tl.constexpr):
    """Return the convolution's W taps of channels, fp32."""
    taps = ()
    for n in tl.static_range(s.width):
        taps = taps + (tl.load(weight + channels * s.width + n).to(tl.float32),)
    return taps


@jit
def load_past(window, channels, s: tl.constexpr):
    """Return the W - 1 inputs of channels from `window` on."""
    inputs = ()
    for n in tl.static_range(s.width - 1):
        inputs = inputs + (tl.load(window + n * s.channels + channels),)
    return inputs


@jit
def sum_past(inputs, taps, total, s: tl.constexpr):
    """Add to a sum what the last W - 1 inputs add to the convolution."""
    for n in tl.static_range(s.width - 1):
        total += like_tile(inputs[n], taps[n], s).to(tl.float32) * taps[n]
    return total


@jit
def convolve(x, past, taps, s: tl.constexpr):
    """Add the token's own inputs x, and apply SiLU -> fp32, rounded to the dtype of x."""
    tap = taps[s.width - 1]
    y = past + like_tile(x, tap, s).to(tl.float32) * tap
    return (y * tl.sigmoid(y)).to(x.dtype).to(tl.float32)


@jit
def keep_inputs(window, inputs, own, channels, tokens, mask, s: tl.constexpr):
    """Store inputs of channels, at least the last W - 1, then the pending tokens' from `own` on."""
    for n in tl.static_range(len(inputs)):
        tl.store(window + n * s.channels + channels, inputs[n], mask=mask)
    if not s.is_one and own is not None:
        for token in range(tokens):
            x = tl.load(own + token * s.row + channels)
            tl.store(window + (s.width - 1 + token) * s.channels + channels, x, mask=mask)


@jit
def convolve_stored(inputs, taps, s: tl.constexpr):
    """Convolve the W inputs from `inputs` on, N apart; apply SiLU -> fp32, rounded as inputs."""
    total = 0.0
    for n in tl.static_range(s.width):
        x = tl.load(inputs + n * s.channels)
        total += like_tile(x, taps[n], s).to(tl.float32) * taps[n]
    return (total * tl.sigmoid(total)).to(inputs.dtype.element_ty).to(tl.float32)
