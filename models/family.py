"""What a model family is: the base class of every file in models/ that describes one.

A family maps config.json to ModelArgs and back, published tensor names to ours, and says how tensor
parallelism shards its weights. models/mixtral.py is the smallest example.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from formats.quantizer import MTP
from model import ModelArgs, Transformer
from models.config import (
    HFConfig,
    common_fields,
    nested_text_config,
    own_key,
    window_field,
)
from models.gguf import TENSORS, MadeTable, Values, common_config
from models.quantization import METHODS, Published, published_config
from models.tensors import (
    Recipes,
    attention_recipes,
    dense_recipes,
    expert_recipes,
    norm_recipes,
    prefixed,
    rest_recipes,
    score_bias_recipe,
    shared_expert_recipes,
)

NOTHING: Mapping = MappingProxyType({})
HEAD_SUFFIX = f".{MTP}"  # a head for multi-token prediction has a family of this suffix


class Shard(NamedTuple):
    """How a weight [..., out, in] is sharded: along `axis`, each segment into equal parts.

    A segment is (count, width): `count` pieces of `width` numbers that stay whole. Each rank gets
    its part of every segment. A bias is sharded along the same axis, if it has that many.
    """

    axis: int
    segments: tuple[tuple[int, int], ...]


class PublishedLayout(NamedTuple):
    """How a published checkpoint stores one layer."""

    fused: bool  # all experts in one tensor
    packed: bool  # experts in MXFP4
    separate: bool = False  # gate and up of all experts are two tensors (GGUF)
    names: frozenset[str] = frozenset()  # the layer's tensors, without its prefix


class PublishedHead(NamedTuple):
    """Where a published checkpoint has its head: names with {n}, the model's number of layers."""

    layer: str  # prefix of the decoder layer
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str

    def at(self, args: ModelArgs) -> "PublishedHead":
        """Return the names for a model."""
        return PublishedHead(*(name.format(n=args.n_layer) for name in self))


# Qwen3-Next, Qwen3.5 and Qwen3.6.
APART = PublishedHead(
    "mtp.layers.0.",
    "mtp.fc.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.norm.weight",
)
# DeepSeek-V3 and GLM: one more layer. Its embed_tokens and shared_head.head are the model's.
ONE_MORE_LAYER = PublishedHead(
    "model.layers.{n}.",
    "model.layers.{n}.eh_proj.weight",
    "model.layers.{n}.enorm.weight",
    "model.layers.{n}.hnorm.weight",
    "model.layers.{n}.shared_head.norm.weight",
)


class Family:
    """One architecture. Subclasses set the attributes and override what differs from Mixtral."""

    name: str  # ModelArgs.family, and transformers' model_type
    args_class: type[ModelArgs] = ModelArgs
    model_class: type[Transformer] = Transformer

    # config.json
    is_nested: bool = False  # it may have the language model's as `text_config`
    defaults: Mapping = NOTHING  # values of absent keys, those of transformers' config class
    renamed_keys: Mapping[str, str] = NOTHING  # its own key -> the shared one
    field_of_key: Mapping[str, str] = NOTHING  # shared key -> field
    nullable: tuple[str, ...] = ()  # its own keys for which null means something
    fixed: Mapping = NOTHING  # fields with one value in the whole family
    needed: Mapping = NOTHING  # values that differ from the key's default, as for `only`
    only: Mapping = NOTHING  # further rows of config.ONLY, or other values
    has_window: bool = False  # all layers may share a sliding window
    rope: Mapping = NOTHING  # rope parameters of a config.json without any
    rope_types: tuple[str, ...] = ("default",)
    published: tuple[str, ...] = METHODS  # quant_methods that it may be published in
    # Published models, for benchmark.py: config.json without what `defaults` has.
    shapes: Mapping[str, dict] = NOTHING

    # GGUF files (models/gguf.py)
    gguf: str | None = None  # their architecture; None: they are not read
    gguf_keys: Mapping[str, str] = NOTHING  # config.json's shared key -> the value's, if not usual
    gguf_tensors: MadeTable = {}  # a layer's published name -> how it is made
    gguf_rest: MadeTable = {}  # the same for tensors outside of the layers
    gguf_norm: Callable | None = None  # undoes what llama.cpp adds to weights of norms

    # Fields that tensor parallelism divides by the ranks, beside those of every family: numbers,
    # or tuples with one for each layer.
    sharded: tuple[str, ...] = ()
    # Fields whose KV heads are sharded, or replicated if there are fewer of them than ranks.
    kv_head_fields: tuple[str, ...] = ("n_kv_head",)

    renamed_tensors: tuple[tuple[str, str], ...] = ()  # its names -> the shared ones
    has_score_bias: bool = False  # the router's bias (SigmoidRoutedMoE) is published
    has_shared_gate: bool = False  # that of GatedSharedExpertMoE is, too
    # Where a head for multi-token prediction is published (models/multi_token.py).
    published_head: PublishedHead | None = None
    left_out: tuple[str, ...] = ()  # prefixes (shared) of tensors that the model has no use for

    def text_config(self, config: dict) -> dict:
        """Return the config of the language model."""
        return nested_text_config(config) if self.is_nested else config

    def from_hf(self, config: dict) -> ModelArgs:
        """Return the args of a config.json. Raises ValueError naming the key that cannot be run."""
        c = HFConfig(self.text_config(config), self)
        fields = self.arg_fields(c)
        c.check_nulls()
        return self.args_class(**fields)

    def arg_fields(self, c: HFConfig) -> dict:
        """Return the fields of args_class. Families extend it, and refuse what they cannot run."""
        return common_fields(c) | self.window_fields(c) | dict(self.fixed)

    def window_fields(self, c: HFConfig) -> dict:
        return window_field(c)

    @property
    def sharded_fields(self) -> tuple[str, ...]:
        """All fields that tensor parallelism divides by the ranks, beside those of `ModelArgs`."""
        names = (field.name for field in dataclasses.fields(self.args_class))
        return *(name for name in names if name.endswith("_intermediate")), *self.sharded

    def sharded_heads(self, args: ModelArgs) -> dict[str, int]:
        """Return what to call them -> heads besides `n_head` that the ranks must divide."""
        return {}

    def attention_memory(self, args: ModelArgs, length: int) -> tuple[int, int]:
        """Return a layer's cached numbers per position, and those of a prompt's temporaries."""
        return 2 * args.n_kv_head * args.head_dim, 0

    def published_weights(self, config: dict) -> Published | None:
        """Return how config.json says its weights are stored, None for 16 or 32 bits."""
        return published_config(config.get("quantization_config"), self.published)

    def published_format(self, config: dict) -> str | None:
        """Return the format that most published weights get, None for 16 or 32 bits."""
        published = self.published_weights(config)
        return published and published.name

    def head_args(self, args: ModelArgs) -> ModelArgs:
        """Return the args of a head for multi-token prediction (models/multi_token.py)."""
        return dataclasses.replace(args, **self.head_fields(args))

    def head_fields(self, args: ModelArgs) -> dict:
        """Return the args' fields that differ for a head: it is one layer, with experts."""
        return {"family": args.family + HEAD_SUFFIX, "n_layer": 1, "dense_layers": ()}

    # GGUF files ---------------------------------------------------------------------------------

    def is_gguf(self, values: Values) -> bool:
        """Whether a file of the architecture `gguf` is of this family: some share one."""
        return True

    def gguf_config(self, values: Values) -> dict:
        """Return the config.json of a GGUF file. Families extend it."""
        shared = common_config(values, self.gguf_keys)
        return {own_key(self, key): value for key, value in shared.items()}

    def gguf_args(self, args: ModelArgs) -> ModelArgs:
        """Return the args of a GGUF file's model. args: of its config.json."""
        return args

    def gguf_layer(self, args: ModelArgs) -> MadeTable:
        """Return how a layer's published tensors are made of a GGUF file's."""
        return TENSORS | dict(self.gguf_tensors)

    # Conversion ---------------------------------------------------------------------------------

    def published_layers(self, args: ModelArgs) -> int:
        """Return the number of layers as checkpoints have them."""
        return args.n_layer

    def experts_at(self, args: ModelArgs, layer: int) -> int:
        """Return which published layer has the experts of a layer."""
        return layer

    def layer_recipes(self, args: ModelArgs, layer: int, layout: PublishedLayout) -> Recipes:
        """Return the recipes of one layer."""
        if layer in args.dense_layers:
            ffn = dense_recipes("ffn", "mlp", args.dim, args.dense_intermediate)
        else:
            ffn = self.expert_recipes(args, layout)
        return prefixed(self.norm_recipes(args) | self.mixer_recipes(args, layer) | ffn, layer)

    def norm_recipes(self, args: ModelArgs) -> Recipes:
        return norm_recipes(args)

    def mixer_recipes(self, args: ModelArgs, layer: int) -> Recipes:
        """Return the recipes of a layer's attention, or of what it has in place of that."""
        return self.attention_recipes(args)

    def attention_recipes(self, args: ModelArgs) -> Recipes:
        return attention_recipes(args)

    def expert_recipes(self, args: ModelArgs, layout: PublishedLayout) -> Recipes:
        shared = shared_expert_recipes(args, self.has_shared_gate)
        bias = score_bias_recipe(args) if self.has_score_bias else {}
        return expert_recipes(args, layout.fused) | shared | bias

    def rest_recipes(self, args: ModelArgs) -> Recipes:
        return rest_recipes(args)

    # Tensor parallelism ---------------------------------------------------------------------------

    def shard_table(self, args: ModelArgs) -> dict[str, Shard]:
        """Return module -> how its weight is sharded. Others are replicated.

        A name is without its layer, or with it if that differs from others.

        The first product of a pair is column-parallel, in the terms of Megatron-LM (Shoeybi et al.
        2019): each rank has some of the outputs. The second is row-parallel: each rank has the
        inputs that it computed, and the ranks' partial outputs are summed by one all-reduce.
        """
        queries, kv = (args.n_head, args.head_dim), (args.n_kv_head, args.head_dim)
        inner, dense = (args.intermediate, 1), (args.dense_intermediate, 1)
        table = {
            "attention.wqkv": Shard(0, (queries, kv, kv)),  # column-parallel: whole heads
            "attention.wo": Shard(1, (queries,)),  # row-parallel
            "ffn.experts.w13": Shard(1, (inner, inner)),  # column-parallel: gate, then up
            "ffn.experts.w2": Shard(2, (inner,)),  # row-parallel
            "ffn.w13": Shard(0, (dense, dense)),
            "ffn.w2": Shard(1, (dense,)),
            "head": Shard(0, ((args.vocab_size, 1),)),
        }
        if args.qk_norm == "full":
            table["attention.q_norm"] = Shard(0, (queries,))
            table["attention.k_norm"] = Shard(0, (kv,))
        if shared := getattr(args, "shared_intermediate", 0):
            table["ffn.shared.w13"] = Shard(0, ((shared, 1), (shared, 1)))
            table["ffn.shared.w2"] = Shard(1, ((shared, 1),))
        return table
