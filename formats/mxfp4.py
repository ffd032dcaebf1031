"""mxfp4: e2m1 numbers and a power of two a group (OCP Microscaling Formats v1.0)."""

import math

import torch
from torch import Tensor

from formats.base import PLAIN, Format, Layout, Parts
from formats.words import (
    both_halves,
    expand_groups,
    halves_as_fp16,
    nibbles_to_words,
    pack_nibbles,
    pack_words,
    split_fields,
    unpack_words,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # numbers of codes 0 to 7; codes 8 to 15: negative
GROUP = 32  # by definition


class MXFP4(Format):
    """codes e2m1; scale e8m0, uint8 [..., out, in / G]: a power of two's exponent + 127."""

    name = "mxfp4"
    bits = 4
    group = GROUP
    kind = "mxfp4"
    gguf_type, block_bytes = "MXFP4", 17
    has_gemv = True
    attention_format = PLAIN
    min_group = GROUP

    def scale_layout(self, rows: tuple[int, ...], width: int, group: int) -> Layout:
        return {"scale": ((*rows, width // group), torch.uint8)}

    def read(self, blocks: Tensor) -> Parts:
        """Whole blocks of a GGUF file -> parts.

        A block of 32 weights has 17 bytes: the exponent, then codes, in the lower nibbles the first
        16 (ggml-common.h).
        """
        scale, nibbles = blocks.split((1, 16), dim=-1)
        codes = torch.cat((nibbles & 15, nibbles >> 4), dim=-1).flatten(-2)
        return {"codes": pack_nibbles(codes), "scale": scale.squeeze(-1).clone()}

    def pack(self, weight: Tensor, group: int) -> Parts:
        """fp32 [..., out, in] -> parts, by section 6.3.

        The scale brings a group's largest magnitude to [4, 8). Numbers are rounded to the nearest,
        ties to the even code; above 6 they become 6.
        """
        grouped = weight.unflatten(-1, (-1, group))
        _, exponent = grouped.abs().amax(-1, keepdim=True).frexp()  # its mantissa is in [0.5, 1)
        scale = (exponent - 3 + 127).clamp(0, 254).to(torch.uint8)
        codes = encode_e2m1((grouped / e8m0_to_float(scale)).flatten(-2))
        return {"codes": pack_words(codes, self.bits, group), "scale": scale.squeeze(-1)}

    def unpack(self, parts: Parts, group: int) -> Tensor:
        values = decode_e2m1(parts["codes"], group)
        return values * expand_groups(e8m0_to_float(parts["scale"]), values.shape[-1])

    def dot(self, x: Tensor, parts: Parts, group: int) -> Tensor:
        words = parts["codes"]
        total = sum(e2m1_products(x, words, group)) * 2.0**14
        return (expand_groups(e8m0_to_float(parts["scale"]), words.shape[-1]) * total).sum(-1)


def encode_e2m1(scaled: Tensor) -> Tensor:
    """Round fp32 numbers to the nearest of e2m1, ties to the even code, above 6 to 6 -> codes."""
    magnitude = scaled.abs()
    # Numbers are 0.5 apart below 2, then 1, then 2. Round in these steps; add the first code.
    steps = ((2.0, 2.0, 0.0), (4.0, 1.0, 2.0), (math.inf, 0.5, 4.0))
    codes = torch.zeros_like(scaled)
    for end, per_unit, first in reversed(steps):
        codes = torch.where(magnitude < end, (magnitude * per_unit).round() + first, codes)
    return codes.clamp(max=7).to(torch.int32) | scaled.signbit().to(torch.int32) << 3


def decode_e2m1(words: Tensor, group: int) -> Tensor:
    """Packed codes int32 [..., W] -> their numbers, fp32 [..., 8 W]."""
    codes = unpack_words(words, MXFP4.bits, group)
    return torch.tensor(E2M1 + tuple(-value for value in E2M1), device=codes.device)[codes]


def e2m1_products(x: Tensor, words: Tensor, group: int) -> list[Tensor]:
    """x [..., in], codes [..., out, W] -> 2 ** -14 * each field's products, fp32 [..., out, W].

    e2m1 is s ee m: shifted to an fp16 number's sign, last two exponent bits and first mantissa
    bit, it is 2 ** -14 times the number, 0.5 included.
    """
    values = [None] * 8
    for k in range(4):
        magnitude = words << 9 - 4 * k if k < 3 else words >> 3
        bits = words << 12 - 4 * k & both_halves(0x8000) | magnitude & both_halves(0x0E00)
        values[k], values[k + 4] = halves_as_fp16(bits)
    fields = split_fields(x, 8, group, copy=group < 128)
    return [field * value for field, value in zip(fields, values, strict=True)]


def e8m0_to_float(exponents: Tensor) -> Tensor:
    """e8m0, uint8 -> fp32 2 ** (exponent - 127). The smallest is a subnormal number of fp32."""
    bits = exponents.to(torch.int32) << 23
    return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)


def are_finite_scales(scales: Tensor) -> bool:
    """Whether every e2m1 number is finite in fp32 with each of these e8m0 scales."""
    return bool(scales.max() <= 252)


def published_codes(blocks: Tensor) -> Tensor:
    """Published uint8 [..., in / 32, 16], of two codes the first in the low bits -> `codes`."""
    return nibbles_to_words(blocks.flatten(-2), GROUP)
