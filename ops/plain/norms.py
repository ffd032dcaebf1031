"""Results + residual + norm + router scores in PyTorch: reference of ops/products/fixed_join.py."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def join(
    x: Tensor, added: tuple, norm: tuple, router: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`fixed_join.fixed_join`: added is an `Added`, norm a `NextNorm`."""
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
