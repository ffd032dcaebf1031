"""The process that compiles kernels side by side: ops/compile_ahead.py runs in it.

It starts before this process imports torch, since it has to import torch, too.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from host.folders import user_cache

ROOT = Path(__file__).parents[1]
NVIDIA = Path("/dev/nvidiactl")  # exists where there is an NVIDIA GPU
MARKERS = "ahead"  # the folder of markers, in Triton's
started: list["Helper"] = []  # at most one


class Helper:
    """A process that compiles launches. It starts at once, and waits for them.

    environment: its own; None: this process's.
    """

    def __init__(self, environment: dict[str, str] | None = None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ops.compile_ahead"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a group of its own, with its processes
        )

    def compile(
        self, gpu: tuple, tasks: Sequence[str], cache: Path, nice: int = 0
    ) -> Iterator[tuple[int, str | None]]:
        """Yield the number of each task when it is done, and its error; None: it is in the cache.

        gpu: an `ops.gpu.Gpu`; cache: Triton's folder; nice: how far its processes stand back. A
        task that cannot be compiled is not in the cache: the step's own launch then says why. If
        the helper ends early, those launches compile the other tasks.
        """
        given = {"gpu": gpu, "tasks": list(tasks), "cache": str(cache.absolute()), "nice": nice}
        with suppress(BrokenPipeError):
            print(json.dumps(given), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            number, error = json.loads(line)
            yield number, error

    def close(self) -> None:
        """End the process, and those that it has started: they would keep its pipes open."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()


def start() -> None:
    """Start the helper."""
    if not started:
        started.append(Helper())


def stop() -> None:
    """End the helper."""
    while started:
        started.pop().close()


def triton_folder(compile_cache: Path | None) -> Path:
    """Return where Triton keeps what it compiles: as in `host.compile_cache.use_compile_cache`."""
    if compile_cache is not None:
        return compile_cache / "triton"
    own = Path.home() / ".triton/cache"
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        own = user_cache() / "compiled" / "triton"
    return Path(os.environ.get("TRITON_CACHE_DIR", own))


def may_have_gpu(options: argparse.Namespace) -> bool:
    return options.device != "cpu" and NVIDIA.exists()


def start_before_imports(options: argparse.Namespace) -> None:
    """Start the helper if nothing was compiled with this cache, and a GPU's kernels may be."""
    if options.eager or not may_have_gpu(options):
        return
    if not (triton_folder(options.compile_cache) / MARKERS).exists():
        start()
