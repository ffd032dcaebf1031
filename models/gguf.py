"""What families share of GGUF files: names of values and tensors, as llama.cpp has them.

A family reads such files if it has `gguf`, the file's architecture (`models.family.Family`). Its
values become a config.json, and its tensors get their published names, so that everything after
that is as for a Hugging Face checkpoint. Read from llama.cpp's gguf-py and convert_hf_to_gguf.py.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

# config.json's key -> the value's, after "ARCHITECTURE.".
KEYS = dict(
    hidden_size="embedding_length",
    num_hidden_layers="block_count",
    max_position_embeddings="context_length",
    num_attention_heads="attention.head_count",
    num_key_value_heads="attention.head_count_kv",
    head_dim="attention.key_length",
    rms_norm_eps="attention.layer_norm_rms_epsilon",
    rope_theta="rope.freq_base",
    num_experts="expert_count",
    num_experts_per_tok="expert_used_count",
    intermediate_size="feed_forward_length",
)
NEEDED = (
    *("hidden_size", "num_hidden_layers", "max_position_embeddings", "num_attention_heads"),
    *("rms_norm_eps", "num_experts", "num_experts_per_tok"),
)
# Keys of RoPE's scaling.
YARN_KEYS = dict(
    factor="rope.scaling.factor",
    original_max_position_embeddings="rope.scaling.original_context_length",
    beta_fast="rope.scaling.yarn_beta_fast",
    beta_slow="rope.scaling.yarn_beta_slow",
    attention_factor="rope.scaling.yarn_attn_factor",
)
NEXT = "nextn_predict_layers"  # layers for multi-token prediction, counted in block_count


class Made(NamedTuple):
    """How a published tensor is made of a file's.

    names: of the file's tensors, within the layer. rows: from the numbers of their rows, stacked
    [R], to those of the published tensor's. values: from their dequantized numbers to the published
    tensor, after `rows`; such a tensor is never kept packed.
    """

    names: tuple[str, ...]
    rows: Callable[[Tensor], Tensor] | None = None
    values: Callable[..., Tensor] | None = None


MadeTable = dict[str, Made | tuple[Made, ...]]  # published name -> how, or several ways


def made_of(*names: str, **options) -> Made:
    return Made(names, **options)


def projections(ours: str, theirs: str) -> dict[str, Made]:
    """Return gate, up and down of a feed-forward layer."""
    return {
        f"{ours}.{kind}_proj.weight": made_of(theirs.format(kind))
        for kind in ("gate", "up", "down")
    }


def leaves(ours: str, theirs: str) -> dict[str, Made]:
    return {f"{ours}.{leaf}": made_of(f"{theirs}.{leaf}") for leaf in ("weight", "bias")}


# A layer's tensors: published name -> how it is made. Those that a file lacks are left out.
TENSORS: MadeTable = {
    "input_layernorm.weight": made_of("attn_norm.weight"),
    "post_attention_layernorm.weight": made_of("ffn_norm.weight"),
    **leaves("self_attn.q_proj", "attn_q"),
    **leaves("self_attn.k_proj", "attn_k"),
    **leaves("self_attn.v_proj", "attn_v"),
    **leaves("self_attn.o_proj", "attn_output"),
    "self_attn.q_norm.weight": made_of("attn_q_norm.weight"),
    "self_attn.k_norm.weight": made_of("attn_k_norm.weight"),
    **leaves("mlp.gate", "ffn_gate_inp"),
    "mlp.gate.e_score_correction_bias": (made_of("exp_probs_b.bias"), made_of("exp_probs_b")),
    "mlp.shared_expert_gate.weight": made_of(
        "ffn_gate_inp_shexp.weight", values=lambda t: t.reshape(1, -1)
    ),
    **projections("mlp", "ffn_{}.weight"),
    **projections("mlp.shared_expert", "ffn_{}_shexp.weight"),
}
# The norm before the FFN in most architectures that have no llama-style names.
POST_ATTENTION_NORM = {"post_attention_layernorm.weight": made_of("post_attention_norm.weight")}
# Norms around sublayers (Gemma).
SANDWICH_NORMS: MadeTable = {
    f"{ours}.weight": made_of(f"{theirs}.weight")
    for ours, theirs in {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm": "post_ffw_norm",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
    }.items()
}
# Tensors outside of the layers.
REST: MadeTable = {
    "model.embed_tokens.weight": made_of("token_embd.weight"),
    "model.norm.weight": made_of("output_norm.weight"),
    "lm_head.weight": made_of("output.weight"),
}


class Values:
    """The values and tensors of a GGUF file, as a family reads them.

    values: of the header. shapes: of its tensors. read: a tensor's name -> its numbers.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], Tensor],
    ):
        self.values, self.shapes, self.read = values, shapes, read
        self.read_names: set[str] = set()
        self.architecture = str(values.get("general.architecture"))  # a file may have an array

    def get(self, key: str, default: Any = None) -> Any:
        """Return the architecture's value of this name."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        return value.tolist() if hasattr(value, "tolist") else value

    def numbers(self, name: str) -> Tensor:
        """Return a small tensor of the file. Raises ValueError if it is missing."""
        if name not in self.shapes:
            raise ValueError(f"it lacks {name}; fetch it again, or another file")
        self.read_names.add(name)
        return self.read(name)

    @property
    def layers(self) -> int:
        """Layers of the model, without those for multi-token prediction."""
        counts = self.get("block_count"), self.get(NEXT, 0)
        if any(type(count) is not int for count in counts):
            raise ValueError(f"its block_count cannot be {counts[0]!r:.40}; fetch it again")
        return counts[0] - counts[1]

    @property
    def layer_numbers(self) -> range:
        """The numbers of the layers; none of those beyond all tensors, which a header may claim."""
        return range(min(self.layers, len(self.shapes)))

    def has(self, name: str, layer: int | None = None) -> bool:
        """Whether a layer (None: any) has a tensor of this name."""
        if layer is not None:
            return f"blk.{layer}.{name}" in self.shapes
        return any(self.has(name, n) for n in self.layer_numbers)

    def width(self, name: str, axis: int) -> int | None:
        """Return the size of a tensor along an axis, in the first layer that has it."""
        for layer in self.layer_numbers:
            if shape := self.shapes.get(f"blk.{layer}.{name}"):
                return shape[axis]
        return None


def common_config(values: Values, keys: Mapping[str, str]) -> dict:
    """Return what most families' config.json have, under shared keys.

    keys: further rows of KEYS, or other ones. Raises ValueError for a value that is missing.
    """
    found = {key: one_value(values.get(theirs)) for key, theirs in (KEYS | keys).items()}
    for key in NEEDED:
        if found[key] is None:
            missing = f"{values.architecture}.{(KEYS | keys)[key]}"
            raise ValueError(f"its header lacks {missing}; fetch it again, or another file")
    if "token_embd.weight" not in values.shapes:
        raise ValueError("it has no token_embd.weight, so it is no whole model; name another file")
    config = {key: value for key, value in found.items() if value is not None}
    return config | {
        "vocab_size": values.shapes["token_embd.weight"][0],
        "num_hidden_layers": values.layers,
        "tie_word_embeddings": "output.weight" not in values.shapes,
        "rope_parameters": rope_parameters(values),
        **({"attention_bias": True} if values.has("attn_q.bias") else {}),
    }


def one_value(value: Any) -> Any:
    """Return the value of all layers, if it is an array with the same number for each."""
    same = isinstance(value, list) and value and all(each == value[0] for each in value)
    return value[0] if same else value


def dense_config(values: Values) -> dict:
    """Return the widths of experts and which layers have none, as the tensors are."""
    dense = [n for n in values.layer_numbers if not values.has("ffn_gate_inp.weight", n)]
    width = values.get("expert_feed_forward_length") or values.width("ffn_down_exps.weight", 2)
    found = {"moe_intermediate_size": one_value(width)}
    if values.get("feed_forward_length") is None and dense:
        found["intermediate_size"] = values.width("ffn_down.weight", 1)
    return found | ({"mlp_only_layers": dense} if dense else {})


def rope_parameters(values: Values) -> dict:
    """Return RoPE's parameters, its scaling included. Raises ValueError for one that none has.

    As in llama.cpp a factor without a type is linear, and files of 2023 have it under another name.
    """
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear"))
    kind = values.get("rope.scaling.type", "none" if factor in (None, 0, 1) else "linear")
    if (scale := values.get("rope.scaling.attn_factor", 1)) != 1:
        raise ValueError(
            f"its rope.scaling.attn_factor = {scale!r:.40} is not supported, only 1 is"
        )
    found: dict = {"rope_type": "default" if kind == "none" else kind}
    if kind != "none":
        given = {key: values.get(theirs) for key, theirs in YARN_KEYS.items()} | {"factor": factor}
        found |= {key: value for key, value in given.items() if value is not None}
    theta = values.get("rope.freq_base")
    return found | ({} if theta is None else {"rope_theta": theta})


def mscales(values: Values) -> dict:
    """Return DeepSeek's two factors of YaRN, of which the file has a tenth of one.

    llama.cpp takes both for equal, as they are in all published models.
    """
    tenth = values.get("rope.scaling.yarn_log_multiplier")
    if tenth is None:
        return {}
    factor = round(10 * tenth, 6)
    return {"mscale": factor, "mscale_all_dim": factor}


def partial_rotary(values: Values) -> dict:
    """Return the part of a head that is rotated."""
    rotated, size = values.get("rope.dimension_count"), values.get("attention.key_length")
    known = type(rotated) is int and type(size) is int and size > 0
    return {"partial_rotary_factor": rotated / size} if known else {}


def halves_to_pairs(numbers: Tensor, heads: int) -> Tensor:
    """Reorder rows [R] that llama.cpp rotates in neighboring pairs to halves of each head.

    Its converter has permuted the rows of Q and K for that in architectures of Llama's kind.
    """
    return numbers.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten()


def rotated_in_pairs(heads: int, kv_heads: int) -> MadeTable:
    """Return queries and keys, whose rows a file has in the order of RoPE in pairs."""
    return {
        f"self_attn.{name}_proj.weight": made_of(
            f"attn_{name}.weight", rows=partial(halves_to_pairs, heads=count)
        )
        for name, count in (("q", heads), ("k", kv_heads))
    }


def minus_one(t: Tensor) -> Tensor:
    """Return the published weight of a norm that the file has with its 1 added."""
    return t.float() - 1


def log_of_negative(t: Tensor) -> Tensor:
    """Return A_log, of which the file has -exp(A_log)."""
    return torch.log(-t.float())
