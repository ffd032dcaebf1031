"""MoE layers with a shared expert, which every token uses."""

from torch import Tensor

from model import FeedForward, Linear, MoE
from ops.declared import ExpertAdditions


class SharedExpertMoE(MoE):
    """Routed experts + a shared expert of args.shared_intermediate (0, or no such field: none)."""

    def __init__(self, args):
        super().__init__(args)
        width = getattr(args, "shared_intermediate", 0)
        self.shared = FeedForward(args.dim, width) if width else None

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        return y if self.shared is None else y + self.shared(x)[0]

    def fused_decode_settings(self) -> ExpertAdditions | None:
        return ExpertAdditions(shared=self.shared)


class GatedSharedExpertMoE(SharedExpertMoE):
    """The shared expert's output is weighted by a learned sigmoid gate (Qwen2-MoE)."""

    def __init__(self, args):
        super().__init__(args)
        self.shared_gate = Linear(args.dim, 1) if self.shared else None

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        if self.shared is None:
            return y
        return y + self.shared(x)[0] * self.shared_gate(x).sigmoid()

    def fused_decode_settings(self) -> ExpertAdditions | None:
        return ExpertAdditions(shared=self.shared, shared_gate=self.shared_gate)
