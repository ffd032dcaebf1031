"""Phi-3.5-MoE: LayerNorms, SparseMixer routing, LongRoPE."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model import Block, Linear, ModelArgs, MoE, Transformer
from models.config import HFConfig
from models.family import Family
from models.tensors import Recipes, copy_of, norm_recipes
from ops.plain.rope import rope_frequencies, rope_table
from ops.plain.topk import top_k


@dataclass(frozen=True)
class PhimoeArgs(ModelArgs):
    mixer_eps: float = 0.01  # of SparseMixer's weights
    head_bias: bool = False
    rope_factors: tuple[float, ...] = ()  # LongRoPE: factors of the C / 2 wavelengths
    rope_scale: float = 1.0  # of cosines and sines

    def constraints(self) -> dict[str, bool]:
        sized = len(self.rope_factors) in (0, self.head_dim // 2)
        return super().constraints() | {"rope_factors": sized and are_factors(self.rope_factors)}


class SparseMixerMoE(MoE):
    """Routing weights by SparseMixer (Liu et al. 2024, "GRIN")."""

    def __init__(self, args: PhimoeArgs):
        super().__init__(args)
        self.mixer_eps = args.mixer_eps

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Each weight is a softmax over the experts that are left and nearly as good."""
        scores = scores.float()
        best, expert_indices = top_k(scores, self.n_active)
        weights, left = [], scores
        experts = torch.arange(scores.shape[-1], device=scores.device)
        for score, index in zip(best, expert_indices.split(1, dim=-1), strict=True):
            near = (score - left) / scores.abs().maximum(score) <= 2 * self.mixer_eps
            total = torch.where(near, (left - score).exp(), 0.0).sum(dim=-1, keepdim=True)
            weights.append(1 / total)
            left = torch.where(experts == index, float("-inf"), left)
        return expert_indices, torch.cat(weights, dim=-1)


class PhimoeTransformer(Transformer):
    args: PhimoeArgs

    def __init__(self, args: PhimoeArgs):
        super().__init__(args)
        self.norm = nn.LayerNorm(args.dim, args.norm_eps)
        self.head = Linear(args.dim, args.vocab_size, bias=args.head_bias)
        self.tie_weights()
        self.requires_grad_(False)

    def make_block(self, args: PhimoeArgs, layer: int) -> Block:
        block = Block(args, layer)
        block.attention_norm = nn.LayerNorm(args.dim, args.norm_eps)
        block.ffn_norm = nn.LayerNorm(args.dim, args.norm_eps)
        block.ffn = SparseMixerMoE(args)
        return block

    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        args = self.args
        frequencies = rope_frequencies(args.head_dim, args.rope_theta, device)
        if args.rope_factors:
            frequencies = frequencies / torch.tensor(args.rope_factors, device=device)
        return rope_table(frequencies, length, args.rope_scale)


class Phimoe(Family):
    name = "phimoe"
    args_class = PhimoeArgs
    model_class = PhimoeTransformer
    defaults = dict(
        vocab_size=32064,
        hidden_size=4096,
        num_hidden_layers=32,
        max_position_embeddings=131072,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        num_local_experts=16,
        num_experts_per_tok=2,
        intermediate_size=6400,
        bos_token_id=1,
        eos_token_id=2,
        router_jitter_noise=0.01,
        lm_head_bias=False,
    )
    renamed_keys = {"num_local_experts": "num_experts"}
    field_of_key = {
        "attention_bias": "attention_bias",
        "router_jitter_noise": "mixer_eps",
        "lm_head_bias": "head_bias",
    }
    fixed = {"norm_topk": False}
    has_window = True
    rope_types = ("default", "longrope")
    renamed_tensors = (
        (".block_sparse_moe.", ".mlp."),
        (".mlp.router.", ".mlp.gate."),  # as transformers 5 holds it in memory
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    )

    def arg_fields(self, c: HFConfig) -> dict:
        if c.integer("num_experts_per_tok") != 2:
            c.refuse("num_experts_per_tok", "it must be 2 for SparseMixer")
        return super().arg_fields(c) | longrope_fields(c)

    def norm_recipes(self, args: PhimoeArgs) -> Recipes:
        return norm_recipes(args) | norm_recipes(args, "bias")

    def rest_recipes(self, args: PhimoeArgs) -> Recipes:
        table = super().rest_recipes(args)
        table["norm.bias"] = copy_of("model.norm.bias", args.dim)
        if args.head_bias:
            table["head.bias"] = copy_of("lm_head.bias", args.vocab_size)
        return table

    shapes = {
        "Phi-3.5-MoE": dict(
            rope_theta=1e4,
            attention_bias=True,
            lm_head_bias=True,
            sliding_window=131072,
            rope_scaling=dict(
                type="longrope",
                short_factor=[1.0] * 64,  # not the published ones, which change no time
                long_factor=[1.0] * 64,
                short_mscale=1.243163121016122,
                long_mscale=1.243163121016122,
                original_max_position_embeddings=4096,
            ),
        ),
    }


def are_factors(values) -> bool:
    """Whether all are positive numbers of fp32."""
    return all(type(n) in (int, float) and 0 < n < 1e30 for n in values)


def longrope_fields(c: HFConfig) -> dict:
    """Return the fields of LongRoPE's table for short sequences; sequences are limited to those.

    Beyond the original positions another table holds, also for keys that are in the cache already.
    """
    if c["rope_type"] != "longrope":
        return {}
    pairs, factors = c["head_dim"] // 2, c["short_factor"]
    if not isinstance(factors, list) or len(factors) != pairs or not are_factors(factors):
        c.refuse("short_factor", f"{pairs} positive numbers are needed")
    original = c.integer("original_max_position_embeddings")
    return {
        "max_position": min(c.integer("max_position_embeddings"), original),
        "rope_factors": tuple(map(float, factors)),
        "rope_scale": c.number("short_mscale"),
    }
