"""Recurrent layers' prompts: kernels of the gated delta rule, and of Mamba-2's recurrence.

`_solve_chunk` solves the triangular systems of all chunks, in parallel. `_scan_chunks` walks over
the chunks of a head with some columns of the state in registers. Columns never meet, so each
program has its own. Mamba-2 corrects nothing, so it has no systems: `_scan_chunks` alone computes
it, with C, B and x as queries, keys and values.

Layers call `gated_delta_chunk` and `state_space_chunk`: these run the kernels where they can, else
PyTorch. Formulas, letters and the references: ops/plain/gated_delta.py and ops/plain/mamba2.py.
Convolution and norms: ops/attention/recurrent_parts.py.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention.delta_channels import Decayed, decay_channels
from ops.attention.delta_chunk import decay_between, dot_fp32, invert_unit_lower
from ops.attention.delta_state import (
    COLUMNS,
    decays_and_shares,
    find_gates,
    fit_tiles,
    with_even_rows,
)
from ops.inductor import custom_op
from ops.launch import can_launch, check_shapes, fit, jit, launch, tl, try_kernels
from ops.plain.gated_delta import chunk_in_torch, masked_gates_in_torch
from ops.plain.mamba2 import ssm_chunk
from ops.plain.pending import in_place
from ops.sizes import cdiv, pow2

# How tensor cores multiply fp32: "tf32" is one product with 10 bits of mantissa, "tf32x3" three,
# about as exact as fp32. Models in fp32 take three. Of others only the state's update does (of bf16
# parts, if keys are bf16), since its errors add up over the chunks; benchmarks/gated_delta.py
# measures both.
PRECISION = "tf32"
CHUNK = 64  # tokens that one triangular system covers: 16, 32 or 64


@dataclass(frozen=True)
class RuleSettings:
    """Sizes of a layer, and how programs divide a prompt: s."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    columns: int  # each program has these many of the state's
    gate_row: int  # numbers from one token's ba to the next one's
    precision: str = "tf32"
    rows: int = 1  # tokens of a chunk
    is_delta: bool = True  # else Mamba-2
    channel_decay: bool = False  # a head has a decay for each channel

    shares = property(lambda s: s.heads if s.is_delta else 0)  # numbers b of a token, before a
    sharing = property(lambda s: s.heads // s.key_heads)  # heads that share a key head
    levels = property(lambda s: s.rows.bit_length() - 1)  # how often a chunk can be halved
    block = property(lambda s: min(s.key_dim, 32))  # channels that `_decay_channels` has at once
    query_scale = property(lambda s: s.key_dim**-0.5 if s.is_delta else 1.0)
    # How far a channel of the state is from the next one; Mamba-2 has it transposed.
    channel_step = property(lambda s: s.value_dim if s.is_delta else 1)
    column_step = property(lambda s: 1 if s.is_delta else s.key_dim)


class Tokens(NamedTuple):
    """A prompt of the delta rule, or in its names one of Mamba-2."""

    q: Tensor  # [B, Q, K, Ck]; C
    k: Tensor  # [B, Q, K, Ck]; B
    v: Tensor  # [B, Q, H, Cv]; x
    ba: Tensor  # [B, Q, H + H] or [B, Q, H + H Ck], b then a; dt [B, Q, H]
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H] or [H Ck]
    last: Tensor | None  # int64 [B]: the last real tokens; None: all are
    skip: Tensor | None = None  # D [H], of Mamba-2 alone


class Systems(NamedTuple):
    """What `_solve_chunk` makes of each chunk, fp32; `chunk_in_torch` has the names, too."""

    solved_values: Tensor  # [B, H, chunks, T, Cv]
    solved_keys: Tensor  # [B, H, chunks, T, Ck]
    scores: Tensor  # [B, H, chunks, T, T]
    decayed: Decayed | None = None  # of channels, each with a decay; else the two tensors below
    factors: Tensor | None = None  # [B, H, chunks, 2, T]: of what queries read, and of corrections
    kept: Tensor | None = None  # [B, H, chunks]: the decay of the whole chunk


@jit
def _load_tokens(x, rows, row_stride, is_real, s: tl.constexpr):
    """Load tokens of one head at x -> [T, Ck] as stored."""
    offsets = rows[:, None] * row_stride + tl.arange(0, s.key_dim)[None, :]
    return tl.load(x + offsets, mask=is_real[:, None], other=0.0)


@jit
def _inverse_norm(x):
    """Return 1 / the L2 norm of each row of x [T, C]."""
    squares = x.to(tl.float32) * x.to(tl.float32)
    return tl.rsqrt(tl.sum(squares, 1) + 1e-6)


@jit
def _store_solved(right, x, solved, is_real, C: tl.constexpr, PRECISION: tl.constexpr):
    """Store right @ x [T, C] at `solved`, in blocks of columns: all do not fit into registers."""
    BLOCK: tl.constexpr = min(C, 64)
    for begin in tl.static_range(0, C, BLOCK):
        c = begin + tl.arange(0, BLOCK)[None, :]
        tokens = tl.load(x + c, mask=is_real[:, None], other=0.0)
        sums = tl.zeros([right.shape[0], BLOCK], tl.float32)
        if BLOCK < 64:  # as in `_take_in`
            sums = tl.dot(right, tokens.to(tl.float32), sums, input_precision="tf32x3")
        else:
            sums = dot_fp32(right, tokens, sums, PRECISION)
        tl.store(solved + c, sums)


# Grid [chunks, H, B].
@jit
def _solve_chunk(tokens, systems, Q, QK_BATCH, QK_TOKEN, V_BATCH, V_TOKEN, s: tl.constexpr):
    CK: tl.constexpr = s.key_dim
    CV: tl.constexpr = s.value_dim
    T: tl.constexpr = s.rows
    PRECISION: tl.constexpr = s.precision
    chunk, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks, i = tl.num_programs(0), tl.arange(0, T)
    rows = chunk * T + i
    is_real, row, column = rows < Q, i[:, None], i[None, :]
    g, beta = decays_and_shares(find_gates(tokens, sequence, head, Q, s), rows, s)
    place = ((sequence * s.heads + head) * chunks + chunk) * T + row
    if s.channel_decay:
        products = tl.load(systems.decayed.products + (place * T + column))
        inverse = invert_unit_lower(beta[:, None] * products, s.levels, PRECISION)
        right, keys, is_kept = inverse * beta[None, :], systems.decayed.begun + place * CK, i < T
    else:
        total, whole = tl.cumsum(g, 0), tl.sum(g, 0)
        key = sequence * QK_BATCH + (head // s.sharing) * CK
        queries = _load_tokens(tokens.q + key, rows, QK_TOKEN, is_real, s)
        x = _load_tokens(tokens.k + key, rows, QK_TOKEN, is_real, s)
        q_scale, k_scale = _inverse_norm(queries) * s.query_scale, _inverse_norm(x)
        first = (sequence * s.heads + head) * chunks + chunk
        tl.store(systems.factors + (first * 2 * T + i), q_scale * tl.exp(total))
        tl.store(systems.factors + (first * 2 * T + T + i), k_scale * tl.exp(whole - total))
        tl.store(systems.kept + first, tl.exp(whole))
        decay = decay_between(total) * k_scale[None, :]
        products = tl.dot(queries, tl.trans(x), input_precision=PRECISION) * decay
        products *= q_scale[:, None]
        tl.store(systems.scores + place * T + column, products)
        products = tl.dot(x, tl.trans(x), input_precision=PRECISION) * decay
        system = tl.where(row > column, (beta * k_scale)[:, None] * products, 0.0)
        inverse = invert_unit_lower(system, s.levels, PRECISION)
        right, is_kept = inverse * (beta * tl.exp(total) * k_scale)[None, :], is_real
        keys = tokens.k + key + rows[:, None] * QK_TOKEN
    _store_solved(right, keys, systems.solved_keys + place * CK, is_kept, CK, PRECISION)
    right = inverse * beta[None, :]
    v = tokens.v + sequence * V_BATCH + head * CV + rows[:, None] * V_TOKEN
    _store_solved(right, v, systems.solved_values + place * CV, is_real, CV, PRECISION)


@jit
def _take_in(state, written, rest, correction, remains, s: tl.constexpr):
    """Return the state after a chunk. written: its keys [T, Ck]. rest: their bits below bf16's."""
    # The transposed sum: of a right factor in 16 bits with rows of less than 128 bytes, as
    # corrections are, code of Triton 3.6 for sm_90 reads shared memory out of bounds.
    change = tl.zeros([s.columns, s.key_dim], tl.float32)
    correction = tl.trans(correction)
    if rest is not None:
        change = tl.dot(correction.to(tl.bfloat16), rest, change)
    change = dot_fp32(correction, written, change, "tf32x3")
    return state * remains + tl.trans(change)


# Grid [Cv / columns, H, B]. The state stays in registers from the first chunk to the last.
# A program alone reads and writes its columns, in place.
@jit
def _scan_chunks(
    tokens, systems, memory, row, out, Q, QK_BATCH, QK_TOKEN, V_BATCH, V_TOKEN, s: tl.constexpr
):
    H: tl.constexpr = s.heads
    CK: tl.constexpr = s.key_dim
    CV: tl.constexpr = s.value_dim
    T: tl.constexpr = s.rows
    COLUMNS: tl.constexpr = s.columns
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, c = tl.arange(0, T), tl.arange(0, CK)
    chunks = (Q + T - 1) // T
    memory += ((tl.load(row + sequence) if row is not None else sequence) * H + head) * CK * CV
    memory += c[:, None] * s.channel_step + columns * s.column_step
    state = tl.load(memory)
    key = sequence * QK_BATCH + (head // s.sharing) * CK
    first = (sequence * H + head) * chunks
    place = first * T + i[:, None]
    if s.is_delta:
        values = systems.solved_values + (place * CV + columns)
        keys = systems.solved_keys + (place * CK + c[None, :])
        scores = systems.scores + (place * T + i[None, :])
    else:
        skip = tl.load(tokens.skip + head).to(tl.float32)
        gates = find_gates(tokens, sequence, head, Q, s)
    if s.channel_decay:
        decayed, kept = place * CK + c[None, :], (sequence * H + head) * chunks * CK + c[:, None]
    for chunk in range(0, chunks):
        rows = chunk * T + i
        is_real = rows < Q
        if s.is_delta:
            correction = tl.load(values) - tl.dot(tl.load(keys), state, input_precision=s.precision)
        if s.channel_decay:
            y = tl.zeros([T, COLUMNS], tl.float32)
            y = dot_fp32(tl.load(systems.decayed.queries + decayed), state, y, s.precision)
        else:
            if s.is_delta:
                factors = systems.factors + (first + chunk) * 2 * T + i
                read, write = tl.load(factors), tl.load(factors + T)
                remains = tl.load(systems.kept + first + chunk)
            else:
                g, beta = decays_and_shares(gates, rows, s)
                total, whole = tl.cumsum(g, 0), tl.sum(g, 0)
                read, write, remains = tl.exp(total), tl.exp(whole - total), tl.exp(whole)
            queries = _load_tokens(tokens.q + key, rows, QK_TOKEN, is_real, s)
            y = dot_fp32(queries, state, tl.zeros([T, COLUMNS], tl.float32), s.precision)
            y *= read[:, None]
        if s.is_delta:
            products = tl.load(scores)
        else:
            written = _load_tokens(tokens.k + key, rows, QK_TOKEN, is_real, s)
            products = tl.dot(queries, tl.trans(written), input_precision=s.precision)
            products *= decay_between(total)
            x = tokens.v + sequence * V_BATCH + rows[:, None] * V_TOKEN + head * CV + columns
            x = tl.load(x, mask=is_real[:, None], other=0.0).to(tl.float32)
            y += skip * x
            correction = x * beta[:, None]
        y = tl.dot(products, correction, y, input_precision=s.precision)
        y_offsets = ((sequence * Q + rows[:, None]) * H + head) * CV + columns
        tl.store(out + y_offsets, y.to(out.dtype.element_ty), mask=is_real[:, None])
        if s.channel_decay:
            rest = None
            if systems.decayed.rest is not None:
                rest = tl.load(systems.decayed.rest + decayed)
            written = tl.load(systems.decayed.keys + decayed)
            remains = tl.load(systems.decayed.kept + kept)
            state = _take_in(state, written, rest, correction, remains, s)
            decayed += T * CK
            kept += CK
        else:
            # Mamba-2's again: kept in registers until here, they were spilled.
            written = _load_tokens(tokens.k + key, rows, QK_TOKEN, is_real, s)
            correction *= write[:, None]
            state = _take_in(state, written, None, correction, remains, s)
        if s.is_delta:
            values += T * CV
            keys += T * CK
            scores += T * T
    tl.store(memory, state)


@custom_op("moe_fast::gated_delta_chunk", mutates_args=("state",))
def gated_delta_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ba: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    last: Tensor | None,
    state: Tensor,
    row: Tensor | None = None,
) -> Tensor:
    """`chunk_in_torch` by kernels where they run; the state [.., H, Ck, Cv] is updated in place.

    ba, a_log, dt_bias and last give g and beta: as in `masked_gates_in_torch`. row int64 [B]: the
    rows of the sequences; None: the state has theirs alone. A custom operator, so that Dynamo does
    not specialize on the number of tokens.
    """
    arguments = q, k, v, ba, a_log, dt_bias, last, state, row
    if can_launch(q) and fit_tiles(q.shape[-1], v.shape[-1]):
        return try_kernels("delta rule", launch_delta_chunk, delta_chunk_in_torch, *arguments)
    return delta_chunk_in_torch(*arguments)


@gated_delta_chunk.register_fake
def _(q, k, v, *rest) -> Tensor:
    return v.new_empty(v.shape)


def delta_chunk_in_torch(q, k, v, ba, a_log, dt_bias, last, state, row) -> Tensor:
    """`gated_delta_chunk` in PyTorch."""
    gates = masked_gates_in_torch(ba, a_log, dt_bias, last)
    return in_place(chunk_in_torch)(q, k, v, *gates, state, row)


@custom_op("moe_fast::state_space_chunk", mutates_args=("state",))
def state_space_chunk(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    last: Tensor | None,
    state: Tensor,
    row: Tensor | None = None,
) -> Tensor:
    """`ssm_chunk` by a kernel where it runs, state [.., H, P, N]; as `gated_delta_chunk`."""
    arguments = x, b, c, dt, a_log, dt_bias, skip, last, state, row
    if can_launch(x) and fit_tiles(b.shape[-1], x.shape[-1]):
        return try_kernels("state space", launch_ssm_chunk, _ssm_chunk, *arguments)
    return _ssm_chunk(*arguments)


@state_space_chunk.register_fake
def _(x, b, c, dt, a_log, dt_bias, skip, last, state, row=None) -> Tensor:
    return state.new_empty(x.shape)


def _ssm_chunk(x, b, c, dt, a_log, dt_bias, skip, last, state, row) -> Tensor:
    g, steps = masked_gates_in_torch(dt, a_log, dt_bias, last)
    return in_place(ssm_chunk)(x, b, c, steps, g, skip, state, row)


def launch_delta_chunk(q, k, v, ba, a_log, dt_bias, last, state: Tensor, row=None) -> Tensor:
    """`gated_delta_chunk` by two kernels."""
    tokens = Tokens(q, k, v, ba, a_log, dt_bias, last)
    return _launch_chunks(tokens, state, row, v.new_empty(v.shape))


def launch_ssm_chunk(x, b, c, dt, a_log, dt_bias, skip, last, state: Tensor, row=None) -> Tensor:
    """`state_space_chunk` by one kernel."""
    tokens = Tokens(c, b, x, dt, a_log, dt_bias, last, skip)
    return _launch_chunks(tokens, state, row, state.new_empty(x.shape))


def _launch_chunks(tokens: Tokens, state: Tensor, row: Tensor | None, out: Tensor) -> Tensor:
    """Return out, which this fills, and update the state. Raises ValueError."""
    q, k, v, ba, a_log, dt_bias, last, skip = tokens
    (B, Q, K, CK), (H, CV), is_delta = q.shape, v.shape[-2:], skip is None
    has_channels = len(dt_bias) > H
    check_shapes(
        k=(k, q.shape),
        ba=(ba, (B, Q, len(dt_bias) + is_delta * H)),
        dt_bias=(dt_bias, (H * (CK if has_channels else 1),)),
        state=(state, (len(state), H, CK, CV) if is_delta else (len(state), H, CV, CK)),
    )
    if not state.is_contiguous() or (row is None and len(state) != B):
        raise ValueError(f"a state of {list(state.shape)} with strides {state.stride()}")
    # The heads of each token [heads, C] follow each other in memory.
    q, k, v = (x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in (q, k, v))
    if q.stride() != k.stride():
        q, k = q.contiguous(), k.contiguous()
    tokens = Tokens(q, k, v, ba := with_even_rows(ba), a_log, dt_bias, last, skip)
    precision = "tf32x3" if q.dtype == torch.float32 else PRECISION
    sizes = H, K, CK, CV, min(COLUMNS, CV), ba.stride(1)
    layer = RuleSettings(*sizes, precision, 1, is_delta, has_channels)
    sizes = Q, *q.stride()[:2], *v.stride()[:2]
    most = max(16, min(CHUNK, pow2(Q)))
    chunks = (T for T in (64, 32, 16) if most >= T)
    candidates = ((replace(layer, rows=T), dict(warps=4, stages=2)) for T in chunks)
    # Any fp32 tensor has the type of the systems, whose sizes follow from the chunk.
    parts = (q, q) if q.dtype == torch.bfloat16 else (state, None)
    decayed = Decayed(state, q, state, *parts, state) if layer.channel_decay else None
    of_heads = None if decayed else state
    systems = Systems(*[state] * 3, decayed, of_heads, of_heads) if is_delta else None
    s, options = fit(_scan_chunks, candidates, tokens, systems, state, row, out, *sizes)
    if systems:
        systems = _solve_chunks(tokens, state, sizes, s)
    grid, tensors = (CV // s.columns, H, B), (tokens, systems, state, row, out)
    launch(_scan_chunks, grid, *tensors, *sizes, settings=s, **options)
    return out


def _solve_chunks(
    tokens: Tokens, state: Tensor, sizes: tuple[int, ...], s: RuleSettings
) -> Systems:
    B, H = len(tokens.q), s.heads
    grid = cdiv(sizes[0], s.rows), H, B
    values, keys, scores = (
        state.new_empty(B, H, grid[0], s.rows, C) for C in (s.value_dim, s.key_dim, s.rows)
    )
    systems = Systems(values, keys, scores)
    if s.channel_decay:
        decayed = decay_channels(tokens, scores, keys, sizes[:3], s)
        systems = systems._replace(decayed=decayed)
    else:
        factors, kept = (state.new_empty(B, H, grid[0], n) for n in (2 * s.rows, 1))
        systems = systems._replace(factors=factors, kept=kept)
    launch(_solve_chunk, grid, tokens, systems, *sizes, settings=s)
    return systems
