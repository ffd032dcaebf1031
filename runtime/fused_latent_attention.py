"""Latent attention of a few tokens by the kernels of ops/attention/mla.py.

They replace `LatentAttention.core`, which is the reference. If the query has a rank of its own, a
kernel before them projects it. All other calls take the plain path.
"""

from torch import Tensor, nn

from model import Context
from ops.attention.mla import MAX_QUERIES, LatentSettings, LatentTensors, attend_latent_tokens
from ops.declared import LatentAdditions
from ops.launch import can_launch
from ops.products import dense
from ops.products.weights import Weight


class FusedLatentAttention:
    """The core of a layer of latent attention, for calls that the kernels compute."""

    def __init__(self, plain: nn.Module, settings: LatentAdditions, query_weight: Weight | None):
        """query_weight: wq's."""
        self.plain = (plain,)  # a tuple as in FusedDecodeAttention
        self.query_weight = query_weight
        _, N, _, _ = settings.latent
        self.layer = LatentSettings(
            *settings.latent,
            scale=settings.scale,
            value_dim=plain.wkv.shape[1] - N,
            eps=plain.kv_norm.eps,
        )
        self.supported = self.layer.supported

    def takes(self, qkv: Tensor, context: Context) -> bool:
        """Whether the kernels take this call: a few tokens of each sequence, in 16 bits."""
        if not self.supported or context.chunk or qkv.shape[1] > MAX_QUERIES:
            return False
        same_dtype = self.plain[0].wkv.dtype == qkv.dtype
        return can_launch(qkv) and qkv.element_size() == 2 and same_dtype

    def fused_core(self, qkv: Tensor, context: Context) -> Tensor:
        """qkv [B, Q, q_rank or H C, + r + R] -> [B, Q, H * value_dim]."""
        (plain,), width = self.plain, self.layer.width
        q, kv = qkv.flatten(0, 1).split((qkv.shape[-1] - width, width), dim=-1)
        if self.query_weight is not None:
            norm = plain.q_norm
            q, scale = dense.norm_apart(q.contiguous(), norm.weight, norm.eps, self.query_weight)
            q = dense.dense_product(q, self.query_weight, scale)
        cache, scales = plain.cache.stored()
        rope, positions, norm = context.rope, context.positions, plain.kv_norm.weight
        x = LatentTensors(q, kv, rope, positions, cache, scales, plain.wkv, norm)
        return attend_latent_tokens(x, self.layer).unflatten(0, qkv.shape[:2])
