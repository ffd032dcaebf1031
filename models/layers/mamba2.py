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
    MAX_TENTATIVE,
    Convolution,
    PendingState,
    RecurrentLayer,
    call_place,
    real_counts,
)
from models.tensors import Recipe, Recipes, copy_of
from ops.attention.delta_prompt import state_space_chunk
from ops.attention.mamba import (
    MambaWeights,
    kernels_support,
    mamba_tokens,
    take_in_pending,
)
from ops.attention.recurrent_parts import causal_conv_silu, gated_group_norm, masked_gates
from ops.plain.mamba2 import group_norm, ssm_step


class MambaSizes(NamedTuple):
    """Heads and sizes of a Mamba-2 layer."""

    heads: int  # H
    head_dim: int  # P
    groups: int  # G
    state: int  # N
    width: int  # W

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


class MambaInputs(NamedTuple):
    """What a layer appends for a call's tokens."""

    x: Tensor  # [B, Q, C], before the convolution
    dt: Tensor  # [B, Q, H], what gives the step sizes
    weights: MambaWeights


class MambaState(PendingState):
    """Each sequence's state and the last W - 1 inputs of its convolution, updated in place."""

    def __init__(self, batch: int, sizes: MambaSizes, like: Tensor):
        H, P, G, N, W = sizes
        M, device = MAX_TENTATIVE, like.device
        # `state`, then those of ops.attention.mamba.Pending.
        buffers = {
            "state": torch.zeros(batch, H, P, N, dtype=torch.float32, device=device),
            "inputs": like.new_zeros(batch, W - 1 + M, sizes.channels),
            "dt": like.new_zeros(batch, M, H),
            "first": torch.zeros(batch, H, dtype=torch.int64, device=device),
        }
        super().__init__(W, buffers)
        self.sizes = sizes
        # Scratch of `mamba_tokens`: zeros between calls. No buffer, since it is no row's memory.
        self.arrivals = torch.zeros(batch, G, dtype=torch.int32, device=device)

    def append(self, values: MambaInputs, context: Context) -> Tensor:
        """Take in the call's real tokens; return what they read from the state, [B, Q, H P].

        Fewer sequences than there are rows are the first ones.
        """
        (x, dt, weights), (B, Q, _) = values, values.x.shape
        row, position = call_place(context, B, Q, x.device)
        rows = torch.arange(B, device=x.device) if row is None else row
        memory = self.state, self.pending(), [*weights]
        take_in_pending(*memory, position, context.last, row, self.arrivals)
        count, real = real_counts(context, B, Q, x.device)
        g, steps = masked_gates(dt, weights.a_log, weights.dt_bias, real)
        is_step = Q == 1 and row is None
        window, state = (t[:B] if is_step else t[rows] for t in (self.window, self.state))
        y = causal_conv_silu(x, window, weights.conv, weights.conv_bias)
        (x, b, c), inputs = self.sizes.parts(y), (window, x)
        if Q == 1:
            x, b, c, steps, g = (t.squeeze(1) for t in (x, b, c, steps, g))
            y, after = ssm_step(x, b, c, steps, g, weights.skip, state)
            y = y.unsqueeze(1)
        else:
            y, after = state_space_chunk(x, b, c, steps, g, weights.skip, state)
        if 1 < Q <= MAX_TENTATIVE:
            self.keep_pending(rows, count, position, inputs, dt=dt)
        else:
            self.keep_state(rows, count, inputs, after, is_step)
        return y.flatten(2)


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

    def make_state(self, batch: int, like: Tensor) -> MambaState:
        return MambaState(batch, self.sizes, like)

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
        if self.is_few(zx, context) and torch.compiler.is_compiling() and self.has_kernels():
            return self.norm(self.mix_few(zx, dt, context), None)
        gate, x = zx.split((self.sizes.inner, self.sizes.channels), dim=-1)
        y = self.state.append(MambaInputs(x, dt, self.weights()), context)
        return self.norm(y, gate)

    def weights(self) -> MambaWeights:
        """Return the weights that the kernels take."""
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
        "attention.conv.weight": numbers(
            "conv1d.weight", C, 1, sizes.width, transform=lambda t: t.squeeze(1)
        ),
        "attention.conv.bias": numbers("conv1d.bias", C),
        "attention.a_log": numbers("A_log", H, dtype=torch.float32),
        "attention.dt_bias": numbers("dt_bias", H, dtype=torch.float32),
        "attention.skip": numbers("D", H, dtype=torch.float32),
        "attention.norm.weight": numbers("norm.weight", inner),
        "attention.wout.weight": numbers("out_proj.weight", dim, inner),
    }
