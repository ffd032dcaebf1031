"""The Hub's digests: the SHA-256 of a large file, git's blob SHA-1 of a small one."""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from host.files import check_regular

CHUNK = 4 << 20  # bytes read at a time
SHA256, GIT_SHA1 = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")


def has_digest(
    path: Path, size: int, digest: str, on_read: Callable[[int], object] = lambda count: None
) -> bool:
    """Whether a file has this size and digest; "": the Hub tells none, so the size must do.

    on_read gets the bytes of every chunk read. Raises OSError if the file cannot be read.
    """
    if not path.is_file() or path.stat().st_size != size:
        return False
    return not digest or file_digest(path, digest, on_read) == digest


def file_digest(path: Path, like: str, on_read: Callable[[int], object]) -> str:
    """Return the digest of a file, of the same kind as `like`."""
    buffer = memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        check_regular(path, status)
        if SHA256.fullmatch(like):
            digest = hashlib.sha256()
        else:  # git hashes the length, too
            digest = hashlib.sha1(b"blob %d\0" % status.st_size, usedforsecurity=False)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            on_read(count)
    return digest.hexdigest()
