"""The one on-disk format: open, check, read a slice, write atomically.

A checkpoint is a directory of ours, complete in itself:

    config.json               {"moe_fast": format version, "format": any JSON, "args": {...}}
    layer_00.safetensors ...  one file a layer, and rest.safetensors; any names will do
    index.json                {"tensors": {name: {file, shape, dtype}}, "files": {file: {bytes, crc32}}}
    tokenizer.json ...        side files, for other rooms to read and for people to edit

`args` and `format` mean nothing here: they are handed back as they were written.

    python checkpoint.py DIR [--verify]     a summary; with --verify the checksum of every file as well
"""

import itertools
import json
import math
import os
import re
import secrets
import shlex
import shutil
import sys
import zlib
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from command import Parser

FORMAT_VERSION = 1
MAKE_ONE = "make one first: scripts/prepare.sh OWNER/NAME"  # where there is no checkpoint
CHUNK = 16 << 20  # bytes written, and summed, at a time

DTYPES = {  # our name of a dtype: torch's, and the safetensors header's
    "bf16": (torch.bfloat16, "BF16"),
    "fp16": (torch.float16, "F16"),
    "fp32": (torch.float32, "F32"),
    "int8": (torch.int8, "I8"),
    "uint8": (torch.uint8, "U8"),
    "int32": (torch.int32, "I32"),
    "fp8_e4m3": (torch.float8_e4m3fn, "F8_E4M3"),
}
NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}
TAGS = {  # every dtype that a file may hold; the last seven are not ours, and convert refuses them by name
    **{tag: dtype for dtype, tag in DTYPES.values()},
    **{"F64": torch.float64, "I64": torch.int64, "I16": torch.int16, "BOOL": torch.bool},
    **{"U16": torch.uint16, "U32": torch.uint32, "F8_E5M2": torch.float8_e5m2},
}


def pick_device(name: str = "auto") -> torch.device:
    """auto, cuda, cuda:N or cpu -> the device. Raises ValueError where there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r}: it must be auto, cuda or cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"no CUDA device {device.index or 0} is visible to PyTorch: use --device cpu, or a CUDA build")
    return device


def read_json(path: Path) -> dict:
    """The JSON object in the file `path`. ValueError if it is missing, unreadable or anything but an object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; fetch or convert the checkpoint again") from None
    except (OSError, ValueError, RecursionError) as error:
        cause = str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read as JSON ({cause}); fetch or convert it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object; fetch or convert it again")
    return value


def is_checkpoint(directory: Path | str) -> bool:
    """Whether `directory` holds a checkpoint in our format, by its config.json alone."""
    try:
        return "moe_fast" in read_json(Path(directory) / "config.json")
    except ValueError:
        return False


class Shard:
    """One safetensors file: 8 bytes of header length, a JSON header, then the tensors' bytes without gaps.

    `.tensors` maps a name to (shape, dtype). Opening reads the header alone, and raises ValueError unless it
    accounts for every byte of the file.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.spans: dict[str, tuple[int, int]] = {}  # name: first byte in the file, and one past its last
        try:
            self.stamp = size, *_ = self._stamp()
            with open(self.path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                raw = file.read(length) if length <= size - 8 else b""
        except FileNotFoundError:
            raise ValueError(f"{self.path} is missing; fetch or convert the checkpoint again") from None
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror}") from None
        try:
            header = json.loads(raw)
            header.pop("__metadata__", None)
            for name, entry in header.items():
                self._add(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"], start=8 + length)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._damaged("its header makes no sense") from None
        end = 8 + length
        for start, stop in sorted(self.spans.values()):
            if start != end:
                raise self._damaged("its tensors overlap or leave a gap")
            end = stop
        if end != size:
            raise self._damaged(f"{size} bytes long where its header says {end}")

    def _stamp(self) -> tuple[int, int, int]:
        found = self.path.stat()
        return found.st_size, found.st_mtime_ns, found.st_ino

    def check_unchanged(self):
        """Raises ValueError where the file is gone, or no longer the one that was opened."""
        try:
            same = self._stamp() == self.stamp
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read any more ({error.strerror}); start again") from None
        if not same:
            raise ValueError(f"{self.path} has changed since it was opened; start again")

    def _damaged(self, cause: str) -> ValueError:
        return ValueError(f"{self.path} is damaged or truncated ({cause}); fetch or convert it again")

    def _add(self, name: str, tag: str, shape: tuple, begin: int, end: int, start: int):
        """Enters one tensor of the header, whose offsets count from byte `start` of the file."""
        dtype = TAGS[tag]
        if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
            raise ValueError
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError
        self.tensors[name] = shape, dtype
        self.spans[name] = start + begin, start + end

    def read(self, name: str, index: tuple[slice, ...] | None = None, device: str | torch.device = "cpu") -> Tensor:
        """The tensor `name`, or its part `index`, on `device`.

        On the CPU a whole tensor is a copy-on-write view of the mapped file: its bytes are read as they are first
        touched, and writing to it changes no file.
        """
        (shape, dtype), (start, stop) = self.tensors[name], self.spans[name]
        tensor = torch.from_file(str(self.path), shared=False, size=stop, dtype=torch.uint8)[start:stop]
        if start % dtype.itemsize:  # allowed by safetensors, though nobody is known to write it
            tensor = tensor.clone()
        tensor = tensor.view(dtype).view(shape)
        return (tensor if index is None else tensor[index].contiguous()).to(device)


class Checkpoint:
    """A checkpoint directory, checked when opened: every file's size, every tensor's place, shape and dtype.

    `.args` (dict) and `.format` are the JSON values given to the Writer, `.tensors` maps each name to (shape, dtype).
    Raises ValueError, one line with the fix, for a directory that is not a whole checkpoint of ours.
    """

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self._check_layout()
        config = read_json(self.directory / "config.json")
        if config["moe_fast"] != FORMAT_VERSION:
            raise ValueError(
                f"{self.directory} has format version {config['moe_fast']!r} where this program reads {FORMAT_VERSION};"
                " convert the original checkpoint again"
            )
        self.args, self.format = config.get("args"), config.get("format")
        if not isinstance(self.args, dict) or self.format is None:
            raise self._damaged("config.json lacks its args or format")
        index = read_json(self.directory / "index.json")
        self.files: dict[str, tuple[int, int]] = {}  # name: (bytes, CRC32)
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._shards: dict[str, Shard] = {}
        try:
            for file, entry in index["files"].items():
                self.files[file] = entry["bytes"], entry["crc32"]
                self._open(file, entry["bytes"])
            for name, entry in index["tensors"].items():
                found = self._shards[entry["file"]].tensors.get(name)
                if found is None or found != (tuple(entry["shape"]), DTYPES[entry["dtype"]][0]):
                    raise self._damaged(f"{entry['file']} does not hold {name} as index.json has it")
                self.tensors[name] = found
            self._home = {name: self._shards[entry["file"]] for name, entry in index["tensors"].items()}
        except (KeyError, TypeError, AttributeError):
            raise self._damaged("index.json makes no sense") from None

    def _check_layout(self):
        """Tells a checkpoint in our format from everything else that people may point at."""
        if not self.directory.is_dir():
            repo = str(self.directory) if re.fullmatch(r"[\w.-]+/[\w.-]+", str(self.directory)) else "OWNER/NAME"
            raise ValueError(f"{self.directory} is not a directory; {MAKE_ONE.replace('OWNER/NAME', repo)}")
        if is_checkpoint(self.directory):
            return
        converted = [self.directory / "model_bf16", *sorted(self.directory.glob("model_*"))]
        for path in filter(is_checkpoint, converted):
            raise ValueError(f"{self.directory} is not converted itself; use {path}")
        if not (self.directory / "config.json").is_file():
            raise ValueError(f"{self.directory}/config.json is missing, so this is no checkpoint; {MAKE_ONE}")
        config = read_json(self.directory / "config.json")
        if "architectures" in config or "model_type" in config:
            command = f"python convert_hf_checkpoint.py --checkpoint_dir {shlex.quote(str(self.directory))}"
            raise ValueError(f"{self.directory} is in Hugging Face layout; convert it first: {command}")
        raise ValueError(f"{self.directory}/config.json is not of a moe-fast checkpoint; {MAKE_ONE}")

    def _damaged(self, cause: str) -> ValueError:
        return ValueError(f"{self.directory} is damaged ({cause}); convert the original checkpoint again")

    def _open(self, file: str, size: int):
        if Path(file).name != file:
            raise self._damaged(f"index.json names {file!r}, outside the directory")
        self._shards[file] = shard = Shard(self.directory / file)
        if shard.path.stat().st_size != size:
            raise self._damaged(f"{file} has not the {size} bytes that index.json has")

    def read(self, name: str, index: tuple[slice, ...] | None = None, device: str | torch.device = "cpu") -> Tensor:
        """The tensor `name` (or `tensor[index]`, only whose bytes are read) on `device`; see `Shard.read`."""
        return self._home[name].read(name, index, device)

    def check_unchanged(self, name: str):
        """Raises ValueError where the file that holds `name` is gone, or no longer the one that was opened."""
        self._home[name].check_unchanged()

    def nbytes(self, name: str) -> int:
        """Bytes that the whole tensor `name` takes, on disk and in memory."""
        shape, dtype = self.tensors[name]
        return math.prod(shape) * dtype.itemsize

    def by_file(self) -> dict[str, list[str]]:
        """Each safetensors file's name, and the tensors in it."""
        files: dict[str, list[str]] = {}
        for name, shard in self._home.items():
            files.setdefault(shard.path.name, []).append(name)
        return files

    def side_files(self) -> list[Path]:
        """What lies in the directory beside our own files: the tokenizer and the like."""
        ours = {"config.json", "index.json", *self.files}
        return sorted(path for path in self.directory.iterdir() if path.is_file() and path.name not in ours)

    def verify(self, progress: bool = True):
        """Reads every file and compares its CRC32 with the index. ValueError naming the first that differs."""
        total = sum(size for size, _ in self.files.values())
        with tqdm(total=total, desc="verify", unit="B", unit_scale=True, file=sys.stderr, disable=not progress) as bar:
            for file, (_, expected) in self.files.items():
                crc = 0
                with open(self.directory / file, "rb") as stream:
                    while chunk := stream.read(CHUNK):
                        crc = zlib.crc32(chunk, crc)
                        bar.update(len(chunk))
                if crc != expected:
                    raise self._damaged(f"{file} differs from its checksum")


class Writer:
    """Writes a checkpoint: all of it, or nothing.

        with Writer(target, args={...}, format={"name": "bf16"}) as writer:
            writer.write("layer_00.safetensors", {"layers.0.ffn_norm.weight": tensor, ...})
            writer.copy(path_of_tokenizer_json)

    Everything goes into a temporary directory beside `target`, which takes the target's name when the block ends and
    is removed when the block fails. An existing target is a ValueError; with `force` it is replaced, at the very end,
    provided that it is a checkpoint of ours. A full disk or a forbidden directory is a ValueError too.
    """

    def __init__(self, target: Path | str, args: dict, format, force: bool = False):
        self.target = Path(target).resolve()
        self.config = {"moe_fast": FORMAT_VERSION, "format": format, "args": args}
        self.index = {"tensors": {}, "files": {}}
        self.force = force

    def _check_target(self):
        if not self.target.exists() or (self.target.is_dir() and not any(self.target.iterdir())):
            return
        if not self.force:
            raise ValueError(f"{self.target} exists; give --force to replace it, or name another place")
        if not is_checkpoint(self.target):
            raise ValueError(f"{self.target} is no moe-fast checkpoint, so it is not replaced; name another place")

    def __enter__(self) -> "Writer":
        self._check_target()
        self.directory = self._sibling()
        try:
            self.directory.mkdir()
        except OSError as error:
            raise ValueError(f"cannot write to {self.target.parent}: {error.strerror}; name another place") from None
        return self

    def reserve(self, size: int):
        """Raises ValueError now where `size` bytes to come are more than the disk has left."""
        free = shutil.disk_usage(self.directory).free
        if free < size:
            raise ValueError(f"{self.target} needs {size / 1e9:.1f} GB, {free / 1e9:.1f} are free; name another place")

    def _sibling(self) -> Path:
        return self.target.parent / f".{self.target.name}.{secrets.token_hex(4)}.tmp"

    def __exit__(self, kind, error, traceback):
        try:
            if error is not None:
                raise error
            self.write_json("index.json", self.index)
            self.write_json("config.json", self.config)
            self._put_in_place()
        except OSError as failure:
            raise ValueError(f"cannot write {self.target} ({failure}); free some space or name another place") from None
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _put_in_place(self):
        """Renames the finished directory to the target, with the old one stepping aside for that moment."""
        self._check_target()  # again: hours may have passed
        sync(self.directory)
        aside = self._sibling()
        try:
            if self.target.exists():
                self.target.rename(aside)
            self.directory.rename(self.target)
            sync(self.target.parent)
        finally:
            if self.target.exists():
                shutil.rmtree(aside, ignore_errors=True)
            elif aside.exists():
                aside.rename(self.target)

    def write(self, file: str, tensors: dict[str, Tensor]):
        """Writes one safetensors file. The tensors may lie on any device; no second copy of one on the CPU is made."""
        # Wide elements first, so that each tensor starts on a multiple of its element size.
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
        header, offset = {}, 0
        for name, tensor in tensors.items():
            assert name not in self.index["tensors"], f"{name} written twice"
            dtype, shape, end = NAMES[tensor.dtype], list(tensor.shape), offset + tensor.nbytes
            header[name] = {"dtype": DTYPES[dtype][1], "shape": shape, "data_offsets": [offset, end]}
            self.index["tensors"][name] = {"file": file, "shape": shape, "dtype": dtype}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 64)  # the data starts aligned for any vector load
        path, crc = self.directory / file, 0
        with open(path, "xb", buffering=0) as stream:
            for data in itertools.chain([len(text).to_bytes(8, "little"), text], map(as_bytes, tensors.values())):
                for start in range(0, len(data), CHUNK):
                    chunk = memoryview(data)[start : start + CHUNK]
                    crc = zlib.crc32(chunk, crc)
                    while len(chunk):  # an unbuffered write may take less than it is given
                        chunk = chunk[stream.write(chunk) :]
            os.fsync(stream.fileno())
        self.index["files"][file] = {"bytes": path.stat().st_size, "crc32": crc}

    def write_json(self, file: str, value):
        """Writes a JSON side file, in place of a copied one if there is one."""
        with open(self.directory / file, "w") as stream:
            json.dump(value, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())

    def copy(self, path: Path | str):
        """Copies a side file, under its own name."""
        target = shutil.copyfile(path, self.directory / Path(path).name)
        sync(target)


def as_bytes(tensor: Tensor):
    """The tensor's bytes as a flat NumPy array, without a copy if it lies contiguous in host memory."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def sync(path: Path):
    """Waits until the file or directory `path` has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def build_parser() -> Parser:
    parser = Parser(
        "Show a converted checkpoint, and check it.",
        (
            "python checkpoint.py checkpoints/OWNER/NAME/model_bf16",
            "python checkpoint.py checkpoints/OWNER/NAME/model_int4 --verify",
        ),
    )
    parser.add_argument("directory", type=Path, help="a directory written by convert_hf_checkpoint.py or quantize.py")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    return parser


def main() -> int:
    """The command: see the top of this file."""
    options = build_parser().parse_args()
    try:
        checkpoint = Checkpoint(options.directory)
        if options.verify:
            checkpoint.verify()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    total = sum(map(checkpoint.nbytes, checkpoint.tensors))
    lines = [
        f"{checkpoint.directory}: {len(checkpoint.tensors)} tensors, {total / 1e9:.3f} GB",
        f"format: {json.dumps(checkpoint.format)}",
        *(f"  {key}: {value}" for key, value in checkpoint.args.items()),
    ]
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
