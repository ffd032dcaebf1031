"""Weights as the kernels read them: packed codes of a number format, with scales and zeros.

A quad is 16 bytes of a row's codes, four words: 8 bf16 numbers, 16 codes of 8 bits, 32 of 4 bits or
64 of 2 bits.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ops.gpu import Gpu, gpu_of

# GGUF's kinds: scales are of 32 numbers, or of 16 (q6_k); `step` is of 256.
GGUF = "q8_0", "q4_k", "q5_k", "q6_k", "iq4"
FOUR_BITS = "int4", "mxfp4", "nvfp4", "hqq", *GGUF[1:]
TWO_BITS = "hqq2", "hqq3"  # hqq3's third bits are in `high`
HALF_QUADRATIC = "hqq", *TWO_BITS
# Bits of a code in `codes`, by kind
BITS = {
    **{"bf16": 16, "int8": 8, "fp8": 8, "fp8b": 8, "q8_0": 8},
    **dict.fromkeys(FOUR_BITS, 4),
    **dict.fromkeys(TWO_BITS, 2),
}
INTEGERS = "int8", "q8_0", *FOUR_BITS, *TWO_BITS  # kinds of codes that are multiplied as integers
# The kind whose integers of x are in the same order (`operands.quantize`), if it is another one
ORDERS = {
    **dict.fromkeys(("hqq", "q4_k", "q5_k"), "int4"),
    **dict.fromkeys(("q6_k", "iq4"), "mxfp4"),
    "q8_0": "int8",
    "hqq3": "hqq2",
}
# Numbers of a quad of a `QuantizedX`, beside its operands: the value of 1, and a sum of x, or two.
UNITS = {"nvfp4": 3}
# The smallest groups of packed kinds: whole quads have one scale; int8 and fp8 have one a row.
SMALLEST_GROUPS = {
    **{"int8": 4, "fp8": 4, "fp8b": 16},
    **dict.fromkeys(("q8_0", *FOUR_BITS), 32),
    **dict.fromkeys(TWO_BITS, 64),
}
WORD_GROUP = 16  # hqq2: each word has a scale, too
# The parts of kinds that have not the first fields of `WeightTensors`
LAYOUTS = {
    **dict.fromkeys(("q4_k", "iq4"), ("codes", "scale", "step")),
    **dict.fromkeys(("q5_k", "q6_k"), ("codes", "high", "scale", "step")),
    "hqq3": (
        *("codes", "high", "scale", "scale_step", "scale_low", "zero", "zero_step", "zero_low"),
    ),
}
WITHOUT_STEPS = "codes", "scale", "zero"  # uint4: of the kind hqq


class WeightTensors(NamedTuple):
    """A weight's tensors: a kind has the first one, two, three or seven, or those of LAYOUTS."""

    codes: Tensor  # int32 [..., out, words]
    scale: Tensor | None = None  # int8, fp8 [..., out]; fp8b: of blocks; others: of groups
    scale_step: Tensor | None = None  # nvfp4, hqq [..., out]: a scale is scale * step + low
    scale_low: Tensor | None = None
    zero: Tensor | None = None  # hqq: of groups, zero * step + low; uint4: the zero itself
    zero_step: Tensor | None = None
    zero_low: Tensor | None = None
    high: Tensor | None = None  # q5_k, q6_k, hqq3: the bits above those of `codes`
    step: Tensor | None = None  # of 256 numbers: their scales are multiplied by it


class Codes:
    """What follows from a weight's kind and group, for the weight and for settings of kernels."""

    kind: str
    group: int  # numbers that share a scale

    @property
    def fields(self) -> int:
        """Codes in a word."""
        return 32 // BITS[self.kind]

    @property
    def field_numbers(self) -> tuple[int, ...]:
        """0, 1, ... for each code of a word."""
        return tuple(range(self.fields))

    @property
    def run(self) -> int:
        """Words of a group."""
        return self.group // self.fields

    @property
    def order(self) -> str:
        """The kind whose integers of x are in the same order."""
        return ORDERS.get(self.kind, self.kind)

    @property
    def operands(self) -> int:
        """Operands of a word in a `QuantizedX`, of four numbers each."""
        return self.fields // 4

    @property
    def in_pairs(self) -> bool:
        """Whether a `QuantizedX` has two operands of a word next to each other."""
        return self.order in ("int4", "hqq2")

    @property
    def units(self) -> int:
        """Numbers of a quad of `QuantizedX.units`."""
        return 5 if self.word_scaled else UNITS.get(self.kind, 2)

    @property
    def word_scaled(self) -> bool:
        """Whether each word has a scale, so that those of a quad are an int32."""
        return self.kind == "hqq2" and self.group == WORD_GROUP

    @property
    def half_quadratic(self) -> bool:
        """Whether it is hqq4, hqq3, hqq2 or uint4."""
        return self.kind in HALF_QUADRATIC

    @property
    def two_bits(self) -> bool:
        """Whether `codes` has two bits of each code."""
        return self.kind in TWO_BITS

    @property
    def integers(self) -> bool:
        """Whether codes are multiplied as integers."""
        return self.kind in INTEGERS

    @property
    def e2m1(self) -> bool:
        """Whether codes are e2m1 numbers, which scales multiply."""
        return self.kind in ("mxfp4", "nvfp4")

    @property
    def gguf(self) -> bool:
        """Whether it is one of GGUF's kinds."""
        return self.kind in GGUF

    @property
    def has_row_scale(self) -> bool:
        """Whether a scale a row multiplies the sums."""
        return self.kind in ("int8", "fp8", "nvfp4")


@dataclass(frozen=True)
class Weight(Codes):
    """A weight as the kernels read it: its tensors in the layout's order, kind, and group."""

    parts: tuple[Tensor, ...]  # bf16: the weight as int32 [..., out, in / 2]
    kind: str
    group: int  # numbers that share a scale

    @property
    def quads(self) -> int:
        """Quads (16 bytes of codes) of a row."""
        return self.parts[0].shape[-1] // 4

    @property
    def out(self) -> int:
        """Rows of one expert's weight."""
        return self.parts[0].shape[-2]

    @property
    def gpu(self) -> Gpu:
        """The GPU that has the weight."""
        return gpu_of(self.parts[0].device)

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of the GPU that has the weight."""
        return self.gpu.multiprocessors

    @property
    def tensors(self) -> WeightTensors:
        found = kernel_tensors(dict(zip(self.layout, self.parts, strict=False)), self.kind)
        if not self.word_scaled:
            return found
        scale, zero = (part.view(torch.int32) for part in (found.scale, found.zero))
        return found._replace(scale=scale, zero=zero)

    @property
    def layout(self) -> tuple[str, ...]:
        """The names of the parts, of which the last may be absent."""
        if self.kind == "hqq" and len(self.parts) == len(WITHOUT_STEPS):
            return WITHOUT_STEPS
        return LAYOUTS.get(self.kind, WeightTensors._fields)

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return 4 * self.quads * self.fields


def kernel_tensors(parts: dict[str, Tensor], kind: str) -> WeightTensors:
    """Return a weight's parts as the kernels read them.

    Small numbers that a kernel needs together are one: the scale and min of 32 numbers (q4_k, q5_k)
    or the scales of both halves (q6_k, nvfp4) int16, `step` of both int32, and what is above the
    codes of a quad int64 (q6_k). Scale and min in fp16 are an int32.
    """
    tensors = WeightTensors(*(parts.get(name) for name in WeightTensors._fields))
    if "third" in parts:  # as hqq3's format names it
        return tensors._replace(high=parts["third"])
    if kind in ("q4_k", "q5_k") and "step" not in parts:  # q4_1, q5_1: scale and min are fp16
        return tensors._replace(scale=parts["scale"].view(torch.int32))
    if kind in ("q4_k", "q5_k"):
        scale, step = parts["scale"].view(torch.int16), parts["step"].view(torch.int32)
        return tensors._replace(scale=scale, step=step)
    if kind == "nvfp4":
        return tensors._replace(scale=parts["scale"].view(torch.int16))
    if kind == "q6_k":
        scale, high = parts["scale"].view(torch.int16), parts["high"].view(torch.int64)
        return tensors._replace(scale=scale, high=high)
    return tensors


def check_rows(name: str, tensor: Tensor | None, *shape: int) -> None:
    """Raise ValueError for a tensor of other size, or of rows of other width; None is right."""
    if tensor is not None and (tensor.numel() != prod(shape) or tensor.shape[-1] != shape[-1]):
        raise ValueError(f"{name} is {list(tensor.shape)}, not {list(shape)}")


def plain_weight(weight: Tensor) -> Weight:
    """Return a bf16 weight [..., out, in] as the kernels read it.

    Raises ValueError unless it is bf16 and a row is a multiple of 16 bytes.
    """
    if weight.dtype != torch.bfloat16 or weight.shape[-1] % 8:
        raise ValueError(f"no kernel for {weight.dtype} rows of {weight.shape[-1]} numbers")
    return Weight((weight.view(torch.int32),), "bf16", 8)


def has_kernels(kind: str | None, group: int) -> bool:
    """Whether the kernels decode packed weights of this kind and group, of rows of whole quads."""
    smallest = WORD_GROUP if kind == "hqq2" and group == WORD_GROUP else SMALLEST_GROUPS.get(kind)
    return smallest is not None and group % smallest == 0


def packed_weight(parts: list[Tensor], kind: str, group: int) -> Weight:
    """Return packed parts as the kernels read them.

    Raises ValueError if a group with a scale does not consist of whole quads, or for another kind.
    """
    if not has_kernels(kind, group) or parts[0].shape[-1] % 4:
        raise ValueError(f"no kernel for {kind} with groups of {group}")
    return Weight(tuple(parts), kind, 32 if kind in GGUF else group)
