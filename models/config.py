"""Reading a Hugging Face config.json: values under common keys, absent ones filled in, checked.

The file may have the hub's older keys (rope_theta, rope_scaling, torch_dtype) or those of
transformers 5 (rope_parameters, dtype). Every unsupported value is refused by the key that the
file has.
"""

import dataclasses
from collections.abc import Callable
from typing import get_args

from models.quantization import published_format

# Keys that are one field of ModelArgs in every family. A family adds rows (`field_of_key`).
COMMON_FIELDS = dict(
    vocab_size="vocab_size",
    hidden_size="dim",
    num_hidden_layers="n_layer",
    num_attention_heads="n_head",
    num_key_value_heads="n_kv_head",
    head_dim="head_dim",
    num_experts="n_expert",
    num_experts_per_tok="n_active",
    max_position_embeddings="max_position",
    rope_theta="rope_theta",
    rms_norm_eps="norm_eps",
    tie_word_embeddings="tied_embeddings",
)

# The only value that a key may have, in families that have no default for it.
ONLY = dict(
    hidden_act="silu",
    partial_rotary_factor=1,
    mlp_bias=False,
    qkv_bias=False,
    use_qkv_bias=False,
    shared_expert_intermediate_size=0,
    n_shared_experts=0,
    shared_intermediate_size=0,
    use_qk_norm=False,
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
    scoring_func="softmax",
    embedding_multiplier=1,
    attention_multiplier=None,
    residual_multiplier=1,
    logits_scaling=1,
    routed_scaling_factor=1,
    n_group=1,
    topk_group=1,
    lm_head_bias=False,
    rope_interleave=True,
    moe_layer_freq=1,
    kv_lora_rank=None,
    is_causal=True,
    per_layer_config={},
)

# Defaults of other keys that are optional in every family. A family's own defaults come first.
OPTIONAL: dict = dict(
    tie_word_embeddings=False,
    norm_topk_prob=False,
    attention_bias=False,
    clip_qkv=None,
    use_sliding_window=True,
    sliding_window=None,
    layer_types=None,
    mlp_only_layers=[],
    decoder_sparse_step=1,
    q_lora_rank=None,
)

# Null for these keys is their default in OPTIONAL, or that they are absent. For other keys that a
# family reads, null is refused: transformers refuses it, too, or has no one meaning for it. Other
# keys for which null means something in a family are its `nullable`.
NULLABLE = (
    *("layer_types", "mlp_only_layers", "sliding_window", "clip_qkv"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "rope_scaling", "rope_parameters"),
)
# Keys that families read without a default of their own in `Family.defaults`.
READ = {
    *COMMON_FIELDS,
    *OPTIONAL,
    *("hidden_act", "hidden_activation", "rope_interleave", "n_group", "topk_group"),
    *("is_causal", "mlp_bias"),
    *("full_attention_interval", "topk_method", "global_head_dim"),
}

# Names of one number. A file may have several, if they agree.
EXPERT_COUNTS = "num_experts", "num_local_experts", "n_routed_experts"

# Defaults of further rope parameters, by rope_type.
ROPE_KEYS: dict[str, dict] = {
    "default": {},
    "linear": dict(factor=None, mscale_all_dim=None),
    "llama3": dict(
        factor=None,
        low_freq_factor=None,
        high_freq_factor=None,
        original_max_position_embeddings=None,
        mscale_all_dim=None,
    ),
    "longrope": dict(short_factor=None, short_mscale=None, original_max_position_embeddings=None),
    "yarn": dict(
        factor=None,
        original_max_position_embeddings=None,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
        mscale=None,
        mscale_all_dim=None,
        attention_factor=None,
    ),
}
# Rope parameters of YaRN for which null means something. The others are refused.
ROPE_NULLABLE = (
    *("factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    "attention_factor",
)

MAX_NUMBER = 1e30
MAX_INTEGER = 1 << 25
MAX_INTEGERS = dict(num_hidden_layers=4096, num_experts=4096, num_nextn_predict_layers=4096)


# Keys beside text_config that say something about the language model.
BESIDE_TEXT = (
    *("architectures", "model_type", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def nested_text_config(config: dict) -> dict:
    """Return the language model's config, which a larger config.json has as `text_config`.

    Of tie_word_embeddings, the larger model's counts: the head is not the language model's.
    """
    if "text_config" not in config:
        return config
    nested = config["text_config"]
    if not isinstance(nested, dict):
        raise unsupported("text_config", nested)
    found = {key: config[key] for key in BESIDE_TEXT if key in config} | nested
    tie = "tie_word_embeddings"
    if tie in config:
        found[tie] = config[tie]
    elif not found.get(tie):
        found.pop(tie, None)  # the larger model's default
    return found


def unsupported(key: str, value, why: str = "") -> ValueError:
    """Return the error for a key of config.json."""
    reason = f" ({why})" if why else ""
    return ValueError(f"config.json: {key} = {value!r:.80} is not supported{reason}")


def own_key(family, key: str) -> str:
    """Return the family's own name of a shared key."""
    return {shared: own for own, shared in family.renamed_keys.items()}.get(key, key)


class HFConfig(dict):
    """A config.json under the keys that families share. Accessors raise ValueError naming the key.

    family: a models.family.Family, whose defaults, renamed keys and refusals apply.
    """

    def __init__(self, config: dict, family):
        self.family, self.names = family, config.keys()
        self.nulls = {key for key, value in config.items() if value is None}
        given = {key: value for key, value in config.items() if value is not None}
        published_format(given, family.published)
        rope = rope_values(config, family)
        self.nulls -= rope.keys()  # those beside the set, if it has the key
        self.nulls |= {key for key, value in rope.items() if value is None}
        rope = {key: value for key, value in rope.items() if value is not None}
        self.check_only(given | rope)
        # `arg_fields` checks these first, as sizes that belong to another model of the family.
        self.check_nulls(but=("head_dim", *family.needed))
        given |= one_expert_count(config, family)
        # A shared name that the family has for another key of its own is no key of this file.
        foreign = {*family.renamed_keys.values()} - family.renamed_keys.keys()
        replaced = self.nulls & {*NULLABLE, *family.nullable}
        defaults = {k: value for k, value in family.defaults.items() if k not in replaced}
        for key in foreign:
            given.pop(key, None)
        own = {family.renamed_keys.get(key, key): v for key, v in (defaults | given).items()}
        super().__init__(ONLY | OPTIONAL | ROPE_KEYS[rope["rope_type"]] | own | rope)

    def check_only(self, given: dict) -> None:
        """Raise ValueError for a key that has one value alone, and another in the file."""
        for key, value in (ONLY | self.family.only).items():
            free = key in self.family.defaults or key in self.family.renamed_keys
            if free or key not in given:
                continue
            alike = isinstance(given[key], bool) == isinstance(value, bool)
            if given[key] != value or not alike:
                raise unsupported(key, given[key], f"only {value!r} is")

    def check_nulls(self, but: tuple[str, ...] = ()) -> None:
        """Raise ValueError for a null that means nothing."""
        family = self.family
        for key in sorted(self.nulls - {*NULLABLE, *family.nullable, *but}):
            is_read = family.defaults.get(key, key if key in READ else None) is not None
            if is_read or family.only.get(key):  # null is not the one value that it may have
                raise unsupported(key, None, "it needs a value, or no such key")

    def __missing__(self, key: str):
        self.refuse(key, "it needs a value")

    def is_null(self, key: str) -> bool:
        """Whether the file has null for this key of its own."""
        return key in self.nulls

    def refuse(self, key: str, why: str):
        """Raise the ValueError for a key, named as the file has it."""
        own = own_key(self.family, key)
        if own in EXPERT_COUNTS:
            own = next((name for name in (own, *EXPERT_COUNTS) if name in self.names), own)
        raise unsupported(own, self.get(key), why)

    def integer(self, key: str) -> int:
        """Return a positive integer."""
        limit = MAX_INTEGERS.get(key, MAX_INTEGER)
        if type(self[key]) is not int or not 0 < self[key] <= limit:
            self.refuse(key, f"an integer from 1 to {limit} is needed")
        return self[key]

    def count(self, key: str) -> int:
        """Return a positive integer or 0."""
        return 0 if self[key] == 0 and type(self[key]) is int else self.integer(key)

    def number(self, key: str) -> float:
        """Return a positive number."""
        if type(self[key]) not in (int, float) or not 0 < self[key] < MAX_NUMBER:
            self.refuse(key, "a positive number is needed")
        return float(self[key])

    def flag(self, key: str) -> bool:
        if type(self[key]) is not bool:
            self.refuse(key, "true or false is needed")
        return self[key]

    def value(self, key: str, kind, zero: bool = False):
        """Return a value of an args field's type: bool, int, float, or one of these or None.

        zero: 0 is allowed too.
        """
        plain, *none = get_args(kind) or (kind,)
        if none and self[key] is None:
            return None
        read = {bool: self.flag, int: self.count if zero else self.integer, float: self.number}
        return read[plain](key)


def rope_values(config: dict, family) -> dict:
    """Return RoPE's type and parameters, those in a set of their own before those beside it.

    A parameter may be null. Raises ValueError for a set that is none.
    """
    own = config.get("rope_parameters")
    rope = config.get("rope_scaling") or (dict(family.rope) if own is None else own)
    for given in ({} if own is None else own, rope):
        if not isinstance(given, dict):
            raise ValueError(f"config.json: rope parameters {given!r:.80} are not supported")
    for key, value in rope.items():
        if isinstance(value, dict):
            why = "one set of rope parameters for all layers is"
            raise unsupported(f"rope parameter {key}", value, why)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in family.rope_types:
        why = f"only {' and '.join(map(repr, family.rope_types))} can be run"
        raise unsupported("rope_type", kind, why)
    known = "rope_theta", "partial_rotary_factor", *ROPE_KEYS[kind]
    found = {key: rope[key] for key in known if key in rope}
    original = "original_max_position_embeddings"
    if original in known and original in config:
        found[original] = config[original]
    elif original in known and original not in found:
        longest = config.get("max_position_embeddings")
        found[original] = longest or family.defaults["max_position_embeddings"]
    for key, value in found.items():
        if value is None and not (kind == "yarn" and key in ROPE_NULLABLE):
            raise unsupported(key, None, "it needs a value, or no such key")
    return found | {"rope_type": kind}


def one_expert_count(config: dict, family) -> dict:
    """Return the number of experts under the family's own key. Raise ValueError for two numbers."""
    given = {key: config[key] for key in EXPERT_COUNTS if key in config}
    own = own_key(family, "num_experts")
    if own not in EXPERT_COUNTS or not given:
        return {}
    count = given[own] if own in given else next(iter(given.values()))
    for key, value in given.items():
        if value is None or value != count or type(value) is not type(count):
            raise unsupported(key, value, f"{own} is {count!r:.40}")
    return {own: count}


# Fields of ModelArgs ------------------------------------------------------------------------------


def common_fields(c: HFConfig) -> dict:
    """Return the fields that most families read alike, and those of the family's `field_of_key`."""
    check_heads(c)
    width_key = expert_width_key(c.family)
    check_experts(c, width_key)
    kinds = {field.name: field.type for field in dataclasses.fields(c.family.args_class)}
    rows = COMMON_FIELDS | c.family.field_of_key | {width_key: "intermediate"}
    fields = {
        name: c.value(key, kinds[name], zero=name.endswith("_intermediate"))
        for key, name in rows.items()
    }
    if has_dense_layers(c.family):
        fields |= dense_fields(c)
    if own_key(c.family, "n_shared_experts") in c.family.defaults:
        c.count("num_nextn_predict_layers")  # heads for multi-token prediction
        fields["shared_intermediate"] = c.count("n_shared_experts") * fields["intermediate"]
    return {"family": c.family.name} | fields


def has_dense_layers(family) -> bool:
    """Whether config.json may ask for dense layers: then it has two intermediate sizes."""
    return "moe_intermediate_size" in family.defaults


def expert_width_key(family) -> str:
    return "moe_intermediate_size" if has_dense_layers(family) else "intermediate_size"


def check_heads(c: HFConfig) -> None:
    """Check the attention heads; fill in their size and the number of KV heads."""
    heads, dim = c.integer("num_attention_heads"), c.integer("hidden_size")
    c.setdefault("num_key_value_heads", heads)
    if heads % c.integer("num_key_value_heads"):
        c.refuse("num_key_value_heads", f"it must divide num_attention_heads = {heads}")
    if "head_dim" not in c and dim % heads:
        why = f"without a head_dim, it must be a multiple of num_attention_heads = {heads}"
        c.refuse("hidden_size", why)
    c.setdefault("head_dim", dim // heads)
    if c.integer("head_dim") % 2:
        c.refuse("head_dim", "it must be even to be rotated")


def check_experts(c: HFConfig, width_key: str) -> None:
    """Check the numbers of experts and what the grouped GEMM needs of sizes."""
    if c.integer("num_experts_per_tok") > c.integer("num_experts"):
        c.refuse("num_experts_per_tok", f"there are {c['num_experts']} experts")
    for key in ("hidden_size", width_key):
        if c.integer(key) % 8:
            c.refuse(key, "it must be a multiple of 8: a grouped GEMM wants rows of 16 bytes")


def dense_fields(c: HFConfig) -> dict:
    """Return which layers have one dense FFN instead of experts, and its intermediate size."""
    listed, step = c["mlp_only_layers"], c.integer("decoder_sparse_step")
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        c.refuse("mlp_only_layers", "a list of layer numbers is needed")
    first = c.count("first_k_dense_replace")
    layers = range(c["num_hidden_layers"])
    dense = tuple(n for n in layers if n < first or n in listed or (n + 1) % step)
    width = c.integer("intermediate_size") if dense else 0
    if "intermediate_size" in c:  # without dense layers, too: transformers reads it
        c.count("intermediate_size")
    return {"dense_layers": dense, "dense_intermediate": width}


def read_mlp_types(c: HFConfig, first_dense: int) -> None:
    """Let mlp_layer_types say which layers are dense; absent, it is the first `first_dense`.

    transformers reads no other key for that in the families that have this one.
    """
    n_layer, kinds = c.integer("num_hidden_layers"), c.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense" if layer < first_dense else "sparse" for layer in range(n_layer)]
    known = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
    if not known or len(kinds) != n_layer:
        c.refuse("mlp_layer_types", f"'dense' or 'sparse' is needed for each of {n_layer} layers")
    c["mlp_only_layers"] = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
    c["first_k_dense_replace"], c["decoder_sparse_step"] = 0, 1


def listed_kinds(c: HFConfig, known: tuple[str, ...]) -> list[str] | None:
    """Return each layer's kind from layer_types, None if it is absent. known: all kinds."""
    kinds, n_layer = c["layer_types"], c.integer("num_hidden_layers")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        c.refuse("layer_types", f"all must be {' or '.join(map(repr, known))}")
    if len(kinds) != n_layer:
        c.refuse("layer_types", f"there are {n_layer} layers")
    return kinds


def full_layers(
    c: HFConfig, kinds: tuple[str, str], is_full: Callable[[int], bool]
) -> tuple[int, ...]:
    """Return the layers of the second of two kinds in layer_types; if absent, by `is_full`."""
    listed, layers = listed_kinds(c, kinds), range(c.integer("num_hidden_layers"))
    return tuple(n for n in layers if (is_full(n) if listed is None else listed[n] == kinds[1]))


def window_field(c: HFConfig) -> dict:
    """Return the sliding window that all layers have, or None. Refuse one that only some have.

    A family without windows, or without use_sliding_window, ignores the key, as transformers does.
    """
    used = c.flag("use_sliding_window") or "use_sliding_window" not in c.family.defaults
    has_size = c["sliding_window"] is not None and c.count("sliding_window") is not None
    windowed = used and has_size and c.family.has_window
    listed_kinds(c, ("sliding_attention" if windowed else "full_attention",))
    return {"sliding_window": c.integer("sliding_window") if windowed else None}


def rotary_dim(c: HFConfig) -> int:
    """Return how many numbers of a head are rotated, from partial_rotary_factor."""
    rotated = int(c.number("partial_rotary_factor") * c["head_dim"])
    if rotated < 2 or rotated % 2 or c["head_dim"] % rotated:
        why = f"an even divisor of head_dim = {c['head_dim']} is needed"
        c.refuse("partial_rotary_factor", why)
    return rotated
