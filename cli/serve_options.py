"""serve.py's options."""

import argparse
import os
import re

from cli.generate_options import DRAFT_TOKENS, SPECULATE
from cli.options import (
    add_checkpoint_path,
    add_compile,
    add_dry_run,
    add_hub_options,
    add_model_options,
    add_offload,
    check_checkpoint_path,
    check_counts,
    check_dry_run,
    check_model_options,
)
from cli.parser import Parser
from cli.startup import require_extra

LOCAL_HOSTS = "127.0.0.1", "localhost", "::1"  # addresses that need no API key
MAX_BATCH = 64
# Answers decoded side by side. A CPU's step takes the same time for 1 as for 16.
DEFAULT_BATCH = {"cuda": 8, "cpu": 16}
PACKAGES = "starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance"


def build_parser() -> Parser:
    parser = Parser(
        "Serve a converted checkpoint by the APIs of OpenAI and Anthropic, with a chat page at /.",
        (
            "python serve.py --checkpoint_path checkpoints/OWNER/NAME/model_bf16 --compile",
            "python serve.py --checkpoint_path DIR --host 0.0.0.0 --max_queue 32",
            "python serve.py --checkpoint_path DIR --offload --gpu_memory 16GB",
        ),
    )
    add = parser.add_argument
    parser.begin_group("usual options", "most users need no others")
    add_checkpoint_path(parser)
    host = "address to listen on; addresses that others can reach need --api_key (127.0.0.1)"
    add("--host", default="127.0.0.1", help=host)
    add("--port", type=int, default=8000, help="port to listen on; 0: any free port (8000)")
    key = "key that clients must send; better as $MOE_FAST_API_KEY: ps shows options to all"
    add("--api_key", metavar="KEY", help=key)
    add_compile(parser)
    add_offload(parser)
    length = "maximum tokens of prompt and answer; default: the model's, or what memory holds"
    parser.add_number("--max_seq_len", length)
    batch = "answers decoded side by side (8; on a CPU 16; with --offload 1)"
    parser.add_number("--max_batch", batch)
    parser.begin_group("requests", "what the server accepts")
    queue = "queue length; when it is full, requests get status 429 (256)"
    parser.add_number("--max_queue", queue, 256)
    body = "largest request body (4 MiB)"
    add("--max_body", type=int, default=4 << 20, metavar="BYTES", help=body)
    limit = "maximum seconds from a request's arrival to its end (600)"
    add("--time_limit", type=float, default=600.0, metavar="S", help=limit)
    drain = "seconds that running answers have to end after SIGTERM (10)"
    add("--drain", type=float, default=10.0, metavar="S", help=drain)
    origin = "origin of web pages that may use the API, such as http://localhost:3000"
    add("--cors_origin", metavar="URL", help=origin)
    add_hub_options(parser)
    add_dry_run(parser)
    parser.begin_group("speculative decoding", "draft tokens while up to four answers are decoded")
    sources = (
        "lookup: draft from the text so far; mtp: by the model's head for multi-token prediction, "
        "with --max_batch 1; auto: by lookup, with --max_batch 1 by both, where that is measured "
        "to be faster; default: auto by lookup on one device, off with --offload, and if Inductor "
        "compiles a part of its passes"
    )
    add("--speculate", choices=SPECULATE, help=sources)
    drafts = f"drafts a pass, with auto at most; default: {DRAFT_TOKENS}"
    parser.add_number("--draft_tokens", drafts)
    add_model_options(parser)
    return parser


def default_batch(options: argparse.Namespace, device: str) -> int:
    """Return --max_batch, or what it is if it is not given. device: "cuda" or "cpu"."""
    is_single = options.offload or options.speculate == "mtp"
    return options.max_batch or (1 if is_single else DEFAULT_BATCH[device])


def check_options(options: argparse.Namespace) -> None:
    """Check options, and read $MOE_FAST_API_KEY.

    Raises ValueError for invalid combinations, and for missing packages.
    """
    check_model_options(options)
    check_dry_run(options)
    check_checkpoint_path(options)
    check_counts(options, "max_queue", "max_body", "max_seq_len")
    check_counts(options, "max_batch", most=MAX_BATCH)
    if options.offload and (options.max_batch or 1) > 1:
        raise ValueError(f"--max_batch {options.max_batch}: with --offload it must be 1")
    if options.speculate == "mtp" and (options.max_batch or 1) > 1:
        fix = "with --speculate mtp it must be 1, or give --speculate lookup"
        raise ValueError(f"--max_batch {options.max_batch}: {fix}")
    if options.draft_tokens is not None and options.speculate in (None, "off"):
        fix = "add --speculate auto, lookup or mtp"
        raise ValueError(f"--draft_tokens needs a source of drafts: {fix}")
    if options.cors_origin is not None:
        check_origin(options.cors_origin)
    if not 0 <= options.port < 65536:
        raise ValueError(f"--port {options.port}: it must be from 0 to 65535")
    if not options.time_limit > 0:
        raise ValueError(f"--time_limit {options.time_limit}: it must be above 0")
    if not 0 <= options.drain < float("inf"):
        raise ValueError(f"--drain {options.drain}: it must be 0 or more")
    if options.api_key is None:
        options.api_key = os.environ.get("MOE_FAST_API_KEY")
    key = options.api_key
    if key is not None:
        # A file's key may end in a new line, which a header cannot have.
        key = options.api_key = key.strip()
        if not (key and key.isascii() and key.isprintable()):
            raise ValueError("--api_key: it must be printable ASCII text, and not empty")
    if options.host not in LOCAL_HOSTS and key is None:
        raise ValueError(
            f"--host {options.host} can be reached by others: add --api_key, or listen on 127.0.0.1"
        )
    require_extra("a server needs", "serve", *PACKAGES)


def check_origin(text: str) -> None:
    """Raise ValueError unless a text is an origin as browsers send it."""
    if not re.fullmatch(r"https?://[^/\s*]+|\*", text):
        raise ValueError(
            f"--cors_origin {text!r:.80}: it must be as http://localhost:3000, without a path"
        )
