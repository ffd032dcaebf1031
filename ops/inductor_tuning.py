"""Tiling search for the kernels that Inductor generates, and a timer for kernels."""

import copy
import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from statistics import median

import torch

# By `gpu_ms`, which gives 0.005 for an empty kernel.
SHORT_KERNEL_MS = 0.0055
LONG_KERNEL_MS = 0.008
# With more values registers spill, and compiling such a tiling takes a second.
MAX_VALUES_PER_LANE = 64
MAX_ROUNDS = 50  # most launches that `gpu_ms` times


def replace_coordinate_descent() -> None:
    """Let Inductor search tilings with `best_tiling` instead of its own coordinate descent."""
    # Imported here: the compiler takes long to import.
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    original = CachingAutotuner._coordinate_descent_tuning
    if original.__module__ == __name__:
        return

    def search(autotuner, *args, **kwargs):
        signature = autotuner.triton_meta["signature"]
        static = not any(name.startswith("ks") for name in signature)  # no size is an argument
        tuner, compile_tiling = autotuner.coordesc_tuner, autotuner._precompile_config
        # Do not vary several fields for kernels of a compiled prompt: that took 232 s of compiling
        # and gained nothing.
        long_ms = LONG_KERNEL_MS if static else math.inf
        tuner.autotune = lambda measure, tiling, _: best_tiling(
            tuner, compile_tiling, measure, tiling, long_ms
        )
        try:
            return original(autotuner, *args, **kwargs)
        finally:
            del tuner.autotune

    CachingAutotuner._coordinate_descent_tuning = search


def best_tiling(tuner, compile_tiling: Callable, measure: Callable, tiling, long_ms: float):
    """Search from `tiling` -> a tiling that no neighbor improves on.

    tuner: Inductor's CoordescTuner, which has the fields of a tiling, their values, and the times
    measured so far. compile_tiling(tiling): compiles into Triton's cache. measure(tiling): returns
    milliseconds; raises if a tiling needs more registers or shared memory than the GPU has.

    A kernel that takes hardly longer than an empty one is not searched.

    Neighbors differ by one step in one field. If none of them is better and the kernel takes
    `long_ms` milliseconds or more, also try neighbors that differ in several fields: Mixtral's int8
    experts are a tenth faster for it. Neighbors are compiled in parallel, since compiling takes
    most of the search, and timed one after the other.
    """
    import torch._inductor.config as inductor

    def timed(neighbor) -> float:
        try:
            return tuner.call_func(measure, neighbor)
        except Exception:  # more registers or shared memory than the GPU has
            tuner.cache_benchmark_result(neighbor, math.inf)
            return math.inf

    if timed(tiling) < SHORT_KERNEL_MS:
        return tiling
    several = False
    with ThreadPoolExecutor(inductor.compile_threads) as pool:
        while True:
            candidates = list(neighbors(tuner, tiling, several))
            new = [t for t in candidates if tuner.lookup_in_cache(t) is None]
            wait([pool.submit(compile_tiling, candidate) for candidate in new])
            best = min(candidates, key=timed, default=tiling)
            if tuner.has_improvement(timed(tiling), timed(best)):
                tiling, several = best, False
            elif several or timed(tiling) < long_ms:
                return tiling
            else:
                several = True


def neighbors(tuner, tiling, several: bool):
    """Yield tilings that differ from this one by one step in one field, or in several fields."""
    from torch._inductor.runtime.coordinate_descent_tuner import get_field, set_field

    fields = [field for field in tuner.tunable_fields if get_field(tiling, field) is not None]
    steps = [tuner.get_neighbour_values(field, get_field(tiling, field)) for field in fields]
    for values in itertools.product(*([None, *values] for values in steps)):
        changed = {f: value for f, value in zip(fields, values, strict=True) if value is not None}
        neighbor = copy.deepcopy(tiling)
        for field, value in changed.items():
            set_field(neighbor, field, value)
        blocks = (get_field(neighbor, field) for field in fields if field.endswith("BLOCK"))
        fits = math.prod(blocks) <= MAX_VALUES_PER_LANE * 32 * neighbor.num_warps
        fits = fits and tuner.is_valid_config(neighbor)
        if fits and (len(changed) > 1 if several else len(changed) == 1):
            yield neighbor


def gpu_ms(call: Callable[[], object], **_) -> float:
    """Measure the GPU time of the kernels that `call` launches, with a cold L2 -> median, in ms.

    The GPU sleeps until everything is launched. Inductor's own timers do not wait. While the host
    compiles other kernels, launching a small kernel takes it longer than the GPU takes to flush L2.
    Inductor's timers then measure the host, and its noise chooses the tiling. Their keyword
    arguments (rounds, which quantile) are ignored.
    """
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")  # 256 MB, several times any L2
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(MAX_ROUNDS)]

    def launch(count: int) -> float:
        begin = time.perf_counter()
        for start, end in events[:count]:
            flush.zero_()
            start.record()
            call()
            end.record()
        return (time.perf_counter() - begin) / count

    launch(3)
    torch.cuda.synchronize()
    host_seconds = launch(3)
    torch.cuda.synchronize()
    round_ms = events[0][0].elapsed_time(events[2][0]) / 2
    count = max(5, min(MAX_ROUNDS, int(40 / round_ms)))  # 40 ms in all
    torch.cuda._sleep(int(3e9 * host_seconds * count))  # in cycles: 2 to 3 per ns
    launch(count)
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events[:count])
