"""Attention of a prompt's chunk with a sliding window or sinks, which SDPA's fast kernels lack.

SDPA takes a mask of all positions for a window, and longer heads for sinks. This kernel reads the
blocks of keys that some query sees, and begins the softmax with the sink.

Letters: Q queries, the last of S positions; H query heads, K KV heads, C head dim. A program has M
queries of a head; a step covers N positions.
"""

from dataclasses import dataclass

from torch import Tensor

from ops.launch import check_shapes, fit, jit, launch, tl, triton

KERNEL = "_attend_prompt"
LOG2_E = 1.4426950408889634
HEAD_DIMS = 16, 32, 64, 128, 256
TILES = (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)


@dataclass(frozen=True)
class PromptAttention:
    """What the kernel is compiled for."""

    heads: int  # H
    kv_heads: int
    head_dim: int
    window: int | None  # positions that a query sees, its own included
    queries: int  # M
    positions: int  # N
    log2_e: float = LOG2_E

    scale = property(lambda s: s.head_dim**-0.5 * LOG2_E)  # of scores, for exponents of two


@jit
def _attend_keys(state, q, kv, row, begin, end, MASKED: tl.constexpr, s: tl.constexpr):
    """Add the keys from `begin` to `end` to a softmax: sums [M, C], largest and total [M].

    row: positions of the queries q [M, C]. MASKED: some query does not see some of the keys.
    """
    sums, largest, total = state
    k, v, stride = kv
    c = tl.arange(0, s.head_dim)
    for start in range(begin, end, s.positions):
        key = start + tl.arange(0, s.positions)
        inside = (key < end)[:, None] if MASKED else None
        place = key[:, None].to(tl.int64) * stride + c[None, :]
        keys = tl.load(k + place, mask=inside, other=0.0 if MASKED else None)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * s.scale
        if MASKED:
            distance = row[:, None] - key[None, :]
            seen = distance >= 0
            if s.window is not None:
                seen &= distance < s.window
            # Not -inf: rows that see none of these keys would be NaN. Their own key, which comes
            # later, makes what they add here 0.
            scores = tl.where(seen, scores, -1e30)
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + place, mask=inside, other=0.0 if MASKED else None)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
        largest = new
    return sums, largest, total


# Grid [Q / M, H]: the last queries, which see most keys, are first.
@jit
def _attend_prompt(q, k, v, sinks, y, Q, S, k_stride, stride, s: tl.constexpr):
    M: tl.constexpr = s.queries
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
        state = _attend_keys(state, own, kv, row, 0, diagonal, False, s)
        state = _attend_keys(state, own, kv, row, diagonal, end, True, s)
    else:
        begin = tl.maximum(before - s.window + 1, 0) // s.positions * s.positions
        state = _attend_keys(state, own, kv, row, begin, end, True, s)
    sums, largest, total = state
    result = sums / total[:, None]
    tl.store(y + place, result.to(y.dtype.element_ty), mask=(query < Q)[:, None])


def attends_prompt(q: Tensor, window: int | None, sinks: Tensor | None) -> bool:
    """Whether `attend_prompt` is for these queries [Q, H, C]; SDPA is for those without both."""
    return (window is not None or sinks is not None) and q.shape[-1] in HEAD_DIMS


def attend_prompt(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None
) -> Tensor:
    """`attend_chunk`: q [Q, H, C], last positions of k and v [K, S, C], sinks [H] -> [Q, H * C]."""
    (Q, H, C), (K, S, _) = q.shape, k.shape
    check_shapes(k=(k, (K, S, C)), v=(v, (K, S, C)))
    if k.stride() != v.stride() or k.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    y = q.new_empty(Q, H * C)
    candidates = (
        (PromptAttention(H, K, C, window, M, N), dict(warps=warps, stages=stages))
        for M, N, warps, stages in TILES
    )
    given = q.contiguous(), k, v, sinks, y, Q, S, k.stride(0), k.stride(1)
    s, options = fit(_attend_prompt, candidates, *given)
    launch(_attend_prompt, (triton.cdiv(Q, s.queries), H), *given, settings=s, **options)
    return y
