"""Attention over a long int8 cache in Triton.

The kernel is Flash-Decoding (Dao et al. 2023): the positions are split among
programs, each program attends to its part, and `merge_partial` merges the partial
results. It reads only blocks of positions that are in use, each once for all query
heads of a KV head.

Letters: B sequences, Q queries of each, S positions of the cache, H query heads, K KV
heads, C head dim, P parts of the positions.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.attention.decode_attention import online_softmax
from ops.gpu import gpu_of
from ops.launch import fit_tiling, jit, tl, triton

PROGRAMS = 2  # for each multiprocessor, so that loads overlap arithmetic


def count_parts(rows: int, device: torch.device) -> int:
    """Return P for a launch in which each part has this many programs."""
    return max(1, PROGRAMS * gpu_of(device).multiprocessors // rows)


def merge_partial(
    y: Tensor, sums: Tensor, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Merge attention over parts of the positions -> fp32 [..., rows, C].

    y [..., P, rows, C], not yet divided by the sum of weights. sums [..., P, rows, 2]:
    the maximum score and the sum of exp(score - maximum). A part without positions has
    -inf and 0.

    return_lse: return also the log-sum-exp of each row's scores [..., rows]. A sink s
    makes the result y * sigmoid(lse - s).
    """
    maximum, total = sums.unbind(-1)
    largest = maximum.amax(-2, keepdim=True)
    share = (maximum - largest).exp()
    total = (total * share).sum(-2)
    y = (y * share.unsqueeze(-1)).sum(-3) / total.unsqueeze(-1)
    return (y, largest.squeeze(-2) + total.log()) if return_lse else y


# Grid [B * K, P]: a program computes one KV head of one sequence over every P-th block
# of positions that its queries see. Each block is used for M rows: the KV head's query
# heads (G = H / K) times Q queries, padded to the 16 rows of a tensor-core tile.
#
# Codes are converted to q's dtype for the tensor cores. A position's scale is a factor
# of its score (keys) or of its weight (values), so codes are never dequantized in
# memory.
@jit
def _attend_int8(
    q,
    codes,
    scales,
    positions,
    y,
    sums,
    S: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    Q: tl.constexpr,
    WINDOW: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    V_OFFSET: tl.constexpr,
):
    pair, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    G: tl.constexpr = H // K
    row, c = tl.arange(0, M), tl.arange(0, C)
    query, is_row = row % Q, row < G * Q
    token = pair // K * Q + query
    position = tl.load(positions + token, mask=is_row, other=0)
    last = tl.load(positions + pair // K * Q + Q - 1)
    first = tl.maximum(tl.load(positions + pair // K * Q) - WINDOW + 1, 0) // BLOCK
    head = pair % K * G + row // Q
    q_row = q + (token * H + head)[:, None] * C
    queries = tl.load(q_row + c[None, :], mask=is_row[:, None], other=0.0)
    row_max, row_sum = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, C], tl.float32)
    for block in range(first + part, last // BLOCK + 1, parts):
        key = block * BLOCK + tl.arange(0, BLOCK)
        entry = pair * S + key
        k = tl.load(codes + entry[:, None] * C + c[None, :]).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(k))
        scores *= (tl.load(scales + entry).to(tl.float32) * C**-0.5)[None, :]
        distance = position[:, None] - key[None, :]
        scores = tl.where((distance >= 0) & (distance < WINDOW), scores, float("-inf"))
        weights, rescale, row_max, row_sum = online_softmax(scores, row_max, row_sum)
        weights *= tl.load(scales + V_OFFSET + entry).to(tl.float32)[None, :]
        v = tl.load(codes + V_OFFSET * C + entry[:, None] * C + c[None, :]).to(queries.dtype)
        acc = acc * rescale[:, None] + tl.dot(weights.to(queries.dtype), v)
    out = (pair * parts + part) * M + row
    tl.store(y + out[:, None] * C + c[None, :], acc)
    tl.store(sums + out * 2, row_max)
    tl.store(sums + out * 2 + 1, row_sum)


@torch.library.custom_op("moe_fast::attend_int8", mutates_args=())
def attend_int8(
    q: Tensor, codes: Tensor, scales: Tensor, positions: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Attend with few queries of each sequence over an int8 cache, in P parts.

    q [B, Q, H, C] at rising positions [B, Q]; codes [2, B, K, S, C] and their scales
    [2, B, K, S, 1]. Return the arguments of `merge_partial`: fp32 y [B, K, P, M, C] and
    sums [B, K, P, M, 2]. Row h * Q + q belongs to the h-th query head of the KV head;
    rows from H / K * Q on are undefined. S is a multiple of 128.
    """
    (B, Q, H, C), (K, S) = q.shape, codes.shape[2:4]
    y, sums = _attend_int8_fake(q, codes, scales, positions, window)
    shape = dict(S=S, H=H, K=K, C=C, Q=Q, WINDOW=window, V_OFFSET=codes.shape[1] * K * S)
    shape |= dict(M=y.shape[3], num_warps=4 if y.shape[3] == 16 else 8, num_stages=2)
    tensors = q.contiguous(), codes, scales, positions.contiguous(), y, sums
    tilings = (dict(BLOCK=block) for block in (128, 64, 32, 16))
    tiling = fit_tiling(_attend_int8, tilings, tensors, shape)
    _attend_int8[(B * K, y.shape[2])](*tensors, **shape, **tiling)
    return y, sums


@attend_int8.register_fake
def _attend_int8_fake(q: Tensor, codes: Tensor, scales: Tensor, positions: Tensor, window: int):
    (B, Q, H, C), K = q.shape, codes.shape[2]
    M = max(16, triton.next_power_of_2(H // K * Q))
    parts = count_parts(B * K, q.device)
    y = q.new_empty(B, K, parts, M, C, dtype=torch.float32)
    return y, y.new_empty(*y.shape[:-1], 2)
