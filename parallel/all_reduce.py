"""Collectives of the model: all-reduce, all-reduce + residual add + norm, all-gather.

All-reduce results are bitwise identical on all ranks. There are four methods: "library"
(NCCL, or gloo on the CPU), "one-shot" and "two-shot" (PyTorch's, in symmetric memory),
and "push" (`ops.ranks.all_reduce.push_all_reduce`). `choose_all_reduce` measures the fastest
for each message size. Collectives are custom operators, so that a compiled block stays
one graph.
"""

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from ops.inductor import custom_op
from ops.products.fixed_join import NextNorm, fixed_join, scores_of
from ops.products.join import (
    NOTHING,
    Added,
    NormRouter,
    add_branch,
    norm_router,
)
from ops.products.quantized_x import QuantizedX
from ops.products.weights import Weight
from ops.ranks.all_reduce import WORDS, Inbox, push_all_reduce
from ops.ranks.mailbox import MAX_DIM, MAX_PROGRAMS, TokenInbox, can_receive
from parallel.process_group import rank, run_collective, size, state, total

MAX_SYMMETRIC_BYTES = 32 << 20  # largest message of one-shot and two-shot
MAX_PUSH_BYTES = 128 << 10
# Upper bounds of message size; the fastest method is chosen for each.
MEASURED_BYTES = tuple(kilobytes << 10 for kilobytes in (8, 32, 128, 512, 2048, 8192, 32768))

# all_gather_single is the name from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# Operators ----------------------------------------------------------------------------


@custom_op("moe_fast::all_reduce")
def all_reduce_sum(x: Tensor) -> Tensor:
    """Sum x over the ranks."""
    return _all_reduce(x)


@all_reduce_sum.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("moe_fast::sum_and_join")
def all_reduce_add_norm(
    x: Tensor,
    y: Tensor,
    scale: float,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    router: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All-reduce y, then add, norm and compute router scores (`fixed_join`).

    x, y [..., D]. Return x + scale * sum, its norm, and the scores.
    """
    added = Added(y=_all_reduce(y))
    return fixed_join(x, added, NextNorm(weight, bias, eps), router, scale)


@all_reduce_add_norm.register_fake
def _(x, y, scale, weight, bias, eps, router) -> tuple[Tensor, Tensor, Tensor]:
    added, normed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return added, normed, scores_of(normed, router)


@custom_op("moe_fast::sum_and_sandwich")
def all_reduce_sandwich(
    x: Tensor,
    y: Tensor,
    branch_weights: Tensor | None,
    weight: Tensor,
    scalar: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    router: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All-reduce y [N, ..., D] in one message, then add the norm of these branches, and so on.

    weight, scalar: as in `Added`. next_weight: of the sum's norm. The rest: as above.
    """
    y = _all_reduce(y)
    added = Added(y=y, branch_norms=branch_weights, norm=weight, scalar=scalar)
    return fixed_join(x, added, NextNorm(next_weight, None, eps), router)


@all_reduce_sandwich.register_fake
def _(
    x, y, branch_weights, weight, scalar, next_weight, eps, router
) -> tuple[Tensor, Tensor, Tensor]:
    added, normed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return added, normed, scores_of(normed, router)


@custom_op("moe_fast::all_gather")
def all_gather(x: Tensor, ranks: int) -> Tensor:
    """Concatenate x [n, ...] of all ranks along the first axis -> [ranks * n, ...]."""
    y = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    run_collective(_all_gather, y, x.contiguous(), group=state().group)
    return y


@all_gather.register_fake
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty(ranks * x.shape[0], *x.shape[1:])


# One token in fused kernels -----------------------------------------------------------
#
# These are called by runtime/fused_layer.py, outside of compiled code. Their kernels have
# fixed shapes, hence the same bits on all ranks.


def inbox_of(x: Tensor, branches: int = 1) -> list[TokenInbox | None]:
    """Return where `ops.products.experts.down` sends a product like x [1, D], or None if it cannot.

    branches: results like x that are one message; each has a place of its own.
    Tokens of the first D that comes are sent: others' messages would leave old numbers behind.
    """
    if _method(branches * x.nbytes) != "push" or not can_receive(x, size(), branches):
        return [None] * branches
    D, inbox = x.shape[-1], state().token_inbox
    state().token_dim = state().token_dim or D
    if state().token_dim != D:
        return [None] * branches
    return [inbox._replace(begin=branch * D) for branch in range(branches)]


def all_reduce_add(
    x: Tensor, y: Tensor | None, scale: float, added: Added = NOTHING, eps: float = 0.0
) -> Tensor:
    """All-reduce y [1, D] -> x + scale * sum. The kernel launched last must not write x.

    y: None, if it has been sent to `inbox_of(x)`. added, eps: with a norm y, or branches of it
    [B, 1, D], are normed after the sum, as by `add_branch`.
    """
    if y is None:
        return run_collective(add_branch, x, added, eps, state().token_inbox, scale)
    if added.norm is not None:
        return add_branch(x, added._replace(y=_all_reduce(y)), eps)
    return torch.add(x, _all_reduce(y), alpha=scale)


def all_reduce_add_router(
    x: Tensor,
    y: Tensor | None,
    scale: float,
    router: NormRouter,
    indices: Tensor,
    weight: Weight | None = None,
    added: Added = NOTHING,
) -> tuple[Tensor, Tensor | QuantizedX, Tensor]:
    """All-reduce y [1, D], then add as `all_reduce_add`, norm and score as `norm_router`.

    Return x + scale * sum, its norm, and the scores. One kernel if y is None, else two. added: as
    of `all_reduce_add`; its eps is that of the router's norm.
    """
    total, args = torch.empty_like(x), (router, weight, indices)
    if y is None:
        how = dict(added=added, total=total, inbox=state().token_inbox, scale=scale)
        return total, *run_collective(norm_router, x, *args, **how)
    if added.norm is not None:
        added = added._replace(y=_all_reduce(y))
        return total, *norm_router(x, *args, added=added, total=total)
    x = all_reduce_add(x, y, scale)
    return x, *norm_router(x, *args)


# Methods ------------------------------------------------------------------------------


def _all_reduce(y: Tensor) -> Tensor:
    """Sum y over the ranks by the fastest method that supports it."""
    return run_collective(sum_over_ranks, _method(y.nbytes), y.contiguous())


def _method(nbytes: int) -> str:
    """Return the fastest method that supports a message of this size."""
    method = next((method for most, method in state().choice if nbytes <= most), "library")
    return method if can_sum(method, nbytes) else "library"


def sum_over_ranks(method: str, x: Tensor) -> Tensor:
    """Sum a contiguous x over the ranks by a method. CUDA graphs can capture all methods.

    Results are bitwise identical on all ranks: "library" and two-shot compute each number
    on one rank and copy it; in one-shot and push each rank adds all messages in the order
    of ranks.
    """
    if method == "push":
        return push_all_reduce(x, state().inbox)
    group = state().group
    if method == "library":
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y
    buffer = state().buffer[: x.nbytes].view(x.dtype).view(x.shape)
    symm_mem, name = torch.ops.symm_mem, group.group_name
    if method == "one-shot":
        return symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", name)
    buffer.copy_(x)
    return symm_mem.two_shot_all_reduce_out(buffer, "sum", name, torch.empty_like(x))


def can_sum(method: str, nbytes: int) -> bool:
    """Return whether a method supports a message of this size."""
    most = MAX_PUSH_BYTES if method == "push" else MAX_SYMMETRIC_BYTES
    return method == "library" or (nbytes <= most and nbytes % 4 == 0)


def methods(device: torch.device) -> list[str]:
    """Return the available methods, and allocate their symmetric memory.

    All but "library" need GPUs of one host with peer access.
    """
    if device.type != "cuda" or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) != size():
        return ["library"]
    own = torch.cuda.current_device()
    peers = (other for other in range(size()) if other != own)
    has_access = all(torch.cuda.can_device_access_peer(own, other) for other in peers)
    if total(int(has_access)) < size():
        return ["library"]
    if state().buffer is None:
        state().buffer, _ = _symmetric_zeros(device, MAX_SYMMETRIC_BYTES, dtype=torch.uint8)
        state().inbox, state().token_inbox = _make_inbox(device), _make_token_inbox(device)
        torch.cuda.synchronize()
        dist.barrier()  # a rank may push only into an inbox that is zeroed
    return ["library", "one-shot", "two-shot", "push"]


def _make_inbox(device: torch.device) -> Inbox:
    programs = MAX_PUSH_BYTES // 4 // WORDS
    shape = 2, size(), programs, WORDS
    memory, peers = _symmetric_zeros(device, *shape, dtype=torch.int64)
    calls = torch.zeros(programs, dtype=torch.int32, device=device)
    return Inbox(memory, peers, calls, rank())


def _make_token_inbox(device: torch.device) -> TokenInbox:
    memory, addresses = _symmetric_zeros(device, 2, size(), MAX_DIM, dtype=torch.int32)
    slots = addresses + rank() * memory.stride(1) * memory.element_size()
    calls = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
    return TokenInbox(memory, slots, calls)


def _symmetric_zeros(
    device: torch.device, *shape: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Allocate zeros in symmetric memory -> them, and their address on each rank, int64 [N]."""
    tensor = symmetric_memory.empty(*shape, dtype=dtype, device=device).zero_()
    addresses = symmetric_memory.rendezvous(tensor, state().group).buffer_ptrs
    return tensor, torch.tensor(addresses, device=device)


# Measurement --------------------------------------------------------------------------


def graph_seconds(work: Callable[[], object], calls: int = 20) -> float:
    """Return the seconds of one call of `work` in a CUDA graph, as in a decode step.

    The best of 4 replays with `calls` calls each, on the slowest rank.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's own thread may query events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            work()
    times = []
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    slowest = torch.tensor(min(times))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def choose_all_reduce(dtype: torch.dtype, device: torch.device) -> str:
    """Measure all methods and select the fastest for each message size, token to prompt.

    Return one line that describes the selection.
    """
    available = methods(device)
    if len(available) == 1 or dtype not in (torch.bfloat16, torch.float32):
        return "all-reduce by the library"
    state().choice, described = [], []
    for nbytes in MEASURED_BYTES:
        x = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
        usable = [method for method in available if can_sum(method, nbytes)]
        times = {method: graph_seconds(partial(sum_over_ranks, method, x)) for method in usable}
        best = min(times, key=times.get)
        state().choice.append((nbytes, best))
        microseconds = f"{times[best] * 1e6:.1f} us (library {times['library'] * 1e6:.1f})"
        described.append(f"{nbytes >> 10} KB {best} {microseconds}")
    return "all-reduce: " + ", ".join(described)
