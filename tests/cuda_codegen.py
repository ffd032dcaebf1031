"""Inductor's CUDA code for one decode step of a block, made on a machine without a GPU: `python tests/cuda_codegen.py`.

Fake tensors on a fake H200: nothing is run. It patches `torch.cuda` for the whole process and leans on private API, so
tests run it in a process of its own. It skips Dynamo and autotuning: read it as "does this formulation fuse". Prints
one JSON object: for each case the Triton kernels, the library calls left over, the elements of the largest buffer.
"""

import json
import math
import re
import sys
import types

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from benchmark import ARCHITECTURES
from model import Block, Context, ExpertLinear, ModelArgs, Transformer
from quantize import FORMATS, PackedExpertLinear, PackedLinear
from session import compile_settings

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

    Tensor.__getitem__ = lambda self, index: torch.ops.aten.index.Tensor(self, parts(index))
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
    """Kernels, library calls, and the sizes of the buffers allocated between them."""
    shapes = re.findall(r"empty_strided_cuda\((\([^)]*\))", code)
    return {
        "triton": code.count("@triton.jit"),
        "extern": re.findall(r"extern_kernels\.\w+", code),
        "largest_buffer": max((math.prod(int(n) for n in re.findall(r"\d+", shape)) for shape in shapes), default=0),
    }


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def routing(args: ModelArgs, tokens: int = 1) -> tuple[Tensor, Tensor]:
    shape = (tokens, args.n_active)
    return new(*shape, dtype=torch.int64), new(*shape, dtype=torch.float32)


def experts(args: ModelArgs):
    """The gather path of one layer's experts, one token."""
    with torch.device("cuda"):
        layer = Block(args, 0).ffn.experts
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


def library_products(args: ModelArgs):
    """The formulation to avoid: two rows a product, so that Inductor leaves it, and the gather before it, to cuBLAS."""
    with torch.device("cuda"):
        w13 = ExpertLinear(args.n_expert, args.dim, 2 * args.intermediate)

    def product(x: Tensor, expert_indices: Tensor) -> Tensor:
        return torch.einsum("tani,taoi->tano", x, w13.weight[expert_indices])

    return product, (new(1, args.n_active, 2, args.dim), routing(args)[0])


def block(args: ModelArgs):
    """A whole block, one token, a cache of 256."""
    with torch.device("cuda"):
        model = Transformer(args)
        model.setup_cache(1, 256)

    def step(x: Tensor, normed: Tensor, positions: Tensor, rope: Tensor, bias: Tensor):
        return model.layers[0](x, normed, Context(rope, positions=positions, bias=bias), model.norm)

    return step, (
        new(1, 1, args.dim),
        new(1, 1, args.dim),
        new(1, 1, dtype=torch.int64),
        new(1, 1, 1, 2 * args.head_dim, dtype=torch.float32),
        new(1, 1, 256),
    )


def main() -> int:
    pretend_gpu()
    compile_settings()
    torch.set_default_dtype(torch.bfloat16)
    results = {}
    for arch in ("Mixtral-8x7B", "Qwen3-30B-A3B"):
        args = ARCHITECTURES[arch]
        for case in (experts, library_products, block):
            code = cuda_code(lambda case=case, args=args: case(args))
            results[f"{arch} {case.__name__}"] = summary(code)
        for mode in FORMATS:
            for case in (packed_experts, packed_linear):
                code = cuda_code(lambda case=case, args=args, mode=mode: case(args, mode))
                results[f"{arch} {case.__name__} {mode}"] = summary(code)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
