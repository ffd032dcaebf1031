"""Where GGUF files lie on a disk: also in the folders of Ollama, LM Studio and the Hub's client.

A file is used where it is found, and never copied.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from gguf_files.container import SPLIT, is_gguf
from host.files import read_regular

OLLAMA_MODEL = "application/vnd.ollama.image.model"  # mediaType of a manifest's layer
MAX_MANIFEST = 1 << 20  # bytes
# Files that are no whole model: vision encoders, heads for multi-token prediction, importance
# matrices, adapters.
PARTIAL = re.compile(r"(^|[-._/])(mmproj|mtp|imatrix|adapter|lora)([-._]|$)", re.IGNORECASE)


def find_gguf(path: Path | str) -> Path | None:
    """Return the GGUF file that a path means; None if it means none.

    path: a GGUF file, whatever its name is; an Ollama manifest; or a folder with one model. Raises
    ValueError for a folder with several, and for a manifest whose file is missing.
    """
    path = Path(path)
    if path.is_dir():
        return the_one_in(path) if not (path / "config.json").is_file() else None
    if is_gguf(path) or path.suffix == ".gguf":
        return path
    return file_of_manifest(path)


def the_one_in(folder: Path) -> Path | None:
    """Return a folder's GGUF file, or the first part of it."""
    names = models_of(p.name for p in folder.iterdir() if p.is_file())
    if len(names) > 1:
        shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
        raise ValueError(f"{folder} has {len(names)} GGUF files: name one of {shown}")
    return folder / names[0] if names else None


def models_of(names: Iterable[str]) -> list[str]:
    """Return the names of GGUF files that are models, of split ones the first part's."""
    found = []
    for name in sorted(names):
        match = SPLIT.fullmatch(name)
        if (
            name.endswith(".gguf")
            and not PARTIAL.search(name)
            and (not match or match[2] == "00001")
        ):
            found.append(name)
    return found


def file_of_manifest(path: Path) -> Path | None:
    """Return the blob that an Ollama manifest names; None if the path is no manifest."""
    try:
        if path.stat().st_size > MAX_MANIFEST:
            return None
        layers = json.loads(read_regular(path))["layers"]
        digests = [each["digest"] for each in layers if each["mediaType"] == OLLAMA_MODEL]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if len(digests) != 1 or not re.fullmatch(r"sha256:[0-9a-f]{64}", str(digests[0])):
        return None
    blob = digests[0].replace(":", "-")
    found = (parent / "blobs" / blob for parent in path.absolute().parents)
    if file := next((file for file in found if file.is_file()), None):
        return file
    raise ValueError(f"{path}: its file blobs/{blob} is missing; pull the model again with Ollama")


def known_folders(repo_id: str) -> list[Path]:
    """Return the folders in which LM Studio and the Hub's client keep a repository's files.

    The newest of the Hub's snapshots come first.
    """
    try:
        home = Path.home()
    except RuntimeError:  # a container may have no home
        home = Path("/nonexistent")
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HF_HOME", home / ".cache/huggingface")
    hub = Path(hub) if os.environ.get("HF_HUB_CACHE") else Path(hub) / "hub"
    snapshots = (hub / f"models--{repo_id.replace('/', '--')}" / "snapshots").glob("*")
    studio = home / ".lmstudio/models", home / ".cache/lm-studio/models"
    folders = sorted(snapshots, key=lambda path: path.stat().st_mtime, reverse=True)
    return [path for path in (*folders, *(each / repo_id for each in studio)) if path.is_dir()]
