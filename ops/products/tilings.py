"""Weights as the kernels of one token read them, and how these divide a product among programs.

A tile is some rows of the result. A program multiplies it in chunks: LANES neighboring quads (16
bytes of codes) of each of its rows.
"""

from dataclasses import dataclass

from ops.launch import triton
from ops.products.weights import BITS, Weight

TILE_REGISTERS = 96  # a lane's, for weights in flight
RESIDENT = 16  # warps of staying programs on a multiprocessor, with 128 registers a lane
MANY_ROWS = 76  # more rows of 4 bits than a multiprocessor computes at once, at 8 rows a program

# Tilings ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """How a product divides its work among programs. benchmarks/moe_phases.py measures some."""

    rows: int = 8  # rows of the result that a program computes, a power of two up to 32
    lanes: int = 32  # quads of a row in a chunk, a power of two from 32 on
    depth: int = 0  # chunks in flight; 0: all
    warps: int = 4
    stay: bool = False  # only as many programs as run at once; each computes several tiles
    registers: int = 0  # most registers of a lane; 0: the compiler's choice

    def __post_init__(self) -> None:
        if self.rows > 32:  # lanes of a warp, which share their sums
            raise ValueError(f"a program of {self.rows} rows: 32 are the most")

    def __str__(self) -> str:
        text = f"rows {self.rows} lanes {self.lanes} x {self.depth or 'all'} warps {self.warps}"
        text += ", staying" if self.stay else ""
        return text + (f", {self.registers} registers" if self.registers else "")

    @property
    def options(self) -> dict:
        """Options of `launch` for a kernel with these tiles."""
        return dict(warps=self.warps, stages=1, registers=self.registers)


def chunks_of(quads: int, tiles: Tiles) -> tuple[int, int]:
    """Return the chunks of a row, and how many are in flight."""
    chunks = triton.cdiv(quads, tiles.lanes)
    depth = min(tiles.depth or chunks, chunks)
    # The next tile's first chunks take the registers of this one's last ones, in order.
    while tiles.stay and chunks % depth:
        depth -= 1
    return chunks, depth


def programs_of(tiles: Tiles, count: int, multiprocessors: int, pairs: int = 1) -> tuple[int, int]:
    """Return how many programs compute `count` tiles of each pair, and the tiles of a program."""
    resident = RESIDENT * multiprocessors // tiles.warps
    each = triton.cdiv(count * pairs, resident) if tiles.stay else 1
    return triton.cdiv(count, each), each


def choose_tiles(weight: Weight, quads: int, loads: int) -> Tiles:
    """Return how to divide a product with x of `quads` quads. loads: 2 for gate and up, else 1.

    As measured on an H200, in whole layers (docs/log/small_experts.md). Wide chunks waste the end
    of x, and exchange x between warps. Many rows a program use what it prepares of x more often,
    but then fewer programs run at once.
    """
    if loads == 2:
        return _choose_gate_up(weight, quads)
    if weight.kind == "bf16":
        return _choose_bf16(weight.out, quads, weight.multiprocessors)
    return _choose_packed(weight, quads)


def _lanes_for(quads: int, widest: int, spare: int) -> int:
    """Return the largest number of lanes up to `widest` that wastes at most `spare` quads."""
    return next((n for n in (256, 128, 64) if n <= widest and -quads % n <= spare), 32)


def _tiles(rows: int, lanes: int, quads: int, most: int) -> Tiles:
    """Return tiles with up to `most` chunks in flight, a number that divides a row's chunks."""
    chunks = triton.cdiv(quads, lanes)
    depth = next(n for n in range(min(chunks, most), 0, -1) if chunks % n == 0)
    return Tiles(rows, lanes, depth, lanes // 32)


def _choose_gate_up(weight: Weight, quads: int) -> Tiles:
    """Nothing is loaded before the kernel starts: many small programs, which all load at once."""
    kind, bits = weight.kind, BITS[weight.kind]
    if kind == "mxfp4":  # instructions bind it: a program's beginning counts
        return Tiles(2, 32, 1, 1, stay=True)
    if bits == 4:
        lanes = _lanes_for(quads, 64 if quads > 64 else 32, quads // 3)
        if kind == "int4" and lanes == 32:
            # The compiler would use fewer registers, and start loads later.
            return Tiles(4, 32, 1, 1, registers=128 if weight.out > 1024 else 0)
        return _tiles(4, lanes, quads, 2)
    if kind == "int8":
        return _tiles(4, 64 if weight.out <= 1024 and quads % 64 == 0 else 32, quads, 3)
    widest = 64 if quads <= (256 if bits == 16 else 64) else 128
    lanes = _lanes_for(quads, min(widest, max(32, quads // 2)), quads // 8)
    return _tiles(2, lanes, quads, TILE_REGISTERS // 16)


def _choose_bf16(out: int, quads: int, multiprocessors: int) -> Tiles:
    """Return the tiles of `down` in bf16."""
    many = MANY_ROWS * multiprocessors
    if quads > 2048:
        return _tiles(2, 256, quads, 7)
    if quads > 1024:
        return Tiles(2, 64, 8, 2)
    if quads > 512:
        lanes = 128 if quads <= 768 else 256
        return _tiles(4, lanes, quads, 3 if triton.cdiv(quads, lanes) % 3 == 0 else 1)
    if quads > 256 and out < 4000 and quads % 64 == 0:
        return _tiles(2, 64, quads, 8)
    if quads > 256 and out < many and quads % 128:
        return _tiles(4, 32, quads, 4)
    if 6000 < out < many and quads <= 256:
        return _tiles(4, _lanes_for(quads, 64, quads // 8), quads, 2)
    rows = max(1, min(8, triton.next_power_of_2(out // multiprocessors + 1) // 2))
    return _tiles(rows, _lanes_for(quads, min(256, max(32, quads // 2)), quads // 8), quads, 3)


def _choose_packed(weight: Weight, quads: int) -> Tiles:
    """Return the tiles of `down` in 8 and 4 bits."""
    narrow, many = BITS[weight.kind] == 4, weight.out > MANY_ROWS * weight.multiprocessors
    registers, rows = TILE_REGISTERS, 8
    if weight.kind == "mxfp4" and 256 < quads <= 512:
        return Tiles(8, 128, 1, 4, stay=True)
    if weight.kind == "int4" and quads > 512:
        return Tiles(8, 128, 1, 4)
    if quads > 512:
        return _tiles(4, _lanes_for(quads, 64 if narrow else 128, quads // 8), quads, 2)
    if weight.kind == "int4" and 64 < quads <= 256 and not many:
        lanes = 128 if quads <= 128 else 256
        return Tiles(8, lanes, 1, lanes // 32)
    if weight.kind == "int8" and quads <= 128 and not many:
        return _tiles(4, 32, quads, 4)
    widest = (128 if quads > 256 else 64) if narrow else min(256, max(32, quads // 2))
    lanes = _lanes_for(quads, widest, quads // (3 if narrow else 8))
    if weight.kind == "int8" and quads > 256 and lanes < 128:
        return Tiles(8, 256, 2, 8)
    if narrow and many and quads <= lanes:
        rows = 16
    # Two scales a group, or the table of e2m1 and its look-ups, take registers, too.
    if weight.kind in ("mxfp4", "hqq"):
        rows, registers = rows // 2, registers // 2
    chunks = triton.cdiv(quads, lanes)
    if registers < 4 * rows * chunks < 2 * registers:
        rows //= 2
    return _tiles(rows, lanes, quads, max(1, registers // (4 * rows)))
