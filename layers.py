"""Layers that all parts of a model share, and two words to the compiler."""

from collections.abc import Callable
from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from args import ModelArgs


class Linear(nn.Module):
    """x [..., in] -> [..., out] with weight [out, in]. A number format supplies a module with the same signature."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)  # a product and a bias in one would be the library's, also where it is compiled
        return y if self.bias is None else y + self.bias


def operator(name: str) -> Callable:
    """`torch.library.custom_op` where code is compiled or shapes alone are computed; elsewhere the function itself.

    Calling an operator of ours loads the compiler, which takes longer than an eager answer of a small model.
    """

    def decorate(function: Callable) -> Callable:
        compiled = torch.library.custom_op(name, function, mutates_args=())

        @wraps(function)
        def call(x: Tensor, *rest):
            return (compiled if torch.compiler.is_compiling() or x.is_meta else function)(x, *rest)

        call.register_fake = compiled.register_fake
        return call

    return decorate


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019, equation 4)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def norm(args: ModelArgs) -> nn.Module:
    """Of [..., D]."""
    return (nn.LayerNorm if args.layer_norm else RMSNorm)(args.dim, args.norm_eps)


def realise(x: Tensor) -> Tensor:
    """x itself, but kept in memory by the compiler, which would rather compute it again in every row that reads it.

    Inductor has no word for this; a view with given strides can only be of something that is there. x must be a whole
    tensor, or a view that begins where it begins: a slice from the middle would be read from the start.
    """
    return x.as_strided(x.shape, x.stride())


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a number that is one in most models, which then costs nothing."""
    return x if factor == 1 else x * factor
