"""How an answer is printed in a terminal: its reasoning folded, its calls on lines of their own."""

import sys
from collections.abc import Callable
from typing import Any

from cli.command import for_stream, printable
from cli.report import in_tokens

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
AGAIN = "\r\x1b[K"  # to the beginning of the line, which it clears


class AnswerPrinter:
    """Prints an answer piece by piece.

    show: `print`, or what takes its arguments. reader: of calls, a
    `tool_calls.reading.CallReader`; None: without tools. Afterwards `text`, `reasoned` and `calls`
    are the answer's, the calls as in OpenAI's API.
    """

    def __init__(self, show: Callable[..., None], reader: Any = None):
        self.show, self.parser = show, reader.parser() if reader else None
        self.text, self.reasoned, self.calls = "", "", []
        self.pieces, self.folded = 0, False
        self.dims = sys.stdout is not None and sys.stdout.isatty()

    def reasoning(self, piece: str) -> None:
        """Take a piece of reasoning, a token: count it in one line that is written again."""
        self.reasoned += piece
        self.pieces += 1
        self.folded = False
        if self.dims:
            # Each piece for itself, so that Ctrl-C leaves no dimmed terminal.
            count = in_tokens(self.pieces)
            self.show(f"{AGAIN}{DIM}reasoning, {count} ...{NORMAL}", end="", flush=True)

    def fold(self) -> None:
        """End the line of the reasoning."""
        if self.folded or not self.reasoned:
            return
        self.folded = True
        line = f"reasoning, {in_tokens(self.pieces)}: /reasoning shows it"
        if self.dims:
            self.show(f"{AGAIN}{DIM}{line}{NORMAL}")
        else:
            self.show(line, file=sys.stderr, flush=True)

    def answer(self, piece: str) -> None:
        """Take new text of the answer."""
        if not self.parser:
            self.add_text(piece)
            return
        for found in self.parser.push(piece):
            self.add_piece(found)

    def end(self, is_cut: bool) -> None:
        """End the answer. is_cut: a limit has ended it, or Ctrl-C."""
        for found in self.parser.flush(is_cut) if self.parser else ():
            self.add_piece(found)
        self.fold()

    def add_piece(self, piece: Any) -> None:
        """Take a TextPiece or a CallPiece of tool_calls/parser.py."""
        if not hasattr(piece, "arguments"):
            (self.reasoning if piece.is_reasoning else self.add_text)(piece.text)
            return
        self.fold()
        if piece.name is not None:
            function = {"name": piece.name, "arguments": ""}
            self.calls.append({"id": piece.id, "type": "function", "function": function})
            begin = "\n" if self.text or len(self.calls) > 1 else ""
            self.show(f"{begin}call {printable(piece.name)} ", end="", flush=True)
        self.calls[-1]["function"]["arguments"] += piece.arguments
        self.show(for_stream(piece.arguments, sys.stdout), end="", flush=True)

    def add_text(self, piece: str) -> None:
        if piece:
            self.fold()
        self.text += piece
        self.show(for_stream(piece, sys.stdout), end="", flush=True)
