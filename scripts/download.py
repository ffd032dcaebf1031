"""Download a checkpoint from the Hugging Face Hub: safetensors, config.json, tokenizer files.

    python scripts/download.py --repo_id mistralai/Mixtral-8x7B-Instruct-v0.1

Files go to checkpoints/<repo_id>; stdout has the name of this directory. The download resumes after
a dropped connection. After an interruption, run the command again: it keeps complete files. To run
a model of the Hub, `generate.py --model OWNER/NAME` is enough; hub/client.py does the work.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import shlex
import sys

from cli.command import command
from cli.model_name import check_hub_environment
from cli.script_options import download_parser as build_parser
from cli.startup import check_arguments

if __name__ == "__main__":
    check_arguments(build_parser, check_hub_environment)

from hub.client import AGAIN, download


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
