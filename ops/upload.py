"""Copy host tensors to a GPU through pinned buffers, piece by piece.

A plain copy from pageable memory, such as a mapped file, goes through the driver's own pinned
buffer, which one core fills: 7 GB/s on an H200 machine. Here all cores fill a buffer while the GPU
reads the ones before it at the speed of the link.

    with uploading(Uploader(buffers, device)):
        weight = to_device(mapped, device)

`runtime.host_memory.pinned_uploads` allocates the buffers for the time in which a model is loaded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Wait = Callable[[], object]


def mark(device: torch.device) -> Wait:
    """Mark the end of what the current stream has been given; return a function that waits."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


class Uploader:
    """Copies tensors to one device, in the order of its current stream.

    buffers: uint8 tensors of one size, of pinned memory. The stream must have ended before they are
    freed. mark: as the function of this name.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        device: torch.device,
        mark: Callable[[torch.device], Wait] = mark,
    ):
        self.buffers, self.device, self.mark = buffers, device, mark
        self.waits: list[Wait] = [lambda: None for _ in buffers]  # until the GPU has read a buffer
        self.next = 0  # the buffer that was filled first

    def send(self, tensor: Tensor) -> Tensor:
        """Return a copy of a contiguous host tensor; the stream's next work finds it complete."""
        target = torch.empty_like(tensor, device=self.device)
        source, copy, size = bytes_of(tensor), bytes_of(target), len(self.buffers[0])
        for start in range(0, len(source), size):
            piece, number = source[start : start + size], self.next
            self.waits[number]()
            filled = self.buffers[number][: len(piece)]
            filled.copy_(piece)  # by all of PyTorch's threads, without Python's lock
            copy[start : start + size].copy_(filled, non_blocking=True)
            self.waits[number] = self.mark(self.device)
            self.next = (number + 1) % len(self.buffers)
        return target


# Another thread has none, unless it sets one: two would fill the same buffers.
active: ContextVar[Uploader | None] = ContextVar("active", default=None)


@contextmanager
def uploading(uploader: Uploader) -> Iterator[None]:
    """Within, `to_device` takes this uploader."""
    token = active.set(uploader)
    try:
        yield
    finally:
        active.reset(token)


def to_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Return a tensor, contiguous, on a device: through pinned buffers within `uploading`."""
    uploader = active.get()
    if uploader is None or not tensor.is_cpu or torch.device(device) != uploader.device:
        return tensor.contiguous().to(device)
    return uploader.send(tensor.contiguous())


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as uint8 [bytes]."""
    return tensor.view(-1).view(torch.uint8)
