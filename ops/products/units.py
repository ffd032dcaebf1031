"""Decode units for tensor cores: one decoder a format.

A unit is 16 bits: one bf16 number, or the codes of 16 / bits numbers, its fields. Field K is in the
bits from K * bits on. Inline assembly decodes two units, a 32-bit word, at once. Tensor cores take
16 bits, which hold every code exactly; formats/ defines the codes. Fields that become bf16 have
assembly of NVIDIA's GPUs; `decode` has the forms of other numbers and of other GPUs.
"""

from ops.launch import jit, tl


@jit
def half(bits):
    """Convert the fp16 number in the lower half of a word to fp32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def signed_byte(pair, K: tl.constexpr):
    """Convert signed byte K, 0 or 1, of int16 to fp32."""
    return ((pair << 8 >> 8) if K == 0 else (pair >> 8)).to(tl.float32)


@jit
def scale_and_min(pair, step):
    """Return scale and min of q4_k or q5_k, fp32.

    pair: int16, two bytes that the fp16 numbers of `step`, int32, multiply. Or int32, both in fp16.
    """
    if pair.dtype == tl.int32:
        return half(pair), half(pair >> 16)
    else:
        scale, least = (pair & 0xFF).to(tl.float32), (pair >> 8).to(tl.float32)  # below 64
        return scale * half(step), least * half(step >> 16)


@jit
def shift_right(units, COUNT: tl.constexpr):
    """Shift int16 units right by COUNT, two at a time; the upper bits become garbage."""
    if tl.target_info.is_cuda():
        return tl.inline_asm_elementwise(
            f"shr.u32 $0, $1, {COUNT};", "=r,r", (units,), tl.int16, is_pure=True, pack=2
        )
    else:
        return units >> COUNT


@jit
def shift_each(units, counts):
    """Shift pairs of int16 units right by counts; the upper bits become garbage."""
    if tl.target_info.is_cuda():
        PTX: tl.constexpr = "{ .reg .b32 count; and.b32 count, $2, 15; shr.u32 $0, $1, count; }"
        return tl.inline_asm_elementwise(
            PTX, "=r,r,r", (units, counts), tl.int16, is_pure=True, pack=2
        )
    else:
        return units >> counts


@jit
def signed_bytes(units):
    """Convert the lower bytes of int16 units, signed numbers, to bf16, two at a time."""
    # 128 + the lower 7 bits, minus 128, or minus 256 for a negative number: all exact.
    if tl.target_info.is_cuda():
        PTX: tl.constexpr = """{
            .reg .b32 low, sign, minus;
            mov.b32 minus, 0xBF80BF80;
            lop3.b32 low, $1, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 sign, $1, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, sign, minus, low;
            }"""
        return tl.inline_asm_elementwise(PTX, "=r,r", (units,), tl.bfloat16, is_pure=True, pack=2)
    else:
        return signed_byte(units, 0).to(tl.bfloat16)


@jit
def e4m3(units):
    """Convert the lower bytes of int16 units, e4m3 numbers, to bf16 / 256, two at a time."""
    # Shifted into the fields of a bf16 number, they are 2 ** -120 as large: multiply by 2 ** 112.
    PTX: tl.constexpr = f"""{{
        .reg .b32 sign, bits, factor, none;
        mov.b32 factor, {0x77807780};
        mov.b32 none, 0x80008000;
        shl.b32 sign, $1, 8;
        shl.b32 bits, $1, 4;
        and.b32 bits, bits, {0x07F007F0};
        lop3.b32 bits, sign, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $0, bits, factor, none;
        }}"""
    return tl.inline_asm_elementwise(PTX, "=r,r", (units,), tl.bfloat16, is_pure=True, pack=2)


@jit
def e2m1(units, factor, K: tl.constexpr):
    """Return field K of units, an e2m1 number, as bf16 times 2 ** -126 * factor, two at a time.

    One multiplication moves the sign to bit 15, and the other bits to 8 to 6. Their copies at other
    places are masked.
    """
    PTX: tl.constexpr = f"""{{
        .reg .b32 bits, none;
        mov.b32 none, 0x80008000;
        shr.u32 bits, $1, {8 if K > 1 else 0};
        and.b32 bits, bits, {0x00F000F0 if K % 2 else 0x000F000F};
        mul.lo.u32 bits, bits, {256 + 4 if K % 2 else 4096 + 64};
        and.b32 bits, bits, 0x81C081C0;
        fma.rn.bf16x2 $0, bits, $2, none;
        }}"""
    # A factor of int32 is that of two units: the second unit's is the same.
    CONSTRAINTS: tl.constexpr = "=r,r,r,r" if factor.dtype == tl.int32 else "=r,r,r"
    return tl.inline_asm_elementwise(
        PTX, CONSTRAINTS, (units, factor), tl.bfloat16, is_pure=True, pack=2
    )


@jit
def e2m1_factor(scale, DTYPE: tl.constexpr):
    """Convert e8m0 scales to factors of `decode`.

    For bf16 2 ** -126 has to be made up for: the factor of `e2m1` has 2 ** 126, which numbers of 16
    bits would not hold for scales above 2, and 2 ** -32, which the result makes up for (`finish`).
    Scales of 2 ** -92 to 2 ** 33 are exact.
    """
    if tl.bfloat16 == DTYPE and tl.target_info.is_cuda():
        return (scale + 94 << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return (scale << 23).to(tl.float32, bitcast=True)


@jit
def e4m3_factor(scale, DTYPE: tl.constexpr):
    """Convert e4m3 scales, int32 of 7 bits, to factors of `decode`, as `e2m1_factor` does."""
    value = (scale << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    # 2 ** 8 of the fp16 number. A code times a scale has 6 digits, so that bf16 is exact.
    if tl.bfloat16 == DTYPE and tl.target_info.is_cuda():
        return (value * 5.070602400912918e30).to(tl.bfloat16)  # 2 ** 102
    else:
        return value * 256.0


@jit
def pair_factors(pairs, DTYPE: tl.constexpr):
    """Convert pairs of nvfp4's scales to factors of `decode`: of even units, and of odd ones."""
    pairs = pairs.to(tl.int32)
    return e4m3_factor(pairs & 0x7F, DTYPE), e4m3_factor(pairs >> 8 & 0x7F, DTYPE)


@jit
def e4m3_pairs(pairs):
    """Convert int32 of two e4m3 scales, bytes 0 and 1, to int32 of two factors of `e2m1`.

    Shifted into the fields of bf16 numbers, scales are 2 ** -120 as large; factors have 2 ** 94. So
    they are multiplied by 2 ** 118, then by 2 ** 96.
    """
    PTX: tl.constexpr = f"""{{
        .reg .b32 bits, factor, none;
        mov.b32 none, 0x80008000;
        mov.b32 factor, 0x7A807A80;
        prmt.b32 bits, $1, 0, 0x4140;
        and.b32 bits, bits, {0x007F007F};
        shl.b32 bits, bits, 4;
        fma.rn.bf16x2 bits, bits, factor, none;
        mov.b32 factor, 0x6F806F80;
        fma.rn.bf16x2 $0, bits, factor, none;
        }}"""
    return tl.inline_asm_elementwise(PTX, "=r,r", (pairs,), tl.int32, is_pure=True, pack=1)


@jit
def int4(units, K: tl.constexpr):
    """Return field K of units, a code of 0 to 15, minus 8 as bf16, two at a time."""
    PTX: tl.constexpr = f"""{{
        .reg .b32 bits, one, minus;
        mov.b32 one, 0x3F803F80;
        mov.b32 minus, 0xC308C308;
        shr.u32 bits, $1, {4 * K};
        lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, bits, one, minus;
        }}"""
    return tl.inline_asm_elementwise(PTX, "=r,r", (units,), tl.bfloat16, is_pure=True, pack=2)


@jit
def int4_factor(scale):
    """Convert a scale in bf16 to the factor of `scaled_int4`: 2 ** 101 times it.

    Scales below 2 ** 27 are exact.
    """
    return (scale.to(tl.float32) * 2.535301200456459e30).to(tl.bfloat16)


@jit
def scaled_int4(units, factor, K: tl.constexpr):
    """Return field K of units, a code, minus 8, times 2 ** -133 * factor, as bf16, two at a time.

    Below 256 the bits of a bf16 number are its multiple of 2 ** -133. So a code is a number where
    it is, and one fma subtracts 8 and scales it: rounded once, as the product is.
    """
    PTX: tl.constexpr = f"""{{
        .reg .b32 bits, own, eight, none, number;
        mov.b32 none, 0x80008000;
        mov.b32 number, 0x80088008;
        fma.rn.bf16x2 eight, $2, number, none;
        mov.b32 number, 0x3D803D80;
        {"fma.rn.bf16x2 own, $2, number, none" if K % 2 else "mov.b32 own, $2"};
        shr.u32 bits, $1, {8 if K > 1 else 0};
        and.b32 bits, bits, {0x00F000F0 if K % 2 else 0x000F000F};
        fma.rn.bf16x2 $0, bits, own, eight;
        }}"""
    return tl.inline_asm_elementwise(
        PTX, "=r,r,r", (units, factor), tl.bfloat16, is_pure=True, pack=2
    )


@jit
def finish_int4(total, weights, DTYPE: tl.constexpr):
    """Multiply sums by what numbers of `scaled_int4` lack, 2 ** 32; others are whole."""
    whole: tl.constexpr = weights.scale.dtype.element_ty != tl.bfloat16 or tl.bfloat16 != DTYPE
    if not whole and tl.target_info.is_cuda():
        total *= 4294967296.0
    return total


@jit
def with_bits_above(
    units, high, K: tl.constexpr, BITS: tl.constexpr, PLUS_128: tl.constexpr = False
):
    """Return field K of units with BITS bits above it, less half of their range, as bf16.

    Two at a time. high (`high_bits`): those of field K are from bit 8 (K / 2) + BITS (K % 2) on.
    PLUS_128: the code plus 128 instead.
    """
    PTX: tl.constexpr = f"""{{
        .reg .b32 bits, up, one, minus;
        mov.b32 one, 0x3F803F80;
        mov.b32 minus, {0xC310C310 if BITS == 1 else 0xC320C320};
        shr.u32 bits, $1, {4 * K};
        {"shl" if K < 2 else "shr"}.b32 up, $2, {4 - K * BITS if K < 2 else 4 + (K - 2) * BITS};
        lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 bits, up, {0x00100010 if BITS == 1 else 0x00300030}, bits, 0xEA;
        {"mov.b32 $0, bits" if PLUS_128 else "fma.rn.bf16x2 $0, bits, one, minus"};
        }}"""
    return tl.inline_asm_elementwise(
        PTX, "=r,r,r", (units, high), tl.bfloat16, is_pure=True, pack=2
    )


@jit
def iq4(units, K: tl.constexpr):
    """Return field K of units, an iq4 code, as bf16, two at a time.

    Look-ups give 128 more than a negative number, or a positive one: below 128. Then 256 or 128 is
    subtracted from 128 more.
    """
    PTX: tl.constexpr = f"""{{
        .reg .b32 codes, other, below, above, number, minus, one, table<4>;
        mov.b32 one, 0xBF80BF80;
        mov.b32 table0, 0x3F2D1801;
        mov.b32 table1, 0x766A5D4F;
        mov.b32 table2, 0x26190D01;
        mov.b32 table3, 0x71594535;
        shr.u32 codes, $1, {4 * K};
        and.b32 codes, codes, 0x000F000F;
        shr.u32 other, codes, 8;
        or.b32 codes, codes, other;
        xor.b32 other, codes, 0x88888888;
        prmt.b32 below, table0, table1, codes;
        prmt.b32 above, table2, table3, other;
        or.b32 number, below, above;
        shl.b32 minus, other, 4;
        prmt.b32 minus, minus, minus, 0x4140;
        lop3.b32 number, number, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 minus, minus, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, minus, one, number;
        }}"""
    return tl.inline_asm_elementwise(PTX, "=r,r", (units,), tl.bfloat16, is_pure=True, pack=2)


@jit
def small_number(code, LESS: tl.constexpr, DTYPE: tl.constexpr):
    """Convert codes of 0 to 255, int16, less LESS, to DTYPE: exact up to 256."""
    # 2 ** 23 + the code, by its bits: fewer instructions of the unit that converts integers.
    number = (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LESS)
    return number.to(DTYPE)


@jit
def _with_offset(code, LESS: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Return a digit of a scale, code - LESS, and what `scaled_code` adds to its products."""
    # Powers of two, or 5 * 32 for q6_k's 128 + 32: exact.
    digit = small_number(code, LESS, tl.float32)
    OFFSET: tl.constexpr = 0.0 if KIND == "iq4" else -160.0 if KIND == "q6_k" else -128.0
    return digit.to(DTYPE), (digit * OFFSET).to(DTYPE)


@jit
def scale_digits(scale, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Split integer scales into digits, the highest first, each with its offset.

    Digits are so small that their products with codes have 8 bits, which bf16 holds: 0 to 7 of
    q4_k's and q5_k's scales of 6 bits (in the lower byte of an int16); -8 to 8 of q6_k's two
    signed bytes, in base 16; -2 to 2 of iq4's -32 to 31, in base 4, of the lower byte.
    """
    if KIND == "q6_k":
        # Plus 136: both digits are 8 more.
        first = (scale << 8 >> 8) + 136
        second = (scale >> 8) + 136
        first_high, more_high = _with_offset(first >> 4, 8, KIND, DTYPE)
        first_low, more_low = _with_offset(first & 15, 8, KIND, DTYPE)
        second_high, other_high = _with_offset(second >> 4, 8, KIND, DTYPE)
        second_low, other_low = _with_offset(second & 15, 8, KIND, DTYPE)
        found = (first_high, more_high, first_low, more_low)
        return found + (second_high, other_high, second_low, other_low)
    elif KIND == "iq4":
        # Plus 42: all three digits are 2 more.
        code = (scale << 8 >> 8) + 42
        high, none = _with_offset(code >> 4, 2, KIND, DTYPE)
        middle, _ = _with_offset(code >> 2 & 3, 2, KIND, DTYPE)
        low, _ = _with_offset(code & 3, 2, KIND, DTYPE)
        return high, none, middle, none, low, none
    else:
        high, more = _with_offset(scale >> 3 & 7, 0, KIND, DTYPE)
        low, other = _with_offset(scale & 7, 0, KIND, DTYPE)
        return high, more, low, other


@jit
def scaled_code(
    units, above, digit, offset, K: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr
):
    """Return the number of field K of units, times a digit of its scale: exact in 8 bits.

    Numbers are codes of q4_k and q5_k as they are, and those of `decode` of q6_k and iq4. above: as
    of `with_bits_above`. digit, offset: of `scale_digits`, for each unit.
    """
    if tl.bfloat16 == DTYPE and tl.target_info.is_cuda():
        if KIND == "iq4":
            number = iq4(units, K)
        elif KIND == "q4_k":
            number = codes_plus_128(units, K, 4)
        else:
            number = with_bits_above(units, above, K, 1 if KIND == "q5_k" else 2, True)
        PTX: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(
            PTX, "=r,r,r,r", (number, digit, offset), tl.bfloat16, is_pure=True, pack=2
        )
    else:
        number = _decode_plainly(units, above, K, KIND)
        if KIND == "q4_k" or KIND == "q5_k":
            number += 8 if KIND == "q4_k" else 16
        return (number.to(tl.float32) * digit.to(tl.float32)).to(DTYPE)


@jit
def decode(units, factor, K: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Convert field K of units to DTYPE, without its scale.

    Codes of int4, hqq and q4_k are minus 8, those of q5_k and q6_k minus 16 and 32. Numbers of hqq2
    and hqq3 have their scale and zero.

    factor: of each unit of mxfp4 and nvfp4, by `e2m1_factor`; for q5_k and q6_k what is above each
    unit, as of `with_bits_above`; for hqq2 and hqq3 the scale, `hqq_offset` and third bits of each
    unit, as of `decode_hqq`. `finish` multiplies the sums of products by the factor that these
    numbers lack: those of fp8 are 2 ** -8 as large, those of e2m1 in bf16 2 ** -32.
    """
    if KIND == "bf16":
        return units
    elif KIND == "hqq2" or KIND == "hqq3":
        scale, offset, thirds = factor
        code = decode_hqq(units, thirds, K, 3 if KIND == "hqq3" else 2, DTYPE)
        return (code * scale - offset).to(DTYPE)
    elif tl.bfloat16 == DTYPE and tl.target_info.is_cuda():
        if KIND == "mxfp4" or KIND == "nvfp4":
            return e2m1(units, factor, K)
        elif KIND == "int4" or KIND == "hqq" or KIND == "q4_k":
            return int4(units, K)
        elif KIND == "q5_k" or KIND == "q6_k":
            return with_bits_above(units, factor, K, 1 if KIND == "q5_k" else 2)
        elif KIND == "iq4":
            return iq4(units, K)
        else:
            byte = shift_right(units, 8) if K else units
            return signed_bytes(byte) if KIND == "int8" or KIND == "q8_0" else e4m3(byte)
    else:
        number = _decode_plainly(units, factor, K, KIND)
        # By fp32 to bf16: Triton's interpreter knows no other way.
        return number.to(tl.float32).to(DTYPE) if tl.bfloat16 == DTYPE else number.to(DTYPE)


@jit
def _decode_plainly(units, factor, K: tl.constexpr, KIND: tl.constexpr):
    """`decode` to a number of any type that has its digits."""
    if KIND == "int8" or KIND == "q8_0":
        bits = (units >> 8 * K & 0xFF) ^ 0x6480  # fp16 bits of 1024 + 128 + the number
        return bits.to(tl.float16, bitcast=True) - 1152.0
    elif KIND == "fp8" or KIND == "fp8b":  # bits of an fp16 number, 2 ** -8 as large
        byte = units >> 8 * K
        return ((byte & 0x80) << 8 | (byte & 0x7F) << 7).to(tl.float16, bitcast=True)
    elif KIND == "mxfp4" or KIND == "nvfp4":  # bits of an fp16 number, 2 ** -14 as large
        code = units >> 4 * K
        number = ((code & 8) << 12 | (code & 7) << 9).to(tl.float16, bitcast=True)
        return number.to(tl.float32) * 16384.0 * factor
    elif KIND == "q5_k" or KIND == "q6_k":
        BITS: tl.constexpr = 1 if KIND == "q5_k" else 2
        above = factor >> K // 2 * 8 + K % 2 * BITS & 2**BITS - 1
        return (units >> 4 * K & 15 | above << 4) - (8 << BITS)
    elif KIND == "iq4":
        # A table of 16 bytes in two integers.
        code = units >> 4 * K & 15
        table = tl.where(code & 8 != 0, 0x7159453526190D01, -0x091522304052677F)
        return (table >> ((code & 7) * 8).to(tl.int64)).to(tl.int8)
    else:
        return (units >> 4 * K & 15) - 8


@jit
def finish(total, scales, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply sums by what their decoded numbers lack. scales: a row's, of int8, fp8, nvfp4."""
    if KIND == "int8" or KIND == "fp8" or KIND == "nvfp4":
        total *= scales
    if KIND == "fp8" or KIND == "fp8b":
        total *= 256.0
    if (KIND == "mxfp4" or KIND == "nvfp4") and tl.bfloat16 == DTYPE and tl.target_info.is_cuda():
        total *= 4294967296.0  # `e2m1_factor`
    return total


@jit
def to_fp32(numbers):
    """Convert bf16 to fp32, two at a time."""
    if tl.target_info.is_cuda():
        PTX: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"
        return tl.inline_asm_elementwise(
            PTX, "=r,=r,r", (numbers,), tl.float32, is_pure=True, pack=2
        )
    else:
        return numbers.to(tl.float32)


@jit
def codes_plus_128(units, K: tl.constexpr, BITS: tl.constexpr):
    """Return 128 + field K of units, a code of 2 or 4 bits, as bf16, two at a time."""
    PTX: tl.constexpr = f"""{{
        .reg .b32 bits;
        shr.u32 bits, $1, {BITS * K};
        lop3.b32 $0, bits, {(2**BITS - 1) * 65537}, 0x43004300, 0xEA;
        }}"""
    return tl.inline_asm_elementwise(PTX, "=r,r", (units,), tl.bfloat16, is_pure=True, pack=2)


@jit
def codes_3_plus_128(units, thirds, K: tl.constexpr):
    """Return 128 + field K of 2 bits + its third bit as bf16, two at a time."""
    PTX: tl.constexpr = f"""{{
        .reg .b32 low, high;
        shr.u32 low, $1, {2 * K};
        shr.u32 high, $2, {K // 4 * 8 + K % 4};
        lop3.b32 low, low, 0x00030003, 0x43004300, 0xEA;
        lop3.b32 $0, high, 0x00040004, low, 0xEA;
        }}"""
    return tl.inline_asm_elementwise(
        PTX, "=r,r,r", (units, thirds), tl.bfloat16, is_pure=True, pack=2
    )


@jit
def decode_hqq(units, thirds, K: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Convert field K of units of 2, 3 or 4 bits to fp32; plus 128 if DTYPE is bf16.

    thirds: the third bits of 3-bit codes. Bit 2 + 8 b + k belongs to field 4 b + k.
    """
    if tl.bfloat16 == DTYPE and tl.target_info.is_cuda():
        return to_fp32(
            codes_3_plus_128(units, thirds, K) if BITS == 3 else codes_plus_128(units, K, BITS)
        )
    else:
        if BITS == 3:
            code = units >> 2 * K & 3 | thirds >> K // 4 * 8 + K % 4 & 4
        else:
            code = units >> BITS * K & 2**BITS - 1
        code = code.to(tl.float32)
        return code + 128.0 if tl.bfloat16 == DTYPE else code


@jit
def hqq_offset(scale, zero, DTYPE: tl.constexpr):
    """Return what is subtracted from a number of `decode_hqq` times its scale."""
    return (zero + (128.0 if tl.bfloat16 == DTYPE else 0.0)) * scale
