"""Qwen4-Exp (Qwen3.8-Flash-Next), text alone: Qwen3.5's layers between several residual streams."""

from dataclasses import dataclass

from torch import Tensor

from model import Block, Chunk, Context, is_layer
from models.config import HFConfig
from models.family import PublishedLayout
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
    queries_at_once,
)
from models.layers.ngram_embedding import (
    IN_HOST_MEMORY,
    TABLE,
    NgramBlock,
    NgramSizes,
    ngram_recipes,
)
from models.layers.pending_state import PROMPT_CHUNK
from models.layers.shared_expert import GatedSharedExpertMoE
from models.tensors import Recipes, prefixed

INDEXED = "indexed_attention"  # another name of the second of KINDS


@dataclass(frozen=True)
class Qwen4ExpArgs(HybridArgs):
    streams: int = 4  # S: residual streams (models/layers/hyper_connections.py)
    stream_rank: int = 320
    index_heads: int = 4  # N of an index that chooses blocks (models/layers/indexed_attention.py)
    index_dim: int = 128
    index_budget: int = 2048  # positions that a query attends to, beside those of the last block
    index_ratio: int = 4  # positions of a block
    ngram_layers: tuple[int, ...] = ()  # before these n-grams' embeddings are added
    ngram_order: int = 3  # as in `NgramSizes` (models/layers/ngram_embedding.py)
    ngram_heads: int = 8
    ngram_dim: int = 2048
    ngram_base: int = 20_000_000
    ngram_multiple: int = 128
    ngram_seed: int = 1234
    ngram_end: int = 1
    ngram_conv_width: int = 4

    def constraints(self) -> dict[str, bool]:
        return super().constraints() | {
            "streams": self.streams > 1,
            "index_dim": self.index_dim % self.rotary_dim == 0,
            "index_budget": self.index_budget % self.index_ratio == 0,
            "ngram_order": self.ngram_order > 1,
            "ngram_dim": not self.ngram_layers or self.ngram_dim % self.ngram_sizes.all_heads == 0,
            "ngram_end": self.ngram_end < self.vocab_size,
        }

    @property
    def index_sizes(self) -> IndexSizes:
        return IndexSizes(self.index_heads, self.index_dim, self.index_budget, self.index_ratio)

    @property
    def ngram_sizes(self) -> NgramSizes:
        return NgramSizes(
            self.ngram_order,
            self.ngram_heads,
            self.ngram_dim,
            self.ngram_base,
            self.ngram_multiple,
            self.ngram_seed,
            self.vocab_size,
            self.ngram_end,
            self.ngram_conv_width,
        )


class Qwen4ExpTransformer(StreamTransformer, HybridTransformer):
    args: Qwen4ExpArgs
    host_modules = IN_HOST_MEMORY

    def make_block(self, args: Qwen4ExpArgs, layer: int) -> Block:
        if layer in args.ngram_layers:
            block = NgramBlock(args, layer, args.ngram_layers.index(layer))
        else:
            block = StreamBlock(args, layer)
        block.attention = IndexedAttention(args) if layer in args.full_layers else DeltaNet(args)
        block.ffn = GatedSharedExpertMoE(args)
        return block

    def begin(self, tokens: Tensor, span: Tensor | Chunk) -> tuple[Tensor, Tensor, Context]:
        for block in self.layers:
            if isinstance(block, NgramBlock):
                block.ngrams.keep(tokens, span)
        return super().begin(tokens, span)


def ngram_fields(c: HFConfig, full_layers: tuple[int, ...]) -> dict:
    """Return where n-grams' embeddings are added, their size, and the token that ends a text."""
    n_layer, given = c["num_hidden_layers"], c.get("ple_layer_ids", [])
    if not isinstance(given, list) or any(not is_layer(n, n_layer + 1) or n < 1 for n in given):
        c.refuse("ple_layer_ids", f"a list of layers from 1 to {n_layer} is needed")
    layers = tuple(sorted({n - 1 for n in given}))
    if wrong := [n + 1 for n in layers if n in full_layers]:
        c.refuse("ple_layer_ids", f"layer {wrong[0]} has attention")
    c.setdefault("ple_embed_dim", c["hidden_size"])
    if c["ngram_size"] < 2:
        c.refuse("ngram_size", "at least 2 tokens are needed")
    heads = (c["ngram_size"] - 1) * c["heads_per_ngram"]
    if c.integer("ple_embed_dim") % heads and layers:
        c.refuse("ple_embed_dim", f"a multiple of the {heads} heads is needed")
    c.integer("split_ngram_parts")
    ends = c.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    if layers and (type(end) is not int or not 0 < end < c["vocab_size"]):
        c.refuse("eos_token_id", "n-grams need a token above 0 that ends a text")
    fields = {"ngram_layers": layers, "ngram_dim": c["ple_embed_dim"]}
    return fields | ({"ngram_end": end} if layers else {})


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
        eos_token_id=None,
        ple_layer_ids=[],
        ple_conv_kernel_size=4,
        ngram_size=3,
        heads_per_ngram=8,
        ngram_vocab_size_base=20_000_000,
        make_ngram_vocab_size_divisible_by=128,
        seed=1234,
        split_ngram_parts=512,
        hc_count=4,
        hc_lowrank=320,
    )
    field_of_key = HybridFamily.field_of_key | {
        "norm_topk_prob": "norm_topk",
        "hc_count": "streams",
        "hc_lowrank": "stream_rank",
        "ngram_size": "ngram_order",
        "heads_per_ngram": "ngram_heads",
        "ngram_vocab_size_base": "ngram_base",
        "make_ngram_vocab_size_divisible_by": "ngram_multiple",
        "seed": "ngram_seed",
        "ple_conv_kernel_size": "ngram_conv_width",
        "indexer_n_heads": "index_heads",
        "indexer_head_dim": "index_dim",
        "indexer_budget": "index_budget",
        "indexer_compress_ratio": "index_ratio",
    }
    nullable = *HybridFamily.nullable, "output_gate_type", "ple_layer_ids", "ple_embed_dim"
    only = {"mlp_only_layers": [], "decoder_sparse_step": 1, "attn_output_gate": True}
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
            why = f"a multiple of {rotated} is: partial_rotary_factor of the rope parameters"
            c.refuse("indexer_head_dim", why)
        if c.integer("indexer_kv_heads") != 1:
            c.refuse("indexer_kv_heads", "only 1 is")
        return fields | {"delta_gate": gate} | ngram_fields(c, fields["full_layers"])

    def window_fields(self, c: HFConfig) -> dict:
        kinds = c["layer_types"]
        if isinstance(kinds, list):
            c["layer_types"] = [KINDS[1] if kind == INDEXED else kind for kind in kinds]
        return super().window_fields(c)

    def attention_memory(self, args: Qwen4ExpArgs, length: int) -> tuple[int, int]:
        """A chunk's streams are several at once; some queries have scores of all blocks, fp32."""
        cached, extra = super().attention_memory(args, length)
        streams = 5 * min(length, PROMPT_CHUNK) * args.streams * args.dim
        blocks = -(-length // args.index_ratio)
        queries = queries_at_once(PROMPT_CHUNK, length)
        scores = queries * (2 * blocks * (args.index_heads + 2) + 2 * length)
        return cached + -(-args.index_dim // args.index_ratio), extra + streams + scores

    # Conversion ---------------------------------------------------------------------------------

    def layer_recipes(self, args: Qwen4ExpArgs, layer: int, layout: PublishedLayout) -> Recipes:
        table = super().layer_recipes(args, layer, layout)
        if layer not in args.ngram_layers:
            return table
        shards = [name for name in layout.names if name.startswith(f"{TABLE}.shard_")]
        parts = sum(name.endswith(".weight") for name in shards)
        ngrams = ngram_recipes(args, args.ngram_layers.index(layer), parts)
        return table | prefixed(ngrams, layer)

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
    is_nested = True
    renamed_tensors = (("model.language_model.", "model."),)
    left_out = "model.visual.", *Qwen4ExpText.left_out
    fixed = Qwen4ExpText.fixed | {"family": Qwen4ExpText.name}  # what is left is that model

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
            eos_token_id=248044,
            ple_layer_ids=[2],
            indexer_n_heads=4,
            indexer_kv_heads=1,
            indexer_head_dim=128,
            indexer_budget=2048,
            indexer_compress_ratio=4,
        )
    }
