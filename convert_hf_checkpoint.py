"""Convert a Hugging Face checkpoint: `python convert_hf_checkpoint.py --checkpoint_dir DIR`.

models/converter.py does the work.
"""

import sys
import time
from pathlib import Path

from cli.command import check_stdout, command
from cli.parser import Parser
from models.converter import convert


def build_parser() -> Parser:
    parser = Parser(
        "Convert a Hugging Face checkpoint for generate.py.",
        (
            "python convert_hf_checkpoint.py --checkpoint_dir checkpoints/OWNER/NAME",
            "python convert_hf_checkpoint.py --checkpoint_dir HF_DIR --dtype fp32"
            " --output_dir DIR --force",
        ),
    )
    add = parser.add_argument
    add("--checkpoint_dir", type=Path, required=True, help="has config.json and *.safetensors")
    add("--output_dir", type=Path, help="default: model_<format> in the checkpoint_dir")
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of unpacked weights")
    add("--force", action="store_true", help="replace an existing output")
    return parser


@command(interrupted="nothing was written")
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    check_stdout()
    start = time.perf_counter()
    output = convert(options.checkpoint_dir, options.output_dir, options.dtype, options.force)
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in output.glob("*.safetensors")) / 1e9
    print(f"{size:.2f} GB in {seconds:.1f} s, {size / seconds:.2f} GB/s", file=sys.stderr)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
