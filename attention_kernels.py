"""Attention as Triton kernels: what one token needs of a short cache at once; a long cache in 8 bits, or compressed."""

from __future__ import annotations  # the annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from kernels import jit, starts_early, tl, triton


@jit
def _weigh(scores, largest, total):
    """A softmax over one block of positions after the other: the block's scores [M, N], the largest score and the sum
    of weights so far [M] -> the block's weights, by what to multiply all that was before, and the two with it."""
    now = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(now == float("-inf"), 0.0, now)
    weights, kept = tl.exp(scores - base[:, None]), tl.exp(largest - base)
    return weights, kept, now, total * kept + tl.sum(weights, 1)


# One token over a short cache ---------------------------------------------------------------------------------------
#
# What there is to read is so little that a step waits for kernels to start, not for memory. Here one does all that is
# between the products, and begins to read the cache before the one before it has made the queries.


@jit
def _turned(x, weight, c, other, cos, sin, C: tl.constexpr, EPS: tl.constexpr, CLIP: tl.constexpr, NORM: tl.constexpr):
    """A head's numbers [ROWS, C], clipped, normed and turned by their position, fp32."""
    # The compiler does not see through the indices that 8 neighbours are one aligned load.
    turned = tl.load(tl.max_contiguous(tl.multiple_of(x + other, (1, 16)), (1, 8))).to(tl.float32)
    x = tl.load(x + c).to(tl.float32)
    if CLIP > 0:
        turned, x = tl.clamp(turned, -CLIP, CLIP), tl.clamp(x, -CLIP, CLIP)
    if NORM:
        unit = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / C + EPS)
        turned *= unit * tl.load(weight + other).to(tl.float32)
        x *= unit * tl.load(weight + c).to(tl.float32)
    return x * cos + turned * sin


@jit
def _kept(cache, begin, end, C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr):
    """Keys or values of a block of positions from `begin` on, [N, ROWS, C], zeros from `end` on."""
    key = begin + tl.arange(0, N * ROWS)[:, None]
    return tl.reshape(tl.load(cache + key * C + tl.arange(0, C)[None, :], mask=key < end, other=0.0), [N, ROWS, C])


@jit
def _attend_token(x, rope, q_norm, k_norm, sinks, positions, cache, y, S: tl.constexpr, H: tl.constexpr,
                  K: tl.constexpr, C: tl.constexpr, TURNING: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
                  CLIP: tl.constexpr, WINDOW: tl.constexpr, NORM: tl.constexpr, SINKS: tl.constexpr, N: tl.constexpr,
                  ROWS: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    # A program has one query head of one sequence; the first of a KV head's also writes its key and value. A block of
    # positions is a grid [N, ROWS]: lanes that have a row have all of its positions, and a softmax of their own, so
    # that warps wait for each other only at the end. What is the same for all rows is computed by each.
    sequence, head, row = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.arange(0, ROWS)
    group, c = head // (H // K), row[:, None] * 0 + tl.arange(0, C)[None, :]
    other = tl.where(c < TURNING, (c + TURNING // 2) % TURNING, c)
    rope += sequence * 2 * C + c
    cos, sin = tl.load(rope), tl.load(rope + C)
    at = tl.load(positions + sequence).to(tl.int32)
    cache += (sequence * K + group) * S * C
    first = tl.maximum(at - WINDOW + 1, 0) // (N * ROWS) * (N * ROWS) if WINDOW < S else 0
    # Up to S, not `at`: whose loading this does not wait for where there is no window.
    k, v = _kept(cache, first, S, C, N, ROWS), _kept(cache + VALUES, first, S, C, N, ROWS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x += sequence * (H + 2 * K) * C
    value = tl.load(x + (H + K + group) * C + c)
    if CLIP > 0:
        value = tl.clamp(value.to(tl.float32), -CLIP, CLIP).to(value.dtype)
    own = _turned(x + (H + group) * C, k_norm, c, other, cos, sin, C, EPS, CLIP, NORM).to(value.dtype)
    query = _turned(x + head * C, q_norm, c, other, cos, sin, C, EPS, CLIP, NORM) * SCALE
    alone = row == 0  # which has the token's own position too; it is not in the cache yet
    if head % (H // K) == 0:
        tl.store(cache + at * C + c, own, mask=alone[:, None])
        tl.store(cache + VALUES + at * C + c, value, mask=alone[:, None])
    largest = tl.where(alone, tl.sum(query * own.to(tl.float32), 1), float("-inf"))  # [ROWS]
    total = tl.where(alone, 1.0, 0.0)
    found = tl.where(alone[:, None], value.to(tl.float32), 0.0)  # [ROWS, C]
    for begin in range(first, at, N * ROWS):
        key = begin + tl.arange(0, N)[:, None] * ROWS + row[None, :]
        scores = tl.sum(k.to(tl.float32) * query[None, :, :], 2)
        k = _kept(cache, begin + N * ROWS, at, C, N, ROWS)
        scores = tl.where((key < at) & (key > at - WINDOW), scores, float("-inf"))
        weights, before, largest, total = _weigh(tl.trans(scores), largest, total)
        found = found * before[:, None] + tl.sum(v.to(tl.float32) * tl.trans(weights)[:, :, None], 0)
        v = _kept(cache + VALUES, begin + N * ROWS, at, C, N, ROWS)
    most = tl.max(largest, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        most = tl.maximum(most, sink)
    share = tl.exp(largest - most)
    total = tl.sum(total * share, 0)
    if SINKS:
        total += tl.exp(sink - most)
    y += (sequence * H + head) * C + tl.arange(0, C)
    tl.store(y, (tl.sum(found * share[:, None], 0) / total).to(y.dtype.element_ty))


@torch.library.custom_op("moe_fast::attend_token", mutates_args=("cache",))
def attend_token(x: Tensor, rope: Tensor, positions: Tensor, cache: Tensor, q_norm: Tensor | None,
                 k_norm: Tensor | None, sinks: Tensor | None, turning: int, scale: float, eps: float, clip: float,
                 window: int) -> Tensor:  # fmt: skip
    """x [B, 1, (H + 2 K) C], the queries, keys and values of a token at positions [B, 1], and a cache [2, B, K, S, C],
    in which the latter two are put -> [B, 1, H * C]. C is a power of two, from 16 to 256.

    rope: `attention.Context.rope`, which turns the first `turning` numbers of queries and keys. q_norm, k_norm [C]:
    weights of an RMS norm of each head before that, with this eps; clip: what bounds all of x before that, or 0.
    scale: of the products of queries and keys. sinks [H]: as `attention.attend` has them. window: how many positions
    a token sees, itself included. What the cache holds is numbers, also where nobody looks. On Hopper it is set up, and
    reads all but x, while the kernel before it ends: that one must not write them.
    """
    (_, B, K, S, C), y, early = cache.shape, _attend_token_fake(x, rope, positions, cache), starts_early(x)
    H, size = y.shape[-1] // C, cache.element_size()
    _attend_token[H, B](
        x.contiguous(), rope, x if q_norm is None else q_norm, x if k_norm is None else k_norm,
        x if sinks is None else sinks, positions, cache, y, S=S, H=H, K=K, C=C, TURNING=turning, SCALE=scale, EPS=eps,
        CLIP=clip, WINDOW=window, NORM=q_norm is not None, SINKS=sinks is not None, N=8, ROWS=4096 // (C * size),
        VALUES=B * K * S * C, PDL=early, launch_pdl=early, num_warps=8,
    )  # fmt: skip
    return y


@attend_token.register_fake
def _attend_token_fake(x: Tensor, rope: Tensor, positions: Tensor, cache: Tensor, *rest) -> Tensor:
    _, B, K, _, C = cache.shape
    return x.new_empty(B, 1, x.shape[-1] - 2 * K * C)


# Long caches --------------------------------------------------------------------------------------------------------

PROGRAMS = 256  # that share the positions: two for each SM


@jit
def _attend_int8(q, codes, scales, positions, y, sums, S: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
                 C: tl.constexpr, Q: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
                 VALUES: tl.constexpr):  # fmt: skip
    # A program has one sequence's KV head, and every so manieth block of the positions that its queries see.
    pair, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    G: tl.constexpr = H // K
    row, c = tl.arange(0, M), tl.arange(0, C)
    query, present = row % Q, row < G * Q  # rows: the heads of a KV head, and of each all queries
    place = pair // K * Q + query
    at = tl.load(positions + place, mask=present, other=0)
    last = tl.load(positions + pair // K * Q + Q - 1)
    first = tl.maximum(tl.load(positions + pair // K * Q) - WINDOW + 1, 0) // BLOCK
    head = pair % K * G + row // Q
    queries = tl.load(q + (place * H + head)[:, None] * C + c[None, :], mask=present[:, None], other=0.0)
    largest, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    found = tl.zeros([M, C], tl.float32)
    for block in range(first + part, last // BLOCK + 1, parts):
        key = block * BLOCK + tl.arange(0, BLOCK)
        line = pair * S + key
        k = tl.load(codes + line[:, None] * C + c[None, :]).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(k)) * (tl.load(scales + line).to(tl.float32) * C**-0.5)[None, :]
        distance = at[:, None] - key[None, :]
        scores = tl.where((distance >= 0) & (distance < WINDOW), scores, float("-inf"))
        weights, kept, largest, total = _weigh(scores, largest, total)
        weights *= tl.load(scales + VALUES + line).to(tl.float32)[None, :]
        v = tl.load(codes + VALUES * C + line[:, None] * C + c[None, :]).to(queries.dtype)
        found = found * kept[:, None] + tl.dot(weights.to(queries.dtype), v)
    line = (pair * parts + part) * M + row
    tl.store(y + line[:, None] * C + c[None, :], found)
    tl.store(sums + line * 2, largest)
    tl.store(sums + line * 2 + 1, total)


@torch.library.custom_op("moe_fast::attend_int8", mutates_args=())
def attend_int8(q: Tensor, codes: Tensor, scales: Tensor, positions: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Queries [B, Q, H, C] at rising positions [B, Q] over codes [2, B, K, S, C] with scales [2, B, K, S, 1].

    -> fp32 [B, K, parts, M, C], and [.., M, 2] of the largest score and the sum of exp(score less that), by parts of
    the positions; row h * Q + q of M is of the KV head's h-th head, others are undefined. Only blocks in use are read,
    each once (Dao et al. 2023, "Flash-Decoding"). S is a multiple of 128.
    """
    (B, Q, H, C), (K, S) = q.shape, codes.shape[2:4]
    y, sums = _attend_int8_fake(q, codes, scales, positions, window)
    _attend_int8[(B * K, y.shape[2])](
        q.contiguous(), codes, scales, positions.contiguous(), y, sums, S=S, H=H, K=K, C=C, Q=Q, WINDOW=window,
        M=y.shape[3], BLOCK=128, VALUES=B * K * S, num_warps=4 if y.shape[3] == 16 else 8, num_stages=2,
    )  # fmt: skip
    return y, sums


@attend_int8.register_fake
def _attend_int8_fake(q: Tensor, codes: Tensor, scales: Tensor, positions: Tensor, window: int):
    (B, Q, H, C), K = q.shape, codes.shape[2]
    M = max(16, triton.next_power_of_2(H // K * Q))
    y = q.new_empty(B, K, max(1, PROGRAMS // (B * K)), M, C, dtype=torch.float32)
    return y, y.new_empty(*y.shape[:-1], 2)


@jit
def _attend_latent(q, kv, scales, positions, y, sums, S: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
                   R: tl.constexpr, Q: tl.constexpr, INT8: tl.constexpr, M: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    # A program has M of one sequence's Q * H rows of queries, and every so manieth block of the positions they see.
    sequence, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, c, r = tl.program_id(2) * M + tl.arange(0, M), tl.arange(0, C), tl.arange(0, R)
    present = row < Q * H
    at = tl.load(positions + sequence * Q + row // H, mask=present, other=0)
    last = tl.load(positions + sequence * Q + Q - 1)
    of_row = q + (sequence * Q * H + row)[:, None] * (C + R)
    queries = tl.load(of_row + c[None, :], mask=present[:, None], other=0.0)
    turned = tl.load(of_row + C + r[None, :], mask=present[:, None], other=0.0)
    largest, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    found = tl.zeros([M, C], tl.float32)
    for block in range(part, last // BLOCK + 1, parts):
        key = block * BLOCK + tl.arange(0, BLOCK)
        of_key = kv + (sequence * S + key)[:, None] * (C + R)
        latent = tl.load(of_key + c[None, :]).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(latent))
        scores = tl.dot(turned, tl.trans(tl.load(of_key + C + r[None, :]).to(queries.dtype)), scores)
        scores *= (C + R) ** -0.5
        if INT8:
            scale = tl.load(scales + sequence * S + key).to(tl.float32)[None, :]
            scores *= scale
        scores = tl.where(at[:, None] >= key[None, :], scores, float("-inf"))
        weights, kept, largest, total = _weigh(scores, largest, total)
        if INT8:
            weights *= scale
        found = found * kept[:, None] + tl.dot(weights.to(queries.dtype), latent)
    line = ((sequence * parts + part) * tl.num_programs(2) + tl.program_id(2)) * M + tl.arange(0, M)
    tl.store(y + line[:, None] * C + c[None, :], found)
    tl.store(sums + line * 2, largest)
    tl.store(sums + line * 2 + 1, total)


@torch.library.custom_op("moe_fast::attend_latent", mutates_args=())
def attend_latent(q: Tensor, kv: Tensor, scales: Tensor | None, positions: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Queries [B, Q, H, r + R] at rising positions [B, Q] over kv [1, B, 1, S, r + R], whose first r are values too.

    scales: [1, B, 1, S, 1] of an int8 kv. -> fp32 [B, parts, rows, r], and [.., rows, 2] of the largest score and the
    sum of exp(score less that), as `attend_int8`; row q * H + h, others are undefined. Only blocks in use are read,
    once for up to 32 rows. r and R are powers of two from 16 on, S a multiple of 32.
    """
    (B, Q, H, C), S = q.shape, kv.shape[3]
    y, sums = _attend_latent_fake(q, kv, scales, positions, rank)
    M = latent_rows(Q * H)
    _attend_latent[(B, y.shape[1], y.shape[2] // M)](
        q.contiguous(), kv, kv if scales is None else scales, positions.contiguous(), y, sums, S=S, H=H, C=rank,
        R=C - rank, Q=Q, INT8=scales is not None, M=M, BLOCK=32 if kv.element_size() < 4 else 16,
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return y, sums


def latent_rows(rows: int) -> int:
    """How many of so many rows of queries a program has."""
    return min(32, max(16, triton.next_power_of_2(rows)))


@attend_latent.register_fake
def _attend_latent_fake(q: Tensor, kv: Tensor, scales: Tensor | None, positions: Tensor, rank: int):
    (B, Q, H, _), M = q.shape, latent_rows(q.shape[1] * q.shape[2])
    programs = -(-Q * H // M)
    y = q.new_empty(B, max(1, PROGRAMS // (B * programs)), programs * M, rank, dtype=torch.float32)
    return y, y.new_empty(*y.shape[:-1], 2)
