"""Draw what drafts give: tokens/s by acceptance, as benchmarks/speculation.py measured passes.

    python scripts/plot_speculation.py docs/speculation.json --output docs/speculation.svg

RESULT is what `benchmarks/speculation.py --json` writes. A panel is a source of drafts, a line a
number of drafts; the line without drafts is plain decoding. Acceptance is that of each draft after
those before it.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import json
import math
import sys
from pathlib import Path

from benchmarks.expectation import expected_tokens
from benchmarks.pictures import new_figure, picture_command
from cli.parser import Parser
from cli.script_options import add_picture

ACCEPTANCE = [n / 50 for n in range(20, 51)]
MOST_DRAFTS = 1000  # passes have fewer
SHADES = "#1a1a1a", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b", "#041c3d"


def read_result(path: Path) -> dict:
    """Return a result. Raises ValueError unless `benchmarks/speculation.py --json` made it."""
    advice = "give a file that benchmarks/speculation.py --json made"
    try:
        result = json.loads(path.read_text())
        passes = {
            source: {int(row["drafts"]): float(row["ms"]) for row in rows}
            for source, rows in result["passes"].items()
        }
        texts = {text: str(result[text]) for text in ("arch", "mode", "gpu")}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: {advice}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not such a result: {advice}") from None
    times = [ms for rows in passes.values() for ms in rows.values()]
    if not times or not all(0 < ms < math.inf for ms in times):
        raise ValueError(f"{path} has no times: {advice}")
    if not all(0 <= drafts <= MOST_DRAFTS for rows in passes.values() for drafts in rows):
        raise ValueError(f"{path} has passes of absurdly many drafts: {advice}")
    return texts | {"passes": passes}


def draw(result: dict):
    """Return the figure. Raises ValueError without matplotlib."""
    sources = result["passes"]
    figure = new_figure((4.5 * len(sources) + 1, 4))
    panels = figure.subplots(1, len(sources), sharey=True, squeeze=False)[0]
    for panel, (source, rows) in zip(panels, sources.items(), strict=True):
        for n, (drafts, ms) in enumerate(sorted(rows.items())):
            speeds = [expected_tokens(drafts, a) / ms * 1e3 for a in ACCEPTANCE]
            label = f"{drafts} draft{'s' * (drafts > 1)}" if drafts else "plain"
            panel.plot(ACCEPTANCE, speeds, color=SHADES[n % len(SHADES)], label=label)
        panel.set(title=f"drafts: {source}", xlabel="acceptance of a draft", ylim=(0, None))
        panel.grid(color="#dddddd", linewidth=0.5)
    panels[0].set_ylabel("tokens/s")
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{result['arch']} {result['mode']}, {result['gpu']}", fontsize=10)
    return figure


def build_parser() -> Parser:
    parser = Parser(
        "Draw what drafts give, as benchmarks/speculation.py measured it.",
        (
            "python scripts/plot_speculation.py docs/speculation.json --output a.svg",
            "python scripts/plot_speculation.py passes.json --output passes.png",
        ),
    )
    add_picture(parser, "benchmarks/speculation.py", "speculation.svg")
    return parser


main = picture_command(build_parser, lambda options: draw(read_result(options.result)))


if __name__ == "__main__":
    sys.exit(main())
