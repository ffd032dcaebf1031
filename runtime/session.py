"""A session continues sequences: it has their cache, and the step that adds a token to each.

A decode step runs the model on the newest tokens, samples the next ones on the device and
increments the positions. It needs no value from the host. So on CUDA the whole step is one graph
whose outputs are its next inputs. The host reads each token one step later, to print it.

A session has `batch` rows, each for one sequence. A step covers the first rows, as many as one of
its sizes: `stream_all` uses all rows, runtime/batch.py as many as sequences run. A row among them
that has no sequence is idle: it computes, but its memory stays as it is.

Session is the top of four classes, each of which uses those below it:

    Session        streams of tokens                          here
    Prompts        prompts in chunks                          runtime/session_prompts.py
    DecodeSteps    the step, its capture, its kernels         runtime/session_steps.py
    SessionRows    what each row remembers, buffers           runtime/session_rows.py
"""

import secrets
from collections.abc import Callable, Iterator, Sequence

from model import Transformer
from runtime.sampling import NOT_FINITE, NotFiniteError, Sampling
from runtime.session_prompts import Prompts
from runtime.session_steps import SessionOptions


class Session(Prompts):
    """`batch` sequences of up to `max_seq_len` tokens, prompt and answer together, on one device.

    Raises ValueError for more tokens than the model has positions.

    The model owns the cache, so it serves only the newest session. If `watch` is set before a
    stream starts, `details` holds each sequence's Details whenever tokens are yielded. One thread
    at a time uses a session, and one stream: the next one ends it.
    """

    def __init__(self, model: Transformer, max_seq_len: int, options: SessionOptions | None = None):
        if max_seq_len < 1:
            raise ValueError(f"max_seq_len {max_seq_len}: it must be at least 1")
        if max_seq_len > (longest := model.args.max_position):
            raise ValueError(
                f"max_seq_len {max_seq_len}: the model was made for {longest} positions at most"
            )
        self.streams = 0  # begun
        super().__init__(model, max_seq_len, options or SessionOptions())

    def stream(self, ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
        """`stream_all` for one sequence: its tokens one by one."""
        return (tokens[0] for tokens in self.stream_all([ids], max_new_tokens, sampling))

    def stream_all(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling
    ) -> Iterator[list[int]]:
        """Continue each prompt's token ids by max_new_tokens; yield the next token of each.

        A prompt's prefix that is in the cache is not recomputed. If steps are captured, the next
        one is in flight while tokens are read. Raises ValueError as `check_prompts`, before
        anything runs, and as `check_newest`; NotFiniteError, after a reset, if a row's logits are
        not finite.
        """
        self.check_prompts(prompts, max_new_tokens)
        if max_new_tokens == 0:
            return
        self.edited = sampling.edits_logits
        self.expect(max(map(len, prompts)) + max_new_tokens)
        step = self.warm_up(self.candidates(sampling))
        number = self.start_prompts(prompts, sampling)
        tokens = self.first_tokens

        def launch() -> Callable[[], list[int]]:
            step()
            for row in range(len(prompts)):
                self.cached[row] += 1
            return self.read_tokens()

        for left in reversed(range(max_new_tokens)):
            current = tokens
            if left and self.captured:
                tokens = launch()
            found = current()[: len(prompts)]
            if NOT_FINITE in found:
                self.reset()  # the cache has NaNs
                raise NotFiniteError
            for ids, token in zip(self.ids, found, strict=False):
                ids.append(token)
            yield found
            if left:
                self.check_newest(number)
                if not self.captured:  # it would delay the tokens
                    tokens = launch()

    def check_prompts(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Raise ValueError unless these prompts and this many new tokens each can be run."""
        vocabulary = self.seen.shape[1]
        if self.model.states is not self.states:
            raise ValueError("another session has taken this model since: make a new Session")
        if not 0 < len(prompts) <= self.batch:
            raise ValueError(
                f"{len(prompts)} prompts in a session for {self.batch}: make one with a larger "
                "batch"
            )
        for ids in prompts:
            if not ids:
                raise ValueError("the prompt is empty: give at least one token")
            if min(ids) < 0 or max(ids) >= vocabulary:
                raise ValueError(
                    f"token ids must be from 0 to {vocabulary - 1}: does the tokenizer belong to "
                    "this model?"
                )
            if max_new_tokens < 0 or len(ids) + max_new_tokens > self.max_seq_len:
                left = self.max_seq_len - len(ids)
                fix = f"ask for at most {left} with --max_new_tokens"
                if left < 1:
                    fix = "shorten the prompt"
                raise ValueError(
                    f"{len(ids)} prompt tokens and {max_new_tokens} new ones exceed --max_seq_len "
                    f"{self.max_seq_len}: raise it, or {fix}"
                )

    def check_newest(self, number: int) -> None:
        """Raise ValueError if another stream has begun since this one, whose cache it has taken."""
        if number != self.streams or self.model.states is not self.states:
            raise ValueError("another text has begun in this session: make a Session for each")

    def start_prompts(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> int:
        """`start_row` for each prompt, with the next seed in the next row; other rows are idle.

        Returns the number of this stream, for `check_newest`.
        """
        self.streams, self.prefilled = self.streams + 1, 0
        number = self.streams
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        for row in range(self.batch):
            if row < len(prompts):
                for _ in self.start_row(row, prompts[row], sampling.with_seed(seed + row)):
                    pass
            else:
                self.stop_row(row)
        return number
