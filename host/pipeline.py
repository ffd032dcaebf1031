"""Stages of work that overlap, each in a thread: reading and checking, packing, writing."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

CANCEL_SECONDS = 1.0  # to wait for a thread that is inside a long call

Item = TypeVar("Item")
Result = TypeVar("Result")


class Stage:
    """A thread that makes up to `count` items ahead of whoever takes them.

    All items that are made are taken at once, so that threads rarely wake each other.
    """

    def __init__(self, items: Iterable, count: int):
        self.items, self.count = items, count
        self.made: deque = deque()
        self.error: BaseException | None = None
        self.is_done = self.is_cancelled = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self.run, name="moe-fast-stage", daemon=True)
        self.thread.start()

    def run(self) -> None:
        error = None
        try:
            for item in self.items:
                if not self.put(item):
                    break
        except BaseException as failure:
            error = failure
        try:
            if hasattr(self.items, "close"):
                self.items.close()
        finally:
            with self.changed:
                self.error, self.is_done = error, True
                self.changed.notify_all()

    def put(self, item) -> bool:
        """Wait until fewer than `count` items wait, and add one; return whether it is wanted."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.made) < self.count or self.is_cancelled)
            self.made.append(item)
            if len(self.made) == 1:
                self.changed.notify_all()
            return not self.is_cancelled

    def take(self) -> list:
        """Wait for items, and take them all; none is left at the end. Raises what made them."""
        with self.changed:
            self.changed.wait_for(lambda: self.made or self.is_done)
            taken = list(self.made)
            self.made.clear()
            self.changed.notify_all()
            if not taken and self.error is not None:
                raise self.error
            return taken

    def cancel(self) -> None:
        """Let the thread end after the item that it is making."""
        with self.changed:
            self.is_cancelled = True
            self.changed.notify_all()
        self.thread.join(CANCEL_SECONDS)


def in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], count: int, prepare: Callable[[], object]
) -> Generator[Result, None, None]:
    """Yield work(item) of each item, in order, computed by `count` threads.

    At most one item more than there are threads is in work. prepare: called in each thread.
    """
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(count, "moe-fast-work", prepare)
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def ahead(items: Iterable[Item], count: int) -> Generator[Item, None, None]:
    """Yield the items, of which a thread makes up to `count` ahead.

    An exception of `items` is raised here. Closing the iterator ends the thread, and closes
    `items` if that is a generator. So stages can be chained.
    """
    stage = Stage(items, count)
    try:
        while taken := stage.take():
            taken.reverse()
            while taken:
                yield taken.pop()  # the list does not keep what was yielded
    finally:
        stage.cancel()
