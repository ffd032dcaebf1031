"""Grouped GEMM: rows sorted by expert times stacked weights, plain or packed, as a Triton kernel.

`F.grouped_mm` takes plain weights only; unpacking the weights of all experts first would use the
memory that packing saved. This kernel dequantizes each tile in registers. It also multiplies plain
weights if experts have few rows, for which the library reads at half of the memory's bandwidth.

Codes are loaded as int16 units. The inline assembly works on two units of a 32-bit word at once.
Only the left operand of a tensor core can come from registers, so packed weights are the left
operand and the sums are transposed at the end. Formats are in formats/; tests compare the kernel
with their `unpack`.

Letters: N rows of x, E experts. A tile has BM rows of x and BN outputs; a step covers BK numbers
along `in`.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.gpu import gpu_of
from ops.inductor import custom_op
from ops.launch import can_launch, e8m0_to_float, fit_tiling, jit, tl, triton, try_kernels

# Average rows of x for each expert, up to which the kernel is faster than the library with plain
# weights (H200).
FEW_ROWS = 64
GROUPED = "grouped GEMM"  # begins the names by which `try_kernels` knows uses of the kernel

# Dequantizing ------------------------------------------------------------------------------------


@jit
def _shift_right(units, COUNT: tl.constexpr):
    """Shift int16 units right by COUNT, two at a time; the upper bits become garbage."""
    return tl.inline_asm_elementwise(
        f"shr.u32 $0, $1, {COUNT};", "=r,r", (units,), tl.int16, is_pure=True, pack=2
    )


@jit
def _signed_bytes(units):
    """Convert the lower bytes of int16 units, signed numbers, to bf16, two at a time."""
    # 128 + the lower 7 bits, minus 128, or minus 256 for a negative number: all exact.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, sign, minus;
        mov.b32 minus, 0xBF80BF80;
        lop3.b32 low, $1, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 sign, $1, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, sign, minus, low;
        }""",
        "=r,r",
        (units,),
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@jit
def _floats(units, BITS: tl.constexpr, MANTISSA: tl.constexpr, FACTOR: tl.constexpr):
    """Convert the lowest BITS of int16 units, small floating-point numbers, to bf16, two at a time.

    Shifted into the fields of a bf16 number, they are too small by a power of two. FACTOR has the
    bf16 bits of that power.
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
        }}""",
        "=r,r",
        (units,),
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@jit
def _fields(units, MASK: tl.constexpr):
    """Return 128 + (units & MASK) of int16 units as bf16, two at a time."""
    return tl.inline_asm_elementwise(
        f"lop3.b32 $0, $1, {MASK * 65537}, 0x43004300, 0xEA;",
        "=r,r",
        (units,),
        tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@jit
def _fields_3(units, thirds):
    """Return 128 + (units & 3) + (thirds & 4) as bf16, two at a time."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low;
        lop3.b32 low, $1, 0x00030003, 0x43004300, 0xEA;
        lop3.b32 $0, $2, 0x00040004, low, 0xEA;
        }""",
        "=r,r,r",
        (units, thirds),
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@jit
def _to_fp32(numbers):
    """Convert bf16 to fp32, two at a time."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
        "=r,=r,r",
        (numbers,),
        tl.float32,
        is_pure=True,
        pack=2,
    )


@jit
def _dequantize(units, thirds, BITS: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Convert the lowest field of each int16 unit to a number, not yet scaled.

    fp8 numbers are 2 ** -8 too small. hqq numbers are the codes, plus 128 if DTYPE is bf16. The
    result is fp32 if the scales have more digits than DTYPE.
    """
    if tl.bfloat16 == DTYPE:
        if KIND == "int8":
            return _signed_bytes(units)
        elif BITS == 8:  # 2 ** -120 too small, times 2 ** 112
            numbers = _floats(units, 8, 3, 0x7780)
            return _to_fp32(numbers) if KIND == "fp8b" else numbers
        elif KIND == "mxfp4":  # 2 ** -126 too small
            return _floats(units, 4, 1, 0x7E80)
        elif BITS == 3:
            return _to_fp32(_fields_3(units, thirds))
        elif KIND == "int4":
            return _fields(units, 15) - 136.0
        else:
            return _to_fp32(_fields(units, 2**BITS - 1))
    elif KIND == "int8":
        bits = (units & 0xFF) ^ 0x6480  # fp16 bits of 1024 + 128 + the number
        return (bits.to(tl.float16, bitcast=True) - 1152.0).to(DTYPE)
    elif BITS == 8:  # bits of an fp16 number, 2 ** -8 too small
        bits = ((units & 0x80) << 8) | ((units & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(DTYPE)
    elif KIND == "mxfp4":  # bits of an fp16 number, 2 ** -14 too small
        bits = ((units & 8) << 12) | ((units & 7) << 9)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        code = units & (3 if BITS == 3 else 2**BITS - 1)
        if BITS == 3:
            code |= thirds & 4
        return code.to(tl.float32) - (8.0 if KIND == "int4" else 0.0)


@jit
def _expand(values, COUNT: tl.constexpr):
    """[BN, n] -> [BN, COUNT]: repeat each value for COUNT / n neighboring units."""
    BN: tl.constexpr = values.shape[0]
    n: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], [BN, n, COUNT // n]), [BN, COUNT])


@jit
def _load_thirds(third, rows, start, IN: tl.constexpr, BK: tl.constexpr):
    """Load the third bits of BK numbers -> int16 [BN, units].

    Bit 2 + 8 b + k of a unit belongs to its field 4 b + k.
    """
    # In memory, bits 8 b + 4 m + k of units 0 and 1 belong to units 2 m and 2 m + 1. Select m by
    # the mask of the load, not by a shift: Triton 3.6 moves loads to the lanes that multiply what
    # they loaded, but moves nothing that depends on a position.
    unit = start // 8 + tl.arange(0, BK // 8)[None, :]
    place, m = rows * (IN // 16) + unit // 4 * 2 + unit % 2, unit // 2 % 2
    low = tl.load(third + place, mask=(m == 0) & (unit < IN // 8), other=0)
    high = tl.load(third + place, mask=(m == 1) & (unit < IN // 8), other=0)
    return (low << 2) | (high >> 2)


@jit
def _load_scales(
    scales,
    rows,
    start,
    IN: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUP: tl.constexpr,
    BK: tl.constexpr,
):
    """Load scales and zeros of the groups of BK numbers from `start` on -> [BN, n] each."""
    UNITS: tl.constexpr = GROUP // FIELDS  # units of a group
    # EACH units share a group, wherever a tile begins. At most half a tile: with one scale a row,
    # Triton 3.6 moves all products through shared memory instead of the scale.
    EACH: tl.constexpr = min(BK // FIELDS // 2, UNITS & -UNITS)
    group = (start // FIELDS + tl.arange(0, BK // FIELDS // EACH)[None, :] * EACH) // UNITS
    group = rows * (IN // GROUP) + tl.minimum(group, IN // GROUP - 1)
    return tl.load(scales[0] + group), tl.load(scales[3] + group)


@jit
def _group_factors(
    fetched, scales, rows, COUNT: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr
):
    """Convert the result of `_load_scales` to a factor and an offset for each of COUNT units.

    A weight is number * factor - offset, the number being from `_dequantize`.
    """
    scale, zero = fetched
    _, scale_step, scale_low, _, zero_step, zero_low = scales
    offset = 0.0
    if KIND == "mxfp4":
        scale = e8m0_to_float(scale).to(tl.bfloat16 if tl.bfloat16 == DTYPE else tl.float32)
    elif KIND == "hqq":
        scale = scale.to(tl.float32) * tl.load(scale_step + rows) + tl.load(scale_low + rows)
        zero = zero.to(tl.float32) * tl.load(zero_step + rows) + tl.load(zero_low + rows)
        offset = _expand((zero + (128.0 if tl.bfloat16 == DTYPE else 0.0)) * scale, COUNT)
    return _expand(scale, COUNT), offset


@jit
def _block_factor(
    scale, rows, unit, start, IN: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr
):
    """Load the factor of each unit of fp8b: a scale for each block of GROUP rows and columns."""
    block = start // GROUP if GROUP % BK == 0 else tl.minimum(2 * unit, IN - 1) // GROUP
    return tl.load(scale + rows * (IN // GROUP) + block) * 256.0


# Tiles -------------------------------------------------------------------------------------------


@jit
def _find_expert(tile, group_ends, E: tl.constexpr, E_POW2: tl.constexpr, BM: tl.constexpr):
    """Find a tile's expert; E if there is none. Also return the arguments of `_find_rows`.

    Each expert has the tiles that its rows need, and its tiles follow those of the expert before.
    """
    experts = tl.arange(0, E_POW2)
    ends = tl.load(group_ends + experts, mask=experts < E, other=0)
    starts = tl.load(group_ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles = (tl.maximum(ends - starts, 0) + BM - 1) // BM
    last = tl.cumsum(tiles, 0)
    expert = tl.sum(((last <= tile) & (experts < E)).to(tl.int32))
    return expert, (experts, starts, ends, tiles, last)


@jit
def _find_rows(tile, expert, groups, BM: tl.constexpr):
    """Return the rows of x [BM, 1] of a tile, and whether each is present."""
    experts, starts, ends, tiles, last = groups
    mine = experts == expert
    tile -= tl.sum(tl.where(mine, last - tiles, 0))
    row, end = tl.sum(tl.where(mine, starts, 0)) + tile * BM, tl.sum(tl.where(mine, ends, 0))
    rows = row + tl.arange(0, BM)[:, None]
    return rows, rows < end


@jit
def _multiply_fields(
    sums,
    numbers,
    x_tile,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    FIELDS: tl.constexpr,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    BK: tl.constexpr,
):
    """Add the products of all fields of packed units [BN, n] with x to the sums [BN, BM]."""
    units, thirds, factor, offset = numbers
    x, rows, present, unit = x_tile
    DTYPE: tl.constexpr = x.dtype.element_ty
    # One product per field: a tensor core reads the registers of its operand until the kernel
    # waits for it, and the compiler waits before it dequantizes the next field. It cut a single
    # product of all fields into several, and Triton 3.6 wrote to registers that were still being
    # read.
    for field in tl.static_range(FIELDS):
        k = (unit // RUN * FIELDS + field) * RUN + unit % RUN
        inside = present & (k < IN) if IN % BK else present
        a = tl.load(x + rows.to(tl.int64) * IN + k, mask=inside, other=0.0)
        b = _dequantize(units, thirds, BITS, KIND, DTYPE)
        if KIND == "hqq":
            b = (b * factor - offset).to(DTYPE)
        elif KIND == "fp8b" or BITS < 8:
            b = (b * factor).to(DTYPE)
        units = _shift_right(units, 16 // FIELDS)
        if BITS == 3:
            thirds = _shift_right(thirds, 5 if field == 3 else 1)
        sums = tl.dot(b, tl.trans(a), sums, input_precision="ieee")
    return sums


@jit
def _multiply_plain(sums, weight, weight_rows, inside, x_tile, IN: tl.constexpr, BK: tl.constexpr):
    """Add the product of x with plain weights to the sums [BM, BN]."""
    x, rows, present, k = x_tile
    x_inside = present & (k < IN) if IN % BK else present
    a = tl.load(x + rows.to(tl.int64) * IN + k, mask=x_inside, other=0.0)
    b = tl.load(weight + weight_rows * IN + k, mask=inside)
    return tl.dot(a, tl.trans(b), sums, input_precision="ieee")


@jit
def _store_tile(y, sums, scale, rows, present, n, OUT: tl.constexpr, KIND: tl.constexpr):
    """Store the sums of outputs n [BN]; for int8 and fp8 scale them by each weight row's scale."""
    sums = tl.trans(sums) if KIND != "plain" else sums
    if KIND == "int8" or KIND == "fp8":
        factor = tl.load(scale + tl.minimum(n, OUT - 1)).to(tl.float32)
        sums *= (factor * (256.0 if KIND == "fp8" else 1.0))[None, :]
    tl.store(
        y + rows.to(tl.int64) * OUT + n[None, :],
        sums.to(y.dtype.element_ty),
        mask=present & (n < OUT)[None, :],
    )


# Grid [T, out / BN]: a program computes one tile, of BM rows of x and BN outputs of one expert, in
# steps of BK numbers along `in`. T is an upper bound of the tiles of all experts.
#
# One kernel: its speed depends on the order of loads, prefetches and products. A reader should see
# that order whole. Formats differ in constexprs only.
@jit
def _grouped(
    x,
    y,
    group_ends,
    codes,
    third,
    scale,
    scale_step,
    scale_low,
    zero,
    zero_step,
    zero_low,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    PACKED: tl.constexpr = KIND != "plain"
    GROUPED: tl.constexpr = BITS < 8  # a scale for each group of numbers along `in`
    FIELDS: tl.constexpr = 16 // (2 if BITS == 3 else BITS) if PACKED else 1  # fields of a unit
    DTYPE: tl.constexpr = x.dtype.element_ty
    scales = (scale, scale_step, scale_low, zero, zero_step, zero_low)
    tile = tl.program_id(0)
    expert, groups = _find_expert(tile, group_ends, E, E_POW2, BM)
    if expert < E:
        rows, present = _find_rows(tile, expert, groups, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        weight_rows = expert.to(tl.int64) * OUT + tl.minimum(n, OUT - 1)[:, None]
        scale_rows = expert * tl.cdiv(OUT, GROUP) + tl.minimum(n, OUT - 1)[:, None] // GROUP
        sums = tl.zeros([BN, BM] if PACKED else [BM, BN], tl.float32)
        if GROUPED:  # prefetched one step ahead: too small for the compiler to pipeline
            fetched = _load_scales(scales, weight_rows, 0, IN, FIELDS, GROUP, BK)
        for start in range(0, IN, BK):
            unit = start // FIELDS + tl.arange(0, BK // FIELDS)[None, :]
            inside = unit < IN // FIELDS if IN % BK else None
            x_tile = (x, rows, present, unit)
            if PACKED:
                units = tl.load(codes + weight_rows * (IN // FIELDS) + unit, mask=inside)
                thirds = _load_thirds(third, weight_rows, start, IN, BK) if BITS == 3 else units
                factor, offset = 0.0, 0.0
                if KIND == "fp8b":
                    factor = _block_factor(scale, scale_rows, unit, start, IN, GROUP, BK)
                elif GROUPED:
                    factor, offset = _group_factors(
                        fetched, scales, weight_rows, BK // FIELDS, KIND, DTYPE
                    )
                    fetched = _load_scales(scales, weight_rows, start + BK, IN, FIELDS, GROUP, BK)
                numbers = (units, thirds, factor, offset)
                sums = _multiply_fields(sums, numbers, x_tile, IN, BITS, FIELDS, KIND, RUN, BK)
            else:
                sums = _multiply_plain(sums, codes, weight_rows, inside, x_tile, IN, BK)
        scale_row = scale + expert.to(tl.int64) * OUT
        _store_tile(y, sums, scale_row, rows, present, n, OUT, KIND)


# Launching ---------------------------------------------------------------------------------------


def grouped_run(width: int, bits: int) -> int:
    """Return RUN: the number of neighboring int16 units whose fields are neighbors in x.

    RUN neighboring units hold FIELDS * RUN neighboring numbers: field 0 of all units first, then
    field 1. At most 32, which are 64 bytes of x.
    """
    units = width * (2 if bits == 3 else bits) // 16
    return min(32, units & -units)


def grouped_tiling(N: int, E: int, bits: int) -> dict:
    """Return constants and options of the kernel: the fastest in benchmarks/grouped.py (H200)."""
    if bits >= 16:  # plain weights: long rows read fast
        if N <= 16 * E:
            tile = {"BM": 16, "BN": 64, "BK": 4096 // bits, "num_warps": 4}
        elif N <= 64 * E:
            tile = {"BM": 64, "BN": 128, "BK": 1024 // bits, "num_warps": 4}
        else:
            tile = {"BM": 128, "BN": 128, "BK": 1024 // bits, "num_warps": 8}
        return tile | {"num_stages": 3}
    # Small tiles for few rows an expert: most rows of a large tile would be empty.
    rows = 128 if N > 64 * E else 64 if N > 16 * E else 16
    if bits == 8:
        return {"BM": rows, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 4}
    # Unpacking fewer bits takes longer: with many rows an expert, unpack once for more of them.
    rows = 256 if N >= 256 * E else rows
    # A field's 16 x 16 numbers of x would be 2 bytes a lane, which cannot be copied asynchronously.
    width = 256 if rows == 16 and bits < 4 else 128
    return {"BM": rows, "BN": 128, "BK": width, "num_warps": 8, "num_stages": 3}


def smaller_tilings(tiling: dict) -> Iterator[dict]:
    """Yield the tiling, then those that take less shared memory.

    Fewer rows of x come first, down to 64: fewer stages would hide less of the loads' latency.
    """
    sizes = [rows for rows in (256, 128, 64, 32, 16) if rows <= tiling["BM"]]
    for several in (True, False):
        for stages in range(tiling["num_stages"], 1, -1):
            for rows in (rows for rows in sizes if (rows >= 64) is several):
                yield tiling | {"BM": rows, "num_stages": stages}


def grouped_gemm(
    x: Tensor,
    group_ends: Tensor,
    parts: dict[str, Tensor],
    kind: str,
    bits: int,
    group: int,
    *,
    tiling: dict | None = None,
) -> Tensor:
    """Multiply rows x [N, in], sorted by expert, by their experts' weights -> [N, out].

    Rows of expert e end before group_ends[e]. parts: tensors of a packed weight [E, out, ...] of
    this kind, bits and group; the numbers of x are then in the order of `Format.grouped_order`.
    For kind "plain", codes are weights of x's dtype and bits is 16 or 32. tiling: replaces that of
    `grouped_tiling`.
    """
    (N, width), (E, out) = x.shape, parts["codes"].shape[:2]
    most = N if x.element_size() == 2 else 64 * E  # fp32 has no tensor cores: larger tiles spill
    y = x.new_empty(N, out)
    codes, third = (parts.get(name, parts["codes"]) for name in ("codes", "third"))
    if bits < 16:
        codes, third = codes.view(torch.int16), third.view(torch.int16)
    scale = parts.get("scale", codes)
    names = "scale_step", "scale_low", "zero", "zero_step", "zero_low"
    # The kernel needs a valid pointer for an absent tensor, which it then does not read.
    fine = [parts.get(name, scale) for name in names]
    tensors = x.contiguous(), y, group_ends, codes, third, scale, *fine
    shape = dict(OUT=out, IN=width, E=E, E_POW2=triton.next_power_of_2(E))
    format = dict(BITS=bits, GROUP=group, KIND=kind, RUN=grouped_run(width, bits))
    if tiling is None:
        tilings = smaller_tilings(grouped_tiling(min(N, most), E, bits))
        tiling = fit_tiling(_grouped, tilings, tensors, shape | format)
    grid = (min(N, triton.cdiv(N, tiling["BM"]) + E), triton.cdiv(out, tiling["BN"]))
    _grouped[grid](*tensors, **shape, **format, **tiling)
    return y


@custom_op("moe_fast::grouped_mm")
def grouped_mm(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    """Multiply x [N, in] by weight [E, out, in], by int32 group_ends [E] -> [N, out].

    Rows of x and of the weight are multiples of 16 bytes. A custom operator around
    `F.grouped_mm`: Inductor compiles that on a CPU in bf16 only. On a GPU the library's tiles are
    for many rows: with few it reads at half of the memory's bandwidth. In other dtypes than bf16
    it loops over the experts and synchronizes with the host, on most GPUs in bf16 too.
    """
    few = len(x) <= FEW_ROWS * len(weight)
    has_library = x.dtype is torch.bfloat16 and gpu_of(x.device).has_grouped_mm
    if can_launch(x) and (few or not has_library):
        return try_kernels(GROUPED, _multiply, _multiply_by_library, x, weight, group_ends)
    return _multiply_by_library(x, weight, group_ends)


def _multiply(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    return grouped_gemm(x, group_ends, {"codes": weight}, "plain", 8 * x.element_size(), 1)


def _multiply_by_library(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=group_ends)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])
