"""Try forms of attention at far positions, in whole layers (to be removed)."""

import argparse
import ctypes
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch

from benchmarks.fused_decode import Layers
from benchmarks.layer_times import load_case, read_case
from ops import launch
from ops.attention import gqa, softmax
from ops.attention.gqa import Tile
from ops.products import dense
from parallel import process_group
from runtime import fused_layer
from runtime.fused_decode import FusedRunner

chosen = gqa.choose_tiles
POSITIONS = [100, 150, 250, 600, 1000, 2000, 3900, 4000, 8000, 16000, 32000]


def tiles(long=None, short=None):
    def choose(C, itemsize, Q, length):
        limit = 2 * max(16, 16384 // C)
        given = long if length > limit else short
        found = chosen(C, itemsize, Q, length)
        if given is None or length == 0:
            yield from found
            return
        block = max(16, given.block * 128 // C) if C > 128 else given.block
        yield Tile(block, given.stages, given.wide)
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


OLD, HALF, FIVE = Tile(128, 3, True), Tile(64, 3, True), Tile(64, 5, True)
ONE = [(softmax, "MAX_PARTS", 1)]
VARIANTS = {
    "before": tiles(OLD) + few(8) + merge(2),
    "before, merge 1": tiles(OLD) + few(8),
    "before, few 64": tiles(OLD),
    "five, few 8": tiles(FIVE) + few(8),
    "five, few 16": tiles(FIVE) + few(16),
    "five, few 64": tiles(FIVE),
    "five, few 64, merge 2": tiles(FIVE) + merge(2),
    "five, few 64, 32 parts": tiles(FIVE) + most(32),
    "five, few 64, prefetch": tiles(FIVE) + ahead(True, False),
    "five, few 64, both": tiles(FIVE) + ahead(True, True),
    "five, few 16, prefetch": tiles(FIVE) + few(16) + ahead(True, False),
    "before, few 64, prefetch": tiles(OLD) + ahead(True, False),
    "half, few 64": tiles(HALF),
    "32x8": tiles(Tile(32, 8, True)),
    "128x3 narrow": tiles(Tile(128, 3)),
}
SHORT = {
    "before": [],
    "first": ahead(False, True, 2),
    "prefetch": ahead(True, False, 2),
    "first, prefetch": ahead(True, True, 2),
}


CARVE = {
    "before": (-1, tiles(OLD) + few(8) + merge(2)),
    "before, carve": (100, tiles(OLD) + few(8) + merge(2)),
    "before, carve, first": (100, tiles(OLD) + few(8) + merge(2) + ahead(False, True, 2)),
    "before, carve, merge 1": (100, tiles(OLD) + few(8)),
    "before, carve 50": (50, tiles(OLD) + few(8) + merge(2)),
    "five, few 8, carve": (100, tiles(FIVE) + few(8)),
    "five, few 8, carve, first": (100, tiles(FIVE) + few(8) + ahead(False, True, 2)),
    "five, few 64, carve": (100, tiles(FIVE)),
    "five, few 64, carve, first": (100, tiles(FIVE) + ahead(False, True, 2)),
    "half, few 8, carve": (100, tiles(HALF) + few(8)),
    "half, few 64, carve": (100, tiles(HALF)),
    "32x2, few 16": (-1, tiles(Tile(32, 2, True)) + few(16)),
    "32x2, few 16, carve": (100, tiles(Tile(32, 2, True)) + few(16)),
    "before, carve, prefetch": (100, tiles(OLD) + few(8) + ahead(True, False, 2)),
}


def set_carveout(percent):
    """Set the preferred share of shared memory of all loaded kernels that need little."""
    library = ctypes.CDLL("libcuda.so.1")
    seen = 0
    modules = [module for name, module in sys.modules.items() if name.startswith("ops.")]
    values = {id(each): each for module in modules for each in vars(module).values()}
    for kernel in [each for each in values.values() if isinstance(each, launch.Kernel)]:
        for found in kernel.device_caches.values():
            for code in found[0].values():
                if getattr(code, "function", None) and code.metadata.shared <= 49152:
                    error = library.cuFuncSetAttribute(ctypes.c_void_p(code.function), 9, percent)
                    assert error == 0, error
                    seen += 1
    return seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", type=read_case)
    parser.add_argument("--position", type=int, nargs="+", default=POSITIONS)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--carve", action="store_true")
    options = parser.parse_args()
    begin = time.time()
    device = process_group.start("cuda")
    torch.manual_seed(0)
    model = load_case(options.case, SimpleNamespace(device=device, cache=32768))
    print(f"model after {time.time() - begin:.0f} s", flush=True)
    positions = [40, 100, 128, 150, 250] if options.short else options.position
    variants = SHORT if options.short else VARIANTS
    if options.carve:
        variants, positions = CARVE, [100, 150, 250, 1000, 2000, 3900, 4000, 16000, 32000]
    names = options.only or list(variants)
    for run in range(3):
        for name in names:
            if time.time() - begin > options.seconds:
                return
            with ExitStack() as stack:
                percent, changes = variants[name] if options.carve else (-1, variants[name])
                count = 0
                for change in changes:
                    stack.enter_context(mock.patch.object(*change))
                row = []
                try:
                    runner = FusedRunner(model)
                    for position in positions:
                        layers = Layers(model, runner, position)
                        runner.reach = runner.reach if options.short or options.carve else None
                        layers.run()
                        if options.carve:
                            count = set_carveout(percent)
                        row.append(f"{layers.microseconds():6.2f}")
                except Exception as error:
                    row.append(f"{type(error).__name__}: {str(error)[:150]}")
            print(f"{run} {name:28} {'  '.join(row)} {count}", flush=True)


if __name__ == "__main__":
    main()
