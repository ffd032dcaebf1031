"""Long prompts by kernels of ours and by PyTorch alone: the time to the first token, and logits.

    python benchmarks/prompts.py Qwen3-30B-A3B:int4:8 gpt-oss-20b:mxfp4:6 --lengths 200 2048

A case is a model, its number format, and how many of its layers to build. Random weights. The
roofline is the larger of two times: the bytes of all weights (of a long prompt nearly every expert
is chosen) at the measured bandwidth, and the products and attention at PEAK, without the head.

--kernels lists the launches of a layer. --first_turns also times prompts that have no graph yet.
"""

import argparse
import time
from functools import partial

import torch

from benchmarks.cuda_timing import require_gpu
from benchmarks.decode_speed import read_bandwidth
from benchmarks.kernel_profile import launch_lines, record_kernels
from benchmarks.layer_times import read_case
from cli.parser import Parser
from model import Attention, Transformer
from models.random_weights import (
    RandomWeights,
    architecture,
    first_layers,
    free_memory,
    number_format,
    random_prompt,
)
from ops.launch import broken
from ops.products.prompt_rows import gather_rows
from runtime.graphs import GraphCache
from runtime.loading import load_model
from runtime.runner import EagerRunner
from runtime.session import Session, SessionOptions
from runtime.weights import stored_bytes

# Kernels of recurrent layers, most by the names of `try_kernels`: PyTorch alone has none.
RECURRENT = {
    "_short_conv",
    "delta rule",
    "state space",
    "convolution",
    "gated norm",
    "norm of groups",
}
PEAK = 790e12  # FLOP/s in bf16 of a large product on an H100 or H200


def flops_of_token(model: Transformer) -> float:
    """Return the additions and multiplications of a token's products with weights."""
    total = 0
    for block in model.layers:
        for name, module in block.named_modules():
            width = getattr(module, "width", None) or getattr(module, "in_features", None)
            codes = getattr(module, "codes", getattr(module, "weight", None))
            if codes is None or codes.dim() < 2:
                continue
            numbers = codes.shape[-2] * (width or codes.shape[-1])
            is_expert = ".experts." in f".{name}"
            total += 2 * numbers * (model.args.n_active if is_expert else 1)
    return total


def flops_of_attention(model: Transformer, length: int) -> float:
    """Return the additions and multiplications of GQA over a prompt, of scores and of values.

    Other attention counts as none.
    """
    total = 0
    for block in model.layers:
        if isinstance(block.attention, Attention):
            heads, _, width = block.attention.heads
            window = min(block.attention.window or length, length)
            pairs = window * (window + 1) / 2 + (length - window) * window
            total += 4 * heads * width * pairs
    return total


def run_prompt(session: Session, prompt: list[int]) -> torch.Tensor:
    """Run a prompt -> the logits after it."""
    *_, (logits, *_) = session.prefill(0, prompt, 0)
    return logits


def time_prompt(session: Session, prompt: list[int], repeats: int) -> tuple[float, torch.Tensor]:
    """Return the median time of a prompt, s, and the logits after it."""
    found = []
    for _ in range(repeats + 2):  # the second one is captured
        session.reset()
        torch.cuda.synchronize()
        start = time.perf_counter()
        logits = run_prompt(session, prompt)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return sorted(found[2:])[repeats // 2], logits


def first_turn_line(session: Session, prompt: list[int], repeats: int) -> str:
    """Time a prompt that has no graph yet: the host launches each kernel.

    The thread's processor time does not count what other processes take.
    """
    times, own = [], []
    for _ in range(4 * repeats + 2):
        session.reset()
        session.graphs = GraphCache(session.device)
        torch.cuda.synchronize()
        start, began = time.perf_counter(), time.thread_time()
        run_prompt(session, prompt)
        own.append(1e3 * (time.thread_time() - began))
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    times, own = sorted(times[2:]), sorted(own[2:])
    session.reset()
    session.graphs = GraphCache(session.device)
    events = record_kernels(partial(run_prompt, session, prompt))
    busy = sum(duration for _, _, duration in events) / 1e3
    call = call_us(session.device)
    return (
        f"{len(prompt):6} tokens, first turn: {times[2 * repeats]:8.2f} ms (best {times[0]:.2f}), "
        f"of the processor {own[2 * repeats]:.2f} (best {own[0]:.2f}); {len(events)} kernels and "
        f"copies take {busy:.2f}; a call of gather_rows takes the host {call:.1f} us"
    )


def call_us(device: torch.device) -> float:
    """Return the host's time of one launch that was made before, with its allocation, in us."""
    x, found = torch.zeros(1, 128, dtype=torch.bfloat16, device=device), []
    for _ in range(100):
        torch.cuda.synchronize()
        start = time.perf_counter()
        gather_rows(x, None, 1, None)
        found.append(time.perf_counter() - start)
    return 1e6 * sorted(found)[50]


def measure_case(case: tuple[str, str, int], options: argparse.Namespace) -> None:
    arch, mode, layers = case
    args = first_layers(architecture(arch), layers)
    device = torch.device("cuda")
    model = load_model(RandomWeights(args, number_format(mode, args)), device)
    bandwidth = read_bandwidth(device)
    print(f"{arch} {mode}, {layers} layers, {torch.cuda.get_device_name()}", flush=True)
    for length in options.lengths:
        prompt = random_prompt(args, length)
        logits, times = {}, {}
        for name in ("kernels",) if options.kernels_only else ("kernels", "PyTorch"):
            session = Session(
                model, length + 8, SessionOptions(compile=True, prefill_chunk=options.chunk)
            )
            if name == "PyTorch":
                session.prefill_runner = EagerRunner(model)
                broken.update(RECURRENT)
            times[name], logits[name] = time_prompt(session, prompt, options.repeats)
            if options.kernels:
                session.reset()
                events = record_kernels(partial(run_prompt, session, prompt))
                print("\n".join([f"  {name}", *launch_lines(events, layers)]))
            if options.first_turns and name == "kernels":
                print(first_turn_line(session, prompt, options.repeats), flush=True)
            broken.difference_update(RECURRENT)
            del session
        nbytes = sum(stored_bytes(block) for block in model.layers)
        flops = length * flops_of_token(model) + flops_of_attention(model, length)
        bound = max(nbytes / bandwidth, flops / PEAK)
        plain = ""
        if "PyTorch" in times:
            want, got = logits["PyTorch"].float(), logits["kernels"].float()
            difference = f"{((got - want).norm() / want.norm()).item():.1e}"
            wrong = [name for name in logits if not logits[name].isfinite().all()]
            if wrong:  # the difference does not tell whose
                difference = f"none: not finite by {' and by '.join(wrong)}"
            plain = f", PyTorch {times['PyTorch'] * 1e3:8.2f} ms, difference {difference}"
        print(
            f"{length:6} tokens: {times['kernels'] * 1e3:8.2f} ms, roofline {bound * 1e3:7.2f} ms "
            f"({bound / times['kernels']:.2f}){plain}",
            flush=True,
        )
    del model
    free_memory(compiled=False)


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/prompts.py Qwen3-30B-A3B:int4:8 --lengths 200 2048",
            "python benchmarks/prompts.py gpt-oss-20b:mxfp4:6 Qwen3.6-35B-A3B:int4:8",
        ),
    )
    add = parser.add_argument
    add("cases", nargs="+", type=read_case, metavar="ARCH:MODE:LAYERS", help="what to time")
    add("--lengths", nargs="+", type=int, default=[200, 2048], metavar="N", help="of prompts")
    add("--chunk", type=int, metavar="N", help="tokens of a chunk (as many as a session takes)")
    add("--kernels_only", action="store_true", help="do not time PyTorch alone")
    add("--kernels", action="store_true", help="list the launches of a layer")
    add("--first_turns", action="store_true", help="time prompts without a graph, too")
    add("--repeats", type=int, default=5, metavar="N", help="runs measured (5)")
    return parser


@torch.no_grad()
def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    for case in options.cases:
        measure_case(case, options)


if __name__ == "__main__":
    main()
