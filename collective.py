"""Triton kernels of several GPUs: sums for messages so small that what counts is how often one waits for the others,
and a residual with its norm and a product that have the same bits on all of them."""

from __future__ import annotations  # the annotations of kernels name triton, which may be absent

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import jit, starts_early, tl, triton

# Sums over GPUs -----------------------------------------------------------------------------------------------------
#
# Each rank writes its numbers into the inboxes of all others, and adds what has come into its own to them, in one order
# on all. Beside each 32 bits stands the count of the call, in one word of 64, which arrives whole: no other sign is
# needed. Two halves of an inbox are used in turn: who has begun call n + 1 has ended call n, and a rank gets to n + 2
# only after all have begun n + 1. (The idea of NCCL's LL protocol, for a message that all read.)


class Inbox(NamedTuple):
    """What a rank needs to write into the others' memory, and they into its own. Every rank makes the same calls."""

    memory: Tensor  # int64 [2, N, P, WORDS], zeros at first, for messages of up to P * WORDS words of 32 bits
    peers: Tensor  # int64 [N], where that of each rank begins
    turns: Tensor  # int32 [P], zeros at first, this rank's own: the calls so far, by program
    rank: int


WORDS = 64  # that one program, a warp, sums


@jit
def _pair(low, high):
    """Two fp32 -> the bits of two bf16, the first lower, in 32."""
    low, high = low.to(tl.bfloat16).to(tl.int16, bitcast=True), high.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return low.to(tl.int32) & 0xFFFF | high.to(tl.int32) << 16


@jit
def _own(x, weights, at, N: tl.constexpr, TERMS: tl.constexpr, WIDE: tl.constexpr, BF16: tl.constexpr):
    """Words of a message of N: of x as it is, or of the weighted sum of so many terms, which are in fp32 if WIDE."""
    if TERMS == 0:
        return tl.load(x + at, mask=at < N, other=0)
    else:
        low, high = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)
        for term in tl.static_range(TERMS):
            weight, begin = tl.load(weights + term), term * N + at
            if BF16 and WIDE:  # two numbers of it for one word of the message
                low += weight * tl.load(x + begin * 2, mask=at < N, other=0).to(tl.float32, bitcast=True)
                high += weight * tl.load(x + begin * 2 + 1, mask=at < N, other=0).to(tl.float32, bitcast=True)
            else:
                bits = tl.load(x + begin, mask=at < N, other=0)
                low += weight * (bits << 16 if BF16 else bits).to(tl.float32, bitcast=True)
                high += weight * (bits & -65536).to(tl.float32, bitcast=True)
        return _pair(low, high) if BF16 else low.to(tl.int32, bitcast=True)


@jit
def _push_sum(x, weights, y, peers, turns, N: tl.constexpr, TERMS: tl.constexpr, WIDE: tl.constexpr,
              WORDS: tl.constexpr, PLACES: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, R2: tl.constexpr,
              BF16: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    rank, word, place = tl.arange(0, R2)[:, None], tl.arange(0, WORDS), tl.program_id(0)
    theirs = tl.load(peers + rank, mask=rank < RANKS, other=0).to(tl.pointer_type(tl.int64))
    theirs = tl.multiple_of(theirs, (16, 16)) + (RANK * PLACES + place) * WORDS + word[None, :]
    ours = tl.multiple_of(tl.load(peers + RANK).to(tl.pointer_type(tl.int64)), 16)
    ours += (rank * PLACES + place) * WORDS + word[None, :]
    at = place * WORDS + word
    others = (rank < RANKS) & (rank != RANK) & (at < N)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # which are set up while this one waits for the others
    turn = tl.load(turns + place) + 1
    half = (turn & 1) * (RANKS * PLACES * WORDS)
    own = _own(x, weights, at, N, TERMS, WIDE, BF16)[None, :]
    stamped = own.to(tl.int64) & 0xFFFFFFFF | turn.to(tl.int64) << 32
    tl.store(theirs + half, tl.broadcast_to(stamped, others.shape), mask=others)
    found = tl.load(ours + half, mask=others, other=0, volatile=True)
    missing = others & (found >> 32 != turn)
    while tl.max(tl.max(missing.to(tl.int32), 1), 0) > 0:
        found = tl.where(missing, tl.load(ours + half, mask=missing, other=0, volatile=True), found)
        missing = others & (found >> 32 != turn)
    bits = tl.where((rank == RANK) & (at < N)[None, :], own, found.to(tl.int32))
    if BF16:
        low = tl.sum((bits << 16).to(tl.float32, bitcast=True), 0)
        total = _pair(low, tl.sum((bits & -65536).to(tl.float32, bitcast=True), 0))
    else:
        total = tl.sum(bits.to(tl.float32, bitcast=True), 0).to(tl.int32, bitcast=True)
    tl.store(y + at, total, mask=at < N)
    tl.store(turns + place, turn)  # all threads have read it, since all have been asked what is missing


def push_sum(x: Tensor, inbox: Inbox, like: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum over GPUs of x, bf16 or fp32, whose bytes are a multiple of 4 and fit into the inbox: the same bits on
    each. x: contiguous, of the shape and dtype of `like`; or, with weights fp32 [1, A], a token's terms [1, A, D], of
    that dtype or fp32."""
    y = torch.empty_like(like, memory_format=torch.contiguous_format)
    words, ranks, early = y.nbytes // 4, len(inbox.peers), starts_early(y)
    _push_sum[(triton.cdiv(words, WORDS),)](
        x.view(-1).view(torch.int32), x if weights is None else weights, y.view(-1).view(torch.int32), inbox.peers,
        inbox.turns, N=words, TERMS=0 if weights is None else weights.numel(), WIDE=x.dtype == torch.float32,
        WORDS=WORDS, PLACES=len(inbox.turns), RANK=inbox.rank, RANKS=ranks, R2=triton.next_power_of_2(ranks),
        BF16=y.dtype == torch.bfloat16, PDL=early, launch_pdl=early, num_warps=1,
    )  # fmt: skip
    return y


# The same bits on every GPU -----------------------------------------------------------------------------------------
#
# The compiler finds tile shapes by timing, on each rank by itself, so the same norm and the same product may differ in
# their last bits there, and some ranks would choose another one of two experts with nearly equal scores. Here shapes
# are fixed.

HELD = 1 << 17  # bytes that a program of 8 warps holds in half of its registers


@jit
def _fixed_join(x, y, weight, bias, rows, total, normed, scores, D: tl.constexpr, E: tl.constexpr, SCALE: tl.constexpr,
                EPS: tl.constexpr, LAYER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    at = tl.arange(0, BLOCK)
    if E:  # of one token alone; read while the kernel before is at work
        expert = tl.arange(0, E)
        row = tl.load(rows + expert[:, None] * D + at[None, :], mask=(at < D)[None, :], other=0.0)
    scale = tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
    offset = tl.load(bias + at, mask=at < D, other=0.0).to(tl.float32) if LAYER else 0.0
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at += tl.program_id(0).to(tl.int64) * D
    inside = at < (tl.program_id(0) + 1).to(tl.int64) * D
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * SCALE
    values = values.to(total.dtype.element_ty)
    tl.store(total + at, values, mask=inside)
    values = values.to(tl.float32)  # the norm is of what is kept
    if LAYER:
        values = tl.where(inside, values - tl.sum(values, 0) / D, 0.0)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / D + EPS) * scale + offset
    values = values.to(normed.dtype.element_ty)
    tl.store(normed + at, values, mask=inside)
    if E:
        found = tl.sum(row.to(tl.float32) * values.to(tl.float32)[None, :], 1)
        tl.store(scores + expert, found.to(scores.dtype.element_ty))


@jit
def _fixed_scores(x, weight, y, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(weight + tl.program_id(0) * D + at, mask=at < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.sum(tl.load(x + at, mask=at < D, other=0.0).to(tl.float32) * row, 0)
    tl.store(y + tl.program_id(0), total.to(y.dtype.element_ty))


def new_scores(x: Tensor, rows: Tensor | None) -> Tensor:
    """Room for the scores of x [..., D] by rows [E, D], [T, E]; none of it without rows."""
    return x.new_empty(0) if rows is None else x.new_empty(x.numel() // x.shape[-1], rows.shape[0])


def fixed_join(x: Tensor, y: Tensor, scale: float, weight: Tensor, bias: Tensor | None, eps: float,
               rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x + scale y of [..., D], `F.rms_norm` of it (with a bias `F.layer_norm`), and that times rows [E, D], [T, E]
    (empty without rows), in one way on every GPU of a kind.

    Scores of one token are made by the norm's program where it can hold all rows in registers, else by one for each.
    Those of more tokens are the library's, which chooses by shapes alone.
    """
    D = x.shape[-1]
    if not x.is_cuda:
        total = torch.add(x, y, alpha=scale)
        norm = F.rms_norm if bias is None else partial(F.layer_norm, bias=bias)
        normed = norm(total, weight.shape, weight=weight, eps=eps)
        return total, normed, x.new_empty(0) if rows is None else F.linear(normed.view(-1, D), rows)
    x, y, T, block, early = x.contiguous(), y.contiguous(), x.numel() // D, triton.next_power_of_2(D), starts_early(x)
    total, normed, scores = torch.empty_like(x), torch.empty_like(x), new_scores(x, rows)
    E = 0 if rows is None else len(rows)
    together = T == 1 and E * block * x.element_size() <= HELD and E & E - 1 == 0
    _fixed_join[(T,)](
        x, y, weight, weight if bias is None else bias, weight if rows is None else rows, total, normed, scores, D=D,
        E=E if together else 0, SCALE=scale, EPS=eps, LAYER=bias is not None, BLOCK=block, PDL=early, launch_pdl=early,
        num_warps=8,
    )  # fmt: skip
    if E and T > 1:
        scores = F.linear(normed.view(-1, D), rows)
    elif E and not together:
        _fixed_scores[(E,)](normed, rows, scores, D=D, BLOCK=block, PDL=early, launch_pdl=early, num_warps=4)
    return total, normed, scores
