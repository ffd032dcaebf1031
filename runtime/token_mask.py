"""Masks of the tokens that a constraint allows next. Pure torch, for the device's step.

A mask is packed: int32 [W], W = ceil(V / 32); bit i of word w allows the token 32 * w + i.
"""

import torch
from torch import Tensor


def mask_words(vocab_size: int) -> int:
    """Return W, the int32 words of a mask of `vocab_size` tokens."""
    return -(-vocab_size // 32)


def mask_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """logits fp32 [B, V], allowed int32 [B, W] -> logits, -inf where a token's bit is 0."""
    token = torch.arange(logits.shape[-1], device=logits.device)
    bit = (allowed[:, token >> 5] >> (token & 31).int()) & 1
    return torch.where(bit != 0, logits, float("-inf"))
