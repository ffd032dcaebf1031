"""Compile a session's kernels before its first step, while its weights load.

The helper (host/compile_helper.py) has started by then, since importing Triton takes seconds.
The session then names the launches of its steps, which are compiled side by side. A marker beside
Triton's cache tells later runs that a launch is in there, and another that a model is.
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from tqdm import tqdm

import ops
from host.before_imports import start_hashing, wait_for_hash
from host.compile_helper import MARKERS, start, started, stop
from host.files import stamp
from ops.compile_ahead import cache_folder, code_of, kernel_of, signature
from ops.gpu import Gpu
from ops.launch import known_keys, triton
from ops.plain.rope import rope_table

KERNELS = Path(ops.__file__).parent
BAR = "compiling {n_fmt} of {total_fmt} kernels {bar} {elapsed}"
log = logging.getLogger("moe_fast")
remembered: list[Path] = []  # the marker of the model that is loaded; holds its last launches
reading: list[threading.Thread] = []  # at most one


def start_compiling(source, device: torch.device) -> None:
    """Begin what the first launches need, while weights load.

    That is Triton's hash, and the helper for a model that was not run with this cache; else the
    kernels of the model's last run are read. source: as in `runtime.loading.load_model`.
    """
    if device.type != "cuda" or triton is None:
        return
    start_hashing()
    read_keys()
    remembered[:] = [folder() / digest(f"{source.args} {source.format}")]
    if not remembered[0].exists():
        start()
        return
    # No daemon: the process must not end while the driver loads a kernel.
    reading[:] = [threading.Thread(target=read_kernels, args=(remembered[0], device))]
    reading[0].start()


def read_kernels(launched: Path, device: torch.device) -> None:
    """Load the kernels that a file names from Triton's cache onto the GPU, and those of RoPE.

    The first launch loads kernels that fail here, and raises the error.
    """
    wait_for_hash()
    with suppress(Exception):  # the driver loads PyTorch's kernels for the table: 0.06 s
        rope_table(torch.ones(1, dtype=torch.float32, device=device), 1)
    with suppress(Exception), torch.cuda.device(device):
        for task in json.loads(launched.read_text() or "[]"):
            with suppress(Exception):
                if marker(task).exists():
                    _ = code_of(task).run  # this property loads it


def stop_compiling() -> None:
    """End the helper, and wait for kernels that are read: none is compiled ahead."""
    wait_for_kernels()
    stop()


def wait_for_kernels() -> None:
    """Return when the thread of `read_kernels` has ended."""
    while reading:
        reading.pop().join()


def folder() -> Path:
    """Return the folder of markers, beside what Triton has compiled."""
    return cache_folder() / MARKERS


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def marker(task: str) -> Path:
    """Return the file that says that a task is in Triton's cache."""
    return folder() / digest(signature(task))


def sources() -> str:
    """Return a digest of Triton's version and of our sources.

    Files are known by size and time of change, as Python knows the source of its bytecode.
    """
    files = [(str(path), *stamp(path.stat())) for path in sorted(KERNELS.rglob("*.py"))]
    return digest(f"{triton.__version__} {files}")


def keys_file() -> Path:
    return folder() / f"keys_{digest(str(KERNELS))}.json"


def read_keys() -> None:
    """Let kernels take the keys that they had in an earlier run of the same sources."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # none, or a damaged file
        found = json.loads(keys_file().read_text())
        if found["sources"] == sources():
            known_keys.update(found["keys"])


def keep_keys(tasks: Sequence[str]) -> None:
    """Keep the keys of the tasks' kernels for `read_keys`."""
    kernels = {kernel.path: kernel for kernel in map(kernel_of, tasks)}
    if kernels.keys() <= known_keys.keys():
        return
    keys = known_keys | {name: kernel.cache_key for name, kernel in kernels.items()}
    keys_file().write_text(json.dumps({"sources": sources(), "keys": keys}))


def compile_ahead(tasks: Sequence[str], gpu: Gpu) -> int:
    """Compile the tasks that no earlier run has compiled; return how many."""
    wait_for_hash()
    wait_for_kernels()
    markers = {task: marker(task) for task in tasks}
    missing = [task for task in tasks if not markers[task].exists()]
    if missing:
        start()
        folder().mkdir(parents=True, exist_ok=True)
        begin, options, errors = time.perf_counter(), {"leave": False, "disable": None}, []
        with tqdm(total=len(missing), bar_format=BAR, **options) as progress:
            for number, error in started[0].compile(gpu, missing, cache_folder()):
                progress.update(1)
                if error is None:
                    markers[missing[number]].touch()
                else:
                    errors.append(error)
        done = sum(markers[task].exists() for task in missing)
        seconds = time.perf_counter() - begin
        log.info(f"{done} of {len(missing)} kernels compiled side by side in {seconds:.1f} s")
        if errors:
            log.info(f"{len(errors)} kernels are compiled when they first run: {errors[0]}")
    for path in remembered:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tasks))
        keep_keys(tasks)
    stop()
    return len(missing)
