"""What lies between the products of a prompt's experts: rows in, activation, weighted sum out.

PyTorch alone takes a dozen passes over the rows of all pairs, which together take longer than the
products (docs/log/prompts.md).

Letters: T tokens, A experts of a token, N = T * A pairs, sorted by expert; D numbers of a token, I
of an expert. The next product reads its x in the order of `columns`, int32
(`Packed.column_order`); None: as it is.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.declared import Activation
from ops.launch import check_shapes, jit, launch, tl, triton
from ops.products.codes import activate

KERNELS = "_gather_rows", "_activate_rows", "_combine_rows", "_group_pairs"
SORTED = 4096  # pairs that a program of `_group_pairs` reads at once


@dataclass(frozen=True)
class RowSettings:
    """What the kernels are compiled for."""

    width: int  # numbers of a result's row
    active: int = 1  # A
    activation: Activation | None = None

    @property
    def block(self) -> int:
        """Numbers of a program."""
        return min(1024, triton.next_power_of_2(self.width))


# Kernels ------------------------------------------------------------------------------------------


# Grid [N, blocks]: a program copies a part of one row.
@jit
def _gather_rows(x, rows, columns, y, s: tl.constexpr):
    WIDTH: tl.constexpr = s.width
    BLOCK: tl.constexpr = s.block
    n, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    row = n.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + n).to(tl.int64) // s.active
    at = column
    if columns is not None:
        at = tl.load(columns + column, mask=inside, other=0)
    value = tl.load(x + row * WIDTH + at, mask=inside)
    tl.store(y + n.to(tl.int64) * WIDTH + column, value, mask=inside)


# Grid [N, blocks]: a program activates a part of one row.
@jit
def _activate_rows(both, bias, experts, columns, y, s: tl.constexpr):
    WIDTH: tl.constexpr = s.width
    BLOCK: tl.constexpr = s.block
    n, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = column
    if columns is not None:
        at = tl.load(columns + column, mask=inside, other=0)
    row = both + n.to(tl.int64) * (2 * WIDTH)
    gate = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        own = bias + tl.load(experts + n) * (2 * WIDTH)
        gate += tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(own + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = s.activation.kind
    h = activate(gate, up, kind, s.activation.limit, s.activation.alpha)
    tl.store(y + n.to(tl.int64) * WIDTH + column, h.to(y.dtype.element_ty), mask=inside)


# Grid [T, blocks]: a program sums a part of one token.
@jit
def _combine_rows(parts, places, experts, weights, bias, y, s: tl.constexpr):
    WIDTH: tl.constexpr = s.width
    BLOCK: tl.constexpr = s.block
    A: tl.constexpr = s.active
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(A):
        pair = token * A + a
        row = parts + tl.load(places + pair) * WIDTH
        part = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            own = bias + tl.load(experts + pair) * WIDTH
            part += tl.load(own + column, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(y + token.to(tl.int64) * WIDTH + column, total.to(y.dtype.element_ty), mask=inside)


# Grid [E]: a program finds the pairs of one expert, and its place by counting those of experts
# before it. Each reads all pairs, twice: they are few bytes, and a sort takes seven kernels.
@jit
def _group_pairs(experts, order, places, group_ends, N, s: tl.constexpr):
    BLOCK: tl.constexpr = s.width
    expert = tl.program_id(0)
    before, own = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        found = tl.load(experts + pair, mask=pair < N, other=expert + 1)
        before += (found < expert).to(tl.int32)
        own += (found == expert).to(tl.int32)
    place = tl.sum(before)
    tl.store(group_ends + expert, place + tl.sum(own))
    for start in range(0, N, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = tl.load(experts + pair, mask=pair < N, other=expert + 1) == expert
        count = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + place + count - 1, pair.to(tl.int64), mask=mine)
        tl.store(places + pair, (place + count - 1).to(tl.int64), mask=mine)
        place += tl.sum(mine.to(tl.int32))


# Launching ----------------------------------------------------------------------------------------


def group_pairs(experts: Tensor, n_expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """experts int64 [T, A] -> the pairs by expert, the place of each pair, ends of experts' pairs.

    The reference is `model.group_by_expert`: int64 [N], int64 [N], int32 [E].
    """
    order, places = (experts.new_empty(experts.numel()) for _ in range(2))
    group_ends = experts.new_empty(n_expert, dtype=torch.int32)
    s = RowSettings(min(SORTED, triton.next_power_of_2(experts.numel())))
    given = experts.contiguous(), order, places, group_ends, experts.numel()
    launch(_group_pairs, (n_expert,), *given, settings=s, warps=8)
    return order, places, group_ends


def gather_rows(x: Tensor, pairs: Tensor | None, active: int, columns: Tensor | None) -> Tensor:
    """x [T, D], pairs int64 [N], `active` of each token -> the token of each pair [N, D].

    pairs None: all tokens, once.
    """
    count, width = len(x) if pairs is None else len(pairs), x.shape[1]
    y = x.new_empty(count, width)
    s = RowSettings(width, active)
    grid = count, triton.cdiv(width, s.block)
    launch(_gather_rows, grid, x.contiguous(), pairs, columns, y, settings=s)
    return y


def activate_rows(
    both: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    experts: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """both [N, 2 I], gate, then up -> the activation of both [N, I].

    bias [E, 2 I] is that of each row's expert, int64 [N].
    """
    N, width = len(both), both.shape[1] // 2
    if bias is not None:
        check_shapes(bias=(bias, (len(bias), 2 * width)), experts=(experts, (N,)))
    y = both.new_empty(N, width)
    s = RowSettings(width, activation=activation)
    grid = N, triton.cdiv(width, s.block)
    launch(_activate_rows, grid, both, bias, experts, columns, y, settings=s)
    return y


def combine_rows(
    parts: Tensor,
    places: Tensor,
    experts: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """parts [N, D], sorted; places int64 [N]: the row of each pair -> weighted sums [T, D].

    experts int64 and weights fp32 [T, A]; bias [E, D] is that of each pair's expert. The reference
    is `Experts.combine`.
    """
    (T, A), width = weights.shape, parts.shape[1]
    check_shapes(places=(places, (T * A,)), experts=(experts, (T, A)))
    y = parts.new_empty(T, width)
    s = RowSettings(width, A)
    tensors = parts, places, experts.contiguous(), weights.contiguous(), bias, y
    launch(_combine_rows, (T, triton.cdiv(width, s.block)), *tensors, settings=s)
    return y
