"""Compiled execution of a model with offloaded experts.

A block whose tokens' experts fit into the slots is compiled as a whole, or runs the fused kernels,
and is captured. Prompts may choose more experts than slots: the host reads their choice, so that
the experts run eagerly between two compiled parts of the block.
"""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from model import Block, Context, MoE, Transformer
from offload.experts import OffloadedExperts, offloaded_layers
from ops.products import experts as moe_decode
from ops.products.join import norm_router
from ops.products.routing import route
from ops.step.cpu_share import MAX_TOKENS, answer
from ops.step.expert_paging import find_experts
from runtime.fused_decode import FusedRunner
from runtime.fused_layer import FusedExperts, FusedLayer, kernel_weight
from runtime.runner import CompiledRunner, share_code


class OffloadRunner(CompiledRunner):
    """Runs blocks whose experts may not fit into the slots in waves, all else as CompiledRunner."""

    is_fused = False  # as in FusedRunner

    def __init__(self, model: Transformer, dynamic: bool = False):
        super().__init__(model, dynamic)
        self.offloaded = offloaded_layers(model)
        self.compiled_route = self.compile(route_experts)

    def can_capture(self, tokens: int) -> bool:
        """Whether calls of this many tokens need nothing of the host's Python."""
        active = self.model.args.n_active
        return super().can_capture(tokens) and all(
            layer.is_capturable and layer.fits(tokens, active) for layer in self.offloaded
        )

    def block(
        self, block: Block, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module
    ):
        ffn, tokens = block.ffn, x.shape[0] * x.shape[1]
        if self.is_fused or not isinstance(ffn, MoE) or ffn.experts.fits(tokens, ffn.n_active):
            return super().block(block, x, normed, context, next_norm)
        share_code(x, normed, context=context)
        x, h, indices, weights = self.compiled_route(block, x, normed, context)
        y = ffn.experts(ffn.expert_input(h), indices, weights)
        x, normed = block.add_ffn(x, ffn.merge(h, y), next_norm)
        return x, normed, indices, weights


class FusedOffloadRunner(OffloadRunner, FusedRunner):
    """Runs a few tokens by the fused kernels, which read slots; all else as OffloadRunner."""

    def __init__(self, model: Transformer, dynamic: bool = False):
        super().__init__(model, dynamic)
        fitting = [n for n in range(1, MAX_TOKENS + 1) if self.takes_tokens(n)]
        self.max_tokens, self.prompt_chunks = max(fitting, default=1), ()
        self.short_chunks = CompiledRunner.short_chunks

    @cached_property
    def kinds(self) -> dict[int, int]:
        # Their experts refer to all layers', so that comparing them would take long.
        return {id(layer): number for number, layer in enumerate(self.layers.values())}

    @staticmethod
    def make_layer(block: Block) -> FusedLayer:
        offloaded = isinstance(block.ffn, MoE) and isinstance(block.ffn.experts, OffloadedExperts)
        return FusedLayer(block, FusedOffloadedExperts if offloaded else FusedExperts)


def route_experts(block: Block, x: Tensor, normed: Tensor, context: Context):
    """Run `Block.forward` up to the experts.

    Return x, the experts' input h [T, D], expert_indices, expert_weights [T, A].
    """
    x, h = block.attend(x, normed, context)
    h = h.flatten(0, 1)
    return x, h, *block.ffn.route(block.ffn.router(h))


class FusedOffloadedExperts(FusedExperts):
    """`FusedExperts` over slots: the choice of experts has a kernel of its own, and so has paging.

        norm_router    norm, scores
        route          the choice
        place, ask     hits and misses; the CPU's share is requested
        fetch          the other misses are copied
        gate_up, down  a shared expert
        gate_up, down  products of the experts in slots
        answer         plus the CPU's sum, plus residual

    A shared expert is always apart: the pool has no place for it.
    """

    def __init__(self, block: Block):
        self.offloaded: OffloadedExperts = block.ffn.experts
        super().__init__(block)
        if self.before.all_reduce or self.sum.all_reduce:
            raise ValueError("no kernels for offloaded experts on several ranks")
        if self.shared is not None:
            self.apart = kernel_weight(self.shared.w13), kernel_weight(self.shared.w2)
            self.routing = replace(self.routing, shared=0)

    def experts_of(self, ffn: MoE) -> nn.Module:
        return self.offloaded.experts

    def takes_tokens(self, tokens: int) -> bool:
        """Whether the kernels take this number of tokens: their experts fit into the slots."""
        return tokens <= MAX_TOKENS and self.offloaded.fits(tokens, self.routing.active)

    def prepare(self) -> None:
        """Make the shared expert's gate the router's last row."""
        if self.gate is not None:
            self.rows = torch.cat((self.router.weight, self.gate.weight))

    def forward(
        self, x: Tensor, attended: Tensor, last: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`FusedExperts.forward`, except that padding has experts too."""
        x, y, added = self.before.before_norm(x, attended)
        plain = torch.empty_like(y)
        normed, scores = norm_router(y, self.normed_router, self.w13, plain=plain, **added)
        plain = normed if isinstance(normed, Tensor) else plain
        indices, weights = route(scores, self.routing)
        layer = self.offloaded
        box = layer.mailbox(len(plain))
        table = layer.cache.table(box is not None)
        found = find_experts(indices, plain, weights, table, layer.storage.slots, box)
        layer.fill_slots(found.to_copy, found.targets.flatten())
        add, branches = self.branches(x)
        if self.apart:
            add |= {"residual": self.add_shared(plain, scores, add)}
        slots, kept = found.slots, found.weights
        h = moe_decode.multiply_each(normed, self.w13, slots, self.activation, self.bias13)
        options = {"dtype": torch.float32} if box else {"dtype": plain.dtype, **add}
        y = moe_decode.down(h, self.w2, slots, kept, bias=self.bias2, **options)
        if box:
            y = answer(y, box, plain.dtype, **add)
        return self.sum.add(x, y if branches is None else branches), indices, weights
