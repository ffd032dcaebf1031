"""Options of the scripts whose imports take long."""

import argparse
from pathlib import Path

from cli.generate_options import DEFAULT_PROMPT
from cli.options import DTYPES, add_device
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
    add(
        "--hf_dir",
        type=Path,
        metavar="DIR",
        help="its Hugging Face checkpoint; default: the folder around it",
    )
    add("--prompt", default=DEFAULT_PROMPT, metavar="TEXT")
    add(
        "--tokens",
        metavar="ID,ID",
        help="prompt as token ids, for checkpoints without a tokenizer",
    )
    add("--new_tokens", type=int, default=128, metavar="N", help="tokens to generate (128)")
    add(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest error that is accepted; default: 1e-4 in fp32, 1e-2 in fp16, 5e-2 in bf16",
    )
    add_device(parser)
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")
    add("--compile", action="store_true", help="compile our decode step; transformers stays eager")
    add("--json", action="store_true", help="print one JSON object")
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
    add(
        "--checkpoint_path",
        type=Path,
        metavar="DIR",
        help="converted checkpoint; default: the embedded tiny model",
    )
    add("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help="prompt; '-' reads stdin")
    add(
        "--layers",
        metavar="N,N",
        help="layers with a map; default: the first and the last with experts",
    )
    add(
        "--output",
        type=Path,
        default=Path("experts.png"),
        metavar="FILE",
        help="picture, .png or .svg (experts.png)",
    )
    add_device(parser)
    add("--json", action="store_true", help="print load and entropies as one JSON object")
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
    add = parser.add_argument
    add(
        "--checkpoint_path",
        type=Path,
        metavar="DIR",
        help="converted checkpoint; default: the embedded model",
    )
    add(
        "--text_file",
        type=Path,
        metavar="FILE",
        help="text to read; default: the embedded model's held-out text",
    )
    add("--tokens", type=int, default=2000, metavar="N", help="number of tokens to read (2000)")
    add_device(parser)
    add(
        "--output_dir",
        type=Path,
        metavar="DIR",
        help="folder for the pictures offload_curves.svg and offload_experts.png",
    )
    add(
        "--profile",
        type=Path,
        metavar="FILE",
        help="write how often each expert was chosen, for --expert_profile, or as "
        "expert_profile.json for a checkpoint's folder",
    )
    add("--json", action="store_true", help="print one JSON object after the tables")
    return parser


def add_picture(parser: Parser, source: str, picture: str) -> None:
    """Add a result that `source --json` writes, and the picture to draw of it."""
    help = f"output of {source} --json"
    parser.add_argument("result", type=Path, metavar="RESULT", help=help)
    help = f"picture, .png or .svg ({picture})"
    parser.add_argument("--output", type=Path, default=Path(picture), help=help)


def check_picture(options: argparse.Namespace) -> None:
    """Raise ValueError for a picture that cannot be written, and without matplotlib."""
    if options.output.suffix not in PICTURES:
        endings = " or ".join(PICTURES)
        raise ValueError(f"--output {options.output}: its name must end in {endings}")
    if options.output.is_dir() or not options.output.absolute().parent.is_dir():
        why = f"--output {options.output}: it is a folder, or its folder is not there"
        raise ValueError(f"{why}: give a file that can be written")
    require_extra("a picture needs matplotlib", "plot", "matplotlib")


def check_study(options: argparse.Namespace) -> None:
    """Raise ValueError for too few tokens, and for pictures without matplotlib."""
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: it must be at least 2")
    if options.output_dir is not None:
        require_extra("pictures need matplotlib", "plot", "matplotlib")
