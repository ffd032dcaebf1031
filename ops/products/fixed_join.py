"""Residual add + norm + router scores, for compiled blocks on several GPUs.

`join_tokens` computes them; ops/products/join.py explains why its shapes are fixed. A GPU without
kernels runs ops/plain/norms.py, the reference.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.launch import can_launch, launch
from ops.plain import norms
from ops.products.join import Added, Join, Results, Router, divide_token, join_tokens


def empty_scores(x: Tensor, router: Tensor | None) -> Tensor:
    """x [..., D], router [E, D] -> uninitialized scores [T, E]; [0] without a router."""
    if router is None:
        return x.new_empty(0)
    return x.new_empty(x.numel() // x.shape[-1], router.shape[0])


def _join_fixed(
    x: Tensor,
    added: Added,
    norm: tuple[Tensor | None, Tensor | None, float],
    router: Tensor | None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `join_tokens` for x [..., D] -> sum, norm, scores. norm: weight, bias, eps.

    cuBLAS computes the scores of several tokens: it chooses its kernels by shapes alone, hence the
    same on all ranks.
    """
    D, (weight, bias, eps) = x.shape[-1], norm
    tokens, branches = x.numel() // D, added.y.numel() // x.numel()
    total, normed, scores = torch.empty_like(x), torch.empty_like(x), empty_scores(x, router)
    s, programs, found = Join(D, eps, scale=scale, branches=branches), tokens, Router()
    results = Results(normed, total)
    if router is not None and tokens == 1:
        N = len(router)
        programs, rows, share = divide_token(N, D)
        s = replace(s, N=N, E=N, rows=rows, share=share)
        found, results = Router(router), Results(normed, total, scores=scores)
    launch(join_tokens, (programs,), x, added, weight, bias, found, results, settings=s, warps=8)
    if router is not None and tokens > 1:
        scores = F.linear(normed.view(-1, D), router)
    return total, normed, scores


def fixed_add_norm(
    x: Tensor,
    y: Tensor,
    scale: float,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    router: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add x + scale * y [..., D], norm the sum and compute router scores from it.

    The norm is `F.rms_norm`, with a bias `F.layer_norm`. router [E, D] gives scores [T, E]; None
    gives [0]. Return the sum, the norm and the scores, bitwise identical on all GPUs of one kind.
    """
    if x.shape != y.shape:
        raise ValueError(f"y {list(y.shape)} is not like x {list(x.shape)}")
    if not can_launch(x):
        return norms.add_norm(x, y, scale, weight, bias, eps, router)
    added = Added(y=y.contiguous())
    return _join_fixed(x.contiguous(), added, (weight, bias, eps), router, scale)


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

    x [..., D]. y [B, ..., D]: with several branches, y is the sum of their norms, whose weights are
    branch_weights [B, D]. Return (x + norm(y)) * scalar [1], its norm by next_weight [D], and
    router scores [T, E], all bitwise identical on all GPUs of one kind. None: no such factor.
    """
    if x.shape != y.shape[1:]:
        raise ValueError(f"branches of y {list(y.shape)} are not like x {list(x.shape)}")
    if not can_launch(x):
        return norms.sandwich(x, y, branch_weights, weight, scalar, next_weight, eps, router)
    added = Added(y=y.contiguous(), branch_norms=branch_weights, norm=weight, scalar=scalar)
    return _join_fixed(x.contiguous(), added, (next_weight, None, eps), router)
