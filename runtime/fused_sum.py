"""How a fused layer adds a sublayer's result to the residual (runtime/fused_layer.py)."""

import torch
from torch import Tensor, nn

from model import AddNorm, RMSNorm
from ops.declared import NoAdditions, SumAdditions
from ops.products.join import Added, add_branch
from runtime.plain_forms import settings_of


class ResidualSum:
    """How a sublayer's result joins the residual.

    scale: factor of the result. norm: an RMSNorm of the result, before it is added, or None;
    scalar [1]: then a factor of the sum, or None. branches: results that are normed one by one,
    whose sum has that norm. all_reduce: the module that sums the result over
    several ranks, each of which computes a part, or None; it has `tp.AllReduceAddNorm`'s
    fused_inbox, fused_add and fused_add_router.
    Raises ValueError for a sum that the kernels do not compute.
    """

    def __init__(self, add: nn.Module):
        added = settings_of(add, AddNorm, SumAdditions)
        self.scale, self.all_reduce = added.scale, added.all_reduce
        self.norm, self.scalar, norms = added.norm, added.scalar, added.branch_norms
        self.branches = len(norms) or 1
        self.branch_norms = torch.stack([norm.weight for norm in norms]) if norms else None
        if self.norm is not None:
            for norm in (self.norm, *norms):
                settings_of(norm, RMSNorm, NoAdditions)
                self.check_next(norm)
            if self.all_reduce or self.scale != 1.0:
                raise ValueError(
                    "no kernels for a normed result with a factor, or of several ranks"
                )

    def of_product(self, x: Tensor) -> dict:
        """Return the arguments by which `moe_decode.down` adds its product to x, or sends it.

        A sum with a norm has none: `add`, or the next kernel by `before_norm`, adds the product.
        """
        if self.all_reduce:
            return {"send": self.all_reduce.fused_inbox(x)}
        return {} if self.norm is not None else {"residual": x, "scale": self.scale}

    def add(self, x: Tensor, y: Tensor | None) -> Tensor:
        """Return x [T, D] after the sublayer. y: the product with the arguments `of_product`."""
        if self.all_reduce:
            return self.all_reduce.fused_add(x, y)
        if self.norm is None:
            return y
        return add_branch(x, self.added(y), self.norm.eps)

    def added(self, y: Tensor) -> Added:
        """Return what a kernel adds to x: y [T, D], or [B, T, D] of several branches."""
        norms = self.branch_norms
        return Added(y=y, branch_norms=norms, norm=self.norm.weight, scalar=self.scalar)

    def before_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, dict]:
        """Return x after the sublayer, and the input of the kernel that norms it, with arguments.

        x, y: as of `add`, on one rank. With a norm that kernel computes x after the sublayer.
        """
        if self.norm is None:
            return y, y, {}
        total = torch.empty_like(x)
        return total, x, {"added": self.added(y), "total": total}

    def check_next(self, norm: RMSNorm) -> None:
        """Raise ValueError if one kernel cannot compute this sum and the norm after it."""
        if self.norm is not None and self.norm.eps != norm.eps:
            raise ValueError("no kernels for norms of two epsilons")
