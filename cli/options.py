"""Options shared by several commands.

The choices are literals: the modules that implement them import torch, which takes
seconds. tests/test_cli_options.py compares the literals with those modules.
"""

import argparse
import os
import re

from cli.model_name import MODEL_NAME, check_format, check_hub_environment, parse_model_name
from cli.parser import Parser

DEVICES = "auto", "cuda", "cpu"
DTYPES = "bf16", "fp16", "fp32"
KV_CACHES = "plain", "int8"
DECODE_KERNELS = "auto", "inductor", "fused"
PARALLEL = "tensor", "expert"
OFFLOAD_COMPUTE = "auto", "gpu", "cpu"
OFFLOAD_TIERS = ("host",)
PREFILL_CHUNK = 2048  # tokens
DEFAULT_CHAT_LENGTH = 4096  # positions of a chat's cache

OFFLOAD_OPTIONS = (  # these need --offload
    "gpu_experts",
    "gpu_memory",
    "offload_compute",
    "expert_profile",
    "offload_tier",
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
    """Add the options that name a checkpoint: a directory, or a model of the Hub."""
    parser.add_path(
        "--checkpoint_path",
        "converted checkpoint, or a GGUF file; default: the embedded tiny model",
    )
    add_model_name(parser)


def add_model_name(parser: Parser) -> None:
    """Add --model."""
    model = (
        "model of the Hugging Face Hub, downloaded and converted on first use; FORMAT is such as "
        "int8 or int4, default: the published one"
    )
    parser.add_argument("--model", type=model_name, metavar=MODEL_NAME, help=model)


def add_hub_options(parser: Parser) -> None:
    """Add a group of what belongs to --model."""
    parser.begin_group("models of the Hub", "how --model is downloaded")
    parser.add_argument("--revision", help="branch, tag or commit of --model; default: main")
    parser.add_flag("--keep_download", "keep the files of --model as the Hub has them, too")


def model_name(text: str) -> str:
    """Return the argument of --model. Raises ArgumentTypeError unless it is a model's name."""
    try:
        parse_model_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def check_checkpoint_path(options: argparse.Namespace) -> None:
    """Raise ValueError for two checkpoints, a format not known, options of --model without it."""
    if options.model and options.checkpoint_path:
        raise ValueError("--model and --checkpoint_path name two models: leave one of them out")
    for name in ("revision", "keep_download"):
        if getattr(options, name) and not options.model:
            raise ValueError(f"--{name} is about a model of the Hub: add --model {MODEL_NAME}")
    if options.model:
        check_hub_environment()
        model = parse_model_name(options.model)
        if not model.checkpoint().exists():
            check_format(model)


def add_compile(parser: Parser) -> None:
    """Add --compile. `add_model_options` adds --eager."""
    step = "compile the decode step, and capture it as a CUDA graph: the default on a GPU"
    parser.add_flag("--compile", step)


def choose_compile(options: argparse.Namespace, on_gpu: bool) -> None:
    """Set --compile where it is the default. Raises ValueError for options that need it."""
    options.compile = options.compile or (on_gpu and not options.eager)
    if options.compile:
        return
    if options.compile_cache and not options.compile_prefill:
        raise ValueError("--compile_cache is about compiled code: add --compile")
    if options.decode_kernels == "fused":
        raise ValueError("--decode_kernels fused is about a compiled step: add --compile")


def add_dry_run(parser: Parser) -> None:
    """Add --dry_run and --gpu."""
    parser.begin_group("plan", "number format, context and offloading, as the GPU can have them")
    parser.add_flag("--dry_run", "print the plan for --model or --checkpoint_path, and end")
    card = "with --dry_run: plan for this card, such as 'RTX 4090', instead of the one here"
    parser.add_argument("--gpu", metavar="NAME", help=card)


def check_dry_run(options: argparse.Namespace) -> None:
    """Raise ValueError for --gpu without --dry_run, or with --device cpu."""
    if options.gpu and not options.dry_run:
        raise ValueError("--gpu is about a card that is not here: add --dry_run")
    if options.gpu and options.device == "cpu":
        raise ValueError("--gpu and --device cpu: leave one of them out")


def add_offload(parser: Parser) -> None:
    """Add --offload. `add_model_options` adds its settings."""
    parser.add_flag("--offload", "keep experts in host memory, and cache them on the GPU")


def add_model_options(parser: Parser) -> None:
    """Add groups of the other options that `generate.open_session` reads."""
    parser.begin_group("speed and precision", "how the model is run")
    parser.add_flag("--eager", "do not compile: the default on a CPU")
    add_prefill_options(parser)
    add_compile_cache(parser)
    add_decode_kernels(parser)
    add_dtype(parser)
    add_kv_cache(parser)
    add_device_group(parser)
    add_offload_options(parser)


def add_prefill_options(parser: Parser) -> None:
    """Add how prompts are computed."""
    parser.add_flag("--compile_prefill", "compile the prefill too")
    chunk = f"tokens of a prefill chunk ({PREFILL_CHUNK}, more where GPU memory is free)"
    parser.add_number("--prefill_chunk", chunk)


def add_compile_cache(parser: Parser) -> None:
    """Add where compiled code is kept."""
    cache = (
        "keep compiled code in this folder, for later runs and machines of the same kind; the code "
        "in it is executed, so only use a folder that you trust (in the user's cache)"
    )
    parser.add_path("--compile_cache", cache)


def add_decode_kernels(parser: Parser) -> None:
    """Add which kernels decode one token."""
    kernels = (
        "kernels of a compiled decode step: Inductor's, or fused ones; auto: fused ones "
        "wherever they compute the model (auto)"
    )
    parser.add_argument("--decode_kernels", choices=DECODE_KERNELS, default="auto", help=kernels)


def add_kv_cache(parser: Parser) -> None:
    """Add the number format of the KV cache."""
    cache = "number format of the KV cache; int8 takes half the bytes of plain (plain)"
    parser.add_argument("--kv_cache", choices=KV_CACHES, default="plain", help=cache)


def add_device_group(parser: Parser) -> None:
    """Add a group of the device, and how several GPUs share the model."""
    parser.begin_group("devices", "where the model runs; torchrun starts one rank for each GPU")
    add_device(parser, "auto: cuda if there is a GPU (auto)")
    shards = "how torchrun's ranks shard the experts (tensor)"
    parser.add_argument("--parallel", default="tensor", choices=PARALLEL, help=shards)


def add_device(parser: Parser, help: str | None = None) -> None:
    """Add the device."""
    parser.add_argument("--device", default="auto", choices=DEVICES, help=help)


def add_dtype(parser: Parser) -> None:
    """Add the dtype that replaces the checkpoint's."""
    dtype = "dtype of weights and activations; default: the checkpoint's"
    parser.add_argument("--dtype", choices=DTYPES, help=dtype)


def add_offload_options(parser: Parser) -> None:
    """Add a group of the settings of experts in host memory."""
    parser.begin_group("offloading", "settings of --offload")
    add = parser.add_argument
    slots = "size of the expert cache: experts of each layer on the GPU"
    parser.add_number("--gpu_experts", slots)
    memory = "GPU memory to use, as 16GB or 900MB, instead of --gpu_experts"
    add("--gpu_memory", metavar="SIZE", help=memory)
    compute = (
        "who multiplies experts that are not cached: the GPU, which copies them (gpu), the CPU "
        "(cpu), or beside one GPU both, as is measured to be fastest (auto, default)"
    )
    add("--offload_compute", choices=OFFLOAD_COMPUTE, help=compute)
    profile = (
        "file of scripts/study_offload.py: the experts that are cached at the start; default: "
        "expert_profile.json beside the checkpoint, if there is one"
    )
    parser.add_path("--expert_profile", profile)
    tier = "where the experts are kept; default: host"
    add("--offload_tier", type=offload_tier, choices=OFFLOAD_TIERS, help=tier)


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


def check_files(options: argparse.Namespace, *names: str) -> None:
    """Raise ValueError if two of these options name one file: a write would replace the other."""
    given: dict[str, str] = {}
    for name in names:
        if path := getattr(options, name):
            other = given.setdefault(os.path.realpath(path), name)
            if other != name:
                raise ValueError(f"--{other} and --{name} are one file, {path}: name two files")


def check_length(options: argparse.Namespace, max_position: int) -> None:
    """Raise ValueError for a --max_seq_len above the model's limit."""
    if options.max_seq_len and options.max_seq_len > max_position:
        why = f"the model was made for {max_position} positions at most"
        raise ValueError(f"--max_seq_len {options.max_seq_len}: {why}")


def check_model_options(options: argparse.Namespace) -> None:
    """Raise ValueError for model options that are invalid or exclude each other."""
    check_counts(options, "prefill_chunk")
    for name in OFFLOAD_OPTIONS:
        if getattr(options, name) is not None and not options.offload:
            raise ValueError(f"--{name} is about experts in host memory: add --offload")
    if options.eager and options.compile:
        raise ValueError("--eager and --compile: leave one of them out")
    if options.eager or options.device == "cpu":
        choose_compile(options, on_gpu=False)
    if options.offload and (options.gpu_experts is None) == (options.gpu_memory is None):
        raise ValueError("offloading takes --gpu_experts or --gpu_memory: give one of the two")


def parse_size(text: str) -> int:
    """Return the bytes of "16GB" or "900MB" (powers of 1000). Raises ValueError otherwise."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([GM])B?", text, re.IGNORECASE | re.ASCII)
    if not match:
        raise ValueError(f"--gpu_memory {text:.40}: it must be a number of GB or MB, as in 16GB")
    return round(float(match[1]) * {"G": 1e9, "M": 1e6}[match[2].upper()])
