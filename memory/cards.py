"""Cards by name, here or elsewhere, with their sizes and bandwidths; and expected decode speed.

Sizes and bandwidths are those of NVIDIA's data sheets. Speeds are predictions, not measurements.
"""

import re
from typing import NamedTuple

import torch

from offload.balance import LAYER_SECONDS as PAGED_LAYER
from ops.gpu import KNOWN, Gpu, gpu_of

GB = 10**9
# Shares of the nominal bandwidths. An H200 reads at 4.5 of 4.8 TB/s, and copies over PCIe 5 at 53
# of 63 GB/s (docs/benchmarks.md, docs/offload.md).
READ_SHARE, LINK_SHARE = 0.94, 0.84
# A layer takes this beside its bytes: 9 to 18 us with the fused kernels and 30 to 37 with those of
# Inductor on an H200 (docs/benchmarks.md, "Decode speed"). An H100 without PDL took 7 to 16 us more
# (docs/log/gpus.md).
FUSED_LAYER, INDUCTOR_LAYER, WITHOUT_PDL = 14e-6, 33e-6, 10e-6  # seconds
HOST = 64 * GB  # assumed of a machine that is not here


class Card(NamedTuple):
    """A GPU as it is sold. Bandwidths are 0 where they are not known."""

    name: str
    gpu: Gpu
    memory: int  # bytes
    bandwidth: float = 0.0  # bytes/s
    link: float = 0.0  # bytes/s of PCIe, one direction

    @property
    def read(self) -> float:
        """Bytes/s at which kernels read."""
        return READ_SHARE * self.bandwidth

    @property
    def copied(self) -> float:
        """Bytes/s at which experts come from host memory."""
        return LINK_SHARE * self.link


PCIE = {3: 0.985, 4: 1.969, 5: 3.938}  # GB/s of a lane
# name: compute capability, GB, GB/s, generation of PCIe, lanes
SOLD = {
    "T4": ("sm_75", 16, 320, 3, 16),
    "RTX 3060": ("sm_86", 12, 360, 4, 16),
    "RTX 3070": ("sm_86", 8, 448, 4, 16),
    "RTX 3080": ("sm_86", 10, 760, 4, 16),
    "RTX 3090": ("sm_86", 24, 936, 4, 16),
    "RTX 4060": ("sm_89", 8, 272, 4, 8),
    "RTX 4060 Ti": ("sm_89", 16, 288, 4, 8),
    "RTX 4070": ("sm_89", 12, 504, 4, 16),
    "RTX 4080": ("sm_89", 16, 717, 4, 16),
    "RTX 4090": ("sm_89", 24, 1008, 4, 16),
    "RTX 5070": ("sm_120", 12, 672, 5, 16),
    "RTX 5080": ("sm_120", 16, 960, 5, 16),
    "RTX 5090": ("sm_120", 32, 1792, 5, 16),
    "A10": ("sm_86", 24, 600, 4, 16),
    "L4": ("sm_89", 24, 300, 4, 16),
    "L40S": ("sm_89", 48, 864, 4, 16),
    "A100": ("sm_80", 80, 2039, 4, 16),
    "A100 40GB": ("sm_80", 40, 1555, 4, 16),
    "H100": ("sm_90", 80, 3350, 5, 16),
    "H200": ("sm_90", 141, 4800, 5, 16),
    "B200": ("sm_100", 180, 8000, 5, 16),
}


VARIANTS = {"laptop", "ti", "super", "pcie", "nvl"}  # they have another bandwidth


def sold(name: str) -> Card:
    """Return a card of SOLD."""
    capability, size, bandwidth, generation, lanes = SOLD[name]
    link = PCIE[generation] * lanes * 1e9
    return Card(name, KNOWN[capability], size * GB, bandwidth * 1e9, link)


def letters(name: str) -> str:
    """Return what two spellings of a name share: rtx4090 of "RTX 4090" and "rtx-4090"."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def card_of_name(name: str) -> Card:
    """Return the card that --gpu names, as sold or as its driver does.

    Raises ValueError for an unknown one.
    """
    found = {letters(known): known for known in SOLD}.get(letters(name))
    if found is None:  # "NVIDIA A100-SXM4-40GB"
        size = re.search(r"(\d+) ?gb", name.lower())
        fitting = [n for n in names_in(name) if not size or SOLD[n][1] == int(size[1])]
        found = max(fitting, key=len, default=None)
    if found is None:
        known = ", ".join(SOLD)
        raise ValueError(f"--gpu {name:.40}: it must be one of {known}")
    return sold(found)


def card_here(device: torch.device) -> Card:
    """Return the card of a device; its bandwidths are known if it is one of SOLD."""
    properties = torch.cuda.get_device_properties(device)
    size = properties.total_memory
    names = [name for name in names_in(properties.name) if is_size(SOLD[name][1], size)]
    if not names:
        return Card(properties.name, gpu_of(device), size)
    card = sold(max(names, key=len))
    return card._replace(name=properties.name, gpu=gpu_of(device), memory=size)


def names_in(driver_name: str) -> list[str]:
    """Return the names of SOLD that a driver's name may mean; it does not always say the size."""
    words = words_of(driver_name)
    names = [name for name in SOLD if words_of(name) <= words]
    return [name for name in names if words_of(name) & VARIANTS == words & VARIANTS]


def words_of(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def is_size(sold_gb: int, size: int) -> bool:
    """Whether a driver that reports `size` bytes has a card of this many GB."""
    return 0.9 < size / (sold_gb * GB) < 1.1


def layer_seconds(card: Card, fused: bool, offloads: bool) -> float:
    """Predict the seconds of a layer beside its bytes."""
    if not fused:
        return INDUCTOR_LAYER
    return (PAGED_LAYER if offloads else FUSED_LAYER) + WITHOUT_PDL * (not card.gpu.has_pdl)


def token_seconds(card: Card, nbytes: int, beside: float, copied: int = 0) -> float:
    """Predict the seconds of one token; 0 if the card's bandwidths are not known.

    nbytes: read from the card's memory. beside: seconds of its layers beside that. copied: bytes of
    experts from host memory, which come before they are multiplied.
    """
    if not card.bandwidth or (copied and not card.link):
        return 0.0
    return nbytes / card.read + beside + (copied / card.copied if copied else 0.0)
