"""Decode a few tokens by six Triton kernels a layer, instead of Inductor's ten to thirteen.

    wqkv         norm of x, product                               (ops/products/dense.py)
    attention    q and k norm, RoPE, cache append, attention      (ops/attention/gqa.py)
    wo           product, plus residual                           (ops/products/dense.py)
    router       norm, scores                                     (ops/products/join.py)
    gate_up      top-k, products of the chosen experts, SwiGLU    (ops/products/experts.py)
    down         products, weighted sum, plus residual            (ops/products/experts.py)

ops/README.md lists all kernels, and which of them run when. Latent attention has three kernels
between its products, or four (ops/attention/mla.py). Attention without kernels runs its `core`,
compiled by Inductor. Shared experts become experts that every token chooses. A family declares by
`fused_decode_settings` what it adds to `model.Attention`, `model.MoE` or `model.AddNorm`; without
it, a subclass has no kernels.

`FusedRunner` launches the kernels directly: a session captures the step as a CUDA graph, so that
Python's launches cost nothing. It runs up to MAX_FEW tokens: one of each of several sequences
[B, 1], or drafts of one [1, Q]; and PROMPT_CHUNKS of a prompt. Products of several tokens have
kernels of their own: ops/products/few_tokens.py, ops/products/expert_tiles.py. After the layers,
one token's norm and head are one product, and sampling is three kernels (ops/step/token_draw.py).
Everything else runs the compiled blocks, which are the reference that tests compare with.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from model import (
    AddNorm,
    Attention,
    Block,
    Chunk,
    Context,
    Experts,
    FeedForward,
    Linear,
    MoE,
    RMSNorm,
    Transformer,
    swiglu,
)
from ops.declared import (
    SWIGLU,
    ExpertAdditions,
    LatentAdditions,
    NoAdditions,
    Routing,
    SumAdditions,
)
from ops.inductor import materialize
from ops.launch import KernelError, compile_only, give_up
from ops.products import dense, expert_tiles
from ops.products import experts as moe_decode
from ops.products.few_tokens import down_few
from ops.products.join import NormRouter, norm_router, norm_tokens
from ops.products.quantized_x import QuantizedX
from ops.products.routing import check_router, route
from ops.products.weights import Weight, plain_weight
from ops.step import draft_check
from ops.step.token_draw import draw_tokens
from runtime.fused_attention import FusedDecodeAttention, fused_attention
from runtime.fused_latent_attention import FusedLatentAttention
from runtime.plain_forms import settings_of, undeclared
from runtime.runner import CompiledRunner, share_code
from runtime.sampling import MAX_CANDIDATES, StepState, sample
from runtime.verification import ACCEPT_STREAM

MAX_FEW = 16  # sequences of a step, or its drafts and the token before them
PROMPT_CHUNKS = 8, 32, 64  # tokens of a prompt's chunk
# Embedding, RoPE and masks do not depend on each other: Inductor makes one kernel of them.
BEGIN_OPTIONS = {"combo_kernels": True}


def kernel_weight(module: nn.Module) -> Weight:
    """Return a module's weight as the kernels read it. Raises ValueError if they cannot."""
    if hasattr(module, "kernel_weight"):  # a packed weight
        return module.kernel_weight()
    if isinstance(module, nn.ModuleList):
        raise ValueError("no kernels for experts in several formats")
    return plain_weight(module.weight)


def projection_weights(module: nn.Module) -> list[tuple[Weight, Tensor | None]]:
    """Return weight and bias of a projection; of rows in several formats, those of each range.

    Raises ValueError if the kernels cannot read one.
    """
    ranges = list(module) if isinstance(module, nn.ModuleList) else [module]
    weights, bias = [kernel_weight(rows) for rows in ranges], getattr(module, "bias", None)
    if bias is None:
        return [(weight, None) for weight in weights]
    biases = bias.split([weight.out for weight in weights])
    return list(zip(weights, biases, strict=True))


class ResidualSum:
    """How a sublayer's result joins the residual.

    scale: factor of the result. all_reduce: the module that sums it over several ranks, each of
    which computes a part, or None; it has `tp.AllReduceAddNorm`'s fused_inbox, fused_add and
    fused_add_router.
    Raises ValueError for a sum that the kernels do not compute.
    """

    def __init__(self, add: nn.Module):
        added = settings_of(add, AddNorm, SumAdditions)
        self.scale, self.all_reduce = added.scale, added.all_reduce

    def of_product(self, x: Tensor) -> dict:
        """Return the arguments by which `moe_decode.down` adds its product to x, or sends it."""
        if self.all_reduce:
            return {"send": self.all_reduce.fused_inbox(x)}
        return {"residual": x, "scale": self.scale}


def choose_attention(attention: nn.Module) -> nn.Module | FusedLatentAttention:
    """Return an attention layer with its kernels, if it has some; else the layer.

    Raises ValueError for latent attention whose wq they cannot read, and for a subclass that has
    its own `forward`, of which `core` is only a part.
    """
    if isinstance(attention, FusedDecodeAttention):  # `load_model` makes it, for 4-bit weights
        return attention
    changed = undeclared(attention, Attention)
    if "forward" in changed:
        raise ValueError(f"no kernels for {type(attention).__name__}.forward")
    added = None if changed else getattr(attention, "fused_decode_settings", lambda: None)()
    if not isinstance(added, LatentAdditions):
        return fused_attention(attention)
    wq = attention.wq
    return FusedLatentAttention(attention, added, None if wq is None else kernel_weight(wq))


class FusedAttention:
    """The attention half of a block for a few tokens: norm, projections, core, residual sum.

    Raises ValueError for attention that the kernels do not compute.
    """

    def __init__(self, block: Block):
        self.norm, self.sum = block.attention_norm, ResidualSum(block.add_attention)
        attention = block.attention
        self.attention = choose_attention(attention)
        if undeclared(self.norm, RMSNorm) or not hasattr(attention, "core"):
            raise ValueError(f"no kernels for {type(attention).__name__}, or its norm")
        names, output = getattr(attention, "projections", (("wqkv",), "wo"))
        modules = [getattr(attention, name) for name in names]
        self.inputs = [each for m in modules if m is not None for each in projection_weights(m)]
        output = getattr(attention, output)
        self.output = kernel_weight(output), output.bias

    def empty_heads(self, attention: nn.Module, projected: Tensor, context: Context) -> Tensor:
        """Return a tensor of the shape that `core` gives."""
        weight, _ = self.output
        width = 4 * weight.quads * weight.fields
        return projected.new_empty(*context.positions.shape, width)

    def forward(self, x: Tensor, context: Context, core, reach: int | None = None) -> Tensor | None:
        """x [T, D], not normed -> x after attention; with several ranks, what this one adds to x.

        None: it has been sent to all ranks. core, reach: as of `FusedLayer.forward`.
        """
        projected = x.new_empty(len(x), sum(weight.out for weight, _ in self.inputs))
        parts = projected.split([weight.out for weight, _ in self.inputs], dim=1)
        eps = self.norm.eps
        normed, norm = dense.norm_apart(x, self.norm.weight, eps)
        for n, ((weight, bias), part) in enumerate(zip(self.inputs, parts, strict=True)):
            early = n == 1  # then the kernel before the previous one, which writes x, has ended
            dense.dense_product(normed, weight, norm, bias=bias, out=part, early=early)
        projected, attention = projected.view(*context.positions.shape, -1), self.attention
        if not isinstance(attention, FusedDecodeAttention | FusedLatentAttention):
            heads = core(attention, projected, context)
        elif not attention.takes(projected, context):
            heads = core(attention.plain[0], projected, context)
        elif isinstance(attention, FusedDecodeAttention):
            heads = attention.fused_core(projected, context, reach)
        else:
            heads = attention.fused_core(projected, context)
        weight, bias = self.output
        heads = heads.flatten(0, 1).contiguous()
        return dense.dense_product(heads, weight, bias=bias, **self.sum.of_product(x))


class FusedExperts:
    """The other half: norm, router, experts, residual sum. Shared experts follow the others.

    Raises ValueError for a layer that the kernels do not compute.
    """

    def __init__(self, block: Block):
        ffn = block.ffn
        self.norm, self.sum = block.ffn_norm, ResidualSum(block.add_ffn)
        self.before = ResidualSum(block.add_attention)
        added = settings_of(ffn, MoE, ExpertAdditions)
        self.experts: Experts = ffn.experts
        settings_of(self.experts, Experts, NoAdditions)
        several = self.before.all_reduce
        self.router: Linear = several.router if several else ffn.router
        if type(self.router) is not Linear:
            raise ValueError("no kernels for another router")
        settings_of(self.norm, RMSNorm, NoAdditions)
        self.activation = added.activation or SWIGLU
        if added.activation is None and self.experts.activation is not swiglu:
            raise ValueError("no kernels for another activation")
        self.w13, self.w2 = kernel_weight(self.experts.w13), kernel_weight(self.experts.w2)
        self.bias13 = getattr(self.experts.w13, "bias", None)
        self.bias2 = getattr(self.experts.w2, "bias", None)
        self.shared, self.gate = added.shared, added.shared_gate
        self.routing = added.routing or Routing(ffn.n_active, ffn.norm_topk)
        if self.shared is not None:
            count = self.shared_count(self.shared)
            self.routing = replace(self.routing, shared=count, gated=self.gate is not None)
        E, D = self.router.weight.shape
        check_router(E, D, self.routing)
        if D % 8 or (self.routing.gated and self.router.bias is not None):
            raise ValueError("no kernels for this router")
        self.rows = self.router.weight

    @property
    def normed_router(self) -> NormRouter:
        """The norm and the router as the kernels read them."""
        norm, bias = self.norm, self.router.bias
        return NormRouter(norm.weight, norm.eps, self.rows, self.routing, bias)

    def shared_count(self, shared: FeedForward) -> int:
        """Return as how many experts the shared one counts. Raises ValueError if it cannot."""
        w13, w2 = kernel_weight(shared.w13), kernel_weight(shared.w2)
        same = (w13.kind, w13.group, w2.group) == (self.w13.kind, self.w13.group, self.w2.group)
        count, rest = divmod(w13.out, self.w13.out)
        biased = (self.bias13, shared.w13.bias, shared.w2.bias)
        if not same or rest or self.activation != SWIGLU or any(b is not None for b in biased):
            raise ValueError("no kernels for a shared expert unlike the others")
        if count > 1 and self.w13.kind == "fp8b" and self.w13.out // 2 % self.w13.group:
            raise ValueError("the shared expert's blocks of scales cannot be divided")
        return count

    def takes_tokens(self, tokens: int) -> bool:
        """Whether the kernels take this number of tokens: of several ranks one."""
        return tokens == 1 or (tokens <= expert_tiles.MAX_TOKENS and not self.sum.all_reduce)

    def prepare(self) -> None:
        """Stack the shared expert's weights on the others', once for each model."""
        if self.shared is None:
            return
        kept = vars(self.experts)  # an earlier runner of this model may have stacked them
        if "stacked" not in kept:
            count = self.routing.shared
            w13 = stack(self.experts.w13, self.shared.w13, self.w13, count, rows=True)
            w2 = stack(self.experts.w2, self.shared.w2, self.w2, count, rows=False)
            rows = self.router.weight
            if self.gate is not None:
                rows = torch.cat((rows, self.gate.weight))
            kept["stacked"] = w13, w2, rows
            torch.cuda.empty_cache()  # of weights a bit smaller than those that come next
        self.w13, self.w2, self.rows = kept["stacked"]

    def forward(
        self, x: Tensor, attended: Tensor | None, last: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, D] of the block, attended: as `FusedAttention.forward` returns it.

        Return x after the experts, and expert_indices, expert_weights [T, A]. last: `Context.last`.
        Padding among several tokens has no experts: its x stays as it is.
        """
        if not moe_decode.takes_pairs(len(self.router.weight), self.routing, len(x)):
            return self.run_tiles(attended, last)
        indices = torch.empty(len(x), self.routing.pairs, dtype=torch.int64, device=x.device)
        x, normed, scores = self.norm_and_score(x, attended, indices)
        options = dict(bias=self.bias13, indices=indices, last=last)
        h, indices, weights = moe_decode.gate_up(
            normed, self.w13, scores, self.routing, self.activation, **options
        )
        add = self.sum.of_product(x)
        y = moe_decode.down(h, self.w2, indices, weights, bias=self.bias2, last=last, **add)
        x = self.sum.all_reduce.fused_add(x, y) if self.sum.all_reduce else y
        active = self.routing.active
        return x, indices[:, :active], weights[:, :active]

    def run_tiles(self, x: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """`forward` for tokens that share experts: x [T, D] is the result of attention."""
        normed, scores = self.score(x)
        indices, weights = route(scores, self.routing)
        y = expert_tiles.run_experts(
            normed,
            self.w13,
            self.w2,
            indices,
            weights,
            self.activation,
            self.bias13,
            self.bias2,
            last=last,
            **self.sum.of_product(x),
        )
        active = self.routing.active
        return y, indices[:, :active], weights[:, :active]

    def norm_and_score(
        self, x: Tensor, attended: Tensor | None, indices: Tensor
    ) -> tuple[Tensor, Tensor | QuantizedX, Tensor]:
        """Return x after attention [T, D], its norm, and the router's scores.

        indices: as of `norm_router`.
        """
        if self.before.all_reduce:
            return self.before.all_reduce.fused_add_router(
                x, attended, self.normed_router, indices, self.w13
            )
        return attended, *norm_router(attended, self.normed_router, self.w13, indices)

    def score(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x [T, D], and the router's scores."""
        if len(x) <= MAX_FEW:
            return norm_router(x, self.normed_router)
        normed = norm_tokens(x, self.norm.weight, self.norm.eps)
        router = Weight((self.rows.view(torch.int32),), "bf16", 8)  # or fp16, as x
        dots = x.new_empty(len(x), len(self.rows), dtype=torch.float32)
        down_few(normed, router, dots, bias=self.router.bias)
        return normed, dots


def stack(experts: nn.Module, shared: nn.Module, weight: Weight, count: int, rows: bool) -> Weight:
    """Return the weight [E, out, in] of experts followed by a shared expert's, as `count` of them.

    rows: the shared expert is divided along its rows, which are gate, then up; else along `in`.
    experts' own parameters become a part of the result, so that it takes no memory beside them.
    So does shared's if it counts as one; otherwise it stays, as a copy.
    """
    names = tuple(getattr(experts, "layout", ("weight",)))
    parts = []
    for name in names:
        part, own = getattr(experts, name), getattr(shared, name).data
        if count == 1 or (not rows and own.shape[-1] == 1):  # the latter: one scale a row
            pieces = own.expand(count, *own.shape)
        elif rows:
            pieces = own.unflatten(0, (2, count, -1)).transpose(0, 1).flatten(1, 2)
        else:
            pieces = own.unflatten(-1, (count, -1)).movedim(-2, 0)
        joined = torch.cat((part.data, pieces))
        part.data = joined[:-count]
        if count == 1:
            getattr(shared, name).data = joined[-1]
        parts.append(joined.view(weight.parts[0].dtype) if len(names) == 1 else joined)
    return replace(weight, parts=tuple(parts))


class FusedLayer:
    """A block's kernels for a few tokens. It shares the block's parameters and cache.

    Raises ValueError for a block that the kernels do not compute.
    """

    attention: FusedAttention
    experts: FusedExperts

    def __init__(self, block: Block):
        if type(block) is not Block or not isinstance(block.ffn, MoE):
            raise ValueError("no kernels for a block that differs from model.Block")
        self.attention, self.experts = FusedAttention(block), FusedExperts(block)

    def forward(
        self, x: Tensor, context: Context, core, reach: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, D], not normed -> x after the block, expert_indices, expert_weights [T, A].

        The tokens are those of `context.positions` [B, Q], in order. core: (attention, projected
        [B, Q, N], context) -> heads, by `Attention.core`. It is called where no kernel computes
        that. reach: as of `attend_tokens`.
        """
        attended = self.attention.forward(x, context, core, reach)
        return self.experts.forward(x, attended, context.last)


def run_unfused(block: Block, x: Tensor, context: Context, next_norm: nn.Module):
    """Call a block that has no kernels: x [B, Q, D], not normed -> x, indices, weights."""
    normed = materialize(block.attention_norm(x))
    x, _, *routing = block.forward(x, normed, context, next_norm)
    return x, *routing


def begin_tokens(model: Transformer, tokens: Tensor, span: Tensor) -> tuple[Tensor, Context]:
    x, _, context = model.begin(tokens, span)
    return x, context


def end_tokens(model: Transformer, x: Tensor, last: Tensor | None) -> Tensor:
    return model.logits(materialize(model.norm(x)), last)


def last_norm(model: Transformer, x: Tensor) -> Tensor:
    return model.norm(x)


class FusedHead:
    """The last norm and the head, as one product.

    Raises ValueError for logits that are not the model's plain ones.
    """

    def __init__(self, model: Transformer):
        head, self.norm = model.head, model.norm
        plain = type(head) is Linear or hasattr(head, "kernel_weight")
        if type(model).logits is not Transformer.logits or not plain or head.bias is not None:
            raise ValueError("no kernel for these logits")
        settings_of(self.norm, RMSNorm, NoAdditions)
        self.weight = kernel_weight(head)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D], not normed -> fp32 logits [T, V], of which none is rounded to bf16."""
        normed, norm = dense.norm_apart(x, self.norm.weight, self.norm.eps)
        return dense.dense_product(normed, self.weight, norm, dtype=torch.float32)


def fused_head(model: Transformer) -> FusedHead | None:
    """Return the model's head with its kernel, if it has one."""
    try:
        return FusedHead(model)
    except ValueError:
        return None


def run_core(attention: nn.Module, projected: Tensor, context: Context) -> Tensor:
    # Contiguous, as `down` reads it.
    return attention.core(projected, context).contiguous()


class FusedRunner(CompiledRunner):
    """Runs up to `max_tokens` tokens through fused layers, all else as CompiledRunner.

    Between fused layers x is not normed: each begins with its own norm.
    """

    def __init__(self, model: Transformer, dynamic: bool = False):
        super().__init__(model, dynamic)
        self.is_fused = False  # the call in progress runs the kernels
        self.checked: dict[Hashable, bool] = {}  # of `runs`
        self.layers = {id(block): layer for block, layer in fused_layers(model).items()}
        for layer in self.layers.values():
            layer.experts.prepare()
        self.head = fused_head(model)
        # A batch and drafts have up to max_tokens, and a prompt's chunk one of short_chunks: its
        # padding reads no experts, so that more sizes would save little.
        self.max_tokens = MAX_FEW if self.takes_tokens(MAX_FEW) else 1
        self.prompt_chunks = tuple(size for size in PROMPT_CHUNKS if self.takes_tokens(size))
        self.short_chunks = self.prompt_chunks or self.short_chunks
        self.compiled_begin_tokens = self.compile(begin_tokens, options=BEGIN_OPTIONS)
        self.compiled_end_tokens = self.compile(end_tokens)
        self.compiled_norm = self.compile(last_norm)
        compiled_core = self.compile(run_core)

        def core(attention: nn.Module, projected: Tensor, context: Context) -> Tensor:
            share_code(projected, context=context)
            return compiled_core(attention, projected, context)

        self.compiled_core = core
        self.compiled_unfused = self.compile(run_unfused)

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
        if not self.is_fused:
            return super().begin(model, tokens, span)
        share_code(tokens, span)
        x, context = self.compiled_begin_tokens(model, tokens, span)
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
        else:
            y, *routing = layer.forward(x.flatten(0, 1), context, self.compiled_core, self.reach)
            x = y.view_as(x)
        return x, x, *routing

    def hidden(self, model: Transformer, normed: Tensor) -> Tensor:
        return self.compiled_norm(model, normed) if self.is_fused else normed

    def logits(self, model: Transformer, normed: Tensor, last: Tensor | None) -> Tensor:
        if not self.is_fused:
            return super().logits(model, normed, last)
        (B, Q, _), x = normed.shape, normed.flatten(0, 1)
        if last is not None and Q > 1:
            x = normed[torch.arange(B, device=x.device), last]
        head = self.head if len(x) <= self.max_tokens else None
        if head is not None and self.runs(("head", len(x)), lambda: head.forward(x)):
            return head.forward(x).view(*normed.shape[: 2 if last is None else 1], -1)
        share_code(normed)
        return self.compiled_end_tokens(model, normed, last)

    def sample_step(self, rule: Callable) -> Callable:
        compiled = super().sample_step(rule)

        def sample_step(state: StepState, logits: Tensor, count: int) -> None:
            if rule is not sample or count > MAX_CANDIDATES:
                return compiled(state, logits, count)
            s = state
            draw = partial(
                draw_tokens, logits, s.seen, s.controls, s.seeds, s.position, s.last, s.token
            )
            if not self.runs("sampling", draw):
                return compiled(state, logits, count)
            draw()

        return sample_step

    def pass_steps(self) -> tuple[Callable, Callable]:
        _, compiled = super().pass_steps()

        def verify(
            state: StepState,
            logits: Tensor,
            tokens: Tensor,
            q: Tensor | None,
            candidates: int,
            result: Tensor,
        ) -> None:
            given = state, logits, tokens, q if candidates else None
            check = partial(draft_check.verify_pass, *given, result, ACCEPT_STREAM)
            if candidates > MAX_CANDIDATES or not self.runs("verification", check):
                return compiled(*given, candidates, result)
            check()

        return draft_check.begin_pass, verify

    def runs_layer(self, layer: FusedLayer, x: Tensor, context: Context) -> bool:
        """Whether a layer's kernels run for x [B, Q, D]. Of several ranks none may differ."""
        if layer.experts.sum.all_reduce or layer.experts.before.all_reduce:
            return True
        core, rows = layer.attention.empty_heads, x.flatten(0, 1)
        key = id(layer), tuple(context.positions.shape), self.reach
        return self.runs(key, lambda: layer.forward(rows, context, core, self.reach))

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


def fused_layers(model: Transformer) -> dict[Block, FusedLayer]:
    """Return a fused layer for each block that the kernels compute."""
    layers: dict[Block, FusedLayer] = {}
    for block in model.layers:
        try:
            layers[block] = FusedLayer(block)
        except ValueError:
            continue
    return layers
