"""Options of scripts/train_tiny_moe.py."""

import argparse
import sysconfig
from pathlib import Path

from cli.options import add_device
from cli.parser import Parser

FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "phimoe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_5_moe",
)
SETTINGS = {  # option: default, default of --smoke, help
    "seed": (0, 0, "seed of weights, batches and dropout"),
    "steps": (3200, 20, "optimizer steps"),
    "seq_len": (2048, 128, "tokens of a sequence, and of the evaluation's windows"),
    "batch_size": (32, 4, "sequences of a step"),
    "lr": (5e-3, 5e-3, "peak learning rate"),
    "weight_decay": (0.4, 0.4, "weight decay of matrices and embeddings"),
    "dropout": (0.2, 0.2, "dropout after the embedding, attention and the experts"),
    "test_share": (1.0, 1.0, "share of the library's tests in an epoch"),
    "balance": (0.05, 0.05, "weight of the load-balancing loss"),
    "ema": (0.998, 0.9, "decay of the averaged weights in a step"),
    "warmup": (100, 5, "steps until the peak learning rate"),
    "evals": (20, 2, "number of validations"),
    "sample_tokens": (300, 20, "tokens of the README's sample"),
}


def build_parser() -> Parser:
    parser = Parser(
        "Train the embedded checkpoint on the source of Python's standard library.",
        (
            "python scripts/train_tiny_moe.py --output_dir new/tiny-moe",
            "python scripts/train_tiny_moe.py --output_dir /tmp/smoke --smoke --force",
            "python scripts/train_tiny_moe.py --head new/tiny-hybrid --steps 400 --lr 0.002",
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("checkpoints/tiny-moe"), help="folder to write")
    parser.add_flag("--force", "replace the folder if it exists")
    add("--smoke", action="store_true", help="a reproducible run of seconds on the CPU")
    add("--family", choices=FAMILIES, default="mixtral", help="transformers' model type")
    head = "train a head for multi-token prediction for the model in this folder, and add it there"
    add("--head", type=Path, metavar="DIR", help=head)
    add("--stdlib", type=Path, default=sysconfig.get_path("stdlib"), help="Python's library")
    add("--stdlib_version", help="its Python version, such as 3.11.7; required with --stdlib")
    add("--tokenizer", type=Path, help="a tokenizer.model that this script wrote for the same text")
    add_device(parser, "where to train")
    for name, (full, _, text) in SETTINGS.items():
        add(f"--{name}", type=type(full), default=full, help=text)
    return parser
