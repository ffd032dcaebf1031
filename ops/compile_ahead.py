"""Compile launches of Triton kernels in processes of a helper, side by side.

    `collect`            notes launches as text: nothing is compiled, nothing runs
    `Helper.compile`     compiles them, each in a process, into Triton's cache on disk

A launch that follows finds its kernel in the cache. One process would compile for half a minute:
Triton's code generator is Python, which holds its lock. The helper has no CUDA context, so it may
fork. runtime/compile_ahead.py decides what is compiled, and when.
"""

import dataclasses
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

import torch

from ops.gpu import Gpu, found
from ops.launch import Kernel, collect_only, triton

try:
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
except ImportError:  # no kernel is compiled without Triton
    GPUTarget = driver = None

ROOT = Path(__file__).parents[1]
LEAVE_FREE = 2  # cores of the machine, for the process that waits


# Launches as text ---------------------------------------------------------------------------------


def encode(value) -> object:
    """Return a launch's argument as JSON has it: numbers, text, and objects by class and fields."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "dtype"):  # Triton's stand-in for a tensor
        return {"tensor": str(value.dtype).removeprefix("torch.")}
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    elif hasattr(value, "_fields"):
        fields = value._asdict()
    else:
        return [encode(part) for part in value]
    kind = type(value)
    parts = {name: encode(part) for name, part in fields.items()}
    return {"class": [kind.__module__, kind.__qualname__], "fields": parts}


def decode(value):
    """Undo `encode`."""
    if isinstance(value, list):
        return tuple(map(decode, value))
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    if "tensor" in value:
        return triton.runtime.jit.MockTensor(getattr(torch, value["tensor"]))
    module, name = value["class"]
    kind = getattr(importlib.import_module(module), name)
    return kind(**{name: decode(part) for name, part in value["fields"].items()})


def task_of(kernel: Kernel, args: Sequence, options: dict) -> str:
    """Return a launch as text. args: as of `Kernel.compile_for`, without memory."""
    function = kernel.fn
    name = [function.__module__, function.__qualname__]
    return json.dumps({"kernel": name, "args": encode(tuple(args)), "options": options})


def collect(launch: Callable[[], object]) -> list[str]:
    """Return the launches of a function as tasks, each once: it compiles and runs nothing."""
    with collect_only() as notes:
        launch()
    return list(dict.fromkeys(task_of(*note) for note in notes))


def kernel_of(task: str) -> Kernel:
    module, name = json.loads(task)["kernel"]
    return getattr(importlib.import_module(module), name)


def signature(task: str) -> str:
    """Return a text that differs for each compiled code: the task, its source and the compiler."""
    return f"{task} {kernel_of(task).cache_key} {triton.__version__}"


def cache_folder() -> Path:
    """Return Triton's cache."""
    return Path(triton.knobs.cache.dir)


def compile_task(task: str) -> None:
    """Compile a launch into Triton's cache. Raises KernelError."""
    given = json.loads(task)
    kernel_of(task).compile_for(*decode(given["args"]), **given["options"])


# The helper ---------------------------------------------------------------------------------------


def pretend(gpu: Gpu) -> None:
    """Let Triton compile for a GPU without a CUDA context."""
    major, minor = gpu.capability
    found[0] = gpu
    target = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    driver.set_active(target)


def main() -> None:
    """Compile the tasks of one line of JSON; print a line for each: its number, and its error."""
    given = json.loads(sys.stdin.readline() or "{}")
    if not given:
        return
    capability, *rest = given["gpu"]
    pretend(Gpu(tuple(capability), *rest))
    tasks = given["tasks"]
    for name in {json.loads(task)["kernel"][0] for task in tasks}:
        importlib.import_module(name)  # once, and not in each process
    workers = max(1, min(len(tasks), (os.cpu_count() or 1) - LEAVE_FREE))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        running = {pool.submit(compile_task, task): number for number, task in enumerate(tasks)}
        for future in as_completed(running):
            error = future.exception()
            print(json.dumps([running[future], error and str(error)]), flush=True)


# The process that needs them ----------------------------------------------------------------------


class Helper:
    """A process that compiles launches. It starts at once, and waits for them."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ops.compile_ahead"],
            cwd=ROOT,
            env=os.environ | {"TRITON_CACHE_DIR": str(cache_folder().absolute())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def compile(self, gpu: Gpu, tasks: Sequence[str]) -> Iterator[tuple[int, bool]]:
        """Yield the number of each task when it is done, and whether it is in Triton's cache.

        One that cannot be compiled is not: the step's own launch then says why. A helper that ends
        early leaves the other tasks to those launches, too.
        """
        given = json.dumps({"gpu": gpu, "tasks": list(tasks)})
        with suppress(BrokenPipeError):
            print(given, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            number, error = json.loads(line)
            yield number, error is None

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.communicate()


if __name__ == "__main__":
    main()
