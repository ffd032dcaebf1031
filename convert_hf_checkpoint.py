"""From Hugging Face layout to ours, one layer at a time: 93 GB of Mixtral convert in 16 GB of memory.

    python convert_hf_checkpoint.py --checkpoint_dir DIR [--output_dir DIR] [--dtype bf16|fp16|fp32] [--force]

Reads safetensors only: `model.safetensors`, or shards with or without their index. What the model is stands in its
config.json; a family of models is one row of FAMILIES. Everything that can be known from the config and the files'
headers is checked before a byte is written; values are checked for NaN and infinity as they pass.
"""

import dataclasses
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from args import ModelArgs, Yarn
from checkpoint import DTYPES, NAMES, Shard, Writer, is_checkpoint, read_json
from command import Parser
from packing import FORMATS, in_words, mxfp4_codes

DOWNLOAD = "python scripts/download.py --repo_id OWNER/NAME"  # what to run where something is not there
# Copied beside the weights as they are; the last is completed by `generation_config`.
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


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
    **dict(shared_expert_intermediate_size=0, num_nextn_predict_layers=0, lm_head_bias=False, router_jitter_noise=None),
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

# By `quant_method`: the row of FORMATS that a published checkpoint is in, and what else its config must say to be that.
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
    """The row of FORMATS that a config.json says the weights are in, None for 16 or 32 bits.

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


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """What yarn multiplies cosines and sines by, as its paper suggests."""
    return max(1.0, 0.1 * scale * math.log(factor) + 1)


def args_from_hf(config: dict) -> ModelArgs:
    """ModelArgs from the contents of a Hugging Face config.json, in the hub's older keys or in those of transformers 5.

    Raises ValueError naming the key and its value for whatever this project does not run.
    """
    family = family_of(config)
    given = {key: value for key, value in config.items() if value is not None}  # null stands for absence
    published_format(given)
    if "num_local_experts" in given:  # both names are in use
        given.setdefault("num_experts", given["num_local_experts"])
    rope = given.get("rope_scaling") or given.get("rope_parameters") or family.rope
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"config.json: rope parameters {rope!r} are not supported (one set for all layers is)")
    given["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    given |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if rope.get(key) is not None}
    shared, own = dict(family.keys), {shared: key for key, shared in family.keys}
    c = OPTIONAL | {shared.get(key, key): value for key, value in (family.defaults | given).items()}

    def refuse(key: str, why: str):
        raise ValueError(f"config.json: {own.get(key, key)} = {c.get(key)!r:.80} is not supported ({why})")

    def integer(key: str, limit: int = 1 << 24) -> int:
        if type(c[key]) is not int or not 0 < c[key] <= limit:
            refuse(key, f"an integer from 1 to {limit} is needed")
        return c[key]

    def number(key: str) -> float:
        if type(c[key]) not in (int, float) or not 0 < c[key] < 1e30:
            refuse(key, "a positive number is needed")
        return float(c[key])

    def count(key: str, limit: int = 1 << 24) -> int:
        return 0 if c[key] == 0 and type(c[key]) is int else integer(key, limit)

    def flag(key: str) -> bool:
        if type(c[key]) is not bool:
            refuse(key, "true or false is needed")
        return c[key]

    if c["rope_type"] not in family.rope_types:
        refuse("rope_type", f"only {' and '.join(map(repr, family.rope_types))} can be run")
    keys = ROPES[c["rope_type"]]
    c = keys | c | {key: rope[key] for key in keys if rope.get(key) is not None}
    for key, value in (ONLY | {"scoring_func": family.fixed.get("scoring", "softmax")}).items():
        if key not in family.defaults and given.get(key, value) != value:
            refuse(key, f"only {value!r} is")
    heads = integer("num_attention_heads")
    c.setdefault("num_key_value_heads", heads)
    c.setdefault("topk_method", family.choices[0] if family.choices else None)
    if heads % integer("num_key_value_heads"):
        refuse("num_key_value_heads", f"it must divide num_attention_heads = {heads}")
    dim = integer("hidden_size")
    latent = "kv_lora_rank" in family.defaults
    if latent:
        if c["num_key_value_heads"] != heads:
            refuse("num_key_value_heads", f"with latent attention, only num_attention_heads = {heads} is")
        for key in ("attention_bias",) if "norm_topk" not in family.fixed else ("attention_bias", "norm_topk_prob"):
            if flag(key):
                refuse(key, "only False is")
        c["head_dim"] = integer("qk_nope_head_dim") + integer("qk_rope_head_dim")
        if c["qk_rope_head_dim"] % 2:
            refuse("qk_rope_head_dim", "it must be even to be rotated")
        if integer("v_head_dim") > c["head_dim"]:
            refuse("v_head_dim", f"queries have {c['head_dim']}")
    if "head_dim" not in c and dim % heads:
        refuse("hidden_size", f"without a head_dim, it must be a multiple of num_attention_heads = {heads}")
    c.setdefault("head_dim", dim // heads)
    if integer("head_dim") % 2:
        refuse("head_dim", "it must be even to be rotated")
    if integer("num_experts_per_tok") > integer("num_experts", limit=4096):
        refuse("num_experts_per_tok", f"there are {c['num_experts']} experts")

    width = "moe_intermediate_size" if "moe_intermediate_size" in c else "intermediate_size"
    for key in ("hidden_size", width):
        if integer(key) % 8:
            refuse(key, "it must be a multiple of 8: a grouped product wants rows of whole 16 bytes")

    windowed = flag("use_sliding_window") and c["sliding_window"] is not None
    if windowed and "max_window_layers" in family.defaults and not c["layer_types"]:
        refuse("use_sliding_window", "every other layer would have one, up to max_window_layers")
    n_layer, step, dense = (
        integer("num_hidden_layers", limit=4096),
        integer("decoder_sparse_step"),
        c["mlp_only_layers"],
    )
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        refuse("mlp_only_layers", "a list of layer numbers is needed")
    first = count("first_k_dense_replace")
    dense = tuple(layer for layer in range(n_layer) if layer < first or layer in dense or (layer + 1) % step)
    count("num_nextn_predict_layers", limit=4096)  # the tensors of these are left out
    turning = int(number("partial_rotary_factor") * c["head_dim"])
    if latent:
        turning = c["qk_rope_head_dim"]
    elif turning < 2 or turning % 2 or c["head_dim"] % turning:
        refuse("partial_rotary_factor", f"an even divisor of head_dim = {c['head_dim']} is needed")
    yarn, factors = None, ()
    if c["rope_type"] == "longrope":
        factors = c["short_factor"] if isinstance(c["short_factor"], list) else ()
        if len(factors) != turning // 2 or any(type(n) not in (int, float) or not 0 < n < 1e30 for n in factors):
            refuse("short_factor", f"{turning // 2} positive numbers are needed")
        # Beyond these positions another table holds, for what is in the cache as well.
        c["max_position_embeddings"] = min(
            integer("max_position_embeddings"), integer("original_max_position_embeddings")
        )
    elif c["rope_type"] == "yarn":
        factor = number("factor")
        magnitude = yarn_magnitude(factor)
        if c["mscale"] and c["mscale_all_dim"]:
            magnitude = yarn_magnitude(factor, number("mscale")) / yarn_magnitude(factor, number("mscale_all_dim"))
        if c["attention_factor"] is not None:
            magnitude = number("attention_factor")
        yarn = Yarn(factor, integer("original_max_position_embeddings"), number("beta_fast"), number("beta_slow"),
                    flag("truncate"), magnitude)  # fmt: skip
    if c["router_jitter_noise"] is not None and c["num_experts_per_tok"] != 2:
        refuse("num_experts_per_tok", "it must be 2 for SparseMixer")
    if "n_shared_experts" in family.defaults:
        c["shared_expert_intermediate_size"] = count("n_shared_experts") * integer(width)
    if family.choices and c["topk_method"] not in family.choices:
        refuse("topk_method", f"only {' and '.join(map(repr, family.choices))} can be run")
    groups = active_groups = 1
    if c["topk_method"] in ("group_limited_greedy", "noaux_tc"):
        groups, active_groups = integer("n_group"), integer("topk_group")
        members, rest = divmod(c["num_experts"], groups)
        if rest or members < 2:
            refuse("n_group", f"groups of at least two of {c['num_experts']} experts are needed")
        if active_groups > groups or c["num_experts_per_tok"] > members * active_groups:
            refuse("topk_group", f"there are {groups} groups of {members} experts")
    kind = "sliding_attention" if windowed else "full_attention"
    kinds = c["layer_types"] or list(family.layer_types) * n_layer
    known = (kind, "full_attention") if family.layer_types else (kind,)
    if not isinstance(kinds, list) or any(other not in known for other in kinds):
        refuse("layer_types", f"all must be {' or '.join(map(repr, dict.fromkeys(known)))}")
    if family.layer_types and len(kinds) < n_layer:
        refuse("layer_types", f"there are {n_layer} layers")
    full = tuple(n for n, other in enumerate(kinds[:n_layer]) if other != "sliding_attention") if windowed else ()

    fields = dict(
        dim=dim,
        n_layer=n_layer,
        n_head=heads,
        n_kv_head=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        intermediate=integer(width),
        n_expert=c["num_experts"],
        n_active=c["num_experts_per_tok"],
        vocab_size=integer("vocab_size"),
        max_position=integer("max_position_embeddings"),
        rope_theta=number("rope_theta"),
        norm_eps=number("rms_norm_eps"),
        norm_topk=flag("norm_topk_prob"),
        clip_qkv=None if c["clip_qkv"] is None else number("clip_qkv"),
        attention_bias=flag("attention_bias"),
        qkv_bias=flag("qkv_bias"),
        tied_embeddings=flag("tie_word_embeddings"),
        sliding_window=integer("sliding_window") if windowed else None,
        dense_layers=dense,
        dense_intermediate=integer("intermediate_size") if dense else 0,
        shared_intermediate=count("shared_expert_intermediate_size"),
        qk_norm="head" if flag("use_qk_norm") else "none",
        routed_scale=number("routed_scaling_factor"),
        rotary_dim=turning if turning < c["head_dim"] else None,
        attention_scale=None if c["attention_multiplier"] is None else number("attention_multiplier"),
        embedding_scale=number("embedding_multiplier"),
        residual_scale=number("residual_multiplier"),
        logit_scale=1 / number("logits_scaling"),
        head_bias=flag("lm_head_bias"),
        mixer_eps=number("router_jitter_noise") if "router_jitter_noise" in family.defaults else None,
        rope_factors=tuple(map(float, factors)),
        rope_scale=number("short_mscale") if factors else 1.0,
        full_layers=full,
        yarn=yarn,
        n_group=groups,
        n_active_group=active_groups,
    )
    if "swiglu_limit" in family.defaults:
        fields |= {key: number(key) for key in ("swiglu_limit", "swiglu_alpha")}
    if latent:
        fields |= dict(kv_rank=integer("kv_lora_rank"), value_dim=c["v_head_dim"])
        if config.get("q_lora_rank", True) is not None:  # null does not stand for absence here
            fields["q_rank"] = integer("q_lora_rank")
        if yarn and c["mscale_all_dim"]:
            magnitude = yarn_magnitude(yarn.factor, number("mscale_all_dim"))
            fields["attention_scale"] = c["head_dim"] ** -0.5 * magnitude**2
    return ModelArgs(**fields | family.fixed)


PLAIN_DTYPES = torch.bfloat16, torch.float16, torch.float32


class Sources:
    """The tensors of a Hugging Face directory under the names that the families share, whatever file they are in."""

    def __init__(self, directory: Path, renames: tuple[tuple[str, str], ...]):
        self.directory, self.renames = directory, renames
        self.unpacked: dict[str, int] = {}  # weights in fp8 that are read as numbers: the rows and columns of a block
        self.tensors: dict[str, tuple[Shard, str]] = {}  # shared name: the file, and the name in that file
        files, weight_map = weight_files(directory)
        shards = {file: Shard(directory / file) for file in files}
        for name, file in weight_map.items():
            if name not in shards[file].tensors:
                raise ValueError(f"{directory / file} lacks {name}, which the index puts there; fetch it again")
        for shard in shards.values():
            for original in shard.tensors:
                name = original
                for theirs, shared in renames:
                    name = name.replace(theirs, shared)
                if name in self.tensors:
                    both = f"{self.tensors[name][0].path.name} and {shard.path.name}"
                    raise ValueError(f"{directory}: {original} is there twice, in {both}; remove the stale file")
                if not name.endswith("rotary_emb.inv_freq"):  # old files hold this constant
                    self.tensors[name] = shard, original

    def drop_layers(self, first: int, count: int):
        """Leave so many layers out: those after the last, which predict further tokens for drafts."""
        beyond = tuple(f"model.layers.{layer}." for layer in range(first, first + count))
        self.tensors = {name: place for name, place in self.tensors.items() if not name.startswith(beyond)}

    def original(self, name: str) -> str:
        """The name as this directory's files would have it."""
        for theirs, shared in self.renames:
            name = name.replace(shared, theirs)
        return name

    def in_fp8(self, recipe: "Recipe") -> bool:
        """Whether any tensor of the recipe is."""
        files = (self.tensors[name] for name in recipe.parts if name in self.tensors)
        return any(shard.tensors[original][1] == torch.float8_e4m3fn for shard, original in files)

    def read(self, name: str) -> Tensor:
        """The tensor, mapped from its file."""
        shard, original = self.tensors[name]
        tensor = shard.read(original)
        if name in self.unpacked:
            (rows, width), block = tensor.shape, self.unpacked[name]
            scale = self.read(name + SCALE).float().repeat_interleave(block, 0).repeat_interleave(block, 1)
            tensor = tensor.float() * scale[:rows, :width]
        return tensor

    def check(self, name: str, shape: tuple[int, ...], due: torch.dtype | None = None):
        """ValueError unless the tensor is there with this shape, of that dtype if it is none of PLAIN_DTYPES."""
        if name not in self.tensors:
            raise ValueError(f"{self.directory}: the tensor {self.original(name)} is missing; fetch its file again")
        shard, original = self.tensors[name]
        found, dtype = shard.tensors[original]
        if name in self.unpacked:
            due, block = torch.float8_e4m3fn, self.unpacked[name]
            self.check(name + SCALE, tuple(-(-n // block) for n in shape))
        if dtype not in (PLAIN_DTYPES if due in (None, *PLAIN_DTYPES) else (due,)):
            what = f"{shard.path}: {original} has dtype {str(dtype).removeprefix('torch.')}"
            if due == torch.float8_e4m3fn:
                raise ValueError(f"{what} beside others in fp8, of which one weight is made; fetch its file again")
            if due == torch.uint8:
                raise ValueError(f"{what} where uint8 belongs; fetch its file again")
            raise ValueError(
                f"{what}; only bf16, fp16 and fp32 are converted, and fp8 and mxfp4 where the config says so"
            )
        if found != shape:
            raise ValueError(f"{shard.path}: {original} has shape {list(found)} where config.json says {list(shape)}")


def weight_files(directory: Path) -> tuple[list[str], dict[str, str]]:
    """The safetensors files to read, and the index's map from tensor to file (empty without an index).

    As in transformers, `model.safetensors` comes before an index, and an index before a bare set of shards.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return ["model.safetensors"], {}
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or any(Path(str(file)).name != file for file in weight_map.values()):
            raise ValueError(f"{index} has no weight_map from tensors to files; fetch it again")
        files = sorted(set(weight_map.values()))
    else:
        weight_map = {}
        found = sorted(path.name for path in directory.glob("*.safetensors"))
        files = [name for name in found if name.startswith("model-")] or found
        if numbered := re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.safetensors)", files[0] if files else ""):
            before, after, count = numbered.groups()
            files = [f"{before}{i:05d}{after}" for i in range(1, int(count) + 1)]
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise ValueError(f"{directory}: {len(missing)} of {len(files)} shards missing; fetch {missing[0]} again")
    if files:
        return files, weight_map
    for path in sorted(directory.iterdir()):
        if path.suffix == ".gguf":
            raise ValueError(f"{directory} has {path.name}: GGUF is quantised already; fetch the original safetensors")
        if path.suffix in (".bin", ".pt", ".pth"):
            raise ValueError(f"{directory} has only {path.name}: pickle is never loaded; fetch the safetensors")
    raise ValueError(f"{directory} has no safetensors files; fetch them: {DOWNLOAD}")


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass and with no memory (as `isfinite` would take)."""
    return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


class Recipe(NamedTuple):
    """How a tensor of ours is made: the place of each tensor of theirs in one of this shape, and what becomes of it."""

    shape: tuple[int, ...]
    parts: dict[str, tuple]  # a tensor of theirs: its place
    make: Callable[[Tensor], Tensor] | None = None  # of the parts put together, ours; None: they are that
    dtype: torch.dtype | None = None  # of the parts put together; None: the one that is asked for
    finite: Callable[[Tensor], bool] = is_finite  # whether a part holds neither NaN nor infinity


WHOLE = ()
PACKABLE = (
    ".wqkv.weight",
    ".wq.weight",
    ".wo.weight",
    ".w13.weight",
    ".w2.weight",
    "head.weight",
)  # what may stay as it was quantised
UNPACKED = ".wkv"  # what becomes 16 bits then: latent attention multiplies with it along either axis
SCALE = "_scale_inv"  # after the name of a weight in fp8: that of its scales, by which codes are multiplied
LARGEST_EXPONENT = 252  # an e8m0 scale with which every e2m1 number is a finite one of fp32


def part_shape(shape: tuple[int, ...], place: tuple) -> tuple[int, ...]:
    """That of what has this place in a tensor."""
    sizes = (len(range(n)[at]) for n, at in zip(shape, place, strict=False) if isinstance(at, slice))
    return *sizes, *shape[len(place) :]


def block_recipes(ours: str, recipe: Recipe, sources: Sources, format: str) -> dict[str, Recipe]:
    """A weight's recipe -> those of its codes and scales, where theirs are in fp8 with a scale for each block."""
    group, path = FORMATS[format].group, ours.removesuffix(".weight")
    shape, dtype = FORMATS[format].layout(recipe.shape, group)["scale"]
    make, scales, rows = recipe.make or (lambda t: t), {}, torch.arange(recipe.shape[-2]).unsqueeze(1)
    if not torch.equal(make(rows) // group, rows // group):
        raise ValueError(f"{ours}: rows would leave their blocks of {group}; fetch the original bf16 checkpoint")
    for name, place in recipe.parts.items():
        sizes = part_shape(recipe.shape, place)
        begin = next((at.start for at in place if isinstance(at, slice)), 0)
        if begin % group or sizes[-1] % group:
            what = f"{sources.original(name)} {list(sizes)} has no place among whole blocks of {group}"
            raise ValueError(f"{what}, at row {begin} of {ours}; fetch the original bf16 checkpoint")
        scales[name + SCALE] = tuple(
            slice(at.start // group, -(-at.stop // group)) if isinstance(at, slice) else at for at in place
        )
    return {
        f"{path}.codes": recipe._replace(
            make=lambda t: in_words(make(t), group),
            dtype=torch.float8_e4m3fn,
            finite=lambda t: not ((t.view(torch.uint8) & 0x7F) == 0x7F).any(),
        ),
        f"{path}.scale": Recipe(shape, scales, dtype=dtype),
    }


def in_halves(t: Tensor) -> Tensor:
    """[E, 2I, ...], gate and up in turns -> gate, then up."""
    return t.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def each_expert(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """The same for stacked experts, one at a time: what is in between takes no more memory than for one."""
    return torch.stack([function(expert) for expert in t])


def interleaved_recipes(args: ModelArgs, packed: bool) -> dict[str, tuple]:
    """A layer's experts where gate and up are interleaved: transposed weights, or MXFP4 as published; and biases."""
    D, E, I = args.dim, args.n_expert, args.intermediate

    def recipes(ours: str, theirs: str, rows: int, width: int, order: Callable[[Tensor], Tensor]) -> dict[str, tuple]:
        table = {f"{ours}.bias": ((E, rows), {f"{theirs}_bias": WHOLE}, order)}
        if not packed:
            transposed = (E, width, rows), {theirs: WHOLE}, lambda t: order(t.transpose(1, 2))
            return table | {f"{ours}.weight": transposed}
        groups = E, rows, width // FORMATS["mxfp4"].choose_group(width, None)
        codes = {f"{theirs}_blocks": WHOLE}, lambda t: order(each_expert(mxfp4_codes, t)), torch.uint8, lambda t: True
        scale = {f"{theirs}_scales": WHOLE}, order, torch.uint8, lambda t: t.max() <= LARGEST_EXPONENT
        return table | {f"{ours}.codes": ((*groups, 16), *codes), f"{ours}.scale": (groups, *scale)}

    return recipes("ffn.experts.w13", "mlp.experts.gate_up_proj", 2 * I, D, in_halves) | recipes(
        "ffn.experts.w2", "mlp.experts.down_proj", D, I, lambda t: t
    )


def in_half_pairs(t: Tensor, width: int, turning: int) -> Tensor:
    """Heads' rows [heads * width, ...], the last `turning` of each rotated in pairs of neighbours -> half with half."""
    still, turned = t.unflatten(0, (-1, width)).split((width - turning, turning), dim=1)
    turned = turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((still, turned), dim=1).flatten(0, 1)


def latent_recipes(args: ModelArgs) -> dict[str, tuple]:
    """A layer's latent attention: what is of a position in wqkv, what is of each head in wq and wkv."""
    D, H, C, R, r = args.dim, args.n_head, args.head_dim, args.rotary_dim, args.kv_rank
    begin, made = args.q_rank or H * C, args.head_dim - R + args.value_dim
    q, kv = slice(0, begin), slice(begin, begin + r + R)

    def turn(t: Tensor) -> Tensor:
        first = t[:begin] if args.q_rank else in_half_pairs(t[:begin], C, R)
        return torch.cat((first, in_half_pairs(t[begin:], r + R, R)))

    parts = {f"self_attn.{'q_a' if args.q_rank else 'q'}_proj.weight": (q,)}
    parts["self_attn.kv_a_proj_with_mqa.weight"] = (kv,)
    table = {
        "attention.wqkv.weight": ((begin + r + R, D), parts, turn),
        "attention.kv_norm.weight": ((r,), {"self_attn.kv_a_layernorm.weight": WHOLE}),
        "attention.wkv": ((H * made, r), {"self_attn.kv_b_proj.weight": WHOLE}, lambda t: t.unflatten(0, (H, made))),
        "attention.wo.weight": ((D, H * args.value_dim), {"self_attn.o_proj.weight": WHOLE}),
    }
    if args.q_rank:
        table["attention.q_norm.weight"] = (args.q_rank,), {"self_attn.q_a_layernorm.weight": WHOLE}
        wq = {"self_attn.q_b_proj.weight": WHOLE}
        table["attention.wq.weight"] = (H * C, args.q_rank), wq, lambda t: in_half_pairs(t, C, R)
    return table


def layer_recipes(args: ModelArgs, layer: int, fused: bool, packed: bool = False) -> dict[str, Recipe]:
    """The recipes of one layer; `fused` if the source holds all experts of a layer in one tensor, `packed` in MXFP4."""
    D, C, E, I = args.dim, args.head_dim, args.n_expert, args.intermediate
    q, kv = args.n_head * C, args.n_kv_head * C
    qkv = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
    table = {
        "attention_norm.weight": ((D,), {"input_layernorm.weight": WHOLE}),
        "attention.wqkv.weight": ((q + 2 * kv, D), {f"self_attn.{x}_proj.weight": (rows,) for x, rows in qkv.items()}),
        "attention.wo.weight": ((D, q), {"self_attn.o_proj.weight": WHOLE}),
        "ffn_norm.weight": ((D,), {"post_attention_layernorm.weight": WHOLE}),
    } | (latent_recipes(args) if args.kv_rank else {})
    if args.layer_norm:
        table["attention_norm.bias"] = (D,), {"input_layernorm.bias": WHOLE}
        table["ffn_norm.bias"] = (D,), {"post_attention_layernorm.bias": WHOLE}
    if args.attention_bias or args.qkv_bias:
        biases = {f"self_attn.{x}_proj.bias": (rows,) for x, rows in qkv.items()}
        table["attention.wqkv.bias"] = (q + 2 * kv,), biases
    if args.attention_bias:
        table["attention.wo.bias"] = (D,), {"self_attn.o_proj.bias": WHOLE}
    if args.attention_sinks:
        table["attention.sinks"] = (args.n_head,), {"self_attn.sinks": WHOLE}
    if args.qk_norm != "none":
        full = args.qk_norm == "full"
        table |= {
            "attention.q_norm.weight": ((q if full else C,), {"self_attn.q_norm.weight": WHOLE}),
            "attention.k_norm.weight": ((kv if full else C,), {"self_attn.k_norm.weight": WHOLE}),
        }

    def dense(ours: str, theirs: str, I: int) -> dict[str, tuple]:
        gate, up = (slice(0, I),), (slice(I, 2 * I),)
        return {
            f"{ours}.w13.weight": ((2 * I, D), {f"{theirs}.gate_proj.weight": gate, f"{theirs}.up_proj.weight": up}),
            f"{ours}.w2.weight": ((D, I), {f"{theirs}.down_proj.weight": WHOLE}),
        }

    if layer in args.dense_layers:
        table |= dense("ffn", "mlp", args.dense_intermediate)
    else:
        halves = {"gate": slice(0, I), "up": slice(I, 2 * I)}
        w13 = {f"mlp.experts.{e}.{x}_proj.weight": (e, rows) for e in range(E) for x, rows in halves.items()}
        w2 = {f"mlp.experts.{e}.down_proj.weight": (e,) for e in range(E)}
        if fused:  # as transformers 5 holds them in memory, and saves them if asked to
            w13, w2 = {"mlp.experts.gate_up_proj": WHOLE}, {"mlp.experts.down_proj": WHOLE}
        table["ffn.router.weight"] = (E, D), {"mlp.gate.weight": WHOLE}
        if args.router_bias:
            table["ffn.router.bias"] = (E,), {"mlp.gate.bias": WHOLE}
        if args.expert_bias:
            table |= interleaved_recipes(args, packed)
        else:
            table |= {"ffn.experts.w13.weight": ((E, 2 * I, D), w13), "ffn.experts.w2.weight": ((E, D, I), w2)}
        if args.shared_intermediate:
            table |= dense("ffn.shared", "mlp.shared_expert", args.shared_intermediate)
            if args.shared_gated:
                table["ffn.shared_gate.weight"] = (1, D), {"mlp.shared_expert_gate.weight": WHOLE}
        if args.scoring == "sigmoid":  # what corrects the choice of experts does so in its last digits
            table["ffn.score_bias"] = (E,), {"mlp.gate.e_score_correction_bias": WHOLE}, None, torch.float32
    prefix = f"model.layers.{layer}."
    return {
        f"layers.{layer}.{name}": Recipe(shape, {prefix + theirs: place for theirs, place in parts.items()}, *more)
        for name, (shape, parts, *more) in table.items()
    }


def rest_recipes(args: ModelArgs) -> dict[str, Recipe]:
    """The recipes of everything outside the layers."""
    V, D = args.vocab_size, args.dim
    table = {
        "embedding.weight": ((V, D), {"model.embed_tokens.weight": WHOLE}),
        "norm.weight": ((D,), {"model.norm.weight": WHOLE}),
        "head.weight": ((V, D), {"lm_head.weight": WHOLE}),
    }
    if args.layer_norm:
        table["norm.bias"] = (D,), {"model.norm.bias": WHOLE}
    if args.head_bias:
        table["head.bias"] = (V,), {"lm_head.bias": WHOLE}
    if args.tied_embeddings:
        del table["head.weight"]
    return {name: Recipe(*recipe) for name, recipe in table.items()}


def plan(args: ModelArgs, sources: Sources, published: str | None = None) -> tuple[dict[str, dict[str, Recipe]], dict]:
    """The recipes by file, and the modules that stay in the published format, as a checkpoint's "format" has them.

    ValueError unless every tensor that the recipes need is there as they need it, and no other.
    """
    files, used, modules = {}, set(), {}

    def add(file: str, recipes: dict[str, Recipe]):
        files[file] = {}
        for ours, recipe in recipes.items():
            blocks = published and FORMATS[published].blocks and sources.in_fp8(recipe)
            if blocks and ours.endswith(UNPACKED):
                sources.unpacked |= dict.fromkeys(recipe.parts, FORMATS[published].group)
                used.update(name + SCALE for name in recipe.parts)
            blocks = blocks and ours.endswith(PACKABLE)
            files[file] |= block_recipes(ours, recipe, sources, published) if blocks else {ours: recipe}
        for ours, recipe in files[file].items():
            if ours.endswith(".codes"):
                spec = {"format": published, "group_size": FORMATS[published].group}
                modules[ours.removesuffix(".codes")] = spec
            for name, place in recipe.parts.items():
                sources.check(name, part_shape(recipe.shape, place), recipe.dtype)
            used.update(recipe.parts)

    for layer in range(args.n_layer):
        fused = f"model.layers.{layer}.mlp.experts.gate_up_proj" in sources.tensors
        add(f"layer_{layer:02d}.safetensors", layer_recipes(args, layer, fused, published == "mxfp4"))
    add("rest.safetensors", rest_recipes(args))
    if extra := sorted(sources.tensors.keys() - used):
        shard, original = sources.tensors[extra[0]]
        raise ValueError(f"{shard.path}: {original} (of {len(extra)}) has no place in the model of config.json")
    return files, modules


def assemble(recipe: Recipe, sources: Sources, dtype: torch.dtype) -> Tensor:
    """The tensor of ours, in `dtype` unless it has one, checked to be finite. Only what is changed takes memory."""
    dtype, tensor = recipe.dtype or dtype, None
    for name, place in recipe.parts.items():
        if place == WHOLE:
            tensor = part = sources.read(name).to(dtype)
        else:
            tensor = torch.empty(recipe.shape, dtype=dtype) if tensor is None else tensor
            part = tensor[place].copy_(sources.read(name))
        if not recipe.finite(part):
            if part.dtype in PLAIN_DTYPES and is_finite(sources.read(name)):
                raise ValueError(f"{sources.original(name)} overflows {NAMES[dtype]}; convert with --dtype bf16")
            raise ValueError(
                f"{sources.original(name.removesuffix(SCALE))} holds NaN or infinity; fetch its file again"
            )
    return recipe.make(tensor) if recipe.make else tensor


def settle_tie(args: ModelArgs, sources: Sources) -> ModelArgs:
    """For a config that ties the embeddings, and files with a head: dropped if it is the same, else nothing is tied."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    for name in (head, embedding):
        sources.check(name, (args.vocab_size, args.dim))
    a, b = sources.read(head), sources.read(embedding)
    if a.dtype != b.dtype or not torch.equal(a, b):
        return dataclasses.replace(args, tied_embeddings=False)  # as transformers has it
    del sources.tensors[head]
    return args


def generation_config(directory: Path, config: dict) -> dict:
    """generation_config.json, completed by the token ids that stand only in config.json: no stop id may be lost."""
    path = directory / "generation_config.json"
    given = read_json(path) if path.is_file() else {}
    c = family_of(config).defaults | config
    ids = {key: c[key] for key in ("bos_token_id", "eos_token_id") if c.get(key) is not None}
    return ids | {key: value for key, value in given.items() if value is not None}


def convert(
    checkpoint_dir: Path | str,
    output_dir: Path | str | None = None,
    dtype: str = "bf16",
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Converts a Hugging Face directory, and returns the new one: `output_dir`, or `checkpoint_dir/model_<dtype>`.

    What is published in a number format that we have keeps it, and gives the directory its name; dtype is of the rest.
    Raises ValueError, with one line and nothing left behind, for anything missing, damaged or not supported.
    """
    directory = Path(checkpoint_dir)
    if dtype not in ("bf16", "fp16", "fp32"):
        raise ValueError(f"dtype {dtype!r} is not one of bf16, fp16, fp32")
    if directory.is_file():
        what = "GGUF is quantised already" if directory.suffix == ".gguf" else "it is a file"
        raise ValueError(f"{directory}: {what}; give the directory of a Hugging Face checkpoint")
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory; fetch the model first: {DOWNLOAD}")
    if is_checkpoint(directory):
        raise ValueError(f"{directory} is converted already; use it: python generate.py --checkpoint_path {directory}")
    weight_files(directory)  # a directory without safetensors is told so, whatever else it lacks
    config = read_json(directory / "config.json")
    args = args_from_hf(config)
    sources = Sources(directory, family_of(config).renames)
    sources.drop_layers(args.n_layer, (family_of(config).defaults | config).get("num_nextn_predict_layers") or 0)
    if args.tied_embeddings and "lm_head.weight" in sources.tensors:
        args = settle_tie(args, sources)
    published = published_format(config)
    files, modules = plan(args, sources, published)
    format = {"name": published, "dtype": dtype, "modules": modules} if modules else {"name": dtype}
    output = Path(output_dir) if output_dir else directory / f"model_{format['name']}"
    torch_dtype = DTYPES[dtype][0]
    needed = sum(
        math.prod(recipe.shape) * (recipe.dtype or torch_dtype).itemsize
        for recipes in files.values()
        for recipe in recipes.values()
    )
    with Writer(output, dataclasses.asdict(args), format, force) as writer:
        writer.reserve(needed)
        for file, recipes in tqdm(files.items(), desc="convert", unit="layer", file=sys.stderr, disable=not progress):
            writer.write(file, {ours: assemble(recipe, sources, torch_dtype) for ours, recipe in recipes.items()})
        for path in (directory / name for name in SIDE_FILES):
            if path.is_file():
                writer.copy(path)
        writer.write_json("generation_config.json", generation_config(directory, config))
    return output


def build_parser() -> Parser:
    parser = Parser(
        "Convert a Hugging Face checkpoint for generate.py.",
        (
            "python convert_hf_checkpoint.py --checkpoint_dir checkpoints/OWNER/NAME",
            "python convert_hf_checkpoint.py --checkpoint_dir HF_DIR --dtype fp32 --output_dir DIR --force",
        ),
    )
    parser.add_argument("--checkpoint_dir", type=Path, required=True, help="config.json and *.safetensors are in it")
    parser.add_argument(
        "--output_dir", type=Path, help="default: model_<dtype, or format as published> in the checkpoint_dir"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    return parser


def main() -> int:
    """The command: see the top of this file."""
    options = build_parser().parse_args()
    start = time.perf_counter()
    try:
        output = convert(options.checkpoint_dir, options.output_dir, options.dtype, options.force)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in output.glob("*.safetensors")) / 1e9
    print(f"{size:.2f} GB in {seconds:.1f} s, {size / seconds:.2f} GB/s", file=sys.stderr)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
