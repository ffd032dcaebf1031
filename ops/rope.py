"""Rotary position embedding (RoPE). Shapes are those of model.py."""

import torch
from torch import Tensor


def rope_frequencies(rotary_dim: int, theta: float, device: torch.device) -> Tensor:
    """Return the angle per position of each pair, fp32 [rotary_dim / 2]."""
    return theta ** -(torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim)


def rope_table(frequencies: Tensor, length: int, scale: float = 1.0, unrotated: int = 0) -> Tensor:
    """Return cosines, then signed sines of all positions, fp32 [length, 2 C].

    scale: factor of cosines and sines. unrotated: numbers of a head that keep their value: their
    cosine is 1 and their sine 0.
    """
    angles = torch.outer(torch.arange(length, device=frequencies.device).float(), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    zeros = cos.new_zeros(length, unrotated)
    return torch.cat((cos, cos, zeros + 1, -sin, sin, zeros), dim=-1)


def rotate(x: Tensor, rope: Tensor, rotary_dim: int) -> Tensor:
    """Rotate x [B, Q, heads, C] in fp32, first half against second (Su et al. 2021, equation 34).

    rope: rows of `rope_table`, broadcast. Only the first rotary_dim numbers of a head are rotated.
    A roll instead of joining two halves: Inductor materializes a `cat`, but fuses this.
    """
    cos, sin = rope.chunk(2, dim=-1)
    x = x.float()
    swapped = x.unflatten(-1, (-1, rotary_dim)).roll(rotary_dim // 2, dims=-1).flatten(-2)
    return x * cos + swapped * sin
