"""Decode speed, and time to the first token of short prompts beside the limit of their bytes.

    python benchmarks/first_tokens.py --arch Qwen3-30B-A3B --mode int4

Random weights and prompts, warm. The limit of a prompt of 9 tokens or more is 1.3 times its bytes
at the measured bandwidth, and two decode steps; of up to 8 tokens it is three steps. The bytes are
those of all weights but experts, and of the distinct experts that the prompt chooses. Each row is
printed as soon as it is known.

--kernels also lists the kernels of each prompt.
"""

import argparse
import statistics
import time

import torch

from benchmarks.cuda_timing import require_gpu
from benchmarks.decode_speed import (
    distinct_experts,
    open_session,
    read_bandwidth,
    time_answers,
)
from benchmarks.kernel_profile import Event, kernel_lines, kernel_table, record_kernels
from cli.benchmark_options import add_measure_options
from cli.parser import Parser
from models.random_weights import architecture, first_layers, random_prompt
from runtime.sampling import Sampling
from runtime.session import Session
from runtime.weights import bytes_per_token

LENGTHS = 5, 8, 9, 16, 32, 48, 64, 128
HEADER = "tokens  first token, ms  steps  experts a layer    GB  limit, ms  of it"


def first_token_seconds(session: Session, prompt: list[int], repeats: int) -> float:
    """Return the median time to the first token, after two answers that may compile or capture."""
    found = []
    for _ in range(repeats + 2):
        session.reset()
        start = time.perf_counter()
        stream = session.stream(prompt, 2, Sampling(seed=0))
        next(stream)
        found.append(time.perf_counter() - start)
        list(stream)
    return statistics.median(found[2:])


def prompt_kernels(session: Session, prompt: list[int]) -> list[Event]:
    """Return the kernels of a prompt that has run before, up to its first token."""
    session.reset()
    return record_kernels(lambda: list(session.stream(prompt, 1, Sampling(seed=0))))


def measure(options: argparse.Namespace) -> None:
    """Print a row for each length."""
    args = architecture(options.arch)
    args = first_layers(args, options.layers or args.n_layer)
    device = torch.device("cuda")
    ceiling = read_bandwidth(device)
    options.max_seq_len = options.max_seq_len or 512
    session = open_session(args, options, device)
    found = time_answers(session, options)
    rates = sorted(found["rates"])
    rate = statistics.median(rates)
    fraction = bytes_per_token(session.model) * rate / ceiling
    step = 1 / rate
    print(
        f"{options.arch} {options.mode}, {torch.cuda.get_device_name()}\n"
        f"{rate:.1f} tokens/s ({rates[0]:.1f} to {rates[-1]:.1f}), {fraction:.2f} of "
        f"{ceiling / 1e9:.0f} GB/s, a step {step * 1e3:.3f} ms, cold start {found['cold'][0]:.0f} s"
        f"\n{HEADER}",
        flush=True,
    )
    for length in options.lengths:
        prompt = random_prompt(args, length, length)
        seconds = first_token_seconds(session, prompt, options.repeats)
        session.reset()
        tokens = torch.tensor([prompt], device=device)
        experts = distinct_experts(session, tokens, torch.arange(length, device=device)[None])
        size = bytes_per_token(session.model, experts)
        limit = 3 * step if length < 9 else 1.3 * size / ceiling + 2 * step
        print(
            f"{length:6}  {seconds * 1e3:15.2f}  {seconds / step:5.2f}  {experts:15.1f}  "
            f"{size / 1e9:4.2f}  {limit * 1e3:9.2f}  {seconds / limit:5.2f}",
            flush=True,
        )
        if options.kernels:
            table = kernel_table(prompt_kernels(session, prompt), 1, args.n_layer, (), ceiling)
            print("\n".join(kernel_lines(table)), flush=True)


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/first_tokens.py --arch Qwen3-30B-A3B --mode int4",
            "python benchmarks/first_tokens.py --arch Mixtral-8x7B --mode int8 --lengths 16 64",
        ),
    )
    add_measure_options(parser)
    parser.begin_group("prompts", "what is measured")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N")
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    measure(options)


if __name__ == "__main__":
    main()
