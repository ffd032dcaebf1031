"""All-reduce of small messages, and a residual add + norm that has fixed tile shapes.

A decode step's messages have a few KB. Their time is latency, not bandwidth, so
`push_all_reduce` has one wait and no barrier. `fixed_add_norm` adds, norms and computes
the router's scores, bitwise identical on all GPUs.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.launch import can_launch, jit, supports_pdl, tl, triton

# All-reduce by pushing ----------------------------------------------------------------

WORDS = 64  # 32-bit words of the message that a program (one warp) reduces


class Inbox(NamedTuple):
    """A rank's receive buffer and where to find the others'. All ranks make the same calls."""

    memory: Tensor  # int64 [2, N, P, WORDS], zero at first: messages of up to P * WORDS words
    peers: Tensor  # int64 [N]: address of each rank's inbox
    calls: Tensor  # int32 [P], zero at first: calls so far, counted by each program
    rank: int


@jit
def _pack_bf16(low, high):
    """Round two fp32 to bf16 -> one 32-bit word, `low` in the lower half."""
    low, high = (
        low.to(tl.bfloat16).to(tl.int16, bitcast=True),
        high.to(tl.bfloat16).to(tl.int16, bitcast=True),
    )
    return low.to(tl.int32) & 0xFFFF | high.to(tl.int32) << 16


@jit
def _load_message(
    x,
    weights,
    word,
    N: tl.constexpr,
    TERMS: tl.constexpr,
    FP32_TERMS: tl.constexpr,
    BF16: tl.constexpr,
):
    """Load 32-bit words of this rank's message of N words, bf16 pairs or fp32.

    With TERMS = 0 the message is x. Else it is the sum of weights[n] * x[n] over the
    TERMS vectors of x, which are fp32 if FP32_TERMS, otherwise of the message's dtype.
    """
    if TERMS == 0:
        return tl.load(x + word, mask=word < N, other=0)
    else:
        low, high = tl.zeros(word.shape, tl.float32), tl.zeros(word.shape, tl.float32)
        for term in tl.static_range(TERMS):
            weight, begin = tl.load(weights + term), term * N + word
            if BF16 and FP32_TERMS:  # two fp32 of the term make one word of the message
                bits = tl.load(x + begin * 2, mask=word < N, other=0)
                low += weight * bits.to(tl.float32, bitcast=True)
                bits = tl.load(x + begin * 2 + 1, mask=word < N, other=0)
                high += weight * bits.to(tl.float32, bitcast=True)
            else:
                bits = tl.load(x + begin, mask=word < N, other=0)
                low += weight * (bits << 16 if BF16 else bits).to(tl.float32, bitcast=True)
                high += weight * (bits & -65536).to(tl.float32, bitcast=True)
        return _pack_bf16(low, high) if BF16 else low.to(tl.int32, bitcast=True)


# Grid [P]: program p all-reduces words p * WORDS .. (p + 1) * WORDS of the message, one
# warp each. It writes them into the inboxes of all other ranks, then waits for theirs
# in its own inbox, and adds all N messages up in the order of ranks. The order is the
# same on all ranks, hence also the bits.
#
# With ADD the result is residual + SCALE * sum. The residual is loaded before the wait.
#
# Each 32 bits of the message travel with the call's number in one 64-bit word. A 64-bit
# store arrives whole, so a word with the right number needs no flag and no fence (as in
# NCCL's LL protocol, here from every rank to every rank).
#
# The inbox has two halves, used by odd and even calls. One wait per call suffices: a
# rank that begins call n + 1 has finished reading call n. No rank reaches call n + 2,
# which reuses the half of call n, before all have begun n + 1.
#
# PDL: the next kernel is launched at once and is set up while this one waits for the
# ranks.
@jit
def _push_all_reduce(
    x,
    weights,
    residual,
    y,
    peers,
    calls,
    N: tl.constexpr,
    TERMS: tl.constexpr,
    FP32_TERMS: tl.constexpr,
    WORDS: tl.constexpr,
    P: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    BF16: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    rank, column, program = tl.arange(0, RANKS_POW2)[:, None], tl.arange(0, WORDS), tl.program_id(0)
    outbox = tl.load(peers + rank, mask=rank < RANKS, other=0).to(tl.pointer_type(tl.int64))
    outbox = tl.multiple_of(outbox, (16, 16)) + (RANK * P + program) * WORDS + column[None, :]
    inbox = tl.multiple_of(tl.load(peers + RANK).to(tl.pointer_type(tl.int64)), 16)
    inbox += (rank * P + program) * WORDS + column[None, :]
    word = program * WORDS + column
    others = (rank < RANKS) & (rank != RANK) & (word < N)[None, :]
    if ADD:
        add = tl.load(residual + word, mask=word < N, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    call = tl.load(calls + program) + 1
    half = (call & 1) * (RANKS * P * WORDS)
    own = _load_message(x, weights, word, N, TERMS, FP32_TERMS, BF16)[None, :]
    stamped = own.to(tl.int64) & 0xFFFFFFFF | call.to(tl.int64) << 32
    tl.store(outbox + half, tl.broadcast_to(stamped, others.shape), mask=others)
    received = tl.load(inbox + half, mask=others, other=0, volatile=True)
    missing = others & (received >> 32 != call)
    while tl.max(tl.max(missing.to(tl.int32), 1), 0) > 0:
        newer = tl.load(inbox + half, mask=missing, other=0, volatile=True)
        received = tl.where(missing, newer, received)
        missing = others & (received >> 32 != call)
    bits = tl.where((rank == RANK) & (word < N)[None, :], own, received.to(tl.int32))
    if BF16:
        low = tl.sum((bits << 16).to(tl.float32, bitcast=True), 0)
        high = tl.sum((bits & -65536).to(tl.float32, bitcast=True), 0)
        if ADD:
            low = (add << 16).to(tl.float32, bitcast=True) + SCALE * low
            high = (add & -65536).to(tl.float32, bitcast=True) + SCALE * high
        total = _pack_bf16(low, high)
    else:
        total = tl.sum(bits.to(tl.float32, bitcast=True), 0)
        if ADD:
            total = add.to(tl.float32, bitcast=True) + SCALE * total
        total = total.to(tl.int32, bitcast=True)
    tl.store(y + word, total, mask=word < N)
    # Safe without a barrier: the reduction in the loop's condition waits for all threads' loads.
    tl.store(calls + program, call)


def push_all_reduce(
    x: Tensor,
    inbox: Inbox,
    like: Tensor,
    weights: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Sum x over the ranks -> a tensor like `like`, bitwise identical on all ranks.

    like: bf16 or fp32, a multiple of 4 bytes that fits into the inbox. x: contiguous; its
    shape and dtype are those of `like`. Or, given weights fp32 [1, A], x has a token's
    A terms [1, A, D] in that dtype or fp32, whose weighted sum is this rank's message.

    residual, like `like`: return residual + scale * sum. With PDL it is loaded while the
    previous kernel runs, which must not write it.
    """
    y = torch.empty_like(like, memory_format=torch.contiguous_format)
    words, ranks, pdl = y.nbytes // 4, len(inbox.peers), supports_pdl(y)
    terms = 0 if weights is None else weights.numel()
    message = dict(N=words, TERMS=terms, FP32_TERMS=x.dtype == torch.float32)
    group = dict(RANK=inbox.rank, RANKS=ranks, RANKS_POW2=triton.next_power_of_2(ranks))
    _push_all_reduce[(triton.cdiv(words, WORDS),)](
        x.view(-1).view(torch.int32),
        x if weights is None else weights,
        (y if residual is None else residual.contiguous()).view(-1).view(torch.int32),
        y.view(-1).view(torch.int32),
        inbox.peers,
        inbox.calls,
        **message,
        **group,
        WORDS=WORDS,
        P=len(inbox.calls),
        BF16=y.dtype == torch.bfloat16,
        ADD=residual is not None,
        SCALE=scale,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1,
    )
    return y


# Residual add + norm + router ---------------------------------------------------------
#
# Inductor finds tile shapes by timing, on each rank separately, so a norm or a product
# that it compiles may differ between ranks in the last bits. Ranks would then choose
# different experts where two scores are nearly equal. These kernels have fixed shapes
# instead.

MAX_ROUTER_BYTES = 1 << 17  # of router rows in registers: half of those that 8 warps have


# Grid [T]: a program adds the residual of one token and norms the sum. With E > 0 (one
# token alone) it also multiplies by the router's E rows, which it loads into registers
# before gdc_wait, while the previous kernel runs.
@jit
def _fixed_add_norm(
    x,
    y,
    weight,
    bias,
    router,
    total,
    normed,
    scores,
    D: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    d = tl.arange(0, BLOCK)
    if E:
        expert = tl.arange(0, E)
        router_row = router + expert[:, None] * D
        rows = tl.load(router_row + d[None, :], mask=(d < D)[None, :], other=0.0)
    scale = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    offset = tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32) if LAYER_NORM else 0.0
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    d += tl.program_id(0).to(tl.int64) * D
    inside = d < (tl.program_id(0) + 1).to(tl.int64) * D
    values = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(y + d, mask=inside, other=0.0).to(tl.float32) * SCALE
    values = values.to(total.dtype.element_ty)
    tl.store(total + d, values, mask=inside)
    values = values.to(tl.float32)  # norm the rounded sum, which the next layer reads
    if LAYER_NORM:
        values = tl.where(inside, values - tl.sum(values, 0) / D, 0.0)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / D + EPS) * scale + offset
    values = values.to(normed.dtype.element_ty)
    tl.store(normed + d, values, mask=inside)
    if E:
        dots = tl.sum(rows.to(tl.float32) * values.to(tl.float32)[None, :], 1)
        tl.store(scores + expert, dots.to(scores.dtype.element_ty))


# Grid [E]: a program computes one token's score of one expert, if the router's rows do
# not fit into the registers of a single program.
@jit
def _fixed_scores(x, router, scores, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    d = tl.arange(0, BLOCK)
    row = tl.load(router + tl.program_id(0) * D + d, mask=d < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dot = tl.sum(tl.load(x + d, mask=d < D, other=0.0).to(tl.float32) * row, 0)
    tl.store(scores + tl.program_id(0), dot.to(scores.dtype.element_ty))


def empty_scores(x: Tensor, router: Tensor | None) -> Tensor:
    """x [..., D], router [E, D] -> uninitialized scores [T, E]; [0] without a router."""
    if router is None:
        return x.new_empty(0)
    return x.new_empty(x.numel() // x.shape[-1], router.shape[0])


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

    The norm is `F.rms_norm`, with a bias `F.layer_norm`. router [E, D] gives scores
    [T, E]; None gives [0]. Return the sum, the norm and the scores, bitwise identical
    on all GPUs of one kind.

    The norm's program computes one token's scores if the router fits into its
    registers, else a second kernel does. cuBLAS computes several tokens' scores: it
    chooses its kernels by shapes alone, hence the same on all ranks.
    """
    D = x.shape[-1]
    if not can_launch(x):
        total = torch.add(x, y, alpha=scale)
        norm = F.rms_norm if bias is None else partial(F.layer_norm, bias=bias)
        normed = norm(total.to(weight.dtype), weight.shape, weight=weight, eps=eps)
        normed = normed.to(x.dtype)  # the weight may be in fp32
        rows = normed.view(-1, D)
        return total, normed, x.new_empty(0) if router is None else F.linear(rows, router)
    x, y = x.contiguous(), y.contiguous()
    tokens, block, pdl = x.numel() // D, triton.next_power_of_2(D), supports_pdl(x)
    total, normed, scores = torch.empty_like(x), torch.empty_like(x), empty_scores(x, router)
    E = 0 if router is None else len(router)
    fits = E * block * x.element_size() <= MAX_ROUTER_BYTES and E & E - 1 == 0
    fused = tokens == 1 and fits
    norm = dict(SCALE=scale, EPS=eps, LAYER_NORM=bias is not None)
    launch = dict(D=D, BLOCK=block, PDL=pdl, launch_pdl=pdl)
    # The kernel needs a valid pointer for an absent tensor, which it then does not read.
    optional = (weight if tensor is None else tensor for tensor in (bias, router))
    tensors = x, y, weight, *optional, total, normed, scores
    _fixed_add_norm[(tokens,)](*tensors, E=E if fused else 0, **norm, **launch, num_warps=8)
    if E and tokens > 1:
        scores = F.linear(normed.view(-1, D), router)
    elif E and not fused:
        _fixed_scores[(E,)](normed, router, scores, **launch, num_warps=4)
    return total, normed, scores
