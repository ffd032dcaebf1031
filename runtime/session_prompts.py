"""How a session runs prompts: in chunks, short ones in the graphs of decode steps.

A prompt's prefix that a row has in its cache is not recomputed.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from model import Block, Chunk, Transformer
from ops.compile_ahead import collect
from ops.gpu import gpu_of
from ops.inductor import without_tuning
from ops.plain.attention import SHORT_CACHE
from ops.step.logit_edits import edit_logits
from ops.step.token_draw import draw_tokens
from runtime.compile_ahead import compile_ahead, stop_compiling
from runtime.fused_decode import FusedRunner, one_of_each_kind
from runtime.fused_prompt import PromptRunner
from runtime.graphs import GraphCache, warn_of_capture
from runtime.logit_edits import set_edits
from runtime.runner import InterruptedRunner
from runtime.sampling import Sampling
from runtime.session_rows import copy_all
from runtime.session_steps import PADDING_MULTIPLE, DecodeSteps, SessionOptions
from runtime.transfers import integers, send, sendable

# Captured prompts of up to PADDING_MULTIPLE tokens, if they are not compiled, are padded to a
# multiple of this. A larger multiple would cost time: padding chooses experts, too, and 64 tokens
# read nearly all experts of most models.
SHORT_MULTIPLE = 8
# One graph runs a chunk of such a size from any position on. A shorter chunk is padded; experts do
# not compute the padding.
ANYWHERE_CHUNKS = 64, 128, 256, 384, 512, 768, 1024
# A graph cannot be interrupted. While other answers run, a prompt takes only graphs of at most this
# many seconds: half of what a pause of an answer may be.
LONGEST_WAIT = 0.025
# These chunks and the longest one take the tiles of all others. 40 is no multiple of 16.
PREPARED_CHUNKS = 40, 64, 128, 256, 512, 1024, 2048
# Longer chunks differ only in how pairs are counted: their kernels are compiled ahead, not run.
COMPILED_CHUNKS = *PREPARED_CHUNKS, 4096, 8192
# A captured session runs a short prompt in row 0 like a decode step of several tokens: compiled, in
# one graph for all positions. The runner names the sizes of such chunks. A prompt is short if it
# takes at most this number of the largest.
MAX_SHORT_CHUNKS = 2
# Over a long cache short chunks are no longer than this: more queries of a sequence take another
# attention kernel, which was not measured.
LONG_CACHE_CHUNK = 8


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


def expected_chunks(sizes: tuple[int, ...], lengths: tuple[int, ...] | None) -> list[int]:
    """Return the sizes of short chunks that prompts of these lengths take; None: any, so all."""
    if lengths is None or not sizes:
        return [*sizes]
    most = sizes[-1]
    parts = (part for n in lengths if n <= MAX_SHORT_CHUNKS * most for part in (n, n - most))
    return sorted({smallest_chunk(sizes, part) for part in parts if part > 0})


def smallest_chunk(sizes: tuple[int, ...], tokens: int) -> int:
    """Return the smallest chunk for these tokens, or for the next of them."""
    return next((size for size in sizes if tokens <= size), sizes[-1])


def runner_ahead(session: DecodeSteps) -> FusedRunner | None:
    """Return the runner whose kernels are compiled before they run: the fused one of one rank."""
    runner = session.runner
    if not session.captured or type(runner) is not FusedRunner or runner.all_reduces:
        return None
    return runner


class Prompts(DecodeSteps):
    """The prompts of a session, one row at a time, between the steps of other rows."""

    def __init__(self, model: Transformer, max_seq_len: int, options: SessionOptions):
        super().__init__(model, max_seq_len, options)
        self.graphs = None
        if self.captures_prompts:  # `capture_next` captures for several rows: no turn waits
            self.graphs = GraphCache(self.device, captures_repeats=self.batch == 1)
        # Called between the layers of a prompt; None: no other sequence waits.
        self.between_layers: Callable[[], None] | None = None
        # Launches what else is to be compiled ahead.
        self.launch_more: Callable[[FusedRunner], None] = lambda runner: None
        # Called with the position and the number of a chunk's tokens, after the chunk.
        self.after_chunk: Callable[[int, int], None] = lambda start, count: None
        self.short_chunks: tuple[int, ...] = ()
        if self.captures_prompts:
            self.short_chunks = short_chunk_sizes(self.runner.short_chunks, options, self.cache_len)
        self.first_tokens: Callable[[], list[int]]  # waits for the tokens after the newest prompt
        # Keys of graphs: those that `capture_next` has still to capture, and all that it ever had.
        self.left: deque[tuple] = deque((size, "anywhere", False) for size in ANYWHERE_CHUNKS)
        self.expected = {*self.left}
        self.replay_seconds: dict[tuple, float] = {}  # of graphs captured by `capture_next`
        self.replayed = 0.0  # seconds of the latest chunk's graph; 0: unknown, or no graph

    def warm_up(self, candidates: int, size: int | None = None) -> Callable[[], None]:
        if not self.steps:
            self.compile_kernels()
            for size in expected_chunks(self.short_chunks, self.options.prompt_lengths):
                self.warm_up_short_chunk(size)
        return super().warm_up(candidates, size)

    def compile_kernels(self) -> None:
        """Compile the kernels of steps and short prompts side by side, if they are fused ones."""
        runner = runner_ahead(self)
        if runner is None:
            stop_compiling()
            return
        steps = sorted({size for size in (1, 2, 4, 8, self.batch) if size <= self.batch})

        def launch() -> None:
            for reach in runner.reaches(1, self.cache_len):
                for size in steps:
                    runner.launch_all(size, 1, reach)
            for size in self.short_chunks:
                runner.launch_all(1, size)
            if isinstance(self.prefill_runner, PromptRunner):
                launch_chunks(self, self.prefill_runner, one_of_each_kind(runner))
            for size in steps:
                logits = torch.empty(size, self.seen.shape[1], device=self.device)
                rows, edits = self.first_rows(size)
                logits = edit_logits(edits, rows, logits)
                for greedy in (False,) if self.joins_greedy else (False, True):
                    draw_tokens(logits, rows, greedy=greedy)
                if self.outbox:
                    self.outbox.post(rows.token)
            self.launch_more(runner)

        compile_ahead(collect(launch), gpu_of(self.device))

    def forget_graphs(self) -> None:
        """Capture all steps and prompts anew, since their code has changed."""
        self.steps.clear()
        if self.captured:  # PyTorch forgets a pool when its last graph has gone
            self.pool = torch.cuda.graph_pool_handle()
        self.replay_seconds.clear()
        if self.graphs is not None:
            self.graphs = GraphCache(self.device, captures_repeats=self.batch == 1)

    def expect(self, longest: int) -> None:
        """Allow texts of up to `longest` tokens.

        If SessionOptions.longest is less, all steps are captured anew, once: then any text fits.
        """
        if self.longest and longest > self.longest:
            self.longest = None
            self.forget_graphs()

    def warm_up_short_chunk(self, size: int) -> None:
        """Compile and capture a short chunk, of no real token, where no sequence reaches."""
        numbers = self.short_numbers([0] * size, -1, self.cache_len - size)
        numbers = send(numbers, self.device)
        with without_tuning():
            for _ in range(2):
                with self.runner.warming_up():
                    self.run_short_numbers(numbers)
            if self.captures(size):
                key = size, None, self.watch
                self.graphs.prepare(key, self.run_short_numbers, numbers)

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
        self.note_lengths(row)
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

        Sampling is prepared after the prompt is launched: the GPU does not wait for it then.
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
        """Let the next step run a row's next prompt token.

        The step samples, too. The sampled token is the sequence's only after the last prompt token.
        """
        at = self.cached[row]
        self.token[row].fill_(ids[at])
        self.set_place(row, last=0, position=at)
        if at == len(ids) - 1:
            self.prepare_sampling(row, ids, sampling)

    def prefill(
        self, row: int, ids: Sequence[int], start: int, chunk: int | None = None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Run one sequence's tokens from position `start` on, a chunk at a time.

        Yields the logits [1, V] after each chunk; if watched, also its last token's experts and
        weights [L, 1, A]. chunk: its tokens; None: `prefill_chunk`. The caller launches its work
        on the logits before the recurrent states are copied.
        """
        short, size = self.is_short(row, len(ids)), self.chunk_size(row, len(ids), chunk)
        for begin in range(0, len(ids), size):
            part = ids[begin : begin + size]
            if short:
                logits, *routing = self.run_short_chunk(part, len(part) - 1, start)
            else:
                Q, anywhere = self.padded(row, len(part), start)
                end = start + Q
                # Padding is overwritten before it is read.
                padded = [*part, *[0] * (Q - len(part))]
                places = range(start, end) if anywhere else ()
                numbers = integers([row, 0, len(part) - 1, 0, *padded, *places])
                logits, *routing = self.run_chunk(numbers, Q, end)
            start += len(part)
            yield logits, *(layers[:, len(part) - 1 : len(part)] for layers in routing)
            self.snapshots.take(row, start)
            self.after_chunk(start - len(part), len(part))

    def is_short(self, row: int, tokens: int) -> bool:
        """Whether this many tokens of a row run as short chunks, which are captured for row 0."""
        return row == 0 and tokens <= MAX_SHORT_CHUNKS * max(self.short_chunks, default=0)

    def chunk_size(self, row: int, tokens: int, chunk: int | None = None) -> int:
        """Return how many of a row's tokens run at once. chunk: the most that may."""
        chunk = chunk or self.prefill_chunk
        if not self.is_short(row, tokens):
            return chunk
        return min(chunk, smallest_chunk(self.short_chunks, tokens))

    def runs_anywhere(self, row: int, tokens: int, start: int) -> bool:
        """Whether one graph runs a row's chunk of this many tokens from any position on.

        That graph runs in row 0, and cannot be interrupted: others must not wait long. A first turn
        has a graph of its own, which takes in no pending tokens and copies no ring. It runs
        anywhere only if the graph for any position is captured already.
        """
        waits, end = self.between_layers is None or is_brief(self, tokens), start + tokens
        if row or not waits or end > self.cache_len or not self.captures(tokens):
            return False
        is_later = start > 0 or self.graphs.has((tokens, "anywhere", self.watch))
        return is_later and self.prefill_runner.takes_positions(tokens, end)

    def padded(self, row: int, tokens: int, start: int) -> tuple[int, bool]:
        """Return how many tokens a chunk has with padding, so that few lengths are different.

        Also return whether it runs anywhere.
        """
        if not self.pads:
            return tokens, False
        size = smallest_chunk(ANYWHERE_CHUNKS, tokens)
        if tokens <= size and self.runs_anywhere(row, size, start):
            return size, True
        short = tokens <= PADDING_MULTIPLE and not self.options.compile_prefill
        multiple = SHORT_MULTIPLE if short else PADDING_MULTIPLE
        Q = -(-tokens // multiple) * multiple
        return Q, size != Q and self.runs_anywhere(row, Q, start)

    def run_chunk(self, numbers: Tensor, Q: int, end: int) -> tuple[Tensor, ...]:
        """`run_model` on one chunk of Q tokens that ends before `end`, captured if it repeats.

        numbers, on the host: its row, 0, the index of its last real token, 0, its tokens, and if it
        runs anywhere their positions: each part is aligned for vector loads. They are one tensor,
        since the host takes as long for a copy as the GPU for a few kernels.
        """
        runner, anywhere = self.prefill_runner, len(numbers) > 4 + Q
        key = Q, "anywhere" if anywhere else end, self.watch
        self.replayed = self.replay_seconds.get(key, 0.0)
        if self.between_layers and not anywhere:
            runner = InterruptedRunner(runner, self.between_layers)

        def run(numbers: Tensor) -> tuple[Tensor, ...]:
            row, last, tokens = numbers[:1], numbers[2:3], numbers[4 : 4 + Q].unsqueeze(0)
            if anywhere:
                return self.run_model(tokens, numbers[4 + Q :].unsqueeze(0), last, runner)
            if self.options.compile_prefill:  # views would recompile
                row, last, tokens = row.clone(), last.clone(), tokens.clone()
            return self.run_model(tokens, Chunk(row, end), last, runner)

        # A capture takes longer than others may pause: in a batch only chunks that run anywhere
        # have one.
        if not self.captures(Q) or (self.batch > 1 and not anywhere):
            return run(send(numbers, self.device))
        return run_graph(self, key, run, numbers)

    def run_short_chunk(self, part: Sequence[int], last: int, start: int) -> tuple[Tensor, ...]:
        """`run_model` on a short chunk of tokens from position `start` on, by the decode runner.

        last: the index of the last real token, -1 if none is.
        """
        numbers = self.short_numbers(part, last, start)
        if not self.captures(size := numbers.shape[1] // 2):
            return self.run_short_numbers(send(numbers, self.device))
        return run_graph(self, (size, None, self.watch), self.run_short_numbers, numbers)

    def captures(self, size: int) -> bool:
        """Whether chunks of this size can be captured."""
        return self.graphs is not None and self.runner.can_capture(size)

    def short_numbers(self, part: Sequence[int], last: int, start: int) -> Tensor:
        """Return a short chunk's tokens and positions, then `last`, on the host [1, 2 size + 1].

        Padding repeats the last token, at the positions after it: most of it chooses the same
        experts, and its keys and values are overwritten before they are read. All numbers are one
        tensor: the GPU waits for each copy.
        """
        size = smallest_chunk(self.short_chunks, len(part))
        padded = [*part, *[part[-1]] * (size - len(part))]
        return integers([*padded, *range(start, start + size), last]).unsqueeze(0)

    def run_short_numbers(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """`run_model` on a short chunk. numbers: those of `short_numbers`, on the device."""
        size = numbers.shape[1] // 2
        tokens, positions, last = numbers.split([size, size, 1], dim=1)
        return self.run_model(tokens, positions, last[0], self.runner)


def launch_chunks(session: Prompts, runner: PromptRunner, blocks: Sequence[Block]) -> None:
    """Launch the kernels of prompts that are not short, for `collect`.

    Compiled one by one they would delay the first of these prompts by 4 to 10 s.
    """
    for tokens, end, anywhere in expected_prompts(session):
        places = torch.arange(end - tokens, end, device=session.device)
        span = places.unsqueeze(0) if anywhere else Chunk(session.rows[:1], end)
        runner.launch_chunk(blocks, tokens, span)


def expected_prompts(session: Prompts) -> Iterator[tuple[int, int, bool]]:
    """Yield chunks of prompts: tokens, with padding, where they end, whether they run anywhere.

    If the prompts' lengths are known, these are their chunks; else some that take all kernels.
    """
    if session.options.prompt_lengths is None:
        longest = min(session.prefill_chunk, session.cache_len)
        sizes = [*(size for size in COMPILED_CHUNKS if size < longest), longest]
        yield from ((size, size, False) for size in sizes)
        for size in (sizes[0], ANYWHERE_CHUNKS[-1]):  # a later turn, with few and many tokens
            if 2 * size <= session.cache_len:
                yield size, 2 * size, False
            tokens, anywhere = session.padded(0, size, size)
            if anywhere:
                yield tokens, size + tokens, True
        return
    for length in session.options.prompt_lengths:
        size = session.chunk_size(0, length)
        for begin in range(0, 0 if session.is_short(0, length) else length, size):
            tokens, anywhere = session.padded(0, min(size, length - begin), begin)
            yield tokens, begin + tokens, anywhere


def is_brief(session: Prompts, size: int) -> bool:
    """Whether the graph of a chunk of this size was measured to take less than LONGEST_WAIT."""
    key = size, "anywhere", session.watch
    return session.replay_seconds.get(key, LONGEST_WAIT) < LONGEST_WAIT


def brief_chunk(session: Prompts, end: int) -> int:
    """Return the largest chunk with a brief graph, for a prompt up to `end`; 0: there is none.

    The prompt has to be in row 0.
    """
    brief = itertools.takewhile(partial(is_brief, session), ANYWHERE_CHUNKS)
    size = max(brief, default=0)
    return size if size and session.prefill_runner.takes_positions(size, end + size) else 0


def run_graph(session: Prompts, key: tuple, run: Callable, numbers: Tensor) -> tuple[Tensor, ...]:
    """Call `run` through the graph of a key; without one, leave the graph to `capture_next`.

    numbers: the argument of `run`, on the host. A session of one row captures repeated calls.
    """
    if session.batch > 1 and not (session.graphs.has(key) or key in session.expected):
        session.expected.add(key)
        session.left.append(key)
    return session.graphs(key, run, sendable(numbers, session.device))


def capture_next(session: Prompts) -> bool:
    """Capture one of the chunks that are left; return whether to go on with others.

    A server calls this while it has nothing to do. The memory of row 0 stays. After a chunk that
    cannot be captured, for want of memory, no other is.
    """
    if not session.left:
        return False
    size, end, session.watch = key = session.left.popleft()
    session.between_layers = None
    start = max(0, min(size, session.cache_len - size))  # where a later turn may be
    vocabulary = session.seen.shape[1]
    tokens = [n % vocabulary for n in range(size)]  # one token would choose few experts
    numbers = integers([0, 0, size - 1, 0, *tokens, *range(start, start + size)])
    try:
        if end is None:
            session.warm_up_short_chunk(size)
        elif session.runs_anywhere(0, size, start):
            session.graphs.expect(key)
            with session.keeping(0, start, start + size):
                run = partial(session.run_chunk, numbers, size, start + size)
                run()  # captures it
                if session.graphs.has(key):
                    session.replay_seconds[key] = seconds_of(run, session.device)
            if session.graphs.is_full:
                session.left.clear()
    except RuntimeError as error:  # no memory to run it
        session.left.clear()
        warn_of_capture("prompts", error)
    return bool(session.left)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, on its device, too."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    begun = now()
    call()
    return now() - begun


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
