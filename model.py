"""A Mixture-of-Experts transformer in one file, made to decode at the speed of memory.

The idea: the router's choice never leaves the GPU. `expert_indices` [T, A] index the stacked expert
weights [E, out, in], and torch.compile fuses that gather with the matrix-vector product into one
Triton kernel. So a token reads the weights of its own experts, once, and copies none of them.

    weight[expert_indices]                        # [T, A, out, in], never materialized
    torch.einsum("tai,taoi->tao", x, weight)      # one kernel: gather, multiply, sum

Shapes, here and everywhere in the project:

    B sequences    Q positions of a sequence in this call    T tokens, B * Q    S cache length
    D model dim    L layers    H query heads    K KV heads    C head dim    V vocabulary
    E experts      A active experts of a token    I intermediate dim of one expert

This file runs Mixtral, Qwen3-MoE and OLMoE. Everything else stands beside it and substitutes
modules: other families in models/, packed weights in formats/, several GPUs in tp.py, experts in
host memory in offload/, and the decode loop in runtime/session.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.inductor import materialize
from ops.plain.attention import Mask, attend, attend_blocks, attend_chunk, make_mask
from ops.plain.ring import cache_slots, ring_of
from ops.plain.rope import rope_frequencies, rope_table, rotate
from ops.plain.topk import top_k
from ops.products.prompt import grouped_mm

# Up to this number of tokens, experts are sorted by counting, in one or two kernels; a sort takes
# more. runtime/session.py pads compiled prompts to more tokens, so that all take the other branch.
COUNTING_SORT_MAX_TOKENS = 32


@dataclass(frozen=True)
class ModelArgs:
    """Shape and variant of a model: "args" in a converted checkpoint's config.json.

    A family with more fields subclasses it. Raises ValueError for invalid values.
    """

    family: str  # a name in models.FAMILIES
    dim: int  # D
    n_layer: int  # L
    n_head: int  # H
    n_kv_head: int  # K
    head_dim: int  # C
    intermediate: int  # I
    n_expert: int  # E
    n_active: int  # A
    vocab_size: int  # V
    max_position: int  # longest sequence that the model was trained for
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    norm_topk: bool = True  # scale the A routing weights to sum to one
    qk_norm: str = "none"  # "none", "head" (over C, Qwen3-MoE) or "full" (over H * C, OLMoE)
    clip_qkv: float | None = None  # clamp queries, keys and values to +- this
    attention_bias: bool = False
    tied_embeddings: bool = False
    sliding_window: int | None = None  # a query sees this many positions, its own included
    dense_layers: tuple[int, ...] = ()  # layers with one dense FFN instead of experts
    dense_intermediate: int = 0  # intermediate dim of that FFN

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):  # JSON has no tuples
                object.__setattr__(self, field.name, value := tuple(value))
            may_be_zero = field.name.endswith("_intermediate")  # the model has no such FFN
            if not is_valid(value, field.type, may_be_zero):
                raise ValueError(f"{field.name} cannot be {value!r}")
        for name, valid in self.constraints().items():
            if not valid:
                raise ValueError(f"{name} cannot be {getattr(self, name)!r} with the other args")

    def constraints(self) -> dict[str, bool]:
        """Return field -> whether its value fits the others. Subclasses extend it.

        A field `*_layers` is a tuple of layers.
        """
        known = {
            name: all(is_layer(layer, self.n_layer) for layer in value)
            for name, value in vars(self).items()
            if name.endswith("_layers")
        }
        return known | {
            "n_kv_head": self.n_head % self.n_kv_head == 0,
            "head_dim": self.head_dim % 2 == 0,
            "n_active": self.n_active <= self.n_expert,
            "qk_norm": self.qk_norm in ("none", "head", "full"),
            "dense_intermediate": self.dense_intermediate > 0 or not self.dense_layers,
        }


def is_valid(value, kind, may_be_zero: bool = False) -> bool:
    """Whether `value` has a field's type; numbers are finite and positive, or 0 if they may be."""
    if getattr(kind, "__origin__", None) is tuple:
        return isinstance(value, tuple)
    if kind in (float, float | None):
        kind = kind | int
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return False
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return not is_number or 0 < value < float("inf") or (may_be_zero and value == 0)


def is_layer(layer, n_layer: int) -> bool:
    return type(layer) is int and 0 <= layer < n_layer


# Linear maps --------------------------------------------------------------------------------------


class Linear(nn.Module):
    """x [..., in] -> [..., out], with weight [out, in]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = new_parameter(out_features, in_features)
        self.bias = new_parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)  # no bias here: Inductor would leave product + bias to cuBLAS
        return y if self.bias is None else y + self.bias


class ExpertLinear(nn.Module):
    """E linear maps, stacked in weight [E, out, in]."""

    def __init__(self, n_expert: int, in_features: int, out_features: int):
        super().__init__()
        self.weight = new_parameter(n_expert, out_features, in_features)

    def gather(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        """x [T, A, in], expert_indices [T, A] -> [T, A, out], fused with the gather."""
        x = materialize(x)  # or Inductor recomputes SwiGLU in every row of the product
        return torch.einsum("tai,taoi->tao", x, self.weight[expert_indices])

    def gather_gated(self, x: Tensor, expert_indices: Tensor, activation: Callable) -> Tensor:
        """x [T, in], expert_indices [T, A] -> activation(gate, up) [T, A, out / 2].

        Two einsums, so that Inductor fuses the activation into the epilogue. One stacked einsum
        leaves it to the next kernel, which recomputes it in every row (+8 us a layer on an H200).
        """
        x = x.unsqueeze(1).expand(*expert_indices.shape, -1)
        halves = self.weight[expert_indices].chunk(2, dim=2)
        gate, up = (torch.einsum("tai,taoi->tao", x, half) for half in halves)
        return activation(gate, up)

    def grouped(self, x: Tensor, group_ends: Tensor) -> Tensor:
        """x [N, in], sorted by expert, rows of e before group_ends[e] (int32 [E]) -> [N, out]."""
        return grouped_mm(x, self.weight, group_ends)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019, equation 4)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = new_parameter(dim)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def new_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


# Experts ------------------------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [..., I] -> [..., I] (Shazeer 2020, section 2)."""
    return F.silu(gate) * up


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """outputs [T, A, D], weights fp32 [T, A] -> fp32 [T, D].

    Unrolled over A, so that Inductor fuses it into the next kernel. Summing over A inside the
    product is one kernel too, but with fewer and longer rows: 61 us a layer instead of 56 (Mixtral
    bf16).
    """
    return sum((outputs * weights.unsqueeze(-1)).unbind(1))


def group_by_expert(expert_indices: Tensor, n_expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (token, expert) pairs by expert, without the host.

    expert_indices [T, A] -> order [T * A]: the pair of each sorted row; inverse [T * A]: the sorted
    row of each pair; group_ends int32 [E]: one past each expert's last row.
    """
    chosen = expert_indices.flatten()
    pairs = torch.arange(len(chosen), device=chosen.device)
    if len(expert_indices) <= COUNTING_SORT_MAX_TOKENS:
        before = (chosen < chosen[:, None]) | (
            (chosen == chosen[:, None]) & (pairs < pairs[:, None])
        )
        inverse = before.sum(1)
        order = torch.empty_like(inverse).scatter_(0, inverse, pairs)
        experts = torch.arange(n_expert, device=chosen.device)
        return order, inverse, (chosen <= experts[:, None]).sum(1, dtype=torch.int32)
    small = torch.uint8 if n_expert < 256 else torch.int16  # the radix sort makes a pass per byte
    sorted_experts, order = chosen.to(small).sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, pairs)
    experts = torch.arange(n_expert, dtype=small, device=chosen.device)
    return order, inverse, torch.searchsorted(sorted_experts, experts, right=True, out_int32=True)


class Experts(nn.Module):
    """The E experts: x [T, D], expert_indices [T, A], expert_weights fp32 [T, A] -> [T, D]."""

    gather_max_tokens = 1  # with more tokens, grouping rows by expert is faster than gathering

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.w13 = ExpertLinear(args.n_expert, args.dim, 2 * args.intermediate)  # gate, then up
        self.w2 = ExpertLinear(args.n_expert, args.intermediate, args.dim)
        self.n_expert = args.n_expert
        self.activation = swiglu  # (gate, up) -> h

    def forward(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor) -> Tensor:
        if x.shape[0] <= self.gather_max_tokens:
            y = weighted_sum(self.per_expert(x, expert_indices), expert_weights)
        else:
            y = self.combine(self.per_expert_grouped(x, expert_indices), expert_weights)
        return y.to(x.dtype)

    def per_expert(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        """Return each chosen expert's output [T, A, D] by `gather`, for few tokens."""
        h = self.w13.gather_gated(x, expert_indices, self.activation)
        return self.w2.gather(h, expert_indices)

    def per_expert_grouped(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        """Return the same by `grouped`, for many tokens; undefined where an index is n_expert."""
        tokens, active = expert_indices.shape
        order, inverse, group_ends = group_by_expert(expert_indices, self.n_expert)
        return self.grouped(x[order // active], group_ends)[inverse].view(tokens, active, -1)

    def grouped(self, x: Tensor, group_ends: Tensor) -> Tensor:
        """x [N, D] sorted by expert, as in `ExpertLinear.grouped` -> [N, D]."""
        gate, up = self.w13.grouped(x, group_ends).chunk(2, dim=-1)
        return self.w2.grouped(self.activation(gate, up), group_ends)

    def combine(self, outputs: Tensor, expert_weights: Tensor) -> Tensor:
        """outputs [T, A, D], expert_weights [T, A] -> fp32 [T, D]."""
        return (outputs * expert_weights.unsqueeze(-1)).sum(1)


class MoE(nn.Module):
    """Router and experts: x [T, D] -> y [T, D], expert_indices and expert_weights [T, A]."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.router = Linear(args.dim, args.n_expert)
        self.experts = Experts(args)
        self.n_active, self.norm_topk = args.n_active, args.norm_topk

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        expert_indices, expert_weights = self.route(self.router(x))
        y = self.experts(self.expert_input(x), expert_indices, expert_weights)
        return self.merge(x, y), expert_indices, expert_weights

    def expert_input(self, x: Tensor) -> Tensor:
        return x

    def selection_scores(self, scores: Tensor) -> Tensor:
        """Router scores fp32 [T, E] -> the scores by which the top A experts are chosen."""
        return scores

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts: router scores [T, E] -> expert_indices, expert_weights [T, A]."""
        scores = scores.float()
        best, expert_indices = top_k(self.selection_scores(scores), self.n_active)
        parts = [(score - best[0]).exp() for score in best]
        if self.norm_topk:  # softmax over the chosen experts
            total = sum(parts)
        else:  # softmax over all experts
            total = (scores - best[0]).exp().sum(dim=-1, keepdim=True)
        return expert_indices, torch.cat([part / total for part in parts], dim=-1)

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the layer's output from its input x and the routed experts' output y [T, D]."""
        return y


class FeedForward(nn.Module):
    """One dense SwiGLU FFN, with the signature of MoE and no routing to report."""

    def __init__(self, dim: int, intermediate: int):
        super().__init__()
        self.w13 = Linear(dim, 2 * intermediate)
        self.w2 = Linear(intermediate, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, None, None]:
        return self.w2(swiglu(*self.w13(x).chunk(2, dim=-1))), None, None


# Attention ----------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """One chunk of a prompt (chunked prefill). The host knows its end, so it needs no mask."""

    row: Tensor  # int64 [1], row of the cache; no int, as Dynamo specializes on 0 and 1
    end: int  # position after the chunk's last token


class Context(NamedTuple):
    """Inputs that all blocks of one call share. A chunk has no positions and no masks."""

    rope: Tensor  # fp32 [B, Q, 1, 2 C]: cosines, then signed sines
    chunk: Chunk | None = None
    positions: Tensor | None = None  # int64 [B, Q]
    masks: dict[int | None, Mask] | None = None  # by sliding window
    last: Tensor | None = None  # int64 [B]: each row's last real token, before padding


class KVCache(nn.Module):
    """Keys, then values, [2, B, K, S, C], written in place at each sequence's own positions.

    It implements the protocol of runtime/sequence_state.py. Tokens past a sequence's known length
    need no undoing: positions rise, so they are masked until they are overwritten.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: int = 2,
    ):
        super().__init__()
        kv = torch.zeros(parts, *shape, dtype=dtype, device=device)
        self.register_buffer("kv", kv, persistent=False)

    def append(self, kv: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Write keys and values [B, Q, 2, K, C]; return those that the mask covers, [B, K, S, C].

        Sequences that are fewer than the cache's rows are its first rows. A chunk gets the keys and
        values of its own sequence up to its end, [K, end, C] each; from a ring, the latest of them.
        """
        return self.write(self.kv, kv, context).unbind()

    def write(self, memory: Tensor, values: Tensor, context: Context) -> Tensor:
        """Do what `append` does for one of the cache's tensors, [2, B, K, S, C]."""
        if context.chunk is None:
            lengths = [mask.bias.shape[-1] for mask in (context.masks or {}).values()]
            rows = torch.arange(values.shape[0], device=values.device)
            memory[:, rows.unsqueeze(1), :, context.positions] = values
            return memory[:, : values.shape[0], :, : max(lengths, default=None)]
        row, end = context.chunk
        own = torch.arange(end - values.shape[1], end, device=values.device)
        memory[:, row, :, own] = values[0]
        return self.of_chunk(memory, context.chunk)

    def of_chunk(self, memory: Tensor, chunk: Chunk) -> Tensor:
        """Return what `append` returns for a chunk that memory [2, B, K, S, C] already holds."""
        live = memory.narrow(3, 0, chunk.end)
        return (live if memory.shape[1] == 1 else live.index_select(1, chunk.row)).squeeze(1)

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """Return the stored tensor, and its scales if it is quantized."""
        return self.kv, None

    def reads_blocks(self, queries: int) -> bool:
        """Whether `attend_blocks` supports this number of queries per KV head."""
        return True

    def attend_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, window: int | None, **options
    ) -> Tensor:
        """Attend over the blocks in use. k and v are those that `append` returned."""
        blocks = context.masks[window].blocks
        return attend_blocks(q, k, v, context.positions, blocks, window, **options)

    def recurrent(self, row: int) -> list[Tensor]:
        """Return the part of a row's memory that cannot go back to any length: none."""
        return []

    def row(self, row: int) -> list[Tensor]:
        """Return a row's memory as views [..., S, values of a position]."""
        return [tensor[:, row] for tensor in self.buffers()]

    def reset(self, row: int | None = None) -> None:
        """Zero a row, or all: masked positions are multiplied by 0, and 0 * NaN is NaN."""
        for tensor in self.buffers():
            (tensor if row is None else tensor[:, row]).zero_()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) over a KV cache: [B, Q, D] -> same."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        H, K, C = self.heads = args.n_head, args.n_kv_head, args.head_dim
        self.wqkv = Linear(args.dim, (H + 2 * K) * C, bias=args.attention_bias)
        self.wo = Linear(H * C, args.dim, bias=args.attention_bias)
        norm_dims = {"none": None, "head": (C, C), "full": (H * C, K * C)}[args.qk_norm]
        self.q_norm = RMSNorm(norm_dims[0], args.norm_eps) if norm_dims else None
        self.k_norm = RMSNorm(norm_dims[1], args.norm_eps) if norm_dims else None
        self.qk_norm, self.clip_qkv = args.qk_norm, args.clip_qkv
        self.window, self.rotary_dim = args.sliding_window, C

    def allocate(
        self, batch: int, length: int, cache_class: type[KVCache], like: Tensor
    ) -> KVCache:
        """Make this layer's cache, in the dtype and on the device of `like`, and return it.

        It is a ring if a sliding window is shorter than `length`.
        """
        (_, K, C), slots = self.heads, cache_slots(length, self.window)
        cache_class = ring_of(cache_class) if slots < length else cache_class
        self.cache = cache_class((batch, K, slots, C), like.dtype, like.device)
        return self.cache

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.wo(self.core(self.wqkv(x), context))

    def core(self, qkv: Tensor, context: Context) -> Tensor:
        """qkv [B, Q, (H + 2 K) C] -> [B, Q, H * C]: norms, RoPE, cache append, attention."""
        H, _, C = self.heads
        q, kv = qkv.split((H * C, qkv.shape[-1] - H * C), dim=-1)
        kv = self.keys_and_values(kv, context.rope)
        k, v = self.cache.append(kv, context)
        # With programmatic dependent launch (PDL), Inductor lets the kernel after the append start
        # before the append ends. So the queries' kernel comes next: it does not read the cache.
        q = materialize(self.queries(q, context.rope).to(kv.dtype))
        return self.attend(q, k, v, context)

    def keys_and_values(self, kv: Tensor, rope: Tensor) -> Tensor:
        """kv [B, Q, 2 K C] -> keys, then values [B, Q, 2, K, C].

        Norm and RoPE are computed for values too, and discarded, so that one kernel writes both.
        """
        _, K, C = self.heads
        kv = kv.unflatten(-1, (2, K * C))
        # Materialize: Inductor tunes a kernel that writes the cache badly, since each timed run
        # copies the whole cache.
        keys = materialize(self.k_norm(kv)) if self.qk_norm == "full" else kv
        keys, values = (self.clip(t).unflatten(-1, (-1, C)) for t in (keys, kv))
        keys = self.k_norm(keys) if self.qk_norm == "head" else keys
        keys = rotate(keys, rope.unsqueeze(2), self.rotary_dim).to(values.dtype)
        is_key = torch.arange(2, device=kv.device).view(2, 1, 1) == 0
        return torch.where(is_key, keys, values)

    def queries(self, q: Tensor, rope: Tensor) -> Tensor:
        """q [B, Q, H C] -> normed and rotated, fp32 [B, Q, H, C]."""
        q = self.q_norm(q) if self.qk_norm == "full" else q
        q = self.clip(q).unflatten(-1, (-1, self.heads[2]))
        return rotate(self.q_norm(q) if self.qk_norm == "head" else q, rope, self.rotary_dim)

    def clip(self, x: Tensor) -> Tensor:
        return x if self.clip_qkv is None else x.clamp(-self.clip_qkv, self.clip_qkv)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q [B, Q, H, C], keys and values as the cache returned them -> [B, Q, H * C]."""
        if context.chunk:
            return attend_chunk(q[0], k, v, self.window, None).unsqueeze(0)
        H, K, _ = self.heads
        mask = context.masks[self.window]
        if mask.blocks and self.cache.reads_blocks(q.shape[1] * H // K):
            return self.cache.attend_blocks(q, k, v, context, self.window)
        return attend(q, k, v, mask.bias)


# The model ----------------------------------------------------------------------------------------


class AddNorm(nn.Module):
    """Residual connection and the norm after it, as one kernel."""

    def forward(self, x: Tensor, y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """x [B, Q, D], y [T, D] or like x -> x + y and its norm [B, Q, D].

        Materialize both, so that Inductor does not recompute them in every row of a product.
        """
        x = materialize(x + y.view_as(x))
        return x, materialize(norm(x))


class Block(nn.Module):
    """Attention, then experts (or a dense FFN), each after a norm and with a residual."""

    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        if layer in args.dense_layers:
            self.ffn = FeedForward(args.dim, args.dense_intermediate)
        else:
            self.ffn = MoE(args)
        self.add_attention, self.add_ffn = AddNorm(), AddNorm()

    def allocate(self, batch: int, length: int, cache_class: type[KVCache], like: Tensor):
        """Make the layer's sequence state, in the dtype and on the device of `like`; return it."""
        return self.attention.allocate(batch, length, cache_class, like)

    def forward(self, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module):
        """x and its norm [B, Q, D] -> x, its next_norm, expert_indices, expert_weights [T, A].

        A block ends with the next block's norm: the residual sum before it and the norm are one
        kernel. A dense block returns None for indices and weights.
        """
        x, h = self.attend(x, normed, context)
        y, expert_indices, expert_weights = self.ffn(h.flatten(0, 1))
        x, normed = self.add_ffn(x, y, next_norm)
        return x, normed, expert_indices, expert_weights

    def attend(self, x: Tensor, normed: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """x and its norm [B, Q, D] -> x after attention, and the input of the FFN."""
        return self.add_attention(x, self.attention(normed, context), self.ffn_norm)


class Runner:
    """Runs the three stages of a forward pass eagerly. runtime/runner.py compiles them."""

    def begin(self, model: "Transformer", tokens: Tensor, span: Tensor | Chunk):
        return model.begin(tokens, span)

    def block(
        self, block: Block, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module
    ):
        return block(x, normed, context, next_norm)

    def logits(self, model: "Transformer", normed: Tensor, last: Tensor | None) -> Tensor:
        return model.logits(normed, last)


class Transformer(nn.Module):
    """The model. Build it on the meta device, load its parameters, call `setup_cache`, call it."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        # from_pretrained, since nn.Embedding(V, D) would initialize it, which imports the compiler.
        self.embedding = nn.Embedding.from_pretrained(torch.empty(args.vocab_size, args.dim))
        self.layers = nn.ModuleList(self.make_block(args, layer) for layer in range(args.n_layer))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.head = Linear(args.dim, args.vocab_size)
        self.tie_weights()

    def make_block(self, args: ModelArgs, layer: int) -> Block:
        """Return one layer. Families override this."""
        return Block(args, layer)

    def tie_weights(self) -> None:
        """Share the embedding's weight with the head, if the args say so. Call it after loading."""
        if self.args.tied_embeddings and isinstance(self.head, Linear):
            self.head.weight = self.embedding.weight

    def setup_cache(self, batch: int, length: int, cache_class: type[KVCache] = KVCache) -> list:
        """Allocate every layer's sequence state for `batch` sequences of `length` positions.

        Returns the states, one a layer (also as `.states`); they replace those of an earlier call.
        """
        like = self.embedding.weight  # a norm may be in fp32
        self.states = [block.allocate(batch, length, cache_class, like) for block in self.layers]
        self.windows = tuple(dict.fromkeys(block.attention.window for block in self.layers))
        table = self.make_rope_table(length, like.device)
        self.register_buffer("rope_table", table, persistent=False)
        return self.states

    def make_rope_table(self, length: int, device: torch.device) -> Tensor:
        """Return cosines, then signed sines of all positions, fp32 [length, 2 C]."""
        frequencies = rope_frequencies(self.args.head_dim, self.args.rope_theta, device)
        return rope_table(frequencies, length)

    def begin(self, tokens: Tensor, span: Tensor | Chunk) -> tuple[Tensor, Tensor, Context]:
        """Embed tokens [B, Q] -> x [B, Q, D], the first block's norm of it, the call's context."""
        x = self.embed(tokens)
        normed = self.layers[0].attention_norm(x)
        if isinstance(span, Chunk):
            rope = self.rope_table[span.end - tokens.shape[1] : span.end]
            return x, normed, Context(rope[None, :, None], chunk=span)
        masks = {window: self.mask(span, window) for window in self.windows}
        rope = self.rope_table[span].unsqueeze(2)
        return x, normed, Context(rope, positions=span, masks=masks)

    def embed(self, tokens: Tensor) -> Tensor:
        # A token is -1 if no logit was finite; the host reads it a step later, and stops.
        return self.embedding(tokens.clamp(min=0))

    def mask(self, positions: Tensor, window: int | None) -> Mask:
        """Return the mask of queries at positions [B, Q]. window: of sliding attention, or None."""
        return make_mask(positions, self.rope_table.shape[0], window, self.embedding.weight.dtype)

    def logits(self, normed: Tensor, last: Tensor | None) -> Tensor:
        """Normed x [B, Q, D] -> fp32 logits [B, V] of query last [B]; None: of all [B, Q, V]."""
        if last is not None:
            normed = normed[torch.arange(normed.shape[0], device=normed.device), last]
        return self.head(normed).float()

    def forward(
        self,
        tokens: Tensor,
        span: Tensor | Chunk,
        last: Tensor | None = None,
        *,
        all_positions: bool = False,
        return_routing: bool = False,
        runner: Runner | None = None,
    ):
        """Run tokens [B, Q] at positions `span` [B, Q] (rising, below S) or in a Chunk (B = 1).

        Returns fp32 logits [B, V] of each row's query last [B] (default: Q - 1), or of all queries
        [B, Q, V] if `all_positions`. With `return_routing` also expert_indices and expert_weights
        [L, T, A] of the layers that have experts. Queries after `last` are padding: all, if last
        is -1.
        """
        if last is None and not all_positions:
            last = torch.full(tokens.shape[:1], tokens.shape[1] - 1, device=tokens.device)
        runner = runner or Runner()
        x, normed, context = runner.begin(self, tokens, span)
        context = context._replace(last=last)
        next_norms = [block.attention_norm for block in self.layers[1:]] + [self.norm]
        routing = []
        for block, next_norm in zip(self.layers, next_norms, strict=True):
            x, normed, *chosen = runner.block(block, x, normed, context, next_norm)
            if return_routing and chosen[0] is not None:
                routing.append(chosen)
        logits = runner.logits(self, normed, None if all_positions else last)
        if not return_routing:
            return logits
        return logits, *(torch.stack(parts) for parts in zip(*routing, strict=True))
