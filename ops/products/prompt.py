"""Products of prompts: rows sorted by expert times stacked weights, plain or packed (grouped GEMM).

`F.grouped_mm` takes plain weights only; unpacking the weights of all experts first would use the
memory that packing saved. This kernel decodes each tile in registers. It also multiplies plain
weights if experts have few rows, for which the library reads at half of the memory's bandwidth.

Codes are loaded as units of 16 bits (ops/products/units.py). Only the left operand of a tensor core
can come from registers, so packed weights are the left operand and the sums are transposed at the
end. Formats are in formats/; tests compare the kernel with their `unpack`.

Letters: N rows of x, E experts. A tile has BM rows of x and BN outputs; a step covers BK numbers
along `in`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.gpu import gpu_of
from ops.inductor import custom_op
from ops.launch import can_launch, fit, jit, launch, tl, triton, try_kernels
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

# Average rows of x for each expert, up to which the kernel is faster than the library with plain
# weights (H100; more were not measured).
FEW_ROWS = 128
GROUPED = "grouped GEMM"  # begins the names by which `try_kernels` knows uses of the kernel


# Tiles --------------------------------------------------------------------------------------------


@jit
def _find_expert(tile, group_ends, s: tl.constexpr):
    """Find a tile's expert; E if there is none. Also return the arguments of `_find_rows`.

    Each expert has the tiles that its rows need; the next expert's tiles follow them.
    """
    E: tl.constexpr = s.E
    BINS: tl.constexpr = s.experts_pow2
    BM: tl.constexpr = s.tile.rows
    experts = tl.arange(0, BINS)
    ends = tl.load(group_ends + experts, mask=experts < E, other=0)
    starts = tl.load(group_ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles = (tl.maximum(ends - starts, 0) + BM - 1) // BM
    last = tl.cumsum(tiles, 0)
    expert = tl.sum(((last <= tile) & (experts < E)).to(tl.int32))
    return expert, (experts, starts, ends, tiles, last)


@jit
def _find_rows(tile, expert, groups, s: tl.constexpr):
    """Return the first row of x of a tile, and the end of the expert's rows."""
    BM: tl.constexpr = s.tile.rows
    experts, starts, ends, tiles, last = groups
    mine = experts == expert
    tile -= tl.sum(tl.where(mine, last - tiles, 0))
    return tl.sum(tl.where(mine, starts, 0)) + tile * BM, tl.sum(tl.where(mine, ends, 0))


@jit
def _multiply_fields(sums, numbers, x_tile, s: tl.constexpr):
    """Add the products of all fields of packed units [BN, n] with x to the sums [BN, BM]."""
    FIELDS: tl.constexpr = s.fields
    IN: tl.constexpr = s.width
    BK: tl.constexpr = s.tile.numbers
    x, rows, present, unit = x_tile
    # One product per field: a tensor core reads the registers of its operand until the kernel
    # waits for it, and the compiler waits before it decodes the next field. It cut a single product
    # of all fields into several, and Triton 3.6 wrote to registers that were still being read.
    for field in tl.static_range(FIELDS):
        k = number_of_field(unit, field, s)
        inside = present & (k < IN) if IN % BK else present
        a = tl.load(x + rows * IN + k, mask=inside, other=0.0)
        b = weight_field(numbers, field, s, x.dtype.element_ty)
        sums = tl.dot(b, tl.trans(a), sums, input_precision="ieee")
    return sums


@jit
def _multiply_plain(sums, weight, weight_rows, inside, x_tile, s: tl.constexpr):
    """Add the product of x with plain weights to the sums [BM, BN]."""
    IN: tl.constexpr = s.width
    BK: tl.constexpr = s.tile.numbers
    x, rows, present, k = x_tile
    x_inside = present & (k < IN) if IN % BK else present
    a = tl.load(x + rows * IN + k, mask=x_inside, other=0.0)
    b = tl.load(weight + weight_rows * IN + k, mask=inside)
    return tl.dot(a, tl.trans(b), sums, input_precision="ieee")


@jit
def _store_tile(y, sums, scale, rows, present, n, s: tl.constexpr, DTYPE: tl.constexpr):
    """Store the sums of outputs n [BN]. scale: of the expert's rows, for int8, fp8 and nvfp4."""
    OUT: tl.constexpr = s.out
    KIND: tl.constexpr = s.kind
    sums = tl.trans(sums) if s.packed else sums
    factor = None
    if s.row_scaled:
        factor = tl.load(scale + tl.minimum(n, OUT - 1)).to(tl.float32)[None, :]
    if KIND != "fp8b":  # its factor has what its numbers lack
        sums = finish(sums, factor, KIND, DTYPE)
    place = y + rows.to(tl.int64) * OUT + n[None, :]
    tl.store(place, sums.to(y.dtype.element_ty), mask=present & (n < OUT)[None, :])


@jit
def _compute_tile(tensors, expert, first, end, block, BM: tl.constexpr, s: tl.constexpr):
    """Compute a tile of BM rows of x from `first` on, of which those before `end` are present."""
    OUT: tl.constexpr = s.out
    IN: tl.constexpr = s.width
    FIELDS: tl.constexpr = s.fields
    GROUP: tl.constexpr = s.group
    BN: tl.constexpr = s.tile.outputs
    BK: tl.constexpr = s.tile.numbers
    x, y, weights, third, pairs = tensors
    DTYPE: tl.constexpr = x.dtype.element_ty
    rows = first + tl.arange(0, BM)[:, None]
    present = rows < end
    x_rows = rows.to(tl.int64)
    if pairs is not None:
        x_rows = tl.load(pairs + rows, mask=present, other=0).to(tl.int64) // s.active
    n = block * BN + tl.arange(0, BN)
    weight_rows = expert.to(tl.int64) * OUT + tl.minimum(n, OUT - 1)[:, None]
    scale_rows = expert * tl.cdiv(OUT, GROUP) + tl.minimum(n, OUT - 1)[:, None] // GROUP
    sums = tl.zeros([BN, BM] if s.packed else [BM, BN], tl.float32)
    fetched = None
    if s.step_scaled:  # prefetched one step ahead: too small for the compiler to pipeline
        fetched = load_scales(weights, weight_rows, 0, s)
    for start in range(0, IN, BK):
        unit = start // FIELDS + tl.arange(0, BK // FIELDS)[None, :]
        inside = unit < IN // FIELDS if IN % BK else None
        x_tile = (x, x_rows, present, unit)
        if s.packed:
            at = (weight_rows, scale_rows, unit)
            numbers = load_numbers(weights, third, fetched, at, inside, start, s, DTYPE)
            if s.step_scaled:
                fetched = load_scales(weights, weight_rows, start + BK, s)
            sums = _multiply_fields(sums, numbers, x_tile, s)
        else:
            sums = _multiply_plain(sums, weights.codes, weight_rows, inside, x_tile, s)
    scale = weights.scale_step if s.kind == "nvfp4" else weights.scale
    if s.row_scaled:
        scale += expert.to(tl.int64) * OUT
    _store_tile(y, sums, scale, rows, present, n, s, DTYPE)


# Grid [blocks, T, out / BN / blocks]: a program computes one tile, of BM rows of x of an expert and
# BN outputs, in steps of BK numbers along `in`. T is an upper bound of the tiles of all experts.
# Programs that run side by side share rows of x and an expert's weights, which L2 then holds.
@jit
def _grouped(x, y, group_ends, weights, third, pairs, s: tl.constexpr):
    BM: tl.constexpr = s.tile.rows
    TAIL: tl.constexpr = s.tile.tail
    tile, block = tl.program_id(1), tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    expert, groups = _find_expert(tile, group_ends, s)
    if expert < s.E and block * s.tile.outputs < s.out:
        first, end = _find_rows(tile, expert, groups, s)
        tensors = (x, y, weights, third, pairs)
        if TAIL < BM:
            if end - first <= TAIL:
                _compute_tile(tensors, expert, first, end, block, TAIL, s)
            else:
                _compute_tile(tensors, expert, first, end, block, BM, s)
        else:
            _compute_tile(tensors, expert, first, end, block, BM, s)


# Launching ----------------------------------------------------------------------------------------


def choose_prompt_tile(N: int, E: int, bits: int, width: int) -> PromptTile:
    """Return the fastest tile for N rows of E experts, as measured by benchmarks/grouped.py.

    Small tiles for few rows an expert: most rows of a large tile would be empty. Measured on an
    H100; bits other than 4 and 16 on an H200, with all rows of x before the next outputs.
    """
    rows = next((rows for rows in (16, 32, 64) if rows * E >= N), 128)
    if bits == 4:
        if rows == 16:
            return PromptTile(rows, 128, 256 if width % 256 == 0 else 128, 4)
        if rows == 64:  # most experts' last rows are fewer
            return PromptTile(128, 128, 128, 8, tail=64)
        return PromptTile(rows, 128, 128, 8, tail=max(16, rows // 4))
    rows = max(rows, 64) if rows > 16 else rows
    if bits >= 16:  # plain weights: long rows read fast
        if rows == 16:
            return PromptTile(rows, 64, 4096 // bits, 4)
        return PromptTile(rows, 128, 1024 // bits, 4 if rows == 64 else 8, tail=rows // 4)
    if bits == 8:
        return PromptTile(rows, 128, 64, 4, 4, near=1)
    # Decoding fewer bits takes longer: with many rows an expert, decode once for more of them.
    rows = 256 if N >= 256 * E else rows
    # A field's 16 x 16 numbers of x would be 2 bytes a lane, which cannot be copied asynchronously.
    return PromptTile(rows, 128, 256 if rows == 16 else 128, 8, near=1)


def smaller_tiles(tile: PromptTile) -> Iterator[PromptTile]:
    """Yield the tile, then those that take less shared memory.

    Fewer rows of x come first, down to 64: fewer stages would hide less of the loads' latency.
    """
    sizes = [rows for rows in (256, 128, 64, 32, 16) if rows <= tile.rows]
    for several in (True, False):
        for stages in range(tile.stages, 1, -1):
            for rows in (rows for rows in sizes if (rows >= 64) is several):
                yield replace(tile, rows=rows, stages=stages)


def grid_of(tiles: int, blocks: int, near: int) -> tuple[int, int, int]:
    """Return the grid of `_grouped`, in which at most `near` blocks of outputs are neighbors."""
    times = triton.cdiv(blocks, near)
    return triton.cdiv(blocks, times), tiles, times


def grouped_gemm(
    x: Tensor,
    group_ends: Tensor,
    parts: dict[str, Tensor],
    kind: str,
    bits: int,
    group: int,
    *,
    pairs: Tensor | None = None,
    active: int = 1,
    tile: PromptTile | None = None,
) -> Tensor:
    """Multiply rows x [N, in], sorted by expert, by their experts' weights -> [N, out].

    Rows of expert e end before group_ends[e]. parts: tensors of a packed weight [E, out, ...] of
    this kind, bits and group; the numbers of x are then in the order of `Format.grouped_order`.
    For kind "plain", codes are weights of x's dtype and bits is 16 or 32.

    pairs int64 [N]: row n is token pairs[n] // active of x [T, in], so that no kernel copies tokens
    for each expert. tile: replaces `choose_prompt_tile`.
    """
    (N, width), (E, out, _) = x.shape, parts["codes"].shape
    N = N if pairs is None else len(pairs)
    y = x.new_empty(N, out)
    tensors, third, bits, group = prompt_operands(parts, kind, bits, group)
    given = x.contiguous(), y, group_ends, tensors, third, pairs
    tiles = [tile]
    if tile is None:
        chosen = choose_prompt_tile(N, E, bits, width)
        if x.element_size() == 4:  # no tensor cores: larger tiles spill
            chosen = replace(chosen, rows=min(chosen.rows, 64))
        tiles = smaller_tiles(chosen)
    candidates = (
        (
            PromptSettings(out, width, E, kind, bits, group, t, active),
            dict(warps=t.warps, stages=t.stages),
        )
        for t in tiles
    )
    s, options = next(candidates) if tile else fit(_grouped, candidates, *given)
    assert isinstance(s, PromptSettings)
    tiles = min(N, triton.cdiv(N, s.tile.rows) + E)
    grid = grid_of(tiles, triton.cdiv(out, s.tile.outputs), s.tile.near)
    launch(_grouped, grid, *given, settings=s, **options)
    return y


def prefers_kernel(like: Tensor, N: int, E: int) -> bool:
    """Whether the kernel is faster than the library with N rows of E experts' plain weights."""
    has_library = like.dtype is torch.bfloat16 and gpu_of(like.device).has_grouped_mm
    return can_launch(like) and (N <= FEW_ROWS * E or not has_library)


@custom_op("moe_fast::grouped_mm")
def grouped_mm(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    """Multiply x [N, in] by weight [E, out, in], by int32 group_ends [E] -> [N, out].

    Rows of x and of the weight are multiples of 16 bytes. A custom operator around
    `F.grouped_mm`: Inductor compiles that on a CPU in bf16 only. On a GPU the library's tiles are
    for many rows: with few it reads at half of the memory's bandwidth. In other dtypes than bf16
    it loops over the experts and synchronizes with the host, on most GPUs in bf16 too.
    """
    if prefers_kernel(x, len(x), len(weight)):
        return try_kernels(GROUPED, _multiply, _multiply_by_library, x, weight, group_ends)
    return _multiply_by_library(x, weight, group_ends)


def _multiply(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    return grouped_gemm(x, group_ends, {"codes": weight}, "plain", 8 * x.element_size(), 1)


def _multiply_by_library(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=group_ends)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])
