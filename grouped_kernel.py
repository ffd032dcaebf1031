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
def _down(units, COUNT: tl.constexpr):
    """int16 `units` with so many bits less below, and above them bits of no meaning: two at a time."""
    return tl.inline_asm_elementwise(f"shr.u32 $0, $1, {COUNT};", "=r,r", (units,), tl.int16, is_pure=True, pack=2)


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
def _floats(units, BITS: tl.constexpr, MANTISSA: tl.constexpr, FACTOR: tl.constexpr):
    """The lowest BITS of int16 `units`, floating-point numbers, as bf16: two at a time.

    Their bits are those of a bf16 number, a power of two smaller. FACTOR: the bits of what brings it back.
    """
    return tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 sign, bits, factor, none;
        mov.b32 factor, {FACTOR * 65537};
        mov.b32 none, 0x80008000;
        shl.b32 sign, $1, {16 - BITS};
        shl.b32 bits, $1, {7 - MANTISSA};
        and.b32 bits, bits, {(2 ** (BITS - 1) - 1 << 7 - MANTISSA) * 65537};
        lop3.b32 bits, sign, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $0, bits, factor, none;
        }}""", "=r,r", (units,), dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@jit
def _fields(units, MASK: tl.constexpr):
    """128 + the bits of int16 `units` below MASK, as bf16: two at a time."""
    return tl.inline_asm_elementwise(
        f"lop3.b32 $0, $1, {MASK * 65537}, 0x43004300, 0xEA;", "=r,r", (units,), tl.bfloat16, is_pure=True, pack=2
    )


@jit
def _fields_3(units, thirds):
    """128 + the lowest 2 bits of int16 `units` + 4 times bit 2 of `thirds`, as bf16: two at a time."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low;
        lop3.b32 low, $1, 0x00030003, 0x43004300, 0xEA;
        lop3.b32 $0, $2, 0x00040004, low, 0xEA;
        }""", "=r,r,r", (units, thirds), dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@jit
def _wide(numbers):
    """bf16 -> fp32: two at a time."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", (numbers,), tl.float32, is_pure=True, pack=2
    )


@jit
def _numbers(units, thirds, BITS: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of the lowest fields of int16 `units`; 2 ** -8 of them in fp8, and in hqq codes, in bf16 128 more.

    As fp32 where what they are multiplied by has more digits than DTYPE.
    """
    if tl.bfloat16 == DTYPE:
        if KIND == "int8":
            return _signed_bytes(units)
        elif BITS == 8:  # 2 ** -120 of it, times 2 ** 112
            numbers = _floats(units, 8, 3, 0x7780)
            return _wide(numbers) if KIND == "fp8b" else numbers
        elif KIND == "mxfp4":  # 2 ** -126 of it
            return _floats(units, 4, 1, 0x7E80)
        elif BITS == 3:
            return _wide(_fields_3(units, thirds))
        elif KIND == "int4":
            return _fields(units, 15) - 136.0
        else:
            return _wide(_fields(units, 2**BITS - 1))
    elif KIND == "int8":
        bits = (units & 0xFF) ^ 0x6480  # of 1024 + 128 + the number
        return (bits.to(tl.float16, bitcast=True) - 1152.0).to(DTYPE)
    elif BITS == 8:  # its bits as those of an fp16 number, 2 ** -8 of it
        bits = ((units & 0x80) << 8) | ((units & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(DTYPE)
    elif KIND == "mxfp4":  # 2 ** -14 of it
        bits = ((units & 8) << 12) | ((units & 7) << 9)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        code = units & (3 if BITS == 3 else 2**BITS - 1)
        if BITS == 3:
            code |= thirds & 4
        return code.to(tl.float32) - (8.0 if KIND == "int4" else 0.0)


@jit
def _each_unit(values, COUNT: tl.constexpr):
    """[BN, n], each for as many neighbouring units -> one for each of COUNT units, [BN, COUNT]."""
    BN: tl.constexpr = values.shape[0]
    n: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], [BN, n, COUNT // n]), [BN, COUNT])


@jit
def _thirds(third, rows, start, IN: tl.constexpr, BK: tl.constexpr):
    """The third bits of the BK numbers from `start` on, [BN, units]: bit 2 + 8 b + k is field 4 b + k's."""
    # In memory bits 8 b + 4 m + k of units 0 and 1 are of units 2 m and 2 m + 1. What is loaded at all tells m, not a
    # shift: Triton 3.6 moves loads to the lanes that multiply what they loaded, but nothing that knows its place.
    unit = start // 8 + tl.arange(0, BK // 8)[None, :]
    place, m = rows * (IN // 16) + unit // 4 * 2 + unit % 2, unit // 2 % 2
    low = tl.load(third + place, mask=(m == 0) & (unit < IN // 8), other=0)
    high = tl.load(third + place, mask=(m == 1) & (unit < IN // 8), other=0)
    return (low << 2) | (high >> 2)


@jit
def _scales(scale, zero, rows, start, IN: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr):
    """As stored, scales and zeros of the groups that the BK numbers from `start` on are of, [BN, n]."""
    UNITS: tl.constexpr = GROUP // FIELDS  # of a group
    # So many neighbours are of one, wherever a tile begins; or half a tile, or Triton 3.6 moves not one scale a row to
    # where it is multiplied, but all products, through shared memory.
    EACH: tl.constexpr = min(BK // FIELDS // 2, UNITS & -UNITS)
    group = (start // FIELDS + tl.arange(0, BK // FIELDS // EACH)[None, :] * EACH) // UNITS
    group = rows * (IN // GROUP) + tl.minimum(group, IN // GROUP - 1)
    return tl.load(scale + group), tl.load(zero + group)


@jit
def _factors(scale, zero, scale_step, scale_low, zero_step, zero_low, rows, COUNT: tl.constexpr, KIND: tl.constexpr,
             DTYPE: tl.constexpr):  # fmt: skip
    """By what to multiply the numbers of COUNT units, and what to take off then, of such `_scales`."""
    less = 0.0
    if KIND == "mxfp4":
        scale = power_of_two(scale).to(tl.bfloat16 if tl.bfloat16 == DTYPE else tl.float32)
    elif KIND == "hqq":
        scale = scale.to(tl.float32) * tl.load(scale_step + rows) + tl.load(scale_low + rows)
        zero = zero.to(tl.float32) * tl.load(zero_step + rows) + tl.load(zero_low + rows)
        less = _each_unit((zero + (128.0 if tl.bfloat16 == DTYPE else 0.0)) * scale, COUNT)
    return _each_unit(scale, COUNT), less


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
        DTYPE: tl.constexpr = x.dtype.element_ty
        PACKED: tl.constexpr = KIND != "plain"
        FIELDS: tl.constexpr = 16 // (2 if BITS == 3 else BITS) if PACKED else 1  # of a unit
        # Packed weights are unpacked in registers, from which a tensor core takes its left operand alone.
        sums = tl.zeros([BN, BM] if PACKED else [BM, BN], tl.float32)
        if PACKED and BITS < 8:  # loaded a step ahead: they are too small for the compiler to copy them ahead
            scales_ahead, zeros_ahead = _scales(scale, zero, weight_rows, 0, IN, FIELDS, GROUP, BK)
        for start in range(0, IN, BK):
            unit = start // FIELDS + tl.arange(0, BK // FIELDS)[None, :]
            inside = unit < IN // FIELDS if IN % BK else None
            if PACKED:
                units = tl.load(codes + weight_rows * (IN // FIELDS) + unit, mask=inside)
                thirds = units
            if BITS == 3:
                thirds = _thirds(third, weight_rows, start, IN, BK)
            if KIND == "fp8b":  # a scale for each block of GROUP rows and columns
                block = start // GROUP if GROUP % BK == 0 else tl.minimum(2 * unit, IN - 1) // GROUP
                factor = tl.load(scale + scale_rows * (IN // GROUP) + block) * 256.0
            elif BITS < 8:
                factor, less = _factors(scales_ahead, zeros_ahead, scale_step, scale_low, zero_step, zero_low,
                                        weight_rows, BK // FIELDS, KIND, DTYPE)  # fmt: skip
                scales_ahead, zeros_ahead = _scales(scale, zero, weight_rows, start + BK, IN, FIELDS, GROUP, BK)
            # Weights stay in registers, which a tensor core reads until its product is waited for. So each field has a
            # product: the compiler waits for one before it unpacks the next one's weights. One product it cut into
            # pieces, and Triton 3.6 wrote to registers that were still read.
            for field in tl.static_range(FIELDS):
                k = (unit // RUN * FIELDS + field) * RUN + unit % RUN if PACKED else unit
                a = tl.load(x + rows.to(tl.int64) * IN + k, mask=present & (k < IN) if IN % BK else present, other=0.0)
                if PACKED:
                    b = _numbers(units, thirds, BITS, KIND, DTYPE)
                    if KIND == "hqq":
                        b = (b * factor - less).to(DTYPE)
                    elif KIND == "fp8b" or BITS < 8:
                        b = (b * factor).to(DTYPE)
                    units = _down(units, 16 // FIELDS)
                    if BITS == 3:
                        thirds = _down(thirds, 5 if field == 3 else 1)
                    sums = tl.dot(b, tl.trans(a), sums, input_precision="ieee")
                else:
                    b = tl.load(codes + weight_rows * IN + k, mask=inside)
                    sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
        sums = tl.trans(sums) if PACKED else sums
        if KIND == "int8" or KIND == "fp8":
            factor = tl.load(scale + expert.to(tl.int64) * OUT + tl.minimum(n, OUT - 1)).to(tl.float32)
            sums *= (factor * (256.0 if KIND == "fp8" else 1.0))[None, :]
        tl.store(
            y + rows.to(tl.int64) * OUT + n[None, :], sums.to(y.dtype.element_ty), mask=present & (n < OUT)[None, :]
        )


def grouped_run(width: int, bits: int) -> int:
    """Of how many neighbouring int16 units `grouped` unpacks a field side by side: as many as make 64 bytes of x."""
    units = width * (2 if bits == 3 else bits) // 16
    return min(32, units & -units)


def grouped_cut(N: int, E: int, bits: int) -> dict:
    """How `grouped` cuts its work: constants and options of the kernel. Plain weights are read fast by long rows."""
    if bits >= 16:
        few = {"BM": 16, "BN": 64, "BK": 4096 // bits} if N <= 16 * E else {"BM": 64, "BN": 128, "BK": 1024 // bits}
        return few | {"num_warps": 4, "num_stages": 3}
    rows = 128 if N > 64 * E else 64 if N > 16 * E else 16  # a tile of rows: most are empty where experts have few
    if bits == 8:
        return {"BM": rows, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 4}
    # Unpacking fewer bits takes longer: where experts have many rows, once for more of them.
    rows = 256 if N >= 256 * E else rows
    # A field's 16 x 16 numbers of x would be 2 bytes a lane, which cannot be copied ahead.
    width = 256 if rows == 16 and bits < 4 else 128
    return {"BM": rows, "BN": 128, "BK": width, "num_warps": 8, "num_stages": 3}


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
    codes, third = (parts.get(name, parts["codes"]) for name in ("codes", "third"))
    if bits < 16:
        codes, third = codes.view(torch.int16), third.view(torch.int16)
    scale = parts.get("scale", codes)
    fine = [parts.get(name, scale) for name in ("scale_step", "scale_low", "zero", "zero_step", "zero_low")]
    grid = (min(N, triton.cdiv(N, cut["BM"]) + E), triton.cdiv(out, cut["BN"]))
    _grouped[grid](x.contiguous(), y, group_ends, codes, third, scale, *fine, OUT=out, IN=width, E=E,
                   E2=triton.next_power_of_2(E), BITS=bits, GROUP=group, KIND=kind, RUN=grouped_run(width, bits),
                   **cut)  # fmt: skip
    return y
