"""Modules with packed weights, and the one table that decides which implementation multiplies.

`IMPLEMENTATIONS` lists, by format, device and product, what computes it. The first row that serves
a request wins. The last row of each product is plain PyTorch, which serves everything and is the
reference for the others.

The table is for eager steps, Inductor's steps and prompts. The fused kernels of a compiled step
read packed weights themselves (docs/design.md, "What runs when").
"""

from collections.abc import Callable, Collection
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from formats import FORMATS
from formats.base import Format, Parts
from model import ExpertLinear, Linear, swiglu
from ops.inductor import custom_op, materialize
from ops.launch import can_launch, try_kernels
from ops.products.gemv import dot4, dot4_supports
from ops.products.prompt import GROUPED, grouped_gemm, grouped_mm
from ops.products.prompt_rows import in_order
from ops.products.prompt_weights import multiply_unpacked, unpacks_first
from ops.products.weights import BITS, Weight, packed_weight

FEW = 16  # tokens that TOKEN takes of a dense weight in compiled code
UNPACKING = "unpacking"  # begins the names by which `try_kernels` knows uses of that kernel
# Products
TOKEN = "token"  # one token, or one (token, expert) pair, per weight matrix: a GEMV
GATED = "token, gated"  # the same with w13, and the activation of gate and up
ROWS = "rows"  # many rows, sorted by expert: a grouped GEMM


class Request(NamedTuple):
    """One product to be computed: all that the choice of an implementation depends on."""

    product: str
    format: Format
    x: Tensor  # [..., in]
    codes: Tensor  # int32 [..., out, W]
    group: int
    activation: Callable | None = None  # of GATED: (gate, up) -> h
    bias: Tensor | None = None  # of GATED: [E, out], added before the activation


class Implementation(NamedTuple):
    """One row of the table.

    run:
        TOKEN   (weight, x [..., in], expert_indices [T, A] or None) -> [..., out], fp32; without
                indices x.dtype is enough
        GATED   (weight, x [T, in], expert_indices [T, A], activation) -> [T, A, out / 2]
        ROWS    (x [N, in], group_ends int32 [E] or None, parts, format, group) -> [N, out]
    """

    name: str
    product: str
    device: str  # "cuda": NVIDIA GPUs that run our kernels; or "any"
    computes: str  # the exact result, with the activation and the bias that it supports
    run: Callable
    formats: Callable[[Format], bool] = lambda format: True
    supports: Callable[[Request], bool] = lambda request: True
    reorders_x: bool = False  # ROWS: it wants x in `Format.grouped_order`


def choose(request: Request) -> Implementation:
    """Return the first row of IMPLEMENTATIONS that serves the request.

    The choice depends on the format, on the device, dtype and shapes, and for GATED on activation
    and bias. It is made on the host when code is traced, so compiled code contains one
    implementation and no branch.
    """
    for row in IMPLEMENTATIONS:
        if row.product != request.product or not row.formats(request.format):
            continue
        if (row.device == "any" or can_launch(request.x)) and row.supports(request):
            return row
    raise LookupError(f"no implementation of {request.product} for {request.format.name}")


# Modules ------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """A weight [..., out, in] in a format: its parts are the module's parameters."""

    def __init__(
        self,
        module: Linear | ExpertLinear,
        format: str,
        group: int,
        scale: torch.dtype | None = None,
    ):
        """module: the one to replace; its bias is kept. scale: as in `Format.layout`.

        Raises ValueError for a misfit group.
        """
        super().__init__()
        weight = module.weight
        self.format, self.group, self.width = format, group, weight.shape[-1]
        FORMATS[format].choose_group(self.width, group)
        self.layout = FORMATS[format].layout(weight.shape, group, scale)
        for name, (shape, dtype) in self.layout.items():
            part = torch.empty(shape, dtype=dtype, device=weight.device)
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))
        self.bias = getattr(module, "bias", None)

    def parts(self, expert_indices: Tensor | None = None) -> Parts:
        """Return the parts, or those of the chosen experts: a gather, which the product fuses."""
        parts = {name: getattr(self, name) for name in self.layout}
        if expert_indices is None:
            return parts
        return {name: part[expert_indices] for name, part in parts.items()}

    def unpack(self) -> Tensor:
        """Dequantize: return the weight, fp32 [..., out, in]."""
        return FORMATS[self.format].unpack(self.parts(), self.group)

    def kernel_weight(self) -> Weight:
        """Return the weight, without the bias, for the kernels of ops/products/.

        Raises ValueError if that has no kernels for the format, or for groups that are too small.
        """
        format = FORMATS[self.format]
        if BITS.get(format.kind, 0) * format.codes_per_word != 32:
            raise ValueError(f"no kernel for {self.format}")
        return packed_weight(list(self.parts().values()), format.kind, self.group)

    def request(self, product: str, x: Tensor, activation: Callable | None = None) -> Request:
        format = FORMATS[self.format]
        return Request(product, format, x, self.codes, self.group, activation, self.bias)

    def dot(self, x: Tensor, expert_indices: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out], without the bias: fp32, or x.dtype without indices.

        expert_indices [T, A]: the expert of each pair, and x is [T, A or 1, in].
        """
        return choose(self.request(TOKEN, x)).run(self, x, expert_indices)

    def multiply_rows(self, x: Tensor, group_ends: Tensor | None) -> Tensor:
        """x [N, in], rows sorted by expert, group_ends int32 [E] -> [N, out], without the bias.

        None: the weight is [out, in], and x [..., in] -> [N, out].
        """
        if torch.compiler.is_compiling():  # else the check would import SymPy, which takes 0.3 s
            # Make `in` a constant where Dynamo takes all of a prompt's sizes for symbols: it would
            # be divided by for each element of x.
            torch._check(x.shape[-1] == self.width)
        # Reorder x here and not in the operator, so that Inductor fuses it with what computes x.
        if choose(self.request(ROWS, x)).reorders_x:
            if torch.compiler.is_compiling() or not can_launch(x, "_gather_rows"):
                x = FORMATS[self.format].grouped_order(x, self.group)
            else:
                x = in_order(x, self.column_order(x))
        return self.multiply_ordered(x.flatten(0, -2), group_ends)

    def unpacks(self, x: Tensor) -> bool:
        """Whether a dense weight is unpacked for rows x [N, in], which keep their order."""
        kind = FORMATS[self.format].kind
        if kind is None or x.element_size() != 2 or torch.compiler.is_compiling():
            return False
        if not unpacks_first(len(x), len(self.codes), self.width, kind):
            return False
        return can_launch(x, f"{UNPACKING} {self.format}")

    def column_order(self, like: Tensor) -> Tensor | None:
        """Return the order int32 [in] in which `multiply_ordered` reads its x; None: as it is."""
        if not choose(self.request(ROWS, like)).reorders_x:
            return None
        return column_order(self.format, self.group, self.width, like.device)

    def multiply_tokens(self, x: Tensor, group_ends: Tensor | None, **rows) -> Tensor:
        """x [T, in] in the order of `column_order` -> [N, out], by one kernel.

        group_ends None: the weight is [out, in].
        rows: named arguments of `grouped_gemm`, `pairs` among them. Raises KernelError where the
        kernel cannot run.
        """
        format, parts = FORMATS[self.format], self.parts()
        if group_ends is None:
            parts = {name: part.unsqueeze(0) for name, part in parts.items()}
        return grouped_gemm(x, group_ends, parts, format.kind, format.bits, self.group, **rows)

    def multiply_ordered(self, x: Tensor, group_ends: Tensor | None) -> Tensor:
        """`multiply_rows` of x in the order of `column_order`."""
        parts = list(self.parts().values())
        if group_ends is None:
            parts = [part.unsqueeze(0) for part in parts]
        return grouped_packed(x, group_ends, parts, self.format, self.group)


class PackedLinear(Packed):
    """`model.Linear` in a format."""

    def forward(self, x: Tensor) -> Tensor:
        if self.takes_few(x):
            y = self.dot(x).to(x.dtype)
        else:
            rows, use = x.flatten(0, -2), f"{UNPACKING} {self.format}"
            if self.unpacks(rows):
                y = try_kernels(use, self.unpack_first, self.multiply_all, rows)
            else:
                y = self.multiply_all(x)
            y = y.reshape(*x.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias

    def takes_few(self, x: Tensor) -> bool:
        """Whether x [..., in] is one token; of compiled code also a few, if a kernel takes them.

        Eager code with several tokens runs a prompt.
        """
        rows = x.numel() // x.shape[-1]
        if rows == 1 or not torch.compiler.is_compiling() or not can_launch(x, "_down_few"):
            return rows == 1
        return rows <= FEW and choose(self.request(TOKEN, x)).run is token_gemv

    def multiply_all(self, x: Tensor) -> Tensor:
        """x [..., in] -> [N, out], by the implementation for many rows."""
        return self.multiply_rows(x, None)

    def unpack_first(self, x: Tensor) -> Tensor:
        """`multiply_all` for rows that `unpacks` takes. Raises KernelError if it cannot run."""
        own = FORMATS[self.format]
        return multiply_unpacked(x, self.parts(), own.kind, own.bits, self.group, own_order=True)


class PackedExpertLinear(Packed):
    """`model.ExpertLinear` in a format, with the bias [E, out] that a subclass of it may have."""

    def gather(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        """x [T, A, in], expert_indices [T, A] -> fp32 [T, A, out]."""
        return add_bias(self.dot(x, expert_indices), self.bias, expert_indices)

    def gather_gated(self, x: Tensor, expert_indices: Tensor, activation: Callable) -> Tensor:
        """x [T, in], expert_indices [T, A] -> activation(gate, up) [T, A, out / 2]."""
        return choose(self.request(GATED, x, activation)).run(self, x, expert_indices, activation)

    def grouped(self, x: Tensor, group_ends: Tensor) -> Tensor:
        """x [N, in] sorted by expert, rows of e before group_ends[e] (int32 [E]) -> [N, out]."""
        y = self.multiply_rows(x, group_ends)
        if self.bias is None:
            return y
        rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        return add_bias(y, self.bias, torch.searchsorted(group_ends, rows, right=True))

    def activate(
        self, gate: Tensor, up: Tensor, expert_indices: Tensor, activation: Callable
    ) -> Tensor:
        """gate, up [T, A, out / 2] -> activation of both with their bias."""
        if self.bias is None:
            return activation(gate, up)
        gate_bias, up_bias = self.bias.chunk(2, dim=-1)
        gate = add_bias(gate, gate_bias, expert_indices)
        return activation(gate, add_bias(up, up_bias, expert_indices))


@cache
def column_order(format: str, group: int, width: int, device: torch.device) -> Tensor:
    """Return `Format.grouped_order` of the numbers 0 to width - 1, int32 [width]."""
    columns = torch.arange(width, dtype=torch.int32, device=device)
    return FORMATS[format].grouped_order(columns, group)


def stays_in_host_memory(model: nn.Module, path: str) -> bool:
    """Whether a module's parameters are read from host memory: `host_modules` of the model."""
    return path.endswith(getattr(model, "host_modules", ()))


def modules_in_host_memory(model: nn.Module) -> list[nn.Module]:
    return [m for path, m in model.named_modules() if stays_in_host_memory(model, path)]


def host_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of the weights that stay in host memory, as `weight_bytes` counts."""
    return sum(weight_bytes(m, dtype) for m in modules_in_host_memory(model))


def weight_bytes(model: nn.Module, dtype: torch.dtype, without: Collection[int] = ()) -> int:
    """Return the bytes of the weights, of those that are not packed in `dtype`.

    without: the ids of parameters that do not count, beside those that stay in host memory.
    """
    away = {id(p) for m in modules_in_host_memory(model) for p in m.parameters()}
    packed = {
        id(part) for m in model.modules() if isinstance(m, Packed) for part in m.parts().values()
    }
    return sum(
        p.nbytes if id(p) in packed else p.numel() * dtype.itemsize
        for p in model.parameters()
        if id(p) not in without and id(p) not in away
    )


def add_bias(y: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    """y [..., out] + bias [E, out] of experts [...]. Index E, an expert elsewhere, gets any."""
    return y if bias is None else y + bias[experts.clamp(max=len(bias) - 1)]


@custom_op("moe_fast::grouped_packed")
def grouped_packed(
    x: Tensor, group_ends: Tensor | None, parts: list[Tensor], format: str, group: int
) -> Tensor:
    """x [N, in], group_ends int32 [E], parts of [E, out, in] in the layout's order -> [N, out].

    Without group_ends E is 1.
    x is in the order that the chosen implementation wants (`Implementation.reorders_x`).
    """
    spec = FORMATS[format]
    layout = spec.layout((*parts[0].shape[:2], x.shape[-1]), group)
    named = dict(zip(layout, parts, strict=True))
    run = choose(Request(ROWS, spec, x, named["codes"], group)).run
    return run(x, group_ends, named, spec, group)


@grouped_packed.register_fake
def _(x: Tensor, group_ends: Tensor | None, parts: list[Tensor], format: str, group: int) -> Tensor:
    return x.new_empty(x.shape[0], parts[0].shape[1])


# Implementations ----------------------------------------------------------------------------------


def token_plain(weight: Packed, x: Tensor, expert_indices: Tensor | None) -> Tensor:
    format = FORMATS[weight.format]
    # Materialize, or Inductor recomputes the scaling in each row of the product that reads this.
    return materialize(format.dot(x, weight.parts(expert_indices), weight.group))


def token_gemv(weight: Packed, x: Tensor, expert_indices: Tensor | None) -> Tensor:
    pairs = x.shape[:-1] if expert_indices is None else expert_indices.shape
    return launch_gemv(weight, x, expert_indices, fuse_swiglu=False).view(*pairs, -1)


def gated_gemv(
    weight: PackedExpertLinear, x: Tensor, expert_indices: Tensor, activation: Callable
) -> Tensor:
    return launch_gemv(weight, x, expert_indices, fuse_swiglu=True).view(*expert_indices.shape, -1)


def launch_gemv(
    weight: Packed, x: Tensor, expert_indices: Tensor | None, fuse_swiglu: bool
) -> Tensor:
    parts = list(weight.parts().values())
    pairs, dtype = None, x.dtype
    if expert_indices is not None:
        pairs, dtype = expert_indices.flatten(), x.dtype if fuse_swiglu else torch.float32
    kind = FORMATS[weight.format].kind
    # Experts without a gate expand x over the pairs: its rows are then one row in memory.
    rows = materialize(x).flatten(0, -2).contiguous()
    return dot4(rows, parts, pairs, kind, weight.group, fuse_swiglu, dtype)


def gated_stacked(
    weight: PackedExpertLinear, x: Tensor, expert_indices: Tensor, activation: Callable
) -> Tensor:
    """One product of gate and up, then the activation in the next kernel."""
    both = weight.dot(x.unsqueeze(1), expert_indices)
    gate, up = both.chunk(2, dim=-1)
    return weight.activate(gate, up, expert_indices, activation).to(x.dtype)


def gated_split(
    weight: PackedExpertLinear, x: Tensor, expert_indices: Tensor, activation: Callable
) -> Tensor:
    """Two products with the activation in their epilogue, as `ExpertLinear.gather_gated` has it."""
    halves = [{}, {}]
    for name, part in weight.parts(expert_indices).items():
        halves[0][name], halves[1][name] = part.chunk(2, dim=2)
    x, dot = x.unsqueeze(1), FORMATS[weight.format].dot
    gate, up = (dot(x, half, weight.group) for half in halves)
    return weight.activate(gate, up, expert_indices, activation).to(x.dtype)


def rows_kernel(
    x: Tensor, group_ends: Tensor | None, parts: Parts, format: Format, group: int
) -> Tensor:
    """x is in the format's grouped order."""
    use = f"{GROUPED} of {format.name}"
    return try_kernels(use, rows_grouped, rows_reordered, x, group_ends, parts, format, group)


def rows_grouped(
    x: Tensor, group_ends: Tensor | None, parts: Parts, format: Format, group: int
) -> Tensor:
    """`multiply_rows` by a kernel. A dense weight may be unpacked instead."""
    weight = parts, format.kind, format.bits, group
    kernel = partial(grouped_gemm, x, group_ends, *weight)
    is_dense = group_ends is None and x.element_size() == 2
    if not is_dense or not unpacks_first(len(x), parts["codes"].shape[1], x.shape[1], format.kind):
        return kernel()
    return try_kernels(f"{UNPACKING} {format.name}", partial(multiply_unpacked, x, *weight), kernel)


def rows_reordered(
    x: Tensor, group_ends: Tensor | None, parts: Parts, format: Format, group: int
) -> Tensor:
    """`rows_by_expert` for x in the format's grouped order."""
    order = format.grouped_order(torch.arange(x.shape[1], device=x.device), group)
    return rows_by_expert(x[:, order.argsort()], group_ends, parts, format, group)


def rows_unpacked(
    x: Tensor, group_ends: Tensor | None, parts: Parts, format: Format, group: int
) -> Tensor:
    """Unpack all experts, in x's dtype: for a moment that takes the memory that packing saved.

    The host does not wait for the GPU, so this can be captured.
    """
    each = range(parts["codes"].shape[0])
    weight = torch.stack([unpack_expert(parts, e, format, group).to(x.dtype) for e in each])
    return F.linear(x, weight[0]) if group_ends is None else grouped_mm(x, weight, group_ends)


def rows_by_expert(
    x: Tensor, group_ends: Tensor | None, parts: Parts, format: Format, group: int
) -> Tensor:
    """Unpack one expert at a time, of those that have rows."""
    y, start = x.new_empty(x.shape[0], parts["codes"].shape[1]), 0
    ends = [len(x)] if group_ends is None else group_ends.tolist()
    for expert, end in enumerate(ends):
        if end > start:
            weight = unpack_expert(parts, expert, format, group).to(x.dtype)
            y[start:end] = F.linear(x[start:end], weight)
        start = end
    return y


def unpack_expert(parts: Parts, expert: int, format: Format, group: int) -> Tensor:
    return format.unpack({name: part[expert] for name, part in parts.items()}, group)


# The table ----------------------------------------------------------------------------------------


def has_gemv(format: Format) -> bool:
    return format.has_gemv


def gemv_fits(request: Request) -> bool:
    return dot4_supports(request.x, request.codes, request.format.kind, request.group)


def fuses_swiglu(request: Request) -> bool:
    """Whether the requested activation is the one that the kernel fuses, and it fits."""
    is_swiglu = request.activation is swiglu and request.bias is None
    return is_swiglu and gemv_fits(request)


IMPLEMENTATIONS = (
    # For 4 bits Inductor's best was slower than the kernel by half.
    Implementation(
        "ops.products.gemv",
        TOKEN,
        "cuda",
        formats=has_gemv,
        computes="weight @ x",
        run=token_gemv,
        supports=gemv_fits,
    ),
    Implementation("Format.dot", TOKEN, "any", computes="weight @ x", run=token_plain),
    Implementation(
        "ops.products.gemv with SwiGLU",
        GATED,
        "cuda",
        formats=has_gemv,
        computes="model.swiglu(gate, up), no bias, no other activation",
        run=gated_gemv,
        supports=fuses_swiglu,
    ),
    Implementation(
        "ops.products.gemv, then the activation",
        GATED,
        "cuda",
        formats=has_gemv,
        computes="activation(gate + bias, up + bias), any",
        run=gated_stacked,
        supports=gemv_fits,
    ),
    # Integer products take a kernel that prepares x: one product is better than two.
    Implementation(
        "Format.dot by integers, then the activation",
        GATED,
        "cuda",
        computes="activation(gate + bias, up + bias), any",
        run=gated_stacked,
        supports=lambda request: request.format.uses_integer_products(request.x, request.codes),
    ),
    Implementation(
        "Format.dot of gate and of up",
        GATED,
        "any",
        computes="activation(gate + bias, up + bias), any",
        run=gated_split,
    ),
    Implementation(
        "ops.products.prompt",
        ROWS,
        "cuda",
        formats=lambda format: format.kind is not None,
        computes="weight[expert of the row] @ x",
        run=rows_kernel,
        reorders_x=True,
    ),
    Implementation(
        "unpack all experts, then ops.products.prompt.grouped_mm",
        ROWS,
        "cuda",
        computes="weight[expert of the row] @ x",
        run=rows_unpacked,
    ),
    Implementation(
        "unpack expert by expert, then F.linear",
        ROWS,
        "any",
        computes="weight[expert of the row] @ x",
        run=rows_by_expert,
    ),
)
