"""Triton kernels for what PyTorch cannot say; here products of 4-bit weights for one token.

`dot4` is for where what Inductor makes of PyTorch takes too many instructions. Others stand in grouped_kernel.py and
attention_kernels.py. The formats stand in packing.py; tests hold the kernels to its unpack.
"""

from __future__ import annotations  # the annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA: then nothing here is called
    triton = tl = None


def jit(function):
    """`triton.jit`, where there is triton."""
    return triton.jit(function) if triton else function


def starts_early(x: Tensor) -> bool:
    """Whether kernels can be set up while the one before them ends, on the GPU that has x."""
    return torch.cuda.get_device_properties(x.device).major >= 9


@jit
def power_of_two(exponents):
    """e8m0 -> fp32, but for the smallest, 2 ** -127, which becomes 0."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


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
            factor = power_of_two(factor)
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
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    cut = dot4_cut(parts[0].shape[-2], x.shape[-1], pairs, kind, gated, sms)
    return dot4_launch(x, parts, index, kind, group, gated, starts_early(x), cut)


@dot4.register_fake
def _(x: Tensor, parts: list[Tensor], index: Tensor | None, kind: str, group: int, gated: bool) -> Tensor:
    out, pairs = parts[0].shape[-2], 1 if index is None else index.numel()
    if gated:
        return x.new_empty(pairs, out // 2)
    chunks = triton.cdiv(x.shape[-1] // 8, dot4_cut(out, x.shape[-1], pairs, kind, gated)[1]["CHUNK"])
    return x.new_empty(chunks, pairs, out, dtype=torch.float32)
