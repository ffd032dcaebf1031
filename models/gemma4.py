"""Gemma 4 with experts, text alone: window and global layers, a dense FFN beside the experts.

Window layers have heads of C, global layers of `global_head_dim`, whose values are their unrotated
keys. Values are normed without a weight, and attention scores have no factor. Sublayers' outputs
are normed before they are added to the residual (models/layers/sandwich.py).
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model import (
    Attention,
    Block,
    Context,
    Linear,
    ModelArgs,
    MoE,
    Transformer,
    new_parameter,
)
from models.config import HFConfig, full_layers, unsupported
from models.family import Family, PublishedLayout, Shard
from models.gguf import SANDWICH_NORMS, Values, dense_config, made_of
from models.layers.geglu import GegluFeedForward, geglu
from models.layers.sandwich import Branches, SandwichAddNorm, UnitRMSNorm
from models.layers.windows import KINDS
from models.tensors import (
    Recipe,
    Recipes,
    attention_recipes,
    copy_of,
    dense_recipes,
    expert_recipes,
)
from ops.declared import GEGLU, AttentionAdditions, ExpertAdditions, Routing
from ops.inductor import materialize
from ops.plain.rope import rope_frequencies, rope_table, rotate

# RoPE parameters by kind of layer; transformers' values of an absent `rope_parameters`.
ROPE: dict[str, dict] = {
    KINDS[0]: {"rope_type": "default", "rope_theta": 1e4},
    KINDS[1]: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


OVERRIDES = "layer_overrides"  # shared name of per_layer_config


@dataclass(frozen=True)
class Gemma4Args(ModelArgs):
    full_layers: tuple[int, ...] = ()  # global layers: no window, heads of their own size
    global_head_dim: int = 512
    global_kv_head: int = 1  # KV heads of a global layer
    global_rope_theta: float = 1e6
    global_rotary_dim: int = 128  # how many numbers of a global layer's head are rotated
    logit_softcap: float | None = None
    shared_intermediate: int = 0  # intermediate dim of the dense FFN beside the experts

    def constraints(self) -> dict[str, bool]:
        return super().constraints() | {
            # Tensor parallelism shards `wo` of all layers by one row of its table.
            "global_head_dim": self.global_head_dim % self.head_dim == 0,
            "global_kv_head": self.n_head % self.global_kv_head == 0,
            "global_rotary_dim": self.global_rotary_dim % 2 == 0
            and self.global_rotary_dim <= self.global_head_dim,
            "shared_intermediate": self.shared_intermediate > 0,
        }


class WindowAttention(Attention):
    """Attention with a window, normed values and scores without a factor."""

    rope_begin = 0  # of this layer's columns in Context.rope

    def __init__(self, args: ModelArgs):
        super().__init__(args)
        # A factor of queries, beside the C ** -0.5 of every attention function.
        self.query_scale = args.head_dim**0.5

    def own_rope(self, rope: Tensor) -> Tensor:
        return rope.narrow(-1, self.rope_begin, 2 * self.rotary_dim)

    def keys_and_values(self, kv: Tensor, rope: Tensor) -> Tensor:
        """kv [B, Q, 2 K C], or [B, Q, K C] if keys are values -> [B, Q, 2, K, C]."""
        _, K, C = self.heads
        # Expanded before the norm, so that one kernel norms and writes both.
        kv = kv.unflatten(-1, (-1, K, C)).expand(-1, -1, 2, -1, -1)
        normed = F.rms_norm(kv.float(), (C,), None, self.k_norm.eps)
        rope = self.own_rope(rope).unsqueeze(2)
        keys = rotate(normed * self.k_norm.weight.float(), rope, self.rotary_dim)
        is_key = torch.arange(2, device=kv.device).view(2, 1, 1) == 0
        return torch.where(is_key, keys, normed).to(kv.dtype)

    def queries(self, q: Tensor, rope: Tensor) -> Tensor:
        return super().queries(q, self.own_rope(rope)) * self.query_scale

    def fused_decode_settings(self) -> AttentionAdditions:
        return AttentionAdditions(
            query_scale=self.query_scale, norm_values=True, rope_begin=self.rope_begin
        )


class GlobalAttention(WindowAttention):
    """Attention without a window, whose values are its keys before norm and RoPE."""

    projections = ("wqk",), "wo"

    def __init__(self, args: Gemma4Args):
        C, K = args.global_head_dim, args.global_kv_head
        super().__init__(replace(args, head_dim=C, n_kv_head=K))
        self.wqk, self.window = Linear(args.dim, (args.n_head + K) * C), None
        self.rope_begin = 2 * args.head_dim
        del self.wqkv

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.wo(self.core(self.wqk(x), context))

    def fused_decode_settings(self) -> AttentionAdditions:
        added = super().fused_decode_settings()
        return replace(added, keys_are_values=True)


class Gemma4MoE(MoE):
    """Experts beside a dense FFN, each with a norm of its own, of which x lacks the weight.

    The router's weight has the factors of its input in it: `scale` and D ** -0.5.
    """

    def __init__(self, args: Gemma4Args):
        super().__init__(args)
        self.experts.activation = geglu
        self.shared = GegluFeedForward(args.dim, args.shared_intermediate)
        self.experts_scale, self.shared_scale = new_parameter(args.dim), new_parameter(args.dim)
        self.expert_weight_scale = new_parameter(args.n_expert)

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        expert_indices, expert_weights = super().route(scores)
        scale = self.expert_weight_scale[expert_indices].float()
        return expert_indices, materialize(expert_weights) * scale

    def expert_input(self, x: Tensor) -> Tensor:
        return materialize(x * self.experts_scale)

    def merge(self, x: Tensor, y: Tensor) -> Branches:
        return Branches(self.shared(materialize(x * self.shared_scale))[0], y)

    def fused_decode_settings(self) -> ExpertAdditions:
        factors = self.expert_weight_scale
        return ExpertAdditions(
            routing=Routing(self.n_active, self.norm_topk, factors=factors),
            activation=GEGLU,
            input_scale=self.experts_scale,
            beside=self.shared,
            beside_scale=self.shared_scale,
        )


class Gemma4Transformer(Transformer):
    args: Gemma4Args

    def __init__(self, args: Gemma4Args):
        super().__init__(args)
        # transformers rounds the embedding's factor to the weight's dtype: 53.0, not 53.07 in bf16.
        root = torch.tensor(args.dim**0.5, device="cpu")
        dtypes = torch.float32, torch.bfloat16, torch.float16
        self.embedding_scale = {dtype: root.to(dtype).item() for dtype in dtypes}

    def make_block(self, args: Gemma4Args, layer: int) -> Block:
        block = Block(args, layer)
        is_global = layer in args.full_layers
        block.attention = (GlobalAttention if is_global else WindowAttention)(args)
        block.ffn_norm = UnitRMSNorm(args.dim, args.norm_eps)
        block.ffn = Gemma4MoE(args)
        block.add_attention = SandwichAddNorm(args.dim, args.norm_eps)
        block.add_ffn = SandwichAddNorm(args.dim, args.norm_eps, branches=2, scaled=True)
        return block

    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        """Return the window layers' columns, then those of global layers."""
        args = self.args
        window = rope_frequencies(args.head_dim, args.rope_theta, device)
        # Proportional RoPE: the first frequencies of a head that is rotated whole, then zeros.
        whole = rope_frequencies(args.global_head_dim, args.global_rope_theta, device)
        rotated = torch.arange(len(whole), device=device) < args.global_rotary_dim // 2
        proportional = torch.where(rotated, whole, 0.0)
        return torch.cat([rope_table(table, length) for table in (window, proportional)], dim=-1)

    def embed(self, tokens: Tensor) -> Tensor:
        x = super().embed(tokens)
        return x * self.embedding_scale[x.dtype]

    def logits(self, normed: Tensor, last: Tensor | None) -> Tensor:
        logits, cap = super().logits(normed, last), self.args.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap


# config.json --------------------------------------------------------------------------------------


def flat_rope(config: dict) -> dict:
    """Return the config with RoPE of window layers as `rope_parameters`, of others by dotted keys.

    Raises ValueError unless there is a set of parameters for each kind of layer.
    """
    if "rope_scaling" in config:
        raise unsupported("rope_scaling", config["rope_scaling"], "rope_parameters are")
    rope = config.get("rope_parameters")
    rope = ROPE if rope is None else rope
    known = isinstance(rope, dict) and set(rope) == set(KINDS)
    if not known or not all(isinstance(rope[kind], dict) for kind in KINDS):
        why = f"a set for each of {' and '.join(KINDS)} is needed"
        raise unsupported("rope_parameters", rope, why)
    prefix, whole = f"rope_parameters.{KINDS[1]}.", {"rope_type": "default"} | rope[KINDS[1]]
    dotted = {prefix + key: value for key, value in whole.items()}
    for key, value in dotted.items():
        if value is None:
            raise unsupported(key, None, "it needs a value, or no such key")
    return config | dotted | {"rope_parameters": rope[KINDS[0]]}


def global_heads(c: HFConfig, layers: tuple[int, ...]) -> dict:
    """Return size and number of the global layers' KV heads.

    The Hub's files have global_head_dim and num_global_key_value_heads; those that transformers
    5.23 writes have instead a per_layer_config of exactly the global layers, or an empty one: then
    all layers are alike.
    """
    c.setdefault("global_head_dim", 512)
    c.setdefault("num_global_key_value_heads", c["num_key_value_heads"])
    if OVERRIDES in c or c.is_null("per_layer_config"):
        entry = global_overrides(c, layers) if c.get(OVERRIDES, {}) != {} else {}
        c["global_head_dim"] = entry.get("head_dim", c["head_dim"])
        c["num_global_key_value_heads"] = entry.get("num_key_value_heads", c["num_key_value_heads"])
    if c.integer("global_head_dim") % c["head_dim"]:
        c.refuse("global_head_dim", f"a multiple of head_dim = {c['head_dim']} is needed")
    if c["num_attention_heads"] % c.integer("num_global_key_value_heads"):
        why = f"it must divide num_attention_heads = {c['num_attention_heads']}"
        c.refuse("num_global_key_value_heads", why)
    heads = c["num_global_key_value_heads"]
    return {"global_head_dim": c["global_head_dim"], "global_kv_head": heads}


def global_overrides(c: HFConfig, layers: tuple[int, ...]) -> dict:
    """Return what a per_layer_config has for each of the global layers, which is the same."""
    given = c[OVERRIDES]
    try:
        entries = list(given.values())
        entry = dict(entries[0])
        alike = all(other == entry for other in entries)
        complete = {int(layer) for layer in given} == set(layers)
    except (AttributeError, TypeError, ValueError, IndexError):
        alike = complete = False
    if not alike or not complete or entry.keys() - {"head_dim", "num_key_value_heads"}:
        c.refuse(OVERRIDES, "one head_dim for all global layers, and no other, is")
    return entry


def global_rope(c: HFConfig) -> dict:
    """Return the global layers' RoPE."""
    factor = c.number("global_rotary_factor")
    rotated = 2 * int(factor * c["global_head_dim"] // 2)
    if not 0 < rotated <= c["global_head_dim"]:
        c.refuse("global_rotary_factor", "a part of a head is needed")
    return {"global_rope_theta": c.number("global_rope_theta"), "global_rotary_dim": rotated}


class Gemma4Text(Family):
    """The text model alone, as transformers saves Gemma4ForCausalLM."""

    name = "gemma4_text"
    args_class = Gemma4Args
    model_class = Gemma4Transformer
    defaults = dict(
        vocab_size=262144,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        sliding_window=512,
        final_logit_softcapping=None,
        hidden_size_per_layer_input=256,
        attention_k_eq_v=False,
        num_kv_shared_layers=0,
        enable_moe_block=False,
        use_double_wide_mlp=False,
        use_bidirectional_attention=None,
        num_experts=None,
        top_k_experts=None,
        moe_intermediate_size=None,
    )
    renamed_keys = {
        "top_k_experts": "num_experts_per_tok",
        "per_layer_config": OVERRIDES,
        f"rope_parameters.{KINDS[1]}.rope_theta": "global_rope_theta",
        f"rope_parameters.{KINDS[1]}.partial_rotary_factor": "global_rotary_factor",
    }
    field_of_key = {
        "final_logit_softcapping": "logit_softcap",
        "intermediate_size": "shared_intermediate",
    }
    only = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        f"rope_parameters.{KINDS[1]}.rope_type": "proportional",
        f"rope_parameters.{KINDS[1]}.factor": 1,
    }
    # Dense and smaller models of the family have other values, which are transformers' defaults.
    needed = {
        "enable_moe_block": True,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    }
    fixed = {"qk_norm": "head", "norm_topk": True}
    renamed_tensors = ((".router.proj.", ".mlp.gate."), (".experts.", ".mlp.experts."))

    gguf = "gemma4"
    gguf_keys = {
        "sliding_window": "attention.sliding_window",
        "final_logit_softcapping": "final_logit_softcapping",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "num_kv_shared_layers": "attention.shared_kv_layers",
    }
    gguf_tensors = SANDWICH_NORMS | {
        "layer_scalar": made_of("layer_output_scale.weight"),
        "router.scale": made_of("ffn_gate_inp.scale"),
        "router.per_expert_scale": made_of("ffn_down_exps.scale"),
    }

    def gguf_config(self, values: Values) -> dict:
        """Return config.json of the text model; of layers' kinds the file has one value each."""
        config = super().gguf_config(values) | dense_config(values)
        windowed = values.get("attention.sliding_window_pattern", [])
        heads = config.pop("num_key_value_heads", None)
        heads = heads if isinstance(heads, list) else [heads] * len(windowed)
        if not len(windowed) == len(heads) == values.layers:
            raise ValueError("its layers' kinds and heads are not one for each; fetch it again")
        by_kind = dict(zip(map(bool, windowed), heads, strict=True))
        size, theta = config.pop("head_dim", None), config.pop("rope_theta", None)
        unrotated = (values.numbers("rope_freqs.weight") > 1e20).float().mean().item()
        whole = ROPE[KINDS[1]] | {"partial_rotary_factor": 1 - unrotated, "rope_theta": theta}
        window = ROPE[KINDS[0]] | {"rope_theta": values.get("rope.freq_base_swa")}
        return config | {
            "layer_types": [KINDS[not kind] for kind in windowed],
            "head_dim": values.get("attention.key_length_swa"),
            "global_head_dim": size,
            "num_key_value_heads": by_kind.get(True),
            "num_global_key_value_heads": by_kind.get(False),
            "attention_k_eq_v": all(
                kind or not values.has("attn_v.weight", n) for n, kind in enumerate(windowed)
            ),
            "enable_moe_block": values.has("ffn_gate_inp.weight"),
            "rope_parameters": {KINDS[0]: window, KINDS[1]: whole},
        }

    def text_config(self, config: dict) -> dict:
        return flat_rope(super().text_config(config))

    def arg_fields(self, c: HFConfig) -> dict:
        for key, value in self.needed.items():
            if c[key] != value or isinstance(c[key], bool) != isinstance(value, bool):
                c.refuse(key, f"only {value!r} is")
        if c["use_bidirectional_attention"] not in (None, "vision"):  # text is causal with "vision"
            c.refuse("use_bidirectional_attention", "only null and 'vision' are")
        c.integer("intermediate_size")  # a dense FFN is beside the experts of every layer
        c.setdefault("rope_theta", 1e4)
        c.setdefault("global_rope_theta", 1e4)
        c.setdefault("global_rotary_factor", 1.0)
        fields = super().arg_fields(c)
        return fields | global_heads(c, fields["full_layers"]) | global_rope(c)

    def window_fields(self, c: HFConfig) -> dict:
        """The last layer is global whatever the file says, as in transformers."""
        full = full_layers(c, KINDS, lambda layer: (layer + 1) % 6 == 0)
        full = tuple(sorted({*full, c.integer("num_hidden_layers") - 1}))
        return {"sliding_window": c.integer("sliding_window"), "full_layers": full}

    def attention_memory(self, args: Gemma4Args, length: int) -> tuple[int, int]:
        full = len(args.full_layers)
        window = 2 * args.n_kv_head * args.head_dim
        whole = 2 * args.global_kv_head * args.global_head_dim
        return max(window if full < args.n_layer else 0, whole if full else 0), 0

    # Conversion ---------------------------------------------------------------------------------

    def mixer_recipes(self, args: Gemma4Args, layer: int) -> Recipes:
        is_global = layer in args.full_layers
        return (self.global_attention_recipes if is_global else self.attention_recipes)(args)

    def global_attention_recipes(self, args: Gemma4Args) -> Recipes:
        C, K = args.global_head_dim, args.global_kv_head
        table = attention_recipes(replace(args, head_dim=C, n_kv_head=K))
        shape, sources, *_ = table.pop("attention.wqkv.weight")
        del sources["self_attn.v_proj.weight"]
        return table | {"attention.wqk.weight": Recipe((shape[0] - K * C, shape[1]), sources)}

    def norm_recipes(self, args: Gemma4Args) -> Recipes:
        names = {
            "attention_norm.weight": "input_layernorm",
            "add_attention.norm.weight": "post_attention_layernorm",
            "ffn.shared_scale": "pre_feedforward_layernorm",
            "ffn.experts_scale": "pre_feedforward_layernorm_2",
            "add_ffn.branch_norms.0.weight": "post_feedforward_layernorm_1",
            "add_ffn.branch_norms.1.weight": "post_feedforward_layernorm_2",
            "add_ffn.norm.weight": "post_feedforward_layernorm",
        }
        table = {ours: copy_of(f"{theirs}.weight", args.dim) for ours, theirs in names.items()}
        return table | {"add_ffn.scalar": copy_of("layer_scalar", 1)}

    def expert_recipes(self, args: Gemma4Args, layout: PublishedLayout) -> Recipes:
        D, E = args.dim, args.n_expert
        router: dict[str, tuple] = {
            "mlp.gate.weight": (slice(0, E),),
            "router.scale": (E,),
        }
        return {
            **expert_recipes(args, layout.fused),
            **dense_recipes("ffn.shared", "mlp", D, args.shared_intermediate),
            "ffn.router.weight": Recipe((E + 1, D), router, partial(scaled_router, factor=D**-0.5)),
            "ffn.expert_weight_scale": copy_of("router.per_expert_scale", E),
        }

    # Tensor parallelism ---------------------------------------------------------------------------

    kv_head_fields = "n_kv_head", "global_kv_head"

    def shard_table(self, args: Gemma4Args) -> dict[str, Shard]:
        C = args.global_head_dim
        wqk = Shard(0, ((args.n_head, C), (args.global_kv_head, C)))
        return super().shard_table(args) | {"attention.wqk": wqk}


def scaled_router(assembled: Tensor, factor: float) -> Tensor:
    """[E + 1, D], the router and the scale of its input -> the router of an unscaled input."""
    *rows, scale = assembled.float().split((len(assembled) - 1, 1))
    return (rows[0] * scale * factor).to(assembled.dtype)


class Gemma4(Gemma4Text):
    """The model with vision, of which the text part is run."""

    name = "gemma4"
    is_nested = True
    gguf = None  # such files have the text model alone
    fixed = Gemma4Text.fixed | {"family": Gemma4Text.name}  # the text part is that model
    renamed_tensors = (("model.language_model.", "model."), *Gemma4Text.renamed_tensors)
    left_out = (
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    )

    # As in text_config of google/gemma-4-26B-A4B-it on the Hugging Face Hub.
    shapes = {
        "gemma-4-26B-A4B": dict(
            hidden_size=2816,
            intermediate_size=2112,
            num_attention_heads=16,
            num_key_value_heads=8,
            max_position_embeddings=262144,
            sliding_window=1024,
            final_logit_softcapping=30.0,
            hidden_size_per_layer_input=0,
            attention_k_eq_v=True,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
            num_global_key_value_heads=2,
        ),
    }
