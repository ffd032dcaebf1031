"""Offloaded experts: the same bits as resident ones, and the copies that the policy predicts."""

import copy
import dataclasses
import io
import itertools
import json
import logging
import os
import random
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoint, Writer
from formats import FORMATS
from formats.quantizer import plan_format, quantize
from generate import embedded_checkpoint, load_model, main
from model import Experts, ModelArgs, MoE, Transformer, weighted_sum
from models import build_model
from models.gpt_oss import GptOssArgs
from models.layers.yarn import Yarn
from models.qwen2_moe import Qwen2MoeArgs
from models.random_weights import RandomWeights
from offload import copies as offload_copies
from offload.cache import POLICIES, DeviceExpertCache, ExpertCache
from offload.copies import MAX_IN_FLIGHT, CopyStream
from offload.experts import (
    ALIGN,
    COUNTERS,
    LayerStorage,
    OffloadedExperts,
    expert_counters,
    plan_blob,
)
from offload.plan import (
    STAGING_BUFFERS,
    OffloadSettings,
    choose_prefetch,
    fill_blobs,
    register_host_memory,
)
from offload.runner import OffloadRunner
from ops.step.expert_paging import place
from runtime.graphs import CapturedStep
from runtime.kernel_choice import choose_runner
from runtime.runner import CompiledRunner
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation
from runtime.weights import bytes_per_token
from scripts import study_offload
from tp import PerExpertOutputs, ShardedExperts

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


def run_watched(model: Transformer):
    """Return `run` of a resident model, and by call the hidden states that its routers saw."""
    hidden = []

    def record(_, inputs):
        hidden.append(inputs[0])

    ffns = [model.layers[n].ffn for n in LAYERS]
    hooks = [ffn.register_forward_pre_hook(record, prepend=True) for ffn in ffns]
    logits, chosen = run(model)
    for hook in hooks:
        hook.remove()
    by_call = [hidden[n : n + len(LAYERS)] for n in range(0, len(hidden), len(LAYERS))]
    return logits, chosen, by_call


def predicted_experts(moe: MoE, hidden: torch.Tensor, count: int) -> list[int]:
    """Return the experts to prefetch for these hidden states, the likeliest first."""
    scores = moe.selection_scores(moe.router(hidden).float())
    likeliest = scores.topk(count).indices.t().flatten().tolist()
    return list(dict.fromkeys(likeliest))


class Replay:
    """What the counters of a model must be (but for bytes), in plain Python from its routing."""

    def __init__(self, model: Transformer, slots: int, policy: str, prefetch: int):
        self.model, self.slots, self.policy, self.prefetch = model, slots, policy, prefetch
        self.buffers = max(STAGING_BUFFERS, prefetch)
        # When each cached expert was last used.
        self.last_use = [{expert: expert - E for expert in range(slots)} for _ in LAYERS]
        self.uses, self.found = [Counter() for _ in LAYERS], [Counter() for _ in LAYERS]
        self.staged: list[tuple[int, int]] = []  # (layer, expert), oldest first
        self.now = 0

    def run_layer(self, layer: int, ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Replay one call of a layer with experts."""
        order, cached = list(dict.fromkeys(ids.flatten().tolist())), self.last_use[layer]
        order.sort(key=lambda expert: expert not in cached)
        self.found[layer]["hits"] += sum(expert in cached for expert in order)
        for first in range(0, len(order), self.slots):
            self.run_wave(layer, order[first : first + self.slots])
        if self.prefetch and layer + 1 < len(LAYERS) and len(order) <= self.slots:
            self.run_prefetch(layer + 1, hidden)

    def run_wave(self, layer: int, wave: list[int]) -> None:
        cached = self.last_use[layer]

        def rank(expert: int) -> tuple[int, int]:
            uses = self.uses[layer][expert] if self.policy == "lfu" else 0
            return uses, cached[expert]

        for expert in wave:
            if expert in cached:
                continue
            hit = (layer, expert) in self.staged
            self.found[layer]["speculative_hits" if hit else "misses"] += 1
            self.staged = [key for key in self.staged if key != (layer, expert)]
            del cached[min((other for other in cached if other not in wave), key=rank)]
            cached[expert] = self.now
        for expert in wave:
            self.now += 1
            cached[expert] = self.now
            self.uses[layer][expert] += 1

    def run_prefetch(self, layer: int, hidden: torch.Tensor) -> None:
        predicted = predicted_experts(self.model.layers[LAYERS[layer]].ffn, hidden, self.prefetch)
        wanted = [(layer, expert) for expert in predicted if expert not in self.last_use[layer]]
        wanted = wanted[: self.buffers]
        self.found[layer]["speculative_loads"] += len(set(wanted) - set(self.staged))
        held = [key for key in wanted if key in self.staged]
        new = [key for key in wanted if key not in self.staged]
        others = [key for key in self.staged if key not in held]
        self.staged = (others + held + new)[-self.buffers :]


def replay(model: Transformer, chosen, hidden, *settings) -> list[Counter]:
    """Return the counters that `Replay` predicts for the routing and hidden states of all calls."""
    replayed = Replay(model, *settings)
    for experts, states in zip(chosen, hidden, strict=True):
        for layer, ids in enumerate(experts):
            replayed.run_layer(layer, ids, states[layer])
    return replayed.found


def blob_bytes(model: Transformer, layer: int) -> int:
    """Return the bytes of one expert of a resident model, each part aligned."""
    parts = model.layers[layer].ffn.experts.parameters()
    return sum(-(-part[0].nbytes // ALIGN) * ALIGN for part in parts)


# Equality with resident experts -------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ("granitemoe", "phimoe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "gemma4")
)
def test_families_with_scales_and_sigmoid_routing_keep_their_bits(make_family, family):
    directory = make_family(family).directory
    resident = load(directory)
    few = load(directory, OffloadSettings(gpu_experts=resident.args.n_active, prefetch=3))
    (expected, chosen), (logits, routed) = run(resident), run(few)
    assert all(map(torch.equal, expected, logits)) and all(map(torch.equal, chosen, routed))
    counts = Counter()
    for layer in expert_counters(few)[1:]:
        counts.update(layer)
    assert counts["speculative_hits"] > 0.2 * counts["speculative_loads"] > 0


# Policies do not depend on the format, so two formats with each policy are enough.
CASES = [
    *itertools.product(("fp32", "int8"), POLICIES),
    *((name, "lru") for name in ALL_FORMATS),
]


# The slowest formats, and one of each kind of packing is left.
SLOW_CASES = {("hqq3", "lru"), ("hqq4", "lru"), ("fp8", "lru")}


@pytest.mark.parametrize(
    ("format", "policy"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in SLOW_CASES else ())
        for case in dict.fromkeys(CASES)
    ],
)
def test_the_same_bits_and_the_copies_that_the_policy_predicts(make, format, policy):
    resident = load(make(format))
    expected, chosen, hidden = run_watched(resident)
    all_bytes = sum(p.nbytes for n in LAYERS for p in resident.layers[n].ffn.experts.parameters())
    for slots, prefetch in itertools.product(range(A, E + 1), (0, 5 if format == "fp32" else 2)):
        case = slots, policy, prefetch
        due = replay(resident, chosen, hidden, *case)
        for layer, counts in zip(LAYERS, due, strict=True):
            copied = counts["misses"] + counts["speculative_loads"]
            counts["bytes"] = copied * blob_bytes(resident, layer)
        settings = OffloadSettings(slots, policy=policy, prefetch=prefetch)
        for driver in ("host",) if prefetch else ("device", "host"):
            model = load(make(format), dataclasses.replace(settings, driver=driver))
            logits, routed = run(model)
            assert all(map(torch.equal, logits, expected)), (case, driver)
            assert all(map(torch.equal, routed, chosen)), (case, driver)
            for counts, layer_due in zip(expert_counters(model), due, strict=True):
                assert counts == {name: layer_due[name] for name in COUNTERS}, (case, driver)
        totals = total_counts(model)
        assert slots > A or totals["misses"] > 0
        assert slots > A or (totals["speculative_loads"] > 0) == (prefetch > 0)
        assert slots < E or totals["bytes"] == 0
        assert bytes_per_token(model) == bytes_per_token(resident)
        held = [p.nbytes for m in offloaded_layers(model) for p in m.experts.parameters()]
        assert sum(held) == all_bytes * slots // E


@pytest.mark.parametrize("format", ("fp32", "int8", "mxfp4"))
def test_biases_are_copied_with_their_experts(make, format):
    """gpt-oss: the same bits with any number of slots, single tokens and prompts in waves."""
    path = make(format, GPT_OSS)
    resident = load(path)
    (expected, chosen), biases = run(resident), resident.layers[0].ffn.experts.w13.bias
    for slots in (2, 3, 5):
        model = load(path, OffloadSettings(slots, prefetch=1))
        logits, routed = run(model)
        assert all(map(torch.equal, logits, expected)), slots
        assert all(map(torch.equal, routed, chosen)), slots
        offloaded = model.layers[0].ffn.experts
        for expert, slot in offloaded.cache.slot.items():
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
    logits, _ = run(load(source, OffloadSettings(2, prefetch=2)))
    assert all(map(torch.equal, logits, expected))


class NeverArrived:
    """The event of a copy in flight that never arrives."""

    def query(self) -> bool:
        return False


@pytest.mark.parametrize("pieces", (0, 2))
def test_a_prefetch_in_flight_is_finished_or_dropped(make, monkeypatch, pieces):
    """Of four pieces, `pieces` are issued before the router runs.

    After that, the rest of a right prediction is copied, and of a wrong one nothing more.
    """
    resident = load(make("fp32"))
    expected, _ = run(resident)
    model = load(make("fp32"), OffloadSettings(2, prefetch=2))
    copies, size = model.layers[0].ffn.experts.storage.copies, blob_bytes(resident, 0)
    piece = size // 4
    monkeypatch.setattr(offload_copies, "PIECE", piece)
    original = copies.issue_pieces

    def issue_pieces() -> None:
        copies.in_flight.clear()
        for _ in range(pieces):
            if copies.unfinished:
                copies.staged[copies.unfinished[0]].copy(piece)
        copies.in_flight.extend(NeverArrived() for _ in range(MAX_IN_FLIGHT))
        original()

    monkeypatch.setattr(copies, "issue_pieces", issue_pieces)
    logits, _ = run(model)
    assert all(map(torch.equal, logits, expected))
    totals = total_counts(model)
    hits, loads = totals["speculative_hits"], totals["speculative_loads"]
    assert 0 < hits < loads
    wasted = totals["bytes"] - size * (totals["misses"] + hits)
    assert 0 <= wasted < size * (loads - hits) and (wasted > 0) == (pieces > 0)
    assert not copies.unfinished and len(copies.free) + len(copies.staged) == STAGING_BUFFERS


def make_sharded_experts(combines: bool) -> ShardedExperts:
    """A rank's experts 2, 3 and 4 of the E, with random weights."""
    torch.manual_seed(0)
    sharded = ShardedExperts(Experts(ARGS), 2, 3, combines)
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
        layer=0,
        total_experts=E,
        parts=parts,
        blobs=blobs,
        slots=slots,
        policy="lru",
        copies=CopyStream(CPU, 0, size),
        device=CPU,
        kernel_reads_host=False,
        gpu_schedules=False,
    )
    return OffloadedExperts(copy.deepcopy(experts), storage)


@pytest.mark.parametrize("combines", (False, True))
@pytest.mark.parametrize("slots", (1, 2, 3))
def test_experts_of_one_rank(slots, combines):
    """Expert parallelism: others' experts are neither loaded nor counted, and add nothing."""
    sharded = make_sharded_experts(combines)
    offloaded = offload(sharded, slots)
    for tokens, active in ((1, slots), (1, 1), (9, 2), (40, 4)):
        for _ in range(6):
            scores = torch.rand(tokens, E)
            ids, x = scores.topk(active).indices, torch.randn(tokens, 64)
            weights = torch.rand(tokens, active)
            found, expected = offloaded(x, ids, weights), sharded(x, ids, weights)
            per_expert = isinstance(expected, PerExpertOutputs)
            assert per_expert == (tokens == 1 and not combines)
            if per_expert:
                found, expected = weighted_sum(*found), weighted_sum(*expected)
            assert torch.equal(found, expected)
    assert offloaded.counts["misses"] + offloaded.counts["hits"] > 0
    assert set(offloaded.cache.slot) <= {0, 1, 2}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_device_cache_equals_the_hosts(policy):
    """One expert a call and more, repeats, other ranks' experts; and the state is transferred."""
    generator = random.Random(1)
    for slots in range(1, 8):
        host, device = ExpertCache(7, slots, policy), DeviceExpertCache(7, slots, policy, CPU)
        hits = misses = 0
        for call in range(60):
            # 7 and 8 are other ranks' experts.
            chosen = [generator.randrange(9) for _ in range(generator.randint(1, slots))]
            wave = list(dict.fromkeys(n for n in chosen if n < 7))
            wave.sort(key=lambda n: n not in host.slot)
            missing = [n for n in wave if n not in host.slot]
            hits, misses = hits + len(wave) - len(missing), misses + len(missing)
            target = {expert: host.replace(expert, wave) for expert in missing}
            for expert in wave:
                host.use(expert)
            to_copy, targets = place(torch.tensor(chosen), *device.buffers(), slots, policy)
            pairs = zip(to_copy.tolist(), targets.tolist(), strict=True)
            copied = [(expert, slot) for expert, slot in pairs if expert >= 0]
            assert copied == [(n, target[n]) for n in dict.fromkeys(chosen) if n in target]
            assert device.slot.tolist() == [host.slot.get(n, slots) for n in range(7)]
            if call % 7 == 0:
                found = device.read()
                assert [*found.slot.items()] == [*host.slot.items()]
                assert found.uses == host.uses
                device.write(found)
        assert device.counters.tolist()[1:] == [hits, misses] and (misses > 0) == (slots < 7)


@pytest.mark.parametrize(
    ("settings", "size", "device", "count"),
    (
        (dict(), 66 << 20, "cuda", 2),
        (dict(driver="host"), 66 << 20, "cuda", 2),
        (dict(prefetch=0), 66 << 20, "cuda", 0),
        (dict(prefetch=3), 1 << 20, "cuda", 3),
        (dict(), 2 << 20, "cuda", 0),
        (dict(), 66 << 20, "cpu", 0),
        (dict(driver="device"), 66 << 20, "cuda", 0),
        (dict(gpu_experts=8), 66 << 20, "cuda", 0),
    ),
)
def test_large_experts_are_prefetched(settings, size, device, count):
    settings = OffloadSettings(**{"gpu_experts": 4} | settings)
    assert choose_prefetch(settings, 8, size, device == "cuda") == count


# Runners ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    (
        OffloadSettings(3, policy="lfu", driver="device"),
        pytest.param(OffloadSettings(2, prefetch=2), marks=pytest.mark.slow),
    ),
)
def test_compiled_equals_eager(make, settings):
    """A block is compiled whole if the GPU schedules copies, else in two pieces."""
    resident, model = load(make("fp32")), load(make("fp32"), settings)
    assert choose_runner(resident) is CompiledRunner
    assert choose_runner(model) is OffloadRunner
    runner = OffloadRunner(model)
    assert runner.needs_host == (settings.driver is None)
    assert not CompiledRunner(resident).needs_host
    assert [runner.can_capture(tokens) for tokens in (1, 2)] == [True, False]
    for each in (resident, model):
        each.setup_cache(1, 64)
    for tokens, positions in calls():
        if tokens.shape[1] == 1:
            positions = positions - len(PROMPT)
            logits = model(tokens, positions, runner=runner)
            assert (logits - resident(tokens, positions)).abs().max() < 1e-4
    totals = total_counts(model)
    assert totals["misses"] > 0 and (totals["speculative_hits"] > 0) == bool(settings.prefetch)


class FakeGraph:
    """Stands for a CUDA graph; logs its captures and replays."""

    def __init__(self, log: list[str]):
        self.log = log

    def register_generator_state(self, generator):
        pass

    def capture_begin(self, **options):
        self.log.append("begin")

    def capture_end(self):
        self.log.append("end")

    def replay(self):
        self.log.append("replay")


def test_a_captured_step_is_split_where_the_host_takes_part(make, monkeypatch):
    for name in ("synchronize", "empty_cache", "Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    log = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(log))
    # On the CPU, a step runs while it is captured.
    model = load(make("fp32"), OffloadSettings(E, driver="host"))
    model.setup_cache(1, 64)
    step = partial(model, torch.tensor([[4]]), torch.tensor([[0]]), runner=OffloadRunner(model))
    with CapturedStep() as captured:
        step()
    assert expert_counters(model)[0]["hits"] == 0 and CapturedStep.current is None
    assert log == ["begin", "end"] * (len(LAYERS) + 1)
    captured.replay()
    assert log[2 * (len(LAYERS) + 1) :] == ["replay"] * (len(LAYERS) + 1)
    assert all(counts["hits"] + counts["misses"] == A for counts in expert_counters(model))


@pytest.mark.slow
def test_a_compiled_session_gives_the_same_tokens(make):
    def tokens(settings=None, **options) -> list[list[int]]:
        model = load(make("fp32"), settings)
        options = SessionOptions(batch=2, **options)
        session = Session(model, 64, options)
        assert not session.captured
        return list(session.stream_all([PROMPT, [7, 8]], 20, GREEDY))

    expected, compiled = tokens(), dict(compile=True, compile_prefill=True)
    assert tokens(OffloadSettings(3, prefetch=1), **compiled) == expected
    assert tokens(OffloadSettings(4, driver="device"), **compiled) == expected


def test_a_batch_and_drafts(make):
    """Several tokens a step may need more experts than slots."""
    prompts, batch = [PROMPT, [7], [9, 1]], SessionOptions(batch=3)
    expected = list(Session(load(make("fp32")), 64, batch).stream_all(prompts, 12, GREEDY))
    model = load(make("fp32"), OffloadSettings(2, prefetch=1))
    assert list(Session(model, 64, batch).stream_all(prompts, 12, GREEDY)) == expected
    alone = list(Session(load(make("fp32")), 64).stream(PROMPT, 12, GREEDY))
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
    common = "--temperature", "0", "--max_new_tokens", "30"
    _, expected, _ = run_command(monkeypatch, capsys, *common)
    for more in (
        ["--gpu_experts", "2", "--prefetch", "1"],
        ["--gpu_memory", "11MB", "--cache_policy", "lfu"],
        ["--gpu_experts", "3", "--offload_tier", "host"],
        ["--gpu_experts", "3", "--offload_driver", "device"],
    ):
        code, out, err = run_command(monkeypatch, capsys, *common, "--offload", *more)
        assert (code, out) == (0, expected)
        assert "experts a layer on the device" in err
        assert "MB/token" in err.split(", copies ")[1]


def test_the_counters_of_a_run(monkeypatch, capsys):
    options = "--temperature", "0", "--max_new_tokens", "30", "--offload", "--gpu_experts", "2"
    _, out, _ = run_command(monkeypatch, capsys, *options, "--prefetch", "1", "--json")
    result = json.loads(out)
    found, steps = result["offload"], result["new_tokens"] - 1
    needed = found["hits"] + found["misses"] + found["speculative_hits"]
    model = load(embedded_checkpoint())
    layers, size = len(model.layers), blob_bytes(model, 0)
    assert needed == steps * layers * model.args.n_active and found["misses"] > 0
    assert found["hit_ratio"] == found["hits"] / needed and found["guessed_ratio"] > 0
    assert found["bytes"] == size * (found["misses"] + found["speculative_loads"])
    assert found["bytes_moved_per_token"] == found["bytes"] / steps


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
        (["--gpu_experts", "3", "--prefetch", "9"], "--prefetch 9: it must be from 0 to 8"),
        (
            ["--gpu_experts", "3", "--prefetch", "1", "--offload_driver", "device"],
            "--offload_driver device does not prefetch: leave --prefetch out",
        ),
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
        "cache_policy lru",
        "prefetch 0",
        "offload_tier host",
        "offload_driver host",
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
        ["--offload", "--gpu_experts", "2", "--prefetch", "1"],
        ["--offload", "--gpu_experts", "3", "--offload_driver", "device"],
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
        for policy in POLICIES:
            assert study_offload.replay(steps, 5, 3, policy)[0] <= hits


def test_the_study_has_the_hits_of_an_offloaded_model(make):
    ids = [(11 * n) % 160 for n in range(20)]
    found, chosen, _ = study_offload.study(load(make("fp32")), ids)
    for policy in POLICIES:
        model = load(make("fp32"), OffloadSettings(3, policy=policy))
        model.setup_cache(1, 64)
        for n, token in enumerate(ids):
            model(torch.tensor([[token]]), torch.tensor([[n]]))
        hits = total_counts(model)["hits"]
        assert found["hit_ratio"][policy][3] == hits / chosen.numel()
        assert found["hit_ratio"][policy][E] == 1


def test_recall_is_that_of_the_next_router(make):
    resident = load(make("fp32"))
    _, chosen, hidden = run_watched(resident)
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

    code, out, _ = run_study("--tokens", "100", "--output_dir", str(tmp_path), "--json")
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and found["tokens"] == 100
    assert f"{found['hit_ratio']['lru']['4']:.3f}" in out
    assert (tmp_path / "offload_experts.png").read_bytes()[1:4] == b"PNG"
    assert "<svg" in (tmp_path / "offload_curves.svg").read_text()
    code, out, err = run_study("--tokens", "1")
    assert (code, out) == (2, "") and err == "error: --tokens 1: it must be at least 2\n"
