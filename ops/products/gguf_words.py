"""Products of words of GGUF's kinds: integers of x times codes, in inline assembly.

ops/products/codes.py calls them. A quad has four words, and 32 codes (formats/k_quants.py).
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from ops.launch import jit, tl
from ops.products.plain_words import dot_five_bits, dot_looked_up, dot_six_bits


@jit
def add_five_bits(word, high, x_even, x_odd, total, M: tl.constexpr):
    """Add the dot product of the M-th word of a quad to `total`: q5_k codes, 0 to 31.

    high: the fifth bits of the quad, of which those of this word are from bit 2 M of each byte on.
    """
    if tl.target_info.is_cuda():
        return tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 x<4>, bytes<2>, above<2>, sum<3>;
            mov.b64 {{x0, x1}}, $3;
            mov.b64 {{x2, x3}}, $4;
            and.b32 bytes0, $1, 0x0F0F0F0F;
            shr.u32 bytes1, $1, 4;
            and.b32 bytes1, bytes1, 0x0F0F0F0F;
            {"shl" if M < 2 else "shr"}.b32 above0, $2, {4 - 2 * M if M < 2 else 2 * M - 4};
            {"shl" if M < 2 else "shr"}.b32 above1, $2, {3 - 2 * M if M < 2 else 2 * M - 3};
            lop3.b32 bytes0, above0, 0x10101010, bytes0, 0xEA;
            lop3.b32 bytes1, above1, 0x10101010, bytes1, 0xEA;
            dp2a.lo.s32.u32 sum0, x0, bytes0, $5;
            dp2a.lo.s32.u32 sum1, x2, bytes1, sum0;
            dp2a.hi.s32.u32 sum2, x1, bytes0, sum1;
            dp2a.hi.s32.u32 $0, x3, bytes1, sum2;
            }}""",
            "=r,r,r,l,l,r",
            (word, high, x_even, x_odd, total),
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return dot_five_bits(word, high, x_even, x_odd, total, M)


@jit
def add_six_bits(word, high, x_low, x_high, low, high_sum, M: tl.constexpr):
    """Add one word's dot products to `low` and `high_sum`: q6_k codes, 0 to 63, less 32, times 4.

    low: over the codes in the lower nibbles, high_sum: over those in the upper ones. high: the two
    bits above them, of this word (M = 0 or 1) from bit 4 M of each byte on. The upper six bits of a
    byte are the code. Its first bit inverted, it is a signed byte.
    """
    if tl.target_info.is_cuda():
        return tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 x<4>, bytes<2>, above<2>, sum<2>, inverted;
            mov.b64 {{x0, x1}}, $4;
            mov.b64 {{x2, x3}}, $5;
            mov.b32 inverted, 0x80808080;
            shl.b32 bytes0, $2, 2;
            shr.u32 bytes1, $2, 2;
            lop3.b32 bytes0, bytes0, 0x3C3C3C3C, inverted, 0xEA;
            lop3.b32 bytes1, bytes1, 0x3C3C3C3C, inverted, 0xEA;
            shl.b32 above0, $3, {6 - 4 * M};
            shl.b32 above1, $3, {4 - 4 * M};
            lop3.b32 bytes0, above0, 0xC0C0C0C0, bytes0, 0x6A;
            lop3.b32 bytes1, above1, 0xC0C0C0C0, bytes1, 0x6A;
            dp2a.lo.s32.s32 sum0, x0, bytes0, $6;
            dp2a.lo.s32.s32 sum1, x2, bytes1, $7;
            dp2a.hi.s32.s32 $0, x1, bytes0, sum0;
            dp2a.hi.s32.s32 $1, x3, bytes1, sum1;
            }}""",
            "=r,=r,r,r,l,l,r,r",
            (word, high, x_low, x_high, low, high_sum),
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return dot_six_bits(word, high, x_low, x_high, low, high_sum, M)


@jit
def add_iq4(word, x_low, x_high, low, high, table):
    """Add one word's dot products to `low` and `high`: iq4 codes; else as `codes._add_e2m1`.

    table (`iq4_table`): eight negative numbers, and one more than each of the eight others. For a
    code of the other half a look-up copies the sign of a byte. That is -1 for the first half, which
    the one more makes up for, and 0 for the second.
    """
    if tl.target_info.is_cuda():
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x<4>, upper, other, below<2>, above<2>, sum<6>;
            mov.b64 {x0, x1}, $3;
            mov.b64 {x2, x3}, $4;
            xor.b32 other, $2, 0x88888888;
            prmt.b32 below0, $7, $8, $2;
            prmt.b32 above0, $9, $10, other;
            shr.u32 upper, $2, 16;
            shr.u32 other, other, 16;
            prmt.b32 below1, $7, $8, upper;
            prmt.b32 above1, $9, $10, other;
            dp2a.lo.s32.s32 sum0, x0, below0, $5;
            dp2a.lo.s32.s32 sum1, x2, below1, $6;
            dp2a.hi.s32.s32 sum2, x1, below0, sum0;
            dp2a.hi.s32.s32 sum3, x3, below1, sum1;
            dp2a.lo.s32.s32 sum4, x0, above0, sum2;
            dp2a.lo.s32.s32 sum5, x2, above1, sum3;
            dp2a.hi.s32.s32 $0, x1, above0, sum4;
            dp2a.hi.s32.s32 $1, x3, above1, sum5;
            }""",
            "=r,=r,r,l,l,r,r,r,r,r,r",
            (word, x_low, x_high, low, high, table[0], table[1], table[2], table[3]),
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return dot_looked_up(word, x_low, x_high, low, high, table, 1)


@jit
def iq4_table(zero):
    """Return iq4's numbers as `add_iq4` takes them, bytes: codes 0 to 3, 4 to 7, and so on."""
    lanes = tl.arange(0, 32)[None, None, :] * zero  # as in `codes.e2m1_table`
    return lanes - 0x4052677F, lanes - 0x09152231, lanes + 0x271A0E02, lanes + 0x725A4636
