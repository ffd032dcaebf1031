"""Draw the roofline of benchmark.py's results: tokens/s against the bytes that a token reads.

    python scripts/plot_roofline.py mixtral.json qwen3.json --output roofline.svg

At batch 1 a step is memory-bound. Its roof is the measured read bandwidth divided by the
bytes (Williams et al. 2009, "Roofline"), a falling line on logarithmic axes. RESULT is the
output of `benchmark.py --json`: one object, or one per line; `-` is stdin. A filled point
is a result, with tokens/s and the fraction of the bandwidth measured in the same run. A
hollow point is the peer of that run; a line connects both. Light points are other engines on the
same GPU: "others" in a result, which benchmark.py does not write; docs/roofline.jsonl has them.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import argparse
import json
import math
import sys
from pathlib import Path

from benchmarks.pictures import ACCENT, GREY, INK, new_figure, picture_command
from cli.parser import Parser
from cli.prompts import read_stdin
from cli.script_options import add_output

TEXTS = "arch", "mode", "gpu"
NUMBERS = "tok_s", "bytes_per_token", "read_gb_s", "fraction"
PEER_TEXTS, PEER_NUMBERS = ("name", "dtype"), ("tok_s", "bytes_per_token")
OTHER_TEXTS = ("name",)
LIGHT = "#b9b9b9"
MANY = 10  # results; more have smaller labels
LINE_BOXES = 150  # boxes along a line, for counting overlaps with labels
ROUNDS = 3  # of placing labels
# Positions of a label beside its point, best first: offset in 1/72 inch, alignment.
SIDES = (
    (9, 0, "left", "center"),
    (-9, 0, "right", "center"),
    (6, -6, "left", "top"),
    (-6, -6, "right", "top"),
    (6, 6, "left", "bottom"),
    (-6, 6, "right", "bottom"),
    (0, -9, "center", "top"),
    (0, 9, "center", "bottom"),
    (10, -16, "left", "top"),
    (-10, -16, "right", "top"),
    (10, 16, "left", "bottom"),
    (-10, 16, "right", "bottom"),
    (0, -26, "center", "top"),
    (0, 26, "center", "bottom"),
)


# Results ------------------------------------------------------------------------------------------


def is_row(row: object, texts: tuple[str, ...], numbers: tuple[str, ...]) -> bool:
    """Return whether `row` is an object with these strings and positive, finite numbers."""
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in texts):
        return False
    values = [row.get(name) for name in numbers]
    return all(type(value) in (int, float) and 0 < value < math.inf for value in values)


def check_result(result: object, where: str) -> dict:
    """Return the result. Raises ValueError unless benchmark.py made it, without --sweep."""
    peer = result.get("peer") if isinstance(result, dict) else None
    valid = is_row(result, TEXTS, NUMBERS)
    others = result.get("others", []) if valid else []
    valid = valid and isinstance(others, list)
    valid = valid and all(is_row(other, OTHER_TEXTS, PEER_NUMBERS) for other in others)
    if not valid or (peer and not is_row(peer, PEER_TEXTS, PEER_NUMBERS)):
        raise ValueError(
            f"{where} is not a result: give what benchmark.py --json prints, without --sweep"
        )
    return result


def read_results(name: str) -> list[dict]:
    """Return the results in a file, or stdin for `-`. Raises ValueError if it cannot be read."""
    try:
        text = read_stdin() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text"
        raise ValueError(f"{name}: {why}: give a file that benchmark.py --json made") from None
    try:
        return [check_result(json.loads(text), name)]
    except (json.JSONDecodeError, RecursionError):
        pass  # not one object: one per line
    results = []
    for n, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            results.append(check_result(json.loads(line), f"{name}, line {n},"))
        except (json.JSONDecodeError, RecursionError):
            raise ValueError(
                f"{name}, line {n}, is not JSON: give what benchmark.py --json prints"
            ) from None
    if not results:
        raise ValueError(f"{name} is empty: give what benchmark.py --json prints")
    return results


def format_speed(speed: float) -> str:
    """Format tokens/s with three digits, or as a whole number from 100 on."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


# Picture ------------------------------------------------------------------------------------------

Point = tuple[float, float]
Label = tuple[float, float, str, dict]  # x, y, text, style


def draw(results: list[dict]):
    """Return the figure. Raises ValueError without matplotlib."""
    figure = new_figure((11, 7.4))
    axes = figure.add_subplot(xscale="log", yscale="log")
    roofs: dict[str, float] = {}  # GB/s by GPU
    for result in results:
        gpu = result["gpu"]
        roofs[gpu] = max(roofs.get(gpu, 0.0), result["read_gb_s"])
    set_limits(axes, results, max(roofs.values()))
    style_axes(axes, any(result.get("others") for result in results))
    figure.draw_without_rendering()  # lays out the axes, so that texts can be measured
    figure.set_layout_engine("none")
    lines = draw_roofs(axes, roofs)
    labels, ties = draw_points(axes, results)
    place_labels(axes, labels, lines + ties)
    return figure


def set_limits(axes, results: list[dict], bandwidth: float) -> None:
    """Set limits that show all points and the roof of the largest bandwidth."""
    rows = results + [result["peer"] for result in results if result.get("peer")]
    rows += [other for result in results for other in result.get("others", [])]
    xs = [row["bytes_per_token"] / 1e9 for row in rows]
    ys = [row["tok_s"] for row in rows]
    top = max(max(ys), bandwidth / min(xs))
    axes.set(xlim=(min(xs) / 1.6, max(xs) * 2.2), ylim=(min(ys) / 1.6, top * 1.3))


def style_axes(axes, has_others: bool) -> None:
    """Set ticks, frame, labels and title."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xlabel("GB of weights that a token reads", color=GREY)
    axes.set_ylabel("tokens/s", color=GREY)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
        axis.set_minor_locator(NullLocator())
    axes.tick_params(colors=GREY, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c4c4c4")
    title = {"loc": "left", "color": INK, "fontsize": 13, "fontweight": "bold", "pad": 26}
    axes.set_title("Decoding speed and the memory roofline", **title)
    note = (
        "One sequence, tokens/s, and in brackets the fraction of the read bandwidth "
        "measured in the same run"
    )
    place = dict(xycoords="axes fraction", textcoords="offset points")
    if has_others:
        note += "; light: other engines on the same GPU"
    axes.annotate(note, (0, 1), (0, 10), color=GREY, fontsize=9, **place)


def draw_roofs(axes, roofs: dict[str, float]) -> list[tuple[Point, Point]]:
    """Draw each GPU's roof and its name; return the lines."""
    lines, (x_min, x_max), (y_min, y_max) = [], axes.get_xlim(), axes.get_ylim()
    for gpu, speed in roofs.items():
        left, right = max(x_min, speed / y_max), min(x_max, speed / y_min)
        lines.append(((left, speed / left), (right, speed / right)))
        axes.plot(*zip(*lines[-1], strict=True), color=GREY, linewidth=1.2, zorder=1)
        (x0, y0), (x1, y1) = axes.transData.transform(lines[-1])
        angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
        name = left**0.75 * right**0.25  # models' labels are further down
        axes.annotate(
            f"{gpu}: {speed:,.0f} GB/s measured",
            (name, speed / name),
            (2, 4),
            textcoords="offset points",
            color=GREY,
            fontsize=9,
            rotation=angle,
            rotation_mode="anchor",
            ha="center",
        )
    return lines


def draw_points(axes, results: list[dict]) -> tuple[list[Label], list[tuple[Point, Point]]]:
    """Draw results and their peers -> labels that are not drawn yet, and the connecting lines."""
    labels, ties = [], []
    for result in sorted(results, key=lambda result: -result["tok_s"]):
        x, y = result["bytes_per_token"] / 1e9, result["tok_s"]
        axes.plot(x, y, "o", color=ACCENT, markersize=6.5, zorder=4)
        arch = result["arch"]
        name = Path(arch).parent.name if arch.endswith(".json") else arch
        text = f"{name} {result['mode']}\n{format_speed(y)} ({result['fraction']:.2f})"
        size = 9 if len(results) <= MANY else 7.5
        labels.append((x, y, text, {"color": INK, "fontsize": size, "linespacing": 1.15}))
        if peer := result.get("peer"):
            ties.append(((x, y), (peer["bytes_per_token"] / 1e9, peer["tok_s"])))
            x, y = ties[-1][1]
            ends = zip(*ties[-1], strict=True)
            axes.plot(*ends, color=ACCENT, linewidth=0.8, alpha=0.45, zorder=2)
            hollow = dict(color="white", markeredgecolor=ACCENT, markersize=6)
            axes.plot(x, y, "o", zorder=3, **hollow)
            text = f"{peer['name']} {peer['dtype']}\n{format_speed(y)}"
            labels.append((x, y, text, {"color": GREY, "fontsize": 8, "linespacing": 1.25}))
    return labels + draw_others(axes, results), ties


def draw_others(axes, results: list[dict]) -> list[Label]:
    """Draw other engines' points, one color for all -> labels that are not drawn yet."""
    labels = []
    for other in (other for result in results for other in result.get("others", [])):
        x, y = other["bytes_per_token"] / 1e9, other["tok_s"]
        axes.plot(x, y, "o", color=LIGHT, markersize=5, zorder=3)
        text = f"{other['name']} {format_speed(y)}"
        labels.append((x, y, text, {"color": GREY, "fontsize": 7}))
    return labels


def distance(box, point: Point) -> float:
    """Return the distance of a point from a box, 0 inside it."""
    x, y = point
    return math.hypot(max(box.x0 - x, x - box.x1, 0), max(box.y0 - y, y - box.y1, 0))


def place_labels(axes, labels: list[Label], lines: list[tuple[Point, Point]]) -> None:
    """Draw each label beside its point, where it covers the fewest points, lines and labels.

    lines: the two ends of each line, which is straight on the screen.
    """
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    def box_around(x: float, y: float, size: float) -> Bbox:
        pixels = size * axes.figure.dpi / 72
        return Bbox([[x - pixels, y - pixels], [x + pixels, y + pixels]])

    renderer, frame = axes.figure.canvas.get_renderer(), axes.get_window_extent()
    points = [axes.transData.transform((x, y)) for x, y, _, _ in labels]
    taken = [box_around(*point, 4) for point in points]
    on_lines = []
    for line in lines:
        (x, y), (x1, y1) = axes.transData.transform(line)
        for n in range(LINE_BOXES + 1):
            along = n / LINE_BOXES
            on_lines.append(box_around(x + (x1 - x) * along, y + (y1 - y) * along, 2))

    def place(label: Label, taken: list[Bbox]) -> tuple[Annotation, Bbox]:
        x, y, text, style = label
        best, own = None, axes.transData.transform((x, y))
        for dx, dy, ha, va in SIDES:
            align = dict(textcoords="offset points", ha=ha, va=va)
            note = axes.annotate(text, (x, y), (dx, dy), **align, **style)
            box = note.get_window_extent(renderer)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1
            inside = inside and frame.y0 <= box.y0 and box.y1 <= frame.y1
            cost = 1000 * (not inside) + 100 * box.count_overlaps(taken)
            cost += box.count_overlaps(on_lines)
            cost += 20 * sum(distance(box, point) < distance(box, own) for point in points)
            if best and cost >= best[0]:
                note.remove()
                continue
            if best:
                best[1].remove()
            best = cost, note, box
        return best[1:]

    placed: dict[int, tuple[Annotation, Bbox]] = {}
    for _ in range(ROUNDS):  # later rounds know where all other labels are
        for n, label in enumerate(labels):
            if n in placed:
                placed.pop(n)[0].remove()
            placed[n] = place(label, taken + [box for _, box in placed.values()])


# Command ------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(
        "Draw the roofline of benchmark.py's results: tokens/s against bytes read per token.",
        (
            "python scripts/plot_roofline.py mixtral.json qwen3.json --output roofline.svg",
            "python benchmark.py --arch OLMoE-1B-7B --json | python scripts/plot_roofline.py -",
        ),
    )
    results = "output of benchmark.py --json; - is stdin"
    parser.add_argument("results", nargs="+", metavar="RESULT", help=results)
    add_output(parser, "roofline.svg")
    return parser


def draw_results(options: argparse.Namespace):
    """Return the figure of all results."""
    return draw([result for name in options.results for result in read_results(name)])


main = picture_command(build_parser, draw_results)


if __name__ == "__main__":
    sys.exit(main())
