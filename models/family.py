"""What a model family is: the base class of every file in models/ that describes one.

A family maps config.json to ModelArgs and back, published tensor names to ours, and says how tensor
parallelism shards its weights. models/mixtral.py is the smallest example.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from model import ModelArgs, Transformer
from models.config import HFConfig, published_format
from models.tensors import (
    Recipe,
    attention_recipes,
    dense_recipes,
    expert_recipes,
    norm_recipes,
    prefixed,
    rest_recipes,
)

NOTHING: Mapping = MappingProxyType({})


class Shard(NamedTuple):
    """How a weight [..., out, in] is sharded: along `axis`, each segment into equal parts.

    A segment is (count, width): `count` pieces of `width` numbers that stay whole. Each rank gets
    its part of every segment. A bias is sharded along the same axis, if it has that many.
    """

    axis: int
    segments: tuple[tuple[int, int], ...]


class Layout(NamedTuple):
    """How a published checkpoint stores one layer's experts."""

    fused: bool  # all experts in one tensor
    packed: bool  # in MXFP4


class Family:
    """One architecture. Subclasses set the attributes and override what differs from Mixtral."""

    name: ClassVar[str]  # ModelArgs.family, and transformers' model_type
    architecture: ClassVar[str]  # in config.json's "architectures"
    args_class: ClassVar[type[ModelArgs]] = ModelArgs
    model_class: ClassVar[type[Transformer]] = Transformer
    defaults: ClassVar[Mapping] = NOTHING  # of config.json's keys, as transformers' config has them
    keys: ClassVar[Mapping[str, str]] = NOTHING  # the family's own key -> the shared one
    only: ClassVar[Mapping] = NOTHING  # further rows of config.ONLY, or other values
    rope: ClassVar[Mapping] = NOTHING  # rope parameters of a config.json without any
    rope_types: ClassVar[tuple[str, ...]] = ("default",)
    published: ClassVar[tuple[str, ...]] = ("fp8",)  # rows of config.PUBLISHED
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()  # its tensor names -> the shared ones
    shapes: ClassVar[Mapping[str, ModelArgs]] = NOTHING  # published models, for benchmark.py
    sharded_fields: ClassVar[tuple[str, ...]] = ("dense_intermediate",)  # divided by the ranks

    def from_hf(self, config: dict) -> ModelArgs:
        """Return the args of a config.json. Raises ValueError naming the key that cannot be run."""
        return self.args_class(**self.fields(HFConfig(config, self)))

    def fields(self, c: HFConfig) -> dict:
        """Return the fields of args_class."""
        raise NotImplementedError

    def to_hf(self, args: ModelArgs) -> dict:
        """Return a config.json for these args: the inverse of `from_hf`."""
        return {
            "model_type": self.name,
            "vocab_size": args.vocab_size,
            "hidden_size": args.dim,
            "num_hidden_layers": args.n_layer,
            "num_attention_heads": args.n_head,
            "num_key_value_heads": args.n_kv_head,
            "head_dim": args.head_dim,
            "intermediate_size": args.dense_intermediate or args.intermediate,
            "num_experts_per_tok": args.n_active,
            "rms_norm_eps": args.norm_eps,
            "max_position_embeddings": args.max_position,
            "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta},
            "tie_word_embeddings": args.tied_embeddings,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }

    def attention_memory(self, args: ModelArgs, length: int) -> tuple[int, int]:
        """Return a layer's cached numbers per position, and those of a prompt's temporaries."""
        return 2 * args.n_kv_head * args.head_dim, 0

    def published_format(self, config: dict) -> str | None:
        """Return the format that config.json says its weights have, None for 16 or 32 bits."""
        return published_format(config, self.published)

    # Conversion ---------------------------------------------------------------------------------

    def layer_recipes(self, args: ModelArgs, layer: int, layout: Layout) -> dict[str, Recipe]:
        """Return the recipes of one layer."""
        if layer in args.dense_layers:
            ffn = dense_recipes("ffn", "mlp", args.dim, args.dense_intermediate)
        else:
            ffn = self.expert_recipes(args, layout)
        table = norm_recipes(args) | self.attention_recipes(args) | ffn
        return prefixed(table, layer)

    def attention_recipes(self, args: ModelArgs) -> dict[str, Recipe]:
        return attention_recipes(args)

    def expert_recipes(self, args: ModelArgs, layout: Layout) -> dict[str, Recipe]:
        return expert_recipes(args, layout.fused)

    def rest_recipes(self, args: ModelArgs) -> dict[str, Recipe]:
        return rest_recipes(args)

    # Tensor parallelism ---------------------------------------------------------------------------

    def shard_table(self, args: ModelArgs) -> dict[str, Shard]:
        """Return module (without its layer) -> how its weight is sharded. Others are replicated."""
        queries, kv = (args.n_head, args.head_dim), (args.n_kv_head, args.head_dim)
        inner, dense = (args.intermediate, 1), (args.dense_intermediate, 1)
        table = {
            "attention.wqkv": Shard(0, (queries, kv, kv)),
            "attention.wo": Shard(1, (queries,)),
            "ffn.experts.w13": Shard(1, (inner, inner)),
            "ffn.experts.w2": Shard(2, (inner,)),
            "ffn.w13": Shard(0, (dense, dense)),
            "ffn.w2": Shard(1, (dense,)),
            "head": Shard(0, ((args.vocab_size, 1),)),
        }
        if args.qk_norm == "full":
            table["attention.q_norm"] = Shard(0, (queries,))
            table["attention.k_norm"] = Shard(0, (kv,))
        return table


def shared_expert_shards(args) -> dict[str, Shard]:
    """Return the rows of the shard table for a shared expert."""
    width = (args.shared_intermediate, 1)
    return {"ffn.shared.w13": Shard(0, (width, width)), "ffn.shared.w2": Shard(1, (width,))}
