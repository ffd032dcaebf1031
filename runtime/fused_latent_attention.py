"""Three Triton kernels for latent attention of a few tokens, in place of `LatentAttention.core`.

A fourth one before them projects the query, if that has a rank of its own. One token of each
sequence and several have kernels of their own. Everything else takes the plain path, which is the
reference that tests compare with.
"""

from torch import Tensor, nn

from model import Context
from ops.attention.few_latent_attention import MAX_QUERIES, attend_latent_tokens
from ops.attention.latent_decode_attention import attend_latent_token, supports
from ops.declared import LatentAdditions
from ops.launch import can_launch
from ops.products import dense
from ops.products.weights import Weight


class FusedLatentAttention:
    """The core of a layer of latent attention, for calls that the kernels compute."""

    def __init__(self, plain: nn.Module, settings: LatentAdditions, query_weight: Weight | None):
        """query_weight: wq's."""
        self.plain = (plain,)  # a tuple as in FusedDecodeAttention
        self.sizes, self.scale = settings.latent, settings.scale
        self.query_weight = query_weight
        _, N, R, r = self.sizes
        self.supported = supports(N, R, r)

    def takes(self, qkv: Tensor, context: Context) -> bool:
        """Whether the kernels take this call: a few tokens of each sequence, in 16 bits."""
        if not self.supported or context.chunk or qkv.shape[1] > MAX_QUERIES:
            return False
        same_dtype = self.plain[0].wkv.dtype == qkv.dtype
        return can_launch(qkv) and qkv.element_size() == 2 and same_dtype

    def fused_core(self, qkv: Tensor, context: Context) -> Tensor:
        """qkv [B, Q, q_rank or H C, + r + R] -> [B, Q, H * value_dim]."""
        (plain,), (_, _, R, r) = self.plain, self.sizes
        q, kv = qkv.flatten(0, 1).split((qkv.shape[-1] - r - R, r + R), dim=-1)
        if self.query_weight is not None:
            q = self.project_query(q, self.query_weight)
        cache, scales = plain.cache.stored()
        attend = attend_latent_token if qkv.shape[1] == 1 else attend_latent_tokens
        y = attend(
            q,
            kv,
            context.rope,
            context.positions,
            cache,
            scales,
            plain.wkv,
            plain.kv_norm.weight,
            plain.kv_norm.eps,
            self.scale,
        )
        return y.unflatten(0, qkv.shape[:2])

    def project_query(self, q: Tensor, weight: Weight) -> Tensor:
        """q [T, q_rank] -> [T, H * C]: norm and product, in one kernel for up to 8 tokens."""
        norm = self.plain[0].q_norm
        q, scale = dense.norm_apart(q.contiguous(), norm.weight, norm.eps)
        return dense.dense_product(q, weight, scale)
