"""A directory that is filled by several runs, each of which may be killed, and appears when whole.

While it grows it is `.NAME.partial/checkpoint` beside the target NAME. `.NAME.partial` also holds a
lock, a record of the files that are complete, and the files that the work needs (`downloads`).
"""

import contextlib
import json
import os
import shutil
from pathlib import Path

from cli.staging import LOCK, StagedDirectory, flush_to_disk, recover, remove_tree, take_lock

RECORD = "progress.jsonl"  # first line: the identity; then one line for each complete file
SUFFIX = ".partial"
ATTEMPTS = 3  # another process's `recover` may remove the lock file before its lock is taken


def partial_path(target: Path) -> Path:
    """Return the directory in which `target` grows."""
    return target.parent / f".{target.name}{SUFFIX}"


class ResumableDirectory:
    """`path` becomes `target` by `commit`. Until then, a run with the same `identity` goes on.

    files: name -> entry of each file that `add` recorded, and that is still there. Files of another
    identity are removed: they are parts of something else. Raises ValueError if another process
    has the directory, and OSError if the parent cannot be written.
    """

    def __init__(self, target: Path, identity: dict):
        """identity: describes the work; anything that JSON can hold."""
        self.target, self.root = target, partial_path(target)
        self.path, self.downloads = self.root / "checkpoint", self.root / "downloads"
        self._made = [path for path in target.parents if not path.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        recover(target.parent)
        self.root.mkdir(exist_ok=True)
        self._handle: int | None = lock(self.root)
        try:
            found = self._read_record(json.loads(json.dumps(identity)))
            self.files: dict[str, dict] = found or {}
            if found is None:
                self._clear()
                self._append(identity)
            self.path.mkdir(exist_ok=True)
            for path in self.path.iterdir():
                if path.name not in self.files:  # a killed run was writing it
                    path.unlink()
        except BaseException:
            self.close()
            raise

    def _read_record(self, identity: dict) -> dict[str, dict] | None:
        """Return the entries of complete files; None if the record has another identity."""
        try:
            first, *lines = (self.root / RECORD).read_text().splitlines()
            if json.loads(first) != identity:
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
        self.files[entry["file"]] = entry

    def commit(self) -> None:
        """Rename the directory to the target, or let it replace the target; remove the rest."""
        if self.target.exists():
            staged = StagedDirectory(self.target)
            try:
                for path in self.path.iterdir():
                    path.rename(staged.path / path.name)
                staged.commit()
            finally:
                staged.close()
        else:
            flush_to_disk(self.path)
            self.path.rename(self.target)
            flush_to_disk(self.target.parent)
        self._clear()

    def _clear(self) -> None:
        """Remove everything but the lock."""
        for path in self.root.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()

    def close(self) -> None:
        """Release the lock; remove the directory if it holds nothing to go on from."""
        if self._handle is None:
            return
        with contextlib.suppress(OSError):
            held = [*self.path.glob("*"), *self.downloads.glob("*.safetensors")]
            if not held:
                remove_tree(self.root)
                for path in self._made:
                    path.rmdir()  # fails unless empty
        os.close(self._handle)
        self._handle = None


def lock(directory: Path) -> int:
    """Lock a directory; return the lock's handle. Raises ValueError if another process has it."""
    for _ in range(ATTEMPTS):
        handle = take_lock(directory / LOCK, create=True)
        if handle is not None:
            return handle
    raise ValueError(f"another process is working in {directory}; wait for it, then try again")


def remove_partial(target: Path) -> None:
    """Remove what `target` has grown to. Raises ValueError if another process is at work on it."""
    root = partial_path(target)
    if root.is_dir():
        handle = lock(root)
        try:
            remove_tree(root)
        finally:
            os.close(handle)
