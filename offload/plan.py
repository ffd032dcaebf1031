"""Plan the GPU's memory, and move experts to host memory while a model is loaded."""

import logging
import weakref
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import torch

from formats.packed import Packed
from model import KVCache, MoE, Transformer
from offload.cache import POLICIES
from offload.copies import CopyStream
from offload.experts import BlobPart, LayerStorage, OffloadedExperts, Reader, plan_blob

DRIVERS = "host", "device"  # the CPU or the GPU schedules copies
STAGING_BUFFERS = 4  # for prefetches, as in Eliseev & Mazur 2023
LARGE_EXPERT = 16 << 20  # bytes; prefetching larger ones is faster
PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister

log = logging.getLogger("moe_fast")


# Memory -------------------------------------------------------------------------------------------


def weight_bytes(model: Transformer, dtype: torch.dtype, without: Collection[int] = ()) -> int:
    """Return the bytes of the weights, of those that are not packed in `dtype`.

    without: the ids of parameters that do not count.
    """
    packed = {
        id(part) for m in model.modules() if isinstance(m, Packed) for part in m.parts().values()
    }
    return sum(
        p.nbytes if id(p) in packed else p.numel() * dtype.itemsize
        for p in model.parameters()
        if id(p) not in without
    )


def cache_bytes(
    model: Transformer,
    batch: int,
    length: int,
    cache_class: type[KVCache],
    dtype: torch.dtype,
) -> int:
    """Return the bytes of every layer's cache for `batch` sequences of `length` positions.

    The caches are made on the meta device, so that each class counts its own tensors.
    """
    like = torch.empty(0, dtype=dtype, device="meta")
    attentions = [block.attention for block in model.layers]
    return sum(a.allocate(batch, length, cache_class, like).nbytes for a in attentions)


def free_gpu_memory(device: torch.device) -> int:
    """Return the bytes that PyTorch can allocate: the driver's free ones, and its own cache's."""
    free, total = torch.cuda.mem_get_info(device)
    if torch.cuda.get_device_properties(device).is_integrated:
        return total  # it shares the host's memory, where the driver counts the page cache as used
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_weights_fit(need: int, free: int) -> None:
    """Raise ValueError if `need` bytes of weights exceed `free` bytes of GPU memory."""
    if need > free:
        limit = f"{free // 10**9}GB" if free >= 10**9 else f"{free // 10**6}MB"
        raise ValueError(
            f"the weights need {need / 1e9:.1f} GB and the GPU has {free / 1e9:.1f} GB free: "
            "quantize them (quantize.py --mode int4), add --offload --gpu_memory "
            f"{limit}, or start more processes with torchrun"
        )


def check_plan_fits(need: int, slots: int, free: int) -> None:
    """Raise ValueError if offloading allocates `need` bytes, with R = slots, of `free` bytes."""
    if need > free:
        raise ValueError(
            f"{slots} experts per layer and all other weights need {need / 1e9:.1f} GB and the "
            f"GPU has {free / 1e9:.1f} GB free: lower --gpu_experts or --gpu_memory"
        )


# The plan -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OffloadSettings:
    """Give either gpu_experts or gpu_memory. Raises ValueError for invalid combinations."""

    gpu_experts: int | None = None  # R, slots per layer
    gpu_memory: int | None = None  # bytes for weights, slots and `reserve` together, per GPU
    policy: str = "lru"
    prefetch: int | None = None  # experts per token and layer; None: see `choose_prefetch`
    driver: str | None = None  # of DRIVERS; None: device, or host if there are prefetches
    reserve: int = 0  # bytes of gpu_memory for the KV cache and activations

    def __post_init__(self):
        if (self.gpu_experts is None) == (self.gpu_memory is None):
            raise ValueError("offloading takes --gpu_experts or --gpu_memory: give one of the two")
        for name, known in {"policy": POLICIES, "driver": (None, *DRIVERS)}.items():
            if getattr(self, name) not in known:
                options = ", ".join(filter(None, known))
                raise ValueError(f"{name} {getattr(self, name)!r}: it must be one of {options}")
        if self.driver == "device" and self.prefetch:
            raise ValueError("--offload_driver device does not prefetch: leave --prefetch out")


def choose_slots(
    settings: OffloadSettings, total: int, active: int, resident: int, slot: int
) -> int:
    """Return R, the slots per layer. Raises ValueError naming the limits.

    total: E of this rank. resident: bytes on the GPU beside slots. slot: bytes of one slot in every
    layer.
    """
    least = min(active, total)  # one token's experts must fit at once
    if settings.gpu_experts is None:
        found = (settings.gpu_memory - resident) // slot
        if found < least:
            need = (resident + least * slot) / 1e9
            raise ValueError(
                f"--gpu_memory {settings.gpu_memory / 1e9:.4g}GB: {least} experts per layer take "
                f"{least * slot / 1e9:.4g} GB, everything else {resident / 1e9:.4g} GB: "
                f"give at least {need + 5e-4:.3f}GB"
            )
        return min(found, total)
    if not least <= settings.gpu_experts <= total:
        raise ValueError(
            f"--gpu_experts {settings.gpu_experts}: it must be from {least} (active) to "
            f"{total} (all)"
        )
    return settings.gpu_experts


def choose_prefetch(settings: OffloadSettings, total: int, size: int, device: torch.device) -> int:
    """Return the number of prefetches per token and layer. size: bytes of an expert.

    Only the CPU prefetches, and its wait takes 0.1 ms per layer on an H200. With experts of 66 MB
    (Mixtral in 2 bits) the CPU with two prefetches is faster than the GPU without; with 2.4 MB
    (Qwen3-30B-A3B in 4 bits) the GPU makes twice the tokens/s.
    """
    if settings.prefetch is not None:
        return settings.prefetch
    possible = settings.driver != "device" and device.type == "cuda"
    return 2 if possible and settings.gpu_experts != total and size >= LARGE_EXPERT else 0


def register_host_memory(host: torch.Tensor, owner: object, device: torch.device) -> bool:
    """Register host memory with CUDA for the owner's life, so that copies are asynchronous.

    Return whether it worked; log a warning if not. PyTorch's pinned memory would take up to twice
    the bytes, because it rounds up to powers of two.
    """
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(host.data_ptr(), host.nbytes, PORTABLE_AND_MAPPED)
    if int(error) == 0:
        undo = weakref.finalize(owner, runtime.cudaHostUnregister, host.data_ptr())
        undo.atexit = False  # the process's end unregisters it anyway
        return True
    with suppress(RuntimeError):  # the next kernel reports the error again: launch one here
        torch.empty(1, device=device).zero_()
    log.warning(
        f"warning: {host.nbytes / 1e9:.1f} GB of host memory cannot be registered with CUDA "
        f"({error}): copies will be slower; raise the limit of locked memory"
    )
    return False


@dataclass
class OffloadPlan:
    """All decisions of `offload_experts`, made before it moves a weight."""

    layouts: dict[int, tuple[list[BlobPart], int]]  # by layer: parts and bytes of a blob
    n_local: int  # E of this rank
    prefetch: int  # experts per token and layer
    kept: int  # bytes of weights that stay on the device
    buffers: int  # staging buffers
    slots: int  # R

    @property
    def nbytes(self) -> int:
        """Bytes to allocate on the device: other weights, slots and staging buffers."""
        return self.kept + self.slots * sum(self.sizes) + self.buffers * max(self.sizes)

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.layouts.values()]


def make_plan(
    model: Transformer,
    settings: OffloadSettings,
    device: torch.device,
    dtype: torch.dtype,
    read: Reader,
) -> OffloadPlan:
    """Return the plan. Raises ValueError for a model without experts, and as `choose_slots`."""
    ffns = {n: block.ffn for n, block in enumerate(model.layers) if isinstance(block.ffn, MoE)}
    if not ffns:
        raise ValueError("--offload: no layer of this model has experts")
    n_expert = model.args.n_expert
    if not 0 <= (settings.prefetch or 0) <= n_expert:
        raise ValueError(
            f"--prefetch {settings.prefetch}: it must be from 0 to {n_expert}, the experts of a "
            "layer"
        )
    layouts = {
        n: plan_blob(f"layers.{n}.ffn.experts", ffn.experts, read) for n, ffn in ffns.items()
    }
    sizes = [size for _, size in layouts.values()]
    n_local = next(iter(ffns.values())).experts.n_expert
    prefetch = choose_prefetch(settings, n_local, max(sizes), device)
    experts = {id(p) for ffn in ffns.values() for p in ffn.experts.parameters()}
    kept = weight_bytes(model, dtype, experts)
    buffers = max(STAGING_BUFFERS, prefetch) if prefetch else 0
    resident = kept + buffers * max(sizes) + settings.reserve
    slots = choose_slots(settings, n_local, model.args.n_active, resident, sum(sizes))
    return OffloadPlan(layouts, n_local, prefetch, kept, buffers, slots)


def offload_experts(
    model: Transformer,
    settings: OffloadSettings,
    device: torch.device,
    dtype: torch.dtype,
    read: Reader,
) -> str:
    """Move a meta model's experts to host memory, and R of each layer to the device.

    dtype: of unpacked weights. read: reads this rank's parameters. Return the plan as one line.
    Raises ValueError as `make_plan`, and if the GPU lacks memory, before it reads all experts.
    """
    plan = make_plan(model, settings, device, dtype, read)
    if device.type == "cuda":
        check_plan_fits(plan.nbytes, plan.slots, free_gpu_memory(device))
    host = torch.empty(plan.n_local * sum(plan.sizes), dtype=torch.uint8)
    copies = CopyStream(device, plan.buffers, max(plan.sizes))
    readable = all(part.nbytes % 4 == 0 for parts, _ in plan.layouts.values() for part in parts)
    if device.type == "cuda":
        readable = register_host_memory(host, copies, device) and readable
    if settings.driver == "device" and not readable:
        raise ValueError(
            "--offload_driver device: registered memory in steps of 4 bytes is needed: leave it out"
        )
    gpu_default = readable and not plan.prefetch and device.type == "cuda"
    driver = settings.driver or ("device" if gpu_default else "host")
    blobs = host.split([plan.n_local * size for size in plan.sizes])
    above = None
    for (n, (parts, _)), layer_blobs in zip(plan.layouts.items(), blobs, strict=True):
        storage = LayerStorage(
            layer=n,
            total_experts=model.args.n_expert,
            parts=parts,
            blobs=layer_blobs.view(plan.n_local, -1),
            slots=plan.slots,
            policy=settings.policy,
            copies=copies,
            device=device,
            kernel_reads_host=readable,
            gpu_schedules=driver == "device",
        )
        fill_blobs(storage.blobs, parts, read)
        ffn = model.layers[n].ffn
        ffn.experts = offloaded = OffloadedExperts(ffn.experts, storage)
        if above is not None and plan.prefetch:
            above.prefetch_count, above.next_layer = plan.prefetch, [ffn, offloaded]
        above = offloaded
    return describe_plan(plan, settings, model.args, host.nbytes)


def fill_blobs(blobs: torch.Tensor, parts: list[BlobPart], read: Reader) -> None:
    """Read one layer's experts into host memory [E, bytes]."""
    for part in parts:
        whole = read(part.name, "cpu").reshape(len(blobs), -1).view(torch.uint8)
        blobs[:, part.start : part.start + part.nbytes] = whole


def describe_plan(plan: OffloadPlan, settings: OffloadSettings, args, host_bytes: int) -> str:
    """Return the plan as one line, for the log."""

    def gb(size: float) -> str:
        return f"{size / 1e9:.4g} GB"

    sizes, slots, n_local = plan.sizes, plan.slots, plan.n_local
    missed = args.n_active * sum(sizes) * (n_local - slots) / args.n_expert
    return (
        f"offload: {slots} of {n_local} experts a layer on the device ({gb(slots * sum(sizes))}),"
        f" {gb(plan.kept)} of other weights, {gb(plan.buffers * max(sizes))} for prefetches, "
        f"{gb(settings.reserve)} reserved for KV cache and activations; {gb(host_bytes)} in host "
        f"memory; {missed / 1e6:.4g} MB to copy per token if the router chose uniformly"
    )
