"""A Mixture-of-Experts transformer for decoding: Mixtral, Qwen3-MoE, DeepSeek, gpt-oss are settings of this one model.

Shapes, here and in every comment of the project:

    B sequences      Q positions a sequence in this call      T tokens, B * Q      S cache length      V vocabulary
    D model dim      L layers     H query heads     K KV heads     C head dim
    E experts        A active experts a token       I intermediate dim of one expert

The idea that the rest serves: the router's choice never leaves the device. `expert_indices` [T, A] index the stacked
weights [E, out, in], and torch.compile turns "gather, multiply, sum" into one kernel that reads the chosen rows once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

import kernels


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


class Linear(nn.Module):
    """x [..., in] -> [..., out] with weight [out, in]. A number format supplies a module with the same signature."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)  # a product and a bias in one would be the library's, also where it is compiled
        return y if self.bias is None else y + self.bias


class ExpertLinear(nn.Module):
    """E linear maps stacked in weight [E, out, in], and three products. A number format supplies the same three.

    The first two are gather-fused: they read the chosen experts' rows once, and copy none of them. They add the bias
    [E, out] of a model that has one; `grouped` leaves it to its caller, who knows the experts of the rows.
    """

    def __init__(self, n_expert: int, in_features: int, out_features: int, bias: bool = False,
                 clamp: tuple[float, float] | None = None):  # fmt: skip
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert, out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(n_expert, out_features), requires_grad=False) if bias else None
        self.clamp = clamp  # of `swiglu`

    def gated(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        """x [T, in], expert_indices [T, A] -> SwiGLU of the product, [T, A, out / 2].

        Gate and up are two sums over the same shape: they compile to one kernel with SwiGLU at its end. Stacked in one
        sum they would leave SwiGLU to the next kernel, where every row computes it again.
        """
        x = x.unsqueeze(1).expand(*expert_indices.shape, -1)
        halves = (torch.einsum("tai,taoi->tao", x, w) for w in self.weight[expert_indices].chunk(2, dim=2))
        return activate(self, *halves, expert_indices)

    def weighted(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor) -> Tensor:
        """x [T, A, in], expert_indices, expert_weights [T, A] -> [T, out], summed over the experts of each token."""
        x = realise(x)  # or every row would compute SwiGLU again
        y = torch.einsum("tai,taoi->tao", x, self.weight[expert_indices])
        return weighted_sum(biased(y, self.bias, expert_indices), expert_weights).to(x.dtype)

    def grouped(self, x: Tensor, group_ends: Tensor) -> Tensor:
        """x [N, in], rows sorted by expert; rows of expert e end before group_ends[e] (int32 [E]) -> [N, out]."""
        return grouped_mm(x, self.weight, group_ends)


FEW_ROWS = 64  # an expert, on average


def operator(name: str) -> Callable:
    """`torch.library.custom_op` where code is compiled or shapes alone are computed; elsewhere the function itself.

    Calling an operator of ours loads the compiler, which takes longer than an eager answer of a small model.
    """

    def decorate(function: Callable) -> Callable:
        compiled = torch.library.custom_op(name, function, mutates_args=())

        @wraps(function)
        def call(x: Tensor, *rest):
            return (compiled if torch.compiler.is_compiling() or x.is_meta else function)(x, *rest)

        call.register_fake = compiled.register_fake
        return call

    return decorate


@operator("moe_fast::grouped_mm")
def grouped_mm(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    """x [N, in], weight [E, out, in], group_ends int32 [E] -> [N, out]; `in` and `out` multiples of 16 bytes.

    An operator of ours around the library's, because Inductor compiles the latter on CPU in bf16 only. Its tiles are
    for many rows: with few, on a GPU, it reads weights at half of the memory's speed (and waits for the host, but for
    bf16).
    """
    if x.is_cuda and len(x) <= FEW_ROWS * len(weight):
        return kernels.grouped(x, group_ends, {"codes": weight}, "plain", 8 * x.element_size(), 1)
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=group_ends)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019, equation 4)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def norm(args: ModelArgs) -> nn.Module:
    """Of [..., D]."""
    return (nn.LayerNorm if args.layer_norm else RMSNorm)(args.dim, args.norm_eps)


def realise(x: Tensor) -> Tensor:
    """x itself, but kept in memory by the compiler, which would rather compute it again in every row that reads it.

    Inductor has no word for this; a view with given strides can only be of something that is there. x must be a whole
    tensor, or a view that begins where it begins: a slice from the middle would be read from the start.
    """
    return x.as_strided(x.shape, x.stride())


def swiglu(gate: Tensor, up: Tensor, clamp: tuple[float, float] | None = None) -> Tensor:
    """gate, up [..., I] -> [..., I] (Shazeer 2020, section 2). clamp: gpt-oss's form, its limit and its slope."""
    if clamp is None:
        return F.silu(gate) * up
    limit, alpha = clamp
    gate = gate.clamp(max=limit)
    return gate * (alpha * gate).sigmoid() * (up.clamp(-limit, limit) + 1)


def biased(y: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    """y [..., out], of those experts [...], with their bias [E, out]; any where the index is E, as y is then."""
    return y if bias is None else y + bias[experts.clamp(max=len(bias) - 1)]


def activate(w13: nn.Module, gate: Tensor, up: Tensor, experts: Tensor) -> Tensor:
    """gate, up [..., I] of those experts [...] -> SwiGLU, with the bias and the limit that w13 may have."""
    halves = (None, None) if w13.bias is None else w13.bias.chunk(2, dim=-1)
    return swiglu(*(biased(y, half, experts) for y, half in zip((gate, up), halves, strict=True)), w13.clamp)


def weighted_sum(y: Tensor, expert_weights: Tensor) -> Tensor:
    """y [T, A, out], expert_weights fp32 [T, A] -> fp32 [T, out].

    Written out over A, it becomes part of the kernel that reads it. (One sum over A and the product's own axis compiles
    to one kernel as well, but to fewer and longer rows: 61 instead of 56 us a layer for Mixtral in bf16 on an H200.)
    """
    return sum((y * expert_weights.unsqueeze(-1)).unbind(1))


def top_k(scores: Tensor, k: int) -> tuple[list[Tensor], Tensor]:
    """scores fp32 [T, E] -> the k largest, falling, each [T, 1], and their indices [T, k], the first one on a tie.

    k rounds of one maximum each instead of `torch.topk`, which is two library kernels (8 us a layer on an H200): these
    compile to one kernel, together with what is made of the values. A score's bits and its index stand in one whole
    number, whose order is that of the scores: bits of negative ones fall where the numbers rise, so they are flipped.
    """
    bits, experts = scores.contiguous().view(torch.int32), torch.arange(scores.shape[-1], device=scores.device)
    keys = _flip(bits).long() << 32 | (scores.shape[-1] - 1 - experts)
    values, indices = [], []
    for _ in range(k):
        key = keys.amax(dim=-1, keepdim=True)
        values.append(_flip((key >> 32).to(torch.int32)).view(torch.float32))
        indices.append(scores.shape[-1] - 1 - (key & 0xFFFFFFFF))
        keys = torch.where(keys == key, torch.iinfo(torch.int64).min, keys)
    return values, torch.cat(indices, dim=-1)


def _flip(bits: Tensor) -> Tensor:
    """The bits of fp32 numbers as int32 in the numbers' order, or back."""
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


FEW_TOKENS = 32  # of a batch's step; a compiled prompt is padded to more, so that it is one case


class Experts(nn.Module):
    """The E feed-forward experts: x [T, D], expert_indices [T, A], expert_weights [T, A] -> [T, D]."""

    gather_tokens = 1  # up to this many tokens the fused gather wins, above it each expert's rows are grouped

    def __init__(self, args: ModelArgs):
        super().__init__()
        clamp = (args.swiglu_limit, args.swiglu_alpha) if args.swiglu_limit else None
        self.w13 = ExpertLinear(args.n_expert, args.dim, 2 * args.intermediate, args.expert_bias, clamp)
        self.w2 = ExpertLinear(args.n_expert, args.intermediate, args.dim, args.expert_bias)
        self.n_expert = args.n_expert
        self.read_of = float(args.n_expert)  # a token reads A / read_of of the bytes that are stored here

    def forward(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor) -> Tensor:
        product = self.gather if x.shape[0] <= self.gather_tokens else self.group
        return product(x, expert_indices, expert_weights)

    def gather(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor) -> Tensor:
        """For few tokens: each token reads the weights of its own experts and no others."""
        return self.w2.weighted(self.w13.gated(x, expert_indices), expert_indices, expert_weights)

    def group(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor) -> Tensor:
        """For many tokens: sort (token, expert) pairs by expert, one grouped product, back in order, weighted sum.

        FlexFlow's GroupBy and Aggregate as tensor operations: no loop over experts, no host synchronisation, and
        memory O(T * A * I), for activations only.
        """
        return self.combine(self.each(x, expert_indices), expert_weights).to(x.dtype)

    def each(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        """What each of a token's experts makes of it, [T, A, D]; undefined where the index is n_expert."""
        tokens, active = expert_indices.shape
        chosen, pairs = expert_indices.flatten(), torch.arange(tokens * active, device=x.device)
        if tokens <= FEW_TOKENS:  # counted in a kernel or two, where a sort is several of the library's
            earlier = (chosen < chosen[:, None]) | ((chosen == chosen[:, None]) & (pairs < pairs[:, None]))
            place = earlier.sum(1)
            order = torch.empty_like(place).scatter_(0, place, pairs)
            experts = torch.arange(self.n_expert, device=x.device)
            group_ends = (chosen <= experts[:, None]).sum(1, dtype=torch.int32)
        else:
            small = torch.uint8 if self.n_expert < 256 else torch.int16  # the sort makes one pass for each byte
            sorted_experts, order = chosen.to(small).sort(stable=True)
            place = torch.empty_like(order).scatter_(0, order, pairs)
            experts = torch.arange(self.n_expert, dtype=small, device=x.device)
            group_ends = torch.searchsorted(sorted_experts, experts, right=True, out_int32=True)
        halves = self.w13.grouped(x[order // active], group_ends).chunk(2, dim=-1)
        y = self.w2.grouped(activate(self.w13, *halves, chosen[order]), group_ends)[place]
        return biased(y, self.w2.bias, chosen).view(tokens, active, -1)

    def combine(self, y: Tensor, expert_weights: Tensor) -> Tensor:
        """y [T, A, D], expert_weights [T, A] -> fp32 [T, D]."""
        return (y * expert_weights.unsqueeze(-1)).sum(1)


class MoE(nn.Module):
    """A layer of experts with its router. x [T, D] -> y [T, D], expert_indices [T, A], expert_weights [T, A] fp32."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.router = Linear(args.dim, args.n_expert, bias=args.router_bias)
        self.experts = Experts(args)
        self.shared = FeedForward(args.dim, args.shared_intermediate) if args.shared_intermediate else None
        self.shared_gate = Linear(args.dim, 1) if args.shared_intermediate and args.shared_gated else None
        sigmoid = args.scoring == "sigmoid"
        self.score_bias = nn.Parameter(torch.empty(args.n_expert), requires_grad=False) if sigmoid else None  # fp32
        self.reduce = nn.Identity()  # tensor parallelism sums over ranks here
        self.n_active, self.norm_topk, self.routed_scale = args.n_active, args.norm_topk, args.routed_scale
        self.mixer_eps, self.groups = args.mixer_eps, (args.n_group, args.n_active_group)

    def score(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> fp32 [T, E] of which the largest are chosen, and the scores that routing weights are made of."""
        scores = self.router(x).float()
        if self.score_bias is None:
            return self.limit(scores), scores
        scores = scores.sigmoid()
        return self.limit(scores + self.score_bias), scores

    def limit(self, choice: Tensor) -> Tensor:
        """choice [T, E] -> the same with -inf in all but the best groups, if there are groups.

        A group is as good as its best expert, or as its best two together where a bias corrects the choice.
        """
        count, active = self.groups
        if active == count:
            return choice
        members = choice.unflatten(-1, (count, -1))  # [T, groups, E / groups]
        best, _ = top_k(members, 1 if self.score_bias is None else 2)
        _, groups = top_k(sum(best).squeeze(-1), active)
        kept = (groups.unsqueeze(-1) == torch.arange(count, device=choice.device)).any(1)
        return torch.where(kept.unsqueeze(-1), members, float("-inf")).flatten(1)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        choice, scores = self.score(x)
        best, expert_indices = top_k(choice, self.n_active)
        if self.score_bias is not None:
            parts = scores.gather(-1, expert_indices)
            total = parts.sum(dim=-1, keepdim=True) if self.norm_topk else 1.0
            return expert_indices, parts * (self.routed_scale / total)
        if self.mixer_eps is not None:
            return expert_indices, self.mix(scores, best, expert_indices)
        parts = [(score - best[0]).exp() for score in best]
        # A softmax over the chosen experts, or over all of them.
        total = sum(parts) if self.norm_topk else (scores - best[0]).exp().sum(dim=-1, keepdim=True)
        return expert_indices, torch.cat([part / total for part in parts], dim=-1) * self.routed_scale

    def mix(self, scores: Tensor, best: list[Tensor], expert_indices: Tensor) -> Tensor:
        """SparseMixer's weights (Liu et al. 2024): each of a softmax over what is left and nearly as good, [T, A]."""
        parts, left, experts = [], scores, torch.arange(scores.shape[-1], device=scores.device)
        for score, index in zip(best, expert_indices.split(1, dim=-1), strict=True):
            near = (score - left) / scores.abs().maximum(score) <= 2 * self.mixer_eps
            parts.append(1 / torch.where(near, (left - score).exp(), 0.0).sum(dim=-1, keepdim=True))
            left = torch.where(experts == index, float("-inf"), left)
        return torch.cat(parts, dim=-1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        expert_indices, expert_weights = self.route(x)
        return self.finish(x, self.experts(x, expert_indices, expert_weights)), expert_indices, expert_weights

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """x, the experts' result y [T, D] -> with the shared expert's, where there is one, summed over ranks."""
        if self.shared is not None:
            shared = self.shared(x)[0]
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        return self.reduce(y)


class FeedForward(nn.Module):
    """One dense SwiGLU: a dense layer's, or a shared expert. Same signature as MoE, with no routing to report."""

    def __init__(self, dim: int, intermediate: int):
        super().__init__()
        self.w13 = Linear(dim, 2 * intermediate)
        self.w2 = Linear(intermediate, dim)
        self.reduce = nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, None, None]:
        return self.reduce(self.w2(swiglu(*self.w13(x).chunk(2, dim=-1)))), None, None


def join_parts(y: Tensor, sums: Tensor, q: Tensor) -> Tensor:
    """What `kernels.attend_latent` found in parts of the positions -> [B, Q, H, r]."""
    (B, Q, H, _), (largest, total) = q.shape, sums.unbind(-1)  # [B, parts, rows]
    share = (largest - largest.amax(1, keepdim=True)).exp()
    y = (y * share.unsqueeze(-1)).sum(1) / (total * share).sum(1).unsqueeze(-1)
    return y.narrow(1, 0, Q * H).reshape(B, Q, H, -1).to(q.dtype)


class KVCache(nn.Module):
    """Keys, then values, [2, B, K, S, C] of one layer, written in place at each sequence's own positions.

    Of latent attention [1, B, 1, S, C], and the 2 of what is given and handed back is 1 too.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, parts: int = 2):
        super().__init__()
        self.register_buffer("kv", torch.zeros(parts, *shape, dtype=dtype, device=device), persistent=False)

    def update(self, positions: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, Q], keys, then values [B, Q, 2, K, C] -> all keys, all values [B, K, S, C]."""
        sequence = torch.arange(positions.shape[0], device=positions.device).unsqueeze(1)
        self.kv[:, sequence, :, positions] = kv
        return self.kv.unbind()

    def extend(self, chunk: "Chunk", kv: Tensor) -> tuple[Tensor, Tensor]:
        """kv of a chunk [1, Q, 2, K, C] -> its sequence's keys and values up to the chunk's end [K, end, C]."""
        positions = torch.arange(chunk.end - kv.shape[1], chunk.end, device=kv.device)
        self.kv[:, chunk.row, :, positions] = kv[0]
        live = self.kv[:, :, :, : chunk.end]
        return (live if self.kv.shape[1] == 1 else live.index_select(1, chunk.row)).squeeze(1).unbind()

    def reads_blocks(self, queries: int) -> bool:
        """Whether attention of so many queries of a KV head can read some blocks of positions, and not the others."""
        return True

    def attend_blocks(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, blocks: tuple[Tensor, Tensor],
                      window: int | None, sinks: Tensor | None) -> Tensor:  # fmt: skip
        """`attend_blocks` of all that `update` gave; a cache that stores something else reads that."""
        return attend_blocks(q, k, v, positions, blocks, window, sinks)

    def attend_latent(self, q: Tensor, positions: Tensor, rank: int) -> Tensor:
        """q [B, Q, H, C] over what latent attention keeps -> [B, Q, H, rank]; only the blocks in use are read."""
        return join_parts(*kernels.attend_latent(q, self.kv, None, positions, rank), q)

    def clear(self) -> None:
        """Forget everything: what is masked counts zero times its value, which has to be a number."""
        self.kv.zero_()


class Chunk(NamedTuple):
    """A stretch of one sequence, by which a prompt is computed: where it ends is known, so that it needs no mask."""

    row: Tensor  # of the cache, int64 [1]; no int, for which the compiler would make a case each of 0 and 1
    end: int  # the position after its last token; the others stand before that


class View(NamedTuple):
    """What queries see of a cache."""

    bias: Tensor  # [B, Q, S], 0 where a query may look and -inf elsewhere
    blocks: tuple[Tensor, Tensor] | None = None  # of BLOCK positions that hold what a sequence's queries may look at:
    # how many, int32 [B, 1, 1], and which come first, int32 [B, 1, 1, S / BLOCK]


class Context(NamedTuple):
    """What every block of one call shares. A chunk has no positions and views."""

    rope: Tensor  # [B, Q, 1, 2C], for each number of a head its cosine, then its signed sine, fp32
    chunk: Chunk | None = None
    positions: Tensor | None = None  # [B, Q]
    views: dict[int | None, View] | None = None  # by the layer's window


def rope_table(args: ModelArgs, length: int, device: torch.device) -> Tensor:
    """`Context.rope` of positions below `length`, fp32 [length, 2 C]. What of a head does not turn has cosine 1.

    Of latent attention [length, 2 rotary_dim], since what does not turn is apart there.
    """
    turning, yarn, scale = args.rotary_dim or args.head_dim, args.yarn, args.rope_scale
    frequencies = args.rope_theta ** -(torch.arange(0, turning, 2, device=device).float() / turning)
    if args.rope_factors:
        frequencies = frequencies / torch.tensor(args.rope_factors, device=device)
    if yarn:
        # Which pair turns so many times over the original positions. The blend is linear in pairs.
        first, last = (
            turning * math.log(yarn.original / (2 * math.pi * turns)) / (2 * math.log(args.rope_theta))
            for turns in (yarn.beta_fast, yarn.beta_slow)
        )
        if yarn.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, turning - 1)
        slow = ((torch.arange(turning // 2, device=device) - first) / (last - first or 1e-3)).clamp(0, 1)
        frequencies, scale = frequencies * (1 - slow + slow / yarn.factor), scale * yarn.attention
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    still = cos.new_zeros(length, 0 if args.kv_rank else args.head_dim - turning)
    return torch.cat((cos, cos, still + 1, -sin, sin, still), dim=-1)


def rotate(x: Tensor, rope: Tensor, turning: int) -> Tensor:
    """Rotary embedding (Su et al. 2021, equation 34) of x [B, Q, heads, C], paired half with half, in fp32.

    Of its first numbers, as many as are `turning`; others are multiplied by 1, and have a sine of 0.

    Said without joining two halves: the compiler makes room in memory for what is joined, but computes this where it is
    read.
    """
    cos, sin = rope.chunk(2, dim=-1)
    x = x.float()
    return x * cos + x.unflatten(-1, (-1, turning)).roll(turning // 2, dims=-1).flatten(-2) * sin


BLOCK = 128  # positions of a cache that are read together
SHORT_CACHE = 1024  # up to this length it is faster to read a cache whole than to ask which blocks are in use


def with_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [..., Q, C], k and v [..., S, C], sinks [..., 1, 1], q's but for the last two axes -> with a sink as a key.

    That key stands before all others, and its value is zero. Its score is the head's sink: heads are longer by one
    number, which is the sink in queries and sqrt(C) in this key, zero in the others. (By eight, for kernels that want
    rows of whole 16 bytes.) So the library's attention, which knows no sinks, needs no mask for them. The caller gives
    it the scale of C.
    """
    C = q.shape[-1]
    q = torch.cat((q, F.pad(sinks.to(q.dtype), (0, 7)).expand(*q.shape[:-1], 8)), dim=-1)
    k, v = (F.pad(t, (0, 8, 1, 0)) for t in (k, v))
    k[..., 0, C] = C**0.5
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None = None) -> Tensor:
    """q [B, Q, H, C], k [B, K, S, C], v [B, K, S, any], bias [B, Q, S], sinks [H] -> [B, Q, H * any].

    Query heads are a [K, H / K] grid over the KV heads, so keys and values broadcast and are never repeated in memory.
    """
    (B, Q, H, C), K = q.shape, k.shape[1]
    if Q == 1:  # one query: products and softmax that Inductor fuses
        q = q.view(B, K, H // K, 1, C).float() * C**-0.5
        scores = (q * k.unsqueeze(2)).sum(-1) + bias.unsqueeze(1)  # [B, K, H / K, S]
        if sinks is None:
            weights = scores.softmax(dim=-1)
        else:
            sinks = sinks.float().view(K, H // K, 1)
            largest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
            parts = (scores - largest).exp()
            weights = parts / (parts.sum(-1, keepdim=True) + (sinks - largest).exp())
        return (weights.unsqueeze(-1) * v.unsqueeze(2).float()).sum(-2).to(v.dtype).view(B, 1, -1)
    # B and K are folded into one axis: H / K is then a head axis along which keys and values have stride zero.
    q = q.view(B, Q, K, H // K, C).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k, v = (t.flatten(0, 1).unsqueeze(1) for t in (k, v))
    if sinks is not None:
        q, k, v = with_sink(q, k, v, sinks.view(K, H // K, 1, 1).repeat(B, 1, 1, 1))
        bias = F.pad(bias, (1, 0))
    k, v = (t.expand(-1, H // K, -1, -1) for t in (k, v))
    bias = bias.unsqueeze(1).expand(-1, K, -1, -1).flatten(0, 1).unsqueeze(1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=C**-0.5)[..., :C]  # [B * K, H / K, Q, C]
    return y.unflatten(0, (B, K)).permute(0, 3, 1, 2, 4).reshape(B, Q, -1)


def blocks_in_use(positions: Tensor, length: int, window: int | None) -> tuple[Tensor, Tensor]:
    """`View.blocks` for queries at rising positions [B, Q] of a cache of that length."""
    first = (positions[:, :1] - (window or length) + 1).clamp(min=0) // BLOCK  # [B, 1]
    order = (first + torch.arange(length // BLOCK, device=positions.device)).clamp(max=length // BLOCK - 1)
    count = positions[:, -1:] // BLOCK + 1 - first
    return count.to(torch.int32).unsqueeze(-1), order.to(torch.int32)[:, None, None]


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, blocks: tuple[Tensor, Tensor],
                  window: int | None, sinks: Tensor | None) -> Tensor:  # fmt: skip
    """`attend` for few queries and a long cache, of which it reads only the blocks in use; to be compiled."""

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = positions[b, query] - key
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)

    mask = BlockMask.from_kv_blocks(
        *blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible, seq_lengths=(q.shape[1], k.shape[2])
    )
    options = {"block_mask": mask, "enable_gqa": True}
    if sinks is None:
        y = flex_attention(q.transpose(1, 2), k, v, **options)
    else:  # what a sink would have had of the sum takes its part from all others alike
        y, sums = flex_attention(q.transpose(1, 2), k, v, **options, return_aux=AuxRequest(lse=True))
        y = (y * (sums.lse - sinks.float().unsqueeze(-1)).sigmoid().unsqueeze(-1)).to(q.dtype)
    return y.transpose(1, 2).flatten(2)


@operator("moe_fast::attend_chunk")
def attend_chunk(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    """q [Q, H, C], of the last Q positions of k and v [K, S, C] -> [Q, H * C]; each query sees up to its own position.

    An operator of ours around the library's, which takes the masks of both kinds only where nothing is compiled.
    """
    (Q, _, C), S, mask = q.shape, k.shape[1], None
    if window is not None and window < S:  # what the first query cannot see is left out
        k, v = (t[:, max(0, S - Q - window + 1) :] for t in (k, v))
        distance = torch.arange(k.shape[1] - Q, k.shape[1], device=q.device).unsqueeze(1)
        distance = distance - torch.arange(k.shape[1], device=q.device)
        mask = (distance >= 0) & (distance < window)
    q, k, v = q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if sinks is not None:
        q, k, v = with_sink(q, k, v, sinks.view(-1, 1, 1))
        mask = None if mask is None else F.pad(mask, (1, 0), value=True)
    if mask is None and 1 < Q < k.shape[2]:
        # Imported here, because it brings the compiler with it.
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(Q, k.shape[2])
    options = {"is_causal": mask is None and Q > 1, "enable_gqa": True, "scale": C**-0.5}
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)[..., :C]
    return y[0].transpose(0, 1).flatten(1).contiguous()


@attend_chunk.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) over the layer's cache, rotary positions: [B, Q, D] -> same."""

    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        H, K, C = args.n_head, args.n_kv_head, args.head_dim
        self.wqkv = Linear(args.dim, (H + 2 * K) * C, bias=args.attention_bias or args.qkv_bias)
        self.wo = Linear(H * C, args.dim, bias=args.attention_bias)
        self.reduce = nn.Identity()  # tensor parallelism sums over ranks here
        norms = {"none": (), "head": (C, C), "full": (H * C, K * C)}[args.qk_norm]
        self.q_norm, self.k_norm = (RMSNorm(n, args.norm_eps) for n in norms) if norms else (None, None)
        self.qk_norm, self.clip_qkv = args.qk_norm, args.clip_qkv
        self.heads, self.window, self.turning = (H, K, C), args.window(layer), args.rotary_dim or C
        self.sinks = nn.Parameter(torch.empty(H), requires_grad=False) if args.attention_sinks else None
        # Beside the C ** -0.5 that every product has.
        self.query_scale = 1.0 if args.attention_scale is None else args.attention_scale * C**0.5
        self.cache: KVCache | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        H, K, C = self.heads
        q, kv = self.wqkv(x).split((H * C, 2 * K * C), dim=-1)
        # What is done to keys is done to values too, and dropped: so one kernel makes and writes both.
        kv, full, head = kv.unflatten(-1, (2, K * C)), self.qk_norm == "full", self.qk_norm == "head"
        # In memory: the compiler tunes a kernel that writes the cache badly, since it copies and times all of it.
        keys = realise(self.k_norm(kv)) if full else kv
        keys, values = (self.clip(t).unflatten(-1, (-1, C)) for t in (keys, kv))  # [B, Q, 2, K, C]
        keys = rotate(self.k_norm(keys) if head else keys, context.rope.unsqueeze(2), self.turning).to(values.dtype)
        kv = torch.where(torch.arange(2, device=x.device).view(2, 1, 1) == 0, keys, values)
        chunk, positions = context.chunk, context.positions
        k, v = self.cache.extend(chunk, kv) if chunk else self.cache.update(positions, kv)
        # Queries come after that, and are kept in memory: the compiler overlooks that the kernel after the one that
        # writes the cache has to wait for it before it reads the cache, so it must be one that does not.
        q = self.clip(self.q_norm(q) if full else q).unflatten(-1, (-1, C))  # [B, Q, H, C]
        q = rotate(self.q_norm(q) if head else q, context.rope, self.turning) * self.query_scale
        q = realise(q.to(kv.dtype))
        if chunk:
            y = attend_chunk(q[0], k, v, self.window, self.sinks).unsqueeze(0)
        elif (view := context.views[self.window]).blocks and self.cache.reads_blocks(q.shape[1] * H // K):
            y = self.cache.attend_blocks(q, k, v, positions, view.blocks, self.window, self.sinks)
        else:
            y = attend(q, k, v, view.bias, self.sinks)
        return self.reduce(self.wo(y))

    def clip(self, x: Tensor) -> Tensor:
        return x if self.clip_qkv is None else x.clamp(-self.clip_qkv, self.clip_qkv)


HEADS = 16  # whose keys and values latent attention makes at a time, for a chunk


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2 2024, section 2.1): [B, Q, D] -> same.

    A head's keys and values are products `wkv` of r numbers of their position, which alone are in the cache, with one
    rotated key for all heads. Few queries go into the space of these numbers, where they all are one KV head's, and
    what is found comes back from there: a cache is read once, and as it is. For a chunk, whose queries are many, that
    would be 3.4 times the arithmetic, so it makes the keys and values, of a few heads at a time.
    """

    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        H, C, r, R = args.n_head, args.head_dim, args.kv_rank, args.rotary_dim
        self.wqkv = Linear(args.dim, (args.q_rank or H * C) + r + R)
        self.q_norm = RMSNorm(args.q_rank, 1e-6) if args.q_rank else None  # both have this, whatever args.norm_eps is
        self.wq = Linear(args.q_rank, H * C) if args.q_rank else None
        self.kv_norm = RMSNorm(r, 1e-6)
        self.wkv = nn.Parameter(torch.empty(H, C - R + args.value_dim, r), requires_grad=False)
        self.wo = Linear(H * args.value_dim, args.dim)
        self.reduce = nn.Identity()  # tensor parallelism sums over ranks here
        self.sizes, self.scale = (H, C - R, R, r), args.attention_scale or C**-0.5
        self.cache: KVCache | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        H, N, R, r = self.sizes
        x, chunk, positions = self.wqkv(x), context.chunk, context.positions
        q, latent, key = x.split((x.shape[-1] - r - R, r, R), dim=-1)
        key = rotate(key.unsqueeze(2), context.rope, R).squeeze(2).to(x.dtype)
        kv = realise(torch.cat((self.kv_norm(latent), key), dim=-1)).unflatten(-1, (1, 1, -1))  # [B, Q, 1, 1, r + R]
        (kv,) = self.cache.extend(chunk, kv) if chunk else self.cache.update(positions, kv)
        q = (q if self.wq is None else self.wq(realise(self.q_norm(q)))).unflatten(-1, (H, -1))
        q, turned = q.split((N, R), dim=-1)
        turned = rotate(turned, context.rope, R).to(x.dtype)
        if chunk:
            y = self.attend_chunk(torch.cat((q, turned), dim=-1).squeeze(0), kv.squeeze(0)).unsqueeze(0)
            return self.reduce(self.wo(y))
        w_key, w_value = self.wkv.split((N, self.wkv.shape[1] - N), dim=1)
        q = torch.cat((torch.einsum("bqhn,hnr->bqhr", q, w_key), turned), dim=-1)
        q = realise(q * (self.scale * (r + R) ** 0.5))  # in memory, as in Attention
        v, view = kv.split((r, R), dim=-1)[0], context.views[None]
        if view.blocks and all(n >= 16 and n & n - 1 == 0 for n in (r, R)):  # for which there is the kernel
            y = self.cache.attend_latent(q, positions, r)
        else:
            y = attend(q, kv, v, view.bias).unflatten(-1, (H, r))
        y = torch.einsum("bqhr,hvr->bqhv", y, w_value)
        return self.reduce(self.wo(realise(y.flatten(2))))

    def attend_chunk(self, q: Tensor, kv: Tensor) -> Tensor:
        """q [Q, H, C], of the last Q positions of kv [S, r + R] -> [Q, H * value_dim]."""
        _, N, R, r = self.sizes
        parts, C, (latent, key) = [], q.shape[-1], kv.split((r, R), dim=-1)
        q = q * (self.scale * C**0.5)
        for few, w in zip(q.split(HEADS, dim=1), self.wkv.split(HEADS), strict=True):
            k, v = torch.einsum("sr,hnr->hsn", latent, w).split((N, w.shape[1] - N), dim=-1)
            k = torch.cat((k, key.expand(len(w), -1, -1)), dim=-1)
            # The library's fast kernels want values as long as keys.
            y = attend_chunk(few, k, F.pad(v, (0, C - v.shape[-1])), None, None)
            parts.append(y.unflatten(-1, (-1, C))[..., : v.shape[-1]].flatten(1))
        return torch.cat(parts, dim=-1)


class Block(nn.Module):
    """Attention, then experts (or a dense FFN), each behind a norm and a residual connection."""

    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        self.attention_norm = norm(args)
        self.attention = (LatentAttention if args.kv_rank else Attention)(args, layer)
        self.ffn_norm = norm(args)
        self.ffn = FeedForward(args.dim, args.dense_intermediate) if layer in args.dense_layers else MoE(args)
        self.residual_scale = args.residual_scale

    def forward(self, x: Tensor, normed: Tensor, context: Context, next_norm: RMSNorm):
        """x, its attention_norm [B, Q, D] -> x, its next_norm, and expert_indices, expert_weights [T, A] or None, None.

        A block ends with the norm that the next one begins with, since the sum before it and the norm are one kernel.
        """
        # Norms and sums are kept in memory, or every row of the products that read them would compute them again.
        x = self.add(x, self.attention(normed, context))
        y, expert_indices, expert_weights = self.ffn(realise(self.ffn_norm(x)).flatten(0, 1))
        x = self.add(x, y.view_as(x))
        return x, next_norm(x), expert_indices, expert_weights

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return realise(torch.add(x, y, alpha=self.residual_scale))


class Transformer(nn.Module):
    """The model. Build it on the meta device, fill its parameters, give it a cache, call it.

    `model(tokens, positions)` runs three stages: `start`, each `Block.forward`, `finish`. A caller that compiled them
    passes the compiled functions as `stages`; equal layers share one compiled block.
    """

    host_driven = False  # the host takes part in a step, layer by layer

    @staticmethod
    def recordable(tokens: int) -> bool:
        """Whether a step of so many tokens can be recorded as CUDA graphs; offloading puts its own in its place."""
        return True

    @staticmethod
    def compile_block(compile: Callable) -> Callable:
        """`Block.forward`, compiled by this function; offloading puts pieces and the host between them in its place."""
        return compile(Block.forward)

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        # Of a given weight, since to draw one on the meta device would load the compiler.
        self.embedding = nn.Embedding.from_pretrained(torch.empty(args.vocab_size, args.dim))
        self.layers = nn.ModuleList(Block(args, layer) for layer in range(args.n_layer))
        self.norm = norm(args)
        self.head = Linear(args.dim, args.vocab_size, bias=args.head_bias)
        self.gather = nn.Identity()  # tensor parallelism gathers the vocabulary here
        self.cache_kind: type[KVCache] = KVCache  # of what `setup_cache` makes
        self.windows = tuple(dict.fromkeys(map(args.window, range(args.n_layer))))  # that there are
        self.requires_grad_(False)
        self.tie()

    def tie(self) -> None:
        """Make the head's weight the embedding's where the args say so; call again after replacing either.

        A head in a number format of its own has parts in place of a weight, and stays as it is.
        """
        if self.args.tied_embeddings and isinstance(self.head, Linear):
            self.head.weight = self.embedding.weight

    def setup_cache(self, batch: int, length: int) -> None:
        """Give every layer an empty cache, `batch` sequences of `length` positions, and make the rope table for it."""
        args, device, dtype = self.args, self.norm.weight.device, self.norm.weight.dtype
        parts, heads, width = args.kept
        for block in self.layers:
            block.attention.cache = self.cache_kind((batch, heads, length, width), dtype, device, parts)
        table = rope_table(args, length, device)
        self.register_buffer("rope_table", table, persistent=False)

    def start(self, tokens: Tensor, where: Tensor | Chunk) -> tuple[Tensor, Tensor, Context]:
        """tokens [B, Q] and where they stand -> x [B, Q, D], the first block's norm of it, the context of the call."""
        x = self.embedding(tokens) * self.args.embedding_scale
        normed = self.layers[0].attention_norm(x)
        if isinstance(where, Chunk):
            rope = self.rope_table[where.end - tokens.shape[1] : where.end]
            return x, normed, Context(rope[None, :, None], chunk=where)
        rope, views = self.rope_table[where].unsqueeze(2), {window: self.view(where, window) for window in self.windows}
        return x, normed, Context(rope, positions=where, views=views)

    def view(self, where: Tensor, window: int | None) -> View:
        """What queries at those positions [B, Q] see through a window."""
        S = self.rope_table.shape[0]
        distance = where.unsqueeze(-1) - torch.arange(S, device=where.device)
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        blocks = None
        if S > SHORT_CACHE and S % BLOCK == 0 and where.is_cuda and torch.compiler.is_compiling():
            blocks = blocks_in_use(where, S, window)
        return View(torch.where(visible, 0.0, float("-inf")).to(self.norm.weight.dtype), blocks)

    def finish(self, normed: Tensor, last: Tensor | None) -> Tensor:
        """`norm` of x [B, Q, D] -> logits fp32 [B, V] at query `last` [B] of each sequence, or [B, Q, V] of None."""
        if last is not None:
            normed = normed[torch.arange(normed.shape[0], device=normed.device), last]
        return self.gather(self.head(normed)).float() * self.args.logit_scale

    def forward(self, tokens: Tensor, where: Tensor | Chunk, last: Tensor | None = None, *, all_positions: bool = False,
                return_routing: bool = False, stages: "Stages | None" = None):  # fmt: skip
        """Run tokens [B, Q], reading and extending the cache, at positions `where` [B, Q] (each below the cache's
        length), or at a Chunk's (B = 1).

        Returns logits fp32 [B, V] of each sequence's query `last` [B] (default: the last of Q), or [B, Q, V] of
        `all_positions`; with `return_routing` also expert_indices and expert_weights [L, T, A] of the layers that have
        experts. Positions of one sequence must rise; what the cache holds past them is masked.
        """
        if last is None and not all_positions:
            last = torch.full(tokens.shape[:1], tokens.shape[1] - 1, device=tokens.device)
        stages = stages or Stages()
        x, normed, context = stages.start(self, tokens, where)
        next_norms, routing = [block.attention_norm for block in self.layers[1:]] + [self.norm], []
        for block, next_norm in zip(self.layers, next_norms, strict=True):
            x, normed, *chosen = stages.block(block, x, normed, context, next_norm)
            if return_routing and chosen[0] is not None:
                routing.append(chosen)
        logits = stages.finish(self, normed, None if all_positions else last)
        if not return_routing:
            return logits
        return logits, *(torch.stack(part) for part in zip(*routing, strict=True))

    def bytes_per_token(self, experts_read: float | None = None) -> int:
        """Weight bytes that one token must read: A of E experts, everything else but the embedding's other rows.

        experts_read: of several tokens at once, how many experts a layer they read together.
        """
        total = sum(tensor.nbytes for tensor in stored(self))
        experts = [(sum(t.nbytes for t in stored(m)), m.read_of) for m in self.modules() if isinstance(m, Experts)]
        tied = self.args.tied_embeddings and isinstance(self.head, Linear)
        embedding = 0 if tied else self.embedding.weight.nbytes
        idle = sum(size - int(size * (experts_read or self.args.n_active) / read_of) for size, read_of in experts)
        return total - idle - embedding + self.embedding.weight[0].nbytes


def stored(module: nn.Module):
    """Parameters and saved buffers (a format keeps its packed weights as either), each once."""
    return {id(t): t for t in module.state_dict(keep_vars=True).values()}.values()


class Stages(NamedTuple):
    """The three functions that `Transformer.forward` calls; replace them by compiled ones."""

    start: Callable = Transformer.start
    block: Callable = Block.forward
    finish: Callable = Transformer.finish
