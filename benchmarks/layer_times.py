"""Time of a layer's fused kernels for a few tokens, of several models: for two checkouts in turn.

    python benchmarks/layer_times.py Qwen3-30B-A3B:int4:12 gpt-oss-20b:mxfp4:8
    python benchmarks/layer_times.py gpt-oss-20b:mxfp4:8 --down 8,128,1,4,stay 4,128,3,4
    python benchmarks/layer_times.py Qwen3-30B-A3B:int4:12 --cache 32768 --position 150 1000 4000
    python benchmarks/layer_times.py Qwen3-30B-A3B:int4:12 --tokens 1 2 4 8 16 --forms
    python benchmarks/layer_times.py Qwen3-30B-A3B:int4:12 --tokens 8 --few 16,8,0,0 2048:32,4,0,1
    torchrun --standalone --nproc_per_node=2 benchmarks/layer_times.py Qwen3-30B-A3B:bf16:8

A case is a model, its number format, and how many of its layers to build. Random weights. All
layers run in one CUDA graph at a position of the cache; embedding, head and sampling are left out.
GPUs differ by up to 9 %, so compare two checkouts on one GPU, in one session, each twice. Before
the first measurement run both, which fills Triton's cache. The norm of x after the layers should be
the same, but for the rounding of what has changed.

--tokens counts several tokens of one sequence: the time beside that of one token, the distinct
experts and bytes of a layer, and the head's time. --forms also runs experts pair by pair and in
tiles, dense products in registers and on tensor cores, and what else FORMS has, whatever would be
chosen; or those forms that it names.

--down and --gate_up try tilings of the experts' products: rows, lanes, chunks in flight, warps,
most registers, and `stay`. --few tries tilings of each product of several tokens on tensor cores:
rows, warps, steps of weights in flight, steps of x in flight (0: all), most tokens. With OUT: in
front it is tried for products with that many rows alone. Each form that is measured tries them.
"""

import argparse
import gc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from unittest import mock

import torch

from benchmarks.cuda_timing import graph_seconds, require_gpu
from benchmarks.decode_speed import randomize, read_bandwidth
from benchmarks.fused_decode import CACHE, Layers, load_layers
from benchmarks.layer_tuning import Tuning
from cli.parser import Parser
from host.compile_helper import start
from model import Transformer
from ops.attention import delta
from ops.compile_ahead import collect
from ops.gpu import gpu_of
from ops.products import dense, expert_tiles, experts, few_tokens, join
from ops.products.few_tokens import FewTiles
from ops.products.join import Join
from ops.products.tilings import Place, Tiles
from ops.products.weights import Weight
from parallel import process_group
from runtime import fused_layer
from runtime.compile_ahead import compile_ahead
from runtime.fused_decode import FusedRunner
from runtime.fused_head import fused_head
from runtime.weights import bytes_per_token, stored_bytes


def read_case(text: str) -> tuple[str, str, int]:
    """Read ARCH:MODE:LAYERS. Raises ArgumentTypeError."""
    parts = text.split(":")
    if len(parts) != 3 or not parts[2].isdecimal() or int(parts[2]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} does not name a format and a number of layers")
    return parts[0], parts[1], int(parts[2])


def read_few(text: str) -> tuple[int, FewTiles]:
    """Read [OUT:]ROWS,WARPS,DEPTH,X_DEPTH[,TOKENS]; OUT is 0 if not given.

    Raises ArgumentTypeError.
    """
    out, _, tiling = text.rpartition(":")
    parts = tiling.split(",")
    if len(parts) not in (4, 5) or not all(part.isdecimal() for part in (*parts, out or "0")):
        raise argparse.ArgumentTypeError(f"{text!r} is not [OUT:]ROWS,WARPS,DEPTH,X_DEPTH[,TOKENS]")
    rows, warps, depth, x_depth, tokens = map(int, [*parts, few_tokens.BLOCK][:5])
    return int(out or 0), FewTiles(rows, warps, depth, tokens, x_depth)


def read_tiles(text: str) -> Tiles:
    """Read ROWS,LANES,CHUNKS,WARPS[,REGISTERS][,stay]. Raises ArgumentTypeError."""
    numbers, _, stay = text.partition(",stay")
    parts = numbers.split(",")
    if stay or len(parts) not in (4, 5) or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not ROWS,LANES,CHUNKS,WARPS[,REGISTERS][,stay]"
        )
    rows, lanes, depth, warps, registers = map(int, [*parts, "0"][:5])
    return Tiles(rows, lanes, depth, warps, text.endswith(",stay"), registers)


def measure(case: tuple[str, str, int], tilings: list[Tiles], options: argparse.Namespace) -> None:
    """Print us a layer of a case at each position, measured twice, then with each tiling."""
    arch, mode, _ = case
    model = load_case(case, options)
    runner, tuning, main = FusedRunner(model), Tuning(), process_group.is_main()
    with tuning.replaced():
        for position in options.position:
            layers = Layers(model, runner, position)
            norm = layers.run().float().norm().item()
            first, second = layers.microseconds(), layers.microseconds()
            if main:
                row = f"{arch:18} {mode:6} at {position:6} {first:7.2f} {second:7.2f} us"
                print(f"{row}, norm {norm:.5f}", flush=True)
        for tiles in tilings:
            tuning.chosen = dict.fromkeys(expert_products(tuning, 1), tiles)
            us = layers.microseconds()
            if main:
                print(f"  {tiles!s:42} {us:7.2f} us, {us - min(first, second):+.2f}", flush=True)


def load_case(case: tuple[str, str, int], options: argparse.Namespace) -> Transformer:
    """Return the model of a case, with a cache of random numbers if its length is given."""
    model = load_layers(*case, options.device)
    if options.cache:
        model.setup_cache(1, options.cache)
        randomize(model.states)
    return model


def expert_products(tuning: Tuning, loads: int) -> list[Place]:
    """Return the products of experts that were seen. loads: 2 of gate and up, 1 of down."""
    seen = tuning.seen.items()
    return [place for place, w in seen if w.parts[0].dim() == 3 and place.work == str(loads)]


def in_registers(tokens: int) -> tuple:
    """Return what forces dense products of up to this many tokens into registers."""
    return dense, "IN_REGISTERS", dict.fromkeys(dense.IN_REGISTERS, tokens)


def always_quantizes(weight: Weight, *_) -> bool:
    return weight.integers


TILES = ((experts, "pair_ratio", lambda *_: 0),)
# What replaces attributes of modules.
FORMS: dict[str, tuple[tuple, ...]] = {
    "chosen": (),
    "pairs": ((experts, "pair_ratio", lambda *_: 99),),
    "tiles": TILES,
    "tiles of plain x": (
        *TILES,
        (fused_layer, "unit_order", lambda _: None),
        (expert_tiles, "unit_order", lambda _: None),
    ),
    "registers 2": (in_registers(2),),
    "registers 4": (in_registers(4),),
    "tensor cores": (in_registers(0),),
    "all programs search": ((experts, "EARLY", 1 << 30),),
    "norm waits": ((join, "Join", lambda *args, early=False, **rest: Join(*args, **rest)),),
    "x quantized": ((experts, "quantizes_first", always_quantizes),),
    "x not quantized": ((experts, "quantizes_first", lambda *_: False),),
    "rule by chunk": ((delta, "LEAST_CHUNK", 2),),
    "rule by token": ((delta, "LEAST_CHUNK", 99), (delta, "MOST_JOINT", 0)),
}


@contextmanager
def forced(replaced: Iterable[tuple]) -> Iterator[None]:
    """Replace attributes of modules: rows of FORMS."""
    with ExitStack() as stack:
        for each in replaced:
            stack.enter_context(mock.patch.object(*each))
        yield


class Tokens:
    """Measures a model's layers and head for several numbers of tokens."""

    def __init__(self, case: tuple[str, str, int], options: argparse.Namespace):
        self.arch, self.mode, self.count = case
        self.options, self.one = options, 0.0
        self.model, self.position = load_case(case, options), options.position[0]
        self.runner, self.head = FusedRunner(self.model), fused_head(self.model)
        self.bandwidth = read_bandwidth(options.device)

    def forms(self, tokens: int) -> list[str]:
        """Return the forms that are measured."""
        given = self.options.forms
        names = list(FORMS) if given == [] else ["chosen", *(given or ())]
        return names if tokens > 1 else ["chosen"]

    def compile_all(self) -> None:
        """Compile what will be measured, side by side."""
        tasks: dict[str, None] = {}
        for tokens in self.options.tokens:
            for name in self.forms(tokens):
                layers, tuning = Layers(self.model, self.runner, self.position, tokens), Tuning()
                with forced(FORMS[name]), tuning.replaced():
                    for _ in self.given(tuning):
                        with suppress(RuntimeError, ValueError):
                            tasks |= dict.fromkeys(collect(layers.run))
                        if tokens == 1:  # no tiling is tried
                            break
        compile_ahead(list(tasks), gpu_of(self.options.device))

    def given(self, tuning: Tuning) -> Iterator[str]:
        """Choose the tilings of --gate_up, --down and --few, one at a time, and say which."""
        options = self.options
        yield "chosen"  # the first run notes the products
        for name, loads, tilings in (("gate_up", 2, options.gate_up), ("down", 1, options.down)):
            for tiles in tilings:
                tuning.chosen = dict.fromkeys(expert_products(tuning, loads), tiles)
                yield f"{name} {tiles}"
        on_tensor_cores = {p: t for p, t in tuning.today.items() if isinstance(t, FewTiles)}
        for place, today in on_tensor_cores.items():
            for tiles in (tiles for out, tiles in options.few if out in (0, place.out)):
                tuning.chosen = {place: tiles}
                yield f"{place.group}, {place.shape}: {tiles} (chosen: {today})"
        tuning.chosen = {}

    def row(self, tokens: int, name: str) -> str:
        """Return the row of a form."""
        layers = Layers(self.model, self.runner, self.position, tokens)
        norm = layers.run().float().norm().item()
        us, distinct = layers.microseconds(), layers.distinct_experts()
        self.one = self.one or us
        beside = stored_bytes(self.model.head)
        size = (bytes_per_token(self.model, distinct) - beside) / self.count
        x = torch.randn(tokens, self.model.args.dim, device="cuda").to(layers.x.dtype)
        head = graph_seconds(self.head.forward, [x]) * 1e6 if self.head else 0.0
        row = (
            f"{self.arch} {self.mode} {tokens:3} tokens {us:7.2f} us a layer, {us / self.one:5.2f} "
            f"of one, {distinct:6.1f} experts {size / 1e6:7.2f} MB, "
            f"{size / us * 1e6 / self.bandwidth:.2f} of bandwidth, head {head:7.1f} us, "
            f"norm {norm:.5f}, {name}"
        )
        kernels = layers.kernels() if self.options.kernels and name == "chosen" else ()
        lines = (f"    {start:7.1f} {us:7.1f} us  {kernel}" for kernel, start, us in kernels)
        return "\n".join((row, *lines))

    def try_given(self, tokens: int) -> None:
        """Print us a layer with each tiling of `given`."""
        tuning = Tuning()
        layers = Layers(self.model, self.runner, self.position, tokens)
        with tuning.replaced():
            for what in self.given(tuning):
                try:
                    norm, us = layers.run().float().norm().item(), layers.microseconds()
                    us = f"{us:7.2f} us a layer, norm {norm:.5f}"
                except RuntimeError as error:  # does not fit into registers or shared memory
                    us = str(error)[:100]
                print(f"    {tokens} tokens, {us}, {what}", flush=True)

    def measure(self) -> None:
        """Print a row for each number of tokens and form."""
        self.compile_all()
        tries = self.options.gate_up or self.options.down or self.options.few
        for tokens in self.options.tokens:
            for name in self.forms(tokens):
                with forced(FORMS[name]):
                    try:
                        print(self.row(tokens, name), flush=True)
                        if tokens > 1 and tries:
                            self.try_given(tokens)
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
    cache_help = "positions of a cache of random numbers (256 zeros)"
    add("--cache", type=int, metavar="N", help=cache_help)
    position_help = "the token's positions in the cache (100); with --tokens, the first alone"
    add("--position", type=int, nargs="+", default=[100], metavar="P", help=position_help)
    add("--tokens", nargs="+", type=int, metavar="N", help="tokens of one sequence, 1 to 16")
    add("--forms", nargs="*", choices=FORMS, metavar="FORM", help="also other forms: all, or these")
    add("--kernels", action="store_true", help="with --tokens, also the kernels of a layer")
    given = dict(nargs="+", default=[], metavar="TILING")
    add("--down", type=read_tiles, help="tilings of the experts' down product to try", **given)
    add("--gate_up", type=read_tiles, help="with --tokens, tilings of gate and up", **given)
    add("--few", type=read_few, help="with --tokens, tilings of dense products", **given)
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    length, last = options.cache or CACHE, max(options.position) + max(options.tokens or [1]) - 1
    if last >= length:
        parser.error(f"--position: {last} is not in a cache of {length} positions: --cache N")
    require_gpu(parser)
    options.device = process_group.start("cuda")
    torch.manual_seed(0)
    try:
        for case in options.cases:
            if options.tokens:
                start()  # imports Triton while weights are made
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
