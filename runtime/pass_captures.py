"""When the passes of a Speculation are compiled and captured: before an answer, or between two."""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping

from runtime.graphs import warn_of_capture
from runtime.sampling import MAX_CANDIDATES
from runtime.session import Session

Pass = tuple[int, int, int]  # drafts, candidates, rows: as in `Speculation.warm_up`

log = logging.getLogger("moe_fast")


class PassCaptures:
    """Captures the passes that answers need.

    If `waits` is set (`capture_between_answers`), they are left to `capture_next`, which a server
    calls while it has nothing to do, and a chat between its answers. So no answer and no start
    waits for a capture: an answer uses the passes that are captured by then. Before that, `compile`
    has their kernels compiled in the background.
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
        self.is_compiled: Callable[[], bool] | None = None  # what `compile` has returned
        self.left: deque[Pass] = deque()  # those to capture
        self.expected: set[Pass] = set()  # those that `left` ever had

    def prepare(self, candidates: int, rows: int = 1) -> None:
        """Compile and capture the plain step of the first rows, and their passes.

        If `waits` is set, passes are left to `capture_next`, but for those that sample from all
        tokens: these are never captured, since Inductor takes seconds for each verification.
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

        No pass is captured until the kernels of all are compiled; this does not wait for them. If a
        kernel cannot be compiled, or memory is short, no further pass is captured.
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
        """Return whether the kernels of passes are compiled. The first call starts compiling."""
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
