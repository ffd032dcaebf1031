"""Speculative decoding for one sequence: draft several tokens cheaply, verify them in one pass.

The output is the model's own: the same tokens if greedy (in fp32; elsewhere rounding may decide a
near-tie otherwise), tokens of the same distribution if sampled. Drafts come from the text so far
(prompt lookup, Saxena 2023) or from a smaller model (Leviathan et al. 2023; Chen et al. 2023).

A pass runs the last token and its N drafts. Then every layer's sequence state accepts the tokens
that were verified: a KV cache masks the others until it overwrites them, a recurrent state drops
them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from model import Chunk, ModelArgs, Transformer
from ops.plain.topk import argmax
from runtime.runner import CompiledRunner
from runtime.sampling import (
    NOT_FINITE,
    NotFiniteError,
    Sampling,
    StepState,
    exponential,
    rank_candidates,
    sample,
    step_to,
    uniform,
)
from runtime.session import Session
from runtime.session_rows import copy_all
from runtime.session_steps import SPARE
from runtime.transfers import read_later

DRAFT_TOKENS = 4
MAX_DRAFT_TOKENS = SPARE - 1  # every session's cache has SPARE positions past its last token
NGRAM = 3  # longest run of last tokens that is looked up
# Streams of random numbers beside that of plain steps: if a draft and its verification shared one,
# the output would have another distribution.
DRAFT_STREAM, ACCEPT_STREAM = 1, 2


def check_drafting(draft_tokens: int, args: ModelArgs, draft: ModelArgs | None) -> None:
    """Raise ValueError for a number of drafts out of range or a draft model with other tokens."""
    if not 1 <= draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"--draft_tokens {draft_tokens}: it must be from 1 to {MAX_DRAFT_TOKENS}")
    if draft is not None and draft.vocab_size != args.vocab_size:
        raise ValueError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens and the model one of "
            f"{args.vocab_size}: give --draft_checkpoint_path a model with the same tokenizer"
        )


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


# Drafters -----------------------------------------------------------------------------------------


class LookupDrafter:
    """Drafts what followed the last tokens at their latest earlier occurrence in the text."""

    q = None  # a draft is certain

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

    def propose(self) -> bool:
        """Write drafts for the target's text to `drafts`; False if there are none."""
        self.extend(self.target.ids[0][len(self.ids) :])
        if drafts := self.find():
            self.drafts.copy_(torch.tensor([drafts]))
        return bool(drafts)


class DraftModel(Session):
    """Drafts by a smaller model, sampled as the target's tokens are, with noise of its own."""

    def __init__(self, model: Transformer, target: Session, count: int):
        options = replace(target.options, runner_class=CompiledRunner, sample_rule=sample)
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

    def propose(self) -> bool:
        """Write drafts for the target's text to `drafts` and `q`."""
        self.ids[0], known = self.target.ids[0], self.target.cached[0]
        kept = self.snapshots.go_back(0, known)
        if kept < known:  # a recurrent state is back at a snapshot
            for _ in self.prefill(0, self.ids[0][kept:known], kept):
                pass
        copy_all(self.target.state, self.state)
        self.place.zero_()
        for n in range(self.chosen.shape[1]):
            self.cached[0] = known + n
            self.step()
        self.cached[0] = known + 1  # the rest may be refused
        return True


# Verification -------------------------------------------------------------------------------------


class Speculation:
    """A session for one sequence whose `stream` takes fewer passes. All else is the session's own.

    draft_tokens: N. draft: the model that drafts; None looks drafts up in the text so far. Four
    counts describe the last stream: passes of the model after the prompt, and the tokens drafted,
    accepted and delivered in them. Raises ValueError for a session of several sequences, and as
    `check_drafting`.
    """

    def __init__(
        self,
        session: Session,
        draft_tokens: int = DRAFT_TOKENS,
        draft: Transformer | None = None,
    ):
        check_drafting(draft_tokens, session.model.args, draft and draft.args)
        if session.batch != 1:
            raise ValueError(
                f"speculation is for one sequence, not {session.batch}: make a session with batch 1"
            )
        if draft is session.model:
            raise ValueError(
                "a model cannot draft for itself, since it holds one cache: load it twice"
            )
        self.session, self.count = session, draft_tokens
        self.drafter = LookupDrafter(session, draft_tokens)
        if draft is not None:
            self.drafter = DraftModel(draft, session, draft_tokens)
        self.verify_greedy, self.verify_sampled = verify_greedy, verify_sampled
        if session.compiled:
            self.verify_greedy = torch.compile(verify_greedy, fullgraph=True, dynamic=False)
            self.verify_sampled = torch.compile(verify_sampled, fullgraph=True, dynamic=False)
        device = session.device
        self.offsets = torch.arange(draft_tokens + 1, device=device)
        self.result = torch.zeros(draft_tokens + 2, dtype=torch.int64, device=device)
        self.steps: dict[int, Callable[[], None]] = {}
        self.passes = self.drafted = self.accepted = self.delivered = 0

    def __getattr__(self, name: str):
        return getattr(self.session, name)

    def reset(self) -> None:
        """Forget the sequence."""
        self.session.reset()
        self.drafter.reset()

    def statistics(self) -> dict:
        """Return passes, drafted, accepted and tokens_per_pass (or None) of the last stream."""
        counts = {name: getattr(self, name) for name in ("passes", "drafted", "accepted")}
        return counts | {"tokens_per_pass": self.delivered / self.passes if self.passes else None}

    def verify(self, candidates: int) -> None:
        """One step: run the last token and its drafts at `position`, write `result`."""
        session, drafts = self.session, self.drafter.drafts
        if session.compiled:
            span = session.position + self.offsets
        else:  # read the part of the cache in use, as `Session.decode` does
            span = Chunk(session.rows, session.cached[0] + self.count + 1)
        tokens = torch.cat((session.token, drafts), dim=1)
        last = torch.where(session.last < 0, session.last, self.count)
        runner = session.runner
        logits = session.model(tokens, span, last, all_positions=True, runner=runner)[0]
        if candidates:
            result = self.verify_sampled(logits, drafts, self.drafter.q, session.state, candidates)
        else:
            result = self.verify_greedy(logits, drafts, session.state)
        self.result.copy_(result)
        for layer in session.states:
            layer.accept(self.result[-1:])
        session.token.copy_(self.result[-2])
        session.seen.index_fill_(1, self.result[:-1], True)  # unlike scatter_, it takes a -1
        session.position.add_(self.result[-1])

    def warm_up(self, candidates: int) -> Callable[[], None]:
        """Return the verifying step, compiled and on CUDA captured on the first call."""

        def step() -> None:
            self.verify(candidates)

        if candidates not in self.steps:
            self.steps[candidates] = self.session.capture(step, self.count + 1, self.count + 1)
        return self.steps[candidates]

    def stream_all(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling
    ) -> Iterator[list[int]]:
        """`Session.stream_all`, for one prompt."""
        (ids,) = prompts
        return ([token] for token in self.stream(ids, max_new_tokens, sampling))

    def stream(self, ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
        """`Session.stream`: several tokens come at once where drafts were accepted."""
        session = self.session
        self.passes = self.drafted = self.accepted = self.delivered = 0
        session.check_prompts([ids], max_new_tokens)
        if sampling.edits_logits:
            raise ValueError("speculation knows no penalties and biases of tokens: leave them out")
        if max_new_tokens == 0:
            return
        candidates = session.candidates(sampling)
        verify = self.warm_up(candidates)
        # A draft model always drafts; a lookup may find nothing, and then a plain step follows.
        decode = None if isinstance(self.drafter, DraftModel) else session.warm_up(candidates)
        self.drafter.start_prompt(ids, sampling)
        session.start_prompts([ids], sampling)
        tokens, left = session.first_tokens(), max_new_tokens
        while True:
            for place, token in enumerate(tokens[:left]):
                if token == NOT_FINITE:
                    self.reset()  # the cache has NaNs
                    raise NotFiniteError
                session.ids[0].append(token)
                self.accepted += place < len(tokens) - 1
                self.delivered += self.passes > 0
                yield token
            left -= len(tokens)
            if left <= 0:
                return
            tokens = self.run_pass(verify, decode)
            session.cached[0] += len(tokens)

    def run_pass(self, verify: Callable[[], None], decode: Callable[[], None] | None) -> list[int]:
        """Draft and verify, or decode one token if nothing was drafted; return the new tokens."""
        self.passes += 1
        if not self.drafter.propose():
            decode()
            return read_later(self.session.token)()
        verify()
        *tokens, count = read_later(self.result)()
        self.drafted += self.count
        return tokens[:count]
