"""Kimi Linear: Kimi Delta Attention and latent attention without RoPE 3:1, sigmoid routing."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model import Block
from models.config import (
    MAX_INTEGERS,
    HFConfig,
    full_layers,
    read_mlp_types,
    unsupported,
)
from models.family import Shard
from models.gguf import Values, log_of_negative, made_of
from models.latent_family import LatentArgs, LatentFamily, LatentTransformer
from models.layers.group_routing import SigmoidRoutedMoE
from models.layers.kimi_delta import KimiDelta, KimiDeltaSizes, kimi_delta_recipes
from models.layers.pending_state import PROMPT_CHUNK, RecurrentTransformer, snapshot_numbers
from models.tensors import Recipes
from ops.plain.rope import rope_table

KINDS = "linear_attention", "full_attention"
NESTED = "linear_attn_config"
LISTS = "kda_layers", "full_attn_layers"  # in it: layers of each of KINDS, the first is 1
SIZES = {  # its sizes -> the keys that transformers 5 has for them
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


@dataclass(frozen=True)
class KimiLinearArgs(LatentArgs):
    """rotary_dim numbers of a key are shared by all heads, but are not rotated."""

    full_layers: tuple[int, ...] = ()  # layers with latent attention; the others: the delta rule
    delta_heads: int = 32
    delta_dim: int = 128  # numbers of a head's query, key and value
    conv_width: int = 4

    def constraints(self) -> dict[str, bool]:
        return super().constraints() | {
            "conv_width": self.conv_width > 1,
        }

    @property
    def delta_sizes(self) -> KimiDeltaSizes:
        H, C = self.delta_heads, self.delta_dim
        return KimiDeltaSizes(H, H, C, C, self.conv_width)


class KimiLinearTransformer(RecurrentTransformer, LatentTransformer):
    args: KimiLinearArgs
    moe_class = SigmoidRoutedMoE

    def make_block(self, args: KimiLinearArgs, layer: int) -> Block:
        block = super().make_block(args, layer)
        if layer not in args.full_layers:
            block.attention = KimiDelta(args)
        return block

    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        """Return cosines of 1 and sines of 0: latent attention rotates by nothing."""
        return rope_table(torch.empty(0, device=device), length, unrotated=self.args.rotary_dim)


def nested_values(config: dict, n_layer: int) -> dict:
    """Return sizes and kinds of layers that linear_attn_config says, as transformers 5 names them.

    transformers prefers its sizes, but layer_types to its kinds of layers.
    """
    nested = config.get(NESTED, {})
    if not isinstance(nested, dict):
        raise unsupported(NESTED, nested)
    found = {own: nested[key] for key, own in SIZES.items() if key in nested}
    for key, own in SIZES.items():
        for name, value in ((f"{NESTED}.{key}", nested.get(key, 1)), (own, config.get(own, 1))):
            if type(value) is not int:
                raise unsupported(name, value, "an integer is needed")
    if config.get("layer_types") is not None or not all(name in nested for name in LISTS):
        return found
    lists = [nested[name] for name in LISTS]
    if any(not isinstance(each, list) for each in lists):
        raise unsupported(NESTED, nested, f"{' and '.join(LISTS)} must be lists of layers")
    kinds = [(layer, kind) for each, kind in zip(lists, KINDS, strict=True) for layer in each]
    named = [layer for layer, _ in kinds if type(layer) is int]
    if len(named) != len(kinds) or sorted(named) != [*range(1, n_layer + 1)]:
        why = f"{' and '.join(LISTS)} must name each of {n_layer} layers once, from 1 on"
        raise unsupported(NESTED, nested, why)
    return found | {"layer_types": [kind for _, kind in sorted(kinds)]}


class KimiLinear(LatentFamily):
    name = "kimi_linear"
    args_class = KimiLinearArgs
    model_class = KimiLinearTransformer
    defaults = dict(
        vocab_size=163840,
        hidden_size=2304,
        num_hidden_layers=27,
        model_max_length=1048576,
        num_attention_heads=32,
        num_key_value_heads=32,
        rms_norm_eps=1e-5,
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
        num_experts=256,
        num_experts_per_token=8,
        moe_renormalize=True,
        moe_intermediate_size=1024,
        intermediate_size=9216,
        num_shared_experts=1,
        routed_scaling_factor=2.446,
        num_expert_group=1,
        topk_group=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_head_dim=128,
        linear_num_heads=32,
        linear_conv_kernel_dim=4,
    )
    renamed_keys = {
        "model_max_length": "max_position_embeddings",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "num_expert_group": "n_group",
        "moe_renormalize": "norm_topk_prob",
    }
    field_of_key = LatentFamily.field_of_key | {
        "norm_topk_prob": "norm_topk",
        "linear_num_heads": "delta_heads",
        "linear_head_dim": "delta_dim",
        "linear_conv_kernel_dim": "conv_width",
    }
    nullable = "q_lora_rank", "num_key_value_heads", "mlp_layer_types"
    only = {
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "mla_use_nope": True,
    }
    rope_types = ("default",)
    topk_methods = ("noaux_tc",)
    has_score_bias = True
    renamed_tensors = (
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
        *LatentFamily.renamed_tensors,
    )

    def text_config(self, config: dict) -> dict:
        """Return config.json with the keys of transformers 5, which sets head_dim itself."""
        config = {key: value for key, value in config.items() if key != "head_dim"}
        for own, shared in self.renamed_keys.items():
            if shared in config and own not in config:
                config[own] = config.pop(shared)
            elif shared in config and type(config[shared]) is not type(config[own]):
                raise unsupported(shared, config[shared], f"{own} is {config[own]!r:.40}")
        n_layer = config.get("num_hidden_layers", self.defaults["num_hidden_layers"])
        if type(n_layer) is not int or not 0 < n_layer <= MAX_INTEGERS["num_hidden_layers"]:
            why = f"an integer from 1 to {MAX_INTEGERS['num_hidden_layers']} is needed"
            raise unsupported("num_hidden_layers", n_layer, why)
        dense = config.pop("first_k_dense_replace", 1)
        if config.get("mlp_layer_types") is None:
            if type(dense) is not int or dense < 0:
                raise unsupported("first_k_dense_replace", dense, "a number of layers is needed")
            kinds = ["dense" if layer < dense else "sparse" for layer in range(n_layer)]
            config["mlp_layer_types"] = kinds
        return config | nested_values(config, n_layer)

    def arg_fields(self, c: HFConfig) -> dict:
        c.setdefault("rope_theta", 1e4)  # there is no RoPE
        read_mlp_types(c, first_dense=1)
        if c.integer("linear_conv_kernel_dim") < 2:
            c.refuse("linear_conv_kernel_dim", "at least 2 is needed")
        return super().arg_fields(c)

    def window_fields(self, c: HFConfig) -> dict:
        """Every fourth layer but the first has latent attention, unless the file says otherwise."""
        return {"full_layers": full_layers(c, KINDS, lambda n: n > 0 and n % 4 == 0)}

    def attention_memory(self, args: KimiLinearArgs, length: int) -> tuple[int, int]:
        """A chunk runs latent attention or the delta rule, in fp32; a sequence has snapshots."""
        cached, expanded = super().attention_memory(args, length)
        sizes, tokens = args.delta_sizes, min(length, PROMPT_CHUNK)
        H, C = args.delta_heads, args.delta_dim
        rule = tokens * H * (14 * C + 4 * 64)  # keys, decays, scores of 64 tokens
        taken = snapshot_numbers(args, sizes, H * C * C)
        return cached, max(expanded, 4 * tokens * sizes.channels + 2 * rule) + 2 * taken

    # GGUF files ---------------------------------------------------------------------------------

    gguf = "kimi-linear"
    gguf_keys = LatentFamily.gguf_keys | {
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_head_dim": "kda.head_dim",
    }
    gguf_tensors = {
        "self_attn.A_log": made_of("ssm_a", values=lambda t: log_of_negative(t).view(1, 1, -1, 1)),
        "self_attn.dt_bias": made_of("ssm_dt.bias"),
        "self_attn.b_proj.weight": made_of("ssm_beta.weight"),
        "self_attn.o_norm.weight": made_of("ssm_norm.weight"),
        **{
            f"self_attn.{name}_proj.weight": made_of(f"ssm_{name}.weight")
            for name in ("f_a", "f_b", "g_a", "g_b")
        },
        **{
            f"self_attn.{name}_conv1d.weight": made_of(
                f"ssm_conv1d_{name}.weight", values=lambda t: t.reshape(-1, 1, t.shape[-1])
            )
            for name in "qkv"
        },
    }

    def gguf_config(self, values: Values) -> dict:
        config = super().gguf_config(values)
        kinds = [KINDS[not values.has("ssm_a", n)] for n in values.layer_numbers]
        size, numbers = config.get("linear_head_dim"), values.width("ssm_dt.bias", 0)
        if numbers and type(size) is int and size > 0:
            config["linear_num_heads"] = numbers // size
        return config | {"layer_types": kinds}

    # Conversion ---------------------------------------------------------------------------------

    def mixer_recipes(self, args: KimiLinearArgs, layer: int) -> Recipes:
        if layer in args.full_layers:
            return self.attention_recipes(args)
        return kimi_delta_recipes(args.delta_sizes, args.dim)

    # Tensor parallelism ---------------------------------------------------------------------------

    sharded = ("delta_heads",)

    def sharded_heads(self, args: KimiLinearArgs) -> dict[str, int]:
        return {"heads of Kimi Delta Attention": args.delta_heads}

    def shard_table(self, args: KimiLinearArgs) -> dict[str, Shard]:
        """wqkv, and what an attention module has beside products, differ by kind of layer."""
        H, C = args.delta_heads, args.delta_dim
        wide, head, rank = (H, C), (H, 1), (1, C)
        delta = {
            "": Shard(0, (head,)),  # a_log and dt_bias
            ".wqkv": Shard(0, (wide,) * 3),
            ".wfgb": Shard(0, (rank, rank, head)),
            ".wdecay": Shard(0, (wide,)),
            ".wgate": Shard(0, (wide,)),
            ".conv": Shard(0, (wide,) * 3),
            ".wout": Shard(1, (wide,)),
        }
        layers = [n for n in range(args.n_layer) if n not in args.full_layers]
        return super().shard_table(args) | {
            f"layers.{n}.attention{name}": shard for n in layers for name, shard in delta.items()
        }

    # config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct on the Hugging Face Hub.
    shapes = {
        "Kimi-Linear-48B-A3B": {
            NESTED: {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [n for n in range(1, 27) if n % 4],
            }
        }
    }
