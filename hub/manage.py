"""generate.py --list and --remove. Imports no torch."""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from cli.command import printable
from cli.model_name import models_folder, parse_model_name
from cli.report import in_bytes
from host import upload_ahead
from host.before_imports import load_libraries, read_ahead
from host.compile_helper import may_have_gpu
from hub.disk import StoredModel, find_checkpoint, find_stored, remove_stored, stored_models, table


def manage(options: argparse.Namespace) -> int:
    """Do what --list or --remove asks for; return the exit code.

    Raises ValueError for a model that is not there, and if nobody can be asked.
    """
    if options.list:
        print_models()
        return 0
    found = find_stored(parse_model_name(options.remove))
    total = in_bytes(sum(model.bytes for model in found if not model.is_link))
    shown = "\n".join(map(describe, found))
    if not options.yes and not confirm(f"{shown}\nremove {total}? [y/N] "):
        print("nothing was removed", file=sys.stderr)
        return 1
    for model in found:
        remove_stored(model)
    print(f"removed {options.remove}: {total}", file=sys.stderr)
    return 0


def describe(model: StoredModel) -> str:
    """Return the line by which a model to remove is shown."""
    path = printable(str(model.paths[0] if len(model.paths) == 1 else model.folder))
    if model.is_link:
        return f"  {path} (a link; {printable(str(model.paths[0].resolve()))} stays)"
    return f"  {path} ({printable(model.format)}, {in_bytes(model.bytes)})"


def manage_and_exit(options: argparse.Namespace) -> None:
    """`manage`, then end the process, if the options ask for that: before torch is imported."""
    if options.list or options.remove:
        raise SystemExit(manage(options))


def read_model_ahead(options: argparse.Namespace) -> None:
    """Load the tokenizer of a model that is on disk, and begin to read its weights to the GPU.

    This is before torch is imported: its libraries are loaded while the tokenizer is.
    """
    if options.dry_run or getattr(options, "prepare_only", False):
        return
    with suppress(OSError, ValueError):  # main() finds what is wrong, and says it
        path = options.checkpoint_path
        if options.model is not None:
            path = find_checkpoint(parse_model_name(options.model), options.revision)
        if path is not None:
            files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
            read_ahead(files)
            if path.is_file():
                return
            is_alone = os.environ.get("WORLD_SIZE", "1") == "1"  # ranks read parts of the files
            if is_alone and may_have_gpu(options) and not options.offload:
                upload_ahead.start(files)
            load_tokenizer_ahead(path)


def load_tokenizer_ahead(directory: Path) -> None:
    """Load a tokenizer while the system loads torch's libraries: each takes 0.3 s."""
    import tokenizer

    tokenizer.start_library()
    load_libraries()
    tokenizer.load_ahead(directory)


def print_models() -> None:
    """Print the models on disk, and how to get one if there is none."""
    if models := stored_models():
        print(table(models))
        return
    get = "generate.py --model OWNER/NAME[:FORMAT] downloads one"
    print(f"no models in {models_folder()}; {get}", file=sys.stderr)


def confirm(question: str) -> bool:
    """Ask on the terminal. Raises ValueError if stdin is none."""
    if not sys.stdin.isatty():
        raise ValueError("--remove asks first, and stdin is no terminal: add --yes")
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
