"""Layers that all parts of a model share, and three words to the compiler."""

from collections.abc import Callable
from functools import partial, wraps

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


def weighted_sum(y: Tensor, weights: Tensor) -> Tensor:
    """y [T, A, D], weights fp32 [T, A] -> fp32 [T, D].

    Written out over A, it becomes part of the kernel that reads it. (One sum over A and the product's own axis compiles
    to one kernel as well, but to fewer and longer rows: 61 instead of 56 us a layer for Mixtral in bf16 on an H200.)
    """
    return sum((y * weights.unsqueeze(-1)).unbind(1))


@torch.library.custom_op("moe_fast::dot_bytes", mutates_args=())
def dot_bytes(low: Tensor, high: Tensor, words: Tensor) -> Tensor:
    """The four signed bytes of each word times four whole numbers of 16 bits, added up. All int32, and broadcast.

    low: what the two lower bytes multiply, the first in its lower half; high: the same for the upper two. A GPU has an
    instruction for two such products at once (dp2a), PyTorch has no word for it: `teach_compiler` makes it part of the
    kernel around it. No byte is converted to a floating-point number.
    """
    numbers = [part << 16 >> 16 if half == 0 else part >> 16 for part in (low, high) for half in (0, 1)]
    return sum(number * (words << 24 - 8 * n >> 24) for n, number in enumerate(numbers))


@dot_bytes.register_fake
def _(low: Tensor, high: Tensor, words: Tensor) -> Tensor:
    return words.new_empty(torch.broadcast_shapes(low.shape, high.shape, words.shape))


def teach_compiler() -> None:
    """Tell Inductor what `dot_bytes` is on NVIDIA's GPUs; needed before anything with it is compiled."""
    # Imported here, because the compiler takes long to import.
    from torch._inductor.lowering import lowerings, make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    operator = torch.ops.moe_fast.dot_bytes.default
    if operator not in lowerings:
        code = "{ .reg .b32 t; dp2a.lo.s32.s32 t, $1, $3, 0; dp2a.hi.s32.s32 $0, $2, $3, t; }"
        made = partial(ops.inline_asm_elementwise, asm=code, constraints="=r,r,r,r", dtype=torch.int32)
        register_lowering(operator, broadcast=True, type_promotion_kind=None)(make_pointwise(made))
