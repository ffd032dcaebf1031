"""Expert cache: which of a layer's E experts are in its R slots, and which one is evicted.

`DeviceExpertCache` is the one that models use. `ExpertCache` is the same policy in plain Python,
for studies and tests: after the same calls both hold the same experts.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ops.step.expert_paging import Table


class ExpertCache:
    """The cache of one layer, on the host: the least recently used expert is evicted.

    A call of the layer counts as one use of an expert, for any number of tokens. cached: experts at
    the start, least recently used first; their slots are 0, 1, ... .
    """

    def __init__(self, cached: Sequence[int]):
        self.slot = {expert: slot for slot, expert in enumerate(cached)}  # least recent first

    def use(self, expert: int) -> None:
        """Record a use of a cached expert."""
        self.slot[expert] = self.slot.pop(expert)

    def replace(self, expert: int, keep: Collection[int]) -> int:
        """Evict an expert and cache `expert` in its slot -> the slot.

        Experts in `keep` are not evicted. Fewer than R of them may be cached.
        """
        victim = next(other for other in self.slot if other not in keep)
        self.slot[expert] = slot = self.slot.pop(victim)
        return slot

    def use_all(self, experts: Collection[int]) -> dict[int, int]:
        """Use experts, at most R: hits first -> the slots of the others, which are cached now."""
        missing, keep = [expert for expert in experts if expert not in self.slot], set(experts)
        for expert in experts:
            if expert in self.slot:
                self.use(expert)
        return {expert: self.replace(expert, keep) for expert in missing}


class DeviceExpertCache(nn.Module):
    """The cache of one layer on the device: the table of `ops.step.expert_paging`.

    cached: R experts at the start, as in `ExpertCache`.
    """

    def __init__(self, experts: int, cached: Sequence[int], device: torch.device):
        super().__init__()
        slots = len(cached)
        slot = torch.full((experts,), slots)
        last_use = torch.full((experts,), -experts)  # the clock begins at 0
        slot[list(cached)] = torch.arange(slots)
        last_use[list(cached)] = torch.arange(slots) - slots
        self.register_buffer("slot", slot.to(device), persistent=False)
        self.register_buffer("last_use", last_use.to(device), persistent=False)
        self.register_buffer("counters", self.slot.new_zeros(4), persistent=False)
        all_copied = self.slot.new_zeros(1)
        self.register_buffer("all_copied", all_copied, persistent=False)
        self.register_buffer("copies", all_copied, persistent=False)  # if a call asks the CPU
        self.slots = slots

    def table(self, asks: bool) -> Table:
        """Return the table for a call that asks the CPU for its share, or copies all misses."""
        copies = self.copies if asks else self.all_copied
        return Table(self.slot, self.last_use, self.counters, copies)

    def read(self, uses: Tensor) -> tuple[ExpertCache, list[int]]:
        """Return the cache on the host, and `uses` int64 [E] as well: the host waits once."""
        both = torch.stack((self.slot, self.last_use, uses)).tolist()
        cache = ExpertCache(())
        cache.slot = self.order(*both[:2])
        return cache, both[2]

    def write(self, cache: ExpertCache, used: int, missed: int) -> None:
        """Go on as `cache`, after `used` experts of which `missed` were not cached."""
        E, order = len(self.slot), list(cache.slot)
        slot = [cache.slot.get(expert, self.slots) for expert in range(E)]
        ranks = {expert: rank - self.slots for rank, expert in enumerate(order)}
        last_use = [ranks.get(expert, -E) for expert in range(E)]
        added = [used, used - missed, missed, 0]
        new = torch.tensor([*slot, *last_use, *added]).to(self.slot.device)
        self.slot.copy_(new[:E])
        # Ranks are negative: all these uses are before the clock's time.
        torch.add(new[E : 2 * E], self.counters[0], out=self.last_use)
        self.counters.add_(new[2 * E :])

    def cached(self) -> dict[int, int]:
        """Return the slot of each cached expert, least recently used first."""
        return self.order(*torch.stack((self.slot, self.last_use)).tolist())

    def order(self, slot: list[int], last_use: list[int]) -> dict[int, int]:
        """Return what `cached` does, of the buffers' numbers."""
        held = [expert for expert in range(len(slot)) if slot[expert] < self.slots]
        return {expert: slot[expert] for expert in sorted(held, key=last_use.__getitem__)}
