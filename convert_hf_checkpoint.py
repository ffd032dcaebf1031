"""Convert a Hugging Face checkpoint: `python convert_hf_checkpoint.py --checkpoint_dir DIR`.

models/converter.py does the work.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import sys
import time

from cli.command import check_stdout, command
from cli.convert_options import build_parser
from cli.startup import check_arguments

if __name__ == "__main__":
    check_arguments(build_parser)

from models.converter import convert


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
