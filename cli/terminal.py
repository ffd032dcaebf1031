"""Reading a chat's messages: line editing, history, several lines, Ctrl-C."""

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cli.command import Terminated
from cli.prompts import MAX_STDIN, check_size
from host.folders import user_state

try:
    import readline
except ImportError:  # some builds of Python lack it: lines cannot be edited then
    readline = None  # type: ignore[assignment]

MAX_HISTORY = 1000  # lines
LINE_BYTES = 64  # of memory that an empty line takes
PROMPT, CONTINUED = "> ", ". "
BLOCK = '"""'

log = logging.getLogger("moe_fast")


@contextmanager
def ctrl_c_flag() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C only makes the yielded function return True."""
    pressed = []
    previous = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)


def read_messages(commands: Sequence[str] = ()) -> Iterator[str]:
    r'''Yield what the user types, until the end of the input. Ctrl-C drops a message.

    A line that ends in a backslash goes on in the next one. Lines between """ and """ are one
    message. commands: completed by Tab.
    '''
    reader = LineReader(commands)
    while True:
        try:
            message = read_message(reader.read)
        except Terminated:
            raise
        except KeyboardInterrupt:
            print("  (/exit ends)", file=sys.stderr)
            continue
        if message is None:
            return
        if message.strip():
            yield message


def edit_text(text: str | None) -> str | None:
    """Let the user change a text; return it, or None.

    A line is changed where it is typed, several lines in $VISUAL or $EDITOR. Raises ValueError if
    neither is possible.
    """
    if text is None:
        print("there is no message to change", file=sys.stderr)
        return None
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if "\n" in text and editor:
        return edit_in(editor, text)
    if "\n" in text:
        raise ValueError("the message has several lines: set EDITOR, or give /edit TEXT")
    if readline is None or not sys.stdin.isatty():
        raise ValueError("lines cannot be changed here: give /edit TEXT")
    readline.set_startup_hook(lambda: readline.insert_text(text))
    try:
        return input(PROMPT)
    except Terminated:
        raise
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None
    finally:
        readline.set_startup_hook(None)


def edit_in(editor: str, text: str) -> str:
    """Return a text after it was changed in an editor. Raises ValueError if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "message.txt"
        path.write_text(text, "utf-8", "surrogateescape")
        try:
            subprocess.run([*shlex.split(editor), str(path)], check=True)
            return path.read_text("utf-8-sig").rstrip("\n")
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            why = getattr(error, "strerror", None) or "it failed"
            raise ValueError(f"{editor}: {why}: set EDITOR, or give /edit TEXT") from None


def read_message(read: Callable[[str], str | None]) -> str | None:
    """Return one message, of several lines if the user says so; None at the end of the input.

    read: returns a line for a prompt, without its newline, or None. Raises ValueError for a message
    of more than MAX_STDIN characters: standard input may never end.
    """
    line = read(PROMPT)
    if line is None:
        return None
    lines, read = [line], limited(read)
    if line.startswith(BLOCK):
        lines[0] = line.removeprefix(BLOCK)
        while not lines[-1].rstrip().endswith(BLOCK) and (line := read(CONTINUED)) is not None:
            lines.append(line)
        return "\n".join(lines).rstrip().removesuffix(BLOCK).strip("\n")
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        if (line := read(CONTINUED)) is not None:
            lines.append(line)
    return "\n".join(lines)


def limited(read: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Return a `read` of `read_message` that raises ValueError after MAX_STDIN characters."""
    size = 0

    def read_more(prompt: str) -> str | None:
        nonlocal size
        line = read(prompt)
        size += len(line or "") + LINE_BYTES
        check_size(size)
        return line

    return read_more


class LineReader:
    """Reads lines from stdin; on a terminal with line editing, and a history kept in a file."""

    def __init__(self, commands: Sequence[str]):
        streams = sys.stdin, sys.stdout
        terminal = all(stream is not None and stream.isatty() for stream in streams)
        self.edits = terminal and readline is not None
        self.history: Path | None = None
        if self.edits:
            self.commands = commands
            readline.set_completer(self.complete)
            readline.set_completer_delims(" \n")
            readline.parse_and_bind("tab: complete")
            readline.set_history_length(MAX_HISTORY)
            self.open_history()

    def open_history(self) -> None:
        """Read the history of earlier chats. Without a folder for it, log why."""
        try:
            path = user_state() / "chat_history"
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            readline.read_history_file(path)
            self.history = path
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            log.warning(f"the chat's history is not kept ({why}): set XDG_STATE_HOME")

    def complete(self, text: str, number: int) -> str | None:
        """Return the number-th command that begins with a text."""
        found = [name for name in self.commands if name.startswith(text)] if text else []
        return found[number] if number < len(found) else None

    def read(self, prompt: str) -> str | None:
        """Return a line without its newline; None at the end of the input."""
        if not self.edits:
            # stdout has the answers alone.
            print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline(MAX_STDIN + 1) if sys.stdin else ""
            check_size(len(line))
            # Windows' programs begin with a BOM, and end lines with a carriage return, too.
            text = line.removesuffix("\n").removesuffix("\r").removeprefix("\ufeff")
            return text if line else None
        try:
            line = input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return None
        except UnicodeDecodeError:
            return ""
        if self.history:
            with contextlib.suppress(OSError):
                readline.write_history_file(self.history)
        return line
