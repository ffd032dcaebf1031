"""How a prompt's product decodes packed weights: settings, scales, bits above, fields.

For `_grouped` (ops/products/prompt.py), and for `_unpack`, which writes a dense weight in 16 bits.

Letters: E experts. A tile has BN outputs; a step covers BK numbers along `in`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.declared import Activation
from ops.launch import jit, launch, tl
from ops.products.gguf_units import finish_gguf, gguf_factors, gguf_weight
from ops.products.units import (
    decode,
    decode_hqq,
    e2m1_factor,
    e4m3_pairs,
    finish,
    finish_int4,
    hqq_offset,
    int4_factor,
    pair_factors,
    scaled_int4,
    shift_each,
    to_fp32,
)
from ops.products.weights import BITS, GGUF, Codes, WeightTensors, kernel_tensors
from ops.sizes import cdiv, pow2

# More rows of x than this are multiplied by the library, which is faster from 80 on (H200; fewer
# were not measured),
MANY_ROWS = 64
# but for at most MOST_DECODED rows and an int4 weight of at least WIDE outputs: then `_grouped` has
# programs for all multiprocessors. A weight of at most SMALL numbers is not worth a kernel more.
MOST_DECODED, WIDE, SMALL = 256, 8192, 1 << 21
BLOCK = 256  # numbers of a `step` of GGUF


@dataclass(frozen=True)
class PromptTile:
    """How a grouped GEMM divides its work. benchmarks/grouped.py measures some."""

    rows: int  # BM, rows of x
    outputs: int  # BN
    numbers: int  # BK, along `in` in a step
    warps: int
    stages: int = 3  # steps in flight
    near: int = 16  # blocks of outputs that run before the next rows of x
    tail: int = 1 << 20  # rows of an expert's last tile if they are enough for it
    registers: int | None = None  # most of a lane; None: the compiler's choice
    # An expert's last rows, at most `tail`, are a part of the tile before, if weights are packed:
    # they are decoded once for both.
    merged: bool = False


@dataclass(frozen=True)
class PromptSettings(Codes):
    """What `_grouped` is compiled for."""

    out: int
    width: int  # numbers of a row of x
    E: int
    kind: str
    bits: int
    group: int  # numbers that share a scale
    tile: PromptTile
    active: int = 1  # experts of a token of x
    activation: Activation | None = None  # applied to outputs
    scale_bits: int = 0  # bits of a scale, if scales and steps begin with words of 32; 0: others
    own_order: bool = False  # `_unpack` undoes `Format.grouped_order`

    # Outputs are those of gates, then as many ups.
    gated = property(lambda s: s.activation is not None and s.activation.gated)
    # Numbers of a result's row, in all and of a tile.
    results = property(lambda s: s.out // 2 if s.gated else s.out)
    block = property(lambda s: s.tile.outputs // 2 if s.gated else s.tile.outputs)
    packed = property(lambda s: s.kind != "plain")
    # Codes of a unit.
    fields = property(lambda s: 16 // (2 if s.bits == 3 else s.bits) if s.packed else 1)
    step_scaled = property(lambda s: s.bits < 8 or s.gguf)  # each group along `in` has a scale
    # The result of `scale_factors` has two numbers a group.
    has_offset = property(lambda s: s.half_quadratic or s.kind in ("q4_k", "q5_k", "q6_k"))
    # Bits of a code in a plane of their own.
    bits_above = property(lambda s: {"q5_k": 1, "q6_k": 2, "hqq3": 1}.get(s.kind, 0))
    experts_pow2 = property(lambda s: pow2(s.E))
    merged = property(lambda s: s.tile.merged and s.tile.tail < s.tile.rows and s.packed)

    # mxfp4: an int16 has the scales of two groups, if a row has an even number of them.
    paired = property(lambda s: s.kind == "mxfp4" and s.width // s.group % 2 == 0)
    scale_numbers = property(lambda s: 2 * s.group if s.paired else s.group)
    step_numbers = property(lambda s: BLOCK)
    affine = property(lambda s: s.kind in ("q4_k", "q5_k"))  # weights are scale * code - min
    # Numbers whose scales are a word of 32 bits.
    word_numbers = property(lambda s: s.group * 32 // s.scale_bits)

    @property
    def in_words(self) -> bool:
        """Whether a step's scales are whole words, or a part of one group: `load_words`."""
        if self.scale_bits == 0 or self.half_quadratic:
            return False
        if self.kind == "mxfp4" and self.tile.warps > 4:
            return False  # slower: 2,048 tokens of Qwen3-30B-A3B take 10 % longer
        BK = self.tile.numbers
        whole = BK % self.word_numbers == 0 or self.group % BK == 0
        return whole and self.width % self.word_numbers == 0 and (BLOCK % BK == 0 or not self.gguf)

    @property
    def scales_ahead(self) -> int:
        """How many steps ahead a step's scales are loaded: 0 if Triton pipelines them.

        It pipelines loads of at least 32 bits: those of `load_words`. Scales loaded one step ahead
        arrive late: ptxas moves the load behind the step's last product, and the next step waits.
        Two steps ahead they arrive in time, for a register more each.
        """
        return 0 if self.in_words else 2 if self.kind == "mxfp4" else 1


def unpacks_first(N: int, out: int, width: int, kind: str) -> bool:
    """Whether a dense weight is unpacked for N rows of x in 16 bits, not decoded by `_grouped`."""
    is_decoded = kind == "int4" and N <= MOST_DECODED and (out >= WIDE or out * width <= SMALL)
    return N > MANY_ROWS and not is_decoded


def prompt_operands(
    parts: dict[str, Tensor], kind: str, bits: int, group: int
) -> tuple[WeightTensors, int, int]:
    """Return a packed weight's tensors, codes as units of 16 bits, its bits and its group."""
    tensors = kernel_tensors(parts, kind)
    if kind in GGUF:
        bits, group = BITS[kind], 32
    if bits < 16:
        high = None if tensors.high is None else tensors.high.view(torch.int16)
        tensors = tensors._replace(codes=tensors.codes.view(torch.int16), high=high)
    if kind == "mxfp4" and tensors.scale.shape[-1] % 2 == 0:
        tensors = tensors._replace(scale=tensors.scale.view(torch.int16))
    return tensors, bits, group


@jit
def _expand(values, COUNT: tl.constexpr):
    """[BN, n] -> [BN, COUNT]: repeat each value for COUNT / n neighboring units."""
    BN: tl.constexpr = values.shape[0]
    n: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], [BN, n, COUNT // n]), [BN, COUNT])


@jit
def as_loaded(numbers, tensor):
    """Return int16 numbers as what a load returns that loads none. tensor: has 16 bits.

    Triton 3.6 moves loads to the lanes that multiply what was loaded, but moves nothing that
    depends on a position.
    """
    tensor = tensor.to(tl.pointer_type(tl.int16), bitcast=True)
    return tl.load(tensor + numbers, mask=numbers < tl.minimum(tl.program_id(0), 0), other=numbers)


@jit
def load_above(plane, rows, start, s: tl.constexpr):
    """Load the bits above the codes of BK numbers -> int16 [BN, units].

    They are as `decode` or `decode_hqq` takes them. SHARING words of codes have one word of the
    plane. Its units 0 and 1 belong to the words' units 0 and 1; bits of each word are SHIFT above
    those of the word before.
    """
    U: tl.constexpr = s.tile.numbers // s.fields
    SHARING: tl.constexpr = 2 if s.half_quadratic else 4 // s.bits_above
    SHIFT: tl.constexpr = 8 // SHARING
    EACH: tl.constexpr = s.width // s.fields // SHARING  # units of a row
    if s.half_quadratic:  # each word has a load, by its mask; one load for all was not measured
        unit = start // s.fields + tl.arange(0, U)[None, :]
        place = plane + (rows * EACH + unit // (2 * SHARING) * 2 + unit % 2)
        word, inside = unit // 2 % SHARING, unit < s.width // s.fields
        bits = tl.load(place, mask=(word == 0) & inside, other=0) << 2
        return bits | tl.load(place, mask=(word == 1) & inside, other=0) >> (SHIFT - 2)
    else:
        unit = start // s.fields // SHARING + tl.arange(0, U // SHARING)[None, :]
        inside = unit < EACH if s.width % s.tile.numbers else None
        other = None if inside is None else 0
        bits = tl.load(plane + rows * EACH + unit, mask=inside, other=other)
        BN: tl.constexpr = bits.shape[0]
        bits = tl.reshape(bits, [BN, U // SHARING // 2, 1, 2])
        bits = tl.reshape(tl.broadcast_to(bits, [BN, U // SHARING // 2, SHARING, 2]), [BN, U])
        shifts = tl.arange(0, 8) // 2 % SHARING * SHIFT
        shifts = as_loaded(shifts.to(tl.int16)[None, None, :], plane)
        shifts = tl.reshape(tl.broadcast_to(shifts, [BN, U // 8, 8]), [BN, U])
        return shift_each(bits, shifts)


@jit
def load_scales(weights, rows, start, s: tl.constexpr):
    """Load scales and zeros of the groups of BK numbers from `start` on -> [BN, n] each.

    If s.paired, scales of two groups each.
    """
    BK: tl.constexpr = s.tile.numbers
    GROUPS: tl.constexpr = s.width // s.scale_numbers
    UNITS: tl.constexpr = s.scale_numbers // s.fields  # units of a group
    # EACH units share a group, wherever a tile begins. At most half a tile: with one scale a row,
    # Triton 3.6 moves all products through shared memory instead of the scale.
    MOST: tl.constexpr = BK // s.fields if s.paired else BK // s.fields // 2
    EACH: tl.constexpr = min(MOST, UNITS & -UNITS)
    group = (start // s.fields + tl.arange(0, BK // s.fields // EACH)[None, :] * EACH) // UNITS
    group = rows * GROUPS + tl.minimum(group, GROUPS - 1)
    scale = tl.load(weights.scale + group)
    if weights.step is not None:
        return scale, tl.load(weights.step + group // 8)
    else:
        return scale, scale if weights.zero is None else tl.load(weights.zero + group)


@jit
def load_words(weights, rows, start, s: tl.constexpr):
    """`load_scales`, as words of 32 bits -> scales [BN, n], and zeros or steps [BN, n or 1].

    Rows have whole words; a step has whole words, too, or a part of one group.
    """
    BK: tl.constexpr = s.tile.numbers
    EACH: tl.constexpr = 32 // s.scale_bits  # scales of a word
    WORDS: tl.constexpr = s.width // s.word_numbers
    n: tl.constexpr = max(1, BK // s.word_numbers)
    words = weights.scale.to(tl.pointer_type(tl.int32), bitcast=True)
    at = start // s.word_numbers + tl.arange(0, n)[None, :]
    inside, other = None, None
    if s.width % BK:
        inside, other = at < WORDS, 0
    scale = tl.load(words + rows * WORDS + at, mask=inside, other=other)
    if s.gguf and weights.step is not None:
        return scale, _load_step(weights.step, rows, start // s.step_numbers, s)
    else:
        if s.group % BK == 0:  # two equal ones, for the reason in `load_scales`
            scale = scale >> start // s.group % EACH * s.scale_bits
            scale = tl.reshape(tl.join(scale, scale), [scale.shape[0], 2])
        elif EACH == 2:
            scale = tl.reshape(tl.join(scale, scale >> 16), [scale.shape[0], 2 * n])
        elif EACH == 4:
            scale = tl.join(tl.join(scale, scale >> 16), tl.join(scale >> 8, scale >> 24)) & 0xFF
            scale = tl.reshape(scale, [scale.shape[0], 4 * n])
        if s.scale_bits == 16:
            scale = scale.to(tl.int16)
        if s.scale_bits > 8:
            scale = scale.to(weights.scale.dtype.element_ty, bitcast=True)
        return scale, scale


@jit
def _load_step(steps, rows, block, s: tl.constexpr):
    """Load the `step` of a block of each row -> [BN, 1]. Those of 16 bits are a half of a word."""
    BLOCKS: tl.constexpr = s.width // s.step_numbers
    at = rows * BLOCKS + tl.minimum(block, BLOCKS - 1)
    if steps.dtype.element_ty.primitive_bitwidth == 32:
        return tl.load(steps + at)
    else:
        words = steps.to(tl.pointer_type(tl.int32), bitcast=True)
        shift = block % 2 * 16
        if BLOCKS % 2:
            shift = shift ^ as_loaded((rows % 2 * 16).to(tl.int16), steps).to(tl.int32)
        half_word = tl.load(words + at // 2) >> shift
        return half_word.to(tl.int16).to(steps.dtype.element_ty, bitcast=True)


@jit
def scale_factors(fetched, weights, rows, s: tl.constexpr, DTYPE: tl.constexpr):
    """Convert fetched scales (`load_scales`, `load_words`) to each group's factor, offset [BN, n].

    A weight is number * factor - offset, the number being that of `decode_hqq` or `decode`. For
    nvfp4 these are the factors of even and of odd units; in bf16 one int32 has both. GGUF's are
    those of `gguf_factors`.
    """
    scale, zero = fetched
    offset = 0.0
    if s.kind == "nvfp4":
        if tl.bfloat16 == DTYPE and tl.target_info.is_cuda():
            scale = e4m3_pairs(scale.to(tl.int32))
        else:
            scale, offset = pair_factors(scale, DTYPE)
    elif s.kind == "mxfp4":
        if s.paired and scale.dtype == tl.int16:
            scale = scale.to(tl.int32)
            n: tl.constexpr = scale.shape[1]
            both = tl.join(scale & 0xFF, scale >> 8 & 0xFF)
            scale = tl.reshape(both, [scale.shape[0], 2 * n])
        scale = e2m1_factor(scale.to(tl.int32), DTYPE)
    elif s.kind == "int4" and scale.dtype != tl.bfloat16:
        scale = scale.to(tl.float32)  # or Triton would round products to fp16
    elif s.kind == "int4" and tl.bfloat16 == DTYPE and tl.target_info.is_cuda():
        scale = int4_factor(scale)
    elif s.half_quadratic:
        scale, zero = scale.to(tl.float32), zero.to(tl.float32)
        if weights.scale_step is not None:
            step, low = tl.load(weights.scale_step + rows), tl.load(weights.scale_low + rows)
            scale = scale * step + low
            step, low = tl.load(weights.zero_step + rows), tl.load(weights.zero_low + rows)
            zero = zero * step + low
        offset = hqq_offset(scale, zero, DTYPE)
    elif s.gguf:
        scale, offset = gguf_factors(scale, zero, weights, s, DTYPE)
    return scale, offset


@jit
def unit_factors(factors, s: tl.constexpr):
    """Return the factor and the offset of each unit of a step, by `scale_factors` of groups."""
    COUNT: tl.constexpr = s.tile.numbers // s.fields
    factor, offset = factors
    if s.kind == "nvfp4" and factor.dtype != tl.int32:
        both = tl.join(factor, offset)[:, :, None, :]
        n: tl.constexpr = factor.shape[1]
        both = tl.broadcast_to(both, [factor.shape[0], n, COUNT // n // 2, 2])
        return tl.reshape(both, [factor.shape[0], COUNT]), 0.0
    else:
        if s.has_offset:
            offset = _expand(offset, COUNT)
        return _expand(factor, COUNT), offset


@jit
def load_numbers(weights, factors, at, inside, start, s: tl.constexpr):
    """Load BK numbers from `start` on of each row -> their units, bits above, factors, offsets.

    factors: their result of `scale_factors`. at: rows of the weight [BN, 1] and of its blocks'
    scales, and units [1, n]. inside: which units a row has; None: all.
    """
    rows, scale_rows, unit = at
    codes = weights.codes + rows * (s.width // s.fields) + unit
    other = None if inside is None else 0
    units = tl.load(codes, mask=inside, other=other)
    above = units
    if s.bits_above > 0:
        above = load_above(weights.high, rows, start, s)
    factor, offset = 0.0, 0.0
    if s.kind == "fp8b":  # a scale for each block of `group` rows and columns
        block = start // s.group
        if s.group % s.tile.numbers:
            block = tl.minimum(2 * unit, s.width - 1) // s.group
        factor = tl.load(weights.scale + scale_rows * (s.width // s.group) + block)
        factor *= 256.0  # of `decode`
    elif s.step_scaled:
        factor, offset = unit_factors(factors, s)
    return units, above, factor, offset


@jit
def number_of_field(unit, field: tl.constexpr, s: tl.constexpr):
    """Return where in x, in `Format.grouped_order`, the numbers of a field of units are."""
    return field * (s.width // s.fields) + unit


@jit
def weight_field(numbers, field: tl.constexpr, s: tl.constexpr, DTYPE: tl.constexpr):
    """Return a field of packed units as weights, without what `finish` multiplies."""
    units, above, factor, offset = numbers
    if s.half_quadratic:
        code = decode_hqq(units, above, field, s.bits, DTYPE)
        return (code * factor - offset).to(DTYPE)
    elif s.gguf:
        return gguf_weight(units, above, factor, offset, field, s, DTYPE)
    elif s.kind == "int4" and factor.dtype == tl.bfloat16 and tl.bfloat16 == DTYPE:
        if tl.target_info.is_cuda():
            return scaled_int4(units, factor, field)
        else:
            return (decode(units, factor, field, s.kind, DTYPE) * factor).to(DTYPE)
    else:
        number = decode(units, factor, field, s.kind, DTYPE)
        if s.kind == "fp8b" and tl.bfloat16 == DTYPE:
            number = to_fp32(number)  # the factor has more digits than bf16
        if s.kind == "int4" and factor.dtype == tl.float16:  # q4_0
            factor = factor.to(tl.float32)
            number = to_fp32(number) if tl.bfloat16 == DTYPE else number
        if s.kind == "fp8b" or s.kind == "int4":
            number = (number * factor).to(DTYPE)
        return number


TILE = PromptTile(1, 16, 512, 4)  # of `_unpack`


@jit
def finish_numbers(total, factor, weights, s: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply weights of `weight_field`, or their sums, by what they lack. factor: of `finish`."""
    if s.kind != "fp8b":  # its factor has what its numbers lack
        total = finish(total, factor, s.kind, DTYPE)
    if s.kind == "int4":
        total = finish_int4(total, weights, DTYPE)
    elif s.gguf:
        total = finish_gguf(total, s, DTYPE)
    return total


@jit
def _finished_field(
    numbers, factor, weights, field: tl.constexpr, s: tl.constexpr, DTYPE: tl.constexpr
):
    """Return a field of packed units as weights [BN, units], all that they lack included."""
    number = weight_field(numbers, field, s, DTYPE).to(tl.float32)
    return finish_numbers(number, factor, weights, s, DTYPE).to(DTYPE)


@jit
def _in_own_order(numbers, factor, weights, s: tl.constexpr, DTYPE: tl.constexpr):
    """Return all fields of whole groups as weights in the order of x [BN, BK]."""
    BN: tl.constexpr = s.tile.outputs
    WORDS: tl.constexpr = s.group // (2 * s.fields)  # a group has these; its fields are WORDS apart
    GROUPS: tl.constexpr = s.tile.numbers // s.group
    given = numbers, factor, weights
    if s.fields == 2:
        first, last = _finished_field(*given, 0, s, DTYPE), _finished_field(*given, 1, s, DTYPE)
        both = tl.join(first, last)
    else:
        both = _joined(given, 0, s, DTYPE)
        if s.fields == 8:
            both = tl.join(both, _joined(given, 1, s, DTYPE))
    if s.kind == "q6_k":  # both halves of a run in turn (`mix_halves`)
        both = tl.reshape(both, [BN, GROUPS, WORDS, 2, 2, 2])
        both = tl.permute(both, (0, 1, 5, 3, 4, 2))
    else:
        both = tl.reshape(both, [BN, GROUPS, WORDS, 2, s.fields])
        both = tl.permute(both, (0, 1, 3, 4, 2))
    return tl.reshape(both, [BN, s.tile.numbers])


@jit
def _joined(given, FIRST: tl.constexpr, s: tl.constexpr, DTYPE: tl.constexpr):
    """Join four fields, every second one of eight -> [BN, units, 2, 2]."""
    STEP: tl.constexpr = s.fields // 4
    a, b = _finished_field(*given, FIRST, s, DTYPE), _finished_field(*given, FIRST + STEP, s, DTYPE)
    c = _finished_field(*given, FIRST + 2 * STEP, s, DTYPE)
    d = _finished_field(*given, FIRST + 3 * STEP, s, DTYPE)
    return tl.join(tl.join(a, c), tl.join(b, d))


# Grid [out / BN, in / BK]: a program unpacks BN rows, and BK numbers of each.
@jit
def _unpack(weights, y, s: tl.constexpr):
    DTYPE: tl.constexpr = y.dtype.element_ty
    n = tl.program_id(0) * s.tile.outputs + tl.arange(0, s.tile.outputs)[:, None]
    row, start = tl.minimum(n, s.out - 1).to(tl.int64), tl.program_id(1) * s.tile.numbers
    unit = start // s.fields + tl.arange(0, s.tile.numbers // s.fields)[None, :]
    inside, fetched, factor = unit < s.width // s.fields, None, None
    if s.step_scaled:
        fetched = load_scales(weights, row, start, s)
        fetched = scale_factors(fetched, weights, row, s, DTYPE)
    at = (row, row // s.group, unit)
    numbers = load_numbers(weights, fetched, at, inside, start, s)
    if s.has_row_scale:
        scale = weights.scale_step if s.kind == "nvfp4" else weights.scale
        factor = tl.load(scale + row).to(tl.float32)
    if s.own_order and s.tile.numbers % s.group == 0:
        # Stored field by field, runs of a few numbers would be parts of sectors: q4_k and mxfp4
        # would take four times as long.
        number = start + tl.arange(0, s.tile.numbers)[None, :]
        stored = (number < s.width) & (n < s.out)
        own = _in_own_order(numbers, factor, weights, s, DTYPE)
        tl.store(y + row * s.width + number, own, mask=stored)
    else:
        # Fields of a word are WORDS numbers apart, since a group has these many words.
        WORDS: tl.constexpr = s.group // (2 * s.fields)
        HALF: tl.constexpr = s.tile.numbers // s.fields // 2
        word = start // (2 * s.fields) + tl.arange(0, HALF)[None, :]
        for field in tl.static_range(s.fields):
            number = _finished_field(numbers, factor, weights, field, s, DTYPE)
            place = y + row * s.width
            if s.own_order:
                first, second = tl.split(tl.reshape(number, [s.tile.outputs, HALF, 2]))
                place += word // WORDS * s.group + field * WORDS + word % WORDS
                stored = (word < s.width // (2 * s.fields)) & (n < s.out)
                tl.store(place, first, mask=stored)
                tl.store(place + s.fields * WORDS, second, mask=stored)
            else:
                place += number_of_field(unit, field, s)
                tl.store(place, number, mask=inside & (n < s.out))


def multiply_unpacked(
    x: Tensor,
    parts: dict[str, Tensor],
    kind: str,
    bits: int,
    group: int,
    own_order: bool = False,
) -> Tensor:
    """x [N, in] in `Format.grouped_order`, parts of a weight [out, in] -> [N, out].

    own_order: x is as it is.

    The weight is dequantized to 16 bits for this product of the library. With many rows that is
    faster than `_grouped` by more than unpacking takes.
    """
    out, width = parts["codes"].shape[-2], x.shape[1]
    y = x.new_empty(out, width)
    tensors, bits, group = prompt_operands(parts, kind, bits, group)
    s = PromptSettings(out, width, 1, kind, bits, group, TILE, own_order=own_order)
    grid = cdiv(out, TILE.outputs), cdiv(width, TILE.numbers)
    launch(_unpack, grid, tensors, y, settings=s, warps=TILE.warps)
    return F.linear(x, y)
