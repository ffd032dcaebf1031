"""What a server's session holds: contexts and conversations by the memory that is free."""

import sys
from pathlib import Path

import pytest
import torch

import serve
from formats.kv_cache import KV_CACHES
from models import ARCHITECTURES, build_model
from ops.plain.attention import BLOCK
from runtime.memory import (
    KEPT,
    LEAST_LENGTH,
    LEFT_FREE,
    Capacity,
    cache_bytes,
    plan_capacity,
)

ROOT = Path(__file__).parents[1]
GB = 10**9


@pytest.fixture(scope="module", params=("Qwen3-30B-A3B", "DeepSeek-V2-Lite", "Qwen3.6-35B-A3B"))
def model(request):
    return build_model(ARCHITECTURES[request.param])


def plan(model, free: float, max_batch: int = 8, length: int | None = None, cache="plain"):
    return plan_capacity(model, KV_CACHES[cache], torch.bfloat16, int(free), max_batch, length)


@pytest.mark.parametrize("cache", KV_CACHES)
@pytest.mark.parametrize("max_batch", (1, 3, 8))
@pytest.mark.parametrize("free", (0.5, 1, 2, 5, 20, 100))
def test_a_plan_fits_and_is_not_much_too_small(model, free, max_batch, cache):
    found = plan(model, free * GB, max_batch, cache=cache)
    size = cache_bytes(model, found.rows, found.length + BLOCK, KV_CACHES[cache], torch.bfloat16)
    usable = (1 - LEFT_FREE) * free * GB
    assert size <= usable and found.nbytes >= size
    limit = model.args.max_position
    assert 1 <= found.rows <= max(2 * max_batch, KEPT) and found.length <= limit
    if found.rows < max(max_batch, KEPT):  # fewer sequences rather than a shorter context
        assert found.length >= min(limit, LEAST_LENGTH) - 2 * BLOCK or found.rows == 1
    more = cache_bytes(
        model, found.rows, found.length + 3 * BLOCK, KV_CACHES[cache], torch.bfloat16
    )
    row = size // found.rows
    assert found.length == limit or more > usable or found.rows > max(max_batch, KEPT)
    assert found.rows == max(2 * max_batch, KEPT) or size + row > usable or found.length < limit


def test_much_memory_holds_the_models_whole_context(model):
    found = plan(model, 600 * GB)
    assert (found.length, found.rows) == (model.args.max_position, 16)


def test_a_given_length_is_kept(model):
    found = plan(model, 3 * GB, length=4096)
    assert found.length == 4096 and found.rows >= 4


def test_too_little_memory_is_one_line(model):
    for free in (-GB, 0, 10**6):
        with pytest.raises(ValueError, match="shorten --max_seq_len, or add --kv_cache int8"):
            plan(model, free)


def test_the_line_for_the_user():
    text = Capacity(40960, 16, 12_345_678_901).describe(8)
    assert text == (
        "context 40,960 tokens, up to 8 answers side by side, 16 conversations kept (12.35 GB)"
    )


def test_a_server_refuses_too_large_a_batch(monkeypatch, capsys):
    line = "serve.py --port 0 --device cpu --max_batch 65"
    monkeypatch.setattr(sys, "argv", line.split())
    assert serve.main() == 2
    assert "--max_batch 65: it must be at most 64" in capsys.readouterr().err


def test_a_server_says_its_context(caplog):
    options = serve.build_parser().parse_args(["--device", "cpu"])
    serve.check_options(options)
    with caplog.at_level("INFO", "moe_fast"):
        serve.load(options, torch.device("cpu"))
    assert "context 4,096 tokens, up to 16 answers" in caplog.text
