"""Q5_0, Q5_1, Q4_1: blocks of 32 that llama.cpp writes where rows are no multiple of 256.

So they are in most files of models with such rows: Gemma 4, GLM-4.5-Air, DeepSeek-V2-Lite, gpt-oss.
Layouts of ggml-common.h: fp16 step; in Q5_1 and Q4_1 fp16 least; in Q5 the fifth bits, uint32; then
codes, in the lower nibbles the first 16.
"""

import torch
from torch import Tensor

# Bytes of a block, and whether it has a least
TYPES = {"Q4_1": (20, True), "Q5_0": (22, False), "Q5_1": (24, True)}


def split_blocks(blocks: Tensor, type: str) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [..., bytes of a row] -> step, least fp32 [..., n, 1] and codes uint8 [..., n, 32]."""
    nbytes, has_least = TYPES[type]
    blocks = blocks.unflatten(-1, (-1, nbytes))
    numbers = blocks[..., : 4 if has_least else 2].contiguous().view(torch.float16).float()
    nibbles = blocks[..., -16:]
    codes = torch.cat((nibbles & 15, nibbles >> 4), dim=-1)
    if type != "Q4_1":
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
        fifth = (blocks[..., -20:-16].unsqueeze(-1) >> shifts & 1).flatten(-2)
        codes = codes | fifth << 4
    step = numbers[..., :1]
    return step, numbers[..., 1:] if has_least else -16 * step, codes


def dequantize(blocks: Tensor, type: str) -> Tensor:
    """Return the numbers of blocks, fp32 [..., in]."""
    step, least, codes = split_blocks(blocks, type)
    return (step * codes + least).flatten(-2)


def as_q8_0(blocks: Tensor) -> Tensor:
    """Return Q5_0 blocks as Q8_0 blocks of the same numbers: code - 16 fits in 8 bits."""
    _, _, codes = split_blocks(blocks, "Q5_0")
    step = blocks.unflatten(-1, (-1, TYPES["Q5_0"][0]))[..., :2]
    codes = (codes.to(torch.int8) - 16).view(torch.uint8)
    return torch.cat((step, codes), dim=-1).flatten(-2)
