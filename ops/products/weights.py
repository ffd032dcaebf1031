"""Weights as the kernels read them: packed codes of a number format, with scales and zeros."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ops.gpu import gpu_of

# GGUF's kinds: scales are of 32 numbers, or of 16 (q6_k); `step` is of 256.
GGUF = "q8_0", "q4_k", "q5_k", "q6_k", "iq4"
# Digits of a scale of 6 or 8 bits, by which tensor cores multiply codes exactly (units.py)
DIGITS = {"q4_k": 2, "q5_k": 2, "q6_k": 2, "iq4": 3}
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

    fields = property(lambda s: 32 // BITS[s.kind])  # codes in a word
    field_numbers = property(lambda s: tuple(range(s.fields)))  # 0, 1, ... for each code of a word
    run = property(lambda s: s.group // s.fields)  # words of a group
    order = property(lambda s: ORDERS.get(s.kind, s.kind))  # as of ORDERS
    # A `QuantizedX` has these operands of a word, of four numbers each, and two of a word next to
    # each other; and these numbers of a quad in `units`.
    operands = property(lambda s: s.fields // 4)
    in_pairs = property(lambda s: s.order in ("int4", "hqq2"))
    units = property(lambda s: 5 if s.word_scaled else UNITS.get(s.kind, 2))
    # Each word has a scale, so that those of a quad are an int32.
    word_scaled = property(lambda s: s.kind == "hqq2" and s.group == WORD_GROUP)
    half_quadratic = property(lambda s: s.kind in HALF_QUADRATIC)  # hqq4, hqq3, hqq2 or uint4
    two_bits = property(lambda s: s.kind in TWO_BITS)
    integers = property(lambda s: s.kind in INTEGERS)
    e2m1 = property(lambda s: s.kind in ("mxfp4", "nvfp4"))
    gguf = property(lambda s: s.kind in GGUF)
    has_row_scale = property(lambda s: s.kind in ("int8", "fp8", "nvfp4"))  # it multiplies sums


@dataclass(frozen=True)
class Weight(Codes):
    """A weight as the kernels read it: its tensors in the layout's order, kind, and group."""

    parts: tuple[Tensor, ...]  # bf16: the weight as int32 [..., out, in / 2]
    kind: str
    group: int  # numbers that share a scale

    quads = property(lambda s: s.parts[0].shape[-1] // 4)  # quads (16 bytes of codes) of a row
    out = property(lambda s: s.parts[0].shape[-2])  # rows of one expert's weight
    gpu = property(lambda s: gpu_of(s.parts[0].device))  # the GPU that has the weight
    multiprocessors = property(lambda s: s.gpu.multiprocessors)

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

    width = property(lambda s: 4 * s.quads * s.fields)  # numbers of a row


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
