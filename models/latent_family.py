"""What families with latent attention share: args, blocks, config keys, tensors and shards.

DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash differ in routing and RoPE.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model import Block
from models.config import HFConfig, unsupported
from models.family import Shard
from models.gguf import NEXT, MadeTable, Values, dense_config, made_of, mscales
from models.layers.group_routing import GroupRoutedMoE
from models.layers.latent_attention import HEADS_AT_ONCE, LatentAttention
from models.layers.scaled_rope import (
    ScaledRopeArgs,
    ScaledRopeFamily,
    ScaledRopeTransformer,
    scaled_rope_table,
)
from models.layers.yarn import yarn_attention_scale, yarn_scale
from models.tensors import Recipe, Recipes, copy_of, interleaved_to_halves


@dataclass(frozen=True)
class LatentArgs(ScaledRopeArgs):
    """head_dim is that of queries; their last rotary_dim numbers are rotated. n_kv_head is 1."""

    shared_intermediate: int = 0  # intermediate dim of the shared experts together; 0: none
    routed_scale: float = 1.0  # of routing weights
    rotary_dim: int = 64  # R
    n_group: int = 1  # groups of experts
    n_active_group: int = 1  # groups that a token's experts are in
    kv_rank: int = 512  # r, numbers of a position that keys and values are made of
    q_rank: int | None = None  # the same for queries; None: they are made of x
    value_dim: int = 128  # numbers of a head's value
    attention_scale: float | None = None  # of attention scores; None: C ** -0.5

    def constraints(self) -> dict[str, bool]:
        groups = self.n_group in (1, *range(self.n_expert // 2 + 1))
        active = self.n_active * self.n_group <= self.n_expert * self.n_active_group
        plain = self.qk_norm == "none" and not self.clip_qkv
        biased = self.sliding_window or self.attention_bias
        return super().constraints() | {
            "rotary_dim": self.rotary_dim % 2 == 0 and self.head_dim > self.rotary_dim,
            "n_group": self.n_expert % self.n_group == 0 and groups,
            "n_active_group": self.n_active_group <= self.n_group and active,
            "kv_rank": self.n_kv_head == 1 and plain and not biased,
            "value_dim": self.value_dim <= self.head_dim,
        }


class LatentTransformer(ScaledRopeTransformer):
    args: LatentArgs

    moe_class = GroupRoutedMoE

    def make_block(self, args: LatentArgs, layer: int) -> Block:
        block = Block(args, layer)
        block.attention = LatentAttention(args)
        if layer not in args.dense_layers:
            block.ffn = self.moe_class(args)
        return block

    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        return scaled_rope_table(self.args, self.args.rotary_dim, length, device)


class LatentFamily(ScaledRopeFamily):
    """Subclasses have `defaults` of their own."""

    args_class = LatentArgs
    model_class = LatentTransformer
    renamed_keys = {"n_routed_experts": "num_experts"}
    field_of_key = {
        "kv_lora_rank": "kv_rank",
        "q_lora_rank": "q_rank",
        "qk_rope_head_dim": "rotary_dim",
        "v_head_dim": "value_dim",
        "routed_scaling_factor": "routed_scale",
    }
    fixed = {"n_kv_head": 1}
    published_with_yarn = True
    renamed_tensors = ((".mlp.shared_experts.", ".mlp.shared_expert."),)
    topk_methods: tuple[str, ...]  # values of topk_method, the default first

    def arg_fields(self, c: HFConfig) -> dict:
        set_head_dim(c)
        fields = super().arg_fields(c) | group_fields(c, self.topk_methods)
        if c["rope_type"] != "default" and c["mscale_all_dim"]:
            if c.is_null("factor"):
                raise unsupported("factor", None, "mscale_all_dim needs it")
            yarn = c.number("factor"), c.number("mscale_all_dim")
            if yarn_scale(*yarn) != 1:
                fields["attention_scale"] = yarn_attention_scale(fields["head_dim"], *yarn)
        return fields

    gguf = "deepseek2"
    gguf_keys = {
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "qk_rope_head_dim": "rope.dimension_count",
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "num_nextn_predict_layers": NEXT,
    }

    def gguf_config(self, values: Values) -> dict:
        """Sizes of heads are those that keys and values have after their expansion."""
        config = super().gguf_config(values) | dense_config(values)
        for key in ("head_dim", "mlp_only_layers"):
            config.pop(key, None)
        config["num_key_value_heads"] = config["num_attention_heads"]
        keys, rotated = (
            values.get("attention.key_length_mla", values.get("attention.key_length")),
            config.get("qk_rope_head_dim"),
        )
        if type(keys) is int and type(rotated) is int:
            config["qk_nope_head_dim"] = keys - rotated
        width = values.get("attention.value_length_mla", values.get("attention.value_length"))
        config["v_head_dim"] = width
        config.setdefault("q_lora_rank", None)
        if config["rope_parameters"]["rope_type"] == "yarn":
            config["rope_parameters"] |= mscales(values)
        return config

    def gguf_layer(self, args: LatentArgs) -> MadeTable:
        """Newer files have the two parts of kv_b_proj, that of keys transposed; older ones it."""
        made = {
            f"self_attn.{ours}.weight": made_of(f"{theirs}.weight")
            for ours, theirs in {
                "q_a_proj": "attn_q_a",
                "q_b_proj": "attn_q_b",
                "q_a_layernorm": "attn_q_a_norm",
                "kv_a_proj_with_mqa": "attn_kv_a_mqa",
                "kv_a_layernorm": "attn_kv_a_norm",
            }.items()
        }
        apart = made_of("attn_k_b.weight", "attn_v_b.weight", values=join_kv_b)
        kv_b = apart, made_of("attn_kv_b.weight")
        return super().gguf_layer(args) | made | {"self_attn.kv_b_proj.weight": kv_b}

    def attention_memory(self, args: LatentArgs, length: int) -> tuple[int, int]:
        """A chunk expands keys and values, pads and concatenates them: five times their size."""
        expanded = 5 * min(args.n_head, HEADS_AT_ONCE) * length * args.head_dim
        return args.kv_rank + args.rotary_dim, expanded

    def attention_recipes(self, args: LatentArgs) -> Recipes:
        """wqkv is made of what depends on the position alone; wq and wkv are per head."""
        D, H, C = args.dim, args.n_head, args.head_dim
        R, r = args.rotary_dim, args.kv_rank
        n_q, n_kv = args.q_rank or H * C, C - R + args.value_dim

        def pair_halves(t: Tensor) -> Tensor:
            q = t[:n_q] if args.q_rank else interleaved_to_halves(t[:n_q], C, R)
            return torch.cat((q, interleaved_to_halves(t[n_q:], r + R, R)))

        q_source = "self_attn.q_a_proj.weight" if args.q_rank else "self_attn.q_proj.weight"
        sources = {
            q_source: (slice(0, n_q),),
            "self_attn.kv_a_proj_with_mqa.weight": (slice(n_q, n_q + r + R),),
        }
        wkv = "self_attn.kv_b_proj.weight"
        table = {
            "attention.wqkv.weight": Recipe((n_q + r + R, D), sources, pair_halves),
            "attention.kv_norm.weight": copy_of("self_attn.kv_a_layernorm.weight", r),
            "attention.wkv": copy_of(
                wkv, H * n_kv, r, transform=lambda t: t.unflatten(0, (H, n_kv))
            ),
            "attention.wo.weight": copy_of("self_attn.o_proj.weight", D, H * args.value_dim),
        }
        if r_q := args.q_rank:
            wq = "self_attn.q_b_proj.weight"
            table |= {
                "attention.q_norm.weight": copy_of("self_attn.q_a_layernorm.weight", r_q),
                "attention.wq.weight": copy_of(
                    wq, H * C, r_q, transform=lambda t: interleaved_to_halves(t, C, R)
                ),
            }
        return table

    def shard_table(self, args: LatentArgs) -> dict[str, Shard]:
        """All ranks have the latent projections, and so the same cache; heads are sharded."""
        queries, values = (args.n_head, args.head_dim), (args.n_head, args.value_dim)
        table = super().shard_table(args)
        table["attention"] = Shard(0, ((args.n_head, 1),))  # wkv
        table["attention.wo"] = Shard(1, (values,))
        if args.q_rank:
            del table["attention.wqkv"]
            table["attention.wq"] = Shard(0, (queries,))
        else:
            table["attention.wqkv"] = Shard(0, (queries, (1, args.kv_rank + args.rotary_dim)))
        return table


def set_head_dim(c: HFConfig) -> None:
    """Set head_dim to that of queries; check the head sizes of latent attention."""
    heads = c.integer("num_attention_heads")
    if c.setdefault("num_key_value_heads", heads) != heads:
        why = f"with latent attention, only num_attention_heads = {heads} is"
        c.refuse("num_key_value_heads", why)
    rotated = c.integer("qk_rope_head_dim")
    if c.get("head_dim", rotated) != rotated:  # transformers' name of the rotated part
        c.refuse("head_dim", f"only qk_rope_head_dim = {rotated} is")
    c["head_dim"] = c.integer("qk_nope_head_dim") + rotated
    if rotated % 2:
        c.refuse("qk_rope_head_dim", "it must be even to be rotated")
    if c.integer("v_head_dim") > c["head_dim"]:
        c.refuse("v_head_dim", f"queries have {c['head_dim']}")


def group_fields(c: HFConfig, methods: tuple[str, ...]) -> dict:
    """Return the groups of experts. methods: values of topk_method, the default first."""
    if c.setdefault("topk_method", methods[0]) not in methods:
        c.refuse("topk_method", f"only {' and '.join(map(repr, methods))} can be run")
    if c["topk_method"] == "greedy":
        return {}
    groups, active, n_expert = c.integer("n_group"), c.integer("topk_group"), c["num_experts"]
    members, rest = divmod(n_expert, groups)
    if rest or members < 2:
        c.refuse("n_group", f"groups of at least two of {n_expert} experts are needed")
    if active > groups or c["num_experts_per_tok"] > members * active:
        c.refuse("topk_group", f"there are {groups} groups of {members} experts")
    return {"n_group": groups, "n_active_group": active}


def join_kv_b(keys: Tensor, values: Tensor) -> Tensor:
    """keys [H, r, C - R], values [H, value_dim, r] -> kv_b_proj [H * (C - R + value_dim), r]."""
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
