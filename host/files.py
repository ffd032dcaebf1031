"""Read files only if they are regular, write whole ones; tell files and directories from links."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

Stamp = tuple[int, int, int]
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_READ = 1 << 30  # bytes; the largest tokenizer.json and index have tens of megabytes


def read_regular(path: Path) -> bytes:
    """Return the contents of a file.

    Raises OSError unless it is a regular file of at most MAX_READ bytes: a FIFO would wait for its
    writer, and /dev/zero has no end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        check_regular(path, os.fstat(handle))
        if os.fstat(handle).st_size > MAX_READ:
            raise OSError(errno.EFBIG, f"over {MAX_READ >> 30} GiB", str(path))
        return file.read()


def stamp(status: os.stat_result) -> Stamp:
    """Return what identifies a file's contents: size, time of change, inode."""
    return status.st_size, status.st_mtime_ns, status.st_ino


def check_regular(path: Path, status: os.stat_result | None = None) -> None:
    """Raise OSError unless a file is a regular one. status: default: that of the path."""
    if not stat.S_ISREG((status or path.stat()).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def lfs_pointer(path: Path) -> str:
    """Return what to do about a file for which `git clone` left a pointer; "" for any other."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return ""
    return f"{path} is a pointer of Git LFS: run git lfs pull in its folder" if is_pointer else ""


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole, or leave what was there. Raises OSError, or UnicodeEncodeError."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        part.write_text(text, "utf-8")
        part.replace(path)
    except OSError as error:
        error.filename = str(path)  # what the user has named
        raise
    finally:
        with suppress(OSError):  # it is there after an error alone
            part.unlink()


def is_own_file(path: Path) -> bool:
    """Whether there is a regular file, and not a link to one."""
    return path.is_file() and not path.is_symlink()


def is_own_directory(path: Path) -> bool:
    """Whether there is a directory, and not a link to one."""
    return path.is_dir() and not path.is_symlink()
