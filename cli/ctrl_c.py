"""Ctrl-C before main(). Each command imports this first: it imports next to nothing itself."""

import os
import signal

INTERRUPTED = 128  # exit code, plus the signal's number


def end_at_ctrl_c() -> None:
    """From here to main(), let Ctrl-C end the process: inside an import it prints a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)  # `termination_raises` restores it


def end_at_once(number: int, frame) -> None:
    """End the process, one line on stderr: a signal handler."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED + number)
