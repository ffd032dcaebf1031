"""Triton kernels of the gated delta rule for one token of each sequence.

The formulas, the letters and the plain forms are in ops/attention/gated_delta.py.

`_update_token` is one kernel: a program has a whole value head, so that it can normalize what it
reads. A second kernel that normalizes would cost at least 1.6 us a layer on an H200.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.launch import can_launch, jit, supports_pdl, tl, triton

COLUMNS = 32  # Cv columns of the state that a program has in the kernels for several tokens
WARPS = 8  # a program of `_update_token` has 8 warps, each with Cv / 8 columns of the state


@jit
def _tile_places(
    NUMBERS: tl.constexpr, BLOCKS: tl.constexpr, LANE_ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the rows [NUMBERS, 1] and the columns [NUMBERS, COLUMNS] of a tile of the state.

    Its dimensions are those of `_update_token`: COLUMNS is the last one, NUMBERS the product of the
    others. Without the first one, NUMBERS = BLOCKS * LANE_ROWS, it is the tile of a row.
    """
    part = tl.arange(0, NUMBERS)[:, None]
    rows = part // (BLOCKS * LANE_ROWS) * LANE_ROWS + part % LANE_ROWS
    return rows, part // LANE_ROWS % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@jit
def _softplus(x):
    """log(1 + exp(x)) without loss of digits where exp(x) is small (Goldberg 1991, theorem 4)."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    log1p = tl.where(whole == 1.0, small, tl.log(whole) * small / (whole - 1.0))
    return tl.maximum(x, 0.0) + log1p


@jit
def _load_past(window, weight, channels, weight_channels, N: tl.constexpr, W: tl.constexpr):
    """Load the last W - 1 inputs -> these, what they add to the convolution, and the last tap.

    weight_channels: the same channels, in a tile that may have other dimensions (`_like`).
    """
    inputs, total = (), 0.0
    for n in tl.static_range(W - 1):
        x = tl.load(window + n * N + channels)
        inputs = inputs + (x,)
        tap = tl.load(weight + weight_channels * W + n).to(tl.float32)
        total += _like(x, tap).to(tl.float32) * tap
    return inputs, total, tl.load(weight + weight_channels * W + W - 1).to(tl.float32)


@jit
def _like(x, tile):
    """Reshape x [BLOCKS LANE_ROWS, n] to [1, BLOCKS, LANE_ROWS, n] if the tile has 4 dimensions."""
    if len(x.shape) < len(tile.shape):
        blocks: tl.constexpr = tile.shape[1]
        return tl.reshape(x, [1, blocks, x.shape[0] // blocks, x.shape[1]])
    else:
        return x


@jit
def _convolve(x, past, tap):
    """Add the token's own inputs x, and apply SiLU -> fp32, rounded to the dtype of x."""
    y = past + _like(x, tap).to(tl.float32) * tap
    return (y * tl.sigmoid(y)).to(x.dtype).to(tl.float32)


@jit
def _move_window(window, inputs, x, mask, N: tl.constexpr, W: tl.constexpr):
    """Store the last W - 1 inputs, of which x is the newest, in the channels at `window`."""
    for n in tl.static_range(W - 2):
        tl.store(window + n * N, inputs[n + 1], mask=mask)
    tl.store(window + (W - 2) * N, x, mask=mask)


@jit
def _add_five(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@jit
def _arrive(arrivals, past):
    """Count a program that has loaded what `past` is computed from; return how many came before.

    The operand is 1 + 0. The compiler cannot know this, as the 0 comes from other lanes and warps.
    """
    bit = past.to(tl.int32, bitcast=True) & 1
    return tl.atomic_add(arrivals, 1 + (tl.max(bit) >> 1), sem="relaxed", scope="gpu")


@jit
def _split_keys(qk, CK: tl.constexpr, LANE_ROWS: tl.constexpr, COPIES: tl.constexpr):
    """qk [COPIES 2 Ck] -> q and k [Ck / LANE_ROWS, 1, LANE_ROWS, 1]."""
    if COPIES == 2:
        qk, _ = tl.split(tl.trans(tl.reshape(qk, [2, 2 * CK])))
    q, k = tl.split(tl.trans(tl.reshape(qk, [2, CK])))
    shape: tl.constexpr = [CK // LANE_ROWS, 1, LANE_ROWS, 1]
    return tl.reshape(q, shape), tl.reshape(k, shape)


@jit
def _read_and_update(old, q, k, v, decay, share, CK: tl.constexpr):
    """Return what a token reads from the state `old`, and the state after it.

    One reduction over rows has all sums, with q and k not yet normalized and the state not yet
    decayed: both are factors of the sums. q (S + k correction) = q S + (q . k) correction.
    q . q, k . k and q . k are summed for each column too, so that they have the layout of the
    others. The compiler adds the equal numbers of a thread's columns once.
    """
    q, k = tl.broadcast_to(q, old.shape), tl.broadcast_to(k, old.shape)
    sums = (k * old, q * old, q * q, k * k, q * k)
    sums = tl.reduce(sums, 0, _add_five, keep_dims=True)
    k_read, q_read, qq, kk, qk = tl.reduce(sums, 2, _add_five, keep_dims=True)
    q_factor, k_factor = tl.rsqrt(qq + 1e-6) * CK**-0.5, tl.rsqrt(kk + 1e-6)
    correction = (v - decay * k_factor * k_read) * (share * k_factor)
    return q_factor * (decay * q_read + qk * correction), decay * old + k * correction


@jit
def _has_token(last, sequence, HAS_LAST: tl.constexpr):
    """Whether the sequence has a token."""
    if HAS_LAST:
        return tl.load(last + sequence) >= 0
    else:
        return True


# Grid [H, B]. State, window, weights and last are loaded before the wait for the previous kernel,
# which makes qkvz and ba.
#
# The state is a tile [Ck / LANE_ROWS, Cv / WARP_COLUMNS, LANE_ROWS, WARP_COLUMNS], which Triton
# gives to registers, warps, lanes, and lanes with four columns each. A warp has all rows of its
# columns, so sums over rows need no shared memory. It is loaded with the first three dimensions as
# one, since Triton 3.6 and 3.9 order dimensions of equal contiguity differently. Inputs and outputs
# of columns have the last three dimensions, as two. They are the same for all LANE_ROWS, which
# makes them large enough for the same layout.
#
# Triton loads a tile with fewer numbers than threads once more in each layout that it is used in.
# For q and k that would be 16 loads a thread for each tap (120 spills on sm_90). Hence they are one
# tile of 2 Ck numbers, or two copies of it, with as many numbers as threads.
#
# The window of v belongs to the head. That of q and k is read by the programs of all H / K value
# heads of a key head; `arrivals` counts them, and the last to have read it moves it on. No program
# waits. There is no race:
# - The counter's addition has an operand that is always 1, but is computed from all that the
#   program has read of q's and k's window (`_arrive`). So these loads have returned to registers,
#   in all threads, before the addition is issued. A barrier alone would not wait for them.
# - The last program's stores depend on the result of its addition, which follows all others.
# - These dependencies order reads before writes, so the addition is relaxed. A release waits for
#   the state too, and an acquire empties the L1 cache that the previous kernel uses.
# - The last program sets the counter to 0, also without a token. The next kernel that uses it
#   starts after this one has ended: it is that of the next token.
@jit
def _update_token(
    qkvz,
    ba,
    state,
    window,
    conv_weight,
    a_log,
    dt_bias,
    norm,
    last,
    arrivals,
    y,
    H: tl.constexpr,
    K: tl.constexpr,
    CK: tl.constexpr,
    CV: tl.constexpr,
    W: tl.constexpr,
    EPS: tl.constexpr,
    LANE_ROWS: tl.constexpr,
    WARP_COLUMNS: tl.constexpr,
    COPIES: tl.constexpr,
    HAS_LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    N: tl.constexpr = 2 * K * CK + H * CV
    SHARING: tl.constexpr = H // K
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    BLOCKS: tl.constexpr = CV // WARP_COLUMNS
    window += sequence * (W - 1) * N
    qk = tl.arange(0, 2 * CK * COPIES)
    keys = (head // SHARING + K * (qk // CK % 2)) * CK + qk % CK
    key_inputs, key_past, key_tap = _load_past(window, conv_weight, keys, keys, N, W)
    rows, columns = _tile_places(CK * BLOCKS, BLOCKS, LANE_ROWS, WARP_COLUMNS)
    state += (sequence * H + head) * CK * CV + rows * CV + columns
    old = tl.reshape(tl.load(state), [CK // LANE_ROWS, BLOCKS, LANE_ROWS, WARP_COLUMNS])
    lane_row, columns = _tile_places(BLOCKS * LANE_ROWS, BLOCKS, LANE_ROWS, WARP_COLUMNS)
    weight_columns = tl.arange(0, BLOCKS)[None, :, None, None] * WARP_COLUMNS
    weight_columns += tl.arange(0, WARP_COLUMNS)[None, None, None, :]
    values = 2 * K * CK + head * CV
    value_inputs, value_past, value_tap = _load_past(
        window, conv_weight, values + columns, values + weight_columns, N, W
    )
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    weight = tl.load(norm + weight_columns).to(tl.float32)
    exists = _has_token(last, sequence, HAS_LAST)
    moves_keys = True
    arrivals += sequence * K + head // SHARING
    if SHARING > 1:
        moves_keys = _arrive(arrivals, key_past) == SHARING - 1
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    qkvz += sequence * (N + H * CV)
    values += columns
    ba += sequence * 2 * H + head
    new_keys, new_values = tl.load(qkvz + keys), tl.load(qkvz + values)
    gate = _like(tl.load(qkvz + H * CV + values), weight).to(tl.float32)
    b, a = tl.load(ba).to(tl.float32), tl.load(ba + H).to(tl.float32)
    qk = _convolve(new_keys, key_past, key_tap)
    v = _convolve(new_values, value_past, value_tap)
    gate *= tl.sigmoid(gate) * weight
    share, decay = tl.sigmoid(b), tl.exp(-rate * _softplus(a + bias))
    q, k = _split_keys(qk, CK, LANE_ROWS, COPIES)
    out, new = _read_and_update(old, q, k, v, decay, share, CK)
    if exists:  # first, so that the store is in flight while the head is normalized
        tl.store(state, tl.reshape(new, [CK * BLOCKS, WARP_COLUMNS]))
    out = out.to(y.dtype.element_ty).to(tl.float32)
    square = tl.sum(tl.sum(out * out, 3, keep_dims=True), 1, keep_dims=True)
    out *= tl.rsqrt(square / CV + EPS) * gate
    is_first = lane_row == 0
    y += (sequence * H + head) * CV + columns
    out = tl.reshape(out, [BLOCKS * LANE_ROWS, WARP_COLUMNS])
    tl.store(y, out.to(y.dtype.element_ty), mask=is_first)
    if exists:
        _move_window(window + values, value_inputs, new_values, is_first, N, W)
        if moves_keys:
            _move_window(window + keys, key_inputs, new_keys, None, N, W)
    if moves_keys:
        tl.store(arrivals, 0)


def state_tile(CK: int, columns: int, warps: int) -> dict[str, int]:
    """Return the constants of a program's tile of the state, of `columns` columns."""
    warp_columns = max(4, columns // warps)
    return dict(WARP_COLUMNS=warp_columns, LANE_ROWS=min(CK, 128 // warp_columns))


@torch.library.custom_op("moe_fast::delta_token", mutates_args=("state", "window", "arrivals"))
def delta_token(
    qkvz: Tensor,
    ba: Tensor,
    state: Tensor,
    window: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    last: Tensor | None,
    key_heads: int,
    eps: float,
    arrivals: Tensor,
) -> Tensor:
    """Do all between the projections of a Gated DeltaNet layer, for one token of each sequence.

    qkvz [B, 1, N + H Cv]: q, k and v before the convolution, then the gate. ba [B, 1, 2 H]: beta
    before its sigmoid, then the decay's input. conv_weight [N, W], a_log and dt_bias [H], norm
    [Cv], eps: of the gated norm. Return [B, 1, H Cv].

    state fp32 [B, H, Ck, Cv] and window [B, W - 1, N] are updated in place, but not where last
    [B], `model.Context.last`, is negative: there is no token. Ck and Cv are powers of two
    (`delta_token_supports`). With PDL the kernel reads state, window, weights and last while the
    previous kernel runs, which must not write them.

    arrivals int32 [B, K]: zeros, a scratch of this layer's alone, and zeros again afterwards.
    state, window and arrivals may have more than B rows.
    """
    B, (H, CK, CV) = len(qkvz), state.shape[1:]
    W = conv_weight.shape[1]
    qkvz, ba, pdl = qkvz.contiguous(), ba.contiguous(), supports_pdl(qkvz)
    y = qkvz.new_empty(B, 1, H * CV)
    tile = state_tile(CK, CV, WARPS)
    copies = 1 if 2 * CK >= 32 * WARPS else 2
    flags = dict(HAS_LAST=last is not None, PDL=pdl, launch_pdl=pdl, num_warps=WARPS)
    # The kernel needs a valid pointer for an absent tensor, which it then does not read.
    last = qkvz if last is None else last
    _update_token[H, B](
        *(qkvz, ba, state, window, conv_weight, a_log, dt_bias, norm, last, arrivals, y),
        **dict(H=H, K=key_heads, CK=CK, CV=CV, W=W, EPS=eps, COPIES=copies),
        **tile,
        **flags,
    )
    return y


@delta_token.register_fake
def _(qkvz: Tensor, ba: Tensor, state: Tensor, *rest) -> Tensor:
    B, (H, _, CV) = len(qkvz), state.shape[1:]
    return qkvz.new_empty(B, 1, H * CV)


def delta_token_supports(state: Tensor) -> bool:
    """Whether to call `delta_token`: in compiled code on a GPU, with heads that fit its tiles.

    state: [B, H, Ck, Cv]. Eager code keeps the plain form, which is the reference.
    """
    names = "_update_token", "_update_states", "_finish_tokens"
    fits = torch.compiler.is_compiling() and fit_tiles(*state.shape[-2:])
    return fits and can_launch(state, *names)


def fit_tiles(*sizes: int) -> bool:
    """Whether the kernels have tiles for heads of these sizes."""
    return triton is not None and all(16 <= C <= 128 and C & C - 1 == 0 for C in sizes)
