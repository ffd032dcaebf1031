"""int8: 8-bit integers and one scale a row."""

import torch
from torch import Tensor

from formats.base import Format, Parts
from formats.words import (
    both_halves,
    bytes_to_words,
    halves_as_fp16,
    has_dp2a,
    is_large,
    nonzero,
    round_to_int16,
    split_fields,
    words_to_bytes,
)
from ops.inductor import dot_bytes


class Int8(Format):
    """codes -127 to 127; scale bf16 [..., out, 1]: the row's largest magnitude over 127."""

    name = "int8"
    bits = 8
    group = 16
    kind = "int8"
    per_row = True
    head_format = "int8"

    def pack(self, weight: Tensor, group: int) -> Parts:
        scale = nonzero((weight.abs().amax(-1, keepdim=True) / 127).bfloat16())
        codes = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
        return {"codes": bytes_to_words(codes, group), "scale": scale}

    def unpack(self, parts: Parts, group: int) -> Tensor:
        codes = words_to_bytes(parts["codes"], group).view(torch.int8)
        return codes.float() * parts["scale"].float()

    def uses_integer_products(self, x: Tensor, codes: Tensor) -> bool:
        return is_large(codes) and has_dp2a(x)

    def dot(self, x: Tensor, parts: Parts, group: int) -> Tensor:
        words = parts["codes"]
        if self.uses_integer_products(x, words):
            low, high, unit, _ = round_to_int16(x, 4, group)
            total = dot_bytes(low, high, words).float() * unit
            return total.sum(-1) * parts["scale"].squeeze(-1).float()
        values = [None] * 4
        for k in (0, 1):
            # Two's complement with its top bit flipped is code + 128, in the mantissa of 1024.
            # Subtract both here: 8 bits leave instructions to spare, and the sum of x would take
            # another kernel.
            codes = ((words >> 8 * k) & both_halves(0xFF)) ^ both_halves(0x6480)
            values[k], values[k + 2] = halves_as_fp16(codes, 1024.0 + 128.0)
        fields = split_bytes(x, words, group)
        products = (field * value for field, value in zip(fields, values, strict=True))
        return sum(products).sum(-1) * parts["scale"].squeeze(-1).float()


def split_bytes(x: Tensor, words: Tensor, group: int) -> list[Tensor]:
    """`split_fields` for 8-bit codes, in place.

    Many rows read x faster in fp32. A small dense matrix is read faster than a kernel makes x fp32.
    """
    small = words.dim() == 2 and not is_large(words)
    return split_fields(x if small else x.float(), 4, group, copy=False)
