"""Seconds from a process's start to its first token, with an empty compile cache and a full one.

    python benchmarks/cold_start.py --arch Qwen3-30B-A3B --mode int4 --layers 8
    python benchmarks/cold_start.py --arch Qwen3-30B-A3B --mode int4 --checkpoint /tmp/qwen3

Each start is a process of its own, with random weights: `weights` is the time to make them. With
--checkpoint, generate.py of the working directory starts from a checkpoint on disk, with a
tokenizer of the model's size: `weights` is the time to read them. A thread looks at the main
thread's stack every 10 ms, and counts it as one of KINDS, so the parts add up. Kernels of one layer
serve all, so that few layers compile what all do.
"""

import argparse
import collections
import itertools
import json
import os
import runpy
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from cli.benchmark_options import add_measure_options
from cli.parser import Parser
from host.compile_helper import start_before_imports

INTERVAL = 0.01
LEAST = 0.04
# Part -> what a frame's file name contains. WHOLE: parts to which all calls below them belong.
WHOLE = {"imports": ("<frozen importlib",), "Inductor": ("triton_heuristics.py",)}
KINDS = {
    "our kernels": ("/triton/",),
    "Inductor": ("/torch/_inductor/", "/torch/_dynamo/", "/torch/_functorch/"),
    "weights": ("/runtime/loading.py", "/models/random_weights.py"),
    "capture": ("/runtime/graphs.py",),
    "CUDA": ("/torch/cuda/",),
    "tokenizer": ("/tokenizer.py",),
    "plan": ("/memory/", "/models/"),
}
SLOW = "torch._dynamo", "torch._inductor", "sympy", "transformers", "huggingface_hub"  # imports
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
        """Return the seconds of each part; files of less than LEAST seconds are "other"."""
        self.ended.set()
        self.thread.join()
        parts: collections.Counter[str] = collections.Counter()
        for name, seconds in self.counts.items():
            is_file = name.endswith(".py")
            parts["other" if is_file and seconds < LEAST else name] += seconds
        return {name: round(seconds, 2) for name, seconds in parts.most_common()}


def kind_of(files: list[str]) -> str:
    """Return the part that a stack belongs to, or the innermost file of ours.

    files: of its frames, the innermost first.
    """
    for name, parts in WHOLE.items():
        if any(part in file for file in files for part in parts):
            return name
    found = (
        name for file in files for name, parts in KINDS.items() if any(p in file for p in parts)
    )
    root = os.getcwd()
    own = (file.removeprefix(f"{root}/") for file in files if file.startswith(root))
    return next(found, next(own, "other"))


class FirstWrite:
    """A text file that calls `seen` before the first text is written to it."""

    def __init__(self, file: TextIO, seen: Callable[[], None]):
        self.file, self.seen = file, seen

    def write(self, text: str) -> int:
        self.seen()
        self.seen = lambda: None
        return self.file.write(text)

    def __getattr__(self, name: str):
        return getattr(self.file, name)


def generate_once(options: argparse.Namespace) -> dict:
    """`start_once` by generate.py of the working directory, from a checkpoint."""
    started, sampler, found = float(os.environ[STARTED]), Sampler(), {}

    def seen() -> None:
        found["first token"] = round(time.time() - started, 2)
        found.update(sampler.stop())

    given = {
        "--checkpoint_path": options.checkpoint,
        "--device": options.device,
        "--max_seq_len": options.max_seq_len or 512,
        "--max_new_tokens": 2,
        "--seed": 0,
        "--prompt": "a" * options.prompt_len,
    }
    sys.argv = ["generate.py", *(f"{name}={value}" for name, value in given.items())]
    compiled = ["--compile", f"--compile_cache={options.compile_cache}"]
    sys.argv += ["--eager"] if options.eager else compiled
    output, sys.stdout = sys.stdout, FirstWrite(sys.stdout, seen)
    try:
        runpy.run_path("generate.py", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    sys.stdout = output
    return found | {"imported": [name for name in SLOW if name in sys.modules]}


def random_tokenizer(size: int) -> dict:
    """Return a byte-level tokenizer.json of this many tokens, each made of letters alone."""
    letters = string.ascii_letters + string.digits
    pairs = [a + b for a, b in itertools.product(letters, repeat=2)]
    tokens = [*letters, *pairs, *map("".join, itertools.product(pairs, repeat=2))][:size]
    halves = ((token, len(token) // 2) for token in tokens[len(letters) :])
    steps = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {
        "type": "BPE",
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [f"{token[:half]} {token[half:]}" for token, half in halves],
    }
    return {"version": "1.0", "model": model, "pre_tokenizer": steps, "decoder": steps}


def make_checkpoint(options: argparse.Namespace) -> None:
    """Write a checkpoint with random weights in the model's shapes, and a tokenizer."""
    import torch

    from benchmarks.load_checkpoint import write_checkpoint
    from models.random_weights import RandomWeights, architecture, first_layers, number_format

    args = architecture(options.arch)
    args = first_layers(args, options.layers or args.n_layer)
    source = RandomWeights(args, number_format(options.mode, args))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_checkpoint(source, options.checkpoint, device)
    tokenizer = json.dumps(random_tokenizer(args.vocab_size))
    (options.checkpoint / "tokenizer.json").write_text(tokenizer)


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
    """Start a process of its own, with this compile cache; return what it found."""
    given = [value for value in sys.argv[1:] if value != "--json"]
    command = [sys.executable, __file__, *given, "--compile_cache", folder, "--once"]
    path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {STARTED: str(time.time()), "PYTHONPATH": path}
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
    parser.begin_group("checkpoints", "how generate.py of the working directory starts")
    path = "write random weights there, unless that was done, and start generate.py from them"
    parser.add_path("--checkpoint", path)
    parser.add_number("--starts", "starts with a full cache (1)", 1)
    parser.begin_group("internal", "used by this command itself")
    parser.add_flag("--once", "start in this process, and print one line of JSON")
    return parser


def main() -> None:
    options = build_parser().parse_args()
    if options.once:
        print(json.dumps(generate_once(options) if options.checkpoint else start_once(options)))
        return
    if options.checkpoint and not options.checkpoint.exists():
        make_checkpoint(options)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.compile_cache or Path(temporary)
        is_full = folder.exists() and any(folder.iterdir())
        for name in [*([] if is_full else ["empty cache"]), *["full cache"] * options.starts]:
            found = start(options, str(folder))
            print(f"{options.arch} {options.mode}, {name}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
