"""Attention of a prompt's chunk: heads before SDPA, and attention that SDPA's fast kernels lack.

    prepare_heads     norm, clip and RoPE of queries, keys and values, and cache append: what
                      `attend_kernel` does for up to 64 tokens, as a part of their attention
    _attend_prompt    attention with a sliding window or sinks; on Hopper GPUs most other, too

SDPA takes a mask of all positions for a window, and longer heads for sinks. `_attend_prompt` reads
the blocks of keys that some query sees, and begins the softmax with the sink.

Letters: Q queries, the last of S positions; H query heads, K KV heads, C head dim. A program has M
queries of a head; a step covers N positions.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ops.attention.gqa import AttentionSettings, HeadWeights, decode_settings
from ops.attention.heads import inverse_rms, load_head, load_head_norm, load_rotation, load_value
from ops.gpu import gpu_of
from ops.launch import check_shapes, fit, jit, launch, tl
from ops.sizes import cdiv

KERNELS = "prepare_heads", "_attend_prompt"
ROWS = 8  # heads of a token at once
LOG2_E = 1.4426950408889634
HEAD_DIMS = 16, 32, 64, 128, 256
TILES = (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)
# Positions that a short prompt sees at most. SDPA has a kernel and a pause of 6 us beside its own.
SHORT = 512
LONG = 8192  # tokens of a chunk: only a prompt alone has such


class Places(NamedTuple):
    """Where keys and values are stored: in one of the tensors or both."""

    kv: Tensor | None = None  # [T, 2, K, C]
    cache: Tensor | None = None  # [2, B, K, S, C]: position p is in slot p % S
    row: Tensor | None = None  # int64 [1], of the cache; None: the first
    # int64 [1]: the last token that the cache gets. None: it gets all.
    last: Tensor | None = None
    # int64 [1]: the first token's position. None: an argument of the kernel.
    begin: Tensor | None = None


@dataclass(frozen=True)
class PrepareSettings:
    """What the kernel is compiled for."""

    layer: AttentionSettings
    rope_width: int
    query_scale: float  # beside that of SDPA
    sequences: int  # B
    slots: int  # S
    rows: int = ROWS


@jit
def _store(value, head, c, part: tl.constexpr, token, begin, places, s: tl.constexpr):
    """Store some heads of a token's keys (part 0) or values (part 1) [M, C]."""
    C: tl.constexpr = s.layer.head_dim
    K: tl.constexpr = s.layer.kv_heads
    if places.kv is not None:
        own = places.kv + token.to(tl.int64) * (2 * K * C)
        value = value.to(own.dtype.element_ty)
        tl.store(own + part * K * C + head * C + c, value, mask=head < K)
    if places.cache is not None:
        # A ring takes its own length of tokens: earlier ones would share slots with them.
        last = tl.num_programs(0) - 1
        if places.last is not None:
            last = tl.load(places.last).to(tl.int32)
        n = tl.zeros_like(head) + token  # Triton's interpreter takes no scalar in a mask
        exists = (head < K) & (n >= tl.num_programs(0) - s.slots) & (n <= last)
        row = 0
        if places.row is not None:
            row = tl.load(places.row)
        place = ((part * s.sequences + row) * K + head).to(tl.int64) * s.slots
        at = places.cache + (place + (begin + token) % s.slots) * C + c
        tl.store(at, value.to(at.dtype.element_ty), mask=exists)


@jit
def _prepare(x, norm, rms, rotation, number, COUNT: tl.constexpr, s: tl.constexpr):
    """Norm and rotate some of COUNT heads at x -> [M, C]."""
    head = tl.minimum(number, COUNT - 1) * s.layer.head_dim
    weight = None
    if norm is not None:
        weight = load_head_norm(norm + head if s.layer.full_norm else norm, rotation)
    return load_head(x + head, weight, rms, rotation, s.layer)


# Grid [T]: a program prepares the heads of one token.
@jit(do_not_specialize=("begin",))  # a later turn begins anywhere: one compiled code for all
def prepare_heads(qkv, rope, weights, q, places, begin, s: tl.constexpr):
    a: tl.constexpr = s.layer
    C: tl.constexpr = a.head_dim
    H: tl.constexpr = a.heads
    token, m = tl.program_id(0), tl.arange(0, s.rows)[:, None]
    if places.begin is not None:
        begin = tl.load(places.begin).to(tl.int32)
    c = tl.arange(0, C)[None, :]
    x = qkv + token.to(tl.int64) * a.projected
    rotation = load_rotation(rope, token, c, C, a.rotary_dim, s.rope_width, a.rope_begin)
    q_rms, k_rms = 1.0, 1.0
    if a.full_norm:
        q_rms, k_rms = inverse_rms(x, x + H * C, H * C, a.kv_heads * C, a.eps)
    own = q + token.to(tl.int64) * (H * C)
    for first in range(0, H, s.rows):
        head = first + m
        value = _prepare(x, weights.q_norm, q_rms, rotation, head, H, s) * s.query_scale
        tl.store(own + head * C + c, value.to(own.dtype.element_ty), mask=head < H)
    for first in range(0, a.kv_heads, s.rows):
        head = first + m
        key = _prepare(x + H * C, weights.k_norm, k_rms, rotation, head, a.kv_heads, s)
        _store(key, head, c, 0, token, begin, places, s)
        value = load_value(x + a.first_value * C + tl.minimum(head, a.kv_heads - 1) * C, c, a)
        _store(value, head, c, 1, token, begin, places, s)


def prompt_heads(
    qkv: Tensor,
    rope: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    settings: str,
    places: Places,
    begin: int = 0,
) -> Tensor:
    """qkv [T, projected], rope fp32 [1, T, 1, 2 C] -> q [T, H, C]; keys and values to `places`.

    settings: as in `attend_tokens`. begin: the first token's position. Queries are scaled for SDPA,
    whose own scale is C ** -0.5. The reference is `Attention.queries`,
    `Attention.keys_and_values` and `KVCache.append`.
    """
    layer, T = decode_settings(settings), len(qkv)
    H, K, C = layer.heads, layer.kv_heads, layer.head_dim
    check_shapes(qkv=(qkv, (T, layer.projected)))
    q, (B, S) = qkv.new_empty(T, H, C), (1, 1)
    if places.kv is not None:
        check_shapes(kv=(places.kv, (T, 2, K, C)))
    if places.cache is not None:
        _, B, _, S, _ = places.cache.shape
        check_shapes(cache=(places.cache, (2, B, K, S, C)))
    s = PrepareSettings(layer, rope.shape[-1], layer.scale * C**0.5, B, S)
    tensors = qkv.contiguous(), rope, HeadWeights(q_norm, k_norm), q, places
    launch(prepare_heads, (T,), *tensors, begin, settings=s)
    return q


@dataclass(frozen=True)
class PromptAttention:
    """What the kernel is compiled for."""

    heads: int  # H
    kv_heads: int
    head_dim: int
    window: int | None  # positions that a query sees, its own included
    queries: int  # M
    positions: int  # N
    ring: bool = False  # the first keys may be none: those before position 0
    log2_e: float = LOG2_E

    scale = property(lambda s: s.head_dim**-0.5 * LOG2_E)  # of scores, for exponents of two


@jit
def _attend_keys(state, q, kv, row, first, begin, end, MASKED: tl.constexpr, s: tl.constexpr):
    """Add the keys from `begin` to `end` to a softmax: sums [M, C], largest and total [M].

    row: positions of the queries q [M, C]. first: of a ring, the first key that there is. MASKED:
    some query does not see some of the keys.
    """
    sums, largest, total = state
    k, v, stride = kv
    c = tl.arange(0, s.head_dim)
    for start in range(begin, end, s.positions):
        key = start + tl.arange(0, s.positions)
        inside = (key < end)[:, None] if MASKED else None
        place = key[:, None].to(tl.int64) * stride + c[None, :]
        keys = tl.load(k + place, mask=inside, other=0.0 if MASKED else None)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if MASKED:
            distance = row[:, None] - key[None, :]
            seen = distance >= 0
            if s.window is not None:
                seen &= distance < s.window
            if s.ring:
                seen &= (key >= first)[None, :]
            # Not -inf: rows that see none of these keys would be NaN. Their own key, which comes
            # later, makes what they add here 0.
            scores = tl.where(seen, scores, -1e30)
        new = tl.maximum(largest, tl.max(scores, 1) * s.scale)
        weights = tl.exp2(scores * s.scale - new[:, None])  # one fma
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + place, mask=inside, other=0.0 if MASKED else None)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
        largest = new
    return sums, largest, total


# Grid [Q / M, H]: the last queries, which see most keys, are first.
@jit(do_not_specialize=("Q", "S"))  # as above
def _attend_prompt(q, k, v, sinks, y, begin, Q, S, k_stride, stride, s: tl.constexpr):
    M: tl.constexpr = s.queries
    none = 0  # keys before those that there are
    if begin is not None:
        if s.ring:
            none = tl.maximum(S - Q - tl.load(begin).to(tl.int32), 0)
        else:
            S = tl.load(begin).to(tl.int32) + Q
    first, head = (tl.num_programs(0) - 1 - tl.program_id(0)) * M, tl.program_id(1)
    query, c = first + tl.arange(0, M), tl.arange(0, s.head_dim)
    row = S - Q + query
    place = (query[:, None].to(tl.int64) * s.heads + head) * s.head_dim + c[None, :]
    own = tl.load(q + place, mask=(query < Q)[:, None], other=0.0)
    at = (head // (s.heads // s.kv_heads)).to(tl.int64) * k_stride
    kv = (k + at, v + at, stride)
    largest, total = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * s.log2_e
        largest, total = tl.zeros([M], tl.float32) + sink, total + 1.0
    state = (tl.zeros([M, s.head_dim], tl.float32), largest, total)
    before, end = S - Q + first, tl.minimum(S, S - Q + first + M)
    if s.window is None:
        diagonal = before // s.positions * s.positions  # all queries see the keys before
        state = _attend_keys(state, own, kv, row, none, 0, diagonal, False, s)
        state = _attend_keys(state, own, kv, row, none, diagonal, end, True, s)
    else:
        oldest = tl.maximum(before - s.window + 1, none) // s.positions * s.positions
        state = _attend_keys(state, own, kv, row, none, oldest, end, True, s)
    sums, largest, total = state
    result = sums / total[:, None]
    tl.store(y + place, result.to(y.dtype.element_ty), mask=(query < Q)[:, None])


def attends_prompt(q: Tensor, S: int, window: int | None, sinks: Tensor | None) -> bool:
    """Whether `attend_prompt` is for these queries [Q, H, C] and S positions.

    SDPA is for more positions without a window and sinks, but on Hopper GPUs neither for most later
    chunks, for which it takes 1.4 to 2 times as long, nor for one that begins a prompt and has a
    new length: cuDNN plans for 50 ms, in which other answers wait. Lengths that come again are
    powers of two. In LONG chunks, beside which nothing runs, cuDNN gains more than a plan takes.
    """
    (Q, _, C), is_own = q.shape, window is not None or sinks is not None or S <= SHORT
    if not is_own and q.element_size() == 2 and gpu_of(q.device).has_slow_sdpa:
        is_later = Q < S
        is_new_length = Q < LONG and Q & (Q - 1) > 0
        is_own = (Q > SHORT or C < 256) if is_later else is_new_length
    return is_own and C in HEAD_DIMS


def attend_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    sinks: Tensor | None,
    begin: Tensor | None = None,
    ring: bool = False,
) -> Tensor:
    """`attend_chunk`: q [Q, H, C], last positions of k and v [K, S, C], sinks [H] -> [Q, H * C].

    begin int64 [1]: the first query's position, if the host does not know it. Then k and v are a
    whole cache, from position 0 on. ring: they are those of `attend_chunk`, but keys before
    position 0 are none.
    """
    (Q, H, C), (K, S, _) = q.shape, k.shape
    check_shapes(k=(k, (K, S, C)), v=(v, (K, S, C)))
    if k.stride() != v.stride() or k.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    y = q.new_empty(Q, H * C)
    candidates = (
        (PromptAttention(H, K, C, window, M, N, ring), dict(warps=warps, stages=stages))
        for M, N, warps, stages in (TILES[2:] if Q <= SHORT else TILES)
    )
    given = q.contiguous(), k, v, sinks, y, begin, Q, S, k.stride(0), k.stride(1)
    s, options = fit(_attend_prompt, candidates, *given)
    launch(_attend_prompt, (cdiv(Q, s.queries), H), *given, settings=s, **options)
    return y
