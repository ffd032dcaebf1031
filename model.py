"""A Mixture-of-Experts transformer for decoding: Mixtral, Qwen3-MoE, DeepSeek, gpt-oss are settings of this one model.

Shapes, here and in every comment of the project:

    B sequences      Q positions a sequence in this call      T tokens, B * Q      S cache length      V vocabulary
    D model dim      L layers     H query heads     K KV heads     C head dim
    E experts        A active experts a token       I intermediate dim of one expert

The idea that the rest serves: the router's choice never leaves the device. `expert_indices` [T, A] index the stacked
weights [E, out, in], and torch.compile turns "gather, multiply, sum" into one kernel that reads the chosen rows once.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import grouped_kernel
from args import ModelArgs
from attention import (
    BLOCK,
    SHORT_CACHE,
    Attention,
    Chunk,
    Context,
    KVCache,
    LatentAttention,
    View,
    bias_of,
    blocks_in_use,
    rope_table,
)
from layers import Linear, RMSNorm, norm, operator, realise, scaled, weighted_sum


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

    def gathered(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        """x [T, A, in], expert_indices [T, A] -> [T, A, out], in x's dtype or fp32."""
        x = realise(x)  # or every row would compute SwiGLU again
        return biased(torch.einsum("tai,taoi->tao", x, self.weight[expert_indices]), self.bias, expert_indices)

    def grouped(self, x: Tensor, group_ends: Tensor) -> Tensor:
        """x [N, in], rows sorted by expert; rows of expert e end before group_ends[e] (int32 [E]) -> [N, out]."""
        return grouped_mm(x, self.weight, group_ends)


FEW_ROWS = 64  # an expert, on average


@operator("moe_fast::grouped_mm")
def grouped_mm(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    """x [N, in], weight [E, out, in], group_ends int32 [E] -> [N, out]; `in` and `out` multiples of 16 bytes.

    An operator of ours around the library's, because Inductor compiles the latter on CPU in bf16 only. Its tiles are
    for many rows: with few, on a GPU, it reads weights at half of the memory's speed. And but for bf16 it loops over
    the experts there, and waits for the host.
    """
    if x.is_cuda and (len(x) <= FEW_ROWS * len(weight) or x.dtype is not torch.bfloat16):
        return grouped_kernel.grouped(x, group_ends, {"codes": weight}, "plain", 8 * x.element_size(), 1)
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=group_ends)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


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


class Terms(NamedTuple):
    """A sum over each token's experts that is still to be made."""

    each: Tensor  # [T, A, D], in the model's dtype or fp32
    weights: Tensor  # fp32 [T, A]


class Experts(nn.Module):
    """The E feed-forward experts: x [T, D], expert_indices [T, A], expert_weights [T, A] -> [T, D]."""

    gather_tokens = 1  # up to this many tokens the fused gather wins, above it each expert's rows are grouped
    apart = False  # what is gathered is left as terms, for a `Join` that adds them up

    def __init__(self, args: ModelArgs):
        super().__init__()
        clamp = (args.swiglu_limit, args.swiglu_alpha) if args.swiglu_limit else None
        self.w13 = ExpertLinear(args.n_expert, args.dim, 2 * args.intermediate, args.expert_bias, clamp)
        self.w2 = ExpertLinear(args.n_expert, args.intermediate, args.dim, args.expert_bias)
        self.n_expert = args.n_expert
        self.read_of = float(args.n_expert)  # a token reads A / read_of of the bytes that are stored here

    def forward(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor) -> Tensor | Terms:
        product = self.gather if x.shape[0] <= self.gather_tokens else self.group
        return product(x, expert_indices, expert_weights)

    def gather(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor) -> Tensor | Terms:
        """For few tokens: each token reads the weights of its own experts and no others."""
        y = self.w2.gathered(self.w13.gated(x, expert_indices), expert_indices)
        return Terms(y, expert_weights) if self.apart else weighted_sum(y, expert_weights).to(x.dtype)

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
    """A layer of experts with its router, which `Join` asks. x [T, D], the router's scores of it [T, E] -> y [T, D] (or
    its terms), expert_indices [T, A], expert_weights [T, A] fp32."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.router = Linear(args.dim, args.n_expert, bias=args.router_bias)
        self.experts = Experts(args)
        self.shared = FeedForward(args.dim, args.shared_intermediate) if args.shared_intermediate else None
        self.shared_gate = Linear(args.dim, 1) if args.shared_intermediate and args.shared_gated else None
        sigmoid = args.scoring == "sigmoid"
        self.score_bias = nn.Parameter(torch.empty(args.n_expert), requires_grad=False) if sigmoid else None  # fp32
        self.n_active, self.norm_topk, self.routed_scale = args.n_active, args.norm_topk, args.routed_scale
        self.mixer_eps, self.groups = args.mixer_eps, (args.n_group, args.n_active_group)

    def score(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> `judge` of the router's scores: for guesses, by what an earlier layer's router reads."""
        return self.judge(self.router(x))

    def judge(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The router's, [T, E] -> fp32 [T, E] of which the largest are chosen, and what routing weights are made of."""
        scores = scores.float()
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

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The router's scores [T, E] -> expert_indices, expert_weights [T, A]."""
        choice, scores = self.judge(scores)
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
        return expert_indices, scaled(torch.cat([part / total for part in parts], dim=-1), self.routed_scale)

    def mix(self, scores: Tensor, best: list[Tensor], expert_indices: Tensor) -> Tensor:
        """SparseMixer's weights (Liu et al. 2024): each of a softmax over what is left and nearly as good, [T, A]."""
        parts, left, experts = [], scores, torch.arange(scores.shape[-1], device=scores.device)
        for score, index in zip(best, expert_indices.split(1, dim=-1), strict=True):
            near = (score - left) / scores.abs().maximum(score) <= 2 * self.mixer_eps
            parts.append(1 / torch.where(near, (left - score).exp(), 0.0).sum(dim=-1, keepdim=True))
            left = torch.where(experts == index, float("-inf"), left)
        return torch.cat(parts, dim=-1)

    def forward(self, x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        expert_indices, expert_weights = self.route(scores)
        return self.finish(x, self.experts(x, expert_indices, expert_weights)), expert_indices, expert_weights

    def finish(self, x: Tensor, y: Tensor | Terms) -> Tensor | Terms:
        """x, the experts' result y [T, D] -> with the shared expert's, where there is one (then y is no terms)."""
        if self.shared is not None:
            shared = self.shared(x, None)[0]
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        return y


class FeedForward(nn.Module):
    """One dense SwiGLU: a dense layer's, or a shared expert. Same signature as MoE, with no routing to report."""

    router = None

    def __init__(self, dim: int, intermediate: int):
        super().__init__()
        self.w13 = Linear(dim, 2 * intermediate)
        self.w2 = Linear(intermediate, dim)

    def forward(self, x: Tensor, scores: None) -> tuple[Tensor, None, None]:
        return self.w2(swiglu(*self.w13(x).chunk(2, dim=-1))), None, None


class Join(nn.Module):
    """A residual connection, the norm after it, and the router that reads that. Tensor parallelism first sums y over
    the ranks here."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, y: Tensor, norm: nn.Module, router: Linear | None = None):
        """x [..., D], y [T, D] or the like -> x + scale y, its norm, the router's scores of that [T, E] (or None).

        Both are kept in memory, or each of their readers would make them again: every row of a product.
        """
        x = realise(torch.add(x, y.view_as(x), alpha=self.scale))
        normed = realise(norm(x))
        return x, normed, None if router is None else router(normed.flatten(0, -2))


class Block(nn.Module):
    """Attention, then experts (or a dense FFN), each behind a norm and a residual connection."""

    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        self.attention_norm = norm(args)
        self.attention = (LatentAttention if args.kv_rank else Attention)(args, layer)
        self.ffn_norm = norm(args)
        self.ffn = FeedForward(args.dim, args.dense_intermediate) if layer in args.dense_layers else MoE(args)
        self.join = Join(args.residual_scale)

    def forward(self, x: Tensor, normed: Tensor, context: Context, next_norm: RMSNorm):
        """x, its attention_norm [B, Q, D] -> x, its next_norm, and expert_indices, expert_weights [T, A] or None, None.

        A block ends with the norm that the next one begins with, since the sum before it and the norm are one kernel.
        """
        x, h, scores = self.join(x, self.attention(normed, context), self.ffn_norm, self.ffn.router)
        y, expert_indices, expert_weights = self.ffn(h.flatten(0, 1), scores)
        x, normed, _ = self.join(x, y, next_norm)
        return x, normed, expert_indices, expert_weights


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
        x = scaled(self.embedding(tokens), self.args.embedding_scale)
        normed = self.layers[0].attention_norm(x)
        if isinstance(where, Chunk):
            rope = self.rope_table[where.end - tokens.shape[1] : where.end]
            return x, normed, Context(rope[None, :, None], chunk=where)
        rope, views = self.rope_table[where].unsqueeze(2), {window: self.view(where, window) for window in self.windows}
        return x, normed, Context(rope, positions=where, views=views)

    def view(self, where: Tensor, window: int | None) -> View:
        """What queries at those positions [B, Q] see through a window."""
        S, blocks = self.rope_table.shape[0], None
        if S > SHORT_CACHE and S % BLOCK == 0 and where.is_cuda and torch.compiler.is_compiling():
            blocks = blocks_in_use(where, S, window)
        return View(bias_of(where, S, window, self.norm.weight.dtype), blocks)

    def finish(self, normed: Tensor, last: Tensor | None) -> Tensor:
        """`norm` of x [B, Q, D] -> logits fp32 [B, V] at query `last` [B] of each sequence, or [B, Q, V] of None."""
        if last is not None:
            normed = normed[torch.arange(normed.shape[0], device=normed.device), last]
        return scaled(self.gather(self.head(normed)).float(), self.args.logit_scale)

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
