"""Names of models on the Hugging Face Hub, OWNER/NAME[:FORMAT], and their folders on this disk."""

import ast
import os
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

PLAIN = "bf16"
# Formats that a conversion keeps. A checkpoint without a record may have been made by quantize.py:
# only the first formats then count as published.
UNRECORDED = PLAIN, "mxfp4", "fp8b"
PUBLISHED = *UNRECORDED, "nvfp4", "int4", "uint4", "fp8", "int8"
MODEL_NAME = "OWNER/NAME[:FORMAT]"
PART = r"\w(?:[.-]?\w)*"  # the Hub's rule: neither "--" nor "..", no dash or dot at either end
# Before the name, in a page's address and in the names of Ollama and llama.cpp.
HUB_ADDRESS = r"^(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
# After it: the list of files, a query, an anchor; not what names a file or another revision.
HUB_PAGE = r"(?:/tree/main)?/?(?:[?#](?!show_file_info).*)?$"


class ModelName(NamedTuple):
    """A repository of the Hub, and the number format to run it in. None: the published one."""

    repo_id: str
    format: str | None = None

    def __str__(self) -> str:
        return self.repo_id if self.format is None else f"{self.repo_id}:{self.format}"

    @property
    def folder(self) -> Path:
        """The folder with the model in each of its formats."""
        return models_folder() / self.repo_id

    def checkpoint(self, format: str | None = None) -> Path:
        """Return the checkpoint's directory in a format, by default in this name's."""
        return self.folder / f"model_{format or self.format}"

    @property
    def is_gguf(self) -> bool:
        """Whether the repository has GGUF files, which its name says; `format` is one of theirs."""
        return "gguf" in self.repo_id.lower()

    @property
    def formats(self) -> list[str]:
        """The formats that it names: int4-hqq2 is attention's and the experts'."""
        return [] if self.format is None else self.format.split("-")


@cache
def format_names() -> tuple[str, ...]:
    """Return the keys of `formats.FORMATS`, in order, from its source: no torch is imported."""
    registry = Path(__file__).parents[1] / "formats" / "__init__.py"
    for statement in ast.parse(registry.read_text("utf-8")).body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "FORMATS":
            return tuple(key.value for key in statement.value.keys)
    raise LookupError(f"{registry} has no literal FORMATS")


def models_folder() -> Path:
    """Return the folder of all models: $MOE_FAST_CHECKPOINTS, else `checkpoints`."""
    return Path(os.environ.get("MOE_FAST_CHECKPOINTS") or "checkpoints")


def parse_model_name(text: str) -> ModelName:
    """Return the parts of OWNER/NAME[:FORMAT], also of a page's address on the Hub.

    Raises ValueError for anything else.
    """
    name, is_address = re.subn(HUB_ADDRESS, "", text)
    name = re.sub(HUB_PAGE, "", name) if is_address else name.removesuffix("/")
    repo_id, colon, format = name.partition(":")
    if not re.fullmatch(f"{PART}/{PART}", repo_id, re.ASCII) or len(repo_id) > 96:
        fix = f"give it as {MODEL_NAME}"
        if text.startswith(("/", ".", "~")):
            fix += ", or a path as --checkpoint_path"
        raise ValueError(f"{text[:100]!r} is no name of a model: {fix}")
    if colon and not re.fullmatch(r"\w+(?:-\w+)*", format, re.ASCII):
        known = ", ".join((PLAIN, *format_names()))
        raise ValueError(f"{text[:100]!r} names no format: give one of {known} after the colon")
    return ModelName(repo_id, format or None)


def check_hub_environment(options: object = None) -> None:
    """Raise ValueError for a variable that the Hub's client cannot use: some end its import."""
    for variable in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        value = os.environ.get(variable)
        if value is not None and not re.fullmatch(r"\s*\d{1,9}\s*", value, re.ASCII):
            raise ValueError(f"{variable}={value[:40]!r} must be a number of seconds, such as 30")
    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        value = os.environ.get(variable)
        if value and not os.path.exists(value):
            raise ValueError(
                f"{variable}={value[:100]!r} does not exist; name another, or unset it"
            )
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        address = urlsplit(endpoint)
        is_valid = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        fix = "give a URL such as https://huggingface.co"
        raise ValueError(f"HF_ENDPOINT={endpoint[:100]!r} is no address of a Hub; {fix}")


def check_format(name: ModelName) -> None:
    """Raise ValueError unless a checkpoint can be made in the name's format."""
    if name.is_gguf:  # the Hub lists the formats that there are
        return
    for format in name.formats:
        if format not in (PLAIN, *format_names()):
            known = ", ".join((PLAIN, *format_names()))
            raise ValueError(f"{name}: {format} is no number format; it must be one of {known}")
    if len(name.formats) > 2:
        raise ValueError(f"{name}: give one format, or two: attention's and the experts'")
