"""Choose the device that a command runs on."""

import re

import torch


def pick_device(name: str = "auto") -> torch.device:
    """Return the device `name`: auto, cuda, cuda:N or cpu. Raises ValueError if it is missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r}: it must be auto, cuda or cpu")
    device = torch.device(name)
    index = device.index or 0
    if device.type == "cuda" and index >= torch.cuda.device_count():
        cause = f"no CUDA device {index} is visible to PyTorch"
        raise ValueError(f"{cause}: use --device cpu, or install a CUDA build")
    return device
