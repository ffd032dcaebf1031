"""Requests in a bounded queue, decoded side by side.

The HTTP thread submits requests to a `Scheduler`, and the main thread decodes them. Only rank 0
has a scheduler. Before each step it sends a Command to all ranks, which run the same `Decoder`.
"""

import itertools
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from offload.experts import COUNTERS, offloaded_layers
from parallel import process_group
from runtime.batch import Batch, NewToken, Running
from runtime.drafting_batch import DraftingBatch
from runtime.logit_edits import Constraint
from runtime.sampling import NotFiniteError
from runtime.session import Session
from runtime.speculation import Speculation
from runtime.text import TextSettings, TextStream
from server.answers import Finished, GeneratedToken
from server.clients import AnswerWriter, Client, QueuedRequest
from server.constraints import AnswerConstraint, grammar_tokens
from server.constraints import Constraint as GrammarConstraint
from server.errors import APIError
from server.metrics import Metrics
from server.min_tokens import MinTokens
from server.plan import Generation
from server.vllm_metrics import Timing
from tokenizer import Tokenizer

log = logging.getLogger("moe_fast")
# Idle seconds after which a server captures further graphs: the next request of a conversation
# often comes at once, and would wait. It also looks so often whether their kernels are compiled.
QUIET_SECONDS = 2.0
HEARTBEAT_SECONDS = 60.0  # between messages from an idle rank 0 to the other ranks
MAX_RETRY_SECONDS = 600.0
ENDING = "the server is ending"


class Command(NamedTuple):
    """What all ranks do before a step: numbers of answers to begin, and of those to interrupt."""

    started: list[tuple[int, Generation]]
    interrupted: list[int]


class Scheduler:
    """The queue, the clients of the answers being decoded, and the metrics.

    The queue has the requests with answers that have not begun. They take turns: each turn begins
    one answer, so a request with one answer never waits for all answers of another.

    max_queue: most requests of which no answer has begun. time_limit: seconds from a
    request's arrival to its end. max_batch: answers decoded at a time. model_name: a label of the
    metrics.
    """

    def __init__(self, max_queue: int, time_limit: float, max_batch: int = 1, model_name: str = ""):
        self.max_queue, self.time_limit, self.max_batch = max_queue, time_limit, max_batch
        self.queue: deque[QueuedRequest] = deque()
        self.clients: dict[int, Client] = {}  # keys: numbers of answers
        self.latest: QueuedRequest | None = None  # the request that began an answer last
        self.numbers = itertools.count()
        self.changed, self.closed = threading.Condition(), False
        self.drain_until: float | None = None  # time.monotonic() at which a drain closes
        self.deliver: Callable[[], None] = lambda: None  # hands sent events over to the HTTP thread
        # Captures one graph while there is nothing to do; returns whether others are left.
        self.prepare_next: Callable[[], bool] = lambda: False
        self.is_prepared: Callable[[], bool] = lambda: True  # nothing is left to prepare
        self.metrics = Metrics(self.waiting, lambda: len(self.clients), model_name)
        self.seconds_per_answer = 1.0  # a moving average

    def waiting(self) -> int:
        """Return the number of requests of which no answer has begun."""
        with self.changed:
            return sum(not queued.begun for queued in self.queue)

    # On the HTTP thread -------------------------------------------------------------------------

    def submit(self, request: QueuedRequest) -> None:
        """Put a request into the queue. Raises APIError if the queue is full or closed."""
        with self.changed:
            if self.closed or self.drain_until is not None:
                raise APIError(ENDING, 503)
            waiting = self.waiting()
            if waiting >= self.max_queue:
                seconds = self.seconds_per_answer * (waiting + 1) / 2 / self.max_batch
                retry = str(math.ceil(min(seconds, MAX_RETRY_SECONDS)))
                raise APIError(
                    f"{waiting} requests are waiting, the limit: try again in {retry} s",
                    429,
                    "queue_full",
                    {"Retry-After": retry},
                )
            self.queue.append(request)
            self.changed.notify()

    def cancel(self, request: QueuedRequest) -> None:
        """Stop a request whose client has disconnected or has the complete answer."""
        with self.changed:
            request.cancelled = True
            with suppress(ValueError):
                self.queue.remove(request)
                if not request.begun:
                    self.metrics.dropped.inc()

    def close(self) -> None:
        """Refuse further requests, and send an error to the clients of all others."""
        with self.changed:
            self.closed = True
            self.changed.notify()
            for request in {*self.queue, *(client.queued for client in self.clients.values())}:
                request.send(APIError(ENDING, 503))
        self.deliver()

    # On the main thread -------------------------------------------------------------------------

    def drain(self, seconds: float) -> None:
        """Refuse further requests, and close when the others have ended, after `seconds` at most.

        A signal handler may call it: the main thread holds this lock again (it is reentrant).
        """
        with self.changed:
            self.drain_until = time.monotonic() + seconds
            self.changed.notify()

    def has_drained(self) -> bool:
        """Whether a drain has nothing left to wait for. Requests without an answer are refused."""
        if self.drain_until is None:
            return False
        for queued in [queued for queued in self.queue if not queued.begun]:
            self.queue.remove(queued)
            queued.send(APIError(ENDING, 503))
        is_over = time.monotonic() > self.drain_until
        return is_over or not (self.queue or self.clients)

    def commands(self) -> Iterator[Command]:
        """Yield a Command before each step, until `close`. Waits while there is nothing to do."""
        quiet_from = time.monotonic() + QUIET_SECONDS
        while not self.closed:
            if not self.is_idle():
                quiet_from = time.monotonic() + QUIET_SECONDS
            while self.is_idle() and time.monotonic() >= quiet_from and self.prepare_next():
                pass
            with self.changed:
                if self.is_idle():
                    self.changed.wait(self.idle_seconds())
                if self.has_drained():
                    break
                started = self.take_expired()
                while self.queue and len(self.clients) < self.max_batch:
                    started.append(self.begin(self.next_turn()))
                    if not self.queue[0].answers_left:
                        self.queue.popleft()
                interrupted = [n for n, c in self.clients.items() if self.is_over(c.queued)]
            yield Command(started, interrupted)
        self.close()

    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.queue or self.clients or self.closed) and self.drain_until is None

    def idle_seconds(self) -> float | None:
        """Return how long to wait while there is nothing to do; None: until a request comes."""
        if not self.is_prepared():
            return QUIET_SECONDS
        return HEARTBEAT_SECONDS if process_group.size() > 1 else None

    def next_turn(self) -> QueuedRequest:
        """Move the request whose turn it is to the queue's front, and return it.

        The request that had the last turn moves to the end only now, behind those that have arrived
        since.
        """
        if self.queue[0] is self.latest:
            self.queue.rotate(-1)
        self.latest = self.queue[0]
        return self.latest

    def begin(self, queued: QueuedRequest) -> tuple[int, Generation]:
        """Number the next answer of a request."""
        number, index = next(self.numbers), queued.begun
        self.clients[number] = Client(queued, index, time.monotonic())
        queued.begun += 1
        return number, queued.request.generations[index]

    def take_expired(self) -> list[tuple[int, Generation]]:
        """Remove requests that have waited for too long; return the answers to begin for them.

        A request without any answer gets an error. Otherwise its answers left begin at once,
        beyond `max_batch`: the same Command interrupts them, before they compute anything.
        """
        started: list[tuple[int, Generation]] = []
        for queued in [queued for queued in self.queue if self.has_expired(queued)]:
            self.queue.remove(queued)
            if not queued.begun:
                reason = "the time limit has passed in the queue: try again later"
                queued.send(APIError(reason, 503))
                continue
            while queued.answers_left:
                started.append(self.begin(queued))
        return started

    def has_expired(self, queued: QueuedRequest) -> bool:
        """Return whether a request has exceeded the time limit."""
        return time.monotonic() - queued.arrived > self.time_limit

    def is_over(self, queued: QueuedRequest) -> bool:
        """Return whether to interrupt a request's answers."""
        return queued.cancelled or self.has_expired(queued)

    def finish(
        self, number: int, result: dict, tokens: list[GeneratedToken], times: Sequence[float] = ()
    ) -> None:
        """Send the end of an answer to its client, and count it. times: when each token came."""
        if result["new_tokens"]:
            self.seconds_per_answer += 0.2 * (result["seconds"] - self.seconds_per_answer)
        with self.changed:
            client = self.clients.pop(number)
        arrived = client.queued.arrived
        timing = Timing(client.begun - arrived, time.monotonic() - arrived, times)
        self.metrics.count_answer(result, timing)
        client.send(Finished(result, tokens, client.index))

    def fail(self, number: int, error: Exception) -> None:
        """Send an error to an answer's client, and count it. Its other answers are interrupted."""
        reason = f"the server failed: {type(error).__name__}"
        if isinstance(error, torch.cuda.OutOfMemoryError):
            reason = "out of GPU memory: shorten the prompt"
        elif isinstance(error, NotFiniteError):
            reason = f"the server failed: {error}"
        elif isinstance(error, ValueError):  # a grammar's
            reason = str(error)
        self.metrics.count_failure()
        with self.changed:
            client = self.clients.pop(number)
            client.queued.cancelled = True
            with suppress(ValueError):
                self.queue.remove(client.queued)
        client.send(APIError(reason, 500))


# Answers ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Answer:
    """An answer being decoded on this rank."""

    number: int
    sequence: Running
    text: TextStream
    writer: AnswerWriter
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)


class Decoder:
    """Decodes answers side by side on one rank. The rank with the scheduler sends them.

    speculation: drafts for up to four answers at a time; None: nothing does.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        scheduler: Scheduler | None,
        speculation: Speculation | None = None,
    ):
        self.session, self.tokenizer, self.scheduler = session, tokenizer, scheduler
        max_batch = process_group.share(lambda: scheduler.max_batch)
        self.batch = Batch(session, max_batch)
        if speculation:
            self.batch = DraftingBatch(speculation, max_batch)
        self.answers: dict[int, Answer] = {}  # by number
        self.by_sequence: dict[Running, Answer] = {}
        self.offloaded = offloaded_layers(session.model)
        if scheduler:
            scheduler.prepare_next = self.batch.prepare_next
            scheduler.is_prepared = lambda: not any(self.batch.left)
            scheduler.metrics.vllm.cache_usage = self.cache_usage

    def cache_usage(self) -> float:
        """Return the part of the cache's positions that running answers take; from any thread."""
        used = sum(
            len(answer.sequence.ids) + len(answer.tokens) for answer in [*self.answers.values()]
        )
        return used / (self.session.batch * self.session.max_seq_len)

    def prepare(self) -> None:
        """Compile and capture everything, so that no request waits for it."""
        start = time.perf_counter()
        self.batch.prepare()
        if self.session.compiled and process_group.is_main():
            log.info("compiled in %.1f s", time.perf_counter() - start)

    def run(self) -> None:
        """Decode until the scheduler closes. Ranks without one decode the answers of rank 0."""
        self.update_expert_totals()
        for command in process_group.share_each(lambda: self.scheduler.commands()):
            self.follow(command)

    def follow(self, command: Command) -> None:
        """Begin and interrupt answers; run prompts and one step."""
        for number, generation in command.started:
            self.isolate(partial(self.start, number, generation), lambda: [number])  # noqa: B023
        for number in command.interrupted:
            if answer := self.answers.get(number):
                answer.text.end("interrupted")
                self.finish(answer)
        self.isolate(partial(self.batch.prefill, self.step), self.in_prefill)
        self.step()

    def in_prefill(self) -> list[int]:
        """Return the number of the answer whose prompt is being run."""
        return [self.by_sequence[self.batch.prefilling[0]].number] if self.batch.prefilling else []

    def isolate(self, work: Callable[[], None], numbers: Callable[[], list[int]]) -> None:
        """Do this work. If it raises, fail the answers of these numbers, and go on with the others.

        One of several ranks ends instead: the others wait for it in a collective.
        """
        try:
            work()
        except Exception as error:
            if process_group.size() > 1:
                raise
            traceback.print_exc()
            for number in numbers():
                self.fail(number, error)

    def start(self, number: int, generation: Generation) -> None:
        """Begin an answer."""
        scheduler, ids = self.scheduler, generation.prompt_ids
        writer = AnswerWriter(scheduler.clients[number] if scheduler else None)
        splits = generation.reply and generation.split_reasoning
        settings = TextSettings(
            generation.stop,
            False,
            generation.reply,
            writer.write,
            writer.add_token,
            writer.write_reasoning if splits else None,
            generation.markers,
            generation.continues,
        )
        text = TextStream(ids, self.tokenizer, settings)
        count, constraint = generation.max_new_tokens, self.make_constraint(generation)
        sampling = generation.sampling
        drafts = not generation.seeded or sampling.temperature == 0
        sequence = self.batch.start(ids, count, sampling, generation.watch, constraint, drafts)
        answer = Answer(number, sequence, text, writer, count)
        self.answers[number] = self.by_sequence[sequence] = answer

    def make_constraint(self, generation: Generation) -> Constraint | None:
        """Return the constraint of an answer's grammar and least length; None without these."""
        constraint = self.make_grammar(generation)
        if generation.min_tokens:
            return MinTokens(generation.min_tokens, self.tokenizer.stop_ids, constraint)
        return constraint

    def make_grammar(self, generation: Generation) -> Constraint | None:
        """Return the constraint of an answer's grammar; None without one."""
        if generation.grammar is None:
            return None
        tokens = grammar_tokens(self.tokenizer, self.session.model.args.vocab_size)
        waits = generation.reply and generation.reasons
        constraint = GrammarConstraint(tokens, generation.grammar, started=not waits)
        if not waits:
            return constraint
        prompt, continues = generation.prompt_ids, generation.continues
        return AnswerConstraint(constraint, self.tokenizer, prompt, continues)

    def step(self) -> None:
        """Decode one token of each answer, and deliver all events until now."""
        self.isolate(self.add_tokens, lambda: list(self.answers))
        if self.scheduler:
            self.scheduler.deliver()

    def add_tokens(self) -> None:
        """Decode one token of each answer, or several."""
        for token in self.batch.step():
            answer = self.by_sequence.get(token.sequence)
            if not answer:  # it ended within its accepted drafts
                continue
            if token.error:
                self.fail(answer.number, token.error)
            else:
                self.isolate(partial(self.add, answer, token), lambda: [answer.number])  # noqa: B023

    def add(self, answer: Answer, token: NewToken) -> None:
        """Add a token to its answer, and finish the answer if that ends it."""
        answer.writer.details = token.details
        answer.tokens.append(token.token)
        answer.text.push(token.token)
        if len(answer.tokens) == answer.max_new_tokens:
            answer.text.end("length")
        if answer.text.finish_reason:
            self.finish(answer)

    def finish(self, answer: Answer) -> None:
        """End an answer, and send its end."""
        self.remove(answer)
        process_group.check_same_tokens([answer.tokens])
        self.update_expert_totals()
        if self.scheduler:
            computed = len(answer.sequence.ids) - answer.sequence.cached_tokens
            result = answer.text.result(answer.started, computed, None)
            result["seconds"] = time.perf_counter() - answer.started
            result["stop_text"] = answer.text.stop_text
            for name in ("cached_tokens", "drafted", "accepted"):
                result[name] = getattr(answer.sequence, name)
            rest, times = answer.writer.rest(result), answer.text.times
            self.scheduler.finish(answer.number, result, rest, times)

    def remove(self, answer: Answer) -> None:
        self.batch.end(answer.sequence)
        del self.answers[answer.number], self.by_sequence[answer.sequence]

    def fail(self, number: int, error: Exception) -> None:
        """End an answer with an error, and forget its row."""
        if answer := self.answers.get(number):
            row = answer.sequence.row
            self.remove(answer)
            if row is not None:
                self.session.reset(row)
        if self.scheduler and number in self.scheduler.clients:
            self.scheduler.fail(number, error)

    def update_expert_totals(self) -> None:
        """Copy the expert cache's counters to the metrics.

        Bytes are of all ranks, others of rank 0.
        """
        if not self.offloaded:
            return
        layers = [layer.counters() for layer in self.offloaded]
        totals = {name: sum(layer[name] for layer in layers) for name in COUNTERS}
        totals["bytes"] = process_group.total(totals["bytes"])
        if self.scheduler:
            self.scheduler.metrics.experts.totals = totals
