"""Up to four tokens as signed bytes, for integer products on tensor cores.

Codes of int4 and int8 become signed bytes in a few instructions, and a token's numbers are two
bytes each: an instruction (m16n8k32) has a column for the high bytes of a token and one for the low
ones, so that four tokens cost what one does. In registers each token takes dp2a of its own, and as
bf16 a word of codes takes three times the instructions (docs/log/speculation.md).

The kernel before makes the bytes, once for all programs. 128 numbers of a token, a group, share a
power of two, the unit: a number has an error of at most 2 ** -14 of the group's largest.

A warp multiplies whole groups. Its lane 4 r + t has four words of rows r and r + 8, and of x the
words of column r; of the sums it gets those of token t, high and low. So the place of a lane
counts: Triton has to give lane n the n-th of 32 neighbors. A test reads that in the compiled code;
it was run with Triton 3.6, 3.7, 3.8 and 3.9. With a newer one there are no planes.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ops.launch import await_previous, jit, launch, tl, triton
from ops.products.operands import split_four
from ops.products.tilings import Place, measured_fields, place_of
from ops.products.weights import Weight

NEWEST_TRITON = 3, 9
MOST_TOKENS = 4
GROUP = 128


class Planes(NamedTuple):
    """T tokens x [T, in]. words: of a group, half of a row's words, token, byte and t, four."""

    words: Tensor  # int32 [in / 128, 2, T, 2, 4, 4]: the high bytes, then the low ones
    units: Tensor  # fp32 [in / 128, T]
    squares: Tensor | None = None  # fp32 [in / 128, T]: sums of x * x; the product divides by RMS
    plain: Tensor | None = None  # x


@dataclass(frozen=True)
class PlaneSettings:
    """What `_make_planes` is compiled for."""

    kind: str  # codes that planes are multiplied by
    tokens: int
    width: int

    apart = property(lambda s: 32 if s.kind == "int4" else 4)  # numbers of a word of a plane


@cache
def knows_lanes() -> bool:
    """Whether Triton is a version that gives lanes their places."""
    if triton is None:
        return False
    return tuple(map(int, triton.__version__.split(".")[:2])) <= NEWEST_TRITON


def takes_planes(weight: Weight, T: int, dtype: torch.dtype, stored: bool = False) -> bool:
    """Whether a dense product multiplies T tokens as planes: those whose tiles were measured.

    dtype: of the tokens. fp16 may not hold x times the weight of a norm. stored: by the kernel
    before, which runs anyway; else by one of their own, so that two tokens gain nothing.
    """
    if not (2 if stored else 3) <= T <= MOST_TOKENS or dtype != torch.bfloat16:
        return False
    if not knows_lanes():
        return False
    known = weight.kind == "int8" or (weight.kind == "int4" and weight.group == GROUP)
    return known and measured_fields(weight, plane_place(weight)) is not None


def plane_place(weight: Weight) -> Place:
    """Return where the table has the tiles of a product of planes: one place for all tokens."""
    return place_of(weight, "planes", MOST_TOKENS)


def empty_planes(like: Tensor, width: int, T: int) -> Planes:
    """Return memory for T tokens [T, width], on the device of a tensor."""
    words = like.new_empty(width // GROUP, 2, T, 2, 4, 4, dtype=torch.int32)
    return Planes(words, like.new_empty(width // GROUP, T, dtype=torch.float32))


@jit
def quantize_group(value, largest):
    """Return numbers of a group as integers below 2 ** 14, and the unit. largest: of all."""
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    kept = tl.maximum(exponent, 20)
    unit = ((kept - 13) << 23).to(tl.float32, bitcast=True)
    inverse = ((254 + 13 - kept) << 23).to(tl.float32, bitcast=True)
    unit = tl.where(exponent == 255, float("nan"), unit)  # inf in x: NaN in every row
    # Adding 1.5 * 2 ** 23 rounds to a whole number, and leaves it in the lowest bits.
    number = (value * inverse + 12582912.0).to(tl.int32, bitcast=True)
    return number << 10 >> 10, unit


# Grid [in / 128, T]: a program, one warp, has a group. A lane has the four numbers of a word of
# each plane, so that lanes exchange the largest number and the sum of squares alone.
@jit
def _make_planes(x, norm, planes, s: tl.constexpr, PDL: tl.constexpr):
    group, token, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, 32)
    if s.kind == "int4":  # lane: whether the fields are odd, t, word
        number, half, of_four = lane, lane % 4 // 2, lane % 2 * 2 + lane // 16
    else:  # half, t, word
        number, half, of_four = lane // 4 * 16 + lane % 4, lane // 16, lane % 4
    number += group * 128
    x += token * s.width
    scales, values, square, largest = (), (), 0.0, 0.0
    for n in tl.static_range(4):
        scale = 1.0 if norm is None else tl.load(norm + number + n * s.apart).to(tl.float32)
        scales = scales + (scale,)
    await_previous(PDL, True)
    for n in tl.static_range(4):
        values = values + (tl.load(x + number + n * s.apart).to(tl.float32),)
    for n in tl.static_range(4):
        square += values[n] * values[n]
        largest = tl.maximum(largest, tl.abs(values[n] * scales[n]))
    square, bits = tl.sum(square, 0), tl.max(largest.to(tl.int32, bitcast=True), 0)
    largest = bits.to(tl.float32, bitcast=True)
    high, low = 0, 0
    for n in tl.static_range(4):
        value = values[n] * scales[n]
        whole, unit = quantize_group(value, largest)
        high |= (whole + 128 >> 8 & 255) << 8 * n
        low |= (whole & 255) << 8 * n
        if planes.plain is not None:
            plain = planes.plain + token * s.width + number + n * s.apart
            tl.store(plain, value.to(planes.plain.dtype.element_ty))
    place = (group * 2 + half) * (32 * s.tokens) + token * 32 + lane // 4 % 4 * 4 + of_four
    tl.store(planes.words + place, high)
    tl.store(planes.words + place + 16, low)
    if s.kind == "int4":  # its codes become 16 times the numbers
        unit *= 0.0625
    tl.store(planes.units + group * s.tokens + token, unit)
    if planes.squares is not None:
        tl.store(planes.squares + group * s.tokens + token, square)


def make_planes(x: Tensor, norm: Tensor | None, weight: Weight) -> Planes:
    """Return x [T, in] as planes for a product; with a norm [in] times its weight.

    Then the product divides by the RMS.
    """
    T, D = x.shape
    planes = empty_planes(x, D, T)
    if norm is not None:
        words, units, *_ = planes
        planes = Planes(words, units, torch.empty_like(units), torch.empty_like(x))
    s = PlaneSettings(weight.kind, T, D)
    launch(_make_planes, (D // GROUP, T), x, norm, planes, settings=s, warps=1)
    return planes


@jit
def _put(pointer, value, mask, BITS: tl.constexpr):
    """Store numbers of 8 or 32 bits, from the lanes that have them: Triton would move bytes."""
    if tl.target_info.is_cuda():
        PTX: tl.constexpr = (
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b8 [$1], $2; mov.u32 $0, 0; }"
            if BITS == 8
            else "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }"
        )
        given = pointer.to(tl.int64), value.to(tl.int32, bitcast=True), mask.to(tl.int32)
        tl.inline_asm_elementwise(PTX, "=r,l,r,r", given, tl.int32, is_pure=False, pack=1)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)


@jit
def store_head(whole, unit, planes, group, column, token, mask, T: tl.constexpr):
    """Store a group of int4's order of several tokens. All but `group` are of one shape."""
    word = (group * 2 + column % 4 // 2) * (32 * T) + token * 32 + column // 4 % 4 * 4
    at = (word + column % 2 * 2 + column // 16 % 2) * 4 + column // 32
    place = planes.words.to(tl.pointer_type(tl.int8), bitcast=True) + at
    _put(place, whole + 128 >> 8, mask, 8)
    _put(place + 64, whole, mask, 8)
    _put(planes.units + group * T + token, unit * 0.0625, mask & (column == 0), 32)


@jit
def _signed_codes(word, ODD: tl.constexpr):
    """Return the even or odd codes of int4 words as signed bytes, 16 times the numbers."""
    if tl.target_info.is_cuda():
        PTX: tl.constexpr = (
            "lop3.b32 $0, $1, 0xF0F0F0F0, 0x80808080, 0x6A;"
            if ODD
            else "{ .reg .b32 t; shl.b32 t, $1, 4; lop3.b32 $0, t, 0xF0F0F0F0, 0x80808080, 0x6A; }"
        )
        return tl.inline_asm_elementwise(PTX, "=r,r", (word,), tl.int32, is_pure=True, pack=1)
    else:
        return ((word if ODD else word << 4) & -0x0F0F0F10) ^ -0x7F7F7F80


@jit
def _dot_rows(a, b):
    """Multiply rows and columns of bytes: [J, W, 32] lanes of both -> [J, W, 8, 8]."""
    J: tl.constexpr = a.shape[0]
    W: tl.constexpr = a.shape[1]
    a, b, total = tl.reshape(a, [J, W, 8, 1, 4]), tl.reshape(b, [J, W, 1, 8, 4]), 0
    for k in tl.static_range(4):
        total += (a << 24 - 8 * k >> 24) * (b << 24 - 8 * k >> 24)
    return tl.sum(total, 4)


@jit
def _add_products(c, a, b):
    """Add the products of 16 rows of 32 codes and 8 columns of x to a lane's four sums.

    a: words of the upper and lower row, for the first 16 numbers, then the others. b: of x.
    """
    if tl.target_info.is_cuda():
        PTX: tl.constexpr = (
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, "
            "{$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"
        )
        return tl.inline_asm_elementwise(
            PTX,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            (c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[0], b[1]),
            (tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        J: tl.constexpr = a[0].shape[0]
        W: tl.constexpr = a[0].shape[1]
        upper = tl.reshape(_dot_rows(a[0], b[0]) + _dot_rows(a[2], b[1]), [J, W, 32, 2])
        lower = tl.reshape(_dot_rows(a[1], b[0]) + _dot_rows(a[3], b[1]), [J, W, 32, 2])
        first, second = tl.split(upper)
        third, fourth = tl.split(lower)
        return c[0] + first, c[1] + second, c[2] + third, c[3] + fourth


@jit
def load_codes(weights, row, s: tl.constexpr):
    """Load 16 rows of a weight: words of the upper and lower row of each lane, and their scales.

    All are of one shape: loads of one shape have one layout. s: `few_tokens.DenseSettings`.
    """
    LOADS: tl.constexpr = 2 if s.kind == "int8" else 1  # a lane's loads of a group's row
    GROUPS: tl.constexpr = s.words // (16 * LOADS)
    shape: tl.constexpr = (GROUPS // s.warps, s.warps, 32)
    at, own = tl.arange(0, GROUPS * 128)[:, None], tl.arange(0, GROUPS * 32)[:, None]
    codes = weights.codes + row * s.words
    codes += at // 4 % 32 // 4 * s.words + at // 128 * (16 * LOADS) + at % 16
    codes = tl.max_contiguous(tl.multiple_of(codes, [16, 1]), [4, 1])
    found, scales = (), ()
    for part in tl.static_range(LOADS):
        upper = split_four(tl.load(codes + 16 * part), GROUPS // s.warps, s.warps)
        lower = split_four(tl.load(codes + (8 * s.words + 16 * part)), GROUPS // s.warps, s.warps)
        found = found + ((upper, lower),)
    if s.kind == "int4":
        scale = weights.scale + (row + own % 32 // 4) * GROUPS + own // 32
        upper = tl.reshape(tl.load(scale), shape).to(tl.float32)
        scales = upper, tl.reshape(tl.load(scale + 8 * GROUPS), shape).to(tl.float32)
    return found, scales


@jit
def load_planes(x, s: tl.constexpr):
    """Load x for `multiply_codes`: both halves' words, the units, and squares or zeros."""
    LOADS: tl.constexpr = 2 if s.kind == "int8" else 1
    GROUPS: tl.constexpr = s.words // (16 * LOADS)
    shape: tl.constexpr = (GROUPS // s.warps, s.warps, 32)
    T: tl.constexpr = s.tokens
    at, own = tl.arange(0, GROUPS * 128)[:, None], tl.arange(0, GROUPS * 32)[:, None]
    words, exists = x.words + at // 128 * (64 * T) + at % 128, at % 128 < 32 * T
    first = tl.load(words, mask=exists, other=0)
    second = tl.load(words + 32 * T, mask=exists, other=0)
    first = split_four(first, GROUPS // s.warps, s.warps)
    second = split_four(second, GROUPS // s.warps, s.warps)
    token = own & 3  # the compiler must not see that they are neighbors
    unit = tl.load(x.units + own // 32 * T + token, mask=token < T, other=0.0)
    square = unit
    if x.squares is not None:
        square = tl.load(x.squares + own // 32 * T + token, mask=token < T, other=0.0)
    return (first, second), tl.reshape(unit, shape), tl.reshape(square, shape)


@jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@jit
def multiply_codes(loaded, x, s: tl.constexpr):
    """Multiply 16 rows by the tokens -> sums of lane 4 r + t: token t times rows r and r + 8, [32].

    Also returns the token's squares. loaded: by `load_codes`. x: by `load_planes`.
    """
    codes, scales = loaded
    halves, unit, square = x
    zero = tl.zeros(unit.shape, tl.int32)
    c = (zero, zero, zero, zero)
    for i in tl.static_range(4):
        if s.kind == "int4":
            upper, lower = codes[0][0][i], codes[0][1][i]
            a = (
                _signed_codes(upper, False),
                _signed_codes(lower, False),
                _signed_codes(upper, True),
                _signed_codes(lower, True),
            )
        else:
            upper, lower = codes[i // 2][0], codes[i // 2][1]
            a = (upper[i % 2 * 2], lower[i % 2 * 2], upper[i % 2 * 2 + 1], lower[i % 2 * 2 + 1])
        half = halves[i // 2]
        c = _add_products(c, a, (half[i % 2 * 2], half[i % 2 * 2 + 1]))
    first = ((c[0] << 8) + c[1]).to(tl.float32) * unit
    second = ((c[2] << 8) + c[3]).to(tl.float32) * unit
    if s.kind == "int4":
        first, second = first * scales[0], second * scales[1]
    sums = tl.sum(first, 0), tl.sum(second, 0), tl.sum(square, 0)
    return tl.reduce(sums, 0, _add_three)
