"""Several tokens a pass for one sequence: something cheap drafts what follows, the model verifies all of it at once.

What comes out is what the model alone would have said: the same tokens where it is greedy (in fp32; elsewhere rounding
may decide a near-tie otherwise), tokens of the same distribution where it samples. Drafts come from the text so far
(prompt lookup, Saxena 2023) or from a smaller model (Leviathan et al. 2023; Chen et al. 2023).

A pass runs the last token and its N drafts. Keys of drafts that are refused stay in the cache, past every known token:
positions rise, so that they are written again before a query can see them.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from args import ModelArgs
from attention import Chunk
from model import Transformer
from session import SPARE, Sampling, Session, advance, read_later, sample, shortlist

DRAFT_TOKENS = 4
MOST_DRAFT_TOKENS = SPARE - 1  # every session has room for so many past its last token
NGRAM = 3  # so many last tokens are looked up together, or else fewer


def check_drafting(draft_tokens: int, args: ModelArgs, draft: ModelArgs | None) -> None:
    """Raises ValueError for a number of drafts that cannot be, and for a draft model that says other tokens."""
    if not 1 <= draft_tokens <= MOST_DRAFT_TOKENS:
        raise ValueError(f"--draft_tokens {draft_tokens}: it must be from 1 to {MOST_DRAFT_TOKENS}")
    if draft is not None and draft.vocab_size != args.vocab_size:
        raise ValueError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens and the model one of {args.vocab_size}: "
            "give --draft_checkpoint_path a model with the same tokenizer"
        )


def accept(logits: Tensor, token: Tensor, drafts: Tensor, q: Tensor | None, controls: Tensor, seen: Tensor,
           noise: Tensor | None, uniform: Tensor | None) -> Tensor:  # fmt: skip
    """The drafts that the model would say, then one token of its own: those, and last their number, int64 [N + 2].

    logits fp32 [N + 1, V]: after `token` [1, 1] and after each of `drafts` [1, N], which were drawn from q fp32 [N, V]
    (None: they were certain). controls, seen [1, V]: as `session.shortlist` has them. noise [1, C]: standard
    exponential, None is greedy; uniform [N, 1]: from [0, 1). Places after the model's own token repeat it.

    Draft d is accepted with probability min(1, p(d) / q(d)); after the first that is not, the token is drawn from
    max(p - q, 0), scaled to sum to one: together that is p (Leviathan et al. 2023, algorithm 1 and appendix A.1).
    """
    N = drafts.shape[1]
    places = torch.arange(N + 1, device=logits.device)
    said = torch.where(places[:N] < places.unsqueeze(1), drafts, token)  # row i has seen the first i drafts
    seen = seen.expand(N + 1, -1).scatter(1, said, True)
    if noise is None:
        tokens = sample(logits, controls, seen, None)
        good = tokens[:N] == drafts.T
    else:
        tokens, weights = shortlist(logits, controls, seen, noise.shape[-1])
        p, this = weights / weights.sum(dim=-1, keepdim=True), tokens[:N] == drafts.T
        p_draft = torch.where(this, p[:N], 0.0).sum(dim=-1, keepdim=True)
        q_draft = 1.0 if q is None else q.gather(1, drafts.T)
        good = uniform * q_draft < p_draft
        left = (p[:N] - (this.float() if q is None else q.gather(1, tokens[:N]))).clamp(min=0.0)
        p = torch.cat((left, p[N:]))
    count = good.flatten().long().cumprod(dim=0).sum().view(1)
    own = tokens.index_select(0, count)
    if noise is not None:
        own = own.gather(1, (p.index_select(0, count) / noise).argmax(dim=-1, keepdim=True))
    return torch.cat((torch.where(places < count, F.pad(drafts[0], (0, 1)), own[0]), count + 1))


def draw(token: Tensor, position: Tensor, seen: Tensor, logits: Tensor, controls: Tensor, noise: Tensor) -> Tensor:
    """`session.settle` for one sequence -> the probability that each token had, fp32 [1, V]."""
    tokens, weights = shortlist(logits, controls, seen, noise.shape[-1])
    q = torch.zeros_like(logits).scatter(1, tokens, weights / weights.sum(dim=-1, keepdim=True))
    advance(token, position, seen, tokens.gather(1, (weights / noise).argmax(dim=-1, keepdim=True)))
    return q


# Drafters -----------------------------------------------------------------------------------------------------------


class Lookup:
    """Drafts what followed the last tokens where they stood before: as many of them as are found, the latest place."""

    q = None  # a draft is certain

    def __init__(self, target: Session, count: int):
        self.target, self.count = target, count
        self.drafts = torch.zeros(1, count, dtype=torch.int64, device=target.device)
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self.ids: list[int] = []
        self.next: dict[tuple[int, ...], int] = {}  # where the token stands that followed these ones last

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Take in a prompt; one that goes on from the text so far is not gone through again."""
        if list(prompts[0][: len(self.ids)]) != self.ids:
            self.reset()
        self.extend(prompts[0][len(self.ids) :])

    def extend(self, ids: Sequence[int]) -> None:
        """Go on with the text."""
        for token in ids:
            for n in range(1, min(NGRAM, len(self.ids)) + 1):
                self.next[tuple(self.ids[-n:])] = len(self.ids)
            self.ids.append(token)

    def find(self) -> list[int]:
        """What might follow: `count` tokens, or none. Where the text ends before that, it repeats what is found."""
        found = (self.next.get(tuple(self.ids[-n:])) for n in range(min(NGRAM, len(self.ids)), 0, -1))
        start = next((at for at in found if at is not None), None)
        if start is None:
            return []
        period = len(self.ids) - start
        return [self.ids[start + n % period] for n in range(self.count)]

    def propose(self) -> bool:
        """Fill `drafts` for what the target knows now; False where there is nothing to say."""
        self.extend(self.target.ids[0][len(self.ids) :])
        if drafts := self.find():
            self.drafts.copy_(torch.tensor([drafts]))
        return bool(drafts)


class DraftModel(Session):
    """Drafts by a model of its own, sampled as the target's tokens are; it draws from the target's generator.

    One seed gives the noise of both: with the same seed in two generators, drafts and verdicts would not be
    independent, and what comes out would have another distribution.
    """

    def __init__(self, model: Transformer, target: Session, count: int):
        model.cache_kind = target.model.cache_kind
        super().__init__(model, target.max_seq_len, target.compiled, target.compile_prefill, 1, target.prefill_chunk)
        self.target, self.generator = target, target.generator
        self.draw = torch.compile(draw, fullgraph=True, dynamic=False) if target.compiled else draw
        # A step more than drafts, so that the cache knows the last one. What that step chooses is not looked at.
        self.chosen = torch.zeros(1, count + 1, dtype=torch.int64, device=self.device)
        self.probabilities = torch.zeros(count + 1, model.args.vocab_size, device=self.device)
        self.drafts, self.q = self.chosen[:, :count], self.probabilities[:count]
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)

    def choose(self, logits: Tensor, candidates: int) -> None:
        """As a session does; the token is kept as the next draft, with the probabilities that it was drawn with."""
        if candidates:
            noise = torch.empty(1, candidates, device=self.device).exponential_(generator=self.generator)
            q = self.draw(self.token, self.position, self.seen, logits, self.controls, noise)
            self.probabilities.index_copy_(0, self.place, q)
        else:
            super().choose(logits, 0)
        self.chosen.index_copy_(1, self.place, self.token)
        self.place.add_(1).remainder_(self.chosen.shape[1])

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Take in the prompt; what the target does with the generator comes after this."""
        self.check(prompts, 0)
        self.step = self.warm_up(self.candidates(sampling))
        super().begin(prompts, sampling)

    def propose(self) -> bool:
        """Fill `drafts` and `q` for what the target knows now."""
        self.ids[0], known = self.target.ids[0], self.target.cached[0]
        for name in ("token", "position", "seen"):
            getattr(self, name).copy_(getattr(self.target, name))
        self.place.zero_()
        for n in range(self.chosen.shape[1]):
            self.cached[0] = known + n
            self.step()
        self.cached[0] = known + 1  # the rest may be refused
        return True


# Verification -------------------------------------------------------------------------------------------------------


class Speculation:
    """A session for one sequence whose `stream` takes fewer passes. Everything else is the session's own.

    draft_tokens: N, drafted for each pass. draft: the model that drafts; None looks up what the text has said before.
    passes: of the last stream after its prompt, by the model; drafted, accepted: tokens of these passes; delivered: the
    tokens that the passes gave. Raises ValueError for a session of several sequences and as `check_drafting`.
    """

    def __init__(self, session: Session, draft_tokens: int = DRAFT_TOKENS, draft: Transformer | None = None):
        check_drafting(draft_tokens, session.model.args, draft and draft.args)
        if session.batch != 1:
            raise ValueError(f"speculation is for one sequence, not {session.batch}: make a session with batch 1")
        if draft is session.model:
            raise ValueError("a model cannot draft for itself, since it holds one cache: load it twice")
        self.session, self.count = session, draft_tokens
        self.drafter = Lookup(session, draft_tokens) if draft is None else DraftModel(draft, session, draft_tokens)
        self.accept = torch.compile(accept, fullgraph=True, dynamic=False) if session.compiled else accept
        self.offsets = torch.arange(draft_tokens + 1, device=session.device)
        self.result = torch.zeros(draft_tokens + 2, dtype=torch.int64, device=session.device)
        self.steps: dict[int, Callable[[], None]] = {}
        self.passes = self.drafted = self.accepted = self.delivered = 0

    def __getattr__(self, name: str):
        return getattr(self.session, name)

    def reset(self) -> None:
        """Forget the sequence."""
        self.session.reset()
        self.drafter.reset()

    def statistics(self) -> dict:
        """passes, drafted, accepted, and tokens_per_pass (None without a pass), of the last stream."""
        counts = {name: getattr(self, name) for name in ("passes", "drafted", "accepted")}
        return counts | {"tokens_per_pass": self.delivered / self.passes if self.passes else None}

    def verify(self, candidates: int) -> None:
        """One step: the last token and its drafts go in at `position`, `result` is what follows and how many."""
        session, drafts, noise, uniform = self.session, self.drafter.drafts, None, None
        if candidates:
            noise = torch.empty(1, candidates, device=session.device).exponential_(generator=session.generator)
            uniform = torch.rand(self.count, 1, device=session.device, generator=session.generator)
        if session.compiled:
            where = session.position + self.offsets
        else:  # reads the part of the cache that is in use, as `Session.decode` does
            where = Chunk(session.rows, session.cached[0] + self.count + 1)
        tokens = torch.cat((session.token, drafts), dim=1)
        logits = session.model(tokens, where, all_positions=True, stages=session.decode_stages)[0]
        self.result.copy_(
            self.accept(
                logits, session.token, drafts, self.drafter.q, session.controls, session.seen, noise, uniform
            )
        )  # fmt: skip
        session.token.copy_(self.result[-2])
        session.seen.scatter_(1, self.result[:-1].unsqueeze(0), True)
        session.position.add_(self.result[-1])

    def warm_up(self, candidates: int) -> Callable[[], None]:
        """The verifying step for so many candidates: compiled and, on CUDA, recorded, on the first call; then kept."""

        def step() -> None:
            self.verify(candidates)

        if candidates not in self.steps:
            self.steps[candidates] = self.session.record(step, self.count + 1)
        return self.steps[candidates]

    def stream_all(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling):
        """`Session.stream_all`, for one prompt."""
        (ids,) = prompts
        return ([token] for token in self.stream(ids, max_new_tokens, sampling))

    def stream(self, ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
        """`Session.stream`: several tokens come at once where drafts were accepted."""
        session = self.session
        self.passes = self.drafted = self.accepted = self.delivered = 0
        session.check([ids], max_new_tokens)
        if max_new_tokens == 0:
            return
        candidates = session.candidates(sampling)
        verify = self.warm_up(candidates)
        plain = session.warm_up(candidates) if isinstance(self.drafter, Lookup) else None  # the other always drafts
        self.drafter.begin([ids], sampling)
        session.begin([ids], sampling)
        tokens, left = read_later(session.token)(), max_new_tokens
        while True:
            for place, token in enumerate(tokens[:left]):
                session.ids[0].append(token)
                self.accepted += place < len(tokens) - 1
                self.delivered += self.passes > 0
                yield token
            left -= len(tokens)
            if left <= 0:
                return
            if self.drafter.propose():
                verify()
                *tokens, count = read_later(self.result)()
                tokens = tokens[:count]
                self.drafted += self.count
            else:
                plain()
                tokens = read_later(session.token)()
            self.passes += 1
            session.cached[0] += len(tokens)
