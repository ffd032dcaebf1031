"""What the plotting scripts share: colors, a new figure, saving it, and their main()."""

import argparse
from collections.abc import Callable
from pathlib import Path

from cli.command import command
from cli.parser import Parser
from cli.script_options import check_picture

INK, GREY, ACCENT = "#1a1a1a", "#767676", "#0b5fa5"


def new_figure(size: tuple[float, float], dpi: int = 200):
    """Return an empty matplotlib figure of a size in inches. Raises ValueError without matplotlib.

    It has a canvas of its own, so no display is needed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install 'moe-fast[plot]'") from None
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure, path: Path) -> None:
    """Write a figure atomically, the same bytes every time. Raises ValueError if it cannot."""
    from matplotlib import rc_context

    format = path.suffix[1:]
    part = path.with_name(path.name + ".part")
    try:
        with rc_context({"svg.hashsalt": "moe-fast"}):
            figure.savefig(part, format=format, metadata={"Date": None} if format == "svg" else {})
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        why = f"{error.strerror}: give a file that can be written"
        raise ValueError(f"{path}: {why}") from None


def picture_command(
    build_parser: Callable[[], Parser], draw: Callable[[argparse.Namespace], object]
) -> Callable[[], int]:
    """Return a script's main(), which writes the figure that `draw` makes of its options."""

    @command()
    def main() -> int:
        """Run the command; a user's mistake is one line on stderr and exit code 2."""
        options = build_parser().parse_args()
        check_picture(options)
        save_figure(draw(options), options.output)
        print(options.output)
        return 0

    return main
