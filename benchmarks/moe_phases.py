"""Speed of the phases of one token's MoE layer: ops/products/experts.py in several tilings, and today's.

    python benchmarks/moe_phases.py --json phases.json

A phase is one kernel: the gate and up product of given experts, the down product, wqkv with its
norm, and wo with its residual. Each runs in a CUDA graph of 48 layers, whose weights are distinct,
so that L2 holds none of them. Every tiling is first checked against unpacked weights in fp64, in
one process per case, which also fills Triton's cache. The table is sorted by time for each phase.

Column `bound`: bytes / 4.4 TB/s. Column `expected`: that plus 1.6 us, the cost of a phase in a
graph with PDL on an H200. Expected us, gate_up / down: Qwen3-30B-A3B int4 4.5 / 3.1, int8 7.3 /
4.5, bf16 13.0 / 7.3; OLMoE bf16 16.9 / 9.2; gpt-oss-20b mxfp4 9.6 / 5.6; Mixtral int4 29.1 / 15.4.

`experts` is gate_up and down in turn. `today` is the compiled `Experts.forward`.
benchmarks/fused_decode.py times the router, with a whole layer around it.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cuda_timing import graph_seconds, require_gpu
from benchmarks.gemv4 import random_parts
from cli.parser import Parser
from formats import FORMATS, PLAIN
from formats.packed import PackedExpertLinear
from model import Experts, swiglu
from models import ARCHITECTURES
from ops.inductor import configure_inductor
from ops.products import experts as moe_decode
from ops.products.tilings import Tiles
from ops.products.weights import Weight, packed_weight, plain_weight

CASES = (
    ("Qwen3-30B-A3B", "int4"),
    ("Qwen3-30B-A3B", PLAIN),
    ("Qwen3-30B-A3B", "int8"),
    ("gpt-oss-20b", "mxfp4"),  # its shapes, with plain SwiGLU and no biases
    ("OLMoE-1B-7B", PLAIN),
    ("Mixtral-8x7B", "int4"),
)
LAYERS = 48
MAX_BYTES = 12e9  # a case's weights: fewer layers are distinct, if they are large
BANDWIDTH = 4.4e12  # bytes/s
PHASE_SECONDS = 1.6e-6  # what a phase costs beside its bytes
MAX_ERROR = 8e-3  # relative; results are rounded to bf16
MAX_TILE_REGISTERS = 96  # a lane's, for weights in flight
MAX_WASTE = 0.35  # lanes that have no quad, of a row's chunks
MAX_HELD = 4  # chunks of x that staying programs have in registers
TRIES = 10  # tilings of a phase
BFLOAT16 = {"dtype": torch.bfloat16, "device": "cuda"}


@dataclass
class Phase:
    """One kernel: its calls, what it must return, and the tilings to try."""

    name: str
    run: Callable  # (argument, Tiles, pdl) -> result of several parts
    arguments: list
    expected: Tensor  # fp64, of the first argument
    nbytes: int  # that one call reads
    tilings: list[Tiles]

    def error(self, tiles: Tiles, pdl: bool) -> float:
        got = self.run(self.arguments[0], tiles, pdl).double()
        got = got.sum(0) if got.dim() > self.expected.dim() else got
        return ((got - self.expected).norm() / self.expected.norm()).item()

    def seconds(self, tiles: Tiles, pdl: bool) -> float:
        return graph_seconds(lambda argument: self.run(argument, tiles, pdl), self.arguments)


def tilings_of(quads: int, loads: int) -> list[Tiles]:
    """Return tilings for a product, in an order drawn once. loads: 2 for gate and up, else 1.

    quads: of a row of x, to which its chunks add up to MAX_WASTE. One to four chunks are in flight,
    or as many as registers allow. Programs stay if all of x fits in registers.
    """
    found = []
    for lanes in (32, 64, 128, 256):
        chunks = -(-quads // lanes)
        if lanes > quads or chunks * lanes > quads * (1 + MAX_WASTE):
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


def tilings_to_try(weight: Weight, quads: int, loads: int) -> list[Tiles]:
    """Return the tiling of `choose_tiles`, and some others."""
    chosen = moe_decode.choose_tiles(weight, quads, loads)
    others = [tiles for tiles in tilings_of(quads, loads) if tiles != chosen]
    return [chosen, *others[:TRIES]]


class Weights:
    """Random weights [n, out, in] of one format, for the kernels and for the reference."""

    def __init__(self, mode: str, shape: tuple[int, int, int]):
        self.mode, self.width = mode, shape[-1]
        if mode == PLAIN:
            plain = torch.empty(shape, **BFLOAT16).normal_(0, shape[-1] ** -0.5)
            self.parts, self.kernel = {"weight": plain}, plain_weight(plain)
            self.group = 0
        else:
            format = FORMATS[mode]
            self.group = format.choose_group(shape[-1], None)
            self.parts = random_parts(format, shape, self.group)
            parts = list(self.parts.values())
            self.kernel = packed_weight(parts, format.kind, self.group)
        self.nbytes = sum(part[:1].nbytes for part in self.parts.values())

    def unpack(self, index: Tensor) -> Tensor:
        """Return the weights of an index, fp64 [..., out, in]."""
        chosen = {name: part[index] for name, part in self.parts.items()}
        plain = chosen["weight"] if self.mode == PLAIN else self.unpack_parts(chosen)
        return plain.double()

    def unpack_parts(self, parts: dict[str, Tensor]) -> Tensor:
        return FORMATS[self.mode].unpack(parts, self.group)

    def single(self, n: int) -> Weight:
        """Return one of the weights as a dense one."""
        kernel = self.kernel
        return Weight(tuple(part[n] for part in kernel.parts), kernel.kind, kernel.group)


class Case:
    """One model's MoE layer in one format."""

    def __init__(self, arch: str, mode: str, layers: int = LAYERS):
        self.args, self.mode, args = ARCHITECTURES[arch], mode, ARCHITECTURES[arch]
        D, I, A = args.dim, args.intermediate, args.n_active
        bytes_each = 3 * D * I * (2 if mode == PLAIN else FORMATS[mode].bits / 8 + 0.04)
        distinct = max(2, min(layers, int(MAX_BYTES / bytes_each / A)))
        self.w13 = Weights(mode, (distinct * A, 2 * I, D))
        self.w2 = Weights(mode, (distinct * A, D, I))
        choices = torch.randperm(distinct * A, device="cuda").view(distinct, 1, A)
        self.choices = [choices[layer % distinct] for layer in range(layers)]
        self.x = torch.randn(1, D, **BFLOAT16)
        self.h = torch.randn(A, I, **BFLOAT16)
        self.weights = torch.rand(1, A, device="cuda")
        self.norm = torch.rand(D, **BFLOAT16) + 0.5
        self.layers = layers

    def phases(self) -> list[Phase]:
        return [self.gate_up(), self.down(), *self.dense_phases()]

    def gate_up(self) -> Phase:
        weight, kernel = self.w13, self.w13.kernel
        gate, up = (weight.unpack(self.choices[0][0]) @ self.x[0].double()).chunk(2, -1)
        return Phase(
            "gate_up",
            lambda choice, tiles, pdl: moe_decode.gate_up_of(
                self.x, kernel, choice, tiles=tiles, pdl=pdl
            ),
            self.choices,
            swiglu(gate, up),
            weight.nbytes * self.args.n_active,
            tilings_to_try(kernel, kernel.quads, 2),
        )

    def down(self) -> Phase:
        weight, kernel, A = self.w2, self.w2.kernel, self.args.n_active
        each = (weight.unpack(self.choices[0][0]) @ self.h.double().unsqueeze(-1)).squeeze(-1)
        expected = (each * self.weights[0].double().unsqueeze(-1)).sum(0, keepdim=True)
        return Phase(
            "down",
            lambda choice, tiles, pdl: moe_decode.down(
                self.h, kernel, choice, self.weights, self.x, tiles=tiles, pdl=pdl
            ),
            self.choices,
            expected + self.x.double(),
            weight.nbytes * A,
            tilings_to_try(kernel, A * kernel.quads, 1),
        )

    def dense_phases(self) -> list[Phase]:
        """wqkv with the norm of its input, wo with the residual; of one model alone."""
        args = self.args
        if args.family != "qwen3_moe":
            return []
        H, K, C = args.n_head, args.n_kv_head, args.head_dim
        wqkv = Weights(self.mode, (self.layers, (H + 2 * K) * C, args.dim))
        wo = Weights(self.mode, (self.layers, args.dim, H * C))
        heads, first = torch.randn(1, H * C, **BFLOAT16), torch.zeros(1, dtype=torch.int64)
        normed = torch.nn.functional.rms_norm(
            self.x.double(), (args.dim,), self.norm.double(), args.norm_eps
        )
        layers = range(self.layers)
        first = first.cuda()
        return [
            Phase(
                "wqkv",
                lambda weight, tiles, pdl: moe_decode.down(
                    self.x, weight, norm=self.norm, eps=args.norm_eps, tiles=tiles, pdl=pdl
                ),
                [wqkv.single(layer) for layer in layers],
                normed @ wqkv.unpack(first)[0].T,
                wqkv.nbytes,
                tilings_to_try(wqkv.kernel, wqkv.kernel.quads, 1),
            ),
            Phase(
                "wo",
                lambda weight, tiles, pdl: moe_decode.down(
                    heads, weight, residual=self.x, tiles=tiles, pdl=pdl
                ),
                [wo.single(layer) for layer in layers],
                heads.double() @ wo.unpack(first)[0].T + self.x.double(),
                wo.nbytes,
                tilings_to_try(wo.kernel, wo.kernel.quads, 1),
            ),
        ]

    def experts(self, tiles: dict[str, Tiles], pdl: bool) -> Callable:
        """Return both products as a function of the layer."""

        def run(layer: int) -> Tensor:
            choice, w13, w2 = self.choices[layer], self.w13.kernel, self.w2.kernel
            h = moe_decode.gate_up_of(self.x, w13, choice, tiles=tiles["gate_up"], pdl=pdl)
            tiling = dict(tiles=tiles["down"], pdl=pdl)
            return moe_decode.down(h, w2, choice, self.weights, self.x, **tiling)

        return run

    def today(self) -> Callable:
        """Return the compiled plain experts, as a function of the choice."""
        with torch.device("meta"):
            experts = Experts(self.args)
        for name, weights in (("w13", self.w13), ("w2", self.w2)):
            plain = experts.get_submodule(name)
            if self.mode == PLAIN:
                plain.weight = torch.nn.Parameter(weights.parts["weight"], requires_grad=False)
                continue
            packed = PackedExpertLinear(plain, self.mode, weights.group)
            for part, tensor in weights.parts.items():
                setattr(packed, part, torch.nn.Parameter(tensor, requires_grad=False))
            experts.set_submodule(name, packed)
        return torch.compile(
            lambda choice: experts(self.x, choice, self.weights), fullgraph=True, dynamic=False
        )


# Commands -----------------------------------------------------------------------------------------


def check(arch: str, mode: str) -> dict:
    """Compile and check all tilings of a case -> wrong ones, by name."""
    case, wrong = Case(arch, mode, layers=2), {}
    for phase in case.phases():
        for tiles in phase.tilings:
            for pdl in (True, False):
                name = f"{phase.name} {tiles} pdl {pdl}"
                try:
                    error = phase.error(tiles, pdl)
                except Exception as failure:  # another tiling may work
                    wrong[name] = f"{type(failure).__name__}: {str(failure)[:200]}"
                    continue
                if not error < MAX_ERROR:
                    wrong[name] = f"relative error {error:.1e}"
    return wrong


def check_all(cases: list[tuple[str, str]]) -> dict[tuple[str, str], dict]:
    """Check cases at the same time, a process each."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--check", "--case", f"{arch}:{mode}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for arch, mode in cases
    ]
    found = {}
    for case, process in zip(cases, processes, strict=True):
        output, _ = process.communicate()
        lines = output.splitlines()
        found[case] = json.loads(lines[-1]) if process.returncode == 0 else {"process": "failed"}
    return found


def measure(arch: str, mode: str, wrong: dict, with_today: bool) -> list[dict]:
    """Return rows of a case: phase, tiling, us with and without PDL, bound and expected us."""
    case, rows, best = Case(arch, mode), [], {}

    def note(phase: str, tiling: str, seconds: dict[str, float], nbytes: int, kernels: int) -> None:
        bound = nbytes / BANDWIDTH
        row = {"arch": arch, "format": mode, "phase": phase, "tiling": tiling}
        row |= {name: round(value * 1e6, 2) for name, value in seconds.items()}
        row |= {"bound_us": round(bound * 1e6, 2)}
        row["expected_us"] = round((bound + kernels * PHASE_SECONDS) * 1e6, 2)
        rows.append(row)

    for phase in case.phases():
        timed = []
        for tiles in phase.tilings:
            if f"{phase.name} {tiles} pdl True" in wrong:
                continue
            seconds = {"us": phase.seconds(tiles, True)}
            if f"{phase.name} {tiles} pdl False" not in wrong:
                seconds["no_pdl_us"] = phase.seconds(tiles, False)
            timed.append((seconds["us"], tiles, seconds))
        for _, tiles, seconds in sorted(timed, key=lambda each: each[0]):
            best.setdefault(phase.name, tiles)
            note(phase.name, str(tiles), seconds, phase.nbytes, 1)
    nbytes = (case.w13.nbytes + case.w2.nbytes) * case.args.n_active
    layers = list(range(LAYERS))
    if {"gate_up", "down"} <= best.keys():
        seconds = {
            name: graph_seconds(case.experts(best, pdl), layers)
            for name, pdl in (("us", True), ("no_pdl_us", False))
        }
        note("experts", "best", seconds, nbytes, 2)
    if with_today:
        note("experts", "today", {"us": graph_seconds(case.today(), case.choices)}, nbytes, 2)
        torch._dynamo.reset()
    return rows


def show(rows: list[dict]) -> None:
    for row in rows:
        no_pdl = row.get("no_pdl_us", float("nan"))
        print(
            f"{row['arch']:14} {row['format']:5} {row['phase']:8} {row['us']:7.2f} us, no PDL "
            f"{no_pdl:7.2f}, bound {row['bound_us']:6.2f}, expected {row['expected_us']:6.2f}  "
            f"{row['tiling']}",
            flush=True,
        )


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/moe_phases.py --json phases.json",
            "python benchmarks/moe_phases.py --case Qwen3-30B-A3B:int4",
        ),
    )
    names = [f"{arch}:{mode}" for arch, mode in CASES]
    add = parser.add_argument
    add("--case", action="append", metavar="ARCH:FORMAT", help=f"repeatable; {', '.join(names)}")
    add("--json", metavar="FILE", help="write all rows")
    add("--budget", type=float, default=140.0, help="seconds; then leave out today's experts")
    add("--check", action="store_true", help="only check the tilings of one case; print JSON")
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    started = time.perf_counter()
    cases = [tuple(name.split(":")) for name in options.case] if options.case else list(CASES)
    torch.manual_seed(0)
    if options.check:
        print(json.dumps(check(*cases[0])))
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows, wrong = [], check_all(cases)
    print(f"checked in {time.perf_counter() - started:.0f} s")
    for case, found in wrong.items():
        for name, why in found.items():
            print(f"WRONG {':'.join(case)} {name}: {why}")
    configure_inductor()
    for case in cases:
        with_today = time.perf_counter() - started < options.budget
        found = measure(*case, wrong[case], with_today)
        show(found)
        rows += found
        if options.json:
            result = {"rows": rows, "wrong": {":".join(key): value for key, value in wrong.items()}}
            Path(options.json).write_text(json.dumps(result, indent=1))
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
