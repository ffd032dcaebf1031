"""eval.py's options."""

import argparse

from cli.options import (
    add_checkpoint_path,
    add_device_group,
    add_dtype,
    add_hub_options,
    add_kv_cache,
    check_checkpoint_path,
    check_counts,
)
from cli.parser import Parser
from cli.startup import require_extra

DEFAULT_SEQ_LEN = 2048


def build_parser() -> Parser:
    parser = Parser(
        "Measure a converted checkpoint's quality: perplexity of a text, or lm-eval's tasks.",
        (
            "python eval.py",
            "python eval.py --checkpoint_path checkpoints/OWNER/NAME/model_int4"
            " --text_file wiki.test.raw --json",
            "python eval.py --checkpoint_path checkpoints/OWNER/NAME/model_bf16"
            " --tasks arc_easy,piqa --limit 100",
        ),
    )
    parser.begin_group("usual options", "most users need no others")
    add_checkpoint_path(parser)
    text = "UTF-8 text; default with the embedded model: its held-out text"
    parser.add_path("--text_file", text, "FILE")
    window = f"tokens of a window; default: {DEFAULT_SEQ_LEN}, with --tasks the model's maximum"
    parser.add_number("--seq_len", window)
    parser.add_flag("--json", "print one JSON object instead of text")
    parser.begin_group("lm-eval", "tasks instead of a text (pip install 'moe-fast[eval]')")
    parser.add_argument("--tasks", metavar="NAME[,NAME]", help="names of lm-eval tasks")
    parser.add_path("--include_path", "folder of your own task files")
    parser.add_number("--limit", "only the first N documents of each task")
    parser.add_number("--num_fewshot", "examples in each prompt; default: the task's")
    add_hub_options(parser)
    parser.begin_group("precision", "number formats other than the checkpoint's")
    add_dtype(parser)
    add_kv_cache(parser)
    add_device_group(parser)
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for invalid options, those that exclude each other, and without lm-eval."""
    check_checkpoint_path(options)
    if options.tasks is None:
        for name in ("include_path", "limit", "num_fewshot"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} needs --tasks: name the tasks, or leave it out")
        if options.text_file is None and (options.checkpoint_path or options.model):
            raise ValueError("nothing to measure on: give --text_file FILE or --tasks NAME")
        return
    if options.text_file is not None:
        raise ValueError("--text_file does not go with --tasks: leave one of them out")
    if not all(options.tasks.split(",")):
        raise ValueError(f"--tasks {options.tasks!r}: give names with commas between them")
    check_counts(options, "limit")
    check_counts(options, "num_fewshot", least=0)
    folder = options.include_path
    if folder is not None and not folder.is_dir():
        fix = "give one that holds task files"
        raise ValueError(f"--include_path {folder}: no such folder: {fix}")
    require_extra("--tasks needs", "eval", "lm_eval")
