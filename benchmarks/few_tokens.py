"""Speed of products of several tokens in many tilings.

    python benchmarks/few_tokens.py --json few_tokens.json

A row is one product in a CUDA graph, over more copies of its weight than L2 holds. It is wqkv or
the head, each of a normed x; wo, plus the residual; or gate and up, or down, of randomly chosen
experts. "normed": a kernel of its own has normed x; its time counts. Each form is
first checked against unpacked weights in fp64, in a process for each case, which also fills
Triton's cache. GB/s counts each weight, and each distinct expert, once.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cuda_timing import graph_seconds, require_gpu
from benchmarks.layer_tuning import MAX_ERROR, tilings_of
from benchmarks.tune import BFLOAT16, Weights
from cli.parser import Parser
from formats import PLAIN
from model import swiglu
from ops.declared import SWIGLU
from ops.products import dense
from ops.products.dense import Norm, dense_product
from ops.products.expert_tiles import (
    MAX_TOKENS,
    choose_few,
    choose_tile,
    multiply_tiles,
    sort_pairs,
)
from ops.products.few_tokens import FewTiles, choose_few_tiles
from ops.products.fragments import TILE
from ops.products.join import norm_tokens
from ops.products.tilings import Tiles, choose_tiles
from ops.products.weights import BITS, Weight
from ops.sizes import cdiv

TOKENS = (5, 8, 32, 64)
TILINGS = (  # rows, warps, depth; the most promising first
    *((16, 4, 2), (16, 8, 2), (16, 4, 1), (16, 8, 1), (16, 4, 4), (32, 4, 2), (32, 8, 2)),
    *((16, 16, 1), (32, 4, 1), (32, 8, 1), (32, 2, 1), (16, 2, 1), (16, 2, 2), (32, 16, 1)),
    *((64, 2, 1), (64, 4, 1), (64, 8, 1)),
)
BLOCKED = (  # of dense products, with 8 and 16 tokens a program
    *((16, 4, 2), (16, 8, 2), (32, 4, 2), (16, 4, 1), (16, 8, 1), (32, 8, 2), (32, 4, 1)),
    *((32, 8, 1), (64, 4, 1), (64, 4, 2), (64, 8, 1)),
)
TWO_TILES = (  # of dense products of 9 to 16 tokens: warps, depth, steps of x in flight
    *((8, 4, 1), (8, 8, 2), (8, 0, 1), (8, 2, 1), (4, 4, 1), (16, 4, 1), (16, 2, 1), (16, 0, 1)),
    *((8, 8, 1), (8, 4, 2), (4, 2, 1), (4, 0, 1)),
)
REGISTER_FORMS = 16  # most of a dense product in registers
COPIES_BYTES = 250e6  # of all copies of a weight: five times L2


@dataclass(frozen=True)
class Case:
    """A product of one model: wqkv, head, wo, router, or gate_up or down with A of E experts."""

    model: str
    product: str
    mode: str
    width: int  # numbers of a token's x
    out: int
    E: int = 0
    A: int = 0

    normed = property(lambda s: s.product in ("wqkv", "head"))  # x

    def __str__(self) -> str:
        return f"{self.model} {self.product} {self.mode}"


CASES = (
    Case("gpt-oss-20b", "wqkv", PLAIN, 2880, 5120),
    Case("gpt-oss-20b", "wo", PLAIN, 4096, 2880),
    Case("Qwen3-30B-A3B", "wqkv", "int4", 2048, 5120),
    Case("Qwen3-30B-A3B", "wo", "int4", 4096, 2048),
    Case("Qwen3-30B-A3B", "wqkv", PLAIN, 2048, 5120),
    Case("Qwen3-30B-A3B", "wo", PLAIN, 4096, 2048),
    Case("Mixtral-8x7B", "wqkv", "int8", 4096, 6144),
    Case("Mixtral-8x7B", "wo", "int8", 4096, 4096),
    Case("Qwen3.6-35B-A3B", "wqkv", "int4", 2048, 12288),
    Case("gpt-oss-20b", "gate_up", "mxfp4", 2880, 5760, 32, 4),
    Case("Qwen3-30B-A3B", "gate_up", "int4", 2048, 1536, 128, 8),
    Case("Mixtral-8x7B", "gate_up", "int8", 4096, 28672, 8, 2),
    Case("OLMoE-1B-7B", "gate_up", PLAIN, 2048, 2048, 64, 8),
    Case("gpt-oss-20b", "down", "mxfp4", 2880, 2880, 32, 4),
    Case("Qwen3-30B-A3B", "down", "int4", 768, 2048, 128, 8),
    Case("Mixtral-8x7B", "down", "int8", 14336, 4096, 8, 2),
    Case("OLMoE-1B-7B", "down", PLAIN, 1024, 2048, 64, 8),
    Case("Qwen3-30B-A3B", "router", PLAIN, 2048, 128),
    Case("Qwen3.6-35B-A3B", "head", "int4", 2048, 248320),
    Case("Qwen3-30B-A3B", "head", "int4", 2048, 151936),
    Case("Mixtral-8x7B", "head", "int8", 4096, 32000),
    Case("gpt-oss-20b", "head", PLAIN, 2880, 201088),
)


class Product:
    """A case's weights and x."""

    def __init__(self, case: Case, copies: int | None = None):
        self.case = case
        distinct = max(1, case.E)
        self.weights = Weights(case.mode, distinct, 1, case.out, case.width)
        self.nbytes = self.weights.nbytes / distinct
        self.copies = copies or max(2, int(COPIES_BYTES / self.weights.nbytes) + 1)
        if not case.E:
            self.weights = Weights(case.mode, 1, self.copies, case.out, case.width)
        rows = MAX_TOKENS * (case.A if case.product == "down" else 1)
        self.x = torch.randn(rows, case.width, **BFLOAT16)
        self.norm = torch.rand(case.width, **BFLOAT16) + 0.5
        self.residual = torch.randn(MAX_TOKENS, case.out, **BFLOAT16)

    def choice(self, seed: int, tokens: int) -> Tensor:
        """Return distinct experts of each token [T, A]."""
        scores = torch.rand(tokens, self.case.E, generator=torch.Generator().manual_seed(seed))
        return scores.topk(self.case.A).indices.to(BFLOAT16["device"])

    def arguments(self, tokens: int) -> list:
        """Return what differs between calls: weights, or the sorted choice of experts."""
        if self.case.E:
            return [sort_pairs(self.choice(seed, tokens), self.case.E) for seed in range(8)]
        return [self.weights.single(n) for n in range(self.copies)]

    def bytes_read(self, tokens: int) -> float:
        """Return the average bytes of a call: each weight or distinct expert once."""
        if not self.case.E:
            return self.nbytes
        choices = [self.choice(seed, tokens) for seed in range(8)]
        return self.nbytes * sum(len(choice.unique()) for choice in choices) / len(choices)

    def runner(self, tokens: int, form: str, tiles: FewTiles | Tiles) -> Callable:
        """Return a call of a product. form: a name of `forms`."""
        x, case, weight = self.x[:tokens], self.case, self.weights.kernel
        pairs = tokens * case.A
        if case.product == "gate_up":
            y = torch.empty(pairs, case.out // 2, **BFLOAT16)
            return lambda order: multiply_tiles(x, weight, order, y, SWIGLU, tiles=tiles)
        if case.product == "down":
            x, y = self.x[:pairs], self.x.new_empty(pairs, case.out, dtype=torch.float32)
            ones = torch.ones_like(y[:, 0])
            return lambda order: multiply_tiles(x, weight, order, y, None, ones, tiles=tiles)
        apart = form.startswith("normed")
        options: dict = {"residual": self.residual[:tokens]}
        if case.normed:
            options = {} if apart else {"norm": Norm(self.norm, 1e-6)}

        def multiply(weight: Weight) -> Tensor:
            operand = norm_tokens(x, self.norm, 1e-6) if apart else x
            return dense_product(operand, weight, tiles=tiles, **options)

        return multiply

    def expected(self, tokens: int) -> Tensor:
        """Return the result of the first call, in fp64."""
        x, case = self.x[:tokens].double(), self.case
        if case.product == "down":
            experts = self.choice(0, tokens).flatten()
            rows = zip(self.x.double()[: len(experts)], experts, strict=True)
            return torch.stack([self.weights.unpack(e) @ row for row, e in rows])
        if case.E:
            choice = self.choice(0, tokens)
            found = [
                torch.stack([swiglu(*(self.weights.unpack(e) @ row).chunk(2)) for e in own])
                for row, own in zip(x, choice, strict=True)
            ]
            return torch.cat(found)
        if case.normed:
            x = torch.nn.functional.rms_norm(x, (case.width,), self.norm.double(), 1e-6)
        product = x @ self.weights.unpack(torch.tensor(0, device=BFLOAT16["device"])).T
        return product if case.normed else product + self.residual[:tokens].double()

    def forms(self, tokens: int, most: int) -> dict[str, FewTiles | Tiles]:
        """Return tilings by name: the default, and others; in registers those of one token.

        most: on tensor cores, and in registers.
        """
        weight, case = self.weights.kernel, self.case
        if case.E:
            tile = choose_tile(case.E, tokens * case.A)
            default = choose_few(weight, case.product == "gate_up", tile, tokens)
        else:
            default = choose_few_tiles(weight, tokens)
        apart = case.normed and tokens > dense.IN_REGISTERS[BITS[weight.kind]]
        normed = "normed, " if apart else ""
        found: dict[str, FewTiles | Tiles] = {f"{normed}default: {default}": default}
        if not case.E and TILE < tokens <= 2 * TILE:
            return found | self.two_tiles(tokens, most, normed)
        blocks = [size for size in (8, 16) if tokens % size == 0 and tokens > size]
        blocked = [(*tiling, size) for tiling in BLOCKED for size in blocks]
        for tiling in (TILINGS if case.E or not blocked else blocked)[:most]:
            tiles = FewTiles(*tiling)
            if case.normed:
                found[f"normed, {tiles}"] = tiles
            elif tiles != default:
                found[str(tiles)] = tiles
        if not case.E and tokens <= 2 * max(dense.IN_REGISTERS.values()):
            tilings = [choose_tiles(weight, weight.quads, 1), *tilings_of(weight.quads, 1)]
            plain = [tiles for tiles in tilings if not tiles.stay][: min(most, REGISTER_FORMS)]
            found |= {f"registers {tiles}": tiles for tiles in plain}
        return found

    def two_tiles(self, tokens: int, most: int, normed: str) -> dict[str, FewTiles | Tiles]:
        """Return tilings of all tokens a program, then of 8: `most` of each number of rows.

        Rows: 16, 32, and those of one program or two a multiprocessor.
        """
        weight = self.weights.kernel
        shares = [cdiv(weight.out, weight.multiprocessors * n) for n in (1, 2)]
        found = []
        for rows in sorted({16, 32, *(rows for rows in shares if 8 < rows <= 64)}):
            for warps, depth, x_depth in TWO_TILES[:most]:
                found.append(FewTiles(rows, warps, depth, 2 * TILE, x_depth))
        if tokens == 2 * TILE:
            found += [FewTiles(*tiling, TILE) for tiling in BLOCKED[:most]]
        return {f"{normed}{tiles}": tiles for tiles in found}


def check(case: Case, counts: list[int], most: int) -> dict[str, str]:
    """Compile and check all forms of a case -> what is wrong, by tokens and form."""
    torch.manual_seed(0)
    product, wrong = Product(case, 1), {}
    for tokens in counts:
        expected, argument = product.expected(tokens), product.arguments(tokens)[0]
        for name, tiles in product.forms(tokens, most).items():
            try:
                got = product.runner(tokens, name, tiles)(argument).double()
            except Exception as failure:  # another tiling may work
                wrong[f"{tokens} {name}"] = f"{type(failure).__name__}: {str(failure)[:200]}"
                continue
            error = ((got - expected).norm() / expected.norm()).item()
            if not error < MAX_ERROR:
                wrong[f"{tokens} {name}"] = f"relative error {error:.1e}"
    return wrong


def check_all(cases: list[int], counts: list[int], most: int) -> dict[int, dict[str, str]]:
    """Check cases, by number, at the same time: a process each."""
    command = [sys.executable, __file__, "--check", "--most", str(most)]
    command += ["--tokens", *map(str, counts), "--case"]
    processes = {
        n: subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in cases
    }
    found = {}
    for n, process in processes.items():
        output, _ = process.communicate()
        failed = {"process": "failed"}
        found[n] = json.loads(output.splitlines()[-1]) if process.returncode == 0 else failed
    return found


def measure(case: Case, counts: list[int], most: int, wrong: dict[str, str]) -> list[dict]:
    """Time and print all forms of a case."""
    torch.manual_seed(0)
    product, rows = Product(case), []
    for tokens in counts:
        nbytes, arguments = product.bytes_read(tokens), product.arguments(tokens)
        for name, tiles in product.forms(tokens, most).items():
            if f"{tokens} {name}" in wrong:
                continue
            run = product.runner(tokens, name, tiles)
            seconds = graph_seconds(run, arguments, repeats=8)
            row = {"case": str(case), "tokens": tokens, "form": name}
            row |= {"us": round(seconds * 1e6, 2), "GB/s": round(nbytes / seconds / 1e9)}
            rows.append(row)
            speed = f"{row['us']:7.2f} us {row['GB/s']:5} GB/s"
            print(f"{row['case']:28} {tokens} tokens {speed}  {name}", flush=True)
    return rows


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/few_tokens.py --json few_tokens.json",
            "python benchmarks/few_tokens.py --case 0 --case 8 --tokens 1 5",
        ),
    )
    names = ", ".join(f"{n}: {case}" for n, case in enumerate(CASES))
    add = parser.add_argument
    add("--case", action="append", type=int, metavar="N", help=f"repeatable; {names}")
    add("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="N", help="1 to 64")
    add("--most", type=int, default=99, metavar="N", help="tilings of each kernel (all)")
    add("--json", metavar="FILE", help="write all rows")
    add("--check", action="store_true", help="only check the forms of one case; print JSON")
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    cases = range(len(CASES)) if options.case is None else options.case
    counts = options.tokens
    if not all(1 <= count <= MAX_TOKENS for count in counts):
        parser.error(f"--tokens: give numbers from 1 to {MAX_TOKENS}")
    if options.check:
        print(json.dumps(check(CASES[cases[0]], counts, options.most)))
        return
    started = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    wrong, rows = check_all(list(cases), counts, options.most), []
    print(f"checked in {time.perf_counter() - started:.0f} s", flush=True)
    for n in cases:
        for name, why in wrong[n].items():
            print(f"WRONG {CASES[n]}, {name}: {why}")
    for n in cases:
        if "process" not in wrong[n]:
            rows += measure(CASES[n], counts, options.most, wrong[n])
        if options.json:
            wrong_by_name = {str(CASES[n]): why for n, why in wrong.items()}
            result = {"rows": rows, "wrong": wrong_by_name}
            Path(options.json).write_text(json.dumps(result, indent=1))
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
