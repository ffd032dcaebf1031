"""Time of a sum over ranks by each method and message size, recorded in a CUDA graph as a decode step has it.

    torchrun --standalone --nproc_per_node=4 benchmarks/all_reduce.py --json

Prediction: for the [1, D] of a decode step (8 to 16 KB) one-shot is fastest, since each GPU reads all others once and
waits twice; from some hundred KB on two-shot is, which reads and writes 2 / N of that; NCCL's rings pay for steps. Also
checked: every method gives the same bits on all ranks. GB/s are message bytes over time. Without GPUs only the
library's (gloo) is timed, by the clock.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

import world
from command import Parser

KILOBYTES = 4, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768


def seconds_on_cpu(x: torch.Tensor, calls: int = 20) -> float:
    """Time of one of the library's sums by the clock, of so many in a row."""
    world.sum_over_ranks("library", x)
    begin = time.perf_counter()
    for _ in range(calls):
        world.sum_over_ranks("library", x)
    return (time.perf_counter() - begin) / calls


def same_bits(method: str, x: torch.Tensor) -> bool:
    """Whether all ranks get the same sum of their own random numbers, and the right one, several times in a row."""
    good = True
    for _ in range(3):
        own = torch.randn_like(x)
        total = world.sum_over_ranks(method, own).cpu()
        totals, parts = ([torch.empty_like(total) for _ in range(world.size())] for _ in range(2))
        dist.all_gather(totals, total)
        dist.all_gather(parts, own.cpu())
        right = torch.stack(parts).float().sum(0)
        good &= all(torch.equal(total, other) for other in totals)
        good &= ((total.float() - right).norm() / right.norm()).item() < 1e-2
    return good


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "torchrun --standalone --nproc_per_node=4 benchmarks/all_reduce.py --json",
            "torchrun --standalone --nproc_per_node=2 benchmarks/all_reduce.py --device cpu --dtype fp32",
        ),
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    return parser


def command() -> int:
    options = build_parser().parse_args()
    device = world.start(options.device)
    if world.size() == 1:
        raise ValueError("one process has nobody to add to: start several with torchrun --nproc_per_node")
    dtype, rows, methods = (
        {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype],
        [],
        world.methods(device),
    )
    torch.manual_seed(world.rank())
    for kilobytes in KILOBYTES:
        x = torch.zeros((kilobytes << 10) // dtype.itemsize, dtype=dtype, device=device)
        row = {"bytes": x.nbytes}
        for method in methods:
            if not world.can_sum(method, x.nbytes):
                continue
            time_of_one = world.seconds(method, x) if device.type == "cuda" else seconds_on_cpu(x)
            row[method] = {"us": 1e6 * time_of_one, "gb_s": x.nbytes / time_of_one / 1e9,
                           "same_bits": same_bits(method, x)}  # fmt: skip
        rows.append(row)
    if world.is_main():
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        result = {"gpu": gpu, "ranks": world.size(), "dtype": options.dtype, "torch": torch.__version__, "rows": rows}
        if options.json:
            print(json.dumps(result))
        else:
            print(f"{world.size()} x {gpu}, {options.dtype}: us (GB/s)")
            print("      KB" + "".join(f"{method:>22}" for method in methods))
            for row in rows:
                cells = [f"{row[m]['us']:.1f} ({row[m]['gb_s']:.1f})" if m in row else "" for m in methods]
                print(f"{row['bytes'] >> 10:8}" + "".join(f"{cell:>22}" for cell in cells))
            bad = sorted({m for row in rows for m in methods if m in row and not row[m]["same_bits"]})
            print(f"not the same bits on all ranks: {', '.join(bad)}" if bad else "the same bits on all ranks")
    world.stop()
    return 0


def main() -> int:
    return world.attempt(command)


if __name__ == "__main__":
    sys.exit(main())
