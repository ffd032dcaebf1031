"""The last norm and the head by kernels of ours."""

import torch
from torch import Tensor

from model import Linear, RMSNorm, Transformer
from ops.declared import NoAdditions
from ops.products import dense
from runtime.fused_layer import kernel_weight
from runtime.plain_forms import settings_of


class FusedHead:
    """The last norm and the head, as one product.

    Raises ValueError for logits that are not the model's plain ones.
    """

    def __init__(self, model: Transformer):
        head, self.norm = model.head, model.norm
        plain = type(head) is Linear or hasattr(head, "kernel_weight")
        if type(model).logits is not Transformer.logits or not plain or head.bias is not None:
            raise ValueError("no kernel for these logits")
        settings_of(self.norm, RMSNorm, NoAdditions)
        self.weight = kernel_weight(head)

    def of_normed(self, normed: Tensor) -> Tensor:
        """Normed x [T, D] -> fp32 logits [T, V]."""
        return dense.dense_product(normed, self.weight, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D], not normed -> fp32 logits [T, V], of which none is rounded to bf16."""
        weight = self.norm.weight
        normed, norm = dense.norm_apart(x, weight, self.norm.eps, self.weight)
        return dense.dense_product(normed, self.weight, norm, dtype=torch.float32)


def fused_head(model: Transformer) -> FusedHead | None:
    """Return the model's head with its kernel, if it has one."""
    try:
        return FusedHead(model)
    except ValueError:
        return None
