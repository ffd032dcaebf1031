"""Codes in 32-bit words: packing and unpacking them, and multiplying them with one token's x.

A word holds F = 32 / bits codes, its fields, the first in the lowest bits. A group of G codes is
G / F words; word i of it holds codes i, i + G / F, i + 2 G / F ... So the codes in one field of
neighboring words are neighbors in the weight, and multiply neighbors in x.

Shapes: x [..., in], codes int32 [..., out, W] with W words a row, scales [..., out, in / G].
"""

from collections.abc import Callable, Iterable
from functools import reduce

import torch
from torch import Tensor

from ops.inductor import dot_bytes, materialize

# Packing ------------------------------------------------------------------------------------------


def interleave(values: Tensor, fields: int, group: int) -> Tensor:
    """[..., n] -> [..., n]: the order in which words of `fields` fields hold them, group by group.

    It transposes [fields, group / fields]; interleave(values, group // fields, group) inverts it.
    """
    return values.unflatten(-1, (-1, fields, group // fields)).transpose(-1, -2).flatten(-3)


def mix_halves(values: Tensor) -> Tensor:
    """Reorder each 32 of [..., n]: its two halves take turns, 4 numbers each."""
    return values.unflatten(-1, (-1, 2, 4, 4)).transpose(-3, -2).flatten(-4)


def part_halves(values: Tensor) -> Tensor:
    """Invert `mix_halves`."""
    return values.unflatten(-1, (-1, 4, 2, 4)).transpose(-3, -2).flatten(-4)


def pack_words(codes: Tensor, bits: int, group: int) -> Tensor:
    """codes [..., n], integers below 2 ** bits -> int32 [..., n * bits / 32]."""
    per_byte = 8 // bits
    fields = codes.to(torch.uint8).unflatten(-1, (-1, 4, per_byte, group * bits // 32))
    # Bytes first: operations on fields of 8 bits move a quarter of the memory.
    bytes_ = (fields[..., k, :] << bits * k for k in range(per_byte))
    words = reduce(torch.bitwise_or, bytes_).to(torch.int32).unbind(-2)
    return reduce(torch.bitwise_or, (word << 8 * k for k, word in enumerate(words))).flatten(-2)


def unpack_words(words: Tensor, bits: int, group: int) -> Tensor:
    """Invert `pack_words`: int32 [..., n * bits / 32] -> int32 [..., n]."""
    fields = 32 // bits
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    ordered = ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
    return interleave(ordered, group // fields, group)


def pack_nibbles(codes: Tensor, group: int = 32) -> Tensor:
    """Codes of 4 bits, uint8 [..., n] -> int32 [..., n / 8], as `pack_words`.

    Fast in groups of 32, since files are read by it: four codes, those of the words of a run, are
    one integer.
    """
    if group != 32:
        ordered = interleave(codes, 8, group)
        return (ordered[..., ::2] | ordered[..., 1::2] << 4).view(torch.int32)
    of_words = codes.contiguous().view(torch.int32).unflatten(-1, (-1, 4, 2))
    both = of_words[..., 0] | of_words[..., 1] << 4  # [..., byte of a word, word]
    return (
        both.view(torch.uint8).unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-3).view(torch.int32)
    )


def nibbles(packed: Tensor) -> Tensor:
    """Bytes of two 4-bit codes, the first in the low bits [..., n] -> uint8 [..., 2 n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def nibbles_to_words(packed: Tensor, group: int) -> Tensor:
    """Bytes of two 4-bit codes, the first in the low bits [..., n] -> `pack_words` of them.

    Byte j + k * group / 16 of a group has field k of the words 2 j and 2 j + 1.
    """
    if group == 8:
        return packed.contiguous().view(torch.int32)
    fields = packed.unflatten(-1, (-1, 8, group // 16)).transpose(-1, -2).contiguous()
    first, second = fields[..., ::2], fields[..., 1::2]
    low, high = first & 15 | second << 4, first >> 4 | second & 0xF0
    return torch.stack((low, high), dim=-2).flatten(-4).view(torch.int32)


def bytes_to_words(codes: Tensor, group: int) -> Tensor:
    """Codes of one byte each [..., n] -> int32 [..., n / 4]."""
    return interleave(codes.view(torch.uint8), 4, group).view(torch.int32)


def words_to_bytes(words: Tensor, group: int) -> Tensor:
    """Invert `bytes_to_words`: int32 [..., n / 4] -> uint8 [..., n]."""
    return interleave(words.view(torch.uint8), group // 4, group)


# Scales -------------------------------------------------------------------------------------------


def nonzero(scale: Tensor) -> Tensor:
    """Replace 0 by 1, so that one can divide by the scale of an all-zero group."""
    return torch.where(scale == 0, 1.0, scale)


def expand_groups(values: Tensor, words: int) -> Tensor:
    """[..., out, groups] -> fp32 [..., out, words]: each group's value for each of its words."""
    values = values.float()
    shape = *values.shape, words // values.shape[-1]
    return values.unsqueeze(-1).expand(shape).flatten(-2)


# Products with codes as fp16 bits -----------------------------------------------------------------
#
# Integer-to-float conversions are slow on a GPU. Instead, a mask and an "or" put two codes at once
# into the mantissas of two fp16 numbers with exponent 10, which are then exactly
# 1024 + factor * code. For 16-bit x, the 1024 stays in the product and is subtracted afterwards by
# a sum over x, which all rows share. That costs some of fp32's digits, so for fp32 x it is
# subtracted from each number.

EXPONENT_10 = 0x6400  # bits of 1024 in fp16


def offset_for(x: Tensor) -> float:
    """Return how much of the 1024 stays in each number."""
    return 0.0 if x.dtype == torch.float32 else 1024.0


def both_halves(mask: int) -> int:
    """Repeat a 16-bit mask in both halves of a word, as a signed 32-bit integer."""
    both = mask << 16 | mask
    return both - 2**32 if both >= 2**31 else both


def halves_as_fp16(words: Tensor, subtract: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the low and high 16 bits of int32 words, read as fp16, minus `subtract`, in fp32."""
    return tuple(
        half.to(torch.int16).view(torch.float16).float() - subtract for half in (words, words >> 16)
    )


def split_fields(
    x: Tensor, fields: int, group: int, words: int = 1, copy: bool = True
) -> list[Tensor]:
    """x [..., in] -> fp32 [..., 1, W] for each field: the numbers that its codes multiply.

    words: neighboring words that are decoded together; they have words * fields fields.

    copy: write x in this order (and in fp32) once, in a small kernel, so that every row reads it
    faster, by a tenth to a third. In place it is as fast where the numbers of one field are long
    runs of x, that is with large groups.
    """
    x = x.float() if copy else materialize(x)
    fields_of_x = x.unflatten(-1, (-1, fields, group // fields // words, words))
    fields_of_x = fields_of_x.movedim((-1, -3), (-4, -3)).flatten(-2)
    if copy:
        fields_of_x = materialize(fields_of_x.clone(memory_format=torch.contiguous_format))
    return [field.unsqueeze(-2).float() for field in fields_of_x.flatten(-3, -2).unbind(-2)]


def field_values(
    words: Tensor, bits: int, offset: float, high_bits: Callable[[int, int], Tensor] | None = None
) -> list[tuple[Tensor, float]]:
    """Decode each field of `words` to fp32 (offset + factor * code, factor).

    high_bits(k, at): for codes with further bits in another plane, those of fields k and
    k + 16 / bits, in place: from bits at + bits and at + bits + 16 on, all others zero.
    """
    fields = 16 // bits
    values = [None] * (2 * fields)
    for k in range(fields):
        at = bits * k % 8  # a field in a byte's upper bits needs no shift: its factor is larger
        codes = (words >> (bits * k - at)) & both_halves((2**bits - 1) << at)
        if high_bits is not None:
            codes = codes | high_bits(k, at)
        low, high = halves_as_fp16(codes | both_halves(EXPONENT_10), 1024.0 - offset)
        values[k], values[k + fields] = (low, 2.0**at), (high, 2.0**at)
    return values


def sum_of_products(
    x: list[Tensor], values: list[tuple[Tensor, float]], offset: float, zero: float = 0.0
) -> Tensor:
    """Sum x * (code - zero) over the fields of each word, fp32 [..., out, W].

    x: of `split_fields`; values: of `field_values`, with the same offset. The terms that do not
    depend on the row are materialized, or each row would add them up again (int8 in Mixtral's
    shapes on an H200: 66 instead of 87 us).
    """
    total = sum(field / factor * value for field, (value, factor) in zip(x, values, strict=True))
    if not offset and not zero:
        return total
    factors = [factor for _, factor in values]
    return total - materialize(
        sum(field * (offset / factor + zero) for field, factor in zip(x, factors, strict=True))
    )


# Products with codes as bytes ---------------------------------------------------------------------
#
# NVIDIA GPUs multiply two bytes with two 16-bit integers and add up in one instruction (dp2a;
# ops.inductor.dot_bytes). For 16-bit x, integer codes are then never converted at all: a half to a
# quarter of the instructions.

# From this size on, an 8-bit matrix gains more than the kernel costs that prepares x.
INTEGER_PRODUCT_MIN_BYTES = 14_000_000


def is_large(codes: Tensor) -> bool:
    """Whether each 8-bit matrix [out, W] of codes [..., out, W] is worth integer products."""
    return 4 * codes.shape[-2] * codes.shape[-1] >= INTEGER_PRODUCT_MIN_BYTES


def has_dp2a(x: Tensor) -> bool:
    """Whether integer products apply to this x: 16 bits, on an NVIDIA GPU."""
    return x.is_cuda and torch.version.hip is None and x.element_size() == 2


def round_to_int16(x: Tensor, fields: int, group: int) -> list[Tensor]:
    """x [..., in] in 16 bits -> what `dot_bytes` multiplies words of `fields` fields with.

    All are [..., 1, W]: an int32 pair of int16 for each two of a word's bytes, first those of the
    fields in bits 0 to 32 / fields - 1 of each byte, then those above; the unit of these integers,
    fp32; the sum of x over each word's fields, fp32.

    The x of a word's fields share a power of two. Over 7 binary orders below the largest, bf16
    keeps all its digits in that; smaller numbers are exact to 2 ** -15 of the largest.
    """
    x = x.float().unflatten(-1, (-1, fields, group // fields))
    x = [field.flatten(-2) for field in x.unbind(-2)]
    largest = reduce(torch.maximum, map(torch.abs, x)).clamp(min=1e-30)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # the largest, or below it
    integers = [(values * (2.0**14 / power)).round().to(torch.int32) for values in x]
    unit, planes = power * 2.0**-14, fields // 4
    of_bytes = ([integers[k + n * planes] for n in range(4)] for k in range(planes))
    pairs = [byte[n] & 0xFFFF | byte[n + 1] << 16 for byte in of_bytes for n in (0, 2)]
    return [materialize(values).unsqueeze(-2) for values in (*pairs, unit, sum(integers) * unit)]


def integer_products(
    x: Tensor, fields: int, group: int, planes: Iterable[Tensor]
) -> tuple[Tensor, Tensor]:
    """Sum x * code over the fields of each word, and x alone: fp32 [..., out, W], [..., 1, W].

    planes: int32 words of four codes, a byte each: those in the lowest field of each byte of a
    word, then those in the next field. A generator: x is prepared before the first.
    """
    *pairs, unit, total_x = round_to_int16(x, fields, group)
    total = 0
    for low, high, plane in zip(pairs[::2], pairs[1::2], planes, strict=True):
        total = total + dot_bytes(low, high, plane)
    return total.float() * unit, total_x


def byte_planes(words: Tensor, bits: int) -> Iterable[Tensor]:
    """Yield the planes of `integer_products` for words of `bits`-bit codes."""
    for k in range(8 // bits):
        yield words >> bits * k & (2**bits - 1) * 0x01010101
