"""The table of implementations: every product has one, and a fused activation serves no other."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from formats import FORMATS, Format, packed
from formats.packed import (
    GATED,
    IMPLEMENTATIONS,
    ROWS,
    TOKEN,
    PackedExpertLinear,
    PackedLinear,
    Request,
    choose,
)
from formats.quantizer import pack_weight
from model import ExpertLinear, Experts, Linear, ModelArgs, swiglu

E, D, I, GROUP = 3, 256, 32, 128
CPU = torch.device("cpu")
DTYPES = torch.bfloat16, torch.float16, torch.float32


class OnCuda(Tensor):
    """A tensor on the CPU that is chosen for as if it were on a GPU."""

    is_cuda = True


def on(device: str, x: Tensor) -> Tensor:
    return x.as_subclass(OnCuda) if device == "cuda" else x


def swiglu_lookalike(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def clamped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up


OTHERS = {
    "the same formula": swiglu_lookalike,
    "clamped": partial(clamped, limit=1.0),
    "partial": partial(swiglu),
    "lambda": lambda gate, up: swiglu(gate, up),
    "GELU": lambda gate, up: F.gelu(gate) * up,
}


@pytest.fixture
def gemv(monkeypatch):
    """Let the GEMV kernel take any weight, without Triton."""
    monkeypatch.setattr(packed, "dot4_supports", lambda x, *_: x.is_floating_point())


def request(name: str, device: str, product: str, dtype: torch.dtype, out: int = 2 * I, **options):
    x = on(device, torch.zeros(2, D, dtype=dtype))
    format = FORMATS[name]
    group = format.choose_group(D, None if format.has_own_group else GROUP)
    codes = torch.empty(
        format.layout((E, out, D), group)["codes"][0], dtype=torch.int32, device="meta"
    )
    return Request(product, format, x, codes, group, **options)


def expert_linear(name: str, bias: bool = False) -> PackedExpertLinear:
    """Random experts in a format. Their group is the one of `request`."""
    generator = torch.Generator().manual_seed(0)
    plain = ExpertLinear(E, D, 2 * I)
    plain.weight.copy_(torch.randn(E, 2 * I, D, generator=generator))
    if bias:
        plain.bias = nn.Parameter(torch.randn(E, 2 * I, generator=generator), requires_grad=False)
    format = FORMATS[name]
    spec = {
        "format": name,
        "group_size": format.choose_group(D, None if format.has_own_group else GROUP),
    }
    if format.blocks:
        spec["group_size"] = I
    module = PackedExpertLinear(plain, name, spec["group_size"])
    for part, value in pack_weight(plain.weight, spec, CPU).items():
        setattr(module, part, nn.Parameter(value, requires_grad=False))
    return module


# The choice ---------------------------------------------------------------------------------------

KERNEL, DOT = "ops.products.gemv", "Format.dot"
FUSED, THEN = "ops.products.gemv with SwiGLU", "ops.products.gemv, then the activation"
BYTES, SPLIT = "Format.dot by integers, then the activation", "Format.dot of gate and of up"
GROUPED, BY_EXPERT = "ops.products.prompt", "unpack expert by expert, then F.linear"
GGUF = "q8_0", "q6_k", "q5_k", "q4_k", "q5_1", "q4_1", "q4_0", "iq4_nl", "iq4_xs"
WITH_KERNELS = "int8", "fp8", "fp8b", "int4", "uint4", "mxfp4", "nvfp4", "hqq4", "hqq3", "hqq2"
WITH_KERNELS += GGUF
WITH_GEMV = "int4", "uint4", "mxfp4", "nvfp4", "hqq4", "hqq3", "hqq2", *GGUF
WITH_BYTES = "int4", "uint4", "hqq4", "hqq3", "hqq2"  # and int8, if it is large


def expected(name: str, device: str, product: str, plain_swiglu: bool) -> str:
    """The row that serves 16-bit x, written down a second time."""
    if device == "cpu":
        return {TOKEN: DOT, GATED: SPLIT, ROWS: BY_EXPERT}[product]
    if product == ROWS:
        return GROUPED
    if name in WITH_GEMV:
        return KERNEL if product == TOKEN else FUSED if plain_swiglu else THEN
    if product == TOKEN:
        return DOT
    return BYTES if name in WITH_BYTES and torch.version.hip is None else SPLIT


@pytest.mark.parametrize("device", ("cpu", "cuda"))
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_every_product_has_the_implementation_that_is_expected(name, device, gemv):
    for dtype, product in itertools.product((torch.bfloat16, torch.float16), (TOKEN, GATED, ROWS)):
        chosen = choose(request(name, device, product, dtype, activation=swiglu))
        assert chosen.name == expected(name, device, product, True), (dtype, product)
        chosen = choose(request(name, device, product, dtype, activation=OTHERS["clamped"]))
        assert chosen.name == expected(name, device, product, False), (dtype, product)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ("cpu", "cuda"))
@pytest.mark.parametrize("name", FORMATS)
def test_every_request_has_exactly_one_choice(name, device, dtype):
    """The kernel's real conditions depend on shape and dtype."""
    bias = torch.zeros(E, 2 * I)
    for out in (2, 2 * I, 2**17):
        for product, activation in ((TOKEN, None), (ROWS, None), (GATED, swiglu), (GATED, clamped)):
            for b in (None, bias):
                asked = request(name, device, product, dtype, out, activation=activation, bias=b)
                first, second = choose(asked), choose(asked)
                assert first is second and first.product == product
                assert device == "cuda" or first.device == "any"


def test_large_8_bit_matrices_alone_are_multiplied_as_integers():
    if torch.version.hip is not None:
        pytest.skip("dp2a is NVIDIA's")
    for out, name in ((2 * I, SPLIT), (2**17, BYTES)):
        asked = request("int8", "cuda", GATED, torch.bfloat16, out, activation=swiglu)
        assert choose(asked).name == name
        assert choose(asked._replace(x=asked.x.float())).name == SPLIT


def test_names_are_unique_and_the_last_row_of_a_product_serves_everything():
    assert len({row.name for row in IMPLEMENTATIONS}) == len(IMPLEMENTATIONS)
    for product in (TOKEN, GATED, ROWS):
        last = [row for row in IMPLEMENTATIONS if row.product == product][-1]
        assert last.device == "any" and all(map(last.formats, FORMATS.values()))
        assert all(last.supports(request(name, "cpu", product, torch.float32)) for name in FORMATS)


# The fused activation -----------------------------------------------------------------------------


@pytest.mark.parametrize("activation", OTHERS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_fused_swiglu_serves_no_other_activation(name, activation, gemv):
    asked = request(name, "cuda", GATED, torch.bfloat16, activation=OTHERS[activation])
    assert choose(asked).name != FUSED
    assert choose(asked._replace(activation=swiglu, bias=torch.zeros(E, 2 * I))).name != FUSED


def test_only_one_row_fuses_an_activation_and_says_which():
    fusing = [row for row in IMPLEMENTATIONS if row.product == GATED and "any" not in row.computes]
    assert [row.name for row in fusing] == [FUSED]
    assert "model.swiglu" in fusing[0].computes and "no bias" in fusing[0].computes


def test_experts_of_the_model_have_the_activation_that_is_fused():
    args = ModelArgs("mixtral", 64, 1, 4, 2, 16, 96, 4, 2, 160, 64)
    with torch.device("meta"):
        assert Experts(args).activation is swiglu


@pytest.fixture
def fake_dot4(monkeypatch, gemv) -> list[bool]:
    """Replace the kernel by unpacked weights; return a list of whether each call fused SwiGLU."""
    calls = []

    def dot4(x, parts, index, kind, group, fuse_swiglu, dtype):
        assert x.is_contiguous()
        calls.append(fuse_swiglu)
        shape = torch.Size((*parts[0].shape[:-1], x.shape[-1]))
        having = (f for f in FORMATS.values() if f.kind == kind and f.has_gemv)
        format = next(f for f in having if len(f.layout(shape, group)) == len(parts))
        names = format.layout(shape, group)
        weight = format.unpack(dict(zip(names, parts, strict=True)), group)[index]
        x = x.repeat_interleave(len(index) // len(x), 0)
        y = torch.einsum("ni,noi->no", x.float(), weight)
        return (swiglu(*y.chunk(2, dim=-1)) if fuse_swiglu else y).to(dtype)

    monkeypatch.setattr(packed, "dot4", dot4)
    return calls


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("activation", ("swiglu", *OTHERS))
@pytest.mark.parametrize("name", WITH_GEMV)
def test_every_activation_is_applied_whatever_computes_the_product(
    name, activation, bias, fake_dot4
):
    module = expert_linear(name, bias)
    function = OTHERS.get(activation, swiglu)
    index = torch.tensor([[0, 2], [1, 1]])
    x = torch.randn(2, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = module.gather_gated(x, index, function)
    assert not fake_dot4
    got = module.gather_gated(on("cuda", x), index, function).as_subclass(Tensor)
    assert fake_dot4 == [activation == "swiglu" and not bias]
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_rows_that_share_their_memory_are_separate_for_the_kernel(fake_dot4):
    """Experts without a gate expand a token over its experts."""
    module, index = expert_linear("int4", False), torch.tensor([[0, 2]])
    x = torch.randn(1, 1, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = module.gather(x.expand(1, 2, D), index)
    got = module.gather(on("cuda", x).expand(1, 2, D), index).as_subclass(Tensor)
    assert fake_dot4 == [False]
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


# The rows themselves ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_all_experts_computes_what_unpacking_one_does(name):
    """This row serves formats without a Triton kernel on a GPU."""
    module = expert_linear(name)
    group_ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    x = torch.randn(10, D, generator=torch.Generator().manual_seed(1))
    arguments = x, group_ends, module.parts(), FORMATS[name], module.group
    want = packed.rows_by_expert(*arguments)
    torch.testing.assert_close(packed.rows_unpacked(*arguments), want, rtol=1e-5, atol=1e-4)


def test_a_format_without_kernels_runs_on_any_device(monkeypatch):
    monkeypatch.setattr(FORMATS["int4"], "kind", None)
    monkeypatch.setattr(FORMATS["int4"], "has_gemv", False)
    chosen = [
        choose(request("int4", "cuda", product, torch.bfloat16)).name for product in (TOKEN, ROWS)
    ]
    assert chosen == [DOT, "unpack all experts, then ops.products.prompt.grouped_mm"]


@pytest.mark.parametrize("name", FORMATS)
def test_the_product_that_the_base_class_has_is_the_formats(name):
    """`Format.dot` of a new format is this one, until it has a faster one."""
    module, format = expert_linear(name), FORMATS[name]
    x = torch.randn(1, D, generator=torch.Generator().manual_seed(1))
    want = Format.dot(format, x, module.parts(), module.group)
    got = format.dot(x, module.parts(), module.group)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_linear_keeps_its_bias_and_chooses_by_the_number_of_rows(monkeypatch):
    linear = Linear(D, 2 * I, bias=True)
    module = PackedLinear(linear, "int8", 16)
    assert module.bias is linear.bias
    products = []

    def choose_and_note(asked: Request):
        products.append(asked.product)
        return choose(asked)

    monkeypatch.setattr(packed, "choose", choose_and_note)
    module(torch.zeros(1, 1, D))
    assert set(products) == {TOKEN}
    products.clear()
    module(torch.zeros(1, 2, D))
    assert set(products) == {ROWS}
