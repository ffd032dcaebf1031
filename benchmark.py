"""Decode speed at a model's real shapes, with random weights made on the device.

    python benchmark.py --arch Mixtral-8x7B --mode bf16

At batch 1 a token multiplies each weight that it uses once, so its time is bounded below by the
bytes of those weights over the memory's read bandwidth. `fraction` is how much of that bandwidth
the whole loop reaches, with sampling and the host's reading of every token included. The
bandwidth is measured in the same run. `--kernels` shows where the rest of the time goes. `--sweep
experts` shows what a token costs as experts are added: idle ones are never read, so it should
depend on A alone. `--peer hf` measures Hugging Face transformers in the same run.
"""

import argparse
import json
import sys

import torch

from benchmarks.decode_speed import add_measure_options, measure, read_bandwidth, sweep
from benchmarks.transformers_peer import hf_model, peer
from cli.command import command
from cli.log import log_to_stderr
from cli.options import check_counts
from cli.parser import Parser
from model import ModelArgs
from models.random_weights import (
    RandomWeights,
    architecture,
    first_layers,
    free_memory,
    number_format,
)
from parallel import process_group
from parallel.heartbeat import fail

SWEEP_LAYERS = 4


# Reports ------------------------------------------------------------------------------------------


def report(r: dict) -> str:
    """Return the result as text."""
    title = f"{r['arch']} {r['mode']}, {r['layers']} layers, {r['gpu']}, torch {r['torch']}"
    if r.get("ranks", 1) > 1:
        title += f", {r['parallel']} parallel on {r['ranks']}"
    if "sweep" in r:
        return "\n".join([title, *sweep_lines(r)])
    lines = [title, *speed_lines(r)]
    if r.get("peer"):
        lines += peer_lines(r)
    if r.get("kernels"):
        lines += kernel_lines(r["kernels"])
    return "\n".join(lines)


def sweep_lines(r: dict) -> list[str]:
    form = "  {n_expert:3} {n_active:3} {us:12.1f} {bytes_per_token:15,} {fraction:9.3f}"
    return [
        f"  prompt {r['prompt_len']}, new {r['new_tokens']}, measured bandwidth "
        f"{r['read_gb_s']:.0f} GB/s",
        "    E   A   us a token   bytes a token  fraction",
        *(form.format(**row) for row in r["sweep"]),
    ]


def speed_lines(r: dict) -> list[str]:
    beside = ""
    if r["activation_bytes"] is not None:
        beside = f" ({r['activation_bytes'] / 1e9:.2f} beside weights and cache)"
    kernels = r["kernels_per_layer"] and round(r["kernels_per_layer"], 1)
    return [
        f"  {r['batch']} sequence{'s' * (r['batch'] > 1)}, prompt {r['prompt_len']}, "
        f"new {r['new_tokens']}, cache {r['max_seq_len']}",
        f"  first token {r['ttft_s'] * 1e3:.1f} ms ({r['prefill_tok_s']:.0f} prompt tokens/s), "
        f"cold {r['ttft_cold_s']:.1f} s",
        f"  {r['tok_s']:.1f} tokens/s (median of {len(r['tok_s_all'])}: "
        f"{min(r['tok_s_all']):.1f} to {max(r['tok_s_all']):.1f}), {r['ms']:.3f} ms a step",
        f"  {r['bytes_per_token'] / 1e9:.3f} GB a token, {r['bytes_per_step'] / 1e9:.3f} GB a step "
        f"({r['experts_read']:.1f} experts a layer, {r['cache_bytes'] / 1e9:.3f} GB of cache)",
        f"  {r['gb_s']:.0f} GB/s, {r['fraction']:.3f} of the measured {r['read_gb_s']:.0f} GB/s"
        f"{' a GPU' * (r['ranks'] > 1)}",
        f"  kernels a layer {kernels}, peak memory {r['peak_bytes'] / 1e9:.1f} GB{beside}, "
        f"compile and capture {r['compile_s']:.1f} s",
    ]


def peer_lines(r: dict) -> list[str]:
    p = r["peer"]
    peak = "" if p["peak_bytes"] is None else f", peak memory {p['peak_bytes'] / 1e9:.1f} GB"
    return [
        f"  {p['name']} in {p['dtype']}: {p['tok_s']:.1f} tokens/s (1 answer after a warm-up), "
        f"ours / peer {r['tok_s'] / p['tok_s']:.2f}",
        f"    {p['setting']}: the best of {len(p['settings'])}; "
        f"first token {p['ttft_s'] * 1e3:.1f} ms{peak}",
    ]


def kernel_lines(table: dict) -> list[str]:
    times = f"{table['span_us']:.1f} us, kernels {table['kernels_us']:.1f} us"
    lines = [
        f"  a step, median of {table['steps']}: {times}, gaps {table['gaps']:.1%}",
        "    launches      us each  us in all   share   GB/s  name",
    ]
    form = "  {launches:4} a {per}  {us:9.2f}  {us_per:9.2f}  {share:6.1%}  {speed:>5}  {name:.80}"
    for row in table["rows"]:
        speed = "" if row["gb_s"] is None else round(row["gb_s"])
        lines.append(form.format(**row, speed=speed))
    return lines


# Command ------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(
        "Measure decode speed with random weights at real shapes.",
        (
            "python benchmark.py --arch Mixtral-8x7B --mode int4 --kernels",
            "python benchmark.py --arch Qwen3-30B-A3B --layers 4 --prompt_len 512 --peer hf --json",
            "torchrun --standalone --nproc_per_node=4 benchmark.py --arch Mixtral-8x7B"
            " --parallel expert",
        ),
    )
    add_measure_options(parser)
    sweep = f"latency against experts and active ones, with {SWEEP_LAYERS} layers by default"
    parser.add_argument("--sweep", choices=("experts",), help=sweep)
    peer = "also measure Hugging Face transformers (in bf16 if the mode is no dtype)"
    parser.add_argument("--peer", choices=("hf",), help=peer)
    parser.add_flag("--json", "print one JSON object instead of text")
    return parser


def check_options(options: argparse.Namespace, args: ModelArgs, device: torch.device) -> None:
    """Raise ValueError for options that do not fit the model, the device or each other."""
    if options.layers and options.layers > args.n_layer:
        raise ValueError(f"--layers {options.layers}: {options.arch} has {args.n_layer}")
    length = options.prompt_len + options.new_tokens
    limit = options.max_seq_len or args.max_position
    if length > limit or limit > args.max_position:
        given = length > limit and options.max_seq_len
        bound = (
            f"--max_seq_len, {given}" if given else f"the model's positions, {args.max_position}"
        )
        cause = f"--prompt_len and --new_tokens, {length}, or --max_seq_len exceed {bound}"
        raise ValueError(f"{cause}: ask for less")
    if process_group.size() > 1 and (options.sweep or options.peer):
        raise ValueError("--sweep and --peer measure one GPU: leave torchrun out")
    if options.kernels and (device.type != "cuda" or options.eager):
        raise ValueError("--kernels lists a captured step: it needs a CUDA GPU, and no --eager")
    if options.kernels and options.sweep:
        raise ValueError("--kernels and --sweep: give one of them at a time")
    if options.peer and options.batch > 1:
        raise ValueError("--peer measures one sequence: leave --batch out")
    if options.peer and options.sweep:
        raise ValueError("--peer and --sweep: give one of them at a time")


@command(fail, out_of_memory="use fewer --layers, or a smaller --mode")
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    log_to_stderr()
    device = process_group.start(options.device)
    check_counts(options, "layers", "prompt_len", "prefill_chunk")
    check_counts(options, "repeats", "batch", most=100_000)
    check_counts(options, "new_tokens", least=2)
    args = architecture(options.arch)
    check_options(options, args, device)
    number_format(options.mode, args)  # refuses a mode before anything is measured
    default = min(SWEEP_LAYERS, args.n_layer) if options.sweep else args.n_layer
    args = first_layers(args, options.layers or default)
    if options.peer:
        hf_model(args, torch.bfloat16, "meta")  # refuses what transformers lacks, too
    source = RandomWeights(args, number_format(options.mode, args))
    process_group.check_agreement(vars(options), source)
    ceiling = read_bandwidth(device)
    result = (sweep if options.sweep else measure)(args, options, ceiling)
    if options.peer:
        free_memory(not options.eager)
        result["peer"] = peer(args, options)
    if process_group.is_main():
        print(json.dumps(result) if options.json else report(result), flush=True)
    process_group.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
