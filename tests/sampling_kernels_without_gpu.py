"""Run and compile the kernels of ops/token_sampling.py without a GPU; see kernels_without_gpu.py.

    TRITON_INTERPRET=1 python tests/sampling_kernels_without_gpu.py < CASES
    python tests/sampling_kernels_without_gpu.py < CASES    compiles for an H200

CASES is a JSON list of the arguments of `Case`. The interpreter's process prints, for each, whether
the kernels change a step's state as `sample` and `step_to` do. The other prints registers and
spills of each kernel.
"""

import json
import os
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from ops import token_sampling
from ops.topk import largest_by_rank
from runtime.sampling import Sampling, StepState, make_sample_step, sample
from tests.kernels_without_gpu import Launch, compiled

KERNELS = "_find_maxima", "_find_candidates", "_draw"
INFINITY = float("inf")


@dataclass(frozen=True)
class Case:
    """Rows of logits, and how they are sampled."""

    rows: int
    vocabulary: int
    count: int  # candidates
    kind: str = "normal"  # of LOGITS
    sampling: dict = field(default_factory=dict)
    seed: int = 0

    def logits(self) -> Tensor:
        random = torch.Generator().manual_seed(self.seed)
        return LOGITS[self.kind](3 * torch.randn(self.rows, self.vocabulary, generator=random))

    def state(self) -> StepState:
        random, rows = torch.Generator().manual_seed(self.seed), self.rows
        controls = Sampling(**self.sampling).controls(self.vocabulary)
        return StepState(
            token=torch.zeros(rows, 1, dtype=torch.int64),
            position=torch.randint(100, (rows, 1), generator=random),
            last=-(torch.arange(rows) % 2),  # every other row is idle
            seen=torch.rand(rows, self.vocabulary, generator=random) < 0.1,
            controls=controls.expand(rows, 5).contiguous(),
            seeds=torch.randint(2**62, (rows,), generator=random),
        )


def with_one(logits: Tensor, value: float) -> Tensor:
    logits[0, 5] = value
    return logits


def clustered(logits: Tensor) -> Tensor:
    """The largest logits are in few subsets, whose members are this far apart."""
    size = -(-logits.shape[1] // token_sampling.MAX_SUBSETS)
    subsets = -(-logits.shape[1] // (1 << (size - 1).bit_length()))
    return logits + 50.0 * (torch.arange(logits.shape[1]) % subsets < 3)


LOGITS = {
    "normal": lambda logits: logits,
    "equal": torch.ones_like,
    "many ties": torch.round,
    "descending": lambda logits: logits.sort(-1, descending=True).values,
    "clustered": clustered,
    "a NaN": lambda logits: with_one(logits, float("nan")),
    "an infinity": lambda logits: with_one(logits, INFINITY),
    "half -inf": lambda logits: logits.index_fill(
        1, torch.arange(0, logits.shape[1], 2), -INFINITY
    ),
    "all -inf": lambda logits: torch.full_like(logits, -INFINITY),
}


def run_kernels(case: Case, state: StepState, pdl: bool) -> None:
    kept = state.controls, state.seen, state.seeds, state.last
    changed = state.token, state.position
    token_sampling.sample_tokens(case.logits(), *kept, *changed, case.count, pdl=pdl)


def is_right(case: Case) -> bool:
    """Compare with the plain step. On a GPU that ranks by `largest_by_rank`, as is done here."""
    want, found = case.state(), case.state()
    with mock.patch.object(torch, "topk", largest_by_rank):
        make_sample_step(sample)(want, case.logits(), case.count)
    run_kernels(case, found, pdl=False)
    return all(a.equal(b) for a, b in zip(want, found, strict=True))


def counts(case: Case) -> dict[str, list[int]]:
    """Return registers and spills of each kernel."""
    launches = {name: Launch() for name in KERNELS}
    with ExitStack() as stack:
        for name, launch in launches.items():
            stack.enter_context(mock.patch.object(token_sampling, name, launch))
        run_kernels(case, case.state(), pdl=True)
    found = {}
    for name, launch in launches.items():
        sass = compiled(getattr(token_sampling, name), launch).asm["sass"]
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", sass)]
        found[name] = [max(registers) + 1, sass.count("STL")]
    return found


def main() -> int:
    torch.set_num_threads(1)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    cases = [Case(**values) for values in json.load(sys.stdin)]
    print(json.dumps([(is_right if interpreted else counts)(case) for case in cases]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
