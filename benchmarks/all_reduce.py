"""Time of a sum over ranks by each method and message size, recorded in a CUDA graph as a decode step has it.

    torchrun --standalone --nproc_per_node=4 benchmarks/all_reduce.py --json

Prediction: for the [1, D] of a decode step (8 to 16 KB) one-shot is fastest, since each GPU reads all others once and
waits twice; from some hundred KB on two-shot is, which reads and writes 2 / N of that; NCCL's rings pay for steps. Also
checked: every method gives the same bits on all ranks. GB/s are message bytes over time. Without GPUs only the
library's (gloo) is timed, by the clock.

A block's sums are followed by a residual and its norm (`collective.fixed_join`), which are timed with them for a
token's [1, D]. Prediction: 1 us more than the sum, since the second kernel is set up while the first one waits; and
0.5 us more as a block has it, with experts to be added up and a router's scores.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

import collective
import world
from command import Parser
from layers import weighted_sum

WIDTHS = 2048, 4096, 6144
KILOBYTES = 4, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768


def seconds_on_cpu(work: Callable[[], object], calls: int = 20) -> float:
    """Time of a sum by the clock, of so many in a row."""
    work()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begin) / calls


def of_all(x: torch.Tensor) -> list[torch.Tensor]:
    """Each rank's x, on the host."""
    tensors = [torch.empty_like(x) for _ in range(world.size())]
    dist.all_gather(tensors, x)
    return tensors


def same_bits(method: str, x: torch.Tensor) -> bool:
    """Whether all ranks get the same sum of their own random numbers, and the right one, several times in a row."""
    good = True
    for _ in range(3):
        own = torch.randn_like(x)
        total = world.sum_over_ranks(method, own).cpu()
        right = torch.stack(of_all(own.cpu())).float().sum(0)
        good &= all(torch.equal(total, other) for other in of_all(total))
        good &= near(total, right)
    return good


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether it is that but for roundings to bf16."""
    return ((got.float() - want).norm() / want.norm()).item() < 1e-2


def joins(D: int, dtype: torch.dtype, device: torch.device, methods: list[str]) -> dict:
    """A sum of a token's [1, D], a residual and its norm by each method, and whether all ranks get the same bits, and
    the right ones. Then the same as a block has it: by the method that was chosen, of two experts' terms (of plain
    weights in `dtype`, of packed ones in fp32), with a router of eight."""
    generator = torch.Generator(device).manual_seed(D)  # all ranks' are the same, but for y, terms and their weights
    x, rows = (torch.randn(n, D, dtype=dtype, device=device, generator=generator) for n in (1, 8))
    y, terms = (torch.randn(*shape, D, dtype=dtype, device=device) for shape in ((1,), (1, 2)))
    weights, rest = torch.rand(1, 2, device=device), (1.0, rows[0], None, 1e-5)

    def join(method: str) -> tuple[torch.Tensor, ...]:
        return collective.fixed_join(x, world.sum_over_ranks(method, y), *rest, None)

    works = {method: (partial(join, method), y) for method in methods if world.can_sum(method, y.nbytes)}
    for name, some in {"as a block has it": terms, "as a packed block has it": terms.float()}.items():
        work = partial(world.sum_and_join, x, some, weights, *rest, rows)
        works[name] = work, weighted_sum(some, weights)
    row = {"D": D}
    for name, (work, own) in works.items():
        total, normed, scores = (part.cpu() for part in work())
        found = torch.cat([part.flatten() for part in (total, normed, scores)])
        good = all(torch.equal(found, other) for other in of_all(found))
        right = x.float().cpu() + torch.stack(of_all(own.float().cpu())).sum(0)
        good &= near(total, right) and near(normed, F.rms_norm(right, (D,), rows[0].float().cpu(), 1e-5))
        if scores.numel():
            good &= near(scores, F.linear(normed.float(), rows.float().cpu()))
        row[name] = {"us": 1e6 * world.seconds(work), "same_bits": good}
    return row


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
            work = partial(world.sum_over_ranks, method, x)
            time_of_one = world.seconds(work) if device.type == "cuda" else seconds_on_cpu(work)
            row[method] = {"us": 1e6 * time_of_one, "gb_s": x.nbytes / time_of_one / 1e9,
                           "same_bits": same_bits(method, x)}  # fmt: skip
        rows.append(row)
    world.choose(dtype, device)
    joined = [joins(D, dtype, device, methods) for D in WIDTHS] if device.type == "cuda" else []
    if world.is_main():
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        result = {"gpu": gpu, "ranks": world.size(), "dtype": options.dtype, "torch": torch.__version__}
        result |= {"rows": rows, "joins": joined}
        if options.json:
            print(json.dumps(result))
        else:
            print(f"{world.size()} x {gpu}, {options.dtype}: us (GB/s)")
            print("      KB" + "".join(f"{method:>22}" for method in methods))
            for row in rows:
                cells = [f"{row[m]['us']:.1f} ({row[m]['gb_s']:.1f})" if m in row else "" for m in methods]
                print(f"{row['bytes'] >> 10:8}" + "".join(f"{cell:>22}" for cell in cells))
            for row in joined:
                times = ", ".join(f"{name} {cell['us']:.1f}" for name, cell in row.items() if name != "D")
                print(f"sum of {row['D']} numbers, residual and norm, us: {times}")
            cells = [(name, cell) for row in rows + joined for name, cell in row.items() if isinstance(cell, dict)]
            bad = sorted({name for name, cell in cells if not cell["same_bits"]})
            print(f"not the same bits on all ranks: {', '.join(bad)}" if bad else "the same bits on all ranks")
    world.stop()
    return 0


def main() -> int:
    return world.attempt(command)


if __name__ == "__main__":
    sys.exit(main())
