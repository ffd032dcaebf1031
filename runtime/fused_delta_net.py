"""Triton kernels of Gated DeltaNet for a few tokens, in place of `DeltaNet.core`.

One token of each sequence is one kernel, which also computes the gates' product: its few rows need
no kernel of their own. Several tokens are two kernels. Everything else takes the plain path, which
is the reference that tests compare with.
"""

from torch import Tensor, nn

from model import Context, RMSNorm
from ops import moe_decode
from ops.gated_delta_few import delta_tokens
from ops.gated_delta_token import GateProduct, fit_tiles, update_token
from ops.moe_tiles import Weight


class FusedDeltaNet:
    """A Gated DeltaNet layer between its norm and its output, for calls that the kernels compute.

    plain: a layer with the parameters, sizes and state of models/layers/gated_delta_net.py.
    most: the tokens of each sequence, at most.
    """

    def __init__(self, plain: nn.Module, most: int):
        self.plain, self.most = (plain,), most  # a tuple as in FusedDecodeAttention
        self.supported = fit_tiles(plain.sizes.key_dim, plain.sizes.value_dim)

    def takes(self, projected: Tensor, context: Context) -> bool:
        """Whether the kernels take this call, of [B, Q, N + H Cv + 2 H]."""
        few = projected.shape[1] <= self.most and context.chunk is None
        return self.supported and projected.is_cuda and few

    def takes_token(self, x: Tensor) -> bool:
        """Whether `run_token` takes x [T, D]: one token, and gates with a product of their own."""
        return self.supported and x.is_cuda and len(x) == 1 and self.plain[0].wba is not None

    def run_token(self, x: Tensor, norm: RMSNorm, weight: Weight, context: Context) -> Tensor:
        """x [1, D], not normed -> [1, 1, H Cv]. weight: that of wqkvz."""
        qkvz = moe_decode.down(x, weight, norm=norm.weight, eps=norm.eps)
        gates = GateProduct(x, norm.weight, norm.eps, self.plain[0].wba.weight)
        tensors, options = self.arguments(context)
        return update_token(qkvz[None], gates, *tensors, *options, self.plain[0].state.arrivals)

    def fused_core(self, projected: Tensor, context: Context) -> Tensor:
        """projected [B, Q, N + H Cv + 2 H], of both products -> [B, Q, H Cv]."""
        (plain,), heads = self.plain, 2 * self.plain[0].sizes.value_heads
        qkvz, ba = projected.split((projected.shape[-1] - heads, heads), dim=-1)
        tensors, options = self.arguments(context)
        if projected.shape[1] == 1:
            return update_token(qkvz, ba, *tensors, *options, plain.state.arrivals)
        return delta_tokens(qkvz, ba, *tensors, *options, *plain.state.tentative())

    def arguments(self, context: Context) -> tuple[tuple, tuple]:
        """Return the tensors and the options of both kernels."""
        (plain,) = self.plain
        memory, norm = plain.state, plain.norm
        tensors = memory.state, memory.window, plain.conv.weight, plain.a_log, plain.dt_bias
        return tensors, (norm.weight, context.last, plain.sizes.key_heads, norm.eps)
