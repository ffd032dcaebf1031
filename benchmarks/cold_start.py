"""Seconds from a process's start to its first token, with an empty compile cache and a full one.

    python benchmarks/cold_start.py --arch Qwen3-30B-A3B --mode int4 --layers 8

Each start is a process of its own, with random weights: `weights` is the time to make them. A
thread looks at the main thread's stack every 10 ms, and counts it as one of KINDS, so the parts add
up. Kernels of one layer serve all, so that few layers compile what all do.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

from cli.benchmark_options import add_measure_options
from cli.compile_helper import start_before_imports
from cli.parser import Parser

INTERVAL = 0.01
# Part -> what a frame's file name contains. WHOLE: parts to which all calls below them belong.
WHOLE = {"imports": ("<frozen importlib",), "Inductor": ("triton_heuristics.py",)}
KINDS = {
    "our kernels": ("/triton/",),
    "Inductor": ("/torch/_inductor/", "/torch/_dynamo/", "/torch/_functorch/"),
    "weights": ("/runtime/loading.py", "/models/random_weights.py"),
    "capture": ("/runtime/graphs.py",),
}
STARTED = "MOE_FAST_STARTED"  # a variable of the environment: when the process was started


class Sampler:
    """Counts what the main thread does."""

    def __init__(self):
        self.counts: collections.Counter[str] = collections.Counter()
        self.ended, self.main = threading.Event(), threading.main_thread().ident
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        last = time.perf_counter()
        while not self.ended.wait(INTERVAL):
            frame, files = sys._current_frames().get(self.main), []
            while frame is not None:
                files.append(frame.f_code.co_filename)
                frame = frame.f_back
            now = time.perf_counter()
            self.counts[kind_of(files)] += now - last
            last = now

    def stop(self) -> dict[str, float]:
        """Return the seconds of each part."""
        self.ended.set()
        self.thread.join()
        return {name: round(seconds, 2) for name, seconds in self.counts.most_common()}


def kind_of(files: list[str]) -> str:
    """Return the part that a stack belongs to. files: of its frames, the innermost first."""
    for name, parts in WHOLE.items():
        if any(part in file for file in files for part in parts):
            return name
    found = (
        name for file in files for name, parts in KINDS.items() if any(p in file for p in parts)
    )
    return next(found, "other")


def start_once(options: argparse.Namespace) -> dict:
    """Return seconds to the first token of this process, and what they were spent on."""
    started, sampler = float(os.environ[STARTED]), Sampler()
    start_before_imports(options)
    import torch

    from benchmarks.decode_speed import open_session
    from models.random_weights import architecture, first_layers, random_prompt
    from runtime.sampling import Sampling

    args = architecture(options.arch)
    args = first_layers(args, options.layers or args.n_layer)
    options.max_seq_len = options.max_seq_len or 512
    session = open_session(args, options, torch.device("cuda"))
    ready = time.time() - started
    stream = session.stream(random_prompt(args, options.prompt_len, 0), 2, Sampling(seed=0))
    next(stream)
    first = time.time() - started
    parts = sampler.stop()
    list(stream)
    return {"first token": round(first, 2), "loaded": round(ready, 2)} | parts


def start(options: argparse.Namespace, folder: str) -> dict:
    """`start_once` in a process of its own, with this compile cache."""
    given = [value for value in sys.argv[1:] if value != "--json"]
    command = [sys.executable, __file__, *given, "--compile_cache", folder, "--once"]
    environment = os.environ | {STARTED: str(time.time()), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def build_parser() -> Parser:
    parser = Parser(
        "Measure seconds to the first token of a process, without and with a compile cache.",
        (
            "python benchmarks/cold_start.py --arch Qwen3-30B-A3B --mode int4 --layers 8",
            "python benchmarks/cold_start.py --arch gpt-oss-20b --mode mxfp4",
        ),
    )
    add_measure_options(parser)
    parser.begin_group("internal", "used by this command itself")
    parser.add_flag("--once", "start in this process, and print one line of JSON")
    return parser


def main() -> None:
    options = build_parser().parse_args()
    if options.once:
        print(json.dumps(start_once(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in ("empty cache", "full cache"):
            found = start(options, folder)
            print(f"{options.arch} {options.mode}, {name}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
