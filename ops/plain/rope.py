"""Rotary position embedding (RoPE).

Letters: B sequences, Q tokens of each, C head dim, of which the first rotary_dim numbers rotate.
"""

import torch
from torch import Tensor


def rope_frequencies(rotary_dim: int, theta: float, device: torch.device) -> Tensor:
    """Return the angle, in radians per position, of each pair of numbers: fp32 [rotary_dim / 2].

    The CPU computes them: loading CUDA's kernels for these operations takes 0.1 s.
    """
    numbers = torch.arange(0, rotary_dim, 2, device="cpu").float()
    return (theta ** -(numbers / rotary_dim)).to(device)


def rope_table(frequencies: Tensor, length: int, scale: float = 1.0, unrotated: int = 0) -> Tensor:
    """Return the cosines, then the signed sines, of positions 0 .. length - 1: fp32 [length, 2 C].

    frequencies: from `rope_frequencies`. scale: factor of cosines and sines. unrotated: how many
    numbers of a head keep their value: their cosine is 1 and their sine 0.
    """
    angles = torch.outer(torch.arange(length, device=frequencies.device).float(), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    zeros = cos.new_zeros(length, unrotated)
    return torch.cat((cos, cos, zeros + 1, -sin, sin, zeros), dim=-1)


def rotate(x: Tensor, rope: Tensor, rotary_dim: int) -> Tensor:
    """Rotate x [B, Q, heads, C] by RoPE -> fp32 (Su et al. 2021, equation 34).

    rope: rows of `rope_table`, broadcast. Only the first rotary_dim numbers of a head rotate, none
    with 0: number n of their first half pairs with number n of the second. A roll swaps the halves,
    because Inductor fuses it; it would materialize a `cat`.
    """
    return x.float() if rotary_dim == 0 else rotate_by(x, *rope.chunk(2, dim=-1), rotary_dim)


def rotate_by(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    """`rotate` by cosines and signed sines, which broadcast."""
    x = x.float()
    swapped = x.unflatten(-1, (-1, rotary_dim)).roll(rotary_dim // 2, dims=-1).flatten(-2)
    return x * cos + swapped * sin
