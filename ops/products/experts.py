"""Products of one token's experts: gate and up, then down.

    gate_up          the choice of experts, their gate and up products, and the activation
    gate_up_shared   the same of a shared expert in another format
    multiply_each    the products of given experts, with an activation or without
    down             the down products, times the routing weights, summed, plus residual

`_multiply_each` computes the first three, a row of results for each expert. `down` launches
`_multiply_sum` of ops/products/dense.py, whose result is one row. Shared experts are chosen
experts, too: their weights are stacked after those of the E others. A shared expert in another
format has launches of its own.

A layer with small experts waits for its kernels, not for memory: a kernel costs the time of its
bytes plus 1.6 us on an H200. So there are few kernels, and each has all of its loads in flight at
once. ops/README.md has the rules of what a kernel may read before the previous one has ended (PDL).

Several tokens have other kernels: ops/products/expert_tiles.py.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.declared import SWIGLU, Activation, Routing
from ops.launch import jit, launch, tl
from ops.products.codes import activate, code_table, row_scale
from ops.products.dense import launch_sum
from ops.products.pipeline import (
    Chosen,
    Operand,
    Product,
    load_parts,
    load_weights,
    multiply_tile,
    operand_of,
    operands_of,
    prepare,
    replace,
    result_rows,
    settings_of,
    shared_rows,
    sum_lanes,
    sum_shared,
)
from ops.products.quantized_x import QuantizedX, quantize_tokens, quantizes_first
from ops.products.routing import (
    ChoiceSettings,
    choice_of,
    choose,
    choose_one,
    load_gate,
    queries_of,
)
from ops.products.tilings import Tiles
from ops.products.weights import Weight, check_rows
from ops.ranks.mailbox import TokenInbox

# Programs of a multiprocessor that find their experts themselves: others start late enough to read
# what was chosen. More run at once, but these gain by reading, too (docs/log/speculation.md).
EARLY = 8


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


@jit
def _shared_first(number, s: tl.constexpr):
    """Return the pair of this number among the launch's: all tokens' shared experts come first."""
    if s.pairs_of_row == 0:
        return (number + s.first) % s.routing.pairs
    else:
        tokens = tl.num_programs(0) // s.pairs_of_row
        is_shared = number < tokens * s.routing.shared
        other = number - tokens * s.routing.shared
        own = number // s.routing.shared * s.pairs_of_row + s.first + number % s.routing.shared
        return tl.where(is_shared, own, other // s.first * s.pairs_of_row + other % s.first)


@jit
def _read_or_find_expert(indices, scores, pair, program, s: tl.constexpr):
    """Return the expert of a pair, int64: a late program reads what the choosing one has stored.

    indices: -1 until then. They are in L2 (volatile). For programs of one warp: several would take
    different branches, if one of them sees -1 and the next one does not, and wait for each other.
    """
    same = tl.arange(0, 32) * 0
    is_late = same + program >= s.first_late
    found = tl.load(indices + (pair + same), mask=is_late, other=-1, volatile=True)
    expert = tl.max(found.to(tl.int32), 0).to(tl.int64)
    if expert < 0:
        expert = _find_expert(scores, pair, s.routing, s.warps)
    return expert


@dataclass(frozen=True)
class EachSettings(Product):
    """Settings of `_multiply_each`."""

    pairs_of_row: int = 0  # pairs that multiply the same row of x; 0: all, of one token
    first_late: int = 0  # the first program of a pair that starts late; 0: none reads its expert
    queries: int = 0  # tokens of a sequence, if `last` is given
    activation: Activation | None = None  # of gate and up
    routing: ChoiceSettings | None = None

    several = property(lambda s: s.pairs_of_row > 0)  # tokens

    @property
    def first(self) -> int:
        """The pair of a token whose programs start first: a shared expert's, if it has some.

        Several tokens have one in int4 alone: other kinds were not measured.
        """
        has_some = self.routing is not None and self.routing.shared
        return self.routing.active if has_some and (not self.several or self.kind == "int4") else 0


# Grid [R, N]: a program computes TILES tiles, every R-th one. A tile is ROWS rows of one expert's
# result, with two loads gate and up. An activation without a gate has one load. If there are
# several tiles, x stays in registers, and the next tile's weights are loaded while this one's are
# multiplied.
#
# After the wait all loads start at once: the tile's first DEPTH chunks, and their x. Programs of
# `first`, shared experts, start first: they load weights while the router's kernel leaves memory
# idle.
#
# With scores each program finds its expert in them, and the grid has one more row of programs,
# R + 1. The first one stores the whole choice, for the next kernel and for programs of several
# tokens that start late. S shared experts, from E on, follow the A chosen ones.
#
# Without indices all tokens multiply one weight, that of a shared expert. With scores h is
# multiplied by the shared expert's gate.
#
# Several tokens have `pairs_of_row` pairs each. Then pairs are the grid's first axis: programs of
# two pairs with the same expert run at the same time, so that one finds its weights in L2. A token
# after `last` is padding: it has a choice, but no product.
#
# One function: its order of loads and waits decides its speed.
@jit
def _multiply_each(x, choice, weights, bias, h, unknown_zero, s: tl.constexpr, PDL: tl.constexpr):
    SHARED: tl.constexpr = choice.indices is None
    GATED: tl.constexpr = SHARED and choice.scores is not None
    CHOOSE: tl.constexpr = not SHARED and choice.scores is not None
    I: tl.constexpr = s.out // s.loads  # rows of the result
    PAIRS: tl.constexpr = s.pairs_of_row
    BY_ROWS: tl.constexpr = 1 if (CHOOSE or SHARED) and PAIRS else 0  # the grid's axis of rows
    multiplying = tl.num_programs(BY_ROWS) - CHOOSE  # programs of a pair
    pair, program = tl.program_id(1 - BY_ROWS), tl.program_id(BY_ROWS) - CHOOSE
    if s.first:
        pair = _shared_first(pair, s)
    # The last tiles begin early enough to be whole: some rows are computed twice.
    row = tl.minimum(program * s.rows, I - s.rows)
    is_real = True
    if PAIRS:
        token = pair // PAIRS
        if choice.last is not None:
            is_real = token % s.queries <= tl.load(choice.last + token // s.queries)
    if PDL and not SHARED:
        of_row = pair % PAIRS if PAIRS else pair
        if not s.first or (of_row < s.routing.active) | (program < 0):
            tl.extra.cuda.gdc_wait()
    scores, indices, factors, of_token = choice.scores, choice.indices, choice.weights, pair
    if PAIRS:
        numbers = x.numbers + token * (s.numbers if x.units is None else s.quantized[0])
        units = None if x.units is None else x.units + token * s.quantized[1]
        x = Operand(numbers, units, x.norm)
        if CHOOSE:
            scores, of_token = scores + token * s.routing.row, pair % PAIRS
            indices, factors = indices + token * PAIRS, factors + token * PAIRS
        if GATED:
            scores += token * s.routing.row
    if CHOOSE:  # noqa: SIM102  (known at compile time)
        if program < 0:
            if of_token == s.first:
                choose(scores, None, indices, factors, s.routing)
            return
    if choice.last is not None:  # noqa: SIM102
        if not is_real:
            return
    if CHOOSE and s.first_late and s.first:
        expert = (s.routing.E - s.first + of_token).to(tl.int64)  # shared
        if of_token < s.first:
            expert = _read_or_find_expert(indices, scores, of_token, program, s)
    elif CHOOSE and s.first_late:
        expert = _read_or_find_expert(indices, scores, of_token, program, s)
    elif CHOOSE:
        expert = _find_expert(scores, of_token, s.routing, s.warps)
    elif SHARED:
        expert = pair.to(tl.int64) * 0
    else:
        expert = tl.load(choice.indices + pair).to(tl.int64)
    if PDL and s.first_late:  # `down` polls the choice
        tl.extra.cuda.gdc_launch_dependents()
    tiles, xs, besides = (), (), ()
    for d in tl.static_range(s.depth):
        tiles = tiles + (load_weights(weights, expert, row, d, s),)
    if PDL and (SHARED or s.first):
        tl.extra.cuda.gdc_wait()
    for d in tl.static_range(s.held):
        xs = xs + (load_parts(x, d, s),)
        besides = besides + ((),)
    if GATED:
        share = load_gate(scores, None, s.routing)
    if PDL:  # even if for the second time: the compiler moves no load behind it
        tl.extra.cuda.gdc_launch_dependents()
    table = code_table(unknown_zero, s)
    SHARES: tl.constexpr = PAIRS and s.tiles == 1
    rows, stores = shared_rows(s.rows) if SHARES else result_rows(s)
    if s.tiles > 1:
        for c in tl.static_range(s.chunks):
            xs = replace(xs, c, prepare(xs[c][0], (), x, s))
    for n in range(s.tiles):
        flat = expert * s.out + row + rows
        if s.of_rows:
            scales = [row_scale(weights, I * i + flat, s) for i in s.of_loads]
        if bias is not None:
            adds = [tl.load(bias + I * i + flat).to(tl.float32) for i in s.of_loads]
        next_row = tl.minimum((program + (n + 1) * multiplying) * s.rows, I - s.rows)
        more, both = n + 1 < s.tiles, (row, next_row)
        gates, ups, _, tiles = multiply_tile(
            x, weights, (expert, None), tiles, (xs, besides), table, both, more, s
        )
        totals = gates[0], ups
        totals = [
            sum_shared(totals[i], s) if SHARES else sum_lanes(totals[i], s) for i in s.of_loads
        ]
        if s.of_rows:
            totals = [totals[i] * scales[i] for i in s.of_loads]
        if bias is not None:
            totals = [totals[i] + adds[i] for i in s.of_loads]
        gate, out = totals[0], h + pair * I + row + rows
        if s.activation is not None:
            gate = activate(gate, totals[s.loads - 1], s.activation)
        if GATED:
            gate *= share
        tl.store(out, gate.to(h.dtype.element_ty), mask=stores)
        row = next_row


def pair_ratio(E: int, T: int, kind: str) -> float:
    """Return the most pairs for each distinct expert that are read pair by pair.

    As measured on an H100; up to 16 tokens of models with 128 and 256 experts on an H200.
    """
    measured = kind in ("int4", "q4_k", "q8_0", "iq4")
    return 1.6 if measured and E >= 128 and T <= 16 else 1.3


def takes_pairs(E: int, routing: Routing, T: int, kind: str) -> bool:
    """Whether T tokens, by `gate_up` and `down`, are read pair by pair; else use expert_tiles.

    So if hardly two of their pairs have the same expert: by the expected number of distinct ones,
    if each token chose at random among E experts. kind: of the experts' weights.
    """
    distinct = E * (1 - (1 - routing.active / E) ** T) + routing.shared
    return T == 1 or T * routing.pairs <= pair_ratio(E, T, kind) * distinct


def gate_up(
    x: Tensor | QuantizedX,
    weight: Weight,
    scores: Tensor,
    routing: Routing,
    activation: Activation = SWIGLU,
    tiles: Tiles | None = None,
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    indices: Tensor | None = None,
    last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts by the scores of `norm_router`, and multiply x [T, D] by their w13.

    Return h [T (A + S), I], activated, expert_indices int64 and expert_weights fp32 [T, A + S]. The
    references are `MoE.route`, or `SigmoidRoutedMoE.route`, and `ExpertLinear.gather_gated`.

    x may be a `QuantizedX` of this weight. weight [E + S, 2 I, D], shared experts last; or
    [E + S, I, D] for an activation without a gate. bias [E, 2 I]: added before the activation.
    dtype: of h; default x.dtype. indices [T, A + S]: where to store those of experts, -1 before
    (`norm_router`); default: new. last int64 [B]: of several tokens [B, Q] those after the last
    real one of their row are padding, whose h is not stored.
    """
    T, E = len(scores), len(weight.parts[0]) - routing.shared
    if indices is None:
        indices = torch.full((T, routing.pairs), -1, dtype=torch.int64, device=scores.device)
    weights = torch.empty(T, routing.pairs, dtype=torch.float32, device=scores.device)
    choice = Chosen(indices, scores, weights, last if T > 1 else None)
    chooses = choice_of(E, routing)
    h = _launch_each(x, weight, choice, bias, activation, dtype, tiles, chooses)
    return h, indices, weights


def gate_up_shared(
    x: Tensor, weight: Weight, scores: Tensor, routing: Routing, activation: Activation
) -> Tensor:
    """Multiply x [T, D] by the w13 [2 I, D] of a shared expert -> h [T, I], activated.

    scores: of `norm_router`. With `routing.gated` h is multiplied by the sigmoid of the gate's
    score, so that the down product is a `dense_product`. The others: as of `gate_up`. With PDL, the
    weight is loaded before the wait.
    """
    choice = Chosen(None, scores if routing.gated else None)
    chooses = choice_of(scores.shape[-1] - routing.gated, routing)
    return _launch_each(x, weight, choice, None, activation, routing=chooses)


def multiply_each(
    x: Tensor | QuantizedX,
    weight: Weight,
    indices: Tensor,
    activation: Activation | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Multiply x [M, D] by the weights [E, out, D] of given experts, N indices -> [N, out].

    x may be a `QuantizedX` of this weight. Pair n multiplies row n // (N // M) of x. activation:
    of gate and up, the halves of the weight's rows -> [N, out / 2], as `gate_up`; one without a
    gate -> [N, out]. The others: as of `gate_up`.
    """
    return _launch_each(x, weight, Chosen(indices), bias, activation, dtype, tiles)


def _launch_each(
    x: Tensor | QuantizedX,
    weight: Weight,
    choice: Chosen,
    bias: Tensor | None,
    activation: Activation | None,
    dtype: torch.dtype | None = None,
    tiles: Tiles | None = None,
    routing: ChoiceSettings | None = None,
) -> Tensor:
    """Launch `_multiply_each`."""
    rows = len(x.operands if isinstance(x, QuantizedX) else x)
    pairs = rows if choice.indices is None else choice.indices.numel()
    check_rows("bias", bias, len(weight.parts[0]), weight.out)
    if isinstance(x, Tensor):
        check_rows("x", x, rows, weight.width)
        if weight.word_scaled:
            x = quantize_tokens(operand_of(x, weight), weight)
    fields = dict(
        loads=2 if activation and activation.gated else 1,
        pairs_of_row=pairs // rows if rows > 1 else 0,
        queries=0 if choice.last is None else queries_of(rows, choice.last),
        activation=activation,
        routing=routing,
    )
    settings, grid, options = settings_of(EachSettings, weight, 0, tiles, pairs, rows, **fields)
    shape = pairs, weight.out // settings.loads
    h = torch.empty(shape, dtype=dtype or x.dtype, device=weight.parts[0].device)
    chooses = choice.indices is not None and choice.scores is not None
    if chooses and settings.pairs_of_row and settings.warps == 1:
        first_late = max(1, EARLY * weight.multiprocessors // pairs)
        settings = dataclasses.replace(settings, first_late=first_late)
    operands = operands_of(x, weight), choice, weight.tensors, bias, h, 0
    grid = grid[0] + chooses, pairs
    if (chooses or choice.indices is None) and settings.pairs_of_row:
        grid = grid[::-1]
    launch(_multiply_each, grid, *operands, settings=settings, **options)
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
    last: Tensor | None = None,
    out: Tensor | None = None,
    shared: int = 0,
) -> Tensor | None:
    """Sum tokens' experts: x [T A, I], weight w2 [E, D, I], indices and routing [T, A] -> [T, D].

    The reference is `weighted_sum(w2.gather(x, ...))`, then as in `dense_product`. bias [E, D].
    Long x of weights in 4 bits is quantized here, by a kernel of its own. last: as of `gate_up`;
    the result of padding is its residual. out [T, D]: where to store the result. shared: the last S
    of each token's experts, which are the weight's last.

    ops/README.md lists the tensors that are loaded before the wait: the previous kernel must not
    write these. If x is a `QuantizedX`, the previous kernel made it.
    """
    T, experts = indices.shape
    if send is not None and T > 1:
        raise ValueError("only one token's product is sent")
    if isinstance(x, Tensor):
        check_rows("x", x, T * experts, weight.width)
    if isinstance(x, Tensor) and quantizes_first(weight, experts * weight.quads, T):
        x = quantize_tokens(operand_of(x, weight).view(T, -1), weight)
    check_rows("residual", residual, T, weight.out)
    check_rows("bias", bias, len(weight.parts[0]), weight.out)
    if out is None:
        out = torch.empty(T, weight.out, dtype=dtype or x.dtype, device=indices.device)
    fields: dict = dict(scale=scale, shared=shared, total=len(weight.parts[0]))
    if T > 1:
        fields |= dict(T=T, blocks=T, stride=weight.out, queries=queries_of(T, last))
    choice = Chosen(indices, weights=routing, last=last if T > 1 else None)
    operand = operands_of(x, weight)
    return launch_sum(operand, weight, choice, residual, bias, out, send, tiles, **fields)
