"""Try forms of attention at far positions, in whole layers (to be removed)."""

import argparse
import time
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch

from benchmarks.fused_decode import Layers
from benchmarks.layer_times import load_case, read_case
from ops.attention import gqa, softmax
from ops.attention.ahead import Ahead
from ops.attention.gqa import Tile
from ops.products import dense
from parallel import process_group
from runtime import fused_layer
from runtime.fused_decode import FusedRunner

chosen = gqa.choose_tiles


def tiles(long=None, short=None):
    def choose(C, itemsize, Q, length):
        limit = 2 * max(16, 16384 // C)
        given = long if length > limit else short
        found = chosen(C, itemsize, Q, length)
        if given is None or length == 0:
            yield from found
            return
        block = max(16, given.block * 128 // C) if C > 128 else given.block
        yield Tile(block, given.stages, given.wide, given.beside)
        yield from found

    return [(gqa, "choose_tiles", choose)]


def ahead(prefetch, first, level=1):
    return [
        (fused_layer, "USE_AHEAD", level),
        (dense, "PREFETCH", prefetch),
        (dense, "START_FIRST", first),
    ]


def warps(n):
    return [(gqa, "WARPS", n)]


def few(n):
    return [(gqa, "FEW_PARTS", n)]


def most(n):
    return [(softmax, "MAX_PARTS", n)]


def merge(n):
    return [(gqa, "MERGE_WARPS", n)]


ROUTER = (fused_layer, "ROUTER_AHEAD", True)
OLD, HALF1, HALF2 = Tile(128, 3, True, 1), Tile(64, 3, True, 1), Tile(64, 3, True, 2)
ONE = [(softmax, "MAX_PARTS", 1)]
VARIANTS = {
    "before": tiles(OLD),
    "half 33": tiles(HALF1),
    "half 32": tiles(HALF1) + most(32),
    "half 32, merge 1 warp": tiles(HALF1) + most(32) + merge(1),
    "half 32, merge 1, first": tiles(HALF1) + most(32) + merge(1) + ahead(False, True),
    "half 33, first": tiles(HALF1) + ahead(False, True),
    "half 33, prefetch": tiles(HALF1) + ahead(True, False),
    "half 33, first, prefetch": tiles(HALF1) + ahead(True, True),
    "before, router": [*tiles(OLD), ROUTER],
    "half 33, router": [*tiles(HALF1), ROUTER],
    "half 33, merge 1 warp": tiles(HALF1) + merge(1),
    "half 64": tiles(HALF2),
    "before, first": tiles(OLD) + ahead(False, True),
    "before, prefetch": tiles(OLD) + ahead(True, False),
    "half 33, few 16": tiles(HALF1) + few(16),
    "half 33, router, first": [*tiles(HALF1), ROUTER, *ahead(False, True)],
    "half 32, merge 4 warps": tiles(HALF1) + most(32) + merge(4),
    "half 33, 4 warps": tiles(HALF1) + warps(4),
    "half 33, few 4, prefetch": tiles(HALF1) + few(4) + ahead(True, False),
}
SHORT = {
    "before": [],
    "128x2": tiles(None, Tile(128, 2)),
    "64x3": tiles(None, Tile(64, 3)) + ONE,
    "64x4": tiles(None, Tile(64, 4)) + ONE,
    "4 warps, 128x2": tiles(None, Tile(128, 2)) + warps(4),
    "16 warps": warps(16),
    "first": ahead(False, True, 2),
    "prefetch": ahead(True, False, 2),
    "first, prefetch": ahead(True, True, 2),
    "64x3, first": tiles(None, Tile(64, 3)) + ONE + ahead(False, True, 2),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", type=read_case)
    parser.add_argument("--position", type=int, nargs="+", default=[1000, 4000, 16000, 32000])
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    begin = time.time()
    device = process_group.start("cuda")
    torch.manual_seed(0)
    model = load_case(options.case, SimpleNamespace(device=device, cache=32768))
    print(f"model after {time.time() - begin:.0f} s", flush=True)
    positions = [100, 150, 250] if options.short else options.position
    variants = SHORT if options.short else VARIANTS
    names = options.only or list(variants)
    for run in range(3):
        for name in names:
            if time.time() - begin > options.seconds:
                return
            with ExitStack() as stack:
                for change in variants[name]:
                    stack.enter_context(mock.patch.object(*change))
                row = []
                try:
                    runner = FusedRunner(model)
                    for position in positions:
                        layers = Layers(model, runner, position)
                        blocks = [runner.layers[id(block)] for block in model.layers]
                        for one, other in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
                            attention = other.attention.attention
                            one.experts.ahead = None
                            if fused_layer.ROUTER_AHEAD and hasattr(attention, "fused_core"):
                                one.experts.ahead = Ahead(
                                    attention.cache.stored()[0], layers.context.positions
                                )
                        norm = layers.run().float().norm().item()
                        row.append(f"{layers.microseconds():7.2f} ({norm:.4f})")
                except Exception as error:
                    row.append(f"{type(error).__name__}: {str(error)[:150]}")
            print(f"{run} {name:28} {'  '.join(row)}  {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
