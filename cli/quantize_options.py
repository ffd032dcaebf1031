"""quantize.py's options. tests/test_cli_options.py compares the literals with `formats`."""

import argparse

from cli.model_name import PLAIN, format_names
from cli.options import (
    add_device,
    add_hub_options,
    add_model_name,
    check_checkpoint_path,
    check_counts,
)
from cli.parser import Parser

HEAD_FORMATS = PLAIN, "int8", "q8_0", "q6_k"
HEADS = (
    "int8 with int8, fp8, int4, uint4; q8_0 with q8_0, q5_1, q4_1, q4_0, iq4_nl; "
    "q6_k with q6_k, q5_k, q4_k, iq4_xs; bf16 with the others"
)
GROUPS = "128 for fp8b, int4 and uint4, 64 for hqq4 and hqq3, 32 for mxfp4, 16 for hqq2"


def build_parser() -> Parser:
    parser = Parser(
        "Write a checkpoint with its weights in fewer bits.",
        (
            "python quantize.py --checkpoint_path checkpoints/OWNER/NAME/model_bf16 --mode int8",
            "python quantize.py --checkpoint_path DIR/model_bf16 "
            "--attention hqq4 --experts hqq2 --head int8",
            "python quantize.py --model OWNER/NAME --mode int4 --group_size 64",
        ),
    )
    parser.begin_group("usual options", "most users need no others")
    source = "a converted checkpoint, not quantized yet, or a directory of Hugging Face files"
    parser.add_path("--checkpoint_path", source)
    add_model_name(parser)
    mode = "format of attention and experts; mxfp4, nvfp4: of experts alone"
    parser.add_argument("--mode", choices=format_names(), help=mode)
    parser.add_path("--output_dir", "default: model_<format> beside the checkpoint")
    parser.add_flag("--force", "replace an existing checkpoint")
    add_device(parser, "where the weights are packed")
    add_format_options(parser)
    add_hub_options(parser)
    return parser


def add_format_options(parser: Parser) -> None:
    """Add a group of what changes --mode."""
    parser.begin_group("formats of parts", f"{PLAIN}, or a format of --mode")
    add, settings = parser.add_argument, {"choices": (PLAIN, *format_names()), "metavar": "FORMAT"}
    add("--attention", help="attention weights; default: --mode's", **settings)
    experts = "expert (and dense feed-forward) weights; default: --mode's"
    add("--experts", help=experts, **settings)
    add("--head", choices=HEAD_FORMATS, help=f"default: {HEADS}")
    sizes = f"default: {GROUPS}; halved until it divides a tensor's rows"
    parser.add_number("--group_size", f"numbers that share a scale; {sizes}")
    solver = "iterations of the hqq solver; default: 20; 0 rounds to nearest"
    parser.add_number("--iterations", solver)


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for invalid options, and for options that exclude each other."""
    check_counts(options, "group_size")
    check_counts(options, "iterations", least=0)
    check_checkpoint_path(options)
    if options.mode and options.attention and options.experts:
        raise ValueError(
            "--mode has no effect beside --attention and --experts: leave one of the three out"
        )
    if options.checkpoint_path is None and options.model is None:
        raise ValueError("nothing to quantize: give --checkpoint_path DIR or --model OWNER/NAME")
