"""Memory plans: the bytes of the KV cache, the slots that --gpu_memory gives, weights that fit."""

import argparse
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES

from formats.kv_cache import KV_CACHES
from formats.packed import weight_bytes
from generate import load_model, offload_settings
from model import ModelArgs
from models import build_model
from models.random_weights import RandomWeights, architecture, number_format
from offload import plan
from offload.plan import OffloadSettings, check_plan_fits, choose_slots
from ops.plain.attention import BLOCK
from runtime.loading import WeightLoader
from runtime.memory import cache_bytes, choose_chunk
from tp import ModelShard

GB = 10**9


def options(kv_cache: str, memory: str = "16GB") -> argparse.Namespace:
    return argparse.Namespace(
        kv_cache=kv_cache,
        gpu_memory=memory,
        gpu_experts=None,
        offload_compute=None,
        expert_profile=None,
        prefill_chunk=2048,
    )


# The KV cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_takes_the_planned_bytes(make_family, name, kv_cache):
    model = load_model(make_family(name).directory, "cpu", torch.bfloat16)
    planned = cache_bytes(build_model(model.args), 2, 128, KV_CACHES[kv_cache], torch.bfloat16)
    states = model.setup_cache(2, 128, KV_CACHES[kv_cache])
    assert planned == sum(state.nbytes for state in states)


@pytest.mark.parametrize("arch", ("Mixtral-8x7B", "Qwen3-30B-A3B", "DeepSeek-V2-Lite"))
def test_an_int8_cache_leaves_room_for_more_experts(arch):
    """The reserve shrinks by the half of the cache, less scales and one dequantized layer."""
    size = args, _, length, batch = architecture(arch), torch.bfloat16, 32768, 8
    reserve = {
        kv_cache: offload_settings(options(kv_cache), None, *size).reserve for kv_cache in KV_CACHES
    }
    model = build_model(args)
    plain, int8 = (
        cache_bytes(model, batch, length + BLOCK, KV_CACHES[name], torch.bfloat16)
        for name in ("plain", "int8")
    )
    assert 0.5 < int8 / plain < 0.52
    saved = reserve["plain"] - reserve["int8"]
    assert saved == pytest.approx(plain - int8 - 5 * plain / args.n_layer)  # fp32 twice, and bf16
    slot = args.n_layer * 3 * args.dim * args.intermediate * 2
    memory = reserve["plain"] + args.n_active * slot  # the least that a plain cache allows
    slots = {}
    for kv_cache, size in reserve.items():
        settings = OffloadSettings(gpu_memory=memory, reserve=size)
        slots[kv_cache] = choose_slots(settings, args.n_expert, args.n_active, size, slot)
    more = int(saved // slot)
    assert more >= 1 and slots == {"plain": args.n_active, "int8": args.n_active + more}


def test_a_plain_cache_is_counted_as_before():
    args = architecture("Mixtral-8x7B")
    found = cache_bytes(build_model(args), 1, 1024, KV_CACHES["plain"], torch.bfloat16)
    assert found == args.n_layer * 1024 * 2 * args.n_kv_head * args.head_dim * 2


# Weights ------------------------------------------------------------------------------------------


def test_a_plan_that_does_not_fit_is_refused():
    check_plan_fits(GB, 3, GB)
    with pytest.raises(ValueError, match=r"^3 experts per layer .* need 2.0 GB .* 1.0 GB free"):
        check_plan_fits(2 * GB, 3, GB)


@pytest.mark.parametrize("mode", ("bf16", "int8", "int4"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_the_weights_take_the_planned_bytes(mode, dtype):
    args = ModelArgs(
        "mixtral",
        vocab_size=160,
        dim=256,
        n_layer=2,
        n_head=4,
        n_kv_head=2,
        head_dim=64,
        intermediate=128,
        n_expert=4,
        n_active=2,
        max_position=256,
        tied_embeddings=True,
    )
    format = number_format(mode, args)
    model = load_model(RandomWeights(args, format), "cpu", dtype)
    planned = weight_bytes(ModelShard(args, format).model, dtype)
    assert planned == sum(parameter.nbytes for parameter in model.parameters())


class FakeCUDA:
    """A device that claims to be a GPU until the check has been made; free memory is given."""

    def __init__(self, monkeypatch, free: int, cached: int = 0, integrated: bool = False):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: cached + 7)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7)
        properties = argparse.Namespace(is_integrated=integrated)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr("runtime.loading.pinned_uploads", lambda device: nullcontext())
        self.type, self.index = "cuda", None


@pytest.mark.parametrize(("free", "tokens"), ((1, 2048), (3, 4096), (6, 8192), (12, 16384)))
def test_chunks_of_prompts_are_as_long_as_memory_allows(free, tokens):
    """8,192 tokens of Qwen3-30B-A3B have 1.4 GB of activations, a quarter of what must be free."""
    assert choose_chunk(architecture("Qwen3-30B-A3B"), torch.bfloat16, free * GB) == tokens


class ReadError(Exception):
    pass


def refuse_to_read(*_):
    raise ReadError


@pytest.fixture
def size(make_family) -> int:
    model = load_model(make_family("mixtral").directory, "cpu")
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("cached", (0, 1000))
def test_the_model_is_refused_before_it_is_read(make_family, monkeypatch, size, cached):
    directory: Path = make_family("mixtral").directory
    monkeypatch.setattr(WeightLoader, "read", refuse_to_read)
    with pytest.raises(ValueError, match="the weights need"):
        load_model(directory, FakeCUDA(monkeypatch, size - cached - 1, cached))
    with pytest.raises(ReadError):
        load_model(directory, FakeCUDA(monkeypatch, size - cached, cached))
    with pytest.raises(ReadError):  # the page cache may hold most of the memory
        load_model(directory, FakeCUDA(monkeypatch, 1000, integrated=True))
    with pytest.raises(ReadError):  # bf16 takes half
        load_model(directory, FakeCUDA(monkeypatch, size // 2), torch.bfloat16)


def test_offloaded_experts_are_refused_before_they_are_read(make_family, monkeypatch):
    directory: Path = make_family("mixtral").directory
    with pytest.raises(ValueError, match="lower --gpu_experts or --gpu_memory"):
        load_model(directory, FakeCUDA(monkeypatch, 1000), experts=OffloadSettings(2))
    monkeypatch.setattr(plan.torch, "empty", refuse_to_read)
    with pytest.raises(ReadError):  # the host's memory is allocated next
        load_model(directory, FakeCUDA(monkeypatch, GB), experts=OffloadSettings(2))
