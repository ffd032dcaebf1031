"""Residual add of a normed sublayer + norm + router scores, in kernels that have fixed shapes.

Tensor parallelism needs them for the reason that ops/ranks/all_reduce.py gives: all ranks must compute
the same bits, or they choose different experts.

Letters: N branches of a sublayer, T tokens, D model dim, E experts.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.launch import can_launch, jit, supports_pdl, tl, triton
from ops.ranks.all_reduce import _fixed_scores, empty_scores


# Grid [T]: a program computes one token. All weights are loaded while the previous kernel runs.
@jit
def _fixed_sandwich(
    x,
    y,
    branch_weights,
    weight,
    scalar,
    next_weight,
    total,
    normed,
    D: tl.constexpr,
    BRANCHES: tl.constexpr,
    EPS: tl.constexpr,
    HAS_SCALAR: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    d, token = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64)
    inside = d < D
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(scalar).to(tl.float32) if HAS_SCALAR else 1.0
    next_scale = (
        tl.load(next_weight + d, mask=inside, other=0.0).to(tl.float32) if HAS_NEXT else 1.0
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    branch = y + token * D + d
    values = tl.load(branch, mask=inside, other=0.0).to(tl.float32)
    if BRANCHES > 1:
        first = tl.load(branch_weights + d, mask=inside, other=0.0).to(tl.float32)
        values *= tl.rsqrt(tl.sum(values * values, 0) / D + EPS) * first
        for n in tl.static_range(1, BRANCHES):
            branch += tl.num_programs(0).to(tl.int64) * D
            other = tl.load(branch, mask=inside, other=0.0).to(tl.float32)
            of_other = tl.load(branch_weights + n * D + d, mask=inside, other=0.0).to(tl.float32)
            values += other * tl.rsqrt(tl.sum(other * other, 0) / D + EPS) * of_other
    values *= tl.rsqrt(tl.sum(values * values, 0) / D + EPS) * scale
    values = (tl.load(x + token * D + d, mask=inside, other=0.0).to(tl.float32) + values) * factor
    values = values.to(total.dtype.element_ty)
    tl.store(total + token * D + d, values, mask=inside)
    values = values.to(tl.float32)  # norm the rounded sum, which the next layer reads
    values *= tl.rsqrt(tl.sum(values * values, 0) / D + EPS) * next_scale
    tl.store(normed + token * D + d, values.to(normed.dtype.element_ty), mask=inside)


def fixed_sandwich(
    x: Tensor,
    y: Tensor,
    branch_weights: Tensor | None,
    weight: Tensor,
    scalar: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    router: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm a sublayer's output, add it to x, norm the sum and compute router scores from it.

    x [..., D]. y [N, ..., D]: with several branches, y is the sum of their norms, whose weights are
    branch_weights [N, D]. Return (x + norm(y)) * scalar [1], its norm by next_weight [D], and
    router scores [T, E], all bitwise identical on all GPUs of one kind. None: no such factor.
    """
    D = x.shape[-1]
    if not can_launch(x):
        parts = y.unbind()
        if branch_weights is not None:
            pairs = zip(parts, branch_weights, strict=True)
            parts = [F.rms_norm(part, (D,), each, eps) for part, each in pairs]
        total = x + F.rms_norm(sum(parts), (D,), weight, eps)
        total = total if scalar is None else total * scalar
        normed = F.rms_norm(total, (D,), next_weight, eps)
        rows = normed.view(-1, D)
        return total, normed, x.new_empty(0) if router is None else F.linear(rows, router)
    x, y = x.contiguous(), y.contiguous()
    tokens, block, pdl = x.numel() // D, triton.next_power_of_2(D), supports_pdl(x)
    total, normed, scores = torch.empty_like(x), torch.empty_like(x), empty_scores(x, router)
    # The kernel needs a valid pointer for an absent tensor, which it then does not read.
    given = branch_weights, weight, scalar, next_weight
    weights = (weight if tensor is None else tensor for tensor in given)
    flags = dict(HAS_SCALAR=scalar is not None, HAS_NEXT=next_weight is not None)
    launch = dict(D=D, BLOCK=block, PDL=pdl, launch_pdl=pdl)
    tensors = x, y, *weights, total, normed
    _fixed_sandwich[(tokens,)](*tensors, BRANCHES=len(y), EPS=eps, **flags, **launch, num_warps=8)
    if router is not None and tokens > 1:
        scores = F.linear(normed.view(-1, D), router)
    elif router is not None:
        _fixed_scores[(len(router),)](normed, router, scores, **launch, num_warps=4)
    return total, normed, scores
