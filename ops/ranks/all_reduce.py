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
from ops.launch import await_previous, jit, launch, tl
from ops.sizes import cdiv, pow2

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
    programs: int  # for which the inbox has memory
    rank: int
    ranks: int
    block: int = WORDS

    rows = property(lambda s: pow2(s.ranks))  # a tile's: one for each rank


@jit
def _pack_bf16(low, high):
    """Round two fp32 to bf16 -> one 32-bit word, `low` in the lower half."""
    low = low.to(tl.bfloat16).to(tl.int16, bitcast=True)
    high = high.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return low.to(tl.int32) & 0xFFFF | high.to(tl.int32) << 16


@jit
def _sum_messages(bits, s: tl.constexpr):
    """Sum messages [N, WORDS], words of 32 bits -> one such row."""
    if s.bf16:
        return _pack_bf16(tl.sum(low_half(bits), 0), tl.sum(high_half(bits), 0))
    else:
        return tl.sum(bits.to(tl.float32, bitcast=True), 0).to(tl.int32, bitcast=True)


# Grid [P]: program p all-reduces words p * WORDS .. (p + 1) * WORDS of the message, one
# warp each. It writes them into the inboxes of all other ranks, then waits for theirs
# in its own inbox, and adds all N messages up in the order of ranks. The order is the
# same on all ranks, hence also the bits.
#
# Each 32 bits of the message travel with the call's number in one 64-bit word, as the 16 bits of
# ops/ranks/mailbox.py do in 32 (NCCL's LL protocol, here from every rank to every rank). So the
# inbox has two halves, too: no rank reaches call n + 2 before all have begun n + 1.
#
# PDL: the next kernel starts before the exchange, and loads its weights during it.
@jit
def _push_all_reduce(x, y, peers, calls, s: tl.constexpr, PDL: tl.constexpr):
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
    await_previous(PDL)
    call = tl.load(calls + program) + 1
    half = (call & 1) * (s.ranks * P * WORDS)
    own = tl.load(x + word, mask=inside, other=0)[None, :]
    stamped = own.to(tl.int64) & 0xFFFFFFFF | call.to(tl.int64) << 32
    tl.store(outbox + half, tl.broadcast_to(stamped, others.shape), mask=others)
    received = tl.load(inbox + half, mask=others, other=0, volatile=True)
    missing = others & (received >> 32 != call)
    while tl.max(tl.max(missing.to(tl.int32), 1), 0) > 0:
        newer = tl.load(inbox + half, mask=missing, other=0, volatile=True)
        received = tl.where(missing, newer, received)
        missing = others & (received >> 32 != call)
    bits = tl.where((rank == s.rank) & inside[None, :], own, received.to(tl.int32))
    tl.store(y + word, _sum_messages(bits, s), mask=inside)
    # Safe without a barrier: the reduction in the loop's condition waits for all threads' loads.
    tl.store(calls + program, call)


def push_all_reduce(x: Tensor, inbox: Inbox) -> Tensor:
    """Sum x over the ranks -> a tensor like it, bitwise identical on all ranks.

    x: bf16 or fp32, contiguous, a multiple of 4 bytes that fits into the inbox.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    words, programs, ranks = y.nbytes // 4, len(inbox.calls), len(inbox.peers)
    settings = Push(words, y.dtype == torch.bfloat16, programs, inbox.rank, ranks)
    source, target = (tensor.view(-1).view(torch.int32) for tensor in (x, y))
    tensors = source, target, inbox.peers, inbox.calls
    launch(_push_all_reduce, (cdiv(words, WORDS),), *tensors, settings=settings, warps=1)
    return y
