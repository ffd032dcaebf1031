"""Drafts by a head for multi-token prediction, which continues the target's hidden states.

The head has a KV cache of its own. Its position t holds the pair of the target's hidden state after
token t and token t + 1; the last pair known predicts the next draft. After it the head continues
itself: its own state and its own draft are the next pair (models/multi_token.py).

A pass of the target leaves the hidden states of all its tokens in `hidden`. The next chain begins
with the pairs of those that were accepted: their true states replace in the cache what the head had
for them. Padding and refused drafts stand past the known pairs, where they are masked.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from model import Chunk, Runner, Transformer
from runtime.drafters import DraftModel
from runtime.runner import EagerRunner
from runtime.sampling import Sampling
from runtime.session import Session
from runtime.session_prompts import common_prefix
from runtime.session_rows import copy_all
from runtime.session_steps import PADDING_MULTIPLE
from runtime.transfers import send

MAX_MTP_DRAFTS = 7  # with the pair before them, as many tokens as the fused kernels take


def check_mtp_drafts(draft_tokens: int) -> None:
    """Raise ValueError for more drafts than a chain makes."""
    if draft_tokens > MAX_MTP_DRAFTS:
        raise ValueError(
            f"--draft_tokens {draft_tokens}: --speculate mtp drafts 1 to {MAX_MTP_DRAFTS}"
        )


class MTPDrafter(DraftModel):
    """Drafts up to `count` tokens by a head of the target, sampled as the target's tokens are.

    head: `load_head` makes it. Make the drafter before the target compiles a step. A pass that
    another drafter served needs a call `propose(0)` after it, by which the head takes in its
    tokens. Raises ValueError as `check_mtp_drafts`.
    """

    runner_class = None  # the session chooses

    def __init__(self, head: Transformer, target: Session, count: int):
        check_mtp_drafts(count)
        super().__init__(head, target, count)
        self.count = count
        self.width = count + 1  # tokens of the target's longest pass
        rows = min(target.cache_len, target.options.prefill_chunk + PADDING_MULTIPLE)
        like, D = target.model.embedding.weight, head.args.dim
        # Of the target's newest call: of the positions from `first` on to before `end`, at most.
        self.hidden = like.new_zeros(1, rows + self.width, D)
        self.own_hidden = like.new_zeros(1, 1, D)
        # Tokens of the pairs that a chain begins with, the row of the first one's state, and how
        # many pairs are known: the rest is padding.
        self.pairs = torch.ones(1, self.width + 2, dtype=torch.int64, device=self.device)
        self.offsets = torch.arange(self.width, device=self.device)
        self.chains: dict[tuple[int, int], Callable[[], None]] = {}
        self.filler = FillRunner(head)
        for runner in {target.runner, target.prefill_runner}:
            tap_hidden(runner, self.keep_hidden)
        tap_hidden(self.runner, self.keep_own_hidden)
        target.after_chunk = self.fill

    def reset(self, row: int | None = None) -> None:
        """Forget the sequence."""
        super().reset(row)
        self.first = self.end = self.filled = 0  # `filled` pairs are in the cache

    # Hidden states --------------------------------------------------------------------------------

    def keep_hidden(self, hidden: Tensor, last: Tensor | None) -> None:
        """Keep the hidden states [1, Q, D] of a call of the target."""
        self.hidden[:, : hidden.shape[1]].copy_(hidden)

    def keep_own_hidden(self, hidden: Tensor, last: Tensor) -> None:
        """Keep the head's own [1, Q, D] of the query `last`."""
        self.own_hidden.copy_(hidden.index_select(1, last))

    def fill(self, start: int, count: int) -> None:
        """Take in `count` tokens of a prompt, which the target ran from position `start` on.

        The pair of the prompt's last token waits for the token after it.
        """
        tokens = self.target.ids[0][start + 1 : start + count + 1]
        self.first, self.end, self.filled = start, start + count, start + len(tokens)
        if tokens:
            self.model.hidden = self.hidden[:, : len(tokens)]
            chunk = Chunk(self.rows, self.filled)
            self.model(send(torch.tensor([tokens]), self.device), chunk, runner=self.filler)

    def send_pairs(self, ids: Sequence[int], begin: int, end: int) -> None:
        """Let the next chain begin with the pairs from position `begin` to `end` of the text."""
        begin = max(begin, self.first, end - self.width)
        tokens = ids[begin + 1 : end + 1]
        padding = [tokens[-1]] * (self.width - len(tokens))  # chooses the same experts
        numbers = [*tokens, *padding, begin - self.first, len(tokens)]
        self.pairs.copy_(send(torch.tensor([numbers]), self.device))
        self.filled = end

    # Drafts ---------------------------------------------------------------------------------------

    def start_prompt(self, ids: Sequence[int], sampling: Sampling) -> None:
        """Take in what is known of the text so far that the prompt continues."""
        self.amount = self.candidates(sampling)
        target = self.target
        kept = min(common_prefix(target.ids[0], ids), target.cached[0], len(ids) - 1)
        chain = self.warm_up_chain(self.count)
        # The token after the last state kept may be another than it was: the pair is made again,
        # from a state that is still here or that the target computes again. A recurrent state
        # cannot go back by one token; then a pair of the cache has the other token.
        if self.first < kept <= self.end:
            copy_all(target.state, self.state)
            self.position.fill_(kept)
            self.send_pairs(ids, min(self.filled, kept - 1), kept)
            chain()
        elif kept and not target.snapshots.live[0]:
            target.cached[0] = kept - 1

    def propose(self, limit: int) -> int:
        """Write up to `limit` drafts for the target's text to `drafts` and `q`; return how many.

        0 drafts: take in the target's newest tokens alone.
        """
        drafts, known = min(limit, self.count), self.target.cached[0]
        if self.first < known <= self.end:
            self.cached[0] = known
            copy_all(self.target.state, self.state)
            self.send_pairs(self.target.ids[0], self.filled, known)
            self.warm_up_chain(max(drafts, 1))()
        else:  # other steps have run since: their states are lost but for the next one's
            drafts, self.filled = 0, known
        self.first, self.end = known, known + self.width  # the target goes on there
        return drafts

    def warm_up_chain(self, drafts: int) -> Callable[[], None]:
        """Return the chain of this many drafts, compiled and on CUDA captured on the first call."""
        key = drafts, self.amount
        if key not in self.chains:
            chain = partial(self.run_chain, *key)
            self.chains[key] = self.capture(chain, self.width, self.width)
        return self.chains[key]

    def run_chain(self, drafts: int, candidates: int) -> None:
        """Run the pairs that were sent, then the head's own ones, and choose a draft after each."""
        state, runner = self.state, self.runner
        self.place.zero_()
        tokens, row, count = self.pairs.split([self.width, 1, 1], dim=1)
        self.model.hidden = self.hidden.index_select(1, row[0] + self.offsets)
        positions = state.position - count + self.offsets
        logits = self.model(tokens, positions, count[0] - 1, runner=runner)
        self.choose_tokens(state, logits, candidates)
        for _ in range(drafts - 1):
            self.model.hidden = self.own_hidden
            position = state.position - 1
            logits = self.model(state.token, position, torch.zeros_like(state.last), runner=runner)
            self.choose_tokens(state, logits, candidates)


class FillRunner(EagerRunner):
    """Runs a head over a prompt for its cache alone."""

    def logits(self, model: Transformer, normed: Tensor, last: Tensor | None) -> Tensor:
        return normed


def tap_hidden(runner: Runner, keep: Callable[[Tensor, Tensor | None], None]) -> None:
    """Call `keep` in each call of a runner: with the hidden states [B, Q, D], and `last`."""
    logits = runner.logits

    def tapped(model: Transformer, normed: Tensor, last: Tensor | None) -> Tensor:
        hidden = runner.hidden(model, normed) if isinstance(runner, EagerRunner) else normed
        keep(hidden, last)
        return logits(model, normed, last)

    setattr(runner, "logits", tapped)  # noqa: B010 (mypy knows no change of a method)
