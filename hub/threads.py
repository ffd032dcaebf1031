"""Requests to the Hub in threads that Ctrl-C ends at once."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

CANCEL_SECONDS = 1.0  # to wait for threads that are inside the client

Result = TypeVar("Result")


class Cancelled(Exception):
    """Raised in a download's thread when nobody needs the download any more."""


def in_threads(
    work: Callable[[str], Result], items: Sequence[str], count: int, ended: threading.Event
) -> Iterator[tuple[str, Result]]:
    """Call work(item) for each item in `count` threads; yield items and results as they come.

    Raises the first exception of `work`. `ended` is set at the end, for `work` to stop early. The
    threads are daemons: one that waits for an answer of the Hub holds up neither Ctrl-C nor exit.
    """
    done: queue.SimpleQueue[tuple[str, Result | Exception]] = queue.SimpleQueue()
    todo = iter(items)  # next() of a sequence's iterator is atomic: each item has one thread

    def run() -> None:
        for item in todo:
            if ended.is_set():
                return
            try:
                done.put((item, work(item)))
            except Exception as error:
                done.put((item, error))

    threads = [
        threading.Thread(target=run, name=f"moe-fast-hub-{number}", daemon=True)
        for number in range(min(count, len(items)))
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in items:
            item, result = done.get()
            if isinstance(result, Exception):
                raise result
            yield item, result
    finally:
        ended.set()
        deadline = time.monotonic() + CANCEL_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class Silent(tqdm):
    """A bar that is not shown."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options | {"disable": True})


def bar_class(bar: Callable[[], tqdm], is_ended: Callable[[], bool]) -> type[tqdm]:
    """Return the class of bars for the client: they add to `bar()`, and raise Cancelled."""

    class Bar(Silent):
        def update(self, n=1):
            if is_ended():
                raise Cancelled
            bar().update(n)

        def update_transfer(self, n):  # of Xet: bytes before they are put together
            pass

        def set_transfer_postfix_str(self, text, refresh=True):
            pass

    return Bar
