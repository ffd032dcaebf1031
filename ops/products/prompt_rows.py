"""What lies between the products of a prompt's experts: rows in, activation, weighted sum out.

PyTorch alone takes a dozen passes over the rows of all pairs, which together take longer than the
products (docs/log/prompts.md).

Letters: T tokens, A experts of a token, N = T * A pairs, sorted by expert; D numbers of a token, I
of an expert. `columns`, int32, is the order in which the next product reads x
(`Packed.column_order`); None: as it is.
"""

from dataclasses import dataclass

from torch import Tensor

from ops.declared import Activation
from ops.launch import check_shapes, jit, launch, tl, triton
from ops.products.codes import activate

KERNELS = "_gather_rows", "_activate_rows", "_combine_rows"


@dataclass(frozen=True)
class RowSettings:
    """What the kernels are compiled for."""

    width: int  # numbers of a result's row
    active: int = 1  # A
    activation: Activation | None = None

    @property
    def block(self) -> int:
        """Numbers of a program."""
        return min(1024, triton.next_power_of_2(self.width))


# Kernels ------------------------------------------------------------------------------------------


# Grid [N, blocks]: a program copies a part of one row.
@jit
def _gather_rows(x, rows, columns, y, s: tl.constexpr):
    WIDTH: tl.constexpr = s.width
    BLOCK: tl.constexpr = s.block
    n, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    row = n.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + n).to(tl.int64) // s.active
    at = column
    if columns is not None:
        at = tl.load(columns + column, mask=inside, other=0)
    value = tl.load(x + row * WIDTH + at, mask=inside)
    tl.store(y + n.to(tl.int64) * WIDTH + column, value, mask=inside)


# Grid [N, blocks]: a program activates a part of one row.
@jit
def _activate_rows(both, bias, experts, columns, y, s: tl.constexpr):
    WIDTH: tl.constexpr = s.width
    BLOCK: tl.constexpr = s.block
    n, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = column
    if columns is not None:
        at = tl.load(columns + column, mask=inside, other=0)
    GATED: tl.constexpr = s.activation.gated
    ROW: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    row = both + n.to(tl.int64) * ROW
    gate = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(row + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        own = bias + tl.load(experts + n) * ROW
        gate += tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(own + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = s.activation.kind
    h = activate(gate, up, kind, s.activation.limit, s.activation.alpha)
    tl.store(y + n.to(tl.int64) * WIDTH + column, h.to(y.dtype.element_ty), mask=inside)


# Grid [T, blocks]: a program sums a part of one token.
@jit
def _combine_rows(parts, places, experts, weights, bias, y, s: tl.constexpr):
    WIDTH: tl.constexpr = s.width
    BLOCK: tl.constexpr = s.block
    A: tl.constexpr = s.active
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(A):
        pair = token * A + a
        row = parts + tl.load(places + pair) * WIDTH
        part = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            own = bias + tl.load(experts + pair) * WIDTH
            part += tl.load(own + column, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(y + token.to(tl.int64) * WIDTH + column, total.to(y.dtype.element_ty), mask=inside)


# Launching ----------------------------------------------------------------------------------------


def gather_rows(x: Tensor, pairs: Tensor | None, active: int, columns: Tensor | None) -> Tensor:
    """x [T, D], pairs int64 [N], `active` of each token -> the token of each pair [N, D].

    pairs None: all tokens, once.
    """
    count, width = len(x) if pairs is None else len(pairs), x.shape[1]
    y = x.new_empty(count, width)
    s = RowSettings(width, active)
    grid = count, triton.cdiv(width, s.block)
    launch(_gather_rows, grid, x.contiguous(), pairs, columns, y, settings=s)
    return y


def activate_rows(
    both: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    experts: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """both [N, 2 I], gate, then up -> the activation of both [N, I].

    An activation without a gate takes up alone, [N, I]. bias, as wide as `both`, is that of each
    row's expert, int64 [N].
    """
    (N, total), gated = both.shape, activation.gated
    width = total // 2 if gated else total
    if bias is not None:
        check_shapes(bias=(bias, (len(bias), total)), experts=(experts, (N,)))
    y = both.new_empty(N, width)
    s = RowSettings(width, activation=activation)
    grid = N, triton.cdiv(width, s.block)
    launch(_activate_rows, grid, both, bias, experts, columns, y, settings=s)
    return y


def combine_rows(
    parts: Tensor,
    places: Tensor,
    experts: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """parts [N, D], sorted; places int64 [N]: the row of each pair -> weighted sums [T, D].

    experts int64 and weights fp32 [T, A]; bias [E, D] is that of each pair's expert. The reference
    is `Experts.combine`.
    """
    (T, A), width = weights.shape, parts.shape[1]
    check_shapes(places=(places, (T * A,)), experts=(experts, (T, A)))
    y = parts.new_empty(T, width)
    s = RowSettings(width, A)
    tensors = parts, places, experts.contiguous(), weights.contiguous(), bias, y
    launch(_combine_rows, (T, triton.cdiv(width, s.block)), *tensors, settings=s)
    return y
