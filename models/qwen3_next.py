"""Qwen3-Next: Gated DeltaNet and gated attention 3:1, many small experts, a gated shared expert."""

from functools import partial

import torch
from torch import Tensor

from models.gguf import MadeTable, Values, made_of
from models.layers.gated_hybrid import HybridArgs, HybridFamily
from models.tensors import Recipes, copy_of


class Qwen3Next(HybridFamily):
    name = "qwen3_next"
    defaults = HybridFamily.defaults | dict(
        vocab_size=151936,
        num_hidden_layers=48,
        intermediate_size=5632,
        num_experts=512,
        num_experts_per_tok=10,
        norm_topk_prob=True,
    )
    field_of_key = HybridFamily.field_of_key | {"norm_topk_prob": "norm_topk"}

    gguf = "qwen3next"

    def gguf_config(self, values: Values) -> dict:
        return super().gguf_config(values) | {"norm_topk_prob": True}

    def gguf_layer(self, args: HybridArgs) -> MadeTable:
        """The file has queries, keys and values of all heads, then apart z."""
        K, H, Ck, Cv, _ = args.delta_sizes
        sizes = K * Ck, K * Ck, H * Cv, H * Cv

        def by_key_head(numbers: Tensor) -> Tensor:
            kinds = [part.unflatten(0, (K, -1)) for part in numbers.split(sizes)]
            return torch.cat(kinds, dim=1).flatten()

        apart = made_of("attn_qkv.weight", "attn_gate.weight", rows=by_key_head)
        return super().gguf_layer(args) | {
            "linear_attn.in_proj_qkvz.weight": (apart, made_of("ssm_in.weight")),
            "linear_attn.in_proj_ba.weight": made_of("ssm_ba.weight"),
        }

    # As in config.json of Qwen/Qwen3-Next-80B-A3B-Instruct on the Hugging Face Hub.
    shapes = {
        "Qwen3-Next-80B-A3B": dict(
            max_position_embeddings=262144, rope_theta=1e7, intermediate_size=5120
        )
    }

    def projection_recipes(self, args: HybridArgs) -> Recipes:
        """Published by key head: its q, k, v and z; and the b and a of its value heads."""
        K, H, Ck, Cv, _ = args.delta_sizes
        values = H // K * Cv

        def by_kind(t: Tensor, sizes: tuple[int, ...]) -> Tensor:
            return torch.cat(
                [part.flatten(0, 1) for part in t.unflatten(0, (K, -1)).split(sizes, dim=1)]
            )

        table = {}
        for ours, theirs, sizes in (
            ("wqkvz", "in_proj_qkvz", (Ck, Ck, values, values)),
            ("wba", "in_proj_ba", (H // K, H // K)),
        ):
            name = f"linear_attn.{theirs}.weight"
            order = partial(by_kind, sizes=sizes)
            table[f"attention.{ours}.weight"] = copy_of(
                name, K * sum(sizes), args.dim, transform=order
            )
        return table
