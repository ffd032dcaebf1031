"""A pass apart from the model: which drafts it accepts, and the model's own token after them.

Greedy: drafts are accepted while they equal the model's own tokens. Sampled: with the chances of
Leviathan et al. 2023, so that tokens have the model's own distribution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.plain.topk import argmax
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
    """Return a pass's tokens and positions [1, N + 1], and the index of its last real token [1].

    state: of one sequence. drafts int64 [1, N].
    """
    N = drafts.shape[1]
    tokens = torch.cat((state.token, drafts), dim=1)
    positions = state.position + torch.arange(N + 1, device=drafts.device)
    return tokens, positions, torch.where(state.last < 0, state.last, N)


def verify_pass(
    state: StepState,
    logits: Tensor,
    tokens: Tensor,
    q: Tensor | None,
    candidates: int,
    result: Tensor,
) -> None:
    """Accept drafts and step behind them; write `pack_result` to the first N + 2 of `result`.

    tokens int64 [1, N + 1]: as of `begin_pass`. logits, q: as of `verify_sampled`. candidates: as
    of `Sampling.candidates`.
    """
    drafts = tokens[:, 1:]
    if candidates:
        found = verify_sampled(logits, drafts, q, state, candidates)
    else:
        found = verify_greedy(logits, drafts, state)
    result[: len(found)].copy_(found)
    state.token.copy_(found[-2])
    state.seen.index_fill_(1, found[:-1], True)  # unlike scatter_, it takes a -1
    state.position.add_(found[-1])


def verify_greedy(logits: Tensor, drafts: Tensor, state: StepState) -> Tensor:
    """Return the accepted drafts, the model's own next token, and their number: int64 [N + 2].

    logits fp32 [N + 1, V] after the state's token and after each of `drafts` [1, N]. Places after
    the model's own token repeat it. It is NOT_FINITE if its logits are.
    """
    seen = seen_by_row(state.token, drafts, state.seen)
    tokens = sample(logits, state.controls, seen, None)
    good = tokens[: drafts.shape[1]] == drafts.T
    count = good.flatten().long().cumprod(dim=0).sum().view(1)
    return pack_result(drafts, count, tokens.index_select(0, count))


def verify_sampled(
    logits: Tensor, drafts: Tensor, q: Tensor | None, state: StepState, candidates: int
) -> Tensor:
    """`verify_greedy` for sampling. Drafts were drawn from q fp32 [N, V] (None: they were certain).

    Draft d is accepted with probability min(1, p(d) / q(d)); after the first refusal, the token is
    drawn from max(p - q, 0), normalized. Together that is a draw from p (Leviathan et al. 2023,
    algorithm 1 and appendix A.1). Two passes never begin at the same position, so their random
    numbers differ.
    """
    N, keys = drafts.shape[1], (state.seeds, state.position)
    chances = uniform(*keys, torch.arange(N, device=drafts.device), ACCEPT_STREAM).T
    seen = seen_by_row(state.token, drafts, state.seen)
    tokens, weights, finite = rank_candidates(logits, state.controls, seen, candidates)
    p, is_draft = weights / weights.sum(dim=-1, keepdim=True), tokens[:N] == drafts.T
    p_draft = torch.where(is_draft, p[:N], 0.0).sum(dim=-1, keepdim=True)
    # NOT_FINITE is no index. A draft that is NOT_FINITE is refused, since no token equals it.
    q_draft = 1.0 if q is None else q.gather(1, drafts.T.clamp(min=0))
    good = (chances * q_draft < p_draft) & finite[:N]
    q_tokens = is_draft.float() if q is None else q.gather(1, tokens[:N])
    left = (p[:N] - q_tokens).clamp(min=0.0)
    p = torch.cat((left, p[N:]))
    count = good.flatten().long().cumprod(dim=0).sum().view(1)
    own = tokens.index_select(0, count)
    own = own.gather(1, argmax(p.index_select(0, count) / exponential(*keys, own)))
    own = torch.where(finite.index_select(0, count), own, NOT_FINITE)
    return pack_result(drafts, count, own)


def seen_by_row(token: Tensor, drafts: Tensor, seen: Tensor) -> Tensor:
    """Return bool [N + 1, V]: row i has also seen `token` and the first i drafts."""
    N = drafts.shape[1]
    places = torch.arange(N + 1, device=seen.device)
    new = torch.where(places[:N] < places.unsqueeze(1), drafts, token).clamp(min=0)
    return seen.expand(N + 1, -1).scatter(1, new, True)


def pack_result(drafts: Tensor, count: Tensor, own: Tensor) -> Tensor:
    """Return the first count [1] of drafts, `own` [1, 1] repeated, and count + 1: int64 [N + 2]."""
    places = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    tokens = torch.where(places < count, F.pad(drafts[0], (0, 1)), own[0])
    return torch.cat((tokens, count + 1))
