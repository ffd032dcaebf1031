"""Run what offloading launches in Triton's interpreter, or compile it, without a GPU.

    TRITON_INTERPRET=1 python tests/offload_without_gpu.py < INPUT

INPUT is a JSON object: "models", pairs of a family and a format as in `small_model`. Prints one
JSON object. Interpreted: how many calls of `place`, and of `ask` and `answer`, differ from plain
PyTorch; and by model the error of logits by `FusedOffloadRunner`, with no miss copied and with a
half of them. Compiled for an H100: spills of each kernel.
"""

import json
import os
import sys
from functools import partial
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from model import Transformer
from offload.cache import DeviceExpertCache
from offload.cpu_share import set_copies
from offload.experts import expert_counters, offloaded_layers
from offload.plan import OffloadSettings, offload_experts
from offload.runner import FusedOffloadRunner
from ops.step import cpu_share, expert_paging
from ops.step.cpu_share import ANSWERED, ASKED, Mailbox, new_mailbox
from tests import interpreter
from tests.launched_code import launched_code
from tests.moe_kernels_without_gpu import as_on_a_gpu, relative, replace_four_bits, small_model

CPU = torch.device("cpu")
PLACED = (7, 4, 3), (7, 1, 1), (12, 12, 5)  # E, R, P
ASKS = (8, 3, 1, 2, 40), (5, 5, 4, 3, 1030)  # E, R, T, A, D


def place_differences() -> int:
    """Count the calls, of 36 a shape, in which kernel and plain PyTorch differ."""
    wrong, generator = 0, torch.Generator().manual_seed(0)
    for E, R, P in PLACED:
        caches = [DeviceExpertCache(E, range(R), CPU) for _ in range(2)]
        for call in range(36):
            copies = torch.randint(0, 3, (3,), generator=generator).minimum(torch.arange(3))
            for cache in caches:
                cache.copies = copies
            # -1 and E are experts of other ranks.
            chosen = torch.randint(-1, E + 1, (P,), generator=generator)
            places = expert_paging.place_plainly, expert_paging.place
            with mock.patch.object(expert_paging, "can_launch", lambda x: True):
                found = [
                    [*function(chosen, cache.table(call % 3 > 0), R), *cache.buffers()]
                    for function, cache in zip(places, caches, strict=True)
                ]
            wrong += not all(map(torch.equal, *found))
    return wrong


@triton.jit
def plain_post(flag, value):
    """`cpu_share.post`, whose assembly the interpreter does not know."""
    tl.store(flag, value)


def ask_differences() -> int:
    """Count the requests, of 20 a shape, in which kernels and plain PyTorch differ."""
    cpu_share.post = plain_post
    wrong, generator = 0, torch.Generator().manual_seed(0)
    launched = mock.patch.object(cpu_share, "can_launch", lambda x: True)
    for E, R, T, A, D in ASKS:
        boxes = [new_mailbox(T * A, torch.empty(D)) for _ in range(2)]
        for call in range(20):
            chosen = torch.randint(-1, E + 1, (T, A), generator=generator)
            slots = torch.randint(0, R + 1, (T, A), generator=generator)
            slots = slots if call % 4 else slots.clamp(max=R - 1)  # nothing to ask for
            x, y, residual = (torch.randn(T, D, generator=generator) for _ in range(3))
            weights, found = torch.rand(T, A, generator=generator), []
            for box, on_gpu in zip(boxes, (False, True), strict=True):
                given = x, chosen, slots, weights, box, R, E
                with launched if on_gpu else mock.patch.object(cpu_share, "BLOCK", 1024):
                    asked = cpu_share.ask(*given)
                    box.y.fill_(call)
                    box.flags[ANSWERED] = box.flags[ASKED]
                    half = partial(cpu_share.answer, y, box, torch.float16)
                    found.append([*asked, *map(torch.clone, box), half(), half(residual, 0.5)])
            wrong += not all(map(torch.equal, *found))
    return wrong


def offload_model(model: Transformer, slots: int) -> None:
    """Offload a loaded model's experts: the CPU's share is all that misses."""
    weights = {name: tensor.clone() for name, tensor in model.named_parameters()}

    def read(name: str, device, expert: int | None = None) -> Tensor:
        return weights[name] if expert is None else weights[name][expert : expert + 1]

    settings = OffloadSettings(slots, compute="cpu")
    offload_experts(model, settings, CPU, model.norm.weight.dtype, read)


def model_errors(family: str, format: str) -> dict:
    """Compare logits by `FusedOffloadRunner` with those of resident experts, for each split."""
    calls = ([3], [0]), ([5, 9], [1, 2]), ([8], [3])
    found: dict = {"errors": []}
    with mock.patch.object(torch, "compile", lambda function, **_: function), as_on_a_gpu():
        model = small_model(family, format)
        want = run(model, None, calls)
        for copies in ([0] * 9, [0, 0, 1, 1, 2, 2, 3, 3, 4]):
            model = small_model(family, format)
            offload_model(model, 2 * model.args.n_active)
            set_copies(offloaded_layers(model), copies)
            got = run(model, FusedOffloadRunner(model), calls)
            found["errors"].append(relative(got, want))
            counts = expert_counters(model)
            names = ("hits", "misses", "on_cpu")
            found["counts"] = [sum(each[name] for each in counts) for name in names]
    return found


def run(model: Transformer, runner: FusedOffloadRunner | None, calls) -> Tensor:
    logits = []
    for call in calls:
        last = torch.tensor([len(call[0]) - 1])
        tokens, positions = (torch.tensor(part)[None] for part in call)
        logits.append(model(tokens, positions, last, runner=runner))
        assert runner is None or runner.is_fused
    return torch.cat(logits)


def spills() -> dict[str, int]:
    """Return how many registers the kernels spill, as compiled for an H100."""
    cache, box = DeviceExpertCache(256, range(64), CPU), new_mailbox(128, torch.empty(2048))
    box = Mailbox(*box)
    ids, weights = torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8)
    x = torch.empty(1, 2048, dtype=torch.bfloat16)

    def launch() -> None:
        with (
            mock.patch.object(expert_paging, "can_launch", lambda x: True),
            mock.patch.object(cpu_share, "can_launch", lambda x: True),
        ):
            expert_paging.place(ids[0], cache.table(True), 64)
            cpu_share.ask(x, ids, ids, weights, box, 64, 256)
            cpu_share.answer(x.float(), box, torch.bfloat16, x)

    found = launched_code(launch)
    return {name: code.asm["sass"].count("STL") for name, code in found.items()}


def main() -> int:
    torch.set_num_threads(1)
    given = json.load(sys.stdin) or {}
    with torch.inference_mode():
        if os.environ.get("TRITON_INTERPRET") == "1":
            interpreter.prepare()
            replace_four_bits()
            models = [model_errors(*pair) for pair in given.get("models", ())]
            found = {"placed": place_differences(), "asked": ask_differences(), "models": models}
        else:
            found = spills()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
