"""q4_k, q5_k, q6_k, iq4_xs: GGUF's blocks of 256 weights, with the published integers and scales.

A block has one or two fp16 numbers, `step`. The scales of its groups are small integers, by which
`step` is multiplied. Scales of 6 bits take a byte each here: 4.63, 5.63 and 4.31 bits a weight
where the file has 4.5, 5.5 and 4.25 (q4_k, q5_k, iq4_xs).

Rows that 256 does not divide are packed in blocks of 32 instead (`narrow`).

The layouts are those of ggml (ggml-common.h, ggml-quants.c). `pack` rounds by rules of our own.
"""

from functools import reduce

import torch
from torch import Tensor

from formats.base import Layout, Parts
from formats.gguf_blocks import (
    IQ4,
    RUN,
    GgufBlocks,
    divide,
    fit_scale,
    iq4_codes,
    iq4_values,
    low_then_high,
    nearest_iq4,
    read_fp16,
    signed_largest,
    to_fp16,
)
from formats.words import expand_groups, mix_halves, pack_nibbles, part_halves, unpack_words

BLOCK = 256
TOP = 63  # the largest scale of 6 bits


class KQuant(GgufBlocks):
    """codes: the lower four bits; high int32 [..., out, in * high_bits / 32]: those above, if any.

    A word of `high` belongs to 4 / high_bits words of `codes`. With p = 0 for the lower and 1 for
    the upper nibble of byte b of the m-th of these words, the bits above it are `high_bits` from
    bit 8 b + high_bits * (2 m + p) on. So they lie in the same byte as the nibble.
    """

    group = BLOCK
    high_bits = 0
    head_format = "q6_k"
    codes_per_word = 8  # in `codes`

    def code_layout(self, rows: tuple[int, ...], width: int) -> Layout:
        layout: Layout = {"codes": ((*rows, width // 8), torch.int32)}
        if self.high_bits:
            layout["high"] = (*rows, width * self.high_bits // 32), torch.int32
        return layout

    def pack_codes(self, codes: Tensor) -> Parts:
        """Codes [..., n] in the order of fields -> codes, high."""
        codes = codes.to(torch.uint8)
        parts = {"codes": pack_nibbles(codes & 15 if self.high_bits else codes)}
        if self.high_bits:
            parts["high"] = pack_above(codes >> 4, self.high_bits)
        return parts

    def unpack_codes(self, parts: Parts) -> Tensor:
        """Invert `pack_codes` -> int32 [..., n]."""
        codes = unpack_words(parts["codes"], 4, RUN)
        if not self.high_bits:
            return codes
        words = 4 // self.high_bits
        high = unpack_words(parts["high"], self.high_bits, 32 // self.high_bits)
        fields = high.unflatten(-1, (-1, 4 // words, 4, words, 2))
        fields = fields.permute(*range(codes.dim()), -3, -1, -4, -2).flatten(-5)
        return codes | fields << 4


class Q4K(KQuant):
    """step[0] * scale * code - step[1] * min, for each 32 weights.

    scale uint8 [..., out, in / 16]: scale, min of a group, one after the other, up to 63. step fp16
    [..., out, in / 128]: both of a block.
    """

    name, gguf_type, block_bytes = "q4_k", "Q4_K", 144
    kind, narrow = "q4_k", "iq4_nl"
    attention_format = "int8"  # attention needs more bits than experts
    largest_code = 15

    def scale_layout(self, rows: tuple[int, ...], width: int, group: int) -> Layout:
        return {
            "scale": ((*rows, width // 16), torch.uint8),
            "step": ((*rows, width // 128), torch.float16),
        }

    def read(self, blocks: Tensor) -> Parts:
        nibbles = blocks[..., 16:].unflatten(-1, (4, 32))
        codes = low_then_high(nibbles).flatten(-3)
        return self.pack_codes(codes) | self.read_scales(blocks)

    def read_scales(self, blocks: Tensor) -> Parts:
        first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
        scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
        least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
        both = torch.stack((scale, least), dim=-1).flatten(-3)
        return {"scale": both, "step": read_fp16(blocks[..., :4]).flatten(-2)}

    def pack(self, weight: Tensor, group: int) -> Parts:
        grouped = weight.unflatten(-1, (-1, BLOCK // RUN, RUN))
        wanted = torch.cat(fit_affine(grouped, self.largest_code), dim=-1)  # [..., blocks, 8, 2]
        step = to_fp16(wanted.amax(-2, keepdim=True) / TOP)
        scale = divide(wanted, step).round().clamp(0, TOP)
        factor, least = (scale * step.float()).split(1, dim=-1)
        codes = divide(grouped + least, factor).round().clamp(0, self.largest_code).flatten(-3)
        scales = {"scale": scale.to(torch.uint8).flatten(-3), "step": step.flatten(-3)}
        return self.pack_codes(codes) | scales

    def unpack(self, parts: Parts, group: int) -> Tensor:
        codes = self.unpack_codes(parts)
        scale = parts["scale"].unflatten(-1, (-1, BLOCK // RUN, 2)).float()
        both = scale * parts["step"].unflatten(-1, (-1, 1, 2)).float()
        factor, least = (part.flatten(-2) for part in both.unbind(-1))
        width = codes.shape[-1]
        return expand_groups(factor, width) * codes - expand_groups(least, width)


class Q5K(Q4K):
    """q4_k with codes of 5 bits."""

    name, gguf_type, block_bytes = "q5_k", "Q5_K", 176
    kind, narrow = "q5_k", "q8_0"
    attention_format = None
    bits, high_bits, largest_code = 5, 1, 31

    def read(self, blocks: Tensor) -> Parts:
        codes = low_then_high(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32))
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
        fifth = blocks[..., 16:48].unsqueeze(-2) >> shifts & 1
        codes = codes.flatten(-3, -2) | fifth << 4
        return self.pack_codes(codes.flatten(-3)) | self.read_scales(blocks)


class Q6K(KQuant):
    """step * scale * (code - 32), for each 16 weights.

    scale int8 [..., out, in / 16], step fp16 [..., out, in / 256]. Lower nibbles of the words have
    the first 16 weights of a run, upper ones the others.
    """

    name, gguf_type, block_bytes = "q6_k", "Q6_K", 210
    kind, narrow = "q6_k", "q8_0"
    bits, high_bits = 6, 2

    def scale_layout(self, rows: tuple[int, ...], width: int, group: int) -> Layout:
        return {
            "scale": ((*rows, width // 16), torch.int8),
            "step": ((*rows, width // BLOCK), torch.float16),
        }

    def read(self, blocks: Tensor) -> Parts:
        low, high, scale, step = blocks.split((128, 64, 16, 2), dim=-1)
        low = low_then_high(low.unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
        high = high.unflatten(-1, (2, 1, 32)) >> shifts & 3
        # As fields: codes of lower nibbles are the first of a run.
        codes = self.pack_codes(mix_halves((low | high << 4).flatten(-4)))
        scale = scale.contiguous().view(torch.int8).flatten(-2)
        return codes | {"scale": scale, "step": read_fp16(step).squeeze(-1)}

    def pack(self, weight: Tensor, group: int) -> Parts:
        grouped = weight.unflatten(-1, (-1, BLOCK // 16, 16))
        wanted = fit_scale(grouped, lambda x: x.round().clamp(-32, 31), -32)
        step = to_fp16(signed_largest(wanted.squeeze(-1)) / -128)
        scale = divide(wanted.squeeze(-1), step).round().clamp(-128, 127)
        factor = (scale * step.float()).unsqueeze(-1)
        codes = divide(grouped, factor).round().clamp(-32, 31).add(32).flatten(-3)
        scales = {"scale": scale.to(torch.int8).flatten(-2), "step": step.squeeze(-1)}
        return self.pack_codes(mix_halves(codes)) | scales

    def grouped_order(self, x: Tensor, group: int) -> Tensor:
        return super().grouped_order(mix_halves(x), group)

    def unpack(self, parts: Parts, group: int) -> Tensor:
        codes = part_halves(self.unpack_codes(parts)) - 32
        return expand_groups(group_factors(parts), codes.shape[-1]) * codes


class IQ4XS(KQuant):
    """step * scale * IQ4[code], for each 32 weights.

    scale int8 [..., out, in / 32], -32 to 31; step fp16 [..., out, in / 256].
    """

    name, gguf_type, block_bytes = "iq4_xs", "IQ4_XS", 136
    kind, narrow = "iq4", "iq4_nl"
    attention_format = "int8"

    def scale_layout(self, rows: tuple[int, ...], width: int, group: int) -> Layout:
        return {
            "scale": ((*rows, width // RUN), torch.int8),
            "step": ((*rows, width // BLOCK), torch.float16),
        }

    def read(self, blocks: Tensor) -> Parts:
        step, high, low, nibbles = blocks.split((2, 2, 4, 128), dim=-1)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
        high = (high.unsqueeze(-1) >> shifts & 3).flatten(-2)
        low = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2)
        scale = (low | high << 4).to(torch.int8) - 32
        codes = low_then_high(nibbles.unflatten(-1, (8, 16))).flatten(-3)
        scales = {"scale": scale.flatten(-2), "step": read_fp16(step).squeeze(-1)}
        return self.pack_codes(codes) | scales

    def pack(self, weight: Tensor, group: int) -> Parts:
        grouped = weight.unflatten(-1, (-1, BLOCK // RUN, RUN))
        wanted = fit_scale(grouped, nearest_iq4, IQ4[0])
        step = to_fp16(signed_largest(wanted.squeeze(-1)) / -32)
        scale = divide(wanted.squeeze(-1), step).round().clamp(-32, 31)
        factor = (scale * step.float()).unsqueeze(-1)
        codes = iq4_codes(divide(grouped, factor)).flatten(-3)
        scales = {"scale": scale.to(torch.int8).flatten(-2), "step": step.squeeze(-1)}
        return self.pack_codes(codes) | scales

    def unpack(self, parts: Parts, group: int) -> Tensor:
        values = iq4_values(self.unpack_codes(parts))
        return expand_groups(group_factors(parts), values.shape[-1]) * values


def pack_above(bits: Tensor, count: int) -> Tensor:
    """The `count` bits above each code, uint8 [..., n] -> `high` (`KQuant`)."""
    sharing = 4 // count  # words of `codes` that have a word of `high`
    # Four codes, those of the words of a run, are one integer.
    of_words = bits.contiguous().view(torch.int32).unflatten(-1, (-1, 4, 2))
    nibbles = of_words[..., 0] | of_words[..., 1] << count
    moved = [nibbles >> (8 - 2 * count) * m for m in range(sharing)]  # next to the word before
    bytes = reduce(torch.bitwise_or, moved).view(torch.uint8).unflatten(-1, (4, 4))[..., ::sharing]
    return bytes.transpose(-1, -2).contiguous().flatten(-3).view(torch.int32)


def group_factors(parts: Parts) -> Tensor:
    """Multiply the scales of groups [..., n] by the step of their block -> fp32 [..., n]."""
    scale = parts["scale"].float()
    return expand_groups(parts["step"], scale.shape[-1]) * scale


def fit_affine(grouped: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return scale and min of each group [..., n], so that it is about code * scale - min.

    Codes are 0 to `top`, and both results, fp32 [..., 1], are not negative. Of several ranges of
    codes, each improved by least squares, the one with the least squared error is taken.
    """
    x = grouped.movedim(-1, 0).contiguous()  # [n, ...]: sums over neighbors in memory are slow
    n, low = len(x), x.amin(0).clamp(max=0)
    span = x.amax(0).clamp(min=0) - low
    total, square = x.sum(0), x.square().sum(0)
    best = torch.full_like(low, torch.inf)
    scale, least = torch.zeros_like(low), torch.zeros_like(low)
    for shrink in (1.0, 1.05, 0.95, 0.9, 0.85):
        start = (low + span * (1 - shrink) / 2).clamp(max=0)  # shrinks on both sides alike
        inverse = divide(torch.full_like(span, top / shrink), span)
        codes = (x - start).mul_(inverse).round_().clamp_(0, top)
        of_codes, product = codes.sum(0), (codes * x).sum(0)
        squares = codes.square_().sum(0)
        step = divide(n * product - of_codes * total, n * squares - of_codes.square())
        offset = (of_codes * step - total) / n
        # A min below 0 cannot be stored: fit a line through 0 instead.
        step = torch.where(offset < 0, divide(product, squares), step).clamp(min=0)
        offset = offset.clamp(min=0)
        # The sum of (code * step - offset - x) ** 2
        error = square + step * (step * squares - 2 * product - 2 * offset * of_codes)
        error += offset * (n * offset + 2 * total)
        better = error < best
        scale, least = torch.where(better, step, scale), torch.where(better, offset, least)
        best = torch.minimum(error, best)
    return scale.unsqueeze(-1), least.unsqueeze(-1)
