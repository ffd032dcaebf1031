"""Drafters propose drafts: by a lookup in the text so far, or by a smaller model.

Prompt lookup: Saxena 2023. Draft models: Leviathan et al. 2023; Chen et al. 2023.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from model import Transformer
from ops.step.token_draw import Drafts
from runtime.draft_choice import VocabularyPart
from runtime.draft_vocab import part_of_head, rows_of_ids
from runtime.runner import CompiledRunner
from runtime.sampling import Sampling, StepState, sample
from runtime.session import Session
from runtime.session_prompts import common_prefix
from runtime.session_rows import copy_all
from runtime.transfers import Upload, read_later

LONG_MATCH = 5  # tokens of a match that is nearly always right
NGRAMS = LONG_MATCH, 3, 2, 1  # lengths of the last tokens that are looked up, the longest first
LONG, SHORT, MODEL = "long lookup", "short lookup", "draft model"  # sources of drafts
MIN_PROBABILITY = 0.4  # a draft model stops before a draft with less


class Drafter(Protocol):
    """Proposes drafts for the text of a session, its target, on the device."""

    drafts: Tensor  # int64 [1, N]
    q: Tensor | None  # fp32 [N, V], the distributions that drafts were drawn from; None: certain

    def start_prompt(self, ids: Sequence[int], sampling: Sampling) -> None:
        """Begin a text, which may continue the last one."""

    def source(self) -> str | None:
        """Return a name for the drafts that `propose` has now, None if it has none.

        Acceptance and cost are measured for each name. It is known without waiting for the device.
        """

    def propose(self, limit: int) -> int:
        """Write up to `limit` drafts to `drafts`, their distributions to `q`; return how many.

        limit 0: another drafter serves this pass, or a plain step does.
        """

    def reset(self) -> None:
        """Forget the text."""


class IndexedText:
    """A text, indexed by its last tokens."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        # n-gram -> index of the token after it, for each of NGRAMS
        self.next: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in NGRAMS}

    def extend(self, ids: Sequence[int]) -> None:
        """Index more text. A prompt of 200,000 tokens takes 0.6 s, a token 3 us."""
        known = self.ids
        for token in ids:
            place, last = len(known), tuple(known[-LONG_MATCH:])
            for n, index in self.next.items():
                if place >= n:
                    index[last[-n:]] = place
            known.append(token)

    def match(self) -> tuple[int, int] | None:
        """Return the length of the longest match, and the index of the token after it."""
        last = tuple(self.ids[-LONG_MATCH:])
        for n, index in self.next.items():
            if len(last) >= n and (start := index.get(last[-n:])) is not None:
                return n, start
        return None

    def find(self, count: int) -> list[int]:
        """Return `count` drafts, or none. If the text ends before that, repeat what was found."""
        found = self.match()
        if found is None:
            return []
        period = len(self.ids) - found[1]
        return [self.ids[found[1] + n % period] for n in range(count)]


class LookupDrafter:
    """Drafts what followed the last tokens at their latest earlier occurrence in a row's text."""

    q = None  # a draft is certain

    def __init__(self, target: Session, count: int, row: int = 0):
        self.target, self.row = target, row
        self.write_to(target.shared_integers(1, count))
        self.reset()

    def write_to(self, drafts: Tensor) -> None:
        """Write drafts to this tensor from now on."""
        self.drafts, self.upload = drafts, Upload(drafts)

    def reset(self) -> None:
        """Forget the text."""
        self.text = IndexedText()

    def exchange(self, other: "LookupDrafter") -> None:
        """Exchange the texts, as those of two rows are."""
        self.text, other.text = other.text, self.text

    def start_prompt(self, ids: Sequence[int], sampling: Sampling) -> None:
        """Index a prompt; one that continues the text so far is indexed from its end."""
        if list(ids[: len(self.text.ids)]) != self.text.ids:
            self.reset()
        self.text.extend(ids[len(self.text.ids) :])

    def follow(self) -> IndexedText:
        """Return the text, with the row's newest tokens."""
        self.text.extend(self.target.ids[self.row][len(self.text.ids) :])
        return self.text

    def source(self) -> str | None:
        """Return which drafts there are now: of a LONG match, of a shorter one, or none."""
        found = self.follow().match()
        return found and (LONG if found[0] >= LONG_MATCH else SHORT)

    def find(self, limit: int) -> list[int]:
        """Return up to `limit` drafts for the row's text."""
        return self.follow().find(limit)

    def propose(self, limit: int) -> int:
        """Write up to `limit` drafts for the row's text to `drafts`; return how many."""
        drafts = self.find(limit)
        if drafts:
            self.upload(drafts)
        return len(drafts)


class DraftModel(Session):
    """Drafts by a smaller model, sampled as the target's tokens are, with noise of its own.

    least: drafting stops where the likeliest draft has a lower probability; the host waits for
    each. 0: it never stops, and the host does not wait. ids: those that it drafts, rising (empty:
    all); a part of the model's head replaces the head.
    """

    runner_class: type[CompiledRunner] | None = CompiledRunner

    def __init__(
        self,
        model: Transformer,
        target: Session,
        count: int,
        least: float = 0.0,
        ids: Sequence[int] = (),
    ):
        whole, V = model.head, model.args.vocab_size
        if ids:
            model.head = part_of_head(whole, ids, V)
        options = replace(target.options, runner_class=self.runner_class, sample_rule=sample)
        super().__init__(model, target.max_seq_len, options)
        self.joins_greedy = False  # `choose_tokens` makes no distributions then
        self.target, self.least = target, least
        self.part, device = None, self.device
        if model.head is not whole:
            part = torch.tensor(ids, device=device)
            self.part = VocabularyPart(part, rows_of_ids(ids, V, device))
        # One step more than drafts, so that the cache holds the last draft; its token is not used.
        self.written = Drafts(
            token=torch.zeros(1, count + 1, dtype=torch.int64, device=device),
            q=torch.zeros(count + 1, V, device=device),
            certainty=torch.zeros(count + 1, device=device),
            place=torch.zeros(1, dtype=torch.int64, device=device),
        )
        self.drafts, self.q = self.written.token[:, :count], self.written.q[:count]
        self.proposed: Callable[[], list[int]] = lambda: []  # waits for the drafts of the last pass

    def source(self) -> str | None:
        """Return which drafts `propose` has."""
        return MODEL

    def choose_tokens(self, state: StepState, logits: Tensor, candidates: int) -> None:
        """Choose as a session does; store the token as the next draft, with its probabilities."""
        self.draft_step(state, logits, self.written, self.part, candidates, self.least > 0)

    def start_prompt(self, ids: Sequence[int], sampling: Sampling) -> None:
        """Prefill the prompt."""
        self.check_prompts([ids], 0)
        self.step = self.warm_up(self.candidates(sampling))
        self.proposed = lambda: []
        self.start_prompts([ids], sampling)

    def drop_refused(self) -> int:
        """Bring the cache to the target's text without its last token; return the length.

        Drafts may have been refused, and other sources may have drafted since.
        """
        ids, known = self.target.ids[0], self.target.cached[0]
        valid = self.cached[0] + common_prefix(self.proposed(), ids[self.cached[0] :])
        self.proposed, self.ids[0] = lambda: [], ids
        self.note_lengths(0)
        kept = self.snapshots.go_back(0, min(valid, known))
        if kept < known:  # a recurrent state, or a ring, is back at a snapshot
            for _ in self.prefill(0, ids[kept:known], kept):
                pass
        return known

    def propose(self, limit: int) -> int:
        """Write up to `limit` drafts for the target's text to `drafts` and `q`; return how many."""
        if not limit:
            return 0
        known = self.drop_refused()
        copy_all(self.target.state, self.state)
        self.written.place.zero_()
        for n in range(limit + 1):
            self.cached[0] = known + n
            self.step()
            if n < limit and self.least and self.written.certainty[n].item() < self.least:
                limit = n
                break
        self.cached[0] = known + 1  # the rest may be refused
        self.proposed = read_later(self.drafts[:, :limit])
        return limit


class FirstOf:
    """Drafts of a lookup where that has a LONG match, else of another drafter.

    Both write to the other's `drafts` and `q`.
    """

    def __init__(self, lookup: LookupDrafter, other: "Drafter"):
        self.lookup, self.other = lookup, other
        self.drafts, self.q = other.drafts, other.q
        lookup.write_to(other.drafts)
        self.samples = False

    def reset(self) -> None:
        """Forget the text."""
        self.lookup.reset()
        self.other.reset()

    def start_prompt(self, ids: Sequence[int], sampling: Sampling) -> None:
        """Begin a text in both."""
        self.samples = sampling.temperature > 0
        self.lookup.start_prompt(ids, sampling)
        self.other.start_prompt(ids, sampling)

    def source(self) -> str | None:
        """Return which drafts `propose` has now."""
        return LONG if self.lookup.source() == LONG else self.other.source()

    def propose(self, limit: int) -> int:
        """Write up to `limit` drafts for the target's text to `drafts` and `q`; return how many."""
        if self.lookup.source() != LONG:
            return self.other.propose(limit)
        self.other.propose(0)
        count = self.lookup.propose(limit)
        if self.samples and self.q is not None:  # these drafts are certain
            self.q[:count].zero_().scatter_(1, self.drafts[0, :count, None], 1.0)
        return count
