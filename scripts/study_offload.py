"""What offloading can gain on a model: hit ratios of the caches, recall of the guesses, and a picture of both.

    python scripts/study_offload.py [--checkpoint_path DIR] [--text_file FILE] [--tokens N] [--output_dir DIR] [--json]

The model reads a text once, and its routing is recorded. Caches are then replayed over that record, one token a step as
in decoding: `offload.Cache` for lru and lfu, and Belady's rule, which knows the future and bounds them all. These are
Figures 1 and 2 of Eliseev & Mazur 2023 for any converted checkpoint, by default the embedded model and its held-out
text. Without --output_dir nothing is drawn.
"""

import argparse
import bisect
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

import world
from attention import Chunk
from checkpoint import pick_device
from command import Parser
from eval import read_text
from generate import EMBEDDED, load_model, open_checkpoint
from model import Stages, Transformer
from slots import POLICIES, Cache
from tokenizer import load_tokenizer

AHEAD = 1, 2, 10  # layers, as in the paper
SHOWN = 64  # tokens of the picture
INK, GREY, COLORS = "#1a1a1a", "#767676", ("#0b5fa5", "#c4561a", "#767676")


# Recording ----------------------------------------------------------------------------------------------------------


def record(model: Transformer, ids: list[int]) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Run the model over ids -> expert_indices and expert_weights [L, T, A] of the layers that have experts, and by
    how many of these layers ahead, the experts [L - ahead, T, E] in the order in which a guess would choose them."""
    layers, seen = [block.ffn for block in model.layers if hasattr(block.ffn, "experts")], []
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for layer in layers]
    tokens = torch.tensor([ids], device=model.norm.weight.device)
    model.setup_cache(1, len(ids))
    chunk, stages = Chunk(tokens.new_zeros(1), len(ids)), Stages(finish=lambda *_: None)
    _, chosen, weights = model(tokens, chunk, all_positions=True, return_routing=True, stages=stages)
    for hook in hooks:
        hook.remove()
    orders = {}
    for ahead in AHEAD:
        if ahead < len(layers):
            scores = [later.score(x)[0] for later, x in zip(layers[ahead:], seen, strict=False)]
            orders[ahead] = torch.stack(scores).argsort(dim=-1, descending=True, stable=True).cpu()
    return chosen.cpu(), weights.cpu(), orders


# Replaying ----------------------------------------------------------------------------------------------------------


def replay(steps: list[list[int]], experts: int, slots: int, policy: str) -> tuple[int, list[set[int]]]:
    """One layer's steps of A experts each -> how many of them were there, and what was there before each step.

    policy: of `offload.Cache`, or "belady": what is needed again last (or never) goes.
    """
    uses = [[n for n, step in enumerate(steps) if expert in step] for expert in range(experts)]
    cache, hits, before = Cache(experts, slots, policy), 0, []

    def next_use(expert: int, now: int) -> float:
        later = bisect.bisect_right(uses[expert], now)
        return uses[expert][later] if later < len(uses[expert]) else float("inf")

    for now, step in enumerate(steps):
        before.append(set(cache.slot))
        hits += sum(expert in cache.slot for expert in step)
        for expert in step:
            if expert in cache.slot:
                continue
            if policy == "belady":
                victim = max((e for e in cache.slot if e not in step), key=lambda e: next_use(e, now))
                cache.slot[expert] = cache.slot.pop(victim)
            else:
                cache.replace(expert, step)
        for expert in step:
            cache.use(expert)
    return hits, before


def hit_ratios(chosen: Tensor, experts: int) -> dict[str, dict[int, float]]:
    """chosen [L, T, A] -> for each policy and R from A to E, the share of chosen experts that were there."""
    layers, active = chosen.tolist(), chosen.shape[-1]
    return {
        policy: {
            slots: sum(replay(steps, experts, slots, policy)[0] for steps in layers) / chosen.numel()
            for slots in range(active, experts + 1)
        }
        for policy in (*POLICIES, "belady")
    }


def recall(chosen: Tensor, order: Tensor) -> list[float]:
    """chosen [L, T, A], order [L - ahead, T, E] -> the share of chosen experts among the first 1, 2, ... E guesses."""
    later = chosen[-len(order) :]
    places = (order.unsqueeze(-2) == later.unsqueeze(-1)).int().argmax(dim=-1)  # of each chosen one among the guesses
    return [(places < count).float().mean().item() for count in range(1, order.shape[-1] + 1)]


def study(model: Transformer, ids: list[int]) -> tuple[dict, Tensor, Tensor]:
    """All figures, with the routing that they are of."""
    chosen, weights, orders = record(model, ids)
    found = {
        "tokens": len(ids), "layers": len(chosen), "experts": model.args.n_expert, "active": model.args.n_active,
        "hit_ratio": hit_ratios(chosen, model.args.n_expert),
        "recall": {ahead: recall(chosen, order) for ahead, order in orders.items()},
    }  # fmt: skip
    return found, chosen, weights


def tables(found: dict) -> str:
    """The figures as two Markdown tables."""
    ratios, guesses = found["hit_ratio"], range(1, found["experts"] + 1)
    head = lambda names: [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]  # noqa: E731
    lines = head(["slots a layer", *map(str, ratios["lru"])])
    lines += [f"| {policy} | " + " | ".join(f"{x:.3f}" for x in row.values()) + " |" for policy, row in ratios.items()]
    lines += ["", *head(["guesses", *map(str, guesses)])]
    for ahead, row in found["recall"].items():
        lines.append(f"| {ahead} layer{'s' * (ahead > 1)} ahead | " + " | ".join(f"{x:.3f}" for x in row) + " |")
    return "\n".join(lines)


# Pictures -----------------------------------------------------------------------------------------------------------


def draw_curves(found: dict, path: Path) -> None:
    """Hit ratio against slots, and recall against guesses."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (policy, row), color in zip(found["hit_ratio"].items(), COLORS, strict=True):
        style = {"linestyle": "--"} if policy == "belady" else {"marker": "o", "markersize": 4}
        left.plot(list(row), list(row.values()), color=color, label=policy, **style)
    left.set(title="Experts found in the cache", xlabel="slots a layer")
    for (ahead, row), style in zip(found["recall"].items(), ("-", "--", ":"), strict=False):
        label = f"{ahead} layer{'s' * (ahead > 1)} ahead"
        right.plot(range(1, len(row) + 1), row, style, color=COLORS[0], label=label)
    right.set(title="Experts among the guesses", xlabel="guesses a layer")
    for axes in (left, right):
        axes.set_ylim(0, 1.03)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.hashsalt": "offload"}):  # the same picture is the same bytes
        figure.savefig(path, metadata={"Date": None})


def draw_experts(found: dict, chosen: Tensor, weights: Tensor, slots: int, path: Path) -> None:
    """For some layers, which experts the last tokens chose, the darker, the more weight; and in grey squares those that
    lru with so many slots had before the token."""
    from matplotlib.figure import Figure

    count, experts = len(chosen), found["experts"]
    layers = sorted({round(n * (count - 1) / 3) for n in range(4)})
    figure = Figure(figsize=(10, 0.5 + len(layers) * (0.5 + 0.14 * min(experts, 32))), dpi=110, layout="constrained")
    for axes, layer in zip(figure.subplots(len(layers), 1, sharex=True, squeeze=False).flat, layers, strict=True):
        _, before = replay(chosen[layer].tolist(), experts, slots, "lru")
        cells = torch.zeros(chosen.shape[1], experts).scatter_(1, chosen[layer], weights[layer].float())[-SHOWN:]
        axes.imshow(cells.T.numpy(), cmap="Blues", aspect="auto", vmin=0, vmax=1, interpolation="nearest")
        squares = [(token, expert) for token, there in enumerate(before[-SHOWN:]) for expert in there]
        axes.scatter(*zip(*squares, strict=True), s=9, marker="s", facecolors="none", edgecolors=GREY, linewidths=0.7)
        axes.set_ylabel(f"layer {layer}", color=INK)
        axes.set_yticks(range(0, experts, max(1, experts // 8)))
        axes.spines[:].set_visible(False)
    axes.set_xlabel(f"the last {len(cells)} tokens; blue: chosen, squares: in one of {slots} slots (lru)")
    figure.savefig(path)


# Command ------------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> dict:
    """Do what the options ask for, and return the figures."""
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: it must be at least 2")
    if options.output_dir:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ValueError("pictures need matplotlib: pip install 'moe-fast[plot]'") from None
    checkpoint = open_checkpoint(options.checkpoint_path)
    text = read_text(options.text_file or EMBEDDED / "heldout.txt")
    device = pick_device(options.device)
    ids = load_tokenizer(checkpoint.directory).encode(text)[: options.tokens]
    if len(ids) < 2:
        raise ValueError(f"--text_file {options.text_file}: it holds no text to read")
    model = load_model(checkpoint, device)
    if len(ids) > model.args.max_position:
        raise ValueError(f"--tokens {len(ids)}: the model was made for {model.args.max_position} positions at most")
    if not any(hasattr(block.ffn, "experts") for block in model.layers):
        raise ValueError(f"{checkpoint.directory}: no layer of this model has experts")
    found, chosen, weights = study(model, ids)
    if options.output_dir:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        slots = min(2 * found["active"], found["experts"])
        draw_curves(found, options.output_dir / "offload_curves.svg")
        draw_experts(found, chosen, weights, slots, options.output_dir / "offload_experts.png")
    return found


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python scripts/study_offload.py --output_dir docs",
            "python scripts/study_offload.py --checkpoint_path DIR --text_file book.txt --tokens 5000 --json",
        ),
    )
    add = parser.add_argument
    add("--checkpoint_path", type=Path, metavar="DIR", help="converted checkpoint; default: the embedded model")
    add("--text_file", type=Path, metavar="FILE", help="what it reads; default: the embedded model's held-out text")
    add("--tokens", type=int, default=2000, metavar="N", help="so many of its first tokens, 2000")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--output_dir", type=Path, metavar="DIR", help="draw offload_curves.svg and offload_experts.png there")
    add("--json", action="store_true", help="print one JSON object after the tables")
    return parser


def command() -> int:
    options = build_parser().parse_args()
    found = run(options)
    print(tables(found))
    if options.json:
        print(json.dumps(found))
    return 0


def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    return world.attempt(command)


if __name__ == "__main__":
    sys.exit(main())
