"""Experts that the CPU multiplies: GB/s, beside what the same threads read, and a call's overhead.

python benchmarks/cpu_experts.py --format int4 mxfp4 --shape qwen3.6 --tokens 1 8

--steps also plays decode steps' requests, as a GPU makes them.
"""

import itertools
import platform
import threading
import time
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from cli.parser import Parser
from formats import FORMATS, PLAIN
from model import swiglu
from offload.cpu_experts import CPUExperts, CPUThreads, HostWeight
from offload.cpu_share import compiled_server
from ops.step.cpu_share import ANSWERED, ASKED, BUSY, LAYER, PAIRS, STOP, TOKENS, new_mailbox
from runtime.host_memory import use_huge_pages

SHAPES = {  # dim, width, experts, active
    "qwen3.6": (2048, 512, 256, 8),
    "qwen3-30b": (2048, 768, 128, 8),
    "gpt-oss": (2880, 2880, 128, 4),
    "mixtral": (4096, 14336, 8, 2),
}
ALIGN = 128  # bytes; of parts in a blob


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/cpu_experts.py --format int4 mxfp4 --tokens 1 8",
            "python benchmarks/cpu_experts.py --shape mixtral --format hqq2 --threads 7 15",
        ),
    )
    add = parser.add_argument
    add("--format", nargs="+", default=["int4"], choices=[PLAIN, *FORMATS], help="of weights")
    add("--shape", nargs="+", default=["qwen3.6"], choices=SHAPES, help="sizes of which model")
    add("--tokens", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N", help="at once")
    add("--threads", nargs="+", type=int, metavar="N", help="default: cores less one")
    add("--march", default="native", help="instructions to compile for")
    add("--memory", type=float, default=4.0, metavar="GB", help="of experts")
    parser.add_flag("--small_pages", "pages of 4 KB, not of 2 MB")
    add("--steps", type=int, default=0, metavar="N", help="also emulate N decode steps")
    add("--layers", type=int, default=12, metavar="N", help="a step has as many layers")
    add(
        "--gap", type=float, default=30, metavar="US", help="the GPU works as long between requests"
    )
    add("--seconds", type=float, default=0.3, metavar="S", help="of each measurement")
    return parser


def processor() -> str:
    """Return the CPU's name and its cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names)} logical cores"


def packed(format: str, rows: int, width: int) -> tuple[dict[str, Tensor], int]:
    """Return parts of one random expert [rows, width], and the group. Its rows repeat."""
    few = torch.randn(min(rows, 32), width) * width**-0.5
    if format == PLAIN:
        parts, group = {"weight": few.bfloat16()}, 1
    else:
        group = FORMATS[format].choose_group(width, None)
        parts = FORMATS[format].pack(few, group)
    repeats = -(-rows // len(few))
    return {name: part.repeat(repeats, 1)[:rows] for name, part in parts.items()}, group


class Pool:
    """Layers of equal experts, each a blob of its own, in more memory than caches hold."""

    def __init__(
        self,
        format: str,
        shape: tuple[int, ...],
        threads: CPUThreads,
        memory: float,
        huge_pages: bool = True,
    ):
        dim, width, experts, self.active = shape
        one = {"w13": packed(format, 2 * width, dim), "w2": packed(format, dim, width)}
        starts, size = {}, 0
        for name, (parts, _) in one.items():
            for part, tensor in parts.items():
                starts[name, part] = size
                size += -(-tensor.nbytes // ALIGN) * ALIGN
        layers = max(1, round(memory * 1e9 / size / experts))
        self.blobs = torch.empty(layers, experts, size, dtype=torch.uint8)
        if huge_pages:
            use_huge_pages(self.blobs)
        for name, (parts, _) in one.items():
            for part, tensor in parts.items():
                at = starts[name, part]
                self.blobs[..., at : at + tensor.nbytes] = tensor.flatten().view(torch.uint8)
        self.layers = []
        for blobs in self.blobs:
            weights = []
            for name, (parts, group) in one.items():
                views = {}
                for part, tensor in parts.items():
                    at = starts[name, part]
                    view = blobs[:, at : at + tensor.nbytes].view(tensor.dtype)
                    views[part] = view.view(experts, *tensor.shape)
                weights.append(HostWeight(views, format, group))
            self.layers.append(CPUExperts(*weights, swiglu, threads))
        self.dim, self.experts = dim, experts

    def calls(self, tokens: int):
        """Yield arguments of a call for each layer in turn, forever; experts are random."""
        x, y = torch.randn(tokens, self.dim), torch.empty(tokens, self.dim)
        of_pair = torch.arange(tokens, dtype=torch.int32).repeat_interleave(self.active)
        weights = torch.full((len(of_pair),), 1 / self.active)
        choices = []
        for _ in range(64):
            rows = [torch.randperm(self.experts)[: self.active] for _ in range(tokens)]
            choices.append(torch.cat(rows).int())
        for layer, chosen in zip(
            itertools.cycle(self.layers), itertools.cycle(choices), strict=False
        ):
            yield layer, (x, chosen, of_pair, weights, y), len(chosen.unique())

    def measure(self, tokens: int, seconds: float) -> tuple[float, float]:
        """Return GB/s and microseconds a layer."""
        calls, spent, nbytes, count = self.calls(tokens), 0.0, 0, 0
        for _ in range(len(self.layers)):
            layer, arguments, _ = next(calls)
            layer(*arguments)
        while spent < seconds:
            layer, arguments, distinct = next(calls)
            start = time.perf_counter()
            layer(*arguments)
            spent += time.perf_counter() - start
            nbytes += distinct * layer.nbytes
            count += 1
        return nbytes / spent / 1e9, spent / count * 1e6


def overhead(threads: CPUThreads, pause: float) -> float:
    """Return the microseconds of a call whose products are tiny. pause: seconds before each."""
    parts, group = packed("int4", 64, 32)
    down, _ = packed("int4", 32, 32)
    weights = [
        HostWeight({name: part[None] for name, part in found.items()}, "int4", group)
        for found in (parts, down)
    ]
    layer = CPUExperts(*weights, swiglu, threads)
    x, y = torch.randn(1, 32), torch.empty(1, 32)
    index = torch.zeros(1, dtype=torch.int32)
    times = []
    for _ in range(2000):
        resume = time.perf_counter() + pause
        while time.perf_counter() < resume:
            pass
        start = time.perf_counter()
        layer(x, index, index, torch.ones(1), y)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e6


def emulate_steps(pool: Pool, threads: CPUThreads, layers: int, gap: float, steps: int) -> str:
    """Decode steps without a GPU, whose part this thread plays through the mailbox.

    gap: seconds of the GPU's own work between an answer and the next request. Return for each
    number of misses what a request takes beside its products.
    """
    box = new_mailbox(pool.active, torch.empty(0, pool.dim))
    box.weights.fill_(1.0)
    found, number = [], 0
    thread = threading.Thread(target=compiled_server(pool.layers, box), daemon=True)
    thread.start()
    flags, now = memoryview(box.flags.numpy()), time.perf_counter  # one number takes 0.05 us
    flags[TOKENS] = 1
    for misses in range(1, pool.active + 1):
        times, busy = [], flags[BUSY]
        for layer in range(layers * steps):
            box.experts[:misses] = torch.randperm(pool.experts)[:misses].int()
            flags[LAYER], flags[PAIRS] = layer % len(pool.layers), misses
            resume, number = now() + gap, number + 1
            while now() < resume:
                pass
            start = now()
            flags[ASKED] = number
            while flags[ANSWERED] != number:
                pass
            times.append((now() - start) * 1e6)
        products = (flags[BUSY] - busy) / len(times)
        times.sort()
        found.append(
            f"{misses}: {products:.0f} + {fmean(times) - products:.1f} (median of both "
            f"{times[len(times) // 2]:.0f}, 99% {times[len(times) * 99 // 100]:.0f})"
        )
    flags[STOP] = 1
    thread.join()
    return "; ".join(found)


def main() -> None:
    args = build_parser().parse_args()
    print(processor())
    pools = [CPUThreads(n, args.march) for n in args.threads or [None]]
    for threads in pools:
        pauses = ", ".join(f"{overhead(threads, p):.1f}" for p in (0, 1e-4))
        print(
            f"{threads.count} threads, {threads.instructions}: a tiny call takes {pauses} us (at "
            "once, 100 us after the last)",
            flush=True,
        )
    print("| model | format | threads | tokens | GB/s | read bandwidth | of it | us a layer |")
    print("|---|---|---|---|---|---|---|---|")
    for model, format in itertools.product(args.shape, args.format):
        for threads in pools:
            pool = Pool(format, SHAPES[model], threads, args.memory, not args.small_pages)
            for tokens in args.tokens:
                bandwidth = threads.read_bandwidth(pool.blobs, 1)
                rate, us = pool.measure(tokens, args.seconds)
                bandwidth = max(bandwidth, threads.read_bandwidth(pool.blobs, 1))
                print(
                    f"| {model} | {format} | {threads.count} | {tokens} | {rate:.1f} | "
                    f"{bandwidth:.1f} | {rate / bandwidth:.2f} | {us:.0f} |",
                    flush=True,
                )
            if args.steps:
                gap = args.gap * 1e-6
                found = emulate_steps(pool, threads, args.layers, gap, args.steps)
                print(f"us of a request by misses, products + the rest: {found}", flush=True)


if __name__ == "__main__":
    main()
