"""Compile a session's kernels ahead, for a GPU that is not here; see test_compile_ahead.py.

    python tests/compile_ahead_without_gpu.py CASE COUNT    TRITON_CACHE_DIR must be an empty folder

CASE: as in gpu_launches.py. COUNT: how many kernels are compiled, those with the shortest source;
0: all. Prints JSON: the kernels' names, how many were compiled ahead, at first and again, and the
files that the launches themselves add to Triton's cache. "later": two others, compiled in the
background: how many, whether they were there at once, and at the end.

    python tests/compile_ahead_without_gpu.py late CASE LAYERS ...

Prints JSON: by case, the kernels of a first token, of prompts, of passes with drafts and of a
published head's chains, of the first LAYERS layers, that are not compiled ahead, and the functions
that Inductor compiles.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs

from benchmarks.inductor_code import fake_empty, move_to_fake_gpu, pretend_gpu
from model import Chunk, Transformer
from models import family_of, head_args
from models.random_weights import architecture, first_layers
from ops import gpu, inductor
from ops.compile_ahead import collect, compile_task, decode, encode, kernel_of
from ops.step import chain, draft_check
from ops.step.token_draw import Drafts
from runtime.compile_ahead import compile_ahead, compile_later
from runtime.draft_choice import VocabularyPart
from runtime.draft_vocab import part_of_head
from runtime.fused_decode import FusedRunner, launch_pass, one_of_each_kind
from runtime.fused_prompt import PromptRunner
from runtime.mtp import RING, MTPDrafter, tap_hidden
from runtime.sampling import sample
from runtime.session_prompts import ANYWHERE_CHUNKS, launch_chunks, smallest_chunk
from runtime.verification import ACCEPT_STREAM
from tests.gpu_launches import become, ids, make_model, operators_launch, pass_state, set_up

PASSES = (1, 4), (2, 3)  # rows and drafts of each
LENGTH, LONG = 1152, 20480  # positions of the cache
CHUNKS = 40, 128, 448, 1024, 3008, 5056, 9024, 16384  # of prompts, tokens
PART = 2**15  # tokens that a head drafts
BEGINS = 0, 77, 3296  # their first positions


def files() -> int:
    """Return the number of compiled files in Triton's cache."""
    return sum(len(names) for _, _, names in os.walk(os.environ["TRITON_CACHE_DIR"]))


@contextmanager
def fake_runner(case: str, layers: int, length: int = LENGTH) -> Iterator[FusedRunner]:
    """Within, a model's first layers are on the fake GPU, with caches."""
    model = make_model(case, layers)
    with FakeTensorMode(), torch.no_grad(), operators_launch():
        move_to_fake_gpu(model)
        set_up(model, length, "plain")
        yield FusedRunner(model)


def ahead_of(runner: FusedRunner, length: int = LENGTH) -> list[str]:
    """Return the launches of one token, of several sequences, and of prompts."""
    prompts = runner.prompt_runner()
    options = SimpleNamespace(prompt_lengths=None)
    session = SimpleNamespace(options=options, prefill_chunk=16384, cache_len=length)
    session.device, session.rows = ids(1).device, ids(1)
    session.padded = lambda row, tokens, begin: padded(prompts, tokens, begin)

    def launch() -> None:
        for reach in runner.reaches(1, length):
            runner.launch_all(1, 1, reach)
        runner.launch_all(4, 1)
        for size in runner.short_chunks:
            runner.launch_all(1, size)
        launch_chunks(session, prompts, one_of_each_kind(runner))
        for rows, count in PASSES:
            state, result = pass_state(runner.model, rows), ids(16)
            for reach in runner.reaches(count + 1, length):
                for greedy in (False, True):
                    launch_pass(runner, state, ids(rows, count), None, result, reach, greedy)

    return collect(launch)


def padded(prompts: PromptRunner, tokens: int, begin: int) -> tuple[int, bool]:
    """As of `Prompts`, for a turn that is not the first."""
    size = smallest_chunk(ANYWHERE_CHUNKS, tokens)
    return size, size >= tokens and prompts.takes_positions(size, begin + size)


def run_prompts(prompts: PromptRunner, length: int) -> None:
    """Run chunks of many sizes, from many positions on, as chunks and at positions."""
    for tokens in CHUNKS:
        for begin in BEGINS:
            spans: list[Chunk | Tensor] = [Chunk(ids(1), begin + tokens)]
            if tokens in ANYWHERE_CHUNKS and prompts.takes_positions(tokens, begin + tokens):
                spans.append(ids(1, tokens))
            for span in spans if begin + tokens <= length else ():
                prompts.model(ids(1, tokens), span, ids(1), runner=prompts)


def session_tasks(case: str, layers: int = 1) -> list[str]:
    with fake_runner(case, layers) as runner:
        return ahead_of(runner)


def late(case: str, layers: int, length: int) -> list[str]:
    """Return what a first token and short prompts need that `ahead_of` has not."""
    found: list[str] = []

    def by_inductor(function: Callable, **_) -> Callable:
        found.append(f"{function.__name__}, by Inductor")
        return function

    head, drafter = make_head(case), None
    with fake_runner(case, layers, length) as runner, ExitStack() as stack:
        known = set(ahead_of(runner, length))
        if head is not None:
            drafter = head_drafter(head, runner, length)
            known |= {*collect(drafter.launch_chain)}
        stack.enter_context(mock.patch.object(torch, "compile", by_inductor))
        stack.enter_context(mock.patch.object(inductor, "configure_inductor", lambda: None))

        def run() -> None:
            for shape in ((1, 1), (4, 1), *((1, size) for size in runner.short_chunks)):
                reaches = runner.reaches(1, length) if shape == (1, 1) else [None]
                for runner.reach in reaches:
                    runner.model(ids(*shape), ids(*shape), ids(shape[0]), runner=runner)
            for rows, count in PASSES:
                state = pass_state(runner.model, rows)
                reaches = runner.reaches(count + 1, length)
                for runner.reach in reaches:
                    given = draft_check.begin_pass(state, ids(rows, count))
                    logits = runner.model(*given, all_positions=True, runner=runner)
                    check = logits.float(), given[0], given[2], None, ids(16), ACCEPT_STREAM
                    for greedy in (False, True):
                        draft_check.verify_pass(state, *check, greedy)
            run_prompts(runner.prompt_runner(), length)
            for reach in drafter.runner.reaches(4, length) if drafter else ():
                drafter.runner.reach = reach
                for drafts, candidates in ((1, 0), (3, 0), (3, 200)):
                    drafter.run_chain(drafts, candidates)

        tasks = [task for task in collect(run) if task not in known]
    return [*found, *(kernel_of(task).__name__ for task in tasks)]


def make_head(case: str) -> Transformer | None:
    """Return a model's published head on the meta device, for a part of the vocabulary."""
    args = first_layers(architecture(case.partition(":")[0]), 1)
    if family_of(args).published_head is None:
        return None
    head = make_model(case, 1, head_args(args))
    head.head = part_of_head(head.head, range(PART), args.vocab_size)
    return head


def head_drafter(head: Transformer, target: FusedRunner, length: int) -> MTPDrafter:
    """Return what drafts up to 3 tokens by a head, as `MTPDrafter` begins; of fake tensors."""
    drafter, model = object.__new__(MTPDrafter), target.model
    move_to_fake_gpu(head)
    set_up(head, length, "plain")
    V, D = model.args.vocab_size, model.args.dim
    drafter.model, drafter.runner, drafter.cache_len = head, FusedRunner(head), length
    drafter.state, drafter.numbers, drafter.first = pass_state(head, 1), ids(16), ids(1)
    drafter.count, drafter.width, drafter.least = 3, 4, 0.4
    probabilities = fake_empty(4, V, dtype=torch.float32)
    drafter.written = Drafts(ids(1, 4), probabilities, probabilities[:, 0].clone(), ids(1))
    drafter.part = VocabularyPart(ids(PART), ids(V))
    drafter.ring = fake_empty(1, RING, D, dtype=model.embedding.weight.dtype)
    drafter.prompt_hidden = drafter.ring[:, :64].clone()
    drafter.target = SimpleNamespace(runner=target, model=model, **pass_state(model, 1)._asdict())
    drafter.begin_chain, drafter.store = chain.begin_chain, chain.store_hidden
    _, _, drafter.draft_step = drafter.runner.token_steps(sample)
    tap_hidden(target, drafter.keep_hidden)
    tap_hidden(drafter.runner, drafter.keep_own_hidden)
    return drafter


def name_other_ptxas() -> None:
    """Name a ptxas of another version in the environment, as Inductor does."""
    script = Path(os.environ["TRITON_CACHE_DIR"], "ptxas")
    script.write_text(f'#!/bin/sh\n{knobs.nvidia.ptxas.path} "$@"\necho release 99.0\n')
    script.chmod(0o700)
    os.environ.setdefault("TRITON_PTXAS_PATH", str(script))


def main() -> None:
    pretend_gpu()
    become("sm_90")
    if sys.argv[1] == "late":
        cases = zip(sys.argv[2::2], map(int, sys.argv[3::2]), strict=True)
        found = {case: late(case, n, LENGTH) + late(case, n, LONG) for case, n in cases}
        print(json.dumps(found))
        return
    case, count = sys.argv[1], int(sys.argv[2])
    tasks = session_tasks(case)
    for task in tasks:  # what a helper reads is what was noted
        given = json.loads(task)["args"]
        assert encode(decode(given)) == given
    found = {"tasks": len(tasks), "kernels": sorted({kernel_of(task).__name__ for task in tasks})}
    some = sorted(tasks, key=lambda task: len(kernel_of(task).src))[: count or None]
    there = gpu.KNOWN["sm_90"]
    found["ahead"] = [compile_ahead(some, there), compile_ahead(some, there)]
    name_other_ptxas()
    before = files()
    for task in some:
        compile_task(task)
    added = files() - before
    others = [task for task in tasks if task not in some][:2]
    is_there = compile_later(others, there)
    found["later"], end = [len(others), is_there()], time.monotonic() + 120
    while not is_there() and time.monotonic() < end:
        time.sleep(0.1)
    found["later"].append(is_there())
    there_before = files()
    for task in others:
        compile_task(task)
    assert files() == there_before
    print(json.dumps(found | {"compiled": before, "added": added}))


if __name__ == "__main__":
    main()
