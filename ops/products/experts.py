"""Products of one token: dense ones, and those of its experts in two kernels.

A layer with small experts waits for its kernels, not for memory: a kernel costs the time of its
bytes plus 1.6 us on an H200. So there are few kernels, and each has all of its loads in flight at
once:

    norm_router    RMS norm and router scores: ops/products/join.py
    gate_up        the choice of experts, their gate and up products, and the activation
    down           the down products, times the routing weights, summed over experts, plus residual
    dense          any other product: `wo` plus residual, or `wqkv` with the norm of its input

`_multiply_each` computes the second, a row of results for each expert. `_multiply_sum` computes the
last two, one row of results. Shared experts are chosen experts, too: their weights are stacked
after those of the E others.

Programmatic dependent launch (PDL): a kernel calls gdc_wait before gdc_launch_dependents. When the
next one starts, the kernel two before that has therefore ended. It may read that one's results
before its wait: a residual, for instance.

A short kernel between a long one and a dense product is an exception. It calls
gdc_launch_dependents first, so that the product loads its weights during the long kernel. These
are a product with `early`, kernels that merge parts of attention, and `receive_add`. After them a
kernel must not read before its wait what the last two kernels write.

Several tokens have other kernels: ops/products/few_tokens.py has the dense product,
ops/products/expert_tiles.py the experts.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ops.declared import SWIGLU, Activation, Routing
from ops.launch import jit, launch, tl, triton
from ops.products.codes import activate, e2m1_table, row_scale
from ops.products.few_tokens import TILE, FewTiles, down_few
from ops.products.join import norm_tokens
from ops.products.operands import lane_squares
from ops.products.pipeline import (
    Operand,
    Product,
    load_beside,
    load_part,
    load_weights,
    multiply_tile,
    prepare,
    replace,
    result_rows,
    shared_rows,
    sum_lanes,
    sum_normed,
    sum_shared,
)
from ops.products.quantized_x import QuantizedX, quantize_token, quantizes_first
from ops.products.routing import ChoiceSettings, choice_of, choose, choose_one
from ops.products.tilings import Tiles, choose_tiles, chunks_of, programs_of
from ops.products.weights import Weight
from ops.ranks.mailbox import TokenInbox, find_outboxes, send_rows

# Kernels ------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """The chosen experts, or the scores by which a kernel chooses them."""

    indices: Tensor  # int64 [N]
    scores: Tensor | None = None  # the router's: then indices and weights are stored
    weights: Tensor | None = None  # fp32 [N], by which results are summed


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
    activation: str = ""  # of gate and up
    limit: float = 0.0
    alpha: float = 1.0
    routing: ChoiceSettings | None = None


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
@jit
def _multiply_each(x, choice, weights, bias, h, unknown_zero, s: tl.constexpr, PDL: tl.constexpr):
    CHOOSE: tl.constexpr = choice.scores is not None
    I: tl.constexpr = s.out // s.loads  # rows of the result
    ROWS: tl.constexpr = s.rows
    TILES: tl.constexpr = s.tiles
    DEPTH: tl.constexpr = s.depth
    HELD: tl.constexpr = s.held
    CHUNKS: tl.constexpr = s.chunks
    routing: tl.constexpr = s.routing
    multiplying = tl.num_programs(0) - CHOOSE  # programs of a pair
    pair = tl.program_id(1)
    # The last tiles begin early enough to be whole: some rows are computed twice.
    row = tl.minimum(tl.program_id(0) * ROWS, I - ROWS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if CHOOSE:
        if tl.program_id(0) == multiplying:
            if pair == 0:
                choose(choice.scores, None, choice.indices, choice.weights, routing)
            return
        expert = _find_expert(choice.scores, pair, routing, s.warps)
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
    rows, stores = result_rows(ROWS, s.lanes)
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
            gate = activate(gate, up, s.activation, s.limit, s.alpha)
        tl.store(out, gate.to(h.dtype.element_ty), mask=stores)
        row = next_row


@dataclass(frozen=True)
class SumSettings(Product):
    """Settings of `_multiply_sum`."""

    eps: float = 0.0  # of the norm of x
    scale: float = 1.0  # of the product and its bias
    early: bool = False  # the product waits at its end: x is an earlier kernel's result
    half: int = 0  # words between the halves of an inbox
    ranks: int = 0  # to which the result is sent


@jit
def _await_choice(indices, A: tl.constexpr):
    """Wait until the previous kernel has stored all indices, which were -1 before."""
    BLOCK: tl.constexpr = triton.next_power_of_2(A)
    pair = tl.minimum(tl.arange(0, BLOCK), A - 1)
    while tl.min(tl.load(indices + pair, volatile=True), 0) < 0:
        pass


@jit
def _load_biases(bias, choice, rows, s):
    """Load the biases of rows; with `gather` the sum of all experts' times routing weights."""
    A: tl.constexpr = s.experts
    if s.gather:
        biases = tl.zeros(rows.shape, tl.float32)
        for pair in tl.static_range(A):
            at = tl.load(choice.indices + pair) * s.out + rows
            biases += tl.load(bias + at).to(tl.float32) * tl.load(choice.weights + pair)
    else:
        biases = tl.load(bias + rows).to(tl.float32)
    return biases


# Grid [R]: a program computes TILES tiles of ROWS rows, as in `_multiply_each`. x is that of all
# chosen experts, one after the other (s.gather), or one row.
#
# The result is scale * (product + bias) + residual. An expert's bias has its routing weight.
#
# x is the previous kernel's result, and with experts their choice, too: then nothing but the
# residual is loaded before the wait. A dense product loads all but x. A `QuantizedX` comes from a
# kernel between: the choice is then of the kernel before that, which has ended, and needs no wait
# either. With POLLED the previous kernel stores the choice early, and this one waits for that
# alone: the indices are -1 until then. So weights are in flight while the previous kernel
# multiplies. In bf16 that is slower (docs/log/small_experts.md).
#
# With `early` x is the result of the kernel before the previous one: the product lets the next
# kernel start at once, and waits at its end. So the next kernel may start before the previous one
# has ended, and must not read its results before its own wait.
#
# With `send` the result is not stored in y, but sent to all ranks: ops/ranks/mailbox.py. A
# row that two programs compute is sent twice, with the same bits.
#
# One piece: its speed is the order of its loads and waits, which a reader should see whole.
@jit
def _multiply_sum(
    x, choice, residual, weights, bias, y, unknown_zero, send, s: tl.constexpr, PDL: tl.constexpr
):
    QUANTIZED: tl.constexpr = x.units is not None
    POLLED: tl.constexpr = PDL and s.gather and not QUANTIZED and s.integers
    AHEAD: tl.constexpr = QUANTIZED or POLLED or not s.gather  # weights are loaded before the wait
    ROWS: tl.constexpr = s.rows
    TILES: tl.constexpr = s.tiles
    DEPTH: tl.constexpr = s.depth
    HELD: tl.constexpr = s.held
    CHUNKS: tl.constexpr = s.chunks
    row = tl.minimum(tl.program_id(0) * ROWS, s.out - ROWS)
    rows, stores = shared_rows(ROWS)
    if residual is not None:
        add = tl.load(residual + row + rows, mask=stores, other=0.0)
    if PDL and not AHEAD:
        tl.extra.cuda.gdc_wait()
    if s.gather:
        experts, factors = choice.indices, choice.weights
    else:
        experts, factors = tl.program_id(0).to(tl.int64) * 0, None
    if POLLED:
        _await_choice(experts, s.experts)
    tiles, xs, besides = (), (), ()
    for d in tl.static_range(DEPTH):
        tiles = tiles + (load_weights(weights, experts, row, d, s, POLLED),)
    if POLLED:
        tl.extra.cuda.gdc_wait()
    for d in tl.static_range(HELD):
        besides = besides + (load_beside(x, factors, d, s),)
    # Loaded now, since in the end each program would wait a microsecond for it.
    if s.of_rows:
        factor = row_scale(weights.scale, row + rows, s)
    if bias is not None:
        biases = _load_biases(bias, choice, row + rows, s)
    if PDL:
        if AHEAD and not POLLED and not s.early:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for d in tl.static_range(HELD):
        xs = xs + (load_part(x, d, s),)
    if send is not None:
        outboxes, call = find_outboxes(send.slots, send.calls, s.half, s.ranks)
    table = e2m1_table(unknown_zero) if s.kind == "mxfp4" else None
    squares = tl.zeros([s.lanes // 32, 32], tl.float32)
    if TILES > 1:
        for c in tl.static_range(CHUNKS):
            if x.norm is not None:
                squares += lane_squares(xs[c], s)
            xs = replace(xs, c, prepare(xs[c], besides[c], x, s))
    for n in range(TILES):
        next_row = tl.minimum(
            (tl.program_id(0) + (n + 1) * tl.num_programs(0)) * ROWS, s.out - ROWS
        )
        more, both = n + 1 < TILES, (row, next_row)
        total, _, found, tiles = multiply_tile(
            x, weights, (experts, factors), tiles, (xs, besides), table, both, more, s
        )
        if x.norm is not None:
            total = sum_normed(total, squares if TILES > 1 else found, s.eps, s)
        else:
            total = sum_shared(total, s)
        if s.of_rows:
            total *= factor
        if bias is not None:
            total += biases
        if s.scale != 1.0:
            total *= s.scale
        if residual is not None:
            total += add.to(tl.float32)
        if PDL and s.early:
            tl.extra.cuda.gdc_wait()
        if send is not None:
            send_rows(total.to(y.dtype.element_ty), outboxes, call, row + rows, stores, s.ranks)
        else:
            tl.store(y + row + rows, total.to(y.dtype.element_ty), mask=stores)
        row = next_row
        if more:
            if residual is not None:
                add = tl.load(residual + row + rows, mask=stores, other=0.0)
            if s.of_rows:
                factor = row_scale(weights.scale, row + rows, s)
            if bias is not None:
                biases = _load_biases(bias, choice, row + rows, s)


# Launching ----------------------------------------------------------------------------------------


def operand_of(x: Tensor, weight: Weight) -> Tensor:
    """Return x as the kernel reads it. Raises ValueError for a wrong dtype."""
    if weight.kind == "bf16":
        if x.dtype != torch.bfloat16:
            raise ValueError(f"bf16 weights need bf16 x, not {x.dtype}")
        return x.view(torch.int32)
    if x.element_size() != 2:
        raise ValueError(f"packed weights need x of 16 bits, not {x.dtype}")
    return x


def operands_of(x: Tensor | QuantizedX, weight: Weight, norm: Tensor | None = None) -> Operand:
    """Return x, and the weight of its norm, as a kernel reads them."""
    if isinstance(x, QuantizedX):
        return Operand(x.operands, x.units)
    if norm is not None and norm.dtype != torch.float32:
        norm = operand_of(norm, weight)
    return Operand(operand_of(x, weight), norm=norm)


def settings_of(
    weight: Weight,
    experts: int,
    loads: int,
    tiles: Tiles | None,
    pairs: int = 1,
    stays: bool = True,
) -> tuple[dict, int, Tiles]:
    """Return the fields of `Product`, the programs of a pair, and the tiles of a product.

    experts: as in `Product`. pairs: results of the kernel. stays: programs may stay.
    """
    quads, rows_of_result = weight.quads * max(experts, 1), weight.out // loads
    tiles = tiles or choose_tiles(weight, quads, loads)
    rows = min(tiles.rows, triton.next_power_of_2(rows_of_result + 1) // 2)
    _, depth = chunks_of(quads, tiles)
    programs, each = triton.cdiv(rows_of_result, rows), 1
    if stays:
        programs, each = programs_of(tiles, programs, weight.multiprocessors, pairs)
    fields = dict(
        kind=weight.kind,
        group=weight.group,
        out=weight.out,
        each=weight.quads,
        experts=experts,
        loads=loads,
        rows=rows,
        lanes=tiles.lanes,
        depth=depth,
        tiles=each,
        warps=tiles.warps,
    )
    return fields, programs, tiles


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
    choice = Choice(indices, scores, weights)
    settings = choice_of(weight.parts[0].shape[0] - routing.shared, routing)
    h = _launch_each(x, weight, choice, activation, bias, dtype, tiles, pdl, routing=settings)
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
    pairs_of_row = indices.numel() // len(x) if len(x) > 1 else 0
    choice = Choice(indices)
    return _launch_each(
        x, weight, choice, activation, bias, dtype, tiles, pdl, pairs_of_row=pairs_of_row
    )


def _launch_each(
    x: Tensor | QuantizedX,
    weight: Weight,
    choice: Choice,
    activation: Activation | None,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    tiles: Tiles | None,
    pdl: bool | None,
    **settings,
) -> Tensor:
    loads, pairs = 1 if activation is None else 2, choice.indices.numel()
    fields, programs, tiles = settings_of(weight, 0, loads, tiles, pairs)
    if activation is not None:
        settings |= vars(activation) | {"activation": activation.kind}
        del settings["kind"]
    device = choice.indices.device
    h = torch.empty(pairs, weight.out // loads, dtype=dtype or x.dtype, device=device)
    launch(
        _multiply_each,
        (programs + (choice.scores is not None), pairs),
        operands_of(x, weight),
        choice,
        weight.tensors,
        bias,
        h,
        0,
        settings=EachSettings(**fields, **settings),
        pdl=pdl,
        **tiles.options,
    )
    return h


class Norm(NamedTuple):
    """The RMS norm of a product's x, which is not rounded."""

    weight: Tensor  # [in], fp32 or as x
    eps: float


def norm_apart(x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Norm | None]:
    """Return x [T, in] and its norm for `dense`: of many tokens the normed x, and None.

    Each program of a product norms all of its tokens: above TILE a kernel of its own is faster.
    """
    return (x, Norm(norm, eps)) if len(x) <= TILE else (norm_tokens(x, norm, eps), None)


def dense(
    x: Tensor,
    weight: Weight,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    early: bool = False,
    send: TokenInbox | None = None,
    tiles: Tiles | FewTiles | None = None,
    pdl: bool | None = None,
) -> Tensor | None:
    """scale * (norm(x) @ weight + bias) + residual: x [T, in], weight [out, in] -> [T, out].

    dtype: of the result; default that of x. out [T, out]: where to store the result; its rows may
    be parts of longer ones. early: of one token x is loaded before the wait, too, so that the
    product runs beside the previous kernel. tiles: of several tokens `FewTiles`.

    With PDL, all but x is loaded while the previous kernel runs, which must not write it.

    send: write one token's result of 16 bits into the inboxes of all ranks instead, and return
    None. `receive_add` or `receive_norm_router` must come next. Raises
    ValueError for a result that cannot be sent.
    """
    T = x.numel() // x.shape[-1]
    if send is not None and (T > 1 or early):
        raise ValueError("only one token's product, which is not early, is sent")
    y = torch.empty(T, weight.out, dtype=dtype or x.dtype, device=x.device) if out is None else out
    if T > 1:
        few = (norm.weight, norm.eps) if norm else (None, 0.0)
        down_few(x, weight, y, residual, *few, bias, scale, tiles, pdl)
        return y
    fields, programs, tiles = settings_of(weight, 0, 1, tiles, stays=not early)
    fields |= dict(eps=norm.eps if norm else 0.0, scale=scale, early=early)
    operand = operands_of(x, weight, norm.weight if norm else None)
    return _launch_sum(
        operand, weight, None, residual, bias, y, send, (fields, programs, tiles, pdl)
    )


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

    The reference is `weighted_sum(w2.gather(x, ...))`, then as in `dense`. bias [E, D]. Long x in 4
    bits becomes a `QuantizedX` here, by a kernel of its own.

    With PDL, the residual is loaded while the previous kernel runs, which must not write it. If
    codes are multiplied as integers, weights are, too: indices that `gate_up` has not stored yet
    are -1, and so known to be missing. If x is a `QuantizedX`, the previous kernel made it, and
    writes nothing else of these.
    """
    experts = indices.shape[1]
    if isinstance(x, Tensor) and quantizes_first(weight, experts * weight.quads):
        x = quantize_token(operand_of(x, weight), weight, pdl)
    y = torch.empty(1, weight.out, dtype=dtype or x.dtype, device=indices.device)
    fields, programs, tiles = settings_of(weight, experts, 1, tiles)
    fields["scale"] = scale
    choice, operand = Choice(indices, weights=routing), operands_of(x, weight)
    return _launch_sum(
        operand, weight, choice, residual, bias, y, send, (fields, programs, tiles, pdl)
    )


def _launch_sum(
    x: Operand,
    weight: Weight,
    choice: Choice | None,
    residual: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    send: TokenInbox | None,
    how: tuple[dict, int, Tiles, bool | None],
) -> Tensor | None:
    """Launch `_multiply_sum`. how: settings but for those of `send`, programs, tiles, pdl."""
    fields, programs, tiles, pdl = how
    if send is not None:
        if y.element_size() != 2:
            raise ValueError("only a product of 16 bits is sent")
        fields |= dict(half=send.memory.stride(0), ranks=len(send.slots))
    launch(
        _multiply_sum,
        (programs,),
        x,
        choice,
        residual,
        weight.tensors,
        bias,
        y,
        0,
        send,
        settings=SumSettings(**fields),
        pdl=pdl,
        **tiles.options,
    )
    return y if send is None else None
