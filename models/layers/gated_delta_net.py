"""Gated DeltaNet: linear attention with a matrix of fixed size as its memory (Yang et al. 2024).

A head's state S [Ck, Cv] decays, corrects what it returns for the key towards the value, and is
read with the query. Queries, keys and values first pass a causal convolution over few positions.

Letters: K key heads (queries have as many), H value heads, Ck and Cv their sizes, N = 2 K Ck + H Cv
channels of the convolution, W its width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model import Context, KVCache, Linear, RMSNorm, new_parameter
from models.tensors import Recipes, copy_of
from ops.attention.delta import delta_tokens, delta_tokens_supports, kernels_support
from ops.attention.delta_pending import last_inputs, take_in_pending
from ops.attention.delta_prompt import (
    causal_conv_silu,
    delta_gates,
    gated_delta_chunk,
    gated_rms_norm,
)
from ops.attention.delta_state import DeltaWeights
from ops.inductor import materialize
from ops.plain.gated_delta import gated_delta_step

MAX_TENTATIVE = 16  # tokens of one call that can still be refused


class DeltaSizes(NamedTuple):
    """Heads and sizes of a Gated DeltaNet layer."""

    key_heads: int  # K
    value_heads: int  # H
    key_dim: int  # Ck
    value_dim: int  # Cv
    width: int  # W

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
    ba: Tensor  # [B, Q, 2 H], what gives the gates
    weights: DeltaWeights


class DeltaState(nn.Module):
    """Each sequence's state and the last W - 1 inputs of its convolution, updated in place.

    It implements the protocol of runtime/sequence_state.py. Tokens of a call of 2 to MAX_TENTATIVE
    are pending: the next call takes in those before its own position, from their inputs. A state
    after each of them would be more memory.
    """

    def __init__(self, batch: int, sizes: DeltaSizes, like: Tensor):
        super().__init__()
        _, H, Ck, Cv, W = self.sizes = sizes
        M, device = MAX_TENTATIVE, like.device
        # `state`, then those of `Pending`.
        buffers = {
            "state": torch.zeros(batch, H, Ck, Cv, dtype=torch.float32, device=device),
            "inputs": like.new_zeros(batch, W - 1 + M, sizes.channels),
            "ba": like.new_zeros(batch, M, 2 * H),
            "first": torch.zeros(batch, H, dtype=torch.int64, device=device),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)
        # Scratch of `delta_tokens`: zeros between calls. No buffer, since it is no row's memory.
        self.arrivals = torch.zeros(batch, sizes.key_heads, dtype=torch.int32, device=device)

    def append(self, values: DeltaInputs, context: Context) -> Tensor:
        """Take in the call's real tokens; return what they read from the state, [B, Q, H, Cv].

        Fewer sequences than there are rows are the first ones.
        """
        (x, ba, weights), (B, Q, _), W = values, values.x.shape, self.sizes.width
        row, position = call_place(context, B, Q, x.device)
        rows = torch.arange(B, device=x.device) if row is None else row
        memory = self.state, self.pending(), [*weights]
        take_in_pending(*memory, position, context.last, row, self.sizes.key_heads)
        count = torch.full((B,), Q, device=x.device) if context.last is None else context.last + 1
        real = (torch.arange(Q, device=x.device) < count.unsqueeze(1)).unsqueeze(-1)
        g, beta = delta_gates(ba, weights.a_log, weights.dt_bias)
        g, beta = torch.where(real, g, 0.0), torch.where(real, beta, 0.0)  # padding does nothing
        is_step = Q == 1 and row is None
        window, state = (t[:B] if is_step else t[rows] for t in (self.window, self.state))
        y, inputs = causal_conv_silu(x, window, weights.conv), torch.cat((window, x), dim=1)
        q, k, v = self.sizes.heads(y)
        if Q == 1:
            q, k, v, g, beta = (t.squeeze(1) for t in (q, k, v, g, beta))
            out, after = gated_delta_step(q, k, v, g, beta, state)
            out = out.unsqueeze(1)
        else:
            out, after = gated_delta_chunk(q, k, v, g, beta, state)
        if 1 < Q <= MAX_TENTATIVE:
            self.keep_pending(rows, count, position, inputs, ba)
            return out
        moved = last_inputs(inputs, count, W - 1)
        if is_step:
            self.state[:B].copy_(after)
            self.window[:B].copy_(moved)
        else:
            self.state.index_copy_(0, rows, after)
            self.window.index_copy_(0, rows, moved)
        return out

    def keep_pending(
        self, rows: Tensor, count: Tensor, position: Tensor, inputs: Tensor, ba: Tensor
    ) -> None:
        """Make a call's tokens the pending ones. inputs [B, W - 1 + Q, N]; an idle row's stay."""
        new = {"inputs": inputs, "ba": ba, "first": (position + 1).expand(-1, self.first.shape[1])}
        for name, value in new.items():
            buffer = getattr(self, name)[:, : value.shape[1]]
            exists = (count > 0).view(-1, *[1] * (value.dim() - 1))
            buffer.index_copy_(0, rows, torch.where(exists, value, buffer[rows]))

    def pending(self) -> list[Tensor]:
        """Return the pending tokens, in the order of `Pending`."""
        return [getattr(self, name) for name in ("inputs", "ba", "first")]

    @property
    def window(self) -> Tensor:
        """The last inputs that the state has taken in, [batch, W - 1, N]."""
        return self.inputs[:, : self.sizes.width - 1]

    def recurrent(self, row: int) -> list[Tensor]:
        """Return a row's state, with its pending tokens."""
        return [buffer[row] for buffer in self.buffers()]

    def row(self, row: int) -> list[Tensor]:
        """Return a row's memory as views [1, all values]."""
        return [buffer[row].view(1, -1) for buffer in self.buffers()]

    def reset(self, row: int | None = None) -> None:
        """Forget a row's sequence, or all."""
        for buffer in self.buffers():
            (buffer if row is None else buffer[row]).zero_()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())


def call_place(
    context: Context, B: int, Q: int, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """Return the row of a chunk or None, and the positions where the sequences begin, [B, 1]."""
    if context.chunk is None:
        return None, context.positions[:, :1]
    return context.chunk.row, torch.full((B, 1), context.chunk.end - Q, device=device)


class Convolution(nn.Module):
    """Holds the weight [N, W] of a depthwise causal convolution."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = new_parameter(channels, width)


class DeltaNet(nn.Module):
    """[B, Q, D] -> same, in place of an attention layer. args: models.layers.gated_hybrid."""

    window = None
    reads_masks = False
    fp32 = ("a_log",)  # parameters that a change of dtype leaves alone
    projections = ("wqkvz", "wba"), "wout"  # inputs and output; `core` is between them

    def __init__(self, args):
        super().__init__()
        sizes = self.sizes = args.delta_sizes
        self.by_place = args.values_by_place
        H, values = sizes.value_heads, sizes.value_heads * sizes.value_dim
        self.wqkvz = Linear(args.dim, sizes.channels + values)
        # Apart, since it is never packed: an error of the decay grows with every token.
        self.wba = Linear(args.dim, 2 * H)
        self.conv = Convolution(sizes.channels, sizes.width)
        self.a_log, self.dt_bias = new_parameter(H), new_parameter(H)
        self.norm = RMSNorm(sizes.value_dim, args.norm_eps)
        self.wout = Linear(values, args.dim)

    def allocate(
        self, batch: int, length: int, cache_class: type[KVCache], like: Tensor
    ) -> DeltaState:
        """Make this layer's state, of any length, on the device of `like`, and return it."""
        self.state = DeltaState(batch, self.sizes, like)
        return self.state

    def join_projections(self) -> None:
        """Make the two products one, unless wqkvz is packed: a step has one kernel less."""
        if type(self.wqkvz) is Linear:
            joined = torch.cat((self.wqkvz.weight, self.wba.weight))
            self.wqkvz.weight = nn.Parameter(joined, requires_grad=False)
            self.wba = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y = self.wqkvz(x)
        y = self.core(y, context) if self.wba is None else self.mix(y, self.wba(x), context)
        # Materialized, or Inductor recomputes the gated norm in every row of the product.
        return self.wout(materialize(y))

    def core(self, projected: Tensor, context: Context) -> Tensor:
        """The joined results of both projections [B, Q, N + H Cv + 2 H] -> [B, Q, H Cv]."""
        return self.mix(*self.split(projected), context)

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        heads = 2 * self.sizes.value_heads
        return projected.split((projected.shape[-1] - heads, heads), dim=-1)

    def is_few(self, projected: Tensor, context: Context) -> bool:
        return projected.shape[1] <= MAX_TENTATIVE and context.chunk is None

    def takes(self, projected: Tensor, context: Context) -> bool:
        """Whether `fused_core` takes this call: as of `runtime.fused_attention`."""
        return self.is_few(projected, context) and kernels_support(self.state.state)

    def fused_core(self, projected: Tensor, context: Context) -> Tensor:
        """`core` by kernels alone, without the compiler."""
        return self.mix_few(*self.split(projected), context)

    def mix_few(self, qkvz: Tensor, ba: Tensor, context: Context) -> Tensor:
        """`mix` of a few tokens, by kernels."""
        memory, weights = self.state, [*self.weights()]
        place = context.positions, context.last, memory.arrivals, self.sizes.key_heads
        tokens = qkvz, ba, memory.state, memory.pending(), weights
        return self.in_order(delta_tokens(*tokens, *place, self.norm.eps))

    def mix(self, qkvz: Tensor, ba: Tensor, context: Context) -> Tensor:
        """qkvz [B, Q, N + H Cv], ba [B, Q, 2 H] -> [B, Q, H Cv]: all between the projections."""
        H, Cv, memory = self.sizes.value_heads, self.sizes.value_dim, self.state
        if self.is_few(qkvz, context) and delta_tokens_supports(memory.state):
            return self.mix_few(qkvz, ba, context)
        x, gate = qkvz.split((self.sizes.channels, H * Cv), dim=-1)
        y = memory.append(DeltaInputs(x, ba, self.weights()), context)
        gate = gate.unflatten(-1, (H, Cv))
        y = gated_rms_norm(y, gate, self.norm.weight, self.norm.eps).to(qkvz.dtype)
        return self.in_order(y.flatten(2))

    def in_order(self, y: Tensor) -> Tensor:
        """y [B, Q, H Cv], by key head -> in the order in which wout takes the value heads."""
        if not self.by_place:
            return y
        heads = y.unflatten(-1, (self.sizes.key_heads, -1, self.sizes.value_dim))
        return heads.transpose(-3, -2).flatten(-3)

    def weights(self) -> DeltaWeights:
        """Return the weights that the kernels take."""
        return DeltaWeights(self.conv.weight, self.a_log, self.dt_bias, self.norm.weight)


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
