"""Serve a checkpoint by OpenAI's API: `python serve.py --checkpoint_path DIR --compile`.

The API is at http://127.0.0.1:8000/v1, a chat page at /. docs/server.md describes both.
"""

import argparse
import logging
import os
import re
import socket
import sys
from functools import partial
from pathlib import Path

import torch

import tp
from checkpoint import Checkpoint
from cli.command import command
from cli.log import log_to_stderr
from cli.options import (
    DEFAULT_CHAT_LENGTH,
    add_model_options,
    check_counts,
    check_model_options,
)
from cli.parser import Parser
from formats.kv_cache import KV_CACHES
from formats.quantizer import DTYPES
from generate import open_checkpoint, open_session, stored_dtype
from models import args_of_checkpoint
from offload.capacity import Capacity, free_host_memory, plan_capacity
from offload.plan import cache_bytes, free_gpu_memory, weight_bytes
from ops.attention import BLOCK
from parallel import process_group
from parallel.heartbeat import fail
from runtime.session import Session
from server import LOCAL_HOSTS

# Answers decoded side by side. A CPU's step takes the same time for 1 as for 16.
DEFAULT_BATCH, MAX_BATCH = {"cuda": 8, "cpu": 16}, 64
log = logging.getLogger("moe_fast")


def build_parser() -> Parser:
    parser = Parser(
        "Serve a converted checkpoint by OpenAI's API, with a chat page at /.",
        (
            "python serve.py --checkpoint_path checkpoints/OWNER/NAME/model_bf16 --compile",
            "python serve.py --checkpoint_path DIR --host 0.0.0.0 --max_queue 32",
            "python serve.py --checkpoint_path DIR --offload --gpu_memory 16GB --prefetch 2",
        ),
    )
    add = parser.add_argument
    add("--checkpoint_path", type=Path, metavar="DIR", help="default: the embedded tiny model")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; addresses that others can reach need --api_key (127.0.0.1)",
    )
    add("--port", type=int, default=8000, help="port to listen on; 0: any free port (8000)")
    add(
        "--api_key",
        metavar="KEY",
        help="key that clients must send; better as $MOE_FAST_API_KEY: ps shows options to all",
    )
    add(
        "--max_batch",
        type=int,
        metavar="N",
        help="answers decoded side by side (8; on a CPU 16; with --offload 1)",
    )
    add(
        "--max_queue",
        type=int,
        default=256,
        metavar="N",
        help="queue length; when it is full, requests get status 429 (256)",
    )
    add(
        "--max_body",
        type=int,
        default=4 << 20,
        metavar="BYTES",
        help="largest request body (4 MiB)",
    )
    add(
        "--cors_origin",
        metavar="URL",
        help="origin of web pages that may use the API, such as http://localhost:3000",
    )
    add(
        "--time_limit",
        type=float,
        default=600.0,
        metavar="S",
        help="maximum seconds from a request's arrival to its end (600)",
    )
    add(
        "--max_seq_len",
        type=int,
        metavar="N",
        help="maximum tokens of prompt and answer; default: the model's, or what memory holds",
    )
    add_model_options(parser)
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Check options and read $MOE_FAST_API_KEY. Raises ValueError for invalid combinations."""
    check_model_options(options)
    check_counts(options, "max_queue", "max_body", "max_seq_len")
    check_counts(options, "max_batch", most=MAX_BATCH)
    if options.offload and (options.max_batch or 1) > 1:
        raise ValueError(f"--max_batch {options.max_batch}: with --offload it must be 1")
    if options.cors_origin is not None:
        check_origin(options.cors_origin)
    if not 0 <= options.port < 65536:
        raise ValueError(f"--port {options.port}: it must be from 0 to 65535")
    if not options.time_limit > 0:
        raise ValueError(f"--time_limit {options.time_limit}: it must be above 0")
    if options.api_key is None:
        options.api_key = os.environ.get("MOE_FAST_API_KEY")
    key = options.api_key
    if key is not None and (not key.isascii() or not key.strip()):
        raise ValueError("--api_key: it must be ASCII text, and not empty")
    if options.host not in LOCAL_HOSTS and key is None:
        raise ValueError(
            f"--host {options.host} can be reached by others: add --api_key, or listen on 127.0.0.1"
        )


def check_origin(text: str) -> None:
    """Raise ValueError unless a text is an origin as browsers send it."""
    if not re.fullmatch(r"https?://[^/\s*]+|\*", text):
        raise ValueError(
            f"--cors_origin {text!r:.80}: it must be as http://localhost:3000, without a path"
        )


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, not listening yet. Raises ValueError if it is taken."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another --port"
        ) from None
    return bound


def bind_rank_0(options: argparse.Namespace) -> socket.socket | None:
    """Bind the socket on rank 0; return None on other ranks. Raises rank 0's error on all."""
    sockets = []
    process_group.share(lambda: sockets.append(bind(options.host, options.port)))
    return sockets[0] if sockets else None


def load(options: argparse.Namespace, device: torch.device) -> tuple[Session, Path]:
    """Return the session and its checkpoint's directory. Lowers --max_batch to what fits.

    Raises ValueError for a --max_seq_len over the model's, a --max_batch that does not fit, and as
    `open_session`.
    """
    checkpoint = open_checkpoint(options.checkpoint_path)
    max_position = args_of_checkpoint(checkpoint).max_position
    if (options.max_seq_len or 0) > max_position:
        raise ValueError(
            f"--max_seq_len {options.max_seq_len}: the model was made for {max_position} positions"
        )
    process_group.check_agreement(vars(options) | {"api_key": None}, checkpoint)
    given = options.max_batch
    if given is None:
        options.max_batch = 1 if options.offload else DEFAULT_BATCH[device.type]
    capacity = process_group.share(lambda: plan(options, checkpoint, device))
    if capacity.rows < (given or 1):
        raise ValueError(
            f"--max_batch {given}: {capacity.rows} sequences of {capacity.length} tokens fit; "
            "lower it, or --max_seq_len"
        )
    options.max_batch = min(options.max_batch, capacity.rows)
    if process_group.is_main():
        log.info(capacity.describe(options.max_batch))
    session = open_session(options, checkpoint, device, capacity.length, capacity.rows)
    return session, checkpoint.directory


def plan(options: argparse.Namespace, checkpoint: Checkpoint, device: torch.device) -> Capacity:
    """Return the size of a session for serve.py's options. Raises ValueError if nothing fits."""
    args = args_of_checkpoint(checkpoint)
    dtype = DTYPES.get(options.dtype) or stored_dtype(checkpoint)
    model = tp.ModelShard(args, checkpoint.format, options.parallel).model
    cache_class, length = KV_CACHES[options.kv_cache], options.max_seq_len
    if options.offload:  # the expert cache takes what one sequence leaves
        length = length or min(args.max_position, DEFAULT_CHAT_LENGTH)
        return Capacity(length, 1, cache_bytes(model, 1, length + BLOCK, cache_class, dtype))
    if device.type == "cuda":
        free = free_gpu_memory(device) - weight_bytes(model, dtype)
    else:
        free = free_host_memory() // (2 * process_group.size()) - weight_bytes(model, dtype)
    return plan_capacity(model, cache_class, dtype, free, options.max_batch, length)


def print_address(listener: socket.socket, name: str) -> None:
    """Print the URLs of the API and of the chat page."""
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"serving {name} on {url}/v1, the chat page on {url}/", file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> int:
    """Load the model and serve it until Ctrl-C. Raises ValueError for a user's mistake."""
    try:
        from server.app import serve_session
    except ImportError as error:
        raise ValueError(
            f"a server needs FastAPI and uvicorn ({error}): pip install 'moe-fast[serve]'"
        ) from None
    device = process_group.start(options.device)
    check_options(options)
    listener = bind_rank_0(options)
    session, directory = load(options, device)
    serve_session(session, directory, listener, options, partial(print_address, listener))
    process_group.stop()
    return 0


@command(fail, out_of_memory="shorten --max_seq_len")
def main() -> int:
    """Run the command until Ctrl-C or SIGTERM. A user's mistake is one line and exit code 2."""
    options = build_parser().parse_args()
    log_to_stderr()
    try:
        return run(options)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
