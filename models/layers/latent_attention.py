"""Multi-head latent attention (DeepSeek-V2 2024, section 2.1).

Keys and values of all heads are products `wkv` of r numbers of their position. The cache holds
these and one rotated key of R numbers for all heads, [1, B, 1, S, r + R].

Few queries are mapped into the space of these numbers, where all heads share one KV head, and the
result is mapped back: the cache is read once, as it is. For a chunk's many queries that would
take 3.4 times the arithmetic, so a chunk expands keys and values, HEADS_AT_ONCE heads at a time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Context, KVCache, Linear, RMSNorm, new_parameter
from ops.attention.mla import attend_latent, has_tiles
from ops.attention.softmax import merge_partial
from ops.declared import LatentAdditions
from ops.inductor import materialize
from ops.launch import can_launch
from ops.plain import attention
from ops.plain.rope import rotate

HEADS_AT_ONCE = 16
LATENT_EPS = 1e-6  # of q_norm and kv_norm, whatever args.norm_eps is


class LatentAttention(nn.Module):
    """[B, Q, D] -> same, over a cache of latent vectors.

    args has kv_rank (r), q_rank, rotary_dim (R) and value_dim; args.head_dim C is that of queries,
    whose last R numbers are rotated.
    """

    window = None

    def __init__(self, args):
        super().__init__()
        H, C, r, R = args.n_head, args.head_dim, args.kv_rank, args.rotary_dim
        self.wqkv = Linear(args.dim, (args.q_rank or H * C) + r + R)
        self.q_norm = RMSNorm(args.q_rank, LATENT_EPS) if args.q_rank else None
        self.wq = Linear(args.q_rank, H * C) if args.q_rank else None
        self.kv_norm = RMSNorm(r, LATENT_EPS)
        self.wkv = new_parameter(H, C - R + args.value_dim, r)
        self.wo = Linear(H * args.value_dim, args.dim)
        self.sizes, self.scale = (H, C - R, R, r), args.attention_scale or C**-0.5

    def allocate(
        self, batch: int, length: int, cache_class: type[KVCache], like: Tensor
    ) -> KVCache:
        """Make this layer's cache, in the dtype and on the device of `like`, and return it."""
        _, _, R, r = self.sizes
        self.cache = cache_class((batch, 1, length, r + R), like.dtype, like.device, parts=1)
        return self.cache

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.wo(self.core(self.wqkv(x), context))

    def core(self, qkv: Tensor, context: Context) -> Tensor:
        """qkv [B, Q, q_rank or H C, + r + R] -> [B, Q, H * value_dim]."""
        H, N, R, r = self.sizes
        q, latent, key = qkv.split((qkv.shape[-1] - r - R, r, R), dim=-1)
        key = rotate(key.unsqueeze(2), context.rope, R).squeeze(2).to(qkv.dtype)
        kv = materialize(torch.cat((self.kv_norm(latent), key), dim=-1))
        (kv,) = self.cache.append(kv.unflatten(-1, (1, 1, -1)), context)
        q = q if self.wq is None else self.wq(materialize(self.q_norm(q)))
        q, rotated = q.unflatten(-1, (H, -1)).split((N, R), dim=-1)
        rotated = rotate(rotated, context.rope, R).to(qkv.dtype)
        if context.chunk:
            q = torch.cat((q, rotated), dim=-1).squeeze(0)
            return self.attend_expanded(q, kv.squeeze(0)).unsqueeze(0)
        return self.attend_compressed(q, rotated, kv, context)

    def attend_compressed(self, q: Tensor, rotated: Tensor, kv: Tensor, context: Context) -> Tensor:
        """q [B, Q, H, N], rotated [B, Q, H, R], kv [B, 1, S, r + R] -> [B, Q, H * value_dim]."""
        H, N, R, r = self.sizes
        w_key, w_value = self.wkv.split((N, self.wkv.shape[1] - N), dim=1)
        q = torch.cat((torch.einsum("bqhn,hnr->bqhr", q, w_key), rotated), dim=-1)
        v, mask = kv.split((r, R), dim=-1)[0], context.masks[None]
        if mask.blocks and has_tiles(R, r) and can_launch(q, "_attend_part"):
            y = self.attend_blocks(materialize(q), context.positions)
        else:
            # `attend` scales by the heads' width ** -0.5. Materialized as in Attention.core.
            q = materialize(q * (self.scale * (r + R) ** 0.5))
            y = attention.attend(q, kv, v, mask.bias).unflatten(-1, (H, r))
        return materialize(torch.einsum("bqhr,hvr->bqhv", y, w_value).flatten(2))

    def attend_blocks(self, q: Tensor, positions: Tensor) -> Tensor:
        """q [B, Q, H, r + R] -> [B, Q, H, r]; read only the cache's blocks in use."""
        codes, scale = self.cache.stored()
        parts = attend_latent(q, codes, scale, positions, self.sizes[-1], self.scale)
        return merge_partial(*parts).unflatten(1, q.shape[1:3]).to(q.dtype)

    def fused_decode_settings(self) -> LatentAdditions:
        return LatentAdditions(self.sizes, self.scale)

    def attend_expanded(self, q: Tensor, kv: Tensor) -> Tensor:
        """q [Q, H, C] of the last Q positions of kv [S, r + R] -> [Q, H * value_dim]."""
        _, N, R, r = self.sizes
        outputs, C, (latent, key) = [], q.shape[-1], kv.split((r, R), dim=-1)
        q = q * (self.scale * C**0.5)
        heads = zip(q.split(HEADS_AT_ONCE, 1), self.wkv.split(HEADS_AT_ONCE), strict=True)
        for queries, w in heads:
            expanded = torch.einsum("sr,hnr->hsn", latent, w)
            k, v = expanded.split((N, w.shape[1] - N), dim=-1)
            k = torch.cat((k, key.expand(len(w), -1, -1)), dim=-1)
            padded = F.pad(
                v, (0, C - v.shape[-1])
            )  # SDPA's fast kernels want values as long as keys
            y = attention.attend_chunk(queries, k, padded, None, None)
            outputs.append(y.unflatten(-1, (-1, C))[..., : v.shape[-1]].flatten(1))
        return torch.cat(outputs, dim=-1)
