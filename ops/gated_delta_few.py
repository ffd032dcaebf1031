"""Triton kernels of the gated delta rule for a few tokens of each sequence, one after the other.

As ops/gated_delta_token.py, whose letters these are; T tokens, of which the first `last` + 1 are
real. They also store what `DeltaState.accept` needs, if the last tokens are refused: the state
before the call, and each token's inputs.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.gated_delta_token import COLUMNS, _softplus
from ops.jit import jit, supports_pdl, tl, triton


@jit
def _load_taps(window, weight, channels, N: tl.constexpr, W: tl.constexpr):
    """Load the W - 1 inputs before the first token, and the W factors of the convolution: fp32."""
    inputs, factors = (), ()
    for n in tl.static_range(W - 1):
        inputs = inputs + (tl.load(window + n * N + channels).to(tl.float32),)
    for n in tl.static_range(W):
        factors = factors + (tl.load(weight + channels * W + n).to(tl.float32),)
    return inputs, factors


@jit
def _convolve_next(x, inputs, factors, W: tl.constexpr):
    """Convolve the next token's inputs x -> SiLU of the sum, as stored; the inputs from then on."""
    inputs = inputs + (x.to(tl.float32),)
    y = inputs[0] * factors[0]
    for n in tl.static_range(1, W):
        y += inputs[n] * factors[n]
    return (y * tl.sigmoid(y)).to(x.dtype), inputs[1:]


@jit
def _count_real(last, sequence, T: tl.constexpr, HAS_LAST: tl.constexpr):
    """Return how many of the sequence's tokens are real."""
    if HAS_LAST:
        return tl.load(last + sequence).to(tl.int32) + 1
    else:
        return tl.full([], T, tl.int32)


@jit
def _load_token(
    qkvz, ba, channels, token, STRIDE: tl.constexpr, BA_STRIDE: tl.constexpr, H: tl.constexpr
):
    """Load a token's inputs of q, k, v, and of its gates, for one head."""
    q_channels, k_channels, v_channels = channels
    qkvz += token * STRIDE
    q, k, v = tl.load(qkvz + q_channels), tl.load(qkvz + k_channels), tl.load(qkvz + v_channels)
    ba += token * BA_STRIDE
    return q, k, v, tl.load(ba).to(tl.float32), tl.load(ba + H).to(tl.float32)


@jit
def _read_and_correct(memory, q, k, v, decay, share, CK: tl.constexpr):
    """Return what a token reads from columns of the state, [COLUMNS], and the state after it."""
    q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * CK**-0.5
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    decayed = memory * tl.exp(decay)
    # q (S + k correction) = q S + (q . k) correction: both products with S at once.
    correction = (v - tl.sum(k[:, None] * decayed, 0)) * share
    y = tl.sum(q[:, None] * decayed, 0) + tl.sum(q * k, 0) * correction
    return y, decayed + k[:, None] * correction[None, :]


@jit
def _norm_head(x, gate, weight, y, CV: tl.constexpr, EPS: tl.constexpr):
    """Normalize a head at x, times weight [Cv] and SiLU of the gate, and store it at y."""
    numbers, gates = tl.load(x).to(tl.float32), tl.load(gate).to(tl.float32)
    numbers *= tl.rsqrt(tl.sum(numbers * numbers, 0) / CV + EPS) * weight
    tl.store(y, (numbers * gates * tl.sigmoid(gates)).to(y.dtype.element_ty))


# Grid [Cv / COLUMNS, H, B]. State, window and weights are loaded before the wait for the previous
# kernel, which makes qkvz and ba. The next token's inputs are loaded while one is taken in.
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
    MOST: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    CK: tl.constexpr,
    CV: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    N: tl.constexpr = 2 * K * CK + H * CV
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    is_first = tl.program_id(0) == 0  # the head's first program stores what is one number a head
    c, columns = tl.arange(0, CK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = ((sequence * H + head) * CK + c[:, None]) * CV + columns[None, :]
    memory = tl.load(state + at)
    window += sequence * (W - 1) * N
    q_channels = head // (H // K) * CK + c
    channels = (q_channels, K * CK + q_channels, 2 * K * CK + head * CV + columns)
    q_inputs, q_factors = _load_taps(window, conv_weight, channels[0], N, W)
    k_inputs, k_factors = _load_taps(window, conv_weight, channels[1], N, W)
    v_inputs, v_factors = _load_taps(window, conv_weight, channels[2], N, W)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    real = _count_real(last, sequence, T, HAS_LAST)
    qkvz += sequence * (T * STRIDE)
    ba += sequence * (T * BA_STRIDE) + head
    loaded = _load_token(qkvz, ba, channels, 0, STRIDE, BA_STRIDE, H)
    tl.store(before + at, memory)
    if is_first and head == 0:
        tl.store(count + sequence, real.to(tl.int64))
    g += sequence * MOST * H + head
    beta += sequence * MOST * H + head
    convolved += sequence * MOST * N
    # One program of those with the same key head stores its q and k.
    owns_keys = c < CK - (tl.program_id(0) + head % (H // K)) * CK
    for t in tl.static_range(T):
        q, k, v, b, a = loaded
        if t + 1 < T:
            loaded = _load_token(qkvz, ba, channels, t + 1, STRIDE, BA_STRIDE, H)
        q, q_inputs = _convolve_next(q, q_inputs, q_factors, W)
        k, k_inputs = _convolve_next(k, k_inputs, k_factors, W)
        v, v_inputs = _convolve_next(v, v_inputs, v_factors, W)
        tl.store(convolved + t * N + channels[0], q, mask=owns_keys)
        tl.store(convolved + t * N + channels[1], k, mask=owns_keys)
        tl.store(convolved + t * N + channels[2], v)
        decay = tl.where(t < real, -rate * _softplus(a + bias), 0.0)
        share = tl.where(t < real, tl.sigmoid(b), 0.0)
        if is_first:
            tl.store(g + t * H, decay)
            tl.store(beta + t * H, share)
        y, corrected = _read_and_correct(memory, q, k, v, decay, share, CK)
        tl.store(out + ((sequence * T + t) * H + head) * CV + columns, y.to(out.dtype.element_ty))
        memory = tl.where(t < real, corrected, memory)
    tl.store(state + at, memory)
    if is_first:
        for t in tl.static_range(T, MOST):  # `accept` runs MOST tokens: these change nothing
            tl.store(g + t * H, 0.0)
            tl.store(beta + t * H, 0.0)


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
    flags = dict(HAS_LAST=last is not None, PDL=pdl, launch_pdl=pdl, num_warps=4)
    sizes = dict(T=T, MOST=g.shape[1], H=H, CV=CV, W=W, STRIDE=qkvz.stride(1))
    # The kernel needs a valid pointer for an absent tensor, which it then does not read.
    last = qkvz if last is None else last
    _update_states[CV // columns, H, B](
        *(qkvz, ba, state, window, conv_weight, a_log, dt_bias, last, out),
        *(before, convolved, g, beta, count),
        **dict(K=key_heads, CK=CK, COLUMNS=columns, BA_STRIDE=ba.stride(1)),
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
