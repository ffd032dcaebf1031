"""Products of which a token has one row: dense ones, and the sum over chosen experts.

`dense_product` multiplies by one weight: `wo` plus residual, or `wqkv` with the norm of its input.
`ops.products.experts.down` sums the products of a token's experts, with the same kernel. More than
MAX_TOKENS tokens have another kernel for dense products: ops/products/few_tokens.py.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ops.declared import Activation
from ops.launch import jit, launch, tl, triton
from ops.products.codes import activate, code_table, row_scale
from ops.products.few_tokens import FewTiles, down_few
from ops.products.join import norm_tokens
from ops.products.operands import lane_squares
from ops.products.pipeline import (
    Chosen,
    Operand,
    Product,
    load_beside,
    load_parts,
    load_weights,
    multiply_tile,
    operand_of,
    operands_of,
    prepare,
    replace,
    settings_of,
    shared_rows,
    sum_normed,
    sum_shared,
)
from ops.products.quantized_x import quantize_tokens
from ops.products.tilings import Tiles, choose_tiles, has_many_rows, measured_fields, place_of
from ops.products.weights import BITS, Weight, WeightTensors, check_rows
from ops.ranks.mailbox import Outbox, TokenInbox, find_outboxes, send_rows
from ops.sizes import cdiv, pow2


@dataclass(frozen=True)
class SumSettings(Product):
    """Settings of `_multiply_sum`."""

    eps: float = 0.0  # added to the mean square of x, if it is normed
    groups: int = 1  # parts of x, each with a norm of its own
    scale: float = 1.0  # factor of the product and its bias
    activation: Activation | None = None  # then this, of a gate alone
    early: bool = False  # the product waits at its end: x is an earlier kernel's result
    T: int = 1  # tokens of all blocks
    stride: int = 0  # between rows of y, of several tokens
    queries: int = 0  # tokens of a sequence, if `last` is given
    half: int = 0  # words between the halves of an inbox
    ranks: int = 0  # to which the result is sent
    begin: int = 0  # where the result begins in the message
    shared: int = 0  # experts that follow the chosen ones, of the weight's last
    total: int = 0  # experts of the weight
    beside: "SumSettings | None" = None  # of another weight, that `first` programs multiply
    first: int = 0

    @property
    def first_shared(self) -> int:
        """The chunk in flight from which on all experts are shared, of one token. `depth`: none."""
        if self.integers or self.blocks > 1 or not self.shared or self.depth < self.chunks:
            return self.depth
        return -(-(self.experts - self.shared) * self.each // self.lanes)


class Beside(NamedTuple):
    """Another weight that is multiplied by the same tokens in one launch."""

    x: Operand
    weights: WeightTensors
    y: Tensor


@jit
def _await_choice(indices, s):
    """Wait until the previous kernel has stored all indices, which were -1 before."""
    BLOCK: tl.constexpr = triton.next_power_of_2(s.experts)
    pair = tl.minimum(tl.arange(0, BLOCK), s.experts - 1)
    while tl.min(tl.load(indices + pair, volatile=True), 0) < 0:
        pass


@jit
def _load_biases(bias, experts, factors, rows, s):
    """Load the biases of rows; with `gather` the sum of all experts' times routing weights."""
    if s.gather:
        biases = tl.zeros(rows.shape, tl.float32)
        for pair in tl.static_range(s.experts):
            at = tl.load(experts + pair) * s.out + rows
            biases += tl.load(bias + at).to(tl.float32) * tl.load(factors + pair)
    else:
        biases = tl.load(bias + rows).to(tl.float32)
    return biases


@jit
def _first_row(n, place, s: tl.constexpr):
    """Return the first row of a program's tile n. The last tiles begin early enough to be whole.

    place: the program, and how many there are; None: those of the grid, which take no registers.
    """
    if place is None:
        place = tl.program_id(0), tl.num_programs(0)
    return tl.minimum((place[0] + n * place[1]) * s.rows, s.out - s.rows)


@jit
def _store_padding(residual, adds, y, row, tile, place, s: tl.constexpr):
    """Store the residual, or zeros, as the result of a token that is padding."""
    rows, stores = tile
    result = adds[0] if residual is not None else tl.zeros([32], tl.float32)
    tl.store(y + row + rows, result.to(y.dtype.element_ty), mask=stores)
    for n in range(1, s.tiles):
        at = _first_row(n, place, s) + rows
        if residual is not None:
            result = tl.load(residual + at, mask=stores, other=0.0)
        tl.store(y + at, result.to(y.dtype.element_ty), mask=stores)


@jit
def _finish(total, factor, biases, added, s: tl.constexpr):
    """Return a product with its rows' factors, bias, scale, activation and residual."""
    if s.of_rows:
        total *= factor
    if biases is not None:
        total += biases
    if s.scale != 1.0:
        total *= s.scale
    if s.activation is not None:
        total = activate(total, 1.0, s.activation)
    if added is not None:
        total += added.to(tl.float32)
    return total


# A program of `_multiply_sum`. place: as of `_first_row`.
#
# It computes TILES tiles of ROWS rows, as in `_multiply_each`, or one tile of several tokens, which
# share its weights. x is that of all chosen experts, one after the other (s.gather, one token), or
# one row a token.
#
# The result is scale * (product + bias), activated if so declared, + residual. An expert's bias has
# its routing weight.
#
# ops/README.md has what is loaded before the wait. With POLLED that waits for the choice alone,
# whose indices are -1 until `_multiply_each` stores them: in bf16 that is slower
# (docs/log/small_experts.md). With `early` x is the result of the kernel before the previous one:
# the product waits at its end.
#
# With `send` the result is sent to all ranks (ops/ranks/mailbox.py), and not stored. A row that two
# programs compute is sent twice, with the same bits.
@jit
def _multiply_rows(x, choice, residual, weights, bias, y, zero, send, place, s, PDL):
    QUANTIZED: tl.constexpr = x.units is not None
    POLLED: tl.constexpr = PDL and s.gather and not QUANTIZED and s.integers
    AHEAD: tl.constexpr = QUANTIZED or POLLED or not s.gather  # weights are loaded before the wait
    TILES: tl.constexpr = s.tiles
    TOKENS: tl.constexpr = s.tokens
    row = _first_row(0, place, s)
    rows, stores = shared_rows(s.rows)
    token = tl.program_id(1) if s.blocks > 1 else 0
    if s.blocks > 1:
        token = tl.minimum(token * TOKENS, s.T - TOKENS)  # the last block is whole
        y += token * s.stride
        numbers = x.numbers + token * (s.numbers if x.units is None else s.quantized[0])
        units = None if x.units is None else x.units + token * s.quantized[1]
        x = Operand(numbers, units, x.norm)
        if residual is not None:
            residual += token * s.out
    adds = ()
    if residual is not None:
        for t in tl.static_range(TOKENS):
            adds = adds + (tl.load(residual + t * s.out + row + rows, mask=stores, other=0.0),)
    if s.gather:
        experts, factors = choice.indices + token * s.experts, choice.weights + token * s.experts
        if choice.last is not None:  # noqa: SIM102  (known at compile time)
            if token % s.queries > tl.load(choice.last + token // s.queries):  # padding
                if PDL:
                    tl.extra.cuda.gdc_wait()
                _store_padding(residual, adds, y, row, (rows, stores), place, s)
                return
    ahead = ()
    for d in tl.static_range(s.first_shared, s.depth):
        ahead = ahead + (load_weights(weights, None, row, d, s),)
    if PDL and not AHEAD:
        tl.extra.cuda.gdc_wait()
    if not s.gather:
        experts, factors = tl.program_id(0).to(tl.int64) * 0, None
    if POLLED:
        _await_choice(experts, s)
    tiles, xs, besides = (), (), ()
    for d in tl.static_range(s.first_shared):
        tiles = tiles + (load_weights(weights, experts, row, d, s, POLLED),)
    tiles = tiles + ahead
    if POLLED:
        tl.extra.cuda.gdc_wait()
    for d in tl.static_range(s.held):
        besides = besides + (load_beside(x, factors, d, s),)
    # Loaded now, since in the end each program would wait a microsecond for it.
    factor = row_scale(weights, row + rows, s) if s.of_rows else None
    biases = None if bias is None else _load_biases(bias, experts, factors, row + rows, s)
    if PDL:
        if AHEAD and not POLLED and not s.early:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for d in tl.static_range(s.held):
        xs = xs + (load_parts(x, d, s),)
    if send is not None:
        outboxes, call = find_outboxes(send.slots, send.calls, s)
    table = code_table(zero, s)
    squares = tl.zeros([s.lanes // 32, 32], tl.float32)
    if TILES > 1:
        for c in tl.static_range(s.chunks):
            if x.norm is not None and s.groups == 1:
                squares += lane_squares(xs[c][0], s)
            xs = replace(xs, c, prepare(xs[c][0], besides[c], x, s))
    for n in range(TILES):
        next_row = _first_row(n + 1, place, s)
        more, both = n + 1 < TILES, (row, next_row)
        totals, _, found, tiles = multiply_tile(
            x, weights, (experts, factors), tiles, (xs, besides), table, both, more, s
        )
        for t in tl.static_range(TOKENS):
            if x.norm is not None and s.groups == 1:
                total = sum_normed(totals[t], squares if TILES > 1 else found[t], s)
            else:
                total = sum_shared(totals[t], s)
            added = adds[t] if residual is not None else None
            total = _finish(total, factor, biases, added, s)
            if PDL and s.early and t == 0:
                tl.extra.cuda.gdc_wait()
            if send is not None:
                send_rows(total.to(y.dtype.element_ty), outboxes, call, row + rows, stores, s.ranks)
            else:
                tl.store(y + t * s.stride + row + rows, total.to(y.dtype.element_ty), mask=stores)
        row = next_row
        if more:
            if residual is not None:
                adds = replace(adds, 0, tl.load(residual + row + rows, mask=stores, other=0.0))
            if s.of_rows:
                factor = row_scale(weights, row + rows, s)
            if bias is not None:
                biases = _load_biases(bias, experts, factors, row + rows, s)


# Grid [R, blocks]. With `beside` the first programs multiply another weight by the same tokens,
# while the others run: a kernel of its own would end after them.
@jit
def _multiply_sum(
    x,
    choice,
    residual,
    weights,
    bias,
    y,
    unknown_zero,
    send,
    beside,
    s: tl.constexpr,
    PDL: tl.constexpr,
):
    place = None
    if s.beside is not None:
        program = tl.program_id(0)
        if program < s.first:
            place = program, s.first
            own, more, zero = beside.x, beside.weights, unknown_zero
            _multiply_rows(own, None, None, more, None, beside.y, zero, None, place, s.beside, PDL)
            return
        place = program - s.first, tl.num_programs(0) - s.first
    _multiply_rows(x, choice, residual, weights, bias, y, unknown_zero, send, place, s, PDL)


# Most tokens of a program of `_multiply_sum`, by bits of a weight: beyond, tensor cores are faster.
# Each program makes integers of its x, for 4 bits (docs/log/speculation.md). It norms x, too. On
# tensor cores that takes more than a kernel of its own: in 4 bits half of all instructions.
IN_REGISTERS = {2: 1, 4: 3, 8: 4, 16: 4}
# Most tokens of a product on tensor cores with a narrow one in its launch: 8 and 16 gain nothing.
MOST_BESIDE = 4


def most_in_registers(weight: Weight) -> int:
    """Return the most tokens of a program of `_multiply_sum`: `IN_REGISTERS`.

    A head in 8 bits has one less, and so has int4 of 64 rows for each multiprocessor and more, if
    its tiles on tensor cores were measured: each of many programs norms all of x.
    """
    is_wide = weight.kind == "int4" and weight.out >= 64 * weight.multiprocessors
    is_wide = is_wide and measured_fields(weight, place_of(weight, "dense", 4)) is not None
    return IN_REGISTERS[BITS[weight.kind]] - (
        is_wide or (weight.fields == 4 and has_many_rows(weight))
    )


class Norm(NamedTuple):
    """The RMS norm of a product's x, which is not rounded."""

    weight: Tensor  # [in], fp32 or as x
    eps: float
    groups: int = 1  # parts of x, each with a norm of its own


def norm_apart(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, groups: int = 1
) -> tuple[Tensor, Norm | None]:
    """Return x [T, in] and its norm for `dense_product`: of many tokens the normed x, and None.

    So too if words have scales: `dense_product` then quantizes x by a kernel of its own. groups: as
    of `Norm`; the normed x, too, if a product cannot norm these.
    """
    most = most_in_registers(weight)
    if groups > 1 and not norms_groups(weight, groups, len(x)):
        most = 0
    if len(x) <= most and not weight.word_scaled:
        return x, Norm(norm, eps, groups)
    rows = norm_tokens(x.view(len(x) * groups, -1), norm.view(groups, -1), eps)
    return rows.view(x.shape), None


def norms_groups(weight: Weight, groups: int, T: int, tiles: Tiles | None = None) -> bool:
    """Whether a chunk of each program has whole groups of x, which its lanes sum."""
    lanes = (tiles or choose_tiles(weight, weight.quads, 1, T)).lanes
    # A quad has some numbers of each run of a group of the format.
    whole = weight.width % (groups * weight.group) == 0 and weight.quads % groups == 0
    return whole and lanes % (weight.quads // groups) == 0


def dense_product(
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
    activation: Activation | None = None,
    beside: tuple[Weight, Tensor] | None = None,
) -> Tensor | None:
    """scale * (norm(x) @ weight + bias) + residual: x [T, in], weight [out, in] -> [T, out].

    activation: of the sum before the residual is added, which is its gate; up is 1.
    dtype: of the result; default that of x. out [T, out]: where to store the result; its rows may
    be parts of longer ones. early: the next kernel starts at once. In registers x is loaded before
    the wait, too, so that it runs beside the previous kernel. tiles: of several tokens `FewTiles`.
    beside: another weight that is multiplied by norm(x), and where to store that product; only as
    `takes_beside` says.

    send: write one token's result of 16 bits into the inboxes of all ranks instead, and return
    None. A kernel that receives must come next: `norm_router` or `add_branch`. A result that cannot
    be sent raises ValueError.
    """
    T = x.numel() // x.shape[-1]
    if send is not None and (T > 1 or early):
        raise ValueError("only one token's product, which is not early, is sent")
    check_rows("x", x, T, weight.width)
    check_rows("bias", bias, weight.out)
    check_rows("residual", residual, T, weight.out)
    y = torch.empty(T, weight.out, dtype=dtype or x.dtype, device=x.device) if out is None else out
    scales, eps, groups = norm or (None, 0.0, 1)
    most = most_in_registers(weight)
    few = isinstance(tiles, FewTiles) or (tiles is None and max(1, most) < T)
    if (norm and few) or (groups > 1 and not norms_groups(weight, groups, T, tiles)):
        raise ValueError(f"no product norms {T} tokens, {groups} groups of x: norm_apart does that")
    if few:
        down_few(x, weight, y, residual, bias, scale, tiles, activation, early, beside)
        return y
    fields = dict(eps=eps, groups=groups, scale=scale, activation=activation, early=early)
    if T > 1:
        tokens = min(T, most)
        fields |= dict(T=T, tokens=tokens, blocks=cdiv(T, tokens), stride=y.stride(0))
    if weight.word_scaled and scales is None:
        x = quantize_tokens(operand_of(x, weight).view(T, -1), weight)
        fields["early"] = False  # the previous kernel writes x
    operand = operands_of(x, weight, scales)
    more = None
    if beside is not None:
        narrow, result = beside
        more = narrow, operands_of(x, narrow, scales), result
    return launch_sum(operand, weight, None, residual, bias, y, send, tiles, more, **fields)


def rows_beside(weight: Weight, T: int) -> int:
    """Return the rows of a program that multiplies a narrow weight beside a wide one.

    A few programs, which run at once, and have registers for all of their weights, and for several
    tokens' x.
    """
    rows = min(8, pow2(cdiv(8 * weight.out, weight.multiprocessors)))
    return rows if T == 1 else max(1, rows // 2)


def takes_beside(weight: Weight, narrow: Weight, T: int) -> bool:
    """Whether `dense_product` multiplies T tokens by a narrow weight in the launch of a wide one.

    It does if the narrow weight has at most a sixteenth of the other's rows, and its programs have
    registers for all of their weights: if both products are in registers, or beside int4 on tensor
    cores, for up to MOST_BESIDE tokens.
    """
    small = rows_beside(narrow, 1) * narrow.quads <= 1024 and 16 * narrow.out <= weight.out
    if not small or weight.word_scaled or narrow.word_scaled:
        return False
    if max(1, most_in_registers(weight)) < T:
        kinds = weight.kind, narrow.kind
        return T <= MOST_BESIDE and kinds == ("int4", "bf16") and narrow.quads <= 512
    return max(1, min(IN_REGISTERS[BITS[each.kind]] for each in (weight, narrow))) >= T


def launch_sum(
    x: Operand,
    weight: Weight,
    choice: Chosen | None,
    residual: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    send: TokenInbox | None,
    tiles: Tiles | None,
    beside: tuple[Weight, Operand, Tensor] | None = None,
    **fields,
) -> Tensor | None:
    """Launch `_multiply_sum`. fields: of `SumSettings`, without those of `send`.

    beside: another weight, x as its operand, and where to store that product.
    """
    if send is not None:
        if y.element_size() != 2:
            raise ValueError("only a product of 16 bits is sent")
        fields |= dict(half=send.memory.stride(0), ranks=len(send.slots), begin=send.begin)
    experts = 0 if choice is None else choice.indices.shape[1]
    blocks, T = fields.get("blocks", 1), fields.get("T", 1)
    settings, grid, options = settings_of(SumSettings, weight, experts, tiles, blocks, T, **fields)
    others = None
    if beside is not None:
        narrow, narrow_x, narrow_y = beside
        few = Tiles(rows_beside(narrow, T), 32 * settings.warps, 0, settings.warps)
        own = fields | dict(scale=1.0, activation=None, stride=narrow_y.stride(0))
        s, (first, _), _ = settings_of(SumSettings, narrow, 0, few, blocks, T, **own)
        settings = dataclasses.replace(settings, beside=s, first=first)
        grid, others = (grid[0] + first, blocks), Beside(narrow_x, narrow.tensors, narrow_y)
    outbox = None if send is None else Outbox(send.slots, send.calls)
    operands = x, choice, residual, weight.tensors, bias, y, 0, outbox, others
    launch(_multiply_sum, grid, *operands, settings=settings, **options)
    return y if send is None else None
