"""How soon a thread that waits for Python's lock gets it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Within, a thread keeps Python's lock this long while another waits; else 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
