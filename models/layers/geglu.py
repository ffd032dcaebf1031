"""GEGLU: a gated linear unit with GELU in place of SiLU."""

import torch.nn.functional as F
from torch import Tensor

from model import FeedForward
from ops.declared import GEGLU, FeedForwardAdditions


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [..., I] -> [..., I], by the approximation of GELU with tanh (Shazeer 2020)."""
    return F.gelu(gate, approximate="tanh") * up


class GegluFeedForward(FeedForward):
    def forward(self, x: Tensor) -> tuple[Tensor, None, None]:
        return self.w2(geglu(*self.w13(x).chunk(2, dim=-1))), None, None

    def fused_decode_settings(self) -> FeedForwardAdditions:
        return FeedForwardAdditions(GEGLU)
