"""How much a decode step's time differs between answers, and what the GPU's clocks are meanwhile.

    python benchmarks/step_variation.py --arch Qwen3-30B-A3B --mode int4

Each row is one answer of a session: the same prompt several times, other prompts, after a pause,
without clearing the cache before, after a kernel of n programs, and while other cores of the host
are busy, so that its clocks rise: a GPU reads launches from host memory. On an H200 one graph's
step took 1.264 or 1.296 ms, and neither the batch's size nor another capture decided it: these are
the other things that differ between two answers. Clocks are the mean of what nvidia-smi reports
every 20 ms while steps run.
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.cuda_timing import require_gpu
from benchmarks.decode_speed import open_session
from cli.benchmark_options import add_measure_options
from cli.parser import Parser
from models.random_weights import architecture, first_layers, random_prompt
from runtime.sampling import Sampling
from runtime.session import Session

GREEDY = Sampling(temperature=0)
QUERY = "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "temperature.memory"
HEADER = "answer                        us a step  SM MHz  memory MHz    W   C  memory C"
PROGRAMS = 1, 3, 66, 131, 132, 133, 1000


class Clocks:
    """Lines of nvidia-smi, with the time at which each arrived."""

    def __init__(self, device: int):
        line = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
        self.process = subprocess.Popen(
            [*line, "-lms", "20", "-i", str(device)], stdout=subprocess.PIPE, text=True
        )
        self.lines: list[tuple[float, list[float]]] = []
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            fields = (field.strip() for field in line.split(","))
            values = [float(f) if f.replace(".", "").isdigit() else float("nan") for f in fields]
            self.lines.append((time.perf_counter(), values))

    def mean(self, start: float, end: float) -> list[float]:
        """Return the mean of each value between two times; none if no line arrived."""
        found = [values for at, values in self.lines if start < at < end]
        return [statistics.fmean(column) for column in zip(*found, strict=True)]


def time_answer(session: Session, prompt: list[int], count: int) -> tuple[float, float]:
    """Return when the first and the last token of an answer arrived."""
    times = [time.perf_counter() for _ in session.stream(prompt, count, GREEDY)]
    return times[0], times[-1]


def run_programs(count: int) -> None:
    """Run a kernel with this many programs: an element-wise one has 512 elements each."""
    torch.empty(512 * count, device="cuda").fill_(1.0)


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep this many cores busy within."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: 0"]) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(options: argparse.Namespace) -> None:
    """Print a row for each answer."""
    args = architecture(options.arch)
    args = first_layers(args, options.layers or args.n_layer)
    session = open_session(args, options, torch.device("cuda"))
    prompts = [random_prompt(args, options.prompt_len, seed) for seed in range(4)]
    clocks = Clocks(torch.cuda.current_device())
    list(session.stream(prompts[0], 2, GREEDY))  # compiles
    print(HEADER)

    def row(name: str, prompt: list[int], before: Callable[[], object] = session.reset) -> None:
        before()
        start, end = time_answer(session, prompt, options.new_tokens)
        us = (end - start) / (options.new_tokens - 1) * 1e6
        found = "".join(
            f"{value:{width}.0f}"
            for value, width in zip(clocks.mean(start, end), (8, 12, 5, 4, 10), strict=False)
        )
        print(f"{name:28} {us:10.1f}{found}", flush=True)

    def after(work: Callable[[], object]) -> Callable[[], None]:
        def before() -> None:
            session.reset()
            work()

        return before

    for _ in range(options.repeats):
        row("the same prompt", prompts[0])
    for n, prompt in enumerate(prompts):
        row(f"prompt {n}", prompt)
    for seconds in (0.2, 2.0):
        row(f"after {seconds} s", prompts[0], after(lambda: time.sleep(seconds)))  # noqa: B023
    for n in range(4):  # the prompt's prefix is in the cache
        row("cache not cleared", prompts[n % 2], lambda: None)
    row("after a synchronization", prompts[0], after(torch.cuda.synchronize))
    for count in PROGRAMS:
        row(f"after {count} programs", prompts[0], after(lambda: run_programs(count)))  # noqa: B023
    with busy_cores((os.cpu_count() or 2) // 2):
        for _ in range(options.repeats):
            row("beside busy cores", prompts[0])
    for _ in range(options.repeats):
        row("the same prompt", prompts[0])
    clocks.process.terminate()


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/step_variation.py --arch Qwen3-30B-A3B --mode int4",
            "python benchmarks/step_variation.py --arch OLMoE-1B-7B --repeats 10",
        ),
    )
    add_measure_options(parser)
    return parser


def main() -> None:
    parser = build_parser()
    options = parser.parse_args()
    require_gpu(parser)
    measure(options)


if __name__ == "__main__":
    main()
