"""What a family's classes add to model.py's, as the fused kernels compute it.

A class of models/ or tp.py that changes `model.Attention`, `MoE`, `FeedForward`, `AddNorm`,
`Experts` or `RMSNorm` returns one of these from `fused_decode_settings`; None: no kernel computes
it. An unknown field raises TypeError, and an unknown activation ValueError.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


def check_known(what: str, name: str, known: tuple[str, ...]) -> None:
    """Raise ValueError for a name that is not known."""
    if name not in known:
        raise ValueError(f"no kernel for the {what} {name!r}: known are {', '.join(known)}")


ACTIVATIONS = "silu", "clamped", "gelu_tanh", "relu_squared"
OUTPUT_GATES = "sigmoid", "softplus"


@dataclass(frozen=True)
class Activation:
    """What experts compute of gate and up: "silu" is `model.swiglu`, "clamped" gpt-oss's.

    "gelu_tanh" is `geglu` (models/layers/geglu.py).
    "relu_squared" has no gate: it is computed of up alone.
    """

    kind: str = "silu"
    limit: float = 0.0  # of "clamped"
    alpha: float = 1.0

    def __post_init__(self):
        check_known("activation", self.kind, ACTIVATIONS)

    gated = property(lambda s: s.kind != "relu_squared")


SWIGLU, RELU_SQUARED = Activation(), Activation("relu_squared")
GEGLU = Activation("gelu_tanh")


@dataclass(frozen=True)
class Routing:
    """How router scores become chosen experts and their weights."""

    active: int  # A, without shared experts
    norm_topk: bool  # scale the A weights to sum to one
    scale: float = 1.0  # factor of the A weights, after that
    score_bias: Tensor | None = None  # fp32 [E]: sigmoid scores; the choice is by score + bias
    softmax: bool = False  # scores with a bias are those of softmax instead
    bias_before: bool = False  # the bias is added to scores before the sigmoid, for the choice
    factors: Tensor | None = None  # [E], without a score_bias: of chosen experts' weights
    shared: int = 0  # S, experts that every token uses
    gated: bool = False  # their weight is the sigmoid of the router's last row; else it is 1

    pairs = property(lambda s: s.active + s.shared)  # experts of a token, A + S
    # What a second row of scores is made of, [E]: the choice, or the weights, need both rows.
    of_experts = property(lambda s: s.score_bias if s.factors is None else s.factors)


@dataclass(frozen=True)
class OutputGate:
    """A gate of attention's output (`gate_heads`): `wqkv` makes it after q, k and v."""

    activation: str  # "sigmoid" or "softplus"
    per_head: bool = False  # one number a head, else one for each number of the output

    def __post_init__(self):
        check_known("gate", self.activation, OUTPUT_GATES)


@dataclass(frozen=True)
class AttentionAdditions:
    """Additions to `model.Attention`."""

    sinks: Tensor | None = None  # [H]: one more score per head, whose value is zero
    query_scale: float = 1.0  # factor of the queries, beside C ** -0.5
    norm_values: bool = False  # values are normed, without a weight
    keys_are_values: bool = False  # values are the keys before norm and RoPE
    rope_begin: int = 0  # the layer's first column of `Context.rope`
    gate: OutputGate | None = None  # the output is multiplied by an activation of this gate


@dataclass(frozen=True)
class LatentAdditions:
    """Latent attention in place of `model.Attention` (models/layers/latent_attention.py)."""

    latent: tuple[int, int, int, int]  # H, N, R, r: heads, unrotated, rotated, latent dims
    scale: float  # of scores


@dataclass(frozen=True)
class ExpertAdditions:
    """Additions to `model.MoE`."""

    routing: Routing | None = None  # None: model.MoE's
    activation: Activation | None = None  # None: SwiGLU, which `Experts.activation` must be
    shared: nn.Module | None = None  # a FeedForward that every token uses
    shared_gate: nn.Module | None = None  # a Linear [1, D], whose sigmoid weighs `shared`
    latent: tuple[nn.Module, nn.Module] | None = None  # Linears before and after the experts
    # [D]: the experts' x is the norm times this. The norm has no weight, and the router reads it.
    input_scale: Tensor | None = None
    beside: nn.Module | None = None  # a FeedForward, the first branch of `SumAdditions`
    beside_scale: Tensor | None = None  # as input_scale, of the x of `beside`


@dataclass(frozen=True)
class FeedForwardAdditions:
    """What a dense FFN has in place of that of `model.FeedForward`."""

    activation: Activation = SWIGLU


@dataclass(frozen=True)
class BlockAdditions:
    """What a subclass of `model.Block` has."""

    has_ffn: bool = True  # False: it is attention alone, normed, plus its residual


@dataclass(frozen=True)
class SumAdditions:
    """Additions to `model.AddNorm`."""

    scale: float = 1.0  # factor of the sublayer's result
    norm: nn.Module | None = None  # an RMSNorm of the result, before it is added
    scalar: Tensor | None = None  # [1]: factor of the sum, with `norm`
    branch_norms: tuple[nn.Module, ...] = ()  # RMSNorms of results, whose sum has `norm`
    all_reduce: Any = None  # sums the result over ranks: see `runtime.fused_sum.ResidualSum`


@dataclass(frozen=True)
class NoAdditions:
    """A subclass that the kernels compute as its base class."""
