"""checkpoint.py's options."""

from pathlib import Path

from cli.parser import Parser


def build_parser() -> Parser:
    parser = Parser(
        "Show a converted checkpoint, and check it.",
        (
            "python checkpoint.py checkpoints/OWNER/NAME/model_bf16",
            "python checkpoint.py checkpoints/OWNER/NAME/model_int4 --verify",
        ),
    )
    directory = "a directory written by convert_hf_checkpoint.py or quantize.py"
    parser.add_argument("directory", type=Path, help=directory)
    verify = "read every file: compare checksums, find NaN and infinity, load the tokenizer"
    parser.add_flag("--verify", verify)
    return parser
