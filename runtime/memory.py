"""Bytes of a session's cache, free memory, and the sequences that fit into it."""

from bisect import bisect_right
from dataclasses import dataclass

import torch

from host.upload_ahead import staged_bytes
from model import KVCache, ModelArgs, Transformer
from ops.plain.attention import BLOCK
from ops.plain.ring import Ring
from runtime.sequence_state import SequenceState
from runtime.snapshots import snapshots_kept

PREFILL_CHUNK = 2048  # prompt tokens in one call, for which memory is planned
# Tokens in one call where memory is free: each expert gets more rows, whose tiles are fuller, and
# SDPA has a faster kernel for a chunk that begins a prompt than for a later one.
LONG_CHUNKS = 16384, 8192, 4096
# Their activations may take a quarter of it: a graph keeps its own, and recurrent layers have more.
CHUNK_SPARE = 4
KEPT = 4  # conversations that stay cached, at least
# Where memory is short, fewer sequences run before the context becomes shorter than this.
LEAST_LENGTH = 8192
LEAST_CONTEXT = 256  # tokens of a sequence, below which a chat or a server is of no use
LEFT_FREE = (
    0.1  # a part of the memory beside the weights: for activations, CUDA graphs, other programs
)


class Shortage(ValueError):
    """Memory that is missing. Its message ends with a fix that suits any command."""

    def __init__(self, cause: str, fix: str):
        super().__init__(f"{cause}: {fix}")
        self.cause = cause


# Bytes --------------------------------------------------------------------------------------------


def cache_bytes(
    model: Transformer,
    batch: int,
    length: int,
    cache_class: type[KVCache],
    dtype: torch.dtype,
) -> int:
    """Return the bytes of every layer's cache for `batch` sequences of `length` positions.

    The caches are made on the meta device, so that each class counts its own tensors. Snapshots of
    rings are included (runtime/snapshots.py).
    """
    like = torch.empty(0, dtype=dtype, device="meta")
    states: list[SequenceState] = [
        block.allocate(batch, length, cache_class, like) for block in model.layers
    ]
    rings = sum(s.nbytes for s in states if isinstance(s, Ring))
    return sum(s.nbytes for s in states) + rings * snapshots_kept(rings // batch)


def free_gpu_memory(device: torch.device) -> int:
    """Return the bytes that PyTorch can allocate: the driver's free ones, and its own cache's.

    Copies of files count as free: weights take their memory.
    """
    staged = staged_bytes()
    free, total = torch.cuda.mem_get_info(device)
    if torch.cuda.get_device_properties(device).is_integrated:
        return total  # it shares the host's memory, where the driver counts the page cache as used
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free if device.index else free + staged


# A prompt's chunk ---------------------------------------------------------------------------------


def numbers_of_token(args: ModelArgs, per_position: int) -> int:
    """Return how many numbers one layer has in memory for each token of a prompt.

    These are x, attention's temporaries, the cache, and a row of each of the token's experts: its
    x, outputs of w13 and w2, and activation. per_position: numbers in a layer's cache.
    """
    attention = 2 * (args.n_head * args.head_dim + per_position)
    return 4 * args.dim + attention + args.n_active * 3 * (args.intermediate + args.dim)


def choose_chunk(args: ModelArgs, dtype: torch.dtype, free: int) -> int:
    """Return how many tokens of a prompt run at once, with `free` bytes beside the cache."""
    per_token = numbers_of_token(args, 2 * args.n_kv_head * args.head_dim) * dtype.itemsize
    fitting = (n for n in LONG_CHUNKS if CHUNK_SPARE * n * per_token <= free)
    return next(fitting, PREFILL_CHUNK)


# A server's session -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capacity:
    """The size of a session."""

    length: int  # tokens of a sequence, prompt and answer
    rows: int  # sequences that are remembered
    nbytes: int  # of their memory
    gpu_memory: int | None = None  # bytes that --gpu_memory gives; None: it is not given

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

    Rows are twice max_batch, and at least KEPT, or what fits. length: --max_seq_len; None: the
    model's, or what fits for max_batch rows; LEAST_LENGTH and LEAST_CONTEXT bound it from below.
    Raises Shortage if not even one sequence fits.
    """
    usable = max(0, int((1 - LEFT_FREE) * free))

    def row_bytes(length: int) -> int:
        return cache_bytes(model, 1, length + BLOCK, cache_class, dtype)

    limit, running = model.args.max_position, max(max_batch, KEPT)
    shortest = min(limit, LEAST_CONTEXT) if length is None else length
    if length is None:
        least = min(limit, LEAST_LENGTH)
        running = min(running, max(1, usable // row_bytes(least)))
        lengths = [*range(0, limit, BLOCK), limit]
        fitting = bisect_right(lengths, usable // running, key=row_bytes)
        length = lengths[max(0, fitting - 1)]
    length = max(length, shortest)
    row = row_bytes(length)
    rows = min(usable // row, max(2 * max_batch, KEPT))
    if rows < 1:
        raise Shortage(
            f"the KV cache of one sequence of {length:,} tokens needs {row / 1e9:.2f} GB, and "
            f"{usable / 1e9:.2f} GB are free for it beside the weights",
            "shorten --max_seq_len, or add --kv_cache int8",
        )
    return Capacity(length, rows, rows * row)
