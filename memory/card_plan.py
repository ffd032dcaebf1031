"""The plan for a card: what `generate.py` and `serve.py` choose on a GPU, and its three lines.

`--model NAME` without further options comes here. A given option is never changed.
"""

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from cli.generate_options import plan_lengths
from cli.model_name import PLAIN, parse_model_name
from cli.options import DEFAULT_CHAT_LENGTH, check_length
from cli.report import in_bytes, in_tokens
from cli.serve_options import default_batch
from formats.quantizer import DTYPES
from gguf_files.opening import open_source
from host.free_memory import free_host_memory
from memory.advice import largest, size_text
from memory.cards import HOST, Card, card_here, card_of_name, layer_seconds, token_seconds
from memory.choice import Choice, Freedom, capacity_of, choose
from memory.commands import generation_setup, server_setup
from memory.plan import Memory, ModelSizes, Setup, fit, reserve
from models import args_of_checkpoint
from offload.plan import OffloadPlan, make_plan
from ops.plain.attention import BLOCK
from parallel import process_group
from runtime.kernel_choice import count_fused
from runtime.memory import LEAST_CONTEXT, free_gpu_memory
from runtime.weights import bytes_per_token

UNLIMITED = Memory(1 << 60, 1 << 60)

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
        return format_of(self.choice.setup.sizes)

    @property
    def where(self) -> str:
        """Where the weights are."""
        sizes = self.choice.setup.sizes
        beside = f"; a table in host memory, {in_bytes(sizes.tables)}" if sizes.tables else ""
        if self.experts is None:
            return f"{in_bytes(sizes.weights)} of weights on the GPU{beside}"
        held, experts = in_bytes(self.experts.nbytes), self.experts.experts
        return (
            f"--offload, {self.experts.slots} of {experts.n_local} experts a layer and the other "
            f"weights on the GPU, {held}; all experts in host memory, "
            f"{in_bytes(experts.host_bytes)}{beside}"
        )

    def lines(self, compiled: bool = True) -> list[str]:
        """Return the plan in three lines."""
        card, setup = self.place.card, self.choice.setup
        free = in_bytes(self.place.memory.gpu or 0) + " free" * self.place.is_here
        first = f"plan: {card.name}, {free}: {self.name} in {self.format}"
        if self.choice.mode:
            whole = in_bytes(self.published.weights)
            first += f" ({whole} in {format_of(self.published)})"
        context = f"context of {in_tokens(self.choice.capacity.length)}"
        if setup.max_batch is None and setup.batch > 1:
            context += f", {setup.batch} sequences"
        if setup.max_batch is not None:
            rows = self.choice.capacity.rows
            context += f", {rows} conversation{'s' * (rows > 1)}"
        elif more := longest_context(self.choice, self.place.memory):
            context += f" (--max_seq_len {more} fits)"
        how = f"{self.kernels}; {self.speed()}" if compiled else "eager: no speed is predicted"
        return [first, f"plan: {self.where}; {context}", f"plan: {how}"]

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


def format_of(sizes: ModelSizes) -> str:
    """Return the name of a model's format; of one without packed weights its --dtype."""
    if "modules" in sizes.format:
        return sizes.format["name"]
    return next(name for name, dtype in DTYPES.items() if dtype == sizes.dtype)


def plan_of(
    name: str, place: Place, choice: Choice, published: ModelSizes, kernels: str = "auto"
) -> Plan:
    """Return the plan of a choice.

    name: of the model. published: its sizes as it is. kernels: as --decode_kernels says.
    """
    setup, sizes = choice.setup, choice.setup.sizes
    model, card, fused = sizes.model, place.card, 0
    if card.gpu.runs_kernels and sizes.dtype.itemsize == 2:
        fused = count_fused(model, kernels)
    experts, copied = None, 0
    if setup.offload:
        settings = replace(setup.offload, reserve=reserve(setup))
        experts = make_plan(sizes.experts, settings)
        copied = experts.missed_bytes
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


# The commands -------------------------------------------------------------------------------------


def place_of(options: argparse.Namespace, device: torch.device) -> Place | None:
    """Return the card of --gpu, else the device's; None: a CPU. Raises ValueError as --gpu.

    All ranks get the same memory, and so make the same plan.
    """
    if options.gpu:
        card = card_of_name(options.gpu)
        return Place(card, Memory(card.memory, HOST), False)
    if device.type != "cuda":
        return None
    free = process_group.least(free_gpu_memory(device))
    return Place(card_here(device), Memory(free, process_group.share(free_host_memory)), True)


def setup_of(options: argparse.Namespace, source) -> Setup:
    """Return what decides a session's memory before its prompts are known: that of a chat.

    Raises ValueError for a length above the model's limit, a draft model that is none, or settings
    of offloading that fit no card.
    """
    limit = args_of_checkpoint(source).max_position
    check_length(options, limit)
    options = argparse.Namespace(**vars(options))
    if hasattr(options, "max_batch"):
        given, options.max_batch = options.max_batch, default_batch(options, "cuda")
        return check_possible(server_setup(options, source, given or 1))
    least = plan_lengths(1, options, limit)  # sets --max_new_tokens
    length = options.max_seq_len or max(min(limit, DEFAULT_CHAT_LENGTH), least)
    drafter = options.draft_checkpoint_path and open_source(options.draft_checkpoint_path)
    drafts = drafter or options.speculate not in (None, "off")
    batch = 1  # a chat has the positions of several short answers
    if options.max_seq_len and not (drafts or options.interactive):
        batch = min(options.num_samples, options.batch_size)
    setup = generation_setup(options, source, drafter, length, batch, length)
    # A prompt may fill any context that is tried.
    return check_possible(replace(setup, longest=None))


def check_possible(setup: Setup) -> Setup:
    """Return the setup. Raises ValueError if no card could have even its shortest session."""
    fit(replace(setup, length=1), UNLIMITED)
    return setup


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
    choice = choose(setup, place.memory, freedom(options, setup))
    if choice is None:
        return setup.length
    if choice.offload and not options.offload:
        options.offload = True
        options.gpu_memory = size_text(choice.offload.gpu_memory or 0)
    if choice.setup.max_batch is not None and choice.offload:
        options.max_batch, options.max_seq_len = 1, choice.setup.length
    if process_group.is_main():
        plan = plan_of(name_of(options), place, choice, setup.sizes, options.decode_kernels)
        for line in plan.lines(options.compile):
            log.info(line)
    return choice.setup.length


def dry_run(
    options: argparse.Namespace, device: torch.device, find_source: Callable[[], object]
) -> list[str]:
    """Return the lines of the plan. Raises ValueError if no session fits, or for a CPU.

    find_source: returns a checkpoint, or what is known of the model; is called on all ranks.
    """
    place = place_of(options, device)
    if place is None:
        raise ValueError("--dry_run plans for a GPU, and there is none here: add --gpu NAME")
    plan = plan_setup(options, place, setup_of(options, find_source()))
    return plan.lines(not options.eager)


def plan_setup(options: argparse.Namespace, place: Place, setup: Setup) -> Plan:
    """Return the plan for a model. Raises ValueError as `dry_run`."""
    name = name_of(options)
    choice = choose(setup, place.memory, freedom(options, setup, is_open(options)))
    if choice is None:
        limiting = ["max_seq_len", "gpu_memory", "gpu_experts", "max_batch", "max_new_tokens"]
        limiting += ["draft_checkpoint_path", *["batch_size"] * (setup.batch > 1)]
        given = [f"--{name}" for name in limiting if vars(options).get(name)]
        others = f", or another {' and '.join(given)}" if given else ""
        raise ValueError(
            f"{name}: no plan fits {place.card.name} with {in_bytes(place.memory.gpu or 0)} "
            f"and {in_bytes(place.memory.host)} of host memory: its weights take "
            f"{in_bytes(setup.sizes.weights)} as published; name a larger card{others}"
        )
    plan = plan_of(name, place, choice, setup.sizes, options.decode_kernels)
    if options.decode_kernels == "fused" and not plan.fused:
        why = f"these kernels do not compute {name} in {plan.format} on {place.card.name}"
        raise ValueError(f"--decode_kernels fused: {why}: use auto")
    return plan


def name_of(options: argparse.Namespace) -> str:
    return str(options.model or options.checkpoint_path or "the embedded model")


def freedom(options: argparse.Namespace, setup: Setup, formats: bool = False) -> Freedom:
    """Return what options leave open. formats: the model's name has none."""
    fixed = options.offload or options.speculate == "mtp"
    single = setup.max_batch is None or setup.batch == 1  # a server that offloads has one answer
    can_pack = setup.sizes.format == {"name": PLAIN}
    chats = options.dry_run or getattr(options, "interactive", True)
    context = 0
    if chats and not options.max_seq_len:
        is_answer = vars(options).get("max_new_tokens") and not options.interactive
        context = max(LEAST_CONTEXT, options.max_new_tokens + 1 if is_answer else 0)
    return Freedom(formats and can_pack, not fixed and single, context)
