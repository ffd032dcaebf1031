"""Run and compile the kernels of ops/step/token_draw.py without a GPU; see kernels_without_gpu.py.

    TRITON_INTERPRET=1 python tests/token_draw_without_gpu.py < INPUT    Triton's interpreter, CPU
    python tests/token_draw_without_gpu.py < INPUT    machine code for an H200, by Triton and ptxas

INPUT is a JSON list of cases: "logits" (a name in LOGITS), "V", "groups", and a list of the
arguments of `Sampling`, "rows". The interpreter's process prints for each case the tokens of plain
PyTorch, those of the kernels, and whether the rest of the step's state is the same. The other
prints counts of the machine code of each kernel.
"""

import json
import os
import sys
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from ops.step import outbox, token_draw
from runtime.sampling import MAX_CANDIDATES, Sampling, StepState, make_sample_step, sample
from tests.interpreter_bounds import check_bounds
from tests.kernels_without_gpu import OnCuda
from tests.launched_code import launched_code

INF, NAN = float("inf"), float("nan")


def normal(B: int, V: int) -> Tensor:
    return 3 * torch.randn(B, V, generator=torch.Generator().manual_seed(V))


def rounded(B: int, V: int) -> Tensor:
    """Many ties."""
    return normal(B, V).round()


def equal(B: int, V: int) -> Tensor:
    return torch.full((B, V), -1.5)


def clustered(B: int, V: int) -> Tensor:
    """The likeliest tokens are neighbors, so that groups hold more of them than they keep."""
    return torch.where(torch.arange(V) // 40 % 5 == 2, 5.0, 0.0) + normal(B, V)


def masked(B: int, V: int) -> Tensor:
    """A grammar allows seven tokens."""
    return torch.where(torch.arange(V) % (V // 7) == 3, normal(B, V), -INF)


def damaged(B: int, V: int) -> Tensor:
    """A NaN, inf, -inf alone, and a NaN that is not the largest by its bits."""
    logits = normal(B, V)
    logits[0, 7], logits[1, 20], logits[2] = NAN, INF, -INF
    logits[3, 9] = -NAN
    return logits


LOGITS = {f.__name__: f for f in (normal, rounded, equal, clustered, masked, damaged)}


def run(case: dict, device: str = "cpu") -> dict:
    """Return the tokens of a case, and whether the states after the step are the same."""
    rows = [Sampling(**settings) for settings in case["rows"]]
    B, V = len(rows), case["V"]
    logits = LOGITS[case["logits"]](B, V).to(device)
    generator = torch.Generator().manual_seed(1)

    def state() -> StepState:
        parts = StepState(
            token=torch.full((B, 1), 5),
            position=torch.arange(B).unsqueeze(1) + 11,
            last=-(torch.arange(B) % 2),
            seen=torch.rand(B, V, generator=generator.manual_seed(1)) < 0.3,
            controls=torch.stack([row.controls(V) for row in rows]),
            seeds=torch.tensor([row.seed or 0 for row in rows]),
        )
        return StepState(*(part.to(device) for part in parts))

    plain, fused = state(), state()
    # As on a GPU: the lower of equal tokens comes first.
    given = logits if logits.is_cuda else logits.as_subclass(OnCuda)
    make_sample_step(sample)(plain, given, min(MAX_CANDIDATES, V))
    s = fused
    with mock.patch.object(token_draw, "GROUPS", case["groups"]):
        token_draw.draw_tokens(
            logits, s.seen, s.controls, s.seeds, s.position, s.last, s.token, pdl=logits.is_cuda
        )
    slots, count = torch.full((2, B + 1), 7), torch.tensor([3], device=device)
    if logits.is_cuda:
        slots = slots.pin_memory()
    for _ in range(2):
        outbox.post_tokens(s.token, count, slots, pdl=logits.is_cuda)
        s.token.neg_()
    posted = torch.stack((-s.token.flatten(), s.token.flatten())).cpu()
    same_posts = slots[:, :B].equal(posted) and slots[:, B].tolist() == [7, 7] and count.item() == 5
    others = zip(plain[1:], fused[1:], strict=True)
    same = same_posts and plain.token.equal(fused.token) and all(a.equal(b) for a, b in others)
    tokens = [s.token.flatten().tolist() for s in (plain, fused)]
    return {"plain": tokens[0], "fused": tokens[1], "same": same}


def counts() -> dict:
    """Return spills and waits of each kernel's machine code, of 8 rows of Qwen3."""
    B, V = 8, 151936
    whole, seen = torch.zeros(B, dtype=torch.int64), torch.empty(B, V, dtype=torch.bool)
    tensors = torch.empty(B, V), seen, torch.empty(B, 5), *4 * [whole]
    found = {}
    for name, code in launched_code(partial(token_draw.draw_tokens, *tensors)).items():
        sass = code.asm["sass"]
        found[name] = {"spills": sass.count("STL"), "waits": sass.count("ACQBULK")}
    return found


def main() -> int:
    torch.set_num_threads(1)
    cases = json.load(sys.stdin)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        check_bounds()
    print(json.dumps([run(case) for case in cases] if interpreted else counts()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
