"""Attention of one token over a short cache, as one kernel and as several: python benchmarks/short_cache.py

With --ranks N of the heads that one of so many GPUs has. Times a layer's attention from wqkv to wo as the model runs it
(compiled, recorded as a CUDA graph), 16 layers in turn so that nothing is read from the cache, and says by how much the
two results differ. us are of one layer, and of that without its two products, as the compiler has them.
"""

from functools import partial
from unittest import mock

import torch
from formats import seconds

import tp
from args import ModelArgs
from attention import Attention, Context, KVCache, View, bias_of, rope_table
from command import Parser
from compiling import compile_settings
from shapes import architecture

LAYERS = 16


def random_layers(args: ModelArgs, length: int) -> list[Attention]:
    with torch.device("cuda"):
        layers = [Attention(args, 0).bfloat16() for _ in range(LAYERS)]
        for layer in layers:
            for weight in layer.parameters():
                weight.normal_(0, weight.shape[-1] ** -0.5)
            layer.cache = KVCache((1, args.n_kv_head, length, args.head_dim), torch.bfloat16, torch.device("cuda"))
            layer.cache.kv.normal_()
    return layers


def context(args: ModelArgs, length: int, position: int) -> Context:
    """Of a token at this position."""
    where, window = torch.tensor([[position]], device="cuda"), args.window(0)
    view = View(bias_of(where, length, window, torch.bfloat16))
    rope = rope_table(args, length, torch.device("cuda"))[where].unsqueeze(2)
    return Context(rope, positions=where, views={window: view})


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/short_cache.py --arch Mixtral-8x7B --ranks 4",
            "python benchmarks/short_cache.py --arch Qwen3-30B-A3B --length 1024",
        ),
    )
    parser.add_argument("--arch", default="Mixtral-8x7B")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that tensor parallelism cuts heads for; default 1")
    parser.add_argument("--length", type=int, nargs="+", default=[256, 512], help="of the cache")
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    args = architecture(options.arch)
    if why := tp.refusal(args, {}, options.ranks, "tensor"):
        parser.error(why)
    args = tp.local_args(args, options.ranks, "tensor")
    compile_settings()
    print(f"{options.arch} of {options.ranks}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("cache  position   products us   several us   one us   they differ by")
    x = torch.randn(1, 1, args.dim, device="cuda", dtype=torch.bfloat16)
    for length in options.length:
        layers, times, results = random_layers(args, length), {}, {}
        positions = length // 2 - 1, length - 1
        for name in ("products", "several", "one"):

            def step(layer: Attention, now: Context, name: str = name) -> torch.Tensor:
                if name == "products":
                    return layer.wo(layer.wqkv(x).narrow(-1, 0, args.n_head * args.head_dim))
                return layer(x, now)

            compiled = torch.compile(step, fullgraph=True, dynamic=False)
            with mock.patch.object(Attention, "fits_one_kernel", lambda *_, name=name: name == "one"):
                for position in positions:
                    now = context(args, length, position)
                    times[name, position] = seconds(partial(compiled, now=now), layers) * 1e6
                    results[name, position] = compiled(layers[0], now=now).float()
        for position in positions:
            products, several, one = (times[name, position] for name in ("products", "several", "one"))
            want, got = (results[name, position] for name in ("several", "one"))
            print(
                f"{length:5}  {position:8}   {products:11.2f}   {several - products:10.2f}   {one - products:6.2f}   "
                f"{((got - want).norm() / want.norm()).item():.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
