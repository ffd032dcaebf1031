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
    Convolution,
    PendingState,
    RecurrentInputs,
    RecurrentLayer,
)
from models.tensors import Recipes, conv_recipe, copy_of
from ops.attention.delta import (
    delta_tokens,
    kernels_support,
    launch_tokens,
    settle,
    stores_planes,
    take_in_pending,
)
from ops.attention.delta_prompt import gated_delta_chunk
from ops.attention.delta_state import DeltaWeights
from ops.attention.recurrent_parts import gated_rms_norm
from ops.plain.gated_delta import gated_delta_step, masked_gates_in_torch
from ops.plain.pending import in_place
from ops.products.planes import Planes


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


class DeltaState(PendingState):
    """What a layer remembers: S [Ck, Cv] of each value head."""

    take_in = staticmethod(take_in_pending)

    def __init__(self, batch: int, sizes: DeltaSizes, like: Tensor):
        K, H, Ck, Cv, _ = sizes
        super().__init__(batch, sizes, like, (H, Ck, Cv), K)

    def advance(
        self, x: Tensor, ba: Tensor, weights: DeltaWeights, last: Tensor | None, *memory
    ) -> Tensor:
        tokens, rule = self.sizes.heads(x), (ba, weights.a_log, weights.dt_bias, last)
        if x.shape[1] > 1:
            return gated_delta_chunk(*tokens, *rule, *memory)
        step = [t.squeeze(1) for t in (*tokens, *masked_gates_in_torch(*rule))]
        return in_place(gated_delta_step)(*step, *memory).unsqueeze(1)


class DeltaRuleLayer(RecurrentLayer):
    """Gated DeltaNet or Kimi Delta Attention, between their projections."""

    state_class = DeltaState
    settle = staticmethod(settle)
    gate: str  # activation of the output's gate

    def has_kernels(self) -> bool:
        return kernels_support(self.state.state)

    def run_kernels(
        self, qkv: Tensor, gates: list[Tensor], context: Context, planes: Planes | None = None
    ) -> Tensor | None:
        """qkv [B, Q, N], gates as in `delta_tokens` -> [B, Q, H Cv]; or stored in `planes`."""
        memory = self.state
        tokens = qkv, gates, memory.state, memory.pending(), [*self.weights()]
        place = context.positions, context.last, memory.arrivals
        rest = self.norm.eps, self.gate == "sigmoid"
        if planes is not None:
            launch_tokens(*tokens, *place, *rest, planes)
            return None
        return delta_tokens(*tokens, *place, *rest)

    def run_plainly(self, qkv: Tensor, ba: Tensor, gate: Tensor, context: Context) -> Tensor:
        """The same, with b and a as one tensor [B, Q, `sizes.gates`]. gate: the output's."""
        y, norm = self.state.append(RecurrentInputs(qkv, ba, self.weights()), context), self.norm
        gate = gate.unflatten(-1, (-1, self.sizes.value_dim))
        return gated_rms_norm(y, gate, norm.weight, norm.eps, self.gate).to(qkv.dtype).flatten(2)

    def weights(self) -> DeltaWeights:
        return DeltaWeights(self.conv.weight, self.a_log, self.dt_bias, self.norm.weight)


class DeltaNet(DeltaRuleLayer):
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

    def stores_planes(self, queries: int) -> bool:
        """Whether `mix_few` can store a call of this many tokens of each sequence as planes."""
        return not self.by_place and stores_planes(self.sizes, queries)

    def mix_few(
        self, qkvz: Tensor, ba: Tensor, context: Context, planes: Planes | None = None
    ) -> Tensor | None:
        qkv, gate = self.split_gate(qkvz)
        y = self.run_kernels(qkv, [*ba.chunk(2, -1), gate], context, planes)
        return y if y is None else self.in_order(y)

    def mix(self, qkvz: Tensor, ba: Tensor, context: Context) -> Tensor:
        """qkvz [B, Q, N + H Cv], ba [B, Q, 2 H] -> [B, Q, H Cv]: all between the projections."""
        if self.mixes_by_kernels(qkvz, context):
            return self.mix_few(qkvz, ba, context)
        qkv, gate = self.split_gate(qkvz)
        return self.in_order(self.run_plainly(qkv, ba, gate, context))

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


def delta_net_recipes(sizes: DeltaSizes, dim: int) -> Recipes:
    """A layer's Gated DeltaNet, but for the projections of its input."""
    H, Cv, N = sizes.value_heads, sizes.value_dim, sizes.channels
    theirs = "linear_attn."
    return {
        "attention.conv.weight": conv_recipe(theirs + "conv1d.weight", N, sizes.width),
        "attention.a_log": copy_of(theirs + "A_log", H, dtype=torch.float32),
        "attention.dt_bias": copy_of(theirs + "dt_bias", H),
        "attention.norm.weight": copy_of(theirs + "norm.weight", Cv),
        "attention.wout.weight": copy_of(theirs + "out_proj.weight", dim, H * Cv),
    }
