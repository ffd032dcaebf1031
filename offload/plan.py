"""Deciding how experts are offloaded, and putting them into host memory while a model is loaded."""

import logging
import weakref
from contextlib import suppress
from dataclasses import dataclass

import torch

from formats.packed import Packed
from model import MoE, Transformer
from offload.cache import POLICIES
from offload.copies import CopyStream
from offload.experts import BlobPart, LayerStorage, OffloadedExperts, Reader, plan_blob

DRIVERS = "host", "device"  # whether the CPU or the GPU schedules copies
STAGING_BUFFERS = 4  # for prefetches, as in Eliseev & Mazur 2023
LARGE_EXPERT = 16 << 20  # bytes from which prefetching pays
PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister

log = logging.getLogger("moe_fast")


@dataclass(frozen=True)
class OffloadSettings:
    """Give gpu_experts, or the gpu_memory that it follows from. Raises ValueError otherwise."""

    gpu_experts: int | None = None  # R, slots a layer
    gpu_memory: int | None = None  # bytes for weights, slots and `reserve` together, per GPU
    policy: str = "lru"
    prefetch: int | None = None  # experts a token and layer; None: see `choose_prefetch`
    driver: str | None = None  # of DRIVERS; None: the GPU schedules, unless there are prefetches
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
    """Return R.

    total: E of this rank; resident: bytes on the GPU beside slots; slot: bytes of one slot in every
    layer. Raises ValueError with what would do.
    """
    least = min(active, total)  # one token's experts must fit at once
    if settings.gpu_experts is None:
        found = (settings.gpu_memory - resident) // slot
        if found < least:
            need = (resident + least * slot) / 1e9
            raise ValueError(
                f"--gpu_memory {settings.gpu_memory / 1e9:.4g}GB: what stays on the GPU takes "
                f"{resident / 1e9:.4g} GB, {least} experts a layer {least * slot / 1e9:.4g} GB: "
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
    """Return how many experts a token and layer are prefetched. size: bytes of an expert.

    Prefetching needs the host, whose wait takes 0.1 ms a layer on an H200. With experts of 66 MB
    (Mixtral in 2 bits) the CPU with two prefetches is faster than the GPU's scheduling; with 2.4
    MB (Qwen3-30B-A3B in 4 bits) the GPU's makes twice the tokens.
    """
    if settings.prefetch is not None:
        return settings.prefetch
    possible = settings.driver != "device" and device.type == "cuda"
    return 2 if possible and settings.gpu_experts != total and size >= LARGE_EXPERT else 0


def register_host_memory(host: torch.Tensor, owner: object, device: torch.device) -> bool:
    """Register host memory with CUDA for the owner's life, so that copies are asynchronous.

    Logs a warning if that fails. PyTorch's pinned memory rounds up to powers of two: up to twice
    the bytes.
    """
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(host.data_ptr(), host.nbytes, PORTABLE_AND_MAPPED)
    if int(error) == 0:
        undo = weakref.finalize(owner, runtime.cudaHostUnregister, host.data_ptr())
        undo.atexit = False  # the end of the process does it
        return True
    with suppress(RuntimeError):  # CUDA reports the error again with the next kernel: launch one
        torch.empty(1, device=device).zero_()
    log.warning(
        f"warning: {host.nbytes / 1e9:.1f} GB of host memory cannot be registered with CUDA "
        f"({error}): copies will be slower; raise the limit of locked memory"
    )
    return False


@dataclass
class OffloadPlan:
    """What `offload_experts` found out about a model before it moves a weight."""

    layouts: dict[int, tuple[list[BlobPart], int]]  # by layer: parts and size of a blob
    total: int  # E of this rank
    prefetch: int
    kept: int  # bytes of weights that stay on the device
    buffers: int  # staging buffers
    slots: int

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
    """Return the plan. Raises ValueError for a model without experts and as `choose_slots`."""
    blocks = {n: block for n, block in enumerate(model.layers) if isinstance(block.ffn, MoE)}
    if not blocks:
        raise ValueError("--offload: no layer of this model has experts")
    n_expert = model.args.n_expert
    if not 0 <= (settings.prefetch or 0) <= n_expert:
        raise ValueError(
            f"--prefetch {settings.prefetch}: it must be from 0 to {n_expert}, the experts of a "
            "layer"
        )
    layouts = {
        n: plan_blob(f"layers.{n}.ffn.experts", block.ffn.experts, read)
        for n, block in blocks.items()
    }
    sizes = [size for _, size in layouts.values()]
    total = next(iter(blocks.values())).ffn.experts.n_expert
    prefetch = choose_prefetch(settings, total, max(sizes), device)
    experts = {id(p) for block in blocks.values() for p in block.ffn.experts.parameters()}
    packed = {
        id(part) for m in model.modules() if isinstance(m, Packed) for part in m.parts().values()
    }
    kept = sum(
        p.nbytes if id(p) in packed else p.numel() * dtype.itemsize
        for p in model.parameters()
        if id(p) not in experts
    )
    buffers = max(STAGING_BUFFERS, prefetch) if prefetch else 0
    resident = kept + buffers * max(sizes) + settings.reserve
    slots = choose_slots(settings, total, model.args.n_active, resident, sum(sizes))
    return OffloadPlan(layouts, total, prefetch, kept, buffers, slots)


def offload_experts(
    model: Transformer,
    settings: OffloadSettings,
    device: torch.device,
    dtype: torch.dtype,
    read: Reader,
) -> str:
    """Put a meta model's experts into host memory and R of each layer on the device.

    dtype: of weights in no number format. read: this rank's parameters. Returns the plan in one
    line. Raises ValueError, before much is read, as `make_plan`.
    """
    plan = make_plan(model, settings, device, dtype, read)
    size = max(plan.sizes)
    host = torch.empty(plan.total * sum(plan.sizes), dtype=torch.uint8)
    copies = CopyStream(device, plan.buffers, size)
    parts = [part for parts, _ in plan.layouts.values() for part in parts]
    readable = all(part.nbytes % 4 == 0 for part in parts)
    if device.type == "cuda":
        readable = register_host_memory(host, copies, device) and readable
    if settings.driver == "device" and not readable:
        raise ValueError(
            "--offload_driver device: registered memory in steps of 4 bytes is needed: leave it out"
        )
    gpu_default = readable and not plan.prefetch and device.type == "cuda"
    driver = settings.driver or ("device" if gpu_default else "host")
    start, above = 0, None
    for n, (parts, size) in plan.layouts.items():
        blobs = host[start : start + plan.total * size].view(plan.total, size)
        start += plan.total * size
        fill_blobs(blobs, parts, read)
        storage = LayerStorage(
            n,
            model.args.n_expert,
            parts,
            blobs,
            plan.slots,
            settings.policy,
            copies,
            device,
            readable,
            driver == "device",
        )
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
    """Return the line that loading prints."""

    def gb(size: float) -> str:
        return f"{size / 1e9:.4g} GB"

    sizes, slots, total = plan.sizes, plan.slots, plan.total
    token = args.n_active * sum(sizes) * (1 - slots / total) * total / args.n_expert
    return (
        f"offload: {slots} of {total} experts a layer on the device ({gb(slots * sum(sizes))}), "
        "with "
        f"{gb(plan.kept)} of other weights, {gb(plan.buffers * max(sizes))} for prefetches, "
        f"{gb(settings.reserve)} reserved for cache and activations; {gb(host_bytes)} in host "
        "memory; "
        f"{token / 1e6:.4g} MB a token to copy if all experts were chosen alike"
    )
