"""GGUF's weights for a prompt's tensor cores, in bf16: one rounding, few instructions.

A weight is number * factor + offset. Converting each number to fp32, and each result to bf16, takes
up to twice the instructions of these ways:

- **Integers are numbers where they are.** Below 2 ** 24 the bits of an fp32 number are its multiple
  of 2 ** -149, below 256 those of a bf16 number multiples of 2 ** -133. So a mask makes a number.
- **Two at a time, if there is no offset**: bf16 pairs times a factor of two bf16 numbers, the
  second of which has the first one's lost digits (`times_two_digits`).
- **fp32 with an offset** (q4_k, q5_k: `scaled_codes`), which would lose digits in bf16.

`gguf_factors` and `finish_gguf` make up for the powers of two.
"""

from ops.launch import jit, tl
from ops.products.units import decode, half, iq4, shift_right


@jit
def scaled_byte(word, K: tl.constexpr, step, SIGNED: tl.constexpr, IN_BITS: tl.constexpr):
    """Return byte K of int32, times step, fp32: rounded once.

    IN_BITS: 2 ** -133 of it. A byte in bits 16 to 23 of an fp32 number is its multiple of that.
    """
    if SIGNED:
        word = word ^ -2139062144  # 0x80808080: 128 more
    if IN_BITS:
        PTX: tl.constexpr = f"prmt.b32 $0, $1, 0, {0x4044 + 256 * K};"
        number = tl.inline_asm_elementwise(PTX, "=r,r", (word,), tl.int32, is_pure=True, pack=1)
        number = number.to(tl.float32, bitcast=True)
        LESS: tl.constexpr = 1.1754943508222875e-38  # 2 ** -126
        return tl.fma(number, step, -LESS * step) if SIGNED else number * step
    else:
        number = (word >> 8 * K & 0xFF).to(tl.float32)
        return (number - 128.0 if SIGNED else number) * step


@jit
def two_digits(scale):
    """Split fp32 scales into two bf16 numbers, whose sum has 16 digits -> int32, high and low."""
    PTX: tl.constexpr = """{
        .reg .b32 high;
        .reg .f32 low;
        and.b32 high, $1, 0xFFFF0000;
        sub.f32 low, $1, high;
        cvt.rn.bf16x2.f32 $0, high, low;
        }"""
    return tl.inline_asm_elementwise(PTX, "=r,r", (scale,), tl.int32, is_pure=True, pack=1)


@jit
def times_two_digits(number, factor):
    """Return bf16 numbers times factor (`two_digits`), rounded once to bf16, two at a time.

    The lower digit's product is rounded, too: to 8 digits below those of the result.
    """
    PTX: tl.constexpr = """{
        .reg .b16 first, second;
        .reg .b32 low, high, none;
        mov.b32 none, 0x80008000;
        mov.b32 {first, second}, $2;
        mov.b32 low, {first, first};
        mov.b32 high, {second, second};
        fma.rn.bf16x2 low, $1, low, none;
        fma.rn.bf16x2 $0, $1, high, low;
        }"""
    return tl.inline_asm_elementwise(
        PTX, "=r,r,r,r", (number, factor), tl.bfloat16, is_pure=True, pack=2
    )


@jit
def scaled_codes(units, above, factor, offset, K: tl.constexpr, BITS: tl.constexpr):
    """Return field K of units, codes of 4 or 5 bits, times factor, plus offset, as bf16.

    Two at a time; fp32 fma, so that bf16 rounds the result alone. factor: 2 ** 95 of it. above: as
    of `with_bits_above`, for 5 bits. Below 2 ** 24 the bits of an fp32 number are its multiple of
    2 ** -149, so that a code in bits 16 to 20, or in 20 to 23, is a number.
    """
    HIGH: tl.constexpr = BITS == 4 and K % 2 == 1  # 16 times as large
    MASK: tl.constexpr = (0xF0 if HIGH else 0x0F if BITS == 4 else 0x1F) << 16
    # Five bits: those of both fields of a parity are bytes first.
    PTX: tl.constexpr = f"""{{
        .reg .b32 bits, up, first, second;
        .reg .f32 low, high;
        shl.b32 up, $2, {4 - K % 2};
        shr.u32 bits, $1, {4 * (K % 2)};
        and.b32 bits, bits, 0x0F0F0F0F;
        lop3.b32 bits, up, 0x10101010, bits, 0xEA;
        mov.b32 bits, {"$1" if BITS == 4 else "bits"};
        shl.b32 first, bits, {16 if K < 2 else 8};
        shr.u32 second, bits, {0 if K < 2 else 8};
        and.b32 first, first, {MASK};
        and.b32 second, second, {MASK};
        mul.f32 low, $3, {"0f3D800000" if HIGH else "0f3F800000"};
        mul.f32 high, $4, {"0f3D800000" if HIGH else "0f3F800000"};
        fma.rn.f32 low, first, low, $5;
        fma.rn.f32 high, second, high, $6;
        cvt.rn.bf16x2.f32 $0, high, low;
        }}"""
    return tl.inline_asm_elementwise(
        PTX, "=r,r,r,f,f,f,f", (units, above, factor, offset), tl.bfloat16, is_pure=True, pack=2
    )


@jit
def small_bytes(units):
    """Return the lower bytes of int16 units, signed numbers, 1/64 of them, as bf16, two at a time.

    Below 256 the bits of a bf16 number are its multiple of 2 ** -133, so that a byte is a number
    where it is: one fma moves it and subtracts 128.
    """
    PTX: tl.constexpr = """{
        .reg .b32 bits, sign, factor, minus;
        mov.b32 factor, 0x7F007F00;
        mov.b32 minus, 0xC000C000;
        mov.b32 sign, 0x00800080;
        lop3.b32 bits, $1, 0x00FF00FF, sign, 0x6A;
        fma.rn.bf16x2 $0, bits, factor, minus;
        }"""
    return tl.inline_asm_elementwise(PTX, "=r,r", (units,), tl.bfloat16, is_pure=True, pack=2)


@jit
def small_six_bits(units, above, K: tl.constexpr):
    """Return field K of units, a code of 6 bits, less 32, 1/64 of it, as bf16, two at a time.

    As `small_bytes`: those of both fields of a parity are bytes first. above: of `with_bits_above`.
    """
    PTX: tl.constexpr = f"""{{
        .reg .b32 bits, up, factor, minus;
        mov.b32 factor, 0x7F007F00;
        mov.b32 minus, 0xBF00BF00;
        shl.b32 up, $2, {4 - 2 * (K % 2)};
        shr.u32 bits, $1, {4 * (K % 2)};
        and.b32 bits, bits, 0x0F0F0F0F;
        lop3.b32 bits, up, 0x30303030, bits, 0xEA;
        shr.u32 bits, bits, {8 if K > 1 else 0};
        and.b32 bits, bits, 0x00FF00FF;
        fma.rn.bf16x2 $0, bits, factor, minus;
        }}"""
    return tl.inline_asm_elementwise(
        PTX, "=r,r,r", (units, above), tl.bfloat16, is_pure=True, pack=2
    )


@jit
def _scaled_bytes(
    scale, K: tl.constexpr, step, SIGNED: tl.constexpr, s: tl.constexpr, PAIRS: tl.constexpr
):
    """Return byte K of each group's scale, times step, fp32 [BN, groups].

    scale: groups' scales, or words of these, int32.
    """
    first = scaled_byte(scale.to(tl.int32), K, step, SIGNED, PAIRS)
    if scale.dtype != tl.int32:
        return first
    elif s.scale_bits == 16:
        second = scaled_byte(scale, K + 2, step, SIGNED, PAIRS)
        return tl.reshape(tl.join(first, second), [first.shape[0], 2 * first.shape[1]])
    else:
        second = scaled_byte(scale, 1, step, SIGNED, PAIRS)
        third = scaled_byte(scale, 2, step, SIGNED, PAIRS)
        fourth = scaled_byte(scale, 3, step, SIGNED, PAIRS)
        both = tl.join(tl.join(first, third), tl.join(second, fourth))
        return tl.reshape(both, [first.shape[0], 4 * first.shape[1]])


@jit
def _fp32_factors(scale, step, weights, s: tl.constexpr, PAIRS: tl.constexpr):
    """`gguf_factors` before numbers of two digits are made of them."""
    # A step times RAISE is that of `scaled_byte`.
    SMALL: tl.constexpr = 2.3283064365386963e-10 if PAIRS else 1.0  # 2 ** -32
    RAISE: tl.constexpr = 2.535301200456459e30 if PAIRS else 1.0  # 2 ** 101
    # Numbers of `small_bytes` and `small_six_bits` are a 64th.
    SHARE: tl.constexpr = 64.0 if PAIRS and (s.kind == "q6_k" or s.kind == "q8_0") else 1.0
    offset = 0.0
    if s.affine:
        LESS: tl.constexpr = -0.015625 if PAIRS else -1.0  # 2 ** -6
        MORE: tl.constexpr = 1.7014118346046923e38 if PAIRS else 1.0  # 2 ** 127: `scaled_codes`
        if weights.step is None:
            factor, offset = half(scale), half(scale >> 16)
            return factor * SMALL * MORE, offset * (SMALL * LESS)
        else:
            factor = _scaled_bytes(scale, 0, half(step) * RAISE, False, s, PAIRS)
            step = half(step >> 16) * (RAISE * LESS)
            return factor * MORE, _scaled_bytes(scale, 1, step, False, s, PAIRS)
    elif weights.step is not None:
        step = step.to(tl.float32) * (RAISE * SHARE)
        factor = _scaled_bytes(scale, 0, step, True, s, PAIRS)
        if s.kind == "q6_k":
            offset = _scaled_bytes(scale, 1, step, True, s, PAIRS)
        return factor, offset
    else:
        return scale.to(tl.float32) * (SMALL * SHARE), offset


@jit
def gguf_factors(scale, step, weights, s: tl.constexpr, DTYPE: tl.constexpr):
    """Return the factors and offsets of groups [BN, groups] for `gguf_weight`.

    A weight is number * factor + offset, the number being that of `decode`, but of q4_k and q5_k
    the code as it is. For q6_k these are the factors of even and of odd fields.
    """
    PAIRS: tl.constexpr = tl.bfloat16 == DTYPE and tl.target_info.is_cuda()
    factor, offset = _fp32_factors(scale, step, weights, s, PAIRS)
    if PAIRS and not s.affine:
        factor = two_digits(factor)
        offset = two_digits(offset) if s.kind == "q6_k" else offset
    return factor, offset


@jit
def gguf_weight(
    units, above, factor, offset, K: tl.constexpr, s: tl.constexpr, DTYPE: tl.constexpr
):
    """Return field K of units as weights, without what `finish_gguf` multiplies."""
    own = offset if s.kind == "q6_k" and K % 2 else factor
    if tl.bfloat16 != DTYPE or not tl.target_info.is_cuda():
        number = decode(units, above, K, s.kind, DTYPE).to(tl.float32)
        if s.affine:
            return ((number + (8 if s.kind == "q4_k" else 16)) * own + offset).to(DTYPE)
        else:
            return (number * own).to(DTYPE)
    elif s.affine:
        return scaled_codes(units, above, own, offset, K, 4 if s.kind == "q4_k" else 5)
    elif s.kind == "q8_0":
        return times_two_digits(small_bytes(shift_right(units, 8) if K else units), own)
    elif s.kind == "q6_k":
        return times_two_digits(small_six_bits(units, above, K), own)
    else:
        return times_two_digits(iq4(units, K), own)


@jit
def finish_gguf(total, s: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply sums by what numbers of `gguf_weight` lack, 2 ** 38 or 2 ** 32; others are whole."""
    if tl.bfloat16 == DTYPE and tl.target_info.is_cuda():
        total *= 274877906944.0 if s.affine else 4294967296.0
    return total
