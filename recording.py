"""Work of a GPU as CUDA graphs: the host launches what was recorded, and takes part only where it has to.

`between` marks the places where it has to. A step without any is one graph. What runs on the host must leave tensors
where they are: the graphs read and write the addresses that they were recorded with.
"""

from collections.abc import Callable, Hashable
from contextlib import ExitStack

import torch
from torch import Tensor

KINDS = 64  # of work that comes again, as many as are remembered


class Recording:
    """`with Recording(generator) as recording: step()` records what step does on the GPU; `recording.replay()` does it.

    generator: what the step draws from, so that every replay draws anew. The step must have run before, so that
    everything is compiled; it does not run while it is recorded. pool: memory shared with other recordings, none of
    which needs anything of the one before.
    """

    now: "Recording | None" = None  # the one that is being made

    def __init__(self, generator: torch.Generator, pool: tuple[int, int] | None = None):
        self.generator, self.parts = generator, []
        self.pool = pool or torch.cuda.graph_pool_handle()  # one for all graphs, which run in turn and hand tensors on

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


class Repeated:
    """Calls it as `repeated(kind, function, *tensors)`: `function(*tensors)`, a tuple of tensors.

    A kind that comes for the second time is recorded, since most come once and recording takes as long as a call.
    What else the function reads has to stay where it is. Of more than KINDS, the first to come are forgotten.
    """

    def __init__(self, generator: torch.Generator):
        self.generator, self.pool = generator, torch.cuda.graph_pool_handle()
        self.known: dict[Hashable, Callable[..., tuple[Tensor, ...]] | None] = {}

    def __call__(self, kind: Hashable, function: Callable, *tensors: Tensor) -> tuple[Tensor, ...]:
        if kind not in self.known:
            self.known[kind] = None
            if len(self.known) > KINDS:
                del self.known[next(iter(self.known))]
            return function(*tensors)
        if run := self.known[kind]:
            return run(*tensors)
        inputs = [tensor.clone() for tensor in tensors]
        found = function(*inputs)  # as it is recorded, so that nothing is left to be compiled meanwhile
        self.known[kind] = self.record(function, inputs)
        return found

    def record(self, function: Callable, inputs: list[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """The function, recorded with these tensors."""
        with Recording(self.generator, self.pool) as recording:
            outputs = function(*inputs)

        def replay(*tensors: Tensor) -> tuple[Tensor, ...]:
            for old, new in zip(inputs, tensors, strict=True):
                old.copy_(new)
            recording.replay()
            return tuple(output.clone() for output in outputs)  # the next replay writes where they are

        return replay
