"""The experts of 2 to 64 tokens in four Triton kernels: an expert is read once for 8 of its tokens.

    sort_pairs        pairs of a token and an expert that it chose, in tiles of one expert each
    multiply_tiles    the gate and up products of each tile, and the activation
    multiply_tiles    the down products of each tile, times the routing weights
    combine           the sum over the experts of a token, plus residual

A shared expert in another format has its tiles among the others, and `multiply_tiles` is launched
for them once more with its weights.

ops/products/fragments.py has the products' loop, and explains how tensor cores get their operands.
A tile has 8 to 32 pairs. An expert that more tokens chose has several tiles; the later ones find
its weights in L2. The numbers of pairs and tiles stay on the GPU: the grid has a program for each
tile that is possible, and programs without a tile return.

Letters: T tokens, A experts of a token (shared ones are among them), P = T * A pairs, I and D
numbers of h and of x. Pair n is that of token n // A and its expert n % A.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ops.declared import Activation
from ops.launch import await_previous, jit, launch, tl
from ops.products.codes import activate
from ops.products.few_tokens import (
    FewTiles,
    order_words,
    settings_of,
    unit_order,
    unit_tensors,
)
from ops.products.few_weights import load_row_scales, load_rows
from ops.products.few_x import UnitOrder, load_fields, place_in_order, spread_begins
from ops.products.fragments import TILE, FewSettings, multiply_steps
from ops.products.routing import queries_of
from ops.products.tilings import measured_fields, place_of
from ops.products.units import finish
from ops.products.weights import Weight, WeightTensors
from ops.sizes import cdiv, pow2

MAX_TOKENS = 64
SORTED = 4  # pairs and tiles of a program of `_sort_pairs`
COLUMNS = 512  # numbers of a program of `_combine`


class PairTiles(NamedTuple):
    """Pairs of a token and its expert, sorted by expert. Tiles past the end have a count of 0."""

    pairs: Tensor  # int32 [tiles, pairs of a tile]
    experts: Tensor  # int32 [tiles]
    counts: Tensor  # int32 [tiles], the tile's pairs


@dataclass(frozen=True)
class SortSettings:
    """What `_sort_pairs` is compiled for."""

    E: int
    A: int
    T: int
    queries: int  # tokens of a sequence; T if `last` is absent

    P = property(lambda s: s.T * s.A)
    tile = property(lambda s: choose_tile(s.E, s.P))
    tiles = property(lambda s: min(s.P, s.E + s.P // s.tile))  # the most tiles that there may be
    block = property(lambda s: pow2(s.P))
    # Bins of experts; the last ones have what is no pair.
    bins = property(lambda s: pow2(s.E + 1))
    sorted = property(lambda s: SORTED)


@dataclass(frozen=True)
class ExpertSettings(FewSettings):
    """What `_multiply_tiles` is compiled for."""

    activation: Activation | None  # None: the product is down
    active: int  # A
    order: UnitOrder | None = None  # in which results are stored
    begin: int = 0  # the first expert of the weight, if it has not all
    end: int = 0  # one past the last; 0: it has all

    down = property(lambda s: s.activation is None)
    # Whether rows are those of gates, then as many others.
    gated = property(lambda s: s.activation is not None and s.activation.gated)


@dataclass(frozen=True)
class CombineSettings:
    """What `_combine` is compiled for."""

    D: int
    A: int
    queries: int  # tokens of a sequence, if `last` is given
    scale: float
    columns: int = COLUMNS


# Grid [P / SORTED]: a program places SORTED pairs, and finds the experts of as many tiles. For this
# each one counts all pairs.
#
# Pairs of an expert are in the order of their tokens. Padding has no pairs.
@jit
def _sort_pairs(indices, last, order, s: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    pair, mine = tl.arange(0, s.block), tl.program_id(0) * s.sorted + tl.arange(0, s.sorted)
    real, mine_is_real = pair < s.P, mine < s.P
    if last is not None:
        token, own = tl.minimum(pair, s.P - 1) // s.A, tl.minimum(mine, s.P - 1) // s.A
        real = real & (token % s.queries <= tl.load(last + token // s.queries))
        mine_is_real = mine_is_real & (own % s.queries <= tl.load(last + own // s.queries))
    expert = tl.load(indices + pair, mask=real, other=s.E).to(tl.int32)
    chosen = tl.load(indices + mine, mask=mine_is_real, other=s.E).to(tl.int32)
    bins = tl.arange(0, s.bins)
    count = tl.where(bins < s.E, tl.histogram(expert, s.bins), 0)
    tiles = (count + s.tile - 1) // s.tile
    ends = tl.cumsum(tiles, 0)

    same = bins[None, :] == chosen[:, None]
    first = tl.sum(tl.where(same, (ends - tiles)[None, :], 0), 1)
    before = (expert[None, :] == chosen[:, None]) & (pair[None, :] < mine[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    tl.store(order.pairs + first * s.tile + rank, mine, mask=chosen < s.E)

    # The program's tiles have the same numbers as its pairs. Those past the end have no bin.
    owner = tl.sum((ends[None, :] <= mine[:, None]).to(tl.int32), 1)
    is_owner = bins[None, :] == owner[:, None]
    left = tl.sum(tl.where(is_owner, (count - (mine[:, None] - (ends - tiles)) * s.tile), 0), 1)
    is_tile = mine < s.tiles
    tl.store(order.experts + mine, owner, mask=is_tile)
    tl.store(order.counts + mine, tl.minimum(left, s.tile), mask=is_tile)


@jit
def _load_pair(pairs, routing, slot, count):
    """Load the pair of each slot of a tile, and its routing weight if the product is down."""
    pair = tl.load(pairs + tl.minimum(slot, count - 1))
    return pair, 1.0 if routing is None else tl.load(routing + pair)


@jit
def _finish_rows(total, scales, bias, rows, inside, s: tl.constexpr, DTYPE: tl.constexpr):
    """Return the products of an expert's rows. scales: as of `load_row_scales`."""
    result = finish(tl.sum(total, 0), scales, s.kind, DTYPE)
    if bias is not None:
        result += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    return result


# Grid [R, tiles]: a program computes `stored` rows of the result of a tile's pairs.
#
# Gate and up, or up alone, have an activation: the result is h [P, I], and the x of a pair is that
# of its token.
# Down has none: the result is one fp32 row a pair, times its routing weight, of the pair's own x.
# The previous kernels chose the experts, so nothing is loaded before the wait.
#
# One function: its order of loads and waits decides its speed.
@jit
def _multiply_tiles(x, order, routing, weights, bias, y, s: tl.constexpr, PDL: tl.constexpr):
    TILE: tl.constexpr = 8 * s.tiles
    N: tl.constexpr = s.out // 2 if s.gated else s.out  # numbers of a result
    row, tile = tl.program_id(0) * s.stored, tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    count, expert = tl.load(order.counts + tile), tl.load(order.experts + tile)
    if count <= 0:
        return
    if s.end:
        if (expert < s.begin) | (expert >= s.end):
            return
        expert -= s.begin
    # Of this expert. In place: Triton 3.6 does not return tuples with None.
    expert = expert.to(tl.int64)
    first_row, first_scale = expert * s.out, expert * s.scales
    weights = WeightTensors(
        weights.codes + expert * (s.out * 2 * s.words),
        None if weights.scale is None else weights.scale + first_scale,
        None if weights.scale_step is None else weights.scale_step + first_row,
        None if weights.scale_low is None else weights.scale_low + first_row,
        None if weights.zero is None else weights.zero + first_scale,
        None if weights.zero_step is None else weights.zero_step + first_row,
        None if weights.zero_low is None else weights.zero_low + first_row,
        None if weights.high is None else weights.high + expert * s.units_above,
        None if weights.step is None else weights.step + expert * s.steps_of_256,
    )
    tiles, xs = (), ()
    for d in tl.static_range(s.depth):
        tiles = tiles + (load_rows(weights, row, d, d == s.steps - 1, s),)
    rows, slot = row + tl.arange(0, s.rows)[:, None], tl.arange(0, TILE)[None, :]
    inside = rows < N
    if s.stored < s.rows:
        inside &= rows < row + s.stored
    scales = load_row_scales(weights, 0, rows, inside, s)
    if s.gated:
        up_scales = load_row_scales(weights, N, rows, inside, s)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Slots past the last pair compute the same as it, and are not stored.
    lane = tl.arange(0, s.tiles * s.warps * 32)
    lane_slot = tl.minimum(lane // (s.warps * 32) * 8 + lane // 4 % 8, count - 1)
    source = tl.load(order.pairs + tile * TILE + lane_slot)
    # Of 64 bits: the compiler adds constants to these in the load's instruction.
    begins = (source if s.down else source // s.active).to(tl.int64) * s.width
    begins = spread_begins(begins, s)
    for d in tl.static_range(s.x_depth):
        xs = xs + (load_fields(x, begins, d, d == s.steps - 1, s),)
    # e2m1 has no registers left for these: fewer programs would run at once.
    if not s.e2m1:
        pair, factor = _load_pair(order.pairs + tile * TILE, routing, slot, count)
    totals = multiply_steps(x, begins, weights, row, (tiles, xs), s)
    if s.e2m1:
        pair, factor = _load_pair(order.pairs + tile * TILE, routing, slot, count)
    DTYPE: tl.constexpr = x.dtype.element_ty
    if bias is not None:
        bias += expert * s.out
    result = _finish_rows(totals[0], scales, bias, rows, inside, s, DTYPE)
    up = result
    if s.gated:
        up_bias = None if bias is None else bias + N
        up = _finish_rows(totals[1], up_scales, up_bias, rows, inside, s, DTYPE)
    if not s.down:
        result = activate(result, up, s.activation)
    else:
        result *= factor
    at = y + pair * N + place_in_order(rows, s.order)
    tl.store(at, result.to(y.dtype.element_ty), mask=inside & (slot < count))


# Grid [T, D / columns]: a program sums some numbers of a token's experts. The result of padding is
# its residual, which is older than the previous kernel.
@jit
def _combine(parts, residual, last, y, s: tl.constexpr, PDL: tl.constexpr):
    token, column = tl.program_id(0), tl.program_id(1) * s.columns + tl.arange(0, s.columns)
    inside = column < s.D
    add = tl.zeros([s.columns], tl.float32)
    if residual is not None:
        add = tl.load(residual + token * s.D + column, mask=inside, other=0.0).to(tl.float32)
    end = s.D
    if last is not None:
        end = tl.where(token % s.queries <= tl.load(last + token // s.queries), s.D, 0)
    await_previous(PDL)
    total = tl.zeros([s.columns], tl.float32)
    for a in tl.static_range(s.A):
        total += tl.load(parts + (token * s.A + a) * s.D + column, mask=column < end, other=0.0)
    result = total * s.scale + add
    tl.store(y + token * s.D + column, result.to(y.dtype.element_ty), mask=inside)


def choose_tile(E: int, pairs: int) -> int:
    """Return the pairs of a tile, 8 to 32: an expert's even share of the pairs, if it is more."""
    return min(32, max(TILE, pow2(pairs // E)))


def choose_few(weight: Weight, gated: bool, tile: int, tokens: int) -> FewTiles:
    """Return how the product of a tile divides its work, as measured on an H200.

    The table's tiles come first; the work is "tiles 1", or "tiles 2" of gate and up. The rules are
    for other shapes. One step in flight leaves registers for more programs, which do more than
    deeper pipelines (docs/log/prompts.md). Down products, which are not gated, have short rows.
    """
    found = measured_fields(weight, place_of(weight, f"tiles {1 + gated}", tokens))
    if found:
        return FewTiles(*found)
    if tile > TILE:
        return FewTiles(32, 2, 1)
    if gated:
        return FewTiles(16, 2 if weight.kind == "int4" else 4, 1)
    if weight.kind == "bf16":
        return FewTiles(16, 2, 1)
    return FewTiles(32, 4 if weight.quads >= 64 else 2, 1)


def sort_pairs(indices: Tensor, E: int, last: Tensor | None = None) -> PairTiles:
    """Group the pairs of `indices` [T, A], experts of each token below E, by expert.

    last int64 [B]: tokens [B, Q] after the last real one of their row are padding, without pairs.
    Raises ValueError for more than MAX_TOKENS tokens.
    """
    T, A = indices.shape
    if T > MAX_TOKENS:
        raise ValueError(f"no kernel for {T} tokens")
    s = SortSettings(E, A, T, queries_of(T, last))
    shapes = (s.tiles, s.tile), s.tiles, s.tiles
    order = PairTiles(*(indices.new_empty(shape, dtype=torch.int32) for shape in shapes))
    grid = (cdiv(s.P, SORTED),)
    launch(_sort_pairs, grid, indices, last, order, settings=s, warps=2)
    return order


def multiply_tiles(
    x: Tensor,
    weight: Weight,
    order: PairTiles,
    y: Tensor,
    activation: Activation | None = None,
    routing: Tensor | None = None,
    bias: Tensor | None = None,
    tiles: FewTiles | None = None,
    own: range | None = None,
    ordered: bool = False,
    result_order: UnitOrder | None = None,
) -> Tensor:
    """Multiply each pair's x by its expert's weight [E, out, in] -> y [P, out], or [P, out / 2].

    x: of tokens [T, in] with an activation, of pairs [P, in] without one. The products are gate and
    up, or up alone if the activation has no gate: then y is [P, out]. Without an activation they
    are multiplied by routing [T, A].

    bias [E, out]. own: the experts of this weight, if it has not all; results of pairs with another
    expert are not stored. ordered: x is in the weight's `UnitOrder`. result_order: that of y.
    """
    gated = activation is not None and activation.gated
    count, tile = order.pairs.shape
    tokens = len(x if routing is None else routing)
    tiles = tiles or choose_few(weight, gated, tile, tokens)
    fixed = settings_of(weight, tiles, tile, ordered)
    begin, end = (own.start, own.stop) if own else (0, 0)
    active = len(y) // len(x)
    fixed |= dict(activation=activation, active=active, order=result_order, begin=begin, end=end)
    s = ExpertSettings(**fixed)
    N = s.out // 2 if gated else s.out
    if x.shape[1] != s.width or y.shape[1] != N:
        raise ValueError(f"x {list(x.shape)}, y {list(y.shape)} for a weight [{s.out}, {s.width}]")
    x = order_words(x, weight)
    tensors = x, order, routing, unit_tensors(weight, x.dtype), bias, y
    grid = cdiv(N, s.stored), count
    launch(_multiply_tiles, grid, *tensors, settings=s, **tiles.options)
    return y


def combine(
    parts: Tensor,
    A: int,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    scale: float = 1.0,
    last: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum the A parts fp32 [T * A, D] of each token -> scale * sum + residual [T, D], of `dtype`.

    last: as of `sort_pairs`; the result of padding is its residual. out: where to store the result.
    """
    T, D = len(parts) // A, parts.shape[1]
    y = torch.empty(T, D, dtype=dtype, device=parts.device) if out is None else out
    s = CombineSettings(D, A, queries_of(T, last), scale)
    launch(_combine, (T, cdiv(D, COLUMNS)), parts, residual, last, y, settings=s)
    return y


def run_experts(
    x: Tensor,
    w13: Weight,
    w2: Weight,
    indices: Tensor,
    routing: Tensor,
    activation: Activation,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    last: Tensor | None = None,
    shared: tuple[Weight, Weight] | None = None,
    out: Tensor | None = None,
    ordered: bool = False,
) -> Tensor:
    """Return scale * (the weighted sum of the chosen experts of x [T, D]) + residual [T, D].

    indices int64 and routing weights fp32 [T, A], of w13 [E, 2 I, D] and w2 [E, D, I]; w13 is
    [E, I, D] if the activation has no gate. shared: w13 and w2 of expert E, of other formats or
    another I. out [T, D]: where to store the result. ordered: x is in the `UnitOrder` of w13.

    The reference is `Experts.forward`.
    """
    P, E = indices.numel(), len(w13.tensors.codes)
    order = sort_pairs(indices, E + (shared is not None), last)
    parts = x.new_empty(P, w2.out, dtype=torch.float32)

    def multiply(w13: Weight, w2: Weight, own: range | None, *biases: Tensor | None) -> None:
        h, (bias13, bias2) = x.new_empty(P, w2.width), biases
        between = unit_order(w2)
        how = dict(own=own, ordered=ordered, result_order=between)
        multiply_tiles(x, w13, order, h, activation, bias=bias13, **how)
        how = dict(own=own, ordered=between is not None)
        multiply_tiles(h, w2, order, parts, routing=routing, bias=bias2, **how)

    multiply(w13, w2, range(E) if shared else None, bias13, bias2)
    if shared is not None:
        multiply(*shared, range(E, E + 1), None, None)
    return combine(parts, indices.shape[1], x.dtype, residual, scale, last, out)
