"""Attention over a long cache in Triton: an int8 cache, or the latent cache of DeepSeek.

Both kernels are Flash-Decoding (Dao et al. 2023): the positions are split among
programs, each program attends to its part, and `merge_partial` merges the partial
results. They read only blocks of positions that are in use, each once for all query
heads of a KV head.

Letters: B sequences, Q queries of each, S positions of the cache, H query heads, K KV
heads, C head dim, r rank of the latent, R rotary dim, P parts of the positions.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.attention.softmax import online_softmax
from ops.gpu import gpu_of
from ops.launch import fit_tiling, jit, tl, triton

PROGRAMS = 2  # for each multiprocessor, so that loads overlap arithmetic


def count_parts(rows: int, device: torch.device) -> int:
    """Return P for a launch in which each part has this many programs."""
    return max(1, int(PROGRAMS * gpu_of(device).multiprocessors) // rows)


# Grid [B, P, tiles of rows]: a program computes M of one sequence's Q * H rows over
# every P-th block of positions. All heads share the latent: its C numbers are both key
# and value, so each is loaded once and used twice. The R rotary numbers are part of the
# key alone, which is why a score is the sum of two products.
#
# (Here C is the rank of the latent, not the head dim.)
@jit
def _attend_latent(
    q,
    kv,
    scales,
    positions,
    y,
    sums,
    S: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    Q: tl.constexpr,
    INT8: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, c, r = tl.program_id(2) * M + tl.arange(0, M), tl.arange(0, C), tl.arange(0, R)
    is_row = row < Q * H
    position = tl.load(positions + sequence * Q + row // H, mask=is_row, other=0)
    last = tl.load(positions + sequence * Q + Q - 1)
    q_row = q + (sequence * Q * H + row)[:, None] * (C + R)
    queries = tl.load(q_row + c[None, :], mask=is_row[:, None], other=0.0)
    rotary_queries = tl.load(q_row + C + r[None, :], mask=is_row[:, None], other=0.0)
    row_max, row_sum = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, C], tl.float32)
    for block in range(part, last // BLOCK + 1, parts):
        key = block * BLOCK + tl.arange(0, BLOCK)
        kv_row = kv + (sequence * S + key)[:, None] * (C + R)
        latent = tl.load(kv_row + c[None, :]).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(latent))
        rotary_keys = tl.load(kv_row + C + r[None, :]).to(queries.dtype)
        scores = tl.dot(rotary_queries, tl.trans(rotary_keys), scores)
        scores *= (C + R) ** -0.5
        if INT8:
            scale = tl.load(scales + sequence * S + key).to(tl.float32)[None, :]
            scores *= scale
        scores = tl.where(position[:, None] >= key[None, :], scores, float("-inf"))
        weights, rescale, row_max, row_sum = online_softmax(scores, row_max, row_sum)
        if INT8:
            weights *= scale
        acc = acc * rescale[:, None] + tl.dot(weights.to(queries.dtype), latent)
    tile = (sequence * parts + part) * tl.num_programs(2) + tl.program_id(2)
    out = tile * M + tl.arange(0, M)
    tl.store(y + out[:, None] * C + c[None, :], acc)
    tl.store(sums + out * 2, row_max)
    tl.store(sums + out * 2 + 1, row_sum)


@torch.library.custom_op("moe_fast::attend_latent", mutates_args=())
def attend_latent(
    q: Tensor, kv: Tensor, scales: Tensor | None, positions: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Attend with few queries of each sequence over a latent cache, in P parts.

    q [B, Q, H, r + R] at rising positions [B, Q]; kv [1, B, 1, S, r + R], whose first r
    numbers are the values too; scales [1, B, 1, S, 1] of an int8 kv, else None. Return
    the arguments of `merge_partial`: fp32 y [B, P, rows, r] and sums [B, P, rows, 2].
    Row q * H + h belongs to query q and head h; rows from Q * H on are undefined. r and
    R are powers of two from 16 on, S a multiple of 32.
    """
    (B, Q, H, C), S = q.shape, kv.shape[3]
    y, sums = _attend_latent_fake(q, kv, scales, positions, rank)
    M = latent_tile_rows(Q * H)
    shape = dict(S=S, H=H, C=rank, R=C - rank, Q=Q, INT8=scales is not None)
    shape |= dict(M=M, num_warps=8, num_stages=2)
    scales = kv if scales is None else scales  # the kernel does not read it without INT8
    tensors = q.contiguous(), kv, scales, positions.contiguous(), y, sums
    tilings = (dict(BLOCK=block) for block in (32, 16) if block == 16 or kv.element_size() < 4)
    tiling = fit_tiling(_attend_latent, tilings, tensors, shape)
    _attend_latent[(B, y.shape[1], y.shape[2] // M)](*tensors, **shape, **tiling)
    return y, sums


def latent_tile_rows(rows: int) -> int:
    """M of `_attend_latent`: rows of queries in a program, at most what its registers hold."""
    return min(32, max(16, triton.next_power_of_2(rows)))


@attend_latent.register_fake
def _attend_latent_fake(q: Tensor, kv: Tensor, scales: Tensor | None, positions: Tensor, rank: int):
    (B, Q, H, _), M = q.shape, latent_tile_rows(q.shape[1] * q.shape[2])
    tiles = -(-Q * H // M)
    parts = count_parts(B * tiles, q.device)
    y = q.new_empty(B, parts, tiles * M, rank, dtype=torch.float32)
    return y, y.new_empty(*y.shape[:-1], 2)
