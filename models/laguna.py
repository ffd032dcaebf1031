"""Laguna XS and S: heads that differ by layer, gated outputs, RoPE by kind of layer, windows."""

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from model import Block, Linear
from models.config import HFConfig, read_mlp_types
from models.family import PublishedLayout, Shard
from models.layers.gated_attention import GatedOutput
from models.layers.group_routing import SigmoidRoutedMoE
from models.layers.layer_rope import (
    LayerRopeArgs,
    LayerRopeAttention,
    LayerRopeFamily,
    LayerRopeTransformer,
)
from models.layers.windows import KINDS
from models.tensors import Recipe, Recipes
from ops.declared import AttentionAdditions, ExpertAdditions, OutputGate

GATES = {True: "head", "per-head": "head", "per-element": "element"}  # `gating` -> our name
HEADS = "num_attention_heads_per_layer"


@dataclass(frozen=True)
class LagunaArgs(LayerRopeArgs):
    layer_heads: tuple[int, ...] = ()  # each layer's query heads, at most n_head; (): all have that
    gate: str = "head"  # one number gates a "head", or an "element" of it
    shared_intermediate: int = 0  # intermediate dim of the shared expert; 0: none
    routed_scale: float = 1.0  # of routing weights
    router_softcap: float | None = None  # limit of router scores

    def constraints(self) -> dict[str, bool]:
        counts = self.layer_heads
        fits = all(type(n) is int and n > 0 and n % self.n_kv_head == 0 for n in counts)
        return super().constraints() | {
            "layer_heads": not counts
            or (fits and len(counts) == self.n_layer and max(counts) == self.n_head),
            "gate": self.gate in GATES.values(),
        }

    def of_layer(self, layer: int) -> "LagunaArgs":
        """Return the args with this layer's heads as those of all."""
        count = self.layer_heads[layer] if self.layer_heads else self.n_head
        return replace(self, n_head=count, layer_heads=())

    @property
    def gate_rows(self) -> tuple[int, int]:
        """Numbers that gate a token's output, as (heads, numbers of each)."""
        return self.n_head, 1 if self.gate == "head" else self.head_dim


class LagunaAttention(GatedOutput, LayerRopeAttention):
    """Attention times softplus(gate). args: `of_layer` of this layer."""

    def __init__(self, args: LagunaArgs, layer: int):
        super().__init__(args, layer)
        H, K, C = self.heads
        heads, each = args.gate_rows
        self.wqkv = Linear(args.dim, (H + 2 * K) * C + heads * each, bias=args.attention_bias)
        self.gate = OutputGate("softplus", per_head=args.gate == "head")

    def fused_decode_settings(self) -> AttentionAdditions:
        return replace(super().fused_decode_settings(), gate=self.gate)


class LagunaMoE(SigmoidRoutedMoE):
    def __init__(self, args: LagunaArgs):
        super().__init__(args)
        self.softcap = args.router_softcap

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.softcap:
            scores = (scores.float() / self.softcap).tanh() * self.softcap
        return super().route(scores)

    def fused_decode_settings(self) -> ExpertAdditions | None:
        return None if self.softcap else super().fused_decode_settings()


class LagunaTransformer(LayerRopeTransformer):
    args: LagunaArgs

    def make_block(self, args: LagunaArgs, layer: int) -> Block:
        block = Block(args, layer)
        block.attention = LagunaAttention(args.of_layer(layer), layer)
        if layer not in args.dense_layers:
            block.ffn = LagunaMoE(args)
        return block


def published(
    layers: int,
    full: int,
    windowed: int,
    *,
    factor: float,
    original: int,
    fast: float,
    scale: float,
    **sizes: int,
) -> dict:
    """Return a config.json of poolside: every fourth layer is a full one.

    full, windowed: query heads. factor, original, fast, scale: of YaRN in full layers.
    """
    is_full = [layer % 4 == 0 for layer in range(layers)]
    yarn = dict(
        rope_type="yarn",
        rope_theta=5e5,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=1.0,
        attention_factor=scale,
        partial_rotary_factor=0.5,
    )
    plain = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0)
    return sizes | {
        "num_hidden_layers": layers,
        "layer_types": [KINDS[kind] for kind in is_full],
        HEADS: [full if kind else windowed for kind in is_full],
        "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {KINDS[0]: plain, KINDS[1]: yarn},
    }


class Laguna(LayerRopeFamily):
    name = "laguna"
    args_class = LagunaArgs
    model_class = LagunaTransformer
    defaults = dict(
        vocab_size=100352,
        hidden_size=2048,
        num_hidden_layers=40,
        max_position_embeddings=131072,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        attention_bias=False,
        gating=True,
        sliding_window=512,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        intermediate_size=8192,
        shared_expert_intermediate_size=512,
        moe_routed_scaling_factor=1.0,
        moe_router_logit_softcapping=0.0,
        moe_apply_router_weight_on_input=False,
        partial_rotary_factor=1.0,
    )
    layer_ropes = {
        KINDS[0]: dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0),
        KINDS[1]: dict(rope_type="default", rope_theta=5e5, partial_rotary_factor=0.5),
    }
    field_of_key = {
        "attention_bias": "attention_bias",
        "shared_expert_intermediate_size": "shared_intermediate",
        "moe_routed_scaling_factor": "routed_scale",
    }
    fixed = {"qk_norm": "head", "norm_topk": True}
    only = {"swa_attention_sink_enabled": False}
    has_score_bias = True
    renamed_tensors = (
        (".mlp.shared_experts.", ".mlp.shared_expert."),
        (".mlp.experts.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    )

    def arg_fields(self, c: HFConfig) -> dict:
        read_mlp_types(c, first_dense=1)
        if c.flag("moe_apply_router_weight_on_input"):
            c.refuse("moe_apply_router_weight_on_input", "only False is")
        gating, softcap = c["gating"], c["moe_router_logit_softcapping"]
        if type(gating) not in (bool, str) or gating not in GATES:
            c.refuse("gating", "only true, 'per-head' and 'per-element' are")
        capped = softcap != 0 or type(softcap) is bool
        return (
            super().arg_fields(c)
            | layer_heads(c)
            | {
                "gate": GATES[gating],
                "router_softcap": c.number("moe_router_logit_softcapping") if capped else None,
            }
        )

    shapes = {
        "Laguna-XS-33B-A3B": published(
            *(40, 48, 64), factor=32.0, original=4096, fast=64.0, scale=1.0
        ),
        "Laguna-S-118B-A8B": published(
            *(48, 48, 72),
            **dict(factor=128.0, original=8192, fast=32.0, scale=1.4852030263919618),
            hidden_size=3072,
            intermediate_size=12288,
            max_position_embeddings=1048576,
            num_experts_per_tok=10,
            moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024,
        ),
    }

    # Conversion ---------------------------------------------------------------------------------

    def layer_recipes(self, args: LagunaArgs, layer: int, layout: PublishedLayout) -> Recipes:
        return super().layer_recipes(args.of_layer(layer), layer, layout)

    def attention_recipes(self, args: LagunaArgs) -> Recipes:
        """Add the gate, which has no bias, to queries, keys and values."""
        table, (heads, each) = super().attention_recipes(args), args.gate_rows
        wqkv = table["attention.wqkv.weight"]
        (rows, D), gate = wqkv.shape, heads * each
        place = slice(rows, rows + gate)
        sources = wqkv.sources | {"self_attn.g_proj.weight": (place,)}
        table["attention.wqkv.weight"] = Recipe((rows + gate, D), sources)
        if args.attention_bias:
            bias = table["attention.wqkv.bias"]
            table["attention.wqkv.bias"] = bias._replace(transform=lambda t: F.pad(t, (0, gate)))
        return table

    # Tensor parallelism ---------------------------------------------------------------------------

    sharded = ("layer_heads",)

    def sharded_heads(self, args: LagunaArgs) -> dict[str, int]:
        return {f"query heads of layer {layer}": n for layer, n in enumerate(args.layer_heads)}

    def shard_table(self, args: LagunaArgs) -> dict[str, Shard]:
        table, kv = super().shard_table(args), (args.n_kv_head, args.head_dim)
        for layer in range(args.n_layer):
            own = args.of_layer(layer)
            queries, path = (own.n_head, own.head_dim), f"layers.{layer}.attention"
            table[f"{path}.wqkv"] = Shard(0, (queries, kv, kv, own.gate_rows))
            table[f"{path}.wo"] = Shard(1, (queries,))
        return table


def layer_heads(c: HFConfig) -> dict:
    """Return the layers' query heads, if they differ, and the largest number."""
    counts, n_layer = c.get(HEADS), c["num_hidden_layers"]
    if counts is None:
        return {}
    kv_heads = c["num_key_value_heads"]
    fits = isinstance(counts, list) and len(counts) == n_layer
    if not fits or any(type(n) is not int or n < 1 or n % kv_heads for n in counts):
        c.refuse(HEADS, f"{n_layer} multiples of num_key_value_heads = {kv_heads} are needed")
    return {"n_head": max(counts), "layer_heads": tuple(counts) if len(set(counts)) > 1 else ()}
