"""Args of checkpoints that version one converted: they do not name their family.

Version one had one model with 47 fields. Each row of V1_FAMILIES recognizes a family by its
fields and lists those that this family's code now implies.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import NamedTuple

# Fields of version one's args, and their defaults, that are not in model.ModelArgs.
V1_DEFAULTS = dict(
    qkv_bias=False,
    shared_intermediate=0,
    shared_gated=True,
    scoring="softmax",
    routed_scale=1.0,
    rotary_dim=None,
    attention_scale=None,
    embedding_scale=1.0,
    residual_scale=1.0,
    logit_scale=1.0,
    layer_norm=False,
    head_bias=False,
    mixer_eps=None,
    rope_factors=[],
    rope_scale=1.0,
    full_layers=[],
    attention_sinks=False,
    router_bias=False,
    expert_bias=False,
    swiglu_limit=None,
    swiglu_alpha=1.702,
    yarn=None,
    n_group=1,
    n_active_group=1,
    kv_rank=None,
    q_rank=None,
    value_dim=None,
)


class V1Family(NamedTuple):
    name: str
    matches: Callable[[Mapping], bool]
    implied: Mapping = {}  # fields that had one value in the whole family


V1_FAMILIES = (
    V1Family(
        "deepseek_v3",
        lambda args: args["kv_rank"] and args["scoring"] == "sigmoid",
        {"scoring": "sigmoid", "shared_gated": False},
    ),
    V1Family("deepseek_v2", lambda args: args["kv_rank"], {"shared_gated": False}),
    V1Family(
        "gpt_oss",
        lambda args: args["attention_sinks"],
        {"attention_sinks": True, "router_bias": True, "expert_bias": True},
    ),
    V1Family(
        "glm4_moe",
        lambda args: args["scoring"] == "sigmoid",
        {"scoring": "sigmoid", "shared_gated": False},
    ),
    V1Family("phimoe", lambda args: args["layer_norm"], {"layer_norm": True}),
    V1Family("granitemoe", lambda args: args["attention_scale"]),
    V1Family("qwen2_moe", lambda args: args["shared_intermediate"] or args["qkv_bias"]),
    V1Family("olmoe", lambda args: args["qk_norm"] == "full"),
    V1Family("qwen3_moe", lambda args: args["qk_norm"] == "head"),
    V1Family("mixtral", lambda args: True),
)


def args_of_version_one(values: Mapping, args_classes: Mapping[str, type]) -> dict:
    """Return the fields of today's args, with the family's name.

    args_classes: each family's. Raises ValueError for a field that the family cannot have.
    """
    given = {"qk_norm": "none"} | V1_DEFAULTS | dict(values)
    row = next(row for row in V1_FAMILIES if row.matches(given))
    if row.name not in args_classes:
        raise ValueError(f"family {row.name!r} is not supported")
    known = {field.name for field in fields(args_classes[row.name])}
    ignored = V1_DEFAULTS | dict(row.implied)
    kept = {"family": row.name}
    for name, value in values.items():
        if name in known:
            kept[name] = value
        elif name not in ignored or value not in (ignored[name], V1_DEFAULTS[name]):
            raise ValueError(f"{name} = {value!r} with family {row.name!r}")
    return kept
