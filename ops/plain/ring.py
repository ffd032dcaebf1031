"""The ring cache of a layer with a sliding window, in plain PyTorch.

Position p is in slot p % R, where a later position replaces it. Three things write positions that
are not a sequence's next ones, and R has slots for them: a call's own tokens, of which the first
still sees a whole window; drafts that are refused; and tokens that a changed prompt takes back.
Padding and idle rows write nothing: their positions may be anywhere.

Letters: B sequences, Q tokens of each, K KV heads, R slots, C head dim.
"""

from functools import cache

import torch
from torch import Tensor

from ops.inductor import custom_op

RING_SPARE = 64  # slots beside the window: the most tokens of a call that reads the ring in place
RING_MULTIPLE = 128  # slots are a multiple of it: `ops.plain.attention.BLOCK`


def cache_slots(length: int, window: int | None) -> int:
    """Return the slots of a layer's cache, for sequences of up to `length` positions."""
    if window is None:
        return length
    return min(length, -(-(window + RING_SPARE) // RING_MULTIPLE) * RING_MULTIPLE)


class Ring:
    """What a cache whose tensors are rings does otherwise than `model.KVCache`: see `ring_of`."""

    def write(self, memory: Tensor, values: Tensor, context) -> Tensor:
        """Store the call's real tokens; return what they read, as `KVCache.write`."""
        if context.chunk is not None:
            return append_chunk(memory, values, *context.chunk, context.last)
        lengths = [mask.bias.shape[-1] for mask in (context.masks or {}).values()]
        place = context.positions, context.last
        return append_to_ring(memory, values, *place, max(lengths, default=None))

    def recurrent(self, row: int) -> list[Tensor]:
        """Return all of a row's memory, since a later position replaces an earlier one."""
        return self.row(row)


@cache
def ring_of(cache_class: type) -> type:
    """Return the class of caches whose tensors are rings. cache_class: a `model.KVCache`."""
    return type(f"Ring{cache_class.__name__}", (Ring, cache_class), {})


def slot_positions(newest: Tensor, slots: int) -> Tensor:
    """Return the position in each slot, [..., slots], once `newest` [..., 1] is stored.

    It is negative where there is none. Slots that no sequence has reached may be left out.
    """
    slot = torch.arange(slots, device=newest.device)
    return newest - (newest - slot) % slots


def ring_positions(positions: Tensor, slots: int, length: int) -> Tensor:
    """Return the positions of the keys that `append_to_ring` returns, [B, N].

    positions [B, Q]; slots: R; length: at least one more than all positions.
    """
    if (Q := positions.shape[1]) <= RING_SPARE:
        return slot_positions(positions[:, -1:], min(slots, length))
    before = slot_positions(positions[:, :1] - 1, min(slots, length - Q))
    return torch.cat((before, positions), dim=1)


def append_to_ring(
    ring: Tensor, kv: Tensor, positions: Tensor, last: Tensor | None, length: int | None
) -> Tensor:
    """Store the real tokens of kv [B, Q, 2, K, C] in a ring [2, rows, K, R, C].

    Return what the tokens read, [2, B, K, N, C]: the first `length` slots after that. More tokens
    than RING_SPARE read the slots as they were before, and then the tokens, `length` in all at
    most. positions [B, Q]; last [B]: each row's last real token, None: all are.
    """
    (B, Q), before = positions.shape, None
    if Q > RING_SPARE:
        slots = ring[:, :B, :, : None if length is None else length - Q]
        before = torch.cat((slots, kv.permute(2, 0, 3, 1, 4)), 3)
    store(ring, kv, torch.arange(B, device=kv.device).unsqueeze(1), positions, last)
    return ring[:, :B, :, :length] if before is None else before


@custom_op("moe_fast::append_chunk", mutates_args=("ring",))
def append_chunk(ring: Tensor, kv: Tensor, row: Tensor, end: int, last: Tensor | None) -> Tensor:
    """Store a prompt's chunk kv [1, Q, 2, K, C]; return what it reads, [2, K, N, C].

    That is the window before the chunk or more, as far as there is one, then the chunk's tokens.
    row int64 [1], end: as in `model.Chunk`. last: as in `append_to_ring`. A custom operator: else
    Dynamo compiles a case for each way in which a chunk can lie in the ring.
    """
    begin = end - kv.shape[1]
    found = torch.cat((past_of_chunk(ring, row, begin), kv[0].permute(1, 2, 0, 3)), 2)
    store(ring, kv, row, torch.arange(begin, end, device=kv.device).unsqueeze(0), last)
    return found


@append_chunk.register_fake
def _(ring: Tensor, kv: Tensor, row: Tensor, end: int, last: Tensor | None) -> Tensor:
    past = torch.sym_min(end - kv.shape[1], ring.shape[3] - RING_SPARE)
    return ring.new_empty(ring.shape[0], ring.shape[2], past + kv.shape[1], ring.shape[4])


def past_of_chunk(ring: Tensor, row: Tensor | None, begin: int | Tensor) -> Tensor:
    """Return what a ring has of the window before position `begin`, or more: [2, K, N, C].

    row int64 [1]; None: the first. begin int64 [1] is not known by the host: then N is always the
    same, and positions before 0 are any.
    """
    R = ring.shape[3]
    count = R - RING_SPARE if isinstance(begin, Tensor) else min(begin, R - RING_SPARE)
    slots = (begin + torch.arange(-count, 0, device=ring.device)) % R
    own = ring[:, 0] if row is None else ring.index_select(1, row).squeeze(1)
    return own.index_select(2, slots)


def store(ring: Tensor, kv: Tensor, rows: Tensor, positions: Tensor, last: Tensor | None) -> None:
    """Store the real tokens of kv [B, Q, 2, K, C] at positions [B, Q] of rows [B, 1] or [1]."""
    # A ring takes its own length of tokens: earlier ones would share slots with them.
    newest, slots = kv[:, -ring.shape[3] :], positions[:, -ring.shape[3] :] % ring.shape[3]
    if last is not None:
        index = torch.arange(kv.shape[1], device=kv.device)[-ring.shape[3] :]
        is_real = (index <= last.unsqueeze(1))[:, :, None, None, None]
        newest = torch.where(is_real, newest, ring[:, rows, :, slots])
    ring[:, rows, :, slots] = newest
