"""A repository on the Hugging Face Hub: which files a conversion reads, and their download."""

import errno
import shutil
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # the HTTP library's
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from checkpoint import SIDE_FILES, read_json
from models import args_from_hf

AGAIN = "run the same command again to resume"
# RuntimeError: raised by hf_xet, which transfers the large files.
FAILURES = HFValidationError, HfHubHTTPError, HTTPError, OSError, RuntimeError
INDEX = "model.safetensors.index.json"
ENOSPC = errno.ENOSPC, errno.EDQUOT


class Repository(NamedTuple):
    """The files of one commit that a conversion reads."""

    repo_id: str
    commit: str
    sizes: dict[str, int]  # file -> bytes
    digests: dict[str, str]  # file -> its hash, as far as the Hub tells
    token: str | None

    @property
    def weights(self) -> list[str]:
        return [name for name in self.sizes if name.endswith(".safetensors")]

    @property
    def identity(self) -> dict[str, tuple[int, str]]:
        """Size and hash of the files that define the weights; equal in commits that leave them."""
        names = {*self.weights, "config.json", INDEX} & self.sizes.keys()
        return {name: (self.sizes[name], self.digests[name]) for name in sorted(names)}


def wanted(names: list[str]) -> list[str]:
    """Return the files of a repository that a conversion reads.

    Skips folders (`original/` has a second copy of the weights) and Mistral's own `consolidated`
    layout. Raises ValueError for a repository without safetensors or config.json.
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
    others = {"config.json", INDEX, *SIDE_FILES}
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


def list_files(repo_id: str, revision: str | None, token: str | None = None) -> Repository:
    """Ask the Hub which files there are. Raises its errors, and ValueError as `wanted`."""
    info = HfApi(token=token).model_info(
        repo_id, revision=revision, files_metadata=True, timeout=30
    )
    files = {file.rfilename: file for file in info.siblings or []}
    sizes = {name: files[name].size or 0 for name in wanted(list(files))}
    digests = {
        name: (files[name].lfs.sha256 if files[name].lfs else files[name].blob_id) or ""
        for name in sizes
    }
    return Repository(repo_id, info.sha, sizes, digests, token)


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
    try:
        sizes = fetch(repo_id, revision, directory, token)
    except FAILURES as error:
        raise ValueError(describe_error(error, repo_id, revision)) from None
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
    missing = [name for name, size in sizes.items() if not is_complete(directory / name, size)]
    check_disk(directory, sum(sizes[name] for name in missing))
    # Remove truncated files: the client considers a file complete if it is newer than its record.
    for name in missing:
        (directory / name).unlink(missing_ok=True)
    # Pin the listed commit, so that a push during the download cannot mix two versions.
    for names in (["config.json"], list(sizes)):
        snapshot_download(
            repo_id,
            revision=repository.commit,
            local_dir=directory,
            allow_patterns=names,
            token=token,
        )
        if (directory / "config.json").is_file():
            args_from_hf(read_json(directory / "config.json"))  # refused before the weights come
    return sizes


def fetch_file(repository: Repository, name: str, directory: Path, bar: type | None) -> None:
    """Download one file unless it is there. bar: a class with tqdm's interface.

    Raises an error of FAILURES.
    """
    path, size = directory / name, repository.sizes[name]
    if is_current(repository, name, directory):
        return
    path.unlink(missing_ok=True)
    hf_hub_download(
        repository.repo_id,
        name,
        revision=repository.commit,
        local_dir=directory,
        token=repository.token,
        tqdm_class=bar,
    )
    if not is_complete(path, size):
        raise OSError(f"{name} does not have the {size} bytes that the Hub lists")


def describe_error(
    error: Exception,
    repo_id: str,
    revision: str | None,
    elsewhere: str = "choose another --output_dir",
) -> str:
    """Return a one-line message with cause and fix for an error of huggingface_hub.

    elsewhere: how to name another place on disk.
    """
    page = f"{constants.ENDPOINT}/{repo_id}"
    if isinstance(error, HFValidationError):
        return f"{repo_id!r} is not a repository's name; give it as owner/name"
    if isinstance(error, GatedRepoError):
        fix = "then run `hf auth login` or set HF_TOKEN"
        return f"{repo_id} is gated: accept its terms at {page}, {fix}"
    if isinstance(error, RepositoryNotFoundError):
        fix = "check the name and the login (`hf auth login`)"
        return f"there is no repository {repo_id} at {page}; {fix}"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no revision {revision!r}; {page}/tree/main lists them"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        fix = f"later, {AGAIN}"
        if status in (401, 403):
            fix = "check HF_TOKEN or run `hf auth login`"
        return f"the Hub refused {repo_id} (HTTP status {status}); {fix}"
    if isinstance(error, OSError) and error.errno in ENOSPC:
        return f"the disk is full; free some space, then {AGAIN}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot write {error.filename} ({error.strerror}); {elsewhere}"
    cause = " ".join(str(error).split())[:200] or type(error).__name__
    return f"the download broke off ({cause}); check the network and {AGAIN}"


def is_complete(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def is_current(repository: Repository, name: str, directory: Path) -> bool:
    """Whether a file is complete, and weights are of this version as far as the client recorded."""
    if not is_complete(directory / name, repository.sizes[name]):
        return False
    record = directory / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    if name not in repository.weights or not repository.digests[name] or not record.is_file():
        return True
    _, digest, *_ = [*record.read_text().splitlines(), "", ""]  # the commit, the file's hash
    return digest == repository.digests[name]


def free_space(directory: Path) -> int:
    """Return the free bytes of the disk where `directory` is, or would be."""
    paths = directory, *directory.absolute().parents
    return shutil.disk_usage(next(path for path in paths if path.is_dir())).free


def check_disk(directory: Path, needed: int) -> None:
    """Raise ValueError if the disk has less than `needed` bytes free."""
    free = free_space(directory)
    if needed > free:
        sizes = f"needs {needed / 1e9:.1f} GB more and {free / 1e9:.1f} GB are free"
        raise ValueError(f"{directory} {sizes}; free some space")
