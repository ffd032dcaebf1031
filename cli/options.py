"""Options shared by several commands.

The choices are literals: the modules that implement them import torch, which takes
seconds. tests/test_cli_options.py compares the literals with those modules.
"""

import argparse
import re

from cli.parser import Parser

DEVICES = "auto", "cuda", "cpu"
DTYPES = "bf16", "fp16", "fp32"
KV_CACHES = "plain", "int8"
PARALLEL = "tensor", "expert"
CACHE_POLICIES = "lru", "lfu"
OFFLOAD_DRIVERS = "host", "device"
OFFLOAD_TIERS = ("host",)
PREFILL_CHUNK = 2048  # tokens
DEFAULT_CHAT_LENGTH = 4096  # positions of a chat's cache

OFFLOAD_OPTIONS = (  # these need --offload
    "gpu_experts",
    "gpu_memory",
    "cache_policy",
    "prefetch",
    "offload_tier",
    "offload_driver",
)


def offload_tier(text: str) -> str:
    """Return the argument of --offload_tier. Raises ArgumentTypeError for the removed tier."""
    if text == "disk":
        raise argparse.ArgumentTypeError(
            "the disk tier was removed: use --offload_tier host, with a smaller checkpoint "
            "(quantize.py --mode int4) if host memory cannot hold the experts"
        )
    return text


def add_checkpoint_path(parser: Parser) -> None:
    """Add the option that names a checkpoint."""
    parser.add_path("--checkpoint_path", "converted checkpoint; default: the embedded tiny model")


def add_model_options(parser: Parser) -> None:
    """Add the options that `generate.open_session` reads."""
    parser.add_flag("--compile", "compile the decode step, and capture it as a CUDA graph")
    add_prefill_options(parser)
    add_device_options(parser)
    add_dtype(parser)
    add_offload_options(parser)


def add_prefill_options(parser: Parser) -> None:
    """Add how prompts are computed."""
    parser.add_flag("--compile_prefill", "compile the prefill too")
    chunk = f"tokens of a prefill chunk ({PREFILL_CHUNK})"
    parser.add_number("--prefill_chunk", chunk, PREFILL_CHUNK)


def add_device_options(parser: Parser) -> None:
    """Add the number format of the KV cache, the device, and how several GPUs share the model."""
    add = parser.add_argument
    cache = "number format of the KV cache; int8 takes half the bytes of plain (plain)"
    add("--kv_cache", choices=KV_CACHES, default="plain", help=cache)
    add("--device", default="auto", choices=DEVICES, help="auto: cuda if there is a GPU (auto)")
    shards = "how torchrun's ranks shard the experts (tensor)"
    add("--parallel", default="tensor", choices=PARALLEL, help=shards)


def add_dtype(parser: Parser) -> None:
    """Add the dtype that replaces the checkpoint's."""
    dtype = "dtype of weights and activations; default: the checkpoint's"
    parser.add_argument("--dtype", choices=DTYPES, help=dtype)


def add_offload_options(parser: Parser) -> None:
    """Add the options of experts in host memory."""
    add = parser.add_argument
    parser.add_flag("--offload", "keep experts in host memory, and cache them on the GPU")
    slots = "size of the expert cache: experts of each layer on the GPU"
    parser.add_number("--gpu_experts", slots)
    memory = "GPU memory to use, as 16GB or 900MB; R is what fits beside everything else"
    add("--gpu_memory", metavar="SIZE", help=memory)
    policy = "eviction policy of the expert cache; default: lru"
    add("--cache_policy", choices=CACHE_POLICIES, help=policy)
    prefetch = "experts prefetched per layer and token; default: 2 for large experts, else 0"
    parser.add_number("--prefetch", prefetch)
    tier = "where the experts are kept; default: host"
    add("--offload_tier", type=offload_tier, choices=OFFLOAD_TIERS, help=tier)
    driver = (
        "whether the CPU (host) or the GPU (device) schedules expert copies; "
        "default: the GPU, or the CPU if it prefetches"
    )
    add("--offload_driver", choices=OFFLOAD_DRIVERS, help=driver)


def check_counts(
    options: argparse.Namespace, *names: str, least: int = 1, most: int = 1 << 32
) -> None:
    """Raise ValueError if one of these options is given and not from `least` to `most`."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} {value}: it must be at least {least}")
        if value is not None and value > most:
            raise ValueError(f"--{name} {str(value)[:40]}: it must be at most {most}")


def check_model_options(options: argparse.Namespace) -> None:
    """Raise ValueError for model options that are invalid or exclude each other."""
    check_counts(options, "prefill_chunk")
    for name in OFFLOAD_OPTIONS:
        if getattr(options, name) is not None and not options.offload:
            raise ValueError(f"--{name} is about experts in host memory: add --offload")


def parse_size(text: str) -> int:
    """Return the bytes of "16GB" or "900MB" (powers of 1000). Raises ValueError otherwise."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([GM])B?", text, re.IGNORECASE | re.ASCII)
    if not match:
        raise ValueError(f"--gpu_memory {text:.40}: it must be a number of GB or MB, as in 16GB")
    return int(float(match[1]) * {"G": 1e9, "M": 1e6}[match[2].upper()])
