"""Options of the scripts whose imports take long."""

import argparse
from pathlib import Path

from cli.generate_options import DEFAULT_PROMPT
from cli.options import DTYPES, add_device, check_files
from cli.parser import Parser
from cli.startup import require_extra

PICTURES = ".png", ".svg"  # endings of their names


def compare_parser() -> Parser:
    parser = Parser(
        "Compare this project and transformers on one prompt, operator by operator.",
        (
            "python scripts/compare_hf.py checkpoints/OWNER/NAME/model_fp32 --prompt 'import os'",
            "python scripts/compare_hf.py checkpoints/OWNER/NAME/model_bf16 --device cuda"
            " --compile --json",
        ),
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="converted checkpoint, not quantized")
    parser.add_path("--hf_dir", "its Hugging Face checkpoint; default: the folder around it")
    add("--prompt", default=DEFAULT_PROMPT, metavar="TEXT")
    tokens = "prompt as token ids, for checkpoints without a tokenizer"
    add("--tokens", metavar="ID,ID", help=tokens)
    parser.add_number("--new_tokens", "tokens to generate (128)", 128)
    error = "largest error that is accepted; default: 1e-4 in fp32, 1e-2 in fp16, 5e-2 in bf16"
    add("--tolerance", type=float, metavar="X", help=error)
    add_device(parser)
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")
    parser.add_flag("--compile", "compile our decode step; transformers stays eager")
    parser.add_flag("--json", "print one JSON object")
    return parser


def experts_parser() -> Parser:
    parser = Parser(
        "Draw which experts each token of a prompt uses, how evenly, and how sure the router is.",
        (
            "python scripts/plot_experts.py --prompt 'import os' --layers 0,7 --output experts.png",
            "python scripts/plot_experts.py --checkpoint_path DIR --prompt - --json < text.txt",
        ),
    )
    add = parser.add_argument
    add_embedded(parser)
    add("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help="prompt; '-' reads stdin")
    layers = "layers with a map; default: the first and the last with experts"
    add("--layers", metavar="N,N", help=layers)
    add_output(parser, "experts.png")
    add_device(parser)
    parser.add_flag("--json", "print load and entropies as one JSON object")
    return parser


def download_parser() -> Parser:
    parser = Parser(
        "Download a checkpoint from the Hugging Face Hub: weights, config.json, tokenizer files.",
        (
            "python scripts/download.py --repo_id mistralai/Mixtral-8x7B-Instruct-v0.1",
            "python scripts/download.py --repo_id OWNER/NAME --revision main"
            " --output_dir models/NAME",
        ),
    )
    add = parser.add_argument
    add("--repo_id", required=True, metavar="OWNER/NAME", help="repository on the Hub")
    add("--revision", help="branch, tag or commit; default: the main branch")
    add("--output_dir", type=Path, help="default: checkpoints/OWNER/NAME")
    add("--token", help="access token; default: $HF_TOKEN, else the one saved by `hf auth login`")
    return parser


def study_parser() -> Parser:
    parser = Parser(
        "Study what offloading can gain: hit ratios of expert caches, recall of predictions.",
        (
            "python scripts/study_offload.py --output_dir docs",
            "python scripts/study_offload.py --checkpoint_path DIR --text_file book.txt"
            " --tokens 5000 --profile DIR/expert_profile.json",
        ),
    )
    add_embedded(parser)
    text = "text to read; default: the embedded model's held-out text"
    parser.add_path("--text_file", text, "FILE")
    parser.add_number("--tokens", "number of tokens to read (2000)", 2000)
    add_device(parser)
    pictures = "folder for the pictures offload_curves.svg and offload_experts.png"
    parser.add_path("--output_dir", pictures)
    profile = (
        "write how often each expert was chosen, for --expert_profile, or as "
        "expert_profile.json for a checkpoint's folder"
    )
    parser.add_path("--profile", profile, "FILE")
    parser.add_flag("--json", "print one JSON object after the tables")
    return parser


def add_embedded(parser: Parser) -> None:
    """Add a checkpoint without which the embedded one is read."""
    parser.add_path("--checkpoint_path", "converted checkpoint; default: the embedded tiny model")


def add_output(parser: Parser, name: str) -> None:
    """Add the name of a picture."""
    help = f"picture, .png or .svg ({name})"
    parser.add_argument("--output", type=Path, default=Path(name), metavar="FILE", help=help)


def add_picture(parser: Parser, source: str, picture: str) -> None:
    """Add a result that `source --json` writes, and the picture to draw of it."""
    help = f"output of {source} --json"
    parser.add_argument("result", type=Path, metavar="RESULT", help=help)
    add_output(parser, picture)


def check_picture(options: argparse.Namespace) -> None:
    """Raise ValueError for a picture that cannot be written, and without matplotlib."""
    if options.output.suffix not in PICTURES:
        endings = " or ".join(PICTURES)
        raise ValueError(f"--output {options.output}: its name must end in {endings}")
    if options.output.is_dir() or not options.output.absolute().parent.is_dir():
        why = f"--output {options.output}: it is a folder, or its folder is not there"
        raise ValueError(f"{why}: give a file that can be written")
    require_extra("a picture needs", "plot", "matplotlib")


def check_study(options: argparse.Namespace) -> None:
    """Raise ValueError for too few tokens, files that are one, and pictures without matplotlib."""
    check_files(options, "text_file", "profile")
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: it must be at least 2")
    if options.output_dir is not None:
        require_extra("pictures need", "plot", "matplotlib")
