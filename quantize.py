"""Write a checkpoint in a smaller number format.

    python quantize.py --checkpoint_path DIR/model_bf16 --mode int8          writes DIR/model_int8
    python quantize.py --checkpoint_path DIR --mode int8      of Hugging Face files: writes the same
    python quantize.py --checkpoint_path DIR/model_bf16 --attention hqq4 --experts hqq2

formats/quantizer.py does the work.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import argparse
import shlex
import sys
import time
from functools import partial
from pathlib import Path

from cli.command import check_stdout, command
from cli.model_name import ModelName, check_hub_environment, parse_model_name
from cli.quantize_options import build_parser, check_options
from cli.startup import check_arguments

if __name__ == "__main__":
    check_arguments(build_parser, check_options, check_hub_environment)

import torch

from checkpoint import Checkpoint, is_checkpoint, read_json
from formats import FORMATS, PLAIN
from formats.quantizer import (
    bits_per_weight,
    describe_groups,
    formats_of_mode,
    plan_format,
    quantize,
)
from gguf_files.locate import find_gguf
from hub.disk import find_checkpoint
from hub.prepare import Settings, fetch_model
from model import ModelArgs
from models import args_of_checkpoint, build_model
from models.converter import PackSettings, convert
from parallel.device import pick_device


def run(options: argparse.Namespace) -> str:
    """Do what the options ask for; return the line to print."""
    check_options(options)
    start, device = time.perf_counter(), pick_device(options.device)
    path, model = options.checkpoint_path, None
    if options.model:
        model = hub_model(options)
        path = find_checkpoint(ModelName(model.repo_id), options.revision)
    if path is not None:
        target = quantize_directory(options, path, device)
    elif model is not None:
        target = quantize_download(options, model, device)
    else:
        raise ValueError("nothing to quantize: give --checkpoint_path DIR or --model OWNER/NAME")
    return summary(Checkpoint(target), time.perf_counter() - start)


def hub_model(options: argparse.Namespace) -> ModelName:
    """Return --model's name; its format becomes --mode. Raises ValueError if both are given."""
    name = parse_model_name(options.model)
    if name.format is not None:
        if options.mode:
            raise ValueError(f"--mode and :{name.format} name two formats: leave one of them out")
        if name.format not in FORMATS:
            known = ", ".join(FORMATS)
            raise ValueError(f"--model {name}: {name.format} is not one of {known}")
        options.mode = name.format
    return name


def is_published(path: Path) -> bool:
    """Whether a directory is in Hugging Face layout, and no checkpoint was made from it yet."""
    if any(map(is_checkpoint, (path, *path.glob("model_*")))):
        return False
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    return "architectures" in config or "model_type" in config


def make_format(options: argparse.Namespace, args: ModelArgs, dtype: str) -> dict:
    """Return the "format" that the options ask for. dtype: of weights that stay plain."""
    attention, experts = formats_of_mode(options.mode or PLAIN)
    attention, experts = options.attention or attention, options.experts or experts
    model = build_model(args)
    format = plan_format(model, attention, experts, options.head, options.group_size, dtype)
    used = {FORMATS[spec["format"]] for spec in format["modules"].values()}
    if options.iterations is not None and not any(used_format.has_solver for used_format in used):
        raise ValueError(
            f"--iterations {options.iterations}: none of these formats has a solver, leave it out"
        )
    return format


def refuse_gguf(path: Path) -> None:
    """Raise ValueError for the path of a GGUF file: generate.py runs it as it is."""
    file = find_gguf(path)
    if file is not None and file.is_file():
        fix = f"run it as it is: python generate.py --checkpoint_path {shlex.quote(str(file))}"
        raise ValueError(f"{file} is a GGUF file, which is not quantized again; {fix}")


def quantize_directory(options: argparse.Namespace, path: Path, device: torch.device) -> Path:
    """Quantize a checkpoint, or a published one while it is converted; return the new directory."""
    refuse_gguf(path)
    if is_published(path):
        choose = partial(make_format, options)
        pack = PackSettings(choose, device, options.iterations)
        return convert(path, options.output_dir, force=options.force, pack=pack)
    source = Checkpoint(path)
    args = args_of_checkpoint(source)
    format = make_format(options, args, source.format["name"])
    return quantize(
        source,
        format,
        build_model(args),
        options.output_dir,
        device,
        options.force,
        options.iterations,
    )


def quantize_download(options: argparse.Namespace, name: ModelName, device: torch.device) -> Path:
    """Quantize a model while it is downloaded; return the new directory."""
    settings = Settings(
        options.revision,
        options.keep_download,
        device,
        iterations=options.iterations,
        force=options.force,
    )
    names = "mode", "attention", "experts", "head", "group_size", "iterations"
    given = [f"{n}_{value}" for n in names if (value := getattr(options, n)) is not None]
    label = options.mode if given == [f"mode_{options.mode}"] else "-".join(given)
    choose = partial(make_format, options)
    return fetch_model(ModelName(name.repo_id), settings, choose, label, options.output_dir)


def summary(target: Checkpoint, seconds: float) -> str:
    """Return the line about a checkpoint that was written."""
    args = args_of_checkpoint(target)
    packed, whole = bits_per_weight(target, build_model(args))
    size = sum(map(target.nbytes, target.tensors))
    groups = describe_groups(target.format)
    return (
        f"{target.directory}: {size / 1e9:.3f} GB, {packed:.3f} bits a quantized weight, "
        f"{whole:.3f} over all weights, {groups + ', ' if groups else ''}in {seconds:.1f} s"
    )


@command(
    out_of_memory="free some memory, or on a GPU add --device cpu",
    interrupted="nothing was written",
)
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    check_stdout()
    print(run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
