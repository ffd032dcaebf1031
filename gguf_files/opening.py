"""Open what --checkpoint_path names: a converted checkpoint, or a GGUF file where it lies."""

from pathlib import Path

from checkpoint import Checkpoint
from gguf_files.locate import find_gguf
from gguf_files.source import GGUFCheckpoint


def open_source(path: Path | str) -> Checkpoint | GGUFCheckpoint:
    """Return a source for `load_model`. Raises ValueError, one line with the fix, for any other."""
    found = find_gguf(path)
    return Checkpoint(path) if found is None else GGUFCheckpoint(found)
