"""A repository on the Hugging Face Hub: which files a conversion reads, and their download."""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.hf_api import RepoSibling
from tqdm import tqdm

from checkpoint import SIDE_FILES, TOKENIZER_FILES, read_json
from cli.log import EscapingFormatter
from cli.report import in_bytes
from host.files import is_own_file, read_regular
from host.staging import remove
from hub.digests import GIT_SHA1, SHA256, has_digest
from hub.disk import RECORDS
from hub.errors import AGAIN, NoAnswer, asking, in_one_line
from hub.threads import bar_class, in_threads
from models import args_from_hf
from models.converter import check_small_files
from models.quantization import MODELOPT_FILE
from models.tiktoken_file import TIKTOKEN

INDEX = "model.safetensors.index.json"
FILES_AT_ONCE = 8


class Repository(NamedTuple):
    """The files of one commit that a conversion reads."""

    repo_id: str
    commit: str
    sizes: dict[str, int]  # file -> bytes
    digests: dict[str, str]  # file -> SHA-256, or git's SHA-1 of a small file; "": not known
    token: str | None

    @property
    def weights(self) -> list[str]:
        return [name for name in self.sizes if name.endswith((".safetensors", ".gguf"))]

    @property
    def identity(self) -> dict[str, tuple[int, str]]:
        """Size and hash of the files that define the weights; equal in commits that leave them."""
        names = {*self.weights, "config.json", INDEX, MODELOPT_FILE} & self.sizes.keys()
        return {name: (self.sizes[name], self.digests[name]) for name in sorted(names)}


def wanted(names: list[str]) -> list[str]:
    """Return the files of a repository that a conversion reads.

    Skips folders (`original/` has a second copy of the weights) and Mistral's own `consolidated`
    layout. Raises ValueError for a repository without safetensors, config.json or a tokenizer.
    """
    top = [name for name in names if "/" not in name]
    weights = [
        name
        for name in top
        if name.endswith(".safetensors") and not name.startswith(("consolidated", "adapter_"))
    ]
    if not weights:
        found = describe_weights(names, top)
        raise ValueError(
            f"the repository holds {found}; choose one with *.safetensors in Hugging Face layout"
        )
    if "config.json" not in top:
        raise ValueError("the repository holds no config.json; choose one in Hugging Face layout")
    if not (tokenizers := {*TOKENIZER_FILES, TIKTOKEN}).intersection(top):
        found = f"no tokenizer that is read ({', '.join(sorted(tokenizers))})"
        raise ValueError(f"the repository holds {found}; choose one with it, or a GGUF file")
    others = {"config.json", INDEX, MODELOPT_FILE, TIKTOKEN, *SIDE_FILES}
    return sorted(weights) + sorted(others & set(names))


def describe_weights(names: list[str], top: list[str]) -> str:
    """Describe the unusable weights of a repository. top: its files outside of folders."""
    if any(name.endswith((".bin", ".pt", ".pth")) for name in top):
        return "only pickled weights (.bin, .pt), which are never loaded"
    if any(name.endswith(".gguf") for name in names):
        return "only GGUF files"
    if any(name.startswith("consolidated") for name in top):
        return "only Mistral's own layout (consolidated*)"
    if any(name.startswith("adapter_") for name in top):
        return "only an adapter, not a whole model"
    return "no weights"


def list_files(
    repo_id: str,
    revision: str | None,
    token: str | None = None,
    choose: Callable[[list[str]], list[str]] = wanted,
) -> Repository:
    """Ask the Hub which files there are. Raises an error of FAILURES, and ValueError as `choose`,
    which returns the files that are of use.

    Checks everything that is used of the answer: a proxy or another server may have sent it.
    """
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.setFormatter(EscapingFormatter())  # it prints a header of answers, X-HF-Warning
    with asking():
        info = HfApi(token=token).model_info(
            repo_id, revision=revision, files_metadata=True, timeout=30
        )
        files = {file.rfilename: file for file in info.siblings or []}
        check_answer(isinstance(info.sha, str) and GIT_SHA1.fullmatch(info.sha), "its commit")
        for name in files:
            check_answer(isinstance(name, str), "the name of a file")
    sizes, digests = {}, {}
    for name in choose(list(files)):
        with asking():
            sizes[name], digests[name] = size_and_digest(files[name])
    return Repository(repo_id, info.sha, sizes, digests, token)


def size_and_digest(file: RepoSibling) -> tuple[int, str]:
    """Return the size and digest of a file that the Hub lists, as in a Repository."""
    name = repr(file.rfilename)
    check_answer(file.rfilename.isprintable(), f"the name {name:.100}")
    check_answer(type(file.size) is int and 0 <= file.size < 1 << 60, f"the size of {name}")
    digest, kind = (file.lfs.sha256, SHA256) if file.lfs else (file.blob_id, GIT_SHA1)
    known = digest is None or (isinstance(digest, str) and kind.fullmatch(digest))
    check_answer(known, f"the digest of {name}")
    return file.size, digest or ""


def check_answer(is_right: object, what: str) -> None:
    """Raise NoAnswer unless this part of an answer is as the Hub's."""
    if not is_right:
        raise NoAnswer(f"{what} makes no sense")


def download(
    repo_id: str,
    revision: str | None = None,
    output_dir: str | Path | None = None,
    token: str | None = None,
) -> Path:
    """Download `repo_id` (owner/name) at `revision` (branch, tag or commit); return its directory.

    output_dir: default checkpoints/<repo_id>. token: default $HF_TOKEN, then the one saved by
    `hf auth login`. Raises ValueError, one line with the fix, for a wrong name, a gated repository,
    a network error, or a full disk.
    """
    directory = Path(output_dir or f"checkpoints/{repo_id}")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; give another --output_dir")
    with in_one_line(repo_id, revision, "choose another --output_dir"):
        sizes = fetch(repo_id, revision, directory, token)
    broken = [name for name, size in sizes.items() if not is_complete(directory / name, size)]
    if broken:  # snapshot_download returns without an error if there is no network at the start
        raise ValueError(
            f"the download is incomplete ({broken[0]} and {len(broken) - 1} more); {AGAIN}"
        )
    return directory


def fetch(repo_id: str, revision: str | None, directory: Path, token: str | None) -> dict[str, int]:
    """Download missing files; return the size of every wanted file."""
    repository = list_files(repo_id, revision, token)
    sizes = repository.sizes
    missing = missing_files(repository, directory)
    check_disk(directory, sum(sizes[name] for name in missing))
    # All are of the listed commit: a push during the download cannot mix two versions.
    small = sizes.keys() - repository.weights
    steps = (["config.json"], check_config), (small, check_small_files), (sizes, None)
    for names, check in steps:
        snapshot_download(repository, missing.intersection(names), local_dir=directory)
        missing.difference_update(names)
        if check and (directory / "config.json").is_file():
            check(directory)  # refused before the weights come
    return sizes


def check_config(directory: Path) -> None:
    """Raise ValueError for a model that is not supported."""
    args_from_hf(read_json(directory / "config.json"))


def snapshot_download(repository: Repository, names: Collection[str], local_dir: Path) -> None:
    """Download some of a repository's files, several at once.

    Ctrl-C ends it at once; that of the Hub's client would wait for each answer.
    """
    ended = threading.Event()
    total = sum(repository.sizes[name] for name in names)
    show = dict(desc="download", unit="B", unit_scale=True, total=total, disable=not names)
    with tqdm(**show) as bar:
        bars = bar_class(lambda: bar, ended.is_set)

        def fetch_one(name: str) -> None:
            fetch_file(repository, name, local_dir, bars)

        for _ in in_threads(fetch_one, sorted(names), FILES_AT_ONCE, ended):
            pass


def missing_files(repository: Repository, directory: Path) -> set[str]:
    """Return the files that are not in a directory as the Hub has them. Reads all that are."""
    total = sum(n for name, n in repository.sizes.items() if is_complete(directory / name, n))
    options = dict(desc="verify", total=total, unit="B", unit_scale=True, leave=False, delay=2)
    with tqdm(**options) as bar:
        return {
            name
            for name, size in repository.sizes.items()
            if not has_digest(directory / name, size, repository.digests[name], bar.update)
        }


def fetch_file(
    repository: Repository, name: str, directory: Path, bar: type, replace: bool = False
) -> None:
    """Download one file unless it is there, and compare it with the Hub's digest.

    bar: a class with tqdm's interface. replace: remove another file of that
    name, although the client did not download it. Raises an error of FAILURES, ValueError for a
    file that is not ours to replace.
    """
    path, size, digest = directory / name, repository.sizes[name], repository.digests[name]
    if has_digest(path, size, digest):
        return
    if replace:
        remove(path)
    remove_recorded(path)
    for again in (False, True):  # the client's cache, or the part to resume, may be damaged
        with asking():
            hf_hub_download(
                repository.repo_id,
                name,
                revision=repository.commit,
                local_dir=directory,
                token=repository.token,
                tqdm_class=bar,
                force_download=again,
            )
        if has_digest(path, size, digest):
            return
        found = path.stat().st_size if path.is_file() else 0
        remove(path)
    if found != size:
        raise OSError(f"{name} does not have the {size} bytes that the Hub lists")
    raise OSError(f"{name} differs from the Hub's digest of it, twice")


def remove_recorded(path: Path) -> None:
    """Remove a file that the Hub's client downloaded. Raises ValueError for one that is a user's.

    A link is removed, and never its target.
    """
    if not os.path.lexists(path):
        return
    if not path.is_symlink() and not record_of(path).is_file():
        what = f"{path} is there and is not the Hub's"
        raise ValueError(f"{what}; move it away, or name another folder")
    remove(path)


def is_complete(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def is_current(repository: Repository, name: str, directory: Path) -> bool:
    """Whether a file is complete, and weights are of this version as far as the client recorded.

    Reads no file: `fetch_file` compares its digest before it is used.
    """
    if not is_complete(directory / name, repository.sizes[name]):
        return False
    record = record_of(directory / name)
    if name not in repository.weights or not repository.digests[name] or not is_own_file(record):
        return True
    lines = read_regular(record).decode(errors="replace").splitlines()
    _, digest, *_ = [*lines, "", ""]  # the commit, the file's hash
    return digest == repository.digests[name]


def record_of(path: Path) -> Path:
    """Return where the Hub's client records a file that it downloaded."""
    return path.parent / RECORDS / f"{path.name}.metadata"


def free_space(directory: Path) -> int:
    """Return the free bytes of the disk where `directory` is, or would be."""
    paths = directory, *directory.absolute().parents
    return shutil.disk_usage(next(path for path in paths if path.is_dir())).free


def check_disk(directory: Path, needed: int) -> None:
    """Raise ValueError if the disk has less than `needed` bytes free."""
    free = free_space(directory)
    if needed > free:
        sizes = f"needs {in_bytes(needed)} more and {in_bytes(free)} are free"
        raise ValueError(f"{directory} {sizes}; free some space")
