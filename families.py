"""The architectures that can be run, as data, and how a Hugging Face config.json becomes ModelArgs.

A family of models is one row of FAMILIES. `args_from_hf` reads a config.json under the keys that the families share
(Config), one step for each part of a model; what is not supported is refused by its key and value.
"""

import math
from dataclasses import dataclass, field

from args import ModelArgs, Yarn


@dataclass(frozen=True)
class Family:
    """What distinguishes one architecture, in the terms of its config.json and of its tensors' names."""

    model_type: str
    defaults: dict  # the meaning of an absent key: the defaults of transformers' config class
    fixed: dict  # fields of ModelArgs that are the same in the whole family
    renames: tuple[tuple[str, str], ...] = ()  # from its tensor names to those that the other families share
    keys: tuple[tuple[str, str], ...] = ()  # likewise from its config's keys
    layer_types: tuple[str, ...] = ()  # what its layers are in turn where config.json does not say; (): all alike
    rope: dict = field(default_factory=dict)  # likewise its rope parameters
    rope_types: tuple[str, ...] = ("default",)  # rows of ROPES
    quantised: tuple[str, ...] = ("fp8",)  # rows of PUBLISHED
    choices: tuple[str, ...] = ()  # what topk_method may be, the first where it is not given
    only: dict = field(default_factory=dict)  # further rows of ONLY, or other ones


# Fields of ModelArgs that are the same wherever attention is latent.
LATENT = dict(qk_norm="none", clip_qkv=None, sliding_window=None, attention_bias=False, shared_gated=False, n_kv_head=1)
FAMILIES = {
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        defaults=dict(vocab_size=32000, hidden_size=4096, num_hidden_layers=32, max_position_embeddings=131072)
        | dict(num_attention_heads=32, num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5)
        | dict(num_experts=8, num_experts_per_tok=2, intermediate_size=14336, bos_token_id=1, eos_token_id=2),
        fixed=dict(norm_topk=True, qk_norm="none", clip_qkv=None, attention_bias=False, dense_layers=()),
        renames=(
            (".block_sparse_moe.", ".mlp."),
            (".w1.", ".gate_proj."),
            (".w2.", ".down_proj."),
            (".w3.", ".up_proj."),
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        defaults=dict(vocab_size=151936, hidden_size=2048, num_hidden_layers=24, max_position_embeddings=32768)
        | dict(num_attention_heads=32, num_key_value_heads=4, rope_theta=1e4, rms_norm_eps=1e-6)
        | dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=6144)
        | dict(use_sliding_window=False, sliding_window=4096),
        fixed=dict(qk_norm="head", clip_qkv=None),
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        defaults=dict(vocab_size=151936, hidden_size=2048, num_hidden_layers=24, max_position_embeddings=32768)
        | dict(num_attention_heads=16, num_key_value_heads=16, rope_theta=1e4, rms_norm_eps=1e-6, qkv_bias=True)
        | dict(num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408, intermediate_size=5632)
        | dict(shared_expert_intermediate_size=5632, use_sliding_window=False, sliding_window=4096)
        | dict(max_window_layers=28),
        fixed=dict(qk_norm="none", clip_qkv=None, attention_bias=False),
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        defaults=dict(vocab_size=50304, hidden_size=2048, num_hidden_layers=16, max_position_embeddings=4096)
        | dict(num_attention_heads=16, rope_theta=1e4, rms_norm_eps=1e-5)
        | dict(num_experts=64, num_experts_per_tok=8, intermediate_size=2048, eos_token_id=50279),
        fixed=dict(qk_norm="full", sliding_window=None, dense_layers=()),
    ),
    "GraniteMoeForCausalLM": Family(
        model_type="granitemoe",
        defaults=dict(vocab_size=32000, hidden_size=4096, num_hidden_layers=32, max_position_embeddings=2048)
        | dict(num_attention_heads=32, rope_theta=1e4, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2)
        | dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=11008, embedding_multiplier=1.0)
        | dict(attention_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0),
        fixed=dict(norm_topk=True, qk_norm="none", clip_qkv=None, sliding_window=None, dense_layers=()),
        renames=(
            (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
            (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
            (".block_sparse_moe.router.layer.", ".mlp.gate."),
            (".block_sparse_moe.router.", ".mlp.gate."),  # this and the next: as transformers 5 holds them in memory
            (".block_sparse_moe.experts.", ".mlp.experts."),
        ),
        keys=(("num_local_experts", "num_experts"),),
    ),
    "PhimoeForCausalLM": Family(
        model_type="phimoe",
        defaults=dict(vocab_size=32064, hidden_size=4096, num_hidden_layers=32, max_position_embeddings=131072)
        | dict(num_attention_heads=32, num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5)
        | dict(num_local_experts=16, num_experts_per_tok=2, intermediate_size=6400, bos_token_id=1, eos_token_id=2)
        | dict(router_jitter_noise=0.01, lm_head_bias=False),
        fixed=dict(norm_topk=False, qk_norm="none", clip_qkv=None, dense_layers=(), layer_norm=True),
        renames=(
            (".block_sparse_moe.", ".mlp."),
            (".mlp.router.", ".mlp.gate."),  # as transformers 5 holds it in memory
            (".w1.", ".gate_proj."),
            (".w2.", ".down_proj."),
            (".w3.", ".up_proj."),
        ),
        keys=(("num_local_experts", "num_experts"),),
        rope_types=("default", "longrope"),
    ),
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe",
        defaults=dict(vocab_size=151552, hidden_size=4096, num_hidden_layers=46, max_position_embeddings=131072)
        | dict(num_attention_heads=96, num_key_value_heads=8, rope_theta=1e4, rms_norm_eps=1e-5, norm_topk_prob=True)
        | dict(n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408, intermediate_size=10944)
        | dict(n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.0, partial_rotary_factor=0.5)
        | dict(attention_bias=False, use_qk_norm=False, num_nextn_predict_layers=1),
        fixed=dict(clip_qkv=None, sliding_window=None, attention_bias=False, shared_gated=False, scoring="sigmoid"),
        renames=((".mlp.shared_experts.", ".mlp.shared_expert."),),
        keys=(("n_routed_experts", "num_experts"), ("attention_bias", "qkv_bias")),  # there is none of the output
        only=dict(scoring_func="sigmoid"),
    ),
    "DeepseekV2ForCausalLM": Family(
        model_type="deepseek_v2",
        defaults=dict(vocab_size=102400, hidden_size=4096, num_hidden_layers=32, max_position_embeddings=2048)
        | dict(num_attention_heads=32, rope_theta=1e4, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2)
        | dict(n_routed_experts=64, moe_intermediate_size=1407, intermediate_size=11008, n_shared_experts=2)
        | dict(first_k_dense_replace=0, routed_scaling_factor=1.0, n_group=None, topk_group=None)
        | dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
        | dict(num_experts_per_tok=None),
        fixed=LATENT | dict(norm_topk=False),
        renames=((".mlp.shared_experts.", ".mlp.shared_expert."),),
        keys=(("n_routed_experts", "num_experts"),),
        rope_types=("default", "yarn"),
        choices=("greedy", "group_limited_greedy"),
        only=dict(attention_bias=False, norm_topk_prob=False),
    ),
    "DeepseekV3ForCausalLM": Family(
        model_type="deepseek_v3",
        defaults=dict(vocab_size=129280, hidden_size=7168, num_hidden_layers=61, max_position_embeddings=4096)
        | dict(num_attention_heads=128, num_key_value_heads=128, rope_theta=1e4, rms_norm_eps=1e-6, bos_token_id=0)
        | dict(n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, intermediate_size=18432)
        | dict(n_shared_experts=1, first_k_dense_replace=3, routed_scaling_factor=2.5, n_group=8, topk_group=4)
        | dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
        | dict(norm_topk_prob=True, eos_token_id=1, num_nextn_predict_layers=1),
        fixed=LATENT | dict(scoring="sigmoid"),
        renames=((".mlp.shared_experts.", ".mlp.shared_expert."),),
        keys=(("n_routed_experts", "num_experts"),),
        rope_types=("default", "yarn"),
        choices=("noaux_tc",),
        only=dict(attention_bias=False, scoring_func="sigmoid"),
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        defaults=dict(vocab_size=201088, hidden_size=2880, num_hidden_layers=36, max_position_embeddings=131072)
        | dict(num_attention_heads=64, num_key_value_heads=8, head_dim=64, rope_theta=1.5e5, rms_norm_eps=1e-5)
        | dict(num_experts=128, num_experts_per_tok=4, intermediate_size=2880, attention_bias=True, sliding_window=128)
        | dict(swiglu_alpha=1.702, swiglu_limit=7.0),
        fixed=dict(norm_topk=True, qk_norm="none", clip_qkv=None, dense_layers=(), attention_sinks=True)
        | dict(router_bias=True, expert_bias=True),
        renames=((".mlp.router.", ".mlp.gate."),),
        layer_types=("sliding_attention", "full_attention"),
        rope=dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False),
        rope_types=("default", "yarn"),
        quantised=("mxfp4",),
    ),
}

# Defaults of the keys that are optional in every family that looks at them; `fixed` answers for one that does not.
OPTIONAL = {
    **dict(tie_word_embeddings=False, norm_topk_prob=False, attention_bias=False, qkv_bias=False, clip_qkv=None),
    **dict(use_sliding_window=True, sliding_window=None, layer_types=[], mlp_only_layers=[], decoder_sparse_step=1),
    **dict(use_qk_norm=False, routed_scaling_factor=1.0, partial_rotary_factor=1, first_k_dense_replace=0),
    **dict(embedding_multiplier=1.0, attention_multiplier=None, residual_multiplier=1.0, logits_scaling=1.0),
    **dict(shared_expert_intermediate_size=0, num_nextn_predict_layers=0, lm_head_bias=False),
}

# The only value that these keys may have, where they are given at all and the family has no default for them.
ONLY = {
    **dict(hidden_act="silu", partial_rotary_factor=1, mlp_bias=False, qkv_bias=False),
    **dict(use_qkv_bias=False, shared_expert_intermediate_size=0, n_shared_experts=0, shared_intermediate_size=0),
    **dict(use_qk_norm=False, first_k_dense_replace=0, num_nextn_predict_layers=0, scoring_func="softmax"),
    **dict(embedding_multiplier=1, attention_multiplier=None, residual_multiplier=1, logits_scaling=1),
    **dict(routed_scaling_factor=1, n_group=1, topk_group=1, lm_head_bias=False, rope_interleave=True),
    **dict(moe_layer_freq=1, kv_lora_rank=None),
}

# The keys of the rope parameters by their type, and what an absent one means.
ROPES = {
    "default": {},
    "longrope": dict(short_factor=None, short_mscale=None, original_max_position_embeddings=None),
    "yarn": dict(factor=None, original_max_position_embeddings=None, beta_fast=32.0, beta_slow=1.0, truncate=True)
    | dict(mscale=None, mscale_all_dim=None, attention_factor=None),
}

# By `quant_method`: the row of packing.FORMATS that a published checkpoint is in, and what else its config must say.
PUBLISHED = {
    "fp8": ("fp8b", {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    "mxfp4": ("mxfp4", {}),
}


def family_of(config: dict) -> Family:
    """The row of FAMILIES that a config.json names by `architectures`, or else by `model_type`."""
    names, model_type = config.get("architectures"), config.get("model_type")
    for name, family in FAMILIES.items():
        if model_type in (None, family.model_type) and (names == [name] or (not names and model_type)):
            return family
    what = f"architectures = {names!r} with model_type = {model_type!r}"
    raise ValueError(f"config.json: {what} is not supported; supported are {', '.join(FAMILIES)}")


def published_format(config: dict) -> str | None:
    """The row of packing.FORMATS that a config.json says the weights are in, None for 16 or 32 bits.

    Raises ValueError naming a quantisation that this project does not run.
    """
    given = config.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method", given) if isinstance(given, dict) else given
    what = f"quantization_config = {method!r}"
    if isinstance(given, dict) and method in family_of(config).quantised:
        name, needed = PUBLISHED[method]
        key = next((key for key, value in needed.items() if given.get(key) != value), None)
        if key is None:
            return name
        what = f"quantization_config's {key} = {given.get(key)!r}"
    raise ValueError(f"config.json: {what} is not supported; fetch the original bf16 or fp16 checkpoint")


class Config(dict):
    """A config.json under the keys that the families share, absent ones filled in, with rope's parameters among them.

    The file may have the hub's older keys or those of transformers 5. What reads a value is named for what it must be:
    `integer` and `number` are positive ones, a `count` may be 0. A ValueError names a key as the file has it.
    """

    def __init__(self, config: dict):
        self.family = family = family_of(config)
        self.latent = "kv_lora_rank" in family.defaults
        # null stands for absence, except where queries are made of x
        given = {key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}
        published_format(given)
        if "num_local_experts" in given:  # both names are in use
            given.setdefault("num_experts", given["num_local_experts"])
        rope = given.get("rope_scaling") or given.get("rope_parameters") or family.rope
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(f"config.json: rope parameters {rope!r} are not supported (one set for all layers is)")
        given["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
        given |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if rope.get(key) is not None}
        shared = dict(family.keys)
        super().__init__(OPTIONAL | {shared.get(key, key): value for key, value in (family.defaults | given).items()})
        if self["rope_type"] not in family.rope_types:
            self.refuse("rope_type", f"only {' and '.join(map(repr, family.rope_types))} can be run")
        for key, absent in ROPES[self["rope_type"]].items():
            self[key] = rope[key] if rope.get(key) is not None else self.get(key, absent)
        for key, value in (ONLY | family.only).items():
            if key not in family.defaults and given.get(key, value) != value:
                self.refuse(key, f"only {value!r} is")

    def refuse(self, key: str, why: str):
        own = {shared: key for key, shared in self.family.keys}.get(key, key)
        raise ValueError(f"config.json: {own} = {self.get(key)!r:.80} is not supported ({why})")

    def integer(self, key: str) -> int:
        limit = LIMITS.get(key, 1 << 24)
        if type(self[key]) is not int or not 0 < self[key] <= limit:
            self.refuse(key, f"an integer from 1 to {limit} is needed")
        return self[key]

    def count(self, key: str) -> int:
        return 0 if self[key] == 0 and type(self[key]) is int else self.integer(key)

    def number(self, key: str) -> float:
        if type(self[key]) not in (int, float) or not 0 < self[key] < 1e30:
            self.refuse(key, "a positive number is needed")
        return float(self[key])

    def optional(self, key: str) -> float | None:
        return None if self[key] is None else self.number(key)

    def flag(self, key: str) -> bool:
        if type(self[key]) is not bool:
            self.refuse(key, "true or false is needed")
        return self[key]


# The largest integers that these keys may have, where others may have 2 ** 24.
LIMITS = dict(num_hidden_layers=4096, num_experts=4096, num_nextn_predict_layers=4096)

# Fields of ModelArgs that are the value of one key, by how it is read.
FIELDS = (
    (Config.integer, dict(dim="hidden_size", n_layer="num_hidden_layers", vocab_size="vocab_size")),
    (Config.number, dict(rope_theta="rope_theta", norm_eps="rms_norm_eps", routed_scale="routed_scaling_factor")),
    (Config.number, dict(embedding_scale="embedding_multiplier", residual_scale="residual_multiplier")),
    (Config.optional, dict(clip_qkv="clip_qkv", attention_scale="attention_multiplier")),
    (Config.flag, dict(norm_topk="norm_topk_prob", tied_embeddings="tie_word_embeddings", head_bias="lm_head_bias")),
    (Config.flag, dict(attention_bias="attention_bias", qkv_bias="qkv_bias")),
)


def args_from_hf(config: dict) -> ModelArgs:
    """ModelArgs from the contents of a Hugging Face config.json.

    Raises ValueError naming the key and its value for whatever this project does not run.
    """
    c = Config(config)
    fields = head_fields(c) | expert_fields(c) | layer_fields(c)
    fields |= {name: read(c, key) for read, table in FIELDS for name, key in table.items()}
    fields |= dict(qk_norm="head" if c.flag("use_qk_norm") else "none", logit_scale=1 / c.number("logits_scaling"))
    return ModelArgs(**fields | rope_fields(c) | c.family.fixed)  # rope may set attention_scale anew


def head_fields(c: Config) -> dict:
    """The heads of attention, and what they are made of where it is latent."""
    heads, dim, fields = c.integer("num_attention_heads"), c.integer("hidden_size"), {}
    c.setdefault("num_key_value_heads", heads)
    if heads % c.integer("num_key_value_heads"):
        c.refuse("num_key_value_heads", f"it must divide num_attention_heads = {heads}")
    if c.latent:
        if c["num_key_value_heads"] != heads:
            c.refuse("num_key_value_heads", f"with latent attention, only num_attention_heads = {heads} is")
        c["head_dim"] = c.integer("qk_nope_head_dim") + c.integer("qk_rope_head_dim")
        if c["qk_rope_head_dim"] % 2:
            c.refuse("qk_rope_head_dim", "it must be even to be rotated")
        if c.integer("v_head_dim") > c["head_dim"]:
            c.refuse("v_head_dim", f"queries have {c['head_dim']}")
        fields = dict(kv_rank=c.integer("kv_lora_rank"), value_dim=c["v_head_dim"])
        fields["q_rank"] = None if c["q_lora_rank"] is None else c.integer("q_lora_rank")
    if "head_dim" not in c and dim % heads:
        c.refuse("hidden_size", f"without a head_dim, it must be a multiple of num_attention_heads = {heads}")
    c.setdefault("head_dim", dim // heads)
    if c.integer("head_dim") % 2:
        c.refuse("head_dim", "it must be even to be rotated")
    return fields | dict(n_head=heads, n_kv_head=c["num_key_value_heads"], head_dim=c["head_dim"])


def expert_fields(c: Config) -> dict:
    """The experts, how they are chosen, and the width of the one that every token uses."""
    known, n_active, n_expert = c.family.defaults, c.integer("num_experts_per_tok"), c.integer("num_experts")
    if n_active > n_expert:
        c.refuse("num_experts_per_tok", f"there are {n_expert} experts")
    width = "moe_intermediate_size" if "moe_intermediate_size" in c else "intermediate_size"
    for key in ("hidden_size", width):
        if c.integer(key) % 8:
            c.refuse(key, "it must be a multiple of 8: a grouped product wants rows of whole 16 bytes")
    fields = dict(n_active=n_active, n_expert=n_expert, intermediate=c[width])
    if "router_jitter_noise" in known:
        if n_active != 2:
            c.refuse("num_experts_per_tok", "it must be 2 for SparseMixer")
        fields["mixer_eps"] = c.number("router_jitter_noise")
    if "n_shared_experts" in known:
        c["shared_expert_intermediate_size"] = c.count("n_shared_experts") * c[width]
    fields["shared_intermediate"] = c.count("shared_expert_intermediate_size")
    if "swiglu_limit" in known:
        fields |= {key: c.number(key) for key in ("swiglu_limit", "swiglu_alpha")}
    return fields | group_fields(c)


def group_fields(c: Config) -> dict:
    """DeepSeek's groups of experts, of which a token's are in the best so many."""
    choices = c.family.choices
    if choices and c.setdefault("topk_method", choices[0]) not in choices:
        c.refuse("topk_method", f"only {' and '.join(map(repr, choices))} can be run")
    if not choices or c["topk_method"] == "greedy":
        return {}
    groups, active, n_expert = c.integer("n_group"), c.integer("topk_group"), c["num_experts"]
    members, rest = divmod(n_expert, groups)
    if rest or members < 2:
        c.refuse("n_group", f"groups of at least two of {n_expert} experts are needed")
    if active > groups or c["num_experts_per_tok"] > members * active:
        c.refuse("topk_group", f"there are {groups} groups of {members} experts")
    return dict(n_group=groups, n_active_group=active)


def layer_fields(c: Config) -> dict:
    """Which layers are dense, and which see all positions."""
    n_layer, step, listed = c.integer("num_hidden_layers"), c.integer("decoder_sparse_step"), c["mlp_only_layers"]
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        c.refuse("mlp_only_layers", "a list of layer numbers is needed")
    first = c.count("first_k_dense_replace")
    dense = tuple(layer for layer in range(n_layer) if layer < first or layer in listed or (layer + 1) % step)
    c.count("num_nextn_predict_layers")  # the tensors of these are left out
    fields = dict(dense_layers=dense, dense_intermediate=c.integer("intermediate_size") if dense else 0)

    windowed = c.flag("use_sliding_window") and c["sliding_window"] is not None
    if windowed and "max_window_layers" in c.family.defaults and not c["layer_types"]:
        c.refuse("use_sliding_window", "every other layer would have one, up to max_window_layers")
    kind, turns = "sliding_attention" if windowed else "full_attention", c.family.layer_types
    kinds, known = c["layer_types"] or list(turns) * n_layer, (kind, "full_attention") if turns else (kind,)
    if not isinstance(kinds, list) or any(other not in known for other in kinds):
        c.refuse("layer_types", f"all must be {' or '.join(map(repr, dict.fromkeys(known)))}")
    if turns and len(kinds) < n_layer:
        c.refuse("layer_types", f"there are {n_layer} layers")
    if windowed:
        full = tuple(layer for layer, other in enumerate(kinds[:n_layer]) if other == "full_attention")
        fields |= dict(sliding_window=c.integer("sliding_window"), full_layers=full)
    return fields


def rope_fields(c: Config) -> dict:
    """How much of a head turns, by which angles, and up to which position. After `head_fields`."""
    turning, fields = int(c.number("partial_rotary_factor") * c["head_dim"]), {}
    if c.latent:
        turning = c["qk_rope_head_dim"]
    elif turning < 2 or turning % 2 or c["head_dim"] % turning:
        c.refuse("partial_rotary_factor", f"an even divisor of head_dim = {c['head_dim']} is needed")
    longest = c.integer("max_position_embeddings")
    if c["rope_type"] == "longrope":
        factors = c["short_factor"] if isinstance(c["short_factor"], list) else ()
        if len(factors) != turning // 2 or any(type(n) not in (int, float) or not 0 < n < 1e30 for n in factors):
            c.refuse("short_factor", f"{turning // 2} positive numbers are needed")
        # Beyond these positions another table holds, for what is in the cache as well.
        longest = min(longest, c.integer("original_max_position_embeddings"))
        fields |= dict(rope_factors=tuple(map(float, factors)), rope_scale=c.number("short_mscale"))
    elif c["rope_type"] == "yarn":
        fields["yarn"] = yarn_of(c)
        if c.latent and c["mscale_all_dim"]:
            magnitude = yarn_magnitude(c["factor"], c.number("mscale_all_dim"))
            fields["attention_scale"] = c["head_dim"] ** -0.5 * magnitude**2
    return fields | dict(rotary_dim=turning if turning < c["head_dim"] else None, max_position=longest)


def yarn_of(c: Config) -> Yarn:
    """Yarn's parameters; its magnitude as given, or by the two that DeepSeek has, or as its paper suggests."""
    factor = c.number("factor")
    magnitude = yarn_magnitude(factor)
    if c["mscale"] and c["mscale_all_dim"]:
        magnitude = yarn_magnitude(factor, c.number("mscale")) / yarn_magnitude(factor, c.number("mscale_all_dim"))
    return Yarn(factor, c.integer("original_max_position_embeddings"), c.number("beta_fast"), c.number("beta_slow"),
                c.flag("truncate"), c.optional("attention_factor") or magnitude)  # fmt: skip


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """What yarn multiplies cosines and sines by, as its paper suggests."""
    return max(1.0, 0.1 * scale * math.log(factor) + 1)
