"""Run and compile the kernels of ops/products/ without a GPU; see kernels_without_gpu.py.

    TRITON_INTERPRET=1 python tests/moe_kernels_without_gpu.py < INPUT    Triton's interpreter, CPU
    python tests/moe_kernels_without_gpu.py < INPUT    machine code for an H200, by Triton and ptxas

INPUT is a JSON object: "cases", a list of the arguments of `Case`, and "layers", a list of the
arguments of `layer_errors`; "models", "sharded", "dense" and "scores" are others. The interpreter's
process prints relative errors by kernel of every case, of whole layers and of models. The other
prints a list: counts of each case's machine code.
"""

import itertools
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

import tp
from formats import FORMATS, PLAIN
from formats.packed import Packed, PackedExpertLinear, PackedLinear
from formats.quantizer import plan_format
from formats.row_ranges import RowRanges
from model import (
    Block,
    Context,
    ExpertLinear,
    Linear,
    ModelArgs,
    MoE,
    RMSNorm,
    Transformer,
    swiglu,
    weighted_sum,
)
from models import ARCHITECTURES, args_of_checkpoint, build_model, family_of
from models.afmoe import AfmoeArgs
from models.ernie4_5_moe import Ernie4_5MoeArgs
from models.gemma4 import Gemma4Args
from models.gpt_oss import BiasedExpertLinear, GptOssArgs, clamped_swiglu
from models.granitemoehybrid import GraniteMoeHybridArgs
from models.kolibri1 import Kolibri1Args
from models.latent_family import LatentArgs
from models.layers import mamba2
from models.layers.gated_hybrid import HybridArgs
from models.layers.granite import GraniteMoeArgs
from models.layers.group_routing import BiasedSoftmaxMoE, SigmoidRoutedMoE
from models.layers.short_conv import ShortConv
from models.lfm2_moe import Lfm2MoeArgs
from models.nemotron_h import NemotronHArgs
from models.qwen2_moe import Qwen2MoeArgs
from models.qwen4_exp import Qwen4ExpArgs
from models.random_weights import RandomWeights
from ops.declared import SWIGLU, Activation, Routing
from ops.plain.mamba2 import group_norm
from ops.products import dense, expert_tiles, few_tokens, fragments, quantized_x
from ops.products import experts as moe_decode
from ops.products import tilings as moe_tiles
from ops.products.join import NOTHING, Added, NormRouter, add_branch, norm_router
from ops.products.planes import make_planes
from ops.products.routing import route
from ops.products.weights import INTEGERS, Weight, packed_weight, plain_weight
from ops.ranks.mailbox import MAX_DIM, MAX_PROGRAMS, MAX_WORDS, TokenInbox, words_of
from runtime import fused_layer
from runtime.fused_attention import FusedDecodeAttention
from runtime.fused_decode import FusedRunner
from runtime.fused_latent_attention import FusedLatentAttention
from runtime.fused_layer import MAX_FEW, FusedLayer
from runtime.loading import WeightLoader
from tests import interpreter
from tests.kernels_without_gpu import (
    Launch,
    compiled,
    replace_four_bits,
)
from tests.launched_code import launched_code

GROUPS = dict(int4=32, uint4=32, hqq4=32, mxfp4=32, nvfp4=32)  # so that small widths fit
GROUPS |= dict(int8=16, fp8=16, fp8b=32, hqq2=16, hqq3=64)
GROUPS |= dict(q8_0=32, q5_1=32, q4_1=32, q4_0=32, iq4_nl=32)
GROUPS |= dict(q4_k=256, q5_k=256, q6_k=256, iq4_xs=256)


@dataclass(frozen=True)
class Case:
    """Shape, format and tiling of an MoE layer for a few tokens."""

    format: str  # "bf16" or a name in FORMATS
    D: int
    I: int
    E: int
    A: int
    group: int = 0  # 0: that of GROUPS
    norm_topk: bool = True
    shared: int = 0  # experts that every token uses, the last of E
    gated: bool = False  # their weight is the sigmoid of a score
    sigmoid: bool = False  # scores, whose bias corrects the choice
    softmax: bool = False  # the same of softmax scores
    scale: float = 1.0  # of routing weights, and of what is added to the residual
    biased: bool = False  # experts and dense products; clamped SwiGLU
    fp32_norm: bool = False  # the dense product's norm is fp32
    groups: int = 1  # the dense product norms these parts of x
    tiles: dict = field(default_factory=dict)
    few: dict = field(default_factory=dict)  # `FewTiles` of products of several tokens
    seed: int = 0
    tokens: int = 1
    last: tuple[int, ...] = ()  # each sequence's last real token; (): all are real


@triton.jit
def dot_twin(a, b, total):
    """Replace `fragments._dot`: the interpreter multiplies bf16 bits as integers."""
    return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")


class Layer:
    """Random tensors of a case: weights for the kernels, and unpacked ones for the reference."""

    def __init__(self, case: Case):
        self.case, self.random = case, torch.Generator().manual_seed(case.seed)
        D, I, E = case.D, case.I, case.E
        self.w13, self.plain13 = self.weight(E, 2 * I, D)
        self.w2, self.plain2 = self.weight(E, D, I)
        self.dense, self.plain_dense = self.weight(1, I, D)
        self.dtype = torch.bfloat16 if case.format == "bf16" else torch.float16
        T = case.tokens
        self.x = self.normal(T, D).to(self.dtype)
        self.norm = (self.normal(D) * 0.2 + 1).to(torch.float32 if case.fp32_norm else self.dtype)
        self.bias = [self.normal(E, 2 * I), self.normal(E, D)] if case.biased else [None, None]
        chosen = [torch.randperm(E, generator=self.random)[: case.A] for _ in range(T)]
        self.indices = torch.stack(chosen)
        self.routing = torch.rand(T, case.A, generator=self.random)
        self.tiles = moe_tiles.Tiles(**case.tiles)
        self.few_tiles = self.tiles
        if T > 1:
            self.few_tiles = few_tokens.FewTiles(**case.few) if case.few else None
        # Tokens that are computed: one alone always is.
        self.last, self.real = None, torch.ones(T, dtype=torch.bool)
        if case.last:
            self.last = torch.tensor(case.last)
            if T > 1:
                queries = torch.arange(T // len(case.last))
                self.real = (queries <= self.last.unsqueeze(1)).flatten()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def weight(self, *shape: int) -> tuple[Weight, Tensor]:
        weight = self.normal(*shape) * shape[-1] ** -0.5
        if self.case.format == "bf16":
            weight = weight.bfloat16()
            return plain_weight(weight), weight.double()
        format = FORMATS[self.case.format]
        group = self.case.group or GROUPS[format.name]
        parts = format.pack(weight, group)
        kernel = packed_weight(list(parts.values()), format.kind, group)
        return kernel, format.unpack(parts, group).double()


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def plain_experts(weight: Tensor, bias: Tensor | None) -> ExpertLinear:
    """Return the plain module with a given weight and bias, in fp64."""
    module = ExpertLinear(1, 1, 1) if bias is None else BiasedExpertLinear(1, 1, 1)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = torch.nn.Parameter(bias.double(), requires_grad=False)
    return module


def expert_errors(layer: Layer) -> dict[str, float]:
    """Compare with `ExpertLinear.gather_gated`, `gather` and `weighted_sum`, in fp64."""
    case, tiles, fp32 = layer.case, layer.tiles, torch.float32
    options = dict(tiles=tiles, dtype=fp32)
    activation, plain = SWIGLU, swiglu
    if case.biased:
        limits = dict(limit=0.5, alpha=1.7)
        activation, plain = Activation("clamped", **limits), partial(clamped_swiglu, **limits)
    bias13, bias2 = layer.bias
    w13, w2 = plain_experts(layer.plain13, bias13), plain_experts(layer.plain2, bias2)
    want_h = w13.gather_gated(layer.x.double(), layer.indices, plain)
    given = layer.normal(case.tokens, case.A, case.I).to(layer.dtype)
    residual = layer.normal(case.tokens, case.D).to(layer.dtype)
    add = {"residual": residual, "bias": bias2, "scale": case.scale}
    experts = dict(indices=layer.indices, routing=layer.routing)
    real = layer.real.unsqueeze(1)
    if case.tokens == 1:
        x, indices = layer.x, layer.indices
        h = moe_decode.multiply_each(x, layer.w13, indices, activation, bias=bias13, **options)
        y = moe_decode.down(given, layer.w2, **experts, **add, **options)
        known = layer.indices.clone()
        known[:, -1] = case.E - 1
        one, same = (
            moe_decode.down(given, layer.w2, known, layer.routing, **add, **options, shared=n)
            for n in (0, 1)
        )
        assert torch.equal(one, same), relative(one, same)
        if layer.w2.kind in INTEGERS:  # as integers of a kernel of its own: the same
            integers = quantized_x.quantize_tokens(given.flatten(1), layer.w2)
            same = moe_decode.down(integers, layer.w2, **experts, **add, **options)
            assert torch.equal(same, y), relative(same, y)
            with mock.patch.object(quantized_x, "LONG_X", 0):  # of 4 bits `down` calls that kernel
                same = moe_decode.down(given, layer.w2, **experts, **add, **options)
            assert torch.equal(same, y), relative(same, y)
    else:  # h of padding is undefined: nothing may come of it
        given = given.where(real.unsqueeze(2), torch.nan)
        h, y = several_tokens(layer, activation, given, residual)
        pairs = moe_decode.down(
            given.flatten(0, 1), layer.w2, **experts, **add, last=layer.last, **options
        )
        # Numbers of hqq2 and hqq3 are rounded to 16 bits for tensor cores.
        most = 3e-4 if layer.w2.two_bits else 1e-4
        assert relative(pairs, y) < most, relative(pairs, y)
        check_shared_pairs(layer)
    want = weighted_sum(w2.gather(given.double(), layer.indices), layer.routing)
    want = torch.where(real, want * case.scale, 0.0) + residual
    h = h.view(want_h.shape)[layer.real]
    gate_up = relative(h, want_h[layer.real]) if real.any() else 0.0
    return {"gate_up": gate_up, "down": relative(y, want)}


def check_shared_pairs(layer: Layer) -> None:
    """Check gate and up of several tokens with shared experts, whose programs start first."""
    case, shared = layer.case, layer.case.shared
    if not shared:
        return
    routing = Routing(case.A - shared or 1, case.norm_topk, shared=shared, gated=case.gated)
    scores = layer.normal(case.tokens, 1, case.E - shared + case.gated)
    tokens = [slice(n, n + 1) for n in range(case.tokens)]
    rows = [moe_decode.gate_up(layer.x[n], layer.w13, scores[n], routing) for n in tokens]
    found = moe_decode.gate_up(layer.x, layer.w13, scores, routing)
    for got, want in zip(found, map(torch.cat, zip(*rows, strict=True)), strict=True):
        assert relative(got, want) < 1e-3, relative(got, want)


def several_tokens(
    layer: Layer, activation: Activation, given: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Return h [T * A, I], and the sum over experts of the products of `given` [T, A, I]."""
    case, last, (bias13, bias2) = layer.case, layer.last, layer.bias
    P, tiles = case.tokens * case.A, layer.few_tiles
    order = expert_tiles.sort_pairs(layer.indices, case.E, last)
    h, parts = torch.full((P, case.I), torch.nan), torch.full((P, case.D), torch.nan)
    multiply = expert_tiles.multiply_tiles
    multiply(layer.x, layer.w13, order, h, activation, bias=bias13, tiles=tiles)
    multiply(given.flatten(0, 1), layer.w2, order, parts, None, layer.routing, bias2, tiles)
    sums = (residual, case.scale, last)
    return h, expert_tiles.combine(parts, case.A, torch.float32, *sums)


def dense_error(layer: Layer, edge: bool = False) -> float:
    """Compare a dense product with a residual, in registers with the norm of x, in fp64.

    edge: x and the norm's weight whose products round to the next power of two; and SiLU of all but
    the residual.
    """
    case = layer.case
    weight = replace(layer.dense, parts=tuple(part[0] for part in layer.dense.parts))
    residual = layer.normal(case.tokens, case.I).to(layer.dtype)
    x = torch.full_like(layer.x, 2 - 2**-9) if edge else layer.x
    norm = torch.full_like(layer.norm, 1 + 2**-10) if edge else layer.norm
    bias = layer.bias[0][0, : case.I] if case.biased else None
    errors, most = [], dense.most_in_registers(weight)
    # On tensor cores, and without: programs of up to IN_REGISTERS tokens.
    for tiles in {layer.tiles} if case.groups > 1 else {layer.few_tiles, layer.tiles}:
        has_norm = isinstance(tiles, moe_tiles.Tiles)
        if tiles is None:  # the number of tokens decides
            has_norm = case.tokens <= max(1, most)
        normed = x.double()
        out = torch.full((case.tokens, case.I + 24), torch.nan)  # a part of longer rows
        got = dense.dense_product(
            x,
            weight,
            dense.Norm(norm, 1e-5, case.groups) if has_norm else None,
            residual=residual,
            bias=bias,
            scale=case.scale,
            tiles=tiles,
            out=out[:, 8 : 8 + case.I],
            activation=SWIGLU if edge else None,
        )
        assert out[:, :8].isnan().all() and out[:, 8 + case.I :].isnan().all()
        if has_norm:
            normed = group_norm(normed, norm.double(), case.groups, 1e-5)
        want = normed @ layer.plain_dense[0].T + (0 if bias is None else bias.double())
        want *= case.scale
        want = torch.nn.functional.silu(want) if edge else want
        errors.append(relative(got, want + residual.double()))
    return max(errors)


def planes_error(layer: Layer) -> float:
    """Compare products of tokens as planes: with a norm and a narrow weight beside; and without."""
    case, eps = layer.case, 1e-5
    weight = replace(layer.dense, parts=tuple(part[0] for part in layer.dense.parts))
    x, norm, narrow = layer.x.bfloat16(), layer.norm.bfloat16(), layer.normal(4, case.D).bfloat16()
    y, beside = torch.empty(case.tokens, weight.out), torch.empty(case.tokens, 4)
    residual = layer.normal(*y.shape)
    planes = make_planes(x, norm, weight)
    options = {"eps": eps, "beside": (plain_weight(narrow), beside)}
    few_tokens.multiply_planes(planes, weight, y, **options)
    normed, plain = group_norm(x.double(), norm.double(), 1, eps), layer.plain_dense[0].T
    error = max(relative(y, normed @ plain), relative(beside, normed @ narrow.double().T))
    few_tokens.multiply_planes(planes._replace(squares=None), weight, y, residual, scale=0.5)
    return max(error, relative(y, 0.5 * (x.double() * norm.double()) @ plain + residual))


def plane_lanes(layer: Layer) -> list[str]:
    """Return the layouts of what tensor cores multiply, in the compiled product of planes."""
    weight = replace(layer.dense, parts=tuple(part[0] for part in layer.dense.parts))
    y = torch.empty(layer.case.tokens, weight.out)

    def call() -> None:
        few_tokens.multiply_planes(make_planes(layer.x, layer.norm, weight), weight, y)

    code = launched_code(call)["_down_few"].asm["ttgir"]
    names = set(re.findall(r"mma\.sync.* -> tensor<[0-9x]+xi32, (#\w+)>", code))
    return [re.search(rf"^{name} = (.*)", code, re.MULTILINE)[1] for name in names]


def beside_error(layer: Layer) -> float:
    """Return the error of a wide product and of a narrow one of bf16 in its launch, of bf16 x."""
    case, x, norm = layer.case, layer.x.bfloat16(), layer.norm.float()
    weight = replace(layer.dense, parts=tuple(part[0] for part in layer.dense.parts))
    rows = layer.normal(max(1, case.I // 16), case.D).bfloat16()
    narrow = plain_weight(rows)
    if not dense.takes_beside(weight, narrow, case.tokens):
        return 0.0
    y = torch.full((case.tokens, case.I + len(rows)), torch.nan)
    parts = y.split((case.I, len(rows)), 1)
    normed, given = group_norm(x.double(), norm.double(), 1, 1e-5), dense.Norm(norm, 1e-5)
    if case.tokens > dense.most_in_registers(weight):
        x, given = normed.bfloat16(), None
        normed = x.double()
    dense.dense_product(x, weight, given, out=parts[0], beside=(narrow, parts[1]))
    want = normed @ layer.plain_dense[0].T, normed @ rows.double().T
    return max(relative(*pair) for pair in zip(parts, want, strict=True))


class PlainRouting(MoE):
    """`MoE.route`, then `GroupRoutedMoE.route`'s factor, without weights."""

    def __init__(self, case: Case, score_bias: Tensor):
        torch.nn.Module.__init__(self)
        self.n_active, self.norm_topk, self.routed_scale = case.A, case.norm_topk, case.scale
        self.n_group = self.n_active_group = 1
        self.score_bias = score_bias
        self.sigmoid, self.softmax = case.sigmoid, case.softmax

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.sigmoid:
            return SigmoidRoutedMoE.route(self, scores)
        if self.softmax:
            indices, weights = BiasedSoftmaxMoE.route(self, scores)
            return indices, weights * self.routed_scale
        indices, weights = super().route(scores)
        return indices, weights * self.routed_scale

    def selection_scores(self, scores: Tensor) -> Tensor:
        return scores.sigmoid() + self.score_bias if self.sigmoid else scores


def router_errors(layer: Layer) -> dict[str, float]:
    """Compare with `RMSNorm` and `MoE.route`, in fp32."""
    case, D, E = layer.case, layer.case.D, layer.case.E
    x, router = layer.normal(case.tokens, D), layer.normal(E + case.gated, D) * D**-0.5
    bias, score_bias = layer.normal(E), layer.normal(E)
    norm = RMSNorm(D, 1e-5)
    norm.weight.copy_(layer.norm)
    routing = Routing(
        case.A,
        case.norm_topk,
        case.scale,
        score_bias=score_bias if case.sigmoid or case.softmax else None,
        softmax=case.softmax,
        shared=case.shared,
        gated=case.gated,
    )
    before = NormRouter(norm.weight, 1e-5, router, routing, bias)
    settings = dict(rows=1 + case.seed % 2 * 3)
    normed, scores = norm_router(x, before, **settings)
    indices, weights, error = choose(layer, scores, routing)
    logits = norm(x) @ router.T
    want_indices, want_weights = PlainRouting(case, score_bias).route(logits[:, :E] + bias)
    if case.shared:
        share = logits[:, E:].sigmoid() if case.gated else torch.ones(case.tokens, 1)
        shared = (E + torch.arange(case.shared)).expand(case.tokens, -1)
        want_indices = torch.cat((want_indices, shared), 1)
        want_weights = torch.cat((want_weights, share.expand(-1, case.shared)), 1)
    return {
        "norm": relative(normed, norm(x)),
        "indices": float((indices != want_indices).sum()),
        "weights": relative(weights, want_weights),
        "choice": error,
        "quantized": quantized_error(layer, x.half(), before, settings),
    }


def quantized_error(layer: Layer, x: Tensor, before: NormRouter, settings: dict) -> float:
    """Return the error of `gate_up` with the norm as `norm_router` quantizes it: 0, if right.

    before, settings: of `norm_router`.
    """
    case = layer.case
    w13, _ = layer.weight(case.E + case.shared, 2 * case.I, case.D)
    if w13.kind not in INTEGERS:
        return 0.0
    options = dict(tiles=layer.tiles, dtype=torch.float32)
    plain, scores = norm_router(x, before, **settings)
    quantized, same_scores = norm_router(x, before, w13, **settings)
    assert isinstance(quantized, quantized_x.QuantizedX)
    expected, *_ = moe_decode.gate_up(plain, w13, scores, before.routing, **options)
    found, *_ = moe_decode.gate_up(quantized, w13, same_scores, before.routing, **options)
    return max(relative(found, expected), relative(same_scores, scores))


def choose(layer: Layer, scores: Tensor, routing) -> tuple[Tensor, Tensor, float]:
    """Return the choice of `gate_up`, and the error of its product beside given indices."""
    case = layer.case
    w13, _ = layer.weight(case.E + case.shared, 2 * case.I, case.D)
    options = dict(tiles=layer.tiles, dtype=torch.float32)
    last = layer.last if case.tokens > 1 else None
    with mock.patch.object(moe_decode, "EARLY", 1 << 20):  # all programs search
        found, indices, weights = moe_decode.gate_up(
            layer.x, w13, scores, routing, **options, last=last
        )
    if case.tokens > 1:
        same = route(scores, routing)
        assert torch.equal(indices, same[0]) and torch.equal(weights, same[1])
    given = moe_decode.multiply_each(layer.x, w13, indices, SWIGLU, **options)
    pairs = indices.shape[1]
    found, given = (h.view(-1, pairs, h.shape[1])[layer.real] for h in (found, given))
    return indices, weights, relative(found, given) if found.numel() else 0.0


def choose_of_bits(bits: list[int]) -> list[int]:
    """Choose 4 experts by fp32 scores with these bits, which may be no numbers -> their indices."""
    scores = torch.tensor(bits).int().view(torch.float32).view(1, 1, -1)
    indices, _ = route(scores, Routing(4, True))
    return indices[0].tolist()


def errors(case: Case) -> dict[str, float]:
    layer = Layer(case)
    found = expert_errors(layer) | {"dense": dense_error(layer)}
    found["edge"] = dense_error(layer, edge=True)
    found["beside"] = beside_error(layer)
    return found | {f"router {name}": error for name, error in router_errors(layer).items()}


SMALL = dict(
    dim=128, n_layer=1, n_head=4, n_kv_head=2, head_dim=32, intermediate=64, n_expert=16,
    n_active=3, vocab_size=32, max_position=128,
)  # fmt: skip
LATENT = SMALL | dict(n_kv_head=1, rotary_dim=16, kv_rank=32, value_dim=32)
LAYERS = {
    "qwen3_moe": (ModelArgs, SMALL | dict(qk_norm="head")),
    "olmoe": (ModelArgs, SMALL | dict(qk_norm="full", norm_topk=False)),
    "gpt_oss": (GptOssArgs, SMALL | dict(attention_bias=True, sliding_window=16)),
    "granitemoe": (GraniteMoeArgs, SMALL | dict(residual_scale=0.22, attention_scale=0.1)),
    "qwen2_moe": (Qwen2MoeArgs, SMALL | dict(shared_intermediate=4 * 64)),
    "deepseek_v2": (LatentArgs, LATENT | dict(shared_intermediate=2 * 64, norm_topk=False)),
    "glm4_moe_lite": (
        LatentArgs,
        LATENT | dict(shared_intermediate=64, q_rank=64, routed_scale=1.8),
    ),
    "qwen3_next": (  # a layer of each kind
        HybridArgs,
        SMALL
        | dict(n_layer=2, full_layers=(1,), qk_norm="head", shared_intermediate=64, rotary_dim=16)
        | dict(delta_key_heads=2, delta_value_heads=4, delta_key_dim=32, delta_value_dim=32),
    ),
    "qwen3_next, planes": (  # of any shape; b and a are packed, and so not beside
        HybridArgs,
        SMALL
        | dict(n_layer=2, full_layers=(1,), qk_norm="head", shared_intermediate=64, rotary_dim=16)
        | dict(delta_key_heads=2, delta_value_heads=4, delta_key_dim=32, delta_value_dim=128)
        | dict(dim=512, head_dim=128),
    ),
    # Residual streams: Gated DeltaNet, the same after n-grams, attention by an index.
    "qwen4_exp_text": (
        Qwen4ExpArgs,
        SMALL
        | dict(n_layer=3, full_layers=(2,), qk_norm="head", shared_intermediate=64, rotary_dim=16)
        | dict(delta_key_heads=2, delta_value_heads=4, delta_key_dim=32, delta_value_dim=32)
        | dict(streams=3, stream_rank=64, index_heads=8, index_dim=16, index_budget=8)
        | dict(ngram_layers=(1,), ngram_heads=2, ngram_dim=256, ngram_base=97, ngram_multiple=8),
    ),
    "nemotron_h": (  # a mixer alone, then Mamba-2 and attention with experts without a gate
        NemotronHArgs,
        SMALL
        | dict(n_layer=3, full_layers=(2,), mixer_layers=(0,), shared_intermediate=128)
        | dict(mamba_heads=4, mamba_head_dim=32, mamba_groups=2, mamba_state=32, routed_scale=2.5),
    ),
    "nemotron_h, others": (  # groups that no lanes have whole
        NemotronHArgs,
        SMALL
        | dict(n_layer=1, full_layers=(), mixer_layers=(), shared_intermediate=128)
        | dict(mamba_heads=6, mamba_head_dim=32, mamba_groups=2, mamba_state=32),
    ),
    "granitemoehybrid": (  # an odd number of heads, in one group
        GraniteMoeHybridArgs,
        SMALL
        | dict(n_layer=2, full_layers=(1,), shared_intermediate=64, residual_scale=0.22)
        | dict(mamba_heads=3, mamba_head_dim=32, mamba_groups=1, mamba_state=32),
    ),
    "lfm2_moe": (
        Lfm2MoeArgs,
        SMALL
        | dict(n_layer=2, full_layers=(1,), qk_norm="head", routed_scale=1.5)
        | dict(conv_channels=160, conv_bias=True),  # no multiple of a program's channels
    ),
    "ernie4_5_moe": (Ernie4_5MoeArgs, SMALL | dict(shared_intermediate=2 * 64)),
    # Norms around sublayers: a layer with a window, and a full one in afmoe.
    "kolibri1": (
        Kolibri1Args,
        SMALL
        | dict(qk_norm="head", shared_intermediate=64, norm_topk=False)
        | dict(sliding_window=16, full_layers=()),
    ),
    "afmoe": (
        AfmoeArgs,
        SMALL
        | dict(n_layer=2, qk_norm="head", shared_intermediate=64, routed_scale=2.8)
        | dict(sliding_window=16, full_layers=(1,), mup=True),
    ),
    "gemma4_text": (
        Gemma4Args,
        SMALL
        | dict(n_layer=2, qk_norm="head", shared_intermediate=128, sliding_window=16)
        | dict(full_layers=(1,), global_head_dim=64, global_kv_head=1, global_rotary_dim=32),
    ),
}  # arguments by family
# One layer of attention and a dense FFN, small; the last two are of families that have them.
DENSE = dict(n_layer=1, dim=64, n_head=2, n_kv_head=1, dense_layers=(0,), dense_intermediate=128)
DENSE |= dict(full_layers=(0,), mixer_layers=())
NEVER_PACKED = ".router", ".shared_gate", ".inject"


def arguments_of(family: str, dense: bool = False) -> dict:
    """Return a family's arguments. dense: of one layer with a dense FFN."""
    kind, own = LAYERS[family]
    names = {each.name for each in fields(kind)}
    return own | {name: DENSE[name] for name in names & DENSE.keys()} if dense else own


def in_ranges(module: Linear, format: str, group: int) -> RowRanges:
    """Return a projection in two ranges of rows, as a file of mixed formats has it."""
    count = len(module.weight) // 4
    counts = [count, len(module.weight) - count]
    ranges = RowRanges(module, counts)
    for rows, weight in zip(ranges, module.weight.split(counts), strict=True):
        rows.weight.data = weight
    for number, rows in enumerate(list(ranges)):
        ranges[number] = packed(rows, format, group)
    return ranges


def small_model(
    family: str, format: str, batch: int = 1, ranges: bool = False, dense: bool = False, **changes
) -> Transformer:
    """Return a family's model with random weights in a format, and fp16 beside.

    Groups are those of a checkpoint: experts' second products have smaller ones than their first.
    format: "q4_0+q8_0" has shared experts in the second one. ranges: projections of attention's
    input, and of a dense FFN's, are in ranges of rows. dense: as in `arguments_of`.
    """
    torch.manual_seed(0)
    main, _, shared = format.partition("+")
    name = family.partition(",")[0]
    args = LAYERS[family][0](name, **arguments_of(family, dense) | changes)
    model = family_of(args).model_class(args)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
    planned = plan_format(model, main, main, PLAIN)["modules"]
    for path, module in list(model.layers.named_modules(prefix="layers")):
        if isinstance(module, Linear | ExpertLinear) and not path.endswith(NEVER_PACKED):
            own = shared if shared and ".ffn.shared." in path else main
            group = FORMATS[own].default_group(module.weight.shape[-1])
            if own == main and path in planned:
                group = planned[path]["group_size"]
            make = in_ranges if ranges and path.endswith((".wqkv", ".ffn.w13")) else packed
            model.set_submodule(path, make(module, own, group))
    model.half()
    model.setup_cache(batch, 128)
    return model


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within, fused attention takes CPU tensors, and no kernel is launched with PDL."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mamba2, "kernels_support", lambda state: True))
        # The interpreter compiles nothing: a check would run the kernels, and change the state.
        stack.enter_context(mock.patch.object(FusedRunner, "runs", lambda *_: True))
        for kind in (FusedDecodeAttention, FusedLatentAttention, ShortConv):
            takes = lambda self, qkv, _: getattr(self, "supported", True) and qkv.shape[1] <= 64  # noqa: E731
            stack.enter_context(mock.patch.object(kind, "takes", takes))
        yield


def planes_of_any_shape(weight: Weight, T: int, *_) -> bool:
    return T > 2 and (weight.kind, weight.group) == ("int4", 128) and weight.width % 512 == 0


def layer_errors(
    family: str,
    format: str,
    batch: int = 1,
    queries: int = 1,
    last: list[int] | None = None,
    ratios: tuple[float, ...] = (0, 99),
    ranges: bool = False,
    dense: bool = False,
    **changes,
) -> list[dict[str, float]]:
    """Compare layers of runtime/fused_layer.py with `Block.forward`, in fp16.

    The cache has earlier tokens. last: of each sequence, the last token that is real. Experts of
    several tokens are computed in tiles, and pair by pair: ratios are results of `pair_ratio`.
    ranges, dense, changes: as in `small_model`.
    """
    model = small_model(family, format, batch, ranges, dense, **changes)
    tokens = torch.arange(7, 7 + batch * queries).view(batch, queries) % 32
    positions = 40 - 3 * torch.arange(batch).unsqueeze(1) + torch.arange(queries)
    x, _, context = model.begin(tokens, positions)
    context = context._replace(last=torch.tensor(last or [queries - 1] * batch))
    found = []
    known = planes_of_any_shape if family.endswith("planes") else fused_layer.takes_planes
    for ratio in ratios if batch * queries > 1 else ratios[:1]:
        replaced = mock.patch.object(moe_decode, "pair_ratio", lambda *_, ratio=ratio: ratio)
        with replaced, mock.patch.object(fused_layer, "takes_planes", known):
            found += [block_error(block, torch.randn_like(x), context) for block in model.layers]
    return found


def model_error(family: str, format: str) -> float:
    """Compare logits by `FusedRunner` with plain ones. The second layer is dense, if one may be.

    Of two tokens, one after the other, then of five at once, of which the last two are padding, and
    of one more.
    """
    streams = {"streams"} <= arguments_of(family).keys()
    dense = {} if streams else dict(n_layer=3, dense_layers=(1,), dense_intermediate=64)
    model = small_model(family, format, **dense)
    calls, found = (([3], [0]), ([7], [1]), ([5, 9, 4, 4, 4], [2, 3, 4, 5, 6]), ([8], [5])), []
    with mock.patch.object(torch, "compile", lambda function, **_: function), as_on_a_gpu():
        for runner in (None, FusedRunner(model), FusedRunner(model)):
            for state in model.states:
                state.reset()
            assert runner is None or runner.max_tokens == MAX_FEW
            logits = []
            for call in calls:
                last = torch.tensor([min(2, len(call[0]) - 1)])
                logits.append(model(*torch.tensor(call).unsqueeze(1), last, runner=runner))
                assert runner is None or runner.is_fused
            found.append(torch.cat(logits))
    assert found[1].equal(found[2])  # a second runner shares the stacked weights
    return relative(found[1], found[0])


def block_error(block: Block, x: Tensor, context: Context) -> dict[str, float]:
    state = list(
        getattr(block.attention, "cache", getattr(block.attention, "state", None)).buffers()
    )
    for buffer in state:
        if buffer.is_floating_point():
            buffer.normal_()
    before = [buffer.clone() for buffer in state]
    normed = block.attention_norm(x)
    want, _, *routing = block(x, normed, context, torch.nn.Identity())
    after = [buffer.clone() for buffer in state]
    for buffer, value in zip(state, before, strict=True):
        buffer.copy_(value)
    layer = FusedLayer(block)
    layer.experts.prepare()
    with as_on_a_gpu():
        core = lambda attention, projected, context: attention.core(projected, context)  # noqa: E731
        got, *found = layer.forward(x.flatten(0, 1), context, core)
    computed = [buffer.clone() for buffer in state]
    for buffer, value in zip(state, before, strict=True):
        buffer.copy_(value)
    again, *_ = block(x, normed, context, torch.nn.Identity())  # its weights have moved
    pairs = zip(computed, after, strict=True)
    real = torch.arange(x.shape[1]) <= context.last.unsqueeze(1)
    padding = got.view_as(x)[~real]
    assert padding.isfinite().all()  # its keys and values are masked: multiplied by 0
    got, added = got.view_as(x)[real], (want - x)[real]
    if routing[0] is None:  # no experts
        assert found == [None, None]
        routing = found = [torch.zeros(1), torch.ones(1)]
    return {
        "x": ((got - want[real]).norm() / added.norm().maximum(x.norm())).item(),
        "cache": max(relative(a, b) for a, b in pairs if a.is_floating_point() and b.norm() > 0),
        # Their order may differ between equal scores, which the plain router rounds.
        "experts": float((found[0].sort().values != routing[0].sort().values).sum()),
        "weights": relative(found[1], routing[1]),
        "again": relative(again, want),
    }


class ShardedWeights(RandomWeights):
    """Random weights whose norms and biases are random, too."""

    def plain(self, name: str, device: torch.device | str) -> Tensor:
        tensor = super().plain(name, device)
        if tensor.dim() > 1:
            return tensor
        generator = torch.Generator().manual_seed(list(self.shapes).index(name))
        return tensor + 0.3 * torch.randn(tensor.shape, generator=generator).to(tensor)


def shard_of(source: RandomWeights, rank: int, ranks: int) -> Transformer:
    """Return a rank's shard of a model in fp16, with collectives and a cache."""
    args = args_of_checkpoint(source)
    shard = tp.ModelShard(args, source.format, "tensor", rank, ranks)
    WeightLoader(shard, source, torch.float16).fill(torch.device("cpu"))
    shard.model.tie_weights()
    shard.insert_collectives()
    shard.model.setup_cache(1, 64)
    return shard.model


class TwoRanks:
    """A layer's kernels on two ranks, one after the other.

    sends: products send to both ranks. Otherwise this class adds what the ranks have computed.
    """

    def __init__(self, ranks: list[Block], rows: Tensor, sends: bool):
        self.layers, self.rows, self.sends = [FusedLayer(rank) for rank in ranks], rows, sends
        self.inboxes = make_inboxes(2) if sends else [None, None]
        self.parts, self.outputs = [], []  # results of attention and of FFNs
        self.sums, self.found = [], []  # before experts; results

    def add(self, x: Tensor, y: Tensor | None, scale: float, norms: Added, eps: float):
        """Stand in for `tp.all_reduce_add`. The result adds up the outputs of FFNs."""
        results = self.parts if x is self.rows else self.outputs

        def plain() -> Tensor:
            if norms.norm is None:
                return x + scale * sum(results)
            return add_branch(x, norms._replace(y=sum(results)), eps)

        inbox = self.inboxes[len(self.found)]
        if not self.sends:
            receive = plain
        else:
            receive = partial(add_branch, x, norms, eps, inbox, scale)
        if x is self.rows:  # before a dense FFN: both ranks have sent attention's result
            return receive()
        self.sums.append(x)
        self.outputs.append(y)
        return receive

    def add_router(
        self, x: Tensor, y: Tensor | None, scale: float, router, indices, weight, norms: Added
    ):
        """Stand in for `tp.all_reduce_add_router`."""
        if self.sends:
            inbox = self.inboxes[len(self.found)]
            return receive_norm_router(x, inbox, scale, router, indices, weight, norms)
        if norms.norm is None:
            x = x + scale * sum(self.parts)
            return x, *norm_router(x, router, weight, indices)
        added, total = norms._replace(y=sum(self.parts)), torch.empty_like(x)
        return total, *norm_router(x, router, weight, indices, added=added, total=total)

    def inbox_of(self, x: Tensor, branches: int) -> list[TokenInbox | None]:
        inbox = self.inboxes[len(self.found if len(self.parts) == 2 else self.parts)]
        places = range(0, branches * x.shape[1], x.shape[1])
        return [inbox and inbox._replace(begin=place) for place in places]

    def run(self, context: Context) -> Tensor:
        """Return the layer's result; `found` has each rank's experts and weights, too."""
        core = lambda attention, projected, context: attention.core(projected, context)  # noqa: E731
        reduce = dict(all_reduce_add=self.add, all_reduce_add_router=self.add_router)
        with as_on_a_gpu(), mock.patch.multiple(tp, **reduce, inbox_of=self.inbox_of):
            for layer in self.layers:
                self.parts.append(layer.attention.forward(self.rows, context, core))
            assert (self.parts == [None, None]) == self.sends
            for layer, part in zip(self.layers, self.parts, strict=True):
                layer.experts.prepare()
                self.found.append(layer.experts.forward(self.rows, part, None))
            got, other = (receive() for receive, *_ in self.found)
        assert got.equal(other)
        return got


def sharded_error(
    family: str, format: str, sends: bool = True, dense: bool = False
) -> dict[str, float]:
    """Compare a layer's kernels on two ranks with the whole plain block.

    sends: as in `TwoRanks`. dense: the layer has a dense FFN.
    """
    args = LAYERS[family][0](family, **arguments_of(family, dense))
    source = ShardedWeights(args, plan_format(build_model(args), format, format, dtype="fp32"))
    whole = shard_of(source, 0, 1)
    x, _, context = whole.begin(torch.tensor([[7]]), torch.tensor([[40]]))
    block, cache = whole.layers[0], whole.layers[0].attention.cache.kv
    cache.normal_()
    ranks = [shard_of(source, rank, 2).layers[0] for rank in (0, 1)]
    caches = [rank.attention.cache.kv for rank in ranks]
    heads = cache.chunk(2, dim=2) if cache.shape[2] > 1 else (cache, cache)
    for part, of_rank in zip(caches, heads, strict=True):
        part.copy_(of_rank)
    want, _, *routing = block(x, block.attention_norm(x), context, torch.nn.Identity())
    both = TwoRanks(ranks, x[0], sends)
    got, found = both.run(context), both.found
    if routing[0] is None:  # no experts
        routing = [torch.zeros(1), torch.ones(1)]
        found = [(None, *routing)] * 2
    return {
        "x": ((got - want[0]).norm() / (want[0] - x[0]).norm().maximum(x.norm())).item(),
        "cache": max(relative(*pair) for pair in zip(caches, heads, strict=True)),
        "experts": float(sum((indices != routing[0]).sum() for _, indices, _ in found)),
        "weights": max(relative(weights, routing[1]) for *_, weights in found),
        "ranks": float(not found[0][2].equal(found[1][2])),
        "sums": float(not both.sums[0].equal(both.sums[1])),
    }


def packed(module: Linear | ExpertLinear, format: str, group: int) -> Packed:
    """Return the module with its weight in a format."""
    kind = PackedExpertLinear if isinstance(module, ExpertLinear) else PackedLinear
    with torch.device("meta"):
        found = kind(module, format, group)
    for name, part in FORMATS[format].pack(module.weight, group).items():
        setattr(found, name, torch.nn.Parameter(part, requires_grad=False))
    return found


@dataclass(frozen=True)
class Reduction:
    """Products that send, and the kernels that receive: sizes and settings of a test."""

    D: int
    E: int
    ranks: int
    calls: int = 0  # before the first
    format: str = "int8"
    dtype: str = "float16"  # of messages
    sigmoid: bool = False
    gated: bool = False
    biased: bool = False
    scale: float = 1.0
    late: int | None = None  # the rank whose messages come while the kernels wait
    tiles: dict = field(default_factory=dict)


def make_inboxes(ranks: int, calls: int = 0) -> list[TokenInbox]:
    """Return each rank's inbox, which nothing has been sent to."""
    shape = 2, ranks, MAX_DIM
    memories = [torch.zeros(shape, dtype=torch.int32) for _ in range(ranks)]
    inboxes = []
    for rank in range(ranks):
        slots = torch.tensor([memory[0, rank].data_ptr() for memory in memories])
        counts = torch.full((MAX_PROGRAMS,), calls, dtype=torch.int32)
        inboxes.append(TokenInbox(memories[rank], slots, counts))
    return inboxes


def stamped(parts: Tensor, call: int) -> Tensor:
    """Return 16-bit numbers beside the lower 16 bits of a call's number, as int32."""
    words = (parts.view(torch.int16).long() & 0xFFFF) | (call & 0xFFFF) << 16
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def reduction_errors(case: Reduction) -> dict[str, float]:
    """Compare several calls in a row with a sum, `RMSNorm` and the router.

    All ranks send, then each receives: odd calls are `wo`, even ones are `w2`. "sent" is the number
    of words of the inboxes that are not as they should be.
    """
    D, ranks, dtype = case.D, case.ranks, getattr(torch, case.dtype)
    own = dict(D=D, I=96, E=4, A=2, biased=case.biased, tiles=case.tiles)
    layers = [Layer(Case(case.format, **own, seed=rank)) for rank in range(ranks)]
    inboxes, found = make_inboxes(ranks, case.calls), []
    want = torch.stack([inbox.memory for inbox in inboxes])
    for call in (case.calls - 1, case.calls):  # older messages
        want[:, call & 1, :, :D] = stamped(torch.ones(D, dtype=dtype), call)
    for inbox, memory in zip(inboxes, want, strict=True):
        inbox.memory.copy_(memory)
    for call in range(case.calls + 1, case.calls + 5):
        before, parts = want[0, call & 1].clone(), []
        for layer, inbox in zip(layers, inboxes, strict=True):
            product = partial(send_part, layer, gather=call % 2 == 0, dtype=dtype)
            parts.append(product(None))
            assert product(inbox) is None
        parts = torch.cat(parts)
        want[:, call & 1, :, :D] = stamped(parts, call)
        memory, results = torch.stack([inbox.memory for inbox in inboxes]), []
        errors = {"sent": (memory != want).sum().item()}
        for inbox in inboxes:
            if case.late is not None:
                words = inbox.memory[call & 1, case.late]
                threading.Timer(0.2, words.copy_, (words.clone(),)).start()
                words.copy_(before[case.late])
            results.append(receive_part(case, parts, inbox, layers[0].w13 if call % 2 else None))
        number = (call + 2**31) % 2**32 - 2**31
        errors["calls"] = sum((inbox.calls != number).sum().item() for inbox in inboxes)
        tensors = [torch.cat([part.double().flatten() for part in parts]) for parts, _ in results]
        errors["ranks"] = sum((tensors[0] != other).sum().item() for other in tensors)
        found.append(errors | results[0][1])
    names = {name for errors in found for name in errors}
    return {name: max(errors.get(name, 0) for errors in found) for name in names}


def send_part(layer: Layer, inbox, gather: bool, dtype: torch.dtype) -> Tensor | None:
    """Multiply random numbers of a rank by its weight, which has D rows; send the product."""
    seed = torch.Generator().manual_seed(layer.case.seed)
    h = torch.randn(1, layer.case.A, layer.case.I, generator=seed).to(layer.dtype)
    weight, options = layer.w2, dict(tiles=layer.tiles, dtype=dtype, send=inbox)
    bias = layer.bias[1]
    if gather:
        experts = dict(indices=layer.indices, routing=layer.routing)
        return moe_decode.down(h, weight, **experts, bias=bias, **options)
    weight = replace(weight, parts=tuple(part[0] for part in weight.parts))
    bias = None if bias is None else bias[0]
    return dense.dense_product(h[:, 0], weight, bias=bias, **options)


def receive_part(
    case: Reduction, parts: Tensor, inbox, weight: Weight | None
) -> tuple[tuple, dict]:
    """Receive what the ranks have sent, parts [N, D] -> results, and their errors.

    weight: of the experts, before which the sum is normed; or None.
    """
    torch.manual_seed(case.D)
    D, N = case.D, case.E + case.gated
    x, norm = torch.randn(1, D), 1 + 0.2 * torch.randn(D)
    rows, bias = torch.randn(N, D) * D**-0.5, torch.randn(case.E)
    x, norm, rows, bias = (tensor.to(parts.dtype) for tensor in (x, norm, rows, bias))
    want_total = (x.float() + case.scale * parts.float().sum(0)).to(x.dtype)
    if weight is None:
        total = add_branch(x, Added(), 0.0, inbox, case.scale)
        return (total,), {"sum": relative(total, want_total)}
    score_bias = torch.randn(case.E)
    routing = Routing(1, True, score_bias=score_bias if case.sigmoid else None, gated=case.gated)
    biases, indices = bias if case.biased else None, torch.zeros(1, 1, dtype=torch.int64)
    settings = case.scale, NormRouter(norm, 1e-5, rows, routing, biases), indices
    results = receive_norm_router(x, inbox, *settings)
    assert indices.item() == -1
    total, normed, scores = results
    assert scores.shape == (1, 1 + case.sigmoid, N)  # the next kernel counts tokens by it
    errors = {}
    if weight.kind in INTEGERS:
        inbox.calls.sub_(1)  # receive it again
        _, found, _ = receive_norm_router(x, inbox, *settings, weight)
        expected = quantized_x.quantize_tokens(normed, weight)
        errors["quantized"] = relative(found.units, expected.units)
        errors["differing"] = (found.operands != expected.operands).double().mean().item()
    want_normed = torch.nn.functional.rms_norm(total.float(), (D,), norm.float(), 1e-5)
    want = normed.float() @ rows.float().T
    if case.biased:
        want[:, : case.E] += bias.float()
    if case.sigmoid:
        weights = want.sigmoid()
        want = torch.cat((weights, weights))
        want[0, : case.E] += score_bias
    return results, errors | {
        "sum": relative(total, want_total),
        "norm": relative(normed, want_normed),
        "scores": relative(scores[0], want),
    }


def receive_norm_router(
    x: Tensor,
    inbox: TokenInbox,
    scale: float,
    router: NormRouter,
    indices: Tensor,
    weight: Weight | None = None,
    added: Added = NOTHING,
) -> tuple[Tensor, Tensor | quantized_x.QuantizedX, Tensor]:
    """Return the sum of messages and x, its norm, and scores."""
    total = torch.empty_like(x)
    how = dict(added=added, total=total, inbox=inbox, scale=scale)
    return total, *norm_router(x, router, weight, indices, **how)


def reduction_code() -> dict[str, dict[str, int]]:
    """Return the counts of `counts_of` of the kernels that receive."""
    found, names = {}, ("Qwen3-30B-A3B", "Mixtral-8x7B", "gpt-oss-20b", "Qwen3-Next-80B-A3B")
    indices = torch.zeros(1, 1, dtype=torch.int64)
    for name, ranks in itertools.product(names, (2, 4, 8)):
        args = ARCHITECTURES[name]
        D, E = args.dim, args.n_expert
        x = torch.zeros(1, D, dtype=torch.bfloat16)
        if words_of(D, ranks) > MAX_WORDS:
            continue
        inbox = make_inboxes(ranks)[0]
        routing = Routing(1, True)
        router = x.new_zeros(E, D)
        int4 = Weight((torch.zeros(1, 1, D // 8, dtype=torch.int32),), "int4", 32)
        before = NormRouter(x[0], 1e-5, router, routing)
        args = partial(receive_norm_router, x, inbox, 1.0, before, indices, int4)
        found[f"{name} over {ranks}"] = counts_of(launched_code(args)["join_tokens"])
        code = launched_code(partial(add_branch, x, Added(), 0.0, inbox))
        found[f"{name}, sum over {ranks}"] = counts_of(code["join_tokens"])
    # Gemma 4's sums: attention's result is normed, the FFN's are two branches.
    x = torch.zeros(1, ARCHITECTURES["gemma-4-26B-A4B"].dim, dtype=torch.bfloat16)
    routing = Routing(8, True, factors=x.new_zeros(128))
    before = NormRouter(x[0], 1e-6, x.new_zeros(128, x.shape[1]), routing, unscaled=True)
    int4 = Weight((torch.zeros(1, 1, x.shape[1] // 8, dtype=torch.int32),), "int4", 32)
    normed = Added(norm=x[0])
    branches = normed._replace(branch_norms=x.expand(2, -1).contiguous(), scalar=x.new_zeros(1))
    for ranks in (2, 4):
        inbox = make_inboxes(ranks)[0]
        args = partial(receive_norm_router, x, inbox, 1.0, before, indices, int4, normed)
        found[f"normed over {ranks}"] = counts_of(launched_code(args)["join_tokens"])
        code = launched_code(partial(add_branch, x, branches, 1e-6, inbox))
        found[f"branches, sum over {ranks}"] = counts_of(code["join_tokens"])
    return found


def counts(case: Case) -> dict[str, dict]:
    """Return registers, spills, waits, loads and barriers of each kernel's machine code.

    "gate_up", "stacked" and "shared" are `_multiply_each` without a shared expert, with one, and of
    one alone. "down" and "dense" are `_multiply_sum` with experts and without.
    """
    if case.tokens > 1:
        return counts_of_several(case)
    layer = Layer(case)
    x, tiles = layer.x.bfloat16(), layer.tiles if case.tiles else None
    h, router = x.new_empty(1, case.A, case.I), x.new_empty(case.E, case.D)
    norm, scores = x.new_empty(case.D), layer.normal(1, 1, case.E)
    routing = Routing(case.A, case.norm_topk)
    weight = replace(layer.dense, parts=tuple(part[0] for part in layer.dense.parts))

    def gate_up() -> None:
        normed, _ = norm_router(x, NormRouter(norm, 1e-5, router, routing), layer.w13)
        moe_decode.gate_up(normed, layer.w13, scores, routing, tiles=tiles)

    def down() -> None:
        experts = dict(indices=layer.indices, routing=layer.routing)
        moe_decode.down(h, layer.w2, **experts, residual=x, tiles=tiles)

    def stacked() -> None:
        chosen = Routing(case.A - 1, case.norm_topk, shared=1)
        moe_decode.gate_up(x, layer.w13, scores[..., 1:], chosen, tiles=tiles)

    found = launched_code(gate_up)
    found["gate_up"] = found.pop("_multiply_each")
    found["stacked"] = launched_code(stacked)["_multiply_each"]
    found |= launched_code(down)
    found["down"] = found.pop("_multiply_sum")
    gated = replace(routing, gated=True)
    shared = partial(moe_decode.gate_up_shared, x, weight, layer.normal(1, 1, case.E + 1), gated)
    found["shared"] = launched_code(shared)["_multiply_each"]

    def product() -> None:  # as a layer calls it: x of hqq2 is normed and quantized apart
        normed, scales = dense.norm_apart(x, norm, 1e-5, weight)
        dense.dense_product(normed, weight, scales, tiles=tiles)

    found["dense"] = launched_code(product)["_multiply_sum"]
    return {name: counts_of(code) for name, code in found.items()}


def counts_of_several(case: Case) -> dict[str, dict]:
    """Do what `counts` does for several tokens; "down" is the second `_multiply_tiles`."""
    layer, T, D = Layer(case), case.tokens, case.D
    x, tiles = layer.x.bfloat16(), layer.few_tiles
    h, router = x.new_empty(T * case.A, case.I), x.new_empty(case.E, D)
    norm, parts = x.new_empty(D), x.new_empty(T * case.A, D, dtype=torch.float32)
    weight = replace(layer.dense, parts=tuple(part[0] for part in layer.dense.parts))

    def sort() -> expert_tiles.PairTiles:
        return expert_tiles.sort_pairs(layer.indices, case.E, layer.last)

    def all_but_down() -> None:
        routing = Routing(case.A, case.norm_topk)
        norm_router(x, NormRouter(norm, 1e-5, router, routing))
        route(layer.normal(T, 1, case.E), routing)
        expert_tiles.multiply_tiles(x, layer.w13, sort(), h, SWIGLU, tiles=tiles)
        expert_tiles.combine(parts, case.A, x.dtype, x, last=layer.last)
        y = h[:T, : weight.out]
        dense.dense_product(x, weight, out=y, tiles=tiles)

    def down() -> None:
        expert_tiles.multiply_tiles(h, layer.w2, sort(), parts, None, layer.routing, tiles=tiles)

    found = launched_code(all_but_down)
    found["dense"] = found.pop("_down_few")
    found["down"] = launched_code(down)["_multiply_tiles"]
    return {name: counts_of(code) for name, code in found.items()}


def code_counts(kernel, launch: Launch) -> dict[str, int]:
    return counts_of(compiled(kernel, launch))


def counts_of(code) -> dict[str, int]:
    sass = code.asm["sass"]
    before, _, after = sass.partition("ACQBULK")
    between, *_ = after.rpartition("ACQBULK")
    registers = [int(number) for number in re.findall(r"\bR(\d+)\b", sass)]
    return {
        "registers": max(registers) + 1,
        "spills": sass.count("STL"),
        "shared": code.metadata.shared,
        "waits": sass.count("ACQBULK"),
        "starts": sass.count("PREEXIT"),
        "ahead": before.count("LDG.E.128"),
        "between_waits": between.count("LDG.E.128"),
        "all_ahead": before.count("LDG.E"),
        "loads": after.count("LDG.E.128"),
        "barriers": sass.count("BAR.SYNC"),
        "products": len(re.findall(r"\bHMMA\b", sass)),
        "exchanges": len(re.findall(r"\b(?:STS|SHFL)\b", sass)),
    }


def main() -> int:
    torch.set_num_threads(1)
    given = json.load(sys.stdin)
    cases = [Case(**values) for values in given["cases"]]
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.prepare()
        # Programs that stay have several tiles.
        moe_tiles.RESIDENT, Weight.multiprocessors = 12, 1
        replace_four_bits()
        fragments._dot = dot_twin
        layers = [layer_errors(*pair) for pair in given.get("layers", ())]
        models = [model_error(*pair) for pair in given.get("models", ())]
        found = {"cases": [errors(case) for case in cases], "layers": layers, "models": models}
        cases = given.get("reductions", ())
        found["reductions"] = [reduction_errors(Reduction(**values)) for values in cases]
        layers = [Layer(Case(**values)) for values in given.get("dense", ())]
        found["dense"] = [(dense_error(layer), dense_error(layer, edge=True)) for layer in layers]
        layers = [Layer(Case(**values)) for values in given.get("planes", ())]
        found["planes"] = [planes_error(layer) for layer in layers]
        found["chosen"] = [choose_of_bits(bits) for bits in given.get("scores", ())]
        found["sharded"] = [sharded_error(*pair) for pair in given.get("sharded", ())]
        print(json.dumps(found))
    elif "planes" in given:
        print(json.dumps([plane_lanes(Layer(Case(**values))) for values in given["planes"]]))
    else:
        found = [counts(case) for case in cases]
        print(json.dumps([*found, reduction_code()] if "reductions" in given else found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
