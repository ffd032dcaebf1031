"""The next token of each row of logits, sampled by three Triton kernels.

    _find_maxima     the largest of each of some thousand subsets of the vocabulary
    _find_candidates all tokens that may be among the K largest
    _draw            their ranks, probabilities and noise; the token drawn, and the step to it

The reference is `sample` and `step_to` of runtime/sampling.py, which Inductor compiles into about
fifteen kernels. K subsets have a maximum that is at least the K-th largest maximum, so at least K
tokens do: no smaller token is among the K largest.

A token's sort key is an int64: its logit's bits in the order of numbers, then its index. So ties
go to the lower index, and no two keys are equal. Subsets are strided: neighbors, which may have
similar logits, are in different ones.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.jit import jit, supports_pdl, tl, triton
from ops.moe_router import _ordered_bits

MAX_SUBSETS = 4096
MAX_CANDIDATES = 512  # K
BLOCK = 1024  # logits of a program
EXTRA = 32  # a threshold is near enough if so many more subsets than K reach it
LEAST = tl and tl.constexpr(-(2**63))
INDEX_MASK = tl and tl.constexpr(2**31 - 1)
# As in runtime/sampling.py: SplitMix64's constants as signed numbers.
WEYL = tl and tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
FIRST_FACTOR = tl and tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
SECOND_FACTOR = tl and tl.constexpr(0x94D049BB133111EB - 2**64)
LARGEST = tl and tl.constexpr(3.4028234663852886e38)  # fp32

# Kernels ------------------------------------------------------------------------------------------


@jit
def _load_keys(
    logits,
    seen,
    controls,
    S: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return sort keys of a program's subsets [SIZE, COLUMNS], LEAST beyond the vocabulary.

    As `penalize`, then `nan_to_num` of `rank_candidates`.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    index = tl.arange(0, SIZE)[:, None] * S + column
    inside = (column < S) & (index < V)
    value = tl.load(logits + index, mask=inside, other=0.0)
    penalty = tl.load(controls + 4)
    penalized = tl.where(value > 0, tl.div_rn(value, value * 0 + penalty), value * penalty)
    value = tl.where(tl.load(seen + index, mask=inside, other=0) != 0, penalized, value)
    value = tl.where(value != value, float("inf"), tl.maximum(value, -LARGEST)) + 0.0
    key = _ordered_bits(value).to(tl.int64) << 32 | (INDEX_MASK - index)
    return tl.where(inside, key, LEAST)


# Grid [subsets / COLUMNS, B].
@jit
def _find_maxima(
    logits,
    seen,
    controls,
    maxima,
    found,
    S: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    keys = _load_keys(logits + row * V, seen + row * V, controls + row * 5, S, V, SIZE, COLUMNS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(maxima + row * S + column, tl.max(keys, 0), mask=column < S)
    if tl.program_id(0) == 0:
        tl.store(found + row, 0)


# Grid [subsets / COLUMNS, B]: a program searches its subsets. Candidates are in no order.
@jit
def _find_candidates(
    logits,
    seen,
    controls,
    maxima,
    found,
    candidates,
    K: tl.constexpr,
    S: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUBSETS: tl.constexpr,
    ENOUGH: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    keys = _load_keys(logits + row * V, seen + row * V, controls + row * 5, S, V, SIZE, COLUMNS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    subset = tl.arange(0, SUBSETS)
    largest = tl.load(maxima + row * S + subset, mask=subset < S, other=LEAST, cache_modifier=".cg")
    # The largest threshold that K maxima reach, two bits at a time, until about K do. It begins
    # with the bits that all maxima share.
    most = tl.max(largest, 0)
    differ = most ^ tl.min(tl.where(subset < S, largest, most), 0)
    shared = (differ >= 0).to(tl.int64)
    threshold = tl.where(shared != 0, most, LEAST)
    bit = tl.full([], 63, tl.int64)
    for n in tl.static_range(5, 0, -1):  # from 62 down to the highest bit that differs, made odd
        lower = bit - (1 << n)
        bit = tl.where((shared != 0) & ((differ >> lower) <= 1), lower, bit)
    threshold = tl.where((shared != 0) & (bit < 63), threshold >> bit >> 1 << bit << 1, LEAST)
    reached = tl.full([], S, tl.int64)
    while (bit > 0) & (reached > ENOUGH):
        step = tl.full([], 1, tl.int64) << (bit - 1)
        counts = (largest >= threshold + step).to(tl.int64)
        counts += (largest >= threshold + 2 * step).to(tl.int64) << 20
        counts += (largest >= threshold + 3 * step).to(tl.int64) << 40
        counts = tl.sum(counts, 0)
        for n in tl.static_range(3):  # the last that enough maxima reach
            count = (counts >> 20 * n) & 0xFFFFF
            reached = tl.where(count >= K, count, reached)
        above = ((counts & 0xFFFFF) >= K).to(tl.int64) + ((counts >> 40) >= K).to(tl.int64)
        threshold += step * (above + ((counts >> 20 & 0xFFFFF) >= K).to(tl.int64))
        bit -= 2
    keys = tl.reshape(keys, [SIZE * COLUMNS])
    chosen = ((keys >= threshold) & (keys > LEAST)).to(tl.int32)
    count = tl.sum(chosen, 0)
    if count > 0:
        before = tl.atomic_add(found + row, count, sem="relaxed")
        at = candidates + row * V + before + tl.cumsum(chosen, 0) - 1
        tl.store(at, keys, mask=chosen != 0)


@jit
def _shift_right(x, count: tl.constexpr):
    """Shift int64 as unsigned numbers."""
    return (x >> count) & ((1 << (64 - count)) - 1)


@jit
def _scramble(x):
    x = (x ^ _shift_right(x, 30)) * FIRST_FACTOR
    x = (x ^ _shift_right(x, 27)) * SECOND_FACTOR
    return x ^ _shift_right(x, 31)


@jit
def _exponential(seed, position, index):
    """Return the noise of runtime/sampling.py, `exponential`, at each index."""
    key = _scramble(_scramble(seed) + position * WEYL)
    bits = _shift_right(_scramble(key ^ index.to(tl.int64)), 32)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604645e-08)
    rest = 1.0 - uniform
    # log1p(-uniform), without the rounding of 1 - uniform (Goldberg 1991, theorem 4).
    return tl.where(rest == 1.0, uniform, -tl.log(rest) * uniform / (1.0 - rest))


# Grid [B].
@jit
def _draw(
    controls,
    seeds,
    last,
    found,
    candidates,
    ranked,
    token,
    position,
    seen,
    K: tl.constexpr,
    V: tl.constexpr,
    RANKS: tl.constexpr,
    MINE: tl.constexpr,
    OTHERS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    at = tl.load(position + row)
    noise = _exponential(tl.load(seeds + row), at, rank)
    if PDL:
        tl.extra.cuda.gdc_wait()
    ranked, candidates = ranked + row * K, candidates + row * V
    count = tl.load(found + row, cache_modifier=".cg")
    mine, others = tl.arange(0, MINE), tl.arange(0, OTHERS)
    first = tl.full([], 0, tl.int32)
    while first < count:
        inside = first + mine < count
        key = tl.load(candidates + first + mine, mask=inside, other=LEAST, cache_modifier=".cg")
        larger, start = tl.zeros([MINE, OTHERS], tl.int32), tl.full([], 0, tl.int32)
        at_first = others < count
        other = tl.load(candidates + others, mask=at_first, other=LEAST, cache_modifier=".cg")
        while start < count:
            start += OTHERS  # prefetch
            following = tl.load(
                candidates + start + others,
                mask=start + others < count,
                other=LEAST,
                cache_modifier=".cg",
            )
            larger += (other[None, :] > key[:, None]).to(tl.int32)
            other = following
        place = tl.sum(larger, 1)
        tl.store(ranked + place, key, mask=inside & (place < K))
        first += MINE
    tl.debug_barrier()  # for what other warps stored
    key = tl.load(ranked + rank, mask=rank < K, other=LEAST)
    value = _ordered_bits((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    value = tl.where(rank < K, value, float("-inf"))
    index = INDEX_MASK - (key & INDEX_MASK)
    controls += row * 5
    temperature, top_k = tl.load(controls), tl.load(controls + 1)
    top_p, min_p = tl.load(controls + 2), tl.load(controls + 3)
    among = rank.to(tl.float32) < top_k
    scaled = tl.where(among, tl.div_rn(value, value * 0 + temperature), float("-inf"))
    probability = tl.exp(scaled - tl.max(scaled, 0))
    probability /= tl.sum(probability, 0)
    likelier = tl.cumsum(probability, 0) - probability
    keep = among & (likelier < top_p) & (probability >= min_p * tl.max(probability, 0))
    best = tl.argmax(tl.where(keep, probability, 0.0) / noise, 0)
    chosen = tl.sum(tl.where(rank == best, index, 0), 0)
    is_finite = tl.abs(tl.max(value, 0)) < LARGEST
    tl.store(token + row, tl.where(is_finite, chosen, -1))
    tl.store(position + row, at + tl.load(last + row) + 1)
    tl.store(seen + row * V + tl.where(is_finite, chosen, V - 1), 1)


# Launching ----------------------------------------------------------------------------------------


def can_sample(logits: Tensor, count: int) -> bool:
    """Whether `sample_tokens` takes these logits [B, V], and this many candidates."""
    fits = 0 < count <= min(MAX_CANDIDATES, logits.shape[1])
    return fits and logits.is_cuda and logits.dtype == torch.float32 and supports_pdl(logits)


def sample_tokens(
    logits: Tensor,
    controls: Tensor,
    seen: Tensor,
    seeds: Tensor,
    last: Tensor,
    token: Tensor,
    position: Tensor,
    count: int,
    pdl: bool = True,
) -> None:
    """Sample each row's next token among `count` candidates, and step to it, in place.

    logits fp32 [B, V], controls fp32 [B, 5], seen bool [B, V], seeds and last int64 [B], token and
    position int64 [B, 1]: as of `StepState` in runtime/sampling.py; all contiguous.
    """
    B, V = logits.shape
    size = triton.next_power_of_2(triton.cdiv(V, MAX_SUBSETS))
    subsets, columns = triton.cdiv(V, size), max(1, BLOCK // size)
    maxima = torch.empty(B, subsets, dtype=torch.int64, device=logits.device)
    found = torch.empty(B, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(B, V, dtype=torch.int64, device=logits.device)
    ranked = torch.empty(B, count, dtype=torch.int64, device=logits.device)
    marks, grid = seen.view(torch.uint8), (triton.cdiv(subsets, columns), B)
    given = logits.contiguous(), marks, controls, maxima, found
    shape = dict(S=subsets, V=V, SIZE=size, COLUMNS=columns, PDL=pdl, launch_pdl=pdl)
    _find_maxima[grid](*given, **shape, num_warps=4)
    search = dict(SUBSETS=triton.next_power_of_2(subsets), ENOUGH=count + EXTRA)
    _find_candidates[grid](*given, candidates, K=count, **search, **shape, num_warps=4)
    _draw[(B,)](
        controls,
        seeds,
        last,
        found,
        candidates,
        ranked,
        token,
        position,
        marks,
        K=count,
        V=V,
        RANKS=triton.next_power_of_2(count),
        MINE=512,
        OTHERS=16,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=16,
    )
