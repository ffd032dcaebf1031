"""Kernels of grouped-query attention: ops/attention/gqa.py describes and launches them.

`s` is a `KernelSettings`, `a` its `AttentionSettings`. Letters: as in ops/attention/gqa.py.
"""

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
from ops.attention.softmax import dot, weigh
from ops.launch import await_previous, jit, tl


@jit
def find_parts(positions, sequence, s: tl.constexpr):
    """Choose how many programs share a sequence's older positions.

    Return the position of its first query, the first position that this sees, the end of older
    positions, and the number of parts. A part is one block as long as there are few parts.
    """
    WINDOW: tl.constexpr = s.layer.window
    start = tl.load(positions + sequence * s.queries).to(tl.int32)
    first = tl.maximum(start - WINDOW + 1, 0) // s.align * s.align if s.longest > WINDOW else 0
    if not s.appends:
        return start, first, start + s.queries, tl.num_programs(2)
    else:
        blocks = (start - first + s.tile.block - 1) // s.tile.block
        parts = tl.minimum(tl.maximum((blocks + 1) // 2, tl.minimum(blocks, s.few_parts)), s.parts)
        return start, first, start, tl.where(start - first <= s.one_part, 1, parts)


@jit
def _find_rows(sequence, program, s: tl.constexpr):
    """Return each row's query, head, token, and whether it is one: [M]. Rows are [Q, EACH]."""
    EACH: tl.constexpr = s.each
    row = tl.arange(0, s.rows)
    query, head = tl.minimum(row // EACH, s.queries - 1), program % s.splits * EACH + row % EACH
    is_row = (row < s.queries * EACH) & (head < s.layer.group)
    head = program // s.splits * s.layer.group + tl.minimum(head, s.layer.group - 1)
    return query, head, sequence * s.queries + query, is_row


@jit
def _load_ahead(rope, weights, rows, sequence, kv_head, s: tl.constexpr):
    """Load what `wqkv` does not write: RoPE, norm weights and sinks.

    Return the rotation of queries and of the call's own keys, both norm weights, and sinks.
    """
    a: tl.constexpr = s.layer
    C: tl.constexpr = a.head_dim
    _, head, token, _ = rows
    own = sequence * s.queries + tl.minimum(tl.arange(0, s.own_rows), s.queries - 1)
    c = tl.arange(0, C)[None, :]
    r: tl.constexpr = a.rotary_dim
    rotation = load_rotation(rope, token[:, None], c, C, r, s.rope_width, a.rope_begin)
    own_rotation = rotation
    if s.queries > 1:
        own_rotation = load_rotation(rope, own[:, None], c, C, r, s.rope_width, a.rope_begin)
    q_norm, k_norm = weights.q_norm, weights.k_norm
    if q_norm is not None:
        if a.full_norm:
            q_norm, k_norm = q_norm + head[:, None] * C, k_norm + kv_head * C
        elif s.queries == 1 or C > 128:
            # A load for each row: a row's lanes would hold other numbers, and exchange all others.
            q_norm += tl.zeros([s.rows, 1], tl.int32)
            k_norm += tl.zeros([s.own_rows, 1], tl.int32)
    q_weight, k_weight = load_head_norm(q_norm, rotation), load_head_norm(k_norm, own_rotation)
    sink = 0.0
    if weights.sinks is not None:
        sink = tl.load(weights.sinks + head).to(tl.float32)
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
    Q: tl.constexpr = s.queries
    sequence, program, part, start, stored = place
    query, head, token, is_row = rows
    kv_head, t, c = program // s.splits, tl.arange(0, s.own_rows), tl.arange(0, C)[None, :]
    own = qkv + (sequence * Q + tl.minimum(t, Q - 1))[:, None] * a.projected
    q = qkv + token[:, None] * a.projected
    value = load_value(own + (a.first_value + kv_head) * C, c, a)
    q_rms, k_rms = 1.0, 1.0
    if a.full_norm and Q == 1:
        token_heads = qkv + sequence * a.projected
        k_heads = token_heads + a.heads * C
        q_rms, k_rms = inverse_rms(token_heads, k_heads, a.heads * C, a.kv_heads * C, a.eps)
    elif a.full_norm:
        q_rms = inverse_rms_of_rows(q, is_row[:, None], a.heads * C, a.eps)
        k_heads = own + a.heads * C
        k_rms = inverse_rms_of_rows(k_heads, (t < Q)[:, None], a.kv_heads * C, a.eps)
    rotation, own_rotation, q_weight, k_weight, _ = ahead
    if weights.q_norm is None:
        q_weight, k_weight = None, None
    key = load_head(own + (a.heads + kv_head) * C, k_weight, k_rms, own_rotation, a)
    x = load_head(q + head[:, None] * C, q_weight, q_rms, rotation, a)
    dtype: tl.constexpr = qkv.dtype.element_ty
    x, key = keep_layout(x * a.scale).to(dtype), keep_layout(key).to(dtype)
    is_first = (program % s.splits == 0) & (part == 0)
    is_stored, slot = (t < tl.where(is_first, stored, 0))[:, None], start + t
    if s.ring > 0:
        slot %= s.ring
    key = append(cache[0], cache[1], key, slot[:, None], is_stored, C)
    value = append(cache[2], cache[3], value, slot[:, None], is_stored, C)
    if Q == 1:
        row_max = tl.sum(x.to(tl.float32) * key.to(tl.float32), 1)
        row_max = tl.where(part == 0, row_max, float("-inf"))
        row_sum = tl.where(part == 0, 1.0, tl.zeros_like(row_max))
        acc = tl.where(part == 0, value.to(tl.float32), 0.0)
    else:
        distance = query[:, None] - t[None, :]
        seen = (distance >= 0) & (distance < tl.where(part == 0, a.window, 0))
        scores = dot(x, tl.trans(key.to(dtype)))
        none = tl.full([s.rows], float("-inf"), tl.float32)
        own, _, row_max, row_sum = weigh(scores, none, tl.zeros_like(none), None, seen, dtype)
        acc = dot(own, value.to(dtype))
    return x, row_max, row_sum, acc


@jit
def _add_positions(softmax, queries, block, place, query, BLOCK: tl.constexpr, s):
    """Add a block, keys and values, to a softmax, where a row sees it (`add_block`).

    place: the block's first position, the end of the part, and the first query's position.
    query [M]: each row's query, that many positions later.
    """
    keys, values = block
    begin, end, start = place
    key = begin + tl.arange(0, BLOCK)[None, :]
    seen = key < end
    if not s.appends:
        seen = seen & (key <= (start + query)[:, None])
    if s.longest > s.layer.window:
        seen = seen & (key > (start + query)[:, None] - s.layer.window)
    return add_block(softmax, queries, keys, values, seen, s.score_scale, s.int8)


@jit
def _load_gate(qkv, token, head, c, a: tl.constexpr):
    """Load the gate of heads for their numbers c: like token + c, or without c's axis 1 wide."""
    C: tl.constexpr = a.head_dim
    if a.head_gate:
        return tl.load(qkv + token * a.projected + a.first_gate + head)
    else:
        return tl.load(qkv + (token * (a.projected // C) + a.first_gate // C + head) * C + c)


@jit
def _store_heads(y, softmax, sink, gate, at, mask, a: tl.constexpr):
    """Divide acc [R, N] by the sum of weights [R, 1], a sink's included; apply the gate; store it.

    sink: fp32, [R, 1] or one; sink and gate may be None.
    """
    row_max, row_sum, acc = softmax
    if sink is not None:
        largest = tl.maximum(row_max, sink)
        acc *= tl.exp(row_max - largest)
        row_sum = row_sum * tl.exp(row_max - largest) + tl.exp(sink - largest)
    out = acc / row_sum
    if gate is not None:
        gate = gate.to(tl.float32)
        if a.gate == "sigmoid":
            out /= 1 + tl.exp(-gate)
        else:
            out *= tl.maximum(gate, 0.0) + tl.log(1 + tl.exp(-tl.abs(gate)))
    tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)


@jit
def _prefetch_block(cache, begin, end, s: tl.constexpr):
    """Prefetch keys and values from position `begin` on into L2."""
    count = tl.minimum(end - begin, s.tile.block)
    if s.ring > 0:  # up to the ring's end
        begin %= s.ring
        count = tl.minimum(count, s.ring - begin)
    if count > 0:
        row_bytes: tl.constexpr = s.width * (cache[0].dtype.element_ty.primitive_bitwidth // 8)
        prefetch(cache[0] + begin * s.width, count * row_bytes)
        prefetch(cache[2] + begin * s.width, count * row_bytes)


@jit
def _attend_part(qkv, rope, weights, cache, results, place, BLOCK: tl.constexpr, s, PDL):
    """Compute a program of `attend_kernel`, in blocks of BLOCK positions; one block, if it is wide.

    cache: keys, their scales, values, their scales, of the program's KV head.
    """
    sequence, program, part, parts, start, first, end, stored = place
    a: tl.constexpr = s.layer
    C: tl.constexpr = a.head_dim
    M: tl.constexpr = s.rows
    # Values first: the compiler stages keys for tensor cores right after their load. Loads below
    # that would begin when the keys have arrived.
    values = load_block(cache[2], cache[3], first, end, s.width, BLOCK, s.ring)
    keys = load_block(cache[0], cache[1], first, end, s.width, BLOCK, s.ring)
    if PDL and s.loops and s.tile.block == BLOCK:
        _prefetch_block(cache, first + BLOCK, end, s)
    rows = _find_rows(sequence, program, s)
    query, head, token, is_row = rows
    c = tl.arange(0, C)[None, :]
    if s.appends:
        ahead = _load_ahead(rope, weights, rows, sequence, program // s.splits, s)
        sink = ahead[4] if weights.sinks is not None else None
        await_previous(PDL)
        gate = None
        if a.gate != "":
            gate = _load_gate(qkv, token[:, None], head[:, None], c, a)
        call = sequence, program, part, start, stored
        x, row_max, row_sum, acc = _start_softmax(qkv, weights, cache, ahead, rows, call, s)
    else:
        x = tl.load(qkv + (token * a.heads + head)[:, None] * C + c)
        row_max, row_sum = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
        acc = tl.zeros([M, C], tl.float32)
    queries, accs = split_numbers(x, s.int8), split_numbers(acc, s.int8)
    softmax = row_max, row_sum, accs
    place = first, end, start
    softmax = _add_positions(softmax, queries, (keys, values), place, query, BLOCK, s)
    if s.loops and s.tile.block == BLOCK:
        for begin in tl.range(first + BLOCK, end, BLOCK, num_stages=s.tile.stages):
            keys = load_block(cache[0], cache[1], begin, end, s.width, BLOCK, s.ring)
            values = load_block(cache[2], cache[3], begin, end, s.width, BLOCK, s.ring)
            place = begin, end, start
            softmax = _add_positions(softmax, queries, (keys, values), place, query, BLOCK, s)
    row_max, row_sum, accs = softmax
    acc = join_numbers(accs, C)
    if s.appends and parts == 1:
        heads = (token * a.heads + head)[:, None] * C + c
        final = row_max[:, None], row_sum[:, None], acc
        sinks = sink[:, None] if weights.sinks is not None else None
        _store_heads(results.y, final, sinks, gate, heads, is_row[:, None], a)
    elif s.parts > 1 or not s.appends:
        at = ((sequence * s.pairs + program) * s.parts + part) * s.stored_rows + tl.arange(0, M)
        tl.store(results.partial + at[:, None] * C + c, acc, mask=is_row[:, None])
        tl.store(results.sums + at * 2, row_max, mask=is_row)
        tl.store(results.sums + at * 2 + 1, row_sum, mask=is_row)


# Grid [K * SPLITS, B, P]: a program computes EACH query heads of one KV head, SPLITS programs a KV
# head, over a part of the older positions. Row r is query r // EACH of head r % EACH.
# Programs of the first parts start first: the others may have nothing to do.
@jit
def attend_kernel(qkv, rope, at, weights, stored, results, s: tl.constexpr, PDL: tl.constexpr):
    program, part = tl.program_id(0), tl.program_id(2)
    sequence = tl.program_id(1).to(tl.int64)
    start, first, end, parts = find_parts(at.positions, sequence, s)
    if part >= parts:
        return
    length = (end - first + parts * s.align - 1) // (parts * s.align) * s.align
    first += part * length  # parts are neighbors, and equal
    end = tl.minimum(first + length, end)
    count_stored = s.queries
    if at.last is not None:
        count_stored = tl.minimum(tl.load(at.last + sequence).to(tl.int32) + 1, s.queries)
    pair = sequence * s.layer.kv_heads + program // s.splits
    keys, values = pair * s.length, s.entries + pair * s.length
    scales = None, None
    if stored.scales is not None:
        scales = stored.scales + keys, stored.scales + values
    keys, values = stored.entries + keys * s.width, stored.entries + values * s.width
    cache = keys, scales[0], values, scales[1]
    place = sequence, program, part, parts, start, first, end, count_stored
    is_wide = ((length > s.tile.block) & (length <= 2 * s.tile.block)).to(tl.int32)
    for WIDE in tl.static_range(s.bodies):
        if is_wide == WIDE or s.bodies == 1:
            SIZE: tl.constexpr = s.tile.block * (1 + WIDE)
            _attend_part(qkv, rope, weights, cache, results, place, SIZE, s, PDL)


# Grid [H, C / COLUMNS, B * Q]: a program merges COLUMNS numbers of one query's head, if it has
# several parts. Its loads are all in flight at once. The next kernel starts at once, too:
# ops/README.md.
@jit
def merge_kernel(qkv, positions, sinks, results, s: tl.constexpr, PDL: tl.constexpr):
    a: tl.constexpr = s.layer
    Q: tl.constexpr = s.queries
    head, token = tl.program_id(0), tl.program_id(2)
    sequence, query, token = (token // Q).to(tl.int64), token % Q, token.to(tl.int64)
    _, _, _, parts = find_parts(positions, sequence, s)
    sink, gate = None, None
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
    # Also without parts: the next kernel waits for this one, and so for `attend_kernel`.
    await_previous(PDL, EARLY=True)
    if parts == 1:
        return
    c = tl.program_id(1) * s.columns + tl.arange(0, s.columns)
    if a.gate != "":
        gate = _load_gate(qkv, token, head, c, a)
        gate = gate if a.head_gate else gate[None, :]
    in_group = head % a.group
    program = sequence * s.pairs + head // a.group * s.splits + in_group // s.each
    part = tl.arange(0, s.padded_parts)
    is_part = part < parts
    at = (program * s.parts + part) * s.stored_rows + query * s.each + in_group % s.each
    maxima = tl.load(results.sums + at * 2, is_part, float("-inf"))
    totals = tl.load(results.sums + at * 2 + 1, is_part, 0.0)
    numbers = results.partial + at[:, None] * a.head_dim + c[None, :]
    numbers = tl.load(numbers, is_part[:, None], 0.0)
    largest = tl.max(maxima, 0)
    share = tl.exp(maxima - largest)
    total, acc = tl.sum(totals * share, 0), tl.sum(numbers * share[:, None], 0)
    zero = tl.zeros([1, 1], tl.float32)
    softmax = zero + largest, zero + total, acc[None, :]
    heads = (token * a.heads + head) * a.head_dim + c[None, :]
    _store_heads(results.y, softmax, sink, gate, heads, None, a)
