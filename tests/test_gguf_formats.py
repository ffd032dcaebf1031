"""GGUF's number formats against the `gguf` package: blocks of random bytes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from formats import FORMATS

gguf = pytest.importorskip("gguf", reason="the oracle of GGUF's number formats")
NAMES = [name for name, format in FORMATS.items() if format.gguf_type]
# Where a block has fp16 numbers: any bytes but those would be infinite or NaN in some blocks.
FP16 = {"q8_0": (0,), "q6_k": (208,), "q5_k": (0, 2), "q4_k": (0, 2), "q4_0": (0,)}
FP16 |= {"iq4_nl": (0,), "iq4_xs": (0,), "mxfp4": ()}


def random_blocks(name: str, *rows: int, seed: int = 0) -> np.ndarray:
    """Return uint8 [*rows, 3 blocks], random but for scales, which are finite."""
    rng = np.random.default_rng(seed)
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[FORMATS[name].gguf_type]]
    blocks = rng.integers(0, 256, (*rows, 3, size), dtype=np.uint8)
    for at in FP16[name]:
        scale = rng.normal(size=(*rows, 3, 1)).astype(np.float16)
        scale[..., 0, :] = (
            rng.integers(1, 1024, scale[..., 0, :].shape).astype(np.uint16).view(np.float16)
        )  # subnormal ones
        blocks[..., at : at + 2] = scale.view(np.uint8)
    if name == "mxfp4":
        blocks[..., 0] %= 250
    return blocks.reshape(*rows, -1)


def dequantized(name: str, blocks: np.ndarray) -> Tensor:
    kind = gguf.GGMLQuantizationType[FORMATS[name].gguf_type]
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


@pytest.mark.parametrize("name", NAMES)
def test_every_code_is_read(name):
    """A format that lost a bit of a code or of a scale would give fewer numbers."""
    format = FORMATS[name]
    parts = format.from_blocks(torch.from_numpy(random_blocks(name, 64)))
    parts["scale"].fill_(127 if name == "mxfp4" else 1)
    if "step" in parts:
        parts["step"].fill_(1)
    found = format.unpack(parts, format.group).unique()
    assert len(found) == (15 if name == "mxfp4" else 2**format.bits)  # mxfp4 has two zeros


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_a_part_of_a_block_is_refused(name):
    blocks = torch.from_numpy(random_blocks(name, 2))
    with pytest.raises(ValueError, match="are not of whole"):
        FORMATS[name].from_blocks(blocks[:, :-1])
