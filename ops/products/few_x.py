"""x of several tokens as fragments.

ops/products/fragments.py explains fragments. s: `fragments.FewSettings`.
"""

from dataclasses import dataclass

from ops.launch import jit, tl


@dataclass(frozen=True)
class UnitOrder:
    """The order in which lanes load x, if codes have 8 or 4 bits: up to 16 bytes at a time.

    x has, for the words that a lane loads at once and each field of a unit, the numbers of all
    units. A weight has them in runs of words, whose fields are neighbors.
    """

    fields: int  # codes of a word
    run: int  # words of a run
    vec: int  # words that a lane loads at once
    halves: bool  # as of `fragments.FewSettings`


@jit
def place_in_order(number, o: tl.constexpr):
    """Return where numbers of a row of x are in a `UnitOrder`; None: as they are."""
    if o is None:
        return number
    else:
        UNIT: tl.constexpr = o.fields // 2  # fields of a unit
        field = number // o.run % o.fields
        word = number // (o.run * o.fields) * o.run + number % o.run
        unit, own = field // UNIT, field % UNIT
        if o.halves:
            unit, own = field // 2 % 2, field % 2 * 2 + field // 4
        return word // o.vec * (o.vec * o.fields) + own * (2 * o.vec) + word % o.vec * 2 + unit


@jit
def _load_field(x, begins, step, LAST: tl.constexpr, K: tl.constexpr, s: tl.constexpr):
    """Load the x of field K of a step, two units of each word -> [tiles * 2 * warps * 32 * vec].

    begins: where the row of x of each number begins (`spread_begins`). None: x has the program's
    tokens, of which the last is that of all past the end. Words past the end are 0. LAST: the step
    may be that at a row's end.
    """
    VEC: tl.constexpr = s.vec
    WARPS: tl.constexpr = s.warps
    FIELDS: tl.constexpr = s.unit_fields
    RUN: tl.constexpr = s.run  # words whose fields are neighbors in x
    TILES: tl.constexpr = s.tiles
    at = tl.arange(0, 64 * WARPS * VEC * TILES)
    if TILES > 1:
        # Of two dimensions: x of two tiles has as many numbers as 16 rows of the weight have units.
        # Loads of one shape get one layout, and x would go through shared memory in each step.
        at = at[:, None]
    tile, at = at // (64 * WARPS * VEC), at % (64 * WARPS * VEC)
    if s.neighbors:
        lane, word, half = at // (2 * VEC), at // 2 % VEC, at % 2
    else:
        lane, word, half = at // VEC % (32 * WARPS), at % VEC, at // (32 * WARPS * VEC)
    token, quad = tile * 8 + lane // 4 % 8, lane // 32 * 4 + lane % 4
    # Steps of whole runs begin at the same number for all lanes: they share a lane's address.
    # GGUF's kinds have many loads, which the compiler would start at once: no registers are left.
    WHOLE: tl.constexpr = s.neighbors or (s.step_words % RUN == 0 and not s.gguf)
    more = step * (s.step_words * 2 * FIELDS) if WHOLE else 0
    word += (quad if WHOLE else step * (WARPS * 4) + quad) * VEC
    if s.neighbors:
        number = quad * (2 * FIELDS * VEC) + at % (2 * VEC)
        more += K * (2 * VEC)
    else:
        field = FIELDS * half
        more += (K % 2 * 4 + K // 2 if s.halves else K) * RUN
        if s.halves:  # lower nibbles have the first half of a run
            field = 2 * half
        number = word // RUN * (RUN * 2 * FIELDS) + field * RUN + word % RUN
    if begins is not None:
        number += begins[:, None] if TILES > 1 else begins
    else:
        number += tl.minimum(token, s.tokens - 1) * s.width
    RUN_OF_LOAD: tl.constexpr = 2 * VEC if s.neighbors else VEC
    numbers = x + number
    numbers += more
    if TILES > 1:
        numbers = tl.multiple_of(numbers, (2 * RUN_OF_LOAD, 1))
        numbers = tl.max_contiguous(numbers, (RUN_OF_LOAD, 1))
    else:
        numbers = tl.max_contiguous(tl.multiple_of(numbers, 2 * RUN_OF_LOAD), RUN_OF_LOAD)
    if LAST and s.words % s.step_words:
        inside = step * (WARPS * 4) + quad < s.words // VEC
        if TILES > 1:
            inside = tl.max_constancy(inside, (RUN_OF_LOAD, 1))
        return tl.load(numbers, mask=inside, other=0.0)
    else:
        return tl.load(numbers)


@jit
def load_fields(x, begins, step, LAST: tl.constexpr, s: tl.constexpr):
    """Load the x of all fields of a step, so that all loads are in flight at once."""
    fields = ()
    for k in tl.static_range(s.unit_fields):
        fields = fields + (_load_field(x, begins, step, LAST, k, s),)
    return fields


@jit
def spread_begins(begins, s: tl.constexpr):
    """Spread one number a lane and tile, [tiles * warps * 32], in the order of `_load_field`."""
    WARPS: tl.constexpr = s.warps
    TILES: tl.constexpr = s.tiles
    if s.neighbors:
        begins = tl.reshape(begins, [TILES, WARPS * 32, 1])
        begins = tl.broadcast_to(begins, [TILES, WARPS * 32, 2 * s.vec])
    else:
        begins = tl.reshape(begins, [TILES, 1, WARPS * 32, 1])
        begins = tl.broadcast_to(begins, [TILES, 2, WARPS * 32, s.vec])
    return tl.reshape(begins, [64 * WARPS * s.vec * TILES])


@jit
def token_fragments(numbers, s: tl.constexpr):
    """Order the x of a field as `fragments._weight_fragments` does -> [warps, 8 vec, 8 tiles]."""
    VEC: tl.constexpr = s.vec
    WARPS: tl.constexpr = s.warps
    TILES: tl.constexpr = s.tiles
    if s.neighbors and VEC == 1:
        numbers = tl.reshape(numbers, [TILES, WARPS, 8, 4, 2, 2])
        numbers = tl.permute(numbers, (1, 5, 3, 4, 0, 2))
    elif s.neighbors:
        numbers = tl.reshape(numbers, [TILES, WARPS, 8, 4, VEC // 2, 2, 2])
        numbers = tl.permute(numbers, (1, 4, 5, 3, 6, 0, 2))
    elif VEC == 1:
        numbers = tl.reshape(numbers, [TILES, 2, WARPS, 8, 4, 2])
        numbers = tl.permute(numbers, (2, 5, 4, 1, 0, 3))
    else:
        numbers = tl.reshape(numbers, [TILES, 2, WARPS, 8, 4, VEC // 2, 2])
        numbers = tl.permute(numbers, (2, 5, 6, 4, 1, 0, 3))
    return tl.reshape(numbers, [WARPS, 8 * max(VEC, 2), 8 * TILES])
