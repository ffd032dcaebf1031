"""Passes of sequences, apart from the model, in Triton kernels: `runtime.verification` on a GPU.

B sequences have T = N + 1 tokens each, some of which may be padding. The plain forms draw the same
random numbers, so that both accept the same drafts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.launch import await_previous, jit, launch, tl
from ops.step import token_draw

MOST = 16  # tokens of a sequence's pass
NO_DRAFT = -2  # stands for drafts that a sequence does not have; none follows it


@dataclass(frozen=True)
class Pass(token_draw.Draw):
    """Settings of the kernels. Only `_check_drafts` draws; `stream` is that of acceptance."""

    stride: int = 0  # numbers from one sequence's drafts to the next one's
    most: int = MOST
    none: int = NO_DRAFT


# Grid [B]. n: N. Padding repeats the sequence's newest token.
@jit(do_not_specialize=("n",))
def _begin_pass(
    token, drafts, position, last, tokens, positions, ends, n, s: tl.constexpr, PDL: tl.constexpr
):
    at, sequence = tl.arange(0, s.most), tl.program_id(0)
    place = sequence * (n + 1) + at
    await_previous(PDL)
    newest = tl.load(token + sequence)
    draft = tl.load(drafts + sequence * s.stride + at - 1, mask=(at > 0) & (at <= n), other=0)
    missing = (draft == s.none) & (at <= n)
    real = tl.min(tl.where(missing, at - 1, n), 0)
    tl.store(tokens + place, tl.where((at == 0) | missing, newest, draft), mask=at <= n)
    tl.store(positions + place, tl.load(position + sequence) + at, mask=at <= n)
    idle = tl.load(last + sequence) < 0
    tl.store(ends + sequence, tl.where(idle, -1, real).to(tl.int64))


# Grid [B T]: a row is what the model says after a token of a pass, `passed`. The rows from `last`
# on have no draft. Row i decides as if the drafts before it were accepted; `_accept` finds the row
# at which they end. Draft d is accepted with probability min(1, p(d) / q(d)); else the own token is
# drawn from max(p - q, 0). q None: a draft was certain. Without a draft, weights are those of a
# plain step, unscaled, so that the token is the same.
@jit(do_not_specialize=("n",))
def _check_drafts(
    logits, state, passed, last, q, largest, results, n, s: tl.constexpr, PDL: tl.constexpr
):
    ordered, crowded = largest
    good, own = results
    row = tl.program_id(0)
    sequence, at = row // (n + 1), row % (n + 1)
    controls = state.controls + sequence * s.controls
    rules = token_draw.load_controls(controls, s)
    penalty, seed = tl.load(controls + 4), tl.load(state.seeds + sequence)
    await_previous(PDL)
    place = tl.load(state.position + sequence)
    chance = token_draw.uniform(token_draw.noise_key(seed, place, s.stream), at + 0 * place)
    passed += sequence * (n + 1)
    source = logits + row * s.V, state.seen + sequence * s.V, penalty, passed, at + 1, None
    ordered += row * s.listed
    candidates, weight, finite = token_draw.weigh(source, rules, ordered, crowded + row, s)
    has_draft = at < tl.load(last + sequence)
    p, accepted = weight, finite & has_draft
    if has_draft:
        p = weight / tl.sum(weight, 0)
        draft = tl.load(passed + at + 1)
        is_draft = candidates == draft
        p_draft, q_draft = tl.sum(tl.where(is_draft, p, 0.0), 0), 1.0
        left = is_draft.to(tl.float32)
        if q is not None:
            q += (sequence * n + at).to(tl.int64) * s.V
            q_draft = tl.load(q + tl.maximum(draft, 0))
            left = tl.load(q + candidates, mask=weight > 0.0, other=0.0)
        accepted &= chance * q_draft < p_draft
        p = tl.maximum(p - left, 0.0)
    key = token_draw.noise_key(seed, place, 0)
    score = tl.where(weight > 0.0, p / token_draw.exponential(key, candidates), -1.0)
    tl.store(good + row, accepted.to(tl.int32))
    tl.store(own + row, token_draw.pick(score, candidates, finite, s))


# Grid [B]. An idle sequence gets no token and stays where it is.
@jit(do_not_specialize=("n",))
def _accept(passed, last, good, own, state, result, n, s: tl.constexpr, PDL: tl.constexpr):
    at, sequence = tl.arange(0, s.most), tl.program_id(0)
    first = sequence * (n + 1)
    await_previous(PDL)
    refused = (tl.load(good + first + at, mask=at < n, other=0) == 0) & (at <= n)
    count = tl.min(tl.where(refused, at, s.most), 0)
    newest = tl.load(own + first + count)
    draft = tl.load(passed + first + at + 1, mask=at < n, other=0)
    number = tl.where(at < count, draft, newest)
    taken = tl.where(tl.load(last + sequence) < 0, 0, count + 1).to(tl.int64)
    place = tl.load(state.position + sequence) + taken
    result += sequence * (n + 3)
    tl.store(result, taken)
    tl.store(result + 1, place)
    tl.store(result + 2 + at, number, mask=at <= n)
    tl.store(state.token + sequence, newest)
    tl.debug_barrier()  # all threads have the position
    tl.store(state.position + sequence, place)
    seen = state.seen + sequence * s.V
    tl.store(seen + tl.where(number < 0, s.V - 1, number), True, mask=at <= n)


def begin_pass(state: tuple, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`runtime.verification.begin_pass`. Drafts may be in pinned host memory."""
    (B, N), device = drafts.shape, state.token.device
    if N >= MOST:
        raise ValueError(f"{N} drafts: a pass has {MOST - 1} at most")
    tokens, positions = (torch.empty(B, N + 1, dtype=torch.int64, device=device) for _ in range(2))
    last = torch.empty(B, dtype=torch.int64, device=device)
    given = state.token, drafts, state.position, state.last
    s = Pass(stride=drafts.stride(0))
    launch(_begin_pass, (B,), *given, tokens, positions, last, N, settings=s, warps=1)
    return tokens, positions, last


def verify_pass(
    state: tuple,
    logits: Tensor,
    passed: Tensor,
    last: Tensor,
    q: Tensor | None,
    result: Tensor,
    stream: int,
    greedy: bool = False,
) -> None:
    """`runtime.verification.verify_pass` among the TOP likeliest tokens; greedy: of all rows.

    state: a `sampling.StepState` of B sequences. passed int64 [B, N + 1], last int64 [B]: as of
    `begin_pass`. q: None if greedy. result: may be in pinned host memory. stream: of the random
    numbers that accept.
    """
    B, T, V = logits.shape
    if state.seen.shape != (B, V) or passed.shape != (B, T):
        raise ValueError(f"logits {list(logits.shape)} of tokens {list(passed.shape)}")
    s = Pass(V, token_draw.GROUPS, stream=stream, greedy=greedy)
    logits, n, device = logits.flatten(0, 1).contiguous(), T - 1, logits.device
    largest = token_draw.order_largest(logits, state.seen, passed, state.controls, s)
    good = torch.empty(B * T, dtype=torch.int32, device=device)
    own = torch.empty(B * T, dtype=torch.int64, device=device)
    given = logits, state, passed, last, q, largest, (good, own)
    launch(_check_drafts, (B * T,), *given, n, settings=s)
    tensors = passed, last, good, own, state, result
    launch(_accept, (B,), *tensors, n, settings=Pass(V), warps=1)
