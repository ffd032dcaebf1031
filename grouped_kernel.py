"""The product of several tokens with packed weights, expert by expert, as a Triton kernel.

`F.grouped_mm` wants plain weights, and unpacking those of all experts first would take the memory that packing saved;
here each tile is unpacked in registers. Of plain weights it is for a batch's few tokens, with which the library reads
at half of the memory's speed. The formats stand in packing.py; tests hold it to their unpack.
"""

from __future__ import annotations  # the annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from kernels import jit, power_of_two, tl, triton


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
        return tl.reshape(number * _each_word(power_of_two(tl.load(scale + group)), PLACES), [BN, BK])
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
