"""Triton kernels of several GPUs: sums for messages so small that what counts is how often one waits for the others,
and a residual with its norm and a product that have the same bits on all of them."""

from __future__ import annotations  # the annotations of kernels name triton, which may be absent

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import jit
from layers import operator

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA: then no kernel here is called
    triton = None


def _starts_early(x: Tensor) -> bool:
    """Whether kernels can be set up while the one before them ends."""
    return torch.cuda.get_device_properties(x.device).major >= 9


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
def _push_sum(x, y, peers, turns, N: tl.constexpr, WORDS: tl.constexpr, PLACES: tl.constexpr, RANK: tl.constexpr,
              RANKS: tl.constexpr, R2: tl.constexpr, BF16: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
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
    own = tl.load(x + at, mask=at < N, other=0)[None, :]
    stamped = own.to(tl.int64) & 0xFFFFFFFF | turn.to(tl.int64) << 32
    tl.store(theirs + half, tl.broadcast_to(stamped, others.shape), mask=others)
    found = tl.load(ours + half, mask=others, other=0, volatile=True)
    missing = others & (found >> 32 != turn)
    while tl.max(tl.max(missing.to(tl.int32), 1), 0) > 0:
        found = tl.where(missing, tl.load(ours + half, mask=missing, other=0, volatile=True), found)
        missing = others & (found >> 32 != turn)
    bits = tl.where((rank == RANK) & (at < N)[None, :], own, found.to(tl.int32))
    if BF16:
        low = tl.sum((bits << 16).to(tl.float32, bitcast=True), 0).to(tl.bfloat16).to(tl.int16, bitcast=True)
        high = tl.sum((bits & -65536).to(tl.float32, bitcast=True), 0).to(tl.bfloat16).to(tl.int16, bitcast=True)
        total = low.to(tl.int32) & 0xFFFF | high.to(tl.int32) << 16
    else:
        total = tl.sum(bits.to(tl.float32, bitcast=True), 0).to(tl.int32, bitcast=True)
    tl.store(y + at, total, mask=at < N)
    tl.store(turns + place, turn)  # all threads have read it, since all have been asked what is missing


def push_sum(x: Tensor, inbox: Inbox) -> Tensor:
    """The sum over GPUs of x, bf16 or fp32, whose bytes are a multiple of 4 and fit into the inbox: the same bits on
    each."""
    y, words, ranks, early = torch.empty_like(x), x.nbytes // 4, len(inbox.peers), _starts_early(x)
    _push_sum[(triton.cdiv(words, WORDS),)](
        x.view(-1).view(torch.int32), y.view(-1).view(torch.int32), inbox.peers, inbox.turns, N=words, WORDS=WORDS,
        PLACES=len(inbox.turns), RANK=inbox.rank, RANKS=ranks, R2=triton.next_power_of_2(ranks),
        BF16=x.dtype == torch.bfloat16, PDL=early, launch_pdl=early, num_warps=1,
    )  # fmt: skip
    return y


# The same bits on every GPU -----------------------------------------------------------------------------------------
#
# The compiler finds tile shapes by timing, on each rank by itself, so the same norm and the same product may differ in
# their last bits there, and some ranks would choose another one of two experts with nearly equal scores. Here shapes
# are fixed.


@jit
def _fixed_join(x, y, weight, bias, total, normed, D: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
                LAYER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    at = tl.arange(0, BLOCK)
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
    tl.store(normed + at, values.to(normed.dtype.element_ty), mask=inside)


@jit
def _fixed_scores(x, weight, y, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(weight + tl.program_id(0) * D + at, mask=at < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.sum(tl.load(x + at, mask=at < D, other=0.0).to(tl.float32) * row, 0)
    tl.store(y + tl.program_id(0), total.to(y.dtype.element_ty))


def fixed_join(x: Tensor, y: Tensor, scale: float, weight: Tensor, bias: Tensor | None,
               eps: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x + scale y of [..., D], and `F.rms_norm` of it, with a bias `F.layer_norm`, in one way on every GPU."""
    if not x.is_cuda:
        total = torch.add(x, y, alpha=scale)
        if bias is None:
            return total, F.rms_norm(total, weight.shape, weight, eps)
        return total, F.layer_norm(total, weight.shape, weight, bias, eps)
    x, y, D, early = x.contiguous(), y.contiguous(), x.shape[-1], _starts_early(x)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    _fixed_join[(x.numel() // D,)](
        x, y, weight, weight if bias is None else bias, total, normed, D=D, SCALE=scale, EPS=eps,
        LAYER=bias is not None, BLOCK=triton.next_power_of_2(D), PDL=early, launch_pdl=early, num_warps=8,
    )  # fmt: skip
    return total, normed


@operator("moe_fast::fixed_scores")
def fixed_scores(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear` of x [T, D] with weight [E, D] in one way on every GPU of a kind.

    For one token an expert is a program's; more tokens are the library's, which chooses by shapes alone.
    """
    if not x.is_cuda or x.shape[0] > 1:
        return F.linear(x, weight)
    (E, D), early = weight.shape, _starts_early(x)
    y = x.new_empty(1, E)
    _fixed_scores[(E,)](x, weight, y, D=D, BLOCK=triton.next_power_of_2(D), PDL=early, launch_pdl=early, num_warps=4)
    return y


@fixed_scores.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
