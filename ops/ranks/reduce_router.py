"""One token on several GPUs: all-reduce in the kernels before and after it.

A product writes its rows into the inboxes of all ranks (`ops.products.experts.down` with `send`). So they
travel while its kernel ends. The next kernel receives them: `receive_add` adds the sum to the
residual, `receive_add_router` also norms it and computes router scores.
"""

# ruff: noqa: RUF005  (Triton adds tuples, but does not unpack them)
from __future__ import annotations  # annotations of kernels name triton, which may be absent

from typing import NamedTuple

import torch
from torch import Tensor

from ops.launch import can_launch, jit, supports_pdl, tl, triton
from ops.products.operands import load_x
from ops.products.quantized_x import QuantizedX
from ops.products.router import (
    MAX_DIM,
    Routing,
    _clear_choice,
    _load_score_biases,
    _store_quantized,
    _store_scores,
    check_router,
    empty_norm,
)
from ops.products.weights import Weight

MAX_PROGRAMS = 128  # a receiving kernel has one program a multiprocessor
BLOCK = 128  # numbers that a program (one warp) of `receive_add` sums
MAX_WORDS = 1 << 14  # of all messages: 64 registers of each thread
PROBES = 32  # words of a message for which a program waits before it reads all; 0: none


class TokenInbox(NamedTuple):
    """A rank's receive buffer of one token's messages, and where it writes its own.

    All ranks make the same calls. A call is a product that sends, and a kernel that receives.
    """

    memory: Tensor  # int32 [2, N, MAX_DIM], zero at first
    slots: Tensor  # int64 [N]: address, in each rank's memory, of this rank's message
    calls: Tensor  # int32 [MAX_PROGRAMS], zero at first: calls received so far, by each program


# Sending ------------------------------------------------------------------------------------------
#
# Each 16 bits of a message travel with the lower 16 of the call's number in one 32-bit word. A
# 32-bit store arrives whole, so a word with the right number needs no flag and no fence. A slot's
# older number differs: it is that of the call before the last one, or 0 at first.
#
# The inbox has two halves, used by odd and even calls. A rank that overwrites a half in call n + 2
# has received call n + 1 from all ranks. Each of them sent that after its kernel that received
# call n, and read this half, had ended.
#
# The sender only reads the count of calls; the receiver advances it. No constant of these kernels
# is one rank's, so that all ranks run the same machine code.


@jit
def _find_outboxes(slots, calls, HALF: tl.constexpr, RANKS: tl.constexpr):
    """Return where this call's message belongs on each rank, and the call's number.

    The kernel that received the previous call must have ended: load after gdc_wait.
    """
    call = tl.load(calls) + 1
    outboxes = ()
    for rank in tl.static_range(RANKS):
        slot = tl.load(slots + rank).to(tl.pointer_type(tl.int32))
        outboxes = outboxes + (slot + (call & 1) * HALF,)
    return outboxes, call


@jit
def _send(values, outboxes, call, at, stores, RANKS: tl.constexpr):
    """Write 16-bit values of this rank's message into all inboxes, its own included."""
    words = values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF | call << 16
    for rank in tl.static_range(RANKS):
        tl.store(outboxes[rank] + at, words, mask=stores)


# Receiving ----------------------------------------------------------------------------------------
#
# A program waits for the messages of all ranks, and adds them in the order of ranks. It waits for
# products alone: this GPU's has ended by gdc_wait, and the others' wait for nothing of this call.
# So a waiting program blocks no sender, and programs need not all run at once.
#
# The count of calls is loaded before gdc_wait. The kernel that wrote it has ended, because the
# product that sends runs between that kernel and this one. Each program has its own count, because
# another one may start after it has ended.


@jit
def _any_missing(received, call, wanted):
    """Whether words [N, B] that are wanted lack the call's number."""
    missing = wanted & ((received ^ call << 16) >> 16 != 0)
    return tl.max(tl.max(missing.to(tl.int32), 1), 0) > 0


@jit
def _load_call(calls):
    """Return the number of the call that this program receives."""
    # volatile: not from L1, where the kernel that counted may have left the older count.
    return tl.load(calls + tl.program_id(0), volatile=True) + 1


@jit
def _count_call(calls, call, COUNTERS: tl.constexpr):
    """Store the number of the call that this program has received."""
    program, counter = tl.program_id(0), tl.arange(0, COUNTERS)
    # Safe without a barrier: the reduction in `_receive` waits for all threads' loads.
    tl.store(calls + program, call)
    # The first program also counts for programs that only a larger grid has.
    absent = counter >= tl.num_programs(0) + program * COUNTERS
    tl.store(calls + counter, tl.zeros([COUNTERS], tl.int32) + call, mask=absent)


@jit
def _receive(inbox, call, wanted, dtype: tl.constexpr):
    """Wait for words [N, B] of all ranks' messages -> their sum, fp32 [B]."""
    received = tl.load(inbox, mask=wanted, other=0, volatile=True)
    while _any_missing(received, call, wanted):
        received = tl.load(inbox, mask=wanted, other=0, volatile=True)
    return tl.sum(received.to(tl.int16).to(dtype, bitcast=True).to(tl.float32), 0)


@jit
def _receive_again(
    memory,
    add,
    SCALE: tl.constexpr,
    STRIDE: tl.constexpr,
    RANKS: tl.constexpr,
    QUADS: tl.constexpr,
    RUN: tl.constexpr,
    FIELDS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Load the messages at `memory`, all received, in the order of `add` -> the sums with it.

    add: the residual as of `load_x`, this program's LANES quads of it.
    """
    dtype: tl.constexpr = add[0].dtype
    messages, totals = (), ()
    for rank in tl.static_range(RANKS):
        message = memory + rank * STRIDE
        words = load_x(message, tl.program_id(0), QUADS, RUN, FIELDS, LANES, VOLATILE=True)
        messages = messages + (words,)
    for k in tl.static_range(FIELDS):
        total = tl.zeros([LANES, 4], tl.float32)
        for rank in tl.static_range(RANKS):
            total += messages[rank][k].to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        totals = totals + ((add[k].to(tl.float32) + SCALE * total).to(dtype),)
    return totals


# Grid [P]: a program adds BLOCK numbers of the sum.
@jit
def _receive_add(
    x,
    total,
    memory,
    calls,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    COUNTERS: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_POW2: tl.constexpr,
):
    rank, d = tl.arange(0, RANKS_POW2)[:, None], tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    add = tl.load(x + d, mask=d < D, other=0.0)
    call = _load_call(calls)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # at once: ops/products/experts.py
        tl.extra.cuda.gdc_wait()
    inbox = memory + (call & 1) * (RANKS * STRIDE) + rank * STRIDE + d[None, :]
    wanted = (rank < RANKS) & (d < D)[None, :]
    value = add.to(tl.float32) + SCALE * _receive(inbox, call, wanted, add.dtype)
    tl.store(total + d, value.to(total.dtype.element_ty), mask=d < D)
    _count_call(calls, call, COUNTERS)


# Grid [P], P = N / ROWS: each program norms the whole token, computes ROWS scores, and stores SHARE
# numbers of the sum and the norm.
#
# A program waits for a few words of each message before it reads them all: while many programs
# read all words again and again, L2 has less time for those that arrive.
#
# normed, units, scores [1 or 2, N] and indices [PAIRS]: as of `moe_router._norm_router`.
@jit
def _receive_add_router(
    x,
    norm,
    router,
    bias,
    score_bias,
    total,
    normed,
    units,
    scores,
    indices,
    memory,
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
    PAIRS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    KIND: tl.constexpr,
    FIELDS: tl.constexpr,
    RUN: tl.constexpr,
    LANES: tl.constexpr,
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
    biases = _load_score_biases(bias, score_bias, expert, E, BIAS, SIGMOID)
    QUADS: tl.constexpr = D // (4 * FIELDS)
    if QUANTIZED:
        scales = load_x(norm, program, QUADS, RUN, FIELDS, LANES)
        raw = load_x(x, program, QUADS, RUN, FIELDS, LANES)
    wanted = (rank < RANKS) & inside[None, :]
    call = _load_call(calls)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _clear_choice(indices, PAIRS)
    memory += (call & 1) * (RANKS * STRIDE)
    inbox = memory + rank * STRIDE
    if PROBES:
        probe = inbox + (tl.arange(0, PROBES) * (D // PROBES))[None, :]
        probes = (rank < RANKS) & (tl.arange(0, PROBES) >= 0)[None, :]
        while _any_missing(tl.load(probe, mask=probes, other=0, volatile=True), call, probes):
            pass
    value = add.to(tl.float32) + SCALE * _receive(inbox + d[None, :], call, wanted, add.dtype)
    value = value.to(total.dtype.element_ty)
    stores = inside & (d // SHARE == program)
    tl.store(total + d, value, mask=stores)
    if QUANTIZED:
        raw = _receive_again(memory, raw, SCALE, STRIDE, RANKS, QUADS, RUN, FIELDS, LANES)
    value = value.to(tl.float32)  # norm the rounded sum, which the next layer reads
    factor = tl.rsqrt(tl.sum(value * value, 0) / D + EPS)
    value = (value * factor * scale).to(total.dtype.element_ty)
    _store_scores(rows, value, biases, scores, expert, N, BIAS, SIGMOID)
    if not QUANTIZED:
        tl.store(normed + d, value, mask=stores)
    elif program * LANES < QUADS:  # the other programs end sooner
        dtype: tl.constexpr = total.dtype.element_ty
        _store_quantized(raw, scales, factor, normed, units, dtype, QUADS, KIND, LANES)
    _count_call(calls, call, COUNTERS)


# Launching ----------------------------------------------------------------------------------------


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


def can_receive(x: Tensor, ranks: int) -> bool:
    """Whether there are kernels for x [1, D] of this many ranks."""
    D = x.shape[-1]
    if not can_launch(x) or x.element_size() != 2 or x.numel() != D:
        return False
    return D % 8 == 0 and D <= MAX_DIM and words_of(D, ranks) <= MAX_WORDS


def _group_constants(inbox: TokenInbox) -> dict[str, int]:
    """Return the constants of a receiving kernel that depend on the inbox."""
    ranks = len(inbox.slots)
    return {
        "STRIDE": inbox.memory.shape[-1],
        "COUNTERS": len(inbox.calls),
        "RANKS": ranks,
        "RANKS_POW2": triton.next_power_of_2(ranks),
    }


def receive_add(x: Tensor, inbox: TokenInbox, scale: float, pdl: bool | None = None) -> Tensor:
    """Receive a message [1, D] of all ranks -> x + scale * sum, bitwise identical on all ranks.

    x: contiguous, of the messages' dtype, as `can_receive` says. With PDL it is loaded while the
    previous kernel runs, which must not write it.
    """
    pdl, total = supports_pdl(x) if pdl is None else pdl, torch.empty_like(x)
    _receive_add[(triton.cdiv(x.numel(), BLOCK),)](
        x,
        total,
        inbox.memory,
        inbox.calls,
        D=x.numel(),
        SCALE=scale,
        PDL=pdl,
        BLOCK=BLOCK,
        **_group_constants(inbox),
        launch_pdl=pdl,
        num_warps=1,
    )
    return total


def receive_add_router(
    x: Tensor,
    inbox: TokenInbox,
    scale: float,
    norm: Tensor,
    eps: float,
    router: Tensor,
    routing: Routing,
    bias: Tensor | None,
    indices: Tensor,
    weight: Weight | None = None,
    pdl: bool | None = None,
) -> tuple[Tensor, Tensor | QuantizedX, Tensor]:
    """Do what `receive_add` does, norm the result [1, D], and score the experts for it.

    Return x + scale * sum, rounded, then its norm and scores as `moe_router.norm_router`; all are
    bitwise identical on all ranks. The reference is `all_reduce_sum`, `AddNorm`, the router.

    router, routing, bias, indices, weight: as of `norm_router`. With PDL, all but the messages is
    loaded while the previous kernel runs, which must not write it. Raises ValueError as
    `check_router`.
    """
    N, D = router.shape
    E, sigmoid = N - routing.gated, routing.score_bias is not None
    check_router(E, D, routing)
    pdl = supports_pdl(x) if pdl is None else pdl
    programs, rows = programs_of(N)
    warps, total = warps_of(D, len(inbox.slots)), torch.empty_like(x)
    normed, stored, layout = empty_norm(x, weight, programs, warps)
    scores = torch.empty(1 + sigmoid, N, dtype=torch.float32, device=x.device)
    _receive_add_router[(programs,)](
        x,
        norm,
        router,
        norm if bias is None else bias,
        norm if routing.score_bias is None else routing.score_bias,
        total,
        *stored,
        scores,
        indices,
        inbox.memory,
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
        PROBES=PROBES if D >= PROBES else 0,
        **_group_constants(inbox),
        PAIRS=indices.shape[1],
        **layout,
        launch_pdl=pdl,
        num_warps=warps,
    )
    return total, normed, scores
