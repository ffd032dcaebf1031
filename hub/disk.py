"""Models on this disk: which there are, their sizes, and how one is removed. Imports no torch."""

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cli.command import printable
from cli.model_name import PUBLISHED, UNRECORDED, ModelName, models_folder, parse_model_name
from cli.report import in_bytes
from host.files import is_own_directory, is_own_file, read_regular
from host.resumable import SUFFIX, remove_partial
from host.staging import LOCK, recover, remove, remove_tree, take_lock

SOURCE = "source.json"  # side file of a checkpoint: {"repo_id", "revision", "commit", "published"}
WEIGHTS = ".safetensors", ".gguf"
DOWNLOAD = "download"  # what the format's column says of files as the Hub has them
CACHE = ".cache/huggingface"  # the Hub client's, beside files that it downloaded
RECORDS = f"{CACHE}/download"
WRITTEN = re.compile(  # names that a conversion writes, for a checkpoint whose index is damaged
    r"(layer_\d+|rest)\.safetensors|tokenizer(_config)?\.(json|model)|chat_template\.jinja|"
    r"(special_tokens_map|added_tokens|generation_config|source)\.json"
)
LIST_HEADER = "model", "family", "format", "size"

log = logging.getLogger("moe_fast")


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

    @property
    def is_link(self) -> bool:
        """Whether the model is behind a symbolic link: that alone is removed."""
        return self.format != DOWNLOAD and self.paths[0].is_symlink()


def read(path: Path) -> dict:
    """Return the JSON object in a file; {} if there is none, or the file is damaged or odd."""
    try:
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
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
    names = UNRECORDED if published is None else (published,)
    return directory.name in {f"model_{name}" for name in names}


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
    models = []
    for folder in sorted(models_folder().glob("*/*")):
        try:
            models += stored_in(folder)
        except OSError as error:  # one model that cannot be read must not hide the others
            log.warning(f"{folder} cannot be read: {error.strerror}")
    return models


def stored_in(folder: Path) -> Iterator[StoredModel]:
    """Yield the models of one repository's folder: complete ones, partial ones, the download.

    Raises OSError if the folder cannot be read.
    """
    try:
        name = parse_model_name(f"{folder.parent.name}/{folder.name}")
    except ValueError:
        return
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in entries:
        if path.name.startswith("model_"):
            config, index = read(path / "config.json"), read(path / "index.json")
            format = shown = path.name.removeprefix("model_")
            if "moe_fast" not in config:
                if not isinstance(index.get("tensors"), dict):
                    continue  # not ours
                shown = f"{format}, damaged"
            family = text_of(config.get("args"), "family")
            yield StoredModel(name._replace(format=format), family, shown, size(path), (path,))
    for path in entries:
        format = path.name.removeprefix(".model_").removesuffix(SUFFIX)
        if path.name == f".model_{format}{SUFFIX}":
            named = name._replace(format=format)
            yield StoredModel(named, "?", f"{format}, incomplete", size(path), (path,), False)
    files = downloaded_files(folder)
    if files and files[-1].suffix in WEIGHTS:
        is_gguf = files[-1].suffix == ".gguf"
        family = "gguf" if is_gguf else text_of(read(folder / "config.json"), "model_type")
        yield StoredModel(name, family, DOWNLOAD, sum(map(size, files)), tuple(files))


def downloaded_files(folder: Path) -> list[Path]:
    """Return the files that the Hub's client has recorded, weights last.

    Files without a record are the user's own, and so are records behind a link. Weights are removed
    last, so that the rest of an interrupted removal is listed.
    """
    if not all(map(is_own_directory, (folder / ".cache", folder / CACHE, folder / RECORDS))):
        return []
    records = sorted((folder / RECORDS).rglob("*.metadata"))
    names = [str(path.relative_to(folder / RECORDS)) for path in records]
    files = [folder / name.removesuffix(".metadata") for name in names]
    files = [path for path in files if path.is_file()]
    return sorted(files, key=lambda path: path.suffix in WEIGHTS)


def text_of(value: object, key: str) -> str:
    """Return a text of a JSON object; "?" if there is none."""
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, str) else "?"


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory, as far as can be read."""
    if path.is_dir():
        return sum(map(size_of_file, path.rglob("*")))
    return size_of_file(path)


def size_of_file(path: Path) -> int:
    """Return the bytes of a regular file; 0 for all else, and for one that has just gone."""
    try:
        return path.lstat().st_size if is_own_file(path) else 0
    except OSError:
        return 0


def table(models: list[StoredModel]) -> str:
    """Return a line for each model, under a header."""
    rows = [LIST_HEADER]
    rows += [
        (printable(str(m.name)), printable(m.family), printable(m.format), in_bytes(m.bytes))
        for m in models
    ]
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

    Raises ValueError if there is nothing, if a directory also holds files of the user, and if the
    model's folder is a link: its target is never removed.
    """
    for folder in (name.folder.parent, name.folder):
        if folder.is_symlink():
            what = f"{folder} is a link: its target is not removed"
            raise ValueError(f"{what}; remove the link, or the models in {folder.resolve()}")
    models = list(stored_in(name.folder)) if name.folder.is_dir() else []
    found = [m for m in models if name.format in (None, m.name.format)]
    if not found:
        others = ", ".join(sorted({str(m.name) for m in models}))
        fix = f"there are {others}" if others else "generate.py --list shows the models on disk"
        raise ValueError(f"{name} is not on disk in {models_folder()}; {fix}")
    for model in found:
        if model.complete and model.format != DOWNLOAD and not model.is_link:
            check_only_ours(model.paths[0])
    return found


def check_only_ours(directory: Path) -> None:
    """Raise ValueError if a checkpoint's directory holds files that are not the checkpoint's."""
    index = read(directory / "index.json")
    listed = [index.get(key) for key in ("files", "side_files")]
    ours = {"config.json", "index.json", LOCK}
    for files in listed:
        ours |= {file for file in files if isinstance(file, str)} if is_listing(files) else set()
    others = sorted({path.name for path in directory.iterdir()} - ours)
    if not all(map(is_listing, listed)):
        others = [name for name in others if not WRITTEN.fullmatch(name)]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ValueError(f"{directory} also holds {others[0]}{more}; move that away first")


def is_listing(value: object) -> bool:
    return isinstance(value, dict | list)


def remove_stored(model: StoredModel) -> None:
    """Remove one model; a link in its place, never its target.

    Raises ValueError if another process is making it.
    """
    path, folder = model.paths[0], model.folder
    if model.is_link:
        remove(path)
    elif not model.complete:
        remove_partial(folder / path.name.removeprefix(".").removesuffix(SUFFIX))
    elif model.format == DOWNLOAD:
        for file in model.paths:
            remove(file)
        remove(folder / CACHE)
        remove_empty(folder / ".cache")
    else:
        remove_checkpoint(path)
    remove_empty(folder, folder.parent)


def remove_empty(*directories: Path) -> None:
    """Remove directories that hold nothing."""
    for path in directories:
        if is_own_directory(path) and not any(path.iterdir()):
            path.rmdir()


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
