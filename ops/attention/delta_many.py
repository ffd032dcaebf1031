"""Kernels of the gated delta rule for more tokens than ops/attention/delta.py takes at once, and
for pending tokens that nothing follows.

    _update_states    one token after the other: convolution, gates, what they read
    _finish_tokens    their gated norm; makes them the pending ones

A program has a few columns of a value head, so that there are many programs. Letters, and what is
pending: ops/attention/delta.py.
"""

import torch
from torch import Tensor

from ops.attention.delta_state import (
    DeltaSettings,
    Gates,
    Memory,
    as_tile,
    convolve_stored,
    count_accepted,
    count_real,
    decay_channels,
    find_gates,
    gate_factor,
    key_channels,
    load_gates,
    load_taps,
    memory_row,
    own_gates_at,
    pending_decays,
    pending_gates_at,
    read_and_update,
    tile_places,
)
from ops.launch import await_previous, jit, launch, tl, triton


@jit
def _convolve_token(window, qkvz, taps, channels, token, ends, s: tl.constexpr):
    """`convolve_stored` of a token. Its inputs before `ends` are at window, the others at qkvz."""
    total = 0.0
    for n in tl.static_range(s.width):
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
def _update_states(qkvz, gates, memory, accepted, out, tokens, s: tl.constexpr, PDL: tl.constexpr):
    H: tl.constexpr = s.heads
    CV: tl.constexpr = s.value_dim
    state, pending, weights, positions, last = memory
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin, row = tl.program_id(0) * s.columns, memory_row(pending, sequence)
    rows, columns = tile_places(s.key_dim, s)
    state += ((row * H + head) * s.key_dim + rows) * CV + begin + columns
    stored = tl.load(state)
    keys, values = key_channels(head, s), s.first_value + head * CV + begin
    lane_row, columns = tile_places(s.lane_rows, s)
    values += columns
    key_taps = load_taps(weights.conv, keys, s)
    value_taps = load_taps(weights.conv, values, s)
    rate = tl.exp(tl.load(weights.a_log + head).to(tl.float32))
    bias = tl.load(weights.dt_bias + decay_channels(head, s)).to(tl.float32)
    window = pending.inputs + row * (s.width - 1 + s.most) * s.channels
    real = count_real(last, sequence, tl.maximum(tokens, 1))
    place = tl.load(positions + sequence * tl.maximum(tokens, 1))
    count = count_accepted(tl.load(pending.first + row * H), place, real, s)
    old = as_tile(stored, s)
    for token in range(count):
        inputs = window + token * s.channels
        qk = convolve_stored(inputs + keys, key_taps, s)
        v = convolve_stored(inputs + values, value_taps, s)
        kept = pending_gates_at(pending, row, token, head, s)
        decay, share = load_gates((kept, kept + pending_decays(head, s)), rate, bias)
        _, old = read_and_update(old, qk, as_tile(v, s), decay, share, s)
    if count > 0:
        tl.store(state, tl.reshape(old, stored.shape))
    await_previous(PDL)
    if (tl.program_id(0) == 0) & (head == 0):
        tl.store(accepted + sequence, count)
    if qkvz is not None:
        qkvz += sequence * tokens * s.row
        found = find_gates(gates, sequence, tokens, head, s)
        out += (sequence * tokens * H + head) * CV + begin + columns
        is_first, ends = lane_row == 0, count + s.width - 1
        qk = _convolve_token(window, qkvz, key_taps, keys, count, ends, s)
        v = _convolve_token(window, qkvz, value_taps, values, count, ends, s)
        decay, share = load_gates(own_gates_at(found, 0, s), rate, bias)
        for token in range(real):
            q_and_k, value, now_decay, now_share = qk, v, decay, share
            later = tl.minimum(token + 1, tokens - 1)
            qk = _convolve_token(window, qkvz, key_taps, keys, count + later, ends, s)
            v = _convolve_token(window, qkvz, value_taps, values, count + later, ends, s)
            decay, share = load_gates(own_gates_at(found, later, s), rate, bias)
            read, old = read_and_update(old, q_and_k, as_tile(value, s), now_decay, now_share, s)
            read = tl.reshape(read, columns.shape).to(out.dtype.element_ty)
            tl.store(out + token * (H * CV), read, mask=is_first)
        zeros = tl.zeros_like(columns).to(out.dtype.element_ty)
        for token in range(real, tokens):
            tl.store(out + token * (H * CV), zeros, mask=is_first)


@jit
def _keep_gates(pending, row, begin, own, own_row, places, count, tokens, s: tl.constexpr):
    """Store what makes the gates of the call's tokens: of each `count` numbers, from `begin` on."""
    for token in range(tokens):
        number = tl.load(own + token * own_row + places, mask=places < count)
        stored = pending.gates + (row * s.most + token) * s.gates + begin
        tl.store(stored + places, number, mask=places < count)


# Grid [T H + N / CHANNELS, B]: a program normalizes one head of a token, or moves CHANNELS of the
# window on to the accepted tokens, and makes the call's tokens the pending ones. accepted: as of
# `_update_states`.
@jit
def _finish_tokens(
    qkvz,
    gates,
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
    H: tl.constexpr = s.heads
    CV: tl.constexpr = s.value_dim
    N: tl.constexpr = s.channels
    part, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, c = memory_row(pending, sequence), tl.arange(0, CV)
    weight = tl.load(norm + c).to(tl.float32)
    real = count_real(last, sequence, tl.maximum(tokens, 1))
    place = tl.load(position + sequence * tl.maximum(tokens, 1))
    await_previous(PDL)
    if qkvz is not None:
        qkvz += sequence * tokens * s.row
        if part < tokens * H:
            at = (sequence * tokens * H + part) * CV + c
            numbers = tl.load(out + at).to(tl.float32)
            if s.channel_decay:
                gate = tl.load(gates.output + at).to(tl.float32)
            else:
                gate = tl.load(qkvz + part // H * s.row + N + part % H * CV + c).to(tl.float32)
            numbers *= tl.rsqrt(tl.sum(numbers * numbers, 0) / CV + s.eps) * weight
            numbers = gate_factor(numbers, gate, s) * tl.sigmoid(gate)
            tl.store(y + at, numbers.to(y.dtype.element_ty))
    if (part >= tokens * H) & (real > 0):
        channels = (part - tokens * H) * s.window_channels + tl.arange(0, s.window_channels)
        exists, count = channels < N, tl.load(accepted + sequence)
        window = pending.inputs + row * (s.width - 1 + s.most) * N + channels
        for n in tl.static_range(s.width - 1):
            tl.store(window + n * N, tl.load(window + (count + n) * N, mask=exists), mask=exists)
        if qkvz is not None:
            for token in range(tokens):
                number = tl.load(qkvz + token * s.row + channels, mask=exists)
                tl.store(window + (s.width - 1 + token) * N, number, mask=exists)
            if s.channel_decay:  # too many for one program
                own = gates.ba + sequence * tokens * s.ba_row
                _keep_gates(pending, row, 0, own, s.ba_row, channels, H, tokens, s)
                own = gates.a + sequence * tokens * s.decays
                _keep_gates(pending, row, H, own, s.decays, channels, s.decays, tokens, s)
        if part == tokens * H:
            first, heads = place * 0, tl.arange(0, s.padded_heads)
            if qkvz is not None:
                first = place + 1
                if not s.channel_decay:
                    both = tl.arange(0, 2 * s.padded_heads)
                    own = gates.ba + sequence * tokens * s.ba_row
                    _keep_gates(pending, row, 0, own, s.ba_row, both, 2 * H, tokens, s)
            tl.store(pending.first + row * H + heads, first + 0 * heads, mask=heads < H)


# Launching ----------------------------------------------------------------------------------------


def launch_several(
    qkvz: Tensor | None, gates: Gates | None, memory: Memory, y: Tensor | None, s: DeltaSettings
) -> None:
    """Launch the kernels of several tokens.

    Or of none: then qkvz, gates and y are None, and positions [B, 1].
    """
    state, pending, weights, positions, last = memory
    B, T = len(positions), 0 if y is None else y.shape[1]
    accepted = torch.empty(B, dtype=torch.int32, device=state.device)
    out = None if y is None else torch.empty_like(y)
    grid, options = (s.value_dim // s.columns, s.heads, B), dict(settings=s, warps=s.warps)
    launch(_update_states, grid, qkvz, gates, memory, accepted, out, T, **options)
    tensors = qkvz, gates, out, weights.norm, pending, accepted, positions, last, y
    grid = T * s.heads + triton.cdiv(s.channels, s.window_channels), B
    launch(_finish_tokens, grid, *tensors, T, **options)
