"""Unpack one packed weight for the library's product, which is faster with many rows of x.

The kernel of ops/products/prompt.py decodes each weight once for each tile of rows. With one
weight and many rows it is better to decode once, in a kernel of its own.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

import torch
from torch import Tensor

from ops.launch import jit, launch, tl, triton
from ops.products.prompt_weights import (
    PromptSettings,
    PromptTile,
    load_numbers,
    load_scales,
    number_of_field,
    prompt_operands,
    weight_field,
)
from ops.products.units import finish

TILE = PromptTile(rows=0, outputs=32, numbers=256, warps=4)


# Grid [out / BN, in / BK]: a program unpacks BK numbers of BN rows.
@jit
def _unpack_rows(weights, third, y, s: tl.constexpr):
    OUT: tl.constexpr = s.out
    IN: tl.constexpr = s.width
    FIELDS: tl.constexpr = s.fields
    GROUP: tl.constexpr = s.group
    BN: tl.constexpr = s.tile.outputs
    BK: tl.constexpr = s.tile.numbers
    DTYPE: tl.constexpr = y.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)[:, None]
    rows, start = tl.minimum(n, OUT - 1).to(tl.int64), tl.program_id(1) * BK
    unit = start // FIELDS + tl.arange(0, BK // FIELDS)[None, :]
    inside = (unit < IN // FIELDS) & (n < OUT)
    fetched, factor = None, None
    if s.step_scaled:
        fetched = load_scales(weights, rows, start, s)
    at = (rows, rows // GROUP, unit)
    numbers = load_numbers(weights, third, fetched, at, inside, start, s, DTYPE)
    if s.row_scaled:
        scale = weights.scale_step if s.kind == "nvfp4" else weights.scale
        factor = tl.load(scale + rows).to(tl.float32)
    for field in tl.static_range(FIELDS):
        number = weight_field(numbers, field, s, DTYPE)
        if s.kind != "fp8b":  # its factor has what its numbers lack
            number = finish(number.to(tl.float32), factor, s.kind, DTYPE).to(DTYPE)
        k = number_of_field(unit, field, s)
        tl.store(y + rows * IN + k, number, mask=inside)


def unpack_rows(
    parts: dict[str, Tensor], kind: str, bits: int, group: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Unpack parts of a weight [1, out, in] -> [out, in] in the order of `Format.grouped_order`.

    kind, bits, group: as of `grouped_gemm`. width: in. dtype: of 16 bits.
    """
    weights, third, bits, group = prompt_operands(parts, kind, bits, group)
    out = parts["codes"].shape[1]
    y = torch.empty(out, width, dtype=dtype, device=parts["codes"].device)
    s = PromptSettings(out, width, 1, kind, bits, group, TILE)
    grid = triton.cdiv(out, TILE.outputs), triton.cdiv(width, TILE.numbers)
    launch(_unpack_rows, grid, weights, third, y, settings=s, warps=TILE.warps)
    return y
