"""Where a prompt goes: which experts each token uses, how evenly they are used, and how sure the router is.

    python scripts/plot_experts.py --prompt 'def read_lines(path):' --layers 0,3,7 --output experts.svg

Above, for each chosen layer a map of tokens by experts, as dark as the expert's weight. Below, each layer's load (the
share of choices that fall on each expert), and two entropies a layer in bits: of that load, at most log2 E, and the
mean of a token's own weights, at most log2 A. A token's experts are those that run when it is read. Standard output
has the picture's name, or with --json the numbers.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch

import world
from command import Parser
from generate import DEFAULT_PROMPT, load_model, open_checkpoint
from model import Transformer
from tokenizer import load_tokenizer

FORMATS = ".png", ".svg"
MOST_TOKENS = 512  # that a map can show


def entropy(shares: torch.Tensor) -> torch.Tensor:
    """Of shares [..., n] that sum to one, in bits (Shannon 1948, section 6) -> [...]."""
    return -torch.special.xlogy(shares, shares).sum(dim=-1) / math.log(2)


@torch.inference_mode()
def routing(model: Transformer, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts int64 and weights fp32 [L, T, A] of each token of ids; L layers have experts."""
    model.setup_cache(1, len(ids))
    device = model.norm.weight.device
    where = torch.arange(len(ids), device=device)[None]
    _, *found = model(torch.tensor([ids], device=device), where, return_routing=True)
    if not found:
        raise ValueError("no layer of this model has experts: give one that has")
    return found[0].cpu(), found[1].float().cpu()


def study(experts: torch.Tensor, weights: torch.Tensor, n_expert: int) -> dict:
    """experts, weights [L, T, A] -> load [L][E], load_entropy [L] and weight_entropy [L] in bits."""
    load = torch.stack([torch.bincount(layer.flatten(), minlength=n_expert) for layer in experts]).float()
    load /= load.sum(dim=-1, keepdim=True)
    own = entropy(weights / weights.sum(dim=-1, keepdim=True)).mean(dim=-1)
    return {"load": load.tolist(), "load_entropy": entropy(load).tolist(), "weight_entropy": own.tolist()}


def draw(found: dict, experts: torch.Tensor, weights: torch.Tensor, layers: list[int], numbers: list[int],
         tokens: list[str], path: Path) -> None:  # fmt: skip
    """Write the picture. numbers: each sparse layer's number in the model. Raises ValueError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install 'moe-fast[plot]'") from None
    E, T, A = len(found["load"][0]), len(tokens), experts.shape[2]
    tall = 0.9 + 0.12 * min(E, 32)
    figure = Figure(figsize=(max(8.0, min(24.0, 0.2 * T)), tall * len(layers) + 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(layers) + 1, 2, height_ratios=[tall] * len(layers) + [3.6])
    for row, layer in enumerate(layers):
        at = numbers.index(layer)
        shares = torch.zeros(T, E).scatter_(1, experts[at], weights[at])
        axes = figure.add_subplot(grid[row, :])
        axes.imshow(shares.T, aspect="auto", cmap="Blues", vmin=0, vmax=max(1.0, shares.max().item()))
        axes.set_ylabel(f"layer {layer}\nexpert")
        names = [token.replace("\n", "\\n").replace("$", r"\$") for token in tokens]
        last = row == len(layers) - 1 and T <= 120
        axes.set_xticks(range(T), names, rotation=90, fontsize=7, family="monospace") if last else axes.set_xticks([])
    axes = figure.add_subplot(grid[-1, 0])
    image = axes.imshow(found["load"], aspect="auto", cmap="Blues", vmin=0)
    axes.set_yticks(range(len(numbers)), numbers, fontsize=7)
    axes.set(title=f"share of the choices (even: {1 / E:.3f})", xlabel="expert", ylabel="layer")
    figure.colorbar(image, ax=axes)
    axes = figure.add_subplot(grid[-1, 1])
    for name, label, most in (("load_entropy", "of the load", E), ("weight_entropy", "of a token's weights", A)):
        (line,) = axes.plot(numbers, found[name], "o-", label=label)
        axes.axhline(math.log2(most), linestyle=":", color=line.get_color())
    axes.set(title="entropy in bits, and the most it can be", xlabel="layer", ylim=(0, math.log2(E) * 1.1))
    axes.legend()
    part = path.with_name(path.name + ".part")
    try:
        figure.savefig(part, format=path.suffix[1:])
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ValueError(f"--output {path}: {error.strerror}: give a file that can be written") from None


def run(options: argparse.Namespace) -> dict:
    if options.output.suffix not in FORMATS:
        raise ValueError(f"--output {options.output}: its name must end in {' or '.join(FORMATS)}")
    checkpoint = open_checkpoint(options.checkpoint_path)
    tokenizer = load_tokenizer(checkpoint.directory)
    ids = tokenizer.encode(sys.stdin.read() if options.prompt == "-" else options.prompt)
    if not 0 < len(ids) <= MOST_TOKENS:
        raise ValueError(f"the prompt is {len(ids)} tokens: give from 1 to {MOST_TOKENS}")
    model = load_model(checkpoint, options.device)
    numbers = [n for n in range(model.args.n_layer) if n not in model.args.dense_layers]
    try:
        layers = [int(n) for n in options.layers.split(",")] if options.layers else [numbers[0], numbers[-1]]
    except ValueError:
        raise ValueError(f"--layers {options.layers}: give numbers with commas between, such as 0,3") from None
    if not set(layers) <= set(numbers):
        raise ValueError(f"--layers {options.layers}: layers with experts are {', '.join(map(str, numbers))}")
    experts, weights = routing(model, ids)
    found = study(experts, weights, model.args.n_expert)
    tokens = [tokenizer.token_bytes(id).decode(errors="replace") for id in ids]
    draw(found, experts, weights, list(dict.fromkeys(layers)), numbers, tokens, options.output)
    return {"layers": numbers, "tokens": len(ids), **found}


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python scripts/plot_experts.py --prompt 'import os' --layers 0,7 --output experts.png",
            "python scripts/plot_experts.py --checkpoint_path DIR --prompt - --json < text.txt",
        ),
    )
    add = parser.add_argument
    add("--checkpoint_path", type=Path, metavar="DIR", help="converted checkpoint; default: the embedded tiny model")
    add("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help="what the model reads; '-' reads stdin")
    add("--layers", metavar="N,N", help="maps of these; default: the first and the last with experts")
    add("--output", type=Path, default=Path("experts.png"), metavar="FILE", help="a .png or .svg (experts.png)")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--json", action="store_true", help="print the load and the entropies as one JSON object")
    return parser


def command() -> int:
    options = build_parser().parse_args()
    found = run(options)
    print(json.dumps(found) if options.json else options.output)
    return 0


def main() -> int:
    return world.attempt(command)


if __name__ == "__main__":
    sys.exit(main())
