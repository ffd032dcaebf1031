"""What drafting gains: python benchmarks/speculation.py [--arch Mixtral-8x7B --layers 8]

Without --arch: the embedded model continues a prompt that repeats itself and the beginnings of its held-out text,
greedily, with drafts looked up: tokens a pass, tokens/s. With --arch: the time of a pass of N drafts at that shape,
with random weights and random drafts, over a plain step's. A shape gains where the tokens a pass are more than that.
"""

import statistics
import time

import torch

from checkpoint import pick_device
from command import Parser
from generate import EMBEDDED, embedded_checkpoint, load_model
from session import Sampling, Session
from shapes import RandomWeights, architecture, first_layers, number_format, random_prompt
from speculate import Speculation
from tokenizer import load_tokenizer

FUNCTION = '''def read_lines(path):
    """Return the lines of the file at path."""
    with open(path) as stream:
        return [line.rstrip("\\n") for line in stream]


'''
GREEDY = Sampling(temperature=0)
TOKENS = 100  # new ones for a prompt
PASSES = 50  # that are timed


def texts() -> dict[str, list[str]]:
    """Prompts by kind of text."""
    lines = (EMBEDDED / "heldout.txt").read_text().splitlines(keepends=True)[:24]
    plain = ["".join(lines[n : n + 4]) for n in range(0, 24, 4)]
    return {"repeated": [FUNCTION * 2 + FUNCTION.partition("\n")[0] + "\n"], "plain": plain}


def embedded(device: torch.device, drafts: list[int]) -> None:
    """Print tokens a pass and tokens a second of the embedded model."""
    checkpoint = embedded_checkpoint()
    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint, device)
    for count in (0, *drafts):
        session = Session(model, 1024, compile=True)
        session = Speculation(session, count) if count else session
        for kind, prompts in texts().items():
            spent, tokens, passes = 0.0, 0, 0
            for ids in map(tokenizer.encode, prompts):
                for _ in range(2):  # the first compiles
                    session.reset()
                    stream = session.stream(ids, TOKENS, GREEDY)
                    next(stream)
                    start = time.perf_counter()
                    tokens_here = sum(1 for _ in stream)
                    spent_here = time.perf_counter() - start
                spent, tokens = spent + spent_here, tokens + tokens_here
                passes += session.passes if count else tokens_here
            rates = f"{tokens / passes:.2f} tokens a pass, {tokens / spent:.0f} tokens/s"
            print(f"{kind}: {count} drafts, {rates}", flush=True)


def passes(arch: str, layers: int | None, mode: str, device: torch.device, drafts: list[int]) -> None:
    """Print the time of a pass with so many drafts, and over that of a plain step."""
    args = architecture(arch)
    args = first_layers(args, layers or args.n_layer)
    model = load_model(RandomWeights(args, number_format(mode, args)), device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    generator, plain = torch.Generator().manual_seed(0), 0.0
    for count in (0, *drafts):
        session = Session(model, 1024, compile=True)
        last = Speculation(session, count) if count else session
        step = last.warm_up(0)
        session.begin([random_prompt(args, 16)], GREEDY)
        times = []
        for _ in range(PASSES):
            session.token.copy_(torch.randint(args.vocab_size, (1, 1), generator=generator))
            if count:
                last.drafter.drafts.copy_(torch.randint(args.vocab_size, (1, count), generator=generator))
            wait()
            start = time.perf_counter()
            step()
            wait()
            times.append(time.perf_counter() - start)
        median = statistics.median(times)
        plain = plain or median
        taken = f"{1e3 * median:.3f} ms, {median / plain:.2f} of a plain step"
        print(f"{arch} {mode}, {args.n_layer} layers: {count} drafts, {taken}", flush=True)


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        ("python benchmarks/speculation.py", "python benchmarks/speculation.py --arch Mixtral-8x7B --layers 8"),
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
        passes(options.arch, options.layers, options.mode, device, options.drafts)
    else:
        embedded(device, options.drafts)


if __name__ == "__main__":
    main()
