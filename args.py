"""Shape and variant of a model: what `config.json` of a converted checkpoint holds under "args"."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Yarn:
    """Rotary angles of a model made for `original` positions, for `factor` times as many (Peng et al. 2023)."""

    factor: float
    original: int
    beta_fast: float = 32.0  # what turns more often than this over `original` positions keeps its frequency
    beta_slow: float = 1.0  # what turns less often gets 1 / factor of it; between the two it is blended
    truncate: bool = True  # the first and the last that are blended are rounded outwards to whole ones
    attention: float = 1.0  # cosines and sines are multiplied by this, and so scores by its square

    def __post_init__(self):
        for field in fields(self):
            value, kind = getattr(self, field.name), int | float if field.type is float else field.type
            if not isinstance(value, kind) or (kind is not bool and not 0 < value < float("inf")):
                raise ValueError(f"yarn.{field.name} cannot be {value!r}")


@dataclass(frozen=True)
class ModelArgs:
    """Shape and variant of a model: what `config.json` of a converted checkpoint holds under "args"."""

    dim: int  # D
    n_layer: int  # L
    n_head: int  # H
    n_kv_head: int  # K
    head_dim: int  # C
    intermediate: int  # I, of one expert
    n_expert: int  # E
    n_active: int  # A
    vocab_size: int  # V
    max_position: int  # longest sequence the model was made for
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    norm_topk: bool = True  # the A routing weights are scaled to sum to one
    qk_norm: str = "none"  # "none", "head" (over C, Qwen3-MoE) or "full" (over H*C, OLMoE)
    clip_qkv: float | None = None  # queries, keys and values are clamped to +- this
    attention_bias: bool = False  # of wqkv and wo
    qkv_bias: bool = False  # of wqkv alone (Qwen2-MoE)
    tied_embeddings: bool = False
    sliding_window: int | None = None  # a query sees this many positions, itself included
    dense_layers: tuple[int, ...] = ()  # layers with one dense FFN in place of experts
    dense_intermediate: int = 0  # its I
    shared_intermediate: int = 0  # I of the expert that every token uses; 0: none
    shared_gated: bool = True  # what it gives is weighted by a gate of its own (Qwen2-MoE)
    scoring: str = "softmax"  # of the router: or "sigmoid", of which a learned bias corrects the choice (GLM-4.5)
    routed_scale: float = 1.0  # by which routing weights are multiplied
    rotary_dim: int | None = None  # the first so many of a head's C numbers turn with the position (GLM-4.5); None: all
    attention_scale: float | None = None  # of queries times keys (Granite); None: C ** -0.5
    embedding_scale: float = 1.0  # this and the next two: Granite
    residual_scale: float = 1.0  # of what attention and experts add
    logit_scale: float = 1.0
    layer_norm: bool = False  # LayerNorm, with biases, in place of RMSNorm; this and the next four: Phi-3.5-MoE
    head_bias: bool = False
    mixer_eps: float | None = None  # routing weights by SparseMixer
    rope_factors: tuple[float, ...] = ()  # by which rope's wavelengths are longer, C / 2 of them
    rope_scale: float = 1.0  # of its cosines and sines
    full_layers: tuple[int, ...] = ()  # layers without the sliding window; this and the rest: gpt-oss
    attention_sinks: bool = False  # a logit for each head beside those of the positions, whose value is zero
    router_bias: bool = False
    expert_bias: bool = False  # of w13 and w2
    swiglu_limit: float | None = None  # the experts' gate and up are clamped to this, as gpt-oss has it; None: plain
    swiglu_alpha: float = 1.702  # the slope of that SwiGLU
    yarn: Yarn | None = None
    n_group: int = 1  # experts stand in so many groups in order; this and the rest: DeepSeek
    n_active_group: int = 1  # of which a token's are in the best so many
    kv_rank: int | None = None  # r, of latent attention: what keys and values of all heads are made of; None: plain
    q_rank: int | None = None  # likewise of queries; None: they are made of x
    value_dim: int | None = None  # of a head's value, beside which C is of its query, whose last rotary_dim turn

    def __post_init__(self):
        tuples = "dense_layers", "full_layers", "rope_factors"
        for name in tuples:
            if isinstance(getattr(self, name), list):  # as JSON gives it
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.yarn, dict):
            object.__setattr__(self, "yarn", Yarn(**self.yarn))
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            kind = tuple if field.name in tuples else kind | int if kind in (float, float | None) else kind
            good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            number = isinstance(value, int | float) and kind is not bool and not field.name.endswith("_intermediate")
            if not good or (number and not 0 < value < float("inf")):
                raise ValueError(f"{field.name} cannot be {value!r}")
        for name, good in {
            "n_kv_head": self.n_head % self.n_kv_head == 0,
            "head_dim": self.head_dim % 2 == 0,
            "n_active": self.n_active <= self.n_expert,
            "qk_norm": self.qk_norm in ("none", "head", "full"),
            **{
                name: all(type(layer) is int and 0 <= layer < self.n_layer for layer in getattr(self, name))
                for name in ("dense_layers", "full_layers")
            },
            "dense_intermediate": self.dense_intermediate > 0 or not self.dense_layers,
            "shared_intermediate": self.shared_intermediate >= 0,
            "rope_factors": len(self.rope_factors) in (0, self.head_dim // 2)
            and all(type(factor) in (int, float) and 0 < factor < float("inf") for factor in self.rope_factors),
            "scoring": self.scoring in ("softmax", "sigmoid"),
            "rotary_dim": (turning := self.rotary_dim or 2) % 2 == 0
            and (self.head_dim > turning if self.kv_rank else self.head_dim % turning == 0),
            "n_group": self.n_expert % self.n_group == 0 and self.n_group in (1, *range(self.n_expert // 2 + 1)),
            "n_active_group": self.n_active_group <= self.n_group
            and self.n_active * self.n_group <= self.n_expert * self.n_active_group,
            "kv_rank": self.kv_rank is None
            or (
                all((self.rotary_dim, self.value_dim, self.n_kv_head == 1, self.qk_norm == "none", not self.clip_qkv))
                and not any((self.sliding_window, self.attention_sinks, self.attention_bias, self.qkv_bias))
            ),
            "value_dim": not self.value_dim or self.value_dim <= self.head_dim,
        }.items():
            if not good:
                raise ValueError(f"{name} cannot be {getattr(self, name)!r} with the other args")

    @property
    def kept(self) -> tuple[int, int, int]:
        """What a layer's cache has of a position: keys and values of K heads, [2, K, C], or [1, 1, r + rotary_dim]."""
        return (1, 1, self.kv_rank + self.rotary_dim) if self.kv_rank else (2, self.n_kv_head, self.head_dim)

    def window(self, layer: int) -> int | None:
        """How many positions a query of that layer sees, itself included; None: all."""
        return None if layer in self.full_layers else self.sliding_window
