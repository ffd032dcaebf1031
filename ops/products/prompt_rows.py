"""What lies around the products of a prompt's experts: pairs by expert, rows in, weighted sum out.

PyTorch alone takes a dozen passes over the rows of all pairs, which together take longer than the
products (docs/log/prompts.md).

Letters: T tokens, A experts of a token, N = T * A pairs, sorted by expert; D numbers of a token, I
of an expert. `columns`, int32, is the order in which the next product reads x
(`Packed.column_order`); None: as it is.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ops.declared import Activation
from ops.launch import check_shapes, jit, launch, tl
from ops.products.codes import activate
from ops.sizes import cdiv, pow2

KERNELS = "_count_pairs", "_group_pairs", "_gather_rows", "_activate_rows", "_combine_rows"
CHUNKS = 128  # into which pairs are divided, at most: each program reads the counts of all
FEW_PAIRS = 4096  # that each program counts itself, without a kernel before it


class PairResults(NamedTuple):
    """Results of pairs, not yet combined: arguments of `combine_rows`."""

    parts: Tensor
    places: Tensor
    experts: Tensor
    weights: Tensor
    bias: Tensor | None = None
    shared: Tensor | None = None
    gate: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class GroupSettings:
    """What `_count_pairs` and `_group_pairs` are compiled for."""

    E: int  # experts
    active: int  # A
    chunk: int  # pairs of a program
    rows: int = 128  # pairs that are compared with each other
    counted: int = 2048  # pairs that a program counts at once

    bins = property(lambda s: max(64, pow2(s.E)))
    parts = property(lambda s: max(8, 8192 // s.bins))  # chunks whose counts are read at once


@dataclass(frozen=True)
class RowSettings:
    """What the kernels are compiled for."""

    width: int  # numbers of a result's row
    active: int = 1  # A
    activation: Activation | None = None

    most: int = 1024  # numbers of a program

    block = property(lambda s: min(s.most, pow2(s.width)))
    padded = property(lambda s: pow2(s.width))


@jit
def _count_real(last, N, s: tl.constexpr):
    """Return how many of N pairs are those of real tokens: padding has the last ones."""
    if last is not None:
        N = tl.minimum(N, (tl.maximum(tl.load(last).to(tl.int32), 0) + 1) * s.active)
    return N


# Grid [chunks]: a program counts how many pairs of its chunk each expert has.
@jit
def _count_pairs(indices, counts, last, N, s: tl.constexpr):
    chunk, real = tl.program_id(0), _count_real(last, N, s)
    pair, expert = chunk * s.chunk + tl.arange(0, s.chunk), tl.arange(0, s.bins)
    chosen = tl.load(indices + pair, mask=pair < real, other=0).to(tl.int32)
    found = tl.histogram(chosen, s.bins, pair < real)
    tl.store(counts + chunk * s.E + expert, found, mask=expert < s.E)


@jit
def _count_few(indices, before, N, real, s: tl.constexpr):
    """Count the pairs of each expert: all, and those before pair `before` -> [bins] each."""
    both = tl.zeros([2 * s.bins], tl.int32)
    for start in range(0, N, s.counted):
        pair = start + tl.arange(0, s.counted)
        chosen = tl.load(indices + pair, mask=pair < real, other=0).to(tl.int32)
        both += tl.histogram(chosen * 2 + (pair < before).to(tl.int32), 2 * s.bins, pair < real)
    later, earlier = tl.split(tl.reshape(both, [s.bins, 2]))
    return later + earlier, earlier


# Grid [chunks]: a program finds the rows of its chunk's pairs. An expert's next row is that after
# all pairs of earlier experts, and its own of earlier chunks. Pairs of padding come last, in no
# expert's rows. Nothing computes those, so padding sums results of row 0: they are finite.
@jit
def _group_pairs(indices, counts, last, order, places, group_ends, N, s: tl.constexpr):
    chunk, chunks, real = tl.program_id(0), tl.num_programs(0), _count_real(last, N, s)
    expert, n = tl.arange(0, s.bins), tl.arange(0, s.rows)
    if counts is None:
        total, earlier = _count_few(indices, chunk * s.chunk, N, real, s)
    else:
        total, earlier = tl.zeros([s.bins], tl.int32), tl.zeros([s.bins], tl.int32)
        for start in range(0, chunks, s.parts):
            part = start + tl.arange(0, s.parts)[:, None]
            inside = (part < chunks) & (expert < s.E)[None, :]
            found = tl.load(counts + part * s.E + expert[None, :], mask=inside, other=0)
            total += tl.sum(found, 0)
            earlier += tl.sum(tl.where(part < chunk, found, 0), 0)
    ends = tl.cumsum(total, 0)
    if chunk == 0:
        tl.store(group_ends + expert, ends, mask=expert < s.E)
    next_rows = ends - total + earlier
    for start in range(0, s.chunk, s.rows):
        pair = chunk * s.chunk + start + n
        chosen = tl.load(indices + pair, mask=pair < real, other=0).to(tl.int32)
        # Summed along the axis of which a lane has many numbers: no shuffles.
        before = (chosen[:, None] == chosen[None, :]) & (n[:, None] < n[None, :])
        place = tl.gather(next_rows, chosen, 0) + tl.sum(before.to(tl.int32), 0)
        if last is not None:
            tl.store(order + pair, pair, mask=(pair >= real) & (pair < N))
            tl.store(places + pair, 0, mask=(pair >= real) & (pair < N))
        tl.store(order + place, pair, mask=pair < real)
        tl.store(places + pair, place, mask=pair < real)
        if s.chunk > s.rows:
            next_rows += tl.histogram(chosen, s.bins, pair < real)


# Grid [N, blocks]: a program copies a part of one row. A token is -1 if no logit was finite: then
# any row serves as its embedding.
@jit
def _gather_rows(x, rows, columns, y, s: tl.constexpr):
    n, column = tl.program_id(0), tl.program_id(1) * s.block + tl.arange(0, s.block)
    inside = column < s.width
    row = n.to(tl.int64)
    if rows is not None:
        row = tl.maximum(tl.load(rows + n).to(tl.int64), 0) // s.active
    at = column
    if columns is not None:
        at = tl.load(columns + column, mask=inside, other=0)
    value = tl.load(x + row * s.width + at, mask=inside)
    tl.store(y + n.to(tl.int64) * s.width + column, value, mask=inside)


# Grid [N, blocks]: a program activates a part of one row. `_grouped` has it in its epilogue; the
# library's product does not.
@jit
def _activate_rows(both, bias, pairs, experts, columns, y, s: tl.constexpr):
    n, column = tl.program_id(0), tl.program_id(1) * s.block + tl.arange(0, s.block)
    inside = column < s.width
    at = column
    if columns is not None:
        at = tl.load(columns + column, mask=inside, other=0)
    ROW: tl.constexpr = 2 * s.width if s.activation.gated else s.width
    row = both + n.to(tl.int64) * ROW
    gate = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if s.activation.gated:
        up = tl.load(row + s.width + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        own = bias + tl.load(experts + tl.load(pairs + n)) * ROW
        gate += tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
        if s.activation.gated:
            up += tl.load(own + s.width + at, mask=inside, other=0.0).to(tl.float32)
    h = activate(gate, up, s.activation)
    tl.store(y + n.to(tl.int64) * s.width + column, h.to(y.dtype.element_ty), mask=inside)


@jit
def combine_token(
    pairs, token, column, WIDTH: tl.constexpr, PADDED: tl.constexpr, ACTIVE: tl.constexpr
):
    """Return numbers `column` of the weighted sum of a token's pairs (`PairResults`), in x's dtype.

    PADDED: a power of two, for a row of WIDTH numbers. The gate is a product of one output: the
    library takes as long for it as this takes for all.
    """
    inside, factor, at = column < WIDTH, 1.0, token.to(tl.int64) * WIDTH
    if pairs.gate is not None:
        x, gate_weight = pairs.gate
        number = tl.arange(0, PADDED)
        x = tl.load(x + at + number, mask=number < WIDTH, other=0.0)
        row = tl.load(gate_weight + number, mask=number < WIDTH, other=0.0)
        factor = tl.sigmoid(tl.sum(x.to(tl.float32) * row.to(tl.float32)))
    total = tl.zeros_like(column).to(tl.float32)
    for a in tl.static_range(ACTIVE):
        pair = token * ACTIVE + a
        row = pairs.parts + tl.load(pairs.places + pair).to(tl.int64) * WIDTH
        part = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
        if pairs.bias is not None:
            own = pairs.bias + tl.load(pairs.experts + pair) * WIDTH
            part += tl.load(own + column, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(pairs.weights + pair)
    if pairs.shared is not None:
        part = tl.load(pairs.shared + at + column, mask=inside, other=0.0)
        total += part.to(tl.float32) * factor
    return total.to(pairs.parts.dtype.element_ty)


# Grid [T, blocks]: a program sums a part of one token.
@jit
def _combine_rows(pairs, y, s: tl.constexpr):
    token, column = tl.program_id(0), tl.program_id(1) * s.block + tl.arange(0, s.block)
    total = combine_token(pairs, token, column, s.width, s.padded, s.active)
    tl.store(y + token.to(tl.int64) * s.width + column, total, mask=column < s.width)


def group_pairs(
    experts: Tensor, n_expert: int, last: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert: int64 [T, A] -> order, places [N], group_ends [n_expert], all int32.

    order: the pair of each row, places: the row of each pair. The reference is
    `model.group_by_expert`. last [1]: the last token that is no padding; None: all are real. No
    expert computes rows of padding.
    """
    N, active, experts = experts.numel(), experts.shape[1], experts.contiguous()
    chunk = max(128, pow2(cdiv(N, CHUNKS)))
    s = GroupSettings(n_expert, active, chunk)
    chunks = cdiv(N, s.chunk)
    order, places = (experts.new_empty(N, dtype=torch.int32) for _ in range(2))
    group_ends = experts.new_empty(n_expert, dtype=torch.int32)
    options, counts = dict(settings=s, warps=8), None
    found = order, places, group_ends
    if N > FEW_PAIRS:
        counts = experts.new_empty(chunks, n_expert, dtype=torch.int32)
        launch(_count_pairs, (chunks,), experts, counts, last, N, **options)
    launch(_group_pairs, (chunks,), experts, counts, last, *found, N, **options)
    return found


def gather_rows(x: Tensor, pairs: Tensor | None, active: int, columns: Tensor | None) -> Tensor:
    """x [T, D] -> the token of each of pairs [N], `active` a token, [N, D]; None: all, once."""
    count, width = len(x) if pairs is None else len(pairs), x.shape[1]
    y = x.new_empty(count, width)
    # Neighbors of a result come from all over a row.
    s = RowSettings(width, active, most=1024 if columns is None else 4096)
    grid = count, cdiv(width, s.block)
    launch(_gather_rows, grid, x.contiguous(), pairs, columns, y, settings=s)
    return y


def keep_order(x: Tensor, columns: Tensor, ordered: Tensor) -> None:
    """Let `in_order` of x [..., D] find what a kernel has stored beside x: [T, D]."""
    x.ordered = columns, ordered


def in_order(x: Tensor, columns: Tensor) -> Tensor:
    """Return x [..., D] in the order of `columns` [T, D]."""
    known, ordered = getattr(x, "ordered", (None, None))
    return ordered if known is columns else gather_rows(x.flatten(0, -2), None, 1, columns)


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
    grid = N, cdiv(width, s.block)
    launch(_activate_rows, grid, both, bias, pairs, experts, columns, y, settings=s)
    return y


def checked_pairs(
    parts: Tensor,
    places: Tensor,
    experts: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    shared: Tensor | None = None,
    gate: tuple[Tensor, Tensor] | None = None,
) -> PairResults:
    """Return the arguments of `combine_rows` as kernels read them. Raises ValueError by shapes."""
    (T, A), width = weights.shape, parts.shape[1]
    check_shapes(places=(places, (T * A,)), experts=(experts, (T, A)))
    if shared is not None:
        check_shapes(shared=(shared, (T, width)))
    if gate is not None:
        x, weight = gate
        check_shapes(x=(x, (T, width)), gate=(weight, (1, width)))
        gate = x.contiguous(), weight
    weights = weights.contiguous()
    return PairResults(parts, places, experts.contiguous(), weights, bias, shared, gate)


def combine_rows(*pairs, **more) -> Tensor:
    """parts [N, D], sorted; integers places [N]: the row of each pair -> weighted sums [T, D].

    experts int64 and weights fp32 [T, A]; bias [E, D] is that of each pair's expert. shared [T, D]
    is added: the result of a shared expert, times the sigmoid of its gate if there is one. gate: x
    [T, D] and the gate's weight [1, D]. Arguments are those of `PairResults`. The reference is
    `Experts.combine`, then `GatedSharedExpertMoE.merge`.
    """
    given = checked_pairs(*pairs, **more)
    (T, A), width = given.weights.shape, given.parts.shape[1]
    y = given.parts.new_empty(T, width)
    s = RowSettings(width, A)
    launch(_combine_rows, (T, cdiv(width, s.block)), given, y, settings=s)
    return y
