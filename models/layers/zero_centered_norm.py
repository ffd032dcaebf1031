"""RMSNorm whose published weight w stands for 1 + w."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model import RMSNorm
from models.tensors import Recipe, copy_of
from ops.declared import NoAdditions


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm with the weight 1 + w, which the checkpoint holds in fp32.

    Near one, bf16 has steps of 1/128, and would drop most digits of w.
    """

    fp32 = ("weight",)  # parameters that a change of dtype leaves alone

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return y.to(x.dtype)

    def fused_decode_settings(self) -> NoAdditions:
        """The kernels take the weight in fp32."""
        return NoAdditions()


def zero_centered(name: str, size: int) -> Recipe:
    """Return the recipe of a norm's weight that is published without its 1."""
    return copy_of(name, size, transform=lambda weight: weight + 1, dtype=torch.float32)
