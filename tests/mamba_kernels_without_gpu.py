"""Run and compile the kernel of ops/attention/mamba.py; see kernels_without_gpu.py.

    TRITON_INTERPRET=1 python tests/mamba_kernels_without_gpu.py    Triton's interpreter, CPU
    python tests/mamba_kernels_without_gpu.py    machine code for an H200, by Triton and ptxas

CASES="NAME,NAME" chooses some. It prints one JSON object: by case, the relative error of each
result, or counts of machine code.
"""

import json
import os
import sys
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from model import Context
from models.layers.mamba2 import Mamba2, MambaSizes, MambaState
from models.layers.pending_state import MAX_TENTATIVE
from ops.attention import mamba
from tests import interpreter
from tests.delta_kernels_without_gpu import counts, relative_error
from tests.launched_code import launched_code

CASES = {  # B, T, H, P, G, N, W, last, accepted tokens of the call before (None: it had one token)
    "one token": (1, 1, 4, 16, 2, 16, 4, None, (None,)),
    "rows without a token": (3, 1, 2, 64, 1, 32, 4, (0, -1, 0), (None,) * 3),
    "three heads of a group": (2, 1, 6, 32, 2, 16, 3, (-1, 0), (None, None)),
    "published sizes of a head": (1, 1, 2, 64, 1, 128, 4, (0,), (None,)),
    "drafts": (1, 5, 4, 16, 2, 16, 4, None, (None,)),
    "rows with padding": (3, 4, 2, 64, 1, 32, 4, (1, -1, 3), (2, 3, None)),
    "fewer tokens than the window": (2, 2, 8, 16, 4, 16, 4, (0, 1), (1, 0)),
    "as many as are kept": (1, MAX_TENTATIVE, 1, 16, 1, 16, 3, None, (MAX_TENTATIVE,)),
    "drafts after drafts": (2, 3, 6, 16, 2, 32, 4, None, (5, 1)),
    "one token after drafts": (4, 1, 4, 16, 2, 16, 4, (0, -1, 0, 0), (3, 2, None, 16)),
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
    last = None if last is None else torch.tensor(last)
    positions = torch.arange(T).unsqueeze(0) + 20 + torch.arange(B).unsqueeze(1)
    for row, count in enumerate(accepted):
        layer.state.first[row] = 0 if count is None else positions[row, 0] + 1 - count
    context = Context(*[None] * len(Context._fields))._replace(last=last, positions=positions)
    return layer.requires_grad_(False), projected, context


def case_errors(case: tuple) -> list[float]:
    """Return the errors of y, and of all that the state keeps."""
    layer, projected, context = random_call(*case)
    ours = deepcopy(layer)
    y = layer.core(projected, context)
    got = ours.fused_core(projected, context)
    # Padding may read anything, since its y is used by no one.
    real = torch.ones(y.shape[:2], dtype=torch.bool)
    if context.last is not None:
        real = torch.arange(y.shape[1]) <= context.last.unsqueeze(1)
    found = [relative_error(got[real], y[real])]
    found += state_errors(ours.state, layer.state, case[0])
    # The next call may be of a kind that no kernel computes: after 0, some and all of the tokens.
    T, row = case[1], None if case[0] > 1 else torch.tensor([0])
    for count in {0, 1, T}:
        taken = []
        for each, supports in ((ours, True), (layer, False)):
            state = deepcopy(each.state)
            state.arrivals = each.state.arrivals.clone()
            choice = mock.patch.object(mamba, "kernels_support", lambda _, found=supports: found)
            place = context.positions[:, :1] + count, context.last, row, state.arrivals
            with choice:
                mamba.take_in_pending(state.state, state.pending(), [*layer.weights()], *place)
            assert not state.arrivals.any()
            taken.append(state)
        found += state_errors(*taken, case[0])
    return found


def state_errors(ours: MambaState, plain: MambaState, rows: int) -> list[float]:
    """Return the errors of state, window and the pending tokens. Rows after the first are equal."""
    found = []
    assert torch.equal(ours.first, plain.first) and not ours.arrivals.any()
    # What is not pending has no effect.
    for name, used in {"state": None, "inputs": plain.width - 1, "dt": 0}.items():
        pair = getattr(ours, name), getattr(plain, name)
        assert torch.equal(*(t[rows:] for t in pair)), name
        for row in range(rows):
            end = None if plain.first[row].any() else used
            found.append(relative_error(*(t[row, :end] for t in pair)))
    return found


def machine_code() -> dict[str, dict[str, int]]:
    """Compile the kernel at published sizes, for one token and for several, and for none."""
    found = {}
    for H, P, G, N in PUBLISHED:
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


def main() -> int:
    torch.set_num_threads(1)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        interpreter.prepare()
        names = os.environ.get("CASES", ",".join(CASES)).split(",")
        print(json.dumps({name: case_errors(CASES[name]) for name in names}))
    else:
        print(json.dumps(machine_code()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
