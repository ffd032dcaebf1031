"""Weights as the kernels read them: packed codes of a number format, with scales and zeros.

A quad is 16 bytes of a row's codes, four words: 8 bf16 numbers, 16 codes of 8 bits or 32 of 4 bits.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ops.gpu import Gpu, gpu_of

# Bits of a code, by kind
FOUR_BITS = "int4", "mxfp4", "nvfp4", "hqq"
BITS = {"bf16": 16, "int8": 8, "fp8": 8, "fp8b": 8, **dict.fromkeys(FOUR_BITS, 4)}
INTEGERS = "int8", *FOUR_BITS  # kinds of codes that are multiplied as integers
# The smallest groups of packed kinds: whole quads have one scale; int8 and fp8 have one a row.
SMALLEST_GROUPS = {"int8": 4, "fp8": 4, "fp8b": 16, **dict.fromkeys(FOUR_BITS, 32)}
# Numbers of a quad of a `QuantizedX`, beside its operands: the value of 1, and a sum of x, or two.
UNITS = {"nvfp4": 3}


class WeightTensors(NamedTuple):
    """A weight's tensors: a kind has the first one, two, three or all; uint4 has no steps."""

    codes: Tensor  # int32 [..., out, words]
    scale: Tensor | None = None  # int8, fp8 [..., out]; fp8b: of blocks; others: of groups
    scale_step: Tensor | None = None  # nvfp4, hqq [..., out]: a scale is scale * step + low
    scale_low: Tensor | None = None
    zero: Tensor | None = None  # hqq: of groups, zero * step + low; uint4: the zero itself
    zero_step: Tensor | None = None
    zero_low: Tensor | None = None


@dataclass(frozen=True)
class Weight:
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
    def fields(self) -> int:
        """Codes in a word."""
        return 32 // BITS[self.kind]

    @property
    def units(self) -> int:
        """Numbers of a quad of `QuantizedX.units`."""
        return UNITS.get(self.kind, 2)

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
        if self.kind == "hqq" and len(self.parts) == 3:
            codes, scale, zero = self.parts
            return WeightTensors(codes, scale, zero=zero)
        tensors = WeightTensors(*self.parts)
        if self.kind != "nvfp4":
            return tensors
        return tensors._replace(scale=tensors.scale.view(torch.int16))  # a group's two at once

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return 4 * self.quads * self.fields


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


def packed_weight(parts: list[Tensor], kind: str, group: int) -> Weight:
    """Return packed parts as the kernels read them.

    Raises ValueError if a group with a scale does not consist of whole quads, or for another kind.
    """
    smallest = SMALLEST_GROUPS.get(kind)
    if smallest is None or group % smallest or parts[0].shape[-1] % 4:
        raise ValueError(f"no kernel for {kind} with groups of {group}")
    return Weight(tuple(parts), kind, group)
