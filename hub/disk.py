"""Models on this disk: which there are, their sizes, and how one is removed. Imports no torch."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cli.model_name import PUBLISHED, ModelName, models_folder, parse_model_name
from cli.resumable import SUFFIX, remove_partial
from cli.staging import LOCK, recover, remove_tree, take_lock

SOURCE = "source.json"  # side file of a checkpoint: {"repo_id", "revision", "commit", "published"}
DOWNLOAD = "download"  # what the format's column says of files as the Hub has them
CACHE = ".cache"  # the Hub client's, beside files that it downloaded
RECORDS = f"{CACHE}/huggingface/download"
LIST_HEADER = "model", "family", "format", "size"


class StoredModel(NamedTuple):
    """A converted checkpoint, one that is not complete, or a kept download."""

    name: ModelName
    family: str
    format: str
    bytes: int
    paths: tuple[Path, ...]  # its directory; the files of a kept download
    complete: bool = True

    @property
    def folder(self) -> Path:
        """The folder of the model in all its formats."""
        return self.paths[0].parent


def read(path: Path) -> dict:
    """Return a JSON object; {} if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def is_checkpoint(directory: Path) -> bool:
    """Whether there is a converted checkpoint; one that was being renamed is completed first."""
    if not directory.exists() and directory.parent.is_dir():
        recover(directory.parent)
    return "moe_fast" in read(directory / "config.json")


# Finding ------------------------------------------------------------------------------------------


def find_checkpoint(name: ModelName, revision: str | None = None) -> Path | None:
    """Return the directory of a model on disk, or None.

    A name without a format: in the one that a conversion keeps. Raises ValueError if the model on
    disk is not of `revision` (a branch, tag or commit; None: any).
    """
    if name.format is not None:
        found = name.checkpoint()
        if not is_checkpoint(found):
            return None
    else:
        paths = (name.checkpoint(format) for format in PUBLISHED)
        found = next((path for path in paths if is_checkpoint(path) and is_published(path)), None)
        if found is None:
            return None
    check_revision(found, name, revision)
    return found


def is_published(directory: Path) -> bool:
    """Whether a checkpoint has the format that its model was published in."""
    published = read(directory / SOURCE).get("published")
    return published is None or directory.name == f"model_{published}"


def check_revision(directory: Path, name: ModelName, revision: str | None) -> None:
    """Raise ValueError unless a checkpoint was made from this revision."""
    source = read(directory / SOURCE)
    made_from = source.get("revision"), source.get("commit")
    if revision is not None and revision not in made_from:
        known = made_from[0] or made_from[1] or "one that is not known"
        fix = f"leave --revision out, or remove it first: generate.py --remove {name}"
        raise ValueError(f"{directory} is of another revision ({known}); {fix}")


def stored_models() -> list[StoredModel]:
    """Return everything below the folder of models, by name."""
    folders = (path for path in models_folder().glob("*/*") if path.is_dir())
    return [model for folder in sorted(folders) for model in stored_in(folder)]


def stored_in(folder: Path) -> Iterator[StoredModel]:
    """Yield the models of one repository's folder: complete ones, partial ones, the download."""
    try:
        name = parse_model_name(f"{folder.parent.name}/{folder.name}")
    except ValueError:
        return
    for path in sorted(folder.glob("model_*")):
        config = read(path / "config.json")
        if "moe_fast" in config:
            format = path.name.removeprefix("model_")
            args = config.get("args")
            family = args.get("family", "?") if isinstance(args, dict) else "?"
            yield StoredModel(name._replace(format=format), family, format, size(path), (path,))
    for path in sorted(folder.glob(f".model_*{SUFFIX}")):
        format = path.name.removeprefix(".model_").removesuffix(SUFFIX)
        named = name._replace(format=format)
        yield StoredModel(named, "?", f"{format}, incomplete", size(path), (path,), False)
    records = folder.glob(f"{RECORDS}/*.metadata")  # files without a record are the user's own
    files = [folder / path.name.removesuffix(".metadata") for path in records]
    files = [path for path in files if path.is_file()]
    files.sort(key=lambda path: path.suffix == ".safetensors")  # removed last: a rest is listed
    if files and files[-1].suffix == ".safetensors":
        family = read(folder / "config.json").get("model_type", "?")
        nbytes = sum(path.stat().st_size for path in files)
        yield StoredModel(name, family, DOWNLOAD, nbytes, tuple(files))


def size(path: Path) -> int:
    """Return the bytes of all files below a directory."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def in_gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def table(models: list[StoredModel]) -> str:
    """Return a line for each model, under a header."""
    rows = [LIST_HEADER]
    rows += [(str(m.name), str(m.family), m.format, in_gb(m.bytes)) for m in models]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if cell is row[-1] else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        )
        for row in rows
    )
    return "\n".join(lines)


# Removing -----------------------------------------------------------------------------------------


def find_stored(name: ModelName) -> list[StoredModel]:
    """Return what `name` names: one format, or without one everything of the model.

    Raises ValueError if there is nothing, or if a directory also holds files of the user.
    """
    models = list(stored_in(name.folder)) if name.folder.is_dir() else []
    found = [m for m in models if name.format in (None, m.name.format)]
    if not found:
        others = ", ".join(sorted({str(m.name) for m in models}))
        fix = f"there are {others}" if others else "generate.py --list shows the models on disk"
        raise ValueError(f"{name} is not on disk in {models_folder()}; {fix}")
    for model in found:
        if model.complete and model.format != DOWNLOAD:
            check_only_ours(model.paths[0])
    return found


def check_only_ours(directory: Path) -> None:
    """Raise ValueError if a checkpoint's directory holds files that are not the checkpoint's."""
    index = read(directory / "index.json")
    ours = {
        "config.json",
        "index.json",
        LOCK,
        *index.get("files", ()),
        *index.get("side_files", ()),
    }
    others = sorted({path.name for path in directory.iterdir()} - ours)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ValueError(f"{directory} also holds {others[0]}{more}; move that away first")


def remove_stored(model: StoredModel) -> None:
    """Remove one model. Raises ValueError if another process is making it."""
    path, folder = model.paths[0], model.folder
    if not model.complete:
        remove_partial(folder / path.name.removeprefix(".").removesuffix(SUFFIX))
    elif model.format == DOWNLOAD:
        for file in model.paths:
            file.unlink()
        if (folder / CACHE).is_dir():
            shutil.rmtree(folder / CACHE)
    else:
        remove_checkpoint(path)
    for left in (folder, folder.parent):
        if left.is_dir() and not any(left.iterdir()):
            left.rmdir()


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint: renamed first, so that `recover` ends what a killed process began."""
    handle = take_lock(path / LOCK, create=True)
    if handle is None:
        raise ValueError(f"another process is working in {path}; wait for it, then try again")
    try:
        hidden = path.parent / f".{path.name}.{os.urandom(4).hex()}.tmp"
        path.rename(hidden)
        remove_tree(hidden)
    finally:
        os.close(handle)
