"""Speed of a prompt's experts: pairs by expert, w13 with its activation, and w2.

    python benchmarks/grouped.py --tokens 512 2048
    python benchmarks/grouped.py --tokens 256 --dense 5120x2048 2048x4096

Times one layer for a number of tokens with random experts, and checks results. PyTorch's forms
stand beside the kernels: sorted pairs, and for plain weights gather, grouped_mm and activation.
--dense times dense weights instead, of which L2 holds none: by the kernel, with its x in order;
unpacked, then by the library; and the library alone.
Other tiles than the kernel's own: `--rows 64 128` and so on time every combination, best first.
They are compiled side by side.
TFLOP/s count the multiplications and additions of the products alone.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cuda_timing import graph_seconds, require_gpu
from benchmarks.one_layer import random_experts
from cli.parser import Parser
from formats import FORMATS, PLAIN
from formats.packed import Packed, column_order
from formats.quantizer import pack_weight
from model import ExpertLinear, Experts, ModelArgs, group_by_expert
from models.random_weights import architecture
from ops.compile_ahead import collect
from ops.declared import RELU_SQUARED, SWIGLU, Activation
from ops.gpu import gpu_of
from ops.products.prompt import choose_prompt_tile, grouped_gemm
from ops.products.prompt_rows import activate_rows, gather_rows, group_pairs
from ops.products.prompt_weights import PromptTile, multiply_unpacked, prompt_operands
from runtime.compile_ahead import compile_ahead

TILE = tuple(field.name for field in fields(PromptTile))
REPEATS = 5
DENSE_BYTES = 256 << 20  # of copies of a dense weight in 16 bits: five times what L2 holds


class Result(NamedTuple):
    """Time of one product in one form."""

    seconds: float
    tflop_s: float
    gb_s: float  # weights read
    error: float  # relative, of the norm
    product: str  # mode and name
    form: str

    def __str__(self) -> str:
        return (
            f"{self.product} {self.seconds * 1e3:8.3f} ms {self.tflop_s:5.0f} TFLOP/s "
            f"{self.gb_s:5.0f} GB/s  error {self.error:.1e}  {self.form}"
        )


@dataclass(frozen=True)
class Product:
    """A product of a layer's experts, with the operands of a prompt."""

    name: str
    weight: ExpertLinear | Packed
    x: Tensor  # [T, in], or rows [N, in] without pairs
    group_ends: Tensor  # int32 [E]
    pairs: Tensor | None = None  # [N]
    active: int = 1
    activation: Activation | None = None
    columns: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.x if self.pairs is None else self.pairs)

    def by_library(self, weight: Tensor) -> Tensor:
        """Multiply by a plain weight [E, out, in], with kernels around the product."""
        x = self.x
        if self.pairs is not None:
            x = gather_rows(x, self.pairs, self.active, None)
        y = F.grouped_mm(x, weight.transpose(-2, -1), offs=self.group_ends)
        if self.activation is None:
            return y
        return activate_rows(y, self.activation, columns=self.columns)

    def forms(self, changes: Sequence[dict]) -> dict[str, Callable]:
        """Return how the kernel may compute it, by tile."""
        weight, x = self.weight, self.x
        if isinstance(weight, ExpertLinear):
            given = {"codes": weight.weight}, "plain", 16, 1
        else:
            format = FORMATS[weight.format]
            x = format.grouped_order(x, weight.group)
            given = weight.parts(), format.kind, format.bits, weight.group
        parts, kind, bits, group = given
        _, bits, group = prompt_operands(parts, kind, bits, group)
        own = choose_prompt_tile(self.rows, len(self.group_ends), bits, x.shape[1], kind, group)
        options = dict(pairs=self.pairs, active=self.active)
        options |= dict(activation=self.activation, columns=self.columns)
        product = partial(grouped_gemm, x, self.group_ends, *given, **options)
        tiles = [replace(own, **change) for change in changes]
        return {str(tile): partial(product, tile=tile) for tile in tiles}


def time_call(call: Callable[[], object]) -> float:
    return graph_seconds(lambda _: call(), [None] * 4, REPEATS)


def measure_product(product: Product, changes: Sequence[dict]) -> list[Result]:
    """Return a result of each form, the fastest first."""
    weight, N = product.weight, product.rows
    plain = weight.unpack().bfloat16() if isinstance(weight, Packed) else weight.weight
    E, out, width = plain.shape
    expected = product.by_library(plain).float()
    nbytes = sum(part.nbytes for part in weight.parameters()) * min(N, E) / E
    found, forms = [], product.forms(changes)
    if not isinstance(weight, Packed):
        forms["library"] = partial(product.by_library, weight.weight)
    for form, call in forms.items():
        try:
            error = ((call().float() - expected).norm() / expected.norm()).item()
            time = time_call(call)
        except Exception as problem:  # too little shared memory, or too few registers
            print(f"{product.name} {form}: {str(problem).splitlines()[0]:.80}", flush=True)
            continue
        rates = 2 * N * out * width / time / 1e12, nbytes / time / 1e9
        found.append(Result(time, *rates, error, product.name, form))
    return sorted(found, key=lambda result: result.seconds)


def dense_forms(
    mode: str, shape: tuple[int, int], tokens: int, changes: Sequence[dict]
) -> dict[str, Callable[[int], Tensor]]:
    """Return how a dense weight [out, in] may be multiplied: functions of a copy's number."""
    (out, width), device = shape, torch.device("cuda")
    format, group = FORMATS[mode], FORMATS[mode].default_group(width)
    plain = torch.randn(1, out, width, device=device) / width**0.5
    one = pack_weight(plain, {"format": mode, "group_size": group}, device, iterations=0)
    plain = format.unpack(one, group)[0].bfloat16()
    copies = -(-DENSE_BYTES // plain.nbytes)
    parts = [{name: part.clone() for name, part in one.items()} for _ in range(copies)]
    weights = [plain.clone() for _ in range(copies)]
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    columns = column_order(mode, group, width, device)
    given, ordered = (format.kind, format.bits, group), gather_rows(x, None, 1, columns)
    own = choose_prompt_tile(tokens, 1, format.bits, width, format.kind, group)
    forms = {
        "unpacked": lambda n: multiply_unpacked(x, parts[n], *given, own_order=True),
        "library, 16 bits": lambda n: F.linear(x, weights[n]),
        "x in order": lambda n: gather_rows(x, None, 1, columns),
    }
    for change in changes:
        tile = replace(own, **change)
        forms[str(tile)] = lambda n, tile=tile: grouped_gemm(
            ordered, None, parts[n], *given, tile=tile
        )
    return forms


def print_dense(
    mode: str, shape: tuple[int, int], tokens: int, forms: dict[str, Callable], best: int
) -> None:
    """Print the times of the forms, the fastest first, and whether their results are alike."""
    want, found = forms["library, 16 bits"](0).float(), []
    copies = range(-(-DENSE_BYTES // (2 * shape[0] * shape[1])))
    for name, form in forms.items():
        try:
            got = form(0).float()
            error = (
                (got - want).norm() / want.norm() if got.shape == want.shape else got.new_zeros(1)
            )
            found.append((graph_seconds(form, copies, REPEATS), error.item(), name))
        except Exception as problem:  # too little shared memory, or too few registers
            print(f"{name}: {str(problem).splitlines()[0]:.80}", flush=True)
    for seconds, error, name in sorted(found)[: best + 3]:
        flops = 2 * tokens * shape[0] * shape[1] / seconds / 1e12
        print(
            f"{tokens:6} tokens {mode:5} {shape[0]}x{shape[1]} {seconds * 1e6:8.2f} us "
            f"{flops:5.0f} TFLOP/s  error {error:.1e}  {name}",
            flush=True,
        )


def print_grouping(indices: Tensor, n_expert: int) -> None:
    """Time the pairs' order by expert, experts int64 [T, A]."""
    forms = {"kernels": group_pairs, "PyTorch": group_by_expert}
    calls = {name: partial(form, indices, n_expert) for name, form in forms.items()}
    got, want = (call() for call in calls.values())
    same = all(map(torch.equal, got, (t.int() for t in want)))
    times = ", ".join(f"{name} {time_call(call) * 1e6:.1f} us" for name, call in calls.items())
    print(f"{len(indices):6} tokens, pairs by expert: {times}{'' if same else ': DIFFERENT'}")


def products_of(experts: Experts, mode: str, indices: Tensor) -> list[Product]:
    """Return w13 and w2 for experts int64 [T, A]."""
    (T, A), E, (w13, w2) = indices.shape, experts.n_expert, (experts.w13, experts.w2)
    order, _, group_ends = group_pairs(indices, E)
    packed = isinstance(w13, Packed)
    out = (w13.parts()["codes"] if packed else w13.weight).shape[1]
    dim, width = (w.width if packed else w.weight.shape[-1] for w in (w13, w2))
    activation = SWIGLU if out == 2 * width else RELU_SQUARED
    x = torch.randn(T, dim, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(T * A, width, device="cuda", dtype=torch.bfloat16)
    columns = w2.column_order(hidden) if packed else None
    return [
        Product(f"{mode:5} w13", w13, x, group_ends, order, A, activation, columns),
        Product(f"{mode:5} w2 ", w2, hidden, group_ends),
    ]


def measure(
    args: ModelArgs, mode: str, options: argparse.Namespace, changes: Sequence[dict]
) -> None:
    """Print the results of a mode."""
    gpu = gpu_of(torch.device("cuda"))
    if options.dense:
        cases = [(mode, shape, N) for shape in options.dense for N in options.tokens]
        forms = [dense_forms(*case, changes) for case in cases]
        calls = [form for case in forms for form in case.values()]
        compile_ahead(collect(lambda: [call(0) for call in calls]), gpu)
        for case, own in zip(cases, forms, strict=True):
            print_dense(*case, own, options.best)
        return
    experts, found = random_experts(args, mode), []
    for tokens in options.tokens:
        indices = torch.rand(tokens, args.n_expert, device="cuda").topk(args.n_active).indices
        found.append((tokens, indices, products_of(experts, mode, indices)))
    calls = [call for *_, both in found for p in both for call in p.forms(changes).values()]
    compile_ahead(collect(lambda: [call() for call in calls]), gpu)
    for tokens, indices, products in found:
        print_grouping(indices, args.n_expert)
        for product in products:
            for result in measure_product(product, changes)[: options.best]:
                print(f"{tokens:6} tokens {result}", flush=True)


def read_shape(text: str) -> tuple[int, int]:
    out, width = map(int, text.split("x"))
    return out, width


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/grouped.py --tokens 512 2048",
            "python benchmarks/grouped.py --mode int8 --rows 64 128 --stages 3 4 --best 3",
        ),
    )
    add = parser.add_argument
    add("--arch", default="Mixtral-8x7B")
    add("--tokens", type=int, nargs="+", default=[512, 2048])
    add("--mode", action="append", choices=(PLAIN, *FORMATS), help="repeatable; default: all")
    add("--dense", type=read_shape, nargs="+", metavar="OUTxIN", help="dense weights instead")
    add("--best", type=int, default=2, metavar="N", help="print the best N of each")
    for name in TILE:
        add(f"--{name}", type=int, nargs="+", help="see ops.products.prompt_weights.PromptTile")
    return parser


@torch.no_grad()
def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    given = {name: getattr(options, name) for name in TILE if getattr(options, name)}
    changes = [
        dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())
    ]
    args = architecture(options.arch)
    print(f"{options.arch}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for mode in options.mode or (PLAIN, *FORMATS):
        measure(args, mode, options, changes)


if __name__ == "__main__":
    main()
