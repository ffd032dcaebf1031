"""Time of sampling a token: Inductor's kernels and ops/token_sampling.py, in us.

    python benchmarks/token_sampling.py

One row, 256 candidates, by the size of the vocabulary. Each way runs 50 times in a CUDA graph, on
logits that L2 holds, as after a head.
"""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.cuda_timing import graph_seconds, require_gpu
from cli.parser import Parser
from ops.inductor import configure_inductor
from runtime.sampling import Sampling, StepState, make_sample_step, sample, with_kernels

VOCABULARIES = 32000, 151936, 248320
REPEATS = 50


def make_state(vocabulary: int) -> StepState:
    controls = Sampling(temperature=0.8, top_k=200).controls(vocabulary)
    whole = dict(dtype=torch.int64, device="cuda")
    return StepState(
        token=torch.zeros(1, 1, **whole),
        position=torch.zeros(1, 1, **whole),
        last=torch.zeros(1, **whole),
        seen=torch.zeros(1, vocabulary, dtype=torch.bool, device="cuda"),
        controls=controls.cuda().view(1, 5),
        seeds=torch.zeros(1, **whole),
    )


def main() -> None:
    parser = Parser(__doc__.partition("\n")[0], ("python benchmarks/token_sampling.py",))
    parser.parse_args()
    require_gpu(parser)
    configure_inductor()
    torch.manual_seed(0)
    plain = torch.compile(make_sample_step(sample), fullgraph=True, dynamic=False)
    print(torch.cuda.get_device_name())
    for vocabulary in VOCABULARIES:
        logits = 3 * torch.randn(1, vocabulary, device="cuda")
        arguments = [(make_state(vocabulary), logits, 256)] * REPEATS
        for name, step in (("Inductor", plain), ("three kernels", with_kernels(plain))):
            us = graph_seconds(partial(call, step), arguments) * 1e6
            print(f"{vocabulary:7} {name:14} {us:6.2f} us", flush=True)


def call(function: Callable, arguments: tuple) -> None:
    function(*arguments)


if __name__ == "__main__":
    main()
