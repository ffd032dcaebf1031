"""Options of benchmark.py and benchmarks/speed_check.py."""

import argparse

from cli.model_name import format_names
from cli.options import (
    DTYPES,
    add_compile_cache,
    add_decode_kernels,
    add_device_group,
    add_kv_cache,
    add_prefill_options,
    check_counts,
)
from cli.parser import Parser

SWEEP_LAYERS = 4


def build_parser() -> Parser:
    parser = Parser(
        "Measure decode speed with random weights at real shapes.",
        (
            "python benchmark.py --arch Mixtral-8x7B --mode int4 --kernels",
            "python benchmark.py --arch Qwen3-30B-A3B --layers 4 --prompt_len 512 --peer hf --json",
            "torchrun --standalone --nproc_per_node=4 benchmark.py --arch Mixtral-8x7B"
            " --parallel expert",
        ),
    )
    parser.begin_group("usual options", "most users need no others")
    add_measure_options(parser)
    parser.begin_group("comparisons", "what else is measured in the same run")
    sweep = f"latency against experts and active ones, with {SWEEP_LAYERS} layers by default"
    parser.add_argument("--sweep", choices=("experts",), help=sweep)
    peer = "also measure Hugging Face transformers (in bf16 if the mode is no dtype)"
    parser.add_argument("--peer", choices=("hf",), help=peer)
    return parser


def add_measure_options(parser: Parser) -> None:
    """Add the model, its number format, lengths, how it is run, and what is reported."""
    arch = "a Hugging Face config.json, or a name as Mixtral-8x7B; a wrong one lists the nearest"
    parser.add_argument("--arch", required=True, metavar="NAME", help=arch)
    mode = f"number format: {', '.join((*DTYPES, *format_names()))}, or ATTENTION-EXPERTS (bf16)"
    mode += "; with +FORMAT, shared experts are in that one"
    parser.add_argument("--mode", default="bf16", help=mode)
    parser.add_number("--layers", "build only the first N layers")
    parser.add_number("--prompt_len", "tokens of the prompt (5)", 5)
    parser.add_number("--new_tokens", "tokens of an answer (200)", 200)
    parser.add_number("--repeats", "answers measured (5)", 5)
    parser.add_flag("--kernels", "also list a step's kernels, their times and the gaps")
    parser.add_flag("--json", "print one JSON object instead of text")
    parser.begin_group("speed and precision", "how the model is run")
    parser.add_number("--batch", "sequences at once, with a prompt each (1)", 1)
    parser.add_number("--max_seq_len", "cache length; default: prompt and new tokens")
    parser.add_flag("--random_cache", "fill the cache with random numbers: run no prompt")
    parser.add_flag("--eager", "do not compile")
    add_prefill_options(parser)
    add_compile_cache(parser)
    add_decode_kernels(parser)
    add_kv_cache(parser)
    add_device_group(parser)


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for invalid options, and for options that exclude each other."""
    check_counts(options, "layers", "prompt_len", "prefill_chunk")
    check_counts(options, "repeats", "batch", most=100_000)
    check_counts(options, "new_tokens", least=2)
    if options.compile_cache and options.eager and not options.compile_prefill:
        raise ValueError("--compile_cache and --eager: leave one of them out")
    if options.decode_kernels == "fused" and options.eager:
        raise ValueError("--decode_kernels fused and --eager: leave one of them out")
    if options.kernels and options.sweep:
        raise ValueError("--kernels and --sweep: give one of them at a time")
    if options.peer and options.batch > 1:
        raise ValueError("--peer measures one sequence: leave --batch out")
    if options.peer and options.sweep:
        raise ValueError("--peer and --sweep: give one of them at a time")
