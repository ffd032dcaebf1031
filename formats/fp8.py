"""fp8: e4m3 numbers and one scale a row. No device needs to know fp8."""

import torch
from torch import Tensor

from formats.base import Format, Parts
from formats.int8 import split_bytes
from formats.words import (
    both_halves,
    bytes_to_words,
    halves_as_fp16,
    interleave,
    nonzero,
    words_to_bytes,
)

E4M3_MAX = 448


class FP8(Format):
    """codes e4m3; scale bf16 [..., out, 1]: the row's largest magnitude over 448."""

    name = "fp8"
    bits = 8
    group = 16
    kind = "fp8"
    per_row = True
    head_format = "int8"

    def pack(self, weight: Tensor, group: int) -> Parts:
        scale = nonzero((weight.abs().amax(-1, keepdim=True) / E4M3_MAX).bfloat16())
        codes = (weight / scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return {"codes": bytes_to_words(codes, group), "scale": scale}

    def unpack(self, parts: Parts, group: int) -> Tensor:
        if torch.compiler.is_compiling():  # Triton has no e4m3 on GPUs before 8.9
            fields = torch.stack(e4m3_fields(parts["codes"]), dim=-1).flatten(-2)
            return interleave(fields, group // 4, group) * (parts["scale"].float() * 2.0**8)
        codes = words_to_bytes(parts["codes"], group).view(torch.float8_e4m3fn)
        return codes.float() * parts["scale"].float()

    def dot(self, x: Tensor, parts: Parts, group: int) -> Tensor:
        total = e4m3_products(x, parts["codes"], group).sum(-1)
        return total * (parts["scale"].squeeze(-1).float() * 2.0**8)


def e4m3_fields(words: Tensor) -> list[Tensor]:
    """e4m3 codes [..., W] -> fp32 [..., W] for each field: 2 ** -8 times the numbers.

    e4m3 is s eeee mmm, fp16 is s eeeee mmmmmmmmmm: the same bits, shifted into place, are 2 ** -8
    times the number, subnormal numbers included.
    """
    values = [words] * 4
    for k, byte in ((0, words << 8), (1, words)):
        bits = (byte & both_halves(0x8000)) | ((byte >> 1) & both_halves(0x3F80))
        values[k], values[k + 2] = halves_as_fp16(bits)
    return values


def e4m3_products(x: Tensor, words: Tensor, group: int) -> Tensor:
    """x [..., in], e4m3 codes [..., out, W] -> fp32 [..., out, W]: 2 ** -8 * products, by word."""
    fields = split_bytes(x, words, group)
    return sum(field * value for field, value in zip(fields, e4m3_fields(words), strict=True))
