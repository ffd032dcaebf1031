"""Copy a model's files to the GPU before torch is imported: imports leave it and most cores idle.

    start            begin the copies, in threads
    take             bytes of a file that is on the GPU
    staged_bytes     what the copies take of the GPU's memory
    close            free what was not taken

Threads read a file into pinned buffers, and copy those into memory of the driver, where each large
tensor has its own. `checkpoint.SafetensorsFile.read` then takes that, after the usual checks. None
of it is necessary: a file that is not on the GPU is read as ever.
"""

import ctypes
import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from host.files import Stamp, stamp
from host.switches import switch_interval

PIECE = 32 << 20  # bytes of a buffer; each piece needs Python's lock twice
WORKERS = 8  # threads: 14 GB/s from the page cache of a machine with 16 cores
SPARE = 2 << 30  # bytes of the GPU's memory that the copies leave
SWITCH_SECONDS = 5e-4  # after which an import gives Python's lock away; Python's 5 ms are a piece
LEAST = 4 << 20  # bytes of a tensor with memory of its own: the driver gives 2 MB at a time
MAX_HEADER = 100 << 20  # bytes; the library takes no more
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


class Block:
    """Memory of the GPU for bytes of a file. It is freed when nothing refers to this."""

    def __init__(self, begin: int, size: int, address: int, driver: Driver):
        self.begin, self.size, self.address = begin, size, address
        # The driver waits for work of the GPU that reads the memory.
        free = weakref.finalize(self, free_memory, driver, address)
        free.atexit = False  # the process's end frees it anyway


def free_memory(driver: Driver, address: int) -> None:
    taken.pop(address, None)
    with suppress(OSError):
        driver.free(address)


class Part:
    """Bytes of a block, as PyTorch takes memory of others. Whoever uses them keeps this."""

    def __init__(self, block: Block, begin: int, size: int):
        self.block = block
        data = block.address + begin - block.begin, False  # False: it may be written
        self.__cuda_array_interface__ = dict(shape=(size,), typestr="|u1", data=data, version=3)


class StagedFile:
    """A safetensors file and its copy on the GPU: blocks by their first byte in the file."""

    def __init__(self, path: Path, stamp: Stamp):
        self.path, self.stamp = path, stamp
        self.blocks: dict[int, Block] = {}
        self.done, self.is_complete = threading.Event(), False

    def take(self, begin: int, size: int) -> tuple[Part, bool] | None:
        """Return bytes of the file, and whether they are a block, which is then the caller's.

        None: they were taken before.
        """
        holds = (each for each in self.blocks.values() if 0 <= begin - each.begin < each.size)
        if (block := next(holds, None)) is None:
            return None
        is_own = (block.begin, block.size) == (begin, size)
        if is_own:
            taken[block.address] = self.blocks.pop(begin).size
        return Part(block, begin, size), is_own


def divide(path: Path) -> list[tuple[int, int]]:
    """Return begin and size of a safetensors file's blocks: large tensors, runs of small ones.

    Raises ValueError, or others, for a damaged file.
    """
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER:
            raise ValueError(f"{path}: {length} bytes of header")
        header = json.loads(stream.read(length))
    entries = (entry for name, entry in header.items() if name != "__metadata__")
    blocks: list[tuple[int, int]] = []
    for begin, end in sorted(entry["data_offsets"] for entry in entries):
        at, size = 8 + length + begin, end - begin
        if blocks and max(size, blocks[-1][1]) < LEAST and sum(blocks[-1]) == at:
            at, before = blocks.pop()
            size += before
        if size:
            blocks.append((at, size))
    return blocks


class Staging:
    """Copies of files, made by threads."""

    def __init__(self, driver: Driver, paths: Sequence[Path], workers: int):
        self.driver = driver
        found = [StagedFile(path, stamp(path.stat())) for path in paths]
        # The largest first, so that all threads end together.
        self.waiting = deque(sorted(found, key=lambda file: -file.stamp[0]))
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
        if sum(size for size, *_ in self.files) + SPARE > self.driver.free_bytes():
            return
        for file in self.files.values():
            with suppress(ValueError, KeyError, TypeError, AttributeError):  # it is damaged
                for begin, size in divide(file.path):
                    address = self.driver.allocate(size)
                    file.blocks[begin] = Block(begin, size, address, self.driver)

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
        view = memoryview((ctypes.c_char * PIECE).from_address(buffer)).cast("B")
        with open(file.path, "rb", buffering=0) as stream:
            for block in file.blocks.values():
                stream.seek(block.begin)
                for at in range(0, block.size, PIECE):
                    count = min(PIECE, block.size - at)
                    if not self.goes_on() or stream.readinto(view[:count]) != count:
                        return
                    self.driver.copy(block.address + at, buffer, count)
            file.is_complete = stamp(os.fstat(stream.fileno())) == file.stamp

    def find(self, key: Stamp) -> StagedFile | None:
        """Return the file with this stamp, when it is on the GPU.

        None: it is not there, or no thread has begun it: then none will.
        """
        file = self.files.get(key)
        if file is None:
            return None
        self.allocated.wait()
        with self.lock:
            was_waiting = file in self.waiting
            if was_waiting:
                self.waiting.remove(file)
        if was_waiting:
            file.blocks.clear()
            return None
        file.done.wait()
        return file if file.is_complete else None

    def nbytes(self) -> int:
        """Return the bytes of the GPU that the copies have, without those that were taken."""
        self.allocated.wait()
        files = self.files.values()
        return sum(block.size for file in files for block in [*file.blocks.values()])

    def close(self) -> None:
        """End the threads, and free what was not taken."""
        self.is_ended = True
        for thread in self.threads:
            thread.join()
        for file in self.files.values():
            file.blocks.clear()


current: list[Staging] = []  # at most one
taken: dict[int, int] = {}  # address -> bytes, of blocks that are in use
interval = ExitStack()  # of Python's lock, while there is one


def start(paths: Sequence[Path]) -> None:
    """Begin to copy files to the first GPU in threads, if they fit."""
    if current or not paths:
        return
    cores = os.cpu_count() or 1
    with suppress(OSError):
        current.append(Staging(Driver(), paths, max(1, min(WORKERS, cores // 2))))
        interval.enter_context(switch_interval(SWITCH_SECONDS))


def take(key: Stamp, begin: int, size: int) -> tuple[Part, bool] | None:
    """Return bytes of the file with this stamp, if it is on the first GPU.

    Wait while it is copied. The result is that of `StagedFile.take`.
    """
    file = current[0].find(key) if current else None
    return None if file is None else file.take(begin, size)


def taken_bytes() -> int:
    """Return the bytes of the GPU that were taken, of which PyTorch's allocator does not know."""
    return sum(taken.values())


def staged_bytes() -> int:
    """Return the bytes of the first GPU's memory that copies have until they are read."""
    return current[0].nbytes() if current else 0


def close() -> None:
    """Free what was not taken. From now on all reads are of files."""
    while current:
        current.pop().close()
    interval.close()
