"""Offloaded experts: the same bits as resident ones, and the copies that the policy predicts."""

import copy
import dataclasses
import gc
import io
import itertools
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from operator import mul
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import FAMILIES
from without_gpu import run_without_gpu

from checkpoint import Checkpoint, Writer
from formats import FORMATS
from formats.quantizer import plan_format, quantize
from generate import embedded_checkpoint, load_model, main
from model import Experts, ModelArgs, Transformer
from models import build_model
from models.gpt_oss import GptOssArgs
from models.layers.yarn import Yarn
from models.qwen2_moe import Qwen2MoeArgs
from models.random_weights import RandomWeights
from offload import plan
from offload.balance import (
    MEASURED_SECONDS,
    MEASURED_STEPS,
    MEASURED_TURNS,
    Balance,
    Prediction,
    Rounds,
    choose_copies,
    choose_threads,
    measure_balance,
    without_disturbances,
)
from offload.cache import DeviceExpertCache, ExpertCache
from offload.cpu_experts import CPUExperts
from offload.cpu_share import THREAD, PlainProducts, cpu_products, serve, set_copies
from offload.experts import (
    ALIGN,
    COUNTERS,
    LayerStorage,
    OffloadedExperts,
    expert_counters,
    plan_blob,
)
from offload.plan import OffloadSettings, fill_blobs
from offload.profile import FILE_NAME, Profile, read_profile
from offload.runner import FusedOffloadRunner, OffloadRunner
from ops.step.cpu_share import ANSWERED, ASKED, STOP, new_mailbox
from ops.step.expert_paging import MAX_PAIRS, place
from runtime.host_memory import register_host_memory
from runtime.kernel_choice import choose_runner
from runtime.runner import CompiledRunner
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation
from runtime.weights import bytes_per_token
from scripts import study_offload
from tp import ShardedExperts

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)
E, A, LAYERS = 6, 2, (0, 2, 3)  # LAYERS have experts
SIZES = dict(
    dim=64,
    n_layer=4,
    n_head=4,
    n_kv_head=2,
    head_dim=16,
    intermediate=96,
    n_expert=E,
    n_active=A,
    vocab_size=160,
    max_position=64,
)
ARGS = Qwen2MoeArgs(
    "qwen2_moe",
    **SIZES,
    qkv_bias=False,
    dense_layers=(1,),
    dense_intermediate=64,
    shared_intermediate=64,
)
GPT_OSS = GptOssArgs(
    "gpt_oss",
    **SIZES,
    attention_bias=True,
    sliding_window=8,
    full_layers=(1, 3),
    swiglu_limit=1.0,
    yarn=Yarn(4.0, 16),
)
# Blocks of 256 do not divide these small rows (tests/test_gguf_formats.py).
ALL_FORMATS = ("fp32", "bf16", *(name for name in FORMATS if FORMATS[name].min_group <= 32))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPT = list(range(3, 15))
pytestmark = pytest.mark.usefixtures("few_threads")


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """(format, args other than ARGS) -> a checkpoint with random weights."""
    folder = tmp_path_factory.mktemp("offload")

    @cache
    def made(format: str, *others: ModelArgs) -> Path:
        args, target = (*others, ARGS)[0], folder / f"model_{format}{len(others) or ''}"
        if format in FORMATS:
            group = None if FORMATS[format].has_own_group else 32
            spec = plan_format(build_model(args), format, format, group_size=group, dtype="fp32")
            source = Checkpoint(made("fp32", *others))
            model = build_model(args)
            return quantize(source, spec, model, target, iterations=0, progress=False)
        torch.manual_seed(1)
        weights = {}
        for name, tensor in build_model(args).named_parameters():
            shape = tensor.shape
            weight = torch.randn(shape)
            weight = 1 + 0.2 * weight if len(shape) == 1 else weight * shape[-1] ** -0.5
            weights[name] = weight.to(DTYPES[format])
        with Writer(target, dataclasses.asdict(args), {"name": format}) as writer:
            writer.write("all.safetensors", weights)
        return target

    return made


def load(path, settings: OffloadSettings | None = None, dtype=None) -> Transformer:
    """Load a model, with all weights aligned as PyTorch allocates them.

    A mapped file may align them to 8 bytes alone. MKL's products have other bits then.
    """
    model = load_model(path, "cpu", dtype, experts=settings)
    for name, parameter in list(model.named_parameters()):
        in_slots = ".experts.experts." in name
        if parameter.data_ptr() % 64 and not in_slots:
            parent, leaf = name.rsplit(".", 1)
            aligned = torch.nn.Parameter(parameter.clone(), requires_grad=False)
            setattr(model.get_submodule(parent), leaf, aligned)
    model.tie_weights()
    return model


def offloaded_layers(model: Transformer) -> list[OffloadedExperts]:
    return [module for module in model.modules() if isinstance(module, OffloadedExperts)]


def total_counts(model: Transformer) -> dict[str, int]:
    """Return the counters, summed over layers."""
    counters = expert_counters(model)
    return {name: sum(counts[name] for counts in counters) for name in COUNTERS}


def calls() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and positions: a prompt, which uses most experts, single tokens, and two at once."""
    prompt = torch.tensor(PROMPT)[None], torch.arange(len(PROMPT))[None]
    steps = [
        (torch.tensor([[(7 * n) % 160]]), torch.tensor([[len(PROMPT) + n]])) for n in range(10)
    ]
    return [
        prompt,
        *steps[:5],
        (torch.tensor([[5, 90]]), torch.tensor([[17, 18]])),
        *steps[7:8],
    ]


def run(model: Transformer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the logits of every call, and the chosen experts [L, T, A]."""
    model.setup_cache(1, 64)
    found = [model(*call, all_positions=True, return_routing=True) for call in calls()]
    return [logits for logits, _, _ in found], [chosen for _, chosen, _ in found]


class Replay:
    """What the counters of a model must be (but for bytes), in plain Python from its routing.

    copies: how many of n misses of a call that fits into the slots are copied; the CPU multiplies
    the others.
    """

    def __init__(self, slots: int, copies: list[int], first: list[int] | None = None):
        self.slots, self.copies = slots, copies
        # When each cached expert was last used.
        first = first or list(range(slots))
        self.last_use = [{expert: n - E for n, expert in enumerate(first)} for _ in LAYERS]
        self.found = [Counter() for _ in LAYERS]
        self.now = 0

    def run_layer(self, layer: int, ids: torch.Tensor) -> None:
        """Replay one call of a layer with experts."""
        order, cached = list(dict.fromkeys(ids.flatten().tolist())), self.last_use[layer]
        if ids.numel() > self.slots:
            order.sort()
        order.sort(key=lambda expert: expert not in cached)
        self.found[layer]["hits"] += sum(expert in cached for expert in order)
        fits = ids.numel() <= self.slots and len(ids) <= 8
        size = self.slots if len(order) <= self.slots else max(1, self.slots // 2)
        for first in range(0, len(order), size):
            self.run_wave(layer, order[first : first + size], fits)

    def run_wave(self, layer: int, wave: list[int], shares: bool) -> None:
        cached = self.last_use[layer]
        missing = [expert for expert in wave if expert not in cached]
        copied = missing[: self.copies[len(missing)]] if shares else missing
        for expert in copied:
            self.found[layer]["misses"] += 1
            del cached[min((other for other in cached if other not in wave), key=cached.get)]
            cached[expert] = self.now
        self.found[layer]["on_cpu"] += len(missing) - len(copied)
        for expert in wave:
            self.now += 1
            if expert in cached:
                cached[expert] = self.now


def replay(chosen, *settings) -> list[Counter]:
    """Return the counters that `Replay` predicts for the routing of all calls."""
    replayed = Replay(*settings)
    for experts in chosen:
        for layer, ids in enumerate(experts):
            replayed.run_layer(layer, ids)
    return replayed.found


def blob_bytes(model: Transformer, layer: int) -> int:
    """Return the bytes of one expert of a resident model, each part aligned."""
    parts = model.layers[layer].ffn.experts.parameters()
    return sum(-(-part[0].nbytes // ALIGN) * ALIGN for part in parts)


# Equality with resident experts -------------------------------------------------------------------


# A family for each way in which experts or their routing differ; the others are slow tests.
DIFFERING = "granitemoe", "phimoe", "deepseek_v3", "gemma4", "nemotron_h", "kimi_linear", "gpt_oss"


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in DIFFERING else pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_each_family_keeps_its_bits(make_family, family):
    directory = make_family(family).directory
    resident = load(directory)
    few = load(directory, OffloadSettings(gpu_experts=resident.args.n_active))
    (expected, chosen), (logits, routed) = run(resident), run(few)
    assert all(map(torch.equal, expected, logits)) and all(map(torch.equal, chosen, routed))
    assert total_counts(few)["misses"] > 0
    shared = load(directory, OffloadSettings(resident.args.n_active, compute="cpu"))
    logits, routed = run(shared)
    assert all(map(torch.equal, chosen, routed))
    assert max(map(difference, logits, expected)) < 1e-5
    assert total_counts(shared)["on_cpu"] > 0


# The slowest formats, and one of each kind of packing is left.
SLOW_FORMATS = {"hqq3", "hqq4", "fp8"}
ALL_COPIED = list(range(MAX_PAIRS + 1))


@pytest.mark.parametrize(
    "format",
    [
        pytest.param(format, marks=pytest.mark.slow if format in SLOW_FORMATS else ())
        for format in ALL_FORMATS
    ],
)
def test_the_same_bits_and_the_copies_that_the_policy_predicts(make, format):
    resident = load(make(format))
    expected, chosen = run(resident)
    all_bytes = sum(p.nbytes for n in LAYERS for p in resident.layers[n].ffn.experts.parameters())
    for slots in range(A, E + 1) if format == "fp32" else (A, E - 1, E):
        due = replay(chosen, slots, ALL_COPIED)
        for layer, counts in zip(LAYERS, due, strict=True):
            counts["bytes"] = counts["misses"] * blob_bytes(resident, layer)
        model = load(make(format), OffloadSettings(slots))
        logits, routed = run(model)
        assert all(map(torch.equal, logits, expected)), slots
        assert all(map(torch.equal, routed, chosen)), slots
        for counts, layer_due in zip(expert_counters(model), due, strict=True):
            assert counts == {name: layer_due[name] for name in COUNTERS}, slots
        totals = total_counts(model)
        assert slots > A or totals["misses"] > 0
        assert slots < E or totals["bytes"] == 0
        assert bytes_per_token(model) == bytes_per_token(resident)
        held = [p.nbytes for m in offloaded_layers(model) for p in m.experts.parameters()]
        assert sum(held) == all_bytes * slots // E


def test_the_copy_engine_copies_large_tensors(make, monkeypatch):
    """All tensors, some and none: the same logits."""
    (expected, _), seen = run(load(make("int4"))), []
    for size in (0, 1000, 1 << 21):
        monkeypatch.setattr("offload.experts.ENGINE_BYTES", size)
        model = load(make("int4"), OffloadSettings(3, compute="gpu"))
        seen += [[*map(bool, layer.layouts)] for layer in offloaded_layers(model)[:1]]
        assert all(map(torch.equal, run(model)[0], expected))
    assert seen == [[False, True], [True, True], [True, False]]


# The CPU's share ----------------------------------------------------------------------------------

NONE_COPIED, HALF_COPIED = [0] * (MAX_PAIRS + 1), [n // 2 for n in ALL_COPIED]


def difference(found: torch.Tensor, want: torch.Tensor) -> float:
    """Return the error of logits beside their size."""
    return ((found - want).float().norm() / want.float().norm()).item()


@pytest.mark.parametrize(
    "format",
    [
        pytest.param(format, marks=pytest.mark.slow if format in SLOW_FORMATS else ())
        for format in ALL_FORMATS
    ],
)
def test_the_same_logits_whoever_multiplies(make, format):
    """Sums have another order, bf16 is rounded at other places, and x of packed codes is too."""
    resident = load(make(format))
    expected, chosen = run(resident)
    bound = {"bf16": 3e-2, "fp32": 1e-5}.get(format, 2e-4)  # packed: x in 15 bits
    for copies in (NONE_COPIED, HALF_COPIED):
        model = load(make(format), OffloadSettings(3, compute="cpu"))
        set_copies(offloaded_layers(model), copies)
        logits, routed = run(model)
        assert max(map(difference, logits, expected)) < bound
        if format != "bf16":
            assert all(map(torch.equal, routed, chosen))
            due = replay(chosen, 3, copies)
            for counts, layer_due in zip(expert_counters(model), due, strict=True):
                names = "hits", "misses", "on_cpu"
                assert [counts[name] for name in names] == [layer_due[name] for name in names]
        assert total_counts(model)["on_cpu"] > 0


def test_biases_on_the_cpu(make):
    """gpt-oss: biases, and another activation."""
    expected, _ = run(load(make("mxfp4", GPT_OSS)))
    model = load(make("mxfp4", GPT_OSS), OffloadSettings(2, compute="cpu"))
    assert max(map(difference, run(model)[0], expected)) < 2e-4
    assert total_counts(model)["on_cpu"] > 0


def test_a_failure_of_the_cpu_is_reported_and_blocks_nobody(caplog):
    box = new_mailbox(4, torch.empty(8))

    def fail() -> None:
        raise ValueError("broken")

    thread = threading.Thread(target=serve, args=(box, fail))
    thread.start()
    box.flags[ASKED] = 1
    while box.flags[ANSWERED] != 1:
        time.sleep(1e-3)
    box.flags[STOP] = 1
    thread.join(timeout=10)
    assert not thread.is_alive() and box.y.isnan().all()
    assert "share of layer 0 failed" in caplog.text and "broken" in caplog.text


def test_the_thread_ends_with_its_model(make):
    before = set(threading.enumerate())
    model = load(make("fp32"), OffloadSettings(2, compute="cpu"))
    (thread,) = {each for each in threading.enumerate() if each.name == THREAD} - before
    del model
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_misses_are_divided_as_was_fastest():
    """Rows: n misses; columns: how many are copied."""
    shared = [[2.0], [9.0, 5.0], [10.0, 5.0, 9.0], [11.0, 9.5, 9.0, 9.2]]
    balance = Balance([1.0, 4.0, 8.0, 12.0], shared, 4 * 10**9, threads=7)
    assert balance.split("auto", 3) == [0, 1, 1, 3]  # of 9.0 and 9.2 the one with more copies
    assert balance.split("auto", 7)[3:] == [3, 4, 5, 6, 7]
    assert balance.split("cpu", 4) == [0] * 5 and balance.split("gpu", 4) == [0, 1, 2, 3, 4]
    assert balance.costs([0, 1, 1, 3]) == [1.0, 4.0, 4.0, 8.2]
    assert balance.costs(None) == [0.0, 3.0, 7.0, 11.0]
    rates = "copies at 1 GB/s, CPU products at 1.09 GB/s with 7 threads, both at 1.33 GB/s"
    assert balance.describe() == rates
    no_cpu = Balance([1.0, 2.0], [], 8 * 10**9)
    assert no_cpu.split("auto", 3) == [0, 1, 2, 3] and no_cpu.describe() == "copies at 4 GB/s"


def test_a_disturbed_measurement_is_none_of_less_work():
    """Two misses, one of them on the CPU, were faster than one there."""
    shared = [[2.0], [9.0, 4.0], [6.0, 5.0, 9.0], [7.0, 6.5, 3.0, 9.5]]
    assert without_disturbances(shared) == [[2.0], [3.0, 3.0], [6.0, 3.0, 3.0], shared[3]]


def test_the_cpu_is_asked_only_if_that_pays():
    balance = Balance([1.0, 4.0, 8.0], [[2.0], [4.5, 5.0], [4.7, 4.2, 9.0]], 1)
    choose = partial(choose_copies, balance)
    assert choose("auto", 2, 0.0) == [0, 0, 1]
    assert choose("auto", 2, 0.9) is None  # a request's kernels cost more than it saves
    assert choose("cpu", 2, 0.9) == [0, 0, 0] and choose("gpu", 2, 0.0) is None
    assert choose_copies(Balance([1.0, 4.0], [], 1), "cpu", 2, 0.0) is None
    slow_cpu = Balance([1.0, 4.0], [[1.0], [90.0, 4.0]], 1)
    assert choose_copies(slow_cpu, "auto", 2, 0.0) is None


def test_the_expected_speed():
    balance = Balance([1.0, 4.0, 8.0], [[2.0], [4.5, 5.0], [4.7, 4.2, 9.0]], 1)
    for copies, costs in ((None, (0.0, 3.0, 7.0)), ([0, 0, 1], (1.0, 3.5, 3.2))):
        found = Prediction(balance, copies, layers=3, resident=4.0)
        for hits, ways in ((1.0, (1, 0, 0)), (0.0, (0, 0, 1)), (0.5, (0.25, 0.5, 0.25))):
            expected = 4 + 3 * sum(map(mul, ways, costs))
            assert found.tokens_per_second(hits) == pytest.approx(1 / expected)


def test_paging_is_measured_as_a_step_runs_it(make, monkeypatch):
    """Requests are answered by the layers' thread, and caches keep their experts."""
    monkeypatch.setattr("offload.balance.MEASURED_SECONDS", 0.1)
    model = load(make("int4"), OffloadSettings(3, compute="cpu"))
    layers = offloaded_layers(model)
    before, asked = [layer.cache.cached() for layer in layers], int(layers[0].box.flags[ASKED])
    blobs = [layer.pool.clone() for layer in layers]
    balance = measure_balance(layers, [PlainProducts], torch.empty(0, 64), 2)
    assert [*map(len, balance.shared)] == [1, 2, 3] and len(balance.alone) == 3
    assert min(min(map(min, balance.shared)), *balance.alone) > 0
    least, most = MEASURED_STEPS
    rounds = int(layers[0].box.flags[ASKED]) - asked
    turns = MEASURED_TURNS
    assert 4 * least <= rounds <= turns * (3 * len(LAYERS) + 1) * most  # one layer first
    assert [layer.cache.cached() for layer in layers] == before
    assert all(map(torch.equal, blobs, [layer.pool for layer in layers]))


@pytest.mark.parametrize("each", (1e-5, 1e-3, 2e-2))  # seconds of a layer
def test_measuring_paging_takes_a_second(make, each, monkeypatch):
    layers, now = offloaded_layers(load(make("int4"), OffloadSettings(3, compute="cpu"))) * 8, [0.0]

    def run(rounds: Rounds, step: Callable) -> float:
        now[0] += each * len(rounds.layers)
        return each * len(rounds.layers)

    monkeypatch.setattr(Rounds, "timed", run)
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("offload.balance.time", clock)
    balance = measure_balance(layers, [PlainProducts], torch.empty(0, 64), 2)
    assert balance.alone == pytest.approx([each] * 3) and now[0] < 1.3 * MEASURED_SECONDS


def test_the_fastest_number_of_threads_is_taken(make):
    products: list[CPUExperts] = []

    def remember(*given):
        products.append(cpu_products(*given))
        return products[-1]

    with mock.patch.object(plan, "cpu_products", remember):
        load(make("int4"), OffloadSettings(3, compute="cpu"))
    threads = products[0].threads
    if not threads.compiled:
        pytest.skip("needs g++")
    experts, x = torch.tensor([1, 4], dtype=torch.int32), torch.ones(1, 64)
    given = x, experts, torch.zeros(2, dtype=torch.int32), torch.ones(2)
    expected = [each(*given, torch.empty(1, 64)) for each in products]
    for speeds, best in (({3: 1.0, 2: 0.5, 1: 0.9}, 2), ({3: 1.0, 2: 0.99, 1: 0.98}, 1)):
        threads.resize(3)
        found = choose_threads(products, lambda speeds=speeds: speeds[threads.count])
        assert found == threads.count == best
    found = [each(*given, torch.empty(1, 64)) for each in products]  # by the new threads
    assert all(map(torch.equal, found, expected))
    assert choose_threads([PlainProducts], lambda: 0.0) == 0


# Profiles -----------------------------------------------------------------------------------------


def test_a_profile_starts_the_cache(make, tmp_path):
    counts = [[5, 0, 7, 1, 9, 2], [0, 0, 0, 0, 0, 1], [6, 5, 4, 3, 2, 1]]
    Profile(counts).write(tmp_path / "profile.json")
    profile = read_profile(tmp_path / "profile.json")
    model = load(make("fp32"), OffloadSettings(3, profile=profile))
    cached = [list(layer.cache.cached()) for layer in offloaded_layers(model)]
    assert cached == [[0, 2, 4], [1, 0, 5], [2, 1, 0]]  # the least used one is evicted first
    assert profile.hit_ratio(2) == (16 + 1 + 11) / (24 + 1 + 21)
    logits, chosen = run(model)
    assert all(map(torch.equal, logits, run(load(make("fp32")))[0]))
    replayed = [Replay(3, ALL_COPIED, first) for first in cached]
    for layer, (counts, one) in enumerate(zip(expert_counters(model), replayed, strict=True)):
        for experts in chosen:
            one.run_layer(layer, experts[layer])
        assert counts["misses"] == one.found[layer]["misses"]


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("[1", "cannot be read as a profile"),
        ("{}", "cannot be read as a profile"),
        ("[" * 100_000, "cannot be read as a profile"),
        ('{"counts": [["a"]]}', "its counts are no numbers of uses"),
        ('{"counts": [[-1]]}', "its counts are no numbers of uses"),
        ('{"counts": [[1, 2], [3, 4]]}', "2 layers of 2 experts and the model has 3 of 6"),
        (
            '{"counts": [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]]}',
            "6 layers of 3",
        ),
        ('{"counts": [[1, 2, 3, 4, 5, 6], [1, 2, 3], [1, 2, 3, 4, 5, 6]]}', "the model has 3 of 6"),
        ('{"counts": []}', "0 layers of 0 experts and the model has 3 of 6"),
    ),
)
def test_a_profile_that_does_not_fit(make, tmp_path, text, message):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load(make("fp32"), OffloadSettings(3, profile=read_profile(path)))
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", (".", "fifo"))
def test_a_profile_that_is_no_file(tmp_path, name):
    os.mkfifo(tmp_path / "fifo")  # it has no end until somebody writes it, as /dev/zero has none
    with pytest.raises(ValueError, match="not a regular file"):
        read_profile(tmp_path / name)


# Other weights and ranks --------------------------------------------------------------------------


@pytest.mark.parametrize("format", ("fp32", pytest.param("int8", marks=pytest.mark.slow), "mxfp4"))
def test_biases_are_copied_with_their_experts(make, format):
    """gpt-oss: the same bits with any number of slots, single tokens and prompts in waves."""
    path = make(format, GPT_OSS)
    resident = load(path)
    (expected, chosen), biases = run(resident), resident.layers[0].ffn.experts.w13.bias
    for slots in (2, 3, 5):
        model = load(path, OffloadSettings(slots))
        logits, routed = run(model)
        assert all(map(torch.equal, logits, expected)), slots
        assert all(map(torch.equal, routed, chosen)), slots
        offloaded = model.layers[0].ffn.experts
        for expert, slot in offloaded.cache.cached().items():
            assert torch.equal(offloaded.experts.w13.bias[slot], biases[expert])
        assert total_counts(model)["misses"] > 0


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_another_dtype_than_the_checkpoints(make, dtype):
    expected, _ = run(load(make("bf16"), dtype=dtype))
    logits, _ = run(load(make("bf16"), OffloadSettings(3), dtype))
    assert all(map(torch.equal, logits, expected))


def test_a_source_that_is_no_checkpoint():
    source = RandomWeights(ARGS)
    expected, _ = run(load(source))
    logits, _ = run(load(source, OffloadSettings(2)))
    assert all(map(torch.equal, logits, expected))


def make_sharded_experts() -> ShardedExperts:
    """A rank's experts 2, 3 and 4 of the E, with random weights."""
    torch.manual_seed(0)
    sharded = ShardedExperts(Experts(ARGS), 2, 3)
    for module in (sharded.w13, sharded.w2):
        module.weight.copy_(torch.randn_like(module.weight) * 0.1)
    return sharded


def offload(experts: ShardedExperts, slots: int) -> OffloadedExperts:
    """Offload a copy of one layer's experts, outside of any model."""
    path = "layers.0.ffn.experts"
    weights = {f"{path}.{name}": tensor.clone() for name, tensor in experts.named_parameters()}

    def read(name, device, expert=None):
        return weights[name] if expert is None else weights[name][expert : expert + 1]

    parts, size = plan_blob(path, experts, read)
    blobs = torch.empty(experts.n_expert, size, dtype=torch.uint8)
    fill_blobs(blobs, parts, read)
    storage = LayerStorage(
        total_experts=E,
        parts=parts,
        blobs=blobs,
        cached=list(range(slots)),
        device=CPU,
        owner=None,
    )
    return OffloadedExperts(copy.deepcopy(experts), storage)


@pytest.mark.parametrize("slots", (1, 2, 3))
def test_experts_of_one_rank(slots):
    """Expert parallelism: others' experts are neither loaded nor counted, and add nothing."""
    sharded = make_sharded_experts()
    offloaded = offload(sharded, slots)
    for tokens, active in ((1, slots), (1, 1), (9, 2), (40, 4)):
        for _ in range(6):
            scores = torch.rand(tokens, E)
            ids, x = scores.topk(active).indices, torch.randn(tokens, 64)
            weights = torch.rand(tokens, active)
            found, expected = offloaded(x, ids, weights), sharded(x, ids, weights)
            assert torch.equal(found, expected)
    counts = offloaded.counters()
    assert counts["misses"] + counts["hits"] > 0
    assert set(offloaded.cache.cached()) <= {0, 1, 2}


def test_the_device_cache_equals_the_hosts():
    """One expert a call and more, repeats, other ranks' experts; some misses are not copied."""
    generator = random.Random(1)
    for slots in range(1, 8):
        host, device = ExpertCache(range(slots)), DeviceExpertCache(7, range(slots), CPU)
        device.copies = torch.tensor([0, 0, 1, 2])
        hits = misses = left = 0
        for call in range(60):
            # 7 and 8 are other ranks' experts.
            chosen = [generator.randrange(9) for _ in range(generator.randint(1, slots))]
            wave = list(dict.fromkeys(n for n in chosen if n < 7))
            wave.sort(key=lambda n: n not in host.slot)
            missing = [n for n in wave if n not in host.slot]
            asks = call % 2 == 1
            copied = (
                missing[: device.copies[len(missing)]] if asks and len(missing) < 4 else missing
            )
            hits, misses = hits + len(wave) - len(missing), misses + len(missing)
            left += len(missing) - len(copied)
            target = {expert: host.replace(expert, wave) for expert in copied}
            for expert in wave:
                if expert in host.slot:
                    host.use(expert)
            to_copy, targets = place(torch.tensor(chosen), device.table(asks), slots)
            pairs = zip(to_copy.tolist(), targets.tolist(), strict=True)
            placed = [(expert, slot) for expert, slot in pairs if expert >= 0]
            assert placed == [(n, target[n]) for n in dict.fromkeys(chosen) if n in target]
            assert targets.tolist() == [host.slot.get(n, slots) for n in chosen]
            assert device.cached() == host.slot and [*device.cached()] == [*host.slot]
        assert device.counters.tolist()[1:] == [hits, misses, left]
        assert (misses > 0) == (left > 0) == (slots < 7)


@pytest.mark.slow
def test_fused_layers_over_slots():
    """A shared expert, biases, a dense FFN beside the experts, each activation, several tokens.

    Logits in fp16 beside those of resident experts. tests/test_step_through.py has the kernels.
    """
    models = [["qwen2_moe", "int4"], ["gpt_oss", "mxfp4"], ["kolibri1", "int4"]]
    models += [["gemma4_text", "int8"], ["nemotron_h", "int8"]]
    given = {"models": models}
    found = run_without_gpu("offload_without_gpu.py", given=given, TRITON_INTERPRET="1")
    for model in found["models"]:
        assert max(model["errors"]) < 3e-3 and min(model["counts"]) > 0


# Runners ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "backend"),
    (
        ("cpu", "eager"),  # traced, and not compiled
        pytest.param("cpu", "inductor", marks=pytest.mark.slow),
        pytest.param("gpu", "inductor", marks=pytest.mark.slow),
    ),
)
def test_compiled_equals_eager(make, compute, backend, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    resident, model = load(make("fp32")), load(make("fp32"), OffloadSettings(3, compute=compute))
    assert choose_runner(resident) is CompiledRunner
    assert choose_runner(model) is OffloadRunner
    assert choose_runner(model, "fused") is FusedOffloadRunner
    runner = OffloadRunner(model)
    for each in (resident, model):
        each.setup_cache(1, 64)
    for tokens, positions in calls():
        if tokens.shape[1] == 1:
            positions = positions - len(PROMPT)
            logits = model(tokens, positions, runner=runner)
            assert (logits - resident(tokens, positions)).abs().max() < 1e-4
    totals = total_counts(model)
    assert totals["misses" if compute == "gpu" else "on_cpu"] > 0


@pytest.mark.slow
def test_a_compiled_session_gives_the_same_tokens(make):
    def tokens(settings=None, **options) -> list[list[int]]:
        model = load(make("fp32"), settings)
        options = SessionOptions(batch=2, **options)
        session = Session(model, 64, options)
        assert not session.captured
        return list(session.stream_all([PROMPT, [7, 8]], 20, GREEDY))

    expected, compiled = tokens(), dict(compile=True, compile_prefill=True)
    assert tokens(OffloadSettings(3), **compiled) == expected
    assert tokens(OffloadSettings(4, compute="cpu"), **compiled) == expected


def test_a_batch_and_drafts(make):
    """Several tokens a step may need more experts than slots."""
    prompts, batch = [PROMPT, [7], [9, 1]], SessionOptions(batch=3)
    expected = list(Session(load(make("fp32")), 64, batch).stream_all(prompts, 12, GREEDY))
    alone = list(Session(load(make("fp32")), 64).stream(PROMPT, 12, GREEDY))
    for settings in (OffloadSettings(2), OffloadSettings(5, compute="cpu")):
        model = load(make("fp32"), settings)
        assert list(Session(model, 64, batch).stream_all(prompts, 12, GREEDY)) == expected
        assert list(Speculation(Session(model, 64), 3).stream(PROMPT, 12, GREEDY)) == alone


# Memory and files ---------------------------------------------------------------------------------


class FakeRuntime:
    """Stands for CUDA's runtime; logs its calls."""

    def __init__(self, error: int):
        self.error, self.calls = error, []

    def cudaHostRegister(self, *call):
        self.calls.append(call)
        return self.error

    def cudaHostUnregister(self, address):
        self.calls.append(address)


class Owner:
    pass


def test_memory_is_registered_during_its_owners_life(monkeypatch, caplog):
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    host, owner = torch.empty(1000, dtype=torch.uint8), Owner()
    register_host_memory(host, owner, CPU)
    assert runtime.calls == [(host.data_ptr(), 1000, 3)]
    del owner
    assert runtime.calls[1:] == [host.data_ptr()] and not caplog.records


def test_memory_that_cannot_be_registered_is_one_warning(monkeypatch, caplog):
    runtime = FakeRuntime(2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    owner = Owner()
    register_host_memory(torch.empty(1000, dtype=torch.uint8), owner, CPU)
    del owner
    assert len(runtime.calls) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "\n" not in record.getMessage()


def test_a_damaged_expert_is_refused(make, tmp_path):
    source, damaged = Checkpoint(make("fp32")), "layers.2.ffn.experts.w2.weight"
    with Writer(tmp_path / "model", source.args, source.format) as writer:
        tensors = {name: source.read(name) for name in source.tensors}
        tensors[damaged] = tensors[damaged][:, :, :-1].contiguous()
        writer.write("all.safetensors", tensors)
    message = r"layers\.2\.ffn\.experts\.w2\.weight is .*: convert the model again"
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "model", OffloadSettings(2))


# The command --------------------------------------------------------------------------------------


def run_command(monkeypatch, capsys, *options: str) -> tuple[int, str, str]:
    """Run generate.py in this process -> exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["generate.py", "--device", "cpu", *options])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    try:
        code = main()
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_text_is_the_same(monkeypatch, capsys):
    common = "--temperature", "0", "--max_new_tokens", "16"
    _, expected, _ = run_command(monkeypatch, capsys, *common)
    for more in (
        ["--gpu_memory", "11MB", "--offload_compute", "gpu"],
        ["--gpu_experts", "3", "--offload_tier", "host"],
        ["--gpu_experts", "3", "--offload_compute", "cpu"],
    ):
        code, out, err = run_command(monkeypatch, capsys, *common, "--offload", *more)
        assert (code, out) == (0, expected)
        assert "experts a layer on the device" in err
        assert "B/token" in err.split(", copies ")[1]


def test_the_counters_of_a_run(monkeypatch, capsys):
    options = "--temperature", "0", "--max_new_tokens", "16", "--offload", "--gpu_experts", "2"
    for compute, name in (("gpu", "misses"), ("cpu", "on_cpu")):
        more = "--offload_compute", compute, "--json"
        _, out, _ = run_command(monkeypatch, capsys, *options, *more)
        result = json.loads(out)
        found, steps = result["offload"], result["new_tokens"] - 1
        needed = found["hits"] + found["misses"] + found["on_cpu"]
        model = load(embedded_checkpoint())
        layers, size = len(model.layers), blob_bytes(model, 0)
        assert needed == steps * layers * model.args.n_active and found[name] > 0
        assert found["hit_ratio"] == found["hits"] / needed
        assert found["cpu_ratio"] == found["on_cpu"] / needed
        assert found["bytes"] == size * found["misses"]
        assert found["bytes_moved_per_token"] == found["bytes"] / steps


def test_a_profile_of_the_command(monkeypatch, capsys, tmp_path):
    """A file that is given; one beside the checkpoint; and one that is none."""
    folder = tmp_path / "model"
    shutil.copytree(embedded_checkpoint(), folder)
    options = "--checkpoint_path", str(folder), "--temperature", "0", "--max_new_tokens", "9"
    options += "--offload", "--gpu_experts", "2"
    counts = [[8 - n for n in range(8)]] * 8
    Profile(counts).write(folder / FILE_NAME)
    code, expected, _ = run_command(monkeypatch, capsys, *options)
    assert code == 0
    (folder / FILE_NAME).write_text("{}")
    given = tmp_path / "given.json"
    Profile(counts).write(given)
    code, out, _ = run_command(monkeypatch, capsys, *options, "--expert_profile", str(given))
    assert (code, out) == (0, expected)
    for more in ([], ["--expert_profile", str(tmp_path / "absent.json")]):
        code, out, err = run_command(monkeypatch, capsys, *options, *more)
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert "cannot be read as a profile" in err and "scripts/study_offload.py --profile" in err


def test_a_memory_limit_gives_the_slots_that_fit(make):
    resident = load(make("fp32"))
    named = resident.named_parameters()
    others = sum(p.nbytes for name, p in named if ".experts." not in name)
    slot = sum(blob_bytes(resident, layer) for layer in LAYERS)
    for slots, spare in itertools.product((2, 4), (0, slot - 1)):
        memory = others + 1000 + slots * slot + spare
        model = load(make("fp32"), OffloadSettings(gpu_memory=memory, reserve=1000))
        assert {m.experts.n_expert for m in offloaded_layers(model)} == {slots}
    plenty = load(make("fp32"), OffloadSettings(gpu_memory=10**9))
    assert plenty.layers[0].ffn.experts.experts.n_expert == E
    with pytest.raises(ValueError, match="give at least") as error:
        load(make("fp32"), OffloadSettings(gpu_memory=others + 2 * slot - 1))
    least = str(error.value).split("at least ")[1].removesuffix("GB")
    load(make("fp32"), OffloadSettings(gpu_memory=int(float(least) * 1e9)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu_experts", "1"], "--gpu_experts 1: it must be from 2 (active) to 8"),
        (["--gpu_experts", "9"], "--gpu_experts 9: it must be from 2 (active) to 8"),
        (["--gpu_memory", "1MB"], "; this fits: --gpu_memory 12MB"),
        (["--gpu_memory", "much"], "--gpu_memory much: it must be a number of GB or MB"),
        ([], "--gpu_experts or --gpu_memory"),
        (["--gpu_experts", "3", "--gpu_memory", "1GB"], "give one of the two"),
        (["--gpu_experts", "3", "--offload_compute", "tpu"], "one of auto, gpu, cpu"),
        (
            ["--gpu_experts", "3", "--offload_tier", "disk"],
            "--offload_tier: the disk tier was removed",
        ),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, options, message):
    code, out, err = run_command(monkeypatch, capsys, "--offload", *options)
    assert (code, out) == (2, "") and err.startswith("error: ")
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "option",
    (
        "gpu_experts 3",
        "gpu_memory 1GB",
        "offload_compute gpu",
        "expert_profile some.json",
        "offload_tier host",
    ),
)
def test_an_option_without_offload(monkeypatch, capsys, option):
    name, value = option.split()
    code, _, err = run_command(monkeypatch, capsys, f"--{name}", value)
    assert code == 2 and f"--{name} " in err and "add --offload" in err and err.count("\n") == 1


def test_a_model_without_experts():
    args = dataclasses.replace(ARGS, dense_layers=(0, 1, 2, 3))
    with pytest.raises(ValueError, match="no layer of this model has experts"):
        load(RandomWeights(args), OffloadSettings(2))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ("tensor", "expert"))
def test_two_ranks(parallel):
    """Each rank offloads its own shard of the experts: same text, all shards counted."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    options = ["--device", "cpu", "--dtype", "fp32", "--temperature", "0"]
    options += ["--max_new_tokens", "24", "--json", "--parallel", parallel]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    results = []
    for more in (
        [],
        ["--offload", "--gpu_experts", "2"],
        ["--offload", "--gpu_experts", "3", "--offload_compute", "gpu"],
    ):
        command = [*launch, ROOT / "generate.py", *options, *more]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    assert len({result["text"] for result in results}) == 1
    for result in results[1:]:
        assert result["offload"]["misses"] > 0 and result["offload"]["bytes"] > 0
        assert result["bytes_per_token"] == results[0]["bytes_per_token"]


# scripts/study_offload.py -------------------------------------------------------------------------


def most_hits(steps: list[list[int]], cached: frozenset[int]) -> int:
    """Return the most hits that any evictions can have, by trying all."""
    if not steps:
        return 0
    needed = frozenset(steps[0])
    others = itertools.combinations(cached - needed, len(cached) - len(needed))
    kept = [frozenset(some) | needed for some in others]
    left = [after for after in kept if len(after) == len(cached)]
    return len(needed & cached) + max(most_hits(steps[1:], after) for after in left)


def test_belady_is_the_upper_bound():
    generator = random.Random(0)
    for _ in range(20):
        steps = [generator.sample(range(5), 2) for _ in range(7)]
        hits, before = study_offload.replay(steps, 5, 3, "belady")
        pairs = zip(before, steps, strict=True)
        assert hits == most_hits(steps, frozenset(range(3)))
        assert hits == sum(len(cached & {*step}) for cached, step in pairs)
        for policy in ("lru", "kept"):
            assert study_offload.replay(steps, 5, 3, policy)[0] <= hits + 3 * (policy == "kept")


def test_the_study_has_the_hits_of_an_offloaded_model(make):
    ids = [(11 * n) % 160 for n in range(20)]
    found, chosen, _ = study_offload.study(load(make("fp32")), ids)
    model = load(make("fp32"), OffloadSettings(3))
    model.setup_cache(1, 64)
    for n, token in enumerate(ids):
        model(torch.tensor([[token]]), torch.tensor([[n]]))
    hits = total_counts(model)["hits"]
    assert found["hit_ratio"]["lru"][3] == hits / chosen.numel()
    profile = study_offload.profile_of(chosen, E)
    assert found["hit_ratio"]["kept"][3] == pytest.approx(profile.hit_ratio(3))
    assert all(row[E] == 1 for row in found["hit_ratio"].values())


def test_recall_is_that_of_the_next_router(make):
    resident = load(make("fp32"))
    hidden: list[list[torch.Tensor]] = [[]]
    for n in LAYERS:
        resident.layers[n].ffn.register_forward_pre_hook(
            lambda _, inputs: hidden[0].append(inputs[0]), prepend=True
        )
    _, chosen = run(resident)
    found, _, _ = study_offload.study(load(make("fp32")), PROMPT)
    assert list(found["recall"]) == [1, 2]  # of three layers with experts
    for ahead, row in found["recall"].items():
        for count in range(1, E + 1):
            right = []
            for layer in range(len(LAYERS) - ahead):
                router = resident.layers[LAYERS[layer + ahead]].ffn.router
                predicted = router(hidden[0][layer]).topk(count).indices.tolist()
                wanted = chosen[0][layer + ahead].tolist()
                for guess, experts in zip(predicted, wanted, strict=True):
                    right += [expert in guess for expert in experts]
            assert row[count - 1] == pytest.approx(sum(right) / len(right))
        assert row[-1] == 1


def test_the_studys_command(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="draws")

    def run_study(*options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["study_offload.py", "--device", "cpu", *options])
        code = study_offload.main()
        return code, *capsys.readouterr()

    profile = tmp_path / "profile.json"
    options = "--output_dir", str(tmp_path), "--profile", str(profile)
    code, out, _ = run_study("--tokens", "50", *options, "--json")
    assert [sum(row) for row in read_profile(profile).counts] == [2 * 50] * 8
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and found["tokens"] == 50
    assert f"{found['hit_ratio']['lru']['4']:.3f}" in out
    assert (tmp_path / "offload_experts.png").read_bytes()[1:4] == b"PNG"
    assert "<svg" in (tmp_path / "offload_curves.svg").read_text()
    code, out, err = run_study("--tokens", "1")
    assert (code, out) == (2, "") and err == "error: --tokens 1: it must be at least 2\n"
