"""Download a checkpoint from the Hugging Face Hub: safetensors, config.json, tokenizer files.

    python scripts/download.py --repo_id mistralai/Mixtral-8x7B-Instruct-v0.1

Files go to checkpoints/<repo_id>; stdout has the name of this directory. The download resumes after
a dropped connection. After an interruption, run the command again: it keeps complete files. To run
a model of the Hub, `generate.py --model OWNER/NAME` is enough; hub/client.py does the work.
"""

import shlex
import sys
from pathlib import Path

from cli.command import command
from cli.parser import Parser
from hub.client import AGAIN, download


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
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


@command(interrupted=AGAIN)
def main(argv: list[str] | None = None) -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    directory = download(**vars(build_parser().parse_args(argv)))
    print(directory)
    command = f"python convert_hf_checkpoint.py --checkpoint_dir {shlex.quote(str(directory))}"
    print(f"next: {command}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
