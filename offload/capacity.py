"""How many tokens and conversations fit into the memory that the weights leave."""

from dataclasses import dataclass

import torch

from model import KVCache, Transformer
from offload.plan import cache_bytes
from ops.attention import BLOCK

KEPT = 4  # conversations that stay cached, at least
# Where memory is short, fewer sequences run before the context becomes shorter than this.
LEAST_LENGTH = 8192
LEFT_FREE = (
    0.1  # a part of the memory beside the weights: for activations, CUDA graphs, other programs
)


@dataclass(frozen=True)
class Capacity:
    """The size of a server's session."""

    length: int  # tokens of a sequence, prompt and answer
    rows: int  # sequences that are remembered
    nbytes: int  # of their memory

    def describe(self, max_batch: int) -> str:
        """Return a line for the user."""
        return (
            f"context {self.length:,} tokens, up to {max_batch} answers side by side, "
            f"{self.rows} conversations kept ({self.nbytes / 1e9:.2f} GB)"
        )


def plan_capacity(
    model: Transformer,
    cache_class: type[KVCache],
    dtype: torch.dtype,
    free: int,
    max_batch: int,
    length: int | None = None,
) -> Capacity:
    """Return what fits into `free` bytes. model: one rank's, on the meta device.

    Rows are twice max_batch, and at least KEPT, or what fits. length: of --max_seq_len; None: the
    model's, or what fits for as many rows as run, but see LEAST_LENGTH. Raises ValueError if not
    even one sequence fits.
    """
    usable = max(0, int((1 - LEFT_FREE) * free))

    def needed(rows: int, length: int) -> int:
        return cache_bytes(model, rows, length, cache_class, dtype)

    fixed = 2 * needed(1, BLOCK) - needed(1, 2 * BLOCK)  # a row's recurrent states
    per_block = needed(1, 2 * BLOCK) - needed(1, BLOCK)
    limit, running = model.args.max_position, max(max_batch, KEPT)
    if length is None:
        least = min(limit, LEAST_LENGTH)
        running = min(running, max(1, usable // needed(1, least + BLOCK)))
        blocks = (usable // running - fixed) // max(per_block, 1) - 1  # a spare one
        length = min(limit, blocks * BLOCK) if per_block else limit
    row = needed(1, max(length, 1) + BLOCK)
    rows = min(usable // row, max(2 * max_batch, KEPT))
    if length < 1 or rows < 1:
        raise ValueError(
            f"the cache of one sequence needs {row / 1e9:.2f} GB and {usable / 1e9:.2f} GB are "
            "free: shorten --max_seq_len, or add --kv_cache int8"
        )
    return Capacity(length, rows, rows * row)


def free_host_memory() -> int:
    """Return the bytes that this machine can give without swapping."""
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
