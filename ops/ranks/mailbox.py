"""Messages of one token between GPUs: kernels write into the inboxes of all ranks.

A product sends its rows while its kernel ends (`ops.products.experts.down` with `send`). The next
kernel receives and adds them: `join_tokens` (ops/products/join.py).

Each 16 bits of a message travel with the lower 16 of the call's number in one 32-bit word. A
32-bit store arrives whole, so a word with the right number needs no flag and no fence. A slot's
older number differs: it is that of the call before the last one, or 0 at first.

The inbox has two halves, used by odd and even calls. A rank that overwrites a half in call n + 2
has received call n + 1 from all ranks. Each of them sent that after its kernel that received
call n, and read this half, had ended.

A receiving kernel waits for products alone: this GPU's has ended by gdc_wait, and the products of
other GPUs wait for nothing of this call. So a waiting program blocks no sender, and programs need
not all run at once. Each program counts its own calls, because another one may start after it has
ended. The sender only reads a count. It is loaded before gdc_wait: the kernel that wrote it has
ended, because the product that sends runs between that kernel and the receiving one.

No constant of these kernels is one rank's, so that all ranks run the same machine code.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ops.launch import can_launch, jit, tl
from ops.sizes import pow2

MAX_DIM = 8192  # numbers of a message
MAX_PROGRAMS = 128  # most of a receiving kernel: about one a multiprocessor
MAX_WORDS = 1 << 14  # of all messages, as a program receives them: 64 registers of each thread


@dataclass(frozen=True)
class Messages:
    """Settings of a kernel that receives: sizes of its inbox."""

    ranks: int
    stride: int  # words from one rank's message to the next one's
    counters: int  # of calls

    half = property(lambda s: s.ranks * s.stride)  # words of one half of the inbox
    rows = property(lambda s: pow2(s.ranks))  # a tile's: one for each rank


class TokenInbox(NamedTuple):
    """A rank's receive buffer of one token's messages, and where it writes its own.

    All ranks make the same calls. A call is a product that sends, and a kernel that receives. A
    message of several branches [B D] has a product for each, which writes from `begin` on.
    """

    memory: Tensor  # int32 [2, N, MAX_DIM], zero at first
    slots: Tensor  # int64 [N]: address, in each rank's memory, of this rank's message
    calls: Tensor  # int32 [MAX_PROGRAMS], zero at first: calls received so far, by each program
    begin: int = 0  # where the next product's numbers begin in the message

    sizes = property(lambda s: Messages(len(s.slots), s.memory.shape[-1], len(s.calls)))


class Outbox(NamedTuple):
    """What a kernel reads of a `TokenInbox` when it sends."""

    slots: Tensor
    calls: Tensor


def words_of(D: int, ranks: int) -> int:
    """Return the words of all messages as a program holds them in registers."""
    return pow2(ranks) * pow2(D)


def can_receive(x: Tensor, ranks: int, branches: int = 1) -> bool:
    """Whether there are kernels for x [1, D] of this many ranks, and for messages of branches."""
    D = x.shape[-1]
    if not can_launch(x) or x.element_size() != 2 or x.numel() != D:
        return False
    return D % 8 == 0 and branches * D <= MAX_DIM and words_of(D, ranks) <= MAX_WORDS


@jit
def find_outboxes(slots, calls, s: tl.constexpr):
    """Return where a product's part of this call's message belongs on each rank, and the number.

    The kernel that received the previous call must have ended: load after gdc_wait.
    """
    call = tl.load(calls) + 1
    outboxes = ()
    for rank in tl.static_range(s.ranks):
        slot = tl.load(slots + rank).to(tl.pointer_type(tl.int32))
        outboxes = outboxes + (slot + (call & 1) * s.half + s.begin,)
    return outboxes, call


@jit
def send_rows(values, outboxes, call, at, stores, RANKS: tl.constexpr):
    """Write 16-bit values of this rank's message into all inboxes, its own included."""
    words = values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF | call << 16
    for rank in tl.static_range(RANKS):
        tl.store(outboxes[rank] + at, words, mask=stores)


@jit
def load_call(calls):
    """Return the number of the call that this program receives."""
    # volatile: not from L1, where the kernel that counted may have left the older count.
    return tl.load(calls + tl.program_id(0), volatile=True) + 1


@jit
def any_missing(received, call, wanted):
    """Whether words [N, B] that are wanted lack the call's number."""
    missing = wanted & ((received ^ call << 16) >> 16 != 0)
    return tl.max(tl.max(missing.to(tl.int32), 1), 0) > 0


@jit
def numbers_of(words, dtype: tl.constexpr):
    """Return the fp32 numbers that words carry."""
    return words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@jit
def receive(inbox, call, wanted, dtype: tl.constexpr):
    """Wait for words [N, B] of all ranks' messages -> their sum in the order of ranks, fp32 [B]."""
    received = tl.load(inbox, mask=wanted, other=0, volatile=True)
    while any_missing(received, call, wanted):
        received = tl.load(inbox, mask=wanted, other=0, volatile=True)
    return tl.sum(numbers_of(received, dtype), 0)


@jit
def count_call(calls, call, m: tl.constexpr):
    """Store the number of the call that this program has received."""
    program, counter = tl.program_id(0), tl.arange(0, m.counters)
    # Safe without a barrier: the reduction in `receive` waits for all threads' loads.
    tl.store(calls + program, call)
    # The first program also counts for programs that only a larger grid has.
    absent = counter >= tl.num_programs(0) + program * m.counters
    tl.store(calls + counter, tl.zeros([m.counters], tl.int32) + call, mask=absent)
