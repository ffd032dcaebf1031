"""The argument parser of every command: a user's mistake is one line with the fix."""

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cli.command import printable

OPTION = re.compile(r"--?[A-Za-z][^\s=]*")  # an argument of this form is meant as an option


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with one-line errors, no abbreviated options, and examples in its help.

    examples: command lines that this parser accepts.
    """

    _group: argparse._ArgumentGroup | None = None

    def __init__(self, description: str, examples: Sequence[str], **settings):
        super().__init__(description=description, allow_abbrev=False, **settings)
        self.examples = tuple(examples)

    def begin_group(self, title: str, help: str) -> None:
        """List the options added from here on under a title, and a line of help."""
        self._group = self.add_argument_group(title, help)

    def add_argument(self, *names, **settings) -> argparse.Action:
        add = super().add_argument if self._group is None else self._group.add_argument
        return add(*names, **settings)

    def add_flag(self, name: str, help: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=help)

    def add_number(self, name: str, help: str | None = None, default: int | None = None) -> None:
        """Add an option that takes an integer."""
        self.add_argument(name, type=int, default=default, metavar="N", help=help)

    def add_path(self, name: str, help: str, metavar: str = "DIR") -> None:
        """Add an option that takes a path."""
        self.add_argument(name, type=Path, metavar=metavar, help=help)

    def format_help(self) -> str:
        if self.usage is None:  # argparse's own lists all options, longer than a screen
            required = [action for action in self._actions if action.required]
            names = [" ".join((*a.option_strings, a.metavar or a.dest)) for a in required]
            self.usage = " ".join(("%(prog)s", *names, "[options]"))
        lines = (f"{super().format_help()}\nexamples:", *(f"  {line}" for line in self.examples))
        return "\n".join((*lines, ""))

    def parse_args(self, args=None, namespace=None):
        """Parse. Report an unknown option before a missing one: it may be its misspelling."""
        arguments = sys.argv[1:] if args is None else list(args)
        options_end = arguments.index("--") if "--" in arguments else len(arguments)
        self._refuse_unknown(arguments[:options_end])
        return super().parse_args(arguments, namespace)

    def _refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Exit with an error that names the closest option if one is unknown."""
        known = self._option_string_actions
        for previous, argument in zip(["", *arguments], arguments, strict=False):
            name = argument.partition("=")[0]
            if not OPTION.fullmatch(name) or " " in argument or name in known:
                continue
            close = [option for option in known if len(name) > 2 and option.startswith(name)]
            if close := close or difflib.get_close_matches(name, known, 1):
                self.error(f"unrecognized option {name}; did you mean {close[0]}?")
            if previous in known and known[previous].nargs != 0:
                fix = f"write a value that begins with a dash as {previous}={argument}"
                self.error(f"{previous} {argument}: {fix}")
            self.error(f"unrecognized option {name}; {self.prog} --help lists them")

    def _check_value(self, action: argparse.Action, value) -> None:
        """Exit with an error that lists the choices; argparse's own message quotes each of them."""
        if action.choices is not None and value not in action.choices:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            self.error(f"{name} {value}: it must be one of {', '.join(map(str, action.choices))}")

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr and exit with code 2. argparse's own messages lack the fix."""
        line = " ".join(message.removeprefix("argument ").split())
        starts = ("argument ", "the following arguments", "unrecognized arguments")
        hint = f"; {self.prog} --help has examples" if message.startswith(starts) else ""
        self.exit(2, f"error: {printable(line)}{hint}\n")
