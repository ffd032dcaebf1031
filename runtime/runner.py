"""How the stages of a forward pass are executed: eagerly, compiled, or captured as CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from model import COUNTING_SORT_MAX_TOKENS, Block, Chunk, Context, Runner, Transformer
from ops.inductor import UNTUNED, any_size, compiled
from ops.launch import KernelError, broken, can_launch, give_up
from ops.plain.pending import MAX_TENTATIVE
from ops.products.prompt import GROUPED
from runtime.draft_choice import choose_draft
from runtime.logit_edits import edit_logits
from runtime.sampling import StepState, make_sample_step
from runtime.verification import begin_pass, verify_pass

SHORT_CHUNK = COUNTING_SORT_MAX_TOKENS  # tokens of a short prompt that run at once


class EagerRunner(Runner):
    """Runs each stage eagerly. A session asks a runner what it may capture."""

    # All positions of the step in progress are below this; None: no bound. A session sets it.
    reach: int | None = None
    # A captured session pads a chunk of a short prompt to one of these numbers of tokens, in rising
    # order.
    short_chunks: tuple[int, ...] = (SHORT_CHUNK,)
    runs_long_chunks = False  # a prompt alone may run in chunks of more than PREFILL_CHUNK tokens
    # Kernels sample tokens and verify drafts. They read on the device how a row samples; those of
    # passes read drafts from pinned host memory, and write their results there.
    chooses_by_kernels = False

    def __init__(self, model: Transformer):
        self.model = model

    def can_capture(self, tokens: int) -> bool:
        """Whether a call of this many tokens can be captured as CUDA graphs.

        A kernel has to compute the experts of several tokens: the library's products read on the
        host where each expert's rows end.
        """
        is_broken = any(name.startswith(GROUPED) for name in broken)
        return tokens == 1 or (can_launch(self.model.norm.weight) and not is_broken)

    def takes_positions(self, tokens: int, end: int) -> bool:
        """Whether a prompt's chunk may be given by its positions, as `FusedRunner`'s short ones."""
        return False

    def prompt_runner(self) -> "EagerRunner":
        """Return what runs the chunks of a long prompt."""
        return EagerRunner(self.model)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Within, a call compiles and loads code. It may skip blocks that need the same code.

        Its results mean nothing.
        """
        yield

    def reaches(self, queries: int, length: int) -> list[int | None]:
        """Return the values of `reach` for which a step runs other kernels, in rising order.

        queries: tokens of each sequence. length: positions of the cache. The last value is None.
        """
        return [None]

    def block(
        self, block: Block, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module
    ):
        return without_broken_kernels(super().block, block, x, normed, context, next_norm)

    def hidden(self, model: Transformer, normed: Tensor) -> Tensor:
        """Return the hidden states [B, Q, D] that the head reads, from what `logits` gets."""
        return normed

    def logits(self, model: Transformer, normed: Tensor, last: Tensor | None) -> Tensor:
        return without_broken_kernels(super().logits, model, normed, last)

    def token_steps(self, rule: Callable) -> tuple[Callable, Callable, Callable]:
        """Return `edit_logits`, `make_sample_step(rule)` and `choose_draft` as this runner
        executes them."""
        return edit_logits, make_sample_step(rule), choose_draft

    def pass_steps(self) -> tuple[Callable, Callable]:
        """Return `verification.begin_pass` and `verify_pass` as this runner executes them."""
        return begin_pass, verify_pass


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
        self.dynamic = dynamic
        self.compiled_begin = self.compile(type(model).begin)
        self.compiled_block = self.compile(run_block)
        self.compiled_logits = self.compile(type(model).logits)

    def compile(self, function: Callable, **options) -> Callable:
        """Compile a function that may launch our kernels."""
        form = compiled(function, dynamic=self.dynamic, **options)
        return partial(without_broken_kernels, form)

    def token_steps(self, rule: Callable) -> tuple[Callable, Callable, Callable]:
        edit = compiled(edit_logits, dynamic=False, options=UNTUNED)
        choose = (compiled(step, dynamic=False) for step in (make_sample_step(rule), choose_draft))
        return edit, *choose

    def pass_steps(self) -> tuple[Callable, Callable]:
        for_any = compiled(verify_pass)
        # Shapes of one draft broadcast: Dynamo compiles that case apart.
        for_one = compiled(verify_pass, dynamic=False)

        def verify(
            state: StepState, logits: Tensor, tokens: Tensor, last: Tensor, q: Tensor | None, *rest
        ) -> None:
            if tokens.shape[1] == 2:
                for_one(state, logits, tokens, last, q, *rest)
                return
            for tensor in (logits, tokens, q):
                if tensor is not None:
                    any_size(tensor, 1)
            for_any(state, logits, tokens, last, q, *rest)

        return begin_pass, verify

    def begin(self, model: Transformer, tokens: Tensor, span: Tensor | Chunk):
        share_code(tokens, None if isinstance(span, Chunk) else span)
        return self.compiled_begin(model, tokens, span)

    def block(
        self, block: Block, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module
    ):
        share_code(x, normed, context=context)
        return self.compiled_block(block, x, normed, context, next_norm)

    def logits(self, model: Transformer, normed: Tensor, last: Tensor | None) -> Tensor:
        share_code(normed)
        return self.compiled_logits(model, normed, last)


def share_code(x: Tensor, *others: Tensor | None, context: Context | None = None) -> None:
    """Let code that is compiled for passes take any number of tokens of each sequence.

    All tensors are [B, T, ...]; context has some more. Otherwise each number of drafts would be
    compiled, which takes a minute.
    """
    if not 1 < x.shape[1] <= MAX_TENTATIVE:
        return
    tensors = [x, *others]
    if context is not None:
        biases = [mask.bias for mask in (context.masks or {}).values()]
        tensors += [context.rope, context.positions, *biases]
    for tensor in tensors:
        if tensor is not None:
            any_size(tensor, 1)


def without_broken_kernels(call: Callable, *arguments):
    """Call; if a kernel cannot run on this GPU, call again: then another form is chosen.

    Dynamo compiles for what `ops.launch.broken` contains. Calling a layer again does no harm:
    kernels fail before they run, and the operators that update a recurrent state have plain forms
    of their own.
    """
    while True:
        try:
            return call(*arguments)
        except KernelError as error:
            if error.kernel in broken:
                raise
            give_up(error.kernel, error)


def run_block(block: Block, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module):
    """Call a block of any class: one function to compile, since families subclass Block."""
    return block.forward(x, normed, context, next_norm)
