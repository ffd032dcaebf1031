"""The kernel between two products: [x + what is added] + norm + [router scores] + [integers].

`join_tokens` has compile-time cases, which launchers name:

    norm_router           x is given; or x and a sublayer's result to be normed, or the messages of
                          all ranks (ops/ranks/mailbox.py), or these to be normed; scores. An x
                          that is normed already has scores alone
    norm_tokens           the same without scores: more tokens than a product norms by itself
    add_branch            x + a normed result, or that of messages; x + messages; no norm after it
    fixed_join            x + y, or normed branches; no scores: compiled blocks

All ranks must compute the same bits, or they choose different experts where two scores are nearly
equal. Inductor's tile shapes may differ between ranks. `join_tokens` has fixed ones, and adds
messages in the order of ranks.

A norm is quantized here, once for all programs of the experts' first product.

Letters: T tokens, D model dim, E experts, N scores of a token: E, and the shared experts' gate.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ops.declared import Routing
from ops.launch import await_previous, jit, launch, tl
from ops.products.branches import (
    load_branch_again,
    load_branches,
    load_quads,
    receive_again,
    receive_sum,
)
from ops.products.few_x import UnitOrder, place_in_order
from ops.products.prompt_rows import combine_token
from ops.products.quantized_x import Layout, QuantizedX, empty_norm, store_quads
from ops.products.routing import check_router
from ops.products.weights import Weight
from ops.ranks.mailbox import MAX_PROGRAMS, Messages, TokenInbox, count_call, load_call, words_of
from ops.sizes import cdiv, pow2

MANY_PROGRAMS = 256  # about as many of `norm_router` as an H200 runs with the least delay
PROBES = 32  # words of a message for which a program waits before it reads all of them
PART = 128  # numbers that a program (one warp) adds, if nothing is normed


class Added(NamedTuple):
    """What is added to x: nothing, messages, or y. With `norm` messages are branches, as y is."""

    memory: Tensor | None = None  # a `TokenInbox`'s
    calls: Tensor | None = None
    y: Tensor | None = None  # [B, T, D]: B branches of a sublayer, or one
    branch_norms: Tensor | None = None  # [B, D]: norms of the branches, before their sum
    norm: Tensor | None = None  # [D]: norm of that sum, before x is added
    scalar: Tensor | None = None  # [1]: factor of x and all that


NOTHING = Added()


class Router(NamedTuple):
    """What makes scores of a normed token."""

    rows: Tensor | None = None  # [N, D]
    bias: Tensor | None = None  # [E]: of scores
    score_bias: Tensor | None = None  # [E]: the choice is by score + bias; or `Routing.factors`


class Results(NamedTuple):
    """Where results are stored."""

    normed: Tensor | None = None  # [T, D], or the operands of a `QuantizedX`
    total: Tensor | None = None  # [T, D]: the sum, rounded
    units: Tensor | None = None  # units of a `QuantizedX`
    plain: Tensor | None = None  # [T, D]: the norm, too, beside a `QuantizedX`
    ordered: Tensor | None = None  # [T, D]: the norm, too, in the order of
    columns: Tensor | None = None  # int32 [D]
    scores: Tensor | None = None  # [T, N], with a score_bias [T, 2, N]: `routing.ChoiceSettings`
    indices: Tensor | None = None  # int64 [T, A + S]: marked as not chosen yet, -1


@dataclass(frozen=True)
class Join:
    """Settings of `join_tokens`."""

    D: int
    eps: float
    N: int = 0  # scores of a token; 0: none
    E: int = 0
    rows: int = 0  # scores that a program computes
    many: bool = False  # the grid has an axis of tokens
    softmax: bool = False  # of scores with a bias, or with factors
    unscaled: bool = False  # scores are of the norm without its weight
    bias_before: bool = False  # as of `Routing`
    share: int = 0  # numbers of a token that a program stores; 0: the first program stores all
    groups: int = 1  # rows that a token of several norms has, without scores
    part: int = 0  # numbers of the token that a program has, if nothing is normed; 0: all
    early: bool = False  # the next kernel starts at once: a product, whose weights are then loaded
    normed: bool = True  # False: x is not normed here
    pairs: int = 0  # of `Results.indices`
    active: int = 0  # pairs of a token, of which the sum is added
    scale: float = 1.0  # factor of what is added
    branches: int = 1
    messages: Messages | None = None
    layout: Layout | None = None
    order: UnitOrder | None = None  # in which the norm is stored

    # Numbers of a tile that has a token, or a part of it.
    block = property(lambda s: s.part or pow2(s.D))
    # Words of a message that a program waits for at first.
    probes = property(lambda s: PROBES if s.D >= PROBES and not s.part else 0)


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
    """Let the first program of a token mark its indices as not chosen yet: -1."""
    pair = tl.program_id(0) * s.pairs + tl.arange(0, 32)
    tl.store(indices + pair, tl.full([32], -1, tl.int64), mask=pair < s.pairs)


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
    """Store the scores of experts: rows [ROWS, D], value [D]. biases: `_load_score_biases`."""
    dots = tl.sum(rows.to(tl.float32) * value.to(tl.float32)[None, :], 1)
    if router.bias is not None:
        dots += biases[0]
    if router.score_bias is not None:
        if s.softmax:  # its choice adds the bias
            tl.store(scores + s.N + expert, biases[1], mask=expert < s.N)
        else:
            part = tl.sigmoid(dots)
            tl.store(scores + s.N + expert, part, mask=expert < s.N)
            if not s.bias_before:
                dots = part
            dots += biases[1]
    tl.store(scores + expert, dots.to(scores.dtype.element_ty), mask=expert < s.N)


@jit
def _add_messages(memory, add, added, call, scale, factor, d, s: tl.constexpr):
    """Receive messages; return x plus them or their norm, fp32, and 1 / RMS of their sum.

    add: x. scale: the norm's weight. factor: of the sum, with a norm.
    """
    if added.norm is None:
        return add.to(tl.float32) + s.scale * receive_sum(memory, call, d, add.dtype, s), 1.0
    else:
        value, inverse = load_branches(memory, call, added, scale, d, s.D, add.dtype, s)
        return (add.to(tl.float32) + value) * factor, inverse


@jit
def _add_results(x, y, added, pairs, scale, factor, d, s: tl.constexpr):
    """Return x plus y or the norm of branches there, fp32, and 1 / RMS of these.

    y: where the token's begin; None: the sum of its `pairs`, or x alone. The others: as of
    `_add_messages`.
    """
    if added.norm is not None:
        stride = tl.num_programs(1).to(tl.int64) * s.D
        value, inverse = load_branches(y, None, added, scale, d, stride, x.dtype.element_ty, s)
        value = (tl.load(x + d, mask=d < s.D, other=0.0).to(tl.float32) + value) * factor
        return value, inverse
    else:
        value = tl.load(x + d, mask=d < s.D, other=0.0).to(tl.float32)
        if s.active:
            own = combine_token(pairs, tl.program_id(1), d, s.D, s.block, s.active)
            value += own.to(tl.float32) * s.scale
        elif y is not None:
            value += tl.load(y + d, mask=d < s.D, other=0.0).to(tl.float32) * s.scale
        return value, 1.0


@jit
def _store_integers(raw, scales, factor, normed, units, dtype: tl.constexpr, s: tl.constexpr):
    """Store a program's quads of the norm as integers. raw, scales: as of `load_quads`."""
    l: tl.constexpr = s.layout
    if s.normed:
        quads = [  # rounded, as the norm is
            (raw[k].to(tl.float32) * factor * scales[k].to(tl.float32)).to(dtype).to(tl.float32)
            for k in l.field_numbers
        ]
    else:
        quads = [raw[k].to(tl.float32) for k in l.field_numbers]
    store_quads(quads, normed, units, l)


# Grid [programs, T]; of one token with scores, or if nothing is normed, [programs]. With scores [N
# / rows, T]: each program norms a whole token, and computes `rows` of its scores. So it needs no
# other program's results. Without scores a token has one program, or D / part.
# All but x, and what is added to it, is loaded while the previous kernel runs. With messages x is
# loaded then, too: the kernel that wrote it has ended, because a product ran after that.
#
# The result of a norm is rounded like what the norm reads: the next layer reads the rounded sum.
@jit
def join_tokens(x, added, pairs, norm, router, results, s: tl.constexpr, PDL: tl.constexpr):
    l: tl.constexpr = s.layout
    dtype: tl.constexpr = x.dtype.element_ty
    normed, units, scores, indices = results.normed, results.units, results.scores, results.indices
    token = tl.program_id(1).to(tl.int64) if s.many else 0
    at, d, program = token * s.D, tl.arange(0, s.block), tl.program_id(0)
    x += at
    y = None if added.y is None else added.y + at
    if scores is not None:
        scores += token * ((1 + (router.score_bias is not None)) * s.N)
    if indices is not None:
        indices += token * s.pairs
    if l is not None:
        normed += token * (l.quads * l.fields)
        units += token * (l.quads * l.units)
    elif normed is not None:
        normed += at
    if s.groups > 1:
        norm += token % s.groups * s.D
    if s.part:
        d += program * s.part
    inside = d < s.D
    if s.rows:
        expert = program * s.rows + tl.arange(0, s.rows)
        rows = tl.load(
            router.rows + expert[:, None] * s.D + d[None, :],
            mask=(expert < s.N)[:, None] & inside[None, :],
            other=0.0,
        )
    scale, branch_scale, scales = 1.0, 1.0, ()
    if norm is not None:
        scale = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
    if added.norm is not None:
        branch_scale = tl.load(added.norm + d, mask=inside, other=0.0).to(tl.float32)
    if results.ordered is not None:
        column = tl.load(results.columns + d, mask=inside, other=0)
    factor = tl.load(added.scalar).to(tl.float32) if added.scalar is not None else 1.0
    if added.memory is not None:
        add = tl.load(x + d, mask=inside, other=0.0)
    if s.rows:
        biases = _load_score_biases(router, expert, s)
    if l is not None:
        if s.normed:
            scales = load_quads(norm, l)
        if added.memory is not None:
            raw = load_quads(x, l)
    if added.memory is not None:
        call = load_call(added.calls)
    await_previous(PDL, s.early)
    if added.memory is not None:
        if indices is not None:
            _clear_choice(indices, s)
        memory = added.memory + (call & 1) * s.messages.half
        value, inverse = _add_messages(memory, add, added, call, branch_scale, factor, d, s)
    else:
        value, inverse = _add_results(x, y, added, pairs, branch_scale, factor, d, s)
        if indices is not None:
            _clear_choice(indices, s)
        if l is not None:
            if added.norm is not None:
                raw = load_branch_again(x, y, added.norm, inverse, factor, l)
            else:
                raw = load_quads(x, l)
    if results.total is not None:
        value = value.to(dtype)
        tl.store(results.total + at + d, value, mask=_stores(d, s))
        if l is not None and added.memory is not None:
            raw = receive_again(memory, raw, added.norm, inverse, factor, s, l)
        value = value.to(tl.float32)  # norm the rounded sum, which the next layer reads
    if s.normed:
        factor = tl.rsqrt(tl.sum(value * value, 0) / s.D + s.eps)
        value = value * factor
        if not s.unscaled:
            value = value * scale
    value = value.to(dtype)
    if s.rows:
        _store_scores(rows, value, biases, router, scores, expert, s)
    if s.unscaled:
        value = (value.to(tl.float32) * scale).to(dtype)
    if l is not None:
        if program * l.lanes < l.quads:  # the other programs end sooner
            _store_integers(raw, scales, factor, normed, units, dtype, s)
    elif normed is not None:
        tl.store(normed + place_in_order(d, s.order), value, mask=_stores(d, s))
    if results.plain is not None:
        tl.store(results.plain + at + d, value, mask=_stores(d, s))
    if results.ordered is not None:
        tl.store(results.ordered + at + d, tl.gather(value, column, 0), mask=inside)
    if added.memory is not None:
        count_call(added.calls, call, s.messages)


@dataclass(frozen=True)
class NormRouter:
    """A norm and the router after it."""

    norm: Tensor | None  # [D]: the norm's weight; None: x is normed already
    eps: float
    rows: Tensor  # [N, D]: a row for each of E experts; then the shared experts' gate, if gated
    routing: Routing
    bias: Tensor | None = None  # [E]: of scores
    unscaled: bool = False  # scores are of the norm without its weight


def divide_token(N: int, D: int) -> tuple[int, int, int]:
    """Return programs that run at once, and the scores and numbers of a token that each stores."""
    rows = pow2(cdiv(N, MAX_PROGRAMS))
    programs = cdiv(N, rows)
    return programs, rows, max(8, pow2(cdiv(D, programs)))  # 16 bytes


def norm_router(
    x: Tensor,
    before: NormRouter,
    weight: Weight | None = None,
    indices: Tensor | None = None,
    plain: Tensor | None = None,
    rows: int | None = None,
    warps: int = 4,
    added: Added = NOTHING,
    total: Tensor | None = None,
    inbox: TokenInbox | None = None,
    scale: float = 1.0,
    order: UnitOrder | None = None,
) -> tuple[Tensor | QuantizedX, Tensor]:
    """Norm x [T, D], and score the experts for it.

    Return its norm [T, D], x itself if it is normed already, and scores fp32 [T, 1 or 2, N]: those
    by which experts are chosen. A bias makes a second row (`routing.ChoiceSettings`). The reference
    is `RMSNorm`, then the router.

    weight: the `Weight` that multiplies the norm; if its codes are multiplied as integers, the norm
    is returned as a `QuantizedX`. indices int64 [T, A + S]: for `gate_up`, filled with -1: no
    expert is chosen yet. plain [T, D]: where to store the norm, too, if it is a `QuantizedX`. rows:
    scores of a program; None: chosen. warps: of a program. Raises ValueError for x or weights that
    the kernel does not take.

    added: one branch, which is normed and added to x first; total [T, D] is where to store the sum.
    inbox: to one token, T = 1, add `scale` times the messages of all ranks there, or with a norm
    the norm of their sum. The results are bitwise identical on all ranks. order: in which the norm
    is stored, if it is no `QuantizedX` and not x itself.
    """
    (N, D), T, messages, routing = before.rows.shape, len(x), {}, before.routing
    E, of_experts = N - routing.gated, routing.of_experts
    if x.shape[1:] != (D,) or (before.norm is not None and before.norm.shape != (D,)):
        raise ValueError(f"x {list(x.shape)} or its norm for a router of width {D}")
    check_router(E, D, routing)
    if inbox is None:
        # Each program norms the token. Of several tokens there are more programs than run at once.
        several = (4, 2) if T > 1 else ()
        rows = rows or next((n for n in several if N * T // n >= MANY_PROGRAMS), 1)
        programs = cdiv(N, rows)
    else:
        programs, rows, share = divide_token(N, D)
        warps = 4 if words_of(D, len(inbox.slots)) <= 4096 else 8
        messages = dict(share=share, scale=scale, messages=inbox.sizes)
        added = added._replace(memory=inbox.memory, calls=inbox.calls)
    normed, layout = empty_norm(x, weight, programs, warps)
    scores = x.new_empty(T, 1 + (of_experts is not None), N, dtype=torch.float32)
    results = Results(normed, total, scores=scores, indices=indices)
    if before.norm is None and layout is None:
        normed, results = x, results._replace(normed=None)
    if isinstance(normed, QuantizedX):
        results = results._replace(normed=normed.operands, units=normed.units, plain=plain)
    s = Join(
        *(D, before.eps, N, E, rows, T > 1),
        softmax=routing.softmax or routing.factors is not None,
        unscaled=before.unscaled,
        bias_before=routing.bias_before,
        normed=before.norm is not None,
        pairs=0 if indices is None else indices.shape[1],
        layout=layout,
        order=order,
        **messages,
    )
    grid = (programs,) if T == 1 else (programs, T)
    tensors = x, added, None, before.norm, Router(before.rows, before.bias, of_experts), results
    launch(join_tokens, grid, *tensors, settings=s, warps=warps)
    return normed, scores


def norm_tokens(
    x: Tensor, norm: Tensor | None, eps: float, added: Added = NOTHING, total: Tensor | None = None
) -> Tensor:
    """Return the RMS norm of x [T, D], as `RMSNorm`. added, total: as of `norm_router`.

    norm [G, D]: T tokens have G rows each, with weights of their own.
    """
    normed, (T, D) = torch.empty_like(x), x.shape
    groups = 1 if norm is None else norm.numel() // D
    tensors = x, added, None, norm, Router(), Results(normed, total)
    s = Join(D, eps, many=True, groups=groups, early=True)
    launch(join_tokens, (1, T), *tensors, settings=s, warps=8)
    return normed


def add_branch(
    x: Tensor, added: Added, eps: float, inbox: TokenInbox | None = None, scale: float = 1.0
) -> Tensor:
    """Return x [T, D] plus normed branches: y [B, T, D], or [T, D] without branch_norms.

    inbox: they are the messages [B D] of all ranks there, of T = 1, in place of y. Without a norm
    the result is x + scale * the sum of messages [D], bitwise identical on all ranks.
    """
    total, (T, D) = torch.empty_like(x), x.shape
    branches = 1 if added.branch_norms is None else len(added.branch_norms)
    s, grid, warps = Join(D, eps, many=True, branches=branches, scale=scale), (1, T), 8
    if inbox is not None:
        added = added._replace(memory=inbox.memory, calls=inbox.calls)
        s = replace(s, messages=inbox.sizes)
    if added.norm is None:
        s, grid, warps = replace(s, many=False, part=PART, early=True), (cdiv(D, PART),), 1
    tensors = x, added, None, None, Router(), Results(total=total)
    launch(join_tokens, grid, *tensors, settings=s, warps=warps)
    return total
