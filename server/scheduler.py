"""Requests in a bounded queue, decoded one after the other.

The HTTP thread submits requests to a `Scheduler`, and the main thread decodes them. Only rank 0
has a scheduler. It sends each request's Generation to the other ranks, which run the same loop.
"""

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from generate import generate
from offload.experts import COUNTERS, expert_counters
from parallel import process_group
from runtime.sampling import NotFiniteError
from runtime.session import Session
from server.metrics import Metrics
from server.schema import (
    APIError,
    Event,
    Finished,
    GeneratedToken,
    Generation,
    GenerationRequest,
    TextDelta,
)
from tokenizer import Tokenizer

HEARTBEAT_SECONDS = 60.0  # between messages from an idle rank 0 to the other ranks
MAX_RETRY_SECONDS = 600.0


@dataclass(eq=False)
class QueuedRequest:
    """A request, and the function that sends events to its client."""

    request: GenerationRequest
    send: Callable[[Event], None]
    arrived: float = field(default_factory=time.monotonic)
    cancelled: bool = False


class Scheduler:
    """The queue, the request being decoded, and the metrics.

    max_queue: maximum of waiting requests. time_limit: seconds from a request's arrival to its end.
    """

    def __init__(self, max_queue: int, time_limit: float):
        self.max_queue, self.time_limit = max_queue, time_limit
        self.queue: deque[QueuedRequest] = deque()
        self.active: QueuedRequest | None = None
        self.changed, self.closed = threading.Condition(), False
        self.metrics = Metrics(lambda: len(self.queue))
        self.seconds_per_answer = 1.0  # a moving average

    def submit(self, request: QueuedRequest) -> None:
        """Put a request into the queue. Raises APIError if the queue is full or closed."""
        with self.changed:
            if self.closed:
                raise APIError("the server is ending", 503)
            waiting = len(self.queue)
            if waiting >= self.max_queue:
                seconds = self.seconds_per_answer * (waiting + 1) / 2
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
                self.metrics.dropped.inc()

    def close(self) -> None:
        """Refuse further requests, and send an error to the clients of all others."""
        with self.changed:
            self.closed = True
            self.changed.notify()
            for request in filter(None, [*self.queue, self.active]):
                request.send(APIError("the server is ending", 503))

    def generations(self) -> Iterator[Generation | None]:
        """Yield each request's Generation until `close`; None is a heartbeat."""
        while not self.closed:
            with self.changed:
                if not self.queue:
                    self.changed.wait(HEARTBEAT_SECONDS)
                self.active = self.queue.popleft() if self.queue else None
            if self.active is None:
                yield None
            elif self.expired():
                reason = "the time limit has passed in the queue: try again later"
                self.active.send(APIError(reason, 503))
            else:
                yield self.active.request.generation

    def expired(self) -> bool:
        """Return whether the active request has exceeded the time limit."""
        return time.monotonic() - self.active.arrived > self.time_limit

    def interrupted(self) -> bool:
        """Return whether to stop decoding the active request."""
        return self.active.cancelled or self.closed or self.expired()

    def finish(self, result: dict, tokens: list[GeneratedToken]) -> None:
        """Send the end of the active request's answer, and count it."""
        self.metrics.count_answer(result)
        self.seconds_per_answer += 0.2 * (result["seconds"] - self.seconds_per_answer)
        self.active.send(Finished(result, tokens))

    def fail(self, error: Exception) -> None:
        """Send an internal error to the active request's client, and count it."""
        reason = f"the server failed: {type(error).__name__}"
        if isinstance(error, torch.cuda.OutOfMemoryError):
            reason = "out of GPU memory: shorten the prompt"
        elif isinstance(error, NotFiniteError):
            reason = f"the server failed: {error}"
        self.metrics.failures.inc()
        self.active.send(APIError(reason, 500))


def decode_requests(session: Session, tokenizer: Tokenizer, scheduler: Scheduler | None) -> None:
    """Decode requests until the scheduler closes. Ranks without one decode those of rank 0."""
    update_expert_totals(session, scheduler)
    for generation in process_group.share_each(lambda: scheduler.generations()):
        if generation is None:
            continue
        try:
            answer(session, tokenizer, generation, scheduler)
        except Exception as error:
            if process_group.size() > 1:  # end all: the other ranks wait in a collective
                raise
            traceback.print_exc()
            scheduler.fail(error)
            session.reset()


def answer(
    session: Session, tokenizer: Tokenizer, generation: Generation, scheduler: Scheduler | None
) -> None:
    """Decode one request on this rank. The rank with the scheduler sends the answer."""
    start = time.monotonic()
    session.watch = generation.watch
    writer = AnswerWriter(session, scheduler)
    result = generate(
        session,
        tokenizer,
        generation.prompt_ids,
        generation.max_new_tokens,
        generation.sampling,
        stop=generation.stop,
        reply=generation.reply,
        on_text=writer.write,
        on_token=writer.add_token,
        on_reasoning=writer.write_reasoning if generation.reply else None,
        interrupted=lambda: process_group.share(lambda: scheduler.interrupted()),
    )
    update_expert_totals(session, scheduler)
    if scheduler:
        result["seconds"] = time.monotonic() - start
        result["cached_tokens"] = len(generation.prompt_ids) - session.prefilled
        scheduler.finish(result, writer.rest(result))


class AnswerWriter:
    """Sends the active request's text as it is generated. Does nothing without a scheduler."""

    def __init__(self, session: Session, scheduler: Scheduler | None):
        self.session = session
        self.client = scheduler.active if scheduler else None
        self.tokens: list[GeneratedToken] = []  # in no TextDelta yet
        self.sent = 0  # characters

    def add_token(self, id: int, offset: int) -> None:
        """Keep a token's Details, if they are recorded, until its text is sent."""
        if self.client and self.session.watch:
            self.tokens.append(GeneratedToken(id, offset, self.session.details[0]))

    def write_reasoning(self, text: str) -> None:
        self.write(text, is_reasoning=True)

    def write(self, text: str, *, is_reasoning: bool = False) -> None:
        """Send new text, if the request is a stream."""
        if self.client and self.client.request.body.stream and text:
            self.sent += len(text)
            self.client.send(TextDelta(text, self.take_tokens(self.sent), is_reasoning))

    def take_tokens(self, end: int | float) -> list[GeneratedToken]:
        """Remove and return the tokens that begin before character `end`."""
        taken = [token for token in self.tokens if token.offset < end]
        self.tokens = self.tokens[len(taken) :]
        return taken

    def rest(self, result: dict) -> list[GeneratedToken]:
        """Return the tokens not sent yet, without those of a stop string."""
        stopped = result["finish_reason"] == "stop"
        length = len(result.get("reasoning", "")) + len(result["text"])
        return self.take_tokens(length if stopped else math.inf)


def update_expert_totals(session: Session, scheduler: Scheduler | None) -> None:
    """Copy the expert cache's counters to the metrics. Bytes are of all ranks, others of rank 0."""
    layers = expert_counters(session.model)
    if not layers:
        return
    totals = {name: sum(layer[name] for layer in layers) for name in COUNTERS}
    totals["bytes"] = process_group.total(totals["bytes"])
    if scheduler:
        scheduler.metrics.experts.totals = totals
