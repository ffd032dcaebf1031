"""Record which functions and kernels decode one token; docs/design.md has the result.

    python -m tests.trace_token            # rewrites the block in docs/design.md
    python -m tests.trace_token --json     # prints it, as JSON

Three ways: eager on the CPU, a whole step of a session; compiled by Inductor and by the fused
kernels as on an H100, the runner's part of a step. The last two need no GPU: tensors are fake,
launches compile nothing and do not run, and what torch.compile would compile is called as it is, so
that its functions are seen.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.inductor_code import as_if_compiling, move_to_fake_gpu, pretend_gpu
from model import ModelArgs
from models.random_weights import RandomWeights
from ops.launch import Kernel, compile_only
from runtime.fused_decode import FusedRunner
from runtime.loading import load_model
from runtime.runner import CompiledRunner
from runtime.sampling import Sampling, sample
from runtime.session import Session
from runtime.session_rows import SessionRows
from tests.gpu_launches import become, ids, make_model, operators_launch, set_up

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/design.md"
CASE = "Qwen3-30B-A3B:bf16"
BEGIN, END = "<!-- begin: python -m tests.trace_token -->", "<!-- end -->"
SMALL = ModelArgs(
    family="qwen3_moe",
    dim=32,
    n_layer=1,
    n_head=4,
    n_kv_head=2,
    head_dim=8,
    intermediate=16,
    n_expert=4,
    n_active=2,
    vocab_size=64,
    max_position=64,
    qk_norm="head",
)

# What launches any kernel, and this script's own; they would only lengthen the lists.
OTHERS = ".venv/", "tests/", "benchmarks/", "ops/launch.py", "ops/gpu.py", "ops/inductor.py"

Seen = dict[str, dict[str, None]]  # file -> its functions, in order of their first call


@cache  # a step calls PyTorch's functions thousands of times
def recorded_file(name: str) -> str:
    """Return a file of the repository that is recorded, relative to it; "" for another file."""
    path = Path(name)
    file = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return "" if file.startswith(OTHERS) else file


@contextmanager
def recorded_calls() -> Iterator[Seen]:
    """Yield what fills with the repository's functions that are called within."""
    seen: Seen = {}

    def note(frame, event: str, _) -> None:
        if event == "call" and (file := recorded_file(frame.f_code.co_filename)):
            name = frame.f_code.co_qualname
            if "<" not in name:
                seen.setdefault(file, {})[name] = None

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def eager_token() -> Seen:
    """Decode a token of a small model on the CPU, with a session that does not compile."""
    session = Session(load_model(RandomWeights(SMALL), "cpu"), 32)
    stream = session.stream([1, 2, 3], 3, Sampling(temperature=0))
    next(stream)
    with recorded_calls() as seen:
        next(stream)
    return seen


def call_as_it_is(function: Callable, **_) -> Callable:
    """Stand in for torch.compile."""

    def call(*args):
        with as_if_compiling():
            return function(*args)

    return call


def compiled_token(runner_class: type[CompiledRunner]) -> tuple[Seen, list[str]]:
    """Return the functions and the kernels of a layer, the head and the draw on an H100."""
    pretend_gpu()
    become("sm_90")
    model = make_model(CASE, 1)
    compiles = mock.patch.object(torch, "compile", call_as_it_is)
    with FakeTensorMode(), torch.no_grad(), operators_launch(), compiles:
        move_to_fake_gpu(model)
        set_up(model, 256, "plain")
        runner = runner_class(model)
        rows = SessionRows.__new__(SessionRows)
        rows.model, rows.device = model, torch.device("cuda", 0)
        state = rows.make_state(1)
        _, draw, _ = runner.token_steps(sample)

        def step() -> None:
            logits = model(ids(1, 1), ids(1, 1), ids(1), runner=runner)
            draw(state, logits, 50)

        fits = SimpleNamespace(metadata=SimpleNamespace(shared=0))  # as all kernels do on an H100
        with mock.patch.object(Kernel, "compile_for", lambda *_, **__: fits):
            with compile_only():  # the first call asks which kernels can run
                step()
            with compile_only() as launches, recorded_calls() as seen:
                step()
    return seen, [kernel_name(kernel) for kernel, *_ in launches]


def kernel_name(kernel) -> str:
    path = Path(kernel.fn.__code__.co_filename).relative_to(ROOT).as_posix()
    return f"{path}: {kernel.__name__}"


def lines_of(seen: Seen) -> list[str]:
    return [f"- `{file}`: {', '.join(f'`{name}`' for name in seen[file])}" for file in seen]


def describe() -> str:
    """Return the block of docs/design.md, without its markers."""
    eager = eager_token()
    inductor, triton = compiled_token(CompiledRunner)
    fused, kernels = compiled_token(FusedRunner)
    others = f"Triton kernels beside Inductor's: {', '.join(triton) or 'none'}."
    return "\n".join(
        (
            "**Eager** (no `--compile`), a whole step:\n",
            *lines_of(eager),
            "\n**Inductor** (`--decode_kernels inductor`, GPUs before 8.0). torch.compile makes",
            f"kernels of all functions after `runtime/runner.py`. {others}\n",
            *lines_of(inductor),
            "\n**Fused kernels** (compiled, a GPU from 8.0 on). The kernels of a layer, the",
            "head and the draw, in order of launch:\n",
            *(f"{n}. `{name}`" for n, name in enumerate(kernels, 1)),
            "\nThe functions:\n",
            *lines_of(fused),
        )
    )


def written(page: str) -> str:
    """Return the block that a page has."""
    return re.search(f"{re.escape(BEGIN)}\n(.*?)\n{END}", page, re.S)[1]


def main() -> None:
    found = describe()
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    page = PAGE.read_text()
    PAGE.write_text(page.replace(written(page), found))


if __name__ == "__main__":
    main()
