"""What every command has in common: how options are read, and how a mistake among them is told."""

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

OPTION = re.compile(r"--?[A-Za-z][^\s=]*")  # what begins so is meant as one


class Parser(argparse.ArgumentParser):
    """argparse's, but a mistake is one line that says what would do, no option may be cut short, and the help ends
    with examples: command lines that this parser takes."""

    def __init__(self, description: str, examples: Sequence[str], **settings):
        super().__init__(description=description, allow_abbrev=False, **settings)
        self.examples = tuple(examples)

    def format_help(self) -> str:
        return "\n".join((f"{super().format_help()}\nexamples:", *(f"  {line}" for line in self.examples), ""))

    def parse_args(self, args=None, namespace=None):
        """As argparse's, but an unknown option is told of before one that is missing: they may be the same."""
        words = sys.argv[1:] if args is None else list(args)
        self._find_unknown(words[: words.index("--")] if "--" in words else words)
        return super().parse_args(words, namespace)

    def _find_unknown(self, words: Sequence[str]) -> None:
        known = self._option_string_actions
        for before, word in zip(["", *words], words, strict=False):
            name = word.partition("=")[0]
            if not OPTION.fullmatch(name) or " " in word or name in known:
                continue
            near = [option for option in known if len(name) > 2 and option.startswith(name)]
            if near := near or difflib.get_close_matches(name, known, 1):
                self.error(f"unrecognized option {name}; did you mean {near[0]}?")
            if before in known and known[before].nargs != 0:
                self.error(f"{before} {word}: write a value that begins with a dash as {before}={word}")
            self.error(f"unrecognized option {name}; {self.prog} --help lists them")

    def _check_value(self, action: argparse.Action, value) -> None:
        if action.choices is not None and value not in action.choices:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            self.error(f"{name} {value}: it must be one of {', '.join(map(str, action.choices))}")

    def error(self, message: str) -> NoReturn:
        """One line on stderr, and exit code 2. What argparse itself has to say lacks the fix: examples show it."""
        told = " ".join(message.removeprefix("argument ").split())
        theirs = message.startswith(("argument ", "the following arguments", "unrecognized arguments"))
        self.exit(2, f"error: {told:.500}{f'; {self.prog} --help has examples' if theirs else ''}\n")
