"""One Triton kernel for a token's attention: norms, RoPE, cache append, scores, softmax, values.

It replaces `Attention.core` for a few tokens of each sequence, where starting five kernels takes
longer than reading a few thousand positions (ops/attention/gqa.py). Everything else takes the plain
path, which is the reference that tests compare with.
"""

import torch
from torch import Tensor, nn

from model import Attention, Context, RMSNorm, Transformer
from ops.attention.gqa import NO_WINDOW, AttentionSettings, attend_tokens, one_part, takes_queries
from ops.declared import AttentionAdditions
from ops.launch import can_launch
from ops.plain.ring import Ring
from runtime.plain_forms import has_own_core, settings_of, undeclared

KERNELS = "attend_kernel", "merge_kernel"


def projections_of(attention: nn.Module) -> tuple[tuple[str, ...], str]:
    """Return the names of attention's products before `core`, and of the one after it."""
    return getattr(attention, "projections", (("wqkv",), "wo"))


class FusedDecodeAttention(Attention):
    """An attention layer whose core is a kernel, where that computes it.

    It shares the plain layer's parameters, submodules and cache, under the same names.
    """

    def __init__(self, plain: Attention, additions: AttentionAdditions):
        """additions: to plain attention, which the kernel computes."""
        nn.Module.__init__(self)
        self.__dict__.update(plain.__dict__)
        self.plain = (plain,)  # a tuple hides it from nn.Module
        self.projections, self.sinks = projections_of(plain), additions.sinks
        self.gate = gate = additions.gate
        # Over heads that are sharded a norm needs an all-reduce (tp.ShardedRMSNorm).
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        foreign = any(undeclared(norm, RMSNorm) for norm in norms)
        self.supported = takes_queries(1, self.heads[2]) and not foreign
        settings = AttentionSettings(
            *self.heads,
            rotary_dim=self.rotary_dim,
            scale=additions.query_scale * self.heads[2] ** -0.5,
            eps=norms[0].eps if norms and not foreign else 0.0,
            clip=self.clip_qkv or 0.0,
            window=self.window or NO_WINDOW,
            full_norm=self.qk_norm == "full",
            norm_values=additions.norm_values,
            keys_are_values=additions.keys_are_values,
            gate=gate.activation if gate else "",
            head_gate=gate is not None and gate.per_head,
            rope_begin=additions.rope_begin,
        )
        self.settings, self.first_gate = settings.encoded(), settings.first_gate

    @property
    def projection(self) -> nn.Module:
        """The product that makes q, k and v."""
        (name,), _ = self.projections
        return getattr(self, name)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.wo(self.core(self.projection(x), context))

    def core(self, qkv: Tensor, context: Context) -> Tensor:
        if self.is_fused(qkv, context):
            return self.fused_core(qkv, context)
        return self.plain[0].core(qkv, context)

    def is_fused(self, qkv: Tensor, context: Context) -> bool:
        """Whether `core` uses the kernel: only in compiled code, since eager code is debugged."""
        return torch.compiler.is_compiling() and self.takes(qkv, context)

    def takes(self, qkv: Tensor, context: Context) -> bool:
        """Whether the kernel takes this call: fp32 has only one query and a plain cache."""
        if not self.supported or context.chunk or not can_launch(qkv, *KERNELS):
            return False
        queries, stored = qkv.shape[1], self.cache.kv.dtype
        if qkv.element_size() != 2 and (queries > 1 or stored != qkv.dtype):
            return False
        return stored in (qkv.dtype, torch.int8) and takes_queries(queries, self.heads[2])

    def one_part(self, queries: int, length: int) -> int:
        """Return how many positions are one part, for this many tokens of each sequence.

        0: a cache of `length` positions never has more parts, or hardly ever one.
        """
        if not self.supported:
            return 0
        found = one_part(queries, self.heads[2], self.cache.kv.element_size())
        return found if found < min(length, self.window or length) else 0

    def norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of the norms of q and k, where there are some."""
        return self.q_norm and self.q_norm.weight, self.k_norm and self.k_norm.weight

    def fused_core(self, qkv: Tensor, context: Context, reach: int | None = None) -> Tensor:
        """qkv [B, Q, (H + 2 K) C], or as the settings say -> [B, Q, H * C].

        reach: as in `attend_tokens`.
        """
        tokens = qkv, context.rope, context.positions
        tensors = *tokens, *self.cache.stored(), *self.norm_weights(), self.sinks
        last = context.last if isinstance(self.cache, Ring) else None
        return attend_tokens(*tensors, self.settings, reach, last)


def fused_attention(attention: nn.Module) -> nn.Module:
    """Return the layer with the kernel, if it is one that the kernel supports; else the layer.

    A subclass of Attention is one only if its `fused_decode_settings()` lists its additions.
    """
    own = undeclared(attention, Attention) or has_own_core(attention)
    if own or not isinstance(attention, Attention):
        return attention
    return FusedDecodeAttention(attention, settings_of(attention, Attention, AttentionAdditions))


def fuse_decode_attention(model: Transformer) -> None:
    """Use the kernel in every layer whose attention it supports."""
    for block in model.layers:
        block.attention = fused_attention(block.attention)
