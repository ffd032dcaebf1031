"""Compile Triton kernels side by side, in processes of a helper, before a step needs them.

    launches are collected (`collect`)          by this process: nothing is compiled, nothing runs
    the helper compiles them, one a process     into Triton's cache on disk
    the step's own launches find them there

One process would compile for half a minute: Triton's code generator is Python. The helper starts
while weights load, since importing Triton takes seconds. It has no CUDA context, so it may fork.
A marker beside Triton's cache tells later runs that a launch is in there.
"""

import dataclasses
import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from ops.gpu import Gpu, found
from ops.launch import Kernel, KernelError, collect_only, triton
from parallel import process_group

try:
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
except ImportError:  # no kernel is compiled without Triton
    GPUTarget = driver = None

log = logging.getLogger("moe_fast")
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


def compile_task(task: str) -> str | None:
    """Compile a launch; return None, or the error in one line."""
    given = json.loads(task)
    module, name = given["kernel"]
    kernel = getattr(importlib.import_module(module), name)
    try:
        kernel.compile_for(*decode(given["args"]), **given["options"])
    except KernelError as error:
        return str(error)
    return None


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
    """Compile the tasks of one line of JSON; print a line for each that is done."""
    given = json.loads(sys.stdin.readline() or "{}")
    if not given:
        return
    capability, *rest = given["gpu"]
    pretend(Gpu(tuple(capability), *rest))
    tasks = given["tasks"]
    for name in {json.loads(task)["kernel"][0] for task in tasks}:
        importlib.import_module(name)  # once, and not in each process
    workers = max(1, min(len(tasks), (os.cpu_count() or 1) - LEAVE_FREE))
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for number, error in pool.imap_unordered(compile_numbered, enumerate(tasks)):
            print(json.dumps([number, error]), flush=True)


def compile_numbered(numbered: tuple[int, str]) -> tuple[int, str | None]:
    number, task = numbered
    return number, compile_task(task)


# The process that needs them ----------------------------------------------------------------------


class Helper:
    """A process that compiles launches. It starts at once, and waits for them."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runtime.compile_ahead"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def compile(self, gpu: Gpu, tasks: Sequence[str]) -> Iterator[tuple[int, bool]]:
        """Yield the number of each task when it is done, and whether it is in Triton's cache.

        One that cannot be compiled is not: the step's own launch then says why.
        """
        print(json.dumps({"gpu": gpu, "tasks": list(tasks)}), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            number, error = json.loads(line)
            yield number, error is None

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.communicate()


helper: list[Helper] = []  # that has been started, at most one
remembered: list[Path] = []  # the marker of the model that is loaded


def start() -> None:
    """Start the helper, which imports Triton meanwhile."""
    if not helper and triton is not None:
        helper.append(Helper())


def start_compiling(source, device: torch.device) -> None:
    """Start the helper for a model that was not run with this cache, while its weights load.

    source: as of `runtime.loading.load_model`.
    """
    model = f"{source.args} {source.format}"
    remembered[:] = [folder() / hashlib.sha256(model.encode()).hexdigest()[:24]]
    alone = process_group.size() == 1
    if device.type == "cuda" and alone and not remembered[0].exists():
        start()


def stop() -> None:
    """End the helper."""
    while helper:
        helper.pop().close()


def collect(launch: Callable[[], object]) -> list[str]:
    """Return the launches of a function as tasks, each once: it compiles and runs nothing."""
    with collect_only() as notes:
        launch()
    return list(dict.fromkeys(task_of(*note) for note in notes))


def folder() -> Path:
    """Return the folder of markers, beside what Triton has compiled."""
    return Path(triton.knobs.cache.dir) / "ahead"


def marker(task: str) -> Path:
    """Return the file that says that a task is in Triton's cache."""
    module, name = json.loads(task)["kernel"]
    kernel = getattr(sys.modules[module], name)
    key = f"{task} {kernel.cache_key} {triton.__version__}"
    return folder() / hashlib.sha256(key.encode()).hexdigest()[:24]


def compile_ahead(tasks: Sequence[str], gpu: Gpu) -> int:
    """Compile the tasks that no earlier run has compiled; return how many."""
    markers = {task: marker(task) for task in tasks}
    missing = [task for task in tasks if not markers[task].exists()]
    if missing:
        start()
        folder().mkdir(parents=True, exist_ok=True)
        total, options = len(missing), {"leave": False, "disable": None}
        with tqdm(total=total, desc="compiling", unit="kernel", **options) as progress:
            for number, is_done in helper[0].compile(gpu, missing):
                progress.update(1)
                if is_done:
                    markers[missing[number]].touch()
    for path in remembered:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    stop()
    return len(missing)


if __name__ == "__main__":
    main()
