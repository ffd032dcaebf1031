"""Choose the session that a card can have: number format, context, experts in host memory.

memory/card_plan.py does so for the commands, and describes the choice.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from cli.options import DEFAULT_CHAT_LENGTH, parse_size
from formats.quantizer import formats_of_mode, plan_format
from memory.advice import size_text
from memory.plan import MARGIN, Memory, ModelSizes, Setup, fit
from models import build_model
from offload.plan import OffloadSettings
from runtime.memory import Capacity

# Formats that a model published in 16 bits is offered in, the best first. Those of FEW_BITS cost
# perplexity (docs/formats.md), so experts in host memory come before them.
OURS = "int8", "int4"
FEW_BITS = "hqq3", "hqq2"


class Freedom(NamedTuple):
    """What the user has left open."""

    formats: bool = False
    offload: bool = False
    context: int = 0  # the least tokens; 0: the context is given


class Choice(NamedTuple):
    """A session that fits."""

    setup: Setup
    capacity: Capacity
    mode: str | None = None  # the format to make; None: the model stays as it is

    @property
    def offload(self) -> OffloadSettings | None:
        return self.setup.offload


def choose(setup: Setup, memory: Memory, may: Freedom) -> Choice | None:
    """Return the first session that fits into memory; None: none does.

    A shorter context comes after all formats and after offloading.
    """
    for length in contexts(setup, may):
        for mode, session in sessions(setup, memory, may):
            capacity = capacity_of(session, memory, length)
            if capacity is not None:
                return Choice(as_planned(session, capacity), capacity, mode)
    return None


def as_planned(session: Setup, capacity: Capacity) -> Setup:
    """Return a session with the length and the --gpu_memory that were found for it."""
    if session.offload is None:
        is_server = session.max_batch is not None  # the length of its session stays open
        return session if is_server else replace(session, length=capacity.length)
    offload = session.offload
    if capacity.gpu_memory is not None:
        offload = replace(offload, gpu_memory=capacity.gpu_memory)
    return replace(session, length=capacity.length, offload=offload)


def contexts(setup: Setup, may: Freedom) -> Iterator[int]:
    """Yield lengths to try: the wanted one, then, if it is free, halves of it."""
    wanted = setup.length or min(setup.sizes.args.max_position, DEFAULT_CHAT_LENGTH)
    yield wanted
    while may.context and wanted > may.context:
        wanted = max(may.context, wanted // 2)
        yield wanted


def sessions(setup: Setup, memory: Memory, may: Freedom) -> Iterator[tuple[str | None, Setup]]:
    """Yield formats and their sessions, the best first."""
    groups: tuple[tuple[str | None, ...], ...] = ((None,),)
    if may.formats:
        groups = (None, *OURS), FEW_BITS
    for modes in groups:
        last = None
        for mode in modes:
            if sizes := in_mode(setup.sizes, mode):
                last = mode, replace(setup, sizes=sizes)
                yield last
        if may.offload and last and memory.gpu is not None:
            yield last[0], offloaded(last[1], memory.gpu)


@lru_cache(maxsize=8)
def in_mode(sizes: ModelSizes, mode: str | None) -> ModelSizes | None:
    """Return the sizes in a --mode; None if it cannot be made, or makes nothing smaller."""
    if mode is None:
        return sizes
    try:
        format = plan_format(build_model(sizes.whole_args), *formats_of_mode(mode))
    except ValueError:
        return None
    found = sizes.changed(format=format)
    return found if found and found.weights < sizes.weights else None


def offloaded(setup: Setup, free: int) -> Setup:
    """Return a session with experts in host memory, of one answer at a time for a server."""
    text = size_text(max(0, int((1 - MARGIN) * (free - setup.extra))))
    batch = {} if setup.max_batch is None else {"batch": 1, "max_batch": 1}
    return replace(setup, offload=OffloadSettings(gpu_memory=parse_size(text)), **batch)


def capacity_of(session: Setup, memory: Memory, length: int) -> Capacity | None:
    """Return what a session holds with this context at least; None if it does not fit."""
    is_open = session.max_batch is not None and session.offload is None and not session.length
    try:
        found = fit(session if is_open else replace(session, length=length), memory)
    except ValueError:
        return None
    return found if found.length >= length else None
