"""The gated delta rule with a decay for each channel: products and decayed tokens of all chunks.

Such a decay is a factor within the products of keys (Kimi Team 2025, Kimi Linear, section 3), and
no product of exp(G_i) and exp(-G_j), which overflows. Yang et al. (2024, Gated linear attention
transformers) divide a chunk further, and refer decays to the begin of a block. Here blocks have all
sizes: each pair of tokens j < i is in two neighboring blocks of one size, a power of two. With R,
the sum of g at the end of the first block, neither exp(G_i - R) nor exp(R - G_j) is above 1. So
there is one product of all tokens for each size, and no pair is computed alone.

Formulas, letters and the reference: ops/plain/gated_delta.py. The other kernels: delta_prompt.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention.delta_state import count_real, softplus
from ops.launch import jit, launch, tl


class Decayed(NamedTuple):
    """What `_decay_channels` makes of a chunk of T tokens: fp32, but queries are as q."""

    products: Tensor  # [B, H, chunks, T, T]: of keys with earlier ones
    queries: Tensor  # [B, H, chunks, T, Ck]: decayed since the chunk's begin
    begun: Tensor  # the same of keys
    keys: Tensor  # the same of keys, with the decay until the chunk's end; bf16 if q is
    rest: Tensor | None  # what keys in bf16 lack of fp32, bf16
    kept: Tensor  # [B, H, chunks, Ck]: the decay of the whole chunk


@jit
def _load_channels(tokens, key, offsets, is_real):
    """Load channels of q and k, fp32. key: of the chunk and head; offsets: of tokens, channels."""
    q = tl.load(tokens.q + key + offsets, mask=is_real, other=0.0).to(tl.float32)
    return q, tl.load(tokens.k + key + offsets, mask=is_real, other=0.0).to(tl.float32)


# Grid [chunks, H, B].
@jit
def _decay_channels(tokens, decayed, scores, totals, Q, QK_BATCH, QK_TOKEN, s: tl.constexpr):
    T: tl.constexpr = s.rows
    CK: tl.constexpr = s.key_dim
    chunk, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, c = tl.arange(0, T), tl.arange(0, s.block)[None, :]
    row, column = i[:, None], i[None, :]
    first, is_real = (sequence * s.heads + head) * tl.num_programs(0) + chunk, row < Q - chunk * T
    key = sequence * QK_BATCH + (head // s.sharing) * CK + chunk.to(tl.int64) * T * QK_TOKEN
    a = tokens.ba + (sequence * Q + chunk * T) * s.gate_row + s.shares + head * CK
    bias, rate = tokens.dt_bias + head * CK, tl.exp(tl.load(tokens.a_log + head).to(tl.float32))
    changes = row < count_real(tokens.last, sequence, Q) - chunk * T
    totals += first * T * CK
    place = first * T * T + (row * T + column)
    for begin in range(0, CK, s.block):
        steps = tl.load(a + begin + (row * s.gate_row + c), mask=changes, other=0.0).to(tl.float32)
        steps = softplus(steps + tl.load(bias + begin + c).to(tl.float32))
        decays = tl.where(changes, -rate * steps, 0.0)
        tl.store(totals + begin + (row * CK + c), tl.cumsum(decays, 0))
    q_products, k_products = tl.zeros([T, T], tl.float32), tl.zeros([T, T], tl.float32)
    tl.debug_barrier()  # other threads have stored the sums
    for level in range(s.levels):  # blocks of 2**level
        end = (((row >> level) | 1) << level) - 1  # the first block's last token
        end = tl.broadcast_to(end, [T, s.block])
        by_queries, by_keys = tl.zeros([T, T], tl.float32), tl.zeros([T, T], tl.float32)
        for begin in range(0, CK, s.block):
            q, k = _load_channels(tokens, key + begin, row * QK_TOKEN + c, is_real)
            total = tl.load(totals + begin + (row * CK + c))
            decay = tl.exp(-tl.abs(total - tl.gather(total, end, 0)))
            k *= decay
            by_queries = tl.dot(q * decay, tl.trans(k), by_queries, input_precision=s.precision)
            by_keys = tl.dot(k, tl.trans(k), by_keys, input_precision=s.precision)
        is_pair = (row > column) & ((row ^ column) >> level == 1)
        q_products = tl.where(is_pair, by_queries, q_products)
        k_products = tl.where(is_pair, by_keys, k_products)
    zeros = tl.zeros([T], tl.float32)
    qq, kk, qk = zeros, zeros, zeros
    for begin in range(0, CK, s.block):
        q, k = _load_channels(tokens, key + begin, row * QK_TOKEN + c, is_real)
        qq, kk, qk = qq + tl.sum(q * q, 1), kk + tl.sum(k * k, 1), qk + tl.sum(q * k, 1)
    q_scale, k_scale = tl.rsqrt(qq + 1e-6) * s.query_scale, tl.rsqrt(kk + 1e-6)
    scale, q_products = k_scale[None, :], tl.where(row == column, qk[:, None], q_products)
    tl.store(scores + place, q_products * q_scale[:, None] * scale)
    tl.store(decayed.products + place, k_products * k_scale[:, None] * scale)
    for begin in range(0, CK, s.block):
        q, k = _load_channels(tokens, key + begin, row * QK_TOKEN + c, is_real)
        total = tl.load(totals + begin + (row * CK + c))
        whole = tl.load(totals + (T - 1) * CK + begin + c)
        q *= tl.exp(total) * q_scale[:, None]
        k *= k_scale[:, None]
        at = first * T * CK + begin + (row * CK + c)
        tl.store(decayed.queries + at, q.to(decayed.queries.dtype.element_ty))
        tl.store(decayed.begun + at, k * tl.exp(total))
        k *= tl.exp(whole - total)
        stored = k.to(decayed.keys.dtype.element_ty)
        tl.store(decayed.keys + at, stored)
        if decayed.rest is not None:
            tl.store(decayed.rest + at, (k - stored.to(tl.float32)).to(tl.bfloat16))
        tl.store(decayed.kept + first * CK + begin + c, tl.exp(whole))


def decay_channels(
    tokens: NamedTuple, scores: Tensor, totals: Tensor, sizes: tuple[int, ...], settings
) -> Decayed:
    """Fill scores [B, H, chunks, T, T], of queries with keys, and return what is `Decayed`.

    tokens, settings: as in ops/attention/delta_prompt.py. totals [B, H, chunks, T, Ck], fp32: a
    scratch. sizes: tokens, and the distances of sequences and of tokens in q and k.
    """
    B, H, chunks, _, CK = totals.shape
    queries = totals.new_empty(totals.shape, dtype=tokens.q.dtype)
    begun, keys, rest = torch.empty_like(totals), torch.empty_like(totals), None
    if queries.dtype == torch.bfloat16:
        keys, rest = torch.empty_like(queries), torch.empty_like(queries)
    made = torch.empty_like(scores), queries, begun, keys, rest
    decayed = Decayed(*made, totals.new_empty(B, H, chunks, CK))
    tensors = tokens, decayed, scores, totals, *sizes
    launch(_decay_channels, (chunks, H, B), *tensors, settings=settings, stages=1)
    return decayed
