"""Time of one token's attention over a long cache: its kernel, at several positions.

    python benchmarks/split_attention.py --arch Qwen3-30B-A3B --length 4608 --positions 200 4000

Kernels of several layers run in turn, each waiting for the one before, as in a decode step; L2
holds no cache. us are of one layer. GB/s count the keys and values that are read. "token" is the
kernel for short caches, which reads them once for each query head. "differs" is the relative
difference from plain attention. --tiles tries other tiles than `ops.attention.split_attention.choose_tile`,
as positions x warps x stages; --parts other numbers of positions of a part.
"""

import argparse
import itertools
from unittest import mock

import torch

from benchmarks.cuda_timing import graph_seconds, require_gpu
from benchmarks.decode_attention import make_context
from cli.parser import Parser
from formats.kv_cache import KV_CACHES
from model import Attention, Context, KVCache, ModelArgs
from models import build_model
from models.random_weights import architecture, first_layers
from ops.attention import split_attention
from ops.attention.split_attention import PART, PROGRAMS, Tile
from runtime.fused_attention import FusedDecodeAttention, fused_attention

MAX_LAYERS, MAX_BYTES = 16, 8 << 30
HEADER = "cache    position   part  programs        tile        us    GB/s   token us   differs"


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


def kernel_us(layers: list, inputs: list, context: Context, is_short: bool) -> float:
    """Return us of one layer's kernel: `attend_token` if `is_short`, else `attend_split`."""

    def step(index: int) -> None:
        layers[index].fused_core(inputs[index], context)

    with mock.patch.object(FusedDecodeAttention, "is_short", lambda *_: is_short):
        return graph_seconds(step, range(len(layers))) * 1e6


def difference(layer: FusedDecodeAttention, qkv: torch.Tensor, context: Context) -> float:
    """Return the relative difference of the kernel from plain attention."""
    with mock.patch.object(FusedDecodeAttention, "is_short", lambda *_: False):
        found = layer.fused_core(qkv, context).float()
    expected = layer.plain[0].core(qkv, context).float()
    return ((found - expected).norm() / expected.norm()).item()


def measure(args: ModelArgs, length: int, kind: type[KVCache], options: argparse.Namespace) -> None:
    """Print a row for each position, part and tile."""
    layer = random_layer(args, length, kind)
    _, K, C = layer.heads
    entry = 2 * K * (C + 2 if kind is not KVCache else 2 * C)  # bytes of a position
    count = max(1, min(MAX_LAYERS, MAX_BYTES // (entry * length)))
    layers = [layer, *(random_layer(args, length, kind) for _ in range(count - 1))]
    name = layer.settings.get("projection", "wqkv")
    width = getattr(layer, name).weight.shape[0]
    inputs = [torch.randn(1, 1, width, device="cuda", dtype=torch.bfloat16) for _ in layers]
    for position in (p for p in options.positions if p < length):
        context = make_context(args, length, position, None)
        token = kernel_us(layers, inputs, context, True) if kind is KVCache else float("nan")
        variants = itertools.product(options.parts, options.programs, options.tiles or (None,))
        for part, programs, tile in variants:
            tile = tile or split_attention.choose_tile(C, 1 if kind is not KVCache else 2)
            with mock.patch.multiple(
                split_attention,
                PART=part,
                PROGRAMS=programs,
                choose_tile=lambda *_, tile=tile: tile,
            ):
                us = kernel_us(layers, inputs, context, False)
                error = difference(layer, inputs[0], context)
            shape = "x".join(map(str, tile))
            print(
                f"{length:7}  {position:7}  {part:5}  {programs:8}  {shape:>10}  {us:8.2f}  "
                f"{entry * position / us / 1e3:6.0f}  {token:8.2f}   {error:.1e}",
                flush=True,
            )


def parse_tile(text: str) -> Tile:
    """Parse "64x4x3". Raises ValueError for other text."""
    block, warps, stages = (int(part) for part in text.split("x"))
    return Tile(block, warps, stages)


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/split_attention.py --arch Qwen3-30B-A3B --length 131072",
            "python benchmarks/split_attention.py --arch gpt-oss-20b --kv_cache int8",
        ),
    )
    add = parser.add_argument
    add("--arch", default="Qwen3-30B-A3B")
    add("--length", type=int, default=4608, help="positions of the cache, a multiple of 128 (4608)")
    add("--positions", type=int, nargs="+", default=[5, 200, 1000, 4000], metavar="P")
    add("--kv_cache", choices=KV_CACHES, default="plain")
    add("--tiles", type=parse_tile, nargs="+", metavar="BxWxS")
    add("--parts", type=int, nargs="+", default=[PART], metavar="N")
    add("--programs", type=int, nargs="+", default=[PROGRAMS], metavar="N", help="per processor")
    return parser


@torch.no_grad()
def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    args = architecture(options.arch)
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{options.arch}, {options.kv_cache} cache, {gpu}")
    print(HEADER)
    try:
        measure(args, options.length, KV_CACHES[options.kv_cache], options)
    except ValueError as error:
        parser.error(f"--arch {options.arch}: {error}")


if __name__ == "__main__":
    main()
