"""How a fused layer adds a sublayer's result to the residual (runtime/fused_layer.py)."""

import torch
from torch import Tensor, nn

from model import AddNorm, Block, RMSNorm
from ops.declared import BlockAdditions, NoAdditions, SumAdditions
from ops.products.join import Added, add_branch
from runtime.plain_forms import settings_of


class ResidualSum:
    """How a sublayer's result joins the residual.

    scale: factor of the result. norm: an RMSNorm of the result, before it is added, or None.
    scalar [1]: with a norm, a factor of the sum, or None. branches: number of results, which are
    normed one by one before their sum has `norm`. all_reduce: the module that sums the parts of
    several ranks, or None; it has fused_inbox, fused_add and fused_add_router, as
    `tp.AllReduceAddNorm`.

    Raises ValueError for a sum that the kernels do not compute.
    """

    def __init__(self, add: nn.Module | None):
        """add: None, if the block adds the result itself."""
        self.adds = add is not None
        added = settings_of(add, AddNorm, SumAdditions) if self.adds else SumAdditions()
        self.scale, self.all_reduce = added.scale, added.all_reduce
        self.norm, self.scalar, norms = added.norm, added.scalar, added.branch_norms
        self.branches = len(norms) or 1
        self.branch_norms = torch.stack([norm.weight for norm in norms]) if norms else None
        if self.norm is not None:
            for norm in (self.norm, *norms):
                settings_of(norm, RMSNorm, NoAdditions)
                self.check_next(norm)
            if self.scale != 1.0:
                raise ValueError("no kernels for a normed result with a factor")

    def of_product(self, x: Tensor) -> dict:
        """Return the arguments by which `moe_decode.down` adds its product to x, or sends it."""
        (add, *_), _ = self.of_products(x)
        return add

    def of_products(self, x: Tensor) -> tuple[list[dict], Tensor | None]:
        """Return the arguments of each branch's product, as `of_product`.

        A sum with a norm adds nothing there: `add` does, or the next kernel by `before_norm`.
        Several branches that are not sent are stored side by side: the place, [B, T, D], is the
        other result.
        """
        if self.all_reduce:
            places = self.all_reduce.fused_inbox(x, self.branches)
            if self.branches == 1 or places[0] is not None:
                return [{"send": place} for place in places], None
        if self.branches > 1:
            branches = x.new_empty(self.branches, *x.shape)
            return [{"out": out} for out in branches], branches
        apart = self.norm is not None or not self.adds
        return [{} if apart else {"residual": x, "scale": self.scale}], None

    def add(self, x: Tensor, y: Tensor | None) -> Tensor:
        """Return x [T, D] after the sublayer. y: the product with the arguments `of_product`."""
        eps = 0.0 if self.norm is None else self.norm.eps
        if self.all_reduce:
            return self.all_reduce.fused_add(x, y, self.added(None), eps)
        return y if self.norm is None else add_branch(x, self.added(y), eps)

    def added(self, y: Tensor | None) -> Added:
        """Return what a kernel adds to x: y [T, D], or [B, T, D] of several branches."""
        if self.norm is None:
            return Added(y=y)
        norms = self.branch_norms
        return Added(y=y, branch_norms=norms, norm=self.norm.weight, scalar=self.scalar)

    def before_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, dict]:
        """Return x after the sublayer, and the input of the kernel that norms it, with arguments.

        x, y: as in `add`, on one rank. With a norm that kernel computes x after the sublayer.
        """
        if self.norm is None:
            return y, y, {}
        total = torch.empty_like(x)
        return total, x, {"added": self.added(y), "total": total}

    def check_next(self, norm: RMSNorm) -> None:
        """Raise ValueError if one kernel cannot compute this sum and the norm after it."""
        if self.norm is not None and self.norm.eps != norm.eps:
            raise ValueError("no kernels for norms of two epsilons")


def norm_and_sum(block: Block, sublayer: str) -> tuple[nn.Module | None, ResidualSum]:
    """Return the norm before a block's "attention" or "ffn", and the sum after it.

    None and an empty sum for a block that computes both itself (`BlockAdditions.mixers`). Raises
    ValueError as `ResidualSum`.
    """
    if settings_of(block, Block, BlockAdditions).mixers:
        return None, ResidualSum(None)
    return getattr(block, f"{sublayer}_norm"), ResidualSum(getattr(block, f"add_{sublayer}"))
