"""Log messages on stderr."""

import logging
import sys


def log_to_stderr() -> None:
    """Print this project's log messages to stderr, as they are."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("moe_fast")
    log.handlers = [handler]
    log.setLevel(logging.INFO)
