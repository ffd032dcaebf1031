"""Random changes of a small config.json: sizes, counts, orders of layers, factors, ties, nulls.

The names of keys say how they are drawn, so that a family joins by its model in conftest.
"""

import copy
import random
from collections.abc import Container

# Keys that are drawn alone, and their values.
CHOICES: dict[str, tuple] = {
    "hidden_size": (32, 64, 72, 96),
    "vocab_size": (160, 168, 200),
    "intermediate_size": (8, 40, 64, 96),
    "moe_intermediate_size": (8, 24, 48, 72),
    "shared_expert_intermediate_size": (0, 8, 40),
    "moe_shared_expert_intermediate_size": (8, 40),
    "shared_intermediate_size": (8, 40),
    "n_shared_experts": (0, 1, 2),
    "num_shared_experts": (0, 1, 2),
    "moe_num_shared_experts": (0, 1, 2),
    "sliding_window": (1, 2, 7, 16, 40, 41),
    "hc_count": (2, 3, 5),
    "hc_lowrank": (5, 8, 40),
    "output_gate_type": (None, "silu", "sigmoid"),
    "indexer_budget": (4, 12, 20, 60),
    "conv_L_cache": (2, 3, 5),
    "conv_kernel": (2, 3, 4),
    "mamba_d_conv": (2, 3, 4),
    "linear_conv_kernel_dim": (2, 3, 5),
    "linear_key_head_dim": (8, 16, 24),
    "linear_value_head_dim": (8, 16, 40),
    "linear_head_dim": (8, 16, 24),
    "linear_num_heads": (1, 2, 3),
    "mamba_d_state": (8, 24, 32),
    "ssm_state_size": (8, 24, 32),
    "kv_lora_rank": (16, 32, 40),
    "q_lora_rank": (16, 64, None),
    "qk_nope_head_dim": (8, 16, 24),
    "v_head_dim": (8, 16),
    "clip_qkv": (0.2, 1.0, None),
    "moe_latent_size": (None, 24, 40),
}
FACTORS = {
    *("routed_scaling_factor", "moe_routed_scaling_factor", "route_scale", "swiglu_limit"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    *("final_logit_softcapping", "router_jitter_noise"),
}
FLAGS = {
    *("norm_topk_prob", "attention_bias", "qkv_bias", "use_qk_norm", "mup_enabled", "conv_bias"),
    *("tie_word_embeddings", "lm_head_bias", "mamba_conv_bias", "use_conv_bias"),
    "moe_renormalize",
}
EXPERTS = "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts"
ACTIVE = "moe_k", "top_k_experts", "num_experts_per_tok", "num_experts_per_token"
KINDS_OF_LAYERS = "layer_types", "mlp_layer_types", "layers_block_type"
ROPE = "rope_parameters"
SCALINGS = (
    dict(rope_type="default"),
    dict(rope_type="linear", factor=2.5),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    dict(
        **dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0),
        original_max_position_embeddings=32,
    ),
)


def rope_of(config: dict) -> dict:
    return config.get(ROPE) or {}


def draw(config: dict, rng: random.Random, scaled: bool, kept: Container[str] = ()) -> dict:
    """Return a config.json with about half of its keys drawn, but for those that are kept.

    scaled: RoPE may be scaled.
    """
    config = copy.deepcopy(config)
    for key in sorted(config):
        if key in kept or rng.random() < 0.5:
            continue
        if key in CHOICES and not (key == "sliding_window" and not config[key]):
            config[key] = rng.choice(CHOICES[key])
        if key in FACTORS and config[key]:
            config[key] = round(config[key] * rng.uniform(0.4, 2.5), 3)
        if key in FLAGS:
            config[key] = rng.random() < 0.5
    for part in (draw_layers, draw_heads, draw_mamba, draw_experts):
        if rng.random() < 0.7:
            part(config, rng)
    fit_widths(config)
    if scaled and rng.random() < 0.5:
        draw_rope(config, rng)
    return config


def draw_layers(config: dict, rng: random.Random) -> None:
    """Draw the number of layers, the kind of each, and which are dense."""
    if config.get("per_layer_config"):
        return
    before = len(config.get("layers_block_type") or "") or config["num_hidden_layers"]
    n = rng.randint(1, 5)
    if "num_hidden_layers" in config:
        config["num_hidden_layers"] = n
    for key in KINDS_OF_LAYERS:
        if isinstance(config.get(key), list):
            kinds = sorted({*config[key]})
            config[key] = [rng.choice(kinds) for _ in range(n)]
    for key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        if key in config:
            config[key] = rng.randint(0, n)
    if config.get("mlp_only_layers"):
        config["mlp_only_layers"] = sorted(rng.sample(range(n), rng.randint(0, n)))
        config["decoder_sparse_step"] = rng.choice((1, 1, 2))
    if "moe_layer_end_index" in config:
        config |= {
            "moe_layer_end_index": rng.randint(-1, n),
            "moe_layer_interval": rng.randint(1, 3),
        }
    each = "num_attention_heads_per_layer"
    if len(config.get(each) or "") == before:
        config[each] = [rng.choice(config[each]) for _ in range(n)]


def draw_heads(config: dict, rng: random.Random) -> None:
    """Draw numbers and sizes of attention's heads, and of Gated DeltaNet's."""
    if config.get("per_layer_config") or rope_of(config).get("rope_type") == "longrope":
        return
    kv = rng.randint(1, 4)
    heads = kv * rng.randint(1, 4)
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv}
    if "kv_lora_rank" in config:
        config["num_key_value_heads"] = heads
    elif config.get("head_dim"):
        config["head_dim"] = rng.choice((8, 16, 24, 32))
    if "num_attention_heads_per_layer" in config:
        count = len(config["num_attention_heads_per_layer"])
        each = [kv * rng.randint(1, 4) for _ in range(count)]
        config["num_attention_heads_per_layer"] = each
    if "linear_num_key_heads" in config:
        keys = rng.randint(1, 3)
        config |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * rng.randint(1, 3)}


def draw_mamba(config: dict, rng: random.Random) -> None:
    """Draw Mamba-2's heads and groups."""
    groups = rng.choice((1, 2, 4))
    for names in (("mamba_num_heads", "mamba_head_dim", "n_groups"), ("mamba_n_heads", "", "")):
        count, size, kind = names
        if count in config and size:
            heads = groups * rng.randint(1, 3)
            config |= {count: heads, size: rng.choice((8, 16, 24)), kind: groups}


def draw_experts(config: dict, rng: random.Random) -> None:
    """Draw how many experts there are, and how many of them are active: odd counts, too."""
    groups = config.get("n_group") or config.get("num_expert_group") or 1
    chosen = config.get("topk_group") or 1
    total = groups * rng.randint(2, 5) if groups > 1 else rng.randint(2, 13)
    active = rng.randint(1, min(4, total // groups * chosen))
    key = next(key for key in EXPERTS if key in config)
    config[key] = total
    if "router_jitter_noise" not in config or "lm_head_bias" not in config:  # SparseMixer has two
        config[next(key for key in ACTIVE if key in config)] = active


def fit_widths(config: dict) -> None:
    """Make sizes fit each other that a model's code divides: without a head_dim, and Mamba-2's."""
    heads = config["num_attention_heads"]
    if "kv_lora_rank" in config:  # transformers wants a multiple, which no product needs
        config["hidden_size"] = 8 * heads
    if not config.get("head_dim") and "kv_lora_rank" not in config:
        config["hidden_size"] = heads * (8 if config["hidden_size"] <= 8 * heads else 16)
        rope = rope_of(config)
        if rope.get("rope_type") == "longrope":
            half = config["hidden_size"] // heads // 2
            for name in ("short_factor", "long_factor"):
                rope[name] = [1.0 + n / 4 for n in range(half)]
    if "mamba_n_heads" in config:
        inner = config["mamba_expand"] * config["hidden_size"]
        config |= {"mamba_n_heads": inner // 8, "mamba_d_head": 8}


def draw_rope(config: dict, rng: random.Random) -> None:
    """Draw RoPE's base and scaling, and the part of a head that is rotated."""
    rope = {"rope_theta": rng.choice((1e3, 1e4, 1e6))} | rng.choice(SCALINGS)
    if "partial_rotary_factor" in config[ROPE]:
        rope["partial_rotary_factor"] = rng.choice((0.25, 0.5, 1.0))
    config[ROPE] = rope
