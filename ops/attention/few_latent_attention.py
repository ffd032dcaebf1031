"""Latent attention for a few queries of each sequence: three kernels, as for one.

    _map_tokens      the heads' queries times their key weights; cache append of all tokens
    _attend_rows     RoPE, attention over a part of the positions
    _merge_tokens    merge of the parts, times each head's value weights

They differ from those of ops/attention/latent_decode_attention.py, whose letters these are, in two ways. The
first kernel appends, so that a query finds the latents of the call's earlier queries in the cache.
And a program of the second attends with M rows, a row being one head of one query: each has a last
position of its own. Q queries of each sequence, T = B Q tokens.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.attention.heads import load_rotated, load_rotation
from ops.attention.latent_decode_attention import (
    Tile,
    _append_own,
    _load_latents,
    _load_own,
    _merge_parts,
    _score_latents,
    fit_blocks,
    sizes_of,
)
from ops.attention.softmax import online_softmax, parts_in_use
from ops.launch import jit, supports_pdl, tl, triton

MAX_QUERIES = 64
TOKENS_AT_ONCE = 8  # T up to which each token has programs of its own


# Grid [r / COLUMNS, H + 1, T / EACH]: a program computes COLUMNS numbers of one head for EACH
# tokens. Its weights, a part of the head's [N, r] with r contiguous, are in flight before the wait.
# The last row of programs has no head: the first one of it appends its tokens to the cache.
@jit
def _map_tokens(
    q,
    kv,
    wkv,
    rope,
    kv_norm,
    positions,
    cache,
    scales,
    mapped,
    TOKENS: tl.constexpr,
    Q: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    WKV_ROWS: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    INT8: tl.constexpr,
    PADDED_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    head, first = tl.program_id(1), tl.program_id(2).to(tl.int64) * EACH
    row, c = tl.arange(0, PADDED_N), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = (head * WKV_ROWS + row)[:, None] * RANK + c[None, :]
    inside = row < tl.where(head < H, N, 0)
    weights = tl.load(wkv + at, mask=inside[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for n in range(EACH):
        token = tl.minimum(first + n, TOKENS - 1)  # the last one perhaps several times
        if head < H:
            own = q + token * Q_STRIDE + head * (N + R) + row
            query = tl.load(own, mask=inside, other=0.0)
            out = tl.sum(weights.to(tl.float32) * query.to(tl.float32)[:, None], 0)
            result = mapped + (token * H + head) * RANK + c
            tl.store(result, out.to(mapped.dtype.element_ty))
        elif tl.program_id(0) == 0:
            rotation = load_rotation(rope, token, tl.arange(0, R)[None, :], R, R, 2 * R, 0)
            own, own_key = _load_own(kv + token * KV_STRIDE, kv_norm, rotation, R, RANK, EPS)
            first_row = token // Q * S
            _append_own(
                own,
                own_key,
                cache + first_row * (RANK + R),
                scales + first_row,
                tl.load(positions + token),
                R,
                RANK,
                INT8,
            )


@jit
def _count_token_parts(
    positions,
    sequence,
    Q: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return how many positions a sequence's last query sees, and `parts_in_use` of these."""
    seen = tl.load(positions + sequence * Q + Q - 1).to(tl.int32) + 1
    _, end, parts = parts_in_use(seen, S, P, 1, S, BLOCK)  # a window of S is none
    return seen, end, parts


# Grid [P, Q H / M, B]: a program attends with M rows to every P-th block of positions. A row that
# sees none of them has the largest score -inf, and no weight in the merge.
@jit
def _attend_rows(
    mapped,
    q,
    rope,
    positions,
    cache,
    scales,
    partial,
    sums,
    Q: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    P: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    INT8: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    part, sequence = tl.program_id(0), tl.program_id(2).to(tl.int64)
    seen, end, parts = _count_token_parts(positions, sequence, Q, S, P, BLOCK)
    if part >= parts:
        return
    cache += sequence * S * (RANK + R)
    scales += sequence * S
    row, c = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, RANK)[None, :]
    head, token = row % H, sequence * Q + tl.minimum(row // H, Q - 1)
    position = tl.load(positions + token).to(tl.int32)
    DTYPE: tl.constexpr = q.dtype.element_ty
    rotation = load_rotation(rope, token[:, None], tl.arange(0, R)[None, :], R, R, 2 * R, 0)
    q += (token * Q_STRIDE + head * (N + R) + N)[:, None]
    rotated = load_rotated(q, rotation, R).to(DTYPE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    query = tl.load(mapped + (token * H + head)[:, None] * RANK + c)
    row_max, row_sum = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, RANK], tl.float32)
    for block in tl.range(part, end, parts, num_stages=STAGES):
        loaded = _load_latents(cache, scales, block, seen, RANK, R, BLOCK, INT8)
        scores, latents = _score_latents(query, rotated, loaded, SCALE, INT8)
        key = block * BLOCK + tl.arange(0, BLOCK)
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        weights, rescale, row_max, row_sum = online_softmax(scores, row_max, row_sum)
        if INT8:
            weights *= loaded[2][None, :]
        acc = tl.dot(weights.to(DTYPE), latents, acc=acc * rescale[:, None])
    at = (sequence * P + part) * (Q * H) + row
    tl.store(partial + at[:, None] * RANK + c, acc, mask=(row < Q * H)[:, None])
    tl.store(sums + at * 2, row_max, mask=row < Q * H)
    tl.store(sums + at * 2 + 1, row_sum, mask=row < Q * H)


# Grid [V / VALUES, H, T / EACH]: a program computes VALUES numbers of one head for EACH tokens.
@jit
def _merge_tokens(
    wkv,
    positions,
    partial,
    sums,
    y,
    TOKENS: tl.constexpr,
    Q: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    head, first = tl.program_id(1), tl.program_id(2).to(tl.int64) * EACH
    row = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    at = (head * (N + V) + N + row)[:, None] * RANK + tl.arange(0, RANK)[None, :]
    weights = tl.load(wkv + at, mask=(row < V)[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # at once: ops/products/experts.py
        tl.extra.cuda.gdc_wait()
    for n in range(EACH):
        token = tl.minimum(first + n, TOKENS - 1)  # the last one perhaps several times
        sequence = token // Q
        _, _, parts = _count_token_parts(positions, sequence, Q, S, P, BLOCK)
        own = (sequence * P * Q + token % Q) * H + head
        _, total, acc = _merge_parts(partial, sums, own, parts, Q * H, RANK, AT_ONCE)
        mean = (acc / total[:, None]).to(y.dtype.element_ty).to(tl.float32)
        out = tl.sum(weights.to(tl.float32) * mean, 1)
        result = y + (token * H + head) * V + row
        tl.store(result, out.to(y.dtype.element_ty), mask=row < V)


def attend_latent_tokens(
    q: Tensor,
    kv: Tensor,
    rope: Tensor,
    positions: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    wkv: Tensor,
    kv_norm: Tensor,
    eps: float,
    scale: float,
    tile: Tile | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Attend with Q tokens of each sequence, and append their latents -> [T, H * V].

    As `latent_decode_attention.attend_latent_token`, but q [T, H * (N + R)], kv [T, r + R] and
    positions [B, Q], which rise by one. With PDL, weights alone are read while the previous kernel
    runs.
    """
    (H, N, R, rank, V), (B, Q) = sizes_of(q, cache, wkv), positions.shape
    T, S = len(q), cache.shape[3]
    pdl = supports_pdl(q) if pdl is None else pdl
    tile = tile or Tile(stages=2)
    columns, values = min(tile.columns, rank), min(tile.values, triton.next_power_of_2(V))
    M = min(32, max(16, triton.next_power_of_2(Q * H)))
    tiles, each = triton.cdiv(Q * H, M), triton.cdiv(T, TOKENS_AT_ONCE)
    mapped = q.new_empty(T, H, rank)
    shape = dict(Q=Q, S=S, H=H, N=N, RANK=rank, PDL=pdl, launch_pdl=pdl)
    numbers = dict(R=R, Q_STRIDE=q.stride(0), EPS=eps, INT8=scales is not None)
    stored_scales = cache if scales is None else scales
    given = mapped, q, rope, positions, cache, stored_scales
    attend = shape | numbers | dict(SCALE=scale, M=M, num_warps=8)
    tiling = fit_blocks(_attend_rows, tile, (B, tiles, S), given, attend)
    P = tiling["P"]
    partial = q.new_empty(B, P, Q * H, rank, dtype=torch.float32)
    sums, y = partial.new_empty(B, P, Q * H, 2), q.new_empty(T, H * V)
    _map_tokens[rank // columns, H + 1, triton.cdiv(T, each)](
        *(q, kv, wkv, rope, kv_norm, positions, cache, stored_scales, mapped),
        **shape,
        **numbers,
        TOKENS=T,
        WKV_ROWS=N + V,
        KV_STRIDE=kv.stride(0),
        PADDED_N=triton.next_power_of_2(N),
        COLUMNS=columns,
        EACH=each,
        num_warps=4,
    )
    _attend_rows[P, tiles, B](*given, partial, sums, **attend, **tiling)
    _merge_tokens[triton.cdiv(V, values), H, triton.cdiv(T, each)](
        *(wkv, positions, partial, sums, y),
        **shape,
        TOKENS=T,
        V=V,
        P=P,
        BLOCK=tiling["BLOCK"],
        VALUES=values,
        AT_ONCE=16,
        EACH=each,
        num_warps=max(1, rank // 128),
    )
    return y
