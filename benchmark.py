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
import gc
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

import tp
import world
from args import ModelArgs, Yarn
from command import Parser
from families import args_from_hf
from generate import DTYPES, load_model, peak_bytes, pick_device
from layers import Linear
from model import ExpertLinear, Transformer, stored
from packing import FORMATS, PLAIN
from quantize import KV_CACHES, Packed, PackedExpertLinear, of_mode, pack_weight, plan
from session import PREFILL_CHUNK, Sampling, Session

GPT_OSS_20B = ModelArgs(
    dim=2880, n_layer=24, n_head=64, n_kv_head=8, head_dim=64, intermediate=2880, n_expert=32, n_active=4,
    vocab_size=201088, max_position=131072, rope_theta=1.5e5, attention_bias=True, sliding_window=128,
    full_layers=tuple(range(1, 24, 2)), attention_sinks=True, router_bias=True, expert_bias=True, swiglu_limit=7.0,
    yarn=Yarn(32.0, 4096, truncate=False, attention=0.1 * math.log(32) + 1),
)  # fmt: skip
ARCHITECTURES = {
    "Mixtral-8x7B": ModelArgs(
        dim=4096, n_layer=32, n_head=32, n_kv_head=8, head_dim=128, intermediate=14336, n_expert=8, n_active=2,
        vocab_size=32000, max_position=32768, rope_theta=1e6,
    ),
    "Mixtral-8x22B": ModelArgs(
        dim=6144, n_layer=56, n_head=48, n_kv_head=8, head_dim=128, intermediate=16384, n_expert=8, n_active=2,
        vocab_size=32768, max_position=65536, rope_theta=1e6,
    ),
    "Qwen3-30B-A3B": ModelArgs(
        dim=2048, n_layer=48, n_head=32, n_kv_head=4, head_dim=128, intermediate=768, n_expert=128, n_active=8,
        vocab_size=151936, max_position=40960, rope_theta=1e6, norm_eps=1e-6, qk_norm="head",
    ),
    "OLMoE-1B-7B": ModelArgs(
        dim=2048, n_layer=16, n_head=16, n_kv_head=16, head_dim=128, intermediate=1024, n_expert=64, n_active=8,
        vocab_size=50304, max_position=4096, norm_topk=False, qk_norm="full",
    ),
    "Qwen1.5-MoE-A2.7B": ModelArgs(
        dim=2048, n_layer=24, n_head=16, n_kv_head=16, head_dim=128, intermediate=1408, n_expert=60, n_active=4,
        vocab_size=151936, max_position=8192, rope_theta=1e6, norm_eps=1e-6, norm_topk=False, qkv_bias=True,
        shared_intermediate=5632,
    ),
    "Granite-3.1-3b-a800m": ModelArgs(
        dim=1536, n_layer=32, n_head=24, n_kv_head=8, head_dim=64, intermediate=512, n_expert=40, n_active=8,
        vocab_size=49155, max_position=131072, rope_theta=1e7, norm_eps=1e-6, tied_embeddings=True,
        attention_scale=0.015625, embedding_scale=12.0, residual_scale=0.22, logit_scale=1 / 6,
    ),
    "Phi-3.5-MoE": ModelArgs(  # the factors of its rope change no time
        dim=4096, n_layer=32, n_head=32, n_kv_head=8, head_dim=128, intermediate=6400, n_expert=16, n_active=2,
        vocab_size=32064, max_position=4096, attention_bias=True, sliding_window=131072, layer_norm=True,
        head_bias=True, norm_topk=False, mixer_eps=0.01, rope_factors=(1.0,) * 64, rope_scale=1.243163121016122,
    ),
    "GLM-4.5-Air": ModelArgs(
        dim=4096, n_layer=46, n_head=96, n_kv_head=8, head_dim=128, intermediate=1408, n_expert=128, n_active=8,
        vocab_size=151552, max_position=131072, rope_theta=1e6, qkv_bias=True, dense_layers=(0,),
        dense_intermediate=10944, shared_intermediate=1408, shared_gated=False, scoring="sigmoid", rotary_dim=64,
    ),
    "DeepSeek-V2-Lite": ModelArgs(
        dim=2048, n_layer=27, n_head=16, n_kv_head=1, head_dim=192, intermediate=1408, n_expert=64, n_active=6,
        vocab_size=102400, max_position=163840, norm_eps=1e-6, norm_topk=False, dense_layers=(0,),
        dense_intermediate=10944, shared_intermediate=2816, shared_gated=False, rotary_dim=64,
        attention_scale=192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, yarn=Yarn(40.0, 4096), kv_rank=512, value_dim=128,
    ),
    "DeepSeek-V3": ModelArgs(
        dim=7168, n_layer=61, n_head=128, n_kv_head=1, head_dim=192, intermediate=2048, n_expert=256, n_active=8,
        vocab_size=129280, max_position=163840, norm_eps=1e-6, dense_layers=(0, 1, 2), dense_intermediate=18432,
        shared_intermediate=2048, shared_gated=False, scoring="sigmoid", routed_scale=2.5, rotary_dim=64,
        attention_scale=192**-0.5 * (0.1 * math.log(40) + 1) ** 2, yarn=Yarn(40.0, 4096), n_group=8, n_active_group=4,
        kv_rank=512, q_rank=1536, value_dim=128,
    ),
    "TinyMistral-6x248M": ModelArgs(
        dim=1024, n_layer=12, n_head=32, n_kv_head=8, head_dim=32, intermediate=4096, n_expert=6, n_active=2,
        vocab_size=32005, max_position=32768, norm_eps=1e-6,
    ),
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": dataclasses.replace(
        GPT_OSS_20B, n_layer=36, n_expert=128, full_layers=tuple(range(1, 36, 2))
    ),
}  # fmt: skip

KERNEL_STEPS = 10  # steps that are profiled
EXPERTS = 8, 16, 32, 64, 128  # the E and the A that a sweep tries, with so many layers
ACTIVE = 1, 2, 4, 8
SWEEP_LAYERS = 4
PEER_TYPES = {"none": "mixtral", "head": "qwen3_moe", "full": "olmoe"}  # transformers' model_type for each qk_norm
PEER_SETTINGS = tuple(itertools.product(("static", "dynamic"), ("batched_mm", "grouped_mm", "eager")))  # cache, experts


class RandomWeights:
    """A source for `load_model` that makes every tensor on the device: normal, scaled to keep activations near one.

    format: a checkpoint's, as `quantize.plan` makes it; the weights are then packed as a checkpoint's would be (but
    rounded to nearest in the half-quadratic formats, which take as long to multiply with).
    """

    def __init__(self, args: ModelArgs, format: dict | None = None, seed: int = 0):
        self.args, self.format, self.seed = dataclasses.asdict(args), format or {"name": "bf16"}, seed
        self.dtype = DTYPES[self.format.get("dtype", self.format["name"])]
        with torch.device("meta"):
            self.shapes = {name: parameter.shape for name, parameter in Transformer(args).named_parameters()}
        self.packed: tuple[str, dict[str, Tensor]] = "", {}  # the module packed last, whose parts are read one by one
        self.made: tuple[str, Tensor | None] = "", None  # the tensor made last, which may be read in several slices

    def read(self, name: str, index: tuple[slice, ...] | None = None, device: torch.device | str = "cpu") -> Tensor:
        """The tensor of that name, or its part `index`, the same for the same seed and device.

        A part is cut from the whole tensor, so that all ranks together have the model that one would have.
        """
        whole = self._whole(name, device)
        return whole if index is None else whole[index].clone()

    def _whole(self, name: str, device: torch.device | str) -> Tensor:
        path, leaf = name.rsplit(".", 1)
        spec = self.format.get("modules", {}).get(path)
        if spec is None or leaf == "bias":
            if self.made[0] != name:
                self.made = "", None  # not two at once
                self.made = name, self._plain(name, device)
            return self.made[1]
        if self.packed[0] != path:
            whole = f"{path}.weight" if f"{path}.weight" in self.shapes else "embedding.weight"  # of a tied head
            self.packed = path, pack_weight(self._plain(whole, device), spec, torch.device(device), iterations=0)
        return self.packed[1][leaf]

    def _plain(self, name: str, device: torch.device | str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=self.dtype, device=device)
        generator = torch.Generator(device).manual_seed(self.seed + list(self.shapes).index(name))
        scale = 1.0 if name == "embedding.weight" else shape[-1] ** -0.5
        return torch.empty(shape, dtype=self.dtype, device=device).normal_(0, scale, generator=generator)


def number_format(mode: str, args: ModelArgs) -> dict:
    """--mode -> a checkpoint's "format": a dtype, a row of FORMATS, or ATTENTION-EXPERTS, such as hqq4-hqq2."""
    if mode in DTYPES:
        return {"name": mode}
    attention, _, experts = mode.partition("-")
    if not {attention, experts or attention} <= {PLAIN, *FORMATS}:
        raise ValueError(f"--mode {mode}: it must be one of {', '.join((*DTYPES, *FORMATS))}, or ATTENTION-EXPERTS")
    return plan(args, *((attention, experts) if experts else of_mode(mode)))


def first_layers(args: ModelArgs, count: int) -> ModelArgs:
    """The args of the model's first layers alone."""
    named = {name: tuple(n for n in getattr(args, name) if n < count) for name in ("dense_layers", "full_layers")}
    return dataclasses.replace(args, n_layer=count, **named)


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


def random_prompt(args: ModelArgs, length: int, seed: int = 0) -> list[int]:
    """So many token ids, the same in every run."""
    return torch.randint(args.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def free(compiled: bool) -> None:
    """Give back the memory of models that are no longer used."""
    if compiled:
        torch.compiler.reset()
    gc.collect()  # a session and its steps refer to each other, and hold the model
    torch.cuda.empty_cache()  # nothing where there is no GPU


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


# Peer: Hugging Face transformers ------------------------------------------------------------------------------------


def hf_config(args: ModelArgs) -> dict:
    """The config.json of a model with these args: the inverse of `args_from_hf`. ValueError where no model has them."""
    kind = "qwen2_moe" if args.shared_intermediate else PEER_TYPES[args.qk_norm]
    kind = "granitemoe" if args.attention_scale else "phimoe" if args.layer_norm else kind
    kind = "glm4_moe" if args.scoring == "sigmoid" else "gpt_oss" if args.attention_sinks else kind
    kind = {"sigmoid": "deepseek_v3", "softmax": "deepseek_v2"}[args.scoring] if args.kv_rank else kind
    config = {
        "model_type": kind, "vocab_size": args.vocab_size, "hidden_size": args.dim, "num_hidden_layers": args.n_layer,
        "num_attention_heads": args.n_head, "num_key_value_heads": args.n_kv_head, "head_dim": args.head_dim,
        "intermediate_size": args.dense_intermediate or args.intermediate, "moe_intermediate_size": args.intermediate,
        "num_local_experts" if kind in ("mixtral", "gpt_oss") else "num_experts": args.n_expert,
        "clip_qkv": args.clip_qkv,
        "num_experts_per_tok": args.n_active, "norm_topk_prob": args.norm_topk, "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": args.max_position, "attention_bias": args.attention_bias,
        "qkv_bias": args.qkv_bias, "shared_expert_intermediate_size": args.shared_intermediate,
        "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta},
        "tie_word_embeddings": args.tied_embeddings, "mlp_only_layers": list(args.dense_layers),
        "use_sliding_window": args.sliding_window is not None, "sliding_window": args.sliding_window,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if kind in ("granitemoe", "phimoe", "glm4_moe", "deepseek_v2", "deepseek_v3"):
        for name in ("num_experts", "qkv_bias", "shared_expert_intermediate_size", "mlp_only_layers"):
            del config[name]
    rope = config["rope_parameters"]
    if kind == "granitemoe":
        config |= {
            "num_local_experts": args.n_expert, "attention_multiplier": args.attention_scale,
            "embedding_multiplier": args.embedding_scale, "residual_multiplier": args.residual_scale,
            "logits_scaling": 1 / args.logit_scale,
        }  # fmt: skip
    if kind == "phimoe":
        config |= {"num_local_experts": args.n_expert, "lm_head_bias": args.head_bias}
        config |= {"router_jitter_noise": args.mixer_eps}
    if args.rope_factors:
        factors, scale = list(args.rope_factors), args.rope_scale
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": args.max_position}
        rope |= {"short_factor": factors, "long_factor": factors, "short_mscale": scale, "long_mscale": scale}
    if kind == "glm4_moe" or args.kv_rank:
        config |= {
            "n_routed_experts": args.n_expert, "n_shared_experts": args.shared_intermediate // args.intermediate,
            "first_k_dense_replace": len(args.dense_layers), "routed_scaling_factor": args.routed_scale,
            "num_nextn_predict_layers": 0,
        }  # fmt: skip
    if kind == "glm4_moe":
        rope["partial_rotary_factor"] = (args.rotary_dim or args.head_dim) / args.head_dim
        config |= {"attention_bias": args.qkv_bias, "use_qk_norm": args.qk_norm == "head"}
    if args.kv_rank:
        config |= {
            "num_key_value_heads": args.n_head, "n_group": args.n_group, "topk_group": args.n_active_group,
            "kv_lora_rank": args.kv_rank, "q_lora_rank": args.q_rank,
            "qk_nope_head_dim": args.head_dim - args.rotary_dim, "qk_rope_head_dim": args.rotary_dim,
            "v_head_dim": args.value_dim, "head_dim": args.rotary_dim,
        }  # fmt: skip
        if kind == "deepseek_v2":
            config["topk_method"] = "greedy" if args.n_group == 1 else "group_limited_greedy"
    if kind == "gpt_oss":
        kinds = ["sliding_attention" if args.window(layer) else "full_attention" for layer in range(args.n_layer)]
        config |= {"layer_types": kinds, "swiglu_limit": args.swiglu_limit, "swiglu_alpha": args.swiglu_alpha}
    if yarn := args.yarn:
        rope |= {
            "rope_type": "yarn", "factor": yarn.factor, "original_max_position_embeddings": yarn.original,
            "beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow, "truncate": yarn.truncate,
            "attention_factor": yarn.attention,
        }  # fmt: skip
    if args.kv_rank and args.yarn and args.attention_scale:  # what its mscale_all_dim was
        magnitude = (args.attention_scale * args.head_dim**0.5) ** 0.5
        rope["mscale_all_dim"] = round((magnitude - 1) / (0.1 * math.log(args.yarn.factor)), 6)
    if args_from_hf(config) != args:
        raise ValueError(f"--peer hf: transformers' {kind} cannot have these args: leave --peer out")
    return config


def hf_model(args: ModelArgs, dtype: torch.dtype, device: torch.device | str):
    """transformers' model of these args, its weights begun anew on the device. ValueError where there is none."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError("--peer hf needs transformers: pip install 'transformers>=5.0,<6'") from None
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config(args)), dtype=dtype).eval()
    with torch.device("meta"):
        models = Transformer(args), model
    ours, theirs = (  # a bias of scores is none of transformers' parameters
        sum(parameter.numel() for name, parameter in m.named_parameters() if not name.endswith("score_bias"))
        for m in models
    )
    if ours != theirs:
        raise ValueError(f"--peer hf: its model has {theirs:,} weights where ours has {ours:,}: leave --peer out")
    return model


class _Clock(list):
    """A streamer for `generate`: the times at which the host has each token, after that of the prompt's."""

    def put(self, tokens: Tensor) -> None:
        self.append(time.perf_counter())

    def end(self) -> None: ...


def measure_peer(args: ModelArgs, options: argparse.Namespace) -> dict:
    """What `measure` measures, of transformers in each of PEER_SETTINGS; the figures are those of the fastest.

    Prompt, sampling and the reading of every token are those of `measure`; bf16 where the mode is not a dtype. One
    answer counts, after one to warm up; a static cache serves both, since a new one could be compiled for anew.
    A setting that fails is left out with a warning. Raises ValueError where all do.
    """
    device, dtype = pick_device(options.device), options.mode if options.mode in DTYPES else "bf16"
    model, found = hf_model(args, DTYPES[dtype], device), {}
    import transformers

    transformers.logging.set_verbosity_error()
    prompt = torch.tensor([random_prompt(args, options.prompt_len)], device=device)
    given = {"do_sample": True, "temperature": Sampling.temperature, "top_k": Sampling.top_k, "eos_token_id": None}
    given |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": options.new_tokens}
    for kind, experts in PEER_SETTINGS:
        compiled, cache = kind == "static" and device.type == "cuda", None  # by `generate` itself
        setting = f"{kind} cache, {'compiled, ' * compiled}{experts} experts"
        free(compiled)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            model.set_experts_implementation(experts)
            if kind == "static":
                cache = transformers.StaticCache(model.config, max_cache_len=options.prompt_len + options.new_tokens)
            for _ in range(2):
                if cache is not None:
                    cache.reset()
                clock, start = _Clock(), time.perf_counter()
                model.generate(prompt, past_key_values=cache, streamer=clock, **given)
            rate = (options.new_tokens - 1) / (clock[options.new_tokens] - clock[1])
        except Exception as error:  # whatever it is, the next setting may run
            print(f"warning: --peer hf: {setting} fails: {world.first_line(error)}: left out", file=sys.stderr)
            continue
        peak = peak_bytes(device) if device.type == "cuda" else None  # a process is born with its parent's
        found[setting] = {"tok_s": rate, "ttft_s": clock[1] - start, "peak_bytes": peak}
        print(f"transformers, {setting}: {rate:.1f} tokens/s", file=sys.stderr)
    if not found:
        raise ValueError("not one of its settings runs")
    with torch.device("meta"):
        size = Transformer(args).to(DTYPES[dtype]).bytes_per_token()
    best = max(found, key=lambda setting: found[setting]["tok_s"])
    rates = {setting: row["tok_s"] for setting, row in found.items()}
    return {"name": f"transformers {transformers.__version__}", "dtype": dtype, "bytes_per_token": size,
            "setting": best, **found[best], "settings": rates}  # fmt: skip


def peer(args: ModelArgs, options: argparse.Namespace) -> dict | None:
    """`measure_peer` in a process of its own: PyTorch's own compiler settings, and all of the memory.

    None, after a warning, if it fails: what was measured of ours is not lost.
    """
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(measure_peer, args, options).result()
    except Exception as error:
        print(f"warning: --peer hf: {world.first_line(error)}: no peer in this result", file=sys.stderr)
        return None


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


def architecture(name: str) -> ModelArgs:
    """A name in ARCHITECTURES, or a Hugging Face config.json. Raises ValueError for anything else."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if not Path(name).is_file():
        raise ValueError(f"--arch {name}: neither a config.json nor one of {', '.join(ARCHITECTURES)}")
    try:
        return args_from_hf(json.loads(Path(name).read_text()))
    except json.JSONDecodeError as error:
        raise ValueError(f"--arch {name}: not valid JSON ({error})") from None


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
