"""The int8 KV cache."""

import torch
from torch import Tensor

from formats.words import nonzero
from model import Context, KVCache


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
    attention of one token computes that where it reads it, and reads the whole cache. The kernels
    of ops/attention/gqa.py read the part in use. So does SDPA, for a chunk, which materializes it.
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
        return False


KV_CACHES = {"plain": KVCache, "int8": Int8KVCache}  # plain: in the model's dtype
