"""Triton kernels of the gated delta rule for prompts.

The formulas, the letters and the plain forms are in ops/attention/gated_delta.py.

The rule takes two kernels. `_solve_chunk` solves the triangular systems of all chunks, in parallel.
`_scan_chunks` walks over the chunks of a head with a block of the state's columns in registers: the
columns never meet, so each program has its own. The convolution and the gated norm are a kernel
each in eager code; compiled, Inductor makes these.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.attention.gated_delta_token import COLUMNS, _softplus, fit_tiles
from ops.launch import can_launch, fit_tiling, jit, tl, triton

# How tensor cores multiply fp32: "tf32" is one product with 10 bits of mantissa, "tf32x3" three,
# about as exact as fp32. Only the state's update always takes three (of bf16 parts, if keys are
# bf16), since its errors add up over the chunks; benchmarks/gated_delta.py measures both.
PRECISION = "tf32"
CHUNK = 64  # tokens that one triangular system covers: 16, 32 or 64


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
def _dot_stored(x, stored, sums, PRECISION: tl.constexpr):
    """sums + x @ stored, for fp32 x.

    If `stored` is bf16, products of bf16 are as exact as fp32, in half the time of tf32x3.
    """
    if stored.dtype == tl.bfloat16:
        high, middle, low = _split(x)
        if PRECISION == "tf32x3":
            sums = tl.dot(low, stored, sums)
        return tl.dot(high, stored, tl.dot(middle, stored, sums))
    else:
        return tl.dot(x, stored.to(tl.float32), sums, input_precision=PRECISION)


@jit
def _stored_dot(stored, x, sums, PRECISION: tl.constexpr):
    """sums + stored @ x, for fp32 x: see `_dot_stored`."""
    if stored.dtype == tl.bfloat16:
        high, middle, low = _split(x)
        if PRECISION == "tf32x3":
            sums = tl.dot(stored, low, sums)
        return tl.dot(stored, high, tl.dot(stored, middle, sums))
    else:
        return tl.dot(stored.to(tl.float32), x, sums, input_precision=PRECISION)


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


# Grid [chunks, H, B]. Writes `values`, `keys` and `scores` of `chunk_in_torch`.
@jit
def _solve_chunk(
    q,
    k,
    v,
    g,
    beta,
    values,
    keys,
    scores,
    Q,
    QK_BATCH,
    QK_TOKEN,
    V_BATCH,
    V_TOKEN,
    H: tl.constexpr,
    K: tl.constexpr,
    CK: tl.constexpr,
    CV: tl.constexpr,
    T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks, i = tl.num_programs(0), tl.arange(0, T)
    rows = chunk * T + i
    is_real, row, column = rows < Q, i[:, None], i[None, :]
    gates = (sequence * Q + rows) * H + head
    g = tl.load(g + gates, mask=is_real, other=0.0)
    beta = tl.load(beta + gates, mask=is_real, other=0.0)
    total = tl.cumsum(g, 0)
    between = total[:, None] - total[None, :]
    decay = tl.exp(tl.where(row >= column, between, float("-inf")))
    key = sequence * QK_BATCH + (head // (H // K)) * CK
    place = ((sequence * H + head) * chunks + chunk) * T + row
    queries, q_scale = _load_tokens(q + key, rows, QK_TOKEN, is_real, CK)
    tokens, k_scale = _load_tokens(k + key, rows, QK_TOKEN, is_real, CK)
    decay *= k_scale[None, :]
    products = tl.dot(queries, tl.trans(tokens), input_precision=PRECISION) * decay
    tl.store(scores + place * T + column, products * (q_scale * CK**-0.5)[:, None])
    products = tl.dot(tokens, tl.trans(tokens), input_precision=PRECISION) * decay
    system = tl.where(row > column, (beta * k_scale)[:, None] * products, 0.0)
    inverse = _invert_unit_lower(system, T, PRECISION)
    right = inverse * (beta * tl.exp(total) * k_scale)[None, :]
    BLOCK: tl.constexpr = min(CK, 64)  # a whole head's columns do not fit into registers
    for begin in tl.static_range(0, CK, BLOCK):
        c = begin + tl.arange(0, BLOCK)[None, :]
        x = tl.load(k + key + rows[:, None] * QK_TOKEN + c, mask=is_real[:, None], other=0.0)
        solved = _dot_stored(right, x, tl.zeros([T, BLOCK], tl.float32), PRECISION)
        tl.store(keys + place * CK + c, solved)
    right = inverse * beta[None, :]
    V_BLOCK: tl.constexpr = min(CV, 64)
    v += sequence * V_BATCH + head * CV + rows[:, None] * V_TOKEN
    for begin in tl.static_range(0, CV, V_BLOCK):
        c = begin + tl.arange(0, V_BLOCK)[None, :]
        x = tl.load(v + c, mask=is_real[:, None], other=0.0)
        solved = _dot_stored(right, x, tl.zeros([T, V_BLOCK], tl.float32), PRECISION)
        tl.store(values + place * CV + c, solved)


# Grid [Cv / COLUMNS, H, B]. The state stays in registers from the first chunk to the last.
@jit
def _scan_chunks(
    q,
    k,
    g,
    values,
    keys,
    scores,
    state,
    out,
    final,
    Q,
    QK_BATCH,
    QK_TOKEN,
    H: tl.constexpr,
    K: tl.constexpr,
    CK: tl.constexpr,
    CV: tl.constexpr,
    COLUMNS: tl.constexpr,
    T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, c = tl.arange(0, T), tl.arange(0, CK)
    chunks = (Q + T - 1) // T
    state_offsets = ((sequence * H + head) * CK + c[:, None]) * CV + columns
    state = tl.load(state + state_offsets)
    key = sequence * QK_BATCH + (head // (H // K)) * CK
    place = (sequence * H + head) * chunks * T + i[:, None]
    values += place * CV + columns
    keys += place * CK + c[None, :]
    scores += place * T + i[None, :]
    for chunk in range(0, chunks):
        rows = chunk * T + i
        is_real = rows < Q
        gates = tl.load(g + (sequence * Q + rows) * H + head, mask=is_real, other=0.0)
        total, whole = tl.cumsum(gates, 0), tl.sum(gates, 0)
        correction = tl.load(values) - tl.dot(tl.load(keys), state, input_precision=PRECISION)
        queries, scale = _load_tokens(q + key, rows, QK_TOKEN, is_real, CK)
        y = _stored_dot(queries, state, tl.zeros([T, COLUMNS], tl.float32), PRECISION)
        y *= (scale * tl.exp(total) * CK**-0.5)[:, None]
        y = tl.dot(tl.load(scores), correction, y, input_precision=PRECISION)
        y_offsets = ((sequence * Q + rows[:, None]) * H + head) * CV + columns
        tl.store(out + y_offsets, y.to(out.dtype.element_ty), mask=is_real[:, None])
        written, scale = _load_tokens(k + key, rows, QK_TOKEN, is_real, CK)
        correction *= (scale * tl.exp(whole - total))[:, None]
        # Transposed: of a transposed bf16 tile Triton 3.6 read shared memory out of bounds.
        change = tl.zeros([COLUMNS, CK], tl.float32)
        change = _dot_stored(tl.trans(correction), written, change, "tf32x3")
        state = state * tl.exp(whole) + tl.trans(change)
        values += T * CV
        keys += T * CK
        scores += T * T
    tl.store(final + state_offsets, state)


def runs_eagerly(x: Tensor) -> bool:
    """Whether x is on a GPU with kernels, in eager code, where each operation would be a kernel."""
    return can_launch(x) and not torch.compiler.is_compiling()


def delta_chunk_supports(q: Tensor, v: Tensor) -> bool:
    """Whether `launch_delta_chunk` has tiles for these heads."""
    return fit_tiles(q.shape[-1], v.shape[-1])


def launch_delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta.gated_delta_chunk` by two kernels."""
    (B, Q, K, CK), (H, CV) = q.shape, v.shape[-2:]
    columns = min(COLUMNS, CV)
    q, k, v = (x if _has_whole_tokens(x) else x.contiguous() for x in (q, k, v))
    if q.stride() != k.stride():
        q, k = q.contiguous(), k.contiguous()
    g, beta = g.float().contiguous(), beta.float().contiguous()
    out, final = v.new_empty(v.shape), state.new_empty(state.shape)
    state = state.contiguous()
    token = Q, q.stride(0), q.stride(1)
    shape = dict(H=H, K=K, CK=CK, CV=CV, PRECISION=PRECISION)
    # Any fp32 tensor has the type of values, keys and scores, whose sizes follow from the tiling.
    example = q, k, g, *[state] * 4, out, final, *token
    largest = max(16, min(CHUNK, triton.next_power_of_2(Q)))
    options = dict(COLUMNS=columns, num_warps=4, num_stages=2)
    tilings = (dict(T=T) for T in (64, 32, 16) if largest >= T)
    T = fit_tiling(_scan_chunks, tilings, example, shape | options)["T"]
    chunks = triton.cdiv(Q, T)
    values, keys, scores = (state.new_empty(B, H, chunks, T, C) for C in (CV, CK, T))
    _solve_chunk[chunks, H, B](
        *(q, k, v, g, beta, values, keys, scores),
        *(*token, v.stride(0), v.stride(1)),
        **shape,
        T=T,
        num_warps=4,
    )
    _scan_chunks[CV // columns, H, B](
        *(q, k, g, values, keys, scores, state, out, final),
        *token,
        **shape,
        T=T,
        **options,
    )
    return out, final


def _has_whole_tokens(x: Tensor) -> bool:
    """Whether the heads of each token of x [B, Q, heads, C] follow each other in memory."""
    return x.stride(3) == 1 and x.stride(2) == x.shape[3]


# Around the rule, in eager prompts ----------------------------------------------------------------


# Grid [N / CHANNELS, Q / TOKENS, B].
@jit
def _convolve_tokens(
    x,
    window,
    weight,
    y,
    Q,
    X_BATCH,
    X_TOKEN,
    N: tl.constexpr,
    W: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    sequence, exists = tl.program_id(2).to(tl.int64), (channel < N) & (token < Q)
    x += sequence * X_BATCH + channel
    window += sequence * (W - 1) * N + channel
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for n in tl.static_range(W):
        source = token + n - (W - 1)
        given = tl.load(x + source * X_TOKEN, mask=exists & (source >= 0), other=0.0)
        past = tl.load(window + (token + n) * N, mask=exists & (source < 0), other=0.0)
        factor = tl.load(weight + channel * W + n, mask=channel < N, other=0.0).to(tl.float32)
        total += (given.to(tl.float32) + past.to(tl.float32)) * factor
    y += (sequence * Q + token) * N + channel
    tl.store(y, (total * tl.sigmoid(total)).to(y.dtype.element_ty), mask=exists)


def launch_convolve_tokens(x: Tensor, window: Tensor, weight: Tensor) -> Tensor:
    """Compute `gated_delta.causal_conv_silu` by one kernel."""
    (B, Q, N), W = x.shape, weight.shape[1]
    x = x if x.stride(2) == 1 else x.contiguous()
    y, tokens, channels = x.new_empty(B, Q, N), 16, 256
    _convolve_tokens[triton.cdiv(N, channels), triton.cdiv(Q, tokens), B](
        *(x, window.contiguous(), weight, y),
        *(Q, x.stride(0), x.stride(1)),
        **dict(N=N, W=W, TOKENS=tokens, CHANNELS=channels),
        num_warps=4,
    )
    return y


# Grid [B Q H / ROWS].
@jit
def _norm_heads(
    x,
    gate,
    weight,
    y,
    HEADS,
    GATE_TOKEN,
    H: tl.constexpr,
    CV: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c, exists = tl.arange(0, CV)[None, :], row < HEADS
    numbers = tl.load(x + row * CV + c, mask=exists, other=0.0).to(tl.float32)
    gate += row // H * GATE_TOKEN + row % H * CV + c
    gates = tl.load(gate, mask=exists, other=0.0).to(tl.float32)
    numbers *= tl.rsqrt(tl.sum(numbers * numbers, 1, keep_dims=True) / CV + EPS)
    numbers *= tl.load(weight + c).to(tl.float32) * gates * tl.sigmoid(gates)
    tl.store(y + row * CV + c, numbers.to(y.dtype.element_ty), mask=exists)


# Grid [B Q H / BLOCK].
@jit
def _compute_gates(ba, a_log, dt_bias, g, beta, COUNT, TOKEN, H: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists, head = at < COUNT, at % H
    ba += at // H * TOKEN + head
    tl.store(beta + at, tl.sigmoid(tl.load(ba, mask=exists, other=0.0).to(tl.float32)), mask=exists)
    a = tl.load(ba + H, mask=exists, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    a = _softplus(a + tl.load(dt_bias + head).to(tl.float32))
    tl.store(g + at, -rate * a, mask=exists)


def launch_gates(ba: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta.delta_gates` by one kernel."""
    (B, Q, _), H, block = ba.shape, len(a_log), 1024
    if ba.stride(2) != 1 or (B > 1 and ba.stride(0) != Q * ba.stride(1)):
        ba = ba.contiguous()
    g, beta = (ba.new_empty(B, Q, H, dtype=torch.float32) for _ in range(2))
    _compute_gates[(triton.cdiv(B * Q * H, block),)](
        *(ba, a_log, dt_bias, g, beta),
        *(B * Q * H, ba.stride(1)),
        **dict(H=H, BLOCK=block),
        num_warps=4,
    )
    return g, beta


def norm_heads_supports(x: Tensor) -> bool:
    """Whether `launch_norm_heads` has tiles for x."""
    return x.dim() == 4 and fit_tiles(x.shape[-1])


def launch_norm_heads(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `gated_delta.gated_rms_norm` of [B, Q, H, Cv] by one kernel."""
    (B, Q, H, CV), rows = x.shape, 8
    if not _has_whole_tokens(gate) or (B > 1 and gate.stride(0) != Q * gate.stride(1)):
        gate = gate.contiguous()
    y = x.new_empty(x.shape)
    _norm_heads[(triton.cdiv(B * Q * H, rows),)](
        *(x.contiguous(), gate, weight, y),
        *(B * Q * H, gate.stride(1)),
        **dict(H=H, CV=CV, EPS=eps, ROWS=rows),
        num_warps=4,
    )
    return y
