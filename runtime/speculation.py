"""Speculative decoding for one sequence: draft several tokens cheaply, verify them in one pass.

The output is the model's own: the same tokens if greedy (in fp32; elsewhere rounding may decide a
near-tie otherwise), tokens of the same distribution if sampled: runtime/verification.py. Drafts are
proposed by runtime/drafters.py.

A pass runs the last token and its N drafts. Then every layer's sequence state accepts the tokens
that were verified: a KV cache masks the others until it overwrites them, a recurrent state drops
them.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from model import Chunk, ModelArgs, Transformer
from runtime.draft_control import DraftControl, FixedDrafts
from runtime.drafters import MIN_PROBABILITY, Drafter, DraftModel, FirstOf, LookupDrafter
from runtime.sampling import NOT_FINITE, NotFiniteError, Sampling
from runtime.session import Session
from runtime.session_steps import SPARE
from runtime.transfers import read_later
from runtime.verification import verify_greedy, verify_sampled

DRAFT_TOKENS = 4
MAX_DRAFT_TOKENS = SPARE - 1  # every session's cache has SPARE positions past its last token


def check_drafting(draft_tokens: int, args: ModelArgs, draft: ModelArgs | None) -> None:
    """Raise ValueError for a number of drafts out of range or a draft model with other tokens."""
    if not 1 <= draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"--draft_tokens {draft_tokens}: it must be from 1 to {MAX_DRAFT_TOKENS}")
    if draft is not None and draft.vocab_size != args.vocab_size:
        raise ValueError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens and the model one of "
            f"{args.vocab_size}: give --draft_checkpoint_path a model with the same tokenizer"
        )


def make_drafter(session: Session, count: int, draft: Transformer | None, auto: bool) -> Drafter:
    """Return what drafts up to `count` tokens for a session: `Speculation` has the arguments."""
    if draft is None:
        return LookupDrafter(session, count)
    if not auto:
        return DraftModel(draft, session, count)
    return FirstOf(
        LookupDrafter(session, count), DraftModel(draft, session, count, MIN_PROBABILITY)
    )


class Speculation:
    """A session for one sequence whose `stream` takes fewer passes. All else is the session's own.

    draft_tokens: most drafts of a pass. draft: the model that drafts; None looks drafts up in the
    text so far. auto: a controller chooses the number of drafts, 0 included, and lookups of long
    matches come before the draft model's; else each pass has draft_tokens if there are drafts.
    Four counts describe the last stream: passes of the model after the prompt, and the tokens
    drafted, accepted and delivered in them. Raises ValueError for a session of several sequences,
    and as `check_drafting`.
    """

    def __init__(
        self,
        session: Session,
        draft_tokens: int = DRAFT_TOKENS,
        draft: Transformer | None = None,
        auto: bool = False,
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
        self.session, self.count, self.auto = session, draft_tokens, auto
        self.control = DraftControl(draft_tokens) if auto else FixedDrafts(draft_tokens)
        self.drafter = make_drafter(session, draft_tokens, draft, auto)
        self.verify_greedy, self.verify_sampled = verify_greedy, verify_sampled
        if session.compiled:
            self.verify_greedy = torch.compile(verify_greedy, fullgraph=True, dynamic=False)
            self.verify_sampled = torch.compile(verify_sampled, fullgraph=True, dynamic=False)
        device = session.device
        self.offsets = torch.arange(draft_tokens + 1, device=device)
        self.results = [
            torch.zeros(n + 2, dtype=torch.int64, device=device) for n in range(draft_tokens + 1)
        ]
        self.steps: dict[tuple[int, int], Callable[[], None]] = {}
        # If a step needs the host, the next one would delay its token.
        self.overlaps = session.captured and not session.runner.needs_host
        self.in_flight: Callable[[], list[int]] | None = None  # waits for the token of a plain step
        self.read_at = 0.0  # when the last tokens were read
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

    def verify(self, candidates: int, count: int) -> None:
        """One step: run the last token and `count` drafts at `position`, write `results`."""
        session, drafts, q = self.session, self.drafter.drafts[:, :count], self.drafter.q
        if session.compiled:
            span = session.position + self.offsets[: count + 1]
        else:  # read the part of the cache in use, as `Session.decode` does
            span = Chunk(session.rows, session.cached[0] + count + 1)
        tokens = torch.cat((session.token, drafts), dim=1)
        last = torch.where(session.last < 0, session.last, count)
        runner = session.runner
        logits = session.model(tokens, span, last, all_positions=True, runner=runner)[0]
        if candidates:
            q = None if q is None else q[:count]
            result = self.verify_sampled(logits, drafts, q, session.state, candidates)
        else:
            result = self.verify_greedy(logits, drafts, session.state)
        self.results[count].copy_(result)
        result = self.results[count]
        for layer in session.states:
            layer.accept(result[-1:])
        session.token.copy_(result[-2])
        session.seen.index_fill_(1, result[:-1], True)  # unlike scatter_, it takes a -1
        session.position.add_(result[-1])

    def warm_up(self, candidates: int, count: int | None = None) -> Callable[[], None]:
        """Return the step that verifies `count` drafts (None: the most), compiled and captured."""
        key = candidates, count or self.count
        if key not in self.steps:
            ahead = key[1] + 1
            self.steps[key] = self.session.capture(lambda: self.verify(*key), ahead, ahead)
        return self.steps[key]

    def stream_all(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling
    ) -> Iterator[list[int]]:
        """`Session.stream_all`, for one prompt."""
        (ids,) = prompts
        return ([token] for token in self.stream(ids, max_new_tokens, sampling))

    def is_plain(self, sampling: Sampling) -> bool:
        """Whether an automatic speculation leaves an answer to plain steps.

        Verification edits no logits and reports no details. A seed promises the same text at each
        run, and drafts take other random numbers; when they are made depends on the clock.
        """
        seeded = sampling.seed is not None and sampling.temperature > 0
        return self.auto and (sampling.edits_logits or self.session.watch or seeded)

    def stream(self, ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
        """`Session.stream`: several tokens come at once where drafts were accepted."""
        session = self.session
        self.passes = self.drafted = self.accepted = self.delivered = 0
        session.check_prompts([ids], max_new_tokens)
        if self.is_plain(sampling):
            for place, token in enumerate(session.stream(ids, max_new_tokens, sampling)):
                self.passes = self.delivered = place
                yield token
            return
        if sampling.edits_logits:
            raise ValueError("speculation knows no penalties and biases of tokens: leave them out")
        if max_new_tokens == 0:
            return
        candidates, session.edited = session.candidates(sampling), False
        session.warm_up(candidates)
        for count in range(1, self.count + 1) if self.auto else [self.count]:
            self.warm_up(candidates, count)
        self.drafter.start_prompt(ids, sampling)
        session.start_prompts([ids], sampling)
        tokens, left, self.in_flight = session.first_tokens(), max_new_tokens, None
        self.read_at = time.perf_counter()
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
            tokens = self.run_pass(candidates, left)

    def run_pass(self, candidates: int, left: int) -> list[int]:
        """Draft and verify, or take a plain step; return the new tokens. left: those to come.

        While plain steps follow each other, the next one is in flight when a token is read. So
        drafts may begin one token late, and looking for them costs no time.
        """
        source = self.drafter.source()
        asked = self.control.choose(source)
        self.passes += 1
        if self.in_flight or not asked:
            tokens = self.take_step(candidates, goes_on=not asked and left > 1)
            source, asked = None, 0
        elif count := self.drafter.propose(asked):
            self.warm_up(candidates, count)()
            *tokens, found = read_later(self.results[count])()
            tokens = tokens[:found]
            self.session.cached[0] += found
            self.drafted += count
        else:
            tokens, asked = self.take_step(candidates, goes_on=False), 0
        now = time.perf_counter()
        self.control.record(source, asked, len(tokens) - 1, now - self.read_at)
        self.read_at = now
        return tokens

    def take_step(self, candidates: int, goes_on: bool) -> list[int]:
        """Return the token of a plain step: of that in flight, if any. goes_on: launch another."""
        read = self.in_flight or self.launch(candidates)
        self.in_flight = self.launch(candidates) if goes_on and self.overlaps else None
        return read()

    def launch(self, candidates: int) -> Callable[[], list[int]]:
        """Launch a plain step; return what waits for its token."""
        self.session.warm_up(candidates)()
        self.session.cached[0] += 1
        return self.session.read_tokens()
