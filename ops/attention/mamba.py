"""Mamba-2 for 1 to 16 tokens of each sequence, from the projections to before the norm.

A program has some rows of a head's state, so that there are many programs. The norm is over all
heads of a group, so the next product norms its x (ops/products/dense.py). A join of the programs
here would cost a round trip through memory for the counter, and one for the results.

Several tokens are pending after their call, as in ops/attention/delta.py. Prompts:
ops/attention/delta_prompt.py.

Formulas, letters and the reference: ops/plain/mamba2.py. C channels of the convolution: x [H P],
then B and C [G N] each; W its width; T tokens, of which a sequence's first `last` + 1 are real; M
tokens that may be pending.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ops.attention.delta_prompt import state_space_chunk
from ops.attention.delta_state import (
    Memory,
    Pending,
    convolve,
    count_accepted,
    count_real,
    fit_tiles,
    keep_inputs,
    load_past,
    load_taps,
    memory_of_layer,
    memory_row,
    softplus,
    sum_past,
    with_even_rows,
)
from ops.inductor import custom_op
from ops.launch import await_previous, can_launch, check_shapes, jit, launch, tl, triton
from ops.plain.pending import take_in_plain

ROWS = 32  # most rows of a head's state in a program
WARPS = 4


class MambaWeights(NamedTuple):
    """A layer's weights between its projections."""

    conv: Tensor  # [C, W]
    conv_bias: Tensor  # [C]
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    skip: Tensor  # D [H]


@dataclass(frozen=True)
class MambaSettings:
    """A layer's sizes, and how the kernel divides the state: s."""

    heads: int
    head_dim: int
    groups: int
    state: int  # numbers of a row
    width: int
    is_one: bool  # a call has one token
    most: int  # M
    row: int  # numbers from one token's zx to the next one's
    dt_row: int

    inner = property(lambda s: s.heads * s.head_dim)
    channels = property(lambda s: s.inner + 2 * s.groups * s.state)
    sharing = property(lambda s: s.heads // s.groups)  # heads of a group
    rows = property(lambda s: min(ROWS, s.head_dim))
    blocks = property(lambda s: s.head_dim // s.rows)  # programs of a head
    threads = property(lambda s: 32 * WARPS)
    padded_sharing = property(lambda s: triton.next_power_of_2(s.sharing))


# Channels, taps, inputs before a token: each a tuple of those of x, of B, and of C.


@jit
def _decay_and_add(old, x, b, step, rate, s: tl.constexpr):
    """Return the state after a token. x: one row a thread."""
    x = tl.gather(x * step, tl.arange(0, s.rows), 0)
    return old * tl.exp(-rate * step) + x[:, None] * b[None, :]


@jit
def _move(past, new):
    """Return the last W - 1 inputs of each tuple, of which `new` has the newest."""
    return [past[i][1:] + (new[i],) for i in (0, 1, 2)]


@jit
def _convolve(new, past, convolution, s: tl.constexpr):
    """Convolve a token's inputs of each tuple. past: the last W - 1. convolution: taps, biases."""
    taps, biases = convolution
    return [
        convolve(new[i], sum_past(past[i], taps[i], biases[i], s), taps[i], s) for i in (0, 1, 2)
    ]


@jit
def _take_token(token, old, past, channels, convolution, head, s: tl.constexpr):
    """Take in a token of the call.

    Return the state, the token's inputs, and x, C and silu(gate): `_read` takes these. token: where
    its inputs and step sizes are. head: its number, the decay's rate, the step's bias.
    """
    own, dt = token
    number, rate, bias = head
    new = [tl.load(own + at) for at in channels]
    gate = tl.load(own - s.inner + channels[0]).to(tl.float32)
    step = softplus(tl.load(dt + number).to(tl.float32) + bias)
    x, b, c = _convolve(new, past, convolution, s)
    old = _decay_and_add(old, x, b, step, rate, s)
    return old, new, (x, c, gate * tl.sigmoid(gate))


@jit
def _read(old, reading, skip, s: tl.constexpr):
    """Return what a token reads from the state, times silu(gate): one row a thread, as x."""
    x, c, gate = reading
    read = tl.gather(tl.sum(old * c[None, :], 1), tl.arange(0, s.threads) % s.rows, 0)
    return (read + skip * x) * gate


@jit
def _keep_first(pending, dt, row, group, place, tokens, s: tl.constexpr):
    """Store where the pending tokens begin, and what gives their step sizes. dt None: none are."""
    heads = tl.arange(0, s.padded_sharing)
    exists, heads = heads < s.sharing, group * s.sharing + heads
    begin = place * 0
    if not s.is_one:  # noqa: SIM102  (known at compile time)
        if dt is not None:
            begin = place + 1
            for token in range(tokens):
                number = tl.load(dt + token * s.dt_row + heads, mask=exists)
                stored = pending.gates + (row * s.most + token) * s.heads
                tl.store(stored + heads, number, mask=exists)
    tl.store(pending.first + row * s.heads + heads, begin + 0 * heads, mask=exists)


# Grid [H * blocks, B]. zx and dt are waited for. State, pending tokens, weights, position and last
# are loaded before that, and pending tokens are taken in. One token is taken in at once, and the
# state is stored. Several become the pending ones; zx None: there are none.
#
# A program alone reads and writes its rows of the state, and their channels of x. Those of B and C,
# dt and `first` are read by all programs of a group, before the wait. `arrivals` counts the
# programs that have read them; the last one updates them after the wait, and sets the counter to 0.
# No program waits for another, and the counter's result is not needed before the end. There is no
# race: loads come before the barrier, and one thread's addition follows that; in the order of
# causality they are before what any thread of the last program stores.
@jit
def _update_heads_of_groups(
    zx, dt, memory, arrivals, y, tokens, s: tl.constexpr, PDL: tl.constexpr
):
    state, pending, weights, positions, last = memory
    head, sequence = tl.program_id(0) // s.blocks, tl.program_id(1).to(tl.int64)
    group, row = head // s.sharing, memory_row(pending, sequence)
    most_tokens = tl.maximum(tokens, 1)
    real = count_real(last, sequence, most_tokens)
    place = tl.load(positions + sequence * most_tokens)
    first = tl.load(pending.first + row * s.heads + head)
    thread, rows, n = tl.arange(0, s.threads), tl.arange(0, s.rows), tl.arange(0, s.state)
    is_own = thread < s.rows  # the others have copies
    numbers = head * s.head_dim + tl.program_id(0) % s.blocks * s.rows
    state += (row * s.inner + numbers + rows[:, None]) * s.state + n[None, :]
    old = tl.load(state)
    xs, bs = numbers + thread % s.rows, s.inner + group * s.state + n  # each thread has one x
    channels, taps, biases, kept = (xs, bs, bs + s.groups * s.state), (), (), ()
    window = pending.inputs + row * (s.width - 1 + s.most) * s.channels
    for i in tl.static_range(3):
        taps = taps + (load_taps(weights.conv, channels[i], s),)
        biases = biases + (tl.load(weights.conv_bias + channels[i]).to(tl.float32),)
        kept = kept + (load_past(window, channels[i], s),)
    rate = tl.exp(tl.load(weights.a_log + head).to(tl.float32))
    bias = tl.load(weights.dt_bias + head).to(tl.float32)
    skip = tl.load(weights.skip + head).to(tl.float32)
    accepted = count_accepted(first, place, real, s)
    for token in range(accepted):
        inputs = window + (s.width - 1 + token) * s.channels
        newest = [tl.load(inputs + at) for at in channels]
        x, b, _ = _convolve(newest, kept, (taps, biases), s)
        step = tl.load(pending.gates + (row * s.most + token) * s.heads + head).to(tl.float32)
        old = _decay_and_add(old, x, b, softplus(step + bias), rate, s)
        kept = _move(kept, newest)
    tl.debug_barrier()
    arrivals += sequence * s.groups + group
    # A tensor's addition: no thread waits for the result here.
    arrived = tl.atomic_add(arrivals + thread, 1, mask=thread == 0, sem="release", scope="gpu")
    if not s.is_one:  # noqa: SIM102  (known at compile time)
        if accepted > 0:
            tl.store(state, old)
    await_previous(PDL, zx is not None)  # early: the next product's weights are loaded beside
    own, own_dt, of_head, convolution = zx, dt, (head, rate, bias), (taps, biases)
    if zx is not None:
        own += sequence * tokens * s.row + s.inner  # the gate comes first
        own_dt += sequence * tokens * s.dt_row
        y += sequence * tokens * s.inner + xs
    if s.is_one:
        at = own, own_dt
        old, new, reading = _take_token(at, old, kept, channels, convolution, of_head, s)
        kept = _move(kept, new)
        if real > 0:
            tl.store(state, old)
        result = tl.where(real > 0, _read(old, reading, skip, s), 0.0)
        tl.store(y, result.to(y.dtype.element_ty), mask=is_own)
    elif zx is not None:
        later = kept
        for token in range(real):
            at = own + token * s.row, own_dt + token * s.dt_row
            old, new, reading = _take_token(at, old, later, channels, convolution, of_head, s)
            later = _move(later, new)
            result = _read(old, reading, skip, s).to(y.dtype.element_ty)
            tl.store(y + token * s.inner, result, mask=is_own)
        for token in range(real, tokens):
            tl.store(y + token * s.inner, tl.zeros(xs.shape, y.dtype.element_ty), mask=is_own)
    if real > 0:
        keep_inputs(window, kept[0], own, xs, tokens, is_own, s)
    if tl.max(tl.where(thread == 0, arrived, 0), 0) == s.sharing * s.blocks - 1:
        if real > 0:
            for i in tl.static_range(1, 3):
                keep_inputs(window, kept[i], own, channels[i], tokens, None, s)
            _keep_first(pending, own_dt, row, group, place, tokens, s)
        tl.store(arrivals, 0)


# Grid [H * blocks, B, L]: `_update_heads_of_groups` without tokens, in all layers, as
# `ops.attention.delta._settle_heads`.
@jit
def _settle_groups(memory, arrivals, offsets, s: tl.constexpr):
    own, weights, arrivals = memory_of_layer(memory, arrivals, offsets)
    pending = Pending(own[1], own[2], own[3], memory.pending.row)
    memory = Memory(own[0], pending, MambaWeights(*weights), memory.positions, memory.last)
    _update_heads_of_groups(None, None, memory, arrivals, None, 0, s, False)


@custom_op("moe_fast::mamba_tokens", mutates_args=("state", "pending", "arrivals"))
def mamba_tokens(
    zx: Tensor,
    dt: Tensor,
    state: Tensor,
    pending: list[Tensor],
    weights: list[Tensor],
    positions: Tensor,
    last: Tensor | None,
    arrivals: Tensor,
) -> Tensor:
    """Do all of a Mamba-2 layer from its projections to its norm, for T tokens of each sequence.

    zx [B, T, H P + C]: the gate, then x, B and C before the convolution. dt [B, T, H]. weights: a
    `MambaWeights`. state fp32 [B, H, P, N]. arrivals int32 [B, G]. The rest is as for
    `delta.delta_tokens`. Return [B, T, H P], times silu(gate) and not yet normed.
    """
    (B, T, _), (H, P, N), (C, W) = zx.shape, state.shape[1:], weights[0].shape
    M, groups = pending[1].shape[1], (C - H * P) // (2 * N)
    check_shapes(
        zx=(zx, (B, T, H * P + C)),
        dt=(dt, (B, T, H)),
        positions=(positions, (B, T)),
        inputs=(pending[0], (len(state), W - 1 + M, H * P + 2 * groups * N)),
        skip=(weights[4], (H,)),
    )
    if T > M:
        raise ValueError(f"{T} tokens, of which only {M} can be pending")
    zx, dt, positions = with_even_rows(zx), with_even_rows(dt), positions.contiguous()
    rows = zx.stride(1), dt.stride(1)
    s = MambaSettings(H, P, groups, N, W, T == 1, M, *rows)
    y = zx.new_empty(B, T, H * P)
    memory = Memory(state, Pending(*pending), MambaWeights(*weights), positions, last)
    tensors, grid = (zx, dt, memory, arrivals, y), (H * s.blocks, B)
    launch(_update_heads_of_groups, grid, *tensors, T, settings=s, warps=WARPS)
    return y


@mamba_tokens.register_fake
def _(zx: Tensor, dt: Tensor, state: Tensor, *rest) -> Tensor:
    return zx.new_empty(*dt.shape[:2], state.shape[1] * state.shape[2])


def kernels_support(state: Tensor) -> bool:
    """Whether the kernel runs on the GPU of state [B, H, P, N], with sizes that fit its tiles."""
    return fit_tiles(*state.shape[2:], most=256) and can_launch(state, "_update_heads_of_groups")


# Pending tokens before a call that takes in none: prompts, and the plain form.


@custom_op("moe_fast::mamba_take_in", mutates_args=("state", "pending", "arrivals"))
def take_in_pending(
    state: Tensor,
    pending: list[Tensor],
    weights: list[Tensor],
    position: Tensor,
    last: Tensor | None,
    row: Tensor | None,
    arrivals: Tensor,
) -> None:
    """Do what `delta.take_in_pending` does; the arguments are as for `mamba_tokens`."""
    w, (H, P, N), groups = MambaWeights(*weights), state.shape[1:], arrivals.shape[1]
    if kernels_support(state):
        s = settings_of_none(state, pending, w, arrivals)
        memory = Memory(state, Pending(*pending, row), w, position.contiguous(), last)
        tensors, grid = (None, None, memory, arrivals, None), (H * s.blocks, len(position))
        launch(_update_heads_of_groups, grid, *tensors, 0, settings=s, warps=WARPS)
        return

    def advance(y: Tensor, dt: Tensor, last: Tensor, new: Tensor) -> None:
        x, b, c = y.split((H * P, groups * N, groups * N), dim=-1)
        b, c = (each.unflatten(-1, (groups, N)) for each in (b, c))
        rule = w.a_log, w.dt_bias, w.skip, last
        state_space_chunk(x.unflatten(-1, (H, P)), b, c, dt, *rule, new)

    take_in_plain(state, pending, w, position, last, row, advance)


def settings_of_none(
    state: Tensor, pending: Sequence[Tensor], weights: MambaWeights, arrivals: Tensor
) -> MambaSettings:
    """Return the settings of a call without tokens."""
    (H, P, N), W, M = state.shape[1:], weights.conv.shape[1], pending[1].shape[1]
    return MambaSettings(H, P, arrivals.shape[1], N, W, False, M, 0, 0)


def settle(layer: Sequence[Tensor], offsets: Tensor, position: Tensor, last: Tensor | None) -> None:
    """Do what `delta.settle` does."""
    state, pending, weights, arrivals = layer[0], layer[1:4], MambaWeights(*layer[4:-1]), layer[-1]
    s = settings_of_none(state, pending, weights, arrivals)
    memory = Memory(state, Pending(*pending), weights, position, last)
    grid = s.heads * s.blocks, len(position), len(offsets)
    launch(_settle_groups, grid, memory, arrivals, offsets, settings=s, warps=WARPS)
