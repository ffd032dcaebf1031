"""Speculative decoding for one sequence: draft several tokens cheaply, verify them in one pass.

The output is the model's own: the same tokens if greedy (in fp32; elsewhere rounding may decide a
near-tie otherwise), tokens of the same distribution if sampled: runtime/verification.py. Drafts are
proposed by runtime/drafters.py.

A pass runs the last token and its N drafts. The next one begins at the position after the tokens
that were accepted. A KV cache masks the others until it overwrites them; a recurrent state takes in
those before that position (runtime/sequence_state.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from model import Chunk, ModelArgs, Transformer
from ops.inductor import without_tuning
from runtime.drafters import DraftModel, LookupDrafter
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


class Speculation:
    """A session for one sequence whose `stream` takes fewer passes. All else is the session's own.

    draft_tokens: N. draft: the model that drafts; head: the head that does (`load_head`). Without
    them drafts are looked up in the text so far. Four counts describe the last stream: passes of
    the model after the prompt, and the tokens drafted, accepted and delivered in them. Raises
    ValueError for a session of several sequences, and as `check_drafting`.
    """

    def __init__(
        self,
        session: Session,
        draft_tokens: int = DRAFT_TOKENS,
        draft: Transformer | None = None,
        head: Transformer | None = None,
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
        if head is not None:
            self.drafter = MTPDrafter(head, session, draft_tokens)
        self.begin_pass, self.verify_pass = session.runner.pass_steps()
        size = MAX_DRAFT_TOKENS + 2
        self.result = torch.zeros(size, dtype=torch.int64, device=session.device)
        self.results = Outbox(size, session.device) if session.outbox else None
        self.steps: dict[tuple[int, int], Callable[[], None]] = {}
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
        tokens, positions, last = self.begin_pass(session.state, drafter.drafts[:, :count])
        # Eager code reads the part of the cache in use, as `Session.decode` does.
        chunk = Chunk(session.rows, session.cached[0] + count + 1)
        span = positions if session.compiled else chunk
        runner = session.runner
        logits = session.model(tokens, span, last, all_positions=True, runner=runner)[0]
        q = drafter.q if drafter.q is None else drafter.q[:count]
        self.verify_pass(session.state, logits, tokens, q, candidates, self.result)
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
        self.warm_up(self.count, candidates)
        # A draft model always drafts; a lookup may find nothing, and then a plain step follows.
        if type(self.drafter) is not DraftModel:
            session.warm_up(candidates)
        self.drafter.start_prompt(ids, sampling)
        session.start_prompts([ids], sampling)
        yield from self.run_passes(max_new_tokens, candidates)

    def run_passes(self, left: int, candidates: int) -> Iterator[int]:
        """Yield the next `left` tokens, of which the first is in flight.

        After a plain step without drafts, the next one is launched before that one is read: drafts
        are looked up while the GPU works. If there are some, the text then waits for one more step.
        """
        session, drafts = self.session, 1
        read: Callable[[], list[int]] = session.first_tokens
        overlaps = session.captured and not session.runner.needs_host
        while True:
            later = None
            if overlaps and not drafts and left > 1:
                later = self.launch(0, candidates)
            tokens = read()
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
            drafts = self.choose_drafts(in_flight=later is not None)
            read = later or self.launch(drafts, candidates)

    def choose_drafts(self, in_flight: bool) -> int:
        """Draft, and return how many tokens.

        in_flight: a plain step runs, so only whether there are drafts counts: they have to be made
        again after its token. A drafter on the device cannot know that before.
        """
        if in_flight and not self.drafter.on_host:
            return 1
        return self.drafter.propose(self.count)

    def launch(self, drafts: int, candidates: int) -> Callable[[], list[int]]:
        """Verify this many drafts, or decode one token; return what waits for the new tokens."""
        self.passes += 1
        session = self.session
        if not drafts:
            session.warm_up(candidates)()
            session.cached[0] += 1
            return session.read_tokens()
        self.drafted += drafts
        self.warm_up(drafts, candidates)()
        read = self.results.read_later() if self.results else read_later(self.result)

        def wait() -> list[int]:
            tokens = read()
            tokens = tokens[: tokens[drafts + 1]]
            session.cached[0] += len(tokens)
            return tokens

        return wait
