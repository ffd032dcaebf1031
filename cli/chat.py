"""Reading a chat from the terminal: lines, and Ctrl-C that stops an answer."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ctrl_c_flag() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C only makes the yielded function return True."""
    pressed = []
    previous = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)


def read_lines() -> Iterator[str]:
    """Yield what the user types, line by line, until /exit or the end. Ctrl-C drops a line."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline() if sys.stdin else ""
        except KeyboardInterrupt:
            print("  (/exit ends)", file=sys.stderr)
            continue
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield line.rstrip("\n")
