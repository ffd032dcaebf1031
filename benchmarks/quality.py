"""Perplexity against bits per weight, by the format of attention and of experts.

    python benchmarks/quality.py [--checkpoint_path DIR --text_file FILE --group_size G]
    python benchmarks/quality.py --formats int4 q4_k nvfp4 int8-q4_k
    python benchmarks/quality.py --files tiny-Q4_K_M.gguf tiny-IQ4_XS.gguf

Table 1 of "Fast Inference of Mixture-of-Experts Language Models with Offloading" (Eliseev & Mazur
2023) in our formats: attention and experts at 16, 4, 3 and 2 bits each. Then the other formats,
and the half-quadratic ones without their solver (0 iterations: rounded to nearest). The default is
the embedded model on its held-out text. Activations are fp32, so that only weights differ. Every
checkpoint is written and loaded as a user would do it, and removed. "KL" is the mean divergence of
the next token's distribution from that at 16 bits, in millinats, over the first KL_WINDOWS windows
of KL_TOKENS tokens; it tells formats apart that perplexity does not.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

from checkpoint import Checkpoint
from cli.parser import Parser
from eval import perplexity
from formats import FORMATS, PLAIN
from formats.quantizer import bits_per_weight, plan_format, quantize
from generate import EMBEDDED, load_model, open_checkpoint
from gguf_files.container import PLAIN_TYPES
from gguf_files.source import GGUFCheckpoint
from model import Chunk, Transformer
from models import args_of_checkpoint, build_model
from parallel.device import pick_device
from tokenizer import load_tokenizer

Scheme = tuple[str, str, int | None]  # formats of attention and experts, the solver's iterations

HALF_QUADRATIC = PLAIN, "hqq4", "hqq3", "hqq2"  # 16, 4, 3 and 2 bits
OTHERS = "int8", "fp8", "fp8b", "int4", "uint4", "mxfp4", "nvfp4"
GGUF = "q8_0", "q6_k", "q5_k", "q4_k", "q5_1", "q4_1", "q4_0", "iq4_nl", "iq4_xs"
KL_WINDOWS, KL_TOKENS = 24, 512


def schemes() -> list[Scheme]:
    """Return what is measured, in order; the first is the reference at 16 bits."""
    found = [
        (attention, experts, None) for attention in HALF_QUADRATIC for experts in HALF_QUADRATIC
    ]
    found += [(name, name, None) for name in (*OTHERS, *GGUF)] + [(PLAIN, "mxfp4", None)]
    return found + [(name, name, 0) for name, format in FORMATS.items() if format.has_solver]


def named_scheme(name: str) -> Scheme:
    """Return the scheme of a format's name, or of ATTENTION-EXPERTS."""
    attention, _, experts = name.partition("-")
    experts = experts or attention
    if not {attention, experts} <= {PLAIN, *FORMATS}:
        raise argparse.ArgumentTypeError(f"{name} has another format than {', '.join(FORMATS)}")
    return attention, experts, None


def pack(
    source: Checkpoint,
    scheme: Scheme,
    target: Path,
    device: torch.device,
    group_size: int | None = None,
) -> Checkpoint:
    """Write the checkpoint in a scheme's formats, and open it. group_size: where there are groups.

    Raises ValueError for groups that do not divide the rows.
    """
    attention, experts, iterations = scheme
    model = build_model(args_of_checkpoint(source))
    formats = [FORMATS[name] for name in (attention, experts) if name != PLAIN]
    group = None if all(format.has_own_group for format in formats) else group_size
    format = plan_format(model, attention, experts, group_size=group)
    options = {"iterations": iterations, "progress": False}
    return Checkpoint(quantize(source, format, model, target, device, **options))


def divergence(reference: Transformer, model: Transformer, ids: list[int]) -> float:
    """Return the mean KL divergence of a model's next token from the reference's, in nats."""
    windows, total, count = range(0, len(ids), KL_TOKENS), 0.0, 0
    for start in windows[:KL_WINDOWS]:
        tokens = torch.tensor([ids[start : start + KL_TOKENS]], device=model.norm.weight.device)
        chunk, logs = Chunk(tokens.new_zeros(1), tokens.shape[1]), []
        for each in (reference, model):
            each.setup_cache(1, KL_TOKENS)  # and no state of the window before
            logs.append(each(tokens, chunk, all_positions=True)[0].log_softmax(dim=-1))
        total += F.kl_div(logs[1], logs[0], log_target=True, reduction="sum").item()
        count += tokens.shape[1]
    return total / count


def measure(
    source: Checkpoint,
    text: str,
    scheme: Scheme,
    seq_len: int,
    device: torch.device,
    group_size: int | None = None,
) -> dict:
    """Return the perplexity, the divergence, the bytes and the bits per packed weight of a scheme.

    Raises ValueError for groups that do not divide the rows.
    """
    attention, experts, iterations = scheme
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, bits = source, 16.0
        if not attention == experts == PLAIN:
            checkpoint = pack(source, scheme, Path(folder) / "model", device, group_size)
            bits = bits_per_weight(checkpoint, build_model(args_of_checkpoint(source)))[0]
        size = sum(map(checkpoint.nbytes, checkpoint.tensors))
        found = figures(source, checkpoint, text, seq_len, device)
    labels = {"attention": attention, "experts": experts, "iterations": iterations}
    return labels | {"bytes": size, "bits": bits} | found


def measure_file(
    source: Checkpoint, path: Path, text: str, seq_len: int, device: torch.device
) -> dict:
    """Return the same of a GGUF file of the model. bytes and bits are those of the file."""
    checkpoint = GGUFCheckpoint(path)
    tensors = checkpoint.file.tensors.values()
    packed = [tensor for tensor in tensors if tensor.type not in PLAIN_TYPES]
    weights = sum(torch.Size(tensor.shape).numel() for tensor in packed)
    bits = 8 * sum(tensor.nbytes for tensor in packed) / weights if packed else 16.0
    name = checkpoint.format["name"]
    labels = {"attention": name, "experts": name, "iterations": None}
    labels |= {"bytes": sum(tensor.nbytes for tensor in tensors), "bits": bits}
    return labels | figures(source, checkpoint, text, seq_len, device)


def figures(
    source: Checkpoint,
    checkpoint: Checkpoint | GGUFCheckpoint,
    text: str,
    seq_len: int,
    device: torch.device,
) -> dict:
    """Return the perplexity of a checkpoint and its divergence from the source."""
    tokenizer = load_tokenizer(source.directory)
    model = load_model(checkpoint, device, torch.float32)
    found = perplexity(model, tokenizer, text, seq_len, progress=False)
    plain = load_model(source, device, torch.float32)
    with torch.no_grad():
        kl = divergence(plain, model, tokenizer.encode(text))
    return {"perplexity": found["perplexity"], "kl": kl}


def print_table(rows: list[dict]) -> None:
    columns = "attention", "experts", "MB", "bits a quantized weight", "perplexity"
    print(f"| {' | '.join(columns)} | against 16 bits | KL |\n|{'---|' * 7}")
    for row in rows:
        solver = " rounded" if row["iterations"] == 0 else ""
        change = 100 * (row["perplexity"] / rows[0]["perplexity"] - 1)
        print(
            f"| {row['attention']}{solver} | {row['experts']}{solver} "
            f"| {row['bytes'] / 1e6:.2f} | {row['bits']:.2f} "
            f"| {row['perplexity']:.3f} | {change:+.2f} % | {row['kl'] * 1e3:.2f} |"
        )


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/quality.py --json",
            "python benchmarks/quality.py --checkpoint_path DIR/model_bf16"
            " --text_file wiki.test.raw --seq_len 4096",
        ),
    )
    add = parser.add_argument
    add("--checkpoint_path", type=Path, help="default: the embedded model")
    add("--text_file", type=Path, default=EMBEDDED / "heldout.txt")
    add("--seq_len", type=int, default=2048)
    add("--group_size", type=int, help="numbers that share a scale; default: each format's own")
    formats = "attention and experts in each of these, or ATTENTION-EXPERTS; default: all schemes"
    add("--formats", nargs="+", type=named_scheme, metavar="NAME", help=formats)
    files = "GGUF files of the model instead, after 16 bits"
    add("--files", nargs="+", type=Path, default=(), metavar="FILE", help=files)
    add("--device", default="auto")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def main() -> None:
    options = build_parser().parse_args()
    source = open_checkpoint(options.checkpoint_path)
    text, device = options.text_file.read_text(encoding="utf-8"), pick_device(options.device)
    rows, chosen = [], [(PLAIN, PLAIN, None), *(options.formats or ())]
    for scheme in chosen if options.formats or options.files else schemes():
        rows.append(measure(source, text, scheme, options.seq_len, device, options.group_size))
        print(rows[-1], file=sys.stderr, flush=True)
    for path in options.files:
        rows.append(measure_file(source, path, text, options.seq_len, device))
        print(rows[-1], file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"rows": rows}))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
