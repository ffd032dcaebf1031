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

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention.delta_chunk import prepare_few, read_few
from ops.attention.delta_joint import decay_and_share, load_before, read_joint
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
    memory_of_layer,
    memory_row,
    norm_head,
    read_and_update,
    sum_past,
    tile_places,
    with_even_rows,
)
from ops.inductor import custom_op
from ops.launch import await_previous, can_launch, check_shapes, jit, launch, tl
from ops.plain.pending import take_in_plain
from ops.products.planes import GROUP, Planes
from ops.sizes import pow2

# Two to MOST_JOINT tokens are read at once in registers, LEAST_CHUNK and more are a chunk on tensor
# cores. With a decay for each channel they are taken in one after the other, 1.2 us each on an
# H200: a chunk's products of keys would take one pass for each size of blocks
# (ops/attention/delta_channels.py). So are LEAST_CHUNK and more in other dtypes than bf16: parts of
# the state for tensor cores then spill registers.
MOST_JOINT = 4
LEAST_CHUNK = 5
CHUNK_PRECISION = {torch.bfloat16: "tf32"}  # by dtype: `PRECISION` of ops/attention/delta_prompt.py


class Gates(NamedTuple):
    """What makes the gates of a call's tokens; views of other tensors may have longer rows."""

    b: Tensor  # [B, T, H]: beta before its sigmoid
    a: Tensor  # [B, T, H], or [B, T, H Ck] with a decay for each channel: the decay's input
    output: Tensor  # [B, T, H Cv]: the output's gate


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
    """Return where a sequence's first token has b and a of a head, and the output's gate.

    That is less the place of v.
    """
    first = sequence * tokens
    b, a = gates.b + first * s.b_row + head, gates.a + first * s.a_row + _decays_of(head, s)
    return b, a, gates.output + first * s.output_row - s.first_value


@jit
def _find_pending(pending, row, token, head, s: tl.constexpr):
    """Return where a pending token has b and a of a head."""
    gates = pending.gates + (row * s.most + token) * s.gates
    return gates + head, gates + s.heads + _decays_of(head, s)


@jit
def _load_token(qkv, found, keys, values, token, s: tl.constexpr):
    """Load a token's inputs of q and k, of v, its output's gate, b and a. found: `_find_gates`."""
    qkv += token * s.row
    gate = as_tile(tl.load(found[2] + token * s.output_row + values), s).to(tl.float32)
    b, a = tl.load(found[0] + token * s.b_row), tl.load(found[1] + token * s.a_row)
    return tl.load(qkv + keys), tl.load(qkv + values), gate, b, a


@jit
def _take_token(loaded, old, sums, taps, factors, s: tl.constexpr):
    """Return what a token reads of a head, what its norm is multiplied by, the state after it.

    loaded: by `_load_token`. old: the state. sums: of the convolution over the inputs before it, of
    q and k, and of v. factors: the decay's rate and bias, the norm's weight.
    """
    new_keys, new_values, gate, b, a = loaded
    decay, share = decay_and_share(b, a, factors[0], factors[1])
    qk = convolve(new_keys, sums[0], taps[0], s)
    v = convolve(new_values, sums[1], taps[1], s)
    factor = tl.sigmoid(gate) if s.sigmoid_gate else tl.sigmoid(gate) * gate  # or SiLU
    out, new = read_and_update(old, qk, v, decay, share, s)
    return out, factor * factors[2], new


@jit
def _read_tokens(
    qkv, found, y, old, past, taps, factors, places, kept, real, tokens, s: tl.constexpr
):
    """Store what each of several tokens reads of a head, normalized; 0 if none is real.

    Store b and a of each, too: the tokens become the pending ones, padding among them. kept: as of
    `_find_pending`. past: the inputs before them, of q and k, and of v. places: channels of q and
    k, of v, and which of these are stored. The others: as in `_take_token`.
    """
    STRIDE: tl.constexpr = s.heads * s.value_dim
    DTYPE: tl.constexpr = y.dtype.element_ty
    keys, values, is_first = places
    key_past, value_past = past
    later, count = _load_token(qkv, found, keys, values, 0, s), tl.where(real > 0, tokens, 0)
    for token in range(count):
        loaded = later
        later = _load_token(qkv, found, keys, values, tl.minimum(token + 1, tokens - 1), s)
        sums = sum_past(key_past, taps[0], 0.0, s), sum_past(value_past, taps[1], 0.0, s)
        key_past, value_past = key_past[1:] + (loaded[0],), value_past[1:] + (loaded[1],)
        out, factor, old = _take_token(loaded, old, sums, taps, factors, s)
        out = norm_head(out, factor, s, DTYPE)
        tl.store(y + token * STRIDE, tl.reshape(out, values.shape).to(DTYPE), mask=is_first)
        tl.store(kept[0] + token * s.gates, loaded[3])  # all threads have read the old ones
        tl.store(kept[1] + token * s.gates, loaded[4])
    zeros = tl.zeros_like(values).to(DTYPE)
    for token in range(count, tokens):
        tl.store(y + token * STRIDE, zeros, mask=is_first)


# Grid [H, B]. State, pending tokens, weights, position and last are loaded before the wait for the
# projections, which make qkv and the gates. So are pending tokens taken in, of which there are none
# after another call of one token.
#
# One token is taken in at once, and the state is stored. Several tokens become the pending ones:
# the state after them is not stored. If they are neither read at once nor a chunk, a token is
# loaded while the one before it is taken in. qkv None: there are no tokens, and none are pending
# afterwards.
#
# Triton loads a tile with fewer numbers than threads once more in each layout that it is used in.
# For q and k that would be 16 loads a thread for each tap (120 spills on sm_90). Hence they are one
# tile of 2 Ck numbers, or two copies of it, with as many numbers as threads.
#
# The inputs of v, gates and `first` belong to the head. Those of q and k are read by the programs
# of all H / K value heads of a key head; `arrivals` counts them, and the last to have read them
# moves them on. No program waits. There is no race:
# - The counter's addition has an operand that is always 1, but is computed from all that the
#   program has read of q's and k's inputs. So these loads have returned to registers, in all
#   threads, before the addition is issued. A barrier alone would not wait for them.
# - The last program's stores depend on the result of its addition, which follows all others. So
#   it is relaxed: a release waits for the state too, an acquire empties L1.
# - The last program sets the counter to 0, also without a token, for the next token's kernel.
@jit
def _update_heads(qkv, gates, memory, arrivals, y, tokens, s: tl.constexpr, PDL: tl.constexpr):
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
        b, a = _find_pending(pending, row, token, head, s)
        decay, share = decay_and_share(tl.load(b), tl.load(a), rate, bias)
        _, old = read_and_update(old, qk, v, decay, share, s)
        read ^= qk.to(tl.int32, bitcast=True)
    if not s.is_one:  # noqa: SIM102  (known at compile time)
        if accepted > 0:
            tl.store(state, tl.reshape(old, state.shape))
    newest = window + accepted * s.channels
    key_inputs = load_past(newest, keys, s)
    key_past = sum_past(key_inputs, key_taps, 0.0, s)
    if s.joint > 0:
        value_inputs, value_past = load_before(newest, values, value_taps, lane_row, s)
    else:
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
    if qkv is not None:
        qkv += sequence * tokens * s.row
        found = _find_gates(gates, sequence, tokens, head, s)
        if s.plane_tokens == 0:
            y += (sequence * tokens * H + head) * CV + (0 if s.own > 0 else columns)
    begin, changes = place * 0, True
    if s.is_one:
        DTYPE: tl.constexpr = y.dtype.element_ty
        loaded = _load_token(qkv, found, keys, values, 0, s)
        out, factor, new = _take_token(loaded, old, (key_past, value_past), taps, factors, s)
        if exists:  # first, so that the store is in flight while the head is normalized
            tl.store(state, tl.reshape(new, state.shape))
        out = norm_head(out, factor, s, DTYPE)
        tl.store(y, tl.reshape(out, values.shape).to(DTYPE), mask=is_first)
        changes = first > 0
        value_inputs, key_inputs = value_inputs[1:] + loaded[1:2], key_inputs[1:] + loaded[:1]
    elif qkv is not None:
        begin, kept = place + 1, _find_pending(pending, row, 0, head, s)
        if s.own > 0:
            own_keys, counts = (keys, key_taps, key_inputs), (real, tokens)
            kept = window, kept, s.first_value + head * CV
            read_few(qkv, found, y, few, own_keys, factors, kept, counts, moves_keys, s)
        elif s.joint > 0:
            past, places = (key_inputs, value_inputs, value_past), (keys, values, lane_row)
            kept = window, kept[0], kept[1]
            read_joint(qkv, found, y, old, past, taps, factors, places, kept, real, moves_keys, s)
        else:
            past = key_inputs, value_inputs
            _read_tokens(qkv, found, y, old, past, taps, factors, places, kept, real, tokens, s)
    if exists:
        if changes:
            tl.store(pending.first + row * H + head, begin)
        if s.own + s.joint == 0:  # else it is done
            keep_inputs(window, value_inputs, qkv, values, tokens, is_first, s)
            if moves_keys:
                keep_inputs(window, key_inputs, qkv, keys, tokens, None, s)
    if moves_keys:
        tl.store(arrivals, 0)


# Grid [H, B, L]: `_update_heads` without tokens, in all layers. memory, arrivals, offsets: as of
# `memory_of_layer`.
@jit
def _settle_heads(memory, arrivals, offsets, s: tl.constexpr):
    own, weights, arrivals = memory_of_layer(memory, arrivals, offsets)
    pending = Pending(own[1], own[2], own[3], memory.pending.row)
    memory = Memory(own[0], pending, DeltaWeights(*weights), memory.positions, memory.last)
    _update_heads(None, None, memory, arrivals, None, 1, s, False)


def launch_tokens(
    qkv: Tensor,
    gates: list[Tensor],
    state: Tensor,
    pending: list[Tensor],
    weights: list[Tensor],
    positions: Tensor,
    last: Tensor | None,
    arrivals: Tensor,
    eps: float,
    sigmoid_gate: bool = False,
    planes: Planes | None = None,
) -> Tensor | None:
    """Do all between the projections of a Gated DeltaNet layer, for T tokens of each sequence.

    qkv [B, T, N]: q, k and v before the convolution. gates: a `Gates`. weights: a `DeltaWeights`.
    eps: of the gated norm. sigmoid_gate: its activation, else SiLU. Return [B, T, H Cv]; or store
    that in planes of B T tokens, if `stores_planes` says so.

    The real tokens are those up to index last [B] (`model.Context.last`); None: all. positions
    int64 [B, T]. state fp32 [B, H, Ck, Cv] takes in the pending tokens before them, in place, and
    one token, too. Several tokens become the pending ones, T <= M. pending: a `Pending`. Ck and Cv
    are powers of two (`kernels_support`).

    arrivals int32 [B, K]: zeros, a scratch of this layer's alone, and zeros again afterwards. All
    that is updated may have more than B rows. Raises ValueError for a wrong shape.
    """
    (B, T, _), (H, CK, CV), (N, W) = qkv.shape, state.shape[1:], weights[0].shape
    M, K, decays = pending[1].shape[1], arrivals.shape[1], len(weights[2])
    check_shapes(
        qkv=(qkv, (B, T, 2 * K * CK + H * CV)),
        b=(gates[0], (B, T, H)),
        a=(gates[1], (B, T, decays)),
        output=(gates[2], (B, T, H * CV)),
        positions=(positions, (B, T)),
        inputs=(pending[0], (len(state), W - 1 + M, N)),
        norm=(weights[3], (CV,)),
    )
    if T > M:
        raise ValueError(f"{T} tokens, of which only {M} can be pending")
    qkv, *own = map(with_even_rows, (qkv, *gates))
    rows = (x.stride(1) for x in (qkv, *own))
    s = DeltaSettings(K, H, CK, CV, W, eps, T == 1, M, decays > H, *rows, sigmoid_gate)
    s = replace(s, **chunk_of(T, s, qkv.dtype))
    memory = Memory(state, Pending(*pending), DeltaWeights(*weights), positions.contiguous(), last)
    if planes is not None:
        s = replace(s, plane_tokens=B * T)
    y = qkv.new_empty(B, T, H * CV) if planes is None else None
    tensors = qkv, Gates(*own), memory, arrivals, planes or y
    launch(_update_heads, (H, B), *tensors, T, settings=s, warps=WARPS)
    return y


@custom_op("moe_fast::delta_tokens", mutates_args=("state", "pending", "arrivals"))
def delta_tokens(
    qkv: Tensor,
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
    """`launch_tokens` without planes, as an operator."""
    tokens = qkv, gates, state, pending, weights
    return launch_tokens(*tokens, positions, last, arrivals, eps, sigmoid_gate)


def stores_planes(sizes: NamedTuple, tokens: int) -> bool:
    """Whether a layer of these `DeltaSizes` stores planes of this many tokens of a sequence.

    Those that are read at once, of heads that are a group each.
    """
    s = DeltaSettings(*sizes, eps=0.0, is_one=tokens == 1, most=tokens, channel_decay=False)
    return sizes.value_dim == GROUP and "joint" in chunk_of(tokens, s, torch.bfloat16)


def chunk_of(tokens: int, s: DeltaSettings, dtype: torch.dtype) -> dict:
    """Return how a call's tokens are computed: settings of `DeltaSettings`."""
    most = 0 if s.channel_decay or s.width > s.lane_rows else min(MOST_JOINT, LEAST_CHUNK - 1)
    if 1 < tokens <= most:
        return dict(joint=tokens)
    if tokens < LEAST_CHUNK or s.channel_decay or dtype not in CHUNK_PRECISION:
        return {}
    return dict(own=pow2(tokens), precision=CHUNK_PRECISION[dtype])


@delta_tokens.register_fake
def _(qkv: Tensor, gates: list[Tensor], state: Tensor, *rest) -> Tensor:
    B, T, _ = qkv.shape
    return qkv.new_empty(B, T, state.shape[1] * state.shape[3])


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

    A sequence without a real token stays as it is (last: as in `delta_tokens`). row int64 [B]: the
    rows of the sequences; None: the first. The rest is as for `delta_tokens`.
    """
    w, (H, CK, CV), K = DeltaWeights(*weights), state.shape[1:], arrivals.shape[1]
    if kernels_support(state):
        s = settings_of_none(state, pending, w, arrivals)
        memory = Memory(state, Pending(*pending, row), w, position.contiguous(), last)
        tensors = None, None, memory, arrivals, None
        launch(_update_heads, (H, len(position)), *tensors, 1, settings=s, warps=WARPS)
        return

    def advance(y: Tensor, ba: Tensor, last: Tensor, new: Tensor) -> None:
        q, k, v = y.split((K * CK, K * CK, H * CV), dim=-1)
        q, k = (part.unflatten(-1, (K, CK)) for part in (q, k))
        gated_delta_chunk(q, k, v.unflatten(-1, (H, CV)), ba, w.a_log, w.dt_bias, last, new)

    take_in_plain(state, pending, w, position, last, row, advance)


def settings_of_none(
    state: Tensor, pending: Sequence[Tensor], weights: DeltaWeights, arrivals: Tensor
) -> DeltaSettings:
    """Return the settings of a call without tokens."""
    (H, CK, CV), W, M = state.shape[1:], weights.conv.shape[1], pending[1].shape[1]
    return DeltaSettings(
        *(arrivals.shape[1], H, CK, CV, W, 0.0, False, M), len(weights.dt_bias) > H
    )


def settle(layer: Sequence[Tensor], offsets: Tensor, position: Tensor, last: Tensor | None) -> None:
    """Do what `take_in_pending` does for the first sequences, in all layers by one kernel.

    layer: the state, the pending tokens, the weights and arrivals of the first layer; offsets: of
    all (`layer_offsets`).
    """
    state, pending, weights, arrivals = layer[0], layer[1:4], DeltaWeights(*layer[4:-1]), layer[-1]
    s = settings_of_none(state, pending, weights, arrivals)
    memory = Memory(state, Pending(*pending), weights, position, last)
    grid = s.heads, len(position), len(offsets)
    options = dict(warps=WARPS, registers=128)  # two programs a multiprocessor
    launch(_settle_heads, grid, memory, arrivals, offsets, settings=s, **options)
