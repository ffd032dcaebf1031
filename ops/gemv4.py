"""GEMV with 4-bit weights as a Triton kernel: int4, mxfp4 and hqq4, for one token and its experts.

At 4 bits a GPU runs out of instructions before it runs out of bandwidth, so the arithmetic is
chosen for few of them (what Inductor makes of PyTorch takes half as long again):

- x becomes int16 with one power of two for each 32 numbers, those that one lane multiplies at a
  time. bf16 keeps
  all its digits over 7 binary orders in that, smaller numbers are right to 2 ** -15 of the largest.
- Two masks make bytes of a word's codes, and one instruction (dp2a) multiplies 2 bytes by 2 int16
  and adds,
  exactly. No code is ever converted to floating point.

Formats are in formats/; tests compare the kernel with their `unpack`.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.jit import e8m0_to_float, jit, supports_pdl, tl, triton

MAX_SWIGLU_WIDTH = 4096  # SwiGLU needs whole dot products, which one program can make of so many


@jit
def _add_word(word, x_even, x_odd, even, odd):
    """Dot products of one word of int4 or hqq4 codes, added to `even` and `odd`.

    even: the sum of x times code over the even fields; odd: 16 times that over the odd ones.
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
        "=r,=r,r,l,l,r,r",
        (word, x_even, x_odd, even, odd),
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@jit
def _add_e2m1(word, x_low, x_high, low, high, small, large, small_neg, large_neg):
    """Dot products of one word of mxfp4 codes: with 12 + twice the number, from a table of bytes.

    low: over the lower four codes, high: over the upper four. The table has 16 bytes
    (`_e2m1_table`); a look-up (prmt) has 8, so there is one per sign. For the other sign's codes
    a look-up copies the sign bit of a byte, which is zero in all of its bytes: the sum of both is
    the one that knows the code. (A sum, since adders are another unit of the GPU than look-ups
    and shifts.)
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
        "=r,=r,r,l,l,r,r,r,r,r,r",
        (word, x_low, x_high, low, high, small, large, small_neg, large_neg),
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@jit
def _e2m1_table(zero):
    """12 + twice the number, a byte each: magnitudes 0 to 3, 4 to 7, then the negative ones."""
    # Built on a zero that the compiler does not know, in every lane: otherwise it recomputes the
    # constants for each look-up.
    lanes = tl.arange(0, 32)[None, None, :] * zero
    return lanes + 0x0F0E0D0C, lanes + 0x18141210, lanes + 0x090A0B0C, lanes + 0x00040608


@jit
def _split_four(words, J: tl.constexpr, ROWS: tl.constexpr):
    """[J * ROWS * 32 * 4], four neighbors per lane -> 4 tensors [J, ROWS, 32]."""
    even, odd = tl.split(tl.reshape(words, [J, ROWS, 32, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit
def _quantize_x(x, inside, stride: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr):
    """Load x at words [quads, 4] as int16 -> operands of `_add_word` or `_add_e2m1`, unit, sums.

    unit: what 1 of the int16 is worth, and sums of x: both [J, 1, 32].
    """
    largest, total = tl.zeros(x.shape, tl.float32), tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(8):
        values = tl.abs(tl.load(x + k * stride, mask=inside, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, values, propagate_nan=tl.PropagateNan.ALL)
    exponent = tl.max(largest.to(tl.int32, bitcast=True), 1, keep_dims=True) >> 23
    # Scale the largest to [2 ** 14, 2 ** 15) by a power of two, built from its exponent. Numbers
    # below 2 ** -107 become 0.
    unit = ((tl.maximum(exponent, 20) - 14) << 23).to(tl.float32, bitcast=True)
    inverse = ((268 - tl.maximum(exponent, 20)) << 23).to(tl.float32, bitcast=True)
    unit = tl.where(exponent == 255, float("nan"), unit)  # inf or NaN in x: NaN in every row
    even, odd = total.to(tl.int64), total.to(tl.int64)
    for k in tl.static_range(8):
        # Adding 1.5 * 2 ** 23 rounds to a whole number, and leaves it in the lowest bits.
        values = (
            tl.load(x + k * stride, mask=inside, other=0.0).to(tl.float32) * inverse + 12582912.0
        )
        number = values.to(tl.int32, bitcast=True) - 0x4B400000
        total += number
        plane = (number & 0xFFFF).to(tl.int64)
        if KIND == "mxfp4":  # the lower four codes first, then the upper four
            plane = plane << k % 4 * 16
            even, odd = (even | plane, odd) if k < 4 else (even, odd | plane)
        else:
            plane = plane << k // 2 * 16
            even, odd = (even | plane, odd) if k % 2 == 0 else (even, odd | plane)
    total = tl.sum(total, 1, keep_dims=True).to(tl.float32) * unit
    unit, total = tl.reshape(unit, [J, 1, 32]), tl.reshape(total, [J, 1, 32])
    return _split_four(even, J, 1), _split_four(odd, J, 1), unit, total


@jit
def _quad_position(quad, last, BM: tl.constexpr, HALF: tl.constexpr, UP: tl.constexpr):
    """Quads of a tile [J * BM * 32] -> their row, from the tile's first, and which of its quads."""
    # Lanes along `in` and warps along rows: every lane has 4 neighbors, no sum spans two warps.
    row = quad // 32 % BM
    return row // HALF * UP + row % HALF, tl.minimum(quad // (32 * BM) * 32 + quad % 32, last)


@jit
def _load_tile(
    codes,
    scale,
    fine,
    row,
    rows,
    words,
    groups,
    W: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Load codes and scales of the rows from `row` on, with zeros what dequantizes both (hqq)."""
    # A lane's four words are one aligned load, which the compiler does not see through their
    # indices.
    code = tl.load(tl.max_contiguous(tl.multiple_of(codes + row * W + words, 16), 4))
    factor = tl.load(scale + row * GROUPS + groups)
    if KIND != "hqq":
        return code, factor
    else:
        scale_step, scale_low, zero, zero_step, zero_low = fine
        at = row + rows
        return (
            code,
            factor,
            tl.load(scale_step + at),
            tl.load(scale_low + at),
            tl.load(zero + row * GROUPS + groups),
            tl.load(zero_step + at),
            tl.load(zero_low + at),
        )


@jit
def _dot4(
    x,
    index,
    codes,
    scale,
    scale_step,
    scale_low,
    zero,
    zero_step,
    zero_low,
    y,
    unknown_zero,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
    CHUNK: tl.constexpr,
    J: tl.constexpr,
    BM: tl.constexpr,
):
    # A program (step, part, pair) makes every step-th tile of BM rows, for one chunk of `in`
    # (split-K) and one expert. It keeps its x in registers. With SWIGLU a tile has BM / 2 rows of
    # gate and as many of up. Codes of the first tile are loaded before the PDL wait: they do not
    # depend on the kernel before.
    W: tl.constexpr = IN // 8
    RUN: tl.constexpr = GROUP // 8
    GROUPS: tl.constexpr = IN // GROUP
    ROWS: tl.constexpr = OUT // 2 if SWIGLU else OUT  # of the result
    HALF: tl.constexpr = BM // 2 if SWIGLU else BM
    fine = (scale_step, scale_low, zero, zero_step, zero_low)
    part, pair, step = tl.program_id(1), tl.program_id(2), tl.num_programs(0)
    first = 0
    if EXPERTS:
        if PDL:
            tl.extra.cuda.gdc_wait()
        first = tl.load(index + pair) * OUT
    start = part * CHUNK
    # Lanes beyond the chunk read its last quad, with x = 0.
    last = (CHUNK if W % CHUNK == 0 else tl.minimum(CHUNK, W - start)) // 4 - 1
    at = tl.arange(0, J * BM * 128)
    row, quad = _quad_position(at // 4, last, BM, HALF, ROWS)
    words = row * W + start + quad * 4 + at % 4
    row, quad = _quad_position(tl.arange(0, J * BM * 32), last, BM, HALF, ROWS)
    groups = row * GROUPS + (start + quad * 4) // RUN
    rows = (tl.arange(0, BM) // HALF * ROWS + tl.arange(0, BM) % HALF)[None, :, None]
    # The last tile begins early enough to be whole: some of its rows are computed twice.
    row = tl.minimum(tl.program_id(0) * HALF, ROWS - HALF)
    tile = _load_tile(codes, scale, fine, first + row, rows, words, groups, W, GROUPS, KIND)
    if PDL and not EXPERTS:
        tl.extra.cuda.gdc_wait()
    quads = tl.arange(0, J * 32)[:, None]
    word = start + quads * 4 + tl.arange(0, 4)[None, :]
    x += pair // PAIRS * IN + word // RUN * GROUP + word % RUN
    x_even, x_odd, unit, sum_x = _quantize_x(x, quads <= last, RUN, J, KIND)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if KIND == "mxfp4":
        small, large, small_neg, large_neg = _e2m1_table(unknown_zero)
    for block in range(tl.program_id(0), tl.cdiv(ROWS, HALF), step):
        even = tl.zeros([J, BM, 32], tl.int32)
        odd, code = even, _split_four(tile[0], J, BM)
        for i in tl.static_range(4):
            if KIND == "mxfp4":
                even, odd = _add_e2m1(
                    code[i], x_even[i], x_odd[i], even, odd, small, large, small_neg, large_neg
                )
            else:
                even, odd = _add_word(code[i], x_even[i], x_odd[i], even, odd)
        factor = tl.reshape(tile[1], [J, BM, 32])
        if KIND == "mxfp4":
            total = (even + odd).to(tl.float32) * (unit * 0.5)
            factor = e8m0_to_float(factor)
        else:
            total = (even * 16 + odd).to(tl.float32) * (unit * 0.0625)
            factor = factor.to(tl.float32)
        if KIND == "int4":
            total = (total - 8.0 * sum_x) * factor
        elif KIND == "mxfp4":
            total = (total - 6.0 * sum_x) * factor
        else:
            offset = tl.reshape(tile[4], [J, BM, 32]).to(tl.float32) * tile[5] + tile[6]
            total = (total - offset * sum_x) * (factor * tile[2] + tile[3])
        out = y + (part * tl.num_programs(2) + pair).to(tl.int64) * ROWS + row
        if block + step < tl.cdiv(ROWS, HALF):  # prefetch: this tile's registers are free now
            row = tl.minimum((block + step) * HALF, ROWS - HALF)
            tile = _load_tile(codes, scale, fine, first + row, rows, words, groups, W, GROUPS, KIND)
        total = tl.sum(tl.sum(total, 0), 1)
        if SWIGLU:
            gate, up = tl.split(tl.trans(tl.reshape(total, [2, HALF])))
            total = gate / (1.0 + tl.exp(-gate)) * up
        # Each row is stored by the first lane of those that hold it: otherwise warps wait for
        # each other.
        lane = tl.arange(0, HALF * 32)
        total = tl.reshape(tl.broadcast_to(total[:, None], [HALF, 32]), [HALF * 32])
        tl.store(out + lane // 32, total.to(y.dtype.element_ty), mask=lane % 32 == 0)


def dot4_supports(x: Tensor, out: int, group: int, swiglu: bool = False) -> bool:
    """Whether `dot4` multiplies x [M, in] with weights [..., out, in] in groups of that size."""
    fits = x.shape[-1] <= MAX_SWIGLU_WIDTH or not swiglu
    sixteen_bits = x.dtype in (torch.bfloat16, torch.float16)
    return triton is not None and sixteen_bits and group % 32 == 0 and out >= 16 and fits


@dataclass(frozen=True)
class Tiling:
    """How `dot4` cuts its work. Zeros are chosen by `dot4_tiling`, as fastest on an H200."""

    pieces: int = 0  # of 1024 numbers along `in`, at most this many a program
    block: int = 0  # BM, rows of a tile
    resident: int = 0  # programs that an SM holds at a time
    warps: int = 4


def dot4_tiling(
    shape: tuple[int, int],
    pairs: int,
    kind: str,
    swiglu: bool,
    sms: int = 132,
    tiling: Tiling = Tiling(),
) -> tuple[int, dict]:
    """Return programs along rows, and constants and options of the kernel. shape: (out, in).

    From shapes alone, so that sums agree between calls. benchmarks/gemv4.py searches.
    """
    (out, width), warps = shape, tiling.warps
    # Fewer pieces leave registers for more programs; where 4 hold a row, no split-K sum is left.
    few = 1 if kind == "mxfp4" and not swiglu else 4 if width <= 4096 else 2
    pieces = tiling.pieces or few
    chunks = triton.cdiv(width, 1024 * pieces)
    chunk = triton.cdiv(width // 8, 4 * chunks) * 4
    pieces, each = triton.next_power_of_2(triton.cdiv(chunk, 128)), chunks * pairs
    long = triton.cdiv(out, 8) * each > 24 * sms
    block = tiling.block or (16 if pieces == 1 or (pieces == 2 and long) else 8)
    blocks = triton.cdiv(out, block)
    # One tile per program if the GPU holds that many at a time; else nearly equal numbers of tiles.
    resident = tiling.resident
    most = resident or (3 if pieces > 2 else 6 if kind == "int4" else 4)
    turns = 1
    if blocks * each > sms * most:
        turns = triton.cdiv(blocks * each, sms * (resident or min(most, 4)))
    registers = 168 if pieces > 2 and warps == 4 else None  # as many as 3 resident programs have
    constants = {
        "CHUNK": chunk,
        "J": pieces,
        "BM": block,
        "num_warps": warps,
        "maxnreg": registers,
    }
    return triton.cdiv(blocks, turns), constants


def launch_dot4(
    x: Tensor,
    parts: list[Tensor],
    index: Tensor | None,
    mode: tuple[str, int, bool],
    tiling: tuple[int, dict],
    pdl: bool,
) -> Tensor:
    """Launch the kernel. mode: kind, group, swiglu as in `dot4`; tiling: of `dot4_tiling`."""
    (kind, group, swiglu), (programs, constants) = mode, tiling
    codes, scale, *fine = parts
    (M, width), out = x.shape, codes.shape[-2]
    pairs = 1 if index is None else index.numel()
    # int4 and mxfp4 have no zeros, a dense weight has no index: the stand-ins are not read.
    fine = fine or [scale] * 5
    chunks = triton.cdiv(width // 8, constants["CHUNK"])
    if swiglu:
        y = x.new_empty(pairs, out // 2)
    else:
        y = x.new_empty(chunks, pairs, out, dtype=torch.float32)
    _dot4[programs, chunks, pairs](
        x,
        codes if index is None else index,
        codes,
        scale,
        *fine,
        y,
        0,
        OUT=out,
        IN=width,
        GROUP=group,
        KIND=kind,
        PAIRS=pairs // M,
        EXPERTS=index is not None,
        SWIGLU=swiglu,
        PDL=pdl,
        launch_pdl=pdl,
        num_stages=1,
        **constants,
    )
    return y


@torch.library.custom_op("moe_fast::dot4", mutates_args=())
def dot4(
    x: Tensor, parts: list[Tensor], index: Tensor | None, kind: str, group: int, swiglu: bool
) -> Tensor:
    """x [M, in] times 4-bit weights [E, out, in], expert index[n] for pair n -> fp32 [S, N, out].

    The S partial sums (split-K) are to be added. x: bf16 or fp16, contiguous. index: int64, N in
    all; pair n belongs to row n // (N // M) of x. None: one weight [out, in], N = M = 1. parts:
    of a format, in its layout's order. kind: "int4", "mxfp4" or "hqq".

    swiglu: the rows are w1's, then w3's, and the result is silu(gate) * up, and no other
    activation, in x.dtype [N, out / 2]. On Hopper the kernel starts, and loads its first weights,
    while the kernel before it drains: that one must not write them.
    """
    pairs = 1 if index is None else index.numel()
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    shape = parts[0].shape[-2], x.shape[-1]
    tiling = dot4_tiling(shape, pairs, kind, swiglu, sms)
    return launch_dot4(x, parts, index, (kind, group, swiglu), tiling, supports_pdl(x))


@dot4.register_fake
def _(
    x: Tensor, parts: list[Tensor], index: Tensor | None, kind: str, group: int, swiglu: bool
) -> Tensor:
    out, pairs = parts[0].shape[-2], 1 if index is None else index.numel()
    if swiglu:
        return x.new_empty(pairs, out // 2)
    _, constants = dot4_tiling((out, x.shape[-1]), pairs, kind, swiglu)
    chunks = triton.cdiv(x.shape[-1] // 8, constants["CHUNK"])
    return x.new_empty(chunks, pairs, out, dtype=torch.float32)
