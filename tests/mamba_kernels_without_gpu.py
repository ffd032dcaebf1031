"""Run and compile the kernels of Mamba-2, of few tokens and of prompts; see kernels_without_gpu.py.

    TRITON_INTERPRET=1 python tests/mamba_kernels_without_gpu.py    Triton's interpreter, CPU
    python tests/mamba_kernels_without_gpu.py    machine code for an H200, by Triton and ptxas

CASES="NAME;NAME" chooses some. It prints one JSON object: by case, the relative error of each
result, or counts of machine code.
"""

import os
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from model import Context
from models.layers.mamba2 import Mamba2, MambaSizes, MambaState
from ops.attention import mamba
from ops.plain.pending import MAX_TENTATIVE
from tests.launched_code import launched_code
from tests.recurrent_without_gpu import (
    counts,
    layer_errors,
    layer_prompt_errors,
    print_results,
    prompts_by_kernels,
    random_state,
    settle_second,
)

CASES = {  # B, T, H, P, G, N, W, last, accepted tokens of the call before (None: it had one token)
    "one token": (1, 1, 4, 16, 2, 16, 4, None, (None,)),
    "rows without a token": (3, 1, 2, 64, 1, 32, 4, (0, -1, 0), (None,) * 3),
    "three heads of a group": (2, 1, 6, 32, 2, 16, 3, (-1, 0), (None, None)),
    "published sizes of a head": (1, 1, 2, 64, 1, 128, 4, (0,), (None,)),
    "drafts": (1, 5, 4, 16, 2, 16, 4, None, (None,)),
    "rows with padding": (3, 4, 2, 64, 1, 32, 4, (1, -1, 3), (2, 3, None)),
    "fewer tokens than the window": (2, 2, 4, 16, 2, 16, 4, (0, 1), (1, 0)),
    "as many as are kept": (1, MAX_TENTATIVE, 1, 16, 1, 16, 3, None, (MAX_TENTATIVE,)),
    "drafts after drafts": (2, 3, 6, 16, 2, 32, 4, None, (5, 1)),
    "one token after drafts": (4, 1, 4, 16, 2, 16, 4, (0, -1, 0, 0), (3, 2, None, 16)),
}
PROMPTS = {  # the same, of more tokens than can be pending
    "a prompt, rows with padding": (3, 70, 6, 16, 2, 16, 4, (69, -1, 30), (2, 3, None)),
    "a prompt after drafts": (1, 130, 2, 32, 1, 64, 3, None, (5,)),
    "a prompt shorter than a chunk": (2, 17, 4, 16, 4, 16, 4, (16, 3), (None, 1)),
}
# Sizes of Nemotron-3-Nano, Granite-4.0-H-Tiny and Granite-4.0-H-Small.
PUBLISHED = (64, 64, 8, 128), (48, 64, 1, 128), (128, 64, 1, 128)


def random_call(
    B: int,
    T: int,
    H: int,
    P: int,
    G: int,
    N: int,
    W: int,
    last,
    accepted,
    dtype: torch.dtype = torch.float32,
) -> tuple[Mamba2, Tensor, Context]:
    """Return a layer with a random state for B sequences and one more, projected tokens, context.

    accepted: how many pending tokens each sequence's call follows; None: there are none.
    """
    args = SimpleNamespace(dim=16, mamba_sizes=MambaSizes(H, P, G, N, W), norm_eps=1e-5)
    generator, layer = torch.Generator().manual_seed(3), Mamba2(args)
    layer.allocate(B + 1, 8, None, torch.zeros(1, dtype=dtype))
    for name, tensor in (*layer.named_parameters(), *layer.state.named_buffers()):
        if tensor.is_floating_point():
            kept = torch.float32 if name.endswith((*Mamba2.fp32, "state")) else dtype
            tensor.data = torch.randn(tensor.shape, generator=generator).to(kept)
    width = layer.sizes.inner + layer.sizes.channels + H
    projected = torch.randn(B, T, width, generator=generator).to(dtype)
    context = random_state(layer, T, last, accepted)
    return layer.requires_grad_(False), projected, context


def case_errors(case: tuple) -> list[float]:
    """Return the errors of y, and of all that the state keeps."""
    layer, *call = random_call(*case)

    def take_in(state: MambaState, position, last, row, by_kernel: bool) -> None:
        if by_kernel and row is None:
            settle_second(layer, state, position, last)
            return
        memory = state.state, state.pending(), [*layer.weights()]
        with mock.patch.object(mamba, "kernels_support", lambda _: by_kernel):
            mamba.take_in_pending(*memory, position, last, row, state.arrivals)

    def run(ours: Mamba2, projected: Tensor, context: Context) -> Tensor:
        return ours.output_norm(ours.fused_core(projected, context), None)

    return layer_errors(layer, *call, run, take_in)


def prompt_errors(name: str, dtype: torch.dtype) -> list[float]:
    """Return the errors of y, and of the state, for a prompt by kernels."""
    return layer_prompt_errors(*random_call(*PROMPTS[name], dtype=dtype))


def errors() -> dict[str, list[float]]:
    cases = {name: partial(case_errors, case) for name, case in CASES.items()}
    for name in PROMPTS:
        cases[name] = partial(prompt_errors, name, torch.float32)
        cases[f"{name}, bf16"] = partial(prompt_errors, name, torch.bfloat16)
    names = os.environ.get("CASES", ";".join(cases)).split(";")
    return {name: cases[name]() for name in names}


def machine_code() -> dict[str, dict[str, int]]:
    """Compile the kernels at published sizes: prompts, one token, several, and none."""
    found = {}
    for H, P, G, N in PUBLISHED:
        layer, *call = random_call(1, 2048, H, P, G, N, 4, None, (None,), torch.bfloat16)
        with prompts_by_kernels(), torch.no_grad():
            launched = launched_code(partial(layer.core, *call))
        found |= {f"{name} in a prompt, {H} heads": code for name, code in launched.items()}
        for T in (1, 8):
            layer, *call = random_call(1, T, H, P, G, N, 4, None, (4,), torch.bfloat16)
            launched = launched_code(partial(layer.fused_core, *call))
            found |= {f"{name} of {T}, {H} heads": code for name, code in launched.items()}
    with mock.patch.object(mamba, "kernels_support", lambda _: True):
        state, row = layer.state, torch.tensor([0])
        place = call[1].positions[:, :1], None, row, state.arrivals
        given = state.state, state.pending(), [*layer.weights()], *place
        launched = launched_code(partial(mamba.take_in_pending, *given))
    found |= {f"{name} of none": code for name, code in launched.items()}
    return {name: counts(code) for name, code in found.items()}


if __name__ == "__main__":
    sys.exit(print_results(errors, machine_code))
