"""Which of a layer's E experts are in its R slots, and which one goes when another comes.

Counted by the host (`Cache`), or on the device (`DeviceCache`), where a step then asks nothing of the host: both keep
the same experts. And `page`, by which the device itself copies what is missing.
"""

from __future__ import annotations  # the annotations of kernels name triton, which may be absent

from functools import cache

import torch
from torch import Tensor, nn

from kernels import jit

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch without CUDA: then no kernel here is called
    triton = None

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
    """`Cache` as tensors: a call asks nothing of the host, and can be recorded."""

    def __init__(self, experts: int, slots: int, policy: str, device: torch.device):
        super().__init__()
        self.slots, self.policy = slots, policy
        ids = torch.arange(experts, device=device)
        self.register_buffer("slot", ids.clamp(max=slots), persistent=False)  # [E], R for one that is not there
        self.register_buffer("last", ids - experts, persistent=False)  # [E], when it was used; calls begin at 0
        self.register_buffer("uses", torch.zeros_like(ids), persistent=False)  # [E]
        self.register_buffer("found", ids.new_zeros(3), persistent=False)  # now, hits, misses

    def page(self, chosen: Tensor, host: Tensor, pool: Tensor, parts: list[int]) -> Tensor:
        """`page`, of this table."""
        table = self.slot, self.last, self.uses, self.found
        return page(chosen, *table, host, pool, parts, self.slots, self.policy)

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
        self.found[0].zero_()


# What the device does ------------------------------------------------------------------------------------------------


def place(chosen: Tensor, slot: Tensor, last: Tensor, uses: Tensor, found: Tensor, slots: int,
          policy: str) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Have the experts chosen, int64 [P], in slots -> int64 [P]: those to copy, -1 for none, and where to.

    slot, last, uses, found: of a DeviceCache. Numbers that are no experts do not count. No more than R different ones:
    P <= R is enough. Used are first those that are there, then the others, each in the order in which they were chosen.
    """
    order, experts = torch.arange(len(chosen)), torch.arange(len(slot))
    mine = (chosen >= 0) & (chosen < len(slot))
    chosen = torch.where(mine, chosen, 0)
    before = order < order[:, None]  # [P, P]: q comes before p
    first = mine & ~((chosen == chosen[:, None]) & mine & before).any(1)
    here = slot[chosen] < slots
    missing = first & ~here
    turn = (first & (here & ~here[:, None] | (here == here[:, None]) & before)).sum(1)
    one = first[:, None] & (chosen[:, None] == experts)  # [P, E]
    needed = one.any(0)
    # The n-th that is missing takes the slot of the n-th to go.
    candidate = (slot < slots) & ~needed
    worth = last if policy == "lru" else (uses << 40) + last
    rank = (candidate & (worth < worth[:, None])).sum(1)
    goes = (missing[:, None] & candidate) & (rank == (missing & before).sum(1)[:, None])
    places = torch.where(missing, (goes * slot).sum(1), slot[chosen])
    slot.copy_(torch.where(needed, (one * places[:, None]).sum(0), torch.where(goes.any(0), slots, slot)))
    last.copy_(torch.where(needed, found[0] + (one * turn[:, None]).sum(0), last))
    uses.add_(needed)
    found.add_(torch.stack((torch.tensor(len(chosen)), (first & here).sum(), missing.sum())))
    return torch.where(missing, chosen, -1), places


@jit
def _place(chosen, slot, last, uses, found, experts, places, SLOTS: tl.constexpr, LRU: tl.constexpr, E: tl.constexpr,
           E2: tl.constexpr, P: tl.constexpr, P2: tl.constexpr):  # fmt: skip
    """`place` by one program."""
    p, e = tl.arange(0, P2), tl.arange(0, E2)
    ids = tl.load(chosen + p, mask=p < P, other=-1)
    mine = (ids >= 0) & (ids < E)
    before = p[None, :] < p[:, None]
    again = tl.max(((ids[:, None] == ids[None, :]) & before).to(tl.int32), 1)
    first = mine & (again == 0)
    place = tl.load(slot + ids, mask=mine, other=SLOTS)
    here = place < SLOTS
    missing = first & (place == SLOTS)
    later = here[None, :] & (place == SLOTS)[:, None]
    turn = tl.sum((first[None, :] & (later | ((here[None, :] == here[:, None]) & before))).to(tl.int64), 1)
    nth = tl.sum((missing[None, :] & before).to(tl.int32), 1)
    held = tl.load(slot + e, mask=e < E, other=SLOTS)
    used, count, now = tl.load(last + e, mask=e < E), tl.load(uses + e, mask=e < E), tl.load(found)
    one = first[:, None] & (ids[:, None] == e[None, :])
    needed = tl.max(one.to(tl.int32), 0) > 0
    left, held_after = (held < SLOTS) & (needed == 0), held
    worth = used if LRU else (count << 40) + used
    for n in tl.static_range(min(P, SLOTS)):
        least = tl.min(tl.where(left, worth, 1 << 62), 0)
        goes = left & (worth == least) & (n < tl.sum(missing.to(tl.int32), 0))
        place = tl.where(missing & (nth == n), tl.sum(tl.where(goes, held, 0), 0), place)
        held_after = tl.where(goes, SLOTS, held_after)
        left = left & (goes == 0)
    taken = tl.sum(tl.where(one, place[:, None], 0), 0)
    tl.store(slot + e, tl.where(needed, taken, held_after), mask=e < E)
    tl.store(last + e, tl.where(needed, now + tl.sum(tl.where(one, turn[:, None], 0), 0), used), mask=e < E)
    tl.store(uses + e, count + needed.to(tl.int64), mask=e < E)
    tl.store(found, now + P)
    tl.store(found + 1, tl.load(found + 1) + tl.sum((first & here).to(tl.int64), 0))
    tl.store(found + 2, tl.load(found + 2) + tl.sum(missing.to(tl.int64), 0))
    tl.store(experts + p, tl.where(missing, ids, -1), mask=p < P)
    tl.store(places + p, place, mask=p < P)


def place_by_kernel(chosen: Tensor, slot: Tensor, last: Tensor, uses: Tensor, found: Tensor, slots: int,
                    policy: str) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`place` on a GPU: ten small kernels, where the compiler makes it of the above."""
    experts, places = torch.empty_like(chosen), torch.empty_like(chosen)
    E, P = len(slot), len(chosen)
    _place[(1,)](
        chosen, slot, last, uses, found, experts, places, SLOTS=slots, LRU=policy == "lru", E=E,
        E2=triton.next_power_of_2(E), P=P, P2=triton.next_power_of_2(P), num_warps=4,
    )  # fmt: skip
    return experts, places


@jit
def _fetch(experts, slots, host: tl.int64, pool, chunks, count, WORDS: tl.constexpr, CHUNK: tl.constexpr,
           FOURS: tl.constexpr):  # fmt: skip
    # `host` is an address: by its size alone a low one would be taken for a number of 32 bits.
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


def fetch(experts: Tensor, slots: Tensor, host: Tensor, pool: Tensor, parts: list[int]) -> None:
    """Copy the blobs host[experts[p]] into slots slots[p] of the pool, none for -1; experts, slots int64 [P].

    host: uint8 [E, bytes]. parts: where in a blob each part begins and how many bytes it has; in the pool its slots
    [R, bytes] begin at R times that.
    """
    R = pool.numel() // host.shape[1]
    for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
        for start, size in zip(parts[::2], parts[1::2], strict=True):
            if expert >= 0:
                pool[R * start + slot * size :][:size] = host[expert, start : start + size]


@torch.library.custom_op("moe_fast::page", mutates_args=())
def page(chosen: Tensor, slot: Tensor, last: Tensor, uses: Tensor, found: Tensor, host: Tensor, pool: Tensor,
         parts: list[int], slots: int, policy: str) -> Tensor:  # fmt: skip
    """`place`, then `fetch` -> the slot of each expert [E], once what it had to copy is there.

    host: registered with CUDA where the pool is a GPU's. The table and the pool are written in place, which the
    compiler is not told: weights are views of the pool, and it would copy them all. Their readers come later since they
    read the slots that are returned, and none of them is from before.
    """
    by_kernel = pool.is_cuda
    experts, places = (place_by_kernel if by_kernel else place)(chosen, slot, last, uses, found, slots, policy)
    (fetch_by_kernel if by_kernel else fetch)(experts, places, host, pool, parts)
    return slot.clone()  # by a kernel that waits for the copies, so that those after it need not


@page.register_fake
def _(chosen: Tensor, slot: Tensor, last: Tensor, uses: Tensor, found: Tensor, host: Tensor, pool: Tensor,
      parts: list[int], slots: int, policy: str) -> Tensor:  # fmt: skip
    return torch.empty_like(slot)
