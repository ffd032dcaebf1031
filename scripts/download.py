"""Fetch a checkpoint from the Hugging Face Hub: its safetensors, its config and its tokenizer, and nothing else.

    python scripts/download.py --repo_id mistralai/Mixtral-8x7B-Instruct-v0.1

The files go to checkpoints/<repo_id>. A connection that drops is taken up where it broke off; run again after an
interruption, the command keeps the files that are whole and fetches the rest. The directory is printed on stdout.
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
    HTTPError,  # of the HTTP library that huggingface_hub is built on, whichever that is
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from command import Parser
from convert_hf_checkpoint import SIDE_FILES

AGAIN = "run the same command again to go on from here"


def wanted(names: list[str]) -> list[str]:
    """The files of a repository that a conversion reads. Folders are left out (`original/` holds a second copy of the
    weights) and so is Mistral's own `consolidated` layout.

    Raises ValueError where the repository has no weights in safetensors files, or no config.json.
    """
    top = [name for name in names if "/" not in name]
    weights = [
        name for name in top if name.endswith(".safetensors") and not name.startswith(("consolidated", "adapter_"))
    ]
    if not weights:
        if any(name.endswith((".bin", ".pt", ".pth")) for name in top):
            found = "only pickled weights (.bin, .pt), which are never loaded"
        elif any(name.endswith(".gguf") for name in names):
            found = "only GGUF files"
        elif any(name.startswith("consolidated") for name in top):
            found = "only Mistral's own layout (consolidated*)"
        elif any(name.startswith("adapter_") for name in top):
            found = "only an adapter, not a whole model"
        else:
            found = "no weights"
        raise ValueError(f"the repository holds {found}; choose one with *.safetensors in Hugging Face layout")
    if "config.json" not in top:
        raise ValueError("the repository holds no config.json; choose one in Hugging Face layout")
    others = {"config.json", "model.safetensors.index.json", *SIDE_FILES}
    return sorted(weights) + sorted(others & set(top))


def download(repo_id: str, revision: str | None = None, output_dir: str | Path | None = None, token=None) -> Path:
    """Downloads `repo_id` (owner/name) at `revision` (branch, tag or commit) to `output_dir`, which is returned.
    `token` defaults to $HF_TOKEN, then to the login that `hf auth login` stored.

    Raises ValueError, one line, for whatever the user can mend: a wrong name, a gated repository, no network, no room.
    """
    directory = Path(output_dir or f"checkpoints/{repo_id}")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; give another --output_dir")
    page = f"{constants.ENDPOINT}/{repo_id}"
    try:
        info = HfApi(token=token).model_info(repo_id, revision=revision, files_metadata=True, timeout=30)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        names = wanted(list(sizes))
        missing = [name for name in names if not _complete(directory / name, sizes[name])]
        _check_room(directory, sum(sizes[name] for name in missing))
        for name in missing:  # a file cut short: the client would take one as young as its own record for whole
            (directory / name).unlink(missing_ok=True)
        # Pinned to the commit just listed, so that a push in between cannot mix two versions.
        snapshot_download(repo_id, revision=info.sha, local_dir=directory, allow_patterns=names, token=token)
    except HFValidationError:
        raise ValueError(f"{repo_id!r} is not a repository's name; give it as owner/name") from None
    except GatedRepoError:
        raise ValueError(
            f"{repo_id} is gated: accept its terms at {page}, then run `hf auth login` or set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"there is no repository {repo_id} at {page}; check the name and the login (`hf auth login`)"
        ) from None
    except RevisionNotFoundError:
        raise ValueError(f"{repo_id} has no revision {revision!r}; {page}/tree/main lists them") from None
    except HfHubHTTPError as e:
        status = e.response.status_code
        advice = "check HF_TOKEN or run `hf auth login`" if status in (401, 403) else f"later, {AGAIN}"
        raise ValueError(f"the Hub refused {repo_id} (HTTP status {status}); {advice}") from None
    except (HTTPError, OSError, RuntimeError) as e:  # RuntimeError: hf_xet, which moves the large files
        if isinstance(e, OSError) and e.filename is not None:
            raise ValueError(f"cannot write {e.filename} ({e.strerror}); choose another --output_dir") from None
        cause = " ".join(str(e).split())[:200] or type(e).__name__
        raise ValueError(f"the download broke off ({cause}); check the network and {AGAIN}") from None
    broken = [name for name in names if not _complete(directory / name, sizes[name])]
    if broken:  # snapshot_download answers a network lost at the start with the directory as it is
        raise ValueError(f"the download is incomplete ({broken[0]} and {len(broken) - 1} more); {AGAIN}")
    return directory


def _complete(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _check_room(directory: Path, needed: int) -> None:
    existing = next(path for path in [directory, *directory.absolute().parents] if path.is_dir())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(f"{directory} needs {needed / 1e9:.1f} GB more and {free / 1e9:.1f} GB are free; make room")


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python scripts/download.py --repo_id mistralai/Mixtral-8x7B-Instruct-v0.1",
            "python scripts/download.py --repo_id OWNER/NAME --revision main --output_dir models/NAME",
        ),
    )
    parser.add_argument("--repo_id", required=True, metavar="OWNER/NAME", help="the repository on the Hub")
    parser.add_argument("--revision", help="branch, tag or commit (default: the main branch)")
    parser.add_argument("--output_dir", type=Path, help="where the files go (default: checkpoints/OWNER/NAME)")
    parser.add_argument("--token", help="access token (default: $HF_TOKEN, else what `hf auth login` stored)")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        directory = download(**vars(arguments))
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; {AGAIN}", file=sys.stderr)
        return 130
    print(directory)
    command = f"python convert_hf_checkpoint.py --checkpoint_dir {shlex.quote(str(directory))}"
    print(f"next: {command}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
