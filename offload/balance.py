"""How misses are divided between CPU and link, and how fast a model then decodes.

Both follow from what link and CPU do at the same time, which is measured when a model is loaded:
copies and products read the same host memory, so that each is slower beside the other.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb, inf
from statistics import fmean

import torch
from torch import Tensor

from offload.cpu_experts import CPUExperts
from offload.cpu_share import CPUProducts
from offload.experts import OffloadedExperts

LAYER_SECONDS = 25e-6  # kernels of a layer, beside their bytes; paging is included
ROUND_TRIP = 10e-6  # seconds from a request to its answer, beside the products
MEASURED_SECONDS = 0.02  # of copies, for each number of experts
MEASURED_CALLS = 256  # different ones, so that caches do not have their experts


@dataclass(frozen=True)
class Cost:
    """Seconds of a share: beside its experts, and of each expert."""

    fixed: float
    each: float

    def of(self, experts: float) -> float:
        return self.fixed + self.each * experts if experts > 0 else 0.0


@dataclass(frozen=True)
class Balance:
    """What copies and the CPU's products cost while both run."""

    link: Cost
    cpu: Cost
    nbytes: int  # size of an expert

    def seconds(self, misses: int, copied: int) -> float:
        """Return the seconds until both shares of a layer's misses have ended."""
        return max(self.link.of(copied), self.cpu.of(misses - copied))

    def split(self, compute: str, most: int) -> list[int]:
        """Return how many of 0 .. `most` misses to copy; auto: so that both end together.

        compute: "gpu" copies all, "cpu" none. Of equals, the one that leaves less to the CPU.
        """
        if compute != "auto":
            return [n if compute == "gpu" else 0 for n in range(most + 1)]
        return [
            min(range(n, -1, -1), key=lambda copied, n=n: self.seconds(n, copied))
            for n in range(most + 1)
        ]

    def describe(self) -> str:
        link, cpu = (self.nbytes / cost.each / 1e9 for cost in (self.link, self.cpu))
        beside = f" beside CPU products at {cpu:.3g} GB/s" if cpu else ""
        return f"copies at {link:.3g} GB/s{beside}"


@dataclass(frozen=True)
class Prediction:
    """What is known of a decode step before it runs."""

    balance: Balance
    copies: list[int]  # how many of n misses are copied
    layers: int  # those with experts
    active: int
    resident: float  # seconds of a step whose experts are all in slots

    def tokens_per_second(self, hit_ratio: float) -> float:
        """Return the expected speed, if each chosen expert is cached with this probability."""
        misses = 0.0
        for n in range(self.active + 1):
            ways = comb(self.active, n) * (1 - hit_ratio) ** n * hit_ratio ** (self.active - n)
            misses += ways * self.balance.seconds(n, self.copies[n])
        return 1 / (self.resident + self.layers * misses)


def resident_seconds(nbytes: int, layers: int, like: Tensor) -> float:
    """Return the expected seconds of a step without misses. nbytes: of weights that it reads."""
    size = 1 << 26  # more than the L2 cache, and little beside a small card
    source = torch.empty(size, dtype=torch.uint8, device=like.device)
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    begin.record()
    for _ in range(4):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    bandwidth = 4 * 2 * size / (begin.elapsed_time(end) * 1e-3)  # read and written
    return nbytes / bandwidth + layers * LAYER_SECONDS


def measure_balance(
    layers: Sequence[OffloadedExperts], products: Sequence[CPUProducts], like: Tensor, most: int
) -> Balance:
    """Measure a GPU's copies and the CPU's products, of up to `most` experts a layer.

    like: x [..., D] on the GPU. products: of each layer; none: the CPU has no share.
    """
    most = max(2, min(most, layers[0].storage.slots))
    counts = max(1, most // 4), most  # a launch takes about as long as copying one small expert
    both = [measure_both(layers, products, like, count) for count in counts]
    link, cpu = (line_through(times, counts) for times in zip(*both, strict=True))
    nbytes = layers[0].storage.blobs.shape[1]
    return Balance(link, Cost(cpu.fixed + ROUND_TRIP, cpu.each), nbytes)


@torch.inference_mode()
def measure_both(
    layers: Sequence[OffloadedExperts], products: Sequence[CPUProducts], like: Tensor, count: int
) -> tuple[float, float]:
    """Return the seconds of copying `count` experts and of multiplying as many, side by side."""
    calls = multiplications(layers, products, like, count)
    for call in calls[:2]:
        call()  # wakes the threads
    nbytes = count * layers[0].storage.blobs.shape[1]
    copies = max(4, int(MEASURED_SECONDS * 50e9 / nbytes))
    ids = [list(layer.cache.cached().items())[:count] for layer in layers]
    pairs = [torch.tensor(some, device=like.device).t().contiguous() for some in ids]
    layers[0].fill_slots(*pairs[0])  # compiles
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for n in range(copies):
        # Into the slots that have these experts already.
        layers[n % len(layers)].fill_slots(*pairs[n % len(layers)])
    end.record()
    times: list[float] = []
    while calls and (len(times) < 3 or not end.query()):
        started = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    usual = sorted(times)[: max(1, len(times) * 9 // 10)]  # other processes delay some
    return begin.elapsed_time(end) * 1e-3 / copies, fmean(usual) if usual else inf


def multiplications(
    layers: Sequence[OffloadedExperts], products: Sequence[CPUProducts], like: Tensor, count: int
) -> list[Callable[[], object]]:
    """Return calls that multiply `count` experts by one token, others each: MEASURED_CALLS."""
    x = torch.ones(1, like.shape[-1], dtype=like.dtype)
    y = torch.zeros(1, like.shape[-1])
    tokens, weights = torch.zeros(count, dtype=torch.int32), torch.ones(count)
    calls = []
    for n in range(MEASURED_CALLS if products else 0):
        layer, first = n % len(layers), n * count
        ids = [(first + n) % layers[layer].n_local for n in range(count)]
        given = x, torch.tensor(ids, dtype=torch.int32), tokens, weights, y
        product = products[layer]
        compiled = isinstance(product, CPUExperts)
        calls.append(product.prepare(*given) if compiled else partial(product, *given))
    return calls


def line_through(times: Sequence[float], counts: Sequence[int]) -> Cost:
    """Return the cost that explains the seconds of two numbers of experts."""
    if times[0] == inf:
        return Cost(0.0, inf)
    each = max((times[1] - times[0]) / (counts[1] - counts[0]), 1e-9)
    return Cost(max(times[0] - each * counts[0], 0.0), each)
