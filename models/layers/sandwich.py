"""Residual connections whose sublayer is normed before it is added (sandwich norm)."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from model import AddNorm, RMSNorm, new_parameter
from ops.declared import SumAdditions
from ops.inductor import materialize


class UnitRMSNorm(nn.Module):
    """RMSNorm without a weight."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.dim, self.eps, self.weight = dim, eps, None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.dim,), None, self.eps)


class Branches(NamedTuple):
    """The outputs [T, D] of two sublayers side by side, to be normed one by one, then summed."""

    shared: Tensor  # output of the dense FFN that every token uses
    experts: Tensor


class SandwichAddNorm(AddNorm):
    """(x + norm(y)) * scalar, and the norm after it.

    branches: with 2, y is Branches, and is the sum of their norms. scaled: whether there is a
    scalar, else it is 1.
    """

    def __init__(self, dim: int, eps: float, branches: int = 1, scaled: bool = False):
        super().__init__()
        self.norm = RMSNorm(dim, eps)
        self.branch_norms = nn.ModuleList(
            RMSNorm(dim, eps) for _ in range(branches if branches > 1 else 0)
        )
        self.scalar = new_parameter(1) if scaled else None

    def forward(self, x: Tensor, y: Tensor | Branches, norm: nn.Module) -> tuple[Tensor, Tensor]:
        if isinstance(y, Branches):
            parts = zip(self.branch_norms, y, strict=True)
            y = sum(branch_norm(branch) for branch_norm, branch in parts)
        x = x + self.norm(y.view_as(x))
        x = materialize(x if self.scalar is None else x * self.scalar)
        return x, materialize(norm(x))

    def fused_decode_settings(self) -> SumAdditions:
        norms = tuple(self.branch_norms)
        return SumAdditions(norm=self.norm, scalar=self.scalar, branch_norms=norms)
