"""Residual add + norm + router scores in PyTorch: the reference of ops/products/fixed_join.py."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def add_norm(
    x: Tensor,
    y: Tensor,
    scale: float,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    router: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + scale * y [..., D], its norm, router scores: `fixed_join.fixed_add_norm`."""
    total = torch.add(x, y, alpha=scale)
    norm = F.rms_norm if bias is None else partial(F.layer_norm, bias=bias)
    normed = norm(total.to(weight.dtype), weight.shape, weight=weight, eps=eps)
    normed = normed.to(x.dtype)  # the weight may be in fp32
    return total, normed, score_rows(normed, router)


def sandwich(
    x: Tensor,
    y: Tensor,
    branch_weights: Tensor | None,
    weight: Tensor,
    scalar: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    router: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x + norm(y)) * scalar, its norm, and router scores: `fixed_join.fixed_sandwich`."""
    norm, parts = partial(F.rms_norm, normalized_shape=x.shape[-1:], eps=eps), y.unbind()
    if branch_weights is not None:
        pairs = zip(parts, branch_weights, strict=True)
        parts = [norm(part, weight=each) for part, each in pairs]
    total = x + norm(sum(parts), weight=weight)
    total = total if scalar is None else total * scalar
    normed = norm(total, weight=next_weight)
    return total, normed, score_rows(normed, router)


def score_rows(normed: Tensor, router: Tensor | None) -> Tensor:
    """normed [..., D], router [E, D] -> scores [T, E]; [0] without a router."""
    if router is None:
        return normed.new_empty(0)
    return F.linear(normed.view(-1, normed.shape[-1]), router)
