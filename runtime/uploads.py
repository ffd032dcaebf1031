"""Copy host tensors to a GPU through pinned buffers, piece by piece.

A plain copy from pageable memory, such as a mapped file, goes through the driver's own pinned
buffer, which one core fills: 7 GB/s on an H200 machine. Here all cores fill a buffer while the GPU
reads the ones before it at the speed of the link.

    with Uploads(make_buffers, device):
        weight = mapped.to(device)

So what reads a model's files need not know of the buffers. `runtime.host_memory.pinned_uploads`
allocates them for the time in which a model is loaded.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Wait = Callable[[], object]


def mark(device: torch.device) -> Wait:
    """Mark the end of what the current stream has been given; return a function that waits."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


class Uploads(TorchFunctionMode):
    """Within, `tensor.to(device)` copies a host tensor through the buffers, in this thread.

    Copies are in the order of the device's current stream, which must have ended before the buffers
    are freed.

    make_buffers: returns uint8 tensors of one size, whose memory is pinned while its argument
    lives. The first copy calls it, since weights may be on the GPU already (host/upload_ahead.py).
    If it returns none, copies are plain ones. mark: replaces the function of this name in tests.
    """

    def __init__(
        self,
        make_buffers: Callable[["Uploads"], Sequence[Tensor]],
        device: torch.device,
        mark: Callable[[torch.device], Wait] = mark,
    ):
        super().__init__()
        self.make_buffers, self.device, self.mark = make_buffers, device, mark
        self.waits: list[Wait] = []  # of each buffer: until the GPU has read it
        self.next = 0  # the buffer that was filled first

    @cached_property
    def buffers(self) -> Sequence[Tensor]:
        buffers = self.make_buffers(self)
        self.waits = [lambda: None for _ in buffers]
        return buffers

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.to and not kwargs and self.takes(*args) and self.buffers:
            return self.send(args[0].contiguous())
        return function(*args, **(kwargs or {}))

    def takes(self, tensor: Tensor, *to) -> bool:
        """Whether `tensor.to(*to)` is a copy from host memory to the device, and no other type."""
        names_device = len(to) == 1 and isinstance(to[0], str | torch.device)
        return names_device and tensor.is_cpu and torch.device(to[0]) == self.device

    def send(self, tensor: Tensor) -> Tensor:
        """Copy a contiguous host tensor; work that the stream gets after this finds it complete."""
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


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as uint8 [bytes]."""
    return tensor.view(-1).view(torch.uint8)
