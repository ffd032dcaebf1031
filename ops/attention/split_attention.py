"""Decode attention over a cache of any length: RoPE, cache append and attention.

It computes what ops/attention/decode_attention.py does, but reads each key and value once for all query heads
of its KV head, and splits the positions among programs (Flash-Decoding, Dao et al. 2023). A second
kernel merges the parts. How many parts a sequence has depends on its position, which is on the GPU:
a short sequence has one part, however long its cache is. The cache is plain or int8.

Letters: B sequences, S positions of the cache, H query heads, K KV heads, G = H / K, C head dim,
P parts of the positions, at most.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention.decode_attention import (
    _finish_softmax,
    _inverse_rms,
    _load_head,
    _load_head_norm,
    _load_rotation,
    _load_value,
    _weigh,
    empty_output,
)
from ops.gpu import gpu_of
from ops.launch import jit, supports_pdl, tl, triton
from ops.products.units import shift_right, signed_bytes

PART = 128  # positions of a part, at least
MAX_PARTS = 64
PROGRAMS = 2  # for each of the GPU's processors, at most
MERGED_COLUMNS = 32  # numbers of a head that a program merges
MERGE_WARPS = 2


class Tile(NamedTuple):
    """How a program reads the positions."""

    block: int  # positions at once
    warps: int
    stages: int  # blocks on their way


def choose_tile(C: int, itemsize: int) -> Tile:
    """Return the tile for heads of this size, of a plain or an int8 cache (H200)."""
    block = min(128, max(16, 128 * 128 // C))
    if itemsize > 1 and C > 128:
        return Tile(block // 2, 4, 4)
    return Tile(block, 8, 3 if itemsize == 1 else 2)


@jit
def _load_keys(cache, scales, block, WIDTH: tl.constexpr, BLOCK: tl.constexpr, INT8: tl.constexpr):
    """Load a block's keys or values [BLOCK, WIDTH], and their scales [BLOCK] if they have some."""
    key = block * BLOCK + tl.arange(0, BLOCK)
    entries = tl.load(cache + key[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
    scale = tl.load(scales + key).to(tl.float32) if INT8 else 1.0
    return entries, scale


# An int8 cache is read as int16: a unit is two neighbors of a head, an even one in its lower byte.
# Products of even and odd numbers are separate. Single bytes would be read one by one from shared
# memory, where tensor cores want two positions of a value side by side: 1.5 times the instructions.
@jit
def _operands(entries, dtype: tl.constexpr, INT8: tl.constexpr):
    """Convert what `_load_keys` loaded for a product: itself, or its even and its odd numbers."""
    if not INT8:
        return (entries.to(dtype),)
    elif dtype == tl.bfloat16:
        return (signed_bytes(entries), signed_bytes(shift_right(entries, 8)))
    else:
        return ((entries << 8 >> 8).to(dtype), (entries >> 8).to(dtype))


@jit
def _split_numbers(x, M: tl.constexpr, C: tl.constexpr, INT8: tl.constexpr):
    """Split [M, C] as `_operands` does."""
    if INT8:
        even, odd = tl.split(tl.reshape(x, [M, C // 2, 2]))
        return (even, odd)
    else:
        return (x,)


@jit
def _add_block(
    row_max,
    row_sum,
    accs,
    queries,
    keys,
    values,
    block,
    position,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    INT8: tl.constexpr,
):
    """Add a block of cached positions to the softmax so far: row_max, row_sum [M], accs [M, C].

    queries and accs are split as `_split_numbers` does.
    """
    dtype: tl.constexpr = queries[0].dtype
    k, v = _operands(keys[0], dtype, INT8), _operands(values[0], dtype, INT8)
    key = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.dot(queries[0], tl.trans(k[0]))
    if INT8:
        scores = tl.dot(queries[1], tl.trans(k[1]), acc=scores) * keys[1][None, :]
    weights, rescale, row_max, row_sum = _weigh(
        scores, row_max, row_sum, values[1], key, position, WINDOW, INT8, dtype
    )
    first = tl.dot(weights, v[0], acc=accs[0] * rescale)
    if INT8:
        accs = (first, tl.dot(weights, v[1], acc=accs[1] * rescale))
    else:
        accs = (first,)
    return row_max, row_sum, accs


@jit
def _to_bf16(x):
    """Round fp32 to bf16. Tests replace it: Triton's interpreter truncates."""
    return x.to(tl.bfloat16)


@jit
def _int8_scale(largest):
    """The scale bf16 [R, 1] of rows whose largest magnitudes are given, as `quantize_int8`."""
    scale = _to_bf16(tl.div_rn(largest, tl.full([largest.shape[0], 1], 127, tl.float32)))
    return tl.where(scale == 0, tl.full([largest.shape[0], 1], 1, tl.bfloat16), scale)


@jit
def _int8_codes(x, scale):
    """Quantize x, fp32, by a scale -> codes, codes * scale, both in fp32.

    The latter is NaN where x is not finite, as the token must be.
    """
    ratio = tl.clamp(tl.div_rn(x, scale.to(tl.float32)), -127.0, 127.0)
    codes = (ratio + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: the sum is rounded to an integer
    return codes, codes * scale.to(tl.float32) + (x - x)


@jit
def _quantize(x, C: tl.constexpr):
    """`formats.kv_cache.quantize_int8` of heads [R, C] -> codes, scales, codes * scales in fp32.

    Codes are units as `_load_keys` reads them [R, C / 2]; scales [R, 1].
    """
    x = x.to(tl.float32)
    scale = _int8_scale(tl.max(tl.abs(x), 1, keep_dims=True))
    codes, numbers = _int8_codes(x, scale)
    even, odd = tl.split(tl.reshape(codes.to(tl.int16), [x.shape[0], C // 2, 2]))
    return (even & 255) | (odd << 8), scale, numbers


@jit
def _store_heads(
    y,
    gates,
    sink,
    first_head,
    column,
    row_max,
    row_sum,
    acc,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Divide acc [ROWS, N] by the sum of weights, with sink and gate; store the first G rows.

    sink: fp32, one number or [ROWS]. column [N]: the numbers of a head that acc has.
    """
    row = tl.arange(0, ROWS)
    head = first_head + tl.minimum(row, G - 1)
    out = _finish_softmax(row_max, row_sum, acc, sink, HAS_SINKS)
    at = head[:, None] * C + column[None, :]
    if GATED:
        gate = tl.load(gates + at).to(tl.float32)
        out = out / (1 + tl.exp(-gate))
    tl.store(y + at, out.to(y.dtype.element_ty), mask=(row < G)[:, None])


@jit
def _count_parts(
    position,
    S: tl.constexpr,
    P: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return a sequence's first block, the block after its last one, and its number of parts."""
    first = tl.maximum(position - WINDOW + 1, 0) // BLOCK if WINDOW < S else 0
    end = (position + BLOCK - 1) // BLOCK
    parts = (end - first + PART_BLOCKS - 1) // PART_BLOCKS
    return first, end, tl.minimum(tl.maximum(parts, 1), P)


@jit
def _merge_head(
    y,
    gates,
    sink,
    partial,
    sums,
    head,
    column,
    at,
    is_part,
    C: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Merge the parts of one query's head, and store numbers `column` of its output.

    at: each part's row of partial [rows, C] and sums [rows, 2]. y, gates: as of `_store_heads`.
    """
    maxima = tl.load(sums + at * 2, mask=is_part, other=float("-inf"))
    totals = tl.load(sums + at * 2 + 1, mask=is_part, other=0.0)
    numbers = at[:, None] * C + column[None, :]
    numbers = tl.load(partial + numbers, mask=is_part[:, None], other=0.0)
    largest = tl.max(maxima, 0)
    share = tl.exp(maxima - largest)
    total, acc = tl.sum(totals * share, 0), tl.sum(numbers * share[:, None], 0)
    _store_heads(
        y,
        gates,
        sink,
        head,
        column,
        tl.full([1], 0, tl.float32) + largest,
        tl.full([1], 0, tl.float32) + total,
        acc[None, :],
        1,
        1,
        C,
        HAS_SINKS,
        GATED,
    )


# Grid [P, K, B]: a program computes one KV head of one sequence over every P-th block of positions.
# Its M rows are the G query heads, padded to a tensor core's tile. The first part also has the
# token's own position, which it appends to the cache: no other program reads it.
#
# The first block is loaded before the wait for qkv. Positions before `position` were written by
# earlier steps.
@jit
def _attend_split(
    qkv,
    rope,
    q_norm,
    k_norm,
    sinks,
    positions,
    cache,
    scales,
    partial,
    sums,
    y,
    S: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
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
    INT8: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    part, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    position = tl.load(positions + sequence).to(tl.int32)
    first, end, parts = _count_parts(position, S, P, PART_BLOCKS, WINDOW, BLOCK)
    if part >= parts:
        return
    pair = sequence * K + kv_head
    WIDTH: tl.constexpr = C // 2 if INT8 else C
    keys, values = cache + pair * S * WIDTH, cache + (ENTRIES + pair * S) * WIDTH
    key_scales, value_scales = scales + pair * S, scales + ENTRIES + pair * S
    first_keys = _load_keys(keys, key_scales, first + part, WIDTH, BLOCK, INT8)
    first_values = _load_keys(values, value_scales, first + part, WIDTH, BLOCK, INT8)
    c = tl.arange(0, C)[None, :]
    rotation = _load_rotation(rope, sequence, c, C, ROTARY_DIM, ROPE_WIDTH, ROPE_BEGIN)
    G: tl.constexpr = H // K
    row = tl.arange(0, M)
    head = kv_head * G + tl.minimum(row, G - 1)
    if FULL_NORM:
        q_norm, k_norm = q_norm + head[:, None] * C, k_norm + kv_head * C
    elif HAS_NORM and C > 128:
        # One load for each row: a row's lanes would hold other numbers, and exchange all others.
        q_norm += tl.zeros([M, 1], tl.int32)
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
    y, gates = y + sequence * H * C, qkv + FIRST_GATE * C
    own_q = qkv + head[:, None] * C
    q_rms, k_rms = 1.0, 1.0
    if FULL_NORM:
        q_rms, k_rms = _inverse_rms(qkv, qkv + H * C, H * C, K * C, EPS)
    query = _load_head(
        own_q, q_weight, q_rms, rotation, C, ROTARY_DIM, EPS, CLIP, HAS_NORM, FULL_NORM
    )
    query *= SCALE
    row_max, row_sum = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, C], tl.float32)
    if part == 0:
        own_k, own_v = qkv + (H + kv_head) * C, qkv + (FIRST_VALUE + kv_head) * C
        own_key = _load_head(
            own_k, k_weight, k_rms, rotation, C, ROTARY_DIM, EPS, CLIP, HAS_NORM, FULL_NORM
        )
        own_value = _load_value(own_v, c, C, EPS, CLIP, NORM_VALUES)
        own_key = own_key.to(own_value.dtype)
        at = position * C + c
        if INT8:
            key_codes, key_scale, own_key = _quantize(own_key, C)
            value_codes, value_scale, own_value = _quantize(own_value, C)
            unit = position * WIDTH + tl.arange(0, WIDTH)[None, :]
            tl.store(keys + unit, key_codes)
            tl.store(values + unit, value_codes)
            one = tl.zeros([1, 1], tl.int32) + position
            tl.store(key_scales + one, key_scale)
            tl.store(value_scales + one, value_scale)
        else:
            tl.store(keys + at, own_key)
            tl.store(values + at, own_value)
        row_max = tl.sum(query * own_key.to(tl.float32), 1)
        row_sum += 1.0
        acc += own_value.to(tl.float32)
    queries = _split_numbers(query.to(qkv.dtype.element_ty), M, C, INT8)
    accs = _split_numbers(acc, M, C, INT8)
    first += part
    row_max, row_sum, accs = _add_block(
        row_max,
        row_sum,
        accs,
        queries,
        first_keys,
        first_values,
        first,
        position,
        WINDOW,
        BLOCK,
        INT8,
    )
    for block in tl.range(first + parts, end, parts, num_stages=STAGES):
        k = _load_keys(keys, key_scales, block, WIDTH, BLOCK, INT8)
        v = _load_keys(values, value_scales, block, WIDTH, BLOCK, INT8)
        row_max, row_sum, accs = _add_block(
            row_max, row_sum, accs, queries, k, v, block, position, WINDOW, BLOCK, INT8
        )
    acc = tl.reshape(tl.join(accs[0], accs[1]), [M, C]) if INT8 else accs[0]
    if parts == 1:
        _store_heads(
            y,
            gates,
            sink,
            kv_head * G,
            tl.arange(0, C),
            row_max,
            row_sum,
            acc,
            M,
            G,
            C,
            HAS_SINKS,
            GATED,
        )
    else:
        # Parts of a KV head are [P, ROWS, C], then [P, ROWS, 2].
        partial += pair * P * ROWS * C
        sums += pair * P * ROWS * 2
        at = part * ROWS + row
        tl.store(partial + at[:, None] * C + c, acc, mask=(row < ROWS)[:, None])
        tl.store(sums + at * 2, row_max, mask=row < ROWS)
        tl.store(sums + at * 2 + 1, row_sum, mask=row < ROWS)


# Grid [H, C / COLUMNS, B]: a program merges COLUMNS numbers of one query head, if it has several
# parts. Its loads are all in flight at once. The next kernel starts at once, too:
# ops/products/experts.py.
@jit
def _merge_split(
    qkv,
    sinks,
    positions,
    partial,
    sums,
    y,
    S: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GATED: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    head, sequence = tl.program_id(0), tl.program_id(2).to(tl.int64)
    position = tl.load(positions + sequence).to(tl.int32)
    _, _, parts = _count_parts(position, S, P, PART_BLOCKS, WINDOW, BLOCK)
    sink = tl.load(sinks + head).to(tl.float32) if HAS_SINKS else 0.0
    if PDL:
        # Also without parts: the next kernel waits for this one, and so for the first one.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if parts == 1:
        return
    G: tl.constexpr = H // K
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)
    at = (((sequence * K + head // G) * P) * ROWS + head % G) + part * ROWS
    _merge_head(
        y + sequence * H * C,
        qkv + (sequence * HEADS + HEADS - H) * C,
        sink,
        partial,
        sums,
        head,
        column,
        at,
        part < parts,
        C,
        HAS_SINKS,
        GATED,
    )


def count_parts(B: int, K: int, S: int, window: int, part: int, device: torch.device) -> int:
    """Return P: parts of `part` positions, but no more programs than the GPU runs side by side."""
    processors = gpu_of(device).multiprocessors
    longest = -(-min(S, window) // part)
    return max(1, min(longest, PROGRAMS * processors // (B * K), MAX_PARTS))


@torch.library.custom_op("moe_fast::attend_split", mutates_args=("cache", "scales"))
def attend_split(
    qkv: Tensor,
    rope: Tensor,
    positions: Tensor,
    cache: Tensor,
    scales: Tensor | None,
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
    """`decode_attention.attend_token`, over a cache of any length, which may be int8.

    scales: bf16 [2, rows, K, S, 1] of an int8 cache [2, rows, K, S, C]; None: the cache has qkv's
    dtype. S is a multiple of 128. The scores' products round q to qkv's dtype, and the weights.
    """
    B, (rows, K, S, C) = qkv.shape[0], cache.shape[1:]
    y = empty_output(qkv, cache, keys_are_values, gated)
    H, pdl, device = y.shape[-1] // C, supports_pdl(qkv), qkv.device
    tile = choose_tile(C, cache.element_size())
    blocks = -(-PART // tile.block)
    P = count_parts(B, K, S, window, blocks * tile.block, device)
    padded, has_norm = triton.next_power_of_2(H // K), q_norm is not None
    partial = qkv.new_empty(B * K * P * padded * C, dtype=torch.float32)
    sums = qkv.new_empty(B * K * P * padded * 2, dtype=torch.float32)
    # The kernel needs a valid pointer for an absent tensor, which it then does not read.
    q_norm, k_norm, sink = (qkv if tensor is None else tensor for tensor in (q_norm, k_norm, sinks))
    shape = dict(S=S, H=H, K=K, C=C, P=P, PART_BLOCKS=blocks, WINDOW=window, BLOCK=tile.block)
    flags = dict(ROWS=padded, HAS_SINKS=sinks is not None, GATED=gated, PDL=pdl, launch_pdl=pdl)
    scores = dict(ROTARY_DIM=rotary_dim, SCALE=scale, EPS=eps, CLIP=clip)
    scores |= dict(HAS_NORM=has_norm, FULL_NORM=full_norm)
    more = dict(NORM_VALUES=norm_values, KEYS_ARE_VALUES=keys_are_values, INT8=scales is not None)
    more |= dict(ROPE_WIDTH=rope.shape[-1], ROPE_BEGIN=rope_begin, ENTRIES=rows * K * S)
    qkv = qkv.contiguous()
    stored = cache if scales is None else cache.view(torch.int16)
    _attend_split[P, K, B](
        qkv,
        rope,
        q_norm,
        k_norm,
        sink,
        positions,
        stored,
        stored if scales is None else scales,
        partial,
        sums,
        y,
        **shape,
        **flags,
        **scores,
        **more,
        M=max(16, padded),
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    if P > 1:
        columns = min(C, MERGED_COLUMNS)
        _merge_split[H, C // columns, B](
            qkv,
            sink,
            positions,
            partial,
            sums,
            y,
            **shape,
            **flags,
            HEADS=qkv.shape[-1] // C,
            PARTS=triton.next_power_of_2(P),
            COLUMNS=columns,
            num_warps=MERGE_WARPS,
        )
    return y


@attend_split.register_fake
def _(qkv, rope, positions, cache, scales, q_norm, k_norm, sinks, *settings) -> Tensor:
    _, keys_are_values, _, gated = (*settings[5:], *(False,) * 4)[:4]
    return empty_output(qkv, cache, keys_are_values, gated)
