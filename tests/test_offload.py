"""Experts in host memory: the same bits as resident ones, and as many copies as a replay of the policy says."""

import copy
import dataclasses
import importlib.util
import io
import itertools
import json
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

import offload
from args import ModelArgs, Yarn
from checkpoint import Checkpoint, Writer
from generate import embedded_checkpoint, load_model, main
from model import Stages, Transformer
from offload import COUNTERS, STAGING, Offload, OffloadedExperts, counters
from packing import FORMATS
from quantize import plan, quantize
from recording import Recording
from session import Sampling, Session
from shapes import RandomWeights
from slots import POLICIES, Cache, DeviceCache, place
from speculate import Speculation
from tp import LocalExperts

ROOT = Path(__file__).parents[1]
E, A, LAYERS = 6, 2, (0, 2, 3)
ARGS = ModelArgs(
    dim=64, n_layer=4, n_head=4, n_kv_head=2, head_dim=16, intermediate=96, n_expert=E, n_active=A, vocab_size=160,
    max_position=64, dense_layers=(1,), dense_intermediate=64, shared_intermediate=64,
)  # fmt: skip
GPT_OSS = dataclasses.replace(
    ARGS, dense_layers=(), dense_intermediate=0, shared_intermediate=0, attention_bias=True, sliding_window=8,
    full_layers=(1, 3), attention_sinks=True, router_bias=True, expert_bias=True, swiglu_limit=1.0, yarn=Yarn(4.0, 16),
)  # fmt: skip
ALL_FORMATS = ("fp32", "bf16", *FORMATS)
PROMPT = list(range(3, 15))
pytestmark = pytest.mark.usefixtures("few_threads")


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Format, and args other than ARGS -> a checkpoint with random weights."""
    folder = tmp_path_factory.mktemp("offload")

    @cache
    def made(format: str, *others: ModelArgs) -> Path:
        args, target = (*others, ARGS)[0], folder / f"model_{format}{len(others) or ''}"
        if format in FORMATS:
            group = None if FORMATS[format].per_row else 32
            spec = plan(args, format, format, group_size=group, dtype="fp32")
            return quantize(made("fp32", *others), spec, target, iterations=0, progress=False)
        torch.manual_seed(1)
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in Transformer(args).named_parameters()}
        weights = {n: 1 + 0.2 * torch.randn(s) if len(s) == 1 else torch.randn(s) * s[-1] ** -0.5
                   for n, s in shapes.items()}  # fmt: skip
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[format]
        with Writer(target, dataclasses.asdict(args), {"name": format}) as writer:
            writer.write("all.safetensors", {name: tensor.to(dtype) for name, tensor in weights.items()})
        return target

    return made


def calls() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and positions: a prompt, which touches most experts; single tokens; several at once."""
    prompt = torch.tensor(PROMPT)[None], torch.arange(len(PROMPT))[None]
    steps = [(torch.tensor([[(7 * n) % 160]]), torch.tensor([[len(PROMPT) + n]])) for n in range(10)]
    return [prompt, *steps[:5], (torch.tensor([[5, 90]]), torch.tensor([[17, 18]])), *steps[7:8]]


def run(model: Transformer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The logits of every call, and the experts chosen [L, T, A]."""
    model.setup_cache(1, 64)
    found = [model(*call, all_positions=True, return_routing=True) for call in calls()]
    return [logits for logits, _, _ in found], [chosen for _, chosen, _ in found]


def watched(model: Transformer) -> tuple[list[torch.Tensor], list[torch.Tensor], list[list[torch.Tensor]]]:
    """`run` of a resident model, and what the router of each layer with experts saw, call by call."""
    seen = []
    hooks = [
        model.layers[n].ffn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]), prepend=True)
        for n in LAYERS
    ]
    logits, chosen = run(model)
    for hook in hooks:
        hook.remove()
    return logits, chosen, [seen[n : n + len(LAYERS)] for n in range(0, len(seen), len(LAYERS))]


def replay(model: Transformer, chosen, seen, slots: int, policy: str, prefetch: int) -> list[dict[str, int]]:
    """What the counters must be (but for bytes), from the routing and a model with all its experts at hand."""
    last = [{expert: expert - E for expert in range(slots)} for _ in LAYERS]  # when each that is there was used
    uses, found = [Counter() for _ in LAYERS], [Counter() for _ in LAYERS]
    staged, now = [], 0  # (layer, expert), oldest first
    for experts, hidden in zip(chosen, seen, strict=True):
        for layer, ids in enumerate(experts):
            order = list(dict.fromkeys(ids.flatten().tolist()))
            order = [e for e in order if e in last[layer]] + [e for e in order if e not in last[layer]]
            found[layer]["hits"] += sum(e in last[layer] for e in order)
            for first in range(0, len(order), slots):
                wave = order[first : first + slots]
                for expert in wave:
                    if expert in last[layer]:
                        continue
                    found[layer]["speculative_hits" if (layer, expert) in staged else "misses"] += 1
                    staged = [key for key in staged if key != (layer, expert)]
                    rank = lambda e, n=layer: (uses[n][e] if policy == "lfu" else 0, last[n][e])  # noqa: E731
                    del last[layer][min((e for e in last[layer] if e not in wave), key=rank)]
                    last[layer][expert] = now
                for expert in wave:
                    now += 1
                    last[layer][expert] = now
                    uses[layer][expert] += 1
            if prefetch and layer + 1 < len(LAYERS) and len(order) <= slots:
                scores, _ = model.layers[LAYERS[layer + 1]].ffn.score(hidden[layer])
                likeliest = scores.topk(prefetch).indices.t().flatten().tolist()
                guesses = [(layer + 1, e) for e in dict.fromkeys(likeliest) if e not in last[layer + 1]]
                guesses = guesses[: max(STAGING, prefetch)]
                found[layer + 1]["speculative_loads"] += len(set(guesses) - set(staged))
                held = [key for key in guesses if key in staged]
                new = [key for key in guesses if key not in staged]
                staged = ([key for key in staged if key not in held] + held + new)[-max(STAGING, prefetch) :]
    return found


def blob_bytes(model: Transformer, layer: int) -> int:
    """Of one expert of a resident model, each part on its own 128 bytes."""
    parts = model.layers[layer].ffn.experts.parameters()
    return sum(-(-part[0].nbytes // offload.ALIGN) * offload.ALIGN for part in parts)


@pytest.mark.parametrize("family", ("granitemoe", "phimoe", "glm4_moe", "deepseek_v3"))
def test_families_with_scales_and_sigmoid_routing_keep_their_bits(make_family, family):
    directory = make_family(family).directory
    resident = load_model(directory, "cpu")
    few = load_model(directory, "cpu", experts=Offload(gpu_experts=resident.args.n_active, prefetch=3))
    (want, chosen), (got, same) = run(resident), run(few)
    assert all(map(torch.equal, want, got)) and all(map(torch.equal, chosen, same))
    counts = Counter()
    for layer in offload.counters(few)[1:]:
        counts.update(layer)
    assert counts["speculative_hits"] > 0.2 * counts["speculative_loads"] > 0


# A policy does not know the format, so two formats with each are enough.
CASES = [*itertools.product(("fp32", "int8"), POLICIES), *((name, "lru") for name in ALL_FORMATS)]


@pytest.mark.parametrize(("format", "policy"), dict.fromkeys(CASES))
def test_the_same_bits_and_the_copies_that_the_policy_makes(make, format, policy):
    resident = load_model(make(format), "cpu")
    want, chosen, seen = watched(resident)
    for slots, prefetch in itertools.product(range(A, E + 1), (0, 5 if format == "fp32" else 2)):
        expected = replay(resident, chosen, seen, slots, policy, prefetch)
        for layer, due in zip(LAYERS, expected, strict=True):
            due["bytes"] = (due["misses"] + due["speculative_loads"]) * blob_bytes(resident, layer)
        settings = Offload(slots, policy=policy, prefetch=prefetch, tier="disk" if slots == 3 else "host")
        for driver in ("host",) if prefetch or slots == 3 else ("device", "host"):
            model = load_model(make(format), "cpu", experts=dataclasses.replace(settings, driver=driver))
            got, routed = run(model)
            assert all(map(torch.equal, got, want)) and all(map(torch.equal, routed, chosen)), (slots, prefetch, driver)
            for counts, due in zip(counters(model), expected, strict=True):
                assert counts == {name: due[name] for name in COUNTERS}, (slots, prefetch, driver)
        totals = Counter()
        for counts in counters(model):
            totals.update(counts)
        assert slots > A or (totals["misses"] > 0 and (totals["speculative_loads"] > 0) == (prefetch > 0))
        assert slots < E or totals["bytes"] == 0
        assert model.bytes_per_token() == resident.bytes_per_token()
        held = sum(p.nbytes for m in model.modules() if isinstance(m, OffloadedExperts) for p in m.experts.parameters())
        all_of_them = sum(p.nbytes for n in LAYERS for p in resident.layers[n].ffn.experts.parameters())
        assert held == all_of_them * slots // E


@pytest.mark.parametrize("format", ("fp32", "int8", "mxfp4"))
def test_biases_come_and_go_with_their_experts(make, format):
    """gpt-oss: the same bits with any number of slots, single tokens and prompts in waves."""
    path = make(format, GPT_OSS)
    resident = load_model(path, "cpu")
    (want, chosen), biases = run(resident), resident.layers[0].ffn.experts.w13.bias
    for slots, tier in ((2, "host"), (3, "disk"), (5, "host")):
        model = load_model(path, "cpu", experts=Offload(slots, prefetch=1, tier=tier))
        got, routed = run(model)
        assert all(map(torch.equal, got, want)) and all(map(torch.equal, routed, chosen)), slots
        offloaded = model.layers[0].ffn.experts
        for expert, slot in offloaded.cache.slot.items():
            assert torch.equal(offloaded.experts.w13.bias[slot], biases[expert])
        assert sum(counts["misses"] for counts in counters(model)) > 0


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_another_dtype_than_the_checkpoint_s(make, dtype):
    want, _ = run(load_model(make("bf16"), "cpu", dtype))
    got, _ = run(load_model(make("bf16"), "cpu", dtype, experts=Offload(3)))
    assert all(map(torch.equal, got, want))


def test_a_source_that_is_no_checkpoint():
    source = RandomWeights(ARGS)
    want, _ = run(load_model(source, "cpu"))
    got, _ = run(load_model(source, "cpu", experts=Offload(2, prefetch=2)))
    assert all(map(torch.equal, got, want))


class Slow:
    """A copy that never arrives."""

    def query(self) -> bool:
        return False


@pytest.mark.parametrize("pieces", (0, 2))
def test_a_guess_that_has_not_arrived_is_finished_or_dropped(make, monkeypatch, pieces):
    """What is left of a guess when the router has spoken: the rest of a true one is copied, a wrong one ends there."""
    resident = load_model(make("fp32"), "cpu")
    want, _ = run(resident)
    model = load_model(make("fp32"), "cpu", experts=Offload(2, prefetch=2))
    link, size = model.layers[0].ffn.experts.link, blob_bytes(resident, 0)
    monkeypatch.setattr(offload, "PIECE", size // 4)
    handed_over = link.go_on

    def go_on() -> None:
        link.under_way.clear()
        for _ in range(pieces):
            if link.unfinished:
                link.held[link.unfinished[0]].copy(offload.PIECE)
        link.under_way.extend(Slow() for _ in range(offload.UNDER_WAY))
        handed_over()

    monkeypatch.setattr(link, "go_on", go_on)
    got, _ = run(model)
    assert all(map(torch.equal, got, want))
    totals = {name: sum(counts[name] for counts in counters(model)) for name in COUNTERS}
    assert 0 < totals["speculative_hits"] < totals["speculative_loads"]
    copied = totals["bytes"] - size * (totals["misses"] + totals["speculative_hits"])
    assert 0 <= copied < size * (totals["speculative_loads"] - totals["speculative_hits"]) and (copied > 0) == (
        pieces > 0
    )
    assert not link.unfinished and len(link.free) + len(link.held) == STAGING


@pytest.mark.parametrize("slots", (1, 2, 3))
def test_a_rank_s_own_experts(slots):
    """Expert parallelism: others' experts are neither loaded nor counted, and add nothing."""
    torch.manual_seed(0)
    whole = LocalExperts(ARGS, 2, 3)
    for name in ("w13", "w2"):
        getattr(whole, name).weight.copy_(torch.randn_like(getattr(whole, name).weight) * 0.1)
    weights = {f"layers.0.ffn.experts.{name}": tensor.clone() for name, tensor in whole.named_parameters()}

    def read(name, device, expert=None):
        return weights[name] if expert is None else weights[name][expert : expert + 1]

    parts, size = offload.lay_out("layers.0.ffn.experts", whole, read)
    offloaded = OffloadedExperts(
        copy.deepcopy(whole), E, 0, parts, offload.FromFiles(parts, size, read), slots, "lru",
        offload.Link(torch.device("cpu"), 0, size), torch.device("cpu"),
    )  # fmt: skip
    for tokens, active in ((1, slots), (1, 1), (9, 2), (40, 4)):
        for _ in range(6):
            scores = torch.rand(tokens, E)
            ids, x, shares = scores.topk(active).indices, torch.randn(tokens, 64), torch.rand(tokens, active)
            assert torch.equal(offloaded(x, ids, shares), whole(x, ids, shares))
    assert offloaded.counts["misses"] + offloaded.counts["hits"] > 0 and set(offloaded.cache.slot) <= {0, 1, 2}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_device_counts_as_the_host_does(policy):
    """One expert a call and more, repeated ones, others' ones; and the state goes from one to the other and back."""
    generator = random.Random(1)
    for slots in range(1, 8):
        host, device = Cache(7, slots, policy), DeviceCache(7, slots, policy, torch.device("cpu"))
        hits = misses = 0
        for call in range(60):
            chosen = [generator.randrange(9) for _ in range(generator.randint(1, slots))]  # 7 and 8 are others'
            wave = sorted(dict.fromkeys(n for n in chosen if n < 7), key=lambda n: n not in host.slot)
            absent = [n for n in wave if n not in host.slot]
            hits, misses = hits + len(wave) - len(absent), misses + len(absent)
            target = {expert: host.replace(expert, wave) for expert in absent}
            for expert in wave:
                host.use(expert)
            experts, places = place(torch.tensor(chosen), *device.buffers(), slots, policy)
            copied = [pair for pair in zip(experts.tolist(), places.tolist(), strict=True) if pair[0] >= 0]
            assert copied == [(n, target[n]) for n in dict.fromkeys(chosen) if n in target]
            assert device.slot.tolist() == [host.slot.get(n, slots) for n in range(7)]
            if call % 7 == 0:
                found = device.read()
                assert [*found.slot.items()] == [*host.slot.items()] and found.uses == host.uses
                device.write(found)
        assert device.found.tolist()[1:] == [hits, misses] and (misses > 0) == (slots < 7)


@pytest.mark.parametrize(
    ("settings", "size", "device", "guesses"),
    (
        (dict(), 66 << 20, "cuda", 2),
        (dict(driver="host"), 66 << 20, "cuda", 2),
        (dict(prefetch=0), 66 << 20, "cuda", 0),
        (dict(prefetch=3), 1 << 20, "cuda", 3),
        (dict(), 2 << 20, "cuda", 0),
        (dict(), 66 << 20, "cpu", 0),
        (dict(driver="device"), 66 << 20, "cuda", 0),
        (dict(tier="disk"), 66 << 20, "cuda", 0),
        (dict(gpu_experts=8), 66 << 20, "cuda", 0),
    ),
)
def test_guesses_are_made_where_experts_are_large(settings, size, device, guesses):
    settings = Offload(**{"gpu_experts": 4} | settings)
    assert offload.choose_guesses(settings, 8, size, torch.device(device)) == guesses


@pytest.mark.parametrize("settings", (Offload(3, policy="lfu", driver="device"), Offload(2, prefetch=2)))
def test_compiled_as_in_eager_mode(make, settings):
    """Whole where the device drives, else up to the host and after it; what is compiled computes the same."""
    resident, model = load_model(make("fp32"), "cpu"), load_model(make("fp32"), "cpu", experts=settings)
    assert model.host_driven == (settings.driver is None) and not resident.host_driven
    assert [model.recordable(tokens) for tokens in (1, 2)] == [True, False]
    stages = Stages(block=model.compile_block(partial(torch.compile, fullgraph=True)))
    for each in (resident, model):
        each.setup_cache(1, 64)
    for tokens, positions in calls():
        if tokens.shape[1] == 1:
            positions = positions - len(PROMPT)
            assert (model(tokens, positions, stages=stages) - resident(tokens, positions)).abs().max() < 1e-4
    totals = {name: sum(counts[name] for counts in counters(model)) for name in COUNTERS}
    assert totals["misses"] > 0 and (totals["speculative_hits"] > 0) == bool(settings.prefetch)


class Graph:
    """What stands for a CUDA graph: it notes when it is made and replayed."""

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


def test_a_recorded_step_is_cut_where_the_host_takes_part(make, monkeypatch):
    for name in ("synchronize", "empty_cache", "Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    log = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(log))
    model = load_model(make("fp32"), "cpu", experts=Offload(E, driver="host"))  # here what is recorded runs, too
    model.setup_cache(1, 64)
    stages = Stages(block=model.compile_block(lambda function: function))
    step = partial(model, torch.tensor([[4]]), torch.tensor([[0]]), stages=stages)
    with Recording(torch.Generator()) as recording:
        step()
    assert counters(model)[0]["hits"] == 0 and Recording.now is None
    assert log == ["begin", "end"] * (len(LAYERS) + 1)
    recording.replay()
    assert log[2 * (len(LAYERS) + 1) :] == ["replay"] * (len(LAYERS) + 1)
    assert all(counts["hits"] + counts["misses"] == A for counts in counters(model))


@pytest.mark.slow
def test_a_compiled_session_gives_the_same_tokens(make):
    def tokens(experts=None, **options) -> list[list[int]]:
        session = Session(load_model(make("fp32"), "cpu", experts=experts), 64, batch=2, **options)
        assert not session.recorded
        return list(session.stream_all([PROMPT, [7, 8]], 20, Sampling(temperature=0)))

    assert tokens(Offload(3, prefetch=1), compile=True, compile_prefill=True) == tokens()
    assert tokens(Offload(4, driver="device"), compile=True, compile_prefill=True) == tokens()


def test_a_batch_and_drafts(make):
    """Several tokens a step may need more experts than slots."""
    greedy = Sampling(temperature=0)
    want = list(Session(load_model(make("fp32"), "cpu"), 64, batch=3).stream_all([PROMPT, [7], [9, 1]], 12, greedy))
    model = load_model(make("fp32"), "cpu", experts=Offload(2, prefetch=1))
    assert list(Session(model, 64, batch=3).stream_all([PROMPT, [7], [9, 1]], 12, greedy)) == want
    alone = list(Session(load_model(make("fp32"), "cpu"), 64).stream(PROMPT, 12, greedy))
    assert list(Speculation(Session(model, 64), 3).stream(PROMPT, 12, greedy)) == alone


# Memory and files


class Driver:
    """What stands for CUDA's runtime."""

    def __init__(self, error: int):
        self.error, self.calls = error, []

    def cudaHostRegister(self, *call):
        self.calls.append(call)
        return self.error

    def cudaHostUnregister(self, address):
        self.calls.append(address)


class Owner:
    pass


def test_memory_is_registered_as_long_as_it_is_used(monkeypatch, capsys):
    driver = Driver(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    host, owner = torch.empty(1000, dtype=torch.uint8), Owner()
    offload.register(host, owner, torch.device("cpu"))
    assert driver.calls == [(host.data_ptr(), 1000, 3)]
    del owner
    assert driver.calls[1:] == [host.data_ptr()] and capsys.readouterr().err == ""


def test_memory_that_cannot_be_registered_is_one_warning(monkeypatch, capsys):
    driver = Driver(2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    owner = Owner()
    offload.register(torch.empty(1000, dtype=torch.uint8), owner, torch.device("cpu"))
    del owner
    assert len(driver.calls) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("how", ("gone", "shorter", "changed"))
def test_files_that_change_under_a_disk_tier(make, tmp_path, how):
    path = tmp_path / "model"
    path.mkdir()
    for file in make("fp32").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    model = load_model(path, "cpu", experts=Offload(2, tier="disk"))
    for name, parameter in list(model.named_parameters()):  # they are mapped too, and would go with the file
        owner, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(parameter.clone(), requires_grad=False))
    file = path / "all.safetensors"
    if how == "gone":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        file.write_bytes(data[:-8] if how == "shorter" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"all\.safetensors (cannot be read any more|has changed)") as error:
        run(model)
    assert "\n" not in str(error.value)


def test_a_damaged_expert_is_refused(make, tmp_path):
    source = Checkpoint(make("fp32"))
    with Writer(tmp_path / "model", source.args, source.format) as writer:
        tensors = {name: source.read(name) for name in source.tensors}
        tensors["layers.2.ffn.experts.w2.weight"] = tensors["layers.2.ffn.experts.w2.weight"][:, :, :-1].contiguous()
        writer.write("all.safetensors", tensors)
    with pytest.raises(ValueError, match=r"layers\.2\.ffn\.experts\.w2\.weight is .*: convert the model again"):
        load_model(tmp_path / "model", "cpu", experts=Offload(2))


# The command


def command(monkeypatch, capsys, *options: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["generate.py", "--device", "cpu", *options])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code = main()
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_text_is_the_same(monkeypatch, capsys):
    common = "--temperature", "0", "--max_new_tokens", "30"
    _, want, _ = command(monkeypatch, capsys, *common)
    for more in (["--gpu_experts", "2", "--prefetch", "1"], ["--gpu_memory", "11MB", "--cache_policy", "lfu"],
                 ["--gpu_experts", "3", "--offload_tier", "disk"],
                 ["--gpu_experts", "3", "--offload_driver", "device"]):  # fmt: skip
        code, out, err = command(monkeypatch, capsys, *common, "--offload", *more)
        assert (code, out) == (0, want)
        assert "experts a layer on the device" in err and "MB a token copied" in err
    _, out, _ = command(monkeypatch, capsys, *common, "--offload", "--gpu_experts", "2", "--prefetch", "1", "--json")
    result = json.loads(out)
    found = result["offload"]
    needed = found["hits"] + found["misses"] + found["speculative_hits"]
    model = load_model(embedded_checkpoint(), "cpu")
    layers, size = len(model.layers), blob_bytes(model, 0)
    assert needed == (result["new_tokens"] - 1) * layers * model.args.n_active and found["misses"] > 0
    assert found["hit_ratio"] == found["hits"] / needed and found["guessed_ratio"] > 0
    assert found["bytes"] == size * (found["misses"] + found["speculative_loads"])
    assert found["bytes_moved_per_token"] == found["bytes"] / (result["new_tokens"] - 1)


def test_a_budget_gives_the_slots_that_fit(make):
    resident = load_model(make("fp32"), "cpu")
    others = sum(p.nbytes for n, p in resident.named_parameters() if ".experts." not in n)
    slot = sum(blob_bytes(resident, layer) for layer in LAYERS)
    for slots, spare in itertools.product((2, 4), (0, slot - 1)):
        settings = Offload(gpu_memory=others + 1000 + slots * slot + spare, reserve=1000)
        model = load_model(make("fp32"), "cpu", experts=settings)
        assert {m.experts.n_expert for m in model.modules() if isinstance(m, OffloadedExperts)} == {slots}
    plenty = load_model(make("fp32"), "cpu", experts=Offload(gpu_memory=10**9))
    assert plenty.layers[0].ffn.experts.experts.n_expert == E
    with pytest.raises(ValueError, match="give at least") as error:
        load_model(make("fp32"), "cpu", experts=Offload(gpu_memory=others + 2 * slot - 1))
    least = int(float(str(error.value).split("at least ")[1].removesuffix("GB")) * 1e9)
    load_model(make("fp32"), "cpu", experts=Offload(gpu_memory=least))


@pytest.mark.parametrize(
    "options, message",
    [
        (["--gpu_experts", "1"], "--gpu_experts 1: it must be from 2 (active) to 8"),
        (["--gpu_experts", "9"], "--gpu_experts 9: it must be from 2 (active) to 8"),
        (["--gpu_memory", "1MB"], "give at least 0.0"),
        (["--gpu_memory", "much"], "--gpu_memory much: it must be a number of GB or MB"),
        ([], "--gpu_experts or --gpu_memory"),
        (["--gpu_experts", "3", "--gpu_memory", "1GB"], "give one of the two"),
        (["--gpu_experts", "3", "--prefetch", "9"], "--prefetch 9: it must be from 0 to 8"),
        (["--gpu_experts", "3", "--prefetch", "1", "--offload_driver", "device"], "device knows neither --prefetch"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, options, message):
    code, out, err = command(monkeypatch, capsys, "--offload", *options)
    assert (code, out) == (2, "") and err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "option",
    ("gpu_experts 3", "gpu_memory 1GB", "cache_policy lru", "prefetch 0", "offload_tier host", "offload_driver host"),
)
def test_an_option_without_offload(monkeypatch, capsys, option):
    name, value = option.split()
    code, _, err = command(monkeypatch, capsys, f"--{name}", value)
    assert code == 2 and f"--{name} " in err and "add --offload" in err and err.count("\n") == 1


def test_a_model_without_experts(tmp_path):
    args = dataclasses.replace(ARGS, dense_layers=(0, 1, 2, 3))
    with pytest.raises(ValueError, match="no layer of this model has experts"):
        load_model(RandomWeights(args), "cpu", experts=Offload(2))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


# scripts/study_offload.py


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("study_offload", ROOT / "scripts" / "study_offload.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def best(steps: list[list[int]], there: frozenset[int]) -> int:
    """The most hits that any choice of what goes can have, by trying all."""
    if not steps:
        return 0
    needed = frozenset(steps[0])
    others = itertools.combinations(there - needed, len(there) - len(needed))
    left = [frozenset(kept) | needed for kept in others if len(needed | set(kept)) == len(there)]
    return len(needed & there) + max(best(steps[1:], after) for after in left)


def test_belady_is_the_bound(study):
    generator = random.Random(0)
    for _ in range(20):
        steps = [generator.sample(range(5), 2) for _ in range(7)]
        hits, before = study.replay(steps, 5, 3, "belady")
        assert (
            hits == best(steps, frozenset(range(3))) == sum(len(b & {*s}) for b, s in zip(before, steps, strict=True))
        )
        assert all(study.replay(steps, 5, 3, policy)[0] <= hits for policy in POLICIES)


def test_the_study_replays_what_an_offloaded_model_does(study, make):
    ids = [(11 * n) % 160 for n in range(20)]
    found, chosen, _ = study.study(load_model(make("fp32"), "cpu"), ids)
    for policy in POLICIES:
        model = load_model(make("fp32"), "cpu", experts=Offload(3, policy=policy))
        model.setup_cache(1, 64)
        for n, token in enumerate(ids):
            model(torch.tensor([[token]]), torch.tensor([[n]]))
        hits = sum(counts["hits"] for counts in counters(model))
        assert found["hit_ratio"][policy][3] == hits / chosen.numel()
        assert found["hit_ratio"][policy][E] == 1


def test_recall_is_that_of_the_next_router(study, make):
    resident = load_model(make("fp32"), "cpu")
    _, chosen, seen = watched(resident)
    ids = torch.tensor(PROMPT).tolist()
    found, _, _ = study.study(load_model(make("fp32"), "cpu"), ids)
    assert list(found["recall"]) == [1, 2]  # of three layers with experts
    for ahead, row in found["recall"].items():
        for guesses in range(1, E + 1):
            right = []
            for layer in range(len(LAYERS) - ahead):
                scores = resident.layers[LAYERS[layer + ahead]].ffn.router(seen[0][layer])
                likeliest = scores.topk(guesses).indices.tolist()
                wanted = chosen[0][layer + ahead].tolist()
                right += [e in guess for guess, experts in zip(likeliest, wanted, strict=True) for e in experts]
            assert row[guesses - 1] == pytest.approx(sum(right) / len(right))
        assert row[-1] == 1


def test_the_study_s_command(study, monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="draws")

    def run_it(*options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["study_offload.py", "--device", "cpu", *options])
        code = study.main()
        return code, *capsys.readouterr()

    code, out, _ = run_it("--tokens", "100", "--output_dir", str(tmp_path), "--json")
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and found["tokens"] == 100 and f"{found['hit_ratio']['lru']['4']:.3f}" in out
    assert (tmp_path / "offload_experts.png").read_bytes()[1:4] == b"PNG"
    assert "<svg" in (tmp_path / "offload_curves.svg").read_text()
    code, out, err = run_it("--tokens", "1")
    assert (code, out) == (2, "") and err == "error: --tokens 1: it must be at least 2\n"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ("tensor", "expert"))
def test_two_ranks(parallel):
    """Each keeps its own part of the experts in host memory: the same text, and all parts counted."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    options = ["--device", "cpu", "--dtype", "fp32", "--temperature", "0", "--max_new_tokens", "24", "--json"]
    launch += [ROOT / "generate.py", *options]
    results = []
    for more in ([], ["--offload", "--gpu_experts", "2", "--prefetch", "1"],
                 ["--offload", "--gpu_experts", "3", "--offload_tier", "disk"]):  # fmt: skip
        done = subprocess.run(
            [*launch, "--parallel", parallel, *more], capture_output=True, text=True, env=environment()
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    assert len({result["text"] for result in results}) == 1
    for result in results[1:]:
        assert result["offload"]["misses"] > 0 and result["offload"]["bytes"] > 0
        assert result["bytes_per_token"] == results[0]["bytes_per_token"]
