"""Options shared by generate.py and serve.py.

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


def add_model_options(parser: Parser) -> None:
    """Add the options that `generate.open_session` reads."""
    add = parser.add_argument
    add(
        "--compile",
        action="store_true",
        help="compile the decode step, and capture it as a CUDA graph",
    )
    add("--compile_prefill", action="store_true", help="compile the prefill too")
    add(
        "--prefill_chunk",
        type=int,
        default=PREFILL_CHUNK,
        metavar="N",
        help=f"tokens of a prefill chunk ({PREFILL_CHUNK})",
    )
    add(
        "--kv_cache",
        choices=KV_CACHES,
        default="plain",
        help="number format of the KV cache; int8 takes half the bytes of plain (plain)",
    )
    add("--device", default="auto", choices=DEVICES, help="auto: cuda if there is a GPU (auto)")
    add(
        "--dtype",
        choices=DTYPES,
        help="dtype of weights and activations; default: the checkpoint's",
    )
    add(
        "--parallel",
        default="tensor",
        choices=PARALLEL,
        help="how torchrun's ranks shard the experts (tensor)",
    )
    add_offload_options(parser)


def add_offload_options(parser: Parser) -> None:
    """Add the options of experts in host memory."""
    add = parser.add_argument
    add(
        "--offload",
        action="store_true",
        help="keep experts in host memory, and cache them on the GPU",
    )
    add(
        "--gpu_experts",
        type=int,
        metavar="R",
        help="size of the expert cache: experts of each layer on the GPU",
    )
    add(
        "--gpu_memory",
        metavar="SIZE",
        help="GPU memory to use, as 16GB or 900MB; R is what fits beside everything else",
    )
    add(
        "--cache_policy",
        choices=CACHE_POLICIES,
        help="eviction policy of the expert cache; default: lru",
    )
    add(
        "--prefetch",
        type=int,
        metavar="N",
        help="experts prefetched per layer and token; default: 2 for large experts, else 0",
    )
    add(
        "--offload_tier",
        type=offload_tier,
        choices=OFFLOAD_TIERS,
        help="where the experts are kept; default: host",
    )
    add(
        "--offload_driver",
        choices=OFFLOAD_DRIVERS,
        help="whether the CPU (host) or the GPU (device) schedules expert copies; "
        "default: the GPU, or the CPU if it prefetches",
    )


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """Raise ValueError if one of these options is given and below 1."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value}: it must be at least 1")


def check_model_options(options: argparse.Namespace) -> None:
    """Raise ValueError for model options that are invalid or exclude each other."""
    check_counts(options, "prefill_chunk")
    for name in OFFLOAD_OPTIONS:
        if getattr(options, name) is not None and not options.offload:
            raise ValueError(f"--{name} is about experts in host memory: add --offload")


def parse_size(text: str) -> int:
    """Return the bytes of "16GB" or "900MB" (powers of 1000). Raises ValueError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([GM])B?", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"--gpu_memory {text}: it must be a number of GB or MB, as in 16GB")
    return int(float(match[1]) * {"G": 1e9, "M": 1e6}[match[2].upper()])
