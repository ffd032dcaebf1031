"""Search a layer's fused kernels for races, or for memory errors, by NVIDIA's compute-sanitizer.

    PYTHONPATH=. python tests/races.py                                races in some models
    PYTHONPATH=. python tests/races.py --memory gpt-oss-20b:mxfp4     reads and writes out of bounds

For each MODEL:MODE, two layers with random weights run one token, then each size of a prompt's
chunk, then one token again, and one whose attention has several parts; after them the head and
sampling. A line tells what was found. Exit status 1 if that is anything, or if the run failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from generate import load_model
from models.random_weights import RandomWeights, architecture, first_layers, number_format
from ops.step.draft_check import MOST
from runtime.fused_decode import FusedRunner
from runtime.sampling import sample
from runtime.session import Session, SessionOptions

CASES = (
    "Qwen3-30B-A3B:int4",
    "Qwen3-30B-A3B:bf16",
    "Mixtral-8x7B:int4",
    "gpt-oss-20b:mxfp4",
    "OLMoE-1B-7B:int8",
    "DeepSeek-V2-Lite:bf16",
    "Qwen3.6-35B-A3B:fp8b",
    "Qwen3.6-35B-A3B:q4_k+q8_0",
)
# Parts of the names of our kernels: PyTorch's own are not checked.
KERNELS = (
    *("_multiply_", "join_", "_route", "_sort_pairs", "_combine", "attend_", "_attend_"),
    *("_map_", "merge_", "_merge_", "_update_heads"),
    *("_quantize_token", "_find_best", "_rank", "_draw"),
    *("_begin_pass", "_check_drafts", "_accept"),
)
TIMEOUT = 300  # seconds of a case


def run_layers(case: str) -> None:
    """Run the fused kernels of a model's first layers."""
    name, mode = case.split(":")
    args = first_layers(architecture(name), 2)
    model = load_model(RandomWeights(args, number_format(mode, args)), torch.device("cuda"))
    session = Session(model, 512, SessionOptions(runner_class=FusedRunner))
    runner = FusedRunner(model)
    _, draw, _ = runner.token_steps(sample)
    for count, start in ((1, 0), *((size, 1) for size in runner.prompt_chunks), (1, 100), (1, 500)):
        tokens = torch.ones(1, count, dtype=torch.int64, device="cuda")
        positions = torch.arange(start, start + count, device="cuda").unsqueeze(0)
        last = torch.full((1,), count - 1, device="cuda")
        logits = model(tokens, positions, last, runner=runner)
        draw(session.state, logits, 4)
    begin, verify = runner.pass_steps()
    result = torch.zeros(MOST + 1, dtype=torch.int64, device="cuda")
    for _ in range(2):  # the second takes in what the first has accepted
        inputs = begin(session.state, torch.ones(1, 3, dtype=torch.int64, device="cuda"))
        logits = model(*inputs, all_positions=True, runner=runner)
        verify(session.state, logits, inputs[0], inputs[2], None, 4, result)
    torch.cuda.synchronize()


def search(case: str, tool: str) -> bool:
    """Check a case in a process of its own; print a line. Return whether nothing was found."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "20"]
    for kernel in KERNELS:
        command += ["--kernel-regex", f"kns={kernel}"]
    root = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    if tool == "memcheck":  # each tensor is an allocation, so that its ends are known
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    found = subprocess.run(
        [*command, sys.executable, __file__, "--run", case],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=env,
        check=False,
    )
    summary = re.search(r"(?:RACECHECK|ERROR) SUMMARY: (\d+) .*", found.stdout)
    clean = summary is not None and summary[1] == "0" and found.returncode == 0
    print(f"{case:28} {summary[0] if summary else f'no summary, status {found.returncode}'}")
    if not clean:
        print(found.stdout[-4000:], found.stderr[-2000:], sep="\n", flush=True)
    return clean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=CASES, metavar="MODEL:MODE")
    parser.add_argument("--memory", action="store_true", help="search for memory errors instead")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_layers(*options.cases)
        return
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not in PATH: add the CUDA toolkit's bin")
    tool = "memcheck" if options.memory else "racecheck"
    found = [search(case, tool) for case in options.cases]
    sys.exit(0 if all(found) else 1)


if __name__ == "__main__":
    main()
