"""Compile a session's kernels ahead, for a GPU that is not here; see test_compile_ahead.py.

    python tests/compile_ahead_without_gpu.py CASE COUNT    TRITON_CACHE_DIR must be an empty folder

CASE: as of gpu_launches.py. COUNT: how many kernels are compiled, those with the shortest source;
0: all. Prints JSON: the kernels' names, how many were compiled ahead, at first and again, and the
files that the launches themselves add to Triton's cache.
"""

import json
import os
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.inductor_code import as_if_compiling, move_to_fake_gpu, pretend_gpu
from ops import gpu
from ops.compile_ahead import collect, compile_task, decode, encode, kernel_of
from runtime.compile_ahead import compile_ahead
from runtime.fused_decode import FusedRunner
from tests.gpu_launches import become, make_model, operators_launch, set_up


def files() -> int:
    """Return the number of compiled files in Triton's cache."""
    return sum(len(names) for _, _, names in os.walk(os.environ["TRITON_CACHE_DIR"]))


def session_tasks(case: str) -> list[str]:
    """Return the launches of one token, of several sequences, and of short prompts."""
    model = make_model(case, 1)
    with FakeTensorMode(), torch.no_grad(), operators_launch(), as_if_compiling():
        move_to_fake_gpu(model)
        set_up(model, 640, "plain")
        runner = FusedRunner(model)

        def launch() -> None:
            for reach in runner.reaches(1, 640):
                runner.launch_all(1, 1, reach)
            runner.launch_all(4, 1)
            for size in runner.short_chunks:
                runner.launch_all(1, size)

        return collect(launch)


def main() -> None:
    case, count = sys.argv[1], int(sys.argv[2])
    pretend_gpu()
    become("sm_90")
    tasks = session_tasks(case)
    for task in tasks:  # what a helper reads is what was noted
        given = json.loads(task)["args"]
        assert encode(decode(given)) == given
    found = {"tasks": len(tasks), "kernels": sorted({kernel_of(task).__name__ for task in tasks})}
    some = sorted(tasks, key=lambda task: len(kernel_of(task).src))[: count or None]
    there = gpu.KNOWN["sm_90"]
    found["ahead"] = [compile_ahead(some, there), compile_ahead(some, there)]
    before = files()
    for task in some:
        compile_task(task)
    print(json.dumps(found | {"compiled": before, "added": files() - before}))


if __name__ == "__main__":
    main()
