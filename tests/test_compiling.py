"""How the compiler's tile shapes are timed, on a GPU that is acted."""

from types import SimpleNamespace

import pytest
from torch._inductor.runtime import benchmarking
from torch._inductor.runtime.benchmarking import InductorBenchmarker, TritonBenchmarker

import compiling

FLUSH, KERNEL = 60e-6, 5e-6  # seconds on the GPU


class ActedGPU:
    """A GPU that takes a time for each thing in turn, and a host that takes one to launch it; in seconds."""

    def __init__(self, launching: list[float]):
        self.launching, self.now, self.free = launching, 0.0, 0.0
        self.int32, self.cuda = None, self
        self.launched = 0

    def do(self, seconds: float) -> float:
        self.now += self.launching[self.launched % len(self.launching)]
        self.launched += 1
        self.free = max(self.now, self.free) + seconds
        return self.free

    def empty(self, *_, **__):
        return SimpleNamespace(zero_=lambda: self.do(FLUSH))

    def Event(self, **_):
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.do(0.0))
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3
        return event

    def _sleep(self, clocks: int):
        self.do(clocks / 2e9)

    def synchronize(self):
        self.now = max(self.now, self.free)


@pytest.fixture(params=([1e-6], [25e-6], [25e-6] * 40 + [400e-6]), ids=("quick host", "slow host", "host that stalls"))
def acted(request, monkeypatch) -> ActedGPU:
    gpu = ActedGPU(request.param)
    monkeypatch.setattr(compiling, "torch", gpu)
    monkeypatch.setattr(compiling, "time", SimpleNamespace(perf_counter=lambda: gpu.now))
    return gpu


def test_what_is_timed_is_the_gpu_and_not_the_host(acted):
    assert compiling.gpu_ms(lambda: acted.do(KERNEL)) == pytest.approx(KERNEL * 1e3)
    assert acted.now < 0.05


def test_a_long_kernel_is_timed_a_few_times(acted):
    calls = []
    ms = compiling.gpu_ms(lambda: calls.append(acted.do(20e-3)))
    assert ms == pytest.approx(20) and len(calls) == 3 + 3 + 5


@pytest.mark.parametrize("kind", (TritonBenchmarker, InductorBenchmarker))
def test_the_compiler_asks_it(kind, acted, monkeypatch):
    """Whichever benchmarker it has: which one depends on what was imported first."""
    monkeypatch.setattr(benchmarking, "benchmarker", kind())
    monkeypatch.setattr(compiling, "teach_compiler", lambda: None)
    compiling.compile_settings()
    options = {"device": "cuda", "rep": 40, "is_vetted_benchmarking": True}  # as an autotuner gives
    ms = benchmarking.benchmarker.benchmark(fn=lambda: acted.do(KERNEL), **options)
    assert ms == pytest.approx(KERNEL * 1e3)
