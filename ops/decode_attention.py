"""Decode attention over a short cache: RoPE, cache append and attention in one kernel.

Up to a few hundred positions a decode step waits for kernel launches, not for memory.
One kernel therefore does everything between the products `wqkv` and `wo`. With
programmatic dependent launch (PDL, Hopper and newer) it loads the cache while `wqkv` is
running.

Letters: B sequences, S positions of the cache, H query heads, K KV heads, C head dim.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from typing import NamedTuple

import torch
from torch import Tensor

from ops.jit import add_both, jit, supports_pdl, tl


@jit
def online_softmax(scores, row_max, row_sum):
    """Add one block of positions to a running softmax (Milakov & Gimelshein 2018, algorithm 3).

    scores [M, N] of the block; row_max, row_sum [M]: the maximum score and the sum of
    exp(score - row_max) so far. Return the block's weights [M, N], the factor [M] that
    rescales all accumulated so far, and the new row_max and row_sum. All scores of a row
    may be -inf.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp(scores - base[:, None])
    rescale = tl.exp(row_max - base)
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


@jit
def _load_rotation(
    rope,
    sequence,
    c,
    C: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    ROPE_BEGIN: tl.constexpr,
):
    """Load RoPE of a sequence's token for the numbers c [SPLITS, C] of a head.

    Return c, the index of the number that RoPE pairs each with, its cosine and its
    signed sine.
    """
    partner = tl.where(c < ROTARY_DIM, (c + ROTARY_DIM // 2) % ROTARY_DIM, c)
    rope += sequence * ROPE_WIDTH + ROPE_BEGIN + c
    cos, sin = tl.load(rope), tl.load(rope + C)
    return c, partner, cos, sin


@jit
def _sum_squares(x, WIDTH: tl.constexpr):
    """Sum the squares of the WIDTH numbers at x -> fp32 [2048], whose sum is theirs."""
    number = tl.arange(0, 2048)
    squares = tl.zeros([2048], tl.float32)
    for begin in tl.static_range(0, WIDTH, 2048):
        some = tl.load(x + begin + number, mask=begin + number < WIDTH, other=0.0).to(tl.float32)
        squares += some * some
    return squares


@jit
def _inverse_rms(q, k, Q_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Return 1 / RMS of the numbers at q, and of those at k. Warps exchange both sums at once."""
    squares = _sum_squares(q, Q_WIDTH), _sum_squares(k, K_WIDTH)
    of_q, of_k = tl.reduce(squares, 0, add_both)
    return tl.rsqrt(of_q / Q_WIDTH + EPS), tl.rsqrt(of_k / K_WIDTH + EPS)


@jit
def _load_head_norm(norm, rotation, HAS_NORM: tl.constexpr):
    """Load the norm's weight of a head for `_load_head`: for the numbers, and for their partners.

    rotation: as of `_load_rotation`.
    """
    c, partner, _, _ = rotation
    if HAS_NORM:
        return tl.load(norm + c), tl.load(norm + partner)
    else:
        return 1.0, 1.0


@jit
def _load_head(
    x,
    norm,
    rms,
    rotation,
    C: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    EPS: tl.constexpr,
    CLIP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FULL_NORM: tl.constexpr,
):
    """Load one head at x -> [SPLITS, C] fp32, after clip, RMS norm and RoPE.

    norm: as of `_load_head_norm`. With FULL_NORM the norm is over all heads, comes before the clip,
    and rms is its factor.
    """
    c, partner, cos, sin = rotation
    partner_x = x + partner
    if ROTARY_DIM % 16 == 0:
        # Triton cannot derive from `partner` that 8 neighbors are one aligned load of 16 bytes.
        partner_x = tl.max_contiguous(tl.multiple_of(partner_x, (1, 16)), (1, 8))
    partner_x = tl.load(partner_x).to(tl.float32)
    x = tl.load(x + c).to(tl.float32)
    if CLIP > 0 and not FULL_NORM:
        partner_x, x = tl.clamp(partner_x, -CLIP, CLIP), tl.clamp(x, -CLIP, CLIP)
    if HAS_NORM:
        if not FULL_NORM:
            rms = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / C + EPS)
        partner_x *= rms * norm[1].to(tl.float32)
        x *= rms * norm[0].to(tl.float32)
    if CLIP > 0 and FULL_NORM:
        partner_x, x = tl.clamp(partner_x, -CLIP, CLIP), tl.clamp(x, -CLIP, CLIP)
    return x * cos + partner_x * sin


@jit
def _load_value(
    x, c, C: tl.constexpr, EPS: tl.constexpr, CLIP: tl.constexpr, NORM_VALUES: tl.constexpr
):
    """Load one head at x -> [SPLITS, C], after clip or a norm without a weight."""
    value = tl.load(x + c)
    if NORM_VALUES:
        number = value.to(tl.float32)
        rms = tl.rsqrt(tl.sum(number * number, 1, keep_dims=True) / C + EPS)
        value = (number * rms).to(value.dtype)
    if CLIP > 0:
        value = tl.clamp(value.to(tl.float32), -CLIP, CLIP).to(value.dtype)
    return value


@jit
def _load_block(cache, begin, end, C: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr):
    """Load N * SPLITS keys or values from position `begin` -> [N, SPLITS, C], 0 from `end` on."""
    key = begin + tl.arange(0, N * SPLITS)[:, None]
    block = tl.load(cache + key * C + tl.arange(0, C)[None, :], mask=key < end, other=0.0)
    return tl.reshape(block, [N, SPLITS, C])


@jit
def _begin_splits(query, own_key, own_value, is_own):
    """Start the splits' softmaxes with the token's own position: row_max, row_sum, acc."""
    row_max = tl.where(is_own, tl.sum(query * own_key.to(tl.float32), 1), float("-inf"))
    row_sum = tl.where(is_own, 1.0, 0.0)
    acc = tl.where(is_own[:, None], own_value.to(tl.float32), 0.0)
    return row_max, row_sum, acc


@jit
def _merge_splits(row_max, row_sum, sink, HAS_SINKS: tl.constexpr):
    """Merge the splits' softmaxes -> the factor of each split [SPLITS], the sum of all weights."""
    largest = tl.max(row_max, 0)
    if HAS_SINKS:
        largest = tl.maximum(largest, sink)
    share = tl.exp(row_max - largest)
    total = tl.sum(row_sum * share, 0)
    if HAS_SINKS:
        total += tl.exp(sink - largest)
    return share, total


# Grid [H, B]: a program computes one query head of one sequence. The first query head
# of each KV head also appends the token's key and value to the cache. No program waits
# for that store: each computes the token's own key and value itself, and reads only
# earlier positions from the cache.
#
# Layout: positions are read in blocks of N * SPLITS, as a grid [N, SPLITS]. A lane
# loads 16 bytes of a position, so C * itemsize / 16 lanes hold one position, and all
# lanes of a program hold SPLITS. A lane sees only positions of its own split, which
# has its own running softmax. Warps therefore exchange data only once, when the splits
# are merged. Each split computes query, RoPE and norm itself, though they are equal for
# all splits: a broadcast would go through shared memory.
#
# The first block is masked by S, not by `position`: without a window its loads need not
# wait for the position. Each later block is loaded as soon as the registers of the one
# before are free.
#
# One kernel: its speed depends on the order of waits and loads. A reader should see that
# order whole.
@jit
def _attend_token(
    qkv,
    rope,
    q_norm,
    k_norm,
    sinks,
    positions,
    cache,
    y,
    S: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    CLIP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FULL_NORM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    GATED: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    ROPE_BEGIN: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    V_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    split, kv_head = tl.arange(0, SPLITS), head // (H // K)
    c = split[:, None] * 0 + tl.arange(0, C)[None, :]
    rotation = _load_rotation(rope, sequence, c, C, ROTARY_DIM, ROPE_WIDTH, ROPE_BEGIN)
    position = tl.load(positions + sequence).to(tl.int32)
    cache += (sequence * K + kv_head) * S * C
    BLOCK: tl.constexpr = N * SPLITS
    first = tl.maximum(position - WINDOW + 1, 0) // BLOCK * BLOCK if WINDOW < S else 0
    k = _load_block(cache, first, S, C, N, SPLITS)
    v = _load_block(cache + V_OFFSET, first, S, C, N, SPLITS)
    if FULL_NORM:
        q_norm, k_norm = q_norm + head * C, k_norm + kv_head * C
    q_weight = _load_head_norm(q_norm, rotation, HAS_NORM)
    k_weight = _load_head_norm(k_norm, rotation, HAS_NORM)
    sink = tl.load(sinks + head).to(tl.float32) if HAS_SINKS else 0.0
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    FIRST_VALUE: tl.constexpr = H if KEYS_ARE_VALUES else H + K
    FIRST_GATE: tl.constexpr = FIRST_VALUE + K
    HEADS: tl.constexpr = FIRST_GATE + H if GATED else FIRST_GATE
    qkv += sequence * HEADS * C
    value = qkv + (FIRST_VALUE + kv_head) * C
    own_value = _load_value(value, c, C, EPS, CLIP, NORM_VALUES)
    own_k, own_q = qkv + (H + kv_head) * C, qkv + head * C
    if GATED:
        gate = tl.load(qkv + (FIRST_GATE + head) * C + c)
    q_rms, k_rms = 1.0, 1.0
    if FULL_NORM:
        q_rms, k_rms = _inverse_rms(qkv, qkv + H * C, H * C, K * C, EPS)
    own_key = _load_head(
        own_k, k_weight, k_rms, rotation, C, ROTARY_DIM, EPS, CLIP, HAS_NORM, FULL_NORM
    )
    own_key = own_key.to(own_value.dtype)
    query = _load_head(
        own_q, q_weight, q_rms, rotation, C, ROTARY_DIM, EPS, CLIP, HAS_NORM, FULL_NORM
    )
    query *= SCALE
    is_own = split == 0  # the split that has the token's own position
    if head % (H // K) == 0:
        tl.store(cache + position * C + c, own_key, mask=is_own[:, None])
        tl.store(cache + V_OFFSET + position * C + c, own_value, mask=is_own[:, None])
    row_max, row_sum, acc = _begin_splits(query, own_key, own_value, is_own)
    for begin in range(first, position, BLOCK):
        key = begin + tl.arange(0, N)[:, None] * SPLITS + split[None, :]
        scores = tl.sum(k.to(tl.float32) * query[None, :, :], 2)  # [N, SPLITS]
        more = begin + BLOCK < position  # else addresses would be computed for nothing
        if more:
            k = _load_block(cache, begin + BLOCK, position, C, N, SPLITS)
        scores = tl.where((key < position) & (key > position - WINDOW), scores, float("-inf"))
        weights, rescale, row_max, row_sum = online_softmax(tl.trans(scores), row_max, row_sum)
        acc = acc * rescale[:, None] + tl.sum(v.to(tl.float32) * tl.trans(weights)[:, :, None], 0)
        if more:
            v = _load_block(cache + V_OFFSET, begin + BLOCK, position, C, N, SPLITS)
    share, total = _merge_splits(row_max, row_sum, sink, HAS_SINKS)
    y += (sequence * H + head) * C + tl.arange(0, C)
    acc *= share[:, None]
    if GATED:
        acc /= 1 + tl.exp(-gate.to(tl.float32))
    out = tl.sum(acc, 0) / total
    tl.store(y, out.to(y.dtype.element_ty))


class Tile(NamedTuple):
    """The block of positions that a program reads at once: `rows` for each split."""

    rows: int = 8  # N, a power of two
    warps: int = 8


def choose_tile(length: int, C: int, itemsize: int) -> Tile:
    """Return the tile for a cache of this length, or a window in it."""
    return Tile()


def empty_output(qkv: Tensor, cache: Tensor, keys_are_values: bool, gated: bool) -> Tensor:
    """Return the output [B, Q, H * C] of attention with qkv [B, Q, ...], not yet written."""
    K, C = cache.shape[2], cache.shape[4]
    width = qkv.shape[-1] - (1 if keys_are_values else 2) * K * C
    return qkv.new_empty(*qkv.shape[:2], width // 2 if gated else width)


@torch.library.custom_op("moe_fast::attend_token", mutates_args=("cache",))
def attend_token(
    qkv: Tensor,
    rope: Tensor,
    positions: Tensor,
    cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    sinks: Tensor | None,
    rotary_dim: int,
    scale: float,
    eps: float,
    clip: float,
    window: int,
    norm_values: bool = False,
    keys_are_values: bool = False,
    rope_begin: int = 0,
    gated: bool = False,
    full_norm: bool = False,
) -> Tensor:
    """Attend with one token of each sequence, and append its key and value to the cache.

    qkv [B, 1, (H + 2 K) C] at positions [B, 1], cache [2, rows, K, S, C], of which the first B
    rows are used -> [B, 1, H * C].
    C is a power of two from 16 to 512. Order: clip to +-clip (0: none), RMS norm of each
    head (weights q_norm, k_norm [C], eps), RoPE of the first rotary_dim numbers (rope is
    `model.Context.rope`), scores times scale, softmax with sinks [H].

    norm_values: RMS norm of values too, without a weight. keys_are_values: qkv is
    [B, 1, (H + K) C], and values are its keys before norm and RoPE. rope_begin: the
    layer's first column of rope. gated: qkv ends with H more heads, whose sigmoid the output is
    multiplied by. full_norm: RMS norms over all heads of q and of k, before the clip, with weights
    [H * C] and [K * C].

    window: the number of positions that a token sees, its own included. Masked
    positions of the cache must be finite: they are multiplied by 0, and 0 * NaN is NaN.
    With PDL the kernel reads all but qkv while the previous kernel runs, which must not
    write them.
    """
    B, (K, S, C) = qkv.shape[0], cache.shape[2:]
    y = empty_output(qkv, cache, keys_are_values, gated)
    H, pdl = y.shape[-1] // C, supports_pdl(qkv)
    # The kernel needs a valid pointer for an absent tensor, which it then does not read.
    weights = (qkv if tensor is None else tensor for tensor in (q_norm, k_norm, sinks))
    shape = dict(S=S, H=H, K=K, C=C, ROTARY_DIM=rotary_dim, V_OFFSET=cache.stride(0))
    scores = dict(SCALE=scale, EPS=eps, CLIP=clip, WINDOW=window)
    flags = dict(HAS_NORM=q_norm is not None, HAS_SINKS=sinks is not None, PDL=pdl)
    flags |= dict(NORM_VALUES=norm_values, KEYS_ARE_VALUES=keys_are_values)
    flags |= dict(FULL_NORM=full_norm, GATED=gated)
    flags |= dict(ROPE_WIDTH=rope.shape[-1], ROPE_BEGIN=rope_begin)
    tile = choose_tile(min(S, window), C, cache.element_size())
    splits = tile.warps * 32 * 16 // (C * cache.element_size())  # each lane loads 16 bytes
    _attend_token[H, B](
        qkv.contiguous(),
        rope,
        *weights,
        positions,
        cache,
        y,
        **shape,
        **scores,
        **flags,
        N=tile.rows,
        SPLITS=splits,
        launch_pdl=pdl,
        num_warps=tile.warps,
    )
    return y


@attend_token.register_fake
def _(
    qkv,
    rope,
    positions,
    cache,
    q_norm,
    k_norm,
    sinks,
    rotary_dim,
    scale,
    eps,
    clip,
    window,
    norm_values=False,
    keys_are_values=False,
    rope_begin=0,
    gated=False,
    full_norm=False,
) -> Tensor:
    return empty_output(qkv, cache, keys_are_values, gated)
