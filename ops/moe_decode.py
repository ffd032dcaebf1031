"""One token's experts in two Triton kernels, and the norm and router before them in one.

A layer with small experts waits for its kernels, not for memory: a kernel costs the time of its
bytes plus 1.6 us on an H200. So there are few kernels, and each has all of its loads in flight at
once:

    norm_router    residual sum, RMS norm, router scores; the last program chooses the experts
    gate_up        the gate and up products of all chosen experts, and the activation
    down           the down products, times the routing weights, summed over experts, plus residual

`down` without experts is a dense product: `wo` plus residual, or `wqkv` with the norm of its input.

Programmatic dependent launch (PDL): every kernel calls gdc_wait before gdc_launch_dependents. When
a kernel starts, the kernel two before it has therefore ended. A kernel may read results of that
one before its wait. `down` relies on it: it loads weights, indices and residual while `gate_up`
runs, so `norm_router` must be the kernel two before it, or an earlier one.

Quads. A lane loads 16 bytes of a row: a quad of four words, which hold 8 bf16 numbers, 16 codes of
8 bits or 32 of 4 bits. A chunk is LANES neighboring quads of each row of the program's tile. With
LANES = 32 each warp has rows of its own, and prepares all of x. With LANES = 32 * warps each warp
has all rows and its own part of x. Quantizing x takes as many instructions as multiplying it by six
rows of 4-bit codes, so 32 lanes or more are better. A program keeps DEPTH chunks in flight.

Products of codes are those of ops/gemv4.py: x becomes int16, with one power of two a quad.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ops.gemv4 import _e2m1_table, _multiply_tile, _split_four
from ops.jit import jit, supports_pdl, tl, triton

BITS = {"bf16": 16, "int8": 8, "int4": 4, "mxfp4": 4, "hqq": 4}  # by kind
MAX_EXPERTS = 512
MAX_DIM = 8192
TILE_REGISTERS = 96  # a lane's, for weights in flight
PREFETCHED = 8192  # bytes that a warp prefetches

# x of a chunk -------------------------------------------------------------------------------------


@jit
def _load_x(
    x, chunk, QUADS: tl.constexpr, RUN: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr
):
    """Load the x of a chunk, unconverted: bf16 as words [LANES, 4], else FIELDS such tensors.

    QUADS: quads of the whole x. RUN: words of a group, whose fields are RUN numbers apart.
    """
    quad = chunk * LANES + tl.arange(0, LANES)[:, None]
    word = quad * 4 + tl.arange(0, 4)[None, :]
    inside = quad < QUADS
    if KIND == "bf16":
        raw = (tl.load(x + word, mask=inside, other=0),)
    else:
        FIELDS: tl.constexpr = 4 if KIND == "int8" else 8
        at = x + word // RUN * (RUN * FIELDS) + word % RUN
        raw = ()
        for k in tl.static_range(FIELDS):
            raw = raw + (tl.load(at + k * RUN, mask=inside, other=0.0),)
    return raw


@jit
def _low_half(words):
    return (words << 16).to(tl.float32, bitcast=True)


@jit
def _high_half(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@jit
def _square_sum(raw, KIND: tl.constexpr):
    """Sum the squares of a chunk's x."""
    if KIND == "bf16":
        low, high = _low_half(raw[0]), _high_half(raw[0])
        total = low * low + high * high
    else:
        total = raw[0].to(tl.float32) * raw[0].to(tl.float32)
        for k in tl.static_range(1, 4 if KIND == "int8" else 8):
            total += raw[k].to(tl.float32) * raw[k].to(tl.float32)
    return tl.sum(tl.sum(total, 1), 0)


@jit
def _lane_factor(factors, chunk, QUADS: tl.constexpr, EACH: tl.constexpr, LANES: tl.constexpr):
    """Load the factor of each quad, [1, LANES // 32, 32]: every EACH quads have one."""
    quad = tl.minimum(chunk * LANES + tl.arange(0, LANES), QUADS - 1)
    return tl.reshape(tl.load(factors + quad // EACH), [1, LANES // 32, 32])


@jit
def _prepare_bf16(raw, norm, NORM: tl.constexpr, LANES: tl.constexpr):
    """Unpack words of bf16 -> numbers at even, at odd positions: 4 x [1, LANES // 32, 32] each."""
    words = _split_four(tl.reshape(raw[0], [LANES * 4]), 1, LANES // 32)
    low, high = (), ()
    if NORM:
        scales = _split_four(tl.reshape(norm[0], [LANES * 4]), 1, LANES // 32)
    for i in tl.static_range(4):
        if NORM:
            low = low + (_low_half(words[i]) * _low_half(scales[i]),)
            high = high + (_high_half(words[i]) * _high_half(scales[i]),)
        else:
            low = low + (_low_half(words[i]),)
            high = high + (_high_half(words[i]),)
    return low, high


@jit
def _add_pair(pair, total):
    """Add both int16 of a word to `total`."""
    return tl.inline_asm_elementwise(
        "dp2a.lo.s32.s32 $0, $1, 257, $2;",
        "=r,r,r",
        (pair, total),
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def _join_pairs(low, high):
    """Return two words as one int64."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@jit
def _prepare_integers(raw, norm, NORM: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr):
    """Quantize x to int16 -> two operands (four int16 in an int64), unit and sum of x.

    Each is [1, LANES // 32, 32]. As `gemv4._quantize_x`, but of x in registers. int8 has one
    operand; the second is the same. A number of 16 bits has no more than 11 significant bits, so
    2 ** 15 units are never reached. A product with the norm's weight could round to that: it gets
    a bit less.
    """
    FIELDS: tl.constexpr = 4 if KIND == "int8" else 8
    IN_ORDER: tl.constexpr = KIND == "int8" or KIND == "mxfp4"  # else even fields first
    BITS: tl.constexpr = 13 if NORM else 14
    values = ()
    for k in tl.static_range(FIELDS):
        value = raw[k].to(tl.float32)
        values = values + (value * norm[k].to(tl.float32) if NORM else value,)
    largest = tl.abs(values[0])
    for k in tl.static_range(1, FIELDS):
        largest = tl.maximum(largest, tl.abs(values[k]), propagate_nan=tl.PropagateNan.ALL)
    exponent = tl.max(largest.to(tl.int32, bitcast=True), 1, keep_dims=True) >> 23
    kept = tl.maximum(exponent, 20)
    unit = ((kept - BITS) << 23).to(tl.float32, bitcast=True)
    inverse = ((254 + BITS - kept) << 23).to(tl.float32, bitcast=True)
    unit = tl.where(exponent == 255, float("nan"), unit)  # inf or NaN in x: NaN in every row
    total = tl.zeros(largest.shape, tl.int32)
    pairs = ()
    for n in tl.static_range(FIELDS // 2):
        # Fields of operand n // 2, at its 16 bits 2 (n % 2) and the next.
        if IN_ORDER:
            low, high = values[2 * n], values[2 * n + 1]
        else:
            low, high = values[4 * (n % 2) + n // 2], values[4 * (n % 2) + n // 2 + 2]
        # Adding 1.5 * 2 ** 23 rounds to a whole number, and leaves it in the lowest 16 bits.
        low_bits = (low * inverse + 12582912.0).to(tl.int32, bitcast=True)
        high_bits = (high * inverse + 12582912.0).to(tl.int32, bitcast=True)
        pair = (low_bits & 0xFFFF) | (high_bits << 16)
        total = _add_pair(pair, total)
        pairs = pairs + (pair,)
    first = _join_pairs(pairs[0], pairs[1])
    sums = tl.sum(total, 1, keep_dims=True).to(tl.float32) * unit
    unit, sums = tl.reshape(unit, [1, LANES // 32, 32]), tl.reshape(sums, [1, LANES // 32, 32])
    first = _split_four(tl.reshape(first, [LANES * 4]), 1, LANES // 32)
    if KIND == "int8":
        second = first
    else:
        second = tl.reshape(_join_pairs(pairs[2], pairs[3]), [LANES * 4])
        second = _split_four(second, 1, LANES // 32)
    return first, second, unit, sums


@jit
def _prepare_x(raw, norm, NORM: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr):
    """Make the operands of `_multiply_chunk`."""
    if KIND == "bf16":
        return _prepare_bf16(raw, norm, NORM, LANES)
    else:
        return _prepare_integers(raw, norm, NORM, KIND, LANES)


# Weights of a chunk -------------------------------------------------------------------------------


@jit
def _locate(
    quads,
    experts,
    row,
    chunk,
    QUADS: tl.constexpr,
    EACH: tl.constexpr,
    OUT: tl.constexpr,
    LANES: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Return the row of the stacked weight (int64) and the quad in it, for each quad of a tile.

    quads: numbers of the tile's quads, row-major in [ROWS, LANES]. EACH: quads of a row.
    GATHER: x holds QUADS // EACH rows of as many experts, one after the other, and `experts` is
    the address of their indices. Otherwise x is one row, and `experts` is one index. Quads beyond
    the last become the last: their x is 0.
    """
    quad = tl.minimum(chunk * LANES + quads % LANES, QUADS - 1)
    rows = row + quads // LANES
    if GATHER:
        return tl.load(experts + quad // EACH).to(tl.int64) * OUT + rows, quad % EACH
    else:
        return experts * OUT + rows, quad


@jit
def _load_chunk(
    weights,
    experts,
    row,
    chunk,
    QUADS: tl.constexpr,
    EACH: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    GATHER: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    ONCE: tl.constexpr = False,
):
    """Load the codes of a chunk of ROWS rows, [ROWS * LANES * 4], with scales and zeros.

    ONCE: L2 evicts these lines first.

    The order is that of `gemv4._load_tile`; scales and zeros are one number a quad. The scale of
    an int8 row is loaded here only if lanes have different experts. Else it multiplies the sum.
    """
    codes, scale, scale_step, scale_low, zero, zero_step, zero_low = weights
    at = tl.arange(0, ROWS * LANES * 4)
    rows, quad = _locate(at // 4, experts, row, chunk, QUADS, EACH, OUT, LANES, GATHER)
    words = rows * (EACH * 4) + quad * 4 + at % 4
    # A lane's four words are one aligned load, which the compiler does not see through their
    # indices.
    aligned = tl.max_contiguous(tl.multiple_of(codes + words, 16), 4)
    tile = (tl.load(aligned, eviction_policy="evict_first" if ONCE else ""),)
    if KIND == "int4" or KIND == "mxfp4" or KIND == "hqq":
        RUN: tl.constexpr = GROUP // 8  # words of a group
        at = tl.arange(0, ROWS * LANES)
        rows, quad = _locate(at, experts, row, chunk, QUADS, EACH, OUT, LANES, GATHER)
        groups = rows * (EACH * 4 // RUN) + quad * 4 // RUN
        tile = tile + (tl.load(scale + groups),)
        if KIND == "hqq":
            step = tl.reshape(tl.load(scale_step + rows), [ROWS, LANES // 32, 32])
            low = tl.reshape(tl.load(scale_low + rows), [ROWS, LANES // 32, 32])
            tile = tile + (step, low, tl.load(zero + groups))
            step = tl.reshape(tl.load(zero_step + rows), [ROWS, LANES // 32, 32])
            low = tl.reshape(tl.load(zero_low + rows), [ROWS, LANES // 32, 32])
            tile = tile + (step, low)
    elif KIND == "int8" and GATHER:
        rows, _ = _locate(
            tl.arange(0, ROWS * LANES), experts, row, chunk, QUADS, EACH, OUT, LANES, GATHER
        )
        tile = tile + (tl.load(scale + rows),)
    return tile


@jit
def _add_bytes(word, x, total):
    """Add one word's dot product to `total`: four signed bytes times four int16 in an int64."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 x<2>, sum;
        mov.b64 {x0, x1}, $2;
        dp2a.lo.s32.s32 sum, x0, $1, $3;
        dp2a.hi.s32.s32 $0, x1, $1, sum;
        }""",
        "=r,r,l,r",
        (word, x, total),
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def _multiply_chunk(
    tile,
    operands,
    table,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Multiply a chunk of weights by its x -> each lane's sums, fp32 [ROWS, LANES]."""
    if KIND == "bf16":
        words = _split_four(tile[0], ROWS, LANES // 32)
        low, high = operands
        total = _low_half(words[0]) * low[0]
        total += _high_half(words[0]) * high[0]
        for i in tl.static_range(1, 4):
            total += _low_half(words[i]) * low[i]
            total += _high_half(words[i]) * high[i]
    elif KIND == "int8":
        words = _split_four(tile[0], ROWS, LANES // 32)
        sums = tl.zeros([ROWS, LANES // 32, 32], tl.int32)
        for i in tl.static_range(4):
            sums = _add_bytes(words[i], operands[0][i], sums)
        total = sums.to(tl.float32) * operands[2]
        if GATHER:
            total *= tl.reshape(tile[1], [ROWS, LANES // 32, 32]).to(tl.float32)
    else:
        total = _multiply_tile(tile, operands, table, ROWS, LANES // 32, KIND)
    return tl.reshape(total, [ROWS, LANES])


@jit
def _weighted_operands(operands, factor, KIND: tl.constexpr):
    """Multiply the operands of a chunk by the routing weight of their expert."""
    if KIND == "bf16":
        low, high = (), ()
        for i in tl.static_range(4):
            low = low + (operands[0][i] * factor,)
            high = high + (operands[1][i] * factor,)
        return low, high
    else:
        return operands[0], operands[1], operands[2] * factor, operands[3] * factor


@jit
def _sum_lanes(total, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Sum the lanes' sums [ROWS, LANES] of each row -> [ROWS * LANES] with LANES = 32, else [ROWS].

    With 32 lanes every lane of a row gets its sum, and the first one stores it. One number a row
    would have another layout, for which warps wait for each other.
    """
    total = tl.sum(total, 1)
    if LANES == 32:
        total = tl.reshape(tl.broadcast_to(total[:, None], [ROWS, 32]), [ROWS * 32])
    return total


@jit
def _result_rows(ROWS: tl.constexpr, LANES: tl.constexpr):
    """Return the row of each number of `_sum_lanes`, and whether it stores the result."""
    if LANES == 32:
        lane = tl.arange(0, ROWS * 32)
        return lane // 32, lane % 32 == 0
    else:
        row = tl.arange(0, ROWS)
        return row, row >= 0


# Kernels ------------------------------------------------------------------------------------------


@jit
def _silu_gated(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@jit
def _ordered_bits(scores):
    """Map fp32 to int32 in the same order (`topk.ordered_bits`)."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


@jit
def _choose_one(scores, rank, E: tl.constexpr, EXPERTS: tl.constexpr, WARPS: tl.constexpr):
    """Return the index of the score of this rank, as `_choose` orders them.

    Each warp searches by itself: the maxima of a row of [WARPS, EXPERTS] are within a warp.
    """
    expert = tl.arange(0, EXPERTS)[None, :] + tl.zeros([WARPS, 1], tl.int32)
    score = tl.load(scores + expert, mask=expert < E, other=float("-inf"), cache_modifier=".cg")
    key = _ordered_bits(score)
    found = tl.zeros([WARPS, 1], tl.int32)
    for _ in range(rank + 1):
        best = key == tl.max(key, 1, keep_dims=True)
        found = tl.min(tl.where(best, expert, EXPERTS), 1, keep_dims=True)
        key = tl.where(expert == found, -(2**31), key)
    return tl.max(tl.max(found, 1), 0)


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
    ONCE: tl.constexpr,
):
    """Load a chunk of ROWS rows of gate, and of the rows of up that belong to them."""
    OUT: tl.constexpr = 2 * I
    gate = _load_chunk(
        weights, expert, row, chunk, QUADS, QUADS, OUT, GROUP, KIND, False, LANES, ROWS, ONCE
    )
    up = _load_chunk(
        weights, expert, row + I, chunk, QUADS, QUADS, OUT, GROUP, KIND, False, LANES, ROWS, ONCE
    )
    return gate, up


# Grid [R, A]: a program computes ROWS rows of one chosen expert's result, gate and up.
#
# Without CHOOSE, weights depend on an index that the previous kernel wrote, so nothing is loaded
# before the wait. All loads then start at once: the tile's first DEPTH chunks, and their x.
#
# With CHOOSE, x and the router's scores are of the kernel before the previous one, which writes the
# indices meanwhile. A program finds its expert itself, and waits when its loads are under way.
@jit
def _gate_up(
    x,
    indices,
    scores,
    codes,
    scale,
    scale_step,
    scale_low,
    zero,
    zero_step,
    zero_low,
    h,
    unknown_zero,
    I: tl.constexpr,
    QUADS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    CHOOSE: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    ONCE: tl.constexpr,
):
    RUN: tl.constexpr = GROUP // 4 if KIND == "int8" else GROUP // 8
    CHUNKS: tl.constexpr = (QUADS + LANES - 1) // LANES
    weights = (codes, scale, scale_step, scale_low, zero, zero_step, zero_low)
    pair = tl.program_id(1)
    # The last tile begins early enough to be whole: some of its rows are computed twice.
    row = tl.minimum(tl.program_id(0) * ROWS, I - ROWS)
    if CHOOSE:
        expert = _choose_one(scores, pair, E, EXPERTS, WARPS).to(tl.int64)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        expert = tl.load(indices + pair).to(tl.int64)
    tiles, xs = (), ()
    for d in tl.static_range(DEPTH):
        both = _load_gate_up(weights, expert, row, d, I, QUADS, GROUP, KIND, LANES, ROWS, ONCE)
        tiles = tiles + (both,)
    for d in tl.static_range(DEPTH):
        xs = xs + (_load_x(x, d, QUADS, RUN, KIND, LANES),)
    if PDL:
        if CHOOSE:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    table = _e2m1_table(unknown_zero) if KIND == "mxfp4" else None
    gate, up = tl.zeros([ROWS, LANES], tl.float32), tl.zeros([ROWS, LANES], tl.float32)
    for c in range(0, CHUNKS, DEPTH):
        for d in tl.static_range(DEPTH):
            operands = _prepare_x(xs[d], xs[d], False, KIND, LANES)
            gate += _multiply_chunk(tiles[d][0], operands, table, LANES, ROWS, KIND, False)
            up += _multiply_chunk(tiles[d][1], operands, table, LANES, ROWS, KIND, False)
            if CHUNKS > DEPTH:  # prefetch: the registers of this chunk are free now
                chunk = c + DEPTH + d
                both = _load_gate_up(
                    weights, expert, row, chunk, I, QUADS, GROUP, KIND, LANES, ROWS, ONCE
                )
                tiles = tiles[:d] + (both,) + tiles[d + 1 :]
                xs = xs[:d] + (_load_x(x, chunk, QUADS, RUN, KIND, LANES),) + xs[d + 1 :]
    gate, up = _sum_lanes(gate, ROWS, LANES), _sum_lanes(up, ROWS, LANES)
    rows, stores = _result_rows(ROWS, LANES)
    if KIND == "int8":
        flat = expert * (2 * I) + row + rows
        gate *= tl.load(scale + flat).to(tl.float32)
        up *= tl.load(scale + I + flat).to(tl.float32)
    out = h + pair * I + row + rows
    tl.store(out, _silu_gated(gate, up).to(h.dtype.element_ty), mask=stores)


# Grid [R, S]: a program computes ROWS rows of the result from one of S parts of x (split-K). x is
# that of all chosen experts, one after the other (GATHER), or one row.
#
# Weights, indices, routing weights and the residual are those of the kernel before the previous
# one, or older. They are loaded before the wait. Only x is the previous kernel's result.
@jit
def _down(
    x,
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
    y,
    unknown_zero,
    OUT: tl.constexpr,
    EACH: tl.constexpr,
    QUADS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    GATHER: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    ONCE: tl.constexpr,
):
    RUN: tl.constexpr = GROUP // 4 if KIND == "int8" else GROUP // 8
    weights = (codes, scale, scale_step, scale_low, zero, zero_step, zero_low)
    experts = indices if GATHER else tl.program_id(0).to(tl.int64) * 0
    row = tl.minimum(tl.program_id(0) * ROWS, OUT - ROWS)
    first = tl.program_id(1) * CHUNKS
    rows, stores = _result_rows(ROWS, LANES)
    tiles, norms, factors, xs = (), (), (), ()
    for d in tl.static_range(DEPTH):
        tiles = tiles + (
            _load_chunk(
                weights,
                experts,
                row,
                first + d,
                QUADS,
                EACH,
                OUT,
                GROUP,
                KIND,
                GATHER,
                LANES,
                ROWS,
                ONCE,
            ),
        )
        norms = norms + (_load_x(norm, first + d, QUADS, RUN, KIND, LANES) if NORM else 0,)
        factors = factors + (_lane_factor(routing, first + d, QUADS, EACH, LANES) if GATHER else 0,)
    if RESIDUAL:
        add = tl.load(residual + row + rows, mask=stores, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for d in tl.static_range(DEPTH):
        xs = xs + (_load_x(x, first + d, QUADS, RUN, KIND, LANES),)
    table = _e2m1_table(unknown_zero) if KIND == "mxfp4" else None
    total, squares = tl.zeros([ROWS, LANES], tl.float32), 0.0
    for c in range(0, CHUNKS, DEPTH):
        for d in tl.static_range(DEPTH):
            operands = _prepare_x(xs[d], norms[d], NORM, KIND, LANES)
            if GATHER:
                operands = _weighted_operands(operands, factors[d], KIND)
            if NORM:
                squares += _square_sum(xs[d], KIND)
            total += _multiply_chunk(tiles[d], operands, table, LANES, ROWS, KIND, GATHER)
            if CHUNKS > DEPTH:  # prefetch: the registers of this chunk are free now
                chunk = first + c + DEPTH + d
                tile = _load_chunk(
                    weights,
                    experts,
                    row,
                    chunk,
                    QUADS,
                    EACH,
                    OUT,
                    GROUP,
                    KIND,
                    GATHER,
                    LANES,
                    ROWS,
                    ONCE,
                )
                tiles = tiles[:d] + (tile,) + tiles[d + 1 :]
                if NORM:
                    norms = (
                        norms[:d]
                        + (_load_x(norm, chunk, QUADS, RUN, KIND, LANES),)
                        + norms[d + 1 :]
                    )
                if GATHER:
                    factors = (
                        factors[:d]
                        + (_lane_factor(routing, chunk, QUADS, EACH, LANES),)
                        + factors[d + 1 :]
                    )
                xs = xs[:d] + (_load_x(x, chunk, QUADS, RUN, KIND, LANES),) + xs[d + 1 :]
    total = _sum_lanes(total, ROWS, LANES)
    if NORM:
        # x's numbers in a quad: 128 bits of codes
        NUMBERS: tl.constexpr = QUADS * (8 if KIND == "bf16" else 16 if KIND == "int8" else 32)
        total *= tl.rsqrt(squares / NUMBERS + EPS)
    if KIND == "int8" and not GATHER:
        total *= tl.load(scale + row + rows).to(tl.float32)
    if RESIDUAL:
        total += add.to(tl.float32)
    out = y + tl.program_id(1) * OUT + row + rows
    tl.store(out, total.to(y.dtype.element_ty), mask=stores)


@jit
def _choose(
    scores,
    indices,
    weights,
    E: tl.constexpr,
    A: tl.constexpr,
    NORM_TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the A best of E scores, as `MoE.route`: ties go to the lower index.

    A rounds find one maximum each. Within a warp that is one instruction (redux), so one warp is
    faster than many, and leaves the SM to the programs of the next kernel.
    """
    expert = tl.arange(0, BLOCK)
    # From L2: another SM has written them during this kernel.
    score = tl.load(scores + expert, mask=expert < E, other=float("-inf"), cache_modifier=".cg")
    key, rank = _ordered_bits(score), tl.full([BLOCK], A, tl.int32)
    for n in tl.static_range(A):
        found = expert == tl.min(tl.where(key == tl.max(key, 0), expert, BLOCK), 0)
        rank = tl.where(found, n, rank)
        key = tl.where(found, -(2**31), key)
    part = tl.exp(score - tl.max(score, 0))
    chosen = rank < A
    total = tl.sum(tl.where(chosen, part, 0.0) if NORM_TOPK else part, 0)
    tl.store(indices + rank, expert.to(tl.int64), mask=chosen)
    tl.store(weights + rank, part / total, mask=chosen)


@jit
def _prefetch(address, bytes, program, WARPS: tl.constexpr):
    """Start loading this program's part of `bytes` at `address` into L2: 8 KB a warp."""
    warp = tl.arange(0, WARPS * 32) // 32
    begin = tl.minimum((program.to(tl.int64) * WARPS + warp) * 8192, bytes - 8192)
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        mov.b32 lane, %laneid;
        setp.eq.b32 first, lane, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], 8192;
        mov.b32 $0, 0;
        }""",
        "=r,l",
        (address.to(tl.int64) + begin,),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# Grid [E / ROWS + P]: each program adds and norms the whole token, and computes ROWS scores. With
# LAST the program that ends last chooses the experts. `counter` counts programs, and is 0 between
# calls. P more programs load the weights of later kernels into L2: memory is idle here.
@jit
def _norm_router(
    x,
    y,
    norm,
    router,
    bias,
    counter,
    summed,
    normed,
    scores,
    indices,
    weights,
    ahead,
    ahead_bytes,
    D: tl.constexpr,
    E: tl.constexpr,
    A: tl.constexpr,
    PARTS: tl.constexpr,
    EPS: tl.constexpr,
    NORM_TOPK: tl.constexpr,
    BIAS: tl.constexpr,
    LAST: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
):
    PROGRAMS: tl.constexpr = (E + ROWS - 1) // ROWS
    if AHEAD and tl.program_id(0) >= PROGRAMS:
        _prefetch(ahead, ahead_bytes, tl.program_id(0) - PROGRAMS, WARPS)
        return
    d, expert = tl.arange(0, BLOCK), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = d < D
    rows = tl.load(
        router + expert[:, None] * D + d[None, :],
        mask=(expert < E)[:, None] & inside[None, :],
        other=0.0,
    )
    scale = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
    if PARTS:  # then x is of an older kernel than the previous one
        value = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if PARTS:
        for part in tl.static_range(PARTS):
            value += tl.load(y + part * D + d, mask=inside, other=0.0).to(tl.float32)
    else:
        value = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    value = value.to(summed.dtype.element_ty)
    by_first = d < D - tl.program_id(0) * BLOCK  # the first program alone stores sum and norm
    tl.store(summed + d, value, mask=by_first)
    value = value.to(tl.float32)  # norm the rounded sum, which the next layer reads
    value = value * tl.rsqrt(tl.sum(value * value, 0) / D + EPS) * scale
    value = value.to(normed.dtype.element_ty)
    tl.store(normed + d, value, mask=by_first)
    dots = tl.sum(rows.to(tl.float32) * value.to(tl.float32)[None, :], 1)
    if BIAS:
        dots += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)
    tl.store(scores + expert, dots, mask=expert < E)
    if LAST:
        tl.debug_barrier()  # this program's scores are stored before its count
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
            tl.debug_barrier()
            _choose(scores, indices, weights, E, A, NORM_TOPK, EXPERTS)
            tl.store(counter, 0)


# Grid [1]: choose the experts from scores, in a kernel of its own.
@jit
def _route(
    scores,
    indices,
    weights,
    E: tl.constexpr,
    A: tl.constexpr,
    NORM_TOPK: tl.constexpr,
    PDL: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _choose(scores, indices, weights, E, A, NORM_TOPK, EXPERTS)


# Launching ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """How a product divides its work among programs. benchmarks/moe_phases.py measures some."""

    rows: int = 8  # rows of the result that a program computes, a power of two
    lanes: int = 32  # quads of a row in a chunk, a power of two from 32 on
    depth: int = 0  # chunks in flight; 0: all
    split: int = 1  # parts of x (split-K) of `down`
    warps: int = 4
    once: bool = False  # read weights so that they leave L2 first

    def __str__(self) -> str:
        depth = self.depth or "all"
        return (
            f"rows {self.rows} lanes {self.lanes} x {depth} split {self.split} warps {self.warps}"
            + " once" * self.once
        )


@dataclass(frozen=True)
class Weight:
    """A weight as the kernels read it: its tensors in the layout's order, kind, and group."""

    parts: tuple[Tensor, ...]  # bf16: the weight as int32 [..., out, in / 2]
    kind: str
    group: int

    @property
    def quads(self) -> int:
        """Quads (16 bytes of codes) of a row."""
        return self.parts[0].shape[-1] // 4

    @property
    def out(self) -> int:
        return self.parts[0].shape[-2]

    def pointers(self) -> list[Tensor]:
        """Return seven tensors: the kernel needs a valid pointer for an absent one."""
        return [*self.parts, *[self.parts[0]] * (7 - len(self.parts))]


def plain_weight(weight: Tensor) -> Weight:
    """Return a bf16 weight [..., out, in] as the kernels read it.

    Raises ValueError unless it is bf16 and a row is a multiple of 16 bytes.
    """
    if weight.dtype != torch.bfloat16 or weight.shape[-1] % 8:
        raise ValueError(f"no kernel for {weight.dtype} rows of {weight.shape[-1]} numbers")
    return Weight((weight.view(torch.int32),), "bf16", 8)


def packed_weight(parts: list[Tensor], kind: str, group: int) -> Weight:
    """Return packed parts as the kernels read them.

    Raises ValueError if a group does not consist of whole quads, or is of another kind.
    """
    whole_quads = group % 32 == 0 if kind in ("int4", "mxfp4", "hqq") else kind == "int8"
    if not whole_quads or parts[0].shape[-1] % 4:
        raise ValueError(f"no kernel for {kind} with groups of {group}")
    return Weight(tuple(parts), kind, group)


def chunks_of(quads: int, tiles: Tiles) -> tuple[int, int, int]:
    """Return the chunks of a part, those in flight, and the number of parts of x."""
    chunks = triton.cdiv(quads, tiles.lanes)
    each = triton.cdiv(chunks, tiles.split)
    depth = min(tiles.depth or each, each)
    each = triton.cdiv(each, depth) * depth  # or a part would compute a chunk of the next
    return each, depth, triton.cdiv(chunks, each)


def choose_tiles(weight: Weight, quads: int, loads: int) -> Tiles:
    """Return how to divide a product with x of `quads` quads. loads: 2 for gate and up, else 1.

    As measured on an H200 (docs/log/small_experts.md): as many lanes as waste few, but in 8 and 16
    bits at least two chunks; all chunks in flight, if that takes no more than half of the rows;
    few rows for gate and up, which load nothing before the kernel starts, so that many programs
    do.
    """
    narrow = BITS[weight.kind] == 4
    widest = 64 if narrow else 256 // loads
    wide = (lanes for lanes in (256, 128, 64) if lanes <= widest and -quads % lanes <= quads // 8)
    lanes = next((lanes for lanes in wide if narrow or 2 * lanes <= quads), 32)
    rows = 8 if loads == 1 else 4 if narrow else 2
    registers = TILE_REGISTERS
    if weight.kind == "hqq" and loads == 1:  # its two scales a group take registers, too
        rows, registers = 4, TILE_REGISTERS // 2
    chunks = triton.cdiv(quads, lanes)
    if registers < 4 * rows * loads * chunks < 1.5 * registers:
        rows //= 2
    depth = min(chunks, max(1, registers // (4 * rows * loads)))
    return Tiles(rows, lanes, depth, 1, lanes // 32)


def check_router(router: Tensor, active: int) -> None:
    """Raise ValueError if `norm_router` has no kernel for a router [E, D]."""
    E, D = router.shape
    if E > MAX_EXPERTS or D > MAX_DIM or active > E:
        raise ValueError(f"no kernel for {E} experts and rows of {D} numbers")


def operand_of(x: Tensor, weight: Weight) -> Tensor:
    """Return x as the kernel reads it. Raises ValueError for a wrong dtype."""
    if weight.kind == "bf16":
        if x.dtype != torch.bfloat16:
            raise ValueError(f"bf16 weights need bf16 x, not {x.dtype}")
        return x.view(torch.int32)
    if x.element_size() != 2:
        raise ValueError(f"packed weights need x of 16 bits, not {x.dtype}")
    return x


def gate_up(
    x: Tensor,
    indices: Tensor,
    weight: Weight,
    activation: str = "silu",
    tiles: Tiles | None = None,
    pdl: bool | None = None,
    dtype: torch.dtype | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    """Multiply x [1, D] by w13 [E, 2 I, D] of experts `indices` [1, A] -> h [A, I], gated.

    The reference is `ExpertLinear.gather_gated` with `model.swiglu`. dtype: of h; default x.dtype.
    pdl: None launches with PDL where the GPU has it. scores: the router's, fp32 [E], if they and x
    are older than the previous kernel, which may be the one that writes the indices. Raises
    ValueError for another activation.
    """
    if activation != "silu":
        raise ValueError(f"no kernel for the activation {activation}")
    pdl = supports_pdl(x) if pdl is None else pdl
    I, A = weight.out // 2, indices.numel()
    tiles = tiles or choose_tiles(weight, weight.quads, 2)
    tiles = replace(tiles, rows=min(tiles.rows, triton.next_power_of_2(I + 1) // 2), split=1)
    _, depth, _ = chunks_of(weight.quads, tiles)
    h = torch.empty(A, I, dtype=dtype or x.dtype, device=x.device)
    _gate_up[triton.cdiv(I, tiles.rows), A](
        operand_of(x, weight),
        indices,
        indices if scores is None else scores,
        *weight.pointers(),
        h,
        0,
        I=I,
        QUADS=weight.quads,
        GROUP=weight.group,
        KIND=weight.kind,
        CHOOSE=scores is not None,
        E=0 if scores is None else scores.numel(),
        EXPERTS=0 if scores is None else triton.next_power_of_2(scores.numel()),
        WARPS=tiles.warps,
        PDL=pdl,
        LANES=tiles.lanes,
        ROWS=tiles.rows,
        DEPTH=depth,
        ONCE=tiles.once,
        launch_pdl=pdl,
        num_warps=tiles.warps,
        num_stages=1,
    )
    return h


def down(
    x: Tensor,
    weight: Weight,
    indices: Tensor | None = None,
    routing: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    tiles: Tiles | None = None,
    pdl: bool | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply x by a weight and add the residual -> [S, out]; S > 1: fp32 partial sums.

    With indices and routing weights [1, A]: x is [A, I], weight w2 [E, D, I], and the products are
    summed with these weights; the reference is `weighted_sum(w2.gather(x, ...))`. Without: x is
    [1, in], weight [out, in]. norm [in]: RMS norm of x first, which is not rounded.

    dtype: of the result; default that of x. With PDL, all tensors but x are loaded while the
    previous kernel runs, which must not write them. Raises ValueError for a residual or a norm with
    split-K, and a norm with experts.
    """
    quads = x.numel() // x.shape[-1] * weight.quads
    tiles = tiles or choose_tiles(weight, quads, 1)
    each, depth, parts = chunks_of(quads, tiles)
    if (parts > 1 and (residual is not None or norm is not None)) or (
        norm is not None and indices is not None
    ):
        raise ValueError("no residual or norm with split-K, no norm with experts")
    pdl = supports_pdl(x) if pdl is None else pdl
    rows = min(tiles.rows, triton.next_power_of_2(weight.out + 1) // 2)
    dtype = torch.float32 if parts > 1 else dtype or x.dtype
    y = torch.empty(parts, weight.out, dtype=dtype, device=x.device)
    operand = operand_of(x, weight)
    absent = weight.parts[0]  # a valid pointer, which the kernel does not read
    _down[triton.cdiv(weight.out, rows), parts](
        operand,
        absent if indices is None else indices,
        absent if routing is None else routing,
        operand if norm is None else operand_of(norm, weight),
        absent if residual is None else residual,
        *weight.pointers(),
        y,
        0,
        OUT=weight.out,
        EACH=weight.quads,
        QUADS=quads,
        GROUP=weight.group,
        KIND=weight.kind,
        GATHER=indices is not None,
        NORM=norm is not None,
        RESIDUAL=residual is not None,
        EPS=eps,
        PDL=pdl,
        LANES=tiles.lanes,
        ROWS=rows,
        DEPTH=depth,
        CHUNKS=each,
        ONCE=tiles.once,
        launch_pdl=pdl,
        num_warps=tiles.warps,
        num_stages=1,
    )
    return y


def norm_router(
    x: Tensor,
    y: Tensor | None,
    norm: Tensor,
    eps: float,
    router: Tensor,
    active: int,
    norm_topk: bool,
    counter: Tensor | None = None,
    bias: Tensor | None = None,
    rows: int = 1,
    warps: int = 4,
    ahead: Tensor | None = None,
    pdl: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Add x [1, D] + y [S, D], norm the sum, and route it.

    Return the sum and its norm [1, D], expert_indices int64 [1, A], expert_weights fp32 [1, A] and
    the router's scores fp32 [1, E].
    The reference is `AddNorm`, then `MoE.route` of the router's scores, which stay fp32 here.

    router [E, D]; y: None, one row or fp32 partial sums. counter: int32 [1], 0: the last program
    chooses the experts. None: a second kernel does. With PDL, all but y (without y: all but x) is
    loaded while the previous kernel runs. ahead: a weight that a later kernel reads, which is
    loaded into L2. Raises ValueError if E or D is too large.
    """
    check_router(router, active)
    E, D = router.shape
    pdl = supports_pdl(x) if pdl is None else pdl
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    scores = torch.empty(1, E, dtype=torch.float32, device=x.device)
    indices = torch.empty(1, active, dtype=torch.int64, device=x.device)
    weights = torch.empty(1, active, dtype=torch.float32, device=x.device)
    experts = triton.next_power_of_2(E)
    choice = dict(E=E, A=active, NORM_TOPK=norm_topk, EXPERTS=experts, PDL=pdl, launch_pdl=pdl)
    ahead_bytes = 0 if ahead is None else ahead.nbytes
    _norm_router[(triton.cdiv(E, rows) + triton.cdiv(ahead_bytes, PREFETCHED * warps),)](
        x,
        x if y is None else y,
        norm,
        router,
        norm if bias is None else bias,
        indices if counter is None else counter,
        summed,
        normed,
        scores,
        indices,
        weights,
        norm if ahead is None else ahead,
        ahead_bytes,
        AHEAD=ahead is not None,
        WARPS=warps,
        D=D,
        PARTS=0 if y is None else y.numel() // D,
        EPS=eps,
        BIAS=bias is not None,
        LAST=counter is not None,
        BLOCK=triton.next_power_of_2(D),
        ROWS=rows,
        **choice,
        num_warps=warps,
    )
    if counter is None:
        _route[(1,)](scores, indices, weights, **choice, num_warps=1)
    return summed, normed, indices, weights, scores
