"""hqq4, hqq3, hqq2: half-quadratic quantization (Badri & Shaji 2023), scale and zero a group.

Scales and zeros are themselves quantized to 8 bits, with a step and a lower bound a row.
"""

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from formats.base import Format, Layout, Parts
from formats.words import (
    both_halves,
    byte_planes,
    expand_groups,
    field_values,
    has_dp2a,
    integer_products,
    interleave,
    mix_halves,
    nonzero,
    offset_for,
    pack_words,
    part_halves,
    split_fields,
    sum_of_products,
    unpack_words,
)
from ops.inductor import materialize

ITERATIONS = 20  # largest number of the solver's iterations
MAX_SCALE = 2e4  # the solver's largest scale, in codes per unit of weight


class HQQ(Format):
    """(code - zero) * scale, with scale and zero uint8 [..., out, in / G] and, of each,
    step and low bf16 [..., out, 1]: value = uint8 * step + low."""

    has_solver = True

    def __init__(self, name: str, bits: int, group: int):
        self.name, self.bits, self.group = name, bits, group
        self.kind = "hqq" if bits == 4 else f"hqq{bits}"
        self.has_gemv = True

    def scale_layout(self, rows: tuple[int, ...], width: int, group: int) -> Layout:
        layout = {}
        for name in ("scale", "zero"):
            layout[name] = (*rows, width // group), torch.uint8
            layout |= {f"{name}_{leaf}": ((*rows, 1), torch.bfloat16) for leaf in ("step", "low")}
        return layout

    def pack(self, weight: Tensor, group: int, iterations: int = ITERATIONS) -> Parts:
        """fp32 [..., out, in] -> parts. iterations: of the solver; 0 rounds to nearest.

        Codes are rounded again for the scale and zero as stored in 8 bits. `scale` is the step
        between codes, the inverse of the solver's.
        """
        # MAX_SCALE bounds how small weights may be: scale up rows of tiny ones.
        largest = weight.abs().amax(-1, keepdim=True)
        tiny = (largest > 0) & (largest < 2**-8)
        unit = torch.where(tiny, torch.exp2(largest.log2().floor() + 5), 1.0)
        grouped, top = (weight / unit).unflatten(-1, (-1, group)), 2**self.bits - 1
        _, scale, zero = solve_hqq(grouped, self.bits, iterations)
        # A group whose spread is small for its distance from 0 has a zero far outside its codes,
        # which would stretch the row's range of zeros. Let its codes reach from 0 to its largest.
        step, far = 1 / scale, (zero < -top) | (zero > 2 * top)
        step = torch.where(far, grouped.abs().amax(-1, keepdim=True) / top, step)
        zero = torch.where(far, torch.where(zero < 0, 0.0, top), zero)
        parts = quantize_rows(step.squeeze(-1) * unit, "scale")
        parts |= quantize_rows(zero.squeeze(-1), "zero")
        scale, zero = (dequantize_rows(parts, name).unsqueeze(-1) for name in ("scale", "zero"))
        codes = (weight.unflatten(-1, (-1, group)) / nonzero(scale) + zero).round().clamp(0, top)
        return self.pack_codes(codes.flatten(-2).to(torch.int32), group) | parts

    def unpack(self, parts: Parts, group: int) -> Tensor:
        codes = self.unpack_codes(parts, group)
        scale, zero = (expanded(parts, name, codes.shape[-1]) for name in ("scale", "zero"))
        return (codes.float() - zero) * scale

    def uses_integer_products(self, x: Tensor, codes: Tensor) -> bool:
        return has_dp2a(x)

    def dot(self, x: Tensor, parts: Parts, group: int) -> Tensor:
        if self.uses_integer_products(x, parts["codes"]):
            planes = self.byte_planes(parts)
            total, total_x = integer_products(x, self.codes_per_word, group, planes)
        else:
            total, total_x = self.float_products(x, parts, group)
        scale, zero = (expanded(parts, name, total.shape[-1]) for name in ("scale", "zero"))
        return (scale * (total - zero * total_x)).sum(-1)

    # How codes are stored; 3 bits differ ----------------------------------------------------------

    def pack_codes(self, codes: Tensor, group: int) -> Parts:
        return {"codes": pack_words(codes, self.bits, group)}

    def unpack_codes(self, parts: Parts, group: int) -> Tensor:
        return unpack_words(parts["codes"], self.bits, group)

    def byte_planes(self, parts: Parts) -> Iterable[Tensor]:
        """Yield the planes of `integer_products`."""
        return byte_planes(parts["codes"], self.bits)

    def float_products(self, x: Tensor, parts: Parts, group: int) -> tuple[Tensor, Tensor]:
        """Return what `integer_products` does, by fp16 arithmetic."""
        offset = offset_for(x)
        fields = split_fields(x, self.codes_per_word, group)
        values = field_values(parts["codes"], self.bits, offset)
        return sum_of_products(fields, values, offset), materialize(sum(fields))


class HQQ3(HQQ):
    """Two planes: `codes` has the lower two bits, `third` int32 [..., out, in / 32] the third bit.

    One word of `third` belongs to two words of `codes`. Its bit 8 b + 4 m + k is that of field
    4 b + k of word m. So the third bits of the four fields that one shift and one mask make bytes
    lie 8 apart, as the fields themselves do.
    """

    min_group = 32  # codes in a word of `third`
    codes_per_word = 16

    def __init__(self):
        super().__init__("hqq3", bits=3, group=64)

    def code_layout(self, rows: tuple[int, ...], width: int) -> Layout:
        return {
            "codes": ((*rows, width * 2 // 32), torch.int32),
            "third": ((*rows, width // 32), torch.int32),
        }

    def pack_codes(self, codes: Tensor, group: int) -> Parts:
        third = self.pack_third(codes >> 2, group)
        return {"codes": pack_words(codes & 3, 2, group), "third": third}

    def unpack_codes(self, parts: Parts, group: int) -> Tensor:
        third = self.unpack_third(parts["third"], group)
        return unpack_words(parts["codes"], 2, group) | third << 2

    def pack_third(self, bits: Tensor, group: int) -> Tensor:
        """Third bits [..., in] -> `third`."""
        fields = interleave(bits, self.codes_per_word, group)
        return pack_words(mix_halves(fields), 1, 32)

    def unpack_third(self, third: Tensor, group: int) -> Tensor:
        """Invert `pack_third`."""
        fields = part_halves(unpack_words(third, 1, 32))
        return interleave(fields, group // self.codes_per_word, group)

    def regroup(self, name: str, part: Tensor, group: int, smaller: int) -> Tensor:
        if name == "third":
            return self.pack_third(self.unpack_third(part, group), smaller)
        return super().regroup(name, part, group, smaller)

    def byte_planes(self, parts: Parts) -> Iterable[Tensor]:
        # Words of `codes` are even and odd; shift the third bits of each above its bytes' codes.
        odd = torch.arange(0, 4, 2, dtype=torch.int32, device=parts["third"].device)
        third = (parts["third"].unsqueeze(-1) << 2 - odd >> odd).flatten(-2)
        for k, low in enumerate(byte_planes(parts["codes"], 2)):
            yield low | third >> k & 0x04040404

    def float_products(self, x: Tensor, parts: Parts, group: int) -> tuple[Tensor, Tensor]:
        third, offset = parts["third"], offset_for(x)
        first, second = parts["codes"].unflatten(-1, (-1, 2)).unbind(-1)
        fields = split_fields(x, self.codes_per_word, group, words=2)
        values = field_values(first, 2, offset, partial(shifted_third, third))
        values += field_values(second, 2, offset, partial(shifted_third, third >> 4))
        return sum_of_products(fields, values, offset), materialize(sum(fields))


def shifted_third(third: Tensor, k: int, at: int) -> Tensor:
    """The third bits of fields k and k + 8, at bits at + 2 and at + 18 (`words.field_values`)."""
    shift = at + 2 - (k // 4 * 8 + k % 4)
    return (third << shift if shift > 0 else third >> -shift) & both_halves(4 << at)


def solve_hqq(
    weight: Tensor, bits: int, iterations: int = ITERATIONS
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve fp32 [..., groups, G], all groups as one problem.

    -> codes [..., groups, G] (fp32 integers), scale and zero [..., groups, 1], so that weight is
    approximately (codes - zero) / scale. Only the zero is optimized. Each iteration splits the
    error into a sparse part (shrinkage for the lp "norm", p = 0.7) and a rest, and sets the zero to
    the mean that fits the rest.
    """
    top, p, beta, best = 2**bits - 1, 0.7, 10.0, math.inf
    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    scale = (top / (high - low)).clamp(max=MAX_SCALE)
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


def quantize_rows(values: Tensor, name: str) -> Parts:
    """fp32 [..., out, groups] -> uint8 codes, and a step and a low bound for each row."""
    low = values.amin(-1, keepdim=True).bfloat16()
    step = nonzero(((values.amax(-1, keepdim=True) - low.float()) / 255).bfloat16())
    codes = ((values - low.float()) / step.float()).round().clamp(0, 255).to(torch.uint8)
    return {name: codes, f"{name}_step": step, f"{name}_low": low}


def dequantize_rows(parts: Parts, name: str) -> Tensor:
    """Invert `quantize_rows`. Values without a step are what they are."""
    if f"{name}_step" not in parts:
        return parts[name].float()
    return parts[name].float() * parts[f"{name}_step"].float() + parts[f"{name}_low"].float()


def expanded(parts: Parts, name: str, words: int) -> Tensor:
    """`dequantize_rows`, each group's value for each of its words."""
    return expand_groups(dequantize_rows(parts, name), words)
