"""Tilings of products, tried while whole layers run around them: parts of benchmarks/tune.py.

Tuning           replaces the tilings that products choose, and notes them
tilings_near     tilings of a product of several tokens, those most like today's first
tasks_of         launches with these tilings, to be compiled side by side
tune_layers      times layers with tilings of one product after the other
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import inf, log2
from statistics import median
from unittest import mock

import torch
from torch import Tensor

from benchmarks.fused_decode import Layers
from ops.compile_ahead import collect
from ops.launch import KernelError, launch
from ops.products import dense, expert_tiles, experts, few_tokens, pipeline
from ops.products.expert_tiles import choose_few
from ops.products.few_tokens import FewTiles, choose_few_tiles, choose_plane_tiles
from ops.products.fragments import TILE, UNROLLED
from ops.products.planes import GROUP, plane_place
from ops.products.tilings import Place, Tiles, choose_tiles, place_of
from ops.products.weights import Weight

AnyTiles = Tiles | FewTiles

MAX_ERROR = 8e-3  # relative; results are rounded to bf16
MAX_TILE_REGISTERS = 96  # a lane's, for weights in flight
MAX_FEW_REGISTERS = 144  # a lane's, for weights and x in flight, and sums
MAX_WASTE = 0.35  # lanes that have no quad, of a row's chunks
MAX_HELD = 4  # chunks of x that staying programs have in registers
MIN_GAIN = 0.003  # a layer's
# Layers are timed with all tilings of a product; then with the BEST, ROUNDS times.
BEST = 5
ROUNDS = 3
TURNS = 2  # a product may want other tilings, once those after it have changed
# The parameter that is a kernel's result.
RESULTS = {"_multiply_each": "h", "_multiply_sum": "y", "_down_few": "y", "_multiply_tiles": "y"}


class Tuning:
    """Tilings that replace those that products choose, and the products seen."""

    def __init__(self) -> None:
        self.chosen: dict[Place, AnyTiles] = {}
        self.seen: dict[Place, Weight] = {}
        self.today: dict[Place, AnyTiles] = {}  # what they choose
        self.last: Place | None = None  # the product that is about to be launched

    def choose(
        self, weight: Weight, quads: int, loads: int, tokens: int = 1, summed: bool = False
    ) -> Tiles:
        place = place_of(weight, str(loads), tokens, quads)
        return self.note(place, weight, choose_tiles(weight, quads, loads, tokens, summed))

    def choose_dense(self, weight: Weight, tokens: int = TILE) -> FewTiles:
        place = place_of(weight, "dense", tokens)
        return self.note(place, weight, choose_few_tiles(weight, tokens))

    def choose_planes(self, weight: Weight) -> FewTiles:
        return self.note(plane_place(weight), weight, choose_plane_tiles(weight))

    def choose_of_experts(self, weight: Weight, gated: bool, tile: int, tokens: int) -> FewTiles:
        place = place_of(weight, f"tiles {1 + gated}", tokens)
        return self.note(place, weight, choose_few(weight, gated, tile, tokens))

    def note(self, place: Place, weight: Weight, today: AnyTiles) -> AnyTiles:
        self.seen[place], self.today[place], self.last = weight, today, place
        return self.chosen.get(place) or today

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Within, products ask this object for their tilings."""
        with ExitStack() as stack:
            for module, name, choice in (
                (pipeline, "choose_tiles", self.choose),
                (few_tokens, "choose_few_tiles", self.choose_dense),
                (few_tokens, "choose_plane_tiles", self.choose_planes),
                (expert_tiles, "choose_few", self.choose_of_experts),
            ):
                stack.enter_context(mock.patch.object(module, name, choice))
            yield

    def results(self, layers: Layers) -> dict[Place, Tensor]:
        """Run layers -> the first result of each product, whose x no later product has changed.

        States are empty before: recurrent layers compute another result after each run. Raises
        RuntimeError for a result of another width: `replaced` does not know who chose its tilings.
        """
        found: dict[Place, Tensor] = {}
        for state in layers.model.states:
            state.reset()

        def note(kernel, grid, *args, **options) -> None:
            launch(kernel, grid, *args, **options)
            name = RESULTS.get(kernel.__name__)
            if name and self.last is not None and self.last not in found:
                result, out = args[kernel.arg_names.index(name)], self.last.out
                if result.shape[-1] not in (out, out // 2):  # half: gate and up
                    raise RuntimeError(f"{list(result.shape)} is no result of {self.last}")
                found[self.last] = result.to(torch.float32, copy=True)
            self.last = None

        with ExitStack() as stack:
            for module in (dense, experts, few_tokens, expert_tiles):
                stack.enter_context(mock.patch.object(module, "launch", note))
            layers.run()
        return found

    def times(
        self, measure: Callable[[], float], place: Place, tilings: list[AnyTiles], rounds: int
    ) -> dict[AnyTiles, float]:
        """Return what `measure` gives with each tiling of a product, the median of rounds."""
        before, found = dict(self.chosen), []
        for tiles in tilings * rounds:  # in turn, so that all see the same clocks
            self.chosen[place] = tiles
            found.append(measure())
        self.chosen = before
        return {tiles: median(found[n :: len(tilings)]) for n, tiles in enumerate(tilings)}


def tilings_of(quads: int, loads: int) -> list[Tiles]:
    """Return tilings for a product, in an order drawn once. loads: 2 for gate and up, else 1.

    quads: of x, to which its chunks add up to MAX_WASTE. One to four chunks are in flight, or as
    many as registers allow. Programs stay if all of x fits in registers.
    """
    found = []
    for lanes in (32, 64, 128, 256):
        chunks = -(-quads // lanes)
        if lanes > max(quads, 32) or chunks * lanes > max(quads * (1 + MAX_WASTE), 32):
            continue
        for rows in (1, 2, 4, 8, 16):
            most = min(chunks, MAX_TILE_REGISTERS // (4 * rows * loads))
            for depth in range(1, most + 1):
                if 4 < depth < most:
                    continue
                found.append(Tiles(rows, lanes, depth, lanes // 32))
                if chunks <= MAX_HELD and chunks % depth == 0:
                    found.append(Tiles(rows, lanes, depth, lanes // 32, stay=True))
    random.Random(0).shuffle(found)
    return found


def few_tilings(weight: Weight, place: Place, tokens: int) -> list[FewTiles]:
    """Return tilings on tensor cores: steps in flight as they are, those of x at least 1.

    Programs of a dense product take all tokens, or TILE of them; others the pairs of a tile.
    """
    loads, is_dense = (2 if place.work == "tiles 2" else 1), place.work == "dense"
    rows_of = {16, 32}
    if is_dense:  # and as many that each multiprocessor has one program, or two
        even = (-(-weight.out // (n * weight.multiprocessors)) for n in (1, 2))
        rows_of |= {rows for rows in even if 16 < rows < 32}
    shares = {TILE, few_tokens.BLOCK} if is_dense and tokens % TILE == 0 else {few_tokens.BLOCK}
    found = {}
    for rows, warps, depth, x_depth, most in itertools.product(
        sorted(rows_of), (1, 2, 4, 8, 16), (1, 2, 3, 4, 6, 8, 0), (1, 2, 4), sorted(shares)
    ):
        tiles = FewTiles(rows, warps, depth, most, x_depth)
        own = min(tokens, most) if is_dense else TILE
        s = few_tokens.settings_of(weight, tiles, own)
        words = 4 * s["vec"] * warps
        steps, n = -(-s["words"] // words), -(-own // TILE)
        held = loads * s["depth"] * s["rows"] // 8 * s["vec"]
        held += s["x_depth"] * weight.fields * s["vec"] * n // 2 + loads * s["rows"] * n // 2
        if steps * words > s["words"] * (1 + MAX_WASTE) or held > MAX_FEW_REGISTERS:
            continue
        tiles = replace(tiles, depth=s["depth"], x_depth=s["x_depth"])
        can_loop = not is_dense and s["depth"] < steps <= UNROLLED
        caps = (0,) if is_dense else (0, 64)
        for loop, registers in itertools.product((False, True)[: 1 + can_loop], caps):
            key = rows, warps, s["depth"], s["x_depth"], own, loop, registers
            found[key] = replace(tiles, loop=loop, registers=registers)
    return list(found.values())


def plane_tilings(weight: Weight) -> list[FewTiles]:
    """Return tilings of a product of `Planes`: whole programs, and a warp has whole groups."""
    groups = weight.width // GROUP
    return [
        FewTiles(rows, warps)
        for rows, warps in itertools.product((16, 32, 48, 64), (1, 2, 4, 8, 16))
        if weight.out % rows == groups % warps == 0
    ]


def distance(one: AnyTiles, other: AnyTiles) -> float:
    """Return how much two tilings differ: by the ratio of their numbers, and if one stays."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("rows", "warps", "depth")]
    if isinstance(one, FewTiles):
        pairs += [(one.x_depth, other.x_depth), (one.tokens, other.tokens)]
        pairs += [(2 + one.loop, 2 + other.loop)]
    else:
        pairs += [(one.lanes, other.lanes), (1 + one.stay, 1 + other.stay)]
    pairs += [(2 + (one.registers > 0), 2 + (other.registers > 0))]
    return sum(abs(log2((a or 8) / (b or 8))) for a, b in pairs)


def tilings_near(
    today: AnyTiles, weight: Weight, place: Place, tokens: int, tries: int
) -> list[AnyTiles]:
    """Return today's tiling of a product, then those most like it."""
    if place.work == "planes":
        as_is, others = today, [tiles for tiles in plane_tilings(weight) if tiles != today]
    elif isinstance(today, FewTiles):
        s = few_tokens.settings_of(weight, today, min(tokens, today.tokens))
        as_is = replace(today, depth=s["depth"], x_depth=s["x_depth"])
        others = [tiles for tiles in few_tilings(weight, place, tokens) if tiles != as_is]
    else:
        as_is, loads = today, int(place.work)
        others = tilings_of(place.quads, loads)
        if weight.parts[0].dim() == 2:  # programs of several tokens have one tile
            others = [tiles for tiles in others if not tiles.stay]
        narrow = [tiles for tiles in others if tiles.lanes == 32 and not tiles.stay]
        others += [replace(t, registers=n) for t in narrow for n in (96, 128)]
        others = [tiles for tiles in others if tiles != today]
    random.Random(0).shuffle(others)
    return [today, *sorted(others, key=lambda tiles: distance(tiles, as_is))[:tries]]


def tasks_of(
    tuning: Tuning, run: Callable[[], object], tilings: dict[Place, list[AnyTiles]]
) -> list[str]:
    """Return the launches of layers with the tilings that are tried, for `compile_ahead`."""
    tasks: dict[str, None] = {}
    with tuning.replaced():
        for turn in itertools.zip_longest(*tilings.values()):  # one of each product at a time
            of_places = zip(tilings, turn, strict=True)
            tuning.chosen = {place: tiles for place, tiles in of_places if tiles}
            tasks |= dict.fromkeys(collect(run))
        tuning.chosen = {}
    return list(tasks)


def tune_layers(
    tuning: Tuning, layers: Layers, tilings: dict[Place, list[AnyTiles]], until: float
) -> dict[Place, AnyTiles]:
    """Time layers with tilings of one product after the other -> those that make them faster.

    tilings: of each product, today's first. A tiling with another result is left out. A product
    that is faster keeps its tiling while the others are tried. until: no product is begun after
    this time (time.monotonic).
    """

    def measure() -> float:
        try:
            return layers.microseconds(warmups=0)  # `is_right` has run it
        except (KernelError, ValueError):  # does not fit, or is none for these tokens
            return inf

    with tuning.replaced():
        expected = tuning.results(layers)
        print(f"a layer: {layers.microseconds():.2f} us", flush=True)
        for place in list(tilings) * TURNS:
            if time.monotonic() > until:
                print("no time for further products")
                break
            today, before = tilings[place][0], tuning.chosen.get(place)
            right = [t for t in tilings[place] if is_right(tuning, layers, place, t, expected)]
            times = tuning.times(measure, place, right, 1)
            others = sorted((tiles for tiles in times if tiles != today), key=times.__getitem__)
            tilings[place] = [today, *others[:BEST]]
            times = tuning.times(measure, place, tilings[place], ROUNDS)
            print(f"a layer, {place.group}, {place.shape}, {len(right)} tilings:")
            for tiles, us in times.items():
                mark = " (kept)" if tiles == before else ""
                print(f"  {us:7.2f} us  {tiles}{mark}", flush=True)
            best = min(times, key=times.__getitem__)
            tuning.chosen.pop(place, None)
            if times[best] < times[today] * (1 - MIN_GAIN):
                tuning.chosen[place] = best
        found, tuning.chosen = tuning.chosen, {}
        us = []
        for chosen in ({}, found) * ROUNDS:
            tuning.chosen = chosen
            us.append(layers.microseconds())
        print(f"a layer: {median(us[::2]):.2f} us, then {median(us[1::2]):.2f} us", flush=True)
    return found


def is_right(
    tuning: Tuning, layers: Layers, place: Place, tiles: AnyTiles, expected: dict[Place, Tensor]
) -> bool:
    """Whether a product has today's result with a tiling; prints why not."""
    before, tuning.chosen = tuning.chosen, {place: tiles}
    try:
        got, want = tuning.results(layers)[place], expected[place]
        error = ((got - want).norm() / want.norm()).item()
        if not error < MAX_ERROR:
            print(f"  WRONG {place.group} {tiles}: relative error {error:.1e}")
        return error < MAX_ERROR
    except (KernelError, ValueError) as why:
        print(f"  {place.group} {tiles}: {str(why)[:100]}")
        return False
    finally:
        tuning.chosen = before
