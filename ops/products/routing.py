"""The choice of experts from a router's scores.

A router's scores stay fp32. Shared experts, which every token uses, are experts E, E + 1, ... of
the stacked weights: they follow the chosen ones in `indices` and `weights`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.declared import Routing
from ops.launch import await_previous, jit, launch, tl
from ops.ranks.mailbox import MAX_DIM
from ops.sizes import pow2

MAX_EXPERTS = 512
MAX_PAIRS = 32
SOFTMAX_ONE = tl.constexpr(2.0**40)  # 1 as an integer, in sums of up to MAX_EXPERTS


def check_router(E: int, D: int, routing: Routing) -> None:
    """Raise ValueError if no kernel scores E experts for tokens of D numbers, and chooses."""
    if E > MAX_EXPERTS or D > MAX_DIM or routing.active > E or routing.pairs > MAX_PAIRS:
        raise ValueError(f"no kernel for {E} experts and rows of {D} numbers")


@dataclass(frozen=True)
class ChoiceSettings:
    """Settings of a kernel that chooses experts: `Routing` without its tensors.

    A row of a token's scores has those of E experts and, with `gated`, that of the shared experts'
    gate. The choice is by the first row. A kernel without the argument score_bias may find a second
    one:

        sigmoid     scores without the bias, which become weights
        biased      the bias: softmax needs all scores before it is added
        factored    factors of the weights
    """

    E: int
    active: int  # A
    shared: int
    gated: int
    sigmoid: bool
    biased: bool
    bias_before: bool  # as in `Routing`
    factored: bool
    norm_topk: bool
    scale: float

    # Rows of a token's scores, if the kernel gets no score_bias.
    rows = property(lambda s: 1 + (s.sigmoid or s.biased or s.factored))
    pairs = property(lambda s: s.active + s.shared)  # experts of a token
    N = property(lambda s: s.E + s.gated)  # scores of a row
    # Scores from token to token, if the kernel gets no score_bias.
    row = property(lambda s: s.rows * s.N)
    block = property(lambda s: pow2(s.E))  # experts of a tile


def choice_of(E: int, routing: Routing) -> ChoiceSettings:
    """Return the settings by which a kernel chooses among E experts."""
    has_bias = routing.score_bias is not None
    return ChoiceSettings(
        E,
        routing.active,
        routing.shared,
        gated=int(routing.gated),
        sigmoid=has_bias and not routing.softmax,
        biased=has_bias and routing.softmax,
        bias_before=routing.bias_before,
        factored=routing.factors is not None,
        norm_topk=routing.norm_topk,
        scale=routing.scale,
    )


def queries_of(T: int, last: Tensor | None) -> int:
    """Return how many of T tokens a sequence has. last: `Context.last` [B]; None: one sequence."""
    return T if last is None else T // len(last)


@jit
def ordered_bits(scores):
    """Map fp32 to int32 in the same order (`topk.ordered_bits`)."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


@jit
def _score_keys(scores, expert, s: tl.constexpr):
    """Return int32 keys in the order of the scores; -2 ** 31 where there is no expert.

    `choose` gives this key to chosen experts as well. No score has it, not even NaN, so that A
    experts are always found: w2 waits for A indices.
    """
    key = tl.maximum(ordered_bits(scores), -(2**31) + 1)
    if s.block > s.E:
        key = tl.where(expert < s.E, key, -(2**31))
    return key


@jit
def _softmax_scores(score, scores, score_bias, expert, s: tl.constexpr):
    """Return softmax scores of raw ones, -inf for no expert, and those with the bias added.

    score, expert: [..., BLOCK]. scores, score_bias: as of `choose`. The sum is of integers, so that
    it has the same bits in each layout: `choose` and `choose_one` must agree on the experts.
    """
    axis: tl.constexpr = len(score.shape) - 1
    part = tl.exp(score - tl.max(score, axis, keep_dims=True))
    total = tl.sum((part * SOFTMAX_ONE).to(tl.int64), axis, keep_dims=True)
    part *= SOFTMAX_ONE / total.to(tl.float32)
    exists = expert < s.E
    if score_bias is not None:
        bias = tl.load(score_bias + expert, mask=exists, other=0.0)
    else:
        bias = tl.load(scores + s.N + expert, mask=exists, other=0.0, cache_modifier=".cg")
    return part, part + bias


@jit
def choose_one(scores, rank, s: tl.constexpr, WARPS: tl.constexpr):
    """Return the expert of this rank, in the order of `choose`.

    Each warp has a row of [WARPS, BLOCK] and searches it by itself: no warp waits for another.
    """
    expert = tl.arange(0, s.block)[None, :] + tl.zeros([WARPS, 1], tl.int32)
    score = tl.load(scores + expert, mask=expert < s.E, other=float("-inf"), cache_modifier=".cg")
    if s.biased:
        _, score = _softmax_scores(score, scores, None, expert, s)
    key = _score_keys(score, expert, s)
    found = tl.zeros([WARPS, 1], tl.int32)
    for _ in range(rank + 1):
        best = key == tl.max(key, 1, keep_dims=True)
        found = tl.min(tl.where(best, expert, s.block), 1, keep_dims=True)
        key = tl.where(expert == found, -(2**31), key)
    return tl.max(tl.max(found, 1), 0)


@jit
def load_gate(scores, score_bias, s: tl.constexpr):
    """Return the weight of a gated shared expert. score_bias: as of `choose`."""
    if s.sigmoid and score_bias is None:
        weight = tl.load(scores + s.N + s.E, cache_modifier=".cg")
    else:
        weight = tl.sigmoid(tl.load(scores + s.E, cache_modifier=".cg"))
    return weight


@jit
def choose(scores, score_bias, indices, weights, s: tl.constexpr):
    """Store the A experts of the highest scores, then the shared ones. Ties: the lower index.

    score_bias: the bias or the factors, if `scores` is one row of dot products; None: they are in
    its second row. Each of A rounds finds a maximum, one instruction within a warp (redux).
    """
    A: tl.constexpr = s.active
    expert = tl.arange(0, s.block)
    # From L2: this kernel may have started before the one that writes them.
    score = tl.load(scores + expert, mask=expert < s.E, other=float("-inf"), cache_modifier=".cg")
    score = score.to(tl.float32)
    if s.biased:
        part, score = _softmax_scores(score, scores, score_bias, expert, s)
    elif score_bias is not None and not s.factored:
        part = tl.sigmoid(score)
        if not s.bias_before:
            score = part
        score += tl.load(score_bias + expert, mask=expert < s.E, other=0.0)
    key, rank = _score_keys(score, expert, s), tl.full([s.block], A, tl.int32)
    for n in tl.static_range(A):
        found = expert == tl.min(tl.where(key == tl.max(key, 0), expert, s.block), 0)
        rank = tl.where(found, n, rank)
        key = tl.where(found, -(2**31), key)
    chosen = rank < A
    if s.sigmoid and score_bias is None:
        part = tl.load(scores + s.N + expert, mask=expert < s.E, other=0.0, cache_modifier=".cg")
    elif not (s.sigmoid or s.biased):
        part = tl.exp(score - tl.max(score, 0))
    if s.norm_topk:
        part /= tl.sum(tl.where(chosen, part, 0.0), 0)
    elif not (s.sigmoid or s.biased):
        part /= tl.sum(part, 0)
    if s.scale != 1.0:
        part *= s.scale
    if s.factored:
        factors = score_bias if score_bias is not None else scores + s.N
        part *= tl.load(factors + expert, mask=expert < s.E, other=0.0).to(tl.float32)
    tl.store(indices + rank, expert.to(tl.int64), mask=chosen)
    tl.store(weights + rank, part, mask=chosen)
    if s.shared:
        part = 1.0
        if s.gated:
            part = load_gate(scores, score_bias, s)
        for n in tl.static_range(s.shared):
            tl.store(indices + A + n, s.E + n)
            tl.store(weights + A + n, part)


# Grid [T]: a program chooses the experts of one token.
@jit
def _route(scores, score_bias, indices, weights, s: tl.constexpr, PDL: tl.constexpr):
    ROW: tl.constexpr = s.N if score_bias is not None else s.row
    PAIRS: tl.constexpr = s.pairs
    token = tl.program_id(0)
    await_previous(PDL)
    choose(scores + token * ROW, score_bias, indices + token * PAIRS, weights + token * PAIRS, s)


def route(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Choose experts for several tokens.

    scores: fp32 [T, 1 or 2, N] of `norm_router`, or the dot products [T, N] of normed tokens and
    the router's rows, of any dtype. Return expert_indices int64 and expert_weights fp32 [T, A + S].

    The reference is `MoE.route` of model.py or of models/layers/group_routing.py. `experts.gate_up`
    chooses for one token itself.
    """
    T, N = len(scores), scores.shape[-1]
    s, score_bias = choice_of(N - routing.gated, routing), None
    if scores.ndim == 2:
        score_bias = routing.of_experts
    elif scores.shape[1] != s.rows:
        raise ValueError(f"scores {list(scores.shape)} of a token have {s.rows} rows")
    indices = torch.empty(T, s.pairs, dtype=torch.int64, device=scores.device)
    weights = torch.empty(T, s.pairs, dtype=torch.float32, device=scores.device)
    tensors = scores, score_bias, indices, weights
    launch(_route, (T,), *tensors, settings=s, warps=1)
    return indices, weights
