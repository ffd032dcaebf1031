"""Nemotron 3 (Nano, Super): Mamba-2, few layers of attention without RoPE, experts without a gate.

A published layer is one of Mamba-2, attention, experts or a dense FFN. A mixer and the FFN after it
are a block here; a mixer without one is a block of its own (models/layers/mixer_block.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from model import Block, Linear
from models.config import HFConfig
from models.family import PublishedLayout, Shard
from models.gguf import MadeTable, Values, made_of
from models.layers.group_routing import SigmoidRoutedMoE
from models.layers.mamba2 import Mamba2
from models.layers.mamba_hybrid import (
    ATTENTION,
    MAMBA,
    MambaArgs,
    MambaFamily,
    MambaTransformer,
)
from models.layers.mixer_block import MixerBlock
from models.layers.relu_squared import UngatedExperts, UngatedFeedForward
from models.tensors import Recipe, Recipes, copy_of, prefixed, score_bias_recipe
from ops.declared import RELU_SQUARED, ExpertAdditions

# Kinds of published layers, by their letter in hybrid_override_pattern.
LETTERS = {"M": MAMBA[0], "*": ATTENTION[0], "E": "moe", "-": "mlp"}
KINDS = {name: name for name in LETTERS.values()} | {MAMBA[1]: MAMBA[0], ATTENTION[1]: ATTENTION[0]}
MIXERS = MAMBA[0], ATTENTION[0]


@dataclass(frozen=True)
class NemotronHArgs(MambaArgs):
    mixer_layers: tuple[int, ...] = ()  # blocks without an FFN
    shared_intermediate: int = 0  # intermediate dim of the shared expert; 0: none
    routed_scale: float = 1.0  # of routing weights
    latent_dim: int | None = None  # the routed experts' input and output; None: D

    def constraints(self) -> dict[str, bool]:
        found, apart = super().constraints(), not {*self.mixer_layers} & {*self.dense_layers}
        return found | {"mixer_layers": found["mixer_layers"] and apart}

    def published_at(self, layer: int) -> int:
        """Return which published layer is the mixer of a block. Its FFN is the next one."""
        return 2 * layer - sum(alone < layer for alone in self.mixer_layers)


class LatentMoE(SigmoidRoutedMoE):
    """Experts without a gate, in a latent space if args has one; and a shared one."""

    def __init__(self, args: NemotronHArgs):
        super().__init__(args)
        D, latent = args.dim, args.latent_dim
        self.experts = UngatedExperts(args, latent or D)
        width = args.shared_intermediate
        self.shared = UngatedFeedForward(D, width) if width else None
        self.latent_in = Linear(D, latent) if latent else None
        self.latent_out = Linear(latent, D) if latent else None

    def expert_input(self, x: Tensor) -> Tensor:
        return x if self.latent_in is None else self.latent_in(x)

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        return super().merge(x, y if self.latent_out is None else self.latent_out(y))

    def fused_decode_settings(self) -> ExpertAdditions | None:
        added = super().fused_decode_settings()
        return added and replace(added, activation=RELU_SQUARED, latent=self.latent())

    def latent(self) -> tuple[Linear, Linear] | None:
        return None if self.latent_in is None else (self.latent_in, self.latent_out)


class NemotronHTransformer(MambaTransformer):
    args: NemotronHArgs

    def make_block(self, args: NemotronHArgs, layer: int) -> Block:
        block = MixerBlock(args) if layer in args.mixer_layers else Block(args, layer)
        if layer not in args.full_layers:
            block.attention = Mamba2(args)
        if layer in args.dense_layers:
            block.ffn = UngatedFeedForward(args.dim, args.dense_intermediate)
        elif layer not in args.mixer_layers:
            block.ffn = LatentMoE(args)
        return block


class NemotronH(MambaFamily):
    name = "nemotron_h"
    args_class = NemotronHArgs
    model_class = NemotronHTransformer
    defaults = dict(
        vocab_size=131072,
        hidden_size=4096,
        num_hidden_layers=4,
        max_position_embeddings=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        layer_norm_epsilon=1e-5,
        intermediate_size=21504,
        mamba_num_heads=128,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        conv_kernel=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=7688,
        moe_shared_expert_intermediate_size=7688,
        moe_latent_size=None,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        num_nextn_predict_layers=0,
    )
    renamed_keys = {"layer_norm_epsilon": "rms_norm_eps", "n_routed_experts": "num_experts"}
    field_of_key = {
        "mamba_num_heads": "mamba_heads",
        "mamba_head_dim": "mamba_head_dim",
        "n_groups": "mamba_groups",
        "ssm_state_size": "mamba_state",
        "conv_kernel": "conv_width",
        "moe_shared_expert_intermediate_size": "shared_intermediate",
        "moe_latent_size": "latent_dim",
        "routed_scaling_factor": "routed_scale",
        "norm_topk_prob": "norm_topk",
    }
    nullable = ("moe_latent_size",)
    only = dict(
        mlp_hidden_act="relu2",
        mamba_hidden_act="silu",
        use_bias=False,
        attention_bias=False,  # transformers makes none
        mamba_proj_bias=False,
        use_conv_bias=True,
        n_shared_experts=1,
    )
    renamed_tensors = (
        ("backbone.embeddings.", "model.embed_tokens."),
        ("backbone.norm_f.", "model.norm."),
        ("backbone.", "model."),
        # The next two as transformers 5 holds them in memory.
        ("model.embeddings.", "model.embed_tokens."),
        ("model.norm_f.", "model.norm."),
        *((f".mixer.{name}_proj.", f".self_attn.{name}_proj.") for name in "qkvo"),
        (".mixer.experts.", ".mlp.experts."),
        (".mixer.gate.", ".mlp.gate."),
        (".mixer.shared_experts.", ".mlp.shared_expert."),
        *((f".mixer.{name}_proj.", f".mlp.{name}_proj.") for name in ("up", "down")),
        *((f".mixer.fc{n}_latent_proj.", f".mlp.fc{n}_latent_proj.") for n in (1, 2)),
        (".mixer.", ".mamba."),
        (".norm.", ".input_layernorm."),
        (".mamba.input_layernorm.", ".mamba.norm."),
        ("model.input_layernorm.", "model.norm."),
    )
    left_out = ("mtp.",)

    def arg_fields(self, c: HFConfig) -> dict:
        for key in ("use_bias", "mamba_proj_bias"):  # transformers takes no null for these
            if c.is_null(key):
                c.refuse(key, "only false is")
        kinds = layer_kinds(c)
        c["num_hidden_layers"] = len(kinds)
        c.setdefault("rope_theta", 1e4)  # there is no RoPE
        c.setdefault("moe_latent_size", None)
        c.count("num_nextn_predict_layers")  # heads for multi-token prediction
        c.integer("moe_shared_expert_intermediate_size")
        self.check_mamba(c, "mamba_num_heads", "n_groups", "conv_kernel")
        blocks = paired(kinds)
        if blocks is None:
            why = "an FFN must follow attention or Mamba-2"
            c.refuse(pattern_key(c), why)

        def blocks_where(test) -> tuple[int, ...]:
            return tuple(n for n, block in enumerate(blocks) if test(block))

        dense = blocks_where(lambda block: "mlp" in block)
        return super().arg_fields(c) | {
            "n_layer": len(blocks),
            "full_layers": blocks_where(lambda block: ATTENTION[0] in block),
            "mixer_layers": blocks_where(lambda block: len(block) == 1),
            "dense_layers": dense,
            "dense_intermediate": c.integer("intermediate_size") if dense else 0,
        }

    def window_fields(self, c: HFConfig) -> dict:
        """No layer has a window; transformers reads the key without using it."""
        if c["sliding_window"] is not None:
            c.integer("sliding_window")
        return {}

    def published_layers(self, args: NemotronHArgs) -> int:
        return args.published_at(args.n_layer)

    def experts_at(self, args: NemotronHArgs, layer: int) -> int:
        return args.published_at(layer) + 1

    # Conversion ---------------------------------------------------------------------------------

    def layer_recipes(self, args: NemotronHArgs, layer: int, layout: PublishedLayout) -> Recipes:
        at = args.published_at(layer)
        norm = {"attention_norm.weight": copy_of("input_layernorm.weight", args.dim)}
        table = prefixed(norm | self.mixer_recipes(args, layer), layer, at)
        if layer in args.mixer_layers:
            return table
        ffn = {"ffn_norm.weight": copy_of("input_layernorm.weight", args.dim)}
        if layer in args.dense_layers:
            ffn |= up_and_down("ffn", "mlp", args.dim, args.dense_intermediate)
        else:
            ffn |= self.expert_recipes(args, layout)
        return table | prefixed(ffn, layer, at + 1)

    def expert_recipes(self, args: NemotronHArgs, layout: PublishedLayout) -> Recipes:
        D, E, I, shared = args.dim, args.n_expert, args.intermediate, args.shared_intermediate
        inner, experts = args.latent_dim or D, "mlp.experts."
        table = {"ffn.router.weight": copy_of("mlp.gate.weight", E, D)} | score_bias_recipe(args)
        for ours, theirs, *shape in (("w13", "up_proj", I, inner), ("w2", "down_proj", inner, I)):
            names = {f"{experts}{e}.{theirs}.weight": (e,) for e in range(E)}
            stacked = copy_of(experts + theirs, E, *shape)
            apart = Recipe((E, *shape), names)
            table[f"ffn.experts.{ours}.weight"] = stacked if layout.fused else apart
        if shared:
            table |= up_and_down("ffn.shared", "mlp.shared_expert", D, shared)
        if args.latent_dim:
            table["ffn.latent_in.weight"] = copy_of("mlp.fc1_latent_proj.weight", inner, D)
            table["ffn.latent_out.weight"] = copy_of("mlp.fc2_latent_proj.weight", D, inner)
        return table

    # GGUF files ---------------------------------------------------------------------------------

    gguf = "nemotron_h_moe"
    gguf_keys = {
        "mamba_num_heads": "ssm.time_step_rank",
        "n_groups": "ssm.group_count",
        "ssm_state_size": "ssm.state_size",
        "conv_kernel": "ssm.conv_kernel",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "moe_latent_size": "moe_latent_size",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
    }
    gguf_tensors = {
        "mlp.fc1_latent_proj.weight": made_of("ffn_latent_down.weight"),
        "mlp.fc2_latent_proj.weight": made_of("ffn_latent_up.weight"),
    }

    def gguf_layer(self, args: NemotronHArgs) -> MadeTable:
        table = super().gguf_layer(args)
        del table["post_attention_layernorm.weight"]  # each published layer has one norm
        return table

    def gguf_config(self, values: Values) -> dict:
        config = super().gguf_config(values)
        heads, inner = config.get("mamba_num_heads"), values.get("ssm.inner_size")
        if type(heads) is int and type(inner) is int and heads > 0:
            config["mamba_head_dim"] = inner // heads
        tensors = {"ssm_a": "M", "attn_q.weight": "*", "ffn_gate_inp.weight": "E"}
        letters = [
            next((letter for name, letter in tensors.items() if values.has(name, layer)), "-")
            for layer in values.layer_numbers
        ]
        config["moe_intermediate_size"] = values.width("ffn_down_exps.weight", 2)
        if dense := values.width("ffn_down.weight", 1):
            config["intermediate_size"] = dense
        return config | {"hybrid_override_pattern": "".join(letters)}

    # Tensor parallelism ---------------------------------------------------------------------------

    def shard_table(self, args: NemotronHArgs) -> dict[str, Shard]:
        """Rows of w13 have no gates."""
        return super().shard_table(args) | {
            "ffn.experts.w13": Shard(1, ((args.intermediate, 1),)),
            "ffn.w13": Shard(0, ((args.dense_intermediate, 1),)),
            "ffn.shared.w13": Shard(0, ((args.shared_intermediate, 1),)),
        }

    # As in config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 on the Hugging Face Hub.
    shapes = {
        "Nemotron-3-Nano-30B-A3B": dict(
            hidden_size=2688,
            hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            max_position_embeddings=262144,
            num_key_value_heads=2,
            intermediate_size=1856,
            mamba_num_heads=64,
            n_routed_experts=128,
            num_experts_per_tok=6,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
            routed_scaling_factor=2.5,
        ),
    }


def up_and_down(ours: str, theirs: str, dim: int, width: int) -> Recipes:
    """A dense FFN without a gate."""
    return {
        f"{ours}.w13.weight": copy_of(f"{theirs}.up_proj.weight", width, dim),
        f"{ours}.w2.weight": copy_of(f"{theirs}.down_proj.weight", dim, width),
    }


def pattern_key(c: HFConfig) -> str:
    """Return the key of the layers' kinds, as transformers chooses among several."""
    listed = (key for key in ("layers_block_type", "layer_types") if c.get(key) is not None)
    return next(listed, "hybrid_override_pattern")


def layer_kinds(c: HFConfig) -> list[str]:
    """Return each published layer's kind."""
    key, listed = pattern_key(c), c["layer_types"]
    if "layer_types" in c.names and (
        listed is None or c.get("layers_block_type", listed) != listed
    ):
        c.refuse("layer_types", "a list as in layers_block_type, or no such key, is needed")
    if c.is_null(key):
        c.refuse(key, "it needs a value, or no such key")
    given = c.get(key, "ME*-")  # transformers' default
    known = LETTERS if key == "hybrid_override_pattern" else KINDS
    valid = isinstance(given, str if known is LETTERS else list) and len(given) > 0
    if not valid or any(not isinstance(kind, str) or kind not in known for kind in given):
        c.refuse(key, f"all must be {' or '.join(map(repr, known))}")
    return [known[kind] for kind in given]


def paired(kinds: Sequence[str]) -> list[tuple[str, ...]] | None:
    """Return the kinds of each block: a mixer, and the FFN after it. None: an FFN has no mixer."""
    blocks: list[tuple[str, ...]] = []
    for kind in kinds:
        if kind in MIXERS:
            blocks.append((kind,))
        elif blocks and len(blocks[-1]) == 1:
            blocks[-1] += (kind,)
        else:
            return None
    return blocks
