"""Time of a few tokens' attention over a short cache: the fused kernel against Inductor's kernels.

    python benchmarks/decode_attention.py --arch Mixtral-8x7B --length 256 1024
    python benchmarks/decode_attention.py --arch gpt-oss-20b --queries 8

--ranks N measures one rank's heads of tensor parallelism on N GPUs. A layer's attention, from wqkv
to wo, runs as in a decode step: compiled, in a CUDA graph; 16 layers in turn, so that L2 holds no
weights. us are of one layer. "several" and "one" are without the two products, which have a column
of their own. The last column is the relative difference of the results. These times decide
`runtime.fused_attention.MAX_CACHE_LEN`: up to that length the fused kernel is faster. --blocks
tries other numbers of positions than `ops.attention.decode_attention.choose_block`.

--queries N measures N tokens of one sequence, as in a short prompt or a draft, also at the cache's
first position. "position" is the first token's. --blocks has no effect then.
"""

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import Tensor

import tp
from benchmarks.cuda_timing import graph_seconds, require_gpu
from cli.parser import Parser
from model import Context, KVCache, Mask, ModelArgs
from models import build_model
from models.random_weights import architecture, first_layers
from ops.attention import decode_attention
from ops.attention.decode_attention import choose_block
from ops.attention.few_queries_attention import MAX_QUERIES
from ops.inductor import configure_inductor
from ops.plain.attention import causal_bias
from runtime.fused_attention import FusedDecodeAttention, fuse_decode_attention

LAYERS = 16
HEADER = "cache  position   block   products   several us   one us   they differ by"


def random_attention(args: ModelArgs, length: int) -> FusedDecodeAttention:
    """Return one layer's attention with random weights and a random cache, on the GPU.

    Raises ValueError for attention that the fused kernel does not know.
    """
    model = build_model(first_layers(args, 1))
    block = model.layers[0]
    attention = block.attention.bfloat16().to_empty(device="cuda")
    for weight in attention.parameters():
        weight.normal_(0, weight.shape[-1] ** -0.5)
    like = next(attention.parameters())
    attention.allocate(1, length, KVCache, like).kv.normal_()
    fuse_decode_attention(model)
    if not getattr(block.attention, "supported", False):
        raise ValueError("the fused kernel does not compute this model's attention")
    return block.attention


def make_context(
    args: ModelArgs, length: int, position: int, window: int | None, queries: int = 1
) -> Context:
    """Return the context of tokens from this position on."""
    device = torch.device("cuda")
    positions = torch.arange(position, position + queries, device=device).unsqueeze(0)
    masks = {window: Mask(causal_bias(positions, length, window, torch.bfloat16))}
    table = build_model(first_layers(args, 1)).make_rope_table(length, device)
    return Context(table[positions].unsqueeze(2), positions=positions, masks=masks)


def products(x: Tensor, layer: FusedDecodeAttention, context: Context) -> Tensor:
    """The two products alone."""
    return layer.wo(layer.wqkv(x).narrow(-1, 0, layer.wo.weight.shape[1]))


def several(x: Tensor, layer: FusedDecodeAttention, context: Context) -> Tensor:
    """Plain attention: several kernels of Inductor's."""
    return layer.wo(layer.plain[0].core(layer.wqkv(x), context))


def one(x: Tensor, layer: FusedDecodeAttention, context: Context) -> Tensor:
    """The fused kernel, at any length."""
    return layer.wo(layer.fused_core(layer.wqkv(x), context))


def compile_form(form: Callable, x: Tensor) -> Callable:
    """Return a compiled function of a layer and a context."""

    def step(layer: FusedDecodeAttention, context: Context) -> Tensor:
        return form(x, layer, context)

    return torch.compile(step, fullgraph=True, dynamic=False)


def run_form(form: Callable, layers: list, context: Context) -> tuple[float, Tensor]:
    """Return us of a layer, and the first layer's result."""
    step = partial(form, context=context)
    result = step(layers[0]).float()
    return graph_seconds(step, layers) * 1e6, result


def measure(args: ModelArgs, length: int, queries: int, blocks: list[int] | None) -> None:
    """Print a row for each block at some positions in a cache of this length."""
    layers = [random_attention(args, length) for _ in range(LAYERS)]
    x = torch.randn(1, queries, args.dim, device="cuda", dtype=torch.bfloat16)
    compiled = [compile_form(form, x) for form in (products, several, one)]
    first = (0,) if queries > 1 else ()
    for position in (*first, length // 4 - 1, 3 * length // 4 - 1, length - queries):
        context = make_context(args, length, position, layers[0].window, queries)
        alone, _ = run_form(compiled[0], layers, context)
        plain, expected = run_form(compiled[1], layers, context)
        for block in blocks or [choose_block(args.head_dim, x.element_size())]:
            with mock.patch.object(decode_attention, "choose_block", lambda *_, block=block: block):
                fused, result = run_form(compiled[2], layers, context)
            error = ((result - expected).norm() / expected.norm()).item()
            print(
                f"{length:5}  {position:8}   {block:5}   {alone:8.2f}   "
                f"{plain - alone:10.2f}   {fused - alone:6.2f}   {error:.1e}",
                flush=True,
            )


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/decode_attention.py --arch Mixtral-8x7B --ranks 4",
            "python benchmarks/decode_attention.py --arch Qwen3-30B-A3B --length 1024",
        ),
    )
    add = parser.add_argument
    add("--arch", default="Mixtral-8x7B")
    add("--ranks", type=int, default=1, help="GPUs that tensor parallelism shards over; default 1")
    add("--length", type=int, nargs="+", default=[256, 512], help="cache lengths")
    add("--queries", type=int, default=1, metavar="N", help="tokens at once, up to 8; default 1")
    sizes, help_text = (32, 64, 128, 256), "positions that are read at once: 32, 64, 128 or 256"
    add("--blocks", type=int, nargs="+", choices=sizes, metavar="N", help=help_text)
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    if not 1 <= options.queries <= MAX_QUERIES:
        parser.error(f"--queries {options.queries}: 1 to {MAX_QUERIES}")
    require_gpu(parser)
    args = architecture(options.arch)
    if why := tp.shard_refusal(args, {}, options.ranks, "tensor"):
        parser.error(why)
    args = tp.local_args(args, options.ranks, "tensor")
    configure_inductor()
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{options.arch} of {options.ranks}, queries: {options.queries}, {gpu}")
    print(HEADER)
    for length in options.length:
        try:
            measure(args, length, options.queries, options.blocks)
        except ValueError as error:
            parser.error(f"--arch {options.arch}: {error}")


if __name__ == "__main__":
    main()
