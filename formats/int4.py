"""int4: 4-bit integers and one scale a group."""

import torch
from torch import Tensor

from formats.base import Format, Parts
from formats.words import (
    byte_planes,
    expand_groups,
    field_values,
    has_dp2a,
    integer_products,
    nonzero,
    offset_for,
    pack_words,
    split_fields,
    sum_of_products,
    unpack_words,
)

ZERO = 8  # the code of 0


class Int4(Format):
    """codes 0 to 15 for -8 to 7; scale bf16 [..., out, in / G].

    The number of largest magnitude in a group becomes -8, whatever its sign (the scale may be
    negative), so that all sixteen codes are used.
    """

    name = "int4"
    bits = 4
    group = 128
    kind = "int4"
    has_gemv = True
    head_format = "int8"

    def pack(self, weight: Tensor, group: int) -> Parts:
        grouped = weight.unflatten(-1, (-1, group))
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        largest = torch.where(high >= -low, high, low)  # `argmax` takes ten times as long on a CPU
        scale = nonzero((largest / -8).bfloat16())
        codes = ((grouped / scale.float()).round() + ZERO).clamp(0, 15).flatten(-2)
        return {"codes": pack_words(codes, self.bits, group), "scale": scale.squeeze(-1)}

    def unpack(self, parts: Parts, group: int) -> Tensor:
        codes = (unpack_words(parts["codes"], self.bits, group) - ZERO).float()
        return codes * expand_groups(parts["scale"], codes.shape[-1])

    def uses_integer_products(self, x: Tensor, codes: Tensor) -> bool:
        return has_dp2a(x)

    def dot(self, x: Tensor, parts: Parts, group: int) -> Tensor:
        words, offset = parts["codes"], offset_for(x)
        if self.uses_integer_products(x, words):
            planes = byte_planes(words, self.bits)
            total, total_x = integer_products(x, self.codes_per_word, group, planes)
            total = total - float(ZERO) * total_x
        else:
            fields = split_fields(x, self.codes_per_word, group, copy=group < 128)
            values = field_values(words, self.bits, offset)
            total = sum_of_products(fields, values, offset, float(ZERO))
        return (expand_groups(parts["scale"], words.shape[-1]) * total).sum(-1)
