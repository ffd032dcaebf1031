"""Speed of a prompt's expert products in each number format: python benchmarks/grouped.py --tokens 512 2048

Times w13 and w2 of one layer for so many tokens, spread evenly over the experts, beside PyTorch's grouped product of
bf16 weights, and checks the result against it. Other cuts of the work than the kernel's own: --BM 64 128 and so on time
every combination, best first. TFLOP/s count the multiplications and additions of the products alone.
"""

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from formats import random_experts, seconds

import grouped_kernel
from command import Parser
from packing import FORMATS, PLAIN, grouped_order
from shapes import architecture

CUT = "BM", "BN", "BK", "num_warps", "num_stages"  # of `grouped_kernel.grouped_cut`


def measure(args, mode: str, tokens: int, cuts: list[dict]) -> list[tuple]:
    """(seconds, TFLOP/s, GB/s of weights, relative error, name, cut) of each product and cut, the fastest first."""
    experts, N, found = random_experts(args, mode), tokens * args.n_active, []
    ends = (torch.arange(1, args.n_expert + 1, device="cuda") * N // args.n_expert).int()
    for name in ("w13", "w2"):
        module, rows = experts.get_submodule(name), []
        plain = module.weight if mode == PLAIN else module.unpack().bfloat16()
        out, width = plain.shape[1:]
        x = torch.randn(N, width, device="cuda", dtype=torch.bfloat16)
        library = partial(F.grouped_mm, x, plain.transpose(-2, -1), offs=ends)
        want, products = library().float(), []
        arguments = x, ends, {"codes": plain}, "plain", 16, 1
        if mode == PLAIN:
            products = [("library", library)]
        else:
            row = FORMATS[mode]
            arguments = grouped_order(x, row.bits, module.group), ends, module.parts(), row.kind, row.bits, module.group
        default = grouped_kernel.grouped_cut(N, args.n_expert, arguments[4])
        products += [(cut, partial(grouped_kernel.grouped, *arguments, cut=default | cut)) for cut in cuts]
        size = sum(part.nbytes for part in module.parameters()) * min(N, args.n_expert) / args.n_expert
        for cut, product in products:
            try:
                error = ((product().float() - want).norm() / want.norm()).item()
                time = seconds(lambda _, product=product: product(), [None] * 4, repeats=5)
                rows.append((time, 2 * N * out * width / time / 1e12, size / time / 1e9, error, name, cut))
            except Exception as problem:  # a cut that needs more shared memory or registers than there are
                print(f"{mode} {name} {cut}: {str(problem).splitlines()[0]:.80}", flush=True)
        found += sorted(rows, key=lambda row: row[0])
    return found


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/grouped.py --tokens 512 2048",
            "python benchmarks/grouped.py --mode int8 --BM 64 128 --num_stages 3 4 --best 3",
        ),
    )
    parser.add_argument("--arch", default="Mixtral-8x7B")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--mode", action="append", choices=(PLAIN, *FORMATS), help="repeatable; default: all")
    parser.add_argument("--best", type=int, default=1, metavar="N", help="print the best N of each")
    for name in CUT:
        parser.add_argument(f"--{name}", type=int, nargs="+", help="see grouped_kernel.grouped_cut")
    return parser


def main() -> None:
    options = build_parser().parse_args()
    given = {name: getattr(options, name) for name in CUT if getattr(options, name)}
    cuts = [dict(zip(given, cut, strict=True)) for cut in itertools.product(*given.values())]
    args = architecture(options.arch)
    print(f"{options.arch}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for tokens, mode in itertools.product(options.tokens, options.mode or (PLAIN, *FORMATS)):
        printed = {"w13": 0, "w2": 0}
        for time, rate, speed, error, name, cut in measure(args, mode, tokens, cuts):
            printed[name] += 1
            if printed[name] <= options.best:
                told = f"{time * 1e3:8.3f} ms {rate:5.0f} TFLOP/s {speed:5.0f} GB/s  error {error:.1e}  {cut or ''}"
                print(f"{tokens:6} tokens {mode:5} {name:4} {told}", flush=True)


if __name__ == "__main__":
    main()
