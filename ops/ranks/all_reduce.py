"""All-reduce of small messages over the GPUs of one host.

A decode step's messages have a few KB. Their time is latency, not bandwidth, so
`push_all_reduce` has one wait and no barrier. An all-reduce that a product begins has no kernel of
its own: ops/ranks/mailbox.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ops.halves import high_half, low_half
from ops.launch import await_previous, jit, launch, tl, triton

WORDS = 64  # 32-bit words of the message that a program (one warp) reduces


class Inbox(NamedTuple):
    """A rank's receive buffer and where to find the others'. All ranks make the same calls."""

    memory: Tensor  # int64 [2, N, P, WORDS], zero at first: messages of up to P * WORDS words
    peers: Tensor  # int64 [N]: address of each rank's inbox
    calls: Tensor  # int32 [P], zero at first: calls so far, counted by each program
    rank: int


@dataclass(frozen=True)
class Push:
    """Settings of `_push_all_reduce`."""

    words: int  # of 32 bits, in the message
    bf16: bool  # the message's numbers are bf16, else fp32
    terms: int  # vectors whose weighted sum is the message; 0: x is the message
    fp32_terms: bool  # the terms are fp32, else of the message's dtype
    scale: float  # factor of the sum that is added to a residual
    programs: int  # for which the inbox has memory
    rank: int
    ranks: int
    block: int = WORDS

    rows = property(lambda s: triton.next_power_of_2(s.ranks))  # a tile's: one for each rank


@jit
def _pack_bf16(low, high):
    """Round two fp32 to bf16 -> one 32-bit word, `low` in the lower half."""
    low = low.to(tl.bfloat16).to(tl.int16, bitcast=True)
    high = high.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return low.to(tl.int32) & 0xFFFF | high.to(tl.int32) << 16


@jit
def _load_message(x, weights, word, s: tl.constexpr):
    """Load 32-bit words of this rank's message: x, or the sum of weights[n] * x[n]."""
    N: tl.constexpr = s.words
    if s.terms == 0:
        return tl.load(x + word, mask=word < N, other=0)
    else:
        low, high = tl.zeros(word.shape, tl.float32), tl.zeros(word.shape, tl.float32)
        for term in tl.static_range(s.terms):
            weight, begin = tl.load(weights + term), term * N + word
            if s.bf16 and s.fp32_terms:  # two fp32 of the term make one word of the message
                bits = tl.load(x + begin * 2, mask=word < N, other=0)
                low += weight * bits.to(tl.float32, bitcast=True)
                bits = tl.load(x + begin * 2 + 1, mask=word < N, other=0)
                high += weight * bits.to(tl.float32, bitcast=True)
            else:
                bits = tl.load(x + begin, mask=word < N, other=0)
                low += weight * (bits << 16 if s.bf16 else bits).to(tl.float32, bitcast=True)
                high += weight * high_half(bits)
        return _pack_bf16(low, high) if s.bf16 else low.to(tl.int32, bitcast=True)


@jit
def _sum_messages(bits, add, s: tl.constexpr):
    """Sum messages [N, WORDS], words of 32 bits -> one such row; add: None, or of the residual."""
    if s.bf16:
        low, high = tl.sum(low_half(bits), 0), tl.sum(high_half(bits), 0)
        if add is not None:
            low = low_half(add) + s.scale * low
            high = high_half(add) + s.scale * high
        total = _pack_bf16(low, high)
    else:
        total = tl.sum(bits.to(tl.float32, bitcast=True), 0)
        if add is not None:
            total = add.to(tl.float32, bitcast=True) + s.scale * total
        total = total.to(tl.int32, bitcast=True)
    return total


# Grid [P]: program p all-reduces words p * WORDS .. (p + 1) * WORDS of the message, one
# warp each. It writes them into the inboxes of all other ranks, then waits for theirs
# in its own inbox, and adds all N messages up in the order of ranks. The order is the
# same on all ranks, hence also the bits.
#
# The residual, if there is one, is loaded before the wait.
#
# Each 32 bits of the message travel with the call's number in one 64-bit word. A 64-bit
# store arrives whole, so a word with the right number needs no flag and no fence (as in
# NCCL's LL protocol, here from every rank to every rank).
#
# The inbox has two halves, used by odd and even calls. One wait per call suffices: a
# rank that begins call n + 1 has finished reading call n. No rank reaches call n + 2,
# which reuses the half of call n, before all have begun n + 1.
#
# PDL: the next kernel starts before the exchange, and loads its weights during it.
@jit
def _push_all_reduce(x, weights, residual, y, peers, calls, s: tl.constexpr, PDL: tl.constexpr):
    WORDS: tl.constexpr = s.block
    P: tl.constexpr = s.programs
    rank, column, program = tl.arange(0, s.rows)[:, None], tl.arange(0, WORDS), tl.program_id(0)
    outbox = tl.load(peers + rank, mask=rank < s.ranks, other=0).to(tl.pointer_type(tl.int64))
    outbox = tl.multiple_of(outbox, (16, 16)) + (s.rank * P + program) * WORDS + column[None, :]
    inbox = tl.multiple_of(tl.load(peers + s.rank).to(tl.pointer_type(tl.int64)), 16)
    inbox += (rank * P + program) * WORDS + column[None, :]
    word = program * WORDS + column
    inside = word < s.words
    others = (rank < s.ranks) & (rank != s.rank) & inside[None, :]
    add = tl.load(residual + word, mask=inside, other=0) if residual is not None else None
    await_previous(PDL)
    call = tl.load(calls + program) + 1
    half = (call & 1) * (s.ranks * P * WORDS)
    own = _load_message(x, weights, word, s)[None, :]
    stamped = own.to(tl.int64) & 0xFFFFFFFF | call.to(tl.int64) << 32
    tl.store(outbox + half, tl.broadcast_to(stamped, others.shape), mask=others)
    received = tl.load(inbox + half, mask=others, other=0, volatile=True)
    missing = others & (received >> 32 != call)
    while tl.max(tl.max(missing.to(tl.int32), 1), 0) > 0:
        newer = tl.load(inbox + half, mask=missing, other=0, volatile=True)
        received = tl.where(missing, newer, received)
        missing = others & (received >> 32 != call)
    bits = tl.where((rank == s.rank) & inside[None, :], own, received.to(tl.int32))
    total = _sum_messages(bits, add, s)
    tl.store(y + word, total, mask=inside)
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

    residual, like `like`: return residual + scale * sum.
    """
    y = torch.empty_like(like, memory_format=torch.contiguous_format)
    words, terms = y.nbytes // 4, 0 if weights is None else weights.numel()
    settings = Push(
        words=words,
        bf16=y.dtype == torch.bfloat16,
        terms=terms,
        fp32_terms=x.dtype == torch.float32,
        scale=scale,
        programs=len(inbox.calls),
        rank=inbox.rank,
        ranks=len(inbox.peers),
    )
    source, target = (tensor.view(-1).view(torch.int32) for tensor in (x, y))
    add = None if residual is None else residual.contiguous().view(-1).view(torch.int32)
    tensors = source, weights, add, target, inbox.peers, inbox.calls
    launch(_push_all_reduce, (triton.cdiv(words, WORDS),), *tensors, settings=settings, warps=1)
    return y
