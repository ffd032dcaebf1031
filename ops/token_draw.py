"""The next token of each row in two Triton kernels: `runtime.sampling.sample` and `step_to`.

    find_best    of each of GROUPS groups of the vocabulary, the KEPT tokens with the largest logits
    draw         top-k, top-p and min-p among those, the draw, and the step to the token

A token's key is its logit's ordered bits, then its complement: int64, so that keys are distinct and
the order of keys is the order of `shortlist`, ties included. The k largest keys are found by
bisection. A group may have more of them than it keeps; its last one is then among the k largest,
and `draw` takes the whole vocabulary instead, in a loop: exact, but about 0.3 ms.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.jit import jit, supports_pdl, tl, triton
from ops.moe_router import _ordered_bits

# A group has half of a token of the likeliest 256 on average, and 8 of them once in 10 million.
GROUPS, KEPT = 512, 8
RUN = 4  # neighbors in a group: neighboring tokens, such as digits, are often likely together

# Kernels ------------------------------------------------------------------------------------------


@jit
def _edited_logits(logits, seen, penalty, token, inside):
    """Load logits, those of tokens in `seen` penalized (`sampling.penalize`); NaN becomes inf."""
    x = tl.load(logits + token, mask=inside, other=0.0)
    marked = tl.load(seen + token, mask=inside, other=0) != 0
    x = tl.where(marked, tl.where(x > 0.0, tl.math.div_rn(x, penalty), x * penalty), x)
    return tl.where(x == x, x, float("inf"))


@jit
def _key(bits, token):
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - token)


@jit
def _logit_of(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _token_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


# Grid [GROUPS, B], one warp a program: a group's KEPT largest keys, one maximum each.
@jit
def _find_best(
    logits,
    seen,
    controls,
    best,
    V: tl.constexpr,
    PDL: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    RUN: tl.constexpr,
    SIZE: tl.constexpr,
):
    group, row = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, SIZE)
    token = (at // RUN * GROUPS + group) * RUN + at % RUN
    penalty = tl.load(controls + row * 5 + 4)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = _edited_logits(logits + row * V, seen + row * V, penalty, token, token < V)
    bits = tl.where(token < V, _ordered_bits(x), -(2**31))
    best += (row * GROUPS + group) * KEPT
    for n in tl.static_range(KEPT):
        largest = tl.max(bits, 0)
        first = tl.min(tl.where(bits == largest, token, 2**31 - 1), 0)
        tl.store(best + n, _key(largest, first))
        bits = tl.where(token == first, -(2**31), bits)


@jit
def _weight(key, scale):
    """Return the probability of a key's token as a multiple of the likeliest one's.

    scale: the largest key, and the temperature.
    """
    return tl.exp((_logit_of(key) - _logit_of(scale[0])) / scale[1])


@jit
def _vocabulary_keys(source, start, V: tl.constexpr, COUNT: tl.constexpr):
    """Return the keys of COUNT tokens. source: logits and seen of a row, and its penalty."""
    token = start + tl.arange(0, COUNT)
    x = _edited_logits(source[0], source[1], source[2], token, token < V)
    return tl.where(token < V, _key(_ordered_bits(x), token), -(2**63))


@jit
def _sums_from(
    least, key, end, source, scale, BY_WEIGHT: tl.constexpr, V: tl.constexpr, COUNT: tl.constexpr
):
    """Return the number of keys from `least` on, and the same or BY_WEIGHT their weight: fp32.

    key: the first COUNT keys; if `end` is above COUNT, the rest of the vocabulary follows.
    """
    count = tl.sum((key >= least).to(tl.float32), 0)
    total = count
    if BY_WEIGHT:
        total = tl.sum(tl.where(key >= least, _weight(key, scale), 0.0), 0)
    for start in range(COUNT, end, COUNT):
        more = _vocabulary_keys(source, start, V, COUNT)
        n = tl.sum((more >= least).to(tl.float32), 0)
        count += n
        if BY_WEIGHT:
            n = tl.sum(tl.where(more >= least, _weight(more, scale), 0.0), 0)
        total += n
    return count, total


@jit
def _shortest_prefix(
    low,
    goal,
    key,
    end,
    source,
    scale,
    BY_WEIGHT: tl.constexpr,
    V: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Return a lower bound of the fewest largest keys whose number, or weight, reaches `goal`.

    It is `low` if all keys from there on do not exceed the goal.
    """
    high, above = scale[0] + 1, 0.0
    count, total = _sums_from(low, key, end, source, scale, BY_WEIGHT, V, COUNT)
    if total <= goal:
        above = count
    # The goal is reached by the `count` keys from `low` on, and not by the `above` from `high` on.
    while count - above > 1.0:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        n, total = _sums_from(middle, key, end, source, scale, BY_WEIGHT, V, COUNT)
        if total >= goal:
            low, count = middle, n
        else:
            high, above = middle, n
    return low


@jit
def _scramble(x):
    """`sampling.scramble` of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def _exponential(noise_key, token):
    """`sampling.exponential`: -log1p(-u). Triton has no log1p; that of the rounded 1 - u is
    corrected (Goldberg 1991, theorem 4)."""
    bits = (_scramble(noise_key ^ token.to(tl.uint64)) >> 32).to(tl.uint32)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    rest = 1.0 - u
    return tl.where(rest == 1.0, u, u * tl.log(rest) / tl.where(rest == 1.0, 1.0, rest - 1.0))


@jit
def _best_draw(key, least, scale, min_p, noise_key):
    """Return the largest weight / noise of the keys from `least` on, and its token."""
    weight = _weight(key, scale)
    kept = (key >= least) & (weight >= min_p)
    draw = tl.where(kept, weight / _exponential(noise_key, _token_of(key)), -1.0)
    largest = tl.max(draw, 0)
    return largest, tl.min(tl.where(draw == largest, _token_of(key), 2**31 - 1), 0)


# Grid [B]. COUNT: GROUPS * KEPT.
@jit
def _draw(
    logits,
    seen,
    controls,
    seeds,
    position,
    last,
    best,
    token,
    V: tl.constexpr,
    PDL: tl.constexpr,
    KEPT: tl.constexpr,
    COUNT: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row * V
    seen += row * V
    temperature, top_k = tl.load(controls + row * 5), tl.load(controls + row * 5 + 1)
    top_p, min_p = tl.load(controls + row * 5 + 2), tl.load(controls + row * 5 + 3)
    source = logits, seen, tl.load(controls + row * 5 + 4)
    place = tl.load(position + row)
    noise_key = _scramble(tl.load(seeds + row).to(tl.uint64))
    noise_key = _scramble(noise_key + place.to(tl.uint64) * 0x9E3779B97F4A7C15)
    at, end = tl.arange(0, COUNT), COUNT
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    key = tl.load(best + row * COUNT + at, cache_modifier=".cg")
    top = tl.max(key, 0)
    scale = top, temperature
    # Tokens from 104 temperatures below the likeliest on have no weight: exp(-104) is 0 in fp32.
    lowest = _ordered_bits(_logit_of(top) - 104.0 * temperature).to(tl.int64) << 32
    least = _shortest_prefix(lowest, top_k, key, end, source, scale, False, V, COUNT)
    if tl.max(tl.where(at % KEPT == KEPT - 1, key, -(2**63)), 0) >= least:
        key, end = _vocabulary_keys(source, 0, V, COUNT), V
        least = _shortest_prefix(lowest, top_k, key, end, source, scale, False, V, COUNT)
    if top_p < 1.0:
        _, total = _sums_from(least, key, end, source, scale, True, V, COUNT)
        goal = top_p * total
        least = _shortest_prefix(least, goal, key, end, source, scale, True, V, COUNT)
    largest, chosen = _best_draw(key, least, scale, min_p, noise_key)
    for start in range(COUNT, end, COUNT):
        more = _vocabulary_keys(source, start, V, COUNT)
        draw, other = _best_draw(more, least, scale, min_p, noise_key)
        chosen = tl.where(draw > largest, other, chosen)
        largest = tl.maximum(draw, largest)
    finite = tl.abs(_logit_of(top)) < float("inf")
    tl.store(token + row, tl.where(finite, chosen, -1).to(tl.int64))
    tl.store(position + row, place + tl.load(last + row) + 1)
    tl.store(seen + tl.where(finite, chosen, V - 1), True)


# Launching ----------------------------------------------------------------------------------------


def draw_tokens(
    logits: Tensor,
    seen: Tensor,
    controls: Tensor,
    seeds: Tensor,
    position: Tensor,
    last: Tensor,
    token: Tensor,
    pdl: bool | None = None,
) -> None:
    """Choose a token for each row of logits fp32 [B, V] and step to it, in place.

    The others are those of `sampling.StepState`, whose top_k should be at most 256: a greater one
    takes the slow way. pdl: None launches with PDL where the GPU has it.
    """
    B, V = logits.shape
    pdl = supports_pdl(logits) if pdl is None else pdl
    logits = logits.contiguous()
    best = torch.empty(B, GROUPS, KEPT, dtype=torch.int64, device=logits.device)
    size = triton.next_power_of_2(triton.cdiv(V, GROUPS * RUN) * RUN)
    options = dict(V=V, PDL=pdl, KEPT=KEPT, launch_pdl=pdl)
    _find_best[(GROUPS, B)](
        logits, seen, controls, best, GROUPS=GROUPS, RUN=RUN, SIZE=size, num_warps=1, **options
    )
    _draw[(B,)](
        *(logits, seen, controls, seeds, position, last, best, token),
        COUNT=GROUPS * KEPT,
        num_warps=16,
        **options,
    )
