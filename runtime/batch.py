"""Sequences that decode together: each may start while others run, and end before them.

A `Batch` runs on the rows of a session. A step covers the running sequences, which are kept in the
first rows, padded by idle rows to a size that is compiled. A sequence that has ended leaves its
tokens in its row, until a new one needs the row: so the rows are also the prefix cache of the
latest conversations. runtime/drafting_batch.py drafts for up to four sequences.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from runtime.logit_edits import ALL, Constraint
from runtime.sampling import NOT_FINITE, NotFiniteError, Sampling
from runtime.session import Session
from runtime.session_prompts import (
    LONGEST_WAIT,
    PREPARED_CHUNKS,
    brief_chunk,
    capture_next,
    common_prefix,
)
from runtime.session_steps import Details

STEP_SIZES = (1, 2, 4, 8)  # rows of a compiled step; above that, multiples of the last
# Tokens of a prompt that run at once while other sequences decode. Those step after every
# STEP_EVERY layers of the prompt: about every 10 ms with a 30B model on an H200.
SHARED_CHUNK, STEP_EVERY = 1024, 4
# The longest prompt, in tokens, that runs in decode steps, one token a step: steps are compiled,
# other sequences decode in them, and prompts that arrive together run together.
STEPPED_PROMPT = 8
# Greedy, and sampled from the likeliest tokens: each is another step (`Sampling.candidates`). One
# that samples from all tokens is made when a sequence needs it: Inductor compiles it for each size.
WAYS = Sampling(0.0), Sampling(1.0)


def step_sizes(max_batch: int) -> list[int]:
    """Return the sizes of compiled steps for up to `max_batch` sequences."""
    largest = STEP_SIZES[-1]
    sizes = [*STEP_SIZES, *range(2 * largest, max_batch + largest, largest)]
    return sorted({min(size, max_batch) for size in sizes})


@dataclass(eq=False)
class Running:
    """A sequence of a batch, from `start` to `end`."""

    ids: list[int]  # the prompt's
    tokens_left: int  # that no step has computed yet
    sampling: Sampling
    watch: bool = False  # report each token's Details
    constraint: Constraint | None = None
    drafts: bool = True  # tokens may be drafted, if the batch drafts
    row: int | None = None  # None: it waits for a row, or has ended
    cached_tokens: int = 0  # prompt tokens found in a row
    drafted: int = 0  # tokens drafted for it
    accepted: int = 0  # of these

    @property
    def edited(self) -> bool:
        return self.constraint is not None or self.sampling.edits_logits


class NewToken(NamedTuple):
    """A sequence's next token, or the error that has ended it."""

    sequence: Running
    token: int
    details: Details | None
    error: ValueError | None = None


class Launched(NamedTuple):
    """Tokens on their way to the host: the sequences by row, and the function that waits."""

    sequences: dict[int, Running]
    read: Callable[[], list[int]]


class Batch:
    """Up to `max_batch` sequences on a session's rows; the session may have more rows."""

    def __init__(self, session: Session, max_batch: int | None = None):
        self.session, self.max_batch = session, max_batch or session.batch
        # Eager steps need no padding.
        sizes = step_sizes if session.compiled else (lambda largest: range(1, largest + 1))
        self.sizes = list(sizes(self.max_batch))
        words = session.edits.allowed.shape
        self.masks = torch.full(words, ALL, dtype=torch.int32, pin_memory=session.captured)
        session.before_edit = self.write_masks
        self.overlaps = session.captured
        # Captures one graph that makes answers faster; returns whether others are left. A server
        # calls this while it has nothing to do.
        self.prepare_next: Callable[[], bool] = partial(capture_next, session)
        self.left: list[deque] = [session.left]  # what it has still to capture
        self.last_used, self.clock = [0] * session.batch, 0  # `clock` when a row's sequence began
        self.forget()

    def forget(self) -> None:
        """Drop all sequences."""
        self.waiting: deque[Running] = deque()
        self.prefilling: tuple[Running, Iterator[None]] | None = None
        self.rows: list[Running | None] = [None] * self.session.batch
        self.in_flight: list[Launched] = []
        self.arrived: list[NewToken] = []

    @property
    def count(self) -> int:
        """The number of sequences that have not ended."""
        return len(self.waiting) + sum(1 for sequence in self.rows if sequence)

    def prepare(self) -> None:
        """Do what takes long once: compile and capture all steps, import and compile for prompts.

        There is a step for each size and each of WAYS, watched or not, edited or not.
        """
        session = self.session
        if session.compiled:  # first, since kernels of steps and prompts compile side by side
            session.warm_up(session.candidates(WAYS[0]), self.sizes[0])
        self.prepare_prompts()
        if session.batch > 1:  # compiles what moves rows; there is nothing to move
            session.swap_rows(0, 1)
            session.copy_row(0, 1, 0)
        if not session.compiled:
            return
        for size in self.sizes:
            for session.watch in (False, True):
                for session.edited in (False, True):
                    for sampling in WAYS:
                        session.warm_up(session.candidates(sampling), size)
        session.watch = session.edited = False
        length = min(STEPPED_PROMPT + 1, session.max_seq_len - 1)
        for n, sampling in enumerate((*WAYS, Sampling(0.0, frequency_penalty=1.0))):
            # The token after a longer prompt is chosen by code of its own.
            self.start([n] * length, 1, sampling)
            while self.count:
                self.prefill()
                for token in self.step():
                    self.end(token.sequence)
        session.reset()

    def prepare_prompts(self) -> None:
        """Run two chunks of each size, the second over a cache in use; then forget them.

        They run as beside other sequences; for those that run alone see `prepare_next`. One
        sequence at a time keeps nobody waiting: then there is nothing to prepare.
        """
        session = self.session
        if self.max_batch == 1:
            return
        longest, session.between_layers = session.prefill_chunk, self.every_layers(lambda: None)
        for chunk in sorted({*PREPARED_CHUNKS, longest}) if session.captured else (8,):
            length = min(2 * chunk, session.max_seq_len)
            if length > chunk and chunk <= longest:
                for _ in session.prefill(0, [0] * length, 0, chunk):
                    pass
        session.between_layers = None
        session.reset()

    def start(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        watch: bool = False,
        constraint: Constraint | None = None,
        drafts: bool = True,
    ) -> Running:
        """Add a sequence, whose tokens come from `step`. Raises ValueError as `check_prompts`.

        Sequences above `max_batch` wait for others to end. constraint: the grammar to follow.
        drafts: tokens may be drafted, if the batch drafts. A seed's text then depends on the clock.
        """
        self.session.check_prompts([ids], max_new_tokens)
        sequence = Running(list(ids), max_new_tokens, sampling, watch, constraint, drafts)
        self.waiting.append(sequence)
        return sequence

    def end(self, sequence: Running) -> None:
        """End a sequence. Its row keeps the tokens, for a prompt that begins with them."""
        if sequence.row is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        if self.prefilling and self.prefilling[0] is sequence:
            self.prefilling = None
        self.session.stop_row(sequence.row)
        self.rows[sequence.row] = None
        sequence.row = None

    def step(self) -> list[NewToken]:
        """Run one token of each sequence that is not `prefilling`; return tokens that arrived.

        On a GPU this returns the tokens of the step before; those of this step are in flight.
        """
        launched = self.launch()
        self.receive()
        if launched:
            self.in_flight.append(launched)
        if not self.overlaps:
            self.receive()
        arrived, self.arrived = self.arrived, []
        return arrived

    # Prompts ------------------------------------------------------------------------------------

    def prefill(self, step: Callable[[], None] = lambda: None) -> None:
        """Run waiting prompts until SHARED_CHUNK tokens are done, or graphs that take long.

        step: calls `step`. It is called between layers of a prompt that no graph runs, so that the
        other sequences do not wait for all of them.
        """
        session, budget, waited = self.session, SHARED_CHUNK, 0.0
        while budget > 0 and waited < LONGEST_WAIT and (self.prefilling or self.admit()):
            if not self.prefilling:
                continue
            sequence, chunks = self.prefilling
            row: int = sequence.row
            done, session.watch = session.cached[row], sequence.watch
            alone = all(other in (None, sequence) for other in self.rows)
            session.between_layers = None if alone else self.every_layers(step)
            session.replayed = 0.0  # a short chunk leaves it
            is_done = next(chunks, self) is self
            if sequence.row is None:  # a step has failed, and ended all sequences
                session.reset(row)
                return
            budget -= session.cached[row] - done
            waited += session.replayed
            if is_done:
                self.prefilling = None
                self.in_flight.append(self.expect_tokens({row: sequence}, session.first_tokens))

    def every_layers(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return what to call after each layer of a prompt; it calls `step` at every STEP_EVERY."""
        session, layers = self.session, itertools.count(1)

        def after_layer() -> None:
            if next(layers) % STEP_EVERY == 0:
                kept = session.watch, session.edited  # the prompt's
                step()
                session.watch, session.edited = kept

        return after_layer

    def admit(self) -> bool:
        """Give the next waiting sequence a row, and begin its prompt. False if none can run.

        Afterwards it is `prefilling`, unless decode steps run its prompt.
        """
        if not may_admit(self):
            return False
        others = sum(1 for other in self.rows if other)
        session, sequence = self.session, self.waiting.popleft()
        self.prefilling = sequence, iter(())
        row = sequence.row = self.take_row(sequence.ids)
        self.rows[row] = sequence
        chunk = session.prefill_chunk
        session.watch, session.edited = sequence.watch, sequence.edited
        if others:
            chunk = min(chunk, SHARED_CHUNK)
            new = len(sequence.ids) - common_prefix(session.ids[row], sequence.ids)
            if new > STEPPED_PROMPT and (brief := brief_chunk(session, len(sequence.ids))):
                chunk = min(chunk, brief)
                self.swap(0, row)
                row = 0
        chunks = session.start_row(row, sequence.ids, sequence.sampling, chunk)
        if sequence.constraint:
            sequence.constraint.mask(self.masks[row])
            session.edits.allowed[row] = self.masks[row].to(session.device)
        sequence.cached_tokens = session.cached[row]
        left = len(sequence.ids) - session.cached[row]
        # One sequence alone, as with offloading, reads each expert once for all of its prompt. If
        # no other runs, a short prompt may have a graph, which is faster than its steps.
        stepped = left <= STEPPED_PROMPT and not sequence.edited and self.max_batch > 1
        if others == 0 and not self.waiting and session.is_short(row, left):
            stepped = False
        self.prefilling = None if stepped else (sequence, chunks)
        return True

    def take_row(self, ids: Sequence[int]) -> int:
        """Return the first idle row, with the longest prefix of these tokens that any row has.

        A prompt that goes on with a conversation takes its row. Any other takes the row that was
        not used for longest, and copies the tokens that it shares, such as a system prompt.
        """
        session, known = self.session, self.session.cached
        idle = [row for row, sequence in enumerate(self.rows) if sequence is None]
        shared = [
            min(common_prefix(own, ids), cached)
            for own, cached in zip(session.ids, known, strict=True)
        ]
        best = max(range(session.batch), key=lambda row: (shared[row], row in idle))
        goes_on = best in idle and 2 * shared[best] >= known[best]
        row = best if goes_on else min(idle, key=lambda row: self.last_used[row])
        first, length = idle[0], shared[best]
        if row == best and length:
            self.swap(first, row)
        else:
            self.move(first, row)
            if best != first and length:
                session.copy_row(best, first, length)
        self.clock += 1
        self.last_used[first] = self.clock
        return first

    def move(self, source: int, target: int) -> None:
        """Let an idle row remember the tokens of another, instead of its own."""
        if source != target:
            self.session.copy_row(source, target, self.session.cached[source])
            self.session.stop_row(target)
            self.last_used[target] = self.last_used[source]

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        if a != b:
            self.session.swap_rows(a, b)
            for rows in (self.rows, self.last_used):
                rows[a], rows[b] = rows[b], rows[a]
            for row in (a, b):
                if sequence := self.rows[row]:
                    sequence.row = row

    # Steps --------------------------------------------------------------------------------------

    def launch(self) -> Launched | None:
        """Start a step of all sequences that are not `prefilling`, if there are any.

        Return the sequences whose next token it computes: the others are in their prompts.
        """
        self.compact()
        busy = self.prefilling and self.prefilling[0]
        decoding = {
            row: sequence
            for row, sequence in enumerate(self.rows)
            if sequence and sequence is not busy and sequence.tokens_left
        }
        if not decoding:
            return None
        session = self.session
        size = next(size for size in self.sizes if size > max(decoding))
        candidates = max(session.candidates(sequence.sampling) for sequence in decoding.values())
        session.watch = any(sequence.watch for sequence in decoding.values())
        session.edited = any(sequence.edited for sequence in decoding.values())
        step = session.warm_up(candidates, size)
        for row, sequence in decoding.items():
            if session.cached[row] < len(sequence.ids):
                session.set_prompt_token(row, sequence.ids, sequence.sampling)
        step()
        for row, sequence in decoding.items():
            session.cached[row] += 1
            if session.cached[row] == len(sequence.ids):
                session.snapshots.take(row, session.cached[row])
        done = {n: s for n, s in decoding.items() if session.cached[n] >= len(s.ids)}
        return self.expect_tokens(done, session.read_tokens()) if done else None

    def compact(self) -> None:
        """Move sequences to lower rows, so that a step is no larger than it has to be.

        A prompt in progress cannot move.
        """
        busy = self.prefilling and self.prefilling[0]
        idle = deque(row for row, sequence in enumerate(self.rows) if sequence is None)
        for row in reversed(range(self.session.batch)):
            if idle and idle[0] < row and self.rows[row] and self.rows[row] is not busy:
                self.swap(idle.popleft(), row)

    def expect_tokens(
        self, sequences: dict[int, Running], read: Callable[[], list[int]]
    ) -> Launched:
        """Return how to read the rows' newest tokens. read: waits for those of all rows."""
        launched = Launched(sequences, read)
        for row, sequence in sequences.items():
            sequence.tokens_left -= 1
            if not sequence.tokens_left:
                self.session.stop_row(row)
        return launched

    def receive(self) -> None:
        """Wait for the tokens in flight; keep those of sequences that have not ended meanwhile."""
        in_flight, self.in_flight = self.in_flight, []
        for launched in in_flight:
            tokens = launched.read()
            for row, sequence in launched.sequences.items():
                if sequence.row is not None:
                    details = self.session.details[row] if sequence.watch else None
                    error = self.take_token(sequence, tokens[row])
                    self.arrived.append(NewToken(sequence, tokens[row], details, error))

    def take_token(self, sequence: Running, token: int) -> ValueError | None:
        """Add a token to its sequence; return the error if that ends it."""
        if token == NOT_FINITE:
            row = sequence.row
            self.end(sequence)
            self.session.reset(row)
            return NotFiniteError()
        self.session.ids[sequence.row].append(token)
        try:
            if sequence.constraint:
                sequence.constraint.advance(token)
        except ValueError as error:
            self.end(sequence)
            return error
        return None

    def write_masks(self) -> None:
        """Copy to the device which tokens each row's grammar allows next."""
        constrained = [sequence for sequence in self.rows if sequence and sequence.constraint]
        if not constrained:
            return
        self.receive()  # a grammar needs the tokens so far
        self.masks.fill_(ALL)
        for sequence in constrained:
            if sequence.row is not None:
                try:
                    sequence.constraint.mask(self.masks[sequence.row])
                except ValueError as error:
                    self.end(sequence)
                    self.arrived.append(NewToken(sequence, NOT_FINITE, None, error))
        self.session.edits.allowed.copy_(self.masks, non_blocking=True)


def may_admit(batch: Batch) -> bool:
    """Return whether a sequence waits for a row, and may have one."""
    return bool(batch.waiting) and sum(1 for row in batch.rows if row) < batch.max_batch
