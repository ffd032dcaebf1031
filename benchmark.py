"""Speed of decoding at a model's real shapes, with random weights made on the device: no checkpoint is needed.

    python benchmark.py --arch Mixtral-8x7B --mode bf16

The theory: at batch 1 a token multiplies each weight it uses once, so its time is bounded below by the bytes of those
weights over the memory's read bandwidth. `fraction` is how much of that bandwidth the whole loop reaches, with sampling
and the host's reading of every token included; the bandwidth is measured in the same run, not taken from a data sheet.
`--kernels` says where the rest of the time goes. `--sweep experts` asks what a token costs as experts are added: idle
ones are never read, so it should depend on A alone, where a loop over experts (FlexFlow's) is linear in E.
`--peer hf` measures Hugging Face transformers in the same run, at the same shapes and in the best of its settings.
The last line of stdout under --json is one JSON object.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence

import torch

import tp
import world
from answer import peak_bytes
from args import ModelArgs
from checkpoint import pick_device
from command import Parser
from generate import load_model
from layers import Linear
from model import ExpertLinear, Transformer, stored
from packing import FORMATS
from peer import hf_model, peer
from quantize import DTYPES, KV_CACHES, Packed, PackedExpertLinear
from session import PREFILL_CHUNK, Sampling, Session
from shapes import ARCHITECTURES, RandomWeights, architecture, first_layers, free, number_format, random_prompt

KERNEL_STEPS = 10  # steps that are profiled
EXPERTS = 8, 16, 32, 64, 128  # the E and the A that a sweep tries, with so many layers
ACTIVE = 1, 2, 4, 8
SWEEP_LAYERS = 4


def read_bandwidth(device: torch.device, size: int = 4 << 30, repeats: int = 10) -> float:
    """Bytes a second that a reduction reads from the device's memory: the best of several kernels over `size` bytes."""
    if device.type != "cuda":
        size, repeats = size >> 4, 3
    x = torch.empty(size // 2, dtype=torch.bfloat16, device=device).normal_()
    best = 0.0
    for rows in (1 << 12, 1 << 15, 1 << 18):
        for kernel in (lambda t: t.sum(-1, dtype=torch.float32), lambda t: t.amax(-1)):
            view = x.view(rows, -1)
            kernel(view)
            for _ in range(repeats):
                best = max(best, size / _seconds(lambda view=view, kernel=kernel: kernel(view), device))
    return best


def _seconds(work, device: torch.device) -> float:
    """Time of one call: by events on CUDA, by the clock on CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def cuda_kernels(session: Session, steps: int, position: int) -> list[tuple[str, float, float]]:
    """(name, start, duration), times in us, of each kernel and copy of steps from a position on, sampling included."""
    step = next(iter(session.steps.values()))
    session.position.fill_(position)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.name, event.time_range.start, event.time_range.elapsed_us()) for event in events]


def weight_reads(model: Transformer) -> list[int]:
    """Bytes that a token reads of each product's weights, in the order of the products (that of their definition)."""
    sizes = []
    for module in model.modules():
        if isinstance(module, Linear | ExpertLinear | Packed):
            size, args = sum(parameter.nbytes for parameter in module.parameters()), model.args
            stacked = isinstance(module, ExpertLinear | PackedExpertLinear)
            sizes.append(size * args.n_active // args.n_expert if stacked else size)
    return sizes


def known_reads(times: Sequence[float], reads: Sequence[int], bandwidth: float) -> dict[int, int]:
    """times in us and weight reads in bytes, both in order, bytes a second -> bytes by place in `times`, where certain.

    Names do not say what a kernel reads. But each weight is read by one kernel, in order, and no faster than memory
    gives it: its place is known where the earliest that this allows is the latest too. Reads below 1 us have no place.
    """
    bounds = [size / bandwidth / 1.05 * 1e6 for size in reads]  # 5 %: the bandwidth is measured too
    kept = [(bound, size) for bound, size in zip(bounds, reads, strict=True) if bound >= 1]

    def places(backwards: bool) -> list[int]:
        order, found = (reversed if backwards else iter)(range(len(times))), []
        for bound, _ in reversed(kept) if backwards else kept:
            found += next(([n] for n in order if times[n] >= bound), [])
        return found

    first, last = places(False), places(True)[::-1]
    whole = zip(first, last, kept, strict=True) if len(first) == len(kept) else ()  # else no order fits
    return {n: size for n, other, (_, size) in whole if n == other}


def kernel_table(events: Sequence, steps: int, layers: int, reads: Sequence[int], bandwidth: float) -> dict:
    """(name, start, duration) in us of so many equal steps -> a step's times, medians over the steps, and a row a name.

    gaps: the share of the span in which no kernel ran; the profiler may widen it. A row's `per` is "layer" where its
    launches are a multiple of the layers, else "token": us_per is the time of all its launches in one of them, gb_s the
    speed of those whose bytes are known (`known_reads`) or None. Raises ValueError for steps that differ.
    """
    events = sorted(events, key=lambda event: event[1])
    size = len(events) // steps
    recorded = [events[n * size : (n + 1) * size] for n in range(steps)]
    names = [name for name, _, _ in recorded[0]]
    if not size or len(events) % steps or any([name for name, _, _ in step] != names for step in recorded):
        raise ValueError(f"--kernels: {len(events)} kernels seen, not the same in each of {steps} steps: run again")
    spans, gaps = [], []
    for step in recorded:
        end, idle = step[0][1], 0.0
        for _, start, duration in step:
            idle, end = idle + max(0.0, start - end), max(end, start + duration)
        spans.append(end - step[0][1])
        gaps.append(idle / spans[-1])
    times = [statistics.median(step[n][2] for step in recorded) for n in range(size)]
    known, rows = known_reads(times, reads, bandwidth), []
    for name in dict.fromkeys(names):
        at = [n for n in range(size) if names[n] == name]
        read, total = [n for n in at if n in known], sum(times[n] for n in at)
        per, count = ("token", 1) if len(at) % layers else ("layer", layers)
        speed = sum(known[n] for n in read) / sum(times[n] for n in read) / 1e3 if read else None
        rows.append({"name": name, "per": per, "launches": len(at) // count, "us": total / len(at),
                     "us_per": total / count, "share": total / sum(times), "gb_s": speed})  # fmt: skip
    rows.sort(key=lambda row: -row["share"])
    return {"steps": steps, "span_us": statistics.median(spans), "kernels_us": sum(times),
            "gaps": statistics.median(gaps), "rows": rows}  # fmt: skip


def measure(args: ModelArgs, options: argparse.Namespace, ceiling: float) -> dict:
    """Decode `new_tokens` after random prompts, `repeats` times, and report the median. ceiling: one GPU's bytes/s.

    tok_s is of all sequences together, ms a step's. bytes_per_step: the weights of each distinct expert that a step
    reads (experts_read a layer, of the last step) and of all else, and the cache in use at half of the answer.
    ttft_cold_s is the first answer's: it compiles and records (from the compiler's files on disk, where it finds them).
    activation_bytes: the most memory in use beside weights and cache, once the weights are there.
    On several ranks the bytes that a token or a step reads are sums over them (what each has whole counts on each), and
    fraction is of their bandwidths' sum; memory is that of rank 0.
    """
    device = pick_device(options.device)
    model = load_model(RandomWeights(args, number_format(options.mode, args)), device, parallel=options.parallel)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model.cache_kind = KV_CACHES[options.kv_cache]
    length = options.max_seq_len or options.prompt_len + options.new_tokens
    compiled = not options.eager, options.compile_prefill
    session = Session(model, length, *compiled, options.batch, options.prefill_chunk)
    sampling = Sampling(seed=0)
    prompts = [random_prompt(args, options.prompt_len, seed) for seed in range(options.batch)]
    start = time.perf_counter()
    cold = [time.perf_counter() - start for _ in session.stream_all(prompts, 2, sampling)]
    rates, first = [], []
    for _ in range(options.repeats):
        session.reset()
        start = time.perf_counter()
        times = [time.perf_counter() for _ in session.stream_all(prompts, options.new_tokens, sampling)]
        rates.append((len(times) - 1) / (times[-1] - times[0]))
        first.append(times[0] - start)
        world.check_tokens(session.ids)
    rate, ttft, peak = statistics.median(rates), statistics.median(first), peak_bytes(device)
    cache = sum(buffer.nbytes for cache in session.caches for buffer in cache.buffers())
    position = options.prompt_len + options.new_tokens // 2
    used = sum(
        sum(buffer.nbytes for buffer in cache.buffers()) * min(position, window or position) // session.slots
        for cache, window in zip(session.caches, map(args.window, range(args.n_layer)), strict=True)
    )
    routing = model(session.token, session.position - 1, return_routing=True)[1]  # [L, B, A]
    experts_read = statistics.fmean(len(layer.unique()) for layer in routing)
    size = world.total(model.bytes_per_token(experts_read) + used)
    weights = sum(tensor.nbytes for tensor in stored(model))
    events = cuda_kernels(session, KERNEL_STEPS, options.prompt_len) if device.type == "cuda" else []
    result = {
        **{name: getattr(options, name) for name in ("arch", "mode", "kv_cache", "batch", "prompt_len", "new_tokens")},
        "max_seq_len": length, "layers": args.n_layer, "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "tok_s": rate * options.batch, "tok_s_all": [rate * options.batch for rate in rates], "ms": 1e3 / rate,
        "ttft_s": ttft, "ttft_cold_s": cold[0], "compile_s": cold[-1],
        "prefill_tok_s": options.batch * options.prompt_len / ttft,
        "ranks": world.size(), "parallel": options.parallel if world.size() > 1 else None,
        "bytes_per_token": world.total(model.bytes_per_token()), "experts_read": experts_read,
        "cache_bytes": world.total(used), "bytes_per_step": size, "gb_s": size * rate / 1e9, "read_gb_s": ceiling / 1e9,
        "fraction": size * rate / (ceiling * world.size()), "peak_bytes": peak,
        "activation_bytes": max(0, peak - weights - cache) if device.type == "cuda" else None,
        "kernels_per_layer": len(events) / KERNEL_STEPS / args.n_layer if events else None,
    }  # fmt: skip
    if options.kernels:
        # Weights that stay in the cache from one token to the next are read faster than memory gives them.
        cached = size < 4 * world.size() * torch.cuda.get_device_properties(device).L2_cache_size
        reads = [] if cached or options.batch > 1 else weight_reads(model)
        result["kernels"] = kernel_table(events, KERNEL_STEPS, args.n_layer, reads, ceiling)
    return result


def sweep(args: ModelArgs, options: argparse.Namespace, ceiling: float) -> dict:
    """Measure each of EXPERTS at the model's A, then each of ACTIVE at its E, as far as memory holds them."""
    rows, result = [], {}
    args = dataclasses.replace(args, n_group=1, n_active_group=1)  # few experts could not stand in them
    pairs = [(n_expert, args.n_active) for n_expert in EXPERTS] + [(args.n_expert, n_active) for n_active in ACTIVE]
    for n_expert, n_active in dict.fromkeys(pair for pair in pairs if pair[1] <= pair[0]):
        try:
            result = measure(dataclasses.replace(args, n_expert=n_expert, n_active=n_active), options, ceiling)
            row = {"n_expert": n_expert, "n_active": n_active, "us": 1e3 * result["ms"]}
            names = "bytes_per_token", "bytes_per_step", "gb_s", "fraction"
            rows.append(row | {name: result[name] for name in names})
            print(f"{n_expert} experts, {n_active} active: {row['us']:.1f} us a token", file=sys.stderr)
        except torch.cuda.OutOfMemoryError:
            print(f"warning: {n_expert} experts do not fit into memory: left out", file=sys.stderr)
        free(not options.eager)
    if not rows:
        raise ValueError("--sweep: not one of its models fits into memory: lower --layers")
    common = ("arch", "mode", "kv_cache", "batch", "layers", "gpu", "torch", "prompt_len", "new_tokens", "read_gb_s")
    return {name: result[name] for name in common} | {"sweep": rows}


def report(r: dict) -> str:
    """The result for a reader."""
    lines = [f"{r['arch']} {r['mode']}, {r['layers']} layers, {r['gpu']}, torch {r['torch']}"]
    if r.get("ranks", 1) > 1:
        lines[0] += f", {r['parallel']} parallel on {r['ranks']}"
    if "sweep" in r:
        lines += [f"  prompt {r['prompt_len']}, new {r['new_tokens']}, measured bandwidth {r['read_gb_s']:.0f} GB/s",
                  "    E   A   us a token   bytes a token  fraction"]  # fmt: skip
        form = "  {n_expert:3} {n_active:3} {us:12.1f} {bytes_per_token:15,} {fraction:9.3f}"
        return "\n".join(lines + [form.format(**row) for row in r["sweep"]])
    beside = "" if r["activation_bytes"] is None else f" ({r['activation_bytes'] / 1e9:.2f} beside weights and cache)"
    lines += [
        f"  {r['batch']} sequence{'s' * (r['batch'] > 1)}, prompt {r['prompt_len']}, new {r['new_tokens']}, "
        f"cache {r['max_seq_len']}",
        f"  first token {r['ttft_s'] * 1e3:.1f} ms ({r['prefill_tok_s']:.0f} prompt tokens/s), "
        f"cold {r['ttft_cold_s']:.1f} s",
        f"  {r['tok_s']:.1f} tokens/s (median of {len(r['tok_s_all'])}: "
        f"{min(r['tok_s_all']):.1f} to {max(r['tok_s_all']):.1f}), {r['ms']:.3f} ms a step",
        f"  {r['bytes_per_token'] / 1e9:.3f} GB a token, {r['bytes_per_step'] / 1e9:.3f} GB a step "
        f"({r['experts_read']:.1f} experts a layer, {r['cache_bytes'] / 1e9:.3f} GB of cache)",
        f"  {r['gb_s']:.0f} GB/s, {r['fraction']:.3f} of the measured {r['read_gb_s']:.0f} GB/s"
        f"{' a GPU' * (r['ranks'] > 1)}",
        f"  kernels a layer {r['kernels_per_layer'] and round(r['kernels_per_layer'], 1)}, "
        f"peak memory {r['peak_bytes'] / 1e9:.1f} GB{beside}, compile and record {r['compile_s']:.1f} s",
    ]
    if p := r.get("peer"):
        peak = "" if p["peak_bytes"] is None else f", peak memory {p['peak_bytes'] / 1e9:.1f} GB"
        lines += [
            f"  {p['name']} in {p['dtype']}: {p['tok_s']:.1f} tokens/s (1 answer after a warm-up), "
            f"ours / peer {r['tok_s'] / p['tok_s']:.2f}",
            f"    {p['setting']}: the best of {len(p['settings'])}; first token {p['ttft_s'] * 1e3:.1f} ms{peak}",
        ]
    if table := r.get("kernels"):
        times = f"{table['span_us']:.1f} us, kernels {table['kernels_us']:.1f} us, gaps {table['gaps']:.1%}"
        lines += [f"  a step, median of {table['steps']}: {times}"]
        lines += ["    launches      us each  us in all   share   GB/s  name"]
        for row in table["rows"]:
            form = "  {launches:4} a {per}  {us:9.2f}  {us_per:9.2f}  {share:6.1%}  {speed:>5}  {name:.80}"
            lines.append(form.format(**row, speed="" if row["gb_s"] is None else round(row["gb_s"])))
    return "\n".join(lines)


def build_parser() -> Parser:
    parser = Parser(
        "Measure decoding speed with random weights at real shapes.",
        (
            "python benchmark.py --arch Mixtral-8x7B --mode int4 --kernels",
            "python benchmark.py --arch Qwen3-30B-A3B --layers 4 --prompt_len 512 --peer hf --json",
            "torchrun --standalone --nproc_per_node=4 benchmark.py --arch Mixtral-8x7B --parallel expert",
        ),
    )
    add = parser.add_argument
    add("--arch", required=True, help=f"{', '.join(ARCHITECTURES)}, or a Hugging Face config.json")
    add("--mode", default="bf16", help=f"number format: {', '.join((*DTYPES, *FORMATS))}, or ATTENTION-EXPERTS")
    add("--layers", type=int, metavar="N", help="build only the first N layers")
    add("--prompt_len", type=int, default=5, metavar="N")
    add("--new_tokens", type=int, default=200, metavar="N")
    add("--batch", type=int, default=1, metavar="N", help="sequences at once, each with a prompt of its own")
    add("--max_seq_len", type=int, metavar="N", help="length of the cache; default: what prompt and new tokens need")
    add("--compile_prefill", action="store_true", help="compile the prompt's pass too")
    add("--prefill_chunk", type=int, default=PREFILL_CHUNK, metavar="N", help="prompt tokens that are computed at once")
    add("--kv_cache", choices=tuple(KV_CACHES), default="plain", help="int8: keys and values in half the bytes")
    add("--repeats", type=int, default=5, metavar="N")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--parallel", default="tensor", choices=tp.PARALLEL, help="how torchrun's processes share the experts")
    add("--eager", action="store_true", help="do not compile")
    add("--kernels", action="store_true", help="also list a step's kernels, with the time of each and of the gaps")
    add("--sweep", choices=("experts",), help=f"latency against the number of experts and of active ones; without "
        f"--layers of {SWEEP_LAYERS} layers")  # fmt: skip
    add("--peer", choices=("hf",), help="also measure Hugging Face transformers in its best setting (in bf16 where the "
        "mode is no dtype)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object in place of the table")
    return parser


def command() -> int:
    options = build_parser().parse_args()
    device = world.start(options.device)
    for name, least in (("layers", 1), ("prompt_len", 1), ("new_tokens", 2), ("repeats", 1), ("batch", 1),
                        ("prefill_chunk", 1)):  # fmt: skip
        if (value := getattr(options, name)) is not None and value < least:
            raise ValueError(f"--{name} {value}: it must be at least {least}")
    args = architecture(options.arch)
    if options.layers and options.layers > args.n_layer:
        raise ValueError(f"--layers {options.layers}: {options.arch} has {args.n_layer}")
    length, limit = options.prompt_len + options.new_tokens, options.max_seq_len or args.max_position
    if length > limit or limit > args.max_position:
        what = "--max_seq_len" if length > limit and options.max_seq_len else "the model's positions"
        raise ValueError(
            f"--prompt_len and --new_tokens, {length}, or --max_seq_len exceed {what}, "
            f"{limit if length > limit else args.max_position}: ask for less"
        )
    if world.size() > 1 and (options.sweep or options.peer):
        raise ValueError("--sweep and --peer measure one GPU: leave torchrun out")
    if options.kernels and (device.type != "cuda" or options.eager):
        raise ValueError("--kernels lists a recorded step: it needs a CUDA GPU, and no --eager")
    if options.kernels and options.sweep:
        raise ValueError("--kernels and --sweep: give one of them at a time")
    if options.peer and options.batch > 1:
        raise ValueError("--peer measures one sequence: leave --batch out")
    if options.peer and options.sweep:
        raise ValueError("--peer and --sweep: give one of them at a time")
    number_format(options.mode, args)  # refuses a mode before anything is measured
    layers = options.layers or (min(SWEEP_LAYERS, args.n_layer) if options.sweep else args.n_layer)
    args = first_layers(args, layers)
    if options.peer:
        hf_model(args, torch.bfloat16, "meta")  # refuses what it cannot be, too
    world.agree(vars(options), RandomWeights(args, number_format(options.mode, args)))
    ceiling = read_bandwidth(device)
    result = sweep(args, options, ceiling) if options.sweep else measure(args, options, ceiling)
    if options.peer:
        free(not options.eager)
        result["peer"] = peer(args, options)
    if world.is_main():
        print(json.dumps(result) if options.json else report(result), flush=True)
    world.stop()
    return 0


def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    return world.attempt(command)


if __name__ == "__main__":
    sys.exit(main())
