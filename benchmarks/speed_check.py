"""Check decode speed against the last committed table: python benchmarks/speed_check.py

Three models at reduced depth cover an 8-bit product (Mixtral int8), kernels that read few bytes
(Qwen3 bf16) and the 4-bit kernel (Qwen3 int4). The check takes under four minutes on one H200 with
an empty compiler cache. It compares tokens/s, compiled graphs and recompiles with
benchmarks/speed_check.json.
"""

import datetime
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import (
    clear_compilation_metrics,
    counters,
    get_compilation_metrics,
)

from benchmarks.decode_speed import measure, read_bandwidth
from cli.benchmark_options import build_parser as benchmark_parser
from cli.parser import Parser
from models.random_weights import architecture, first_layers, free_memory

CASES = (("Mixtral-8x7B", "int8"), ("Qwen3-30B-A3B", "bf16"), ("Qwen3-30B-A3B", "int4"))
LAYERS = 8
MAX_SLOWDOWN = 0.03  # of tokens/s
TABLE = Path(__file__).with_suffix(".json")


# Measuring ---------------------------------------------------------------------------------------


def measure_case(arch: str, mode: str, layers: int, bandwidth: float) -> dict:
    """Decode as benchmark.py does. bandwidth: of the GPU, bytes a second."""
    options = benchmark_parser().parse_args(
        ["--arch", arch, "--mode", mode, "--layers", str(layers)]
    )
    counters.clear()
    clear_compilation_metrics()
    args = first_layers(architecture(arch), layers)
    result = measure(args, options, bandwidth)
    reasons = [metrics.recompile_reason for metrics in get_compilation_metrics()]
    graphs = counters["stats"]["unique_graphs"]
    free_memory(compiled=True)
    kept = "arch", "mode", "layers", "tok_s", "ms", "kernels_per_layer", "compile_s"
    return {name: result[name] for name in kept} | {
        "graphs": graphs,
        "recompiles": sum(reason is not None for reason in reasons),
    }


def measure_all(layers: int) -> dict:
    """Measure every case; return what the table holds."""
    device = torch.device("cuda")
    bandwidth = read_bandwidth(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": current_commit(),
        "read_gb_s": bandwidth / 1e9,
        "rows": [measure_case(*case, layers, bandwidth) for case in CASES],
    }


def current_commit() -> str | None:
    """Return the commit of the working tree, with "+" if files have changed; None without git."""
    command = ["git", "describe", "--always", "--dirty=+"]
    try:
        run = subprocess.run(command, cwd=TABLE.parent, capture_output=True, text=True)
    except OSError:
        return None
    return run.stdout.strip() or None


# Comparing ---------------------------------------------------------------------------------------


def find_problems(now: dict, before: dict) -> list[str]:
    """Return what is slower by more than MAX_SLOWDOWN, or recompiles more, than in the table."""
    problems = []
    for row, old in paired_rows(now, before):
        name = f"{row['arch']} {row['mode']}"
        if old is None:
            continue
        if row["tok_s"] < (1 - MAX_SLOWDOWN) * old["tok_s"]:
            slower = 1 - row["tok_s"] / old["tok_s"]
            problems.append(f"{name} is {slower:.1%} slower")
        for what in ("graphs", "recompiles"):
            if row[what] > old[what]:
                problems.append(f"{name}: {row[what]} {what} instead of {old[what]}")
    return problems


def paired_rows(now: dict, before: dict) -> list[tuple[dict, dict | None]]:
    """Pair each row with the table's row of the same model, mode and depth."""
    key = lambda row: (row["arch"], row["mode"], row["layers"])  # noqa: E731
    known = {key(row): row for row in before.get("rows", ())}
    return [(row, known.get(key(row))) for row in now["rows"]]


def format_table(now: dict, before: dict) -> str:
    """Return the rows, with the table's figures in parentheses."""
    lines = [describe("now", now)]
    if before:
        lines.append(describe("table", before))
    lines.append(
        f"{'model':22} {'layers':>6} {'tokens/s':>17} {'ms a step':>15} {'change':>7} "
        f"{'graphs':>8} {'recompiles':>10} {'kernels a layer':>15}"
    )

    def cell(row: dict, old: dict | None, name: str, form: str) -> str:
        values = [row[name]] + ([old[name]] if old else [])
        texts = ["-" if value is None else format(value, form) for value in values]
        return texts[0] + (f" ({texts[1]})" if old else "")

    for row, old in paired_rows(now, before):
        change = f"{row['tok_s'] / old['tok_s'] - 1:+.1%}" if old else "new"
        lines.append(
            f"{row['arch'] + ' ' + row['mode']:22} {row['layers']:6} "
            f"{cell(row, old, 'tok_s', '.1f'):>17} {cell(row, old, 'ms', '.4f'):>15} {change:>7} "
            f"{cell(row, old, 'graphs', 'd'):>8} {cell(row, old, 'recompiles', 'd'):>10} "
            f"{cell(row, old, 'kernels_per_layer', '.1f'):>15}"
        )
    return "\n".join(lines)


def describe(title: str, table: dict) -> str:
    return (
        f"{title}: {table['gpu']}, {table['read_gb_s']:.0f} GB/s, torch {table['torch']}, "
        f"{table['date']}, commit {table['commit']}"
    )


# Command -----------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(
        "Check decode speed against the last committed table.",
        (
            "python benchmarks/speed_check.py",
            "python benchmarks/speed_check.py --write",
        ),
    )
    add = parser.add_argument
    add("--layers", type=int, default=LAYERS, metavar="N", help=f"depth; default {LAYERS}")
    add("--write", action="store_true", help=f"replace {TABLE.name} by this run's figures")
    add("--json", type=Path, metavar="FILE", help="also write this run's figures there")
    return parser


def main() -> int:
    """Run the command: exit code 1 if a model is slower or recompiles more."""
    options = (parser := build_parser()).parse_args()
    if not torch.cuda.is_available():
        parser.error("speed_check.py needs a CUDA GPU")
    before = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    now = measure_all(options.layers)
    print(format_table(now, before))
    if options.json:
        options.json.write_text(json.dumps(now, indent=1) + "\n")
    if options.write:
        TABLE.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    if before and before["gpu"] != now["gpu"]:
        print("the table is of another GPU: not compared; --write replaces it", file=sys.stderr)
        return 0
    problems = find_problems(now, before)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
