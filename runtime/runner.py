"""How the stages of a forward pass are executed: eagerly, compiled, or captured as CUDA graphs."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from model import COUNTING_SORT_MAX_TOKENS, Block, Chunk, Context, Runner, Transformer
from runtime.sampling import make_sample_step

SHORT_CHUNK = COUNTING_SORT_MAX_TOKENS  # tokens of a short prompt that run at once


class EagerRunner(Runner):
    """Runs each stage eagerly. A session asks a runner what it may capture."""

    needs_host = False  # the host takes part in a step, layer by layer
    # A captured session pads a chunk of a short prompt to one of these numbers of tokens, in rising
    # order.
    short_chunks: tuple[int, ...] = (SHORT_CHUNK,)

    def __init__(self, model: Transformer):
        self.model = model

    def can_capture(self, tokens: int) -> bool:
        """Whether a call of this many tokens can be captured as CUDA graphs."""
        return True

    def sample_step(self, rule: Callable) -> Callable:
        """Return `make_sample_step(rule)` as this runner executes it."""
        return make_sample_step(rule)


class InterruptedRunner(Runner):
    """Runs each stage by another runner, and calls `between` after each block."""

    def __init__(self, runner: Runner, between: Callable[[], None]):
        self.runner, self.between = runner, between

    def begin(self, model: Transformer, tokens: Tensor, span: Tensor | Chunk):
        return self.runner.begin(model, tokens, span)

    def block(
        self, block: Block, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module
    ):
        found = self.runner.block(block, x, normed, context, next_norm)
        self.between()
        return found

    def logits(self, model: Transformer, normed: Tensor, last: Tensor | None) -> Tensor:
        return self.runner.logits(model, normed, last)


class CompiledRunner(EagerRunner):
    """Compiles each stage once; equal blocks share one compiled function.

    dynamic: compile for any number of tokens (prompts) instead of one shape (decoding).
    """

    def __init__(self, model: Transformer, dynamic: bool = False):
        super().__init__(model)
        self.compile = partial(torch.compile, fullgraph=True, dynamic=dynamic)
        self.compiled_begin = self.compile(type(model).begin)
        self.compiled_block = self.compile(run_block)
        self.compiled_logits = self.compile(type(model).logits)

    def sample_step(self, rule: Callable) -> Callable:
        return torch.compile(make_sample_step(rule), fullgraph=True, dynamic=False)

    def begin(self, model: Transformer, tokens: Tensor, span: Tensor | Chunk):
        return self.compiled_begin(model, tokens, span)

    def block(
        self, block: Block, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module
    ):
        return self.compiled_block(block, x, normed, context, next_norm)

    def logits(self, model: Transformer, normed: Tensor, last: Tensor | None) -> Tensor:
        return self.compiled_logits(model, normed, last)


def run_block(block: Block, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module):
    """Call a block of any class: one function to compile, since families subclass Block."""
    return block.forward(x, normed, context, next_norm)
