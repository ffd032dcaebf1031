"""Time of a layer's fused kernels for a few tokens, of several models: for two checkouts in turn.

    python benchmarks/layer_times.py Qwen3-30B-A3B:int4:12 gpt-oss-20b:mxfp4:8
    python benchmarks/layer_times.py gpt-oss-20b:mxfp4:8 --down 8,128,1,4,stay 4,128,3,4
    python benchmarks/layer_times.py Qwen3-30B-A3B:int4:12 --tokens 1 2 4 8 16 --forms
    torchrun --standalone --nproc_per_node=2 benchmarks/layer_times.py Qwen3-30B-A3B:bf16:8

A case is a model, its number format, and how many of its layers to build. Random weights. All
layers run in one CUDA graph at a position of the cache; embedding, head and sampling are left out.
GPUs differ by up to 9 %, so compare two checkouts on one GPU, in one session, each twice. Before
the first measurement run both, which fills Triton's cache. The norm of x after the layers should be
the same, but for the rounding of what has changed.

--tokens counts several tokens of one sequence: the time beside that of one token, the distinct
experts and bytes of a layer, and the head's time. --forms also runs experts pair by pair and in
tiles, and dense products in registers and on tensor cores, whatever would be chosen.

--down tries tilings of the experts' down product: rows, lanes, chunks in flight, warps, and `stay`.
"""

import argparse
import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from benchmarks.cuda_timing import graph_seconds, require_gpu
from benchmarks.decode_speed import read_bandwidth
from benchmarks.fused_decode import Layers, Tuning, load_layers
from cli.parser import Parser
from ops.products import dense, experts, pipeline
from ops.products.tilings import Tiles
from parallel import process_group
from runtime.fused_decode import FusedRunner
from runtime.fused_head import fused_head
from runtime.weights import bytes_per_token, stored_bytes


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


# Most pairs for each distinct expert, and most tokens of a dense product in registers.
FORMS: dict[str, tuple] = {
    "chosen": (),
    "pairs": (99, None),
    "tiles": (0, None),
    "registers 2": (None, 2),
    "registers 4": (None, 4),
    "tensor cores": (None, 0),
}


@contextmanager
def forced(ratio: float | None = None, registers: int | None = None) -> Iterator[None]:
    """Choose forms by other limits: `experts.PAIR_RATIO` and `dense.IN_REGISTERS`."""
    with ExitStack() as stack:
        if ratio is not None:
            stack.enter_context(mock.patch.object(experts, "PAIR_RATIO", ratio))
        if registers is not None:
            every = dict.fromkeys(dense.IN_REGISTERS, registers)
            stack.enter_context(mock.patch.object(dense, "IN_REGISTERS", every))
        yield


class Tokens:
    """Measures a model's layers and head for several numbers of tokens."""

    def __init__(self, case: tuple[str, str, int], options: argparse.Namespace):
        self.arch, self.mode, self.count = case
        self.options, self.one = options, 0.0
        self.model = load_layers(*case, options.device)
        self.runner, self.head = FusedRunner(self.model), fused_head(self.model)
        self.bandwidth = read_bandwidth(options.device)

    def row(self, tokens: int, name: str) -> str:
        """Return the row of a form."""
        layers = Layers(self.model, self.runner, self.options.position, tokens)
        layers.run()
        us, distinct = layers.microseconds(), layers.distinct_experts()
        self.one = self.one or us
        beside = stored_bytes(self.model.head)
        size = (bytes_per_token(self.model, distinct) - beside) / self.count
        x = torch.randn(tokens, self.model.args.dim, device="cuda").to(layers.x.dtype)
        head = graph_seconds(self.head.forward, [x]) * 1e6 if self.head else 0.0
        row = (
            f"{self.arch} {self.mode} {tokens:3} tokens {us:7.2f} us a layer, {us / self.one:5.2f} "
            f"of one, {distinct:6.1f} experts {size / 1e6:7.2f} MB, "
            f"{size / us * 1e6 / self.bandwidth:.2f} of bandwidth, head {head:7.1f} us, {name}"
        )
        kernels = layers.kernels() if self.options.kernels and name == "chosen" else ()
        lines = (f"    {start:7.1f} {us:7.1f} us  {kernel}" for kernel, start, us in kernels)
        return "\n".join((row, *lines))

    def tune(self, tokens: int) -> None:
        """Try tilings of each product; print those of each, the fastest first."""
        tuning = Tuning()
        with mock.patch.object(pipeline, "choose_tiles", tuning.choose):
            layers = Layers(self.model, self.runner, self.options.position, tokens)
            layers.run()
            rows = tuning.tune(layers.microseconds, self.options.tune)
        for row in sorted(rows, key=lambda row: (row["product"], row["us"])):
            print(
                f"    {tokens} tokens, {row['product']}: {row['us']} us, {row['tiles']}", flush=True
            )

    def measure(self) -> None:
        """Print a row for each number of tokens and form."""
        for tokens in self.options.tokens:
            if self.options.tune:
                self.tune(tokens)
            for name, limits in FORMS.items():
                if name != "chosen" and (tokens == 1 or not self.options.forms):
                    continue
                with forced(*limits):
                    try:
                        print(self.row(tokens, name), flush=True)
                    except (RuntimeError, ValueError) as error:  # no such form for these tokens
                        print(f"{self.arch} {tokens} {name}: {str(error)[:200]}", flush=True)


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
    add("--tokens", nargs="+", type=int, metavar="N", help="tokens of one sequence, 1 to 16")
    add("--forms", action="store_true", help="also forms that would not be chosen")
    add("--kernels", action="store_true", help="with --tokens, also the kernels of a layer")
    add("--tune", type=float, metavar="S", help="with --tokens, try tilings, S seconds a product")
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
            if options.tokens:
                Tokens(case, options).measure()
            else:
                measure(case, options.down, options)
            gc.collect()
            torch.cuda.empty_cache()
    except ValueError as error:  # no fused kernels for a model or format
        parser.error(str(error))
    process_group.stop()


if __name__ == "__main__":
    main()
