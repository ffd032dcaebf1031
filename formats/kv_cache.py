"""The int8 KV cache."""

import torch
from torch import Tensor

from formats.words import nonzero
from model import Context, KVCache
from ops.attention.gqa import attend_int8
from ops.attention.softmax import merge_partial
from ops.launch import can_launch

MAX_BLOCK_ROWS = 64  # queries of a KV head that fit the registers of `attend_int8`


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n] -> codes int8 [..., n], scale bf16 [..., 1]: the row's largest magnitude over 127.

    A row with a NaN or an infinity comes back without a finite number.
    """
    x = x.float()
    scale = nonzero((x.abs().amax(-1, keepdim=True) / 127).bfloat16())
    # View as bits and back: Inductor would drop the rounding, and divide by another scale than the
    # stored one.
    scale = scale.view(torch.int16).view(torch.bfloat16)
    return (x / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


class Int8KVCache(KVCache):
    """Codes int8 [2, B, K, S, C], and a scale bf16 [2, B, K, S, 1] for each position and head.

    At C = 128 it takes 0.508 of a bf16 cache's memory. `append` returns codes * scale. The compiled
    attention of one token computes that where it reads it. Over a long cache `attend_blocks` reads
    the codes themselves. A chunk's attention is SDPA, for which the part in use is materialized.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: int = 2,
    ):
        super().__init__(shape, torch.int8, device, parts)
        scale = torch.zeros(parts, *shape[:-1], 1, dtype=torch.bfloat16, device=device)
        self.register_buffer("scale", scale, persistent=False)
        self.dtype = dtype  # of what `append` returns

    def append(self, kv: Tensor, context: Context) -> tuple[Tensor, ...]:
        codes, scale = quantize_int8(kv)
        pairs = self.write(self.kv, codes, context), self.write(self.scale, scale, context)
        return tuple((c.float() * s.float()).to(self.dtype) for c, s in zip(*pairs, strict=True))

    def stored(self) -> tuple[Tensor, Tensor]:
        return self.kv, self.scale

    def reads_blocks(self, queries: int) -> bool:
        return queries <= MAX_BLOCK_ROWS and can_launch(self.kv, "attend_kernel")

    def attend_blocks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        window: int | None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend over the blocks in use of the codes; k and v are not read.

        q [B, Q, H, C] -> [B, Q, H * C]. return_lse: in fp32, and the log-sum-exp of each query's
        scores, fp32 [B, H, Q].
        """
        (B, Q, H, C), (K, S) = q.shape, self.kv.shape[2:4]
        rows = H // K * Q
        partial = attend_int8(q, self.kv, self.scale, context.positions, window or S)
        partial = (part[:, :, :, :rows] for part in partial)
        merged = merge_partial(*partial, return_lse=return_lse)
        y, lse = merged if return_lse else (merged, None)
        y = y.unflatten(2, (Q, H // K)).transpose(1, 2).reshape(B, Q, H * C)
        if return_lse:
            return y, lse.unflatten(2, (Q, H // K)).transpose(2, 3).flatten(1, 2)
        return y.to(q.dtype)


KV_CACHES = {"plain": KVCache, "int8": Int8KVCache}  # plain: in the model's dtype
