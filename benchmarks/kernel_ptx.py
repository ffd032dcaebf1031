"""Compare the machine code of all kernel launches of models, before and after a change.

    PYTHONPATH=. python benchmarks/kernel_ptx.py --case Qwen3-30B-A3B:int4 --json before.json
    PYTHONPATH=. python benchmarks/kernel_ptx.py --case Qwen3-30B-A3B:int4 --compare before.json

Needs no GPU: kernels are compiled for sm_90 by tests/gpu_launches.py, which is not installed.
Names of kernels and of parameters do not count, and parameters that are not read do not either.
Prints how launches differ ("order": the same instructions in another order), and exits with 1 if
some do.
"""

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.inductor_code import move_to_fake_gpu, pretend_gpu
from cli.parser import Parser
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


def describe(kernel, code) -> tuple[str, str, dict[str, int]]:
    """Return a launch's kernel, a digest of its code and size, and how often it has each opcode."""
    body = normalized(code.asm["ptx"])
    text = f"{code.metadata.num_warps} {code.metadata.shared}\n{body}"
    lines = (re.sub(r"^@!?%p\d+\s+", "", line) for line in body.splitlines())
    opcodes = Counter(
        line.split()[0].rstrip(";") for line in lines if not line.startswith((".", "$"))
    )
    return kernel.__name__, hashlib.sha256(text.encode()).hexdigest()[:16], dict(opcodes)


def difference(old: list, new: list) -> str:
    """Return in what two launches differ, or ""."""
    if old[1] == new[1]:
        return ""
    before, after = Counter(old[2]), Counter(new[2])
    less, more = before - after, after - before
    if not less and not more:
        return "order"
    names = ", ".join(f"{op} {after[op] - before[op]:+}" for op in sorted({*less, *more}))
    return f"{before.total()} to {after.total()} instructions: {names}"


def launches(case: str) -> dict[str, list]:
    """Return the kernels and digests of each work of a model."""
    found: dict[str, list] = {}

    def note(_, work: str, run: Callable[[], object]) -> None:
        recorded: list[tuple] = []
        try:
            with compile_only() as recorded:
                run()
        except KernelError as error:
            found[work] = [("refused", str(error), {})]
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


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/kernel_ptx.py --case Qwen3-30B-A3B:int4 --json before.json",
            "python benchmarks/kernel_ptx.py --case Qwen3-30B-A3B:int4 --compare before.json",
        ),
    )
    add = parser.add_argument
    add("--case", nargs="+", required=True, metavar="NAME:MODE", help="models with formats")
    add("--json", type=Path, metavar="FILE", help="write the launches there")
    add("--compare", type=Path, metavar="FILE", help="launches of before, as --json wrote them")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    pretend_gpu()
    gpu_launches.become("sm_90")
    found = {case: launches(case) for case in args.case}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    if args.compare:
        before = json.loads(args.compare.read_text())
        sys.exit(compare(before, json.loads(json.dumps(found))))


def compare(before: dict, found: dict) -> bool:
    """Print each difference once, with the works that have it. Return whether there are some."""
    works: dict[str, list[str]] = {}
    for case, done in found.items():
        for work, new in done.items():
            old = before[case].get(work, [])
            if len(old) != len(new):
                names = [" ".join(launch[0] for launch in launches) for launches in (old, new)]
                works.setdefault(f"{names[0]} -> {names[1]}", []).append(f"{case}, {work}")
                continue
            for one, other in zip(old, new, strict=True):
                if how := difference(one, other):
                    text = f"{one[0]} -> {other[0]}: {how}"
                    works.setdefault(text, []).append(f"{case}, {work}")
    for text, where in sorted(works.items()):
        print(f"{text}\n    in {len(where)} works, such as {where[0]}")
    return bool(works)


if __name__ == "__main__":
    main()
