"""Plan a session's memory before weights are read: `fit` returns what it holds, or refuses it."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from cli.options import DEFAULT_CHAT_LENGTH
from formats.kv_cache import KV_CACHES
from formats.packed import host_bytes, weight_bytes
from memory.cards import GB
from model import ModelArgs
from models import build_model, family_of
from models.random_weights import first_layers
from offload.plan import (
    ExpertSizes,
    OffloadSettings,
    check_host_fits,
    least_gpu_memory,
    make_plan,
    measure_experts,
    meta_reader,
)
from ops.plain.attention import BLOCK
from runtime.memory import (
    LEFT_FREE,
    PREFILL_CHUNK,
    Capacity,
    Shortage,
    cache_bytes,
    numbers_of_token,
    plan_capacity,
)
from tp import ModelShard

MARGIN = 0.05  # share of the free memory that is left for CUDA, if the session does not need it


# What is planned ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Free bytes. host: of the machine, for all ranks together."""

    gpu: int | None  # of each GPU; None: the session runs on the CPU
    host: int
    beside: str = ""  # says beside which other memory these are free


class ModelSizes:
    """The sizes of one rank's model in one format. Raises ValueError as `ModelShard`."""

    def __init__(
        self,
        args: ModelArgs,
        format: dict,
        dtype: torch.dtype,
        parallel: str = "tensor",
        ranks: int = 1,
    ):
        self.whole_args, self.format, self.dtype = args, format, dtype
        self.parallel, self.ranks = parallel, ranks
        # On the meta device, plain weights in `dtype`.
        self.shard = ModelShard(args, format, parallel, 0, ranks, dtype)
        self.model = self.shard.model
        self.args = self.model.args  # the rank's
        self.cache = lru_cache(self._cache)

    @cached_property
    def weights(self) -> int:
        """Bytes of all weights, but for those of `tables`."""
        return weight_bytes(self.model, self.dtype)

    @cached_property
    def tables(self) -> int:
        """Bytes of weights that stay in host memory (runtime/host_memory.py)."""
        return host_bytes(self.model, self.dtype)

    @cached_property
    def experts(self) -> ExpertSizes:
        """Raises ValueError for a model without experts."""
        return measure_experts(self.model, self.dtype, meta_reader(self.model, self.dtype))

    def _cache(self, batch: int, length: int, kv_cache: str) -> int:
        return cache_bytes(self.model, batch, length + BLOCK, KV_CACHES[kv_cache], self.dtype)

    def changed(
        self,
        format: dict | None = None,
        dtype: torch.dtype | None = None,
        ranks: int | None = None,
        layers: int | None = None,
    ) -> "ModelSizes | None":
        """Return the sizes in another format, or of the first layers; None: it cannot be had."""
        args, format = self.whole_args, format or self.format
        if layers is not None:
            args = first_layers(args, layers)
            paths = dict(build_model(args).named_modules())
            rows = {p: counts for p, counts in format.get("rows", {}).items() if p in paths}
            paths |= {f"{p}.{n}": None for p, counts in rows.items() for n in range(len(counts))}
            modules = {p: spec for p, spec in format.get("modules", {}).items() if p in paths}
            format = format | ({"modules": modules, "rows": rows} if modules else {})
        try:
            dtype, ranks = dtype or self.dtype, ranks or self.ranks
            return ModelSizes(args, format, dtype, self.parallel, ranks)
        except ValueError:
            return None


@dataclass(frozen=True)
class Setup:
    """All that decides how much memory one rank's session needs."""

    sizes: ModelSizes
    length: int | None  # positions of a sequence; None: a server's, as many as fit
    batch: int = 1  # sequences; of a server the least that has to fit
    kv_cache: str = "plain"
    prefill_chunk: int | None = None
    offload: OffloadSettings | None = None  # its reserve is not read
    max_batch: int | None = None  # --max_batch of a server; None: no server
    mapped: bool = False  # on the CPU: weights are read from the disk's cache when first used
    extra: int = 0  # bytes of a draft model and its cache; of a server those of a head
    longest: int | None = None  # tokens of the longest prompt, if it is known

    @property
    def positions(self) -> int:
        """The length of a session that offloads."""
        return self.length or min(self.sizes.args.max_position, DEFAULT_CHAT_LENGTH)


def session_bytes(
    args: ModelArgs,
    cache: int,
    dtype: torch.dtype,
    length: int,
    batch: int,
    kv_cache: str,
    prefill_chunk: int | None,
) -> int:
    """Return the bytes of the KV cache (`cache`) and of the activations beside it.

    args: one rank's. Activations are those of one layer for a prefill chunk or a step. Longer
    chunks than PREFILL_CHUNK take what is left. An int8 cache is dequantized one layer at a time,
    through fp32.
    """
    tokens = max(min(prefill_chunk or PREFILL_CHUNK, length), batch)
    per_position, extra = family_of(args).attention_memory(args, length)
    row = numbers_of_token(args, per_position)
    if kv_cache == "int8":  # codes and their product in fp32, then in dtype
        width = 2 * torch.float32.itemsize + dtype.itemsize
        cache += batch * (length + BLOCK) * per_position * width
    return cache + (extra + tokens * row) * dtype.itemsize + batch * args.vocab_size * 16


# The plan -----------------------------------------------------------------------------------------


def fit(setup: Setup, memory: Memory) -> Capacity:
    """Return what the session holds. Raises Shortage naming what does not fit.

    Raises ValueError for settings of offloading that no memory makes valid.
    """
    memory = memory_beside_tables(setup, memory)
    if setup.extra:
        memory = memory_beside_draft(setup.extra, memory)
    if setup.offload:
        return fit_offloaded(setup, setup.offload, memory)
    sizes, left = setup.sizes, memory_beside_weights(setup, memory)
    if setup.max_batch is not None:
        cache_class = KV_CACHES[setup.kv_cache]
        found = plan_capacity(
            sizes.model, cache_class, sizes.dtype, left, setup.max_batch, setup.length
        )
        if found.rows < setup.batch:
            need, free = setup.batch * found.nbytes // found.rows, int((1 - LEFT_FREE) * left)
            raise Shortage(
                f"--max_batch {setup.batch}: the KV cache of as many sequences of {found.length:,} "
                f"tokens needs {need / GB:.2f} GB, and {free / GB:.2f} GB are free for it beside "
                "the weights",
                "lower it, or --max_seq_len",
            )
        # A head drafts for a server, and knows one text.
        return replace(found, rows=1, nbytes=found.nbytes // found.rows) if setup.extra else found
    need = reserve(setup, setup.longest)
    if need > left:
        several = "1 sequence" if setup.batch == 1 else f"{setup.batch:,} sequences"
        raise Shortage(
            f"the KV cache of {several} of {setup.length:,} tokens and activations need "
            f"{need / GB:.2f} GB, and {left / GB:.2f} GB are free for them beside the weights",
            "shorten --max_seq_len",
        )
    return Capacity(setup.length, setup.batch, need)


def memory_beside_tables(setup: Setup, memory: Memory) -> Memory:
    """Return the memory that tables in host memory leave. Raises Shortage if they do not fit.

    Each rank has its own. On the CPU they may be read from their file instead.
    """
    need = setup.sizes.ranks * setup.sizes.tables
    if memory.gpu is None and setup.mapped:
        need = 0
    if need > memory.host:
        raise Shortage(
            f"tables that stay in host memory need {need / GB:.1f} GB, of which "
            f"{memory.host / GB:.1f} GB are free",
            "use a machine with more",
        )
    return replace(memory, host=memory.host - need)


def memory_beside_draft(extra: int, memory: Memory) -> Memory:
    """Return the memory that a draft model leaves. Raises Shortage if it does not fit."""
    field, owner = ("host", "this machine") if memory.gpu is None else ("gpu", "the GPU")
    free = getattr(memory, field)
    if extra > free:
        raise Shortage(
            f"the draft model and its cache need {extra / GB:.1f} GB and {owner} has "
            f"{free / GB:.1f} GB free",
            "use a smaller draft model",
        )
    return replace(memory, **{field: free - extra, "beside": " beside the draft model"})


def memory_beside_weights(setup: Setup, memory: Memory) -> int:
    """Return the bytes for a cache. Raises Shortage if not even the weights fit.

    A server on the CPU leaves half of them to other programs.
    """
    need, free, owner = setup.sizes.weights, memory.gpu, "the GPU"
    if free is None:
        free, owner = memory.host // setup.sizes.ranks, "this machine"
        need = 0 if setup.mapped else need
    if need > free:
        raise Shortage(
            f"the weights need {need / GB:.1f} GB and {owner} has {free / GB:.1f} GB "
            f"free{memory.beside}",
            "use a smaller number format",
        )
    halved = memory.gpu is None and setup.max_batch is not None
    return (free - need) // (2 if halved else 1)


def fit_offloaded(setup: Setup, settings: OffloadSettings, memory: Memory) -> Capacity:
    """`fit` for experts in host memory."""
    sizes, length, batch = setup.sizes, setup.positions, setup.batch
    experts, on_gpu = sizes.experts, memory.gpu is not None
    settings = replace(settings, reserve=reserve(setup))
    if memory.gpu is not None and (settings.gpu_memory or 0) > memory.gpu:
        settings = replace(settings, gpu_memory=lower_gpu_memory(setup, settings, memory))
    plan = make_plan(experts, settings)
    need = plan.nbytes + settings.reserve
    if memory.gpu is not None and need > memory.gpu:
        raise Shortage(
            f"{plan.slots} experts per layer, all other weights, the KV cache of {length:,} tokens "
            f"and activations need {need / GB:.1f} GB, and the GPU has {memory.gpu / GB:.1f} GB "
            f"free{memory.beside}",
            "lower --gpu_experts",
        )
    check_host_fits(sizes.ranks * (experts.host_bytes + (0 if on_gpu else need)), memory.host)
    cache = sizes.cache(batch, length, setup.kv_cache)
    return Capacity(length, batch, cache, settings.gpu_memory)


def lower_gpu_memory(setup: Setup, settings: OffloadSettings, memory: Memory) -> int:
    """Return the bytes to use for a --gpu_memory above the free ones.

    They leave MARGIN of the free memory for CUDA, or as much of it as the least session does.
    Raises Shortage if that session does not fit.
    """
    least = least_gpu_memory(setup.sizes.experts, settings)
    if least > memory.gpu:
        raise Shortage(
            f"--offload: the least experts, all other weights, the KV cache of "
            f"{setup.positions:,} tokens and activations need {least / GB:.1f} GB, and the GPU has "
            f"{memory.gpu / GB:.1f} GB free{memory.beside}",
            "shorten --max_seq_len",
        )
    return max(least, int((1 - MARGIN) * memory.gpu))


def reserve(setup: Setup, longest: int | None = None) -> int:
    """Return the bytes of a session's cache and activations. longest: tokens of a prompt, at most.

    One that offloads reserves them before its prompts are known.
    """
    sizes, length = setup.sizes, setup.positions
    chunk = min(setup.prefill_chunk or PREFILL_CHUNK, longest or length)
    cache = sizes.cache(setup.batch, length, setup.kv_cache)
    return session_bytes(sizes.args, cache, sizes.dtype, length, setup.batch, setup.kv_cache, chunk)
