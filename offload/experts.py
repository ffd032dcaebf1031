"""Experts in host memory: the GPU has R slots per layer, and copies missing experts into them.

A layer computes a few tokens in four steps, all of them on the device (ops/step/):

1. The table of slots tells which of the chosen experts are cached. Of those that miss, a part is
   the CPU's share; the GPU writes the request into pinned memory. The rest gets slots.
2. A kernel copies the rest over the link.
3. The ordinary products of model.py, or the fused kernels, run on a pool of R experts.
4. The CPU has multiplied its share in place meanwhile (offload/cpu_share.py); its sum is added.

Calls that may choose more experts than there are slots, prompts, run in waves: the host reads the
chosen ids, and steps 1 to 3 run for R / 2 experts at a time, while the next ones are copied.
Weights never change, so nothing is copied back.

Memory:

    host    per layer [E, bytes], registered with CUDA: one blob per expert, all tensors of its w13
            and w2
    device  per layer one byte pool, tensor by tensor [R, ...], as the products expect them
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model import Experts, Transformer, group_by_expert, weighted_sum
from offload.cache import DeviceExpertCache
from offload.copies import load_in_turn
from ops.step.cpu_share import MAX_TOKENS, Mailbox, add_answer
from ops.step.expert_paging import MAX_PAIRS, fetch, fetch_plainly, fetches_by_kernel, page

ALIGN = 128  # bytes
COUNTERS = "hits", "misses", "on_cpu", "bytes"
# Programs that copy a wave: a few, so that another wave's products have the other multiprocessors.
WAVE_PROGRAMS = 64
# The copy engine copies a wave's tensors of at least as many bytes. It reads the link faster than a
# kernel, but each tensor of each expert is a copy of its own.
ENGINE_BYTES = 1 << 21

# (name, device, expert=None) -> a parameter, or that of one expert [1, ...]
Reader = Callable[..., Tensor]


@dataclass(frozen=True)
class BlobPart:
    """One tensor of an expert's w13 or w2 within its blob."""

    name: str  # the model's parameter [E, ...]
    shape: tuple[int, ...]  # without E
    dtype: torch.dtype
    start: int  # byte offset in the blob

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def in_host(self, blobs: Tensor) -> Tensor:
        """Return the part of all experts [E, ...], a view of uint8 [E, bytes]."""
        part = blobs[:, self.start : self.start + self.nbytes]
        return part.view(self.dtype).unflatten(1, self.shape or (1,)).view(-1, *self.shape)


def layout_of(parts: Sequence[BlobPart]) -> list[int]:
    """Return start and bytes of each part, as `fetch` takes them."""
    return [n for part in parts for n in (part.start, part.nbytes)]


def plan_blob(path: str, experts: Experts, read: Reader) -> tuple[list[BlobPart], int]:
    """Return the parts of a layer's blobs, and a blob's bytes. Reads the first expert."""
    parts, size = [], 0
    for name, _ in experts.named_parameters():
        tensor = read(f"{path}.{name}", "cpu", 0)
        parts.append(BlobPart(f"{path}.{name}", tuple(tensor.shape[1:]), tensor.dtype, size))
        size += -(-parts[-1].nbytes // ALIGN) * ALIGN
    return parts, size


def set_parts(experts: Experts, parts: Sequence[BlobPart], tensors: Sequence[Tensor]) -> None:
    """Make tensors the parameters of experts, which the parts name."""
    for part, tensor in zip(parts, tensors, strict=True):
        path, leaf = part.name.rsplit(".", 1)
        typed = nn.Parameter(tensor, requires_grad=False)
        setattr(experts.get_submodule(path.split(".experts.", 1)[1]), leaf, typed)


@dataclass(frozen=True)
class LayerStorage:
    """One layer's experts in host memory, and the settings of its cache."""

    total_experts: int  # E of all ranks
    parts: list[BlobPart]
    blobs: Tensor  # uint8 [E of this rank, bytes], on the host
    cached: list[int]  # the R experts that are cached at the start, least recently used first
    device: torch.device
    owner: object  # while it lives, blobs are registered with CUDA

    @property
    def slots(self) -> int:
        """R."""
        return len(self.cached)


class Wave(NamedTuple):
    """Experts of a prompt that are multiplied at once."""

    slots: dict[int, int]  # each expert's
    copied: dict[int, int]  # each expert's that has to be copied
    pairs: int  # how often tokens have chosen them


class OffloadedExperts(nn.Module):
    """`Experts` (or a rank's `tp.ShardedExperts`) over R slots: same call, same result.

    If the CPU has no share, the result does not depend on which experts are cached, nor on their
    slots. Otherwise sums have another order.
    """

    def __init__(self, experts: Experts, storage: LayerStorage):
        super().__init__()
        self.experts, self.storage = experts, storage
        self.n_local, self.first = experts.n_expert, getattr(experts, "first", 0)
        self.cache = DeviceExpertCache(self.n_local, storage.cached, storage.device)
        self.layout = layout_of(storage.parts)
        # Of tensors that a kernel copies for a wave, and of those that the copy engine copies
        small, large = [], []
        for part in storage.parts:
            (small if part.nbytes < ENGINE_BYTES else large).append(part)
        self.layouts = layout_of(small), layout_of(large)
        self.make_pool()
        self.fill_slots(torch.tensor(storage.cached), torch.arange(storage.slots))
        experts.choose_from = storage.total_experts * storage.slots / self.n_local
        experts.n_expert = storage.slots
        self.box: Mailbox | None = None  # of requests to the CPU: `offload.cpu_share.share_layers`

    def make_pool(self) -> None:
        """Allocate R slots and make the experts' parameters views of them."""
        slots, size = self.storage.slots, self.storage.blobs.shape[1]
        self.pool = torch.empty(slots * size, dtype=torch.uint8, device=self.storage.device)
        # View as the dtype here, not in forward: Dynamo does not see who writes the pool.
        views = [
            self.pool[slots * part.start :][: slots * part.nbytes]
            .view(part.dtype)
            .view(slots, *part.shape)
            for part in self.storage.parts
        ]
        set_parts(self.experts, self.storage.parts, views)

    def fill_slots(self, experts: Tensor, slots: Tensor) -> None:
        """Copy experts into slots, int64 [N] each."""
        pair = (ids.to(self.pool.device) for ids in (experts, slots))
        fetch(*pair, self.storage.blobs, self.pool, self.layout)

    @property
    def is_capturable(self) -> bool:
        """Whether a kernel copies experts, so that a step needs nothing of the host's Python."""
        return fetches_by_kernel(self.storage.blobs, self.pool, self.layout)

    def fits(self, tokens: int, active: int) -> bool:
        """Return whether any choice of this many tokens fits into the slots at once."""
        return tokens * active <= min(self.storage.slots, MAX_PAIRS)

    def mailbox(self, tokens: int) -> Mailbox | None:
        """Return where to ask the CPU for its share of this many tokens; None: it has none."""
        return self.box if tokens <= MAX_TOKENS else None

    def forward(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor) -> Tensor:
        if not self.fits(*expert_indices.shape):
            return self.multiply_in_waves(x, expert_indices, expert_weights)
        box = list(self.mailbox(len(x)) or ())
        slots = self.page(expert_indices, x, expert_weights, box)
        if not box:
            return self.multiply(x, slots, expert_weights)
        y = self.multiply_present(x, slots, expert_weights)
        return add_answer(y, slots, box, x.dtype)

    def page(
        self, expert_indices: Tensor, x: Tensor, expert_weights: Tensor, box: list[Tensor]
    ) -> Tensor:
        """Find the chosen experts, ask the CPU, copy the rest -> slots, int64 [T, A].

        R for experts that are not on this device. box: of `mailbox`; empty: all are copied.
        """
        ids = expert_indices - self.first  # other ranks' ids get out of range
        where = self.storage.blobs, self.pool, self.layout
        table = list(self.cache.table(len(box) > 0))
        return page(ids, x, expert_weights.float(), table, *where, box)

    def multiply(self, x: Tensor, slots: Tensor, expert_weights: Tensor) -> Tensor:
        """Run the ordinary products; all chosen experts of this rank are in slots."""
        experts = self.experts
        if self.n_local < self.storage.total_experts:  # expert parallelism
            return experts.forward_masked(x, slots, slots < experts.n_expert, expert_weights)
        return experts(x, slots, expert_weights)

    def multiply_present(self, x: Tensor, slots: Tensor, expert_weights: Tensor) -> Tensor:
        """Run the products of experts that are in slots -> fp32 [T, D]."""
        experts, here = self.experts, slots < self.experts.n_expert
        if len(x) <= experts.gather_max_tokens:
            # Read one of the others in place of an expert that is not here.
            other = torch.where(here, slots, 0).amax(dim=-1, keepdim=True)
            outputs = experts.per_expert(x, torch.where(here, slots, other))
        else:
            outputs = experts.per_expert_grouped(x, slots)
        outputs = torch.where(here.unsqueeze(-1), outputs, 0.0)
        return weighted_sum(outputs, expert_weights.float())

    def multiply_in_waves(
        self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor
    ) -> Tensor:
        """Run more experts than slots, wave by wave; then sum over A in one fixed order."""
        (T, A), E, R = expert_indices.shape, self.n_local, self.storage.slots
        local = expert_indices - self.first
        local = torch.where((local >= 0) & (local < E), local, E)
        waves = self.plan_waves(local)
        groups, copies = self.send(waves, local.device)
        if len(waves) == 1:
            self.load_wave(waves[0], copies[0])
            return self.multiply(x, groups[local], expert_weights)
        # Pairs by wave, and by slot in each. Those of other ranks' experts come last.
        order, _, ends = group_by_expert(groups[local], len(waves) * R)
        load, begin, y = lambda n: self.load_wave(waves[n], copies[n]), 0, None
        for n in load_in_turn(load, range(len(waves)), local.device, ahead=R > 1):
            pairs = order[begin : begin + waves[n].pairs]
            outputs = self.experts.grouped(x[pairs // A], ends[n * R : (n + 1) * R] - begin)
            y = outputs.new_zeros(T * A, outputs.shape[1]) if y is None else y
            y[pairs], begin = outputs, begin + len(pairs)
        expert_weights = torch.where(local < E, expert_weights, 0.0)
        return self.experts.combine(y.view(T, A, -1), expert_weights).to(x.dtype)

    def plan_waves(self, local: Tensor) -> list[Wave]:
        """Give this rank's chosen experts slots, wave by wave: those in slots come first.

        local: E for other ranks' experts. Several waves take a half of the slots each, so that one
        is copied while another is multiplied.
        """
        R, E = self.storage.slots, self.n_local
        uses = torch.zeros(E + 1, dtype=torch.int64, device=local.device)
        uses.index_add_(0, local.flatten(), torch.ones_like(local).flatten())
        cache, counts = self.cache.read(uses[:E])
        chosen = [expert for expert in range(E) if counts[expert]]
        chosen.sort(key=lambda expert: expert not in cache.slot)
        size = R if len(chosen) <= R else max(1, R // 2)
        waves = []
        for begin in range(0, max(1, len(chosen)), size):
            experts = chosen[begin : begin + size]
            copied = cache.use_all(experts)
            slots = {expert: cache.slot[expert] for expert in experts}
            waves.append(Wave(slots, copied, sum(counts[n] for n in experts)))
        self.cache.write(cache, len(chosen), sum(len(wave.copied) for wave in waves))
        return waves

    def send(self, waves: list[Wave], device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
        """Return what a device has to know of waves, int64.

        The group of each expert [E + 1], which is n R + slot in wave n; and of each wave the copied
        experts and their slots [2, copies]. All are sent at once, before the first copy: the host
        waits for what it sends, and so would wait for copies.
        """
        groups = [len(waves) * self.storage.slots] * (self.n_local + 1)
        for n, wave in enumerate(waves):
            for expert, slot in wave.slots.items():
                groups[expert] = n * self.storage.slots + slot
        copied = [pair for wave in waves for pair in wave.copied.items()]
        sent = torch.tensor([*groups, *chain(*copied)]).to(device)
        copies = sent[len(groups) :].view(-1, 2).T.contiguous()
        return sent[: len(groups)], copies.split([len(wave.copied) for wave in waves], dim=1)

    def load_wave(self, wave: Wave, copies: Tensor) -> None:
        """Copy a wave's experts that were in no slot; copies: as in `send`."""
        if wave.copied:
            where, (small, large) = (self.storage.blobs, self.pool), self.layouts
            if small:
                fetch(*copies, *where, small, programs=-(-WAVE_PROGRAMS // len(wave.copied)))
            fetch_plainly(*torch.tensor([*wave.copied.items()]).unbind(1), *where, large)

    def counters(self) -> dict[str, int]:
        """Return the layer's COUNTERS. "bytes" are those copied to the device."""
        _, hits, misses, on_cpu = self.cache.counters.tolist()
        copied = misses - on_cpu
        nbytes = copied * self.storage.blobs.shape[1]
        return dict(zip(COUNTERS, (hits, copied, on_cpu, nbytes), strict=True))


def offloaded_layers(model: Transformer) -> list[OffloadedExperts]:
    """Return the layers of a model whose experts are in host memory."""
    return [module for module in model.modules() if isinstance(module, OffloadedExperts)]


def expert_counters(model: Transformer) -> list[dict[str, int]]:
    """Return the counters of each offloaded layer."""
    return [layer.counters() for layer in offloaded_layers(model)]
