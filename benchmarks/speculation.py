"""Gain of speculative decoding: accepted tokens a pass, and the time of a pass.

    python benchmarks/speculation.py [--arch Mixtral-8x7B --layers 8]

Without --arch: the embedded model continues a prompt that repeats itself, and the beginnings of
its held-out text, greedily, with prompt lookup: tokens a pass, tokens/s. With --arch: the time of a
pass with N drafts over that of a plain step, at that shape, with random weights and drafts. A shape
gains if a pass yields more tokens than that ratio.
"""

import statistics
import time

import torch

from cli.parser import Parser
from generate import EMBEDDED, embedded_checkpoint, load_model
from models.random_weights import (
    RandomWeights,
    architecture,
    first_layers,
    number_format,
    random_prompt,
)
from parallel.device import pick_device
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation
from tokenizer import load_tokenizer

FUNCTION = '''def read_lines(path):
    """Return the lines of the file at path."""
    with open(path) as stream:
        return [line.rstrip("\\n") for line in stream]


'''
GREEDY = Sampling(temperature=0)
MAX_SEQ_LEN = 1024
NEW_TOKENS = 100
PASSES = 50  # that are timed


def texts() -> dict[str, list[str]]:
    """Return prompts by kind of text."""
    lines = (EMBEDDED / "heldout.txt").read_text().splitlines(keepends=True)[:24]
    plain = ["".join(lines[n : n + 4]) for n in range(0, 24, 4)]
    return {"repeated": [FUNCTION * 2 + FUNCTION.partition("\n")[0] + "\n"], "plain": plain}


def time_stream(session: Session | Speculation, ids: list[int]) -> tuple[float, int]:
    """Return seconds and tokens of an answer after its first token; the second of two answers."""
    for _ in range(2):  # the first compiles
        session.reset()
        stream = session.stream(ids, NEW_TOKENS, GREEDY)
        next(stream)
        start = time.perf_counter()
        tokens = sum(1 for _ in stream)
        seconds = time.perf_counter() - start
    return seconds, tokens


def measure_text(device: torch.device, drafts: list[int]) -> None:
    """Print tokens a pass and tokens/s of the embedded model."""
    checkpoint = embedded_checkpoint()
    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint, device)
    for count in (0, *drafts):
        session = Session(model, MAX_SEQ_LEN, SessionOptions(compile=True))
        session = Speculation(session, count) if count else session
        for kind, prompts in texts().items():
            seconds, tokens, passes = 0.0, 0, 0
            for prompt in prompts:
                spent, new = time_stream(session, tokenizer.encode(prompt))
                seconds, tokens = seconds + spent, tokens + new
                passes += session.passes if count else new
            rates = f"{tokens / passes:.2f} tokens a pass, {tokens / seconds:.0f} tokens/s"
            print(f"{kind}: {count} drafts, {rates}", flush=True)


def pass_seconds(session: Session, count: int) -> float:
    """Return the median time of a pass with `count` random drafts; 0: of a plain step."""
    args, device = session.model.args, session.device
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    generator = torch.Generator().manual_seed(0)
    speculation = Speculation(session, count) if count else session
    step = speculation.warm_up(count, 0) if count else session.warm_up(0)
    session.start_prompts([random_prompt(args, 16)], GREEDY)
    times = []
    for _ in range(PASSES):
        session.token.copy_(torch.randint(args.vocab_size, (1, 1), generator=generator))
        if count:
            drafts = torch.randint(args.vocab_size, (1, count), generator=generator)
            speculation.drafter.drafts.copy_(drafts)
        wait()
        session.cached[0] = int(session.position)  # by which the session chooses kernels
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_passes(
    arch: str, layers: int | None, mode: str, device: torch.device, drafts: list[int]
) -> None:
    """Print the time of a pass with each number of drafts, and over that of a plain step."""
    args = architecture(arch)
    args = first_layers(args, layers or args.n_layer)
    model = load_model(RandomWeights(args, number_format(mode, args)), device)
    plain = 0.0
    for count in (0, *drafts):
        session = Session(model, MAX_SEQ_LEN, SessionOptions(compile=True))
        seconds = pass_seconds(session, count)
        plain = plain or seconds
        figures = f"{1e3 * seconds:.3f} ms, {seconds / plain:.2f} of a plain step"
        print(f"{arch} {mode}, {args.n_layer} layers: {count} drafts, {figures}", flush=True)


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/speculation.py",
            "python benchmarks/speculation.py --arch Mixtral-8x7B --layers 8",
        ),
    )
    parser.add_argument("--arch", help="default: the embedded model on text")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--mode", default="bf16")
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 8])
    return parser


def main() -> None:
    options = build_parser().parse_args()
    device = pick_device("auto")
    if options.arch:
        measure_passes(options.arch, options.layers, options.mode, device, options.drafts)
    else:
        measure_text(device, options.drafts)


if __name__ == "__main__":
    main()
