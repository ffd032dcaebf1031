"""Qwen4-Exp (Qwen3.8-Flash-Next), text alone: Qwen3.5's layers between several residual streams."""

from dataclasses import dataclass

from model import Block
from models.config import HFConfig, nested_text_config
from models.layers.gated_delta_net import DeltaNet
from models.layers.gated_hybrid import KINDS, HybridArgs, HybridFamily, HybridTransformer
from models.layers.hyper_connections import (
    StreamBlock,
    StreamTransformer,
    mixer_recipes,
    sublayer_recipes,
)
from models.layers.indexed_attention import (
    IndexedAttention,
    IndexSizes,
    indexed_attention_recipes,
)
from models.layers.shared_expert import GatedSharedExpertMoE
from models.tensors import Recipes

INDEXED = "indexed_attention"  # another name of the second of KINDS


@dataclass(frozen=True)
class Qwen4ExpArgs(HybridArgs):
    streams: int = 4  # S: residual streams (models/layers/hyper_connections.py)
    stream_rank: int = 320
    index_heads: int = 4  # of the index that chooses blocks (models/layers/indexed_attention.py)
    index_dim: int = 128
    index_budget: int = 2048  # positions that a query attends to, beside those of the last block
    index_ratio: int = 4  # positions of a block

    def constraints(self) -> dict[str, bool]:
        return super().constraints() | {
            "streams": self.streams > 1,
            "index_dim": self.index_dim % self.rotary_dim == 0,
            "index_budget": self.index_budget % self.index_ratio == 0,
        }

    @property
    def index_sizes(self) -> IndexSizes:
        return IndexSizes(self.index_heads, self.index_dim, self.index_budget, self.index_ratio)


class Qwen4ExpTransformer(StreamTransformer, HybridTransformer):
    args: Qwen4ExpArgs

    def make_block(self, args: Qwen4ExpArgs, layer: int) -> Block:
        block = StreamBlock(args, layer)
        block.attention = IndexedAttention(args) if layer in args.full_layers else DeltaNet(args)
        block.ffn = GatedSharedExpertMoE(args)
        return block


class Qwen4ExpText(HybridFamily):
    """The text model alone, as transformers saves Qwen4ExpForCausalLM."""

    name = "qwen4_exp_text"
    args_class = Qwen4ExpArgs
    model_class = Qwen4ExpTransformer
    defaults = HybridFamily.defaults | dict(
        vocab_size=248320,
        num_hidden_layers=40,
        partial_rotary_factor=1.0,
        num_experts=512,
        num_experts_per_tok=10,
        norm_topk_prob=True,
        hc_count=4,
        hc_lowrank=320,
    )
    field_of_key = HybridFamily.field_of_key | {
        "norm_topk_prob": "norm_topk",
        "hc_count": "streams",
        "hc_lowrank": "stream_rank",
        "indexer_n_heads": "index_heads",
        "indexer_head_dim": "index_dim",
        "indexer_budget": "index_budget",
        "indexer_compress_ratio": "index_ratio",
    }
    nullable = *HybridFamily.nullable, "output_gate_type", "ple_layer_ids", "ple_embed_dim"
    only = {"mlp_only_layers": [], "decoder_sparse_step": 1, "attn_output_gate": True}
    only |= {"ple_layer_ids": [], "indexer_kv_heads": 1}
    # How the layer of a published head reads the streams is not known.
    published_head = None
    left_out = ("mtp.",)

    def arg_fields(self, c: HFConfig) -> dict:
        fields = super().arg_fields(c)
        if c["hc_count"] < 2:
            c.refuse("hc_count", "at least 2 residual streams are needed")
        if c.count("shared_expert_intermediate_size") == 0:
            c.refuse("shared_expert_intermediate_size", "a shared expert is needed")
        gate = c.get("output_gate_type", "silu")
        if gate not in ("silu", "sigmoid"):
            c.refuse("output_gate_type", "'silu' or 'sigmoid' is needed")
        if c["indexer_budget"] % c["indexer_compress_ratio"]:
            ratio = c["indexer_compress_ratio"]
            c.refuse("indexer_budget", f"a multiple of indexer_compress_ratio = {ratio} is needed")
        if c["indexer_head_dim"] % fields["rotary_dim"]:
            rotated = fields["rotary_dim"]
            c.refuse("indexer_head_dim", f"a multiple of the {rotated} rotated numbers is needed")
        return fields | {"delta_gate": gate}

    def window_fields(self, c: HFConfig) -> dict:
        kinds = c["layer_types"]
        if isinstance(kinds, list):
            c["layer_types"] = [KINDS[1] if kind == INDEXED else kind for kind in kinds]
        return super().window_fields(c)

    def to_hf(self, args: Qwen4ExpArgs) -> dict:
        config = super().to_hf(args)
        kinds = [INDEXED if kind == KINDS[1] else kind for kind in config["layer_types"]]
        own = {"output_gate_type": args.delta_gate, "indexer_kv_heads": 1}
        return config | own | {"layer_types": kinds}

    # Conversion ---------------------------------------------------------------------------------

    def norm_recipes(self, args: Qwen4ExpArgs) -> Recipes:
        return {
            name: recipe
            for ours, theirs in (("attention", "attn"), ("ffn", "mlp"))
            for name, recipe in sublayer_recipes(
                args, f"{ours}_mixer", f"{theirs}_hyper_connection", f"{ours}_norm"
            ).items()
        }

    def attention_recipes(self, args: Qwen4ExpArgs) -> Recipes:
        return indexed_attention_recipes(args)

    def rest_recipes(self, args: Qwen4ExpArgs) -> Recipes:
        last = mixer_recipes(args, "norm.mixer", "model.hyper_connection_mixer", "norm")
        return super().rest_recipes(args) | last


class Qwen4Exp(Qwen4ExpText):
    """The model with vision, of which the text part is run. M-RoPE is RoPE for text."""

    name = "qwen4_exp"
    renamed_tensors = (("model.language_model.", "model."),)
    left_out = "model.visual.", *Qwen4ExpText.left_out
    fixed = Qwen4ExpText.fixed | {"family": Qwen4ExpText.name}  # what is left is that model

    def text_config(self, config: dict) -> dict:
        return nested_text_config(config)

    # As in text_config of Qwen/Qwen3.8-Flash-Next on the Hugging Face Hub.
    shapes = {
        "Qwen3.8-Flash-Next": dict(
            hidden_size=2560,
            num_hidden_layers=48,
            num_attention_heads=24,
            linear_num_value_heads=48,
            moe_intermediate_size=640,
            shared_expert_intermediate_size=640,
            max_position_embeddings=262144,
            rope_theta=1e7,
            partial_rotary_factor=0.25,
            output_gate_type="sigmoid",
            indexer_n_heads=4,
            indexer_head_dim=128,
            indexer_budget=2048,
            indexer_compress_ratio=4,
        )
    }
