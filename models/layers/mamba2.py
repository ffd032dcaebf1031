"""Mamba-2: a layer whose memory is a matrix a head (Dao & Gu 2024), with a gated norm of groups.

Formulas: ops/plain/mamba2.py. Letters: H heads of P numbers, G groups of heads that share B and C.
A state's row has N numbers. The convolution has C = H P + 2 G N channels (x, then B and C) and the
width W.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model import Context, Linear, new_parameter
from models.layers.pending_state import (
    Convolution,
    PendingState,
    RecurrentInputs,
    RecurrentLayer,
)
from models.tensors import Recipe, Recipes, conv_recipe, copy_of
from ops.attention.delta_prompt import state_space_chunk
from ops.attention.mamba import (
    MambaWeights,
    kernels_support,
    mamba_tokens,
    settle,
    take_in_pending,
)
from ops.attention.recurrent_parts import gated_group_norm
from ops.plain.gated_delta import masked_gates_in_torch
from ops.plain.mamba2 import group_norm, ssm_step
from ops.plain.pending import in_place


class MambaSizes(NamedTuple):
    """Heads and sizes of a Mamba-2 layer."""

    heads: int  # H
    head_dim: int  # P
    groups: int  # G
    state: int  # N
    width: int  # W

    @property
    def gates(self) -> int:
        return self.heads

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    def parts(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """y [..., C] -> x [..., H, P], B and C [..., G, N]."""
        H, P, G, N, _ = self
        x, b, c = y.split((H * P, G * N, G * N), dim=-1)
        return x.unflatten(-1, (H, P)), b.unflatten(-1, (G, N)), c.unflatten(-1, (G, N))


class MambaState(PendingState):
    """What a layer remembers: a matrix [P, N] of each head. Its gates are dt."""

    take_in = staticmethod(take_in_pending)

    def __init__(self, batch: int, sizes: MambaSizes, like: Tensor):
        H, P, G, N, _ = sizes
        super().__init__(batch, sizes, like, (H, P, N), G)

    def advance(
        self, x: Tensor, dt: Tensor, weights: MambaWeights, last: Tensor | None, *memory
    ) -> Tensor:
        tokens, rule = self.sizes.parts(x), (dt, weights.a_log, weights.dt_bias)
        if x.shape[1] > 1:
            return state_space_chunk(*tokens, *rule, weights.skip, last, *memory).flatten(2)
        g, steps = masked_gates_in_torch(*rule, last)
        step = [t.squeeze(1) for t in (*tokens, steps, g)]
        return in_place(ssm_step)(*step, weights.skip, *memory).flatten(1).unsqueeze(1)


class GatedGroupNorm(nn.Module):
    """RMS norm of y * silu(gate) over each of some groups of numbers."""

    def __init__(self, dim: int, groups: int, eps: float):
        super().__init__()
        self.weight = new_parameter(dim)
        self.groups, self.eps = groups, eps

    def forward(self, y: Tensor, gate: Tensor | None) -> Tensor:
        """gate None: y is gated."""
        if gate is None:
            return group_norm(y, self.weight, self.groups, self.eps)
        return gated_group_norm(y, gate, self.weight, self.groups, self.eps)


class Mamba2(RecurrentLayer):
    """[B, Q, D] -> same, in place of an attention layer. args have `mamba_sizes`."""

    fp32 = "a_log", "dt_bias", "skip"  # parameters that a change of dtype leaves alone
    projections = ("wzx", "wdt"), "wout"  # inputs and output; `core` is between them
    state_class = MambaState
    settle = staticmethod(settle)

    def __init__(self, args):
        super().__init__()
        sizes = self.sizes = args.mamba_sizes
        H = self.narrow = sizes.heads
        self.wzx = Linear(args.dim, sizes.inner + sizes.channels)  # the gate, then x, B and C
        self.wdt = Linear(args.dim, H)
        self.conv = Convolution(sizes.channels, sizes.width, bias=True)
        self.a_log, self.dt_bias, self.skip = (new_parameter(H) for _ in range(3))
        self.norm = GatedGroupNorm(sizes.inner, sizes.groups, args.norm_eps)
        self.wout = Linear(sizes.inner, args.dim)

    def has_kernels(self) -> bool:
        """A norm over several ranks has no kernel."""
        return type(self.norm) is GatedGroupNorm and kernels_support(self.state.state)

    @property
    def output_norm(self) -> GatedGroupNorm:
        """What `mix_few` leaves to the last product."""
        return self.norm

    def mix_few(self, zx: Tensor, dt: Tensor, context: Context) -> Tensor:
        """`mix` by a kernel, gated but not normed."""
        memory, weights = self.state, [*self.weights()]
        place = context.positions, context.last, memory.arrivals
        tokens = zx, dt, memory.state, memory.pending(), weights
        return mamba_tokens(*tokens, *place)

    def mix(self, zx: Tensor, dt: Tensor, context: Context) -> Tensor:
        """zx [B, Q, H P + C], dt [B, Q, H] -> [B, Q, H P]: all between the projections."""
        if self.mixes_by_kernels(zx, context):
            return self.norm(self.mix_few(zx, dt, context), None)
        gate, x = zx.split((self.sizes.inner, self.sizes.channels), dim=-1)
        y = self.state.append(RecurrentInputs(x, dt, self.weights()), context)
        return self.norm(y, gate)

    def weights(self) -> MambaWeights:
        conv = self.conv
        return MambaWeights(conv.weight, conv.bias, self.a_log, self.dt_bias, self.skip)


def mamba_recipes(sizes: MambaSizes, dim: int, theirs: str) -> Recipes:
    """A layer's Mamba-2. theirs: the prefix of its published tensors, without the layer's.

    The published projection has the gate, x, B and C, then dt.
    """
    H, C, inner = sizes.heads, sizes.channels, sizes.inner
    wide = inner + C

    def numbers(name: str, *shape: int, **options) -> Recipe:
        return copy_of(theirs + name, *shape, **options)

    def rows(part: slice) -> Recipe:
        return numbers("in_proj.weight", wide + H, dim, transform=lambda t: t[part])

    return {
        "attention.wzx.weight": rows(slice(0, wide)),
        "attention.wdt.weight": rows(slice(wide, None)),
        "attention.conv.weight": conv_recipe(theirs + "conv1d.weight", C, sizes.width),
        "attention.conv.bias": numbers("conv1d.bias", C),
        "attention.a_log": numbers("A_log", H, dtype=torch.float32),
        "attention.dt_bias": numbers("dt_bias", H, dtype=torch.float32),
        "attention.skip": numbers("D", H, dtype=torch.float32),
        "attention.norm.weight": numbers("norm.weight", inner),
        "attention.wout.weight": numbers("out_proj.weight", dim, inner),
    }
