"""Decode one token by six Triton kernels a layer, instead of Inductor's ten to thirteen.

    wqkv         norm of x, product
    attention    q and k norm, RoPE, cache append, attention      (ops/decode_attention.py)
    wo           product, plus residual
    router       norm, scores                                     (ops/moe_router.py)
    gate_up      top-k, products of the chosen experts, SwiGLU    (ops/moe_decode.py)
    down         products, weighted sum, plus residual

Latent attention has three kernels between its products, or four (ops/latent_decode_attention.py).
Other attention has others there: `core` compiled by Inductor. Shared experts become experts that
every token chooses. A family declares by `fused_decode_settings` what it adds to `model.Attention`,
`model.MoE` or `model.AddNorm`; without it, a subclass has no kernels.

`FusedRunner` launches the kernels directly: a session captures the step as a CUDA graph, which
costs them nothing. It serves one token of one sequence. Prompts, batches and drafts run the
compiled blocks, which are the reference that tests compare with.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from model import (
    AddNorm,
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
from ops import moe_decode, moe_router
from ops.inductor import materialize
from ops.moe_decode import SWIGLU, Weight
from ops.moe_router import Routing
from runtime.fused_attention import FusedDecodeAttention, fused_attention
from runtime.fused_latent_attention import FusedLatentAttention
from runtime.runner import CompiledRunner


def kernel_weight(module: nn.Module) -> Weight:
    """Return a module's weight as the kernels read it. Raises ValueError if they cannot."""
    if hasattr(module, "kernel_weight"):  # a packed weight
        return module.kernel_weight()
    return moe_decode.plain_weight(module.weight)


def settings_of(module: nn.Module, plain: type) -> dict:
    """Return what the module adds to the plain class: its `fused_decode_settings`.

    Raises ValueError if it does not say, or if a subclass of the class that says has changed more.
    """
    for kind in type(module).__mro__:
        if kind is plain:
            return {}
        if "fused_decode_settings" in vars(kind):
            settings = module.fused_decode_settings()
            if settings is not None:
                return settings
            break
        if any(callable(value) for name, value in vars(kind).items() if name != "__init__"):
            break
    raise ValueError(f"no kernels for {type(module).__name__}")


def residual_scale(add: nn.Module) -> float:
    """Return the factor of what is added to the residual."""
    return settings_of(add, AddNorm).get("scale", 1.0)


def choose_attention(attention: nn.Module) -> nn.Module | FusedLatentAttention:
    """Return an attention layer with its kernels, if it has some; else the layer.

    Raises ValueError for latent attention whose wq they cannot read.
    """
    settings = getattr(attention, "fused_decode_settings", dict)()
    if "latent" not in settings:
        return fused_attention(attention)
    wq = attention.wq
    return FusedLatentAttention(attention, settings, None if wq is None else kernel_weight(wq))


class FusedAttention:
    """The attention half of a block for one token: norm, projections, core, residual sum.

    Raises ValueError for attention that the kernels do not compute.
    """

    def __init__(self, block: Block):
        self.norm, self.scale = block.attention_norm, residual_scale(block.add_attention)
        attention = block.attention
        self.attention = choose_attention(attention)
        if not isinstance(self.norm, RMSNorm) or not hasattr(attention, "core"):
            raise ValueError(f"no kernels for {type(attention).__name__}, or its norm")
        names, output = getattr(attention, "projections", (("wqkv",), "wo"))
        modules = [getattr(attention, name) for name in names]
        self.inputs = [(kernel_weight(m), m.bias) for m in modules if m is not None]
        output = getattr(attention, output)
        self.output = kernel_weight(output), output.bias

    def forward(self, x: Tensor, context: Context, core) -> Tensor:
        """x [1, D], not normed -> x after attention. core: as of `FusedLayer.forward`."""
        projected = x.new_empty(1, sum(weight.out for weight, _ in self.inputs))
        parts = projected.split([weight.out for weight, _ in self.inputs], dim=1)
        for (weight, bias), part in zip(self.inputs, parts, strict=True):
            norm, eps = self.norm.weight, self.norm.eps
            moe_decode.down(x, weight, norm=norm, eps=eps, bias=bias, out=part)
        projected, attention = projected.unsqueeze(0), self.attention
        if not isinstance(attention, FusedDecodeAttention | FusedLatentAttention):
            heads = core(attention, projected, context)
        elif attention.takes(projected, context):
            heads = attention.fused_core(projected, context)
        else:
            heads = core(attention.plain[0], projected, context)
        weight, bias = self.output
        return moe_decode.down(heads.squeeze(0), weight, residual=x, bias=bias, scale=self.scale)


class FusedExperts:
    """The other half: norm, router, experts, residual sum. Shared experts follow the others.

    Raises ValueError for a layer that the kernels do not compute.
    """

    def __init__(self, block: Block):
        ffn = block.ffn
        self.norm, self.scale = block.ffn_norm, residual_scale(block.add_ffn)
        settings = settings_of(ffn, MoE)
        self.experts: Experts = ffn.experts
        self.router: Linear = ffn.router
        if type(self.experts) is not Experts or type(self.router) is not Linear:
            raise ValueError("no kernels for other experts or another router")
        if not isinstance(self.norm, RMSNorm):
            raise ValueError(f"no kernels for {type(self.norm).__name__}")
        self.activation = settings.get("activation", SWIGLU)
        if "activation" not in settings and self.experts.activation is not swiglu:
            raise ValueError("no kernels for another activation")
        self.w13, self.w2 = kernel_weight(self.experts.w13), kernel_weight(self.experts.w2)
        self.bias13 = getattr(self.experts.w13, "bias", None)
        self.bias2 = getattr(self.experts.w2, "bias", None)
        self.shared: FeedForward | None = settings.get("shared")
        self.gate: Linear | None = settings.get("shared_gate")
        self.routing = settings.get("routing", Routing(ffn.n_active, ffn.norm_topk))
        if self.shared is not None:
            count = self.shared_count(self.shared)
            self.routing = replace(self.routing, shared=count, gated=self.gate is not None)
        E, D = self.router.weight.shape
        moe_router.check_router(E, D, self.routing)
        self.rows = self.router.weight

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

    def prepare(self) -> None:
        """Stack the shared expert's weights on the others', once for each model."""
        if self.shared is None:
            return
        kept = vars(self.experts)  # of an earlier runner of this model
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

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [1, D], not normed -> x after the experts, expert_indices, expert_weights [1, A]."""
        normed, scores = moe_router.norm_router(
            x, self.norm.weight, self.norm.eps, self.rows, self.routing, bias=self.router.bias
        )
        h, indices, weights = moe_decode.gate_up(
            normed, self.w13, scores, self.routing, self.activation, bias=self.bias13
        )
        x = moe_decode.down(
            h, self.w2, indices, weights, residual=x, bias=self.bias2, scale=self.scale
        )
        active = self.routing.active
        return x, indices[:, :active], weights[:, :active]


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
    """A block's kernels for one token. It shares the block's parameters and cache.

    Raises ValueError for a block that the kernels do not compute.
    """

    attention: FusedAttention
    experts: FusedExperts

    def __init__(self, block: Block):
        if type(block) is not Block or not isinstance(block.ffn, MoE):
            raise ValueError("no kernels for a block that differs from model.Block")
        self.attention, self.experts = FusedAttention(block), FusedExperts(block)

    def forward(self, x: Tensor, context: Context, core) -> tuple[Tensor, Tensor, Tensor]:
        """x [1, D], not normed -> x after the block, expert_indices, expert_weights [1, A].

        core: (attention, projected [1, 1, N], context) -> heads, by `Attention.core`. It is called
        where no kernel computes that.
        """
        return self.experts.forward(self.attention.forward(x, context, core))


def run_unfused(block: Block, x: Tensor, context: Context, identity: nn.Module):
    """Call a block that has no kernels: x [1, 1, D], not normed -> x, indices, weights."""
    normed = materialize(block.attention_norm(x))
    x, _, *routing = block.forward(x, normed, context, identity)
    return x, *routing


def begin_token(model: Transformer, tokens: Tensor, span: Tensor) -> tuple[Tensor, Context]:
    x, _, context = model.begin(tokens, span)
    return x, context


def end_token(model: Transformer, x: Tensor, last: Tensor | None) -> Tensor:
    return model.logits(materialize(model.norm(x)), last)


def run_core(attention: nn.Module, projected: Tensor, context: Context) -> Tensor:
    return attention.core(projected, context)


class FusedRunner(CompiledRunner):
    """Runs one token through fused layers, all else as CompiledRunner.

    Between fused layers x is not normed: each begins with its own norm.
    """

    def __init__(self, model: Transformer, dynamic: bool = False):
        super().__init__(model, dynamic)
        self.one_token = False  # the call in progress has one token
        self.layers = {id(block): layer for block, layer in fused_layers(model).items()}
        for layer in self.layers.values():
            layer.experts.prepare()
        self.compiled_begin_token = self.compile(begin_token)
        self.compiled_end_token = self.compile(end_token)
        self.compiled_core = self.compile(run_core)
        self.compiled_unfused = self.compile(run_unfused)
        self.identity = nn.Identity()

    def begin(self, model: Transformer, tokens: Tensor, span: Tensor | Chunk):
        self.one_token = tokens.numel() == 1 and not isinstance(span, Chunk)
        if not self.one_token:
            return super().begin(model, tokens, span)
        x, context = self.compiled_begin_token(model, tokens, span)
        return x, x, context

    def block(
        self, block: Block, x: Tensor, normed: Tensor, context: Context, next_norm: nn.Module
    ):
        if not self.one_token:
            return super().block(block, x, normed, context, next_norm)
        layer = self.layers.get(id(block))
        if layer is None:
            x, *routing = self.compiled_unfused(block, x, context, self.identity)
        else:
            y, *routing = layer.forward(x.squeeze(0), context, self.compiled_core)
            x = y.unsqueeze(0)
        return x, x, *routing

    def logits(self, model: Transformer, normed: Tensor, last: Tensor | None) -> Tensor:
        if not self.one_token:
            return super().logits(model, normed, last)
        return self.compiled_end_token(model, normed, last)


def fused_layers(model: Transformer) -> dict[Block, FusedLayer]:
    """Return a fused layer for each block that the kernels compute."""
    layers: dict[Block, FusedLayer] = {}
    for block in model.layers:
        try:
            layers[block] = FusedLayer(block)
        except ValueError:
            continue
    return layers


def can_fuse(model: Transformer, device: torch.device) -> bool:
    """Whether all layers with experts have kernels, on a GPU that has what they use.

    model: it may be on the meta device.
    """
    if device.type != "cuda" or model.embedding.weight.element_size() != 2:
        return False
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    sparse = sum(isinstance(block.ffn, MoE) for block in model.layers)
    return 0 < sparse == len(fused_layers(model))
