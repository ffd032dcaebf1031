"""The parts of a pass beside the model: which drafts are accepted, and which token follows them.

Greedy: drafts are accepted while they equal the model's own tokens. Sampled: with the chances of
Leviathan et al. 2023, so that tokens have the model's own distribution.
"""

import torch
from torch import Tensor

from ops.plain.topk import argmax
from ops.step.draft_check import NO_DRAFT
from runtime.sampling import (
    NOT_FINITE,
    StepState,
    exponential,
    rank_candidates,
    sample,
    uniform,
)

# A stream of random numbers beside that of plain steps and that of drafts (`DRAFT_STREAM`): if a
# draft and its verification shared one, the output would have another distribution.
ACCEPT_STREAM = 2


def begin_pass(state: StepState, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a pass's tokens and positions [B, N + 1], and each row's last real token [B].

    drafts int64 [B, N]: a row's drafts end at its first NO_DRAFT. Padding repeats the newest token.
    """
    N = drafts.shape[1]
    exists = (drafts != NO_DRAFT).long().cumprod(dim=1)
    padded = torch.where(exists > 0, drafts, state.token)
    tokens = torch.cat((state.token, padded), dim=1)
    positions = state.position + torch.arange(N + 1, device=drafts.device)
    return tokens, positions, torch.where(state.last < 0, -1, exists.sum(dim=1))


def verify_pass(
    state: StepState,
    logits: Tensor,
    tokens: Tensor,
    last: Tensor,
    q: Tensor | None,
    candidates: int,
    result: Tensor,
) -> None:
    """Accept drafts, step behind them, and write B rows of N + 3 numbers to the front of `result`.

    A row: how many tokens it gets, the position of its newest token, and N + 1 tokens, of which
    those after the newest one repeat it. tokens int64 [B, N + 1], last int64 [B]: as in
    `begin_pass`. logits, q: as in `verify_sampled`. candidates: as in `Sampling.candidates`. An
    idle row, last -1, gets no token and stays where it is.
    """
    if candidates:
        taken, found = verify_sampled(logits, tokens, last, q, state, candidates)
    else:
        taken, found = verify_greedy(logits, tokens, last, state)
    state.token.copy_(found[:, -1:])
    new = found % state.seen.shape[1]  # NOT_FINITE, -1, marks the last one
    state.seen.scatter_(1, new, True)
    state.position.add_(taken)
    numbers = torch.cat((taken, state.position, found), dim=1)
    result[: numbers.numel()].copy_(numbers.flatten())


def verify_greedy(
    logits: Tensor, tokens: Tensor, last: Tensor, state: StepState
) -> tuple[Tensor, Tensor]:
    """Return how many tokens each row gets [B, 1], and tokens int64 [B, N + 1].

    These are the accepted drafts and the model's own next token, which the places after it repeat.
    It is NOT_FINITE if its logits are. logits fp32 [B, N + 1, V] after each of `tokens` [B, N + 1].
    """
    B, T, _ = logits.shape
    rows, controls, seen = rows_of_tokens(logits, tokens, state)
    own = sample(rows, controls, seen, None).view(B, T)
    good = (own[:, :-1] == tokens[:, 1:]) & has_draft(last, T)
    count = good.long().cumprod(dim=1).sum(dim=1, keepdim=True)
    return pack_result(tokens, last, count, own.gather(1, count))


def verify_sampled(
    logits: Tensor,
    tokens: Tensor,
    last: Tensor,
    q: Tensor | None,
    state: StepState,
    candidates: int,
) -> tuple[Tensor, Tensor]:
    """`verify_greedy` for sampling. Drafts were drawn from q fp32 [B, N, V] (None: certain).

    Draft d is accepted with probability min(1, p(d) / q(d)); after the first refusal, the token is
    drawn from max(p - q, 0), normalized. Together that is a draw from p (Leviathan et al. 2023,
    algorithm 1 and appendix A.1). Two passes never begin at the same position, so their random
    numbers differ. A row without drafts gets the token of a plain step.
    """
    (B, T, _), keys, drafts = logits.shape, (state.seeds, state.position), tokens[:, 1:]
    chances = uniform(*keys, torch.arange(T - 1, device=drafts.device), ACCEPT_STREAM)
    rows, controls, seen = rows_of_tokens(logits, tokens, state)
    ranked = rank_candidates(rows, controls, seen, candidates)
    found, weights, finite = (part.view(B, T, -1) for part in ranked)
    p, is_draft = weights / weights.sum(dim=-1, keepdim=True), found[:, :-1] == drafts.unsqueeze(2)
    p_draft = torch.where(is_draft, p[:, :-1], 0.0).sum(dim=-1)
    # NOT_FINITE is no index. A draft that is NOT_FINITE is refused, since no token equals it.
    q_draft = 1.0 if q is None else q.gather(2, drafts.clamp(min=0).unsqueeze(2)).squeeze(2)
    exists = has_draft(last, T)
    good = (chances * q_draft < p_draft) & finite[:, :-1, 0] & exists
    q_found = is_draft.float() if q is None else q.gather(2, found[:, :-1])
    left = (p[:, :-1] - q_found).clamp(min=0.0)
    left = torch.where(exists.unsqueeze(2), left, weights[:, :-1])
    weights = torch.cat((left, weights[:, -1:]), dim=1)
    count = good.long().cumprod(dim=1).sum(dim=1, keepdim=True)
    among, weight, is_finite = (take_place(part, count) for part in (found, weights, finite))
    own = among.gather(1, argmax(weight / exponential(*keys, among)))
    return pack_result(tokens, last, count, torch.where(is_finite, own, NOT_FINITE))


def has_draft(last: Tensor, tokens: int) -> Tensor:
    """Return after which of a pass's tokens, but the last one, a draft follows: bool [B, N]."""
    return torch.arange(tokens - 1, device=last.device) < last.unsqueeze(1)


def take_place(values: Tensor, place: Tensor) -> Tensor:
    """values [B, T, K], place int64 [B, 1] -> the values [B, K] at each row's place."""
    return values.gather(1, place.unsqueeze(2).expand(-1, -1, values.shape[2])).squeeze(1)


def rows_of_tokens(logits: Tensor, tokens: Tensor, state: StepState) -> tuple[Tensor, ...]:
    """Return logits, controls and `seen` of each token of a pass as a row of its own, [B T, ...].

    A token's row has also seen the pass's tokens up to it. logits [B, T, V], tokens int64 [B, T].
    """
    T = tokens.shape[1]
    places = torch.arange(T, device=logits.device)
    is_before = places < places.unsqueeze(1)  # [T, T]
    new = torch.where(is_before, tokens.unsqueeze(1), tokens.unsqueeze(2)).clamp(min=0)
    seen = state.seen.unsqueeze(1).expand(-1, T, -1).scatter(2, new, True)
    controls = state.controls.unsqueeze(1).expand(-1, T, -1)
    return logits.flatten(0, 1), controls.flatten(0, 1), seen.flatten(0, 1)


def pack_result(tokens: Tensor, last: Tensor, count: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return count + 1 [B, 1], and the first `count` of drafts and `own` [B, 1] repeated.

    The number is 0 for an idle row.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    drafts = torch.cat((tokens[:, 1:], own), dim=1)
    taken = torch.where(last.unsqueeze(1) < 0, 0, count + 1)
    return taken, torch.where(places < count, drafts, own)
