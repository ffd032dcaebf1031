"""Grouped-query attention whose output is gated: Qwen3-Next, and heads as a whole in Laguna."""

from dataclasses import replace

import torch
from torch import Tensor

from model import Attention, Context, Linear, ModelArgs
from models.layers.zero_centered_norm import ZeroCenteredRMSNorm, zero_centered
from models.tensors import Recipes, attention_recipes
from ops.declared import AttentionAdditions, OutputGate
from ops.inductor import materialize
from ops.plain.attention import gate_heads


class GatedOutput(Attention):
    """Attention times an activation of a gate, before `wo`. `wqkv` makes q, k, v, then the gate."""

    gate: OutputGate

    def core(self, qkv: Tensor, context: Context) -> Tensor:
        """qkv [B, Q, (H + 2 K) C + gate] -> [B, Q, H * C]."""
        H, K, C = self.heads
        first = (H + 2 * K) * C
        qkv, gate = qkv.split((first, qkv.shape[-1] - first), dim=-1)
        # Materialized, or Inductor recomputes the gate in every row of the product.
        return materialize(gate_heads(super().core(qkv, context), gate, self.gate.activation))


class GatedAttention(GatedOutput):
    """Qwen3-Next's: a sigmoid for each number, part of each head rotated.

    args.rotary_dim: the first numbers of a head that are rotated.
    """

    gate = OutputGate("sigmoid")

    def __init__(self, args):
        super().__init__(args)
        H, K, C = self.heads
        self.wqkv = Linear(args.dim, 2 * (H + K) * C, bias=args.attention_bias)
        self.q_norm = ZeroCenteredRMSNorm(C, args.norm_eps)
        self.k_norm = ZeroCenteredRMSNorm(C, args.norm_eps)
        self.rotary_dim = args.rotary_dim

    def fused_decode_settings(self) -> AttentionAdditions:
        return AttentionAdditions(gate=self.gate)


def gated_attention_recipes(args: ModelArgs) -> Recipes:
    """A layer's gated attention. q_proj has each head's query, then its gate."""
    H, C = args.n_head, args.head_dim

    def gate_last(t: Tensor) -> Tensor:
        heads, kv = t.split((2 * H * C, len(t) - 2 * H * C))
        queries, gates = heads.unflatten(0, (H, 2, C)).unbind(1)
        return torch.cat((queries.flatten(0, 1), kv, gates.flatten(0, 1)))

    twice = attention_recipes(replace(args, n_head=2 * H))
    wqkv = {n: r._replace(transform=gate_last) for n, r in twice.items() if ".wqkv." in n}
    norms = {
        f"attention.{name}_norm.weight": zero_centered(f"self_attn.{name}_norm.weight", C)
        for name in "qk"
    }
    return attention_recipes(args) | wqkv | norms
