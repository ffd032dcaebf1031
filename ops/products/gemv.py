"""Products of few bits, of one token or a few, as an operator for code that Inductor compiles.

The kernels are those of ops/products/dense.py and experts.py. Inductor's code for the same product
in PyTorch takes 1.5 times as long: it converts each code to floating point.
"""

import torch
from torch import Tensor

from ops.declared import SWIGLU
from ops.launch import can_launch
from ops.products.dense import dense_product
from ops.products.experts import multiply_each
from ops.products.weights import has_kernels, packed_weight


def dot4_supports(x: Tensor, codes: Tensor, kind: str, group: int) -> bool:
    """Whether `dot4` can multiply x [M, in] by weights with codes [..., out, W]."""
    sixteen_bits = x.dtype in (torch.bfloat16, torch.float16)
    whole = has_kernels(kind, group) and codes.shape[-1] % 4 == 0
    fits = sixteen_bits and whole and codes.shape[-2] >= 16
    return fits and can_launch(x, "_multiply_each", "_multiply_sum")


@torch.library.custom_op("moe_fast::dot4", mutates_args=())
def dot4(
    x: Tensor,
    parts: list[Tensor],
    index: Tensor | None,
    kind: str,
    group: int,
    swiglu: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply x [M, in] by weights [E, out, in] of 4 bits and fewer -> [N, out] of this dtype.

    x: bf16 or fp16, contiguous. index: int64, N in all: pair n multiplies row n // (N // M) of x
    by expert index[n]. None: one dense weight [out, in], N = M <= 16. parts: the weight's tensors,
    ordered as in its format's layout. kind: one of INTEGERS but int8. group: numbers along
    `in` that share a scale, of nvfp4 two.

    swiglu: weight rows are w1's, then w3's; return silu(gate) * up, [N, out / 2].
    """
    assert x.is_contiguous(), f"x has strides {x.stride()}"
    weight = packed_weight(parts, kind, group)
    if index is None:
        return dense_product(x, weight, dtype=dtype)
    return multiply_each(x, weight, index, SWIGLU if swiglu else None, dtype=dtype)


@dot4.register_fake
def _(x, parts, index, kind, group, swiglu, dtype) -> Tensor:
    out, pairs = parts[0].shape[-2], x.shape[0] if index is None else index.numel()
    return x.new_empty(pairs, out // 2 if swiglu else out, dtype=dtype)
