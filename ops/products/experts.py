"""The experts of one token in two Triton kernels.

A layer with small experts waits for its kernels, not for memory: a kernel costs the time of its
bytes plus 1.6 us on an H200. So there are few kernels, and each has all of its loads in flight at
once:

    norm_router    RMS norm and router scores: ops/products/router.py
    gate_up        the choice of experts, their gate and up products, and the activation
    down           the down products, times the routing weights, summed over experts, plus residual

`down` without experts is a dense product: `wo` plus residual, or `wqkv` with the norm of its input.
Shared experts are chosen experts, too: their weights are stacked after those of the E others.

Programmatic dependent launch (PDL): a kernel calls gdc_wait before gdc_launch_dependents. When the
next one starts, the kernel two before that has therefore ended. It may read that one's results
before its wait: a residual, for instance.

A short kernel between a long one and a dense product is an exception. It calls
gdc_launch_dependents first, so that the product loads its weights during the long kernel. These
are a product with EARLY, kernels that merge parts of attention, and `receive_add`. After them a
kernel must not read before its wait what the last two kernels write.

A program multiplies a tile of rows in chunks (ops/products/chunk.py), and keeps DEPTH of them in flight.
Where instructions bind (mxfp4) programs stay: no more than run at once, each with several tiles.

Several tokens have other kernels: ops/products/few_tokens.py has the dense product, ops/products/expert_tiles.py the
experts.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.declared import SWIGLU, Activation, Routing
from ops.launch import jit, supports_pdl, tl, triton
from ops.products.chunk import (
    _activate,
    _await_choice,
    _lane_experts,
    _lane_factor,
    _lane_squares,
    _load_chunk,
    _load_norm,
    _load_operands,
    _load_x,
    _multiply_chunk,
    _order_operands,
    _prepare_x,
    _result_rows,
    _row_scale,
    _shared_rows,
    _sum_lanes,
    _sum_normed,
    _sum_shared,
    _weighted_operands,
)
from ops.products.few_tokens import TILE, FewTiles, down_few
from ops.products.gemv4 import _e2m1_table
from ops.products.quantized_x import INTEGERS, QuantizedX, quantize_token, quantizes_first
from ops.products.router import (
    _choose,
    _choose_one,
    choice_constants,
    norm_tokens,
)
from ops.products.tilings import Tiles, Weight, choose_tiles, chunks_of, programs_of
from ops.ranks.reduce_router import TokenInbox, _find_outboxes, _send

# Kernels ------------------------------------------------------------------------------------------


@jit
def _replace(values, at: tl.constexpr, value):
    """Return a tuple with another value at one position."""
    return values[:at] + (value,) + values[at + 1 :]


@jit
def _load_part(
    x,
    units,
    chunk,
    QUADS: tl.constexpr,
    RUN: tl.constexpr,
    FIELDS: tl.constexpr,
    KIND: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Load the x of a chunk, which is quantized or not."""
    if QUANTIZED:
        return _load_operands(x, units, chunk, QUADS, KIND, LANES)
    else:
        return _load_x(x, chunk, QUADS, RUN, FIELDS, LANES)


@jit
def _prepare_part(
    part,
    norm,
    NORM: tl.constexpr,
    KIND: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Make the operands of `_multiply_chunk` of what `_load_part` loaded."""
    if QUANTIZED:
        return _order_operands(part, KIND, LANES)
    else:
        return _prepare_x(part, norm, NORM, KIND, LANES)


@jit
def _load_gate_up(
    weights,
    expert,
    row,
    chunk,
    I: tl.constexpr,
    QUADS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Load a chunk of ROWS rows of gate, and of the rows of up that belong to them."""
    OUT: tl.constexpr = 2 * I
    gate = _load_chunk(
        weights, expert, row, chunk, QUADS, QUADS, OUT, GROUP, KIND, False, LANES, ROWS
    )
    up = _load_chunk(
        weights, expert, row + I, chunk, QUADS, QUADS, OUT, GROUP, KIND, False, LANES, ROWS
    )
    return gate, up


# Grid [R, A + S]: a program computes TILES tiles, every R-th one. A tile is ROWS rows of one chosen
# expert's result, gate and up. If there are several, x stays in registers, and the next tile's
# weights are loaded while this one's are multiplied.
#
# Weights depend on an index or scores that the previous kernel wrote, so nothing is loaded before
# the wait. All loads then start at once: the tile's first DEPTH chunks, and their x.
#
# With CHOOSE each program finds its expert in the router's scores, and the grid has one more row of
# programs, R + 1, whose first stores the whole choice for the next kernel. S shared experts, from E
# on, follow the A chosen ones.
@jit
def _gate_up(
    x,
    units,
    indices,
    scores,
    routing,
    codes,
    scale,
    scale_step,
    scale_low,
    zero,
    zero_step,
    zero_low,
    bias,
    h,
    unknown_zero,
    I: tl.constexpr,
    QUADS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    FIELDS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BIAS: tl.constexpr,
    CHOOSE: tl.constexpr,
    E: tl.constexpr,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM_TOPK: tl.constexpr,
    SCALE: tl.constexpr,
    EXPERTS: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    RUN: tl.constexpr = GROUP // FIELDS  # words of a group
    HELD: tl.constexpr = CHUNKS if TILES > 1 else DEPTH  # chunks of x in registers
    multiplying = tl.num_programs(0) - CHOOSE  # programs of a pair
    weights = (codes, scale, scale_step, scale_low, zero, zero_step, zero_low)
    pair = tl.program_id(1)
    # The last tiles begin early enough to be whole: some rows are computed twice.
    row = tl.minimum(tl.program_id(0) * ROWS, I - ROWS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if CHOOSE:
        if tl.program_id(0) == multiplying:
            if pair == 0:
                _choose(
                    scores,
                    indices,
                    routing,
                    E,
                    A,
                    SHARED,
                    GATED,
                    SIGMOID,
                    NORM_TOPK,
                    SCALE,
                    EXPERTS,
                )
            return
        if SHARED == 0:
            expert = _choose_one(scores, pair, E, EXPERTS, WARPS).to(tl.int64)
        else:
            expert = (E - A + pair).to(tl.int64)
            if pair < A:
                expert = _choose_one(scores, pair, E, EXPERTS, WARPS).to(tl.int64)
    else:
        expert = tl.load(indices + pair).to(tl.int64)
    tiles, xs = (), ()
    for d in tl.static_range(DEPTH):
        both = _load_gate_up(weights, expert, row, d, I, QUADS, GROUP, KIND, LANES, ROWS)
        tiles = tiles + (both,)
    for d in tl.static_range(HELD):
        xs = xs + (_load_part(x, units, d, QUADS, RUN, FIELDS, KIND, QUANTIZED, LANES),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    table = _e2m1_table(unknown_zero) if KIND == "mxfp4" else None
    rows, stores = _result_rows(ROWS, LANES)
    for n in range(TILES):
        flat = expert * (2 * I) + row + rows
        if KIND == "int8" or KIND == "fp8":
            gate_scale = _row_scale(scale, flat, KIND)
            up_scale = _row_scale(scale, I + flat, KIND)
        if BIAS:
            gate_bias = tl.load(bias + flat).to(tl.float32)
            up_bias = tl.load(bias + I + flat).to(tl.float32)
        next_row = tl.minimum((tl.program_id(0) + (n + 1) * multiplying) * ROWS, I - ROWS)
        gate, up = tl.zeros([ROWS, LANES], tl.float32), tl.zeros([ROWS, LANES], tl.float32)
        for c in tl.static_range(CHUNKS):
            part, both = xs[c % HELD], tiles[c % DEPTH]
            operands = _prepare_part(part, part, False, KIND, QUANTIZED, LANES)
            gate += _multiply_chunk(both[0], operands, table, LANES, ROWS, KIND, False)
            up += _multiply_chunk(both[1], operands, table, LANES, ROWS, KIND, False)
            # Prefetch: the registers of this chunk are free now.
            at = row if c + DEPTH < CHUNKS else next_row
            if (c + DEPTH < CHUNKS) | (n + 1 < TILES):
                both = _load_gate_up(
                    weights, expert, at, (c + DEPTH) % CHUNKS, I, QUADS, GROUP, KIND, LANES, ROWS
                )
            tiles = _replace(tiles, c % DEPTH, both)
            if TILES == 1 and c + DEPTH < CHUNKS:
                part = _load_part(x, units, c + DEPTH, QUADS, RUN, FIELDS, KIND, QUANTIZED, LANES)
                xs = _replace(xs, c % DEPTH, part)
        gate, up = _sum_lanes(gate, ROWS, LANES), _sum_lanes(up, ROWS, LANES)
        if KIND == "int8" or KIND == "fp8":
            gate *= gate_scale
            up *= up_scale
        if BIAS:
            gate += gate_bias
            up += up_bias
        out = h + pair * I + row + rows
        h_rows = _activate(gate, up, ACTIVATION, LIMIT, ALPHA)
        tl.store(out, h_rows.to(h.dtype.element_ty), mask=stores)
        row = next_row


@jit
def _load_biases(
    bias, experts, routing, rows, OUT: tl.constexpr, A: tl.constexpr, GATHER: tl.constexpr
):
    """Load the biases of rows; with GATHER the sum of A experts' biases times routing weights."""
    if GATHER:
        biases = tl.zeros(rows.shape, tl.float32)
        for pair in tl.static_range(A):
            at = tl.load(experts + pair) * OUT + rows
            biases += tl.load(bias + at).to(tl.float32) * tl.load(routing + pair)
    else:
        biases = tl.load(bias + rows).to(tl.float32)
    return biases


@jit
def _prepare_product(
    part,
    norm,
    factor,
    NORM: tl.constexpr,
    GATHER: tl.constexpr,
    KIND: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Make the operands of a chunk of `_down`: x with the norm's weight, or routing weights."""
    operands = _prepare_part(part, norm, NORM, KIND, QUANTIZED, LANES)
    if GATHER:
        operands = _weighted_operands(operands, factor, KIND)
    return operands


# Grid [R]: a program computes TILES tiles of ROWS rows, as in `_gate_up`. x is that of
# all chosen experts, one after the other (GATHER), or one row.
#
# The result is SCALE * (product + bias) + residual. An expert's bias has its routing weight.
#
# x is the previous kernel's result, and with GATHER the choice of experts, too: then nothing but
# the residual is loaded before the wait. Otherwise all but x is. A QUANTIZED x comes from a kernel
# between: the choice is then of the kernel before that, which has ended, and needs no wait either.
# With POLLED the previous kernel stores the choice early, and this one waits for that alone: the
# indices are -1 until then. So weights are in flight while the previous kernel multiplies. In
# bf16 that is slower (docs/log/small_experts.md).
#
# With EARLY x is the result of the kernel before the previous one: the product lets the next kernel
# start at once, and waits at its end. So the next kernel may start before the previous one has
# ended, and must not read its results before its own wait.
#
# With RANKS the result is not stored in y, but sent to all ranks: see ops/ranks/reduce_router.py. A row
# that two programs compute is sent twice, with the same bits.
@jit
def _down(
    x,
    units,
    indices,
    routing,
    norm,
    residual,
    codes,
    scale,
    scale_step,
    scale_low,
    zero,
    zero_step,
    zero_low,
    bias,
    y,
    unknown_zero,
    slots,
    calls,
    OUT: tl.constexpr,
    EACH: tl.constexpr,
    QUADS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    FIELDS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    GATHER: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    POLLED: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    RANKS: tl.constexpr,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    NUMBERS: tl.constexpr = QUADS * 4 * FIELDS  # in a token's x
    AHEAD: tl.constexpr = QUANTIZED or POLLED or not GATHER  # weights are loaded before the wait
    RUN: tl.constexpr = GROUP // FIELDS  # words of a group
    HELD: tl.constexpr = CHUNKS if TILES > 1 else DEPTH  # chunks of x in registers
    weights = (codes, scale, scale_step, scale_low, zero, zero_step, zero_low)
    row = tl.minimum(tl.program_id(0) * ROWS, OUT - ROWS)
    rows, stores = _shared_rows(ROWS)
    if RESIDUAL:
        add = tl.load(residual + row + rows, mask=stores, other=0.0)
    if PDL and not AHEAD:
        tl.extra.cuda.gdc_wait()
    if POLLED:
        _await_choice(indices, QUADS // EACH, PAIRS_POW2)
    experts = tl.program_id(0).to(tl.int64) * 0
    tiles, norms, factors = (), (), ()
    for d in tl.static_range(DEPTH):
        if GATHER:
            experts = _lane_experts(indices, d, QUADS, EACH, LANES, POLLED)
        tile = _load_chunk(
            weights, experts, row, d, QUADS, EACH, OUT, GROUP, KIND, GATHER, LANES, ROWS
        )
        tiles = tiles + (tile,)
    if POLLED:
        tl.extra.cuda.gdc_wait()
    for d in tl.static_range(HELD):
        norms = norms + (_load_norm(norm, d, QUADS, RUN, FIELDS, LANES) if NORM else 0,)
        factors = factors + (_lane_factor(routing, d, QUADS, EACH, LANES) if GATHER else 0,)
    # Loaded now, since in the end each program would wait a microsecond for it.
    SCALED: tl.constexpr = (KIND == "int8" or KIND == "fp8") and not GATHER
    if SCALED:
        row_scale = _row_scale(scale, row + rows, KIND)
    if BIAS:
        biases = _load_biases(bias, indices, routing, row + rows, OUT, QUADS // EACH, GATHER)
    if PDL:
        if AHEAD and not POLLED and not EARLY:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    xs = ()
    for d in tl.static_range(HELD):
        xs = xs + (_load_part(x, units, d, QUADS, RUN, FIELDS, KIND, QUANTIZED, LANES),)
    if RANKS:
        outboxes, call = _find_outboxes(slots, calls, HALF, RANKS)
    table = _e2m1_table(unknown_zero) if KIND == "mxfp4" else None
    squares = tl.zeros([LANES // 32, 32], tl.float32)
    if TILES > 1:
        held = ()
        for c in tl.static_range(CHUNKS):
            if NORM:
                squares += _lane_squares(xs[c], FIELDS, LANES)
            part = _prepare_product(
                xs[c], norms[c], factors[c], NORM, GATHER, KIND, QUANTIZED, LANES
            )
            held = held + (part,)
    for n in range(TILES):
        next_row = tl.minimum((tl.program_id(0) + (n + 1) * tl.num_programs(0)) * ROWS, OUT - ROWS)
        total = tl.zeros([ROWS, LANES], tl.float32)
        for c in tl.static_range(CHUNKS):
            if TILES > 1:
                operands = held[c]
            else:
                if NORM:
                    squares += _lane_squares(xs[c % DEPTH], FIELDS, LANES)
                operands = _prepare_product(
                    xs[c % DEPTH],
                    norms[c % DEPTH],
                    factors[c % DEPTH],
                    NORM,
                    GATHER,
                    KIND,
                    QUANTIZED,
                    LANES,
                )
            total += _multiply_chunk(tiles[c % DEPTH], operands, table, LANES, ROWS, KIND, GATHER)
            # Prefetch: the registers of this chunk are free now.
            at, tile = (row if c + DEPTH < CHUNKS else next_row), tiles[c % DEPTH]
            if (c + DEPTH < CHUNKS) | (n + 1 < TILES):
                if GATHER:
                    later = (c + DEPTH) % CHUNKS
                    experts = _lane_experts(indices, later, QUADS, EACH, LANES, False)
                tile = _load_chunk(
                    weights,
                    experts,
                    at,
                    (c + DEPTH) % CHUNKS,
                    QUADS,
                    EACH,
                    OUT,
                    GROUP,
                    KIND,
                    GATHER,
                    LANES,
                    ROWS,
                )
            tiles = _replace(tiles, c % DEPTH, tile)
            if TILES == 1 and c + DEPTH < CHUNKS:
                part = _load_part(x, units, c + DEPTH, QUADS, RUN, FIELDS, KIND, QUANTIZED, LANES)
                xs = _replace(xs, c % DEPTH, part)
                if NORM:
                    part = _load_norm(norm, c + DEPTH, QUADS, RUN, FIELDS, LANES)
                    norms = _replace(norms, c % DEPTH, part)
                if GATHER:
                    factor = _lane_factor(routing, c + DEPTH, QUADS, EACH, LANES)
                    factors = _replace(factors, c % DEPTH, factor)
        if NORM:
            total = _sum_normed(total, squares, ROWS, LANES, NUMBERS, EPS)
        else:
            total = _sum_shared(total, ROWS, LANES)
        if SCALED:
            total *= row_scale
        if BIAS:
            total += biases
        if SCALE != 1.0:
            total *= SCALE
        if RESIDUAL:
            total += add.to(tl.float32)
        if PDL and EARLY:
            tl.extra.cuda.gdc_wait()
        if RANKS:
            _send(total.to(y.dtype.element_ty), outboxes, call, row + rows, stores, RANKS)
        else:
            tl.store(y + row + rows, total.to(y.dtype.element_ty), mask=stores)
        row = next_row
        if n + 1 < TILES:
            if RESIDUAL:
                add = tl.load(residual + row + rows, mask=stores, other=0.0)
            if SCALED:
                row_scale = _row_scale(scale, row + rows, KIND)
            if BIAS:
                biases = _load_biases(
                    bias, indices, routing, row + rows, OUT, QUADS // EACH, GATHER
                )


# Launching ----------------------------------------------------------------------------------------


def operand_of(x: Tensor, weight: Weight) -> Tensor:
    """Return x as the kernel reads it. Raises ValueError for a wrong dtype."""
    if weight.kind == "bf16":
        if x.dtype != torch.bfloat16:
            raise ValueError(f"bf16 weights need bf16 x, not {x.dtype}")
        return x.view(torch.int32)
    if x.element_size() != 2:
        raise ValueError(f"packed weights need x of 16 bits, not {x.dtype}")
    return x


def _operands_of(x: Tensor | QuantizedX, weight: Weight) -> tuple[Tensor, Tensor]:
    """Return x as the kernel reads it, and its units: the same tensor again, if it has none."""
    if isinstance(x, QuantizedX):
        return x.operands, x.units
    operand = operand_of(x, weight)
    return operand, operand


def norm_of(norm: Tensor, weight: Weight) -> Tensor:
    """Return a norm's weight as the kernel reads it: fp32, or as x."""
    return norm if norm.dtype == torch.float32 else operand_of(norm, weight)


def gate_up(
    x: Tensor | QuantizedX,
    weight: Weight,
    scores: Tensor,
    routing: Routing,
    activation: Activation = SWIGLU,
    tiles: Tiles | None = None,
    pdl: bool | None = None,
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts by the scores of `norm_router`, and multiply x [1, D] by their w13.

    Return h [A + S, I], gated, expert_indices int64 and expert_weights fp32 [1, A + S]. The
    references are `MoE.route`, or `SigmoidRoutedMoE.route`, and `ExpertLinear.gather_gated`.

    x may be a `QuantizedX` of this weight. weight [E + S, 2 I, D], shared experts last. bias
    [E, 2 I]: added before the activation. dtype: of h; default x.dtype. pdl: None launches with PDL
    where the GPU has it. indices [1, A + S]: where to store those of experts, -1 before
    (`norm_router`); default: new.
    """
    if indices is None:
        indices = torch.full((1, routing.pairs), -1, dtype=torch.int64, device=scores.device)
    weights = torch.empty(1, routing.pairs, dtype=torch.float32, device=scores.device)
    E = weight.parts[0].shape[0] - routing.shared
    choice = choice_constants(E, routing) | {"CHOOSE": True}
    tensors = indices, scores, weights
    h = _launch_gate_up(x, weight, tensors, choice, activation, tiles, pdl, dtype, bias)
    return h, indices, weights


def gate_up_of(
    x: Tensor,
    weight: Weight,
    indices: Tensor,
    activation: Activation = SWIGLU,
    tiles: Tiles | None = None,
    pdl: bool | None = None,
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Do what `gate_up` does for given experts, `indices` [1, A] -> h [A, I]."""
    names = "E", "A", "SHARED", "GATED", "SIGMOID", "NORM_TOPK", "SCALE", "EXPERTS"
    choice = dict.fromkeys(names, 0) | {"CHOOSE": False}
    tensors = indices, indices, indices
    return _launch_gate_up(x, weight, tensors, choice, activation, tiles, pdl, dtype, bias)


def _launch_gate_up(
    x: Tensor | QuantizedX,
    weight: Weight,
    tensors: tuple[Tensor, Tensor, Tensor],
    choice: dict,
    activation: Activation,
    tiles: Tiles | None,
    pdl: bool | None,
    dtype: torch.dtype | None,
    bias: Tensor | None,
) -> Tensor:
    """Launch `_gate_up`. tensors: indices, scores, routing weights. choice: its constants."""
    pdl = supports_pdl(tensors[0]) if pdl is None else pdl
    operand, units = _operands_of(x, weight)
    I, pairs = weight.out // 2, tensors[0].shape[1]
    tiles = tiles or choose_tiles(weight, weight.quads, 2)
    rows = min(tiles.rows, triton.next_power_of_2(I + 1) // 2)
    chunks, depth = chunks_of(weight.quads, tiles)
    programs, each = programs_of(tiles, triton.cdiv(I, rows), weight.multiprocessors, pairs)
    h = torch.empty(pairs, I, dtype=dtype or x.dtype, device=tensors[0].device)
    _gate_up[(programs + choice["CHOOSE"], pairs)](
        operand,
        units,
        *tensors,
        *weight.pointers(),
        weight.parts[0] if bias is None else bias,
        h,
        0,
        I=I,
        QUADS=weight.quads,
        GROUP=weight.group,
        KIND=weight.kind,
        FIELDS=weight.fields,
        QUANTIZED=isinstance(x, QuantizedX),
        ACTIVATION=activation.kind,
        LIMIT=activation.limit,
        ALPHA=activation.alpha,
        BIAS=bias is not None,
        **choice,
        WARPS=tiles.warps,
        PDL=pdl,
        LANES=tiles.lanes,
        ROWS=rows,
        TILES=each,
        DEPTH=depth,
        CHUNKS=chunks,
        launch_pdl=pdl,
        **tiles.options(),
    )
    return h


def norm_apart(x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    """Return x [T, in] and its norm's weight for `down`: of many tokens the normed x, and None.

    Each program of a product norms all of its tokens: above TILE a kernel of its own is faster.
    """
    return (x, norm) if len(x) <= TILE else (norm_tokens(x, norm, eps), None)


def down(
    x: Tensor | QuantizedX,
    weight: Weight,
    indices: Tensor | None = None,
    routing: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    tiles: Tiles | FewTiles | None = None,
    pdl: bool | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    early: bool = False,
    send: TokenInbox | None = None,
) -> Tensor | None:
    """scale * (x @ weight + bias) + residual [T, out] -> [T, out].

    With indices and routing weights [1, A], T is 1: x is [A, I], weight w2 [E, D, I], and the
    products are summed with these weights; the reference is `weighted_sum(w2.gather(x, ...))`.
    Without: x is [T, in], weight [out, in]. norm [in]: RMS norm of x first, which is not rounded;
    fp32 or as x. bias: [out], or [E, out] of experts.

    dtype: of the result; default that of x. out [T, out]: where to store the result, if it is
    given; its rows may be parts of longer ones. tiles: of several tokens `FewTiles`. early: of
    one token x is loaded, too, so that the product runs beside the previous kernel. Long x of
    experts in 4 bits becomes a `QuantizedX` here, by a kernel of its own.

    With PDL, tensors are loaded while the previous kernel runs, which must not write them: all but
    x, or with experts the residual alone. If codes are multiplied as integers, weights are, too:
    indices that `gate_up` has not stored yet are -1, and so known to be missing. If x is a
    `QuantizedX`, the previous kernel made it, and writes nothing else of these.

    send: write one token's result of 16 bits into the inboxes of all ranks instead, and return
    None. `receive_add` or `receive_add_router` of ops/ranks/reduce_router.py must come next.

    Raises ValueError for a norm with experts, and for a result that cannot be sent.
    """
    gather, dtype = indices is not None, dtype or x.dtype
    if norm is not None and (gather or isinstance(x, QuantizedX)):
        raise ValueError("no norm with experts, or of integers")
    pairs = indices.shape[1] if gather else 1
    quads, y = pairs * weight.quads, out
    T = 1 if isinstance(x, QuantizedX) else x.numel() // x.shape[-1] // pairs
    if send is not None and (T > 1 or early or dtype.itemsize != 2):
        raise ValueError("only one token's product of 16 bits, which is not early, is sent")
    if T == 1 and gather and isinstance(x, Tensor) and quantizes_first(weight, quads):
        x = quantize_token(operand_of(x, weight), weight, pdl)
    quantized = isinstance(x, QuantizedX)
    operand, units = _operands_of(x, weight)
    pdl = supports_pdl(operand) if pdl is None else pdl
    if y is None:
        y = torch.empty(T, weight.out, dtype=dtype, device=operand.device)
    if T > 1:
        assert not isinstance(x, QuantizedX)
        down_few(x, weight, y, residual, norm, eps, bias, scale, tiles, pdl)
        return y
    tiles = tiles or choose_tiles(weight, quads, 1)
    chunks, depth = chunks_of(quads, tiles)
    rows = min(tiles.rows, triton.next_power_of_2(weight.out + 1) // 2)
    programs, each = triton.cdiv(weight.out, rows), 1
    if not early:
        programs, each = programs_of(tiles, programs, weight.multiprocessors)
    absent = weight.parts[0]  # a valid pointer, which the kernel does not read
    _down[(programs,)](
        operand,
        units,
        absent if indices is None else indices,
        absent if routing is None else routing,
        operand if norm is None else norm_of(norm, weight),
        absent if residual is None else residual,
        *weight.pointers(),
        absent if bias is None else bias,
        y,
        0,
        absent if send is None else send.slots,
        absent if send is None else send.calls,
        OUT=weight.out,
        EACH=weight.quads,
        QUADS=quads,
        GROUP=weight.group,
        KIND=weight.kind,
        FIELDS=weight.fields,
        QUANTIZED=quantized,
        GATHER=gather,
        NORM=norm is not None,
        BIAS=bias is not None,
        SCALE=scale,
        RESIDUAL=residual is not None,
        EPS=eps,
        PDL=pdl,
        EARLY=early and not gather,
        POLLED=pdl and gather and not quantized and weight.kind in INTEGERS,
        PAIRS_POW2=triton.next_power_of_2(pairs),
        RANKS=0 if send is None else len(send.slots),
        HALF=0 if send is None else send.memory.stride(0),
        LANES=tiles.lanes,
        ROWS=rows,
        TILES=each,
        DEPTH=depth,
        CHUNKS=chunks,
        launch_pdl=pdl,
        **tiles.options(),
    )
    return y if send is None else None
