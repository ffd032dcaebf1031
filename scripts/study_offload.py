"""Study what offloading can gain: hit ratios of expert caches, recall of predictions.

    python scripts/study_offload.py [--checkpoint_path DIR] [--text_file FILE] [--tokens N]
        [--output_dir DIR] [--profile FILE] [--json]

The model reads a text once while its routing is recorded. Then expert caches replay the
record, one token per step as in decoding: `offload.cache.ExpertCache` (lru), a cache that
keeps the most used experts, and Belady's policy, which knows the future: the upper bound.
These are figures 1 and 2 of Eliseev & Mazur 2023 for any converted checkpoint.
Default: the embedded model and its held-out text. --output_dir also draws the figures,
--profile writes how often each expert was chosen.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import argparse
import bisect
import json
import sys
from pathlib import Path

from cli.command import command
from cli.script_options import check_study
from cli.script_options import study_parser as build_parser
from cli.startup import check_arguments

if __name__ == "__main__":
    check_arguments(build_parser, check_study)

import torch
from torch import Tensor

from benchmarks.pictures import ACCENT, GREY, INK, new_figure, save_figure
from checkpoint import Checkpoint
from eval import read_text
from generate import EMBEDDED, load_model, open_checkpoint
from model import Chunk, MoE, Runner, Transformer
from models import args_of_checkpoint
from offload.cache import ExpertCache
from offload.profile import Profile
from parallel.device import pick_device
from parallel.heartbeat import fail
from tokenizer import load_tokenizer

LAYERS_AHEAD = 1, 2, 10  # as in the paper
SHOWN_TOKENS = 64  # in offload_experts.png
COLORS = ACCENT, "#c4561a", GREY
POLICIES = "lru", "kept", "belady"


# Recording ----------------------------------------------------------------------------------------


class NoLogits(Runner):
    """Runs a model without its head."""

    def logits(self, model: Transformer, normed: Tensor, last: Tensor | None) -> None:
        return None


def moe_layers(model: Transformer) -> list[MoE]:
    """Return the layers that have experts."""
    return [block.ffn for block in model.layers if isinstance(block.ffn, MoE)]


def record(model: Transformer, ids: list[int]) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Run the model over ids -> expert_indices, expert_weights [L, T, A], predictions.

    L counts the layers with experts. predictions: number of layers ahead -> all experts in
    the order of their scores, [L - ahead, T, E].
    """
    layers, hidden = moe_layers(model), []
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
        for layer in layers
    ]
    tokens = torch.tensor([ids], device=model.norm.weight.device)
    model.setup_cache(1, len(ids))
    chunk = Chunk(tokens.new_zeros(1), len(ids))
    _, chosen, weights = model(
        tokens, chunk, all_positions=True, return_routing=True, runner=NoLogits()
    )
    for hook in hooks:
        hook.remove()
    predictions = {}
    for ahead in LAYERS_AHEAD:
        if ahead < len(layers):
            pairs = zip(layers[ahead:], hidden, strict=False)
            scores = [moe.selection_scores(moe.router(x).float()) for moe, x in pairs]
            order = torch.stack(scores).argsort(dim=-1, descending=True, stable=True)
            predictions[ahead] = order.cpu()
    return chosen.cpu(), weights.cpu(), predictions


# Replaying ----------------------------------------------------------------------------------------


def replay(
    steps: list[list[int]],
    experts: int,
    slots: int,
    policy: str,
) -> tuple[int, list[set[int]]]:
    """Replay one layer's steps of A experts each -> hits, and the cached experts before each step.

    policy: "lru"; "belady": evict the expert whose next use is furthest away; "kept": evict none,
    the most used ones of all steps are cached.
    """
    uses = [[n for n, step in enumerate(steps) if expert in step] for expert in range(experts)]
    cached = list(range(slots))
    if policy == "kept":
        cached = Profile([[*map(len, uses)]]).by_use(1, experts)[0][-slots:]
    cache, hits, before = ExpertCache(cached), 0, []

    def next_use(expert: int, now: int) -> float:
        later = bisect.bisect_right(uses[expert], now)
        return uses[expert][later] if later < len(uses[expert]) else float("inf")

    for now, step in enumerate(steps):
        before.append(set(cache.slot))
        hits += sum(expert in cache.slot for expert in step)
        for expert in step if policy != "kept" else ():
            if expert in cache.slot:
                continue
            if policy == "belady":
                candidates = [other for other in cache.slot if other not in step]
                victim = max(candidates, key=lambda other: next_use(other, now))
                cache.slot[expert] = cache.slot.pop(victim)
            else:
                cache.replace(expert, step)
        for expert in step if policy != "kept" else ():
            cache.use(expert)
    return hits, before


def hit_ratios(chosen: Tensor, experts: int) -> dict[str, dict[int, float]]:
    """chosen [L, T, A] -> hits / chosen experts, by policy and by R from A to E."""
    active, layers = chosen.shape[-1], chosen.tolist()
    ratios: dict[str, dict[int, float]] = {}
    for policy in POLICIES:
        ratios[policy] = {}
        for slots in range(active, experts + 1):
            hits = sum(replay(steps, experts, slots, policy)[0] for steps in layers)
            ratios[policy][slots] = hits / chosen.numel()
    return ratios


def profile_of(chosen: Tensor, experts: int) -> Profile:
    """Return how often each expert was chosen. chosen [L, T, A]."""
    return Profile([row.flatten().bincount(minlength=experts).tolist() for row in chosen])


def recall(chosen: Tensor, predictions: Tensor) -> list[float]:
    """Return the fraction of chosen experts among the first 1, 2, ... E predicted ones.

    chosen [L, T, A], predictions [L - ahead, T, E].
    """
    later = chosen[-len(predictions) :]
    ranks = (predictions.unsqueeze(-2) == later.unsqueeze(-1)).int().argmax(dim=-1)
    E = predictions.shape[-1]
    return [(ranks < count).float().mean().item() for count in range(1, E + 1)]


def study(model: Transformer, ids: list[int]) -> tuple[dict, Tensor, Tensor]:
    """Return all figures, and the recorded expert_indices and expert_weights [L, T, A]."""
    chosen, weights, predictions = record(model, ids)
    found = {
        "tokens": len(ids),
        "layers": len(chosen),
        "experts": model.args.n_expert,
        "active": model.args.n_active,
        "hit_ratio": hit_ratios(chosen, model.args.n_expert),
        "recall": {ahead: recall(chosen, order) for ahead, order in predictions.items()},
    }
    return found, chosen, weights


def name_distance(ahead: int) -> str:
    return f"{ahead} layer{'s' * (ahead > 1)} ahead"


def tables(found: dict) -> str:
    """Return the figures as two Markdown tables."""

    def rows(name: str, columns, table: dict) -> list[str]:
        head = [name, *map(str, columns)]
        lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for label, values in table.items():
            numbers = " | ".join(f"{value:.3f}" for value in values)
            lines.append(f"| {label} | {numbers} |")
        return lines

    ratios = {policy: row.values() for policy, row in found["hit_ratio"].items()}
    recalls = {name_distance(ahead): row for ahead, row in found["recall"].items()}
    hits = rows("slots a layer", found["hit_ratio"]["lru"], ratios)
    return "\n".join([*hits, "", *rows("N", range(1, found["experts"] + 1), recalls)])


# Pictures -----------------------------------------------------------------------------------------


def draw_curves(found: dict, path: Path) -> None:
    """Draw hit ratio against slots, and recall against the number of predictions."""
    figure = new_figure((9, 3.6))
    left, right = figure.subplots(1, 2)
    for (policy, row), color in zip(found["hit_ratio"].items(), COLORS, strict=True):
        style = {"marker": "o", "markersize": 4}
        if policy == "belady":
            style = {"linestyle": "--"}
        left.plot(list(row), list(row.values()), color=color, label=policy, **style)
    left.set(title="Hit ratio of the expert cache", xlabel="slots a layer")
    for (ahead, row), style in zip(found["recall"].items(), ("-", "--", ":"), strict=False):
        label = name_distance(ahead)
        right.plot(range(1, len(row) + 1), row, style, color=COLORS[0], label=label)
    right.set(title="Recall of the prediction", xlabel="predicted experts a layer")
    for axes in (left, right):
        axes.set_ylim(0, 1.03)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def draw_experts(found: dict, chosen: Tensor, weights: Tensor, slots: int, path: Path) -> None:
    """Draw the experts that the last tokens chose in up to four layers, shaded by weight.

    Grey squares: the experts cached before the token, by lru with `slots` slots.
    """
    count, experts = len(chosen), found["experts"]
    layers = sorted({round(n * (count - 1) / 3) for n in range(4)})
    height = 0.5 + len(layers) * (0.5 + 0.14 * min(experts, 32))
    figure = new_figure((10, height), dpi=110)
    rows = figure.subplots(len(layers), 1, sharex=True, squeeze=False).flat
    for axes, layer in zip(rows, layers, strict=True):
        _, before = replay(chosen[layer].tolist(), experts, slots, "lru")
        cells = torch.zeros(chosen.shape[1], experts)
        cells = cells.scatter_(1, chosen[layer], weights[layer].float())[-SHOWN_TOKENS:]
        shades = dict(cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.imshow(cells.T.numpy(), aspect="auto", **shades)
        cached = enumerate(before[-SHOWN_TOKENS:])
        squares = [(token, expert) for token, there in cached for expert in there]
        outline = dict(marker="s", facecolors="none", edgecolors=GREY, linewidths=0.7)
        axes.scatter(*zip(*squares, strict=True), s=9, **outline)
        axes.set_ylabel(f"layer {layer}", color=INK)
        axes.set_yticks(range(0, experts, max(1, experts // 8)))
        axes.spines[:].set_visible(False)
    legend = f"blue: chosen, squares: cached in one of {slots} slots (lru)"
    axes.set_xlabel(f"the last {len(cells)} tokens; {legend}")
    save_figure(figure, path)


# Command ------------------------------------------------------------------------------------------


def read_ids(options: argparse.Namespace, checkpoint: Checkpoint) -> list[int]:
    """Return the tokens to read. Raises ValueError for fewer than two, and for another model's."""
    text = read_text(options.text_file or EMBEDDED / "heldout.txt")
    tokenizer = load_tokenizer(checkpoint.directory)
    ids = tokenizer.encode(text)[: options.tokens]
    tokenizer.check_ids(ids, args_of_checkpoint(checkpoint).vocab_size)
    if len(ids) < 2:
        raise ValueError(f"--text_file {options.text_file}: it holds no text to read")
    return ids


def run(options: argparse.Namespace) -> dict:
    """Run the study; return the figures."""
    check_study(options)
    checkpoint = open_checkpoint(options.checkpoint_path)
    device = pick_device(options.device)
    ids = read_ids(options, checkpoint)
    model = load_model(checkpoint, device)
    if len(ids) > model.args.max_position:
        limit = f"the model was made for {model.args.max_position} positions at most"
        raise ValueError(f"--tokens {len(ids)}: {limit}")
    if not moe_layers(model):
        raise ValueError(f"{checkpoint.directory}: no layer of this model has experts")
    found, chosen, weights = study(model, ids)
    if options.profile:
        profile_of(chosen, found["experts"]).write(options.profile)
    if options.output_dir:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        slots = min(2 * found["active"], found["experts"])
        draw_curves(found, options.output_dir / "offload_curves.svg")
        draw_experts(found, chosen, weights, slots, options.output_dir / "offload_experts.png")
    return found


@command(fail)
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    found = run(options)
    print(tables(found))
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
