"""Chunks of rows and of x, in registers, for the products of ops/products/experts.py.

Quads. A lane loads 16 bytes of a row: a quad of four words, which hold 8 bf16 numbers, 16 codes of
8 bits or 32 of 4 bits. A chunk is LANES neighboring quads of each row of the program's tile. With
LANES = 32 each warp has rows of its own, and prepares all of x. With LANES = 32 * warps each warp
has all rows and its own part of x. Quantizing x takes as many instructions as multiplying it by six
rows of 4-bit codes, so 32 lanes or more are better.

Kinds of codes: bf16 numbers; int8, and the 4-bit kinds of ops/products/gemv4.py, whose products are of
integers (x becomes int16, with one power of two a quad); fp8 (one scale a row) and fp8b (one a
block), whose products are fp32. FIELDS is the number of codes in a word: 2, 4 or 8.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

from ops.launch import add_both, jit, tl
from ops.products.gemv4 import _multiply_tile, _split_four

# x of a chunk -------------------------------------------------------------------------------------


@jit
def load_x(
    x,
    chunk,
    QUADS: tl.constexpr,
    RUN: tl.constexpr,
    FIELDS: tl.constexpr,
    LANES: tl.constexpr,
    VOLATILE: tl.constexpr = False,
):
    """Load the x of a chunk, unconverted: bf16 as words [LANES, 4], else FIELDS such tensors.

    QUADS: quads of the whole x. RUN: words of a group, whose fields are RUN numbers apart.
    VOLATILE: from L2, where another GPU has stored it.
    """
    quad = chunk * LANES + tl.arange(0, LANES)[:, None]
    word = quad * 4 + tl.arange(0, 4)[None, :]
    inside = quad < QUADS
    if FIELDS == 2:
        raw = (tl.load(x + word, mask=inside, other=0),)
    else:
        at = x + word // RUN * (RUN * FIELDS) + word % RUN
        raw = ()
        for k in tl.static_range(FIELDS):
            part = tl.load(at + k * RUN, mask=inside, other=0, volatile=VOLATILE)
            raw = raw + (part,)
    return raw


@jit
def _load_norm(
    norm, chunk, QUADS: tl.constexpr, RUN: tl.constexpr, FIELDS: tl.constexpr, LANES: tl.constexpr
):
    """Load the norm's weight of a chunk as `load_x`. fp32 beside bf16 rows: even, odd numbers."""
    if FIELDS == 2 and norm.dtype.element_ty == tl.float32:
        quad = chunk * LANES + tl.arange(0, LANES)[:, None]
        number = (quad * 4 + tl.arange(0, 4)[None, :]) * 2
        even = tl.load(norm + number, mask=quad < QUADS, other=0.0)
        return even, tl.load(norm + number + 1, mask=quad < QUADS, other=0.0)
    else:
        return load_x(norm, chunk, QUADS, RUN, FIELDS, LANES)


@jit
def _low_half(words):
    return (words << 16).to(tl.float32, bitcast=True)


@jit
def _high_half(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@jit
def _lane_squares(raw, FIELDS: tl.constexpr, LANES: tl.constexpr):
    """Sum the squares of a chunk's x in each lane -> [LANES // 32, 32]."""
    if FIELDS == 2:
        low, high = _low_half(raw[0]), _high_half(raw[0])
        total = low * low + high * high
    else:
        total = raw[0].to(tl.float32) * raw[0].to(tl.float32)
        for k in tl.static_range(1, FIELDS):
            total += raw[k].to(tl.float32) * raw[k].to(tl.float32)
    return tl.reshape(tl.sum(total, 1), [LANES // 32, 32])


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
        if norm[0].dtype == tl.float32:
            odd = _split_four(tl.reshape(norm[1], [LANES * 4]), 1, LANES // 32)
    for i in tl.static_range(4):
        if NORM:
            if norm[0].dtype == tl.float32:
                low = low + (_low_half(words[i]) * scales[i],)
                high = high + (_high_half(words[i]) * odd[i],)
            else:
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
def _quantize(values, KIND: tl.constexpr, BITS: tl.constexpr):
    """Quantize fp32 x to int16 -> two operands (four int16 in an int64), unit and sum of x.

    values: one tensor [LANES, 4] for each field of a word, and so are the operands. Unit and sum
    are [LANES, 1]. As `gemv4._quantize_x`, but of x in registers. int8 has one operand; the second
    is the same. A number of 16 bits has no more than 11 significant bits, so that 2 ** 15 units are
    never reached with 14 BITS.
    """
    FIELDS: tl.constexpr = 4 if KIND == "int8" else 8
    IN_ORDER: tl.constexpr = KIND == "int8" or KIND == "mxfp4"  # else even fields first
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
    second = first if KIND == "int8" else _join_pairs(pairs[2], pairs[3])
    return first, second, unit, tl.sum(total, 1, keep_dims=True).to(tl.float32) * unit


@jit
def _split_operands(first, second, unit, sums, KIND: tl.constexpr, LANES: tl.constexpr):
    """Order what `_quantize` returns as `_multiply_chunk` takes it: all [1, LANES // 32, 32]."""
    unit, sums = tl.reshape(unit, [1, LANES // 32, 32]), tl.reshape(sums, [1, LANES // 32, 32])
    words = _split_four(tl.reshape(first, [LANES * 4]), 1, LANES // 32)
    others = words
    if KIND != "int8":
        others = _split_four(tl.reshape(second, [LANES * 4]), 1, LANES // 32)
    return words, others, unit, sums


@jit
def _prepare_integers(raw, norm, NORM: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr):
    """Quantize x as loaded by `load_x`. A product with the norm's weight gets 13 bits, not 14."""
    values = ()
    for k in tl.static_range(4 if KIND == "int8" else 8):
        value = raw[k].to(tl.float32)
        values = values + (value * norm[k].to(tl.float32) if NORM else value,)
    first, second, unit, sums = _quantize(values, KIND, 13 if NORM else 14)
    return _split_operands(first, second, unit, sums, KIND, LANES)


@jit
def _load_pairs(x, chunk, QUADS: tl.constexpr, LANES: tl.constexpr):
    """Load both operands of each word of a chunk of quantized x, as a lane multiplies them."""
    at = tl.arange(0, LANES * 2)
    quad = chunk * LANES + at // 2
    first, second = (), ()
    for i in tl.static_range(4):
        words = x + (quad * 2 + at % 2) + i * QUADS * 2
        words = tl.max_contiguous(tl.multiple_of(words, 16), 2)
        both = tl.load(words, mask=quad < QUADS, other=0)
        one, other = tl.split(tl.reshape(both, [1, LANES // 32, 32, 2]))
        first, second = first + (one,), second + (other,)
    return first, second


@jit
def _load_in_order(x, chunk, QUADS: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr):
    """Load the first and second operands of a chunk of quantized x, as `_quantize` returns them."""
    OPERANDS: tl.constexpr = 1 if KIND == "int8" else 2
    at = tl.arange(0, LANES * 4)
    quad = chunk * LANES + at // 4
    words = x + (quad * (4 * OPERANDS) + at % 4)
    first = tl.load(tl.max_contiguous(tl.multiple_of(words, 32), 4), mask=quad < QUADS, other=0)
    second = first
    if OPERANDS == 2:
        words = tl.max_contiguous(tl.multiple_of(words + 4, 32), 4)
        second = tl.load(words, mask=quad < QUADS, other=0)
    return first, second


@jit
def _load_operands(x, units, chunk, QUADS: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr):
    """Load a chunk of quantized x (`quantized_x.QuantizedX`) for `_order_operands`."""
    if KIND == "int4" or KIND == "hqq":
        first, second = _load_pairs(x, chunk, QUADS, LANES)
    else:
        first, second = _load_in_order(x, chunk, QUADS, KIND, LANES)
    quad = chunk * LANES + tl.arange(0, LANES)
    unit = tl.load(units + quad, mask=quad < QUADS, other=0.0)
    sums = unit
    if KIND == "int4" or KIND == "hqq" or KIND == "mxfp4":
        sums = tl.load(units + QUADS + quad, mask=quad < QUADS, other=0.0)
    return first, second, unit, sums


@jit
def _order_operands(loaded, KIND: tl.constexpr, LANES: tl.constexpr):
    """Order what `_load_operands` returns as `_multiply_chunk` takes it."""
    first, second, unit, sums = loaded
    if KIND == "int4" or KIND == "hqq":
        unit, sums = tl.reshape(unit, [1, LANES // 32, 32]), tl.reshape(sums, [1, LANES // 32, 32])
        return first, second, unit, sums
    else:
        return _split_operands(first, second, unit, sums, KIND, LANES)


@jit
def _prepare_fp32(raw, norm, NORM: tl.constexpr, LANES: tl.constexpr):
    """Convert x to fp32 -> one operand for each field of a word: 4 x [1, LANES // 32, 32]."""
    operands = ()
    for k in tl.static_range(4):
        value = raw[k].to(tl.float32)
        if NORM:
            value *= norm[k].to(tl.float32)
        operands = operands + (_split_four(tl.reshape(value, [LANES * 4]), 1, LANES // 32),)
    return operands


@jit
def _prepare_x(raw, norm, NORM: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr):
    """Make the operands of `_multiply_chunk`."""
    if KIND == "bf16":
        return _prepare_bf16(raw, norm, NORM, LANES)
    elif KIND == "fp8" or KIND == "fp8b":
        return _prepare_fp32(raw, norm, NORM, LANES)
    else:
        return _prepare_integers(raw, norm, NORM, KIND, LANES)


# Weights of a chunk -------------------------------------------------------------------------------


@jit
def _await_choice(indices, PAIRS: tl.constexpr, PAIRS_POW2: tl.constexpr):
    """Wait until the previous kernel has stored all indices, which were -1 before."""
    pair = tl.minimum(tl.arange(0, PAIRS_POW2), PAIRS - 1)
    while tl.min(tl.load(indices + pair, volatile=True), 0) < 0:
        pass


@jit
def _lane_experts(
    indices,
    chunk,
    QUADS: tl.constexpr,
    EACH: tl.constexpr,
    LANES: tl.constexpr,
    POLLED: tl.constexpr,
):
    """Load the expert of each quad of a chunk, int32 [LANES]: every EACH quads have one.

    POLLED: from L2 (volatile), because the previous kernel may have just stored it.
    """
    quad = tl.minimum(chunk * LANES + tl.arange(0, LANES), QUADS - 1)
    return tl.load(indices + quad // EACH, volatile=POLLED).to(tl.int32)


@jit
def _locate(
    quads,
    experts,
    row,
    chunk,
    QUADS: tl.constexpr,
    EACH: tl.constexpr,
    LANES: tl.constexpr,
    GATHER: tl.constexpr,
    REPEAT: tl.constexpr,
):
    """Return expert (int64), its row and the quad in that, for each quad of a tile.

    quads: numbers of the tile's quads, row-major in [ROWS, LANES], each REPEAT times. A row has
    EACH quads. GATHER: x holds QUADS // EACH rows of as many experts, one after the other, and
    `experts` is that of each lane, [LANES]. Otherwise x is one row, and `experts` is one index.
    Quads beyond the last become the last: their x is 0.
    """
    quad = tl.minimum(chunk * LANES + quads % LANES, QUADS - 1)
    rows = row + quads // LANES
    if GATHER:
        COUNT: tl.constexpr = quads.shape[0]
        shape: tl.constexpr = (COUNT // (LANES * REPEAT), LANES, REPEAT)
        experts = tl.reshape(tl.broadcast_to(experts[None, :, None], shape), [COUNT])
        return experts.to(tl.int64), rows, quad % EACH
    else:
        return experts, rows, quad


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
):
    """Load the codes of a chunk of ROWS rows, [ROWS * LANES * 4], with scales and zeros.

    The order is that of `gemv4._load_tile`; scales and zeros are one number a quad. The scale of
    a row (int8, fp8) is loaded here only if lanes have different experts. Else it multiplies the
    sum.
    """
    codes, scale, scale_step, scale_low, zero, zero_step, zero_low = weights
    at = tl.arange(0, ROWS * LANES * 4)
    expert, rows, quad = _locate(at // 4, experts, row, chunk, QUADS, EACH, LANES, GATHER, 4)
    words = (expert * OUT + rows) * (EACH * 4) + quad * 4 + at % 4
    # A lane's four words are one aligned load, which the compiler does not see through their
    # indices.
    aligned = tl.max_contiguous(tl.multiple_of(codes + words, 16), 4)
    tile = (tl.load(aligned),)
    at = tl.arange(0, ROWS * LANES)
    expert, rows, quad = _locate(at, experts, row, chunk, QUADS, EACH, LANES, GATHER, 1)
    if KIND == "int4" or KIND == "mxfp4" or KIND == "hqq":
        RUN: tl.constexpr = GROUP // 8  # words of a group
        rows = expert * OUT + rows
        groups = rows * (EACH * 4 // RUN) + quad * 4 // RUN
        tile = tile + (tl.load(scale + groups),)
        if KIND == "hqq":
            step = tl.reshape(tl.load(scale_step + rows), [ROWS, LANES // 32, 32])
            low = tl.reshape(tl.load(scale_low + rows), [ROWS, LANES // 32, 32])
            tile = tile + (step, low, tl.load(zero + groups))
            step = tl.reshape(tl.load(zero_step + rows), [ROWS, LANES // 32, 32])
            low = tl.reshape(tl.load(zero_low + rows), [ROWS, LANES // 32, 32])
            tile = tile + (step, low)
    elif KIND == "fp8b":
        BLOCKS: tl.constexpr = (OUT + GROUP - 1) // GROUP  # blocks of rows of an expert
        block = expert * BLOCKS + rows // GROUP
        tile = tile + (tl.load(scale + block * (EACH * 16 // GROUP) + quad * 16 // GROUP),)
    elif KIND != "bf16" and GATHER:
        tile = tile + (tl.load(scale + expert * OUT + rows),)
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
def _e4m3_word(word):
    """Convert a word of four e4m3 numbers -> four fp32 tensors, 2 ** -8 times the numbers.

    As formats.fp8.e4m3_products: e4m3 bits, shifted into place, are those of an fp16 number.
    """
    outer, inner = word << 8, word  # bytes 0 and 2, bytes 1 and 3
    outer = (outer & -2147450880) | (outer >> 1 & 0x3F803F80)  # 0x80008000
    inner = (inner & -2147450880) | (inner >> 1 & 0x3F803F80)
    return _half(outer), _half(inner), _half(outer >> 16), _half(inner >> 16)


@jit
def _half(bits):
    """Convert the fp16 number in the lower half of a word to fp32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


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
    elif KIND == "fp8" or KIND == "fp8b":
        words = _split_four(tile[0], ROWS, LANES // 32)
        total = tl.zeros([ROWS, LANES // 32, 32], tl.float32)
        for i in tl.static_range(4):
            values = _e4m3_word(words[i])
            for k in tl.static_range(4):
                total += values[k] * operands[k][i]
        if KIND == "fp8b" or GATHER:
            total *= tl.reshape(tile[1], [ROWS, LANES // 32, 32]).to(tl.float32) * 256.0
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
    elif KIND == "fp8" or KIND == "fp8b":
        fields = ()
        for k in tl.static_range(4):
            words = ()
            for i in tl.static_range(4):
                words = words + (operands[k][i] * factor,)
            fields = fields + (words,)
        return fields
    else:
        return operands[0], operands[1], operands[2] * factor, operands[3] * factor


@jit
def _row_scale(scale, rows, KIND: tl.constexpr):
    """Load the scale of rows of a kind with one scale a row: int8 or fp8."""
    factor = tl.load(scale + rows).to(tl.float32)
    if KIND == "fp8":
        factor *= 256.0  # `_e4m3_word`
    return factor


@jit
def _of_lane(x, MASK: tl.constexpr):
    """Return of x [ROWS, WARPS, 32] the number that the lane at the own index ^ MASK has."""
    lane = (tl.arange(0, 32) ^ MASK)[None, None, :]
    return tl.gather(x, tl.broadcast_to(lane, x.shape), 2)  # one shuffle a number


@jit
def _share_rows(x, MASK: tl.constexpr):
    """Sum x [ROWS, WARPS, 32] over each group of 2 MASK lanes -> [WARPS, 32].

    The lower half of a group sums the first half of the rows, the upper half the others, and so on.
    Of 8 rows a lane gets one sum by 9 shuffles. It would get all 8 by 40.
    """
    ROWS: tl.constexpr = x.shape[0]
    if MASK == 0:
        return tl.reshape(x, x.shape[1:])
    elif ROWS == 1:
        return _share_rows(x + _of_lane(x, MASK), MASK // 2)
    else:
        halves = tl.reshape(x, [2, ROWS // 2, x.shape[1], 32])
        first, second = tl.split(tl.permute(halves, (1, 2, 3, 0)))
        upper = (tl.arange(0, 32) & MASK != 0)[None, None, :]
        own, other = tl.where(upper, second, first), tl.where(upper, first, second)
        return _share_rows(own + _of_lane(other, MASK), MASK // 2)


@jit
def _sum_shared(total, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Sum the lanes' sums [ROWS, LANES] of each row -> [32], for the rows of `_shared_rows`."""
    return tl.sum(_share_rows(tl.reshape(total, [ROWS, LANES // 32, 32]), 16), 0)


@jit
def _sum_normed(
    total,
    squares,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    NUMBERS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Do what `_sum_shared` does, and divide by the RMS of x, which has NUMBERS numbers.

    squares: as of `_lane_squares`. Warps exchange both sums at once.
    """
    total = _share_rows(tl.reshape(total, [ROWS, LANES // 32, 32]), 16)
    squares = _share_rows(tl.reshape(squares, [1, LANES // 32, 32]), 16)
    total, squares = tl.reduce((total, squares), 0, add_both)
    return total * tl.rsqrt(squares / NUMBERS + EPS)


@jit
def _shared_rows(ROWS: tl.constexpr):
    """Return the row of each lane's number of `_sum_shared`, and whether it stores the result."""
    EACH: tl.constexpr = 32 // ROWS
    lane = tl.arange(0, 32)
    return lane // EACH, lane % EACH == 0


@jit
def _sum_lanes(total, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Sum the lanes' sums [ROWS, LANES] of each row -> [ROWS * LANES] with LANES = 32, else [ROWS].

    With 32 lanes every lane of a row gets its sum, and the first one stores it. One number a row
    would have another layout, for which warps wait for each other. `_gate_up` sums so: with
    `_sum_shared` the compiler starts its next loads later (docs/log/small_experts.md).
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


@jit
def activate(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Apply `model.swiglu`, or with ACTIVATION "clamped" `gpt_oss.clamped_swiglu`."""
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1.0
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * up
    else:
        return gate / (1.0 + tl.exp(-gate)) * up
