"""Feed-forward layers without a gate: up, ReLU^2, down (So et al. 2021, Primer, section 4)."""

import torch.nn.functional as F
from torch import Tensor, nn

from model import ExpertLinear, Experts, Linear
from ops.declared import RELU_SQUARED, FeedForwardAdditions, NoAdditions


def relu_squared(up: Tensor, _: Tensor | None = None) -> Tensor:
    """Return ReLU(up)^2. A second argument, which activations of gates have, has no effect."""
    return F.relu(up).square()


class UpLinear(ExpertLinear):
    """Experts' `up` alone."""

    gated = False  # for formats whose blocks must not cross from gate to up


class UngatedExperts(Experts):
    """E experts of `up` and `down` alone. w13 [E, I, dim] has no gates."""

    def __init__(self, args, dim: int):
        nn.Module.__init__(self)
        self.w13 = UpLinear(args.n_expert, dim, args.intermediate)
        self.w2 = ExpertLinear(args.n_expert, args.intermediate, dim)
        self.n_expert, self.activation = args.n_expert, relu_squared

    def per_expert(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        rows = x.unsqueeze(1).expand(*expert_indices.shape, -1)
        h = relu_squared(self.w13.gather(rows, expert_indices))
        return self.w2.gather(h, expert_indices)

    def grouped(self, x: Tensor, group_ends: Tensor) -> Tensor:
        return self.w2.grouped(relu_squared(self.w13.grouped(x, group_ends)), group_ends)

    def fused_decode_settings(self) -> NoAdditions:
        return NoAdditions()


class UngatedFeedForward(nn.Module):
    """One dense FFN without a gate, with the signature of MoE. w13 [I, D] has no gates."""

    def __init__(self, dim: int, intermediate: int):
        super().__init__()
        self.w13 = Linear(dim, intermediate)
        self.w2 = Linear(intermediate, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, None, None]:
        return self.w2(relu_squared(self.w13(x))), None, None

    def fused_decode_settings(self) -> FeedForwardAdditions:
        return FeedForwardAdditions(RELU_SQUARED)
