"""gpt-oss: attention sinks, windows in every other layer, biased experts, clamped SwiGLU."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from formats import FORMATS
from formats.mxfp4 import are_finite_scales, published_codes
from model import Block, ExpertLinear, Linear, MoE, new_parameter
from models.family import PublishedLayout
from models.gguf import POST_ATTENTION_NORM, Values, made_of
from models.layers.scaled_rope import ScaledRopeTransformer
from models.layers.sinks import SinkAttention, SinkFamily
from models.layers.windows import WindowedArgs
from models.tensors import WHOLE, Recipe, Recipes, copy_of
from ops.declared import Activation, ExpertAdditions


@dataclass(frozen=True)
class GptOssArgs(WindowedArgs):
    swiglu_limit: float = 7.0  # clamp of gate and up
    swiglu_alpha: float = 1.702  # slope of the gate's sigmoid


class BiasedExpertLinear(ExpertLinear):
    """E linear maps with biases [E, out]. An index of E, of an expert elsewhere, gets any bias."""

    def __init__(self, n_expert: int, in_features: int, out_features: int):
        super().__init__(n_expert, in_features, out_features)
        self.bias = new_parameter(n_expert, out_features)

    def gather(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        return super().gather(x, expert_indices) + self.bias[self.clamped(expert_indices)]

    def gather_gated(self, x: Tensor, expert_indices: Tensor, activation) -> Tensor:
        gate_bias, up_bias = self.bias[self.clamped(expert_indices)].chunk(2, dim=-1)

        def biased(gate: Tensor, up: Tensor) -> Tensor:
            return activation(gate + gate_bias, up + up_bias)

        return super().gather_gated(x, expert_indices, biased)

    def grouped(self, x: Tensor, group_ends: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        experts = torch.searchsorted(group_ends, rows, right=True)
        return super().grouped(x, group_ends) + self.bias[self.clamped(experts)]

    def clamped(self, experts: Tensor) -> Tensor:
        return experts.clamp(max=len(self.bias) - 1)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """gate, up [..., I] -> gate * sigmoid(alpha * gate) * (up + 1), both clamped to `limit`."""
    gate = gate.clamp(max=limit)
    return gate * (alpha * gate).sigmoid() * (up.clamp(-limit, limit) + 1)


class GptOssMoE(MoE):
    def __init__(self, args: GptOssArgs):
        super().__init__(args)
        E, D, I = args.n_expert, args.dim, args.intermediate
        self.router = Linear(D, E, bias=True)
        self.experts.w13 = BiasedExpertLinear(E, D, 2 * I)
        self.experts.w2 = BiasedExpertLinear(E, I, D)
        self.clamp = {"limit": args.swiglu_limit, "alpha": args.swiglu_alpha}
        self.experts.activation = partial(clamped_swiglu, **self.clamp)

    def fused_decode_settings(self) -> ExpertAdditions:
        return ExpertAdditions(activation=Activation("clamped", **self.clamp))


class GptOssTransformer(ScaledRopeTransformer):
    args: GptOssArgs

    def make_block(self, args: GptOssArgs, layer: int) -> Block:
        block = Block(args, layer)
        block.attention = SinkAttention(args)
        block.attention.window = args.window_of(layer)
        block.ffn = GptOssMoE(args)
        return block


class GptOss(SinkFamily):
    name = "gpt_oss"
    args_class = GptOssArgs
    model_class = GptOssTransformer
    defaults = dict(
        vocab_size=201088,
        hidden_size=2880,
        num_hidden_layers=36,
        max_position_embeddings=131072,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        rope_theta=1.5e5,
        rms_norm_eps=1e-5,
        num_local_experts=128,
        num_experts_per_tok=4,
        intermediate_size=2880,
        attention_bias=True,
        sliding_window=128,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
    )
    renamed_keys = {"num_local_experts": "num_experts"}
    field_of_key = {
        "attention_bias": "attention_bias",
        "swiglu_limit": "swiglu_limit",
        "swiglu_alpha": "swiglu_alpha",
    }
    rope = dict(
        rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
    )
    published_with_yarn = True
    published = ("mxfp4",)
    renamed_tensors = ((".mlp.router.", ".mlp.gate."),)
    gguf = "gpt-oss"
    gguf_keys = {"sliding_window": "attention.sliding_window"}
    gguf_tensors = POST_ATTENTION_NORM | {
        "self_attn.sinks": made_of("attn_sinks.weight"),
        "mlp.experts.gate_proj_bias": made_of("ffn_gate_exps.bias"),
        "mlp.experts.up_proj_bias": made_of("ffn_up_exps.bias"),
        "mlp.experts.down_proj_bias": made_of("ffn_down_exps.bias"),
    }

    def gguf_config(self, values: Values) -> dict:
        """The file has the width of experts alone, and not that YaRN's range stays unrounded."""
        config = super().gguf_config(values)
        width = values.get("expert_feed_forward_length", config.get("intermediate_size"))
        rope = config["rope_parameters"]
        if rope["rope_type"] == "yarn":
            rope["truncate"] = False
        return config | {"intermediate_size": width}

    def usual_full(self, layer: int, n_layer: int) -> bool:
        """Every other layer has the sliding window."""
        return layer % 2 == 1

    def expert_recipes(self, args: GptOssArgs, layout: PublishedLayout) -> Recipes:
        """Gate and up are interleaved; weights are transposed, or in MXFP4 as published."""
        D, E, I = args.dim, args.n_expert, args.intermediate
        if layout.separate:
            return super().expert_recipes(args, layout) | separate_biases(E, D, I)
        table = {
            "ffn.router.weight": copy_of("mlp.gate.weight", E, D),
            "ffn.router.bias": copy_of("mlp.gate.bias", E),
        }
        recipes = packed_recipes if layout.packed else transposed_recipes
        for ours, theirs, rows, width, order in (
            ("ffn.experts.w13", "mlp.experts.gate_up_proj", 2 * I, D, deinterleave),
            ("ffn.experts.w2", "mlp.experts.down_proj", D, I, lambda t: t),
        ):
            table[f"{ours}.bias"] = copy_of(f"{theirs}_bias", E, rows, transform=order)
            table |= recipes(ours, theirs, (E, rows, width), order)
        return table

    shapes = {
        "gpt-oss-20b": dict(num_hidden_layers=24, num_local_experts=32),
        "gpt-oss-120b": {},
    }


def separate_biases(E: int, D: int, I: int) -> Recipes:
    """The recipes of the router's and the experts' biases, gate and up apart."""
    whole = slice(None)
    gate_up: dict[str, tuple] = {
        "mlp.experts.gate_proj_bias": (whole, slice(0, I)),
        "mlp.experts.up_proj_bias": (whole, slice(I, 2 * I)),
    }
    return {
        "ffn.router.bias": copy_of("mlp.gate.bias", E),
        "ffn.experts.w13.bias": Recipe((E, 2 * I), gate_up),
        "ffn.experts.w2.bias": copy_of("mlp.experts.down_proj_bias", E, D),
    }


def deinterleave(t: Tensor) -> Tensor:
    """[E, 2 I, ...], gate and up rows in turn -> all gate rows, then all up rows."""
    return t.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def transposed_recipes(ours: str, theirs: str, shape: tuple, order) -> Recipes:
    """The recipe of a weight [E, rows, width] that is published as [E, width, rows]."""
    E, rows, width = shape
    recipe = copy_of(theirs, E, width, rows, transform=lambda t: order(t.transpose(1, 2)))
    return {f"{ours}.weight": recipe}


def packed_recipes(ours: str, theirs: str, shape: tuple, order) -> Recipes:
    """The recipes of a weight's codes and scales in MXFP4."""
    E, rows, width = shape
    groups = E, rows, width // FORMATS["mxfp4"].choose_group(width, None)

    def codes(blocks: Tensor) -> Tensor:
        # One expert at a time, so that temporaries take the memory of one.
        return order(torch.stack([published_codes(expert) for expert in blocks]))

    byte, blocks, scales = torch.uint8, f"{theirs}_blocks", f"{theirs}_scales"
    return {
        f"{ours}.codes": Recipe((*groups, 16), {blocks: WHOLE}, codes, byte, lambda t: True),
        f"{ours}.scale": Recipe(groups, {scales: WHOLE}, order, byte, are_finite_scales),
    }
