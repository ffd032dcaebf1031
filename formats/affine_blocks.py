"""q4_1, q5_1: GGUF's blocks of 32 weights with a scale and a min, with the published numbers.

llama.cpp writes Q5_1, and Q5_0 that q5_1 holds too, where 256 does not divide the rows: in Gemma 4,
GLM-4.5-Air, DeepSeek-V2-Lite and gpt-oss. Codes are as in formats/k_quants.py, and so are the
kernels: those of q4_k and q5_k.

The layouts are those of ggml (ggml-common.h); tests compare with the `gguf` package.
"""

import torch
from torch import Tensor

from formats.base import Layout, Parts
from formats.gguf_blocks import RUN, divide, low_then_high, read_fp16, to_fp16
from formats.k_quants import KQuant, fit_affine
from formats.words import expand_groups


class Q4One(KQuant):
    """scale * code - min, for each 32 weights.

    scale fp16 [..., out, in / 16]: scale, min of a group, one after the other. Blocks of a file
    have -min.
    """

    name, gguf_type, block_bytes = "q4_1", "Q4_1", 20
    kind = "q4_k"
    group, largest_code = RUN, 15
    head_format = "q8_0"

    def scale_layout(self, rows: tuple[int, ...], width: int, group: int) -> Layout:
        return {"scale": ((*rows, width // 16), torch.float16)}

    def read(self, blocks: Tensor) -> Parts:
        codes = low_then_high(blocks[..., -16:])
        if self.high_bits:
            shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
            codes = codes | (blocks[..., 4:8].unsqueeze(-1) >> shifts & 1).flatten(-2) << 4
        both = read_fp16(blocks[..., :4]) * torch.tensor([1, -1], device=blocks.device).half()
        return self.pack_codes(codes.flatten(-2)) | {"scale": both.flatten(-2)}

    def pack(self, weight: Tensor, group: int) -> Parts:
        grouped = weight.unflatten(-1, (-1, RUN))
        both = to_fp16(torch.cat(fit_affine(grouped, self.largest_code), dim=-1))
        scale, least = both.float().split(1, dim=-1)
        codes = divide(grouped + least, scale).round().clamp(0, self.largest_code).flatten(-2)
        return self.pack_codes(codes) | {"scale": both.flatten(-2)}

    def unpack(self, parts: Parts, group: int) -> Tensor:
        codes = self.unpack_codes(parts)
        scale, least = parts["scale"].unflatten(-1, (-1, 2)).unbind(-1)
        width = codes.shape[-1]
        return expand_groups(scale, width) * codes - expand_groups(least, width)


class Q5One(Q4One):
    """q4_1 with codes of 5 bits."""

    name, gguf_type, block_bytes = "q5_1", "Q5_1", 24
    kind = "q5_k"
    bits, high_bits, largest_code = 5, 1, 31
