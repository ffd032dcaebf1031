"""The server's decoding: jobs in a bounded line, answered one after the other by the functions of generate.py.

Between the thread that decodes and the one that speaks HTTP stands a `Desk`. Under torchrun rank 0 has it, and hands
each job to the others, which run the same loop.
"""

import math
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress

import torch

import offload
import world
from answer import generate
from api import Job, Refusal
from session import Session
from tokenizer import Tokenizer

HEARTBEAT = 60.0  # seconds after which rank 0 gives a sign of life to the others, which wait for a job


class Desk:
    """What the two threads share: jobs in line, the one under way, and counts for /metrics."""

    def __init__(self, max_queue: int, time_limit: float):
        self.max_queue, self.time_limit = max_queue, time_limit
        self.line: deque[Job] = deque()
        self.job: Job | None = None  # under way
        self.changed, self.closed = threading.Condition(), False
        self.counts: Counter = Counter()
        self.seconds_per_answer = 1.0

    def put(self, job: Job) -> None:
        """Raises Refusal where the line is full."""
        with self.changed:
            if self.closed:
                raise Refusal("the server is ending", 503)
            if len(self.line) >= self.max_queue:
                wait = str(math.ceil(min(self.seconds_per_answer * (len(self.line) + 1) / 2, 600)))
                full = f"{len(self.line)} requests are waiting, as many as may: try again in {wait} s"
                raise Refusal(full, 429, "queue_full", {"Retry-After": wait})
            self.line.append(job)
            self.changed.notify()

    def drop(self, job: Job) -> None:
        """Its client has gone, or has all of its answer."""
        with self.changed:
            job.gone = True
            with suppress(ValueError):
                self.line.remove(job)
                self.counts["dropped"] += 1

    def close(self) -> None:
        """No more jobs; clients that wait are told so."""
        with self.changed:
            self.closed = True
            self.changed.notify()
            for job in [*self.line, *([self.job] if self.job else [])]:
                job.tell({"refusal": Refusal("the server is ending", 503)})

    def works(self) -> Iterator[tuple | None]:
        """Each job's work in turn, until `close`; None is a sign of life."""
        while not self.closed:
            with self.changed:
                if not self.line:
                    self.changed.wait(HEARTBEAT)
                self.job = self.line.popleft() if self.line else None
            if self.job and self.late():
                self.job.tell({"refusal": Refusal("the time limit has passed in the queue: try again later", 503)})
            else:
                yield self.job and self.job.work

    def late(self) -> bool:
        return time.monotonic() - self.job.arrived > self.time_limit

    def done(self, result: dict) -> None:
        """The job's answer is complete."""
        self.counts["answers"] += 1
        for name in ("prompt_tokens", "new_tokens", "seconds", "cached_tokens"):
            self.counts[name] += result[name]
        self.counts["ttft_s"] += result["ttft_s"] or 0.0
        self.seconds_per_answer += 0.2 * (result["seconds"] - self.seconds_per_answer)
        self.job.tell({"result": result})


def count_copies(session: Session, desk: Desk | None) -> None:
    """Note what experts in host memory have come to so far; bytes are of all ranks."""
    if layers := offload.counters(session.model):
        found = {name: sum(layer[name] for layer in layers) for name in offload.COUNTERS}
        found["bytes"] = world.total(found["bytes"])
        for name, count in found.items() if desk else ():
            desk.counts[f"offload_{name}"] = count


def answer(session: Session, tokenizer: Tokenizer, work: tuple, desk: Desk | None) -> None:
    """Run one job on this rank; the one that has the desk tells the client."""
    ids, max_new_tokens, sampling, stop, reply, session.watch = work
    pending, shown, start = [], 0, time.monotonic()

    def on_token(token: int, begin: int) -> None:
        pending.append((token, begin, session.details[0]))

    def on_text(text: str) -> None:
        nonlocal shown
        shown += len(text)
        ready = [entry for entry in pending if entry[1] < shown]
        del pending[: len(ready)]
        if text:
            desk.job.tell({"text": text, "tokens": ready})

    result = generate(
        session, tokenizer, ids, max_new_tokens, sampling, stop=stop, reply=reply,
        on_text=on_text if desk and desk.job.stream else lambda text: None,
        on_token=on_token if desk and session.watch else lambda token, begin: None,
        interrupted=lambda: world.share(lambda: desk.job.gone or desk.closed or desk.late()),
    )  # fmt: skip
    count_copies(session, desk)
    if desk:
        result |= {"seconds": time.monotonic() - start, "cached_tokens": len(ids) - session.prefilled}
        length = math.inf if result["finish_reason"] != "stop" else len(result["text"])
        desk.done(result | {"tokens": [entry for entry in pending if entry[1] < length]})


def decode_all(session: Session, tokenizer: Tokenizer, desk: Desk | None) -> None:
    """Answer jobs until the desk closes; on ranks without a desk, rank 0's."""
    count_copies(session, desk)
    for work in world.share_each(lambda: desk.works()):
        if work is None:
            continue
        try:
            answer(session, tokenizer, work, desk)
        except Exception as error:
            if world.size() > 1:  # the others would wait for ever
                raise
            traceback.print_exc()
            full = isinstance(error, torch.cuda.OutOfMemoryError)
            reason = "out of GPU memory: shorten the prompt" if full else f"the server failed: {type(error).__name__}"
            desk.counts["failed"] += 1
            desk.job.tell({"refusal": Refusal(reason, 500)})
            session.reset()
