"""Measure a model's decode speed with random weights, for benchmark.py and speed_check.py."""

import argparse
import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from benchmarks.kernel_profile import cuda_kernels, kernel_table, weight_reads
from formats.kv_cache import KV_CACHES
from host.compile_cache import use_compile_cache
from model import ModelArgs, Transformer
from models.layers.indexed_attention import IndexedAttention
from models.layers.joined_state import JoinedState
from models.layers.pending_state import PendingState
from models.layers.short_conv import ConvCache
from models.random_weights import (
    RandomWeights,
    free_memory,
    number_format,
    random_prompt,
)
from parallel import process_group
from parallel.device import pick_device
from runtime.compile_ahead import start_compiling
from runtime.loading import check_decode_kernels, load_model
from runtime.memory import free_gpu_memory
from runtime.runner import CompiledRunner
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.weights import bytes_per_token, peak_bytes, stored_bytes

KERNEL_STEPS = 10  # steps that are profiled
SWEEP_EXPERTS = 8, 16, 32, 64, 128
SWEEP_ACTIVE = 1, 2, 4, 8

log = logging.getLogger("moe_fast")


# Measuring ----------------------------------------------------------------------------------------


def read_bandwidth(device: torch.device, size: int = 4 << 30, repeats: int = 10) -> float:
    """Return the read bandwidth in bytes/s: the best of several reductions.

    size: bytes that are read, or half of the GPU's free memory, whichever is less.
    """
    kernels = [lambda t: t.sum(-1, dtype=torch.float32), lambda t: t.amax(-1)]
    if device.type != "cuda":  # sums convert to fp32: a CPU takes 13 times as long
        size, repeats, kernels = size >> 4, 3, kernels[1:]
    elif size > free_gpu_memory(device) // 2:
        size = free_gpu_memory(device) // 2 >> 20 << 20
    x = torch.empty(size // 2, dtype=torch.bfloat16, device=device).normal_()
    best = 0.0
    for rows in (1 << 12, 1 << 15, 1 << 18):
        view = x.view(rows, -1)
        for kernel in kernels:
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
    check_decode_kernels(options.decode_kernels, source, device, parallel=options.parallel)
    if options.compile_prefill or not options.eager:
        use_compile_cache(options.compile_cache)
        if process_group.size() == 1:
            start_compiling(source, device)
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
            decode_kernels=options.decode_kernels,
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
        if options.random_cache:
            fill_cache(session, prompts)
        start = time.perf_counter()
        return [time.perf_counter() - start for _ in session.stream_all(prompts, count, sampling)]

    cold, rates, first = token_times(2), [], []
    for _ in range(options.repeats):
        times = token_times(options.new_tokens)
        rates.append((len(times) - 1) / (times[-1] - times[0]))
        first.append(times[0])
        process_group.check_same_tokens(session.ids)
    return {"cold": cold, "rates": rates, "first": first}


@torch.inference_mode()
def token_logits(
    model: Transformer,
    runner: CompiledRunner | None,
    count: int,
    before_each: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Return the logits [count, V] of random tokens that are given one by one.

    runner: None for plain PyTorch. before_each is called before each token.
    """
    model.setup_cache(1, 256)
    found, device = [], model.norm.weight.device
    last = torch.zeros(1, dtype=torch.int64, device=device)
    for n, token in enumerate(random_prompt(model.args, count)):
        before_each()
        ids = torch.tensor([[token]], device=device), torch.tensor([[n]], device=device)
        found.append(model(*ids, last, runner=runner).float().flatten())
    return torch.stack(found)


def randomize(states: Iterable[nn.Module]) -> None:
    """Fill caches and other states with random numbers."""
    for tensor in (tensor for state in states for tensor in state.buffers()):
        if tensor.dtype == torch.int8:
            tensor.random_(-127, 128)
        elif tensor.is_floating_point():
            tensor.normal_(0, 0.01)


def fill_cache(session: Session, prompts: Sequence[Sequence[int]]) -> None:
    """Make each row remember all but the last token of its prompt, as random numbers."""
    randomize(session.states)
    for row, ids in enumerate(prompts):
        session.ids[row], session.cached[row] = list(ids[:-1]), len(ids) - 1
        session.snapshots.take(row, len(ids) - 1)


def cache_in_use(session: Session, position: int) -> int:
    """Return the bytes of all layers' states that a token at this position reads."""
    layers = zip(session.model.layers, session.states, strict=True)
    return sum(bytes_in_use(block.attention, state, position) for block, state in layers)


def bytes_in_use(layer: nn.Module, state: nn.Module, position: int) -> int:
    """`cache_in_use` of one layer's state."""
    if isinstance(state, JoinedState):
        return sum(bytes_in_use(layer, part, position) for part in state.states)
    if isinstance(state, PendingState):  # the same at every position
        return state.state.nbytes + state.window.nbytes
    if state.kv.dtype == torch.int64:  # ids, of which a token reads a few
        return 0
    window: int | None = layer.window
    if isinstance(state, ConvCache):
        window = state.width
    elif isinstance(layer, IndexedAttention) and state is layer.block_keys:
        position //= layer.sizes.ratio
    elif isinstance(layer, IndexedAttention):
        window = layer.sizes.reach
    return state.nbytes * min(position, window or position) // state.kv.shape[-2]


def describe_run(session: Session, options: argparse.Namespace) -> dict:
    """Return the first fields of a result: the model, its settings and the GPU."""
    on_gpu = session.device.type == "cuda"
    names = "arch", "mode", "kv_cache", "decode_kernels", "batch", "prompt_len", "new_tokens"
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


def distinct_experts(session: Session, tokens: torch.Tensor, positions: torch.Tensor) -> float:
    """Return how many experts a layer reads, the mean of all, for tokens [B, Q] at positions."""
    routing = session.model(tokens, positions, return_routing=True)[1]  # [L, B * Q, A]
    return statistics.fmean(len(layer.unique()) for layer in routing)


def measure_bytes(session: Session, options: argparse.Namespace) -> dict:
    """Return the fields of `measure` about ranks and bytes. Call it after an answer."""
    model, ranks, peak = session.model, process_group.size(), peak_bytes(session.device)
    cache = sum(state.nbytes for state in session.states) + session.snapshots.nbytes
    used = cache_in_use(session, options.prompt_len + options.new_tokens // 2)
    experts_read = distinct_experts(session, session.token, session.position - 1)
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
