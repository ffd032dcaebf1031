"""generate.py's own options: prompts, lengths, sampling, drafts."""

import argparse
import os
from pathlib import Path

from cli.model_name import MODEL_NAME
from cli.options import (
    DEFAULT_CHAT_LENGTH,
    add_checkpoint_path,
    add_compile,
    add_dry_run,
    add_hub_options,
    add_model_options,
    add_offload,
    check_checkpoint_path,
    check_counts,
    check_dry_run,
    check_files,
    check_length,
    check_model_options,
    model_name,
)
from cli.parser import Parser
from cli.prompts import check_unicode

DEFAULT_PROMPT = "def read_lines(path):"
DEFAULT_NEW_TOKENS = 200
DRAFT_TOKENS = 4
DRAFT_VOCAB = 32_768
SPECULATE = "auto", "lookup", "mtp", "off"
MAX_SAMPLES = 100_000
SAMPLING = {  # option: default
    "temperature": 0.8,
    "top_k": 200,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
}


def build_parser() -> Parser:
    parser = Parser(
        "Generate text from a converted Mixture-of-Experts checkpoint.",
        (
            "python generate.py --prompt 'def read_lines(path):' --temperature 0.6 --seed 1",
            "python generate.py --checkpoint_path checkpoints/OWNER/NAME/model_bf16 --interactive"
            " --compile",
            "python generate.py --checkpoint_path DIR --offload --gpu_memory 16GB"
            " --prompts_file prompts.txt --json",
            "torchrun --standalone --nproc_per_node=4 generate.py --checkpoint_path DIR"
            " --prompt 'Hello' --compile",
        ),
    )
    parser.begin_group("usual options", "most users need no others")
    add_usual_options(parser)
    parser.begin_group("prompts and lengths", "what is continued, and where it ends")
    add_prompt_options(parser)
    parser.begin_group("sampling", "how the next token is chosen, besides --temperature")
    for name in SAMPLING:
        if name != "temperature":
            add_sampling_option(parser, name)
    add_hub_options(parser)
    add_disk_options(parser)
    add_dry_run(parser)
    parser.begin_group("speculative decoding", "draft tokens, and verify several in one pass")
    sources = (
        "lookup: draft from the text so far; mtp: by the model's head for multi-token prediction; "
        "auto: by both where that is measured to be faster; default: auto without the head, in a "
        "chat or for one sequence that is not compiled, on one device, without --offload"
    )
    parser.add_argument("--speculate", choices=SPECULATE, help=sources)
    parser.add_path("--draft_checkpoint_path", "draft with this smaller model")
    parser.add_number(
        "--draft_tokens", f"drafts a pass, with auto at most; default: {DRAFT_TOKENS}"
    )
    vocab = (
        f"most frequent tokens that a draft model or a head chooses among; default: {DRAFT_VOCAB}"
    )
    parser.add_number("--draft_vocab", vocab)
    add_model_options(parser)
    parser.begin_group("analysis", "where the time goes, and which experts the router chose")
    trace = "write a trace of the generation for chrome://tracing"
    parser.add_path("--profile", trace, "FILE")
    routing = "write each new token's experts and weights as JSON; the chat page opens it"
    parser.add_path("--save_routing", routing, "FILE")
    return parser


def add_usual_options(parser: Parser) -> None:
    """Add the options that most users need, and no more than ten."""
    add = parser.add_argument
    add_checkpoint_path(parser)
    prompt = "text to continue, '-' reads stdin; repeatable"
    add("--prompt", action="append", default=[], metavar="TEXT", help=prompt)
    parser.add_flag("--interactive", "chat; /help lists its commands, Ctrl-C stops an answer")
    system = "system message; prompts then go through the model's chat template"
    add("--system", metavar="TEXT", help=system)
    new = "default: 200, or fewer if --max_seq_len is short"
    parser.add_number("--max_new_tokens", new)
    add_sampling_option(parser, "temperature")
    add_compile(parser)
    add_offload(parser)
    parser.add_flag("--json", "print one JSON object instead of the text")


def add_disk_options(parser: Parser) -> None:
    """Add a group of what is done with models on disk instead of generating text."""
    parser.begin_group("models on disk", "what is done instead of generating text")
    parser.add_flag("--list", "list the models on disk with family, format and size")
    remove = "remove a model from the disk, or one format of it; asks first"
    parser.add_argument("--remove", type=model_name, metavar=MODEL_NAME, help=remove)
    parser.add_flag("--yes", "remove without asking")
    prepare = "download and convert --model, print its directory, and end; --compile: compile, too"
    parser.add_flag("--prepare_only", prepare)


def add_prompt_options(parser: Parser) -> None:
    """Add files of prompts, and where their continuations end."""
    lines = "one prompt a line; in a .jsonl a string or {'prompt': ...}"
    parser.add_path("--prompts_file", lines, "FILE")
    parser.add_number("--batch_size", "most prompts and samples continued at once (8)", 8)
    parser.add_number("--num_samples", "samples of each prompt (1)", 1)
    stop = "end before this text; may be repeated"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    parser.add_flag("--ignore_eos", "do not end at the end-of-text token")
    parser.add_number("--max_seq_len", "cache length; default: prompt and new tokens")


def add_sampling_option(parser: Parser, name: str) -> None:
    """Add one of SAMPLING."""
    helps = {
        "temperature": "0 is greedy",
        "top_k": "choose among this many of the likeliest tokens",
        "top_p": "choose among the likeliest tokens with this total probability",
        "min_p": "leave out tokens below this share of the likeliest one's probability",
        "repetition_penalty": "above 1 makes tokens of the text less likely",
        "seed": "same seed, same text",
    }
    kind, metavar = (int, "N") if name in ("top_k", "seed") else (float, "X")
    default = SAMPLING[name]
    shown = "" if default is None else f" ({default})"
    parser.add_argument(
        f"--{name}", type=kind, metavar=metavar, default=default, help=helps[name] + shown
    )


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for invalid options, and for options that exclude each other."""
    check_model_options(options)
    check_dry_run(options)
    check_checkpoint_path(options)
    check_disk_options(options)
    check_counts(options, "max_new_tokens", "max_seq_len")
    check_counts(options, "num_samples", "batch_size", most=MAX_SAMPLES)
    check_files(options, "prompts_file", "expert_profile", "profile", "save_routing")
    for name in ("profile", "save_routing"):
        path = getattr(options, name)
        if path and not is_writable(path):  # before hours of work
            fix = "it must be a file in a folder that is there, and can be written"
            raise ValueError(f"--{name} {path}: {fix}")
    check_unicode(options.system or "", "--system")
    check_drafts(options)
    drafts = options.draft_checkpoint_path or options.speculate not in (None, "off")
    if options.save_routing and drafts:
        why = "--save_routing needs plain steps, one token each"
        raise ValueError(f"{why}: leave the options of speculative decoding out")
    for name in ("prompt", "prompts_file", "json", "save_routing"):
        if options.interactive and getattr(options, name):
            raise ValueError(f"--{name} does not go with --interactive: leave one of them out")


def check_drafts(options: argparse.Namespace) -> None:
    """Raise ValueError for options of speculation that exclude each other, or need another."""
    kind, draft = options.speculate, options.draft_checkpoint_path
    if draft and kind not in (None, "auto"):
        names = f"--speculate {kind} and --draft_checkpoint_path"
        raise ValueError(f"{names} do not go together: leave one of them out")
    if options.draft_tokens is not None and not draft and kind in (None, "off"):
        fix = "add --speculate auto, lookup or mtp, or --draft_checkpoint_path"
        raise ValueError(f"--draft_tokens needs a source of drafts: {fix}")
    check_counts(options, "draft_vocab")
    if options.draft_vocab is not None and not draft and kind not in ("auto", "mtp"):
        fix = "add --draft_checkpoint_path or --speculate mtp, or leave it out"
        raise ValueError(f"--draft_vocab needs a model or a head that drafts: {fix}")


def check_disk_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options about models on disk that lack what they need, or have --json.

    A plan has no JSON either, and is of no use to --list and --remove.
    """
    if options.yes and not options.remove:
        raise ValueError("--yes answers --remove: add --remove NAME, or leave --yes out")
    if options.prepare_only and not options.model:
        raise ValueError("--prepare_only needs a model: add --model OWNER/NAME")
    if options.list and options.remove:
        raise ValueError("--list and --remove are two commands: leave one of them out")
    if options.dry_run and (options.list or options.remove):
        name = "list" if options.list else "remove"
        raise ValueError(f"--dry_run prints a plan, and --{name} has none: leave one of them out")
    for name in ("dry_run", "prepare_only", "list"):
        if options.json and getattr(options, name):
            raise ValueError(f"--json is about an answer, and --{name} has none: leave it out")


def is_writable(path: Path) -> bool:
    """Return whether a path is a file that may be written, or free for one.

    The profiler replaces whatever is there, devices too, and cannot write a name with a newline.
    """
    if not path.name.isprintable():
        return False
    if os.path.lexists(path):  # a link to nothing, too
        return path.is_file() and os.access(path, os.W_OK)
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return False
    return len(os.fsencode(path.name)) <= os.pathconf(folder, "PC_NAME_MAX")


def plan_lengths(longest: int, options: argparse.Namespace, max_position: int) -> int:
    """Set --max_new_tokens if it is not given; return the session's length.

    longest: tokens of the longest prompt. max_position: the model's limit. Raises ValueError if
    prompt and answer do not fit.
    """
    given = options.max_seq_len
    limit, owner = given or max_position, "--max_seq_len" if given else "the model's"
    check_length(options, max_position)
    if options.interactive:
        options.max_new_tokens = options.max_new_tokens or DEFAULT_NEW_TOKENS
        return min(limit, given or DEFAULT_CHAT_LENGTH)
    left = max(0, limit - longest)
    if options.max_new_tokens is None:
        options.max_new_tokens = min(DEFAULT_NEW_TOKENS, left) or DEFAULT_NEW_TOKENS
    if options.max_new_tokens > left:
        cause = f"{longest} prompt tokens and {options.max_new_tokens} new ones exceed {owner}"
        fix = f"shorten the prompt or ask for at most {left} with --max_new_tokens"
        if not left:
            shorter = f"shorten the prompt to less than {limit} tokens"
            fix = f"raise it above {longest}" if given else shorter
        raise ValueError(f"{cause} {limit} positions: {fix}")
    return given or longest + options.max_new_tokens
