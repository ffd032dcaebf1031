"""A directory that is filled by several runs, each of which may be killed, and appears when whole.

While it grows it is `.NAME.partial/checkpoint` beside the target NAME. `.NAME.partial` also holds a
lock, a record of the files that are complete, and the files that the work needs (`downloads`).
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from host.files import is_own_directory, is_own_file, read_regular
from host.staging import (
    LOCK,
    StagedDirectory,
    flush_to_disk,
    recover,
    remove,
    remove_tree,
    take_lock,
)

RECORD = "progress.jsonl"  # first line: the identity; then one line for each complete file
SUFFIX = ".partial"
ATTEMPTS = 3  # another process's `recover` may remove the lock file before its lock is taken

log = logging.getLogger("moe_fast")


def partial_path(target: Path) -> Path:
    """Return the directory in which `target` grows."""
    return target.parent / f".{target.name}{SUFFIX}"


class ResumableDirectory:
    """`path` becomes `target` by `commit`. Until then, a run with the same `identity` goes on.

    files: name -> entry of each file that `add` recorded, and that is still there, undamaged. Files
    of another identity are removed: they are parts of something else. Links in the place of our
    directories and files are removed, too, and never followed. Raises ValueError if another process
    has the directory, and OSError if the parent cannot be written.
    """

    def __init__(
        self,
        target: Path,
        identity: dict,
        is_whole: Callable[[Path, dict], bool] = lambda path, entry: True,
    ):
        """identity: describes the work; anything that JSON can hold. is_whole: tells whether a
        file is what its entry recorded; default: its size is compared alone."""
        self.target, self.root = target, partial_path(target)
        self.path, self.downloads = self.root / "checkpoint", self.root / "downloads"
        self._made = [path for path in target.parents if not path.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        recover(target.parent)
        make_directory(self.root)
        self._handle: int | None = lock(self.root)
        try:
            found = self._read_record(json.loads(json.dumps(identity)))
            if found is None:
                self._clear()
                self._append(identity)
            make_directory(self.path)
            if self.downloads.is_symlink():
                remove(self.downloads)
            self.files = {name: e for name, e in (found or {}).items() if self._has(e, is_whole)}
            for path in self.path.iterdir():
                if path.name not in self.files:  # a killed run was writing it, or it is damaged
                    remove(path)
        except BaseException:
            self.close()
            raise

    def _read_record(self, identity: dict) -> dict[str, dict] | None:
        """Return the entries of complete files; None if the record has another identity."""
        if not is_own_file(self.root / RECORD):
            return None
        try:
            first, *lines = read_regular(self.root / RECORD).decode().splitlines()
            if json.loads(first) != identity:
                return None
        except (OSError, ValueError, RecursionError):
            return None
        files: dict[str, dict] = {}
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):  # the last line may be cut
                entry = json.loads(line)
                if isinstance(entry, dict) and isinstance(entry.get("file"), str):
                    files[entry["file"]] = entry
        return files

    def _has(self, entry: dict, is_whole: Callable[[Path, dict], bool]) -> bool:
        """Whether the file of an entry is there, and as the entry says; log one that is damaged."""
        path = self.path / entry["file"]
        if Path(entry["file"]).name != entry["file"] or not is_own_file(path):
            return False
        whole = path.stat().st_size == entry.get("bytes") and is_whole(path, entry)
        if not whole:
            log.warning("%s is damaged: making it again", path)
        return whole

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

    def commit(self, replace: bool = True) -> None:
        """Rename the directory to the target, or let it replace the target; remove the rest.

        replace: as of `StagedDirectory.commit`.
        """
        if replace and os.path.lexists(self.target):
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
            if path.name != LOCK:
                remove(path)

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


def make_directory(path: Path) -> None:
    """Make a directory unless it is there; a link in its place is removed.

    Its target may be a folder of the user, whose files we would take for ours and remove.
    """
    if path.is_symlink():
        log.warning("removed the link %s; its target is left as it was", path)
        remove(path)
    path.mkdir(exist_ok=True)


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
    if root.is_symlink():
        remove(root)
    if is_own_directory(root):
        handle = lock(root)
        try:
            remove_tree(root)
        finally:
            os.close(handle)
