"""Dense packed weights of a prompt's chunk: unpacked once, then multiplied by the library.

With many tokens the library's product is faster than `_grouped` by more than unpacking takes. The
weight is a temporary of one product.

Letters: a program unpacks BN rows, and BK numbers of each.
"""

import torch.nn.functional as F
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

# More rows of x than this are multiplied by the library, which is faster from 80 on (H200; fewer
# were not measured).
MANY_ROWS = 64
TILE = PromptTile(1, 16, 512, 4)


# Grid [out / BN, in / BK].
@jit
def _unpack(weights, y, s: tl.constexpr):
    FIELDS: tl.constexpr = s.fields
    DTYPE: tl.constexpr = y.dtype.element_ty
    n = tl.program_id(0) * s.tile.outputs + tl.arange(0, s.tile.outputs)[:, None]
    row, start = tl.minimum(n, s.out - 1).to(tl.int64), tl.program_id(1) * s.tile.numbers
    unit = start // FIELDS + tl.arange(0, s.tile.numbers // FIELDS)[None, :]
    inside, fetched, factor = unit < s.width // FIELDS, None, None
    if s.step_scaled:
        fetched = load_scales(weights, row, start, s)
    at = (row, row // s.group, unit)
    numbers = load_numbers(weights, fetched, at, inside, start, s, DTYPE)
    if s.has_row_scale:
        scale = weights.scale_step if s.kind == "nvfp4" else weights.scale
        factor = tl.load(scale + row).to(tl.float32)
    for field in tl.static_range(FIELDS):
        number = weight_field(numbers, field, s, DTYPE).to(tl.float32)
        if s.kind != "fp8b":  # its factor has what its numbers lack
            number = finish(number, factor, s.kind, DTYPE)
        place = y + row * s.width + number_of_field(unit, field, s)
        tl.store(place, number.to(DTYPE), mask=inside & (n < s.out))


def multiply_unpacked(
    x: Tensor, parts: dict[str, Tensor], kind: str, bits: int, group: int
) -> Tensor:
    """x [N, in] in `Format.grouped_order`, parts of a weight [1, out, in] -> [N, out].

    The weight is dequantized to 16 bits, with the numbers of a row in the order of x.
    """
    out, width = parts["codes"].shape[1], x.shape[1]
    y = x.new_empty(out, width)
    tensors, bits, group = prompt_operands(parts, kind, bits, group)
    s = PromptSettings(out, width, 1, kind, bits, group, TILE)
    grid = triton.cdiv(out, TILE.outputs), triton.cdiv(width, TILE.numbers)
    launch(_unpack, grid, tensors, y, settings=s, warps=TILE.warps)
    return F.linear(x, y)
