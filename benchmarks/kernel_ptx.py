"""Compare the machine code of all kernel launches of models, before and after a change.

    python benchmarks/kernel_ptx.py --case Qwen3-30B-A3B:int4 --json before.json
    python benchmarks/kernel_ptx.py --case Qwen3-30B-A3B:int4 --compare before.json

Needs no GPU: kernels are compiled for sm_90 (tests/gpu_launches.py). Names of kernels and of
parameters do not count, and parameters that are not read do not either. Prints each work whose
launches differ, and exits with 1 if there are some.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.inductor_code import move_to_fake_gpu, pretend_gpu
from model import Chunk
from ops.launch import KernelError, compile_only
from tests import gpu_launches

SHAPES = (1, 1), (4, 1), (8, 1), (1, 4), (1, 8), (1, 32)  # sequences, tokens of each
CACHES = (256, "plain"), (32768, "plain"), (32768, "int8")  # positions, kind
PROMPTS = 256, 2048


def normalized(ptx: str) -> str:
    """Return PTX without names, unread parameters, comments and debug information."""
    lines, names = [], {}
    body = ptx[ptx.index("\n{", ptx.index(".entry")) :].split("\n}")[0]
    for line in body.splitlines():
        line = line.split("//")[0].strip()
        if not line or line.startswith((".loc", ".file", "$L__tmp")):
            continue
        for name in re.findall(r"\w+_param_\d+", line):
            line = line.replace(name, names.setdefault(name, f"param{len(names)}"))
        lines.append(line)
    return "\n".join(lines)


def describe(kernel, code) -> tuple[str, str]:
    """Return a launch's kernel, and a digest of its code and of its program's size."""
    text = f"{code.metadata.num_warps} {code.metadata.shared}\n" + normalized(code.asm["ptx"])
    return kernel.__name__, hashlib.sha256(text.encode()).hexdigest()[:16]


def launches(case: str) -> dict[str, list]:
    """Return the kernels and digests of each work of a model."""
    found: dict[str, list] = {}

    def note(_, work: str, run: Callable[[], object]) -> None:
        recorded: list[tuple] = []
        try:
            with compile_only() as recorded:
                run()
        except KernelError as error:
            found[work] = [("refused", str(error))]
            return
        found[work] = [describe(kernel, code) for kernel, code, _ in recorded]

    layers = 6 if case.startswith("gemma") else gpu_launches.LAYERS
    model = gpu_launches.make_model(case, layers)
    replaced = mock.patch.object(gpu_launches, "note", note)
    with FakeTensorMode(), torch.no_grad(), gpu_launches.operators_launch(), replaced:
        move_to_fake_gpu(model)
        gpu_launches.set_up(model, 4096, "plain")
        ids = gpu_launches.ids
        for count in PROMPTS:
            chunk = Chunk(ids(1), count)
            gpu_launches.run_blocks(model, found, f"prompt of {count}", ids(1, count), chunk)
        for length, cache in CACHES:
            gpu_launches.set_up(model, length, cache)
            for shape in SHAPES:
                work = f"{shape}, {length} positions in {cache}"
                gpu_launches.run_fused(model, found, work, shape)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", required=True, help="models with formats")
    parser.add_argument("--json", type=Path, help="write the launches there")
    parser.add_argument("--compare", type=Path, help="launches of before, as --json wrote them")
    args = parser.parse_args()
    pretend_gpu()
    gpu_launches.become("sm_90")
    found = {case: launches(case) for case in args.case}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    if not args.compare:
        return
    before, differing = json.loads(args.compare.read_text()), 0
    for case, works in found.items():
        for work, kernels in works.items():
            old = before[case].get(work)
            if old is None or [digest for _, digest in old] != [digest for _, digest in kernels]:
                differing += 1
                print(f"{case}, {work}:")
                pairs = zip(old or [], kernels, strict=False)
                same_count = old is not None and len(old) == len(kernels)
                changed = [f"{a[0]} -> {b[0]}" for a, b in pairs if a[1] != b[1]]
                print("   ", ", ".join(changed) if same_count else f"{old}\n    -> {kernels}")
    total = sum(map(len, found.values()))
    print(f"{total - differing} of {total} works have the same machine code")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
