"""Time of one token's attention over a short cache: the fused kernel against Inductor's kernels.

    python benchmarks/decode_attention.py --arch Mixtral-8x7B --length 256 1024

--ranks N measures one rank's heads of tensor parallelism on N GPUs. A layer's attention, from wqkv
to wo, runs as in a decode step: compiled, in a CUDA graph; 16 layers in turn, so that L2 holds no
weights. us are of one layer. "several" and "one" are without the two products, which have a column
of their own. The last column is the relative difference of the results. These times decide
`runtime.fused_attention.MAX_CACHE_LEN`: up to that length the fused kernel is faster.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import tp
from benchmarks.cuda_timing import graph_seconds, require_gpu
from cli.parser import Parser
from model import Context, KVCache, Mask, ModelArgs
from models import build_model
from models.random_weights import architecture, first_layers
from ops.attention import causal_bias
from ops.inductor import configure_inductor
from runtime.fused_attention import FusedDecodeAttention, fuse_decode_attention

LAYERS = 16
HEADER = "cache  position   products us   several us   one us   they differ by"


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


def make_context(args: ModelArgs, length: int, position: int, window: int | None) -> Context:
    """Return the context of a token at this position."""
    device = torch.device("cuda")
    positions = torch.tensor([[position]], device=device)
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


def measure(args: ModelArgs, length: int) -> None:
    """Print a row for each of two positions in a cache of this length."""
    layers = [random_attention(args, length) for _ in range(LAYERS)]
    x = torch.randn(1, 1, args.dim, device="cuda", dtype=torch.bfloat16)
    forms = {form: compile_form(form, x) for form in (products, several, one)}
    for position in (length // 2 - 1, length - 1):
        context = make_context(args, length, position, layers[0].window)
        times, results = {}, {}
        for form, compiled in forms.items():
            step = partial(compiled, context=context)
            times[form] = graph_seconds(step, layers) * 1e6
            results[form] = step(layers[0]).float()
        expected = results[several]
        error = ((results[one] - expected).norm() / expected.norm()).item()
        rest = times[several] - times[products], times[one] - times[products]
        print(
            f"{length:5}  {position:8}   {times[products]:11.2f}   {rest[0]:10.2f}   "
            f"{rest[1]:6.2f}   {error:.1e}",
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
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    args = architecture(options.arch)
    if why := tp.shard_refusal(args, {}, options.ranks, "tensor"):
        parser.error(why)
    args = tp.local_args(args, options.ranks, "tensor")
    configure_inductor()
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{options.arch} of {options.ranks}, {gpu}")
    print(HEADER)
    for length in options.length:
        try:
            measure(args, length)
        except ValueError as error:
            parser.error(f"--arch {options.arch}: {error}")


if __name__ == "__main__":
    main()
