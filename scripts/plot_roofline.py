"""A picture of benchmark.py's results: tokens a second against the bytes that a token reads, under the roofline.

    python scripts/plot_roofline.py mixtral.json qwen3.json --output roofline.svg

At batch 1 a step is bound by memory: its roof is the measured read bandwidth over those bytes (Williams et al. 2009,
"Roofline"), a falling line on logarithmic axes. Each RESULT is what `benchmark.py --json` printed, one object or one on
each line; `-` is stdin. A result is a filled point with its tokens/s and the fraction of its own run's bandwidth; the
peer of its run is a hollow one, tied to it.
"""

import io
import json
import math
import sys
from pathlib import Path

from command import Parser

TEXTS, NUMBERS = ("arch", "mode", "gpu"), ("tok_s", "bytes_per_token", "read_gb_s", "fraction")
FORMATS = ".png", ".svg"
INK, GREY, ACCENT = "#1a1a1a", "#767676", "#0b5fa5"


def check(result: object, where: str) -> dict:
    """The result itself. Raises ValueError unless it is one of benchmark.py's, without --sweep."""

    def fits(row: object, texts: tuple[str, ...], numbers: tuple[str, ...]) -> bool:
        values = [row.get(name) for name in numbers] if isinstance(row, dict) else [None]
        good = all(type(value) in (int, float) and 0 < value < math.inf for value in values)
        return good and all(isinstance(row.get(name), str) for name in texts)

    peer = result.get("peer") if isinstance(result, dict) else None
    if not fits(result, TEXTS, NUMBERS) or (peer and not fits(peer, ("name", "dtype"), ("tok_s", "bytes_per_token"))):
        raise ValueError(f"{where} is not a result: give what benchmark.py --json prints, without --sweep")
    return result


def read_results(name: str) -> list[dict]:
    """The results in a file, or stdin for `-`. Raises ValueError for what cannot be read."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text"
        raise ValueError(f"{name}: {why}: give a file that benchmark.py --json made") from None
    try:
        return [check(json.loads(text), name)]
    except json.JSONDecodeError:
        pass  # not one object: one a line, then
    lines, results = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()], []
    for n, line in lines:
        try:
            results.append(check(json.loads(line), f"{name}, line {n},"))
        except json.JSONDecodeError:
            raise ValueError(f"{name}, line {n}, is not JSON: give what benchmark.py --json prints") from None
    if not results:
        raise ValueError(f"{name} is empty: give what benchmark.py --json prints")
    return results


def figures(speed: float) -> str:
    """Tokens a second to three figures, and to whole ones."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def write_beside(axes, texts: list[tuple[float, float, str, dict]], lines: list[tuple[tuple, tuple]]) -> None:
    """Write (x, y, text, style) beside each point, on the first side where it covers no point, line or other text.

    lines: (x, y) at both ends, straight on the screen. Where no side is free, the one that covers least.
    """
    from matplotlib.transforms import Bbox

    def around(x: float, y: float, size: float) -> Bbox:
        pixels = size * axes.figure.dpi / 72
        return Bbox([[x - pixels, y - pixels], [x + pixels, y + pixels]])

    renderer, frame = axes.figure.canvas.get_renderer(), axes.get_window_extent()
    boxes, thin = [around(*axes.transData.transform((x, y)), 4) for x, y, _, _ in texts], []
    for line in lines:
        (x, y), (x1, y1) = axes.transData.transform(line)
        thin += [around(x + (x1 - x) * n / 150, y + (y1 - y) * n / 150, 2) for n in range(151)]
    sides = [(9, 0, "left", "center"), (-9, 0, "right", "center"), (6, -6, "left", "top"), (-6, -6, "right", "top")]
    sides += [
        (6, 6, "left", "bottom"),
        (-6, 6, "right", "bottom"),
        (0, -9, "center", "top"),
        (0, 9, "center", "bottom"),
    ]
    for x, y, text, style in texts:
        best = None
        for dx, dy, ha, va in sides:
            note = axes.annotate(text, (x, y), (dx, dy), textcoords="offset points", ha=ha, va=va, **style)
            box = note.get_window_extent(renderer)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            covered = 1000 * (not inside) + 100 * box.count_overlaps(boxes) + box.count_overlaps(thin)
            if best and covered >= best[0]:
                note.remove()
                continue
            if best:
                best[1].remove()
            best = covered, note, box
        boxes.append(best[2])


def draw(results: list[dict], format: str) -> bytes:
    """The picture as a file's bytes; format: "png" or "svg". Raises ValueError without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install 'moe-fast[plot]'") from None
    figure = Figure(figsize=(9, 5.2), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xscale="log", yscale="log")
    rows = results + [r["peer"] for r in results if r.get("peer")]
    points = [(row["bytes_per_token"] / 1e9, row["tok_s"]) for row in rows]
    roofs = {r["gpu"]: max(other["read_gb_s"] for other in results if other["gpu"] == r["gpu"]) for r in results}
    ends = min(x for x, _ in points) / 1.6, max(x for x, _ in points) * 2.2
    top = max(max(y for _, y in points), max(roofs.values()) / min(x for x, _ in points))
    axes.set(xlim=ends, ylim=(min(y for _, y in points) / 1.6, top * 1.3))
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
    note = "One sequence, tokens/s, and in brackets the fraction of the read bandwidth measured in the same run"
    axes.annotate(note, (0, 1), (0, 10), xycoords="axes fraction", textcoords="offset points", color=GREY, fontsize=9)
    figure.draw_without_rendering()  # places the axes, so that texts can be measured
    figure.set_layout_engine("none")

    lines, texts = [], []
    for gpu, speed in roofs.items():
        left, right = max(ends[0], speed / axes.get_ylim()[1]), min(ends[1], speed / axes.get_ylim()[0])
        lines.append(((left, speed / left), (right, speed / right)))
        axes.plot(*zip(*lines[-1], strict=True), color=GREY, linewidth=1.2, zorder=1)
        (x0, y0), (x1, y1) = axes.transData.transform(lines[-1])
        at, text = math.sqrt(left * right), f"{gpu}: {speed:,.0f} GB/s measured"
        turn = {"rotation": math.degrees(math.atan2(y1 - y0, x1 - x0)), "rotation_mode": "anchor", "ha": "center"}
        axes.annotate(text, (at, speed / at), (2, 4), textcoords="offset points", color=GREY, fontsize=9, **turn)
    for r in sorted(results, key=lambda r: -r["tok_s"]):
        at = r["bytes_per_token"] / 1e9, r["tok_s"]
        axes.plot(*at, "o", color=ACCENT, markersize=6.5, zorder=4)
        name = Path(r["arch"]).parent.name if r["arch"].endswith(".json") else r["arch"]
        text = f"{name} {r['mode']}\n{figures(r['tok_s'])} ({r['fraction']:.2f})"
        texts.append((*at, text, {"color": INK, "fontsize": 9, "linespacing": 1.25}))
        if peer := r.get("peer"):
            below = peer["bytes_per_token"] / 1e9, peer["tok_s"]
            lines.append((at, below))
            axes.plot(*zip(at, below, strict=True), color=ACCENT, linewidth=0.8, alpha=0.45, zorder=2)
            axes.plot(*below, "o", color="white", markeredgecolor=ACCENT, markersize=6, zorder=3)
            text = f"{peer['name']} {peer['dtype']}\n{figures(peer['tok_s'])}"
            texts.append((*below, text, {"color": GREY, "fontsize": 8, "linespacing": 1.25}))
    write_beside(axes, texts, lines)
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "roofline"}):  # the same picture is the same bytes
        figure.savefig(buffer, format=format, metadata={"Date": None} if format == "svg" else None)
    return buffer.getvalue()


def write(path: Path, data: bytes) -> None:
    """All or nothing. Raises ValueError where it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ValueError(f"--output {path}: {error.strerror}: give a file that can be written") from None


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python scripts/plot_roofline.py mixtral.json qwen3.json --output roofline.svg",
            "python benchmark.py --arch OLMoE-1B-7B --json | python scripts/plot_roofline.py -",
        ),
    )
    parser.add_argument("results", nargs="+", metavar="RESULT", help="what benchmark.py --json printed; - is stdin")
    parser.add_argument("--output", type=Path, default=Path("roofline.svg"), help="a .png or .svg (roofline.svg)")
    return parser


def main() -> int:
    options = build_parser().parse_args()
    try:
        if options.output.suffix not in FORMATS:
            raise ValueError(f"--output {options.output}: its name must end in {' or '.join(FORMATS)}")
        results = [result for name in options.results for result in read_results(name)]
        write(options.output, draw(results, options.output.suffix[1:]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
