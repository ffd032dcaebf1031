"""Plan the GPU's memory, and move experts to host memory while a model is loaded."""

import logging
import weakref
from contextlib import suppress
from dataclasses import dataclass

import torch

from formats.packed import Packed, weight_bytes
from model import MoE, Transformer
from offload.cache import POLICIES
from offload.copies import CopyStream
from offload.experts import BlobPart, LayerStorage, OffloadedExperts, Reader, plan_blob
from offload.runner import OffloadRunner
from runtime.memory import Shortage, free_gpu_memory

DRIVERS = "host", "device"  # the CPU or the GPU schedules copies
STAGING_BUFFERS = 4  # for prefetches, as in Eliseev & Mazur 2023
LARGE_EXPERT = 16 << 20  # bytes; prefetching larger ones is faster
PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister

log = logging.getLogger("moe_fast")


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

    def apply(
        self, model: Transformer, device: torch.device, dtype: torch.dtype, read: Reader
    ) -> str:
        """`offload_experts` with these settings, for `runtime.loading.load_model`."""
        return offload_experts(model, self, device, dtype, read)


def choose_slots(
    settings: OffloadSettings, total: int, active: int, resident: int, slot: int
) -> int:
    """Return R, the slots per layer. Raises ValueError naming the limits.

    total: E of this rank. resident: bytes on the GPU beside slots. slot: bytes of one slot in every
    layer. Raises Shortage for a --gpu_memory that is too small.
    """
    least = min(active, total)  # one token's experts must fit at once
    if settings.gpu_experts is None:
        found = (settings.gpu_memory - resident) // slot
        if found < least:
            need = (resident + least * slot) / 1e9
            raise Shortage(
                f"--gpu_memory {settings.gpu_memory / 1e9:.4g}GB: {least} experts per layer take "
                f"{least * slot / 1e9:.4g} GB, everything else {resident / 1e9:.4g} GB",
                f"give at least {need + 5e-4:.3f}GB",
            )
        return min(found, total)
    if not least <= settings.gpu_experts <= total:
        raise ValueError(
            f"--gpu_experts {settings.gpu_experts}: it must be from {least} (active) to "
            f"{total} (all)"
        )
    return settings.gpu_experts


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
        f"({error}): copies will be slower; raise the limit of locked memory (ulimit -l)"
    )
    return False


@dataclass(frozen=True)
class ExpertSizes:
    """One rank's experts, and the bytes of all its other weights."""

    layouts: dict[int, tuple[list[BlobPart], int]]  # by layer: parts and bytes of a blob
    n_expert: int  # E of all ranks
    n_local: int  # E of this rank
    n_active: int
    kept: int  # bytes of weights that stay on the device

    @property
    def per_slot(self) -> int:
        """Bytes of an expert of each layer."""
        return sum(size for _, size in self.layouts.values())

    @property
    def largest(self) -> int:
        """Bytes of an expert, of the layer where they are largest."""
        return max(size for _, size in self.layouts.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of all experts of this rank."""
        return self.n_local * self.per_slot


@dataclass(frozen=True)
class OffloadPlan:
    """All decisions of `offload_experts`, made before it moves a weight."""

    experts: ExpertSizes
    prefetch: int  # experts per token and layer
    buffers: int  # staging buffers
    slots: int  # R

    @property
    def nbytes(self) -> int:
        """Bytes to allocate on the device: other weights, slots and staging buffers."""
        sizes = self.experts
        return sizes.kept + self.slots * sizes.per_slot + self.buffers * sizes.largest


def measure_experts(model: Transformer, dtype: torch.dtype, read: Reader) -> ExpertSizes:
    """Return the sizes of a rank's model, on the meta device.

    dtype: of unpacked weights. read: reads the first expert's parameters. Raises ValueError for a
    model without experts.
    """
    ffns = {n: block.ffn for n, block in enumerate(model.layers) if isinstance(block.ffn, MoE)}
    if not ffns:
        raise ValueError("--offload: no layer of this model has experts")
    layouts = {
        n: plan_blob(f"layers.{n}.ffn.experts", ffn.experts, read) for n, ffn in ffns.items()
    }
    experts = {id(p) for ffn in ffns.values() for p in ffn.experts.parameters()}
    n_local = next(iter(ffns.values())).experts.n_expert
    kept = weight_bytes(model, dtype, experts)
    return ExpertSizes(layouts, model.args.n_expert, n_local, model.args.n_active, kept)


def meta_reader(model: Transformer, dtype: torch.dtype) -> Reader:
    """Return a `read` for `measure_experts` that opens no checkpoint: its tensors have no data."""
    modules = dict(model.named_modules())

    def read(name: str, device: torch.device | str, expert: int | None = None) -> torch.Tensor:
        path, leaf = name.rsplit(".", 1)
        parameter, module = getattr(modules[path], leaf), modules[path]
        packed = isinstance(module, Packed) and leaf in module.layout
        kept = parameter.dtype if packed else dtype
        return torch.empty(1, *parameter.shape[1:], dtype=kept, device="meta")

    return read


def choose_prefetch(settings: OffloadSettings, total: int, size: int, on_gpu: bool) -> int:
    """Return the number of prefetches per token and layer. size: bytes of an expert.

    Only the CPU prefetches, and its wait takes 0.1 ms per layer on an H200. With experts of 66 MB
    (Mixtral in 2 bits) the CPU with two prefetches is faster than the GPU without; with 2.4 MB
    (Qwen3-30B-A3B in 4 bits) the GPU makes twice the tokens/s.
    """
    if settings.prefetch is not None:
        return settings.prefetch
    possible = settings.driver != "device" and on_gpu
    return 2 if possible and settings.gpu_experts != total and size >= LARGE_EXPERT else 0


def choose_staging(
    settings: OffloadSettings, experts: ExpertSizes, on_gpu: bool
) -> tuple[int, int]:
    """Return the number of prefetches per token and layer, and of staging buffers."""
    prefetch = choose_prefetch(settings, experts.n_local, experts.largest, on_gpu)
    return prefetch, max(STAGING_BUFFERS, prefetch) if prefetch else 0


def make_plan(experts: ExpertSizes, settings: OffloadSettings, on_gpu: bool) -> OffloadPlan:
    """Return the plan. on_gpu: the device is one. Raises ValueError as `choose_slots`."""
    if not 0 <= (settings.prefetch or 0) <= experts.n_expert:
        raise ValueError(
            f"--prefetch {settings.prefetch}: it must be from 0 to {experts.n_expert}, the experts "
            "of a layer"
        )
    prefetch, buffers = choose_staging(settings, experts, on_gpu)
    resident = experts.kept + buffers * experts.largest + settings.reserve
    slots = choose_slots(settings, experts.n_local, experts.n_active, resident, experts.per_slot)
    return OffloadPlan(experts, prefetch, buffers, slots)


def least_gpu_memory(experts: ExpertSizes, settings: OffloadSettings, on_gpu: bool) -> int:
    """Return the least gpu_memory that `make_plan` accepts with these settings."""
    buffers = choose_staging(settings, experts, on_gpu)[1]
    least = min(experts.n_active, experts.n_local)
    return experts.kept + buffers * experts.largest + settings.reserve + least * experts.per_slot


def check_host_fits(need: int, free: int) -> None:
    """Raise Shortage if all experts need more bytes of host memory than are free."""
    if need > free:
        raise Shortage(
            f"the experts need {need / 1e9:.1f} GB of host memory and {free / 1e9:.1f} GB are free",
            "use a smaller checkpoint: quantize.py --mode int4",
        )


def check_plan_fits(need: int, slots: int, free: int) -> None:
    """Raise Shortage if offloading allocates `need` bytes, with R = slots, of `free` bytes."""
    if need > free:
        raise Shortage(
            f"{slots} experts per layer and all other weights need {need / 1e9:.1f} GB and the "
            f"GPU has {free / 1e9:.1f} GB free",
            "lower --gpu_experts or --gpu_memory",
        )


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
    experts = measure_experts(model, dtype, read)
    plan = make_plan(experts, settings, device.type == "cuda")
    if device.type == "cuda":
        check_plan_fits(plan.nbytes, plan.slots, free_gpu_memory(device))
    host = torch.empty(experts.host_bytes, dtype=torch.uint8)
    copies = CopyStream(device, plan.buffers, experts.largest)
    readable = all(part.nbytes % 4 == 0 for parts, _ in experts.layouts.values() for part in parts)
    if device.type == "cuda":
        readable = register_host_memory(host, copies, device) and readable
    if settings.driver == "device" and not readable:
        raise ValueError(
            "--offload_driver device: registered memory in steps of 4 bytes is needed: leave it out"
        )
    gpu_default = readable and not plan.prefetch and device.type == "cuda"
    driver = settings.driver or ("device" if gpu_default else "host")
    blobs = host.split([experts.n_local * size for _, size in experts.layouts.values()])
    above = None
    for (n, (parts, _)), layer_blobs in zip(experts.layouts.items(), blobs, strict=True):
        storage = LayerStorage(
            layer=n,
            total_experts=experts.n_expert,
            parts=parts,
            blobs=layer_blobs.view(experts.n_local, -1),
            slots=plan.slots,
            policy=settings.policy,
            copies=copies,
            device=device,
            kernel_reads_host=readable,
            gpu_schedules=driver == "device",
        )
        fill_blobs(storage.blobs, parts, read)
        ffn: MoE = model.layers[n].ffn
        ffn.experts = offloaded = OffloadedExperts(ffn.experts, storage)
        if above is not None and plan.prefetch:
            above.prefetch_count, above.next_layer = plan.prefetch, [ffn, offloaded]
        above = offloaded
    model.runner_class = OffloadRunner  # for `runtime.kernel_choice.choose_runner`
    return describe_plan(plan, settings)


def fill_blobs(blobs: torch.Tensor, parts: list[BlobPart], read: Reader) -> None:
    """Read one layer's experts into host memory [E, bytes]."""
    for part in parts:
        whole = read(part.name, "cpu").reshape(len(blobs), -1).view(torch.uint8)
        blobs[:, part.start : part.start + part.nbytes] = whole


def describe_plan(plan: OffloadPlan, settings: OffloadSettings) -> str:
    """Return the plan as one line, for the log."""

    def gb(size: float) -> str:
        return f"{size / 1e9:.4g} GB"

    experts, slots = plan.experts, plan.slots
    n_local, per_slot = experts.n_local, experts.per_slot
    missed = experts.n_active * per_slot * (n_local - slots) / experts.n_expert
    return (
        f"offload: {slots} of {n_local} experts a layer on the device ({gb(slots * per_slot)}),"
        f" {gb(experts.kept)} of other weights, {gb(plan.buffers * experts.largest)} for "
        f"prefetches, {gb(settings.reserve)} reserved for KV cache and activations; "
        f"{gb(experts.host_bytes)} in host memory; {missed / 1e6:.4g} MB to copy per token if the "
        "router chose uniformly"
    )
