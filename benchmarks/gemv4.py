"""Speed of ops.products.gemv4.dot4, one token's 4-bit products, at models' shapes.

    python benchmarks/gemv4.py --shape "Mixtral w13"

Times the kernel alone in a CUDA graph, over enough different weights that L2 holds none of them,
and checks the last result against dequantized weights. GB/s count the packed bytes with scales and
zeros. Other tilings than the kernel's own: `--pieces 2 4 --block 8 16` and so on time every
combination, best first.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cuda_timing import graph_seconds, require_gpu
from cli.parser import Parser
from formats import FORMATS
from formats.base import Format, Parts
from ops.products.gemv4 import Tiling, dot4_tiling, launch_dot4

MIN_BYTES = 220_000_000  # of all weights together: more than L2 holds


class Shape(NamedTuple):
    """One product of a token."""

    out: int
    width: int
    experts: int  # a token; 0: a dense weight
    rows: int  # of x
    swiglu: bool


SHAPES = {
    "Mixtral w13": Shape(28672, 4096, 2, 1, True),
    "Mixtral w2": Shape(4096, 14336, 2, 2, False),
    "Mixtral wqkv": Shape(6144, 4096, 0, 1, False),
    "Mixtral wo": Shape(4096, 4096, 0, 1, False),
    "Qwen3 w13": Shape(1536, 2048, 8, 1, True),
    "Qwen3 w2": Shape(2048, 768, 8, 8, False),
    "Qwen3 wqkv": Shape(5120, 2048, 0, 1, False),
    "Qwen3 wo": Shape(2048, 4096, 0, 1, False),
    "gpt-oss w13": Shape(5760, 2880, 4, 1, False),
    "gpt-oss w2": Shape(2880, 2880, 4, 4, False),
}
MODES = "int4", "hqq4", "mxfp4"


class Result(NamedTuple):
    """Time of one product with one tiling."""

    seconds: float
    gb_s: float
    error: float  # relative, of the norm
    programs: int
    constants: dict
    tiling: Tiling

    def __str__(self) -> str:
        return (
            f"{self.seconds * 1e6:7.2f} us {self.gb_s:5.0f} GB/s  error {self.error:.1e}  "
            f"{self.programs} programs of {self.constants['J']} pieces, "
            f"{self.constants['BM']} rows, {self.tiling.warps} warps, "
            f"{self.tiling.resident or 'default'} resident"
        )


def random_parts(format: Format, shape: tuple[int, ...], group: int) -> Parts:
    """Return packed weights [copies, out, in] of a model's magnitude. Plain ones would not fit."""
    parts = {}
    for part, (size, dtype) in format.layout(shape, group).items():
        if dtype.is_floating_point:
            high = 4.0 if part == "zero_low" else 0.01
            parts[part] = torch.empty(size, device="cuda", dtype=dtype).uniform_(high / 2, high)
        else:
            exponents = part == "scale" and format.name == "mxfp4"
            ends = (118, 126) if exponents else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
            parts[part] = torch.randint(*ends, size, dtype=dtype, device="cuda")
    return parts


class Product:
    """A shape in a format: its weights, x, and the result to expect of the last call."""

    def __init__(self, shape: Shape, mode: str):
        self.shape, self.format = shape, FORMATS[mode]
        self.group, n = self.format.choose_group(shape.width, None), max(shape.experts, 1)
        layout = self.format.layout((n, shape.out, shape.width), self.group)
        self.nbytes = sum(
            torch.Size(size).numel() * dtype.itemsize for size, dtype in layout.values()
        )
        copies = max(4, -(-MIN_BYTES // self.nbytes))
        parts = random_parts(self.format, (copies * n, shape.out, shape.width), self.group)
        self.x = torch.randn(shape.rows, shape.width, device="cuda", dtype=torch.bfloat16)
        choices = torch.randperm(copies * n, device="cuda").view(copies, n)
        if shape.experts:
            self.arguments = [(list(parts.values()), choice) for choice in choices]
            last = choices[-1]
        else:
            self.arguments = [([part[i] for part in parts.values()], None) for i in range(copies)]
            last = choices.new_tensor([copies - 1])
        self.expected = self.reference({name: part[last] for name, part in parts.items()})

    def reference(self, parts: Parts) -> Tensor:
        """Multiply with dequantized weights in fp64."""
        plain = self.format.unpack(parts, self.group)
        rows = [
            weight.double() @ self.x[n % len(self.x)].double() for n, weight in enumerate(plain)
        ]
        y = torch.stack(rows)
        if not self.shape.swiglu:
            return y
        gate, up = y.chunk(2, dim=1)
        return F.silu(gate) * up

    def kernel(self, tiling: tuple[int, dict]) -> Callable:
        """Return the launch as a function of one of `arguments`."""
        mode = self.format.kind, self.group, self.shape.swiglu
        pdl = torch.cuda.get_device_properties(0).major >= 9
        return lambda argument: launch_dot4(self.x, *argument, mode, tiling, pdl)


def measure(shape: Shape, mode: str, tilings: Sequence[Tiling]) -> list[Result]:
    """Return a result of each tiling, the fastest first."""
    product, found = Product(shape, mode), []
    sms, expected = torch.cuda.get_device_properties(0).multi_processor_count, product.expected
    for tiling in tilings:
        made = dot4_tiling(
            (shape.out, shape.width),
            max(shape.experts, 1),
            product.format.kind,
            shape.swiglu,
            sms,
            tiling,
        )
        kernel = product.kernel(made)
        y = kernel(product.arguments[-1])
        y = y if shape.swiglu else y.sum(0)  # partial sums of split-K
        error = ((y.double() - expected).norm() / expected.norm()).item()
        seconds = graph_seconds(kernel, product.arguments)
        rate = product.nbytes / seconds / 1e9
        found.append(Result(seconds, rate, error, *made, tiling))
    return sorted(found, key=lambda result: result.seconds)


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/gemv4.py --shape 'Mixtral w13'",
            "python benchmarks/gemv4.py --mode int4 --pieces 2 4 --block 8 16",
        ),
    )
    add = parser.add_argument
    add("--shape", action="append", choices=SHAPES, help="repeatable; default: all")
    add("--mode", action="append", choices=MODES, help="repeatable; default: all")
    for name, default in asdict(Tiling()).items():
        add(
            f"--{name}",
            type=int,
            nargs="+",
            default=[default],
            help="see ops.products.gemv4.Tiling",
        )
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    values = [getattr(options, field.name) for field in fields(Tiling)]
    tilings = [Tiling(*combination) for combination in itertools.product(*values)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for shape, mode in itertools.product(options.shape or SHAPES, options.mode or MODES):
        for result in measure(SHAPES[shape], mode, tilings):
            print(f"{shape:13} {mode} {result}", flush=True)


if __name__ == "__main__":
    main()
