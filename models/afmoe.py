"""AFMoE (Trinity): gated attention, windows, norms around sublayers, muP's factor of embeddings."""

from dataclasses import dataclass

from torch import Tensor

from model import Block, Linear
from models.config import HFConfig
from models.family import Shard
from models.gguf import Values, dense_config, made_of
from models.layers.gated_attention import GatedOutput
from models.layers.group_routing import SigmoidRoutedMoE
from models.layers.sandwich import SandwichAddNorm
from models.layers.scaled_rope import ScaledRopeTransformer
from models.layers.windows import KINDS, WindowedArgs, WindowedFamily, leave_full_unrotated
from models.tensors import Recipe, Recipes, copy_of
from ops.declared import AttentionAdditions, OutputGate

NORMS = {  # ours -> published
    "attention_norm": "input_layernorm",
    "add_attention.norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "add_ffn.norm": "post_mlp_layernorm",
}


@dataclass(frozen=True)
class AfmoeArgs(WindowedArgs):
    shared_intermediate: int = 0  # intermediate dim of the shared experts together; 0: none
    routed_scale: float = 1.0  # of routing weights
    mup: bool = False  # embeddings are multiplied by D ** 0.5


class AfmoeAttention(GatedOutput):
    gate = OutputGate("sigmoid")

    def __init__(self, args: AfmoeArgs):
        super().__init__(args)
        H, K, C = self.heads
        self.wqkv = Linear(args.dim, 2 * (H + K) * C)

    def fused_decode_settings(self) -> AttentionAdditions:
        return AttentionAdditions(gate=self.gate)


class AfmoeTransformer(ScaledRopeTransformer):
    args: AfmoeArgs

    def make_block(self, args: AfmoeArgs, layer: int) -> Block:
        block = Block(args, layer)
        block.attention = AfmoeAttention(args)
        leave_full_unrotated(block, args, layer)
        if layer not in args.dense_layers:
            block.ffn = SigmoidRoutedMoE(args)
        block.add_attention = SandwichAddNorm(args.dim, args.norm_eps)
        block.add_ffn = SandwichAddNorm(args.dim, args.norm_eps)
        return block

    def embed(self, tokens: Tensor) -> Tensor:
        x = super().embed(tokens)
        return x * self.args.dim**0.5 if self.args.mup else x


class Afmoe(WindowedFamily):
    name = "afmoe"
    args_class = AfmoeArgs
    model_class = AfmoeTransformer
    defaults = dict(
        vocab_size=200192,
        hidden_size=2048,
        num_hidden_layers=32,
        max_position_embeddings=16384,
        num_attention_heads=16,
        head_dim=128,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        sliding_window=1024,
        global_attn_every_n_layers=4,
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        intermediate_size=6144,
        num_dense_layers=1,
        num_shared_experts=2,
        route_scale=1.0,
        mup_enabled=False,
    )
    renamed_keys = {
        "num_dense_layers": "first_k_dense_replace",
        "num_shared_experts": "n_shared_experts",
    }
    nullable = ("num_key_value_heads",)
    field_of_key = {"route_scale": "routed_scale", "mup_enabled": "mup"}
    fixed = {"qk_norm": "head", "norm_topk": True}
    only = {
        "attention_bias": False,
        "score_func": "sigmoid",
        "route_norm": True,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }
    has_score_bias = True
    renamed_tensors = (
        (".mlp.router.gate.", ".mlp.gate."),
        (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
        (".mlp.shared_experts.", ".mlp.shared_expert."),
    )

    def window_fields(self, c: HFConfig) -> dict:
        every = c.integer("global_attn_every_n_layers")
        if c["layer_types"] is None:
            layers = range(c.integer("num_hidden_layers"))
            c["layer_types"] = [KINDS[(layer + 1) % every == 0] for layer in layers]
        return super().window_fields(c)

    # GGUF files ---------------------------------------------------------------------------------

    gguf = "afmoe"
    gguf_keys = {
        "first_k_dense_replace": "leading_dense_block_count",
        "n_shared_experts": "expert_shared_count",
        "route_scale": "expert_weights_scale",
        "route_norm": "expert_weights_norm",
        "sliding_window": "attention.sliding_window",
    }
    gguf_tensors = {
        "self_attn.gate_proj.weight": made_of("attn_gate.weight"),
        "post_attention_layernorm.weight": made_of("post_attention_norm.weight"),
        "pre_mlp_layernorm.weight": made_of("ffn_norm.weight"),
        "post_mlp_layernorm.weight": made_of("post_ffw_norm.weight"),
    }

    def gguf_config(self, values: Values) -> dict:
        """llama.cpp always multiplies embeddings; every fourth layer is a full one."""
        config = super().gguf_config(values) | dense_config(values)
        config.pop("mlp_only_layers", None)  # num_dense_layers says the same
        return config | {"mup_enabled": True}

    # Conversion ---------------------------------------------------------------------------------

    def norm_recipes(self, args: AfmoeArgs) -> Recipes:
        return {
            f"{ours}.weight": copy_of(f"{theirs}.weight", args.dim)
            for ours, theirs in NORMS.items()
        }

    def attention_recipes(self, args: AfmoeArgs) -> Recipes:
        table, gate = super().attention_recipes(args), args.n_head * args.head_dim
        wqkv = table["attention.wqkv.weight"]
        rows, D = wqkv.shape
        sources = wqkv.sources | {"self_attn.gate_proj.weight": (slice(rows, rows + gate),)}
        return table | {"attention.wqkv.weight": Recipe((rows + gate, D), sources)}

    # Tensor parallelism ---------------------------------------------------------------------------

    def shard_table(self, args: AfmoeArgs) -> dict[str, Shard]:
        queries, kv = (args.n_head, args.head_dim), (args.n_kv_head, args.head_dim)
        wqkv = Shard(0, (queries, kv, kv, queries))
        return super().shard_table(args) | {"attention.wqkv": wqkv}

    # As in config.json of arcee-ai/Trinity-Mini on the Hugging Face Hub.
    shapes = {
        "Trinity-Mini-26B-A3B": dict(
            max_position_embeddings=131072,
            num_attention_heads=32,
            num_key_value_heads=4,
            sliding_window=2048,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1024,
            num_dense_layers=2,
            num_shared_experts=1,
            route_scale=2.826,
            mup_enabled=True,
        )
    }
