"""Copies of experts from host memory to the device, on a separate CUDA stream."""

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 4 << 20  # bytes; a prefetch is copied in pieces
MAX_IN_FLIGHT = 2  # pieces


@dataclass
class Prefetch:
    """One expert that is copied into a staging buffer."""

    blob: Tensor  # uint8, on the host
    buffer: Tensor  # uint8, on the device
    counts: dict[str, int]  # the layer's COUNTERS
    copied: int = 0  # bytes

    def copy(self, count: int) -> None:
        """Copy the next `count` bytes."""
        piece = slice(self.copied, min(self.copied + count, len(self.blob)))
        self.buffer[piece].copy_(self.blob[piece], non_blocking=True)
        self.counts["bytes"] += piece.stop - piece.start
        self.copied = piece.stop


class CopyStream:
    """A CUDA stream for copies, and the staging buffers of prefetches. On the CPU copies block.

    Prefetches are issued in pieces: a queued copy can be neither cancelled nor overtaken. The host
    issues pieces while it waits for a router (`read`). Then wrong prefetches are dropped, so that a
    missing expert waits for at most MAX_IN_FLIGHT pieces. With one the link would idle in between.
    """

    def __init__(self, device: torch.device, buffers: int, size: int):
        """size: bytes of a staging buffer."""
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(buffers)]
        self.staged: dict[tuple[int, int], Prefetch] = {}  # by layer and expert, oldest first
        self.unfinished: deque[tuple[int, int]] = deque()
        self.in_flight: deque[torch.cuda.Event] = deque()  # of issued pieces, in their order

    def as_current(self):
        """Return a context that issues copies to this stream."""
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def wait_for_compute(self) -> None:
        """Make later copies wait for all issued kernels, which may read their targets."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())

    def block_compute(self) -> None:
        """Make later kernels wait for all issued copies."""
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)

    def read(self, values: Tensor) -> list[int]:
        """Copy numbers to the host, and issue prefetches meanwhile: the one wait of a layer."""
        if not self.stream:
            return values.tolist()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        while not copied.query():
            self.issue_pieces()
        return host.tolist()

    def issue_pieces(self) -> None:
        """Issue pieces of prefetches until MAX_IN_FLIGHT are in flight; all of them on the CPU."""
        while self.in_flight and self.in_flight[0].query():
            self.in_flight.popleft()
        while self.unfinished and len(self.in_flight) < MAX_IN_FLIGHT:
            prefetch = self.staged[self.unfinished[0]]
            with self.as_current():
                prefetch.copy(PIECE)
                if self.stream:
                    self.in_flight.append(torch.cuda.Event())
                    self.in_flight[-1].record()
            if prefetch.copied == len(prefetch.blob):
                self.unfinished.popleft()

    def start_prefetch(self, key: tuple[int, int], blob: Tensor, counts: dict[str, int]) -> None:
        """Start to copy an expert; evict the oldest prefetch if no buffer is free.

        key: layer and expert. counts: the COUNTERS of that layer.
        """
        if not self.free:
            oldest = next(iter(self.staged))
            self.free.append(self._unstage(oldest).buffer)
        counts["speculative_loads"] += 1
        self.staged[key] = Prefetch(blob, self.free.pop()[: len(blob)], counts)
        self.unfinished.append(key)

    def take(self, key: tuple[int, int]) -> Prefetch | None:
        """Issue the rest of a prefetch and return it; None if there is none."""
        if key not in self.staged:
            return None
        prefetch = self._unstage(key)
        prefetch.copy(len(prefetch.blob))
        return prefetch

    def drop_unfinished(self) -> None:
        """Drop the prefetches that are not fully issued."""
        for key in list(self.unfinished):
            self.release(self._unstage(key))

    def release(self, prefetch: Prefetch) -> None:
        """Free a staging buffer. The stream orders later copies into it after those out of it."""
        self.free.append(prefetch.buffer)

    def _unstage(self, key: tuple[int, int]) -> Prefetch:
        if key in self.unfinished:
            self.unfinished.remove(key)
        return self.staged.pop(key)
