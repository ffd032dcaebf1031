"""convert_hf_checkpoint.py's options."""

from pathlib import Path

from cli.options import DTYPES
from cli.parser import Parser


def build_parser() -> Parser:
    parser = Parser(
        "Convert a Hugging Face checkpoint for generate.py.",
        (
            "python convert_hf_checkpoint.py --checkpoint_dir checkpoints/OWNER/NAME",
            "python convert_hf_checkpoint.py --checkpoint_dir HF_DIR --dtype fp32"
            " --output_dir DIR --force",
        ),
    )
    source = "has config.json and *.safetensors"
    parser.add_argument("--checkpoint_dir", type=Path, required=True, metavar="DIR", help=source)
    parser.add_path("--output_dir", "default: model_<format> in the checkpoint_dir")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of unpacked weights")
    parser.add_flag("--force", "replace an existing output")
    return parser
