"""Decode speed at far positions of a long cache, plain and int8.

    python benchmarks/long_contexts.py --arch Qwen3-30B-A3B-2507 --positions 32000 128000

Weights and cache are random; no prompt runs (`benchmark.py --random_cache`). One cache, long
enough for the farthest position, serves all. `fraction` counts the bytes of the weights that a
token reads, and of the cache in use. Each row is printed as soon as it is known.
"""

import argparse
import statistics
from dataclasses import replace

import torch

from benchmarks.cuda_timing import require_gpu
from benchmarks.decode_speed import measure_bytes, open_session, read_bandwidth, time_answers
from cli.benchmark_options import add_measure_options
from cli.parser import Parser
from formats.kv_cache import KV_CACHES
from models.random_weights import architecture
from runtime.session import Session

POSITIONS = 150, 32_000, 128_000
HEADER = "cache   position    tokens/s        us  GB a token  of it cache  fraction"


def measure_position(session: Session, options: argparse.Namespace, ceiling: float) -> str:
    """Return a row: decoding from the position `options.prompt_len` on. ceiling: bytes/s."""
    rate = statistics.median(time_answers(session, options)["rates"])
    found = measure_bytes(session, options)
    size, cache = found["bytes_per_step"] / 1e9, found["cache_bytes"] / 1e9
    return (
        f"{options.kv_cache:6}  {options.prompt_len:8}  {rate:10.1f}  {1e6 / rate:8.1f}  "
        f"{size:10.2f}  {cache:11.2f}  {size * rate / ceiling * 1e9:8.3f}"
    )


def measure(options: argparse.Namespace) -> None:
    """Print a row for each kind of cache and position."""
    device, args = torch.device("cuda"), architecture(options.arch)
    ceiling = read_bandwidth(device)
    gpu = f"{torch.cuda.get_device_name()}, {ceiling / 1e9:.0f} GB/s"
    print(f"{options.arch} {options.mode}, {gpu}\n{HEADER}", flush=True)
    options.max_seq_len = max(options.positions) + options.new_tokens
    options.kv_cache = options.caches[0]
    session = open_session(args, options, device)
    for kind in options.caches:
        options.kv_cache = kind
        settings = replace(session.options, cache_class=KV_CACHES[kind])
        if settings != session.options:
            session = Session(session.model, session.max_seq_len, settings)
        for position in options.positions:
            options.prompt_len = position
            print(measure_position(session, options, ceiling), flush=True)


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/long_contexts.py --arch Qwen3-30B-A3B-2507",
            "python benchmarks/long_contexts.py --arch Qwen3.6-35B-A3B --mode int4 --caches int8",
        ),
    )
    add_measure_options(parser)
    parser.begin_group("contexts", "what is measured")
    parser.add_argument("--positions", type=int, nargs="+", default=POSITIONS, metavar="N")
    parser.add_argument("--caches", choices=KV_CACHES, nargs="+", default=list(KV_CACHES))
    return parser


def main() -> None:
    options = (parser := build_parser()).parse_args()
    require_gpu(parser)
    options.random_cache = True
    measure(options)


if __name__ == "__main__":
    main()
