"""Decode attention for up to 64 queries of each sequence: RoPE, cache append and attention.

The kernels compute for drafts and short prompts what ops/attention/decode_attention.py and
ops/attention/split_attention.py do for one query. A program has all queries of a few query heads of one KV
head, as rows of one tensor-core product. So it reads each older key and value once for all queries,
and there are about as many programs as for one query. Programs of a kernel cannot wait for each
other: each computes the keys and values of the call's own tokens itself, and reads only earlier
positions from the cache. Over a short cache that is one kernel; else positions are split among
programs, and a second kernel merges the parts.

Letters: B sequences, Q queries of each, S positions of the cache, H query heads, K KV heads,
G = H / K, C head dim, P parts of the positions, at most, M rows of a program (queries times heads).
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import math

import torch
from torch import Tensor

from ops.attention.decode_attention import (
    FEWEST_ROWS,
    _finish_softmax,
    _keep_layout,
    _load_head,
    _load_head_norm,
    _load_rotation,
    _load_value,
    empty_output,
    online_softmax,
)
from ops.attention.split_attention import (
    MERGE_WARPS,
    MERGED_COLUMNS,
    PART,
    Tile,
    _count_parts,
    _load_keys,
    _merge_head,
    _operands,
    _quantize,
    _split_numbers,
    count_parts,
)
from ops.launch import jit, supports_pdl, tl, triton

MAX_QUERIES = 64
MAX_HEAD = 256  # numbers of a head: larger ones do not fit in registers
MAX_NUMBERS = 64 * 128  # queries of a head times its numbers: more do not fit in registers
ONE_PART = 640 * 128  # numbers of a KV head's keys up to which one program reads them all
RMS_COLUMNS = 256  # numbers of each token that the RMS over all heads reads at once


@jit
def _inverse_rms_of_rows(x, is_row, WIDTH: tl.constexpr, EPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return 1 / RMS [M, 1] of the WIDTH numbers at each pointer of x [M, 1], where is_row."""
    number = tl.arange(0, COLUMNS)[None, :]
    squares = tl.zeros([x.shape[0], COLUMNS], tl.float32)
    for begin in tl.static_range(0, WIDTH, COLUMNS):
        mask = is_row & (begin + number < WIDTH)
        some = tl.load(x + begin + number, mask=mask, other=0.0).to(tl.float32)
        squares += some * some
    return tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / WIDTH + EPS)


@jit
def _add_older(
    row_max,
    row_sum,
    accs,
    queries,
    keys,
    values,
    block,
    start,
    query,
    S: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    INT8: tl.constexpr,
):
    """Add a block of positions before `start` to the softmax so far: row_max, row_sum [M], accs.

    query [M]: each row's query, at position start + query. queries and accs [M, C] are split as
    `_split_numbers` does.
    """
    dtype: tl.constexpr = queries[0].dtype
    k, v = _operands(keys[0], dtype, INT8), _operands(values[0], dtype, INT8)
    key = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.dot(queries[0], tl.trans(k[0]))
    if INT8:
        scores = tl.dot(queries[1], tl.trans(k[1]), acc=scores) * keys[1][None, :]
    seen = (key < start)[None, :]
    if WINDOW < S:
        seen = seen & (key[None, :] > (start + query)[:, None] - WINDOW)
    scores = tl.where(seen, scores, float("-inf"))
    weights, rescale, row_max, row_sum = online_softmax(scores, row_max, row_sum)
    if INT8:
        weights *= values[1][None, :]
    weights, rescale = weights.to(dtype), rescale[:, None]
    first = tl.dot(weights, v[0], acc=accs[0] * rescale)
    if INT8:
        accs = (first, tl.dot(weights, v[1], acc=accs[1] * rescale))
    else:
        accs = (first,)
    return row_max, row_sum, accs


# Grid [P, K * SPLITS, B]: a program computes EACH query heads of one KV head, SPLITS programs a KV
# head, over every P-th block of older positions. Row r is query r // EACH of head r % EACH.
#
# The first part also has the call's own tokens. The others compute and mask them: a branch would
# keep their loads from being in flight with the queries'. The first program of each KV head appends
# the keys and values to the cache.
#
# The first block of the cache is loaded before the wait for qkv, and used only if it has older
# positions: a new prompt has none.
@jit
def _attend_queries(
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
    Q: tl.constexpr,
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
    EACH: tl.constexpr,
    SPLITS: tl.constexpr,
    T: tl.constexpr,
    RMS_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    part, program, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = tl.load(positions + sequence * Q).to(tl.int32)
    first, end, parts = _count_parts(start, S, P, PART_BLOCKS, WINDOW, BLOCK)
    if part >= parts:
        return
    kv_head, split = program // SPLITS, program % SPLITS
    pair = sequence * K + kv_head
    WIDTH: tl.constexpr = C // 2 if INT8 else C
    keys, values = cache + pair * S * WIDTH, cache + (ENTRIES + pair * S) * WIDTH
    key_scales, value_scales = scales + pair * S, scales + ENTRIES + pair * S
    first += part
    first_keys = _load_keys(keys, key_scales, first, WIDTH, BLOCK, INT8)
    first_values = _load_keys(values, value_scales, first, WIDTH, BLOCK, INT8)

    G: tl.constexpr = H // K
    row, t, c = tl.arange(0, M), tl.arange(0, T), tl.arange(0, C)[None, :]
    query, head = tl.minimum(row // EACH, Q - 1), split * EACH + row % EACH
    is_row = (row < Q * EACH) & (head < G)
    head = kv_head * G + tl.minimum(head, G - 1)
    token, own_token = sequence * Q + query[:, None], sequence * Q + tl.minimum(t, Q - 1)[:, None]
    rotation = _load_rotation(rope, token, c, C, ROTARY_DIM, ROPE_WIDTH, ROPE_BEGIN)
    own_rotation = _load_rotation(rope, own_token, c, C, ROTARY_DIM, ROPE_WIDTH, ROPE_BEGIN)
    if FULL_NORM:
        q_norm, k_norm = q_norm + head[:, None] * C, k_norm + kv_head * C
    elif HAS_NORM and C > 128:
        # One load for each row: a row's lanes would hold other numbers, and exchange all others.
        q_norm, k_norm = q_norm + tl.zeros([M, 1], tl.int32), k_norm + tl.zeros([T, 1], tl.int32)
    q_weight = _load_head_norm(q_norm, rotation, HAS_NORM)
    k_weight = _load_head_norm(k_norm, own_rotation, HAS_NORM)
    sink = tl.load(sinks + head).to(tl.float32) if HAS_SINKS else 0.0
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    FIRST_VALUE: tl.constexpr = H if KEYS_ARE_VALUES else H + K
    FIRST_GATE: tl.constexpr = FIRST_VALUE + K
    HEADS: tl.constexpr = FIRST_GATE + H if GATED else FIRST_GATE
    own, q = qkv + own_token * HEADS * C, qkv + token * HEADS * C
    own_value = _load_value(own + (FIRST_VALUE + kv_head) * C, c, C, EPS, CLIP, NORM_VALUES)
    q_rms, k_rms = 1.0, 1.0
    if FULL_NORM:
        q_rms = _inverse_rms_of_rows(q, is_row[:, None], H * C, EPS, RMS_COLUMNS)
        k_rms = _inverse_rms_of_rows(own + H * C, (t < Q)[:, None], K * C, EPS, RMS_COLUMNS)
    own_k, q = own + (H + kv_head) * C, q + head[:, None] * C
    own_key = _load_head(
        own_k, k_weight, k_rms, own_rotation, C, ROTARY_DIM, EPS, CLIP, HAS_NORM, FULL_NORM
    )
    x = _load_head(q, q_weight, q_rms, rotation, C, ROTARY_DIM, EPS, CLIP, HAS_NORM, FULL_NORM)
    dtype: tl.constexpr = qkv.dtype.element_ty
    x, own_key = _keep_layout(x * SCALE).to(dtype), _keep_layout(own_key).to(dtype)
    is_stored = (t < tl.where((split == 0) & (part == 0), Q, 0))[:, None]
    position = (start + t)[:, None]
    if INT8:
        key_codes, key_scale, own_key = _quantize(own_key, C)
        value_codes, value_scale, own_value = _quantize(own_value, C)
        unit = position * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(keys + unit, key_codes, mask=is_stored)
        tl.store(values + unit, value_codes, mask=is_stored)
        tl.store(key_scales + position, key_scale, mask=is_stored)
        tl.store(value_scales + position, value_scale, mask=is_stored)
        own_key, own_value = own_key.to(dtype), own_value.to(dtype)
    else:
        tl.store(keys + position * C + c, own_key, mask=is_stored)
        tl.store(values + position * C + c, own_value, mask=is_stored)

    distance = query[:, None] - t[None, :]
    seen = (distance >= 0) & (distance < tl.where(part == 0, WINDOW, 0))
    scores = tl.where(seen, tl.dot(x, tl.trans(own_key)), float("-inf"))
    row_max, row_sum = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    weights, _, row_max, row_sum = online_softmax(scores, row_max, row_sum)
    acc = tl.dot(weights.to(dtype), own_value)
    queries, accs = _split_numbers(x, M, C, INT8), _split_numbers(acc, M, C, INT8)
    if first < end:
        row_max, row_sum, accs = _add_older(
            row_max,
            row_sum,
            accs,
            queries,
            first_keys,
            first_values,
            first,
            start,
            query,
            S,
            WINDOW,
            BLOCK,
            INT8,
        )
    for block in tl.range(first + parts, end, parts, num_stages=STAGES):
        k = _load_keys(keys, key_scales, block, WIDTH, BLOCK, INT8)
        v = _load_keys(values, value_scales, block, WIDTH, BLOCK, INT8)
        row_max, row_sum, accs = _add_older(
            row_max, row_sum, accs, queries, k, v, block, start, query, S, WINDOW, BLOCK, INT8
        )
    acc = tl.reshape(tl.join(accs[0], accs[1]), [M, C]) if INT8 else accs[0]
    if parts == 1:
        out = _finish_softmax(row_max, row_sum, acc, sink, HAS_SINKS)
        if GATED:
            gates = qkv + (token * HEADS + FIRST_GATE + head[:, None]) * C
            out = out / (1 + tl.exp(-tl.load(gates + c).to(tl.float32)))
        output = (token * H + head[:, None]) * C + c
        tl.store(y + output, out.to(y.dtype.element_ty), mask=is_row[:, None])
    else:
        # Parts are [B, K * SPLITS, P, M, C], then [B, K * SPLITS, P, M, 2].
        at = ((sequence * K * SPLITS + program) * P + part) * M + row
        tl.store(partial + at[:, None] * C + c, acc, mask=is_row[:, None])
        tl.store(sums + at * 2, row_max, mask=is_row)
        tl.store(sums + at * 2 + 1, row_sum, mask=is_row)


# Grid [Q * H, C / COLUMNS, B]: a program merges COLUMNS numbers of one query's head, if it has
# several parts. Its loads are all in flight at once. The next kernel starts at once, too:
# ops/products/experts.py.
@jit
def _merge_queries(
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
    Q: tl.constexpr,
    P: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GATED: tl.constexpr,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    EACH: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    query, head = tl.program_id(0) // H, tl.program_id(0) % H
    sequence = tl.program_id(2).to(tl.int64)
    start = tl.load(positions + sequence * Q).to(tl.int32)
    _, _, parts = _count_parts(start, S, P, PART_BLOCKS, WINDOW, BLOCK)
    sink = tl.load(sinks + head).to(tl.float32) if HAS_SINKS else 0.0
    if PDL:
        # Also without parts: the next kernel waits for this one, and so for the first one.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if parts == 1:
        return
    G: tl.constexpr = H // K
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part, token = tl.arange(0, PARTS), sequence * Q + query
    program = sequence * K * SPLITS + head // G * SPLITS + head % G // EACH
    at = (program * P + part) * M + query * EACH + head % G % EACH
    _merge_head(
        y + token * H * C,
        qkv + (token * HEADS + HEADS - H) * C,
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


@torch.library.custom_op("moe_fast::attend_queries", mutates_args=("cache", "scales"))
def attend_queries(
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
    """`split_attention.attend_split` for Q queries of each sequence -> [B, Q, H * C].

    qkv [B, Q, (H + 2 K) C], as many queries as `takes_queries` says, at consecutive positions
    [B, Q]. Each sees the ones before it. S is a multiple of 16. Padding is computed as any other
    query, and its keys and values are stored.
    """
    (B, Q), (rows, K, S, C) = qkv.shape[:2], cache.shape[1:]
    y = empty_output(qkv, cache, keys_are_values, gated)
    H, pdl, device = y.shape[-1] // C, supports_pdl(qkv), qkv.device
    tile, is_one_part = choose_tile(C, cache.element_size()), min(S, window) * C <= ONE_PART
    M = choose_rows(Q, H // K, C, is_one_part)
    each = min(H // K, M // Q)
    splits = -(-H // K // each)
    block = math.gcd(tile.block, S)
    blocks = -(-PART // block)
    P = 1 if is_one_part else count_parts(B, K * splits, S, window, blocks * block, device)
    count = B * K * splits * P * M if P > 1 else 0
    partial = qkv.new_empty(count * C, dtype=torch.float32)
    sums = qkv.new_empty(count * 2, dtype=torch.float32)
    has_norm = q_norm is not None
    # The kernel needs a valid pointer for an absent tensor, which it then does not read.
    q_norm, k_norm, sink = (qkv if tensor is None else tensor for tensor in (q_norm, k_norm, sinks))
    shape = dict(S=S, H=H, K=K, C=C, Q=Q, P=P, PART_BLOCKS=blocks, WINDOW=window, BLOCK=block)
    shape |= dict(M=M, EACH=each, SPLITS=splits)
    flags = dict(HAS_SINKS=sinks is not None, GATED=gated, PDL=pdl, launch_pdl=pdl)
    scores = dict(ROTARY_DIM=rotary_dim, SCALE=scale, EPS=eps, CLIP=clip)
    scores |= dict(HAS_NORM=has_norm, FULL_NORM=full_norm)
    more = dict(NORM_VALUES=norm_values, KEYS_ARE_VALUES=keys_are_values, INT8=scales is not None)
    more |= dict(ROPE_WIDTH=rope.shape[-1], ROPE_BEGIN=rope_begin, ENTRIES=rows * K * S)
    qkv = qkv.contiguous()
    stored = cache if scales is None else cache.view(torch.int16)
    _attend_queries[P, K * splits, B](
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
        T=max(FEWEST_ROWS, triton.next_power_of_2(Q)),
        RMS_COLUMNS=RMS_COLUMNS,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    if P > 1:
        columns = min(C, MERGED_COLUMNS)
        _merge_queries[Q * H, C // columns, B](
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


def choose_tile(C: int, itemsize: int) -> Tile:
    """Return the tile for heads of this size, of a plain or an int8 cache (not measured)."""
    return Tile(min(128, 128 * 128 // C), 8, 3 if itemsize == 1 else 2)


def takes_queries(queries: int, C: int) -> bool:
    """Whether the kernel takes this many queries of a sequence, with heads of C numbers."""
    fits = triton.next_power_of_2(queries) * C <= max(MAX_NUMBERS, 8 * C)
    return queries <= MAX_QUERIES and C <= MAX_HEAD and fits


def choose_rows(Q: int, G: int, C: int, is_one_part: bool) -> int:
    """Return M, for Q queries of some of the G query heads of a KV head.

    16 is one tile of a tensor core. In one part a program with fewer heads has less to do, and
    there are enough idle processors. In several parts, fewer programs read the same keys from L2.
    """
    one_head = max(FEWEST_ROWS, triton.next_power_of_2(Q))
    if is_one_part or C > 128:
        return one_head
    return max(one_head, min(32, triton.next_power_of_2(Q * G)))


@attend_queries.register_fake
def _(qkv, rope, positions, cache, scales, q_norm, k_norm, sinks, *settings) -> Tensor:
    _, keys_are_values, _, gated = (*settings[5:], *(False,) * 4)[:4]
    return empty_output(qkv, cache, keys_are_values, gated)
