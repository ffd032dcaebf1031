"""Experts multiplied by the CPU (offload/cpu_experts.py), compared with plain PyTorch."""

import ctypes
import logging
import os
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from formats import FORMATS, PLAIN
from model import swiglu
from models.gpt_oss import clamped_swiglu
from models.layers.geglu import geglu
from offload import cpu_experts
from offload.cpu_experts import CPUExperts, CPUThreads, HostWeight, load_library
from ops.cpu import usable_cores

# x becomes integers of 16 bits, which is finer than any format, and than bf16.
BOUND = 3e-4  # a fraction of the largest output
COMPILED = (
    *("int4", "mxfp4", "q4_k", "hqq2", "int8", "nvfp4", "hqq4", PLAIN),
    *("uint4", "q8_0", "q4_0", "q5_k", "q6_k", "q4_1", "q5_1", "iq4_nl", "iq4_xs", "hqq3"),
)
ACTIVATIONS = (swiglu, geglu, partial(clamped_swiglu, limit=2.0, alpha=1.702))
LEVELS = "native", "x86-64-v3"  # the second: AVX2


def has_compiler() -> bool:
    try:
        return subprocess.run(("g++", "--version"), capture_output=True).returncode == 0
    except OSError:
        return False


def has_avx2() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and " avx2 " in info.read_text()


needs_compiler = pytest.mark.skipif(not (has_compiler() and has_avx2()), reason="needs g++, AVX2")


@pytest.fixture(scope="module", autouse=True)
def cache():
    """Keep libraries where commands do, whose names have a hash of source, flags and CPU: 9 s."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = before or default_cache_dir()
    load_library.cache_clear()
    yield
    load_library.cache_clear()
    if before is None:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]


class Pools(dict):
    """Threads by instruction set. The library of each takes a compiler seconds: made when asked."""

    def __missing__(self, march: str) -> CPUThreads:
        self[march] = CPUThreads(2, march)
        return self[march]


@pytest.fixture(scope="module")
def pools(cache):
    pools = Pools()
    yield pools
    for threads in pools.values():
        threads.close()


def random_weight(name, experts, rows, width, group=None, bias=False) -> HostWeight:
    weight = torch.randn(experts, rows, width) * width**-0.5
    offsets = torch.randn(experts, rows).bfloat16() if bias else None
    if name == PLAIN:
        return HostWeight({"weight": weight.bfloat16()}, name, 1, offsets)
    format = FORMATS[name]
    group = format.choose_group(width, group)
    parts = format.pack(weight, group, *((0,) if format.has_solver else ()))
    return HostWeight(parts, name, group, offsets)


def random_layer(threads, name, dim, width, activation=swiglu, experts=3, **given) -> CPUExperts:
    w13 = random_weight(name, experts, 2 * width, dim, **given)
    w2 = random_weight(name, experts, dim, width, **given)
    return CPUExperts(w13, w2, activation, threads)


def random_call(layer, tokens, pairs, dtype=torch.float32):
    experts = layer.w13.codes.shape[0]
    dim = layer.w13.width
    return (
        torch.randn(tokens, dim).to(dtype),
        torch.randint(experts, (pairs,), dtype=torch.int32),
        torch.randint(tokens, (pairs,), dtype=torch.int32),
        torch.rand(pairs),
        torch.full((tokens, dim), torch.nan),
    )


def assert_as_plain(layer, call):
    found, wanted = layer(*call).clone(), layer.multiply_plain(*call)
    assert (found - wanted).abs().max() <= BOUND * wanted.abs().max().clamp(min=1e-6)


@needs_compiler
@pytest.mark.parametrize("march", LEVELS)
@pytest.mark.parametrize("name", COMPILED)
def test_every_format_as_in_plain_pytorch(pools, name, march):
    torch.manual_seed(0)
    threads = pools[march]
    assert threads.compiled
    # 512 and 768: of whole blocks of GGUF's; the codes of others end within a vector
    sizes = [(512, 256), (256, 768)]
    if name == PLAIN or FORMATS[name].group < 256:
        sizes += [(96, 64), (32, 160), (1440, 32)]
    for n, (dim, width) in enumerate(sizes):
        for bias in (False, True):
            activation = ACTIVATIONS[(n + bias) % len(ACTIVATIONS)]
            layer = random_layer(threads, name, dim, width, activation, bias=bias)
            assert layer.layer is not None
            assert_as_plain(layer, random_call(layer, 1, 3))
            assert_as_plain(layer, random_call(layer, 3, 9))


@needs_compiler
@pytest.mark.parametrize("name,group", [("int4", g) for g in (8, 16, 32, 64, 128)] + [("hqq2", 64)])
def test_every_group(pools, name, group):
    layer = random_layer(pools["native"], name, 384, 128, group=group)
    assert layer.layer is not None
    assert_as_plain(layer, random_call(layer, 2, 6))


@needs_compiler
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", range(1, 9))
def test_one_to_eight_tokens_and_every_activation(pools, tokens, activation):
    """Up to 8 tokens choose the same expert, and one of them twice."""
    layer = random_layer(pools["native"], "int4", 128, 64, activation)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, _, _, weights, y = random_call(layer, tokens, tokens + 4, dtype)
        index = torch.tensor([*range(tokens), 0, 0, 0, 0], dtype=torch.int32)
        experts = torch.tensor([2] * tokens + [2, 1, 0, 1], dtype=torch.int32)
        assert_as_plain(layer, (x, experts, index, weights, y))


@needs_compiler
def test_two_formats_and_experts_in_blobs(pools):
    """w2 of GGUF's Q4_K_M has 6 bits; experts of a layer lie apart."""
    w13, w2 = random_weight("q4_k", 4, 512, 512), random_weight("q6_k", 4, 512, 256)

    def apart(weight: HostWeight) -> HostWeight:
        parts = {}
        for name, part in weight.parts.items():
            blobs = torch.empty(4, part[0].nbytes + 128, dtype=torch.uint8)
            blobs[:, 64:-64] = part.flatten(1).view(torch.uint8)
            parts[name] = blobs[:, 64:-64].view(part.dtype).view(part.shape)
        return HostWeight(parts, weight.format, weight.group)

    together = CPUExperts(w13, w2, swiglu, pools["native"])
    lying_apart = CPUExperts(apart(w13), apart(w2), swiglu, pools["native"])
    assert lying_apart.layer is not None and together.nbytes == lying_apart.nbytes
    call = random_call(together, 2, 7)
    assert_as_plain(together, call)
    assert torch.equal(together(*call).clone(), lying_apart(*call))


@needs_compiler
def test_experts_of_other_ranks_count_nothing(pools):
    layer = random_layer(pools["native"], "int4", 128, 64)
    x, _, tokens, weights, y = random_call(layer, 2, 4)
    experts = torch.tensor([1, 3, -1, 2], dtype=torch.int32)
    assert_as_plain(layer, (x, experts, tokens, weights, y))
    assert not layer(x, experts[1:3], tokens[1:3], weights[1:3], y).any()


@needs_compiler
def test_extreme_numbers(pools):
    """Zeros, one large number among small ones, and NaN, which must reach the output."""
    layer = random_layer(pools["native"], "int4", 256, 128)
    call = random_call(layer, 3, 6)
    call[0][0] = 0
    call[0][1, 7] = 1e4
    assert_as_plain(layer, call)
    call[0][2, 9] = torch.nan
    call[2][0] = 2
    assert layer(*call)[2].isnan().all()


@needs_compiler
def test_any_number_of_threads_gives_the_same_bits(pools):
    calls, found = None, []
    for count in (1, 2, 3, 7):
        torch.manual_seed(0)
        threads = CPUThreads(count)
        layer = random_layer(threads, "mxfp4", 160, 96)
        calls = calls or [random_call(layer, 4, n) for n in (1, 5, 8)]
        found.append([layer(*call).clone() for call in calls])
        threads.close()
        with pytest.raises(RuntimeError, match="closed"):
            layer(*calls[0])
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


@needs_compiler
def test_several_python_threads_take_turns(pools):
    layers = [random_layer(pools["native"], name, 256, 256) for name in ("int4", "q4_k", PLAIN)]
    calls = [random_call(layer, 2, 5) for layer in layers]
    wanted = [layer(*call).clone() for layer, call in zip(layers, calls, strict=True)]
    wrong = []

    def repeat(layer, call, y):
        own = (*call[:4], torch.empty_like(y))
        wrong.extend(n for n in range(20) if not torch.equal(layer(*own), y))

    started = [
        threading.Thread(target=repeat, args=given)
        for given in zip(layers, calls, wanted, strict=True)
    ]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert not wrong


@needs_compiler
def test_the_host_function_computes_the_first_pairs(pools):
    layer = random_layer(pools["native"], "int4", 128, 64)
    call, count = random_call(layer, 2, 6), torch.zeros(1, dtype=torch.int32)
    *inputs, y = call
    address, argument = layer.host_function(*inputs, count, y)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    for pairs in (6, 0, 4):
        count[0] = pairs
        function(argument)
        first = (inputs[0], *(t[:pairs] for t in inputs[1:]), torch.empty_like(y))
        assert torch.equal(y, layer(*first))
    function = layer.multiply_plain(*call).abs().max()
    assert function > 0  # the comparison was not of zeros


def test_wrong_tensors_are_refused(pools):
    layer = random_layer(pools["native"], "int4", 128, 64)
    x, experts, tokens, weights, y = random_call(layer, 2, 4)
    for wrong in (
        (x[:, :64], experts, tokens, weights, y),
        (x, experts.long(), tokens, weights, y),
        (x, experts[:3], tokens, weights, y),
        (x, experts, tokens, weights.double(), y),
        (x, experts, tokens, weights, y[:1]),
        (x.double(), experts, tokens, weights, y),
        (x.t().contiguous().t(), experts, tokens, weights, y),
    ):
        with pytest.raises(ValueError, match="CPU experts take"):
            layer(*wrong)
    with pytest.raises(ValueError, match="at least one"):
        CPUThreads(0)


@pytest.mark.parametrize("name", ("fp8", "fp8b"))
def test_other_formats_run_in_plain_pytorch(pools, name):
    layer = random_layer(pools["native"], name, 64, 64)
    assert layer.layer is None
    x, experts, tokens, weights, y = random_call(layer, 2, 3)
    wanted = torch.zeros_like(y)
    for expert, token, weight in zip(experts.tolist(), tokens.tolist(), weights, strict=True):
        gate, up = (layer.w13.unpack(expert) @ x[token]).chunk(2)
        wanted[token] += weight * (layer.w2.unpack(expert) @ swiglu(gate, up))
    torch.testing.assert_close(layer(x, experts, tokens, weights, y), wanted)
    with pytest.raises(RuntimeError, match="no compiled products"):
        layer.host_function(x, experts, tokens, weights, torch.zeros(1, dtype=torch.int32), y)


def test_an_unknown_activation_runs_in_plain_pytorch(pools):
    layer = random_layer(pools["native"], "int4", 64, 64, lambda gate, up: gate.relu() * up)
    assert layer.layer is None
    assert layer(*random_call(layer, 1, 2)).isfinite().all()


@pytest.mark.parametrize(
    "problem,line",
    (
        ("no compiler", "no C++ compiler 'no-such-compiler': install it"),
        ("another architecture", "no products for riscv64 CPUs"),
        pytest.param("an old CPU", "the CPU has no AVX2", marks=[needs_compiler, pytest.mark.slow]),
        pytest.param("an error", "no-such-cpu", marks=needs_compiler),
    ),
)
def test_without_the_library_one_line_says_so(problem, line, monkeypatch, caplog):
    if problem == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    elif problem == "another architecture":
        monkeypatch.setattr(cpu_experts.platform, "machine", lambda: "riscv64")
    march = {"an error": "no-such-cpu", "an old CPU": "x86-64"}.get(problem, "native")
    load_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "moe_fast"):
            threads, again = CPUThreads(2, march), CPUThreads(1, march)
    finally:
        load_library.cache_clear()
    (record,) = caplog.records
    assert "plain PyTorch" in record.message and "\n" not in record.message
    assert line in record.message
    assert not threads.compiled and not again.compiled
    assert threads.instructions == "plain PyTorch"
    layer = random_layer(threads, "int4", 64, 64)
    assert layer(*random_call(layer, 2, 3)).isfinite().all()
    threads.close()


@needs_compiler
def test_the_bandwidth_is_a_rate(pools):
    assert 0.01 < pools["native"].read_bandwidth(torch.ones(1 << 24, dtype=torch.uint8)) < 1e5


def test_usable_cores_respect_a_quota(monkeypatch):
    text = {"value": "max 100000\n"}
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(Path, "read_text", lambda self: text["value"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert usable_cores() == 64
    text["value"] = "1600000 100000\n"
    assert usable_cores() == 16
    text["value"] = "50000 100000\n"
    assert usable_cores() == 1
