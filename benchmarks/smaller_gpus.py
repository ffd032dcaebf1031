"""Prompts and decoding with what a smaller GPU has: equal results, and what that costs here.

    python benchmarks/smaller_gpus.py

For each MODEL:MODE, the first layers with random weights run prompts, decode steps and a pass over
8 drafts: as this GPU, and passing for another (MOE_FAST_GPU, ops/gpu.py), each in a process of its
own. sm_120 has 99 KB of shared memory; sm_86 also lacks programmatic dependent launch and the
library's grouped product. A prompt runs four times; the last time it is a
replay of its CUDA graph. An error is the relative difference of logits.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.cuda_timing import require_gpu
from cli.parser import Parser
from formats.kv_cache import KV_CACHES
from models.random_weights import RandomWeights, architecture, first_layers, number_format
from runtime.kernel_choice import choose_runner
from runtime.loading import load_model
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions

CASES = (  # model, format, layers, kind of cache
    "Qwen3-30B-A3B:int4:4:plain",
    "Qwen3-30B-A3B:bf16:4:plain",
    "Qwen3-30B-A3B:hqq2:4:plain",
    "Mixtral-8x7B:int4:4:int8",
    "Mixtral-8x7B:bf16:2:plain",
    "Qwen3.6-35B-A3B:int4:4:plain",
    "GLM-4.7-Flash:bf16:4:plain",
    "gemma-4-26B-A4B:bf16:6:int8",
    "gpt-oss-20b:mxfp4:4:plain",
    "DeepSeek-V2-Lite:bf16:3:int8",
)
GPUS = "", "sm_120", "sm_86"  # "": this one
LENGTHS = 20, 48, 300, 1024, 2048
DRAFTS, MAX_SEQ_LEN, STEPS = 8, 2304, 64


def timed(run) -> tuple[object, float]:
    """Return the result and the milliseconds of a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    found = run()
    end.record()
    torch.cuda.synchronize()
    return found, start.elapsed_time(end)


def run_case(case: str, path: Path) -> None:
    """Write logits and times of a case on this GPU, or the one it passes for."""
    name, mode, layers, cache = case.split(":")
    args = first_layers(architecture(name), int(layers))
    model = load_model(RandomWeights(args, number_format(mode, args)), torch.device("cuda"))
    runner = choose_runner(model, "auto")
    options = SessionOptions(compile=True, cache_class=KV_CACHES[cache], runner_class=runner)
    session = Session(model, MAX_SEQ_LEN, options)
    greedy, found, times = Sampling(temperature=0), {}, {"runner": runner.__name__}
    ids = torch.randint(args.vocab_size, (MAX_SEQ_LEN,), generator=torch.Generator().manual_seed(0))
    ids = ids.tolist()
    list(session.stream(ids[:5], 3, greedy))
    for length in LENGTHS:
        for _ in range(4):
            session.reset()
            run = lambda n=length: [part[0] for part in session.prefill(0, ids[:n], 0)][-1]  # noqa: E731
            logits, milliseconds = timed(run)
        found[f"prompt of {length}"] = logits.float().cpu()
        times[f"prompt of {length}"] = milliseconds
    tokens = torch.tensor([ids[:DRAFTS]], device="cuda")
    positions = torch.arange(LENGTHS[-1], LENGTHS[-1] + DRAFTS, device="cuda").unsqueeze(0)
    last = torch.tensor([DRAFTS - 1], device="cuda")
    found["drafts"] = model(tokens, positions, last, runner=session.runner).float().cpu()
    session.reset()
    stream = session.stream(ids[:300], STEPS + 1, greedy)
    next(stream)
    times["step"] = timed(lambda: list(stream))[1] / STEPS
    save_file(found, path, {"times": json.dumps(times)})


def compare(case: str, folder: Path) -> bool:
    """Print a case's rows -> whether all of its processes ended well."""
    reference, good = None, True
    for gpu in GPUS:
        path = folder / "result"
        path.unlink(missing_ok=True)
        environment = os.environ | ({"MOE_FAST_GPU": gpu} if gpu else {})
        command = [sys.executable, __file__, "--case", case, "--output", str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        notes = [line for line in done.stderr.splitlines() if "plain form" in line]
        if done.returncode:
            print(f"{case} {gpu}: FAILED\n{done.stderr[-1500:]}", flush=True)
            good = False
            continue
        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            times = json.loads(file.metadata()["times"])
        reference = reference or found
        errors = {
            name: ((logits - reference[name]).norm() / reference[name].norm()).item()
            for name, logits in found.items()
        }
        row = {name: f"{times[name]:.3f} ms" for name in times if name != "runner"}
        row |= {f"{name} error": f"{error:.1e}" for name, error in errors.items()}
        print(f"{case} {gpu or 'this GPU'} {times['runner']} {json.dumps(row)}", flush=True)
        print("\n".join(notes), end="\n" if notes else "", flush=True)
    return good


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/smaller_gpus.py",
            "python benchmarks/smaller_gpus.py --case Mixtral-8x7B:int4:4:int8",
        ),
    )
    parser.add_argument("--case", help="MODEL:MODE:LAYERS:CACHE; default: a list of them")
    parser.add_argument("--output", type=Path, help="run one case in this process, write it here")
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    if options.output:
        run_case(options.case, options.output)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        cases = [options.case] if options.case else CASES
        good = [compare(case, Path(folder)) for case in cases]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
