"""Copy a model's files to the GPU before torch is imported: imports leave it and most cores idle.

    start            begin the copies, in threads
    uploaded         a file that is on the GPU
    staged_bytes     what the copies take of the GPU's memory
    close            free them

Threads read a file into pinned buffers, and copy those into memory of the driver. Later
`checkpoint.SafetensorsFile.read` copies each tensor from there, after the usual checks. It is not
necessary: a file that is not on the GPU is read as without it.
"""

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cli.files import Stamp, stamp

PIECE = 32 << 20  # bytes of a buffer; each piece needs Python's lock twice
WORKERS = 8  # threads; one core reads 5 to 10 GB/s from the page cache
SPARE = 2 << 30  # bytes of the GPU's memory that the copies leave: tensors are copied once more
SWITCH_SECONDS = 5e-4  # after which an import gives Python's lock away; Python's 5 ms are a piece
PORTABLE = 1  # flag of cuMemHostAlloc
FUNCTIONS = (
    "cuInit",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoD_v2",
)


class Driver:
    """CUDA's driver, on the first GPU. All raise OSError; a driver that is not there, at once."""

    def __init__(self):
        library = ctypes.CDLL("libcuda.so.1")
        # All now: a later look-up would wait for `load_libraries`, and hold Python's lock.
        try:
            self.functions = {name: getattr(library, name) for name in FUNCTIONS}
        except AttributeError as error:
            raise OSError(str(error)) from None

    def call(self, name: str, *arguments) -> None:
        if code := self.functions[name](*arguments):
            raise OSError(f"{name}: error {code}")

    def enter(self) -> None:
        """Let this thread use the context that torch uses, too."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def allocate_host(self, size: int) -> int:
        address = ctypes.c_void_p()
        given = ctypes.c_size_t(size), ctypes.c_uint(PORTABLE)
        self.call("cuMemHostAlloc", ctypes.byref(address), *given)
        return address.value or 0

    def free_host(self, address: int) -> None:
        self.call("cuMemFreeHost", ctypes.c_void_p(address))

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy host memory to the GPU; return when that is done."""
        given = ctypes.c_uint64(target), ctypes.c_void_p(source), ctypes.c_size_t(size)
        self.call("cuMemcpyHtoD_v2", *given)


class Part:
    """Bytes of the GPU, as PyTorch takes memory of others."""

    def __init__(self, address: int, size: int):
        data = address, False  # False: it may be written
        self.__cuda_array_interface__ = dict(shape=(size,), typestr="|u1", data=data, version=3)


class StagedFile:
    """A file and its copy on the GPU.

    left: bytes of tensors that were not taken yet, once it is `done`.
    """

    def __init__(self, path: Path, stamp: Stamp):
        self.path, self.stamp, self.size = path, stamp, stamp[0]
        self.address: int | None = None
        self.done, self.is_complete, self.left = threading.Event(), False, 0

    def part(self, begin: int, size: int) -> Part:
        """Return bytes of the file."""
        assert self.address is not None
        return Part(self.address + begin, size)


class Staging:
    """Copies of files, made by threads."""

    def __init__(self, driver: Driver, paths: Sequence[Path], workers: int):
        self.driver = driver
        found = [StagedFile(path, stamp(path.stat())) for path in paths]
        # The largest first, so that all threads end together.
        self.waiting = deque(sorted(found, key=lambda file: -file.size))
        self.files = {file.stamp: file for file in found}
        self.allocated, self.is_ended, self.lock = threading.Event(), False, threading.Lock()
        # No daemons: the process must not end while the driver copies.
        self.threads = [
            threading.Thread(target=self.work, args=(n == 0,), name="upload ahead")
            for n in range(workers)
        ]
        for thread in self.threads:
            thread.start()

    def allocate(self) -> None:
        """Allocate memory for all files, if they fit."""
        if sum(file.size for file in self.waiting) + SPARE <= self.driver.free_bytes():
            for file in self.waiting:
                file.address = self.driver.allocate(file.size)

    def goes_on(self) -> bool:
        """Whether copies are of use: a process that ends waits for this thread."""
        return not self.is_ended and threading.main_thread().is_alive()

    def work(self, allocates: bool) -> None:
        """Copy files until none waits. allocates: this is the thread that does."""
        with suppress(OSError):
            try:
                self.driver.enter()
                if allocates:
                    self.allocate()
            finally:
                if allocates:
                    self.allocated.set()
            if not self.nbytes():
                return
            buffer = self.driver.allocate_host(PIECE)
            while self.goes_on() and (file := self.next_file()):
                try:
                    self.send(file, buffer)
                finally:
                    file.done.set()
            self.driver.free_host(buffer)

    def next_file(self) -> StagedFile | None:
        with self.lock:
            return self.waiting.popleft() if self.waiting else None

    def send(self, file: StagedFile, buffer: int) -> None:
        """Copy a file through a pinned buffer."""
        if file.address is None:
            return
        view = memoryview((ctypes.c_char * PIECE).from_address(buffer)).cast("B")
        with open(file.path, "rb", buffering=0) as stream:
            at = 0
            while at < file.size and self.goes_on():
                count = stream.readinto(view)
                if not count or at + count > file.size:
                    return
                if at == 0:  # a safetensors file: the bytes of its header, then the header
                    file.left = file.size - 8 - int.from_bytes(view[:8], "little")
                self.driver.copy(file.address + at, buffer, count)
                at += count
            file.is_complete = at == file.size and stamp(os.fstat(stream.fileno())) == file.stamp

    def find(self, key: Stamp) -> StagedFile | None:
        """Return the file with this stamp, when it is on the GPU.

        None: it is not there, or no thread has begun it: then none will.
        """
        file = self.files.get(key)
        if file is None:
            return None
        with self.lock:
            was_waiting = file in self.waiting
            if was_waiting:
                self.waiting.remove(file)
        if was_waiting:
            self.free(file)
            return None
        file.done.wait()
        return file if file.is_complete and file.address is not None else None

    def take(self, file: StagedFile, size: int) -> None:
        """Note that bytes of a file were copied; free it after the last ones."""
        file.left -= size
        if file.left <= 0:
            self.free(file)

    def free(self, file: StagedFile) -> None:
        # The driver waits for work of the GPU that reads the memory.
        if file.address is not None:
            with suppress(OSError):
                self.driver.free(file.address)
            file.address = None

    def nbytes(self) -> int:
        """Return the bytes of the GPU that the copies have."""
        self.allocated.wait()
        return sum(file.size for file in self.files.values() if file.address is not None)

    def close(self) -> None:
        """End the threads, and free all copies."""
        self.is_ended = True
        for thread in self.threads:
            thread.join()
        for file in self.files.values():
            self.free(file)


current: list[Staging] = []  # at most one
intervals: list[float] = []  # Python's own switch interval, while there is one


def start(paths: Sequence[Path]) -> None:
    """Begin to copy files to the first GPU in threads, if they fit."""
    if current or not paths:
        return
    cores = os.cpu_count() or 1
    with suppress(OSError):
        current.append(Staging(Driver(), paths, max(1, min(WORKERS, cores // 2))))
        intervals.append(sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_SECONDS)


def uploaded(key: Stamp) -> StagedFile | None:
    """Return the file with this stamp if it is on the first GPU; wait while it is copied."""
    return current[0].find(key) if current else None


def take(file: StagedFile, size: int) -> None:
    """`Staging.take`."""
    current[0].take(file, size)


def staged_bytes() -> int:
    """Return the bytes of the first GPU's memory that copies have until they are read."""
    return current[0].nbytes() if current else 0


def close() -> None:
    """Free all copies: what is read from now on is read from its file."""
    while current:
        current.pop().close()
    while intervals:
        sys.setswitchinterval(intervals.pop())
