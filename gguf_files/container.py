"""The GGUF container: a header of typed values, then tensors that are mapped and never copied.

Layout (ggml's docs/gguf.md, versions 2 and 3, little-endian):

    "GGUF", version uint32, number of tensors uint64, number of values uint64
    values:  key string, type uint32, value; a string is its length uint64 and UTF-8 bytes
    tensors: name string, number of axes uint32, sizes uint64 (the fastest first), type uint32,
             offset uint64 into the data, which begins at the next multiple of `general.alignment`

A file comes from a download, so nothing in it is believed before it is compared with the file's
size: no count, length or offset of a damaged file makes this module allocate memory.
"""

import math
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from checkpoint import check_name, check_unchanged, stamp
from host.files import check_regular, lfs_pointer

MAGIC = b"GGUF"
VERSIONS = 2, 3
MAX_HEADER = 1 << 28  # bytes; tokenizers of 262,144 tokens take about 16 MB
MAX_AXES = 4
MAX_DEPTH = 8  # of arrays within arrays
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
FETCH = "fetch it again"

# ggml's types by number: name, weights in a block, bytes of a block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Types of values: struct's codes of numbers, by the type's number.
NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
FLOAT, STRING, ARRAY = 6, 8, 9


class TensorInfo(NamedTuple):
    """One tensor of a file. shape: slowest axis first, as PyTorch has it."""

    type: str
    shape: tuple[int, ...]
    offset: int  # bytes from the file's begin
    nbytes: int
    file: int = 0  # which part of a split file


class Damaged(Exception):
    """What is wrong with a file, without its name; and the fix."""

    def __init__(self, what: str, fix: str = FETCH):
        super().__init__(what)
        self.fix = fix


class Cursor:
    """Reads values from a mapped header. Raises Damaged where they exceed it."""

    def __init__(self, data: np.ndarray):
        self.data, self.at, self.end = data, 0, min(len(data), MAX_HEADER)

    def take(self, count: int) -> memoryview:
        """Return the next `count` bytes."""
        if count > self.end - self.at:
            raise Damaged("its header is truncated, or has an absurd length")
        self.at += count
        return self.data[self.at - count : self.at].data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        try:
            return str(self.take(self.number("Q")), "utf-8")
        except UnicodeDecodeError:
            raise Damaged("a text of its header is no UTF-8") from None

    def value(self, kind: int) -> Any:
        """Return a value: a number, a text, a list of texts or arrays, or an array of numbers."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        if kind not in NUMBERS:
            raise Damaged(f"its header has a value of the unknown type {kind}")
        value = self.number(NUMBERS[kind])
        # The shortest number with the same fp32 bits: 1e-06, and not 9.999999974752427e-07.
        return float(str(np.float32(value))) if kind == FLOAT else value

    def array(self, depth: int = 0) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if kind == ARRAY:
            if depth == MAX_DEPTH or count * 12 > self.end - self.at:  # type and length of each
                raise Damaged(f"its header has an array of {count} arrays, beyond the file")
            return [self.array(depth + 1) for _ in range(count)]
        if kind == STRING:
            if count * 8 > self.end - self.at:  # each has a length
                raise Damaged(f"its header has an array of {count} texts, beyond the file")
            return [self.text() for _ in range(count)]
        if kind not in NUMBERS:
            raise Damaged(f"its header has an array of the unknown type {kind}")
        dtype = np.dtype(NUMBERS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


class GGUFPart:
    """One file: `values` of the header, `tensors` {name: TensorInfo}. Raises ValueError."""

    def __init__(self, path: Path, number: int = 0):
        self.path = Path(path)
        check_name(self.path)
        try:
            check_regular(self.path)
            status = self.path.stat()
            self.stamp, self.size = stamp(status), status.st_size
            # Copy on write: PyTorch warns of memory that it could not write to.
            self.data = np.memmap(self.path, np.uint8, "c") if self.size else np.zeros(0, np.uint8)
            self.read_header(Cursor(self.data), number)
        except FileNotFoundError:
            raise ValueError(f"{self.path} is missing; {FETCH}, or name another file") from None
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror}") from None
        except Damaged as damage:
            what = f"{self.path}: {damage}; {damage.fix}"
            raise ValueError(lfs_pointer(self.path) or what) from None

    def read_header(self, cursor: Cursor, number: int) -> None:
        if bytes(self.data[:4]) != MAGIC:
            raise Damaged("it does not begin with GGUF, so it is no GGUF file")
        cursor.at = 4
        version = cursor.number("I")
        if version not in VERSIONS:
            order = " (its numbers are big-endian)" if version & 0xFFFF == 0 else ""
            fix = "take a newer file" if version == 1 else "take another file, or fetch it again"
            raise Damaged(f"GGUF version {version}{order} is not supported, only 2 and 3 are", fix)
        tensors, values = cursor.number("Q"), cursor.number("Q")
        if 24 * tensors + 13 * values > cursor.end:  # the least that each takes
            raise Damaged(f"its header tells of {tensors} tensors and {values} values, beyond it")
        self.values: dict[str, Any] = {}
        for _ in range(values):
            key = cursor.text()
            if key in self.values:
                raise Damaged(f"its header has {key!r:.100} twice")
            self.values[key] = cursor.value(cursor.number("I"))
        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(tensors):
            name = cursor.text()
            if name in self.tensors:
                raise Damaged(f"its header has the tensor {name!r:.100} twice")
            self.tensors[name] = self.read_tensor(cursor, name, number)
        self.place_tensors(cursor.at)

    def read_tensor(self, cursor: Cursor, name: str, number: int) -> TensorInfo:
        """Return a tensor whose offset is still relative to the data."""
        axes = cursor.number("I")
        if not 0 < axes <= MAX_AXES:
            raise Damaged(f"the tensor {name!r:.100} has {axes} axes")
        shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]
        kind, offset = cursor.number("I"), cursor.number("Q")
        if kind not in TYPES:
            what = f"the tensor {name!r:.100} has the type {kind}, which is not known here"
            raise Damaged(what, "take a file in a type of llama.cpp's own, such as Q4_K_M")
        type, block, nbytes = TYPES[kind]
        if 0 in shape or math.prod(shape) >= 1 << 63 or shape[-1] % block:
            raise Damaged(f"the tensor {name!r:.100} cannot be {list(shape)} in {type}")
        return TensorInfo(type, shape, offset, math.prod(shape) // block * nbytes, number)

    def place_tensors(self, header: int) -> None:
        """Make the offsets those in the file; check that tensors are in it and do not overlap."""
        alignment = self.values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise Damaged(f"its alignment cannot be {alignment!r:.40}")
        begin, reached, before = -(-header // alignment) * alignment, 0, ""
        for name, info in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            if info.offset % alignment:
                raise Damaged(f"the tensor {name!r:.100} is not aligned to {alignment} bytes")
            if info.offset < reached:
                raise Damaged(f"the tensors {before!r:.100} and {name!r:.100} overlap")
            reached, before = info.offset + info.nbytes, name
            if begin + reached > self.size:
                raise Damaged(f"it is truncated: {name!r:.100} ends beyond its {self.size} bytes")
            self.tensors[name] = info._replace(offset=begin + info.offset)


class GGUFFile:
    """A GGUF file, with all of its parts if it is split.

    `values` are those of the first part, `tensors` those of all. Opening maps the files and reads
    headers alone. Raises ValueError, one line with the fix, for a part that is missing or damaged.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        paths = part_paths(self.path)
        self.parts = [GGUFPart(part, number) for number, part in enumerate(paths)]
        self.path, self.values = paths[0], self.parts[0].values
        self.tensors: dict[str, TensorInfo] = {}
        for number, part in enumerate(self.parts):
            given = part.values.get("split.no")
            if len(paths) > 1 and type(given) is int and given != number:
                fix = "its name is wrong; rename it, or fetch it again"
                raise ValueError(f"{part.path} is part {given + 1} by its header: {fix}")
            for name, info in part.tensors.items():
                if name in self.tensors:
                    twice = f"{paths[self.tensors[name].file].name} and {part.path.name}"
                    raise ValueError(f"{name!r:.100} is in both {twice}; fetch them again")
                self.tensors[name] = info
        count = self.values.get("split.count", 1)
        if isinstance(count, int) and count > len(paths):
            fix = "name the part whose name ends with -00001-of-..., beside the others"
            raise ValueError(f"{self.path} is one of {count} parts; {fix}")

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)

    def blocks(self, name: str) -> Tensor:
        """Return a tensor as it is stored, mapped: uint8 [..., bytes of a row]."""
        info = self.tensors[name]
        data = self.parts[info.file].data[info.offset : info.offset + info.nbytes]
        return torch.from_numpy(data).unflatten(0, (*info.shape[:-1], -1))

    def read(self, name: str) -> Tensor:
        """Return a tensor of a plain type (PLAIN_TYPES), mapped."""
        dtype = PLAIN_TYPES[self.tensors[name].type]
        return self.blocks(name).view(dtype)

    def check_unchanged(self) -> None:
        """Raise ValueError if a file is gone, or no longer the one that was opened."""
        for part in self.parts:
            check_unchanged(part.path, part.stamp)


def part_paths(path: Path) -> list[Path]:
    """Return the paths of a file's parts, from any of them. Raises ValueError for missing ones."""
    match = SPLIT.fullmatch(path.name)
    if not match:
        return [path]
    stem, _, count = match.groups()
    paths = [path.with_name(f"{stem}-{n:05d}-of-{count}.gguf") for n in range(1, int(count) + 1)]
    missing = [part for part in paths if not part.is_file()]
    if missing or not paths:
        what = f"{len(missing)} of its {len(paths)} parts are missing"
        first = f"; fetch {missing[0].name} too" if missing else ""
        raise ValueError(f"{path}: {what}{first}")
    return paths


def is_gguf(path: Path | str) -> bool:
    """Return whether a path is a file that begins as a GGUF file does, whatever its name is."""
    path = Path(path)
    try:
        check_regular(path)
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False
