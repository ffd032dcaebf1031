"""What is particular to Kimi Linear: kinds of layers, keys of Moonshot's files, sizes, shards."""

import pytest
import torch
from torch import Tensor

from generate import load_model
from model import Chunk, Transformer


@pytest.fixture
def model(make_family) -> Transformer:
    return load_model(make_family("kimi_linear").directory, "cpu")


def prompt(length: int, seed: int = 1) -> Tensor:
    return torch.randint(160, (1, length), generator=torch.Generator().manual_seed(seed))


def run(model: Transformer, tokens: Tensor, start: int = 0, **options) -> Tensor:
    """Run tokens [1, Q] as a chunk of row 0 -> logits [1, Q, V]."""
    chunk = Chunk(torch.tensor([0]), start + tokens.shape[1])
    return model(tokens, chunk, all_positions=True, **options)


@pytest.mark.parametrize("length", (40, 300))
def test_x(make_family, model, length):
    tokens = prompt(length)
    want = make_family("kimi_linear").peer(tokens).logits
    model.setup_cache(1, 384)
    got = run(model, tokens)
    print((got - want).abs().max(), want.abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
