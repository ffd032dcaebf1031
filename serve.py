"""Serve a checkpoint by the APIs of OpenAI and Anthropic.

    python serve.py --checkpoint_path DIR --compile

The API is at http://127.0.0.1:8000/v1, a chat page at /. docs/server.md describes both.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import argparse
import errno
import logging
import socket
import sys
from functools import partial
from pathlib import Path

from cli.command import command
from cli.log import log_to_stderr
from cli.options import check_length, choose_compile
from cli.serve_options import build_parser, check_options, default_batch
from cli.startup import check_arguments
from host.before_imports import create_context, hash_ahead, keep_bytecode
from host.compile_helper import start_before_imports
from host.quick_imports import quicken
from hub.manage import read_model_ahead

if __name__ == "__main__":
    first = keep_bytecode, start_before_imports, create_context, quicken
    early = *first, hash_ahead, read_model_ahead
    check_arguments(build_parser, check_options, *early)

import torch

from checkpoint import Checkpoint
from generate import (
    OUT_OF_MEMORY,
    begin_compiling,
    check_clocks,
    check_speculation,
    find_source,
    open_model,
    open_session,
    print_plan,
    speculate,
)
from memory.card_plan import choose_format, settle
from memory.commands import plan_server, server_setup
from models import args_of_checkpoint
from parallel import process_group
from parallel.heartbeat import fail
from runtime.session import Session
from runtime.speculation import Speculation, passes_are_quick

log = logging.getLogger("moe_fast")


class Listener(socket.socket):
    """A bound TCP socket that listens once the model is loaded.

    Linux lets two sockets with SO_REUSEADDR have one address until one of them listens. Without
    SO_REUSEADDR a server could not start for a minute after another has ended. So `claim` takes a
    name that only one process can have: a second server is refused before it loads a model.
    """

    claimed: socket.socket | None = None

    def claim(self) -> None:
        """Take the name of this address until the socket is closed. Raises OSError."""
        host, port = self.getsockname()[:2]
        self.claimed = socket.socket(socket.AF_UNIX)
        if sys.platform == "linux":  # an abstract name: it is no file, and ends with the process
            self.claimed.bind(f"\0moe-fast {host} {port}")

    def close(self) -> None:
        if self.claimed:
            self.claimed.close()
        super().close()


def bind(host: str, port: int) -> Listener:
    """Return a socket bound to an address, not listening yet. Raises ValueError if it is taken."""
    bound = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        bound = Listener(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.claim()
    except (OSError, UnicodeError) as error:
        if bound:
            bound.close()
        number = getattr(error, "errno", None)
        reason = error.strerror if number is not None else "it is no host's name"
        name = "port" if number in (errno.EADDRINUSE, errno.EACCES) else "host"
        raise ValueError(
            f"cannot listen on {host} port {port} ({reason}): choose another --{name}"
        ) from None
    return bound


def bind_rank_0(options: argparse.Namespace) -> socket.socket | None:
    """Bind the socket on rank 0; return None on other ranks. Raises rank 0's error on all."""
    sockets = []
    process_group.share(lambda: sockets.append(bind(options.host, options.port)))
    return sockets[0] if sockets else None


def load(
    options: argparse.Namespace, device: torch.device
) -> tuple[Session, Speculation | None, Path]:
    """Return the session, its speculation and its checkpoint's directory.

    Lowers --max_batch to what fits, and sets `options.weights_format`. Raises ValueError for a
    --max_seq_len over the model's, a --max_batch that does not fit, and as `check_speculation` and
    `open_session`.
    """
    choose_format(options, device, lambda: find_source(options))
    checkpoint = open_model(options, device)
    begin_compiling(options, checkpoint, device)
    options.weights_format = checkpoint.format["name"]
    check_length(options, args_of_checkpoint(checkpoint).max_position)
    process_group.check_agreement(vars(options) | {"api_key": None}, checkpoint)
    given = options.max_batch
    options.max_batch = default_batch(options, device.type)
    check_clocks(options.speculate)
    check_speculation(options, checkpoint)
    settle(options, device, server_setup(options, checkpoint, given or 1))
    capacity = plan_server(options, checkpoint, device, given or 1)
    options.max_batch = min(options.max_batch, capacity.rows)
    if process_group.is_main():
        log.info(capacity.describe(options.max_batch))
    session = open_session(options, checkpoint, device, capacity.length, capacity.rows)
    return session, open_speculation(options, checkpoint, session), checkpoint.directory


def open_speculation(
    options: argparse.Namespace, checkpoint: Checkpoint, session: Session
) -> Speculation | None:
    """Return what drafts for up to four answers at a time; None: nothing does.

    By default nothing drafts on several ranks or with offloaded experts, as in generate.py, nor
    where the start would have to wait for the captures of passes.
    """
    drafts = passes_are_quick(session) and process_group.size() == 1 and not options.offload
    kind = options.speculate or ("auto" if drafts else "off")
    return None if kind == "off" else speculate(options, checkpoint, session, kind)


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
            f"a package of the server cannot be imported ({error}): pip install 'moe-fast[serve]'"
        ) from None
    device = process_group.start(options.device)
    check_options(options)
    choose_compile(options, device.type == "cuda" or bool(options.gpu))
    if options.dry_run:
        print_plan(options, device)
        process_group.stop()
        return 0
    listener = bind_rank_0(options)
    session, speculation, directory = load(options, device)
    on_ready = partial(print_address, listener)
    serve_session(session, directory, listener, options, on_ready, speculation)
    process_group.stop()
    return 0


@command(fail, out_of_memory=OUT_OF_MEMORY)
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
