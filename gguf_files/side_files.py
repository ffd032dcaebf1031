"""A GGUF file's tokenizer as files in the user's cache, where commands and server read them."""

import json
import os
import re
import zlib
from pathlib import Path

from gguf_files.container import GGUFFile
from gguf_files.vocabulary import tokenizer_files
from host.folders import user_cache
from host.staging import StagedDirectory

VERSION = 1  # of what is written here
DONE = "source.json"  # names the format and the file; the last to be written


class SideFiles:
    """Makes the directory of a file's tokenizer when it is first asked for."""

    def __init__(self, file: GGUFFile, vocab_size: int):
        self.file, self.vocab_size = file, vocab_size

    def directory(self, label: str) -> Path:
        """Return the directory, whose name ends with the format's label.

        Raises ValueError for a tokenizer that is not supported, and if it cannot be written.
        """
        part = self.file.parts[0]
        stamp = zlib.crc32(repr((VERSION, str(part.path.absolute()), part.stamp)).encode())
        target = user_cache() / "gguf" / f"{self.name()}-{stamp:08x}" / f"model_{label}"
        if not (target / DONE).is_file():
            self.make(target, label)
        return target

    def make(self, target: Path, label: str) -> None:
        """Write the files, unless another process is first. Raises as `directory`."""
        part = self.file.parts[0]
        try:
            files = tokenizer_files(self.file.values, self.vocab_size)
        except ValueError as error:
            raise ValueError(f"{part.path}: {error}; take another GGUF file of the model") from None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            staged = StagedDirectory(target)
            try:
                source = {"published": label, "file": str(part.path)}
                for name, data in (files | {DONE: json.dumps(source).encode()}).items():
                    (staged.path / name).write_bytes(data)
                is_damaged = os.path.lexists(target) and not (target / DONE).is_file()
                staged.commit(replace=is_damaged)
            finally:
                staged.close()
        except OSError as error:
            if (target / DONE).is_file():
                return
            why = f"cannot write to {user_cache()} ({error.strerror})"
            raise ValueError(f"{why}: set XDG_CACHE_HOME to a folder that can be written") from None

    def name(self) -> str:
        """Return a name of the model that a folder can have."""
        path, given = self.file.path, self.file.values.get("general.name")
        known = given if isinstance(given, str) and path.suffix != ".gguf" else path.stem
        return re.sub(r"[^\w.-]+", "-", known, flags=re.ASCII).strip(".-")[:80] or "model"
