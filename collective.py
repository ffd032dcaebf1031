"""Triton kernels of several GPUs: sums for messages so small that what counts is how often one waits for the others,
and a residual with its norm and a product that have the same bits on all of them."""

from __future__ import annotations  # the annotations of kernels name triton, which may be absent

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import jit

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA: then no kernel here is called
    triton = None


def _starts_early(x: Tensor) -> bool:
    """Whether kernels can be set up while the one before them ends."""
    return torch.cuda.get_device_properties(x.device).major >= 9


# Sums over GPUs -----------------------------------------------------------------------------------------------------


@jit
def _push_sum(x, y, peers, turns, WORDS: tl.constexpr, MOST: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
              R2: tl.constexpr, BLOCK: tl.constexpr, BF16: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    rank, word = tl.arange(0, R2)[:, None], tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    theirs = tl.load(peers + rank, mask=rank < RANKS, other=0).to(tl.pointer_type(tl.int64))
    ours = tl.load(peers + RANK).to(tl.pointer_type(tl.int64))
    if PDL:
        tl.extra.cuda.gdc_wait()
    turn = tl.load(turns + tl.program_id(0)) + 1
    inside = (rank < RANKS) & (word < WORDS)
    # Beside each 32 bits stands the count of the call, in one word of 64, which arrives whole: no other sign is needed.
    stamped = tl.load(x + word, mask=word < WORDS, other=0).to(tl.int64) & 0xFFFFFFFF | turn.to(tl.int64) << 32
    base = (turn & 1) * RANKS
    tl.store(theirs + (base + RANK) * MOST + word, tl.broadcast_to(stamped, [R2, BLOCK]), mask=inside)
    ours += (base + rank) * MOST + word
    found = tl.load(ours, mask=inside, other=0, volatile=True)
    while tl.max((inside & (found >> 32 != turn)).to(tl.int32)) > 0:
        found = tl.load(ours, mask=inside, other=0, volatile=True)
    bits = tl.where(inside, found, 0).to(tl.int32)
    if BF16:
        low = tl.sum((bits << 16).to(tl.float32, bitcast=True), 0).to(tl.bfloat16).to(tl.int16, bitcast=True)
        high = tl.sum((bits & -65536).to(tl.float32, bitcast=True), 0).to(tl.bfloat16).to(tl.int16, bitcast=True)
        total = low.to(tl.int32) & 0xFFFF | high.to(tl.int32) << 16
    else:
        total = tl.sum(bits.to(tl.float32, bitcast=True), 0).to(tl.int32, bitcast=True)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + word, total, mask=word < WORDS)
    tl.store(turns + tl.program_id(0), turn)


PUSH_BLOCK = 64  # 32-bit words that one warp sums


def push_sum(x: Tensor, peers: Tensor, turns: Tensor, rank: int) -> Tensor:
    """The sum over GPUs of x, bf16 or fp32, whose bytes are a multiple of 4: the same bits on each.

    peers: int64 [N], where each rank's inbox begins, int64 [2, N, M] for messages of up to M words of 32 bits, zeros at
    first. turns: int32 [M / PUSH_BLOCK], zeros at first, this rank's own. Every rank must make the same calls in turn.
    Each rank writes its numbers into the inboxes of all, and sums what has come in its own, in one order on all. Two
    halves of an inbox are used in turn: who has begun call n + 1 has ended call n, and a rank gets to n + 2 only after
    all have begun n + 1. (The idea of NCCL's LL protocol, for a message that all read.)
    """
    y, words, ranks, early = torch.empty_like(x), x.nbytes // 4, len(peers), _starts_early(x)
    _push_sum[(triton.cdiv(words, PUSH_BLOCK),)](
        x.view(-1).view(torch.int32), y.view(-1).view(torch.int32), peers, turns, WORDS=words,
        MOST=len(turns) * PUSH_BLOCK, RANK=rank, RANKS=ranks, R2=triton.next_power_of_2(ranks), BLOCK=PUSH_BLOCK,
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
    at += tl.program_id(0).to(tl.int64) * D
    inside = at < (tl.program_id(0) + 1).to(tl.int64) * D
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * SCALE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
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


@torch.library.custom_op("moe_fast::fixed_join", mutates_args=())
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


@torch.library.custom_op("moe_fast::fixed_scores", mutates_args=())
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


@fixed_join.register_fake
def _(x: Tensor, y: Tensor, scale: float, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))


@fixed_scores.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
