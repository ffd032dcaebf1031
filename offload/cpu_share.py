"""The CPU's side of ops/step/cpu_share.py: a thread that multiplies experts where they are.

The thread polls for requests of one model. It spins while a step runs, since a layer's share takes
some 50 us, and sleeps more and more while there is none.
"""

import copy
import ctypes
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from formats import PLAIN
from formats.packed import Packed
from model import Experts
from offload.cpu_experts import CPUExperts, CPUThreads, HostWeight
from offload.experts import LayerStorage, OffloadedExperts, set_parts
from ops.step.cpu_share import (
    ANSWERED,
    ASKED,
    LAYER,
    MAX_TOKENS,
    PAIRS,
    STOP,
    TOKENS,
    Mailbox,
    new_mailbox,
)
from ops.step.expert_paging import MAX_PAIRS

# The thread begins to sleep after SPIN_SECONDS without a request: several layers of large experts
# may ask for nothing. A request that finds it asleep waits for up to LONGEST_SLEEP.
SPIN_SECONDS = 10e-3
LONGEST_SLEEP = 2e-3  # seconds
# How long another thread keeps Python's lock while plain products wait for it. Python's own 5 ms
# are longer than many layers take, and each layer with a miss waits for its answer.
SWITCH_SECONDS = 1e-4
THREAD = "cpu share"  # its name

log = logging.getLogger("moe_fast")

# (x [T, D], experts int32 [P], tokens int32 [P], weights fp32 [P], y fp32 [T, D]): writes to y the
# weighted sum of each token's experts.
CPUProducts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


# Products -----------------------------------------------------------------------------------------


def cpu_products(experts: Experts, storage: LayerStorage, threads: CPUThreads) -> CPUProducts:
    """Return what multiplies a layer's experts in host memory.

    experts: those of the layer, as they were before they were offloaded; they are not changed.
    """
    experts = copy.deepcopy(experts)
    set_parts(experts, storage.parts, [part.in_host(storage.blobs) for part in storage.parts])
    w13, w2 = host_weight(experts.w13), host_weight(experts.w2)
    if w13 is None or w2 is None:
        return PlainProducts(experts)
    return CPUExperts(w13, w2, experts.activation, threads)


def host_weight(module: nn.Module) -> HostWeight | None:
    """Return w13 or w2 in host memory; None if it is in several formats."""
    if isinstance(module, nn.ModuleList):
        return None
    bias = getattr(module, "bias", None)
    if isinstance(module, Packed):
        return HostWeight(module.parts(), module.format, module.group, bias)
    return HostWeight({"weight": module.weight}, PLAIN, 1, bias)


class PlainProducts:
    """`CPUProducts` of experts in several formats, in plain PyTorch."""

    def __init__(self, experts: Experts):
        self.experts = experts

    def __call__(
        self, x: Tensor, experts: Tensor, tokens: Tensor, weights: Tensor, y: Tensor
    ) -> Tensor:
        y.zero_()
        outputs = self.experts.per_expert(x[tokens], experts.long().unsqueeze(1)).flatten(0, 1)
        return y.index_add_(0, tokens, outputs.float() * weights.unsqueeze(1))


# The thread ---------------------------------------------------------------------------------------


def plain_answers(products: Sequence[CPUProducts], box: Mailbox) -> Callable[[], None]:
    """Return what answers the mailbox's request, in Python."""
    flags = box.flags.numpy()

    def answer() -> None:
        layer, T, P, asked = (int(flags[n]) for n in (LAYER, TOKENS, PAIRS, ASKED))
        x, experts, tokens, weights, y = (
            part[:size] for part, size in zip(box[:5], (T, P, P, P, T), strict=True)
        )
        with torch.inference_mode():
            products[layer](x, experts, tokens, weights, y)
        flags[ANSWERED] = asked

    return answer


def compiled_server(products: Sequence[CPUExperts], box: Mailbox) -> Callable[[], None]:
    """Return what answers requests until the flag STOP, without Python."""
    pairs, count = (box.experts, box.tokens, box.weights), box.flags[PAIRS : PAIRS + 1]
    calls = [
        layer.host_function(box.x[:T], *pairs, count, box.y[:T])[1]
        for layer in products
        for T in range(1, MAX_TOKENS + 1)
    ]
    array = (ctypes.c_void_p * len(calls))(*calls)
    run = products[0].threads.library.serve

    def answer_all(_kept=products) -> None:  # they own what the calls point to
        run(box.flags.data_ptr(), array, MAX_TOKENS, SPIN_SECONDS, LONGEST_SLEEP)

    return answer_all


def is_compiled(products: CPUProducts) -> bool:
    return isinstance(products, CPUExperts) and products.layer is not None


def serve(box: Mailbox, answer: Callable[[], None]) -> None:
    """Answer requests until the flag STOP. An error becomes an answer of NaN, and is logged."""
    flags, idle_since, pause = box.flags.numpy(), time.perf_counter(), 0.0
    while not flags[STOP]:
        if flags[ASKED] == flags[ANSWERED]:
            time.sleep(pause)  # 0 lets other threads of Python run
            if time.perf_counter() - idle_since > SPIN_SECONDS:
                pause = min(LONGEST_SLEEP, 2 * pause + 1e-5)
            continue
        try:
            answer()
        except Exception:
            log.exception("the CPU's share of layer %d failed", flags[LAYER])
            box.y.fill_(float("nan"))
            flags[ANSWERED] = flags[ASKED]
        idle_since, pause = time.perf_counter(), 0.0


def share_layers(
    layers: Sequence[OffloadedExperts], products: Sequence[CPUProducts], like: Tensor
) -> Mailbox:
    """Let the CPU have a share of these layers, and start its thread -> the mailbox.

    like: x [..., D] on the device. The thread ends with the first of the layers.
    """
    box = new_mailbox(MAX_PAIRS, like)
    for n, layer in enumerate(layers):
        layer.box = box._replace(layer=box.layer + n)
    if all(map(is_compiled, products)):
        server = compiled_server(products, box)
    else:
        server = partial(serve, box, plain_answers(products, box))
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
    thread = threading.Thread(target=server, name=THREAD, daemon=True)
    thread.start()
    weakref.finalize(layers[0], end_thread, thread, box.flags)
    return box


def end_thread(thread: threading.Thread, flags: Tensor) -> None:
    """End a thread that serves, also before the process ends: else Python kills it in C++ code."""
    flags.numpy()[STOP] = 1  # an inference tensor itself takes no write here
    if thread is not threading.current_thread():
        thread.join()


def set_copies(layers: Sequence[OffloadedExperts], copies: Sequence[int]) -> None:
    """Set how many of n misses each layer copies: copies[n], for n from 0 on."""
    for layer in layers:
        cache = layer.cache
        cache.copies = torch.tensor(copies, device=cache.copies.device)
