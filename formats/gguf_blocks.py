"""q8_0, q4_0, iq4_nl: GGUF's blocks of 32 weights, with the published integers and scales.

The layouts are those of ggml (ggml-common.h, ggml-quants.c); tests compare with the `gguf` package.
formats/k_quants.py has the blocks of 256. `pack` rounds by rules of our own.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from formats.base import Format, Layout, Parts
from formats.words import (
    bytes_to_words,
    expand_groups,
    nonzero,
    pack_nibbles,
    unpack_words,
    words_to_bytes,
)

RUN = 32  # weights whose codes a quad (4 words of 8 codes) holds; most scales are for as many
# The numbers of iq4's codes
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MAX_FP16 = 65504.0
# The scales that `fit_scale` tries, by what the largest number becomes
SHRINK = (1.0, 1.04, 0.97, 0.94, 0.9, 0.86)


class GgufBlocks(Format):
    """Base of the formats whose blocks a GGUF file has; G is a block's weights, and fixed.

    codes int32 [..., out, in / 8], of 4 bits, packed in runs of 32 weights; scale fp16 [..., out,
    in / 32]. Subclasses say what else they have.
    """

    bits = 4
    group = RUN
    fixed_group = True
    has_gemv = True

    def grouped_order(self, x: Tensor, group: int) -> Tensor:
        return super().grouped_order(x, RUN)

    def scale_layout(self, rows: tuple[int, ...], width: int, group: int) -> Layout:
        return {"scale": ((*rows, width // RUN), torch.float16)}


class Q4Zero(GgufBlocks):
    """(code - 8) * scale."""

    name, gguf_type, block_bytes = "q4_0", "Q4_0", 18
    kind = "int4"
    head_format = "q8_0"

    def read(self, blocks: Tensor) -> Parts:
        codes = pack_nibbles(low_then_high(blocks[..., 2:]).flatten(-2))
        return {"codes": codes, "scale": read_fp16(blocks[..., :2]).squeeze(-1)}

    def pack(self, weight: Tensor, group: int) -> Parts:
        grouped = weight.unflatten(-1, (-1, RUN))
        scale = to_fp16(signed_largest(grouped) / -8)
        codes = divide(grouped, scale).round().add(8).clamp(0, 15).flatten(-2)
        return {"codes": pack_nibbles(codes.to(torch.uint8)), "scale": scale.squeeze(-1)}

    def unpack(self, parts: Parts, group: int) -> Tensor:
        codes = (unpack_words(parts["codes"], 4, RUN) - 8).float()
        return codes * expand_groups(parts["scale"], codes.shape[-1])


class IQ4NL(Q4Zero):
    """IQ4[code] * scale: numbers that lie closer together around 0."""

    name, gguf_type = "iq4_nl", "IQ4_NL"
    kind = "iq4"

    def pack(self, weight: Tensor, group: int) -> Parts:
        grouped = weight.unflatten(-1, (-1, RUN))
        scale = to_fp16(fit_scale(grouped, nearest_iq4, IQ4[0]))
        codes = iq4_codes(divide(grouped, scale)).flatten(-2)
        return {"codes": pack_nibbles(codes.to(torch.uint8)), "scale": scale.squeeze(-1)}

    def unpack(self, parts: Parts, group: int) -> Tensor:
        values = iq4_values(unpack_words(parts["codes"], 4, RUN))
        return expand_groups(parts["scale"], values.shape[-1]) * values


class Q8Zero(GgufBlocks):
    """code * scale; codes of 8 bits, -128 to 127, int32 [..., out, in / 4]."""

    name, gguf_type, block_bytes = "q8_0", "Q8_0", 34
    kind = "q8_0"
    bits = 8
    head_format = "q8_0"

    def read(self, blocks: Tensor) -> Parts:
        codes = bytes_to_words(blocks[..., 2:].flatten(-2), RUN)
        return {"codes": codes, "scale": read_fp16(blocks[..., :2]).squeeze(-1)}

    def pack(self, weight: Tensor, group: int) -> Parts:
        grouped = weight.unflatten(-1, (-1, RUN))
        scale = to_fp16(grouped.abs().amax(-1, keepdim=True) / 127)
        codes = divide(grouped, scale).round().clamp(-127, 127).to(torch.int8).flatten(-2)
        return {"codes": bytes_to_words(codes, RUN), "scale": scale.squeeze(-1)}

    def unpack(self, parts: Parts, group: int) -> Tensor:
        codes = words_to_bytes(parts["codes"], RUN).view(torch.int8)
        return codes.float() * expand_groups(parts["scale"], codes.shape[-1])


# Reading blocks -----------------------------------------------------------------------------------


def read_fp16(pairs: Tensor) -> Tensor:
    """Bytes [..., 2 n] -> fp16 [..., n]. Copies, since blocks are seldom aligned."""
    return pairs.clone(memory_format=torch.contiguous_format).view(torch.float16)


def low_then_high(bytes: Tensor) -> Tensor:
    """Bytes [..., n] -> codes [..., 2 n]: the low nibbles of all bytes, then the high ones."""
    return torch.cat((bytes & 15, bytes >> 4), dim=-1)


# Rounding -----------------------------------------------------------------------------------------


def to_fp16(scale: Tensor) -> Tensor:
    """Round fp32 scales to finite fp16."""
    return scale.clamp(-MAX_FP16, MAX_FP16).half()


def divide(weight: Tensor, scale: Tensor) -> Tensor:
    """weight / scale, both of any shape that fits; 0 where the scale is 0 or rounds to it."""
    return torch.where(scale == 0, 0.0, weight / nonzero(scale.float()))


def signed_largest(grouped: Tensor) -> Tensor:
    """[..., n] -> [..., 1]: the number of largest magnitude, with its sign."""
    return grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))


def fit_scale(grouped: Tensor, nearest: Callable[[Tensor], Tensor], extreme: float) -> Tensor:
    """Return the scale of each group [..., n] -> fp32 [..., 1], which may be negative.

    nearest(x) rounds to the format's numbers, of which `extreme` is the largest in magnitude. The
    largest of a group becomes about that. Of several scales, each improved by least squares, the
    one with the least squared error is taken.
    """
    x = grouped.movedim(-1, 0).contiguous()  # [n, ...]: sums over neighbors in memory are slow
    largest = signed_largest(grouped).squeeze(-1)
    best = torch.full_like(largest, -torch.inf)
    scale = torch.zeros_like(largest)
    for shrink in SHRINK:
        inverse = divide(torch.full_like(largest, extreme / shrink), largest)
        numbers = nearest(x * inverse)
        product = (numbers * x).sum(0)
        tried = divide(product, numbers.square().sum(0))
        removed = tried * product  # by how much the error's sum of squares falls
        scale = torch.where(removed > best, tried, scale)
        best = torch.maximum(removed, best)
    return scale.unsqueeze(-1)


@cache
def iq4_table(device: torch.device) -> Tensor:
    """Return the code of the number nearest to x at ceil(2 x) + 256, for -128 <= x < 128: uint8.

    Numbers half way between two of IQ4 are multiples of 1/2.
    """
    numbers = torch.tensor(IQ4, dtype=torch.float32)
    half_way = (numbers[1:] + numbers[:-1]) / 2
    places = torch.arange(-256, 256) / 2
    return torch.bucketize(places, half_way).to(torch.uint8).to(device)


def iq4_codes(values: Tensor) -> Tensor:
    """Return the code of the nearest number of IQ4, uint8; of two as near the smaller."""
    places = (2 * values).ceil_().clamp_(-256, 255).add_(256).to(torch.int32)
    return iq4_table(values.device).index_select(0, places.flatten()).view(values.shape)


def iq4_values(codes: Tensor) -> Tensor:
    """Codes 0 to 15 -> fp32 numbers of IQ4."""
    return torch.tensor(IQ4, dtype=torch.float32, device=codes.device)[codes.long()]


def nearest_iq4(values: Tensor) -> Tensor:
    return iq4_values(iq4_codes(values))
