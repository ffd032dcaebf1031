"""DeepSeek-V2 and DeepSeek-V3: latent attention, groups of experts, shared experts."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model import Block, ModelArgs, Transformer
from models.config import HFConfig, common_fields, dense_fields, refuse_windows
from models.family import Family, Layout, Shard, shared_expert_shards
from models.layers.group_routing import GroupRoutedMoE, SigmoidRoutedMoE
from models.layers.latent_attention import HEADS_AT_ONCE, LatentAttention
from models.layers.yarn import Yarn, read_yarn, yarn_frequencies, yarn_scale, yarn_to_hf
from models.tensors import (
    WHOLE,
    Recipe,
    expert_recipes,
    score_bias_recipe,
    shared_expert_recipes,
)
from ops.rope import rope_frequencies, rope_table


@dataclass(frozen=True)
class DeepseekArgs(ModelArgs):
    """head_dim is that of queries; their last rotary_dim numbers are rotated. n_kv_head is 1."""

    shared_intermediate: int = 0  # intermediate dim of the shared experts together; 0: none
    routed_scale: float = 1.0  # of routing weights
    rotary_dim: int = 64  # R
    attention_scale: float | None = None  # of attention scores; None: C ** -0.5
    yarn: Yarn | None = None
    n_group: int = 1  # groups of experts
    n_active_group: int = 1  # groups that a token's experts are in
    kv_rank: int = 512  # r, numbers of a position that keys and values are made of
    q_rank: int | None = None  # the same for queries; None: they are made of x
    value_dim: int = 128  # of a head's value

    def __post_init__(self):
        if isinstance(self.yarn, dict):  # from JSON
            object.__setattr__(self, "yarn", Yarn(**self.yarn))
        super().__post_init__()

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
        args, scale = self.args, 1.0
        if args.yarn:
            frequencies = yarn_frequencies(args.yarn, args.rotary_dim, args.rope_theta, device)
            scale = args.yarn.attention
        else:
            frequencies = rope_frequencies(args.rotary_dim, args.rope_theta, device)
        return rope_table(frequencies, length, scale)


class DeepseekV3Transformer(DeepseekTransformer):
    moe_class = SigmoidRoutedMoE


class DeepseekV2(Family):
    name = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
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
    keys = {"n_routed_experts": "num_experts"}
    only = {"attention_bias": False, "norm_topk_prob": False}
    rope_types = ("default", "yarn")
    renames = ((".mlp.shared_experts.", ".mlp.shared_expert."),)
    sharded_fields = ("dense_intermediate", "shared_intermediate")
    topk_methods = ("greedy", "group_limited_greedy")  # the first is the default

    def fields(self, c: HFConfig) -> dict:
        refuse_windows(c)
        fields = latent_fields(c)  # first: it sets head_dim
        fields |= common_fields(c, "moe_intermediate_size") | dense_fields(c)
        c.count("num_nextn_predict_layers")  # the converter leaves these layers out
        yarn = read_yarn(c)
        if yarn and c["mscale_all_dim"]:
            scale = yarn_scale(yarn.factor, c.number("mscale_all_dim"))
            fields["attention_scale"] = fields["head_dim"] ** -0.5 * scale**2
        return (
            fields
            | group_fields(c, self.topk_methods)
            | {
                "n_kv_head": 1,
                "norm_topk": self.norm_topk(c),
                "shared_intermediate": c.count("n_shared_experts") * fields["intermediate"],
                "routed_scale": c.number("routed_scaling_factor"),
                "yarn": yarn,
            }
        )

    def norm_topk(self, c: HFConfig) -> bool:
        return False

    def attention_memory(self, args: DeepseekArgs, length: int) -> tuple[int, int]:
        """A chunk expands keys and values, pads and concatenates them: five times their size."""
        expanded = 5 * min(args.n_head, HEADS_AT_ONCE) * length * args.head_dim
        return args.kv_rank + args.rotary_dim, expanded

    def to_hf(self, args: DeepseekArgs) -> dict:
        config = super().to_hf(args) | {
            "num_key_value_heads": args.n_head,
            "head_dim": args.rotary_dim,
            "n_routed_experts": args.n_expert,
            "moe_intermediate_size": args.intermediate,
            "n_shared_experts": args.shared_intermediate // args.intermediate,
            "first_k_dense_replace": len(args.dense_layers),
            "routed_scaling_factor": args.routed_scale,
            "norm_topk_prob": args.norm_topk,
            "num_nextn_predict_layers": 0,
            "n_group": args.n_group,
            "topk_group": args.n_active_group,
            "topk_method": self.topk_methods[args.n_group > 1 and len(self.topk_methods) > 1],
            "kv_lora_rank": args.kv_rank,
            "q_lora_rank": args.q_rank,
            "qk_nope_head_dim": args.head_dim - args.rotary_dim,
            "qk_rope_head_dim": args.rotary_dim,
            "v_head_dim": args.value_dim,
        }
        rope = config["rope_parameters"]
        if args.yarn:
            rope |= yarn_to_hf(args.yarn)
            if args.attention_scale:  # invert yarn_scale
                scale = (args.attention_scale * args.head_dim**0.5) ** 0.5
                rope["mscale_all_dim"] = round((scale - 1) / (0.1 * math.log(args.yarn.factor)), 6)
        return config

    def attention_recipes(self, args: DeepseekArgs) -> dict[str, Recipe]:
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
        wkv = {"self_attn.kv_b_proj.weight": WHOLE}
        table = {
            "attention.wqkv.weight": Recipe((n_q + r + R, D), sources, pair_halves),
            "attention.kv_norm.weight": Recipe((r,), {"self_attn.kv_a_layernorm.weight": WHOLE}),
            "attention.wkv": Recipe((H * n_kv, r), wkv, lambda t: t.unflatten(0, (H, n_kv))),
            "attention.wo.weight": Recipe(
                (D, H * args.value_dim), {"self_attn.o_proj.weight": WHOLE}
            ),
        }
        if args.q_rank:
            q_norm = {"self_attn.q_a_layernorm.weight": WHOLE}
            table["attention.q_norm.weight"] = Recipe((args.q_rank,), q_norm)
            table["attention.wq.weight"] = Recipe(
                (H * C, args.q_rank),
                {"self_attn.q_b_proj.weight": WHOLE},
                lambda t: interleaved_to_halves(t, C, R),
            )
        return table

    def expert_recipes(self, args: DeepseekArgs, layout: Layout) -> dict[str, Recipe]:
        return expert_recipes(args, layout.fused) | shared_expert_recipes(args)

    def shard_table(self, args: DeepseekArgs) -> dict[str, Shard]:
        """All ranks have the latent projections, and so the same cache; heads are sharded."""
        queries, values = (args.n_head, args.head_dim), (args.n_head, args.value_dim)
        table = super().shard_table(args) | shared_expert_shards(args)
        table["attention"] = Shard(0, ((args.n_head, 1),))  # wkv
        table["attention.wo"] = Shard(1, (values,))
        if args.q_rank:
            del table["attention.wqkv"]
            table["attention.wq"] = Shard(0, (queries,))
        else:
            table["attention.wqkv"] = Shard(0, (queries, (1, args.kv_rank + args.rotary_dim)))
        return table

    shapes = {
        "DeepSeek-V2-Lite": DeepseekArgs(
            "deepseek_v2",
            dim=2048,
            n_layer=27,
            n_head=16,
            n_kv_head=1,
            head_dim=192,
            intermediate=1408,
            n_expert=64,
            n_active=6,
            vocab_size=102400,
            max_position=163840,
            norm_eps=1e-6,
            norm_topk=False,
            dense_layers=(0,),
            dense_intermediate=10944,
            shared_intermediate=2816,
            attention_scale=192**-0.5 * yarn_scale(40.0, 0.707) ** 2,
            yarn=Yarn(40.0, 4096),
        ),
    }


class DeepseekV3(DeepseekV2):
    name = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    model_class = DeepseekV3Transformer
    defaults = dict(
        vocab_size=129280,
        hidden_size=7168,
        num_hidden_layers=61,
        max_position_embeddings=4096,
        num_attention_heads=128,
        num_key_value_heads=128,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
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
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        norm_topk_prob=True,
        eos_token_id=1,
        num_nextn_predict_layers=1,
    )
    only = {"attention_bias": False, "scoring_func": "sigmoid"}
    topk_methods = ("noaux_tc",)

    def norm_topk(self, c: HFConfig) -> bool:
        return c.flag("norm_topk_prob")

    def expert_recipes(self, args: DeepseekArgs, layout: Layout) -> dict[str, Recipe]:
        return super().expert_recipes(args, layout) | score_bias_recipe(args)

    shapes = {
        "DeepSeek-V3": DeepseekArgs(
            "deepseek_v3",
            dim=7168,
            n_layer=61,
            n_head=128,
            n_kv_head=1,
            head_dim=192,
            intermediate=2048,
            n_expert=256,
            n_active=8,
            vocab_size=129280,
            max_position=163840,
            norm_eps=1e-6,
            dense_layers=(0, 1, 2),
            dense_intermediate=18432,
            shared_intermediate=2048,
            routed_scale=2.5,
            attention_scale=192**-0.5 * yarn_scale(40.0) ** 2,
            yarn=Yarn(40.0, 4096),
            n_group=8,
            n_active_group=4,
            q_rank=1536,
        ),
    }


def latent_fields(c: HFConfig) -> dict:
    """Return the ranks and head sizes of latent attention; sets head_dim to that of queries."""
    heads = c.integer("num_attention_heads")
    if c.setdefault("num_key_value_heads", heads) != heads:
        why = f"with latent attention, only num_attention_heads = {heads} is"
        c.refuse("num_key_value_heads", why)
    c["head_dim"] = c.integer("qk_nope_head_dim") + c.integer("qk_rope_head_dim")
    if c["qk_rope_head_dim"] % 2:
        c.refuse("qk_rope_head_dim", "it must be even to be rotated")
    if c.integer("v_head_dim") > c["head_dim"]:
        c.refuse("v_head_dim", f"queries have {c['head_dim']}")
    return {
        "kv_rank": c.integer("kv_lora_rank"),
        "q_rank": None if c["q_lora_rank"] is None else c.integer("q_lora_rank"),
        "value_dim": c["v_head_dim"],
        "rotary_dim": c["qk_rope_head_dim"],
    }


def group_fields(c: HFConfig, methods: tuple[str, ...]) -> dict:
    """Return the groups of experts. methods: what topk_method may be, the default first."""
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
