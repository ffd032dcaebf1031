"""Triton kernels of the gated delta rule for a few tokens of each sequence, one after the other.

As ops/attention/gated_delta_token.py, whose letters these are; T tokens, of which the first `last` + 1 are
real. They also store what `DeltaState.accept` needs, if the last tokens are refused: the state
before the call, and each token's inputs.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.attention.gated_delta_token import (
    COLUMNS,
    _read_and_update,
    _softplus,
    _split_keys,
    _tile_places,
    state_tile,
)
from ops.launch import jit, supports_pdl, tl, triton

WARPS = 4  # a program of `_update_states` has 4 warps, each with COLUMNS / 4 columns


@jit
def _load_past_of_few(
    window, weight, channels, ROWS: tl.constexpr, N: tl.constexpr, W: tl.constexpr
):
    """Load the W - 1 inputs of each token that may be the window's, and the W factors: fp32.

    An input is 0 [ROWS, channels] where it is not the window's.
    """
    t, inputs, factors = tl.arange(0, ROWS)[:, None], (), ()
    for n in tl.static_range(W):
        if n < W - 1:
            x = tl.load(window + (t + n) * N + channels, mask=t + n < W - 1, other=0.0)
            inputs = inputs + (x,)
        factors = factors + (tl.load(weight + channels * W + n).to(tl.float32),)
    return inputs, factors


@jit
def _convolve_few(
    qkvz,
    past,
    y,
    channels,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Convolve the inputs of T tokens in channels [1, n], and store SiLU of the sums at y [T, N].

    past: as of `_load_past_of_few`. ROWS: T as a power of two.
    """
    t, total = tl.arange(0, ROWS)[:, None], tl.zeros([ROWS, channels.shape[1]], tl.float32)
    inputs, factors = past
    for n in tl.static_range(W):
        token = t + n - (W - 1)
        x = tl.load(qkvz + token * STRIDE + channels, mask=(token >= 0) & (token < T), other=0.0)
        if n < W - 1:
            x = tl.where(token < 0, inputs[n], x)
        total += x.to(tl.float32) * factors[n]
    total *= tl.sigmoid(total)
    tl.store(y + t * N + channels, total.to(y.dtype.element_ty), mask=t < T)


@jit
def _count_real(last, sequence, T: tl.constexpr, HAS_LAST: tl.constexpr):
    """Return how many of the sequence's tokens are real."""
    if HAS_LAST:
        return tl.load(last + sequence).to(tl.int32) + 1
    else:
        return tl.full([], T, tl.int32)


@jit
def _store_gates(
    ba,
    g,
    beta,
    rate,
    bias,
    real,
    T: tl.constexpr,
    MOST: tl.constexpr,
    H: tl.constexpr,
    BA_STRIDE: tl.constexpr,
):
    """Store decay and share of a head's tokens at g and beta; 0 for all that are not real."""
    t = tl.arange(0, MOST)
    b = tl.load(ba + t * BA_STRIDE, mask=t < T, other=0.0).to(tl.float32)
    a = tl.load(ba + t * BA_STRIDE + H, mask=t < T, other=0.0).to(tl.float32)
    tl.store(g + t * H, tl.where(t < real, -rate * _softplus(a + bias), 0.0))
    tl.store(beta + t * H, tl.where(t < real, tl.sigmoid(b), 0.0))


@jit
def _load_token(convolved, g, beta, keys, values, t, N: tl.constexpr, H: tl.constexpr):
    """Load what this program has stored of a token: q and k, v, decay and share."""
    convolved += t * N
    # From L2: L1 may have older numbers.
    qk = tl.load(convolved + keys, cache_modifier=".cg").to(tl.float32)
    v = tl.load(convolved + values, cache_modifier=".cg").to(tl.float32)
    decay = tl.load(g + t * H, cache_modifier=".cg")
    return qk, v, decay, tl.load(beta + t * H, cache_modifier=".cg")


@jit
def _norm_head(x, gate, weight, y, CV: tl.constexpr, EPS: tl.constexpr):
    """Normalize a head at x, times weight [Cv] and SiLU of the gate, and store it at y."""
    numbers, gates = tl.load(x).to(tl.float32), tl.load(gate).to(tl.float32)
    numbers *= tl.rsqrt(tl.sum(numbers * numbers, 0) / CV + EPS) * weight
    tl.store(y, (numbers * gates * tl.sigmoid(gates)).to(y.dtype.element_ty))


# Grid [Cv / COLUMNS, H, B]. State, window and weights are loaded before the wait for the previous
# kernel, which makes qkvz and ba.
#
# First a program convolves all tokens in its channels, and stores them. Programs with the same key
# head store the same numbers, so that each finds what it needs. Then it takes in one token after
# the other, in a loop: unrolled, 8 tokens would be 4,000 instructions. The next token is loaded
# while one is taken in.
#
# The state is a tile as in `gated_delta_token._update_token`: sums over rows need no shared memory.
@jit
def _update_states(
    qkvz,
    ba,
    state,
    window,
    conv_weight,
    a_log,
    dt_bias,
    last,
    out,
    before,
    convolved,
    g,
    beta,
    count,
    STRIDE: tl.constexpr,
    BA_STRIDE: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    CK: tl.constexpr,
    CV: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANE_ROWS: tl.constexpr,
    WARP_COLUMNS: tl.constexpr,
    HAS_LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    N: tl.constexpr = 2 * K * CK + H * CV
    BLOCKS: tl.constexpr = COLUMNS // WARP_COLUMNS
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = tl.program_id(0) * COLUMNS
    rows, columns = _tile_places(CK * BLOCKS, BLOCKS, LANE_ROWS, WARP_COLUMNS)
    at = ((sequence * H + head) * CK + rows) * CV + begin + columns
    memory = tl.load(state + at)
    key = tl.arange(0, 2 * CK)
    keys = (head // (H // K) + K * (key // CK)) * CK + key % CK
    values = 2 * K * CK + head * CV + begin
    own = values + tl.arange(0, COLUMNS)[None, :]
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    window += sequence * (W - 1) * N
    key_past = _load_past_of_few(window, conv_weight, keys[None, :], ROWS, N, W)
    value_past = _load_past_of_few(window, conv_weight, own, ROWS, N, W)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    qkvz += sequence * (T * STRIDE)
    convolved += sequence * MOST * N
    _convolve_few(qkvz, key_past, convolved, keys[None, :], T, ROWS, N, W, STRIDE)
    _convolve_few(qkvz, value_past, convolved, own, T, ROWS, N, W, STRIDE)
    real = _count_real(last, sequence, T, HAS_LAST)
    g += sequence * MOST * H + head
    beta += sequence * MOST * H + head
    ba += sequence * (T * BA_STRIDE) + head
    _store_gates(ba, g, beta, rate, bias, real, T, MOST, H, BA_STRIDE)
    tl.store(before + at, memory)
    if (tl.program_id(0) == 0) & (head == 0):
        tl.store(count + sequence, real.to(tl.int64))
    tl.debug_barrier()  # all threads have stored
    old = tl.reshape(memory, [CK // LANE_ROWS, BLOCKS, LANE_ROWS, WARP_COLUMNS])
    lane_row, columns = _tile_places(BLOCKS * LANE_ROWS, BLOCKS, LANE_ROWS, WARP_COLUMNS)
    out += (sequence * T * H + head) * CV + begin + columns
    is_first = lane_row == 0
    loaded = _load_token(convolved, g, beta, keys, values + columns, 0, N, H)
    for t in range(real):
        qk, v, decay, share = loaded
        later = tl.minimum(t + 1, T - 1)
        loaded = _load_token(convolved, g, beta, keys, values + columns, later, N, H)
        q, k = _split_keys(qk, CK, LANE_ROWS, 1)
        v = tl.reshape(v, [1, BLOCKS, LANE_ROWS, WARP_COLUMNS])
        read, old = _read_and_update(old, q, k, v, tl.exp(decay), share, CK)
        read = tl.reshape(read, [BLOCKS * LANE_ROWS, WARP_COLUMNS])
        tl.store(out + t * (H * CV), read.to(out.dtype.element_ty), mask=is_first)
    for t in range(real, T):
        tl.store(out + t * (H * CV), tl.zeros_like(columns).to(out.dtype.element_ty), mask=is_first)
    tl.store(state + at, tl.reshape(old, [CK * BLOCKS, WARP_COLUMNS]))


# Grid [T H + N / CHANNELS, B]: a program normalizes one head of a token, or moves CHANNELS of the
# window on, and stores their inputs.
@jit
def _finish_tokens(
    qkvz,
    out,
    norm,
    window,
    last,
    inputs,
    y,
    STRIDE: tl.constexpr,
    T: tl.constexpr,
    MOST: tl.constexpr,
    H: tl.constexpr,
    CV: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    EPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    part, sequence, c = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, CV)
    weight = tl.load(norm + c).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    qkvz += sequence * (T * STRIDE)
    if part < T * H:
        at = (sequence * T * H + part) * CV + c
        gate = qkvz + part // H * STRIDE + N + part % H * CV + c
        _norm_head(out + at, gate, weight, y + at, CV, EPS)
    else:
        channels = (part - T * H) * CHANNELS + tl.arange(0, CHANNELS)
        exists, real = channels < N, _count_real(last, sequence, T, HAS_LAST)
        old, kept = sequence * (W - 1) * N + channels, sequence * (W - 1 + MOST) * N + channels
        for n in tl.static_range(W - 1 + T):
            if n < W - 1:
                number = tl.load(window + old + n * N, mask=exists)
            else:
                number = tl.load(qkvz + (n - W + 1) * STRIDE + channels, mask=exists)
            tl.store(inputs + kept + n * N, number, mask=exists)
            # The window ends with the last real token: it begins at input `real`.
            place = n - real + tl.zeros_like(channels)
            moves = exists & (place >= 0) & (place < W - 1)
            tl.store(window + old + place * N, number, mask=moves)


def _with_even_rows(x: Tensor) -> Tensor:
    """Return x [B, T, n] with all rows one distance apart, as those of a split are; or a copy."""
    B, T, _ = x.shape
    even = x.stride(2) == 1 and (B == 1 or x.stride(0) == T * x.stride(1))
    return x if even else x.contiguous()


@torch.library.custom_op(
    "moe_fast::delta_tokens",
    mutates_args=("state", "window", "before", "inputs", "convolved", "g", "beta", "count"),
)
def delta_tokens(
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
    before: Tensor,
    inputs: Tensor,
    convolved: Tensor,
    g: Tensor,
    beta: Tensor,
    count: Tensor,
) -> Tensor:
    """Do what `gated_delta_token.delta_token` does, for T tokens of each sequence -> [B, T, H Cv].

    qkvz [B, T, N + H Cv], ba [B, T, 2 H]. last [B]: the index of the sequence's last real token;
    those behind it leave state and window as they are.

    Stored for `DeltaState.accept`: before, the old state; inputs [B, W - 1 + M, N], the old window
    and the tokens; convolved [B, M, N]; g and beta fp32 [B, M, H], 0 for all that are not real;
    count int64 [B], how many are. T is at most M.
    """
    (B, T, _), (H, CK, CV) = qkvz.shape, state.shape[1:]
    N, W = conv_weight.shape
    qkvz, ba, pdl = _with_even_rows(qkvz), _with_even_rows(ba), supports_pdl(qkvz)
    out = qkvz.new_empty(B, T, H, CV)
    y, columns, channels = qkvz.new_empty(B, T, H * CV), min(COLUMNS, CV), 512
    flags = dict(HAS_LAST=last is not None, PDL=pdl, launch_pdl=pdl, num_warps=WARPS)
    sizes = dict(T=T, MOST=g.shape[1], H=H, CV=CV, W=W, STRIDE=qkvz.stride(1))
    # The kernel needs a valid pointer for an absent tensor, which it then does not read.
    last = qkvz if last is None else last
    _update_states[CV // columns, H, B](
        *(qkvz, ba, state, window, conv_weight, a_log, dt_bias, last, out),
        *(before, convolved, g, beta, count),
        **dict(K=key_heads, CK=CK, COLUMNS=columns, BA_STRIDE=ba.stride(1)),
        **dict(ROWS=triton.next_power_of_2(T)),
        **state_tile(CK, columns, WARPS),
        **sizes,
        **flags,
    )
    _finish_tokens[T * H + triton.cdiv(N, channels), B](
        *(qkvz, out, norm, window, last, inputs, y),
        **dict(N=N, EPS=eps, CHANNELS=channels),
        **sizes,
        **flags,
    )
    return y


@delta_tokens.register_fake
def _(qkvz: Tensor, ba: Tensor, state: Tensor, *rest) -> Tensor:
    B, T, _ = qkvz.shape
    return qkvz.new_empty(B, T, state.shape[1] * state.shape[3])
