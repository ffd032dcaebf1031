"""Products of words: integers of x times codes of 8, 4 and 2 bits, for one token's kernels.

A word is int32: four bytes, eight codes of 4 bits, or sixteen of 2 bits. x: four int16 in an
int64. No code becomes a floating-point number. NVIDIA's GPUs multiply two bytes by two int16 in one
instruction (dp2a), and look up four bytes in one (prmt). Other GPUs, and Triton's interpreter, take
the other branches.
"""

from ops.launch import jit, tl


@jit
def add_pair(pair, total):
    """Add both int16 of a word to `total`."""
    if tl.target_info.is_cuda():
        PTX: tl.constexpr = "dp2a.lo.s32.s32 $0, $1, 257, $2;"
        return tl.inline_asm_elementwise(
            PTX, "=r,r,r", (pair, total), tl.int32, is_pure=True, pack=1
        )
    else:
        return total + (pair << 16 >> 16) + (pair >> 16)


@jit
def join_halves(low, high, s):
    """Return words of the lower halves of two others: in one instruction, where that pays."""
    if tl.target_info.is_cuda() and (s.kind == "int4" or s.kind == "int8"):
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", (low, high), tl.int32, is_pure=True, pack=1
        )
    else:
        return (low & 0xFFFF) | (high << 16)


@jit
def _number(x, K: tl.constexpr):
    """Return number K of four int16 in an int64, as int32."""
    return (x >> 16 * K).to(tl.int16).to(tl.int32)


@jit
def dot_bytes(word, x, total, SIGNED: tl.constexpr):
    """Add the dot product of a word's four bytes and x to `total`."""
    if tl.target_info.is_cuda():
        PTX: tl.constexpr = f"""{{
            .reg .b32 x<2>, sum;
            mov.b64 {{x0, x1}}, $2;
            dp2a.lo.s32.{"s32" if SIGNED else "u32"} sum, x0, $1, $3;
            dp2a.hi.s32.{"s32" if SIGNED else "u32"} $0, x1, $1, sum;
            }}"""
        return tl.inline_asm_elementwise(
            PTX, "=r,r,l,r", (word, x, total), tl.int32, is_pure=True, pack=1
        )
    else:
        for k in tl.static_range(4):
            byte = (word << 24 - 8 * k >> 24) if SIGNED else (word >> 8 * k & 0xFF)
            total += _number(x, k) * byte
        return total


@jit
def dot_nibbles(word, x_even, x_odd, even, odd):
    """Add one word's dot products to `even` and `odd`: 4 bits, 0 to 15.

    even: the sum of x times code over the even fields of words. odd: 16 times that sum over the
    odd fields.
    """
    even = dot_bytes(word & 0x0F0F0F0F, x_even, even, False)
    return even, dot_bytes(word & -0x0F0F0F10, x_odd, odd, False)  # 0xF0F0F0F0


@jit
def _shift(x, LEFT: tl.constexpr):
    return x << LEFT if LEFT >= 0 else x >> -LEFT


@jit
def dot_five_bits(word, high, x_even, x_odd, total, M: tl.constexpr):
    """Add the dot product of the M-th word of a quad to `total`: q5_k codes, 0 to 31.

    high: the fifth bits of the quad, of which those of this word are from bit 2 M of each byte on.
    """
    even = word & 0x0F0F0F0F | _shift(high, 4 - 2 * M) & 0x10101010
    odd = word >> 4 & 0x0F0F0F0F | _shift(high, 3 - 2 * M) & 0x10101010
    return dot_bytes(odd, x_odd, dot_bytes(even, x_even, total, False), False)


@jit
def dot_two_bits(word, x, low, high):
    """Add one word's dot products to `low` and `high`: 2 bits, 0 to 3.

    x: four operands. low: over fields 0 and 1 of each byte, high: 16 times that over 2 and 3.
    """
    odd = word >> 2
    low = dot_bytes(word & 0x03030303, x[0], low, False)
    high = dot_bytes(word & 0x30303030, x[2], high, False)
    low = dot_bytes(odd & 0x03030303, x[1], low, False)
    return low, dot_bytes(odd & 0x30303030, x[3], high, False)


@jit
def dot_three_bits(word, third, x, low, high, M: tl.constexpr):
    """Do what `dot_two_bits` does, with a third bit above each field: hqq3 codes, 0 to 7.

    third: the third bits of the words M = 0 and M = 1; that of field K of a byte is bit 4 M + K.
    """
    odd = word >> 2
    first = word & 0x03030303 | _shift(third, 2 - 4 * M) & 0x04040404
    second = odd & 0x03030303 | _shift(third, 1 - 4 * M) & 0x04040404
    low = dot_bytes(second, x[1], dot_bytes(first, x[0], low, False), False)
    first = word & 0x30303030 | _shift(third, 4 - 4 * M) & 0x40404040
    second = odd & 0x30303030 | _shift(third, 3 - 4 * M) & 0x40404040
    return low, dot_bytes(second, x[3], dot_bytes(first, x[2], high, False), False)


@jit
def dot_six_bits(word, high, x_low, x_high, low, high_sum, M: tl.constexpr):
    """Add one word's dot products to `low` and `high_sum`: q6_k codes, 0 to 63, less 32, times 4.

    low: over the codes in the lower nibbles, high_sum: over those in the upper ones. high: the two
    bits above them, of this word (M = 0 or 1) from bit 4 M of each byte on. The upper six bits of a
    byte are the code. Its first bit inverted, it is a signed byte.
    """
    # 0x80808080, the first bits inverted; 0xC0C0C0C0, the bits above.
    first = word << 2 & 0x3C3C3C3C | -0x7F7F7F80
    second = word >> 2 & 0x3C3C3C3C | -0x7F7F7F80
    first ^= high << 6 - 4 * M & -0x3F3F3F40
    second ^= high << 4 - 4 * M & -0x3F3F3F40
    return dot_bytes(first, x_low, low, True), dot_bytes(second, x_high, high_sum, True)


@jit
def e2m1_table(zero):
    """Return 12 + twice each e2m1 number as bytes: codes 0 to 3, 4 to 7, 8 to 11, 12 to 15."""
    # Added to a zero that the compiler does not know, in every lane: otherwise it recomputes the
    # constants for each look-up.
    lanes = tl.arange(0, 32)[None, None, :] * zero
    return lanes + 0x0F0E0D0C, lanes + 0x18141210, lanes + 0x090A0B0C, lanes + 0x00040608


@jit
def iq4_table(zero):
    """Return iq4's numbers as bytes, 1 more from code 8 on: codes 0 to 3, 4 to 7, and so on."""
    lanes = tl.arange(0, 32)[None, None, :] * zero
    return lanes - 0x4052677F, lanes - 0x09152231, lanes + 0x271A0E02, lanes + 0x725A4636


@jit
def _select(first, second, codes):
    """Return the bytes of two words that the lower four codes name; 0 or -1 for codes from 8 on."""
    PTX: tl.constexpr = "prmt.b32 $0, $1, $2, $3;"
    return tl.inline_asm_elementwise(
        PTX, "=r,r,r,r", (first, second, codes), tl.int32, is_pure=True, pack=1
    )


@jit
def _dot_e2m1(word, x_low, x_high, low, high, table):
    """Do what `dot_looked_up` does for e2m1, in one block: apart, gpt-oss took 3 % longer."""
    PTX: tl.constexpr = """{
        .reg .b32 x<4>, upper, other, above<2>, below<2>, sum<2>;
        mov.b64 {x0, x1}, $3;
        mov.b64 {x2, x3}, $4;
        xor.b32 other, $2, 0x88888888;
        prmt.b32 above0, $7, $8, $2;
        prmt.b32 below0, $9, $10, other;
        shr.u32 upper, $2, 16;
        shr.u32 other, other, 16;
        prmt.b32 above1, $7, $8, upper;
        prmt.b32 below1, $9, $10, other;
        add.u32 above0, above0, below0;
        add.u32 above1, above1, below1;
        dp2a.lo.s32.u32 sum0, x0, above0, $5;
        dp2a.lo.s32.u32 sum1, x2, above1, $6;
        dp2a.hi.s32.u32 $0, x1, above0, sum0;
        dp2a.hi.s32.u32 $1, x3, above1, sum1;
        }"""
    REGISTERS: tl.constexpr = "=r,=r,r,l,l,r,r,r,r,r,r"
    given = word, x_low, x_high, low, high, table[0], table[1], table[2], table[3]
    return tl.inline_asm_elementwise(
        PTX, REGISTERS, given, (tl.int32, tl.int32), is_pure=True, pack=1
    )


@jit
def _look_up(code, table):
    """Return a code's byte of a table of 16, signed. code: int32, 0 to 15."""
    first = tl.where(code & 4 != 0, table[1], table[0])
    second = tl.where(code & 4 != 0, table[3], table[2])
    word = tl.where(code & 8 != 0, second, first)
    return word << 24 - (code & 3) * 8 >> 24


@jit
def dot_looked_up(word, x_low, x_high, low, high, table, SIGNED: tl.constexpr):
    """Add one word's dot products to `low` and `high`: codes of `e2m1_table`, or of `iq4_table`.

    low: over the lower four codes of words, high: over the upper four. SIGNED: iq4's.

    The table has 16 bytes and a look-up (prmt) takes 8, so there is one look-up for each half. For
    a code of the other half, prmt copies the sign of a byte. It is 0 in all bytes of e2m1, whose
    two look-ups are added: additions run on another unit of the GPU than look-ups and shifts. For
    iq4 it is -1 for the first half, which the 1 more makes up for, and 0 for the second.
    """
    if tl.target_info.is_cuda() and not SIGNED:
        return _dot_e2m1(word, x_low, x_high, low, high, table)
    elif tl.target_info.is_cuda():
        other = word ^ -0x77777778  # 0x88888888
        first, second = _select(table[0], table[1], word), _select(table[2], table[3], other)
        low = dot_bytes(second, x_low, dot_bytes(first, x_low, low, True), True)
        first = _select(table[0], table[1], word >> 16)
        second = _select(table[2], table[3], other >> 16)
        return low, dot_bytes(second, x_high, dot_bytes(first, x_high, high, True), True)
    else:
        for k in tl.static_range(4):
            one, other = word >> 4 * k & 15, word >> 16 + 4 * k & 15
            low += _number(x_low, k) * (_look_up(one, table) - SIGNED * (one >> 3))
            high += _number(x_high, k) * (_look_up(other, table) - SIGNED * (other >> 3))
        return low, high
