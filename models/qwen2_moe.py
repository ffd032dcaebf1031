"""Qwen2-MoE and Qwen1.5-MoE: a gated shared expert, biases of queries, keys and values alone."""

from dataclasses import dataclass

from model import Block, Linear, ModelArgs, Transformer
from models.config import HFConfig, common_fields, dense_fields, window_field
from models.family import Family, Layout, Shard, shared_expert_shards
from models.layers.shared_expert import GatedSharedExpertMoE
from models.tensors import WHOLE, Recipe, attention_recipes, expert_recipes, shared_expert_recipes


@dataclass(frozen=True)
class Qwen2MoeArgs(ModelArgs):
    qkv_bias: bool = True
    shared_intermediate: int = 0  # intermediate dim of the shared expert; 0: none


class Qwen2MoeTransformer(Transformer):
    def make_block(self, args: Qwen2MoeArgs, layer: int) -> Block:
        block = Block(args, layer)
        qkv_dim = (args.n_head + 2 * args.n_kv_head) * args.head_dim
        block.attention.wqkv = Linear(args.dim, qkv_dim, bias=args.qkv_bias)
        if layer not in args.dense_layers:
            block.ffn = GatedSharedExpertMoE(args)
        return block


class Qwen2Moe(Family):
    name = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    args_class = Qwen2MoeArgs
    model_class = Qwen2MoeTransformer
    defaults = dict(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=24,
        max_position_embeddings=32768,
        num_attention_heads=16,
        num_key_value_heads=16,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        qkv_bias=True,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        intermediate_size=5632,
        shared_expert_intermediate_size=5632,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=28,
    )
    sharded_fields = ("dense_intermediate", "shared_intermediate")

    def fields(self, c: HFConfig) -> dict:
        windowed = c.flag("use_sliding_window") and c["sliding_window"] is not None
        if windowed and not c["layer_types"]:
            why = "every other layer would have one, up to max_window_layers"
            c.refuse("use_sliding_window", why)
        fields = common_fields(c, "moe_intermediate_size") | dense_fields(c) | window_field(c)
        return fields | {
            "norm_topk": c.flag("norm_topk_prob"),
            "qkv_bias": c.flag("qkv_bias"),
            "shared_intermediate": c.count("shared_expert_intermediate_size"),
        }

    def to_hf(self, args: Qwen2MoeArgs) -> dict:
        return super().to_hf(args) | {
            "num_experts": args.n_expert,
            "moe_intermediate_size": args.intermediate,
            "shared_expert_intermediate_size": args.shared_intermediate,
            "norm_topk_prob": args.norm_topk,
            "qkv_bias": args.qkv_bias,
            "mlp_only_layers": list(args.dense_layers),
            "use_sliding_window": args.sliding_window is not None,
            "sliding_window": args.sliding_window,
        }

    def attention_recipes(self, args: Qwen2MoeArgs) -> dict[str, Recipe]:
        return attention_recipes(args, args.qkv_bias)

    def expert_recipes(self, args: Qwen2MoeArgs, layout: Layout) -> dict[str, Recipe]:
        table = expert_recipes(args, layout.fused) | shared_expert_recipes(args)
        if args.shared_intermediate:
            source = {"mlp.shared_expert_gate.weight": WHOLE}
            table["ffn.shared_gate.weight"] = Recipe((1, args.dim), source)
        return table

    def shard_table(self, args: Qwen2MoeArgs) -> dict[str, Shard]:
        return super().shard_table(args) | shared_expert_shards(args)

    shapes = {
        "Qwen1.5-MoE-A2.7B": Qwen2MoeArgs(
            "qwen2_moe",
            dim=2048,
            n_layer=24,
            n_head=16,
            n_kv_head=16,
            head_dim=128,
            intermediate=1408,
            n_expert=60,
            n_active=4,
            vocab_size=151936,
            max_position=8192,
            rope_theta=1e6,
            norm_eps=1e-6,
            norm_topk=False,
            shared_intermediate=5632,
        ),
    }
