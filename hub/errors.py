"""Errors of the Hub's client, each as one line with cause and fix."""

import contextlib
import errno
from collections.abc import Iterator

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # the HTTP library's
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

AGAIN = "run the same command again to resume"
ELSEWHERE = "name another folder: MOE_FAST_CHECKPOINTS=DIR"
# RuntimeError: raised by hf_xet, which transfers the large files.
FAILURES = HFValidationError, HfHubHTTPError, HTTPError, OSError, RuntimeError
ENOSPC = errno.ENOSPC, errno.EDQUOT
MAX_CAUSE = 200  # characters


class NoAnswer(RuntimeError):
    """The Hub could not be asked, or what answered is not the Hub."""


class MissingPackage(RuntimeError):
    """The Hub's client lacks an optional package, such as that for a SOCKS proxy."""


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Turn whatever the client raises into an error of FAILURES.

    The client reads JSON, headers, proxies and addresses without checks: a value of the wrong type
    raises TypeError, KeyError, AssertionError or any other Exception.
    """
    try:
        yield
    except RecursionError as error:  # JSON nested too deep; a RuntimeError, as those of FAILURES
        raise NoAnswer(one_line(error)) from None
    except FAILURES:
        raise
    except ImportError as error:
        raise MissingPackage(one_line(error)) from None
    except Exception as error:
        raise NoAnswer(f"{type(error).__name__}: {one_line(error)}") from None


@contextlib.contextmanager
def in_one_line(repo_id: str, revision: str | None, elsewhere: str = ELSEWHERE) -> Iterator[None]:
    """Turn errors of FAILURES into a ValueError as `describe_error` words it."""
    try:
        yield
    except FAILURES as error:
        raise ValueError(describe_error(error, repo_id, revision, elsewhere)) from None


def one_line(error: BaseException) -> str:
    """Return an error's message in one short line; its type if it has none."""
    return " ".join(str(error).split())[:MAX_CAUSE] or type(error).__name__


def describe_error(
    error: Exception, repo_id: str, revision: str | None, elsewhere: str = ELSEWHERE
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
    if isinstance(error, MissingPackage):
        fix = "install it, or unset the proxy (ALL_PROXY, HTTPS_PROXY)"
        return f"the Hub's client lacks a package ({error}); {fix}"
    if isinstance(error, NoAnswer):
        fix = "check HF_ENDPOINT, the proxy (HTTPS_PROXY), and whether the network asks for a login"
        return f"{constants.ENDPOINT} gave no answer of the Hub ({error}); {fix}"
    if isinstance(error, OSError) and error.errno in ENOSPC:
        return f"the disk is full; free some space, then {AGAIN}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot write {error.filename} ({error.strerror}); {elsewhere}"
    return f"the download broke off ({one_line(error)}); check the network and {AGAIN}"
