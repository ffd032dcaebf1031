"""The on-disk format: open a checkpoint, check it, read tensors or slices, write it atomically.

A checkpoint is a self-contained directory:

    config.json               {"moe_fast": format version, "format": any JSON, "args": {...}}
    layer_00.safetensors ...  one file a layer, and rest.safetensors; other names work too
    index.json                {"tensors": {name: {file, shape, dtype}},
                               "files": {file: {bytes, crc32}}, "config_crc32": of config.json,
                               "side_files": [names]}
    tokenizer.json ...        side files: read by other modules, and free to be edited

This module does not interpret `args` and `format`: it returns them as they were written.

    python checkpoint.py DIR [--verify]     print a summary; --verify reads every file
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from cli.checkpoint_options import build_parser
from cli.command import command, printable
from cli.report import in_bytes
from cli.startup import check_arguments
from host import upload_ahead
from host.files import Stamp, check_regular, lfs_pointer, read_regular, stamp
from host.pipeline import ahead
from host.safetensors_output import Entry, FileRange, Run, SafetensorsOutput, file_order
from host.staging import LOCK, StagedDirectory, flush_to_disk, recover

if __name__ == "__main__":
    check_arguments(build_parser)

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from tokenizer import load_tokenizer

try:
    from isal.isal_zlib import crc32
except ImportError:  # a machine that it has no wheel for; zlib's takes eight times as long
    from zlib import crc32

FORMAT_VERSION = 1
TOKENIZER_FILES = "tokenizer.json", "tokenizer.model"
SIDE_FILES = (  # copied beside the weights from a Hugging Face directory
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",  # copied as tool_use.jinja
    "generation_config.json",
)
MAKE_ONE = "make one first: scripts/prepare.sh OWNER/NAME"  # the fix for a missing checkpoint
CHECKSUM_CHUNK = 4 << 20  # bytes read at a time
PIECE_BYTES = 8 << 20  # a large tensor is read and written in pieces of this size
FLUSH_BYTES = 256 << 20  # written between two waits for the disk
PIECES_AHEAD = 16  # pieces of tensors that a stage of the conversion is ahead of the next one

DTYPES = {  # name in index.json: PyTorch's dtype, and its name in a safetensors header
    "bf16": (torch.bfloat16, "BF16"),
    "fp16": (torch.float16, "F16"),
    "fp32": (torch.float32, "F32"),
    "int8": (torch.int8, "I8"),
    "uint8": (torch.uint8, "U8"),
    "int32": (torch.int32, "I32"),
    "fp8_e4m3": (torch.float8_e4m3fn, "F8_E4M3"),
}
NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}
NOT_FINITE = {  # integers of this size, and the bits of the smallest number that is not finite
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float8_e4m3fn: (torch.int8, 0x7F),  # it has no infinity
}
FINITE_BLOCK = 1 << 17  # numbers that are read twice, from the CPU's cache
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # tensor -> shape, dtype
HEADER_DTYPES = {  # what a file may hold; the conversion refuses the dtypes beyond ours by name
    **{tag: dtype for dtype, tag in DTYPES.values()},
    "F64": torch.float64,
    "I64": torch.int64,
    "I16": torch.int16,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def read_json(path: Path) -> dict:
    """Return the JSON object in a file.

    Raises ValueError if the file is missing, unreadable or holds anything but an object.
    """
    try:
        value = json.loads(read_regular(path))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; fetch or convert the checkpoint again") from None
    except (OSError, ValueError, RecursionError) as error:
        cause = str(error).splitlines()[0]
        fix = "fetch or convert it again"
        raise ValueError(f"{path} cannot be read as JSON ({cause}); {fix}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object; fetch or convert it again")
    return value


def check_name(path: Path) -> None:
    """Raise ValueError for a path that safetensors cannot open: one that is not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path}: its name is not UTF-8; rename it, or name another") from None


def is_checkpoint(directory: Path | str) -> bool:
    """Return whether a directory holds a checkpoint in this format, by its config.json alone."""
    try:
        return "moe_fast" in read_json(Path(directory) / "config.json")
    except ValueError:
        return False


class SafetensorsFile:
    """One safetensors file.

    `.tensors` maps a name to (shape, dtype). Opening reads the header alone. Raises ValueError if
    the header does not account for every byte of the file.

    keep_open: read all tensors by one handle, until `close`: to open a file of 3,000 tensors takes
    5 ms. Such tensors share their pages, so they are not to be written to.
    """

    def __init__(self, path: Path, keep_open: bool = False):
        self.path, self._keep_open = Path(path), keep_open
        self._handle = None  # of `safe_open`
        self._begins: dict[str, int] = {}  # tensor -> its first byte in the file
        check_name(self.path)
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        try:
            check_regular(self.path)
            with open(self.path, "rb") as file:  # safe_open reports every failure as "not found"
                self._stamp = stamp(os.fstat(file.fileno()))
            self._read_header()
        except FileNotFoundError:
            fix = "fetch or convert the checkpoint again"
            raise ValueError(f"{self.path} is missing; {fix}") from None
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror}") from None
        except SafetensorError as error:
            cause = describe_header_error(error)
            damage = f"{self.path} is damaged or truncated ({cause}); fetch or convert it again"
            raise ValueError(lfs_pointer(self.path) or damage) from None

    def _read_header(self):
        with safe_open(self.path, framework="pt") as file:
            for name in sorted(file.keys()):
                entry = file.get_slice(name)
                tag = entry.get_dtype()
                if tag not in HEADER_DTYPES:
                    raise SafetensorError(f"unsupported dtype {tag} of {name}")
                self.tensors[name] = tuple(entry.get_shape()), HEADER_DTYPES[tag]
            # Tensors leave no gaps: the last one ends with the file.
            end = self._stamp[0]
            for name in reversed(file.offset_keys()):
                end -= nbytes_of(*self.tensors[name])
                self._begins[name] = end

    def origin(self, name: str) -> FileRange:
        """Return where the file has a tensor."""
        return FileRange(self.path, self._begins[name])

    def close(self):
        """Close the handle that `keep_open` keeps; a later read opens another one."""
        self._handle = None

    def check_unchanged(self):
        """Raise ValueError as the function of this name."""
        check_unchanged(self.path, self._stamp)

    def read(
        self, name: str, index: tuple[slice, ...] | None = None, device: str | torch.device = "cpu"
    ) -> Tensor:
        """Return the tensor `name`, or its part `tensor[index]`, contiguous on `device`.

        A whole tensor on the CPU is a copy-on-write view of the mapped file: its bytes are read
        when they are first used, and writing to it does not change the file. Raises KeyError for
        an unknown name, ValueError if the file can no longer be read.
        """
        if name not in self.tensors:
            raise KeyError(name)
        uploaded = self._read_uploaded(name, torch.device(device)) if index is None else None
        if uploaded is not None:
            return uploaded
        try:
            # Open the file for every tensor (0.05 ms for 10 tensors, 0.7 ms for 1000): tensors of
            # one handle share their pages, so that a write to one would show in the next read.
            file = self._handle or safe_open(self.path, framework="pt")
            self._handle = file if self._keep_open else None
            tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
        except (OSError, SafetensorError) as error:
            cause = f"cannot be read any more ({' '.join(str(error).split())})"
            raise ValueError(f"{self.path} {cause}; start again") from None
        if tensor.data_ptr() % tensor.itemsize:
            tensor = tensor.clone()  # old files have unaligned tensors; vectorized loops may crash
        # Not safe_open(device=...): its pinned memory is rounded up to a power of two, and kept.
        return tensor.contiguous().to(device)

    def _read_uploaded(self, name: str, device: torch.device) -> Tensor | None:
        """Return a tensor of the file's copy on the GPU; None: there is none."""
        shape, dtype = self.tensors[name]
        size, is_first = nbytes_of(shape, dtype), device.type == "cuda" and not device.index
        given = self._stamp, self._begins[name], size
        found = upload_ahead.take(*given) if is_first and size else None
        if found is None:
            return None
        part, is_own = found
        tensor = torch.as_tensor(part, device=device)
        return (tensor if is_own else tensor.clone()).view(dtype).view(shape)


def nbytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def check_unchanged(path: Path, opened: Stamp) -> None:
    """Raise ValueError if a file is gone, or no longer the one that was opened.

    opened: its `stamp` then.
    """
    try:
        unchanged = stamp(path.stat()) == opened
    except OSError as error:
        cause = f"cannot be read any more ({error.strerror})"
        raise ValueError(f"{path} {cause}; start again") from None
    if not unchanged:
        raise ValueError(f"{path} has changed since it was opened; start again")


def describe_header_error(error: SafetensorError) -> str:
    """Return the library's message in one short line, without its prefix."""
    cause = " ".join(str(error).split()).removeprefix("Error while deserializing header: ")
    if re.match("invalid ?offset", cause, re.IGNORECASE):
        cause += ": its tensors overlap or leave a gap"
    return cause if len(cause) <= 160 else f"{cause[:157]}..."


class Piece(NamedTuple):
    """Next rows of a tensor to be written. origin: where a file has them as they are."""

    name: str
    rows: Tensor
    origin: FileRange | None = None


class Checkpoint:
    """A checkpoint directory, checked when opened: sizes of files; file, shape, dtype of tensors.

    `.args` (dict) and `.format` are the JSON values given to the Writer. `.tensors` maps a name to
    (shape, dtype), `.files` a file to (bytes, CRC32). Raises ValueError, one line with the fix, for
    a directory that is not a complete checkpoint in this format.
    """

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self._check_layout()
        config = read_json(self.directory / "config.json")
        if config["moe_fast"] != FORMAT_VERSION:
            raise ValueError(
                f"{self.directory} has format version {config['moe_fast']!r} where this program "
                f"reads {FORMAT_VERSION}; convert the original checkpoint again"
            )
        self.args, self.format = config.get("args"), config.get("format")
        if not isinstance(self.args, dict) or self.format is None:
            raise self._damaged("config.json lacks its args or format")
        self.files: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._shard_of: dict[str, SafetensorsFile] = {}  # by tensor
        index = read_json(self.directory / "index.json")
        # Version one wrote neither the checksum nor the list.
        if index.get("config_crc32") not in (None, file_crc32(self.directory / "config.json")):
            raise self._damaged("config.json differs from its checksum: it was edited")
        self._side_files = index.get("side_files", SIDE_FILES)
        try:
            self._read_index(index)
        except (KeyError, TypeError, AttributeError):
            raise self._damaged("index.json makes no sense") from None

    def _check_layout(self):
        """Raise ValueError for the other directories that users give, each with its own fix."""
        directory = self.directory
        if not directory.exists():
            recover(directory.parent)  # a run may have been killed between two renames
        if directory.suffix == ".gguf" and directory.is_file():
            path = shlex.quote(str(directory))
            fix = f"run it as it is: python generate.py --checkpoint_path {path}"
            raise ValueError(f"{directory} is a GGUF file, and no directory; {fix}")
        if directory.is_file() and (directory.parent / "config.json").is_file():
            fix = f"give the directory: {directory.parent}"
            raise ValueError(f"{directory} is one file of a checkpoint; {fix}")
        if not directory.is_dir():
            for path in sorted(directory.parent.glob("model_*")):
                if is_checkpoint(path):
                    fix = f"use {path}, or make it with quantize.py"
                    raise ValueError(f"{directory} is not there; {fix}")
            is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(directory))
            fix = MAKE_ONE.replace("OWNER/NAME", str(directory)) if is_name else MAKE_ONE
            raise ValueError(f"{directory} is not a directory; {fix}")
        if is_checkpoint(directory):
            return
        converted = [directory / "model_bf16", *sorted(directory.glob("model_*"))]
        for path in filter(is_checkpoint, converted):
            raise ValueError(f"{directory} is not converted itself; use {path}")
        if not (directory / "config.json").is_file():
            cause = "config.json is missing, so this is no checkpoint"
            raise ValueError(f"{directory}/{cause}; {MAKE_ONE}")
        config = read_json(directory / "config.json")
        if "architectures" in config or "model_type" in config:
            path = shlex.quote(str(directory))
            fix = f"convert it first: python convert_hf_checkpoint.py --checkpoint_dir {path}"
            raise ValueError(f"{directory} is in Hugging Face layout; {fix}")
        raise ValueError(f"{directory}/config.json is not of a moe-fast checkpoint; {MAKE_ONE}")

    def _read_index(self, index: dict):
        """Open every file of the index and compare it. Raises KeyError and others for bad JSON."""
        shards: dict[str, SafetensorsFile] = {}
        for file, entry in index["files"].items():
            self.files[file] = entry["bytes"], entry["crc32"]
            shards[file] = self._open_shard(file, entry["bytes"])
        for name, entry in index["tensors"].items():
            shard = shards[entry["file"]]
            found = shard.tensors.get(name)
            if found is None or found != (tuple(entry["shape"]), DTYPES[entry["dtype"]][0]):
                raise self._damaged(f"{entry['file']} does not hold {name} as index.json has it")
            self.tensors[name] = found
            self._shard_of[name] = shard

    def _open_shard(self, file: str, size: int) -> SafetensorsFile:
        if Path(file).name != file:
            raise self._damaged(f"index.json names {file!r}, outside the directory")
        shard = SafetensorsFile(self.directory / file)
        if shard.path.stat().st_size != size:
            raise self._damaged(f"{file} has not the {size} bytes that index.json has")
        return shard

    def _damaged(self, cause: str) -> ValueError:
        fix = "convert the original checkpoint again"
        return ValueError(f"{self.directory} is damaged ({cause}); {fix}")

    def read(
        self, name: str, index: tuple[slice, ...] | None = None, device: str | torch.device = "cpu"
    ) -> Tensor:
        """Return a tensor, or its part `tensor[index]`, on `device`; see `SafetensorsFile.read`."""
        return self._shard_of[name].read(name, index, device)

    def pieces(self, name: str) -> Iterator[Piece]:
        """Yield a tensor in pieces."""
        yield from (Piece(name, rows) for rows in split_rows(self.read(name)))

    def check_unchanged(self, name: str):
        """Raise ValueError if the file of tensor `name` is gone or has changed since opening."""
        self._shard_of[name].check_unchanged()

    def nbytes(self, name: str) -> int:
        """Return the bytes of the whole tensor `name`, on disk and in memory."""
        return nbytes_of(*self.tensors[name])

    def by_file(self) -> dict[str, list[str]]:
        """Return the names of the tensors in each safetensors file."""
        files: dict[str, list[str]] = {}
        for name, shard in self._shard_of.items():
            files.setdefault(shard.path.name, []).append(name)
        return files

    def side_files(self) -> list[Path]:
        """Return the other files that belong to it: the tokenizer's, generation_config.json ..."""
        paths = (self.directory / name for name in {*self._side_files, *SIDE_FILES})
        return sorted(path for path in paths if path.is_file())

    def verify(self, progress: bool = True):
        """Read every file: compare its CRC32, and check that its numbers are finite.

        Raises ValueError with the first that is wrong.
        """
        total = sum(size for size, _ in self.files.values())
        bar = tqdm(
            total=total,
            desc="verify",
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            disable=not progress,
        )
        with bar:
            for file, (_, expected) in self.files.items():
                if file_crc32(self.directory / file, bar.update) != expected:
                    raise self._damaged(f"{file} differs from its checksum")
        for name, (_, dtype) in self.tensors.items():
            if dtype.is_floating_point and not is_finite(self.read(name)):
                raise self._damaged(f"{name} holds NaN or infinity")


class Writer:
    """Writes a checkpoint completely, or not at all.

        with Writer(target, args={...}, format={"name": "bf16"}) as writer:
            writer.write("layer_00.safetensors", {"layers.0.ffn_norm.weight": tensor, ...})
            writer.copy(path_of_tokenizer_json)

    Files go into a temporary directory beside `target`. It is renamed to `target` when the block
    ends, and removed when the block fails. With `force` an existing checkpoint is replaced, at the
    end of the block. Raises ValueError if `target` exists otherwise, and if the disk is full or the
    directory cannot be written.
    """

    def __init__(self, target: Path | str, args: dict, format, force: bool = False):
        self.target = place_of(Path(target))
        self.config = {"moe_fast": FORMAT_VERSION, "format": format, "args": args}
        self.index = {"tensors": {}, "files": {}}
        self.force = force
        self._side_files: set[str] = set()

    def _check_target(self):
        target = self.target
        check_name(target)
        if target.is_symlink() and not target.exists():
            raise ValueError(f"{target} is a link to nothing; remove it, or name another place")
        replaces_link = target.is_symlink() and not self.force
        is_empty = target.is_dir() and not any(target.iterdir()) and not replaces_link
        if not target.exists() or is_empty:
            return
        if not self.force:
            raise ValueError(f"{target} exists; give --force to replace it, or name another place")
        if not is_checkpoint(target):
            cause = "is no moe-fast checkpoint, so it is not replaced"
            raise ValueError(f"{target} {cause}; name another place")
        others = sorted({path.name for path in target.iterdir()} - own_names(target))
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            cause = f"also holds {others[0]}{more}, so it is not replaced"
            raise ValueError(f"{target} {cause}; move them, or name another place")

    def __enter__(self) -> "Writer":
        self._check_target()
        try:
            self._staged = StagedDirectory(self.target)
        except OSError as error:
            cause = f"cannot write to {self.target.parent}: {error.strerror or error}"
            raise ValueError(f"{cause}; name another place") from None
        self.directory = self._staged.path
        return self

    def reserve(self, size: int):
        """Raise ValueError now if the disk has fewer than `size` bytes left."""
        free = shutil.disk_usage(self.directory).free
        if free < size:
            need = f"needs {in_bytes(size)} of disk space, and {in_bytes(free)} are free"
            raise ValueError(f"{self.target} {need}: free some, or name another place")

    def __exit__(self, kind, error, traceback):
        try:
            if error is not None:
                raise error
            self.write_json("config.json", self.config)
            self.index["config_crc32"] = file_crc32(self.directory / "config.json")
            self.write_json("index.json", self.index | {"side_files": sorted(self._side_files)})
            self._check_target()  # again: hours may have passed
            self._staged.commit(replace=self.force)
        except (OSError, SafetensorError) as failure:
            self._check_target()  # another process may have made it in the last moment
            fix = "free some space or name another place"
            raise ValueError(f"cannot write {self.target} ({failure}); {fix}") from None
        finally:
            self._staged.close()

    def write(self, file: str, tensors: dict[str, Tensor]):
        """Write one safetensors file. The tensors may be on any device."""
        layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        self.write_pieces({file: layout}, (Piece(*item) for item in tensors.items()))

    def write_pieces(
        self,
        layouts: Mapping[str, Layout],
        pieces: Iterable[Piece],
        on_write: Callable[[int], object] = lambda count: None,
    ):
        """Write safetensors files while their tensors are made.

        layouts: by file. pieces: of all tensors, file by file; a thread iterates over them.
        on_write gets the bytes of every piece that was written.
        """
        names = [name for layout in layouts.values() for name in layout]
        assert not self.index["tensors"].keys() & names, "a tensor is written twice"
        unflushed = 0
        ordered = ahead(self._order(layouts, iter(pieces)), PIECES_AHEAD)
        with closing(ahead(store(ordered), PIECES_AHEAD)) as stored:
            for file, output, size, is_last in stored:
                unflushed += size
                if is_last or unflushed >= FLUSH_BYTES:
                    output.flush()
                    unflushed = 0
                if is_last:
                    output.close()
                    self.enter(file, layouts[file], output.size, output.crc32)
                on_write(size)

    def _order(
        self, layouts: Mapping[str, Layout], pieces: Iterator[Piece]
    ) -> Iterator[tuple[str, SafetensorsOutput, Run | None]]:
        """Yield file, output and next bytes of each file; None after its last."""
        for file, layout in layouts.items():
            output = SafetensorsOutput(self.directory / file, entries_of(layout), crc32)
            while not output.is_ordered:
                name, rows, origin = next(pieces)
                data = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                for run in output.order(name, Run(memoryview(data), origin)):
                    yield file, output, run
            yield file, output, None

    def enter(self, file: str, layout: Layout, size: int, crc: int):
        """Enter a complete file into the index."""
        for name, (shape, dtype) in layout.items():
            entry = {"file": file, "shape": list(shape), "dtype": NAMES[dtype]}
            self.index["tensors"][name] = entry
        self.index["files"][file] = {"bytes": size, "crc32": crc}

    def write_json(self, file: str, value):
        """Write a JSON file; it replaces a copied one of that name."""
        if file not in ("config.json", "index.json"):
            self._side_files.add(file)
        with open(self.directory / file, "w") as stream:
            json.dump(value, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())

    def copy(self, path: Path | str):
        """Copy a side file, keeping its name."""
        self._side_files.add(Path(path).name)
        flush_to_disk(shutil.copyfile(path, self.directory / Path(path).name))


def split_rows(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in pieces of some rows of its first axis."""
    if tensor.nbytes <= PIECE_BYTES or tensor.dim() == 0:
        yield tensor
    else:
        yield from tensor.split(max(1, PIECE_BYTES * len(tensor) // tensor.nbytes))


def entries_of(layout: Layout) -> dict[str, Entry]:
    """Return the entries of a file's header."""
    return {
        name: Entry(DTYPES[NAMES[dtype]][1], dtype.itemsize, shape)
        for name, (shape, dtype) in layout.items()
    }


def tensor_order(layout: Layout) -> list[str]:
    """Return the tensors in the order in which a file has them."""
    return file_order(entries_of(layout))


def store(
    ordered: Generator[tuple[str, SafetensorsOutput, Run | None], None, None],
) -> Iterator[tuple[str, SafetensorsOutput, int, bool]]:
    """Write what `Writer._order` yields; yield file, output, bytes, and whether it is complete."""
    with closing(ordered):
        for file, output, run in ordered:
            if run is not None:
                output.write(run)
            yield file, output, 0 if run is None else len(run.data), run is None


def place_of(target: Path) -> Path:
    """Return an absolute path. A link at its end stays: it is replaced, and never its target."""
    is_named = target.name not in ("", "..")
    return target.parent.resolve() / target.name if is_named else target.resolve()


def file_crc32(path: Path, on_read: Callable[[int], object] = lambda count: None) -> int:
    """Return the CRC32 of a file. on_read gets the bytes of every chunk read."""
    crc, buffer = 0, memoryview(bytearray(CHECKSUM_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = crc32(buffer[:count], crc)
            on_read(count)
    return crc


def own_names(directory: Path) -> set[str]:
    """Return the names in a checkpoint's directory that this project wrote, damaged or not."""
    names = {"config.json", "index.json", LOCK}
    try:
        index = read_json(directory / "index.json")
        return names | {*index["files"], *index.get("side_files", SIDE_FILES)}
    except (ValueError, KeyError, TypeError):
        return names | set(SIDE_FILES)


def is_finite(tensor: Tensor) -> bool:
    """Whether a floating-point tensor holds neither NaN nor infinity, without a copy of it."""
    if not tensor.is_cpu or tensor.dtype not in NOT_FINITE:
        return tensor.numel() == 0 or all(bool(end.isfinite()) for end in tensor.aminmax())
    # The largest bits, as integers with a sign and without: 5 GB/s, of `aminmax` in bf16 2 GB/s.
    integers, least = NOT_FINITE[tensor.dtype]
    signed = tensor.detach().contiguous().reshape(-1).view(integers).numpy()
    unsigned = signed.view(f"u{signed.dtype}")
    sign = 1 << 8 * tensor.itemsize - 1
    starts = range(0, len(signed), FINITE_BLOCK)
    blocks = (slice(start, start + FINITE_BLOCK) for start in starts)
    return not any(signed[at].max() >= least or unsigned[at].max() >= sign + least for at in blocks)


@command()
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    checkpoint = Checkpoint(options.directory)
    if options.verify:
        checkpoint.verify()
        vocab_size = checkpoint.args.get("vocab_size", 1 << 62)
        if type(vocab_size) is not int:
            raise checkpoint._damaged("config.json has a vocab_size that is no integer")
        if any(path.name in TOKENIZER_FILES for path in checkpoint.side_files()):
            load_tokenizer(options.directory).check(vocab_size)
    total = sum(map(checkpoint.nbytes, checkpoint.tensors))
    directory = printable(str(checkpoint.directory))
    print(f"{directory}: {len(checkpoint.tensors)} tensors, {total / 1e9:.3f} GB")
    print(f"format: {json.dumps(checkpoint.format)}")
    for key, value in checkpoint.args.items():
        print(f"  {printable(key)}: {printable(str(value))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
