"""One token's x as the kernels of its products multiply it.

Integers. int8 and 4-bit codes are multiplied as integers (ops/products/codes.py): x becomes int16.
Each quad has a power of two, the unit, because a lane multiplies a quad at a time. A bf16 number
keeps all its digits if it is within 7 binary orders of its quad's largest. Smaller numbers have an
error of at most 2 ** -15 of the largest.

Letters: a word has FIELDS codes: 2, 4, 8 or 16. RUN: words of a group, whose fields are RUN numbers
apart. A chunk is LANES neighboring quads of x. s: settings (`ops.products.pipeline.Product`).
"""

from ops.halves import high_half, low_half
from ops.launch import jit, tl
from ops.products.units import to_fp32
from ops.products.words import add_pair, join_halves


@jit
def load_x(x, chunk, s, VOLATILE: tl.constexpr = False):
    """Load the x of a chunk, unconverted: bf16 as words [LANES, 4], else FIELDS such tensors.

    VOLATILE: from L2, where another GPU has stored it.
    """
    RUN: tl.constexpr = s.run
    quad = chunk * s.lanes + tl.arange(0, s.lanes)[:, None]
    word = quad * 4 + tl.arange(0, 4)[None, :]
    inside = quad < s.quads
    if s.fields == 2:
        return [tl.load(x + word, mask=inside, other=0)]
    else:
        at = x + word // RUN * (RUN * s.fields) + word % RUN
        return [
            tl.load(at + k * RUN, mask=inside, other=0, volatile=VOLATILE) for k in s.field_numbers
        ]


@jit
def load_norm(norm, chunk, s):
    """Load the norm's weight of a chunk as `load_x`. fp32 beside bf16 rows: even, odd numbers."""
    if s.fields == 2 and norm.dtype.element_ty == tl.float32:
        quad = chunk * s.lanes + tl.arange(0, s.lanes)[:, None]
        number = (quad * 4 + tl.arange(0, 4)[None, :]) * 2
        even = tl.load(norm + number, mask=quad < s.quads, other=0.0)
        return even, tl.load(norm + number + 1, mask=quad < s.quads, other=0.0)
    else:
        return load_x(norm, chunk, s)


@jit
def _whole(numbers, s):
    """Convert numbers of 16 bits to fp32: bf16 with fewer instructions than Triton's, if it pays.

    mxfp4 gains nothing; other kinds were not measured (docs/log/speculation.md).
    """
    if numbers.dtype == tl.bfloat16 and (s.kind == "int4" or s.kind == "int8"):
        return to_fp32(numbers)
    else:
        return numbers.to(tl.float32)


@jit
def lane_squares(raw, s):
    """Sum the squares of a chunk's x in each lane -> [LANES // 32, 32]."""
    WARPS: tl.constexpr = s.lanes // 32
    if s.fields == 2:
        low, high = low_half(raw[0]), high_half(raw[0])
        total = low * low + high * high
    else:
        total = _whole(raw[0], s) * _whole(raw[0], s)
        for k in tl.static_range(1, s.fields):
            total += _whole(raw[k], s) * _whole(raw[k], s)
    return tl.reshape(tl.sum(total, 1), [WARPS, 32])


@jit
def group_inverse_rms(raw, s):
    """Return 1 / RMS of each lane's group of x, [1, LANES // 32, 32]. A chunk has whole groups."""
    EACH: tl.constexpr = s.quads // s.groups
    squares = tl.reshape(lane_squares(raw, s), [s.lanes // EACH, EACH])
    mean = tl.sum(squares, 1, keep_dims=True) / (EACH * 4 * s.fields)
    factors = tl.broadcast_to(tl.rsqrt(mean + s.eps), squares.shape)
    return tl.reshape(factors, [1, s.lanes // 32, 32])


@jit
def split_four(words, J: tl.constexpr, WARPS: tl.constexpr):
    """[J * WARPS * 32 * 4], four neighbors per lane -> 4 tensors [J, WARPS, 32]."""
    even, odd = tl.split(tl.reshape(words, [J, WARPS, 32, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit
def _split_x(words, s):
    """[LANES, 4] -> 4 tensors [1, LANES // 32, 32]."""
    COUNT: tl.constexpr = s.lanes * 4
    WARPS: tl.constexpr = s.lanes // 32
    return split_four(tl.reshape(words, [COUNT]), 1, WARPS)


@jit
def _prepare_bf16(raw, norm, s):
    """Unpack words of bf16 -> 4 pairs, of even and of odd numbers: [1, LANES // 32, 32] each."""
    words = _split_x(raw[0], s)
    if norm is None:
        return [(low_half(word), high_half(word)) for word in words]
    elif norm[0].dtype == tl.float32:
        even, odd = _split_x(norm[0], s), _split_x(norm[1], s)
        return [(low_half(words[i]) * even[i], high_half(words[i]) * odd[i]) for i in (0, 1, 2, 3)]
    else:
        scales = _split_x(norm[0], s)
        return [
            (low_half(words[i]) * low_half(scales[i]), high_half(words[i]) * high_half(scales[i]))
            for i in (0, 1, 2, 3)
        ]


@jit
def _normed(raw, norm, k: tl.constexpr, s):
    """Return field k of x, fp32, times the norm's weight if there is one."""
    value = _whole(raw[k], s)
    return value if norm is None else value * _whole(norm[k], s)


@jit
def quantize(values, BITS: tl.constexpr, s):
    """Quantize fp32 x to int16 -> operands (four int16 in an int64), unit and sums of x.

    values: one tensor [LANES, 4] for each field of a word. Operands are a tuple of [LANES, 4]. Unit
    (the value of 1) is [LANES, 1]. Sums are a tuple of [LANES, 1]: of a quad, or for nvfp4 of its
    first operands and of its second ones. If words have scales, it is one [LANES, 4]. s: `Codes`. A
    number of 16 bits has no more than 11 significant bits, so that 2 ** 15 units are never reached
    with 14 BITS. Numbers below 2 ** -107 become 0.
    """
    FIELDS: tl.constexpr = s.fields
    P: tl.constexpr = s.operands
    # Else an operand has the numbers of the same bits of each byte of a word.
    IN_ORDER: tl.constexpr = s.order == "int8" or s.order == "mxfp4" or s.order == "nvfp4"
    largest = tl.abs(values[0])
    for k in tl.static_range(1, FIELDS):
        largest = tl.maximum(largest, tl.abs(values[k]), propagate_nan=tl.PropagateNan.ALL)
    exponent = tl.max(largest.to(tl.int32, bitcast=True), 1, keep_dims=True) >> 23
    kept = tl.maximum(exponent, 20)
    unit = ((kept - BITS) << 23).to(tl.float32, bitcast=True)
    inverse = ((254 + BITS - kept) << 23).to(tl.float32, bitcast=True)
    unit = tl.where(exponent == 255, float("nan"), unit)  # inf or NaN in x: NaN in every row
    total = tl.zeros(largest.shape, tl.int32)
    pairs, operands, sums = (), (), ()
    for n in tl.static_range(FIELDS // 2):
        # Fields of operand n // 2, at its 16 bits 2 (n % 2) and the next.
        if IN_ORDER:
            low, high = values[2 * n], values[2 * n + 1]
        else:
            low = values[2 * P * (n % 2) + n // 2]
            high = values[2 * P * (n % 2) + n // 2 + P]
        # Adding 1.5 * 2 ** 23 rounds to a whole number, and leaves it in the lowest 16 bits.
        low_bits = (low * inverse + 12582912.0).to(tl.int32, bitcast=True)
        high_bits = (high * inverse + 12582912.0).to(tl.int32, bitcast=True)
        pair = join_halves(low_bits, high_bits, s)
        total = add_pair(pair, total)
        pairs = pairs + (pair,)
        if n + 1 == FIELDS // 2 and s.word_scaled:
            sums = (total.to(tl.float32) * unit,)
        elif n + 1 == FIELDS // 2 or (s.order == "nvfp4" and n == 1):
            sums = sums + (tl.sum(total, 1, keep_dims=True).to(tl.float32) * unit,)
            total = tl.zeros(largest.shape, tl.int32)
    for p in tl.static_range(P):
        high = pairs[2 * p + 1].to(tl.int64) << 32
        operands = operands + (high | (pairs[2 * p].to(tl.int64) & 0xFFFFFFFF),)
    return operands, unit, sums


@jit
def _split_units(unit, sums, s):
    """Return unit and sums, of each lane, as [1, LANES // 32, 32]."""
    WARPS: tl.constexpr = s.lanes // 32
    split = [tl.reshape(part, [1, WARPS, 32]) for part in sums]
    return tl.reshape(unit, [1, WARPS, 32]), split


@jit
def _split_operands(operands, unit, sums, s):
    """Order operands [LANES, 4] as `multiply_chunk` takes them: all [1, LANES // 32, 32]."""
    split = [_split_x(operand, s) for operand in operands]
    unit, sums = _split_units(unit, sums, s)
    return split, unit, sums


@jit
def _prepare_integers(raw, norm, s):
    """Quantize x as loaded by `load_x`. A product with the norm's weight gets 13 bits, not 14."""
    values = [_normed(raw, norm, k, s) for k in s.field_numbers]
    operands, unit, sums = quantize(values, 14 if norm is None else 13, s)
    if s.word_scaled:
        sums = _split_x(sums[0], s)
    return _split_operands(operands, unit, sums, s)


@jit
def _load_pairs(x, chunk, s):
    """Load the operands of each word of a chunk of quantized x, as a lane multiplies them."""
    PAIRS: tl.constexpr = s.operands // 2
    at = tl.arange(0, s.lanes * 2)
    quad = chunk * s.lanes + at // 2
    operands = ()
    for p in tl.static_range(PAIRS):
        first, second = (), ()
        for i in tl.static_range(4):
            words = x + (quad * 2 + at % 2) + (p * 4 + i) * s.quads * 2
            words = tl.max_contiguous(tl.multiple_of(words, 16), 2)
            both = tl.load(words, mask=quad < s.quads, other=0)
            one, other = tl.split(tl.reshape(both, [1, s.lanes // 32, 32, 2]))
            first, second = first + (one,), second + (other,)
        operands = operands + (first, second)
    return operands


@jit
def _load_in_order(x, chunk, s):
    """Load the operands of a chunk of quantized x, as `quantize` returns them."""
    at = tl.arange(0, s.lanes * 4)
    quad = chunk * s.lanes + at // 4
    operands = ()
    for n in tl.static_range(s.operands):
        words = x + (quad * (4 * s.operands) + at % 4) + 4 * n
        words = tl.max_contiguous(tl.multiple_of(words, 32), 4)
        operands = operands + (tl.load(words, mask=quad < s.quads, other=0),)
    return operands


@jit
def load_quantized(x, units, chunk, s):
    """Load a chunk of a `QuantizedX` for `prepare_quantized`."""
    operands = _load_pairs(x, chunk, s) if s.in_pairs else _load_in_order(x, chunk, s)
    quad = chunk * s.lanes + tl.arange(0, s.lanes)
    unit = tl.load(units + quad, mask=quad < s.quads, other=0.0)
    sums = ()
    for i in tl.static_range(1, s.units):
        sum_x = unit
        if s.order != "int8":
            sum_x = tl.load(units + i * s.quads + quad, mask=quad < s.quads, other=0.0)
        sums = sums + (sum_x,)
    return operands, unit, sums


@jit
def prepare_quantized(loaded, s):
    """Order what `load_quantized` returns as `multiply_chunk` takes it."""
    operands, unit, sums = loaded
    if s.in_pairs:
        unit, sums = _split_units(unit, sums, s)
        return operands, unit, sums
    else:
        return _split_operands(operands, unit, sums, s)


@jit
def prepare_x(raw, norm, s):
    """Make the operands of `multiply_chunk`, of x as of `load_x`. norm: as of `load_norm`."""
    if s.kind == "bf16":
        return _prepare_bf16(raw, norm, s)
    elif s.kind == "fp8" or s.kind == "fp8b":
        return [_split_x(_normed(raw, norm, k, s), s) for k in s.field_numbers]
    else:
        return _prepare_integers(raw, norm, s)


@jit
def weighted_operands(operands, factor, s):
    """Multiply the operands of a chunk by the routing weight of their expert."""
    if s.kind == "bf16":
        return [(pair[0] * factor, pair[1] * factor) for pair in operands]
    elif s.kind == "fp8" or s.kind == "fp8b":
        return [[word * factor for word in words] for words in operands]
    else:
        sums = [part * factor for part in operands[2]]
        return operands[0], operands[1] * factor, sums
