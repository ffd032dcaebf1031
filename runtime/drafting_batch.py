"""A batch that drafts: the steps of a sequence without neighbors are passes of a Speculation.

When a neighbor begins, the next step is one of the batch. A KV cache masks refused drafts, and a
recurrent state takes in the accepted ones in that step (runtime/sequence_state.py).
"""

import time

from runtime.batch import WAYS, Batch, Launched, NewToken, Running
from runtime.speculation import Speculation


class DraftingBatch(Batch):
    """A Batch on the session of a Speculation. A step may return several tokens of a sequence.

    The caller may end a sequence within these tokens, and skips the rest.
    """

    def __init__(self, speculation: Speculation, max_batch: int | None = None):
        self.speculation = speculation
        super().__init__(speculation.session, max_batch)

    def forget(self) -> None:
        super().forget()
        self.speculation.release()
        self.drafted_for: Running | None = None  # whose text the drafter knows
        self.in_passes = False  # the last step was a pass

    def prepare(self) -> None:
        super().prepare()
        if self.session.compiled:
            for sampling in WAYS:
                self.speculation.warm_up_all(self.session.candidates(sampling))

    def end(self, sequence: Running) -> None:
        """`Batch.end`: a token in flight is dropped."""
        if sequence is self.drafted_for:
            self.speculation.release()
        super().end(sequence)

    def step(self) -> list[NewToken]:
        lone = self.lone_sequence()
        if lone is None:
            return super().step()
        self.run_pass(lone)
        arrived, self.arrived = self.arrived, []
        return arrived

    def admit(self) -> bool:
        """`Batch.admit`. In a session of one row, the drafter knows a text before its prompt runs.

        A head needs that. It is for one row.
        """
        first = self.waiting[0] if self.waiting else None
        if first and self.session.batch == 1 and not self.rows[0] and self.may_draft(first):
            self.begin_text(first.ids, first)
        return super().admit()

    def launch(self) -> Launched | None:
        """`Batch.launch`. A pass may have left a plain step in flight: its token is expected."""
        read, self.in_passes = self.speculation.release(), False
        if read and self.drafted_for:
            self.in_flight.append(self.expect_tokens({0: self.drafted_for}, read))
        return super().launch()

    def may_draft(self, sequence: Running) -> bool:
        """Return whether a sequence may have drafts. Verification has no edits and no details."""
        return sequence.drafts and not (sequence.watch or sequence.edited)

    def lone_sequence(self) -> Running | None:
        """Return the sequence whose next step may have drafts: the only one, past its prompt."""
        sequences = [sequence for sequence in self.rows if sequence]
        if len(sequences) != 1:
            return None
        (sequence,) = sequences
        is_past_prompt = self.session.cached[sequence.row] >= len(sequence.ids)
        may_draft = self.may_draft(sequence) and sequence.tokens_left and is_past_prompt
        return sequence if may_draft else None

    def begin_text(self, ids: list[int], sequence: Running) -> None:
        """Draft for this sequence from now on; ids: its text so far."""
        self.speculation.drafter.start_prompt(ids, sequence.sampling)
        self.drafted_for = sequence

    def run_pass(self, sequence: Running) -> None:
        """Run a pass with drafts, or a plain step, of the only sequence; keep the new tokens."""
        session, speculation = self.session, self.speculation
        self.receive()  # drafts follow the newest token
        if sequence.row is None:  # that token was an error
            return
        self.compact()  # passes are those of row 0
        session.watch = session.edited = False
        if self.drafted_for is not sequence:
            self.begin_text(session.ids[0], sequence)
        if not self.in_passes:
            speculation.read_at, self.in_passes = time.perf_counter(), True
        left, drafted = sequence.tokens_left, speculation.drafted
        tokens = speculation.run_pass(session.candidates(sequence.sampling), left)
        sequence.drafted += speculation.drafted - drafted
        sequence.accepted += min(len(tokens) - 1, left)
        for token in tokens[:left]:
            sequence.tokens_left -= 1
            error = self.take_token(sequence, token)
            self.arrived.append(NewToken(sequence, token, None, error))
        if sequence.row is not None and not sequence.tokens_left:
            session.stop_row(sequence.row)
