"""What the scripts for kernels of recurrent layers share; see kernels_without_gpu.py."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn

from model import Chunk, Context
from models.layers.pending_state import PendingState, RecurrentLayer
from ops.attention import delta_prompt, recurrent_parts
from runtime.sequence_state import Settling
from tests import interpreter
from tests.kernels_without_gpu import overwritten


def random_state(layer: RecurrentLayer, T: int, last, accepted) -> Context:
    """Let each sequence's call follow `accepted` pending tokens -> the context of T tokens.

    None: there are none. last: the last real token of each sequence, or None: all are real.
    """
    last = None if last is None else torch.tensor(last)
    positions = torch.arange(T).unsqueeze(0) + 20 + torch.arange(len(accepted)).unsqueeze(1)
    for row, count in enumerate(accepted):
        layer.state.first[row] = 0 if count is None else positions[row, 0] + 1 - count
    return Context(*[None] * len(Context._fields))._replace(last=last, positions=positions)


def layer_errors(
    layer: RecurrentLayer, projected: Tensor, context: Context, run: Callable, take_in: Callable
) -> list[float]:
    """Return the errors of y, and of all that the state keeps.

    run: `core` of a layer by its kernels. take_in: takes a state, positions and a row; with True by
    a kernel.
    """
    ours, (B, T, _) = deepcopy(layer), projected.shape
    y, got = layer.core(projected, context), run(ours, projected, context)
    # Padding may read anything, since its y is used by no one.
    real = torch.ones(y.shape[:2], dtype=torch.bool)
    if context.last is not None:
        real = torch.arange(T) <= context.last.unsqueeze(1)
    found = [relative_error(got[real], y[real])]
    found += state_errors(ours.state, layer.state, B)
    # The next call may be of a kind that no kernel computes: after 0, some and all of the tokens.
    row = None if B > 1 else torch.tensor([0])
    for count in {0, 1, T}:
        taken = deepcopy(ours.state), deepcopy(layer.state)
        for state, by_kernel in zip(taken, (True, False), strict=True):
            take_in(state, context.positions[:, :1] + count, context.last, row, by_kernel)
        found += state_errors(*taken, B)
    return found


def settle_second(layer: RecurrentLayer, state: PendingState, position, last) -> None:
    """Let a state of a layer take in its pending tokens as the second of three layers."""
    layers = nn.ModuleList(deepcopy(layer) for _ in range(3))
    for each, own in zip(layers, (deepcopy(state), state, deepcopy(state)), strict=True):
        each.state = own
    rows = SimpleNamespace(position=position.contiguous(), last=last)
    with mock.patch.object(type(layer), "has_kernels", lambda _: True):
        Settling(layers)(rows)
    for other in layers[::2]:
        assert torch.equal(other.state.state, state.state)


@contextmanager
def prompts_by_kernels() -> Iterator[None]:
    """Within, prompts of recurrent layers run by kernels on a CPU, too."""
    patches = (
        mock.patch.object(module, "can_launch", lambda x: True)
        for module in (delta_prompt, recurrent_parts)
    )
    with next(patches), next(patches):
        yield


def layer_prompt_errors(layer: RecurrentLayer, projected: Tensor, context: Context) -> list[float]:
    """Return the errors of a prompt's y, and of the state and the window after it.

    A prompt of one sequence is then a chunk of the row after it, too.
    """
    calls = [context]
    if len(projected) == 1:
        chunk = Chunk(torch.tensor([1]), 3 + projected.shape[1])
        last = torch.tensor([projected.shape[1] - 2])
        calls.append(context._replace(chunk=chunk, positions=None, last=last))
    ours, found = deepcopy(layer), []
    for call in calls:
        want = layer.core(projected, call)
        with prompts_by_kernels():
            got = ours.core(projected, call)
        real = torch.ones(want.shape[:2], dtype=torch.bool)
        if call.last is not None:
            real = torch.arange(want.shape[1]) <= call.last.unsqueeze(1)
        assert torch.equal(ours.state.window, layer.state.window)
        pairs = (got[real], want[real]), (ours.state.state, layer.state.state)
        found += [relative_error(*pair) for pair in pairs]
    return found


def state_errors(ours: PendingState, plain: PendingState, rows: int) -> list[float]:
    """Return the errors of state, window and the pending tokens. Rows after the first are equal."""
    found = []
    assert torch.equal(ours.first, plain.first) and not ours.arrivals.any()
    state, inputs, gates, *_ = (name for name, _ in plain.named_buffers())
    # What is not pending has no effect.
    for name, used in {state: None, inputs: plain.width - 1, gates: 0}.items():
        pair = getattr(ours, name), getattr(plain, name)
        assert torch.equal(*(t[rows:] for t in pair)), name
        for row in range(rows):
            end = None if plain.first[row].any() else used
            found.append(relative_error(*(t[row, :end] for t in pair)))
    return found


def after_tokens(form: Callable, *tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Call a form that updates a state, its last argument, with a copy of that -> y, the copy."""
    *inputs, state = tokens
    state = state.clone()
    return form(*inputs, state, None), state


def from_gates(launch: Callable) -> Callable:
    """Let `launch_delta_chunk` or `launch_ssm_chunk` take g and beta, or step sizes and g."""

    def call(x: Tensor, y: Tensor, z: Tensor, *rest) -> Tensor:
        if launch is delta_prompt.launch_ssm_chunk:
            steps, g, skip, state, row = rest
            rates, zeros = (-g / steps)[0, 0], torch.zeros_like(steps[0, 0])
            gates = softplus_of(steps), rates.log(), zeros, skip
        else:
            g, beta, state, row = rest
            zeros = torch.zeros_like(g[0, 0])
            ba = torch.cat((beta.logit().clamp(max=40), softplus_of(-g).flatten(2)), -1)
            gates = ba, torch.zeros_like(beta[0, 0]), zeros.flatten()
        return launch(x, y, z, *gates, None, state, row)

    return call


def softplus_of(y: Tensor) -> Tensor:
    """Return the numbers of which y is the softplus; for 0 some whose softplus is too small."""
    return y.double().expm1().log().clamp(min=-200).to(y.dtype)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return how far got is from want; infinity for NaN, which `max` of errors would pass over."""
    if torch.equal(got, want):
        return 0.0
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return math.inf if math.isnan(error) else error


def counts(code) -> dict[str, int]:
    """Count instructions of an H200: all, and some kinds; loads of 16 bytes before the wait."""
    asm = code.asm["sass"]
    return {
        "waits": asm.count("ACQBULK"),
        "starts": asm.count("PREEXIT"),
        "spills": asm.count("STL"),
        "ahead": asm.partition("ACQBULK")[0].count("LDG.E.128"),
        "products": asm.count("MMA."),
        "instructions": asm.count(";"),
        "barriers": asm.count("BAR.SYNC"),
        "overwritten": overwritten(code.asm["ptx"]),
        "shared": code.metadata.shared,
        "registers": max(map(int, re.findall(r"\bR(\d+)\b", asm))) + 1,
        "narrow": narrow_factors(code.asm["ttgir"]),
    }


def narrow_factors(ttgir: str) -> int:
    """Count right factors of `wgmma` whose rows lie along N and are less than 128 bytes.

    Triton 3.6 reads shared memory out of bounds for these.
    """
    found = re.findall(r"(#shared\d*) = #ttg\.nvmma_shared<\{(.*?)\}>", ttgir)
    narrow = [
        name
        for name, layout in found
        if "transposed = false" in layout and "swizzlingByteWidth = 128" not in layout
    ]
    rights = re.findall(r"warp_group_dot .* \* !ttg\.memdesc<[^,]*, (#shared\d*),", ttgir)
    return sum(right in narrow for right in rights)


def print_results(errors: Callable[[], dict], machine_code: Callable[[], dict]) -> int:
    """Print one JSON object: errors under the interpreter, or counts of machine code, by case."""
    torch.set_num_threads(1)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        interpreter.prepare()
        torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    print(json.dumps(errors() if interpreted else machine_code()))
    return 0
