"""Sequences being continued: the cache they live in, how a next token is chosen, and the step that adds one to each.

The way of one token: `Session.decode` runs the model on the tokens chosen last, chooses the next ones on the device and
moves on by one position. Nothing in it depends on a value that the host would have to read, so on CUDA the whole step
is one graph that feeds itself; the host only reads each token to print it, one step behind.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import BLOCK, Chunk
from compiling import compile_settings
from model import FEW_TOKENS, Stages, Transformer
from recording import Recording, Repeated

CANDIDATES = 256  # tokens that sampling looks at: one compiled step serves every top_k up to this
RANKED = 2048  # so many numbers are put in order by comparing each with each
PREFILL_CHUNK = 2048  # tokens of a prompt that are computed at a time
PREFILL_MULTIPLE = 2 * FEW_TOKENS  # a compiled prefill sees lengths padded to this: one graph serves every prompt
TOP = 20  # likeliest tokens that are told of beside a chosen one
SPARE = 16  # positions of every cache past the last: for warm-up, and for drafts that are not taken


# Sampling -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0 is greedy; top_k None keeps the whole vocabulary."""

    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self):
        limits = {
            "temperature": (self.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1 (1 is greedy, a large one keeps every token)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p < 1, "at least 0 and below 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0 (1 is none)"),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "at least 0 and below 2 ** 63"),
        }
        for name, (good, rule) in limits.items():
            if not good:
                raise ValueError(f"--{name} {getattr(self, name)}: it must be {rule}")


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """values [B, N], above -inf -> the k largest, falling, and their indices [B, k].

    For GPUs, where `torch.topk` is 4 passes and a sort, 60 us on an H200. Here a value's place is the number of larger
    ones, which is one sum over all pairs. Where N is large, blocks are first ranked by their maxima: what is among the
    k largest stands in one of the first k blocks, since each block before its own holds something larger.
    """
    N = values.shape[-1]
    if k > RANKED // 4:
        return values.topk(k, dim=-1)
    if N > RANKED:
        size = -(-N // RANKED)
        blocks = F.pad(values, (0, -N % size), value=float("-inf")).unflatten(-1, (-1, size))
        _, first = largest(blocks.amax(dim=-1), k)
        best, at = largest(blocks.gather(1, first.unsqueeze(-1).expand(-1, -1, size)).flatten(1), k)
        return best, first.gather(1, at // size) * size + at % size
    here, places = torch.arange(N, device=values.device), torch.arange(k, device=values.device)
    this, other = values.unsqueeze(-1), values.unsqueeze(-2)
    place = ((other > this) | ((other == this) & (here < here.unsqueeze(-1)))).sum(dim=-1)
    indices = torch.where(place.unsqueeze(-2) == places.unsqueeze(-1), here, 0).sum(dim=-1)
    return values.gather(1, indices), indices


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """logits [B, V] -> the same, those of tokens in `seen` (bool [B, V]) made less likely (Keskar et al. 2019, 4.1)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def shortlist(logits: Tensor, controls: Tensor, seen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logits fp32 [B, V] -> the `count` likeliest tokens [B, count] and their weights fp32 [B, count].

    controls fp32 [5]: temperature, top_k, top_p, min_p, repetition penalty (of tokens in `seen`, bool [B, V]). Weights
    are in the ratio of the probabilities to draw with; those of tokens that the controls leave out are 0.
    """
    temperature, top_k, top_p, min_p, penalty = controls.unbind()
    logits = penalise(logits, seen, penalty)
    values, tokens = (largest if logits.is_cuda else torch.topk)(logits, count)
    among = torch.arange(count, device=logits.device) < top_k
    probabilities = torch.where(among, values / temperature, float("-inf")).softmax(dim=-1)
    likelier = probabilities.cumsum(dim=-1) - probabilities  # the mass before each candidate
    keep = among & (likelier < top_p) & (probabilities >= min_p * probabilities[:, :1])
    return tokens, torch.where(keep, probabilities, 0.0)


def sample(logits: Tensor, controls: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    """logits fp32 [B, V] -> tokens [B, 1], on the device and without synchronisation; the rest as `shortlist` has it.

    noise [B, N]: standard exponential, above 0; the largest p / noise among the N likeliest is a draw from p (Gumbel's
    trick, without the sum and the search of `torch.multinomial`). No noise: the likeliest token.
    """
    if noise is None:
        return penalise(logits, seen, controls[4]).argmax(dim=-1, keepdim=True)
    tokens, weights = shortlist(logits, controls, seen, noise.shape[-1])
    return tokens.gather(-1, (weights / noise).argmax(dim=-1, keepdim=True))


def settle(
    token: Tensor, position: Tensor, seen: Tensor, logits: Tensor, controls: Tensor, noise: Tensor | None
) -> None:
    """`sample`, and what a step does then (`advance`)."""
    advance(token, position, seen, sample(logits, controls, seen, noise))


def advance(token: Tensor, position: Tensor, seen: Tensor, chosen: Tensor) -> None:
    """In place: `token` [B, 1] becomes the chosen one, `position` [B, 1] the next, and `seen` [B, V] is told."""
    token.copy_(chosen)
    position.add_(1)
    rows = torch.arange(len(seen), device=seen.device)
    seen[rows, token.squeeze(1)] = torch.ones_like(rows, dtype=torch.bool)  # not True, which the host would copy there


# Decoding -----------------------------------------------------------------------------------------------------------


class Details(NamedTuple):
    """What the model's pass that chose a token said: before temperature and the other controls."""

    logprob: float  # of the token
    top: list[tuple[int, float]]  # the TOP likeliest tokens and their log-probabilities, falling
    experts: list[list[int]]  # [L, A], of the layers that have experts: where that pass went
    weights: list[list[float]]  # [L, A]


class Session:
    """`batch` sequences on one device: their cache, the tokens that stand in it, and the step that adds one to each.

    A model holds the cache, so it serves one session at a time, the newest; a session of another size compiles anew.

    max_seq_len: the most tokens a sequence may have, prompt and answer together.
    compile: the decode step, on CUDA also recorded as a graph, and there prompts whose length comes again, too;
    compile_prefill: the prompt's pass as well.
    prefill_chunk: so many tokens of a prompt are computed at a time, which bounds the memory for activations.
    watch: set it before an answer to find the Details of each sequence's token in `details` whenever tokens are
    yielded. A step that is watched is compiled and recorded by itself, so that others pay nothing for it.
    """

    def __init__(self, model: Transformer, max_seq_len: int, compile: bool = False, compile_prefill: bool = False,
                 batch: int = 1, prefill_chunk: int = PREFILL_CHUNK):  # fmt: skip
        self.model, self.max_seq_len, self.batch, self.prefill_chunk = model, max_seq_len, batch, prefill_chunk
        self.device = device = model.norm.weight.device
        self.compiled, self.compile_prefill = compile, compile_prefill
        self.recorded = compile and device.type == "cuda" and model.recordable(batch)
        # A prompt's pass is recorded as well: up to some hundred tokens take the host longer than the GPU.
        repeats = self.recorded and not model.host_driven and model.recordable(PREFILL_MULTIPLE)
        self.prefill_multiple = PREFILL_MULTIPLE if compile_prefill or repeats else 1
        self.slots = -(-(max_seq_len + max(SPARE, self.prefill_multiple)) // BLOCK) * BLOCK
        model.setup_cache(batch, self.slots)
        self.caches = [block.attention.cache for block in model.layers]
        if compile or compile_prefill:
            compile_settings()
        self.decode_stages = _compile_stages(model, dynamic=False) if compile else Stages()
        self.prefill_stages = _compile_stages(model, dynamic=True) if compile_prefill else Stages()
        self.settle = torch.compile(settle, fullgraph=True, dynamic=False) if compile else settle
        # What a step reads and writes in place, so that a recorded step finds it at the same address.
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.first = torch.zeros(batch, dtype=torch.int64, device=device)
        self.seen = torch.zeros(batch, model.args.vocab_size, dtype=torch.bool, device=device)
        self.controls = torch.ones(5, device=device)
        self.rows = torch.arange(batch, device=device)
        sparse = model.args.n_layer - len(set(model.args.dense_layers))
        self.routing = 2, sparse, model.args.n_active  # experts, then weights
        self.top = min(TOP, model.args.vocab_size)
        width = 1 + 2 * self.top + 2 * sparse * model.args.n_active
        self.watch, self.watched = False, torch.zeros(batch, width, device=device)
        self.details: list[Details] = []
        self.generator = torch.Generator(device)
        self.steps: dict[tuple[int, bool], Callable[[], None]] = {}
        self.repeated = Repeated(self.generator) if repeats else None
        self.reset()

    def reset(self) -> None:
        """Forget the sequences. (What is masked counts zero times its value, and in fp16 one may have overflowed.)"""
        for cache in self.caches:
            cache.clear()
        # The tokens of each sequence known to the host; of the first ones, so many as `cached` says, the cache knows.
        self.ids: list[list[int]] = [[] for _ in range(self.batch)]
        self.cached = [0] * self.batch
        self.prefilled = 0  # how many prompt tokens the last call had to compute

    def choose(self, logits: Tensor, candidates: int) -> None:
        """Sample each next token among so many of the likeliest (0: greedy) into `token`, for the next `position`."""
        noise = None
        if candidates:
            noise = torch.empty(self.batch, candidates, device=self.device).exponential_(generator=self.generator)
        self.settle(self.token, self.position, self.seen, logits, self.controls, noise)

    def keep(self, logits: Tensor, routing: Sequence[Tensor]) -> None:
        """If watched: put what Details are made of into `watched`. routing: the experts and weights [L, B, A]."""
        if self.watch:  # a row of numbers, so that it takes one copy; ids and experts are far below 2 ** 24
            logprobs = logits.log_softmax(dim=-1)
            parts = logprobs.gather(1, self.token), *logprobs.topk(self.top, dim=-1)
            routing = (part.transpose(0, 1).flatten(1) for part in routing)
            self.watched.copy_(torch.cat([part.float() for part in (*parts, *routing)], dim=1))

    def read(self) -> Callable[[], list[int]]:
        """Start the copy of the tokens chosen last; the function returned waits for it, and sets `details`."""
        token = read_later(self.token)
        if not self.watch:
            return token
        watched = read_later(self.watched)

        def finish() -> list[int]:
            rows, self.details = torch.tensor(watched()).view(self.batch, -1), []
            for row in rows:
                top, ids, routing = row[1:].split([self.top, self.top, len(row) - 1 - 2 * self.top])
                experts, weights = routing.view(self.routing)
                top = list(zip(ids.int().tolist(), top.tolist(), strict=True))
                self.details.append(Details(row[0].item(), top, experts.int().tolist(), weights.tolist()))
            return token()

        return finish

    def run(self, tokens: Tensor, where: Tensor | Chunk, last: Tensor, stages: Stages) -> tuple[Tensor, ...]:
        """The model's logits [B, V], and of a pass that is watched the experts and weights [L, T, A]."""
        found = self.model(tokens, where, last, return_routing=self.watch, stages=stages)
        return found if self.watch else (found,)

    def prefill(self, row: int, ids: Sequence[int], start: int) -> tuple[Tensor, ...]:
        """Run one sequence's tokens at positions from `start` on, chunk by chunk -> logits of what follows, [1, V].

        Of a pass that is watched, also the last token's experts and weights [L, 1, A].
        """
        for part in torch.tensor(ids).to(self.device).split(self.prefill_chunk):
            # Padding is overwritten before it is read. No tensor is a view: the compiler makes another case of those.
            tokens = F.pad(part.unsqueeze(0), (0, -len(part) % self.prefill_multiple))
            last = self.first[:1] + (len(part) - 1)
            end = start + tokens.shape[1]
            logits, *routing = self.take_in(tokens, self.rows[row : row + 1].clone(), last, end)
            start += len(part)
        return logits, *(of_tokens[:, len(part) - 1 : len(part)] for of_tokens in routing)

    def take_in(self, tokens: Tensor, row: Tensor, last: Tensor, end: int) -> tuple[Tensor, ...]:
        """`run` of a sequence's tokens [1, Q], the last of which goes to position end - 1."""

        def run(tokens: Tensor, row: Tensor, last: Tensor) -> tuple[Tensor, ...]:
            return self.run(tokens, Chunk(row, end), last, self.prefill_stages)

        if self.repeated is None or not self.model.recordable(tokens.shape[1]):
            return run(tokens, row, last)
        return self.repeated((tokens.shape[1], end, self.watch), run, tokens, row, last)

    def decode(self, candidates: int) -> None:
        """One step: the tokens chosen last go in at `position`, the next ones are chosen."""
        # What is not compiled reads the part of the cache that is in use, which the host knows for one sequence.
        alone = not self.compiled and self.batch == 1
        where = Chunk(self.rows, self.cached[0] + 1) if alone else self.position
        logits, *routing = self.run(self.token, where, self.first, self.decode_stages)
        self.choose(logits, candidates)
        self.keep(logits, routing)

    def warm_up(self, candidates: int) -> Callable[[], None]:
        """The decode step for so many candidates: compiled and, on CUDA, recorded, on the first call; then kept."""
        key = candidates, self.watch
        if key not in self.steps:
            self.steps[key] = self.record(lambda: self.decode(candidates))
        return self.steps[key]

    def record(self, step: Callable[[], None], count: int = 1) -> Callable[[], None]:
        """A step that runs `count` tokens from `position` on -> the same, compiled and, on CUDA, recorded.

        What a step reads and writes has to stay where it is, and what it draws has to come from `generator`.
        """
        if self.recorded:
            torch.cuda.synchronize()  # a step of the last answer may still be under way, and it moves `position`
        if self.compiled:
            with torch.cuda.stream(torch.cuda.Stream()) if self.recorded else nullcontext():
                for _ in range(2):
                    self.position.fill_(self.slots - count)  # positions that no sequence reaches
                    step()
        if not self.recorded or not self.model.recordable(self.batch * count):
            return step
        with Recording(self.generator) as recording:
            step()
        return recording.replay

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Raises ValueError where these prompts and so many new tokens each cannot be run."""
        vocabulary = self.seen.shape[1]
        if self.model.layers[0].attention.cache is not self.caches[0]:
            raise ValueError("another session has taken this model since: make a new Session")
        if not 0 < len(prompts) <= self.batch:
            raise ValueError(f"{len(prompts)} prompts in a session for {self.batch}: make one with a larger batch")
        for ids in prompts:
            if not ids:
                raise ValueError("the prompt is empty: give at least one token")
            if min(ids) < 0 or max(ids) >= vocabulary:
                raise ValueError(
                    f"token ids must be from 0 to {vocabulary - 1}: does the tokenizer belong to this model?"
                )
            if max_new_tokens < 0 or len(ids) + max_new_tokens > self.max_seq_len:
                raise ValueError(
                    f"{len(ids)} prompt tokens and {max_new_tokens} new ones exceed --max_seq_len {self.max_seq_len}: "
                    f"raise it, or ask for at most {max(0, self.max_seq_len - len(ids))} with --max_new_tokens"
                )

    def candidates(self, sampling: Sampling) -> int:
        """Among how many of the likeliest tokens a step has to choose; 0 is greedy."""
        vocabulary = self.seen.shape[1]
        return 0 if sampling.temperature == 0 else min(max(sampling.top_k or vocabulary, CANDIDATES), vocabulary)

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Take in the prompts, less what the cache holds of them, and choose the token after each into `token`.

        Steps have to be warmed up before: that runs them, on what is set here.
        """
        vocabulary = self.seen.shape[1]
        top_k = min(sampling.top_k or vocabulary, vocabulary)
        top_p = sampling.top_p if sampling.top_p < 1 else 2.0  # a sum of probabilities may round to 1 before the end
        controls = (sampling.temperature or 1.0, top_k, top_p, sampling.min_p, sampling.repetition_penalty)
        self.controls.copy_(torch.tensor(controls))
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)
        self.seen.zero_()
        self.prefilled, found, positions = 0, [], []
        for row in range(self.batch):
            ids = prompts[row] if row < len(prompts) else [0]  # rows without a prompt run along
            self.seen[row, torch.tensor(ids, device=self.device)] = True
            start = min(_common_prefix(self.ids[row], ids), self.cached[row], len(ids) - 1)
            self.ids[row], self.cached[row] = list(ids), start
            found.append(self.prefill(row, ids[start:], start))
            self.cached[row] = len(ids)
            self.prefilled += len(ids) - start
            positions.append([len(ids) - 1])
        self.position.copy_(torch.tensor(positions))
        logits, *routing = zip(*found, strict=True)
        self.choose(logits := torch.cat(logits), self.candidates(sampling))
        self.keep(logits, [torch.cat(part, dim=1) for part in routing])

    def stream(self, ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
        """`stream_all` for one sequence: its tokens one by one."""
        return (tokens[0] for tokens in self.stream_all([ids], max_new_tokens, sampling))

    def stream_all(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling
    ) -> Iterator[list[int]]:
        """Continue each prompt's token ids by max_new_tokens, yielding the next token of each as soon as the host can
        know them.

        What the cache already holds of a prompt is not computed again. Where the step is the GPU's work alone, the
        one after is under way while tokens are being read. Raises ValueError where the tokens do not fit, before
        anything is run.
        """
        self.check(prompts, max_new_tokens)
        if max_new_tokens == 0:
            return
        candidates = self.candidates(sampling)
        step = self.warm_up(candidates)
        self.begin(prompts, sampling)
        tokens, alone = self.read(), self.recorded and not self.model.host_driven

        def advance() -> Callable[[], list[int]]:
            step()
            self.cached = [count + 1 for count in self.cached]
            return self.read()

        for left in reversed(range(max_new_tokens)):
            current = tokens
            if left and alone:
                tokens = advance()
            for ids, token in zip(self.ids, found := current(), strict=True):
                ids.append(token)
            yield found[: len(prompts)]
            if left and not alone:  # the host does the step's work, and would hold tokens back meanwhile
                tokens = advance()


def _compile_stages(model: Transformer, dynamic: bool) -> Stages:
    compiled, stages = partial(torch.compile, fullgraph=True, dynamic=dynamic), Stages()
    return Stages(compiled(stages.start), model.compile_block(compiled), compiled(stages.finish))


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def read_later(tokens: Tensor) -> Callable[[], list[int]]:
    """Start the copy of tokens, of any shape, to the host; the function returned waits for it."""
    if tokens.device.type != "cuda":
        values = tokens.flatten().tolist()
        return lambda: values
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True).copy_(tokens, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tokens.device))

    def read() -> list[int]:
        copied.synchronize()
        return host.flatten().tolist()

    return read
