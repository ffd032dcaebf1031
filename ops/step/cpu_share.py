"""The CPU's share of a layer: experts that no slot has, multiplied in host memory.

The GPU writes a request into pinned host memory, `ask`, and goes on with its own share. A thread of
the host polls for requests, multiplies and writes the answer. `add_answer` waits for it on the GPU.
So a step that is captured in a CUDA graph meets the host without a launch or an event.

Both sides count requests. A request is complete when its number is in the flags; so is an answer.
There is one request at a time, because layers run one after the other. A layer in which no expert
is left to the CPU sends none, and waits for none.
"""

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ops.launch import await_previous, can_launch, jit, launch, tl
from ops.sizes import cdiv, pow2

MAX_TOKENS = 8  # limit of a request
# Flags; one cache line for each writer. BUSY: microseconds of all compiled products; STOP: the
# thread that answers shall end
ASKED, LAYER, TOKENS, PAIRS = range(4)
ANSWERED, BUSY = 16, 17
STOP = 32
FLAGS = 48
BLOCK = 1024  # numbers of a program


class Mailbox(NamedTuple):
    """A request and its answer, of T tokens and P pairs. All but the last two: pinned memory."""

    x: Tensor  # [MAX_TOKENS, D]
    experts: Tensor  # int32 [MAX_PAIRS], of each pair
    tokens: Tensor  # int32 [MAX_PAIRS], its row of x
    weights: Tensor  # fp32 [MAX_PAIRS]
    y: Tensor  # fp32 [MAX_TOKENS, D], the answer: the weighted sums
    flags: Tensor  # int32 [FLAGS]
    calls: Tensor  # int32 [2], on the device: requests so far; the one to wait for, 0: none
    layer: Tensor  # int32 [1], on the device: a number of the layer


def new_mailbox(pairs: int, like: Tensor) -> Mailbox:
    """Return an empty mailbox, except for `layer`. like: x [..., D]."""
    device, D = like.device, like.shape[-1]
    pinned = dict(pin_memory=device.type == "cuda")
    return Mailbox(
        torch.zeros(MAX_TOKENS, D, dtype=like.dtype, **pinned),
        torch.zeros(pairs, dtype=torch.int32, **pinned),
        torch.zeros(pairs, dtype=torch.int32, **pinned),
        torch.zeros(pairs, **pinned),
        torch.zeros(MAX_TOKENS, D, **pinned),
        torch.zeros(FLAGS, dtype=torch.int32, **pinned),
        torch.zeros(2, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )


@dataclass(frozen=True)
class Share:
    """Settings of `_ask` and of `_answer`."""

    numbers: int  # T * D
    scale: float = 1.0
    slots: int = 0  # R
    E: int = 0
    tokens: int = 0  # T
    active: int = 0  # A

    pairs_tile = property(lambda s: pow2(s.tokens * s.active))


@jit
def post(flag, value):
    """Store an int32 once all that this program has stored is visible to the host."""
    tl.debug_barrier()
    PTX: tl.constexpr = "st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;"
    tl.inline_asm_elementwise(PTX, "=r,l,r", [flag, value], tl.int32, is_pure=False, pack=1)


# Grid [1], one warp: each of its threads stores the flag, after all stores of the warp.
@jit
def _ask(x, chosen, slots, weights, box, near, kept, s: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    P: tl.constexpr = s.tokens * s.active
    p = tl.arange(0, s.pairs_tile)
    expert = tl.load(chosen + p, mask=p < P, other=-1)
    slot = tl.load(slots + p, mask=p < P, other=s.slots)
    weight = tl.load(weights + p, mask=p < P, other=0.0)
    here = slot < s.slots
    asked = (here == 0) & (expert >= 0) & (expert < s.E)
    count, call = tl.sum(asked.to(tl.int32), 0), tl.load(box.calls)
    if count > 0:
        at = tl.cumsum(asked.to(tl.int32), 0) - 1
        tl.store(box.experts + at, expert.to(tl.int32), mask=asked)
        tl.store(box.tokens + at, p // s.active, mask=asked)
        tl.store(box.weights + at, weight, mask=asked)
        for start in range(0, s.numbers, 1024):
            n = start + tl.arange(0, 1024)
            tl.store(box.x + n, tl.load(x + n, mask=n < s.numbers), mask=n < s.numbers)
        tl.store(box.flags + 1, tl.load(box.layer))
        tl.store(box.flags + 2, s.tokens)
        tl.store(box.flags + 3, count)
        post(box.flags, call + 1)
        tl.store(box.calls, call + 1)
    tl.store(box.calls + 1, tl.where(count > 0, call + 1, 0))
    other = tl.max(tl.where(here, slot, 0), 0)
    tl.store(near + p, tl.where(here, slot, other), mask=p < P)
    tl.store(kept + p, tl.where(here, weight, 0.0), mask=p < P)


def ask(
    x: Tensor, chosen: Tensor, slots: Tensor, weights: Tensor, box: Mailbox, R: int, E: int
) -> tuple[Tensor, Tensor]:
    """Request the experts of x [T, D] that are in no slot -> slots to read, and weights [T, A].

    chosen, slots int64 [T, A], weights fp32 [T, A]; slot R: in none. Values outside 0 .. E - 1 of
    `chosen` are other ranks' experts. Experts in no slot get the slot of another one, which a
    kernel may read, and weight 0. T <= MAX_TOKENS.
    """
    if not can_launch(x):
        return ask_plainly(x, chosen, slots, weights, box, R, E)
    near, kept = torch.empty_like(slots), torch.empty_like(weights)
    s = Share(len(x) * x.shape[-1], 1.0, R, E, *chosen.shape)
    tensors = x.contiguous(), chosen, slots, weights, box, near, kept
    launch(_ask, (1,), *tensors, settings=s, warps=1)
    return near, kept


def ask_plainly(
    x: Tensor, chosen: Tensor, slots: Tensor, weights: Tensor, box: Mailbox, R: int, E: int
) -> tuple[Tensor, Tensor]:
    """`ask` in tensor arithmetic, on the CPU."""
    here, T = slots < R, len(x)
    token, column = (~here & (chosen >= 0) & (chosen < E)).nonzero(as_tuple=True)
    count = len(token)
    if count:
        box.experts[:count] = chosen[token, column].int()
        box.tokens[:count] = token.int()
        box.weights[:count] = weights[token, column]
        box.x[:T] = x
        box.flags[LAYER], box.flags[TOKENS], box.flags[PAIRS] = int(box.layer), T, count
        box.calls[0] += 1
        box.flags[ASKED] = box.calls[0]
    box.calls[1] = box.calls[0] if count else 0
    other = torch.where(here, slots, 0).max()
    return torch.where(here, slots, other), torch.where(here, weights, 0.0)


# Grid [blocks of T * D]. Each program polls the flag. Its loads are volatile, so that no cache
# answers them. A thread loads y after the load that has ended its loop. With PDL, the next kernel
# starts before that: it loads its weights while the CPU multiplies.
@jit
def _answer(y, box, residual, out, s: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    NUMBERS: tl.constexpr = s.numbers
    n = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    total = tl.load(y + n, mask=n < NUMBERS, other=0.0).to(tl.float32)
    wanted = tl.load(box.calls + 1)
    if wanted > 0:
        answered = tl.load(box.flags + 16, volatile=True)
        while answered != wanted:
            answered = tl.load(box.flags + 16, volatile=True)
        added = tl.load(box.y + n, mask=n < NUMBERS, other=0.0, volatile=True)
        total += added
    if residual is not None:
        total = tl.load(residual + n, mask=n < NUMBERS, other=0.0).to(tl.float32) + s.scale * total
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < NUMBERS)


def answer(
    y: Tensor,
    box: Mailbox,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return y [T, D] plus the answer to this layer's request, if it has sent one.

    residual [T, D]: the result is residual + scale * that. out [T, D]: where to store the result.
    """
    out, s = torch.empty_like(y, dtype=dtype) if out is None else out, Share(y.numel(), scale)
    if not can_launch(y):
        total = answer_plainly(y, box)
        return out.copy_(total if residual is None else residual + scale * total)
    tensors = y.contiguous(), box, residual, out
    launch(_answer, (cdiv(s.numbers, BLOCK),), *tensors, settings=s)
    return out


def answer_plainly(y: Tensor, box: Mailbox) -> Tensor:
    """`answer` in tensor arithmetic, on the CPU; fp32, without a residual."""
    wanted, flags = int(box.calls[1]), box.flags.numpy()
    while wanted and flags[ANSWERED] != wanted:
        time.sleep(0)  # lets the thread run that answers
    return y + box.y[: len(y)] if wanted else y.to(torch.float32, copy=True)


@torch.library.custom_op("moe_fast::add_answer", mutates_args=())
def add_answer(y: Tensor, slots: Tensor, box: list[Tensor], dtype: torch.dtype) -> Tensor:
    """`answer` as an operator for compiled blocks. slots: of `page`, which has sent the request."""
    return answer(y, Mailbox(*box), dtype)


@add_answer.register_fake
def _(y: Tensor, slots: Tensor, box: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.empty_like(y, dtype=dtype)
