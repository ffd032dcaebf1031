"""Expert paging: find the chosen experts, choose slots for misses, copy those from host memory.

The GPU keeps R of a layer's E experts in slots. `page` looks the chosen experts up. Of those that
miss it copies some into the slots of the least recently used ones. It leaves the others to the CPU
(ops/step/cpu_share.py). Everything runs on the device, so that a decode step can be captured in a
CUDA graph.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ops.launch import await_previous, can_launch, jit, launch, tl
from ops.sizes import pow2
from ops.step.cpu_share import Mailbox, ask

MAX_PAIRS = 128  # chosen experts of a call, P


class Table(NamedTuple):
    """A layer's table: buffers of `offload.cache.DeviceExpertCache`, int64."""

    slot: Tensor  # [E]: an expert's slot; R if it is not cached
    last_use: Tensor  # [E]: clock value of its last use
    # [4]: clock, hits, misses, and misses that are not copied. A call adds P to the clock.
    counters: Tensor
    copies: Tensor  # [N]: how many of n misses are copied; of more than N - 1 all are


@dataclass(frozen=True)
class Place:
    """Settings of `_place`."""

    slots: int  # R
    E: int
    pairs: int  # P
    copies: int  # N

    experts_tile = property(lambda s: pow2(s.E))
    pairs_tile = property(lambda s: pow2(s.pairs))


def place_plainly(chosen: Tensor, table: Table, slots: int) -> tuple[Tensor, Tensor]:
    """`place`, on the host."""
    slot, last_use, ids = table.slot.tolist(), table.last_use.tolist(), chosen.tolist()
    needed = [expert for expert in dict.fromkeys(ids) if 0 <= expert < len(slot)]
    hits = [expert for expert in needed if slot[expert] < slots]
    misses = [expert for expert in needed if slot[expert] == slots]
    count = len(misses)
    if count < len(table.copies):
        count = int(table.copies[count])
    cached = [expert for expert in range(len(slot)) if slot[expert] < slots]
    victims = sorted(set(cached) - set(needed), key=last_use.__getitem__)
    to_copy, clock = [-1] * len(ids), int(table.counters[0])
    for expert, victim in zip(misses[:count], victims, strict=False):
        slot[expert], slot[victim] = slot[victim], slots
        to_copy[ids.index(expert)] = expert
    for use, expert in enumerate(hits + misses):
        last_use[expert] = clock + use
    found = [slot[expert] if 0 <= expert < len(slot) else slots for expert in ids]
    counts = len(ids), len(hits), len(misses), len(misses) - count
    table.slot.copy_(torch.tensor(slot))
    table.last_use.copy_(torch.tensor(last_use))
    table.counters.add_(torch.tensor(counts).to(table.counters.device))
    return torch.tensor(to_copy).to(chosen.device), torch.tensor(found).to(chosen.device)


# Grid [1]: one program computes `place`. P is a few tens and E a few hundred, so all
# [P, P] and [P, E] comparisons fit into the registers of 4 warps. The loop finds one
# victim for each possible miss, the minimum of `old_use`.
#
# One kernel: each step reads registers that the step before has filled.
@jit
def _place(chosen, table, to_copy, targets, s: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    slot, last_use, counters = table.slot, table.last_use, table.counters
    p, e = tl.arange(0, s.pairs_tile), tl.arange(0, s.experts_tile)
    ids = tl.load(chosen + p, mask=p < s.pairs, other=-1)
    valid = (ids >= 0) & (ids < s.E)
    same = (ids[:, None] == ids[None, :]) & valid[:, None]
    earlier = p[None, :] < p[:, None]
    is_first = valid & (tl.max((same & earlier).to(tl.int32), 1) == 0)
    target = tl.load(slot + ids, mask=valid, other=s.slots)
    cached = target < s.slots
    miss = is_first & (target == s.slots)
    hit_first = cached[None, :] & (target == s.slots)[:, None]
    precedes = hit_first | ((cached[None, :] == cached[:, None]) & earlier)
    use_rank = tl.sum((is_first[None, :] & precedes).to(tl.int64), 1)
    miss_rank = tl.sum((miss[None, :] & earlier).to(tl.int32), 1)
    misses = tl.sum(miss.to(tl.int32), 0)
    count = misses.to(tl.int64)
    if misses < s.copies:
        count = tl.load(table.copies + misses)
    copied = miss & (miss_rank < count)
    old_slot = tl.load(slot + e, mask=e < s.E, other=s.slots)
    old_use = tl.load(last_use + e, mask=e < s.E)
    clock = tl.load(counters)
    one_hot = is_first[:, None] & (ids[:, None] == e[None, :])
    needed = tl.max(one_hot.to(tl.int32), 0) > 0
    evictable, kept = (old_slot < s.slots) & (needed == 0), old_slot
    for n in range(count):
        lowest = tl.min(tl.where(evictable, old_use, 1 << 62), 0)
        victim = evictable & (old_use == lowest)
        is_nth_miss = copied & (miss_rank == n)
        target = tl.where(is_nth_miss, tl.sum(tl.where(victim, old_slot, 0), 0), target)
        kept = tl.where(victim, s.slots, kept)
        evictable = evictable & (victim == 0)
    new_slot = tl.sum(tl.where(one_hot, target[:, None], 0), 0)
    tl.store(slot + e, tl.where(needed, new_slot, kept), mask=e < s.E)
    new_use = clock + tl.sum(tl.where(one_hot, use_rank[:, None], 0), 0)
    tl.store(last_use + e, tl.where(needed, new_use, old_use), mask=e < s.E)
    tl.store(counters, clock + s.pairs)
    hits = tl.sum((is_first & cached).to(tl.int64), 0)
    tl.store(counters + 1, tl.load(counters + 1) + hits)
    tl.store(counters + 2, tl.load(counters + 2) + misses)
    tl.store(counters + 3, tl.load(counters + 3) + misses - count)
    # An expert that is chosen again has the slot of the first time.
    first = tl.sum(tl.where(same & is_first[None, :], target[None, :], 0), 1)
    tl.store(to_copy + p, tl.where(copied, ids, -1), mask=p < s.pairs)
    tl.store(targets + p, tl.where(valid, first, s.slots), mask=p < s.pairs)


def place(chosen: Tensor, table: Table, slots: int) -> tuple[Tensor, Tensor]:
    """Give chosen experts slots and update the table -> experts to copy, and each one's slot.

    chosen int64 [P]: experts, at most R = slots different ones; P <= R is enough. Values outside
    0 .. E - 1 (other ranks' experts) are ignored. Return int64 [P], [P]: the expert to copy or -1,
    and the slot of the chosen one, R if it is in none. Hits count as used before misses, each in
    the order of `chosen`. The n-th miss takes the slot of the n-th victim, the least recently used.
    """
    if not can_launch(chosen):
        return place_plainly(chosen, table, slots)
    to_copy, targets = torch.empty_like(chosen), torch.empty_like(chosen)
    s = Place(slots, len(table.slot), len(chosen), len(table.copies))
    launch(_place, (1,), chosen, table, to_copy, targets, settings=s)
    return to_copy, targets


# Copies -------------------------------------------------------------------------------
#
# An expert is one blob in host memory: all tensors of its w13 and w2. The pool on the
# GPU is ordered by tensor, each [R, ...], since the products read it as stacked
# weights. So a blob of n tensors goes to n places.

CHUNK_WORDS = 4096  # 32-bit words that a program copies at a time: 8 loads of 16 bytes a lane
PROGRAMS = 512  # that copy an expert: 8 MB in flight; the link's bandwidth times latency is 0.1 MB


@dataclass(frozen=True)
class Fetch:
    """Settings of `_fetch`."""

    blob_words: int
    vectorize: bool  # all sizes are multiples of 16 bytes
    chunk: int = CHUNK_WORDS


# Grid [programs, P]: program (i, p) copies every num_programs(0)-th chunk of the p-th
# expert, from registered host memory over the link. A row of `chunks` is one chunk, in
# words: offset in the blob, offset in the pool's slot 0, distance between slots, size.
#
# host has the blobs' address. As an argument it would be another launch to
# ops/compile_ahead.py for each layer and run.
@jit(do_not_specialize_on_alignment=("experts", "slots"))  # a wave's begin anywhere
def _fetch(experts, slots, host, pool, chunks, count, s: tl.constexpr):
    pair = tl.program_id(1)
    expert = tl.load(experts + pair)
    if expert >= 0:
        slot = tl.load(slots + pair)
        blob = tl.load(host).to(tl.pointer_type(tl.int32)) + expert * s.blob_words
        for chunk in range(tl.program_id(0), count, tl.num_programs(0)):
            row = chunks + chunk * 4
            word, size = tl.arange(0, s.chunk), tl.load(row + 3)
            source = blob + tl.load(row) + word
            target = pool + tl.load(row + 1) + slot * tl.load(row + 2) + word
            if s.vectorize:  # a lane copies 4 words at once
                size = tl.multiple_of(size, 4)
                source = tl.max_contiguous(tl.multiple_of(source, 16), 4)
                target = tl.max_contiguous(tl.multiple_of(target, 16), 4)
            tl.store(target, tl.load(source, mask=word < size), mask=word < size)


@cache
def _chunk_table(layout: tuple[int, ...], slots: int, device: torch.device) -> Tensor:
    """Return the `chunks` of `_fetch`, made once, since a captured step cannot copy them."""
    chunks = []
    for start, size in zip(layout[::2], layout[1::2], strict=True):
        start, size = start // 4, size // 4
        chunks += [
            [start + n, slots * start + n, size, min(CHUNK_WORDS, size - n)]
            for n in range(0, size, CHUNK_WORDS)
        ]
    return torch.tensor(chunks).to(device)


@cache
def _address(address: int, device: torch.device) -> Tensor:
    """Return an address on the device, made once, since a captured step cannot copy it."""
    return torch.tensor([address]).to(device)


def fetch_plainly(
    experts: Tensor, slots: Tensor, host: Tensor, pool: Tensor, layout: list[int]
) -> None:
    """`fetch`, part by part, by the copy engine; the host reads the experts and the slots."""
    R = pool.numel() // host.shape[1]
    for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
        for start, size in zip(layout[::2], layout[1::2], strict=True):
            if expert >= 0:
                part = host[expert, start : start + size]
                pool[R * start + slot * size :][:size].copy_(part, non_blocking=True)


def fetches_by_kernel(host: Tensor, pool: Tensor, layout: list[int]) -> bool:
    """Whether a kernel copies: on a GPU, itself from registered memory, in words of 4 bytes."""
    words = all(size % 4 == 0 for size in layout[1::2])
    return words and can_launch(pool) and host.is_pinned()


def fetch(
    experts: Tensor,
    slots: Tensor,
    host: Tensor,
    pool: Tensor,
    layout: list[int],
    programs: int = PROGRAMS,
) -> None:
    """Copy blob host[experts[p]] into slot slots[p] of the pool, except where the expert is -1.

    experts, slots int64 [P]; host uint8 [E, bytes]; pool uint8 [R * bytes]. layout:
    start and size of each tensor in a blob, in bytes, one after the other. The pool has
    a tensor's slots [R, size] from byte R * start on. programs: of a kernel, at most,
    for each expert. With a few, kernels of other streams run beside it.
    """
    if not fetches_by_kernel(host, pool, layout):
        fetch_plainly(experts, slots, host, pool, layout)
        return
    chunks = _chunk_table(tuple(layout), pool.numel() // host.shape[1], pool.device)
    s = Fetch(host.shape[1] // 4, all(size % 16 == 0 for size in layout[1::2]))
    address, words = _address(host.data_ptr(), pool.device), pool.view(torch.int32)
    tensors = experts, slots, address, words, chunks, len(chunks)
    launch(_fetch, (min(len(chunks), programs), len(experts)), *tensors, settings=s)


class Found(NamedTuple):
    """What `find_experts` returns."""

    to_copy: Tensor  # int64 [P], the expert to fetch or -1
    targets: Tensor  # int64 [T, A], slots; R for experts in none
    slots: Tensor  # int64 [T, A], slots to read
    weights: Tensor  # fp32 [T, A], of these


def find_experts(
    chosen: Tensor, x: Tensor, weights: Tensor, table: Table, R: int, box: Mailbox | None
) -> Found:
    """`place`, then `ask` the CPU for its share. The caller fetches the rest.

    chosen int64, weights fp32 [T, A]: the experts of x [T, D]. Slots to read and weights are those
    of `ask`; or if box is None, targets and the given ones.
    """
    to_copy, targets = place(chosen.flatten(), table, R)
    targets = targets.view_as(chosen)
    if box is None:
        return Found(to_copy, targets, targets, weights)
    return Found(to_copy, targets, *ask(x, chosen, targets, weights, box, R, len(table.slot)))


@torch.library.custom_op("moe_fast::page", mutates_args=())
def page(
    chosen: Tensor,
    x: Tensor,
    weights: Tensor,
    table: list[Tensor],
    host: Tensor,
    pool: Tensor,
    layout: list[int],
    box: list[Tensor],
) -> Tensor:
    """`find_experts` and `fetch` for compiled blocks -> slots [T, A], once copies are done.

    table, box: the tensors of a `Table` and of a `Mailbox`; no box: the CPU has no share. The
    operator writes the table, the pool and the box in place but declares no mutation: weights are
    views of the pool, and functionalization would copy them all. That is safe, since readers depend
    on the returned slots and therefore run after the copies, and no reader from before is still to
    run.
    """
    mailbox, slots = Mailbox(*box) if box else None, pool.numel() // host.shape[1]
    found = find_experts(chosen, x, weights, Table(*table), slots, mailbox)
    fetch(found.to_copy, found.targets.flatten(), host, pool, layout)
    return found.targets.clone()  # this kernel waits for the copies, so that later ones need not


@page.register_fake
def _(chosen: Tensor, *others) -> Tensor:
    return torch.empty_like(chosen)
