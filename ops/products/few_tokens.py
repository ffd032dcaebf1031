"""Dense products of 2 to 64 tokens on tensor cores.

x [T, in] @ weight [out, in]^T, with bias and residual. ops/products/fragments.py
has the loop; ops/products/expert_tiles.py has the products of experts.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ops.declared import Activation
from ops.launch import await_previous, jit, launch, tl
from ops.products.codes import activate
from ops.products.few_weights import load_row_scales, load_rows
from ops.products.few_x import UnitOrder, load_fields
from ops.products.fragments import TILE, FewSettings, multiply_steps
from ops.products.planes import (
    Planes,
    load_codes,
    load_planes,
    multiply_codes,
    plane_place,
)
from ops.products.tilings import has_many_rows, measured_fields, place_of
from ops.products.units import finish
from ops.products.weights import DIGITS, GGUF, Weight, WeightTensors
from ops.sizes import cdiv, pow2

BLOCK = 32  # most tokens of a program
TILE_REGISTERS = 64  # a lane's, for weights in flight
HELD = 8192  # numbers of x that a program of a narrow product holds
# The most of a product with few rows, by warps: it has all of a program's weights in flight if they
# fit. Decoding codes takes more of the other registers than bf16 does.
MOST_REGISTERS = {4: 160, 8: 160, 16: 64}
MOST_OF_BF16 = {4: 192, 8: 192, 16: 64}
MOST_OF_DIGITS = {4: 96, 8: 96, 16: 64}


@dataclass(frozen=True)
class DenseSettings(FewSettings):
    """What `_down_few` is compiled for."""

    blocks: int  # of tokens
    all_tokens: int  # of all blocks; the last one begins early enough to be whole
    stride: int  # between rows of y
    scale: float
    activation: Activation | None = None  # before the residual is added; up is 1
    gated: bool = False
    early: bool = False  # the next kernel starts at once
    narrow: int = 0  # rows of another weight that is multiplied by the same x
    narrow_stride: int = 0  # between rows of that product
    planes: bool = False  # x is `Planes`
    eps: float = 0.0  # added to the mean square of x, if planes have squares

    padded = property(lambda s: pow2(s.width))
    # Tokens whose x `_multiply_row` holds at once.
    held = property(lambda s: min(pow2(s.tokens), max(1, HELD // s.padded)))


class BesideFew(NamedTuple):
    """Another weight that is multiplied by the same x in one launch."""

    weight: Tensor  # [rows, in], as x
    y: Tensor


# A program of `_down_few`: it computes `stored` rows of the result of a block of tokens.
#
# The result is scale * (product + bias), activated if so declared, + residual. All but x is loaded
# before the wait.
@jit
def _multiply_block(x, residual, weights, bias, y, program, s: tl.constexpr, PDL: tl.constexpr):
    TOKENS: tl.constexpr = 8 * s.tiles
    OUT: tl.constexpr = s.out
    row = program * s.stored
    if s.blocks > 1:
        first = tl.program_id(1) * s.tokens
        if s.all_tokens % s.tokens:
            first = tl.minimum(first, s.all_tokens - s.tokens)
        x += first * s.width
        y += first * s.stride
        if residual is not None:
            residual += first * OUT
    tiles, xs = (), ()
    for d in tl.static_range(s.depth):
        tiles = tiles + (load_rows(weights, row, d, d == s.steps - 1, s),)
    rows, token = row + tl.arange(0, s.rows)[:, None], tl.arange(0, TOKENS)[None, :]
    stores = (rows < OUT) & (token < s.tokens)
    if s.stored < s.rows:
        stores &= rows < row + s.stored
    if residual is not None:
        add = tl.load(residual + token * OUT + rows, mask=stores, other=0.0).to(tl.float32)
    if bias is not None:
        biases = tl.load(bias + rows, mask=rows < OUT, other=0.0).to(tl.float32)
    row_scales = load_row_scales(weights, 0, rows, rows < OUT, s)
    await_previous(PDL, s.early)
    for d in tl.static_range(s.x_depth):
        xs = xs + (load_fields(x, None, d, d == s.steps - 1, s),)
    totals = multiply_steps(x, None, weights, row, (tiles, xs), s)
    result = finish(tl.sum(totals[0], 0), row_scales, s.kind, x.dtype.element_ty)
    if bias is not None:
        result += biases
    if s.scale != 1.0:
        result *= s.scale
    if s.activation is not None:
        result = activate(result, 1.0, s.activation)
    if residual is not None:
        result += add
    tl.store(y + token * s.stride + rows, result.to(y.dtype.element_ty), mask=stores)


# `_multiply_block` for x that is `Planes`.
@jit
def _multiply_planes(x, residual, weights, y, program, s: tl.constexpr, PDL: tl.constexpr):
    loaded, lane = (), tl.arange(0, 32)
    token, stores = lane % 4, lane % 4 < s.tokens
    for n in tl.static_range(s.stored // 16):
        loaded = loaded + (load_codes(weights, program * s.stored + n * 16, s),)
    await_previous(PDL, s.early)
    tokens = load_planes(x, s)
    for n in tl.static_range(s.stored // 16):
        first, second, square = multiply_codes(loaded[n], tokens, s)
        rows = program * s.stored + n * 16 + lane // 4
        if s.kind == "int8":
            first *= tl.load(weights.scale + rows).to(tl.float32)
            second *= tl.load(weights.scale + rows + 8).to(tl.float32)
        factor = s.scale
        if x.squares is not None:
            factor *= tl.rsqrt(square / s.width + s.eps)
        first, second = first * factor, second * factor
        if residual is not None:
            add = residual + token * s.out + rows
            first += tl.load(add, mask=stores, other=0.0).to(tl.float32)
            second += tl.load(add + 8, mask=stores, other=0.0).to(tl.float32)
        place = y + token * s.stride + rows
        tl.store(place, first.to(y.dtype.element_ty), mask=stores)
        tl.store(place + 8, second.to(y.dtype.element_ty), mask=stores)


# One row of a 16-bit weight times the tokens of the only block, in registers: on tensor cores 16
# rows would be one program, whose loads of x wait for each other.
@jit
def _multiply_row(x, squares, weight, y, row, s: tl.constexpr, PDL: tl.constexpr):
    number = tl.arange(0, s.padded)
    inside = number < s.width
    numbers = tl.load(weight + row * s.width + number, mask=inside, other=0.0)
    await_previous(PDL, s.early)
    for n in tl.static_range(0, s.tokens, s.held):
        token = n + tl.arange(0, s.held)
        exists = token < s.tokens
        tile = x + token[:, None] * s.width + number[None, :]
        tile = tl.load(tile, mask=exists[:, None] & inside[None, :], other=0.0)
        total = tl.sum(tile.to(tl.float32) * numbers.to(tl.float32)[None, :], 1)
        if squares is not None:
            group = tl.arange(0, s.padded // 128)[None, :]
            square = squares + group * s.tokens + token[:, None]
            square = tl.load(square, mask=exists[:, None] & (group < s.width // 128), other=0.0)
            total *= tl.rsqrt(tl.sum(square, 1) / s.width + s.eps)
        tl.store(y + token * s.narrow_stride + row, total.to(y.dtype.element_ty), mask=exists)


# Grid [R, blocks]. The first `narrow` programs multiply another weight by the same tokens, while
# the others run: a kernel of its own would end after them.
@jit
def _down_few(x, residual, weights, bias, y, beside, s: tl.constexpr, PDL: tl.constexpr):
    program = tl.program_id(0)
    if s.narrow > 0:
        if program < s.narrow:
            if s.planes:
                _multiply_row(x.plain, x.squares, beside.weight, beside.y, program, s, PDL)
            else:
                _multiply_row(x, None, beside.weight, beside.y, program, s, PDL)
            return
        program -= s.narrow
    if s.planes:
        _multiply_planes(x, residual, weights, y, program, s, PDL)
    else:
        _multiply_block(x, residual, weights, bias, y, program, s, PDL)


@dataclass(frozen=True)
class FewTiles:
    """How a product of several tokens divides its work. benchmarks/few_tokens.py measures some."""

    rows: int = 16  # rows of the result that a program computes: up to 64
    warps: int = 4  # each takes a part of the numbers along `in`
    depth: int = 0  # steps of weights in flight; 0: all
    tokens: int = BLOCK  # most tokens of a program of a dense product: 8, 16 or 32
    x_depth: int = 0  # steps of x in flight; 0: as many as of weights
    loop: bool = False  # steps are a loop though they are few: less code
    registers: int = 0  # most registers of a lane; 0: the compiler's choice

    # Options of `launch` for a kernel with these tiles.
    options = property(lambda s: dict(warps=s.warps, stages=1, registers=s.registers))


def words_of_lane(weight: Weight) -> int:
    """Return the words that a lane loads at once.

    Four lanes' are within a group, but for scales that are multiplied as digits.
    """
    if has_digits(weight):
        return 4
    if weight.kind not in ("int4", "hqq", "fp8b", *GGUF):
        return 4  # no scales along `in`, or those of e2m1; two bits: numbers have their scales
    return next(vec for vec in (4, 2, 1) if weight.run % (4 * vec) == 0)


def has_digits(weight: Weight) -> bool:
    """Whether scales are multiplied as digits: integers, which a `step` multiplies."""
    return weight.kind in DIGITS and weight.tensors.step is not None


def registers_of_step(weight: Weight) -> int:
    """Return the registers of a step of 16 rows: of codes, and of scales if each lane has some."""
    above = {"q5_k": 2, "q6_k": 4}.get(weight.kind, 0)
    return 2 * words_of_lane(weight) + (4 + above if has_digits(weight) else 0)


def choose_few_tiles(weight: Weight, tokens: int = TILE) -> FewTiles:
    """Return how to divide a dense product of several tokens, as measured on an H200.

    The table's tiles come first; the work is "dense". The rules are for other shapes.

    A program loads x in small pieces, which bind it: with more than 16 tokens 64 rows share them,
    and a program has fewer tokens if few would be left. 9 to 15 tokens share a program's weights,
    and 16 those of bf16; of packed weights x binds 16, so that two blocks of 8 are as fast
    (docs/log/speculation.md). Programs of 4 bits use few registers, so that a multiprocessor runs
    many of them. A product with few rows has all of its weights in flight, or eight warps a
    program, which keep the memory busy (docs/log/prompts.md). With up to 8 tokens x binds a head,
    too: it has enough programs of 64 rows.
    """
    if found := measured_fields(weight, place_of(weight, "dense", tokens)):
        tiles = FewTiles(*found)
        if tokens <= tiles.tokens or tokens % tiles.tokens == 0:
            return tiles
    if has_digits(weight):
        return choose_digit_tiles(weight, tokens)
    few = weight.out < 2 * weight.multiprocessors * 16
    warps = 8 if few else 4
    if tokens > TILE:
        narrow = weight.out < 512
        size = TILE if narrow or cdiv(weight.out, 64) * tokens < 16 * 128 else 16
        size = BLOCK if tokens % size else size
        shares = tokens < 2 * TILE or weight.kind == "bf16"
        fits = tokens <= 2 * TILE and weight.out < 64 * weight.multiprocessors
        if shares and fits and not narrow:
            return choose_two_tiles(weight)
        if size == TILE and tokens == 2 * TILE and not narrow:
            return FewTiles(32 if weight.fields >= 8 and not few else 16, warps, 2, TILE)
        if narrow:
            return FewTiles(16, 8, 2, size)
        return FewTiles(64, 4, 1 if tokens > 32 else 2, size)
    if weight.out < 64 * weight.multiprocessors and (weight.fields >= 8 or weight.kind == "bf16"):
        return choose_small_tiles(weight)
    if has_many_rows(weight) and (weight.fields == 4 or weight.kind in GGUF):
        return FewTiles(64, 4, 1, x_depth=1)
    if weight.fields >= 8:
        return FewTiles(16, 4, 1)
    return FewTiles(16, warps, TILE_REGISTERS // registers_of_step(weight))


def choose_plane_tiles(weight: Weight) -> FewTiles:
    """Return how to divide a product of `Planes`: rows and warps of a program."""
    return FewTiles(*(measured_fields(weight, plane_place(weight)) or (16, 4)))


def choose_digit_tiles(weight: Weight, tokens: int) -> FewTiles:
    """Return how to divide a dense product whose scales are multiplied as digits.

    A step of 16 rows has twice the registers of int4's. So a program has 32 rows at most, and 8
    tokens each of more than 16; iq4, whose decoding binds, has 16. With more than 16 rows for each
    multiprocessor programs have four warps, so that several of them run at once. A head's programs
    are small: they wait at their end. All numbers are in docs/log/speculation.md.
    """
    if has_many_rows(weight):
        return FewTiles(32, 2, 1, TILE if tokens <= TILE else 2 * TILE, x_depth=1, loop=True)
    if tokens <= TILE and weight.out < 64 * weight.multiprocessors:
        tiles = choose_small_tiles(weight)
        return tiles if tiles.depth == 0 else FewTiles(16, 8, 2, x_depth=1)
    if TILE < tokens <= 2 * TILE or (weight.kind == "iq4" and tokens > TILE):
        warps = 8 if weight.out <= 16 * weight.multiprocessors else 4
        return FewTiles(16, warps, 4, 2 * TILE, x_depth=1)
    return FewTiles(32 if weight.out >= 512 else 16, 4, 2, TILE, x_depth=1)


def choose_small_tiles(weight: Weight) -> FewTiles:
    """Return how to divide a product of up to 8 tokens with few rows.

    All weights are in flight, in as few warps as hold them; of longer rows as many as possible.
    """
    each = registers_of_step(weight)
    most = MOST_OF_BF16 if weight.kind == "bf16" else MOST_REGISTERS
    most = MOST_OF_DIGITS if has_digits(weight) else most
    found = []
    for warps, registers in most.items():
        steps = cdiv(4 * weight.quads, 4 * words_of_lane(weight) * warps)
        depth = largest_divisor(steps, registers // each)
        if depth == steps:
            return FewTiles(16, warps, 0, x_depth=1)
        found.append(FewTiles(16, warps, depth, x_depth=1))
    return max(found, key=lambda tiles: tiles.warps * tiles.depth)


def choose_two_tiles(weight: Weight) -> FewTiles:
    """Return how to divide a dense product of 9 to 16 tokens, whose weight is read once.

    Each program reads all of x. So a multiprocessor has one program of a bf16 weight with up to 32
    rows each: 22 of gpt-oss-20b's wo. With 16 rows some would have twice as many.
    """
    rows = cdiv(weight.out, weight.multiprocessors)
    if weight.kind == "bf16" and 16 < rows <= 32:
        return FewTiles(rows, 8, 8, 2 * TILE, x_depth=2)
    return FewTiles(16, 8, 4, 2 * TILE, x_depth=1)


def unit_tensors(weight: Weight, plain: torch.dtype) -> WeightTensors:
    """Return tensors with codes as units of 16 bits. plain: the dtype of bf16's, that of x."""
    tensors = weight.tensors
    codes = tensors.codes.view(plain if weight.kind == "bf16" else torch.int16)
    if weight.kind == "iq4" and has_digits(weight):  # pairs
        tensors = tensors._replace(scale=tensors.scale.view(torch.int16))
    if weight.kind != "mxfp4":
        high = tensors.high
        high = None if high is None else high.view(torch.int16)
        return tensors._replace(codes=codes, high=high)
    return WeightTensors(codes, tensors.scale.reshape(-1).view(torch.int16))


def order_words(x: Tensor, weight: Weight) -> Tensor:
    """Return x [..., in] as the kernel reads it.

    If words have scales: first the numbers of the first fields of each quad's words, and so on, so
    that a load takes four at once.
    """
    if not weight.word_scaled:
        return x
    return x.unflatten(-1, (-1, 4, weight.fields)).transpose(-2, -1).flatten(-3)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def unit_order(weight: Weight) -> UnitOrder | None:
    """Return the order of x for the products of a weight; None: x remains as it is."""
    if weight.kind == "bf16" or weight.two_bits:
        return None
    return UnitOrder(weight.fields, weight.run, words_of_lane(weight), weight.kind == "q6_k")


def settings_of(weight: Weight, tiles: FewTiles, tokens: int, ordered: bool = False) -> dict:
    """Return the fields of `FewSettings` for programs of up to this many tokens.

    ordered: x is in the weight's `UnitOrder`.
    """
    words, vec = 4 * weight.quads, words_of_lane(weight)
    steps = cdiv(words, 4 * vec * tiles.warps)
    depth = largest_divisor(steps, tiles.depth or steps)  # no step is past the end
    return dict(
        out=weight.out,
        words=words,
        group=weight.group,
        kind=weight.kind,
        vec=vec,
        rows=max(16, pow2(tiles.rows)),
        stored=tiles.rows,
        warps=tiles.warps,
        depth=depth,
        x_depth=largest_divisor(depth, tiles.x_depth or depth),
        loop=tiles.loop,
        ordered=ordered,
        tokens=tokens,
    )


def multiply_planes(
    x: Planes,
    weight: Weight,
    y: Tensor,
    residual: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 0.0,
    beside: tuple[Weight, Tensor] | None = None,
) -> None:
    """Store scale * (norm(x) @ weight) + residual in y [T, out]. eps: of the norm, if there is one.

    beside: as of `down_few`, for planes that have the plain x, too.
    """
    tiles = choose_plane_tiles(weight)
    s = DenseSettings(
        **settings_of(weight, tiles, len(y)),
        blocks=1,
        all_tokens=len(y),
        stride=y.stride(0),
        scale=scale,
        planes=True,
        eps=eps,
    )
    programs, others = cdiv(weight.out, tiles.rows), None
    if beside is not None:
        narrow, result = beside
        s = replace(s, narrow=narrow.out, narrow_stride=result.stride(0))
        programs += narrow.out
        others = BesideFew(unit_tensors(narrow, x.plain.dtype).codes, result)
    tensors = x, residual, weight.tensors, None, y, others
    launch(_down_few, (programs, 1), *tensors, settings=s, **tiles.options)


def down_few(
    x: Tensor,
    weight: Weight,
    y: Tensor,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    tiles: FewTiles | None = None,
    activation: Activation | None = None,
    early: bool = False,
    beside: tuple[Weight, Tensor] | None = None,
) -> None:
    """Store scale * (x @ weight + bias) + residual in y [T, out].

    x [T, in], weight [out, in], residual [T, out], bias [out]. activation: of the sum before the
    residual is added, which is its gate; up is 1. early: let the next kernel start at once. beside:
    another weight, of 16 bits and few rows, that is multiplied by x, and where to store that
    product.

    Raises ValueError unless all programs have the same number of tokens.
    """
    tiles = tiles or choose_few_tiles(weight, len(x))
    blocks, tokens = cdiv(len(x), tiles.tokens), min(len(x), tiles.tokens)
    fixed = settings_of(weight, tiles, tokens)
    fixed |= dict(blocks=blocks, all_tokens=len(x), stride=y.stride(0), scale=scale)
    s = DenseSettings(**fixed, activation=activation, early=early)
    if x.shape[1] != s.width or y.shape != (len(x), s.out):
        raise ValueError(f"x {list(x.shape)}, y {list(y.shape)} for a weight [{s.out}, {s.width}]")
    programs, others = cdiv(s.out, s.stored), None
    if beside is not None:
        narrow, result = beside
        s = replace(s, narrow=narrow.out, narrow_stride=result.stride(0))
        programs += narrow.out
        others = BesideFew(unit_tensors(narrow, x.dtype).codes, result)
    tensors = order_words(x, weight), residual, unit_tensors(weight, x.dtype), bias, y, others
    launch(_down_few, (programs, blocks), *tensors, settings=s, **tiles.options)
