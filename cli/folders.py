"""The user's cache folder, which containers often lack."""

import logging
import os
import tempfile
from functools import cache
from pathlib import Path

log = logging.getLogger("moe_fast")


@cache  # one warning a process
def warn(message: str) -> None:
    log.warning(message)


def user_cache() -> Path:
    """Return the folder for this program's files in the user's cache; it may not exist yet.

    $XDG_CACHE_HOME, else ~/.cache, else a folder of this user id below the temporary directory:
    a container may have neither $HOME nor a passwd entry. Logs a warning for the last,
    and raises ValueError if it is another user's.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "moe-fast"
    try:
        return Path.home() / ".cache" / "moe-fast"
    except RuntimeError:
        folder = Path(tempfile.gettempdir()) / f"moe-fast-{os.getuid()}"
        if folder.exists() and folder.stat().st_uid != os.getuid():
            raise ValueError(f"{folder} belongs to another user: set XDG_CACHE_HOME") from None
        warn(f"there is no home directory: using {folder} (or set XDG_CACHE_HOME)")
        return folder
