"""Write a checkpoint in a smaller number format.

    python quantize.py --checkpoint_path DIR/model_bf16 --mode int8          writes DIR/model_int8
    python quantize.py --checkpoint_path DIR/model_bf16 --attention hqq4 --experts hqq2

formats/quantizer.py does the work.
"""

import argparse
import sys
import time
from pathlib import Path

from checkpoint import Checkpoint
from cli.command import check_stdout, command
from cli.parser import Parser
from formats import FORMATS, PLAIN
from formats.quantizer import bits_per_weight, formats_of_mode, plan_format, quantize
from models import args_of_checkpoint, build_model
from parallel.device import pick_device


def build_parser() -> Parser:
    parser = Parser(
        "Write a checkpoint with its weights in fewer bits.",
        (
            "python quantize.py --checkpoint_path checkpoints/OWNER/NAME/model_bf16 --mode int8",
            "python quantize.py --checkpoint_path DIR/model_bf16 "
            "--attention hqq4 --experts hqq2 --head int8",
        ),
    )
    add, names = parser.add_argument, (PLAIN, *FORMATS)
    add(
        "--checkpoint_path",
        type=Path,
        required=True,
        metavar="DIR",
        help="a converted checkpoint, not quantized yet",
    )
    add(
        "--mode",
        choices=tuple(FORMATS),
        help="format of attention and experts; mxfp4: of experts alone",
    )
    add("--attention", choices=names, help="format of the attention weights; default: --mode's")
    add(
        "--experts",
        choices=names,
        help="format of the expert (and dense feed-forward) weights; default: --mode's",
    )
    add("--head", choices=(PLAIN, "int8"), help=f"default: {default_heads()}")
    add(
        "--group_size",
        type=int,
        metavar="N",
        help=f"numbers that share a scale; default: {default_groups()}",
    )
    add(
        "--iterations",
        type=int,
        metavar="N",
        help="iterations of the hqq solver; default: 20; 0 rounds to nearest",
    )
    add(
        "--output_dir",
        type=Path,
        metavar="DIR",
        help="default: model_<format> beside the checkpoint",
    )
    add(
        "--device",
        default="auto",
        choices=("auto", "cuda", "cpu"),
        help="where the weights are packed",
    )
    add("--force", action="store_true", help="replace an existing checkpoint")
    return parser


def default_heads() -> str:
    """Return the default of --head by format, such as "int8 with int8; bf16 with the others"."""
    chosen = [format.name for format in FORMATS.values() if format.head_format == "int8"]
    return f"int8 with {', '.join(chosen)}; {PLAIN} with the others"


def default_groups() -> str:
    """Return the default group sizes, such as "128 for int4, 64 for hqq4 and hqq3"."""
    names = {}
    for format in FORMATS.values():
        if not format.per_row:
            names.setdefault(format.group, []).append(format.name)
    sizes = sorted(names, reverse=True)
    return ", ".join(f"{size} for {' and '.join(names[size])}" for size in sizes)


def run(options: argparse.Namespace) -> str:
    """Do what the options ask for; return the line to print."""
    for name, minimum in (("group_size", 1), ("iterations", 0)):
        if (value := getattr(options, name)) is not None and value < minimum:
            raise ValueError(f"--{name} {value}: it must be at least {minimum}")
    if options.mode and options.attention and options.experts:
        raise ValueError(
            "--mode has no effect beside --attention and --experts: leave one of the three out"
        )
    source = Checkpoint(options.checkpoint_path)
    args = args_of_checkpoint(source)
    attention, experts = formats_of_mode(options.mode or PLAIN)
    format = plan_format(
        build_model(args),
        options.attention or attention,
        options.experts or experts,
        options.head,
        options.group_size,
        source.format["name"],
    )
    used = {FORMATS[spec["format"]] for spec in format["modules"].values()}
    if options.iterations is not None and not any(used_format.has_solver for used_format in used):
        raise ValueError(
            f"--iterations {options.iterations}: none of these formats has a solver, leave it out"
        )
    start, device = time.perf_counter(), pick_device(options.device)
    target = quantize(
        source,
        format,
        build_model(args),
        options.output_dir,
        device,
        options.force,
        options.iterations,
    )
    return summary(Checkpoint(target), args, time.perf_counter() - start)


def summary(target: Checkpoint, args, seconds: float) -> str:
    """Return the line about a checkpoint that was written."""
    packed, whole = bits_per_weight(target, build_model(args))
    size = sum(map(target.nbytes, target.tensors))
    return (
        f"{target.directory}: {size / 1e9:.3f} GB, {packed:.3f} bits a quantised weight, "
        f"{whole:.3f} over all weights, in {seconds:.1f} s"
    )


@command(out_of_memory="add --device cpu", interrupted="nothing was written")
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    check_stdout()
    print(run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
