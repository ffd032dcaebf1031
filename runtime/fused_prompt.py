"""A long prompt's chunk: library products and SDPA, and kernels of ours for all else.

PyTorch alone takes about seventy kernels a layer, most of which read and write all rows of all
experts once more. `torch.compile` fuses them, too, but compiles for half a minute
(`--compile_prefill`).
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import (
    AddNorm,
    Block,
    Chunk,
    Context,
    Experts,
    KVCache,
    Linear,
    MoE,
    RMSNorm,
    Transformer,
)
from ops.attention.prompts import HEAD_DIMS, Places, attend_prompt, attends_prompt, prompt_heads
from ops.attention.prompts import KERNELS as HEADS
from ops.attention.recurrent_parts import gate_prompt_heads
from ops.declared import Activation, SumAdditions
from ops.launch import can_launch
from ops.plain.attention import attend_chunk
from ops.plain.ring import past_of_chunk, ring_of
from ops.products.fixed_join import NextNorm, fixed_join
from ops.products.join import NOTHING, Added
from ops.products.prompt import grouped_gemm, grouped_mm, prefers_kernel
from ops.products.prompt_rows import (
    KERNELS,
    PairResults,
    activate_rows,
    combine_rows,
    gather_rows,
    group_pairs,
    in_order,
)
from ops.products.routing import route
from runtime.fused_attention import FusedDecodeAttention, projections_of
from runtime.fused_head import FusedHead
from runtime.fused_layer import FusedExperts, FusedFeedForward, FusedLayer
from runtime.plain_forms import settings_of, undeclared
from runtime.runner import EagerRunner, without_broken_kernels

ALL_KERNELS = *KERNELS, *HEADS, "_route", "join_tokens", "_grouped"
FEWEST = 32  # tokens of a chunk that kernels take; fewer run eagerly
# Most tokens and most positions of a chunk that is run by its positions. For more tokens the GPU
# takes longer than the host for the launches; for more positions SDPA is faster.
MOST_TOKENS, MOST_POSITIONS = 1024, 8192


@contextmanager
def state_of_its_own(attention: nn.Module, rows: int, like: Tensor) -> Iterator[None]:
    """Within, a recurrent layer has a new state of these rows. Other layers have none."""
    if not hasattr(attention, "make_state"):
        yield
        return
    kept, attention.state = attention.state, attention.make_state(rows, like)
    try:
        yield
    finally:
        attention.state = kept


class ExpertRows:
    """A stacked expert weight for rows sorted by expert: its product, without its bias."""

    def __init__(self, module: nn.Module):
        self.module, self.bias = module, getattr(module, "bias", None)
        self.packed, self.width = hasattr(module, "column_order"), getattr(module, "width", None)

    def columns(self, like: Tensor) -> Tensor | None:
        """Return the order in which the product reads its x, as in `gather_rows`."""
        return self.module.column_order(like) if self.packed else None

    def activate(
        self, x: Tensor, pairs: Tensor, indices: Tensor, group_ends: Tensor, **results
    ) -> Tensor:
        """Multiply x [T, in] of each row's token, add the bias, activate -> [N, I].

        x is in the order of `columns`. pairs: integers [N], sorted by expert; indices [T, A].
        results: `activation` and `columns`, as in `grouped_gemm`.
        """
        rows = dict(pairs=pairs, active=indices.shape[1])
        if self.columns(x) is not None:
            rows |= dict(bias=self.bias, **results)
            return self.module.multiply_tokens(x, group_ends, **rows)
        if not self.packed and prefers_kernel(x, len(pairs), self.module.weight, fused=True):
            weight = {"codes": self.module.weight}, "plain", 8 * x.element_size(), 1
            return grouped_gemm(x, group_ends, *weight, **rows, bias=self.bias, **results)
        both = self.multiply(gather_rows(x, **rows, columns=None), group_ends)
        return activate_rows(both, bias=self.bias, pairs=pairs, experts=indices, **results)

    def multiply(self, x: Tensor, group_ends: Tensor) -> Tensor:
        """x [N, in] in the order of `columns`, group_ends int32 [E] -> [N, out]."""
        if self.packed:
            return self.module.multiply_ordered(x, group_ends)
        return grouped_mm(x, self.module.weight, group_ends)


def project(linear: nn.Module, x: Tensor) -> Tensor:
    """`linear(x)`, with a plain layer's bias in the epilogue of the library's product."""
    return F.linear(x, linear.weight, linear.bias) if type(linear) is Linear else linear(x)


class DenseRows:
    """A dense weight without a bias for rows in the order in which its product reads them."""

    def __init__(self, linear: nn.Module):
        self.linear = linear

    def columns(self, like: Tensor) -> Tensor | None:
        """As in `ExpertRows`; like [T, in]."""
        linear = self.linear
        if not hasattr(linear, "column_order") or linear.unpacks(like):
            return None
        return linear.column_order(like)

    def multiply(self, x: Tensor) -> Tensor:
        """x [T, in] in the order of `columns` -> [T, out]."""
        if self.columns(x) is None:
            return project(self.linear, x)
        return self.linear.multiply_ordered(x, None)

    def activate(self, x: Tensor, **results) -> Tensor:
        """Multiply x [.., T, in] and activate -> [T, I]. results: as in `ExpertRows.activate`."""
        columns = self.columns(x.flatten(0, -2))
        if columns is None or self.linear.bias is not None:
            return activate_rows(project(self.linear, x).flatten(0, -2), **results)
        return self.linear.multiply_tokens(in_order(x, columns), None, **results)


class DenseRowsOfFFN:
    """A shared expert, without its gate, or a dense FFN for a prompt's chunk."""

    def __init__(self, ffn: nn.Module, activation: Activation):
        self.w13, self.w2, self.activation = DenseRows(ffn.w13), DenseRows(ffn.w2), activation

    def forward(self, x: Tensor) -> Tensor:
        """x [.., T, D] -> [T, D]."""
        columns = self.w2.columns(x.flatten(0, -2))
        return self.w2.multiply(self.w13.activate(x, activation=self.activation, columns=columns))


class PromptLayer:
    """A block for a chunk of a prompt. Raises ValueError for one that it does not compute."""

    def __init__(self, block: Block, layer: FusedLayer):
        if layer.experts.sum.all_reduce or layer.experts.before.all_reduce:
            raise ValueError("several ranks sum by kernels of their own")
        if not isinstance(layer.experts, FusedExperts | FusedFeedForward):
            raise ValueError("no kernels for a block without an FFN")
        self.block, self.activation = block, layer.experts.activation
        self.attention = layer.attention.attention
        self.is_dense, self.resident = isinstance(layer.experts, FusedFeedForward), False
        if not self.is_dense:
            experts = block.ffn.experts
            self.resident = isinstance(experts, Experts)  # else in host memory
            self.routing = replace(layer.experts.routing, shared=0, gated=False)
        self.dense: DenseRowsOfFFN | None = None  # a shared expert, or all of a dense FFN
        if self.is_dense:
            self.dense = DenseRowsOfFFN(block.ffn, self.activation)
        if self.resident:
            self.w13, self.w2 = ExpertRows(experts.w13), ExpertRows(experts.w2)
            shared, self.gate = layer.experts.shared, layer.experts.gate
            if shared is not None and layer.experts.dense is None:
                self.dense = DenseRowsOfFFN(shared, self.activation)
        self.adds = block.add_attention, block.add_ffn
        self.sums = [settings_of(add, AddNorm, SumAdditions) for add in self.adds]
        # What reads a norm's result, by the norm's id: `PromptRunner` knows all blocks' norms.
        self.readers: dict[int, ExpertRows | DenseRows] = {}

    @property
    def takes_positions(self) -> bool:
        """Whether a chunk may be one at positions that the host does not know."""
        attention = self.attention
        if not isinstance(attention, FusedDecodeAttention):
            return hasattr(self.block.attention, "settle")  # a recurrent state
        is_plain = type(attention.cache) in (KVCache, ring_of(KVCache))
        return attention.supported and is_plain and attention.heads[2] in HEAD_DIMS

    def attend(self, normed: Tensor, context: Context) -> Tensor:
        """`Attention.forward` of a chunk, normed [1, T, D]."""
        attention = self.attention
        if not isinstance(attention, FusedDecodeAttention) or not attention.supported:
            return self.block.attention(normed, context)
        projected = project(attention.projection, normed)[0]
        q, k, v = self.append(projected, context)
        given = q, k, v, attention.window, attention.sinks
        if context.chunk is None:
            ring = type(attention.cache) is not KVCache
            heads = attend_prompt(*given, context.positions[0, :1], ring)
        elif attends_prompt(q, k.shape[1], attention.window, attention.sinks):
            heads = attend_prompt(*given)
        else:
            heads = attend_chunk(*given)
        if attention.gate:
            gate = projected[:, attention.first_gate :]
            heads = gate_prompt_heads(heads, gate, attention.gate.activation)
        return project(attention.wo, heads.unsqueeze(0))

    def append(self, projected: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """projected [T, out] -> queries [T, H, C], and keys and values as the cache returns them.

        Plain caches, rings among them, are written by the kernel that prepares heads.
        """
        attention, chunk, T = self.attention, context.chunk, len(projected)
        cache, (_, K, C) = attention.cache, attention.heads
        q_norm, k_norm = attention.norm_weights()
        given = projected, context.rope, q_norm, k_norm, attention.settings
        is_ring = type(cache) is ring_of(KVCache)
        if chunk is None:
            places = Places(cache=cache.kv, begin=context.positions[0, :1])
            if not is_ring:
                return prompt_heads(*given, places), *cache.kv[:, 0].unbind()
            places = places._replace(kv=projected.new_empty(T, 2, K, C), last=context.last)
            past = past_of_chunk(cache.kv, None, places.begin)
            q, kv = prompt_heads(*given, places), places.kv.permute(1, 2, 0, 3)
            return q, *torch.cat((past, kv), 2).unbind()
        begin = chunk.end - T
        if type(cache) is KVCache:
            q = prompt_heads(*given, Places(cache=cache.kv, row=chunk.row), begin)
            return q, *cache.of_chunk(cache.kv, chunk).unbind()
        places = Places(projected.new_empty(T, 2, K, C))
        if not is_ring:
            q = prompt_heads(*given, places)
            return q, *cache.append(places.kv.unsqueeze(0), context)
        past = past_of_chunk(cache.kv, chunk.row, begin) if begin else None
        places = places._replace(cache=cache.kv, row=chunk.row, last=context.last)
        q, kv = prompt_heads(*given, places, begin), places.kv.permute(1, 2, 0, 3)
        return q, *(kv if past is None else torch.cat((past, kv), 2)).unbind()

    def run_ffn(
        self, normed: Tensor, last: Tensor | None
    ) -> tuple[Tensor | PairResults, Tensor | None, Tensor | None]:
        """Do what the FFN does: normed [1, T, D] -> y, expert_indices, expert_weights [T, A].

        y may be results of pairs, whose sum is left to the kernel that adds it to the residual.
        last: as in `Context`. Experts do not compute padding, whose y is any finite one.
        """
        ffn, x = self.block.ffn, normed.flatten(0, 1)
        if self.is_dense:
            return self.dense.forward(normed), None, None
        indices, weights = route(project(ffn.router, x), self.routing)
        given = ffn.expert_input(x)
        if not self.resident:
            return ffn.merge(x, ffn.experts(given, indices, weights)), indices, weights
        w13, w2 = self.w13, self.w2
        order, places, group_ends = group_pairs(indices, ffn.experts.n_expert, last)
        results = dict(activation=self.activation, columns=w2.columns(given))
        columns = w13.columns(given)
        ordered = given
        if columns is not None:
            ordered = in_order(normed if given is x else given, columns)
        hidden = w13.activate(ordered, order, indices, group_ends, **results)
        parts = w2.multiply(hidden, group_ends)
        rows = parts, places, indices, weights, w2.bias
        if self.dense is not None:
            gate = None if self.gate is None else (x, self.gate.weight)
            rows = *rows, self.dense.forward(normed), gate
        elif type(ffn).merge is not MoE.merge:
            return ffn.merge(x, combine_rows(*rows)), indices, weights
        return PairResults(*rows), indices, weights

    def first_product(self) -> ExpertRows | DenseRows:
        """Return the product that reads the norm before attention."""
        (name, *_), _ = projections_of(self.block.attention)
        return DenseRows(getattr(self.block.attention, name))

    def add(
        self, n: int, x: Tensor, y: Tensor | PairResults, norm: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """`AddNorm` number n of the block. The norm is stored in its reader's order, too."""
        added, is_plain = self.sums[n], not undeclared(norm, RMSNorm)
        if isinstance(y, PairResults) and not (is_plain and added.norm is None):
            y = combine_rows(*y)
        if not is_plain or added.branch_norms:
            return self.adds[n](x, y, norm)
        after = NextNorm(norm.weight, None, norm.eps)
        columns = None
        if reader := self.readers.get(id(norm)):
            columns = reader.columns(x.flatten(0, -2))
        if added.norm is None:
            options = dict(scale=added.scale, columns=columns)
            if isinstance(y, PairResults):
                return fixed_join(x, NOTHING, after, pairs=y, **options)[:2]
            return fixed_join(x, Added(y=y.view_as(x)), after, **options)[:2]
        y = y.view_as(x)
        if added.norm.eps != norm.eps:
            return self.adds[n](x, y, norm)
        branch = Added(y=y.unsqueeze(0), norm=added.norm.weight, scalar=added.scalar)
        return fixed_join(x, branch, after, columns=columns)[:2]

    def forward(self, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module):
        """`Block.forward` of a chunk."""
        x, h = self.add(0, x, self.attend(normed, context), self.block.ffn_norm)
        y, *routing = self.run_ffn(h, context.last)
        return *self.add(1, x, y, next_norm), *routing


class PromptRunner(EagerRunner):
    """Runs chunks of prompts by `PromptLayer`, all else eagerly."""

    def __init__(self, model: Transformer, fused: dict[int, FusedLayer], head: FusedHead | None):
        """fused: layers by the id of their block. head: None if no kernel computes it."""
        super().__init__(model)
        self.layers, self.head = {}, head
        for block in model.layers:
            try:
                if id(block) in fused:
                    self.layers[id(block)] = PromptLayer(block, fused[id(block)])
            except ValueError:
                continue
        readers = {}
        for layer in self.layers.values():
            readers[id(layer.block.attention_norm)] = layer.first_product()
            # Experts of another width have an x of their own.
            if layer.resident and layer.w13.width == model.args.dim:
                readers[id(layer.block.ffn_norm)] = layer.w13
        for layer in self.layers.values():
            layer.readers = readers

    @property
    def runs_long_chunks(self) -> bool:
        """Whether memory may hold long chunks: not with experts in host memory, which take it."""
        return bool(self.layers) and all(layer.resident for layer in self.layers.values())

    def takes_positions(self, tokens: int, end: int) -> bool:
        """Whether kernels take this many tokens of row 0 by their positions, up to `end`.

        One graph then serves all positions: else a chat's later turns would never be replayed.
        """
        few = tokens <= MOST_TOKENS and end <= MOST_POSITIONS
        return few and self.layers_take_positions and self.runs(self.model.embedding.weight)

    @cached_property
    def layers_take_positions(self) -> bool:
        """Whether all layers do. Asking 48 of them takes the host 0.1 ms."""
        layers = [self.layers.get(id(block)) for block in self.model.layers]
        is_plain = type(self.model).begin is Transformer.begin
        return is_plain and all(layer and layer.takes_positions for layer in layers)

    def runs(self, like: Tensor) -> bool:
        """Whether kernels run on the device of `like`, in its dtype."""
        return like.element_size() == 2 and can_launch(like, *ALL_KERNELS)

    def takes(self, x: Tensor, context: Context) -> bool:
        """Whether kernels take a chunk x [1, T, D]."""
        is_chunk = context.chunk is not None or context.masks is None
        return is_chunk and x.shape[1] >= FEWEST and self.runs(x)

    def begin(self, model: Transformer, tokens: Tensor, span: Tensor | Chunk):
        """A chunk at positions `span` has no masks."""
        if isinstance(span, Chunk):
            return super().begin(model, tokens, span)
        x, rope = model.embed(tokens), model.rope_table[span].unsqueeze(2)
        return x, model.layers[0].attention_norm(x), Context(rope, positions=span)

    def launch_chunk(self, blocks: Sequence[Block], tokens: int, span: Tensor | Chunk) -> None:
        """Launch the kernels of these blocks for a chunk, and the head's: for `collect_only`.

        span: as in `begin`; its row is the first one.
        """
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=self.model.norm.weight.device)
        x, normed, context = self.begin(self.model, ids, span)
        context = context._replace(last=ids[0, :1])
        # The norm before another block is stored in the order of its product, too.
        norms = [block.attention_norm for block in blocks] + [self.model.norm]
        for block, next_norm in itertools.product(blocks, norms):
            with state_of_its_own(block.attention, 1, x):
                self.block(block, x, normed, context, next_norm)
        self.logits(self.model, normed, context.last)

    def with_masks(self, context: Context) -> Context:
        """Return the context of a chunk for a block that kernels do not compute."""
        if context.chunk is not None:
            return context
        masks = {w: self.model.mask(context.positions, w) for w in self.model.windows}
        return context._replace(masks=masks)

    def block(
        self, block: Block, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module
    ):
        layer = self.layers.get(id(block))

        def run(*arguments):
            if layer and self.takes(x, context):
                return layer.forward(*arguments)
            return block(x, normed, self.with_masks(context), next_norm)

        return without_broken_kernels(run, x, normed, context, next_norm)

    def logits(self, model: Transformer, normed: Tensor, last: Tensor | None) -> Tensor:
        """One token's logits: a packed head is not unpacked for it."""
        head = self.head
        if head is None or last is None or len(normed) > 1 or normed.element_size() != 2:
            return super().logits(model, normed, last)

        def run():
            if can_launch(normed, "_multiply_sum"):
                return head.of_normed(normed[0].index_select(0, last))
            return model.logits(normed, last)

        return without_broken_kernels(run)
