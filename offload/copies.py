"""Copies of experts beside products, on a stream of their own."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all layers' copies."""
    return torch.cuda.Stream(device)


def load_in_turn(
    load: Callable[[Tensor], Tensor], waves: Sequence[Tensor], ahead: bool
) -> Iterator[Tensor]:
    """Yield load(wave) of each wave, before whose products it is complete.

    ahead: load a wave while the one before is multiplied, on a GPU. It must not take that wave's
    slots; it may take those of the wave before that, whose products have ended.
    """
    if not ahead or waves[0].device.type != "cuda":
        yield from map(load, waves)
        return
    stream, main = copy_stream(waves[0].device), torch.cuda.current_stream()
    loaded: list[tuple[Tensor, torch.cuda.Event]] = []
    for n in range(len(waves)):
        for wave in waves[len(loaded) : n + 2]:
            stream.wait_stream(main)  # all products that have been launched
            with torch.cuda.stream(stream):
                loaded.append((load(wave), stream.record_event()))
        found, copied = loaded[n]
        main.wait_event(copied)
        found.record_stream(main)
        yield found
