"""Norm, clip and RoPE of a prompt's queries, keys and values, and cache append, before SDPA.

`attend_kernel` does the same for up to 64 tokens, as a part of their attention.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ops.attention.gqa import AttentionSettings, HeadWeights, decode_settings
from ops.attention.heads import inverse_rms, load_head, load_head_norm, load_rotation, load_value
from ops.launch import check_shapes, jit, launch, tl

ROWS = 8  # heads of a token at once
KERNEL = "prepare_heads"


class Places(NamedTuple):
    """Where keys and values are stored: in one of the tensors or both."""

    kv: Tensor | None = None  # [T, 2, K, C]
    cache: Tensor | None = None  # [2, B, K, S, C]: position p is in slot p % S
    row: Tensor | None = None  # int64 [1], of the cache
    # int64 [1]: the last token that the cache gets. None: it gets all.
    last: Tensor | None = None


@dataclass(frozen=True)
class PrepareSettings:
    """What the kernel is compiled for."""

    layer: AttentionSettings
    rope_width: int
    query_scale: float  # beside that of SDPA
    sequences: int  # B
    slots: int  # S
    rows: int = ROWS


@jit
def _store(value, head, c, part: tl.constexpr, token, begin, places, s: tl.constexpr):
    """Store some heads of a token's keys (part 0) or values (part 1) [M, C]."""
    C: tl.constexpr = s.layer.head_dim
    K: tl.constexpr = s.layer.kv_heads
    if places.kv is not None:
        own = places.kv + token.to(tl.int64) * (2 * K * C)
        value = value.to(own.dtype.element_ty)
        tl.store(own + part * K * C + head * C + c, value, mask=head < K)
    if places.cache is not None:
        # A ring takes its own length of tokens: earlier ones would share slots with them.
        last = tl.num_programs(0) - 1
        if places.last is not None:
            last = tl.load(places.last).to(tl.int32)
        n = tl.zeros_like(head) + token  # Triton's interpreter takes no scalar in a mask
        exists = (head < K) & (n >= tl.num_programs(0) - s.slots) & (n <= last)
        place = ((part * s.sequences + tl.load(places.row)) * K + head) * s.slots
        at = places.cache + (place + (begin + token) % s.slots) * C + c
        tl.store(at, value.to(at.dtype.element_ty), mask=exists)


@jit
def _prepare(x, norm, rms, rotation, number, COUNT: tl.constexpr, s: tl.constexpr):
    """Norm and rotate some of COUNT heads at x -> [M, C]."""
    a: tl.constexpr = s.layer
    head = tl.minimum(number, COUNT - 1) * a.head_dim
    weight = None
    if norm is not None:
        weight = load_head_norm(norm + head if a.full_norm else norm, rotation)
    return load_head(x + head, weight, rms, rotation, a)


# Grid [T]: a program prepares the heads of one token.
@jit
def prepare_heads(qkv, rope, weights, q, places, begin, s: tl.constexpr):
    a: tl.constexpr = s.layer
    C: tl.constexpr = a.head_dim
    H: tl.constexpr = a.heads
    token, m = tl.program_id(0), tl.arange(0, s.rows)[:, None]
    c = tl.arange(0, C)[None, :]
    x = qkv + token.to(tl.int64) * a.projected
    rotation = load_rotation(rope, token, c, C, a.rotary_dim, s.rope_width, a.rope_begin)
    q_rms, k_rms = 1.0, 1.0
    if a.full_norm:
        q_rms, k_rms = inverse_rms(x, x + H * C, H * C, a.kv_heads * C, a.eps)
    own = q + token.to(tl.int64) * (H * C)
    for first in range(0, H, s.rows):
        head = first + m
        value = _prepare(x, weights.q_norm, q_rms, rotation, head, H, s) * s.query_scale
        tl.store(own + head * C + c, value.to(own.dtype.element_ty), mask=head < H)
    for first in range(0, a.kv_heads, s.rows):
        head = first + m
        key = _prepare(x + H * C, weights.k_norm, k_rms, rotation, head, a.kv_heads, s)
        _store(key, head, c, 0, token, begin, places, s)
        value = load_value(x + a.first_value * C + tl.minimum(head, a.kv_heads - 1) * C, c, a)
        _store(value, head, c, 1, token, begin, places, s)


def prompt_heads(
    qkv: Tensor,
    rope: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    settings: str,
    places: Places,
    begin: int = 0,
) -> Tensor:
    """qkv [T, projected], rope fp32 [1, T, 1, 2 C] -> q [T, H, C]; keys and values to `places`.

    settings: as of `attend_tokens`. begin: the first token's position. Queries are scaled for SDPA,
    whose own scale is C ** -0.5. The reference is `Attention.queries`,
    `Attention.keys_and_values` and `KVCache.append`.
    """
    layer, T = decode_settings(settings), len(qkv)
    H, K, C = layer.heads, layer.kv_heads, layer.head_dim
    check_shapes(qkv=(qkv, (T, layer.projected)))
    q, (B, S) = qkv.new_empty(T, H, C), (1, 1)
    if places.kv is not None:
        check_shapes(kv=(places.kv, (T, 2, K, C)))
    if places.cache is not None:
        _, B, _, S, _ = places.cache.shape
        check_shapes(cache=(places.cache, (2, B, K, S, C)))
    s = PrepareSettings(layer, rope.shape[-1], layer.scale * C**0.5, B, S)
    tensors = qkv.contiguous(), rope, HeadWeights(q_norm, k_norm), q, places
    launch(prepare_heads, (T,), *tensors, begin, settings=s)
    return q
