"""Drafts by a head for multi-token prediction, which continues the target's hidden states.

The head has a KV cache of its own. Its position t holds the pair of the target's hidden state after
token t and token t + 1; the last pair known predicts the next draft. For further drafts the head's
own state and its own draft are the next pair (models/multi_token.py).

Every step of the target leaves its hidden states in a ring, by position. A chain begins with the
pairs that became known since the last one: their true states replace in the cache what the head had
for them. Padding and refused drafts stand past the known pairs, where they are masked.

A pass leaves its tokens where a chain finds them (`runtime.verification.verify_pass`). So on a GPU
the next chain runs behind a pass at once, while the host reads what the pass has accepted.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from model import Chunk, Runner, Transformer
from ops.inductor import compiled
from ops.plain.pending import MAX_TENTATIVE
from ops.step import chain
from ops.step.chain import Pairs
from runtime.drafters import DraftModel
from runtime.fused_decode import FusedRunner, draw_draft, norm_rows, take_last
from runtime.runner import EagerRunner
from runtime.sampling import Sampling, StepState
from runtime.session import Session
from runtime.session_prompts import common_prefix
from runtime.session_steps import PADDING_MULTIPLE
from runtime.transfers import Upload, integers, send

MIN_OF_HEAD = 0.2  # the least probability of a head's draft that is verified
MAX_MTP_DRAFTS = 7  # the pair before them and these are as many tokens as the fused kernels take
RING = 1024  # steps of the target whose hidden states are kept


def check_mtp_drafts(draft_tokens: int) -> None:
    """Raise ValueError for more drafts than a chain makes."""
    if draft_tokens > MAX_MTP_DRAFTS:
        raise ValueError(
            f"--draft_tokens {draft_tokens}: --speculate mtp drafts 1 to {MAX_MTP_DRAFTS}"
        )


class MTPDrafter(DraftModel):
    """Drafts up to `count` tokens by a head of the target, sampled as the target's tokens are.

    head: `load_head` makes it. numbers: where passes write their results. ids: as in DraftModel.
    least: a chain ends before its first draft of lower probability. The target may take other steps
    between two chains: the head catches up on the last RING of them. Raises ValueError as
    `check_mtp_drafts`.
    """

    runner_class = None  # the session chooses

    def __init__(
        self,
        head: Transformer,
        target: Session,
        count: int,
        numbers: Tensor,
        least: float = 0.0,
        ids: Sequence[int] = (),
    ):
        check_mtp_drafts(count)
        head.head = target.model.head  # an earlier drafter may have left a part of it
        super().__init__(head, target, count, least, ids)
        # A chain changes none of these, so the head reads the target's own.
        self.state = self.state._replace(controls=target.controls, seeds=target.seeds)
        self.count = count
        self.width = count + 1  # pairs that a chain begins with, known ones and padding
        rows = min(target.cache_len, target.prefill_chunk + PADDING_MULTIPLE)
        like, D = target.model.embedding.weight, head.args.dim
        self.prompt_hidden = like.new_zeros(1, rows, D)  # the target's last chunk
        self.ring = like.new_zeros(1, RING, D)  # its last steps: position t in row t % RING
        self.own_hidden: Tensor  # the head's [1, 1, D], of its last query
        self.numbers, self.upload = numbers, Upload(numbers)
        self.asked = 0  # drafts of the last call of `propose`
        self.repeats = False  # the pass before had as many: `follow` may be called
        self.ahead = 0  # drafts of the chain that runs behind the last pass
        self.begin_chain = chain.begin_chain if self.runner.chooses_by_kernels else begin_chain
        self.first = torch.zeros(1, dtype=torch.int64, device=self.device)  # query of a step
        self.chains: dict[tuple[int, int], Callable[[], None]] = {}
        self.filler = FillRunner(head)
        self.store = store_hidden
        if target.runner.chooses_by_kernels:
            self.store = chain.store_hidden
        elif target.compiled:
            self.store = compiled(store_hidden, dynamic=True)
        target.forget_graphs()  # they have no tap
        tap_hidden(target.runner, self.keep_hidden)
        tap_hidden(target.prefill_runner, self.keep_prompt)
        tap_hidden(self.runner, self.keep_own_hidden)
        target.after_chunk = self.fill

    def reset(self, row: int | None = None) -> None:
        """Forget the sequence."""
        super().reset(row)
        # The cache has `filled` pairs; the ring has the states of positions from `kept` on.
        self.filled = self.kept = self.ahead = 0

    # Hidden states --------------------------------------------------------------------------------

    def keep_hidden(self, hidden: Tensor, last: Tensor | None) -> None:
        """Keep the hidden states [1, Q, D] of the target's decode runner.

        The call may be a short chunk of a prompt, of which one position has logits; or a step or a
        pass, at the target's position.
        """
        if hidden.shape[1] > 1 and last is not None:
            self.keep_prompt(hidden, last)
        else:
            self.store(self.ring, self.target.position, hidden)

    def keep_prompt(self, hidden: Tensor, last: Tensor | None) -> None:
        """Keep the hidden states [1, Q, D] of a chunk of a prompt."""
        self.prompt_hidden[:, : hidden.shape[1]].copy_(hidden)

    def keep_own_hidden(self, hidden: Tensor, last: Tensor) -> None:
        """Keep the head's own [1, Q, D] of the query `last`."""
        if hidden.shape[1] > 1:
            by_kernel = self.runner.chooses_by_kernels
            hidden = take_last(hidden, last) if by_kernel else hidden.index_select(1, last)
        self.own_hidden = hidden

    def fill(self, start: int, count: int) -> None:
        """Take in `count` tokens of a prompt, which the target ran from position `start` on.

        The pair of the prompt's last token waits for the token after it.
        """
        tokens = self.target.ids[0][start + 1 : start + count + 1]
        self.run_pairs(self.prompt_hidden[:, : len(tokens)], tokens, start)
        self.kept = start + count - 1
        row = self.kept % RING
        self.ring[:, row : row + 1].copy_(self.prompt_hidden[:, count - 1 : count])

    def run_pairs(self, hidden: Tensor, tokens: Sequence[int], start: int) -> None:
        """Take in pairs from position `start` on: hidden [1, Q, D], and the Q tokens after."""
        self.filled = start + len(tokens)
        if tokens:
            self.model.hidden = hidden
            chunk = Chunk(self.rows, self.filled)
            numbers = send(integers(tokens).unsqueeze(0), self.device)
            self.model(numbers, chunk, runner=self.filler)

    def catch_up(self, ids: Sequence[int], begin: int, end: int) -> None:
        """Take in the text's pairs from `begin` to `end`; the next chain runs the last of them.

        Pairs whose states are lost stay as they are in the cache: drafts may be worse.
        """
        begin = max(begin, self.kept, end + MAX_TENTATIVE - RING)
        chunk = range(begin, end - self.width)  # other drafts, or none, have served these steps
        if chunk:
            rows = torch.tensor([position % RING for position in chunk])
            hidden = self.ring.index_select(1, send(rows, self.device))
            self.run_pairs(hidden, ids[begin + 1 : chunk.stop + 1], begin)
            begin = chunk.stop
        tokens = ids[begin + 1 : end + 1]
        self.upload([len(tokens), end, *tokens])
        self.filled = self.cached[0] = end

    # Drafts ---------------------------------------------------------------------------------------

    def start_prompt(self, ids: Sequence[int], sampling: Sampling) -> None:
        """Take in what is known of the text so far that the prompt continues.

        The next token may differ from the one that the last pair was made with, so that pair is
        recomputed: from a state in the ring, or from one that the target recomputes. A recurrent
        state cannot go back by one token; then the pair keeps its old token.
        """
        target, self.amount = self.target, self.candidates(sampling)
        self.last.zero_()  # the row is active
        self.asked = self.ahead = 0
        self.wait_for_chain()  # a pass or a chain of an answer that was left
        for drafts in range(1 if self.least else self.count, self.count + 1):
            run_chain = self.warm_up_chain(drafts)
        known = min(common_prefix(target.ids[0], ids), target.cached[0], len(ids) - 1)
        if known and max(self.kept, target.cached[0] + MAX_TENTATIVE - RING) < known:
            self.catch_up(ids, min(self.filled, known - 1), known)
            run_chain()
        elif known and (target.snapshots.slack or not target.snapshots.live[0]):
            target.cached[0] = known - 1

    def propose(self, limit: int) -> int:
        """Write up to `limit` drafts for the target's text to `drafts` and `q`; return how many."""
        drafts, known = min(limit, self.count), self.target.cached[0]
        ahead, self.ahead = self.ahead, 0
        self.repeats = 0 < drafts == self.asked and known - self.filled <= drafts + 1
        self.asked = drafts
        if 0 < drafts <= ahead and self.numbers[1].item() == known:
            # The chain behind the last pass has them: no other step has followed that pass.
            self.filled = self.cached[0] = known
        elif drafts:
            if ahead:
                self.wait_for_chain()
            self.catch_up(self.target.ids[0], min(self.filled, known - 1), known)
            self.warm_up_chain(drafts)()
        if not self.least:
            return drafts
        chances = self.written.certainty[:drafts].tolist()  # one wait for the whole chain
        return next((n for n, chance in enumerate(chances) if chance < self.least), drafts)

    def wait_for_chain(self) -> None:
        """Return when the GPU has read `numbers`."""
        if self.numbers.device != self.device:  # pinned memory, that is
            torch.cuda.current_stream(self.device).synchronize()

    def follow(self) -> None:
        """Run the chain of the next drafts behind the pass that was launched.

        Not if the pass before that had other drafts: a lone one is often followed by plain steps.
        """
        self.ahead = self.asked
        self.cached[0] = self.filled + self.width  # at most
        self.warm_up_chain(self.ahead)()

    def warm_up_chain(self, drafts: int) -> Callable[[], None]:
        """Return the chain of this many drafts, compiled and on CUDA captured on the first call."""
        key = drafts, self.amount
        if key not in self.chains:
            known = self.numbers.tolist()
            # A token that is no part of the text, where no sequence reaches.
            self.upload([1, self.cache_len - self.width + 1, 1])
            run = partial(self.run_chain, *key)
            self.chains[key] = self.capture(run, self.width, self.width)
            self.upload(known)
        return self.chains[key]

    def run_chain(self, drafts: int, candidates: int) -> None:
        """Run the pairs of `numbers`, then the head's own ones, and choose a draft after each.

        `position` is that of the last pair, one below that of its token.
        """
        state, runner = self.state, self.runner
        given = self.ring, self.target.seen, state, self.written.place
        *pairs, self.model.hidden = self.begin_chain(self.numbers, self.width, *given)
        logits = self.model(*pairs, runner=runner)
        self.choose_tokens(state, logits, candidates)
        for _ in range(drafts - 1):
            self.model.hidden = self.own_hidden
            logits = self.model(state.token, state.position, self.first, runner=runner)
            self.choose_tokens(state, logits, candidates)

    def launch_chain(self) -> None:
        """Launch the kernels of chains, and of the target's steps, over nothing (`collect`)."""
        state, runner, target = self.state, self.runner, self.target
        own = self.ring[:, :1]
        if isinstance(target.runner, FusedRunner):
            norm_rows(target.model, own)
            self.store(self.ring, target.position, own)
        if not isinstance(runner, FusedRunner):
            return
        given = self.ring, target.seen, state, self.written.place
        _, _, last, hidden = self.begin_chain(self.numbers, self.width, *given)
        norm_rows(self.model, take_last(hidden, last))
        for states in (hidden, own):
            self.model.hidden = states
            for reach in runner.reaches(self.width, self.cache_len):
                runner.launch_all(1, states.shape[1], reach)
        tokens = len(self.part.ids) if self.part else state.seen.shape[1]
        logits = torch.empty(1, tokens, device=self.ring.device)
        for candidates in (0, 1):
            rest = self.part, candidates, self.least > 0
            draw_draft(state, logits, self.written, *rest)


class FillRunner(EagerRunner):
    """Runs a head over a prompt for its cache alone."""

    def logits(self, model: Transformer, normed: Tensor, last: Tensor | None) -> Tensor:
        return normed


def begin_chain(
    numbers: Tensor, width: int, ring: Tensor, seen: Tensor, state: StepState, place: Tensor
) -> Pairs:
    """Return `width` pairs that a chain begins with; set its state and the place of its drafts.

    numbers int64 [3 or more]: how many pairs became known, the position of the newest token, and
    the tokens of these pairs. Padding repeats the last one, so that it chooses the same experts.
    They may be in pinned memory. ring [1, R, D]: hidden states of the last R positions. seen: the
    target's.
    """
    numbers = numbers.to(ring.device, non_blocking=True)
    count, position = numbers[:1], numbers[1:2]
    state.seen.copy_(seen)
    state.position.copy_((position - 1).unsqueeze(1))
    place.zero_()
    pair = torch.arange(width, device=numbers.device)
    # The answer ends where a token is -1, after this chain.
    tokens = numbers[2:].index_select(0, pair.minimum(count - 1)).clamp(min=0)
    positions = position - count + pair
    hidden = ring.index_select(1, positions % ring.shape[1])
    return Pairs(tokens.unsqueeze(0), positions.unsqueeze(0), count - 1, hidden)


def store_hidden(ring: Tensor, position: Tensor, hidden: Tensor) -> None:
    """Write hidden states [1, Q, D] from `position` [1, 1] on to a ring [1, R, D]."""
    rows = (position[0] + torch.arange(hidden.shape[1], device=hidden.device)) % ring.shape[1]
    ring.index_copy_(1, rows, hidden)


def tap_hidden(runner: Runner, keep: Callable[[Tensor, Tensor | None], None]) -> None:
    """Call `keep` in each call of a runner: with the hidden states [B, Q, D], and `last`."""
    logits = runner.logits

    def tapped(model: Transformer, normed: Tensor, last: Tensor | None) -> Tensor:
        hidden = runner.hidden(model, normed) if isinstance(runner, EagerRunner) else normed
        keep(hidden, last)
        return logits(model, normed, last)

    setattr(runner, "logits", tapped)  # noqa: B010 (mypy knows no change of a method)
