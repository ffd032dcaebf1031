"""The last norm and the head by kernels of ours."""

import torch
from torch import Tensor

from model import Linear, RMSNorm, Transformer
from ops.products import dense
from ops.products.few_tokens import multiply_planes
from ops.products.planes import make_planes, takes_planes
from runtime.fused_layer import kernel_weight
from runtime.plain_forms import undeclared


class FusedHead:
    """The last norm and the head, as one product.

    norm: None, if the product has x normed already, since no kernel computes the model's norm.
    Raises ValueError for logits that are not the model's plain ones.
    """

    def __init__(self, model: Transformer):
        head = model.head
        plain = type(head) is Linear or hasattr(head, "kernel_weight")
        if type(model).logits is not Transformer.logits or not plain or head.bias is not None:
            raise ValueError("no kernel for these logits")
        self.norm = None if undeclared(model.norm, RMSNorm) else model.norm
        self.weight = kernel_weight(head)

    def of_normed(self, normed: Tensor) -> Tensor:
        """Normed x [T, D] -> fp32 logits [T, V]."""
        return dense.dense_product(normed, self.weight, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D], not normed -> fp32 logits [T, V], of which none is rounded to bf16."""
        if self.norm is None:
            return self.of_normed(x)
        if takes_planes(self.weight, len(x), x.dtype):
            logits = x.new_empty(len(x), self.weight.out, dtype=torch.float32)
            planes = make_planes(x, self.norm.weight, self.weight)
            multiply_planes(planes, self.weight, logits, eps=self.norm.eps)
            return logits
        normed, norm = dense.norm_apart(x, self.norm.weight, self.norm.eps, self.weight)
        return dense.dense_product(normed, self.weight, norm, dtype=torch.float32)


def fused_head(model: Transformer) -> FusedHead | None:
    """Return the model's head with its kernel, if it has one."""
    try:
        return FusedHead(model)
    except ValueError:
        return None
