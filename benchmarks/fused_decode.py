"""Time of a layer for one token: Inductor's kernels and fused ones.

    python benchmarks/fused_decode.py --arch Qwen3-30B-A3B --mode int4 --json layer.json

Random weights. All layers run in one CUDA graph at a position of the cache; embedding, head and
sampling are left out. Each layer is also run alone, both ways, on the same x. The sum that it adds
to x may differ by MAX_DIFFERENCE of its norm, and by the rounding of x. In a few layers it differs
more: where two experts have nearly equal scores, rounding may choose another.

--quantize_h quantizes h once, by a kernel of its own, for all programs of the down product, which
meanwhile load their weights. Without, only Mixtral in 4 bits does (`quantized_x.quantizes_first`).

--json also writes the kernels of one layer with their starts, for scripts/plot_timeline.py.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.cuda_timing import graph_seconds, require_gpu
from benchmarks.decode_speed import read_bandwidth
from benchmarks.kernel_profile import record_kernels
from cli.parser import Parser
from model import Transformer
from models.random_weights import RandomWeights, architecture, first_layers, number_format
from ops.inductor import configure_inductor
from ops.products import experts as moe_decode
from ops.products.quantized_x import quantize_tokens
from ops.products.weights import INTEGERS, Weight
from runtime import fused_layer
from runtime.fused_decode import FusedRunner
from runtime.loading import check_decode_kernels, load_model
from runtime.runner import CompiledRunner
from runtime.weights import bytes_per_token

MAX_DIFFERENCE = 0.02
CACHE = 256  # positions
ROUTERS = ((1, 8), (2, 4), (2, 8))  # rows, warps of norm and router

down = moe_decode.down
norm_router = fused_layer.norm_router


def down_of_integers(x: Tensor, weight: Weight, *rest, **options):
    """`down`; but a kernel of its own quantizes x, if codes are multiplied as integers."""
    quantizes = weight.kind in INTEGERS
    return down(quantize_tokens(x, weight) if quantizes else x, weight, *rest, **options)


class Layers:
    """All layers of a model, as a runner runs them for tokens of one sequence."""

    def __init__(self, model: Transformer, runner: CompiledRunner, position: int, tokens: int = 1):
        self.model, self.runner = model, runner
        reaches = runner.reaches(tokens, model.args.max_position)
        last = position + tokens - 1
        runner.reach = next(n for n in reaches if n is None or last < n)  # as a session does
        self.token = torch.arange(1, tokens + 1, device="cuda").unsqueeze(0)
        self.position = position + self.token - 1
        found = runner.begin(model, self.token, self.position)
        self.x, self.normed, self.context = (part for part in found)
        self.context = self.context._replace(last=torch.tensor([tokens - 1], device="cuda"))
        self.norms: list[nn.Module] = [block.attention_norm for block in model.layers[1:]]
        self.norms.append(model.norm)

    def run(self, _=None) -> Tensor:
        x, normed = self.x, self.normed
        for block, norm in zip(self.model.layers, self.norms, strict=True):
            x, normed, *_ = self.runner.block(block, x, normed, self.context, norm)
        return x

    def distinct_experts(self) -> float:
        """Return how many experts a layer reads, the mean of all that have experts."""
        counts, x, normed = [], self.x, self.normed
        for block, norm in zip(self.model.layers, self.norms, strict=True):
            x, normed, *routing = self.runner.block(block, x, normed, self.context, norm)
            if routing and routing[0] is not None:
                counts.append(len(routing[0].unique()))
        return statistics.fmean(counts)

    def differences(self, reference: "Layers") -> list[float]:
        """Run each layer alone on the reference's x -> relative differences of what they add."""
        found, x, normed = [], reference.x, reference.normed
        layers = zip(self.model.layers, self.norms, self.model.states, strict=True)
        for block, norm, state in layers:
            given, before = x, [buffer.clone() for buffer in state.buffers()]
            got, *_ = self.runner.block(block, given, given, self.context, norm)
            for buffer, value in zip(state.buffers(), before, strict=True):
                buffer.copy_(value)
            x, normed, *_ = reference.runner.block(block, given, normed, reference.context, norm)
            size = (x - given).float().norm() + 0.2 * x.float().norm()  # x is rounded to bf16
            found.append(((got - x).float().norm() / size).item())
        return found

    def microseconds(self, warmups: int = 2) -> float:
        """Return us a layer. warmups: as in `graph_seconds`."""
        seconds = graph_seconds(self.run, [None], warmups=warmups)
        return seconds * 1e6 / len(self.model.layers)

    def kernels(self) -> list[tuple[str, float, float]]:
        """Return the kernels of the middle layer: name, start and duration in us.

        If layers differ: of the middle two or four layers, with which they repeat; or of none.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        graph.replay()
        events = record_kernels(graph.replay)
        found = sorted((start, name, length) for name, start, length in events)
        layers = len(self.model.layers)
        for period in (n for n in (1, 2, 4) if layers % n == 0):
            each, rest = divmod(len(found), layers // period)
            if not rest:
                break
        else:
            return []
        begin = layers // period // 2 * each
        first = found[begin][0]
        return [(name, start - first, length) for start, name, length in found[begin:][: each + 1]]


def measure_fused(model: Transformer, plain: Layers, options: argparse.Namespace) -> dict:
    """Return us a layer of the fused kernels, and of variants of them."""
    layers = Layers(model, FusedRunner(model), options.position)
    differences = layers.differences(plain)
    result: dict = {"difference": statistics.median(differences)}
    result["differing"] = sum(difference > MAX_DIFFERENCE for difference in differences)
    result["us"] = layers.microseconds()
    result["kernels"] = layers.kernels()
    variants = result["variants"] = {}
    for rows, warps in ROUTERS:
        changed = partial(norm_router, rows=rows, warps=warps)
        with mock.patch.object(fused_layer, "norm_router", changed):
            variants[f"router of {rows} rows, {warps} warps"] = layers.microseconds()
    return result


def load_layers(arch: str, mode: str, layers: int | None, device: torch.device) -> Transformer:
    """Make a model with random weights, of its first layers if given, with a cache of one row.

    Raises ValueError if there are no fused kernels for it.
    """
    args = architecture(arch)
    args = first_layers(args, layers) if layers else args
    source = RandomWeights(args, number_format(mode, args))
    check_decode_kernels("fused", source, device)
    model = load_model(source, device)
    configure_inductor()
    model.setup_cache(1, CACHE)
    return model


def measure(options: argparse.Namespace) -> dict:
    device = torch.device("cuda")
    model = load_layers(options.arch, options.mode, options.layers, device)
    count = len(model.layers)
    plain = Layers(model, CompiledRunner(model), options.position)
    plain.run()
    us, kernels = plain.microseconds(), plain.kernels()
    head = model.head.weight if hasattr(model.head, "weight") else model.head.codes
    nbytes = (bytes_per_token(model) - head.nbytes) / count
    bound = nbytes / read_bandwidth(device) * 1e6
    result = {"arch": options.arch, "mode": options.mode, "layers": count}
    result |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    result |= {"position": options.position, "bound_us": bound}
    result["inductor"] = {"us": us, "kernels": kernels}
    product = down_of_integers if options.quantize_h else down
    with mock.patch.object(moe_decode, "down", product):
        result["fused"] = measure_fused(model, plain, options)
    return result


def show(result: dict) -> None:
    plain, fused, bound = result["inductor"], result["fused"], result["bound_us"]
    print(f"{result['arch']} {result['mode']}, {result['layers']} layers, {result['gpu']}")
    print(f"bytes at read bandwidth  {bound:7.2f} us a layer")
    for name, part in (("Inductor's kernels", plain), ("fused kernels", fused)):
        count = max(len(part["kernels"]) - 1, 0)
        print(f"{name:24} {part['us']:7.2f} us, {count or 'several numbers of'} kernels")
    print(
        f"  difference: median {fused['difference']:.4f}, above {MAX_DIFFERENCE} in "
        f"{fused['differing']} layers"
    )
    for name, us in fused["variants"].items():
        print(f"  {name:30} {us:7.2f} us")
    for name in ("inductor", "fused"):
        print(f"one layer's kernels, {name}: start and duration, us")
        for kernel, start, duration in result[name]["kernels"]:
            print(f"  {start:7.2f} {duration:7.2f}  {kernel[:90]}")


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/fused_decode.py --arch Qwen3-30B-A3B --mode int4",
            "python benchmarks/fused_decode.py --arch Mixtral-8x7B --layers 8 --json layer.json",
        ),
    )
    add = parser.add_argument
    add("--arch", required=True, metavar="NAME", help="a model's name, as in benchmark.py")
    add("--mode", default="bf16", help="number format, as in benchmark.py")
    add("--layers", type=int, help="build only the first N layers")
    add("--position", type=int, default=100, help="the token's position in the cache (100)")
    add("--quantize_h", action="store_true", help="quantize h in a kernel of its own")
    add("--json", metavar="FILE", help="write the result, with the kernels of a layer")
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    torch.manual_seed(0)
    try:
        result = measure(options)
    except ValueError as error:  # no fused kernels for this model or format
        parser.error(str(error))
    show(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result))
    if result["fused"]["difference"] > MAX_DIFFERENCE:  # of half of the layers
        raise SystemExit("error: the two ways give different results")


if __name__ == "__main__":
    main()
