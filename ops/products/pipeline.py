"""How a program of one token's products multiplies a tile of rows.

A lane loads a quad (16 bytes) of a row at once. A program multiplies its tile in chunks, LANES
neighboring quads of each row, and keeps DEPTH of them in flight: when one is multiplied, the next
one takes its registers. With LANES = 32 each warp has rows of its own, and prepares all of x. With
LANES = 32 * warps each warp has all rows and its own part of x. Quantizing x takes as many
instructions as multiplying it by six rows of 4-bit codes, so more lanes are better there.

Where instructions bind (mxfp4), programs stay: no more than run at once, each with several tiles.
x then stays in registers, and a tile's last multiplications load the next tile's first chunks.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ops.launch import add_both, jit, tl
from ops.products.codes import load_scales, multiply_chunk
from ops.products.operands import (
    group_inverse_rms,
    lane_squares,
    load_norm,
    load_quantized,
    load_x,
    prepare_quantized,
    prepare_x,
    weighted_operands,
)
from ops.products.quantized_x import QuantizedX
from ops.products.tilings import Tiles, choose_tiles, depth_of, programs_of
from ops.products.weights import Codes, Weight
from ops.sizes import cdiv, pow2

S = TypeVar("S", bound="Product")


class Operand(NamedTuple):
    """The tensors of x. All pairs share one row, or there are several, one after the other."""

    numbers: Tensor  # as the kernel reads them
    units: Tensor | None = None  # second tensor of a `QuantizedX`
    norm: Tensor | None = None  # the weight of the RMS norm of x


@dataclass(frozen=True)
class Product(Codes):
    """Settings of a product: its weight, and how a program divides it."""

    kind: str
    group: int
    out: int  # rows of one expert's weight
    each: int  # quads of a row
    experts: int  # chosen experts whose rows of x are one after the other, to be summed; 0: dense
    loads: int  # rows of a weight that belong together: 2, gate and up
    rows: int  # rows of a tile of the result
    lanes: int  # quads of a row in a chunk
    depth: int  # chunks in flight
    tiles: int  # tiles of a program
    warps: int
    tokens: int = 1  # that a program multiplies; several have one tile
    blocks: int = 1  # programs of a tile, for other tokens

    gather = property(lambda s: s.experts > 0)
    quads = property(lambda s: s.each * max(s.experts, 1))  # quads of x
    # What the kernel loads of a token's x: words of two numbers in bf16, else numbers.
    numbers = property(lambda s: s.quads * 4 * (1 if s.kind == "bf16" else s.fields))
    of_loads = property(lambda s: tuple(range(s.loads)))  # 0, 1, ... of the loads
    token_numbers = property(lambda s: tuple(range(s.tokens)))  # 0, 1, ... of a program's tokens
    # Operands and units of a token's `QuantizedX`.
    quantized = property(lambda s: (s.quads * s.fields, s.units * s.quads))
    chunks = property(lambda s: -(-s.quads // s.lanes))
    held = property(lambda s: s.chunks if s.tiles > 1 else s.depth)  # chunks of x in registers
    of_rows = property(lambda s: s.has_row_scale and not s.gather)  # a row's scale multiplies sums


class Chosen(NamedTuple):
    """The chosen experts, or the scores by which a kernel chooses them."""

    indices: Tensor | None  # int64 [N]; None: a shared expert alone
    scores: Tensor | None = None  # the router's: then indices and weights are stored
    weights: Tensor | None = None  # fp32 [N], by which results are summed
    last: Tensor | None = None  # int64 [B]: the last real token of each row of several tokens


@jit
def replace(values, at: tl.constexpr, value):
    """Return a tuple with another value at one position."""
    return values[:at] + (value,) + values[at + 1 :]


@jit
def load_parts(x, chunk, s):
    """Load the x of a chunk, which is quantized or not, of each of the program's tokens."""
    if x.units is not None:
        return (load_quantized(x.numbers, x.units, chunk, s),)
    else:
        return [load_x(x.numbers + token * s.numbers, chunk, s) for token in s.token_numbers]


@jit
def load_beside(x, factors, chunk, s):
    """Load what x of a chunk is multiplied by: the norm's weight, or each quad's routing weight."""
    if x.norm is not None:
        return load_norm(x.norm, chunk, s)
    elif s.gather:
        quad = tl.minimum(chunk * s.lanes + tl.arange(0, s.lanes), s.quads - 1)
        return tl.reshape(tl.load(factors + quad // s.each), [1, s.lanes // 32, 32])
    else:
        return ()


@jit
def prepare(part, beside, x, s):
    """Make the operands of `multiply_chunk`: part is a token's of `load_parts`."""
    if x.units is not None:
        operands = prepare_quantized(part, s)
    elif x.norm is not None:
        operands = prepare_x(part, beside, s)
        if s.groups > 1:
            operands = weighted_operands(operands, group_inverse_rms(part, s), s)
    else:
        operands = prepare_x(part, None, s)
    if s.gather:
        operands = weighted_operands(operands, beside, s)
    return operands


@jit
def _locate(quads, experts, chunk, REPEAT: tl.constexpr, s):
    """Return expert (int64), the tile's row, and the quad in that, for each quad of a tile.

    quads: numbers of the tile's quads, row-major in [ROWS, LANES], each REPEAT times. experts: one
    index, or with `gather` that of each lane, [LANES]. Quads past the end become the last: their x
    is 0.
    """
    quad = tl.minimum(chunk * s.lanes + quads % s.lanes, s.quads - 1)
    own = quads // s.lanes
    if s.gather:
        COUNT: tl.constexpr = quads.shape[0]
        shape: tl.constexpr = (COUNT // (s.lanes * REPEAT), s.lanes, REPEAT)
        experts = tl.reshape(tl.broadcast_to(experts[None, :, None], shape), quads.shape)
        return experts.to(tl.int64), own, quad % s.each
    else:
        return experts, own, quad


@jit
def _load_neighbors(tensor, COUNT: tl.constexpr, experts, row, chunk, s):
    """Load COUNT neighboring words of each quad of a tile, in one load of a lane.

    All rows share a lane's address: the compiler puts what is constant into the loads.
    """
    at = tl.arange(0, s.rows * s.lanes * COUNT)
    expert, own, quad = _locate(at // COUNT, experts, chunk, COUNT, s)
    words = tensor + (expert * s.out + row) * (s.each * COUNT)
    words += own * (s.each * COUNT) + quad * COUNT + at % COUNT
    # The compiler does not see through the indices.
    return tl.load(tl.max_contiguous(tl.multiple_of(words, 4 * COUNT), COUNT))


@jit
def _load_chunk(weights, experts, row, chunk, s):
    """Load a chunk of ROWS rows -> codes [ROWS * LANES * 4], and scales as of `load_scales`."""
    codes = _load_neighbors(weights.codes, 4, experts, row, chunk, s)
    # Of two dimensions: loads of one shape get one layout, and the router's scores have another.
    at = tl.arange(0, s.rows * s.lanes)[:, None]
    expert, own, quad = _locate(at, experts, chunk, 1, s)
    scales = load_scales(weights, expert, row, own, quad, s)
    if s.kind == "hqq3":  # third bits
        scales = scales + (_load_neighbors(weights.high, 2, experts, row, chunk, s),)
    return codes, scales


@jit
def load_weights(weights, experts, row, chunk, s, POLLED: tl.constexpr = False):
    """Load a chunk of a tile of `loads` weights.

    experts: the one whose rows these are; with `gather` the indices of all, or None: the chunk has
    only the weight's last experts. POLLED: indices are in L2 (volatile), because the previous
    kernel may have just stored them.
    """
    chosen = experts
    if s.gather:
        quad = tl.minimum(chunk * s.lanes + tl.arange(0, s.lanes), s.quads - 1)
        if experts is None:
            chosen = quad // s.each + (s.total - s.experts)
        else:
            chosen = tl.load(experts + quad // s.each, volatile=POLLED).to(tl.int32)
    return [_load_chunk(weights, chosen, row + s.out // 2 * i, chunk, s) for i in s.of_loads]


@jit
def multiply_tile(x, weights, where, tiles, parts, table, rows, more, s):
    """Multiply a tile, and prefetch -> the lanes' sums [ROWS, LANES], a tuple of the tokens'.

    Also returns those of the second of `loads` weights, for one token. Then a tuple of each lane's
    squares of x, if that is normed. Then `tiles`, the chunks in flight of the next tile. where:
    experts as of `load_weights`, routing weights. parts: of `held` chunks x (`load_parts`) and what
    it is multiplied by; if programs stay, prepared operands. rows: the first one of this tile, and
    of the next. more: whether there is a next one.
    """
    experts, factors = where
    xs, besides = parts
    squares, totals = (), ()
    for _ in tl.static_range(s.tokens):
        squares = squares + (tl.zeros([s.lanes // 32, 32], tl.float32),)
        totals = totals + (tl.zeros([s.rows, s.lanes], tl.float32),)
    second = tl.zeros([s.rows, s.lanes], tl.float32)
    for c in tl.static_range(s.chunks):
        tile = tiles[c % s.depth]
        for t in tl.static_range(s.tokens):
            if s.tiles > 1:
                operands = xs[c]
            else:
                part = xs[c % s.depth][t]
                if x.norm is not None and s.groups == 1:
                    squares = replace(squares, t, squares[t] + lane_squares(part, s))
                operands = prepare(part, besides[c % s.depth], x, s)
            total = totals[t] + multiply_chunk(tile[0][0], tile[0][1], operands, table, s)
            totals = replace(totals, t, total)
            if s.loads == 2:
                second += multiply_chunk(tile[1][0], tile[1][1], operands, table, s)
        # Prefetch: the registers of this chunk are free now.
        row = rows[0] if c + s.depth < s.chunks else rows[1]
        if (c + s.depth < s.chunks) | more:
            tile = load_weights(weights, experts, row, (c + s.depth) % s.chunks, s)
        tiles = replace(tiles, c % s.depth, tile)
        if s.tiles == 1 and c + s.depth < s.chunks:
            xs = replace(xs, c % s.depth, load_parts(x, c + s.depth, s))
            besides = replace(besides, c % s.depth, load_beside(x, factors, c + s.depth, s))
    return totals, second, squares, tiles


@jit
def _of_lane(x, MASK: tl.constexpr):
    """Return of x [ROWS, WARPS, 32] the number that the lane at the own index ^ MASK has."""
    lane = (tl.arange(0, 32) ^ MASK)[None, None, :]
    return tl.gather(x, tl.broadcast_to(lane, x.shape), 2)  # one shuffle a number


@jit
def _share_rows(x, MASK: tl.constexpr):
    """Sum x [ROWS, WARPS, 32] over each group of 2 MASK lanes -> [WARPS, 32].

    The lower half of a group sums the first half of the rows, the upper half the others, and so on.
    Of 8 rows a lane gets one sum by 9 shuffles. It would get all 8 by 40.
    """
    ROWS: tl.constexpr = x.shape[0]
    if MASK == 0:
        return tl.reshape(x, x.shape[1:])
    elif ROWS == 1:
        return _share_rows(x + _of_lane(x, MASK), MASK // 2)
    else:
        halves = tl.reshape(x, [2, ROWS // 2, x.shape[1], 32])
        first, second = tl.split(tl.permute(halves, (1, 2, 3, 0)))
        upper = (tl.arange(0, 32) & MASK != 0)[None, None, :]
        own, other = tl.where(upper, second, first), tl.where(upper, first, second)
        return _share_rows(own + _of_lane(other, MASK), MASK // 2)


@jit
def sum_shared(total, s):
    """Sum the lanes' sums [ROWS, LANES] of each row -> [32], for the rows of `shared_rows`."""
    WARPS: tl.constexpr = s.lanes // 32
    return tl.sum(_share_rows(tl.reshape(total, [s.rows, WARPS, 32]), 16), 0)


@jit
def sum_normed(total, squares, s):
    """`sum_shared`, divided by the RMS of x (`lane_squares`). Warps exchange both sums at once."""
    WARPS: tl.constexpr = s.lanes // 32
    NUMBERS: tl.constexpr = s.quads * 4 * s.fields
    total = _share_rows(tl.reshape(total, [s.rows, WARPS, 32]), 16)
    squares = _share_rows(tl.reshape(squares, [1, WARPS, 32]), 16)
    total, squares = tl.reduce((total, squares), 0, add_both)
    return total * tl.rsqrt(squares / NUMBERS + s.eps)


@jit
def shared_rows(ROWS: tl.constexpr):
    """Return the row of each lane's number of `sum_shared`, and whether it stores the result."""
    EACH: tl.constexpr = 32 // ROWS
    lane = tl.arange(0, 32)
    return lane // EACH, lane % EACH == 0


@jit
def sum_lanes(total, s):
    """Sum the lanes' sums [ROWS, LANES] of each row -> [ROWS * LANES] with LANES = 32, else [ROWS].

    With 32 lanes every lane of a row gets its sum, and the first one stores it. One number a row
    would have another layout, for which warps wait for each other. `_multiply_each` sums so: with
    `sum_shared` the compiler starts its next loads later (docs/log/small_experts.md).
    """
    total = tl.sum(total, 1)
    if s.lanes == 32:
        total = tl.reshape(tl.broadcast_to(total[:, None], [s.rows, 32]), [s.rows * 32])
    return total


@jit
def result_rows(s):
    """Return the row of each number of `sum_lanes`, and whether it stores the result."""
    if s.lanes == 32:
        lane = tl.arange(0, s.rows * 32)
        return lane // 32, lane % 32 == 0
    else:
        row = tl.arange(0, s.rows)
        return row, row >= 0


def operand_of(x: Tensor, weight: Weight) -> Tensor:
    """Return x as the kernel reads it. Raises ValueError for a wrong dtype."""
    if weight.kind == "bf16":
        if x.dtype != torch.bfloat16:
            raise ValueError(f"bf16 weights need bf16 x, not {x.dtype}")
        return x.view(torch.int32)
    if x.element_size() != 2:
        raise ValueError(f"packed weights need x of 16 bits, not {x.dtype}")
    return x


def operands_of(x: Tensor | QuantizedX, weight: Weight, norm: Tensor | None = None) -> Operand:
    """Return x, and the weight of its norm, as a kernel reads them."""
    if isinstance(x, QuantizedX):
        return Operand(x.operands, x.units)
    if norm is not None and norm.dtype != torch.float32:
        norm = operand_of(norm, weight)
    return Operand(operand_of(x, weight), norm=norm)


def settings_of(
    kind: type[S],
    weight: Weight,
    experts: int,
    tiles: Tiles | None,
    pairs: int = 1,
    of_tokens: int = 1,
    **fields,
) -> tuple[S, tuple[int, ...], dict]:
    """Return a product's settings, its grid, and options of `launch`.

    kind: of settings. experts: as in `Product`. tiles: None chooses them for `of_tokens` tokens.
    pairs: rows of the result, or blocks of them. fields: `loads`, if it is not 1, and the other
    fields of that kind.
    """
    quads, out = weight.quads * max(experts, 1), weight.out // fields.setdefault("loads", 1)
    tiles = tiles or choose_tiles(weight, quads, fields["loads"], of_tokens, experts > 0)
    rows = min(tiles.rows, pow2(out + 1) // 2)
    programs, each = cdiv(out, rows), 1
    if tiles.stay and not fields.get("early") and fields.get("tokens", 1) == 1:
        programs, each = programs_of(tiles, programs, weight.multiprocessors, pairs)
    settings = kind(
        kind=weight.kind,
        group=weight.group,
        out=weight.out,
        each=weight.quads,
        experts=experts,
        rows=rows,
        lanes=tiles.lanes,
        depth=depth_of(quads, tiles),
        tiles=each,
        warps=tiles.warps,
        **fields,
    )
    return settings, (programs, pairs), tiles.options
