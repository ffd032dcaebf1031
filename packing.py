"""Number formats: how 8-, 4-, 3- and 2-bit weights are packed, unpacked, and multiplied with one token as they are.

A format is a row of FORMATS. It stores a weight [..., out, in] as a few tensors, its parts, which keep the weight's
rank and the order of its axes, with size 1 where a value serves the whole row:

    codes   int32 [..., out, in * bits / 32]: F = 32 / bits codes to a word, the first in the lowest bits. A group of G
            is G / F words; word i of it holds codes i, i + G / F, i + 2 G / F ..., so that what one field of
            neighbouring words multiplies are neighbours in x
    third   int32 [..., out, in / 32]: the third bit of 3-bit codes, whose lower two are `codes` (see `_third_bits`)
    scale   bf16 [..., out, 1 or in / G], or uint8 [..., out, in / G] with scale_step and scale_low bf16 [..., out, 1],
            or fp32 [..., out / G, in / G] of blocks, the last of which may have fewer rows;
            uint8 [..., out, in / G] alone is an exponent of two, less 127
    zero    as the one in uint8 with a step

Codes are packed along `in` alone and within groups, so that a weight can be cut along either axis (between blocks).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

import grouped_kernel
from layers import dot_bytes, realise

Parts = dict[str, Tensor]


# Words --------------------------------------------------------------------------------------------------------------


def word_order(values: Tensor, fields: int, group: int) -> Tensor:
    """[..., n] -> [..., n] in the order in which words of so many fields hold them, group by group."""
    return values.unflatten(-1, (-1, fields, group // fields)).transpose(-1, -2).flatten(-3)


def grouped_order(x: Tensor, bits: int, group: int) -> Tensor:
    """[..., in] -> [..., in] in the order in which `grouped_kernel.grouped` unpacks weights of so many bits.

    A word is two units of 16 bits. Of as many neighbouring units as it unpacks side by side the first fields, then the
    second ones, and so on.
    """
    fields = 16 if bits == 3 else 32 // bits
    run = grouped_kernel.grouped_run(x.shape[-1], bits)
    return word_order(x, fields, group).unflatten(-1, (-1, run, fields // 2)).transpose(-2, -1).flatten(-3)


def pack(codes: Tensor, bits: int, group: int) -> Tensor:
    """codes [..., n], whole numbers below 2 ** bits -> int32 [..., n * bits / 32]."""
    shifts = torch.arange(0, 32, bits, device=codes.device, dtype=torch.int32)
    ordered = word_order(codes.to(torch.int32), 32 // bits, group)
    return (ordered.unflatten(-1, (-1, 32 // bits)) << shifts).sum(-1, dtype=torch.int32)


def in_words(codes: Tensor, group: int) -> Tensor:
    """Codes of a byte each, [..., n] -> int32 [..., n / 4]."""
    return word_order(codes.view(torch.uint8), 4, group).view(torch.int32)


def out_of_words(words: Tensor, group: int) -> Tensor:
    """The inverse of `in_words`: int32 [..., n / 4] -> uint8 [..., n]."""
    return word_order(words.view(torch.uint8), group // 4, group)  # a transposition, back


def unpack(words: Tensor, bits: int, group: int) -> Tensor:
    """The inverse of `pack`: int32 [..., n * bits / 32] -> int32 [..., n]."""
    fields = 32 // bits
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    ordered = ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
    return word_order(ordered, group // fields, group)  # a transposition, back


def _third_bits(bits: Tensor, back: bool = False) -> Tensor:
    """Bits [..., n] in word order to the order of a `third` plane, or back.

    Bit 8 b + 4 m + k is that of field 4 b + k of word m, of two words of sixteen 2-bit codes: those of the four fields
    that one shift and one mask make bytes of lie 8 apart, as the fields themselves do.
    """
    return bits.unflatten(-1, (-1, 4, 2, 4) if back else (-1, 2, 4, 4)).transpose(-3, -2).flatten(-4)


# Products for one token ---------------------------------------------------------------------------------------------
#
# A code becomes a number without an integer-to-float conversion, of which a GPU does few at a time: a mask and an "or"
# put two codes at once into the mantissas of two fp16 numbers of exponent 10, which are then 1024 + factor * code
# exactly. For x in 16 bits, what this lift of 1024 adds to the product is subtracted afterwards by a sum over x, which
# all rows share; that costs some of fp32's digits, so for x in fp32 it is subtracted from each number.
#
# On NVIDIA's GPUs, and for x in 16 bits, whole numbers as codes are never converted: as bytes they are
# multiplied by whole numbers (`layers.dot_bytes`), with a half to a quarter of the instructions.


def _lift(x: Tensor) -> float:
    """What is left of the 1024 in each number."""
    return 0.0 if x.dtype == torch.float32 else 1024.0


def _halves(words: Tensor, less: float = 0.0) -> tuple[Tensor, Tensor]:
    """int32 words -> their low and high 16 bits read as fp16, less a number, in fp32."""
    return tuple(half.to(torch.int16).view(torch.float16).float() - less for half in (words, words >> 16))


def _twice(mask: int) -> int:
    """A mask for both halves of a word, as a signed 32-bit number."""
    both = mask << 16 | mask
    return both - 2**32 if both >= 2**31 else both


def _planes(x: Tensor, fields: int, group: int, words: int = 1, copy: bool = True) -> list[Tensor]:
    """x [..., in] -> fp32 [..., 1, W] for each field of so many neighbouring words at a time: what it multiplies.

    Copied into this order (and to fp32) once, in a small kernel, x is read faster by every row: by a tenth to a third.
    Only where a field's share of x lies in long runs anyhow is reading it in place as fast.
    """
    x = x.float() if copy else realise(x)
    planes = x.unflatten(-1, (-1, fields, group // fields // words, words)).movedim((-1, -3), (-4, -3)).flatten(-2)
    if copy:
        planes = realise(planes.clone(memory_format=torch.contiguous_format))
    return [plane.unsqueeze(-2).float() for plane in planes.flatten(-3, -2).unbind(-2)]


def _planes_of_bytes(x: Tensor, words: Tensor, group: int) -> list[Tensor]:
    """`_planes` for 8-bit codes, in place. Many rows read x faster in fp32; a small dense matrix has been read by the
    time that a kernel has made that of it."""
    small = words.dim() == 2 and not _large(words)
    return _planes(x if small else x.float(), 4, group, copy=False)


def _values(words: Tensor, bits: int, lift: float, third: Tensor | None = None) -> list[tuple[Tensor, float]]:
    """The codes in `words` as (lift + factor * code, factor), field by field.

    third: a third bit for 2-bit codes, already shifted so that its first, of every eight, is of these words.
    """
    fields = 16 // bits
    values = [None] * (2 * fields)
    for k in range(fields):
        at = bits * k % 8  # fields of one byte need no shift of their own: they are multiples of a larger factor
        chosen = (words >> (bits * k - at)) & _twice((2**bits - 1) << at)
        if third is not None:
            by = at + 2 - (k // 4 * 8 + k % 4)  # from its bit to the place above the two
            chosen = chosen | ((third << by if by > 0 else third >> -by) & _twice(4 << at))
        low, upper = _halves(chosen | _twice(0x6400), 1024.0 - lift)
        values[k], values[k + fields] = (low, 2.0**at), (upper, 2.0**at)
    return values


def _sum_of_products(x: list[Tensor], values: list[tuple[Tensor, float]], lift: float, zero: float = 0.0) -> Tensor:
    """x fp32 [..., 1, W] a field, values [..., out, W] a field -> the sum over fields of x * (code - zero).

    What does not depend on a row is kept in memory, or every row would add it up again (int8 in Mixtral's shapes: 66
    instead of 87 us).
    """
    total = sum(plane / factor * value for plane, (value, factor) in zip(x, values, strict=True))
    if not lift and not zero:
        return total
    return total - realise(sum(plane * (lift / factor + zero) for plane, (_, factor) in zip(x, values, strict=True)))


LARGE = 14_000_000  # bytes of an 8-bit matrix from which on it gains more than the kernel costs that prepares x for it


def _large(codes: Tensor) -> bool:
    """Whether each matrix of these [..., out, W], four codes of 8 bits to a word, is."""
    return 4 * codes.shape[-2] * codes.shape[-1] >= LARGE


def in_bytes(x: Tensor, codes: Tensor | None = None) -> bool:
    """Whether products of x and whole numbers, of 8 bits these [..., out, W], are made by `dot_bytes`."""
    large = codes is None or _large(codes)
    return large and x.is_cuda and torch.version.hip is None and x.element_size() == 2


def _whole_numbers(x: Tensor, fields: int, group: int) -> list[Tensor]:
    """x [..., in] in 16 bits as what `dot_bytes` multiplies words of so many fields by: two halves for each field of a
    byte. Then what 1 of it is worth, and the sum of that over each word's fields, fp32. All [..., 1, W].

    The fields of a word have one power of two. In that bf16 keeps all its digits over 7 binary orders, and what is
    smaller is right to 2 ** -15 of the largest.
    """
    x = x.float().unflatten(-1, (-1, fields, group // fields))
    x = [field.flatten(-2) for field in x.unbind(-2)]
    largest = reduce(torch.maximum, map(torch.abs, x)).clamp(min=1e-30)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # which is at most the largest
    whole = [(values * (2.0**14 / power)).round().to(torch.int32) for values in x]
    unit, sets = power * 2.0**-14, fields // 4
    bytes_of = ([whole[k + n * sets] for n in range(4)] for k in range(sets))  # what set k multiplies, byte by byte
    halves = [some[n] & 0xFFFF | some[n + 1] << 16 for some in bytes_of for n in (0, 2)]
    return [realise(values).unsqueeze(-2) for values in (*halves, unit, sum(whole) * unit)]


def _spread(values: Tensor, words: int) -> Tensor:
    """[..., out, groups] -> fp32 [..., out, words], each group's value for each of its words."""
    return values.float().unsqueeze(-1).expand(*values.shape, words // values.shape[-1]).flatten(-2)


def _each_row(scale: Tensor, out: int, group: int) -> Tensor:
    """Of blocks of G rows, [..., out / G, groups] -> of each row, [..., out, groups]."""
    *lead, blocks, groups = scale.shape
    return scale.unsqueeze(-2).expand(*lead, blocks, group, groups).flatten(-3, -2).narrow(-2, 0, out)


def dot_int8(x: Tensor, parts: Parts, group: int) -> Tensor:
    """x [..., in], parts of [..., out, in] -> fp32 [..., out]."""
    words, values = parts["codes"], [None] * 4
    if in_bytes(x, words):
        low, high, unit, _ = _whole_numbers(x, 4, group)
        return (dot_bytes(low, high, words).float() * unit).sum(-1) * parts["scale"].squeeze(-1).float()
    for k in (0, 1):
        # Two's complement with its top bit flipped is code + 128, in the mantissa of 1024. There are instructions to
        # spare at 8 bits to take both off at once, which spares a kernel for the sum of x.
        values[k], values[k + 2] = _halves(((words >> 8 * k) & _twice(0xFF)) ^ _twice(0x6480), 1024.0 + 128.0)
    products = (plane * value for plane, value in zip(_planes_of_bytes(x, words, group), values, strict=True))
    return sum(products).sum(-1) * parts["scale"].squeeze(-1).float()


def _fp8_products(x: Tensor, words: Tensor, group: int) -> Tensor:
    """x [..., in], words of e4m3 codes [..., out, W] -> fp32 [..., out, W], 2 ** -8 of each word's products with x.

    e4m3 is s eeee mmm, fp16 is s eeeee mmmmmmmmmm: the same bits shifted into place are the number times 2 ** -8,
    numbers below the smallest normal one included. So no device needs to know fp8.
    """
    values = [None] * 4
    for k, byte in ((0, words << 8), (1, words)):
        values[k], values[k + 2] = _halves((byte & _twice(0x8000)) | ((byte >> 1) & _twice(0x3F80)))
    return sum(plane * value for plane, value in zip(_planes_of_bytes(x, words, group), values, strict=True))


def dot_fp8(x: Tensor, parts: Parts, group: int) -> Tensor:
    """x [..., in], parts of [..., out, in] -> fp32 [..., out]."""
    return _fp8_products(x, parts["codes"], group).sum(-1) * (parts["scale"].squeeze(-1).float() * 2.0**8)


def dot_fp8b(x: Tensor, parts: Parts, group: int) -> Tensor:
    """x [..., in], parts of [..., out, in] -> fp32 [..., out]."""
    # x always in fp32: where it is not, the compiler makes two kernels of the sum over a row.
    products = _fp8_products(x.float(), parts["codes"], group)
    scale = _each_row(parts["scale"], products.shape[-2], group) * 2.0**8
    return (_spread(scale, products.shape[-1]) * products).sum(-1)


def dot_mxfp4(x: Tensor, parts: Parts, group: int) -> Tensor:
    """x [..., in], parts of [..., out, in] -> fp32 [..., out].

    e2m1 is s ee m: shifted into the place of an fp16 number's sign, last two exponent bits and first bit of the
    mantissa, it is the number times 2 ** -14, 0.5 included (cf. `dot_fp8`).
    """
    words, values = parts["codes"], [None] * 8
    for k in range(4):
        magnitude = words << 9 - 4 * k if k < 3 else words >> 3
        values[k], values[k + 4] = _halves(words << 12 - 4 * k & _twice(0x8000) | magnitude & _twice(0x0E00))
    planes = _planes(x, 8, group, copy=group < 128)
    total = sum(plane * value for plane, value in zip(planes, values, strict=True)) * 2.0**14
    return (_spread(power_of_two(parts["scale"]), words.shape[-1]) * total).sum(-1)


def dot_int4(x: Tensor, parts: Parts, group: int) -> Tensor:
    """x [..., in], parts of [..., out, in] -> fp32 [..., out]."""
    words, lift = parts["codes"], _lift(x)
    if in_bytes(x):
        total, total_x = _products_of_bytes(x, parts, group, 4)
        total = total - 8.0 * total_x
    else:
        total = _sum_of_products(_planes(x, 8, group, copy=group < 128), _values(words, 4, lift), lift, 8.0)
    return (_spread(parts["scale"], words.shape[-1]) * total).sum(-1)


def _products_of_bytes(x: Tensor, parts: Parts, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """`_sum_of_products` of codes of fewer than 8 bits for x in 16: every so manieth field of a word is a byte of
    another one. And the sum of x, by words."""
    words, total, low = parts["codes"], 0, 2 if bits == 3 else bits
    *halves, unit, total_x = _whole_numbers(x, 32 // low, group)
    if bits == 3:  # of two words in turn, the third bits above the first codes of their bytes
        odd = torch.arange(0, 4, 2, dtype=torch.int32, device=x.device)
        third = (parts["third"].unsqueeze(-1) << 2 - odd >> odd).flatten(-2)
    for k, pair in enumerate(zip(halves[::2], halves[1::2], strict=True)):
        chosen = words >> low * k & (2**low - 1) * 0x01010101
        if bits == 3:
            chosen = chosen | third >> k & 0x04040404
        total = total + dot_bytes(*pair, chosen)
    return total.float() * unit, total_x


def dot_hqq(x: Tensor, parts: Parts, group: int, bits: int) -> Tensor:
    """x [..., in], parts of [..., out, in] -> fp32 [..., out]."""
    words, lift = parts["codes"], _lift(x)
    if in_bytes(x):
        total, total_x = _products_of_bytes(x, parts, group, bits)
    else:
        if bits == 3:  # two words of two bits to one of third bits
            words, (first, second) = parts["third"], words.unflatten(-1, (-1, 2)).unbind(-1)
            planes = _planes(x, 16, group, 2)
            values = _values(first, 2, lift, words) + _values(second, 2, lift, words >> 4)
        else:
            planes, values = _planes(x, 32 // bits, group), _values(words, bits, lift)
        total, total_x = _sum_of_products(planes, values, lift), realise(sum(planes))
    scale, zero = (_spread(_plain(parts, name), words.shape[-1]) for name in ("scale", "zero"))
    return (scale * (total - zero * total_x)).sum(-1)


# Packing and unpacking ----------------------------------------------------------------------------------------------


def nonzero(scale: Tensor) -> Tensor:
    """A scale that can divide: 1 where all that it scales is zero."""
    return torch.where(scale == 0, 1.0, scale)


def pack_int8(weight: Tensor, group: int) -> Parts:
    """fp32 [..., out, in] -> codes from -127 to 127, scale bf16 [..., out, 1]: the row's largest magnitude over 127."""
    scale = nonzero((weight.abs().amax(-1, keepdim=True) / 127).bfloat16())
    codes = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return {"codes": in_words(codes, group), "scale": scale}


def unpack_int8(parts: Parts, group: int) -> Tensor:
    codes = out_of_words(parts["codes"], group).view(torch.int8)
    return codes.float() * parts["scale"].float()


def pack_fp8(weight: Tensor, group: int) -> Parts:
    """fp32 [..., out, in] -> e4m3 codes, scale bf16 [..., out, 1]: the row's largest magnitude over 448."""
    scale = nonzero((weight.abs().amax(-1, keepdim=True) / 448).bfloat16())
    codes = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"codes": in_words(codes, group), "scale": scale}


def unpack_fp8(parts: Parts, group: int) -> Tensor:
    codes = out_of_words(parts["codes"], group).view(torch.float8_e4m3fn)
    return codes.float() * parts["scale"].float()


def pack_fp8b(weight: Tensor, group: int) -> Parts:
    """fp32 [..., out, in] -> e4m3 codes, scale fp32 [..., out / G, in / G]: a block's largest magnitude over 448."""
    rows = F.pad(weight, (0, 0, 0, -weight.shape[-2] % group))
    blocks = rows.unflatten(-1, (-1, group)).unflatten(-3, (-1, group))  # [..., out / G, G, in / G, G]
    scale = nonzero(blocks.abs().amax((-3, -1)) / 448)
    codes = weight / _spread(_each_row(scale, weight.shape[-2], group), weight.shape[-1])
    return {"codes": in_words(codes.clamp(-448, 448).to(torch.float8_e4m3fn), group), "scale": scale}


def unpack_fp8b(parts: Parts, group: int) -> Tensor:
    codes = out_of_words(parts["codes"], group).view(torch.float8_e4m3fn)
    return codes.float() * _spread(_each_row(parts["scale"], codes.shape[-2], group), codes.shape[-1])


def pack_int4(weight: Tensor, group: int) -> Parts:
    """fp32 [..., out, in] -> codes 0 to 15 for -8 to 7, scale bf16 [..., out, in / G].

    The number of the largest magnitude in a group becomes -8, whatever its sign, so that all sixteen codes serve.
    """
    grouped = weight.unflatten(-1, (-1, group))
    largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
    scale = nonzero((largest / -8).bfloat16())
    codes = ((grouped / scale.float()).round() + 8).clamp(0, 15).flatten(-2)
    return {"codes": pack(codes, 4, group), "scale": scale.squeeze(-1)}


def unpack_int4(parts: Parts, group: int) -> Tensor:
    codes = (unpack(parts["codes"], 4, group) - 8).float()
    return codes * _spread(parts["scale"], codes.shape[-1])


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what codes 0 to 7 are; 8 to 15 are the same, negative


def power_of_two(exponents: Tensor) -> Tensor:
    """e8m0, uint8 -> fp32, 2 ** (exponent - 127): its bits as those of an fp32 number, whose smallest is subnormal."""
    bits = exponents.to(torch.int32) << 23
    return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)


def pack_mxfp4(weight: Tensor, group: int) -> Parts:
    """fp32 [..., out, in] -> e2m1 codes, scale e8m0 [..., out, in / G] (OCP Microscaling Formats v1.0, section 6.3).

    The scale brings a group's largest magnitude to [4, 8); a number becomes the nearest there is, of two as near the
    one with an even code, and what is above 6 becomes 6.
    """
    grouped = weight.unflatten(-1, (-1, group))
    _, exponent = grouped.abs().amax(-1, keepdim=True).frexp()  # of a mantissa in [0.5, 1)
    scale = (exponent - 3 + 127).clamp(0, 254).to(torch.uint8)
    scaled = (grouped / power_of_two(scale)).flatten(-2)
    magnitude = scaled.abs()
    # Below 2 numbers are 0.5 apart, then 1 and 2: rounded in those steps, and counted from where they begin.
    steps = ((2.0, 2.0, 0.0), (4.0, 1.0, 2.0), (math.inf, 0.5, 4.0))
    codes = torch.zeros_like(scaled)
    for end, per_step, before in reversed(steps):
        codes = torch.where(magnitude < end, (magnitude * per_step).round() + before, codes)
    codes = codes.clamp(max=7).to(torch.int32) | scaled.signbit().to(torch.int32) << 3
    return {"codes": pack(codes, 4, group), "scale": scale.squeeze(-1)}


def unpack_mxfp4(parts: Parts, group: int) -> Tensor:
    codes = unpack(parts["codes"], 4, group)
    values = torch.tensor(E2M1 + tuple(-value for value in E2M1), device=codes.device)[codes]
    return values * _spread(power_of_two(parts["scale"]), codes.shape[-1])


def mxfp4_codes(blocks: Tensor) -> Tensor:
    """uint8 [..., in / 32, 16] as published, the first of two codes in a byte's lower bits -> `codes`, int32."""
    return pack(torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3), 4, 32)


def solve_hqq(weight: Tensor, bits: int, iterations: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Half-quadratic quantisation (Badri & Shaji 2023) of fp32 [..., groups, G], all groups as one problem.

    -> codes [..., groups, G] (fp32, whole numbers), scale and zero [..., groups, 1], so that weight is nearly
    (codes - zero) / scale. Only the zero is optimised: in turns, the error is split into a sparse part (a shrinkage for
    the lp "norm", p = 0.7) and the zero set to the mean that fits the rest; 0 iterations are round-to-nearest.
    """
    top, p, beta, best = 2**bits - 1, 0.7, 10.0, math.inf
    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    scale = (top / (high - low)).clamp(max=2e4)
    zero = -low * scale
    if bits == 4:
        zero = zero.round()
    for _ in range(iterations):
        codes = (weight * scale + zero).round_().clamp_(0, top)
        error = weight - (codes - zero) / scale
        magnitude = error.abs()
        sparse = error.sign() * (magnitude - magnitude.pow(p - 1) * (1 / beta)).relu_()
        zero = (codes - (weight - sparse) * scale).mean(-1, keepdim=True)
        beta *= 1.01
        size = magnitude.mean().item()
        if size >= best:
            break
        best = size
    return (weight * scale + zero).round_().clamp_(0, top), scale, zero


def _to_8_bits(values: Tensor, name: str) -> Parts:
    """fp32 [..., out, groups] -> uint8 codes, with a step and a low for each row: value = code * step + low."""
    low = values.amin(-1, keepdim=True).bfloat16()
    step = nonzero(((values.amax(-1, keepdim=True) - low.float()) / 255).bfloat16())
    codes = ((values - low.float()) / step.float()).round().clamp(0, 255).to(torch.uint8)
    return {name: codes, f"{name}_step": step, f"{name}_low": low}


def _plain(parts: Parts, name: str) -> Tensor:
    """The inverse of `_to_8_bits`."""
    return parts[name].float() * parts[f"{name}_step"].float() + parts[f"{name}_low"].float()


def pack_hqq(weight: Tensor, group: int, bits: int, iterations: int = 20) -> Parts:
    """fp32 [..., out, in] -> codes, with scale and zero of each group of G themselves in 8 bits, row by row.

    Codes are rounded anew for the scale and zero that the reader will see. `scale` is the step between codes, the
    inverse of the solver's.
    """
    # The solver's limit on scales is one on how small weights may be: rows of tiny ones are made larger for it.
    largest = weight.abs().amax(-1, keepdim=True)
    tiny = (largest > 0) & (largest < 2**-8)
    unit = torch.where(tiny, torch.exp2(largest.log2().floor() + 5), 1.0)
    grouped, top = (weight / unit).unflatten(-1, (-1, group)), 2**bits - 1
    _, scale, zero = solve_hqq(grouped, bits, iterations)
    # A group far from zero for its spread has a zero far from its codes, which would stretch the row's range of zeros:
    # it gets the codes of a group that reaches from zero to its largest magnitude.
    step, far = 1 / scale, (zero < -top) | (zero > 2 * top)
    step = torch.where(far, grouped.abs().amax(-1, keepdim=True) / top, step)
    zero = torch.where(far, torch.where(zero < 0, 0.0, top), zero)
    parts = _to_8_bits(step.squeeze(-1) * unit, "scale") | _to_8_bits(zero.squeeze(-1), "zero")
    scale, zero = (_plain(parts, name).unsqueeze(-1) for name in ("scale", "zero"))
    codes = (
        (weight.unflatten(-1, (-1, group)) / nonzero(scale) + zero).round().clamp(0, top).flatten(-2).to(torch.int32)
    )
    if bits == 3:
        third = pack(_third_bits(word_order(codes >> 2, 16, group)), 1, 32)
        return {"codes": pack(codes & 3, 2, group), "third": third, **parts}
    return {"codes": pack(codes, bits, group), **parts}


def unpack_hqq(parts: Parts, group: int, bits: int) -> Tensor:
    if bits == 3:
        third = word_order(_third_bits(unpack(parts["third"], 1, 32), back=True), group // 16, group)
        codes = unpack(parts["codes"], 2, group) | third << 2
    else:
        codes = unpack(parts["codes"], bits, group)
    scale, zero = (_spread(_plain(parts, name), codes.shape[-1]) for name in ("scale", "zero"))
    return (codes.float() - zero) * scale


# Formats ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """One way to store a weight and to multiply with it."""

    bits: int  # of a code
    group: int  # G by default
    kind: str  # "int8", "fp8", "fp8b", "int4", "mxfp4" or "hqq": what a code counts, and what its scale is of
    pack: Callable[[Tensor, int], Parts]  # fp32 [..., out, in], G -> parts
    unpack: Callable[[Parts, int], Tensor]  # parts, G -> fp32 [..., out, in]
    dot: Callable[[Tensor, Parts, int], Tensor]  # x [..., in], parts of [..., out, in], G -> fp32 [..., out]
    head: str  # what the head gets where nothing else is asked for
    attention: str | None = None  # what attention gets with a --mode; None: this format

    @property
    def per_row(self) -> bool:
        """Whether a row has one scale, so that a group is only how its codes are packed."""
        return self.kind in ("int8", "fp8")

    @property
    def blocks(self) -> bool:
        """Whether a group is of G rows too."""
        return self.kind == "fp8b"

    def by_bytes(self, x: Tensor, codes: Tensor) -> bool:
        """Whether `dot` makes whole numbers of x first: in a kernel of its own, with what x is computed by."""
        return self.kind in ("int8", "int4", "hqq") and in_bytes(x, codes if self.kind == "int8" else None)

    @property
    def least(self) -> int:
        """The smallest G: codes in a word, or in one of third bits, or those that share an exponent by definition."""
        return 32 if self.bits == 3 or self.kind == "mxfp4" else 32 // self.bits

    def choose_group(self, width: int, group: int | None) -> int:
        """The G for rows of `width` numbers where `group` is asked for; None leaves it to the format.

        Raises ValueError where it does not divide them, or not into whole words.
        """
        if group is None:
            group = next((n for n in (16, 8) if width % n == 0), 4) if self.per_row else self.group
        if type(group) is not int or group < 1 or not self.fits(width, group):
            raise ValueError(f"groups of {group} do not divide rows of {width} numbers into whole words")
        return group

    def fits(self, width: int, group: int) -> bool:
        return group % self.least == 0 and width % group == 0

    def layout(self, shape: torch.Size, group: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of a weight of that shape, [..., out, in]."""
        *rows, width = shape
        layout = {"codes": ((*rows, width * (2 if self.bits == 3 else self.bits) // 32), torch.int32)}
        if self.bits == 3:
            layout["third"] = (*rows, width // 32), torch.int32
        if self.blocks:
            return layout | {"scale": ((*rows[:-1], -(-rows[-1] // group), width // group), torch.float32)}
        if self.kind == "mxfp4":
            return layout | {"scale": ((*rows, width // group), torch.uint8)}
        if self.kind != "hqq":
            return layout | {"scale": ((*rows, 1 if self.per_row else width // group), torch.bfloat16)}
        for name in ("scale", "zero"):
            layout[name] = (*rows, width // group), torch.uint8
            layout |= {f"{name}_{leaf}": ((*rows, 1), torch.bfloat16) for leaf in ("step", "low")}
        return layout


def _hqq(bits: int, group: int) -> Format:
    functions = (partial(function, bits=bits) for function in (pack_hqq, unpack_hqq, dot_hqq))
    return Format(bits, group, "hqq", *functions, head="bf16")


FORMATS = {
    "int8": Format(8, 16, "int8", pack_int8, unpack_int8, dot_int8, head="int8"),
    "fp8": Format(8, 16, "fp8", pack_fp8, unpack_fp8, dot_fp8, head="int8"),
    "fp8b": Format(8, 128, "fp8b", pack_fp8b, unpack_fp8b, dot_fp8b, head="bf16"),
    "int4": Format(4, 128, "int4", pack_int4, unpack_int4, dot_int4, head="int8"),
    "mxfp4": Format(4, 32, "mxfp4", pack_mxfp4, unpack_mxfp4, dot_mxfp4, head="bf16", attention="bf16"),
    "hqq4": _hqq(4, 64),
    "hqq3": _hqq(3, 64),
    "hqq2": _hqq(2, 16),
}
PLAIN = "bf16"  # in place of a format's name: the weight stays as it is
