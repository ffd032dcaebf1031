"""Decode speed by the fused kernels and by Inductor's, in one run.

    python benchmarks/both_kernels.py
    python benchmarks/both_kernels.py Qwen3-30B-A3B:int4 gpt-oss-20b:mxfp4 --layers 8
    python benchmarks/both_kernels.py Nemotron-3-Nano-30B-A3B:int4 --check 8
    torchrun --standalone --nproc_per_node=2 benchmarks/both_kernels.py Trinity-Mini-26B-A3B:int4

Each model decodes as benchmark.py does, first with --decode_kernels fused, then with inductor. On
several ranks it is sharded, as there.

--check N first compares logits of the first N layers: CHECKED tokens one by one, by the fused
kernels and by plain PyTorch, both against plain PyTorch in fp32. Printed are the tenth percentile
and the median of the differences. Where two experts' scores are nearly equal, rounding may choose
another expert, and random weights have many such scores: then a token's logits differ by much more,
and in a recurrent model the next tokens' too. So a figure alone says little: kernels are right if
theirs are as small as plain PyTorch's.
"""

import torch

from benchmarks.cuda_timing import require_gpu
from benchmarks.decode_speed import measure, read_bandwidth, token_logits
from cli.benchmark_options import build_parser as benchmark_parser
from cli.parser import Parser
from models.random_weights import (
    RandomWeights,
    architecture,
    first_layers,
    free_memory,
    number_format,
)
from parallel import process_group
from runtime.kernel_choice import fused_runner
from runtime.loading import load_model

MIXTRAL, QWEN = "Mixtral-8x7B", "Qwen3-30B-A3B"
CASES = tuple(f"{name}:{mode}" for name in (MIXTRAL, QWEN) for mode in ("bf16", "int8", "int4"))
KERNELS = "fused", "inductor"
CHECKED = 64  # tokens


def speed(name: str, mode: str, kernels: str, layers: int | None, bandwidth: float) -> dict:
    """Return `measure`'s result. bandwidth: of the GPU, bytes a second."""
    given = ["--arch", name, "--mode", mode, "--decode_kernels", kernels]
    options = benchmark_parser().parse_args(given)
    args = architecture(name)
    found = measure(first_layers(args, layers or args.n_layer), options, bandwidth)
    free_memory(compiled=True)
    return found


def check(name: str, mode: str, layers: int, device: torch.device) -> None:
    """Print by how much of their norm the logits of both differ from those in fp32."""
    args = first_layers(architecture(name), layers)
    model = load_model(RandomWeights(args, number_format(mode, args)), device)
    ours = token_logits(model, fused_runner(model)(model), CHECKED)
    plain = token_logits(model, None, CHECKED)
    exact = token_logits(model.float(), None, CHECKED)
    found = []
    for logits in ours, plain:
        differences = (logits - exact).norm(dim=-1) / exact.norm(dim=-1)
        low, middle = differences.quantile(0.1).item(), differences.median().item()
        found.append(f"{low:.1e}, {middle:.1e}")
    show(f"{name} {mode}, {layers} layers: fused {found[0]}; plain {found[1]}")
    del model
    free_memory(compiled=True)


def show(line: str) -> None:
    """Print a line once, whatever the number of ranks."""
    if process_group.is_main():
        print(line, flush=True)


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/both_kernels.py",
            "python benchmarks/both_kernels.py gpt-oss-20b:mxfp4 --layers 8",
            "python benchmarks/both_kernels.py Nemotron-3-Nano-30B-A3B:int4 --check 8",
        ),
    )
    add = parser.add_argument
    add("cases", nargs="*", default=CASES, metavar="NAME:MODE", help="models with their formats")
    add("--layers", type=int, metavar="N", help="build only the first N layers")
    add("--check", type=int, metavar="N", help="compare logits of the first N layers before")
    add("--only", choices=KERNELS, help="measure these kernels alone")
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    device = process_group.start("cuda")
    bandwidth = read_bandwidth(device)
    gpus = f"{process_group.size()} x " * (process_group.size() > 1)
    gpus += f"{torch.cuda.get_device_name()}, {bandwidth / 1e9:.0f} GB/s"
    show(f"{gpus}, torch {torch.__version__}")
    for case in options.cases if options.check else ():
        name, _, mode = case.partition(":")
        check(name, mode, options.check, device)
    show("| model, weights | kernels | tokens/s | of bandwidth | kernels a layer | compile s |")
    show("|---|---|---|---|---|---|")
    for case in options.cases:
        name, _, mode = case.partition(":")
        for kernels in (options.only,) if options.only else KERNELS:
            found = speed(name, mode, kernels, options.layers, bandwidth)
            figures = f"{found['tok_s']:.0f} | {found['fraction']:.2f}"
            counts = f"{found['kernels_per_layer']:.1f} | {found['compile_s']:.0f}"
            show(f"| {name}, {mode} | {kernels} | {figures} | {counts} |")
    process_group.stop()


if __name__ == "__main__":
    main()
