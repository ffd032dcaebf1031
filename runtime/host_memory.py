"""Host memory that is registered with CUDA: for copies, and for weights that stay in it.

A table of which each token reads a few rows may be larger than the GPU's memory. Its pages are
registered with CUDA, so that a GPU reads them at their own address. To PyTorch, its compiler and a
captured graph, a tensor of the GPU at that address is like any other; only its reads are slower.
"""

import ctypes
import logging
import platform
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from host.free_memory import free_host_memory
from host.switches import switch_interval
from runtime.memory import Shortage
from runtime.uploads import Uploads, bytes_of

PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister
HUGE_PAGE, MADV_HUGEPAGE = 2 << 20, 14  # bytes; of madvise(2)
# Buffers for uploads, and bytes of each: one is filled while the GPU reads others. Small tensors
# take one each, so that there are more than two.
BUFFERS, BUFFER_BYTES = 4, 16 << 20
# A piece of a copy needs Python's lock four times: with Python's own interval, a thread that reads
# kernels makes it last 23 ms instead of 0.7.
SWITCH_SECONDS = 1e-4

log = logging.getLogger("moe_fast")


class Registered:
    """Host memory that is registered, as PyTorch and others take memory of a GPU."""

    def __init__(self, host: Tensor):
        self.host = host  # kept while a tensor is made of this
        size, address = (host.nbytes,), (host.data_ptr(), False)  # False: it may be written
        self.__cuda_array_interface__ = dict(shape=size, typestr="|u1", data=address, version=3)


def use_huge_pages(memory: Tensor) -> None:
    """Ask for pages of 2 MB, before host memory is written for the first time.

    The products of int4 were 1.1 times as fast as with pages of 4 KB (docs/log/offloading.md).
    """
    if platform.system() == "Linux":
        begin = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        size = memory.data_ptr() + memory.nbytes - begin
        if size > 0:  # a kernel without such pages refuses, which does no harm
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), MADV_HUGEPAGE)


def register_host_memory(host: Tensor, owner: object, device: torch.device) -> bool:
    """Register host memory with CUDA for the owner's life, so that copies are asynchronous.

    Return whether it worked; log a warning if not. PyTorch's pinned memory would take up to twice
    the bytes, because it rounds up to powers of two.
    """
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(host.data_ptr(), host.nbytes, PORTABLE_AND_MAPPED)
    if int(error) == 0:
        undo = weakref.finalize(owner, runtime.cudaHostUnregister, host.data_ptr())
        undo.atexit = False  # the process's end unregisters it anyway
        return True
    with suppress(RuntimeError):  # the next kernel reports the error again: launch one here
        torch.empty(1, device=device).zero_()
    log.warning(
        f"warning: {host.nbytes / 1e9:.1f} GB of host memory cannot be registered with CUDA "
        f"({error}): copies will be slower; raise the limit of locked memory (ulimit -l)"
    )
    return False


@contextmanager
def pinned_uploads(device: torch.device, size: int = BUFFER_BYTES) -> Iterator[None]:
    """Within, `Tensor.to` copies to a GPU through pinned buffers of `size` bytes (`Uploads`).

    Without memory that can be pinned, and for the CPU, it copies plainly.
    """
    if device.type != "cuda":
        yield
        return

    def make_buffers(owner: Uploads) -> Sequence[Tensor]:
        host = torch.empty(BUFFERS * size, dtype=torch.uint8)
        use_huge_pages(host)
        return host.split(size) if register_host_memory(host, owner, device) else ()

    uploads = Uploads(make_buffers, device)
    try:
        with switch_interval(SWITCH_SECONDS), uploads:
            yield
    finally:
        torch.cuda.synchronize(device)  # the buffers are freed with `uploads`


def device_view(host: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the GPU at the address of registered host memory, and keep that alive."""
    flat = torch.as_tensor(Registered(bytes_of(host)), device=device)
    assert flat.data_ptr() == host.data_ptr(), "a copy, not a view"
    return flat.view(host.dtype).view(host.shape)


def in_host_memory(weight: Tensor, owner: nn.Module, device: torch.device) -> Tensor:
    """Copy a weight into host memory that the GPU reads -> a tensor of the GPU.

    weight: on the CPU, mapped from its file perhaps. owner: the memory stays registered during its
    life. Raises Shortage if the host lacks the memory, or it cannot be registered.
    """
    what, free = f"{weight.nbytes / 1e9:.1f} GB of a table", free_host_memory()
    if weight.nbytes > free:
        raise Shortage(
            f"{what} have to be in host memory, of which {free / 1e9:.1f} GB are free",
            "close other programs, or use a machine with more memory",
        )
    host = torch.empty_like(weight)
    use_huge_pages(host)
    if not register_host_memory(host, owner, device):
        raise Shortage(f"{what} cannot be registered with CUDA", "raise ulimit -l")
    host.copy_(weight)
    return device_view(host, device)
