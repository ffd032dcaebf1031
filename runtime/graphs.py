"""CUDA graphs: capture a step once, replay it without launch overhead.

A step that needs host work in between is captured as several graphs, split at `run_on_host`.
Host work must not reallocate tensors: graphs read and write the addresses seen at capture.
"""

import logging
from collections.abc import Callable, Hashable
from contextlib import ExitStack, nullcontext, suppress

import torch
from torch import Tensor

MAX_GRAPHS = 64  # captured calls that a GraphCache remembers

log = logging.getLogger("moe_fast")


class CapturedStep:
    """Captures a step: `with CapturedStep() as step: work()`, then `step.replay()`.

    Run the step once before, so that capture compiles nothing; capture does not execute it. pool:
    memory shared with other captures; a replay overwrites the results of the others.
    """

    current: "CapturedStep | None" = None  # the capture in progress

    def __init__(self, pool: tuple[int, int] | None = None):
        self.parts = []
        # One pool for all graphs of a step: they run in turn and pass tensors on.
        self.pool = pool or torch.cuda.graph_pool_handle()

    def __enter__(self) -> "CapturedStep":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.stack = ExitStack()
        self.stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        CapturedStep.current = self
        self.begin_graph()
        return self

    def __exit__(self, kind, error, trace) -> None:
        CapturedStep.current = None
        # After an error, ending the capture may raise another one, which says less.
        with suppress(RuntimeError) if kind else nullcontext(), self.stack:
            self.end_graph()

    def begin_graph(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's own thread queries events during the capture.
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def end_graph(self) -> None:
        self.graph.capture_end()
        self.parts.append(self.graph.replay)

    def split(self, host_work: Callable[[], None]) -> None:
        """End one graph, call `host_work` between the two at every replay, begin the next graph."""
        self.end_graph()
        self.parts.append(host_work)
        self.begin_graph()

    def replay(self) -> None:
        for part in self.parts:
            part()


def run_on_host(work: Callable[[], None]) -> None:
    """Call `work` now; during a capture, call it at this point of every replay instead."""
    if CapturedStep.current is None:
        work()
    else:
        CapturedStep.current.split(work)


def warn_of_capture(what: str, error: RuntimeError) -> None:
    """Log that no more of these are captured, with the first line of the error."""
    log.warning("no more %s are captured: %s", what, f"{error}\n".splitlines()[0])


class GraphCache:
    """Calls `function(*tensors)` through a CUDA graph: `cache(key, function, *tensors)`.

    The tensors may be on the host: those of `transfers.sendable`, which a replay copies to where
    the graph reads them.

    A key is captured at its second call: most keys are called once, and a capture takes as long
    as a call. All else that the function reads must keep its address. The oldest key is dropped
    when there are more than MAX_GRAPHS. After a capture that fails, for want of memory, no other
    is made: such calls run the function.

    captures_repeats: False, if only the calls that `expect` names are captured.
    """

    def __init__(self, device: torch.device, captures_repeats: bool = True):
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.captures_repeats = captures_repeats
        self.known: dict[Hashable, Callable[..., tuple[Tensor, ...]] | None] = {}
        self.is_full = False  # a capture has failed

    def __call__(self, key: Hashable, function: Callable, *tensors: Tensor) -> tuple[Tensor, ...]:
        if replay := self.known.get(key):
            return replay(*tensors)
        if key not in self.known or self.is_full:
            if self.captures_repeats:
                self.expect(key)
            return function(*(tensor.to(self.device, non_blocking=True) for tensor in tensors))
        inputs = [tensor.to(self.device, copy=True) for tensor in tensors]
        outputs = function(*inputs)  # warm up with these tensors: capture then compiles nothing
        try:
            self.known[key] = self.capture(function, inputs)
        except RuntimeError as error:
            self.is_full = True
            warn_of_capture("prompts", error)
        return outputs

    def expect(self, key: Hashable) -> None:
        """Let the next call of a key capture it, the first one, too."""
        self.known.setdefault(key, None)
        if len(self.known) > MAX_GRAPHS:
            del self.known[next(iter(self.known))]

    def has(self, key: Hashable) -> bool:
        """Whether a key is captured."""
        return self.known.get(key) is not None

    def prepare(self, key: Hashable, function: Callable, *tensors: Tensor) -> None:
        """Capture a key before its first call. The function must be warmed up."""
        self.known[key] = self.capture(function, [tensor.clone() for tensor in tensors])

    def capture(
        self, function: Callable, inputs: list[Tensor]
    ) -> Callable[..., tuple[Tensor, ...]]:
        """Return the function, captured with these input tensors."""
        with CapturedStep(self.pool) as step:
            outputs = function(*inputs)

        def replay(*tensors: Tensor) -> tuple[Tensor, ...]:
            for old, new in zip(inputs, tensors, strict=True):
                old.copy_(new, non_blocking=True)
            step.replay()
            return tuple(output.clone() for output in outputs)  # the next replay overwrites them

        return replay
