"""Download a checkpoint from the Hugging Face Hub: safetensors, config.json, tokenizer files.

    python scripts/download.py --repo_id mistralai/Mixtral-8x7B-Instruct-v0.1

Files go to checkpoints/<repo_id>; stdout has the name of this directory. The download resumes after
a dropped connection. After an interruption, run the command again: it keeps complete files.
"""

import shlex
import shutil
import sys
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # the HTTP library's
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from checkpoint import SIDE_FILES, read_json
from cli.command import command
from cli.parser import Parser
from models import args_from_hf

AGAIN = "run the same command again to resume"


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
    others = {"config.json", "model.safetensors.index.json", *SIDE_FILES}
    return sorted(weights) + sorted(others & set(top))


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
    except (HFValidationError, HfHubHTTPError, HTTPError, OSError, RuntimeError) as error:
        # RuntimeError: raised by hf_xet, which transfers the large files.
        raise ValueError(describe_error(error, repo_id, revision)) from None
    broken = [name for name, size in sizes.items() if not is_complete(directory / name, size)]
    if broken:  # snapshot_download returns without an error if there is no network at the start
        raise ValueError(
            f"the download is incomplete ({broken[0]} and {len(broken) - 1} more); {AGAIN}"
        )
    return directory


def fetch(repo_id: str, revision: str | None, directory: Path, token: str | None) -> dict[str, int]:
    """Download missing files; return the size of every wanted file."""
    info = HfApi(token=token).model_info(
        repo_id, revision=revision, files_metadata=True, timeout=30
    )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    sizes = {name: sizes[name] for name in wanted(list(sizes))}
    missing = [name for name, size in sizes.items() if not is_complete(directory / name, size)]
    check_disk(directory, sum(sizes[name] for name in missing))
    # Remove truncated files: the client considers a file complete if it is newer than its record.
    for name in missing:
        (directory / name).unlink(missing_ok=True)
    # Pin the listed commit, so that a push during the download cannot mix two versions.
    for names in (["config.json"], list(sizes)):
        snapshot_download(
            repo_id, revision=info.sha, local_dir=directory, allow_patterns=names, token=token
        )
        if (directory / "config.json").is_file():
            args_from_hf(read_json(directory / "config.json"))  # refused before the weights come
    return sizes


def describe_error(error: Exception, repo_id: str, revision: str | None) -> str:
    """Return a one-line message with cause and fix for an error of huggingface_hub."""
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
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot write {error.filename} ({error.strerror}); choose another --output_dir"
    cause = " ".join(str(error).split())[:200] or type(error).__name__
    return f"the download broke off ({cause}); check the network and {AGAIN}"


def is_complete(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def check_disk(directory: Path, needed: int) -> None:
    """Raise ValueError if the disk has less than `needed` bytes free."""
    paths = directory, *directory.absolute().parents
    free = shutil.disk_usage(next(path for path in paths if path.is_dir())).free
    if needed > free:
        sizes = f"needs {needed / 1e9:.1f} GB more and {free / 1e9:.1f} GB are free"
        raise ValueError(f"{directory} {sizes}; free some space")


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python scripts/download.py --repo_id mistralai/Mixtral-8x7B-Instruct-v0.1",
            "python scripts/download.py --repo_id OWNER/NAME --revision main"
            " --output_dir models/NAME",
        ),
    )
    add = parser.add_argument
    add("--repo_id", required=True, metavar="OWNER/NAME", help="repository on the Hub")
    add("--revision", help="branch, tag or commit; default: the main branch")
    add("--output_dir", type=Path, help="default: checkpoints/OWNER/NAME")
    add("--token", help="access token; default: $HF_TOKEN, else the one saved by `hf auth login`")
    return parser


@command(interrupted=AGAIN)
def main(argv: list[str] | None = None) -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    directory = download(**vars(build_parser().parse_args(argv)))
    print(directory)
    command = f"python convert_hf_checkpoint.py --checkpoint_dir {shlex.quote(str(directory))}"
    print(f"next: {command}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
