"""Sequences being continued: their cache, and the step that adds one token to each.

A decode step runs the model on the newest tokens, samples the next ones on the device and
increments the positions. It needs no value from the host. So on CUDA the whole step is one graph
whose outputs are its next inputs. The host reads each token one step later, to print it.

A session has `batch` rows, each for one sequence. A step covers the first rows, as many as one of
its sizes: `stream_all` uses all rows, runtime/batch.py as many as sequences run. A row among them
that has no sequence is idle: it computes, but its memory stays as it is.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from model import COUNTING_SORT_MAX_TOKENS, SHORT_CACHE, Chunk, KVCache, Runner, Transformer
from ops.inductor import configure_inductor, without_tuning
from ops.launch import can_launch
from ops.plain.attention import BLOCK
from ops.step.rows import RowMemory
from runtime.graphs import CapturedStep, GraphCache, run_on_host
from runtime.kernel_choice import choose_runner, describe_kernels
from runtime.logit_edits import EditState, edit_logits, make_edit_state, set_edits
from runtime.outbox import Outbox
from runtime.runner import CompiledRunner, EagerRunner, InterruptedRunner
from runtime.sampling import (
    MAX_CANDIDATES,
    NOT_FINITE,
    TOP_LOGPROBS,
    NotFiniteError,
    Sampling,
    StepState,
    sample,
)
from runtime.sequence_state import MAX_TENTATIVE
from runtime.snapshots import Snapshots
from runtime.transfers import read_later, send

log = logging.getLogger("moe_fast")

PREFILL_CHUNK = 2048  # prompt tokens in one call, which bounds the memory for activations
PADDING_MULTIPLE = 2 * COUNTING_SORT_MAX_TOKENS  # compiled prompts are padded to multiples of this
# Up to PADDING_MULTIPLE tokens, captured prompts that are not compiled are padded to multiples of
# this: padding chooses experts, too, and 64 tokens read nearly all experts of most models.
SHORT_MULTIPLE = 8
# A captured session runs short prompts in row 0 like decode steps of several tokens: compiled, in
# one graph for all positions. The runner has one or more sizes of these chunks. A short prompt has
# at most this number of the largest chunks.
MAX_SHORT_CHUNKS = 2
# Over a long cache, more queries of a sequence take another attention kernel, which was not
# measured: chunks are no longer than this.
LONG_CACHE_CHUNK = 8
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
    prefill_chunk: int = PREFILL_CHUNK  # prompt tokens in one call
    cache_class: type[KVCache] = KVCache
    decode_kernels: str = "auto"  # of a compiled session: as --decode_kernels says
    runner_class: type[CompiledRunner] | None = None  # None: `choose_runner` takes one
    sample_rule: Callable = sample  # (logits, controls, seen, noise) -> tokens [B, 1]


def short_chunk_sizes(
    sizes: tuple[int, ...], options: SessionOptions, cache_len: int
) -> tuple[int, ...]:
    """Return the sizes of a captured session's short chunks, none if it has no short prompts.

    sizes: those of the runner.
    """
    if options.compile_prefill:
        return ()
    alone = options.batch == 1  # longer chunks would take a server longer to compile
    return tuple(s for s in sizes if s <= LONG_CACHE_CHUNK or (alone and cache_len <= SHORT_CACHE))


class Session:
    """`batch` sequences of up to `max_seq_len` tokens, prompt and answer together, on one device.

    Raises ValueError for more tokens than the model has positions.

    The model owns the cache, so it serves only the newest session. If `watch` is set before a
    stream starts, `details` holds each sequence's Details whenever tokens are yielded. A step that
    is watched or edits the logits is captured separately, so that plain steps stay as fast.
    """

    def __init__(self, model: Transformer, max_seq_len: int, options: SessionOptions | None = None):
        if max_seq_len > (longest := model.args.max_position):
            raise ValueError(
                f"max_seq_len {max_seq_len}: the model was made for {longest} positions at most"
            )
        self.model, self.max_seq_len = model, max_seq_len
        self.options = options = options or SessionOptions()
        self.batch, self.compiled = options.batch, options.compile
        self.device = device = model.norm.weight.device
        if options.compile or options.compile_prefill:
            configure_inductor()
        self.make_runners()
        self.captured = self.compiled and device.type == "cuda"
        self.captured = self.captured and self.runner.can_capture(self.batch)
        # Prompts are captured too: below some hundred tokens, launch overhead exceeds the work.
        captures_prompts = self.captured and not self.runner.needs_host
        captures_prompts = captures_prompts and self.runner.can_capture(PADDING_MULTIPLE)
        self.pads = options.compile_prefill or captures_prompts
        length = max_seq_len + max(SPARE, PADDING_MULTIPLE if self.pads else 1)
        self.cache_len = -(-length // BLOCK) * BLOCK
        self.states = model.setup_cache(self.batch, self.cache_len, options.cache_class)
        rows = range(self.batch)
        self.snapshots = Snapshots(self.states, self.batch)
        self.memory = RowMemory([[v for s in self.states for v in s.row(row)] for row in rows])
        self.make_buffers()
        self.graphs = GraphCache() if captures_prompts else None
        self.between_layers: Callable[[], None] = lambda: None  # called within a long prompt
        self.short_chunks: tuple[int, ...] = ()
        if captures_prompts:
            self.short_chunks = short_chunk_sizes(self.runner.short_chunks, options, self.cache_len)
        self.pool = torch.cuda.graph_pool_handle() if self.captured else None  # of all steps
        self.steps: dict[tuple[int, int, bool, bool], Callable[[], None]] = {}
        self.reset()

    def make_runners(self) -> None:
        """Make what runs the decode step and the prompt's pass, and the sampling step."""
        model, options = self.model, self.options
        runner_class = options.runner_class or CompiledRunner
        if options.runner_class is None and (self.compiled or options.compile_prefill):
            runner_class = choose_runner(model, options.decode_kernels)
            if self.device.type == "cuda":
                log.info(f"kernels: {describe_kernels(model, runner_class)}")
        self.runner = runner_class(model) if self.compiled else EagerRunner(model)
        self.prefill_runner: Runner = EagerRunner(model)
        if self.options.compile_prefill:
            self.prefill_runner = runner_class(model, dynamic=True)
        self.sample_step = self.runner.sample_step(self.options.sample_rule)
        self.edit_step = edit_logits
        if self.compiled:
            self.edit_step = torch.compile(edit_logits, fullgraph=True, dynamic=False)

    def make_buffers(self) -> None:
        """Allocate what a step reads and writes in place: a captured step needs fixed addresses."""
        batch, device, args = self.batch, self.device, self.model.args

        def make_state(rows: int) -> StepState:
            return StepState(
                token=torch.zeros(rows, 1, dtype=torch.int64, device=device),
                position=torch.zeros(rows, 1, dtype=torch.int64, device=device),
                last=torch.full((rows,), -1, device=device),
                seen=torch.zeros(rows, args.vocab_size, dtype=torch.bool, device=device),
                controls=torch.ones(rows, 5, device=device),
                seeds=torch.zeros(rows, dtype=torch.int64, device=device),
            )

        self.state = make_state(batch)
        self.token, self.position, self.last, self.seen, self.controls, self.seeds = self.state
        has_outbox = self.captured and can_launch(self.token)
        self.outbox = Outbox(batch, device) if has_outbox else None
        self.edited = False  # steps edit the logits
        self.edits = make_edit_state(batch, args.vocab_size, device)
        self.row_is_edited = [False] * batch  # its edits may change something
        self.before_edit: Callable[[], None] = lambda: None  # on the host: may write masks
        # A sequence's first token is sampled for one row. A view of it would recompile.
        self.single = self.state, self.edits
        if batch > 1:
            self.single = make_state(1), make_edit_state(1, args.vocab_size, device)
        self.views = {batch: (self.state, self.edits)}  # by number of rows
        self.rows = torch.arange(batch, device=device)
        sparse_layers = args.n_layer - len(set(args.dense_layers))
        self.routing_shape = 2, sparse_layers, args.n_active  # experts, then weights
        self.top = min(TOP_LOGPROBS, args.vocab_size)
        width = 1 + 2 * self.top + 2 * sparse_layers * args.n_active
        self.watch, self.watched = False, torch.zeros(batch, width, device=device)
        self.details: list[Details] = []
        self.first_tokens: Callable[[], list[int]]  # waits for those after the newest prompt

    def first_rows(self, size: int) -> tuple[StepState, EditState]:
        """Return the state of the first rows: always the same tensors, as compiled code wants."""
        if size not in self.views:
            self.views[size] = self.view_rows(0, size)
        return self.views[size]

    def view_rows(self, start: int, end: int) -> tuple[StepState, EditState]:
        state, edits = ([t[start:end] for t in part] for part in (self.state, self.edits))
        return StepState(*state), EditState(*edits)

    def reset(self, row: int | None = None) -> None:
        """Forget the sequence of a row, or all."""
        for state in self.states:
            state.reset(row)
        self.snapshots.forget(row)
        if row is not None:
            self.ids[row], self.cached[row] = [], 0
            return
        # Tokens of each sequence that the host knows; the cache has the first `cached` of them.
        self.ids: list[list[int]] = [[] for _ in range(self.batch)]
        self.cached: list[int] = [0] * self.batch
        self.prefilled = 0  # prompt tokens that the last call had to compute

    # One step ---------------------------------------------------------------------------------

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
        # Eager code reads only the part of the cache in use: of one sequence, the host knows it.
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
        if not self.steps:
            self.warm_up_short_prompts()
        if key not in self.steps:
            make = partial(self.capture, lambda: self.decode(*key[:2]), key[0])
            self.steps[key] = self.outbox.counted(make) if self.outbox else make()
        return self.steps[key]

    def capture(self, step: Callable[[], None], tokens: int, ahead: int = 1) -> Callable[[], None]:
        """Return a step over this many tokens, compiled and on CUDA captured.

        The step's tensors must keep their addresses. ahead: a row's tokens, from `position` on.
        """
        if self.captured:
            torch.cuda.synchronize()  # a step in flight would move `position`
        if self.compiled:
            before_edit, self.before_edit = self.before_edit, lambda: None
            with torch.cuda.stream(torch.cuda.Stream()) if self.captured else nullcontext():
                # Cloned in this stream too: another one would not wait for the clones.
                kept = [tensor.clone() for tensor in self.state]
                for _ in range(2):
                    self.position.fill_(self.cache_len - ahead)  # no sequence reaches these
                    self.last.fill_(-1)  # no token is real, so that recurrent states stay
                    step()
                copy_all(kept, self.state)
            if self.captured:
                torch.cuda.synchronize()
            self.before_edit = before_edit
        if not self.captured or not self.runner.can_capture(tokens):
            return step
        with CapturedStep(self.pool) as captured:
            step()
        return captured.replay

    # Prompts ------------------------------------------------------------------------------------

    def prefill(
        self, row: int, ids: Sequence[int], start: int, chunk: int | None = None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Run one sequence's tokens from position `start` on, a chunk at a time.

        Yields the logits [1, V] after each chunk; if watched, also its last token's experts and
        weights [L, 1, A]. chunk: its tokens; None: --prefill_chunk. The caller launches its work
        on the logits before the recurrent states are copied.
        """
        short, size = self.is_short(row, len(ids)), self.chunk_size(row, len(ids), chunk)
        for begin in range(0, len(ids), size):
            part = ids[begin : begin + size]
            if short:
                logits, *routing = self.run_short_chunk(part, len(part) - 1, start)
            else:
                # Padding is overwritten before it is read. Tensors are no views: those would
                # recompile.
                padded = [*part, *[0] * self.padding(len(part))]
                tokens = send(torch.tensor([padded]), self.device)
                rows = self.rows[row : row + 1].clone()
                last = torch.full_like(self.last[:1], len(part) - 1)
                logits, *routing = self.run_chunk(tokens, rows, last, start + tokens.shape[1])
            start += len(part)
            yield logits, *(layers[:, len(part) - 1 : len(part)] for layers in routing)
            self.snapshots.take(row, start)

    def is_short(self, row: int, tokens: int) -> bool:
        """Whether this many tokens of a row run as short chunks, which are captured for row 0."""
        return row == 0 and tokens <= MAX_SHORT_CHUNKS * max(self.short_chunks, default=0)

    def short_chunk(self, tokens: int) -> int:
        """Return the size of the short chunk for the next of these tokens: the smallest for all."""
        return next((size for size in self.short_chunks if tokens <= size), self.short_chunks[-1])

    def chunk_size(self, row: int, tokens: int, chunk: int | None = None) -> int:
        """Return how many of a row's tokens run at once. chunk: the most that may."""
        chunk = chunk or self.options.prefill_chunk
        return min(chunk, self.short_chunk(tokens)) if self.is_short(row, tokens) else chunk

    def padding(self, tokens: int) -> int:
        """Return how much padding a chunk of a prompt gets, so that few lengths are different."""
        short = tokens <= PADDING_MULTIPLE and not self.options.compile_prefill
        multiple = SHORT_MULTIPLE if short else PADDING_MULTIPLE
        return -tokens % multiple if self.pads else 0

    def run_chunk(self, tokens: Tensor, row: Tensor, last: Tensor, end: int) -> tuple[Tensor, ...]:
        """`run_model` on one chunk [1, Q] that ends before `end`, captured if it repeats."""

        runner = self.prefill_runner
        if self.batch > 1:
            runner = InterruptedRunner(runner, self.between_layers)

        def run(tokens: Tensor, row: Tensor, last: Tensor) -> tuple[Tensor, ...]:
            return self.run_model(tokens, Chunk(row, end), last, runner)

        # Beside other sequences, prompts are not captured: that takes longer than they may pause.
        captures = self.batch == 1 and self.runner.can_capture(tokens.shape[1])
        if self.graphs is None or not captures:
            return run(tokens, row, last)
        return self.graphs((tokens.shape[1], end, self.watch), run, tokens, row, last)

    def run_short_chunk(self, part: Sequence[int], last: int, start: int) -> tuple[Tensor, ...]:
        """`run_model` on a short chunk of tokens from position `start` on, by the decode runner.

        last: the index of the last real token, -1 if none is. Padding repeats the last token, at
        the positions after it: most of it chooses the same experts, and its keys and values are
        overwritten before they are read. All numbers are one tensor: the GPU waits for each copy.
        """
        size = self.short_chunk(len(part))

        def run(numbers: Tensor) -> tuple[Tensor, ...]:
            tokens, positions, last = numbers.split([size, size, 1], dim=1)
            return self.run_model(tokens, positions, last[0], self.runner)

        padded = [*part, *[part[-1]] * (size - len(part))]
        numbers = torch.tensor([[*padded, *range(start, start + size), last]])
        numbers = send(numbers, self.device)
        if self.graphs is None or not self.runner.can_capture(size):
            return run(numbers)
        return self.graphs((size, None, self.watch), run, numbers)

    def warm_up_short_prompts(self) -> None:
        """Compile and capture short chunks, of no real token, where no sequence reaches."""
        for size in self.short_chunks:
            with without_tuning():
                for _ in range(2):  # a GraphCache captures the second call
                    self.run_short_chunk([0] * size, -1, self.cache_len - size)

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
                left = max(0, self.max_seq_len - len(ids))
                raise ValueError(
                    f"{len(ids)} prompt tokens and {max_new_tokens} new ones exceed --max_seq_len "
                    f"{self.max_seq_len}: raise it, or ask for at most {left} with --max_new_tokens"
                )

    def candidates(self, sampling: Sampling) -> int:
        """Return among how many of the likeliest tokens a step chooses; 0 is greedy."""
        return sampling.candidates(self.seen.shape[1])

    def start_row(
        self, row: int, ids: Sequence[int], sampling: Sampling, chunk: int | None = None
    ) -> Iterator[None]:
        """Begin a prompt: keep its prefix that is in the row, and return the rest of the work.

        The iterator runs a chunk of the prompt at each step; after the last, it samples the token
        after the prompt into `token`, and `first_tokens` waits for that. Until then the row is
        idle. Call `warm_up` before, since compiling takes long.
        """
        if self.edited or self.row_is_edited[row]:
            set_edits(self.edits, row, sampling)
            self.row_is_edited[row] = self.edited
        start = min(common_prefix(self.ids[row], ids), self.cached[row], len(ids) - 1)
        start = self.snapshots.go_back(row, start)
        self.prefilled += len(ids) - start
        self.ids[row], self.cached[row] = list(ids), start
        if self.batch > 1:
            # A step of others writes a key and a value at an idle row's position, also between
            # layers of this prompt: the row is idle behind all of it.
            self.set_place(row, last=-1, position=len(ids))
        chunk = self.chunk_size(row, len(ids) - start, chunk)
        return self.run_prompt(row, ids, sampling, chunk)

    def run_prompt(
        self, row: int, ids: Sequence[int], sampling: Sampling, chunk: int
    ) -> Iterator[None]:
        """Run a prompt from where the row's cache ends, then sample; yield between chunks.

        Sampling is prepared after the prompt is launched. Before it, the GPU would wait for that.
        """
        start = self.cached[row]
        for logits, *routing in self.prefill(row, ids[start:], start, chunk):
            self.cached[row] = min(self.cached[row] + chunk, len(ids))
            if self.cached[row] < len(ids):
                yield
            else:
                self.prepare_sampling(row, ids, sampling)
                self.set_place(row, last=-1, position=len(ids) - 1)
                self.choose_first(row, sampling, logits, *routing)
                self.first_tokens = self.read_tokens(posted=False)
        self.set_place(row, last=0, position=len(ids))

    def choose_first(self, row: int, sampling: Sampling, logits: Tensor, *routing: Tensor) -> None:
        """Sample a row's token after its prompt. The row is idle meanwhile."""
        state, edits = self.single
        own = self.view_rows(row, row + 1)
        if self.batch > 1:
            copy_all((*own[0], *own[1]), (*state, *edits))
        edited = self.edit_step(edits, state, logits) if self.row_is_edited[row] else logits
        self.choose_tokens(state, edited, self.candidates(sampling))
        if self.batch > 1:
            copy_all(state, own[0])
        if self.watch:
            self.watched[row] = self.record_details(state.token, logits, routing)[0]

    def set_prompt_token(self, row: int, ids: Sequence[int], sampling: Sampling) -> None:
        """Let the next step run a row's next prompt token. It samples, too: only after the last
        prompt token is that the sequence's.
        """
        at = self.cached[row]
        self.token[row].fill_(ids[at])
        self.set_place(row, last=0, position=at)
        if at == len(ids) - 1:
            self.prepare_sampling(row, ids, sampling)

    def set_place(self, row: int, last: int, position: int) -> None:
        """Set the index of a row's last real query, -1 if it is idle, and its position."""
        self.last[row].fill_(last)
        self.position[row].fill_(position)

    def prepare_sampling(self, row: int, ids: Sequence[int], sampling: Sampling) -> None:
        """Let a row sample so, with a new seed if none is given. It has seen these tokens alone."""
        self.controls[row] = send(sampling.controls(self.seen.shape[1]), self.device)
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        self.seeds[row].fill_(seed)
        self.seen[row].fill_(False).index_fill_(0, send(torch.tensor(ids), self.device), True)

    def stop_row(self, row: int) -> None:
        """Make a row idle. A step may write past its tokens in the cache, and nowhere else."""
        self.set_place(row, last=-1, position=self.cached[row])

    def swap_rows(self, a: int, b: int) -> None:
        """Exchange two rows: their sequences and what is remembered of these."""
        self.memory.exchange(a, b, max(self.cached[a], self.cached[b]))
        self.snapshots.assign({a: b, b: a})
        for tensor in (*self.state, *self.edits):
            tensor[a], tensor[b] = tensor[b], tensor[a].clone()
        lists: tuple[list, ...] = self.ids, self.cached, self.row_is_edited
        for values in lists:
            values[a], values[b] = values[b], values[a]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make an idle row remember the first tokens of another row, at most `length`."""
        self.memory.copy(source, target, length)
        self.snapshots.assign({target: source})
        self.ids[target], self.cached[target] = self.ids[source][:length], length

    def start_prompts(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """`start_row` for each prompt, with the next seed in the next row; other rows are idle."""
        self.prefilled = 0
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        for row in range(self.batch):
            if row < len(prompts):
                for _ in self.start_row(row, prompts[row], sampling.with_seed(seed + row)):
                    pass
            else:
                self.stop_row(row)

    # Streams ------------------------------------------------------------------------------------

    def stream(self, ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
        """`stream_all` for one sequence: its tokens one by one."""
        return (tokens[0] for tokens in self.stream_all([ids], max_new_tokens, sampling))

    def stream_all(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling
    ) -> Iterator[list[int]]:
        """Continue each prompt's token ids by max_new_tokens; yield the next token of each.

        A prompt's prefix that is in the cache is not recomputed. If a step does not need the host,
        the next one is in flight while tokens are read. Raises ValueError as `check_prompts`,
        before anything runs; NotFiniteError, after a reset, if a row's logits are not finite.
        """
        self.check_prompts(prompts, max_new_tokens)
        if max_new_tokens == 0:
            return
        self.edited = sampling.edits_logits
        step = self.warm_up(self.candidates(sampling))
        self.start_prompts(prompts, sampling)
        tokens = self.first_tokens
        overlaps = self.captured and not self.runner.needs_host

        def launch() -> Callable[[], list[int]]:
            step()
            for row in range(len(prompts)):
                self.cached[row] += 1
            return self.read_tokens()

        for left in reversed(range(max_new_tokens)):
            current = tokens
            if left and overlaps:
                tokens = launch()
            found = current()[: len(prompts)]
            if NOT_FINITE in found:
                self.reset()  # the cache has NaNs
                raise NotFiniteError
            for ids, token in zip(self.ids, found, strict=False):
                ids.append(token)
            yield found
            if left and not overlaps:  # the host does the step's work, which would delay the tokens
                tokens = launch()


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each tensor to the one in its place."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
