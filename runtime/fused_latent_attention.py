"""Three Triton kernels for one token's latent attention, in place of `LatentAttention.core`.

A fourth one before them projects the query, if that has a rank of its own. Everything else takes
the plain path, which is the reference that tests compare with.
"""

from torch import Tensor, nn

from model import Context
from ops import moe_decode
from ops.latent_decode_attention import attend_latent_token, supports
from ops.moe_tiles import Weight


class FusedLatentAttention:
    """The core of a layer of latent attention, for calls that the kernels compute."""

    def __init__(self, plain: nn.Module, settings: dict, query_weight: Weight | None):
        """settings: sizes "latent" (H, N, R, r), and the "scale" of scores. query_weight: wq's."""
        self.plain = (plain,)  # a tuple as in FusedDecodeAttention
        self.sizes, self.scale = settings["latent"], settings["scale"]
        self.query_weight = query_weight
        _, N, R, r = self.sizes
        self.supported = supports(N, R, r)

    def takes(self, qkv: Tensor, context: Context) -> bool:
        """Whether the kernels take this call: one token of each sequence, in 16 bits."""
        if not self.supported or context.chunk or qkv.shape[1] > 1 or not qkv.is_cuda:
            return False
        return qkv.element_size() == 2 and self.plain[0].wkv.dtype == qkv.dtype

    def fused_core(self, qkv: Tensor, context: Context) -> Tensor:
        """qkv [B, 1, q_rank or H C, + r + R] -> [B, 1, H * value_dim]."""
        (plain,), (_, _, R, r) = self.plain, self.sizes
        q, kv = qkv.squeeze(1).split((qkv.shape[-1] - r - R, r + R), dim=-1)
        if self.query_weight is not None:
            q = self.project_query(q, self.query_weight)
        cache, scales = plain.cache.stored()
        y = attend_latent_token(
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
        return y.unsqueeze(1)

    def project_query(self, q: Tensor, weight: Weight) -> Tensor:
        """q [B, q_rank] -> [B, H * C]: norm and product, in one kernel for each sequence."""
        norm, y = self.plain[0].q_norm, q.new_empty(len(q), weight.out)
        for row, out in zip(q.split(1), y.split(1), strict=True):
            moe_decode.down(row, weight, norm=norm.weight, eps=norm.eps, out=out)
        return y
