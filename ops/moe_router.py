"""One token: residual sum, norm, router scores and choice of experts, in one or two kernels.

A router's scores stay fp32. Shared experts, which every token uses, are experts E, E + 1, ... of
the stacked weights: they follow the chosen ones in `indices` and `weights`.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.jit import jit, supports_pdl, tl, triton

MAX_EXPERTS = 512
MAX_DIM = 8192
PREFETCHED = 8192  # bytes that a warp prefetches

# Kernels ------------------------------------------------------------------------------------------


@jit
def _ordered_bits(scores):
    """Map fp32 to int32 in the same order (`topk.ordered_bits`)."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


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
    key = _ordered_bits(score)
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

    A rounds find one maximum each. Within a warp that is one instruction (redux), so one warp is
    faster than many, and leaves the SM to the programs of the next kernel.
    """
    N: tl.constexpr = E + GATED
    expert = tl.arange(0, BLOCK)
    # From L2: another SM has written them during this kernel.
    score = tl.load(scores + expert, mask=expert < E, other=float("-inf"), cache_modifier=".cg")
    key, rank = _ordered_bits(score), tl.full([BLOCK], A, tl.int32)
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
def _prefetch(address, bytes, program, WARPS: tl.constexpr):
    """Start loading this program's part of `bytes` at `address` into L2: 8 KB a warp."""
    warp = tl.arange(0, WARPS * 32) // 32
    begin = tl.minimum((program.to(tl.int64) * WARPS + warp) * 8192, bytes - 8192)
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        mov.b32 lane, %laneid;
        setp.eq.b32 first, lane, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], 8192;
        mov.b32 $0, 0;
        }""",
        "=r,l",
        (address.to(tl.int64) + begin,),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# Grid [N / ROWS + P]: each program adds and norms the whole token, and computes ROWS scores. With
# LAST the program that ends last chooses the experts. `counter` counts programs, and is 0 between
# calls. P more programs load the weights of later kernels into L2: memory is idle here.
#
# scores [1 or 2, N]: those by which experts are chosen, with GATED also the shared experts' gate.
# With SIGMOID the second row has the scores that become weights: the choice is by score + bias.
@jit
def _norm_router(
    x,
    y,
    norm,
    router,
    bias,
    score_bias,
    counter,
    summed,
    normed,
    scores,
    indices,
    weights,
    ahead,
    ahead_bytes,
    D: tl.constexpr,
    E: tl.constexpr,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM_TOPK: tl.constexpr,
    SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    EPS: tl.constexpr,
    BIAS: tl.constexpr,
    LAST: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
):
    N: tl.constexpr = E + GATED
    PROGRAMS: tl.constexpr = (N + ROWS - 1) // ROWS
    if AHEAD and tl.program_id(0) >= PROGRAMS:
        _prefetch(ahead, ahead_bytes, tl.program_id(0) - PROGRAMS, WARPS)
        return
    d, expert = tl.arange(0, BLOCK), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = d < D
    rows = tl.load(
        router + expert[:, None] * D + d[None, :],
        mask=(expert < N)[:, None] & inside[None, :],
        other=0.0,
    )
    scale = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
    if PARTS:  # then x is of an older kernel than the previous one
        value = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if PARTS:
        for part in tl.static_range(PARTS):
            value += tl.load(y + part * D + d, mask=inside, other=0.0).to(tl.float32)
    else:
        value = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    value = value.to(summed.dtype.element_ty)
    by_first = d < D - tl.program_id(0) * BLOCK  # the first program alone stores sum and norm
    tl.store(summed + d, value, mask=by_first)
    value = value.to(tl.float32)  # norm the rounded sum, which the next layer reads
    value = value * tl.rsqrt(tl.sum(value * value, 0) / D + EPS) * scale
    value = value.to(normed.dtype.element_ty)
    tl.store(normed + d, value, mask=by_first)
    dots = tl.sum(rows.to(tl.float32) * value.to(tl.float32)[None, :], 1)
    if BIAS:
        dots += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)
    if SIGMOID:
        dots = _sigmoid(dots)
        tl.store(scores + N + expert, dots, mask=expert < N)
        dots += tl.load(score_bias + expert, mask=expert < E, other=0.0)
    tl.store(scores + expert, dots, mask=expert < N)
    if LAST:
        tl.debug_barrier()  # this program's scores are stored before its count
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
            tl.debug_barrier()
            _choose(
                scores,
                indices,
                weights,
                E,
                A,
                SHARED,
                GATED,
                SIGMOID,
                NORM_TOPK,
                SCALE,
                EXPERTS,
            )
            tl.store(counter, 0)


# Grid [1]: choose the experts from scores, in a kernel of its own.
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
    PDL: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _choose(scores, indices, weights, E, A, SHARED, GATED, SIGMOID, NORM_TOPK, SCALE, EXPERTS)


# Launching ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """How router scores become chosen experts and their weights."""

    active: int  # A, without shared experts
    norm_topk: bool  # scale the A weights to sum to one
    scale: float = 1.0  # factor of the A weights, after that
    score_bias: Tensor | None = None  # fp32 [E]: sigmoid scores; the choice is by score + bias
    shared: int = 0  # S, experts that every token uses
    gated: bool = False  # their weight is the sigmoid of the router's last row; else it is 1

    @property
    def pairs(self) -> int:
        """Experts of a token, A + S."""
        return self.active + self.shared


def check_router(E: int, D: int, routing: Routing) -> None:
    """Raise ValueError if `norm_router` has no kernel for E experts and tokens of D numbers."""
    if E > MAX_EXPERTS or D > MAX_DIM or routing.active > E:
        raise ValueError(f"no kernel for {E} experts and rows of {D} numbers")


def norm_router(
    x: Tensor,
    y: Tensor | None,
    norm: Tensor,
    eps: float,
    router: Tensor,
    routing: Routing,
    counter: Tensor | None = None,
    bias: Tensor | None = None,
    rows: int = 1,
    warps: int = 4,
    ahead: Tensor | None = None,
    pdl: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Add x [1, D] + y [S, D], norm the sum, and route it.

    Return the sum and its norm [1, D], expert_indices int64 [1, A + S], expert_weights fp32
    [1, A + S] and scores fp32 [1 or 2, N], whose first E are those by which experts are chosen.
    The reference is `AddNorm`, then `MoE.route`, or `SigmoidRoutedMoE.route`, of fp32 scores.

    router [N, D]: a row for each of E experts, then the shared experts' gate, if they are gated.
    bias [E]: of scores. y: None, one row or fp32 partial sums. counter: int32 [1], 0: the last
    program chooses the experts. None: a second kernel does. With PDL, all but y (without y: all
    but x) is loaded while the previous kernel runs. ahead: a weight that a later kernel reads,
    which is loaded into L2. Raises ValueError if N or D is too large.
    """
    N, D = router.shape
    E, sigmoid = N - routing.gated, routing.score_bias is not None
    check_router(E, D, routing)
    pdl = supports_pdl(x) if pdl is None else pdl
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    scores = torch.empty(1 + sigmoid, N, dtype=torch.float32, device=x.device)
    indices = torch.empty(1, routing.pairs, dtype=torch.int64, device=x.device)
    weights = torch.empty(1, routing.pairs, dtype=torch.float32, device=x.device)
    choice = dict(
        E=E,
        A=routing.active,
        SHARED=routing.shared,
        GATED=int(routing.gated),
        SIGMOID=sigmoid,
        NORM_TOPK=routing.norm_topk,
        SCALE=routing.scale,
        EXPERTS=triton.next_power_of_2(E),
        PDL=pdl,
        launch_pdl=pdl,
    )
    ahead_bytes = 0 if ahead is None else ahead.nbytes
    _norm_router[(triton.cdiv(N, rows) + triton.cdiv(ahead_bytes, PREFETCHED * warps),)](
        x,
        x if y is None else y,
        norm,
        router,
        norm if bias is None else bias,
        norm if routing.score_bias is None else routing.score_bias,
        indices if counter is None else counter,
        summed,
        normed,
        scores,
        indices,
        weights,
        norm if ahead is None else ahead,
        ahead_bytes,
        AHEAD=ahead is not None,
        WARPS=warps,
        D=D,
        PARTS=0 if y is None else y.numel() // D,
        EPS=eps,
        BIAS=bias is not None,
        LAST=counter is not None,
        BLOCK=triton.next_power_of_2(D),
        ROWS=rows,
        **choice,
        num_warps=warps,
    )
    if counter is None:
        _route[(1,)](scores, indices, weights, **choice, num_warps=1)
    return summed, normed, indices, weights, scores
