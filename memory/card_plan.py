"""The plan for a card: what `generate.py` and `serve.py` choose on a GPU, and its three lines.

`--model NAME` without further options comes here. A given option is never changed.
"""

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from cli.free_memory import free_host_memory
from cli.model_name import PLAIN, parse_model_name
from cli.options import DEFAULT_CHAT_LENGTH
from cli.serve_options import DEFAULT_BATCH
from memory.advice import largest, size_text
from memory.cards import HOST, Card, card_here, card_of_name, layer_seconds, token_seconds
from memory.choice import Choice, Freedom, capacity_of, choose
from memory.commands import generation_setup, server_setup
from memory.plan import GB, Memory, ModelSizes, Setup, reserve
from models import args_of_checkpoint
from offload.plan import OffloadPlan, make_plan
from ops.plain.attention import BLOCK
from parallel import process_group
from runtime.kernel_choice import count_fused
from runtime.memory import free_gpu_memory
from runtime.weights import bytes_per_token

log = logging.getLogger("moe_fast")


class Place(NamedTuple):
    """Where a session runs."""

    card: Card
    memory: Memory
    is_here: bool


class Plan(NamedTuple):
    """A choice, and what is expected of it."""

    name: str  # the model's
    place: Place
    choice: Choice
    published: ModelSizes
    experts: OffloadPlan | None  # None: all weights are on the GPU
    fused: int  # layers with fused kernels
    seconds: float  # predicted, a token; 0: not known

    @property
    def format(self) -> str:
        return self.choice.setup.sizes.format["name"]

    @property
    def where(self) -> str:
        """Where the weights are."""
        sizes = self.choice.setup.sizes
        beside = f"; a table in host memory, {sizes.tables / GB:.1f} GB" if sizes.tables else ""
        if self.experts is None:
            return f"{sizes.weights / GB:.1f} GB of weights on the GPU{beside}"
        held, experts = self.experts.nbytes / GB, self.experts.experts
        return (
            f"--offload, {self.experts.slots} of {experts.n_local} experts a layer and the other "
            f"weights on the GPU, {held:.1f} GB; all experts in host memory, "
            f"{experts.host_bytes / GB:.1f} GB{beside}"
        )

    def lines(self, compiled: bool = True) -> list[str]:
        """Return the plan in three lines."""
        card, setup = self.place.card, self.choice.setup
        free = f"{(self.place.memory.gpu or 0) / GB:.1f} GB{' free' if self.place.is_here else ''}"
        first = f"plan: {card.name}, {free}: {self.name} in {self.format}"
        if self.choice.mode:
            whole = self.published.weights / GB
            first += f" ({whole:.1f} GB in {self.published.format['name']})"
        context = f"context of {self.choice.capacity.length:,} tokens"
        if setup.max_batch is not None:
            rows = self.choice.capacity.rows
            context += f", {rows} conversation{'s' * (rows > 1)}"
        elif more := longest_context(self.choice, self.place.memory):
            context += f" (--max_seq_len {more} fits)"
        speed = self.speed() if compiled else "eager: no speed is predicted"
        return [first, f"plan: {self.where}; {context}", f"plan: {self.kernels}; {speed}"]

    @property
    def kernels(self) -> str:
        layers = self.choice.setup.sizes.args.n_layer
        named = f"fused kernels in {self.fused} of {layers} layers"
        return named if self.fused else "Inductor's kernels"

    def speed(self) -> str:
        """Return the speed to expect, named a prediction."""
        card = self.place.card
        if not self.seconds:
            return "no speed is predicted: the bandwidth of this card is not known"
        cause = f"{card.bandwidth / 1e9:,.0f} GB/s"
        cause += f" and {card.link / 1e9:.0f} GB/s of PCIe" if self.experts else ""
        speed = 1 / self.seconds
        rounded = f"{speed:,.0f}" if speed >= 999.5 else f"{speed:.3g}"
        return f"about {rounded} tokens/s, predicted from {cause}, not measured"


def plan_of(name: str, place: Place, choice: Choice, published: ModelSizes) -> Plan:
    """Return the plan of a choice. name: of the model. published: its sizes as it is."""
    setup, sizes = choice.setup, choice.setup.sizes
    model, card, fused = sizes.model, place.card, 0
    if card.gpu.runs_kernels and sizes.dtype.itemsize == 2:
        fused = count_fused(model)
    experts, copied = None, 0
    if setup.offload:
        settings = replace(setup.offload, reserve=reserve(setup))
        experts = make_plan(sizes.experts, settings)
        copied = missed_bytes(experts)
    each = layer_seconds(card, fused > 0, bool(experts))
    seconds = token_seconds(card, bytes_per_token(model), sizes.args.n_layer * each, copied)
    return Plan(name, place, choice, published, experts, fused, seconds)


def longest_context(choice: Choice, memory: Memory) -> int:
    """Return how many tokens would fit, if they are more; else 0."""
    setup, least = choice.setup, choice.capacity.length
    if setup.offload:
        return 0
    limit = setup.sizes.args.max_position
    found = largest(least, limit, lambda n: capacity_of(setup, memory, n) is not None) or least
    found = found if found == limit else found // BLOCK * BLOCK
    return found if found > least else 0


def missed_bytes(plan: OffloadPlan) -> int:
    """Return the bytes of experts to copy for a token, if the router chose uniformly."""
    experts = plan.experts
    share = (experts.n_local - plan.slots) / experts.n_expert
    return int(experts.n_active * experts.per_slot * share)


# The commands -------------------------------------------------------------------------------------


def place_of(options: argparse.Namespace, device: torch.device) -> Place | None:
    """Return the card of --gpu, else the device's; None: a CPU. Raises ValueError as --gpu."""
    if options.gpu:
        card = card_of_name(options.gpu)
        return Place(card, Memory(card.memory, HOST), False)
    if device.type != "cuda":
        return None
    free = process_group.least(free_gpu_memory(device))
    return Place(card_here(device), Memory(free, free_host_memory()), True)


def setup_of(options: argparse.Namespace, source) -> Setup:
    """Return what decides a session's memory before its prompts are known: that of a chat."""
    if hasattr(options, "max_batch"):
        setup = server_setup(options, source, options.max_batch or 1)
        return replace(setup, max_batch=options.max_batch or DEFAULT_BATCH["cuda"])
    limit = args_of_checkpoint(source).max_position
    length = min(limit, options.max_seq_len or DEFAULT_CHAT_LENGTH)
    return generation_setup(options, source, None, length, 1, length)


def is_open(options: argparse.Namespace) -> bool:
    """Whether --model names no format: then the plan may choose one."""
    name = options.model and parse_model_name(options.model)
    return bool(name) and name.format is None and not name.is_gguf


def choose_format(
    options: argparse.Namespace, device: torch.device, find_source: Callable[[], object]
) -> None:
    """Add a format to --model, if it names none and the published one does not fit the card.

    find_source: returns what is known of the published model; is called on rank 0.
    """
    place = place_of(options, device)
    if place is None or not is_open(options):
        return

    def find() -> str | None:
        setup = setup_of(options, find_source())
        choice = choose(setup, place.memory, freedom(options, setup, formats=True))
        return choice.mode if choice else None

    if mode := process_group.share(find):
        options.model = f"{parse_model_name(options.model).repo_id}:{mode}"


def settle(options: argparse.Namespace, device: torch.device, setup: Setup) -> int | None:
    """Set options that make the session fit the card, and log the plan in three lines.

    Return the length of a session's context. Without a session that fits nothing changes: the
    plan that follows (memory/commands.py) refuses with advice.
    """
    place = place_of(options, device)
    if place is None:
        return setup.length
    may = freedom(options, setup)
    choice = process_group.share(lambda: choose(setup, place.memory, may))
    if choice is None:
        return setup.length
    if choice.offload and not options.offload:
        options.offload = True
        options.gpu_memory = size_text(choice.offload.gpu_memory or 0)
    if choice.setup.max_batch is not None and choice.offload:
        options.max_batch, options.max_seq_len = 1, choice.setup.length
    if process_group.is_main():
        plan = plan_of(name_of(options), place, choice, setup.sizes)
        for line in plan.lines(options.compile):
            log.info(line)
    return choice.setup.length


def dry_run(
    options: argparse.Namespace, device: torch.device, find_source: Callable[[], object]
) -> list[str]:
    """Return the lines of the plan. Raises ValueError if no session fits, or for a CPU.

    find_source: returns a checkpoint, or what is known of the model; is called on rank 0.
    """
    place = place_of(options, device)
    if place is None:
        raise ValueError("--dry_run plans for a GPU, and there is none here: add --gpu NAME")
    plan = process_group.share(lambda: plan_setup(options, place, setup_of(options, find_source())))
    return plan.lines(not options.eager)


def plan_setup(options: argparse.Namespace, place: Place, setup: Setup) -> Plan:
    """Return the plan for a model. Raises ValueError as `dry_run`."""
    name = name_of(options)
    choice = choose(setup, place.memory, freedom(options, setup, is_open(options)))
    if choice is None:
        raise ValueError(
            f"{name}: no plan fits {place.card.name} with {(place.memory.gpu or 0) / GB:.1f} GB "
            f"and {place.memory.host / GB:.1f} GB of host memory: its weights take "
            f"{setup.sizes.weights / GB:.1f} GB as published; name a larger card"
        )
    return plan_of(name, place, choice, setup.sizes)


def name_of(options: argparse.Namespace) -> str:
    return str(options.model or options.checkpoint_path or "the embedded model")


def freedom(options: argparse.Namespace, setup: Setup, formats: bool = False) -> Freedom:
    """Return what options leave open. formats: the model's name has none."""
    fixed = options.offload or options.speculate == "mtp"
    single = setup.max_batch is None or setup.batch == 1  # a server that offloads has one answer
    can_pack = setup.sizes.format == {"name": PLAIN}
    chats = options.dry_run or getattr(options, "interactive", True)
    context = chats and not options.max_seq_len
    return Freedom(formats and can_pack, not fixed and single, context)
