"""Number formats: 8-, 4-, 3- and 2-bit weights, packed, and the modules that multiply with them as they are.

    python quantize.py --checkpoint_path DIR/model_bf16 --mode int8          writes DIR/model_int8
    python quantize.py --checkpoint_path DIR/model_bf16 --attention hqq4 --experts hqq2

A format is a row of FORMATS. It stores a weight [..., out, in] as a few tensors, its parts, which keep the weight's
rank and the order of its axes, with size 1 where a value serves the whole row:

    codes   int32 [..., out, in * bits / 32]: F = 32 / bits codes to a word, the first in the lowest bits. A group of G
            is G / F words; word i of it holds codes i, i + G / F, i + 2 G / F ..., so that what one field of
            neighbouring words multiplies are neighbours in x
    high    int32 [..., out, in / 32]: the third bit of 3-bit codes, whose lower two are `codes` (see `_high_bits`)
    scale   bf16 [..., out, 1 or in / G], or uint8 [..., out, in / G] with scale_step and scale_low bf16 [..., out, 1]
    zero    as the latter

Codes are packed along `in` alone and within groups, so that a weight can be cut along either axis.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import kernels
from checkpoint import Checkpoint, Writer, pick_device
from model import Chunk, ExpertLinear, KVCache, Linear, ModelArgs, Transformer, realise, swiglu, weighted_sum

Parts = dict[str, Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # of what is in no number format


# Words --------------------------------------------------------------------------------------------------------------


def word_order(values: Tensor, fields: int, group: int) -> Tensor:
    """[..., n] -> [..., n] in the order in which words of so many fields hold them, group by group."""
    return values.unflatten(-1, (-1, fields, group // fields)).transpose(-1, -2).flatten(-3)


def grouped_order(x: Tensor, bits: int, group: int) -> Tensor:
    """[..., in] -> [..., in] in the order in which `kernels.grouped` unpacks weights of so many bits.

    At 8 bits that of the words. Below, of as many neighbouring words as it unpacks side by side, first and second
    fields of each, then third and fourth ones: two neighbours in x are of one word, as in a tensor core's registers.
    """
    fields = 16 if bits == 3 else 32 // bits
    ordered, run = word_order(x, fields, group), kernels.grouped_run(x.shape[-1], bits)
    if bits == 8:
        return ordered
    return ordered.unflatten(-1, (-1, run, fields // 2, 2)).transpose(-3, -2).flatten(-4)


def pack(codes: Tensor, bits: int, group: int) -> Tensor:
    """codes [..., n], whole numbers below 2 ** bits -> int32 [..., n * bits / 32]."""
    shifts = torch.arange(0, 32, bits, device=codes.device, dtype=torch.int32)
    ordered = word_order(codes.to(torch.int32), 32 // bits, group)
    return (ordered.unflatten(-1, (-1, 32 // bits)) << shifts).sum(-1, dtype=torch.int32)


def unpack(words: Tensor, bits: int, group: int) -> Tensor:
    """The inverse of `pack`: int32 [..., n * bits / 32] -> int32 [..., n]."""
    fields = 32 // bits
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    ordered = ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
    return word_order(ordered, group // fields, group)  # a transposition, back


def _high_bits(codes: Tensor) -> Tensor:
    """Bits [..., n] in word order to the order of a `high` plane, or back: of 32, the middle two eights change places.

    Then the bits of fields i and i + 8 of a word of sixteen 2-bit codes lie 16 apart, as those fields themselves do.
    """
    return codes.unflatten(-1, (-1, 2, 2, 8)).transpose(-3, -2).flatten(-4)


# Products for one token ---------------------------------------------------------------------------------------------
#
# A code becomes a number without an integer-to-float conversion, of which a GPU does few at a time: a mask and an "or"
# put two codes at once into the mantissas of two fp16 numbers of exponent 10, which are then 1024 + factor * code
# exactly. For x in 16 bits, what this lift of 1024 adds to the product is subtracted afterwards by a sum over x, which
# all rows share; that costs some of fp32's digits, so for x in fp32 it is subtracted from each number.


def _lift(x: Tensor) -> float:
    """What is left of the 1024 in each number."""
    return 0.0 if x.dtype == torch.float32 else 1024.0


def _halves(words: Tensor, less: float = 0.0) -> tuple[Tensor, Tensor]:
    """int32 words -> their low and high 16 bits read as fp16, less a number, in fp32."""
    return tuple(half.to(torch.int16).view(torch.float16).float() - less for half in (words, words >> 16))


def _twice(mask: int) -> int:
    """A mask for both halves of a word, as a signed 32-bit number."""
    both = mask << 16 | mask
    return both - 2**32 if both >= 2**31 else both


def _planes(x: Tensor, fields: int, group: int, words: int = 1, copy: bool = True) -> list[Tensor]:
    """x [..., in] -> fp32 [..., 1, W] for each field of so many neighbouring words at a time: what it multiplies.

    Copied into this order (and to fp32) once, in a small kernel, x is read faster by every row: by a tenth to a third.
    Only where a field's share of x lies in long runs anyhow is reading it in place as fast.
    """
    x = x.float() if copy else realise(x)
    planes = x.unflatten(-1, (-1, fields, group // fields // words, words)).movedim((-1, -3), (-4, -3)).flatten(-2)
    if copy:
        planes = realise(planes.clone(memory_format=torch.contiguous_format))
    return [plane.unsqueeze(-2).float() for plane in planes.flatten(-3, -2).unbind(-2)]


def _values(words: Tensor, bits: int, lift: float, high: Tensor | None = None) -> list[tuple[Tensor, float]]:
    """The codes in `words` as (lift + factor * code, factor), field by field.

    high: a third bit for 2-bit codes, already shifted so that its lowest sixteen are those of these words.
    """
    fields = 16 // bits
    values = [None] * (2 * fields)
    for k in range(fields):
        at = bits * k % 8  # fields of one byte need no shift of their own: they are multiples of a larger factor
        chosen = (words >> (bits * k - at)) & _twice((2**bits - 1) << at)
        if high is not None:
            by = at + 2 - k  # from bit k to the place above the two
            chosen = chosen | ((high << by if by > 0 else high >> -by) & _twice(4 << at))
        low, upper = _halves(chosen | _twice(0x6400), 1024.0 - lift)
        values[k], values[k + fields] = (low, 2.0**at), (upper, 2.0**at)
    return values


def _sum_of_products(x: list[Tensor], values: list[tuple[Tensor, float]], lift: float, zero: float = 0.0) -> Tensor:
    """x fp32 [..., 1, W] a field, values [..., out, W] a field -> the sum over fields of x * (code - zero).

    What does not depend on a row is kept in memory, or every row would add it up again (int8 in Mixtral's shapes: 66
    instead of 87 us).
    """
    total = sum(plane / factor * value for plane, (value, factor) in zip(x, values, strict=True))
    if not lift and not zero:
        return total
    return total - realise(sum(plane * (lift / factor + zero) for plane, (_, factor) in zip(x, values, strict=True)))


def _spread(values: Tensor, words: int) -> Tensor:
    """[..., out, groups] -> fp32 [..., out, words], each group's value for each of its words."""
    return values.float().unsqueeze(-1).expand(*values.shape, words // values.shape[-1]).flatten(-2)


def dot_int8(x: Tensor, parts: Parts, group: int) -> Tensor:
    """x [..., in], parts of [..., out, in] -> fp32 [..., out]."""
    words, values = parts["codes"], [None] * 4
    for k in (0, 1):
        # Two's complement with its top bit flipped is code + 128, in the mantissa of 1024. There are instructions to
        # spare at 8 bits to take both off at once, which spares a kernel for the sum of x.
        values[k], values[k + 2] = _halves(((words >> 8 * k) & _twice(0xFF)) ^ _twice(0x6480), 1024.0 + 128.0)
    x = realise(x.float())
    products = (plane * value for plane, value in zip(_planes(x, 4, group, copy=False), values, strict=True))
    return sum(products).sum(-1) * parts["scale"].squeeze(-1).float()


def dot_fp8(x: Tensor, parts: Parts, group: int) -> Tensor:
    """x [..., in], parts of [..., out, in] -> fp32 [..., out].

    e4m3 is s eeee mmm, fp16 is s eeeee mmmmmmmmmm: the same bits shifted into place are the number times 2 ** -8,
    numbers below the smallest normal one included. So no device needs to know fp8.
    """
    words, values = parts["codes"], [None] * 4
    for k, byte in ((0, words << 8), (1, words)):
        values[k], values[k + 2] = _halves((byte & _twice(0x8000)) | ((byte >> 1) & _twice(0x3F80)))
    x = realise(x.float())
    products = (plane * value for plane, value in zip(_planes(x, 4, group, copy=False), values, strict=True))
    return sum(products).sum(-1) * (parts["scale"].squeeze(-1).float() * 2.0**8)


def dot_int4(x: Tensor, parts: Parts, group: int) -> Tensor:
    """x [..., in], parts of [..., out, in] -> fp32 [..., out]."""
    words, lift = parts["codes"], _lift(x)
    total = _sum_of_products(_planes(x, 8, group, copy=group < 128), _values(words, 4, lift), lift, 8.0)
    return (_spread(parts["scale"], words.shape[-1]) * total).sum(-1)


def dot_hqq(x: Tensor, parts: Parts, group: int, bits: int) -> Tensor:
    """x [..., in], parts of [..., out, in] -> fp32 [..., out]."""
    lift = _lift(x)
    if bits == 3:  # two words of low bits to one of high bits
        words, (first, second) = parts["high"], parts["codes"].unflatten(-1, (-1, 2)).unbind(-1)
        planes, values = _planes(x, 16, group, 2), _values(first, 2, lift, words) + _values(second, 2, lift, words >> 8)
    else:
        words = parts["codes"]
        planes, values = _planes(x, 32 // bits, group), _values(words, bits, lift)
    total, total_x = _sum_of_products(planes, values, lift), realise(sum(planes))
    scale, zero = (_spread(_plain(parts, name), words.shape[-1]) for name in ("scale", "zero"))
    return (scale * (total - zero * total_x)).sum(-1)


# Packing and unpacking ----------------------------------------------------------------------------------------------


def _nonzero(scale: Tensor) -> Tensor:
    """A scale that can divide: 1 where all that it scales is zero."""
    return torch.where(scale == 0, 1.0, scale)


def pack_int8(weight: Tensor, group: int) -> Parts:
    """fp32 [..., out, in] -> codes from -127 to 127, scale bf16 [..., out, 1]: the row's largest magnitude over 127."""
    scale = _nonzero((weight.abs().amax(-1, keepdim=True) / 127).bfloat16())
    codes = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return {"codes": word_order(codes, 4, group).view(torch.int32), "scale": scale}


def unpack_int8(parts: Parts, group: int) -> Tensor:
    codes = word_order(parts["codes"].view(torch.int8), group // 4, group)
    return codes.float() * parts["scale"].float()


def pack_fp8(weight: Tensor, group: int) -> Parts:
    """fp32 [..., out, in] -> e4m3 codes, scale bf16 [..., out, 1]: the row's largest magnitude over 448."""
    scale = _nonzero((weight.abs().amax(-1, keepdim=True) / 448).bfloat16())
    codes = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"codes": word_order(codes.view(torch.uint8), 4, group).view(torch.int32), "scale": scale}


def unpack_fp8(parts: Parts, group: int) -> Tensor:
    codes = word_order(parts["codes"].view(torch.uint8), group // 4, group).view(torch.float8_e4m3fn)
    return codes.float() * parts["scale"].float()


def pack_int4(weight: Tensor, group: int) -> Parts:
    """fp32 [..., out, in] -> codes 0 to 15 for -8 to 7, scale bf16 [..., out, in / G].

    The number of the largest magnitude in a group becomes -8, whatever its sign, so that all sixteen codes serve.
    """
    grouped = weight.unflatten(-1, (-1, group))
    largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
    scale = _nonzero((largest / -8).bfloat16())
    codes = ((grouped / scale.float()).round() + 8).clamp(0, 15).flatten(-2)
    return {"codes": pack(codes, 4, group), "scale": scale.squeeze(-1)}


def unpack_int4(parts: Parts, group: int) -> Tensor:
    codes = (unpack(parts["codes"], 4, group) - 8).float()
    return codes * _spread(parts["scale"], codes.shape[-1])


def solve_hqq(weight: Tensor, bits: int, iterations: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Half-quadratic quantisation (Badri & Shaji 2023) of fp32 [..., groups, G], all groups as one problem.

    -> codes [..., groups, G] (fp32, whole numbers), scale and zero [..., groups, 1], so that weight is nearly
    (codes - zero) / scale. Only the zero is optimised: in turns, the error is split into a sparse part (a shrinkage for
    the lp "norm", p = 0.7) and the zero set to the mean that fits the rest; 0 iterations are round-to-nearest.
    """
    top, p, beta, best = 2**bits - 1, 0.7, 10.0, math.inf
    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    scale = (top / (high - low)).clamp(max=2e4)
    zero = -low * scale
    if bits == 4:
        zero = zero.round()
    for _ in range(iterations):
        codes = (weight * scale + zero).round_().clamp_(0, top)
        error = weight - (codes - zero) / scale
        magnitude = error.abs()
        sparse = error.sign() * (magnitude - magnitude.pow(p - 1) * (1 / beta)).relu_()
        zero = (codes - (weight - sparse) * scale).mean(-1, keepdim=True)
        beta *= 1.01
        size = magnitude.mean().item()
        if size >= best:
            break
        best = size
    return (weight * scale + zero).round_().clamp_(0, top), scale, zero


def _to_8_bits(values: Tensor, name: str) -> Parts:
    """fp32 [..., out, groups] -> uint8 codes, with a step and a low for each row: value = code * step + low."""
    low = values.amin(-1, keepdim=True).bfloat16()
    step = _nonzero(((values.amax(-1, keepdim=True) - low.float()) / 255).bfloat16())
    codes = ((values - low.float()) / step.float()).round().clamp(0, 255).to(torch.uint8)
    return {name: codes, f"{name}_step": step, f"{name}_low": low}


def _plain(parts: Parts, name: str) -> Tensor:
    """The inverse of `_to_8_bits`."""
    return parts[name].float() * parts[f"{name}_step"].float() + parts[f"{name}_low"].float()


def pack_hqq(weight: Tensor, group: int, bits: int, iterations: int = 20) -> Parts:
    """fp32 [..., out, in] -> codes, with scale and zero of each group of G themselves in 8 bits, row by row.

    Codes are rounded anew for the scale and zero that the reader will see. `scale` is the step between codes, the
    inverse of the solver's.
    """
    # The solver's limit on scales is one on how small weights may be: rows of tiny ones are made larger for it.
    largest = weight.abs().amax(-1, keepdim=True)
    tiny = (largest > 0) & (largest < 2**-8)
    unit = torch.where(tiny, torch.exp2(largest.log2().floor() + 5), 1.0)
    grouped, top = (weight / unit).unflatten(-1, (-1, group)), 2**bits - 1
    _, scale, zero = solve_hqq(grouped, bits, iterations)
    # A group far from zero for its spread has a zero far from its codes, which would stretch the row's range of zeros:
    # it gets the codes of a group that reaches from zero to its largest magnitude.
    step, far = 1 / scale, (zero < -top) | (zero > 2 * top)
    step = torch.where(far, grouped.abs().amax(-1, keepdim=True) / top, step)
    zero = torch.where(far, torch.where(zero < 0, 0.0, top), zero)
    parts = _to_8_bits(step.squeeze(-1) * unit, "scale") | _to_8_bits(zero.squeeze(-1), "zero")
    scale, zero = (_plain(parts, name).unsqueeze(-1) for name in ("scale", "zero"))
    codes = (
        (weight.unflatten(-1, (-1, group)) / _nonzero(scale) + zero).round().clamp(0, top).flatten(-2).to(torch.int32)
    )
    if bits == 3:
        high = pack(_high_bits(word_order(codes >> 2, 16, group)), 1, 32)
        return {"codes": pack(codes & 3, 2, group), "high": high, **parts}
    return {"codes": pack(codes, bits, group), **parts}


def unpack_hqq(parts: Parts, group: int, bits: int) -> Tensor:
    if bits == 3:
        high = word_order(_high_bits(unpack(parts["high"], 1, 32)), group // 16, group)
        codes = unpack(parts["codes"], 2, group) | high << 2
    else:
        codes = unpack(parts["codes"], bits, group)
    scale, zero = (_spread(_plain(parts, name), codes.shape[-1]) for name in ("scale", "zero"))
    return (codes.float() - zero) * scale


# Formats ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """One way to store a weight and to multiply with it."""

    bits: int  # of a code
    group: int  # G by default
    kind: str  # "int8", "fp8", "int4" or "hqq": what a code counts
    pack: Callable[[Tensor, int], Parts]  # fp32 [..., out, in], G -> parts
    unpack: Callable[[Parts, int], Tensor]  # parts, G -> fp32 [..., out, in]
    dot: Callable[[Tensor, Parts, int], Tensor]  # x [..., in], parts of [..., out, in], G -> fp32 [..., out]
    head: str  # what the head gets where nothing else is asked for

    @property
    def per_row(self) -> bool:
        """Whether a row has one scale, so that a group is only how its codes are packed."""
        return self.bits == 8

    @property
    def least(self) -> int:
        """The smallest G: codes in a word, or in a word of high bits."""
        return 32 if self.bits == 3 else 32 // self.bits

    def choose_group(self, width: int, group: int | None) -> int:
        """The G for rows of `width` numbers where `group` is asked for; None leaves it to the format.

        Raises ValueError where it does not divide them, or not into whole words.
        """
        if group is None:
            group = next((n for n in (64, 32, 16, 8) if width % n == 0), 4) if self.per_row else self.group
        if type(group) is not int or group < 1 or not self.fits(width, group):
            raise ValueError(f"groups of {group} do not divide rows of {width} numbers into whole words")
        return group

    def fits(self, width: int, group: int) -> bool:
        return group % self.least == 0 and width % group == 0

    def layout(self, shape: torch.Size, group: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of a weight of that shape, [..., out, in]."""
        *rows, width = shape
        layout = {"codes": ((*rows, width * (2 if self.bits == 3 else self.bits) // 32), torch.int32)}
        if self.bits == 3:
            layout["high"] = (*rows, width // 32), torch.int32
        if self.kind != "hqq":
            return layout | {"scale": ((*rows, 1 if self.per_row else width // group), torch.bfloat16)}
        for name in ("scale", "zero"):
            layout[name] = (*rows, width // group), torch.uint8
            layout |= {f"{name}_{leaf}": ((*rows, 1), torch.bfloat16) for leaf in ("step", "low")}
        return layout


def _hqq(bits: int, group: int) -> Format:
    functions = (partial(function, bits=bits) for function in (pack_hqq, unpack_hqq, dot_hqq))
    return Format(bits, group, "hqq", *functions, head="bf16")


FORMATS = {
    "int8": Format(8, 64, "int8", pack_int8, unpack_int8, dot_int8, head="int8"),
    "fp8": Format(8, 64, "fp8", pack_fp8, unpack_fp8, dot_fp8, head="int8"),
    "int4": Format(4, 128, "int4", pack_int4, unpack_int4, dot_int4, head="int8"),
    "hqq4": _hqq(4, 64),
    "hqq3": _hqq(3, 64),
    "hqq2": _hqq(2, 16),
}
PACKED_AT_ONCE = 1 << 22  # weights; in fp32, with what the solver keeps beside them, some 150 MB
PLAIN = "bf16"  # in place of a format's name: the weight stays as it is


# Modules ------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("moe_fast::grouped_packed", mutates_args=())
def grouped_packed(x: Tensor, group_ends: Tensor, parts: list[Tensor], format: str, group: int) -> Tensor:
    """x [N, in], group_ends int32 [E], parts of [E, out, in] in the order of the format's layout -> [N, out].

    On CUDA one kernel that unpacks a tile at a time, for x in `grouped_order`; on CPU expert by expert, for x as it is.
    """
    row, width = FORMATS[format], x.shape[-1]
    parts = dict(zip(row.layout((*parts[0].shape[:2], width), group), parts, strict=True))
    if x.is_cuda:
        return kernels.grouped(x, group_ends, parts, row.kind, row.bits, group)
    y, start = x.new_empty(x.shape[0], parts["codes"].shape[1]), 0
    for expert, end in enumerate(group_ends.tolist()):
        if end > start:
            weight = row.unpack({name: part[expert] for name, part in parts.items()}, group).to(x.dtype)
            y[start:end] = F.linear(x[start:end], weight)
        start = end
    return y


@grouped_packed.register_fake
def _(x: Tensor, group_ends: Tensor, parts: list[Tensor], format: str, group: int) -> Tensor:
    return x.new_empty(x.shape[0], parts[0].shape[1])


class Packed(nn.Module):
    """A weight [..., out, in] in a format: its parts are the module's parameters."""

    def __init__(self, weight: Tensor, format: str, group: int):
        super().__init__()
        self.format, self.group = format, group
        FORMATS[format].choose_group(weight.shape[-1], group)
        self.layout = FORMATS[format].layout(weight.shape, group)
        for name, (shape, dtype) in self.layout.items():
            part = torch.empty(shape, dtype=dtype, device=weight.device)
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    def parts(self, index: Tensor | None = None) -> Parts:
        """The parts, or those of the chosen experts: a gather that the product fuses with."""
        parts = {name: getattr(self, name) for name in self.layout}
        return parts if index is None else {name: part[index] for name, part in parts.items()}

    def dot(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """x [..., in] -> fp32 [..., out]. index [T, A]: the expert of each pair, and x is [T, A | 1, in]."""
        if self.in_kernel(x):
            return self.kernel(x, index).sum(0).view(*(x.shape[:-1] if index is None else index.shape), -1)
        # Kept in memory, or its scales would become part of whatever reads it, more than once.
        return realise(FORMATS[self.format].dot(x, self.parts(index), self.group))

    def in_kernel(self, x: Tensor, gated: bool = False) -> bool:
        """Whether one token's product has a kernel of its own: then the compiler's best was slower by half."""
        row, out = FORMATS[self.format], self.layout["codes"][0][-2]
        return row.bits == 4 and x.is_cuda and kernels.dot4_supports(x, out, self.group, gated)

    def kernel(self, x: Tensor, index: Tensor | None, gated: bool = False) -> Tensor:
        row, parts = FORMATS[self.format], list(self.parts().values())
        index = index if index is None else index.flatten()
        return kernels.dot4(realise(x).flatten(0, -2), parts, index, row.kind, self.group, gated)

    def grouped(self, x: Tensor, group_ends: Tensor, dense: bool = False) -> Tensor:
        """x [N, in], rows sorted by expert, group_ends int32 [E] -> [N, out]. dense: the weight is one expert's."""
        if x.is_cuda:  # ordered here and not by the operator, so that it becomes part of the kernel that computes x
            x = grouped_order(x, FORMATS[self.format].bits, self.group)
        parts = [part.unsqueeze(0) if dense else part for part in self.parts().values()]
        return grouped_packed(x, group_ends, parts, self.format, self.group)

    def unpack(self) -> Tensor:
        """fp32 [..., out, in]."""
        return FORMATS[self.format].unpack(self.parts(), self.group)


class PackedLinear(Packed):
    """model.Linear in a format."""

    def __init__(self, linear: Linear, format: str, group: int):
        super().__init__(linear.weight, format, group)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == x.shape[-1]:  # one token
            y = self.dot(x).to(x.dtype)
        else:
            rows = x.flatten(0, -2)
            ends = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
            y = self.grouped(rows, ends, dense=True).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


class PackedExpertLinear(Packed):
    """model.ExpertLinear in a format."""

    def __init__(self, experts: ExpertLinear, format: str, group: int):
        super().__init__(experts.weight, format, group)

    def gated(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        if self.in_kernel(x, gated=True):
            return self.kernel(x, expert_indices, gated=True).view(*expert_indices.shape, -1)
        # Gate and up are two sums, as in model.ExpertLinear.
        halves = [{}, {}]
        for name, part in self.parts(expert_indices).items():
            halves[0][name], halves[1][name] = part.chunk(2, dim=2)
        x, dot = x.unsqueeze(1), FORMATS[self.format].dot
        return swiglu(*(dot(x, half, self.group) for half in halves)).to(x.dtype)

    def weighted(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor) -> Tensor:
        return weighted_sum(self.dot(x, expert_indices), expert_weights).to(x.dtype)


# Caches -------------------------------------------------------------------------------------------------------------


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n] -> codes int8 [..., n] from -127 to 127, scale bf16 [..., 1]: the largest magnitude over 127.

    A row with a number that is not finite comes back with no finite one.
    """
    x = x.float()
    scale = _nonzero((x.abs().amax(-1, keepdim=True) / 127).bfloat16())
    # Seen as bits and back: the compiler would leave the rounding out, and divide by what is not the stored scale.
    scale = scale.view(torch.int16).view(torch.bfloat16)
    return (x / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


class Int8KVCache(KVCache):
    """Codes int8 [2, B, K, S, C] and a scale bf16 [2, B, K, S, 1] for each position and head.

    That is 0.508 of a bf16 cache where C is 128. Keys and values are given as products of the two, which the compiled
    attention of one token makes where it reads them. A prompt's attention is an operator of the library, and gets the
    part in use written out.
    """

    blocks = False  # FlexAttention reads plain tensors

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
        super().__init__(shape, torch.int8, device)
        self.scale, self.dtype = KVCache((*shape[:-1], 1), torch.bfloat16, device), dtype

    def update(self, positions: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = to_int8(kv)
        return self._plain(super().update(positions, codes), self.scale.update(positions, scale))

    def extend(self, chunk: Chunk, kv: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = to_int8(kv)
        return self._plain(super().extend(chunk, codes), self.scale.extend(chunk, scale))

    def clear(self) -> None:
        super().clear()
        self.scale.clear()

    def _plain(self, codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return tuple((c.float() * s.float()).to(self.dtype) for c, s in zip(codes, scales, strict=True))


KV_CACHES = {"plain": KVCache, "int8": Int8KVCache}  # plain: in the model's dtype


# A model in formats -------------------------------------------------------------------------------------------------


def plan(
    args: ModelArgs,
    attention: str,
    experts: str,
    head: str | None = None,
    group_size: int | None = None,
    dtype: str = "bf16",
) -> dict:
    """What a checkpoint's "format" says: {"name", "dtype", "modules": {module: {"format", "group_size"}}}.

    attention, experts (dense feed-forward layers go with them), head: names in FORMATS, or PLAIN; the head's default is
    its format's. dtype: of the rest. Raises ValueError for an unknown name and for a group size that does not fit.
    """
    main_format = FORMATS.get(experts) or FORMATS.get(attention)
    usual_head = main_format.head if main_format else PLAIN
    head = head or usual_head
    names = {"attention": attention, "experts": experts, "head": head}
    for option, name in names.items():
        if name != PLAIN and name not in FORMATS:
            raise ValueError(f"--{option} {name}: it must be one of {', '.join((PLAIN, *FORMATS))}")
    if all(name == PLAIN for name in names.values()):
        raise ValueError("nothing is to be quantised: give --mode, --attention, --experts or --head a format")
    if group_size is not None and all(name == PLAIN or FORMATS[name].per_row for name in names.values()):
        raise ValueError(f"--group_size {group_size}: none of these formats has groups, leave it out")
    with torch.device("meta"):
        model = Transformer(args)
    chosen = {}  # path: (format, width of its rows)
    for path, module in model.named_modules():
        role = "head" if path == "head" else "attention" if ".attention." in path else "experts"
        if isinstance(module, Linear | ExpertLinear) and not path.endswith(".router") and names[role] != PLAIN:
            chosen[path] = names[role], module.weight.shape[-1]
    modules, grouped = {}, [(FORMATS[f], width) for f, width in chosen.values() if not FORMATS[f].per_row]
    for path, (name, width) in chosen.items():
        row = FORMATS[name]
        try:
            group = row.choose_group(width, None if row.per_row else group_size)
        except ValueError as error:
            sizes = [str(n) for n in (8, 16, 32, 64, 128, 256) if all(row.fits(width, n) for row, width in grouped)]
            fix = f"--group_size {' or '.join(sizes)} would do" if grouped and sizes else "choose other formats"
            raise ValueError(f"{path} in {name}: {error}: {fix}") from None
        modules[path] = {"format": name, "group_size": group}
    name = attention if attention == experts else f"{attention}-{experts}"
    if head != usual_head:
        name += f"-head_{head}"
    if group_size is not None:
        name += f"-g{group_size}"
    return {"name": name, "dtype": dtype, "modules": modules}


def model_args(source) -> ModelArgs:
    """The ModelArgs of a source. Raises ValueError for args or a number format that this version does not know."""
    format = source.format if isinstance(source.format, dict) else {}
    dtype = format.get("dtype", format.get("name"))
    if not isinstance(format.get("name"), str) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"number format {str(source.format)[:80]!r} is not known here: convert the model again")
    try:
        return ModelArgs(**source.args)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint's args are of another version ({error}): convert the model again") from None


def apply(model: Transformer, format: dict) -> None:
    """Swap in, on the meta device, the modules that a checkpoint's "format" names. ValueError where they do not fit."""
    modules = format.get("modules", {})
    if not isinstance(modules, dict):
        raise ValueError("the checkpoint's format names its modules in no way that this version knows: make it again")
    for path, spec in modules.items():
        try:
            module, name, group = model.get_submodule(path), spec["format"], spec["group_size"]
            twin = {Linear: PackedLinear, ExpertLinear: PackedExpertLinear}[type(module)]
            if type(group) is not int:
                raise TypeError
            packed = twin(module, name, group)
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            what = (
                f"{path!r}: {spec!r}"
                if isinstance(error, KeyError | TypeError)
                else f"{path!r}: {str(error).splitlines()[0]:.200}"
            )
            raise ValueError(f"the checkpoint's format does not fit the model ({what}): make it again") from None
        model.set_submodule(path, packed)


# Writing a quantised checkpoint -------------------------------------------------------------------------------------


def pack_weight(weight: Tensor, spec: dict, device: torch.device, iterations: int | None = None) -> Parts:
    """A weight [..., out, in] from anywhere -> its parts on `device`, packed there some rows at a time.

    iterations: of the half-quadratic formats' solver, where not the usual number. Raises ValueError for weights that
    are not finite.
    """
    row, group = FORMATS[spec["format"]], spec["group_size"]
    more = {} if iterations is None or row.kind != "hqq" else {"iterations": iterations}
    parts = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in row.layout(weight.shape, group).items()
    }
    rows, height = weight.flatten(0, -2), weight.shape[-2]
    step = max(1, PACKED_AT_ONCE // weight.shape[-1])
    for first in range(0, rows.shape[0], height):  # no expert's codes depend on another's
        for start in range(first, first + height, step):
            some = slice(start, min(start + step, first + height))
            chunk = rows[some].to(device).float()
            if not chunk.isfinite().all():
                raise ValueError("it holds numbers that are not finite")
            for name, part in row.pack(chunk, group, **more).items():
                parts[name].flatten(0, -2)[some] = part
    return parts


def quantize(
    source: Path | str,
    format: dict,
    target: Path | str | None = None,
    device: torch.device | str = "cpu",
    force: bool = False,
    iterations: int | None = None,
    progress: bool = True,
) -> Path:
    """Write the checkpoint `source` anew with the modules that `format` names packed, about one layer in memory.

    target: a directory, by default model_<name of the format> beside the source. Returns it. Raises ValueError for a
    source that is quantised already, and as `Checkpoint` and `Writer` do; then nothing is left behind.
    """
    checkpoint = Checkpoint(source)
    if "modules" in checkpoint.format:
        raise ValueError(f"{source} is quantised already ({checkpoint.format['name']}): give its bf16 original")
    with torch.device("meta"):
        model = Transformer(model_args(checkpoint))
    for name, parameter in model.named_parameters():
        shape, dtype = checkpoint.tensors.get(name, (None, None))
        if shape != parameter.shape or dtype not in DTYPES.values():
            due = f"{list(parameter.shape)} in 16 or 32 bits"
            raise ValueError(
                f"{name} is not there as {due}, as the args ask for: convert the original checkpoint again"
            )
    target = Path(target) if target else checkpoint.directory.resolve().parent / f"model_{format['name']}"
    if target.resolve() == checkpoint.directory.resolve():
        raise ValueError(f"{target} is what is to be quantised: name another --output_dir")
    modules = format["modules"]
    sizes = {name: checkpoint.nbytes(name) for name in checkpoint.tensors}
    tied = "head" in modules and "head.weight" not in sizes
    apply(model, format)
    packed = sum(part.nbytes for m in model.modules() if isinstance(m, Packed) for part in m.parts().values())
    kept = sum(size for name, size in sizes.items() if name.removesuffix(".weight") not in modules)
    with (
        Writer(target, checkpoint.args, format, force) as writer,
        tqdm(total=sum(sizes.values()), desc="quantize", unit="B", unit_scale=True, file=sys.stderr,
             disable=not progress) as bar,
    ):  # fmt: skip
        writer.reserve(packed + kept)
        for file, names in checkpoint.by_file().items():
            tensors = {}
            for name in names:
                path, weight = name.removesuffix(".weight"), checkpoint.read(name)
                if path not in modules:
                    tensors[name] = weight
                if tied and path == "embedding":  # the head has been this same tensor, and now has parts of its own
                    path = "head"
                if path in modules:
                    try:
                        parts = pack_weight(weight, modules[path], torch.device(device), iterations)
                    except ValueError as error:
                        raise ValueError(f"{name}: {error}; fetch and convert the checkpoint again") from None
                    tensors |= {f"{path}.{leaf}": part for leaf, part in parts.items()}
                bar.update(sizes[name])
            writer.write(file, tensors)
        for path in checkpoint.side_files():
            writer.copy(path)
    return target


def bits_per_weight(checkpoint: Checkpoint) -> tuple[float, float]:
    """Bits a weight, with scales and zeros: over the weights in number formats alone, and over the whole checkpoint."""
    with torch.device("meta"):
        model = Transformer(model_args(checkpoint))
    count = {path: module.weight.numel() for path, module in model.named_modules() if hasattr(module, "weight")}
    modules = checkpoint.format["modules"]
    sizes = {name: 8 * checkpoint.nbytes(name) for name in checkpoint.tensors}
    packed = sum(size for name, size in sizes.items() if name.rsplit(".", 1)[0] in modules and name[-5:] != ".bias")
    everything = sum(parameter.numel() for parameter in model.parameters())
    return packed / sum(count[path] for path in modules), sum(sizes.values()) / everything


# Command ------------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Write a checkpoint anew with its weights in fewer bits.",
        epilog="example: python quantize.py --checkpoint_path DIR/model_bf16 --mode int8",
        allow_abbrev=False,
    )
    add, names = parser.add_argument, (PLAIN, *FORMATS)
    add("--checkpoint_path", type=Path, required=True, metavar="DIR", help="a converted checkpoint, not quantised yet")
    add("--mode", choices=tuple(FORMATS), help="format of attention and experts")
    add("--attention", choices=names, help="format of the attention's weights, in place of --mode's")
    add("--experts", choices=names, help="format of the experts' (and dense feed-forward) weights, likewise")
    add("--head", choices=(PLAIN, "int8"), help="default: int8 with int8, fp8 and int4; bf16 with the hqq formats")
    add("--group_size", type=int, metavar="N", help="numbers that share a scale; default: 128 for int4, 64 for hqq4 "
        "and hqq3, 16 for hqq2")  # fmt: skip
    add("--iterations", type=int, metavar="N", help="of the hqq solver; default: 20; 0 is round-to-nearest")
    add("--output_dir", type=Path, metavar="DIR", help="default: model_<format> beside the checkpoint")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"), help="where the weights are packed")
    add("--force", action="store_true", help="replace an existing checkpoint")
    return parser


def run(options: argparse.Namespace) -> str:
    """Do what the options ask for, and say what came of it."""
    for name, least in (("group_size", 1), ("iterations", 0)):
        if (value := getattr(options, name)) is not None and value < least:
            raise ValueError(f"--{name} {value}: it must be at least {least}")
    if options.mode and options.attention and options.experts:
        raise ValueError("--mode says nothing beside --attention and --experts: leave one of the three out")
    source = Checkpoint(options.checkpoint_path)
    format = plan(
        model_args(source), options.attention or options.mode or PLAIN, options.experts or options.mode or PLAIN,
        options.head, options.group_size, source.format["name"],
    )  # fmt: skip
    kinds = {FORMATS[spec["format"]].kind for spec in format["modules"].values()}
    if options.iterations is not None and "hqq" not in kinds:
        raise ValueError(f"--iterations {options.iterations}: none of these formats has a solver, leave it out")
    start = time.perf_counter()
    device = pick_device(options.device)
    target = Checkpoint(
        quantize(source.directory, format, options.output_dir, device, options.force, options.iterations)
    )
    packed, whole = bits_per_weight(target)
    size = sum(map(target.nbytes, target.tensors))
    return (
        f"{target.directory}: {size / 1e9:.3f} GB, {packed:.3f} bits a quantised weight, {whole:.3f} over all weights, "
        f"in {time.perf_counter() - start:.1f} s"
    )


def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    try:
        print(run(options))
    except (ValueError, OSError, torch.cuda.OutOfMemoryError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
