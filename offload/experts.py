"""Experts in host memory: the GPU has R slots per layer, and copies missing experts into them.

A layer computes one token in three steps. It copies the chosen experts that miss into the slots of
evicted ones, maps expert ids to slot ids, and runs the ordinary products of model.py on a pool of R
experts. Weights never change, so nothing is copied back.

The GPU or the CPU schedules the copies:

- GPU: the slot table is on the device, and a kernel reads host memory. The host never waits.
- CPU: the host waits once per layer, for the chosen ids. Meanwhile the next layer's router predicts
  its experts from this layer's hidden state (Eliseev & Mazur 2023, section 3.2). They are
  prefetched into staging buffers that all layers share.

Memory:

    host    per layer [E, bytes], registered with CUDA: one blob per expert, all tensors of its w13
            and w2
    device  per layer one byte pool, tensor by tensor [R, ...], as the products expect them; and
            staging buffers of one blob each
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from model import Experts, Transformer
from offload.cache import DeviceExpertCache, ExpertCache
from offload.copies import CopyStream
from ops.plain.topk import top_k
from ops.step.expert_paging import fetch_by_kernel

ALIGN = 128  # bytes
COUNTERS = "hits", "misses", "speculative_hits", "speculative_loads", "bytes"

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


def plan_blob(path: str, experts: Experts, read: Reader) -> tuple[list[BlobPart], int]:
    """Return the parts of a layer's blobs, and a blob's bytes. Reads the first expert."""
    parts, size = [], 0
    for name, _ in experts.named_parameters():
        tensor = read(f"{path}.{name}", "cpu", 0)
        parts.append(BlobPart(f"{path}.{name}", tuple(tensor.shape[1:]), tensor.dtype, size))
        size += -(-parts[-1].nbytes // ALIGN) * ALIGN
    return parts, size


@dataclass(frozen=True)
class LayerStorage:
    """One layer's experts in host memory, and the settings of its cache."""

    layer: int
    total_experts: int  # E of all ranks
    parts: list[BlobPart]
    blobs: Tensor  # uint8 [E of this rank, bytes], on the host
    slots: int  # R
    policy: str
    copies: CopyStream
    device: torch.device
    kernel_reads_host: bool  # registered with CUDA, all parts in words of 4 bytes
    gpu_schedules: bool


class OffloadedExperts(nn.Module):
    """`Experts` (or a rank's `tp.ShardedExperts`) over R slots: same call, same result.

    The result does not depend on which experts are cached, nor on their slots.
    """

    def __init__(self, experts: Experts, storage: LayerStorage):
        super().__init__()
        self.experts, self.storage = experts, storage
        self.n_local, self.first = experts.n_expert, getattr(experts, "first", 0)
        slots, device = storage.slots, storage.device
        self.cache = ExpertCache(self.n_local, slots, storage.policy)
        # Prefetches: experts per token, and the next layer's MoE and OffloadedExperts. A list hides
        # them from nn.Module.
        self.prefetch_count = 0
        self.next_layer: list[nn.Module] = []
        self.counts = dict.fromkeys(COUNTERS, 0)
        by_kernel = storage.kernel_reads_host and device.type == "cuda"
        self.slot_ids = torch.arange(slots, device=device) if by_kernel else None
        self.layout = [n for part in storage.parts for n in (part.start, part.nbytes)]
        self.make_pool()
        for slot in range(slots):
            self.fill_slot(slot, storage.blobs[slot])
        experts.choose_from = storage.total_experts * slots / self.n_local
        experts.n_expert = slots
        self.slot_map = self.make_slot_map(self.cache.slot)  # CUDA graphs read it: update in place
        self.table = None
        if storage.gpu_schedules:
            self.table = DeviceExpertCache(self.n_local, slots, storage.policy, device)

    def make_pool(self) -> None:
        """Allocate R slots and make the experts' parameters views of them."""
        slots, size = self.storage.slots, self.storage.blobs.shape[1]
        self.pool = torch.empty(slots * size, dtype=torch.uint8, device=self.storage.device)
        self.slot_bytes: list[Tensor] = []  # uint8 [R, bytes] of each part
        for part in self.storage.parts:
            view = self.pool[slots * part.start :][: slots * part.nbytes]
            self.slot_bytes.append(view.view(slots, -1))
            # View as the dtype here, not in forward: Dynamo does not see who writes the pool.
            typed = nn.Parameter(
                view.view(part.dtype).view(slots, *part.shape), requires_grad=False
            )
            path, leaf = part.name.rsplit(".", 1)
            setattr(self.experts.get_submodule(path.split(".experts.", 1)[1]), leaf, typed)

    def make_slot_map(self, slots: dict[int, int]) -> Tensor:
        """Return each expert's slot, int64 [E of all ranks]; R for experts not in `slots`."""
        ids = range(-self.first, self.storage.total_experts - self.first)
        found = torch.tensor(
            [slots.get(expert, self.storage.slots) for expert in ids],
            # Pinned, so that the host does not wait for earlier work in the stream.
            pin_memory=self.storage.device.type == "cuda",
        )
        return found.to(self.storage.device, non_blocking=True)

    def fits(self, pairs: int) -> bool:
        """Return whether any choice of this many experts fits into the slots at once."""
        return pairs <= self.storage.slots

    def fill_slot(self, slot: int, blob: Tensor) -> None:
        """Copy an expert into a slot: by one kernel, or part by part (3.5 us more each)."""
        if self.slot_ids is not None:
            expert, target = self.slot_ids[:1], self.slot_ids[slot : slot + 1]
            fetch_by_kernel(expert, target, blob[None], self.pool, self.layout)
            return
        for part, slots in zip(self.storage.parts, self.slot_bytes, strict=True):
            slots[slot].copy_(blob[part.start : part.start + part.nbytes], non_blocking=True)

    def forward(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor) -> Tensor:
        if self.table and self.fits(expert_indices.numel()):
            return self.multiply(x, expert_indices, expert_weights, self.page(expert_indices))
        waves, predicted = self.plan_waves(
            self.needed_ids(x, expert_indices), expert_indices.numel()
        )
        if len(waves) > 1:
            return self.multiply_in_waves(x, expert_indices, expert_weights, waves)
        slot_map = self.load_wave(waves[0], predicted)
        return self.multiply(x, expert_indices, expert_weights, slot_map)

    def page(self, expert_indices: Tensor) -> Tensor:
        """Let the GPU copy missing experts -> each expert's slot, int64 [E of all ranks]."""
        chosen = expert_indices.flatten() - self.first  # other ranks' ids get out of range
        slot_map = self.table.page(chosen, self.storage.blobs, self.pool, self.layout)
        others = self.first, self.storage.total_experts - self.first - self.n_local
        if not any(others):
            return slot_map
        return nn.functional.pad(slot_map, others, value=self.storage.slots)

    def needed_ids(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        """Return the ids that the host needs: expert_indices, then predicted experts."""
        if not self.next_layer:
            return expert_indices.flatten()
        moe = self.next_layer[0]
        scores = moe.selection_scores(moe.router(x).float())
        predicted = top_k(scores, self.prefetch_count)[1]  # the most likely first
        return torch.cat((expert_indices.flatten(), predicted.t().flatten()))

    def plan_waves(self, needed_ids: Tensor, pairs: int) -> tuple[list[list[int]], list[int]]:
        """Wait for `needed_ids` -> chosen experts in waves of at most R, and predicted experts.

        Cached experts come first; otherwise the order is that of the choice.
        """
        ids = self.storage.copies.read(needed_ids)
        if self.table:
            self.cache = self.table.read()
        chosen, predicted = ids[:pairs], ids[pairs:]
        needed = self.local_ids(chosen)
        self.counts["hits"] += sum(expert in self.cache.slot for expert in needed)
        needed.sort(key=lambda expert: expert not in self.cache.slot)
        slots = self.storage.slots
        waves = [needed[n : n + slots] for n in range(0, len(needed) or 1, slots)]
        return waves, predicted

    def local_ids(self, ids: Sequence[int]) -> list[int]:
        """Return this rank's experts among ids: unique, as indices into its own."""
        end = self.first + self.n_local
        return [n - self.first for n in dict.fromkeys(ids) if self.first <= n < end]

    def load_wave(
        self, wave: Sequence[int], predicted: Sequence[int] = (), only: bool = False
    ) -> Tensor:
        """Load a wave's experts, start prefetches -> each expert's slot, int64 [E of all ranks].

        only: return slots of this wave's experts only. `publish_slots` must follow the last wave.
        """
        missing = [expert for expert in wave if expert not in self.cache.slot]
        if missing:
            self.load_missing(missing, wave)
        for expert in wave:
            self.cache.use(expert)
        self.storage.copies.drop_unfinished()
        if predicted:
            self.next_layer[1].start_prefetches(predicted)
        if only:
            return self.make_slot_map({expert: self.cache.slot[expert] for expert in wave})
        if missing or self.table:
            self.publish_slots()
        return self.slot_map

    def load_missing(self, missing: Sequence[int], wave: Sequence[int]) -> None:
        """Copy experts into the slots of evicted ones; from a staging buffer if prefetched."""
        copies = self.storage.copies
        copies.wait_for_compute()
        with copies.as_current():
            for expert in missing:
                slot = self.cache.replace(expert, wave)
                prefetch = copies.take((self.storage.layer, expert))
                blob = prefetch.buffer if prefetch else self.storage.blobs[expert]
                self.fill_slot(slot, blob)
                self.counts["speculative_hits" if prefetch else "misses"] += 1
                if prefetch:
                    copies.release(prefetch)
                else:
                    self.counts["bytes"] += len(blob)
        copies.block_compute()

    def publish_slots(self) -> None:
        """Copy the host's slots to the device, in place."""
        if self.table:
            self.table.write(self.cache)
        self.slot_map.copy_(self.make_slot_map(self.cache.slot))

    def load_chosen(self, needed_ids: Tensor, pairs: int) -> None:
        """Load chosen experts that fit at once: the host's work between two CUDA graphs."""
        waves, predicted = self.plan_waves(needed_ids, pairs)
        self.load_wave(waves[0], predicted)

    def start_prefetches(self, experts: Sequence[int]) -> None:
        """Prefetch missing experts of this layer, limited by the number of staging buffers."""
        copies, layer = self.storage.copies, self.storage.layer
        missing = [n for n in self.local_ids(experts) if n not in self.cache.slot]
        wanted = missing[: len(copies.free) + len(copies.staged)]
        for expert in wanted:  # staged ones become the newest, which are evicted last
            if (key := (layer, expert)) in copies.staged:
                copies.staged[key] = copies.staged.pop(key)
        for expert in wanted:
            if (layer, expert) not in copies.staged:
                blob = self.storage.blobs[expert]
                copies.start_prefetch((layer, expert), blob, self.counts)
        copies.issue_pieces()

    def counters(self) -> dict[str, int]:
        """Return the layer's COUNTERS. "bytes" are those copied to the device."""
        counts = dict(self.counts)
        if self.table:
            _, hits, misses = self.table.counters.tolist()
            counts["hits"] += hits
            counts["misses"] += misses
            counts["bytes"] += misses * self.storage.blobs.shape[1]
        return counts

    def multiply(
        self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor, slot_map: Tensor
    ) -> Tensor:
        """Run the ordinary products; all chosen experts of this rank are in slots."""
        experts, slots = self.experts, slot_map[expert_indices]
        if self.n_local < self.storage.total_experts:  # expert parallelism
            return experts.forward_masked(x, slots, slots < experts.n_expert, expert_weights)
        return experts(x, slots, expert_weights)

    def multiply_in_waves(
        self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor, waves: list[list[int]]
    ) -> Tensor:
        """Run more experts than slots, wave by wave; then sum over A in one fixed order."""
        y = None
        for wave in waves:
            slots = self.load_wave(wave, only=True)[expert_indices]
            outputs = self.experts.per_expert_grouped(x, slots)
            if y is None:
                y = outputs
            else:
                y = torch.where((slots < self.experts.n_expert).unsqueeze(-1), outputs, y)
        self.publish_slots()
        local = expert_indices - self.first
        mine = (local >= 0) & (local < self.n_local)
        expert_weights = torch.where(mine, expert_weights, 0.0)
        return self.experts.combine(y, expert_weights).to(x.dtype)


def offloaded_layers(model: Transformer) -> list[OffloadedExperts]:
    """Return the layers of a model whose experts are in host memory."""
    return [module for module in model.modules() if isinstance(module, OffloadedExperts)]


def expert_counters(model: Transformer) -> list[dict[str, int]]:
    """Return the counters of each offloaded layer."""
    return [layer.counters() for layer in offloaded_layers(model)]
