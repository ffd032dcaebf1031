"""Run and compile the kernels of ops/moe_decode.py without a GPU; see kernels_without_gpu.py.

    TRITON_INTERPRET=1 python tests/moe_kernels_without_gpu.py < INPUT    Triton's interpreter, CPU
    python tests/moe_kernels_without_gpu.py < INPUT    machine code for an H200, by Triton and ptxas

INPUT is a JSON object: "cases", a list of the arguments of `Case`, and "layers", a list of formats.
The interpreter's process prints relative errors by kernel of every case, and of a whole layer in
every format. The other prints a list: counts of each case's machine code.
"""

import json
import os
import re
import sys
from dataclasses import dataclass, field
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

import ops.moe_decode as moe_decode
from formats import FORMATS
from formats.packed import Packed, PackedExpertLinear, PackedLinear
from model import (
    ExpertLinear,
    Linear,
    ModelArgs,
    MoE,
    RMSNorm,
    Transformer,
    swiglu,
    weighted_sum,
)
from ops import decode_attention, gemv4
from runtime.fused_attention import FusedDecodeAttention
from runtime.fused_decode import FusedLayer
from tests.kernels_without_gpu import Launch, compiled, e2m1_twin, twin

GROUPS = {"int4": 32, "hqq4": 32, "mxfp4": 32, "int8": 16}  # so that small widths fit


@dataclass(frozen=True)
class Case:
    """Shape, format and tiling of one token's MoE layer."""

    format: str  # "bf16" or a name in FORMATS
    D: int
    I: int
    E: int
    A: int
    group: int = 0  # 0: that of GROUPS
    norm_topk: bool = True
    one_launch: bool = True  # of norm and router
    parts: int = 0  # partial sums that are added to the residual
    tiles: dict = field(default_factory=dict)
    seed: int = 0


@triton.jit
def bytes_twin(word, x, total):
    """Replace `moe_decode._add_bytes`, which is inline assembly."""
    for k in tl.static_range(4):
        byte = (word << 24 - 8 * k) >> 24
        total += byte * ((x << 48 - 16 * k) >> 48).to(tl.int32)
    return total


@triton.jit
def pair_twin(pair, total):
    """Replace `moe_decode._add_pair`."""
    return total + (pair << 16 >> 16) + (pair >> 16)


class Layer:
    """Random tensors of a case: weights for the kernels, and unpacked ones for the reference."""

    def __init__(self, case: Case):
        self.case, self.random = case, torch.Generator().manual_seed(case.seed)
        D, I, E = case.D, case.I, case.E
        self.w13, self.plain13 = self.weight(E, 2 * I, D)
        self.w2, self.plain2 = self.weight(E, D, I)
        self.dense, self.plain_dense = self.weight(1, I, D)
        self.dtype = torch.bfloat16 if case.format == "bf16" else torch.float16
        self.x = self.normal(1, D).to(self.dtype)
        self.norm = (self.normal(D) * 0.2 + 1).to(self.dtype)
        self.indices = torch.randperm(E, generator=self.random)[: case.A].unsqueeze(0)
        self.routing = torch.rand(1, case.A, generator=self.random)
        self.tiles = moe_decode.Tiles(**case.tiles)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def weight(self, *shape: int) -> tuple[moe_decode.Weight, Tensor]:
        weight = self.normal(*shape) * shape[-1] ** -0.5
        if self.case.format == "bf16":
            weight = weight.bfloat16()
            return moe_decode.plain_weight(weight), weight.double()
        format = FORMATS[self.case.format]
        group = self.case.group or GROUPS[format.name]
        parts = format.pack(weight, group)
        kernel = moe_decode.packed_weight(list(parts.values()), format.kind, group)
        return kernel, format.unpack(parts, group).double()


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def plain_experts(weight: Tensor) -> ExpertLinear:
    """Return the plain module with a given weight, in fp64."""
    module = ExpertLinear(1, 1, 1)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def expert_errors(layer: Layer) -> dict[str, float]:
    """Compare with `ExpertLinear.gather_gated`, `gather` and `weighted_sum`, in fp64."""
    case, tiles, fp32 = layer.case, layer.tiles, torch.float32
    h = moe_decode.gate_up(layer.x, layer.indices, layer.w13, tiles=tiles, pdl=False, dtype=fp32)
    w13, w2 = plain_experts(layer.plain13), plain_experts(layer.plain2)
    want_h = w13.gather_gated(layer.x.double(), layer.indices, swiglu)
    given = layer.normal(case.A, case.I).to(layer.dtype)
    residual = layer.normal(case.D).to(layer.dtype)
    add = {} if tiles.split > 1 else {"residual": residual}
    experts = dict(indices=layer.indices, routing=layer.routing)
    y = moe_decode.down(given, layer.w2, **experts, **add, tiles=tiles, pdl=False, dtype=fp32)
    want = weighted_sum(w2.gather(given.double().unsqueeze(0), layer.indices), layer.routing)
    want = want + residual if add else want
    return {"gate_up": relative(h, want_h[0]), "down": relative(y.sum(0), want[0])}


def dense_error(layer: Layer, edge: bool = False) -> float:
    """Compare a dense product with the norm of x and a residual, in fp64.

    edge: x and the norm's weight whose products round to the next power of two.
    """
    case = layer.case
    if layer.tiles.split > 1:
        return 0.0
    weight = moe_decode.Weight(
        tuple(part[0] for part in layer.dense.parts), layer.dense.kind, layer.dense.group
    )
    residual = layer.normal(case.I).to(layer.dtype)
    x = torch.full_like(layer.x, 2 - 2**-9) if edge else layer.x
    norm = torch.full_like(layer.norm, 1 + 2**-10) if edge else layer.norm
    got = moe_decode.down(
        x,
        weight,
        residual=residual,
        norm=norm,
        eps=1e-5,
        tiles=layer.tiles,
        pdl=False,
        dtype=torch.float32,
    )
    normed = torch.nn.functional.rms_norm(x.double(), (case.D,), norm.double(), 1e-5)
    return relative(got, normed @ layer.plain_dense[0].T + residual.double())


class Routing(MoE):
    """`MoE.route` without weights."""

    def __init__(self, active: int, norm_topk: bool):
        torch.nn.Module.__init__(self)
        self.n_active, self.norm_topk = active, norm_topk


def router_errors(layer: Layer) -> dict[str, float]:
    """Compare with the residual sum, `RMSNorm` and `MoE.route`, in fp32."""
    case, D = layer.case, layer.case.D
    x, router = layer.normal(1, D), layer.normal(case.E, D) * D**-0.5
    bias, y = layer.normal(case.E), layer.normal(case.parts, D) if case.parts else None
    norm = RMSNorm(D, 1e-5)
    norm.weight.copy_(layer.norm)
    counter = torch.zeros(1, dtype=torch.int32) if case.one_launch else None
    settings = dict(counter=counter, bias=bias, rows=1 + case.seed % 2 * 3, pdl=False)
    for _ in range(2):  # the counter is 0 again
        summed, normed, indices, weights, _ = moe_decode.norm_router(
            x, y, norm.weight, 1e-5, router, case.A, case.norm_topk, **settings
        )
    want = x if y is None else x + y.sum(0)
    scores = norm(want) @ router.T + bias
    want_indices, want_weights = Routing(case.A, case.norm_topk).route(scores)
    return {
        "sum": relative(summed, want),
        "norm": relative(normed, norm(want)),
        "indices": float((indices != want_indices).sum()),
        "weights": relative(weights, want_weights),
    }


def errors(case: Case) -> dict[str, float]:
    layer = Layer(case)
    found = expert_errors(layer) | {"dense": dense_error(layer)}
    found["edge"] = dense_error(layer, edge=True)
    return found | {f"router {name}": error for name, error in router_errors(layer).items()}


def layer_error(format: str) -> dict[str, float]:
    """Compare a whole layer of runtime/fused_decode.py with `Block.forward`, in fp16.

    With norms of q and k, and a cache that has earlier tokens.
    """
    torch.manual_seed(0)
    args = ModelArgs(
        "qwen3_moe", dim=128, n_layer=1, n_head=4, n_kv_head=2, head_dim=32, intermediate=64,
        n_expert=16, n_active=3, vocab_size=32, qk_norm="head", max_position=64,
    )  # fmt: skip
    model = Transformer(args)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
    block = model.layers[0]
    for name in ("attention.wqkv", "attention.wo", "ffn.experts.w13", "ffn.experts.w2"):
        block.set_submodule(name, packed(block.get_submodule(name), format))
    model.half()
    model.setup_cache(1, 64)
    cache = block.attention.cache.kv
    cache.normal_()
    before, position = cache.clone(), torch.tensor([[40]])
    x, normed, context = model.begin(torch.tensor([[7]]), position)
    want, _, *routing = block(x, normed, context, torch.nn.Identity())
    appended = cache.clone()
    cache.copy_(before)
    with (
        mock.patch.object(FusedDecodeAttention, "takes", lambda *_: True),
        mock.patch.multiple(moe_decode, supports_pdl=lambda x: False),
        mock.patch.multiple(decode_attention, supports_pdl=lambda x: False),
    ):
        got, *found = FusedLayer(block).forward(x.squeeze(0), context, None)
    return {
        "x": relative(got - x[0], want[0] - x[0]),
        "cache": relative(cache, appended),
        "experts": float((found[0] != routing[0]).sum()),
        "weights": relative(found[1], routing[1]),
    }


def packed(module: Linear | ExpertLinear, format: str) -> Packed:
    """Return the module with its weight in a format, in groups that fit small rows."""
    kind = PackedExpertLinear if isinstance(module, ExpertLinear) else PackedLinear
    with torch.device("meta"):
        found = kind(module, format, GROUPS[format])
    for name, part in FORMATS[format].pack(module.weight, GROUPS[format]).items():
        setattr(found, name, torch.nn.Parameter(part, requires_grad=False))
    return found


KERNELS = ("_gate_up", "_down", "_norm_router", "_route")


def counts(case: Case) -> dict[str, dict]:
    """Return registers, spills, waits, loads and barriers of each kernel's machine code."""
    layer, found = Layer(case), {}
    x, D = layer.x.bfloat16(), case.D
    tiles = layer.tiles if case.tiles else None
    h, router = x.new_empty(case.A, case.I), x.new_empty(case.E, D)
    norm, launches = x.new_empty(D), {name: Launch() for name in KERNELS}
    with mock.patch.multiple(moe_decode, **launches):
        scores = layer.normal(1, case.E)
        moe_decode.gate_up(x, layer.indices, layer.w13, tiles=tiles, pdl=True, scores=scores)
        add = {} if tiles and tiles.split > 1 else {"residual": x}
        experts = dict(indices=layer.indices, routing=layer.routing)
        moe_decode.down(h, layer.w2, **experts, **add, tiles=tiles, pdl=True)
        counter = torch.zeros(1, dtype=torch.int32) if case.one_launch else None
        routing = (router, case.A, case.norm_topk)
        moe_decode.norm_router(x, None, norm, 1e-5, *routing, counter, pdl=True)
    for name, launch in launches.items():
        if hasattr(launch, "tensors"):
            found[name] = code_counts(getattr(moe_decode, name), launch)
    return found


def code_counts(kernel, launch: Launch) -> dict[str, int]:
    found = compiled(kernel, launch)
    sass = found.asm["sass"]
    before, _, after = sass.partition("ACQBULK")
    registers = [int(number) for number in re.findall(r"\bR(\d+)\b", sass)]
    return {
        "registers": max(registers) + 1,
        "spills": sass.count("STL"),
        "shared": found.metadata.shared,
        "waits": sass.count("ACQBULK"),
        "starts": sass.count("PREEXIT"),
        "ahead": before.count("LDG.E.128"),
        "loads": after.count("LDG.E.128"),
        "barriers": sass.count("BAR.SYNC"),
        "instructions": len(re.findall(r"/\*[0-9a-f]{4,}\*/ ", sass)),
    }


def main() -> int:
    torch.set_num_threads(1)
    given = json.load(sys.stdin)
    cases = [Case(**values) for values in given["cases"]]
    if os.environ.get("TRITON_INTERPRET") == "1":
        gemv4._add_word, gemv4._add_e2m1 = twin, e2m1_twin
        moe_decode._add_bytes, moe_decode._add_pair = bytes_twin, pair_twin
        layers = {name: layer_error(name) for name in given.get("layers", ())}
        print(json.dumps({"cases": [errors(case) for case in cases], "layers": layers}))
    else:
        print(json.dumps([counts(case) for case in cases]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
