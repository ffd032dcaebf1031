"""Decode a few tokens by fused layers (runtime/fused_layer.py), then sample by kernels of ours.

`FusedRunner` launches the kernels directly: a session captures the step as a CUDA graph, so that
Python's launches cost nothing. It runs up to MAX_FEW tokens: those of several sequences' steps
[B, 1] or passes [B, Q]; and PROMPT_CHUNKS of a prompt. After the layers, one token's norm
and head are one product, and sampling is three kernels (ops/step/token_draw.py). Everything else
runs the compiled blocks, which are the reference that tests compare with.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from model import Block, Chunk, Context, RMSNorm, Transformer
from ops.inductor import materialize
from ops.launch import KernelError, can_launch, compile_only, give_up
from ops.products.join import norm_tokens
from ops.products.prompt_rows import gather_rows
from ops.step import draft_check
from ops.step.logit_edits import edit_logits
from ops.step.token_draw import Drafts, draw_tokens
from runtime.draft_choice import DRAFT_STREAM
from runtime.fused_attention import FusedDecodeAttention
from runtime.fused_head import fused_head
from runtime.fused_layer import MAX_FEW, FusedLayer, fused_layers
from runtime.fused_pairs import begin_pairs
from runtime.fused_prompt import PromptRunner, state_of_its_own
from runtime.layer_kinds import kinds_of
from runtime.logit_edits import EditState
from runtime.plain_forms import undeclared
from runtime.runner import CompiledRunner, share_code, without_broken_kernels
from runtime.sampling import MAX_CANDIDATES, StepState, sample
from runtime.verification import ACCEPT_STREAM

PROMPT_CHUNKS = 8, 32, 64  # tokens of a prompt's chunk
# Embedding, RoPE and masks do not depend on each other: Inductor makes one kernel of them.
BEGIN_OPTIONS = {"combo_kernels": True}
NO_NORM = nn.Identity()


def run_unfused(block: Block, x: Tensor, context: Context, next_norm: nn.Module):
    """Call a block that has no kernels: x [B, Q, D], not normed -> x, indices, weights."""
    normed = materialize(block.attention_norm(x))
    x, _, *routing = block.forward(x, normed, context, next_norm)
    return x, *routing


def before_attention(block: Any, x: Tensor, context: Context) -> tuple[tuple, Tensor]:
    """Return what replaces the residual x in a block with mixers, and its norm."""
    return block.before_attention(x, materialize(block.attention_norm(x)), context)


def before_ffn(block: Any, x: tuple, y: Tensor) -> tuple[tuple, Tensor]:
    return block.before_ffn(x, y)


def run_combine(mixer: Any, normed: Tensor, products: Tensor) -> Tensor:
    return mixer.combine(normed, products)


def after_ffn(block: Block, x: tuple, y: Tensor) -> Tensor:
    """Return the residual after a block with mixers."""
    return block.add_ffn(x, y, NO_NORM)[0]


def begin_rows(model: Transformer, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return embeddings x [B, Q, D] and RoPE [B, Q, 1, R] of tokens at positions, int64 [B, Q].

    Inductor would take seconds to import and to compile that.
    """
    x = gather_rows(model.embedding.weight, tokens.flatten(), 1, None)
    rope = gather_rows(model.rope_table, positions.flatten(), 1, None)
    return x.view(*tokens.shape, -1), rope.view(*tokens.shape, 1, -1)


def begin_plainly(model: Transformer, tokens: Tensor, span: Tensor) -> tuple[Tensor, Context]:
    x, _, context = model.begin(tokens, span)
    return x, context


def end_tokens(model: Transformer, x: Tensor, last: Tensor | None) -> Tensor:
    return model.logits(materialize(model.norm(x)), last)


def last_norm(model: Transformer, x: Tensor) -> Tensor:
    return model.norm(x)


def run_core(attention: nn.Module, projected: Tensor, context: Context) -> Tensor:
    # Contiguous, as `down` reads it.
    return attention.core(projected, context).contiguous()


def begin_kernels(model: Transformer, layers: Collection[FusedLayer]) -> Callable | None:
    """Return `begin_rows` or what replaces it; None, if no kernels begin.

    They do for plain embeddings and those of a head, if kernels compute attention in all layers.
    """
    attentions = [layer.attention.attention for layer in layers]
    if len(attentions) < len(model.layers) or not all(hasattr(a, "takes") for a in attentions):
        return None
    if (type(model).begin, type(model).embed) == (Transformer.begin, Transformer.embed):
        return partial(begin_rows, model)
    return begin_pairs(model)


def norm_rows(model: Transformer, x: Tensor) -> Tensor:
    """Return the model's last norm of x [B, Q, D]."""
    return norm_tokens(x.flatten(0, 1), model.norm.weight, model.norm.eps).view_as(x)


def take_last(x: Tensor, last: Tensor) -> Tensor:
    """x [1, Q, D], last int64 [1] -> that query's [1, 1, D]; of an idle row any query's."""
    return gather_rows(x[0], last, 1, None).unsqueeze(0)


def draw_draft(state: StepState, logits: Tensor, drafts: Drafts, *rest) -> None:
    """`choose_draft` by kernels."""
    part, candidates, certain = rest
    ids = None if part is None else part.ids
    draw_tokens(logits, state, ids, drafts, candidates == 0, certain, DRAFT_STREAM)


def is_all_kernels(layer: FusedLayer, x: Tensor, context: Context) -> bool:
    """Whether no part of a layer is compiled by Inductor, which may compile it for each layer."""
    attention = layer.attention.attention
    return hasattr(attention, "takes") and attention.takes(x, context)


def launch_core(
    layer: FusedLayer, attention: nn.Module, projected: Tensor, context: Context
) -> Tensor:
    """Launch the kernels that a recurrent layer's `core` has in eager code: for prompts.

    It writes a state, which is one of its own here. Other layers have none in their `core`.
    """
    if hasattr(attention, "make_state"):
        with state_of_its_own(attention, len(projected), projected):
            run_core(attention, projected, context)
    return layer.attention.empty_heads(attention, projected, context)


class FusedRunner(CompiledRunner):
    """Runs up to `max_tokens` tokens through fused layers, all else as CompiledRunner.

    Between fused layers x is not normed: each begins with its own norm.
    """

    def __init__(self, model: Transformer, dynamic: bool = False):
        super().__init__(model, dynamic)
        self.is_fused = False  # the call in progress runs the kernels
        self.is_prompt = False  # it has more tokens than a step has
        self.checked: dict[Hashable, bool] = {}  # of `runs`
        # Within `warming_up`: the routing of a block of each kind.
        self.warmed: dict[int, Sequence] | None = None
        layers = fused_layers(model, self.make_layer)
        self.layers = {id(block): layer for block, layer in layers.items()}
        for layer in self.layers.values():
            layer.experts.prepare()
        self.head = fused_head(model)
        # A batch and drafts have up to max_tokens, and a prompt's chunk one of short_chunks: its
        # padding reads no experts, so that more sizes would save little.
        self.max_tokens = MAX_FEW if self.takes_tokens(MAX_FEW) else 1
        self.prompt_chunks = tuple(size for size in PROMPT_CHUNKS if self.takes_tokens(size))
        self.short_chunks = self.prompt_chunks or self.short_chunks
        self.begin_kernels = begin_kernels(model, layers.values())
        self.norm_is_plain = not undeclared(model.norm, RMSNorm)
        self.chooses_by_kernels = can_launch(model.norm.weight)
        self.compiled_begin_tokens = self.compile_few(begin_plainly, options=BEGIN_OPTIONS)
        self.compiled_end_tokens = self.compile_few(end_tokens)
        self.compiled_norm = self.compile_few(last_norm)
        compiled_core, compiled_combine = map(self.compile_few, (run_core, run_combine))

        def core(attention: nn.Module, projected: Tensor, context: Context) -> Tensor:
            if hasattr(attention, "fused_core"):  # of more tokens: its own kernels, in eager code
                return run_core(attention, projected, context)
            share_code(projected, context=context)
            return compiled_core(attention, projected, context)

        def combine(mixer: nn.Module, normed: Tensor, products: Tensor) -> Tensor:
            share_code(normed, products)
            return compiled_combine(mixer, normed, products)

        self.compiled_core, self.compiled_combine = core, combine
        self.compiled_unfused = self.compile_few(run_unfused)
        self.before_attention = self.compile_few(before_attention)
        self.before_ffn = self.compile_few(before_ffn)
        self.after_ffn = self.compile_few(after_ffn)

    def compile_few(self, function: Callable, **options) -> Callable:
        """Compile a function for a step's tokens. For more tokens, of a prompt, it runs eagerly.

        These calls are captured, too, and compiling them would delay the first token by seconds.
        """
        compiled = self.compile(function, **options)
        plain = partial(without_broken_kernels, function)
        return lambda *given: (plain if self.is_prompt else compiled)(*given)

    def prompt_runner(self) -> PromptRunner:
        return PromptRunner(self.model, self.layers, self.head)

    @property
    def all_reduces(self) -> bool:
        """Whether several ranks compute a layer."""
        return any(layer.experts.sum.all_reduce for layer in self.layers.values())

    @cached_property
    def kinds(self) -> dict[int, int]:
        """The kind of each layer by its id: layers of a kind launch the same kernels."""
        return dict(zip(map(id, self.layers.values()), kinds_of(self.layers.values()), strict=True))

    def launch_all(
        self, rows: int, queries: int, reach: int | None = None, all_positions: bool = False
    ) -> None:
        """Launch the kernels of a call of this shape, over nothing: for `launch.collect_only`.

        Those of one layer of each kind. all_positions: the head has all tokens, not one a row.
        """
        model, T = self.model, rows * queries
        tokens = torch.zeros(rows, queries, dtype=torch.int64, device=model.norm.weight.device)
        if self.begin_kernels is not None:
            self.begin_kernels(tokens, tokens)
        x = model.norm.weight.new_empty(T, model.args.dim, dtype=model.embedding.weight.dtype)
        rope = model.rope_table.new_empty(rows, queries, 1, model.rope_table.shape[1])
        context = Context(rope, positions=tokens, last=tokens[:, 0])
        for block in one_of_each_kind(self):
            layer = self.layers[id(block)]
            if layer.experts.takes_tokens(T):
                layer.forward(x, context, partial(launch_core, layer), reach)
        count = T if all_positions else rows
        if self.head is not None and count <= self.max_tokens:
            self.head.forward(x[:count])

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run one layer of each kind: Python takes 0.1 ms for a launch, and a model has hundreds.

        Layers of several ranks send to each other in turn, so that none is skipped.
        """
        self.warmed = None if self.all_reduces else {}
        try:
            yield
        finally:
            self.warmed = None

    @staticmethod
    def make_layer(block: Block) -> FusedLayer:
        """Return a block's kernels. Raises ValueError if it has none."""
        return FusedLayer(block)

    def takes_tokens(self, tokens: int) -> bool:
        """Whether all fused layers take this number of tokens."""
        return all(layer.experts.takes_tokens(tokens) for layer in self.layers.values())

    def reaches(self, queries: int, length: int) -> list[int | None]:
        attentions = (layer.attention.attention for layer in self.layers.values())
        fused = [each for each in attentions if isinstance(each, FusedDecodeAttention)]
        short = max((each.one_part(queries, length) for each in fused), default=0)
        return [short, None] if short else [None]

    def begin(self, model: Transformer, tokens: Tensor, span: Tensor | Chunk):
        is_prompt = len(tokens) == 1 and tokens.numel() in self.prompt_chunks
        is_few = tokens.numel() <= self.max_tokens
        self.is_fused = (is_prompt or is_few) and not isinstance(span, Chunk)
        self.is_prompt = tokens.numel() > MAX_FEW
        if not self.is_fused:
            return super().begin(model, tokens, span)
        if self.begin_kernels is not None and (found := self.begin_fused(tokens, span)):
            return found
        share_code(tokens, span)
        x, context = self.compiled_begin_tokens(model, tokens, span)
        return x, x, context

    def begin_fused(self, tokens: Tensor, span: Tensor):
        """Begin by kernels, if those of all layers run: then none reads masks."""
        launch = partial(self.begin_kernels, tokens, span)
        if not self.runs(("begin", tokens.shape), launch):
            return None
        x, rope = launch()
        context = Context(rope, positions=span)
        # `last` is not known yet. Any tensor stands for it: without one, kernels are others.
        checked = context._replace(last=span[:, 0])
        for layer in self.layers.values():
            attention = layer.attention.attention
            if getattr(attention, "reads_masks", True) and not attention.takes(x, checked):
                return None
            if not self.runs_layer(layer, x, checked):
                return None
        return x, x, context

    def block(
        self, block: Block, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module
    ):
        if not self.is_fused:
            return super().block(block, x, normed, context, next_norm)
        layer = self.layers.get(id(block))
        if layer is None or not self.runs_layer(layer, x, context):
            share_code(x, context=context)
            x, *routing = self.compiled_unfused(block, x, context, next_norm)
        elif layer.mixers:
            x, *routing = self.mix(block, layer, x, context)
        else:
            kind, warmed = self.kinds[id(layer)], self.warmed or {}
            if kind in warmed:
                return x, x, *warmed[kind]
            y, *routing = layer.forward(x.flatten(0, 1), context, self.compiled_core, self.reach)
            x = y.view_as(x)
            if self.warmed is not None and (self.is_prompt or is_all_kernels(layer, x, context)):
                self.warmed[kind] = routing
        return x, x, *routing

    def mix(self, block: Block, layer: FusedLayer, x: Tensor, context: Context):
        """Run a block with mixers: its own functions are compiled, and run between the kernels.

        x: the residual -> that after the block, expert_indices, expert_weights [T, A].
        """
        place, (first, second) = context.positions.shape, layer.mixers
        share_code(x, context=context)
        streams, normed = self.before_attention(block, x, context)
        rows = first.forward(normed, self.compiled_combine)
        y = layer.attention.forward(rows, context, self.compiled_core, self.reach)
        share_code(y := y.view(*place, -1), *streams)
        streams, normed = self.before_ffn(block, streams, y)
        rows = second.forward(normed, self.compiled_combine)
        y, *routing = layer.experts.forward(rows, rows, context.last)
        share_code(y := y.view(*place, -1), *streams)
        return self.after_ffn(block, streams, y), *routing

    def hidden(self, model: Transformer, normed: Tensor) -> Tensor:
        if not self.is_fused:
            return normed
        launch = partial(norm_rows, model, normed)
        if self.norm_is_plain and self.runs("norm", launch):
            return launch()
        share_code(normed)
        return self.compiled_norm(model, normed)

    def logits(self, model: Transformer, normed: Tensor, last: Tensor | None) -> Tensor:
        if not self.is_fused:
            return super().logits(model, normed, last)
        (B, Q), D = normed.shape[:2], normed.shape[-1]
        count = B * Q if last is None else B
        head = self.head if count <= self.max_tokens else None

        def launch() -> None:
            head.forward(normed.new_empty(count, D))

        if head is None or not self.runs(("head", count), launch):
            share_code(normed)
            return self.compiled_end_tokens(model, normed, last)
        x = normed
        if last is not None and Q > 1:
            # An idle row's last is -1.
            if B == 1:
                x = take_last(x, last)
            else:
                x = x[torch.arange(B, device=x.device), last].unsqueeze(1)
        if head.norm is None:
            x = self.hidden(model, x)
        return head.forward(x.flatten(0, 1)).view(*((B, Q) if last is None else (B,)), -1)

    def token_steps(self, rule: Callable) -> tuple[Callable, Callable, Callable]:
        compiled_edit, compiled_sample, compiled_draft = super().token_steps(rule)

        def edit_step(edits: EditState, state: StepState, logits: Tensor) -> Tensor:
            edit = partial(edit_logits, edits, state, logits)
            return edit() if self.runs("edits", edit) else compiled_edit(edits, state, logits)

        def sample_step(state: StepState, logits: Tensor, count: int) -> None:
            if rule is not sample or count > MAX_CANDIDATES:
                return compiled_sample(state, logits, count)
            draw = partial(draw_tokens, logits, state, greedy=count == 0)
            if not self.runs(("sampling", count == 0), draw):
                return compiled_sample(state, logits, count)
            draw()

        def draft_step(state: StepState, logits: Tensor, drafts: Drafts, *rest) -> None:
            _, candidates, _ = rest
            draw = partial(draw_draft, state, logits, drafts, *rest)
            if candidates > MAX_CANDIDATES or not self.runs(("draft", candidates > 0), draw):
                compiled_draft(state, logits, drafts, *rest)
                return
            draw()

        return edit_step, sample_step, draft_step

    def pass_steps(self) -> tuple[Callable, Callable]:
        _, compiled = super().pass_steps()

        def verify(state: StepState, logits: Tensor, tokens: Tensor, last: Tensor, *rest) -> None:
            q, candidates, result = rest
            given = state, logits, tokens, last, q if candidates else None
            greedy = candidates == 0
            check = partial(draft_check.verify_pass, *given, result, ACCEPT_STREAM, greedy)
            if candidates <= MAX_CANDIDATES and self.runs(("verification", greedy), check):
                check()
                return
            found = torch.empty_like(result, device=tokens.device)
            compiled(*given, candidates, found)
            result.copy_(found, non_blocking=True)

        return draft_check.begin_pass, verify

    def runs_layer(self, layer: FusedLayer, x: Tensor, context: Context) -> bool:
        """Whether a layer's kernels run for x [B, Q, D]. Of several ranks none may differ."""
        if layer.experts.sum.all_reduce or layer.experts.before.all_reduce:
            return True
        core, T = layer.attention.empty_heads, context.positions.numel()
        shape = tuple(context.positions.shape)
        key = self.kinds[id(layer)], shape, self.reach, context.last is None

        def launch() -> None:
            layer.forward(x.new_empty(T, x.shape[-1]), context, core, self.reach)

        return self.runs(key, launch)

    def runs(self, key: Hashable, launch: Callable) -> bool:
        """Whether the kernels that `launch` launches run on this GPU.

        The first call compiles them, before one of them changes the sequence's state.
        """
        if key not in self.checked:
            try:
                with compile_only():
                    launch()
                self.checked[key] = True
            except KernelError as error:
                give_up(f"fused decoding by {error.kernel}", error)
                self.checked[key] = False
        return self.checked[key]


def one_of_each_kind(runner: FusedRunner) -> list[Block]:
    """Return a block of each kind among the fused ones."""
    blocks = [block for block in runner.model.layers if id(block) in runner.layers]
    return [*{runner.kinds[id(runner.layers[id(block)])]: block for block in blocks}.values()]


def launch_pass(
    runner: FusedRunner,
    state: StepState,
    drafts: Tensor,
    q: Tensor | None,
    result: Tensor,
    reach: int | None,
    greedy: bool,
) -> None:
    """Launch the kernels of a pass with drafts [B, N], over nothing, as `launch_all` does.

    q, result and greedy: as in `draft_check.verify_pass`.
    """
    runner.launch_all(len(drafts), drafts.shape[1] + 1, reach, all_positions=True)
    tokens, _, last = draft_check.begin_pass(state, drafts)
    logits = torch.empty(*tokens.shape, state.seen.shape[1], device=tokens.device)
    draft_check.verify_pass(state, logits, tokens, last, q, result, ACCEPT_STREAM, greedy)
