"""Time of a kernel or two inside a CUDA graph, as in a decode step."""

from collections.abc import Callable, Sequence

import torch

from cli.parser import Parser


def require_gpu(parser: Parser) -> None:
    """End the command with one line and exit code 2 if there is no CUDA GPU."""
    if not torch.cuda.is_available():
        parser.error(f"{parser.prog} needs a CUDA GPU")


def graph_seconds(
    function: Callable, arguments: Sequence, repeats: int = 20, warmups: int = 2
) -> float:
    """Return the time of one call: the best replay of a graph with one call for each argument.

    Give arguments that select different weights, more of them than L2 holds. warmups: calls before
    the capture; 0: the function has run.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # it has launched what computes the arguments
    with torch.cuda.stream(stream):
        for _ in range(warmups):  # compiles
            for argument in arguments:
                function(argument)
    torch.cuda.synchronize()
    graph, best = torch.cuda.CUDAGraph(), float("inf")
    # thread_local: NCCL's own thread may query events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for argument in arguments:
            function(argument)
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / len(arguments))
    return best
