"""What is particular to Kimi Linear: keys of Moonshot's files, sizes, no positions, shards."""

import pytest
import torch

import tp
from generate import load_model
from model import Transformer
from models import ARCHITECTURES, build_model
from models.layers.kimi_delta import KimiDelta
from models.layers.latent_attention import LatentAttention


@pytest.fixture
def model(make_family) -> Transformer:
    return load_model(make_family("kimi_linear").directory, "cpu")


def test_published_sizes():
    """Its maker says 48B parameters, and 20 of 27 layers with the delta rule."""
    args = ARCHITECTURES["Kimi-Linear-48B-A3B"]
    model = build_model(args)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(49.12, abs=0.005)
    kinds = [type(block.attention) for block in model.layers]
    assert (kinds.count(KimiDelta), kinds.count(LatentAttention)) == (20, 7)
    assert kinds[3] is LatentAttention is kinds[26]


def test_keys_of_moonshots_files_give_the_same_model(make_family):
    current, hub = (make_family("kimi_linear", layout).directory for layout in ("current", "hub"))
    files = [sorted(path.name for path in each.iterdir()) for each in (current, hub)]
    assert files[0] == files[1]
    for name in files[0]:
        assert (current / name).read_bytes() == (hub / name).read_bytes(), name


def test_latent_attention_rotates_by_nothing(model):
    cos, sin = model.make_rope_table(100, torch.device("cpu")).chunk(2, dim=-1)
    assert cos.shape == (100, model.args.rotary_dim) and (cos == 1).all() and not sin.any()


def test_heads_that_ranks_cannot_share_are_refused():
    args = ARCHITECTURES["Kimi-Linear-48B-A3B"]
    why = tp.shard_refusal(args, {}, 3, "tensor")
    assert "cannot be divided by 3" in why
    local = tp.local_args(args, 2, "tensor")
    assert (local.delta_heads, local.n_head, local.delta_dim) == (16, 16, 128)
