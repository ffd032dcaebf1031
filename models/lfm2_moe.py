"""LFM2-MoE and LFM2.5: gated short convolutions, few attention layers, sigmoid routing."""

from dataclasses import dataclass

from model import Block
from models.config import HFConfig, listed_kinds, unsupported
from models.family import Shard
from models.gguf import Values, dense_config, made_of
from models.layers.group_routing import SigmoidRoutedMoE
from models.layers.scaled_rope import ScaledRopeArgs, ScaledRopeFamily, ScaledRopeTransformer
from models.layers.short_conv import ShortConv, short_conv_recipes
from models.tensors import Recipes

KINDS = "conv", "full_attention"


@dataclass(frozen=True)
class Lfm2MoeArgs(ScaledRopeArgs):
    full_layers: tuple[int, ...] = ()  # layers with attention; the others have a convolution
    conv_channels: int = 2048  # N
    conv_width: int = 3  # W
    conv_bias: bool = False
    routed_scale: float = 1.0  # of routing weights

    def constraints(self) -> dict[str, bool]:
        return super().constraints() | {
            "conv_width": self.conv_width > 1,
            "sliding_window": self.sliding_window is None,
        }


class Lfm2MoeTransformer(ScaledRopeTransformer):
    def make_block(self, args: Lfm2MoeArgs, layer: int) -> Block:
        block = Block(args, layer)
        if layer not in args.full_layers:
            block.attention = ShortConv(args)
        if layer not in args.dense_layers:
            block.ffn = SigmoidRoutedMoE(args)
        return block


class Lfm2Moe(ScaledRopeFamily):
    name = "lfm2_moe"
    args_class = Lfm2MoeArgs
    model_class = Lfm2MoeTransformer
    defaults = dict(
        vocab_size=65536,
        hidden_size=2048,
        num_hidden_layers=32,
        max_position_embeddings=128000,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=1e6,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        moe_intermediate_size=1792,
        intermediate_size=7168,
        num_dense_layers=2,
        conv_L_cache=3,
        conv_bias=False,
        use_expert_bias=True,
    )
    renamed_keys = {"norm_eps": "rms_norm_eps", "num_dense_layers": "first_k_dense_replace"}
    field_of_key = {
        "norm_topk_prob": "norm_topk",
        "routed_scaling_factor": "routed_scale",
        "conv_L_cache": "conv_width",
        "conv_bias": "conv_bias",
    }
    fixed = {"qk_norm": "head"}
    has_score_bias = True
    renamed_tensors = (
        ("model.embedding_norm.", "model.norm."),
        (".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"),
        (".feed_forward.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
        (".operator_norm.", ".input_layernorm."),
        (".ffn_norm.", ".post_attention_layernorm."),
        (".self_attn.out_proj.", ".self_attn.o_proj."),
        (".q_layernorm.", ".q_norm."),
        (".k_layernorm.", ".k_norm."),
    )

    def text_config(self, config: dict) -> dict:
        """Files of transformers 4 have tie_embedding, which wins."""
        tied = config.get("tie_embedding", False)
        if type(tied) is not bool:
            raise unsupported("tie_embedding", tied, "true or false is needed")
        return config | ({"tie_word_embeddings": tied} if "tie_embedding" in config else {})

    def arg_fields(self, c: HFConfig) -> dict:
        if not c.flag("use_expert_bias"):
            c.refuse("use_expert_bias", "only true is")
        if c.integer("conv_L_cache") < 2:
            c.refuse("conv_L_cache", "at least 2 is needed")
        return super().arg_fields(c) | {"conv_channels": c.integer("hidden_size")}

    def window_fields(self, c: HFConfig) -> dict:
        kinds = listed_kinds(c, KINDS)
        if kinds is None:
            c.refuse("layer_types", "it needs a value")
        return {"full_layers": tuple(n for n, kind in enumerate(kinds) if kind == KINDS[1])}

    # GGUF files ---------------------------------------------------------------------------------

    gguf = "lfm2moe"
    gguf_keys = {
        "conv_L_cache": "shortconv.l_cache",
        "first_k_dense_replace": "leading_dense_block_count",
    }
    gguf_tensors = {
        "conv.in_proj.weight": made_of("shortconv.in_proj.weight"),
        "conv.conv.weight": made_of("shortconv.conv.weight", values=lambda t: t.unsqueeze(1)),
        "conv.out_proj.weight": made_of("shortconv.out_proj.weight"),
    }
    gguf_rest = {"model.norm.weight": made_of("token_embd_norm.weight")}

    def gguf_config(self, values: Values) -> dict:
        """A convolution's layer has 0 KV heads."""
        config = super().gguf_config(values) | dense_config(values)
        config.pop("mlp_only_layers", None)  # num_dense_layers says the same
        heads = config.get("num_key_value_heads")
        if isinstance(heads, list):
            config["num_key_value_heads"] = next((n for n in heads if n), 0)
        kinds = [KINDS[not values.has("shortconv.conv.weight", n)] for n in values.layer_numbers]
        return config | {"layer_types": kinds}

    # Conversion ---------------------------------------------------------------------------------

    def mixer_recipes(self, args: Lfm2MoeArgs, layer: int) -> Recipes:
        if layer in args.full_layers:
            return self.attention_recipes(args)
        return short_conv_recipes(args)

    # Tensor parallelism ---------------------------------------------------------------------------

    sharded = ("conv_channels",)

    def sharded_heads(self, args: Lfm2MoeArgs) -> dict[str, int]:
        return {"channels of the convolution": args.conv_channels}

    def shard_table(self, args: Lfm2MoeArgs) -> dict[str, Shard]:
        channels = (args.conv_channels, 1)
        return super().shard_table(args) | {
            "attention.wbcx": Shard(0, (channels,) * 3),
            "attention.conv": Shard(0, (channels,)),
            "attention.wout": Shard(1, (channels,)),
        }

    # As in config.json of these models on the Hugging Face Hub.
    shapes = {
        "LFM2.5-8B-A1B": dict(
            vocab_size=128000,
            num_hidden_layers=24,
            rope_theta=5e6,
            layer_types=[KINDS[n in (2, 6, 10, 14, 18, 21)] for n in range(24)],
        ),
        "LFM2-24B-A2B": dict(
            num_hidden_layers=40,
            num_experts=64,
            moe_intermediate_size=1536,
            intermediate_size=11776,
            layer_types=[KINDS[n % 4 == 2] for n in range(40)],
        ),
    }
