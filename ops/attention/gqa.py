"""Grouped-query attention of a few tokens over a KV cache, in one kernel or two.

    attend_kernel    norms of q and k, RoPE, cache append, attention
    merge_kernel     merge of the parts, if a sequence may have several

A program attends with some query heads of one KV head, as rows of a tile of tensor cores. It reads
each older key and value once for all of them. Programs share the positions of a long sequence
(Flash-Decoding, Dao et al. 2023): `find_parts` chooses how many from the position, on the GPU. The
other programs end at once. A caller that knows a bound of the positions (`reach`) saves them, and
`merge_kernel`. Merging by the last program of a KV head to end takes longer than that kernel, and
so do thread block clusters, which exchange parts through shared memory (H100).

No program waits for another: each computes the keys and values of the call's own tokens itself, and
reads only earlier positions from the cache.

With programmatic dependent launch (PDL, Hopper and newer) a program loads its first block of the
cache while `wqkv` runs, and prefetches its second one into L2. `wqkv` and the kernel before it must
not write what is read before the wait: the cache, RoPE, positions, norm weights and sinks.

`attend_int8` is for compiled attention: q is normed and rotated, its own keys are in the cache.

Letters: B sequences, Q queries of each, S positions of the cache, H query heads, K KV heads,
G = H / K, C head dim, P parts of the positions, at most, M rows of a program (queries times heads).
"""

import torch
from torch import Tensor

from ops.attention.gqa_kernels import attend_kernel, merge_kernel
from ops.attention.gqa_settings import (
    MERGE_WARPS,
    WARPS,
    AttentionSettings,
    HeadWeights,
    Place,
    Results,
    Stored,
    decode_settings,
    divide,
    int8_settings,
    pow2,
)
from ops.attention.softmax import PROGRAMS
from ops.gpu import gpu_of
from ops.inductor import custom_op
from ops.launch import check_shapes, fit, launch


@custom_op("moe_fast::attend_tokens", mutates_args=("cache", "scales"))
def attend_tokens(
    qkv: Tensor,
    rope: Tensor,
    positions: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    sinks: Tensor | None,
    settings: str,
    reach: int | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """Attend with Q tokens of each sequence, and append their keys and values -> [B, Q, H * C].

    qkv [B, Q, (H + 2 K) C], or more or fewer heads by the settings (`AttentionSettings.encoded`),
    at consecutive positions [B, Q]; each token sees those before it. rope: `model.Context.rope`.
    cache and scales as of `Stored`, q_norm, k_norm and sinks as of `HeadWeights`. Padding is
    computed as any other token, and its keys and values are stored.

    reach: a bound of the positions: all that count are less. None: they may be any. Tokens from
    there on are stored, but what they attend to is undefined.
    last: int64 [B], each sequence's last token that is stored; None: all are. A cache with fewer
    positions than a sequence is a ring (ops/plain/ring.py), which padding must not overwrite.
    """
    (B, Q), layer = qkv.shape[:2], decode_settings(settings)
    K, C = layer.kv_heads, layer.head_dim
    rows, S = max(B, cache.shape[1]), cache.shape[3]  # further rows of the cache are not used
    check_shapes(
        qkv=(qkv, (B, Q, layer.projected)),
        positions=(positions, (B, Q)),
        cache=(cache, (2, rows, K, S, C)),
    )
    y = qkv.new_empty(B, Q, layer.heads * C)
    stored = Stored(cache if scales is None else cache.view(torch.int16), scales)
    weights, qkv = HeadWeights(q_norm, k_norm, sinks), qkv.contiguous()
    numbers = qkv.new_empty(0, dtype=torch.float32)
    args = qkv, rope, Place(positions, last), weights, stored
    divisions = divide(qkv, stored, layer, rope.shape[-1], reach)
    candidates = ((s, {"warps": WARPS}) for s in divisions)
    s, options = fit(attend_kernel, candidates, *args, Results(y, numbers, numbers))
    count = B * s.pairs * s.parts * s.stored_rows if s.parts > 1 else 0
    partial, sums = numbers.new_empty(count * C), numbers.new_empty(count * 2)
    results = Results(y, partial, sums)
    launch(attend_kernel, (s.pairs, B, s.parts), *args, results, settings=s, **options)
    if s.parts > 1:
        grid = layer.heads, C // s.columns, B * Q
        launch(merge_kernel, grid, qkv, positions, sinks, results, settings=s, warps=MERGE_WARPS)
    return y


@attend_tokens.register_fake
def _(
    qkv, rope, positions, cache, scales, q_norm, k_norm, sinks, settings, reach=None, last=None
) -> Tensor:
    layer = decode_settings(settings)
    return qkv.new_empty(*qkv.shape[:2], layer.heads * layer.head_dim)


@torch.library.custom_op("moe_fast::attend_int8", mutates_args=())
def attend_int8(
    q: Tensor, codes: Tensor, scales: Tensor, positions: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Attend with few queries of each sequence over an int8 cache, in P parts.

    q [B, Q, H, C] at consecutive positions [B, Q]; codes [2, B, K, S, C] and their scales
    [2, B, K, S, 1]. Return the arguments of `softmax.merge_partial`: fp32 y [B, K, P, M, C] and
    sums [B, K, P, M, 2]. Row query * G + h belongs to the h-th query head of the KV head; rows from
    Q * G on are undefined.
    """
    (B, Q, H, C), (rows, K, S) = q.shape, codes.shape[1:4]
    y, sums = empty_parts(q, codes)
    layer = AttentionSettings(H, K, C, 0, C**-0.5, window=window)
    stored, results = Stored(codes.view(torch.int16), scales), Results(None, y, sums)
    place = Place(positions.contiguous(), None)
    args = q.contiguous(), None, place, HeadWeights(), stored, results
    # Without PDL: the kernel waits for nothing.
    options = {"warps": 4 if H // K * Q <= 16 else 8, "pdl": False}
    candidates = int8_settings(layer, Q, S, rows, y.shape[2])
    s, options = fit(attend_kernel, ((s, options) for s in candidates), *args)
    launch(attend_kernel, (K, B, y.shape[2]), *args, settings=s, **options)
    return y, sums


def empty_parts(q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of `attend_int8`, not yet written."""
    (B, Q, H, C), K = q.shape, codes.shape[2]
    P = max(1, int(PROGRAMS * gpu_of(q.device).multiprocessors) // (B * K))
    y = q.new_empty(B, K, P, pow2(H // K * Q), C, dtype=torch.float32)
    return y, y.new_empty(*y.shape[:-1], 2)


@attend_int8.register_fake
def _(q, codes, scales, positions, window) -> tuple[Tensor, Tensor]:
    return empty_parts(q, codes)
