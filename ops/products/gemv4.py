"""GEMV with 4-bit weights as a Triton kernel: int4, mxfp4 and hqq4, for one token and its experts.

At 4 bits a GPU runs out of instructions before it runs out of bandwidth. The kernel therefore
multiplies integers, which takes few instructions. (Inductor's code for the same product in PyTorch
takes 1.5 times as long.)

- x becomes int16, with one power of two for each 32 numbers (those that a lane multiplies at a
  time). A bf16 number keeps all its digits if it is within 7 binary orders of the largest of the
  32. Smaller numbers have an error of at most 2 ** -15 of the largest.
- Two masks unpack a word's 4-bit codes to bytes. One instruction (dp2a) multiplies 2 bytes by 2
  int16 and adds, exactly. No code is ever converted to floating point.

Formats are in formats/; tests compare the kernel with their `unpack`.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.gpu import gpu_of
from ops.launch import can_launch, e8m0_to_float, jit, supports_pdl, tl, triton

# SwiGLU needs whole dot products, so one program must hold all of x. It has registers for this many
# numbers.
MAX_SWIGLU_WIDTH = 4096

# Dot products of words ---------------------------------------------------------------------------


@jit
def _add_word(word, x_even, x_odd, even, odd):
    """Add one word's dot products to `even` and `odd`: int4 or hqq4 codes.

    even: the sum of x times code over the even fields of words. odd: 16 times that sum over the
    odd fields. x_even, x_odd: four int16 in an int64.
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
def _add_e2m1(word, x_low, x_high, low, high, table):
    """Add one word's dot products to `low` and `high`: mxfp4 codes (e2m1 numbers).

    low: over the lower four codes of words, high: over the upper four. A code's byte is 12 + twice
    its number, from `table` (`_e2m1_table`).

    The table has 16 bytes and a look-up (prmt) takes 8, so there is one look-up for each sign. For
    a code of the other sign, prmt copies the sign bit of a byte, which is 0 in all bytes of the
    table. The look-up of the other sign is therefore 0, and the sum of both is the result. (A sum,
    because additions run on another unit of the GPU than look-ups and shifts.)
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
        (word, x_low, x_high, low, high, table[0], table[1], table[2], table[3]),
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@jit
def _e2m1_table(zero):
    """Return 12 + twice each e2m1 number as bytes: codes 0 to 3, 4 to 7, 8 to 11, 12 to 15."""
    # Added to a zero that the compiler does not know, in every lane: otherwise it recomputes the
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
    """Quantize x to int16 -> the two x operands of `_add_word` or `_add_e2m1`, unit, sums.

    x: addresses [quads, 4] of the first number of each word, whose 8 numbers are `stride` apart.
    unit: the value of 1 in the int16. sums: sums of x. Both [J, 1, 32].
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
        values = tl.load(x + k * stride, mask=inside, other=0.0).to(tl.float32)
        values = values * inverse + 12582912.0
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


# Tiles -------------------------------------------------------------------------------------------
#
# A quad is four neighboring words of a row: 32 numbers, 16 bytes, which a lane loads at once.


@jit
def _quad_position(quad, last, BM: tl.constexpr, HALF: tl.constexpr, UP: tl.constexpr):
    """Map quads [J * BM * 32] of a tile to their rows and to their positions in the row.

    Rows count from the tile's first row; rows from HALF on are `up`, UP rows further on. Positions
    beyond the last quad become the last.
    """
    # Lanes along `in` and warps along rows: every lane has 4 neighbors, no sum spans two warps.
    row = quad // 32 % BM
    return row // HALF * UP + row % HALF, tl.minimum(quad // (32 * BM) * 32 + quad % 32, last)


@jit
def _tile_offsets(
    start,
    last,
    W: tl.constexpr,
    RUN: tl.constexpr,
    J: tl.constexpr,
    BM: tl.constexpr,
    HALF: tl.constexpr,
    UP: tl.constexpr,
):
    """Return where a tile's words, scales and rows are, from its first row on.

    Words [J * BM * 128] and scales [J * BM * 32] of the chunk that begins at word `start`; rows
    [1, BM, 1]. A row has W words and W // RUN scales.
    """
    at = tl.arange(0, J * BM * 128)
    row, quad = _quad_position(at // 4, last, BM, HALF, UP)
    words = row * W + start + quad * 4 + at % 4
    row, quad = _quad_position(tl.arange(0, J * BM * 32), last, BM, HALF, UP)
    groups = row * (W // RUN) + (start + quad * 4) // RUN
    rows = (tl.arange(0, BM) // HALF * UP + tl.arange(0, BM) % HALF)[None, :, None]
    return words, groups, rows


@jit
def _load_tile(weights, row, offsets, W: tl.constexpr, RUN: tl.constexpr, KIND: tl.constexpr):
    """Load the codes and scales of the tile whose first row is `row`; for hqq also the zeros.

    weights: addresses of the seven tensors of hqq; the other kinds have the first two.
    """
    words, groups, rows = offsets
    GROUPS: tl.constexpr = W // RUN
    codes, scale, scale_step, scale_low, zero, zero_step, zero_low = weights
    # A lane's four words are one aligned load, which the compiler does not see through their
    # indices.
    code = tl.load(tl.max_contiguous(tl.multiple_of(codes + row * W + words, 16), 4))
    factor = tl.load(scale + row * GROUPS + groups)
    if KIND != "hqq":
        return code, factor
    else:
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
def _multiply_tile(tile, operands, table, J: tl.constexpr, BM: tl.constexpr, KIND: tl.constexpr):
    """Multiply a tile (`_load_tile`) by x (`_quantize_x`) -> each lane's sums, fp32 [J, BM, 32]."""
    x_even, x_odd, unit, sum_x = operands
    even = tl.zeros([J, BM, 32], tl.int32)
    odd, code = even, _split_four(tile[0], J, BM)
    for i in tl.static_range(4):
        if KIND == "mxfp4":
            even, odd = _add_e2m1(code[i], x_even[i], x_odd[i], even, odd, table)
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
        return (total - 8.0 * sum_x) * factor
    elif KIND == "mxfp4":
        return (total - 6.0 * sum_x) * factor
    else:
        offset = tl.reshape(tile[4], [J, BM, 32]).to(tl.float32) * tile[5] + tile[6]
        return (total - offset * sum_x) * (factor * tile[2] + tile[3])


@jit
def _store_rows(out, total, HALF: tl.constexpr, SWIGLU: tl.constexpr):
    """Sum the lanes' sums [J, BM, 32], apply SwiGLU and store HALF rows at `out`."""
    total = tl.sum(tl.sum(total, 0), 1)
    if SWIGLU:
        gate, up = tl.split(tl.trans(tl.reshape(total, [2, HALF])))
        total = gate / (1.0 + tl.exp(-gate)) * up
    # The first lane of those that hold a row stores it: otherwise warps wait for each other.
    lane = tl.arange(0, HALF * 32)
    total = tl.reshape(tl.broadcast_to(total[:, None], [HALF, 32]), [HALF * 32])
    tl.store(out + lane // 32, total.to(out.dtype.element_ty), mask=lane % 32 == 0)


# Grid [R, S, N]: a program multiplies one chunk of x (split-K) by one pair's expert, for every R-th
# tile of BM rows. x stays in registers. With SWIGLU a tile has BM / 2 rows of gate and the BM / 2
# rows of up that belong to them.
#
# With PDL a dense weight's first tile is loaded before the wait: weights do not depend on the
# previous kernel. An expert's tile needs the index, so it is loaded after the wait.
#
# One kernel: its speed depends on the order of waits, loads and products. A reader should see that
# order whole. Formats differ in constexprs only.
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
    W: tl.constexpr = IN // 8  # words of a row
    RUN: tl.constexpr = GROUP // 8  # words of a group
    ROWS: tl.constexpr = OUT // 2 if SWIGLU else OUT  # rows of the result
    HALF: tl.constexpr = BM // 2 if SWIGLU else BM  # rows of the result that a tile gives
    weights = (codes, scale, scale_step, scale_low, zero, zero_step, zero_low)
    part, pair, step = tl.program_id(1), tl.program_id(2), tl.num_programs(0)
    first = 0
    if EXPERTS:
        if PDL:
            tl.extra.cuda.gdc_wait()
        first = tl.load(index + pair) * OUT
    start = part * CHUNK
    # Lanes beyond the chunk read its last quad, with x = 0.
    last = (CHUNK if W % CHUNK == 0 else tl.minimum(CHUNK, W - start)) // 4 - 1
    offsets = _tile_offsets(start, last, W, RUN, J, BM, HALF, ROWS)
    # The last tile begins early enough to be whole: some of its rows are computed twice.
    row = tl.minimum(tl.program_id(0) * HALF, ROWS - HALF)
    tile = _load_tile(weights, first + row, offsets, W, RUN, KIND)
    if PDL and not EXPERTS:
        tl.extra.cuda.gdc_wait()
    quads = tl.arange(0, J * 32)[:, None]
    word = start + quads * 4 + tl.arange(0, 4)[None, :]
    x += pair // PAIRS * IN + word // RUN * GROUP + word % RUN
    operands = _quantize_x(x, quads <= last, RUN, J, KIND)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    table = _e2m1_table(unknown_zero) if KIND == "mxfp4" else None
    for block in range(tl.program_id(0), tl.cdiv(ROWS, HALF), step):
        total = _multiply_tile(tile, operands, table, J, BM, KIND)
        out = y + (part * tl.num_programs(2) + pair).to(tl.int64) * ROWS + row
        if block + step < tl.cdiv(ROWS, HALF):  # prefetch: this tile's registers are free now
            row = tl.minimum((block + step) * HALF, ROWS - HALF)
            tile = _load_tile(weights, first + row, offsets, W, RUN, KIND)
        _store_rows(out, total, HALF, SWIGLU)


# Launching ---------------------------------------------------------------------------------------


def dot4_supports(x: Tensor, out: int, group: int, swiglu: bool = False) -> bool:
    """Whether `dot4` can multiply x [M, in] by weights [..., out, in] with groups of that size."""
    fits = x.shape[-1] <= MAX_SWIGLU_WIDTH or not swiglu
    sixteen_bits = x.dtype in (torch.bfloat16, torch.float16)
    fits = fits and sixteen_bits and group % 32 == 0 and out >= 16
    return fits and can_launch(x, "_dot4")


@dataclass(frozen=True)
class Tiling:
    """How `dot4` divides its work. For 0, `dot4_tiling` takes the fastest value on an H200."""

    pieces: int = 0  # most pieces of 1024 numbers along `in` that a program holds
    block: int = 0  # BM, rows of a tile
    resident: int = 0  # programs that run on an SM at the same time
    warps: int = 4


def dot4_tiling(
    shape: tuple[int, int],
    pairs: int,
    kind: str,
    swiglu: bool,
    sms: int,
    tiling: Tiling = Tiling(),
) -> tuple[int, dict]:
    """Choose the number of programs along rows, and constants and options of the kernel.

    shape: (out, in). sms: SMs of the GPU. The split of `in` follows from shapes alone, so that
    sums have the same bits in every call. benchmarks/gemv4.py measures other tilings.
    """
    (out, width), warps = shape, tiling.warps
    # With fewer pieces more programs fit into an SM's registers. 4 pieces hold a row of up to 4096,
    # which then needs no split-K sum.
    default_pieces = 1 if kind == "mxfp4" and not swiglu else 4 if width <= 4096 else 2
    chunks = triton.cdiv(width, 1024 * (tiling.pieces or default_pieces))
    chunk = triton.cdiv(width // 8, 4 * chunks) * 4
    pieces, launches = triton.next_power_of_2(triton.cdiv(chunk, 128)), chunks * pairs
    many_tiles = triton.cdiv(out, 8) * launches > 24 * sms
    block = tiling.block or (16 if pieces == 1 or (pieces == 2 and many_tiles) else 8)
    tiles = triton.cdiv(out, block)
    # One tile per program if the GPU can run all programs at the same time. Else each program
    # computes several, in nearly equal numbers.
    resident = tiling.resident or (3 if pieces > 2 else 6 if kind == "int4" else 4)
    tiles_each = 1
    if tiles * launches > sms * resident:
        resident = tiling.resident or min(resident, 4)
        tiles_each = triton.cdiv(tiles * launches, sms * resident)
    constants = {
        "CHUNK": chunk,
        "J": pieces,
        "BM": block,
        "num_warps": warps,
        # registers of a lane with which 3 programs fit into an SM
        "maxnreg": 168 if pieces > 2 and warps == 4 else None,
    }
    return triton.cdiv(tiles, tiles_each), constants


def launch_dot4(
    x: Tensor,
    parts: list[Tensor],
    index: Tensor | None,
    mode: tuple[str, int, bool],
    tiling: tuple[int, dict],
    pdl: bool,
) -> Tensor:
    """Launch the kernel. mode: kind, group, swiglu as in `dot4`; tiling: from `dot4_tiling`."""
    (kind, group, swiglu), (programs, constants) = mode, tiling
    codes, scale, *fine = parts
    (M, width), out = x.shape, codes.shape[-2]
    pairs = 1 if index is None else index.numel()
    # The kernel needs a valid pointer for an absent tensor, which it then does not read: int4 and
    # mxfp4 have no zeros, a dense weight has no index.
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
    """Multiply x [M, in] by 4-bit weights [E, out, in] -> fp32 partial sums [S, N, out] (split-K).

    x: bf16 or fp16, contiguous. index: int64, N in all: pair n multiplies row n // (N // M) of x
    by expert index[n]. None: one dense weight [out, in], N = M = 1. parts: the weight's tensors,
    ordered as in its format's layout. kind: "int4", "mxfp4" or "hqq". group: numbers along `in`
    that share a scale.

    swiglu: weight rows are w1's, then w3's; return silu(gate) * up in x.dtype, [N, out / 2].

    With PDL (Hopper and later) the kernel loads its first weights while the previous kernel runs,
    which must not write them.
    """
    pairs = 1 if index is None else index.numel()
    sms = gpu_of(x.device).multiprocessors
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
    # The number of chunks, which this needs, does not depend on the GPU.
    _, constants = dot4_tiling((out, x.shape[-1]), pairs, kind, swiglu, sms=1)
    chunks = triton.cdiv(x.shape[-1] // 8, constants["CHUNK"])
    return x.new_empty(chunks, pairs, out, dtype=torch.float32)
