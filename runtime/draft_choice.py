"""The choice of a draft: a token from a drafter's logits, with its distribution."""

from typing import NamedTuple

import torch
from torch import Tensor

from ops.plain.topk import argmax
from ops.step.token_draw import Drafts
from runtime.draft_vocab import spread_logits
from runtime.sampling import (
    NOT_FINITE,
    StepState,
    exponential,
    penalize,
    rank_candidates,
    sample,
    step_to,
)

DRAFT_STREAM = 1  # of random numbers; see `runtime.verification.ACCEPT_STREAM`


class VocabularyPart(NamedTuple):
    """The part of the vocabulary that a drafter has logits of."""

    ids: Tensor  # int64 [N], rising
    rows: Tensor  # int64 [V], of `draft_vocab.rows_of_ids`


def choose_draft(
    state: StepState,
    logits: Tensor,
    drafts: Drafts,
    part: VocabularyPart | None,
    candidates: int,
    certain: bool,
) -> None:
    """Choose a token, step to it as a session does, and write it to `drafts`.

    logits fp32 [1, N], of the part's tokens (None: of all). candidates: sample among as many, and
    write the distribution; 0: greedy. certain: write the largest probability of a greedy draft,
    too. It is not that of the draft: if drafts were dropped for which tokens they are, the others
    would be too frequent, and the text would have another distribution. The kernels of
    ops/step/token_draw.py choose the same drafts.
    """
    if part is not None:
        logits = spread_logits(logits, part.rows)
    q = draw_with_probabilities(state, logits, candidates) if candidates else None
    if q is None:
        if certain:
            penalized = penalize(logits, state.seen, state.controls[:, 4:])
            drafts.certainty.index_copy_(0, drafts.place, penalized.softmax(dim=-1).amax(dim=1))
        step_to(state, sample(logits, state.controls, state.seen, None))
    else:
        drafts.q.index_copy_(0, drafts.place, q)
        drafts.certainty.index_copy_(0, drafts.place, q.amax(dim=1))
    drafts.token.index_copy_(1, drafts.place, state.token)
    drafts.place.add_(1).remainder_(drafts.token.shape[1])


def draw_with_probabilities(state: StepState, logits: Tensor, count: int) -> Tensor:
    """Sample and step as a session does; return the probability of each token, fp32 [1, V].

    If the logits are not finite, all are 0, so that verification draws from the model's own.
    """
    tokens, weights, finite = rank_candidates(logits, state.controls, state.seen, count)
    probabilities = torch.where(finite, weights / weights.sum(dim=-1, keepdim=True), 0.0)
    q = torch.zeros_like(logits).scatter(1, tokens, probabilities)
    noise = exponential(state.seeds, state.position, tokens, DRAFT_STREAM)
    chosen = tokens.gather(1, argmax(weights / noise))
    step_to(state, torch.where(finite, chosen, NOT_FINITE))
    return q
