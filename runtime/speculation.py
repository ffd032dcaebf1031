"""Speculative decoding: draft several tokens cheaply, verify them in one pass.

The output is the model's own: the same tokens if greedy (in fp32; elsewhere rounding may decide a
near-tie otherwise), tokens of the same distribution if sampled: runtime/verification.py. Drafts are
proposed by runtime/drafters.py.

A pass runs the last token and its N drafts. The next one begins at the position after the tokens
that were accepted. A KV cache masks the others until it overwrites them; a recurrent state takes in
those before that position (runtime/sequence_state.py).

Up to four sequences may share a pass. It is as wide as the one with most drafts: the others' tokens
after their own drafts are padding.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from model import Chunk, ModelArgs, Transformer
from ops.compile_ahead import collect
from ops.gpu import gpu_of
from ops.inductor import without_tuning
from ops.step.draft_check import NO_DRAFT
from runtime.compile_ahead import compile_later
from runtime.draft_control import DraftControl, FixedDrafts, Outcome
from runtime.drafters import MIN_PROBABILITY, Drafter, DraftModel, FirstOf, LookupDrafter
from runtime.fused_decode import FusedRunner, launch_pass
from runtime.mtp import MIN_OF_HEAD, MTPDrafter
from runtime.pass_captures import PassCaptures
from runtime.sampling import NOT_FINITE, NotFiniteError, Sampling
from runtime.sequence_state import Settling
from runtime.session import Session
from runtime.session_prompts import runner_ahead
from runtime.session_steps import SPARE
from runtime.transfers import Upload, read_later

DRAFT_TOKENS = 4
MAX_DRAFT_TOKENS = SPARE - 1  # every session's cache has SPARE positions past its last token
# Recurrent states take in a pass's tokens beside a chain, by this number of kernels for each of its
# drafts. Each kernel has a part of the layers, so that the chain's own find free multiprocessors.
BESIDE_DRAFT = 5
SHARED_TOKENS = 8  # most tokens of a pass of several sequences, padding included


def check_drafting(draft_tokens: int, args: ModelArgs, draft: ModelArgs | None) -> None:
    """Raise ValueError for a number of drafts out of range or a draft model with other tokens."""
    if not 1 <= draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"--draft_tokens {draft_tokens}: it must be from 1 to {MAX_DRAFT_TOKENS}")
    if draft is not None and draft.vocab_size != args.vocab_size:
        raise ValueError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens and the model one of "
            f"{args.vocab_size}: give --draft_checkpoint_path a model with the same tokenizer"
        )


def with_lookups(session: Session, count: int, drafter: Drafter | None, auto: bool) -> Drafter:
    """Return what drafts up to `count` tokens for a session: lookups, `drafter`, or both."""
    if drafter and not auto:
        return drafter
    lookup = LookupDrafter(session, count)
    return FirstOf(lookup, drafter) if drafter else lookup


class PassTokens(NamedTuple):
    """What a pass gave one sequence."""

    tokens: list[int]  # accepted drafts, and the model's own token
    drafted: int
    cached: int  # tokens by which the cache has grown since the pass was launched


class Begun(NamedTuple):
    """A pass that is in flight, or a plain step that is next."""

    read: Callable[[], list[PassTokens]]  # waits for what each row gets
    outcomes: Callable[[list[PassTokens]], list[Outcome]]
    is_pass: bool


class Speculation:
    """A session whose `stream` runs one sequence in fewer passes. All else is the session's own.

    The sequence is that of row 0. runtime/drafting_batch.py runs passes of the first rows.

    draft_tokens: most drafts of a pass. draft: a model that drafts; head: a head that does
    (`load_head`). Without either, drafts are looked up in the text so far. auto: a controller
    chooses the number of drafts, 0 included, and lookups of long matches come before others; else
    each pass has draft_tokens, if there are drafts. draft_ids: ids from which a model or head
    drafts, rising (`Tokenizer.frequent_ids`); empty: all.

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
        self.control = DraftControl(draft_tokens) if auto else FixedDrafts(draft_tokens)
        size = MAX_DRAFT_TOKENS + 3  # numbers of the widest pass of one sequence, or of several
        self.result = session.shared_integers(size)
        by_model: Drafter | None = None
        self.head_drafter: MTPDrafter | None = None
        if head is not None:
            rest = self.result, MIN_OF_HEAD if auto else 0.0, draft_ids
            self.head_drafter = by_model = MTPDrafter(head, session, draft_tokens, *rest)
        elif draft is not None:
            least = MIN_PROBABILITY if auto else 0.0
            by_model = DraftModel(draft, session, draft_tokens, least, draft_ids)
        self.drafter = with_lookups(session, draft_tokens, by_model, auto)  # row 0's
        if self.drafter.q is not None:  # greedy drafts have none
            session.joins_greedy = False
        # The lookup of each row.
        self.lookups = [LookupDrafter(session, draft_tokens, n) for n in range(session.batch)]
        if isinstance(self.drafter, LookupDrafter):
            self.lookups[0] = self.drafter
        # Several rows' drafts, in one tensor, so that one copy sends them.
        rows = min(session.batch, SHARED_TOKENS // 2)
        self.drafts = session.shared_integers(rows, draft_tokens)
        self.upload = Upload(self.drafts)
        self.begin_pass, self.verify_pass = session.runner.pass_steps()
        # The end of the pass launched last. The host waits for it before it writes the next drafts.
        self.ended = torch.cuda.Event() if session.runner.chooses_by_kernels else None
        self.follows = self.ended is not None  # a head's next chain runs behind a pass at once
        self.side = torch.cuda.Stream(session.device) if self.ended and self.head_drafter else None
        self.settling = Settling(session.model)
        self.settles: dict[tuple[int, int], Callable[[], None]] = {}  # captured, by rows and parts
        self.steps: dict[tuple[int, int, int], Callable[[], None]] = {}
        self.captures = PassCaptures(session, self.counts, self.warm_up, self.steps)
        self.sizes: Sequence[int] = (1,)  # rows that passes may have
        session.launch_more = partial(launch_passes, self)
        self.overlaps = session.captured
        self.in_flight: Callable[[], list[int]] | None = None  # waits for the token of a plain step
        self.begun: Begun | None = None
        self.read_at = 0.0  # when the last tokens were read
        self.passes = self.drafted = self.accepted = self.delivered = 0

    def __getattr__(self, name: str):
        return getattr(self.session, name)

    def reset(self) -> None:
        """Forget the sequence."""
        self.session.reset()
        self.begun = None
        self.drafter.reset()
        for lookup in self.lookups:
            lookup.reset()

    def drafter_of(self, row: int) -> Drafter:
        """Return what drafts for a row."""
        return self.lookups[row] if row else self.drafter

    def exchange(self, a: int, b: int) -> None:
        """Exchange what is known of the texts of two rows, as the session exchanged its rows."""
        self.lookups[a].exchange(self.lookups[b])
        self.control.exchange(a, b)

    def counts(self, rows: int) -> range:
        """Return the numbers of drafts that a pass of the first rows may have; empty: no pass."""
        most = self.count if rows == 1 else min(self.count, SHARED_TOKENS // rows - 1)
        return range(1 if self.auto else max(1, most), most + 1)

    def statistics(self) -> dict:
        """Return passes, drafted, accepted and tokens_per_pass (or None) of the last stream."""
        counts = {name: getattr(self, name) for name in ("passes", "drafted", "accepted")}
        return counts | {"tokens_per_pass": self.delivered / self.passes if self.passes else None}

    def verify(self, rows: int, count: int, candidates: int) -> None:
        """One pass: run the first rows' last tokens and `count` drafts each, write `result`."""
        session, drafter, one = self.session, self.drafter, rows == 1
        state, _ = session.first_rows(rows)
        tokens, positions, last = self.begin_pass(state, drafts_of(self, rows, count))
        # Eager code reads the part of the cache in use, as `Session.decode` does.
        as_chunk = one and not session.compiled
        span = Chunk(session.rows[:1], session.cached[0] + count + 1) if as_chunk else positions
        runner = session.runner
        logits = session.model(tokens, span, last, all_positions=True, runner=runner)
        q = drafter.q[None, :count] if one and drafter.q is not None else None
        self.verify_pass(state, logits, tokens, last, q, candidates, self.result)

    def warm_up(self, count: int, candidates: int, rows: int = 1) -> Callable[[], None]:
        """Return a pass of `count` drafts, compiled and on CUDA captured on the first call.

        Kernels of ours do nearly all of a pass. The rest is compiled without a search for tilings,
        which would take longer than most answers.
        """
        key = rows, count, candidates
        if key not in self.steps:
            session, tokens = self.session, rows * (count + 1)
            make = partial(session.capture, partial(self.verify, *key), tokens, count + 1)
            with without_tuning() if session.compiled else nullcontext():
                self.steps[key] = make()
                beside = BESIDE_DRAFT * count if self.side and rows == 1 else 1
                for parts in {1, beside} if self.ended and self.settling.settle else ():
                    if (rows, parts) not in self.settles:
                        settle = partial(self.settling, session.first_rows(rows)[0], parts)
                        made = session.capture_within(None, settle, rows, 1)
                        self.settles[rows, parts] = made
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
        """`Session.stream`: where drafts are accepted, several tokens come at once."""
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
        self.captures.prepare(candidates)
        self.drafter.start_prompt(ids, sampling)
        number = session.start_prompts([ids], sampling)
        self.in_flight = self.begun = None
        tokens, left, end = session.first_tokens()[:1], max_new_tokens, len(session.ids[0])
        self.read_at = time.perf_counter()
        try:
            while True:
                new = tokens[:left]
                left -= len(new)
                if NOT_FINITE in new:
                    del new[new.index(NOT_FINITE) :]
                    left = -1
                session.check_newest(number)
                session.ids[0] += new
                if self.overlaps and left > 0:  # the reader handles these tokens meanwhile
                    self.begin_rows(candidates, [left])
                for place, token in enumerate(new):
                    session.check_newest(number)
                    self.accepted += place < len(tokens) - 1
                    self.delivered += self.passes > 0
                    end += 1
                    yield token
                if left < 0:
                    self.reset()  # the cache has NaNs
                    raise NotFiniteError
                if not left:
                    return
                session.check_newest(number)
                tokens = self.run_pass(candidates, left)
        finally:
            if number == session.streams:
                del session.ids[0][end:]  # the reader has left within a pass

    def run_pass(self, candidates: int, left: int) -> list[int]:
        """Return the new tokens of row 0, of the pass in flight or of a new one.

        left: how many tokens the row may still have.
        """
        if not self.begun:
            self.begin_rows(candidates, [left])
        (found,) = self.finish_rows()
        self.session.cached[0] += found.cached
        return found.tokens

    def finish_rows(self) -> list[PassTokens]:
        """Return what each row gets of the pass, or the plain step, that `begin_rows` began.

        The caller adds `cached` to the lengths of rows whose sequences have not ended meanwhile.
        """
        begun, self.begun = self.begun, None
        found, now = begun.read(), time.perf_counter()
        self.passes += 1
        self.control.record(begun.outcomes(found), now - self.read_at)
        self.read_at = now
        return found

    def begin_rows(
        self, candidates: int, left: Sequence[int], drafts: Sequence[bool] = (), size: int = 0
    ) -> None:
        """Draft and launch a pass, or a plain step, for the first rows.

        left: how many tokens each row may still have. drafts: whether a row may have drafts; empty:
        all may. size: the rows of the step, idle ones included; 0: no row is idle.

        While plain steps follow each other, the next one is in flight when a token is read. So
        drafts may begin one token late, but looking for them costs no time.
        """
        rows, size = range(len(left)), size or len(left)
        may_draft = drafts or [True] * len(left)
        sources = [self.drafter_of(n).source() if may_draft[n] else None for n in rows]
        most = self.captures.most_ready(size, candidates)
        asked = self.control.choose(sources if most else [None for _ in rows], most)
        counts = [0 for _ in rows]
        if any(asked) and not self.in_flight:
            if self.ended:
                self.ended.synchronize()
            counts = self.propose(asked, size)
        if any(counts):
            self.warm_up(max(counts), candidates, size)()
            run_behind_pass(self, size)
            self.begun = Begun(
                lambda: self.read_pass(counts),
                lambda found: [
                    Outcome(source if count else None, count, len(new.tokens) - 1)
                    for source, count, new in zip(sources, asked, found, strict=True)
                ],
                True,
            )
            return
        tried = [None if self.in_flight or not asked[n] else sources[n] for n in rows]
        waited = self.overlaps and not self.in_flight
        goes_on = not any(asked) and min(left) > 1
        self.in_flight = self.in_flight or self.launch(candidates, len(left), size)
        self.begun = Begun(
            lambda: self.take_step(candidates, len(left), size, goes_on),
            lambda found: [Outcome(source, waited=waited) for source in tried],
            False,
        )

    def propose(self, asked: Sequence[int], size: int) -> list[int]:
        """Write up to `asked` drafts for each of the first rows; return how many.

        size: the rows of the pass; those after the first have none.
        """
        if size == 1:
            return [self.drafter.propose(asked[0])]
        found = [lookup.find(n) for lookup, n in zip(self.lookups, asked, strict=False)]
        if any(found):
            rows = [*found, *[[]] * (size - len(found))]
            padded = [[*drafts, *[NO_DRAFT] * (self.count - len(drafts))] for drafts in rows]
            self.upload([token for drafts in padded for token in drafts])
        return [len(drafts) for drafts in found]

    def read_pass(self, counts: Sequence[int]) -> list[PassTokens]:
        """Wait for the pass that was launched; return what each of the first rows gets.

        counts: its drafts of each row.
        """
        if self.ended:
            self.ended.synchronize()
        numbers = self.result.tolist() if self.ended else read_later(self.result)()
        width, found = max(counts) + 3, []
        for row, drafted in enumerate(counts):
            taken, _, *tokens = numbers[row * width : (row + 1) * width]
            found.append(PassTokens(tokens[:taken], drafted, taken))
        self.drafted += sum(counts)
        return found

    def take_step(self, candidates: int, rows: int, size: int, goes_on: bool) -> list[PassTokens]:
        """Return each row's token of the plain step in flight. goes_on: first launch another."""
        read = self.release()
        if goes_on and self.overlaps:
            self.in_flight = self.launch(candidates, rows, size)
        return [PassTokens([token], 0, 0) for token in read()[:rows]]

    def release(self) -> Callable[[], list[int]] | None:
        """Return what waits for the token of the plain step in flight, if any, and forget it."""
        read, self.in_flight = self.in_flight, None
        return read

    def launch(self, candidates: int, rows: int, size: int) -> Callable[[], list[int]]:
        """Launch a plain step of the first `size` rows; return what waits for its tokens.

        rows: those that have sequences.
        """
        self.session.warm_up(candidates, size)()
        for row in range(rows):
            self.session.cached[row] += 1
        return self.session.read_tokens()


def run_behind_pass(speculation: Speculation, size: int) -> None:
    """Launch what may run behind a pass of `size` rows while the host reads its tokens.

    Recurrent states are large, and a chain of a head has small kernels: both run side by side.
    """
    head = speculation.head_drafter if speculation.follows else None
    if head and not head.repeats:
        head = None
    ended, side = speculation.ended, speculation.side
    if ended:
        stream = torch.cuda.current_stream(speculation.session.device)
        ended.record(stream)
        place = side if head else stream
        if settle := speculation.settles.get((size, BESIDE_DRAFT * head.asked if head else 1)):
            place.wait_stream(stream)
            with torch.cuda.stream(place):
                settle()
    if head:
        head.follow()
    if side:
        stream.wait_stream(side)


def drafts_of(speculation: Speculation, rows: int, count: int) -> Tensor:
    """Return where a pass of the first rows has `count` drafts of each, [rows, count]."""
    drafts = speculation.drafter.drafts if rows == 1 else speculation.drafts[:rows]
    return drafts[:, :count]


def passes_are_quick(session: Session) -> bool:
    """Whether passes of lookups delay no start: they are eager, or captured in 0.2 s each."""
    return session.captures_fast or not session.compiled


def capture_between_answers(speculation: Speculation) -> None:
    """Capture passes between answers from now on, if they are automatic and each takes 0.2 s.

    Their kernels are compiled then, too. Other passes are captured before the answer: a head has
    chains to capture, too, Inductor takes longer for a draft model, and a fixed number of drafts is
    due from the first token on.
    """
    session, captures = speculation.session, speculation.captures
    is_lookup = isinstance(speculation.drafter, LookupDrafter)
    captures.waits = speculation.auto and is_lookup and session.captures_fast
    if captures.waits:
        session.launch_more = lambda runner: None  # not before the first step
        captures.compile = partial(compile_passes, speculation)


def compile_passes(speculation: Speculation) -> Callable[[], bool]:
    """Compile the kernels of all passes in the background; `compile_later` has the result."""
    runner = runner_ahead(speculation.session)
    if runner is None:
        return lambda: True
    tasks = collect(lambda: launch_passes(speculation, runner))
    return compile_later(tasks, gpu_of(speculation.session.device))


def launch_passes(speculation: Speculation, runner: FusedRunner) -> None:
    """Launch the kernels of all passes, over nothing: `Prompts.launch_more`.

    A lookup may find fewer drafts than a pass may have.
    """
    session, q = speculation.session, speculation.drafter.q
    for rows in speculation.sizes:
        state, _ = session.first_rows(rows)
        speculation.settling(state)
        for count in range(1, speculation.counts(rows).stop):
            drafts = drafts_of(speculation, rows, count)
            for given in (None,) if rows > 1 or q is None else (None, q[None, :count]):
                greedy = given is None and not session.joins_greedy
                for reach in runner.reaches(count + 1, session.cache_len):
                    launch_pass(runner, state, drafts, given, speculation.result, reach, greedy)
    if speculation.head_drafter:
        speculation.head_drafter.launch_chain()
