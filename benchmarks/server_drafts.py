"""Tokens/s of the server's loop with automatic drafts, against its plain steps, on a GPU.

    python benchmarks/server_drafts.py --arch Qwen3-30B-A3B --mode int4

Random weights, compiled sessions, no HTTP: a `Batch`, and a `DraftingBatch` with lookups on the
same session. "before" is without a captured pass: those are captured while a server has nothing to
do, and the line before the table has the seconds of each. Random weights repeat themselves when
greedy, so that drafts are accepted; at temperature 1 they are not. Due: never less than 0.97.
"""

import argparse
import statistics
import time
from itertools import pairwise

import torch

from benchmarks.cuda_timing import require_gpu
from benchmarks.decode_speed import open_session
from cli.benchmark_options import add_measure_options
from cli.parser import Parser
from models.random_weights import architecture, first_layers, random_prompt
from runtime.batch import Batch
from runtime.drafting_batch import DraftingBatch
from runtime.sampling import Sampling
from runtime.speculation import Speculation

WAYS = {"greedy": Sampling(0.0), "temperature 1": Sampling(1.0)}


def tokens_per_second(
    batch: Batch, count: int, sampling: Sampling, options: argparse.Namespace
) -> tuple[float, float]:
    """Return the median tokens/s of `count` answers side by side, and tokens a step."""
    rates, steps, args = [], 0, batch.session.model.args
    for number in range(options.repeats + 1):
        batch.session.reset()
        left = {}
        for n in range(count):
            prompt = random_prompt(args, options.prompt_len, number * count + n)
            left[batch.start(prompt, options.new_tokens, sampling)] = options.new_tokens
        begin = time.perf_counter()
        while left:
            batch.prefill()
            for token in batch.step():
                if token.sequence not in left:
                    continue
                left[token.sequence] -= 1
                if not left[token.sequence]:
                    batch.end(token.sequence)
                    del left[token.sequence]
            steps += number > 0
        rates.append(count * options.new_tokens / (time.perf_counter() - begin))
    tokens = count * options.new_tokens * options.repeats
    return statistics.median(rates[1:]), tokens / steps / count


def measure(options: argparse.Namespace) -> None:
    args = architecture(options.arch)
    args = first_layers(args, options.layers or args.n_layer)
    options.batch = 4
    session = open_session(args, options, torch.device("cuda"))
    drafting = DraftingBatch(Speculation(session, auto=True))
    times = [time.perf_counter()]
    drafting.prepare()
    times.append(time.perf_counter())
    plain = Batch(session)
    cases = [(count, name) for count in (1, 2, 4) for name in WAYS]
    found = {}
    for batch, column in ((plain, "plain"), (drafting, "before")):
        for count, name in cases:
            found[column, count, name] = tokens_per_second(batch, count, WAYS[name], options)
    prepared = [time.perf_counter()]
    while drafting.prepare_next():
        prepared.append(time.perf_counter())
    prepared.append(time.perf_counter())
    seconds = ", ".join(f"{b - a:.2f}" for a, b in pairwise(prepared))
    print(f"steps prepared in {times[1] - times[0]:.1f} s, passes in {seconds} s", flush=True)
    for batch, column in ((drafting, "drafts"), (plain, "plain again")):
        for count, name in cases:
            found[column, count, name] = tokens_per_second(batch, count, WAYS[name], options)
    for count, name in cases:
        rates = {key: found[key, count, name][0] for key in ("plain", "before", "plain again")}
        drafts, tokens = found["drafts", count, name]
        mean = (rates["plain"] + rates["plain again"]) / 2
        print(
            f"{count} {name:13} plain {rates['plain']:6.0f} and {rates['plain again']:6.0f} "
            f"tokens/s, before {rates['before']:6.0f} ({rates['before'] / mean:.3f}), with drafts "
            f"{drafts:6.0f} ({drafts / mean:.3f}), {tokens:.2f} tokens a step",
            flush=True,
        )


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        ("python benchmarks/server_drafts.py --arch Qwen3-30B-A3B --mode int4",),
    )
    add_measure_options(parser)
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
