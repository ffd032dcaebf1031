"""How the compiler's tile shapes are timed, on a GPU that is acted, and how they are searched."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch._inductor.config as inductor
from torch._inductor.runtime import benchmarking, triton_heuristics
from torch._inductor.runtime.benchmarking import InductorBenchmarker, TritonBenchmarker
from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
from triton import Config

from ops import inductor_tuning as tuning
from ops.inductor import configure_inductor

FLUSH, KERNEL = 60e-6, 5e-6  # seconds on the GPU


class ActedGPU:
    """A GPU that takes a time for each thing in turn, and a host that takes one to launch it; in
    seconds.
    """

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


@pytest.fixture(
    params=([1e-6], [25e-6], [25e-6] * 40 + [400e-6]),
    ids=("quick host", "slow host", "host that stalls"),
)
def acted(request, monkeypatch) -> ActedGPU:
    gpu = ActedGPU(request.param)
    monkeypatch.setattr(tuning, "torch", gpu)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: gpu.now))
    return gpu


def test_what_is_timed_is_the_gpu_and_not_the_host(acted):
    assert tuning.gpu_ms(lambda: acted.do(KERNEL)) == pytest.approx(KERNEL * 1e3)
    assert acted.now < 0.05


def test_a_long_kernel_is_timed_a_few_times(acted):
    calls = []
    ms = tuning.gpu_ms(lambda: calls.append(acted.do(20e-3)))
    assert ms == pytest.approx(20) and len(calls) == 3 + 3 + 5


@pytest.mark.parametrize("kind", (TritonBenchmarker, InductorBenchmarker))
def test_the_compiler_asks_it(kind, acted, monkeypatch):
    """Whichever benchmarker it has: which one depends on what was imported first."""
    monkeypatch.setattr(benchmarking, "benchmarker", kind())
    monkeypatch.setattr("ops.inductor.register_dot_bytes", lambda: None)
    configure_inductor.__wrapped__()  # again, with this benchmarker
    options = {"device": "cuda", "rep": 40, "is_vetted_benchmarking": True}  # as an autotuner gives
    ms = benchmarking.benchmarker.benchmark(fn=lambda: acted.do(KERNEL), **options)
    assert ms == pytest.approx(KERNEL * 1e3)


# The search
# ------------------------------------------------------------------------------------------------


def tuner() -> CoordescTuner:
    limits = {"warp_size": 32, "max_threads_per_block": 1024}
    return CoordescTuner(name="acted", size_hints={"x": 4096, "r0_": 4096}, inductor_meta=limits)


def shape(x: int, r: int, warps: int) -> Config:
    return Config({"XBLOCK": x, "R0_BLOCK": r}, num_warps=warps)


def numbers(config: Config) -> tuple[int, int, int]:
    return config.kwargs["XBLOCK"], config.kwargs["R0_BLOCK"], config.num_warps


def valley(config: Config) -> float:
    """Milliseconds of a shape, least at (16, 256, 4): a step in one number from (64, 64, 4)
    costs, one in two gains.
    """
    x, r, warps = (math.log2(number) for number in numbers(config))
    return 0.05 * (1 + 0.1 * abs(x - 4) + 0.1 * abs(x + r - 12) * 3 + 0.2 * abs(warps - 2))


def search(
    measure, begin: Config, compile=lambda config: None, long: float = tuning.LONG_KERNEL_MS
) -> tuple[int, int, int]:
    return numbers(tuning.best_tiling(tuner(), compile, measure, begin, long))


@pytest.mark.parametrize(("long", "found"), ((0.02, (16, 256, 4)), (0.08, (64, 64, 4))))
def test_several_numbers_are_changed_at_once_where_a_kernel_takes_long(long, found):
    begin = shape(64, 64, 16)
    assert search(valley, begin, long=long) == found
    assert numbers(begin) == (64, 64, 16)


def test_neighbours_are_compiled_side_by_side_and_timed_one_by_one():
    """All six, and each shape once: those that compile wait for one another here."""
    together, compiled, timed = threading.Barrier(6, timeout=20), [], []

    def compile(config: Config) -> None:
        compiled.append(numbers(config))
        together.wait()

    def measure(config: Config) -> float:
        assert threading.current_thread() is threading.main_thread() and len(compiled) % 6 == 0
        timed.append(numbers(config))
        return 0.006 if numbers(config) == (16, 256, 4) else 0.007

    with inductor.patch(compile_threads=6):
        assert search(measure, shape(16, 256, 4), compile) == (16, 256, 4)
    assert sorted([*compiled, (16, 256, 4)]) == sorted(timed) and len(timed) == 7


def test_shapes_that_need_more_than_there_is_are_passed_by():
    def fits(config: Config) -> None:
        if math.prod(numbers(config)) > 16 * 256 * 4:
            raise RuntimeError("out of resources")

    def measure(config: Config) -> float:
        fits(config)
        return 1e3 / math.prod(numbers(config))

    assert math.prod(search(measure, shape(4, 64, 1), fits)) == 16 * 256 * 4


def test_a_kernel_as_short_as_an_empty_one_is_not_searched():
    compiled = []
    assert search(lambda _: 0.005, shape(64, 64, 4), compiled.append) == (64, 64, 4)
    assert not compiled


def test_no_lane_holds_so_much_that_it_spills():
    def measure(config: Config) -> float:
        x, r, warps = numbers(config)
        return warps / (x * r)  # the more the better

    x, r, warps = search(measure, shape(4, 64, 4))
    assert x * r == tuning.MAX_VALUES_PER_LANE * 32 * warps


@pytest.mark.parametrize(
    ("signature", "found"), (({"xnumel": "i32"}, (16, 256, 4)), ({"ks0": "i64"}, (64, 64, 4)))
)
def test_the_compiler_searches_by_it(signature, found, monkeypatch):
    """Less where sizes are arguments: those are a prompt's. Settings made twice wrap its method
    once.
    """
    autotuner = SimpleNamespace(
        coordesc_tuner=tuner(),
        triton_meta={"signature": signature},
        _precompile_config=lambda config: None,
    )

    def inductors(self, launcher, *args):
        return self.coordesc_tuner.autotune(valley, launcher, None)

    monkeypatch.setattr(triton_heuristics.CachingAutotuner, "_coordinate_descent_tuning", inductors)
    for _ in range(2):
        tuning.replace_coordinate_descent()
    by_it = triton_heuristics.CachingAutotuner._coordinate_descent_tuning
    assert by_it is not inductors and numbers(by_it(autotuner, shape(64, 64, 16))) == found
    assert (
        autotuner.coordesc_tuner.autotune.__func__ is CoordescTuner.autotune
    )  # its own is there again
