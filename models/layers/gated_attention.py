"""Grouped-query attention whose output is gated: Qwen3-Next, and heads as a whole in Laguna."""

import torch
from torch import Tensor

from model import Attention, Context, Linear
from models.layers.zero_centered_norm import ZeroCenteredRMSNorm, zero_centered
from models.tensors import Recipe, Recipes, copy_of
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


def gated_attention_recipes(args) -> Recipes:
    """A layer's gated attention. q_proj has each head's query, then its gate."""
    H, K, C, D = args.n_head, args.n_kv_head, args.head_dim, args.dim
    q, kv = 2 * H * C, K * C
    rows = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}

    def gate_last(t: Tensor) -> Tensor:
        heads = t[:q].unflatten(0, (H, 2, C))
        queries, gates = (heads[:, n].flatten(0, 1) for n in (0, 1))
        return torch.cat((queries, t[q:], gates))

    def joined(leaf: str, *width: int) -> Recipe:
        sources: dict[str, tuple] = {
            f"self_attn.{name}_proj.{leaf}": (place,) for name, place in rows.items()
        }
        return Recipe((q + 2 * kv, *width), sources, gate_last)

    table = {
        "attention.wqkv.weight": joined("weight", D),
        "attention.wo.weight": copy_of("self_attn.o_proj.weight", D, H * C),
        "attention.q_norm.weight": zero_centered("self_attn.q_norm.weight", C),
        "attention.k_norm.weight": zero_centered("self_attn.k_norm.weight", C),
    }
    if args.attention_bias:
        table["attention.wqkv.bias"] = joined("bias")
        table["attention.wo.bias"] = copy_of("self_attn.o_proj.bias", D)
    return table
