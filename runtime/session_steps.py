"""A session's decode step: run the model on the newest tokens, choose the next ones, capture both.

On CUDA the whole step is one graph whose outputs are its next inputs. It needs no value from the
host. A step covers the first rows of the session.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from model import COUNTING_SORT_MAX_TOKENS, Chunk, KVCache, MoE, Runner, Transformer
from ops.inductor import without_tuning
from ops.launch import can_launch
from ops.plain.attention import BLOCK
from ops.plain.pending import MAX_TENTATIVE
from runtime.graphs import CapturedStep, run_on_host
from runtime.kernel_choice import choose_runner, describe_kernels, passes_are_kernels
from runtime.memory import PREFILL_CHUNK, choose_chunk, free_gpu_memory
from runtime.outbox import Outbox
from runtime.runner import CompiledRunner, EagerRunner
from runtime.sampling import MAX_CANDIDATES, TOP_LOGPROBS, Sampling, StepState, sample
from runtime.session_rows import SessionRows, copy_all
from runtime.transfers import read_later

log = logging.getLogger("moe_fast")

PADDING_MULTIPLE = 2 * COUNTING_SORT_MAX_TOKENS  # compiled prompts are padded to multiples of this
SPARE = MAX_TENTATIVE  # positions past the last: for warm-up, and for drafts that are refused


class Details(NamedTuple):
    """A token's probabilities and experts, before temperature and the other controls."""

    logprob: float
    top: list[tuple[int, float]]  # the TOP_LOGPROBS likeliest tokens, their log-probabilities
    experts: list[list[int]]  # [L, A], of the layers that have experts
    weights: list[list[float]]  # [L, A]


@dataclass(frozen=True)
class SessionOptions:
    """How a session runs."""

    batch: int = 1  # sequences
    compile: bool = False  # compile the decode step; on CUDA also capture it as a graph
    compile_prefill: bool = False  # compile the prompt's pass too
    prefill_chunk: int | None = None  # prompt tokens in one call; None: as memory allows
    cache_class: type[KVCache] = KVCache
    decode_kernels: str = "auto"  # a compiled session takes these: see `choose_runner`
    runner_class: type[CompiledRunner] | None = None  # None: `choose_runner` takes one
    sample_rule: Callable = sample  # (logits, controls, seen, noise) -> tokens [B, 1]
    # Tokens of each prompt, and of the longest text, prompt and answer. Graphs for these are
    # captured before the first token. Before the first text that is longer, all steps are captured
    # anew: half a second for 8 layers. None: any may come.
    prompt_lengths: tuple[int, ...] | None = None
    longest: int | None = None


class DecodeSteps(SessionRows):
    """The steps of a session, one a number of rows and way of sampling.

    If `watch` is set, a step also reports `details`. A step that is watched or edits the logits is
    captured separately, so that plain steps stay as fast.
    """

    def __init__(self, model: Transformer, max_seq_len: int, options: SessionOptions):
        self.model, self.max_seq_len, self.options = model, max_seq_len, options
        device, self.compiled = model.norm.weight.device, options.compile
        self.longest = options.longest
        self.make_runners(device)
        self.captured = self.compiled and device.type == "cuda"
        self.captured = self.captured and self.runner.can_capture(options.batch)
        # Prompts are captured too: below some hundred tokens, launch overhead exceeds the work.
        self.captures_prompts = self.captured and self.runner.can_capture(PADDING_MULTIPLE)
        self.pads = options.compile_prefill or self.captures_prompts
        length = max_seq_len + max(SPARE, PADDING_MULTIPLE if self.pads else 1)
        super().__init__(model, options.batch, -(-length // BLOCK) * BLOCK, options.cache_class)
        self.prefill_chunk = options.prefill_chunk or self.choose_chunk()
        has_outbox = self.captured and can_launch(self.token)
        self.outbox = Outbox(self.batch, device) if has_outbox else None
        self.before_edit: Callable[[], None] = lambda: None  # on the host: may write masks
        self.make_watched()
        self.pool = torch.cuda.graph_pool_handle() if self.captured else None  # of all steps
        self.steps: dict[tuple[int, int, bool, bool], Callable[[], None]] = {}

    def make_runners(self, device: torch.device) -> None:
        """Make what runs the decode step and the prompt's pass, and the sampling step."""
        model, options = self.model, self.options
        runner_class = options.runner_class or CompiledRunner
        if options.runner_class is None and (options.compile or options.compile_prefill):
            runner_class = choose_runner(model, options.decode_kernels)
            if device.type == "cuda":
                log.info(f"kernels: {describe_kernels(model, runner_class)}")
        self.runner = runner_class(model) if options.compile else EagerRunner(model)
        self.prefill_runner: EagerRunner = self.runner.prompt_runner()
        if options.compile_prefill:
            self.prefill_runner = runner_class(model, dynamic=True)
        steps = self.runner.token_steps(options.sample_rule)
        self.edit_step, self.sample_step, self.draft_step = steps
        self.joins_greedy = self.runner.chooses_by_kernels and options.sample_rule is sample

    @property
    def captures_fast(self) -> bool:
        """Whether a pass is captured in tenths of a second: Inductor compiles no part of it."""
        return self.captured and passes_are_kernels(self.runner)

    def shared_integers(self, *shape: int) -> Tensor:
        """Return int64 zeros between the host and passes: in pinned memory, or on the device.

        A copy to the device or back costs 11 us on an H200: the next graph waits for it.
        """
        pinned = self.runner.chooses_by_kernels
        device = "cpu" if pinned else self.device
        return torch.zeros(*shape, dtype=torch.int64, device=device, pin_memory=pinned)

    def choose_chunk(self) -> int:
        """Return how many tokens of a prompt run at once, beside the weights and the cache."""
        if not self.prefill_runner.runs_long_chunks:
            return PREFILL_CHUNK
        dtype = self.model.embedding.weight.dtype  # a norm may be in fp32
        return choose_chunk(self.model.args, dtype, free_gpu_memory(self.device))

    def make_watched(self) -> None:
        """Allocate the Details that a watched step writes."""
        args = self.model.args
        sparse_layers = sum(isinstance(block.ffn, MoE) for block in self.model.layers)
        self.routing_shape = 2, sparse_layers, args.n_active  # experts, then weights
        self.top = min(TOP_LOGPROBS, args.vocab_size)
        width = 1 + 2 * self.top + 2 * sparse_layers * args.n_active
        self.watch, self.watched = False, torch.zeros(self.batch, width, device=self.device)
        self.details: list[Details] = []

    def candidates(self, sampling: Sampling) -> int:
        """Return how many of the likeliest tokens a step samples from; 0 is greedy.

        If `joins_greedy`, greedy also is MAX_CANDIDATES, with a top_k of 1: one captured step.
        """
        vocabulary = self.seen.shape[1]
        few = min(MAX_CANDIDATES, vocabulary) if self.joins_greedy else 0
        return sampling.candidates(vocabulary) or few

    def choose_tokens(self, state: StepState, logits: Tensor, candidates: int) -> None:
        """Sample each next token among `candidates` (0: greedy) into `token`, step `position`."""
        # A server compiles this for each size and way of sampling, of which few will be used.
        is_rare = len(state.token) > 1 or candidates > MAX_CANDIDATES
        with without_tuning() if self.compiled and is_rare else nullcontext():
            self.sample_step(state, logits, candidates)

    def record_details(self, token: Tensor, logits: Tensor, routing: Sequence[Tensor]) -> Tensor:
        """Return the Details of the chosen tokens [B, 1]. routing: experts, weights [L, B, A].

        One fp32 row per sequence, so that one copy moves all: fp32 represents ids below 2 ** 24.
        """
        logprobs = logits.log_softmax(dim=-1)
        token = token.clamp(min=0)  # NOT_FINITE is no index
        parts = logprobs.gather(1, token), *logprobs.topk(self.top, dim=-1)
        routing = (part.transpose(0, 1).flatten(1) for part in routing)
        return torch.cat([part.float() for part in (*parts, *routing)], dim=1)

    def read_tokens(self, posted: bool = True) -> Callable[[], list[int]]:
        """Return what waits for the newest token of each row and sets `details`.

        posted: a decode step has chosen them, and none was launched since. False: the end of a
        prompt has.
        """
        in_outbox = posted and self.outbox is not None
        token = self.outbox.read_later() if in_outbox else read_later(self.token)
        if not self.watch:
            return token
        watched = read_later(self.watched)

        def wait() -> list[int]:
            rows = torch.tensor(watched()).view(self.batch, -1)
            self.details = [self.read_details(row) for row in rows]
            return token()

        return wait

    def read_details(self, row: Tensor) -> Details:
        """A row of `watched` -> its Details."""
        top, ids, routing = row[1:].split([self.top, self.top, len(row) - 1 - 2 * self.top])
        experts, weights = routing.view(self.routing_shape)
        top = list(zip(ids.int().tolist(), top.tolist(), strict=True))
        return Details(row[0].item(), top, experts.int().tolist(), weights.tolist())

    def run_model(
        self, tokens: Tensor, span: Tensor | Chunk, last: Tensor, runner: Runner
    ) -> tuple[Tensor, ...]:
        """Return logits [B, V], and if watched the experts and weights [L, T, A]."""
        found = self.model(tokens, span, last, return_routing=self.watch, runner=runner)
        return found if self.watch else (found,)

    def decode(self, size: int, candidates: int) -> None:
        """One step of the first rows: run their tokens at `position`, choose the next ones."""
        state, edits = self.first_rows(size)
        # Eager code reads only the part of the cache in use; for one sequence the host knows it.
        as_chunk = not self.compiled and size == 1
        span = Chunk(self.rows[:1], self.cached[0] + 1) if as_chunk else state.position
        logits, *routing = self.run_model(state.token, span, state.last, self.runner)
        edited = logits
        if self.edited:
            run_on_host(lambda: self.before_edit())
            edited = self.edit_step(edits, state, logits)
        self.choose_tokens(state, edited, candidates)
        if self.watch:
            self.watched[:size].copy_(self.record_details(state.token, logits, routing))
        if self.outbox:
            self.outbox.post(state.token)

    def warm_up(self, candidates: int, size: int | None = None) -> Callable[[], None]:
        """Return the decode step, compiled and on CUDA captured on the first call.

        size: its rows, the first ones; None: all.
        """
        key = size or self.batch, candidates, self.watch, self.edited
        if key not in self.steps:
            make = partial(self.capture, lambda: self.decode(*key[:2]), key[0])
            self.steps[key] = self.outbox.counted(make) if self.outbox else make()
        return self.steps[key]

    def capture(self, step: Callable[[], None], tokens: int, ahead: int = 1) -> Callable[[], None]:
        """Return a step over this many tokens, compiled and on CUDA captured.

        The step's tensors must keep their addresses. ahead: a row's tokens, from `position` on.
        It is captured once for each of the runner's `reaches`. The rows' lengths choose among them
        at each call, so that an answer passes from one to the next.
        """
        reaches = self.runner.reaches(ahead, self.cache_len)
        longest = self.longest or self.cache_len
        needed = [n for n, reach in enumerate(reaches) if n == 0 or reaches[n - 1] < longest]
        steps = [(reaches[n], self.capture_within(reaches[n], step, tokens, ahead)) for n in needed]
        if len(steps) == 1:
            return steps[0][1]
        rows = tokens // ahead

        def run() -> None:
            end = max(self.cached[:rows]) + ahead
            next(step for reach, step in steps if reach is None or end <= reach)()

        return run

    def capture_within(
        self, reach: int | None, step: Callable[[], None], tokens: int, ahead: int
    ) -> Callable[[], None]:
        """`capture`, for one of the runner's `reaches`."""

        def run() -> None:
            self.runner.reach = reach
            try:
                step()
            finally:  # a prompt after a step that failed has no such bound
                self.runner.reach = None

        if self.captured:
            torch.cuda.synchronize()  # a step in flight would move `position`
        if self.compiled:
            before_edit, self.before_edit = self.before_edit, lambda: None
            try:
                self.warm_up_step(run, ahead)
            finally:  # a server goes on after a capture for which no memory was left
                self.before_edit = before_edit
        if not self.captured or not self.runner.can_capture(tokens):
            return run
        with CapturedStep(self.pool) as captured:
            run()
        return captured.replay

    def warm_up_step(self, run: Callable[[], None], ahead: int) -> None:
        """Run a step twice where no sequence reaches; leave the state as it was.

        ahead: as in `capture`.
        """
        with torch.cuda.stream(torch.cuda.Stream()) if self.captured else nullcontext():
            # Cloned in this stream too: another one would not wait for the clones.
            kept = [tensor.clone() for tensor in self.state]
            try:
                for _ in range(2):
                    self.position.fill_(self.cache_len - ahead)  # no sequence reaches these
                    self.last.fill_(-1)  # no token is real, so that recurrent states stay
                    with self.runner.warming_up():
                        run()
            finally:
                copy_all(kept, self.state)
        if self.captured:
            torch.cuda.synchronize()
