"""Tokens/s of the server's loop with automatic drafts, against its plain steps, on a GPU.

    python benchmarks/server_drafts.py --arch Qwen3-30B-A3B --mode int4

Random weights, compiled sessions, no HTTP: a `Batch`, and a `DraftingBatch` with lookups on the
same session, in turn. "before" is the latter without a captured pass: those are captured while a
server has nothing to do, when their kernels have been compiled in the background. The first lines
have the seconds of that: to begin it, and in all; and those of each capture. A request may have to
wait for a capture, and for the beginning. Random weights repeat themselves when greedy, so that
some drafts are accepted; at temperature 1 none is. Due: never less than 0.97.
"""

import argparse
import statistics
import time

import torch

from benchmarks.cuda_timing import require_gpu
from benchmarks.decode_speed import open_session
from cli.benchmark_options import add_measure_options
from cli.parser import Parser
from models.random_weights import architecture, first_layers, random_prompt
from runtime.batch import STEPPED_PROMPT, Batch
from runtime.draft_control import DraftControl
from runtime.drafting_batch import DraftingBatch
from runtime.memory import free_gpu_memory
from runtime.sampling import Sampling
from runtime.speculation import DRAFT_TOKENS, Speculation

WAYS = {"greedy": Sampling(0.0), "temperature 1": Sampling(1.0)}
COUNTS = 1, 2, 4  # answers side by side
MOST_SECONDS = 120  # until the kernels of passes are compiled


def decode(
    batch: Batch, count: int, sampling: Sampling, seed: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Return the tokens/s of `count` answers side by side, and the tokens of a step for each."""
    batch.session.reset()
    tokens, steps = {}, 0
    for n in range(count):
        prompt = random_prompt(batch.session.model.args, options.prompt_len, seed * count + n)
        tokens[batch.start(prompt, options.new_tokens, sampling)] = 0
    begin = time.perf_counter()
    while max(tokens.values()) < options.new_tokens:  # all run until the first one ends
        batch.prefill()
        arrived = [token.sequence for token in batch.step()]
        steps += bool(arrived)  # a prompt's steps have no token
        for sequence in arrived:
            tokens[sequence] += 1
    seconds, found = time.perf_counter() - begin, sum(tokens.values())
    for sequence in tokens:
        batch.end(sequence)
    return found / seconds, found / steps / count


def measure(options: argparse.Namespace) -> None:
    """Print the seconds of captures, then a line for each number of answers and way to sample."""
    args, device = architecture(options.arch), torch.device("cuda")
    args = first_layers(args, options.layers or args.n_layer)
    options.batch = max(COUNTS)
    session = open_session(args, options, device)
    drafting = DraftingBatch(Speculation(session, auto=True))
    captures, plain, seconds = drafting.speculation.captures, Batch(session), []
    start = time.perf_counter()
    for count in COUNTS:  # what `prepare` does, but for steps that this does not take
        for sampling in WAYS.values():
            captures.prepare(session.candidates(sampling), count)
    print(f"steps ready after {time.perf_counter() - start:.1f} s", flush=True)
    found: dict[tuple, list[tuple[float, float]]] = {}
    controls: dict[tuple, DraftControl] = {}  # a text that won may lose a part of that in the next

    def answer(batches: dict[str, Batch], seed: int) -> None:
        for count in COUNTS:
            for way, sampling in WAYS.items():
                control = controls.setdefault((count, way), DraftControl(DRAFT_TOKENS))
                drafting.speculation.control = control
                for name, batch in batches.items():
                    rate = decode(batch, count, sampling, seed, options)
                    if seed:  # the first one loads code
                        found.setdefault((name, count, way), []).append(rate)

    for seed in range(options.repeats + 1):
        answer({"plain": plain, "before": drafting}, seed)
    start = time.perf_counter()
    captures.kernels_ready()
    begun = time.perf_counter() - start
    while not captures.kernels_ready():
        if time.perf_counter() - start > MOST_SECONDS:
            raise ValueError("kernels of passes are not compiled: the line above may say why")
        time.sleep(0.05)
    waited = time.perf_counter() - start
    print(f"kernels of passes begun in {begun:.2f} s, ready after {waited:.2f} s", flush=True)
    free, goes_on = free_gpu_memory(device), True
    while goes_on:
        start = time.perf_counter()
        goes_on = captures.capture_next()
        seconds.append(time.perf_counter() - start)
    times, size = ", ".join(f"{spent:.2f}" for spent in seconds), free - free_gpu_memory(device)
    print(f"{len(seconds)} passes captured in {times} s; {size / 1e6:.0f} MB", flush=True)
    for seed in range(options.repeats + 1):
        answer({"plain again": plain, "drafts": drafting}, seed)
    print("answers           plain, again   before     drafts  tokens a step")
    for count in COUNTS:
        for way in WAYS:
            names = "plain", "plain again", "before", "drafts"
            rates = {n: statistics.median(r for r, _ in found[n, count, way]) for n in names}
            tokens = statistics.mean(tokens for _, tokens in found["drafts", count, way])
            first, again = rates["plain"], rates["plain again"]
            before, drafts = rates["before"] / first, rates["drafts"] / again
            print(
                f"{count} {way:13} {first:6.0f}, {again:6.0f} x {before:5.3f}  x {drafts:6.3f} "
                f"{tokens:10.2f}",
                flush=True,
            )


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/server_drafts.py --arch Qwen3-30B-A3B --mode int4",
            "python benchmarks/server_drafts.py --arch Qwen3-30B-A3B --mode int4 --layers 8",
        ),
    )
    add_measure_options(parser)
    parser.set_defaults(repeats=3, prompt_len=STEPPED_PROMPT)
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    try:
        measure(options)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
