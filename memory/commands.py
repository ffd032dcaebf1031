"""Plan the sessions of the commands from their options, with advice in these options."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from cli.model_name import UNRECORDED
from cli.options import parse_size
from formats.kv_cache import KV_CACHES
from formats.packed import weight_bytes
from formats.quantizer import DTYPES
from host.free_memory import free_host_memory
from hub.disk import SOURCE, read
from memory.advice import Levers, advise
from memory.plan import GB, Memory, ModelSizes, Setup, fit, session_bytes
from model import ModelArgs
from models import args_of_checkpoint, build_model
from models.multi_token import MTP
from offload.plan import OffloadSettings
from offload.profile import FILE_NAME, Profile, read_profile
from ops.plain.attention import BLOCK
from parallel import process_group
from runtime.draft_vocab import DRAFT_VOCAB
from runtime.loading import head_source, shared_parameters, stored_dtype
from runtime.memory import (
    LEAST_CONTEXT,
    PREFILL_CHUNK,
    Capacity,
    Shortage,
    cache_bytes,
    free_gpu_memory,
)
from runtime.mtp import RING

log = logging.getLogger("moe_fast")


def plan_session(setup: Setup, device: torch.device, levers: Levers) -> Capacity:
    """Return what a session holds, the same on all ranks.

    Raises ValueError, before weights are read, naming what does not fit and options that do.
    """

    on_gpu = device.type == "cuda"
    gpu = process_group.least(free_gpu_memory(device)) if on_gpu else None

    def plan() -> Capacity:
        memory = Memory(gpu, free_host_memory())
        try:
            return fit(setup, memory)
        except Shortage as shortage:
            raise ValueError(advise(shortage.cause, setup, memory, levers)) from None

    return process_group.share(plan)


def lower_gpu_memory(options: argparse.Namespace, capacity: Capacity) -> None:
    """Set --gpu_memory to what the plan gives, and log it: more than the free memory is lowered."""
    if capacity.gpu_memory is None or capacity.gpu_memory == parse_size(options.gpu_memory):
        return
    given, size = options.gpu_memory, capacity.gpu_memory / GB
    options.gpu_memory = f"{size:.9f}GB"
    if process_group.is_main():
        log.info(f"--gpu_memory {given}: more than is free, {size:.1f} GB are used")


def sizes_of(source, dtype: torch.dtype | None, parallel: str = "tensor") -> ModelSizes:
    """Return the sizes of a rank's model. dtype: of unpacked weights; None: the source's."""
    dtype = dtype or stored_dtype(source)
    args = args_of_checkpoint(source)
    return ModelSizes(args, source.format, dtype, parallel, process_group.size())


def is_mapped(source, dtype: torch.dtype | None) -> bool:
    """Whether the CPU reads weights from their file when they are first used.

    A source with a `plain_dtype` (a GGUF file) makes them when it is read.
    """
    return dtype is None and getattr(source, "plain_dtype", None) is None


def expert_settings(options: argparse.Namespace, source, reserve: int = 0) -> OffloadSettings:
    """Return the options of --offload as settings. source: the checkpoint.

    Raises ValueError for a wrong size, or a file that is no profile.
    """
    return OffloadSettings(
        options.gpu_experts,
        None if options.gpu_memory is None else parse_size(options.gpu_memory),
        options.offload_compute or OffloadSettings.compute,
        find_profile(options.expert_profile, source),
        reserve,
    )


def find_profile(path: Path | None, source) -> Profile | None:
    """Return the profile in this file, or else the one that a checkpoint has beside its weights."""
    folder = getattr(source, "directory", None)
    if path is None and folder is not None and (folder / FILE_NAME).is_file():
        path = folder / FILE_NAME
    return None if path is None else read_profile(path)


def offload_settings(
    options: argparse.Namespace,
    source,
    args: ModelArgs,
    dtype: torch.dtype,
    length: int,
    batch: int,
) -> OffloadSettings:
    """Return the options as settings, with the reserve of a session of this size.

    source: the checkpoint; args: one rank's; dtype: of activations.
    """
    cache_class = KV_CACHES[options.kv_cache]
    cache = cache_bytes(build_model(args), batch, length + BLOCK, cache_class, dtype)
    size = length, batch, options.kv_cache, options.prefill_chunk
    return expert_settings(options, source, session_bytes(args, cache, dtype, *size))


def plan_generation(
    options: argparse.Namespace,
    source,
    drafter,
    device: torch.device,
    length: int,
    batch: int,
    longest: int,
    sizes: ModelSizes | None = None,
) -> None:
    """Raise ValueError if generate.py's session does not fit. Lowers --gpu_memory to what is free.

    source, drafter: checkpoints, or None for the latter. longest: tokens of the longest prompt.
    sizes: the source's, if they are known: 48 layers take 0.02 s.
    """
    setup = generation_setup(options, source, drafter, length, batch, longest, sizes)
    levers = generation_levers(options, source, device, longest)
    lower_gpu_memory(options, plan_session(setup, device, levers))


def generation_setup(
    options: argparse.Namespace,
    source,
    drafter,
    length: int,
    batch: int,
    longest: int,
    sizes: ModelSizes | None = None,
) -> Setup:
    """Return what decides the memory of generate.py's session. The others: of `plan_generation`."""
    dtype, extra = DTYPES.get(options.dtype), extra_for_head(options, source, length)
    if drafter:
        draft = sizes_of(drafter, dtype, options.parallel)
        extra = draft.weights + draft.cache(1, length, options.kv_cache)
        extra += part_bytes(draft, options.draft_vocab or DRAFT_VOCAB)
    return Setup(
        sizes or sizes_of(source, dtype, options.parallel),
        length,
        batch,
        options.kv_cache,
        options.prefill_chunk,
        expert_settings(options, source) if options.offload else None,
        mapped=is_mapped(source, dtype),
        extra=extra,
        longest=None if options.interactive else longest,
    )


def uses_head(options: argparse.Namespace, source) -> bool:
    """Whether a checkpoint's head for multi-token prediction drafts.

    --speculate auto takes one that is there. The default does not: a head takes memory. A server
    takes one only with --max_batch 1: a head knows one text.
    """
    others = vars(options).get("draft_checkpoint_path") or vars(options).get("max_batch", 1) != 1
    takes = options.speculate == "auto" and not others
    return options.speculate == "mtp" or (takes and MTP in source.format)


def extra_for_head(options: argparse.Namespace, source, length: int) -> int:
    """Return the bytes of a head for `length` positions, 0 if none drafts."""
    if not uses_head(options, source):
        return 0
    head = sizes_of(head_source(source), DTYPES.get(options.dtype), options.parallel)
    part = part_bytes(head, getattr(options, "draft_vocab", None) or DRAFT_VOCAB)
    return part + head_bytes(head, length, options.kv_cache, options.prefill_chunk)


def head_bytes(sizes: ModelSizes, length: int, kv_cache: str, chunk: int | None) -> int:
    """Return the bytes of a head for multi-token prediction: those that its model does not have.

    chunk: tokens of a prompt that run at once. The hidden states of as many are kept, and those of
    RING steps.
    """
    own = weight_bytes(sizes.model, sizes.dtype, shared_parameters(sizes.model))
    rows = RING + min(chunk or PREFILL_CHUNK, length + BLOCK)
    hidden = rows * sizes.args.dim * sizes.dtype.itemsize
    return own + sizes.cache(1, length, kv_cache) + hidden


def part_bytes(sizes: ModelSizes, ids: int) -> int:
    """Return the bytes of a head's rows of this many ids, which drafts are chosen by."""
    V = sizes.args.vocab_size
    return weight_bytes(sizes.model.head, sizes.dtype) * ids // V if ids < V else 0


def plan_server(options: argparse.Namespace, source, device: torch.device, least: int) -> Capacity:
    """Return the size of serve.py's session. Lowers --gpu_memory to what is free.

    Raises ValueError if nothing fits.
    least: sequences that must fit; --max_batch is the most that run.
    """
    setup = server_setup(options, source, least)
    levers = session_levers(
        options, source, device, "--max_seq_len {}".format, LEAST_CONTEXT, "--max_batch"
    )
    capacity = plan_session(setup, device, levers)
    lower_gpu_memory(options, capacity)
    return capacity


def server_setup(options: argparse.Namespace, source, least: int) -> Setup:
    """Return what decides the memory of serve.py's session. least: as in `plan_server`."""
    sizes = sizes_of(source, DTYPES.get(options.dtype), options.parallel)
    return Setup(
        sizes,
        options.max_seq_len,
        least,
        options.kv_cache,
        options.prefill_chunk,
        expert_settings(options, source) if options.offload else None,
        options.max_batch,
        extra=extra_for_head(options, source, options.max_seq_len or sizes.args.max_position),
    )


def plan_evaluation(
    options: argparse.Namespace, source, device: torch.device, seq_len: int
) -> None:
    """Raise ValueError if eval.py's model and a window of `seq_len` tokens do not fit."""
    dtype = DTYPES.get(options.dtype)
    sizes = sizes_of(source, dtype, options.parallel)
    chunk = sizes.args.max_position  # a window is one
    setup = Setup(sizes, seq_len, 1, options.kv_cache, chunk, mapped=is_mapped(source, dtype))
    levers = Levers(
        length="--seq_len {}".format,
        least_length=2,
        kv_cache=True,
        dtype=True,
        format=format_advice(options, source),
    )
    plan_session(setup, device, levers)


def plan_benchmark(options: argparse.Namespace, source, device: torch.device) -> None:
    """Raise ValueError if benchmark.py's session does not fit. source: of random weights."""
    length = options.max_seq_len or options.prompt_len + options.new_tokens
    sizes = sizes_of(source, None, options.parallel)
    chunk = options.prefill_chunk
    setup = Setup(sizes, length, options.batch, options.kv_cache, chunk, longest=options.prompt_len)
    levers = Levers(
        length="--max_seq_len {}".format if options.max_seq_len else None,
        least_length=options.prompt_len + options.new_tokens,
        batch="--batch",
        kv_cache=True,
        layers=True,
        format="--mode {}".format,
    )
    plan_session(setup, device, levers)


# Levers -------------------------------------------------------------------------------------------


def generation_levers(
    options: argparse.Namespace, source, device: torch.device, longest: int
) -> Levers:
    """Return the levers of generate.py. longest: tokens of the longest prompt."""

    def context(length: int) -> str:
        text = f"--max_seq_len {length}"
        if not options.interactive and longest + options.max_new_tokens > length:
            text += f" --max_new_tokens {length - longest}"
        return text

    least = LEAST_CONTEXT if options.interactive else longest + 1
    return session_levers(options, source, device, context, least, "--batch_size")


def session_levers(
    options: argparse.Namespace,
    source,
    device: torch.device,
    context: Callable[[int], str],
    least: int,
    batch: str,
) -> Levers:
    """Return the levers of a command with --offload. context, least, batch: as in Levers."""
    return Levers(
        length=context,
        least_length=least,
        batch=batch,
        kv_cache=True,
        dtype=True,
        format=format_advice(options, source),
        offload="",
        gpus=torch.cuda.device_count() if device.type == "cuda" else 1,
    )


def format_advice(options: argparse.Namespace, source) -> Callable[[str], str] | None:
    """Return how the user gets the model in another --mode; None: it was published in this one.

    source: a checkpoint. A quantized one cannot be quantized again: that takes the one it was
    made from.
    """
    name, directory = source.format["name"], source.directory.absolute()
    origin = read(directory / SOURCE)
    repo_id = options.model and options.model.partition(":")[0]
    if "modules" in source.format:
        if origin.get("published", name if name in UNRECORDED else None) == name:
            return None
        if repo_id is None:
            return requantize_advice(directory, origin.get("repo_id"))
    if repo_id is not None:
        return f"--model {repo_id}:{{}}".format
    return "the checkpoint of quantize.py --mode {}".format


def requantize_advice(directory: Path, repo_id: str | None) -> Callable[[str], str]:
    """Return how to make another format of a quantized checkpoint's model."""
    for dtype in DTYPES:
        plain = directory.with_name(f"model_{dtype}")
        if "moe_fast" in read(plain / "config.json"):
            start = f"the checkpoint of quantize.py --checkpoint_path {plain}"
            return lambda mode: f"{start} --mode {mode}"
    if repo_id:
        return lambda mode: f"--model {repo_id}:{mode} instead of --checkpoint_path"
    return "the checkpoint of quantize.py --mode {}, run on the unquantized one".format
