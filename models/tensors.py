"""Recipes: which published tensors make which of our tensors.

A recipe builds one of our tensors from published ones. Those have the names that families share
(a family's `renamed_tensors` map its own names to them). A layer's recipes have names without the
layer's prefix; `prefixed` adds it. This module reads no files.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint import is_finite
from model import ModelArgs

WHOLE = ()  # place of a tensor that is all of ours


class Recipe(NamedTuple):
    """How to make one tensor of ours."""

    shape: tuple[int, ...]  # the assembled sources' shape
    sources: dict[str, tuple]  # tensor of theirs -> its place (slices) in that shape
    transform: Callable[[Tensor], Tensor] | None = None  # assembled sources -> ours
    dtype: torch.dtype | None = None  # the assembled sources' dtype; None: as asked for
    is_valid: Callable[[Tensor], bool] = is_finite  # whether a source has neither NaN nor infinity


Recipes = dict[str, Recipe]  # our tensor's name -> its recipe


def copy_of(name: str, *shape: int, **options) -> Recipe:
    """Return the recipe of a tensor that is one of theirs. options: further fields of Recipe."""
    return Recipe(shape, {name: WHOLE}, **options)


def conv_recipe(name: str, channels: int, width: int) -> Recipe:
    """Return the recipe of a depthwise convolution's weight [N, W], published as [N, 1, W]."""
    return copy_of(name, channels, 1, width, transform=lambda t: t.squeeze(1))


def prefixed(table: Recipes, layer: int, published: int | None = None) -> Recipes:
    """Add the layer's prefix to both sides of a layer's table.

    published: the number of the published layer, if it is another.
    """
    ours = f"layers.{layer}."
    theirs = f"model.layers.{layer if published is None else published}."
    return {
        ours + name: recipe._replace(
            sources={theirs + source: place for source, place in recipe.sources.items()}
        )
        for name, recipe in table.items()
    }


def rest_recipes(args: ModelArgs) -> Recipes:
    """Everything outside of the layers."""
    V, D = args.vocab_size, args.dim
    table = {
        "embedding.weight": copy_of("model.embed_tokens.weight", V, D),
        "norm.weight": copy_of("model.norm.weight", D),
    }
    if not args.tied_embeddings:
        table["head.weight"] = copy_of("lm_head.weight", V, D)
    return table


def norm_recipes(args: ModelArgs, leaf: str = "weight") -> Recipes:
    """A layer's two norms: their weights, or their biases (leaf "bias")."""
    return {
        f"attention_norm.{leaf}": copy_of(f"input_layernorm.{leaf}", args.dim),
        f"ffn_norm.{leaf}": copy_of(f"post_attention_layernorm.{leaf}", args.dim),
    }


def attention_recipes(args: ModelArgs) -> Recipes:
    """A layer's grouped-query attention.

    A family with biases of queries, keys and values alone has a field `qkv_bias`.
    """
    D, C = args.dim, args.head_dim
    q, kv = args.n_head * C, args.n_kv_head * C
    rows = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}

    def qkv(leaf: str) -> dict[str, tuple]:
        return {f"self_attn.{name}_proj.{leaf}": (place,) for name, place in rows.items()}

    table = {
        "attention.wqkv.weight": Recipe((q + 2 * kv, D), qkv("weight")),
        "attention.wo.weight": copy_of("self_attn.o_proj.weight", D, q),
    }
    if args.attention_bias or getattr(args, "qkv_bias", False):
        table["attention.wqkv.bias"] = Recipe((q + 2 * kv,), qkv("bias"))
    if args.attention_bias:
        table["attention.wo.bias"] = copy_of("self_attn.o_proj.bias", D)
    if args.qk_norm != "none":
        q, kv = (q, kv) if args.qk_norm == "full" else (C, C)
        table["attention.q_norm.weight"] = copy_of("self_attn.q_norm.weight", q)
        table["attention.k_norm.weight"] = copy_of("self_attn.k_norm.weight", kv)
    return table


def dense_recipes(ours: str, theirs: str, D: int, I: int) -> Recipes:
    """A dense SwiGLU FFN."""
    gate, up = (slice(0, I),), (slice(I, 2 * I),)
    w13 = {f"{theirs}.gate_proj.weight": gate, f"{theirs}.up_proj.weight": up}
    return {
        f"{ours}.w13.weight": Recipe((2 * I, D), w13),
        f"{ours}.w2.weight": copy_of(f"{theirs}.down_proj.weight", D, I),
    }


def expert_recipes(args: ModelArgs, fused: bool) -> Recipes:
    """A layer's router and experts. fused: one tensor has all experts (transformers 5)."""
    D, E, I = args.dim, args.n_expert, args.intermediate
    router = {"ffn.router.weight": copy_of("mlp.gate.weight", E, D)}
    if fused:
        return router | {
            "ffn.experts.w13.weight": copy_of("mlp.experts.gate_up_proj", E, 2 * I, D),
            "ffn.experts.w2.weight": copy_of("mlp.experts.down_proj", E, D, I),
        }
    halves = {"gate": slice(0, I), "up": slice(I, 2 * I)}
    w13 = {
        f"mlp.experts.{e}.{name}_proj.weight": (e, rows)
        for e in range(E)
        for name, rows in halves.items()
    }
    w2 = {f"mlp.experts.{e}.down_proj.weight": (e,) for e in range(E)}
    return router | {
        "ffn.experts.w13.weight": Recipe((E, 2 * I, D), w13),
        "ffn.experts.w2.weight": Recipe((E, D, I), w2),
    }


def shared_expert_recipes(args: ModelArgs, gated: bool) -> Recipes:
    """A layer's shared expert, if args has a field `shared_intermediate` that is not 0."""
    width = getattr(args, "shared_intermediate", 0)
    if not width:
        return {}
    gate = {"ffn.shared_gate.weight": copy_of("mlp.shared_expert_gate.weight", 1, args.dim)}
    table = dense_recipes("ffn.shared", "mlp.shared_expert", args.dim, width)
    return table | gate if gated else table


def score_bias_recipe(args: ModelArgs) -> Recipes:
    """The bias of sigmoid routing, always in fp32."""
    theirs = "mlp.gate.e_score_correction_bias"
    return {"ffn.score_bias": copy_of(theirs, args.n_expert, dtype=torch.float32)}


def interleaved_to_halves(t: Tensor, width: int, rotary_dim: int) -> Tensor:
    """Reorder each head's last rotary_dim rows, [heads * width, ...], from pairs to halves."""
    kept, rotated = t.unflatten(0, (-1, width)).split((width - rotary_dim, rotary_dim), dim=1)
    rotated = rotated.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((kept, rotated), dim=1).flatten(0, 1)
