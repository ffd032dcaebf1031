"""Triton, if installed; kernels, and how they are launched.

ops/README.md has the rules of a kernel's parameters.
"""

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import NoReturn, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ops.gpu import found, gpu_of, pretended

try:
    import triton
    import triton.language as tl
    from triton.runtime.driver import driver
    from triton.runtime.jit import MockTensor
except ImportError:  # a build of torch without CUDA, where no kernel is called
    triton, tl = None, SimpleNamespace(constexpr=lambda value: value)  # annotations name it
try:
    from triton._C.libtriton import native_specialize_impl as specialize
    from triton.backends.compiler import BaseBackend
except ImportError:  # another version of Triton: it finds the code of each launch itself
    specialize = BaseBackend = None

S = TypeVar("S")
log = logging.getLogger("moe_fast")
MAKING = threading.RLock()  # within `Kernel.__getattr__`
known_keys: dict[str, str] = {}  # `cache_key` of kernels in an earlier process, by `path`
PTXAS = "TRITON_PTXAS_PATH"  # names the ptxas that Triton takes in place of its own
assembler: list[str | None] = []  # of `keep_assembler`: at most one
broken: set[str] = set()  # kernels, and uses of kernels, that could not run on this GPU


class KernelError(RuntimeError):
    """A kernel cannot run on this GPU: it does not compile, or needs more than the GPU has."""

    def __init__(self, kernel: str, why: str):
        super().__init__(f"{kernel}: {why}")
        self.kernel = kernel


class Constants:
    """Settings as a compiled kernel sees them: each number, text or setting is a `tl.constexpr`.

    Triton takes no plain number as a shape, as a range's end or as a divisor, and no plain tuple in
    a comprehension.
    """

    def __init__(self, settings):
        self.settings = settings

    def __getattr__(self, name: str):
        value = getattr(self.settings, name)
        if isinstance(value, int | float | str):
            return tl.constexpr(value)
        if type(value) is tuple:
            return tl.tuple(map(tl.constexpr, value))
        return tl.constexpr(Constants(value)) if dataclasses.is_dataclass(value) else value

    def __eq__(self, other) -> bool:
        return isinstance(other, Constants) and self.settings == other.settings

    def __hash__(self) -> int:
        return hash(self.settings)

    def __repr__(self) -> str:
        return repr(self.settings)


class Kernel(triton.JITFunction if triton else object):
    """A Triton kernel. A launch that the GPU cannot run raises KernelError, and runs nothing."""

    recorded: list[tuple] | None = None  # within `compile_only`: arguments of `check_needs`
    # Within `collect_only`: kernel, types of its arguments, options.
    collected: list[tuple] | None = None
    is_made = True  # Triton has read the source: False until a kernel is first used

    def __init__(self, function, **options):
        self.fn, self.options, self.is_made = function, options, False
        self.__module__, self.__doc__ = function.__module__, function.__doc__
        self.fitting: dict[tuple, object] = {}  # of `fit`
        self.launched: dict[tuple, tuple] = {}  # by `launch_key`: code, and None for constants

    def __getattr__(self, name: str):
        """Let Triton read the source when it is first needed: a model uses few kernels."""
        with MAKING:
            if not self.is_made:
                if not assembler:
                    keep_assembler()
                self.is_made = True
                super().__init__(self.fn, **self.options)
        return object.__getattribute__(self, name)

    @property
    def path(self) -> str:
        """Its module and name."""
        return f"{self.fn.__module__}.{self.fn.__qualname__}"

    @property
    def cache_key(self) -> str:
        """Triton's digest of the source, and of all that it calls: 4 ms, unless it is known."""
        return known_keys.get(self.path) or super().cache_key

    def run(self, *args, grid, warmup, **options):
        if Kernel.collected is not None and not warmup:
            Kernel.collected.append((self, self.without_memory(args), options))
            return None
        if Kernel.recorded is not None and not warmup:
            found = self.compile_for(*args, **options)
            Kernel.recorded.append((self, found, shared_memory(args)))
            return found
        if pretended() and not warmup:
            check_needs(self, self.compile_for(*args, **options), shared_memory(args))
        args = [Constants(arg) if dataclasses.is_dataclass(arg) else arg for arg in args]
        try:
            return super().run(*args, grid=grid, warmup=warmup, **options)
        except Exception as error:
            refuse(self, error)

    def remember(self, key: tuple, code, count: int) -> None:
        """Keep compiled code for `launch_again`. count: of arguments before the settings.

        Its launcher takes all parameters, but reads no constants.
        """
        constants = range(count, len(self.arg_names))
        is_known = all(hasattr(code, name) for name in ("run", "function", "packed_metadata"))
        if is_known and self.constexprs == [*constants]:
            self.launched[key] = code, (None,) * len(constants)

    def launch_again(self, key: tuple, grid: tuple[int, ...], args: Sequence) -> bool:
        """Launch as the launch of this key before, if there was one. Return whether there was.

        Triton itself takes 20 to 40 us of the host for each launch, to find the code.
        """
        if (known := self.launched.get(key)) is None:
            return False
        code, constants = known
        hooks = None, None, None  # their metadata, enter, leave
        try:
            stream = driver.active.get_current_stream(key[0])
            of_code = stream, code.function, code.packed_metadata
            code.run(*(*grid, 1, 1)[:3], *of_code, *hooks, *args, *constants)
        except Exception as error:
            refuse(self, error)
        return True

    def compile_for(self, *args, **options):
        """Compile for these arguments, unless that was done. Tensors may have no memory."""
        return self.warmup(*self.without_memory(args), grid=(1,), **options)

    def without_memory(self, args: Sequence) -> tuple:
        """Return what Triton compiles these arguments by: equal for all that run the same code."""
        specialized = (not p.do_not_specialize for p in self.params)
        return tuple(map(stand_in, args, specialized))


def keep_assembler() -> None:
    """Note which ptxas the environment names: at the first kernel, before Inductor compiles any.

    Its version is a part of all keys of Triton's cache, and a process asks for it once. Inductor
    names the ptxas of PyTorch in the environment when it first compiles: a helper that starts later
    would take that, and no launch of this process would find its kernels.
    """
    assembler.append(os.environ.get(PTXAS))


def helper_environment() -> dict[str, str]:
    """Return the environment of a process whose kernels this one is to find in the cache."""
    environment = dict(os.environ)
    if assembler:
        environment.pop(PTXAS, None)
        if assembler[0] is not None:
            environment[PTXAS] = assembler[0]
    return environment


def stand_in(arg, specialized: bool = True):
    """Return what Triton compiles an argument by: of a tensor its type alone, of an integer its
    size in bits and, if it is specialized, whether it is 1 or divisible by 16.
    """
    if isinstance(arg, Tensor):
        return MockTensor(arg.dtype)
    if type(arg) is int and not (specialized and arg == 1):
        few_bits = -(2**31) <= arg < 2**31
        return (0 if few_bits else 2**40) + (16 if specialized and arg % 16 == 0 else 17)
    if isinstance(arg, tuple):
        parts = map(stand_in, arg)
        return type(arg)(*parts) if hasattr(arg, "_fields") else tuple(parts)
    return arg


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def refuse(kernel: Kernel, error: Exception) -> NoReturn:
    """Raise KernelError for an error of a launch; the error itself if the GPU has failed."""
    if has_failed_on_gpu(error):
        raise error
    raise KernelError(kernel.__name__, first_line(error)) from error


def has_failed_on_gpu(error: Exception) -> bool:
    """Whether the GPU has failed while a kernel ran, an earlier one perhaps."""
    text = str(error)
    reasons = "illegal", "misaligned", "unspecified", "out of memory", "device-side assert"
    return "CUDA" in text and any(reason in text for reason in reasons)


def check_needs(kernel: Kernel, code, limit: int) -> None:
    """Raise KernelError if compiled code needs more than `limit` bytes of shared memory."""
    if code.metadata.shared > limit:
        why = f"it needs {code.metadata.shared} bytes of shared memory, of which there are {limit}"
        raise KernelError(kernel.__name__, why)


@contextmanager
def compile_only() -> Iterator[list[tuple]]:
    """Within, launches compile their kernels and run nothing; at the end check what they need.

    Yields the arguments of `check_needs`. Raises KernelError for a launch that the GPU cannot run.
    """
    before, Kernel.recorded = Kernel.recorded, []
    recorded = Kernel.recorded
    try:
        yield recorded
    finally:
        Kernel.recorded = before
    for launch in recorded:
        check_needs(*launch)


class ZeroMemory(TorchFunctionMode):
    """Within, memory that PyTorch allocates is zero: a library's product may read it as indices."""

    ALLOCATE = torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found.zero_() if function in self.ALLOCATE else found


@contextmanager
def collect_only() -> Iterator[list[tuple]]:
    """Within, launches are noted, and do not run: kernel, and both arguments of `compile_for`."""
    before, Kernel.collected = Kernel.collected, []
    try:
        with ZeroMemory():
            yield Kernel.collected
    finally:
        Kernel.collected = before


def device_of(args: Sequence) -> torch.device | None:
    """Return the device of the first tensor among arguments; tuples are searched, too."""
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
        if isinstance(arg, tuple) and (device := device_of(arg)):
            return device
    return None


def shared_memory(args: Sequence) -> int:
    """Return the bytes of shared memory that a program may use on the GPU of these arguments."""
    return gpu_of(device_of(args)).shared_memory


def launch(kernel: Kernel, grid: tuple[int, ...], *args, settings: object, **options) -> None:
    """Launch a kernel: its parameters are `args`, then `s` and, if it waits for others, PDL.

    args: tensors, None for absent ones, NamedTuples of both, integers. settings: `s`. options: as
    of `launch_options`.
    """
    key = launch_key(args, settings, options) if isinstance(kernel, Kernel) else None
    if key is None or not kernel.launch_again(key, grid, args):
        code = kernel[grid](*args, settings, **launch_options(kernel, args, **options))
        if key is not None:
            kernel.remember(key, code, len(args))


def launch_key(args: tuple, settings: object, options: dict) -> tuple | None:
    """Return what the code of a launch depends on: device, types, settings and options.

    Types are Triton's, with the alignment of pointers and the divisibility of integers. None:
    Triton has to know of each launch, or launches do not run.
    """
    if Kernel.collected is not None or Kernel.recorded is not None or is_watched():
        return None
    device = driver.active.get_current_device()
    types = specialize(BaseBackend, args, False, True, True)
    return device, found.get(device), types, settings, *options.items()


def is_watched() -> bool:
    """Whether Triton is to call hooks for each launch, or to compile for debugging."""
    if specialize is None or (runtime := triton.knobs.runtime).debug:
        return True
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def launch_options(
    kernel: Kernel,
    args: Sequence,
    warps: int = 4,
    stages: int | None = None,
    registers: int | None = None,
    pdl: bool = True,
) -> dict:
    """Return Triton's options for the arguments of `launch`.

    warps: of a program. stages: loads in flight of a pipelined loop. registers: most of a lane.
    None: Triton's choice. pdl: launch with programmatic dependent launch where the GPU has it.
    """
    options: dict = {"num_warps": warps}
    if stages is not None:
        options["num_stages"] = stages
    if registers and gpu_of(device_of(args)).is_nvidia:
        options["maxnreg"] = registers
    if "PDL" in kernel.arg_names:
        pdl = pdl and gpu_has_pdl(device_of(args))
        options |= {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
    return options


def fit(kernel: Kernel, candidates: Iterable[tuple[S, dict]], *args) -> tuple[S, dict]:
    """Return the first candidate with which a kernel fits into the GPU's shared memory.

    candidates: settings, and the other keyword arguments of `launch`; the fastest first. args: as
    of `launch`. Each candidate is compiled once to know its shared memory, which depends on Triton
    and on the GPU. Raises KernelError if none fits.
    """
    candidates = iter(candidates)
    fastest = next(candidates)
    if not isinstance(kernel, Kernel) or Kernel.collected is not None:  # or Triton's interpreter
        return fastest
    types, limit = tuple(map(key_of, args)), shared_memory(args)
    key = limit, types, fastest[0], *fastest[1].items()
    if key not in kernel.fitting:
        fitting = (c for c in (fastest, *candidates) if fits(kernel, args, c, limit))
        kernel.fitting[key] = next(fitting, None)
    if kernel.fitting[key] is None:
        compile_for(kernel, args, *fastest)  # an error of the compiler comes first
        raise KernelError(kernel.__name__, f"no tiling fits into {limit} bytes of shared memory")
    return kernel.fitting[key]


def compile_for(kernel: Kernel, args: Sequence, settings: object, options: dict):
    return kernel.compile_for(*args, settings, **launch_options(kernel, args, **options))


def key_of(arg) -> object:
    """Return what distinguishes an argument for the compiler, hashable."""
    if isinstance(arg, Tensor):
        return arg.dtype
    return tuple(map(key_of, arg)) if isinstance(arg, tuple) else arg


def fits(kernel: Kernel, args: Sequence, candidate: tuple[object, dict], limit: int) -> bool:
    try:
        return compile_for(kernel, args, *candidate).metadata.shared <= limit
    except KernelError:
        return False


def jit(function=None, **options):
    """Make a kernel, or a helper of kernels, if Triton is installed."""
    if function is None:
        return partial(jit, **options)
    if triton is None:
        return function
    interpreted = triton.knobs.runtime.interpret
    return triton.jit(function, **options) if interpreted else Kernel(function, **options)


def can_launch(x: Tensor, *kernels: str) -> bool:
    """Whether our kernels run on the GPU of x; kernels: names of some that must not be broken."""
    runs = triton is not None and x.is_cuda and gpu_of(x.device).runs_kernels
    return runs and broken.isdisjoint(kernels)


def try_kernels(name: str, launch: Callable, plain: Callable, *arguments):
    """Return launch(*arguments), or plain(*arguments) if its kernels cannot run on this GPU.

    name: of this use of the kernels, which is then logged and not tried again.
    """
    if name not in broken:
        try:
            return launch(*arguments)
        except KernelError as error:
            give_up(name, error)
    return plain(*arguments)


def give_up(name: str, error: KernelError) -> None:
    """Log, once, that a plain form replaces a kernel or a use of kernels, and remember that."""
    if name not in broken:
        broken.add(name)
        fix = ""
        if is_of_cache(error):
            fix = f"; remove {triton.knobs.cache.dir}, which may be damaged"
        log.warning(
            "%s: a plain form replaces kernels that cannot run here (%s)%s", name, error, fix
        )


def is_of_cache(error: KernelError) -> bool:
    """Whether files of Triton's cache may be damaged: a power loss leaves empty ones."""
    cause = error.__cause__
    texts = "Unknown key", "kernel image is invalid"
    return isinstance(cause, json.JSONDecodeError) or any(text in str(cause) for text in texts)


def gpu_has_pdl(device: torch.device | None) -> bool:
    """Whether a device has programmatic dependent launch (`Gpu.has_pdl`)."""
    return device is not None and device.type == "cuda" and gpu_of(device).has_pdl


@jit
def await_previous(PDL: tl.constexpr, EARLY: tl.constexpr = False):
    """With PDL wait until the previous kernel has ended, then let the next one start.

    EARLY: let the next one start at once (ops/README.md).
    """
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()


@jit
def add_both(a, b, c, d):
    """Add two numbers each, for `tl.reduce` of two tensors at once."""
    return a + c, b + d


def check_shapes(**expected: tuple[Tensor, Sequence[int]]) -> None:
    """Raise ValueError, with the tensor's name, if a tensor has another shape than expected."""
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
