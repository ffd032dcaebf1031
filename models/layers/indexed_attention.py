"""Attention that reads few blocks of a long cache, chosen by an index (qwen4_exp's QSA).

The index has queries of N small heads, and one key for each block of R positions: the norm of the
mean of the positions' raw keys, rotated as the block's first position. A block's score is the sum
over heads of relu(query * key). A token attends to the budget / R best of the blocks that are
complete at its position, and to all positions of the block that is not. So up to `reach` positions
it attends to all. The formulas are those of transformers' Qwen4ExpTextQSAIndexer.

Block keys have 1 / R of the positions. They are written when a call has a block's last token, from
the raw keys of the last positions, which are kept in a ring as a short convolution's inputs are.
Refused drafts need no undoing: the tokens in their place write raw keys again, and the block key
again before a query may choose it. In bf16 with J = 128 and R = 4 that is 64 bytes a position and
layer, and 32 KiB for the ring.

Letters: N index heads, J their size, R positions of a block, M blocks of a cache, k chosen blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model import Context, KVCache, Linear
from models.layers.gated_attention import GatedAttention, gated_attention_recipes
from models.layers.joined_state import JoinedState
from models.layers.pending_state import call_place, count_real
from models.layers.scaled_rope import scaled_frequencies
from models.layers.short_conv import allocate_inputs, write_rows
from models.layers.zero_centered_norm import ZeroCenteredRMSNorm, zero_centered
from models.tensors import Recipes, copy_of
from ops.inductor import custom_op, materialize
from ops.plain.attention import attend
from ops.plain.rope import rotate_by
from ops.plain.topk import largest_by_rank

PAIRS_AT_ONCE = 1 << 25  # (query, position) pairs of a prompt, each with N / R scores


class IndexSizes(NamedTuple):
    """Sizes of an index."""

    heads: int  # N
    dim: int  # J
    budget: int  # positions of the blocks that a query chooses
    ratio: int  # R

    @property
    def chosen(self) -> int:
        """Blocks that a query chooses, k."""
        return self.budget // self.ratio

    @property
    def reach(self) -> int:
        """Positions of the longest sequence whose last query attends to all."""
        return self.budget + self.ratio - 1


class Choice(NamedTuple):
    """What the queries of a call attend to, in place of `ops.plain.attention.Mask`."""

    bias: Tensor | None  # that of the mask; None: of a chunk, which has no mask
    chosen: Tensor  # int64 [B, Q, k], blocks; of fewer complete ones the rest are incomplete
    blocks: None = None


class IndexedAttention(GatedAttention):
    """[B, Q, D] -> same. args.index_sizes: an `IndexSizes`; others: as in `GatedAttention`."""

    projections = ("wqkv", "windex"), "wo"  # inputs and output; `core` is between them

    def __init__(self, args):
        super().__init__(args)
        self.args, self.sizes = args, args.index_sizes
        N, J, _, _ = self.sizes
        # Queries, then the key. Apart from wqkv: ranks share heads of that, and all have all of
        # this one, since a score is a sum over the heads.
        self.windex = Linear(args.dim, (N + 1) * J)
        self.index_q_norm = ZeroCenteredRMSNorm(J, args.norm_eps)
        self.index_k_norm = ZeroCenteredRMSNorm(J, args.norm_eps)

    def allocate(
        self, batch: int, length: int, cache_class: type[KVCache], like: Tensor
    ) -> KVCache | JoinedState:
        """Make this layer's state, in the dtype and on the device of `like`, and return it.

        Sequences of up to `reach` positions need no index. An index stays in the dtype of `like`.
        """
        cache, sizes = super().allocate(batch, length, cache_class, like), self.sizes
        self.block_keys = None
        if length <= sizes.reach:
            return cache
        self.raw_keys = allocate_inputs(batch, length, sizes.ratio, sizes.dim, like)
        shape = batch, 1, -(-length // sizes.ratio), sizes.dim
        self.block_keys = KVCache(shape, like.dtype, like.device, parts=1)
        self.register_buffer("rotation", self.make_rotation(like.device), persistent=False)
        return JoinedState(cache, self.raw_keys, self.block_keys)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        index = None if self.block_keys is None else self.windex(x)
        return self.wo(self.attend_by_index(self.wqkv(x), index, context))

    def core(self, projected: Tensor, context: Context) -> Tensor:
        """The results of both projections, joined -> the input of the last product."""
        (N, J, _, _), width = self.sizes, projected.shape[-1]
        qkv, index = projected.split((width - (N + 1) * J, (N + 1) * J), dim=-1)
        return self.attend_by_index(qkv, index, context)

    def attend_by_index(self, qkv: Tensor, index: Tensor | None, context: Context) -> Tensor:
        """qkv as in `GatedAttention.core`, index [B, Q, (N + 1) J] -> [B, Q, H * C]."""
        if self.block_keys is not None:
            chosen: dict = {self.window: self.choose(index, context)}
            context = context._replace(masks=chosen)
        return super().core(qkv, context)

    def choose(self, projected: Tensor, context: Context) -> Choice | None:
        """Append to the index, and choose blocks: projected [B, Q, (N + 1) J].

        None: a chunk that ends within `reach` attends to all.
        """
        (B, Q, _), (N, J, _, R) = projected.shape, self.sizes
        rows, first = call_place(context, B, Q, projected.device)
        queries, keys = projected.split((N * J, J), dim=-1)
        self.append_keys(keys, rows, first, context)
        if context.chunk and context.chunk.end <= self.sizes.reach:
            return None
        positions = first + torch.arange(Q, device=keys.device)
        # Materialized: as in `Attention.core`, this kernel is between the append and its reader.
        queries = self.index_q_norm(queries.unflatten(-1, (N, J)))
        queries = materialize(self.rotate(queries, positions.unsqueeze(-1)))
        if context.chunk:
            known = self.block_keys.kv[0, :, 0, : context.chunk.end // R]
            known = known if len(known) == 1 else known.index_select(0, rows)
            chosen = choose_of_chunk(queries[0], known[0], context.chunk.end, R, self.sizes.chosen)
            return Choice(None, chosen.unsqueeze(0))
        known = self.block_keys.kv[0, :B, 0]
        scores = index_scores(queries, known)
        chosen = best_blocks(scores, positions, R, self.sizes.chosen)
        return Choice(context.masks[self.window].bias, chosen)

    def make_rotation(self, device: torch.device) -> Tensor:
        """Return radians a position, and factors of cosines and of sines, fp32 [3, J].

        A block begins before the call's tokens perhaps, so `Context.rope` has not all positions.
        """
        radians, scale = scaled_frequencies(self.args, self.rotary_dim, device)
        ones, kept = torch.ones_like(radians), radians.new_zeros(self.sizes.dim - self.rotary_dim)
        cos = scale * ones
        rows = (radians, radians, kept), (cos, cos, kept + 1), (-cos, cos, kept)
        return torch.stack([torch.cat(parts) for parts in rows])

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [..., J] by positions [...], which broadcast -> fp32."""
        radians, cos, sin = self.rotation.unbind()
        angles = positions.unsqueeze(-1).float() * radians
        return rotate_by(x, angles.cos() * cos, angles.sin() * sin, self.rotary_dim)

    def append_keys(self, keys: Tensor, rows: Tensor, first: Tensor, context: Context) -> None:
        """Store raw keys [B, Q, J], at positions from `first` [B, 1] on, and those of their blocks.

        rows [B]: of the cache.
        """
        (B, Q, _), R, device = keys.shape, self.sizes.ratio, keys.device
        inputs = self.raw_keys.append(keys, context)  # R - 1 before the call, then its own
        count = count_real(context, B, Q, device)
        # The blocks whose last tokens may be in the call: tokens `ends`, of all that are real.
        blocks = first // R + torch.arange(-(-Q // R), device=device)
        ends = blocks * R + R - 1 - first
        index = ends.clamp(max=Q - 1).unsqueeze(-1) + torch.arange(R, device=device)
        groups = inputs.gather(1, index.flatten(1).unsqueeze(-1).expand(-1, -1, inputs.shape[-1]))
        means = groups.unflatten(1, (-1, R)).float().mean(dim=2).to(keys.dtype)
        new = self.rotate(self.index_k_norm(means), blocks * R).to(keys.dtype)
        write_rows(self.block_keys, new, rows.unsqueeze(1), blocks, ends < count.unsqueeze(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q [B, Q, H, C], keys and values as the cache returned them -> [B, Q, H * C]."""
        choice = context.masks and context.masks[self.window]
        if not isinstance(choice, Choice):
            return super().attend(q, k, v, context)
        R, Q = self.sizes.ratio, q.shape[1]
        if context.chunk:
            return attend_chosen(q[0], k, v, choice.chosen[0], R).unsqueeze(0)
        if Q * self.sizes.reach < self.cache.kv.shape[3]:
            return self.attend_gathered(q, choice.chosen, context.positions)
        visible = is_chosen(choice.chosen, context.positions, R, k.shape[2])
        return attend(q, k, v, torch.where(visible, choice.bias, float("-inf")))

    def attend_gathered(self, q: Tensor, chosen: Tensor, positions: Tensor) -> Tensor:
        """`attend` that reads the chosen positions alone, those of each query."""
        (B, Q, H, C), R, (codes, scale) = q.shape, self.sizes.ratio, self.cache.stored()
        complete = complete_blocks(positions, R)
        offsets = torch.arange(R, device=q.device)
        inside = (chosen.unsqueeze(-1) * R + offsets).flatten(2)
        tail = complete * R + offsets[:-1]
        visible = torch.cat(
            ((chosen < complete).repeat_interleave(R, dim=-1), tail <= positions.unsqueeze(-1)), -1
        )
        places = torch.cat((inside, tail), dim=-1).clamp(max=codes.shape[3] - 1)
        rows = torch.arange(B, device=q.device).view(B, 1, 1)

        def gather(memory: Tensor) -> Tensor:  # [2, rows, K, S, n] -> [2, B * Q, K, places, n]
            return memory[:, rows, :, places].flatten(0, 1).permute(2, 0, 3, 1, 4)

        kv = gather(codes)
        kv = kv if scale is None else (kv.float() * gather(scale).float()).to(q.dtype)
        bias = torch.where(visible, 0.0, float("-inf")).to(q.dtype).flatten(0, 1).unsqueeze(1)
        k, v = kv.unbind()
        return attend(q.view(B * Q, 1, H, C), k, v, bias).view(B, Q, -1)


def index_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """queries fp32 [B, Q, N, J], block keys [B, M, J] -> scores [B, Q, M], of no scale.

    One sum for each head, so that Inductor makes one kernel of all.
    """
    if queries.shape[1] > 1:
        return torch.einsum("bqnj,bmj->bqnm", queries, keys.float()).relu().sum(dim=2)
    keys = keys.unsqueeze(1)
    return sum((head.unsqueeze(2) * keys).sum(-1).relu() for head in queries.unbind(2))


def complete_blocks(positions: Tensor, ratio: int) -> Tensor:
    """Return how many blocks are complete at positions [B, Q]: [B, Q, 1]."""
    return (positions.unsqueeze(-1) + 1) // ratio


def best_blocks(scores: Tensor, positions: Tensor, ratio: int, count: int) -> Tensor:
    """Return the best blocks for queries at positions [B, Q], of those complete: [B, Q, count].

    scores [B, Q, M], not negative; M >= count. In eager code ties go to the earlier block: many
    scores may be zero, and chunks and steps have to agree.
    """
    index = torch.arange(scores.shape[-1], device=scores.device)
    complete = complete_blocks(positions, ratio)
    scores = torch.where(index < complete, scores, -1.0).flatten(0, 1)
    if scores.is_cuda and torch.compiler.is_compiling():  # eager, it takes M * M numbers
        chosen = largest_by_rank(scores, count)[1]
    else:
        chosen = earliest_of_largest(scores, count)
    return chosen.view(*positions.shape, count)


def earliest_of_largest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the largest scores fp32 [.., M]: [.., count], the first of equal ones.

    Bits of numbers that are not negative have the numbers' order; -1.0 has that of integers below.
    """
    last = scores.shape[-1] - 1
    index = torch.arange(last + 1, device=scores.device)
    keys = scores.contiguous().view(torch.int32).long() << 32 | last - index
    return keys.topk(count, dim=-1, sorted=False).indices


def is_chosen(chosen: Tensor, positions: Tensor, ratio: int, length: int) -> Tensor:
    """Return which positions queries attend to, bool [B, Q, length].

    chosen int64 [B, Q, k]: blocks, of which the complete ones count. positions [B, Q]: of the
    queries, below `length`.
    """
    complete, blocks = complete_blocks(positions, ratio), -(-length // ratio)
    # Not zeros: with PDL, Inductor's kernel that reads nothing would not wait for the one before.
    found = torch.arange(blocks + 1, device=chosen.device) == complete
    # Blocks that are not complete are put past the end.
    found = found.scatter(-1, torch.where(chosen < complete, chosen, blocks), True)[..., :-1]
    found = found.repeat_interleave(ratio, dim=-1)[..., :length]
    return found & (torch.arange(length, device=chosen.device) <= positions.unsqueeze(-1))


def queries_at_once(queries: int, end: int) -> int:
    """Return how many queries of a chunk that ends at `end` are computed together."""
    return min(queries, max(16, PAIRS_AT_ONCE // end))


@custom_op("moe_fast::choose_of_chunk")
def choose_of_chunk(queries: Tensor, keys: Tensor, end: int, ratio: int, count: int) -> Tensor:
    """Choose blocks for the queries [Q, N, J] of a chunk that ends at `end`: int64 [Q, count].

    keys [M, J]: of all blocks that are complete at the end. A custom operator: else Dynamo would
    unroll the groups of queries.
    """
    parts, first = [], end - len(queries)
    for part in queries.split(queries_at_once(len(queries), end)):
        positions = torch.arange(first, first + len(part), device=keys.device).unsqueeze(0)
        scores = index_scores(part.unsqueeze(0), keys.unsqueeze(0))
        parts.append(best_blocks(scores, positions, ratio, count)[0])
        first += len(part)
    return torch.cat(parts)


@choose_of_chunk.register_fake
def _(queries: Tensor, keys: Tensor, end: int, ratio: int, count: int) -> Tensor:
    return queries.new_empty(queries.shape[0], count, dtype=torch.int64)


@custom_op("moe_fast::attend_chosen")
def attend_chosen(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, ratio: int) -> Tensor:
    """`ops.plain.attention.attend_chunk` with chosen blocks int64 [Q, k] -> [Q, H * C].

    q [Q, H, C] are the last Q positions of k and v [K, S, C].
    """
    (Q, S), parts = (len(q), k.shape[1]), []
    first, count = S - Q, queries_at_once(Q, S)
    for queries, blocks in zip(q.split(count), chosen.split(count), strict=True):
        end = first + len(queries)
        positions = torch.arange(first, end, device=q.device).unsqueeze(0)
        visible = is_chosen(blocks.unsqueeze(0), positions, ratio, end)
        bias = torch.where(visible, 0.0, float("-inf")).to(q.dtype)
        parts.append(attend(queries.unsqueeze(0), k[None, :, :end], v[None, :, :end], bias)[0])
        first = end
    return torch.cat(parts)


@attend_chosen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, ratio: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def indexed_attention_recipes(args) -> Recipes:
    """A layer's gated attention and its index."""
    N, J, _, _ = args.index_sizes
    theirs = "self_attn.indexer."
    return gated_attention_recipes(args) | {
        "attention.windex.weight": copy_of(theirs + "index_qk_proj.weight", (N + 1) * J, args.dim),
        "attention.index_q_norm.weight": zero_centered(theirs + "q_layernorm.weight", J),
        "attention.index_k_norm.weight": zero_centered(theirs + "k_layernorm.weight", J),
    }
