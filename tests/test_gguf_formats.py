"""GGUF's number formats against the `gguf` package: blocks of random bytes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from formats import FORMATS
from formats.packed import PackedExpertLinear, PackedLinear
from formats.quantizer import plan_format
from gguf_files.conversions import CONVERSIONS, as_blocks_of
from model import ExpertLinear, Linear, ModelArgs, Transformer
from models import build_model
from models.random_weights import RandomWeights
from offload.plan import OffloadSettings
from runtime.loading import load_model

gguf = pytest.importorskip("gguf", reason="the oracle of GGUF's number formats")
NAMES = [name for name, format in FORMATS.items() if format.gguf_type]
# Where a block has fp16 numbers: any bytes but those would be infinite or NaN in some blocks.
FP16 = {"q8_0": (0,), "q6_k": (208,), "q5_k": (0, 2), "q4_k": (0, 2), "q4_0": (0,)}
FP16 |= {"q5_0": (0,), "q5_1": (0, 2), "q4_1": (0, 2), "iq4_nl": (0,), "iq4_xs": (0,)}
FP16 |= {"mxfp4": (), "nvfp4": ()}


def random_blocks(name: str, *rows: int, seed: int = 0) -> np.ndarray:
    """Return uint8 [*rows, 3 blocks], random but for scales, which are finite."""
    rng = np.random.default_rng(seed)
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    blocks = rng.integers(0, 256, (*rows, 3, size), dtype=np.uint8)
    for at in FP16[name]:
        scale = rng.normal(size=(*rows, 3, 1)).astype(np.float16)
        scale[..., 0, :] = (
            rng.integers(1, 1024, scale[..., 0, :].shape).astype(np.uint16).view(np.float16)
        )  # subnormal ones
        blocks[..., at : at + 2] = scale.view(np.uint8)
    if name == "mxfp4":
        blocks[..., 0] %= 250
    if name == "nvfp4":
        blocks[..., :4] %= 127  # e4m3 scales without a sign; 127 is NaN
    return blocks.reshape(*rows, -1)


def dequantized(name: str, blocks: np.ndarray) -> Tensor:
    kind = gguf.GGMLQuantizationType[name.upper()]
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind))


@pytest.mark.parametrize("rows", ((5,), (2, 3)))
@pytest.mark.parametrize("name", NAMES)
def test_blocks_keep_every_number(name, rows):
    """Parts obey the layout, whole weights and single rows, and unpack to the same fp32 numbers."""
    format, blocks = FORMATS[name], random_blocks(name, *rows)
    want = dequantized(name, blocks)
    parts = format.from_blocks(torch.from_numpy(blocks))
    layout = {key: (tuple(part.shape), part.dtype) for key, part in parts.items()}
    assert layout == format.layout(want.shape, format.group)
    assert all(part.is_contiguous() for part in parts.values())
    got = format.unpack(parts, format.group)
    assert torch.equal(got, want)
    alone = format.from_blocks(torch.from_numpy(blocks[-1]))
    assert all(torch.equal(part, parts[key][-1]) for key, part in alone.items())


@pytest.mark.parametrize(("type", "name"), CONVERSIONS)
def test_a_wider_format_holds_the_same_numbers(type, name):
    """Steps of any size that fp16 holds: a least is up to 16 of them."""
    blocks = random_blocks(type.lower(), 2, 3)
    nbytes, _ = CONVERSIONS[type, name]
    assert blocks.shape[-1] == 3 * nbytes
    parts = FORMATS[name].from_blocks(as_blocks_of(name, torch.from_numpy(blocks), type))
    assert torch.equal(FORMATS[name].unpack(parts, FORMATS[name].group), dequantized(type, blocks))


@pytest.mark.parametrize("name", NAMES)
def test_every_code_is_read(name):
    """A format that lost a bit of a code or of a scale would give fewer numbers."""
    format = FORMATS[name]
    parts = format.from_blocks(torch.from_numpy(random_blocks(name, 64)))
    parts["scale"].fill_(127 if name == "mxfp4" else 1)
    if "step" in parts:
        parts["step"].fill_(1)
    found = format.unpack(parts, format.group).unique()
    has_two_zeros = name in ("mxfp4", "nvfp4")
    assert len(found) == 2**format.bits - has_two_zeros


def wide_model(**changes) -> ModelArgs:
    """Return the args of a small model of rows that blocks of 256 divide."""
    sizes = dict(dim=256, n_layer=2, n_head=4, n_kv_head=2, head_dim=64, intermediate=256)
    sizes |= dict(n_expert=4, n_active=2, vocab_size=160, max_position=64, qk_norm="head")
    return ModelArgs("qwen3_moe", **sizes | changes)


def logits_of(model: Transformer) -> Tensor:
    tokens = torch.arange(3, 15).unsqueeze(0)
    model.setup_cache(1, 16)
    return model(tokens, torch.arange(12).unsqueeze(0), all_positions=True)


@pytest.mark.parametrize("name", ("q6_k", "q4_k"))
def test_a_model_has_the_logits_of_its_unpacked_weights(name):
    """One pass, token by token, and with offloaded experts; the head is in q6_k."""
    args = wide_model()
    source = RandomWeights(args, plan_format(build_model(args), name, name, dtype="fp32"))
    model, offloaded = load_model(source, "cpu"), OffloadSettings(args.n_active)
    assert model.head.format == "q6_k"
    got = logits_of(model)
    steps = [model(torch.tensor([[3 + i]]), torch.tensor([[i]])) for i in range(6)]
    torch.testing.assert_close(torch.stack(steps, 1), got[:, :6], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits_of(load_model(source, "cpu", experts=offloaded)), got)
    for path, module in list(model.named_modules()):
        if isinstance(module, PackedLinear | PackedExpertLinear):
            plain = Linear(1, 1) if isinstance(module, PackedLinear) else ExpertLinear(1, 1, 1)
            plain.weight = torch.nn.Parameter(module.unpack(), requires_grad=False)
            model.set_submodule(path, plain)
    torch.testing.assert_close(logits_of(model), got, rtol=1e-4, atol=1e-4)


def test_rows_that_no_block_divides_have_a_format_of_smaller_blocks():
    args = wide_model(intermediate=96)
    for name in ("q6_k", "q5_k", "q4_k", "iq4_xs"):
        modules = plan_format(build_model(args), name, name)["modules"]
        narrow = {path for path, spec in modules.items() if spec["group_size"] == 32}
        assert narrow == {f"layers.{n}.ffn.experts.w2" for n in range(2)}
        assert {modules[path]["format"] for path in narrow} == {FORMATS[name].narrow}
    with pytest.raises(ValueError, match="groups of 32 do not divide rows of 40"):
        plan_format(build_model(wide_model(intermediate=40)), "q4_k", "q4_k")


def test_no_group_size_can_be_asked_for():
    with pytest.raises(ValueError, match="none of these formats has groups"):
        plan_format(build_model(wide_model()), "q4_k", "q8_0", group_size=64)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_a_part_of_a_block_is_refused(name):
    blocks = torch.from_numpy(random_blocks(name, 2))
    with pytest.raises(ValueError, match="are not of whole"):
        FORMATS[name].from_blocks(blocks[:, :-1])
