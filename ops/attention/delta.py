"""Kernels of the gated delta rule for 1 to 16 tokens of each sequence.

    _update_token     one token: convolution, gates, update of the state, gated norm
    _update_states    several tokens, one after the other: convolution, gates, update of the state
    _finish_tokens    their gated norm; moves the convolution's window on

A program of `_update_token` has a whole value head, so that it can normalize what it reads. A
second kernel that normalizes costs at least 1.6 us a layer on an H200. The kernels for several
tokens also store what `DeltaState.accept` needs if the last tokens are refused.

Formulas, letters and the reference: ops/plain/gated_delta.py. T tokens, of which a sequence's first
`last` + 1 are real; M tokens that `Kept` has memory for.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.attention.delta_state import (
    DeltaSettings,
    DeltaWeights,
    Kept,
    as_tile,
    fit_tiles,
    key_channels,
    like_tile,
    read_and_update,
    softplus,
    tile_places,
    with_even_rows,
)
from ops.launch import await_previous, can_launch, check_shapes, jit, launch, tl, triton

# One token ----------------------------------------------------------------------------------------


@jit
def _load_past(window, weight, channels, weight_channels, s: tl.constexpr):
    """Load the last W - 1 inputs -> these, what they add to the convolution, and the taps.

    Several tokens: channels [1, n], a result has a row for each token. weight_channels: the same
    channels, in a tile that may have other dimensions (`like_tile`).
    """
    W: tl.constexpr = s.width
    ROWS: tl.constexpr = s.padded_tokens
    inputs, taps, total = (), (), 0.0
    for n in tl.static_range(W):
        tap = tl.load(weight + weight_channels * W + n).to(tl.float32)
        taps = taps + (tap,)
        if n < W - 1:
            if s.tokens == 1:
                x = tl.load(window + n * s.channels + channels)
            else:
                place = tl.arange(0, ROWS)[:, None] + n
                x = tl.load(window + place * s.channels + channels, mask=place < W - 1, other=0.0)
            inputs = inputs + (x,)
            total += like_tile(x, tap, s).to(tl.float32) * tap
    return inputs, total, taps


@jit
def _convolve(x, past, taps, s: tl.constexpr):
    """Add the token's own inputs x, and apply SiLU -> fp32, rounded to the dtype of x."""
    tap = taps[s.width - 1]
    y = past + like_tile(x, tap, s).to(tl.float32) * tap
    return (y * tl.sigmoid(y)).to(x.dtype).to(tl.float32)


@jit
def _move_window(window, inputs, x, mask, s: tl.constexpr):
    """Store the last W - 1 inputs, of which x is the newest, in the channels at `window`."""
    W: tl.constexpr = s.width
    for n in tl.static_range(W - 2):
        tl.store(window + n * s.channels, inputs[n + 1], mask=mask)
    tl.store(window + (W - 2) * s.channels, x, mask=mask)


# Grid [H, B]. One function: its order of loads and waits decides its speed. State, window, weights
# and last are loaded before the wait for the projections, which make qkvz and ba.
#
# Triton loads a tile with fewer numbers than threads once more in each layout that it is used in.
# For q and k that would be 16 loads a thread for each tap (120 spills on sm_90). Hence they are one
# tile of 2 Ck numbers, or two copies of it, with as many numbers as threads.
#
# The window of v belongs to the head. That of q and k is read by the programs of all H / K value
# heads of a key head; `arrivals` counts them, and the last to have read it moves it on. No program
# waits. There is no race:
# - The counter's addition has an operand that is always 1, but is computed from all that the
#   program has read of q's and k's window. So these loads have returned to registers, in all
#   threads, before the addition is issued. A barrier alone would not wait for them.
# - The last program's stores depend on the result of its addition, which follows all others. So
#   it is relaxed: a release waits for the state too, an acquire empties L1.
# - The last program sets the counter to 0, also without a token, for the next token's kernel.
@jit
def _update_token(
    qkvz, ba, state, window, weights, last, arrivals, y, s: tl.constexpr, PDL: tl.constexpr
):
    H: tl.constexpr = s.heads
    CV: tl.constexpr = s.value_dim
    SHARING: tl.constexpr = s.heads // s.key_heads
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    window += sequence * (s.width - 1) * s.channels
    keys = key_channels(head, s)
    key_inputs, key_past, key_taps = _load_past(window, weights.conv, keys, keys, s)
    rows, columns = tile_places(s.key_dim, s)
    state += (sequence * H + head) * s.key_dim * CV + rows * CV + columns
    old = as_tile(tl.load(state), s)
    lane_row, columns = tile_places(s.lane_rows, s)
    own = tl.arange(0, s.blocks)[None, :, None, None] * s.warp_columns
    own += tl.arange(0, s.warp_columns)[None, None, None, :]
    values = s.first_value + head * CV
    value_inputs, value_past, value_taps = _load_past(
        window, weights.conv, values + columns, values + own, s
    )
    rate = tl.exp(tl.load(weights.a_log + head).to(tl.float32))
    bias = tl.load(weights.dt_bias + head).to(tl.float32)
    weight = tl.load(weights.norm + own).to(tl.float32)
    exists, moves_keys = True, True
    if last is not None:
        exists = tl.load(last + sequence) >= 0
    arrivals += sequence * s.key_heads + head // SHARING
    if SHARING > 1:
        # 1 + 0. The compiler cannot know this, as the 0 comes from other lanes and warps.
        operand = 1 + (tl.max(key_past.to(tl.int32, bitcast=True) & 1) >> 1)
        arrived = tl.atomic_add(arrivals, operand, sem="relaxed", scope="gpu")
        moves_keys = arrived == SHARING - 1
    await_previous(PDL)
    qkvz += sequence * s.row
    values += columns
    ba += sequence * s.ba_row + head
    new_keys, new_values = tl.load(qkvz + keys), tl.load(qkvz + values)
    gate = as_tile(tl.load(qkvz + H * CV + values), s).to(tl.float32)
    b, a = tl.load(ba).to(tl.float32), tl.load(ba + H).to(tl.float32)
    qk = _convolve(new_keys, key_past, key_taps, s)
    v = _convolve(new_values, value_past, value_taps, s)
    gate *= tl.sigmoid(gate) * weight
    share, decay = tl.sigmoid(b), tl.exp(-rate * softplus(a + bias))
    out, new = read_and_update(old, qk, v, decay, share, s)
    if exists:  # first, so that the store is in flight while the head is normalized
        tl.store(state, tl.reshape(new, state.shape))
    out = out.to(y.dtype.element_ty).to(tl.float32)
    square = tl.sum(tl.sum(out * out, 3, keep_dims=True), 1, keep_dims=True)
    out *= tl.rsqrt(square / CV + s.eps) * gate
    is_first = lane_row == 0
    y += (sequence * H + head) * CV + columns
    tl.store(y, tl.reshape(out, columns.shape).to(y.dtype.element_ty), mask=is_first)
    if exists:
        _move_window(window + values, value_inputs, new_values, is_first, s)
        if moves_keys:
            _move_window(window + keys, key_inputs, new_keys, None, s)
    if moves_keys:
        tl.store(arrivals, 0)


# Several tokens -----------------------------------------------------------------------------------


@jit
def _convolve_tokens(qkvz, inputs, taps, y, channels, s: tl.constexpr):
    """Convolve the inputs of T tokens in channels [1, n], and store SiLU of the sums at y [T, N].

    inputs, taps: as of `_load_past`.
    """
    W: tl.constexpr = s.width
    ROWS: tl.constexpr = s.padded_tokens
    t, total = tl.arange(0, ROWS)[:, None], tl.zeros([ROWS, channels.shape[1]], tl.float32)
    for n in tl.static_range(W):
        token = t + n - (W - 1)
        is_own = (token >= 0) & (token < s.tokens)
        x = tl.load(qkvz + token * s.row + channels, mask=is_own, other=0.0)
        if n < W - 1:
            x = tl.where(token < 0, inputs[n], x)
        total += x.to(tl.float32) * taps[n]
    total *= tl.sigmoid(total)
    tl.store(y + t * s.channels + channels, total.to(y.dtype.element_ty), mask=t < s.tokens)


@jit
def _count_real(last, sequence, s: tl.constexpr):
    """Return how many of the sequence's tokens are real."""
    if last is not None:
        return tl.load(last + sequence).to(tl.int32) + 1
    else:
        return tl.full([], s.tokens, tl.int32)


@jit
def _load_token(convolved, g, beta, keys, values, t, s: tl.constexpr):
    """Load what this program has stored of a token: q and k, v, decay and share."""
    convolved += t * s.channels
    # From L2: L1 may have older numbers.
    qk = tl.load(convolved + keys, cache_modifier=".cg").to(tl.float32)
    v = tl.load(convolved + values, cache_modifier=".cg").to(tl.float32)
    decay = tl.load(g + t * s.heads, cache_modifier=".cg")
    return qk, v, decay, tl.load(beta + t * s.heads, cache_modifier=".cg")


# Grid [Cv / columns, H, B]. State, window and weights are loaded before the wait for the
# projections, which make qkvz and ba.
#
# First a program convolves all tokens in its channels, and stores them. Programs with the same key
# head store the same numbers, so that each finds what it needs. Then it takes in one token after
# the other, in a loop: unrolled, 8 tokens would be 4,000 instructions. The next token is loaded
# while one is taken in.
@jit
def _update_states(
    qkvz, ba, state, window, weights, last, kept, out, s: tl.constexpr, PDL: tl.constexpr
):
    H: tl.constexpr = s.heads
    CV: tl.constexpr = s.value_dim
    M: tl.constexpr = s.most
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = tl.program_id(0) * s.columns
    rows, columns = tile_places(s.key_dim, s)
    at = ((sequence * H + head) * s.key_dim + rows) * CV + begin + columns
    memory = tl.load(state + at)
    keys, values = key_channels(head, s), s.first_value + head * CV + begin
    own = values + tl.arange(0, s.columns)[None, :]
    rate = tl.exp(tl.load(weights.a_log + head).to(tl.float32))
    bias = tl.load(weights.dt_bias + head).to(tl.float32)
    window += sequence * (s.width - 1) * s.channels
    keys_row = keys[None, :]
    key_inputs, _, key_taps = _load_past(window, weights.conv, keys_row, keys_row, s)
    value_inputs, _, value_taps = _load_past(window, weights.conv, own, own, s)
    await_previous(PDL)
    qkvz += sequence * (s.tokens * s.row)
    convolved = kept.convolved + sequence * M * s.channels
    _convolve_tokens(qkvz, key_inputs, key_taps, convolved, keys_row, s)
    _convolve_tokens(qkvz, value_inputs, value_taps, convolved, own, s)
    real = _count_real(last, sequence, s)
    g = kept.g + sequence * M * H + head
    beta = kept.beta + sequence * M * H + head
    ba += sequence * (s.tokens * s.ba_row) + head
    t = tl.arange(0, M)
    b = tl.load(ba + t * s.ba_row, mask=t < s.tokens, other=0.0).to(tl.float32)
    a = tl.load(ba + t * s.ba_row + H, mask=t < s.tokens, other=0.0).to(tl.float32)
    tl.store(g + t * H, tl.where(t < real, -rate * softplus(a + bias), 0.0))
    tl.store(beta + t * H, tl.where(t < real, tl.sigmoid(b), 0.0))
    tl.store(kept.before + at, memory)
    if (tl.program_id(0) == 0) & (head == 0):
        tl.store(kept.count + sequence, real.to(tl.int64))
    tl.debug_barrier()  # all threads have stored
    old = as_tile(memory, s)
    lane_row, columns = tile_places(s.lane_rows, s)
    out += (sequence * s.tokens * H + head) * CV + begin + columns
    is_first = lane_row == 0
    loaded = _load_token(convolved, g, beta, keys, values + columns, 0, s)
    for token in range(real):
        qk, v, decay, share = loaded
        later = tl.minimum(token + 1, s.tokens - 1)
        loaded = _load_token(convolved, g, beta, keys, values + columns, later, s)
        read, old = read_and_update(old, qk, as_tile(v, s), tl.exp(decay), share, s)
        read = tl.reshape(read, columns.shape)
        tl.store(out + token * (H * CV), read.to(out.dtype.element_ty), mask=is_first)
    zeros = tl.zeros_like(columns).to(out.dtype.element_ty)
    for token in range(real, s.tokens):
        tl.store(out + token * (H * CV), zeros, mask=is_first)
    tl.store(state + at, tl.reshape(old, memory.shape))


# Grid [T H + N / CHANNELS, B]: a program normalizes one head of a token, or moves CHANNELS of the
# window on, and stores their inputs.
@jit
def _finish_tokens(qkvz, out, norm, window, last, inputs, y, s: tl.constexpr, PDL: tl.constexpr):
    CHANNELS: tl.constexpr = s.window_channels
    W: tl.constexpr = s.width
    H: tl.constexpr = s.heads
    CV: tl.constexpr = s.value_dim
    N: tl.constexpr = s.channels
    T: tl.constexpr = s.tokens
    part, sequence, c = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, CV)
    weight = tl.load(norm + c).to(tl.float32)
    await_previous(PDL)
    qkvz += sequence * (T * s.row)
    if part < T * H:
        at = (sequence * T * H + part) * CV + c
        numbers = tl.load(out + at).to(tl.float32)
        gates = tl.load(qkvz + part // H * s.row + N + part % H * CV + c).to(tl.float32)
        numbers *= tl.rsqrt(tl.sum(numbers * numbers, 0) / CV + s.eps) * weight
        tl.store(y + at, (numbers * gates * tl.sigmoid(gates)).to(y.dtype.element_ty))
    else:
        channels = (part - T * H) * CHANNELS + tl.arange(0, CHANNELS)
        exists, real = channels < N, _count_real(last, sequence, s)
        old, kept = sequence * (W - 1) * N + channels, sequence * (W - 1 + s.most) * N + channels
        for n in tl.static_range(W - 1 + T):
            if n < W - 1:
                number = tl.load(window + old + n * N, mask=exists)
            else:
                number = tl.load(qkvz + (n - W + 1) * s.row + channels, mask=exists)
            tl.store(inputs + kept + n * N, number, mask=exists)
            # The window ends with the last real token: it begins at input `real`.
            place = n - real + tl.zeros_like(channels)
            moves = exists & (place >= 0) & (place < W - 1)
            tl.store(window + old + place * N, number, mask=moves)


# Launches -----------------------------------------------------------------------------------------


@torch.library.custom_op(
    "moe_fast::delta_tokens", mutates_args=("state", "window", "arrivals", "kept")
)
def delta_tokens(
    qkvz: Tensor,
    ba: Tensor,
    state: Tensor,
    window: Tensor,
    weights: list[Tensor],
    last: Tensor | None,
    arrivals: Tensor,
    kept: list[Tensor],
    key_heads: int,
    eps: float,
) -> Tensor:
    """Do all between the projections of a Gated DeltaNet layer, for T tokens of each sequence.

    qkvz [B, T, N + H Cv]: q, k and v before the convolution, then the gate. ba [B, T, 2 H]: beta
    before its sigmoid, then the decay's input. weights: a `DeltaWeights`. eps: of the gated norm.
    Return [B, T, H Cv].

    The real tokens update state fp32 [B, H, Ck, Cv] and window [B, W - 1, N] in place. The last
    real one has the index last [B] (`model.Context.last`); None: all are real. Ck and Cv are
    powers of two (`delta_tokens_supports`). With PDL the kernels read state, window, weights
    and (of one token) last while the previous kernel runs, which must not write them.

    arrivals int32 [B, K], for one token: zeros, a scratch of this layer's alone, and zeros again
    afterwards. kept: a `Kept`, written by several tokens alone, T <= M. All that is updated may
    have more than B rows. Raises ValueError for a wrong shape.
    """
    (B, T, _), (H, CK, CV), (N, W) = qkvz.shape, state.shape[1:], weights[0].shape
    check_shapes(
        qkvz=(qkvz, (B, T, 2 * key_heads * CK + 2 * H * CV)),
        ba=(ba, (B, T, 2 * H)),
        window=(window, (len(window), W - 1, N)),
        norm=(weights[3], (CV,)),
    )
    qkvz, ba = with_even_rows(qkvz), with_even_rows(ba)
    M = kept[3].shape[1] if T > 1 else 1
    s = DeltaSettings(key_heads, H, CK, CV, W, eps, T, M, qkvz.stride(1), ba.stride(1))
    common = qkvz, ba, state, window, DeltaWeights(*weights), last
    y = qkvz.new_empty(B, T, H * CV)
    if T == 1:
        launch(_update_token, (H, B), *common, arrivals, y, settings=s, warps=s.warps)
        return y
    out, grid = torch.empty_like(y), (T * H + triton.cdiv(N, s.window_channels), B)
    tensors = *common, Kept(*kept), out
    launch(_update_states, (CV // s.columns, H, B), *tensors, settings=s, warps=s.warps)
    tensors = qkvz, out, weights[3], window, last, kept[1], y
    launch(_finish_tokens, grid, *tensors, settings=s, warps=s.warps)
    return y


@delta_tokens.register_fake
def _(qkvz: Tensor, ba: Tensor, state: Tensor, *rest) -> Tensor:
    B, T, _ = qkvz.shape
    return qkvz.new_empty(B, T, state.shape[1] * state.shape[3])


def delta_tokens_supports(state: Tensor) -> bool:
    """Whether to call `delta_tokens`: in compiled code on a GPU, with heads that fit its tiles.

    state: [B, H, Ck, Cv]. Eager code keeps the plain form, which is the reference.
    """
    names = "_update_token", "_update_states", "_finish_tokens"
    fits = torch.compiler.is_compiling() and fit_tiles(*state.shape[-2:])
    return fits and can_launch(state, *names)
