"""A directory that is filled by several runs, each of which may be killed, and appears when whole.

While it grows it is `.NAME.partial/checkpoint` beside the target NAME. `.NAME.partial` also holds a
lock, a record of the files that are complete, and what belongs to the work: downloads.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path

from cli.staging import LOCK, flush_to_disk, recover, remove_tree, take_lock

RECORD = "progress.jsonl"  # first line: what is being made; then one line for each complete file
SUFFIX = ".partial"
ATTEMPTS = 3  # another process's `recover` may remove the lock file before its lock is taken


def partial_path(target: Path) -> Path:
    """Return the directory in which `target` grows."""
    return target.parent / f".{target.name}{SUFFIX}"


class ResumableDirectory:
    """`path` becomes `target` by `commit`. Without it, another run with the same `identity` goes on.

    files: name -> entry of each file that `add` recorded, and that is still there. An identity that
    differs from the last run's removes that run's files: they are parts of something else. Raises
    ValueError if another process has it, and OSError if the parent cannot be written.
    """

    def __init__(self, target: Path, identity: dict):
        self.target, self.root = target, partial_path(target)
        self.path = self.root / "checkpoint"
        target.parent.mkdir(parents=True, exist_ok=True)
        recover(target.parent)
        self.root.mkdir(exist_ok=True)
        self._handle = lock(self.root)
        try:
            self.files = self._read_record(identity)
            if self.files is None:
                self.clear(keep=LOCK)
                self._append({"identity": identity})
                self.files = {}
            self.path.mkdir(exist_ok=True)
            for path in self.path.iterdir():  # the one that was being written
                if path.name not in self.files:
                    path.unlink()
        except BaseException:
            self.close()
            raise

    def _read_record(self, identity: dict) -> dict[str, dict] | None:
        """Return the entries of complete files; None if there are none of this identity."""
        try:
            first, *lines = (self.root / RECORD).read_text().splitlines()
            if json.loads(first) != json.loads(json.dumps({"identity": identity})):
                return None
        except (OSError, ValueError):
            return None
        files = {}
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, OSError):  # the last line may be cut
                entry = json.loads(line)
                if (self.path / entry["file"]).stat().st_size == entry["bytes"]:
                    files[entry["file"]] = entry
        return files

    def _append(self, value: dict) -> None:
        """Add a line to the record, and wait until it has reached the disk."""
        with open(self.root / RECORD, "a") as stream:
            stream.write(f"{json.dumps(value)}\n")
            stream.flush()
            os.fsync(stream.fileno())

    def add(self, entry: dict) -> None:
        """Record a complete file: {"file": its name, "bytes": its size, ...}."""
        self._append(entry)

    def commit(self) -> None:
        """Rename the directory to the target, which must not exist; remove the rest."""
        flush_to_disk(self.path)
        self.path.rename(self.target)
        flush_to_disk(self.target.parent)
        self.clear(keep=LOCK)

    def clear(self, keep: str) -> None:
        """Remove everything below the root but one file."""
        for path in self.root.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != keep:
                path.unlink()

    def close(self) -> None:
        """Release the lock. The files stay, unless they have been committed."""
        if not (self.root / RECORD).exists():
            with contextlib.suppress(OSError):
                (self.root / LOCK).unlink(missing_ok=True)
                self.root.rmdir()
        os.close(self._handle)


def lock(directory: Path) -> int:
    """Lock a directory; return the lock's handle. Raises ValueError if another process has it."""
    for _ in range(ATTEMPTS):
        handle = take_lock(directory / LOCK, create=True)
        if handle is not None:
            return handle
    raise ValueError(f"another process is working in {directory}; wait for it, then try again")


def remove_partial(target: Path) -> None:
    """Remove what `target` has grown to. Raises ValueError if another process is at it."""
    root = partial_path(target)
    if root.is_dir():
        handle = lock(root)
        try:
            remove_tree(root)
        finally:
            os.close(handle)
