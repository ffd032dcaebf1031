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
import dataclasses
import json
import logging
import statistics
import sys
import time

import torch

from benchmarks.kernel_profile import cuda_kernels, kernel_table, weight_reads
from benchmarks.transformers_peer import hf_model, peer
from cli.command import command
from cli.log import log_to_stderr
from cli.options import add_device_options, add_prefill_options, check_counts
from cli.parser import Parser
from formats import FORMATS
from formats.kv_cache import KV_CACHES
from formats.quantizer import DTYPES
from generate import load_model
from model import ModelArgs
from models import ARCHITECTURES
from models.random_weights import (
    RandomWeights,
    architecture,
    first_layers,
    free_memory,
    number_format,
    random_prompt,
)
from parallel import process_group
from parallel.device import pick_device
from parallel.heartbeat import fail
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.weights import bytes_per_token, peak_bytes, stored_bytes

KERNEL_STEPS = 10  # steps that are profiled
SWEEP_EXPERTS = 8, 16, 32, 64, 128
SWEEP_ACTIVE = 1, 2, 4, 8
SWEEP_LAYERS = 4

log = logging.getLogger("moe_fast")


# Measuring ----------------------------------------------------------------------------------------


def read_bandwidth(device: torch.device, size: int = 4 << 30, repeats: int = 10) -> float:
    """Return the read bandwidth in bytes/s: the best of several reductions."""
    if device.type != "cuda":
        size, repeats = size >> 4, 3
    x = torch.empty(size // 2, dtype=torch.bfloat16, device=device).normal_()
    best = 0.0
    for rows in (1 << 12, 1 << 15, 1 << 18):
        view = x.view(rows, -1)
        for kernel in (lambda t: t.sum(-1, dtype=torch.float32), lambda t: t.amax(-1)):
            kernel(view)
            for _ in range(repeats):
                best = max(best, size / seconds_of(kernel, view))
    return best


def seconds_of(work, x: torch.Tensor) -> float:
    """Return the time of one call: by events on CUDA, by the clock on CPU."""
    if not x.is_cuda:
        start = time.perf_counter()
        work(x)
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work(x)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def open_session(args: ModelArgs, options: argparse.Namespace, device: torch.device) -> Session:
    """Return a session over a model with random weights."""
    source = RandomWeights(args, number_format(options.mode, args))
    model = load_model(source, device, parallel=options.parallel)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    length = options.max_seq_len or options.prompt_len + options.new_tokens
    return Session(
        model,
        length,
        SessionOptions(
            batch=options.batch,
            compile=not options.eager,
            compile_prefill=options.compile_prefill,
            prefill_chunk=options.prefill_chunk,
            cache_class=KV_CACHES[options.kv_cache],
        ),
    )


def time_answers(session: Session, options: argparse.Namespace) -> dict[str, list[float]]:
    """Decode random prompts once with compilation, then `repeats` times.

    Returns seconds to both tokens of the first answer (cold), then of each repeat the steps/s
    (rates) and the seconds to the first token (first).
    """
    sampling, args = Sampling(seed=0), session.model.args
    prompts = [random_prompt(args, options.prompt_len, seed) for seed in range(options.batch)]

    def token_times(count: int) -> list[float]:
        session.reset()
        start = time.perf_counter()
        return [time.perf_counter() - start for _ in session.stream_all(prompts, count, sampling)]

    cold, rates, first = token_times(2), [], []
    for _ in range(options.repeats):
        times = token_times(options.new_tokens)
        rates.append((len(times) - 1) / (times[-1] - times[0]))
        first.append(times[0])
        process_group.check_same_tokens(session.ids)
    return {"cold": cold, "rates": rates, "first": first}


def cache_in_use(session: Session, position: int) -> int:
    """Return the bytes of all layers' caches that a token at this position reads."""
    used = 0
    for block, state in zip(session.model.layers, session.states, strict=True):
        window: int | None = block.attention.window
        visible = min(position, window or position)
        used += state.nbytes * visible // session.cache_len
    return used


def describe_run(session: Session, options: argparse.Namespace) -> dict:
    """Return the first fields of a result: the model, its settings and the GPU."""
    on_gpu = session.device.type == "cuda"
    names = "arch", "mode", "kv_cache", "batch", "prompt_len", "new_tokens"
    return {name: getattr(options, name) for name in names} | {
        "max_seq_len": session.max_seq_len,
        "layers": session.model.args.n_layer,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(session.device) if on_gpu else "cpu",
    }


def measure(args: ModelArgs, options: argparse.Namespace, ceiling: float) -> dict:
    """Decode `new_tokens` after random prompts, `repeats` times; report medians.

    ceiling: one GPU's bytes/s. tok_s counts all sequences; ms is the time of a step. bytes_per_step
    is the weights of each distinct expert that a step reads (experts_read a layer, of the last
    step), all other weights, and the cache in use at half of the answer. ttft_cold_s is the first
    answer's, which compiles and captures. activation_bytes: peak memory after loading, less weights
    and cache. On several ranks bytes are sums over them, fraction is of the sum of their
    bandwidths, memory is that of rank 0.
    """
    device = pick_device(options.device)
    session = open_session(args, options, device)
    times = time_answers(session, options)
    rate, ttft = statistics.median(times["rates"]), statistics.median(times["first"])
    result = describe_run(session, options) | {
        "tok_s": rate * options.batch,
        "tok_s_all": [rate * options.batch for rate in times["rates"]],
        "ms": 1e3 / rate,
        "ttft_s": ttft,
        "ttft_cold_s": times["cold"][0],
        "compile_s": times["cold"][-1],
        "prefill_tok_s": options.batch * options.prompt_len / ttft,
    }
    result |= measure_bytes(session, options)
    size, ranks = result["bytes_per_step"], result["ranks"]
    result["gb_s"], result["read_gb_s"] = size * rate / 1e9, ceiling / 1e9
    result["fraction"] = size * rate / (ceiling * ranks)
    on_gpu = device.type == "cuda"
    events = cuda_kernels(session, KERNEL_STEPS, options.prompt_len) if on_gpu else []
    result["kernels_per_layer"] = len(events) / KERNEL_STEPS / args.n_layer if events else None
    if options.kernels:
        # Weights that stay in L2 from one token to the next are read faster than memory allows.
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        unknown = size < 4 * ranks * l2 or options.batch > 1
        reads = [] if unknown else weight_reads(session.model)
        result["kernels"] = kernel_table(events, KERNEL_STEPS, args.n_layer, reads, ceiling)
    return result


def measure_bytes(session: Session, options: argparse.Namespace) -> dict:
    """Return the fields of `measure` about ranks and bytes. Call it after an answer."""
    model, ranks, peak = session.model, process_group.size(), peak_bytes(session.device)
    cache = sum(state.nbytes for state in session.states)
    used = cache_in_use(session, options.prompt_len + options.new_tokens // 2)
    routing = model(session.token, session.position - 1, return_routing=True)[1]  # [L, B, A]
    experts_read = statistics.fmean(len(layer.unique()) for layer in routing)
    beside = max(0, peak - stored_bytes(model) - cache)
    return {
        "ranks": ranks,
        "parallel": options.parallel if ranks > 1 else None,
        "bytes_per_token": process_group.total(bytes_per_token(model)),
        "experts_read": experts_read,
        "cache_bytes": process_group.total(used),
        "bytes_per_step": process_group.total(bytes_per_token(model, experts_read) + used),
        "peak_bytes": peak,
        "activation_bytes": beside if session.device.type == "cuda" else None,
    }


def sweep(args: ModelArgs, options: argparse.Namespace, ceiling: float) -> dict:
    """Measure each of SWEEP_EXPERTS at the model's A, then each of SWEEP_ACTIVE at its E."""
    rows, result = [], {}
    if hasattr(args, "n_group"):  # few experts would not fit into groups
        args = dataclasses.replace(args, **{"n_group": 1, "n_active_group": 1})
    pairs = [(n_expert, args.n_active) for n_expert in SWEEP_EXPERTS]
    pairs += [(args.n_expert, n_active) for n_active in SWEEP_ACTIVE]
    for n_expert, n_active in dict.fromkeys(pair for pair in pairs if pair[1] <= pair[0]):
        try:
            variant = dataclasses.replace(args, n_expert=n_expert, n_active=n_active)
            result = measure(variant, options, ceiling)
            row = {"n_expert": n_expert, "n_active": n_active, "us": 1e3 * result["ms"]}
            names = "bytes_per_token", "bytes_per_step", "gb_s", "fraction"
            rows.append(row | {name: result[name] for name in names})
            log.info(f"{n_expert} experts, {n_active} active: {row['us']:.1f} us a token")
        except torch.cuda.OutOfMemoryError:
            log.warning(f"warning: {n_expert} experts do not fit into memory: left out")
        free_memory(not options.eager)
    if not rows:
        raise ValueError("--sweep: not one of its models fits into memory: lower --layers")
    common = "arch", "mode", "kv_cache", "batch", "layers", "gpu", "torch"
    common += "prompt_len", "new_tokens", "read_gb_s"
    return {name: result[name] for name in common} | {"sweep": rows}


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
    add_shape_options(parser)
    parser.add_number("--repeats", default=5)
    parser.add_flag("--eager", "do not compile")
    parser.add_flag("--kernels", "also list a step's kernels, their times and the gaps")
    sweep = f"latency against experts and active ones, with {SWEEP_LAYERS} layers by default"
    parser.add_argument("--sweep", choices=("experts",), help=sweep)
    peer = "also measure Hugging Face transformers (in bf16 if the mode is no dtype)"
    parser.add_argument("--peer", choices=("hf",), help=peer)
    parser.add_flag("--json", "print one JSON object instead of text")
    return parser


def add_shape_options(parser: Parser) -> None:
    """Model, number format, lengths, and how they are run."""
    formats = ", ".join((*DTYPES, *FORMATS))
    arch = f"{', '.join(ARCHITECTURES)}, or a Hugging Face config.json"
    parser.add_argument("--arch", required=True, help=arch)
    mode = f"number format: {formats}, or ATTENTION-EXPERTS"
    parser.add_argument("--mode", default="bf16", help=mode)
    parser.add_number("--layers", "build only the first N layers")
    parser.add_number("--prompt_len", default=5)
    parser.add_number("--new_tokens", default=200)
    parser.add_number("--batch", "sequences at once, with a prompt each", 1)
    parser.add_number("--max_seq_len", "cache length; default: prompt and new tokens")
    add_prefill_options(parser)
    add_device_options(parser)


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
