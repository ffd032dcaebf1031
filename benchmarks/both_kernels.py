"""Decode speed by the fused kernels and by Inductor's, in one run.

    python benchmarks/both_kernels.py
    python benchmarks/both_kernels.py Qwen3-30B-A3B:int4 gpt-oss-20b:mxfp4 --layers 8

Each model decodes as benchmark.py does, first with --decode_kernels fused, then with inductor.
"""

import torch

from benchmarks.cuda_timing import require_gpu
from benchmarks.decode_speed import measure, read_bandwidth
from cli.benchmark_options import build_parser as benchmark_parser
from cli.parser import Parser
from models.random_weights import architecture, first_layers, free_memory

MIXTRAL, QWEN = "Mixtral-8x7B", "Qwen3-30B-A3B"
CASES = tuple(f"{name}:{mode}" for name in (MIXTRAL, QWEN) for mode in ("bf16", "int8", "int4"))
KERNELS = "fused", "inductor"


def speed(name: str, mode: str, kernels: str, layers: int | None, bandwidth: float) -> float:
    """Return tokens/s. bandwidth: of the GPU, bytes a second."""
    given = ["--arch", name, "--mode", mode, "--decode_kernels", kernels]
    options = benchmark_parser().parse_args(given)
    args = architecture(name)
    found = measure(first_layers(args, layers or args.n_layer), options, bandwidth)["tok_s"]
    free_memory(compiled=True)
    return found


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/both_kernels.py",
            "python benchmarks/both_kernels.py gpt-oss-20b:mxfp4 --layers 8",
        ),
    )
    add = parser.add_argument
    add("cases", nargs="*", default=CASES, metavar="NAME:MODE", help="models with their formats")
    add("--layers", type=int, metavar="N", help="build only the first N layers")
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    bandwidth = read_bandwidth(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, {bandwidth / 1e9:.0f} GB/s, torch {torch.__version__}")
    print("| model, weights | fused | Inductor | ratio |\n|---|---|---|---|", flush=True)
    for case in options.cases:
        name, _, mode = case.partition(":")
        rates = [speed(name, mode, kernels, options.layers, bandwidth) for kernels in KERNELS]
        fused, inductor = rates
        row = f"| {name}, {mode} | {fused:.0f} | {inductor:.0f} | {fused / inductor:.2f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
