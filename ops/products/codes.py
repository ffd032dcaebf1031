"""The number formats of weights: how one token's kernels load, decode and multiply them.

Each kind of code is decoded here alone, for kernels whose lanes multiply by themselves. Tensor
cores need other operands: ops/products/units.py makes them.

    kind     codes                       multiplied as         scales
    bf16     numbers                     fp32
    int8     signed bytes                int32 (dp2a)          one a row
    fp8      e4m3                        fp32                  one a row
    fp8b     e4m3                        fp32                  one a block of GROUP x GROUP
    int4     4 bits, less 8              int32 (dp2a)          one a group
    mxfp4    e2m1                        int32 (dp2a)          one a group, a power of two
    nvfp4    e2m1                        int32 (dp2a)          one a half group, e4m3; one a row
    hqq      4 bits, less a zero         int32 (dp2a)          one a group, and one zero; both as
                                                               they are, or times a row's step
    hqq2     2 bits, less a zero         int32 (dp2a)          the same; or for each word
    hqq3     2 + 1 bits, less a zero     int32 (dp2a)          as hqq
    q8_0     signed bytes                int32 (dp2a)          one for each 32
    q4_k     4 bits                      int32 (dp2a)          scale and min for each 32
    q5_k     4 + 1 bits                  int32 (dp2a)          the same
    q6_k     4 + 2 bits, less 32         int32 (dp2a)          one for each 16
    iq4      4 bits, of a table          int32 (dp2a)          one for each 32

The scales of the last four are multiplied by a `step` of 256 numbers (formats/k_quants.py), but
not those of iq4_nl, q4_1 and q5_1; the last two are of the kinds q4_k and q5_k.

Below 8 bits a GPU runs out of instructions before it runs out of bandwidth, and integers take few.
x becomes int16 (ops/products/operands.py), and masks unpack a word's codes to bytes. dp2a
multiplies 2 bytes by 2 int16 and adds, exactly: no code is converted to floating point.

A chunk is LANES neighboring quads of ROWS rows. s: settings (`ops.products.pipeline.Product`).
"""

from ops.halves import high_half, low_half
from ops.launch import jit, tl
from ops.products.operands import split_four
from ops.products.units import half, scale_and_min, signed_byte
from ops.products.words import (
    dot_bytes,
    dot_five_bits,
    dot_looked_up,
    dot_nibbles,
    dot_six_bits,
    dot_three_bits,
    dot_two_bits,
    e2m1_table,
    iq4_table,
)


@jit
def load_scales(weights, expert, row, own, quad, s):
    """Load the scales and zeros of quads [ROWS * LANES, 1], as `multiply_chunk` takes them.

    row: the tile's first one. own: that of each quad, counted from there.

    Those of a quad's words are an int32, one register until they are used. The scale of a row
    (int8, fp8, nvfp4) is loaded here only if lanes have different experts. Otherwise it multiplies
    the sum: `row_scale`.
    """
    WARPS: tl.constexpr = s.lanes // 32
    first = expert * s.out + row
    rows = first + own
    if s.kind == "int4" or s.e2m1 or s.half_quadratic:
        EACH: tl.constexpr = s.each if s.word_scaled else s.each * 4 // s.run
        groups = first * EACH + (own * EACH + (quad if s.word_scaled else quad * 4 // s.run))
        found = (tl.load(weights.scale + groups),)
        if s.half_quadratic and weights.scale_step is None:
            found = found + (tl.load(weights.zero + groups),)
        elif s.half_quadratic:
            step = tl.reshape(tl.load(weights.scale_step + rows), [s.rows, WARPS, 32])
            low = tl.reshape(tl.load(weights.scale_low + rows), [s.rows, WARPS, 32])
            found = found + (step, low, tl.load(weights.zero + groups))
            step = tl.reshape(tl.load(weights.zero_step + rows), [s.rows, WARPS, 32])
            low = tl.reshape(tl.load(weights.zero_low + rows), [s.rows, WARPS, 32])
            found = found + (step, low)
        elif s.kind == "nvfp4" and s.gather:
            found = found + (tl.load(weights.scale_step + rows),)
        return found
    elif s.gguf:
        return _load_gguf_scales(weights, rows, quad, s)
    elif s.kind == "fp8b":
        BLOCKS: tl.constexpr = (s.out + s.group - 1) // s.group  # blocks of rows of an expert
        block = expert * BLOCKS + (row + own) // s.group
        at = block * (s.each * 16 // s.group) + quad * 16 // s.group
        return (tl.load(weights.scale + at),)
    elif s.kind != "bf16" and s.gather:
        return (tl.load(weights.scale + rows),)
    else:
        return ()


@jit
def _load_gguf_scales(weights, rows, quad, s):
    """`load_scales` of GGUF's kinds: scales, then steps and the bits above the codes, if any."""
    found = (tl.load(weights.scale + rows * (s.each * 4 // s.run) + quad * 4 // s.run),)
    if weights.step is not None:
        found = found + (tl.load(weights.step + rows * (s.each // 8) + quad // 8),)
    if weights.high is not None:
        found = found + (tl.load(weights.high + rows * s.each + quad),)
    return found


@jit
def row_scale(weights, rows, s):
    """Load the scale of rows of a kind with one scale a row: int8, fp8 or nvfp4."""
    if s.kind == "nvfp4":
        return tl.load(weights.scale_step + rows)
    else:
        factor = tl.load(weights.scale + rows).to(tl.float32)
        if s.kind == "fp8":
            factor *= 256.0  # `_e4m3_word`
        return factor


@jit
def code_table(zero, s):
    """Return the table by which `multiply_chunk` looks up the numbers of codes, or ()."""
    if s.e2m1:
        return e2m1_table(zero)
    elif s.kind == "iq4":
        return iq4_table(zero)
    else:
        return ()


@jit
def _e4m3_word(word):
    """Convert a word of four e4m3 numbers -> four fp32 tensors, 2 ** -8 times the numbers.

    As formats.fp8.e4m3_products: e4m3 bits, shifted into place, are those of an fp16 number.
    """
    outer, inner = word << 8, word  # bytes 0 and 2, bytes 1 and 3
    outer = (outer & -2147450880) | (outer >> 1 & 0x3F803F80)  # 0x80008000
    inner = (inner & -2147450880) | (inner >> 1 & 0x3F803F80)
    return half(outer), half(inner), half(outer >> 16), half(inner >> 16)


@jit
def _multiply_four_bits(words, scales, operands, table, s):
    """`multiply_chunk` for 4 bits -> fp32 [ROWS, LANES // 32, 32]. words: 4 tensors of that shape.

    Codes are unsigned: their offset is subtracted, times the sum of x.
    """
    xs, unit, sums = operands
    x_even, x_odd = xs
    even = tl.zeros(words[0].shape, tl.int32)
    odd = even
    for i in tl.static_range(4):
        if s.e2m1:
            even, odd = dot_looked_up(words[i], x_even[i], x_odd[i], even, odd, table, False)
        else:
            even, odd = dot_nibbles(words[i], x_even[i], x_odd[i], even, odd)
    factor = tl.reshape(scales[0], words[0].shape)
    sum_x = sums[0]
    if s.kind == "nvfp4":  # even, odd: sums of the halves of a group, which have a scale each
        pairs = factor.to(tl.int32)
        # Bits of fp16 numbers, 2 ** -8 as large.
        low_scale, high_scale = half(pairs << 7 & 0x3F80), half(pairs >> 1 & 0x3F80)
        unit *= 0.5
        total = (even.to(tl.float32) * unit - 6.0 * sums[0]) * low_scale
        total = (total + (odd.to(tl.float32) * unit - 6.0 * sums[1]) * high_scale) * 256.0
        if s.gather:
            total *= tl.reshape(scales[1], words[0].shape)
    elif s.kind == "mxfp4":
        total = (even + odd).to(tl.float32) * (unit * 0.5)
        # e8m0; the smallest scale, 2 ** -127, becomes 0.
        factor = (factor.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        total = (even * 16 + odd).to(tl.float32) * (unit * 0.0625)
        factor = factor.to(tl.float32)
    if s.kind == "nvfp4":
        return total
    elif s.kind == "int4":
        return (total - 8.0 * sum_x) * factor
    elif s.kind == "mxfp4":
        return (total - 6.0 * sum_x) * factor
    elif len(scales) == 2:
        offset = tl.reshape(scales[1], words[0].shape).to(tl.float32)
        return (total - offset * sum_x) * factor
    else:
        offset = tl.reshape(scales[3], words[0].shape).to(tl.float32) * scales[4] + scales[5]
        return (total - offset * sum_x) * (factor * scales[1] + scales[2])


@jit
def _multiply_two_bits(words, scales, operands, s):
    """`multiply_chunk` for hqq2 and hqq3 -> fp32 [ROWS, LANES // 32, 32]."""
    xs, unit, sums = operands
    scale, zero = tl.reshape(scales[0], words[0].shape), tl.reshape(scales[3], words[0].shape)
    if s.kind == "hqq3":
        pairs = tl.split(tl.reshape(scales[6], [s.rows, s.lanes // 32, 32, 2]))
    low = tl.zeros(words[0].shape, tl.int32)
    high = low
    unit *= 0.0625
    total = tl.zeros(words[0].shape, tl.float32)
    for i in tl.static_range(4):
        x = (xs[0][i], xs[1][i], xs[2][i], xs[3][i])
        if s.kind == "hqq3":
            low, high = dot_three_bits(words[i], pairs[i // 2], x, low, high, i % 2)
        else:
            low, high = dot_two_bits(words[i], x, low, high)
        if s.word_scaled:
            offset = (zero >> 8 * i & 0xFF).to(tl.float32) * scales[4] + scales[5]
            factor = (scale >> 8 * i & 0xFF).to(tl.float32) * scales[1] + scales[2]
            total += ((low * 16 + high).to(tl.float32) * unit - offset * sums[i]) * factor
            low, high = tl.zeros(words[0].shape, tl.int32), tl.zeros(words[0].shape, tl.int32)
    if not s.word_scaled:
        factor = scale.to(tl.float32) * scales[1] + scales[2]
        offset = zero.to(tl.float32) * scales[4] + scales[5]
        total = ((low * 16 + high).to(tl.float32) * unit - offset * sums[0]) * factor
    return total


@jit
def _multiply_gguf(words, scales, operands, table, s):
    """`multiply_chunk` for GGUF's kinds -> fp32 [ROWS, LANES // 32, 32]."""
    xs, unit, sums = operands
    first, second = xs[0], xs[len(xs) - 1]
    scale = tl.reshape(scales[0], words[0].shape)
    low = tl.zeros(words[0].shape, tl.int32)
    high = low
    if s.kind == "q5_k" or s.kind == "q6_k":
        above = tl.reshape(scales[len(scales) - 1], words[0].shape)
    for i in tl.static_range(4):
        if s.kind == "q8_0":
            low = dot_bytes(words[i], first[i], low, True)
        elif s.kind == "q4_k":
            low, high = dot_nibbles(words[i], first[i], second[i], low, high)
        elif s.kind == "q5_k":
            low = dot_five_bits(words[i], above, first[i], second[i], low, i)
        elif s.kind == "q6_k":
            pair = (above >> (i // 2 * 32)).to(tl.int32)
            low, high = dot_six_bits(words[i], pair, first[i], second[i], low, high, i % 2)
        else:
            low, high = dot_looked_up(words[i], first[i], second[i], low, high, table, True)
    if s.kind == "q8_0":
        total = low.to(tl.float32) * unit * scale.to(tl.float32)
    elif s.kind == "iq4":
        total = (low + high).to(tl.float32) * unit * scale.to(tl.float32)
        if len(scales) > 1:
            total *= tl.reshape(scales[1], words[0].shape).to(tl.float32)
    else:
        step = tl.reshape(scales[1 if len(scales) > 1 else 0], words[0].shape)
        if s.kind == "q6_k":
            total = low.to(tl.float32) * signed_byte(scale, 0)
            total += high.to(tl.float32) * signed_byte(scale, 1)
            total *= unit * 0.25 * step.to(tl.float32)
        else:
            factor, least = scale_and_min(scale, step)
            total = (low * 16 + high).to(tl.float32) * (unit * 0.0625)
            if s.kind == "q5_k":
                total = low.to(tl.float32) * unit
            total = total * factor - sums[0] * least
    return total


@jit
def multiply_chunk(codes, scales, operands, table, s):
    """Multiply a chunk of weights by its x -> each lane's sums, fp32 [ROWS, LANES].

    codes [ROWS * LANES * 4]; scales: as of `load_scales`; operands: as of `prepare_x`; table: of
    `code_table`.
    """
    WARPS: tl.constexpr = s.lanes // 32
    words = split_four(codes, s.rows, WARPS)
    if s.kind == "bf16":
        total = low_half(words[0]) * operands[0][0]
        total += high_half(words[0]) * operands[0][1]
        for i in tl.static_range(1, 4):
            total += low_half(words[i]) * operands[i][0]
            total += high_half(words[i]) * operands[i][1]
    elif s.kind == "int8":
        sums = tl.zeros([s.rows, WARPS, 32], tl.int32)
        for i in tl.static_range(4):
            sums = dot_bytes(words[i], operands[0][0][i], sums, True)
        total = sums.to(tl.float32) * operands[1]
        if s.gather:
            total *= tl.reshape(scales[0], [s.rows, WARPS, 32]).to(tl.float32)
    elif s.kind == "fp8" or s.kind == "fp8b":
        total = tl.zeros([s.rows, WARPS, 32], tl.float32)
        for i in tl.static_range(4):
            values = _e4m3_word(words[i])
            for k in tl.static_range(4):
                total += values[k] * operands[k][i]
        if s.kind == "fp8b" or s.gather:
            total *= tl.reshape(scales[0], [s.rows, WARPS, 32]).to(tl.float32) * 256.0
    elif s.gguf:
        total = _multiply_gguf(words, scales, operands, table, s)
    elif s.two_bits:
        total = _multiply_two_bits(words, scales, operands, s)
    else:
        total = _multiply_four_bits(words, scales, operands, table, s)
    return tl.reshape(total, [s.rows, s.lanes])


@jit
def activate(gate, up, a: tl.constexpr):
    """Apply `model.swiglu` ("silu"), `gpt_oss.clamped_swiglu` ("clamped"), or `geglu.geglu`.

    a: an `Activation`. One without a gate ("relu_squared") does not use up.
    """
    if a.kind == "relu_squared":
        up = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return up * up
    elif a.kind == "clamped":
        gate = tl.minimum(gate, a.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -a.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, a.limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        return gate / (1.0 + tl.exp(-a.alpha * gate)) * up
    elif a.kind == "gelu_tanh":  # (1 + tanh(z)) / 2 is the sigmoid of 2 z
        doubled = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
        return gate / (1.0 + tl.exp(-doubled)) * up
    else:
        tl.static_assert(a.kind == "silu", "an unknown activation")
        return gate / (1.0 + tl.exp(-gate)) * up
