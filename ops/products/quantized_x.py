"""Tokens' x as integers, quantized once for all programs of the product that follows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.launch import await_previous, jit, launch, tl
from ops.products.operands import load_x, quantize
from ops.products.weights import BITS, Codes, Weight
from ops.sizes import cdiv, pow2

LONG_X = 16384  # numbers: one token's longer x is quantized by a kernel of its own, for few bits


@dataclass(frozen=True)
class QuantizedX:
    """Tokens as integers: int16 numbers of each quad of their weight, in the order of its codes.

    operands: int64, four numbers each, as of `operands.quantize`; `Weight.order` names their order.
    int4 [T, 4, quads, 2]: a pair is both operands of a word of codes, so that a lane needs none of
    another lane's. hqq2 [T, 8, quads, 2]: it has four operands of a word. int8 [T, quads, 4], mxfp4
    and nvfp4 [T, quads, 8]: a quad's first operands, then its second ones. In pairs their gate and
    up product takes more registers, or is slower (docs/log/small_experts.md).
    units: fp32 [T, 2, 3 or 5, quads]: the value of a quad's 1, and the sums of `operands.quantize`.
    """

    operands: Tensor
    units: Tensor
    dtype: torch.dtype  # that of the tokens


@dataclass(frozen=True)
class Layout(Codes):
    """In which order a `QuantizedX` has numbers, and how many quads a program quantizes."""

    kind: str
    group: int
    quads: int  # quads of the whole token
    lanes: int  # quads of a program
    tokens: int = 1


@jit
def store_quads(values, x, units, s: tl.constexpr):
    """Quantize LANES quads of fp32 values (`operands.quantize`); store them in x and units."""
    operands, unit, sums = quantize(values, 14, s)
    quad = tl.program_id(0) * s.lanes + tl.arange(0, s.lanes)[:, None]
    word = tl.arange(0, 4)[None, :]
    for n in tl.static_range(s.operands):
        if s.in_pairs:
            words = x + ((n // 2 * 4 + word) * s.quads + quad) * 2 + n % 2
        else:
            words = x + (quad * (4 * s.operands) + word) + 4 * n
        tl.store(words, operands[n], mask=quad < s.quads)
    tl.store(units + quad, unit, mask=quad < s.quads)
    if s.word_scaled:
        tl.store(units + (1 + word) * s.quads + quad, sums[0], mask=quad < s.quads)
    else:
        for i in tl.static_range(len(sums)):
            tl.store(units + (1 + i) * s.quads + quad, sums[i], mask=quad < s.quads)


# Grid [quads / LANES, T]: a program, one warp, quantizes LANES quads of a token.
@jit
def _quantize_token(x, operands, units, s: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    if s.tokens > 1:
        token = tl.program_id(1)
        x += token * (s.quads * 4 * s.fields)
        operands += token * (s.quads * s.fields)
        units += token * (s.units * s.quads)
    values = [part.to(tl.float32) for part in load_x(x, tl.program_id(0), s)]
    store_quads(values, operands, units, s)


def empty_quantized(x: Tensor, quads: int, weight: Weight) -> QuantizedX:
    """Return a `QuantizedX` of tokens x of `quads` quads for a `Weight`, to be filled."""
    T, shape = len(x), (len(x), quads, weight.fields)
    if weight.in_pairs:
        shape = (T, weight.fields // 2, quads, 2)
    operands = x.new_empty(shape, dtype=torch.int64)
    return QuantizedX(operands, x.new_empty(T, weight.units, quads, dtype=torch.float32), x.dtype)


def empty_norm(
    x: Tensor, weight: Weight | None, programs: int, warps: int
) -> tuple[Tensor | QuantizedX, Layout | None]:
    """Return where a kernel stores the norm of x [T, D], for integers a `QuantizedX`; layout."""
    if weight is None or not weight.integers:
        return torch.empty_like(x), None
    lanes = max(8 * warps, pow2(cdiv(weight.quads, programs)))
    layout = Layout(weight.kind, weight.group, weight.quads, lanes)
    return empty_quantized(x, weight.quads, weight), layout


def quantizes_first(weight: Weight, quads: int, tokens: int) -> bool:
    """Whether a kernel of its own quantizes x, of `quads` quads a token, for the chosen experts.

    It takes 1.5 us, and `down` starts to load w2 only after it: it must spare many programs more
    than that, as measured on an H200: of Mixtral's w2 in 4 bits 3 us (docs/log/small_experts.md).
    More tokens have more programs: from three on it is taken, but in the formats whose layers are
    faster without it (docs/log/formats.md). If words have scales, each number of x is a load.
    """
    if BITS[weight.kind] > 4:
        return False
    several = tokens > 2 and weight.kind not in ("int4", "q4_k", "nvfp4")
    return weight.word_scaled or several or quads * 4 * weight.fields > LONG_X


def quantize_tokens(x: Tensor, weight: Weight) -> QuantizedX:
    """Quantize tokens x [T, in], or their experts' [T, A in], for a kind in INTEGERS."""
    T, quads = len(x), x.shape[1] // weight.width * weight.quads
    quantized = empty_quantized(x, quads, weight)
    s = Layout(weight.kind, weight.group, quads, 8, T)
    tensors = x, quantized.operands, quantized.units
    launch(_quantize_token, (cdiv(quads, s.lanes), T), *tensors, settings=s, warps=1)
    return quantized
