"""Speed of one token's expert products in one layer, by number format.

    python benchmarks/one_layer.py --arch Mixtral-8x7B

--ranks N measures one rank's shard of tensor parallelism on N GPUs. Three functions are timed: w13
with its activation, w2 with the weighted sum over experts, and both in turn. They run as in a
decode step: compiled, in a CUDA graph. Each call takes other experts, so that L2 holds none of
them. GB/s count the packed bytes with scales and zeros, and gaps between kernels as time. The last
column is the fraction of the read bandwidth that is measured in the same run.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import tp
from benchmarks.cuda_timing import graph_seconds, require_gpu
from benchmarks.decode_speed import read_bandwidth
from cli.parser import Parser
from formats import FORMATS, PLAIN
from formats.packed import PackedExpertLinear
from formats.quantizer import pack_weight
from model import Experts, ModelArgs, MoE, weighted_sum
from models import build_model
from models.random_weights import architecture
from ops.inductor import configure_inductor

COLUMNS = "format    gated us   GB/s   weighted us   GB/s    both us   GB/s   fraction"
MAX_CHOICES = 8  # disjoint choices of A experts


def random_experts(args: ModelArgs, mode: str) -> Experts:
    """Return one layer's experts with random weights on the GPU."""
    layers = [block.ffn for block in build_model(args).layers]
    experts = next(ffn for ffn in layers if isinstance(ffn, MoE)).experts
    experts = experts.bfloat16().to_empty(device="cuda")
    for name in ("w13", "w2"):
        plain = experts.get_submodule(name)
        plain.weight.normal_(0, plain.weight.shape[-1] ** -0.5)
        if hasattr(plain, "bias"):
            plain.bias.zero_()
        if mode != PLAIN:
            experts.set_submodule(name, pack_experts(plain, mode))
    return experts


def pack_experts(plain: nn.Module, mode: str) -> PackedExpertLinear:
    """Pack an ExpertLinear, rounding to nearest."""
    group = FORMATS[mode].choose_group(plain.weight.shape[-1], None)
    spec = {"format": mode, "group_size": group}
    packed = PackedExpertLinear(plain, mode, group)
    parts = pack_weight(plain.weight, spec, plain.weight.device, iterations=0)
    for name, part in parts.items():
        setattr(packed, name, nn.Parameter(part, requires_grad=False))
    return packed


def compile_products(args: ModelArgs, experts: Experts) -> tuple[Callable, Callable, Callable]:
    """Return w13's product, w2's, and both: compiled functions of expert_indices [1, A]."""
    random = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn(1, args.dim, **random)
    hidden = torch.randn(1, args.n_active, args.intermediate, **random)
    weights = torch.rand(1, args.n_active, device="cuda")

    def gated(choice: Tensor) -> Tensor:
        return experts.w13.gather_gated(x, choice, experts.activation)

    def weighted(choice: Tensor) -> Tensor:
        return weighted_sum(experts.w2.gather(hidden, choice), weights).bfloat16()

    def both(choice: Tensor) -> Tensor:
        return experts(x, choice, weights)

    compiled = (
        torch.compile(function, fullgraph=True, dynamic=False)
        for function in (gated, weighted, both)
    )
    return tuple(compiled)


def measure(args: ModelArgs, mode: str, bandwidth: float) -> str:
    """Return the row of a format. bandwidth: of the GPU, bytes/s."""
    experts, A = random_experts(args, mode), args.n_active
    sizes = [
        sum(parameter.nbytes for parameter in module.parameters()) * A // args.n_expert
        for module in (experts.w13, experts.w2)
    ]
    count = min(MAX_CHOICES, args.n_expert // A)
    choices = list(torch.arange(count * A, device="cuda").view(count, 1, A))
    columns = []
    sizes.append(sum(sizes))
    for product, size in zip(compile_products(args, experts), sizes, strict=True):
        seconds = graph_seconds(product, choices)
        columns.append(f"{seconds * 1e6:9.1f}  {size / seconds / 1e9:6.0f}")
    return f"{mode:6} {'   '.join(columns)}   {sizes[-1] / seconds / bandwidth:.3f}"


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/one_layer.py --arch Mixtral-8x7B",
            "python benchmarks/one_layer.py --arch OLMoE-1B-7B --mode int4 --mode hqq4",
            "python benchmarks/one_layer.py --arch Mixtral-8x7B --ranks 4 --mode int8",
        ),
    )
    add = parser.add_argument
    add("--arch", default="Mixtral-8x7B")
    add("--ranks", type=int, default=1, help="GPUs that tensor parallelism shards over; default 1")
    add("--mode", action="append", choices=(PLAIN, *FORMATS), help="repeatable; default: all")
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    args = architecture(options.arch)
    if why := tp.shard_refusal(args, {}, options.ranks, "tensor"):
        parser.error(why)
    args = tp.local_args(args, options.ranks, "tensor")
    configure_inductor()
    bandwidth = read_bandwidth(torch.device("cuda"))
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{options.arch}, {gpu}, read {bandwidth / 1e9:.0f} GB/s")
    print(COLUMNS)
    for mode in options.mode or (PLAIN, *FORMATS):
        print(measure(args, mode, bandwidth), flush=True)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
