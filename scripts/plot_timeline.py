"""Draw the kernels of one layer, as benchmarks/fused_decode.py --json measured them.

    python scripts/plot_timeline.py docs/timeline.json --output docs/timeline.svg

A bar is a kernel, from its start to its end. Kernels overlap: with programmatic dependent launch a
kernel starts while the previous one ends, loads what that does not write, and waits. The first
kernel of the next layer ends the picture.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import json
import math
import re
import sys
from pathlib import Path

from benchmarks.pictures import ACCENT, GREY, INK, new_figure, picture_command
from cli.parser import Parser
from cli.script_options import add_picture

WAYS = (("inductor", "Inductor's kernels"), ("fused", "fused kernels"))
# Part of a kernel's name -> what it computes; the first that fits. Names that Inductor generated
# are those of docs/timeline.json.
NAMES = {
    "attend_token_sum": "sum of parts",
    "attend_kernel": "attention",
    "merge_kernel": "merge of parts",
    "_map_queries": "queries to latents",
    "_attend_part": "attention",
    "_merge_values": "merge of parts, values",
    "_update_heads": "Gated DeltaNet",
    "join_tokens": "norm, router",
    "_quantize_token": "x as integers",
    "mul_sum_unbind": "weighted sum, residual, norm",
    "add_as_strided": "residual, norm",
    "lshift": "top-k",
    "mm_t_view": "router",
    "_route": "top-k",
}
# Kernels that a layer has several of, in order, by the way. The last one is the next layer's.
PRODUCTS = {
    "inductor": {
        "_multiply_sum": ("wqkv", "wo", "wqkv of the next layer"),
        "_multiply_each": ("gate, up, SwiGLU", "down"),
    },
    "fused": {
        "_multiply_sum": (
            "norm, wqkv",
            "wo, residual",
            "down, weighted sum, residual",
            "norm, wqkv of the next layer",
        ),
        "_multiply_each": ("top-k, gate, up, SwiGLU",),
    },
}
NEXT = "#b9b9b9"  # the kernel of the next layer
FIX = "give what benchmarks/fused_decode.py --json wrote"
Kernel = tuple[str, float, float]  # name, start and duration in us


def read_result(path: Path) -> dict:
    """Return the measured result. Raises ValueError if the file does not hold one."""
    try:
        result = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text"
        raise ValueError(f"{path}: {why}: {FIX}") from None
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} is not JSON: {FIX}") from None
    texts = isinstance(result, dict) and all(
        isinstance(result.get(name), str) for name in ("arch", "mode", "gpu")
    )
    if not texts or not all(is_way(result.get(way)) for way, _ in WAYS):
        raise ValueError(f"{path} has no kernels of a layer: {FIX}")
    return result


def is_way(found: object) -> bool:
    """Return whether `found` is the time and the kernels of a layer."""
    kernels = found.get("kernels") if isinstance(found, dict) else None
    if not isinstance(kernels, list) or len(kernels) < 2 or not is_time(found.get("us")):
        return False
    return all(
        isinstance(kernel, list)
        and len(kernel) == 3
        and isinstance(kernel[0], str)
        and all(is_time(value) for value in kernel[1:])
        for kernel in kernels
    )


def is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e6 and math.isfinite(value)


def describe(kernels: list[Kernel], way: str) -> list[str]:
    """Return what each kernel computes, by its name and place. way: of WAYS."""
    products = PRODUCTS[way]
    texts, counts = [], dict.fromkeys(products, 0)
    for name, _, _ in kernels:
        if name in products:
            texts.append(products[name][min(counts[name], len(products[name]) - 1)])
            counts[name] += 1
        else:
            found = (text for part, text in NAMES.items() if part in name)
            texts.append(next(found, re.sub("^triton_[a-z]+_fused_", "", name)[:30]))
    return texts


def draw(result: dict):
    """Return the figure: one axis for each way, with the same scale."""
    counts = [len(result[way]["kernels"]) for way, _ in WAYS]
    figure = new_figure((9, 1.4 + 0.27 * sum(counts)))
    grid = figure.subplots(len(WAYS), sharex=True, height_ratios=counts)
    for axes, (way, title) in zip(grid, WAYS, strict=True):
        found = result[way]
        draw_kernels(axes, found["kernels"], way)
        place = {"loc": "left", "fontsize": 10, "fontweight": "bold", "color": INK}
        axes.set_title(f"{title}: {found['us']:.1f} us a layer", **place)
    grid[-1].set_xlabel("us", color=GREY)
    title = f"One layer of {result['arch']} {result['mode']}, one token, {result['gpu']}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure


def draw_kernels(axes, kernels: list[Kernel], way: str) -> None:
    """Draw the kernels as bars from top to bottom, the last in another color. way: of WAYS."""
    texts = describe(kernels, way)
    for row, ((_, start, length), text) in enumerate(zip(kernels, texts, strict=True)):
        last = row == len(kernels) - 1
        axes.barh(row, length, left=start, height=0.7, color=NEXT if last else ACCENT)
        end = dict(va="center", fontsize=8, color=INK)
        axes.text(start + length + 0.2, row, f"{text}  {length:.1f}", **end)
    axes.set_yticks([])
    axes.set_xlim(0, max(start + length for _, start, length in kernels) * 1.25)
    axes.invert_yaxis()
    axes.tick_params(colors=GREY, length=3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#c4c4c4")


def build_parser() -> Parser:
    parser = Parser(
        "Draw the kernels of one layer, as benchmarks/fused_decode.py measured them.",
        (
            "python scripts/plot_timeline.py docs/timeline.json --output docs/timeline.svg",
            "python scripts/plot_timeline.py layer.json --output layer.png",
        ),
    )
    add_picture(parser, "benchmarks/fused_decode.py", "timeline.svg")
    return parser


main = picture_command(build_parser, lambda options: draw(read_result(options.result)))


if __name__ == "__main__":
    sys.exit(main())
