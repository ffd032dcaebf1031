"""Time of a layer's fused kernels for one token, of several models: for two checkouts in turn.

    python benchmarks/layer_times.py Qwen3-30B-A3B:int4:12 gpt-oss-20b:mxfp4:8
    python benchmarks/layer_times.py gpt-oss-20b:mxfp4:8 --down 8,128,1,4,stay 4,128,3,4
    torchrun --standalone --nproc_per_node=2 benchmarks/layer_times.py Qwen3-30B-A3B:bf16:8

A case is a model, its number format, and how many of its layers to build. Random weights. All
layers run in one CUDA graph at a position of the cache; embedding, head and sampling are left out.
GPUs differ by up to 9 %, so compare two checkouts on one GPU, in one session, each twice. Before
the first measurement run both, which fills Triton's cache. The norm of x after the layers should be
the same, but for the rounding of what has changed.

--down tries tilings of the experts' down product: rows, lanes, chunks in flight, warps, and `stay`.
"""

import argparse
import gc
from unittest import mock

import torch

from benchmarks.cuda_timing import require_gpu
from benchmarks.fused_decode import Layers, Tuning, load_layers
from cli.parser import Parser
from ops.products import pipeline
from ops.products.tilings import Tiles
from parallel import process_group
from runtime.fused_decode import FusedRunner


def read_case(text: str) -> tuple[str, str, int]:
    """Read ARCH:MODE:LAYERS. Raises ArgumentTypeError."""
    parts = text.split(":")
    if len(parts) != 3 or not parts[2].isdecimal() or int(parts[2]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} does not name a format and a number of layers")
    return parts[0], parts[1], int(parts[2])


def read_tiles(text: str) -> Tiles:
    """Read ROWS,LANES,CHUNKS,WARPS, or the same with ",stay". Raises ArgumentTypeError."""
    numbers, _, stay = text.partition(",stay")
    parts = numbers.split(",")
    if stay or len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not ROWS,LANES,CHUNKS,WARPS or the same with ,stay"
        )
    return Tiles(*map(int, parts), stay=text.endswith(",stay"))


def measure(case: tuple[str, str, int], tilings: list[Tiles], options: argparse.Namespace) -> None:
    """Print us a layer of a case, measured twice, then with each tiling."""
    arch, mode, count = case
    model = load_layers(arch, mode, count, options.device)
    tuning, main = Tuning(), process_group.is_main()
    with mock.patch.object(pipeline, "choose_tiles", tuning.choose):
        layers = Layers(model, FusedRunner(model), options.position)
        norm = layers.run().float().norm().item()
        first, second = layers.microseconds(), layers.microseconds()
        if main:
            print(f"{arch:18} {mode:6} {first:7.2f} {second:7.2f} us, norm {norm:.5f}", flush=True)
        downs = [
            product
            for product, weight in tuning.seen.items()
            if weight.parts[0].dim() == 3 and product[3] == 1
        ]
        for tiles in tilings:
            tuning.chosen = dict.fromkeys(downs, tiles)
            us = layers.microseconds()
            if main:
                print(f"  {tiles!s:42} {us:7.2f} us, {us - min(first, second):+.2f}", flush=True)


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/layer_times.py Qwen3-30B-A3B:int4:12 gpt-oss-20b:mxfp4:8",
            "python benchmarks/layer_times.py gpt-oss-20b:mxfp4:8 --down 8,128,1,4,stay",
        ),
    )
    add = parser.add_argument
    add("cases", nargs="+", type=read_case, metavar="ARCH:MODE:LAYERS", help="what to time")
    add("--position", type=int, default=100, help="the token's position in the cache (100)")
    tiles = "tilings of the experts' down product to try"
    add("--down", nargs="+", type=read_tiles, default=[], metavar="TILING", help=tiles)
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    options.device = process_group.start("cuda")
    torch.manual_seed(0)
    try:
        for case in options.cases:
            measure(case, options.down, options)
            gc.collect()
            torch.cuda.empty_cache()
    except ValueError as error:  # no fused kernels for a model or format
        parser.error(str(error))
    process_group.stop()


if __name__ == "__main__":
    main()
