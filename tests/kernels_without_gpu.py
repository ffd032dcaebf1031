"""Run and compile our Triton kernels without a GPU.

    TRITON_INTERPRET=1 python tests/kernels_without_gpu.py NAME...    Triton's interpreter, CPU
    python tests/kernels_without_gpu.py NAME...    machine code for an H200, by Triton and ptxas

NAME (default: all):
    grouped    grouped GEMM in every format
    dot4, dot4, few
               GEMV in the 4-bit formats
    words      products of words by shifts, and by the instructions of NVIDIA's GPUs
    attend     attention over blocks of an int8 cache; latent attention
    token, token, few
               the fused decode-attention kernel
    queries, queries, more
               the fused kernel for several queries of a sequence
    latent token, latent token, few
               the three kernels of latent attention for one token, at published and small sizes
    latent tokens
               those for several tokens
    fixed      all-reduce, and norms with bitwise identical results on all GPUs
    fetch      copies of experts out of host memory
    rows       copies between rows of a batch, in all layers

Each prints one JSON object: by name, the relative error of every case, or counts of instructions in
its machine code. Each is a process of its own: Triton reads its environment once, at import. The
interpreter runs no bf16 case, since it multiplies bf16 bits as integers. Nor does it run inline
assembly: it takes the plain form beside it, or a faster twin in NumPy.
"""

import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial, partialmethod
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.interpreter import TensorHandle

from formats import FORMATS
from formats.gguf_blocks import IQ4
from formats.kv_cache import Int8KVCache
from formats.packed import grouped_packed
from formats.quantizer import pack_weight
from model import Attention, Chunk, Context, KVCache, ModelArgs
from models import ARCHITECTURES, family_of
from models.layers.gated_attention import GatedAttention
from models.layers.latent_attention import LatentAttention
from models.layers.layer_rope import LayerRope
from models.random_weights import first_layers
from ops.attention import (
    gqa,
    heads,
    mla,
    softmax,
)
from ops.attention.gqa import AttentionSettings
from ops.attention.gqa import Tile as Blocks
from ops.attention.mla import LatentSettings, LatentTensors, Tile
from ops.attention.softmax import merge_partial
from ops.declared import SWIGLU, Activation, AttentionAdditions
from ops.plain.attention import Mask, attend, causal_bias
from ops.plain.ring import cache_slots, slot_positions
from ops.plain.rope import rope_frequencies, rope_table
from ops.products import codes, gemv, operands, pipeline, units, words
from ops.products.fixed_join import NextNorm, fixed_join, join_plainly
from ops.products.join import Added
from ops.products.prompt import grouped_gemm
from ops.products.tilings import Tiles
from ops.ranks import all_reduce
from ops.step import expert_paging
from ops.step.rows import RowMemory, make_planes
from runtime.fused_attention import FusedDecodeAttention
from runtime.fused_decode import begin_rows
from tests import interpreter
from tests.launched_code import launched_code

GROUPS = {
    "int8": 8,
    "fp8": 32,
    "fp8b": 32,
    "int4": 16,
    "uint4": 32,
    "mxfp4": 32,
    "nvfp4": 32,
    "hqq4": 32,
    "hqq3": 32,
    "hqq2": 16,
    "q8_0": 32,
    "q6_k": 256,
    "q5_k": 256,
    "q4_k": 256,
    "q5_1": 32,
    "q4_1": 32,
    "q4_0": 32,
    "iq4_nl": 32,
    "iq4_xs": 256,
}
SHAPES = {  # rows of each expert, out, in (or the next multiple of the group)
    "experts without rows": ((3, 0, 20, 0, 14), 150, 96),
    "tiles of 64 rows": ((70, 0, 10), 40, 64),
    "one expert, one row": ((1,), 130, 160),
    "the last expert alone": ((0, 0, 0, 0, 0, 0, 17), 128, 224),
    "tiles of 256 rows": ((300, 0, 500), 40, 64),
}
OTHER_GROUPS = {
    "int8": (4,),
    "fp8b": (48, 128),
    "int4": (24, 128),
    "uint4": (64,),
    "mxfp4": (64,),
    "hqq4": (16, 64),
    "hqq3": (64, 96),
    "hqq2": (48, 128),
    "q6_k": (256,),
    "q5_k": (256,),
    "q4_k": (256,),
    "iq4_xs": (256,),
}


class OnCuda(Tensor):
    """A CPU tensor with is_cuda, so that operators take their CUDA path."""

    is_cuda = True


# Formats with scales of another dtype, as other programs publish them.
OTHER_SCALES = (
    *(("int4", "fp16"), ("uint4", "fp16"), ("uint4", "fp32"), ("fp8", "fp32")),
    *(("q8_0", "bf16"), ("q8_0", "fp32")),
)


def case(
    name: str,
    sizes: tuple[int, ...],
    out: int,
    width: int,
    dtype: torch.dtype,
    group: int,
    scale: str | None = None,
) -> tuple:
    """Return x sorted by expert, group_ends, and the parts of random weights.

    scale: the dtype of scales, None: the format's.
    """
    width = -(-width // group) * group
    generator = torch.Generator().manual_seed(len(sizes))
    weight = torch.randn(len(sizes), out, width, generator=generator)
    spec = {"format": name, "group_size": group} | ({"scale": scale} if scale else {})
    parts = pack_weight(weight, spec, torch.device("cpu"))
    x = torch.randn(sum(sizes), width, generator=generator).to(dtype)
    return x, torch.tensor(sizes).cumsum(0).int(), parts


def error(
    name: str,
    sizes: tuple[int, ...],
    out: int,
    width: int,
    dtype: torch.dtype,
    group: int,
    scale: str | None = None,
) -> float:
    """Return the kernel's relative error against unpack-then-matmul in fp64."""
    x, ends, parts = case(name, sizes, out, width, dtype, group, scale)
    ordered = FORMATS[name].grouped_order(x, group).as_subclass(OnCuda)
    got = grouped_packed(ordered, ends, list(parts.values()), name, group).as_subclass(Tensor)
    got = got.double()
    weights = FORMATS[name].unpack(parts, group).double()
    want = torch.cat(
        [rows @ weight.T for rows, weight in zip(x.double().split(sizes), weights, strict=True)]
    )
    return ((got - want).norm() / want.norm()).item()


def plain_error(sizes: tuple[int, ...], out: int, width: int, dtype: torch.dtype) -> float:
    """Return the relative error of the grouped GEMM with plain weights."""
    x, weight = (
        torch.randn(sum(sizes), width).to(dtype),
        torch.randn(len(sizes), out, width).to(dtype),
    )
    ends = torch.tensor(sizes).cumsum(0).int()
    got = grouped_gemm(x, ends, {"codes": weight}, "plain", 8 * x.element_size(), 1).double()
    pairs = zip(x.double().split(sizes), weight.double(), strict=True)
    want = torch.cat([rows @ matrix.T for rows, matrix in pairs])
    return ((got - want).norm() / want.norm()).item()


class Launch:
    """Stands in for a kernel and records the arguments of its launch."""

    def __getitem__(self, grid):
        return self.note

    def note(self, *tensors, **constants):
        names = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
        self.options = {name: constants.pop(name) for name in names if name in constants}
        self.tensors, self.constants = tensors, constants


def compiled(kernel, launch: Launch):
    """Compile the kernel for an H200 with the arguments of a recorded launch."""
    types = {
        torch.bfloat16: "*bf16",
        torch.float16: "*fp16",
        torch.float32: "*fp32",
        torch.int32: "*i32",
        torch.uint8: "*u8",
        torch.int8: "*i8",
        torch.int16: "*i16",
        torch.int64: "*i64",
        torch.bool: "*i1",
    }
    kinds = ["i64" if isinstance(t, int) else types[t.dtype] for t in launch.tensors]
    signature = dict(zip(kernel.arg_names, kinds, strict=False))
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds) if kind != "i64"}
    signature |= dict.fromkeys(launch.constants, "constexpr")
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(n),): v for n, v in launch.constants.items()},
        aligned,
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)


def overwritten(ptx: str) -> int:
    """Count registers of a loop that are overwritten while a tensor core may still read them.

    An MMA is asynchronous: it belongs to the next commit group. `wait_group N` returns when all
    groups but the last N have ended. The scan goes through the loop's text twice.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {
        found[0]: n for n, line in enumerate(lines) if (found := re.match(r"\$\w+(?=:)", line))
    }
    jumps = (
        (labels.get(line.split()[-1][:-1], n), n)
        for n, line in enumerate(lines)
        if "bra" in line.split()[:2]
    )
    loops = [
        lines[start:end]
        for start, end in jumps
        if any("wgmma.mma" in line for line in lines[start:end])
    ]
    found, commits, ended = set(), 0, 0
    reading = {}  # register: the commit of the product that reads it
    for line in 2 * max(loops, key=len, default=[]):
        if "wgmma.mma_async" in line:
            operands = re.findall(r"\{([^{}]*)\}", line)[
                1:
            ]  # after the sums; in shared memory the weights are no list
            reading |= dict.fromkeys(re.findall(r"%\w+", operands[0] if operands else ""), commits)
        elif "wgmma.commit_group" in line:
            commits += 1
        elif "wgmma.wait_group" in line:
            ended = commits - int(re.search(r"(\d+);", line)[1])
            reading = {register: commit for register, commit in reading.items() if commit >= ended}
        elif written := re.match(
            r"(?:@\S+ )?(?!st\.|cp\.|bra|bar|@)[a-z][\w.:]*\s+(\{[^}]*\}|%\w+)", line
        ):
            found |= reading.keys() & set(re.findall(r"%\w+", written[1]))
    return len(found)


def grouped_code(
    name: str,
    experts: int,
    rows: int,
    dtype: torch.dtype,
    scale: str | None = None,
    activation: Activation | None = None,
) -> dict:
    """Return counts of the kernel's machine code for `experts` with `rows` rows each.

    activation: of the outputs, in the kernel's epilogue.

    An MMA has a number of columns, and its left operand in registers or in shared memory.
    """
    group = FORMATS[name].choose_group(1024, None)
    x, ends, parts = case(name, (rows,) * experts, 192, 1024, dtype, group, scale)
    given = x, ends, parts, FORMATS[name].kind, FORMATS[name].bits, group
    found = launched_code(lambda: grouped_gemm(*given, activation=activation))["_grouped"]
    products = re.findall(r"HG?MMA\.(?:64x)?(\d+)\S+ R\d+, (\w+)", found.asm["sass"])
    return {
        "bytes": len(found.asm["cubin"]),
        "shared": found.metadata.shared,
        "registers": found.metadata.maxnreg,  # the most that are allowed; None: any number
        "spills": found.asm["sass"].count("STL"),
        "products": len(products),
        "overwritten": overwritten(found.asm["ptx"]),
        "columns": sorted({int(columns) for columns, _ in products}),
        "from_shared_memory": sum(not left.startswith("R") for _, left in products),
    }


# Format, G, out, in, experts (0: a dense weight), rows of x, pairs, gated, tiles if not chosen.
FEW_DOT4 = {  # products of other kernels
    "int4, dense, four tokens": ("int4", 32, 40, 1024, 0, 4, 4, False, {}),
    "q6_k, dense, three tokens": ("q6_k", 256, 40, 512, 0, 3, 3, False, {}),
    "mxfp4, dense, sixteen tokens": ("mxfp4", 32, 40, 512, 0, 16, 16, False, {}),
}
DOT4 = {
    "int4, dense, half a row of lanes": ("int4", 32, 20, 2272, 0, 1, 1, False, {}),
    "int4, groups of 128": ("int4", 128, 200, 512, 0, 1, 1, False, {}),
    "hqq4, experts, several tokens": ("hqq4", 64, 20, 448, 3, 2, 4, False, {}),
    "hqq4, a row of x for each pair": ("hqq4", 64, 16, 5120, 2, 4, 4, False, {}),
    "int4, gated": ("int4", 32, 40, 448, 3, 1, 2, True, {}),
    "hqq4, gated, rows of 4096": ("hqq4", 64, 24, 4096, 3, 1, 2, True, {}),
    "hqq4, all chunks at once": (
        *("hqq4", 64, 16, 4096, 2, 1, 2, False),
        {"rows": 4, "lanes": 64, "warps": 2},
    ),
    "mxfp4, dense, five chunks": ("mxfp4", 32, 20, 4128, 0, 1, 1, False, {}),
    "mxfp4, experts of gpt-oss's width": ("mxfp4", 32, 24, 2880, 3, 1, 2, False, {}),
    "mxfp4, gated, two tokens": ("mxfp4", 32, 40, 448, 3, 2, 4, True, {}),
    "uint4, experts, several tokens": ("uint4", 64, 20, 448, 3, 2, 4, False, {}),
    "nvfp4, dense, five chunks": ("nvfp4", 32, 20, 4128, 0, 1, 1, False, {}),
    "hqq2, experts, several tokens": ("hqq2", 16, 20, 448, 3, 2, 4, False, {}),
    "hqq2, dense, three chunks": ("hqq2", 16, 20, 4160, 0, 1, 1, False, {}),
    "hqq2, gated, groups of 64": ("hqq2", 64, 40, 448, 3, 1, 2, True, {}),
    "hqq3, gated, two tokens": ("hqq3", 64, 40, 448, 3, 2, 4, True, {}),
    "hqq3, dense, three chunks": ("hqq3", 64, 20, 4160, 0, 1, 1, False, {}),
    "nvfp4, gated, two tokens": ("nvfp4", 32, 40, 448, 3, 2, 4, True, {}),
    "q4_k, gated, two tokens": ("q4_k", 256, 40, 768, 3, 2, 4, True, {}),
    "q4_k, dense, three blocks": ("q4_k", 256, 20, 768, 0, 1, 1, False, {}),
    "q5_k, experts": ("q5_k", 256, 24, 2048, 3, 1, 2, False, {}),
    "q6_k, dense, five chunks": ("q6_k", 256, 20, 5120, 0, 1, 1, False, {}),
    "q6_k, gated": ("q6_k", 256, 40, 512, 3, 1, 2, True, {}),
    "iq4_xs, gated, staying programs": (
        *("iq4_xs", 256, 40, 2048, 2, 1, 2, True),
        {"rows": 8, "depth": 2, "stay": True},
    ),
    "iq4_nl, dense": ("iq4_nl", 32, 20, 2272, 0, 1, 1, False, {}),
    "q5_1, experts": ("q5_1", 32, 24, 480, 3, 1, 2, False, {}),
    "q4_1, gated": ("q4_1", 32, 40, 448, 3, 2, 4, True, {}),
    "q4_0, experts": ("q4_0", 32, 24, 448, 3, 2, 4, False, {}),
    "q8_0, gated": ("q8_0", 32, 40, 480, 3, 1, 2, True, {}),
    "q8_0, dense": ("q8_0", 32, 20, 1056, 0, 1, 1, False, {}),
    "int4, gated, staying programs": (
        *("int4", 64, 40, 2048, 2, 1, 2, True),
        {"rows": 8, "depth": 2, "stay": True},
    ),
}


def dot4_case(case: tuple, size: float) -> tuple:
    """Return the arguments of `gemv.dot4`, and the weights as fp64 [pairs, out, in]."""
    name, group, out, width, experts, tokens, pairs, gated, _ = case
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(max(experts, 1), out, width, generator=generator)
    parts = FORMATS[name].pack(weight, group)
    # fp16 has no normal numbers at 1e-6, but a few digits, which are the test's x.
    x = (torch.rand(tokens, width, generator=generator) * 2 - 1).mul(size).half()
    index = (
        torch.randint(experts, (tokens, pairs // tokens), generator=generator) if experts else None
    )
    each = index.flatten() if experts else [0] * tokens
    plain = FORMATS[name].unpack(parts, group).double()[each]
    if not experts:
        parts = {key: part[0] for key, part in parts.items()}
    dtype = x.dtype if gated else torch.float32
    return (x, list(parts.values()), index, FORMATS[name].kind, group, gated, dtype), plain


def run_dot4(case: tuple, arguments: tuple) -> Tensor:
    """Call the operator's function, with the case's tiles."""
    tiles = (lambda *_: Tiles(**case[-1])) if case[-1] else pipeline.choose_tiles
    with mock.patch.object(pipeline, "choose_tiles", tiles):
        return gemv.dot4._init_fn(*arguments)


def dot4_error(case: tuple, size: float) -> float:
    """Return the kernel's relative error against unpacked weights in fp64.

    It is infinite if a row of zeros does not stay zero.
    """
    arguments, plain = dot4_case(case, size)
    x, gated = arguments[0], case[-2]
    zero = x.shape[0] - 1 if x.shape[0] > 1 else None
    if zero is not None:
        x[zero] = 0
    got, each = run_dot4(case, arguments).double(), plain.shape[0] // x.shape[0]
    want = torch.einsum("noi,ni->no", plain, x.double().repeat_interleave(each, 0))
    if gated:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    if zero is not None and got[zero * each :].count_nonzero():
        return math.inf
    return ((got - want).norm() / want.norm()).item()


def dot4_is_no_number(value: float) -> bool:
    """Return whether one such value in x makes all of its token's results inf or nan."""
    case = DOT4["hqq4, experts, several tokens"]
    arguments, _ = dot4_case(case, 1.0)
    arguments[0][0, 5] = value
    first, second = run_dot4(case, arguments).split(2)
    return bool(second.isfinite().all()) and not first.isfinite().any()


def fields(x: tl.tensor, kind: type) -> np.ndarray:
    """Return the numbers of a kind that integers of an interpreted kernel hold, in a last axis."""
    data = np.ascontiguousarray(x.handle.data)
    return data.view(kind).reshape(*data.shape, -1).astype(np.int32)


def add_dot(total: tl.tensor, codes: np.ndarray, x: np.ndarray) -> tl.tensor:
    """Add the products of codes and x, summed over the last axis, to int32 sums."""
    data = total.handle.data + (codes * x).sum(-1, dtype=np.int32)
    kind = tl.block_type(tl.int32, list(data.shape))
    return tl.tensor(TensorHandle(data, tl.int32), kind)


def twin(word, x_even, x_odd, even, odd):
    """Replace `codes.dot_nibbles`.

    In NumPy: half of these tests' time would pass in Triton's interpreter.
    """
    codes = fields(word, np.uint8)
    even = add_dot(even, codes & 0x0F, fields(x_even, np.int16))
    return even, add_dot(odd, codes & 0xF0, fields(x_odd, np.int16))


def looked_up_twin(word, x_low, x_high, low, high, table, SIGNED):
    """Replace `codes.dot_looked_up`: iq4 numbers, or 12 + 2 * number from exponent and mantissa."""
    codes = word.handle.data[..., None] >> np.arange(0, 32, 4)
    exponent, mantissa = codes >> 1 & 3, codes & 1
    twice = np.where(exponent == 0, mantissa, (2 + mantissa) << np.maximum(exponent - 1, 0))
    values = np.array(IQ4, np.int32)[codes & 15]
    if not SIGNED:
        values = 12 + np.where(codes & 8 == 0, twice, -twice)
    low = add_dot(low, values[..., :4], fields(x_low, np.int16))
    return low, add_dot(high, values[..., 4:], fields(x_high, np.int16))


def bytes_twin(word, x, total, SIGNED):
    """Replace `codes.dot_bytes`."""
    return add_dot(total, fields(word, np.int8 if SIGNED else np.uint8), fields(x, np.int16))


def five_bits_twin(word, high, x_even, x_odd, total, M):
    """Replace `codes.dot_five_bits`."""
    codes, above = fields(word, np.uint8), fields(high, np.uint8) >> 2 * M
    total = add_dot(total, codes & 15 | (above & 1) << 4, fields(x_even, np.int16))
    return add_dot(total, codes >> 4 | (above >> 1 & 1) << 4, fields(x_odd, np.int16))


def six_bits_twin(word, high, x_low, x_high, low, high_sum, M):
    """Replace `codes.dot_six_bits`."""
    codes, above = fields(word, np.uint8), fields(high, np.uint8) >> 4 * M
    first, second = codes & 15 | (above & 3) << 4, codes >> 4 | (above >> 2 & 3) << 4
    low = add_dot(low, 4 * (first - 32), fields(x_low, np.int16))
    return low, add_dot(high_sum, 4 * (second - 32), fields(x_high, np.int16))


def three_bits_twin(word, third, x, low, high, M):
    """Replace `codes.dot_three_bits`, and without third bits `codes.dot_two_bits`."""
    found = [low, low, high, high]
    for k in range(4):
        values = fields(word, np.uint8) >> 2 * k & 3
        if third is not None:
            values = values | (fields(third, np.uint8) >> 4 * M + k & 1) << 2
        at = k // 2 * 2
        found[at] = add_dot(found[at], values << 2 * at, fields(x[k], np.int16))
    return found[0], found[2]


def two_bits_twin(word, x, low, high):
    """Replace `codes.dot_two_bits`."""
    return three_bits_twin(word, None, x, low, high, 0)


def pair_twin(pair, total):
    """Replace `operands.add_pair`."""
    return add_dot(total, fields(pair, np.int16), np.int32(1))


def select_twin(first, second, codes):
    """Replace `words._select`, which is the instruction prmt."""
    parts = [np.broadcast_to(part.handle.data, codes.shape) for part in (first, second)]
    code = codes.handle.data[..., None] >> np.arange(0, 16, 4) & 15
    byte = np.take_along_axis(np.stack(parts, -1).view(np.int8), code & 7, -1)
    data = np.where(code & 8 == 0, byte, byte >> 7).astype(np.int8).view(np.int32)[..., 0]
    return tl.tensor(TensorHandle(data, tl.int32), codes.type)


def e2m1_twin(*given):
    """Replace `words._dot_e2m1`, which is inline assembly."""
    return looked_up_twin(*given, False)


def replace_four_bits() -> None:
    """Let the interpreter run products of codes in NumPy."""
    codes.dot_bytes, codes.dot_nibbles, operands.add_pair = bytes_twin, twin, pair_twin
    codes.dot_five_bits, codes.dot_six_bits = five_bits_twin, six_bits_twin
    codes.dot_looked_up = looked_up_twin
    codes.dot_two_bits, codes.dot_three_bits = two_bits_twin, three_bits_twin


@triton.jit
def words_kernel(given, numbers, out, CASE: tl.constexpr, M: tl.constexpr):
    """Multiply words by x as each kind of code does, by the functions that are called there."""
    at = tl.arange(0, 2)[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
    word, high = tl.load(given + at), tl.load(given + 64 + at)
    x, y = tl.load(numbers + at), tl.load(numbers + 64 + at)
    low = tl.load(given + 128 + at) >> 4
    odd = low
    zero = tl.program_id(0)
    if CASE == "bytes":
        low = codes.dot_bytes(word, x, low, True)
    elif CASE == "word":
        low, odd = codes.dot_nibbles(word, x, y, low, odd)
    elif CASE == "e2m1":
        low, odd = codes.dot_looked_up(word, x, y, low, odd, codes.e2m1_table(zero), False)
    elif CASE == "five":
        low = codes.dot_five_bits(word, high, x, y, low, M)
    elif CASE == "six":
        low, odd = codes.dot_six_bits(word, high, x, y, low, odd, M)
    elif CASE == "two":
        low, odd = codes.dot_two_bits(word, (x, y, y, x), low, odd)
    elif CASE == "three":
        low, odd = codes.dot_three_bits(word, high, (x, y, y, x), low, odd, M)
    elif CASE == "iq4":
        low, odd = codes.dot_looked_up(word, x, y, low, odd, codes.iq4_table(zero), True)
    else:
        low = operands.add_pair(word, low)
    tl.store(out + at, low)
    tl.store(out + 64 + at, odd)


WORDS = {"bytes": 1, "word": 1, "e2m1": 1, "five": 4, "six": 2, "two": 1, "three": 2}  # values of M
WORDS |= {"iq4": 1, "pair": 1}


def products_of_words() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    given = torch.randint(-(2**31), 2**31, (192,), dtype=torch.int32, generator=random)
    numbers = torch.randint(-(2**63), 2**63 - 1, (128,), generator=random)
    found = []
    for case, count in WORDS.items():
        for m in range(count):
            out = torch.zeros(128, dtype=torch.int32)
            words_kernel[(1,)](given, numbers, out, case, m)
            found.append(out)
    return found


@triton.jit
def units_kernel(given, scales, out, KIND: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    """Decode field K of units, as tensor cores of other makers take them."""
    at = tl.arange(0, 256)
    codes_, above = tl.load(given + at), tl.load(given + 256 + at)
    if KIND == "mxfp4":
        above = units.e2m1_factor(tl.load(scales + at), DTYPE)
    found = units.decode(codes_, above, K, KIND, DTYPE).to(tl.float32)
    tl.store(out + at, units.finish(found, 1.0, KIND, DTYPE))


def different_units() -> list[int]:
    """Return how many of 256 numbers differ in bf16 from those in fp32, of each kind and field."""
    random = torch.Generator().manual_seed(0)
    given = torch.randint(-(2**15), 2**15, (512,), dtype=torch.int16, generator=random)
    scales = torch.randint(100, 140, (256,), dtype=torch.int32, generator=random)
    found = []
    for kind in ("int8", "fp8", "mxfp4", "int4", "q5_k", "q6_k", "iq4"):
        for field in range(2 if kind in ("int8", "fp8") else 4):
            outs = [torch.zeros(256) for _ in range(2)]
            for out, dtype in zip(outs, (tl.bfloat16, tl.float32), strict=True):
                units_kernel[(1,)](given, scales, out, kind, field, dtype)
            assert len(outs[0].unique()) > 10
            found.append(int((outs[0] != outs[1]).sum()))
    return found


def different_words() -> list[int]:
    """Compare what GPUs compute, by shifts and by NVIDIA's instructions, with the twins in NumPy.

    Return how many of 128 sums differ, of each case.
    """
    by_shifts = products_of_words()
    instructions = mock.patch.multiple(
        words, _select=select_twin, _dot_e2m1=e2m1_twin, dot_bytes=bytes_twin, add_pair=pair_twin
    )
    own = mock.patch.multiple(codes, dot_bytes=bytes_twin)
    pairs = mock.patch.object(operands, "add_pair", pair_twin)
    with instructions, own, pairs, mock.patch.object(tl.target_info, "is_cuda", lambda: True):
        by_instructions = products_of_words()
    replace_four_bits()
    twins = products_of_words()
    assert all(len(found.unique()) > 60 for found in twins)
    others = zip(by_shifts + by_instructions, twins + twins, strict=True)
    return [int((a != b).sum()) for a, b in others] + different_units()


def dot4_code(case: tuple) -> dict[str, int]:
    """Count spills, products, waits and loads in the kernel's machine code."""
    arguments, _ = dot4_case(case, 1.0)
    *_, code = launched_code(lambda: run_dot4(case, arguments)).values()  # after `_quantize_token`
    names = {
        "spills": "STL",
        "products": "IDP.2A",
        "waits": "ACQBULK",
        "starts": "PREEXIT",
        "loads": "LDG.E.128",
    }
    return {name: code.asm["sass"].count(text) for name, text in names.items()}


BLOBS = (16, 160, 48), (65536 + 64, 20000), (40, 20004)  # bytes of an expert's parts


BY_KERNEL = mock.patch.object(expert_paging, "fetches_by_kernel", lambda *_: True)


def fetch_case(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
    """Return three copies' experts (-1: none) and slots, and 5 experts, a pool of 3, the parts."""
    starts = [0, *itertools.accumulate(-(-size // 128) * 128 for size in sizes)]
    host = torch.randint(
        256, (5, starts[-1]), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    parts = [number for part in zip(starts, sizes, strict=False) for number in part]
    return (
        torch.tensor([3, -1, 0]),
        torch.tensor([2, 0, 1]),
        host,
        torch.zeros(3 * starts[-1], dtype=torch.uint8),
        parts,
    )


def fetch_is_right(sizes: tuple[int, ...]) -> bool:
    """Return whether the kernel copies the same bytes as the operator's loop on the CPU."""
    experts, places, host, pool, parts = fetch_case(sizes)
    want = pool.clone()
    expert_paging.fetch_plainly(experts, places, host, want, parts)
    # Two programs an expert: each copies several chunks of the second of BLOBS.
    with BY_KERNEL:
        expert_paging.fetch(experts, places, host, pool, parts, 2)
    return torch.equal(pool, want)


def fetch_code() -> dict[str, int]:
    """Count loads and stores of 16 bytes in the copy's machine code."""
    args = fetch_case(BLOBS[1])
    with BY_KERNEL:
        code = launched_code(lambda: expert_paging.fetch(*args))
    asm = code["_fetch"].asm["sass"]
    return {name: asm.count(name) for name in ("LDG.E.128", "STG.E.128")}


def row_memory() -> RowMemory:
    """Return three rows of caches, the second in int8 with odd sizes, and of a recurrent state."""
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    caches = [
        KVCache((3, 2, 40, 24), torch.bfloat16, device),
        Int8KVCache((3, 3, 1500, 7), torch.bfloat16, device, parts=1),
    ]
    for buffer in (buffer for cache in caches for buffer in cache.buffers()):
        buffer.copy_(torch.randint(-90, 90, buffer.shape, generator=generator))
    state = torch.randn(3, 50, 25, generator=generator)
    rows = range(3)
    return RowMemory([[*(v for c in caches for v in c.row(n)), state[n].view(1, -1)] for n in rows])


def moved_rows() -> list[bool]:
    """Return whether the kernel moves the same as the loop on a CPU."""
    found = []
    for length, exchange in itertools.product((0, 1, 30, 1300, 1500), (False, True)):
        want, got = row_memory(), row_memory()
        got.planes = make_planes(*got.views[:2])
        for memory in (want, got):
            (memory.exchange if exchange else memory.copy)(2, 1, length)
        pairs = (zip(*views, strict=True) for views in zip(want.views, got.views, strict=True))
        found.append(all(torch.equal(a, b) for row in pairs for a, b in row))
    return found


def moved_rows_code() -> dict[str, int]:
    """Count loads and stores in the machine code of both moves."""
    memory, text = row_memory(), ""
    memory.planes = make_planes(*memory.views[:2])
    for exchange in (False, True):
        move = partial(memory.move, 2, 1, 30, exchange)
        text += launched_code(move)["_move"].asm["sass"]
    return {name: text.count(name) for name in ("LDG.E", "STG.E")}


def push_error(
    parts: Tensor,
    rank: int,
    count: int,
) -> float:
    """Return the relative error of one rank's all-reduce of parts [N, ...], one part a rank.

    The other ranks have already pushed theirs. The error is infinite if this rank did not push its
    own part, with the number `count + 1` of this call, into the inboxes of all others.
    """
    words = torch.nn.functional.pad(
        parts.flatten(1).view(torch.int32), (0, -parts[0].nbytes // 4 % all_reduce.WORDS)
    )
    stamped = (words.long() & 0xFFFFFFFF | count + 1 << 32).unflatten(1, (-1, all_reduce.WORDS))
    inboxes, others = (
        [torch.zeros(2, *stamped.shape, dtype=torch.int64) for _ in parts],
        [*range(len(parts))],
    )
    others.remove(rank)
    inboxes[rank][count + 1 & 1, others] = stamped[others]
    peers = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    turns = torch.full(stamped.shape[1:2], count, dtype=torch.int32)
    inbox = all_reduce.Inbox(inboxes[rank], peers, turns, rank)
    got = all_reduce.push_all_reduce(parts[rank].as_subclass(OnCuda), inbox)
    got = got.as_subclass(Tensor).float()
    there = [
        inboxes[other][count + 1 & 1, rank].flatten()[: parts[0].nbytes // 4] for other in others
    ]
    if (
        not all(torch.equal(words, stamped[rank].flatten()[: len(words)]) for words in there)
        or (turns != count + 1).any()
    ):
        return math.inf
    want = parts.float().sum(0).to(parts.dtype).float()
    return ((got - want).norm() / want.norm()).item()


def fixed_errors() -> dict[str, float]:
    """Return relative errors of the push all-reduce, and of norm and scores, against PyTorch."""
    torch.manual_seed(0)
    found = {}
    for D, E in ((64, 8), (2048, 128), (2880, 5)):
        x, weight, rows = torch.randn(3, D), torch.randn(D), torch.randn(E, D)
        y, library = torch.randn(3, D), torch.nn.functional
        for name, bias, norm in (
            ("norm", None, library.rms_norm),
            ("norm with bias", rows[0], library.layer_norm),
        ):
            for T, rows_of in ((1, rows), (3, rows), (3, None)):
                parts = x[:T].as_subclass(OnCuda), y[:T].as_subclass(OnCuda)
                given = parts[0], Added(y=parts[1]), NextNorm(weight, bias, 1e-5)
                got = fixed_join(*given, rows_of, 0.5)
                total = x[:T] + 0.5 * y[:T]
                normed = norm(total, (D,), weight, *(() if bias is None else (bias,)), 1e-5)
                want = total, normed, total.new_empty(0) if rows_of is None else normed @ rows.T
                got, want = (
                    torch.cat([*map(torch.flatten, some)]).as_subclass(Tensor)
                    for some in (got, want)
                )
                scores = "no" if rows_of is None else E
                found[f"{name} of {D}, {T} tokens, {scores} scores"] = (
                    (got - want).norm() / want.norm()
                ).item()
    found |= sandwich_errors()
    for ranks, dtype in itertools.product((2, 3, 4), (torch.float32, torch.bfloat16)):
        parts = torch.randn(ranks, 3, 20 * ranks + 2, dtype=torch.float32).to(dtype)
        found[f"sum over {ranks} in {dtype}"] = push_error(parts, ranks - 2, ranks)
    return found


def sandwich_errors() -> dict[str, float]:
    """Return relative errors of `fixed_join` of normed branches against PyTorch."""
    found = {}
    for D, tokens, branches in ((2816, 1, 2), (2816, 1, 1), (64, 3, 2)):
        x, y, router = torch.randn(tokens, D), torch.randn(branches, tokens, D), torch.randn(7, D)
        of_each, weight, after = torch.randn(2, D), torch.randn(D), torch.randn(D)
        scalar = torch.tensor([0.7])
        of_branches = of_each if branches > 1 else None
        for given in ((scalar, after, None), (None, None, router), (scalar, None, router)):
            added = Added(y=y, branch_norms=of_branches, norm=weight, scalar=given[0])
            rest = added, NextNorm(given[1], None, 1e-6), given[2], 1.0
            got = fixed_join(x.as_subclass(OnCuda), *rest)
            want = join_plainly(x, *rest)
            got, want = (
                torch.cat([*map(torch.flatten, some)]).as_subclass(Tensor) for some in (got, want)
            )
            options = [part is not None for part in given]
            name = f"sandwich of {D}, {tokens} tokens, {branches} branches, {options}"
            found[name] = ((got - want).norm() / want.norm()).item()
    return found


def fixed_code() -> dict[str, dict[str, int]]:
    """Count waits, starts, spills and loads in their machine code for compute capability 9."""
    found = {}
    x, weight = (
        torch.randn(1, 4096, dtype=torch.bfloat16),
        torch.randn(8, 4096, dtype=torch.bfloat16),
    )
    wide, wide_norm = torch.randn(1, 6144).bfloat16(), NextNorm(torch.ones(6144), None, 1e-5)
    norm = NextNorm(weight[0], None, 1e-5)
    branches = Added(None, None, weight[:2, None], weight[:2], weight[0], weight[0, :1])
    cases = {
        "fixed_add_norm": (fixed_join, (x, Added(y=x), norm)),
        "fixed_add_norm, wide": (fixed_join, (wide, Added(y=wide), wide_norm)),
        "fixed_sandwich": (fixed_join, (x, branches, norm)),
    }
    for ranks in (2, 4, 8):
        inbox = all_reduce.Inbox(
            x, torch.zeros(ranks, dtype=torch.int64), torch.zeros(32, dtype=torch.int32), 0
        )
        cases[f"push_all_reduce over {ranks}"] = all_reduce.push_all_reduce, (x, inbox)
    for case, (function, arguments) in cases.items():
        given = arguments[0].as_subclass(OnCuda), *arguments[1:]
        (code,) = launched_code(partial(function, *given)).values()
        asm = code.asm["sass"]
        found[case] = {
            "waits": asm.count("ACQBULK"),
            "starts": asm.count("PREEXIT"),
            "spills": asm.count("STL"),
            "sent": asm.count("STG.E.128 "),
            "ahead": asm.partition("ACQBULK")[0].count("LDG.E.128"),
        }
    return found


ATTEND = {  # B, Q, H, K, C, S, window, sinks
    "one token, many parts": (1, 1, 8, 2, 32, 384, None, False),
    "two sequences, three queries, a window": (2, 3, 4, 2, 16, 256, 100, False),
    "five queries, sinks": (1, 5, 32, 8, 16, 256, None, True),
}


def attend_error(
    B: int, Q: int, H: int, K: int, C: int, S: int, window: int | None, sinks: bool
) -> float:
    """Return the relative error of block-wise attention over an int8 cache against `attend`."""
    generator = torch.Generator().manual_seed(Q)
    cache = Int8KVCache((B, K, S, C), torch.float32, torch.device("cpu"))
    kv = torch.randn(B, S, 2, K, C, generator=generator)
    k, v = cache.append(kv, Context(torch.empty(0), positions=torch.arange(S).expand(B, S)))
    positions = torch.randint(5, S - Q, (B, 1), generator=generator) + torch.arange(Q)
    q = torch.randn(B, Q, H, C, generator=generator)
    sinks = torch.randn(H, generator=generator) if sinks else None
    bias = causal_bias(positions, S, window, torch.float32)
    want = attend(q, k, v, bias, sinks)
    context = Context(torch.empty(0), positions=positions)
    got, lse = cache.attend_blocks(q, k, v, context, window, return_lse=True)
    if sinks is not None:
        share = (lse - sinks.unsqueeze(-1)).sigmoid().transpose(1, 2).unsqueeze(-1)
        got = (got.unflatten(-1, (H, C)) * share).flatten(2)
    return ((got - want).norm() / want.norm()).item()


TOKEN = {  # B, H, K, C, S, positions, window, rotary_dim, qk_norm, clip, sinks
    "one block": (1, 4, 2, 32, 256, (70,), None, 32, "none", None, False),
    "the first token, Mixtral's grid": (1, 32, 8, 128, 256, (0,), None, 128, "none", None, False),
    "some blocks, a norm": (2, 4, 1, 64, 768, (513, 767), None, 64, "head", None, False),
    "norms of all heads, clipped": (2, 40, 8, 64, 256, (70, 255), None, 64, "full", 0.5, False),
    "a window, sinks, half turned, clipped": (
        3,
        4,
        1,
        64,
        768,
        (5, 300, 700),
        300,
        32,
        "none",
        0.7,
        True,
    ),
    "as many as half a block, and one more": (
        *(2, 4, 2, 64, 512),
        *((128, 129), None, 64, "none", None, False),
    ),
    "a position after a block's end": (1, 2, 2, 256, 256, (64,), None, 256, "none", None, True),
}
# The same, and the number of queries; positions are those of each sequence's first query.
FEW_QUERIES = {
    "two queries, a norm, two sequences": (
        *(2, 4, 1, 64, 256, (0, 254), None, 64, "head", None, False),
        2,
    ),
    "eight queries, norms of all heads, clipped": (
        *(1, 5, 5, 64, 256, (125,), None, 64, "full", 0.5, False),
        8,
    ),
    "five queries, a window, sinks, half turned": (
        *(2, 4, 1, 16, 512, (250, 507), 200, 8, "none", 0.7, True),
        5,
    ),
}
MORE_QUERIES = {
    "a short window, across a block's end": (
        *(1, 4, 2, 32, 384, (253,), 3, 32, "none", None, True),
        8,
    ),
    "the end of the cache, Qwen3's heads": (
        *(1, 32, 4, 128, 256, (248,), None, 128, "head", None, False),
        8,
    ),
    "the first tokens, gpt-oss's heads": (
        *(1, 64, 8, 64, 256, (0,), 128, 64, "none", None, True),
        8,
    ),
    "sixteen heads a KV head": (*(2, 16, 1, 64, 256, (1, 127), None, 64, "none", None, False), 5),
    "twelve heads a KV head": (*(1, 24, 2, 128, 256, (128,), None, 64, "head", None, False), 7),
    "large heads": (*(1, 2, 1, 256, 256, (129,), None, 256, "none", None, True), 3),
    "large heads, a norm, a window": (
        *(2, 2, 2, 256, 256, (30, 200), 100, 64, "head", None, False),
        2,
    ),
    "many parts": (*(2, 8, 2, 16, 1024, (1016, 640), None, 16, "full", None, True), 8),
}


# The same, and how many of the queries are padding. Positions are before a ring's end and beyond.
RINGS = {
    "a ring of two blocks, as gpt-oss's": (
        *(1, 2, 1, 64, 640, (610,), 128, 64, "none", None, True),
        *(1, 0),
    ),
    "eight queries, three of them padding, across a ring's end": (
        *(1, 2, 1, 16, 512, (380,), 40, 16, "none", None, False),
        *(8, 3),
    ),
}
MORE_RINGS = {
    "a ring before and at its end, and far beyond": (
        *(3, 8, 2, 16, 1024, (40, 128, 1000), 50, 8, "head", None, True),
        *(1, 0),
    ),
    "a ring of two blocks at its end": (
        *(2, 4, 2, 64, 640, (255, 610), 128, 64, "none", None, True),
        *(1, 0),
    ),
    "an idle row beside a full window": (
        *(1, 4, 2, 16, 512, (300,), 64, 16, "none", None, True),
        *(1, 1),
    ),
    "64 queries at a ring's end": (*(1, 4, 2, 16, 512, (100,), 64, 16, "head", None, False), 64, 0),
    "64 queries, most of them padding": (
        *(1, 4, 2, 16, 512, (250,), 64, 16, "none", None, True),
        *(64, 60),
    ),
    "a large ring in several parts": (
        *(1, 4, 1, 32, 2048, (1900,), 1024, 32, "none", None, True),
        *(1, 0),
    ),
}


class ReferenceAttention(Attention):
    """Attention with all that the kernel computes."""

    def __init__(self, args: ModelArgs, rotary_dim: int, scale: float, sinks: bool):
        super().__init__(args)
        self.sinks = torch.nn.Parameter(torch.empty(args.n_head)) if sinks else None
        self.rotary_dim, self.query_scale = rotary_dim, scale * args.head_dim**0.5

    def queries(self, q: Tensor, rope: Tensor) -> Tensor:
        return super().queries(q, rope) * self.query_scale

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        return attend(q, k, v, context.masks[self.window].bias, self.sinks)


def token_error(
    B: int,
    H: int,
    K: int,
    C: int,
    S: int,
    at: tuple[int, ...],
    window: int | None,
    rotary_dim: int,
    qk_norm: str,
    clip: float | None,
    sinks: bool,
    queries: int = 1,
    padding: int = 0,
) -> float:
    """Relative error of the fused kernel, and of the cache after it, against the plain layer.

    padding: queries at the end that are none.
    """
    torch.manual_seed(B + H)
    args = replace(
        ARCHITECTURES["Mixtral-8x7B"],
        dim=64,
        n_head=H,
        n_kv_head=K,
        head_dim=C,
        clip_qkv=clip,
        sliding_window=window,
        qk_norm=qk_norm,
    )
    # A score's rounding error, which its exponential has, grows with |q| |k|, as C does.
    layer = ReferenceAttention(args, rotary_dim, 0.3 * 64 / C, sinks)
    positions = torch.tensor(at)
    positions = positions.unsqueeze(1) + torch.arange(queries)
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    frequencies = rope_frequencies(rotary_dim, args.rope_theta, torch.device("cpu"))
    rope = rope_table(frequencies, S, unrotated=C - rotary_dim)[positions].unsqueeze(2)
    masks = {window: Mask(causal_bias(positions, S, window, torch.float32))}
    last = torch.full((B,), queries - padding - 1)
    context = Context(rope, positions=positions, masks=masks, last=last)
    kv, x = torch.randn(2, B, K, S, C), torch.randn(B, queries, 64)
    settings = AttentionAdditions(sinks=layer.sinks, query_scale=layer.query_scale)
    return fused_error(layer, settings, x, context, kv)


SMALL = dict(dim=64, n_head=4, n_kv_head=2, head_dim=16, vocab_size=32, n_expert=8, intermediate=16)
GEMMA4 = SMALL | dict(
    sliding_window=20,
    global_head_dim=32,
    global_kv_head=1,
    global_rotary_dim=8,
    shared_intermediate=16,
)
LAGUNA = SMALL | dict(
    sliding_window=20,
    dense_intermediate=16,
    shared_intermediate=16,
    n_head=6,
    layer_heads=(4, 6, 6, 6, 4, 6),
    full_rope=LayerRope(1e4, 8),
)
FLINT = SMALL | dict(sliding_window=20, dense_intermediate=16, shared_intermediate=16)
# Name in ARCHITECTURES, changed args, layer.
LAYERS = {
    "Gemma 4's window layer": ("gemma-4-26B-A4B", GEMMA4, 0),
    "Gemma 4's global layer": ("gemma-4-26B-A4B", GEMMA4, 5),
    "Laguna's full layer, a gate a head": ("Laguna-XS-33B-A3B", LAGUNA, 0),
    "Laguna's window layer, a gate a number": (
        "Laguna-XS-33B-A3B",
        LAGUNA | {"gate": "element"},
        1,
    ),
    "Flint's full layer, not rotated": ("Flint-40B-A2.5B", FLINT, 0),
}


def layer_token_error(name: str, changes: dict, number: int, queries: int = 1) -> float:
    """The same for a layer of a family's model, with what the family adds."""
    torch.manual_seed(0)
    args = replace(first_layers(ARCHITECTURES[name], 6), **changes)
    model = family_of(args).model_class(args)
    layer, S = model.layers[number].attention, 128
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    positions, (_, K, C) = torch.tensor([[40], [3]]) + torch.arange(queries), layer.heads
    rope = model.make_rope_table(S, torch.device("cpu"))[positions].unsqueeze(2)
    masks = {layer.window: Mask(causal_bias(positions, S, layer.window, torch.float32))}
    context, x = Context(rope, positions=positions, masks=masks), torch.randn(2, queries, 64)
    settings = layer.fused_decode_settings()
    return fused_error(layer, settings, x, context, torch.randn(2, 2, K, S, C))


def gated_token_error(queries: int = 1) -> float:
    """The same for Qwen3-Next's layer: a gated output, part of each head rotated, fp32 norms."""
    torch.manual_seed(0)
    sizes = dict(dim=64, n_head=4, n_kv_head=2, head_dim=32, rotary_dim=8)
    args = replace(ARCHITECTURES["Qwen3-Next-80B-A3B"], **sizes)
    layer, S = GatedAttention(args), 128
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    positions = torch.tensor([[40], [3]]) + torch.arange(queries)
    frequencies = rope_frequencies(8, args.rope_theta, torch.device("cpu"))
    rope = rope_table(frequencies, S, unrotated=24)[positions].unsqueeze(2)
    masks = {None: Mask(causal_bias(positions, S, None, torch.float32))}
    context, x = Context(rope, positions=positions, masks=masks), torch.randn(2, queries, 64)
    settings = layer.fused_decode_settings()
    return fused_error(layer, settings, x, context, torch.randn(2, 2, 2, S, 32))


GQA_WAYS = {  # tile, most parts, bound of positions
    "many parts": (Blocks(32, 2), 64, False),
    "two parts of several blocks, or of two as one": (Blocks(32, 2, wide=True), 2, False),
    "one part of several blocks": (Blocks(32, 2), 1, False),
    "two blocks as one": (Blocks(64, 2, wide=True), 64, False),
    "two blocks as one, bounded": (Blocks(64, 2, wide=True), 64, True),
    "one part of several blocks, bounded": (Blocks(32, 2), 1, True),
}


def fused_error(
    layer: Attention, settings: AttentionAdditions, x: Tensor, context: Context, kv: Tensor
) -> float:
    """Return the largest relative error of the fused layers over a cache kv [2, B, K, S, C].

    The kernel reads it in each of GQA_WAYS, and in two of them int8 codes. The plain layer has a
    cache of all positions, and the kernel one of the layer's own length, which may be a ring.
    """
    positions, queries = context.positions, x.shape[1]
    real = queries if context.last is None else int(context.last[0]) + 1
    newest, slots = positions[:, :1] + real - 1, cache_slots(kv.shape[3], layer.window)
    found, fused = [], FusedDecodeAttention(layer, settings)
    plain = ((fused, KVCache, way) for way in GQA_WAYS)
    int8 = ((fused, Int8KVCache, way) for way in list(GQA_WAYS)[:2])
    cases = (layer, KVCache, "many parts"), *plain, (layer, Int8KVCache, "many parts"), *int8
    for attention, kind, way in cases:
        cache = attention.allocate(kv.shape[1], kv.shape[3], kind, x)
        if attention is layer:
            cache = layer.cache = kind(tuple(kv.shape[1:]), x.dtype, x.device)
        fill(cache, kv, positions[:, 0].tolist())
        is_fused, (tile, most, bounded) = attention is fused, GQA_WAYS[way]
        reach = int(context.positions.max()) + 1 if bounded else None
        core = partialmethod(FusedDecodeAttention.fused_core, reach=reach)
        with (
            mock.patch.object(FusedDecodeAttention, "is_fused", lambda *_, f=is_fused: f),
            mock.patch.object(FusedDecodeAttention, "fused_core", core),
            mock.patch.object(softmax, "MAX_PARTS", most),
            mock.patch.object(gqa, "choose_tiles", lambda *_, tile=tile: iter((tile,))),
        ):
            y = attention(x, context)
        stored = (part.float() for part in cache.stored() if part is not None)
        found.append((y[:, :real], *(in_slots(part, newest, slots) for part in stored)))
    count = 1 + len(GQA_WAYS)
    plain, quantized = found[:count], found[count:]
    return max(largest_error(want, got) for want, *rest in (plain, quantized) for got in rest)


def fill(cache: KVCache, kv: Tensor, lengths: Iterable[int]) -> None:
    """Store the first keys and values of each sequence in a cache of any kind."""
    for row, end in enumerate(lengths):
        if end:
            context = Context(torch.empty(0), chunk=Chunk(torch.tensor([row]), end))
            cache.append(kv[:, row : row + 1, :, :end].permute(1, 3, 0, 2, 4), context)


def in_slots(stored: Tensor, newest: Tensor, slots: int) -> Tensor:
    """Return what a cache [2, B, K, S, N] stores, as a cache of `slots` has it at that time.

    newest [B, 1]: each sequence's newest position. Of a cache that has no more slots, what is in
    use.
    """
    held = slot_positions(newest, slots)
    source = held.clamp(min=0) if stored.shape[3] > slots else torch.arange(slots).expand_as(held)
    rows = torch.arange(len(held)).unsqueeze(1)
    in_use = (held >= 0)[:, :, None, None, None]
    return torch.where(in_use, stored[:, rows, :, source], 0.0)


def largest_error(want: Iterable[Tensor], got: Iterable[Tensor]) -> float:
    """Return the largest relative error of tensors in pairs."""
    pairs = zip(want, got, strict=True)
    return max(((b - a).norm() / a.norm()).item() for a, b in pairs if a.numel())


def first_block_loads(C: int, itemsize: int) -> int:
    """Return how many 16-byte loads of a lane a block of keys and values takes."""
    block = next(gqa.choose_tiles(C, itemsize, 1)).block
    return block * C * 2 * itemsize // (16 * 32 * gqa.WARPS)


def attention_code(
    layer: AttentionSettings, Q: int, S: int, dtype, kind, norms, sinks, reach: int | None = None
) -> list:
    """Return the kernels of `attend_tokens` for one sequence, compiled."""
    C, empty = layer.head_dim, partial(torch.empty, dtype=dtype)
    stored = kind((1, layer.kv_heads, S, C), dtype, torch.device("cpu")).stored()
    qkv, rope = empty(1, Q, layer.projected), torch.empty(1, Q, 1, 2 * C)
    weights = [None if width is None else empty(width) for width in (*norms, sinks)]
    positions = torch.empty(1, Q, dtype=torch.int64)
    tensors = qkv, rope, positions, *stored, *weights
    return list(launched_code(lambda: gqa.attend_tokens(*tensors, layer.encoded(), reach)).items())


def norm_widths(qk_norm: str, H: int, K: int, C: int) -> tuple:
    return {"none": (None, None), "head": (C, C), "full": (H * C, K * C)}[qk_norm]


def token_code() -> dict[str, dict[str, int]]:
    """Count waits, starts, spills, products, and loads before the wait in its machine code.

    Of each there are two in 16 bits, for few and more positions. Loads are those of 16 bytes.
    """
    found = {}
    names = "Mixtral-8x7B", "Qwen3-30B-A3B", "gpt-oss-20b", "OLMoE-1B-7B"
    cases = itertools.product(names, (torch.bfloat16, torch.float32), (32768,), (None,))
    short = (names[1], torch.bfloat16, 256, None), (names[1], torch.bfloat16, 32768, 200)
    for name, dtype, S, reach in (*cases, *short):
        args = replace(ARCHITECTURES[name], sliding_window=None)
        H, K, C, is_full = args.n_head, args.n_kv_head, args.head_dim, args.qk_norm == "full"
        layer = AttentionSettings(H, K, C, C, 0.1, 1e-5, full_norm=is_full)
        norms = norm_widths(args.qk_norm, H, K, C)
        sinks = H if args.family == "gpt_oss" else None
        (_, code), *merges = attention_code(layer, 1, S, dtype, KVCache, norms, sinks, reach)
        asm = code.asm["sass"]
        last = re.split(r"\bEXIT\b", asm.split("ACQBULK")[-2])[-1]
        found[f"{name}, {reach or S} positions, {dtype}"] = {
            "waits": asm.count("ACQBULK"),
            "starts": asm.count("PREEXIT"),
            "spills": asm.count("STL"),
            "products": asm.count("HMMA"),
            "ahead": [part.count("LDG.E.128") for part in asm.split("ACQBULK")[:-1]],
            # The last body loads these before it stages something in shared memory.
            "together": re.split(r"\b(?:STS|LDSM)\b", last)[0].count("LDG.E.128"),
            "block": first_block_loads(C, dtype.itemsize),
            "merges": len(merges),
        }
    return found


QUERIES_CODE = {  # H, K, C, S, qk_norm, cache class; sinks and a window, or a gate
    "gpt-oss": (64, 8, 64, 512, "none", KVCache, "sinks"),
    "OLMoE": (16, 16, 128, 512, "full", KVCache, ""),
}
MORE_QUERIES_CODE = {
    "Qwen3": (32, 4, 128, 512, "head", KVCache, ""),
    "Qwen3, long": (32, 4, 128, 4096, "head", KVCache, ""),
    "Qwen3, long, int8": (32, 4, 128, 4096, "head", Int8KVCache, ""),
    "gpt-oss, long": (64, 8, 64, 4096, "none", KVCache, ""),
    "gpt-oss, int8": (64, 8, 64, 512, "none", Int8KVCache, "sinks"),
    "Qwen3.6": (16, 2, 256, 256, "head", KVCache, "gated"),
    "Qwen3.6, long": (16, 2, 256, 4096, "head", KVCache, "gated"),
    "Qwen3.6, long, int8": (16, 2, 256, 4096, "head", Int8KVCache, "gated"),
}


def queries_code(cases: dict[str, tuple]) -> dict[str, dict[str, int]]:
    """Count waits, starts, spills, loads before the wait and MMAs of eight queries' code."""
    found = {}
    for case, (H, K, C, S, qk_norm, kind, more) in cases.items():
        sinks, window = (H, 128) if more == "sinks" else (None, gqa.NO_WINDOW)
        layer = AttentionSettings(H, K, C, C, 0.1, 1e-5, window=window)
        gate = "sigmoid" if more == "gated" else ""
        layer = replace(layer, gate=gate, full_norm=qk_norm == "full")
        norms = norm_widths(qk_norm, H, K, C)
        for name, code in attention_code(layer, 8, S, torch.bfloat16, kind, norms, sinks):
            asm = code.asm["sass"]
            found[f"{case}, {name}"] = {
                "waits": asm.count("ACQBULK"),
                "starts": asm.count("PREEXIT"),
                "spills": asm.count("STL"),
                "ahead": asm.partition("ACQBULK")[0].count("LDG.E.128"),
                "products": asm.count("HMMA"),
                "barriers": asm.count("BAR.SYNC"),
                "shared": code.metadata.shared,
            }
    return found


LATENT = {  # B, Q, H, r, R, S, cache class
    "one query of 16 heads": (1, 1, 16, 64, 16, 1024, KVCache),
    "one query of 128 heads": (1, 1, 128, 32, 16, 512, KVCache),
    "a batch, drafts": (3, 5, 12, 32, 32, 512, KVCache),
    "int8": (1, 1, 16, 64, 16, 1024, Int8KVCache),
    "int8, a batch, drafts": (2, 3, 24, 32, 16, 512, Int8KVCache),
}


def latent_error(B: int, Q: int, H: int, r: int, R: int, S: int, kind: type[KVCache]) -> float:
    """Return the relative error of block-wise latent attention against `attend`."""
    generator = torch.Generator().manual_seed(Q)
    rows = B + 1  # a session may have more of them than sequences that it decodes
    cache = kind((rows, 1, S, r + R), torch.float32, torch.device("cpu"), 1)
    values = torch.randn(B, S, 1, 1, r + R, generator=generator)
    everywhere = Context(torch.empty(0), positions=torch.arange(S).expand(B, S))
    (kv,) = cache.append(values, everywhere)
    positions = torch.randint(5, S - Q, (B, 1), generator=generator) + torch.arange(Q)
    q = 3 * torch.randn(B, Q, H, r + R, generator=generator)
    bias = torch.where(positions.unsqueeze(-1) >= torch.arange(S), 0.0, float("-inf"))
    want = attend(q, kv, kv[..., :r], bias).unflatten(-1, (H, r))
    parts = mla.attend_latent(q, *cache.stored(), positions, r, (r + R) ** -0.5)
    got = merge_partial(*parts).reshape(B, Q, H, r)
    return ((got - want).norm() / want.norm()).item()


def latent_code() -> dict[str, dict[str, int]]:
    """Count spills, MMAs and bytes of shared memory in its machine code at DeepSeek's shapes."""
    found = {}
    for Q, H, kind in itertools.product((1, 5), (16, 128), (KVCache, Int8KVCache)):
        cache = kind((1, 1, 4096, 576), torch.bfloat16, torch.device("cpu"), 1)
        q, positions = (
            torch.zeros(1, Q, H, 576, dtype=torch.bfloat16),
            torch.zeros(1, Q, dtype=torch.int64),
        )
        call = partial(mla.attend_latent, q, *cache.stored(), positions, 512, 0.1)
        code = launched_code(call)["_attend_part"]
        asm = code.asm["sass"]
        found[f"{Q} queries, {H} heads, {kind.__name__}"] = {
            "spills": asm.count("STL"),
            "products": asm.count("MMA"),
            "shared": code.metadata.shared,
        }
    return found


LATENT_TOKEN = {  # H, q_rank, N, R, r, V, S, each sequence's (first) position
    "DeepSeek-V2-Lite's heads": (16, None, 128, 64, 512, 128, 256, (150,)),
    "GLM-4.7-Flash's heads": (20, 32, 192, 64, 512, 256, 205, (64,)),
    "the first token": (4, None, 16, 16, 32, 32, 205, (0,)),
    "two tiles of heads, a batch": (40, 64, 24, 16, 64, 40, 512, (511, 3)),
}
LATENT_WAYS = {"one block a part": (64, Tile()), "two parts": (2, Tile(64, 2))}  # parts, at most
LATENT_TOKENS = {  # queries of each sequence, then the same
    "DeepSeek-V2-Lite's heads": (5, (16, None, 128, 64, 512, 128, 256, (150,))),
    "the first tokens": (8, (4, None, 16, 16, 32, 32, 205, (0,))),
    "a batch, whose parts differ": (3, (40, 64, 24, 16, 64, 40, 512, (509, 3, 64))),
    "more tokens than programs": (21, (4, None, 24, 16, 32, 40, 205, (60,))),
}


def latent_token_error(case: tuple, max_parts: int, tile: Tile, queries: int = 1) -> float:
    """Return the largest error of results and cache, plain and int8, against LatentAttention.core.

    max_parts: fewer parts than blocks of positions make the kernel loop. queries: of each sequence.
    """
    H, q_rank, N, R, r, V, S, at = case
    torch.manual_seed(H)
    args = replace(
        ARCHITECTURES["DeepSeek-V2-Lite"],
        dim=64,
        n_head=H,
        head_dim=N + R,
        q_rank=q_rank,
        rotary_dim=R,
        kv_rank=r,
        value_dim=V,
    )
    layer = LatentAttention(args)
    positions = torch.tensor(at).unsqueeze(1) + torch.arange(queries)
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter) * 3 * parameter.shape[-1] ** -0.5
    rope = rope_table(rope_frequencies(R, 1e4, torch.device("cpu")), S)[positions].unsqueeze(2)
    masks = {None: Mask(causal_bias(positions, S, None, torch.float32))}
    context = Context(rope, positions=positions, masks=masks)
    qkv = torch.randn(len(at), queries, layer.wqkv.weight.shape[0])
    kv = torch.randn(len(at), S, r + R)
    everywhere, found = Context(rope, positions=torch.arange(S).expand(len(at), -1)), []
    for kind in (KVCache, Int8KVCache):
        for is_fused in (False, True):
            cache = layer.allocate(len(at), S, kind, qkv)
            cache.append(kv.unflatten(-1, (1, 1, -1)), everywhere)
            core = partial(fused_latent_core, layer, tile) if is_fused else layer.core
            with mock.patch.object(softmax, "MAX_PARTS", max_parts):
                y = core(qkv, context)
            found.append((y, *(part.float() for part in cache.stored() if part is not None)))
    return max(largest_error(found[n], found[n + 1]) for n in (0, 2))


def fused_latent_core(layer: LatentAttention, tile: Tile, qkv: Tensor, context: Context) -> Tensor:
    """`LatentAttention.core` by the kernels. wq is applied here: its kernel reads no fp32."""
    _, N, R, r = layer.sizes
    q, kv = qkv.split((qkv.shape[-1] - r - R, r + R), dim=-1)
    q = q if layer.wq is None else layer.wq(layer.q_norm(q))
    weights = layer.wkv, layer.kv_norm.weight
    stored, at = layer.cache.stored(), (context.rope, context.positions)
    x = LatentTensors(q.flatten(0, 1), kv.flatten(0, 1), *at, *stored, *weights)
    settings = LatentSettings(*layer.sizes, layer.scale, layer.wkv.shape[1] - N, layer.kv_norm.eps)
    return mla.attend_latent_tokens(x, settings, tile).unflatten(0, qkv.shape[:2])


def latent_token_code(queries: int = 1) -> dict[str, dict[str, int]]:
    """Count waits, prefetches, loads before the wait and spills in its kernels' machine code."""
    found, names = {}, ("_map_queries", "_attend_part", "_merge_values")
    shapes = {"16 heads": (16, 128, 128), "20 heads": (20, 192, 256)}
    caches = (KVCache, 512), (KVCache, 16384), (Int8KVCache, 16384)
    for (shape, (H, N, V)), (kind, S) in itertools.product(shapes.items(), caches):
        empty = partial(torch.empty, dtype=torch.bfloat16)
        stored = kind((1, 1, S, 576), torch.bfloat16, torch.device("cpu"), 1).stored()
        q, kv, wkv = empty(queries, H * (N + 64)), empty(queries, 576), empty(H, N + V, 512)
        rope, positions = torch.empty(queries, 128), torch.empty(1, queries, dtype=torch.int64)
        x = LatentTensors(q, kv, rope, positions, *stored, wkv, empty(512))
        settings = LatentSettings(H, N, 64, 512, 0.1, V, 1e-6)
        codes = launched_code(partial(mla.attend_latent_tokens, x, settings))
        for name in names if S == 512 else names[1:2]:
            code = codes[name]
            asm = code.asm["sass"]
            found[f"{name}, {shape}, {S} positions, {kind.__name__}"] = {
                "waits": asm.count("ACQBULK"),
                "starts": asm.count("PREEXIT"),
                "spills": asm.count("STL"),
                "ahead": asm.partition("ACQBULK")[0].count("LDG.E.128"),
                "prefetches": asm.partition("ACQBULK")[0].count("UBLKPF"),
                "products": asm.count("HMMA"),
                "shared": code.metadata.shared,
            }
    return found


def attend_code() -> dict[str, dict[str, int]]:
    """Count spills and MMAs in its machine code."""
    found = {}
    for Q, H, K, C in ((1, 32, 8, 128), (1, 32, 4, 128), (5, 32, 8, 128), (9, 64, 8, 64)):
        cache = Int8KVCache((1, K, 4096, C), torch.bfloat16, torch.device("cpu"))
        q = torch.zeros(1, Q, H, C, dtype=torch.bfloat16)
        positions = torch.zeros(1, Q, dtype=torch.int64)
        tensors = q, cache.kv, cache.scale, positions
        (code,) = launched_code(partial(gqa.attend_int8, *tensors, 1 << 30)).values()
        asm = code.asm["sass"]
        found[f"{Q} queries, {H} heads, {K} KV heads"] = {
            "spills": asm.count("STL"),
            "products": asm.count("MMA"),
        }
    return found


def attend_errors() -> dict[str, float]:
    few = 12 / 132  # programs a multiprocessor: some have several blocks, and some none
    with mock.patch.object(gqa, "PROGRAMS", few), mock.patch.object(mla, "PROGRAMS", few):
        latent = {f"latent, {name}": latent_error(*case) for name, case in LATENT.items()}
        return {name: attend_error(*case) for name, case in ATTEND.items()} | latent


@triton.jit
def round_to_bf16(x):
    """`heads.to_bf16`, to the nearest in integers."""
    bits = x.to(tl.int32, bitcast=True)
    bits = bits + 0x7FFF + (bits >> 16 & 1)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


def without_assembly() -> None:
    """Replace what Triton's interpreter does not know in the kernels of attention."""
    heads.to_bf16 = round_to_bf16


def token_errors() -> dict[str, float]:
    without_assembly()
    found = {name: token_error(*case) for name, case in TOKEN.items()}
    found |= {name: layer_token_error(*case) for name, case in LAYERS.items()}
    return found | {"a gated output": gated_token_error()}


def begin_errors() -> dict[str, float]:
    """Return how many numbers of a step's begin differ, for rows of any length."""
    found = {}
    for B, Q, D, R in ((1, 1, 2880, 128), (3, 5, 96, 1536), (1, 64, 1024, 64)):
        embedding, table = torch.randn(50, D).bfloat16(), torch.randn(200, R)
        tokens, positions = torch.randint(-1, 50, (B, Q)), torch.randint(200, (B, Q))
        tokens[0, 0] = -1
        model = SimpleNamespace(embedding=SimpleNamespace(weight=embedding), rope_table=table)
        x, rope = begin_rows(model, tokens, positions)
        want = embedding[tokens.clamp(min=0)], table[positions].unsqueeze(2)
        found[f"{(B, Q, D, R)}"] = float((x != want[0]).sum() + (rope != want[1]).sum())
    return found


def few_token_errors() -> dict[str, float]:
    """`token_errors` of three forms: a norm, a window and sinks, a gate a head."""
    without_assembly()
    names = "some blocks, a norm", "a window, sinks, half turned, clipped"
    found, gated = {name: token_error(*TOKEN[name]) for name in names}, list(LAYERS)[2]
    return found | {gated: layer_token_error(*LAYERS[gated])}


def more_queries_errors() -> dict[str, float]:
    found = queries_errors(MORE_QUERIES) | {"a gated output": gated_token_error(5)}
    return found | {name: layer_token_error(*case, 3) for name, case in LAYERS.items()}


def queries_errors(cases: dict[str, tuple]) -> dict[str, float]:
    without_assembly()
    return {name: token_error(*case) for name, case in cases.items()}


def latent_token_errors() -> dict[str, float]:
    heads.to_bf16 = round_to_bf16
    return {
        f"{name}, {way}": latent_token_error(LATENT_TOKEN[name], *LATENT_WAYS[way])
        for name, way in itertools.product(LATENT_TOKEN, LATENT_WAYS)
    }


def latent_tokens_errors() -> dict[str, float]:
    """`latent_token_errors` of several tokens of each sequence."""
    heads.to_bf16 = round_to_bf16
    return {
        f"{name}, {way}": latent_token_error(case, *LATENT_WAYS[way], queries)
        for (name, (queries, case)), way in itertools.product(LATENT_TOKENS.items(), LATENT_WAYS)
    }


def few_latent_token_errors() -> dict[str, float]:
    """`latent_token_errors` of a batch of small heads, over one and several blocks."""
    heads.to_bf16 = round_to_bf16
    case = LATENT_TOKEN["two tiles of heads, a batch"]
    return {
        f"parts, at most: {most}": latent_token_error(case, most, Tile(64, 2)) for most in (2, 64)
    }


def fetch_results() -> dict:
    return {"right": [fetch_is_right(sizes) for sizes in BLOBS]}


def dot4_errors() -> dict[str, float]:
    replace_four_bits()
    found = {name: dot4_error(case, 1.0) for name, case in (DOT4 | FEW_DOT4).items()}
    found |= {
        f"x of {size}": dot4_error(DOT4["hqq4, experts, several tokens"], size)
        for size in (1e-6, 3e4)
    }
    return found | {
        str(value): dot4_is_no_number(value) for value in (math.inf, -math.inf, math.nan)
    }


def few_dot4_errors() -> dict[str, float]:
    """Return the errors of one small case of each format."""
    replace_four_bits()
    names = (
        *("int4, groups of 128", "hqq4, experts, several tokens", "mxfp4, dense, five chunks"),
        *("q8_0, dense", "q6_k, dense, five chunks", "q5_k, experts", "q4_k, dense, three blocks"),
        *("iq4_nl, dense", "nvfp4, dense, five chunks", "uint4, experts, several tokens"),
        "int4, dense, four tokens",
        *("hqq2, experts, several tokens", "hqq3, dense, three chunks"),
    )
    return {name: dot4_error((DOT4 | FEW_DOT4)[name], 1.0) for name in names}


def dot4_codes() -> dict[str, dict[str, int]]:
    return {name: dot4_code(case) for name, case in DOT4.items()}


def grouped_errors() -> dict[str, float]:
    cases = [*itertools.product(SHAPES, (torch.float32, torch.float16))]
    found = {
        f"{name}, {shape}, {dtype}": error(name, *SHAPES[shape], dtype, GROUPS[name])
        for name, (shape, dtype) in itertools.product(FORMATS, cases)
    }
    found |= {
        f"{name}, groups of {group}, float32": error(name, (3, 20), 40, 768, torch.float32, group)
        for name, groups in OTHER_GROUPS.items()
        for group in groups
    }
    return found | {
        f"plain, {shape}, {dtype}": plain_error(*SHAPES[shape], dtype) for shape, dtype in cases
    }


def grouped_diagonal_errors() -> dict[str, float]:
    """Return the errors of one shape and dtype for each format, and of plain weights."""
    cases = itertools.cycle(itertools.product((torch.float16, torch.float32), SHAPES))
    found = {
        f"{name}, {shape}, {dtype}": error(name, *SHAPES[shape], dtype, GROUPS[name])
        for name, (dtype, shape) in zip(FORMATS, cases, strict=False)
    }
    found |= {
        f"{name} with scales in {scale}, {dtype}": error(
            name, (3, 20), 40, 128, dtype, GROUPS[name], scale
        )
        for (name, scale), (dtype, _) in zip(OTHER_SCALES, cases, strict=False)
    }
    return found | {"plain, float32": plain_error((70, 0, 10), 40, 64, torch.float32)}


def grouped_diagonal_codes() -> dict[str, dict]:
    """Return the machine code's counts of one case for each format: few rows, or many.

    The results of half of the formats are activated.
    """
    shapes = (8, 1), (2, 300)
    activated = itertools.cycle(itertools.product((SWIGLU, None), shapes))
    cases = itertools.cycle(shapes)
    return {
        f"{name}, {experts} experts, {rows} rows": grouped_code(
            name, experts, rows, torch.bfloat16, activation=activation
        )
        for name, (activation, (experts, rows)) in zip(FORMATS, activated, strict=False)
    } | {
        f"{name} with scales in {scale}, {experts} experts, {rows} rows": grouped_code(
            name, experts, rows, torch.bfloat16, scale
        )
        for (name, scale), (experts, rows) in zip(OTHER_SCALES, cases, strict=False)
    }


def grouped_codes(
    cases: Iterable[tuple] = ((8, 1, torch.bfloat16), (2, 300, torch.bfloat16)),
) -> dict[str, dict]:
    return {
        f"{name}, {e} experts, {n} rows, {d}": grouped_code(name, e, n, d)
        for name in FORMATS
        for e, n, d in cases
    }


def other_codes() -> dict[str, dict]:
    tokens = [(8, 40), (8, 100), *itertools.product((1, 128), (1, 40))]
    plain = [(*case, torch.bfloat16) for case in tokens]
    return grouped_codes(
        [*plain, *itertools.product((8,), (1, 300), (torch.float16, torch.float32))]
    )


INTERPRETED = {
    "grouped": grouped_errors,
    "grouped, a shape a format": grouped_diagonal_errors,
    "dot4": dot4_errors,
    "dot4, few": few_dot4_errors,
    "words": different_words,
    "attend": attend_errors,
    "token": token_errors,
    "token, few": few_token_errors,
    "queries": partial(queries_errors, FEW_QUERIES),
    "begin": begin_errors,
    "rings": partial(queries_errors, RINGS),
    "rings, more": partial(queries_errors, MORE_RINGS),
    "queries, more": more_queries_errors,
    "latent token": latent_token_errors,
    "latent tokens": latent_tokens_errors,
    "latent token, few": few_latent_token_errors,
    "fixed": fixed_errors,
    "fetch": fetch_results,
    "rows": moved_rows,
}
COMPILED = {
    "grouped": grouped_codes,
    "grouped, a shape a format": grouped_diagonal_codes,
    "grouped, other shapes": other_codes,
    "dot4": dot4_codes,
    "attend": attend_code,
    "token": token_code,
    "queries": partial(queries_code, QUERIES_CODE),
    "queries, more": partial(queries_code, MORE_QUERIES_CODE),
    "latent": latent_code,
    "latent token": latent_token_code,
    "latent tokens": partial(latent_token_code, 8),
    "fixed": fixed_code,
    "fetch": fetch_code,
    "rows": moved_rows_code,
}


def main() -> int:
    torch.set_num_threads(1)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        interpreter.prepare()
    cases = INTERPRETED if interpreted else COMPILED
    print(json.dumps({name: cases[name]() for name in sys.argv[1:] or cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
