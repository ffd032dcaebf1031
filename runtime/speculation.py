"""Speculative decoding for one sequence: draft several tokens cheaply, verify them in one pass.

The output is the model's own: the same tokens if greedy (in fp32; elsewhere rounding may decide a
near-tie otherwise), tokens of the same distribution if sampled: runtime/verification.py. Drafts are
proposed by runtime/drafters.py.

A pass runs the last token and its N drafts. Then every layer's sequence state accepts the tokens
that were verified: a KV cache masks the others until it overwrites them, a recurrent state drops
them.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from model import Chunk, ModelArgs, Transformer
from runtime.drafters import DraftModel, LookupDrafter
from runtime.mtp import MTPDrafter
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
        decode = None if type(self.drafter) is DraftModel else session.warm_up(candidates)
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
        if not self.drafter.propose(self.count):
            decode()
            return read_later(self.session.token)()
        verify()
        *tokens, count = read_later(self.result)()
        self.drafted += self.count
        return tokens[:count]
