"""Which of a layer's E experts are in its R slots, and which one goes when another comes.

Counted by the host (`Cache`), or on the device (`DeviceCache`), where a step then asks nothing of the host: both keep
the same experts. And `fetch`, by which the device itself copies what is missing.
"""

from __future__ import annotations  # the annotations of kernels name triton, which may be absent

from functools import cache

import torch
from torch import Tensor, nn

from kernels import jit

try:
    import triton.language as tl
except ImportError:  # a build of torch without CUDA: then no kernel here is called
    tl = None

POLICIES = "lru", "lfu"


class Cache:
    """Which of E experts are in R slots, the first R at the start, and which one goes when another comes.

    lru gives up the least recently used; lfu the least often used, since the beginning and while it was absent too,
    of equals the least recently used. One use a call of the layer, however many tokens it has.
    """

    def __init__(self, experts: int, slots: int, policy: str):
        self.slot = {expert: expert for expert in range(slots)}  # least recently used first
        self.uses, self.policy = [0] * experts, policy

    def use(self, expert: int) -> None:
        """Note that an expert that is there is used."""
        self.slot[expert] = self.slot.pop(expert)
        self.uses[expert] += 1

    def replace(self, expert: int, keep) -> int:
        """The slot for an expert that is not there, of one that goes: none of `keep`, which are fewer than R others."""
        candidates = [other for other in self.slot if other not in keep]
        victim = candidates[0] if self.policy == "lru" else min(candidates, key=self.uses.__getitem__)
        self.slot[expert] = slot = self.slot.pop(victim)
        return slot


class DeviceCache(nn.Module):
    """`Cache` as tensors [E]: a call is arithmetic alone, which compiles to a few kernels and can be recorded."""

    def __init__(self, experts: int, slots: int, policy: str, device: torch.device):
        super().__init__()
        self.slots, self.policy = slots, policy
        ids = torch.arange(experts, device=device)
        self.register_buffer("slot", ids.clamp(max=slots), persistent=False)  # R for one that is not there
        self.register_buffer("last", ids - experts, persistent=False)  # when it was used; calls begin at 0
        self.register_buffer("uses", torch.zeros_like(ids), persistent=False)
        self.register_buffer("now", torch.zeros_like(ids[:1]), persistent=False)
        self.register_buffer("found", torch.zeros_like(ids[:2]), persistent=False)  # hits, misses

    def place(self, chosen: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
        """Have the experts chosen, int64 [P], in slots -> int64 [P]: those to copy, -1 for none, and where to.

        mine: bool [P], which of them count. No more than R different ones: P <= R is enough. Used are first those that
        are there, then the others, each in the order in which they were chosen.
        """
        order, experts = (
            torch.arange(len(chosen), device=chosen.device),
            torch.arange(len(self.slot), device=chosen.device),
        )
        before = order < order[:, None]  # [P, P]: q comes before p
        first = mine & ~((chosen == chosen[:, None]) & mine & before).any(1)
        here = self.slot[chosen] < self.slots
        missing = first & ~here
        turn = (first & (here & ~here[:, None] | (here == here[:, None]) & before)).sum(1)
        one = first[:, None] & (chosen[:, None] == experts)  # [P, E]
        needed = one.any(0)
        # The n-th that is missing takes the slot of the n-th to go.
        candidate = (self.slot < self.slots) & ~needed
        worth = self.last if self.policy == "lru" else (self.uses << 40) + self.last
        rank = (candidate & (worth < worth[:, None])).sum(1)
        goes = (missing[:, None] & candidate) & (rank == (missing & before).sum(1)[:, None])
        slot = torch.where(missing, (goes * self.slot).sum(1), self.slot[chosen])
        self.slot.copy_(
            torch.where(needed, (one * slot[:, None]).sum(0), torch.where(goes.any(0), self.slots, self.slot))
        )
        self.last.copy_(torch.where(needed, self.now + (one * turn[:, None]).sum(0), self.last))
        self.uses.add_(needed)
        self.now.add_(len(chosen))
        self.found.add_(torch.stack(((first & here).sum(), missing.sum())))
        return torch.where(missing, chosen, -1), slot

    def read(self) -> Cache:
        """The same as the host counts it."""
        slot, last, uses = torch.stack((self.slot, self.last, self.uses)).tolist()
        found = Cache(len(slot), 0, self.policy)
        there = [expert for expert in range(len(slot)) if slot[expert] < self.slots]
        found.slot = {expert: slot[expert] for expert in sorted(there, key=last.__getitem__)}
        found.uses = uses
        return found

    def write(self, cache: Cache) -> None:
        """Go on from what the host has counted."""
        ids = range(len(self.slot))
        order = {expert: n - len(ids) for n, expert in enumerate(cache.slot)}
        table = [cache.slot.get(e, self.slots) for e in ids], [order.get(e, -2 * len(ids)) for e in ids], cache.uses
        for tensor, values in zip(
            (self.slot, self.last, self.uses), torch.tensor(table).to(self.slot.device), strict=True
        ):
            tensor.copy_(values)
        self.now.zero_()


# Copies that the device decides on -----------------------------------------------------------------------------------


@jit
def _fetch(experts, slots, host, pool, chunks, count, WORDS: tl.constexpr, CHUNK: tl.constexpr, FOURS: tl.constexpr):
    pair = tl.program_id(1)
    expert = tl.load(experts + pair)
    if expert >= 0:
        slot = tl.load(slots + pair)
        blob = host.to(tl.pointer_type(tl.int32)) + expert * WORDS
        for chunk in range(tl.program_id(0), count, tl.num_programs(0)):
            row = chunks + chunk * 4
            word, size = tl.arange(0, CHUNK), tl.load(row + 3)
            source, target = blob + tl.load(row) + word, pool + tl.load(row + 1) + slot * tl.load(row + 2) + word
            if FOURS:  # every part is whole 16 bytes, which a lane then copies at once
                size = tl.multiple_of(size, 4)
                source = tl.max_contiguous(tl.multiple_of(source, 16), 4)
                target = tl.max_contiguous(tl.multiple_of(target, 16), 4)
            tl.store(target, tl.load(source, mask=word < size), mask=word < size)


CHUNK = 4096  # words of 32 bits that a program copies at a time, by 8 loads of 16 bytes a lane
FETCHERS = 512  # programs an expert: 8 MB on their way, where the link's bandwidth times its latency is 0.1 MB


def fetch_chunks(parts: tuple[int, ...], slots: int) -> list[list[int]]:
    """What each program copies, in words: its place in a blob, in the pool's first slot, the slots' distance, its size.

    parts: as for `fetch`.
    """
    found = []
    for start, size in zip(parts[::2], parts[1::2], strict=True):
        start, size = start // 4, size // 4
        found += [[start + n, slots * start + n, size, min(CHUNK, size - n)] for n in range(0, size, CHUNK)]
    return found


@cache
def _fetch_chunks(parts: tuple[int, ...], slots: int, device: torch.device) -> Tensor:
    return torch.tensor(fetch_chunks(parts, slots)).to(device)


def fetch_by_kernel(experts: Tensor, slots: Tensor, host: Tensor, pool: Tensor, parts: list[int]) -> None:
    """`fetch` on a GPU, which reads registered host memory over the link by itself; sizes in multiples of 4."""
    chunks = _fetch_chunks(tuple(parts), pool.numel() // host.shape[1], pool.device)
    _fetch[(min(len(chunks), FETCHERS), len(experts))](
        experts, slots, host.data_ptr(), pool.view(torch.int32), chunks, len(chunks), WORDS=host.shape[1] // 4,
        CHUNK=CHUNK, FOURS=all(size % 16 == 0 for size in parts[1::2]), num_warps=4,
    )  # fmt: skip


@torch.library.custom_op("moe_fast::fetch", mutates_args=())
def fetch(experts: Tensor, slots: Tensor, slot_map: Tensor, host: Tensor, pool: Tensor, parts: list[int]) -> Tensor:
    """Copy the blobs host[experts[p]] into slots slots[p] of the pool, none for -1 -> slot_map, once that is done.

    experts, slots: int64 [P]. host: uint8 [E, bytes], registered with CUDA where the pool is a GPU's. parts: where in a
    blob each part begins and how many bytes it has; in the pool its slots [R, bytes] begin at R times that.
    The pool is written in place, which the compiler is not told: weights are views of it, and it would copy them all.
    Their readers come later since they read the slot_map that is returned, and none of them is from before.
    """
    if pool.is_cuda:
        fetch_by_kernel(experts, slots, host, pool, parts)
        return slot_map.clone()
    R = pool.numel() // host.shape[1]
    for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
        for start, size in zip(parts[::2], parts[1::2], strict=True):
            if expert >= 0:
                pool[R * start + slot * size :][:size] = host[expert, start : start + size]
    return slot_map.clone()


@fetch.register_fake
def _(experts: Tensor, slots: Tensor, slot_map: Tensor, host: Tensor, pool: Tensor, parts: list[int]) -> Tensor:
    return torch.empty_like(slot_map)
