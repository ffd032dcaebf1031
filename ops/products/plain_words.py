"""Products of words by shifts, for GPUs other than NVIDIA's, which have inline assembly.

Functions with assembly ask `tl.target_info.is_cuda()` at compile time, and call these elsewhere. A
word is int32: four bytes, or eight codes of 4 bits. x: four int16 in an int64.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from ops.launch import jit, tl


@jit
def _number(x, K: tl.constexpr):
    """Return number K of four int16 in an int64, as int32."""
    return (x >> 16 * K).to(tl.int16).to(tl.int32)


@jit
def add_pair(pair, total):
    """Add both int16 of a word to `total`."""
    return total + (pair << 16 >> 16) + (pair >> 16)


@jit
def dot_bytes(word, x, total, SIGNED: tl.constexpr):
    """Add the dot product of a word's four bytes and x to `total`."""
    for k in tl.static_range(4):
        byte = (word << 24 - 8 * k >> 24) if SIGNED else (word >> 8 * k & 0xFF)
        total += _number(x, k) * byte
    return total


@jit
def dot_nibbles(word, x_even, x_odd, even, odd):
    """As `codes._add_word`: even fields, and 16 times the odd ones."""
    even = dot_bytes(word & 0x0F0F0F0F, x_even, even, False)
    return even, dot_bytes(word & -252645136, x_odd, odd, False)  # 0xF0F0F0F0


@jit
def dot_five_bits(word, high, x_even, x_odd, total, M: tl.constexpr):
    """As `gguf_words.add_five_bits`."""
    if M == 0:
        even, odd = high << 4, high << 3
    elif M == 1:
        even, odd = high << 2, high << 1
    elif M == 2:
        even, odd = high, high >> 1
    else:
        even, odd = high >> 2, high >> 3
    total = dot_bytes(word & 0x0F0F0F0F | even & 0x10101010, x_even, total, False)
    return dot_bytes(word >> 4 & 0x0F0F0F0F | odd & 0x10101010, x_odd, total, False)


@jit
def dot_six_bits(word, high, x_low, x_high, low, high_sum, M: tl.constexpr):
    """As `gguf_words.add_six_bits`."""
    # 0x80808080, the first bits inverted; 0xC0C0C0C0, the bits above.
    first = word << 2 & 0x3C3C3C3C | -2139062144
    second = word >> 2 & 0x3C3C3C3C | -2139062144
    first ^= high << 6 - 4 * M & -1061109568
    second ^= high << 4 - 4 * M & -1061109568
    return dot_bytes(first, x_low, low, True), dot_bytes(second, x_high, high_sum, True)


@jit
def _look_up(code, table):
    """Return a code's byte of a table of 16, signed. table: four words; code: int32, 0 to 15."""
    first = tl.where(code & 4 != 0, table[1], table[0])
    second = tl.where(code & 4 != 0, table[3], table[2])
    word = tl.where(code & 8 != 0, second, first)
    return word << 24 - (code & 3) * 8 >> 24


@jit
def dot_looked_up(word, x_low, x_high, low, high, table, LESS: tl.constexpr):
    """As `codes._add_e2m1`, and with LESS = 1 as `gguf_words.add_iq4`.

    LESS: is subtracted from the numbers of codes from 8 on.
    """
    for k in tl.static_range(4):
        first, second = word >> 4 * k & 15, word >> 16 + 4 * k & 15
        low += _number(x_low, k) * (_look_up(first, table) - LESS * (first >> 3))
        high += _number(x_high, k) * (_look_up(second, table) - LESS * (second >> 3))
    return low, high
