"""Sublayer's results + residual + norm + router scores, for compiled blocks on several GPUs.

`join_tokens` computes them; ops/products/join.py explains why its shapes are fixed. A GPU without
kernels runs `join_plainly`, the reference.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.launch import can_launch, launch
from ops.products.join import Added, Join, Results, Router, divide_token, join_tokens


class NextNorm(NamedTuple):
    """The norm of the sum: `F.rms_norm`, with a bias `F.layer_norm`."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float  # the branches' norms have the same


def empty_scores(x: Tensor, router: Tensor | None) -> Tensor:
    """x [..., D], router [E, D] -> uninitialized scores [T, E]; [0] without a router."""
    if router is None:
        return x.new_empty(0)
    return x.new_empty(x.numel() // x.shape[-1], router.shape[0])


def fixed_join(
    x: Tensor, added: Added, norm: NextNorm, router: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Add results to x [..., D], norm the sum and compute router scores from it.

    added: y like x, times scale; with a norm branches y [B, ..., D]. router [E, D] gives scores
    [T, E]; None gives [0]. Return the sum, the norm and the scores: all GPUs of one kind give the
    same bits. cuBLAS computes the scores of several tokens: it chooses its kernels by shapes alone,
    hence the same on all ranks.
    """
    D, results, x = x.shape[-1], added.y, x.contiguous()
    if x.shape != results.shape[int(added.norm is not None) :]:
        raise ValueError(f"results {list(results.shape)} are not like x {list(x.shape)}")
    if not can_launch(x):
        return join_plainly(x, added, norm, router, scale)
    tokens, branches = x.numel() // D, results.numel() // x.numel()
    total, normed, scores = torch.empty_like(x), torch.empty_like(x), empty_scores(x, router)
    s, programs, found = Join(D, norm.eps, scale=scale, branches=branches), tokens, Router()
    stored = Results(normed, total)
    if router is not None and tokens == 1:
        N = len(router)
        programs, rows, share = divide_token(N, D)
        s = replace(s, N=N, E=N, rows=rows, share=share)
        found, stored = Router(router), Results(normed, total, scores=scores)
    tensors = x, added._replace(y=results.contiguous()), *norm[:2], found, stored
    launch(join_tokens, (programs,), *tensors, settings=s, warps=8)
    if router is not None and tokens > 1:
        scores = F.linear(normed.view(-1, D), router)
    return total, normed, scores


def join_plainly(
    x: Tensor, added: Added, norm: NextNorm, router: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`fixed_join` in PyTorch."""
    rms_norm = partial(F.rms_norm, normalized_shape=x.shape[-1:], eps=norm.eps)
    if added.norm is None:
        total = torch.add(x, added.y, alpha=scale)
    else:
        parts = added.y.unbind()
        if added.branch_norms is not None:
            pairs = zip(parts, added.branch_norms, strict=True)
            parts = [rms_norm(part, weight=weight) for part, weight in pairs]
        total = x + rms_norm(sum(parts), weight=added.norm)
        total = total if added.scalar is None else total * added.scalar
    given = total if norm.weight is None else total.to(norm.weight.dtype)  # it may be fp32
    if norm.bias is None:
        normed = rms_norm(given, weight=norm.weight).to(x.dtype)
    else:
        normed = F.layer_norm(given, x.shape[-1:], norm.weight, norm.bias, norm.eps).to(x.dtype)
    scores = x.new_empty(0) if router is None else F.linear(normed.flatten(0, -2), router)
    return total, normed, scores
