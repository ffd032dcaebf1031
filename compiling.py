"""Torch's compiler: its settings, and how it searches and times the tile shapes of the kernels that it makes."""

import copy
import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from statistics import median

import torch

from layers import teach_compiler


def compile_settings() -> None:
    """Torch's compiler options, set once and only where something is compiled."""
    # Imported here, because importing the compiler takes longer than an eager answer of a small model.
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor
    import torch.fx.experimental._config as fx

    # Without coordinate descent Inductor leaves one-token products to cuBLAS, which cannot fuse the expert gather.
    inductor.coordinate_descent_tuning = True
    # Several tile shapes are tried for each kernel before the best is refined: from the one shape that Inductor guesses
    # that ends at up to a third fewer GB/s for the products of packed weights (docs/LOG.md).
    inductor.max_autotune_pointwise = True
    # Before each run of a kernel that works in place its arguments are copied, and that is timed as part of it: of
    # small ones the noise of the copy chose shapes that took twice as long.
    inductor.inplace_buffers = False
    # A kernel may be set up while the one before it ends (programmatic dependent launch, from Hopper on).
    inductor.triton.enable_pdl = True
    # Every index is made here, by a router or by sampling: no kernel has to check that it is within bounds.
    inductor.assert_indirect_indexing = False
    # Two sizes that happen to be equal in the first prompt (its length and the head dim) are not the same size.
    fx.use_duck_shape = False
    # One function is compiled for each kind of block, for prefill and decode, and anew for a session of another length.
    dynamo.recompile_limit = 256

    # After all that, since what is imported here reads the above on import.
    from torch._inductor.runtime.benchmarking import benchmarker

    benchmarker.benchmark_gpu = gpu_ms  # whichever of Inductor's own ways of timing it came with
    search_side_by_side()
    teach_compiler()


def search_side_by_side() -> None:
    """Let Inductor search tile shapes by `best_shape`, in place of its own coordinate descent."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    inductors = CachingAutotuner._coordinate_descent_tuning
    if inductors.__module__ == __name__:
        return

    def search(autotuner, *args, **kwargs):
        fixed = not any(name.startswith("ks") for name in autotuner.triton_meta["signature"])  # no size is an argument
        tuner, compile, long = autotuner.coordesc_tuner, autotuner._precompile_config, LONG if fixed else math.inf
        tuner.autotune = lambda measure, shape, _: best_shape(tuner, compile, measure, shape, long)
        try:
            return inductors(autotuner, *args, **kwargs)
        finally:
            del tuner.autotune

    CachingAutotuner._coordinate_descent_tuning = search


LONG = 0.008  # ms, as `gpu_ms` times a kernel: one that does nothing takes 0.005


def best_shape(tuner, compile: Callable, measure: Callable, shape, long: float):
    """The tile shape that no neighbour of it betters, found from `shape` on.

    tuner: Inductor's CoordescTuner: which numbers a shape has, what they may be, and which shapes were timed already
    compile(shape): leaves the kernel in Triton's cache
    measure(shape): milliseconds; raises what the compiler or the driver does where a shape needs more than there is

    Neighbours differ by one step in one number; where none of those is better, and the kernel takes `long` ms, also by
    one step in each of several: Mixtral's experts in int8 gain a tenth by that. They are compiled side by side, since a
    search waits for little else, and then timed one by one.
    """
    import torch._inductor.config as inductor

    def timed(neighbour) -> float:
        try:
            return tuner.call_func(measure, neighbour)
        except Exception:  # more registers or shared memory than there are
            tuner.cache_benchmark_result(neighbour, math.inf)
            return math.inf

    several = False
    with ThreadPoolExecutor(inductor.compile_threads) as pool:
        while True:
            steps = list(neighbours(tuner, shape, several))
            wait([pool.submit(compile, step) for step in steps if tuner.lookup_in_cache(step) is None])
            best = min(steps, key=timed, default=shape)
            if tuner.has_improvement(timed(shape), timed(best)):
                shape, several = best, False
            elif several or timed(shape) < long:
                return shape
            else:
                several = True


MOST = 64  # numbers that a lane holds: with more it spills, which takes a second to find out


def neighbours(tuner, shape, several: bool):
    """Shapes that differ from this one by a step in one number, or in several."""
    from torch._inductor.runtime.coordinate_descent_tuner import get_field, set_field

    fields = [field for field in tuner.tunable_fields if get_field(shape, field) is not None]
    steps = [tuner.get_neighbour_values(field, get_field(shape, field)) for field in fields]
    for values in itertools.product(*([None, *values] for values in steps)):
        changed = {field: value for field, value in zip(fields, values, strict=True) if value is not None}
        neighbour = copy.deepcopy(shape)
        for field, value in changed.items():
            set_field(neighbour, field, value)
        tile = math.prod(get_field(neighbour, field) for field in fields if field.endswith("BLOCK"))
        fits = tile <= MOST * 32 * neighbour.num_warps and tuner.is_valid_config(neighbour)
        if fits and (len(changed) > 1 if several else len(changed) == 1):
            yield neighbour


ROUNDS = 50


def gpu_ms(call: Callable[[], object], **_) -> float:
    """Median of the milliseconds that the GPU takes for what `call` launches, its L2 cache emptied before each.

    The GPU sleeps until all is launched. Inductor's own ways do not wait: a host that compiles the next kernels takes
    longer to launch a small one than emptying the cache takes, so what they time is the host, and tile shapes are
    chosen by its noise. How long they would measure, and which of the times they would give, is not heeded.
    """
    cache = torch.empty(64 << 20, dtype=torch.int32, device="cuda")  # 256 MB, several times any GPU's L2
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]

    def launch(count: int) -> float:
        begin = time.perf_counter()
        for start, end in events[:count]:
            cache.zero_()
            start.record()
            call()
            end.record()
        return (time.perf_counter() - begin) / count

    launch(3)
    torch.cuda.synchronize()
    host = launch(3)
    torch.cuda.synchronize()
    whole = events[0][0].elapsed_time(events[2][0]) / 2
    count = max(5, min(ROUNDS, int(40 / whole)))  # 40 ms of a prompt's kernels
    torch.cuda._sleep(int(3e9 * host * count))  # clocks, of which a GPU has 2 to 3 a ns
    launch(count)
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events[:count])
