"""Kimi Delta Attention: the gated delta rule with a decay for each channel of a key (Kimi Team
2025, Kimi Linear, section 3).

It differs from Gated DeltaNet in this: a head's state [Ck, Cv] has a decay for each of its rows,
and decays and the output's gate are products of x of a low rank. The gate is a sigmoid.

Letters: H heads, C the size of their queries, keys and values, r the rank, N = 3 H C channels of
the convolution.
"""

import torch
from torch import Tensor

from model import Context, Linear, RMSNorm, new_parameter
from models.layers.gated_delta_net import DeltaRuleLayer, DeltaSizes
from models.layers.pending_state import Convolution
from models.tensors import Recipe, Recipes, copy_of
from ops.products.dense import dense_product
from ops.products.weights import plain_weight


class KimiDeltaSizes(DeltaSizes):
    """Sizes of a layer: as many key heads as value heads."""

    @property
    def gates(self) -> int:
        """Numbers that make a token's gates: b of each head, and a of each channel of a key."""
        return self.value_heads * (1 + self.key_dim)


class KimiDelta(DeltaRuleLayer):
    """[B, Q, D] -> same, in place of an attention layer. args have `delta_sizes`."""

    fp32 = "a_log", "dt_bias"  # parameters that a change of dtype leaves alone
    projections = ("wqkv", "wfgb"), "wout"  # inputs and output; `core` is between them
    gate = "sigmoid"

    def __init__(self, args):
        super().__init__()
        sizes = self.sizes = args.delta_sizes
        H, C = sizes.value_heads, sizes.value_dim
        self.parts = C, C, H  # of wfgb's result: decays and the gate, of rank r = C, and beta
        self.narrow = sum(self.parts)
        self.wqkv = Linear(args.dim, sizes.channels)
        self.wfgb = Linear(args.dim, self.narrow)
        self.wdecay, self.wgate = Linear(C, H * C), Linear(C, H * C)
        self.conv = Convolution(sizes.channels, sizes.width)
        self.a_log, self.dt_bias = new_parameter(H), new_parameter(H * C)
        self.norm = RMSNorm(C, args.norm_eps)
        self.wout = Linear(H * C, args.dim)

    def mix(self, qkv: Tensor, fgb: Tensor, context: Context) -> Tensor:
        """qkv [B, Q, N], fgb [B, Q, 2 r + H] -> [B, Q, H C]: all between the projections."""
        f, g, b = fgb.split(self.parts, dim=-1)
        a, gate = self.wdecay(f), self.wgate(g)
        if self.mixes_by_kernels(qkv, context):
            return self.run_kernels(qkv, [b, a, gate], context)
        return self.run_plainly(qkv, torch.cat((b, a), dim=-1), gate, context)

    def mix_few(self, qkv: Tensor, fgb: Tensor, context: Context) -> Tensor:
        f, g, b = fgb.split(self.parts, dim=-1)
        # The gate's product runs beside that of the decays: its x was made by the kernel before.
        a = expand(f, self.wdecay)
        return self.run_kernels(qkv, [b, a, expand(g, self.wgate, early=True)], context)


def expand(x: Tensor, layer: Linear, early: bool = False) -> Tensor:
    """x [B, Q, r] -> [B, Q, out], by the kernel for a few tokens. early: as in `dense_product`."""
    rows = x.flatten(0, 1).contiguous()
    return dense_product(rows, plain_weight(layer.weight), early=early).unflatten(0, x.shape[:2])


def kimi_delta_recipes(sizes: KimiDeltaSizes, dim: int) -> Recipes:
    """A layer's Kimi Delta Attention."""
    H, C, W = sizes.value_heads, sizes.value_dim, sizes.width
    inner = H * C
    places = {name: (slice(n * inner, n * inner + inner),) for n, name in enumerate("qkv")}
    theirs = "self_attn."
    fgb = {"f_a": slice(0, C), "g_a": slice(C, 2 * C), "b": slice(2 * C, 2 * C + H)}
    return {
        "attention.wqkv.weight": Recipe(
            (3 * inner, dim), {f"{theirs}{name}_proj.weight": at for name, at in places.items()}
        ),
        "attention.wfgb.weight": Recipe(
            (2 * C + H, dim), {f"{theirs}{name}_proj.weight": (at,) for name, at in fgb.items()}
        ),
        "attention.wdecay.weight": copy_of(theirs + "f_b_proj.weight", inner, C),
        "attention.wgate.weight": copy_of(theirs + "g_b_proj.weight", inner, C),
        "attention.conv.weight": Recipe(
            (3 * inner, 1, W),
            {f"{theirs}{name}_conv1d.weight": at for name, at in places.items()},
            lambda t: t.squeeze(1),
        ),
        "attention.a_log": copy_of(
            theirs + "A_log", 1, 1, H, 1, transform=torch.flatten, dtype=torch.float32
        ),
        "attention.dt_bias": copy_of(theirs + "dt_bias", inner, dtype=torch.float32),
        "attention.norm.weight": copy_of(theirs + "o_norm.weight", C),
        "attention.wout.weight": copy_of(theirs + "o_proj.weight", dim, inner),
    }
