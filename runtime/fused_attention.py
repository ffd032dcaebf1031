"""One Triton kernel for a token's attention: norms, RoPE, cache append, scores, softmax, values.

It replaces `Attention.core` for a few tokens of each sequence, where starting five kernels takes
longer than reading a few thousand positions. For one token, a short plain cache and a long or int8
one have kernels of their own; several tokens have others. Everything else takes the plain path,
which is the reference that tests compare with.
"""

import torch
from torch import Tensor, nn

from model import Attention, Context, RMSNorm, Transformer
from ops.attention.decode_attention import attend_token
from ops.attention.few_queries_attention import attend_queries, takes_queries
from ops.attention.split_attention import attend_split
from ops.declared import AttentionAdditions
from ops.launch import can_launch
from ops.plain.attention import BLOCK
from runtime.plain_forms import settings_of, undeclared

# Up to 256 positions `attend_token` is faster, then slower. Over all positions of a cache of this
# length it is even (H200).
MAX_CACHE_LEN = 640
KERNELS = "_attend_token", "_attend_split", "_merge_split", "_attend_queries", "_merge_queries"


class FusedDecodeAttention(Attention):
    """An attention layer whose core is a kernel, where one computes it.

    That is `attend_token` or `attend_split` for one token, `attend_queries` for several.

    It shares the plain layer's parameters, submodules and cache, under the same names.
    """

    def __init__(self, plain: Attention, settings: AttentionAdditions):
        """settings: additions to plain attention that the kernel computes."""
        nn.Module.__init__(self)
        self.__dict__.update(plain.__dict__)
        self.plain = (plain,)  # a tuple hides it from nn.Module
        self.settings = settings
        _, _, C = self.heads
        self.decode_scale = settings.query_scale * C**-0.5
        fits = C & C - 1 == 0 and 16 <= C <= 512
        # Over heads that are sharded a norm needs an all-reduce (tp.ShardedRMSNorm).
        norms = (norm for norm in (self.q_norm, self.k_norm) if norm is not None)
        self.supported = fits and not any(undeclared(norm, RMSNorm) for norm in norms)
        # Larger heads were not measured: as many bytes as with heads of 128.
        self.max_length = MAX_CACHE_LEN * 128 // max(C, 128)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        projection = getattr(self, self.settings.projection)
        return self.wo(self.core(projection(x), context))

    def core(self, qkv: Tensor, context: Context) -> Tensor:
        if self.is_fused(qkv, context):
            return self.fused_core(qkv, context)
        return self.plain[0].core(qkv, context)

    def is_fused(self, qkv: Tensor, context: Context) -> bool:
        """Whether `core` uses the kernel: only in compiled code, since eager code is debugged."""
        return torch.compiler.is_compiling() and self.takes(qkv, context)

    def takes(self, qkv: Tensor, context: Context) -> bool:
        """Whether a kernel takes this call."""
        if not self.supported or context.chunk or not can_launch(qkv, *KERNELS):
            return False
        if qkv.shape[1] > 1 and not takes_queries(qkv.shape[1], self.heads[2]):
            return False
        if qkv.shape[1] == 1 and self.is_short(qkv):
            return True
        return qkv.element_size() == 2 and self.has_whole_blocks()

    def is_short(self, qkv: Tensor) -> bool:
        """Whether the cache is `attend_token`'s: plain, and short itself or by its window."""
        length = self.cache.kv.shape[3]
        short = min(self.window or length, length) <= self.max_length
        return short and self.cache.kv.dtype == qkv.dtype

    def has_whole_blocks(self) -> bool:
        """Whether the cache is one that `attend_split` and `attend_queries` read."""
        return self.cache.kv.shape[3] % BLOCK == 0

    def fused_core(self, qkv: Tensor, context: Context) -> Tensor:
        """qkv [B, Q, (H + 2 K) C], or as the settings say -> [B, Q, H * C]."""
        q_norm, k_norm, eps = None, None, 0.0
        if self.q_norm is not None:
            q_norm, k_norm, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        cache, scales = self.cache.stored()
        arguments = (
            q_norm,
            k_norm,
            self.settings.sinks,
            self.rotary_dim,
            self.decode_scale,
            eps,
            self.clip_qkv or 0.0,
            self.window or 1 << 30,
            self.settings.norm_values,
            self.settings.keys_are_values,
            self.settings.rope_begin,
            self.settings.gated,
            self.qk_norm == "full",
        )
        tokens = qkv, context.rope, context.positions
        if qkv.shape[1] > 1:
            return attend_queries(*tokens, cache, scales, *arguments)
        if self.is_short(qkv):
            return attend_token(*tokens, cache, *arguments)
        return attend_split(*tokens, cache, scales, *arguments)


def fused_attention(attention: nn.Module) -> nn.Module:
    """Return the layer with the kernel, if it is one that the kernel supports; else the layer.

    A subclass of Attention is one only if its `fused_decode_settings()` lists its additions.
    """
    if undeclared(attention, Attention) or not isinstance(attention, Attention):
        return attention
    return FusedDecodeAttention(attention, settings_of(attention, Attention, AttentionAdditions))


def fuse_decode_attention(model: Transformer) -> None:
    """Use the kernel in every layer whose attention it supports."""
    for block in model.layers:
        block.attention = fused_attention(block.attention)
