"""The user's folders for a cache and for state, which containers often lack; models' names."""

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

    $XDG_CACHE_HOME, else ~/.cache. Raises as `user_folder`.
    """
    return user_folder("XDG_CACHE_HOME", ".cache")


def user_state() -> Path:
    """Return the folder for what this program keeps between runs; it may not exist yet.

    $XDG_STATE_HOME, else ~/.local/state. Raises as `user_folder`.
    """
    return user_folder("XDG_STATE_HOME", ".local/state")


def model_folder(checkpoint: Path) -> str:
    """Return the name of the folder NAME/model_FORMAT that a checkpoint is in.

    One that lies in the root, as containers mount it, has its own name: a model's is not empty.
    """
    path = checkpoint.absolute()
    return path.parent.name or path.name


def user_folder(variable: str, default: str) -> Path:
    """Return this program's folder below $variable, else below `default` in the user's home.

    Else a folder of this user id below the temporary directory: a container may have neither $HOME
    nor a passwd entry. Logs a warning for the last, and raises ValueError if it is another user's.
    """
    if given := os.environ.get(variable):
        return Path(given) / "moe-fast"
    try:
        return Path.home() / default / "moe-fast"
    except RuntimeError:
        folder = Path(tempfile.gettempdir()) / f"moe-fast-{os.getuid()}"
        # lstat: anybody may put a link to a folder of this user there.
        if os.path.lexists(folder) and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
            what = f"{folder} belongs to another user, or is a link"
            raise ValueError(f"{what}: set {variable}") from None
        warn(f"there is no home directory: using {folder} (or set {variable})")
        return folder
