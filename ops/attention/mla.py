"""Kernels of multi-head latent attention for one and for several tokens of each sequence.

    _map_queries     each head's query times its key weights: into the space of the latents; append
    _attend_part     RoPE, attention over a part of the positions
    _merge_values    merge of the parts, times each head's value weights

All heads share one KV head of r + R numbers: r are key and value, R are rotated and key alone. The
cache is plain or int8, and has any length; its positions are split among programs
(ops/attention/softmax.py). `_map_queries` appends each token's normed latent and rotated key to the
cache, so that queries find the latents of all of the call's tokens there.

Compiled code without fused kernels calls `attend_latent`, which is `_attend_part` alone, with
queries that are mapped and rotated.

Letters: B sequences, Q tokens of each, T = B Q, S positions of the cache, H heads, N numbers of a
query that are not rotated, R rotary dim, r rank of the latent, V value dim, P parts of the
positions, at most, M rows of a program.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention.heads import int8_codes, int8_scale, load_head, load_rotation, prefetch
from ops.attention.softmax import PROGRAMS, count_parts, weigh
from ops.gpu import gpu_of
from ops.launch import await_previous, check_shapes, fit, jit, launch, tl, triton
from ops.products.units import signed_bytes
from ops.sizes import cdiv, pow2

MAX_QUERIES = 64  # tokens of each sequence
LONG_CACHE = 8192  # positions
TOKENS_AT_ONCE = 8  # T up to which each token has programs of its own


@dataclass(frozen=True)
class Tile:
    """How the three kernels divide their work."""

    block: int = 32  # positions at once
    stages: int = 3  # blocks in flight, and the one in use
    columns: int = 64  # of key weights, in a program of `_map_queries`
    values: int = 32  # rows of value weights, in a program of `_merge_values`


class LatentTensors(NamedTuple):
    """What the kernels read, and the cache that they append to."""

    q: Tensor  # [T, H * (N + R)], contiguous rows; mapped queries: [T, H * (r + R)]
    kv: Tensor | None  # [T, r + R], contiguous rows, before norm and RoPE
    rope: Tensor | None  # `model.Context.rope`
    positions: Tensor  # [B, Q], which rise by one
    cache: Tensor  # [1, rows, 1, S, r + R], of which the first B rows are used
    scales: Tensor | None  # [1, rows, 1, S, 1] of an int8 cache
    wkv: Tensor | None  # [H, N + V, r], in the dtype of q
    kv_norm: Tensor | None  # [r]


@dataclass(frozen=True)
class LatentSettings:
    """A layer of latent attention, then what a call adds: s."""

    heads: int
    unrotated: int  # N
    rotary_dim: int
    rank: int
    scale: float  # of scores
    value_dim: int = 0
    eps: float = 0.0  # added to the mean square of a latent
    maps: bool = True  # False: q is mapped and rotated, all parts have a result
    queries: int = 1
    tokens: int = 1  # T
    length: int = 0  # S
    q_row: int = 0  # numbers from one token's q to the next one's
    kv_row: int = 0
    parts: int = 1
    tile: Tile = Tile()
    clip, full_norm = 0.0, False  # for `load_head`

    # Whether the kernels compute heads of these sizes.
    supported = property(lambda s: s.unrotated % 8 == 0 and has_tiles(s.rotary_dim, s.rank))
    head_dim = property(lambda s: s.unrotated + s.rotary_dim)
    width = property(lambda s: s.rank + s.rotary_dim)  # numbers of a cached position
    wkv_rows = property(lambda s: s.unrotated + s.value_dim)
    rows = property(lambda s: s.queries * s.heads)  # rows of a sequence: heads of its queries
    # M, at most what the registers of a program hold.
    tile_rows = property(lambda s: min(32, max(16, pow2(s.rows))))
    # Tokens of a program of `_map_queries` and of `_merge_values`.
    each = property(lambda s: cdiv(s.tokens, TOKENS_AT_ONCE) if s.queries > 1 else 1)


def has_tiles(rotary_dim: int, rank: int) -> bool:
    """Whether `_attend_part` computes latents of these sizes."""
    return all(16 <= n <= 512 and n & n - 1 == 0 for n in (rotary_dim, rank))


def choose_tile(length: int, itemsize: int, queries: int = 1) -> Tile:
    """Return the tile for a cache of this length, plain or int8.

    A short block is read sooner, a long one takes fewer instructions a position. In int8 a long one
    takes too many registers.
    """
    if queries > 1:
        return Tile(stages=2)
    return Tile(64, 2) if length > LONG_CACHE and itemsize > 1 else Tile()


def smaller_tiles(tile: Tile) -> Iterator[Tile]:
    """Yield the tile, then those that take less shared memory, the fastest first."""
    yield tile
    for block, stages in ((32, 3), (32, 2), (16, 3), (16, 2), (16, 1)):
        if (block, stages) < (tile.block, tile.stages):
            yield replace(tile, block=block, stages=stages)


@jit
def _append_token(x, token, s: tl.constexpr):
    """Append a token's latent, normed, and its key, rotated, to the cache."""
    DTYPE: tl.constexpr = x.kv.dtype.element_ty
    R: tl.constexpr = s.rotary_dim
    kv, row = x.kv + token * s.kv_row, token // s.queries * s.length + tl.load(x.positions + token)
    c, n = tl.arange(0, s.rank)[None, :], tl.arange(0, R)[None, :]
    weight = tl.load(x.kv_norm + c).to(tl.float32)
    rotation = load_rotation(x.rope, token, n, R, R, 2 * R, 0)
    key = load_head(kv + s.rank, None, 1.0, rotation, s).to(DTYPE)
    latent = tl.load(kv + c).to(tl.float32)
    latent *= tl.rsqrt(tl.sum(latent * latent, 1, keep_dims=True) / s.rank + s.eps)
    latent = (latent * weight).to(DTYPE)
    if x.scales is not None:
        latent, key = latent.to(tl.float32), key.to(tl.float32)
        largest = tl.max(tl.abs(latent), 1, keep_dims=True)
        scale = int8_scale(tl.maximum(largest, tl.max(tl.abs(key), 1, keep_dims=True)))
        latent, key = int8_codes(latent, scale)[0], int8_codes(key, scale)[0]
        latent, key = latent.to(tl.int8), key.to(tl.int8)
        tl.store(x.scales + tl.zeros([1, 1], tl.int32) + row, scale)
    tl.store(x.cache + row * s.width + c, latent)
    tl.store(x.cache + row * s.width + s.rank + n, key)


# Grid [r / columns, H + 1, T / each]. A program computes `columns` numbers of one head for `each`
# tokens. Its weights, a part of the head's [N, r] with r contiguous, are in flight before the wait.
# The row of programs that has no head appends: its first one the tokens.
@jit
def _map_queries(x, mapped, s: tl.constexpr, PDL: tl.constexpr):
    PADDED: tl.constexpr = triton.next_power_of_2(s.unrotated)
    head, first = tl.program_id(1), tl.program_id(2).to(tl.int64) * s.each
    n, c = tl.arange(0, PADDED), tl.program_id(0) * s.tile.columns + tl.arange(0, s.tile.columns)
    at = (head * s.wkv_rows + n)[:, None] * s.rank + c[None, :]
    has_head = head < s.heads
    inside = n < tl.where(has_head, s.unrotated, 0)
    weights = tl.load(x.wkv + at, mask=inside[:, None], other=0.0)
    await_previous(PDL)
    for i in range(s.each):
        token = tl.minimum(first + i, s.tokens - 1)  # the last: several times
        if has_head:
            query = tl.load(x.q + token * s.q_row + head * s.head_dim + n, mask=inside, other=0.0)
            out = tl.sum(weights.to(tl.float32) * query.to(tl.float32)[:, None], 0)
            to = mapped + (token * s.heads + head) * s.rank + c
            tl.store(to, out.to(mapped.dtype.element_ty))
        elif tl.program_id(0) == 0:
            _append_token(x, token, s)


@jit
def _find_parts(positions, sequence, s: tl.constexpr):
    """Return how many positions a sequence's queries see, the end of their blocks, parts."""
    seen = tl.load(positions + sequence * s.queries + s.queries - 1).to(tl.int32) + 1
    end = (seen + s.tile.block - 1) // s.tile.block
    parts = tl.minimum(tl.maximum(end, 1), s.parts) if s.maps else tl.num_programs(0)
    return seen, end, parts


@jit
def _convert(entries, dtype: tl.constexpr):
    """Convert codes to the dtype of a product; for bf16 without the slow conversion instruction."""
    if entries.dtype == tl.int8 and dtype == tl.bfloat16:
        return signed_bytes(entries.to(tl.int16))
    else:
        return entries.to(dtype)


@jit
def _score(query, rotated, cache, scales, block, seen, s: tl.constexpr):
    """Score a block of positions: scores [M, block], its latents [block, r], int8 scales [block].

    Latents from `seen` on are 0. Without int8 the scales are 1.0.
    """
    key = block * s.tile.block + tl.arange(0, s.tile.block)
    row, is_seen = cache + key[:, None] * s.width, (key < seen)[:, None]
    latents = tl.load(row + tl.arange(0, s.rank)[None, :], mask=is_seen, other=0)
    keys = tl.load(row + s.rank + tl.arange(0, s.rotary_dim)[None, :], mask=is_seen, other=0)
    scale = 1.0
    if scales is not None:
        scale = tl.load(scales + key, mask=key < seen, other=0.0).to(tl.float32)
    latents, keys = _convert(latents, query.dtype), _convert(keys, query.dtype)
    scores = tl.dot(query, tl.trans(latents))
    scores = tl.dot(rotated, tl.trans(keys), scores) * s.scale
    if scales is not None:
        scores *= scale[None, :]
    return scores, latents, scale


# Grid [P, tiles of M rows, B]: a program attends with M rows, each one head of one query, to every
# P-th block of positions. Parts without positions have no result. A row that sees none of a part's
# positions has the largest score -inf, and no weight in the merge.
# It prefetches the first block of the cache into L2, except the newest position: loaded into
# registers, a block made the loop spill.
@jit
def _attend_part(x, mapped, partial, sums, s: tl.constexpr, PDL: tl.constexpr):
    M: tl.constexpr = s.tile_rows
    R: tl.constexpr = s.rotary_dim
    DTYPE: tl.constexpr = x.q.dtype.element_ty
    part, sequence = tl.program_id(0), tl.program_id(2).to(tl.int64)
    seen, end, parts = _find_parts(x.positions, sequence, s)
    if part >= parts:
        return
    cache, scales = x.cache + sequence * s.length * s.width, x.scales
    if scales is not None:
        scales += sequence * s.length
    if s.maps and s.queries == 1 and PDL:
        BYTES: tl.constexpr = s.width * (x.cache.dtype.element_ty.primitive_bitwidth // 8)
        count = tl.minimum(seen - 1 - part * s.tile.block, s.tile.block)
        if count > 0:
            prefetch(cache + part * s.tile.block * s.width, count * BYTES)
    row, c = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, s.rank)[None, :]
    head, token = row % s.heads, sequence * s.queries + tl.minimum(row // s.heads, s.queries - 1)
    position = tl.load(x.positions + token).to(tl.int32)
    if s.maps:
        numbers = tl.arange(0, R)[None, :]
        rotation = load_rotation(x.rope, token[:, None], numbers, R, R, 2 * R, 0)
        q = x.q + (token * s.q_row + head * s.head_dim + s.unrotated)[:, None]
        rotated = load_head(q, None, 1.0, rotation, s).to(DTYPE)
    else:
        q = x.q + (token * s.q_row + head * s.width + s.rank)[:, None]
        rotated = tl.load(q + tl.arange(0, R)[None, :])
    await_previous(PDL)
    WIDTH: tl.constexpr = s.rank if s.maps else s.width
    query = tl.load(mapped + (token * s.heads + head)[:, None] * WIDTH + c)
    row_max, row_sum = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, s.rank], tl.float32)
    for block in tl.range(part, end, parts, num_stages=s.tile.stages):
        scores, latents, scale = _score(query, rotated, cache, scales, block, seen, s)
        key = block * s.tile.block + tl.arange(0, s.tile.block)
        is_seen = key[None, :] <= position[:, None]
        value_scale = None if scales is None else scale
        weights, rescale, row_max, row_sum = weigh(
            scores, row_max, row_sum, value_scale, is_seen, DTYPE
        )
        acc = tl.dot(weights, latents, acc=acc * rescale)
    at = (sequence * s.parts + part) * s.rows + row
    tl.store(partial + at[:, None] * s.rank + c, acc, mask=(row < s.rows)[:, None])
    tl.store(sums + at * 2, row_max, mask=row < s.rows)
    tl.store(sums + at * 2 + 1, row_sum, mask=row < s.rows)


# Grid [V / values, H, T / each]: a program computes `values` numbers of one head for `each` tokens.
# Each program merges the head's parts itself, 16 at once: they are in L2, and another kernel would
# take longer up to about 60 parts.
@jit
def _merge_values(x, partial, sums, y, s: tl.constexpr, PDL: tl.constexpr):
    AT_ONCE: tl.constexpr = 16
    head, first = tl.program_id(1), tl.program_id(2).to(tl.int64) * s.each
    row = tl.program_id(0) * s.tile.values + tl.arange(0, s.tile.values)
    c = tl.arange(0, s.rank)[None, :]
    value_rows = (head * s.wkv_rows + s.unrotated + row)[:, None] * s.rank + c
    weights = tl.load(x.wkv + value_rows, mask=(row < s.value_dim)[:, None], other=0.0)
    await_previous(PDL, EARLY=True)
    for i in range(s.each):
        token = tl.minimum(first + i, s.tokens - 1)  # the last: several times
        _, _, parts = _find_parts(x.positions, token // s.queries, s)
        own_part = (token // s.queries * s.parts * s.queries + token % s.queries) * s.heads + head
        largest, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
        acc = tl.zeros([1, s.rank], tl.float32)
        for begin in range(0, parts, AT_ONCE):
            part = begin + tl.arange(0, AT_ONCE)
            at, is_part = own_part + part * s.rows, part < parts
            maxima = tl.load(sums + at * 2, mask=is_part, other=float("-inf"))
            totals = tl.load(sums + at * 2 + 1, mask=is_part, other=0.0)
            numbers = tl.load(partial + at[:, None] * s.rank + c, mask=is_part[:, None], other=0.0)
            new_largest = tl.maximum(largest, tl.max(maxima, 0))
            share, rescale = tl.exp(maxima - new_largest), tl.exp(largest - new_largest)
            total = total * rescale + tl.sum(totals * share, 0)
            acc = acc * rescale[:, None] + tl.sum(numbers * share[:, None], 0)[None, :]
            largest = new_largest
        mean = (acc / total[:, None]).to(y.dtype.element_ty).to(tl.float32)
        out = tl.sum(weights.to(tl.float32) * mean, 1)
        result = y + (token * s.heads + head) * s.value_dim + row
        tl.store(result, out.to(y.dtype.element_ty), mask=row < s.value_dim)


def attend_latent_tokens(
    x: LatentTensors, layer: LatentSettings, tile: Tile | None = None
) -> Tensor:
    """Attend with Q tokens of each sequence, and append their latents -> [T, H * V].

    The reference is `LatentAttention.core`, but for q's projection. layer: without what a call
    adds. The cache has the dtype of q, or is int8. Raises ValueError for sizes that they do not
    compute.
    """
    (B, Q), T, S = x.positions.shape, len(x.q), x.cache.shape[3]
    H, rank = layer.heads, layer.rank
    if not layer.supported:
        raise ValueError(f"no kernels for latent attention with these sizes: {layer}")
    check_shapes(
        q=(x.q, (B * Q, H * layer.head_dim)),
        kv=(x.kv, (T, layer.width)),
        cache=(x.cache, (1, x.cache.shape[1], 1, S, layer.width)),
        wkv=(x.wkv, (H, layer.wkv_rows, rank)),
        kv_norm=(x.kv_norm, (rank,)),
    )
    tile, values = tile or choose_tile(S, x.cache.element_size(), Q), layer.value_dim
    columns, rows = min(tile.columns, rank), min(tile.values, pow2(values))
    tile = replace(tile, columns=columns, values=rows)
    s = replace(layer, queries=Q, tokens=T, length=S, q_row=x.q.stride(0), kv_row=x.kv.stride(0))
    mapped, y = x.q.new_empty(T, H, rank), x.q.new_empty(T, H * values)
    s, options = _fit_tile(x, mapped, s, smaller_tiles(tile))
    partial = x.q.new_empty(B, s.parts, s.rows, rank, dtype=torch.float32)
    sums, tokens = partial.new_empty(B, s.parts, s.rows, 2), cdiv(T, s.each)
    launch(_map_queries, (rank // columns, H + 1, tokens), x, mapped, settings=s)
    grid = s.parts, cdiv(s.rows, s.tile_rows), B
    launch(_attend_part, grid, x, mapped, partial, sums, settings=s, **options)
    grid, warps = (cdiv(values, rows), H, tokens), max(1, rank // 128)
    launch(_merge_values, grid, x, partial, sums, y, settings=s, warps=warps)
    return y


def _fit_tile(
    x: LatentTensors, mapped: Tensor, s: LatentSettings, tiles: Iterable[Tile]
) -> tuple[LatentSettings, dict]:
    """Return settings with the first tile that fits and its parts, and options of the launch."""
    B, device, empty = len(x.positions), x.q.device, x.q.new_empty(0, dtype=torch.float32)
    programs = B * cdiv(s.rows, s.tile_rows)
    candidates = (replace(s, tile=tile) for tile in tiles)
    if s.maps:
        candidates = (
            replace(c, parts=count_parts(programs, c.length, c.tile.block, device))
            for c in candidates
        )
    return fit(_attend_part, ((c, {"warps": 8}) for c in candidates), x, mapped, empty, empty)


@torch.library.custom_op("moe_fast::attend_latent", mutates_args=())
def attend_latent(
    q: Tensor, kv: Tensor, scales: Tensor | None, positions: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend with few queries of each sequence over a latent cache, in P parts.

    q [B, Q, H, r + R], mapped and rotated, at rising positions [B, Q]; kv [1, B, 1, S, r + R],
    whose first r numbers are the values too; scales [1, B, 1, S, 1] of an int8 kv, else None. Both
    may have more than B rows. scale: of scores. Return the arguments of `softmax.merge_partial`:
    fp32 y [B, P, Q * H, r] and sums [B, P, Q * H, 2].
    """
    (B, Q, H, C), S = q.shape, kv.shape[3]
    check_shapes(kv=(kv[:, :B], (1, B, 1, S, C)), positions=(positions, (B, Q)))
    y, sums = _attend_latent_fake(q, kv, scales, positions, rank, scale)
    q, positions = q.contiguous().view(B * Q, H * C), positions.contiguous()
    s = LatentSettings(H, 0, C - rank, rank, scale, maps=False, queries=Q, tokens=B * Q)
    s = replace(s, length=S, q_row=H * C, parts=y.shape[1])
    x = LatentTensors(q, None, None, positions, kv, scales, None, None)
    tiles = (Tile(block, 2) for block in (32, 16) if block == 16 or kv.element_size() < 4)
    s, options = _fit_tile(x, q, s, tiles)
    grid = s.parts, cdiv(s.rows, s.tile_rows), B
    launch(_attend_part, grid, x, q, y, sums, settings=s, pdl=False, **options)
    return y, sums


@attend_latent.register_fake
def _attend_latent_fake(
    q: Tensor, kv: Tensor, scales: Tensor | None, positions: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    (B, Q, H, _), limit = q.shape, PROGRAMS * gpu_of(q.device).multiprocessors
    s = LatentSettings(H, 0, 0, rank, scale, queries=Q)
    parts = max(1, int(limit // (B * cdiv(s.rows, s.tile_rows))))
    y = q.new_empty(B, parts, s.rows, rank, dtype=torch.float32)
    return y, y.new_empty(*y.shape[:-1], 2)
