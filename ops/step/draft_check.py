"""One sequence's pass, apart from the model, in Triton kernels: `runtime.verification` on a GPU.

    begin_pass     the pass's tokens, positions and last real one
    find_best, rank    the largest logits after each token (ops/step/token_draw.py)
    check_drafts   after each token: is the next draft accepted, and the model's own token if not
    accept         how many drafts are accepted, the tokens, and the step behind them

The plain forms draw the same random numbers, so that both accept the same drafts.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.launch import await_previous, jit, launch, tl
from ops.step import token_draw
from ops.step.token_draw import (
    Draw,
    exponential,
    load_controls,
    noise_key,
    order_largest,
    pick,
    uniform,
    weigh,
)

MOST = 16  # tokens of a pass


@dataclass(frozen=True)
class Pass:
    """Settings of `_begin_pass` and `_accept`."""

    V: int = 0
    most: int = MOST


@dataclass(frozen=True)
class Check(Draw):
    """Settings of `_check_drafts`."""

    stream: int = 0  # of the random numbers that accept


# Kernels ------------------------------------------------------------------------------------------


# Grid [1]. n: drafts.
@jit(do_not_specialize=("n",))
def _begin_pass(
    token, drafts, position, last, tokens, positions, ends, n, s: tl.constexpr, PDL: tl.constexpr
):
    at = tl.arange(0, s.most)
    await_previous(PDL)
    draft = tl.load(drafts + at - 1, mask=(at > 0) & (at <= n), other=0)
    tl.store(tokens + at, tl.where(at == 0, tl.load(token), draft), mask=at <= n)
    tl.store(positions + at, tl.load(position) + at, mask=at <= n)
    tl.store(ends, tl.where(tl.load(last) < 0, -1, n).to(tl.int64))


# Grid [N + 1]: a row is what the model says after a token of the pass, `passed`. The last row has
# no draft. Row i decides as if the drafts before it were accepted; `_accept` finds the row at which
# they end. Draft d is accepted with probability min(1, p(d) / q(d)); else the own token is drawn
# from max(p - q, 0). q None: a draft was certain.
@jit(do_not_specialize=("n",))
def _check_drafts(
    logits,
    state,
    passed,
    q,
    ordered,
    crowded,
    good,
    own,
    n,
    s: tl.constexpr,
    PDL: tl.constexpr,
):
    V: tl.constexpr = s.V
    row = tl.program_id(0)
    rules = load_controls(state.controls, s)
    penalty, seed = tl.load(state.controls + 4), tl.load(state.seeds)
    await_previous(PDL)
    place = tl.load(state.position)
    chance = uniform(noise_key(seed, place, s.stream), row + 0 * place)
    source = logits + row * V, state.seen, penalty, passed, row + 1
    ordered += row * 2 * s.top
    candidates, weight, finite = weigh(source, rules, ordered, crowded + row, s)
    p, accepted = weight / tl.sum(weight, 0), finite & (row < n)
    if row < n:
        draft = tl.load(passed + row + 1)
        is_draft = candidates == draft
        p_draft, q_draft = tl.sum(tl.where(is_draft, p, 0.0), 0), 1.0
        left = is_draft.to(tl.float32)
        if q is not None:
            q += row.to(tl.int64) * V
            q_draft = tl.load(q + tl.maximum(draft, 0))
            left = tl.load(q + candidates, mask=weight > 0.0, other=0.0)
        accepted &= chance * q_draft < p_draft
        p = tl.maximum(p - left, 0.0)
    key = noise_key(seed, place, 0)
    score = tl.where(weight > 0.0, p / exponential(key, candidates), -1.0)
    tl.store(good + row, accepted.to(tl.int32))
    tl.store(own + row, pick(score, candidates, finite, s))


# Grid [1].
@jit(do_not_specialize=("n",))
def _accept(passed, good, own, state, result, n, s: tl.constexpr, PDL: tl.constexpr):
    at = tl.arange(0, s.most)
    await_previous(PDL)
    refused = (tl.load(good + at, mask=at < n, other=0) == 0) & (at <= n)
    count = tl.min(tl.where(refused, at, s.most), 0)
    last = tl.load(own + count)
    draft = tl.load(passed + at + 1, mask=at < n, other=0)
    number = tl.where(at < count, draft, last)
    tl.store(result + at, number, mask=at <= n)
    tl.store(result + n + 1, count.to(tl.int64) + 1)
    tl.store(state.token, last)
    place = tl.load(state.position)
    tl.debug_barrier()  # all threads have the position
    tl.store(state.position, place + count + 1)
    tl.store(state.seen + tl.where(number < 0, s.V - 1, number), True, mask=at <= n)


# Launching ----------------------------------------------------------------------------------------


def begin_pass(
    state: tuple, drafts: Tensor, pdl: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`runtime.verification.begin_pass`. pdl: None launches with PDL where the GPU has it."""
    N, device = drafts.shape[1], drafts.device
    if N >= MOST:
        raise ValueError(f"{N} drafts: a pass has {MOST - 1} at most")
    tokens, positions = (torch.empty(1, N + 1, dtype=torch.int64, device=device) for _ in range(2))
    last = torch.empty(1, dtype=torch.int64, device=device)
    given = state.token, drafts, state.position, state.last
    launch(_begin_pass, (1,), *given, tokens, positions, last, N, settings=Pass(), warps=1, pdl=pdl)
    return tokens, positions, last


def verify_pass(
    state: tuple,
    logits: Tensor,
    passed: Tensor,
    q: Tensor | None,
    result: Tensor,
    stream: int,
    pdl: bool | None = None,
) -> None:
    """`runtime.verification.verify_pass` among the TOP likeliest tokens, or greedy with top_k 1.

    state: a `sampling.StepState` of one sequence. passed int64 [1, N + 1]. q: None if greedy.
    stream: of the random numbers that accept.
    """
    rows, V = logits.shape
    if state.seen.shape != (1, V) or passed.shape != (1, rows):
        raise ValueError(f"logits {list(logits.shape)} of tokens {list(passed.shape)}")
    s = Check(V, token_draw.GROUPS, controls=0, stream=stream)
    logits, n, device = logits.contiguous(), rows - 1, logits.device
    ordered, crowded = order_largest(logits, state.seen, passed, state.controls, s, pdl)
    good = torch.empty(rows, dtype=torch.int32, device=device)
    own = torch.empty(rows, dtype=torch.int64, device=device)
    given = logits, state, passed, q, ordered, crowded
    launch(_check_drafts, (rows,), *given, good, own, n, settings=s, pdl=pdl)
    tensors, s = (passed, good, own, state, result), Pass(V)
    launch(_accept, (1,), *tensors, n, settings=s, warps=1, pdl=pdl)
