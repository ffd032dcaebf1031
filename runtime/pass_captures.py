"""When the passes of a Speculation are compiled and captured: before an answer, or between two."""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping

from runtime.graphs import warn_of_capture
from runtime.sampling import MAX_CANDIDATES
from runtime.session import Session

Pass = tuple[int, int, int]  # drafts, candidates, rows: as of `Speculation.warm_up`

log = logging.getLogger("moe_fast")


class PassCaptures:
    """Captures the passes that answers need.

    If `waits` is set (`capture_between_answers`), they are left to `capture_next`, which a server
    calls while it has nothing to do, and a chat between its answers. So no answer and no start
    waits for a pass: an answer has the drafts of those that are there. Before they are captured,
    `compile` has their kernels compiled in the background.
    """

    def __init__(
        self,
        session: Session,
        counts: Callable[[int], range],
        warm_up: Callable[..., object],
        captured: Mapping[Pass, object],
    ):
        """counts, warm_up: of a Speculation. captured: its passes, by rows, drafts, candidates."""
        self.session, self.counts, self.warm_up, self.captured = session, counts, warm_up, captured
        self.waits = False
        # Begins to compile the kernels of passes; returns what tells whether they are there.
        self.compile: Callable[[], Callable[[], bool]] = lambda: lambda: True
        self.is_compiled: Callable[[], bool] | None = None  # what that has returned
        self.left: deque[Pass] = deque()
        self.expected: set[Pass] = set()  # those that were in there

    def prepare(self, candidates: int, rows: int = 1) -> None:
        """Compile and capture the plain step of the first rows, and passes with all their numbers
        of drafts, or leave these to `capture_next`.

        Passes that choose among all tokens are never captured then: Inductor compiles their
        verification, for seconds each.
        """
        self.session.warm_up(candidates, rows)
        keys = [(count, candidates, rows) for count in self.counts(rows)]
        if not self.waits:
            for key in keys:
                self.warm_up(*key)
        elif candidates <= MAX_CANDIDATES:
            self.left += [key for key in keys if key not in self.expected]
            self.expected.update(keys)

    def capture_next(self) -> bool:
        """Capture one of the passes that are left; return whether to go on with others.

        Nothing waits for their kernels: while these are compiled, none is captured. If one cannot
        be compiled, none is; a pass that cannot be captured, for want of memory, is the last one.
        """
        if not self.left:
            return False
        try:
            if not self.kernels_ready():
                return False
            self.warm_up(*self.left.popleft())
        except RuntimeError as error:
            self.left.clear()
            warn_of_capture("passes with drafts", error)
        if not self.left:
            log.info(f"{len(self.captured)} passes with drafts are captured")
        return bool(self.left)

    def kernels_ready(self) -> bool:
        """Return whether the kernels of passes are compiled. The first call begins that."""
        if self.is_compiled is None:
            self.is_compiled = self.compile()
        return self.is_compiled()

    def most_ready(self, rows: int, candidates: int) -> int:
        """Return the most drafts that a pass of the first rows may have now."""
        counts = self.counts(rows)
        if not self.waits:
            return counts.stop - 1
        ready = itertools.takewhile(lambda n: (rows, n, candidates) in self.captured, counts)
        return max(ready, default=0)
