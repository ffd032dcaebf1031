"""One token of Gated DeltaNet in two Triton kernels, up to its output.

The second one also computes the gates' product, whose few rows need no kernel of their own. Several
tokens, and gates that are rows of wqkvz, take the plain layer's core.
"""

from torch import Tensor, nn

from model import Context, RMSNorm
from ops import moe_decode
from ops.gated_delta_token import GateProduct, update_token
from ops.moe_tiles import Weight


class FusedDeltaNet:
    """A Gated DeltaNet layer (models/layers/gated_delta_net.py) between its norm and its output."""

    def __init__(self, plain: nn.Module, gates: nn.Module):
        """gates: the product that gives `ba`."""
        self.plain, self.gates = (plain,), gates  # a tuple as in FusedDecodeAttention

    def run_token(self, x: Tensor, norm: RMSNorm, weight: Weight, context: Context) -> Tensor:
        """x [1, D], not normed -> [1, 1, H Cv]. weight: that of wqkvz."""
        (plain,) = self.plain
        qkvz = moe_decode.down(x, weight, norm=norm.weight, eps=norm.eps)
        gates = GateProduct(x, norm.weight, norm.eps, self.gates.weight)
        layer = *plain.kernel_arguments(context), plain.state.arrivals
        return update_token(qkvz[None], gates, *layer)
