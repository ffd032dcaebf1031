"""Compile every kernel launch of models for GPUs that are not here.

    python tests/gpu_launches.py < INPUT

INPUT is a JSON object: "gpus", names of `ops.gpu.KNOWN`; "cases", names of models with formats
such as "Qwen3-30B-A3B:int4", or "GLM-4.5-Air:q4_0+q8_0", whose shared experts are in q8_0; and
"quick": one prompt, and one token in the fused kernels. Tensors are fake and live on a fake GPU
(benchmarks/inductor_code.py).
For each GPU and case, a layer of each kind runs one token, several sequences, drafts and prompts;
launches compile instead of running. Prints one JSON object: by GPU and case, the kernels with
their shared memory in bytes, and the work that no kernel takes with the reason.
"""

import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from benchmarks.inductor_code import as_if_compiling, fake_empty, move_to_fake_gpu, pretend_gpu
from formats.kv_cache import KV_CACHES
from formats.quantizer import DTYPES
from model import Chunk, ModelArgs, Transformer
from models.random_weights import architecture, first_layers, number_format
from ops import gpu
from ops.launch import KernelError, can_launch, compile_only
from ops.plain import attention
from ops.step import draft_check
from runtime.fused_layer import fused_layers
from runtime.fused_prompt import PromptRunner
from runtime.sampling import StepState
from runtime.verification import ACCEPT_STREAM
from tp import ModelShard

LAYERS = 4  # they have each kind of layer, in all models but Gemma 4
SHORT, LONG = 256, 32768  # positions of a cache
# Sequences, tokens of each.
FEW = (1, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 4), (1, 8), (1, 32), (1, 64)
CACHES = (SHORT, "plain"), (LONG, "plain"), (LONG, "int8")
PROMPTS = 48, 256, 1024, 2048
PASSES = (1, 1), (1, 3), (1, 15), (2, 3), (4, 1)  # sequences, drafts of each


@dataclass
class Found:
    """What one case found on one GPU."""

    kernels: dict[str, int] = field(default_factory=dict)  # largest shared memory, bytes
    refused: dict[str, str] = field(default_factory=dict)  # work -> why no kernel takes it


def become(name: str) -> None:
    """Let the fake GPU be this one, for Triton and for the choice of tiles."""
    os.environ["MOE_FAST_GPU"] = name
    gpu.found.clear()
    if name.startswith("gfx"):
        found = GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    else:
        found = GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    target = types.SimpleNamespace(
        get_current_target=lambda: found,
        get_current_device=lambda: name,  # Triton keeps compiled kernels by device
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    driver.set_active(target)


@contextmanager
def operators_launch() -> Iterator[None]:
    """Call the function behind an operator, which the fake mode would not."""

    def call(operator: CustomOpDef, *args, **kwargs):
        return operator._init_fn(*args, **kwargs)

    def mask(queries: int, keys: int, device: torch.device) -> Tensor:
        return torch.empty(queries, keys, dtype=torch.bool, device=device)

    library = mock.patch.object(attention, "lower_right_mask", mask)  # it makes a tensor subclass
    with library, mock.patch.object(CustomOpDef, "__call__", call):
        yield


def make_model(case: str, layers: int, args: ModelArgs | None = None) -> Transformer:
    """Return the model's first layers on the meta device; or the model of these args."""
    name, mode = case.split(":")
    args = args or first_layers(architecture(name), layers)
    format = number_format(mode, args)
    model = ModelShard(args, format, "tensor", rank=0, ranks=1).model
    return model.to(DTYPES[format.get("dtype", format["name"])])


def set_up(model: Transformer, length: int, cache: str) -> None:
    """Make caches of 8 sequences."""
    with as_if_compiling():  # tables of numbers come from the host
        model.setup_cache(8, length, KV_CACHES[cache])


def ids(*shape: int) -> Tensor:
    return fake_empty(*shape, dtype=torch.int64)


def note(found: Found, work: str, run: Callable[[], object]) -> None:
    """Run with launches that compile, and note the kernels, or why there are none."""
    recorded: list[tuple] = []
    try:
        with compile_only() as recorded:
            run()
    except KernelError as error:
        found.refused[work] = str(error)
    for kernel, code, _ in recorded:
        name = kernel.__name__
        found.kernels[name] = max(found.kernels.get(name, 0), code.metadata.shared)


def run_fused(model: Transformer, found: Found, work: str, shape: tuple[int, int]) -> None:
    """Run each layer that has fused kernels on this many sequences and tokens of each."""
    tokens, positions = ids(*shape), ids(*shape)
    with as_if_compiling():
        x, _, context = model.begin(tokens, positions)
    context = context._replace(last=ids(shape[0]))
    for number, layer in enumerate(fused_layers(model).values()):
        if layer.experts.takes_tokens(tokens.numel()):
            layer.experts.prepare()
            core, rows = layer.attention.empty_heads, x.new_empty(tokens.numel(), x.shape[-1])
            run = partial(layer.forward, rows, context, core)
            note(found, f"{work}, layer {number}", run)


def run_blocks(model: Transformer, found: Found, work: str, tokens: Tensor, span) -> None:
    """Run each block as a runner without fused kernels does."""
    x, normed, context = model.begin(tokens, span)
    context = context._replace(last=ids(len(tokens)))
    for number, block in enumerate(model.layers):
        run = partial(block.forward, x, normed, context, model.norm)
        note(found, f"{work}, layer {number}", run)


def run_prompt(model: Transformer, found: Found, count: int) -> None:
    """Run each layer that has a prompt's kernels on a chunk of this many tokens, and on tokens at
    positions.
    """
    runner = PromptRunner(
        model, {id(block): layer for block, layer in fused_layers(model).items()}, None
    )
    spans: list[Chunk | Tensor] = [Chunk(ids(1), count)]
    if runner.takes_positions(SHORT, 2 * SHORT):
        spans.append(ids(1, count))
    for span in spans:
        x, normed, context = runner.begin(model, ids(1, count), span)
        context = context._replace(last=ids(1))
        work = f"chunk of {count}" if isinstance(span, Chunk) else f"{count} tokens at positions"
        for number, layer in enumerate(runner.layers.values()):
            run = partial(layer.forward, x, normed, context, model.norm)
            note(found, f"{work}, layer {number}", run)


def pass_state(model: Transformer, rows: int) -> StepState:
    """Return the state of sequences that begin a step or a pass."""
    seen = fake_empty(rows, model.args.vocab_size, dtype=torch.bool)
    controls = fake_empty(rows, 5, dtype=torch.float32)
    return StepState(ids(rows, 1), ids(rows, 1), ids(rows), seen, controls, ids(rows))


def run_pass(model: Transformer, found: Found, rows: int, drafts: int) -> None:
    """Run what a pass of several sequences has beside the model."""
    state, V = pass_state(model, rows), model.args.vocab_size
    logits, q = (fake_empty(rows, n, V, dtype=torch.float32) for n in (drafts + 1, drafts))
    result = ids(draft_check.MOST + 1)

    def run() -> None:
        tokens, _, last = draft_check.begin_pass(state, ids(rows, drafts))
        for drawn in (q, None):
            draft_check.verify_pass(state, logits, tokens, last, drawn, result, ACCEPT_STREAM)

    note(found, f"verification of {drafts} drafts of {rows}", run)


def compile_case(case: str, quick: bool) -> Found:
    found, model = Found(), make_model(case, 6 if case.startswith("gemma") else LAYERS)
    with FakeTensorMode(), torch.no_grad(), operators_launch():
        move_to_fake_gpu(model)
        set_up(model, 4096, "plain")
        for count in (PROMPTS[1],) if quick else PROMPTS:
            row = ids(1)
            run_blocks(model, found, f"prompt of {count}", ids(1, count), Chunk(row, count))
        launches = can_launch(model.norm.weight)
        if launches:
            run_prompt(model, found, PROMPTS[-1])
        few = (FEW[:1] if quick else FEW) if launches else ()
        for shape in PASSES if launches else ():
            run_pass(model, found, *shape)
        for length, cache in CACHES[:1] if quick else CACHES:
            set_up(model, length, cache)
            where = f"{length} positions in {cache}"
            for shape in few:
                run_fused(model, found, f"{shape}, {where}", shape)
            for shape in () if quick else ((1, 1), (8, 1), (1, 8)):
                with as_if_compiling():
                    work = f"{shape} unfused, {where}"
                    run_blocks(model, found, work, ids(*shape), ids(*shape))
    return found


def main() -> None:
    given = json.load(sys.stdin)
    pretend_gpu()
    result: dict = {}
    for name in given["gpus"]:
        become(name)
        if name.startswith("gfx"):  # it would run none
            gpu.Gpu.runs_kernels = property(lambda self: True)
        for case in given["cases"]:
            result.setdefault(name, {})[case] = vars(compile_case(case, given.get("quick", False)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
