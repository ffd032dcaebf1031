"""One token on several GPUs: all-reduce, residual add, norm and router scores in one kernel.

It takes the place of `all_reduce.push_all_reduce` and `moe_router.norm_router`. Between attention
and experts of a small model these two wait for each other as long as they compute.
"""

from __future__ import annotations  # annotations of kernels name triton, which may be absent

from typing import NamedTuple

import torch
from torch import Tensor

from ops.jit import jit, supports_pdl, tl, triton
from ops.moe_router import MAX_DIM, Routing, _load_biases, _store_scores, check_router

MAX_PROGRAMS = 128  # all of them run at once, at one a multiprocessor
MAX_WORDS = 1 << 14  # of all messages: 64 registers of each thread
PROBES = 32  # words of a message for which a program waits before it reads all; 0: none


class TokenInbox(NamedTuple):
    """A rank's receive buffer of one token's messages, and where it writes its own.

    All ranks make the same calls.
    """

    memory: Tensor  # int32 [2, N, MAX_DIM], zero at first
    slots: Tensor  # int64 [N]: address, in each rank's memory, of this rank's message
    calls: Tensor  # int32 [MAX_PROGRAMS], zero at first: calls so far, counted by each program


@jit
def _any_missing(received, number, wanted):
    """Whether words [N, B] that are wanted lack the lower 16 bits of a number, shifted by 16."""
    missing = wanted & ((received ^ number) >> 16 != 0)
    return tl.max(tl.max(missing.to(tl.int32), 1), 0) > 0


# Grid [P], P = N / ROWS: each program norms the whole token, and computes ROWS scores.
#
# A program first writes its SHARE of this rank's part into the inboxes of all ranks, its own
# included. Then it waits for the messages of all ranks, and adds them in the order of ranks. No
# constant of the kernel is one rank's, so that all ranks run the same machine code.
#
# Each 16 bits of a message travel with the lower 16 of the call's number in one 32-bit word. A
# 32-bit store arrives whole, so a word with the right number needs no flag and no fence. A slot's
# older number differs: it is that of the call before the last one, or 0 at first.
#
# The inbox has two halves, used by odd and even calls. One wait per call suffices, as in
# `_push_all_reduce`: a rank that writes in call n + 2 has received call n + 1 from all others,
# which began that after all of their programs had ended call n.
#
# A program waits for a few words of each message before it reads them all: while many programs
# read all words again and again, L2 has less time for those that arrive.
#
# Programs wait for each other, within a GPU too: all must run at once. They do, because there are
# at most MAX_PROGRAMS, and no kernel that is still running waits for them. The next one starts
# (PDL) when all of them have.
#
# scores [1 or 2, N]: as of `moe_router._norm_router`.
@jit
def _reduce_add_router(
    x,
    y,
    norm,
    router,
    bias,
    score_bias,
    total,
    normed,
    scores,
    memory,
    slots,
    calls,
    D: tl.constexpr,
    E: tl.constexpr,
    GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
    STRIDE: tl.constexpr,
    PROBES: tl.constexpr,
    COUNTERS: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_POW2: tl.constexpr,
):
    N: tl.constexpr = E + GATED
    program, rank = tl.program_id(0), tl.arange(0, RANKS_POW2)[:, None]
    d, expert = tl.arange(0, BLOCK), program * ROWS + tl.arange(0, ROWS)
    inside = d < D
    rows = tl.load(
        router + expert[:, None] * D + d[None, :],
        mask=(expert < N)[:, None] & inside[None, :],
        other=0.0,
    )
    scale = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
    add = tl.load(x + d, mask=inside, other=0.0)
    biases = _load_biases(bias, score_bias, expert, E, BIAS, SIGMOID)
    own = program * SHARE + tl.arange(0, SHARE)
    sends = (rank < RANKS) & (own < D)[None, :]
    outbox = tl.load(slots + rank, mask=rank < RANKS, other=0).to(tl.pointer_type(tl.int32))
    outbox = tl.multiple_of(outbox, (16, 16)) + own[None, :]
    wanted = (rank < RANKS) & inside[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    call = tl.load(calls + program) + 1
    half, number = (call & 1) * (RANKS * STRIDE), call << 16
    part = tl.load(y + own, mask=own < D, other=0.0).to(tl.int16, bitcast=True)
    stamped = part.to(tl.int32) & 0xFFFF | number
    tl.store(outbox + half, tl.broadcast_to(stamped[None, :], sends.shape), mask=sends)
    inbox = memory + half + rank * STRIDE
    if PROBES:
        probe = inbox + (tl.arange(0, PROBES) * (D // PROBES))[None, :]
        probes = (rank < RANKS) & (tl.arange(0, PROBES) >= 0)[None, :]
        received = tl.load(probe, mask=probes, other=0, volatile=True)
        while _any_missing(received, number, probes):
            received = tl.load(probe, mask=probes, other=0, volatile=True)
    inbox += d[None, :]
    received = tl.load(inbox, mask=wanted, other=0, volatile=True)
    while _any_missing(received, number, wanted):
        received = tl.load(inbox, mask=wanted, other=0, volatile=True)
    value = received.to(tl.int16).to(y.dtype.element_ty, bitcast=True).to(tl.float32)
    value = add.to(tl.float32) + SCALE * tl.sum(value, 0)
    value = value.to(total.dtype.element_ty)
    stores = inside & (d // SHARE == program)
    tl.store(total + d, value, mask=stores)
    value = value.to(tl.float32)  # norm the rounded sum, which the next layer reads
    value = value * tl.rsqrt(tl.sum(value * value, 0) / D + EPS) * scale
    value = value.to(normed.dtype.element_ty)
    tl.store(normed + d, value, mask=stores)
    _store_scores(rows, value, biases, scores, expert, N, BIAS, SIGMOID)
    # Safe without a barrier: the reduction in the loop's condition waits for all threads' loads.
    tl.store(calls + program, call)
    # The first program also counts for programs that only a larger grid has.
    counter = tl.arange(0, COUNTERS)
    absent = counter >= (N + ROWS - 1) // ROWS + program * COUNTERS
    tl.store(calls + counter, tl.zeros([COUNTERS], tl.int32) + call, mask=absent)


def programs_of(N: int) -> tuple[int, int]:
    """Return how many programs compute N scores, and how many each does: a power of two."""
    rows = triton.next_power_of_2(triton.cdiv(N, MAX_PROGRAMS))
    return triton.cdiv(N, rows), rows


def words_of(D: int, ranks: int) -> int:
    """Return the words of all messages as a program holds them in registers."""
    return triton.next_power_of_2(ranks) * triton.next_power_of_2(D)


def warps_of(D: int, ranks: int) -> int:
    """Return the warps of a program."""
    return 4 if words_of(D, ranks) <= 4096 else 8


def can_reduce_router(x: Tensor, ranks: int) -> bool:
    """Whether there is a kernel for x [1, D] of this many ranks."""
    D = x.shape[-1]
    if not x.is_cuda or x.element_size() != 2 or x.numel() != D:
        return False
    if torch.cuda.get_device_properties(x.device).multi_processor_count < MAX_PROGRAMS:
        return False
    return D % 8 == 0 and D <= MAX_DIM and words_of(D, ranks) <= MAX_WORDS


def reduce_add_router(
    x: Tensor,
    y: Tensor,
    inbox: TokenInbox,
    scale: float,
    norm: Tensor,
    eps: float,
    router: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    pdl: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum y [1, D] over the ranks, add x, norm the sum, and score the experts for it.

    Return x + scale * sum, rounded, then its norm and scores as `moe_router.norm_router`; all are
    bitwise identical on all ranks. The reference is `all_reduce_sum`, `AddNorm`, the router.

    x, y: contiguous, of 16 bits, as `can_reduce_router` says. router, routing, bias: as of
    `norm_router`. With PDL, all but y is loaded while the previous kernel runs, which must not
    write it. Raises ValueError as `check_router`.
    """
    N, D = router.shape
    E, sigmoid = N - routing.gated, routing.score_bias is not None
    check_router(E, D, routing)
    pdl = supports_pdl(x) if pdl is None else pdl
    programs, rows = programs_of(N)
    ranks = len(inbox.slots)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    scores = torch.empty(1 + sigmoid, N, dtype=torch.float32, device=x.device)
    _reduce_add_router[(programs,)](
        x,
        y,
        norm,
        router,
        norm if bias is None else bias,
        norm if routing.score_bias is None else routing.score_bias,
        total,
        normed,
        scores,
        inbox.memory,
        inbox.slots,
        inbox.calls,
        D=D,
        E=E,
        GATED=int(routing.gated),
        SIGMOID=sigmoid,
        SCALE=scale,
        EPS=eps,
        BIAS=bias is not None,
        PDL=pdl,
        BLOCK=triton.next_power_of_2(D),
        ROWS=rows,
        SHARE=max(8, triton.next_power_of_2(triton.cdiv(D, programs))),
        STRIDE=inbox.memory.shape[-1],
        PROBES=PROBES if D >= PROBES else 0,
        COUNTERS=len(inbox.calls),
        RANKS=ranks,
        RANKS_POW2=triton.next_power_of_2(ranks),
        launch_pdl=pdl,
        num_warps=warps_of(D, ranks),
    )
    return total, normed, scores
