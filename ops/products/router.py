"""Norm and router scores of up to a few tokens in a kernel, and the choice of experts from them.

A router's scores stay fp32. Shared experts, which every token uses, are experts E, E + 1, ... of
the stacked weights: they follow the chosen ones in `indices` and `weights`.

One token's norm is quantized here (ops/products/quantized_x.py), once for all programs of the experts' first
product.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.declared import Routing
from ops.launch import jit, supports_pdl, tl, triton
from ops.products.chunk import _load_x
from ops.products.quantized_x import INTEGERS, QuantizedX, _store_quads, empty_quantized
from ops.products.tilings import Weight

MAX_EXPERTS = 512
MAX_DIM = 8192
MAX_PAIRS = 32
MANY_PROGRAMS = 256  # about as many of `norm_router` as an H200 runs with the least delay

# Kernels ------------------------------------------------------------------------------------------


@jit
def _ordered_bits(scores):
    """Map fp32 to int32 in the same order (`topk.ordered_bits`)."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


@jit
def _score_keys(scores, expert, E: tl.constexpr, BLOCK: tl.constexpr):
    """Return keys int32 in the order of scores; -2 ** 31 is that of no expert, and of a chosen one.

    So A of E experts are found even if scores are NaN: w2 waits for all A indices.
    """
    key = tl.maximum(_ordered_bits(scores), -(2**31) + 1)
    if BLOCK > E:
        key = tl.where(expert < E, key, -(2**31))
    return key


@jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def _choose_one(scores, rank, E: tl.constexpr, EXPERTS: tl.constexpr, WARPS: tl.constexpr):
    """Return the index of the score of this rank, as `_choose` orders them.

    Each warp searches by itself: the maxima of a row of [WARPS, EXPERTS] are within a warp.
    """
    expert = tl.arange(0, EXPERTS)[None, :] + tl.zeros([WARPS, 1], tl.int32)
    score = tl.load(scores + expert, mask=expert < E, other=float("-inf"), cache_modifier=".cg")
    key = _score_keys(score, expert, E, EXPERTS)
    found = tl.zeros([WARPS, 1], tl.int32)
    for _ in range(rank + 1):
        best = key == tl.max(key, 1, keep_dims=True)
        found = tl.min(tl.where(best, expert, EXPERTS), 1, keep_dims=True)
        key = tl.where(expert == found, -(2**31), key)
    return tl.max(tl.max(found, 1), 0)


@jit
def _choose(
    scores,
    indices,
    weights,
    E: tl.constexpr,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM_TOPK: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the A best of E scores, then the shared experts: ties go to the lower index.

    A rounds find one maximum each. Within a warp that is one instruction (redux).
    """
    N: tl.constexpr = E + GATED
    expert = tl.arange(0, BLOCK)
    # From L2: this kernel may have started before the one that writes them.
    score = tl.load(scores + expert, mask=expert < E, other=float("-inf"), cache_modifier=".cg")
    key, rank = _score_keys(score, expert, E, BLOCK), tl.full([BLOCK], A, tl.int32)
    for n in tl.static_range(A):
        found = expert == tl.min(tl.where(key == tl.max(key, 0), expert, BLOCK), 0)
        rank = tl.where(found, n, rank)
        key = tl.where(found, -(2**31), key)
    chosen = rank < A
    if SIGMOID:
        part = tl.load(scores + N + expert, mask=expert < E, other=0.0, cache_modifier=".cg")
    else:
        part = tl.exp(score - tl.max(score, 0))
    if NORM_TOPK:
        part /= tl.sum(tl.where(chosen, part, 0.0), 0)
    elif not SIGMOID:
        part /= tl.sum(part, 0)
    if SCALE != 1.0:
        part *= SCALE
    tl.store(indices + rank, expert.to(tl.int64), mask=chosen)
    tl.store(weights + rank, part, mask=chosen)
    if SHARED:
        if not GATED:
            part = 1.0
        elif SIGMOID:
            part = tl.load(scores + N + E, cache_modifier=".cg")
        else:
            part = _sigmoid(tl.load(scores + E, cache_modifier=".cg"))
        for n in tl.static_range(SHARED):
            tl.store(indices + A + n, E + n)
            tl.store(weights + A + n, part)


@jit
def _clear_choice(indices, PAIRS: tl.constexpr):
    """Let the first program mark PAIRS indices as not chosen yet: -1."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, 32)
    tl.store(indices + pair, tl.full([32], -1, tl.int64), mask=pair < PAIRS)


@jit
def _load_score_biases(
    bias, score_bias, expert, E: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr
):
    """Load what is added to the dot products of experts [ROWS], and to their sigmoids."""
    added = tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32) if BIAS else 0.0
    return added, tl.load(score_bias + expert, mask=expert < E, other=0.0) if SIGMOID else 0.0


@jit
def _store_scores(
    rows,
    value,
    biases,
    scores,
    expert,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Store the scores of experts [ROWS] for a normed token: rows [ROWS, D], value [D].

    biases: as of `_load_score_biases`.
    """
    dots = tl.sum(rows.to(tl.float32) * value.to(tl.float32)[None, :], 1)
    if BIAS:
        dots += biases[0]
    if SIGMOID:
        dots = _sigmoid(dots)
        tl.store(scores + N + expert, dots, mask=expert < N)
        dots += biases[1]
    tl.store(scores + expert, dots, mask=expert < N)


@jit
def _store_quantized(
    raw,
    scales,
    factor,
    x,
    units,
    DTYPE: tl.constexpr,
    QUADS: tl.constexpr,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
):
    """Norm and quantize this program's LANES quads of x, and store them as a `QuantizedX`.

    raw, scales: x and the norm's weight as of `_load_x`. factor: the norm's, of all of x.
    """
    values = ()
    for k in tl.static_range(4 if KIND == "int8" else 8):
        value = raw[k].to(tl.float32) * factor * scales[k].to(tl.float32)
        values = values + (value.to(DTYPE).to(tl.float32),)  # rounded, as the norm is
    _store_quads(values, x, units, QUADS, KIND, LANES)


# Grid [N / ROWS], with MANY tokens [N / ROWS, T]: each program norms a whole token, and computes
# ROWS of its scores.
#
# scores [T, 1 or 2, N]: those by which experts are chosen, with GATED also the shared experts'
# gate. With SIGMOID a token's second row has the scores that become weights: the choice is by
# score + bias.
#
# QUANTIZED: normed is the x of a `QuantizedX`, of which each program stores LANES quads.
#
# The first program marks the PAIRS indices as not chosen yet.
@jit
def _norm_router(
    x,
    norm,
    router,
    bias,
    score_bias,
    normed,
    units,
    scores,
    indices,
    D: tl.constexpr,
    E: tl.constexpr,
    GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    EPS: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    MANY: tl.constexpr,
    QUANTIZED: tl.constexpr,
    KIND: tl.constexpr,
    FIELDS: tl.constexpr,
    RUN: tl.constexpr,
    LANES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    N: tl.constexpr = E + GATED
    if MANY:
        token = tl.program_id(1)
        x += token * D
        normed += token * D
        scores += token * ((1 + SIGMOID) * N)
    d, expert = tl.arange(0, BLOCK), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = d < D
    rows = tl.load(
        router + expert[:, None] * D + d[None, :],
        mask=(expert < N)[:, None] & inside[None, :],
        other=0.0,
    )
    scale = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
    biases = _load_score_biases(bias, score_bias, expert, E, BIAS, SIGMOID)
    QUADS: tl.constexpr = D // (4 * FIELDS)
    if QUANTIZED:
        scales = _load_x(norm, tl.program_id(0), QUADS, RUN, FIELDS, LANES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    if PAIRS:
        _clear_choice(indices, PAIRS)
    if QUANTIZED:
        raw = _load_x(x, tl.program_id(0), QUADS, RUN, FIELDS, LANES)
    factor = tl.rsqrt(tl.sum(value * value, 0) / D + EPS)
    value = (value * factor * scale).to(x.dtype.element_ty)
    _store_scores(rows, value, biases, scores, expert, N, BIAS, SIGMOID)
    if not QUANTIZED:
        by_first = d < D - tl.program_id(0) * BLOCK  # the first program alone stores the norm
        tl.store(normed + d, value, mask=by_first)
    elif tl.program_id(0) * LANES < QUADS:  # the other programs end sooner
        _store_quantized(raw, scales, factor, normed, units, x.dtype.element_ty, QUADS, KIND, LANES)


# Grid [T]: a program norms a token.
@jit
def _norm_tokens(
    x, norm, normed, D: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    d = tl.arange(0, BLOCK)
    at = tl.program_id(0) * D + d
    scale = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + at, mask=d < D, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / D + EPS) * scale
    tl.store(normed + at, value.to(normed.dtype.element_ty), mask=d < D)


# Grid [T]: a program turns a token's products with the router into the scores of `_norm_router`.
@jit
def _sigmoid_scores(
    dots,
    score_bias,
    scores,
    E: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    expert, token = tl.arange(0, BLOCK), tl.program_id(0)
    bias = tl.load(score_bias + expert, mask=expert < E, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    score = _sigmoid(tl.load(dots + token * N + expert, mask=expert < N, other=0.0))
    tl.store(scores + (token * 2 + 1) * N + expert, score, mask=expert < N)
    tl.store(scores + token * 2 * N + expert, score + bias, mask=expert < N)


# Grid [T]: a program chooses the experts of one token.
@jit
def _route(
    scores,
    indices,
    weights,
    E: tl.constexpr,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM_TOPK: tl.constexpr,
    SCALE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _choose(
        scores + token * ((1 + SIGMOID) * (E + GATED)),
        indices + token * (A + SHARED),
        weights + token * (A + SHARED),
        E,
        A,
        SHARED,
        GATED,
        SIGMOID,
        NORM_TOPK,
        SCALE,
        EXPERTS,
    )


# Launching ----------------------------------------------------------------------------------------


def check_router(E: int, D: int, routing: Routing) -> None:
    """Raise ValueError if `norm_router` has no kernel for E experts and tokens of D numbers."""
    if E > MAX_EXPERTS or D > MAX_DIM or routing.active > E or routing.pairs > MAX_PAIRS:
        raise ValueError(f"no kernel for {E} experts and rows of {D} numbers")


def empty_norm(
    x: Tensor, weight: Weight | None, programs: int, warps: int
) -> tuple[Tensor | QuantizedX, tuple[Tensor, Tensor], dict]:
    """Return where a kernel stores the norm of x [T, D]: the result, its two tensors, constants.

    It is a `QuantizedX` for one token and a weight whose codes are multiplied as integers.
    programs, warps: of the kernel.
    """
    if weight is None or len(x) > 1 or weight.kind not in INTEGERS:
        normed = torch.empty_like(x)
        return normed, (normed, normed), dict(QUANTIZED=False, KIND="", FIELDS=2, RUN=1, LANES=1)
    fields, quads = weight.fields, weight.quads
    quantized = empty_quantized(quads, weight, x.dtype, x.device)
    lanes = max(8 * warps, triton.next_power_of_2(triton.cdiv(quads, programs)))
    layout = dict(KIND=weight.kind, FIELDS=fields, RUN=weight.group // fields, LANES=lanes)
    return quantized, (quantized.operands, quantized.units), dict(QUANTIZED=True, **layout)


def rows_of(N: int, T: int) -> int:
    """Return how many of a token's N scores a program of `norm_router` computes.

    Each program norms the token. Of several tokens there are more programs than run at once.
    """
    return next((rows for rows in (4, 2) if T > 1 and N * T // rows >= MANY_PROGRAMS), 1)


def norm_router(
    x: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    rows: int | None = None,
    warps: int = 4,
    pdl: bool | None = None,
    weight: Weight | None = None,
    indices: Tensor | None = None,
) -> tuple[Tensor | QuantizedX, Tensor]:
    """Norm x [T, D], and score the experts for it.

    Return its norm [T, D] and scores fp32 [T, 1 or 2, N]: those by which experts are chosen, and
    with sigmoid routing, those that become weights. The reference is `RMSNorm`, then the router.

    router [N, D]: a row for each of E experts, then the shared experts' gate, if they are gated.
    bias [E]: of scores. rows, warps: of a program; rows None: `rows_of`. weight: the `Weight` that
    multiplies the norm of one token; if its codes are multiplied as integers, the norm is returned
    as a `QuantizedX`.
    indices int64 [1, A + S]: one token's for `gate_up`, filled with -1: no expert is chosen yet.
    With PDL, all but x is loaded while the previous kernel runs. Raises ValueError if E or D is too
    large.
    """
    (N, D), T = router.shape, len(x)
    E, sigmoid = N - routing.gated, routing.score_bias is not None
    check_router(E, D, routing)
    pdl = supports_pdl(x) if pdl is None else pdl
    scores = torch.empty(T, 1 + sigmoid, N, dtype=torch.float32, device=x.device)
    rows = rows or rows_of(N, T)
    programs = triton.cdiv(N, rows)
    normed, stored, layout = empty_norm(x, weight, programs, warps)
    _norm_router[(programs,) if T == 1 else (programs, T)](
        x,
        norm,
        router,
        norm if bias is None else bias,
        norm if routing.score_bias is None else routing.score_bias,
        *stored,
        scores,
        scores if indices is None else indices,
        D=D,
        E=E,
        GATED=int(routing.gated),
        SIGMOID=sigmoid,
        EPS=eps,
        BIAS=bias is not None,
        PDL=pdl,
        BLOCK=triton.next_power_of_2(D),
        ROWS=rows,
        PAIRS=0 if indices is None else indices.shape[1],
        MANY=T > 1,
        **layout,
        launch_pdl=pdl,
        num_warps=warps,
    )
    return normed, scores


def norm_tokens(x: Tensor, norm: Tensor, eps: float, pdl: bool | None = None) -> Tensor:
    """Return the RMS norm of x [T, D], as `RMSNorm`."""
    normed, (T, D) = torch.empty_like(x), x.shape
    pdl = supports_pdl(x) if pdl is None else pdl
    _norm_tokens[(T,)](
        x,
        norm,
        normed,
        D=D,
        EPS=eps,
        BLOCK=triton.next_power_of_2(D),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=8,
    )
    return normed


def sigmoid_scores(dots: Tensor, routing: Routing, pdl: bool | None = None) -> Tensor:
    """Return the scores [T, 2, N] of sigmoid routing, as `norm_router`.

    dots fp32 [T, N]: the products of normed tokens with the router.
    """
    T, N = dots.shape
    pdl = supports_pdl(dots) if pdl is None else pdl
    scores = torch.empty(T, 2, N, dtype=torch.float32, device=dots.device)
    _sigmoid_scores[(T,)](
        dots,
        routing.score_bias,
        scores,
        E=N - routing.gated,
        N=N,
        BLOCK=triton.next_power_of_2(N),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1,
    )
    return scores


def choice_constants(E: int, routing: Routing) -> dict:
    """Return the constants by which a kernel chooses among E experts."""
    return dict(
        E=E,
        A=routing.active,
        SHARED=routing.shared,
        GATED=int(routing.gated),
        SIGMOID=routing.score_bias is not None,
        NORM_TOPK=routing.norm_topk,
        SCALE=routing.scale,
        EXPERTS=triton.next_power_of_2(E),
    )


def route(
    scores: Tensor, routing: Routing, pdl: bool | None = None, warps: int = 1
) -> tuple[Tensor, Tensor]:
    """Choose experts by the scores of `norm_router`, for several tokens.

    Return expert_indices int64 and expert_weights fp32 [T, A + S]. The reference is `MoE.route`, or
    `SigmoidRoutedMoE.route`. One token's choice is a part of `moe_decode.gate_up`.
    """
    T, N = len(scores), scores.shape[-1]
    pdl = supports_pdl(scores) if pdl is None else pdl
    indices = torch.empty(T, routing.pairs, dtype=torch.int64, device=scores.device)
    weights = torch.empty(T, routing.pairs, dtype=torch.float32, device=scores.device)
    _route[(T,)](
        scores,
        indices,
        weights,
        **choice_constants(N - routing.gated, routing),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=warps,
    )
    return indices, weights
