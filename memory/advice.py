"""Find options that make a session fit: each is tried on the plan, so it is never refused."""

import itertools
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from cli.command import MAX_MESSAGE
from cli.options import parse_size
from formats import FORMATS
from formats.quantizer import formats_of_mode, plan_format
from memory.cards import GB
from memory.plan import MARGIN, Memory, ModelSizes, Setup, fit, reserve
from models import build_model
from offload.plan import OffloadSettings, least_gpu_memory
from ops.plain.attention import BLOCK

SUGGESTIONS = 3  # largest number in one message
FITS = "this fits", "each of these fits"
RANKS = 2, 4, 8  # numbers of GPUs that are suggested
CARDS = 8, 12, 16, 24, 32, 48, 80, 96, 141, 192  # GB of GPUs that are sold
OWNERS = {"gpu": "GPU", "host": "host"}
STEP, MAX_STEPS = GB // 10, 1 << 20  # in which the least memory is searched for
DEFAULT_OFFLOAD = OffloadSettings(gpu_memory=0)


@dataclass(frozen=True)
class Levers:
    """The options by which the user of a command can change its session."""

    length: Callable[[int], str] | None = None  # a context of N tokens -> the options for it
    least_length: int = 1
    batch: str = ""  # the option's name
    kv_cache: bool = False
    layers: bool = False
    dtype: bool = False
    format: Callable[[str], str] | None = None  # a --mode -> how to have the model in it
    offload: str | None = None  # options to change with --offload; None: the command has none
    gpus: int = 1  # of this machine


@dataclass(frozen=True)
class Change:
    """A setup that the plan may accept, and the options that lead to it."""

    setup: Setup
    texts: tuple[str, ...] = ()

    def also(self, text: str, **changes) -> "Change":
        return Change(replace(self.setup, **changes), (*self.texts, text))

    @property
    def text(self) -> str:
        return " and ".join(reversed(self.texts))


def advise(cause: str, setup: Setup, memory: Memory, levers: Levers) -> str:
    """Return the error's message: the cause, and options that the plan accepts.

    They are the fewest that make it fit: a shorter context before another number format, and that
    before offloading. If none do, the message names the least memory that would.
    """
    search = Search(setup, memory, levers)
    found = [change.text for change in search.least_changes()[:SUGGESTIONS]]
    for count in range(len(found), 0, -1):
        message = f"{cause}; {FITS[count > 1]}: {'; or '.join(found[:count])}"
        if count == 1 or len(message) <= MAX_MESSAGE:
            return message
    would_do = list(filter(None, (search.describe_least(field) for field in ("gpu", "host"))))
    if text := ", or ".join(would_do) or search.describe_both():
        return f"{cause}: no option makes it fit here; {text} would do"
    return f"{cause}: no option makes it fit"


Kind = Callable[[Change], Iterator[Change]]


class Search:
    """Searches for changes of a setup that the plan accepts."""

    def __init__(self, setup: Setup, memory: Memory, levers: Levers):
        self.setup, self.memory, self.levers = setup, memory, levers
        self.smaller = lru_cache(smaller_formats)  # copies share them
        self.changed = lru_cache(ModelSizes.changed)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of change in the order of suggestions, and reverse to that of application."""
        return (
            self.contexts,
            self.batches,
            self.kv_caches,
            self.drafts,
            self.layers,
            self.dtypes,
            self.formats,
            self.places,
            self.ranks,
        )

    def least_changes(self) -> list[Change]:
        """Return what fits with the fewest kinds of change: the first of each combination."""
        for count in range(1, len(self.kinds) + 1):
            found = map(self.first_that_fits, itertools.combinations(self.kinds, count))
            if accepted := [change for change in found if change]:
                return accepted
        return []

    def first_that_fits(self, kinds: tuple[Kind, ...]) -> Change | None:
        changes: Iterator[Change] = iter([Change(self.setup)])
        # A draft model is left out first: the size for --offload depends on what it leaves free.
        for kind in sorted(reversed(kinds), key=lambda kind: kind != self.drafts):
            changes = itertools.chain.from_iterable(map(kind, changes))
        return next((change for change in changes if self.fits(change.setup)), None)

    def fits(self, setup: Setup, **changes) -> bool:
        """Return whether the plan accepts a setup with these changes."""
        try:
            fit(replace(setup, **changes), self.memory)
        except ValueError:
            return False
        return True

    def least_steps(self, field: str) -> int | None:
        """Return the least free memory that would do, in STEPs. The others: of `describe_least`."""
        if getattr(self.memory, field) is None or not self.with_free(field, MAX_STEPS).any_fits():
            return None
        return largest(0, MAX_STEPS, lambda steps: not self.with_free(field, steps).any_fits()) + 1

    def describe_both(self) -> str | None:
        """Return the least host memory that would do with any GPU, and the GPU's beside that."""
        if self.memory.gpu is None:
            return None
        host = self.with_free("gpu", MAX_STEPS).least_steps("host")
        if host is None:
            return None
        beside = self.with_free("host", host).describe_least("gpu")
        return f"{host * STEP / GB:.1f} GB of free host memory and {beside}"

    def describe_least(self, field: str) -> str | None:
        """Return the least free memory that would do, and with which options.

        field: of Memory; the other one stays as it is. Returns None if no amount would do.
        """
        if (steps := self.least_steps(field)) is None:
            return None
        found, need = self.with_free(field, steps), steps * STEP
        text = f"{need / GB:.1f} GB of free {OWNERS[field]} memory"
        card = next((card for card in CARDS if card * GB >= need), None)
        if field == "gpu" and card:
            text += f" (a card of {card} GB)"
        changes = [Change(self.setup)] if found.fits(self.setup) else found.least_changes()
        return f"{text} with {changes[0].text}" if changes[0].texts else text

    def with_free(self, field: str, steps: int) -> "Search":
        """Return the same search with this many STEPs of free memory."""
        other = copy(self)
        other.memory = replace(self.memory, **{field: steps * STEP})
        return other

    def any_fits(self) -> bool:
        """Return whether any of the smallest setups that the levers allow fits."""
        least = Change(self.setup)
        if self.levers.length:
            least = least.also("", length=self.levers.least_length)
        if self.levers.batch:
            least = least.also("", **self.of_batch(1))
        changes = [least.also("", extra=0)]
        for kind in (self.ranks, self.dtypes, self.formats, self.places, self.kv_caches):
            changes = [*changes, *itertools.chain.from_iterable(map(kind, changes))]
        if self.levers.layers:
            found = (self.changed(change.setup.sizes, layers=1) for change in changes)
            changes = [x.also("", sizes=s) for x, s in zip(changes, found, strict=True) if s]
        return any(self.fits(change.setup) for change in changes)

    # Kinds of change ------------------------------------------------------------------------------

    def contexts(self, change: Change) -> Iterator[Change]:
        """Yield the longest context that fits."""
        setup, least = change.setup, self.levers.least_length
        longest = (
            setup.positions if setup.offload else setup.length or setup.sizes.args.max_position
        )
        if self.levers.length is None:
            return
        found = largest(least, longest - 1, lambda n: self.fits(setup, length=n))
        if found is not None:
            length = max(least, found // BLOCK * BLOCK)
            yield change.also(self.levers.length(length), length=length)

    def batches(self, change: Change) -> Iterator[Change]:
        """Yield the most sequences that fit; one if none do: other changes may free memory."""
        setup, option = change.setup, self.levers.batch
        if option and setup.batch > 1:
            found = largest(1, setup.batch - 1, lambda n: self.fits(setup, **self.of_batch(n))) or 1
            yield change.also(f"{option} {found}", **self.of_batch(found))

    def of_batch(self, batch: int) -> dict:
        """Return the fields of Setup for this many sequences."""
        return {"batch": batch, "max_batch": self.setup.max_batch and batch}

    def kv_caches(self, change: Change) -> Iterator[Change]:
        if self.levers.kv_cache and change.setup.kv_cache != "int8":
            yield change.also("--kv_cache int8", kv_cache="int8")

    def drafts(self, change: Change) -> Iterator[Change]:
        if change.setup.extra:
            yield change.also("leave --draft_checkpoint_path out", extra=0)

    def layers(self, change: Change) -> Iterator[Change]:
        """Yield the most layers that fit; one if none do: other changes may free memory."""
        setup, count = change.setup, change.setup.sizes.whole_args.n_layer
        if not self.levers.layers:
            return

        def accepts(n: int) -> bool:
            sizes = self.changed(setup.sizes, layers=n)
            return sizes is not None and self.fits(setup, sizes=sizes)

        found = largest(1, count - 1, accepts) or 1
        if count > 1 and (sizes := self.changed(setup.sizes, layers=found)):
            yield change.also(f"--layers {found}", sizes=sizes)

    def dtypes(self, change: Change) -> Iterator[Change]:
        sizes = change.setup.sizes
        if self.levers.dtype and sizes.dtype is torch.float32:
            plain = self.changed(sizes, dtype=torch.bfloat16)
            yield change.also("--dtype bf16", sizes=plain, mapped=False)

    def formats(self, change: Change) -> Iterator[Change]:
        if self.levers.format:
            for mode, sizes in self.smaller(change.setup.sizes):
                yield change.also(self.levers.format(mode), sizes=sizes)

    def places(self, change: Change) -> Iterator[Change]:
        """Yield sizes of the expert cache; without --offload, adding it; with it, removing it."""
        setup, given = change.setup, change.setup.offload
        if given is None and (self.levers.offload is None or not self.on_gpu):
            return
        if given is not None and given.gpu_experts is not None:
            for slots in range(given.gpu_experts - 1, 0, -1):
                settings = replace(given, gpu_experts=slots)
                yield change.also(f"--gpu_experts {slots}", offload=settings)
        else:
            start, batch = self.start_offload(setup) if given is None else ("", {})
            for text in self.budgets(setup):
                settings = replace(given or DEFAULT_OFFLOAD, gpu_memory=parse_size(text))
                options = f"{start} --gpu_memory {text}".strip()
                yield change.also(options, offload=settings, **batch)
        if given is not None:
            yield change.also("leave out --offload with its options", offload=None)

    def start_offload(self, setup: Setup) -> tuple[str, dict]:
        """Return the options that --offload needs beside its size, and their fields of Setup."""
        options = ["--offload", *filter(None, [self.levers.offload])]
        if setup.max_batch is None:
            return " ".join(options), {}
        if setup.batch > 1:
            options.insert(0, f"{self.levers.batch} 1")
        return " ".join(options), self.of_batch(1)

    def budgets(self, setup: Setup) -> Iterator[str]:
        """Yield sizes for --gpu_memory: the least if that was not given, then what is free."""
        if setup.offload:
            settings = replace(setup.offload, reserve=reserve(setup))
            least = least_gpu_memory(setup.sizes.experts, settings)
            if (settings.gpu_memory or 0) < least:
                yield size_text(least, up=True)
        if self.on_gpu:
            free = max(0, self.memory.gpu - setup.extra)
            yield size_text(int((1 - MARGIN) * free))
            yield size_text(free)

    @property
    def on_gpu(self) -> bool:
        return self.memory.gpu is not None

    def ranks(self, change: Change) -> Iterator[Change]:
        """Yield larger numbers of GPUs, if the machine has them."""
        sizes = change.setup.sizes
        for ranks in RANKS:
            if sizes.ranks < ranks <= self.levers.gpus:
                sharded = self.changed(sizes, ranks=ranks)
                if sharded is not None:
                    yield change.also(f"torchrun --nproc_per_node={ranks}", sizes=sharded)


def smaller_formats(sizes: ModelSizes) -> list[tuple[str, ModelSizes]]:
    """Return the modes that make a model smaller, the smallest of each number of bits."""
    model, found = build_model(sizes.whole_args), {}
    dtype = sizes.format.get("dtype", sizes.format["name"])
    for name, format in FORMATS.items():
        try:
            planned = plan_format(model, *formats_of_mode(name), dtype=dtype)
        except ValueError:  # its groups do not divide this model's rows
            continue
        packed = sizes.changed(format=planned)
        least = found[format.bits][1].weights if format.bits in found else sizes.weights
        if packed is not None and packed.weights < least:
            found[format.bits] = name, packed
    return [found[bits] for bits in sorted(found, reverse=True)]


def largest(low: int, high: int, accepts: Callable[[int], bool]) -> int | None:
    """Return the largest number from low to high that is accepted, by bisection; None: none is."""
    if low <= high and accepts(high):
        return high
    if low > high or not accepts(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if accepts(middle):
            low = middle
        else:
            high = middle - 1
    return low


def size_text(size: int, up: bool = False) -> str:
    """Return bytes as --gpu_memory takes them, rounded down or up: 22.8GB or 900MB."""
    step = GB // 10 if size >= 2 * GB else GB // 1000
    rounded = (size + (step - 1 if up else 0)) // step * step
    return f"{rounded / GB:.1f}GB" if step == GB // 10 else f"{rounded // step}MB"
