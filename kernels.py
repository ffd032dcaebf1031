"""Triton kernels for what PyTorch cannot say: a grouped matrix product whose weights stay packed.

`F.grouped_mm` wants plain weights, and unpacking those of all experts first would take the memory that packing saved.
Here each tile of weights is unpacked in registers. The formats stand in quantize.py; a test holds this to its unpack.
"""

from __future__ import annotations  # the annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA: then nothing here is called
    triton = None


def jit(function):
    """`triton.jit`, where there is triton."""
    return triton.jit(function) if triton else function


@jit
def _weights(codes, high, scale, scale_step, scale_low, zero, zero_step, zero_low, rows, k, inside, IN: tl.constexpr,
             BITS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """The numbers of `rows` [BN, 1] at `k` [1, BK], fp32 [BN, BK], without the factor of a whole row."""
    byte = rows * (IN * (2 if BITS == 3 else BITS) // 8)  # where the row begins, in bytes
    if KIND == "int8":
        return tl.load(codes + byte + k, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    if KIND == "fp8":  # its bits as those of an fp16 number, 2 ** -8 of it
        bits = tl.load(codes + byte + k, mask=inside, other=0).to(tl.int32)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    FIELDS: tl.constexpr = 8 // (2 if BITS == 3 else BITS)
    MASK: tl.constexpr = 3 if BITS == 3 else 2**BITS - 1
    number = (
        tl.load(codes + byte + k // FIELDS, mask=inside, other=0).to(tl.int32) >> (k % FIELDS * (8 // FIELDS))
    ) & MASK
    if BITS == 3:  # of each 32, bit 16 m + 8 h + i stands at 16 h + 8 m + i
        at = rows * (IN // 8) + k // 32 * 4 + k // 8 % 2 * 2 + k // 16 % 2
        number |= ((tl.load(high + at, mask=inside, other=0).to(tl.int32) >> (k % 8)) & 1) << 2
    group = rows * (IN // GROUP) + k // GROUP
    factor = tl.load(scale + group, mask=inside, other=0).to(tl.float32)
    if KIND == "int4":
        return (number - 8).to(tl.float32) * factor
    factor = factor * tl.load(scale_step + rows) + tl.load(scale_low + rows)
    offset = tl.load(zero + group, mask=inside, other=0).to(tl.float32)
    return (number.to(tl.float32) - (offset * tl.load(zero_step + rows) + tl.load(zero_low + rows))) * factor


@jit
def _grouped(x, y, group_ends, codes, high, scale, scale_step, scale_low, zero, zero_step, zero_low, OUT: tl.constexpr,
             IN: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
             KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    # Which expert this tile of rows belongs to: experts have as many tiles as their rows need, one after the other.
    tile, experts = tl.program_id(0), tl.arange(0, E2)
    ends = tl.load(group_ends + experts, mask=experts < E, other=0)
    starts = tl.load(group_ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles = (tl.maximum(ends - starts, 0) + BM - 1) // BM
    last = tl.cumsum(tiles, 0)
    expert = tl.sum(((last <= tile) & (experts < E)).to(tl.int32))
    if expert < E:
        mine = experts == expert
        tile -= tl.sum(tl.where(mine, last - tiles, 0))
        rows = tl.sum(tl.where(mine, starts, 0)) + tile * BM + tl.arange(0, BM)[:, None]
        present = rows < tl.sum(tl.where(mine, ends, 0))
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        weight_rows = expert.to(tl.int64) * OUT + tl.minimum(n, OUT - 1)[:, None]
        sums = tl.zeros([BM, BN], tl.float32)
        for start in range(0, IN, BK):
            k = start + tl.arange(0, BK)[None, :]
            a = tl.load(x + rows.to(tl.int64) * IN + k, mask=present & (k < IN), other=0.0)
            b = _weights(codes, high, scale, scale_step, scale_low, zero, zero_step, zero_low, weight_rows, k, k < IN,
                         IN, BITS, GROUP, KIND)  # fmt: skip
            sums = tl.dot(a, tl.trans(b.to(a.dtype)), sums, input_precision="ieee")
        if KIND == "int8" or KIND == "fp8":
            factor = tl.load(scale + expert.to(tl.int64) * OUT + tl.minimum(n, OUT - 1)).to(tl.float32)
            sums *= (factor * (256.0 if KIND == "fp8" else 1.0))[None, :]
        tl.store(
            y + rows.to(tl.int64) * OUT + n[None, :], sums.to(y.dtype.element_ty), mask=present & (n < OUT)[None, :]
        )


def grouped(x: Tensor, group_ends: Tensor, parts: dict[str, Tensor], kind: str, bits: int, group: int) -> Tensor:
    """x [N, in], rows sorted by expert, those of e ending before group_ends[e] -> [N, out].

    Along `in`, x is in the order in which words hold the weights' codes (`quantize.word_order`).
    parts: of a format of quantize.py, [E, out, ...]. kind: its way of counting, "int8", "fp8", "int4" or "hqq".
    """
    (N, width), (E, out) = x.shape, parts["scale"].shape[:2]
    y = x.new_empty(N, out)
    codes = parts["codes"].view(torch.uint8)
    high = parts["high"].view(torch.uint8) if "high" in parts else codes
    fine = [parts.get(name, parts["scale"]) for name in ("scale_step", "scale_low", "zero", "zero_step", "zero_low")]
    rows = 64 if N > 16 * E else 16  # a tile of rows: most are empty where experts have few
    grid = (min(N, triton.cdiv(N, rows) + E), triton.cdiv(out, 128))
    _grouped[grid](x.contiguous(), y, group_ends, codes, high, parts["scale"], *fine, OUT=out, IN=width, E=E,
                   E2=triton.next_power_of_2(E), BITS=bits, GROUP=group, KIND=kind, BM=rows, BN=128, BK=64,
                   num_warps=4, num_stages=3)  # fmt: skip
    return y
