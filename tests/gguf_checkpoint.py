"""Write a small transformers model as a GGUF file, as llama.cpp's converter would.

Names, permutations and other changes are facts of llama.cpp's conversion/*.py, written here apart
from our reader. Weights get any types: those of the transformers model become what the file holds,
dequantized by the package `gguf`.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor


class Entry(NamedTuple):
    """A tensor of the file: `make` of transformers' tensors. moved: it only moves their numbers."""

    name: str
    sources: tuple[str, ...]
    make: Callable[..., Tensor] = lambda t: t
    moved: bool = True


ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "pre_feedforward_layernorm": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "mamba.in_proj": "ssm_in",
    "mamba.out_proj": "ssm_out",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.in_proj": "ssm_in",
    "mixer.out_proj": "ssm_out",
    "mixer.gate": "ffn_gate_inp",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "norm": "attn_norm",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "self_attn.gate_proj": "attn_gate",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.router.gate": "ffn_gate_inp",
    # Kimi Linear
    "self_attn.forget_gate.f_a_proj": "ssm_f_a",
    "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    # LFM2
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}
ARCHITECTURES = {
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "glm4_moe": "glm4moe",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe",
    "granitemoe": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h_moe",
    "lfm2_moe": "lfm2moe",
    "minimax_m2": "minimax-m2",
    "afmoe": "afmoe",
    "kimi_linear": "kimi-linear",
    "ernie4_5_moe": "ernie4_5-moe",
}
MAMBA = "granitehybrid", "nemotron_h_moe"
PERMUTED = "llama", "granitemoe", "granitehybrid"  # rows of Q and K
POST_ATTENTION_NORM = "qwen3next", "qwen35moe", "gpt-oss", "glm4moe", "gemma4", "afmoe"


def permute(t: Tensor, heads: int) -> Tensor:
    return t.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def entries(config, state: dict[str, Tensor]) -> list[Entry]:
    """Return the file's tensors for a model's state."""
    config, arch = plain(config), ARCHITECTURES[config.model_type]
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "model.embeddings.weight": "token_embd.weight",
        "model.norm_f.weight": "output_norm.weight",
        "model.embedding_norm.weight": "token_embd_norm.weight",
    }
    shift = {"make": lambda t: t + 1, "moved": False} if arch.startswith("qwen3") else {}
    shift = {} if arch == "qwen3moe" else shift
    found = []
    for name in state:
        if name in outside:
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            more = shift if name == "model.norm.weight" else {}
            found.append(Entry(outside[name], (name,), **more))
            continue
        _, _, layer, rest = name.split(".", 3)
        found += [
            Entry(f"blk.{layer}.{theirs}", sources, make, moved)
            for theirs, sources, make, moved in in_layer(arch, config, name, rest, shift)
        ]
    if arch == "gemma4":
        size = whole_layer(config)["head_dim"]
        rotated = int(size * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
        factors = torch.tensor([1.0] * rotated + [1e30] * (size // 2 - rotated))
        found.append(Entry("rope_freqs.weight", (), lambda: factors, False))
    return found


def in_layer(arch: str, config, name: str, rest: str, shift: dict) -> list[Entry]:
    """Return the tensors made of one of a layer's. rest: its name within the layer."""
    path, leaf = rest.rsplit(".", 1) if "." in rest else (rest, "")
    if arch in MAMBA and (made := of_mamba(config, name, rest)):
        return made
    if made := special(arch, config, name, rest):
        return made
    theirs = ATTENTION[path]
    if path == "post_attention_layernorm" and arch in POST_ATTENTION_NORM:
        theirs = "post_attention_norm"
    if path.endswith("norm") and path != "linear_attn.norm" and shift:
        return [Entry(f"{theirs}.{leaf}", (name,), **shift)]
    make = {}
    if arch in PERMUTED and path in ("self_attn.q_proj", "self_attn.k_proj"):
        query = path.endswith("q_proj")
        heads = config.num_attention_heads if query else config.num_key_value_heads
        make = {"make": lambda t: permute(t, heads)}
    if arch == "qwen35moe" and (order := value_order(config, path)):
        make = {"make": order}
    return [Entry(f"{theirs}.{leaf}", (name,), **make)]


def special(arch: str, config, name: str, rest: str) -> list[Entry] | None:
    """Return the tensors that are no plain copy under another name; None: it is one."""
    sources = (name,)
    if rest.endswith("experts.gate_up_proj"):
        if arch == "gpt-oss":
            halves = [lambda t, n=n: t.transpose(1, 2)[:, n::2].contiguous() for n in (0, 1)]
        elif arch == "gemma4":
            return [Entry("ffn_gate_up_exps.weight", sources)]
        else:
            halves = [lambda t, n=n: t.chunk(2, dim=1)[n].contiguous() for n in (0, 1)]
        names = "ffn_gate_exps.weight", "ffn_up_exps.weight"
        return [Entry(n, sources, half) for n, half in zip(names, halves, strict=True)]
    if rest.endswith("experts.down_proj"):
        turn = (lambda t: t.transpose(1, 2).contiguous()) if arch == "gpt-oss" else (lambda t: t)
        return [Entry("ffn_down_exps.weight", sources, turn)]
    if rest.endswith("gate_up_proj_bias"):
        return [
            Entry("ffn_gate_exps.bias", sources, lambda t: t[:, ::2], False),
            Entry("ffn_up_exps.bias", sources, lambda t: t[:, 1::2], False),
        ]
    if rest.endswith("kv_b_proj.weight"):
        return kv_b_parts(config, sources)
    if rest == "self_attn.conv1d.weight":
        parts = [lambda t, n=n: t.chunk(3)[n].transpose(0, 1).unsqueeze(0) for n in range(3)]
        names = (f"ssm_conv1d_{name}.weight" for name in "qkv")
        return [Entry(n, sources, part, False) for n, part in zip(names, parts, strict=True)]
    if rest.endswith("in_proj_qkvz.weight"):
        return qkvz_parts(config, sources)
    order = value_order(config, rest) if arch == "qwen35moe" else None
    order = order or (lambda t: t)
    plain = {
        "self_attn.forget_gate.A_log": ("ssm_a", lambda t: -t.exp()),
        "self_attn.forget_gate.dt_bias": ("ssm_dt.bias", lambda t: t),
        "linear_attn.A_log": ("ssm_a", lambda t: order(-t.exp())),
        "linear_attn.dt_bias": ("ssm_dt.bias", order),
        "linear_attn.conv1d.weight": ("ssm_conv1d.weight", lambda t: order(t.squeeze(1))),
        "mlp.experts.down_proj_bias": ("ffn_down_exps.bias", lambda t: t),
        "self_attn.sinks": ("attn_sinks.weight", lambda t: t),
        "mlp.gate.e_score_correction_bias": ("exp_probs_b.bias", lambda t: t),
        "feed_forward.expert_bias": ("exp_probs_b.bias", lambda t: t),
        "mlp.expert_bias": ("exp_probs_b.bias", lambda t: t),
        "mlp.e_score_correction_bias": ("exp_probs_b.bias", lambda t: t),
        "mlp.gate.moe_statics.e_score_correction_bias": ("exp_probs_b.bias", lambda t: t[0]),
        "conv.conv.weight": ("shortconv.conv.weight", lambda t: t.squeeze(1)),
        "layer_scalar": ("layer_output_scale.weight", lambda t: t),
        "router.scale": ("ffn_gate_inp.scale", lambda t: t),
        "router.per_expert_scale": ("ffn_down_exps.scale", lambda t: t),
    }
    if rest in plain:
        theirs, make = plain[rest]
        return [Entry(theirs, sources, make, False)]
    return None


def of_mamba(config, name: str, rest: str) -> list[Entry] | None:
    """Return the tensors of a Mamba-2 layer, and of experts without a gate."""
    sources, leaf = (name,), rest.split(".", 1)[-1]
    groups = getattr(config, "n_groups", 1)
    plain = {
        "A_log": ("ssm_a", lambda t: -t.exp().unsqueeze(1)),
        "D": ("ssm_d", lambda t: t.unsqueeze(1)),
        "dt_bias": ("ssm_dt.bias", lambda t: t),
        "conv1d.weight": ("ssm_conv1d.weight", lambda t: t.squeeze(1)),
        "conv1d.bias": ("ssm_conv1d.bias", lambda t: t),
        "norm.weight": ("ssm_norm.weight", lambda t: t.view(groups, -1)),
        "gate.e_score_correction_bias": ("exp_probs_b.bias", lambda t: t),
    }
    if rest.startswith(("mamba.", "mixer.")) and leaf in plain:
        theirs, make = plain[leaf]
        return [Entry(theirs, sources, make, False)]
    if rest == "mixer.experts.up_proj":
        return [Entry("ffn_up_exps.weight", sources)]
    if rest == "mixer.experts.down_proj":
        return [Entry("ffn_down_exps.weight", sources)]
    if rest == "shared_mlp.input_linear.weight":
        halves = [lambda t, n=n: t.chunk(2)[n].contiguous() for n in (0, 1)]
        names = "ffn_gate_shexp.weight", "ffn_up_shexp.weight"
        return [Entry(n, sources, half) for n, half in zip(names, halves, strict=True)]
    return None


def kv_b_parts(config, sources: tuple[str, ...]) -> list[Entry]:
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    return [
        Entry(
            "attn_k_b.weight",
            sources,
            lambda t: t.unflatten(0, (heads, -1))[:, :nope].transpose(1, 2).contiguous(),
        ),
        Entry(
            "attn_v_b.weight",
            sources,
            lambda t: t.unflatten(0, (heads, -1))[:, nope:].contiguous(),
        ),
    ]


def qkvz_parts(config, sources: tuple[str, ...]) -> list[Entry]:
    K, H = config.linear_num_key_heads, config.linear_num_value_heads
    values = H // K * config.linear_value_head_dim
    sizes = *[config.linear_key_head_dim] * 2, values, values

    def parts(t: Tensor) -> list[Tensor]:
        return [p.flatten(0, 1) for p in t.unflatten(0, (K, -1)).split(sizes, dim=1)]

    return [
        Entry("attn_qkv.weight", sources, lambda t: torch.cat(parts(t)[:3])),
        Entry("attn_gate.weight", sources, lambda t: parts(t)[3]),
    ]


def value_order(config, path: str) -> Callable[[Tensor], Tensor] | None:
    """Return how a tensor's value heads are reordered: by place, and not by key head."""
    K, H, Cv = (
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_value_head_dim,
    )
    keys = 2 * K * config.linear_key_head_dim

    def tiled(t: Tensor, width: int) -> Tensor:
        return t.unflatten(0, (K, H // K, width)).transpose(0, 1).flatten(0, 2)

    path = path.removesuffix(".weight")
    if path.endswith(("in_proj_qkv", "conv1d")):
        return lambda t: torch.cat((t[:keys], tiled(t[keys:], Cv)))
    if path.endswith("in_proj_z"):
        return lambda t: tiled(t, Cv)
    if path.endswith(("in_proj_a", "in_proj_b", "A_log", "dt_bias")):
        return lambda t: tiled(t, 1)
    if path.endswith("out_proj"):
        return lambda t: tiled(t.T, Cv).T.contiguous()
    return None


# Values -------------------------------------------------------------------------------------------


def plain(config) -> SimpleNamespace:
    """Return a config's values, those of all layers too that some layers override.

    They have the names that transformers gives all models, and its files' own ones.
    """
    found = config.to_dict()
    shared = {name: found[own] for name, own in config.attribute_map.items() if own in found}
    return SimpleNamespace(**found | shared)


def values(config) -> dict:
    """Return the architecture's values of a config, as the converter writes them."""
    c, arch = plain(config), ARCHITECTURES[config.model_type]
    no_rope = {"rope_theta": 1e4, "rope_type": "default"}
    rope = getattr(c, "rope_parameters", None) or no_rope
    rope = rope.get("full_attention", rope)
    experts = next(
        getattr(c, key)
        for key in ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
        if hasattr(c, key)
    )
    active = next(
        getattr(c, key)
        for key in ("top_k_experts", "moe_k", "num_experts_per_tok")
        if getattr(c, key, None)
    )
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": getattr(c, "intermediate_size", 0),
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(
            getattr(c, "rms_norm_eps", 0) or getattr(c, "norm_eps", 0) or c.layer_norm_epsilon
        ),
        "rope.freq_base": float(rope["rope_theta"]),
        "expert_count": experts,
        "expert_used_count": active,
    }
    if getattr(c, "head_dim", None) and arch not in ("llama", "olmoe", "granitemoe", "qwen2moe"):
        found |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    if (width := getattr(c, "moe_intermediate_size", None)) is not None:
        found["expert_feed_forward_length"] = width
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
            "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
        }
    if arch == "afmoe":
        found |= {
            "leading_dense_block_count": c.num_dense_layers,
            "expert_shared_count": c.num_shared_experts,
            "expert_weights_scale": float(c.route_scale),
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        }
    if arch in ("llama", "gpt-oss", "afmoe"):
        found["attention.sliding_window"] = c.sliding_window
    if arch == "gpt-oss":
        found["expert_feed_forward_length"] = c.intermediate_size
    if arch in ("qwen3next", "qwen35moe"):
        heads = c.linear_num_value_heads
        found |= {
            "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
            "ssm.conv_kernel": c.linear_conv_kernel_dim,
            "ssm.state_size": c.linear_key_head_dim,
            "ssm.group_count": c.linear_num_key_heads,
            "ssm.time_step_rank": heads,
            "ssm.inner_size": heads * c.linear_value_head_dim,
            "rope.dimension_count": int(c.head_dim * rope["partial_rotary_factor"]),
        }
    if arch == "qwen35moe":
        found["rope.dimension_sections"] = [11, 11, 10, 0]  # of images; text has one position
    if arch in ("glm4moe", "deepseek2", "kimi-linear"):
        found |= sigmoid_values(c, arch, rope)
    if arch == "kimi-linear":
        found |= {
            "attention.head_count_kv": [int(kind == "full_attention") for kind in c.layer_types],
            "ssm.conv_kernel": c.linear_conv_kernel_dim,
            "kda.head_dim": c.linear_head_dim,
        }
    if arch == "minimax-m2":
        found |= {
            "expert_feed_forward_length": c.intermediate_size,
            "rope.dimension_count": int(c.head_dim * rope["partial_rotary_factor"]),
            "expert_gating_func": 2,
        }
    if arch == "ernie4_5-moe":
        found |= {
            "leading_dense_block_count": c.moe_layer_start_index,
            "interleave_moe_layer_step": c.moe_layer_interval,
            "expert_shared_count": c.moe_num_shared_experts,
            "expert_shared_feed_forward_length": c.moe_intermediate_size,
        }
    if arch == "lfm2moe":
        kinds = c.layer_types
        found |= {
            "attention.head_count_kv": [
                c.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds
            ],
            "shortconv.l_cache": c.conv_L_cache,
            "leading_dense_block_count": c.num_dense_layers,
            "expert_gating_func": 2,
        }
    if arch == "qwen2moe":
        found["expert_shared_feed_forward_length"] = c.shared_expert_intermediate_size
    if arch in MAMBA:
        found |= mamba_values(c, arch)
    if arch in ("granitemoe", "granitehybrid"):
        found |= {
            "attention.scale": float(c.attention_multiplier),
            "embedding_scale": float(c.embedding_multiplier),
            "residual_scale": float(c.residual_multiplier),
            "logit_scale": float(c.logits_scaling),
        }
    return found | (gemma_values(c) if arch == "gemma4" else {})


def mamba_values(c, arch: str) -> dict:
    """Return the values of models with Mamba-2: those of layers with attention are arrays."""
    kinds = c.layers_block_type if arch == "nemotron_h_moe" else c.layer_types
    heads = [c.num_key_value_heads * (kind == "full_attention") for kind in kinds]
    found = {"attention.head_count_kv": heads}
    if arch == "granitehybrid":
        count, size, groups, state, width = (
            *(c.mamba_n_heads, c.mamba_d_head, c.mamba_n_groups, c.mamba_d_state, c.mamba_d_conv),
        )
        found |= {
            "expert_shared_feed_forward_length": c.shared_intermediate_size,
            "rope.scaling.finetuned": c.position_embedding_type == "rope",
        }
    else:
        count, size, groups, state, width = (
            *(c.mamba_num_heads, c.mamba_head_dim, c.n_groups, c.ssm_state_size, c.conv_kernel),
        )
        widths = {"mlp": c.intermediate_size, "moe": c.moe_intermediate_size}
        found |= {
            "feed_forward_length": [widths.get(kind, 0) for kind in kinds],
            "expert_shared_feed_forward_length": c.moe_shared_expert_intermediate_size,
            "expert_shared_count": 1,
            "expert_weights_norm": c.norm_topk_prob,
            "expert_weights_scale": float(c.routed_scaling_factor),
            "expert_group_count": c.n_group,
            "moe_latent_size": c.moe_latent_size,
        }
    return found | {
        "ssm.conv_kernel": width,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.time_step_rank": count,
        "ssm.inner_size": count * size,
    }


def sigmoid_values(c, arch: str, rope: dict) -> dict:
    dense = getattr(c, "first_k_dense_replace", None)
    found = {
        "leading_dense_block_count": 1 if dense is None else dense,
        "expert_shared_count": c.n_shared_experts,
        "expert_weights_scale": float(c.routed_scaling_factor),
    }
    if c.norm_topk_prob:
        found["expert_weights_norm"] = True
    if arch == "glm4moe":
        rotated = int(c.head_dim * rope["partial_rotary_factor"])
        return found | {"rope.dimension_count": rotated, "expert_gating_func": 2}
    rotated = c.qk_rope_head_dim
    found |= {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": c.kv_lora_rank,
        "attention.key_length": c.kv_lora_rank + rotated,
        "attention.value_length": c.kv_lora_rank,
        "attention.key_length_mla": c.qk_nope_head_dim + rotated,
        "attention.value_length_mla": c.v_head_dim,
        "rope.dimension_count": rotated,
        "expert_group_count": c.n_group,
        "expert_group_used_count": c.topk_group,
    }
    if c.q_lora_rank is not None:
        found["attention.q_lora_rank"] = c.q_lora_rank
    if rope.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def whole_layer(c) -> dict:
    """Return what layers without a window override."""
    return next(iter(c.per_layer_config.values()))


def gemma_values(c) -> dict:
    windowed = [kind == "sliding_attention" for kind in c.layer_types]
    whole = whole_layer(c)
    heads = [c.num_key_value_heads if w else whole["num_key_value_heads"] for w in windowed]
    return {
        "attention.head_count_kv": heads,
        "attention.sliding_window_pattern": windowed,
        "attention.sliding_window": c.sliding_window,
        "attention.key_length": whole["head_dim"],
        "attention.value_length": whole["head_dim"],
        "attention.key_length_swa": c.head_dim,
        "attention.value_length_swa": c.head_dim,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.freq_base_swa": float(c.rope_parameters["sliding_attention"]["rope_theta"]),
        "final_logit_softcapping": float(c.final_logit_softcapping),
    }


# Writing ------------------------------------------------------------------------------------------


def add_value(writer: gguf.GGUFWriter, key: str, value) -> None:
    """Write one value under the type that its Python type has in the converter."""
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def random_blocks(shape: tuple[int, ...], type: str, seed: int) -> np.ndarray:
    """Return random blocks of a type, whose fp16 scales are small and finite."""
    kind = gguf.GGMLQuantizationType[type]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    rows = int(np.prod(shape[:-1])), shape[-1] // block, nbytes
    blocks = rng.integers(0, 256, rows, dtype=np.uint8)
    scales = {  # where a block has its fp16 scales, or its e8m0 exponent
        "Q8_0": [0],
        "Q4_0": [0],
        "Q4_1": [0, 2],
        "Q5_0": [0],
        "Q5_1": [0, 2],
        "IQ4_NL": [0],
        "IQ4_XS": [0],
        "Q2_K": [80, 82],
        "Q3_K": [108],
        "Q4_K": [0, 2],
        "Q5_K": [0, 2],
        "Q6_K": [208],
        "IQ2_XXS": [0],
        "IQ3_XXS": [0],
    }
    size = {"Q8_0": 2e-3, "Q6_K": 1e-4, "IQ4_NL": 3e-3, "IQ4_XS": 1e-4}.get(type, 3e-4)
    size = {"Q4_0": 2e-2, "Q4_1": 2e-2, "Q5_0": 1e-2, "Q5_1": 1e-2}.get(type, size)
    if type == "NVFP4":
        blocks[..., :4] = rng.integers(8, 40, (*rows[:2], 4), dtype=np.uint8)
    if type == "MXFP4":
        blocks[..., 0] = rng.integers(120, 126, rows[:2], dtype=np.uint8)
    for at in scales.get(type, []):
        given = (size * rng.uniform(0.5, 1.5, (*rows[:2], 1))).astype(np.float16)
        blocks[..., at : at + 2] = given.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    peer,
    types: Callable[[str], str] = lambda name: "F32",
    tokenizer: dict | None = None,
    head: dict | None = None,
    split: int = 0,
) -> Path:
    """Write a model as a GGUF file. Its weights become those of the file.

    types: a tensor's name -> its type; those that are not only moved stay F32. tokenizer: more
    values, under their whole key. head: the layer for multi-token prediction, under the names that
    the converter gives it. split: tensors a part, 0: one file.
    """
    arch = ARCHITECTURES[peer.config.model_type]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    given = values(peer.config)
    if head:
        given["block_count"] += 1
        given["nextn_predict_layers"] = 1
    for key, value in given.items():
        if value is None:
            continue
        add_value(writer, f"{arch}.{key}", value)
    for key, value in (tokenizer or {}).items():
        add_value(writer, key, value)
    state = dict(peer.state_dict()) | (head or {})
    with torch.no_grad():
        for number, entry in enumerate(entries(peer.config, state)):
            tensor = entry.make(*(state[name] for name in entry.sources))
            type = types(entry.name) if entry.moved and tensor.dim() > 1 else "F32"
            kind = gguf.GGMLQuantizationType[type]
            if type in ("F32", "F16"):
                data = tensor.numpy().astype({"F32": np.float32, "F16": np.float16}[type])
            elif type == "BF16":
                data = gguf.quants.quantize(tensor.contiguous().numpy(), kind)
            else:
                data = random_blocks(tuple(tensor.shape), type, number)
            writer.add_tensor(entry.name, np.ascontiguousarray(data), raw_dtype=kind)
            if type == "F32":
                continue
            numbers = torch.from_numpy(gguf.quants.dequantize(data, kind))
            if type == "NVFP4":
                scale = torch.linspace(0.5, 2, len(numbers) if numbers.dim() == 3 else 1)
                stem = entry.name.removesuffix(".weight")
                writer.add_tensor(f"{stem}.scale", scale.numpy())
                writer.add_tensor(f"{stem}.input_scale", np.ones(1, np.float32))
                numbers = numbers * scale.view(-1, *[1] * (numbers.dim() - 1))
            put_back(entry, state, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if split:
        return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))[0]
    return path


def put_back(entry: Entry, state: dict[str, Tensor], values: Tensor) -> None:
    """Set the numbers that an entry was made of to `values`, through the same moves."""
    (name,) = entry.sources
    source = state[name]
    places = entry.make(torch.arange(source.numel()).view(source.shape))
    source.view(-1)[places.flatten()] = values.flatten().to(source.dtype)
