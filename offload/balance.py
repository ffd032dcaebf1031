"""How misses are divided between CPU and link, and how fast a model then decodes.

Both follow from what a layer's paging takes, which is measured when a model is loaded, for each
number of misses and of copies: copies and products read the same host memory, requests and kernels
have fixed costs, and other processes delay threads. Nothing of that is known in advance.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb
from statistics import median

import torch
from torch import Tensor

from offload.cpu_share import CPUProducts, is_compiled
from offload.experts import OffloadedExperts
from ops.step.cpu_share import answer, ask
from runtime.graphs import CapturedStep

log = logging.getLogger("moe_fast")
LAYER_SECONDS = 25e-6  # kernels of a layer, beside their bytes; paging is included
MEASURED_LAYERS = 16  # at most, in one graph
MEASURED_SECONDS = 1.0  # of all numbers of misses and of copies together, about
MEASURED_STEPS = 2, 20  # least and most of a turn; the first step wakes threads
MEASURED_TURNS = 2  # the faster one counts: other work may disturb one for some 10 ms
# A share of the CPU must save more: a copied expert may be a hit later.
LEAST_GAIN = 0.03


@dataclass(frozen=True)
class Balance:
    """Seconds of a layer's paging, by its misses."""

    alone: Sequence[float]  # [n]: all n are copied, in a layer that asks the CPU for nothing
    # [n][c]: c of n are copied, and the CPU multiplies the others; empty: the CPU has no share
    shared: Sequence[Sequence[float]]
    nbytes: int  # size of an expert
    threads: int = 0  # they multiply on the CPU; 0: not known

    @property
    def most(self) -> int:
        """The largest number of misses that was measured."""
        return len(self.alone) - 1

    def split(self, compute: str, most: int) -> list[int]:
        """Return how many of 0 .. `most` misses to copy; auto: the fastest of those measured.

        compute: "gpu" copies all, "cpu" none. Copies win unless the CPU saves LEAST_GAIN. More
        misses than were measured are divided in the same proportion as the largest number.
        """
        if compute == "gpu" or not self.shared:
            return list(range(most + 1))
        if compute == "cpu":
            return [0] * (most + 1)
        copies = [
            max(c for c, time in enumerate(times) if time <= (1 + LEAST_GAIN) * min(times))
            for times in self.shared
        ]
        last = self.most
        more = [-(-copies[last] * n // last) for n in range(last + 1, most + 1)]
        return [*copies, *more][: most + 1]

    def costs(self, copies: Sequence[int] | None) -> list[float]:
        """Return the seconds that 0 .. most misses add to a layer without paging's waits.

        copies: of `split`; None: of layers whose misses are all copied.
        """
        times = self.alone
        if copies is not None:
            times = [row[c] for row, c in zip(self.shared, copies, strict=False)]
        return [max(time - self.alone[0], 0.0) for time in times]

    def describe(self) -> str:
        """Return the rates of the largest number of misses."""
        nbytes, n = self.most * self.nbytes / 1e9, self.most
        line = f"copies at {nbytes / self.alone[n]:.3g} GB/s"
        if not self.shared:
            return line
        fastest = min(self.shared[n])
        with_threads = f" with {self.threads} threads" if self.threads else ""
        return (
            f"{line}, CPU products at {nbytes / self.shared[n][0]:.3g} GB/s{with_threads}, "
            f"both at {nbytes / fastest:.3g} GB/s"
        )


def without_disturbances(shared: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return `Balance.shared` with times that are at most those of a layer with one more miss."""
    rows = [list(row) for row in shared]
    for n in reversed(range(len(rows) - 1)):
        more = rows[n + 1]
        rows[n] = [min(time, more[c], more[c + 1]) for c, time in enumerate(rows[n])]
    return rows


def mean_cost(costs: Sequence[float], hit_ratio: float) -> float:
    """Return the mean of costs by misses, if each chosen expert is cached with this probability."""
    active = len(costs) - 1
    ways = (
        comb(active, n) * (1 - hit_ratio) ** n * hit_ratio ** (active - n)
        for n in range(active + 1)
    )
    return sum(way * cost for way, cost in zip(ways, costs, strict=True))


@dataclass(frozen=True)
class Prediction:
    """What is known of a decode step before it runs."""

    balance: Balance
    copies: list[int] | None  # how many of n misses are copied; None: all, without the CPU
    layers: int  # those with experts
    resident: float  # seconds of a step whose experts are all in slots

    def tokens_per_second(self, hit_ratio: float) -> float:
        """Return the expected speed, if each chosen expert is cached with this probability."""
        cost = mean_cost(self.balance.costs(self.copies), hit_ratio)
        return 1 / (self.resident + self.layers * cost)


def choose_copies(balance: Balance, compute: str, most: int, hit_ratio: float) -> list[int] | None:
    """Return how many of 0 .. `most` misses to copy; None: copy all, without a share of the CPU.

    Its share may not pay with the expected hits: the kernels of a request and of its answer run
    in layers without misses too.
    """
    if compute == "gpu" or not balance.shared:
        return None
    copies = balance.split(compute, most)
    if compute == "auto":
        alone, shared = (mean_cost(balance.costs(some), hit_ratio) for some in (None, copies))
        if alone <= (1 + LEAST_GAIN) * shared:
            return None
    return copies


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


# Measuring ----------------------------------------------------------------------------------------


class Rounds:
    """The paging of some layers, one after the other, as a decode step runs it: one CUDA graph.

    The experts are random ones. Copies go into slots that have these experts already.
    """

    def __init__(self, layers: Sequence[OffloadedExperts], like: Tensor, most: int):
        """like: x [..., D] on the device. most: misses of a layer."""
        self.layers, self.most = layers, most
        self.device, count = like.device, len(self.layers)
        self.x = like.new_zeros(1, like.shape[-1])
        self.y = torch.zeros(1, like.shape[-1], device=self.device)
        self.weights = torch.zeros(1, most, device=self.device)
        # Chosen experts, their slots; experts to copy, and where to
        self.ids = torch.zeros(4, count, most, dtype=torch.int64, device=self.device)
        self.cached = [torch.tensor([*layer.cache.cached().items()]).t() for layer in self.layers]
        self.random = torch.Generator().manual_seed(0)
        self.steps: dict[bool, Callable[[], None]] = {}
        self.choose(0, 0)

    def choose(self, misses: int, copied: int) -> None:
        """Choose experts that miss in each layer; the first ones are copied."""
        slots, ids = self.layers[0].storage.slots, torch.zeros(self.ids.shape, dtype=torch.int64)
        ids[[0, 2]] = -1
        for n, layer in enumerate(self.layers):
            some = torch.randperm(slots, generator=self.random)[:copied]
            ids[:2, n, :copied] = ids[2:, n, :copied] = self.cached[n][:, some]
            others = torch.randperm(layer.n_local, generator=self.random)[: misses - copied]
            ids[0, n, copied : copied + len(others)] = others
            ids[1, n, copied : copied + len(others)] = slots
        self.ids.copy_(ids)

    def launch(self, asks: bool) -> None:
        """Launch the paging of all layers. asks: it asks the CPU for its share."""
        for layer, chosen, slots, copied, targets in zip(self.layers, *self.ids, strict=True):
            box, R, E = layer.box, layer.storage.slots, layer.n_local
            if asks:
                ask(self.x, chosen[None], slots[None], self.weights, box, R, E)
            layer.fill_slots(copied, targets)
            if asks:
                answer(self.y, box, self.x.dtype)

    def step(self, asks: bool) -> Callable[[], None]:
        """Return `launch`, captured on a GPU."""
        if asks not in self.steps:
            self.steps[asks] = partial(self.launch, asks)
            if self.device.type == "cuda":
                self.launch(asks)  # compiles
                with CapturedStep() as captured:
                    self.launch(asks)
                self.steps[asks] = captured.replay
        return self.steps[asks]

    def seconds(self, misses: int, copied: int, asks: bool, limit: float = 0.02) -> float:
        """Return the seconds of a layer, the mean of all layers, of the median step.

        The host waits as it waits for a token. No step begins after `limit` seconds, except the
        least number of them.
        """
        step, times = self.step(asks), []
        (least, most), start = MEASURED_STEPS, time.perf_counter()
        while len(times) < least or (len(times) < most and time.perf_counter() - start < limit):
            self.choose(misses, copied)
            times.append(self.timed(step))
        return median(times[1:]) / len(self.layers)

    def best(self, *how) -> float:
        """Return the fastest of some turns of `seconds`."""
        return min(self.seconds(*how) for _ in range(MEASURED_TURNS))

    def timed(self, step: Callable[[], None]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            step()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


@torch.inference_mode()
def measure_balance(
    layers: Sequence[OffloadedExperts], products: Sequence[CPUProducts], like: Tensor, most: int
) -> Balance:
    """Measure a layer's paging with up to `most` misses.

    like: x [..., D] on the device. products: of each layer, which answers its requests; none: the
    CPU has no share. Sets the number of their threads: the fastest one.
    """
    begin, most = time.perf_counter(), min(most, layers[0].storage.slots)
    counts, threads = range(most + 1), 0
    pairs = [(n, c) for n in counts for c in range(n + 1) if products]
    limit = MEASURED_SECONDS / (len(pairs) + len(counts)) / MEASURED_TURNS
    one = Rounds(layers[:1], like, most)
    slowest = max(one.best(most, *how) for how in ((0, True), (most, False))[not products :])
    fitting = int(limit / (MEASURED_STEPS[0] * slowest))
    rounds = Rounds(layers[: max(1, min(fitting, MEASURED_LAYERS))], like, most)
    if products:
        threads = choose_threads(products, lambda: rounds.best(most, 0, True, limit))
    every = [*((n, c, True) for n, c in pairs), *((n, n, False) for n in counts)]
    turns = [{how: rounds.seconds(*how, limit) for how in every} for _ in range(MEASURED_TURNS)]
    times = {how: min(turn[how] for turn in turns) for how in every}
    shared = [[times[n, c, True] for c in range(n + 1)] for n in counts if products]
    shared = without_disturbances(shared)
    alone = [times[n, n, False] for n in counts]
    log.debug(
        "measured paging of %d layers in %.2f s", len(rounds.layers), time.perf_counter() - begin
    )
    return Balance(alone, shared, layers[0].storage.blobs.shape[1], threads)


def choose_threads(products: Sequence[CPUProducts], measure: Callable[[], float]) -> int:
    """Give compiled products the number of threads with which `measure` is fastest -> the number.

    If each core has one, any other thread of the process stops one of them, and all wait for it.
    Other products: 0.
    """
    if not all(map(is_compiled, products)):
        return 0
    threads, best = products[0].threads, (0.0, 0)

    def use(count: int) -> None:
        threads.resize(count)
        for each in products:
            each.layer.pool = threads.pool

    full = threads.count
    for count in sorted({full, full * 2 // 3, full // 2} - {0}):  # a half: one thread a core
        use(count)
        found = measure()
        log.debug("CPU products with %d threads: %.1f us a layer", count, found * 1e6)
        if not best[1] or found < (1 - LEAST_GAIN) * best[0]:  # of equals, the fewest
            best = found, count
    use(best[1])
    return best[1]
