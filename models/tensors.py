"""Which tensors of a published checkpoint make which of ours.

A recipe builds one tensor of ours from tensors of theirs. Theirs have the names that families
share (a family's `renames` map its own to these). Tables of a layer have names without the
layer's prefix; `prefixed` adds it. No file is known here.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from model import ModelArgs

WHOLE = ()  # place of a tensor that is all of ours


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite: one pass, no temporary (as `isfinite` would need)."""
    return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


class Recipe(NamedTuple):
    """How to make one tensor of ours."""

    shape: tuple[int, ...]  # of the assembled sources
    sources: dict[str, tuple]  # tensor of theirs -> its place (slices) in that shape
    transform: Callable[[Tensor], Tensor] | None = None  # assembled sources -> ours
    dtype: torch.dtype | None = None  # of the assembled sources; None: as asked for
    is_valid: Callable[[Tensor], bool] = is_finite  # whether a source has neither NaN nor infinity


def prefixed(table: dict[str, Recipe], layer: int) -> dict[str, Recipe]:
    """Add the layer's prefix to both sides of a layer's table."""
    ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
    return {
        ours + name: recipe._replace(
            sources={theirs + source: place for source, place in recipe.sources.items()}
        )
        for name, recipe in table.items()
    }


def rest_recipes(args: ModelArgs) -> dict[str, Recipe]:
    """Everything outside of the layers."""
    V, D = args.vocab_size, args.dim
    table = {
        "embedding.weight": Recipe((V, D), {"model.embed_tokens.weight": WHOLE}),
        "norm.weight": Recipe((D,), {"model.norm.weight": WHOLE}),
        "head.weight": Recipe((V, D), {"lm_head.weight": WHOLE}),
    }
    if args.tied_embeddings:
        del table["head.weight"]
    return table


def norm_recipes(args: ModelArgs) -> dict[str, Recipe]:
    """A layer's two norms."""
    return {
        "attention_norm.weight": Recipe((args.dim,), {"input_layernorm.weight": WHOLE}),
        "ffn_norm.weight": Recipe((args.dim,), {"post_attention_layernorm.weight": WHOLE}),
    }


def attention_recipes(args: ModelArgs, qkv_bias: bool = False) -> dict[str, Recipe]:
    """A layer's grouped-query attention. qkv_bias: of queries, keys and values alone."""
    D, C = args.dim, args.head_dim
    q, kv = args.n_head * C, args.n_kv_head * C
    rows = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}

    def qkv(leaf: str) -> dict[str, tuple]:
        return {f"self_attn.{name}_proj.{leaf}": (place,) for name, place in rows.items()}

    table = {
        "attention.wqkv.weight": Recipe((q + 2 * kv, D), qkv("weight")),
        "attention.wo.weight": Recipe((D, q), {"self_attn.o_proj.weight": WHOLE}),
    }
    if args.attention_bias or qkv_bias:
        table["attention.wqkv.bias"] = Recipe((q + 2 * kv,), qkv("bias"))
    if args.attention_bias:
        table["attention.wo.bias"] = Recipe((D,), {"self_attn.o_proj.bias": WHOLE})
    if args.qk_norm != "none":
        sizes = (q, kv) if args.qk_norm == "full" else (C, C)
        for name, size in zip(("q_norm", "k_norm"), sizes, strict=True):
            source = {f"self_attn.{name}.weight": WHOLE}
            table[f"attention.{name}.weight"] = Recipe((size,), source)
    return table


def dense_recipes(ours: str, theirs: str, D: int, I: int) -> dict[str, Recipe]:
    """A dense SwiGLU FFN."""
    gate, up = (slice(0, I),), (slice(I, 2 * I),)
    w13 = {f"{theirs}.gate_proj.weight": gate, f"{theirs}.up_proj.weight": up}
    return {
        f"{ours}.w13.weight": Recipe((2 * I, D), w13),
        f"{ours}.w2.weight": Recipe((D, I), {f"{theirs}.down_proj.weight": WHOLE}),
    }


def expert_recipes(args: ModelArgs, fused: bool) -> dict[str, Recipe]:
    """A layer's router and experts. fused: one tensor has all experts (transformers 5)."""
    D, E, I = args.dim, args.n_expert, args.intermediate
    if fused:
        w13 = {"mlp.experts.gate_up_proj": WHOLE}
        w2 = {"mlp.experts.down_proj": WHOLE}
    else:
        halves = {"gate": slice(0, I), "up": slice(I, 2 * I)}
        w13 = {
            f"mlp.experts.{e}.{name}_proj.weight": (e, rows)
            for e in range(E)
            for name, rows in halves.items()
        }
        w2 = {f"mlp.experts.{e}.down_proj.weight": (e,) for e in range(E)}
    return {
        "ffn.router.weight": Recipe((E, D), {"mlp.gate.weight": WHOLE}),
        "ffn.experts.w13.weight": Recipe((E, 2 * I, D), w13),
        "ffn.experts.w2.weight": Recipe((E, D, I), w2),
    }


def shared_expert_recipes(args) -> dict[str, Recipe]:
    """A layer's shared expert, if it has one."""
    width = args.shared_intermediate
    return dense_recipes("ffn.shared", "mlp.shared_expert", args.dim, width) if width else {}


def score_bias_recipe(args: ModelArgs) -> dict[str, Recipe]:
    """The bias of sigmoid routing, always in fp32."""
    source = {"mlp.gate.e_score_correction_bias": WHOLE}
    return {"ffn.score_bias": Recipe((args.n_expert,), source, dtype=torch.float32)}


def biased_norms(args: ModelArgs) -> dict[str, Recipe]:
    """The biases of a layer's two LayerNorms."""
    return {
        "attention_norm.bias": Recipe((args.dim,), {"input_layernorm.bias": WHOLE}),
        "ffn_norm.bias": Recipe((args.dim,), {"post_attention_layernorm.bias": WHOLE}),
    }
