"""Repeated launches beside Triton's own, with a driver that runs nothing; see test_gpu.py.

    python tests/launches_without_gpu.py    compiles a small kernel for an H200

Prints a JSON object, of what the driver gets and of how often Triton looks for the code.
"""

import json
import os
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

from ops import launch
from ops.gpu import KNOWN, found
from ops.launch import KernelError, jit, tl, triton


@dataclass(frozen=True)
class Settings:
    size: int
    scale: float = 1.0


class Both(NamedTuple):
    first: Tensor
    second: Tensor | None = None


@jit
def _add(x, both, n, s: tl.constexpr, PDL: tl.constexpr):
    i = tl.arange(0, s.size)
    value = tl.load(both.first + i, mask=i < n).to(tl.float32) * s.scale
    if both.second is not None:
        value += tl.load(both.second + i)
    tl.store(x + i, tl.sum(value, 0) + value)  # a sum of all warps: shared memory


class FakeDriver:
    """Two GPUs, which note launches."""

    def __init__(self):
        self.device, self.launches, self.error = 0, [], ""
        self.active = types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: self.device,
            get_current_stream=lambda device: 7 + device,
        )

    def load(self, code: CompiledKernel) -> None:
        code.module, code.function, code._run = 1, code.hash, self.run

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, exit, *args):
        if self.error:
            raise RuntimeError(f"Triton Error [CUDA]: {self.error}")
        own, constants = list(map(plain, args[:3])), len(args) - 3  # whose values do not count
        self.launches.append([x, y, z, stream, function, list(metadata), *own, constants])


def plain(arg):
    """Return an argument as JSON has it: of a tensor its address."""
    if isinstance(arg, tuple):
        return list(map(plain, arg))
    return arg.data_ptr() if isinstance(arg, Tensor) else arg


def cases() -> list[tuple[int, tuple, tuple, Settings, dict]]:
    """Return launches that Triton needs different code for: device, grid, arguments, options."""
    x, given, small = torch.zeros(65), torch.zeros(65), Settings(64)
    sizes = [((1,), (x, Both(given), n)) for n in (1, 16, 17, 48, 2, 2**31)]
    others = [
        ((2, 3), (x, Both(given, x), 17)),
        ((2,), (x[1:], Both(given), 17)),  # not aligned
        ((2, 3, 4), (x, Both(given[1:], x), 17)),
        ((2,), (x.half(), Both(given.half(), x.int()), 17)),
        ((2,), (x, (given, None), 17)),
    ]
    found = [(0, grid, args, small, {}) for grid, args in sizes + others[:4]]
    grid, args = others[0]
    found += [(0, grid, args, settings, {}) for settings in (Settings(32), Settings(64, 2.0))]
    named: list[dict] = [{"warps": 8}, {"stages": 2}, {"registers": 64}, {"pdl": False}]
    found += [(0, grid, args, small, options) for options in named]
    return [*found, (1, grid, args, small, {})]


def start(fake: FakeDriver, case: tuple) -> None:
    fake.device, grid, args, settings, options = case
    launch.launch(_add, grid, *args, settings=settings, **options)


def count_by_triton(call: Callable[[], object]) -> int:
    """Call, and return how many launches Triton found the code of."""
    with mock.patch.object(triton.JITFunction, "run", autospec=True) as run:
        run.side_effect = RUN
        call()
    return run.call_count


RUN = triton.JITFunction.run


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, KernelError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    fake, given = FakeDriver(), cases()
    driver.set_active(fake.active)
    found.update({0: KNOWN["sm_90"], 1: KNOWN["sm_90"]})
    results: dict = {"cases": len(given)}
    with (
        mock.patch.object(CompiledKernel, "_init_handles", lambda code: fake.load(code)),
        mock.patch.object(launch, "gpu_has_pdl", lambda device: True),
    ):
        rounds = []
        for turn in ("first", "second", "by Triton"):
            fake.launches.clear()
            own = None if turn == "by Triton" else launch.specialize
            with mock.patch.object(launch, "specialize", own):
                results[turn] = count_by_triton(lambda: [start(fake, case) for case in given])
            rounds.append([*fake.launches])
        results["same"] = rounds[0] == rounds[1] == rounds[2]
        results["codes"] = len({launched[4] for launched in rounds[0]})

        last, hooked = given[-1], []
        hook = triton.knobs.runtime.launch_enter_hook
        hook.add(hooked.append)
        # Triton's launcher calls the hook, which this driver has not: the call of Triton counts.
        results["hooked"] = count_by_triton(lambda: start(fake, last))
        hook.remove(hooked.append)
        results["after it"] = count_by_triton(lambda: start(fake, last))

        fake.launches.clear()
        with launch.compile_only() as recorded:
            start(fake, last)
        with launch.collect_only() as collected:
            start(fake, last)
        results["not run"] = len(recorded), len(collected), len(fake.launches)

        for fake.error in ("invalid argument", "an illegal memory access"):
            results[fake.error] = error_of(lambda: start(fake, last))
        fake.error = ""
        os.environ["MOE_FAST_GPU"] = "sm_90"  # as by `become` in tests/test_gpu.py
        KNOWN["sm_90"] = found[1] = KNOWN["sm_90"]._replace(shared_memory=0)
        results["a smaller GPU"] = error_of(lambda: start(fake, last))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
