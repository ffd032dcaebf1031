"""Weights as other programs quantized them -> the parts of our formats, number by number.

A matrix `NAME.weight` [out, in] may be published as several tensors:

    ModelOpt, NVFP4          weight uint8, weight_scale e4m3, weight_scale_2 (multiplies)
    compressed-tensors       weight_packed, weight_scale; NVFP4: weight_global_scale (divides);
                             4 bits: weight_zero_point, packed along out
    FP8, int8                weight, weight_scale: one number, or one a row
    GPTQ, AutoRound, AWQ     qweight [in / 8, out] or [in, out / 8], qzeros, scales [in / g, out]

Words may have 4 integers of 8 bits in place of 8. A group that our kernels have none of becomes
several with the same scale: a channel, groups of 128.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from checkpoint import NAMES, is_finite
from formats import FORMATS
from formats.mxfp4 import are_finite_scales
from formats.words import bytes_to_words, nibbles, nibbles_to_words, pack_nibbles
from models.quantization import NEAREST, Published

PLAIN_DTYPES = torch.bfloat16, torch.float16, torch.float32
GROUPS = 128, 64, 32, 16, 8  # of 4-bit integers
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # where a word has the number of each of 8 columns
# Suffixes of what weights alone do not need: scales of activations and of the KV cache.
NOT_NEEDED = (
    *(".input_scale", ".input_global_scale", ".output_scale", ".activation_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".weight_shape"),
)


class Part(NamedTuple):
    """One tensor of ours, made of published ones."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[str, ...]
    read: Callable[[], Tensor]
    is_valid: Callable[[Tensor], bool] = is_finite


class PublishedWeight(NamedTuple):
    """A matrix in one of our formats."""

    spec: dict  # "format", "group_size", and "scale" if its dtype is not the format's
    parts: dict[str, Part]

    def unpack(self) -> Tensor:
        """Dequantize: return the matrix, fp32 [out, in]. Raises ValueError for a bad scale."""
        parts = {leaf: part.read() for leaf, part in self.parts.items()}
        if not all(self.parts[leaf].is_valid(part) for leaf, part in parts.items()):
            return torch.full((1,), math.nan)
        return FORMATS[self.spec["format"]].unpack(parts, self.spec["group_size"])


class Tensors(Protocol):
    """What is read of a `models.published_tensors.PublishedTensors`."""

    def found(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None: ...

    def raw(self, name: str) -> Tensor: ...

    def refusal(self, name: str, what: str) -> ValueError: ...


class Matrix:
    """The published tensors of one matrix [rows, width]."""

    def __init__(self, tensors: Tensors, name: str, rows: int, width: int):
        self.tensors, self.path = tensors, name.removesuffix(".weight")
        self.rows, self.width = rows, width

    def name(self, leaf: str) -> str:
        return f"{self.path}.{leaf}"

    def dtype(self, leaf: str) -> torch.dtype | None:
        """Return a tensor's dtype; None: there is no such tensor."""
        found = self.tensors.found(self.name(leaf))
        return found and found[1]

    def shape(self, leaf: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ValueError if it is missing."""
        found = self.tensors.found(self.name(leaf))
        if found is None:
            raise self.tensors.refusal(self.name(leaf), "is missing; fetch its file again")
        return found[0]

    def read(self, leaf: str) -> Tensor:
        return self.tensors.raw(self.name(leaf))

    def read_bytes(self, leaf: str) -> Tensor:
        return self.read(leaf).view(torch.uint8)

    def check(self, leaf: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> None:
        """Raise ValueError unless the tensor has one of these dtypes and shapes."""
        shape, dtype = self.shape(leaf), self.dtype(leaf)
        if dtype not in dtypes:
            name = str(dtype).removeprefix("torch.")
            raise self.refusal(leaf, f"has dtype {name}, which is not kept as published")
        if shape not in shapes:
            due = f"{list(shapes[0])} is due, of a weight {[self.rows, self.width]}"
            raise self.refusal(leaf, f"has shape {list(shape)} where {due}")

    def refusal(self, leaf: str, what: str, fix: str = NEAREST) -> ValueError:
        return self.tensors.refusal(self.name(leaf), f"{what}; {fix}")

    def part(self, leaf: str, shape, dtype, read, is_valid=is_finite, also=()) -> Part:
        """Return a part that is made of a tensor, and of others that have to be read for it."""
        names = (self.name(leaf), *map(self.name, also))
        return Part((self.rows, *shape), dtype, names, read, is_valid)


def find_weight(
    tensors: Tensors, name: str, rows: int, width: int, published: Published
) -> PublishedWeight | None:
    """Return how `name` [rows, width] is published, None for 16 or 32 bits or block FP8.

    Raises ValueError, one line, for what is missing, misshapen, or in none of our formats.
    """
    matrix = Matrix(tensors, name, rows, width)
    if matrix.dtype("qweight") is not None:
        if not published.layout:
            what = "is of GPTQ or AWQ, which store zeros in ways of which config.json says nothing"
            raise matrix.refusal("qweight", what, "fetch config.json again")
        read = read_awq if published.layout == "awq" else read_gptq
        return read(matrix, published)
    packed, plain = matrix.dtype("weight_packed"), matrix.dtype("weight")
    if packed is torch.int32:
        return read_packed_integers(matrix)
    if packed is not None:
        is_nvfp4 = matrix.dtype("weight_global_scale") is not None
        return read_nvfp4(matrix, "weight_packed") if is_nvfp4 else read_mxfp4(matrix)
    if plain is torch.uint8:
        return read_nvfp4(matrix, "weight")
    if plain in (torch.float8_e4m3fn, torch.int8):
        return read_bytes(matrix, published)
    return None


# Bytes --------------------------------------------------------------------------------------------


def read_bytes(matrix: Matrix, published: Published) -> PublishedWeight | None:
    """FP8 or int8, with a scale of the tensor or of each row; None for a scale of blocks."""
    leaf = "weight_scale_inv" if matrix.dtype("weight_scale_inv") is not None else "weight_scale"
    rows, width, dtype = matrix.rows, matrix.width, matrix.dtype("weight")
    in_blocks = published.name == "fp8b" and matrix.dtype("weight_scale") is None
    if dtype is None or in_blocks:
        return None
    of_rows = (rows,), (rows, 1), (), (1,), (1, 1)
    if matrix.shape(leaf) not in of_rows:
        return None
    matrix.check("weight", (dtype,), (rows, width))
    matrix.check(leaf, PLAIN_DTYPES, *of_rows)
    if width % 4:
        raise matrix.refusal("weight", f"has rows of {width}, which are no whole words")
    format = FORMATS["int8" if dtype is torch.int8 else "fp8"]
    group = format.default_group(width)

    def scale() -> Tensor:
        return matrix.read(leaf).float().reshape(-1, 1).expand(rows, 1)

    def codes() -> Tensor:
        return bytes_to_words(matrix.read("weight"), group)

    def is_valid(words: Tensor) -> bool:
        return dtype is torch.int8 or is_finite(words.view(torch.float8_e4m3fn))

    spec = {"format": format.name, "group_size": group, "scale": "fp32"}
    parts = {
        "codes": matrix.part("weight", (width // 4,), torch.int32, codes, is_valid),
        "scale": matrix.part(leaf, (1,), torch.float32, scale),
    }
    return PublishedWeight(spec, parts)


# e2m1 ---------------------------------------------------------------------------------------------


def read_e2m1(matrix: Matrix, leaf: str, group: int) -> Part:
    """The codes of two numbers a byte, the first in the low bits."""
    if matrix.width % group:
        what = f"has rows of {matrix.width}, which are no multiple of {group}"
        raise matrix.refusal(leaf, what)
    matrix.check(leaf, (torch.uint8,), (matrix.rows, matrix.width // 2))

    def codes() -> Tensor:
        return nibbles_to_words(matrix.read(leaf), group)

    return matrix.part(leaf, (matrix.width // 8,), torch.int32, codes, lambda words: True)


def read_nvfp4(matrix: Matrix, leaf: str) -> PublishedWeight:
    format, rows = FORMATS["nvfp4"], matrix.rows
    step = "weight_global_scale" if leaf == "weight_packed" else "weight_scale_2"
    codes = read_e2m1(matrix, leaf, format.group)
    blocks = matrix.width // 16
    matrix.check("weight_scale", (torch.float8_e4m3fn,), (rows, blocks))
    matrix.check(step, (torch.float32,), (), (1,), (1, 1))

    def is_valid(bits: Tensor) -> bool:  # neither NaN nor negative
        return bool(((bits < 0x7F) | (bits == 0x80)).all())

    def scale_step() -> Tensor:
        number = matrix.read(step).reshape(1, 1)
        return (1 / number if step == "weight_global_scale" else number).expand(rows, 1)

    scale = partial(matrix.read_bytes, "weight_scale")
    parts = {
        "codes": codes,
        "scale": matrix.part("weight_scale", (blocks,), torch.uint8, scale, is_valid),
        "scale_step": matrix.part(step, (1,), torch.float32, scale_step),
    }
    return PublishedWeight({"format": "nvfp4", "group_size": format.group}, parts)


def read_mxfp4(matrix: Matrix) -> PublishedWeight:
    """MXFP4 of compressed-tensors."""
    group = FORMATS["mxfp4"].group
    codes, groups = read_e2m1(matrix, "weight_packed", group), matrix.width // group
    matrix.check("weight_scale", (torch.uint8, torch.float8_e8m0fnu), (matrix.rows, groups))

    scale = partial(matrix.read_bytes, "weight_scale")
    scales = matrix.part("weight_scale", (groups,), torch.uint8, scale, are_finite_scales)
    spec = {"format": "mxfp4", "group_size": group}
    return PublishedWeight(spec, {"codes": codes, "scale": scales})


# 4-bit integers -----------------------------------------------------------------------------------


class Groups(NamedTuple):
    """Groups along `in`: the published ones, and ours, `times` as many."""

    count: int
    size: int  # ours
    times: int

    def spread(self, values: Tensor) -> Tensor:
        """[rows, published groups] -> [rows, our groups]."""
        return values.repeat_interleave(self.times, 1) if self.times > 1 else values


def groups_of(matrix: Matrix, leaf: str, count: int) -> Groups:
    """Return the groups of a matrix with this many scales a row. Raises ValueError for a misfit."""
    each = matrix.width // count if count else 0
    size = next((n for n in GROUPS if each and each % n == 0), 0)
    if not size or each * count != matrix.width:
        what = f"has {count} groups for rows of {matrix.width}, which are not of whole words"
        raise matrix.refusal(leaf, what)
    return Groups(count, size, each // size)


def integers(
    matrix: Matrix, groups: Groups, codes: Part, scales: Part, zeros: Part | None
) -> PublishedWeight:
    """4-bit integers with scales, and zeros or 8 in place of all."""
    spec = {"format": "uint4" if zeros else "int4", "group_size": groups.size}
    if scales.dtype is not torch.bfloat16:
        spec["scale"] = NAMES[scales.dtype]
    parts = {"codes": codes, "scale": scales}
    return PublishedWeight(spec, parts | ({"zero": zeros} if zeros else {}))


def read_packed_integers(matrix: Matrix) -> PublishedWeight:
    """compressed-tensors: codes are stored plus 8, in sequence; zeros are, too, along out."""
    rows, width, scale = matrix.rows, matrix.width, matrix.dtype("weight_scale")
    shape = matrix.shape("weight_packed")
    count = matrix.shape("weight_scale")[-1] if matrix.shape("weight_scale") else 0
    matrix.check("weight_scale", PLAIN_DTYPES, (rows, count))
    if shape == (rows, width // 4) and width % 4 == 0:
        if matrix.dtype("weight_zero_point") is not None:
            raise eight_bits(matrix, "weight_zero_point", "makes integers of 8 bits asymmetric")
        return signed_bytes(
            matrix,
            ("weight_packed", lambda: matrix.read_bytes("weight_packed")),
            ("weight_scale", lambda: matrix.read("weight_scale")),
            count,
            order="weight_g_idx",
        )
    matrix.check("weight_packed", (torch.int32,), (rows, width // 8))
    groups, zeros = groups_of(matrix, "weight_scale", count), None

    def codes() -> Tensor:
        check_order(matrix, "weight_g_idx", groups.count)
        return nibbles_to_words(matrix.read_bytes("weight_packed"), groups.size)

    def scales() -> Tensor:
        return groups.spread(matrix.read("weight_scale"))

    def zero() -> Tensor:
        stored = matrix.read("weight_zero_point")
        if stored.dtype is torch.int8:
            return groups.spread((stored + 8).to(torch.uint8))
        columns = nibbles(stored.T.contiguous().view(torch.uint8))
        return groups.spread(columns[:, :rows].T)

    ours = groups.count * groups.times
    also = order_tensors(matrix, "weight_g_idx")
    if (dtype := matrix.dtype("weight_zero_point")) is not None:
        short = rows if dtype is torch.int8 else -(-rows // 8)
        matrix.check("weight_zero_point", (torch.int32, torch.int8), (short, count))
        zeros = matrix.part("weight_zero_point", (ours,), torch.uint8, zero, lambda zeros: True)
    words = matrix.part(
        "weight_packed", (width // 8,), torch.int32, codes, lambda words: True, also
    )
    found = matrix.part("weight_scale", (ours,), scale, scales)
    return integers(matrix, groups, words, found, zeros)


def eight_bits(matrix: Matrix, leaf: str, what: str) -> ValueError:
    """Return the error for integers of 8 bits that are in none of our formats."""
    fix = "add :int8 to the name of the bf16 model, or take a file with 4 or 16 bits there"
    return matrix.refusal(leaf, what, fix)


def signed_bytes(
    matrix: Matrix,
    packed: tuple[str, Callable[[], Tensor]],
    scale: tuple[str, Callable[[], Tensor]],
    count: int,
    order: str,
    also: tuple[str, ...] = (),
) -> PublishedWeight:
    """Integers of 8 bits, stored plus 128: `int8` if a row has one scale, else `q8_0`.

    packed, scale: names and values, uint8 [rows, width] and [rows, count]. order: the tensor with
    the group of each number. also: tensors that `packed` has to be read with.
    """
    rows, width, dtype = matrix.rows, matrix.width, matrix.dtype(scale[0])
    format = FORMATS["int8" if count == 1 else "q8_0"]
    group = format.default_group(width)
    times = 1 if format.per_row else width // group // max(count, 1)
    if not format.per_row and count * times * group != width:
        what = f"has {count} groups of 8 bits for rows of {width}, no multiples of {group}"
        raise eight_bits(matrix, scale[0], what)
    (_, ours), own = format.layout(torch.Size((rows, width)), group)["scale"]

    def codes() -> Tensor:
        check_order(matrix, order, count)
        return bytes_to_words(packed[1]() ^ 0x80, group)

    def scales() -> Tensor:
        return scale[1]().repeat_interleave(times, 1)

    also += order_tensors(matrix, order)
    spec = {"format": format.name, "group_size": group}
    words = matrix.part(packed[0], (width // 4,), torch.int32, codes, lambda words: True, also)
    parts = {"codes": words, "scale": matrix.part(scale[0], (ours,), dtype, scales)}
    return PublishedWeight(spec | ({} if dtype is own else {"scale": NAMES[dtype]}), parts)


def order_tensors(matrix: Matrix, leaf: str) -> tuple[str, ...]:
    """Return the tensor with the group of each number along `in`, if there is one that matters."""
    if matrix.dtype(leaf) is None:
        return ()
    matrix.check(leaf, (torch.int32, torch.int64), (matrix.width,))
    return (leaf,)


def check_order(matrix: Matrix, leaf: str, count: int) -> None:
    """Raise ValueError unless each group is a run of numbers along `in`: "act order" has none."""
    if matrix.dtype(leaf) is None:
        return
    each = matrix.width // count
    if not torch.equal(matrix.read(leaf).long(), torch.arange(matrix.width) // each):
        raise matrix.refusal(
            leaf,
            "orders the groups by activation (desc_act), which is not supported",
            "fetch a file without desc_act, AWQ for example, or the original bf16 checkpoint",
        )


def read_gptq(matrix: Matrix, published: Published) -> PublishedWeight:
    """qweight [in / 8, out] and qzeros [groups, out / 8], both in sequence."""
    rows, width = matrix.rows, matrix.width
    if matrix.shape("qweight") == (width // 4, rows) and width % 4 == 0:
        return read_gptq_bytes(matrix, published)
    matrix.check("qweight", (torch.int32,), (width // 8, rows))
    groups, scales = read_scales(matrix)

    def stored() -> Tensor:
        return nibbles(matrix.read_bytes("qzeros"))

    def codes() -> Tensor:
        check_order(matrix, "g_idx", groups.count)
        if published.symmetric:
            check_zeros(matrix, stored, published.added)
        words = matrix.read("qweight").T.contiguous()
        return nibbles_to_words(words.view(torch.uint8), groups.size)

    def zero() -> Tensor:
        return groups.spread((stored() + published.added).T)

    also = order_tensors(matrix, "g_idx")
    return read_transposed(matrix, published, (groups, scales), (codes, zero), also)


def read_gptq_bytes(matrix: Matrix, published: Published) -> PublishedWeight:
    """qweight [in / 4, out], qzeros [groups, out / 4]: integers of 8 bits, symmetric."""
    rows, count = matrix.rows, (matrix.shape("scales") or (0,))[0]
    matrix.check("qweight", (torch.int32,), (matrix.width // 4, rows))
    matrix.check("scales", PLAIN_DTYPES, (count, rows))
    has_zeros = matrix.dtype("qzeros") is not None
    if has_zeros and not published.symmetric:
        raise eight_bits(matrix, "qzeros", "makes integers of 8 bits asymmetric")
    if has_zeros:
        matrix.check("qzeros", (torch.int32,), (count, rows // 4))

    def codes() -> Tensor:
        if has_zeros:
            stored = matrix.read_bytes("qzeros").int()
            check_zeros(matrix, lambda: stored, published.added, 128)
        return matrix.read("qweight").T.contiguous().view(torch.uint8)

    return signed_bytes(
        matrix,
        ("qweight", codes),
        ("scales", lambda: matrix.read("scales").T),
        count,
        order="g_idx",
        also=("qzeros",) if has_zeros else (),
    )


def read_awq(matrix: Matrix, published: Published) -> PublishedWeight:
    """qweight [in, out / 8] and qzeros [groups, out / 8], both in AWQ_ORDER."""
    matrix.check("qweight", (torch.int32,), (matrix.width, matrix.rows // 8))
    groups, scales = read_scales(matrix)

    def columns(leaf: str) -> Tensor:
        words = nibbles(matrix.read_bytes(leaf)).unflatten(-1, (-1, 8))
        return words[..., AWQ_ORDER].flatten(-2)

    def codes() -> Tensor:
        if published.symmetric:
            check_zeros(matrix, partial(columns, "qzeros"), 0)
        return pack_nibbles(columns("qweight").T.contiguous(), groups.size)

    def zero() -> Tensor:
        return groups.spread(columns("qzeros").T)

    return read_transposed(matrix, published, (groups, scales), (codes, zero), ())


def read_scales(matrix: Matrix) -> tuple[Groups, Part]:
    """The scales [groups, out] of GPTQ and AWQ."""
    count, dtype = (matrix.shape("scales") or (0,))[0], matrix.dtype("scales")
    matrix.check("scales", PLAIN_DTYPES, (count, matrix.rows))
    groups = groups_of(matrix, "scales", count)

    def scales() -> Tensor:
        return groups.spread(matrix.read("scales").T)

    return groups, matrix.part("scales", (groups.count * groups.times,), dtype, scales)


def read_transposed(
    matrix: Matrix,
    published: Published,
    scaled: tuple[Groups, Part],
    reads: tuple[Callable[[], Tensor], Callable[[], Tensor]],
    also: tuple[str, ...],
) -> PublishedWeight:
    """What GPTQ and AWQ share. scaled: of `read_scales`; reads: of codes and zeros."""
    groups, scales = scaled
    if not (published.symmetric and matrix.dtype("qzeros") is None):
        matrix.check("qzeros", (torch.int32,), (groups.count, matrix.rows // 8))
        also += ("qzeros",) if published.symmetric else ()
    codes = matrix.part(
        "qweight", (matrix.width // 8,), torch.int32, reads[0], lambda words: True, also
    )
    if published.symmetric:
        return integers(matrix, groups, codes, scales, None)
    ours = (groups.count * groups.times,)
    zeros = matrix.part("qzeros", ours, torch.uint8, reads[1], lambda zeros: True)
    return integers(matrix, groups, codes, scales, zeros)


def check_zeros(matrix: Matrix, stored: Callable[[], Tensor], added: int, zero: int = 8) -> None:
    """Raise ValueError unless all zeros are half of the range, as a symmetric file has them."""
    if matrix.dtype("qzeros") is not None and not bool((stored() + added == zero).all()):
        what = f"has zeros other than {zero}, although config.json says that it is symmetric"
        raise matrix.refusal("qzeros", what)
