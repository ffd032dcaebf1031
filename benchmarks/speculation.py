"""Cost of a pass with drafts, of steps of several tokens, and gain on text.

    python benchmarks/speculation.py
    python benchmarks/speculation.py --arch Qwen3-30B-A3B:int4 --layers 8 --drafts 0 1 3
    python benchmarks/speculation.py --texts
    python benchmarks/speculation.py --texts --answers 2 4

Without --texts: random weights at the shapes of each --arch, on a GPU. The first table has steps of
T tokens of one sequence: time over that of one token, the distinct experts a layer that they chose
in the run, and the fraction of the measured bandwidth that reads those weights. The second has
passes with N random drafts, from one to the next as the host sees them: time in plain steps, and
tokens/s at acceptances of 0.6, 0.7, 0.8 and 0.9 for each draft after those before it. A model with
a published head for multi-token prediction has a third table: passes whose drafts a random head
makes. "ready" is the time to compile and capture a pass.

--texts: the embedded model continues four kinds of text, greedily and sampled: tokens a pass, and
time over that of plain decoding. Each greedy answer is compared with plain decoding's, since a
faulty rollback could accept more. --answers: as many answers side by side, as the server decodes
them, in shared passes and in plain steps.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.cuda_timing import require_gpu
from benchmarks.decode_speed import distinct_experts, open_session, read_bandwidth
from benchmarks.expectation import expected_tokens
from benchmarks.kernel_profile import record_kernels
from cli.options import (
    add_compile_cache,
    add_decode_kernels,
    add_device_group,
    add_kv_cache,
    add_prefill_options,
    check_counts,
)
from cli.parser import Parser
from generate import EMBEDDED, embedded_checkpoint, load_model
from model import Transformer
from models import family_of, head_args
from models.random_weights import (
    RandomWeights,
    architecture,
    first_layers,
    free_memory,
    number_format,
    random_prompt,
)
from parallel.device import pick_device
from runtime.batch import Batch
from runtime.draft_control import FixedDrafts
from runtime.draft_vocab import DRAFT_VOCAB
from runtime.drafters import SHORT
from runtime.drafting_batch import DraftingBatch
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation
from runtime.transfers import Upload
from runtime.weights import bytes_per_token
from tokenizer import load_tokenizer

MODELS = "Qwen3.6-35B-A3B:int4", "GLM-4.7-Flash:int4", "Qwen3-30B-A3B:int4", "Mixtral-8x7B:int8"
DRAFTS = tuple(range(8))
TOKENS = 1, 2, 4, 8, 16
ACCEPTANCE = 0.6, 0.7, 0.8, 0.9
GREEDY = Sampling(temperature=0)
PROMPT_TOKENS = 16
MAX_SEQ_LEN = 1024
FUNCTION = '''def read_lines(path):
    """Return the lines of the file at path."""
    with open(path) as stream:
        return [line.rstrip("\\n") for line in stream]


'''
ANSWER = 250  # tokens of an answer of --texts


# Tables -------------------------------------------------------------------------------------------


def pass_lines(seconds: dict[int, tuple[float, float]]) -> list[str]:
    """Return a table of passes.

    seconds: of a pass with its drafts, and of its graph alone on the GPU, by the number of drafts;
    0 is a plain step.
    """
    rates = "  ".join(f"{a:>7}" for a in ACCEPTANCE)
    lines = [f"drafts  pass, ms  its graph  plain steps  tokens/s at an acceptance of {rates}"]
    for drafts, (spent, on_gpu) in sorted(seconds.items()):
        rates = "  ".join(f"{expected_tokens(drafts, a) / spent:7,.0f}" for a in ACCEPTANCE)
        times = f"{spent * 1e3:8.3f}  {on_gpu * 1e3:9.3f}  {spent / seconds[0][0]:11.2f}"
        lines.append(f"{drafts:6}  {times}  {'':28} {rates}")
    return lines


def step_lines(steps: dict[int, tuple[float, float, int]], ceiling: float) -> list[str]:
    """Return a table of steps of T tokens.

    steps: by T, the seconds, the distinct experts a layer, and the bytes of weights that are read.
    ceiling: the GPU's bandwidth in bytes/s.
    """
    lines = ["tokens  step, ms  of one token  experts a layer      GB  of bandwidth"]
    one = steps[min(steps)][0]
    for tokens, (spent, experts, size) in sorted(steps.items()):
        fraction = size / spent / ceiling
        lines.append(
            f"{tokens:6}  {spent * 1e3:8.3f}  {spent / one:12.2f}  {experts:15.1f}  "
            f"{size / 1e9:6.3f}  {fraction:12.2f}"
        )
    return lines


# Real shapes --------------------------------------------------------------------------------------


class RandomDrafter:
    """Drafts random tokens, where a lookup writes its own."""

    q = None

    def __init__(self, session: Session, count: int):
        self.random, self.vocabulary = random.Random(0), session.model.args.vocab_size
        self.drafts = session.shared_integers(1, count)
        self.upload = Upload(self.drafts)

    def start_prompt(self, ids: Sequence[int], sampling: Sampling) -> None:
        """Nothing to know of a text."""

    def reset(self) -> None:
        """Nothing to forget."""

    def source(self) -> str:
        return SHORT

    def propose(self, limit: int) -> int:
        self.upload([self.random.randrange(self.vocabulary) for _ in range(limit)])
        return limit


def pass_seconds(
    speculation: Speculation, drafts: int, tokens: int, repeats: int, sampling: Sampling
) -> float:
    """Return the median seconds of a pass with this many drafts, of `repeats` answers."""
    speculation.control = FixedDrafts(drafts)
    prompt = random_prompt(speculation.model.args, PROMPT_TOKENS)
    found = []
    for _ in range(repeats + 1):  # the first compiles and captures
        speculation.reset()
        stream = speculation.stream(prompt, tokens, sampling)
        next(stream)
        start = time.perf_counter()
        for _ in stream:
            pass
        found.append((time.perf_counter() - start) / speculation.passes)
    return statistics.median(found[1:])


def step_seconds(session: Session, count: int, repeats: int) -> tuple[float, float, int]:
    """Return what `step_lines` wants of a step of `count` random tokens, without sampling."""
    args, device = session.model.args, session.device
    tokens = torch.zeros(1, count, dtype=torch.int64, device=device)
    positions = torch.arange(PROMPT_TOKENS, PROMPT_TOKENS + count, device=device)[None]
    last = torch.full((1,), count - 1, device=device)

    def step() -> None:
        session.model(tokens, positions, last, all_positions=True, runner=session.runner)

    session.cached[0] = PROMPT_TOKENS
    run = session.capture(step, count, count)

    def draw(seed: int) -> None:
        tokens.copy_(torch.tensor([random_prompt(args, count, seed)]))

    seconds = gpu_seconds(run, repeats, draw)
    experts = distinct_experts(session, tokens, positions)
    return seconds, experts, bytes_per_token(session.model, experts)


def gpu_seconds(
    run: Callable[[], None], repeats: int, prepare: Callable[[int], None] = lambda seed: None
) -> float:
    """Return the median seconds of a captured step on the GPU. prepare: called before each."""
    times = []
    for seed in range(repeats + 3):
        prepare(seed)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def measure_shape(name: str, options: argparse.Namespace, ceiling: float) -> dict:
    """Print the tables of one model, NAME:FORMAT. Return what --json has of it."""
    arch, _, options.mode = name.partition(":")
    options.mode = options.mode or "bf16"
    args = architecture(arch)
    args = first_layers(args, options.layers or args.n_layer)
    session = open_session(args, options, torch.device("cuda"))
    head = f"{arch} {options.mode}, {args.n_layer} layers, {torch.cuda.get_device_name()}"
    print(f"\n{head}, {ceiling / 1e9:,.0f} GB/s", flush=True)
    speculation = Speculation(session, max(1, *options.drafts))  # its kernels, with the session's
    list(session.stream(random_prompt(args, PROMPT_TOKENS), 4, GREEDY))
    steps = {count: step_seconds(session, count, options.repeats * 20) for count in options.tokens}
    print("\n".join(step_lines(steps, ceiling)), flush=True)
    speculation.drafter = RandomDrafter(session, speculation.count)
    passes = {"lookup": measure_passes(speculation, options)}
    if head := random_head(session.model, options.mode):
        print("drafts by the head", flush=True)
        ids = range(DRAFT_VOCAB)
        speculation = Speculation(session, min(speculation.count, 7), head=head, draft_ids=ids)
        passes["head"] = measure_passes(speculation, options)
    texts = {"arch": arch, "mode": options.mode, "gpu": torch.cuda.get_device_name()}
    return texts | {"read_gb_s": round(ceiling / 1e9), "passes": passes}


def random_head(model: Transformer, mode: str) -> Transformer | None:
    """Return a head with random weights for a model, if there are published ones of its family."""
    if family_of(model.args).published_head is None:
        return None
    args = head_args(model.args)
    device = model.norm.weight.device
    return load_model(RandomWeights(args, number_format(mode, args)), device, share=model)


def measure_passes(speculation: Speculation, options: argparse.Namespace) -> list[dict]:
    """Print the table of passes with each number of drafts; return its first columns."""
    sampling, spent = Sampling(options.temperature, seed=0), {}
    for drafts in sorted({0, *options.drafts}):
        if drafts > speculation.count:
            continue
        candidates, start = speculation.candidates(sampling), time.perf_counter()
        if drafts:
            run = speculation.warm_up(drafts, candidates)
        else:
            run = speculation.session.warm_up(candidates)
        print(f"{drafts} drafts: ready in {time.perf_counter() - start:.1f} s", flush=True)
        seconds = pass_seconds(speculation, drafts, options.new_tokens, options.repeats, sampling)
        spent[drafts] = seconds, gpu_seconds(run, 20)  # from where the last answer ended
        if options.kernels:
            print_kernels(run)
    print("\n".join(pass_lines(spent)), flush=True)
    return [
        {"drafts": drafts, "ms": round(spent * 1e3, 3), "graph_ms": round(on_gpu * 1e3, 3)}
        for drafts, (spent, on_gpu) in spent.items()
    ]


def print_kernels(run: Callable[[], None]) -> None:
    """Print start, time and name of each kernel of a captured pass."""
    events = sorted(record_kernels(run), key=lambda event: event[1])
    for name, start, us in events:
        print(f"    {start - events[0][1]:8.1f} {us:7.1f} us  {name[:100]}", flush=True)


# Text ---------------------------------------------------------------------------------------------


def texts(tokenizer) -> dict[str, list[list[int]]]:
    """Return prompts by kind of text."""
    held, noise = (EMBEDDED / "heldout.txt").read_text(), random.Random(0)
    drawn = [[noise.randrange(tokenizer.vocab_size) for _ in range(60)] for _ in range(3)]
    function = tokenizer.encode(FUNCTION)
    return {
        "held-out": [tokenizer.encode(held[at : at + 500]) for at in range(0, 120_000, 40_000)],
        "repeated": [tokenizer.encode(FUNCTION * 3)],
        "random": drawn,
        "alternating": [[*function, *drawn[0], *function, *tokenizer.encode(held[5000:5200])]],
    }


def measure_texts(options: argparse.Namespace) -> None:
    """Print tokens a pass, and the time of plain decoding over that of each way to speculate."""
    checkpoint, device = embedded_checkpoint(), pick_device(options.device)
    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint, device, torch.float32)
    session = Session(model, MAX_SEQ_LEN, SessionOptions(compile=device.type == "cuda"))
    auto, lookup = Speculation(session, auto=True), Speculation(session)
    print("text         sampling  speculate  tokens a pass  accepted  times as fast  same tokens")
    for kind, prompts in texts(tokenizer).items():
        # At temperature 4 the text is random: nearly all drafts are refused.
        for sampling in (GREEDY, Sampling(0.8), Sampling(4.0, top_k=None)):
            plain = [answer(session, ids, sampling) for ids in prompts]
            for name, speculation in (("auto", auto), ("lookup", lookup)):
                counts = dict.fromkeys(("passes", "drafted", "accepted"), 0)
                found = []
                for ids in prompts:
                    found.append(answer(speculation, ids, sampling))
                    for field in counts:
                        counts[field] += speculation.statistics()[field]
                same = all(a == b for (a, _), (b, _) in zip(plain, found, strict=True))
                faster = sum(s for _, s in plain) / sum(s for _, s in found)
                tokens = len(prompts) * (ANSWER - 1) / counts["passes"]
                share = counts["accepted"] / max(1, counts["drafted"])
                verdict = "-" if sampling.temperature else "yes" if same else "NO"
                print(
                    f"{kind:11}  {sampling.temperature:8}  {name:9}  {tokens:13.2f}  {share:8.2f}  "
                    f"{faster:13.2f}  {verdict:>11}",
                    flush=True,
                )


class SideBySide(NamedTuple):
    """Answers that were decoded side by side."""

    tokens: list[list[int]]
    seconds: float  # all steps after the last prompt
    steps: int  # in that time
    drafted: int
    accepted: int


def decode_side_by_side(batch: Batch, prompts: list[list[int]], sampling: Sampling) -> SideBySide:
    """Decode an answer of ANSWER tokens to each prompt; the second of two times."""
    for _ in range(2):
        batch.session.reset()
        sequences = [batch.start(ids, ANSWER, replace(sampling, seed=None)) for ids in prompts]
        found: list[list[int]] = [[] for _ in sequences]
        start, steps = 0.0, 0
        while batch.count:
            batch.prefill()
            start = start or (0.0 if batch.waiting or batch.prefilling else time.perf_counter())
            steps += bool(start)
            for token in batch.step():
                tokens = found[sequences.index(token.sequence)]
                tokens.append(token.token)
                if len(tokens) == ANSWER:
                    batch.end(token.sequence)
    drafted, accepted = (sum(getattr(s, n) for s in sequences) for n in ("drafted", "accepted"))
    return SideBySide(found, time.perf_counter() - start, steps, drafted, accepted)


def measure_side_by_side(count: int, options: argparse.Namespace) -> None:
    """Print what drafts gain for a number of answers side by side."""
    checkpoint, device = embedded_checkpoint(), pick_device(options.device)
    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint, device, torch.float32)
    compiled = device.type == "cuda"
    session = Session(model, MAX_SEQ_LEN, SessionOptions(batch=count, compile=compiled))
    plain, auto = Batch(session), DraftingBatch(Speculation(session, auto=True))
    print(f"{count} answers    sampling  tokens a step  accepted  times as fast  same tokens")
    for kind, prompts in texts(tokenizer).items():
        # Answers to the same prompt begin at different places of it.
        prompts = [prompts[n % len(prompts)][n // len(prompts) :] for n in range(count)]
        for sampling in (GREEDY, Sampling(0.8), Sampling(4.0, top_k=None)):
            before = decode_side_by_side(plain, prompts, sampling)
            after = decode_side_by_side(auto, prompts, sampling)
            verdict = "-" if sampling.temperature else "yes"
            if not sampling.temperature and before.tokens != after.tokens:
                verdict = "NO"
            tokens = count * (ANSWER - 1) / after.steps
            share = after.accepted / max(1, after.drafted)
            print(
                f"{kind:11}  {sampling.temperature:8}  {tokens:13.2f}  {share:8.2f}  "
                f"{before.seconds / after.seconds:13.2f}  {verdict:>11}",
                flush=True,
            )


def answer(
    session: Session | Speculation, ids: list[int], sampling: Sampling
) -> tuple[list[int], float]:
    """Return an answer's tokens, and its seconds after the first token; the second of two."""
    for _ in range(2):  # the first compiles
        session.reset()
        stream = session.stream(ids, ANSWER, replace(sampling, seed=None))
        first = next(stream)
        start = time.perf_counter()
        tokens = [first, *stream]
        seconds = time.perf_counter() - start
    return tokens, seconds


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/speculation.py",
            "python benchmarks/speculation.py --arch Mixtral-8x7B:int8 --layers 8 --drafts 1 3",
            "python benchmarks/speculation.py --texts --answers 1 2 4",
        ),
    )
    add = parser.add_argument
    parser.begin_group("models", "what is measured")
    shapes = f"names of benchmark.py's --arch, with formats ({' '.join(MODELS)})"
    add("--arch", nargs="+", default=MODELS, metavar="NAME:FORMAT", help=shapes)
    parser.add_number("--layers", "build only the first N layers")
    parser.add_flag("--texts", "measure the embedded model on text instead")
    answers = "with --texts: answers side by side (1)"
    add("--answers", type=int, nargs="+", default=(1,), metavar="N", help=answers)
    parser.begin_group("passes", "how they are measured")
    add("--drafts", type=int, nargs="+", default=DRAFTS, metavar="N", help="drafts of a pass")
    add("--tokens", type=int, nargs="+", default=TOKENS, metavar="T", help="tokens of a step")
    parser.add_number("--new_tokens", "tokens of an answer (200)", 200)
    parser.add_number("--repeats", "answers measured (3)", 3)
    add("--json", metavar="FILE", help="write the times of passes; {} becomes the model's name")
    parser.add_flag("--kernels", "also the kernels of a pass")
    add("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (0)")
    parser.begin_group("speed and precision", "how the model is run")
    add_prefill_options(parser)
    add_compile_cache(parser)
    add_decode_kernels(parser)
    add_kv_cache(parser)
    add_device_group(parser)
    parser.set_defaults(batch=1, eager=False, max_seq_len=MAX_SEQ_LEN)
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for numbers out of range."""
    check_counts(options, "layers", "repeats")
    check_counts(options, "new_tokens", least=2, most=MAX_SEQ_LEN - PROMPT_TOKENS)
    for name, least, most in (("drafts", 0, 15), ("tokens", 1, 16), ("answers", 1, 4)):
        if any(not least <= value <= most for value in getattr(options, name)):
            raise ValueError(f"--{name}: each must be from {least} to {most}")


def main() -> None:
    options = (parser := build_parser()).parse_args()
    try:
        check_options(options)
    except ValueError as error:
        parser.error(str(error))
    if options.texts:
        for count in options.answers:
            if count == 1:
                measure_texts(options)
            else:
                measure_side_by_side(count, options)
        return
    require_gpu(parser)
    ceiling = read_bandwidth(torch.device("cuda"))
    for name in options.arch:
        result = measure_shape(name, options, ceiling)
        if options.json:
            text = json.dumps(result, indent=1) + "\n"
            Path(options.json.format(name.partition(":")[0])).write_text(text)
        free_memory(compiled=True)


if __name__ == "__main__":
    main()
