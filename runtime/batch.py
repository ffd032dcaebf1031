"""Sequences that decode together: each may start while others run, and end before them.

A `Batch` runs on the rows of a session. A step covers the running sequences, which are kept in the
first rows, padded by idle rows to a size that is compiled. A sequence that has ended leaves its
tokens in its row, until a new one needs the row: so the rows are also the prefix cache of the
latest conversations.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.sampling import NOT_FINITE, Sampling
from runtime.session import Details, Session, common_prefix

STEP_SIZES = (1, 2, 4, 8)  # rows of a compiled step; above that, multiples of the last
# Prompt tokens between two steps of the running sequences: on an H200 about 10 ms of a 30B model.
SHARED_CHUNK = 512


def step_sizes(max_batch: int) -> list[int]:
    """Return the sizes of steps for up to `max_batch` sequences."""
    largest = STEP_SIZES[-1]
    sizes = [*STEP_SIZES, *range(2 * largest, max_batch + largest, largest)]
    return sorted({min(size, max_batch) for size in sizes})


@dataclass(eq=False)
class Running:
    """A sequence of a batch, from `start` to `end`."""

    ids: list[int]  # of the prompt
    tokens_left: int  # that no step has computed yet
    sampling: Sampling
    watch: bool  # report each token's Details
    row: int | None = None  # None: no row yet, or none any more
    cached_tokens: int = 0  # of the prompt, found in a row


class NewToken(NamedTuple):
    """A sequence's next token; NOT_FINITE if its logits are not finite, which ends it."""

    sequence: Running
    token: int
    details: Details | None


class Launched(NamedTuple):
    """Tokens on their way to the host: the sequences by row, and the function that waits."""

    sequences: dict[int, Running]
    read: Callable[[], list[int]]
    watch: bool


class Batch:
    """Up to `max_batch` sequences on a session's rows, of which there may be more."""

    def __init__(self, session: Session, max_batch: int | None = None):
        self.session, self.max_batch = session, max_batch or session.batch
        self.sizes = step_sizes(self.max_batch)
        self.waiting: deque[Running] = deque()
        self.prefilling: tuple[Running, Iterator[None]] | None = None
        self.rows: list[Running | None] = [None] * session.batch
        self.last_used = [0] * session.batch  # `clock` when a row's sequence began
        self.clock = 0
        self.launched: list[Launched] = []
        # If a step needs the host, the next one would delay the tokens of this one.
        self.overlaps = session.captured and not session.runner.needs_host

    @property
    def count(self) -> int:
        """The number of sequences that have not ended."""
        return len(self.waiting) + sum(1 for sequence in self.rows if sequence)

    def prepare(self) -> None:
        """Compile and capture the usual steps: greedy or sampled, with and without Details."""
        for size in self.sizes:
            for watch in (False, True):
                for temperature in (0.0, 1.0):
                    self.session.watch = watch
                    self.session.warm_up(self.session.candidates(Sampling(temperature)), size)
        self.session.watch = False

    def start(
        self, ids: Sequence[int], max_new_tokens: int, sampling: Sampling, watch: bool = False
    ) -> Running:
        """Add a sequence, whose tokens come from `step`. Raises ValueError as `check_prompts`.

        Sequences above `max_batch` wait for others to end.
        """
        self.session.check_prompts([ids], max_new_tokens)
        sequence = Running(list(ids), max_new_tokens, sampling, watch)
        self.waiting.append(sequence)
        return sequence

    def end(self, sequence: Running) -> None:
        """End a sequence. Its row keeps the tokens, for a prompt that begins with them."""
        if sequence.row is None:
            self.waiting.remove(sequence)
            return
        if self.prefilling and self.prefilling[0] is sequence:
            self.prefilling = None
        self.session.stop_row(sequence.row)
        self.rows[sequence.row] = sequence.row = None

    def step(self) -> list[NewToken]:
        """Prefill waiting prompts, decode one token of each sequence, return tokens that arrived.

        On a GPU the tokens of this step are still in flight; those of the step before are returned.
        """
        self.prefill()
        arrived, self.launched = self.launched, []
        self.launch()
        if not self.overlaps:
            arrived, self.launched = arrived + self.launched, []
        return [token for launched in arrived for token in self.collect(launched)]

    # Prompts ------------------------------------------------------------------------------------

    def prefill(self) -> None:
        """Run prompts until SHARED_CHUNK tokens are done."""
        session, budget = self.session, SHARED_CHUNK
        while budget > 0 and (self.prefilling or self.admit()):
            sequence, chunks = self.prefilling
            done, session.watch = session.cached[sequence.row], sequence.watch
            if next(chunks, self) is self:
                self.prefilling = None
                self.expect_tokens({sequence.row: sequence})
            if sequence.row is not None:
                budget -= session.cached[sequence.row] - done

    def admit(self) -> bool:
        """Give the next waiting sequence a row, and begin its prompt. False if none can run."""
        others = sum(1 for other in self.rows if other)
        if not self.waiting or others == self.max_batch:
            return False
        session, sequence = self.session, self.waiting.popleft()
        row = sequence.row = self.take_row(sequence.ids)
        chunk = session.options.prefill_chunk
        chunk = min(chunk, SHARED_CHUNK) if others else chunk
        chunks = session.start_row(row, sequence.ids, sequence.sampling, chunk)
        sequence.cached_tokens = session.cached[row]
        self.rows[row], self.prefilling = sequence, (sequence, chunks)
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
        self.swap(first, row)
        source = {first: row, row: first}.get(best, best)
        if source != first and length:
            session.copy_row(source, first, length)
        self.clock += 1
        self.last_used[first] = self.clock
        return first

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        if a != b:
            self.session.swap_rows(a, b)
            for rows in (self.rows, self.last_used):
                rows[a], rows[b] = rows[b], rows[a]
            for row in (a, b):
                if self.rows[row]:
                    self.rows[row].row = row

    # Steps --------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start a step of all sequences whose prompt is done, if there are any."""
        self.compact()
        busy = self.prefilling and self.prefilling[0]
        decoding = {
            row: sequence
            for row, sequence in enumerate(self.rows)
            if sequence and sequence is not busy and sequence.tokens_left
        }
        if not decoding:
            return
        session = self.session
        size = next(size for size in self.sizes if size > max(decoding))
        candidates = max(session.candidates(sequence.sampling) for sequence in decoding.values())
        session.watch = any(sequence.watch for sequence in decoding.values())
        session.warm_up(candidates, size)()
        for row in decoding:
            session.cached[row] += 1
        self.expect_tokens(decoding)

    def compact(self) -> None:
        """Move sequences to lower rows, so that a step is no larger than it has to be.

        A prompt in progress cannot move.
        """
        busy = self.prefilling and self.prefilling[0]
        for row in reversed(range(self.session.batch)):
            free = next((n for n, other in enumerate(self.rows) if other is None), row)
            if self.rows[row] and self.rows[row] is not busy and free < row:
                self.swap(free, row)

    def expect_tokens(self, sequences: dict[int, Running]) -> None:
        """Start to copy the rows' newest tokens to the host."""
        self.launched.append(Launched(sequences, self.session.read_tokens(), self.session.watch))
        for row, sequence in sequences.items():
            sequence.tokens_left -= 1
            if not sequence.tokens_left:
                self.session.stop_row(row)

    def collect(self, launched: Launched) -> Iterator[NewToken]:
        """Wait for a step's tokens; yield those of sequences that have not ended meanwhile."""
        session, tokens = self.session, launched.read()
        for row, sequence in launched.sequences.items():
            if sequence.row is None:
                continue
            if tokens[row] == NOT_FINITE:
                last = sequence.row
                self.end(sequence)
                session.reset(last)
            else:
                session.ids[sequence.row].append(tokens[row])
            details = session.details[row] if launched.watch and sequence.watch else None
            yield NewToken(sequence, tokens[row], details)
