"""Plan the GPU's memory, and move experts to host memory while a model is loaded."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from formats.packed import Packed, weight_bytes
from model import MoE, Transformer
from offload.balance import Prediction, choose_copies, measure_balance, resident_seconds
from offload.cpu_experts import CPUThreads
from offload.cpu_share import CPUProducts, cpu_products, set_copies, share_layers
from offload.experts import BlobPart, LayerStorage, OffloadedExperts, Reader, plan_blob
from offload.profile import Profile
from offload.runner import FusedOffloadRunner, OffloadRunner
from ops.step.cpu_share import MAX_TOKENS
from ops.step.expert_paging import MAX_PAIRS
from runtime.host_memory import register_host_memory, use_huge_pages
from runtime.memory import Shortage, free_gpu_memory

COMPUTE = "auto", "gpu", "cpu"  # who multiplies experts that miss

log = logging.getLogger("moe_fast")


# The plan -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OffloadSettings:
    """Give either gpu_experts or gpu_memory. Raises ValueError for invalid combinations."""

    gpu_experts: int | None = None  # R, slots per layer
    gpu_memory: int | None = None  # bytes for weights, slots and `reserve` together, per GPU
    # Of COMPUTE. "auto" is both: the faster ones of the times that are measured at load
    compute: str = "auto"
    profile: Profile | None = None  # which experts are cached at the start; None: the first ones
    reserve: int = 0  # bytes of gpu_memory for the KV cache and activations

    def __post_init__(self):
        if (self.gpu_experts is None) == (self.gpu_memory is None):
            raise ValueError("offloading takes --gpu_experts or --gpu_memory: give one of the two")
        if self.compute not in COMPUTE:
            known = ", ".join(COMPUTE)
            raise ValueError(f"--offload_compute {self.compute}: it must be one of {known}")

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


@dataclass(frozen=True)
class ExpertSizes:
    """One rank's experts, and the bytes of all its other weights."""

    layouts: dict[int, tuple[list[BlobPart], int]]  # by layer: parts and bytes of a blob
    n_expert: int  # E of all ranks
    n_local: int  # E of this rank
    n_active: int
    kept: int  # bytes of weights that stay on the device
    is_shard: bool = False  # several ranks share the experts
    first: int = 0  # this rank's first expert

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
    slots: int  # R

    @property
    def nbytes(self) -> int:
        """Bytes to allocate on the device: other weights and slots."""
        return self.experts.kept + self.slots * self.experts.per_slot

    @property
    def missed_bytes(self) -> int:
        """Bytes of experts to copy for a token, if the router chose uniformly."""
        experts = self.experts
        share = (experts.n_local - self.slots) / experts.n_expert
        return int(experts.n_active * experts.per_slot * share)


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
    some = next(iter(ffns.values())).experts
    kept = weight_bytes(model, dtype, experts)
    first = getattr(some, "first", None)  # of tp.ShardedExperts
    own = first is not None, first or 0
    sizes = model.args.n_expert, some.n_expert, model.args.n_active
    return ExpertSizes(layouts, *sizes, kept, *own)


def meta_reader(model: Transformer, dtype: torch.dtype) -> Reader:
    """Return a `read` for `measure_experts` that opens no checkpoint: its tensors have no data."""
    modules = dict(model.named_modules())

    def read(name: str, device: torch.device | str, expert: int | None = None) -> Tensor:
        path, leaf = name.rsplit(".", 1)
        parameter, module = getattr(modules[path], leaf), modules[path]
        packed = isinstance(module, Packed) and leaf in module.layout
        kept = parameter.dtype if packed else dtype
        return torch.empty(1, *parameter.shape[1:], dtype=kept, device="meta")

    return read


def make_plan(experts: ExpertSizes, settings: OffloadSettings) -> OffloadPlan:
    """Return the plan. Raises ValueError as `choose_slots`."""
    resident = experts.kept + settings.reserve
    slots = choose_slots(settings, experts.n_local, experts.n_active, resident, experts.per_slot)
    return OffloadPlan(experts, slots)


def least_gpu_memory(experts: ExpertSizes, settings: OffloadSettings) -> int:
    """Return the least gpu_memory that `make_plan` accepts with these settings."""
    least = min(experts.n_active, experts.n_local)
    return experts.kept + settings.reserve + least * experts.per_slot


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
    plan = make_plan(experts, settings)
    cached = start_cache(settings.profile, experts, plan.slots)
    threads = CPUThreads() if shares_with_cpu(settings, plan, device) else None
    if device.type == "cuda":
        check_plan_fits(plan.nbytes, plan.slots, free_gpu_memory(device))
    host = torch.empty(experts.host_bytes, dtype=torch.uint8)
    use_huge_pages(host)
    owner = HostMemory()
    if device.type == "cuda":
        register_host_memory(host, owner, device)
    blobs = host.split([experts.n_local * size for _, size in experts.layouts.values()])
    layers, products = [], []
    for (n, (parts, _)), layer_blobs in zip(experts.layouts.items(), blobs, strict=True):
        storage = LayerStorage(
            total_experts=experts.n_expert,
            parts=parts,
            blobs=layer_blobs.view(experts.n_local, -1),
            cached=cached[len(layers)],
            device=device,
            owner=owner,
        )
        fill_blobs(storage.blobs, parts, read)
        ffn: MoE = model.layers[n].ffn
        if threads is not None:
            products.append(cpu_products(ffn.experts, storage, threads))
        ffn.experts = OffloadedExperts(ffn.experts, storage)
        layers.append(ffn.experts)
    # For `runtime.kernel_choice.choose_runner`.
    model.runner_class, model.fused_runner_class = OffloadRunner, FusedOffloadRunner
    like = torch.empty(0, model.args.dim, dtype=dtype, device=device)
    if products:
        share_layers(layers, products, like)
        set_copies(layers, [0] * (MAX_PAIRS + 1))
    line = describe_plan(plan, settings)
    if device.type == "cuda" and plan.slots < experts.n_local:
        model.prediction = predict(model, layers, products, plan, settings, like)
        if model.prediction.copies is not None:
            set_copies(layers, model.prediction.copies)
        else:
            for layer in layers:
                layer.box = None
        line += f"; {describe_prediction(model.prediction, plan, settings)}"
    return line


def predict(
    model: Transformer,
    layers: list[OffloadedExperts],
    products: list[CPUProducts],
    plan: OffloadPlan,
    settings: OffloadSettings,
    like: Tensor,
) -> Prediction:
    """Measure copies and the CPU's products -> how misses are divided, and what to expect.

    like: x [..., D] on the device.
    """
    experts, weight = plan.experts, model.embedding.weight
    balance = measure_balance(layers, products, like, experts.n_active)
    most, (hits, _) = min(MAX_TOKENS * experts.n_active, MAX_PAIRS), expected_hits(plan, settings)
    copies = choose_copies(balance, settings.compute, most, hits)
    # A token reads its experts, and all other weights but the embedding, which may be the head.
    read = experts.kept + experts.n_active * experts.per_slot * experts.n_local // experts.n_expert
    read -= 0 if model.args.tied_embeddings else weight.numel() * like.dtype.itemsize
    resident = resident_seconds(read, len(model.layers), like)
    return Prediction(balance, copies, len(layers), resident)


class HostMemory:
    """Owns the registration of the experts' host memory, while layers refer to it."""


def shares_with_cpu(settings: OffloadSettings, plan: OffloadPlan, device: torch.device) -> bool:
    """Whether the CPU multiplies experts that miss: by default beside one GPU.

    Raises ValueError for several ranks that shall do so.
    """
    if settings.compute == "gpu" or plan.slots == plan.experts.n_local:
        return False
    if settings.compute == "cpu" and plan.experts.is_shard:
        raise ValueError("--offload_compute cpu: it needs one process: use gpu, or leave it out")
    return settings.compute == "cpu" or (device.type == "cuda" and not plan.experts.is_shard)


def start_cache(profile: Profile | None, experts: ExpertSizes, slots: int) -> list[list[int]]:
    """Return by layer the experts that are cached at the start, the most used ones last."""
    if profile is None:
        return [list(range(slots)) for _ in experts.layouts]
    order = profile.by_use(len(experts.layouts), experts.n_expert)
    own = range(experts.first, experts.first + experts.n_local)
    return [[n - experts.first for n in row if n in own][-slots:] for row in order]


def fill_blobs(blobs: Tensor, parts: list[BlobPart], read: Reader) -> None:
    """Read one layer's experts into host memory [E, bytes]."""
    for part in parts:
        whole = read(part.name, "cpu").reshape(len(blobs), -1).view(torch.uint8)
        blobs[:, part.start : part.start + part.nbytes] = whole


def describe_plan(plan: OffloadPlan, settings: OffloadSettings) -> str:
    """Return the plan as one line, for the log."""

    def gb(size: float) -> str:
        return f"{size / 1e9:.4g} GB"

    experts, slots = plan.experts, plan.slots
    held = slots * experts.per_slot
    return (
        f"offload: {slots} of {experts.n_local} experts a layer on the device ({gb(held)}),"
        f" {gb(experts.kept)} of other weights, "
        f"{gb(settings.reserve)} reserved for KV cache and activations; "
        f"{gb(experts.host_bytes)} in host memory; {plan.missed_bytes / 1e6:.4g} MB a token miss "
        "if the router chooses uniformly"
    )


def expected_hits(plan: OffloadPlan, settings: OffloadSettings) -> tuple[float, str]:
    """Return the hit ratio to expect, and why."""
    if settings.profile is None:
        return plan.slots / plan.experts.n_local, "if the router chooses uniformly"
    return settings.profile.hit_ratio(plan.slots), "as the profile says"


def describe_prediction(
    prediction: Prediction, plan: OffloadPlan, settings: OffloadSettings
) -> str:
    """Return what was measured, and the expected speed, for the log."""
    ratio, why = expected_hits(plan, settings)
    speed = prediction.tokens_per_second(ratio)
    share = "" if prediction.copies is None else ", the CPU multiplies a share of the misses"
    return (
        f"{prediction.balance.describe()}: about {speed:.3g} tokens/s with {ratio:.0%} cache hits, "
        f"{why}{share}"
    )
