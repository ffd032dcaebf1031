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
added at the end. A warp has `depth` steps of weights in flight, and `x_depth` of x: weights come
from memory, x from L2.

Exactness. Codes are multiplied as they are: 16 bits hold each of them exactly. A group's scale
multiplies the fp32 sum of its products, so that a step lies within a group; a scale of few bits
(mxfp4, nvfp4) multiplies the codes. GGUF's integer scales are split into digits so small that each
one's products with codes are exact, too: there are sums for each digit, which the `step` of 256
numbers multiplies. Words of hqq2 have scales of their own: its numbers, and those
of hqq3, are rounded to 16 bits, as a prompt's are.
"""

from dataclasses import dataclass

from ops.launch import jit, tl
from ops.products.few_weights import load_rows
from ops.products.few_x import load_fields, token_fragments
from ops.products.pipeline import replace
from ops.products.units import (
    decode,
    e2m1_factor,
    half,
    hqq_offset,
    pair_factors,
    scale_digits,
    scaled_code,
    small_number,
)
from ops.products.weights import DIGITS, GGUF, Codes
from ops.sizes import cdiv, pow2

TILE = 8  # tokens of a tensor core's instruction
UNROLLED = 8  # most steps that are unrolled, so that none is loaded in vain


@dataclass(frozen=True)
class FewSettings(Codes):
    """What a product of several tokens is compiled for."""

    out: int  # rows of the weight
    words: int  # of 32 bits, of a row
    group: int  # numbers that share a scale
    kind: str
    vec: int  # words that a lane loads at once
    rows: int  # rows of the result in a program's tiles
    stored: int  # those that a program stores; further ones repeat the last of them
    warps: int
    depth: int  # steps of weights in flight, which divide all steps
    x_depth: int  # steps of x in flight, which divide `depth`
    tokens: int  # tokens of a program
    loop: bool  # steps are a loop though they are few
    ordered: bool  # x is in the order of units (`unit_order`)

    @property
    def run(self) -> int:
        """Words whose fields are neighbors in x; if words have scales, x is so ordered."""
        return 4 if self.word_scaled else super().run

    products = property(lambda s: (0, 1) if s.gated else (0,))  # of gate and of up, or one
    unit_fields = property(lambda s: s.fields // 2)  # codes of a unit
    # Whether the x of a field of a lane's units are neighbors.
    neighbors = property(lambda s: s.ordered or s.unit_fields == 1)
    width = property(lambda s: s.words * s.fields)  # numbers of a row
    step_words = property(lambda s: 4 * s.vec * s.warps)
    steps = property(lambda s: cdiv(s.words, s.step_words))
    # Whether no program has rows past the end.
    whole_rows = property(lambda s: s.out // len(s.products) % s.stored == 0)
    # Turns of the loop over steps.
    turns = property(lambda s: 1 if s.steps <= UNROLLED and not s.loop else s.steps // s.depth)
    # Tiles of a program, a power of two.
    tiles = property(lambda s: pow2(cdiv(s.tokens, TILE)))
    # Whether a scale multiplies the sum of a step's products.
    step_scaled = property(lambda s: s.kind in ("int4", "hqq", "fp8b", *GGUF))
    # Whether sums of x are multiplied by a number of a group, and subtracted.
    has_zeros = property(lambda s: s.kind in ("hqq", "q4_k", "q5_k"))
    # Whether the fields K and K + 2 have a scale of their own, for K = 0 and K = 1.
    halves = property(lambda s: s.kind == "q6_k")
    # Whether pairs of mxfp4's scales are of one row, and begin at an even quad of each step.
    whole_pairs = property(lambda s: s.kind == "mxfp4" and s.words % 8 == s.step_words % 8 == 0)
    # Digits of a scale, each of which multiplies the codes; 0: the scale multiplies sums.
    digits = property(lambda s: DIGITS.get(s.kind, 0) if s.vec == 4 else 0)
    radix = property(lambda s: {"q6_k": 16, "iq4": 4}.get(s.kind, 8))
    # Scales of bytes that are loaded together: with loads of 8 bits before it, a product would take
    # other fragments (kWidth 4). Neighboring lanes, with a quad each, share a pair.
    paired = property(lambda s: 2 if s.kind == "iq4" and s.digits else 1)
    # Words that share a word of the bits above their codes; 0: there are none.
    sharing = property(lambda s: {"q5_k": 4, "q6_k": 2}.get(s.kind, 0))

    @property
    def scales(self) -> int:
        """Scales of an expert's weight, or pairs of them: mxfp4, nvfp4 and iq4."""
        if self.has_row_scale and not self.e2m1:
            return self.out
        if self.word_scaled:
            return self.out * (self.words // 4)
        if self.kind == "fp8b":
            return cdiv(self.out, self.group) * (self.width // self.group)
        return self.out * (self.width // self.group) // (2 if self.kind == "mxfp4" else self.paired)

    # Numbers of an expert's weight in `step`.
    steps_of_256 = property(lambda s: s.out * (s.width // 256))

    @property
    def units_above(self) -> int:
        """Units of the bits above the codes of an expert's weight."""
        if self.kind == "hqq3":
            return self.out * self.words
        return self.out * 2 * self.words // max(self.sharing, 1)


@jit
def _beside(first, second):
    """Join two fields -> [..., 2]. With tl.join a product of Triton 3.6 takes other fragments.

    Their kWidth is 4, not 2: both operands would change lanes in each step.
    """
    shape: tl.constexpr = [first.numel, 1]
    is_second = tl.arange(0, 2)[None, :] == 1
    return tl.where(is_second, tl.reshape(second, shape), tl.reshape(first, shape))


@jit
def _weight_fragments(numbers, s: tl.constexpr):
    """Order a field's numbers as a tensor core takes them -> [warps, rows, 8 vec]."""
    R: tl.constexpr = s.rows // 8
    if s.vec == 1:  # two fields of each unit, the last dimension
        numbers = tl.reshape(numbers, [R, s.warps, 8, 4, 2, 2])
        return tl.reshape(tl.permute(numbers, (1, 0, 2, 5, 3, 4)), [s.warps, s.rows, 16])
    else:
        numbers = tl.reshape(numbers, [R, s.warps, 8, 4, s.vec // 2, 2, 2])
        numbers = tl.permute(numbers, (1, 0, 2, 4, 5, 3, 6))
        return tl.reshape(numbers, [s.warps, s.rows, 8 * s.vec])


@jit
def _row_factors(factor, s: tl.constexpr):
    """Spread one number a lane, of its row, to sums [warps, rows, 8 tiles]."""
    R: tl.constexpr = s.rows // 8
    factor = tl.reshape(factor, [R, s.warps, 8, 1, 4, 1])
    factor = tl.broadcast_to(factor, [R, s.warps, 8, s.tiles, 4, 2])
    return tl.reshape(tl.permute(factor, (1, 0, 2, 3, 4, 5)), [s.warps, s.rows, 8 * s.tiles])


@jit
def _of_units(lanes, s: tl.constexpr):
    """Repeat one number a lane for each of its units."""
    R: tl.constexpr = s.rows // 8
    lanes = tl.reshape(lanes, [R, s.warps, 8, 4, 1])
    return tl.reshape(tl.broadcast_to(lanes, [R, s.warps, 8, 4, 8]), [R * s.warps * 256])


@jit
def _of_words(lanes, s: tl.constexpr):
    """Convert one number a lane, a byte for each of its words, to fp32 for each of its units."""
    word = tl.arange(0, s.rows * s.warps * 32) // 2 % 4
    return (_of_units(lanes, s) >> word * 8 & 0xFF).to(tl.float32)


@jit
def _half_quadratic_factors(tile, s: tl.constexpr, DTYPE: tl.constexpr):
    """Return scale, offset, and the third bits if there are some, of each unit of a step."""
    # Spread before arithmetic: Triton 3.6 then moves the loads, not their results.
    if s.word_scaled:
        scale, zero = _of_words(tile[1], s), _of_words(tile[4], s)
    else:
        scale, zero = _of_units(tile[1], s).to(tl.float32), _of_units(tile[4], s).to(tl.float32)
    scale = scale * _of_units(tile[2], s) + _of_units(tile[3], s)
    zero = zero * _of_units(tile[5], s) + _of_units(tile[6], s)
    thirds = 0
    if s.kind == "hqq3":
        thirds = tile[7] << 2 | tile[8] >> 2
    return scale, hqq_offset(scale, zero, DTYPE), thirds


@jit
def _pair_factors(pairs, s: tl.constexpr, DTYPE: tl.constexpr):
    """Repeat a pair of nvfp4's scales a lane for each of its units -> factors of `decode`."""
    even, odd = pair_factors(pairs, DTYPE)
    # No `tl.join`: a product would take fragments of four numbers (kWidth), apart in registers.
    is_even = tl.arange(0, s.rows * s.warps * 32) % 2 == 0
    return tl.where(is_even, _of_units(even, s), _of_units(odd, s))


@jit
def _dot(a, b, total):
    return tl.dot(a, b, total)


@jit
def _zeros(s: tl.constexpr):
    TOKENS: tl.constexpr = 8 * s.tiles
    return tl.zeros([s.warps, s.rows, TOKENS], tl.float32)


@jit
def _decode_fragments(units, factor, K: tl.constexpr, s: tl.constexpr, DTYPE: tl.constexpr):
    """Decode a field of a step's units as fragments; with one word a lane, two fields at once."""
    numbers = decode(units, factor, K, s.kind, DTYPE)
    if s.vec == 1:
        numbers = _beside(numbers, decode(units, factor, K + 1, s.kind, DTYPE))
    return _weight_fragments(numbers, s)


@jit
def _above_units(above, s: tl.constexpr):
    """Shift the bits above a quad's codes for each of its units, for `with_bits_above`."""
    R: tl.constexpr = s.rows // 8
    SHARED: tl.constexpr = 4 // s.sharing  # words of a quad
    above = tl.reshape(above, [R, s.warps, 8, 4, SHARED, 1, 2])
    above = tl.broadcast_to(above, [R, s.warps, 8, 4, SHARED, s.sharing, 2])
    above = tl.reshape(above, [R * s.warps * 256])
    word = tl.arange(0, R * s.warps * 256) // 2 % s.sharing
    return above >> (word * (8 // s.sharing)).to(tl.int16)


@jit
def _digit_fragments(
    units, factors, D: tl.constexpr, K: tl.constexpr, s: tl.constexpr, DTYPE: tl.constexpr
):
    """Decode a field of a step's units, times digit D of their scale, as fragments."""
    N: tl.constexpr = 2 * (K % 2 * s.digits + D if s.halves else D)
    digit, offset = factors[0][N], factors[0][N + 1]
    return _weight_fragments(scaled_code(units, factors[1], digit, offset, K, s.kind, DTYPE), s)


@jit
def _decoding_factors(tile, s: tl.constexpr, DTYPE: tl.constexpr):
    """Return what `decode` takes beside a step's units, or 0."""
    if s.kind == "nvfp4":
        return _pair_factors(tile[1], s, DTYPE)
    elif s.e2m1:
        scale = tile[1]
        if s.whole_pairs:  # taken apart here: nothing waits for it before x is loaded
            lane = tl.arange(0, s.rows * s.warps * 4)
            scale = scale.to(tl.int32) >> lane % 2 * 8 & 0xFF
        return _of_units(e2m1_factor(scale, DTYPE), s)
    elif s.two_bits:
        return _half_quadratic_factors(tile, s, DTYPE)
    elif s.digits > 0:
        scale = tile[1]
        if s.paired == 2:
            quad = tl.arange(0, s.rows * s.warps * 4)
            scale = tl.reshape(scale, [s.rows * s.warps * 4]).to(tl.int32)
            scale = (scale >> quad % 2 * 8).to(tl.int16)
        found = [_of_units(number, s) for number in scale_digits(scale, s.kind, DTYPE)]
        above = 0
        if s.sharing > 0:
            above = _above_units(tile[3], s)
        least = 0
        if s.has_zeros:
            least = _of_units(small_number(tile[1] >> 8 & 0xFF, 0, DTYPE), s)
        return found, above, least
    elif s.sharing > 0:
        LANES: tl.constexpr = s.rows * s.warps * 4
        # A lane's bits begin at a place that depends on its word. The last step of a row begins at
        # a whole quad, too.
        word = tl.arange(0, LANES * 2) // 2 % s.sharing
        return tile[len(tile) - 1] >> (word * (8 // s.sharing)).to(tl.int16)
    else:
        return 0


@jit
def _add_scaled(before, tile, total, x_sums, s: tl.constexpr):
    """Return `before` plus a step's sums times the scale of their group, less zeros.

    Products are added one by one, so that each addition is a part of an fma.
    """
    if s.kind == "q4_k" or s.kind == "q5_k":  # q4_1, q5_1
        factor, least = half(tile[1]), half(tile[1] >> 16)
        least -= factor * (8.0 if s.kind == "q4_k" else 16.0)  # of `decode`
        return before + total * _row_factors(factor, s) - x_sums * _row_factors(least, s)
    else:
        factor = tile[1].to(tl.float32)
        if s.kind == "hqq":
            if len(tile) == 3:
                zero = tile[2].to(tl.float32)
            else:
                factor = factor * tile[2] + tile[3]
                zero = tile[4].to(tl.float32) * tile[5] + tile[6]
            total = total - x_sums * _row_factors(zero - 8.0, s)
        return before + total * _row_factors(factor, s)


@jit
def _sum_digits(tile, sums, total, n: tl.constexpr, s: tl.constexpr):
    """Add the sums of a step's digits, and of its mins if there are some, times its steps."""
    value = sums[0][n]
    for d in tl.static_range(1, s.digits):
        value = value * s.radix + sums[d][n]
    if s.has_zeros:
        factor, least = half(tile[2]), half(tile[2] >> 16)
        total -= sums[s.digits][n] * _row_factors(least, s)
    else:
        factor = tile[2].to(tl.float32)
    return total + value * _row_factors(factor, s)


@jit
def _add_digit_products(tiles, totals, fields, s: tl.constexpr):
    """`_add_products` of lanes whose codes have scales of their own: products of each digit."""
    DTYPE: tl.constexpr = fields[0].dtype
    sums = ()
    for _ in tl.static_range(s.digits + s.has_zeros):
        sums = sums + ([_zeros(s) for _ in tiles],)
    factors = [_decoding_factors(tile, s, DTYPE) for tile in tiles]
    for k in tl.static_range(s.unit_fields):
        tokens = token_fragments(fields[k], s)
        for d in tl.static_range(s.digits):
            part = [
                _dot(_digit_fragments(tiles[n][0], factors[n], d, k, s, DTYPE), tokens, sums[d][n])
                for n in s.products
            ]
            sums = replace(sums, d, part)
        if s.has_zeros:
            part = [
                _dot(_weight_fragments(factors[n][2], s), tokens, sums[s.digits][n])
                for n in s.products
            ]
            sums = replace(sums, s.digits, part)
    return [_sum_digits(tiles[n], sums, totals[n], n, s) for n in s.products]


@jit
def _add_products(tiles, totals, fields, s: tl.constexpr):
    """Add a step's products of all tokens to the sums of each tile of weights.

    fields: x by `load_fields`. Sums: [warps, rows, 8 tiles].
    """
    DTYPE: tl.constexpr = fields[0].dtype
    VEC: tl.constexpr = s.vec
    ROWS: tl.constexpr = s.rows
    JOINED: tl.constexpr = 2 if VEC == 1 else 1  # fields in a product
    sums, x_sums = totals, _zeros(s)
    if s.step_scaled:
        sums = [_zeros(s) for _ in tiles]
    factors = [_decoding_factors(tile, s, DTYPE) for tile in tiles]
    for k in tl.static_range(0, s.unit_fields, JOINED):
        part = _beside(fields[k], fields[k + 1]) if VEC == 1 else fields[k]
        tokens = token_fragments(part, s)
        if s.has_zeros:
            x_sums = _dot(tl.full([s.warps, ROWS, 8 * max(VEC, 2)], 1.0, DTYPE), tokens, x_sums)
        sums = [
            _dot(_decode_fragments(tiles[n][0], factors[n], k, s, DTYPE), tokens, sums[n])
            for n in s.products
        ]
    if s.step_scaled:
        sums = [_add_scaled(totals[n], tiles[n], sums[n], x_sums, s) for n in s.products]
    return sums


@jit
def multiply_steps(x, begins, weights, row, ahead, s: tl.constexpr):
    """Multiply the rows from `row` on with x -> sums [warps, rows, 8 tiles]; if gated, two of them.

    ahead: the first `s.depth` steps of weights, and the first `s.x_depth` of x.
    """
    EACH: tl.constexpr = s.steps // s.turns
    tiles, xs = ahead
    totals = (_zeros(s), _zeros(s)) if s.gated else (_zeros(s),)
    for turn in range(0, s.turns):
        for n in tl.static_range(EACH):
            if s.digits > 0:
                totals = _add_digit_products(tiles[n % s.depth], totals, xs[n % s.x_depth], s)
            else:
                totals = _add_products(tiles[n % s.depth], totals, xs[n % s.x_depth], s)
            # Prefetch: the registers of this step are free now. Past the end the last again.
            if s.turns > 1:
                at = tl.minimum(turn * EACH + n + s.depth, s.steps - 1)
                tiles = replace(tiles, n % s.depth, load_rows(weights, row, at, True, s))
                at = tl.minimum(turn * EACH + n + s.x_depth, s.steps - 1)
                xs = replace(xs, n % s.x_depth, load_fields(x, begins, at, True, s))
            else:
                if n + s.depth < s.steps:
                    part = load_rows(weights, row, n + s.depth, n + s.depth == s.steps - 1, s)
                    tiles = replace(tiles, n % s.depth, part)
                if n + s.x_depth < s.steps:
                    is_last = n + s.x_depth == s.steps - 1
                    part = load_fields(x, begins, n + s.x_depth, is_last, s)
                    xs = replace(xs, n % s.x_depth, part)
    return totals
