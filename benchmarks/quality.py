"""Perplexity against bits, attention by experts: python benchmarks/quality.py [--checkpoint_path DIR --text_file FILE]

Table 1 of "Fast Inference of Mixture-of-Experts Language Models with Offloading" (Eliseev & Mazur 2023), our formats:
attention and experts at 16, 4, 3 and 2 bits each; then the other formats, and the half-quadratic ones without their
solver (0 iterations: rounded to nearest). By default the embedded model on its held-out text. Activations are fp32, so
that what differs is the weights alone. Every checkpoint is written, loaded and removed as a user would do it.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from checkpoint import Checkpoint, pick_device
from command import Parser
from eval import perplexity
from generate import EMBEDDED, load_model, open_checkpoint
from packing import FORMATS, PLAIN
from quantize import bits_per_weight, model_args, plan, quantize
from tokenizer import load_tokenizer

BITS = {"16": PLAIN, "4": "hqq4", "3": "hqq3", "2": "hqq2"}


def measure(source: Checkpoint, text: str, attention: str, experts: str, iterations: int | None, seq_len: int,
            device: torch.device) -> dict:  # fmt: skip
    """Perplexity, bytes and bits a weight of `source` with its attention and experts in these formats."""
    tokenizer = load_tokenizer(source.directory)
    with tempfile.TemporaryDirectory() as folder:
        if attention == experts == PLAIN:
            checkpoint, packed = source, 16.0
        else:
            format = plan(model_args(source), attention, experts)
            target = quantize(source.directory, format, Path(folder) / "model", device, False, iterations, False)
            checkpoint = Checkpoint(target)
            packed = bits_per_weight(checkpoint)[0]
        size = sum(map(checkpoint.nbytes, checkpoint.tensors))
        model = load_model(checkpoint, device, torch.float32)
        found = perplexity(model, tokenizer, text, seq_len, progress=False)["perplexity"]
    row = {"attention": attention, "experts": experts, "iterations": iterations, "bytes": size, "bits": packed}
    return row | {"perplexity": found}


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/quality.py --json",
            "python benchmarks/quality.py --checkpoint_path DIR/model_bf16 --text_file wiki.test.raw --seq_len 4096",
        ),
    )
    parser.add_argument("--checkpoint_path", type=Path)
    parser.add_argument("--text_file", type=Path, default=EMBEDDED / "heldout.txt")
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    return parser


def main() -> None:
    options = build_parser().parse_args()
    source = open_checkpoint(options.checkpoint_path)
    text, device = options.text_file.read_text(encoding="utf-8"), pick_device(options.device)
    schemes = [(attention, experts, None) for attention in BITS.values() for experts in BITS.values()]
    schemes += [(name, name, None) for name in ("int8", "fp8", "fp8b", "int4", "mxfp4")] + [(PLAIN, "mxfp4", None)]
    schemes += [(name, name, 0) for name, row in FORMATS.items() if row.kind == "hqq"]
    rows = []
    for attention, experts, iterations in schemes:
        rows.append(measure(source, text, attention, experts, iterations, options.seq_len, device))
        print(rows[-1], file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print("| attention | experts | MB | bits a quantised weight | perplexity | against 16 bits |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        solver = " rounded" if row["iterations"] == 0 else ""
        print(
            f"| {row['attention']}{solver} | {row['experts']}{solver} | {row['bytes'] / 1e6:.2f} | {row['bits']:.2f} | "
            f"{row['perplexity']:.3f} | {100 * (row['perplexity'] / rows[0]['perplexity'] - 1):+.2f} % |"
        )


if __name__ == "__main__":
    main()
