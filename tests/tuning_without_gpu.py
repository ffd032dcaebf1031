"""Products of layers as the search for tilings sees them, without a GPU: test_benchmark.py.

    python tests/tuning_without_gpu.py MODEL:MODE ...    up to 16 tokens of a layer of each kind

Tensors are fake, and nothing is launched. Prints a JSON object: by model, products whose result was
taken for another one's, and the groups of tilings that the search knows.
"""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import layer_tuning
from benchmarks.inductor_code import move_to_fake_gpu, pretend_gpu
from ops import launch
from tests import gpu_launches

TOKENS = 1, 2, 4, 8, 16


def no_launch(*_, **options) -> None:
    """Stands for `launch`."""


def products_of(case: str) -> dict[str, list[str]]:
    """Return what the search finds of a model: "wrong" results, and "groups" of tilings."""
    wrong, groups = [], set()

    def note(_, work: str, run: Callable[[], object]) -> None:
        tuning = layer_tuning.Tuning()
        with tuning.replaced():
            try:
                tuning.results(SimpleNamespace(model=SimpleNamespace(states=()), run=run))
            except RuntimeError as error:
                wrong.append(f"{work}: {error}")
        groups.update(place.group for place in tuning.seen)

    model = gpu_launches.make_model(case, gpu_launches.LAYERS)
    with ExitStack() as stack:
        for part in (FakeTensorMode(), torch.no_grad(), gpu_launches.operators_launch()):
            stack.enter_context(part)
        stack.enter_context(mock.patch.object(gpu_launches, "note", note))
        real = launch.launch
        for module in list(sys.modules.values()):
            if getattr(module, "launch", None) is real:
                stack.enter_context(mock.patch.object(module, "launch", no_launch))
        move_to_fake_gpu(model)
        gpu_launches.set_up(model, gpu_launches.SHORT, "plain")
        for T in TOKENS:
            gpu_launches.run_fused(model, {}, f"{T} tokens", (1, T))
    return {"wrong": wrong, "groups": sorted(groups)}


if __name__ == "__main__":
    pretend_gpu()
    gpu_launches.become("sm_90")
    print(json.dumps({case: products_of(case) for case in sys.argv[1:]}))
