"""A chat in the terminal: lines, answers as they come, and Ctrl-C that stops one."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DIM, NORMAL = "\x1b[2m", "\x1b[0m"


class AnswerPrinter:
    """Prints an answer piece by piece, its reasoning before it, dimmed on a terminal.

    show: `print`, or what takes its arguments.
    """

    def __init__(self, show: Callable[..., None]):
        self.show, self.reasoned = show, False
        self.dims = sys.stdout is not None and sys.stdout.isatty()

    def reasoning(self, piece: str) -> None:
        # Each piece for itself, so that Ctrl-C leaves no dimmed terminal.
        self.show(f"{DIM}{piece}{NORMAL}" if self.dims else piece, end="", flush=True)
        self.reasoned = True

    def answer(self, piece: str) -> None:
        if piece and self.reasoned:
            self.show("\n")
            self.reasoned = False
        self.show(piece, end="", flush=True)


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
