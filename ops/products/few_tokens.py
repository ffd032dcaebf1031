"""Products of 2 to 64 tokens on tensor cores: each weight is unpacked once for up to 32 of them.

A GPU that multiplies several tokens without tensor cores runs out of instructions before it runs
out of bandwidth. A tensor core's instruction (m16n8k16) takes 16 rows of a weight, 16 numbers along
`in`, and 8 tokens: a tile. TILES of them share a program's weights.

`_down_few` is the dense product: x [T, in] @ weight [out, in]^T, with the norm of x, bias, and
residual. ops/products/expert_tiles.py has the products of experts.

Fragments. Lane 4 r + j of a warp holds, of row r of the weight and of token r, the numbers that it
multiplies with those of lanes 4 r to 4 r + 3. A product may visit the numbers along `in` in any
order that x and the weight share. So lane j of a row loads 16 neighboring bytes of the weight, and
x at the numbers which these bytes contain. Nothing moves between lanes, or through shared memory.

Units. Codes are read as units of 16 bits, as in ops/products/grouped.py: PARTS codes of 16, 8 or 4 bits. The
two units of a word are neighbors in a tensor core's register. A step is 4 * VEC words of each row:
VEC neighboring words for each of four lanes. Each warp takes every WARPS-th step, and the warps'
sums are added at the end. DEPTH steps of a warp are in flight.

Exactness. Codes are multiplied as they are: 16 bits hold each of them exactly. A group's scale
multiplies the fp32 sum of its products, so that a step lies within a group; a power of two (mxfp4)
multiplies the codes. x times the norm's weight is the sum of two 16-bit numbers.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.launch import jit, supports_pdl, tl, triton
from ops.products.grouped import _floats, _shift_right, _signed_bytes
from ops.products.weights import Weight

TILE = 8  # tokens of a tensor core's instruction
BLOCK = 32  # tokens of a program of a dense product
TILE_REGISTERS = 64  # a lane's, for weights in flight

# Weights ------------------------------------------------------------------------------------------


@jit
def _load_step(
    weights,
    row,
    step,
    OUT: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    VEC: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Load a step of ROWS rows for each warp: units [ROWS / 8 * WARPS * 32 * 2 VEC], and scales.

    Scales and zeros have one number a lane, [ROWS / 8 * WARPS * 32, 1]. Rows and words behind the
    last become the last: the former are not stored, the latter have an x of 0.
    """
    codes, scale, scale_step, scale_low, zero, zero_step, zero_low = weights
    UNITS: tl.constexpr = 2 * VEC
    at = tl.arange(0, ROWS * WARPS * 4 * UNITS)
    lane = at // UNITS
    rows = tl.minimum(row + lane // (32 * WARPS) * 8 + lane // 4 % 8, OUT - 1)
    word = ((step * WARPS + lane // 32 % WARPS) * 4 + lane % 4) * VEC
    word = tl.minimum(word, WORDS - VEC)
    # A lane's units are one aligned load, which the compiler does not see through their indices.
    units = codes + (rows * (2 * WORDS) + word * 2 + at % UNITS)
    tile = (tl.load(tl.max_contiguous(tl.multiple_of(units, 2 * UNITS), UNITS)),)
    # Of two dimensions: the compiler gives neighbors to a lane if loads of one shape, of x, do so.
    lane = tl.arange(0, ROWS * WARPS * 4)
    if KIND != "mxfp4":
        lane = lane[:, None]
    rows = tl.minimum(row + lane // (32 * WARPS) * 8 + lane // 4 % 8, OUT - 1)
    word = ((step * WARPS + lane // 32 % WARPS) * 4 + lane % 4) * VEC
    word = tl.minimum(word, WORDS - VEC)
    if KIND == "fp8b":
        tile = tile + (tl.load(scale + rows // GROUP * (WORDS * 4 // GROUP) + word * 4 // GROUP),)
    elif KIND == "int4" or KIND == "mxfp4" or KIND == "hqq":
        group = rows * (WORDS * 8 // GROUP) + word * 8 // GROUP
        if KIND == "mxfp4":
            # Pairs of exponents: with loads of 8 bits before it, a product would take other
            # fragments (kWidth 4).
            pair = tl.load(scale + group // 2).to(tl.int32)
            tile = tile + (pair >> group % 2 * 8 & 0xFF,)
        else:
            tile = tile + (tl.load(scale + group),)
        if KIND == "hqq":
            tile = tile + (tl.load(scale_step + rows), tl.load(scale_low + rows))
            tile = tile + (tl.load(zero + group),)
            tile = tile + (tl.load(zero_step + rows), tl.load(zero_low + rows))
    return tile


@jit
def _e2m1(units, factor, K: tl.constexpr):
    """Return field K of units, an e2m1 number, as bf16 times 2 ** -126 * factor, two at a time."""
    return tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 bits, sign, none;
        mov.b32 none, 0x80008000;
        {"shl" if K < 2 else "shr"}.b32 bits, $1, {6 - 4 * K if K < 2 else 4 * K - 6};
        and.b32 bits, bits, 0x01C001C0;
        shl.b32 sign, $1, {12 - 4 * K};
        lop3.b32 bits, sign, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $0, bits, $2, none;
        }}""",
        "=r,r,r",
        (units, factor),
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@jit
def _int4(units, K: tl.constexpr):
    """Return field K of units, a code of 0 to 15, minus 8 as bf16, two at a time."""
    return tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 bits, one, minus;
        mov.b32 one, 0x3F803F80;
        mov.b32 minus, 0xC308C308;
        shr.u32 bits, $1, {4 * K};
        lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, bits, one, minus;
        }}""",
        "=r,r",
        (units,),
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@jit
def _unpack(units, factor, K: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Convert field K of units to DTYPE, without its scale. Codes of int4 and hqq are minus 8.

    factor: of each unit of mxfp4. Numbers of fp8 become 2 ** -8 as large, those of mxfp4 in bf16
    2 ** -126.
    """
    if KIND == "bf16":
        return units
    elif tl.bfloat16 == DTYPE:
        if KIND == "mxfp4":
            return _e2m1(units, factor, K)
        elif KIND == "int4" or KIND == "hqq":
            return _int4(units, K)
        else:
            shifted = _shift_right(units, 8) if K else units
            return _signed_bytes(shifted) if KIND == "int8" else _floats(shifted, 8, 3, 0x7780)
    elif KIND == "int8":
        return (units << (8 - 8 * K) >> 8).to(DTYPE)
    elif KIND == "fp8" or KIND == "fp8b":
        byte = units >> 8 * K
        return ((byte & 0x80) << 8 | (byte & 0x7F) << 7).to(tl.float16, bitcast=True)
    elif KIND == "mxfp4":  # bits of an fp16 number, 2 ** -14 too small
        code = units >> 4 * K
        number = ((code & 8) << 12 | (code & 7) << 9).to(tl.float16, bitcast=True)
        return (number.to(tl.float32) * 16384.0 * factor).to(DTYPE)
    else:
        return ((units >> 4 * K & 15) - 8).to(DTYPE)


@jit
def _weight_fragments(numbers, VEC: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """Order a field's numbers as a tensor core takes them -> [WARPS, ROWS, 8 VEC]."""
    R: tl.constexpr = ROWS // 8
    if VEC == 1:  # two fields of each unit, the last dimension
        numbers = tl.reshape(numbers, [R, WARPS, 8, 4, 2, 2])
        return tl.reshape(tl.permute(numbers, (1, 0, 2, 5, 3, 4)), [WARPS, ROWS, 16])
    else:
        numbers = tl.reshape(numbers, [R, WARPS, 8, 4, VEC // 2, 2, 2])
        numbers = tl.permute(numbers, (1, 0, 2, 4, 5, 3, 6))
        return tl.reshape(numbers, [WARPS, ROWS, 8 * VEC])


# x ------------------------------------------------------------------------------------------------


@jit
def _load_tokens(
    x,
    begins,
    step,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    RUN: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    VEC: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Load the x of field K of a step -> [TILES * 2 * WARPS * 32 * VEC]: two units of each word.

    begins: None, or where the row of x of each number begins (`_spread_begins`). With None, TOKENS
    is the number of rows of x, of which the last is that of all other tokens. With 0, x is one row.
    Words behind the last are 0.
    """
    at = tl.arange(0, 64 * WARPS * VEC * TILES)
    tile, at = at // (64 * WARPS * VEC), at % (64 * WARPS * VEC)
    if PARTS == 1:  # bf16: units are neighbors
        lane, word, half = at // (2 * VEC), at // 2 % VEC, at % 2
    else:
        lane, word, half = at // VEC % (32 * WARPS), at % VEC, at // (32 * WARPS * VEC)
    token, quad = tile * 8 + lane // 4 % 8, (step * WARPS + lane // 32) * 4 + lane % 4
    word += quad * VEC
    WIDTH: tl.constexpr = 2 * WORDS * PARTS
    RUN_OF_LOAD: tl.constexpr = 2 * VEC if PARTS == 1 else VEC
    if PARTS == 1:
        number = word * 2 + half
    else:
        number = word // RUN * (RUN * 2 * PARTS) + (K + PARTS * half) * RUN + word % RUN
    if begins is not None:
        number += begins
    elif TOKENS:
        number += tl.minimum(token, TOKENS - 1) * WIDTH
    number = tl.max_contiguous(tl.multiple_of(number, RUN_OF_LOAD), RUN_OF_LOAD)
    if WORDS % (4 * VEC * WARPS):
        return tl.load(x + number, mask=quad < WORDS // VEC, other=0.0)
    else:
        return tl.load(x + number)


@jit
def _load_fields(
    x,
    begins,
    step,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    RUN: tl.constexpr,
    PARTS: tl.constexpr,
    VEC: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Load the x of all fields of a step, so that all loads are in flight at once."""
    fields = ()
    for k in tl.static_range(PARTS):
        field = _load_tokens(x, begins, step, TOKENS, WORDS, RUN, k, PARTS, VEC, WARPS, TILES)
        fields = fields + (field,)
    return fields


@jit
def _spread_begins(
    begins, PARTS: tl.constexpr, VEC: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr
):
    """Spread one number a lane and tile, [TILES * WARPS * 32], in the order of `_load_tokens`."""
    if PARTS == 1:
        begins = tl.reshape(begins, [TILES, WARPS * 32, 1])
        begins = tl.broadcast_to(begins, [TILES, WARPS * 32, 2 * VEC])
    else:
        begins = tl.reshape(begins, [TILES, 1, WARPS * 32, 1])
        begins = tl.broadcast_to(begins, [TILES, 2, WARPS * 32, VEC])
    return tl.reshape(begins, [64 * WARPS * VEC * TILES])


@jit
def _token_fragments(
    numbers, PARTS: tl.constexpr, VEC: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr
):
    """Order the x of a field as `_weight_fragments` does -> [WARPS, 8 VEC, 8 TILES]."""
    if PARTS == 1:
        numbers = tl.reshape(numbers, [TILES, WARPS, 8, 4, VEC // 2, 2, 2])
        numbers = tl.permute(numbers, (1, 4, 5, 3, 6, 0, 2))
    elif VEC == 1:
        numbers = tl.reshape(numbers, [TILES, 2, WARPS, 8, 4, 2])
        numbers = tl.permute(numbers, (2, 5, 4, 1, 0, 3))
    else:
        numbers = tl.reshape(numbers, [TILES, 2, WARPS, 8, 4, VEC // 2, 2])
        numbers = tl.permute(numbers, (2, 5, 6, 4, 1, 0, 3))
    return tl.reshape(numbers, [WARPS, 8 * max(VEC, 2), 8 * TILES])


@jit
def _token_sums(numbers, PARTS: tl.constexpr, VEC: tl.constexpr, WARPS: tl.constexpr):
    """Sum numbers of a tile in the order of `_load_tokens` for each token -> [8]."""
    if PARTS == 1:
        numbers = tl.reshape(numbers, [WARPS, 8, 8 * VEC])
    else:
        numbers = tl.sum(tl.reshape(numbers, [2, WARPS, 8, 4 * VEC]), 0)
    return tl.sum(tl.sum(numbers, 2), 0)


@jit
def _multiply_bf16(x, norm):
    """Return x * norm as the sum of two bf16 numbers, two at a time."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 none, minus;
        mov.b32 none, 0x80008000;
        fma.rn.bf16x2 $0, $2, $3, none;
        xor.b32 minus, $0, none;
        fma.rn.bf16x2 $1, $2, $3, minus;
        }""",
        "=&r,=r,r,r",
        (x, norm),
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@jit
def _times_norm(x, norm):
    """Return x * norm as the sum of two numbers of x's dtype."""
    if x.dtype == tl.bfloat16 and norm.dtype == tl.bfloat16:
        return _multiply_bf16(x, norm)
    else:
        product = x.to(tl.float32) * norm.to(tl.float32)
        first = product.to(x.dtype)
        return first, (product - first.to(tl.float32)).to(x.dtype)


# Products -----------------------------------------------------------------------------------------


@jit
def _dot(a, b, total):
    return tl.dot(a, b, total)


@jit
def _row_factors(factor, WARPS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Spread one number a lane, of its row, to the sums [WARPS, ROWS, 8 TILES]."""
    R: tl.constexpr = ROWS // 8
    factor = tl.reshape(factor, [R, WARPS, 8, 1, 4, 1])
    factor = tl.broadcast_to(factor, [R, WARPS, 8, TILES, 4, 2])
    return tl.reshape(tl.permute(factor, (1, 0, 2, 3, 4, 5)), [WARPS, ROWS, 8 * TILES])


@jit
def _unit_factors(scale, DTYPE: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """Return mxfp4's power of two for each unit of a lane, [lanes * 8]; in bf16, * 2 ** 94.

    That is 2 ** 126 for `_e2m1`, which bf16 would not hold for scales above 2, and 2 ** -32, which
    the result makes up for. Scales of 2 ** -92 to 2 ** 33 are exact.
    """
    R: tl.constexpr = ROWS // 8
    if tl.bfloat16 == DTYPE:
        factor = (scale + 94 << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        factor = (scale << 23).to(tl.float32, bitcast=True)
    factor = tl.broadcast_to(tl.reshape(factor, [R, WARPS, 8, 4, 1]), [R, WARPS, 8, 4, 8])
    return tl.reshape(factor, [R * WARPS * 256])


@jit
def _add_products(
    tiles,
    totals,
    squares,
    fields,
    scales,
    KIND: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    VEC: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Add a step's products of all tokens to the sums of each tile of weights.

    fields, scales: x and the norm's weight by `_load_fields`. Sums are [WARPS, ROWS, 8 TILES].
    Return them, and the sums of the squares of x.
    """
    DTYPE: tl.constexpr = fields[0].dtype
    GROUPED: tl.constexpr = KIND == "int4" or KIND == "hqq" or KIND == "fp8b"
    JOINED: tl.constexpr = 2 if VEC == 1 else 1  # fields in a product
    sums, x_sums = totals, tl.zeros([WARPS, ROWS, 8 * TILES], tl.float32)
    if GROUPED:
        sums = ()
        for _ in tl.static_range(len(tiles)):
            sums = sums + (tl.zeros([WARPS, ROWS, 8 * TILES], tl.float32),)
    unit_factors = ()
    for n in tl.static_range(len(tiles)):
        unit_factors = unit_factors + (
            _unit_factors(tiles[n][1], DTYPE, WARPS, ROWS) if KIND == "mxfp4" else 0,
        )
    for k in tl.static_range(0, PARTS, JOINED):
        parts = ()
        for i in tl.static_range(JOINED):
            part = fields[k + i]
            if NORM:
                squares += part.to(tl.float32) * part.to(tl.float32)
                parts = parts + (_times_norm(part, scales[k + i]),)
            else:
                parts = parts + ((part,),)
        for i in tl.static_range(len(parts[0])):
            part = tl.join(parts[0][i], parts[1][i]) if VEC == 1 else parts[0][i]
            tokens = _token_fragments(part, PARTS, VEC, WARPS, TILES)
            if KIND == "hqq":
                x_sums = _dot(tl.full([WARPS, ROWS, 8 * max(VEC, 2)], 1.0, DTYPE), tokens, x_sums)
            added = ()
            for n in tl.static_range(len(tiles)):
                numbers = _unpack(tiles[n][0], unit_factors[n], k, KIND, DTYPE)
                if VEC == 1:
                    other = _unpack(tiles[n][0], unit_factors[n], k + 1, KIND, DTYPE)
                    numbers = tl.join(numbers, other)
                weights = _weight_fragments(numbers, VEC, WARPS, ROWS)
                added = added + (_dot(weights, tokens, sums[n]),)
            sums = added
    if GROUPED:
        added = ()
        for n in tl.static_range(len(tiles)):
            tile = tiles[n]
            factor = tile[1].to(tl.float32)
            if KIND == "hqq":
                factor = factor * tile[2] + tile[3]
                zero = tile[4].to(tl.float32) * tile[5] + tile[6] - 8.0
                group = sums[n] - x_sums * _row_factors(zero, WARPS, ROWS, TILES)
            else:
                group = sums[n]
            added = added + (totals[n] + group * _row_factors(factor, WARPS, ROWS, TILES),)
        sums = added
    return sums, squares


@jit
def _load_row_scales(scale, KIND: tl.constexpr, inside):
    """Load the scales of rows of a kind with one scale a row. scale: their addresses."""
    if KIND == "int8" or KIND == "fp8":
        return tl.load(scale, mask=inside, other=0.0).to(tl.float32)
    else:
        return 1.0


@jit
def _finish(total, scales, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply sums by what their products lack. scales: as of `_load_row_scales`."""
    if KIND == "int8" or KIND == "fp8":
        total *= scales
    if KIND == "fp8" or KIND == "fp8b":
        total *= 256.0
    if KIND == "mxfp4" and tl.bfloat16 == DTYPE:
        total *= 4294967296.0  # `_unit_factors`
    return total


@jit
def _of_expert(
    weights,
    expert,
    OUT: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return the addresses of one expert's weights, scales and zeros."""
    codes, scale, scale_step, scale_low, zero, zero_step, zero_low = weights
    codes += expert * (OUT * 2 * WORDS)
    if KIND == "int8" or KIND == "fp8":
        scale += expert * OUT
    elif KIND == "fp8b":
        scale += expert * ((OUT + GROUP - 1) // GROUP * (WORDS * 4 // GROUP))
    elif KIND == "mxfp4":  # pairs
        scale += expert * (OUT * (WORDS * 8 // GROUP) // 2)
    elif KIND != "bf16":
        scale += expert * (OUT * (WORDS * 8 // GROUP))
        zero += expert * (OUT * (WORDS * 8 // GROUP))
        scale_step += expert * OUT
        scale_low += expert * OUT
        zero_step += expert * OUT
        zero_low += expert * OUT
    return codes, scale, scale_step, scale_low, zero, zero_step, zero_low


@jit
def _load_gate_up_step(
    weights,
    row,
    step,
    I: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    VEC: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Load a step of ROWS rows of gate, and of the rows of up that belong to them."""
    # Rows of gate behind the last are rows of up: they are not stored.
    OUT: tl.constexpr = 2 * I
    gate = _load_step(weights, row, step, OUT, WORDS, GROUP, KIND, VEC, WARPS, ROWS)
    up = _load_step(weights, row + I, step, OUT, WORDS, GROUP, KIND, VEC, WARPS, ROWS)
    return gate, up


@jit
def _start_squares(VEC: tl.constexpr, WARPS: tl.constexpr, NORM: tl.constexpr):
    return tl.zeros([64 * WARPS * VEC], tl.float32) if NORM else 0.0


# Grid [R, BLOCKS]: a program computes ROWS rows of the result of a block of TOKENS tokens.
#
# The result is SCALE * (product + bias) + residual. All but x is loaded before the wait.
@jit
def _down_few(
    x,
    norm,
    residual,
    codes,
    scale,
    scale_step,
    scale_low,
    zero,
    zero_step,
    zero_low,
    bias,
    y,
    OUT: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EPS: tl.constexpr,
    STRIDE: tl.constexpr,
    PDL: tl.constexpr,
    VEC: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    RUN: tl.constexpr = GROUP // (2 * PARTS)  # words of a group
    STEPS: tl.constexpr = (WORDS + 4 * VEC * WARPS - 1) // (4 * VEC * WARPS)
    weights = (codes, scale, scale_step, scale_low, zero, zero_step, zero_low)
    row = tl.program_id(0) * ROWS
    if BLOCKS > 1:
        first = tl.program_id(1) * TOKENS
        x += first * (2 * WORDS * PARTS)
        residual += first * OUT
        y += first * STRIDE
    tiles = ()
    for d in tl.static_range(DEPTH):
        tiles = tiles + (_load_step(weights, row, d, OUT, WORDS, GROUP, KIND, VEC, WARPS, ROWS),)
    rows, token = row + tl.arange(0, ROWS)[:, None], tl.arange(0, 8 * TILES)[None, :]
    stores = (rows < OUT) & (token < TOKENS)
    scales = ()
    for d in tl.static_range(DEPTH):
        if NORM:
            scale_fields = _load_fields(norm, None, d, 0, WORDS, RUN, PARTS, VEC, WARPS, 1)
            scales = scales + (scale_fields,)
        else:
            scales = scales + (0,)
    if RESIDUAL:
        add = tl.load(residual + token * OUT + rows, mask=stores, other=0.0).to(tl.float32)
    if BIAS:
        biases = tl.load(bias + rows, mask=rows < OUT, other=0.0).to(tl.float32)
    row_scales = _load_row_scales(scale + rows, KIND, rows < OUT)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    xs = ()
    for d in tl.static_range(DEPTH):
        fields = _load_fields(x, None, d, TOKENS, WORDS, RUN, PARTS, VEC, WARPS, TILES)
        xs = xs + (fields,)
    total = tl.zeros([WARPS, ROWS, 8 * TILES], tl.float32)
    squares = _start_squares(VEC, WARPS, NORM)
    for s in range(0, STEPS, DEPTH):
        for d in tl.static_range(DEPTH):
            found, squares = _add_products(
                (tiles[d],),
                (total,),
                squares,
                xs[d],
                scales[d],
                KIND,
                NORM,
                PARTS,
                VEC,
                WARPS,
                ROWS,
                TILES,
            )
            total = found[0]
            if STEPS > DEPTH:  # prefetch: the registers of this step are free now
                at = tl.minimum(s + DEPTH + d, STEPS - 1)  # the last again, not what is behind it
                tile = _load_step(weights, row, at, OUT, WORDS, GROUP, KIND, VEC, WARPS, ROWS)
                tiles = tiles[:d] + (tile,) + tiles[d + 1 :]
                fields = _load_fields(x, None, at, TOKENS, WORDS, RUN, PARTS, VEC, WARPS, TILES)
                xs = xs[:d] + (fields,) + xs[d + 1 :]
                if NORM:
                    scale_fields = _load_fields(norm, None, at, 0, WORDS, RUN, PARTS, VEC, WARPS, 1)
                    scales = scales[:d] + (scale_fields,) + scales[d + 1 :]
    result = tl.sum(total, 0)
    if NORM:
        mean = _token_sums(squares, PARTS, VEC, WARPS) / (2 * WORDS * PARTS)
        result *= tl.rsqrt(mean + EPS)[None, :]
    result = _finish(result, row_scales, KIND, x.dtype.element_ty)
    if BIAS:
        result += biases
    if SCALE != 1.0:
        result *= SCALE
    if RESIDUAL:
        result += add
    tl.store(y + token * STRIDE + rows, result.to(y.dtype.element_ty), mask=stores)


# Launching ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewTiles:
    """How a product of several tokens divides its work. benchmarks/few_tokens.py measures some."""

    rows: int = 16  # rows of the result that a program computes: 16, 32 or 64
    warps: int = 4  # each takes a part of the numbers along `in`
    depth: int = 0  # steps in flight; 0: all
    tokens: int = BLOCK  # most tokens of a program of a dense product: 8, 16 or 32

    def __str__(self) -> str:
        tokens = "" if self.tokens == BLOCK else f" tokens {self.tokens}"
        return f"rows {self.rows} warps {self.warps} x {self.depth or 'all'}{tokens}"


def words_of_lane(weight: Weight) -> int:
    """Return VEC: the words that a lane loads at once, so that four lanes' are within a group."""
    if weight.kind not in ("int4", "hqq", "fp8b"):
        return 4  # no scales along `in`, or mxfp4's
    run = weight.group // weight.fields
    return next(vec for vec in (4, 2, 1) if run % (4 * vec) == 0)


def steps_of(weight: Weight, warps: int) -> int:
    """Return the steps of a row."""
    return triton.cdiv(weight.quads, words_of_lane(weight) * warps)


def choose_few_tiles(weight: Weight, tokens: int = TILE) -> FewTiles:
    """Return how to divide a dense product of several tokens, as measured on an H200.

    A program loads x in small pieces, which bind it: with more than 8 tokens 64 rows share them,
    and a program has fewer tokens if few would be left. Programs of 4 bits use few registers, so
    that a multiprocessor runs many of them. A product with few rows has eight warps a program,
    which keep the memory busy (docs/log/prompts.md).
    """
    if tokens > TILE:
        narrow = weight.out < 512
        size = TILE if narrow or triton.cdiv(weight.out, 64) * tokens < 16 * 128 else 16
        size = BLOCK if tokens % size else size
        return (
            FewTiles(16, 8, 2, size) if narrow else FewTiles(64, 4, 1 if tokens > 32 else 2, size)
        )
    few = weight.out < 2 * weight.multiprocessors * 16
    warps = 8 if few else 4
    if weight.fields == 8:
        return FewTiles(16, warps, 2 if few else 1)
    return FewTiles(16, warps, TILE_REGISTERS // (2 * words_of_lane(weight)))


def tiles_of(tokens: int) -> int:
    """Return the tiles of 8 tokens that a product has, a power of two."""
    return triton.next_power_of_2(triton.cdiv(tokens, TILE))


def pointers_of(weight: Weight, plain: torch.dtype) -> list[Tensor]:
    """Return seven tensors as the kernels read them: codes as units of 16 bits.

    plain: the dtype of weights that are not packed, which is that of x.
    """
    dtype = plain if weight.kind == "bf16" else torch.int16
    parts = [weight.parts[0].view(dtype), *weight.parts[1:]]
    if weight.kind == "mxfp4":
        parts[1] = parts[1].reshape(-1).view(torch.int16)
    return parts + parts[:1] * (7 - len(parts))


def constants_of(weight: Weight, tiles: FewTiles) -> dict:
    """Return the constants and options that both kernels have in common."""
    steps = steps_of(weight, tiles.warps)
    depth = min(tiles.depth or steps, steps)
    depth = next(d for d in range(depth, 0, -1) if steps % d == 0)  # none is behind the last
    return dict(
        WORDS=4 * weight.quads,
        GROUP=weight.group,
        KIND=weight.kind,
        PARTS=weight.fields // 2,
        VEC=words_of_lane(weight),
        WARPS=tiles.warps,
        ROWS=tiles.rows,
        DEPTH=depth,
        num_warps=tiles.warps,
        num_stages=1,
    )


def down_few(
    x: Tensor,
    weight: Weight,
    y: Tensor,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    tiles: FewTiles | None = None,
    pdl: bool | None = None,
) -> None:
    """Store scale * (x @ weight + bias) + residual in y [T, out]: see `moe_decode.down`.

    Raises ValueError for more tokens than those of a program that are no multiple of these. A norm
    of programs with more than TILE tokens is a ValueError, too.
    """
    tiles = tiles or choose_few_tiles(weight, len(x))
    blocks, tokens = triton.cdiv(len(x), tiles.tokens), min(len(x), tiles.tokens)
    if blocks * tokens != len(x):
        raise ValueError(f"no kernel for {len(x)} tokens")
    if norm is not None and tokens > TILE:
        raise ValueError(f"no norm of {tokens} tokens: moe_router.norm_tokens does that")
    pdl = supports_pdl(x) if pdl is None else pdl
    absent = weight.parts[0]  # a valid pointer, which the kernel does not read
    _down_few[(triton.cdiv(weight.out, tiles.rows), blocks)](
        x,
        x if norm is None else norm,
        absent if residual is None else residual,
        *pointers_of(weight, x.dtype),
        absent if bias is None else bias,
        y,
        OUT=weight.out,
        TOKENS=tokens,
        BLOCKS=blocks,
        NORM=norm is not None,
        BIAS=bias is not None,
        SCALE=scale,
        RESIDUAL=residual is not None,
        EPS=eps,
        STRIDE=y.stride(0),
        TILES=tiles_of(tokens),
        PDL=pdl,
        launch_pdl=pdl,
        **constants_of(weight, tiles),
    )
