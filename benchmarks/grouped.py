"""Speed of a prompt's expert products, by number format.

    python benchmarks/grouped.py --tokens 512 2048

Times w13 and w2 of one layer for a number of tokens that are spread evenly over the experts, beside
PyTorch's grouped product of bf16 weights, and checks the result against it. Other tiles than the
kernel's own: `--rows 64 128` and so on time every combination, best first. TFLOP/s count the
multiplications and additions of the products alone.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cuda_timing import graph_seconds, require_gpu
from benchmarks.one_layer import random_experts
from cli.parser import Parser
from formats import FORMATS, PLAIN
from formats.packed import Packed
from model import ExpertLinear, ModelArgs
from models.random_weights import architecture
from ops.products.prompt import choose_prompt_tile, grouped_gemm
from ops.products.prompt_weights import PromptTile

TILE = tuple(field.name for field in fields(PromptTile))
REPEATS = 5


class Result(NamedTuple):
    """Time of one product with one tiling."""

    seconds: float
    tflop_s: float
    gb_s: float  # weights read
    error: float  # relative, of the norm
    product: str  # mode and name
    tile: PromptTile | str

    def __str__(self) -> str:
        return (
            f"{self.product} {self.seconds * 1e3:8.3f} ms {self.tflop_s:5.0f} TFLOP/s "
            f"{self.gb_s:5.0f} GB/s  error {self.error:.1e}  {self.tile}"
        )


def candidates(
    weight: ExpertLinear | Packed, x: Tensor, ends: Tensor, changes: Sequence[dict]
) -> list[tuple[PromptTile | str, Callable]]:
    """Return products of x [N, in] to compare: by tile, or "library"."""
    if isinstance(weight, ExpertLinear):
        arguments = x, ends, {"codes": weight.weight}, "plain", 16, 1
        found = [("library", partial(F.grouped_mm, x, weight.weight.transpose(-2, -1), offs=ends))]
    else:
        format, found = FORMATS[weight.format], []
        ordered = format.grouped_order(x, weight.group)
        arguments = ordered, ends, weight.parts(), format.kind, format.bits, weight.group
    default = choose_prompt_tile(len(x), len(ends), arguments[4], x.shape[1])
    tiles = [replace(default, **change) for change in changes]
    return found + [(tile, partial(grouped_gemm, *arguments, tile=tile)) for tile in tiles]


def measure_product(
    name: str, weight: ExpertLinear | Packed, ends: Tensor, changes: Sequence[dict]
) -> list[Result]:
    """Return a result of each tile, the fastest first. ends: int32 [E], see `grouped_gemm`."""
    plain = weight.unpack().bfloat16() if isinstance(weight, Packed) else weight.weight
    (E, out, width), N = plain.shape, int(ends[-1])
    x = torch.randn(N, width, device="cuda", dtype=torch.bfloat16)
    expected = F.grouped_mm(x, plain.transpose(-2, -1), offs=ends).float()
    nbytes = sum(part.nbytes for part in weight.parameters()) * min(N, E) / E
    found = []
    for tile, product in candidates(weight, x, ends, changes):
        try:
            error = ((product().float() - expected).norm() / expected.norm()).item()
            time = graph_seconds(lambda _, product=product: product(), [None] * 4, REPEATS)
        except Exception as problem:  # too little shared memory, or too few registers
            print(f"{name} {tile}: {str(problem).splitlines()[0]:.80}", flush=True)
            continue
        rates = 2 * N * out * width / time / 1e12, nbytes / time / 1e9
        found.append(Result(time, *rates, error, name, tile))
    return sorted(found, key=lambda result: result.seconds)


def measure(args: ModelArgs, mode: str, tokens: int, changes: Sequence[dict]) -> list[list[Result]]:
    """Return results of w13 and of w2."""
    experts, N = random_experts(args, mode), tokens * args.n_active
    ends = (torch.arange(1, args.n_expert + 1, device="cuda") * N // args.n_expert).int()
    return [
        measure_product(f"{mode:5} {name:4}", experts.get_submodule(name), ends, changes)
        for name in ("w13", "w2")
    ]


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/grouped.py --tokens 512 2048",
            "python benchmarks/grouped.py --mode int8 --rows 64 128 --stages 3 4 --best 3",
        ),
    )
    add = parser.add_argument
    add("--arch", default="Mixtral-8x7B")
    add("--tokens", type=int, nargs="+", default=[512, 2048])
    add("--mode", action="append", choices=(PLAIN, *FORMATS), help="repeatable; default: all")
    add("--best", type=int, default=1, metavar="N", help="print the best N of each")
    for name in TILE:
        add(f"--{name}", type=int, nargs="+", help="see ops.products.prompt_weights.PromptTile")
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    given = {name: getattr(options, name) for name in TILE if getattr(options, name)}
    changes = [
        dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())
    ]
    args = architecture(options.arch)
    print(f"{options.arch}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for tokens, mode in itertools.product(options.tokens, options.mode or (PLAIN, *FORMATS)):
        for results in measure(args, mode, tokens, changes):
            for result in results[: options.best]:
                print(f"{tokens:6} tokens {result}", flush=True)


if __name__ == "__main__":
    main()
