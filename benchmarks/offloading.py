"""Decode speed with experts in host memory, ingredient by ingredient.

    python benchmarks/offloading.py --mode hqq4-hqq2

Table 2 of Eliseev & Mazur 2023 with R slots a layer on the GPU, by both drivers. The weights are
random. If a layer has 8 experts, its router's scores are those of the embedded model on its
held-out text, so that cache hits and prefetches are as good as on text. A run's bound is the
longer of two times: the bytes it copied at the link's bandwidth, and a step with all experts on
the GPU. Both are measured.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from cli.parser import Parser
from generate import EMBEDDED, embedded_checkpoint, expert_traffic, load_model
from model import Chunk, ModelArgs, Transformer
from models.random_weights import (
    RandomWeights,
    architecture,
    first_layers,
    free_memory,
    number_format,
    random_prompt,
)
from offload import copies
from offload.experts import OffloadedExperts, expert_counters, offloaded_layers
from offload.plan import OffloadSettings
from parallel.device import pick_device
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from tokenizer import load_tokenizer

NO_CACHE, WHOLE_LAYERS = "no cache", "whole layers"
ROWS = {  # settings beside R
    "device": dict(driver="device"),
    "device, lfu": dict(driver="device", policy="lfu"),
    "host": dict(driver="host", prefetch=0),
    "host, lfu": dict(driver="host", policy="lfu", prefetch=0),
    "host, 1 prefetch": dict(driver="host", prefetch=1),
    "host, 2 prefetches": dict(driver="host", prefetch=2),
    NO_CACHE: dict(driver="host", prefetch=0),  # a token copies all of its experts
    WHOLE_LAYERS: dict(driver="host", prefetch=0),  # a token copies all experts
}
WARM_UP = 20  # steps before those that are timed: the caches fill
REPLAYED = 1500  # tokens of the held-out text whose scores are replayed
REPLAY_SHIFT = 61  # tokens by which layers that replay the same scores are apart


# Weights and scores -------------------------------------------------------------------------------


class CachedExperts:
    """A source for `load_model` that makes experts once, on the GPU, and keeps them on the host."""

    def __init__(self, source: RandomWeights, device: torch.device):
        self.source, self.device = source, device
        self.args, self.format = source.args, source.format
        self.made: dict[str, Tensor] = {}

    def read(self, name: str, index=None, device="cpu") -> Tensor:
        if ".experts." not in name:
            return self.source.read(name, index, device)
        if name not in self.made:
            self.made[name] = self.source.read(name, None, self.device).cpu()
        return self.made[name] if index is None else self.made[name][index]


class ReplayedRouter(nn.Module):
    """Does a router's work, but returns the next rows of a table of scores [steps, E]."""

    def __init__(self, router: nn.Module, table: Tensor):
        super().__init__()
        self.router = router
        self.register_buffer("table", table)
        self.register_buffer("step", torch.zeros(1, dtype=torch.int64, device=table.device))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(x.shape[0], device=x.device)
        rows = self.table[(self.step + tokens) % len(self.table)]
        self.step.add_(x.shape[0])
        return self.router(x) * 0 + rows.to(x.dtype)


class ReplayedPrediction(nn.Module):
    """Takes the place of the next layer's MoE in `OffloadedExperts.needed_ids`."""

    def __init__(self, router: nn.Module, table: Tensor):
        super().__init__()
        self.router = ReplayedRouter(router, table)

    def selection_scores(self, scores: Tensor) -> Tensor:
        return scores


def embedded_scores(steps: int) -> tuple[Tensor, Tensor]:
    """Return the embedded model's scores on its held-out text, both [L, steps, E].

    First each layer's own, then the next layer's router's scores of the same hidden state.
    """
    checkpoint, hidden = embedded_checkpoint(), []
    model = load_model(checkpoint, "cpu", torch.float32)
    text = (EMBEDDED / "heldout.txt").read_text()
    ids = load_tokenizer(checkpoint).encode(text)[:steps]
    layers = [block.ffn for block in model.layers]
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    model.setup_cache(1, steps)
    model(torch.tensor([ids]), Chunk(torch.zeros(1, dtype=torch.int64), steps))
    routers = [layer.router for layer in layers]
    own = [router(x) for router, x in zip(routers, hidden, strict=True)]
    ahead = [router(x) for router, x in zip(routers[1:] + routers[:1], hidden, strict=True)]
    return torch.stack(own), torch.stack(ahead)


def replay_scores(model: Transformer, own: Tensor, ahead: Tensor) -> None:
    """Give layer n the scores of the embedded model's layer n mod 8, shifted each time round."""
    routers = [block.ffn.router for block in model.layers]
    for n, block in enumerate(model.layers):
        turn, layer = divmod(n, len(own))
        device = block.ffn_norm.weight.device
        shifted = (scores[layer].roll(REPLAY_SHIFT * turn, 0) for scores in (own, ahead))
        own_table, ahead_table = (table.to(device) for table in shifted)
        block.ffn.router = ReplayedRouter(block.ffn.router, own_table)
        if getattr(block.ffn.experts, "next_layer", None):
            next_router = routers[(n + 1) % len(routers)]
            block.ffn.experts.next_layer[0] = ReplayedPrediction(next_router, ahead_table)


def disable_cache(experts: OffloadedExperts, whole: bool) -> None:
    """Forget what is in a layer's slots before each call. whole: also load all experts."""
    plan_waves = experts.plan_waves

    def plan(needed_ids: Tensor, pairs: int):
        slots = experts.cache.slot.values()
        experts.cache.slot = {~n: slot for n, slot in enumerate(slots)}  # ids of no expert
        waves, predicted = plan_waves(needed_ids, pairs)
        return [list(range(experts.n_local))] if whole else waves, predicted

    experts.plan_waves = plan


# Measuring ----------------------------------------------------------------------------------------


def link_bandwidth(host: Tensor, device: torch.device, repeats: int = 5) -> float:
    """Return bytes/s of copies from this registered memory by the GPU's copy engine."""
    target, best = torch.empty_like(host, device=device), 0.0
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        target.copy_(host, non_blocking=True)
        wait()
        best = max(best, host.nbytes / (time.perf_counter() - start))
    return best


def decode_speed(model: Transformer, tokens: int) -> tuple[float, dict, float]:
    """Return steps/s after WARM_UP others, what was copied in them, and the time to compile."""
    start = time.perf_counter()
    options = SessionOptions(compile=True, decode_kernels="inductor")
    session = Session(model, 16 + WARM_UP + tokens, options)
    prompt, sampling = random_prompt(model.args, 8), Sampling(seed=0)
    compiled = [time.perf_counter() - start for _ in session.stream(prompt, 2, sampling)][-1]
    session.reset()
    stream = session.stream(prompt, WARM_UP + tokens, sampling)
    for _ in range(WARM_UP):
        next(stream)
    before, start = expert_counters(model), time.perf_counter()
    for _ in range(tokens):
        next(stream)
    rate = tokens / (time.perf_counter() - start)
    return rate, expert_traffic(model, before, tokens) if before else {}, compiled


class Measurement:
    """All rows of one model: random weights that stay in host memory, and replayed scores."""

    def __init__(self, args: ModelArgs, mode: str, slots: int, tokens: int):
        self.args, self.slots, self.tokens = args, slots, tokens
        self.device = pick_device("auto")
        self.source = CachedExperts(RandomWeights(args, number_format(mode, args)), self.device)
        self.prepare: Callable[[Transformer], None] = lambda model: None
        if args.n_expert == 8:
            own, ahead = embedded_scores(REPLAYED)
            self.prepare = partial(replay_scores, own=own, ahead=ahead)
        self.link: float | None = None  # bytes/s

    def resident(self) -> tuple[float, float]:
        """Return steps/s with all experts on the device, and the time to compile."""
        model = load_model(self.source.source, self.device)
        self.prepare(model)
        self.resident_rate, _, compiled = decode_speed(model, self.tokens)
        return self.resident_rate, compiled

    def row(self, name: str) -> tuple[dict, str]:
        """Measure a row of ROWS -> its figures, and the times of loading and compiling as text."""
        slots = self.args.n_expert if name == WHOLE_LAYERS else self.slots
        start = time.perf_counter()
        model = load_model(self.source, self.device, experts=OffloadSettings(slots, **ROWS[name]))
        loaded = time.perf_counter() - start
        self.prepare(model)
        layers = offloaded_layers(model)
        self.link = self.link or link_bandwidth(layers[0].storage.blobs, self.device)
        if name in (NO_CACHE, WHOLE_LAYERS):
            for experts in layers:
                disable_cache(experts, whole=name == WHOLE_LAYERS)
        rate, traffic, compiled = decode_speed(model, self.tokens)
        copied = traffic["bytes_moved_per_token"]
        bound = 1 / max(copied / self.link, 1 / self.resident_rate)
        figures = {
            "row": name,
            "slots": slots,
            "tok_s": rate,
            "hit_ratio": traffic["hit_ratio"],
            "guessed_ratio": traffic["guessed_ratio"],
            "mb_a_token": copied / 1e6,
            "link_gb_s": self.link / 1e9,
            "bound": bound,
            "of_bound": rate / bound,
        }
        return figures, f"loaded in {loaded:.0f} s, compiled in {compiled:.0f} s"


# Command ------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/offloading.py --mode hqq4-hqq2",
            "python benchmarks/offloading.py --arch Qwen3-30B-A3B --mode int4 --gpu_experts 64"
            " --rows device host",
            "python benchmarks/offloading.py --mode hqq4-hqq3 --rows 'host, 2 prefetches'"
            " --under_way 1",
        ),
    )
    add = parser.add_argument
    add("--arch", default="Mixtral-8x7B")
    add("--layers", type=int, help="default: all")
    add("--mode", default="hqq4-hqq2")
    add("--gpu_experts", type=int, default=4, metavar="R", help="slots a layer")
    add("--tokens", type=int, default=100)
    add("--piece_mb", type=int, default=copies.PIECE >> 20, help="MB of a prefetch piece")
    add("--under_way", type=int, default=copies.MAX_IN_FLIGHT, help="prefetch pieces in flight")
    rows = f"of: {'; '.join(ROWS)}"
    add("--rows", nargs="+", default=[*ROWS], choices=ROWS, metavar="ROW", help=rows)
    return parser


def main() -> None:
    options = build_parser().parse_args()
    copies.PIECE, copies.MAX_IN_FLIGHT = options.piece_mb << 20, options.under_way
    args = architecture(options.arch)
    args = first_layers(args, options.layers or args.n_layer)
    measurement = Measurement(args, options.mode, options.gpu_experts, options.tokens)
    rate, compiled = measurement.resident()
    print(
        f"{options.arch} {options.mode}, {args.n_layer} layers, {options.gpu_experts} slots: "
        f"{rate:.1f} tokens/s with all experts on the device (compiled in {compiled:.0f} s)",
        flush=True,
    )
    for name in options.rows:
        free_memory(compiled=True)
        row, times = measurement.row(name)
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(rounded), times, flush=True)


if __name__ == "__main__":
    sys.exit(main())
