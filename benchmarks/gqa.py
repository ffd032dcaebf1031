"""Time of a few tokens' grouped-query attention: its kernels at several positions of a cache.

    python benchmarks/gqa.py --length 256 32768 --positions 150 1000 4000
    python benchmarks/gqa.py --arch gpt-oss-20b --kv_cache int8 --queries 8
    python benchmarks/gqa.py --tiles 128x3 128x2w --parts 16 33
    python benchmarks/gqa.py --length 32768 --positions 150 250 --reach 256

Kernels of several layers run in turn in one CUDA graph, each waiting for the one before, as in a
decode step; L2 holds no cache. us are of one layer, GB/s count the keys and values that are read.
"differs" is the relative difference from plain attention. "parts" is the most that a launch has.
--tiles tries other tiles than `ops.attention.gqa.choose_tiles`, as positions x stages,
with "w" for two blocks as one; --parts other numbers of parts at most. --reach is a bound of the
positions, as a session gives it.
"""

import argparse
import itertools
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cuda_timing import graph_seconds, require_gpu
from cli.parser import Parser
from formats.kv_cache import KV_CACHES
from model import Attention, Context, KVCache, ModelArgs
from models import build_model
from models.random_weights import architecture, first_layers
from ops.attention import gqa, softmax
from ops.attention.gqa import (
    MAX_PARTS,
    MAX_QUERIES,
    Stored,
    Tile,
    decode_settings,
    divide,
)
from ops.plain.attention import Mask, causal_bias
from runtime.fused_attention import FusedDecodeAttention, fused_attention

MAX_LAYERS, MAX_BYTES = 16, 8 << 30
HEADER = "cache    position    tile  parts        us    GB/s   differs"


def random_layer(args: ModelArgs, length: int, kind: type[KVCache]) -> FusedDecodeAttention:
    """Return a layer with a random cache, on the GPU. Raises ValueError if it has no kernel."""
    layers = (block.attention for block in build_model(first_layers(args, args.n_layer)).layers)
    for plain in layers:
        if isinstance(plain, Attention) and plain.window is None:
            break
    else:
        raise ValueError("no layer has attention over the whole cache")
    plain.bfloat16().to_empty(device="cuda")
    for weight in plain.parameters():
        weight.normal_(0, weight.shape[-1] ** -0.5 if weight.ndim > 1 else 1)
    attention = fused_attention(plain)
    if not getattr(attention, "supported", False):
        raise ValueError("the kernel does not compute this model's attention")
    stored = attention.allocate(1, length, kind, next(plain.parameters())).stored()
    for tensor in stored:
        if tensor is not None and tensor.dtype == torch.int8:
            tensor.random_(-127, 128)
        elif tensor is not None:
            tensor.normal_(0, 1 if stored[1] is None else 0.01)
    return attention


def make_context(args: ModelArgs, length: int, position: int, queries: int) -> Context:
    """Return the context of tokens from this position on."""
    device = torch.device("cuda")
    positions = torch.arange(position, position + queries, device=device).unsqueeze(0)
    masks = {None: Mask(causal_bias(positions, length, None, torch.bfloat16))}
    table = build_model(first_layers(args, 1)).make_rope_table(length, device)
    return Context(table[positions].unsqueeze(2), positions=positions, masks=masks)


def difference(
    layer: FusedDecodeAttention, qkv: Tensor, context: Context, reach: int | None
) -> float:
    """Return the relative difference of the kernel from plain attention."""
    found = layer.fused_core(qkv, context, reach).float()
    expected = layer.plain[0].core(qkv, context).float()
    return ((found - expected).norm() / expected.norm()).item()


def measure(args: ModelArgs, length: int, kind: type[KVCache], options: argparse.Namespace) -> None:
    """Print a row for each position, tile and number of parts."""
    layer = random_layer(args, length, kind)
    _, K, C = layer.heads
    entry = 2 * K * (C + 2 if kind is not KVCache else 2 * C)  # bytes of a position
    count = max(1, min(MAX_LAYERS, MAX_BYTES // (entry * length)))
    layers = [layer, *(random_layer(args, length, kind) for _ in range(count - 1))]
    shape = 1, options.queries, layer.projection.weight.shape[0]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in layers]
    for position in (p for p in options.positions if p + options.queries <= length):
        context = make_context(args, length, position, options.queries)

        def step(index: int, context: Context = context) -> None:
            layers[index].fused_core(inputs[index], context, options.reach)

        for tile, parts in itertools.product(options.tiles or (None,), options.parts):
            choose = gqa.choose_tiles if tile is None else lambda *_, tile=tile: iter((tile,))
            with (
                mock.patch.object(gqa, "choose_tiles", choose),
                mock.patch.object(softmax, "MAX_PARTS", parts),
            ):
                error = difference(layer, inputs[0], context, options.reach)
                us = graph_seconds(step, range(count)) * 1e6
                settings = decode_settings(layer.settings)
                stored = Stored(*layer.cache.stored())
                s = next(divide(inputs[0], stored, settings, 0, options.reach))
            shape_of_tile = f"{s.tile.block}x{s.tile.stages}{'w' if s.tile.wide else ''}"
            print(
                f"{length:7}  {position:7}  {shape_of_tile:>6}  {s.parts:5}  {us:8.2f}  "
                f"{entry * position / us / 1e3:6.0f}   {error:.1e}",
                flush=True,
            )


def parse_tile(text: str) -> Tile:
    """Parse "64x3" or "64x3w". Raises ValueError for other text."""
    block, stages = (int(part) for part in text.rstrip("w").split("x"))
    return Tile(block, stages, text.endswith("w"))


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/gqa.py --arch Qwen3-30B-A3B --length 32768",
            "python benchmarks/gqa.py --arch gpt-oss-20b --kv_cache int8 --queries 8",
        ),
    )
    add = parser.add_argument
    add("--arch", default="Qwen3-30B-A3B")
    add("--length", type=int, nargs="+", default=[256, 32768], help="positions of the cache")
    positions = [150, 1000, 4000, 16000, 32000]
    add(
        "--positions",
        type=int,
        nargs="+",
        default=positions,
        metavar="P",
        help="the token's positions",
    )
    add("--queries", type=int, default=1, metavar="N", help="tokens at once, up to 64; default 1")
    add("--kv_cache", choices=KV_CACHES, default="plain")
    add("--tiles", type=parse_tile, nargs="+", metavar="BxS", help="positions x stages")
    add("--parts", type=int, nargs="+", default=[MAX_PARTS], metavar="N", help="at most")
    add("--reach", type=int, metavar="N", help="all positions are less; default: any")
    return parser


@torch.no_grad()
def main() -> None:
    options = (parser := build_parser()).parse_args()
    if not 1 <= options.queries <= MAX_QUERIES:
        parser.error(f"--queries {options.queries}: 1 to {MAX_QUERIES}")
    if options.reach and max(options.positions) + options.queries > options.reach:
        parser.error(f"--reach {options.reach}: positions up to {max(options.positions)} exceed it")
    require_gpu(parser)
    args = architecture(options.arch)
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{options.arch}, {options.kv_cache} cache, queries: {options.queries}, {gpu}")
    print(HEADER)
    for length in options.length:
        try:
            measure(args, length, KV_CACHES[options.kv_cache], options)
        except ValueError as error:
            parser.error(f"--arch {options.arch}: {error}")


if __name__ == "__main__":
    main()
