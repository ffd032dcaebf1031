"""Make a model of the Hub ready to run: download, convert and quantize in one pass over its files.

Each layer is written as soon as the files with its tensors are here. Those are then removed, so the
disk never holds the whole download. A run that is interrupted or killed leaves complete layers and
files; the next one goes on from there.
"""

import argparse
import contextlib
import dataclasses
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from checkpoint import NAMES, Checkpoint, Layout, SafetensorsFile, Writer, file_crc32, read_json
from cli.model_name import PLAIN, ModelName, check_format, parse_model_name
from cli.report import in_bytes
from formats.quantizer import (
    Packing,
    add_head,
    describe_groups,
    formats_of_mode,
    pack_modules,
    packed_bytes,
    plan_format,
    quantize,
)
from host.resumable import ResumableDirectory, remove_partial
from host.staging import remove
from hub.client import Repository, fetch_file, free_space, list_files
from hub.disk import SOURCE, find_checkpoint
from hub.errors import AGAIN, ELSEWHERE, describe_error, in_one_line
from hub.gguf_models import prepare_gguf
from hub.shards import AHEAD, Downloads, Folder, Shard, complete_files, read_headers
from hub.threads import Silent
from model import ModelArgs
from models import args_of_checkpoint, build_model, family_of_config
from models.converter import Conversion, weight_files
from models.published_tensors import read_config

log = logging.getLogger("moe_fast")

# Returns the "format" to write for args and the dtype of plain weights; None: the published one.
ChooseFormat = Callable[[ModelArgs, str], dict | None]


class Settings(NamedTuple):
    """How a model is made ready.

    revision: a branch, tag or commit; None: the main branch. keep_download: keep the Hub's files
    beside the checkpoint. device: where weights are packed. verify: read a checkpoint that is there
    already. iterations, force: as for `formats.quantizer.quantize`.
    """

    revision: str | None = None
    keep_download: bool = False
    device: torch.device | str = "cpu"
    verify: bool = False
    progress: bool = True
    iterations: int | None = None
    force: bool = False


def prepare(name: ModelName, settings: Settings | None = None) -> Path:
    """Return the directory of a model's checkpoint; make it unless it is on disk.

    Raises ValueError, one line with the fix, for a name that the Hub does not have, a model or a
    format that is not supported, a disk that is too small, and a download that broke off.
    """
    name, settings = canonical(name), settings or Settings()
    found = find_checkpoint(name, settings.revision)
    if found:
        with contextlib.suppress(ValueError):  # another process is replacing it
            remove_partial(found)  # left behind by a run that was killed in its last step
        if settings.verify:
            log.info(f"{found} is there already; verifying it")
            Checkpoint(found).verify(settings.progress)
        return found
    check_format(name)
    if plain := find_convertible(name, settings):
        return quantize_stored(name, plain, settings)
    return fetch_model(name, settings, lambda args, dtype: format_of_name(name, args, dtype))


def prepare_for(options: argparse.Namespace, device: torch.device) -> Path:
    """`prepare` for a command's options: model, revision, keep_download, and --prepare_only's.

    A repository of GGUF files has one that is run as it is.
    """
    if (name := parse_model_name(options.model)).is_gguf:
        return prepare_gguf(name, options.revision)
    verify = getattr(options, "prepare_only", False)
    settings = Settings(options.revision, options.keep_download, device, verify)
    return prepare(parse_model_name(options.model), settings)


def find_convertible(name: ModelName, settings: Settings) -> Path | None:
    """Return the model's checkpoint in its published format, if it is on disk."""
    return find_checkpoint(ModelName(name.repo_id), settings.revision) if name.format else None


def format_of_name(name: ModelName, args: ModelArgs, dtype: str) -> dict | None:
    """Return the "format" that a name asks for; None: the published one."""
    if name.format in (None, PLAIN):
        return None
    return plan_format(build_model(args), *roles(name), dtype=dtype)


def roles(name: ModelName) -> tuple[str, str]:
    """Return the formats of attention and of experts."""
    if len(name.formats) == 2:
        return name.formats[0], name.formats[1]
    return formats_of_mode(name.format or PLAIN)


def canonical(name: ModelName) -> ModelName:
    """Return the name with the format that its checkpoint is called: int4-int4 is int4."""
    if len(name.formats) == 2 and roles(name) == formats_of_mode(name.formats[1]):
        return ModelName(name.repo_id, name.formats[1])
    return name


def quantize_stored(name: ModelName, plain: Path, settings: Settings) -> Path:
    """Quantize the checkpoint that is on disk in the published format."""
    if name.format == PLAIN:
        published = plain.name.removeprefix("model_")
        raise ValueError(f"{name} is published in {published}: leave :{PLAIN} out")
    log.info(f"quantizing {plain}, which is there already; verifying it first")
    source = Checkpoint(plain)
    source.verify(settings.progress)
    args = args_of_checkpoint(source)
    format = plan_format(build_model(args), *roles(name), dtype=source.format["name"])
    options = dict(device=settings.device, progress=settings.progress)
    return quantize(source, format, build_model(args), name.checkpoint(), **options)


# Fetching -----------------------------------------------------------------------------------------


def fetch_model(
    name: ModelName,
    settings: Settings,
    choose_format: ChooseFormat,
    label: str | None = None,
    target: Path | None = None,
) -> Path:
    """Download, convert and pack a model; return its checkpoint's directory.

    label: names the directory in which the checkpoint grows; default: the format's name. target:
    default: `name.checkpoint` of the format.
    """
    with tempfile.TemporaryDirectory(prefix="moe-fast-") as temporary:
        small = Path(temporary)
        with in_one_line(name.repo_id, settings.revision):
            repository = list_files(name.repo_id, settings.revision)
            published = fetch_small_files(name, repository, small, choose_format)
            label = label or name.format or published
            identity = {"files": repository.identity, "label": label}
            staged = ResumableDirectory(target or name.checkpoint(label), identity, is_whole)
        fetch = Fetch(name, settings, repository, small, staged)
        try:
            fetch.plan(choose_format, target)
            return fetch.run()
        except ValueError as error:
            raise ValueError(str(error).replace(str(small), name.repo_id)) from None
        except KeyboardInterrupt:
            log.warning(f"interrupted; complete files are kept: {AGAIN}")
            raise
        finally:
            fetch.close()
            staged.close()


def fetch_small_files(
    name: ModelName, repository: Repository, directory: Path, choose_format: ChooseFormat
) -> str:
    """Download everything but the weights; return the published format's name.

    Raises ValueError, by config.json alone, for a model that is not supported, and for a format
    that cannot be made of it.
    """
    fetch_file(repository, "config.json", directory, Silent)
    config = read_json(directory / "config.json")
    family = family_of_config(config)
    args, published = family.from_hf(config), family.published_format(config)
    choose_of_published(name, args, published, PLAIN, choose_format)
    for file in repository.sizes.keys() - repository.weights:
        fetch_file(repository, file, directory, Silent)
    return family.published_format(read_config(directory)) or PLAIN


def choose_of_published(
    name: ModelName, args: ModelArgs, published: str | None, dtype: str, choose_format: ChooseFormat
) -> dict | None:
    """Return the "format" to write; None: the published one.

    published: the format of packed weights; None: there are none. dtype: of plain ones. Raises
    ValueError for a format that cannot be made.
    """
    if name.format == (published or dtype):
        return None
    if published and name.format is not None:
        what = f"is published in {published}, so it is quantized already"
        raise ValueError(f"{name} {what}: leave :{name.format} out")
    chosen = choose_format(args, dtype)
    if chosen and published:
        raise ValueError(f"{name} is quantized already ({published})")
    return chosen


class ResumableWriter(Writer):
    """A Writer into a ResumableDirectory: knows the files that earlier runs have written."""

    def __init__(self, staged: ResumableDirectory, args: dict, format: dict, force: bool):
        super().__init__(staged.target, args, format, force)
        self._staged = self.staged = staged
        self.directory = staged.path

    def __enter__(self) -> "ResumableWriter":
        self._check_target()
        for entry in self.staged.files.values():
            self.index["tensors"] |= entry["tensors"]
            self.index["files"][entry["file"]] = {k: entry[k] for k in ("bytes", "crc32")}
        return self

    def enter(self, file: str, layout: Layout, size: int, crc: int) -> None:
        super().enter(file, layout, size, crc)
        entries = {name: self.index["tensors"][name] for name in layout}
        self.staged.add({"file": file, **self.index["files"][file], "tensors": entries})


def is_whole(path: Path, entry: dict) -> bool:
    """Whether a file is what `ResumableWriter.write` recorded: its checksum and its tensors."""
    try:
        found = {
            name: {"file": path.name, "shape": list(shape), "dtype": NAMES.get(dtype)}
            for name, (shape, dtype) in SafetensorsFile(path).tensors.items()
        }
        return entry.get("tensors") == found and entry.get("crc32") == file_crc32(path)
    except (ValueError, OSError):
        return False


class Fetch:
    """One model's way from the Hub to a checkpoint: `plan`, then `run`."""

    def __init__(
        self,
        name: ModelName,
        settings: Settings,
        repository: Repository,
        small: Path,
        staged: ResumableDirectory,
    ):
        """small: a directory with the files that are no weights."""
        self.name, self.settings, self.repository = name, settings, repository
        self.small, self.staged = small, staged
        self.downloads: Downloads | None = None
        self.folder = name.folder if settings.keep_download else staged.downloads
        remove(staged.downloads / ".cache")  # parts of killed downloads
        self.bar = self.make_bar(desc="download", unit="B", unit_scale=True)

    def make_bar(self, **options) -> tqdm:
        """Return a progress bar; `delay` keeps that of a short download from being shown."""
        return tqdm(**options, file=sys.stderr, delay=0.5, disable=not self.settings.progress)

    def plan(self, choose_format: ChooseFormat, target: Path | None) -> None:
        """Check everything that headers tell: the model, its format, the disk.

        Raises ValueError before the weights are downloaded (a tied head that is published too is
        compared with the embedding: their files come first).
        """
        repository = self.repository
        files, weight_map = weight_files(self.small, repository.sizes)
        kept = complete_files(repository, self.name.folder)
        with in_one_line(self.name.repo_id, self.settings.revision):
            headers = read_headers(repository, files, self.settings.progress)

        def describe(error: Exception) -> str:
            return describe_error(error, self.name.repo_id, self.settings.revision)

        folder = Folder(self.folder, kept, not self.settings.keep_download)
        self.downloads = Downloads(repository, files, folder, self.bar, describe)
        self.shards = {f: Shard(self.downloads.path(f), headers[f], self.downloads) for f in files}
        self.conversion = Conversion(self.small, self.shards, weight_map)
        if self.conversion.left_out:
            log.info(f"left out, as they are not run: {self.conversion.left_out}")
        self.format = self.choose(choose_format)
        self.staged.target = target or self.name.checkpoint(self.format["name"])
        self.order_files(files)
        self.check_disk()

    def choose(self, choose_format: ChooseFormat) -> dict:
        """Return the "format" to write."""
        published, args = self.conversion.format, self.conversion.args
        packed = published["name"] if "modules" in published else None
        dtype = published.get("dtype", published["name"])
        chosen = choose_of_published(self.name, args, packed, dtype, choose_format)
        names = [name for recipes in self.conversion.plan.files.values() for name in recipes]
        return add_head(chosen, names) if chosen else published

    def order_files(self, files: list[str]) -> None:
        """Order our files by the last of theirs that they need, and tell when each was used last.

        Theirs that are not needed are never downloaded.
        """
        plan = self.conversion.plan
        self.needs = {ours: plan.shards(ours) for ours in plan.files}
        last = {ours: max(map(files.index, theirs)) for ours, theirs in self.needs.items()}
        self.files = [f for f in sorted(self.needs, key=last.get) if f not in self.staged.files]
        self.last_use = {theirs: ours for ours in self.files for theirs in self.needs[ours]}
        self.downloads.limit(self.last_use)
        here = complete_files(self.repository, self.name.folder, self.folder)
        sizes = self.repository.sizes
        self.missing = {file: sizes[file] for file in self.last_use if file not in here}

    def output_bytes(self) -> dict[str, int]:
        """Return the bytes of each of our files that is to be written, in about."""
        plan, dtype = self.conversion.plan, self.conversion.dtype
        sizes = {file: plan.sizes(file, dtype) for file in plan.files}
        ratio = 1.0
        if self.format is not self.conversion.format:
            model = build_model(self.conversion.args)
            pack_modules(model, self.format)
            tensors = {name: n for file in sizes.values() for name, n in file.items()}
            ratio = packed_bytes(model, self.format, tensors) / sum(tensors.values())
        return {file: int(sum(sizes[file].values()) * ratio) for file in self.files}

    def peak_bytes(self, written: dict[str, int]) -> int:
        """Return how many bytes more than now the disk will hold at most."""
        order = [file for file in self.downloads.order if file in self.last_use]
        if self.settings.keep_download:
            return sum(written.values()) + sum(self.missing.values())
        peak = total = reached = 0
        used: set[str] = set()
        for ours in self.files:
            total += written[ours]
            reached = max([reached, *(order.index(file) + AHEAD for file in self.needs[ours])])
            here = [file for file in order[: reached + 1] if file not in used]
            peak = max(peak, total + sum(self.missing.get(file, 0) for file in here))
            used |= {file for file in self.needs[ours] if self.last_use[file] == ours}
        return peak

    def check_disk(self) -> None:
        """Log the sizes; raise ValueError if the disk cannot hold what will be written."""
        written = self.output_bytes()
        need, free = self.peak_bytes(written), free_space(self.staged.root)
        total, format = sum(self.missing.values()), self.format["name"]
        done = f", {len(self.staged.files)} files are done already" if self.staged.files else ""
        found = describe_groups(self.format)
        groups = f" ({found})" if found else ""
        log.info(
            f"{self.name}: {in_bytes(total)} to download, {in_bytes(sum(written.values()))} to "
            f"write as {format}{groups}{done}; needs {in_bytes(need)} of disk at most, "
            f"{in_bytes(free)} are free"
        )
        if need > free:
            what = f"needs {in_bytes(need)} of disk and {in_bytes(free)} are free"
            raise ValueError(f"{self.name} {what}; free some space, or {ELSEWHERE}")
        self.bar.total = total
        if not self.missing:
            self.bar = self.make_bar(desc="convert", unit="layer", total=len(self.files))

    def run(self) -> Path:
        """Write all files, and the checkpoint's config last; return its directory."""
        args, format = dataclasses.asdict(self.conversion.args), self.format
        names = {name for file in self.conversion.plan.files.values() for name in file}
        changes = {} if format is self.conversion.format else format
        packing = Packing(changes, names, self.settings.device, self.settings.iterations)
        if self.settings.keep_download:
            self.keep_small_files()
        writer = ResumableWriter(self.staged, args, format, self.settings.force)
        with writer, contextlib.closing(self):  # the download ends before the lock is released
            for file in self.files:
                self.write(writer, file, packing)
                self.release(f for f in self.needs[file] if self.last_use[f] == file)
                if self.missing:
                    done = f"{len(self.staged.files)}/{len(self.needs)} layers"
                    self.bar.set_postfix_str(done, refresh=False)
                else:
                    self.bar.update(1)
            self.conversion.write_side_files(writer)
            writer.write_json(SOURCE, self.source())
        return self.staged.target

    def close(self) -> None:
        """End the download's thread and the bar."""
        if self.downloads is not None:
            self.downloads.close()
        self.bar.close()

    def write(self, writer: Writer, file: str, packing: Packing) -> None:
        """Write one of our files, packed."""
        layout = self.conversion.layout(file)
        pieces = packing.pieces(layout, partial(self.conversion.pieces, file))
        writer.write_pieces({file: packing.layout(layout)}, pieces)

    def release(self, files: Iterable[str]) -> None:
        """Remove files that are needed no more."""
        files = list(files)
        for file in files:
            self.shards[file].close()
        self.downloads.release(files)

    def source(self) -> dict:
        """Return where the checkpoint comes from."""
        return {
            "repo_id": self.repository.repo_id,
            "revision": self.settings.revision or "main",
            "commit": self.repository.commit,
            "published": self.conversion.format["name"],
        }

    def keep_small_files(self) -> None:
        """Download the other files beside the weights too: a kept download is complete."""
        with in_one_line(self.name.repo_id, self.settings.revision):
            for file in self.repository.sizes.keys() - self.repository.weights:
                fetch_file(self.repository, file, self.folder, Silent)
