"""Reading a Hugging Face config.json: values under common keys, absent ones filled in, checked.

The file may have the hub's older keys (rope_theta, rope_scaling, torch_dtype) or those of
transformers 5 (rope_parameters, dtype). Every unsupported value is refused by the key that the
file has.
"""

# Defaults of keys that are optional in every family. A family's own defaults come first.
OPTIONAL: dict = dict(
    tie_word_embeddings=False,
    norm_topk_prob=False,
    attention_bias=False,
    qkv_bias=False,
    clip_qkv=None,
    use_sliding_window=True,
    sliding_window=None,
    layer_types=[],
    mlp_only_layers=[],
    decoder_sparse_step=1,
    use_qk_norm=False,
    routed_scaling_factor=1.0,
    partial_rotary_factor=1,
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
    shared_expert_intermediate_size=0,
    lm_head_bias=False,
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
)

# Keys of the rope parameters by rope_type, and their defaults.
ROPE_KEYS: dict[str, dict] = {
    "default": {},
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

# By quant_method: the format of formats.FORMATS, and what else quantization_config must say.
PUBLISHED: dict[str, tuple[str, dict]] = {
    "fp8": (
        "fp8b",
        {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "mxfp4": ("mxfp4", {}),
}

MAX_INTEGER = 1 << 24
MAX_INTEGERS = dict(num_hidden_layers=4096, num_experts=4096, num_nextn_predict_layers=4096)


def published_format(config: dict, methods: tuple[str, ...]) -> str | None:
    """Return the format that config.json says its weights have, None for 16 or 32 bits.

    methods: the quant_methods that the family is published in. Raises ValueError naming any other.
    """
    given = config.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method", given) if isinstance(given, dict) else given
    what = f"quantization_config = {method!r}"
    if isinstance(given, dict) and method in methods:
        name, required = PUBLISHED[method]
        key = next((key for key, value in required.items() if given.get(key) != value), None)
        if key is None:
            return name
        what = f"quantization_config's {key} = {given.get(key)!r}"
    raise ValueError(
        f"config.json: {what} is not supported; fetch the original bf16 or fp16 checkpoint"
    )


class HFConfig(dict):
    """A config.json under the keys that families share. Accessors raise ValueError naming the key.

    family: has defaults, keys (its own key -> the shared one), rope, rope_types, only, published.
    """

    def __init__(self, config: dict, family):
        self.family = family
        # null stands for an absent key, except where queries have no low-rank projection.
        given = {k: v for k, v in config.items() if v is not None or k == "q_lora_rank"}
        published_format(given, family.published)
        if "num_local_experts" in given:  # both names are in use
            given.setdefault("num_experts", given["num_local_experts"])
        rope = given.get("rope_scaling") or given.get("rope_parameters") or dict(family.rope)
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(
                f"config.json: rope parameters {rope!r} are not supported "
                "(one set for all layers is)"
            )
        given["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
        for key in ("rope_theta", "partial_rotary_factor"):
            if rope.get(key) is not None:
                given[key] = rope[key]
        shared = {family.keys.get(k, k): v for k, v in (family.defaults | given).items()}
        super().__init__(OPTIONAL | shared)
        if self["rope_type"] not in family.rope_types:
            known = " and ".join(map(repr, family.rope_types))
            self.refuse("rope_type", f"only {known} can be run")
        for key, default in ROPE_KEYS[self["rope_type"]].items():
            self[key] = rope[key] if rope.get(key) is not None else self.get(key, default)
        for key, value in (ONLY | family.only).items():
            if key not in family.defaults and given.get(key, value) != value:
                self.refuse(key, f"only {value!r} is")

    def refuse(self, key: str, why: str):
        """Raise the ValueError for a key, named as the file has it."""
        own = {shared: own for own, shared in self.family.keys.items()}.get(key, key)
        raise ValueError(f"config.json: {own} = {self.get(key)!r:.80} is not supported ({why})")

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
        if type(self[key]) not in (int, float) or not 0 < self[key] < 1e30:
            self.refuse(key, "a positive number is needed")
        return float(self[key])

    def optional(self, key: str) -> float | None:
        """Return a positive number, or None for null."""
        return None if self[key] is None else self.number(key)

    def flag(self, key: str) -> bool:
        if type(self[key]) is not bool:
            self.refuse(key, "true or false is needed")
        return self[key]


# Fields of ModelArgs ------------------------------------------------------------------------------


def common_fields(c: HFConfig, width_key: str = "intermediate_size") -> dict:
    """Return the fields that every family has. width_key: an expert's intermediate size."""
    return head_fields(c) | {
        "family": c.family.name,
        "dim": c.integer("hidden_size"),
        "n_layer": c.integer("num_hidden_layers"),
        "vocab_size": c.integer("vocab_size"),
        "max_position": c.integer("max_position_embeddings"),
        "rope_theta": c.number("rope_theta"),
        "norm_eps": c.number("rms_norm_eps"),
        "tied_embeddings": c.flag("tie_word_embeddings"),
        **expert_fields(c, width_key),
    }


def head_fields(c: HFConfig) -> dict:
    """Return the number and size of attention heads."""
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
    return {"n_head": heads, "n_kv_head": c["num_key_value_heads"], "head_dim": c["head_dim"]}


def expert_fields(c: HFConfig, width_key: str) -> dict:
    """Return the number of experts and the intermediate dim of one."""
    n_active, n_expert = c.integer("num_experts_per_tok"), c.integer("num_experts")
    if n_active > n_expert:
        c.refuse("num_experts_per_tok", f"there are {n_expert} experts")
    for key in ("hidden_size", width_key):
        if c.integer(key) % 8:
            c.refuse(key, "it must be a multiple of 8: a grouped GEMM wants rows of 16 bytes")
    return {"n_active": n_active, "n_expert": n_expert, "intermediate": c[width_key]}


def dense_fields(c: HFConfig) -> dict:
    """Return which layers have one dense FFN instead of experts."""
    listed, step = c["mlp_only_layers"], c.integer("decoder_sparse_step")
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        c.refuse("mlp_only_layers", "a list of layer numbers is needed")
    first = c.count("first_k_dense_replace")
    layers = range(c["num_hidden_layers"])
    dense = tuple(n for n in layers if n < first or n in listed or (n + 1) % step)
    width = c.integer("intermediate_size") if dense else 0
    return {"dense_layers": dense, "dense_intermediate": width}


def window_field(c: HFConfig) -> dict:
    """Return the sliding window of a family whose layers all have the same."""
    windowed = c.flag("use_sliding_window") and c["sliding_window"] is not None
    kind = "sliding_attention" if windowed else "full_attention"
    if not isinstance(c["layer_types"], list) or any(other != kind for other in c["layer_types"]):
        c.refuse("layer_types", f"all must be {kind!r}")
    return {"sliding_window": c.integer("sliding_window") if windowed else None}


def refuse_windows(c: HFConfig) -> None:
    """Raise ValueError if some layer of a family without sliding windows has one."""
    c.flag("use_sliding_window")  # ignored, as transformers does, but it must be a flag
    kinds = c["layer_types"]
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        c.refuse("layer_types", "all must be 'full_attention'")


def rotary_dim(c: HFConfig) -> int:
    """Return how many numbers of a head are rotated, from partial_rotary_factor."""
    rotated = int(c.number("partial_rotary_factor") * c["head_dim"])
    if rotated < 2 or rotated % 2 or c["head_dim"] % rotated:
        why = f"an even divisor of head_dim = {c['head_dim']} is needed"
        c.refuse("partial_rotary_factor", why)
    return rotated
