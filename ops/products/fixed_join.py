"""Sublayer's results + residual + norm + router scores, for compiled blocks on several GPUs.

`join_tokens` computes them; ops/products/join.py explains why its shapes are fixed. A GPU without
kernels runs `join_plainly`, the reference; so do norms with a bias, kernel by kernel of PyTorch.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.launch import can_launch, launch
from ops.products.join import Added, Join, Results, Router, join_tokens
from ops.products.prompt_rows import PairResults, checked_pairs, combine_rows, keep_order


class NextNorm(NamedTuple):
    """The norm of the sum: `F.rms_norm`, with a bias `F.layer_norm`."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float  # the branches' norms have the same


def scores_of(normed: Tensor, router: Tensor | None) -> Tensor:
    """normed [..., D], router [E, D] -> scores [T, E]; [0] without a router."""
    if router is None:
        return normed.new_empty(0)
    return F.linear(normed.flatten(0, -2), router)


def fixed_join(
    x: Tensor,
    added: Added,
    norm: NextNorm,
    router: Tensor | None = None,
    scale: float = 1.0,
    columns: Tensor | None = None,
    pairs: PairResults | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add results to x [..., D], norm the sum and compute router scores from it.

    added: y like x, times scale; with a norm branches y [B, ..., D]. pairs: those whose sum is y.
    router [E, D] gives scores [T, E]; None gives [0]. Return the sum, the norm and the scores: all
    GPUs of one kind give the same bits. cuBLAS computes scores: it chooses its kernels by shapes
    alone, hence the same on all ranks.

    columns int32 [D]: `in_order` of the norm is then known.
    """
    D, x, by_kernel = x.shape[-1], x.contiguous(), can_launch(x) and norm.bias is None
    if pairs is not None and not by_kernel:
        added, pairs = Added(y=combine_rows(*pairs).view_as(x)), None
    results = added.y
    if results is not None and x.shape != results.shape[int(added.norm is not None) :]:
        raise ValueError(f"results {list(results.shape)} are not like x {list(x.shape)}")
    if not by_kernel:
        return join_plainly(x, added, norm, router, scale)  # `in_order` computes it when asked
    tokens, branches, active = x.numel() // D, 1, 0
    if pairs is not None:
        pairs = checked_pairs(*pairs)
        active = pairs.weights.shape[1]
    else:
        branches, added = results.numel() // x.numel(), added._replace(y=results.contiguous())
    total, normed = torch.empty_like(x), torch.empty_like(x)
    ordered = None if columns is None else normed.new_empty(tokens, D)
    results = Results(normed, total, ordered=ordered, columns=columns)
    tensors = x, added, pairs, norm.weight, Router(), results
    s = Join(D, norm.eps, many=True, scale=scale, branches=branches, active=active)
    launch(join_tokens, (1, tokens), *tensors, settings=s, warps=8)
    if ordered is not None:
        keep_order(normed, columns, ordered)
    return total, normed, scores_of(normed, router)


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
    return total, normed, scores_of(normed, router)
