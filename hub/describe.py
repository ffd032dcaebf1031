"""What is known of a model of the Hub without its weights: sizes, and the published format."""

import dataclasses
import tempfile
from pathlib import Path
from typing import NamedTuple

from checkpoint import Checkpoint
from cli.model_name import PLAIN, UNRECORDED, ModelName, check_format
from formats.quantizer import plan_format
from gguf_files.opening import open_source
from hub.client import fetch_file, list_files
from hub.disk import SOURCE, find_checkpoint, is_checkpoint, read
from hub.errors import in_one_line
from hub.gguf_models import find_stored
from hub.prepare import canonical, choose_of_published, roles
from hub.threads import Silent
from model import ModelArgs
from models import args_of_checkpoint, build_model, family_of_config
from models.published_tensors import read_config
from models.quantization import MODELOPT_FILE


class Described(NamedTuple):
    """A checkpoint without tensors, enough for a plan."""

    args: dict
    format: dict
    directory: Path


def describe_model(name: ModelName, revision: str | None = None) -> object:
    """Return a source of the model in the name's format: a checkpoint on disk, or a Described.

    The format's default is the published one. config.json alone is downloaded, if no format of the
    model is on disk. Raises ValueError as `hub.prepare.prepare` does before it downloads weights,
    and for a GGUF file that is not here.
    """
    if name.is_gguf:
        if found := find_stored(name):
            return open_source(found)
        raise ValueError(f"{name} is not on this disk yet: fetch it with --prepare_only first")
    name = canonical(name)
    if found := find_checkpoint(name, revision):
        return open_source(found)
    check_format(name)
    args, published = of_disk(name) or of_hub(name, revision)
    packed = None if published == PLAIN else published
    choose_of_published(name, args, packed, PLAIN, lambda *_: None)  # refuses what cannot be made
    wanted = name.format or published
    if wanted == PLAIN:
        format: dict = {"name": PLAIN}
    else:
        format = plan_format(build_model(args), *roles(ModelName(name.repo_id, wanted)))
    return Described(dataclasses.asdict(args), format, name.checkpoint(wanted))


def of_disk(name: ModelName) -> tuple[ModelArgs, str] | None:
    """Return args and published format by any checkpoint of the model on disk; None: none."""
    for path in sorted(name.folder.glob("model_*")):
        if is_checkpoint(path):
            own = path.name.removeprefix("model_")
            published = read(path / SOURCE).get("published")
            published = published or (own if own in UNRECORDED else PLAIN)
            return args_of_checkpoint(Checkpoint(path)), published
    return None


def of_hub(name: ModelName, revision: str | None) -> tuple[ModelArgs, str]:
    """Return args and published format by config.json."""
    with (
        tempfile.TemporaryDirectory(prefix="moe-fast-") as folder,
        in_one_line(name.repo_id, revision),
    ):
        repository = list_files(name.repo_id, revision)
        for file in sorted({"config.json", MODELOPT_FILE} & repository.sizes.keys()):
            fetch_file(repository, file, Path(folder), Silent)
        config = read_config(Path(folder))
    family = family_of_config(config)
    return family.from_hf(config), family.published_format(config) or PLAIN
