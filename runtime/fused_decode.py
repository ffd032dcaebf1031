"""Decode one token by seven Triton kernels a layer, instead of Inductor's ten to thirteen.

    wqkv         norm of x, product
    attention    q and k norm, RoPE, cache append, attention      (ops/decode_attention.py)
    wo           product, plus residual
    router       norm, scores; loads the next layer's wqkv into L2 meanwhile
    route        top-k and routing weights
    gate_up      products of the chosen experts, SwiGLU
    down         products, weighted sum, plus residual

All but attention are in ops/moe_decode.py. `FusedRunner` launches them directly: a session captures
the step as a CUDA graph, which costs them nothing. It serves one token of one sequence. Prompts,
batches and drafts run the compiled blocks, which are the reference that tests compare with.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from model import (
    AddNorm,
    Attention,
    Block,
    Chunk,
    Context,
    Experts,
    Linear,
    MoE,
    Transformer,
    swiglu,
)
from ops import moe_decode
from ops.inductor import materialize
from ops.moe_decode import Weight
from runtime.fused_attention import FusedDecodeAttention
from runtime.runner import CompiledRunner

MIN_PREFETCH = 1 << 20  # bytes of a weight that is worth a prefetch


def kernel_weight(module: nn.Module) -> Weight:
    """Return a module's weight as the kernels read it. Raises ValueError if they cannot."""
    if hasattr(module, "kernel_weight"):  # a packed weight
        return module.kernel_weight()
    if getattr(module, "bias", None) is not None:
        raise ValueError("no kernel for a product with a bias")
    return moe_decode.plain_weight(module.weight)


class FusedLayer:
    """A block's kernels for one token. It shares the block's parameters and cache.

    Raises ValueError for a block that the kernels do not compute.
    """

    def __init__(self, block: Block):
        attention, ffn = block.attention, block.ffn
        plain = (Block, MoE, Experts, AddNorm, AddNorm)
        found = block, ffn, getattr(ffn, "experts", None), block.add_attention, block.add_ffn
        if tuple(map(type, found)) != plain or type(ffn.router) is not Linear:
            raise ValueError("no kernels for a block that differs from model.Block")
        if ffn.experts.activation is not swiglu or ffn.router.bias is not None:
            raise ValueError("no kernels for another activation or a router's bias")
        if type(attention) is Attention:
            attention = FusedDecodeAttention(attention, {})
        if type(attention) is not FusedDecodeAttention or attention.settings:
            raise ValueError("no kernels for an attention that differs from model.Attention")
        self.block, self.attention, self.ffn = block, attention, ffn
        self.wqkv, self.wo = kernel_weight(attention.wqkv), kernel_weight(attention.wo)
        self.w13, self.w2 = kernel_weight(ffn.experts.w13), kernel_weight(ffn.experts.w2)
        moe_decode.check_router(ffn.router.weight, ffn.n_active)
        self.prefetched: Tensor | None = None  # the next layer's wqkv

    def forward(self, x: Tensor, context: Context, core) -> tuple[Tensor, Tensor, Tensor]:
        """x [1, D], not normed -> x after the block, expert_indices, expert_weights [1, A].

        core: attention for caches that the kernel is not for, as `Attention.core` with the
        attention before it.
        """
        norm, ffn = self.block.attention_norm, self.ffn
        qkv = moe_decode.down(x, self.wqkv, norm=norm.weight, eps=norm.eps).unsqueeze(0)
        attention = self.attention
        if attention.takes(qkv, context):
            heads = attention.fused_core(qkv, context)
        else:
            heads = core(attention.plain[0], qkv, context)
        x = moe_decode.down(heads.squeeze(0), self.wo, residual=x)
        norm, router = self.block.ffn_norm, ffn.router.weight
        x, normed, indices, weights, scores = moe_decode.norm_router(
            x,
            None,
            norm.weight,
            norm.eps,
            router,
            ffn.n_active,
            ffn.norm_topk,
            ahead=self.prefetched,
        )
        h = moe_decode.gate_up(normed, indices, self.w13, scores=scores)
        return moe_decode.down(h, self.w2, indices, weights, residual=x), indices, weights


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


def run_core(attention: Attention, qkv: Tensor, context: Context) -> Tensor:
    return attention.core(qkv, context)


class FusedRunner(CompiledRunner):
    """Runs one token through fused layers, all else as CompiledRunner.

    Between fused layers x is not normed: each begins with its own norm.
    """

    def __init__(self, model: Transformer, dynamic: bool = False):
        super().__init__(model, dynamic)
        self.one_token = False  # the call in progress has one token
        self.layers = {id(block): layer for block, layer in fused_layers(model).items()}
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
    for layer, following in pairwise(layers.values()):
        codes = following.wqkv.parts[0]
        layer.prefetched = codes if codes.nbytes >= MIN_PREFETCH else None
    return layers


def can_fuse(model: Transformer, device: torch.device) -> bool:
    """Whether all layers with experts have kernels, on a GPU that has what they use.

    model: it may be on the meta device.
    """
    if device.type != "cuda" or model.norm.weight.element_size() != 2:
        return False
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    sparse = sum(isinstance(block.ffn, MoE) for block in model.layers)
    return 0 < sparse == len(fused_layers(model))
