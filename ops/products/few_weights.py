"""Weights of several tokens' products, loaded step by step.

ops/products/fragments.py explains steps and units. s: `fragments.FewSettings`.
"""

from ops.launch import jit, tl


@jit
def _rows_and_words(lane, row, step, LAST: tl.constexpr, s: tl.constexpr):
    """Return the row, and the first word, of each lane's weights in a step.

    Counted from the program's row, and from the step's first word. Rows and words past the end
    become the last: such a row is not stored, such a word's x is 0. LAST: the step may be that at a
    row's end.
    """
    own = lane // (32 * s.warps) * 8 + lane // 4 % 8
    if s.stored < s.rows:
        own = tl.minimum(own, s.stored - 1)
    if not s.whole_rows:
        own = tl.minimum(own, s.out - 1 - row)
    word = (lane // 32 % s.warps * 4 + lane % 4) * s.vec
    if LAST and s.words % s.step_words:
        word = tl.minimum(word, s.words - s.vec - step * s.step_words)
    return own, word


@jit
def _address(tensor, first, each, of_lane, MORE: tl.constexpr, begin):
    """Return a lane's address in rows of `each` elements.

    The program's first row, the lane's element, then what is the same for all lanes: MORE rows, and
    the step's first element. In this order the compiler puts constants into the loads, so that all
    steps share the lane's address.
    """
    address = tensor + first * each
    address += of_lane
    address += MORE * each + begin
    return address


@jit
def _load_step(weights, first, N: tl.constexpr, step, LAST: tl.constexpr, s: tl.constexpr):
    """Load a step of the rows from `first` on, for each warp; N: of gate, 0, or of up, 1.

    Return units [rows / 8 * warps * 32 * 2 vec], then scales and zeros, one number a lane.
    """
    UNITS: tl.constexpr = 2 * s.vec
    LANES: tl.constexpr = s.rows * s.warps * 4
    MORE: tl.constexpr = s.out // 2 * N
    row = first + MORE
    at = tl.arange(0, LANES * UNITS)
    own, word = _rows_and_words(at // UNITS, row, step, LAST, s)
    # A lane's units are one aligned load, which the compiler does not see through their indices.
    of_lane = own * (2 * s.words) + word * 2 + at % UNITS
    units = _address(weights.codes, first, 2 * s.words, of_lane, MORE, step * (2 * s.step_words))
    tile = (tl.load(tl.max_contiguous(tl.multiple_of(units, 2 * UNITS), UNITS)),)
    # Of two dimensions: the compiler gives neighbors to a lane if loads of one shape, of x, do so.
    lane = tl.arange(0, LANES)
    if not (s.e2m1 or s.two_bits):
        lane = lane[:, None]
    own, word = _rows_and_words(lane, row, step, LAST, s)
    if s.gguf:
        tile = tile + _load_gguf_scales(weights, first, own, word, step, MORE, s)
        if s.digits > 0 and s.sharing > 0:
            tile = tile + _load_above(weights, first, row, step, LAST, MORE, s)
        elif s.sharing > 0:
            own, word = _rows_and_words(at // UNITS, row, step, LAST, s)
            rows, word = row + own, step * s.step_words + word
            above = rows * (2 * s.words // s.sharing) + word // s.sharing * 2 + at % 2
            tile = tile + (tl.load(tl.max_contiguous(weights.high + above, 2)),)
    elif s.kind == "fp8b":
        rows, word = row + own, step * s.step_words + word
        scale = weights.scale + rows // s.group * (s.width // s.group) + word * 4 // s.group
        tile = tile + (tl.load(scale),)
    elif s.kind == "mxfp4":
        # Pairs of exponents, as `paired` has them.
        if s.whole_pairs:
            PAIRS: tl.constexpr = s.words // 8
            of_lane, begin = own * PAIRS + word // 8, step * (s.step_words // 8)
            tile = tile + (tl.load(_address(weights.scale, first, PAIRS, of_lane, MORE, begin)),)
        else:
            group = (row + own) * (s.words // 4) + (step * s.step_words + word) // 4
            pair = tl.load(weights.scale + group // 2).to(tl.int32)
            tile = tile + (pair >> group % 2 * 8 & 0xFF,)
    elif s.step_scaled or s.e2m1 or s.two_bits:
        tile = tile + _load_group_scales(weights, first, own, word, step, MORE, s)
    if s.kind == "hqq3":
        # Select the word by the mask of a load: Triton 3.6 moves loads to the lanes that multiply
        # what they loaded, but moves nothing that depends on a position.
        own, word = _rows_and_words(at // UNITS, row, step, LAST, s)
        rows, word = row + own, step * s.step_words + word
        odd = at // 2 % 2 == 1
        thirds = weights.high + (rows * s.words + (word + at % UNITS // 4 * 2) + at % 2)
        tile = tile + (tl.load(thirds, mask=at // 2 % 2 == 0, other=0),)
        tile = tile + (tl.load(thirds, mask=odd, other=0),)
    return tile


@jit
def _load_group_scales(weights, first, own, word, step, MORE: tl.constexpr, s: tl.constexpr):
    """Load the scales of groups, or of words, and zeros if there are some.

    own, word: of `_rows_and_words`. The others: as of `_address`.
    """
    EACH: tl.constexpr = s.words // s.run
    if s.step_words % s.run == 0:
        of_lane, begin = own * EACH + word // s.run, step * (s.step_words // s.run)
    else:
        of_lane, begin = own * EACH + (step * s.step_words + word) // s.run, 0
    found = (tl.load(_address(weights.scale, first, EACH, of_lane, MORE, begin)),)
    rows = first + MORE + own
    if s.half_quadratic and weights.scale_step is not None:
        found = found + (tl.load(weights.scale_step + rows), tl.load(weights.scale_low + rows))
    if s.half_quadratic:
        found = found + (tl.load(_address(weights.zero, first, EACH, of_lane, MORE, begin)),)
    if s.half_quadratic and weights.zero_step is not None:
        found = found + (tl.load(weights.zero_step + rows), tl.load(weights.zero_low + rows))
    return found


@jit
def _load_above(weights, first, row, step, LAST: tl.constexpr, MORE: tl.constexpr, s: tl.constexpr):
    """Load the bits above the codes of each lane's quad, in one load."""
    COUNT: tl.constexpr = 8 // s.sharing  # units of a quad
    EACH: tl.constexpr = 2 * s.words // s.sharing
    at = tl.arange(0, s.rows * s.warps * 4 * COUNT)[:, None]
    own, word = _rows_and_words(at // COUNT, row, step, LAST, s)
    of_lane = own * EACH + word // s.sharing * 2 + at % COUNT
    begin = step * (s.step_words * 2 // s.sharing)
    units = _address(weights.high, first, EACH, of_lane, MORE, begin)
    units = tl.max_contiguous(tl.multiple_of(units, (2 * COUNT, 1)), (COUNT, 1))
    return (tl.load(units),)


@jit
def _load_gguf_scales(weights, first, own, word, step, MORE: tl.constexpr, s: tl.constexpr):
    """Load the scales of words of GGUF's kinds, or pairs of them, and the steps of 256 numbers.

    As `_load_group_scales`. A step has whole groups; its words share one `step`, or it has whole
    blocks.
    """
    WORDS: tl.constexpr = s.run * s.paired
    EACH: tl.constexpr = s.words // WORDS
    of_lane, begin = own * EACH + word // WORDS, step * (s.step_words // WORDS)
    scale = tl.load(_address(weights.scale, first, EACH, of_lane, MORE, begin))
    if weights.step is not None:
        BLOCKS: tl.constexpr = s.words // 32
        of_lane, begin = own * BLOCKS + word // 32, step * s.step_words // 32
        return scale, tl.load(_address(weights.step, first, BLOCKS, of_lane, MORE, begin))
    else:
        return (scale,)


@jit
def load_rows(weights, row, step, LAST: tl.constexpr, s: tl.constexpr):
    """Load a step of the rows from `row` on; if gated, of gate and of up.

    LAST: as of `_rows_and_words`.
    """
    # Rows of gate past the end are rows of up: they are not stored.
    return [_load_step(weights, row, n, step, LAST, s) for n in s.products]


@jit
def load_row_scales(weights, first, rows, inside, s: tl.constexpr):
    """Load the scales of rows, counted from `first` on, of a kind with one scale a row."""
    if s.has_row_scale:
        scale = weights.scale_step if s.kind == "nvfp4" else weights.scale
        return tl.load(scale + first + rows, mask=inside, other=0.0).to(tl.float32)
    else:
        return 1.0
