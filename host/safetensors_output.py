"""A safetensors file that is written piece by piece: a layer need not be in memory as a whole.

The library's `save_file` wants all tensors at once, and does not reserve the file's blocks. ext4
writes to reserved blocks two to five times as fast (docs/log/loading.md).
"""

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import IO, NamedTuple

# The library's order of tensors: by dtype, wide ones first, then by name. All stay aligned.
DTYPE_ORDER = "F32", "I32", "BF16", "F16", "F8_E4M3", "I8", "U8"


class FileRange(NamedTuple):
    """Where bytes are on disk already."""

    path: Path
    begin: int


class Entry(NamedTuple):
    """One tensor to be written."""

    tag: str  # its dtype in the header
    itemsize: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


def file_order(entries: dict[str, Entry]) -> list[str]:
    """Return the names in the order in which a file has them."""
    return sorted(entries, key=lambda name: (DTYPE_ORDER.index(entries[name].tag), name))


def make_header(entries: dict[str, Entry]) -> bytes:
    """Return a file's length of the header and the header, as the library writes them."""
    header, end = {}, 0
    for name in file_order(entries):
        begin, end = end, end + entries[name].nbytes
        shape = list(entries[name].shape)
        header[name] = {"dtype": entries[name].tag, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Run(NamedTuple):
    """Neighboring bytes of a file. origin: where another file has them."""

    data: memoryview
    origin: FileRange | None = None


class SafetensorsOutput:
    """A new file of these tensors: `order` puts their bytes in order, `write` writes them.

    A thread may order while another one writes. update: as zlib's crc32. `crc32` is the file's once
    it `is_ordered`. Raises OSError if the file exists or the disk is full.
    """

    def __init__(self, path: Path, entries: dict[str, Entry], update: Callable):
        self.header = make_header(entries)
        self.size = len(self.header) + sum(entry.nbytes for entry in entries.values())
        self.crc32, self._update = update(self.header, 0), update
        self._left = {name: entries[name].nbytes for name in file_order(entries)}
        self._early: dict[str, list[Run]] = {}
        self._origin: tuple[Path, IO[bytes]] | None = None  # opened last
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  (closed by `close`, or with self)
        reserve(self._file.fileno(), self.size)
        self._file.write(self.header)

    @property
    def is_ordered(self) -> bool:
        """Whether all bytes have come."""
        return not any(self._left.values())

    def order(self, name: str, run: Run) -> Iterator[Run]:
        """Take the next bytes of a tensor; yield the bytes whose turn it is.

        A tensor that comes early is kept in memory.
        """
        self._early.setdefault(name, []).append(run)
        for turn in [*self._left]:
            for ready in self._early.pop(turn, ()):
                self._left[turn] -= len(ready.data)
                self.crc32 = self._update(ready.data, self.crc32)
                yield ready
            if self._left[turn]:
                assert self._left[turn] > 0, f"{turn} has more bytes than its shape"
                return
            del self._left[turn]

    def write(self, run: Run) -> None:
        """Write the next bytes."""
        data, origin = run
        if origin is not None:
            data = data[self._copy(origin, len(data)) :]
        while len(data):
            data = data[self._file.write(data) :]

    def _copy(self, origin: FileRange, size: int) -> int:
        """Let the system copy bytes of a file; return how many it has copied.

        That takes a half of the CPU time of writing what is mapped.
        """
        path, begin = origin
        done = 0
        with contextlib.suppress(AttributeError, OSError):  # no such call, or not between these
            if self._origin is None or self._origin[0] != path:
                self._origin = path, open(path, "rb", buffering=0)  # noqa: SIM115  (closed with self)
            source, target = self._origin[1].fileno(), self._file.fileno()
            while done < size:
                count = os.copy_file_range(source, target, size - done, begin + done)
                if count == 0:
                    break
                done += count
        return done

    def flush(self) -> None:
        """Wait until what is written has reached the disk (fsync)."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def reserve(handle: int, size: int) -> None:
    """Reserve a file's blocks, where the file system can. Raises OSError if the disk is full."""
    try:
        os.posix_fallocate(handle, 0, size)
    except (AttributeError, OSError) as error:  # macOS has no such function
        if getattr(error, "errno", errno.EINVAL) not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
