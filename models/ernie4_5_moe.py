"""ERNIE 4.5: softmax routing whose choice a bias corrects, shared experts, RoPE in pairs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model import Block
from models.config import HFConfig, unsupported
from models.family import PublishedLayout
from models.gguf import MadeTable, Values, made_of
from models.layers.group_routing import BiasedSoftmaxMoE
from models.layers.scaled_rope import ScaledRopeArgs, ScaledRopeFamily, ScaledRopeTransformer
from models.tensors import Recipes, copy_of, interleaved_to_halves

# transformers reads these names, too; the file's own ones are those of `Ernie4_5Moe.renamed_keys`.
ALIASES = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}


@dataclass(frozen=True)
class Ernie4_5MoeArgs(ScaledRopeArgs):
    shared_intermediate: int = 0  # intermediate dim of the shared experts together; 0: none


class Ernie4_5MoeTransformer(ScaledRopeTransformer):
    def make_block(self, args: Ernie4_5MoeArgs, layer: int) -> Block:
        block = Block(args, layer)
        if layer not in args.dense_layers:
            block.ffn = BiasedSoftmaxMoE(args)
        return block


class Ernie4_5Moe(ScaledRopeFamily):
    name = "ernie4_5_moe"
    args_class = Ernie4_5MoeArgs
    model_class = Ernie4_5MoeTransformer
    defaults = dict(
        vocab_size=103424,
        hidden_size=2560,
        num_hidden_layers=28,
        max_position_embeddings=131072,
        num_attention_heads=20,
        num_key_value_heads=4,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        moe_num_experts=64,
        moe_k=6,
        moe_intermediate_size=1536,
        intermediate_size=12288,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_interval=1,
        moe_norm_min=1e-12,
    )
    renamed_keys = {
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
        "moe_num_shared_experts": "n_shared_experts",
    }
    only = {
        "use_bias": False,
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }
    fixed = {"norm_topk": True}
    renamed_tensors = (
        (".mlp.moe_statics.", ".mlp.gate."),
        (".mlp.gate.moe_statics.", ".mlp.gate."),  # as transformers 5 holds it in memory
        (".mlp.shared_experts.", ".mlp.shared_expert."),
    )
    left_out = ("model.mtp_",)  # transformers does not run the head, nor do we

    def text_config(self, config: dict) -> dict:
        """Check the names of which one file may have two; drop the count of heads left out."""
        for key, own in ALIASES.items():
            value = config.get(own, self.defaults[own])
            if key in config and (type(config[key]) is not int or config[key] != value):
                raise unsupported(key, config[key], f"{own} is {value!r:.40}")
        return {key: v for key, v in config.items() if key != "num_nextn_predict_layers"}

    def arg_fields(self, c: HFConfig) -> dict:
        fields = super().arg_fields(c)
        layers, begin = range(fields["n_layer"]), c.count("moe_layer_start_index")
        step, end = c.integer("moe_layer_interval"), c.get("moe_layer_end_index", -1)
        if c["moe_norm_min"] != self.defaults["moe_norm_min"]:
            c.refuse("moe_norm_min", f"only {self.defaults['moe_norm_min']} is")
        if c.is_null("moe_layer_end_index") or type(end) is not int or end < -1:
            c.refuse("moe_layer_end_index", "the number of a layer, or -1, is needed")
        end = layers[-1] if end == -1 else end
        sparse = [n for n in layers if begin <= n <= end and (n + 1) % step == 0]
        dense = tuple(n for n in layers if n not in sparse)
        return fields | {
            "dense_layers": dense,
            "dense_intermediate": c.integer("intermediate_size") if dense else 0,
        }

    def attention_recipes(self, args: Ernie4_5MoeArgs) -> Recipes:
        """Queries and keys are published in the order of RoPE in pairs."""
        table, C = super().attention_recipes(args), args.head_dim
        rotated = (args.n_head + args.n_kv_head) * C

        def to_halves(t: Tensor) -> Tensor:
            return torch.cat((interleaved_to_halves(t[:rotated], C, C), t[rotated:]))

        wqkv = table["attention.wqkv.weight"]
        return table | {"attention.wqkv.weight": wqkv._replace(transform=to_halves)}

    def expert_recipes(self, args: Ernie4_5MoeArgs, layout: PublishedLayout) -> Recipes:
        bias = copy_of(
            "mlp.gate.e_score_correction_bias",
            1,
            args.n_expert,
            dtype=torch.float32,
            transform=lambda t: t.squeeze(0),
        )
        return super().expert_recipes(args, layout) | {"ffn.score_bias": bias}

    gguf = "ernie4_5-moe"
    gguf_keys = {
        "n_shared_experts": "expert_shared_count",
        "moe_layer_start_index": "leading_dense_block_count",
        "moe_layer_interval": "interleave_moe_layer_step",
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    gguf_tensors: MadeTable = {
        "mlp.gate.e_score_correction_bias": made_of(
            "exp_probs_b.bias", values=lambda t: t.unsqueeze(0)
        )
    }

    def gguf_config(self, values: Values) -> dict:
        """A file may leave out counts of shared experts that are 0."""
        config = super().gguf_config(values)
        config.setdefault("moe_num_shared_experts", 0)
        return config

    shapes = {"ERNIE-4.5-21B-A3B": {}}
