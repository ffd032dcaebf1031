"""The loop of products of several tokens: weights times x on tensor cores, step by step.

A GPU that multiplies several tokens without tensor cores runs out of instructions before it runs
out of bandwidth. A tensor core's instruction (m16n8k16) takes 16 rows of a weight, 16 numbers along
`in`, and 8 tokens: a tile. The tiles of a program share its weights.

Fragments. Lane 4 r + j of a warp holds, of row r of the weight and of token r, the numbers that it
multiplies with those of lanes 4 r to 4 r + 3. A product may visit the numbers along `in` in any
order that x and the weight share. So lane j of a row loads 16 neighboring bytes of the weight, and
x at the numbers which these bytes contain. Nothing moves between lanes, or through shared memory.

Units. Codes are read as units of 16 bits (ops/products/units.py). The two units of a word are
neighbors in a tensor core's register. A step is 4 * vec words of each row: vec neighboring words
for each of four lanes. Each of a program's n warps takes every n-th step, and the warps' sums are
added at the end. `depth` steps of a warp are in flight.

Exactness. Codes are multiplied as they are: 16 bits hold each of them exactly. A group's scale
multiplies the fp32 sum of its products, so that a step lies within a group; a scale of few digits
(mxfp4, nvfp4) multiplies the codes. x times the norm's weight is the sum of two 16-bit numbers.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

from dataclasses import dataclass

from ops.launch import jit, tl, triton
from ops.products.units import decode, e2m1_factor, pair_factors

TILE = 8  # tokens of a tensor core's instruction


@dataclass(frozen=True)
class FewSettings:
    """What a product of several tokens is compiled for."""

    out: int  # rows of the weight
    words: int  # of 32 bits, of a row
    group: int  # numbers that share a scale
    kind: str
    vec: int  # words that a lane loads at once
    rows: int  # rows of the result that a program computes
    warps: int
    depth: int
    tokens: int  # tokens of a program

    @property
    def fields(self) -> int:
        """Codes of a unit."""
        return {"bf16": 1, "int8": 2, "fp8": 2, "fp8b": 2}.get(self.kind, 4)

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return 2 * self.words * self.fields

    @property
    def run(self) -> int:
        """Words of a group."""
        return self.group // (2 * self.fields)

    @property
    def steps(self) -> int:
        return triton.cdiv(self.words, 4 * self.vec * self.warps)

    @property
    def tiles(self) -> int:
        """Tiles of a program, a power of two."""
        return triton.next_power_of_2(triton.cdiv(self.tokens, TILE))

    @property
    def row_scaled(self) -> bool:
        """Whether a scale a row multiplies the sums."""
        return self.kind in ("int8", "fp8", "nvfp4")

    @property
    def e2m1(self) -> bool:
        """Whether codes are e2m1 numbers, which scales multiply."""
        return self.kind in ("mxfp4", "nvfp4")

    @property
    def step_scaled(self) -> bool:
        """Whether a scale multiplies the sum of a step's products."""
        return self.kind in ("int4", "hqq", "fp8b")

    @property
    def scales(self) -> int:
        """Scales of an expert's weight; for mxfp4 and nvfp4 pairs of them."""
        if self.row_scaled and not self.e2m1:
            return self.out
        if self.kind == "fp8b":
            return triton.cdiv(self.out, self.group) * (self.width // self.group)
        return self.out * (self.width // self.group) // (2 if self.kind == "mxfp4" else 1)


# Weights ------------------------------------------------------------------------------------------


@jit
def _rows_and_words(lane, row, step, s: tl.constexpr):
    """Return the row, and the first word, of each lane's weights in a step.

    Rows and words past the end become the last: such a row is not stored, such a word's x is 0.
    """
    VEC: tl.constexpr = s.vec
    WARPS: tl.constexpr = s.warps
    rows = tl.minimum(row + lane // (32 * WARPS) * 8 + lane // 4 % 8, s.out - 1)
    word = ((step * WARPS + lane // 32 % WARPS) * 4 + lane % 4) * VEC
    return rows, tl.minimum(word, s.words - VEC)


@jit
def _load_step(weights, row, step, s: tl.constexpr):
    """Load a step of the rows from `row` on, for each warp.

    Return units [rows / 8 * warps * 32 * 2 vec], then scales and zeros, one number a lane.
    """
    UNITS: tl.constexpr = 2 * s.vec
    LANES: tl.constexpr = s.rows * s.warps * 4
    GROUP: tl.constexpr = s.group
    WIDTH: tl.constexpr = s.width
    at = tl.arange(0, LANES * UNITS)
    rows, word = _rows_and_words(at // UNITS, row, step, s)
    # A lane's units are one aligned load, which the compiler does not see through their indices.
    units = weights.codes + (rows * (2 * s.words) + word * 2 + at % UNITS)
    tile = (tl.load(tl.max_contiguous(tl.multiple_of(units, 2 * UNITS), UNITS)),)
    # Of two dimensions: the compiler gives neighbors to a lane if loads of one shape, of x, do so.
    lane = tl.arange(0, LANES)
    if not s.e2m1:
        lane = lane[:, None]
    rows, word = _rows_and_words(lane, row, step, s)
    if s.kind == "fp8b":
        scale = weights.scale + rows // GROUP * (WIDTH // GROUP) + word * 4 // GROUP
        tile = tile + (tl.load(scale),)
    elif s.step_scaled or s.e2m1:
        group = rows * (WIDTH // GROUP) + word * 8 // GROUP
        if s.kind == "mxfp4":
            # Pairs of exponents: with loads of 8 bits before it, a product would take other
            # fragments (kWidth 4).
            pair = tl.load(weights.scale + group // 2).to(tl.int32)
            tile = tile + (pair >> group % 2 * 8 & 0xFF,)
        else:
            tile = tile + (tl.load(weights.scale + group),)
        if s.kind == "hqq" and weights.scale_step is None:
            tile = tile + (tl.load(weights.zero + group),)
        elif s.kind == "hqq":
            tile = tile + (tl.load(weights.scale_step + rows), tl.load(weights.scale_low + rows))
            tile = tile + (tl.load(weights.zero + group),)
            tile = tile + (tl.load(weights.zero_step + rows), tl.load(weights.zero_low + rows))
    return tile


@jit
def load_rows(weights, row, step, s: tl.constexpr):
    """Load a step of the rows from `row` on; if gated, of gate and of up."""
    if s.gated:  # rows of gate past the end are rows of up: they are not stored
        gate = _load_step(weights, row, step, s)
        return gate, _load_step(weights, row + s.out // 2, step, s)
    else:
        return (_load_step(weights, row, step, s),)


@jit
def load_row_scales(weights, first, rows, inside, s: tl.constexpr):
    """Load the scales of rows, counted from `first` on, of a kind with one scale a row."""
    if s.row_scaled:
        scale = weights.scale_step if s.kind == "nvfp4" else weights.scale
        return tl.load(scale + first + rows, mask=inside, other=0.0).to(tl.float32)
    else:
        return 1.0


@jit
def _weight_fragments(numbers, s: tl.constexpr):
    """Order a field's numbers as a tensor core takes them -> [warps, rows, 8 vec]."""
    R: tl.constexpr = s.rows // 8
    VEC: tl.constexpr = s.vec
    WARPS: tl.constexpr = s.warps
    ROWS: tl.constexpr = s.rows
    if VEC == 1:  # two fields of each unit, the last dimension
        numbers = tl.reshape(numbers, [R, WARPS, 8, 4, 2, 2])
        return tl.reshape(tl.permute(numbers, (1, 0, 2, 5, 3, 4)), [WARPS, ROWS, 16])
    else:
        numbers = tl.reshape(numbers, [R, WARPS, 8, 4, VEC // 2, 2, 2])
        numbers = tl.permute(numbers, (1, 0, 2, 4, 5, 3, 6))
        return tl.reshape(numbers, [WARPS, ROWS, 8 * VEC])


@jit
def _row_factors(factor, s: tl.constexpr):
    """Spread one number a lane, of its row, to sums [warps, rows, 8 tiles]."""
    R: tl.constexpr = s.rows // 8
    WARPS: tl.constexpr = s.warps
    ROWS: tl.constexpr = s.rows
    TILES: tl.constexpr = s.tiles
    factor = tl.reshape(factor, [R, WARPS, 8, 1, 4, 1])
    factor = tl.broadcast_to(factor, [R, WARPS, 8, TILES, 4, 2])
    return tl.reshape(tl.permute(factor, (1, 0, 2, 3, 4, 5)), [WARPS, ROWS, 8 * TILES])


@jit
def _unit_factors(scale, s: tl.constexpr, DTYPE: tl.constexpr):
    """Repeat one scale of mxfp4, or a pair of nvfp4, a lane for each of its units.

    Return factors of `decode`.
    """
    R: tl.constexpr = s.rows // 8
    WARPS: tl.constexpr = s.warps
    if s.kind == "nvfp4":
        even, odd = pair_factors(scale, DTYPE)
        factor = tl.reshape(tl.join(even, odd), [R, WARPS, 8, 4, 1, 2])
        factor = tl.broadcast_to(factor, [R, WARPS, 8, 4, 4, 2])
    else:
        factor = tl.reshape(e2m1_factor(scale, DTYPE), [R, WARPS, 8, 4, 1])
        factor = tl.broadcast_to(factor, [R, WARPS, 8, 4, 8])
    return tl.reshape(factor, [R * WARPS * 256])


# x ------------------------------------------------------------------------------------------------


@jit
def _load_field(x, begins, step, K: tl.constexpr, s: tl.constexpr, ONE_ROW: tl.constexpr):
    """Load the x of field K of a step, two units of each word -> [tiles * 2 * warps * 32 * vec].

    begins: where the row of x of each number begins (`spread_begins`). None: x has the program's
    tokens, of which the last is that of all past the end. ONE_ROW: x is one row. Words past the end
    are 0.
    """
    VEC: tl.constexpr = s.vec
    WARPS: tl.constexpr = s.warps
    FIELDS: tl.constexpr = s.fields
    RUN: tl.constexpr = s.run  # words whose fields are neighbors in x
    WORDS: tl.constexpr = s.words
    TILES: tl.constexpr = 1 if ONE_ROW else s.tiles
    at = tl.arange(0, 64 * WARPS * VEC * TILES)
    tile, at = at // (64 * WARPS * VEC), at % (64 * WARPS * VEC)
    if FIELDS == 1:  # bf16: units are neighbors
        lane, word, half = at // (2 * VEC), at // 2 % VEC, at % 2
    else:
        lane, word, half = at // VEC % (32 * WARPS), at % VEC, at // (32 * WARPS * VEC)
    token, quad = tile * 8 + lane // 4 % 8, (step * WARPS + lane // 32) * 4 + lane % 4
    word += quad * VEC
    if FIELDS == 1:
        number = word * 2 + half
    else:
        number = word // RUN * (RUN * 2 * FIELDS) + (K + FIELDS * half) * RUN + word % RUN
    if begins is not None:
        number += begins
    elif not ONE_ROW:
        number += tl.minimum(token, s.tokens - 1) * s.width
    RUN_OF_LOAD: tl.constexpr = 2 * VEC if FIELDS == 1 else VEC
    number = tl.max_contiguous(tl.multiple_of(number, RUN_OF_LOAD), RUN_OF_LOAD)
    if WORDS % (4 * VEC * WARPS):
        return tl.load(x + number, mask=quad < WORDS // VEC, other=0.0)
    else:
        return tl.load(x + number)


@jit
def load_fields(x, begins, step, s: tl.constexpr, ONE_ROW: tl.constexpr):
    """Load the x of all fields of a step, so that all loads are in flight at once."""
    FIELDS: tl.constexpr = s.fields
    fields = ()
    for k in tl.static_range(FIELDS):
        fields = fields + (_load_field(x, begins, step, k, s, ONE_ROW),)
    return fields


@jit
def spread_begins(begins, s: tl.constexpr):
    """Spread one number a lane and tile, [tiles * warps * 32], in the order of `_load_field`."""
    VEC: tl.constexpr = s.vec
    WARPS: tl.constexpr = s.warps
    TILES: tl.constexpr = s.tiles
    if s.fields == 1:
        begins = tl.reshape(begins, [TILES, WARPS * 32, 1])
        begins = tl.broadcast_to(begins, [TILES, WARPS * 32, 2 * VEC])
    else:
        begins = tl.reshape(begins, [TILES, 1, WARPS * 32, 1])
        begins = tl.broadcast_to(begins, [TILES, 2, WARPS * 32, VEC])
    return tl.reshape(begins, [64 * WARPS * VEC * TILES])


@jit
def _token_fragments(numbers, s: tl.constexpr):
    """Order the x of a field as `_weight_fragments` does -> [warps, 8 vec, 8 tiles]."""
    VEC: tl.constexpr = s.vec
    WARPS: tl.constexpr = s.warps
    TILES: tl.constexpr = s.tiles
    if s.fields == 1:
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
def token_sums(numbers, s: tl.constexpr):
    """Sum numbers of a tile in the order of `_load_field` for each token -> [8]."""
    VEC: tl.constexpr = s.vec
    WARPS: tl.constexpr = s.warps
    if s.fields == 1:
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
def _zeros(s: tl.constexpr):
    WARPS: tl.constexpr = s.warps
    ROWS: tl.constexpr = s.rows
    TOKENS: tl.constexpr = 8 * s.tiles
    return tl.zeros([WARPS, ROWS, TOKENS], tl.float32)


@jit
def _decode_fragments(units, factor, K: tl.constexpr, s: tl.constexpr, DTYPE: tl.constexpr):
    """Decode a field of a step's units as fragments; with one word a lane, two fields at once."""
    KIND: tl.constexpr = s.kind
    numbers = decode(units, factor, K, KIND, DTYPE)
    if s.vec == 1:
        numbers = tl.join(numbers, decode(units, factor, K + 1, KIND, DTYPE))
    return _weight_fragments(numbers, s)


@jit
def _scale_step(tile, total, x_sums, s: tl.constexpr):
    """Multiply a step's sums by the scale of their group, from which hqq subtracts zeros."""
    factor = tile[1].to(tl.float32)
    if s.kind == "hqq":
        if len(tile) == 3:
            zero = tile[2].to(tl.float32)
        else:
            factor = factor * tile[2] + tile[3]
            zero = tile[4].to(tl.float32) * tile[5] + tile[6]
        total = total - x_sums * _row_factors(zero - 8.0, s)
    return total * _row_factors(factor, s)


@jit
def _add_products(tiles, totals, squares, fields, norms, s: tl.constexpr):
    """Add a step's products of all tokens to the sums of each tile of weights.

    fields, norms: x, and the norm's weight or None, by `load_fields`. Sums: [warps, rows, 8 tiles].
    Return them, and the sums of the squares of x.
    """
    DTYPE: tl.constexpr = fields[0].dtype
    VEC: tl.constexpr = s.vec
    WARPS: tl.constexpr = s.warps
    ROWS: tl.constexpr = s.rows
    FIELDS: tl.constexpr = s.fields
    JOINED: tl.constexpr = 2 if VEC == 1 else 1  # fields in a product
    sums, x_sums = totals, _zeros(s)
    if s.step_scaled:
        sums = ()
        for _ in tl.static_range(len(tiles)):
            sums = sums + (_zeros(s),)
    factors = ()
    for n in tl.static_range(len(tiles)):
        factors = factors + (_unit_factors(tiles[n][1], s, DTYPE) if s.e2m1 else 0,)
    for k in tl.static_range(0, FIELDS, JOINED):
        parts = ()
        for i in tl.static_range(JOINED):
            part = fields[k + i]
            if norms is not None:
                squares += part.to(tl.float32) * part.to(tl.float32)
                parts = parts + (_times_norm(part, norms[k + i]),)
            else:
                parts = parts + ((part,),)
        for i in tl.static_range(len(parts[0])):
            part = tl.join(parts[0][i], parts[1][i]) if VEC == 1 else parts[0][i]
            tokens = _token_fragments(part, s)
            if s.kind == "hqq":
                x_sums = _dot(tl.full([WARPS, ROWS, 8 * max(VEC, 2)], 1.0, DTYPE), tokens, x_sums)
            added = ()
            for n in tl.static_range(len(tiles)):
                weights = _decode_fragments(tiles[n][0], factors[n], k, s, DTYPE)
                added = added + (_dot(weights, tokens, sums[n]),)
            sums = added
    if s.step_scaled:
        added = ()
        for n in tl.static_range(len(tiles)):
            added = added + (totals[n] + _scale_step(tiles[n], sums[n], x_sums, s),)
        sums = added
    return sums, squares


@jit
def multiply_steps(x, begins, norm, weights, row, ahead, s: tl.constexpr):
    """Multiply the rows from `row` on with x -> sums [warps, rows, 8 tiles], and squares of x.

    With `s.gated` two such sums. ahead: the first `s.depth` steps of weights, of x, and of the
    norm's weight if there is one.
    """
    STEPS: tl.constexpr = s.steps
    DEPTH: tl.constexpr = s.depth
    SIZE: tl.constexpr = 64 * s.warps * s.vec
    tiles, xs, norms = ahead
    totals = (_zeros(s), _zeros(s)) if s.gated else (_zeros(s),)
    squares = tl.zeros([SIZE], tl.float32) if norm is not None else 0.0
    for first in range(0, STEPS, DEPTH):
        for d in tl.static_range(DEPTH):
            own = norms[d] if norm is not None else None
            totals, squares = _add_products(tiles[d], totals, squares, xs[d], own, s)
            if STEPS > DEPTH:  # prefetch: the registers of this step are free now
                at = tl.minimum(first + DEPTH + d, STEPS - 1)  # past the end the last again
                tiles = tiles[:d] + (load_rows(weights, row, at, s),) + tiles[d + 1 :]
                xs = xs[:d] + (load_fields(x, begins, at, s, False),) + xs[d + 1 :]
                if norm is not None:
                    norms = norms[:d] + (load_fields(norm, None, at, s, True),) + norms[d + 1 :]
    return totals, squares
