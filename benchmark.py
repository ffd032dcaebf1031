"""Speed of decoding at a model's real shapes, with random weights made on the device: no checkpoint is needed.

    python benchmark.py --arch Mixtral-8x7B --mode bf16

The theory: at batch 1 a token multiplies each weight it uses once, so its time is bounded below by the bytes of those
weights over the memory's read bandwidth. `fraction` is how much of that bandwidth the whole loop reaches, with sampling
and the host's reading of every token included; the bandwidth is measured in the same run, not taken from a data sheet.
The last line of stdout under --json is one JSON object.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from convert_hf_checkpoint import args_from_hf
from generate import DTYPES, load_model, peak_bytes, pick_device
from model import ModelArgs, Transformer
from quantize import FORMATS, PLAIN, pack_weight, plan
from session import Sampling, Session

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
    "TinyMistral-6x248M": ModelArgs(
        dim=1024, n_layer=12, n_head=32, n_kv_head=8, head_dim=32, intermediate=4096, n_expert=6, n_active=2,
        vocab_size=32005, max_position=32768, norm_eps=1e-6,
    ),
}  # fmt: skip


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

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """The tensor of that name, the same for the same seed and device."""
        path, leaf = name.rsplit(".", 1)
        spec = self.format.get("modules", {}).get(path)
        if spec is None or leaf == "bias":
            return self._plain(name, device)
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
    return plan(args, attention, experts or attention)


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


def cuda_kernels(session: Session, steps: int = 1) -> list:
    """The profiler's averages, one a kernel, over that many recorded steps from position 0: head and sampling too."""
    step = next(iter(session.steps.values()))
    session.position.zero_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]


def measure(args: ModelArgs, options: argparse.Namespace) -> dict:
    """Decode `new_tokens` after a random prompt, `repeats` times, and report the median."""
    device = pick_device(options.device)
    ceiling = read_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = load_model(RandomWeights(args, number_format(options.mode, args)), device)
    session = Session(model, options.prompt_len + options.new_tokens, compile=not options.eager)
    sampling = Sampling(seed=0)
    prompt = torch.randint(args.vocab_size, (options.prompt_len,), generator=torch.Generator().manual_seed(0)).tolist()
    start = time.perf_counter()
    list(session.stream(prompt, 2, sampling))
    compile_s = time.perf_counter() - start
    rates, first = [], []
    for _ in range(options.repeats):
        session.reset()
        start = time.perf_counter()
        times = [time.perf_counter() for _ in session.stream(prompt, options.new_tokens, sampling)]
        rates.append((len(times) - 1) / (times[-1] - times[0]))
        first.append(times[0] - start)
    rate, size = statistics.median(rates), model.bytes_per_token()
    kernels = sum(event.count for event in cuda_kernels(session)) if device.type == "cuda" else None
    return {
        "arch": options.arch,
        "mode": options.mode,
        "layers": args.n_layer,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "prompt_len": options.prompt_len,
        "new_tokens": options.new_tokens,
        "tok_s": rate,
        "tok_s_all": rates,
        "ms": 1e3 / rate,
        "ttft_s": statistics.median(first),
        "bytes_per_token": size,
        "gb_s": size * rate / 1e9,
        "read_gb_s": ceiling / 1e9,
        "fraction": size * rate / ceiling,
        "kernels_per_layer": kernels and kernels / args.n_layer,
        "peak_bytes": peak_bytes(device),
        "compile_s": compile_s,
    }


def report(r: dict) -> str:
    """The result for a reader."""
    return "\n".join(
        (
            f"{r['arch']} {r['mode']}, {r['layers']} layers, {r['gpu']}, torch {r['torch']}",
            f"  prompt {r['prompt_len']}, new {r['new_tokens']}, first token {r['ttft_s'] * 1e3:.1f} ms",
            f"  {r['tok_s']:.1f} tokens/s (median of {len(r['tok_s_all'])}: "
            f"{min(r['tok_s_all']):.1f} to {max(r['tok_s_all']):.1f}), {r['ms']:.3f} ms a token",
            f"  {r['bytes_per_token'] / 1e9:.3f} GB a token, {r['gb_s']:.0f} GB/s, {r['fraction']:.3f} of the measured "
            f"{r['read_gb_s']:.0f} GB/s",
            f"  kernels a layer {r['kernels_per_layer'] and round(r['kernels_per_layer'], 1)}, "
            f"peak memory {r['peak_bytes'] / 1e9:.1f} GB, compile and record {r['compile_s']:.1f} s",
        )
    )


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


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Measure decoding speed with random weights at real shapes.",
        epilog="example: python benchmark.py --arch Mixtral-8x7B --mode bf16 --json",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--arch", required=True, help=f"{', '.join(ARCHITECTURES)}, or a Hugging Face config.json")
    add("--mode", default="bf16", help=f"number format: {', '.join((*DTYPES, *FORMATS))}, or ATTENTION-EXPERTS")
    add("--layers", type=int, metavar="N", help="build only the first N layers")
    add("--prompt_len", type=int, default=5, metavar="N")
    add("--new_tokens", type=int, default=200, metavar="N")
    add("--repeats", type=int, default=5, metavar="N")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--eager", action="store_true", help="do not compile")
    add("--json", action="store_true", help="print one JSON object in place of the table")
    options = parser.parse_args()
    try:
        for name, least in (("layers", 1), ("prompt_len", 1), ("new_tokens", 2), ("repeats", 1)):
            if (value := getattr(options, name)) is not None and value < least:
                raise ValueError(f"--{name} {value}: it must be at least {least}")
        args = architecture(options.arch)
        if options.layers and options.layers > args.n_layer:
            raise ValueError(f"--layers {options.layers}: {options.arch} has {args.n_layer}")
        if options.prompt_len + options.new_tokens > args.max_position:
            raise ValueError(f"--prompt_len and --new_tokens exceed the model's {args.max_position} positions")
        args = dataclasses.replace(args, n_layer=options.layers or args.n_layer)
        result = measure(args, options)
    except (ValueError, torch.cuda.OutOfMemoryError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(json.dumps(result) if options.json else report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
