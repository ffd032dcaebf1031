"""Generate Inductor's CUDA code on a machine without a GPU, and normalize it for comparison.

A module, not a command: benchmarks/generated_code.py and tests/cuda_codegen.py use it.

Tensors are fake and live on a fake H200, so nothing runs. `pretend_gpu` patches torch for the whole
process and uses private API: call it in a process of its own. The code has no tile shapes: a GPU
chooses them by measurement.
"""

import ast
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.joint_graph as joint_graph
from torch import Tensor, nn
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

try:
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
except ImportError:  # a platform without Triton: then nothing here is called
    GPUTarget = driver = None

H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    total_memory=140 * 2**30,
    L2_cache_size=50 * 2**20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
)

# A fake GPU --------------------------------------------------------------------------------------


def _always(value: object) -> Callable:
    return lambda *args, **kwargs: value


def pretend_gpu() -> None:
    """Make torch and Triton believe that one H200 is present."""
    present = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": H200,
    }
    extra = {"get_device_capability": (9, 0), "is_initialized": True, "_lazy_init": None}
    for name, value in {**present, **extra}.items():
        setattr(torch.cuda, name, _always(value))
    for name in ("_exchange_device", "_maybe_exchange_device"):
        setattr(torch.cuda, name, _always(0))
    torch.cuda.get_rng_state = _always(torch.zeros(1))
    torch.cuda.set_rng_state = _always(None)
    interface = device_interface.CudaInterface
    extra = {
        "get_compute_capability": 90,
        "synchronize": None,
        "get_raw_stream": 0,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }
    for name, value in {**present, **extra}.items():
        setattr(interface, name, staticmethod(_always(value)))
    interface.Worker.get_device_properties = staticmethod(_always(H200))
    interface.Worker.current_device = staticmethod(_always(0))
    target = types.SimpleNamespace(
        get_current_target=_always(GPUTarget("cuda", 90, 32)),
        get_current_device=_always(0),
        get_active_torch_device=_always(torch.device("cuda", 0)),
    )
    driver.set_active(target)
    _replace_methods()
    _keep_passes_off_the_gpu()


def _replace_methods() -> None:
    """Replace the methods of Tensor that need a CUDA driver: subscripts and copies."""

    def indices(index) -> list[Tensor | None]:
        index = index if isinstance(index, tuple) else (index,)
        return [i if isinstance(i, Tensor) else None for i in index]

    def subscript(self: Tensor, index) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        if any(isinstance(i, Tensor) for i in index):
            return torch.ops.aten.index.Tensor(self, indices(index))
        axis = 0
        for i in index:
            if i is Ellipsis:
                axis = self.ndim - (len(index) - index.index(Ellipsis) - 1)
            elif i is None:
                self, axis = self.unsqueeze(axis), axis + 1
            elif isinstance(i, int):
                self = self.select(axis, i)
            else:
                if i != slice(None):
                    self = torch.ops.aten.slice.Tensor(self, axis, i.start, i.stop)
                axis += 1
        return self

    def assign(self: Tensor, index, value) -> None:
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=self.dtype, device=self.device)
        torch.ops.aten.index_put_.default(self, indices(index), value)

    Tensor.__getitem__ = subscript
    Tensor.__setitem__ = assign

    def contiguous(self: Tensor, memory_format=torch.contiguous_format) -> Tensor:
        if self.is_contiguous(memory_format=memory_format):
            return self
        return torch.ops.aten.clone(self, memory_format=memory_format)

    Tensor.contiguous = contiguous
    Tensor.copy_ = lambda self, source: torch.ops.aten.copy_.default(self, source)


def _keep_passes_off_the_gpu() -> None:
    """Let Inductor's graph passes trace their patterns and fold constants on the CPU."""
    trace_patterns = joint_graph.lazy_init
    joint_graph.lazy_init = lambda device=None: trace_patterns(torch.device("cpu"))
    folder = joint_graph.UniformValueConstantFolder
    fold_node = folder._deduce_value

    def fold_node_on_cpu(self, node: torch.fx.Node):
        kwargs = node.kwargs
        if "device" in kwargs:
            node.kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            return fold_node(self, node)
        finally:
            node.kwargs = kwargs

    folder._deduce_value = fold_node_on_cpu


# Fake tensors ------------------------------------------------------------------------------------


def fake_empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def move_to_fake_gpu(model: nn.Module) -> None:
    """Replace each parameter, for example one on the meta device, by an empty one on the GPU."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = fake_empty(*parameter.shape, dtype=parameter.dtype)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))


# Code --------------------------------------------------------------------------------------------


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Make eager code on the fake GPU take the path that it takes when it is compiled."""
    make_tensor = torch.tensor

    def tensor_by_cpu(data, *, dtype=None, device=None) -> Tensor:
        return make_tensor(data, dtype=dtype).to(device)  # making one on the GPU copies data there

    compiling = mock.patch.object(torch.compiler, "is_compiling", _always(True))
    with compiling, mock.patch.object(torch, "tensor", tensor_by_cpu):
        yield


def cuda_code(build: Callable[[], tuple[Callable, tuple]]) -> str:
    """Return the code of one function, traced without Dynamo and without Inductor's graph passes.

    build: called under the fake mode; returns the function and its arguments, all tensors.
    Faster than `compiled_code`; read it as "does this formulation fuse".
    """
    config = inductor_config.patch(compile_threads=1)
    with FakeTensorMode() as fake, torch.no_grad(), config, as_if_compiling():
        function, arguments = build()
        decompositions = select_decomp_table()
        tracer = make_fx(function, decomposition_table=decompositions, tracing_mode="real")
        traced = tracer(*arguments)
        graph = GraphLowering(traced, example_inputs=list(arguments), shape_env=None)
        handlers = V.set_graph_handler(graph), V.set_fake_mode(fake)
        with handlers[0], handlers[1], V.set_debug_handler(DebugContext()):
            graph.run(*arguments)
            code, _ = graph.codegen()
    return getattr(code, "value", str(code))


class _Generated(BaseException):
    """Carries the generated code out of torch.compile, which would go on to run it."""


def compiled_code(build: Callable[[], tuple[Callable, tuple]]) -> str:
    """Return the code of one function as torch.compile makes it: `fullgraph=True, dynamic=False`.

    build: called under the fake mode; returns the function and its arguments.
    """

    def stop(graph: GraphLowering):
        code, _ = graph.codegen()
        raise _Generated(getattr(code, "value", str(code)))

    torch._dynamo.reset()
    config = inductor_config.patch(
        compile_threads=1,
        force_disable_caches=True,
        shape_padding=False,  # decided by measurement on the GPU
    )
    stopping = mock.patch.object(GraphLowering, "compile_to_module", stop)
    try:
        with FakeTensorMode(), torch.no_grad(), config, stopping:
            with as_if_compiling():
                function, arguments = build()
            torch.compile(function, fullgraph=True, dynamic=False)(*arguments)
    except _Generated as generated:
        return str(generated)
    raise RuntimeError("nothing was compiled")


# Normalized text ---------------------------------------------------------------------------------

# Metadata without an effect on the machine code.
NAMES_AND_HASHES = "kernel_name", "backend_hash", "device"
BOOKKEEPING = re.compile(
    r"assert_size_stride|assert_alignment|del |args\.clear|raw_stream\d+ =|torch\.cuda\.set_device"
    r"|.* = copy_if_misaligned"
)


class _Names:
    """Rename identifiers in the order in which they first appear."""

    def __init__(self, pattern: str, prefix: str):
        self.pattern, self.prefix = re.compile(rf"\b(?:{pattern})\b"), prefix
        self.known: dict[str, str] = {}

    def rename(self, text: str) -> str:
        def new_name(match: re.Match) -> str:
            return self.known.setdefault(match[0], f"{self.prefix}{len(self.known)}")

        return self.pattern.sub(new_name, text)


def normalize(code: str) -> str:
    """Return Inductor's code without comments, paths and hashes; names number their appearance.

    First the launches and library calls of the step in order, then each kernel.
    """
    module = ast.parse(code)
    sources, call = {}, None
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
            name, source = node.args[:2]
            sources[name.value] = source.value
        elif isinstance(node, ast.FunctionDef) and node.name == "call":
            call = node
    kernels = _Names(r"triton_\w+", "kernel_")
    steps = [kernels.rename(line) for line in _normalize_call(call)]
    for name, renamed in kernels.known.items():
        steps += ["", f"# {renamed}", _normalize_kernel(sources[name]).replace(name, renamed)]
    return "\n".join(steps) + "\n"


def _normalize_call(call: ast.FunctionDef) -> Iterator[str]:
    """Yield the statements of the generated `call`, without bookkeeping."""
    statements = []
    for statement in call.body:
        statements += statement.body if isinstance(statement, ast.With) else [statement]
    shapes, inputs = {}, []
    for node in ast.walk(call):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "assert_size_stride":
            name, *rest = map(ast.unparse, node.args)
            shapes[name] = ", ".join(rest[:2])
    buffers = _Names(r"buf\d+", "buf")
    for line in map(ast.unparse, statements):
        if line.endswith("= args"):
            inputs = re.findall(r"\w+", line.removesuffix("= args"))
            arguments = _Names("|".join(inputs), "input")
        elif BOOKKEEPING.match(line):
            continue
        elif line.startswith("return"):
            results = ast.parse(line.removeprefix("return ")).body[0].value.elts
            names = [buffers.rename(arguments.rename(ast.unparse(result))) for result in results]
            yield "return " + ", ".join(sorted(names))
        else:
            line = re.sub(r", stream=\w+", "", line)
            yield buffers.rename(arguments.rename(line))
    for name, renamed in arguments.known.items():
        yield f"{renamed}: {shapes.get(name, 'not read')}"


def _normalize_kernel(source: str) -> str:
    """Return a Triton kernel with its decorators, without imports and comments."""
    texts = []
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef):  # the kernel, or a helper that it calls
            for node in ast.walk(function):
                if isinstance(node, ast.Dict):
                    _drop_keys(node)
            texts.append(ast.unparse(function).replace(", filename=__file__", ""))
    return _Names(r"_?tmp\d+(?:_\w+)?", "t").rename("\n".join(texts))


def _drop_keys(node: ast.Dict) -> None:
    pairs = zip(node.keys, node.values, strict=True)
    kept = [(k, v) for k, v in pairs if getattr(k, "value", None) not in NAMES_AND_HASHES]
    node.keys, node.values = [k for k, _ in kept], [v for _, v in kept]
