"""A directory that appears whole or not at all, even if the process is killed.

Files are written into `.NAME.XXXXXXXX.tmp` beside the target NAME; a rename makes it the target.
The process holds a lock (flock) on a file in that directory as long as it lives. Whoever can take
the lock knows that the writer is dead: process ids mean nothing across containers.

A symbolic link is never followed to remove anything: the link itself is removed or replaced.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from pathlib import Path

from host.files import check_regular, is_own_directory

LOCK = ".moe_fast.lock"  # before the renames it also names the target and its backup
TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.(tmp|old)")
ATTEMPTS = 8  # another process may remove a directory before its lock is taken

log = logging.getLogger("moe_fast")


class StagedDirectory:
    """A temporary directory `.path` that `commit` renames to `target`, replacing what is there.

    The constructor first calls `recover`. Raises OSError if the parent cannot be written.
    """

    def __init__(self, target: Path):
        self.target = target
        recover(target.parent)
        for _ in range(ATTEMPTS):
            self.path = self._sibling("tmp")
            self.path.mkdir()
            try:
                self._handle = take_lock(self.path / LOCK, create=True)
            except OSError:
                self.path.rmdir()
                raise
            if self._handle is not None:
                return
        raise OSError(f"cannot lock a directory beside {target}")

    def _sibling(self, suffix: str) -> Path:
        return self.target.parent / f".{self.target.name}.{secrets.token_hex(4)}.{suffix}"

    def commit(self, replace: bool = True) -> None:
        """Rename the directory to the target.

        A process killed in here leaves what `recover` completes. An exception before the last
        rename leaves the old target in place. Without `replace` a target that is there raises
        OSError, unless it is an empty directory: another process has made it, and may read it.
        """
        backup = self._sibling("old")
        record = json.dumps({"target": self.target.name, "backup": backup.name})
        os.pwrite(self._handle, record.encode(), 0)
        os.fsync(self._handle)
        flush_to_disk(self.path)
        try:
            if replace and os.path.lexists(self.target):
                self.target.rename(backup)
            self.path.rename(self.target)
        except BaseException:
            if os.path.lexists(backup) and not os.path.lexists(self.target):
                backup.rename(self.target)
            raise
        flush_to_disk(self.target.parent)
        try:
            finish_replacement(self.target, backup)
        except (OSError, KeyboardInterrupt) as error:  # the target is whole, and work is done
            cause = getattr(error, "strerror", None) or "interrupted"
            log.warning("cannot remove %s (%s); the next run tries again", backup, cause)

    def close(self) -> None:
        """Remove the directory unless it was committed; release the lock."""
        with contextlib.suppress(OSError):
            remove_tree(self.path)
        os.close(self._handle)


def recover(parent: Path) -> None:
    """Complete or remove what killed processes left in `parent`; log one line for each.

    Directories of living processes and of other programs stay as they are, and so do links.
    """
    with contextlib.suppress(OSError):
        for path in filter(is_own_directory, sorted(parent.iterdir())):
            with contextlib.suppress(OSError):
                if (path / LOCK).is_file():
                    recover_directory(path)
                elif TEMPORARY.fullmatch(path.name):
                    path.rmdir()  # fails unless empty: killed before the lock file or after it


def recover_directory(path: Path) -> None:
    """Complete or remove a directory with a lock file if its writer is dead."""
    handle = take_lock(path / LOCK, create=False)
    if handle is None:
        return
    try:
        target, backup = read_record(handle, path.parent)
        if TEMPORARY.fullmatch(path.name):
            if target is None or os.path.lexists(target):
                remove_tree(path)
                log.warning("removed %s, left behind by a run that was killed", path)
                return
            path.rename(target)
            log.warning("completed %s: its run was killed in its last step", target)
            path = target
        finish_replacement(path, backup if target == path else None)
    finally:
        os.close(handle)


def finish_replacement(target: Path, backup: Path | None) -> None:
    """Remove the replaced target, then the lock file that names it."""
    if backup is not None:
        remove(backup)
    (target / LOCK).unlink(missing_ok=True)


def take_lock(path: Path, create: bool) -> int | None:
    """Lock a file; return its handle, or None if another process holds it or has removed it.

    A file system without locks gives a handle to the creator only: nobody else removes its files.
    Raises OSError if the path is no regular file. `create` replaces a link.
    """
    if create and path.is_symlink():
        path.unlink()
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    try:
        handle = os.open(path, flags, 0o644)
    except FileNotFoundError:
        return None
    try:
        check_regular(path, os.fstat(handle))
    except OSError:
        os.close(handle)
        raise
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = os.fstat(handle).st_nlink > 0
    except BlockingIOError:
        taken = False
    except OSError:
        taken = create
    if not taken:
        os.close(handle)
        return None
    return handle


def read_record(handle: int, parent: Path) -> tuple[Path, Path] | tuple[None, None]:
    """Return target and backup named in a lock file; None, None before the renames."""
    try:
        record = json.loads(os.pread(handle, 4096, 0))
        target, backup = record["target"], record["backup"]
        match = TEMPORARY.fullmatch(backup)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, None
    if match is None or match[1] != target or "/" in backup:
        return None, None
    return parent / target, parent / backup


def remove_tree(path: Path) -> None:
    """Remove a directory, its lock file last: a process killed in here leaves it to `recover`.

    A link is removed, and not the directory that it names.
    """
    if path.is_symlink():
        path.unlink()
    if not path.is_dir():
        return
    for entry in path.iterdir():
        if entry.name != LOCK:
            remove(entry)
    (path / LOCK).unlink(missing_ok=True)
    path.rmdir()


def remove(path: Path) -> None:
    """Remove a file, a directory with everything in it, or a link but never its target."""
    if is_own_directory(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Wait until a file or directory has reached the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
