"""End all ranks when one of them fails. Each prints at most one line on stderr.

A heartbeat thread detects dead ranks within 25 s; collectives have no timeout, because
they may wait for hours while a rank compiles, reads a slow disk or waits for its user.
Only a thread can end a process that hangs in a CUDA graph: no exception and no Python
signal handler would run there.

Without torchrun `_run` is None: there is no thread, and `fail` and `leave` return.
"""

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from cli.command import printable, report

INTERVAL = 5.0  # seconds between two heartbeats of a rank
DEAD_AFTER = 20.0  # seconds without a heartbeat
FAIL_TOGETHER = timedelta(seconds=2)  # a failing rank waits this long for others to fail too


@dataclass
class _Run:
    """The run of several ranks that this process belongs to."""

    rank: int
    size: int
    store: dist.Store
    wake: int = -1  # write end of the pipe that wakes the thread
    thread: threading.Thread | None = None
    stopping: bool = False
    error_printed: threading.Lock = field(default_factory=threading.Lock)  # never released


_run: _Run | None = None


def enter(rank: int, size: int, store: dist.Store) -> None:
    """Make this process one of several ranks, and send its first heartbeat."""
    global _run
    _run = _Run(rank, size, store)
    store.set(f"heartbeat/{rank}", "0")


def start_thread() -> None:
    """Start the heartbeat thread, which also ends this process on SIGINT and SIGTERM."""
    read, _run.wake = os.pipe()
    os.set_blocking(_run.wake, False)
    # While the main thread waits for a GPU, Python runs no signal handler. The C handler writes
    # the signal's number into the pipe at once.
    signal.set_wakeup_fd(_run.wake)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    _run.thread = threading.Thread(
        target=_watch, args=(_run, _run.store.clone(), read), daemon=True
    )
    _run.thread.start()


def stop_thread() -> None:
    """Stop the heartbeat thread, and leave the run."""
    global _run
    _run.stopping = True
    signal.set_wakeup_fd(-1)
    os.write(_run.wake, b"\0")
    _run.thread.join()
    _run = None


def _watch(run: _Run, store: dist.Store, wake: int) -> None:
    """Handle signals, send heartbeats, and check those of all ranks: the thread's loop."""
    beats, seen = 0, {}
    while not run.stopping:
        if select.select([wake], [], [], INTERVAL)[0]:
            _handle_signal(run, store, os.read(wake, 1)[0])
            continue
        try:
            beats += 1
            store.set(f"heartbeat/{run.rank}", str(beats))
            found = store.multi_get([f"heartbeat/{rank}" for rank in range(run.size)])
        except RuntimeError:
            if not run.stopping:
                _exit("the process that hosts the store has ended: start all processes again")
            return
        now = time.monotonic()
        for rank, beat in enumerate(found):
            if seen.get(rank, ("", 0))[0] != beat:
                seen[rank] = beat, now
            elif now - seen[rank][1] > DEAD_AFTER and not run.stopping:
                _exit(f"rank {rank} sends no heartbeat: start all processes again")


def _handle_signal(run: _Run, store: dist.Store, number: int) -> None:
    """End this process on SIGINT, and on the SIGTERM that torchrun sends after a rank has ended."""
    if number == signal.SIGINT:
        os._exit(130)
    if number == signal.SIGTERM:
        with suppress(RuntimeError):
            if run.rank and store.check(["failed/0"]):  # rank 0 has printed the cause
                os._exit(2)
        _exit("another process of this run has ended, or torchrun received SIGTERM")


def _print_error(message: str) -> bool:
    """Print the fatal error once, as one line -> whether this call did it."""
    first = _run.error_printed.acquire(blocking=False)
    if first:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        rank = f"rank {_run.rank}: " if _run.rank else ""
        os.write(2, f"error: {rank}{message}\n".encode())
    return first


def _exit(message: str) -> NoReturn:
    """Print the error and end this process, whose main thread may hang in a GPU call."""
    if not _print_error(message):
        time.sleep(5)  # another thread has printed an error and is ending the process
    os._exit(1)


# For commands -------------------------------------------------------------------------


def fail(message: str) -> int:
    """Print an error as one line -> exit code 2. One of several ranks ends its process instead.

    Otherwise the other ranks would wait for it in a collective. If ranks have the same
    error, only rank 0 prints it.
    """
    message = printable(message)
    if _run is None:
        return report(message)
    rank, store = _run.rank, _run.store
    if rank == 0:
        # Print at once: torchrun ends this rank as soon as another one has ended.
        _print_error(message)
    with suppress(RuntimeError):  # a timeout, or the process of the store has ended
        store.set(f"failed/{rank}", message)
        if rank == 0:  # which may host the store: wait until the others have read it
            store.wait([f"failed/{other}" for other in range(1, _run.size)], FAIL_TOGETHER)
            time.sleep(0.2)
        else:
            store.wait(["failed/0"], FAIL_TOGETHER)
            same = store.get("failed/0").decode() == message
            if same and _run.error_printed.acquire(blocking=False):
                os._exit(2)
    _print_error(message)
    os._exit(2)


def leave(code: int) -> None:
    """End this process silently if it is one of several ranks; the others follow."""
    if _run is not None:
        os._exit(code)
