"""Speculative decoding for one sequence: draft several tokens cheaply, verify them in one pass.

The output is the model's own: the same tokens if greedy (in fp32; elsewhere rounding may decide a
near-tie otherwise), tokens of the same distribution if sampled: runtime/verification.py. Drafts are
proposed by runtime/drafters.py.

A pass runs the last token and its N drafts. The next one begins at the position after the tokens
that were accepted. A KV cache masks the others until it overwrites them; a recurrent state takes in
those before that position (runtime/sequence_state.py).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from model import Chunk, ModelArgs, Transformer
from ops.inductor import without_tuning
from runtime.draft_control import DraftControl, FixedDrafts
from runtime.drafters import MIN_PROBABILITY, Drafter, DraftModel, FirstOf, LookupDrafter
from runtime.mtp import MTPDrafter
from runtime.outbox import Outbox
from runtime.sampling import NOT_FINITE, NotFiniteError, Sampling
from runtime.session import Session
from runtime.session_steps import SPARE
from runtime.transfers import read_later

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


def make_drafter(
    session: Session,
    count: int,
    draft: Transformer | None,
    head: Transformer | None,
    auto: bool,
    ids: Sequence[int],
) -> Drafter:
    """Return what drafts up to `count` tokens for a session: `Speculation` has the arguments."""
    drafter: Drafter
    if head is not None:
        drafter = MTPDrafter(head, session, count, ids)
    elif draft is not None:
        drafter = DraftModel(draft, session, count, MIN_PROBABILITY if auto else 0.0, ids)
    else:
        return LookupDrafter(session, count)
    return FirstOf(LookupDrafter(session, count), drafter) if auto else drafter


class Speculation:
    """A session whose `stream` takes fewer passes, for one sequence. All else is the session's own.

    The sequence is that of row 0. runtime/drafting_batch.py runs passes of it, too.

    draft_tokens: most drafts of a pass. draft: the model that drafts; head: the head that does
    (`load_head`). Without them drafts are looked up in the text so far. auto: a controller chooses
    the number of drafts, 0 included, and lookups of long matches come before others; else each pass
    has draft_tokens if there are drafts. draft_ids: those that a model or head chooses
    among, rising (`Tokenizer.frequent_ids`); empty: all.
    Four counts describe the last stream: passes of the model after the prompt, and the tokens
    drafted, accepted and delivered in them. Raises ValueError for a model or a head that drafts for
    a session of several sequences, and as `check_drafting`.
    """

    def __init__(
        self,
        session: Session,
        draft_tokens: int = DRAFT_TOKENS,
        draft: Transformer | None = None,
        head: Transformer | None = None,
        auto: bool = False,
        draft_ids: Sequence[int] = (),
    ):
        check_drafting(draft_tokens, session.model.args, draft and draft.args)
        if session.batch != 1 and (draft or head):
            raise ValueError(
                f"a model or a head drafts for one sequence, not {session.batch}: make a session "
                "with batch 1"
            )
        if draft is session.model:
            raise ValueError(
                "a model cannot draft for itself, since it holds one cache: load it twice"
            )
        self.session, self.count, self.auto = session, draft_tokens, auto
        # Numbers of drafts that a pass may have.
        self.counts = range(1 if auto else draft_tokens, draft_tokens + 1)
        self.control = DraftControl(draft_tokens) if auto else FixedDrafts(draft_tokens)
        self.drafter = make_drafter(session, draft_tokens, draft, head, auto, draft_ids)
        self.begin_pass, self.verify_pass = session.runner.pass_steps()
        size = MAX_DRAFT_TOKENS + 2
        self.result = torch.zeros(size, dtype=torch.int64, device=session.device)
        self.results = Outbox(size, session.device) if session.outbox else None
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

    def verify(self, count: int, candidates: int) -> None:
        """One pass: run the last token and `count` drafts at `position`, write `result`."""
        session, drafter = self.session, self.drafter
        state, _ = session.first_rows(1)
        tokens, positions, last = self.begin_pass(state, drafter.drafts[:, :count])
        # Eager code reads the part of the cache in use, as `Session.decode` does.
        chunk = Chunk(session.rows[:1], session.cached[0] + count + 1)
        span = positions if session.compiled else chunk
        runner = session.runner
        logits = session.model(tokens, span, last, all_positions=True, runner=runner)[0]
        q = drafter.q if drafter.q is None else drafter.q[:count]
        self.verify_pass(state, logits, tokens, q, candidates, self.result)
        if self.results:
            self.results.post(self.result.unsqueeze(1))

    def warm_up(self, count: int, candidates: int) -> Callable[[], None]:
        """Return a pass of `count` drafts, compiled and on CUDA captured on the first call.

        Kernels of ours do nearly all of a pass. The rest is compiled without a search for tilings,
        which would take longer than most answers.
        """
        key = count, candidates
        if key not in self.steps:
            session = self.session
            make = partial(session.capture, partial(self.verify, *key), count + 1, count + 1)
            with without_tuning() if session.compiled else nullcontext():
                self.steps[key] = self.results.counted(make) if self.results else make()
        return self.steps[key]

    def warm_up_all(self, candidates: int) -> None:
        """Compile and capture the plain step, and the pass of each number of drafts."""
        self.session.warm_up(candidates, 1)
        for count in self.counts:
            self.warm_up(count, candidates)

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
        self.warm_up_all(candidates)
        self.drafter.start_prompt(ids, sampling)
        session.start_prompts([ids], sampling)
        tokens, left, self.in_flight = session.first_tokens()[:1], max_new_tokens, None
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
            self.warm_up(count, candidates)()
            tokens = (self.results.read_later() if self.results else read_later(self.result))()
            tokens = tokens[: tokens[count + 1]]
            self.session.cached[0] += len(tokens)
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
        return read()[:1]

    def release(self) -> Callable[[], list[int]] | None:
        """Return what waits for the token of the plain step in flight, if any, and forget it."""
        read, self.in_flight = self.in_flight, None
        return read

    def launch(self, candidates: int) -> Callable[[], list[int]]:
        """Launch a plain step; return what waits for its token."""
        self.session.warm_up(candidates, 1)()
        self.session.cached[0] += 1
        return self.session.read_tokens()
