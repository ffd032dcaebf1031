"""Copies of experts beside products, on a stream of their own."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeVar

import torch

W = TypeVar("W")


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all layers' copies."""
    return torch.cuda.Stream(device)


def load_in_turn(
    load: Callable[[W], None], waves: Sequence[W], device: torch.device, ahead: bool
) -> Iterator[W]:
    """Yield each wave, before whose products load(wave) is complete.

    ahead: load a wave while the one before is multiplied, on a GPU. It must not take that wave's
    slots; it may take those of the wave before that, whose products have ended.
    """
    if not ahead or device.type != "cuda":
        for wave in waves:
            load(wave)
            yield wave
        return
    stream, main = copy_stream(device), torch.cuda.current_stream()
    loaded: list[torch.cuda.Event] = []
    for n, next_one in enumerate(waves):
        for wave in waves[len(loaded) : n + 2]:
            stream.wait_stream(main)  # all products that have been launched
            with torch.cuda.stream(stream):
                load(wave)
                loaded.append(stream.record_event())
        main.wait_event(loaded[n])
        yield next_one
