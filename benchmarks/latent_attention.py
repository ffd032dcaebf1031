"""Time of one token's latent attention: its kernels against the compiled `LatentAttention.core`.

    python benchmarks/latent_attention.py --arch DeepSeek-V2-Lite --positions 150 4000 32000

All between the products wqkv and wo, which includes wq where the model has it. Several layers run
in turn in one CUDA graph, so that L2 holds neither weights nor cache. us are of one layer;
"differs" is the relative difference of the kernels' result from the plain one. --tiles tries other
tiles than `ops.attention.mla.choose_tile`, as block x stages x columns x values; --parts
other limits of parts.
"""

import argparse
import itertools
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cuda_timing import graph_seconds, require_gpu
from cli.parser import Parser
from formats.kv_cache import KV_CACHES
from model import Context, KVCache, ModelArgs
from models import build_model
from models.layers.latent_attention import LatentAttention
from models.random_weights import architecture, first_layers
from ops.attention import mla, softmax
from ops.attention.mla import Tile
from ops.attention.softmax import MAX_PARTS
from ops.inductor import configure_inductor
from ops.plain.attention import BLOCK, SHORT_CACHE, Mask, blocks_in_use, causal_bias
from runtime.fused_latent_attention import FusedLatentAttention
from runtime.fused_layer import choose_attention

MAX_LAYERS, MAX_BYTES = 16, 8 << 30
HEADER = "cache    position         tile   parts     core us   kernels us   differs"


def random_layer(args: ModelArgs, length: int, kind: type[KVCache]) -> FusedLatentAttention:
    """Return a layer with a random cache, on the GPU. Raises ValueError if it has no kernels."""
    plain = build_model(first_layers(args, 1)).layers[0].attention
    if not isinstance(plain, LatentAttention):
        raise ValueError("the model has no latent attention")
    plain.bfloat16().to_empty(device="cuda")
    for weight in plain.parameters():
        weight.normal_(0, weight.shape[-1] ** -0.5 if weight.ndim > 1 else 1)
    codes, scales = plain.allocate(1, length, kind, plain.wkv).stored()
    if scales is None:
        codes.normal_()
    else:
        codes.random_(-127, 128)
        scales.normal_(0, 0.01)
    layer = choose_attention(plain)
    if not isinstance(layer, FusedLatentAttention) or not layer.supported:
        raise ValueError("the kernels do not compute this model's attention")
    return layer


def make_context(args: ModelArgs, length: int, position: int, queries: int = 1) -> Context:
    """Return the context of tokens from this position on, as in compiled code."""
    device = torch.device("cuda")
    positions = position + torch.arange(queries, device=device).unsqueeze(0)
    is_long = length > SHORT_CACHE and length % BLOCK == 0
    blocks = blocks_in_use(positions, length, None) if is_long else None
    masks = {None: Mask(causal_bias(positions, length, None, torch.bfloat16), blocks)}
    table = build_model(first_layers(args, 1)).make_rope_table(length, device)
    return Context(table[positions].unsqueeze(2), positions=positions, masks=masks)


def run_core(layer: LatentAttention, qkv: Tensor, context: Context) -> Tensor:
    return layer.core(qkv, context)


def difference(layer: FusedLatentAttention, qkv: Tensor, context: Context) -> float:
    """Return the relative difference of the kernels from plain attention."""
    found = layer.fused_core(qkv, context).float()
    expected = layer.plain[0].core(qkv, context).float()
    return ((found - expected).norm() / expected.norm()).item()


def measure(args: ModelArgs, length: int, kind: type[KVCache], options: argparse.Namespace) -> None:
    """Print a row for each position, tile and limit of parts."""
    layer = random_layer(args, length, kind)
    stored = layer.plain[0].cache.nbytes
    count = max(1, min(MAX_LAYERS, MAX_BYTES // stored))
    layers = [layer, *(random_layer(args, length, kind) for _ in range(count - 1))]
    width = layer.plain[0].wqkv.weight.shape[0]
    inputs = [torch.randn(1, 1, width, device="cuda", dtype=torch.bfloat16) for _ in layers]
    core = torch.compile(run_core, fullgraph=True, dynamic=False)
    itemsize = layer.plain[0].cache.kv.element_size()
    for position in (p for p in options.positions if p < length):
        context = make_context(args, length, position)

        def plain_step(index: int, context: Context = context) -> None:
            core(layers[index].plain[0], inputs[index], context)

        def step(index: int, context: Context = context) -> None:
            layers[index].fused_core(inputs[index], context)

        plain = graph_seconds(plain_step, range(count)) * 1e6
        for parts, tile in itertools.product(options.parts, options.tiles or (None,)):
            tile = tile or mla.choose_tile(length, itemsize)
            with (
                mock.patch.object(softmax, "MAX_PARTS", parts),
                mock.patch.object(mla, "choose_tile", lambda *_, tile=tile: tile),
            ):
                us = graph_seconds(step, range(count)) * 1e6
                error = difference(layer, inputs[0], context)
            print(
                f"{length:7}  {position:7}  {'x'.join(map(str, tile)):>11}   {parts:5}   "
                f"{plain:9.2f}   {us:10.2f}   {error:.1e}",
                flush=True,
            )


def parse_tile(text: str) -> Tile:
    """Parse "32x3x64x32". Raises ValueError for other text."""
    block, stages, columns, values = (int(part) for part in text.split("x"))
    return Tile(block, stages, columns, values)


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/latent_attention.py --arch GLM-4.7-Flash --length 205",
            "python benchmarks/latent_attention.py --length 4608 --kv_cache int8",
        ),
    )
    add = parser.add_argument
    add("--arch", default="DeepSeek-V2-Lite")
    add("--length", type=int, nargs="+", default=[205, 4608, 32768], help="positions of the cache")
    add("--positions", type=int, nargs="+", default=[150, 4000, 32000], metavar="P")
    add("--kv_cache", choices=KV_CACHES, default="plain")
    add("--tiles", type=parse_tile, nargs="+", metavar="BxSxCxV")
    add("--parts", type=int, nargs="+", default=[MAX_PARTS], metavar="N")
    return parser


@torch.no_grad()
def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    args = architecture(options.arch)
    configure_inductor()
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{options.arch}, {options.kv_cache} cache, {gpu}")
    print(HEADER)
    for length in options.length:
        try:
            measure(args, length, KV_CACHES[options.kv_cache], options)
        except ValueError as error:
            parser.error(f"--arch {options.arch}: {error}")


if __name__ == "__main__":
    main()
