"""Gated DeltaNet of prompts: kernels of the gated delta rule, and of what surrounds it.

`_solve_chunk` solves the triangular systems of all chunks, in parallel. `_scan_chunks` walks over
the chunks of a head with some columns of the state in registers. Columns never meet, so each
program has its own. Convolution, gates and gated norm are one kernel each in eager code; in
compiled code Inductor makes kernels of the plain forms.

Layers call `causal_conv_silu`, `delta_gates`, `gated_delta_chunk` and `gated_rms_norm`: these run
the kernels where they can, else PyTorch. Formulas, letters and the reference:
ops/plain/gated_delta.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention.delta_state import COLUMNS, fit_tiles, softplus, with_even_rows
from ops.inductor import custom_op
from ops.launch import can_launch, check_shapes, fit, jit, launch, tl, triton, try_kernels
from ops.plain.gated_delta import (
    chunk_in_torch,
    conv_silu_in_torch,
    gates_in_torch,
    norm_in_torch,
)

# How tensor cores multiply fp32: "tf32" is one product with 10 bits of mantissa, "tf32x3" three,
# about as exact as fp32. Only the state's update always takes three (of bf16 parts, if keys are
# bf16), since its errors add up over the chunks; benchmarks/gated_delta.py measures both.
PRECISION = "tf32"
CHUNK = 64  # tokens that one triangular system covers: 16, 32 or 64


@dataclass(frozen=True)
class PromptSettings:
    """Sizes of a layer that a kernel asks for, and how its programs divide a prompt."""

    heads: int = 1
    key_heads: int = 1
    key_dim: int = 1
    value_dim: int = 1
    channels: int = 1  # N
    width: int = 1  # the convolution's
    eps: float = 0.0  # the gated norm's
    rows: int = 1  # a program computes: tokens (a chunk of the rule), heads or gates
    columns: int = 1  # a program computes: of the state, or channels
    precision: str = "tf32"
    is_silu: bool = True  # the gated norm's activation; else sigmoid


class Systems(NamedTuple):
    """What `_solve_chunk` makes of each chunk, fp32; `chunk_in_torch` has the names, too."""

    solved_values: Tensor  # [B, H, chunks, T, Cv]
    solved_keys: Tensor  # [B, H, chunks, T, Ck]
    scores: Tensor  # [B, H, chunks, T, T]


@jit
def _load_tokens(x, rows, row_stride, is_real, C: tl.constexpr):
    """Load tokens of one head at x -> [T, C] as stored, and 1 / the L2 norm of each [T]."""
    offsets = rows[:, None] * row_stride + tl.arange(0, C)[None, :]
    x = tl.load(x + offsets, mask=is_real[:, None], other=0.0)
    squares = x.to(tl.float32) * x.to(tl.float32)
    return x, tl.rsqrt(tl.sum(squares, 1) + 1e-6)


@jit
def _split(x):
    """Split fp32 into three bf16 that sum to it, but for its last bit."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@jit
def _dot(x, y, sums, PRECISION: tl.constexpr):
    """sums + x @ y, of which one is fp32 and the other as stored.

    If that is bf16, products of bf16 are as exact as fp32, in half the time of tf32x3.
    """
    if x.dtype == tl.bfloat16:
        high, middle, low = _split(y)
        if PRECISION == "tf32x3":
            sums = tl.dot(x, low, sums)
        return tl.dot(x, high, tl.dot(x, middle, sums))
    elif y.dtype == tl.bfloat16:
        high, middle, low = _split(x)
        if PRECISION == "tf32x3":
            sums = tl.dot(low, y, sums)
        return tl.dot(high, y, tl.dot(middle, y, sums))
    else:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), sums, input_precision=PRECISION)


@jit
def _invert_unit_lower(system, T: tl.constexpr, PRECISION: tl.constexpr):
    """Invert I + system, which is strictly lower triangular [T, T], T = 16 to 64.

    First by substitution in all diagonal blocks of 16 at once, then by joining pairs of inverted
    blocks: [[A, 0], [C, B]] has the inverse [[A', 0], [-B' C A', B']]. Powers of the system,
    which need fewer steps, grow without bound and cancel.
    """
    i = tl.arange(0, T)
    row, column = i[:, None], i[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    blocks = tl.where(row // 16 == column // 16, system, 0.0)
    for step in range(1, 16):
        is_row = row % 16 == step
        factors = tl.sum(tl.where(is_row, blocks, 0.0), 0)  # that row of each column's block
        change = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(is_row & (row // 16 == column // 16), inverse - change[None, :], inverse)
    if T > 16:
        inverse = _join_blocks(inverse, system, row, column, 16, PRECISION)
    if T > 32:
        inverse = _join_blocks(inverse, system, row, column, 32, PRECISION)
    return inverse


@jit
def _join_blocks(inverse, system, row, column, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Join neighboring inverted blocks of SIZE."""
    between = (row // (2 * SIZE) == column // (2 * SIZE)) & (row // SIZE != column // SIZE)
    corner = tl.where(between, system, 0.0)
    product = tl.dot(corner, inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, product, input_precision=PRECISION)


@jit
def _store_solved(right, x, solved, is_real, C: tl.constexpr, PRECISION: tl.constexpr):
    """Store right @ x [T, C] at `solved`, in blocks of columns: all do not fit into registers."""
    BLOCK: tl.constexpr = min(C, 64)
    for begin in tl.static_range(0, C, BLOCK):
        c = begin + tl.arange(0, BLOCK)[None, :]
        tokens = tl.load(x + c, mask=is_real[:, None], other=0.0)
        sums = tl.zeros([right.shape[0], BLOCK], tl.float32)
        tl.store(solved + c, _dot(right, tokens, sums, PRECISION))


# Grid [chunks, H, B].
@jit
def _solve_chunk(
    q, k, v, g, beta, systems, Q, QK_BATCH, QK_TOKEN, V_BATCH, V_TOKEN, s: tl.constexpr
):
    SHARING: tl.constexpr = s.heads // s.key_heads
    CK: tl.constexpr = s.key_dim
    CV: tl.constexpr = s.value_dim
    T: tl.constexpr = s.rows
    PRECISION: tl.constexpr = s.precision
    chunk, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks, i = tl.num_programs(0), tl.arange(0, T)
    rows = chunk * T + i
    is_real, row, column = rows < Q, i[:, None], i[None, :]
    gates = (sequence * Q + rows) * s.heads + head
    g = tl.load(g + gates, mask=is_real, other=0.0)
    beta = tl.load(beta + gates, mask=is_real, other=0.0)
    total = tl.cumsum(g, 0)
    between = total[:, None] - total[None, :]
    decay = tl.exp(tl.where(row >= column, between, float("-inf")))
    key = sequence * QK_BATCH + (head // SHARING) * CK
    place = ((sequence * s.heads + head) * chunks + chunk) * T + row
    queries, q_scale = _load_tokens(q + key, rows, QK_TOKEN, is_real, CK)
    tokens, k_scale = _load_tokens(k + key, rows, QK_TOKEN, is_real, CK)
    decay *= k_scale[None, :]
    products = tl.dot(queries, tl.trans(tokens), input_precision=PRECISION) * decay
    tl.store(systems.scores + place * T + column, products * (q_scale * CK**-0.5)[:, None])
    products = tl.dot(tokens, tl.trans(tokens), input_precision=PRECISION) * decay
    system = tl.where(row > column, (beta * k_scale)[:, None] * products, 0.0)
    inverse = _invert_unit_lower(system, T, PRECISION)
    right = inverse * (beta * tl.exp(total) * k_scale)[None, :]
    k += key + rows[:, None] * QK_TOKEN
    _store_solved(right, k, systems.solved_keys + place * CK, is_real, CK, PRECISION)
    right = inverse * beta[None, :]
    v += sequence * V_BATCH + head * CV + rows[:, None] * V_TOKEN
    _store_solved(right, v, systems.solved_values + place * CV, is_real, CV, PRECISION)


# Grid [Cv / COLUMNS, H, B]. The state stays in registers from the first chunk to the last.
@jit
def _scan_chunks(q, k, g, systems, state, out, final, Q, QK_BATCH, QK_TOKEN, s: tl.constexpr):
    H: tl.constexpr = s.heads
    SHARING: tl.constexpr = s.heads // s.key_heads
    CK: tl.constexpr = s.key_dim
    CV: tl.constexpr = s.value_dim
    T: tl.constexpr = s.rows
    COLUMNS: tl.constexpr = s.columns
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, c = tl.arange(0, T), tl.arange(0, CK)
    chunks = (Q + T - 1) // T
    state_offsets = ((sequence * H + head) * CK + c[:, None]) * CV + columns
    state = tl.load(state + state_offsets)
    key = sequence * QK_BATCH + (head // SHARING) * CK
    place = (sequence * H + head) * chunks * T + i[:, None]
    values = systems.solved_values + (place * CV + columns)
    keys = systems.solved_keys + (place * CK + c[None, :])
    scores = systems.scores + (place * T + i[None, :])
    for chunk in range(0, chunks):
        rows = chunk * T + i
        is_real = rows < Q
        gates = tl.load(g + (sequence * Q + rows) * H + head, mask=is_real, other=0.0)
        total, whole = tl.cumsum(gates, 0), tl.sum(gates, 0)
        correction = tl.load(values) - tl.dot(tl.load(keys), state, input_precision=s.precision)
        queries, scale = _load_tokens(q + key, rows, QK_TOKEN, is_real, CK)
        y = _dot(queries, state, tl.zeros([T, COLUMNS], tl.float32), s.precision)
        y *= (scale * tl.exp(total) * CK**-0.5)[:, None]
        y = tl.dot(tl.load(scores), correction, y, input_precision=s.precision)
        y_offsets = ((sequence * Q + rows[:, None]) * H + head) * CV + columns
        tl.store(out + y_offsets, y.to(out.dtype.element_ty), mask=is_real[:, None])
        written, scale = _load_tokens(k + key, rows, QK_TOKEN, is_real, CK)
        correction *= (scale * tl.exp(whole - total))[:, None]
        # Transposed: of a transposed bf16 tile Triton 3.6 read shared memory out of bounds.
        change = tl.zeros([COLUMNS, CK], tl.float32)
        change = _dot(tl.trans(correction), written, change, "tf32x3")
        state = state * tl.exp(whole) + tl.trans(change)
        values += T * CV
        keys += T * CK
        scores += T * T
    tl.store(final + state_offsets, state)


@custom_op("moe_fast::gated_delta_chunk")
def gated_delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`chunk_in_torch` by kernels where they run.

    A custom operator, so that Dynamo does not specialize on the number of tokens.
    """
    arguments = q, k, v, g, beta, state
    one_decay = g.dim() == beta.dim()  # a head; the kernels have no decay for each channel
    if one_decay and can_launch(q) and fit_tiles(q.shape[-1], v.shape[-1]):
        return try_kernels("delta rule", launch_delta_chunk, chunk_in_torch, *arguments)
    return chunk_in_torch(*arguments)


@gated_delta_chunk.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


def launch_delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `chunk_in_torch` by two kernels."""
    (B, Q, K, CK), (H, CV) = q.shape, v.shape[-2:]
    check_shapes(
        k=(k, q.shape),
        g=(g, (B, Q, H)),
        beta=(beta, (B, Q, H)),
        state=(state, (B, H, CK, CV)),
    )
    q, k, v = (x if _has_whole_tokens(x) else x.contiguous() for x in (q, k, v))
    if q.stride() != k.stride():
        q, k = q.contiguous(), k.contiguous()
    g, beta = g.float().contiguous(), beta.float().contiguous()
    out, final = v.new_empty(v.shape), state.new_empty(state.shape)
    state = state.contiguous()
    token = Q, q.stride(0), q.stride(1)
    layer = PromptSettings(H, K, CK, CV, columns=min(COLUMNS, CV), precision=PRECISION)
    most = max(16, min(CHUNK, triton.next_power_of_2(Q)))
    chunks = (T for T in (64, 32, 16) if most >= T)
    candidates = ((replace(layer, rows=T), dict(warps=4, stages=2)) for T in chunks)
    # Any fp32 tensor has the type of the systems, whose sizes follow from the chunk.
    example = q, k, g, Systems(state, state, state), state, out, final, *token
    s, options = fit(_scan_chunks, candidates, *example)
    assert isinstance(s, PromptSettings)
    T, count = s.rows, triton.cdiv(Q, s.rows)
    systems = Systems(*(state.new_empty(B, H, count, T, C) for C in (CV, CK, T)))
    tensors = q, k, v, g, beta, systems, *token, v.stride(0), v.stride(1)
    launch(_solve_chunk, (count, H, B), *tensors, settings=s)
    tensors = q, k, g, systems, state, out, final, *token
    launch(_scan_chunks, (CV // s.columns, H, B), *tensors, settings=s, **options)
    return out, final


def _has_whole_tokens(x: Tensor) -> bool:
    """Whether the heads of each token of x [B, Q, heads, C] follow each other in memory."""
    return x.stride(3) == 1 and x.stride(2) == x.shape[3]


# Around the rule, in eager prompts ----------------------------------------------------------------


def _in_eager_code(name: str, launch: Callable, plain: Callable, x: Tensor, *arguments):
    """Return launch(x, *arguments) where x is on a GPU and each operation would be a kernel."""
    if can_launch(x) and not torch.compiler.is_compiling():
        return try_kernels(name, launch, plain, x, *arguments)
    return plain(x, *arguments)


# Grid [N / columns, Q / rows, B].
@jit
def _convolve_prompt(x, window, weight, y, Q, X_BATCH, X_TOKEN, s: tl.constexpr):
    N: tl.constexpr = s.channels
    W: tl.constexpr = s.width
    channel = tl.program_id(0) * s.columns + tl.arange(0, s.columns)[None, :]
    token = tl.program_id(1) * s.rows + tl.arange(0, s.rows)[:, None]
    sequence, exists = tl.program_id(2).to(tl.int64), (channel < N) & (token < Q)
    x += sequence * X_BATCH + channel
    window += sequence * (W - 1) * N + channel
    total = tl.zeros([s.rows, s.columns], tl.float32)
    for n in tl.static_range(W):
        source = token + n - (W - 1)
        given = tl.load(x + source * X_TOKEN, mask=exists & (source >= 0), other=0.0)
        past = tl.load(window + (token + n) * N, mask=exists & (source < 0), other=0.0)
        factor = tl.load(weight + channel * W + n, mask=channel < N, other=0.0).to(tl.float32)
        total += (given.to(tl.float32) + past.to(tl.float32)) * factor
    y += (sequence * Q + token) * N + channel
    tl.store(y, (total * tl.sigmoid(total)).to(y.dtype.element_ty), mask=exists)


def causal_conv_silu(x: Tensor, window: Tensor, weight: Tensor) -> Tensor:
    """`conv_silu_in_torch`, by one kernel in eager code on a GPU."""
    functions = launch_convolution, conv_silu_in_torch
    return _in_eager_code("convolution", *functions, x, window, weight)


def launch_convolution(x: Tensor, window: Tensor, weight: Tensor) -> Tensor:
    (B, Q, N), W = x.shape, weight.shape[1]
    check_shapes(window=(window, (B, W - 1, N)), weight=(weight, (N, W)))
    x = x if x.stride(2) == 1 else x.contiguous()
    y, s = x.new_empty(B, Q, N), PromptSettings(channels=N, width=W, rows=16, columns=256)
    grid = triton.cdiv(N, s.columns), triton.cdiv(Q, s.rows), B
    tensors = x, window.contiguous(), weight, y
    launch(_convolve_prompt, grid, *tensors, Q, x.stride(0), x.stride(1), settings=s)
    return y


# Grid [COUNT / rows]: a program normalizes some of the COUNT = B Q H heads.
@jit
def _norm_heads(x, gate, weight, y, COUNT, GATE_TOKEN, s: tl.constexpr):
    CV: tl.constexpr = s.value_dim
    row = tl.program_id(0).to(tl.int64) * s.rows + tl.arange(0, s.rows)[:, None]
    c, exists = tl.arange(0, CV)[None, :], row < COUNT
    numbers = tl.load(x + row * CV + c, mask=exists, other=0.0).to(tl.float32)
    gate += row // s.heads * GATE_TOKEN + row % s.heads * CV + c
    gates = tl.load(gate, mask=exists, other=0.0).to(tl.float32)
    numbers *= tl.rsqrt(tl.sum(numbers * numbers, 1, keep_dims=True) / CV + s.eps)
    factor = tl.load(weight + c).to(tl.float32)
    if s.is_silu:
        factor *= gates
    numbers *= factor * tl.sigmoid(gates)
    tl.store(y + row * CV + c, numbers.to(y.dtype.element_ty), mask=exists)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu"
) -> Tensor:
    """`norm_in_torch`, by one kernel in eager code on a GPU, for x [B, Q, H, Cv]."""
    arguments = x, gate, weight, eps, activation
    if x.dim() != 4 or not fit_tiles(x.shape[-1]):
        return norm_in_torch(*arguments)
    return _in_eager_code("gated norm", launch_norm_heads, norm_in_torch, *arguments)


def launch_norm_heads(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu"
) -> Tensor:
    B, Q, H, CV = x.shape
    check_shapes(gate=(gate, x.shape), weight=(weight, (CV,)))
    gate = with_even_rows(gate.flatten(2))
    y, count = x.new_empty(x.shape), B * Q * H
    s = PromptSettings(H, value_dim=CV, eps=eps, rows=8, is_silu=activation == "silu")
    tensors, grid = (x.contiguous(), gate, weight, y), (triton.cdiv(count, s.rows),)
    launch(_norm_heads, grid, *tensors, count, gate.stride(1), settings=s)
    return y


# Grid [COUNT / rows]: a program has some of the COUNT = B Q H numbers of g and of beta.
@jit
def _compute_gates(ba, a_log, dt_bias, g, beta, COUNT, TOKEN, s: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * s.rows + tl.arange(0, s.rows)
    exists, head = at < COUNT, at % s.heads
    ba += at // s.heads * TOKEN + head
    tl.store(beta + at, tl.sigmoid(tl.load(ba, mask=exists, other=0.0).to(tl.float32)), mask=exists)
    a = tl.load(ba + s.heads, mask=exists, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    a = softplus(a + tl.load(dt_bias + head).to(tl.float32))
    tl.store(g + at, -rate * a, mask=exists)


def delta_gates(ba: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`gates_in_torch`, by one kernel in eager code on a GPU, if a head has one decay."""
    if len(dt_bias) > len(a_log):
        return gates_in_torch(ba, a_log, dt_bias)
    return _in_eager_code("delta gates", launch_gates, gates_in_torch, ba, a_log, dt_bias)


def launch_gates(ba: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    (B, Q, _), H = ba.shape, len(a_log)
    check_shapes(ba=(ba, (B, Q, 2 * H)), dt_bias=(dt_bias, (H,)))
    ba = with_even_rows(ba)
    g, beta = (ba.new_empty(B, Q, H, dtype=torch.float32) for _ in range(2))
    s, count = PromptSettings(H, rows=1024), B * Q * H
    grid = (triton.cdiv(count, s.rows),)
    launch(_compute_gates, grid, ba, a_log, dt_bias, g, beta, count, ba.stride(1), settings=s)
    return g, beta
