"""Safetensors files that come from the Hub while others are converted.

Headers come first, a few kilobytes each by HTTP range requests: everything about a conversion is
checked before the weights are downloaded. Files then come one ahead of the conversion, in a thread,
and are removed when it needs them no more.
"""

import operator
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import HfApi
from torch import Tensor
from tqdm import tqdm

from checkpoint import HEADER_DTYPES, SafetensorsFile
from host.safetensors_output import FileRange
from hub.client import Repository, fetch_file, is_current
from hub.errors import FAILURES, one_line
from hub.threads import CANCEL_SECONDS, Cancelled, bar_class, in_threads

HEADERS_AT_ONCE = 8
AHEAD = 1  # files downloaded before the conversion needs them

Header = dict[str, tuple[tuple[int, ...], torch.dtype]]  # tensor -> shape, dtype


def read_header(repository: Repository, file: str) -> Header:
    """Return the header of a file that is still on the Hub. Raises ValueError if it is damaged."""
    api = HfApi(token=repository.token)
    try:
        header = api.parse_safetensors_file_metadata(
            repository.repo_id, file, revision=repository.commit, timeout=30
        )
        return {
            name: (tuple(map(operator.index, tensor.shape)), HEADER_DTYPES[tensor.dtype])
            for name, tensor in header.tensors.items()
        }
    except FAILURES:
        raise
    except Exception as error:  # the client reads JSON without checking types
        what = f"{file} of {repository.repo_id} has no header of a safetensors file"
        raise ValueError(f"{what} ({one_line(error)}); choose another --revision") from None


def read_headers(repository: Repository, files: list[str], progress: bool) -> dict[str, Header]:
    """Return the header of each file."""

    def read(file: str) -> Header:
        return read_header(repository, file)

    headers = in_threads(read, files, HEADERS_AT_ONCE, threading.Event())
    return dict(tqdm(headers, "headers", len(files), leave=False, delay=2, disable=not progress))


class Shard:
    """A safetensors file that may still be on the Hub, with the interface of SafetensorsFile."""

    def __init__(self, path: Path, header: Header, downloads: "Downloads"):
        self.path, self.tensors, self._downloads = path, header, downloads
        self._file: SafetensorsFile | None = None

    def read(self, name: str) -> Tensor:
        """Return a tensor, mapped from the file; wait until that is here."""
        if self._file is None:
            self._downloads.wait_for(self.path.name)
            self._file = SafetensorsFile(self.path, keep_open=True)
            if self._file.tensors != self.tensors:
                self._file = None
                what = f"the Hub gave another header for {self.path.name} than the file has"
                raise ValueError(f"{what}; run the same command again")
        return self._file.read(name)

    def origin(self, name: str) -> FileRange | None:
        """Return where the file has a tensor that was read."""
        return None if self._file is None else self._file.origin(name)

    def close(self) -> None:
        """Let go of the file: its bytes stay on disk as long as a handle has it."""
        if self._file is not None:
            self._file.close()


class Folder(NamedTuple):
    """Where downloads go.

    kept: files that are complete already, in folders of their own, and stay: the user's, or a kept
    download. They are compared with their digests like the others. remove: whether the others are
    ours, and removed after their last use.
    """

    path: Path
    kept: Mapping[str, Path]
    remove: bool


class Downloads:
    """Downloads files in their order, in a thread that starts when the first is needed.

    describe: turns an error of a download into a line with cause and fix.
    """

    def __init__(
        self,
        repository: Repository,
        order: Iterable[str],
        folder: Folder,
        bar: tqdm,
        describe: Callable[[Exception], str],
    ):
        self.repository, self.order, self.folder = repository, list(order), folder
        self.bar, self.describe = bar, describe
        self._ready: set[str] = set()
        self._released: set[str] = set()
        self._reached = -1  # last position that the conversion has come to
        self._awaited: str | None = None
        self._error: Exception | None = None
        self._closed, self._changed = False, threading.Condition()
        self._thread: threading.Thread | None = None
        self._bar = bar_class(lambda: self.bar, lambda: self._closed)

    def path(self, file: str) -> Path:
        return self.folder.kept.get(file, self.folder.path / file)

    def wait_for(self, file: str) -> None:
        """Wait until a file is here. Raises ValueError if its download fails."""
        with self._changed:
            self._awaited = file
            self._reached = max(self._reached, self.order.index(file))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: file in self._ready or self._error is not None or self._closed
            )
            if self._closed and self._error is None:
                raise Cancelled
            if file not in self._ready:
                raise ValueError(self.describe(self._error)) from None

    def limit(self, files: Collection[str]) -> None:
        """Download these files alone."""
        with self._changed:
            self.order = [file for file in self.order if file in files]
            self._reached = -1

    def release(self, files: Iterable[str]) -> None:
        """Remove files that the conversion needs no more, unless they are to be kept."""
        with self._changed:
            for file in files:
                self._released.add(file)
                if self.folder.remove and file not in self.folder.kept and file in self._ready:
                    self.path(file).unlink(missing_ok=True)

    def close(self) -> None:
        """End the thread. It may be inside the client: wait for a moment only."""
        with self._changed:
            was_closed, self._closed = self._closed, True
            self._changed.notify_all()
        if self._thread is not None and not was_closed:
            self._thread.join(CANCEL_SECONDS)

    def _run(self) -> None:
        while (file := self._next()) is not None:
            error = None
            try:
                ours = self.folder.remove and file not in self.folder.kept
                directory = self.path(file).parent
                fetch_file(self.repository, file, directory, self._bar, ours)
            except Exception as failure:
                error = failure
            with self._changed:
                self._error = error
                self._ready |= {file} if error is None else set()
                self._changed.notify_all()
            if error is not None:
                return

    def _next(self) -> str | None:
        """Wait for the turn of the next file; return it, or None at the end."""
        with self._changed:
            while not self._closed:
                left = [f for f in self.order if f not in self._ready and f not in self._released]
                if not left:
                    return None
                if self._awaited in left:
                    return self._awaited
                if self.order.index(left[0]) <= self._reached + AHEAD:
                    return left[0]
                self._changed.wait()
            return None


def complete_files(repository: Repository, *folders: Path) -> dict[str, Path]:
    """Return the weights that are here already, in one of these folders."""
    return {
        file: folder / file
        for folder in reversed(folders)
        for file in repository.weights
        if is_current(repository, file, folder)
    }
