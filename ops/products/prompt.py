"""Products of prompts: rows sorted by expert times stacked weights, plain or packed (grouped GEMM).

`F.grouped_mm` takes plain weights only; unpacking the weights of all experts first would use the
memory that packing saved. This kernel decodes each tile in registers. It also multiplies plain
weights if experts have few rows, for which the library reads at half of the memory's bandwidth.

Codes are loaded as units of 16 bits (ops/products/units.py). Only the left operand of a tensor core
can come from registers, so packed weights are the left operand and the sums are transposed at the
end. Formats are in formats/; tests compare the kernel with their `unpack`.

Gate and up of experts are one product, whose result is the activation of both: a tile has rows of
gate and of up side by side.

Letters: N rows of x, E experts. A tile has BM rows of x and BN outputs; a step covers BK numbers
along `in`.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.declared import Activation
from ops.gpu import gpu_of
from ops.inductor import custom_op
from ops.launch import can_launch, check_shapes, fit, jit, launch, tl, try_kernels
from ops.products.codes import activate
from ops.products.prompt_weights import (
    SMALL,
    WIDE,
    PromptSettings,
    PromptTile,
    finish_numbers,
    load_numbers,
    load_scales,
    load_words,
    number_of_field,
    prompt_operands,
    scale_factors,
    weight_field,
)
from ops.products.weights import GGUF, WeightTensors
from ops.sizes import cdiv


class Speed(NamedTuple):
    """How fast plain weights are multiplied in bf16: fitted to products on an H200."""

    flops: float  # FLOP/s of full tiles with long rows
    empty_rows: int  # mean number in an expert's last tile
    begin: int  # numbers along `in` that take as long as the begin and end of a tile


KERNEL = Speed(520e12, 16, 0)
LIBRARY = Speed(770e12, 64, 350)
BYTES_PER_SECOND = 4e12  # of kernels that only read and write rows
GROUPED = "grouped GEMM"  # begins the names by which `try_kernels` knows uses of the kernel


@jit
def _find_rows(tile, group_ends, N, s: tl.constexpr):
    """Return a tile's expert, its first row of x, and the end of the expert's rows.

    Without group_ends one expert has all N rows.

    Expert e has the tiles from starts[e] // BM + e on, as many as its rows may need: the next
    expert's begin at ends[e] // BM + e + 1. So a comparison with all ends finds the expert. Up to
    one tile an expert has no rows. With s.merged, a last tile has none if the tile before computes
    them.
    """
    expert, start, end = tl.full([], 0, tl.int32), 0, N
    if group_ends is not None:
        experts = tl.arange(0, s.experts_pow2)
        ends = tl.load(group_ends + experts, mask=experts < s.E, other=0)
        before = (ends // s.tile.rows + experts < tile) & (experts < s.E)
        expert = tl.sum(before.to(tl.int32))
        start = tl.load(group_ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(group_ends + expert, mask=expert < s.E, other=0)
    first = start + (tile - start // s.tile.rows - expert) * s.tile.rows
    if s.merged:
        end = tl.where((first > start) & (end - first <= s.tile.tail), first, end)
    return expert, first, end


@jit
def _find_x(pairs, first, end, COUNT: tl.constexpr, s: tl.constexpr):
    """Return COUNT rows of results, whether these are before `end`, and their rows of x."""
    rows = first + tl.arange(0, COUNT)[:, None]
    present, x_rows = rows < end, rows.to(tl.int64)
    if pairs is not None:
        x_rows = tl.load(pairs + rows, mask=present, other=0).to(tl.int64) // s.active
    return rows, present, x_rows


@jit
def _load_rows(x, rows, present, k, inside, s: tl.constexpr):
    """Load numbers k of rows of x, 0 where rows or numbers are not inside; None: all k are."""
    if inside is not None:
        present = present & inside
    return tl.load(x + rows * s.width + k, mask=present, other=0.0)


@jit
def _find_outputs(block, columns, s: tl.constexpr):
    """Return which results a block computes, and the rows of the weight that its tile has.

    Results are [BN], or of gate and up [BN / 2]. Of these each 8 rows of gates precede their 8 rows
    of ups: a lane has the sums of both, since a tensor core's result has rows 8 apart in a lane.
    """
    n = tl.arange(0, s.tile.outputs)
    result, shift = n, 0
    if s.gated:
        result, shift = n // 16 * 8 + n % 8, n // 8 % 2 * s.results
    row = tl.minimum(block * s.block + result, s.results - 1)
    if columns is not None:
        row = tl.load(columns + row)
    return block * s.block + tl.arange(0, s.block), row + shift


@jit
def _store_tile(y, sums, weights, bias, n, at, s: tl.constexpr, DTYPE: tl.constexpr):
    """Store the results of sums of rows n [BN] of all experts' weights.

    at: which rows of y [BM, 1], whether these are present, and which numbers of a row.
    """
    rows, present, results = at
    sums = tl.trans(sums) if s.packed else sums
    factor = None
    if s.has_row_scale:  # int8, fp8 and nvfp4
        scale = weights.scale_step if s.kind == "nvfp4" else weights.scale
        factor = tl.load(scale + n).to(tl.float32)[None, :]
    sums = finish_numbers(sums, factor, weights, s, DTYPE)
    if bias is not None:
        sums += tl.load(bias + n).to(tl.float32)[None, :]
    if s.gated:  # `_find_outputs` gives their order
        both = tl.reshape(sums, [sums.shape[0], s.tile.outputs // 16, 2, 8])
        gate, up = tl.split(tl.permute(both, (0, 1, 3, 2)))
        sums = tl.reshape(activate(gate, up, s.activation), [sums.shape[0], s.block])
    elif s.activation is not None:
        sums = activate(sums, sums, s.activation)
    place = y + rows.to(tl.int64) * s.results + results[None, :]
    tl.store(place, sums.to(y.dtype.element_ty), mask=present & (results < s.results)[None, :])


@jit
def _compute_tile(
    tensors, expert, first, end, block, BM: tl.constexpr, MORE: tl.constexpr, s: tl.constexpr
):
    """Compute a tile of BM rows of x from `first` on, of which those before `end` are present.

    MORE: as many rows after these are multiplied by the same decoded weights.
    """
    x, y, weights, pairs, columns, bias = tensors
    DTYPE: tl.constexpr = x.dtype.element_ty
    rows, present, x_rows = _find_x(pairs, first, end, BM, s)
    if MORE:
        more_rows, more_present, more_x = _find_x(pairs, first + BM, end, MORE, s)
        more_sums = tl.zeros([s.tile.outputs, MORE], tl.float32)
    results, outputs = _find_outputs(block, columns, s)
    n = expert.to(tl.int64) * s.out + outputs
    weight_rows = n[:, None]
    scale_rows = expert * tl.cdiv(s.out, s.group) + outputs[:, None] // s.group
    sums = tl.zeros([s.tile.outputs, BM] if s.packed else [BM, s.tile.outputs], tl.float32)
    # Two steps ahead, factors of other types than bf16 take more registers than are left.
    AHEAD: tl.constexpr = s.scales_ahead if tl.bfloat16 == DTYPE else min(s.scales_ahead, 1)
    factors, fetched = None, None
    if s.step_scaled and AHEAD > 0:
        fetched = load_scales(weights, weight_rows, 0, s)
    if s.step_scaled and AHEAD == 2:
        factors = scale_factors(fetched, weights, weight_rows, s, DTYPE)
        fetched = load_scales(weights, weight_rows, s.tile.numbers, s)
    for start in range(0, s.width, s.tile.numbers):
        unit = start // s.fields + tl.arange(0, s.tile.numbers // s.fields)[None, :]
        inside = unit < s.width // s.fields if s.width % s.tile.numbers else None
        if s.packed:
            own = factors
            if s.step_scaled and AHEAD < 2:
                scales = load_words(weights, weight_rows, start, s) if s.in_words else fetched
                own = scale_factors(scales, weights, weight_rows, s, DTYPE)
            numbers = load_numbers(weights, own, (weight_rows, scale_rows, unit), inside, start, s)
            if s.step_scaled and AHEAD == 2:
                factors = scale_factors(fetched, weights, weight_rows, s, DTYPE)
            if s.step_scaled and AHEAD > 0:
                fetched = load_scales(weights, weight_rows, start + AHEAD * s.tile.numbers, s)
            # One product per field: a tensor core reads the registers of its operand until the
            # kernel waits for it, and the compiler waits before it decodes the next field. It cut a
            # single product of all fields into several, and Triton 3.6 wrote to registers that were
            # still being read.
            for field in tl.static_range(s.fields):
                k = number_of_field(unit, field, s)
                a = _load_rows(x, x_rows, present, k, inside, s)
                b = weight_field(numbers, field, s, DTYPE)
                sums = tl.dot(b, tl.trans(a), sums, input_precision="ieee")
                if MORE:
                    a = _load_rows(x, more_x, more_present, k, inside, s)
                    more_sums = tl.dot(b, tl.trans(a), more_sums, input_precision="ieee")
        else:
            a = _load_rows(x, x_rows, present, unit, inside, s)
            # x has zeros outside, but zero times NaN is NaN.
            other = None if inside is None else 0.0
            b = tl.load(weights.codes + weight_rows * s.width + unit, mask=inside, other=other)
            sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    _store_tile(y, sums, weights, bias, n, (rows, present, results), s, DTYPE)
    if MORE:
        _store_tile(y, more_sums, weights, bias, n, (more_rows, more_present, results), s, DTYPE)


# Grid [blocks, T, out / BN / blocks]: a program computes one tile, of BM rows of x of an expert and
# BN outputs, in steps of BK numbers along `in`. T is the number of tiles of all experts, of which
# some have no rows.
# Programs that run side by side share rows of x and an expert's weights, which L2 then holds.
@jit(do_not_specialize=["N"])
def _grouped(x, y, group_ends, weights, pairs, columns, bias, N, s: tl.constexpr):
    tile, block = tl.program_id(1), tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    expert, first, end = _find_rows(tile, group_ends, N, s)
    if first < end and block * s.block < s.results:
        tensors = (x, y, weights, pairs, columns, bias)
        BM: tl.constexpr = s.tile.rows
        TAIL: tl.constexpr = s.tile.tail
        if TAIL < BM:
            if end - first <= TAIL:
                _compute_tile(tensors, expert, first, end, block, TAIL, 0, s)
            elif s.merged:
                if (end - first > BM) & (end - first <= BM + TAIL):
                    _compute_tile(tensors, expert, first, end, block, BM, TAIL, s)
                else:
                    _compute_tile(tensors, expert, first, end, block, BM, 0, s)
            else:
                _compute_tile(tensors, expert, first, end, block, BM, 0, s)
        else:
            _compute_tile(tensors, expert, first, end, block, BM, 0, s)


def word_scale_bits(tensors: WeightTensors, kind: str, width: int, group: int) -> int:
    """Return the bits of a group's scale, or 0 if `scale` or `step` begins within a word."""
    found = [part for part in (tensors.scale, tensors.step) if part is not None]
    if any(part.storage_offset() * part.element_size() % 4 for part in found) or not found:
        return 0
    if kind != "int4" and not gpu_of(tensors.codes.device).is_nvidia:
        return 0  # Triton 3.6 ends the process while it compiles those of mxfp4 for AMD's GPUs
    return 8 * tensors.scale.element_size() * tensors.scale.shape[-1] * group // width


def choose_prompt_tile(
    N: int, E: int, bits: int, width: int, kind: str = "", group: int = 128, out: int = WIDE
) -> PromptTile:
    """Return the fastest tile for N rows of E experts, as measured by benchmarks/grouped.py.

    Small tiles for few rows an expert: most rows of a large tile would be empty. Measured on an
    H100; bits other than 4 and 16 on an H200, with all rows of x before the next outputs.
    """
    rows = next((rows for rows in (16, 32, 64) if rows * E >= N), 128)
    if bits == 4 and kind in GGUF:
        if rows == 16:
            limit = None if kind == "iq4" else 168  # three programs at once; iq4 would spill
            return PromptTile(32, 128, 128, 4, tail=16, registers=limit)
        if rows == 64:  # two programs at once
            return PromptTile(128, 128, 128, 8, stages=2, tail=64, registers=128)
    if bits == 4 and rows > 64 and kind in (*GGUF, "nvfp4", "hqq"):
        # Decoding binds: the last rows share it. Two programs at once.
        options = dict(tail=16 if kind in ("q4_k", "q5_k") else 32, registers=128, merged=True)
        return PromptTile(128, 128, 128, 8, stages=2, **options)
    if bits == 4:
        if rows == 16:
            # mxfp4 would spill in fp16.
            numbers = 256 if width % 256 == 0 and kind != "mxfp4" else 128
            if kind == "int4" and N <= 8 * E and width >= 2048 and group >= 128:
                return PromptTile(16, 128, numbers, 4, registers=168)  # three programs at once
            if kind == "int4":  # weights of an expert with a few more rows are decoded once
                # Short rows have few steps: four programs at once.
                return PromptTile(32, 128, 128 if width < 1024 else numbers, 4, tail=16)
            return PromptTile(rows, 128, numbers, 4)
        if kind == "int4" and rows > 64 and E == 1 and out * width <= SMALL:
            return PromptTile(64, 64, 256 if width % 256 == 0 else 128, 4)
        if kind == "int4" and (rows == 64 or (rows > 64 and E == 1)):  # dense: as `unpacks_first`
            return PromptTile(64, 128, 128, 4, tail=16)
        if rows == 64:  # most experts' last rows are fewer
            return PromptTile(128, 128, 128, 8, tail=64)
        if kind == "mxfp4" and rows == 32:  # four programs at once
            return PromptTile(rows, 128, 128, 4, tail=16, registers=128)
        if kind == "mxfp4":  # twice the outputs: half of the copies of x
            return PromptTile(rows, 256, 128, 16, tail=32, registers=128)
        # Instructions bind few rows: 4 warps have fewer for each weight than 8. These kinds would
        # take all registers.
        few = rows == 32 and kind not in ("q5_k", "q6_k")
        return PromptTile(rows, 128, 128, 4 if few else 8, tail=max(16, rows // 4))
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


@cache  # making settings takes the host longer than a launch
def grouped_candidates(fields: tuple, alone: bool) -> list[tuple[PromptSettings, dict]]:
    """Return settings of these fields, and the options of their launches, for `fit`.

    Others follow with tiles that take less shared memory. alone: none do.
    """
    s = PromptSettings(*fields)
    tiles = [s.tile] if alone else smaller_tiles(s.tile)
    return [
        (replace(s, tile=t), dict(warps=t.warps, stages=t.stages, registers=t.registers))
        for t in tiles
    ]


def grouped_gemm(
    x: Tensor,
    group_ends: Tensor | None,
    parts: dict[str, Tensor],
    kind: str,
    bits: int,
    group: int,
    *,
    pairs: Tensor | None = None,
    active: int = 1,
    activation: Activation | None = None,
    bias: Tensor | None = None,
    columns: Tensor | None = None,
    tile: PromptTile | None = None,
) -> Tensor:
    """Multiply rows x [N, in], sorted by expert, by their experts' weights -> [N, out].

    Rows of expert e end before group_ends[e]; None: the weight is dense, and E is 1. parts: a
    packed weight [E, out, ...] of this kind, bits and group; the numbers of x are then in the order
    of `Format.grouped_order`. For kind "plain", codes are weights of x's dtype and bits is 16 or
    32.

    pairs, integers [N]: row n is token pairs[n] // active of x [T, in], so that no kernel copies
    tokens for each expert.

    activation: of the outputs, which is the result. One with a gate takes the first half of them as
    gates and the second half as ups -> [N, out / 2]. bias [E, out] is added before. columns int32
    [out or out / 2]: the order of a result's numbers, that of the next product's x; None: as they
    are. tile: replaces `choose_prompt_tile`.
    """
    (N, width), (E, out, _) = x.shape, parts["codes"].shape
    N = N if pairs is None else len(pairs)
    results = out // 2 if activation and activation.gated else out
    y = x.new_empty(N, results)
    if bias is not None:
        check_shapes(bias=(bias, (E, out)))
    if columns is not None:
        check_shapes(columns=(columns, (results,)))
    tensors, bits, group = prompt_operands(parts, kind, bits, group)
    rows = N if group_ends is None else None
    given = x.contiguous(), y, group_ends, tensors, pairs, columns, bias, rows
    chosen = tile
    if chosen is None:
        chosen = choose_prompt_tile(N, E, bits, width, kind, group, out)
        if x.dtype is not torch.bfloat16:  # decoding takes more registers
            fewer = dict(outputs=min(chosen.outputs, 128), warps=min(chosen.warps, 8))
            if kind in ("q5_k", "q6_k", "iq4"):
                fewer["numbers"] = min(chosen.numbers, 128)
            chosen = replace(chosen, **fewer, registers=None)
        if x.element_size() == 4:  # no tensor cores: larger tiles spill
            chosen = replace(chosen, rows=min(chosen.rows, 64))
    scale_bits = word_scale_bits(tensors, kind, width, group)
    fields = out, width, E, kind, bits, group, chosen, active, activation, scale_bits
    candidates = grouped_candidates(fields, tile is not None)
    s, options = candidates[0] if tile else fit(_grouped, candidates, *given)
    tiles, blocks = cdiv(N, s.tile.rows) + E - 1, cdiv(results, s.block)
    times = cdiv(blocks, s.tile.near)  # at most `near` blocks of outputs are neighbors
    launch(_grouped, (cdiv(blocks, times), tiles, times), *given, settings=s, **options)
    return y


def prefers_kernel(like: Tensor, N: int, weight: Tensor, fused: bool = False) -> bool:
    """Whether the kernel is faster than the library with N rows for plain weights [E, out, in].

    fused: beside the library's product, other kernels copy its rows and activate its results.

    The library multiplies faster, but only whole tiles of 128 rows, and an expert's last tile is
    half empty. With few rows an expert that is what counts, with more the kernels beside it. These
    take long compared with a product of few numbers: of small experts.
    """
    has_library = like.dtype is torch.bfloat16 and gpu_of(like.device).has_grouped_mm
    if not has_library or not can_launch(like):
        return can_launch(like)
    E, out, width = weight.shape

    def seconds(speed: Speed) -> float:
        """Return the time of an expert's rows."""
        return 2 * (N / E + speed.empty_rows) * out * (width + speed.begin) / speed.flops

    # The gathered rows are written; results are written, then read, and half as many are written.
    nbytes = N / E * 2 * (width + 2 * out) if fused else 0
    return seconds(KERNEL) <= seconds(LIBRARY) + nbytes / BYTES_PER_SECOND


@custom_op("moe_fast::grouped_mm")
def grouped_mm(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    """Multiply x [N, in] by weight [E, out, in], by int32 group_ends [E] -> [N, out].

    Rows of x and of the weight are multiples of 16 bytes. A custom operator around
    `F.grouped_mm`: Inductor compiles that on a CPU in bf16 only. On a GPU the library's tiles are
    for many rows: with few it reads at half of the memory's bandwidth. In other dtypes than bf16
    it loops over the experts and synchronizes with the host, on most GPUs in bf16 too.
    """
    library = partial(F.grouped_mm, x, weight.transpose(-2, -1), offs=group_ends)
    if not prefers_kernel(x, len(x), weight):
        return library()
    plain = {"codes": weight}, "plain", 8 * x.element_size(), 1
    return try_kernels(GROUPED, partial(grouped_gemm, x, group_ends, *plain), library)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])
