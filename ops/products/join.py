"""The kernel between two products: [x + what is added] + norm + [router scores] + [integers].

`_join` has compile-time cases, which launchers name:

    norm_router           x is given; scores. One GPU
    norm_tokens           x is given; no scores: more tokens than a product norms by itself
    receive_norm_router   x + the messages of all ranks (ops/ranks/mailbox.py); scores
    fixed_add_norm        x + y; scores or none. Several GPUs, compiled blocks
    fixed_sandwich        the same of normed branches: Gemma 4

All ranks must compute the same bits, or they choose different experts where two scores are nearly
equal. Inductor finds tile shapes by timing, on each rank separately, so a norm or product that it
compiles may differ between ranks in the last bits. `_join` has fixed shapes instead, and adds
messages in the order of ranks.

One token's norm is quantized here, once for all programs of the experts' first product
(ops/products/quantized_x.py).

Letters: T tokens, D model dim, E experts, N scores of a token: E, and the shared experts' gate.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.declared import Routing
from ops.launch import await_previous, can_launch, jit, launch, tl, triton
from ops.plain import norms
from ops.products.operands import load_x
from ops.products.quantized_x import QuantizedX, empty_quantized, store_quads
from ops.products.routing import check_router, sigmoid
from ops.products.weights import INTEGERS, Weight
from ops.ranks.mailbox import (
    MAX_PROGRAMS,
    Messages,
    TokenInbox,
    any_missing,
    count_call,
    load_call,
    messages_of,
    numbers_of,
    receive,
    words_of,
)

MANY_PROGRAMS = 256  # about as many of `norm_router` as an H200 runs with the least delay
PROBES = 32  # words of a message for which a program waits before it reads all of them

# Parameters of the kernel -------------------------------------------------------------------------


class Added(NamedTuple):
    """What is added to x: nothing, messages, or y."""

    memory: Tensor | None = None  # of a `TokenInbox`
    calls: Tensor | None = None
    y: Tensor | None = None  # [B, T, D]: B branches of a sublayer, or one
    branch_norms: Tensor | None = None  # [B, D]: norms of the branches, before their sum
    norm: Tensor | None = None  # [D]: norm of that sum, before x is added
    scalar: Tensor | None = None  # [1]: factor of x and all that


class Router(NamedTuple):
    """What makes scores of a normed token."""

    rows: Tensor | None = None  # [N, D]
    bias: Tensor | None = None  # [E]: of scores
    score_bias: Tensor | None = None  # fp32 [E]: sigmoid scores; the choice is by score + bias


class Results(NamedTuple):
    """Where results are stored."""

    normed: Tensor  # [T, D], or the operands of a `QuantizedX`
    total: Tensor | None = None  # [T, D]: the sum, rounded
    units: Tensor | None = None  # of a `QuantizedX`
    scores: Tensor | None = None  # [T, N], with sigmoid scores [T, 2, N]: `routing.ChoiceSettings`
    indices: Tensor | None = None  # int64 [1, A + S]: marked as not chosen yet, -1


@dataclass(frozen=True)
class Layout:
    """In which order a `QuantizedX` has numbers, and how many quads a program quantizes."""

    kind: str  # of the `Weight`
    quads: int  # of the token
    run: int  # words of a group
    fields: int  # codes in a word
    lanes: int  # quads of a program


@dataclass(frozen=True)
class Join:
    """Settings of `_join`."""

    D: int
    eps: float
    N: int = 0  # scores of a token; 0: none
    E: int = 0
    rows: int = 0  # scores that a program computes
    many: bool = False  # several tokens with scores
    share: int = 0  # numbers of a token that a program stores; 0: the first program stores all
    pairs: int = 0  # of `Results.indices`
    scale: float = 1.0  # factor of what is added
    branches: int = 1
    messages: Messages | None = None
    layout: Layout | None = None

    @property
    def block(self) -> int:
        """Numbers of a tile that has a token."""
        return triton.next_power_of_2(self.D)

    @property
    def probes(self) -> int:
        """Words of a message that a program waits for at first."""
        return PROBES if self.D >= PROBES else 0


# Kernel -------------------------------------------------------------------------------------------


@jit
def _load_score_biases(router, expert, s: tl.constexpr):
    """Load what is added to the dot products of experts [ROWS], and to their sigmoids."""
    added, of_scores = 0.0, 0.0
    if router.bias is not None:
        added = tl.load(router.bias + expert, mask=expert < s.E, other=0.0).to(tl.float32)
    if router.score_bias is not None:
        of_scores = tl.load(router.score_bias + expert, mask=expert < s.E, other=0.0)
    return added, of_scores


@jit
def _clear_choice(indices, s: tl.constexpr):
    """Let the first program mark the indices as not chosen yet: -1."""
    pair = tl.program_id(0) * s.pairs + tl.arange(0, 32)
    tl.store(indices + pair, tl.full([32], -1, tl.int64), mask=pair < s.pairs)


@jit
def _receive_sum(memory, call, d, dtype: tl.constexpr, m: tl.constexpr, s: tl.constexpr):
    """Wait for the messages of all ranks -> their sum, fp32 [BLOCK].

    A program waits for a few words of each message before it reads them all: while many programs
    read all words again and again, L2 has less time for those that arrive.
    """
    ROWS: tl.constexpr = m.rows
    PROBES: tl.constexpr = s.probes
    rank = tl.arange(0, ROWS)[:, None]
    inbox = memory + rank * m.stride
    wanted = (rank < m.ranks) & (d < s.D)[None, :]
    if PROBES:
        probe = inbox + (tl.arange(0, PROBES) * (s.D // PROBES))[None, :]
        probes = (rank < m.ranks) & (tl.arange(0, PROBES) >= 0)[None, :]
        while any_missing(tl.load(probe, mask=probes, other=0, volatile=True), call, probes):
            pass
    return receive(inbox + d[None, :], call, wanted, dtype)


@jit
def _load_quads(x, l: tl.constexpr, VOLATILE: tl.constexpr = False):
    """Load this program's quads of x in the order of a `QuantizedX`."""
    return load_x(x, tl.program_id(0), l.quads, l.run, l.fields, l.lanes, VOLATILE)


@jit
def _receive_again(memory, add, scale: tl.constexpr, m: tl.constexpr, l: tl.constexpr):
    """Load the messages at `memory`, all received, in the order of `add` -> the sums with it.

    add: the residual as of `_load_quads`.
    """
    RANKS: tl.constexpr = m.ranks
    FIELDS: tl.constexpr = l.fields
    LANES: tl.constexpr = l.lanes
    dtype: tl.constexpr = add[0].dtype
    messages, totals = (), ()
    for rank in tl.static_range(RANKS):
        messages = messages + (_load_quads(memory + rank * m.stride, l, True),)
    for k in tl.static_range(FIELDS):
        total = tl.zeros([LANES, 4], tl.float32)
        for rank in tl.static_range(RANKS):
            total += numbers_of(messages[rank][k], dtype)
        totals = totals + ((add[k].to(tl.float32) + scale * total).to(dtype),)
    return totals


@jit
def _load_branches(added, scale, at, d, stride, s: tl.constexpr):
    """Load the branches at `at` [D], `stride` apart -> the norm of the sum of their norms.

    scale: the last norm's weight.
    """
    BRANCHES: tl.constexpr = s.branches
    inside = d < s.D
    branch = added.y + at + d
    values = tl.load(branch, mask=inside, other=0.0).to(tl.float32)
    if BRANCHES > 1:
        first = tl.load(added.branch_norms + d, mask=inside, other=0.0).to(tl.float32)
        values *= tl.rsqrt(tl.sum(values * values, 0) / s.D + s.eps) * first
        for n in tl.static_range(1, BRANCHES):
            branch += stride
            other = tl.load(branch, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(added.branch_norms + n * s.D + d, mask=inside, other=0.0)
            factor = tl.rsqrt(tl.sum(other * other, 0) / s.D + s.eps)
            values += other * factor * weight.to(tl.float32)
    return values * (tl.rsqrt(tl.sum(values * values, 0) / s.D + s.eps) * scale)


@jit
def _stores(d, s: tl.constexpr):
    """Return which of a token's numbers d [BLOCK] this program stores."""
    program = tl.program_id(0)
    if s.share:
        return (d < s.D) & (d // s.share == program)
    elif s.rows:
        return d < s.D - program * s.block  # the first program alone
    else:
        return d < s.D


@jit
def _store_scores(rows, value, biases, router, scores, expert, s: tl.constexpr):
    """Store the scores of experts [ROWS] for a normed token: rows [ROWS, D], value [D].

    biases: as of `_load_score_biases`.
    """
    dots = tl.sum(rows.to(tl.float32) * value.to(tl.float32)[None, :], 1)
    if router.bias is not None:
        dots += biases[0]
    if router.score_bias is not None:
        dots = sigmoid(dots)
        tl.store(scores + s.N + expert, dots, mask=expert < s.N)
        dots += biases[1]
    tl.store(scores + expert, dots.to(scores.dtype.element_ty), mask=expert < s.N)


@jit
def _store_quantized(raw, scales, factor, results, dtype: tl.constexpr, l: tl.constexpr):
    """Norm and quantize this program's quads of x, and store them as a `QuantizedX`.

    raw, scales: x and the norm's weight as of `_load_quads`. factor: the norm's, of all of x.
    """
    FIELDS: tl.constexpr = l.fields
    KIND: tl.constexpr = l.kind
    values = ()
    for k in tl.static_range(FIELDS):
        value = raw[k].to(tl.float32) * factor * scales[k].to(tl.float32)
        values = values + (value.to(dtype).to(tl.float32),)  # rounded, as the norm is
    store_quads(values, results.normed, results.units, l.quads, KIND, l.lanes)


# Grid without scores [T]: a program has a token. With scores [N / rows], of several tokens
# [N / rows, T]: each program norms a whole token, and computes `rows` of its scores. So it needs no
# other program's results.
#
# All but x, and what is added to it, is loaded while the previous kernel runs. With messages x is
# loaded then, too: the kernel that wrote it has ended, because a product ran after that.
#
# The result of a norm is rounded like what the norm reads: the next layer reads the rounded sum.
@jit
def _join(x, added, norm, offset, router, results, s: tl.constexpr, PDL: tl.constexpr):
    D: tl.constexpr = s.D
    BLOCK: tl.constexpr = s.block
    ROWS: tl.constexpr = s.rows
    m: tl.constexpr = s.messages
    l: tl.constexpr = s.layout
    dtype: tl.constexpr = x.dtype.element_ty
    normed, scores, at = results.normed, results.scores, 0
    if s.many:
        at = tl.program_id(1) * D
        scores += tl.program_id(1) * ((1 + (router.score_bias is not None)) * s.N)
    elif not ROWS:
        at = tl.program_id(0).to(tl.int64) * D
    x += at
    normed += at
    d, program = tl.arange(0, BLOCK), tl.program_id(0)
    inside = d < D
    if ROWS:
        expert = program * ROWS + tl.arange(0, ROWS)
        rows = tl.load(
            router.rows + expert[:, None] * D + d[None, :],
            mask=(expert < s.N)[:, None] & inside[None, :],
            other=0.0,
        )
    scale = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32) if norm is not None else 1.0
    if offset is not None:
        shift = tl.load(offset + d, mask=inside, other=0.0).to(tl.float32)
    if added.norm is not None:
        branch_scale = tl.load(added.norm + d, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(added.scalar).to(tl.float32) if added.scalar is not None else 1.0
    if added.memory is not None:
        add = tl.load(x + d, mask=inside, other=0.0)
    if ROWS:
        biases = _load_score_biases(router, expert, s)
    if l is not None:
        scales = _load_quads(norm, l)
        if added.memory is not None:
            raw = _load_quads(x, l)
    if added.memory is not None:
        call = load_call(added.calls)
    await_previous(PDL)
    if added.memory is not None:
        _clear_choice(results.indices, s)
        memory = added.memory + (call & 1) * m.half
        value = add.to(tl.float32) + s.scale * _receive_sum(memory, call, d, dtype, m, s)
    elif added.norm is not None:
        stride = tl.num_programs(0).to(tl.int64) * D if not ROWS else D
        value = _load_branches(added, branch_scale, at, d, stride, s)
        value = (tl.load(x + d, mask=inside, other=0.0).to(tl.float32) + value) * factor
    else:
        value = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
        if added.y is not None:
            y = tl.load(added.y + at + d, mask=inside, other=0.0).to(tl.float32)
            value += y * s.scale
        if results.indices is not None:
            _clear_choice(results.indices, s)
        if l is not None:
            raw = _load_quads(x, l)
    if results.total is not None:
        value = value.to(dtype)
        tl.store(results.total + at + d, value, mask=_stores(d, s))
        if l is not None:
            raw = _receive_again(memory, raw, s.scale, m, l)
        value = value.to(tl.float32)  # norm the rounded sum, which the next layer reads
    if offset is not None:
        value = tl.where(inside, value - tl.sum(value, 0) / D, 0.0)
    factor = tl.rsqrt(tl.sum(value * value, 0) / D + s.eps)
    value = value * factor * scale
    if offset is not None:
        value += shift
    value = value.to(dtype)
    if ROWS:
        _store_scores(rows, value, biases, router, scores, expert, s)
    if l is None:
        tl.store(normed + d, value, mask=_stores(d, s))
    elif program * l.lanes < l.quads:  # the other programs end sooner
        _store_quantized(raw, scales, factor, results, dtype, l)
    if added.memory is not None:
        count_call(added.calls, call, m)


# Launching ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormRouter:
    """A norm and the router after it."""

    norm: Tensor  # [D]: the norm's weight
    eps: float
    rows: Tensor  # [N, D]: a row for each of E experts; then the shared experts' gate, if gated
    routing: Routing
    bias: Tensor | None = None  # [E]: of scores

    @property
    def router(self) -> Router:
        """The kernel's tensors."""
        return Router(self.rows, self.bias, self.routing.score_bias)

    @property
    def score_rows(self) -> int:
        """Rows of scores that a token has."""
        return 1 + (self.routing.score_bias is not None)

    def check(self, x: Tensor) -> None:
        """Raise ValueError for x [T, D] or weights that the kernel does not take."""
        N, D = self.rows.shape
        if x.ndim != 2 or x.shape[1] != D or self.norm.shape != (D,):
            shapes = list(x.shape), list(self.norm.shape)
            raise ValueError(f"x {shapes[0]}, norm {shapes[1]} and a router of width {D}")
        check_router(N - self.routing.gated, D, self.routing)

    def settings(self, rows: int, **others) -> Join:
        """Return the settings of a kernel that computes `rows` scores a program."""
        N, D = self.rows.shape
        return Join(D, self.eps, N, N - self.routing.gated, rows, **others)


def empty_norm(
    x: Tensor, weight: Weight | None, programs: int, warps: int
) -> tuple[Tensor | QuantizedX, Layout | None]:
    """Return where a kernel stores the norm of x [T, D], and its layout.

    It is a `QuantizedX` for one token and a weight whose codes are multiplied as integers.
    programs, warps: of the kernel.
    """
    if weight is None or len(x) > 1 or weight.kind not in INTEGERS:
        return torch.empty_like(x), None
    fields, quads = weight.fields, weight.quads
    lanes = max(8 * warps, triton.next_power_of_2(triton.cdiv(quads, programs)))
    layout = Layout(weight.kind, quads, weight.group // fields, fields, lanes)
    return empty_quantized(quads, weight, x.dtype, x.device), layout


def results_of(normed: Tensor | QuantizedX, **others: Tensor | None) -> Results:
    """Return where to store: `normed`, and the other fields."""
    if isinstance(normed, QuantizedX):
        return Results(normed.operands, units=normed.units, **others)
    return Results(normed, **others)


def rows_of(N: int, T: int) -> int:
    """Return how many of a token's N scores a program of `norm_router` computes.

    Each program norms the token. Of several tokens there are more programs than run at once.
    """
    return next((rows for rows in (4, 2) if T > 1 and N * T // rows >= MANY_PROGRAMS), 1)


def divide_scores(N: int) -> tuple[int, int]:
    """Return programs and scores of each, a power of two, where all programs run at once."""
    rows = triton.next_power_of_2(triton.cdiv(N, MAX_PROGRAMS))
    return triton.cdiv(N, rows), rows


def share_of(D: int, programs: int) -> int:
    """Return how many of a token's D numbers each of several programs stores: 16 bytes or more."""
    return max(8, triton.next_power_of_2(triton.cdiv(D, programs)))


def warps_of(D: int, ranks: int) -> int:
    """Return the warps of a program that receives."""
    return 4 if words_of(D, ranks) <= 4096 else 8


def norm_router(
    x: Tensor,
    before: NormRouter,
    weight: Weight | None = None,
    indices: Tensor | None = None,
    rows: int | None = None,
    warps: int = 4,
    pdl: bool | None = None,
) -> tuple[Tensor | QuantizedX, Tensor]:
    """Norm x [T, D], and score the experts for it.

    Return its norm [T, D] and scores fp32 [T, 1 or 2, N]: those by which experts are chosen, and
    with sigmoid routing, those that become weights. The reference is `RMSNorm`, then the router.

    weight: the `Weight` that multiplies the norm of one token; if its codes are multiplied as
    integers, the norm is returned as a `QuantizedX`. indices int64 [1, A + S]: one token's for
    `gate_up`, filled with -1: no expert is chosen yet. rows, warps: of a program; rows None:
    `rows_of`. With PDL, all but x is loaded while the previous kernel runs. Raises ValueError as
    `NormRouter.check`.
    """
    before.check(x)
    N, T = len(before.rows), len(x)
    rows = rows or rows_of(N, T)
    programs = triton.cdiv(N, rows)
    scores = torch.empty(T, before.score_rows, N, dtype=torch.float32, device=x.device)
    normed, layout = empty_norm(x, weight, programs, warps)
    results = results_of(normed, scores=scores, indices=indices)
    pairs = 0 if indices is None else indices.shape[1]
    s = before.settings(rows, many=T > 1, pairs=pairs, layout=layout)
    grid = (programs,) if T == 1 else (programs, T)
    tensors = x, Added(), before.norm, None, before.router, results
    launch(_join, grid, *tensors, settings=s, warps=warps, pdl=pdl)
    return normed, scores


def norm_tokens(x: Tensor, norm: Tensor, eps: float, pdl: bool | None = None) -> Tensor:
    """Return the RMS norm of x [T, D], as `RMSNorm`."""
    normed, (T, D) = torch.empty_like(x), x.shape
    tensors = x, Added(), norm, None, Router(), Results(normed)
    launch(_join, (T,), *tensors, settings=Join(D, eps), warps=8, pdl=pdl)
    return normed


def receive_norm_router(
    x: Tensor,
    inbox: TokenInbox,
    scale: float,
    before: NormRouter,
    indices: Tensor,
    weight: Weight | None = None,
    pdl: bool | None = None,
) -> tuple[Tensor, Tensor | QuantizedX, Tensor]:
    """Do what `receive_add` does, norm the result [1, D], and score the experts for it.

    Return x + scale * sum, rounded, then its norm and scores as `norm_router`; all are bitwise
    identical on all ranks. The reference is `all_reduce_sum`, `AddNorm`, the router.

    before, indices, weight: as of `norm_router`. With PDL, all but the messages is loaded while the
    previous kernel runs, which must not write it. Raises ValueError as `NormRouter.check`.
    """
    before.check(x)
    N, D = before.rows.shape
    programs, rows = divide_scores(N)
    warps, total = warps_of(D, len(inbox.slots)), torch.empty_like(x)
    normed, layout = empty_norm(x, weight, programs, warps)
    scores = torch.empty(before.score_rows, N, dtype=torch.float32, device=x.device)
    results = results_of(normed, total=total, scores=scores, indices=indices)
    s = before.settings(
        rows,
        share=share_of(D, programs),
        pairs=indices.shape[1],
        scale=scale,
        messages=messages_of(inbox),
        layout=layout,
    )
    added = Added(inbox.memory, inbox.calls)
    tensors = x, added, before.norm, None, before.router, results
    launch(_join, (programs,), *tensors, settings=s, warps=warps, pdl=pdl)
    return total, normed, scores


# Residual add + norm of compiled blocks -----------------------------------------------------------


def empty_scores(x: Tensor, router: Tensor | None) -> Tensor:
    """x [..., D], router [E, D] -> uninitialized scores [T, E]; [0] without a router."""
    if router is None:
        return x.new_empty(0)
    return x.new_empty(x.numel() // x.shape[-1], router.shape[0])


def _join_fixed(
    x: Tensor,
    added: Added,
    norm: tuple[Tensor | None, Tensor | None, float],
    router: Tensor | None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `_join` for x [..., D] -> sum, norm, scores. norm: weight, bias, eps.

    cuBLAS computes the scores of several tokens: it chooses its kernels by shapes alone, hence the
    same on all ranks.
    """
    D, (weight, bias, eps) = x.shape[-1], norm
    tokens, branches = x.numel() // D, added.y.numel() // x.numel()
    total, normed, scores = torch.empty_like(x), torch.empty_like(x), empty_scores(x, router)
    s, programs, found = Join(D, eps, scale=scale, branches=branches), tokens, Router()
    results = Results(normed, total)
    if router is not None and tokens == 1:
        programs, rows = divide_scores(len(router))
        N, share = len(router), share_of(D, programs)
        s = replace(s, N=N, E=N, rows=rows, share=share)
        found, results = Router(router), Results(normed, total, scores=scores)
    launch(_join, (programs,), x, added, weight, bias, found, results, settings=s, warps=8)
    if router is not None and tokens > 1:
        scores = F.linear(normed.view(-1, D), router)
    return total, normed, scores


def fixed_add_norm(
    x: Tensor,
    y: Tensor,
    scale: float,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    router: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add x + scale * y [..., D], norm the sum and compute router scores from it.

    The norm is `F.rms_norm`, with a bias `F.layer_norm`. router [E, D] gives scores [T, E]; None
    gives [0]. Return the sum, the norm and the scores, bitwise identical on all GPUs of one kind.
    """
    if x.shape != y.shape:
        raise ValueError(f"y {list(y.shape)} is not like x {list(x.shape)}")
    if not can_launch(x):
        return norms.add_norm(x, y, scale, weight, bias, eps, router)
    added = Added(y=y.contiguous())
    return _join_fixed(x.contiguous(), added, (weight, bias, eps), router, scale)


def fixed_sandwich(
    x: Tensor,
    y: Tensor,
    branch_weights: Tensor | None,
    weight: Tensor,
    scalar: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    router: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm a sublayer's output, add it to x, norm the sum and compute router scores from it.

    x [..., D]. y [B, ..., D]: with several branches, y is the sum of their norms, whose weights are
    branch_weights [B, D]. Return (x + norm(y)) * scalar [1], its norm by next_weight [D], and
    router scores [T, E], all bitwise identical on all GPUs of one kind. None: no such factor.
    """
    if x.shape != y.shape[1:]:
        raise ValueError(f"branches of y {list(y.shape)} are not like x {list(x.shape)}")
    if not can_launch(x):
        return norms.sandwich(x, y, branch_weights, weight, scalar, next_weight, eps, router)
    added = Added(y=y.contiguous(), branch_norms=branch_weights, norm=weight, scalar=scalar)
    return _join_fixed(x.contiguous(), added, (next_weight, None, eps), router)
