"""Compile a session's kernels before its first step, while its weights load.

The helper (host/compile_helper.py) has started by then, since importing Triton takes seconds.
The session then names the launches of its steps, which are compiled side by side. Beside Triton's
cache a marker tells later runs that a launch is in there, and another one that a whole model is. A
second helper compiles in the background what no step needs yet (`compile_later`).
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import torch
from tqdm import tqdm

import ops
from host.before_imports import start_hashing, wait_for_hash
from host.compile_helper import MARKERS, Helper, start, started, stop
from host.files import stamp
from ops.compile_ahead import cache_folder, code_of, keep_version, kernel_of, signature
from ops.gpu import Gpu
from ops.launch import helper_environment, known_keys, triton
from ops.plain.rope import rope_table

KERNELS = Path(ops.__file__).parent
BAR = "compiling {n_fmt} of {total_fmt} kernels {bar} {elapsed}"
NICE = 10  # `compile_later` takes the time that this process leaves
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
    start_hashing(cache_folder())
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
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # none, or damaged
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
    keep_version(gpu)
    if missing := not_compiled(tasks):
        start()
        summary, errors = compile_missing(started[0], missing, gpu)
        log.info(summary)
        if errors:
            log.info(f"{len(errors)} kernels are compiled when they first run: {errors[0]}")
    for path in remembered:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tasks))
        keep_keys(tasks)
    stop()
    return len(missing)


def compile_later(tasks: Sequence[str], gpu: Gpu) -> Callable[[], bool]:
    """Compile the tasks that no earlier run has compiled in the background, at low priority.

    Returns a function that tells whether all are in the cache. The function logs the end, too: a
    thread's own line would come within the text of a chat. It raises RuntimeError if some will
    never be there. The end of the process does not wait for them.
    """
    if not (missing := not_compiled(tasks)):
        return lambda: True
    lines: list[str] = []
    failed: list[str] = []  # why some are not there

    def run() -> None:
        errors = ["the helper has ended"]
        try:
            with closing(Helper(helper_environment())) as helper:
                summary, found = compile_missing(helper, missing, gpu, nice=NICE)
            lines.append(summary)
            errors = found or errors
        except OSError as error:  # no memory for a process, or a full disk
            errors = [str(error)]
        if left := not_compiled(missing):
            failed.append(f"{len(left)} kernels are not compiled: {errors[0]}")

    def is_there() -> bool:
        if thread.is_alive():
            return False
        while lines:
            log.info(lines.pop(0))
        if failed:
            raise RuntimeError(failed[0])
        return True

    thread = threading.Thread(target=run, name="compile later", daemon=True)
    thread.start()
    return is_there


def not_compiled(tasks: Sequence[str]) -> list[str]:
    """Return the tasks without a marker."""
    return [task for task in tasks if not marker(task).exists()]


def compile_missing(
    helper: Helper, missing: Sequence[str], gpu: Gpu, nice: int = 0
) -> tuple[str, list[str]]:
    """Compile tasks and mark them; return a line about that, and the errors of the others.

    nice: as in `Helper.compile`; above 0 there is no progress bar.
    """
    folder().mkdir(parents=True, exist_ok=True)
    begin, done, errors, is_hidden = time.perf_counter(), 0, [], True if nice else None
    options = {"bar_format": BAR, "leave": False, "disable": is_hidden}
    with tqdm(total=len(missing), **options) as progress:
        for number, error in helper.compile(gpu, missing, cache_folder(), nice):
            progress.update(1)
            if error is None:
                marker(missing[number]).touch()
                done += 1
            else:
                errors.append(error)
    seconds = time.perf_counter() - begin
    how = "compiled in the background" if nice else "compiled side by side"
    return f"{done} of {len(missing)} kernels {how} in {seconds:.1f} s", errors
