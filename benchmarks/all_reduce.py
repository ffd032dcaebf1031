"""Time of an all-reduce by method and message size, in a CUDA graph as in a decode step.

    torchrun --standalone --nproc_per_node=4 benchmarks/all_reduce.py --json

Prediction: one-shot is fastest for the [1, D] of a decode step (8 to 16 KB), since each GPU reads
all others once and waits twice. Two-shot is fastest from some hundred KB on, since it reads and
writes 2 / N of that. NCCL's rings pay for their steps. The script also checks that every method
gives the same bits on all ranks. GB/s are message bytes over time. Without GPUs only the library
(gloo) is timed, by the clock.

A block's all-reduces are followed by a residual add and a norm
(`ops.products.fixed_join`). Both together are timed for a token's [1, D].
Prediction: 1 us more than the all-reduce, since the second kernel starts while the first one waits;
0.5 us more if it also computes a router's scores, as in a block. In fused decode kernels a product
sends its rows itself, and the next kernel receives them; both are timed together, after the product
alone. Prediction: 1.5 us more than the product.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cli.command import command
from cli.parser import Parser
from ops.declared import Routing
from ops.products.dense import dense_product
from ops.products.fixed_join import NextNorm, fixed_join
from ops.products.join import Added, NormRouter
from ops.products.weights import plain_weight
from parallel import process_group
from parallel.all_reduce import (
    all_reduce_add,
    all_reduce_add_norm,
    all_reduce_add_router,
    can_sum,
    choose_all_reduce,
    graph_seconds,
    inbox_of,
    methods,
    sum_over_ranks,
)
from parallel.heartbeat import fail

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WIDTHS = 2048, 4096, 6144
KILOBYTES = 4, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768
EXPERTS, ACTIVE = 8, 2  # rows of the router, experts of the token
MANY_EXPERTS = 128
HEADS = 1024  # numbers of the token that a fused product multiplies
EPS = 1e-5


# All-reduce ---------------------------------------------------------------------------------------


def clock_seconds(work: Callable[[], object], calls: int = 20) -> float:
    """Return the mean time of a call by the clock."""
    work()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begin) / calls


def gather_ranks(x: Tensor) -> list[Tensor]:
    """Return each rank's x, on the host."""
    tensors = [torch.empty_like(x) for _ in range(process_group.size())]
    dist.all_gather(tensors, x)
    return tensors


def same_bits(method: str, x: Tensor) -> bool:
    """Whether all ranks get the same and the right sum of random numbers, three times in a row."""
    good = True
    for _ in range(3):
        own = torch.randn_like(x)
        total = sum_over_ranks(method, own).cpu()
        expected = torch.stack(gather_ranks(own.cpu())).float().sum(0)
        good &= all(torch.equal(total, other) for other in gather_ranks(total))
        good &= is_close(total, expected)
    return good


def is_close(got: Tensor, expected: Tensor) -> bool:
    """Whether the difference is no more than rounding to bf16."""
    return ((got.float() - expected).norm() / expected.norm()).item() < 1e-2


def measure_size(nbytes: int, dtype: torch.dtype, device: torch.device) -> dict:
    """Return the row of a message size: by method us, gb_s and same_bits."""
    x = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
    row = {"bytes": x.nbytes}
    for method in methods(device):
        if not can_sum(method, x.nbytes):
            continue
        work = partial(sum_over_ranks, method, x)
        seconds = graph_seconds(work) if device.type == "cuda" else clock_seconds(work)
        row[method] = {
            "us": 1e6 * seconds,
            "gb_s": x.nbytes / seconds / 1e9,
            "same_bits": same_bits(method, x),
        }
    return row


# All-reduce + residual add + norm -----------------------------------------------------------------


class JoinInputs:
    """One token's tensors. x, weight and router are the same on all ranks, the others are not."""

    def __init__(self, D: int, dtype: torch.dtype, device: torch.device):
        own = {"dtype": dtype, "device": device}
        shared = own | {"generator": torch.Generator(device).manual_seed(D)}
        self.x = torch.randn(1, D, **shared)
        self.routers = torch.randn(MANY_EXPERTS, D, **shared)
        self.router = self.routers[:EXPERTS]
        self.heads = torch.randn(1, HEADS, **own)
        self.wo = torch.randn(D, HEADS, **own) * HEADS**-0.5
        self.y = self.heads @ self.wo.T
        self.norm = 1.0, self.router[0], None, EPS  # scale, weight, bias, eps

    def by_method(self, method: str) -> tuple[Tensor, ...]:
        """All-reduce y by a method, then add and norm."""
        added = Added(y=sum_over_ranks(method, self.y))
        return fixed_join(self.x, added, NextNorm(*self.norm[1:]), scale=self.norm[0])

    def as_in_a_block(self) -> tuple[Tensor, ...]:
        """The same by the chosen method, with a router's scores."""
        return all_reduce_add_norm(self.x, self.y, *self.norm, self.router)

    def product(self) -> Tensor:
        """The product of a rank by itself, as fused decode kernels compute it."""
        return dense_product(self.heads, plain_weight(self.wo))

    def sent(self) -> Tensor | None:
        """The same, sent to all ranks: None. Or y, if it cannot be sent."""
        (inbox,) = inbox_of(self.x)
        if inbox is None:
            return self.y
        return dense_product(self.heads, plain_weight(self.wo), send=inbox)

    def before_experts(self, experts: int) -> tuple[Tensor, ...]:
        """What fused decode kernels do between attention and experts: wo, then one kernel."""
        indices = torch.empty(1, ACTIVE, dtype=torch.int64, device=self.x.device)
        rows, routing = self.routers[:experts], Routing(ACTIVE, True)
        before = NormRouter(self.router[0], EPS, rows, routing)
        return all_reduce_add_router(self.x, self.sent(), 1.0, before, indices)

    def after_experts(self) -> tuple[Tensor, ...]:
        """What they do after the experts: w2, then a kernel without a norm."""
        return (all_reduce_add(self.x, self.sent(), 1.0),)

    def is_correct(self, results: tuple[Tensor, ...], own: Tensor) -> bool:
        """Whether all ranks have the same and the right results. own: this rank's summand."""
        total, *rest = (part.cpu() for part in results)
        found = torch.cat([part.flatten().float() for part in (total, *rest)])
        router = self.routers.float().cpu()
        good = all(torch.equal(found, other) for other in gather_ranks(found))
        expected = self.x.float().cpu() + torch.stack(gather_ranks(own.float().cpu())).sum(0)
        good &= is_close(total, expected)
        if rest:
            normed, scores = rest
            good &= is_close(normed, F.rms_norm(expected, router[0].shape, router[0], EPS))
            if scores.numel():
                rows = router[: scores.numel()]
                good &= is_close(scores, F.linear(normed.float(), rows))
        return good


def reset_token_inbox() -> None:
    """Let `inbox_of` serve tokens of another D.

    All ranks call it when all that was sent is received, and replay no graph captured before.
    """
    state = process_group.state()
    if (inbox := state.token_inbox) is not None:
        torch.cuda.synchronize()
        dist.barrier()
        inbox.memory.zero_()
        inbox.calls.zero_()
        torch.cuda.synchronize()
        dist.barrier()
    state.token_dim = 0


def measure_joins(D: int, dtype: torch.dtype, device: torch.device) -> dict:
    """Return the row of a width: us and same_bits by method, and as in a block."""
    inputs = JoinInputs(D, dtype, device)
    works = {
        method: (partial(inputs.by_method, method), inputs.y)
        for method in methods(device)
        if can_sum(method, inputs.y.nbytes)
    }
    works["as a block has it"] = inputs.as_in_a_block, inputs.y
    reset_token_inbox()
    for experts in (EXPERTS, MANY_EXPERTS):
        work = partial(inputs.before_experts, experts)
        works[f"fused, before {experts} experts"] = work, inputs.y
    works["fused, after experts"] = inputs.after_experts, inputs.y
    row = {"D": D}
    if inbox_of(inputs.x) != [None]:
        row["product"] = {"us": 1e6 * graph_seconds(inputs.product), "same_bits": True}
    for name, (work, own) in works.items():
        good = inputs.is_correct(work(), own)
        row[name] = {"us": 1e6 * graph_seconds(work), "same_bits": good}
    return row


# Command ------------------------------------------------------------------------------------------


def print_table(result: dict) -> None:
    rows, joins = result["rows"], result["joins"]
    columns = [name for name in rows[0] if name != "bytes"]
    print(f"{result['ranks']} x {result['gpu']}, {result['dtype']}: us (GB/s)")
    print("      KB" + "".join(f"{method:>22}" for method in columns))
    for row in rows:
        cells = [
            f"{row[method]['us']:.1f} ({row[method]['gb_s']:.1f})" if method in row else ""
            for method in columns
        ]
        print(f"{row['bytes'] >> 10:8}" + "".join(f"{cell:>22}" for cell in cells))
    for row in joins:
        times = [f"{name} {cell['us']:.1f}" for name, cell in row.items() if name != "D"]
        print(f"sum of {row['D']} numbers, residual and norm, us: {', '.join(times)}")
    cells = [item for row in rows + joins for item in row.items() if isinstance(item[1], dict)]
    bad = sorted({name for name, cell in cells if not cell["same_bits"]})
    if bad:
        print(f"not the same bits on all ranks: {', '.join(bad)}")
    else:
        print("the same bits on all ranks")


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "torchrun --standalone --nproc_per_node=4 benchmarks/all_reduce.py --json",
            "torchrun --standalone --nproc_per_node=2 benchmarks/all_reduce.py --device cpu"
            " --dtype fp32",
        ),
    )
    add = parser.add_argument
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--dtype", default="bf16", choices=DTYPES)
    add("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def measure(options: argparse.Namespace, device: torch.device) -> dict:
    """Return what --json prints."""
    dtype, on_gpu = DTYPES[options.dtype], device.type == "cuda"
    torch.manual_seed(process_group.rank())
    rows = [measure_size(kilobytes << 10, dtype, device) for kilobytes in KILOBYTES]
    choose_all_reduce(dtype, device)
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "ranks": process_group.size(),
        "dtype": options.dtype,
        "torch": torch.__version__,
        "rows": rows,
        "joins": [measure_joins(D, dtype, device) for D in WIDTHS] if on_gpu else [],
    }


@command(fail)
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    device = process_group.start(options.device)
    if process_group.size() == 1:
        raise ValueError(
            "one process has no other rank: start several by torchrun --nproc_per_node"
        )
    result = measure(options, device)
    if process_group.is_main():
        if options.json:
            print(json.dumps(result))
        else:
            print_table(result)
    process_group.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
