"""Which tensors of a Hugging Face checkpoint make which of ours, and what becomes of them on the way.

A recipe says of one tensor of ours where each of theirs goes. Theirs have the names that the families share (the rest
is Family.renames). Tables of a layer's parts have names without the layer, and a Recipe's fields as plain tuples:
`layer_recipes` completes both. No file is known here.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from args import ModelArgs
from packing import FORMATS, in_words, mxfp4_codes


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass and with no memory (as `isfinite` would take)."""
    return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


class Recipe(NamedTuple):
    """How a tensor of ours is made: the place of each tensor of theirs in one of this shape, and what becomes of it."""

    shape: tuple[int, ...]
    parts: dict[str, tuple]  # a tensor of theirs: its place
    make: Callable[[Tensor], Tensor] | None = None  # of the parts put together, ours; None: they are that
    dtype: torch.dtype | None = None  # of the parts put together; None: the one that is asked for
    finite: Callable[[Tensor], bool] = is_finite  # whether a part holds neither NaN nor infinity


WHOLE = ()  # the place of a tensor that is all of ours
SCALE = "_scale_inv"  # after the name of a weight in fp8: that of its scales, by which codes are multiplied
LARGEST_EXPONENT = 252  # an e8m0 scale with which every e2m1 number is a finite one of fp32


def layer_recipes(args: ModelArgs, layer: int, fused: bool, packed: bool = False) -> dict[str, Recipe]:
    """The recipes of one layer; `fused` if the source holds all experts of a layer in one tensor, `packed` in MXFP4."""
    if layer in args.dense_layers:
        ffn = dense_recipes("ffn", "mlp", args.dim, args.dense_intermediate)
    else:
        ffn = expert_recipes(args, fused, packed)
    prefix = f"model.layers.{layer}."
    return {
        f"layers.{layer}.{name}": Recipe(shape, {prefix + theirs: place for theirs, place in parts.items()}, *more)
        for name, (shape, parts, *more) in (attention_recipes(args) | ffn).items()
    }


def attention_recipes(args: ModelArgs) -> dict[str, tuple]:
    """A layer's attention, and its two norms."""
    D, C = args.dim, args.head_dim
    q, kv = args.n_head * C, args.n_kv_head * C
    qkv = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
    table = {
        "attention_norm.weight": ((D,), {"input_layernorm.weight": WHOLE}),
        "attention.wqkv.weight": ((q + 2 * kv, D), {f"self_attn.{x}_proj.weight": (rows,) for x, rows in qkv.items()}),
        "attention.wo.weight": ((D, q), {"self_attn.o_proj.weight": WHOLE}),
        "ffn_norm.weight": ((D,), {"post_attention_layernorm.weight": WHOLE}),
    } | (latent_recipes(args) if args.kv_rank else {})
    if args.layer_norm:
        table["attention_norm.bias"] = (D,), {"input_layernorm.bias": WHOLE}
        table["ffn_norm.bias"] = (D,), {"post_attention_layernorm.bias": WHOLE}
    if args.attention_bias or args.qkv_bias:
        biases = {f"self_attn.{x}_proj.bias": (rows,) for x, rows in qkv.items()}
        table["attention.wqkv.bias"] = (q + 2 * kv,), biases
    if args.attention_bias:
        table["attention.wo.bias"] = (D,), {"self_attn.o_proj.bias": WHOLE}
    if args.attention_sinks:
        table["attention.sinks"] = (args.n_head,), {"self_attn.sinks": WHOLE}
    if args.qk_norm != "none":
        full = args.qk_norm == "full"
        table |= {
            "attention.q_norm.weight": ((q if full else C,), {"self_attn.q_norm.weight": WHOLE}),
            "attention.k_norm.weight": ((kv if full else C,), {"self_attn.k_norm.weight": WHOLE}),
        }
    return table


def in_half_pairs(t: Tensor, width: int, turning: int) -> Tensor:
    """Heads' rows [heads * width, ...], the last `turning` of each rotated in pairs of neighbours -> half with half."""
    still, turned = t.unflatten(0, (-1, width)).split((width - turning, turning), dim=1)
    turned = turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((still, turned), dim=1).flatten(0, 1)


def latent_recipes(args: ModelArgs) -> dict[str, tuple]:
    """A layer's latent attention: what is of a position in wqkv, what is of each head in wq and wkv."""
    D, H, C, R, r = args.dim, args.n_head, args.head_dim, args.rotary_dim, args.kv_rank
    begin, made = args.q_rank or H * C, args.head_dim - R + args.value_dim
    q, kv = slice(0, begin), slice(begin, begin + r + R)

    def turn(t: Tensor) -> Tensor:
        first = t[:begin] if args.q_rank else in_half_pairs(t[:begin], C, R)
        return torch.cat((first, in_half_pairs(t[begin:], r + R, R)))

    parts = {f"self_attn.{'q_a' if args.q_rank else 'q'}_proj.weight": (q,)}
    parts["self_attn.kv_a_proj_with_mqa.weight"] = (kv,)
    table = {
        "attention.wqkv.weight": ((begin + r + R, D), parts, turn),
        "attention.kv_norm.weight": ((r,), {"self_attn.kv_a_layernorm.weight": WHOLE}),
        "attention.wkv": ((H * made, r), {"self_attn.kv_b_proj.weight": WHOLE}, lambda t: t.unflatten(0, (H, made))),
        "attention.wo.weight": ((D, H * args.value_dim), {"self_attn.o_proj.weight": WHOLE}),
    }
    if args.q_rank:
        table["attention.q_norm.weight"] = (args.q_rank,), {"self_attn.q_a_layernorm.weight": WHOLE}
        wq = {"self_attn.q_b_proj.weight": WHOLE}
        table["attention.wq.weight"] = (H * C, args.q_rank), wq, lambda t: in_half_pairs(t, C, R)
    return table


def dense_recipes(ours: str, theirs: str, D: int, I: int) -> dict[str, tuple]:
    """An FFN without experts."""
    gate, up = (slice(0, I),), (slice(I, 2 * I),)
    return {
        f"{ours}.w13.weight": ((2 * I, D), {f"{theirs}.gate_proj.weight": gate, f"{theirs}.up_proj.weight": up}),
        f"{ours}.w2.weight": ((D, I), {f"{theirs}.down_proj.weight": WHOLE}),
    }


def expert_recipes(args: ModelArgs, fused: bool, packed: bool) -> dict[str, tuple]:
    """A layer's router and experts; `fused` and `packed` as `layer_recipes` has them."""
    D, E, I = args.dim, args.n_expert, args.intermediate
    halves = {"gate": slice(0, I), "up": slice(I, 2 * I)}
    w13 = {f"mlp.experts.{e}.{x}_proj.weight": (e, rows) for e in range(E) for x, rows in halves.items()}
    w2 = {f"mlp.experts.{e}.down_proj.weight": (e,) for e in range(E)}
    if fused:  # as transformers 5 holds them in memory, and saves them if asked to
        w13, w2 = {"mlp.experts.gate_up_proj": WHOLE}, {"mlp.experts.down_proj": WHOLE}
    table = {"ffn.router.weight": ((E, D), {"mlp.gate.weight": WHOLE})}
    if args.router_bias:
        table["ffn.router.bias"] = (E,), {"mlp.gate.bias": WHOLE}
    if args.expert_bias:
        table |= interleaved_recipes(args, packed)
    else:
        table |= {"ffn.experts.w13.weight": ((E, 2 * I, D), w13), "ffn.experts.w2.weight": ((E, D, I), w2)}
    if args.shared_intermediate:
        table |= dense_recipes("ffn.shared", "mlp.shared_expert", D, args.shared_intermediate)
        if args.shared_gated:
            table["ffn.shared_gate.weight"] = (1, D), {"mlp.shared_expert_gate.weight": WHOLE}
    if args.scoring == "sigmoid":  # what corrects the choice of experts does so in its last digits
        table["ffn.score_bias"] = (E,), {"mlp.gate.e_score_correction_bias": WHOLE}, None, torch.float32
    return table


def in_halves(t: Tensor) -> Tensor:
    """[E, 2I, ...], gate and up in turns -> gate, then up."""
    return t.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def each_expert(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """The same for stacked experts, one at a time: what is in between takes no more memory than for one."""
    return torch.stack([function(expert) for expert in t])


def interleaved_recipes(args: ModelArgs, packed: bool) -> dict[str, tuple]:
    """A layer's experts where gate and up are interleaved: transposed weights, or MXFP4 as published; and biases."""
    D, E, I = args.dim, args.n_expert, args.intermediate

    def recipes(ours: str, theirs: str, rows: int, width: int, order: Callable[[Tensor], Tensor]) -> dict[str, tuple]:
        table = {f"{ours}.bias": ((E, rows), {f"{theirs}_bias": WHOLE}, order)}
        if not packed:
            transposed = (E, width, rows), {theirs: WHOLE}, lambda t: order(t.transpose(1, 2))
            return table | {f"{ours}.weight": transposed}
        groups = E, rows, width // FORMATS["mxfp4"].choose_group(width, None)
        codes = {f"{theirs}_blocks": WHOLE}, lambda t: order(each_expert(mxfp4_codes, t)), torch.uint8, lambda t: True
        scale = {f"{theirs}_scales": WHOLE}, order, torch.uint8, lambda t: t.max() <= LARGEST_EXPONENT
        return table | {f"{ours}.codes": ((*groups, 16), *codes), f"{ours}.scale": (groups, *scale)}

    return recipes("ffn.experts.w13", "mlp.experts.gate_up_proj", 2 * I, D, in_halves) | recipes(
        "ffn.experts.w2", "mlp.experts.down_proj", D, I, lambda t: t
    )


def rest_recipes(args: ModelArgs) -> dict[str, Recipe]:
    """The recipes of everything outside the layers."""
    V, D = args.vocab_size, args.dim
    table = {
        "embedding.weight": ((V, D), {"model.embed_tokens.weight": WHOLE}),
        "norm.weight": ((D,), {"model.norm.weight": WHOLE}),
        "head.weight": ((V, D), {"lm_head.weight": WHOLE}),
    }
    if args.layer_norm:
        table["norm.bias"] = (D,), {"model.norm.bias": WHOLE}
    if args.head_bias:
        table["head.bias"] = (V,), {"lm_head.bias": WHOLE}
    if args.tied_embeddings:
        del table["head.weight"]
    return {name: Recipe(*recipe) for name, recipe in table.items()}


def part_shape(shape: tuple[int, ...], place: tuple) -> tuple[int, ...]:
    """That of what has this place in a tensor."""
    sizes = (len(range(n)[at]) for n, at in zip(shape, place, strict=False) if isinstance(at, slice))
    return *sizes, *shape[len(place) :]


def block_recipes(ours: str, recipe: Recipe, format: str, original: Callable[[str], str]) -> dict[str, Recipe]:
    """A weight's recipe -> those of its codes and scales, where theirs are in fp8 with a scale for each block.

    original: a tensor's name as the files have it. ValueError where the blocks are not whole ones of ours.
    """
    group, path = FORMATS[format].group, ours.removesuffix(".weight")
    shape, dtype = FORMATS[format].layout(recipe.shape, group)["scale"]
    make, scales, rows = recipe.make or (lambda t: t), {}, torch.arange(recipe.shape[-2]).unsqueeze(1)
    if not torch.equal(make(rows) // group, rows // group):
        raise ValueError(f"{ours}: rows would leave their blocks of {group}; fetch the original bf16 checkpoint")
    for name, place in recipe.parts.items():
        sizes = part_shape(recipe.shape, place)
        begin = next((at.start for at in place if isinstance(at, slice)), 0)
        if begin % group or sizes[-1] % group:
            what = f"{original(name)} {list(sizes)} has no place among whole blocks of {group}"
            raise ValueError(f"{what}, at row {begin} of {ours}; fetch the original bf16 checkpoint")
        scales[name + SCALE] = tuple(
            slice(at.start // group, -(-at.stop // group)) if isinstance(at, slice) else at for at in place
        )
    return {
        f"{path}.codes": recipe._replace(
            make=lambda t: in_words(make(t), group),
            dtype=torch.float8_e4m3fn,
            finite=lambda t: not ((t.view(torch.uint8) & 0x7F) == 0x7F).any(),
        ),
        f"{path}.scale": Recipe(shape, scales, dtype=dtype),
    }
