"""Decode attention over a latent cache: three kernels for one token of each sequence.

    _map_queries     each head's query times its key weights: into the space of the latents
    _attend_part     RoPE, norm of the latent, cache append, attention over a part of the positions
    _merge_values    merge of the parts, times each head's value weights

All heads share one KV head of r + R numbers: r are key and value, R are rotated and key alone.
Weights are loaded before the wait for the previous kernel (PDL); so is all that `_attend_part`
needs of the token itself, which the kernel before `_map_queries` wrote. Positions are split among
programs as in ops/attention/gqa.py. The cache is plain or int8, and has any length.

Letters: B sequences, S positions of the cache, H heads, N numbers of a query that are not rotated,
R rotary dim, r rank of the latent, V value dim, P parts of the positions, at most.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention.heads import int8_codes, int8_scale, load_rotated, load_rotation
from ops.attention.softmax import count_parts, parts_in_use, weigh
from ops.launch import Kernel, fit_tiling, jit, supports_pdl, tl, triton
from ops.products.grouped import _signed_bytes

LONG_CACHE = 8192  # positions
ANY_POSITION = 1 << 30  # a window without an end


class Tile(NamedTuple):
    """How the three kernels divide their work."""

    block: int = 32  # positions at once
    stages: int = 3  # blocks on their way, and the one in use
    columns: int = 64  # of key weights, in a program of `_map_queries`
    values: int = 32  # rows of value weights, in a program of `_merge_values`


def choose_tile(length: int, itemsize: int) -> Tile:
    """Return the tile for a cache of this length, plain or int8.

    A short block is read sooner, a long one takes fewer instructions a position. In int8 a long one
    takes too many registers.
    """
    return Tile(64, 2) if length > LONG_CACHE and itemsize > 1 else Tile()


def smaller_tiles(tile: Tile) -> Iterator[Tile]:
    """Yield the tile, then those that take less shared memory, the fastest first."""
    yield tile
    for block, stages in ((32, 3), (32, 2), (16, 3), (16, 2), (16, 1)):
        if (block, stages) < (tile.block, tile.stages):
            yield tile._replace(block=block, stages=stages)


# Grid [r / COLUMNS, H, B]: a program computes COLUMNS numbers of one head. All of its weights, a
# part of the head's [N, r] with r contiguous, are in flight before the wait.
@jit
def _map_queries(
    q,
    wkv,
    mapped,
    H: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    RANK: tl.constexpr,
    WKV_ROWS: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    PADDED_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    n, c = tl.arange(0, PADDED_N), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = (head * WKV_ROWS + n)[:, None] * RANK + c[None, :]
    weights = tl.load(wkv + at, mask=(n < N)[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    query = tl.load(q + sequence * Q_STRIDE + head * C + n, mask=n < N, other=0.0)
    out = tl.sum(weights.to(tl.float32) * query.to(tl.float32)[:, None], 0)
    tl.store(mapped + (sequence * H + head) * RANK + c, out.to(mapped.dtype.element_ty))


@jit
def _prefetch(address, size):
    """Prefetch `size` bytes at an address, both multiples of 16, into L2: one thread does."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        (address.to(tl.int64), size),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _load_latents(
    cache,
    scales,
    block,
    position,
    RANK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    INT8: tl.constexpr,
):
    """Load a block's latents [BLOCK, r], rotated keys [BLOCK, R] and scales [BLOCK].

    From `position` on they are 0.
    """
    key = block * BLOCK + tl.arange(0, BLOCK)
    row, seen = cache + key[:, None] * (RANK + R), (key < position)[:, None]
    latents = tl.load(row + tl.arange(0, RANK)[None, :], mask=seen, other=0)
    keys = tl.load(row + RANK + tl.arange(0, R)[None, :], mask=seen, other=0)
    scale = tl.load(scales + key, mask=key < position, other=0.0).to(tl.float32) if INT8 else 1.0
    return latents, keys, scale


@jit
def _convert(entries, dtype: tl.constexpr, INT8: tl.constexpr):
    """Convert codes to the dtype of a product; for bf16 without the slow conversion instruction."""
    if INT8 and dtype == tl.bfloat16:
        return _signed_bytes(entries.to(tl.int16))
    return entries.to(dtype)


@jit
def _score_latents(query, rotated, loaded, SCALE: tl.constexpr, INT8: tl.constexpr):
    """Return the scores [M, BLOCK] of a block as loaded by `_load_latents`, and its latents."""
    latents, keys, scale = loaded
    latents, keys = _convert(latents, query.dtype, INT8), _convert(keys, query.dtype, INT8)
    scores = tl.dot(query, tl.trans(latents))
    scores = tl.dot(rotated, tl.trans(keys), scores) * SCALE
    if INT8:
        scores *= scale[None, :]
    return scores, latents


@jit
def _load_own(kv, kv_norm, rotation, R: tl.constexpr, RANK: tl.constexpr, EPS: tl.constexpr):
    """Load a token's own latent [1, r], normed, and key [1, R], rotated, in the dtype of kv."""
    DTYPE: tl.constexpr = kv.dtype.element_ty
    c = tl.arange(0, RANK)[None, :]
    weight = tl.load(kv_norm + c).to(tl.float32)
    key = load_rotated(kv + RANK, rotation, R).to(DTYPE)
    latent = tl.load(kv + c).to(tl.float32)
    latent *= tl.rsqrt(tl.sum(latent * latent, 1, keep_dims=True) / RANK + EPS)
    return (latent * weight).to(DTYPE), key


@jit
def _append_own(
    own, own_key, cache, scales, position, R: tl.constexpr, RANK: tl.constexpr, INT8: tl.constexpr
):
    """Store a token's latent and key in the cache; return both in fp32, as they are read there."""
    latent, key = own.to(tl.float32), own_key.to(tl.float32)
    if INT8:
        largest = tl.max(tl.abs(latent), 1, keep_dims=True)
        own_scale = int8_scale(tl.maximum(largest, tl.max(tl.abs(key), 1, keep_dims=True)))
        stored, latent = int8_codes(latent, own_scale)
        stored_key, key = int8_codes(key, own_scale)
        stored, stored_key = stored.to(tl.int8), stored_key.to(tl.int8)
        tl.store(scales + tl.zeros([1, 1], tl.int32) + position, own_scale)
    else:
        stored, stored_key = own, own_key
    own_row = cache + position * (RANK + R)
    tl.store(own_row + tl.arange(0, RANK)[None, :], stored)
    tl.store(own_row + RANK + tl.arange(0, R)[None, :], stored_key)
    return latent, key


# Grid [P, tiles of M heads, B]: a program attends with M heads to every P-th block of positions.
# The first part also has the token's own position, which it appends to the cache: no program reads
# it there. Parts without positions have no result.
#
# q and kv were written before `_map_queries` started, so they are read before the wait. The first
# block of the cache is prefetched into L2: loaded into registers, it made the loop spill.
@jit
def _attend_part(
    mapped,
    q,
    kv,
    rope,
    kv_norm,
    positions,
    cache,
    scales,
    partial,
    sums,
    S: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    P: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    WINDOW: tl.constexpr,
    INT8: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    part, sequence = tl.program_id(0), tl.program_id(2).to(tl.int64)
    position = tl.load(positions + sequence).to(tl.int32)
    _, end, parts = parts_in_use(position, S, P, PART_BLOCKS, WINDOW, BLOCK)
    if part >= parts:
        return
    cache += sequence * S * (RANK + R)
    scales += sequence * S
    BYTES: tl.constexpr = (RANK + R) * (cache.dtype.element_ty.primitive_bitwidth // 8)
    if PDL:
        count = tl.minimum(position - part * BLOCK, BLOCK)
        if count > 0:
            _prefetch(cache + part * BLOCK * (RANK + R), count * BYTES)
    row, c = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, RANK)[None, :]
    head = tl.minimum(row, H - 1)
    DTYPE: tl.constexpr = q.dtype.element_ty
    rotation = load_rotation(rope, sequence, tl.arange(0, R)[None, :], R, R, 2 * R, 0)
    q += sequence * Q_STRIDE + head[:, None] * (N + R) + N
    rotated = load_rotated(q, rotation, R).to(DTYPE)
    kv += sequence * KV_STRIDE
    own, own_key = _load_own(kv, kv_norm, rotation, R, RANK, EPS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    query = tl.load(mapped + (sequence * H + head)[:, None] * RANK + c)
    row_max, row_sum = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, RANK], tl.float32)
    if part == 0:
        # Equal for all tiles of heads
        latent, key = _append_own(own, own_key, cache, scales, position, R, RANK, INT8)
        row_max = tl.sum(query.to(tl.float32) * latent, 1)
        row_max = (row_max + tl.sum(rotated.to(tl.float32) * key, 1)) * SCALE
        row_sum += 1.0
        acc += latent
    for block in tl.range(part, end, parts, num_stages=STAGES):
        loaded = _load_latents(cache, scales, block, position, RANK, R, BLOCK, INT8)
        scores, latents = _score_latents(query, rotated, loaded, SCALE, INT8)
        key = block * BLOCK + tl.arange(0, BLOCK)
        seen = ((key < position) & (key > position - WINDOW))[None, :]
        value_scale = loaded[2] if INT8 else None
        weights, rescale, row_max, row_sum = weigh(
            scores, row_max, row_sum, value_scale, seen, DTYPE
        )
        acc = tl.dot(weights, latents, acc=acc * rescale)
    at = (sequence * P + part) * H + row
    tl.store(partial + at[:, None] * RANK + c, acc, mask=(row < H)[:, None])
    tl.store(sums + at * 2, row_max, mask=row < H)
    tl.store(sums + at * 2 + 1, row_sum, mask=row < H)


@jit
def _merge_parts(
    partial, sums, first, parts, STRIDE: tl.constexpr, C: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Merge a head's softmaxes over parts: its rows of `partial` are first, first + STRIDE, ...

    Return largest [1], total [1] and acc [1, C] of the whole softmax.
    """
    c = tl.arange(0, C)[None, :]
    largest, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    acc = tl.zeros([1, C], tl.float32)
    for begin in range(0, parts, AT_ONCE):
        part = begin + tl.arange(0, AT_ONCE)
        at, is_part = first + part * STRIDE, part < parts
        maxima = tl.load(sums + at * 2, mask=is_part, other=float("-inf"))
        totals = tl.load(sums + at * 2 + 1, mask=is_part, other=0.0)
        numbers = tl.load(partial + at[:, None] * C + c, mask=is_part[:, None], other=0.0)
        new_largest = tl.maximum(largest, tl.max(maxima, 0))
        share, rescale = tl.exp(maxima - new_largest), tl.exp(largest - new_largest)
        total = total * rescale + tl.sum(totals * share, 0)
        acc = acc * rescale[:, None] + tl.sum(numbers * share[:, None], 0)[None, :]
        largest = new_largest
    return largest, total, acc


# Grid [V / VALUES, H, B]: a program computes VALUES numbers of one head's output. Each merges the
# head's parts itself: they are in L2, and another kernel would take longer up to about 60 parts.
@jit
def _merge_values(
    wkv,
    positions,
    partial,
    sums,
    y,
    S: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    VALUES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    at = (head * (N + V) + N + row)[:, None] * RANK + tl.arange(0, RANK)[None, :]
    weights = tl.load(wkv + at, mask=(row < V)[:, None], other=0.0)
    position = tl.load(positions + sequence).to(tl.int32)
    _, _, parts = parts_in_use(position, S, P, PART_BLOCKS, WINDOW, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # at once: ops/products/experts.py
        tl.extra.cuda.gdc_wait()
    _, total, acc = _merge_parts(partial, sums, sequence * P * H + head, parts, H, RANK, AT_ONCE)
    mean = (acc / total[:, None]).to(y.dtype.element_ty).to(tl.float32)
    out = tl.sum(weights.to(tl.float32) * mean, 1)
    tl.store(y + (sequence * H + head) * V + row, out.to(y.dtype.element_ty), mask=row < V)


class Sizes(NamedTuple):
    """Sizes of a layer's heads, as the module's letters."""

    H: int
    N: int
    R: int
    rank: int
    V: int


def fit_blocks(
    kernel: Kernel, tile: Tile, sizes: tuple[int, int, int], given: tuple, constants: dict
) -> dict:
    """Return BLOCK, STAGES and P of a kernel that attends to blocks, with which it fits.

    tile: the fastest. sizes: sequences, tiles of rows, positions. given, constants: the kernel's
    other arguments, but for `partial` and `sums`.
    """
    B, tiles, S = sizes
    device, results = given[0].device, [given[0].new_empty(0, dtype=torch.float32)] * 2

    def constants_of(tile: Tile) -> dict:
        parts = count_parts(B * tiles, S, tile.block, device)
        return dict(BLOCK=tile.block, STAGES=tile.stages, P=parts)

    tilings = (constants_of(smaller) for smaller in smaller_tiles(tile))
    return fit_tiling(kernel, tilings, (*given, *results), constants)


def sizes_of(q: Tensor, cache: Tensor, wkv: Tensor) -> Sizes:
    """Return the sizes of q [T, H * (N + R)], cache [1, rows, 1, S, r + R], wkv [H, N + V, r].

    Raises ValueError if there are no kernels for them.
    """
    H, rows, rank = wkv.shape
    R, C = cache.shape[4] - rank, q.shape[1] // H
    if not supports(C - R, R, rank):
        raise ValueError(f"no kernels for latent attention with N, R, r = {C - R}, {R}, {rank}")
    return Sizes(H, C - R, R, rank, rows - (C - R))


def supports(N: int, R: int, rank: int) -> bool:
    """Whether the kernels compute heads of these sizes."""
    return N % 8 == 0 and all(16 <= n <= 512 and n & n - 1 == 0 for n in (R, rank))


def attend_latent_token(
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
    """Attend with one token of each sequence, and append its latent to the cache -> [B, H * V].

    The reference is `LatentAttention.core`, but for q's projection: q [B, H * (N + R)], kv
    [B, r + R], both with contiguous rows, at positions [B, 1]; rope as `model.Context.rope`. wkv
    [H, N + V, r] has the dtype of q, kv_norm is [r]. cache [1, rows, 1, S, r + R], of which the
    first B rows are used, has the dtype of q, or is int8 with scales [1, rows, 1, S, 1].

    With PDL the kernels read all but q while the previous kernel runs, which must not write that.
    pdl: None launches with PDL where the GPU has it. Raises ValueError for sizes that
    they do not compute.
    """
    (H, N, R, rank, V), B, S = sizes_of(q, cache, wkv), len(q), cache.shape[3]
    pdl = supports_pdl(q) if pdl is None else pdl
    tile = tile or choose_tile(S, cache.element_size())
    columns, values = min(tile.columns, rank), min(tile.values, triton.next_power_of_2(V))
    M = min(32, max(16, triton.next_power_of_2(H)))
    tiles = triton.cdiv(H, M)
    mapped, stored_scales = q.new_empty(B, H, rank), cache if scales is None else scales
    shape = dict(H=H, N=N, RANK=rank, PDL=pdl, launch_pdl=pdl)
    shared = dict(S=S, PART_BLOCKS=1, WINDOW=ANY_POSITION)
    attend = dict(R=R, Q_STRIDE=q.stride(0), KV_STRIDE=kv.stride(0), SCALE=scale, EPS=eps)
    attend |= shape | shared | dict(INT8=scales is not None, M=M, num_warps=8)
    given = mapped, q, kv, rope, kv_norm, positions, cache, stored_scales
    tiling = fit_blocks(_attend_part, tile, (B, tiles, S), given, attend)
    P = tiling["P"]
    partial = q.new_empty(B, P, H, rank, dtype=torch.float32)
    sums, y = partial.new_empty(B, P, H, 2), q.new_empty(B, H * V)
    parts = shared | dict(P=P, BLOCK=tiling["BLOCK"])
    _map_queries[rank // columns, H, B](
        q,
        wkv,
        mapped,
        **shape,
        C=N + R,
        WKV_ROWS=N + V,
        Q_STRIDE=q.stride(0),
        PADDED_N=triton.next_power_of_2(N),
        COLUMNS=columns,
        num_warps=4,
    )
    _attend_part[P, tiles, B](*given, partial, sums, **attend, **tiling)
    _merge_values[triton.cdiv(V, values), H, B](
        wkv,
        positions,
        partial,
        sums,
        y,
        **shape,
        **parts,
        V=V,
        VALUES=values,
        AT_ONCE=16,
        num_warps=max(1, rank // 128),
    )
    return y
