"""The order in which a Scheduler begins answers, without a model."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from server import scheduler
from server.answers import Finished
from server.clients import QueuedRequest
from server.errors import APIError
from server.scheduler import Scheduler

RESULT = {"seconds": 1.0, "prompt_tokens": 1, "cached_tokens": 0, "new_tokens": 1, "ttft_s": 0.1}
RESULT |= {"drafted": 0, "accepted": 0}


class Driver:
    """Runs a Scheduler; each answer that is decoded ends after one command."""

    def __init__(self, max_batch: int, max_queue: int = 9):
        self.scheduler = Scheduler(max_queue, 600, max_batch)
        self.commands = self.scheduler.commands()
        self.running: list[int] = []
        self.requests: dict[str, QueuedRequest] = {}
        self.events: dict[str, list] = {}

    def ask(self, name: str, answers: int) -> QueuedRequest:
        """Submit a request whose generations are (name, index)."""
        generations = [(name, index) for index in range(answers)]
        self.events[name] = []
        queued = QueuedRequest(SimpleNamespace(generations=generations), self.events[name].append)
        self.scheduler.submit(queued)
        self.requests[name] = queued
        return queued

    def begin(self) -> tuple[list[tuple[str, int]], int]:
        """Follow the next command; return the answers that it begins, and how many it ends."""
        command = next(self.commands)
        for number in command.interrupted:
            self.scheduler.finish(number, RESULT | {"new_tokens": 0}, [])
        numbers = [number for number, _ in command.started]
        self.running = [n for n in self.running + numbers if n not in command.interrupted]
        return [generation for _, generation in command.started], len(command.interrupted)

    def end(self, count: int = 1) -> None:
        """End the answers that were begun first."""
        for _ in range(count):
            self.scheduler.finish(self.running.pop(0), RESULT, [])

    def run(self) -> list[tuple[str, int]]:
        """Run until nothing waits or is decoded; return the answers as they began."""
        order = []
        while self.scheduler.queue or self.scheduler.clients:
            order += self.begin()[0]
            assert len(self.running) <= self.scheduler.max_batch
            self.end()
        return order


@pytest.mark.parametrize("max_batch", (1, 2, 8))
def test_a_small_request_waits_for_one_answer_of_a_large_one(max_batch):
    driver = Driver(max_batch)
    driver.ask("large", 512)
    begun, _ = driver.begin()
    assert begun == [("large", index) for index in range(max_batch)]
    driver.ask("small", 1)
    assert driver.begin()[0] == []  # no answer has ended
    for expected in ([("small", 0)], [("large", max_batch)]):
        driver.end()
        assert driver.begin()[0] == expected
    driver.run()
    indices = [event.index for event in driver.events["large"] if isinstance(event, Finished)]
    assert sorted(indices) == list(range(512))


def test_requests_take_turns_whatever_their_size():
    driver, sizes = Driver(3), {"a": 40, "b": 1, "c": 7, "d": 3, "e": 40}
    for name, size in sizes.items():
        driver.ask(name, size)
    order = driver.run()
    assert sorted(order) == sorted((n, i) for n, size in sizes.items() for i in range(size))
    for name, size in sizes.items():
        turns = [turn for turn, (other, _) in enumerate(order) if other == name]
        assert [order[turn][1] for turn in turns] == list(range(size))
        # Between two answers of a request, any other request begins at most one.
        for first, second in itertools.pairwise(turns):
            between = [other for other, _ in order[first + 1 : second]]
            assert len(between) == len(set(between))


def test_a_cancelled_request_begins_no_further_answer():
    driver = Driver(2)
    large, waiting = driver.ask("large", 9), driver.ask("waiting", 1)
    driver.begin()
    driver.scheduler.cancel(large)
    driver.scheduler.cancel(driver.ask("other", 2))
    assert waiting.begun == 1
    begun, interrupted = driver.begin()
    assert (begun, interrupted) == ([], 1) and not driver.scheduler.queue
    assert driver.scheduler.metrics.dropped._value.get() == 1  # "large" has begun


def test_a_failed_answer_ends_its_request_only():
    driver = Driver(2)
    large = driver.ask("large", 9)
    driver.begin()
    driver.ask("small", 1)
    driver.scheduler.fail(driver.running.pop(0), RuntimeError("x"))
    assert driver.begin() == ([("small", 0)], 1) and large.begun == 2
    (error, _) = driver.events["large"]
    assert isinstance(error, APIError) and error.status == 500
    assert driver.run() == [] and not driver.scheduler.clients


def test_the_time_limit_ends_all_answers_of_a_request():
    driver = Driver(2)
    expired = [driver.ask("begun", 5)]
    driver.begin()
    expired.append(driver.ask("waiting", 2))
    for queued in expired:
        queued.arrived -= 601
    assert driver.begin() == ([("begun", index) for index in range(2, 5)], 5)
    assert [event.index for event in driver.events["begun"]] == [0, 1, 2, 3, 4]
    (error,) = driver.events["waiting"]
    assert isinstance(error, APIError) and error.status == 503


def test_a_drain_ends_running_requests_and_refuses_the_others():
    driver = Driver(max_batch=2)
    driver.ask("running", 3)
    driver.begin()
    driver.ask("waiting", 1)
    driver.scheduler.drain(60)
    with pytest.raises(APIError, match="the server is ending"):
        driver.ask("late", 1)
    assert driver.begin() == ([], 0)  # both rows are taken
    (refused,) = driver.events["waiting"]
    assert isinstance(refused, APIError) and refused.status == 503
    driver.end(2)
    assert driver.begin() == ([("running", 2)], 0) and not driver.scheduler.closed
    driver.end()
    assert next(driver.commands, None) is None and driver.scheduler.closed
    assert [type(event) for event in driver.events["running"]] == [Finished] * 3


def test_a_drain_ends_after_its_time_and_an_idle_one_at_once():
    driver = Driver(max_batch=1)
    driver.ask("running", 1)
    driver.begin()
    driver.scheduler.drain(0)
    assert next(driver.commands, None) is None
    (error,) = driver.events["running"]
    assert isinstance(error, APIError) and error.status == 503
    idle = Driver(max_batch=1)
    threading.Timer(0.1, idle.scheduler.drain, [60]).start()
    start = time.monotonic()
    assert next(idle.commands, None) is None and time.monotonic() - start < 10


def test_the_queues_limit_counts_requests_without_an_answer():
    driver = Driver(1, max_queue=2)
    driver.ask("large", 99)
    driver.begin()
    for name in ("a", "b"):
        driver.ask(name, 99)
    assert driver.scheduler.waiting() == 2
    with pytest.raises(APIError, match="2 requests are waiting") as caught:
        driver.ask("c", 1)
    assert caught.value.status == 429 and int(caught.value.headers["Retry-After"]) >= 1
    driver.end()
    assert driver.begin()[0] == [("a", 0)]
    assert driver.scheduler.waiting() == 1
    driver.ask("c", 1)


def test_parts_are_prepared_while_there_is_nothing_to_do(monkeypatch):
    """A request ends that; it goes on after the answer, up to the last part."""
    monkeypatch.setattr(scheduler, "QUIET_SECONDS", 0.0)
    driver, parts = Driver(1), []

    def prepare_next() -> bool:
        parts.append(len(driver.running))
        if len(parts) in (2, 4):
            driver.ask(str(len(parts)), 1)
        return len(parts) < 4

    driver.scheduler.prepare_next = prepare_next
    for count in (2, 4):
        assert driver.begin() == ([(str(count), 0)], 0) and len(parts) == count
        assert driver.begin() == ([], 0) and len(parts) == count
        driver.end()
    assert not any(parts)


def test_no_part_is_prepared_soon_after_a_request(monkeypatch):
    """The next request of a conversation would wait for it."""
    driver, times = Driver(1), []
    monkeypatch.setattr(scheduler, "QUIET_SECONDS", 0.2)
    driver.ask("a", 1)
    driver.begin()
    driver.end()
    ended = time.monotonic()
    driver.scheduler.prepare_next = lambda: bool(times.append(time.monotonic()))
    driver.scheduler.is_prepared = lambda: False
    while not times:
        driver.begin()
    assert 0.1 < times[0] - ended < 5


def test_no_part_is_prepared_soon_after_the_start(monkeypatch):
    """A first request often comes as soon as the server is ready."""
    driver, times = Driver(1), []
    driver.scheduler.prepare_next = lambda: bool(times.append(time.monotonic()))
    driver.scheduler.is_prepared = lambda: False
    monkeypatch.setattr(scheduler, "QUIET_SECONDS", 0.2)
    started = time.monotonic()
    while not times:
        driver.begin()
    assert 0.1 < times[0] - started < 5


def test_an_idle_scheduler_wakes_only_for_what_is_left(monkeypatch):
    """It looks whether kernels are compiled, and wakes other ranks. Else it waits for a request."""
    monkeypatch.setattr(scheduler, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(scheduler, "HEARTBEAT_SECONDS", 0.01)
    driver, looks = Driver(1), []

    def prepare_next() -> bool:
        looks.append(time.monotonic())
        return False

    driver.scheduler.prepare_next = prepare_next
    driver.scheduler.is_prepared = lambda: len(looks) >= 3
    assert [driver.begin() for _ in range(2)] == [([], 0)] * 2  # the first one before any look
    threading.Timer(0.3, driver.ask, ["a", 1]).start()
    while not (begun := driver.begin()[0]):
        pass
    assert begun == [("a", 0)]
    assert len(looks) == 3 and time.monotonic() - looks[-1] > 0.1
    driver.end()
    monkeypatch.setattr(scheduler.process_group, "size", lambda: 2)
    assert [driver.begin() for _ in range(3)] == [([], 0)] * 3
