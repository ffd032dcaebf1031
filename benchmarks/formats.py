"""Speed of one token's expert products in each number format: python benchmarks/formats.py --arch Mixtral-8x7B

With --ranks N of the part of them that one of so many GPUs has.

Times `gated`, the weighted sum of `gathered` and both in turn as the model runs them (compiled, recorded as a CUDA
graph), with a different choice of experts each time so that nothing is read from the cache. GB/s count the packed bytes
with scales and zeros, gaps between kernels included; the last column is the part of the read bandwidth measured in the
same run.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import tp
from args import ModelArgs
from benchmark import read_bandwidth
from command import Parser
from compiling import compile_settings
from layers import weighted_sum
from model import Experts
from packing import FORMATS, PLAIN
from quantize import PackedExpertLinear, pack_weight
from shapes import architecture


def random_experts(args: ModelArgs, mode: str) -> Experts:
    """One layer's experts with random weights on the GPU."""
    with torch.device("cuda"):
        experts = Experts(args).bfloat16()
    for name in ("w13", "w2"):
        plain = experts.get_submodule(name)
        plain.weight.normal_(0, plain.weight.shape[-1] ** -0.5)
        if mode != PLAIN:
            group = FORMATS[mode].choose_group(plain.weight.shape[-1], None)
            spec = {"format": mode, "group_size": group}
            packed = PackedExpertLinear(plain, mode, group)
            for part, value in pack_weight(plain.weight, spec, torch.device("cuda"), iterations=0).items():
                setattr(packed, part, nn.Parameter(value, requires_grad=False))
            experts.set_submodule(name, packed)
    return experts


def seconds(function: Callable, choices: list[Tensor], repeats: int = 20) -> float:
    """Time of one call: the best replay of a CUDA graph that calls it once for each choice of experts."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            for choice in choices:
                function(choice)
    torch.cuda.synchronize()
    graph, best = torch.cuda.CUDAGraph(), float("inf")
    with torch.cuda.graph(graph):
        for choice in choices:
            function(choice)
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / len(choices))
    return best


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/formats.py --arch Mixtral-8x7B",
            "python benchmarks/formats.py --arch OLMoE-1B-7B --mode int4 --mode hqq4",
            "python benchmarks/formats.py --arch Mixtral-8x7B --ranks 4 --mode int8",
        ),
    )
    parser.add_argument("--arch", default="Mixtral-8x7B")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that tensor parallelism cuts experts for; default 1")
    parser.add_argument("--mode", action="append", choices=(PLAIN, *FORMATS), help="repeatable; default: all")
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    args, compiled = architecture(options.arch), {"fullgraph": True, "dynamic": False}
    if why := tp.refusal(args, {}, options.ranks, "tensor"):
        parser.error(why)
    args = tp.local_args(args, options.ranks, "tensor")
    compile_settings()
    ceiling = read_bandwidth(torch.device("cuda"))
    print(f"{options.arch}, {torch.cuda.get_device_name()}, torch {torch.__version__}, read {ceiling / 1e9:.0f} GB/s")
    print("format    gated us   GB/s   weighted us   GB/s    both us   GB/s   fraction")
    for mode in options.mode or (PLAIN, *FORMATS):
        experts = random_experts(args, mode)
        sizes = [
            sum(p.nbytes for p in module.parameters()) * args.n_active // args.n_expert
            for module in (experts.w13, experts.w2)
        ]
        A, count = args.n_active, min(8, args.n_expert // args.n_active)
        choices = [torch.arange(n * A, (n + 1) * A, device="cuda").unsqueeze(0) for n in range(count)]
        x = torch.randn(1, args.dim, device="cuda", dtype=torch.bfloat16)
        hidden = torch.randn(1, A, args.intermediate, device="cuda", dtype=torch.bfloat16)
        weights = torch.rand(1, A, device="cuda")
        gated = torch.compile(lambda choice, e=experts, x=x: e.w13.gated(x, choice), **compiled)

        def w2(choice: Tensor, w2=experts.w2, hidden: Tensor = hidden, weights: Tensor = weights) -> Tensor:
            return weighted_sum(w2.gathered(hidden, choice), weights).bfloat16()

        weighted = torch.compile(w2, **compiled)
        both = torch.compile(lambda choice, e=experts, x=x, w=weights: e.gather(x, choice, w), **compiled)
        columns = []
        for function, size in ((gated, sizes[0]), (weighted, sizes[1]), (both, sum(sizes))):
            time = seconds(function, choices)
            columns.append(f"{time * 1e6:9.1f}  {size / time / 1e9:6.0f}")
        print(f"{mode:6}", "   ".join(columns), f"  {sum(sizes) / time / ceiling:.3f}", flush=True)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
