"""Tilings of a model's products: the fastest on this GPU, by product.

    python benchmarks/tune.py --arch Qwen3-30B-A3B --mode int4
    python benchmarks/tune.py --arch Qwen3-30B-A3B --mode int4 --tokens 4 8 16 --seconds 200
    python benchmarks/tune.py --arch Qwen3-30B-A3B --mode int4 --write

A product is one launch of ops/products/dense.py or experts.py, of several tokens of few_tokens.py
or expert_tiles.py, too. One token's tilings are first checked against unpacked weights in fp64, and
timed alone, over more copies of a weight than L2 holds. Alone a product may want other tiles than
among others, so the best of these are then timed with whole layers around them. With --ranks
products are timed alone only.

--tokens: steps of as many tokens. Their tilings are timed in whole layers alone, the --tries
tilings that differ least from today's, after a check that the product's result is today's.

Prints the tilings with which layers are faster than today by MIN_GAIN, as the table has them, and
--write puts them into ops/products/tilings.json, under this GPU's class. After --seconds no further
product is tried in layers: those found so far count.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cuda_timing import graph_seconds, require_gpu
from benchmarks.fused_decode import Layers, load_layers
from benchmarks.layer_tuning import (
    MAX_ERROR,
    AnyTiles,
    Tuning,
    tasks_of,
    tilings_near,
    tilings_of,
    tune_layers,
)
from cli.parser import Parser
from formats import FORMATS, PLAIN
from formats.quantizer import DTYPES
from host.compile_helper import start
from model import Transformer, swiglu
from models.layers.pending_state import RecurrentLayer
from models.random_weights import architecture, first_layers, number_format
from ops.compile_ahead import collect
from ops.declared import RELU_SQUARED, SWIGLU, Activation
from ops.gpu import Gpu, gpu_of
from ops.launch import KernelError
from ops.products import tilings
from ops.products.dense import Norm, dense_product, norm_apart
from ops.products.experts import down, multiply_each
from ops.products.tilings import Place, Tiles, choose_tiles
from ops.products.weights import BITS, Weight, packed_weight, plain_weight
from runtime.compile_ahead import compile_ahead
from runtime.fused_decode import FusedRunner
from runtime.fused_head import fused_head
from runtime.fused_layer import MAX_FEW, FusedExperts, FusedLayer, fused_layers
from tp import ModelShard

LAYERS = 8  # they have each kind of layer
L2_SIZES = 4  # all copies of a weight, as a multiple of L2
ALONE_GAIN = 0.01  # a product's, where products are timed alone only
# Layers are timed with up to FINALISTS tilings of a product, which alone are at most MAX_SLOWER
# times as slow as the fastest one.
FINALISTS = 24
MAX_SLOWER = 1.5
POSITION = 100
BFLOAT16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


# Weights ------------------------------------------------------------------------------------------


class Weights:
    """Random weights [distinct * copies, out, in] of one format; `distinct` of them differ."""

    def __init__(self, mode: str, distinct: int, copies: int, out: int, width: int, group: int = 0):
        self.mode, self.group = mode, group
        plain = torch.empty(distinct, out, width, **BFLOAT16).normal_(0, width**-0.5)
        if mode == PLAIN:
            self.parts = {"weight": plain.repeat(copies, 1, 1)}
            self.kernel = plain_weight(self.parts["weight"])
        else:
            format = FORMATS[mode]
            self.group = format.choose_group(width, group or None)
            each = format.pack(plain.float(), self.group)
            self.parts = {name: part.repeat(copies, 1, 1) for name, part in each.items()}
            self.kernel = packed_weight(list(self.parts.values()), format.kind, self.group)
        self.nbytes = sum(part[:distinct].nbytes for part in self.parts.values())

    def unpack(self, index: Tensor) -> Tensor:
        """Return the weights of an index, fp64 [..., out, in]."""
        chosen = {name: part[index] for name, part in self.parts.items()}
        if self.mode == PLAIN:
            return chosen["weight"].double()
        return FORMATS[self.mode].unpack(chosen, self.group).double()

    def single(self, n: int) -> Weight:
        """Return one of the weights as a dense one."""
        kernel = self.kernel
        return Weight(tuple(part[n] for part in kernel.parts), kernel.kind, kernel.group)


# Products -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One product of a model."""

    kind: str
    parts: int  # tensors of a weight
    group: int
    loads: int
    out: int
    quads: int  # quads of a row
    experts: int  # experts of a token; 0: a dense weight
    normed: bool  # x has a norm; else the result has a residual
    activation: Activation | None = None  # of each expert's result; None: experts are summed

    @property
    def place(self) -> Place:
        """Where the table has its tiles. Gate and up read one x."""
        summed = 1 if self.activation else max(self.experts, 1)
        return Place(self.kind, str(self.loads), 1, self.out, self.quads * summed)


def weights_of(layer: FusedLayer) -> Iterator[tuple[str, Weight, int, bool, Activation | None]]:
    """Yield a layer's products: name, weight, experts, whether x has a norm, and activation."""
    attention, experts = layer.attention, layer.experts
    for weight, _ in attention.inputs:
        yield "projection", weight, 0, True, None
    query = getattr(attention.attention, "query_weight", None)
    if query is not None:
        yield "query", query, 0, True, None
    yield "output", attention.output[0], 0, False, None
    for mixer in layer.mixers:
        yield "mixer down", mixer.down, 0, False, None
        yield "mixer up", mixer.up, 0, False, None
    if ffn := getattr(experts, "dense", None):
        for weight, _ in ffn.w13:
            yield "dense gate_up", weight, 0, True, None
        yield "dense down", ffn.w2[0], 0, False, None
    if isinstance(experts, FusedExperts):
        # Others than SwiGLU cost as much, but the reference knows these two alone.
        activation = SWIGLU if experts.activation.gated else RELU_SQUARED
        yield "gate_up", experts.w13, experts.routing.pairs, False, activation
        yield "down", experts.w2, experts.routing.pairs, False, None


def shapes_of(model: Transformer) -> dict[Shape, str]:
    """Return the shapes of a model's products, each once, with a name."""
    for block in model.layers:
        if isinstance(block.attention, RecurrentLayer):
            block.attention.join_projections()  # as on a GPU
    found = [each for layer in fused_layers(model).values() for each in weights_of(layer)]
    if head := fused_head(model):
        found.append(("head", head.weight, 0, True, None))
    shapes = {}
    for name, w, experts, normed, activation in reversed(found):
        loads = 2 if activation and activation.gated else 1
        form = w.kind, len(w.parts), w.group
        shapes[Shape(*form, loads, w.out, w.quads, experts, normed, activation)] = name
    return shapes


def format_of(shape: Shape, width: int) -> str:
    """Return the name of a number format with a shape's kind, parts and codes a word."""
    wanted = shape.kind, 32 // BITS[shape.kind], shape.parts
    for name, format in FORMATS.items():
        try:
            group = format.choose_group(width, None)
        except ValueError:  # its groups do not divide such rows
            continue
        parts = len(format.layout((1, width), group))
        if (format.kind, format.codes_per_word, parts) == wanted:
            return name
    return PLAIN


class Product:
    """A shape with random weights: its calls, and what the first one must return."""

    def __init__(self, shape: Shape):
        self.shape, n = shape, max(shape.experts, 1)
        width = shape.quads * 128 // BITS[shape.kind]
        mode = format_of(shape, width)
        group = 0 if mode == PLAIN or FORMATS[mode].has_own_group else shape.group
        cache = torch.cuda.get_device_properties().L2_cache_size
        self.nbytes = Weights(mode, n, 1, shape.out, width, group).nbytes
        copies = max(4, -(-L2_SIZES * cache // self.nbytes))
        self.weights = Weights(mode, n, copies, shape.out, width, group)
        self.x = torch.randn(1 if shape.activation else n, width, **BFLOAT16)
        self.norm = Norm(torch.rand(width, **BFLOAT16) + 0.5, 1e-5)
        self.residual, self.routing = torch.randn(1, shape.out, **BFLOAT16), torch.rand(1, n).cuda()
        choices = torch.randperm(copies * n, device="cuda").view(copies, 1, n)
        # Indices of their own, as a router writes them: others may begin anywhere, for which Triton
        # compiles another kernel.
        indices = [each.clone() for each in choices]
        self.arguments = indices if shape.experts else [*map(self.weights.single, range(copies))]
        first = choices[0, 0] if shape.experts else choices.new_zeros(1)
        self.expected = self.reference(self.weights.unpack(first))

    def reference(self, plain: Tensor) -> Tensor:
        """Return the result in fp64, of unpacked weights [n, out, in]."""
        x = self.x.double()
        if self.shape.loads == 2:
            return swiglu(*(plain @ x[0]).chunk(2, -1))
        if self.shape.activation:
            return (plain @ x[0]).relu() ** 2
        if self.shape.normed:
            x = torch.nn.functional.rms_norm(x, x.shape[1:], self.norm.weight.double(), 1e-5)
        each = (plain @ x.unsqueeze(-1)).squeeze(-1)
        if self.shape.experts:
            each = each * self.routing[0].double().unsqueeze(1)
        return each.sum(0, keepdim=True) + (0 if self.shape.normed else self.residual.double())

    def run(self, argument: Tensor | Weight, tiles: Tiles) -> Tensor:
        kernel, residual = self.weights.kernel, self.residual
        if self.shape.activation:
            return multiply_each(self.x, kernel, argument, self.shape.activation, tiles=tiles)
        if self.shape.experts:
            return down(self.x, kernel, argument, self.routing, residual=residual, tiles=tiles)
        if self.shape.normed:
            # As a layer calls it.
            x, norm = norm_apart(self.x, self.norm.weight, self.norm.eps, argument)
            return dense_product(x, argument, norm, tiles=tiles)
        return dense_product(self.x, argument, residual=residual, tiles=tiles)

    def measure(self, tiles: Tiles) -> float | None:
        """Return us of a call; None, with a line, if the result is wrong or no kernel is made."""
        try:
            got = self.run(self.arguments[0], tiles).double()
        except KernelError as error:
            print(f"  {tiles}: {error}")
            return None
        error = ((got - self.expected).norm() / self.expected.norm()).item()
        if not error < MAX_ERROR:
            print(f"  WRONG {tiles}: relative error {error:.1e}")
            return None
        return graph_seconds(lambda argument: self.run(argument, tiles), self.arguments) * 1e6


def candidates_of(product: Product, tries: int) -> list[Tiles]:
    """Return today's tiling of a product, then others."""
    shape = product.shape
    quads = shape.place.quads
    today = choose_tiles(product.weights.kernel, quads, shape.loads)
    others = [tiles for tiles in tilings_of(quads, shape.loads) if tiles != today]
    return [today, *others[:tries]]


def compile_tilings(candidates: dict[Product, list[Tiles]]) -> None:
    """Compile the tilings of products, side by side: one after the other they take minutes."""
    tasks = []
    for product, tiles in candidates.items():
        calls = [partial(product.run, product.arguments[0], each) for each in tiles]
        tasks += collect(lambda calls=calls: [call() for call in calls])
    compile_ahead(tasks, gpu_of(torch.device("cuda")))


def tune(product: Product, name: str, candidates: list[Tiles]) -> list[tuple[float, Tiles]]:
    """Time today's tiling and others alone; print them -> us and tiling, the fastest first."""
    times = {tiles: product.measure(tiles) for tiles in candidates}
    today, place = candidates[0], product.shape.place
    print(f"{name}: {place.group}, {place.shape}, {product.nbytes / 1e6:.1f} MB")
    right = sorted((us, str(tiles), tiles) for tiles, us in times.items() if us)
    for us, text, tiles in right[:8]:
        mark = " (today's)" if tiles == today else ""
        print(f"  {us:7.2f} us {product.nbytes / us / 1e3:6.0f} GB/s  {text}{mark}", flush=True)
    return [(us, tiles) for us, _, tiles in right]


def faster_alone(times: list[tuple[float, Tiles]], today: Tiles) -> Tiles | None:
    """Return the fastest tiling, if it is faster than today's by ALONE_GAIN."""
    was = next((us for us, tiles in times if tiles == today), float("inf"))
    return times[0][1] if times and times[0][0] < was * (1 - ALONE_GAIN) else None


# Whole layers -------------------------------------------------------------------------------------


def choose_finalists(times: list[tuple[float, Tiles]], today: Tiles) -> list[AnyTiles]:
    """Return today's tiling, and those that are not much slower alone than the fastest."""
    others = [t for us, t in times if t != today and us <= times[0][0] * MAX_SLOWER]
    return [today, *others[:FINALISTS]]


def search(
    model: Transformer, tokens: Sequence[int], tries: int, until: float, finalists: dict
) -> dict[Place, AnyTiles]:
    """Time whole layers for several numbers of tokens -> tilings that make them faster.

    finalists: tilings of one token, today's first. Prints what was found for each number.
    """
    runner, searches, tasks, found = FusedRunner(model), [], {}, {}
    for T in tokens:
        tuning, layers = Tuning(), Layers(model, runner, POSITION, T)
        with tuning.replaced():
            collect(layers.run)
        if T == 1:
            tried = {place: finalists[place] for place in tuning.seen if place in finalists}
        else:
            tried = {
                place: tilings_near(today, tuning.seen[place], place, T, tries)
                for place, today in tuning.today.items()
            }
        tasks |= dict.fromkeys(tasks_of(tuning, layers.run, tried))
        searches.append((T, tuning, layers, tried))
    begin = time.monotonic()
    compile_ahead(list(tasks), gpu_of(torch.device("cuda")))
    print(f"{len(tasks)} kernels in {time.monotonic() - begin:.0f} s", flush=True)
    for n, (T, tuning, layers, tried) in enumerate(searches):
        now = time.monotonic()  # the time left is divided
        print(f"{T} tokens:")
        faster = tune_layers(tuning, layers, tried, now + (until - now) / (len(searches) - n))
        print(formatted(table_of(faster)), flush=True)
        found |= faster
    return found


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/tune.py --arch Qwen3-30B-A3B --mode int4",
            "python benchmarks/tune.py --arch gpt-oss-20b --mode mxfp4 --tokens 4 8 --seconds 200",
            "python benchmarks/tune.py --arch Mixtral-8x7B --mode int8 --ranks 2 --write",
        ),
    )
    add = parser.add_argument
    add("--arch", required=True, metavar="NAME", help="a model's name, as in benchmark.py")
    add("--mode", default=PLAIN, help="number format, as in benchmark.py")
    add(
        "--tokens",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="tokens of a step, 1 to 16 (1)",
    )
    add("--ranks", type=int, default=1, help="tune the products of one of this many GPUs")
    add("--tries", type=int, default=40, help="other tilings of a product (40)")
    add("--seconds", type=float, default=math.inf, metavar="S", help="try no further product then")
    add("--write", action="store_true", help="write faster tilings into the table")
    return parser


def fields_of(tiles: AnyTiles) -> list[int]:
    """Return a tiling's fields as the table has them: without the last ones that are 0."""
    fields = list(map(int, astuple(tiles)))
    while not fields[-1]:
        fields.pop()
    return fields


def table_of(chosen: dict[Place, AnyTiles]) -> dict[str, dict[str, list[int]]]:
    """Return tilings as the table has them, by group and shape."""
    table: dict[str, dict[str, list[int]]] = {}
    for place, tiles in chosen.items():
        table.setdefault(place.group, {})[place.shape] = fields_of(tiles)
    return table


def write(gpu: Gpu, chosen: dict[Place, AnyTiles]) -> None:
    """Write tilings into the table, where the default differs."""
    table = tilings.measured().setdefault(tilings.gpu_class(gpu), {})
    for place, tiles in chosen.items():
        group = table.setdefault(place.group, {})
        group.pop(place.shape, None)
        default = tilings.DEFAULTS.get((place.kind, int(place.work))) if place.tokens == 1 else None
        if default is None or tiles != default.tiles(place.quads):
            group[place.shape] = fields_of(tiles)
    tilings.TABLE.write_text(formatted(tilings.measured()) + "\n")


def formatted(table: object, indent: str = "") -> str:
    """Return JSON with shapes in order, several a line."""
    if not isinstance(table, dict):
        return json.dumps(table)
    if all(isinstance(fields, list) for fields in table.values()):
        items = [f'"{shape}": {json.dumps(table[shape])}' for shape in sorted(table, key=numbers)]
        lines = (", ".join(items[n : n + 4]) for n in range(0, len(items), 4))
    else:
        lines = (f'"{name}": {formatted(table[name], indent + " ")}' for name in sorted(table))
    return "{\n" + ",\n".join(f"{indent} {line}" for line in lines) + f"\n{indent}" + "}"


def numbers(shape: str) -> list[int]:
    return list(map(int, shape.split("x")))


def tune_alone(
    model: Transformer, tries: int
) -> tuple[dict[Place, list[tuple[float, Tiles]]], dict[Place, Tiles]]:
    """Time one token's products alone -> times as in `tune`, and today's tilings."""
    shapes = shapes_of(model)
    candidates = {p: candidates_of(p, tries) for p in map(Product, shapes)}
    compile_tilings(candidates)
    times, today = {}, {}
    for product, tried in candidates.items():
        place = product.shape.place
        times[place], today[place] = tune(product, shapes[product.shape], tried), tried[0]
    return times, today


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    until = time.monotonic() + options.seconds
    if not all(1 <= T <= MAX_FEW for T in options.tokens):
        parser.error(f"--tokens: a step has 1 to {MAX_FEW}")
    if options.ranks > 1 and options.tokens != [1]:
        parser.error("--tokens: with --ranks one token's products are tuned alone")
    torch.manual_seed(0)
    start()
    times, today, best = {}, {}, {}
    try:
        args = first_layers(architecture(options.arch), LAYERS)
        format = number_format(options.mode, args)
        if 1 in options.tokens:
            model = ModelShard(args, format, "tensor", rank=0, ranks=options.ranks).model
            model = model.to(DTYPES[format.get("dtype", format["name"])])
            times, today = tune_alone(model, options.tries)
        if options.ranks == 1:
            model = load_layers(options.arch, options.mode, LAYERS, torch.device("cuda"))
    except ValueError as error:  # no such model, or no kernels for it
        parser.error(str(error))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if options.ranks > 1:
        best = {place: faster_alone(found, today[place]) for place, found in times.items()}
    else:
        finalists = {place: choose_finalists(found, today[place]) for place, found in times.items()}
        best = search(model, options.tokens, options.tries, until, finalists)
    faster = {place: tiles for place, tiles in best.items() if tiles}
    print(f"{len(faster)} products have a faster tiling")
    if options.write and faster:
        write(gpu_of(torch.device("cuda")), faster)
        print(f"written to {tilings.TABLE}")


if __name__ == "__main__":
    main()
