"""The experts of 2 to 64 tokens in four Triton kernels: an expert is read once for 8 of its tokens.

    sort_pairs        pairs of a token and an expert that it chose, in tiles of one expert each
    multiply_tiles    the gate and up products of each tile, and the activation
    multiply_tiles    the down products of each tile, times the routing weights
    combine           the sum over the experts of a token, plus residual

The products are those of ops/products/few_tokens.py, which tells how tensor cores get their operands. A tile
has up to TILE pairs; so an expert that many tokens chose has several, and the later ones find its
weights in L2. The numbers of pairs and tiles stay on the GPU: there are as many programs as there
may be tiles, and those without one return.

Letters: T tokens, A experts of a token (shared ones are among them), P = T * A pairs, I and D
numbers of h and of x.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.launch import jit, supports_pdl, tl, triton
from ops.products.codes import activate
from ops.products.few_tokens import (
    TILE,
    FewTiles,
    _add_products,
    _finish,
    _load_fields,
    _load_gate_up_step,
    _load_row_scales,
    _load_step,
    _of_expert,
    _spread_begins,
    constants_of,
    pointers_of,
)
from ops.products.weights import Weight

MAX_TOKENS = 64
SORTED = 4  # pairs and tiles of a program of `_sort_pairs`
COLUMNS = 512  # numbers of a program of `_combine`

# Kernels ------------------------------------------------------------------------------------------


# Grid [P / SORTED]: a program places SORTED pairs, and tells the experts of as many tiles. For this
# each one counts all pairs.
#
# Pairs of an expert are in the order of their tokens. Padding has no pairs.
@jit
def _sort_pairs(
    indices,
    last,
    pairs,
    experts,
    counts,
    E: tl.constexpr,
    A: tl.constexpr,
    P: tl.constexpr,
    MAX_TILES: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    SORTED: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair, mine = tl.arange(0, BLOCK), tl.program_id(0) * SORTED + tl.arange(0, SORTED)
    real, mine_is_real = pair < P, mine < P
    if QUERIES:
        token, own = tl.minimum(pair, P - 1) // A, tl.minimum(mine, P - 1) // A
        real = real & (token % QUERIES <= tl.load(last + token // QUERIES))
        mine_is_real = mine_is_real & (own % QUERIES <= tl.load(last + own // QUERIES))
    expert = tl.load(indices + pair, mask=real, other=E).to(tl.int32)
    chosen = tl.load(indices + mine, mask=mine_is_real, other=E).to(tl.int32)
    bins = tl.arange(0, BINS)
    count = tl.where(bins < E, tl.histogram(expert, BINS), 0)
    tiles = (count + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)

    same = bins[None, :] == chosen[:, None]
    first = tl.sum(tl.where(same, (ends - tiles)[None, :], 0), 1)
    before = (expert[None, :] == chosen[:, None]) & (pair[None, :] < mine[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    tl.store(pairs + first * TILE + rank, mine, mask=chosen < E)

    # mine as tiles: those behind the last belong to no bin.
    owner = tl.sum((ends[None, :] <= mine[:, None]).to(tl.int32), 1)
    is_owner = bins[None, :] == owner[:, None]
    left = tl.sum(tl.where(is_owner, (count - (mine[:, None] - (ends - tiles)) * TILE), 0), 1)
    is_tile = mine < MAX_TILES
    tl.store(experts + mine, owner, mask=is_tile)
    tl.store(counts + mine, tl.minimum(left, TILE), mask=is_tile)


@jit
def _load_weights(
    weights,
    row,
    step,
    OUT: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    VEC: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Load a step of ROWS rows: of gate and up, or of down."""
    if GATED:
        return _load_gate_up_step(
            weights, row, step, OUT // 2, WORDS, GROUP, KIND, VEC, WARPS, ROWS
        )
    else:
        return (_load_step(weights, row, step, OUT, WORDS, GROUP, KIND, VEC, WARPS, ROWS),)


@jit
def _load_pair(pairs, routing, slot, count, GATED: tl.constexpr):
    """Load the pair of each slot of a tile, and its routing weight if the product is down."""
    pair = tl.load(pairs + tl.minimum(slot, count - 1))
    return pair, 1.0 if GATED else tl.load(routing + pair)


@jit
def _finish_rows(
    total, scales, bias, rows, inside, KIND: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr
):
    """Return the products of an expert's rows. scales: as of `_load_row_scales`.

    bias: where the expert's begin.
    """
    result = _finish(tl.sum(total, 0), scales, KIND, DTYPE)
    if BIAS:
        result += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    return result


# Grid [R, tiles]: a program computes ROWS rows of the result of a tile's pairs.
#
# With GATED the result is h [P, I], and the x of a pair is that of its token; else it is one fp32
# row a pair, times its routing weight, and the pair has its own x. Weights depend on what the
# previous kernels wrote, so nothing is loaded before the wait.
@jit
def _multiply_tiles(
    x,
    pairs,
    experts,
    counts,
    routing,
    codes,
    scale,
    scale_step,
    scale_low,
    zero,
    zero_step,
    zero_low,
    bias,
    y,
    OUT: tl.constexpr,
    A: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
    VEC: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    RUN: tl.constexpr = GROUP // (2 * PARTS)  # words of a group
    STEPS: tl.constexpr = (WORDS + 4 * VEC * WARPS - 1) // (4 * VEC * WARPS)
    TILES: tl.constexpr = TILE // 8
    row, tile = tl.program_id(0) * ROWS, tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    count, expert = tl.load(counts + tile), tl.load(experts + tile)
    if count <= 0:
        return
    weights = (codes, scale, scale_step, scale_low, zero, zero_step, zero_low)
    weights = _of_expert(weights, expert.to(tl.int64), OUT, WORDS, GROUP, KIND)
    tiles = ()
    for d in tl.static_range(DEPTH):
        step = _load_weights(weights, row, d, OUT, WORDS, GROUP, KIND, GATED, VEC, WARPS, ROWS)
        tiles = tiles + (step,)
    N: tl.constexpr = OUT // 2 if GATED else OUT  # numbers of a result
    rows, slot = row + tl.arange(0, ROWS)[:, None], tl.arange(0, TILE)[None, :]
    inside = rows < N
    scales = _load_row_scales(weights[1] + rows, KIND, inside)
    if GATED:
        up_scales = _load_row_scales(weights[1] + N + rows, KIND, inside)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Slots behind the last pair compute the same as it, and are not stored.
    lane = tl.arange(0, TILES * WARPS * 32)
    lane_slot = tl.minimum(lane // (WARPS * 32) * 8 + lane // 4 % 8, count - 1)
    source = tl.load(pairs + tile * TILE + lane_slot)
    begins = (source // A if GATED else source) * (2 * WORDS * PARTS)
    begins = _spread_begins(begins, PARTS, VEC, WARPS, TILES)
    xs = ()
    for d in tl.static_range(DEPTH):
        fields = _load_fields(x, begins, d, 0, WORDS, RUN, PARTS, VEC, WARPS, TILES)
        xs = xs + (fields,)
    # mxfp4 has no registers left for these: fewer programs would run at once.
    if KIND != "mxfp4":
        pair, factor = _load_pair(pairs + tile * TILE, routing, slot, count, GATED)
    zeros = tl.zeros([WARPS, ROWS, TILE], tl.float32)
    totals, none = (zeros, zeros) if GATED else (zeros,), 0.0
    for s in range(0, STEPS, DEPTH):
        for d in tl.static_range(DEPTH):
            totals, none = _add_products(
                tiles[d],
                totals,
                none,
                xs[d],
                None,
                KIND,
                False,
                PARTS,
                VEC,
                WARPS,
                ROWS,
                TILES,
            )
            if STEPS > DEPTH:  # prefetch: the registers of this step are free now
                at = tl.minimum(s + DEPTH + d, STEPS - 1)  # the last again, not what is behind it
                step = _load_weights(
                    weights, row, at, OUT, WORDS, GROUP, KIND, GATED, VEC, WARPS, ROWS
                )
                tiles = tiles[:d] + (step,) + tiles[d + 1 :]
                fields = _load_fields(x, begins, at, 0, WORDS, RUN, PARTS, VEC, WARPS, TILES)
                xs = xs[:d] + (fields,) + xs[d + 1 :]
    if KIND == "mxfp4":
        pair, factor = _load_pair(pairs + tile * TILE, routing, slot, count, GATED)
    DTYPE: tl.constexpr = x.dtype.element_ty
    bias += expert.to(tl.int64) * OUT
    result = _finish_rows(totals[0], scales, bias, rows, inside, KIND, DTYPE, BIAS)
    if GATED:
        up = _finish_rows(totals[1], up_scales, bias + N, rows, inside, KIND, DTYPE, BIAS)
        result = activate(result, up, ACTIVATION, LIMIT, ALPHA)
    else:
        result *= factor
    tl.store(y + pair * N + rows, result.to(y.dtype.element_ty), mask=inside & (slot < count))


# Grid [T, D / COLUMNS]: a program sums COLUMNS numbers of a token's experts. The result of padding
# is its residual, which is older than the previous kernel.
@jit
def _combine(
    parts,
    residual,
    last,
    y,
    D: tl.constexpr,
    A: tl.constexpr,
    QUERIES: tl.constexpr,
    SCALE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < D
    add = tl.zeros([COLUMNS], tl.float32)
    if RESIDUAL:
        add = tl.load(residual + token * D + column, mask=inside, other=0.0).to(tl.float32)
    end = D
    if QUERIES:
        end = tl.where(token % QUERIES <= tl.load(last + token // QUERIES), D, 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([COLUMNS], tl.float32)
    for a in tl.static_range(A):
        total += tl.load(parts + (token * A + a) * D + column, mask=column < end, other=0.0)
    result = total * SCALE + add
    tl.store(y + token * D + column, result.to(y.dtype.element_ty), mask=inside)


# Launching ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SortedPairs:
    """Pairs [P] of a token and its experts, by expert: pair n is token n // A and its expert n % A.

    pairs int32 [tiles, TILE]; experts and counts int32 [tiles], the number of a tile's pairs. Tiles
    behind the last have none.
    """

    pairs: Tensor
    experts: Tensor
    counts: Tensor
    active: int  # A
    tile: int  # TILE


def choose_tile(E: int, pairs: int) -> int:
    """Return the pairs of a tile, 8 to 32: an expert's even share of the pairs, if it is more."""
    return min(32, max(TILE, triton.next_power_of_2(pairs // E)))


def choose_few(weight: Weight, loads: int, tile: int) -> FewTiles:
    """Return how the product of a tile divides its work, as measured on an H200.

    One step in flight leaves registers for more programs, which do more than deeper pipelines
    (docs/log/prompts.md). loads: 2 for gate and up, else 1: down products have short rows.
    """
    if tile > TILE:
        return FewTiles(32, 2, 1)
    if loads == 2:
        return FewTiles(16, 2 if weight.kind == "int4" else 4, 1)
    if weight.kind == "bf16":
        return FewTiles(16, 2, 1)
    return FewTiles(32, 4 if weight.quads >= 64 else 2, 1)


def sort_pairs(
    indices: Tensor, E: int, last: Tensor | None = None, pdl: bool | None = None
) -> SortedPairs:
    """Group the pairs of `indices` [T, A], experts of each token below E, by expert.

    last int64 [B]: tokens [B, Q] behind the last real one of their row are padding, without pairs.
    Raises ValueError for more than MAX_TOKENS tokens.
    """
    T, A = indices.shape
    if T > MAX_TOKENS:
        raise ValueError(f"no kernel for {T} tokens")
    P, tile = T * A, choose_tile(E, T * A)
    most = min(P, E + P // tile)
    pdl = supports_pdl(indices) if pdl is None else pdl
    pairs, experts, counts = (
        torch.empty(shape, dtype=torch.int32, device=indices.device)
        for shape in ((most, tile), most, most)
    )
    _sort_pairs[(triton.cdiv(P, SORTED),)](
        indices,
        indices if last is None else last,
        pairs,
        experts,
        counts,
        E=E,
        A=A,
        P=P,
        MAX_TILES=most,
        QUERIES=0 if last is None else T // len(last),
        BLOCK=triton.next_power_of_2(P),
        BINS=triton.next_power_of_2(E + 1),
        SORTED=SORTED,
        TILE=tile,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=2,
    )
    return SortedPairs(pairs, experts, counts, A, tile)


def multiply_tiles(
    x: Tensor,
    weight: Weight,
    order: SortedPairs,
    y: Tensor,
    activation=None,
    routing: Tensor | None = None,
    bias: Tensor | None = None,
    tiles: FewTiles | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Multiply each pair's x by its expert's weight [E, out, in] -> y [P, out], or [P, out / 2].

    activation: x [T, in] is that of tokens, and the products are gate and up. None: x [P, in] is
    that of pairs, and the result has their routing weights [T, A]. bias [E, out].
    """
    gated = activation is not None
    loads = 2 if gated else 1
    tiles = tiles or choose_few(weight, loads, order.tile)
    pdl = supports_pdl(x) if pdl is None else pdl
    absent = weight.parts[0]  # a valid pointer, which the kernel does not read
    _multiply_tiles[(triton.cdiv(weight.out // loads, tiles.rows), len(order.counts))](
        x,
        order.pairs,
        order.experts,
        order.counts,
        absent if routing is None else routing,
        *pointers_of(weight, x.dtype),
        absent if bias is None else bias,
        y,
        OUT=weight.out,
        A=order.active,
        GATED=gated,
        ACTIVATION=activation.kind if gated else "",
        LIMIT=activation.limit if gated else 0.0,
        ALPHA=activation.alpha if gated else 0.0,
        BIAS=bias is not None,
        TILE=order.tile,
        PDL=pdl,
        launch_pdl=pdl,
        **constants_of(weight, tiles),
    )
    return y


def combine(
    parts: Tensor,
    A: int,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    scale: float = 1.0,
    last: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Sum the A parts fp32 [T * A, D] of each token -> scale * sum + residual [T, D], of `dtype`.

    last: as of `sort_pairs`; the result of padding is its residual.
    """
    T, D = len(parts) // A, parts.shape[1]
    pdl = supports_pdl(parts) if pdl is None else pdl
    y = torch.empty(T, D, dtype=dtype, device=parts.device)
    _combine[(T, triton.cdiv(D, COLUMNS))](
        parts,
        parts if residual is None else residual,
        parts if last is None else last,
        y,
        D=D,
        A=A,
        QUERIES=0 if last is None else T // len(last),
        SCALE=scale,
        RESIDUAL=residual is not None,
        PDL=pdl,
        COLUMNS=COLUMNS,
        launch_pdl=pdl,
        num_warps=4,
    )
    return y


def run_experts(
    x: Tensor,
    w13: Weight,
    w2: Weight,
    indices: Tensor,
    routing: Tensor,
    activation,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    last: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Return scale * (the weighted sum of the chosen experts of x [T, D]) + residual [T, D].

    indices int64 and routing weights fp32 [T, A], of w13 [E, 2 I, D] and w2 [E, D, I]. The
    reference is `Experts.forward`.
    """
    (P, I), D = (indices.numel(), w13.out // 2), w2.out
    order = sort_pairs(indices, w13.parts[0].shape[0], last, pdl)
    h, parts = x.new_empty(P, I), x.new_empty(P, D, dtype=torch.float32)
    multiply_tiles(x, w13, order, h, activation, bias=bias13, pdl=pdl)
    multiply_tiles(h, w2, order, parts, routing=routing, bias=bias2, pdl=pdl)
    return combine(parts, indices.shape[1], x.dtype, residual, scale, last, pdl)
