"""How much computing a value once, instead of again in every row, is worth: tokens/s against Inductor's threshold.

    python benchmarks/realise.py --threshold 30 --arch Mixtral-8x7B --repeats 3

All other options are benchmark.py's. One threshold a process, because compiled code is kept within one.
"""

import sys

import torch._inductor.config

import benchmark
import session
from command import Parser


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/realise.py --threshold 30 --arch Mixtral-8x7B --repeats 3",
            "python benchmarks/realise.py --threshold 8 --arch OLMoE-1B-7B --json",
        ),
    )
    parser.add_argument("--threshold", type=int, default=30, help="operations above which a value is kept; default 30")
    return parser


def main() -> int:
    options, rest = build_parser().parse_known_args()
    project_settings = session.compile_settings

    def settings() -> None:
        project_settings()
        torch._inductor.config.realize_opcount_threshold = options.threshold

    session.compile_settings = settings
    sys.argv = ["benchmark.py", *rest]
    return benchmark.main()


if __name__ == "__main__":
    sys.exit(main())
