"""What lies around the products of a prompt's experts: pairs by expert, rows in, weighted sum out.

PyTorch alone takes a dozen passes over the rows of all pairs, which together take longer than the
products (docs/log/prompts.md).

Letters: T tokens, A experts of a token, N = T * A pairs, sorted by expert; D numbers of a token, I
of an expert. `columns`, int32, is the order in which the next product reads x
(`Packed.column_order`); None: as it is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.declared import Activation
from ops.launch import check_shapes, jit, launch, tl, triton
from ops.products.codes import activate

KERNELS = "_count_pairs", "_group_pairs", "_gather_rows", "_activate_rows", "_combine_rows"


@dataclass(frozen=True)
class GroupSettings:
    """What `_count_pairs` and `_group_pairs` are compiled for."""

    E: int  # experts
    block: int = 4096  # pairs of a program

    @property
    def bins(self) -> int:
        """Experts, and one for what is no pair."""
        return max(64, triton.next_power_of_2(self.E + 1))


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


# Grid [chunks]: a program counts how many of its BLOCK pairs each expert has. It stores the pairs'
# experts in 16 bits: the programs of all experts read them.
@jit
def _count_pairs(indices, experts, counts, N, s: tl.constexpr):
    E: tl.constexpr = s.E
    BLOCK: tl.constexpr = s.block
    BINS: tl.constexpr = s.bins
    chunk = tl.program_id(0)
    pair = chunk * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(indices + pair, mask=pair < N, other=E).to(tl.int32)
    tl.store(experts + pair, chosen.to(tl.int16), mask=pair < N)
    expert = tl.arange(0, BINS)
    tl.store(counts + chunk * E + expert, tl.histogram(chosen, BINS), mask=expert < E)


# Grid [E, chunks]: a program finds the rows of an expert's pairs among BLOCK, in their order.
@jit
def _group_pairs(experts, counts, order, places, group_ends, N, s: tl.constexpr):
    E: tl.constexpr = s.E
    BLOCK: tl.constexpr = s.block
    expert, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    pair = chunk * BLOCK + tl.arange(0, BLOCK)
    mine = (tl.load(experts + pair, mask=pair < N, other=-1) == expert).to(tl.int32)
    other = tl.arange(0, s.bins)[None, :]
    before = 0
    for start in range(0, chunks, 16):
        part = start + tl.arange(0, 16)[:, None]
        earlier = (other < expert) | (other == expert) & (part < chunk)
        inside = earlier & (part < chunks) & (other < E)
        before += tl.sum(tl.load(counts + part * E + other, mask=inside, other=0))
    place = before + tl.cumsum(mine, 0) - 1
    tl.store(order + place, pair, mask=mine != 0)
    tl.store(places + pair, place, mask=mine != 0)
    if chunk == chunks - 1:
        tl.store(group_ends + expert, before + tl.sum(mine))


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


# Grid [N, blocks]: a program activates a part of one row. `_grouped` has it in its epilogue; the
# library's product does not.
@jit
def _activate_rows(both, bias, pairs, experts, columns, y, s: tl.constexpr):
    WIDTH: tl.constexpr = s.width
    BLOCK: tl.constexpr = s.block
    n, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = column
    if columns is not None:
        at = tl.load(columns + column, mask=inside, other=0)
    GATED: tl.constexpr = s.activation.gated
    ROW: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    row = both + n.to(tl.int64) * ROW
    gate = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(row + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        own = bias + tl.load(experts + tl.load(pairs + n)) * ROW
        gate += tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
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
        row = parts + tl.load(places + pair).to(tl.int64) * WIDTH
        part = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            own = bias + tl.load(experts + pair) * WIDTH
            part += tl.load(own + column, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(y + token.to(tl.int64) * WIDTH + column, total.to(y.dtype.element_ty), mask=inside)


# Launching ----------------------------------------------------------------------------------------


def group_pairs(experts: Tensor, n_expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert: int64 [T, A] -> order, places [N], group_ends [n_expert], all int32.

    order: the pair of each row, places: the row of each pair. The reference is
    `model.group_by_expert`.
    """
    N, s = experts.numel(), GroupSettings(n_expert)
    chunks = triton.cdiv(N, s.block)
    order, places = (experts.new_empty(N, dtype=torch.int32) for _ in range(2))
    group_ends = experts.new_empty(n_expert, dtype=torch.int32)
    short = experts.new_empty(N, dtype=torch.int16)
    counts = experts.new_empty(chunks, n_expert, dtype=torch.int32)
    options = dict(settings=s, warps=8)
    launch(_count_pairs, (chunks,), experts.contiguous(), short, counts, N, **options)
    found = order, places, group_ends
    launch(_group_pairs, (n_expert, chunks), short, counts, *found, N, **options)
    return order, places, group_ends


def gather_rows(x: Tensor, pairs: Tensor | None, active: int, columns: Tensor | None) -> Tensor:
    """x [T, D], integers pairs [N], `active` of each token -> the token of each pair [N, D].

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
    pairs: Tensor | None = None,
    experts: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """both [N, 2 I], gate, then up -> the activation of both [N, I].

    An activation without a gate takes up alone, [N, I]. bias, as wide as `both`, is that of each
    row's expert: the one of its pair, pairs [N] among experts int64 [T, A].
    """
    (N, total), gated = both.shape, activation.gated
    width = total // 2 if gated else total
    if bias is not None:
        assert pairs is not None and experts is not None
        check_shapes(bias=(bias, (len(bias), total)), pairs=(pairs, (N,)))
        experts = experts.contiguous()
    y = both.new_empty(N, width)
    s = RowSettings(width, activation=activation)
    grid = N, triton.cdiv(width, s.block)
    launch(_activate_rows, grid, both, bias, pairs, experts, columns, y, settings=s)
    return y


def combine_rows(
    parts: Tensor,
    places: Tensor,
    experts: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """parts [N, D], sorted; integers places [N]: the row of each pair -> weighted sums [T, D].

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
