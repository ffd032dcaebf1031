"""How misses are divided between CPU and link: by what both do at the same time, measured at start.

Copies and products read the same host memory, so that each is slower beside the other.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.cpu_share import CPUProducts
from offload.experts import OffloadedExperts

ROUND_TRIP = 10e-6  # seconds from a request to its answer, beside the products
MEASURED_SECONDS = 0.02  # of copies, for each number of experts


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
    nbytes: int  # of an expert

    def seconds(self, misses: int, copied: int) -> float:
        """Return the seconds until both shares of a layer's misses have ended."""
        return max(self.link.of(copied), self.cpu.of(misses - copied))

    def split(self, most: int) -> list[int]:
        """Return how many of 0 .. `most` misses to copy, so that both end together.

        Of equals, the one that leaves less to the CPU.
        """
        return [
            min(range(n, -1, -1), key=lambda copied, n=n: self.seconds(n, copied))
            for n in range(most + 1)
        ]

    def describe(self) -> str:
        link, cpu = (self.nbytes / cost.each / 1e9 for cost in (self.link, self.cpu))
        return f"copies at {link:.3g} GB/s beside CPU products at {cpu:.3g} GB/s"


def measure_balance(
    layers: Sequence[OffloadedExperts], products: Sequence[CPUProducts], like: Tensor, most: int
) -> Balance:
    """Measure a GPU's copies and the CPU's products, of up to `most` experts a layer.

    like: x [..., D] on the GPU.
    """
    counts = 1, max(2, min(most, layers[0].storage.slots))
    both = [measure_both(layers, products, like, count) for count in counts]
    link, cpu = (line_through(times, counts) for times in zip(*both, strict=True))
    nbytes = layers[0].storage.blobs.shape[1]
    return Balance(link, Cost(cpu.fixed + ROUND_TRIP, cpu.each), nbytes)


def measure_both(
    layers: Sequence[OffloadedExperts], products: Sequence[CPUProducts], like: Tensor, count: int
) -> tuple[float, float]:
    """Return the seconds of copying `count` experts and of multiplying as many, side by side."""
    multiply = multiplications(layers, products, like, count)
    multiply(0)  # wakes the threads
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
    calls, started = 0, time.perf_counter()
    while not end.query() or calls < 2:
        multiply(calls + 1)
        calls += 1
    seconds = (time.perf_counter() - started) / calls
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3 / copies, seconds


def multiplications(
    layers: Sequence[OffloadedExperts], products: Sequence[CPUProducts], like: Tensor, count: int
) -> Callable[[int], None]:
    """Return what multiplies `count` experts by one token: others at each call."""
    x = torch.ones(1, like.shape[-1], dtype=like.dtype)
    y = torch.zeros(1, like.shape[-1])
    tokens, weights = torch.zeros(count, dtype=torch.int32), torch.ones(count)

    def multiply(call: int) -> None:
        layer, first = call % len(layers), call * count
        ids = [(first + n) % layers[layer].n_local for n in range(count)]
        with torch.inference_mode():
            products[layer](x, torch.tensor(ids, dtype=torch.int32), tokens, weights, y)

    return multiply


def line_through(times: Sequence[float], counts: Sequence[int]) -> Cost:
    """Return the cost that explains the seconds of two numbers of experts."""
    each = max((times[1] - times[0]) / (counts[1] - counts[0]), 1e-9)
    return Cost(max(times[0] - each * counts[0], 0.0), each)
