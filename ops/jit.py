"""Triton, if installed, and the helpers that several kernels share."""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from functools import partial

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA, where no kernel is called
    triton = tl = None


def jit(function=None, **options):
    """Apply `triton.jit` with these options if Triton is installed."""
    if function is None:
        return partial(jit, **options)
    return triton.jit(function, **options) if triton else function


def supports_pdl(x: Tensor) -> bool:
    """Whether the GPU of x has programmatic dependent launch (PDL): Hopper and later.

    With PDL a kernel starts while the previous one is still running, and waits for it explicitly.
    """
    return torch.cuda.get_device_properties(x.device).major >= 9


@jit
def e8m0_to_float(exponents):
    """Convert e8m0 scales to fp32; the smallest, 2 ** -127, becomes 0."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@jit
def add_both(a, b, c, d):
    """Add two numbers each, for `tl.reduce` of two tensors at once."""
    return a + c, b + d
