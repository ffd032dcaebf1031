"""DeepSeek-V2 and DeepSeek-V3: latent attention, groups of experts, shared experts."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model import Block, Transformer
from models.config import HFConfig
from models.family import Family, PublishedLayout, Shard
from models.layers.group_routing import GroupRoutedMoE, SigmoidRoutedMoE
from models.layers.latent_attention import HEADS_AT_ONCE, LatentAttention
from models.layers.yarn import YarnArgs, read_yarn, yarn_rope_table, yarn_scale, yarn_to_hf
from models.tensors import Recipe, Recipes, copy_of, score_bias_recipe


@dataclass(frozen=True)
class DeepseekArgs(YarnArgs):
    """head_dim is that of queries; their last rotary_dim numbers are rotated. n_kv_head is 1."""

    shared_intermediate: int = 0  # intermediate dim of the shared experts together; 0: none
    routed_scale: float = 1.0  # of routing weights
    rotary_dim: int = 64  # R
    attention_scale: float | None = None  # of attention scores; None: C ** -0.5
    n_group: int = 1  # groups of experts
    n_active_group: int = 1  # groups that a token's experts are in
    kv_rank: int = 512  # r, numbers of a position that keys and values are made of
    q_rank: int | None = None  # the same for queries; None: they are made of x
    value_dim: int = 128  # numbers of a head's value

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


class DeepseekTransformer(Transformer):
    args: DeepseekArgs

    moe_class = GroupRoutedMoE

    def make_block(self, args: DeepseekArgs, layer: int) -> Block:
        block = Block(args, layer)
        block.attention = LatentAttention(args)
        if layer not in args.dense_layers:
            block.ffn = self.moe_class(args)
        return block

    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        return yarn_rope_table(self.args, self.args.rotary_dim, length, device)


class DeepseekV3Transformer(DeepseekTransformer):
    moe_class = SigmoidRoutedMoE


YARN_40 = dict(type="yarn", factor=40, original_max_position_embeddings=4096)


class DeepseekV2(Family):
    name = "deepseek_v2"
    args_class = DeepseekArgs
    model_class = DeepseekTransformer
    defaults = dict(
        vocab_size=102400,
        hidden_size=4096,
        num_hidden_layers=32,
        max_position_embeddings=2048,
        num_attention_heads=32,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        bos_token_id=1,
        eos_token_id=2,
        n_routed_experts=64,
        moe_intermediate_size=1407,
        intermediate_size=11008,
        n_shared_experts=2,
        first_k_dense_replace=0,
        routed_scaling_factor=1.0,
        n_group=None,
        topk_group=None,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts_per_tok=None,
    )
    renamed_keys = {"n_routed_experts": "num_experts"}
    field_of_key = {
        "kv_lora_rank": "kv_rank",
        "q_lora_rank": "q_rank",
        "qk_rope_head_dim": "rotary_dim",
        "v_head_dim": "value_dim",
        "routed_scaling_factor": "routed_scale",
    }
    fixed = {"n_kv_head": 1, "norm_topk": False}
    only = {"attention_bias": False, "norm_topk_prob": False}
    rope_types = ("default", "yarn")
    renamed_tensors = ((".mlp.shared_experts.", ".mlp.shared_expert."),)
    topk_methods = ("greedy", "group_limited_greedy")  # the first is the default

    def arg_fields(self, c: HFConfig) -> dict:
        set_head_dim(c)
        fields = super().arg_fields(c) | group_fields(c, self.topk_methods) | {"yarn": read_yarn(c)}
        if fields["yarn"] and c["mscale_all_dim"]:
            scale = yarn_scale(fields["yarn"].factor, c.number("mscale_all_dim"))
            fields["attention_scale"] = fields["head_dim"] ** -0.5 * scale**2
        return fields

    def attention_memory(self, args: DeepseekArgs, length: int) -> tuple[int, int]:
        """A chunk expands keys and values, pads and concatenates them: five times their size."""
        expanded = 5 * min(args.n_head, HEADS_AT_ONCE) * length * args.head_dim
        return args.kv_rank + args.rotary_dim, expanded

    def to_hf(self, args: DeepseekArgs) -> dict:
        config = super().to_hf(args) | {
            "num_key_value_heads": args.n_head,
            "head_dim": args.rotary_dim,
            "qk_nope_head_dim": args.head_dim - args.rotary_dim,
            "n_group": args.n_group,
            "topk_group": args.n_active_group,
            "topk_method": self.topk_methods[args.n_group > 1 and len(self.topk_methods) > 1],
        }
        rope = config["rope_parameters"]
        if args.yarn:
            rope |= yarn_to_hf(args.yarn)
            if args.attention_scale:  # invert yarn_scale
                scale = (args.attention_scale * args.head_dim**0.5) ** 0.5
                rope["mscale_all_dim"] = round((scale - 1) / (0.1 * math.log(args.yarn.factor)), 6)
        return config

    def attention_recipes(self, args: DeepseekArgs) -> Recipes:
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

    def shard_table(self, args: DeepseekArgs) -> dict[str, Shard]:
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

    shapes = {
        "DeepSeek-V2-Lite": dict(
            hidden_size=2048,
            num_hidden_layers=27,
            max_position_embeddings=163840,
            num_attention_heads=16,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            intermediate_size=10944,
            first_k_dense_replace=1,
            q_lora_rank=None,
            rope_scaling=YARN_40 | dict(mscale=0.707, mscale_all_dim=0.707),
        ),
    }


class DeepseekV3(DeepseekV2):
    name = "deepseek_v3"
    model_class = DeepseekV3Transformer
    defaults = DeepseekV2.defaults | dict(
        vocab_size=129280,
        hidden_size=7168,
        num_hidden_layers=61,
        max_position_embeddings=4096,
        num_attention_heads=128,
        num_key_value_heads=128,
        bos_token_id=0,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        intermediate_size=18432,
        n_shared_experts=1,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        eos_token_id=1,
        num_nextn_predict_layers=1,
    )
    field_of_key = DeepseekV2.field_of_key | {"norm_topk_prob": "norm_topk"}
    fixed = {"n_kv_head": 1}
    only = {"attention_bias": False, "scoring_func": "sigmoid"}
    topk_methods = ("noaux_tc",)

    def expert_recipes(self, args: DeepseekArgs, layout: PublishedLayout) -> Recipes:
        return super().expert_recipes(args, layout) | score_bias_recipe(args)

    shapes = {
        "DeepSeek-V3": dict(
            max_position_embeddings=163840,
            rope_scaling=YARN_40 | dict(mscale=1.0, mscale_all_dim=1.0),
        ),
    }


def set_head_dim(c: HFConfig) -> None:
    """Set head_dim to that of queries; check the head sizes of latent attention."""
    heads = c.integer("num_attention_heads")
    if c.setdefault("num_key_value_heads", heads) != heads:
        why = f"with latent attention, only num_attention_heads = {heads} is"
        c.refuse("num_key_value_heads", why)
    c["head_dim"] = c.integer("qk_nope_head_dim") + c.integer("qk_rope_head_dim")
    if c["qk_rope_head_dim"] % 2:
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


def interleaved_to_halves(t: Tensor, width: int, rotary_dim: int) -> Tensor:
    """Reorder each head's last rotary_dim rows, [heads * width, ...], from pairs to halves."""
    kept, rotated = t.unflatten(0, (-1, width)).split((width - rotary_dim, rotary_dim), dim=1)
    rotated = rotated.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((kept, rotated), dim=1).flatten(0, 1)
