"""Products of one token's experts: gate and up, then down.

    gate_up          the choice of experts, their gate and up products, and the activation
    multiply_each    the products of given experts, with an activation or without
    down             the down products, times the routing weights, summed, plus residual

`_multiply_each` computes the first two, a row of results for each expert. `down` launches
`_multiply_sum` of ops/products/dense.py, whose result is one row. Shared experts are chosen
experts, too: their weights are stacked after those of the E others.

A layer with small experts waits for its kernels, not for memory: a kernel costs the time of its
bytes plus 1.6 us on an H200. So there are few kernels, and each has all of its loads in flight at
once. ops/README.md has the rules of what a kernel may read before the previous one has ended (PDL).

Several tokens have other kernels: ops/products/expert_tiles.py.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.declared import SWIGLU, Activation, Routing
from ops.launch import jit, launch, tl
from ops.products.codes import activate, e2m1_table, row_scale
from ops.products.dense import launch_sum
from ops.products.pipeline import (
    Chosen,
    Operand,
    Product,
    load_part,
    load_weights,
    multiply_tile,
    operand_of,
    operands_of,
    prepare,
    replace,
    result_rows,
    settings_of,
    sum_lanes,
)
from ops.products.quantized_x import QuantizedX, quantize_token, quantizes_first
from ops.products.routing import ChoiceSettings, choice_of, choose, choose_one
from ops.products.tilings import Tiles
from ops.products.weights import Weight, check_rows
from ops.ranks.mailbox import TokenInbox

# Kernels ------------------------------------------------------------------------------------------


@jit
def _find_expert(scores, pair, s: tl.constexpr, WARPS: tl.constexpr):
    """Return the expert of a pair, int64: chosen by scores, or shared."""
    if s.shared == 0:
        expert = choose_one(scores, pair, s, WARPS).to(tl.int64)
    else:
        expert = (s.E - s.active + pair).to(tl.int64)
        if pair < s.active:
            expert = choose_one(scores, pair, s, WARPS).to(tl.int64)
    return expert


@dataclass(frozen=True)
class EachSettings(Product):
    """Settings of `_multiply_each`."""

    pairs_of_row: int = 0  # pairs that multiply the same row of x; 0: all
    activation: Activation | None = None  # of gate and up
    routing: ChoiceSettings | None = None


@jit
def _activate(gate, up, s: tl.constexpr):
    KIND: tl.constexpr = s.kind
    LIMIT: tl.constexpr = s.limit
    ALPHA: tl.constexpr = s.alpha
    return activate(gate, up, KIND, LIMIT, ALPHA)


# Grid [R, N]: a program computes TILES tiles, every R-th one. A tile is ROWS rows of one expert's
# result, with two loads gate and up. If there are several, x stays in registers, and the next
# tile's weights are loaded while this one's are multiplied.
#
# Weights depend on an index or scores that the previous kernel wrote, so nothing is loaded before
# the wait. All loads then start at once: the tile's first DEPTH chunks, and their x.
#
# With scores each program finds its expert in them, and the grid has one more row of programs,
# R + 1, whose first stores the whole choice for the next kernel. S shared experts, from E on,
# follow the A chosen ones.
#
# One function: its order of loads and waits decides its speed.
@jit
def _multiply_each(x, choice, weights, bias, h, unknown_zero, s: tl.constexpr, PDL: tl.constexpr):
    CHOOSE: tl.constexpr = choice.scores is not None
    I: tl.constexpr = s.out // s.loads  # rows of the result
    ROWS: tl.constexpr = s.rows
    TILES: tl.constexpr = s.tiles
    DEPTH: tl.constexpr = s.depth
    HELD: tl.constexpr = s.held
    CHUNKS: tl.constexpr = s.chunks
    ROUTING: tl.constexpr = s.routing
    ACTIVATION: tl.constexpr = s.activation
    WARPS: tl.constexpr = s.warps
    multiplying = tl.num_programs(0) - CHOOSE  # programs of a pair
    pair = tl.program_id(1)
    # The last tiles begin early enough to be whole: some rows are computed twice.
    row = tl.minimum(tl.program_id(0) * ROWS, I - ROWS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if CHOOSE:
        if tl.program_id(0) == multiplying:
            if pair == 0:
                choose(choice.scores, None, choice.indices, choice.weights, ROUTING)
            return
        expert = _find_expert(choice.scores, pair, ROUTING, WARPS)
    else:
        expert = tl.load(choice.indices + pair).to(tl.int64)
    if s.pairs_of_row:
        NUMBERS: tl.constexpr = s.quads * 4 * (1 if s.kind == "bf16" else s.fields)
        x = Operand(x.numbers + pair // s.pairs_of_row * NUMBERS, x.units, x.norm)
    tiles, xs, besides = (), (), ()
    for d in tl.static_range(DEPTH):
        tiles = tiles + (load_weights(weights, expert, row, d, s),)
    for d in tl.static_range(HELD):
        xs = xs + (load_part(x, d, s),)
        besides = besides + ((),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    table = e2m1_table(unknown_zero) if s.kind == "mxfp4" else None
    rows, stores = result_rows(s)
    if TILES > 1:
        for c in tl.static_range(CHUNKS):
            xs = replace(xs, c, prepare(xs[c], (), x, s))
    for n in range(TILES):
        flat = expert * s.out + row + rows
        if s.of_rows:
            factor = row_scale(weights.scale, flat, s)
            if s.loads == 2:
                up_factor = row_scale(weights.scale, I + flat, s)
        if bias is not None:
            add = tl.load(bias + flat).to(tl.float32)
            if s.loads == 2:
                up_add = tl.load(bias + I + flat).to(tl.float32)
        next_row = tl.minimum((tl.program_id(0) + (n + 1) * multiplying) * ROWS, I - ROWS)
        more, both = n + 1 < TILES, (row, next_row)
        gate, up, _, tiles = multiply_tile(
            x, weights, (expert, None), tiles, (xs, besides), table, both, more, s
        )
        gate = sum_lanes(gate, s)
        if s.loads == 2:
            up = sum_lanes(up, s)
        if s.of_rows:
            gate *= factor
            if s.loads == 2:
                up *= up_factor
        if bias is not None:
            gate += add
            if s.loads == 2:
                up += up_add
        out = h + pair * I + row + rows
        if s.loads == 2:
            gate = _activate(gate, up, ACTIVATION)
        tl.store(out, gate.to(h.dtype.element_ty), mask=stores)
        row = next_row


# Launching ----------------------------------------------------------------------------------------


def gate_up(
    x: Tensor | QuantizedX,
    weight: Weight,
    scores: Tensor,
    routing: Routing,
    activation: Activation = SWIGLU,
    tiles: Tiles | None = None,
    pdl: bool | None = None,
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts by the scores of `norm_router`, and multiply x [1, D] by their w13.

    Return h [A + S, I], gated, expert_indices int64 and expert_weights fp32 [1, A + S]. The
    references are `MoE.route`, or `SigmoidRoutedMoE.route`, and `ExpertLinear.gather_gated`.

    x may be a `QuantizedX` of this weight. weight [E + S, 2 I, D], shared experts last. bias
    [E, 2 I]: added before the activation. dtype: of h; default x.dtype. pdl: None launches with PDL
    where the GPU has it. indices [1, A + S]: where to store those of experts, -1 before
    (`norm_router`); default: new.
    """
    if indices is None:
        indices = torch.full((1, routing.pairs), -1, dtype=torch.int64, device=scores.device)
    weights = torch.empty(1, routing.pairs, dtype=torch.float32, device=scores.device)
    choice = Chosen(indices, scores, weights)
    settings = choice_of(weight.parts[0].shape[0] - routing.shared, routing)
    h = _launch_each(x, weight, choice, bias, (activation, dtype, tiles, pdl), routing=settings)
    return h, indices, weights


def multiply_each(
    x: Tensor,
    weight: Weight,
    indices: Tensor,
    activation: Activation | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiles: Tiles | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Multiply x [M, D] by the weights [E, out, D] of given experts, N indices -> [N, out].

    Pair n multiplies row n // (N // M) of x. activation: of gate and up, the halves of the
    weight's rows -> [N, out / 2], as `gate_up`. The others: as of `gate_up`.
    """
    check_rows("x", x, len(x), weight.width)
    pairs_of_row = indices.numel() // len(x) if len(x) > 1 else 0
    how = activation, dtype, tiles, pdl
    return _launch_each(x, weight, Chosen(indices), bias, how, pairs_of_row=pairs_of_row)


def _launch_each(
    x: Tensor | QuantizedX,
    weight: Weight,
    choice: Chosen,
    bias: Tensor | None,
    how: tuple[Activation | None, torch.dtype | None, Tiles | None, bool | None],
    **fields,
) -> Tensor:
    """Launch `_multiply_each`. how: activation, dtype, tiles, pdl. fields: of `EachSettings`."""
    activation, dtype, tiles, pdl = how
    pairs = choice.indices.numel()
    check_rows("bias", bias, len(weight.parts[0]), weight.out)
    fields |= dict(loads=1 if activation is None else 2, activation=activation)
    settings, grid, options = settings_of(EachSettings, weight, 0, tiles, pairs, **fields)
    h = torch.empty(
        pairs, weight.out // settings.loads, dtype=dtype or x.dtype, device=choice.indices.device
    )
    chooses = choice.scores is not None
    operands = operands_of(x, weight), choice, weight.tensors, bias, h, 0
    grid = grid[0] + chooses, pairs
    launch(_multiply_each, grid, *operands, settings=settings, pdl=pdl, **options)
    return h


def down(
    x: Tensor | QuantizedX,
    weight: Weight,
    indices: Tensor,
    routing: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    send: TokenInbox | None = None,
    tiles: Tiles | None = None,
    pdl: bool | None = None,
) -> Tensor | None:
    """Sum one token's experts: x [A, I], weight w2 [E, D, I], indices and routing [1, A] -> [1, D].

    The reference is `weighted_sum(w2.gather(x, ...))`, then as in `dense_product`. bias [E, D].
    Long x of weights in 4 bits is quantized here, by a kernel of its own.

    With PDL, the residual is loaded before the wait: the previous kernel must not write it. Codes
    that are multiplied as integers are loaded before the wait, too. Their kernel polls the indices,
    which are -1 until `gate_up` has stored them. If x is a `QuantizedX`, the previous kernel made
    it, and must not write the indices, their weights, or the residual.
    """
    experts = indices.numel()
    if isinstance(x, Tensor):
        check_rows("x", x, experts, weight.width)
    if isinstance(x, Tensor) and quantizes_first(weight, experts * weight.quads):
        x = quantize_token(operand_of(x, weight), weight, pdl)
    check_rows("residual", residual, 1, weight.out)
    check_rows("bias", bias, len(weight.parts[0]), weight.out)
    y = torch.empty(1, weight.out, dtype=dtype or x.dtype, device=indices.device)
    choice, how = Chosen(indices, weights=routing), (tiles, pdl, {"scale": scale})
    return launch_sum(operands_of(x, weight), weight, choice, residual, bias, y, send, how)
