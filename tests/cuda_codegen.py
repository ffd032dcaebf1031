"""Inductor's CUDA code for one decode step of a block, made on a machine without a GPU: `python tests/cuda_codegen.py`.

Fake tensors on a fake H200: nothing is run. It patches `torch.cuda` for the whole process and leans on private API, so
tests run it in a process of its own. It skips Dynamo and autotuning: read it as "does this formulation fuse". Prints
one JSON object: for each case the Triton kernels, the library calls left over, the elements of the largest buffer,
roundings to bf16 that the compiler cannot leave out, products of bytes, and what kernels use too early.
"""

import json
import math
import re
import sys
import types

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import tp
from args import ModelArgs
from attention import Context, KVCache, View, attend
from compiling import compile_settings
from layers import realise
from model import Block, ExpertLinear
from packing import FORMATS
from quantize import Int8KVCache, PackedExpertLinear, PackedLinear
from session import CANDIDATES, sample
from shapes import ARCHITECTURES, first_layers

H200 = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=140 * 2**30,
    L2_cache_size=50 * 2**20, shared_memory_per_block=49152, shared_memory_per_block_optin=232448, gcnArchName="",
)  # fmt: skip


def pretend_gpu() -> None:
    """Make torch and Triton believe that one H200 is present, and keep subscripts from asking the driver for it."""

    def always(value):
        return lambda *args, **kwargs: value

    present = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": H200}
    extra = {"get_device_capability": (9, 0), "is_initialized": True, "_lazy_init": None}
    for name, value in {**present, **extra}.items():
        setattr(torch.cuda, name, always(value))
    torch.compiler.is_compiling = always(True)  # or operators of ours would be plain functions
    extra = {"get_compute_capability": 90, "synchronize": None, "get_raw_stream": 0, "is_triton_capable": True,
             "raise_if_triton_unavailable": None}  # fmt: skip
    for name, value in {**present, **extra}.items():
        setattr(device_interface.CudaInterface, name, staticmethod(always(value)))
    device_interface.CudaInterface.Worker.get_device_properties = staticmethod(always(H200))
    device_interface.CudaInterface.Worker.current_device = staticmethod(always(0))
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=always(GPUTarget("cuda", 90, 32)),
            get_current_device=always(0),
            get_active_torch_device=always(torch.device("cuda", 0)),
        )
    )

    def parts(index):
        return [i if isinstance(i, Tensor) else None for i in (index if isinstance(index, tuple) else (index,))]

    def subscript(self: Tensor, index) -> Tensor:
        if any(isinstance(i, Tensor) for i in (index if isinstance(index, tuple) else (index,))):
            return torch.ops.aten.index.Tensor(self, parts(index))
        for axis, some in enumerate(index if isinstance(index, tuple) else (index,)):  # slices from the left
            self = torch.ops.aten.slice.Tensor(self, axis, some.start, some.stop)
        return self

    Tensor.__getitem__ = subscript
    Tensor.__setitem__ = lambda self, index, value: torch.ops.aten.index_put_.default(self, parts(index), value)


def cuda_code(build) -> str:
    """The Python and Triton text that Inductor emits for `function(*arguments)`, the pair that `build()` returns."""
    with FakeTensorMode() as fake, torch.no_grad(), inductor_config.patch(compile_threads=1):
        function, arguments = build()
        traced = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*arguments)
        graph = GraphLowering(traced, example_inputs=list(arguments), shape_env=None)
        with V.set_graph_handler(graph), V.set_fake_mode(fake), V.set_debug_handler(DebugContext()):
            graph.run(*arguments)
            code, _ = graph.codegen()
    return getattr(code, "value", str(code))


def summary(code: str) -> dict:
    """Kernels, library calls, the sizes of the buffers allocated between them, roundings kept, products of bytes."""
    shapes = re.findall(r"empty_strided_cuda\((\([^)]*\))", code)
    return {
        "triton": code.count("@triton.jit"),
        "extern": re.findall(r"extern_kernels\.\w+", code),
        "ours": re.findall(r" = torch\.ops\.moe_fast\.(\w+)", code),
        "largest_buffer": max((math.prod(int(n) for n in re.findall(r"\d+", shape)) for shape in shapes), default=0),
        "rounded": code.count(".to(tl.bfloat16).to(tl.int16, bitcast=True)"),
        "as_bytes": code.count("dp2a.lo"),
        "early": early_uses(code),
    }


def split_arguments(text: str) -> list[str]:
    """What commas separate, but for those within brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def early_uses(code: str) -> list[str]:
    """Kernels that, before they wait for the kernel before them, read what it writes or write what it uses.

    With programmatic dependent launch they may run before it has ended. For the kernels before that one it has itself
    waited, so one that never waits is found too. A load in a loop stands before a wait after the loop in the text, too.
    """
    kernels, early, renamed, read, written = {}, [], {}, set(), set()
    for name, parameters, body in re.findall(r"\ndef (triton_\w+)\(([^)]*)\):\n((?:    .*\n|\n)+)", code):
        before, waits, _ = body.partition("gdc_wait()")
        assert not waits or "gdc_launch_dependents()" not in before, f"{name} lets the next one start, then waits"
        loads, stores = r"tl\.load\((\w+)", r"tl\.(?:store|atomic_\w+)\((\w+)"
        names = re.findall(r"(\w+)(?:\s*:[^,]*)?(?:,|$)", parameters)
        kernels[name] = names, bool(waits), *(re.findall(p, t) for t in (before, body) for p in (loads, stores))

    def buffer(argument: str) -> str:
        name = re.sub(r"reinterpret_tensor\((\w+).*", r"\1", argument)
        return buffer(renamed[name]) if name in renamed else name

    for line in map(str.strip, code[code.index("def call") :].splitlines()):
        if launch := re.match(r"(triton_\w+)\.run\((.*), stream=", line):
            names, waits, *uses = kernels[launch[1]]
            given = dict(zip(names, map(buffer, split_arguments(launch[2])), strict=False))
            soon_read, soon_written, now_read, now_written = ({given[p] for p in some} for some in uses)
            early += [] if waits else [f"{launch[1]} never waits"]
            early += [f"{launch[1]} reads {name}" for name in soon_read & written]
            early += [f"{launch[1]} writes {name}" for name in soon_written & (read | written)]
            read, written = now_read, now_written
        elif library := re.match(r"(?:extern_kernels\..*out=(\w+)|(\w+) = torch\.ops\.)", line):
            read, written = set(re.findall(r"\w+", line)), {buffer(library[1] or library[2])}
        elif again := re.match(r"(\w+) = (\w+)(?:\[\d\])?(?:; del \2.*)?$", line):
            renamed[again[1]] = again[2]
    return early


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def routing(args: ModelArgs, tokens: int = 1) -> tuple[Tensor, Tensor]:
    shape = (tokens, args.n_active)
    return new(*shape, dtype=torch.int64), new(*shape, dtype=torch.float32)


def experts(args: ModelArgs):
    """The gather path of one layer's experts, one token."""
    with torch.device("cuda"):
        layer = Block(args, len(args.dense_layers)).ffn.experts
    return lambda x, indices, weights: layer.gather(x, indices, weights), (new(1, args.dim), *routing(args))


def packed_experts(args: ModelArgs, mode: str):
    """The same with the weights in a number format."""
    with torch.device("cuda"):
        layer = Block(args, 0).ffn.experts
        for name in ("w13", "w2"):
            layer.set_submodule(name, PackedExpertLinear(layer.get_submodule(name), mode, FORMATS[mode].group))
    return lambda x, indices, weights: layer.gather(x, indices, weights), (new(1, args.dim), *routing(args))


def packed_linear(args: ModelArgs, mode: str):
    """A dense weight in a number format: the attention's output."""
    with torch.device("cuda"):
        plain = Block(args, 0).attention.wo
        linear = PackedLinear(plain, mode, FORMATS[mode].group)
    return lambda x: linear(x), (new(1, 1, args.n_head * args.head_dim),)


class CopiedKVCache(Int8KVCache):
    """The cache to avoid: all its codes become numbers in memory before attention reads one."""

    def update(self, positions: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(realise(part) for part in super().update(positions, kv))


def early_reader(args: ModelArgs):
    """The formulation to avoid: what writes the cache and what reads it have no kernel between them."""
    with torch.device("cuda"):
        cache = KVCache((1, args.n_kv_head, 1024, args.head_dim), torch.bfloat16, torch.device("cuda"))

    def step(positions: Tensor, kv: Tensor, q: Tensor, bias: Tensor) -> Tensor:
        return attend(q, *cache.update(positions, kv), bias)

    kv = new(1, 1, 2, args.n_kv_head, args.head_dim)
    return step, (new(1, 1, dtype=torch.int64), kv, new(1, 1, args.n_head, args.head_dim), new(1, 1, 1024))


def sampling(args: ModelArgs):
    """The choice of a token."""
    V = args.vocab_size
    logits, controls = new(1, V, dtype=torch.float32), new(5, dtype=torch.float32)
    return sample, (logits, controls, new(1, V, dtype=torch.bool), new(1, CANDIDATES, dtype=torch.float32))


def library_products(args: ModelArgs):
    """The formulation to avoid: two rows a product, so that Inductor leaves it, and the gather before it, to cuBLAS."""
    with torch.device("cuda"):
        w13 = ExpertLinear(args.n_expert, args.dim, 2 * args.intermediate)

    def product(x: Tensor, expert_indices: Tensor) -> Tensor:
        return torch.einsum("tani,taoi->tano", x, w13.weight[expert_indices])

    return product, (new(1, args.n_active, 2, args.dim), routing(args)[0])


def block(args: ModelArgs, length: int = 256, kind: type[KVCache] = KVCache, ranks: int = 1):
    """A whole block, one token, a cache of so many positions; or the first rank's part of it."""
    model = tp.Part(args, {}, "tensor", 0, ranks).model
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            on_gpu = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
            setattr(module, name, nn.Parameter(on_gpu, requires_grad=False))
    model.cache_kind = kind
    model.setup_cache(1, length)
    n = len(args.dense_layers)  # the first with experts

    def step(x: Tensor, normed: Tensor, positions: Tensor, rope: Tensor, bias: Tensor):
        context = Context(rope, positions=positions, views={args.window(n): View(bias)})
        return model.layers[n](x, normed, context, model.norm)

    return step, (
        new(1, 1, args.dim),
        new(1, 1, args.dim),
        new(1, 1, dtype=torch.int64),
        new(1, 1, 1, 2 * (args.rotary_dim if args.kv_rank else args.head_dim), dtype=torch.float32),
        new(1, 1, length),
    )


def main() -> int:
    pretend_gpu()
    compile_settings()
    torch.set_default_dtype(torch.bfloat16)
    results = {}
    args = ARCHITECTURES["gpt-oss-20b"]  # biases, sinks, a limit; and its published format
    for name, case in (
        ("experts", experts), ("block", block), ("packed_experts mxfp4", lambda args: packed_experts(args, "mxfp4")),
    ):  # fmt: skip
        results[f"gpt-oss-20b {name}"] = summary(cuda_code(lambda case=case: case(args)))
    for arch, layers in (("DeepSeek-V2-Lite", 2), ("DeepSeek-V3", 4)):
        args = first_layers(ARCHITECTURES[arch], layers)
        results[f"{arch} experts"] = summary(cuda_code(lambda args=args: experts(args)))
        for kind in (KVCache, Int8KVCache):
            code = cuda_code(lambda args=args, kind=kind: block(args, 1024, kind))
            results[f"{arch} block {kind.__name__}"] = summary(code)
    for arch in ("Mixtral-8x7B", "OLMoE-1B-7B"):  # the latter sums in its attention too
        args = first_layers(ARCHITECTURES[arch], 1)
        results[f"{arch} block of 2"] = summary(cuda_code(lambda args=args: block(args, ranks=2)))
    for arch in ("Mixtral-8x7B", "Qwen3-30B-A3B"):
        args = ARCHITECTURES[arch]
        for case in (experts, library_products, block, early_reader, sampling):
            code = cuda_code(lambda case=case, args=args: case(args))
            results[f"{arch} {case.__name__}"] = summary(code)
        for kind in (KVCache, Int8KVCache, CopiedKVCache):
            code = cuda_code(lambda args=args, kind=kind: block(args, 1024, kind))
            results[f"{arch} block {kind.__name__}"] = summary(code)
        for mode in FORMATS:
            for case in (packed_experts, packed_linear):
                code = cuda_code(lambda case=case, args=args, mode=mode: case(args, mode))
                results[f"{arch} {case.__name__} {mode}"] = summary(code)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
