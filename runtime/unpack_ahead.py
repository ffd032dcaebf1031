"""A prompt's dense packed weights, unpacked beside the kernels before their products."""

from collections.abc import Callable, Iterable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from runtime.graphs import CapturedStep, beside


class UnpackAhead:
    """Multiplies by dense packed weights of which most are unpacked ahead, if it is captured.

    `PackedLinear` unpacks a weight to 16 bits, then calls the library. Unpacking is bound by
    memory. What follows a block's first product, attention or a recurrence, is not: so all other
    weights of the block, and the first one of the next block, are unpacked beside that.
    """

    def __init__(self, blocks: Iterable[Sequence[nn.Module]]):
        """blocks: the dense packed weights of each block, in the order of their products."""
        self.step: CapturedStep | None = None
        self.ready: dict[nn.Module, tuple[Tensor, Callable[[], None]]] = {}
        self.next: dict[nn.Module, list[nn.Module]] = {}
        own = [linears for linears in blocks if linears]
        for linears, following in zip(own, [*own[1:], []], strict=False):
            self.next[linears[0]] = [*linears[1:], *following[:1]]
            for linear in linears:
                linear.ahead = self.multiply

    def multiply(self, linear: nn.Module, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out], as `PackedLinear.unpack_first`."""
        if self.step is not CapturedStep.current:
            self.step = CapturedStep.current
            self.ready.clear()  # memory of another graph
        weight, wait = self.ready.pop(linear, (None, None))
        if weight is None:
            weight = linear.unpack_like(x)
        else:
            wait()
        y = F.linear(x, weight)
        if self.step is not None and (following := self.next.get(linear)):
            with beside() as mark:
                for other in following:
                    self.ready[other] = other.unpack_like(x), mark()
        return y
