"""Grouped-query attention of a few tokens over a KV cache, in one kernel.

    _attend    norms of q and k, RoPE, cache append, attention
    _merge     merge of the parts, for several queries of a sequence

A program attends with some query heads of one KV head, as rows of a tile of tensor cores. It reads
each older key and value once for all of them. Programs share the positions of a long sequence
(Flash-Decoding, Dao et al. 2023): `_find_parts` chooses how many from the position, on the GPU, so
that a short sequence takes one program a KV head, however long its cache is. The other programs end
at once. With one query, the last program of a KV head to end merges the parts: a second kernel
takes longer. With several queries it has too much to merge, and a second kernel does.

No program waits for another: each computes the keys and values of the call's own tokens itself, and
reads only earlier positions from the cache.

With programmatic dependent launch (PDL, Hopper and newer) the first blocks of the cache are loaded
while `wqkv` runs: they are the first stages of a pipelined loop, in which the first iteration waits
for `wqkv`. `wqkv` and the kernel before it must not write what is read before the wait.

`attend_int8` is for compiled attention: q is normed and rotated, its own keys are in the cache.

Letters: B sequences, Q queries of each, S positions of the cache, H query heads, K KV heads,
G = H / K, C head dim, P parts of the positions, at most, M rows of a program (queries times heads).
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention.cache_blocks import add_block, append, join_numbers, load_block, split_numbers
from ops.attention.heads import (
    inverse_rms,
    inverse_rms_of_rows,
    keep_layout,
    load_head,
    load_head_norm,
    load_rotation,
    load_value,
    prefetch,
)
from ops.attention.softmax import MAX_PARTS, PROGRAMS, finish_softmax, online_softmax
from ops.gpu import gpu_of
from ops.launch import await_previous, fit, jit, launch, tl

FEWEST_ROWS = 16  # that tensor cores multiply
FEW_PARTS = 32  # up to which a part is one block: one program takes long to merge more
MERGED_NUMBERS = 16384  # numbers of parts in flight, of a program that merges: registers
WARPS, MERGE_WARPS = 8, 2
MERGED_COLUMNS = 32  # numbers of a head that a program of `_merge` merges
NO_WINDOW = 1 << 30
MAX_QUERIES = 64
MAX_HEAD = 256  # numbers of a head, for several queries: larger ones do not fit in registers
MAX_NUMBERS = 64 * 128  # queries of a head times its numbers: more do not fit in registers
ONE_PART = 640 * 128  # numbers of a KV head's keys that one program reads, for several queries


@dataclass(frozen=True)
class AttentionSettings:
    """What a layer's attention computes, in this order.

    Clip q, k and v to +-clip (0: none); RMS norm of each head of q and k; RoPE of the first
    rotary_dim numbers; scores times scale; softmax over the last `window` positions.
    """

    heads: int
    kv_heads: int
    head_dim: int  # a power of two from 16 to 512
    rotary_dim: int
    scale: float
    eps: float = 0.0  # of norms
    clip: float = 0.0
    window: int = NO_WINDOW  # positions that a token sees, its own included
    full_norm: bool = False  # norms over all heads of q and of k, before the clip
    norm_values: bool = False  # RMS norm of values too, without a weight
    keys_are_values: bool = False  # qkv has no values: they are its keys before norm and RoPE
    gated: bool = False  # qkv ends with H more heads, whose sigmoid the output is multiplied by
    rope_begin: int = 0  # the layer's first column of `model.Context.rope`

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def first_value(self) -> int:
        """The first head of qkv that is a value."""
        return self.heads if self.keys_are_values else self.heads + self.kv_heads

    @property
    def first_gate(self) -> int:
        return self.first_value + self.kv_heads

    @property
    def projected(self) -> int:
        """Heads of qkv."""
        return self.first_gate + self.heads if self.gated else self.first_gate

    def encoded(self) -> str:
        """Return the settings as text: a custom operator takes no dataclass."""
        return json.dumps(astuple(self))


@cache
def decode_settings(text: str) -> AttentionSettings:
    return AttentionSettings(*json.loads(text))


class HeadWeights(NamedTuple):
    """Weights of a layer's heads, each of which may be absent."""

    q_norm: Tensor | None = None  # [C]; [H * C] with full_norm
    k_norm: Tensor | None = None  # [C]; [K * C] with full_norm
    sinks: Tensor | None = None  # [H]: a score more, whose value is 0


class Stored(NamedTuple):
    """A KV cache [2, rows, K, S, C], of which the first B rows are used.

    scales: bf16 [2, rows, K, S, 1] of an int8 cache, whose entries are viewed as int16.
    """

    entries: Tensor
    scales: Tensor | None


class Results(NamedTuple):
    """What the kernels write. Parts of a program are [P, ROWS, C] and [P, ROWS, 2], in fp32."""

    y: Tensor | None  # [B, Q, H * C]
    partial: Tensor | None  # not yet divided by the sum of weights
    sums: Tensor | None  # the maximum score, and the sum of exp(score - maximum)
    arrivals: Tensor | None  # int32: programs of a KV head that have ended; 0 between launches


@dataclass(frozen=True)
class Tile:
    """How a program reads the positions."""

    block: int  # positions at once
    stages: int  # blocks in flight, and the one in use
    wide: bool = False  # read two blocks as one, where one part has more than one and up to two


@dataclass(frozen=True)
class KernelSettings:
    """Settings of the kernels: a layer's, and how its work is divided."""

    layer: AttentionSettings
    tile: Tile
    length: int  # S
    entries: int  # heads times positions of the cache's keys: values follow
    queries: int  # Q
    rows: int  # M
    each: int  # query heads of a program
    parts: int  # P
    rope_width: int = 0
    int8: bool = False
    appends: bool = True  # q is raw, and its own keys are not yet in the cache
    merges: bool = True  # the last program of a KV head merges its parts
    one_part: int = 0  # positions up to which there is one part

    @property
    def splits(self) -> int:
        """Programs a KV head and part."""
        return -(-self.layer.group // self.each)

    @property
    def pairs(self) -> int:
        """Programs a sequence and part."""
        return self.layer.kv_heads * self.splits

    @property
    def own_rows(self) -> int:
        """Rows of a tile of the call's own tokens; with one query, the same token in all."""
        return max(FEWEST_ROWS, pow2(self.queries)) if self.queries > 1 else self.rows

    @property
    def stored_rows(self) -> int:
        """Rows of a program's parts."""
        return pow2(self.queries * self.each)

    @property
    def width(self) -> int:
        """Numbers, or int16 units of an int8 cache, of a head."""
        return self.layer.head_dim // 2 if self.int8 else self.layer.head_dim

    @property
    def parts_at_once(self) -> int:
        """Parts that a program merges at once."""
        fitting = MERGED_NUMBERS // (self.stored_rows * self.layer.head_dim)
        return max(1, min(pow2(self.parts), fitting))

    @property
    def few_parts(self) -> int:
        """Parts of one block, at most."""
        return FEW_PARTS if self.merges else MAX_PARTS

    @property
    def rms_columns(self) -> int:
        """Numbers of each token that the RMS over all heads reads at once."""
        return 256

    @property
    def padded_parts(self) -> int:
        return pow2(self.parts)

    @property
    def bodies(self) -> int:
        """Compile-time cases of a program: blocks of one size, or two."""
        return 2 if self.tile.wide else 1

    @property
    def columns(self) -> int:
        return min(self.layer.head_dim, MERGED_COLUMNS)

    @property
    def score_scale(self) -> float:
        """A factor of scores that queries do not have yet."""
        return 1.0 if self.appends else self.layer.scale

    @property
    def align(self) -> int:
        """Of a part's first position: vectors of int8 scales are loaded at multiples of it."""
        return 16 if self.int8 else 1


def pow2(n: int) -> int:
    """Return the least power of two from n on."""
    return 1 << (n - 1).bit_length()


# Kernels ------------------------------------------------------------------------------------------


@jit
def _find_parts(positions, sequence, s: tl.constexpr):
    """Choose how many programs share a sequence's older positions.

    Return the position of its first query, the first position that this sees, the end of older
    positions, and the number of parts. A part is one block as long as there are few parts.
    """
    Q: tl.constexpr = s.queries
    WINDOW: tl.constexpr = s.layer.window
    BLOCK: tl.constexpr = s.tile.block
    start = tl.load(positions + sequence * Q).to(tl.int32)
    first = tl.maximum(start - WINDOW + 1, 0) // s.align * s.align if WINDOW < s.length else 0
    if not s.appends:
        return start, first, start + Q, s.parts
    blocks = (start - first + BLOCK - 1) // BLOCK
    parts = tl.minimum(tl.maximum(blocks // 2, tl.minimum(blocks, s.few_parts)), s.parts)
    return start, first, start, tl.where(start - first <= s.one_part, 1, parts)


@jit
def _find_rows(sequence, program, s: tl.constexpr):
    """Return each row's query, head, token, and whether it is one: [M]. Rows are [Q, EACH]."""
    G: tl.constexpr = s.layer.group
    EACH: tl.constexpr = s.each
    row = tl.arange(0, s.rows)
    query, head = tl.minimum(row // EACH, s.queries - 1), program % s.splits * EACH + row % EACH
    is_row = (row < s.queries * EACH) & (head < G)
    head = program // s.splits * G + tl.minimum(head, G - 1)
    return query, head, sequence * s.queries + query, is_row


@jit
def _load_ahead(rope, weights, rows, sequence, kv_head, s: tl.constexpr):
    """Load what `wqkv` does not write: RoPE, norm weights and sinks.

    Return the rotation of queries and of the call's own keys, both norm weights, and sinks.
    """
    a: tl.constexpr = s.layer
    C: tl.constexpr = a.head_dim
    M: tl.constexpr = s.rows
    T: tl.constexpr = s.own_rows
    _, head, token, _ = rows
    own = sequence * s.queries + tl.minimum(tl.arange(0, T), s.queries - 1)
    c = tl.arange(0, C)[None, :]
    r: tl.constexpr = a.rotary_dim
    rotation = load_rotation(rope, token[:, None], c, C, r, s.rope_width, a.rope_begin)
    if s.queries == 1:
        own_rotation = rotation
    else:
        own_rotation = load_rotation(rope, own[:, None], c, C, r, s.rope_width, a.rope_begin)
    q_norm, k_norm = weights.q_norm, weights.k_norm
    if q_norm is not None:
        if a.full_norm:
            q_norm, k_norm = q_norm + head[:, None] * C, k_norm + kv_head * C
        elif s.queries == 1 or C > 128:
            # A load for each row: a row's lanes would hold other numbers, and exchange all others.
            q_norm += tl.zeros([M, 1], tl.int32)
            k_norm += tl.zeros([T, 1], tl.int32)
    q_weight, k_weight = load_head_norm(q_norm, rotation), load_head_norm(k_norm, own_rotation)
    if weights.sinks is not None:
        sink = tl.load(weights.sinks + head).to(tl.float32)
    else:
        sink = 0.0
    return rotation, own_rotation, q_weight, k_weight, sink


@jit
def _start_softmax(qkv, weights, cache, ahead, rows, place, s: tl.constexpr):
    """Load the call's tokens, append their keys and values, and start the softmax with them.

    The first part has the own tokens. The others compute and mask them: a branch would keep their
    loads from being in flight with the queries'. The first program of each KV head appends.

    Return queries [M, C], row_max, row_sum [M], acc [M, C].
    """
    a: tl.constexpr = s.layer
    C: tl.constexpr = a.head_dim
    T: tl.constexpr = s.own_rows
    Q: tl.constexpr = s.queries
    sequence, program, part, start = place
    query, head, token, is_row = rows
    kv_head, t, c = program // s.splits, tl.arange(0, T), tl.arange(0, C)[None, :]
    own = qkv + (sequence * Q + tl.minimum(t, Q - 1))[:, None] * a.projected * C
    q = qkv + token[:, None] * a.projected * C
    value = load_value(own + (a.first_value + kv_head) * C, c, a)
    q_rms, k_rms = 1.0, 1.0
    if a.full_norm and Q == 1:
        token_heads = qkv + sequence * a.projected * C
        k_heads = token_heads + a.heads * C
        q_rms, k_rms = inverse_rms(token_heads, k_heads, a.heads * C, a.kv_heads * C, a.eps)
    elif a.full_norm:
        q_rms = inverse_rms_of_rows(q, is_row[:, None], a.heads * C, a.eps, s.rms_columns)
        k_heads = own + a.heads * C
        k_rms = inverse_rms_of_rows(k_heads, (t < Q)[:, None], a.kv_heads * C, a.eps, s.rms_columns)
    rotation, own_rotation, q_weight, k_weight, _ = ahead
    if weights.q_norm is None:
        q_weight, k_weight = None, None
    key = load_head(own + (a.heads + kv_head) * C, k_weight, k_rms, own_rotation, a)
    x = load_head(q + head[:, None] * C, q_weight, q_rms, rotation, a)
    dtype: tl.constexpr = qkv.dtype.element_ty
    x, key = keep_layout(x * a.scale).to(dtype), keep_layout(key).to(dtype)
    is_first = (program % s.splits == 0) & (part == 0)
    is_stored, position = (t < tl.where(is_first, Q, 0))[:, None], (start + t)[:, None]
    key = append(cache[0], cache[1], key, position, is_stored, C)
    value = append(cache[2], cache[3], value, position, is_stored, C)
    if Q == 1:
        row_max = tl.sum(x.to(tl.float32) * key.to(tl.float32), 1)
        row_max = tl.where(part == 0, row_max, float("-inf"))
        row_sum = tl.where(part == 0, 1.0, tl.zeros_like(row_max))
        acc = tl.where(part == 0, value.to(tl.float32), 0.0)
    else:
        distance = query[:, None] - t[None, :]
        seen = (distance >= 0) & (distance < tl.where(part == 0, a.window, 0))
        scores = tl.dot(x, tl.trans(key.to(dtype)), input_precision="tf32x3")
        scores = tl.where(seen, scores, float("-inf"))
        row_max = tl.full([s.rows], float("-inf"), tl.float32)
        weights, _, row_max, row_sum = online_softmax(scores, row_max, tl.zeros_like(row_max))
        acc = tl.dot(weights.to(dtype), value.to(dtype), input_precision="tf32x3")
    return x, row_max, row_sum, acc


@jit
def _add_positions(softmax, queries, keys, values, begin, start, query, BLOCK: tl.constexpr, s):
    """Add the block from position `begin` to a softmax, as `add_block`: what each row sees of it.

    start: the first query's position; query [M]: each row's query, that many positions later.
    """
    key = begin + tl.arange(0, BLOCK)[None, :]
    WINDOW: tl.constexpr = s.layer.window
    seen = key < start if s.appends else key <= (start + query)[:, None]
    if s.length > WINDOW:
        seen = seen & (key > (start + query)[:, None] - WINDOW)
    return add_block(softmax, queries, keys, values, seen, s.score_scale, s.int8)


@jit
def _store_heads(y, softmax, sink, gate, at, mask):
    """Divide acc [R, N] by the sum of weights [R, 1], apply sink and gate (or None), store it."""
    row_max, row_sum, acc = softmax
    out = finish_softmax(row_max, row_sum, acc, sink)
    if gate is not None:
        out /= 1 + tl.exp(-gate.to(tl.float32))
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@jit
def _merge_parts(results, first, row, c, parts, s: tl.constexpr):
    """Merge parts of a program's rows [R, 1] -> row_max, row_sum [R, 1], acc [R, C].

    first: the program's first row of results. c [1, C]. Each lane adds its numbers of all parts,
    in the order of parts, not of their arrival. Other programs wrote them: L1 may have older ones.
    """
    ROWS: tl.constexpr = s.stored_rows
    AT_ONCE: tl.constexpr = s.parts_at_once
    C: tl.constexpr = s.layer.head_dim
    row_max = tl.full([ROWS, 1], float("-inf"), tl.float32)
    row_sum, acc = tl.zeros_like(row_max), tl.zeros([ROWS, C], tl.float32)
    for begin in range(0, parts, AT_ONCE):
        maxima, totals, numbers, largest = (), (), (), row_max
        for n in tl.static_range(AT_ONCE):
            at, is_part = first + (begin + n) * ROWS + row, begin + n < parts
            maximum = tl.load(results.sums + at * 2, is_part, float("-inf"), cache_modifier=".cg")
            total = tl.load(results.sums + at * 2 + 1, is_part, 0.0, cache_modifier=".cg")
            own = results.partial + at * C + c
            maxima, totals = maxima + (maximum,), totals + (total,)
            numbers = numbers + (tl.load(own, is_part, 0.0, cache_modifier=".cg"),)
            largest = tl.maximum(largest, maximum)
        row_sum *= tl.exp(row_max - largest)
        acc *= tl.exp(row_max - largest)
        for n in tl.static_range(AT_ONCE):
            share = tl.exp(maxima[n] - largest)
            row_sum += totals[n] * share
            acc += numbers[n] * share
        row_max = largest
    return row_max, row_sum, acc


@jit
def _merge_last(qkv, sinks, results, sequence, program, parts, s: tl.constexpr):
    """Count this program of a KV head; if it is the last to end, merge the parts. One query."""
    a: tl.constexpr = s.layer
    C: tl.constexpr = a.head_dim
    pair = sequence * s.pairs + program
    tl.debug_barrier()  # all threads have stored before one counts
    arrived = tl.atomic_add(results.arrivals + pair, 1, sem="acq_rel", scope="gpu")
    if arrived == parts - 1:
        tl.store(results.arrivals + pair, 0)
        row, c = tl.arange(0, s.stored_rows)[:, None], tl.arange(0, C)[None, :]
        is_row, row = row < a.group, tl.minimum(row, a.group - 1)
        head = program * a.group + row
        gate, sink = None, None
        if a.gated:
            gate = tl.load(qkv + (sequence * a.projected + a.first_gate + head) * C + c)
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32)
        first = pair * s.parts * s.stored_rows
        row_max, row_sum, acc = _merge_parts(results, first, row, c, parts, s)
        softmax = row_max, row_sum, acc
        _store_heads(results.y, softmax, sink, gate, (sequence * a.heads + head) * C + c, is_row)


@jit
def _prefetch_block(cache, begin, end, s: tl.constexpr):
    """Prefetch keys and values from position `begin` on into L2."""
    count = tl.minimum(end - begin, s.tile.block)
    if count > 0:
        row_bytes: tl.constexpr = s.width * (cache[0].dtype.element_ty.primitive_bitwidth // 8)
        prefetch(cache[0] + begin * s.width, count * row_bytes)
        prefetch(cache[2] + begin * s.width, count * row_bytes)


# One function: its speed depends on the order of waits and loads. A reader should see it whole.
@jit
def _attend_part(qkv, rope, weights, cache, results, place, BLOCK: tl.constexpr, s, PDL):
    """Compute a program of `_attend`, in blocks of BLOCK positions: one block, if BLOCK is wide.

    cache: keys, their scales, values, their scales, of the program's KV head.
    """
    sequence, program, part, parts, start, first, end = place
    a: tl.constexpr = s.layer
    C: tl.constexpr = a.head_dim
    M: tl.constexpr = s.rows
    first += part * BLOCK
    keys = load_block(cache[0], cache[1], first, end, s.width, BLOCK)
    values = load_block(cache[2], cache[3], first, end, s.width, BLOCK)
    if PDL and BLOCK == s.tile.block:
        _prefetch_block(cache, first + parts * BLOCK, end, s)
    rows = _find_rows(sequence, program, s)
    query, head, token, is_row = rows
    c = tl.arange(0, C)[None, :]
    if s.appends:
        ahead = _load_ahead(rope, weights, rows, sequence, program // s.splits, s)
        sink = ahead[4] if weights.sinks is not None else None
        await_previous(PDL)
        if a.gated:
            gates = qkv + (token * a.projected + a.first_gate + head)[:, None] * C
            gate = tl.load(gates + c)
        else:
            gate = None
        call = sequence, program, part, start
        x, row_max, row_sum, acc = _start_softmax(qkv, weights, cache, ahead, rows, call, s)
    else:
        x = tl.load(qkv + (token * a.heads + head)[:, None] * C + c)
        row_max, row_sum = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
        acc = tl.zeros([M, C], tl.float32)
    queries, accs = split_numbers(x, s.int8), split_numbers(acc, s.int8)
    softmax = row_max, row_sum, accs
    softmax = _add_positions(softmax, queries, keys, values, first, start, query, BLOCK, s)
    STAGES: tl.constexpr = s.tile.stages
    if BLOCK == s.tile.block:
        for begin in tl.range(first + parts * BLOCK, end, parts * BLOCK, num_stages=STAGES):
            keys = load_block(cache[0], cache[1], begin, end, s.width, BLOCK)
            values = load_block(cache[2], cache[3], begin, end, s.width, BLOCK)
            softmax = _add_positions(softmax, queries, keys, values, begin, start, query, BLOCK, s)
    row_max, row_sum, accs = softmax
    acc = join_numbers(accs, C)
    if s.appends and parts == 1:
        heads = (token * a.heads + head)[:, None] * C + c
        final = row_max[:, None], row_sum[:, None], acc
        sinks = sink[:, None] if weights.sinks is not None else None
        _store_heads(results.y, final, sinks, gate, heads, is_row[:, None])
    elif s.parts > 1 or not s.appends:
        at = ((sequence * s.pairs + program) * s.parts + part) * s.stored_rows + tl.arange(0, M)
        tl.store(results.partial + at[:, None] * C + c, acc, mask=is_row[:, None])
        tl.store(results.sums + at * 2, row_max, mask=is_row)
        tl.store(results.sums + at * 2 + 1, row_sum, mask=is_row)
        if s.merges:
            _merge_last(qkv, weights.sinks, results, sequence, program, parts, s)


# Grid [K * SPLITS, B, P]: a program computes EACH query heads of one KV head, SPLITS programs a KV
# head, over every `parts`-th block of older positions. Row r is query r // EACH of head r % EACH.
# Programs of the first parts start first: the others may have nothing to do.
@jit
def _attend(qkv, rope, positions, weights, stored, results, s: tl.constexpr, PDL: tl.constexpr):
    program, part = tl.program_id(0), tl.program_id(2)
    sequence = tl.program_id(1).to(tl.int64)
    start, first, end, parts = _find_parts(positions, sequence, s)
    if part >= parts:
        return
    pair = sequence * s.layer.kv_heads + program // s.splits
    keys, values = pair * s.length, s.entries + pair * s.length
    if stored.scales is not None:
        scales = stored.scales + keys, stored.scales + values
    else:
        scales = None, None
    keys, values = stored.entries + keys * s.width, stored.entries + values * s.width
    cache = keys, scales[0], values, scales[1]
    place = sequence, program, part, parts, start, first, end
    BLOCK: tl.constexpr = s.tile.block
    count = end - first
    is_wide = ((parts == 1) & (count > BLOCK) & (count <= 2 * BLOCK)).to(tl.int32)
    BODIES: tl.constexpr = s.bodies
    for WIDE in tl.static_range(BODIES):
        if is_wide == WIDE or BODIES == 1:
            SIZE: tl.constexpr = BLOCK * (1 + WIDE)
            _attend_part(qkv, rope, weights, cache, results, place, SIZE, s, PDL)


# Grid [Q * H, C / COLUMNS, B]: a program merges COLUMNS numbers of one query's head, if it has
# several parts. Its loads are all in flight at once. The next kernel starts at once, too:
# ops/products/experts.py.
@jit
def _merge(qkv, positions, sinks, results, s: tl.constexpr, PDL: tl.constexpr):
    a: tl.constexpr = s.layer
    C: tl.constexpr = a.head_dim
    EACH: tl.constexpr = s.each
    query, head = tl.program_id(0) // a.heads, tl.program_id(0) % a.heads
    sequence = tl.program_id(2).to(tl.int64)
    _, _, _, parts = _find_parts(positions, sequence, s)
    sink, gate = None, None
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
    if PDL:
        # Also without parts: the next kernel waits for this one, and so for `_attend`.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if parts == 1:
        return
    c = tl.program_id(1) * s.columns + tl.arange(0, s.columns)
    token, in_group = sequence * s.queries + query, head % a.group
    if a.gated:
        gate = tl.load(qkv + (token * a.projected + a.first_gate + head) * C + c)[None, :]
    program = sequence * s.pairs + head // a.group * s.splits + in_group // EACH
    part = tl.arange(0, s.padded_parts)[:, None]
    at = (program * s.parts + part) * s.stored_rows + query * EACH + in_group % EACH
    maxima = tl.load(results.sums + at * 2, part < parts, float("-inf"))
    totals = tl.load(results.sums + at * 2 + 1, part < parts, 0.0)
    numbers = tl.load(results.partial + at * C + c[None, :], part < parts, 0.0)
    largest = tl.max(maxima, 0, keep_dims=True)
    share = tl.exp(maxima - largest)
    acc = tl.sum(numbers * share, 0, keep_dims=True)
    softmax = largest, tl.sum(totals * share, 0, keep_dims=True), acc
    _store_heads(results.y, softmax, sink, gate, (token * a.heads + head) * C + c[None, :], None)


# Launches -----------------------------------------------------------------------------------------


def choose_tiles(C: int, itemsize: int, Q: int) -> Iterator[Tile]:
    """Yield tiles for heads of this size, the fastest first; itemsize: of the cache (H200)."""
    block = min(128, max(16, (4096 if itemsize == 4 else 16384) // C))
    if Q == 1:
        if itemsize == 2:
            yield Tile(block, 3, wide=True)
        yield Tile(block, 3)
    elif itemsize == 1:
        yield Tile(block, 3)
    while block >= 16:
        yield Tile(block, 2)
        block //= 2


def choose_rows(Q: int, G: int, C: int, is_one_part: bool) -> int:
    """Return M, for Q queries of some of the G query heads of a KV head.

    16 is one tile of a tensor core. Several queries in one part: a program with fewer heads has
    less to do, and there are enough idle processors. In several parts, fewer programs read the same
    keys from L2.
    """
    if Q == 1:
        return max(FEWEST_ROWS, pow2(G))
    one_head = max(FEWEST_ROWS, pow2(Q))
    if is_one_part or C > 128:
        return one_head
    return max(one_head, min(32, pow2(Q * G)))


def choose_parts(programs: int, length: int, s: KernelSettings, device: torch.device) -> int:
    """Return P, at most one part for each block of `length` positions.

    programs: of each part. One query of a plain cache: a program takes half of a multiprocessor's
    shared memory or more, and all programs should run at once.
    """
    processors = gpu_of(device).multiprocessors
    most = processors if s.queries == 1 and not s.int8 else PROGRAMS * processors
    return max(1, min(-(-length // s.tile.block), most // programs, MAX_PARTS))


def takes_queries(Q: int, C: int) -> bool:
    """Whether the kernels take this many queries of a sequence, with heads of C numbers."""
    if Q == 1:
        return C & C - 1 == 0 and 16 <= C <= 512
    fits = pow2(Q) * C <= max(MAX_NUMBERS, 8 * C)
    return Q <= MAX_QUERIES and C <= MAX_HEAD and fits


def divide(qkv: Tensor, stored: Stored, layer: AttentionSettings, width: int) -> Iterator:
    """Yield settings of the kernels, the fastest first. width: of RoPE's rows."""
    (B, Q), (rows, K, S, _) = qkv.shape[:2], stored.entries.shape[1:]
    C, length, int8 = layer.head_dim, min(S, layer.window), stored.scales is not None
    is_one_part = length * C <= ONE_PART
    M = choose_rows(Q, layer.group, C, is_one_part)
    each = min(layer.group, M // Q)
    for tile in choose_tiles(C, 1 if int8 else stored.entries.element_size(), Q):
        s = KernelSettings(
            *(layer, tile, S, rows * K * S, Q, M, each, 1, width, int8),
            merges=Q == 1,
            one_part=tile.block * (2 if Q == 1 else 1),
        )
        P = 1 if is_one_part and Q > 1 else choose_parts(B * s.pairs, length, s, qkv.device)
        yield replace(s, parts=P)


arrivals_of: dict[torch.device, Tensor] = {}


def arrivals(device: torch.device, count: int) -> Tensor:
    """Return int32 zeros, which every launch leaves as zeros: launches of a stream share them."""
    known = arrivals_of.get(device)
    if known is None or len(known) < count:
        arrivals_of[device] = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
    return arrivals_of[device]


@torch.library.custom_op("moe_fast::attend_tokens", mutates_args=("cache", "scales"))
def attend_tokens(
    qkv: Tensor,
    rope: Tensor,
    positions: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    sinks: Tensor | None,
    settings: str,
) -> Tensor:
    """Attend with Q tokens of each sequence, and append their keys and values -> [B, Q, H * C].

    qkv [B, Q, (H + 2 K) C], or as settings (`AttentionSettings.encoded`) say, at consecutive
    positions [B, Q]; each token sees those before it. rope: `model.Context.rope`. cache and scales
    as of `Stored`, q_norm, k_norm and sinks as of `HeadWeights`. Padding is computed as any other
    token, and its keys and values are stored.
    """
    (B, Q), layer = qkv.shape[:2], decode_settings(settings)
    check_shapes(qkv, positions, cache, layer)
    y = qkv.new_empty(B, Q, layer.heads * layer.head_dim)
    stored = Stored(cache if scales is None else cache.view(torch.int16), scales)
    weights, qkv = HeadWeights(q_norm, k_norm, sinks), qkv.contiguous()
    numbers, counts = (
        qkv.new_empty(0, dtype=torch.float32),
        arrivals(qkv.device, B * layer.kv_heads),
    )
    args = qkv, rope, positions, weights, stored
    options = ((s, {"warps": WARPS}) for s in divide(qkv, stored, layer, rope.shape[-1]))
    s, options = fit(_attend, options, *args, Results(y, numbers, numbers, counts))
    rows = B * s.pairs * s.parts * s.stored_rows if s.parts > 1 else 0
    partial, sums = numbers.new_empty(rows * layer.head_dim), numbers.new_empty(rows * 2)
    results = Results(y, partial, sums, counts)
    launch(_attend, (s.pairs, B, s.parts), *args, results, settings=s, **options)
    if s.parts > 1 and not s.merges:
        grid = Q * layer.heads, layer.head_dim // s.columns, B
        launch(_merge, grid, qkv, positions, sinks, results, settings=s, warps=MERGE_WARPS)
    return y


@attend_tokens.register_fake
def _(qkv, rope, positions, cache, scales, q_norm, k_norm, sinks, settings) -> Tensor:
    layer = decode_settings(settings)
    return qkv.new_empty(*qkv.shape[:2], layer.heads * layer.head_dim)


def check_shapes(qkv: Tensor, positions: Tensor, cache: Tensor, layer: AttentionSettings) -> None:
    """Raise ValueError for tensors that do not fit a layer."""
    width, (K, C) = layer.projected * layer.head_dim, (layer.kv_heads, layer.head_dim)
    if qkv.shape[2:] != (width,):
        raise ValueError(f"qkv {tuple(qkv.shape)}: not [B, Q, {width}]")
    if positions.shape != qkv.shape[:2]:
        raise ValueError(f"positions {tuple(positions.shape)}: not {tuple(qkv.shape[:2])}")
    if len(cache) != 2 or cache.shape[2] != K or cache.shape[4] != C or cache.shape[1] < len(qkv):
        raise ValueError(f"cache {tuple(cache.shape)}: not [2, {len(qkv)} or more, {K}, S, {C}]")


@torch.library.custom_op("moe_fast::attend_int8", mutates_args=())
def attend_int8(
    q: Tensor, codes: Tensor, scales: Tensor, positions: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Attend with few queries of each sequence over an int8 cache, in P parts.

    q [B, Q, H, C] at consecutive positions [B, Q]; codes [2, B, K, S, C] and their scales
    [2, B, K, S, 1]. Return the arguments of `softmax.merge_partial`: fp32 y [B, K, P, M, C] and
    sums [B, K, P, M, 2]. Row query * G + h belongs to the h-th query head of the KV head; rows from
    Q * G on are undefined.
    """
    (B, Q, H, C), (rows, K, S) = q.shape, codes.shape[1:4]
    y, sums = empty_parts(q, codes)
    layer = AttentionSettings(H, K, C, 0, C**-0.5, window=window)
    M, stored = max(FEWEST_ROWS, pow2(H // K * Q)), Stored(codes.view(torch.int16), scales)
    args = (q.contiguous(), None, positions.contiguous(), HeadWeights(), stored)
    args = *args, Results(None, y, sums, None)
    s = KernelSettings(
        *(layer, Tile(128, 2), S, rows * K * S, Q, M, H // K, y.shape[2]),
        int8=True,
        appends=False,
        merges=False,
    )
    tiles = (replace(s, tile=Tile(block, 2)) for block in (128, 64, 32, 16))
    options = {"warps": 4 if M == 16 else 8, "pdl": False}
    s, options = fit(_attend, ((s, options) for s in tiles), *args)
    launch(_attend, (K, B, s.parts), *args, settings=s, **options)
    return y, sums


def empty_parts(q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of `attend_int8`, not yet written."""
    (B, Q, H, C), K = q.shape, codes.shape[2]
    P = max(1, int(PROGRAMS * gpu_of(q.device).multiprocessors) // (B * K))
    y = q.new_empty(B, K, P, pow2(H // K * Q), C, dtype=torch.float32)
    return y, y.new_empty(*y.shape[:-1], 2)


@attend_int8.register_fake
def _(q, codes, scales, positions, window) -> tuple[Tensor, Tensor]:
    return empty_parts(q, codes)
