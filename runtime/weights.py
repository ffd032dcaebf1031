"""Bytes of weights that a token reads (the base of every bandwidth figure), and peak memory."""

import resource
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from host.upload_ahead import taken_bytes
from model import Experts, Linear, Transformer


def stored_tensors(module: nn.Module) -> Iterable[Tensor]:
    """Return parameters and saved buffers, each once."""
    tensors = module.state_dict(keep_vars=True).values()
    return {id(tensor): tensor for tensor in tensors}.values()


def stored_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in stored_tensors(module))


def bytes_per_token(model: Transformer, experts_read: float | None = None) -> int:
    """Return the bytes that one token reads: A of E experts, one row of the embedding, all else.

    Tables that stay in host memory (`host_modules` of the model), of which it reads a few rows, are
    left out.

    experts_read: for several tokens at once, the distinct experts that they read in a layer.
    """
    active = experts_read or model.args.n_active
    idle = 0
    for module in model.modules():
        if isinstance(module, Experts):
            # `choose_from` is set if the module has only a part of the experts to choose from.
            total = getattr(module, "choose_from", module.n_expert)
            size = stored_bytes(module)
            idle += size - int(size * active / total)
    away = getattr(model, "host_modules", ())
    idle += sum(stored_bytes(m) for path, m in model.named_modules() if path.endswith(away))
    tied = model.args.tied_embeddings and isinstance(model.head, Linear)
    table = model.embedding.weight
    return stored_bytes(model) - idle - (0 if tied else table.nbytes) + table[0].nbytes


def peak_bytes(device: torch.device) -> int:
    """Return the most memory used so far: of the device on CUDA, of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + taken_bytes()
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
