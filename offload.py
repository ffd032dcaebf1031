"""Experts in host memory: the GPU keeps R slots a layer, and an expert that is missing is copied in when it is chosen.

The way of one token through a layer: what the router chose and is missing is copied into the slots of experts that the
policy gives up; ids become slots, and the ordinary products of model.py read a pool of R experts as if there were no
others. Driven by the device, which keeps the table of slots, a kernel reads host memory, and the host is never asked.
Driven by the host, the router's choice comes to it, which is the one wait of a layer, and copies run by themselves.
Meanwhile the next layer's router has been asked what it would choose for this layer's hidden state (Eliseev & Mazur
2023, section 3.2): these guesses are copied after that, into buffers that all layers share. Weights are never changed,
so that nothing is ever copied back.

    host      [E, bytes] a layer, registered with CUDA: all parts of an expert's w13 and w2 in one blob
    device    one byte pool a layer, part by part [R, ...], so that products find each part as they find it elsewhere;
              and b staging buffers of a blob
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from layers import RMSNorm
from model import Block, Experts, Transformer, top_k
from quantize import Packed
from recording import between
from slots import POLICIES, Cache, DeviceCache, fetch_by_kernel

TIERS = "host", "disk"
DRIVERS = "host", "device"
STAGING = 4  # b, buffers for guesses, as in the paper
LARGE_EXPERT = 16 << 20  # bytes from which guesses pay
PIECE = 4 << 20  # bytes of a guess that are copied at a time
UNDER_WAY = 2  # pieces handed over that have not arrived: a missing expert waits for no more than these
ALIGN = 128  # bytes
PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister
COUNTERS = "hits", "misses", "speculative_hits", "speculative_loads", "bytes"


@dataclass(frozen=True)
class Offload:
    """How experts are kept in host memory: give gpu_experts, or the gpu_memory that it follows from."""

    gpu_experts: int | None = None  # R, slots a layer
    gpu_memory: int | None = None  # bytes that weights, slots and `reserve` may take together, on each GPU
    policy: str = "lru"
    prefetch: int | None = None  # N, guesses a token and layer; None: as `choose_guesses` has it
    driver: str | None = None  # who says what is copied, of DRIVERS; None: the device, but for guesses
    tier: str = "host"  # "disk": what is missing is read from the mapped files, and host memory holds nothing
    reserve: int = 0  # bytes of gpu_memory for the cache and for activations

    def __post_init__(self):
        if (self.gpu_experts is None) == (self.gpu_memory is None):
            raise ValueError("offloading takes --gpu_experts or --gpu_memory: give one of the two")
        for name, known in {"policy": POLICIES, "tier": TIERS, "driver": (None, *DRIVERS)}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: it must be one of {', '.join(filter(None, known))}")
        if self.driver == "device" and (self.prefetch or self.tier == "disk"):
            raise ValueError("--offload_driver device knows neither --prefetch nor --offload_tier disk: leave one out")


# Copies -------------------------------------------------------------------------------------------------------------


@dataclass
class Guess:
    """An expert on its way into a staging buffer."""

    blob: Tensor  # uint8, of the host
    buffer: Tensor  # uint8, of the device
    counts: dict[str, int]  # of the layer that it is for
    copied: int = 0  # bytes

    def copy(self, count: int) -> None:
        """Copy the next so many bytes."""
        piece = slice(self.copied, min(self.copied + count, len(self.blob)))
        self.buffer[piece].copy_(self.blob[piece], non_blocking=True)
        self.counts["bytes"] += piece.stop - piece.start
        self.copied = piece.stop


class Link:
    """Copies to the device, on a stream of their own, and the staging buffers; plain copies on the CPU.

    A copy that was handed to the GPU cannot be taken back or overtaken. So guesses are handed over piece by piece while
    the host waits for a router (`read`). Once that has spoken, what is left of wrong guesses is dropped, and a missing
    expert waits for UNDER_WAY pieces at most; with one alone the link would be idle until the host has seen it arrive.
    """

    def __init__(self, device: torch.device, buffers: int, size: int):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(buffers)]
        self.held: dict[tuple[int, int], Guess] = {}  # by layer and expert, oldest first
        self.unfinished: deque[tuple[int, int]] = deque()
        self.under_way: deque[torch.cuda.Event] = deque()  # of pieces handed over, in their order

    def here(self):
        """A context in which copies are this link's."""
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def after_compute(self) -> None:
        """Copies from here on come after what the device was told to compute, which may still read their targets."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())

    def before_compute(self) -> None:
        """What the device is told to compute from here on comes after the copies so far."""
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)

    def read(self, values: Tensor) -> list[int]:
        """The numbers on the host: the one wait of a layer, in which guesses go on."""
        if not self.stream:
            return values.tolist()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        while not copied.query():
            self.go_on()
        return host.tolist()

    def go_on(self) -> None:
        """Hand over pieces of guesses, until UNDER_WAY of them have not arrived; on the CPU all of them."""
        while self.under_way and self.under_way[0].query():
            self.under_way.popleft()
        while self.unfinished and len(self.under_way) < UNDER_WAY:
            guess = self.held[self.unfinished[0]]
            with self.here():
                guess.copy(PIECE)
                if self.stream:
                    self.under_way.append(torch.cuda.Event())
                    self.under_way[-1].record()
            if guess.copied == len(guess.blob):
                self.unfinished.popleft()

    def stage(self, key: tuple[int, int], blob: Tensor, counts: dict[str, int]) -> None:
        """Begin to copy a guess, in place of the oldest where no buffer is free."""
        if not self.free:
            oldest = next(iter(self.held))
            self.free.append(self._forget(oldest).buffer)
        counts["speculative_loads"] += 1
        self.held[key] = Guess(blob, self.free.pop()[: len(blob)], counts)
        self.unfinished.append(key)

    def take(self, key: tuple[int, int]) -> Guess | None:
        """A guess that has come true, complete behind what was handed over so far; None where it was not guessed."""
        if key not in self.held:
            return None
        guess = self._forget(key)
        guess.copy(len(guess.blob))
        return guess

    def drop_unfinished(self) -> None:
        for key in [*self.unfinished]:
            self.give_back(self._forget(key))

    def give_back(self, guess: Guess) -> None:
        """Free its buffer: what is copied into it next comes after all copies out of it handed over so far."""
        self.free.append(guess.buffer)

    def _forget(self, key: tuple[int, int]) -> Guess:
        if key in self.unfinished:
            self.unfinished.remove(key)
        return self.held.pop(key)


# A layer ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """One part of an expert: a tensor of its w13 or w2."""

    name: str  # of the model's parameter [E, ...]
    shape: tuple[int, ...]  # of one expert's
    dtype: torch.dtype
    start: int  # byte of the blob

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Blobs = Callable[[int], Tensor]  # an expert -> all its parts, uint8 on the host
Reader = Callable[..., Tensor]  # parameter's name, device, expert=None -> it, or that expert's alone [1, ...]


def lay_out(path: str, experts: Experts, read: Reader) -> tuple[list[Stored], int]:
    """The parts of each expert of a layer, as its first one is stored, and the size of a blob."""
    parts, size = [], 0
    for name, _ in experts.named_parameters():
        tensor = read(f"{path}.{name}", "cpu", 0)
        parts.append(Stored(f"{path}.{name}", tuple(tensor.shape[1:]), tensor.dtype, size))
        size += -(-parts[-1].nbytes // ALIGN) * ALIGN
    return parts, size


class OffloadedExperts(nn.Module):
    """`Experts` (or a rank's `LocalExperts`) over R slots: x [T, D], expert_indices, expert_weights [T, A] -> [T, D].

    Nothing that a product computes depends on where an expert lies, nor on which others are there.
    """

    def __init__(self, experts: Experts, everyone: int, layer: int, parts: list[Stored], blobs: Blobs, slots: int,
                 policy: str, link: Link, device: torch.device, readable: bool = False,
                 host: Tensor | None = None):  # fmt: skip
        """readable: whether kernels of the device can read `blobs`, whole words of them.

        host: uint8 [E, bytes], from which the device itself is to copy; None: the host says what is copied.
        """
        super().__init__()
        self.experts, self.layer, self.parts, self.blobs, self.link = experts, layer, parts, blobs, link
        self.everyone, self.total = everyone, experts.n_expert  # E of all ranks and of this one, which begins at
        self.first, self.cache = getattr(experts, "first", 0), Cache(self.total, slots, policy)
        self.guesses = 0  # N, and of which layer: MoE and experts, in a list, or they would be this one's modules
        self.ahead: list[nn.Module] = []
        self.counts, self.device = dict.fromkeys(COUNTERS, 0), device
        self.ids = torch.arange(slots, device=device) if readable and device.type == "cuda" else None  # of slots
        size = len(blobs(0))
        self.pool = torch.empty(slots * size, dtype=torch.uint8, device=device)
        self.sizes = [n for part in parts for n in (part.start, part.nbytes)]
        self.slots: list[Tensor] = []  # uint8 [R, bytes] of each part
        for part in parts:
            here = self.pool[slots * part.start :][: slots * part.nbytes]
            self.slots.append(here.view(slots, -1))
            # Typed once and for all: no compiled code knows that the pool is written (by copies, or by `slots.page`).
            typed = nn.Parameter(here.view(part.dtype).view(slots, *part.shape), requires_grad=False)
            path, leaf = part.name.rsplit(".", 1)
            setattr(experts.get_submodule(path.rsplit(".", 1)[1]), leaf, typed)
        for slot in range(slots):
            self._fill(slot, blobs(slot))
        experts.n_expert, experts.read_of = slots, everyone * slots / self.total
        self.slot_map = self._map(self.cache.slot)  # stays where it is, for graphs that read it
        self.host = host
        self.table = None if host is None else DeviceCache(self.total, slots, policy, device)

    def _map(self, slots: dict[int, int]) -> Tensor:
        """int64 [E of all ranks]: each expert's slot, R for those that are not in `slots`."""
        places = [slots.get(n, self.experts.n_expert) for n in range(-self.first, self.everyone - self.first)]
        # Pinned, so that the host need not wait for what is before it in the stream.
        return torch.tensor(places, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)

    def fits(self, pairs: int) -> bool:
        """Whether so many experts, of one token or several, are in the slots at once, whichever they are."""
        return pairs <= self.experts.n_expert

    def page(self, expert_indices: Tensor) -> Tensor:
        """Driven by the device: have what is chosen in slots -> slots by expert, int64 [E of all ranks]."""
        chosen = expert_indices.flatten() - self.first  # others' experts are no numbers of this rank's
        slot_map = self.table.page(chosen, self.host, self.pool, self.sizes)
        if self.total == self.everyone:
            return slot_map
        others = self.first, self.everyone - self.first - self.total
        return torch.nn.functional.pad(slot_map, others, value=self.experts.n_expert)

    def _fill(self, slot: int, blob: Tensor) -> None:
        """Copy an expert into a slot: by one kernel, or part by part, where each copy costs 3.5 us beside its bytes."""
        if self.ids is not None:
            return fetch_by_kernel(self.ids[:1], self.ids[slot : slot + 1], blob[None], self.pool, self.sizes)
        for part, slots in zip(self.parts, self.slots, strict=True):
            slots[slot].copy_(blob[part.start : part.start + part.nbytes], non_blocking=True)

    def forward(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor) -> Tensor:
        if self.table and self.fits(expert_indices.numel()):
            return self.multiply(x, expert_indices, expert_weights, self.page(expert_indices))
        waves, guesses = self.plan(self.ask(x, expert_indices), expert_indices.numel())
        if len(waves) > 1:
            return self.in_waves(x, expert_indices, expert_weights, waves)
        return self.multiply(x, expert_indices, expert_weights, self.bring(waves[0], guesses))

    def ask(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        """What the host has to know, int64: expert_indices, then the next layer's guesses, the likeliest first."""
        if not self.ahead:
            return expert_indices.flatten()
        guesses = top_k(self.ahead[0].score(x)[0], self.guesses)[1]
        return torch.cat((expert_indices.flatten(), guesses.t().flatten()))

    def plan(self, asked: Tensor, pairs: int) -> tuple[list[list[int]], list[int]]:
        """What `ask` asked, waited for: the experts needed, in waves of at most R, and the next layer's guesses.

        Those that are there come first, then the others, each in the order in which they were chosen.
        """
        asked = self.link.read(asked)
        if self.table:
            self.cache = self.table.read()
        chosen, guesses = asked[:pairs], asked[pairs:]
        needed = [n - self.first for n in dict.fromkeys(chosen) if self.first <= n < self.first + self.total]
        self.counts["hits"] += sum(expert in self.cache.slot for expert in needed)
        needed.sort(key=lambda expert: expert not in self.cache.slot)
        slots = self.experts.n_expert
        return [needed[n : n + slots] for n in range(0, len(needed) or 1, slots)], guesses

    def bring(self, wave: Sequence[int], guesses: Sequence[int] = (), alone: bool = False) -> Tensor:
        """Have the experts of a wave in slots, then begin with the guesses -> slots by expert, int64 [E].

        alone: of this wave's experts only; `note_slots` is to follow the last wave.
        """
        missing = [expert for expert in wave if expert not in self.cache.slot]
        if missing:
            self.link.after_compute()
            with self.link.here():
                for expert in missing:
                    slot, guess = self.cache.replace(expert, wave), self.link.take((self.layer, expert))
                    blob = guess.buffer if guess else self.blobs(expert)
                    self._fill(slot, blob)
                    self.counts["speculative_hits" if guess else "misses"] += 1
                    self.counts["bytes"] += 0 if guess else len(blob)
                    if guess:
                        self.link.give_back(guess)
            self.link.before_compute()
        for expert in wave:
            self.cache.use(expert)
        self.link.drop_unfinished()
        if guesses:
            self.ahead[1].guess(guesses)
        if alone:
            return self._map({expert: self.cache.slot[expert] for expert in wave})
        if missing or self.table:
            self.note_slots()
        return self.slot_map

    def note_slots(self) -> None:
        """Tell the device what the host has in which slot."""
        if self.table:
            self.table.write(self.cache)
        self.slot_map.copy_(self._map(self.cache.slot))

    def bring_at_once(self, asked: Tensor, pairs: int) -> None:
        """What the host does for so few tokens that their experts are in the slots at once."""
        waves, guesses = self.plan(asked, pairs)
        self.bring(waves[0], guesses)

    def guess(self, experts: Sequence[int]) -> None:
        """Begin to copy experts of this layer that are not there, as many as there are staging buffers."""
        own = [n - self.first for n in dict.fromkeys(experts) if self.first <= n < self.first + self.total]
        wanted = [n for n in own if n not in self.cache.slot][: len(self.link.free) + len(self.link.held)]
        for expert in wanted:  # those that are held count among the newest
            if (key := (self.layer, expert)) in self.link.held:
                self.link.held[key] = self.link.held.pop(key)
        for expert in wanted:
            if (self.layer, expert) not in self.link.held:
                self.link.stage((self.layer, expert), self.blobs(expert), self.counts)
        self.link.go_on()

    def multiply(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor, slot_map: Tensor) -> Tensor:
        """The ordinary product, of experts that all are there."""
        experts, slots = self.experts, slot_map[expert_indices]
        if self.total < self.everyone:  # a rank's LocalExperts
            return experts.of_own(x, slots, slots < experts.n_expert, expert_weights)
        return experts(x, slots, expert_weights)

    def in_waves(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor, waves: list[list[int]]) -> Tensor:
        """More experts than slots, wave by wave. The sum over A comes last, so that waves do not show in it."""
        y = None
        for wave in waves:
            slots = self.bring(wave, alone=True)[expert_indices]
            found = self.experts.each(x, slots)
            y = found if y is None else torch.where((slots < self.experts.n_expert).unsqueeze(-1), found, y)
        self.note_slots()
        local = expert_indices - self.first
        expert_weights = torch.where((local >= 0) & (local < self.total), expert_weights, 0.0)
        return self.experts.combine(y, expert_weights).to(x.dtype)


# Compiled, driven by the host: a block in two pieces, and between them the host. Recorded, the second piece of a block
# and the first of the next are one graph. Calls with more experts than slots, which prompts make, are eager in between.


def _begin(block: Block, x: Tensor, normed: Tensor, context):
    """`Block.forward` up to the experts -> x, what they multiply, expert_indices, expert_weights, `ask`'s."""
    x, h, scores = block.join(x, block.attention(normed, context), block.ffn_norm, block.ffn.router)
    h = h.flatten(0, 1)
    expert_indices, expert_weights = block.ffn.route(scores)
    return x, h, expert_indices, expert_weights, block.ffn.experts.ask(h, expert_indices)


def _multiply(block: Block, x: Tensor, h: Tensor, expert_indices: Tensor, expert_weights: Tensor, slot_map: Tensor,
              next_norm: RMSNorm):  # fmt: skip
    """The rest of it."""
    return _end(block, x, h, block.ffn.experts.multiply(h, expert_indices, expert_weights, slot_map), next_norm)


def _end(block: Block, x: Tensor, h: Tensor, y: Tensor, next_norm: RMSNorm):
    x, normed, _ = block.join(x, block.ffn.finish(h, y), next_norm)
    return x, normed


def compile_block(compile: Callable) -> Callable:
    """`Block.forward` of an offloaded model, compiled: whole where the host is not asked, else in pieces."""
    begin, multiply, whole = compile(_begin), compile(_multiply), compile(Block.forward)

    def forward(block: Block, x: Tensor, normed: Tensor, context, next_norm: RMSNorm):
        experts = getattr(block.ffn, "experts", None)
        pairs = 0 if experts is None else x.shape[0] * x.shape[1] * block.ffn.n_active
        if experts is None or (experts.table and experts.fits(pairs)):
            return whole(block, x, normed, context, next_norm)
        x, h, *chosen, asked = begin(block, x, normed, context)
        if not experts.fits(pairs):
            waves, guesses = experts.plan(asked, pairs)
            if len(waves) > 1:
                return *_end(block, x, h, experts.in_waves(h, *chosen, waves), next_norm), *chosen
            experts.bring(waves[0], guesses)
        else:
            between(lambda: experts.bring_at_once(asked, pairs))
        return *multiply(block, x, h, *chosen, experts.slot_map, next_norm), *chosen

    return forward


# A model ------------------------------------------------------------------------------------------------------------


def choose_slots(settings: Offload, total: int, active: int, resident: int, slot: int) -> int:
    """R. total: E of this rank; resident: bytes on the GPU beside slots; slot: bytes of one slot in every layer.

    Raises ValueError where it does not work, with what would.
    """
    least = min(active, total)  # a token's experts have to be there at once
    if settings.gpu_experts is None:
        found = (settings.gpu_memory - resident) // slot
        if found < least:
            need = (resident + least * slot) / 1e9
            raise ValueError(
                f"--gpu_memory {settings.gpu_memory / 1e9:.4g}GB: what stays on the GPU takes {resident / 1e9:.4g} GB, "
                f"{least} experts a layer {least * slot / 1e9:.4g} GB: give at least {need + 5e-4:.3f}GB"
            )
        return min(found, total)
    if not least <= settings.gpu_experts <= total:
        raise ValueError(f"--gpu_experts {settings.gpu_experts}: it must be from {least} (active) to {total} (all)")
    return settings.gpu_experts


def choose_guesses(settings: Offload, total: int, size: int, device: torch.device) -> int:
    """N, where it is not given. total: E of this rank; size: bytes of an expert.

    Guesses need the host, whose wait takes 0.1 ms a layer on an H200, and fill the time in which nothing is copied.
    With experts of 66 MB (Mixtral in 2 bits) the host with two guesses is faster than the device; with 2.4 MB
    (Qwen3-30B-A3B in 4) the device makes twice the tokens.
    """
    if settings.prefetch is not None:
        return settings.prefetch
    possible = settings.driver != "device" and settings.tier != "disk" and device.type == "cuda"
    return 2 if possible and settings.gpu_experts != total and size >= LARGE_EXPERT else 0


def register(host: Tensor, owner: object, device: torch.device) -> bool:
    """Register host memory with CUDA for the owner's life, so that copies from it run by themselves; or warn.

    PyTorch's own pinned memory comes in powers of two: up to twice of what is asked for.
    """
    error = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, PORTABLE_AND_MAPPED)
    if int(error) == 0:
        undo = weakref.finalize(owner, torch.cuda.cudart().cudaHostUnregister, host.data_ptr())
        undo.atexit = False  # the process's end does it
        return True
    with suppress(RuntimeError):  # CUDA also tells the next kernel of this error: one that is not needed
        torch.empty(1, device=device).zero_()
    print(f"warning: {host.nbytes / 1e9:.1f} GB of host memory cannot be registered with CUDA ({error}): "
          "copies will be slower; raise the limit of locked memory", file=sys.stderr)  # fmt: skip
    return False


def apply(model: Transformer, settings: Offload, device: torch.device, dtype: torch.dtype, read: Reader) -> str:
    """Put the experts of a model on the meta device into host memory, and R of each layer on the device -> the plan.

    dtype: of weights in no number format. read: parameters of this rank. Raises ValueError, before much is read, for a
    model without experts and as `choose_slots`.
    """
    blocks = [(n, block) for n, block in enumerate(model.layers) if hasattr(block.ffn, "experts")]
    if not blocks:
        raise ValueError("--offload: no layer of this model has experts")
    total = blocks[0][1].ffn.experts.n_expert
    if not 0 <= (settings.prefetch or 0) <= model.args.n_expert:
        raise ValueError(
            f"--prefetch {settings.prefetch}: it must be from 0 to {model.args.n_expert}, the experts of a layer"
        )
    layouts = {n: lay_out(f"layers.{n}.ffn.experts", block.ffn.experts, read) for n, block in blocks}
    sizes = [size for _, size in layouts.values()]
    guesses = choose_guesses(settings, total, max(sizes), device)
    experts = {id(p) for _, block in blocks for p in block.ffn.experts.parameters()}
    packed = {id(p) for m in model.modules() if isinstance(m, Packed) for p in m.parts().values()}
    kept = sum(p.nbytes if id(p) in packed else p.numel() * dtype.itemsize
               for p in model.parameters() if id(p) not in experts)  # fmt: skip
    buffers = max(STAGING, guesses) if guesses else 0
    staging = buffers * max(sizes)
    resident = kept + staging + settings.reserve
    slots = choose_slots(settings, total, model.args.n_active, resident, sum(sizes))
    on_host = settings.tier == "host"
    host = torch.empty(total * sum(sizes) if on_host else 0, dtype=torch.uint8)
    link, start, above = Link(device, buffers, max(sizes)), 0, None
    reachable = on_host and all(part.nbytes % 4 == 0 for parts, _ in layouts.values() for part in parts)
    if on_host and device.type == "cuda":
        reachable = register(host, link, device) and reachable
    if settings.driver == "device" and not reachable:
        raise ValueError("--offload_driver device: registered memory in steps of 4 bytes is needed: leave it out")
    driver = settings.driver or ("device" if reachable and not guesses and device.type == "cuda" else "host")
    for n, block in blocks:
        parts, size = layouts[n]
        if on_host:
            blobs = host[start : start + total * size].view(total, size)
            for part in parts:
                whole = read(part.name, "cpu").reshape(total, -1).view(torch.uint8)
                blobs[:, part.start : part.start + part.nbytes] = whole
            start, source = start + total * size, blobs.__getitem__
        else:
            source = FromFiles(parts, size, read)
        block.ffn.experts = offloaded = OffloadedExperts(
            block.ffn.experts, model.args.n_expert, n, parts, source, slots, settings.policy, link, device, reachable,
            blobs if driver == "device" else None,
        )  # fmt: skip
        if above is not None and guesses:
            above.guesses, above.ahead = guesses, [block.ffn, offloaded]
        above = offloaded
    model.compile_block, model.host_driven = compile_block, driver == "host"
    model.recordable = lambda tokens: tokens * model.args.n_active <= slots
    token = model.args.n_active * sum(sizes) * (1 - slots / total) * total / model.args.n_expert
    gb = lambda size: f"{size / 1e9:.4g} GB"  # noqa: E731
    return (
        f"offload: {slots} of {total} experts a layer on the device ({gb(slots * sum(sizes))}), with {gb(kept)} of "
        f"other weights, {gb(staging)} for guesses, {gb(settings.reserve)} set aside for cache and activations; "
        f"{gb(host.nbytes)} in host memory; {token / 1e6:.4g} MB a token to copy if all experts were chosen alike"
    )


class FromFiles:
    """Blobs read from a checkpoint's mapped files whenever they are asked for."""

    def __init__(self, parts: list[Stored], size: int, read: Reader):
        self.parts, self.size, self.read = parts, size, read

    def __call__(self, expert: int) -> Tensor:
        blob = torch.empty(self.size, dtype=torch.uint8)
        for part in self.parts:
            stored = self.read(part.name, "cpu", expert).reshape(-1).view(torch.uint8)
            blob[part.start : part.start + part.nbytes] = stored
        return blob


def counters(model: Transformer) -> list[dict[str, int]]:
    """What has happened so far in each layer that has experts (COUNTERS); bytes are those copied to the device."""
    found = []
    for module in model.modules():
        if isinstance(module, OffloadedExperts):
            found.append(dict(module.counts))
            if module.table:
                _, hits, misses = module.table.found.tolist()
                also = {"hits": hits, "misses": misses, "bytes": misses * module.host.shape[1]}
                found[-1] |= {name: found[-1][name] + count for name, count in also.items()}
    return found
