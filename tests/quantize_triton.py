"""What `kernels.grouped` computes and what it compiles to, seen without a GPU.

    TRITON_INTERPRET=1 python tests/quantize_triton.py run      every format under Triton's interpreter, on CPU tensors
    python tests/quantize_triton.py compile [all]               machine code for an H200, by Triton and ptxas alone

Each prints one JSON object: the relative error of every case, or the bytes of machine code. A process of its own,
because Triton reads its variables once, at import. No bf16 in the first: the interpreter multiplies the bits of such
numbers as if they were integers.
"""

import itertools
import json
import sys

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

import kernels
from quantize import FORMATS, grouped_packed, pack_weight

GROUPS = {"int8": 8, "fp8": 32, "int4": 16, "hqq4": 32, "hqq3": 32, "hqq2": 16}
SHAPES = {  # rows of each expert, out, in
    "experts without rows": ((3, 0, 20, 0, 14), 150, 96),
    "tiles of 64 rows": ((70, 0, 10), 40, 64),
    "one expert, one row": ((1,), 130, 160),
    "the last expert alone": ((0, 0, 0, 0, 0, 0, 17), 128, 224),
}


class OnCuda(Tensor):
    """A tensor that takes the operator's way for CUDA, and stays on the CPU."""

    is_cuda = True


def case(name: str, sizes: tuple[int, ...], out: int, width: int, dtype: torch.dtype) -> tuple:
    """x sorted by expert, group_ends, and the parts of random weights."""
    generator = torch.Generator().manual_seed(len(sizes))
    weight = torch.randn(len(sizes), out, width, generator=generator)
    parts = pack_weight(weight, {"format": name, "group_size": GROUPS[name]}, torch.device("cpu"))
    x = torch.randn(sum(sizes), width, generator=generator).to(dtype)
    return x, torch.tensor(sizes).cumsum(0).int(), parts


def error(name: str, sizes: tuple[int, ...], out: int, width: int, dtype: torch.dtype) -> float:
    """Of the kernel against unpack-then-matmul in fp64, relative."""
    x, ends, parts = case(name, sizes, out, width, dtype)
    operator = grouped_packed._init_fn  # the function behind the operator, without its dispatch by device
    got = operator(x.as_subclass(OnCuda), ends, list(parts.values()), name, GROUPS[name]).as_subclass(Tensor).double()
    weights = FORMATS[name].unpack(parts, GROUPS[name]).double()
    want = torch.cat([rows @ weight.T for rows, weight in zip(x.double().split(sizes), weights, strict=True)])
    return ((got - want).norm() / want.norm()).item()


class Launch:
    """In place of a kernel: notes what it is launched with."""

    def __getitem__(self, grid):
        return self.note

    def note(self, *tensors, num_warps: int, num_stages: int, **constants):
        self.tensors, self.constants = tensors, constants
        self.options = {"num_warps": num_warps, "num_stages": num_stages}


def machine_code(name: str, experts: int, rows: int, dtype: torch.dtype) -> int:
    """Bytes of the kernel's machine code for so many experts with so many rows each."""
    kernel, kernels._grouped = kernels._grouped, Launch()
    x, ends, parts = case(name, (rows,) * experts, 192, 256, dtype)
    kernels.grouped(x, ends, parts, FORMATS[name].kind, FORMATS[name].bits, GROUPS[name])
    launch, kernels._grouped = kernels._grouped, kernel
    types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32",
             torch.uint8: "*u8"}  # fmt: skip
    signature = {p: types[t.dtype] for p, t in zip(kernel.arg_names, launch.tensors, strict=False)}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    signature |= dict.fromkeys(launch.constants, "constexpr")
    source = ASTSource(
        kernel, signature, {(kernel.arg_names.index(n),): v for n, v in launch.constants.items()}, aligned
    )
    return len(compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options).asm["cubin"])


def main() -> int:
    torch.set_num_threads(1)
    if sys.argv[1] == "run":
        cases = itertools.product(FORMATS, SHAPES, (torch.float32, torch.float16))
        results = {f"{name}, {shape}, {dtype}": error(name, *SHAPES[shape], dtype) for name, shape, dtype in cases}
    else:
        cases = [(8, 1, torch.bfloat16)]
        if sys.argv[2:] == ["all"]:
            cases = [
                *itertools.product((1, 8, 128), (1, 40), (torch.bfloat16,)),
                (8, 1, torch.float16),
                (8, 1, torch.float32),
            ]
        results = {
            f"{name}, {e} experts, {n} rows, {d}": machine_code(name, e, n, d) for name in FORMATS for e, n, d in cases
        }
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
