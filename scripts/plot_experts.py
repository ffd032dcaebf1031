"""Draw which experts each token of a prompt uses, how evenly, and how sure the router is.

    python scripts/plot_experts.py --prompt 'def read_lines(path):' --layers 0,3,7 --output F.svg

Top: for each layer of --layers a map of tokens by experts, shaded by the expert's weight.
Bottom: the load of each layer (the fraction of choices that each expert gets), and two
entropies per layer in bits: of the load (at most log2 E), and of a token's routing weights,
as a mean over tokens (at most log2 A). A token's experts are those of the forward pass that
reads it. stdout has the picture's name, or with --json the numbers.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pictures import new_figure, save_figure
from cli.command import command
from cli.prompts import read_stdin
from cli.script_options import check_picture
from cli.script_options import experts_parser as build_parser
from cli.startup import check_arguments

if __name__ == "__main__":
    check_arguments(build_parser, check_picture)

import torch
from torch import Tensor

from generate import load_model, open_checkpoint
from model import Transformer
from parallel.heartbeat import fail
from tokenizer import load_tokenizer

MAX_TOKENS = 512  # columns of a map
MAX_LABELED_TOKENS = 120


# Numbers ------------------------------------------------------------------------------------------


def entropy(shares: Tensor) -> Tensor:
    """Return the entropy in bits [...] of shares [..., n] with sum 1 (Shannon 1948, section 6)."""
    return -torch.special.xlogy(shares, shares).sum(dim=-1) / math.log(2)


@torch.inference_mode()
def record_routing(model: Transformer, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return experts int64 and weights fp32 [L, T, A]. L counts the layers with experts."""
    model.setup_cache(1, len(ids))
    device = model.norm.weight.device
    where = torch.arange(len(ids), device=device)[None]
    tokens = torch.tensor([ids], device=device)
    _, experts, weights = model(tokens, where, return_routing=True)
    return experts.cpu(), weights.float().cpu()


def study(experts: Tensor, weights: Tensor, n_expert: int) -> dict:
    """experts, weights [L, T, A] -> load [L][E], load_entropy [L], weight_entropy [L] in bits."""
    counts = [torch.bincount(layer.flatten(), minlength=n_expert) for layer in experts]
    load = torch.stack(counts).float()
    load /= load.sum(dim=-1, keepdim=True)
    weight_entropy = entropy(weights / weights.sum(dim=-1, keepdim=True)).mean(dim=-1)
    return {
        "load": load.tolist(),
        "load_entropy": entropy(load).tolist(),
        "weight_entropy": weight_entropy.tolist(),
    }


# Picture ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """The data of the picture."""

    found: dict  # from `study`
    experts: Tensor  # int64 [L, T, A]
    weights: Tensor  # fp32 [L, T, A]
    numbers: list[int]  # the L layers' indices in the model
    tokens: list[str]


def draw(routing: Routing, layers: list[int], path: Path) -> None:
    """Write the picture with maps of `layers`. Raises ValueError without matplotlib."""
    E, T = len(routing.found["load"][0]), len(routing.tokens)
    width, map_height, bottom = max(8.0, min(24.0, 0.2 * T)), 0.9 + 0.12 * min(E, 32), 3.6
    size = width, map_height * len(layers) + bottom
    figure = new_figure(size, dpi=110)
    heights = [map_height] * len(layers) + [bottom]
    grid = figure.add_gridspec(len(layers) + 1, 2, height_ratios=heights)
    for row, layer in enumerate(layers):
        axes = figure.add_subplot(grid[row, :])
        draw_map(axes, routing, layer)
        if row == len(layers) - 1 and T <= MAX_LABELED_TOKENS:
            names = [token.replace("\n", "\\n").replace("$", r"\$") for token in routing.tokens]
            axes.set_xticks(range(T), names, rotation=90, fontsize=7, family="monospace")
        else:
            axes.set_xticks([])
    draw_load(figure, figure.add_subplot(grid[-1, 0]), routing)
    draw_entropy(figure.add_subplot(grid[-1, 1]), routing)
    save_figure(figure, path)


def draw_map(axes, routing: Routing, layer: int) -> None:
    """Draw one layer's map of tokens by experts."""
    at, E = routing.numbers.index(layer), len(routing.found["load"][0])
    shares = torch.zeros(len(routing.tokens), E)
    shares.scatter_(1, routing.experts[at], routing.weights[at])
    largest = max(1.0, shares.max().item())
    axes.imshow(shares.T, aspect="auto", cmap="Blues", vmin=0, vmax=largest)
    axes.set_ylabel(f"layer {layer}\nexpert")


def draw_load(figure, axes, routing: Routing) -> None:
    """Draw the load of each layer's experts."""
    load, numbers = routing.found["load"], routing.numbers
    image = axes.imshow(load, aspect="auto", cmap="Blues", vmin=0)
    axes.set_yticks(range(len(numbers)), numbers, fontsize=7)
    title = f"fraction of the choices (even: {1 / len(load[0]):.3f})"
    axes.set(title=title, xlabel="expert", ylabel="layer")
    figure.colorbar(image, ax=axes)


def draw_entropy(axes, routing: Routing) -> None:
    """Draw both entropies by layer, each with its maximum as a dotted line."""
    E, A = len(routing.found["load"][0]), routing.experts.shape[2]
    lines = (("load_entropy", "load", E), ("weight_entropy", "routing weights", A))
    for name, label, count in lines:
        (line,) = axes.plot(routing.numbers, routing.found[name], "o-", label=label)
        axes.axhline(math.log2(count), linestyle=":", color=line.get_color())
    title = "entropy in bits (dotted: maximum)"
    axes.set(title=title, xlabel="layer", ylim=(0, math.log2(E) * 1.1))
    axes.legend()


# Command ------------------------------------------------------------------------------------------


def parse_layers(text: str | None, numbers: list[int]) -> list[int]:
    """Return the unique layers of --layers. Raises ValueError for layers without experts.

    numbers: the layers with experts. Default: the first and the last of them.
    """
    if not text:
        return list(dict.fromkeys((numbers[0], numbers[-1])))
    try:
        layers = [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--layers {text}: give numbers with commas between, such as 0,3"
        ) from None
    if not set(layers) <= set(numbers):
        known = ", ".join(map(str, numbers))
        raise ValueError(f"--layers {text}: layers with experts are {known}")
    return list(dict.fromkeys(layers))


def run(options: argparse.Namespace) -> dict:
    """Draw the picture; return the numbers."""
    check_picture(options)
    checkpoint = open_checkpoint(options.checkpoint_path)
    tokenizer = load_tokenizer(checkpoint.directory)
    ids = tokenizer.encode(read_stdin() if options.prompt == "-" else options.prompt)
    if not 0 < len(ids) <= MAX_TOKENS:
        raise ValueError(f"the prompt is {len(ids)} tokens: give from 1 to {MAX_TOKENS}")
    model = load_model(checkpoint, options.device)
    tokenizer.check_ids(ids, model.args.vocab_size)
    numbers = [n for n in range(model.args.n_layer) if n not in model.args.dense_layers]
    if not numbers:
        raise ValueError("no layer of this model has experts: give another model")
    layers = parse_layers(options.layers, numbers)
    experts, weights = record_routing(model, ids)
    found = study(experts, weights, model.args.n_expert)
    tokens = [tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
    draw(Routing(found, experts, weights, numbers, tokens), layers, options.output)
    return {"layers": numbers, "tokens": len(ids), **found}


@command(fail)
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    found = run(options)
    print(json.dumps(found) if options.json else options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
