"""Torch's compiler: its settings, and how it times the tile shapes between which it chooses."""

import time
from collections.abc import Callable
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
    # Several tile shapes are tried for each kernel before coordinate descent refines the best: from the one shape that
    # Inductor guesses it ends at up to a third fewer GB/s for the products of packed weights (docs/LOG.md).
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
    teach_compiler()


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
