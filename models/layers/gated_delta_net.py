"""Gated DeltaNet: linear attention with a matrix of fixed size as its memory (Yang et al. 2024).

A head's state S [Ck, Cv] decays, corrects what it returns for the key towards the value, and is
read with the query. Queries, keys and values first pass a causal convolution over few positions.

Letters: K key heads (queries have as many), H value heads, Ck and Cv their sizes, N = 2 K Ck + H Cv
channels of the convolution, W its width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model import Context, Linear, RMSNorm, new_parameter
from models.layers.pending_state import (
    MAX_TENTATIVE,
    Convolution,
    PendingState,
    RecurrentLayer,
    call_place,
    real_counts,
)
from models.tensors import Recipes, copy_of
from ops.attention.delta import (
    delta_tokens,
    delta_tokens_supports,
    kernels_support,
    take_in_pending,
)
from ops.attention.delta_prompt import gated_delta_chunk
from ops.attention.delta_state import DeltaWeights
from ops.attention.recurrent_parts import causal_conv_silu, gated_rms_norm, masked_gates
from ops.plain.gated_delta import gated_delta_step


class DeltaSizes(NamedTuple):
    """Heads and sizes of a Gated DeltaNet layer."""

    key_heads: int  # K
    value_heads: int  # H
    key_dim: int  # Ck
    value_dim: int  # Cv
    width: int  # W

    @property
    def gates(self) -> int:
        """Numbers that make a token's gates: b and a of each value head."""
        return 2 * self.value_heads

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., N] -> q, k [..., K, Ck], v [..., H, Cv]."""
        K, H, Ck, Cv, _ = self
        q, k, v = x.split((K * Ck, K * Ck, H * Cv), dim=-1)
        return q.unflatten(-1, (K, Ck)), k.unflatten(-1, (K, Ck)), v.unflatten(-1, (H, Cv))


class DeltaInputs(NamedTuple):
    """What a layer appends for a call's tokens."""

    x: Tensor  # [B, Q, N], before the convolution
    ba: Tensor  # [B, Q, `DeltaSizes.gates`], what gives the gates
    weights: DeltaWeights


class DeltaState(PendingState):
    """Each sequence's state and the last W - 1 inputs of its convolution, updated in place."""

    def __init__(self, batch: int, sizes: DeltaSizes, like: Tensor):
        _, H, Ck, Cv, W = self.sizes = sizes
        M, device = MAX_TENTATIVE, like.device
        # `state`, then those of `Pending`.
        buffers = {
            "state": torch.zeros(batch, H, Ck, Cv, dtype=torch.float32, device=device),
            "inputs": like.new_zeros(batch, W - 1 + M, sizes.channels),
            "ba": like.new_zeros(batch, M, sizes.gates),
            "first": torch.zeros(batch, H, dtype=torch.int64, device=device),
        }
        super().__init__(W, buffers)
        # Scratch of `delta_tokens`: zeros between calls. No buffer, since it is no row's memory.
        self.arrivals = torch.zeros(batch, sizes.key_heads, dtype=torch.int32, device=device)

    def append(self, values: DeltaInputs, context: Context) -> Tensor:
        """Take in the call's real tokens; return what they read from the state, [B, Q, H, Cv].

        Fewer sequences than there are rows are the first ones.
        """
        (x, ba, weights), (B, Q, _) = values, values.x.shape
        row, position = call_place(context, B, Q, x.device)
        rows = torch.arange(B, device=x.device) if row is None else row
        memory = self.state, self.pending(), [*weights]
        take_in_pending(*memory, position, context.last, row, self.arrivals)
        count, real = real_counts(context, B, Q, x.device)
        g, beta = masked_gates(ba, weights.a_log, weights.dt_bias, real)
        is_step = Q == 1 and row is None
        window, state = (t[:B] if is_step else t[rows] for t in (self.window, self.state))
        y, inputs = causal_conv_silu(x, window, weights.conv), (window, x)
        q, k, v = self.sizes.heads(y)
        if Q == 1:
            q, k, v, g, beta = (t.squeeze(1) for t in (q, k, v, g, beta))
            out, after = gated_delta_step(q, k, v, g, beta, state)
            out = out.unsqueeze(1)
        else:
            out, after = gated_delta_chunk(q, k, v, g, beta, state)
        if 1 < Q <= MAX_TENTATIVE:
            self.keep_pending(rows, count, position, inputs, ba=ba)
        else:
            self.keep_state(rows, count, inputs, after, is_step)
        return out


class DeltaNet(RecurrentLayer):
    """[B, Q, D] -> same, in place of an attention layer. args: models.layers.gated_hybrid."""

    fp32 = ("a_log",)  # parameters that a change of dtype leaves alone
    projections = ("wqkvz", "wba"), "wout"  # inputs and output; `core` is between them

    def __init__(self, args):
        super().__init__()
        sizes = self.sizes = args.delta_sizes
        self.by_place, self.gate = args.values_by_place, args.delta_gate
        H, values = sizes.value_heads, sizes.value_heads * sizes.value_dim
        self.narrow = 2 * H
        self.wqkvz = Linear(args.dim, sizes.channels + values)
        # Apart, since it is never packed: an error of the decay grows with every token.
        self.wba = Linear(args.dim, self.narrow)
        self.conv = Convolution(sizes.channels, sizes.width)
        self.a_log, self.dt_bias = new_parameter(H), new_parameter(H)
        self.norm = RMSNorm(sizes.value_dim, args.norm_eps)
        self.wout = Linear(values, args.dim)

    def make_state(self, batch: int, like: Tensor) -> DeltaState:
        return DeltaState(batch, self.sizes, like)

    def has_kernels(self) -> bool:
        return kernels_support(self.state.state)

    def mix_few(self, qkvz: Tensor, ba: Tensor, context: Context) -> Tensor:
        """`mix` of a few tokens, by kernels."""
        qkv, gate = self.split_gate(qkvz)
        return self.in_order(run_kernels(self, qkv, [*ba.chunk(2, -1), gate], context, self.gate))

    def mix(self, qkvz: Tensor, ba: Tensor, context: Context) -> Tensor:
        """qkvz [B, Q, N + H Cv], ba [B, Q, 2 H] -> [B, Q, H Cv]: all between the projections."""
        if self.is_few(qkvz, context) and delta_tokens_supports(self.state.state):
            return self.mix_few(qkvz, ba, context)
        x, gate = self.split_gate(qkvz)
        y = self.state.append(DeltaInputs(x, ba, self.weights()), context)
        gate = gate.unflatten(-1, (-1, self.sizes.value_dim))
        y = gated_rms_norm(y, gate, self.norm.weight, self.norm.eps, self.gate)
        return self.in_order(y.to(qkvz.dtype).flatten(2))

    def split_gate(self, qkvz: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the convolution [B, Q, N], and the output's gate [B, Q, H Cv]."""
        sizes = self.sizes
        return qkvz.split((sizes.channels, sizes.value_heads * sizes.value_dim), dim=-1)

    def in_order(self, y: Tensor) -> Tensor:
        """y [B, Q, H Cv], by key head -> in the order in which wout takes the value heads."""
        if not self.by_place:
            return y
        heads = y.unflatten(-1, (self.sizes.key_heads, -1, self.sizes.value_dim))
        return heads.transpose(-3, -2).flatten(-3)

    def weights(self) -> DeltaWeights:
        """Return the weights that the kernels take."""
        return DeltaWeights(self.conv.weight, self.a_log, self.dt_bias, self.norm.weight)


def run_kernels(
    layer: RecurrentLayer, qkv: Tensor, gates: list[Tensor], context: Context, activation: str
) -> Tensor:
    """qkv [B, Q, N], gates as of `delta_tokens` -> [B, Q, H Cv]. activation: of the output's."""
    memory, eps = layer.state, layer.norm.eps
    tokens = qkv, gates, memory.state, memory.pending(), [*layer.weights()]
    place = context.positions, context.last, memory.arrivals
    return delta_tokens(*tokens, *place, eps, activation == "sigmoid")


def delta_net_recipes(sizes: DeltaSizes, dim: int) -> Recipes:
    """A layer's Gated DeltaNet, but for the projections of its input."""
    H, Cv, N = sizes.value_heads, sizes.value_dim, sizes.channels
    theirs = "linear_attn."
    return {
        "attention.conv.weight": copy_of(
            theirs + "conv1d.weight", N, 1, sizes.width, transform=lambda t: t.squeeze(1)
        ),
        "attention.a_log": copy_of(theirs + "A_log", H, dtype=torch.float32),
        "attention.dt_bias": copy_of(theirs + "dt_bias", H),
        "attention.norm.weight": copy_of(theirs + "norm.weight", Cv),
        "attention.wout.weight": copy_of(theirs + "out_proj.weight", dim, H * Cv),
    }
