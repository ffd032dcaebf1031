"""Where compiled code is kept between runs. It is executed, so others must not write there."""

import errno
import logging
import os
import re
import stat
import tempfile
from pathlib import Path

from host.folders import user_cache

log = logging.getLogger("moe_fast")
# Inductor writes the path into a compiler's command line without quotes.
UNQUOTED = re.compile(r"[\s\"'$`\\;&|<>()*?\[\]{}!#~\x00-\x1f\x7f]")


def use_compile_cache(directory: Path | None) -> None:
    """Keep all compiled code in a folder from now on. Call it before anything is compiled.

    directory: of --compile_cache; a copy of it serves on another machine with the same GPU and
    packages. None: $TORCHINDUCTOR_CACHE_DIR, else a folder of the user's own. Raises ValueError,
    and OSError if it cannot be made.
    """
    if directory is not None:
        folder = directory.absolute()
        prepare(folder)
        if reason := why_unsafe(folder):
            log.warning("--compile_cache %s %s, and its code is executed", folder, reason)
    elif "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    else:
        folder = own_folder()
    # Inductor and Triton read these when they compile.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    if directory or "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")


def own_folder() -> Path:
    """Return a folder of the user's own with mode 0700: in the user's cache, if that works.

    Else below the temporary directory: containers often have no home that can be written, and
    compilers do not take a path such as "/home/Jane Doe". Raises ValueError if the folder is
    another user's.
    """
    folder = user_cache().absolute() / "compiled"
    try:
        prepare(folder)
    except (OSError, ValueError):
        folder = Path(tempfile.gettempdir()) / f"moe-fast-{os.getuid()}-compiled"
        prepare(folder)
    if folder.stat().st_uid == os.getuid():
        folder.chmod(0o700)
    elif reason := why_unsafe(folder):
        fix = "name another one by --compile_cache"
        raise ValueError(f"{folder} {reason}, and its code would be executed: {fix}")
    return folder


def prepare(folder: Path) -> None:
    """Make a folder. Raises OSError, and ValueError for a path that compilers do not take."""
    if found := UNQUOTED.search(str(folder)):
        raise ValueError(
            f"--compile_cache {folder}: compilers do not take {found[0]!r} in a path; "
            "name another folder"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def why_unsafe(folder: Path) -> str:
    """Return why others may change what is in a folder; "" if they may not.

    root is trusted: it can do anything, and owns the folders of a container's image.
    """
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()):
        return "belongs to another user"
    return "can be written by others" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
