"""The GPU that kernels run on, and what they may use of it. No other file asks for that.

MOE_FAST_GPU=sm_86 in the environment lets a GPU pass for one of another compute capability: kernels
then use what that one has. So tests compile for GPUs that are not here, and run the tiles for 99 KB
of shared memory on a GPU that has more.
"""

import os
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """What kernels need to know of a GPU."""

    capability: tuple[int, int]  # compute capability; (0, 0): no NVIDIA GPU
    shared_memory: int  # bytes that a program (a CUDA block) may use
    multiprocessors: int

    is_nvidia = property(lambda s: s.capability > (0, 0))
    # Whether our Triton kernels run: on NVIDIA GPUs with PTX for bf16, which they contain.
    runs_kernels = property(lambda s: s.capability >= (8, 0))
    # Programmatic dependent launch (PDL), Hopper and later: a kernel starts while the previous one
    # is still running, and waits for it explicitly.
    has_pdl = property(lambda s: s.capability >= (9, 0))
    # `F.grouped_mm` has a kernel for bf16. Elsewhere it loops over the experts, and reads on the
    # host where their rows end, which a CUDA graph cannot contain.
    has_grouped_mm = property(lambda s: s.capability[0] in (9, 10))
    # SDPA takes cuDNN's attention, which plans for 50 ms for each new shape, and FlashAttention 2
    # for what cuDNN does not compute, which was not written for this GPU.
    has_slow_sdpa = property(lambda s: s.capability == (9, 0))

    def __str__(self) -> str:
        major, minor = self.capability
        return f"compute capability {major}.{minor}" if major else "not an NVIDIA GPU"


# By architecture: shared memory as in the CUDA programming guide, multiprocessors of a common GPU.
KNOWN = {
    "sm_75": Gpu((7, 5), 64 << 10, 40),  # T4
    "sm_80": Gpu((8, 0), 163 << 10, 108),  # A100
    "sm_86": Gpu((8, 6), 99 << 10, 82),  # RTX 3090
    "sm_89": Gpu((8, 9), 99 << 10, 128),  # RTX 4090
    "sm_90": Gpu((9, 0), 227 << 10, 132),  # H100
    "sm_100": Gpu((10, 0), 227 << 10, 148),  # B200
    "sm_120": Gpu((12, 0), 99 << 10, 170),  # RTX 5090
    # Of another maker, which run no kernels of ours: tests compile some for them.
    "gfx942": Gpu((0, 0), 64 << 10, 304),  # MI300X
    "gfx1100": Gpu((0, 0), 64 << 10, 96),  # RX 7900 XTX
}
OTHER_MAKER = Gpu((0, 0), 64 << 10, 64)
found: dict[int, Gpu] = {}  # device index -> GPU


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU; for another device, as in Triton's interpreter, one that runs everything."""
    if device.type != "cuda":
        return pretended() or KNOWN["sm_90"]
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in found:
        found[index] = read_properties(index)
    return found[index]


def pretended() -> Gpu | None:
    """Return the GPU that MOE_FAST_GPU names. Raises ValueError for an unknown one."""
    name = os.environ.get("MOE_FAST_GPU")
    if name and name not in KNOWN:
        raise ValueError(f"MOE_FAST_GPU={name}: not one of {', '.join(KNOWN)}")
    return KNOWN[name] if name else None


def read_properties(index: int) -> Gpu:
    """Return the GPU with this index, as the driver describes it."""
    properties = torch.cuda.get_device_properties(index)
    processors = properties.multi_processor_count
    if torch.version.hip:  # an AMD architecture such as gfx942 would pass for capability 9.4
        return OTHER_MAKER._replace(multiprocessors=processors)
    limit = properties.shared_memory_per_block_optin
    if gpu := pretended():
        return Gpu(gpu.capability, min(limit, gpu.shared_memory), processors)
    return Gpu((properties.major, properties.minor), limit, processors)
