"""Experts that the CPU multiplies where they lie: packed weights in host memory, few tokens.

`cpu_experts.cpp` has the products. It is compiled for this CPU at first use. Plain PyTorch computes
the same without a compiler, and formats that it does not know: it is the reference too.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from formats import FORMATS, PLAIN
from formats.base import Parts
from ops.cpu import usable_cores

SOURCE = Path(__file__).with_suffix(".cpp")
HEADERS = tuple(SOURCE.with_name(f"cpu_{name}.h") for name in ("vectors", "weights", "products"))
# Sums in another order, so that loops become vectors. NaN and infinity keep their meaning.
FLAGS = (
    *("-std=c++20", "-O3", "-shared", "-fPIC", "-pthread", "-w"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)

# The order of enums in the C++ files
PARTS = (
    *("codes", "high", "scale", "zero", "step"),
    *("scale_step", "scale_low", "zero_step", "zero_low", "bias"),
)
ACTIVATIONS = "silu", "clamped", "gelu", "relu_squared"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT_SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
UINT4, IQ4_XS, NO_SCALE, F16_PAIR = 6, 10, 11, 12  # of Scales
PLAIN_CODES = 9  # of Codes


class Kind(NamedTuple):
    """How the formats of a kind are stored (`Format.kind`)."""

    codes: int  # a number of cpu_products.h's Codes
    scales: int | None = None  # a number of its Scales; None: scales are floats
    zero: float = 0.0  # the code of 0, if it is a constant
    run: int | None = None  # numbers whose codes are packed together; None: a group


KINDS = {
    "int4": Kind(0, zero=8),
    "mxfp4": Kind(1, 4, zero=12),
    "nvfp4": Kind(2, 5, zero=12),
    "hqq": Kind(0, 7),
    "hqq2": Kind(3, 7),
    "hqq3": Kind(8, 7),
    "int8": Kind(4, 3, zero=128),
    "q8_0": Kind(4, zero=128),
    "q4_k": Kind(0, 8, run=32),
    "q5_k": Kind(5, 8, run=32),
    "q6_k": Kind(6, 9, zero=32, run=32),
    "iq4": Kind(7, zero=128, run=32),
}

log = logging.getLogger("moe_fast")
Library = ctypes.CDLL


# Compiling ----------------------------------------------------------------------------------------


@cache
def load_library(march: str = "native") -> Library | None:
    """Compile and load `cpu_experts.cpp`; None if that is impossible, with one warning.

    The library is kept in $TORCHINDUCTOR_CACHE_DIR, where the commands keep all compiled code.
    march: instructions to compile for; the CPU must have them.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    try:
        if folder:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            return open_library(build(Path(folder), march))
        with tempfile.TemporaryDirectory() as temporary:  # a loaded library needs no file
            return open_library(build(Path(temporary), march))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "warning: experts on the CPU run in plain PyTorch, many times as slow: "
            f"{first_error(error)}"
        )
        return None


def first_error(error: Exception) -> str:
    """Return one line: the first error of a compiler, or that of the system."""
    reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line for line in reason.splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line), lines[0] if lines else repr(error))
    return first.partition("error: ")[2].removeprefix("#error ").strip('"') or first


def build(folder: Path, march: str) -> Path:
    """Return the path of the library, compiled for this CPU."""
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        raise FileNotFoundError(
            f"no C++ compiler {compiler!r}: install it, or name another one in $CXX"
        )
    if platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"no products for {platform.machine()} CPUs")
    command = compiler, *FLAGS, f"-march={march}"
    key = hashlib.sha256(repr((command, cpu_flags())).encode())
    for file in (SOURCE, *HEADERS):
        key.update(file.read_bytes())
    path = folder / f"cpu_experts_{key.hexdigest()[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            made = Path(temporary) / path.name
            subprocess.run(
                (*command, str(SOURCE), "-o", str(made)), check=True, capture_output=True, text=True
            )
            made.replace(path)  # at once, since several processes may compile it
    return path


def cpu_flags() -> str:
    """Return what names this CPU's instructions: a copied cache may come to another one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith("flags")), platform.processor())


def open_library(path: Path) -> Library:
    library = ctypes.CDLL(str(path))
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    library.new_pool.restype, library.new_pool.argtypes = pointer, [integer]
    library.delete_pool.restype, library.delete_pool.argtypes = None, [pointer]
    library.run_experts.restype, library.run_experts.argtypes = None, [pointer]
    library.serve.restype = None
    library.serve.argtypes = [pointer, pointer, integer, ctypes.c_double, ctypes.c_double]
    library.log_requests.restype, library.log_requests.argtypes = None, [pointer, ctypes.c_int64]
    library.logged_requests.restype = ctypes.c_int64
    library.read_seconds.restype = ctypes.c_double
    library.read_seconds.argtypes = [pointer, pointer, ctypes.c_int64, integer]
    library.activate_all.restype = None
    library.activate_all.argtypes = [integer, number, number, pointer, pointer, pointer, integer]
    return library


class WeightStruct(ctypes.Structure):
    _fields_ = (
        ("part", ctypes.c_void_p * len(PARTS)),
        ("expert_bytes", ctypes.c_int64 * len(PARTS)),
        ("row_bytes", ctypes.c_int64 * len(PARTS)),
        *((name, ctypes.c_int32) for name in ("codes", "scales", "out", "in_", "group")),
        ("zero", ctypes.c_float),
    )


class LayerStruct(ctypes.Structure):
    _fields_ = (
        ("w13", WeightStruct),
        ("w2", WeightStruct),
        ("activation", ctypes.c_int32),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("n_experts", ctypes.c_int32),
        ("pool", ctypes.c_void_p),
    )


class CallStruct(ctypes.Structure):
    _fields_ = (
        ("layer", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("experts", "tokens", "weights", "n_pairs", "y")),
        *((name, ctypes.c_void_p) for name in ("read", "bytes")),
        ("n_bytes", ctypes.c_int64),
    )


# Threads ------------------------------------------------------------------------------------------


class CPUThreads:
    """Threads that multiply experts. They stay alive between layers, which share one instance.

    A thread that waits spins for 4 ms, then sleeps. The thread that calls a layer is one of them.
    """

    def __init__(self, count: int | None = None, march: str = "native"):
        """count: None: the process's cores less one. march: as in `load_library`."""
        self.count = max(1, usable_cores() - 1) if count is None else count
        if self.count < 1:
            raise ValueError(f"{count} threads: there must be at least one")
        self.library = load_library(march)
        self.turn = threading.Lock()
        self.pool = None
        if self.library is not None:
            self.start()

    def start(self) -> None:
        self.pool = self.library.new_pool(self.count)
        self.finalizer = weakref.finalize(self, self.library.delete_pool, self.pool)

    def resize(self, count: int) -> None:
        """Go on with another number of threads. The caller sets `pool` of all layers' structs."""
        if count != self.count:
            self.close()
            self.count = count
            self.start()

    @property
    def compiled(self) -> bool:
        """Whether `cpu_experts.cpp` runs, not plain PyTorch."""
        return self.library is not None

    @property
    def instructions(self) -> str:
        """The instructions of the products."""
        if self.library is None:
            return "plain PyTorch"
        return "AVX-512 VNNI" if self.library.vector_bytes() == 64 else "AVX2"

    def close(self) -> None:
        """End the threads. Layers that use them must not be called any more."""
        if self.pool is not None:
            self.finalizer()
            self.pool = None

    def read_bandwidth(self, memory: Tensor, times: int = 4) -> float:
        """Return GB/s at which the threads read host memory, which must be larger than caches."""
        if self.library is None:
            raise RuntimeError("no compiled products: see the warning")
        arguments = self.pool, memory.data_ptr(), memory.nbytes
        self.library.read_seconds(*arguments, 1)
        return times * memory.nbytes / self.library.read_seconds(*arguments, times) / 1e9


# Weights ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostWeight:
    """A weight [E, out, in] in host memory.

    parts: of the format's layout, each [E, ...]; "bf16": {"weight": [E, out, in]}. An expert's
    numbers are contiguous; experts may lie apart, as in blobs.
    """

    parts: Parts
    format: str
    group: int
    bias: Tensor | None = None  # [E, out]

    @property
    def codes(self) -> Tensor:
        return self.parts["weight" if self.format == PLAIN else "codes"]

    @property
    def out(self) -> int:
        return self.codes.shape[1]

    @property
    def width(self) -> int:
        """Numbers of a row."""
        words = self.codes.shape[-1]
        return words if self.format == PLAIN else words * FORMATS[self.format].codes_per_word

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return sum(part[0].nbytes for part in self.parts.values())

    @property
    def packing(self) -> int:
        """Numbers of a row whose codes are packed together."""
        return KINDS[FORMATS[self.format].kind].run or self.group

    def is_compiled(self) -> bool:
        """Whether `cpu_experts.cpp` knows the format."""
        if any(part[0].stride() != part[0].contiguous().stride() for part in self.parts.values()):
            return False
        if self.format == PLAIN:
            return self.codes.dtype == torch.bfloat16
        format = FORMATS[self.format]
        fields = format.codes_per_word
        if format.kind not in KINDS or fields not in (4, 8, 16):
            return False
        words, scale = self.packing // fields, self.parts["scale"].dtype
        reads = scale == torch.bfloat16 if format.per_row else True
        return reads and words & (words - 1) == 0

    def unpack(self, expert: int) -> Tensor:
        """Dequantize one expert -> fp32 [out, in]."""
        parts = {name: part[expert] for name, part in self.parts.items()}
        if self.format == PLAIN:
            return parts["weight"].float()
        return FORMATS[self.format].unpack(parts, self.group)

    def multiply(self, x: Tensor, expert: int) -> Tensor:
        """x fp32 [n, in] -> fp32 [n, out], in plain PyTorch."""
        bias = None if self.bias is None else self.bias[expert].float()
        return F.linear(x, self.unpack(expert), bias)


def weight_struct(weight: HostWeight, bias: Tensor | None) -> WeightStruct:
    """Return what `cpu_experts.cpp` needs of a weight. bias: fp32 [E, out], kept by the caller."""
    parts = dict(weight.parts) | ({} if bias is None else {"bias": bias.unsqueeze(-1)})
    made = WeightStruct(out=weight.out, in_=weight.width, group=1)
    made.codes, made.scales = PLAIN_CODES, NO_SCALE
    if weight.format == PLAIN:
        parts["codes"] = parts.pop("weight")
    else:
        format = FORMATS[weight.format]
        kind = KINDS[format.kind]
        made.group, made.codes, made.zero = weight.packing, kind.codes, kind.zero
        scales = FLOAT_SCALES.get(parts["scale"].dtype) if kind.scales is None else kind.scales
        if format.kind == "hqq" and "zero_step" not in parts:
            scales = UINT4
        if format.kind in ("q4_k", "q5_k") and "step" not in parts:  # q4_1, q5_1
            scales = F16_PAIR
        made.scales = IQ4_XS if format.kind == "iq4" and "step" in parts else scales
    for name, part in parts.items():
        n = PARTS.index("high" if name == "third" else name)
        made.part[n] = part.data_ptr()
        made.expert_bytes[n] = part.stride(0) * part.itemsize
        made.row_bytes[n] = part.shape[-1] * part.itemsize
    return made


def recognize(activation: Callable, library: Library) -> tuple[int, float, float] | None:
    """Return kind, limit and alpha of an activation (gate, up) -> h by its values; None if unknown.

    The limit and alpha of gpt-oss's are the keywords of a `partial`.
    """
    gate = torch.linspace(-12, 12, 97)
    up = gate.flip(0) * 0.9 + 0.3
    wanted, found = activation(gate, up).float(), torch.empty_like(gate)
    keywords = getattr(activation, "keywords", {})
    limit, alpha = float(keywords.get("limit", 0.0)), float(keywords.get("alpha", 1.0))
    for kind in range(len(ACTIVATIONS)):
        pointers = gate.data_ptr(), up.data_ptr(), found.data_ptr()
        library.activate_all(kind, limit, alpha, *pointers, len(gate))
        if torch.allclose(found, wanted, rtol=1e-4, atol=1e-4):
            return kind, limit, alpha
    return None


# One layer ----------------------------------------------------------------------------------------


class CPUExperts:
    """The experts of one layer, multiplied by the CPU."""

    def __init__(self, w13: HostWeight, w2: HostWeight, activation: Callable, threads: CPUThreads):
        """activation: (gate, up) -> h, as `Experts.activation`."""
        self.w13, self.w2, self.activation, self.threads = w13, w2, activation, threads
        self.layer = None
        self.kept: list[tuple] = []  # arguments of host functions, which C code points to
        if threads.compiled and w13.is_compiled() and w2.is_compiled():
            known = recognize(activation, threads.library)
            if known is not None:
                self.biases = [
                    b if b is None else b.float().contiguous() for b in (w13.bias, w2.bias)
                ]
                structs = map(weight_struct, (w13, w2), self.biases)
                self.layer = LayerStruct(*structs, *known, len(w13.codes), threads.pool)

    @property
    def nbytes(self) -> int:
        """Bytes that one expert's product reads."""
        return self.w13.nbytes + self.w2.nbytes

    def __call__(
        self, x: Tensor, experts: Tensor, tokens: Tensor, weights: Tensor, y: Tensor
    ) -> Tensor:
        """Write to y[t] the sum of weights[p] * expert experts[p] of x[t] over pairs p of token t.

        x [T, D]; experts, tokens int32 [P]; weights fp32 [P]; y fp32 [T, D]: contiguous, in host
        memory. Made for T up to 8. Returns y when it is written. Other Python threads run
        meanwhile; they may call too, and take turns. Pairs of experts that the layer does not have
        (another rank's) count nothing. Raises ValueError for other tensors.
        """
        self.check(x, experts, tokens, weights, y)
        if self.layer is None:
            return self.multiply_plain(x, experts, tokens, weights, y)
        count = ctypes.c_int32(len(experts))
        call = self.call_struct(x, experts, tokens, weights, ctypes.addressof(count), y)
        self.threads.library.run_experts(ctypes.addressof(call))
        return y

    def check(self, x: Tensor, experts: Tensor, tokens: Tensor, weights: Tensor, y: Tensor) -> None:
        """Raise ValueError for tensors that the products do not take."""
        shape = len(x), self.w13.width
        if not (
            x.shape == shape
            and y.shape == (len(x), self.w2.out)
            and len(experts) == len(tokens) == len(weights)
            and x.dtype in DTYPES
            and y.dtype == weights.dtype == torch.float32
            and experts.dtype == tokens.dtype == torch.int32
        ):
            raise ValueError(
                f"x {tuple(x.shape)} {x.dtype}, {len(experts)} experts {experts.dtype}, y "
                f"{tuple(y.shape)} {y.dtype}: CPU experts take x {shape}, int32 indices, fp32 y"
            )
        if not all(t.is_contiguous() and not t.is_cuda for t in (x, experts, tokens, weights, y)):
            raise ValueError("CPU experts take contiguous tensors in host memory")
        if self.layer is not None and self.threads.pool is None:
            raise RuntimeError("the threads of these experts have been closed")

    def call_struct(
        self, x: Tensor, experts: Tensor, tokens: Tensor, weights: Tensor, count: int, y: Tensor
    ) -> CallStruct:
        """count: the address of the number of pairs, int32."""
        pointers = experts.data_ptr(), tokens.data_ptr(), weights.data_ptr(), count, y.data_ptr()
        layer = ctypes.addressof(self.layer)
        return CallStruct(layer, x.data_ptr(), DTYPES[x.dtype], len(x), *pointers)

    def host_function(
        self, x: Tensor, experts: Tensor, tokens: Tensor, weights: Tensor, count: Tensor, y: Tensor
    ) -> tuple[int, int]:
        """Return the addresses of a C function and of its argument, which do what a call does.

        For cudaLaunchHostFunc: no Python runs. The function reads `count` (int32 [1]) and computes
        as many pairs, the first ones. The tensors must stay where they are. Raises RuntimeError
        if plain PyTorch computes this layer.
        """
        self.check(x, experts, tokens, weights, y)
        if self.layer is None:
            raise RuntimeError("no compiled products of these experts")
        call = self.call_struct(x, experts, tokens, weights, count.data_ptr(), y)
        self.kept.append((call, x, experts, tokens, weights, count, y))
        function = ctypes.cast(self.threads.library.run_experts, ctypes.c_void_p).value
        return function, ctypes.addressof(call)

    def multiply_plain(
        self, x: Tensor, experts: Tensor, tokens: Tensor, weights: Tensor, y: Tensor
    ) -> Tensor:
        """Do the same in plain PyTorch, expert by expert."""
        with self.threads.turn:
            y.zero_()
            for expert in dict.fromkeys(experts.tolist()):
                if not 0 <= expert < len(self.w13.codes):
                    continue
                pairs = (experts == expert).nonzero().squeeze(-1)
                rows = tokens[pairs].long()
                both = self.w13.multiply(x[rows].float(), expert)
                parts = both.split(self.w2.width, dim=-1)  # gate and up, or up alone
                h = self.w2.multiply(self.activation(*parts), expert)
                y.index_add_(0, rows, h * weights[pairs].unsqueeze(-1))
        return y
