"""A batch that drafts: its steps are passes of a Speculation while few sequences run.

All sequences of a pass are past their prompts, in the first rows. When another sequence begins,
plain steps of the batch follow, until its prompt has been run. Refused drafts need no undoing then:
a KV cache masks them, and a recurrent state takes in the accepted ones in the next step
(runtime/sequence_state.py).
"""

import time

from runtime.batch import WAYS, Batch, Launched, NewToken, Running, may_admit
from runtime.speculation import Speculation, capture_between_answers


class DraftingBatch(Batch):
    """A Batch on the session of a Speculation. A step may return several tokens of a sequence.

    The caller may end a sequence within these tokens; then it skips the rest of them.
    """

    def __init__(self, speculation: Speculation, max_batch: int | None = None):
        self.speculation = speculation
        super().__init__(speculation.session, max_batch)
        speculation.sizes = self.sizes
        capture_between_answers(speculation)
        prepare_prompt = self.prepare_next
        self.prepare_next = lambda: prepare_prompt() or speculation.captures.capture_next()
        self.left.append(speculation.captures.left)

    def forget(self) -> None:
        super().forget()
        self.speculation.release()
        self.speculation.begun = None
        # Of each row, the sequence whose text its drafter knows.
        self.drafted_for: list[Running | None] = [None] * self.session.batch
        self.passing: list[Running] = []  # the sequences of the last pass, by row
        self.in_passes = False  # the last step was a pass

    def prepare(self) -> None:
        super().prepare()
        if self.session.compiled:
            for size in self.sizes:
                for sampling in WAYS if self.speculation.counts(size) else ():
                    self.speculation.captures.prepare(self.session.candidates(sampling), size)

    def swap(self, a: int, b: int) -> None:
        super().swap(a, b)
        if a != b:
            self.speculation.exchange(a, b)
            known = self.drafted_for
            known[a], known[b] = known[b], known[a]

    def step(self) -> list[NewToken]:
        """`Batch.step`. On a GPU the next pass is in flight while the caller handles the tokens."""
        begun = self.speculation.begun
        if not (begun and begun.is_pass):
            sequences = self.drafting_sequences()
            is_other = self.speculation.in_flight and sequences != self.passing
            if is_other or not sequences:
                self.speculation.begun = None
                return super().step()
            if not begun:
                self.begin_pass(sequences)
        self.finish_pass()
        sequences = self.drafting_sequences()
        if self.overlaps and sequences and not (may_admit(self) or self.speculation.in_flight):
            self.begin_pass(sequences)
        arrived, self.arrived = self.arrived, []
        return arrived

    def admit(self) -> bool:
        """`Batch.admit`. In a session of one row, the drafter knows a text before its prompt runs.

        A head needs that, and drafts for one row only. Rows may move here: so a pass in flight is
        finished first, and the tokens of a plain step are expected from the rows that it had.
        """
        if not may_admit(self):
            return False
        begun, first = self.speculation.begun, self.waiting[0]
        if begun and begun.is_pass:
            self.finish_pass()
        self.speculation.begun = None
        self.expect_plain_step()
        if self.session.batch == 1 and not self.rows[0] and self.may_draft(first):
            self.begin_text(0, first.ids, first)
        return super().admit()

    def launch(self) -> Launched | None:
        """`Batch.launch`: a plain step, no pass."""
        self.in_passes = False
        self.expect_plain_step()
        return super().launch()

    def expect_plain_step(self) -> None:
        """Expect the tokens of a plain step, if passes have left one in flight."""
        read = self.speculation.release()
        running = {row: one for row, one in enumerate(self.passing) if one.row is not None}
        if read and running:
            self.in_flight.append(self.expect_tokens(running, read))

    def may_draft(self, sequence: Running) -> bool:
        """Return whether a sequence may have drafts: verification makes no edits and no details."""
        return sequence.drafts and not (sequence.watch or sequence.edited)

    def drafting_sequences(self) -> list[Running]:
        """Return the sequences whose next step may be a pass, in the order of rows.

        It may be a pass if all sequences can be in it, and one of them may have drafts. The others
        then get the token of a plain step.
        """
        sequences = [sequence for sequence in self.rows if sequence]
        if not any(sequence.drafts for sequence in sequences):
            return []
        size, candidates = self.size_of(sequences), self.candidates_of(sequences)
        if not self.speculation.captures.most_ready(size, candidates):
            return []
        for one in sequences:
            is_past_prompt = self.session.cached[one.row] >= len(one.ids)
            if one.watch or one.edited or not one.tokens_left or not is_past_prompt:
                return []
        return sequences

    def size_of(self, sequences: list[Running]) -> int:
        """Return the rows of a step of these sequences in the first rows."""
        return next(size for size in self.sizes if size >= len(sequences))

    def candidates_of(self, sequences: list[Running]) -> int:
        """Return the candidates of a step of these sequences."""
        return max(self.session.candidates(sequence.sampling) for sequence in sequences)

    def begin_text(self, row: int, ids: list[int], sequence: Running) -> None:
        """Let the row's drafter draft for this sequence from now on; ids: its text so far."""
        self.speculation.drafter_of(row).start_prompt(ids, sequence.sampling)
        self.drafted_for[row] = sequence

    def begin_pass(self, sequences: list[Running]) -> None:
        """Launch a pass with drafts, or a plain step, of all sequences."""
        session, speculation, count = self.session, self.speculation, len(sequences)
        self.receive()  # drafts follow the newest tokens
        if any(sequence.row is None for sequence in sequences):  # its token was an error
            return
        self.compact()  # passes are those of the first rows
        session.watch = session.edited = False
        before, sequences = self.passing, [each for each in self.rows[:count] if each]
        self.passing = sequences
        for row, sequence in enumerate(sequences):
            if sequence.drafts and self.drafted_for[row] is not sequence:
                self.begin_text(row, session.ids[row], sequence)
        if not self.in_passes or sequences != before:  # a prompt has run meanwhile, or nothing has
            speculation.read_at, self.in_passes = time.perf_counter(), True
        left = [sequence.tokens_left for sequence in sequences]
        drafts = [sequence.drafts for sequence in sequences]
        candidates, size = self.candidates_of(sequences), self.size_of(sequences)
        speculation.begin_rows(candidates, left, drafts, size)

    def finish_pass(self) -> None:
        """Wait for the pass that was begun, if any; keep the tokens of those that still run."""
        if not any(sequence.row is not None for sequence in self.passing):
            self.speculation.begun = None  # a server may have been idle since
        if not self.speculation.begun:
            return
        found = self.speculation.finish_rows()
        for sequence, (tokens, drafted, cached) in zip(self.passing, found, strict=True):
            if sequence.row is None:  # ended meanwhile: its row is as before the pass
                continue
            self.session.cached[sequence.row] += cached
            sequence.drafted += drafted
            sequence.accepted += min(len(tokens) - 1, sequence.tokens_left)
            self.take_tokens(sequence, tokens[: sequence.tokens_left])

    def take_tokens(self, sequence: Running, tokens: list[int]) -> None:
        """Keep a sequence's new tokens. After its last one, or an error, its row is idle."""
        for token in tokens:
            sequence.tokens_left -= 1
            error = self.take_token(sequence, token)
            self.arrived.append(NewToken(sequence, token, None, error))
            if error:
                return
        if not sequence.tokens_left:
            self.session.stop_row(sequence.row)
