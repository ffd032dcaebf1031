"""GGUF models of the Hub, OWNER/NAME-GGUF[:QUANT]: found on this disk, or downloaded."""

import logging
import re
from pathlib import Path

from tqdm import tqdm

from cli.model_name import ModelName
from cli.report import in_bytes
from gguf_files.container import SPLIT
from gguf_files.locate import known_folders, models_of
from hub.client import Repository, check_disk, fetch_file, is_complete, list_files
from hub.errors import in_one_line

# Which file a name without a QUANT means, as Ollama and llama.cpp choose; else the smallest.
USUAL = "Q4_K_M", "UD-Q4_K_XL", "Q4_K_XL", "Q4_K_S", "MXFP4", "Q8_0"

log = logging.getLogger("moe_fast")


def prepare_gguf(name: ModelName, revision: str | None, progress: bool = True) -> Path:
    """Return the model's file, or the first part of it; download it unless it is on this disk.

    A file in the folders of LM Studio or the Hub's client is used where it lies, if no revision is
    asked for. Raises ValueError, one line with the fix, for a QUANT that the repository lacks, a
    disk that is too small, and a download that broke off.
    """
    if revision is None and (found := find_stored(name)):
        log.info(f"{name} is there already: {found}")
        return found
    with in_one_line(name.repo_id, revision):
        repository = list_files(name.repo_id, revision, choose=gguf_files)
        chosen = choose_file(name, repository.weights, repository.sizes)
        return download(name, repository, parts_of(chosen, repository.weights), progress)


def gguf_files(names: list[str]) -> list[str]:
    """Return a repository's GGUF files. Raises ValueError if it has none."""
    found = sorted(name for name in names if name.endswith(".gguf"))
    if not models_of(found):
        fix = "choose one with *.gguf, or leave -GGUF out for the original"
        raise ValueError(f"the repository holds no GGUF model; {fix}")
    return found


def find_stored(name: ModelName) -> Path | None:
    """Return the model's file that is complete on this disk, or None."""
    for folder in (name.folder, *known_folders(name.repo_id)):
        files = {str(path.relative_to(folder)): path for path in folder.rglob("*.gguf")}
        files = {file: path for file, path in files.items() if not file.startswith(".cache")}
        if not models_of(files) or (name.format is None and len(models_of(files)) > 1):
            continue
        try:
            chosen = choose_file(name, list(files), dict.fromkeys(files, 0))
            if all(part in files for part in parts_of(chosen, list(files))):
                return files[chosen]
        except ValueError:  # it has another QUANT
            continue
    return None


def quant_of(file: str) -> str:
    """Return what a file's name says of its number formats: UD-Q4_K_XL; "" if nothing."""
    match = SPLIT.fullmatch(Path(file).name)
    stem = Path(match[1]).name if match else Path(file).stem
    pattern = r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|MXFP4\w*|NVFP4\w*|BF16|F16|F32|FP16|FP32))$"
    found = re.search(pattern, stem, re.IGNORECASE)
    return found[1] if found else ""


def choose_file(name: ModelName, files: list[str], sizes: dict[str, int]) -> str:
    """Return the file that a name means. Raises ValueError if there is none, or several."""
    models = models_of(files)
    quants = {file: quant_of(file) for file in models}
    known = ", ".join(sorted({quant for quant in quants.values() if quant})) or "files without one"
    if name.format is not None:
        found = [file for file, quant in quants.items() if quant.lower() == name.format.lower()]
        if not found:
            raise ValueError(f"{name}: there is no {name.format}; it must be one of {known}")
    else:
        found = models if len(models) == 1 else []
        for usual in USUAL:
            found = found or [file for file in models if quants[file].upper() == usual]
        found = found or [min(models, key=lambda file: sizes[file])]
    if len(found) > 1:
        raise ValueError(
            f"{name}: it has several such files ({found[0]}, {found[1]}): fetch one of them "
            "and name it with --checkpoint_path"
        )
    return found[0]


def parts_of(file: str, files: list[str]) -> list[str]:
    """Return all parts of a split file, of which `file` is the first."""
    match = SPLIT.fullmatch(file)
    if not match:
        return [file]
    parts = [f"{match[1]}-{n:05d}-of-{match[3]}.gguf" for n in range(1, int(match[3]) + 1)]
    return [part for part in parts if part in files] if file in files else parts


def download(name: ModelName, repository: Repository, files: list[str], progress: bool) -> Path:
    """Download files into the model's folder; return the first."""
    folder, sizes = name.folder, repository.sizes
    missing = [file for file in files if not is_complete(folder / file, sizes[file])]
    total = sum(sizes[file] for file in missing)
    check_disk(folder, total)
    if missing:
        log.info(f"{name}: {in_bytes(total)} to download, as {files[0]}")

    class Bar(tqdm):
        """The client's bar of one file."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options | {"disable": not progress})

    for file in files:
        fetch_file(repository, file, folder, Bar)
    return folder / files[0]
