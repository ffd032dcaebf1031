"""How products divide their work among programs: a table, and a default beside it.

Wide chunks waste the end of x, and exchange x between warps. Many rows a program use what it
prepares of x more often, but then fewer programs run at once.

tilings.json has the measured tiles, by GPU class, group, and shape (`Place`); benchmarks/tune.py
measures and writes them. A shape or a GPU that is not there gets the default of its kind: here for
products in registers, in few_tokens.py and expert_tiles.py for those on tensor cores.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ops.gpu import Gpu
from ops.products.weights import GGUF, TWO_BITS, Weight
from ops.sizes import cdiv, pow2

TABLE = Path(__file__).with_name("tilings.json")
RESIDENT = 16  # warps of staying programs on a multiprocessor, with 128 registers a lane
LONG = 512  # quads of a row
MANY_ROWS = 128  # for each multiprocessor: a head has them
HELD = 4  # most chunks of x that a staying program holds


@dataclass(frozen=True)
class Tiles:
    """How a product divides its work among programs."""

    rows: int = 8  # rows of the result that a program computes, a power of two up to 32
    lanes: int = 32  # quads of a row in a chunk, a power of two from 32 on
    depth: int = 0  # chunks in flight; 0: all
    warps: int = 4
    stay: bool = False  # only as many programs as run at once; each computes several tiles
    registers: int = 0  # most registers of a lane; 0: the compiler's choice

    def __post_init__(self) -> None:
        if self.rows > 32:  # lanes of a warp, which share their sums
            raise ValueError(f"a program of {self.rows} rows: 32 are the most")

    # Options of `launch` for a kernel with these tiles.
    options = property(lambda s: dict(warps=s.warps, stages=1, registers=s.registers))


@dataclass(frozen=True)
class Default:
    """The tiles of a kind for any shape. Chunks in flight take up to 96 registers of a lane."""

    rows: int
    lanes: int  # most
    depth: int  # most
    waste: int = 8  # a chunk of more lanes may waste this part of x: 1 / 8
    chunks: int = 2  # fewest of a row
    long_rows: int = 0  # rows of a tile if x is longer than LONG; 0: the same
    stay: bool = False
    registers: int = 0  # of programs of one warp, which would start loads later with fewer

    def tiles(self, quads: int, wide: bool = False) -> Tiles:
        """Return the tiles of a product with x of `quads` quads. wide: three chunks are one."""
        most = min(self.lanes, max(32, quads // self.chunks))
        fitting = (n for n in (256, 128, 64) if n <= most and -quads % n <= quads // self.waste)
        lanes = next(fitting, 32)
        rows = self.long_rows if self.long_rows and quads > LONG else self.rows
        count = cdiv(quads, lanes)
        if wide and count == 3 and quads <= 256:
            lanes, count = pow2(quads), 1
        depth = next(n for n in range(min(count, self.depth), 0, -1) if count % n == 0)
        # More chunks of x than two are held in more registers: the compiler's choice, no spills.
        registers = self.registers if lanes == 32 and count <= 2 else 0
        return Tiles(rows, lanes, depth, lanes // 32, self.stay, registers)


# By kind, and loads: 2 of gate and up, else 1. Gate and up load nothing before the kernel starts:
# many small programs, which all load at once. In mxfp4 instructions bind, so that a program's
# beginning counts. Two scales a group (hqq), or the table of e2m1, take registers, too.
DEFAULTS = {
    ("bf16", 1): Default(8, 256, 3, long_rows=4),
    ("bf16", 2): Default(2, 128, 6, waste=3),
    ("int8", 1): Default(8, 128, 3, long_rows=4),
    ("int8", 2): Default(4, 32, 3),
    ("fp8", 1): Default(8, 128, 3, long_rows=4),
    ("fp8", 2): Default(2, 128, 3, waste=3),
    ("fp8b", 1): Default(8, 128, 3, long_rows=4),
    ("fp8b", 2): Default(2, 128, 3, waste=3),
    ("int4", 1): Default(8, 256, 3, waste=3, chunks=1),
    ("int4", 2): Default(4, 64, 1, waste=3, registers=128),
    ("mxfp4", 1): Default(4, 64, 3, waste=3, chunks=1),
    ("mxfp4", 2): Default(4, 32, 1, stay=True),
    ("hqq", 1): Default(4, 64, 3, waste=3, chunks=1),
    ("hqq", 2): Default(4, 64, 2, waste=3),
    # Not measured. x takes twice the registers of hqq's. Two rows would be as many numbers as pairs
    # of x in a load, so that Triton gives lanes others' scales.
    **{(kind, 1): Default(4, 64, 2, waste=3, chunks=1) for kind in TWO_BITS},
    **{(kind, 2): Default(4, 64, 1, waste=3, chunks=1) for kind in TWO_BITS},
    ("q8_0", 1): Default(8, 128, 3, chunks=1, long_rows=4),
    ("q8_0", 2): Default(2, 64, 4, chunks=4, stay=True),
    # In layers of Qwen3-30B-A3B the best of 41 for each of these, or nearly so.
    **{(kind, 1): Default(8, 128, 3, waste=3, chunks=1) for kind in ("nvfp4", *GGUF[1:])},
    **{(kind, 2): Default(2, 64, 2, waste=3, stay=True) for kind in ("nvfp4", *GGUF[1:])},
}
# A head's programs stay, so that fewer of them norm x and make integers of it.
HEADS = dict.fromkeys(
    ("q4_k", "q5_k", "q6_k"),
    Default(8, 128, 1, waste=3, chunks=1, stay=True),  # q5_k: not measured
)
# Kinds with bits above the codes: three chunks of 8 rows of a dense weight would spill 20 to 129
# registers a lane, and take 1 to 37 % longer than one chunk (docs/log/formats.md).
WIDE = "q5_k", "q6_k"
# Sums over experts of several tokens, by `Place.tokens`, 8 of all above 4: many programs, for which
# narrow chunks are better. Other kinds and numbers have the tiles of one token.
SEVERAL: dict[str, dict[int, Tiles]] = {
    "int4": {
        2: Tiles(8, 128, 1, 4),
        4: Tiles(8, 64, 1, 2, registers=128),
        8: Tiles(16, 64, 1, 2, registers=128),
    },
    **{kind: dict.fromkeys((4, 8), Tiles(8, 64, 1, 2)) for kind in ("mxfp4", "nvfp4", *GGUF[1:])},
    "q4_k": dict.fromkeys((4, 8), Tiles(16, 64, 1, 2)),
    "q8_0": dict.fromkeys((4, 8), Tiles(8, 64, 2, 2)),
}


def gpu_class(gpu: Gpu) -> str:
    """Return the name of a GPU's class in the table."""
    return "sm_{}{}".format(*gpu.capability)


@cache
def measured() -> dict[str, dict[str, dict[str, list[int]]]]:
    """Return the table: GPU class -> group -> shape -> fields of `Tiles` or `FewTiles`."""
    return json.loads(TABLE.read_text())


class Place(NamedTuple):
    """Where the table has a product's tiles."""

    kind: str
    work: str  # loads, "1" or "2", of products in registers; on tensor cores as their choice says
    tokens: int  # a power of two: as many tokens, or fewer, but more than half of it
    out: int  # rows of the weight
    quads: int  # of x

    shape = property(lambda s: f"{s.out}x{s.quads}")

    @property
    def group(self) -> str:
        several = f" of {self.tokens}" if self.tokens > 1 else ""
        return f"{self.kind} {self.work}{several}"


def place_of(weight: Weight, work: str, tokens: int, quads: int = 0) -> Place:
    """Return where the tiles of a product are. quads: of x, if it is longer than a row."""
    kind = weight.kind
    if work in ("1", "2") and kind == "hqq" and len(weight.parts) == 3:
        kind = "int4"  # uint4 takes its registers, not those of hqq with its steps
    count = pow2(tokens)
    return Place(kind, work, count, weight.out, quads or weight.quads)


def measured_fields(weight: Weight, place: Place) -> list[int] | None:
    """Return the fields of the measured tiles on a weight's GPU, if there are some."""
    return measured().get(gpu_class(weight.gpu), {}).get(place.group, {}).get(place.shape)


def choose_tiles(
    weight: Weight, quads: int, loads: int, tokens: int = 1, summed: bool = False
) -> Tiles:
    """Return how to divide a product with x of `quads` quads. loads: 2 for gate and up, else 1.

    summed: experts are. The sum of several tokens has more programs, which are smaller.
    """
    place = place_of(weight, str(loads), tokens, quads)
    found = measured_fields(weight, place)
    if found is None and tokens > 1:
        if summed and (tiles := SEVERAL.get(place.kind, {}).get(min(place.tokens, 8))):
            return tiles
        found = measured_fields(weight, place._replace(tokens=1))
    if found is None:
        head = HEADS.get(place.kind) if tokens == loads == 1 and has_many_rows(weight) else None
        if head and quads <= HELD * head.lanes:
            return head.tiles(quads)
        default = DEFAULTS[place.kind, loads]
        wide = loads == 1 and not summed and place.kind in WIDE and default.rows == 8
        return default.tiles(quads, wide)
    rows, lanes, depth, warps, stay, registers = [*found, 0, 0][:6]
    return Tiles(rows, lanes, depth, warps, bool(stay), registers)


def has_many_rows(weight: Weight) -> bool:
    """Whether a weight has many rows for each multiprocessor, as heads have."""
    return weight.out >= MANY_ROWS * weight.multiprocessors


def depth_of(quads: int, tiles: Tiles) -> int:
    """Return the chunks in flight."""
    chunks = cdiv(quads, tiles.lanes)
    depth = min(tiles.depth or chunks, chunks)
    # The next tile's first chunks take the registers of this one's last ones, in order.
    while tiles.stay and chunks % depth:
        depth -= 1
    return depth


def programs_of(tiles: Tiles, count: int, multiprocessors: int, pairs: int) -> tuple[int, int]:
    """Return how many staying programs compute `count` tiles of each pair, and the tiles of one."""
    each = cdiv(count * pairs, RESIDENT * multiprocessors // tiles.warps)
    return cdiv(count, each), each
