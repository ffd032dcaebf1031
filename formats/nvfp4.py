"""nvfp4: e2m1 numbers, an e4m3 scale for 16 of them, and an fp32 scale a row (NVIDIA's NVFP4)."""

import torch
from torch import Tensor

from formats.base import PLAIN, Format, Layout, Parts
from formats.fp8 import E4M3_MAX
from formats.mxfp4 import decode_e2m1, e2m1_products, encode_e2m1
from formats.words import expand_groups, nonzero, pack_words

BLOCK = 16  # numbers that share an e4m3 scale, by definition
E2M1_MAX = 6


class NVFP4(Format):
    """codes e2m1; scale uint8 [..., out, in / 16], bits of e4m3; scale_step fp32 [..., out, 1].

    A group has two blocks. A word holds four codes of the first one, then four of the second.
    """

    name = "nvfp4"
    bits = 4
    group = 2 * BLOCK
    kind = "nvfp4"
    gguf_type, block_bytes = "NVFP4", 36
    fixed_group = True
    has_gemv = True
    attention_format = PLAIN

    def scale_layout(self, rows: tuple[int, ...], width: int, group: int) -> Layout:
        return {
            "scale": ((*rows, width // BLOCK), torch.uint8),
            "scale_step": ((*rows, 1), torch.float32),
        }

    def read(self, blocks: Tensor) -> Parts:
        """Whole blocks of a GGUF file -> parts, with scale_step 1.

        A block of 64 weights has 36 bytes: four scales, then for each the codes of 16, in the lower
        nibbles the first 8 (ggml-common.h). ggml takes a scale that is no number for 0.
        """
        scale, nibbles = blocks.split((4, 32), dim=-1)
        scale = torch.where(scale == 0x7F, 0, scale).flatten(-2)
        nibbles = nibbles.unflatten(-1, (4, 8))
        codes = torch.cat((nibbles & 15, nibbles >> 4), dim=-1).flatten(-3)
        return {
            "codes": pack_words(codes, self.bits, self.group),
            "scale": scale,
            "scale_step": scale.new_ones(*scale.shape[:-1], 1, dtype=torch.float32),
        }

    def pack(self, weight: Tensor, group: int) -> Parts:
        """fp32 [..., out, in] -> parts.

        A row's fp32 scale lets its largest block have the scale 448. A block's scale lets its
        largest magnitude be 6. Numbers are rounded to the nearest, ties to the even code.
        """
        blocks = weight.unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1)
        step = nonzero(largest.amax(-1, keepdim=True) / (E2M1_MAX * E4M3_MAX))
        scale = (largest / (E2M1_MAX * step)).to(torch.float8_e4m3fn)
        unit = nonzero(scale.float() * step)  # all of a block with the scale 0 become 0
        codes = encode_e2m1((blocks / unit.unsqueeze(-1)).flatten(-2))
        return {
            "codes": pack_words(codes, self.bits, group),
            "scale": scale.view(torch.uint8),
            "scale_step": step,
        }

    def unpack(self, parts: Parts, group: int) -> Tensor:
        values = decode_e2m1(parts["codes"], group)
        scale = e4m3_to_float(parts["scale"]) * parts["scale_step"]
        return values * expand_groups(scale, values.shape[-1])

    def dot(self, x: Tensor, parts: Parts, group: int) -> Tensor:
        words = parts["codes"]
        products = e2m1_products(x, words, group)
        scales = e4m3_to_float(parts["scale"]).unflatten(-1, (-1, 2)).unbind(-1)
        halves = (sum(products[:4]), sum(products[4:]))
        total = sum(
            expand_groups(scale, words.shape[-1]) * half
            for scale, half in zip(scales, halves, strict=True)
        )
        return total.sum(-1) * (parts["scale_step"].squeeze(-1) * 2.0**14)


def e4m3_to_float(bits: Tensor) -> Tensor:
    """Bits of e4m3 without their sign, uint8 -> fp32. No device needs to know fp8."""
    halves = (bits.to(torch.int16) & 0x7F) << 7  # an fp16 number, 2 ** -8 as large
    return halves.view(torch.float16).float() * 2.0**8
