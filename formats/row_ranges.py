"""Weights whose rows are in several formats: ranges of rows, each a module of its own.

Published files may mix formats within what is one weight here: q and k in 4 bits, v in 6.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from formats.packed import add_bias
from model import ExpertLinear, Linear


class RowRanges(nn.ModuleList):
    """`model.Linear` of ranges of rows, plain or packed. Its bias is that of all rows."""

    def __init__(self, module: Linear, counts: list[int]):
        """module: the one to replace. counts: rows of each range. Raises ValueError for misfits."""
        check_counts(module, counts)
        width = module.weight.shape[-1]
        with module.weight.device:
            super().__init__(Linear(width, count) for count in counts)
        self.bias = module.bias

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([rows(x) for rows in self], dim=-1)
        return y if self.bias is None else y + self.bias


class ExpertRowRanges(nn.ModuleList):
    """`model.ExpertLinear` of ranges of rows, the same for all experts."""

    def __init__(self, module: ExpertLinear, counts: list[int]):
        check_counts(module, counts)
        n_expert, _, width = module.weight.shape
        with module.weight.device:
            super().__init__(ExpertLinear(n_expert, width, count) for count in counts)
        self.bias = getattr(module, "bias", None)

    def gather(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        """x [T, A, in], expert_indices [T, A] -> [T, A, out]."""
        y = torch.cat([rows.gather(x, expert_indices) for rows in self], dim=-1)
        return add_bias(y, self.bias, expert_indices)

    def gather_gated(self, x: Tensor, expert_indices: Tensor, activation: Callable) -> Tensor:
        """x [T, in], expert_indices [T, A] -> activation(gate, up) [T, A, out / 2]."""
        gate, up = self.gather(x.unsqueeze(1), expert_indices).chunk(2, dim=-1)
        return activation(gate, up).to(x.dtype)

    def grouped(self, x: Tensor, group_ends: Tensor) -> Tensor:
        """x [N, in] sorted by expert, rows of e before group_ends[e] -> [N, out]."""
        y = torch.cat([rows.grouped(x, group_ends) for rows in self], dim=-1)
        if self.bias is None:
            return y
        rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        return add_bias(y, self.bias, torch.searchsorted(group_ends, rows, right=True))


def check_counts(module: Linear | ExpertLinear, counts: list[int]) -> None:
    """Raise ValueError unless these are the rows of the module, in two ranges or more."""
    if not isinstance(module, Linear | ExpertLinear):
        raise ValueError("ranges of rows are of products' weights alone")
    if not isinstance(counts, list) or any(type(count) is not int for count in counts):
        raise ValueError("its ranges are no list of numbers")
    if len(counts) < 2 or min(counts) < 1 or sum(counts) != module.weight.shape[-2]:
        raise ValueError(f"ranges of {counts} rows are not {module.weight.shape[-2]}")
