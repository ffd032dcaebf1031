"""Compile launches of Triton kernels in processes of a helper, side by side.

    `collect`     notes launches as text: nothing is compiled, nothing runs
    `main`        compiles them, each in a process, into Triton's cache on disk

A launch that follows finds its kernel in the cache. One process would compile for half a minute:
Triton's code generator is Python, which holds its lock. The helper has no CUDA context, so it may
fork. host/compile_helper.py starts it; runtime/compile_ahead.py decides what is compiled, and when.
"""

import dataclasses
import importlib
import json
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

import torch

import ops
from ops.cpu import usable_cores
from ops.gpu import Gpu, found
from ops.launch import Kernel, collect_only, triton

try:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
    from triton.runtime.driver import driver
except ImportError:  # no kernel is compiled without Triton
    GPUTarget = driver = CudaLauncher = CudaUtils = None
try:
    from triton.runtime.cache import triton_key
except ImportError:  # another version of Triton
    triton_key = None

LEAVE_FREE = 2  # cores, for the process that waits
# Modules that Triton imports when it first compiles a kernel.
COMPILER = "triton.compiler.code_generator", "triton.experimental.gluon"


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
    """Return a launch as text. args: as in `Kernel.compile_for`, without memory."""
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


def code_of(task: str):
    """Return a launch's compiled code, from Triton's cache if it is there. Raises KernelError."""
    given = json.loads(task)
    return kernel_of(task).compile_for(*decode(given["args"]), **given["options"])


def compile_task(task: str) -> None:
    """Compile a launch into Triton's cache. Raises KernelError."""
    code = code_of(task)
    # What calls a kernel is C code of its own in some versions of Triton: 0.4 s of a C compiler.
    # It needs the driver's library; without it, or in another version, the launch makes it.
    with suppress(Exception):
        CudaLauncher(code.src, code.metadata)


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


def keep_version(gpu: Gpu) -> None:
    """Let this process ask for the version of its ptxas now (`ops.launch.keep_assembler`)."""
    major, minor = gpu.capability
    with suppress(Exception):  # another version of Triton
        triton.compiler.compiler.make_backend(GPUTarget("cuda", 10 * major + minor, 32)).hash()


def error_of(work: Callable, *arguments) -> str | None:
    """Call `work`; return its error as text, None if there is none.

    Some errors cannot be pickled, a KernelError among them: they would end the pool, and all tasks.
    """
    try:
        work(*arguments)
    except Exception as error:
        return str(error) or type(error).__name__
    return None


def prepare() -> None:
    """Do what all processes would do alike, before they are forked, and before tasks come."""
    names = [module.name for module in pkgutil.walk_packages(ops.__path__, "ops.")]
    for name in (*names, *COMPILER):
        with suppress(ImportError):  # of Triton's: another version
            importlib.import_module(name)
    if triton_key is not None:
        triton_key()


def end_with_parent() -> None:
    """End this process and its group when the process that has started it ends."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Compile the tasks of one line of JSON; print a line for each: its number, and its error."""
    prepare()
    given = json.loads(sys.stdin.readline() or "{}")
    if not given:
        return
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.nice(given["nice"])
    os.environ["TRITON_CACHE_DIR"] = given["cache"]
    capability, *rest = given["gpu"]
    pretend(Gpu(tuple(capability), *rest))
    tasks = given["tasks"]
    workers = max(1, min(len(tasks), usable_cores() - LEAVE_FREE))
    fork = multiprocessing.get_context("fork")
    fork.Process(target=CudaUtils).start()  # C code, as in `compile_task`; in the pool it ended all
    with ProcessPoolExecutor(workers, fork) as pool:
        running = {pool.submit(error_of, compile_task, t): n for n, t in enumerate(tasks)}
        for future in as_completed(running):
            print(json.dumps([running[future], future.result()]), flush=True)


if __name__ == "__main__":
    main()
