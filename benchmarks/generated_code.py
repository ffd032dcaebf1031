"""Dump the code that Inductor generates for one decode step, without a GPU, and compare two dumps.

    python benchmarks/generated_code.py --output after
    python benchmarks/generated_code.py --compare before after

A refactoring that leaves this text unchanged leaves the machine code of a decode step unchanged.
Hand-written kernels (ops/) are the exception: the text shows only their calls. Each case is a model
at its real shapes, with enough layers to show each kind of layer. Each stage is compiled
separately, as in runtime/runner.py: `begin`, each kind of block, `logits`, and the sampling step.
All cases take about 3 minutes on one CPU core. docs/log/generated_code.md has a comparison.
"""

import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.inductor_code import (
    compiled_code,
    fake_empty,
    move_to_fake_gpu,
    normalize,
    pretend_gpu,
)
from cli.parser import Parser
from formats import FORMATS
from model import MoE, Transformer
from models import build_model
from models.random_weights import architecture, first_layers, number_format
from ops.inductor import configure_inductor
from parallel import process_group
from runtime.fused_attention import fuse_decode_attention
from runtime.runner import run_block
from runtime.sampling import MAX_CANDIDATES, StepState, make_sample_step, sample
from tp import ModelShard

STAGE = "=== "  # begins the title of a stage in a dump
FAILED = "failed: "  # begins the text of a stage that could not be compiled


@dataclass(frozen=True)
class Case:
    """A model in a number format, and the cache lengths to compile its blocks for."""

    arch: str
    mode: str
    layers: int = 1
    ranks: int = 1
    lengths: tuple[int, ...] = (256,)

    @property
    def name(self) -> str:
        ranks = f"_rank_0_of_{self.ranks}" if self.ranks > 1 else ""
        return f"{self.arch}_{self.mode}{ranks}"


CASES = (
    Case("Mixtral-8x7B", "bf16", lengths=(256, 2048)),
    *(Case("Mixtral-8x7B", mode) for mode in ("int8", "fp8", "int4", "hqq4")),
    Case("Qwen3-30B-A3B", "bf16", lengths=(256, 2048)),
    *(Case("Qwen3-30B-A3B", mode) for mode in ("int8", "int4")),
    Case("OLMoE-1B-7B", "bf16"),
    Case("gpt-oss-20b", "mxfp4", layers=2),  # windowed, full
    Case("DeepSeek-V2-Lite", "bf16", layers=2, lengths=(256, 2048)),  # dense, experts
    Case("GLM-4.5-Air", "fp8", layers=2),  # dense, experts
    Case("Mixtral-8x7B", "bf16", ranks=2),
    Case("Mixtral-8x7B", "int8", ranks=2),
)


# Stages ------------------------------------------------------------------------------------------


def make_model(case: Case, length: int) -> Transformer:
    """Build rank 0's model on the fake GPU, as `load_model` does, with a cache of this length."""
    args = first_layers(architecture(case.arch), case.layers)
    format = number_format(case.mode, args)
    shard = ModelShard(args, format, "tensor", rank=0, ranks=case.ranks)
    move_to_fake_gpu(shard.model)
    shard.insert_collectives()
    modules = format.get("modules", {}).values()
    if case.ranks > 1 or any(FORMATS[module["format"]].bits == 4 for module in modules):
        fuse_decode_attention(shard.model)
    shard.model.setup_cache(1, length)
    return shard.model


def layer_kinds(case: Case) -> dict[str, int]:
    """Return the name of each kind of layer -> the first layer of that kind."""
    layers = build_model(first_layers(architecture(case.arch), case.layers)).layers
    has_windows, kinds = any(block.attention.window for block in layers), {}
    for layer, block in enumerate(layers):
        name = "experts" if isinstance(block.ffn, MoE) else "dense"
        if has_windows:
            name += " windowed" if block.attention.window else " full"
        kinds.setdefault(name, layer)
    return kinds


def token_ids() -> Tensor:
    return fake_empty(1, 1, dtype=torch.int64)


def begin_stage(case: Case, length: int) -> tuple[Callable, tuple]:
    model = make_model(case, length)
    return type(model).begin, (model, token_ids(), token_ids())


def block_stage(case: Case, length: int, layer: int) -> tuple[Callable, tuple]:
    model = make_model(case, length)
    x, normed, context = model.begin(token_ids(), token_ids())
    context = context._replace(last=fake_empty(1, dtype=torch.int64))
    norms = [block.attention_norm for block in model.layers] + [model.norm]
    return run_block, (model.layers[layer], x, normed, context, norms[layer + 1])


def logits_stage(case: Case) -> tuple[Callable, tuple]:
    model = make_model(case, case.lengths[0])
    normed, last = fake_empty(1, 1, model.args.dim), fake_empty(1, dtype=torch.int64)
    return type(model).logits, (model, normed, last)


def sampling_stage(case: Case, greedy: bool) -> tuple[Callable, tuple]:
    vocab_size = architecture(case.arch).vocab_size
    state = StepState(
        token=token_ids(),
        position=token_ids(),
        last=fake_empty(1, dtype=torch.int64),
        seen=fake_empty(1, vocab_size, dtype=torch.bool),
        controls=fake_empty(1, 5, dtype=torch.float32),
        seeds=fake_empty(1, dtype=torch.int64),
    )
    logits = fake_empty(1, vocab_size, dtype=torch.float32)
    return make_sample_step(sample), (state, logits, 0 if greedy else MAX_CANDIDATES)


def stages(case: Case) -> Iterator[tuple[str, Callable[[], tuple[Callable, tuple]]]]:
    """Yield each stage's name and a function that returns what to compile and its arguments."""
    for length in case.lengths:
        yield f"begin, cache {length}", lambda length=length: begin_stage(case, length)
        for name, layer in layer_kinds(case).items():
            build = lambda length=length, layer=layer: block_stage(case, length, layer)  # noqa: E731
            yield f"block {name}, cache {length}", build
    yield "logits", lambda: logits_stage(case)
    yield "sampling", lambda: sampling_stage(case, greedy=False)
    yield "sampling greedy", lambda: sampling_stage(case, greedy=True)


def dump(case: Case, folder: Path) -> bool:
    """Write the case's text to folder/NAME.txt. Return whether every stage could be compiled."""
    process_group.size = lambda: case.ranks
    texts, complete = [], True
    for name, build in stages(case):
        try:
            text = normalize(compiled_code(build))
        except Exception as error:  # goes into the dump, so that the other stages are compared
            text, complete = f"{FAILED}{str(error).splitlines()[0]}\n", False
            print(f"error: {case.name}, {name}: {text}", file=sys.stderr, end="")
        texts.append(f"{STAGE}{name}\n{text}")
    (folder / f"{case.name}.txt").write_text("\n".join(texts))
    return complete


# Comparing ---------------------------------------------------------------------------------------


def read_dump(folder: Path, cases: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return (case, stage) -> lines, of these cases."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in (folder / f"{case}.txt" for case in cases):
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            if line.startswith(STAGE):
                lines = found.setdefault((path.stem, line.removeprefix(STAGE)), [])
            else:
                lines.append(line)
    return found


def compare_stage(a: list[str], b: list[str], diff: list[str]) -> str:
    """Return "same", or in a few words what differs."""
    if not a or not b:
        return "missing " + ("after" if a else "before")
    if any(text[0].startswith(FAILED) for text in (a, b)):
        return "failed"
    removed, added = (sum(line.startswith(sign) for line in diff[2:]) for sign in "-+")
    return f"-{removed} +{added}" if diff else "same"


def compare(before: Path, after: Path, cases: Sequence[str], show_diff: bool) -> int:
    """Print a table of the stages. Return how many differ."""
    old, new, differing = read_dump(before, cases), read_dump(after, cases), 0
    print(f"{'case':34} {'stage':36} {'lines':>6}  result")
    for case, stage in dict.fromkeys((*old, *new)):
        a, b = old.get((case, stage), []), new.get((case, stage), [])
        lines = [*difflib.unified_diff(a, b, str(before), str(after), lineterm="", n=2)]
        result = compare_stage(a, b, lines)
        differing += result != "same"
        print(f"{case:34} {stage:36} {len(a or b):6}  {result}")
        if show_diff and a and b:
            print("".join(f"    {line}\n" for line in lines), end="")
    print(f"{differing} stages differ")
    return differing


# Command -----------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(
        "Dump the code that Inductor generates for one decode step, without a GPU.",
        (
            "python benchmarks/generated_code.py --output after",
            "python benchmarks/generated_code.py --output after --case Mixtral-8x7B_int8",
            "python benchmarks/generated_code.py --compare before after --diff",
        ),
    )
    names = tuple(case.name for case in CASES)
    add = parser.add_argument
    add("--output", type=Path, metavar="DIR", help="write one text file a case")
    add("--case", nargs="+", choices=names, default=names, metavar="CASE", help="only these cases")
    add("--compare", type=Path, nargs=2, metavar=("DIR_A", "DIR_B"), help="compare two dumps")
    add("--diff", action="store_true", help="with --compare: also print the lines that differ")
    return parser


def main() -> int:
    """Run the command: exit code 1 if stages differ or could not be compiled."""
    options = (parser := build_parser()).parse_args()
    if (options.output is None) == (options.compare is None):
        parser.error("give --output or --compare")
    if options.compare:
        return int(compare(*options.compare, options.case, options.diff) > 0)
    options.output.mkdir(parents=True, exist_ok=True)
    pretend_gpu()
    configure_inductor()
    torch.set_default_dtype(torch.bfloat16)
    selected = [case for case in CASES if case.name in options.case]
    return int(not all([dump(case, options.output) for case in selected]))


if __name__ == "__main__":
    sys.exit(main())
