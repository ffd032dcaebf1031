"""Compiled execution of a model with offloaded experts.

If the GPU schedules copies, a block is compiled as a whole. If the CPU does, a block is compiled in
two parts, and the host loads experts between them. One CUDA graph captures the second part of a
block and the first of the next. Prompts may choose more experts than slots; these run eagerly in
waves between the two parts.
"""

from torch import Tensor, nn

from model import Block, Context, MoE, Transformer
from offload.experts import OffloadedExperts, offloaded_layers
from runtime.graphs import run_on_host
from runtime.runner import CompiledRunner


class OffloadRunner(CompiledRunner):
    """Runs blocks with offloaded experts; other blocks as CompiledRunner does."""

    def __init__(self, model: Transformer, dynamic: bool = False):
        super().__init__(model, dynamic)
        self.compiled_route = self.compile(route_experts)
        self.compiled_multiply = self.compile(multiply_experts)
        layers = offloaded_layers(model)
        self.slots = layers[0].storage.slots
        self.needs_host = layers[0].table is None

    def can_capture(self, tokens: int) -> bool:
        return tokens * self.model.args.n_active <= self.slots

    def block(
        self, block: Block, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module
    ):
        if not isinstance(block.ffn, MoE):
            return super().block(block, x, normed, context, next_norm)
        experts = block.ffn.experts
        pairs = x.shape[0] * x.shape[1] * block.ffn.n_active
        if experts.table and experts.fits(pairs):
            return super().block(block, x, normed, context, next_norm)
        x, h, indices, weights, needed = self.compiled_route(block, x, normed, context)
        if not experts.fits(pairs):
            waves, predicted = experts.plan_waves(needed, pairs)
            if len(waves) > 1:
                y = experts.multiply_in_waves(block.ffn.expert_input(h), indices, weights, waves)
                return *finish_block(block, x, h, y, next_norm), indices, weights
            experts.load_wave(waves[0], predicted)
        else:
            run_on_host(lambda: experts.load_chosen(needed, pairs))
        x, normed = self.compiled_multiply(
            block, x, h, indices, weights, experts.slot_map, next_norm
        )
        return x, normed, indices, weights


def route_experts(block: Block, x: Tensor, normed: Tensor, context: Context):
    """Run `Block.forward` up to the experts.

    Return x, the experts' input h [T, D], expert_indices, expert_weights [T, A], and the ids that
    the host needs.
    """
    x, h = block.add_attention(x, block.attention(normed, context), block.ffn_norm)
    h = h.flatten(0, 1)
    expert_indices, expert_weights = block.ffn.route(block.ffn.router(h))
    needed = block.ffn.experts.needed_ids(h, expert_indices)
    return x, h, expert_indices, expert_weights, needed


def multiply_experts(
    block: Block,
    x: Tensor,
    h: Tensor,
    expert_indices: Tensor,
    expert_weights: Tensor,
    slot_map: Tensor,
    next_norm: nn.Module,
):
    """Run the rest of `Block.forward` -> x, its next_norm."""
    experts: OffloadedExperts = block.ffn.experts
    y = experts.multiply(block.ffn.expert_input(h), expert_indices, expert_weights, slot_map)
    return finish_block(block, x, h, y, next_norm)


def finish_block(block: Block, x: Tensor, h: Tensor, y: Tensor, next_norm: nn.Module):
    return block.add_ffn(x, block.ffn.merge(h, y), next_norm)
