"""Decode speed at a model's real shapes, with random weights made on the device.

    python benchmark.py --arch Mixtral-8x7B --mode bf16

At batch 1 a token multiplies each weight that it uses once, so its time is bounded below by the
bytes of those weights over the memory's read bandwidth. `fraction` is how much of that bandwidth
the whole loop reaches, with sampling and the host's reading of every token included. The
bandwidth is measured in the same run. `--kernels` shows where the rest of the time goes. `--sweep
experts` shows what a token costs as experts are added: idle ones are never read, so it should
depend on A alone. `--peer hf` measures Hugging Face transformers in the same run.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import argparse
import json
import sys

from cli.benchmark_options import SWEEP_LAYERS, build_parser, check_options
from cli.command import command
from cli.log import log_to_stderr
from cli.report import in_bytes, in_seconds
from cli.startup import check_arguments

if __name__ == "__main__":
    check_arguments(build_parser, check_options)

import torch

from benchmarks.decode_speed import measure, read_bandwidth, sweep
from benchmarks.kernel_profile import kernel_lines
from benchmarks.transformers_peer import hf_model, peer
from memory.commands import plan_benchmark
from model import ModelArgs
from models.random_weights import (
    RandomWeights,
    architecture,
    first_layers,
    free_memory,
    number_format,
    published_config,
)
from parallel import process_group
from parallel.heartbeat import fail
from runtime.loading import check_decode_kernels

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
    form = "  {n_expert:3} {n_active:3} {us:12.1f} {bytes_per_token:15,} {fraction:9.0%}"
    return [
        f"  prompt of {r['prompt_len']} tokens, {r['new_tokens']} new ones, measured bandwidth "
        f"{in_bytes(r['read_gb_s'] * 1e9)}/s",
        "    E   A     us/token     bytes/token  of bandwidth",
        *(form.format(**row) for row in r["sweep"]),
    ]


def speed_lines(r: dict) -> list[str]:
    """Return a line each of lengths, prefill, decode, bytes, bandwidth, and memory."""
    sequences = f"{r['batch']} sequence{'s' * (r['batch'] > 1)}"
    memory = f"peak memory {in_bytes(r['peak_bytes'])}"
    if r["activation_bytes"] is not None:
        memory += f", {in_bytes(r['activation_bytes'])} of it besides weights and cache"
    lines = [
        f"  {sequences}, prompt of {r['prompt_len']:,} tokens, {r['new_tokens']:,} new ones, "
        f"cache of {r['max_seq_len']:,}",
        f"  first token after {in_seconds(r['ttft_s'])} (prompt at {r['prefill_tok_s']:,.0f} "
        f"tokens/s), the first time after {in_seconds(r['ttft_cold_s'])}",
        f"  {r['tok_s']:.1f} tokens/s (median of {len(r['tok_s_all'])}: "
        f"{min(r['tok_s_all']):.1f} to {max(r['tok_s_all']):.1f}), {r['ms']:.3f} ms/step",
        f"  reads {in_bytes(r['bytes_per_token'])}/token, {in_bytes(r['bytes_per_step'])}/step "
        f"({r['experts_read']:.1f} experts/layer, {in_bytes(r['cache_bytes'])} of cache)",
        f"  {in_bytes(r['gb_s'] * 1e9)}/s{' per GPU' * (r['ranks'] > 1)}, {r['fraction']:.0%} of "
        f"measured bandwidth ({in_bytes(r['read_gb_s'] * 1e9)}/s)",
        f"  {memory}",
    ]
    if r["kernels_per_layer"] is not None:  # not counted on a CPU
        lines[-1] += f", {r['kernels_per_layer']:.1f} kernels/layer"
    return [*lines, f"  first step (compile and capture) {in_seconds(r['compile_s'])}"]


def peer_lines(r: dict) -> list[str]:
    p = r["peer"]
    peak = "" if p["peak_bytes"] is None else f", peak memory {p['peak_bytes'] / 1e9:.1f} GB"
    return [
        f"  {p['name']} in {p['dtype']}: {p['tok_s']:.1f} tokens/s (1 answer after a warm-up), "
        f"ours / peer {r['tok_s'] / p['tok_s']:.2f}",
        f"    {p['setting']}: the best of {len(p['settings'])}; "
        f"first token {p['ttft_s'] * 1e3:.1f} ms{peak}",
    ]


# Command ------------------------------------------------------------------------------------------


def check_model(options: argparse.Namespace, args: ModelArgs, device: torch.device) -> None:
    """Raise ValueError for options that do not fit the model or the device."""
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


@command(fail, out_of_memory="use fewer --layers, or a smaller --mode")
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    log_to_stderr()
    device = process_group.start(options.device)
    check_options(options)
    args = architecture(options.arch)
    check_model(options, args, device)
    number_format(options.mode, args)  # refuses a mode before anything is measured
    default = min(SWEEP_LAYERS, args.n_layer) if options.sweep else args.n_layer
    args = first_layers(args, options.layers or default)
    if options.peer:
        config = published_config(options.arch)
        hf_model(config, args, torch.bfloat16, "meta")  # refuses what transformers lacks, too
    source = RandomWeights(args, number_format(options.mode, args))
    process_group.check_agreement(vars(options), source)
    if not options.sweep:  # that one leaves out what does not fit
        check_decode_kernels(options.decode_kernels, source, device, parallel=options.parallel)
        plan_benchmark(options, source, device)
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
