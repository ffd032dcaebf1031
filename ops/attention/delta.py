"""The gated delta rule for 1 to 16 tokens of each sequence, from the projections to the gated norm.

Several tokens may be drafts, of which the last ones are refused. So they are `Pending` after their
call: the state has not taken them in. The next call begins at the position after those that were
accepted. It takes these in first, from their inputs, then its own. That reads and writes the state
once a call, as one token does. A state after each token of the call would be 2 MB more to write
for each in Qwen3.6; the inputs are 16 KB. `take_in_pending` is such a call without own tokens:
before a prompt, and for the plain form.

A program has a whole value head, so that it can normalize what it reads. A second kernel that
normalizes costs at least 1.6 us a layer on an H200.

Formulas, letters and the reference: ops/plain/gated_delta.py. T tokens, of which a sequence's first
`last` + 1 are real; M tokens that `Pending` has memory for.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention.delta_chunk import prepare_few, read_few
from ops.attention.delta_prompt import gated_delta_chunk
from ops.attention.delta_state import (
    WARPS,
    DeltaSettings,
    DeltaWeights,
    Memory,
    Pending,
    as_tile,
    convolve,
    convolve_stored,
    count_accepted,
    count_real,
    fit_tiles,
    keep_inputs,
    key_channels,
    load_past,
    load_taps,
    memory_row,
    norm_head,
    read_and_update,
    softplus,
    sum_past,
    tile_places,
    with_even_rows,
)
from ops.inductor import custom_op
from ops.launch import await_previous, can_launch, check_shapes, jit, launch, tl, triton
from ops.plain.gated_delta import conv_silu_in_torch, gates_in_torch, mask_gates
from ops.plain.pending import take_in_plain

# Calls of fewer tokens take them in one after the other: 1.2 us each on an H200, where a chunk of 4
# takes as long, of 8 7.2 us and of 16 8.2. So do those with a decay for each channel: its products
# of keys take one pass for each size of blocks (ops/attention/delta_channels.py). So do models in
# other dtypes than bf16: parts of the state for tensor cores then spill registers.
LEAST_CHUNK = 5
CHUNK_PRECISION = {torch.bfloat16: "tf32"}  # by dtype: `PRECISION` of ops/attention/delta_prompt.py


class Gates(NamedTuple):
    """What gives the gates of a call's tokens, but for those that are beside q, k and v."""

    ba: Tensor  # [B, T, 2 H]: b, then a; with a decay for each channel b alone, [B, T, H]
    a: Tensor | None = None  # [B, T, H Ck]: of each channel's decay
    output: Tensor | None = None  # [B, T, H Cv]: the output's


@jit
def _decays_of(head, s: tl.constexpr):
    """Return which of all decays are a head's: one; or those of its channels, as q and k are."""
    if s.channel_decay:
        NUMBERS: tl.constexpr = 2 * s.key_dim * s.copies
        return head * s.key_dim + tl.arange(0, NUMBERS) % s.key_dim
    else:
        return head


@jit
def _find_gates(gates, sequence, tokens, head, s: tl.constexpr):
    """Return where a sequence's first token has what makes a head's gates.

    b, and with a decay for each channel a of these, and the output's gate less the place of v.
    """
    b = gates.ba + sequence * tokens * s.ba_row + head
    if s.channel_decay:
        a = gates.a + sequence * tokens * s.decays + _decays_of(head, s)
        return b, a, gates.output + sequence * tokens * s.outputs - s.first_value
    else:
        return b, b, b


@jit
def _own_gates_at(found, token, s: tl.constexpr):
    """Return where a token of the call has b, and a. found: as of `_find_gates`."""
    b = found[0] + token * s.ba_row
    return (b, found[1] + token * s.decays) if s.channel_decay else (b, b + s.heads)


@jit
def _output_gate_at(qkvz, found, token, s: tl.constexpr):
    """Return where a token has the output's gate, less the place of v. qkvz: the token's."""
    return found[2] + token * s.outputs if s.channel_decay else qkvz + s.outputs


@jit
def _pending_gates_at(pending, row, token, head, s: tl.constexpr):
    """Return where a pending token has b of a head. Its a is `_pending_decays` further."""
    return pending.gates + (row * s.most + token) * s.gates + head


@jit
def _pending_decays(head, s: tl.constexpr):
    """Return how far a pending token's a is from its b."""
    return s.heads - head + _decays_of(head, s) if s.channel_decay else s.heads


@jit
def _load_gates(at, rate, bias):
    """Return a token's decay and share. at: where its b and a are."""
    b, a = tl.load(at[0]).to(tl.float32), tl.load(at[1]).to(tl.float32)
    return tl.exp(-rate * softplus(a + bias)), tl.sigmoid(b)


@jit
def _load_own(qkvz, found, keys, values, token, s: tl.constexpr):
    """Load a token's inputs of q and k, of v, its output's gate, b and a. found: `_find_gates`."""
    qkvz += token * s.row
    gate = as_tile(tl.load(_output_gate_at(qkvz, found, token, s) + values), s).to(tl.float32)
    b, a = _own_gates_at(found, token, s)
    b, a = tl.load(b).to(tl.float32), tl.load(a).to(tl.float32)
    return tl.load(qkvz + keys), tl.load(qkvz + values), gate, b, a


@jit
def _keep_gates(pending, row, head, found, tokens, s: tl.constexpr):
    """Store b and a of a head of all tokens. found: as of `_find_gates`."""
    for token in range(tokens):
        kept = _pending_gates_at(pending, row, token, head, s)
        tl.store(kept, tl.load(found[0] + token * s.ba_row))
        _, a = _own_gates_at(found, token, s)
        tl.store(kept + _pending_decays(head, s), tl.load(a))


@jit
def _read_one(qkvz, found, y, old, sums, taps, gates, places, kept, s: tl.constexpr):
    """Store what the only token reads of a head, normalized, and the state after it.

    Returns its inputs of q and k, and of v. As `_read_tokens`, but sums: of the convolution over
    the inputs before it, of q and k, and of v. kept: where the state is, and whether to store it.
    """
    DTYPE: tl.constexpr = y.dtype.element_ty
    keys, values, is_first = places
    rate, bias, weight = gates
    state, exists = kept
    new_keys, new_values = tl.load(qkvz + keys), tl.load(qkvz + values)
    gate = as_tile(tl.load(_output_gate_at(qkvz, found, 0, s) + values), s).to(tl.float32)
    decay, share = _load_gates(_own_gates_at(found, 0, s), rate, bias)
    qk = convolve(new_keys, sums[0], taps[0], s)
    v = convolve(new_values, sums[1], taps[1], s)
    factor = tl.sigmoid(gate) * weight if s.sigmoid_gate else tl.sigmoid(gate) * weight * gate
    out, new = read_and_update(old, qk, v, decay, share, s)
    if exists:  # first, so that the store is in flight while the head is normalized
        tl.store(state, tl.reshape(new, state.shape))
    out = norm_head(out, factor, s, DTYPE)
    tl.store(y, tl.reshape(out, values.shape).to(DTYPE), mask=is_first)
    return new_keys, new_values


@jit
def _read_tokens(qkvz, found, y, old, past, taps, gates, places, real, tokens, s: tl.constexpr):
    """Store what each of several tokens reads of a head, normalized; 0 for padding.

    found: as of `_find_gates`. old: the state. past, taps: of q and k, and of v. gates: the decay's
    rate and bias, the norm's weight. places: channels of q and k, of v, and which of these are
    stored.
    """
    STRIDE: tl.constexpr = s.heads * s.value_dim
    DTYPE: tl.constexpr = y.dtype.element_ty
    keys, values, is_first = places
    key_past, value_past = past
    loaded = _load_own(qkvz, found, keys, values, 0, s)
    for token in range(real):
        new_keys, new_values, gate, b, a = loaded
        later = tl.minimum(token + 1, tokens - 1)
        loaded = _load_own(qkvz, found, keys, values, later, s)
        qk = convolve(new_keys, sum_past(key_past, taps[0], 0.0, s), taps[0], s)
        v = convolve(new_values, sum_past(value_past, taps[1], 0.0, s), taps[1], s)
        key_past, value_past = key_past[1:] + (new_keys,), value_past[1:] + (new_values,)
        decay, share = tl.exp(-gates[0] * softplus(a + gates[1])), tl.sigmoid(b)
        out, old = read_and_update(old, qk, v, decay, share, s)
        factor = tl.sigmoid(gate) if s.sigmoid_gate else tl.sigmoid(gate) * gate  # or SiLU
        out = norm_head(out, factor * gates[2], s, DTYPE)
        tl.store(y + token * STRIDE, tl.reshape(out, values.shape).to(DTYPE), mask=is_first)
    zeros = tl.zeros_like(values).to(DTYPE)
    for token in range(real, tokens):
        tl.store(y + token * STRIDE, zeros, mask=is_first)


# Grid [H, B]. State, pending tokens, weights, position and last are loaded before the wait for the
# projections, which make qkvz and ba. So are pending tokens taken in, of which there are none after
# another call of one token.
#
# One token is taken in at once, and the state is stored. Several tokens become the pending ones:
# the state after them is not stored. A token is loaded while the one before it is taken in. qkvz
# None: there are no tokens, and none are pending afterwards.
#
# Triton loads a tile with fewer numbers than threads once more in each layout that it is used in.
# For q and k that would be 16 loads a thread for each tap (120 spills on sm_90). Hence they are one
# tile of 2 Ck numbers, or two copies of it, with as many numbers as threads.
#
# The inputs of v, ba and `first` belong to the head. Those of q and k are read by the programs of
# all H / K value heads of a key head; `arrivals` counts them, and the last to have read them moves
# them on. No program waits. There is no race:
# - The counter's addition has an operand that is always 1, but is computed from all that the
#   program has read of q's and k's inputs. So these loads have returned to registers, in all
#   threads, before the addition is issued. A barrier alone would not wait for them.
# - The last program's stores depend on the result of its addition, which follows all others. So
#   it is relaxed: a release waits for the state too, an acquire empties L1.
# - The last program sets the counter to 0, also without a token, for the next token's kernel.
@jit
def _update_heads(qkvz, gates, memory, arrivals, y, tokens, s: tl.constexpr, PDL: tl.constexpr):
    H: tl.constexpr = s.heads
    CV: tl.constexpr = s.value_dim
    SHARING: tl.constexpr = s.heads // s.key_heads
    state, pending, weights, positions, last = memory
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = memory_row(pending, sequence)
    first = tl.load(pending.first + row * H + head)
    place, real = tl.load(positions + sequence * tokens), count_real(last, sequence, tokens)
    exists, moves_keys = real > 0, True
    rows, columns = tile_places(s.key_dim, s)
    state += (row * H + head) * s.key_dim * CV + rows * CV + columns
    old = as_tile(tl.load(state), s)
    keys, values = key_channels(head, s), s.first_value + head * CV
    lane_row, columns = tile_places(s.lane_rows, s)
    own = tl.arange(0, s.blocks)[None, :, None, None] * s.warp_columns
    own += tl.arange(0, s.warp_columns)[None, None, None, :]
    key_taps = load_taps(weights.conv, keys, s)
    value_taps = load_taps(weights.conv, values + own, s)
    rate = tl.exp(tl.load(weights.a_log + head).to(tl.float32))
    bias = tl.load(weights.dt_bias + _decays_of(head, s)).to(tl.float32)
    weight = tl.load(weights.norm + own).to(tl.float32)
    window = pending.inputs + row * (s.width - 1 + s.most) * s.channels
    values += columns
    read = tl.zeros_like(keys)
    accepted = count_accepted(first, place, real, s)
    for token in range(accepted):
        inputs = window + token * s.channels
        qk = convolve_stored(inputs + keys, key_taps, s)
        v = convolve_stored(inputs + values, value_taps, s)
        kept = _pending_gates_at(pending, row, token, head, s)
        decay, share = _load_gates((kept, kept + _pending_decays(head, s)), rate, bias)
        _, old = read_and_update(old, qk, v, decay, share, s)
        read ^= qk.to(tl.int32, bitcast=True)
    if not s.is_one:  # noqa: SIM102  (known at compile time)
        if accepted > 0:
            tl.store(state, tl.reshape(old, state.shape))
    newest = window + accepted * s.channels
    key_inputs = load_past(newest, keys, s)
    key_past = sum_past(key_inputs, key_taps, 0.0, s)
    value_inputs = load_past(newest, values, s)
    value_past = sum_past(value_inputs, value_taps, 0.0, s)
    arrivals += sequence * s.key_heads + head // SHARING
    if s.own > 0:
        few = prepare_few(old, newest, weights, s.first_value + head * CV, s)
    if SHARING > 1:
        # 1 + 0. The compiler cannot know this, as the 0 comes from other lanes and warps.
        read ^= key_past.to(tl.int32, bitcast=True)
        operand = 1 + (tl.max(read & 1) >> 1)
        arrived = tl.atomic_add(arrivals, operand, sem="relaxed", scope="gpu")
        moves_keys = arrived == SHARING - 1
    await_previous(PDL)
    is_first = lane_row == 0
    taps, factors = (key_taps, value_taps), (rate, bias, weight)
    places = keys, values, is_first
    if qkvz is not None:
        qkvz += sequence * tokens * s.row
        found = _find_gates(gates, sequence, tokens, head, s)
        y += (sequence * tokens * H + head) * CV + (0 if s.own > 0 else columns)
    if s.is_one:
        sums, kept = (key_past, value_past), (state, exists)
        new = _read_one(qkvz, found, y, old, sums, taps, factors, places, kept, s)
        if exists:
            if first > 0:
                tl.store(pending.first + row * H + head, 0)
            keep_inputs(window, value_inputs[1:] + new[1:], None, values, tokens, is_first, s)
            if moves_keys:
                keep_inputs(window, key_inputs[1:] + new[:1], None, keys, tokens, None, s)
    else:
        begin = place * 0
        if s.own > 0:
            begin, first_value = place + 1, s.first_value + head * CV
            kept = window, _pending_gates_at(pending, row, 0, head, s), first_value
            own_keys, counts = (keys, key_taps, key_inputs), (real, tokens)
            read_few(qkvz, found[0], y, few, own_keys, (rate, bias), kept, counts, moves_keys, s)
        elif qkvz is not None:
            begin = place + 1
            past = key_inputs, value_inputs
            _read_tokens(qkvz, found, y, old, past, taps, factors, places, real, tokens, s)
        if exists:
            tl.store(pending.first + row * H + head, begin)
            if s.own == 0:  # else it is done
                if qkvz is not None:
                    _keep_gates(pending, row, head, found, tokens, s)
                keep_inputs(window, value_inputs, qkvz, values, tokens, is_first, s)
                if moves_keys:
                    keep_inputs(window, key_inputs, qkvz, keys, tokens, None, s)
    if moves_keys:
        tl.store(arrivals, 0)


@custom_op("moe_fast::delta_tokens", mutates_args=("state", "pending", "arrivals"))
def delta_tokens(
    qkvz: Tensor,
    gates: list[Tensor],
    state: Tensor,
    pending: list[Tensor],
    weights: list[Tensor],
    positions: Tensor,
    last: Tensor | None,
    arrivals: Tensor,
    eps: float,
    sigmoid_gate: bool = False,
) -> Tensor:
    """Do all between the projections of a Gated DeltaNet layer, for T tokens of each sequence.

    qkvz [B, T, N + H Cv]: q, k and v before the convolution, then the gate. gates: a `Gates`, of ba
    [B, T, 2 H] alone: beta before its sigmoid, then the decay's input. If it has all three tensors,
    there is a decay for each channel of a key, and qkvz [B, T, N] has no gate. weights: a
    `DeltaWeights`. eps: of the gated norm. sigmoid_gate: its activation, else SiLU. Return [B, T, H
    Cv].

    The real tokens are those up to index last [B] (`model.Context.last`); None: all. positions
    int64 [B, T]. state fp32 [B, H, Ck, Cv] takes in the pending tokens before them, in place, and
    one token, too. Several tokens become the pending ones, T <= M. pending: a `Pending`. Ck and Cv
    are powers of two (`delta_tokens_supports`).

    arrivals int32 [B, K]: zeros, a scratch of this layer's alone, and zeros again afterwards. All
    that is updated may have more than B rows. Raises ValueError for a wrong shape.
    """
    (B, T, _), (H, CK, CV), (N, W) = qkvz.shape, state.shape[1:], weights[0].shape
    M, K, of_channels = pending[1].shape[1], arrivals.shape[1], len(gates) > 1
    if of_channels:
        check_shapes(a=(gates[1], (B, T, H * CK)), output=(gates[2], (B, T, H * CV)))
    check_shapes(
        qkvz=(qkvz, (B, T, 2 * K * CK + (1 if of_channels else 2) * H * CV)),
        ba=(gates[0], (B, T, H if of_channels else 2 * H)),
        positions=(positions, (B, T)),
        inputs=(pending[0], (len(state), W - 1 + M, N)),
        norm=(weights[3], (CV,)),
    )
    if T > M:
        raise ValueError(f"{T} tokens, of which only {M} can be pending")
    qkvz, positions = with_even_rows(qkvz), positions.contiguous()
    own = Gates(with_even_rows(gates[0]), *(x.contiguous() for x in gates[1:]))
    rows = qkvz.stride(1), own.ba.stride(1)
    s = DeltaSettings(K, H, CK, CV, W, eps, T == 1, M, *rows, of_channels, sigmoid_gate)
    s = replace(s, **chunk_of(T, s, qkvz.dtype))
    memory = Memory(state, Pending(*pending), DeltaWeights(*weights), positions, last)
    y = qkvz.new_empty(B, T, H * CV)
    tensors = qkvz, own, memory, arrivals, y
    launch(_update_heads, (H, B), *tensors, T, settings=s, warps=WARPS)
    return y


def chunk_of(tokens: int, s: DeltaSettings, dtype: torch.dtype) -> dict:
    """Return how a call's tokens are computed: settings of `DeltaSettings`."""
    if tokens < LEAST_CHUNK or s.channel_decay or dtype not in CHUNK_PRECISION:
        return {}
    return dict(own=triton.next_power_of_2(tokens), precision=CHUNK_PRECISION[dtype])


@delta_tokens.register_fake
def _(qkvz: Tensor, gates: list[Tensor], state: Tensor, *rest) -> Tensor:
    B, T, _ = qkvz.shape
    return qkvz.new_empty(B, T, state.shape[1] * state.shape[3])


def delta_tokens_supports(state: Tensor) -> bool:
    """Whether to call `delta_tokens`: in compiled code on a GPU, with heads that fit its tiles.

    state: [B, H, Ck, Cv]. Eager code keeps the plain form, which is the reference.
    """
    return torch.compiler.is_compiling() and kernels_support(state)


def kernels_support(state: Tensor) -> bool:
    """Whether the kernel runs on the GPU of state [B, H, Ck, Cv], with heads that fit."""
    return fit_tiles(*state.shape[-2:]) and can_launch(state, "_update_heads")


@custom_op("moe_fast::delta_take_in", mutates_args=("state", "pending", "arrivals"))
def take_in_pending(
    state: Tensor,
    pending: list[Tensor],
    weights: list[Tensor],
    position: Tensor,
    last: Tensor | None,
    row: Tensor | None,
    arrivals: Tensor,
) -> None:
    """Take in each sequence's pending tokens before position [B, 1]; then none are pending.

    A sequence without a real token stays as it is (last: as of `delta_tokens`). row int64 [B]: the
    rows of the sequences; None: the first. The rest is as for `delta_tokens`.
    """
    w, (H, CK, CV), K = DeltaWeights(*weights), state.shape[1:], arrivals.shape[1]
    W, M = w.conv.shape[1], pending[1].shape[1]
    if kernels_support(state):
        s = DeltaSettings(K, H, CK, CV, W, 0.0, False, M, 0, 0, len(w.dt_bias) > H)
        memory = Memory(state, Pending(*pending, row), w, position.contiguous(), last)
        tensors = None, None, memory, arrivals, None
        launch(_update_heads, (H, len(position)), *tensors, 1, settings=s, warps=WARPS)
        return

    def advance(x: Tensor, ba: Tensor, kept: Tensor, old: Tensor) -> Tensor:
        y = conv_silu_in_torch(x[:, W - 1 :], x[:, : W - 1], w.conv)
        q, k, v = y.split((K * CK, K * CK, H * CV), dim=-1)
        q, k = (part.unflatten(-1, (K, CK)) for part in (q, k))
        g, beta = mask_gates(*gates_in_torch(ba, w.a_log, w.dt_bias), kept)
        return gated_delta_chunk(q, k, v.unflatten(-1, (H, CV)), g, beta, old)[1]

    take_in_plain(state, pending, W, position, last, row, advance)
