"""Expert cache: which of a layer's E experts are in its R slots, and which one is evicted.

`ExpertCache` is for the host. `DeviceExpertCache` keeps the same state in tensors, so
that the GPU pages experts without the host. After the same calls both hold the same
experts.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ops.step.expert_paging import page

POLICIES = "lru", "lfu"


class ExpertCache:
    """The cache of one layer, on the host. Experts 0 .. R - 1 are cached at the start.

    Policy lru evicts the least recently used expert; lfu the least frequently used one,
    with ties broken by lru. A call of the layer counts as one use of an expert, for any
    number of tokens. The counts survive eviction.
    """

    def __init__(self, experts: int, slots: int, policy: str):
        self.slot = {expert: expert for expert in range(slots)}  # least recently used first
        self.uses, self.policy = [0] * experts, policy

    def use(self, expert: int) -> None:
        """Record a use of a cached expert."""
        self.slot[expert] = self.slot.pop(expert)
        self.uses[expert] += 1

    def replace(self, expert: int, keep: Collection[int]) -> int:
        """Evict an expert and cache `expert` in its slot -> the slot.

        Experts in `keep` are not evicted. Fewer than R of them may be cached.
        """
        candidates = [other for other in self.slot if other not in keep]
        lru = self.policy == "lru"
        victim = candidates[0] if lru else min(candidates, key=self.uses.__getitem__)
        self.slot[expert] = slot = self.slot.pop(victim)
        return slot


class DeviceExpertCache(nn.Module):
    """`ExpertCache` in tensors, for CUDA graphs: the table of `ops.step.expert_paging`."""

    def __init__(self, experts: int, slots: int, policy: str, device: torch.device):
        super().__init__()
        self.slots, self.policy = slots, policy
        ids = torch.arange(experts, device=device)
        self.register_buffer("slot", ids.clamp(max=slots), persistent=False)
        self.register_buffer("last_use", ids - experts, persistent=False)  # the clock begins at 0
        self.register_buffer("uses", torch.zeros_like(ids), persistent=False)
        self.register_buffer("counters", ids.new_zeros(3), persistent=False)

    def page(self, chosen: Tensor, host: Tensor, pool: Tensor, layout: list[int]) -> Tensor:
        """Run `ops.step.expert_paging.page` on this table -> the slot of each expert [E]."""
        table = self.slot, self.last_use, self.uses, self.counters
        return page(chosen, *table, host, pool, layout, self.slots, self.policy)

    def read(self) -> ExpertCache:
        """Copy the state to the host."""
        slot, last_use, uses = torch.stack((self.slot, self.last_use, self.uses)).tolist()
        cache = ExpertCache(len(slot), 0, self.policy)
        cached = [expert for expert in range(len(slot)) if slot[expert] < self.slots]
        cache.slot = {expert: slot[expert] for expert in sorted(cached, key=last_use.__getitem__)}
        cache.uses = uses
        return cache

    def write(self, cache: ExpertCache) -> None:
        """Overwrite the state with the host's. Resets the clock to 0; hits and misses stay."""
        E = len(self.slot)
        order = {expert: n - E for n, expert in enumerate(cache.slot)}
        slot = [cache.slot.get(expert, self.slots) for expert in range(E)]
        last_use = [order.get(expert, -2 * E) for expert in range(E)]
        state = torch.tensor((slot, last_use, cache.uses)).to(self.slot.device)
        for buffer, values in zip((self.slot, self.last_use, self.uses), state, strict=True):
            buffer.copy_(values)
        self.counters[0].zero_()
