"""A step of decoding as CUDA graphs: the host launches what was recorded, and takes part only where it has to.

`between` marks the places where it has to. A step without any is one graph. What runs on the host must leave tensors
where they are: the graphs read and write the addresses that they were recorded with.
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch


class Recording:
    """`with Recording(generator) as recording: step()` records what step does on the GPU; `recording.replay()` does it.

    generator: what the step draws from, so that every replay draws anew. The step must have run before, so that
    everything is compiled; it does not run while it is recorded.
    """

    now: "Recording | None" = None  # the one that is being made

    def __init__(self, generator: torch.Generator):
        self.generator, self.parts = generator, []
        self.pool = torch.cuda.graph_pool_handle()  # one for all graphs, which run in turn and hand tensors on

    def __enter__(self) -> "Recording":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.stack = ExitStack()
        self.stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        Recording.now = self
        self._begin()
        return self

    def __exit__(self, kind, error, trace) -> None:
        Recording.now = None
        with self.stack:
            self._end()

    def _begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.generator)
        # NCCL's own thread asks for events meanwhile.
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        self.graph.capture_end()
        self.parts.append(self.graph.replay)

    def cut(self, host: Callable[[], None]) -> None:
        """End one graph and begin the next; `host` runs between the two."""
        self._end()
        self.parts.append(host)
        self._begin()

    def replay(self) -> None:
        for part in self.parts:
            part()


def between(host: Callable[[], None]) -> None:
    """Run `host` now and, where a step is being recorded, whenever that is replayed, at this place (and not now)."""
    if Recording.now is None:
        host()
    else:
        Recording.now.cut(host)
