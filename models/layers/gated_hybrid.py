"""Models in which Gated DeltaNet and gated attention alternate: Qwen3-Next, Qwen3.5, Qwen3.6."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model import Block
from models.config import HFConfig, full_layers, rotary_dim
from models.family import APART, Shard
from models.gguf import (
    Values,
    dense_config,
    log_of_negative,
    made_of,
    minus_one,
    partial_rotary,
)
from models.layers.gated_attention import GatedAttention, gated_attention_recipes
from models.layers.gated_delta_net import DeltaNet, DeltaSizes, delta_net_recipes
from models.layers.pending_state import PROMPT_CHUNK, RecurrentTransformer, snapshot_numbers
from models.layers.scaled_rope import (
    ScaledRopeArgs,
    ScaledRopeFamily,
    ScaledRopeTransformer,
    scaled_rope_table,
)
from models.layers.shared_expert import GatedSharedExpertMoE
from models.layers.zero_centered_norm import ZeroCenteredRMSNorm, zero_centered
from models.tensors import Recipe, Recipes

KINDS = "linear_attention", "full_attention"


@dataclass(frozen=True)
class HybridArgs(ScaledRopeArgs):
    full_layers: tuple[int, ...] = ()  # layers with attention; the others have Gated DeltaNet
    rotary_dim: int = 64  # the first numbers of a head that are rotated
    shared_intermediate: int = 0  # intermediate dim of the shared expert; 0: none
    delta_key_heads: int = 16
    delta_value_heads: int = 32
    delta_key_dim: int = 128
    delta_value_dim: int = 128
    conv_width: int = 4
    delta_gate: str = "silu"  # activation of Gated DeltaNet's output gate, or "sigmoid"
    # Whether wout takes the first value head of each key head, then the second of each: a GGUF
    # file has that order, and its blocks of wout's columns may be of two heads.
    values_by_place: bool = False

    def constraints(self) -> dict[str, bool]:
        return super().constraints() | {
            "rotary_dim": self.rotary_dim % 2 == 0 and self.head_dim % self.rotary_dim == 0,
            "delta_key_heads": self.delta_value_heads % self.delta_key_heads == 0,
            "conv_width": self.conv_width > 1,
            "delta_gate": self.delta_gate in ("silu", "sigmoid"),
            "sliding_window": self.sliding_window is None,
        }

    @property
    def delta_sizes(self) -> DeltaSizes:
        return DeltaSizes(
            self.delta_key_heads,
            self.delta_value_heads,
            self.delta_key_dim,
            self.delta_value_dim,
            self.conv_width,
        )


class HybridTransformer(RecurrentTransformer, ScaledRopeTransformer):
    args: HybridArgs

    def __init__(self, args: HybridArgs):
        super().__init__(args)
        self.norm = ZeroCenteredRMSNorm(args.dim, args.norm_eps)

    def make_block(self, args: HybridArgs, layer: int) -> Block:
        block = Block(args, layer)
        block.attention_norm = ZeroCenteredRMSNorm(args.dim, args.norm_eps)
        block.ffn_norm = ZeroCenteredRMSNorm(args.dim, args.norm_eps)
        block.attention = GatedAttention(args) if layer in args.full_layers else DeltaNet(args)
        if layer not in args.dense_layers:
            block.ffn = GatedSharedExpertMoE(args)
        return block

    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        rotated = self.args.rotary_dim
        unrotated = self.args.head_dim - rotated
        return scaled_rope_table(self.args, rotated, length, device, unrotated)


class HybridFamily(ScaledRopeFamily):
    args_class = HybridArgs
    model_class = HybridTransformer
    defaults = dict(
        hidden_size=2048,
        max_position_embeddings=32768,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        rope_theta=1e4,
        partial_rotary_factor=0.25,
        rms_norm_eps=1e-6,
        attention_bias=False,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    )
    field_of_key = {
        "attention_bias": "attention_bias",
        "shared_expert_intermediate_size": "shared_intermediate",
        "linear_conv_kernel_dim": "conv_width",
        "linear_key_head_dim": "delta_key_dim",
        "linear_value_head_dim": "delta_value_dim",
        "linear_num_key_heads": "delta_key_heads",
        "linear_num_value_heads": "delta_value_heads",
    }
    fixed = {"qk_norm": "head"}
    nullable = ("partial_rotary_factor",)
    published_head = APART
    has_shared_gate = True

    def arg_fields(self, c: HFConfig) -> dict:
        fields = super().arg_fields(c)
        if c["linear_num_value_heads"] % c["linear_num_key_heads"]:
            heads = c["linear_num_key_heads"]
            c.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads = {heads} is")
        if c["linear_conv_kernel_dim"] < 2:
            c.refuse("linear_conv_kernel_dim", "at least 2 is needed")
        return fields | {"rotary_dim": rotary_dim(c)}

    def window_fields(self, c: HFConfig) -> dict:
        """Every fourth layer has attention, unless the file says otherwise."""
        c.setdefault("full_attention_interval", 4)
        interval = c.integer("full_attention_interval")
        return {"full_layers": full_layers(c, KINDS, lambda n: (n + 1) % interval == 0)}

    def attention_memory(self, args: HybridArgs, length: int) -> tuple[int, int]:
        """The delta rule of a prompt's chunk takes most, then a sequence's snapshots; both fp32."""
        sizes, tokens = args.delta_sizes, min(length, PROMPT_CHUNK)
        _, H, Ck, Cv, _ = sizes
        rule = tokens * H * (6 * Ck + 4 * Cv + 4 * 64)  # keys, values, scores of 64 tokens
        taken = snapshot_numbers(args, sizes, H * Ck * Cv)
        extra = 4 * tokens * sizes.channels + 2 * (rule + taken)
        return 2 * args.n_kv_head * args.head_dim, extra

    def head_fields(self, args: HybridArgs) -> dict:
        return super().head_fields(args) | {"full_layers": (0,)}

    # GGUF files ---------------------------------------------------------------------------------

    gguf_keys = {
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    gguf_tensors = {
        "input_layernorm.weight": made_of("attn_norm.weight", values=minus_one),
        "post_attention_layernorm.weight": made_of("post_attention_norm.weight", values=minus_one),
        "self_attn.q_norm.weight": made_of("attn_q_norm.weight", values=minus_one),
        "self_attn.k_norm.weight": made_of("attn_k_norm.weight", values=minus_one),
        "linear_attn.conv1d.weight": made_of("ssm_conv1d.weight", values=lambda t: t.unsqueeze(1)),
        "linear_attn.A_log": made_of("ssm_a", values=log_of_negative),
        "linear_attn.dt_bias": made_of("ssm_dt.bias"),
        "linear_attn.norm.weight": made_of("ssm_norm.weight"),
        "linear_attn.out_proj.weight": made_of("ssm_out.weight"),
    }
    gguf_norm = staticmethod(minus_one)

    def gguf_config(self, values: Values) -> dict:
        config = super().gguf_config(values) | dense_config(values) | partial_rotary(values)
        heads, inner = config.get("linear_num_value_heads"), values.get("ssm.inner_size")
        if type(heads) is int and type(inner) is int and heads > 0:
            config["linear_value_head_dim"] = inner // heads
        kinds = [KINDS[not values.has("ssm_a", n)] for n in values.layer_numbers]
        return config | {"layer_types": kinds}

    # Conversion ---------------------------------------------------------------------------------

    def mixer_recipes(self, args: HybridArgs, layer: int) -> Recipes:
        if layer in args.full_layers:
            return self.attention_recipes(args)
        return self.projection_recipes(args) | delta_net_recipes(args.delta_sizes, args.dim)

    def projection_recipes(self, args: HybridArgs) -> Recipes:
        """Return the recipes of a Gated DeltaNet layer's wqkvz and wba: of four projections."""
        _, H, _, Cv, _ = sizes = args.delta_sizes
        N = sizes.channels
        qkvz = {"qkv": slice(0, N), "z": slice(N, N + H * Cv)}
        ba = {"b": slice(0, H), "a": slice(H, 2 * H)}
        return {
            f"attention.{ours}.weight": Recipe(
                (max(place.stop for place in places.values()), args.dim),
                {f"linear_attn.in_proj_{name}.weight": (place,) for name, place in places.items()},
            )
            for ours, places in (("wqkvz", qkvz), ("wba", ba))
        }

    def norm_recipes(self, args: HybridArgs) -> Recipes:
        return {
            "attention_norm.weight": zero_centered("input_layernorm.weight", args.dim),
            "ffn_norm.weight": zero_centered("post_attention_layernorm.weight", args.dim),
        }

    def attention_recipes(self, args: HybridArgs) -> Recipes:
        return gated_attention_recipes(args)

    def rest_recipes(self, args: HybridArgs) -> Recipes:
        norm = zero_centered("model.norm.weight", args.dim)
        return super().rest_recipes(args) | {"norm.weight": norm}

    # Tensor parallelism ---------------------------------------------------------------------------

    sharded = "delta_key_heads", "delta_value_heads"

    def sharded_heads(self, args: HybridArgs) -> dict[str, int]:
        return {"key heads of Gated DeltaNet": args.delta_key_heads}

    def shard_table(self, args: HybridArgs) -> dict[str, Shard]:
        K, H, Ck, Cv, _ = args.delta_sizes
        keys, values, head = (K, Ck), (H, Cv), (H, 1)
        queries, kv = (args.n_head, args.head_dim), (args.n_kv_head, args.head_dim)
        outputs = (keys[:1] + values[1:],) * (H // K) if args.values_by_place else (values,)
        return super().shard_table(args) | {
            "attention.wqkv": Shard(0, (queries, kv, kv, queries)),
            "attention.wqkvz": Shard(0, (keys, keys, values, values)),
            "attention.wba": Shard(0, (head, head)),
            "attention.conv": Shard(0, (keys, keys, values)),
            "attention": Shard(0, (head,)),  # a_log and dt_bias
            "attention.wout": Shard(1, outputs),
        }
