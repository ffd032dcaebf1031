"""Plan published models for cards that are not here; docs/gpus.md has the result.

    python -m tests.plan_table         # rewrites the block in docs/gpus.md

Each plan is that of `generate.py --model NAME --dry_run --gpu CARD`. The published shapes in
models/ replace config.json.
"""

import argparse
import dataclasses
from functools import cache
from pathlib import Path

import torch

from cli.generate_options import build_parser, check_options
from hub.describe import Described
from memory.card_plan import Plan, place_of, plan_setup, setup_of
from memory.plan import Setup
from models import ARCHITECTURES
from models.random_weights import number_format

PAGE = Path(__file__).parents[1] / "docs/gpus.md"
BEGIN, END = "<!-- begin: python -m tests.plan_table -->", "<!-- end -->"
CARDS = "RTX 4060", "RTX 3060", "RTX 4080", "RTX 4090", "RTX 5090", "H100"
MODELS = {  # name on the Hub -> published format
    "Qwen/Qwen3-30B-A3B": "bf16",
    "Qwen/Qwen3.6-35B-A3B": "bf16",
    "mistralai/Mixtral-8x7B": "bf16",
    "openai/gpt-oss-20b": "mxfp4",
    "openai/gpt-oss-120b": "mxfp4",
}


@cache
def setup_of_model(model: str) -> Setup:
    """Return what is known of a published model, for a chat."""
    args = ARCHITECTURES[model.partition("/")[2]]
    format = number_format(MODELS[model], args)
    source = Described(dataclasses.asdict(args), format, Path(model))
    return setup_of(parse(model, CARDS[0]), source)


def parse(model: str, card: str) -> argparse.Namespace:
    options = build_parser().parse_args(["--model", model, "--dry_run", "--gpu", card])
    check_options(options)
    return options


def plan(model: str, card: str) -> Plan:
    """Return the plan of generate.py."""
    options, setup = parse(model, card), setup_of_model(model)
    place = place_of(options, torch.device("cpu"))
    assert place is not None
    return plan_setup(options, place, setup)


def cell(found: Plan) -> str:
    """Return format, experts on the GPU if not all are, and predicted tokens/s."""
    part = ""
    if found.experts:
        part = f", {found.experts.slots} of {found.experts.experts.n_local}"
    return f"{found.format}{part}: {1 / found.seconds:.0f}"


def block() -> str:
    """Return the table of all models, and the lines of one."""
    plans = {model: [plan(model, card) for card in CARDS] for model in MODELS}
    first = next(iter(plans.values()))
    titles = [f"{p.place.card.name}, {p.place.card.memory // 10**9} GB" for p in first]
    rows = [["model", *titles], ["---"] * (1 + len(titles))]
    rows += [[model.partition("/")[2], *map(cell, found)] for model, found in plans.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    lines = ("\n".join(f"    {line}" for line in found.lines()) for found in first)
    return f"{table}\n\n" + "\n\n".join(lines)


def written(page: str) -> str:
    """Return the block of a page."""
    return page.partition(BEGIN)[2].partition(END)[0].strip("\n")


def main() -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{block()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
