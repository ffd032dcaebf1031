"""Log messages on stderr."""

import logging
import sys

from cli.command import escaped


class EscapingFormatter(logging.Formatter):
    """Formats a message as it is, with its control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


def log_to_stderr() -> None:
    """Print this project's log messages to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EscapingFormatter("%(message)s"))
    log = logging.getLogger("moe_fast")
    log.handlers = [handler]
    log.setLevel(logging.INFO)
