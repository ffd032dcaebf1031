"""Kernels of the gated delta rule for 1 to 16 tokens of each sequence.

    _update_token     one token: convolution, gates, update of the state, gated norm
    _update_states    several tokens, one after the other: convolution, gates, what they read
    _finish_tokens    their gated norm; makes them the pending ones

Several tokens may be drafts, of which the last ones are refused. So they are `Pending` after their
call: the state has not taken them in. The next call begins at the position after those that were
accepted. It takes these in first, from their inputs, then its own. That reads and writes the state
once a call, as one token does. A state after each token of the call would be 2 MB more to write
for each in Qwen3.6; the inputs are 16 KB.

A program of `_update_token` has a whole value head, so that it can normalize what it reads. A
second kernel that normalizes costs at least 1.6 us a layer on an H200.

Formulas, letters and the reference: ops/plain/gated_delta.py. T tokens, of which a sequence's first
`last` + 1 are real; M tokens that `Pending` has memory for.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.attention.delta_state import (
    DeltaSettings,
    DeltaWeights,
    Pending,
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

# Pending tokens -----------------------------------------------------------------------------------


@jit
def _memory_row(pending, sequence):
    """Return the row of the memory that a sequence has."""
    if pending.row is not None:
        return tl.load(pending.row + sequence)
    else:
        return sequence


@jit
def _count_real(last, sequence, tokens):
    """Return how many of the sequence's tokens are real."""
    if last is not None:
        return tl.load(last + sequence).to(tl.int32) + 1
    else:
        return tokens


@jit
def _count_accepted(first, place, real, s: tl.constexpr):
    """Return how many pending tokens the call at position `place` follows. first: `Pending`'s."""
    accepted = tl.where((first > 0) & (real > 0), place + 1 - first, 0)
    return tl.minimum(tl.maximum(accepted, 0), s.most).to(tl.int32)


@jit
def _load_taps(weight, channels, s: tl.constexpr):
    """Return the convolution's W taps of channels, fp32."""
    W: tl.constexpr = s.width
    taps = ()
    for n in tl.static_range(W):
        taps = taps + (tl.load(weight + channels * W + n).to(tl.float32),)
    return taps


@jit
def _convolve_stored(inputs, taps, s: tl.constexpr):
    """Convolve the W inputs from `inputs` on, N apart; apply SiLU -> fp32, rounded as inputs."""
    W: tl.constexpr = s.width
    total = 0.0
    for n in tl.static_range(W):
        x = tl.load(inputs + n * s.channels)
        total += like_tile(x, taps[n], s).to(tl.float32) * taps[n]
    return (total * tl.sigmoid(total)).to(inputs.dtype.element_ty).to(tl.float32)


@jit
def _load_gates(ba, rate, bias, s: tl.constexpr):
    """Return a token's decay and share. ba: its b of this head; a is H further."""
    b, a = tl.load(ba).to(tl.float32), tl.load(ba + s.heads).to(tl.float32)
    return tl.exp(-rate * softplus(a + bias)), tl.sigmoid(b)


# One token ----------------------------------------------------------------------------------------


@jit
def _load_past(window, taps, channels, s: tl.constexpr):
    """Return the last W - 1 inputs, and what they add to the convolution."""
    W: tl.constexpr = s.width
    inputs, total = (), 0.0
    for n in tl.static_range(W - 1):
        x = tl.load(window + n * s.channels + channels)
        inputs = inputs + (x,)
        total += like_tile(x, taps[n], s).to(tl.float32) * taps[n]
    return inputs, total


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


# Grid [H, B]. One function: its order of loads and waits decides its speed. State, pending tokens,
# weights, position and last are loaded before the wait for the projections, which make qkvz and ba.
# So are pending tokens taken in, of which there are none after another call of one token.
#
# Triton loads a tile with fewer numbers than threads once more in each layout that it is used in.
# For q and k that would be 16 loads a thread for each tap (120 spills on sm_90). Hence they are one
# tile of 2 Ck numbers, or two copies of it, with as many numbers as threads.
#
# The inputs of v and `first` belong to the head. Those of q and k are read by the programs of all
# H / K value heads of a key head; `arrivals` counts them, and the last to have read them moves them
# on. No program waits. There is no race:
# - The counter's addition has an operand that is always 1, but is computed from all that the
#   program has read of q's and k's inputs. So these loads have returned to registers, in all
#   threads, before the addition is issued. A barrier alone would not wait for them.
# - The last program's stores depend on the result of its addition, which follows all others. So
#   it is relaxed: a release waits for the state too, an acquire empties L1.
# - The last program sets the counter to 0, also without a token, for the next token's kernel.
@jit
def _update_token(
    qkvz,
    ba,
    state,
    pending,
    weights,
    position,
    last,
    arrivals,
    y,
    s: tl.constexpr,
    PDL: tl.constexpr,
):
    H: tl.constexpr = s.heads
    CV: tl.constexpr = s.value_dim
    SHARING: tl.constexpr = s.heads // s.key_heads
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.load(pending.first + sequence * H + head)
    place, real = tl.load(position + sequence), _count_real(last, sequence, 1)
    exists, moves_keys = real > 0, True
    rows, columns = tile_places(s.key_dim, s)
    state += (sequence * H + head) * s.key_dim * CV + rows * CV + columns
    old = as_tile(tl.load(state), s)
    keys, values = key_channels(head, s), s.first_value + head * CV
    lane_row, columns = tile_places(s.lane_rows, s)
    own = tl.arange(0, s.blocks)[None, :, None, None] * s.warp_columns
    own += tl.arange(0, s.warp_columns)[None, None, None, :]
    key_taps = _load_taps(weights.conv, keys, s)
    value_taps = _load_taps(weights.conv, values + own, s)
    rate = tl.exp(tl.load(weights.a_log + head).to(tl.float32))
    bias = tl.load(weights.dt_bias + head).to(tl.float32)
    weight = tl.load(weights.norm + own).to(tl.float32)
    window = pending.inputs + sequence * (s.width - 1 + s.most) * s.channels
    values += columns
    read = tl.zeros_like(keys)
    accepted = _count_accepted(first, place, real, s)
    for token in range(accepted):
        inputs = window + token * s.channels
        qk = _convolve_stored(inputs + keys, key_taps, s)
        v = _convolve_stored(inputs + values, value_taps, s)
        stored = pending.ba + (sequence * s.most + token) * 2 * H + head
        decay, share = _load_gates(stored, rate, bias, s)
        _, old = read_and_update(old, qk, v, decay, share, s)
        read ^= qk.to(tl.int32, bitcast=True)
    newest = window + accepted * s.channels
    key_inputs, key_past = _load_past(newest, key_taps, keys, s)
    value_inputs, value_past = _load_past(newest, value_taps, values, s)
    arrivals += sequence * s.key_heads + head // SHARING
    if SHARING > 1:
        # 1 + 0. The compiler cannot know this, as the 0 comes from other lanes and warps.
        read ^= key_past.to(tl.int32, bitcast=True)
        operand = 1 + (tl.max(read & 1) >> 1)
        arrived = tl.atomic_add(arrivals, operand, sem="relaxed", scope="gpu")
        moves_keys = arrived == SHARING - 1
    await_previous(PDL)
    qkvz += sequence * s.row
    new_keys, new_values = tl.load(qkvz + keys), tl.load(qkvz + values)
    gate = as_tile(tl.load(qkvz + H * CV + values), s).to(tl.float32)
    decay, share = _load_gates(ba + sequence * s.ba_row + head, rate, bias, s)
    qk = _convolve(new_keys, key_past, key_taps, s)
    v = _convolve(new_values, value_past, value_taps, s)
    gate *= tl.sigmoid(gate) * weight
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
        if first > 0:
            tl.store(pending.first + sequence * H + head, 0)
        _move_window(window + values, value_inputs, new_values, is_first, s)
        if moves_keys:
            _move_window(window + keys, key_inputs, new_keys, None, s)
    if moves_keys:
        tl.store(arrivals, 0)


# Several tokens -----------------------------------------------------------------------------------


@jit
def _convolve_token(window, qkvz, taps, channels, token, ends, s: tl.constexpr):
    """`_convolve_stored` of a token. Its inputs before `ends` are at window, the others at qkvz."""
    W: tl.constexpr = s.width
    total = 0.0
    for n in tl.static_range(W):
        at = token + n
        place = tl.where(at < ends, window + at * s.channels, qkvz + (at - ends) * s.row)
        total += tl.load(place + channels).to(tl.float32) * taps[n]
    return (total * tl.sigmoid(total)).to(window.dtype.element_ty).to(tl.float32)


# Grid [Cv / columns, H, B]. State, pending tokens and weights are loaded before the wait for the
# projections, which make qkvz and ba. So are the accepted ones taken in, and the state is stored.
# Then the program takes in its own tokens, without storing the state after them: the next call
# does that, for those that are accepted. A token is loaded while the one before it is taken in. No
# token is real: nothing changes. qkvz None: there are no tokens of its own.
@jit
def _update_states(
    qkvz,
    ba,
    state,
    pending,
    weights,
    position,
    last,
    accepted,
    out,
    tokens,
    s: tl.constexpr,
    PDL: tl.constexpr,
):
    H: tl.constexpr = s.heads
    CV: tl.constexpr = s.value_dim
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin, row = tl.program_id(0) * s.columns, _memory_row(pending, sequence)
    rows, columns = tile_places(s.key_dim, s)
    state += ((row * H + head) * s.key_dim + rows) * CV + begin + columns
    memory = tl.load(state)
    keys, values = key_channels(head, s), s.first_value + head * CV + begin
    lane_row, columns = tile_places(s.lane_rows, s)
    values += columns
    key_taps = _load_taps(weights.conv, keys, s)
    value_taps = _load_taps(weights.conv, values, s)
    rate = tl.exp(tl.load(weights.a_log + head).to(tl.float32))
    bias = tl.load(weights.dt_bias + head).to(tl.float32)
    window = pending.inputs + row * (s.width - 1 + s.most) * s.channels
    real = _count_real(last, sequence, tl.maximum(tokens, 1))
    place = tl.load(position + sequence * tl.maximum(tokens, 1))
    count = _count_accepted(tl.load(pending.first + row * H), place, real, s)
    old = as_tile(memory, s)
    for token in range(count):
        inputs = window + token * s.channels
        qk = _convolve_stored(inputs + keys, key_taps, s)
        v = _convolve_stored(inputs + values, value_taps, s)
        stored = pending.ba + (row * s.most + token) * 2 * H + head
        decay, share = _load_gates(stored, rate, bias, s)
        _, old = read_and_update(old, qk, as_tile(v, s), decay, share, s)
    if count > 0:
        tl.store(state, tl.reshape(old, memory.shape))
    await_previous(PDL)
    if (tl.program_id(0) == 0) & (head == 0):
        tl.store(accepted + sequence, count)
    if qkvz is not None:
        qkvz += sequence * tokens * s.row
        ba += sequence * tokens * s.ba_row + head
        out += (sequence * tokens * H + head) * CV + begin + columns
        is_first, ends = lane_row == 0, count + s.width - 1
        qk = _convolve_token(window, qkvz, key_taps, keys, count, ends, s)
        v = _convolve_token(window, qkvz, value_taps, values, count, ends, s)
        decay, share = _load_gates(ba, rate, bias, s)
        for token in range(real):
            q_and_k, value, now_decay, now_share = qk, v, decay, share
            later = tl.minimum(token + 1, tokens - 1)
            qk = _convolve_token(window, qkvz, key_taps, keys, count + later, ends, s)
            v = _convolve_token(window, qkvz, value_taps, values, count + later, ends, s)
            decay, share = _load_gates(ba + later * s.ba_row, rate, bias, s)
            read, old = read_and_update(old, q_and_k, as_tile(value, s), now_decay, now_share, s)
            read = tl.reshape(read, columns.shape).to(out.dtype.element_ty)
            tl.store(out + token * (H * CV), read, mask=is_first)
        zeros = tl.zeros_like(columns).to(out.dtype.element_ty)
        for token in range(real, tokens):
            tl.store(out + token * (H * CV), zeros, mask=is_first)


# Grid [T H + N / CHANNELS, B]: a program normalizes one head of a token, or moves CHANNELS of the
# window on to the accepted tokens, and makes the call's tokens the pending ones. accepted: as of
# `_update_states`.
@jit
def _finish_tokens(
    qkvz,
    ba,
    out,
    norm,
    pending,
    accepted,
    position,
    last,
    y,
    tokens,
    s: tl.constexpr,
    PDL: tl.constexpr,
):
    CHANNELS: tl.constexpr = s.window_channels
    W: tl.constexpr = s.width
    H: tl.constexpr = s.heads
    CV: tl.constexpr = s.value_dim
    N: tl.constexpr = s.channels
    part, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, c = _memory_row(pending, sequence), tl.arange(0, CV)
    weight = tl.load(norm + c).to(tl.float32)
    real = _count_real(last, sequence, tl.maximum(tokens, 1))
    place = tl.load(position + sequence * tl.maximum(tokens, 1))
    await_previous(PDL)
    if qkvz is not None:
        qkvz += sequence * tokens * s.row
        if part < tokens * H:
            at = (sequence * tokens * H + part) * CV + c
            numbers = tl.load(out + at).to(tl.float32)
            gates = tl.load(qkvz + part // H * s.row + N + part % H * CV + c).to(tl.float32)
            numbers *= tl.rsqrt(tl.sum(numbers * numbers, 0) / CV + s.eps) * weight
            tl.store(y + at, (numbers * gates * tl.sigmoid(gates)).to(y.dtype.element_ty))
    if (part >= tokens * H) & (real > 0):
        channels = (part - tokens * H) * CHANNELS + tl.arange(0, CHANNELS)
        exists, count = channels < N, tl.load(accepted + sequence)
        window = pending.inputs + row * (W - 1 + s.most) * N + channels
        for n in tl.static_range(W - 1):
            tl.store(window + n * N, tl.load(window + (count + n) * N, mask=exists), mask=exists)
        if qkvz is not None:
            for token in range(tokens):
                number = tl.load(qkvz + token * s.row + channels, mask=exists)
                tl.store(window + (W - 1 + token) * N, number, mask=exists)
        if part == tokens * H:
            first, heads = place * 0, tl.arange(0, s.padded_heads)
            if ba is not None:
                first = place + 1
                ba += sequence * tokens * s.ba_row
                both = tl.arange(0, 2 * s.padded_heads)
                for token in range(tokens):
                    number = tl.load(ba + token * s.ba_row + both, mask=both < 2 * H)
                    stored = pending.ba + (row * s.most + token) * 2 * H
                    tl.store(stored + both, number, mask=both < 2 * H)
            tl.store(pending.first + row * H + heads, first + 0 * heads, mask=heads < H)


# Launches -----------------------------------------------------------------------------------------

NAMES = "_update_token", "_update_states", "_finish_tokens"


@torch.library.custom_op("moe_fast::delta_tokens", mutates_args=("state", "pending", "arrivals"))
def delta_tokens(
    qkvz: Tensor,
    ba: Tensor,
    state: Tensor,
    pending: list[Tensor],
    weights: list[Tensor],
    positions: Tensor,
    last: Tensor | None,
    arrivals: Tensor,
    key_heads: int,
    eps: float,
) -> Tensor:
    """Do all between the projections of a Gated DeltaNet layer, for T tokens of each sequence.

    qkvz [B, T, N + H Cv]: q, k and v before the convolution, then the gate. ba [B, T, 2 H]: beta
    before its sigmoid, then the decay's input. weights: a `DeltaWeights`. eps: of the gated norm.
    Return [B, T, H Cv].

    The real tokens are those up to index last [B] (`model.Context.last`); None: all. positions
    int64 [B, T]. state fp32 [B, H, Ck, Cv] takes in the pending tokens before them, in place, and
    one token, too. Several tokens become the pending ones, T <= M. pending: a `Pending`. Ck and Cv
    are powers of two (`delta_tokens_supports`). With PDL the kernels read state, pending, weights,
    positions and last while the previous kernel runs, which must not write them.

    arrivals int32 [B, K], for one token: zeros, a scratch of this layer's alone, and zeros again
    afterwards. All that is updated may have more than B rows. Raises ValueError for a wrong shape.
    """
    (B, T, _), (H, CK, CV), (N, W) = qkvz.shape, state.shape[1:], weights[0].shape
    M = pending[1].shape[1]
    check_shapes(
        qkvz=(qkvz, (B, T, 2 * key_heads * CK + 2 * H * CV)),
        ba=(ba, (B, T, 2 * H)),
        positions=(positions, (B, T)),
        inputs=(pending[0], (len(state), W - 1 + M, N)),
        norm=(weights[3], (CV,)),
    )
    if T > M:
        raise ValueError(f"{T} tokens, of which only {M} can be pending")
    qkvz, ba, positions = with_even_rows(qkvz), with_even_rows(ba), positions.contiguous()
    is_one = T == 1
    s = DeltaSettings(key_heads, H, CK, CV, W, eps, is_one, M, qkvz.stride(1), ba.stride(1))
    memory = state, Pending(*pending), DeltaWeights(*weights), positions, last
    y = qkvz.new_empty(B, T, H * CV)
    if is_one:
        launch(_update_token, (H, B), qkvz, ba, *memory, arrivals, y, settings=s, warps=s.warps)
    else:
        launch_several(qkvz, ba, *memory, y, s)
    return y


@delta_tokens.register_fake
def _(qkvz: Tensor, ba: Tensor, state: Tensor, *rest) -> Tensor:
    B, T, _ = qkvz.shape
    return qkvz.new_empty(B, T, state.shape[1] * state.shape[3])


def launch_several(
    qkvz: Tensor | None,
    ba: Tensor | None,
    state: Tensor,
    pending: Pending,
    weights: DeltaWeights,
    positions: Tensor,
    last: Tensor | None,
    y: Tensor | None,
    s: DeltaSettings,
) -> None:
    """Launch the kernels of several tokens, or of none: qkvz, ba and y None, positions [B, 1]."""
    B, T = len(positions), 0 if y is None else y.shape[1]
    accepted = torch.empty(B, dtype=torch.int32, device=state.device)
    out = None if y is None else torch.empty_like(y)
    grid, options = (s.value_dim // s.columns, s.heads, B), dict(settings=s, warps=s.warps)
    tensors = qkvz, ba, state, pending, weights, positions, last, accepted, out
    launch(_update_states, grid, *tensors, T, **options)
    tensors = qkvz, ba, out, weights.norm, pending, accepted, positions, last, y
    grid = T * s.heads + triton.cdiv(s.channels, s.window_channels), B
    launch(_finish_tokens, grid, *tensors, T, **options)


def delta_tokens_supports(state: Tensor) -> bool:
    """Whether to call `delta_tokens`: in compiled code on a GPU, with heads that fit its tiles.

    state: [B, H, Ck, Cv]. Eager code keeps the plain form, which is the reference.
    """
    return torch.compiler.is_compiling() and kernels_support(state)


def kernels_support(state: Tensor) -> bool:
    """Whether the kernels run on the GPU of state [B, H, Ck, Cv], with heads that fit."""
    return fit_tiles(*state.shape[-2:]) and can_launch(state, *NAMES)
