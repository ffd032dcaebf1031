"""Triton kernels for what PyTorch cannot say: products whose weights stay packed.

`grouped`: for several tokens. `F.grouped_mm` wants plain weights, and unpacking those of all experts first would take
the memory that packing saved; here each tile is unpacked in registers. Of plain weights it is for a batch's few tokens,
with which the library reads at half of the memory's speed. `dot4`: for one token and 4 bits, where what
Inductor makes of PyTorch takes too many instructions. The formats stand in packing.py; tests hold both to its unpack.
And `attend_int8`, attention over a long cache in 8 bits, which the library's does not read.
"""

from __future__ import annotations  # the annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA: then nothing here is called
    triton = None


def jit(function):
    """`triton.jit`, where there is triton."""
    return triton.jit(function) if triton else function


@jit
def _upper(units):
    """The upper bytes of int16 `units`, below bits of no meaning: two at a time."""
    return tl.inline_asm_elementwise("shr.u32 $0, $1, 8;", "=r,r", (units,), dtype=tl.int16, is_pure=True, pack=2)


@jit
def _signed_bytes(units):
    """The lower bytes of int16 `units`, from -128 to 127, as bf16: two at a time."""
    # 128 + the lower 7 bits, less 128 or, for a negative number, 256: all exact.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, sign, minus;
        mov.b32 minus, 0xBF80BF80;
        lop3.b32 low, $1, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 sign, $1, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, sign, minus, low;
        }""", "=r,r", (units,), dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@jit
def _e4m3_bytes(units):
    """The lower bytes of int16 `units`, as bf16, 2 ** -8 of what they are: two at a time."""
    # Their bits as those of a bf16 number, 2 ** -120 of it.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sign, bits, factor, none;
        mov.b32 factor, 0x77807780;
        mov.b32 none, 0x80008000;
        shl.b32 sign, $1, 8;
        shl.b32 bits, $1, 4;
        and.b32 bits, bits, 0x07F007F0;
        lop3.b32 bits, sign, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $0, bits, factor, none;
        }""", "=r,r", (units,), dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@jit
def _bytes(units, UPPER: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The lower or upper bytes of int16 `units` as DTYPE, without their row's factor."""
    bits = _upper(units) if UPPER else units
    if tl.bfloat16 == DTYPE:
        return _signed_bytes(bits) if KIND == "int8" else _e4m3_bytes(bits)
    if KIND != "int8":  # its bits as those of an fp16 number, 2 ** -8 of it
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(DTYPE)
    bits = (bits & 0xFF) ^ 0x6480  # of 1024 + 128 + the number
    return (bits.to(tl.float16, bitcast=True) - 1152.0).to(DTYPE)


@jit
def _each_word(values, PLACES: tl.constexpr):
    """[BN, n], each for as many neighbouring words -> one for each of PLACES, [BN, blocks, 1, words, 1]."""
    n: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], [PLACES[0], n, PLACES[1] * PLACES[3] // n]), PLACES)


@jit
def _power_of_two(exponents):
    """e8m0 -> fp32, but for the smallest, 2 ** -127, which becomes 0."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@jit
def _e2m1(word, field):
    """The numbers in such fields of words, fp32. Their bits are those of an fp32 number, 2 ** -126 of it."""
    up = 22 - field * 4
    magnitude = (word << tl.maximum(up, 0) >> tl.maximum(-up, 0)) & (7 << 22)
    sign = (word << (28 - field * 4)) & -(2**31)
    return (magnitude | sign).to(tl.float32, bitcast=True) * 2.0**126


@jit
def _weights(codes, third, scale, scale_step, scale_low, zero, zero_step, zero_low, rows, start, IN: tl.constexpr,
             BITS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, RUN: tl.constexpr, BN: tl.constexpr,
             BK: tl.constexpr):  # fmt: skip
    """The BK numbers from `start` on of `rows` [BN, 1], in 4, 3 or 2 bits, fp32 [BN, BK] in `grouped_order`."""
    LOW: tl.constexpr = 2 if BITS == 3 else BITS  # bits of a field
    F: tl.constexpr = 32 // LOW  # fields of a word
    PLACES: tl.constexpr = [BN, BK // F // RUN, 1, RUN, 1]
    words = start // F + tl.arange(0, BK // F)[None, :]
    inside = words < IN // F if IN % BK else None
    word = tl.reshape(tl.load(codes + rows * (IN // F) + words, mask=inside), PLACES)
    # Fields are shifted to the first bits of an fp32 mantissa, which makes them 2 ** BITS + number: a lane shifts all
    # its words by the same constants, and converts none.
    field = tl.reshape(tl.arange(0, F), [1, 1, F // 2, 1, 2])
    up = 23 - BITS - field * LOW
    bits = (word << tl.maximum(up, 0) >> tl.maximum(-up, 0)) & ((2**LOW - 1) << 23 - BITS)
    if BITS == 3:  # bit 8 b + 4 m + k is that of field 4 b + k of word m
        bit = tl.load(third + rows * (IN // 32) + words // 2, mask=inside)
        bit = tl.reshape(bit >> (tl.arange(0, BK // F) % 2 * 4)[None, :], PLACES)
        up = 22 - field // 4 * 8 - field % 4
        bits |= (bit << tl.maximum(up, 0) >> tl.maximum(-up, 0)) & (1 << 22)
    number = (bits | ((127 + BITS) << 23)).to(tl.float32, bitcast=True)
    WORDS: tl.constexpr = GROUP // F  # of a group
    EACH: tl.constexpr = min(BK // F, WORDS & -WORDS)  # so many neighbours are of one, wherever a tile begins
    group = (start // F + tl.arange(0, BK // F // EACH)[None, :] * EACH) // WORDS
    group = rows * (IN // GROUP) + tl.minimum(group, IN // GROUP - 1)
    if KIND == "mxfp4":
        number = _e2m1(word, field)
        return tl.reshape(number * _each_word(_power_of_two(tl.load(scale + group)), PLACES), [BN, BK])
    factor, offset = tl.load(scale + group).to(tl.float32), 8.0
    if KIND == "hqq":
        factor = factor * tl.load(scale_step + rows) + tl.load(scale_low + rows)
        offset = tl.load(zero + group).to(tl.float32) * tl.load(zero_step + rows) + tl.load(zero_low + rows)
    less = (2**BITS + offset) * factor
    return tl.reshape(number * _each_word(factor, PLACES) - _each_word(less, PLACES), [BN, BK])


@jit
def _grouped(x, y, group_ends, codes, third, scale, scale_step, scale_low, zero, zero_step, zero_low, OUT: tl.constexpr,
             IN: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
             KIND: tl.constexpr, RUN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    # Which expert this tile of rows belongs to: experts have as many tiles as their rows need, one after the other.
    tile, experts = tl.program_id(0), tl.arange(0, E2)
    ends = tl.load(group_ends + experts, mask=experts < E, other=0)
    starts = tl.load(group_ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles = (tl.maximum(ends - starts, 0) + BM - 1) // BM
    last = tl.cumsum(tiles, 0)
    expert = tl.sum(((last <= tile) & (experts < E)).to(tl.int32))
    if expert < E:
        mine = experts == expert
        tile -= tl.sum(tl.where(mine, last - tiles, 0))
        row, end = tl.sum(tl.where(mine, starts, 0)) + tile * BM, tl.sum(tl.where(mine, ends, 0))
        rows = row + tl.arange(0, BM)[:, None]
        present = rows < end
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        weight_rows = expert.to(tl.int64) * OUT + tl.minimum(n, OUT - 1)[:, None]
        scale_rows = expert * tl.cdiv(OUT, GROUP) + tl.minimum(n, OUT - 1)[:, None] // GROUP  # of blocks
        # Weights are the left operand where they are unpacked in registers, and where there are no tensor cores.
        LEFT: tl.constexpr = BITS == 8 or (BITS < 8 and x.dtype.element_ty == tl.float32)
        sums = tl.zeros([BN, BM] if LEFT else [BM, BN], tl.float32)
        for start in range(0, IN, BK):
            if BITS == 8:
                unit = start // 2 + tl.arange(0, BK // 2)[None, :]
                units = tl.load(codes + weight_rows * (IN // 2) + unit, mask=unit < IN // 2 if IN % BK else None)
            # Weights of 8 bits stay in registers, which a tensor core reads until its product is waited for. So there
            # are two products: the compiler waits for the first before it unpacks the second one's weights, and so in
            # turn. One it cut into pieces, and Triton 3.6 wrote to registers that were still read.
            for part in tl.static_range(2 if BITS == 8 else 1):
                if BITS == 8:  # of the lower bytes, then of the upper ones
                    k = (unit // (2 * RUN) * 2 + part) * (2 * RUN) + unit % (2 * RUN)
                else:
                    k = start + tl.arange(0, BK)[None, :]
                a = tl.load(x + rows.to(tl.int64) * IN + k, mask=present & (k < IN) if IN % BK else present, other=0.0)
                if KIND == "plain":
                    b = tl.load(codes + weight_rows * IN + k, mask=k < IN if IN % BK else None)
                elif BITS == 8:
                    b = _bytes(units, part == 1, KIND, x.dtype.element_ty)
                    if KIND == "fp8b":  # a scale for each block of GROUP rows and columns
                        block = start // GROUP if GROUP % BK == 0 else tl.minimum(2 * unit, IN - 1) // GROUP
                        factor = tl.load(scale + scale_rows * (IN // GROUP) + block) * 256.0
                        b = (b * factor).to(x.dtype.element_ty)
                else:
                    b = _weights(codes, third, scale, scale_step, scale_low, zero, zero_step, zero_low, weight_rows,
                                 start, IN, BITS, GROUP, KIND, RUN, BN, BK).to(x.dtype.element_ty)  # fmt: skip
                if LEFT:
                    sums = tl.dot(b, tl.trans(a), sums, input_precision="ieee")
                else:
                    sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
        sums = tl.trans(sums) if LEFT else sums
        if KIND == "int8" or KIND == "fp8":
            factor = tl.load(scale + expert.to(tl.int64) * OUT + tl.minimum(n, OUT - 1)).to(tl.float32)
            sums *= (factor * (256.0 if KIND == "fp8" else 1.0))[None, :]
        tl.store(
            y + rows.to(tl.int64) * OUT + n[None, :], sums.to(y.dtype.element_ty), mask=present & (n < OUT)[None, :]
        )


def grouped_run(width: int, bits: int) -> int:
    """How many neighbouring words `grouped` unpacks side by side: as many as a tensor core's layout gives lanes.

    In 8 bits as many as make 64 bytes of x in a row, since memory is read by 32.
    """
    words = width * (2 if bits == 3 else bits) // 32
    return min(16 if bits == 8 else 4, words & -words)


def grouped_cut(N: int, E: int, bits: int) -> dict:
    """How `grouped` cuts its work: constants and options of the kernel. Plain weights are read fast by long rows."""
    if bits >= 16:
        few = {"BM": 16, "BN": 64, "BK": 4096 // bits} if N <= 16 * E else {"BM": 64, "BN": 128, "BK": 1024 // bits}
        return few | {"num_warps": 4, "num_stages": 3}
    rows = 128 if N > 64 * E else 64 if N > 16 * E else 16  # a tile of rows: most are empty where experts have few
    cut = {"BM": rows, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 4 if bits == 8 else 3}
    # Unpacking 4 bits and fewer takes longest: where experts have many rows, once for more of them.
    return cut | {"BM": 256, "num_warps": 8} if bits < 8 and N >= 256 * E else cut


def grouped(x: Tensor, group_ends: Tensor, parts: dict[str, Tensor], kind: str, bits: int, group: int,
            cut: dict | None = None) -> Tensor:  # fmt: skip
    """x [N, in], rows sorted by expert, those of e ending before group_ends[e] -> [N, out].

    Along `in`, x is in `packing.grouped_order`.
    parts: of a format of packing.py, [E, out, ...]. kind: its way of counting, as in packing.Format.
    Or "plain": codes are weights of x's dtype, x is as it is, and bits 16 or 32. cut: other than `grouped_cut`'s.
    """
    (N, width), (E, out) = x.shape, parts["codes"].shape[:2]
    most = N if x.element_size() == 2 else 64 * E  # fp32 has no tensor cores: larger tiles would not fit registers
    y, cut = x.new_empty(N, out), cut or grouped_cut(min(N, most), E, bits)
    codes = parts["codes"].view(torch.int16) if bits == 8 else parts["codes"]
    third = parts.get("third", codes)
    scale = parts.get("scale", codes)
    fine = [parts.get(name, scale) for name in ("scale_step", "scale_low", "zero", "zero_step", "zero_low")]
    grid = (min(N, triton.cdiv(N, cut["BM"]) + E), triton.cdiv(out, cut["BN"]))
    _grouped[grid](x.contiguous(), y, group_ends, codes, third, scale, *fine, OUT=out, IN=width, E=E,
                   E2=triton.next_power_of_2(E), BITS=bits, GROUP=group, KIND=kind, RUN=grouped_run(width, bits),
                   **cut)  # fmt: skip
    return y


# 4-bit products for one token ---------------------------------------------------------------------------------------
#
# At 4 bits a GPU runs out of instructions before it runs out of bandwidth, so the arithmetic is chosen for few of them.
# x becomes 16-bit integers, with one power of two for each 32 of them, those that one lane multiplies at a time. In
# that bf16 keeps all its digits over 7 binary orders, and what is smaller is right to 2 ** -15 of the largest.
# Two masks make bytes of a word's codes, and one instruction multiplies 2 bytes by 2 integers and adds up, exactly: no
# code is ever converted to a floating-point number.


@jit
def _add_word(word, x_even, x_odd, even, odd):
    """even + the sum of x times code over the even fields of a word, and odd + 16 times that over the odd ones.

    x_even, x_odd: four int16 in an int64.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 x<4>, bytes<2>, sum<2>;
        mov.b64 {x0, x1}, $3;
        mov.b64 {x2, x3}, $4;
        and.b32 bytes0, $2, 0x0F0F0F0F;
        and.b32 bytes1, $2, 0xF0F0F0F0;
        dp2a.lo.s32.u32 sum0, x0, bytes0, $5;
        dp2a.lo.s32.u32 sum1, x2, bytes1, $6;
        dp2a.hi.s32.u32 $0, x1, bytes0, sum0;
        dp2a.hi.s32.u32 $1, x3, bytes1, sum1;
        }""",
        "=r,=r,r,l,l,r,r", (word, x_even, x_odd, even, odd), dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@jit
def _add_e2m1(word, x_low, x_high, low, high, small, large, small_less, large_less):
    """low + the sum of x times (12 + twice the number) over the lower four codes of a word, high + that of the others.

    The table of 16 bytes (`_e2m1_table`) is two look-ups of 8, for codes of either sign. Each answers the other's codes
    by the sign of a byte eight times, which is zero for all of its bytes: so that both together are the one that knows
    the code. (Together by a sum, which another unit of the GPU makes than look-ups and shifts.)
    """
    return tl.inline_asm_elementwise(
        """{
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
        }""",
        "=r,=r,r,l,l,r,r,r,r,r,r", (word, x_low, x_high, low, high, small, large, small_less, large_less),
        dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@jit
def _e2m1_table(unknown):
    """12 + twice the number, of codes of magnitude 0 to 3 and 4 to 7, then of the same below zero: a byte each."""
    # Of a zero that the compiler does not know, in every lane: or it makes them anew for each look-up that reads them.
    nothing = tl.arange(0, 32)[None, None, :] * unknown
    return nothing + 0x0F0E0D0C, nothing + 0x18141210, nothing + 0x090A0B0C, nothing + 0x00040608


@jit
def _four(words, J: tl.constexpr, ROWS: tl.constexpr):
    """J * ROWS * 32 times 4 neighbours -> 4 tensors [J, ROWS, 32]."""
    even, odd = tl.split(tl.reshape(words, [J, ROWS, 32, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit
def _whole_numbers(x, inside, stride: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr):
    """x at words [quads, 4], as `_add_word` or `_add_e2m1` wants it; what 1 of it is worth, sums of x, [J, 1, 32]."""
    largest, total = tl.zeros(x.shape, tl.float32), tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(8):
        values = tl.abs(tl.load(x + k * stride, mask=inside, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, values, propagate_nan=tl.PropagateNan.ALL)
    exponent = tl.max(largest.to(tl.int32, bitcast=True), 1, keep_dims=True) >> 23
    # The largest goes to [2 ** 14, 2 ** 15): a power of two, made of its exponent. Numbers below 2 ** -107 become 0.
    unit = ((tl.maximum(exponent, 20) - 14) << 23).to(tl.float32, bitcast=True)
    inverse = ((268 - tl.maximum(exponent, 20)) << 23).to(tl.float32, bitcast=True)
    unit = tl.where(exponent == 255, float("nan"), unit)  # where x is infinite or no number, so is every row
    even, odd = total.to(tl.int64), total.to(tl.int64)
    for k in tl.static_range(8):
        # 1.5 * 2 ** 23 rounds to a whole number, and leaves it in the lowest bits.
        values = tl.load(x + k * stride, mask=inside, other=0.0).to(tl.float32) * inverse + 12582912.0
        number = values.to(tl.int32, bitcast=True) - 0x4B400000
        total += number
        plane = (number & 0xFFFF).to(tl.int64)
        if KIND == "mxfp4":  # of which the lower four come first, then the upper ones
            plane = plane << k % 4 * 16
            even, odd = (even | plane, odd) if k < 4 else (even, odd | plane)
        else:
            plane = plane << k // 2 * 16
            even, odd = (even | plane, odd) if k % 2 == 0 else (even, odd | plane)
    total = tl.sum(total, 1, keep_dims=True).to(tl.float32) * unit
    return _four(even, J, 1), _four(odd, J, 1), tl.reshape(unit, [J, 1, 32]), tl.reshape(total, [J, 1, 32])


@jit
def _place(quad, last, BM: tl.constexpr, HALF: tl.constexpr, UP: tl.constexpr):
    """Quads of a block, J * BM * 32 -> their row, from the block's first, and which of the row's quads."""
    # Flat, with lanes along `in` and warps along rows: every lane has 4 neighbours, and no sum needs two warps.
    row = quad // 32 % BM
    return row // HALF * UP + row % HALF, tl.minimum(quad // (32 * BM) * 32 + quad % 32, last)


@jit
def _block(codes, scale, fine, row, rows, words, groups, W: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr):
    """What is stored of the rows from `row` on: codes, scales; with zeros what makes numbers of both."""
    # Four words of a lane are one aligned load, which the compiler does not see through their indices.
    code = tl.load(tl.max_contiguous(tl.multiple_of(codes + row * W + words, 16), 4))
    factor = tl.load(scale + row * GROUPS + groups)
    if KIND != "hqq":
        return code, factor
    else:
        scale_step, scale_low, zero, zero_step, zero_low = fine
        at = row + rows
        return (code, factor, tl.load(scale_step + at), tl.load(scale_low + at), tl.load(zero + row * GROUPS + groups),
                tl.load(zero_step + at), tl.load(zero_low + at))  # fmt: skip


@jit
def _dot4(x, index, codes, scale, scale_step, scale_low, zero, zero_step, zero_low, y, unknown, OUT: tl.constexpr,
          IN: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr,
          GATED: tl.constexpr, PDL: tl.constexpr, CHUNK: tl.constexpr, J: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    # A program makes blocks of BM rows, of one chunk of `in` and one expert, and keeps x of that in registers.
    W: tl.constexpr = IN // 8
    RUN: tl.constexpr = GROUP // 8
    GROUPS: tl.constexpr = IN // GROUP
    ROWS: tl.constexpr = OUT // 2 if GATED else OUT  # of the result
    HALF: tl.constexpr = BM // 2 if GATED else BM  # a block's rows of gate and as many of up, or all
    fine = (scale_step, scale_low, zero, zero_step, zero_low)
    part, pair, step = tl.program_id(1), tl.program_id(2), tl.num_programs(0)
    first = 0
    if EXPERTS:
        if PDL:
            tl.extra.cuda.gdc_wait()
        first = tl.load(index + pair) * OUT
    start = part * CHUNK
    last = (CHUNK if W % CHUNK == 0 else tl.minimum(CHUNK, W - start)) // 4 - 1  # lanes beyond read it, with x = 0
    at = tl.arange(0, J * BM * 128)
    row, quad = _place(at // 4, last, BM, HALF, ROWS)
    words = row * W + start + quad * 4 + at % 4
    row, quad = _place(tl.arange(0, J * BM * 32), last, BM, HALF, ROWS)
    groups = row * GROUPS + (start + quad * 4) // RUN
    rows = (tl.arange(0, BM) // HALF * ROWS + tl.arange(0, BM) % HALF)[None, :, None]
    # The last block begins early enough to be whole: some of its rows are made twice.
    row = tl.minimum(tl.program_id(0) * HALF, ROWS - HALF)
    ahead = _block(codes, scale, fine, first + row, rows, words, groups, W, GROUPS, KIND)
    if PDL and not EXPERTS:
        tl.extra.cuda.gdc_wait()
    quads = tl.arange(0, J * 32)[:, None]
    word = start + quads * 4 + tl.arange(0, 4)[None, :]
    x += pair // PAIRS * IN + word // RUN * GROUP + word % RUN
    x_even, x_odd, unit, sum_x = _whole_numbers(x, quads <= last, RUN, J, KIND)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if KIND == "mxfp4":
        small, large, small_less, large_less = _e2m1_table(unknown)
    for block in range(tl.program_id(0), tl.cdiv(ROWS, HALF), step):
        even = tl.zeros([J, BM, 32], tl.int32)
        odd, code = even, _four(ahead[0], J, BM)
        for i in tl.static_range(4):
            if KIND == "mxfp4":
                even, odd = _add_e2m1(code[i], x_even[i], x_odd[i], even, odd, small, large, small_less, large_less)
            else:
                even, odd = _add_word(code[i], x_even[i], x_odd[i], even, odd)
        factor = tl.reshape(ahead[1], [J, BM, 32])
        if KIND == "mxfp4":
            total = (even + odd).to(tl.float32) * (unit * 0.5)
            factor = _power_of_two(factor)
        else:
            total = (even * 16 + odd).to(tl.float32) * (unit * 0.0625)
            factor = factor.to(tl.float32)
        if KIND == "int4":
            total = (total - 8.0 * sum_x) * factor
        elif KIND == "mxfp4":
            total = (total - 6.0 * sum_x) * factor
        else:
            offset = tl.reshape(ahead[4], [J, BM, 32]).to(tl.float32) * ahead[5] + ahead[6]
            total = (total - offset * sum_x) * (factor * ahead[2] + ahead[3])
        out = y + (part * tl.num_programs(2) + pair).to(tl.int64) * ROWS + row
        if block + step < tl.cdiv(ROWS, HALF):  # the registers of this block are free for the next
            row = tl.minimum((block + step) * HALF, ROWS - HALF)
            ahead = _block(codes, scale, fine, first + row, rows, words, groups, W, GROUPS, KIND)
        total = tl.sum(tl.sum(total, 0), 1)
        if GATED:
            gate, up = tl.split(tl.trans(tl.reshape(total, [2, HALF])))
            total = gate / (1.0 + tl.exp(-gate)) * up
        # Stored by the first lane of those that have it, or warps would have to wait for each other.
        lane = tl.arange(0, HALF * 32)
        total = tl.reshape(tl.broadcast_to(total[:, None], [HALF, 32]), [HALF * 32])
        tl.store(out + lane // 32, total.to(y.dtype.element_ty), mask=lane % 32 == 0)


def dot4_supports(x: Tensor, out: int, group: int, gated: bool = False) -> bool:
    """Whether `dot4` can multiply x [M, in] with weights [..., out, in] in groups of that size."""
    fits = x.shape[-1] <= 4096 if gated else True  # SwiGLU needs whole sums, which one program can make of so many
    return triton is not None and x.dtype in (torch.bfloat16, torch.float16) and group % 32 == 0 and out >= 16 and fits


def dot4_cut(out: int, width: int, pairs: int, kind: str, gated: bool, sms: int = 132, pieces: int = 0, block: int = 0,
             resident: int = 0, warps: int = 4) -> tuple[int, dict]:  # fmt: skip
    """How `dot4` cuts its work: programs, constants and options of the kernel. Of shapes alone, so that sums agree.

    sms: of the GPU. pieces: of 1024 numbers, at most so many a program. block: rows a program makes at a time.
    resident: programs an SM has at a time. 0: what was fastest on an H200 (benchmarks/dot4.py).
    """
    # Fewer pieces leave registers for more programs; where 4 hold a row, no sums are left to be added by a kernel more.
    pieces = pieces or (1 if kind == "mxfp4" and not gated else 4 if width <= 4096 else 2)
    chunks = triton.cdiv(width, 1024 * pieces)
    chunk = triton.cdiv(width // 8, 4 * chunks) * 4
    pieces, each = triton.next_power_of_2(triton.cdiv(chunk, 128)), chunks * pairs
    long = triton.cdiv(out, 8) * each > 24 * sms
    block = block or (16 if pieces == 1 or (pieces == 2 and long) else 8)
    blocks = triton.cdiv(out, block)
    # A block for each program if the GPU holds so many at a time; else nearly the same number of blocks for each.
    most = resident or (3 if pieces > 2 else 6 if kind == "int4" else 4)
    turns = 1 if blocks * each <= sms * most else triton.cdiv(blocks * each, sms * (resident or min(most, 4)))
    registers = 168 if pieces > 2 and warps == 4 else None  # as many as 3 programs have
    constants = {"CHUNK": chunk, "J": pieces, "BM": block, "num_warps": warps, "maxnreg": registers}
    return triton.cdiv(blocks, turns), constants


def dot4_launch(x: Tensor, parts: list[Tensor], index: Tensor | None, kind: str, group: int, gated: bool, pdl: bool,
                cut: tuple[int, dict]) -> Tensor:  # fmt: skip
    """`dot4`, cut as `dot4_cut` says. pdl: started while the kernel before ends, on GPUs that know how to."""
    codes, scale, *fine = parts
    (M, width), out, pairs = x.shape, codes.shape[-2], 1 if index is None else index.numel()
    # int4 and mxfp4 have no zeros, a dense weight no index: what stands in for them is not read.
    fine = fine or [scale] * 5
    programs, constants = cut
    chunks = triton.cdiv(width // 8, constants["CHUNK"])
    y = x.new_empty(pairs, out // 2) if gated else x.new_empty(chunks, pairs, out, dtype=torch.float32)
    _dot4[programs, chunks, pairs](
        x, codes if index is None else index, codes, scale, *fine, y, 0, OUT=out, IN=width, GROUP=group, KIND=kind,
        PAIRS=pairs // M, EXPERTS=index is not None, GATED=gated, PDL=pdl, launch_pdl=pdl, num_stages=1, **constants,
    )  # fmt: skip
    return y


@torch.library.custom_op("moe_fast::dot4", mutates_args=())
def dot4(x: Tensor, parts: list[Tensor], index: Tensor | None, kind: str, group: int, gated: bool) -> Tensor:
    """x [M, in] times 4-bit weights [E, out, in], those of expert index[n] for pair n -> fp32 [S, N, out], to be added.

    x: bf16 or fp16, contiguous. index: int64, N in all: pair n is of row n // (N // M) of x. None: one weight
    [out, in], and N = M = 1. parts: of a format of packing.py, in its layout's order. kind: "int4", "mxfp4" or "hqq".
    gated: the rows are w1's and then w3's, and the result is SwiGLU, x.dtype [N, out / 2].
    On Hopper it is set up, and loads its first weights, while the kernel before it ends: that one must not write them.
    """
    pairs = 1 if index is None else index.numel()
    gpu = torch.cuda.get_device_properties(x.device)
    cut = dot4_cut(parts[0].shape[-2], x.shape[-1], pairs, kind, gated, gpu.multi_processor_count)
    return dot4_launch(x, parts, index, kind, group, gated, gpu.major >= 9, cut)


@dot4.register_fake
def _(x: Tensor, parts: list[Tensor], index: Tensor | None, kind: str, group: int, gated: bool) -> Tensor:
    out, pairs = parts[0].shape[-2], 1 if index is None else index.numel()
    if gated:
        return x.new_empty(pairs, out // 2)
    chunks = triton.cdiv(x.shape[-1] // 8, dot4_cut(out, x.shape[-1], pairs, kind, gated)[1]["CHUNK"])
    return x.new_empty(chunks, pairs, out, dtype=torch.float32)


# Attention over a cache in 8 bits -------------------------------------------------------------------------------------


@jit
def _weigh(scores, largest, total):
    """A softmax over one block of positions after the other: the block's scores [M, N], the largest score and the sum
    of weights so far [M] -> the block's weights, by what to multiply all that was before, and the two with it."""
    now = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(now == float("-inf"), 0.0, now)
    weights, kept = tl.exp(scores - base[:, None]), tl.exp(largest - base)
    return weights, kept, now, total * kept + tl.sum(weights, 1)


@jit
def _attend_int8(q, codes, scales, positions, y, sums, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
                 C: tl.constexpr, Q: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
                 VALUES: tl.constexpr):  # fmt: skip
    # A program has one sequence's KV head, and every so manieth block of the positions that its queries see.
    pair, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    G: tl.constexpr = H // K
    row, c = tl.arange(0, M), tl.arange(0, C)
    query, present = row % Q, row < G * Q  # rows: the heads of a KV head, and of each all queries
    place = pair // K * Q + query
    at = tl.load(positions + place, mask=present, other=0)
    last = tl.load(positions + pair // K * Q + Q - 1)
    first = tl.maximum(tl.load(positions + pair // K * Q) - WINDOW + 1, 0) // BLOCK
    head = pair % K * G + row // Q
    queries = tl.load(q + (place * H + head)[:, None] * C + c[None, :], mask=present[:, None], other=0.0)
    largest, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    found = tl.zeros([M, C], tl.float32)
    for block in range(first + part, last // BLOCK + 1, parts):
        key = block * BLOCK + tl.arange(0, BLOCK)
        line = pair * S + key
        k = tl.load(codes + line[:, None] * C + c[None, :]).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(k)) * (tl.load(scales + line).to(tl.float32) * C**-0.5)[None, :]
        distance = at[:, None] - key[None, :]
        scores = tl.where((distance >= 0) & (distance < WINDOW), scores, float("-inf"))
        weights, kept, largest, total = _weigh(scores, largest, total)
        weights *= tl.load(scales + VALUES + line).to(tl.float32)[None, :]
        v = tl.load(codes + VALUES * C + line[:, None] * C + c[None, :]).to(queries.dtype)
        found = found * kept[:, None] + tl.dot(weights.to(queries.dtype), v)
    line = (pair * parts + part) * M + row
    tl.store(y + line[:, None] * C + c[None, :], found)
    tl.store(sums + line * 2, largest)
    tl.store(sums + line * 2 + 1, total)


@torch.library.custom_op("moe_fast::attend_int8", mutates_args=())
def attend_int8(q: Tensor, codes: Tensor, scales: Tensor, positions: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Queries [B, Q, H, C] at rising positions [B, Q] over codes [2, B, K, S, C] with scales [2, B, K, S, 1].

    -> fp32 [B, K, parts, M, C], and [.., M, 2] of the largest score and the sum of exp(score less that), by parts of
    the positions; row h * Q + q of M is of the KV head's h-th head, others are undefined. Only blocks in use are read,
    each once (Dao et al. 2023, "Flash-Decoding"). S is a multiple of 128.
    """
    (B, Q, H, C), (K, S) = q.shape, codes.shape[2:4]
    y, sums = _attend_int8_fake(q, codes, scales, positions, window)
    _attend_int8[(B * K, y.shape[2])](
        q.contiguous(), codes, scales, positions.contiguous(), y, sums, S=S, H=H, K=K, C=C, Q=Q, WINDOW=window,
        M=y.shape[3], BLOCK=128, VALUES=B * K * S, num_warps=4 if y.shape[3] == 16 else 8, num_stages=2,
    )  # fmt: skip
    return y, sums


@attend_int8.register_fake
def _attend_int8_fake(q: Tensor, codes: Tensor, scales: Tensor, positions: Tensor, window: int):
    (B, Q, H, C), K = q.shape, codes.shape[2]
    M = max(16, triton.next_power_of_2(H // K * Q))
    y = q.new_empty(B, K, max(1, 256 // (B * K)), M, C, dtype=torch.float32)  # parts: two for each SM
    return y, y.new_empty(*y.shape[:-1], 2)


@jit
def _attend_latent(q, kv, scales, positions, y, sums, S: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
                   R: tl.constexpr, Q: tl.constexpr, INT8: tl.constexpr, M: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    # A program has M of one sequence's Q * H rows of queries, and every so manieth block of the positions they see.
    sequence, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, c, r = tl.program_id(2) * M + tl.arange(0, M), tl.arange(0, C), tl.arange(0, R)
    present = row < Q * H
    at = tl.load(positions + sequence * Q + row // H, mask=present, other=0)
    last = tl.load(positions + sequence * Q + Q - 1)
    of_row = q + (sequence * Q * H + row)[:, None] * (C + R)
    queries = tl.load(of_row + c[None, :], mask=present[:, None], other=0.0)
    turned = tl.load(of_row + C + r[None, :], mask=present[:, None], other=0.0)
    largest, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    found = tl.zeros([M, C], tl.float32)
    for block in range(part, last // BLOCK + 1, parts):
        key = block * BLOCK + tl.arange(0, BLOCK)
        of_key = kv + (sequence * S + key)[:, None] * (C + R)
        latent = tl.load(of_key + c[None, :]).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(latent))
        scores = tl.dot(turned, tl.trans(tl.load(of_key + C + r[None, :]).to(queries.dtype)), scores)
        scores *= (C + R) ** -0.5
        if INT8:
            scale = tl.load(scales + sequence * S + key).to(tl.float32)[None, :]
            scores *= scale
        scores = tl.where(at[:, None] >= key[None, :], scores, float("-inf"))
        weights, kept, largest, total = _weigh(scores, largest, total)
        if INT8:
            weights *= scale
        found = found * kept[:, None] + tl.dot(weights.to(queries.dtype), latent)
    line = ((sequence * parts + part) * tl.num_programs(2) + tl.program_id(2)) * M + tl.arange(0, M)
    tl.store(y + line[:, None] * C + c[None, :], found)
    tl.store(sums + line * 2, largest)
    tl.store(sums + line * 2 + 1, total)


@torch.library.custom_op("moe_fast::attend_latent", mutates_args=())
def attend_latent(q: Tensor, kv: Tensor, scales: Tensor | None, positions: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Queries [B, Q, H, r + R] at rising positions [B, Q] over kv [1, B, 1, S, r + R], whose first r are values too.

    scales: [1, B, 1, S, 1] of an int8 kv. -> fp32 [B, parts, rows, r], and [.., rows, 2] of the largest score and the
    sum of exp(score less that), as `attend_int8`; row q * H + h, others are undefined. Only blocks in use are read,
    once for up to 32 rows. r and R are powers of two from 16 on, S a multiple of 32.
    """
    (B, Q, H, C), S = q.shape, kv.shape[3]
    y, sums = _attend_latent_fake(q, kv, scales, positions, rank)
    M = latent_rows(Q * H)
    _attend_latent[(B, y.shape[1], y.shape[2] // M)](
        q.contiguous(), kv, kv if scales is None else scales, positions.contiguous(), y, sums, S=S, H=H, C=rank,
        R=C - rank, Q=Q, INT8=scales is not None, M=M, BLOCK=32 if kv.element_size() < 4 else 16,
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return y, sums


def latent_rows(rows: int) -> int:
    """How many of so many rows of queries a program has."""
    return min(32, max(16, triton.next_power_of_2(rows)))


@attend_latent.register_fake
def _attend_latent_fake(q: Tensor, kv: Tensor, scales: Tensor | None, positions: Tensor, rank: int):
    (B, Q, H, _), M = q.shape, latent_rows(q.shape[1] * q.shape[2])
    programs = -(-Q * H // M)
    y = q.new_empty(B, max(1, 256 // (B * programs)), programs * M, rank, dtype=torch.float32)
    return y, y.new_empty(*y.shape[:-1], 2)
