"""A block by six Triton kernels for a few tokens, instead of Inductor's ten to thirteen.

    wqkv         norm of x, product                               (ops/products/dense.py)
    attention    q and k norm, RoPE, cache append, attention      (ops/attention/gqa.py)
    wo           product, plus residual                           (ops/products/dense.py)
    router       norm, scores                                     (ops/products/join.py)
    gate_up      top-k, products of the chosen experts, SwiGLU    (ops/products/experts.py)
    down         products, weighted sum, plus residual            (ops/products/experts.py)

ops/README.md lists all kernels, and which of them run when. Latent attention has three kernels
between its products, or four (ops/attention/mla.py). Attention without kernels runs its `core`,
compiled by Inductor. Shared experts become experts that every token chooses; in another format
they have two more kernels, before gate_up. A dense FFN is two products, with its activation
between them. Results that are normed before they are added (models/layers/sandwich.py) have no
residual in their product: the router's kernel norms and adds that of attention, and a kernel more
that of the FFN. A dense FFN beside the experts is another branch of that sum. A family declares by
`fused_decode_settings` what it adds to `model.Attention`, `model.MoE`, `model.FeedForward` or
`model.AddNorm`; without it, a subclass has no kernels. ops/products/few_tokens.py and
ops/products/expert_tiles.py have products of several tokens.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from model import (
    Attention,
    Block,
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
    RELU_SQUARED,
    SWIGLU,
    BlockAdditions,
    ExpertAdditions,
    FeedForwardAdditions,
    LatentAdditions,
    NoAdditions,
    Routing,
)
from ops.products import dense, expert_tiles
from ops.products import experts as moe_decode
from ops.products.few_tokens import down_few, multiply_planes, unit_order
from ops.products.few_x import UnitOrder
from ops.products.join import NormRouter, norm_router, norm_tokens
from ops.products.planes import Planes, empty_planes, make_planes, takes_planes
from ops.products.prompt_rows import activate_rows
from ops.products.quantized_x import QuantizedX
from ops.products.routing import check_router, route
from ops.products.weights import Weight, plain_weight
from runtime.fused_attention import FusedDecodeAttention, fused_attention, projections_of
from runtime.fused_latent_attention import FusedLatentAttention
from runtime.fused_sum import norm_and_sum
from runtime.plain_forms import settings_of, undeclared

MAX_FEW = 16  # sequences of a step, or the tokens of their pass


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


def multiply_ranges(
    x: Tensor, norm: RMSNorm | dense.Norm | None, weights: list[tuple[Weight, Tensor | None]]
) -> Tensor:
    """Norm x [T, in] and multiply it by ranges of a weight's rows, plus biases -> [T, out].

    norm: None, if x is normed already. weights: as in `projection_weights`.
    """
    y = x.new_empty(len(x), sum(weight.out for weight, _ in weights))
    parts = y.split([weight.out for weight, _ in weights], dim=1)
    (first, bias), *rest = weights
    scale = beside = None
    if len(rest) == 1 and rest[0][1] is None and dense.takes_beside(first, rest[0][0], len(x)):
        beside = rest[0][0], parts[1]
    fits = bias is None and (not rest or (beside is not None and beside[0].kind == "bf16"))
    if norm is not None and fits and takes_planes(first, len(x), x.dtype):
        planes = make_planes(x, norm.weight, first)
        multiply_planes(planes, first, parts[0], eps=norm.eps, beside=beside)
        return y
    if norm is not None:
        x, scale = dense.norm_apart(x, norm.weight, norm.eps, first)
    if beside is not None:
        dense.dense_product(x, first, scale, bias=bias, out=parts[0], beside=beside)
        return y
    for n, ((weight, bias), part) in enumerate(zip(weights, parts, strict=True)):
        early = n == 1  # then the kernel before the previous one, which writes x, has ended
        dense.dense_product(x, weight, scale, bias=bias, out=part, early=early)
    return y


class FusedAttention:
    """The attention half of a block for a few tokens: norm, projections, core, residual sum.

    Raises ValueError for attention that the kernels do not compute.
    """

    def __init__(self, block: Block):
        self.norm, self.sum = norm_and_sum(block, "attention")
        attention = block.attention
        self.attention = choose_attention(attention)
        is_plain = self.norm is None or not undeclared(self.norm, RMSNorm)
        if not is_plain or not hasattr(attention, "core"):
            raise ValueError(f"no kernels for {type(attention).__name__}, or its norm")
        names, output = projections_of(attention)
        modules = [getattr(attention, name) for name in names]
        self.inputs = [each for m in modules if m is not None for each in projection_weights(m)]
        output = getattr(attention, output)
        self.output = kernel_weight(output), output.bias

    def empty_heads(self, attention: nn.Module, projected: Tensor, context: Context) -> Tensor:
        """Return a tensor of the shape that `core` gives."""
        weight, _ = self.output
        width = 4 * weight.quads * weight.fields
        return projected.new_empty(*context.positions.shape, width)

    def stores_planes(self, x: Tensor, context: Context) -> bool:
        """Whether attention stores planes, which its last product multiplies."""
        stores = getattr(self.attention, "stores_planes", lambda _: False)
        (weight, bias), (B, Q) = self.output, context.positions.shape
        return stores(Q) and bias is None and takes_planes(weight, B * Q, x.dtype, stored=True)

    def multiply_planes(self, planes: Planes, x: Tensor) -> Tensor:
        """Return attention's last product of planes, as `forward` does."""
        add = self.sum.of_product(x)
        y = add.pop("out", None)
        y = torch.empty_like(x) if y is None else y
        multiply_planes(planes, self.output[0], y, **add)
        return y

    def forward(self, x: Tensor, context: Context, core, reach: int | None = None) -> Tensor | None:
        """x [T, D], not normed -> x after attention, or what `ResidualSum.add` adds to x.

        None: it has been sent to all ranks. core, reach: as in `FusedLayer.forward`.
        """
        projected, attention = multiply_ranges(x, self.norm, self.inputs), self.attention
        projected, output_norm = projected.view(*context.positions.shape, -1), None
        if not hasattr(attention, "takes") or not attention.takes(projected, context):
            (plain,) = getattr(attention, "plain", (attention,))
            heads = core(plain, projected, context)
        elif isinstance(attention, FusedDecodeAttention):
            heads = attention.fused_core(projected, context, reach)
        elif self.stores_planes(x, context):
            store: Callable = attention.fused_core
            planes = empty_planes(x, self.output[0].width, len(x))
            store(projected, context, planes)
            return self.multiply_planes(planes, x)
        else:
            heads = attention.fused_core(projected, context)
            output_norm = getattr(attention, "output_norm", None)
        (weight, bias), norm = self.output, None
        heads = heads.flatten(0, 1).contiguous()
        if output_norm is None and bias is None and takes_planes(weight, len(x), heads.dtype):
            return self.multiply_planes(make_planes(heads, None, weight), x)
        if output_norm is not None:
            of_heads = output_norm.weight, output_norm.eps, weight, output_norm.groups
            heads, norm = dense.norm_apart(heads, *of_heads)
        return dense.dense_product(heads, weight, norm, bias=bias, **self.sum.of_product(x))


class FusedExperts:
    """The other half: norm, router, experts, residual sum. Shared experts follow the others.

    A shared expert that cannot be stacked on the others is `apart`: its w13 and w2.

    Raises ValueError for a layer that the kernels do not compute.
    """

    def __init__(self, block: Block):
        ffn = block.ffn
        self.norm, self.sum = norm_and_sum(block, "ffn")
        _, self.before = norm_and_sum(block, "attention")
        added = settings_of(ffn, MoE, ExpertAdditions)
        self.experts: Experts = self.experts_of(ffn)
        settings_of(self.experts, Experts, NoAdditions)
        several = self.before.all_reduce
        self.router: Linear = several.router if several else ffn.router
        if type(self.router) is not Linear:
            raise ValueError("no kernels for another router")
        self.scale, self.dense = added.input_scale, None
        if self.scale is None:
            if self.norm is not None:
                self.scale = self.norm.weight
                settings_of(self.norm, RMSNorm, NoAdditions)
        elif self.norm is None or self.norm.weight is not None or self.before.norm is None:
            raise ValueError("no kernels for a factor after this norm")
        if (added.beside is not None) + 1 != self.sum.branches:
            raise ValueError("no kernels for other branches than a dense FFN and experts")
        if added.beside is not None:
            norm = dense.Norm(added.beside_scale, self.norm.eps)
            self.dense = DenseProducts(added.beside, norm)
        self.before.check_next(self.norm)
        self.activation = added.activation or SWIGLU
        if added.activation is None and self.experts.activation is not swiglu:
            raise ValueError("no kernels for another activation")
        if added.latent is not None:
            raise ValueError("no kernels for experts in a latent space")
        self.w13, self.w2 = kernel_weight(self.experts.w13), kernel_weight(self.experts.w2)
        self.bias13 = getattr(self.experts.w13, "bias", None)
        self.bias2 = getattr(self.experts.w2, "bias", None)
        self.shared, self.gate = added.shared, added.shared_gate
        self.routing = added.routing or Routing(ffn.n_active, ffn.norm_topk)
        self.apart: tuple[Weight, Weight] | None = None
        if self.shared is not None:
            weights = kernel_weight(self.shared.w13), kernel_weight(self.shared.w2)
            count = self.shared_count(self.shared, *weights)
            self.apart = None if count else weights
            self.routing = replace(self.routing, shared=count, gated=self.gate is not None)
        E, D = self.router.weight.shape
        check_router(E, D, self.routing)
        if D % 8 or (self.routing.gated and self.router.bias is not None):
            raise ValueError("no kernels for this router")
        self.rows = self.router.weight

    def experts_of(self, ffn: MoE) -> nn.Module:
        """Return the module whose weights the kernels read."""
        return ffn.experts

    @property
    def normed_router(self) -> NormRouter:
        """The norm and the router as the kernels read them."""
        rest = self.rows, self.routing, self.router.bias
        if self.norm is None:
            return NormRouter(None, 0.0, *rest)
        return NormRouter(self.scale, self.norm.eps, *rest, self.norm.weight is None)

    def shared_count(self, shared: FeedForward, w13: Weight, w2: Weight) -> int:
        """Return how many experts of the others' size the shared one becomes; 0: it stays apart.

        Raises ValueError for one that the kernels do not compute.
        """
        biased = (self.bias13, shared.w13.bias, shared.w2.bias)
        known = self.activation in (SWIGLU, RELU_SQUARED)
        if not known or any(bias is not None for bias in biased):
            raise ValueError("no kernels for a shared expert with biases or another activation")
        count, rest = divmod(w13.out, self.w13.out)
        same = stacks_on(w13, self.w13) and stacks_on(w2, self.w2) and not rest
        # A shared expert's blocks of scales may not be divided.
        uneven = self.w13.kind == "fp8b" and self.w2.width % self.w13.group != 0
        if same and not (count > 1 and uneven):
            return count
        if self.before.all_reduce or self.sum.all_reduce:
            raise ValueError("no kernels for a shared expert unlike the others, on several ranks")
        return 0

    def takes_tokens(self, tokens: int) -> bool:
        """Whether the kernels take this number of tokens. On several ranks they take one."""
        return tokens == 1 or (tokens <= expert_tiles.MAX_TOKENS and not self.sum.all_reduce)

    def prepare(self) -> None:
        """Stack the shared expert's weights on the others', once for each model.

        Its gate becomes the router's last row.
        """
        if self.shared is None:
            return
        kept = vars(self.experts)  # an earlier runner of this model may have stacked them
        if "stacked" not in kept:
            count, w13, w2 = self.routing.shared, self.w13, self.w2
            if not self.apart:
                parts = 2 if self.activation.gated else 1
                w13 = stack(self.experts.w13, self.shared.w13, w13, count, parts)
                w2 = stack(self.experts.w2, self.shared.w2, w2, count)
            rows = self.router.weight
            if self.gate is not None:
                rows = torch.cat((rows, self.gate.weight))
            kept["stacked"] = w13, w2, rows
            torch.cuda.empty_cache()  # memory of the old weights is too small for the next ones
        self.w13, self.w2, self.rows = kept["stacked"]

    def forward(
        self, x: Tensor, attended: Tensor | None, last: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x [T, D] after the experts, and expert_indices, expert_weights [T, A].

        x [T, D]: before attention. attended: the result of `FusedAttention.forward`. last:
        `Context.last`; tokens after it are padding, which only the shared expert multiplies.
        """
        E, T = len(self.router.weight), len(x)
        by_pairs = moe_decode.takes_pairs(E, self.routing, T, self.w13.kind)
        run = self.run_pairs if by_pairs else self.run_tiles
        x, y, indices, weights = run(x, attended, last)
        active = self.routing.active
        return self.sum.add(x, y), indices[:, :active], weights[:, :active]

    def run_pairs(
        self, x: Tensor, attended: Tensor | None, last: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Compute tokens that hardly share experts: each pair reads its expert's weights.

        Return x after attention, what `ResidualSum.add` adds to it, and the choice [T, A + S].
        """
        indices = torch.empty(len(x), self.routing.pairs, dtype=torch.int64, device=x.device)
        plain = torch.empty_like(attended) if self.apart else None
        x, normed, scores = self.norm_and_score(x, attended, indices, plain)
        add, branches = self.branches(x)
        if self.apart:
            plain = normed if isinstance(normed, Tensor) else plain
            add |= {"residual": self.add_shared(plain, scores, add)}
        options = dict(bias=self.bias13, indices=indices, last=last)
        h, indices, weights = moe_decode.gate_up(
            normed, self.w13, scores, self.routing, self.activation, **options
        )
        options = dict(bias=self.bias2, last=last, shared=self.routing.shared)
        y = moe_decode.down(h, self.w2, indices, weights, **options, **add)
        return x, y if branches is None else branches, indices, weights

    def branches(self, x: Tensor) -> tuple[dict, Tensor | None]:
        """Return arguments of the experts' last product, and the branches it completes, or None.

        x [T, D]: after attention. With a dense FFN beside the experts there are branches [2, T, D],
        unless they are sent to other ranks; the FFN's, the first one, is computed here.
        """
        (*others, add), branches = self.sum.of_products(x)
        if self.dense is not None:
            self.dense.forward(x, **others[0])
        return add, branches

    def add_shared(self, normed: Tensor, scores: Tensor, add: dict) -> Tensor:
        """Return the result [T, D], fp32, of the shared expert that is apart, for normed x.

        add: of `ResidualSum.of_product`; a residual is added to the result. These kernels are
        launched before those of the other experts: under PDL their `down` may read this result
        before it waits, since it polls the choice of the kernel before it.
        """
        w13, w2 = self.apart
        h = moe_decode.gate_up_shared(normed, w13, scores, self.routing, self.activation)
        return dense.dense_product(h, w2, dtype=torch.float32, **add)

    def run_tiles(
        self, x: Tensor, attended: Tensor, last: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """`run_pairs` for tokens that share experts: a tile of several reads an expert once."""
        keeps = self.apart or self.norm is None or len(x) > MAX_FEW
        order = None if keeps else unit_order(self.w13)
        x, normed, scores = self.score(x, attended, order)
        add, branches = self.branches(x)
        routing = replace(self.routing, shared=1) if self.apart else self.routing
        indices, weights = route(scores, routing)
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
            shared=self.apart,
            ordered=order is not None,
            **add,
        )
        return x, y if branches is None else branches, indices, weights

    def norm_and_score(
        self, x: Tensor, attended: Tensor | None, indices: Tensor, plain: Tensor | None
    ) -> tuple[Tensor, Tensor | QuantizedX, Tensor]:
        """Return x after attention [T, D], its norm, and the router's scores.

        indices, plain: as in `norm_router`.
        """
        if self.before.all_reduce:
            return self.before.all_reduce.fused_add_router(
                x, attended, self.normed_router, indices, self.w13, self.before.added(None)
            )
        x, y, added = self.before.before_norm(x, attended)
        return x, *norm_router(y, self.normed_router, self.w13, indices, plain, **added)

    def score(
        self, x: Tensor, attended: Tensor, order: UnitOrder | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`norm_and_score` for tokens that share experts.

        order: of the numbers of the norm; for up to MAX_FEW tokens.
        """
        x, y, added = self.before.before_norm(x, attended)
        if len(x) <= MAX_FEW:
            return x, *norm_router(y, self.normed_router, **added, order=order)
        normed = y
        if self.norm is not None:
            normed = norm_tokens(y, self.norm.weight, self.norm.eps, **added)
        router = Weight((self.rows.view(torch.int32),), "bf16", 8)  # or fp16, as x
        dots = x.new_empty(len(x), len(self.rows), dtype=torch.float32)
        down_few(normed, router, dots, bias=self.router.bias)
        if self.norm is not None and self.norm.weight is None:
            normed = norm_tokens(x, self.scale, self.norm.eps)
        return x, normed, dots


class NoExperts:
    """Stands for FusedExperts in a block without an FFN."""

    def __init__(self, block: Block):
        _, self.sum = norm_and_sum(block, "attention")
        self.before = self.sum

    def takes_tokens(self, tokens: int) -> bool:
        return tokens == 1 or not self.sum.all_reduce

    def prepare(self) -> None:
        """There is nothing to stack."""

    def forward(
        self, x: Tensor, attended: Tensor | None, last: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        """Return x after attention, as `FusedExperts.forward` returns its own."""
        return self.before.add(x, attended), None, None


class DenseProducts:
    """A dense FFN for a few tokens, with the norm before it.

    Raises ValueError for an FFN that the kernels do not compute.
    """

    def __init__(self, ffn: FeedForward, norm: dense.Norm | None):
        self.norm = norm
        self.activation = settings_of(ffn, FeedForward, FeedForwardAdditions).activation
        self.w13 = projection_weights(ffn.w13)
        self.w2 = kernel_weight(ffn.w2), ffn.w2.bias

    def forward(self, x: Tensor, **add) -> Tensor | None:
        """x [T, D], not normed -> as in `dense_product` with the arguments `add`."""
        h = activate_rows(multiply_ranges(x, self.norm, self.w13), self.activation)
        weight, bias = self.w2
        return dense.dense_product(h, weight, bias=bias, **add)


class FusedFeedForward(NoExperts):
    """Stands for FusedExperts in a block with one dense FFN: norm, FFN, residual sum.

        gate_up     norm of x, products            (ops/products/dense.py)
        activation                                 (ops/products/prompt_rows.py)
        down        product, plus residual         (ops/products/dense.py)

    Raises ValueError for an FFN that the kernels do not compute.
    """

    def __init__(self, block: Block):
        norm, self.sum = norm_and_sum(block, "ffn")
        _, self.before = norm_and_sum(block, "attention")
        if norm is not None:
            settings_of(norm, RMSNorm, NoAdditions)
            norm = dense.Norm(norm.weight, norm.eps)
        self.dense = DenseProducts(block.ffn, norm)
        self.activation = self.dense.activation

    def forward(
        self, x: Tensor, attended: Tensor | None, last: Tensor | None
    ) -> tuple[Tensor, None, None]:
        """Return x after the FFN, as `FusedExperts.forward`. Padding has one, too."""
        x, *_ = super().forward(x, attended, last)
        y = self.dense.forward(x, **self.sum.of_product(x))
        return self.sum.add(x, y), None, None


def stacks_on(shared: Weight, weight: Weight) -> bool:
    """Whether a shared expert's weight has the format of the experts' weight."""
    first, second = (
        (each.kind, each.group, [part.dtype for part in each.parts]) for each in (shared, weight)
    )
    return first == second


def stack(
    experts: nn.Module, shared: nn.Module, weight: Weight, count: int, row_parts: int = 0
) -> Weight:
    """Return the weight [E, out, in] of experts followed by a shared expert's, as `count` of them.

    row_parts: the shared expert is divided along its rows, which are this many parts, gate and up;
    0: along `in`.
    experts' own parameters become a part of the result, so that it takes no memory beside them.
    So does shared's if it counts as one; otherwise it stays, as a copy.
    """
    names = tuple(getattr(experts, "layout", ("weight",)))
    parts = []
    for name in names:
        part, own = getattr(experts, name), getattr(shared, name).data
        if count == 1 or (not row_parts and own.shape[-1] == 1):  # the latter: one scale a row
            pieces = own.expand(count, *own.shape)
        elif row_parts:
            pieces = own.unflatten(0, (row_parts, count, -1)).transpose(0, 1).flatten(1, 2)
        else:
            pieces = own.unflatten(-1, (count, -1)).movedim(-2, 0)
        joined = torch.cat((part.data, pieces))
        part.data = joined[:-count]
        if count == 1:
            getattr(shared, name).data = joined[-1]
        parts.append(joined.view(weight.parts[0].dtype) if len(names) == 1 else joined)
    return replace(weight, parts=tuple(parts))


class FusedMixer:
    """The products of a mixer (`BlockAdditions.mixers`) for a few tokens.

    Raises ValueError for weights that the kernels do not multiply.
    """

    def __init__(self, mixer: nn.Module):
        self.module, self.scale = mixer, mixer.scale
        self.down, self.up = kernel_weight(mixer.down), kernel_weight(mixer.up)

    def forward(self, normed: Tensor, combine) -> Tensor:
        """normed [B, Q, ...] -> a sublayer's x [T, D].

        combine: (mixer, normed, products [B, Q, out]) -> x [B, Q, D], by the mixer's `combine`.
        """
        B, Q = normed.shape[:2]
        products = self.multiply(normed.view(B * Q, -1)).view(B, Q, -1)
        return combine(self.module, normed, products).flatten(0, 1)

    def multiply(self, normed: Tensor) -> Tensor:
        """normed [T, in] -> up silu(scale down normed), [T, out]."""
        h = dense.dense_product(normed, self.down, scale=self.scale, activation=SWIGLU)
        return dense.dense_product(h, self.up)


class FusedLayer:
    """A block's kernels for a few tokens. It shares the block's parameters and cache.

    Raises ValueError for a block that the kernels do not compute.
    """

    attention: FusedAttention
    experts: FusedExperts | NoExperts

    def __init__(self, block: Block, experts: type[FusedExperts] = FusedExperts):
        added = settings_of(block, Block, BlockAdditions)
        self.attention = FusedAttention(block)
        self.mixers = [FusedMixer(mixer) for mixer in added.mixers or ()]
        if isinstance(block.ffn, MoE):
            self.experts = experts(block)
        else:
            self.experts = FusedFeedForward(block) if added.has_ffn else NoExperts(block)

    def forward(
        self, x: Tensor, context: Context, core, reach: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, D], not normed -> x after the block, expert_indices, expert_weights [T, A].

        The tokens are those of `context.positions` [B, Q], in order. core: (attention, projected
        [B, Q, N], context) -> heads, by `Attention.core`. It is called where no kernel computes
        that. reach: as in `attend_tokens`. `FusedRunner.mix` takes the place of this for a block
        with mixers: here its kernels are launched without its own functions.
        """
        for mixer in self.mixers:
            mixer.multiply(x.new_empty(len(x), mixer.down.width))
        attended = self.attention.forward(x, context, core, reach)
        return self.experts.forward(x, attended, context.last)


def fused_layers(
    model: Transformer, make_layer: Callable[[Block], FusedLayer] = FusedLayer
) -> dict[Block, FusedLayer]:
    """Return a fused layer for each block that the kernels compute.

    make_layer: raises ValueError for another block.
    """
    layers: dict[Block, FusedLayer] = {}
    for block in model.layers:
        try:
            layers[block] = make_layer(block)
        except ValueError:
            continue
    return layers
