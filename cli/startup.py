"""What a script does before it imports torch, which takes seconds.

Each script with slow imports begins with

    from cli.NAME_options import build_parser
    from cli.startup import check_arguments

    if __name__ == "__main__":
        check_arguments(build_parser)

    import torch

So --help, a wrong argument and a missing package are answered in a tenth of a second, and Ctrl-C
during the imports is one line. main() parses again, so a script works without this, too.
"""

import argparse
import gc
import importlib.util
import os
import sys
from collections.abc import Callable

from cli.command import command
from cli.ctrl_c import end_at_ctrl_c
from cli.parser import Parser

Check = Callable[[argparse.Namespace], None]


def check_arguments(build_parser: Callable[[], Parser], *checks: Check) -> None:
    """Exit after --help and for wrong arguments; from here to main(), let Ctrl-C end the process.

    To main(), too, no garbage is collected: imports make half a million objects that stay, and to
    search them again and again takes a tenth of the time.

    checks: raise ValueError for options that are invalid or lack a package. Under torchrun they are
    left to main(), which has one rank print what all ranks find.
    """

    @command()
    def check() -> int:
        options = build_parser().parse_args()
        for refuse in () if "RANK" in os.environ else checks:
            refuse(options)
        return 0

    if code := check():
        sys.exit(code)
    end_at_ctrl_c()
    gc.disable()  # `cli.command.command` enables it


def require_extra(reason: str, extra: str, *packages: str) -> None:
    """Raise ValueError, with pip's command, unless packages are installed.

    reason: up to the verb, such as "a picture needs"; the missing packages follow. Nothing is
    imported: an extra that is missing is found before a model is loaded.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing).replace("_", "-")
        raise ValueError(f"{reason} {names}: pip install 'moe-fast[{extra}]'")
