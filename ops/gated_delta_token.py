"""Triton kernels of the gated delta rule for one token of each sequence.

The formulas, the letters and the plain forms are in ops/gated_delta.py.

`_update_state` does everything up to the read-out, on blocks of columns, so that enough programs
read the state. `_finish_token` normalizes whole heads. It also moves the convolution's window on,
which all programs of the first kernel read.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.jit import jit, supports_pdl, tl, triton

COLUMNS = 32  # Cv columns of the state that a program holds


@jit
def _softplus(x):
    """log(1 + exp(x)) without loss of digits where exp(x) is small (Goldberg 1991, theorem 4)."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    log1p = tl.where(whole == 1.0, small, tl.log(whole) * small / (whole - 1.0))
    return tl.maximum(x, 0.0) + log1p


@jit
def _load_past(window, weight, channels, N: tl.constexpr, W: tl.constexpr):
    """Load what the convolution sums before the token itself: fp32, one for each channel."""
    past = tl.zeros_like(channels).to(tl.float32)
    for n in tl.static_range(W - 1):
        inputs = tl.load(window + n * N + channels).to(tl.float32)
        past += inputs * tl.load(weight + channels * W + n).to(tl.float32)
    return past, tl.load(weight + channels * W + W - 1).to(tl.float32)


@jit
def _convolve(x, channels, past):
    """Add the token's own inputs at x, and apply SiLU -> fp32, rounded to the dtype of x."""
    inputs = tl.load(x + channels)
    y = past[0] + inputs.to(tl.float32) * past[1]
    return (y * tl.sigmoid(y)).to(inputs.dtype).to(tl.float32)


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


@jit
def _has_token(last, sequence, HAS_LAST: tl.constexpr):
    """Whether the sequence has a token."""
    if HAS_LAST:
        return tl.load(last + sequence) >= 0
    else:
        return True


# Grid [Cv / COLUMNS, H, B]. State, window and weights are loaded before the wait for the previous
# kernel, which makes qkvz and ba.
@jit
def _update_state(
    qkvz,
    ba,
    state,
    window,
    conv_weight,
    a_log,
    dt_bias,
    last,
    out,
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
    c, columns = tl.arange(0, CK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    state += ((sequence * H + head) * CK + c[:, None]) * CV + columns[None, :]
    old = tl.load(state)
    window += sequence * (W - 1) * N
    q_channels = head // (H // K) * CK + c
    k_channels, v_channels = K * CK + q_channels, 2 * K * CK + head * CV + columns
    q_past = _load_past(window, conv_weight, q_channels, N, W)
    k_past = _load_past(window, conv_weight, k_channels, N, W)
    v_past = _load_past(window, conv_weight, v_channels, N, W)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    qkvz += sequence * (N + H * CV)
    ba += sequence * 2 * H + head
    beta = tl.sigmoid(tl.load(ba).to(tl.float32))
    decay = -rate * _softplus(tl.load(ba + H).to(tl.float32) + bias)
    q, k = _convolve(qkvz, q_channels, q_past), _convolve(qkvz, k_channels, k_past)
    v = _convolve(qkvz, v_channels, v_past)
    y, new = _read_and_correct(old, q, k, v, decay, beta, CK)
    tl.store(out + (sequence * H + head) * CV + columns, y.to(out.dtype.element_ty))
    if _has_token(last, sequence, HAS_LAST):
        tl.store(state, new)


# Grid [H + N / CHANNELS, B]: a program normalizes one head, or moves CHANNELS of the window on.
@jit
def _finish_token(
    qkvz,
    out,
    norm,
    window,
    last,
    y,
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
    qkvz += sequence * (N + H * CV)
    if part < H:
        at = part * CV + c
        x, result = out + sequence * H * CV + at, y + sequence * H * CV + at
        _norm_head(x, qkvz + N + at, weight, result, CV, EPS)
    else:
        channels = (part - H) * CHANNELS + tl.arange(0, CHANNELS)
        exists, inputs = channels < N, window + sequence * (W - 1) * N + channels
        if _has_token(last, sequence, HAS_LAST):
            for n in tl.static_range(W - 2):
                tl.store(inputs + n * N, tl.load(inputs + (n + 1) * N, mask=exists), mask=exists)
            newest = tl.load(qkvz + channels, mask=exists)
            tl.store(inputs + (W - 2) * N, newest, mask=exists)


@torch.library.custom_op("moe_fast::delta_token", mutates_args=("state", "window"))
def delta_token(
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
) -> Tensor:
    """Do all between the projections of a Gated DeltaNet layer, for one token of each sequence.

    qkvz [B, 1, N + H Cv]: q, k and v before the convolution, then the gate. ba [B, 1, 2 H]: beta
    before its sigmoid, then the decay's input. conv_weight [N, W], a_log and dt_bias [H], norm
    [Cv], eps: of the gated norm. Return [B, 1, H Cv].

    state fp32 [B, H, Ck, Cv] and window [B, W - 1, N] are updated in place, but not where last
    [B], `model.Context.last`, is negative: there is no token. Ck and Cv are powers of two
    (`delta_token_supports`). With PDL the kernels read state, window and weights while the
    previous kernel runs, which must not write them.
    """
    B, (H, CK, CV) = len(qkvz), state.shape[1:]
    N, W = conv_weight.shape
    qkvz, ba, pdl = qkvz.contiguous(), ba.contiguous(), supports_pdl(qkvz)
    out = qkvz.new_empty(B, H, CV)
    y, columns, channels = qkvz.new_empty(B, 1, H * CV), min(COLUMNS, CV), 1024
    flags = dict(HAS_LAST=last is not None, PDL=pdl, launch_pdl=pdl, num_warps=4)
    # The kernel needs a valid pointer for an absent tensor, which it then does not read.
    last = qkvz if last is None else last
    _update_state[CV // columns, H, B](
        *(qkvz, ba, state, window, conv_weight, a_log, dt_bias, last, out),
        **dict(H=H, K=key_heads, CK=CK, CV=CV, W=W, COLUMNS=columns),
        **flags,
    )
    _finish_token[H + triton.cdiv(N, channels), B](
        *(qkvz, out, norm, window, last, y),
        **dict(H=H, CV=CV, N=N, W=W, EPS=eps, CHANNELS=channels),
        **flags,
    )
    return y


@delta_token.register_fake
def _(qkvz: Tensor, ba: Tensor, state: Tensor, *rest) -> Tensor:
    B, (H, _, CV) = len(qkvz), state.shape[1:]
    return qkvz.new_empty(B, 1, H * CV)


def delta_token_supports(state: Tensor) -> bool:
    """Whether to call `delta_token`: in compiled code on a GPU, with heads that fit its tiles.

    state: [B, H, Ck, Cv]. Eager code keeps the plain form, which is the reference.
    """
    return state.is_cuda and torch.compiler.is_compiling() and fit_tiles(*state.shape[-2:])


def fit_tiles(*sizes: int) -> bool:
    """Whether the kernels have tiles for heads of these sizes."""
    return triton is not None and all(16 <= C <= 128 and C & C - 1 == 0 for C in sizes)
