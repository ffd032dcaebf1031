"""Where the steps of a captured session leave their tokens for the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ops.step.token_draw import post_tokens


class Outbox:
    """Pinned host memory for the tokens of two steps, in turn.

    The host may launch a step before it has read the tokens of the one before, but no further one.
    """

    def __init__(self, rows: int, device: torch.device):
        self.slots = torch.zeros(2, rows, dtype=torch.int64, pin_memory=True)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)  # of steps, on the device
        self.posted = 0  # of steps that the host has launched

    def post(self, token: Tensor) -> None:
        """Post the newest tokens [rows, 1]: a part of the step."""
        post_tokens(token, self.count, self.slots)

    def counted(self, make: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Make a step that posts; undo what it has posted, and return it with its calls counted."""
        with self.unchanged():
            step = make()

        def run() -> None:
            step()
            self.posted += 1

        return run

    def read_later(self) -> Callable[[], list[int]]:
        """Return what waits for the tokens of the step launched last, of all rows."""
        slot, posted = self.slots[(self.posted - 1) % 2], torch.cuda.Event()
        posted.record(torch.cuda.current_stream(self.count.device))

        def wait() -> list[int]:
            posted.synchronize()
            return slot.tolist()

        return wait

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo what steps post within, also if they fail: else both counts of steps differ."""
        torch.cuda.synchronize()  # a step in flight posts first
        slots, count = self.slots.clone(), self.count.clone()
        try:
            yield
        finally:
            torch.cuda.synchronize()
            self.slots.copy_(slots)
            self.count.copy_(count)
