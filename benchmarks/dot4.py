"""Speed of kernels.dot4, one token's 4-bit products, at models' shapes: python benchmarks/dot4.py --shape "Mixtral w13"

Times the kernel alone, in a CUDA graph over so many different weights that nothing is read from the cache, and checks
its last result against unpacked weights. GB/s count the packed bytes with scales and zeros. Other cuts of the work than
the kernel's own: --pieces 2 4 --block 8 16 and so on time every combination, best first.
"""

import itertools

import torch
from formats import seconds

import kernels
from command import Parser
from packing import FORMATS

CUT = {"pieces": 0, "block": 0, "resident": 0, "warps": 4}  # of `kernels.dot4_cut`, and its own choice
SHAPES = {  # out, in, experts a token (0: a dense weight), rows of x, gated
    "Mixtral w13": (28672, 4096, 2, 1, True),
    "Mixtral w2": (4096, 14336, 2, 2, False),
    "Mixtral wqkv": (6144, 4096, 0, 1, False),
    "Mixtral wo": (4096, 4096, 0, 1, False),
    "Qwen3 w13": (1536, 2048, 8, 1, True),
    "Qwen3 w2": (2048, 768, 8, 8, False),
    "Qwen3 wqkv": (5120, 2048, 0, 1, False),
    "Qwen3 wo": (2048, 4096, 0, 1, False),
    "gpt-oss w13": (5760, 2880, 4, 1, False),
    "gpt-oss w2": (2880, 2880, 4, 4, False),
}
MODES = "int4", "hqq4", "mxfp4"


def random_parts(name: str, shape: tuple[int, ...], group: int) -> dict[str, torch.Tensor]:
    """Packed weights [copies, out, in], about as large as a model's; made packed, as plain ones would not fit."""
    parts = {}
    for part, (size, dtype) in FORMATS[name].layout(shape, group).items():
        if dtype.is_floating_point:
            low = 4.0 if part == "zero_low" else 0.01
            parts[part] = torch.empty(size, device="cuda", dtype=dtype).uniform_(low / 2, low)
        else:
            exponents = part == "scale" and name == "mxfp4"
            ends = (118, 126) if exponents else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
            parts[part] = torch.randint(*ends, size, dtype=dtype, device="cuda")
    return parts


def measure(shape: tuple, name: str, cuts: list[dict]) -> list[tuple]:
    """(seconds, GB/s, relative error, programs, constants, cut) of each cut, the fastest first."""
    (out, width, pairs, rows, gated), row, n = shape, FORMATS[name], max(shape[2], 1)
    group = row.choose_group(width, None)
    size = sum(torch.Size(s).numel() * d.itemsize for s, d in row.layout((n, out, width), group).values())
    copies = max(4, -(-220_000_000 // size))
    parts = random_parts(name, (copies * n, out, width), group)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    choices = torch.randperm(copies * n, device="cuda").view(copies, n)
    where = [(list(parts.values()), c) for c in choices]
    if not pairs:
        where = [([part[i] for part in parts.values()], None) for i in range(copies)]
    last = choices[-1] if pairs else choices.new_tensor([copies - 1])
    plain = row.unpack({key: part[last] for key, part in parts.items()}, group)
    want = torch.stack([w.double() @ x[i % len(x)].double() for i, w in enumerate(plain)])
    want = torch.nn.functional.silu(want[:, : out // 2]) * want[:, out // 2 :] if gated else want
    found, gpu = [], torch.cuda.get_device_properties(0)
    for cut in cuts:
        made = kernels.dot4_cut(out, width, n, row.kind, gated, gpu.multi_processor_count, **cut)

        def product(choice: tuple, made: tuple = made) -> torch.Tensor:
            return kernels.dot4_launch(x, *choice, row.kind, group, gated, gpu.major >= 9, made)

        got = product(where[-1]) if gated else product(where[-1]).sum(0)
        time, error = seconds(product, where), ((got.double() - want).norm() / want.norm()).item()
        found.append((time, size / time / 1e9, error, *made, cut))
    return sorted(found, key=lambda result: result[0])


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/dot4.py --shape 'Mixtral w13'",
            "python benchmarks/dot4.py --mode int4 --pieces 2 4 --block 8 16",
        ),
    )
    parser.add_argument("--shape", action="append", choices=SHAPES, help="repeatable; default: all")
    parser.add_argument("--mode", action="append", choices=MODES, help="repeatable; default: all")
    for name, default in CUT.items():
        parser.add_argument(f"--{name}", type=int, nargs="+", default=[default], help="see kernels.dot4_cut")
    return parser


def main() -> None:
    options = build_parser().parse_args()
    grid = itertools.product(*(getattr(options, name) for name in CUT))
    cuts = [dict(zip(CUT, cut, strict=True)) for cut in grid]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for shape, mode in itertools.product(options.shape or SHAPES, options.mode or MODES):
        for time, rate, error, programs, constants, cut in measure(SHAPES[shape], mode, cuts):
            told = f"{programs} programs of {constants['J']} pieces, {constants['BM']} rows, {cut['warps']} warps"
            told += f", {cut['resident'] or 'default'} resident"
            print(f"{shape:13} {mode} {time * 1e6:7.2f} us {rate:5.0f} GB/s  error {error:.1e}  {told}", flush=True)


if __name__ == "__main__":
    main()
