"""Load a model: build it on the meta device, then read its weights one by one.

`load_model` is for commands and for Python alike. A `runtime.session.Session` over the model then
chooses what runs a step (runtime/kernel_choice.py).
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import closing
from typing import Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

import tp
from cli.report import in_bytes, in_seconds
from formats import FORMATS
from formats.packed import Packed, stays_in_host_memory, weight_bytes
from formats.quantizer import DTYPES
from gguf_files.opening import open_source
from host import upload_ahead
from model import Transformer
from models import args_of_checkpoint, head_args
from models.multi_token import HeadSource
from parallel import process_group
from parallel.all_reduce import choose_all_reduce
from parallel.device import pick_device
from runtime.fused_attention import fuse_decode_attention
from runtime.host_memory import in_host_memory, pinned_uploads
from runtime.kernel_choice import why_not_fused
from runtime.memory import Shortage, free_gpu_memory

log = logging.getLogger("moe_fast")


class Offloading(Protocol):
    """How experts are moved to host memory: `offload.plan.OffloadSettings`."""

    def apply(
        self, model: Transformer, device: torch.device, dtype: torch.dtype, read: Callable
    ) -> str:
        """Move the experts of a model on the meta device; return the plan as one line.

        read: `WeightLoader.read`.
        """


def load_model(
    source,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    parallel: str = "tensor",
    experts: Offloading | None = None,
    share: Transformer | None = None,
    shard: tp.ModelShard | None = None,
) -> Transformer:
    """Build the model that `source` describes and read its weights to the device, one by one.

    source: the directory of a converted checkpoint, a GGUF file, or any object with its `args`,
    `format` and `read(name, index, device)`. dtype: of plain weights; None: the checkpoint's.
    parallel: how several ranks (`process_group.start`) shard it. experts: `OffloadSettings`, if
    experts are to be in host memory. share: a loaded model, whose embedding and head this one
    shares. shard: the source's, without weights, if it is built already. Raises ValueError for a
    source that cannot be loaded, and before it reads weights that exceed the GPU's free memory.
    """
    source = open_source(source) if isinstance(source, str | os.PathLike) else source
    device = pick_device(device) if isinstance(device, str) else device
    if device.index is not None:
        torch.cuda.set_device(device)  # streams, events and graphs belong to the current device
    shard = shard or tp.ModelShard(args_of_checkpoint(source), source.format, parallel)
    model = shard.model
    if experts:
        upload_ahead.close()
    if device.type == "cuda" and not experts:
        check_weights_fit(model, dtype or stored_dtype(source), device, share is not None)
    if share:
        model.embedding, model.head = share.embedding, share.head
    loader = WeightLoader(shard, source, dtype)
    start, plan = time.perf_counter(), None
    with closing(upload_ahead), loader.progress, pinned_uploads(device):
        if experts:
            plain = dtype or stored_dtype(source)
            plan = experts.apply(model, device, plain, loader.read)
        loader.fill(device)
    model.tie_weights()
    shard.insert_collectives()
    if share:
        model.head = share.head  # it communicates already
    # Compiled blocks of 16 and 8 bits on one GPU need no kernels of ours; blocks of 4 bits have
    # Triton products anyway. FusedRunner has the attention kernels in any case.
    modules = source.format.get("modules", {}).values()
    if shard.ranks > 1 or any(FORMATS[module["format"]].bits == 4 for module in modules):
        fuse_decode_attention(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    message = loader.summary(device, time.perf_counter() - start, experts is not None)
    if shard.ranks > 1:
        chosen = choose_all_reduce(model.embedding.weight.dtype, device)
        message += f", {parallel} parallel on {shard.ranks} ranks; {chosen}"
    if process_group.is_main():
        log.info(message)
    if plan:
        log.info(plan)
    return model.eval()


def check_weights_fit(
    model: Transformer, dtype: torch.dtype, device: torch.device, shares: bool = False
) -> None:
    """Raise Shortage if a model exceeds the GPU's free memory. dtype: of unpacked weights.

    shares: its embedding and head are another model's.

    Commands have planned all of their memory by then, and name options that fit.
    """
    without = shared_parameters(model) if shares else ()
    need, free = weight_bytes(model, dtype, without), free_gpu_memory(device)
    if need > free:
        raise Shortage(
            f"the weights need {need / 1e9:.1f} GB and the GPU has {free / 1e9:.1f} GB free",
            "load the model in a smaller number format, or offload its experts",
        )


def shared_parameters(head: Transformer) -> list[int]:
    """Return the ids of the parameters that a head has from its model."""
    return [id(p) for module in (head.embedding, head.head) for p in module.parameters()]


def load_head(
    source,
    target: Transformer,
    dtype: torch.dtype | None = None,
    parallel: str = "tensor",
) -> Transformer:
    """Load the head for multi-token prediction of a checkpoint, beside its model `target`.

    source, parallel: as in `load_model`. dtype: None: the target's. Raises ValueError for a
    checkpoint without a head.
    """
    source = open_source(source) if isinstance(source, str | os.PathLike) else source
    dtype = dtype or target.embedding.weight.dtype  # a norm may be in fp32
    return load_model(head_source(source), target.norm.weight.device, dtype, parallel, share=target)


def head_source(source) -> HeadSource:
    """Return the head of a checkpoint as a source. Raises ValueError if it has none."""
    return HeadSource(source, head_args(args_of_checkpoint(source)))


def stored_dtype(source) -> torch.dtype:
    """Return the dtype of a checkpoint's floating-point weights and of its activations."""
    return DTYPES[source.format.get("dtype", source.format["name"])]


class WeightLoader:
    """Reads the parameters of a shard from a source, and checks their shapes and dtypes."""

    def __init__(self, shard: tp.ModelShard, source, dtype: torch.dtype | None):
        self.shard, self.source, self.nbytes = shard, source, 0
        # A source may hold plain weights in more bits than it is to be run with.
        self.dtype = dtype or getattr(source, "plain_dtype", None)
        self.parameters = dict(shard.model.named_parameters())
        self.modules = dict(shard.model.named_modules())
        hidden = None if process_group.is_main() else True  # None: unless stderr is a terminal
        total = len(self.parameters)
        self.progress = tqdm(
            total=total, desc="loading", unit="tensor", leave=False, disable=hidden
        )

    def read(self, name: str, device: torch.device | str, expert: int | None = None) -> Tensor:
        """Read this rank's part of a parameter, or of one expert of it.

        Raises ValueError if it is missing, or not as the config says.
        """
        try:
            tensor = self.shard.read(self.source, name, device, expert)
        except KeyError:
            fix = "convert the model again, or quantize it again"
            raise ValueError(f"the checkpoint lacks {name}: {fix}") from None
        if expert is None:
            self.nbytes += tensor.nbytes
            self.progress.update(1)
        elif check := getattr(self.source, "check_unchanged", None):
            check(name)  # hours may have passed since it was opened
        path, leaf = name.rsplit(".", 1)
        packed = isinstance(self.modules[path], Packed) and leaf in self.modules[path].layout
        self.check(name, tensor, packed, expert)
        in_fp32 = getattr(self.modules[path], "fp32", ("score_bias",))
        keeps_dtype = self.dtype is None or packed or leaf in in_fp32
        return tensor if keeps_dtype else tensor.to(self.dtype)

    def check(self, name: str, tensor: Tensor, packed: bool, expert: int | None) -> None:
        """Raise ValueError unless the tensor has the parameter's shape and a known dtype."""
        parameter = self.parameters[name]
        shape = parameter.shape if expert is None else (1, *parameter.shape[1:])
        dtypes = (parameter.dtype,) if packed else tuple(DTYPES.values())
        if tensor.shape != shape or tensor.dtype not in dtypes:
            found = f"{list(tensor.shape)} {tensor.dtype}"
            expected = f"{list(shape)} {' or '.join(map(str, dtypes))}"
            fix = "convert the model again"
            raise ValueError(f"{name} is {found} where the config says {expected}: {fix}")

    def fill(self, device: torch.device) -> None:
        """Read every parameter that is still on the meta device, some into host memory."""
        for name, parameter in list(self.shard.model.named_parameters()):
            if parameter.is_meta:
                path, leaf = name.rsplit(".", 1)
                if device.type == "cuda" and stays_in_host_memory(self.shard.model, path):
                    weight = in_host_memory(self.read(name, "cpu"), self.modules[path], device)
                else:
                    weight = self.read(name, device)
                loaded = nn.Parameter(weight, requires_grad=False)
                setattr(self.modules[path], leaf, loaded)

    def summary(self, device: torch.device, seconds: float, offloaded: bool) -> str:
        """Return the bytes of all ranks, and the speed unless tensors are read when first used."""
        size = process_group.total(self.nbytes)
        if device.type == "cpu" and self.dtype is None:
            return f"{in_bytes(size)} of weights{'' if offloaded else ', read when first used'}"
        speed = f"{in_seconds(seconds)}, {in_bytes(size / seconds)}/s"
        return f"loaded {in_bytes(size)} of weights in {speed}"


def check_decode_kernels(
    kernels: str,
    source,
    device: torch.device,
    dtype: torch.dtype | None = None,
    parallel: str = "tensor",
) -> None:
    """Raise ValueError, before weights are read, for fused kernels that cannot run this model.

    kernels: as --decode_kernels says. source, dtype, parallel: as in `load_model`.
    """
    if kernels != "fused":
        return
    shard = tp.ModelShard(args_of_checkpoint(source), source.format, parallel)
    model = shard.model.to(dtype or stored_dtype(source))
    shard.insert_collectives()
    if problem := why_not_fused(model, device):
        why = "these kernels do not compute this model in this format on this device"
        raise ValueError(f"--decode_kernels fused: {why} ({problem}): use auto")
