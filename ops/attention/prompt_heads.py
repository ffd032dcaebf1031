"""Norm, clip and RoPE of a prompt's queries, keys and values: one kernel before SDPA.

`attend_kernel` does the same for up to 64 tokens, as a part of their attention.
"""

from dataclasses import dataclass

from torch import Tensor

from ops.attention.gqa_settings import AttentionSettings, HeadWeights, decode_settings
from ops.attention.heads import (
    inverse_rms,
    load_head,
    load_head_norm,
    load_rotation,
    load_value,
)
from ops.launch import check_shapes, jit, launch, tl

ROWS = 8  # heads of a token at once
KERNEL = "prepare_heads"


@dataclass(frozen=True)
class PrepareSettings:
    """What the kernel is compiled for."""

    layer: AttentionSettings
    rope_width: int
    query_scale: float  # beside that of SDPA
    rows: int = ROWS


@jit
def _store_heads(x, norm, rms, rotation, y, COUNT: tl.constexpr, scale, s: tl.constexpr):
    """Norm and rotate COUNT heads at x, multiply them by `scale`, and store them at y."""
    a: tl.constexpr = s.layer
    C: tl.constexpr = a.head_dim
    M: tl.constexpr = s.rows
    c = tl.arange(0, C)[None, :]
    for begin in range(0, COUNT, M):
        number = begin + tl.arange(0, M)[:, None]
        head = tl.minimum(number, COUNT - 1) * C
        weight = None
        if norm is not None:
            weight = load_head_norm(norm + head if a.full_norm else norm, rotation)
        value = load_head(x + head, weight, rms, rotation, a) * scale
        tl.store(y + head + c, value.to(y.dtype.element_ty), mask=number < COUNT)


# Grid [T]: a program prepares the heads of one token.
@jit
def prepare_heads(qkv, rope, weights, q, kv, s: tl.constexpr):
    a: tl.constexpr = s.layer
    C: tl.constexpr = a.head_dim
    H: tl.constexpr = a.heads
    K: tl.constexpr = a.kv_heads
    M: tl.constexpr = s.rows
    token = tl.program_id(0)
    c = tl.arange(0, C)[None, :]
    x = qkv + token.to(tl.int64) * a.projected
    own = kv + token.to(tl.int64) * (2 * K * C)
    rotation = load_rotation(rope, token, c, C, a.rotary_dim, s.rope_width, a.rope_begin)
    q_rms, k_rms = 1.0, 1.0
    if a.full_norm:
        q_rms, k_rms = inverse_rms(x, x + H * C, H * C, K * C, a.eps)
    at = q + token.to(tl.int64) * (H * C)
    _store_heads(x, weights.q_norm, q_rms, rotation, at, H, s.query_scale, s)
    _store_heads(x + H * C, weights.k_norm, k_rms, rotation, own, K, 1.0, s)
    for begin in range(0, K, M):
        number = begin + tl.arange(0, M)[:, None]
        head = tl.minimum(number, K - 1) * C
        value = load_value(x + a.first_value * C + head, c, a)
        tl.store(own + K * C + head + c, value, mask=number < K)


def prompt_heads(
    qkv: Tensor,
    rope: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    settings: str,
) -> tuple[Tensor, Tensor]:
    """qkv [T, projected], rope fp32 [1, T, 1, 2 C] -> q [T, H, C], keys, values [T, 2, K, C].

    settings: as of `attend_tokens`. Queries are scaled for SDPA, whose own scale is C ** -0.5. The
    reference is `Attention.queries` and `Attention.keys_and_values`.
    """
    layer, T = decode_settings(settings), len(qkv)
    H, K, C = layer.heads, layer.kv_heads, layer.head_dim
    check_shapes(qkv=(qkv, (T, layer.projected)))
    q, kv = qkv.new_empty(T, H, C), qkv.new_empty(T, 2, K, C)
    s = PrepareSettings(layer, rope.shape[-1], layer.scale * C**0.5)
    tensors = qkv.contiguous(), rope, HeadWeights(q_norm, k_norm), q, kv
    launch(prepare_heads, (T,), *tensors, settings=s)
    return q, kv
