"""Inductor helpers: materializing, custom operators, dp2a products, and the compiler's settings.

Only this file and ops/inductor_tuning.py use Inductor's private API.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from pathlib import Path

import torch
from torch import Tensor

from ops import inductor_tuning as tuning

log = logging.getLogger("moe_fast")


def materialize(x: Tensor) -> Tensor:
    """Return x, and keep Inductor from recomputing it in every row of its consumer.

    Inductor has no operation for that, but a view with given strides needs its base in memory. x
    must be a whole tensor or a view that begins where its base begins: a slice from the middle
    would be read from the base's start.
    """
    return x.as_strided(x.shape, x.stride())


def custom_op(name: str, mutates_args: Sequence[str] = ()) -> Callable:
    """Define an operator as `torch.library.custom_op` does, but call it only when necessary.

    That is in compiled code and on the meta device. Elsewhere the function itself is called:
    calling a custom operator imports the compiler, which takes longer than an eager answer of a
    small model.
    """

    def decorate(function: Callable) -> Callable:
        operator = torch.library.custom_op(name, function, mutates_args=mutates_args)

        @wraps(function)
        def call(x: Tensor, *rest):
            traced = torch.compiler.is_compiling() or x.is_meta
            return (operator if traced else function)(x, *rest)

        call.register_fake = operator.register_fake
        return call

    return decorate


@torch.library.custom_op("moe_fast::dot_bytes", mutates_args=())
def dot_bytes(low: Tensor, high: Tensor, words: Tensor) -> Tensor:
    """Multiply each word's four signed bytes by four int16 and sum -> int32.

    All arguments are int32 and broadcast. low: the int16 for the two lower bytes, the first in its
    lower half. high: those for the upper two. A GPU has an instruction for two such products
    (dp2a), PyTorch has none: `register_dot_bytes` lets Inductor fuse it. No byte is converted to
    floating point.
    """
    numbers = [
        part << 16 >> 16 if half == 0 else part >> 16 for part in (low, high) for half in (0, 1)
    ]
    return sum(number * (words << 24 - 8 * n >> 24) for n, number in enumerate(numbers))


@dot_bytes.register_fake
def _(low: Tensor, high: Tensor, words: Tensor) -> Tensor:
    return words.new_empty(torch.broadcast_shapes(low.shape, high.shape, words.shape))


def register_dot_bytes() -> None:
    """Give Inductor a lowering of `dot_bytes` for NVIDIA GPUs. Call it before compiling."""
    # Imported here: the compiler takes long to import.
    from torch._inductor.lowering import lowerings, make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    operator = torch.ops.moe_fast.dot_bytes.default
    if operator not in lowerings:
        asm = "{ .reg .b32 t; dp2a.lo.s32.s32 t, $1, $3, 0; dp2a.hi.s32.s32 $0, $2, $3, t; }"
        pointwise = partial(
            ops.inline_asm_elementwise, asm=asm, constraints="=r,r,r,r", dtype=torch.int32
        )
        lower = register_lowering(operator, broadcast=True, type_promotion_kind=None)
        lower(make_pointwise(pointwise))


class CacheWarnings(logging.Filter):
    """Turns the compiler's reports of damaged or full caches, each a traceback, into one line."""

    reported = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING and "cache" in record.getMessage():
            if not self.reported:
                folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
                reason = "it is damaged, or cannot be written"
                log.warning("the compile cache %s is not used: %s", folder, reason)
            self.reported = True
            return False
        return True


CACHE_WARNINGS = CacheWarnings()


# Options of torch.compile for code that few answers run: its kernels are not measured.
UNTUNED = {"coordinate_descent_tuning": False, "max_autotune_pointwise": False}


def compiled(function: Callable, **options) -> Callable:
    """Return `torch.compile(function, fullgraph=True)`, made when it is first called.

    Importing the compiler takes seconds, and a session may never need it. options: of
    torch.compile.
    """

    @cache
    def made() -> Callable:
        configure_inductor()
        return torch.compile(function, fullgraph=True, **options)

    @wraps(function)
    def call(*arguments, **named):
        if not tuning_is_off:
            return made()(*arguments, **named)
        import torch._inductor.config as inductor

        with inductor.patch(UNTUNED):
            return made()(*arguments, **named)

    return call


@cache
def configure_inductor() -> None:
    """Set the compiler's options. Call it before the first compilation."""
    # Imported here: the compiler takes longer to import than an eager answer of a small model.
    import torch._dynamo.config as dynamo
    import torch._inductor.codecache as codecache
    import torch._inductor.config as inductor
    import torch._inductor.output_code as output_code
    import torch.fx.experimental._config as fx

    # Without it Inductor leaves M = 1 products to cuBLAS, which cannot fuse the expert gather.
    inductor.coordinate_descent_tuning = True
    # Measure several tilings of each kernel and search from the best. A search from Inductor's one
    # heuristic tiling loses up to a third of the GB/s for products of packed weights.
    inductor.max_autotune_pointwise = True
    # Inductor copies the arguments of an in-place kernel before each run that it measures. Because
    # of that noise it chose tilings of small kernels that took twice as long.
    inductor.inplace_buffers = False
    # Programmatic dependent launch, on Hopper and later.
    inductor.triton.enable_pdl = True
    # A router and sampling make all indices, on the device and within bounds.
    inductor.assert_indirect_indexing = False
    # Two sizes that are equal in the first prompt (its length and the head dim) are not the same
    # size.
    fx.use_duck_shape = False
    # A function is compiled once for each kind of block, for prefill and decode, and for each cache
    # length.
    dynamo.recompile_limit = 256

    # Its __del__ reads this, also of an object that a damaged file has left half-made.
    output_code.CompiledFxGraph.compiled_fn_runner = None
    for name in ("torch._inductor.codecache", "torch._functorch._aot_autograd.autograd_cache"):
        logging.getLogger(name).addFilter(CACHE_WARNINGS)
    # Else they stay below a name in /tmp that every user can take, also with a cache of one's own.
    folder = Path(codecache.cache_dir()) / "precompiled_headers"
    codecache._HEADER_DIR = str(folder)
    codecache._HEADER_LOCK_DIR = str(folder / "locks")

    # Imported last, since importing it reads the settings above.
    from torch._inductor.runtime.benchmarking import benchmarker

    benchmarker.benchmark_gpu = tuning.gpu_ms  # instead of Inductor's timer
    tuning.replace_coordinate_descent()
    register_dot_bytes()


def any_size(x: Tensor, dim: int) -> None:
    """Let code that is compiled for x take any size of a dimension, if that is possible."""
    torch._dynamo.maybe_mark_dynamic(x, dim)


tuning_is_off = False


@contextmanager
def without_tuning() -> Iterator[None]:
    """Within, kernels get Inductor's first choice of tiling: for code that runs once a prompt."""
    global tuning_is_off
    before, tuning_is_off = tuning_is_off, True
    try:
        yield
    finally:
        tuning_is_off = before
