"""What proposes drafts: a lookup in the text so far, or a smaller model.

Prompt lookup: Saxena 2023. Draft models: Leviathan et al. 2023; Chen et al. 2023.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from model import Transformer
from ops.plain.topk import argmax
from runtime.runner import CompiledRunner
from runtime.sampling import (
    NOT_FINITE,
    Sampling,
    StepState,
    exponential,
    rank_candidates,
    sample,
    step_to,
)
from runtime.session import Session
from runtime.session_rows import copy_all
from runtime.transfers import send

NGRAM = 3  # longest run of last tokens that is looked up
DRAFT_STREAM = 1  # of random numbers; see `runtime.verification.ACCEPT_STREAM`


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


class LookupDrafter:
    """Drafts what followed the last tokens at their latest earlier occurrence in the text."""

    q = None  # a draft is certain
    on_host = True  # it may be asked for drafts while a step is in flight

    def __init__(self, target: Session, count: int):
        self.target, self.count = target, count
        self.drafts = torch.zeros(1, count, dtype=torch.int64, device=target.device)
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self.ids: list[int] = []
        self.next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it

    def start_prompt(self, ids: Sequence[int], sampling: Sampling) -> None:
        """Index a prompt; one that continues the text so far is indexed from its end."""
        if list(ids[: len(self.ids)]) != self.ids:
            self.reset()
        self.extend(ids[len(self.ids) :])

    def extend(self, ids: Sequence[int]) -> None:
        """Index more text."""
        for token in ids:
            for n in range(1, min(NGRAM, len(self.ids)) + 1):
                self.next[tuple(self.ids[-n:])] = len(self.ids)
            self.ids.append(token)

    def find(self) -> list[int]:
        """Return `count` drafts, or none. If the text ends before that, repeat what was found."""
        sizes = range(min(NGRAM, len(self.ids)), 0, -1)
        found = (self.next.get(tuple(self.ids[-n:])) for n in sizes)
        start = next((at for at in found if at is not None), None)
        if start is None:
            return []
        period = len(self.ids) - start
        return [self.ids[start + n % period] for n in range(self.count)]

    def propose(self, limit: int) -> int:
        """Write up to `limit` drafts for the target's text to `drafts`; return how many."""
        self.extend(self.target.ids[0][len(self.ids) :])
        drafts = self.find()[:limit]
        if drafts:
            # A copy that waits would wait for the step in flight.
            self.drafts[:, : len(drafts)].copy_(send(torch.tensor([drafts]), self.drafts.device))
        return len(drafts)


class DraftModel(Session):
    """Drafts by a smaller model, sampled as the target's tokens are, with noise of its own."""

    on_host = False
    runner_class: type[CompiledRunner] | None = CompiledRunner

    def __init__(self, model: Transformer, target: Session, count: int):
        options = replace(target.options, runner_class=self.runner_class, sample_rule=sample)
        super().__init__(model, target.max_seq_len, options)
        self.target = target
        self.draw = draw_with_probabilities
        if target.compiled:
            self.draw = torch.compile(self.draw, fullgraph=True, dynamic=False)
        # One step more than drafts, so that the cache holds the last draft; its token is not used.
        self.chosen = torch.zeros(1, count + 1, dtype=torch.int64, device=self.device)
        self.probabilities = torch.zeros(count + 1, model.args.vocab_size, device=self.device)
        self.drafts, self.q = self.chosen[:, :count], self.probabilities[:count]
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)

    def choose_tokens(self, state: StepState, logits: Tensor, candidates: int) -> None:
        """Choose as a session does; store the token as the next draft, with its probabilities."""
        if candidates:
            q = self.draw(state, logits, candidates)
            self.probabilities.index_copy_(0, self.place, q)
        else:
            super().choose_tokens(state, logits, 0)
        self.chosen.index_copy_(1, self.place, state.token)
        self.place.add_(1).remainder_(self.chosen.shape[1])

    def start_prompt(self, ids: Sequence[int], sampling: Sampling) -> None:
        """Prefill the prompt."""
        self.check_prompts([ids], 0)
        self.step = self.warm_up(self.candidates(sampling))
        self.start_prompts([ids], sampling)

    def propose(self, limit: int) -> int:
        """Write `limit` drafts for the target's text to `drafts` and `q`; return `limit`."""
        self.ids[0], known = self.target.ids[0], self.target.cached[0]
        kept = self.snapshots.go_back(0, known)
        if kept < known:  # a recurrent state is back at a snapshot
            for _ in self.prefill(0, self.ids[0][kept:known], kept):
                pass
        copy_all(self.target.state, self.state)
        self.place.zero_()
        for n in range(limit + 1):
            self.cached[0] = known + n
            self.step()
        self.cached[0] = known + 1  # the rest may be refused
        return limit
