"""The table of several models with experts in host memory: fetching alone beside the CPU's share.

    python benchmarks/offload_table.py

Each model has a few layers of its published shape, and experts that its first layer's random ones
repeat. It is loaded once. A row is a session of its own over the same slots; routing is replayed,
so that rows differ in who multiplies alone. The figure of all layers is computed: us a layer times
layers, and the rest of a step, which two numbers of layers without misses give.
"""

import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from unittest import mock

import torch
from torch import Tensor

from benchmarks.offloading import (
    CachedExperts,
    ReplayedRouting,
    decode_speed,
    embedded_scores,
    link_bandwidth,
    prompt_speed,
    walking_scores,
)
from cli.parser import Parser
from generate import load_model
from model import Transformer
from models.random_weights import (
    RandomWeights,
    architecture,
    first_layers,
    free_memory,
    number_format,
)
from offload import runner as offload_runner
from offload.balance import Rounds, choose_copies
from offload.cpu_experts import load_library
from offload.cpu_share import set_copies
from offload.experts import OffloadedExperts, offloaded_layers
from offload.plan import OffloadSettings
from ops.launch import jit, launch, tl
from parallel.device import pick_device

STEPS = 600  # of scores that are replayed
TOKENS = 120  # steps of a row
LOGGED = 1 << 14  # requests of a profile


@dataclass(frozen=True)
class Case:
    """One model of the table, and its rows."""

    name: str
    mode: str
    slots: int
    layers: int  # of which it has as many; a half of them must be a model, too
    routing: tuple[str, ...] = ("uniform", "reuse")
    target: str = ""  # issue 60's
    prompt: int = 0  # tokens
    drafts: int = 0  # tokens of a pass
    details: bool = False  # the CPU alone, too, and where a step's time goes


CASES = (
    Case("Qwen3.6-35B-A3B", "int4", 64, 8, target="1.7 times, 220", details=True),
    Case("Qwen3-30B-A3B", "int4", 44, 8, ("reuse",), target="120"),
    Case("Mixtral-8x7B", "hqq4-hqq2", 4, 4, ("text",), target="36"),
    Case("Qwen3-Next-80B-A3B", "int4", 140, 8, ("reuse",), target="85"),
    Case("gpt-oss-120b", "mxfp4", 35, 4, ("reuse",), target="45", prompt=2048, drafts=3),
)


class RepeatedExperts(CachedExperts):
    """A source for `load_model` whose layers all have the experts of the first, made on the GPU."""

    def read(self, name: str, index=None, device="cpu") -> Tensor:
        if ".experts." in name:
            name = re.sub(r"^layers\.\d+", "layers.0", name)
        return super().read(name, index, device)


def scores_of(routing: str, experts: int, slots: int) -> Tensor:
    """Return scores [L, steps, E] to replay."""
    if routing == "text":
        return embedded_scores(STEPS)
    scores = walking_scores(STEPS, experts, *((0.0,) if routing != "reuse" else ()))
    if routing == "cached":  # the first experts, which are in slots: all hit
        scores[..., slots:] = -torch.inf
    return scores


# The profile --------------------------------------------------------------------------------------


# Grid [1]: appends the GPU's clock, in ns.
@jit
def _stamp(times, count, s: tl.constexpr):
    n = tl.load(count)
    tl.store(times + n, tl.extra.cuda.globaltimer())
    tl.store(count, n + 1)


STAMPS = ("place, ask", "fetch", "products", "wait for the CPU", "the rest of the layer")


class Stamps:
    """Times of the steps of each offloaded layer: by a kernel between them."""

    def __init__(self, device: torch.device):
        self.times = torch.zeros(1 << 18, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)

    def stamp(self) -> None:
        launch(_stamp, (1,), self.times, self.count, settings=0, warps=1)

    def around(self, function: Callable, before: bool) -> Callable:
        def timed(*arguments, **options):
            if before:
                self.stamp()
            found = function(*arguments, **options)
            self.stamp()
            return found

        return timed

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within, layers are captured with stamps."""
        found = self.around(offload_runner.find_experts, True)
        answer = self.around(offload_runner.answer, True)
        fill = self.around(OffloadedExperts.fill_slots, False)
        with (
            mock.patch.object(offload_runner, "find_experts", found),
            mock.patch.object(offload_runner, "answer", answer),
            mock.patch.object(OffloadedExperts, "fill_slots", fill),
        ):
            yield

    def rows(self, layers: int, steps: int) -> Tensor:
        """Return the seconds between stamps [steps, layers, 5] of the last steps, by STAMPS."""
        used = self.times[: int(self.count)][-5 * layers * (steps + 1) :]
        between = torch.diff(used)[: 5 * layers * steps].double() * 1e-9
        return between.view(steps, layers, 5).cpu()


def profile(table: "Rows", model: Transformer, routing: ReplayedRouting) -> None:
    """Print where a step's time goes, on the GPU and on the CPU."""
    layers, stamps = offloaded_layers(model), Stamps(table.device)
    log, library = torch.zeros(LOGGED, 3, dtype=torch.int64), load_library("native")
    assert library is not None  # the layers have a share of the CPU
    with stamps.on():
        library.log_requests(log.data_ptr(), LOGGED)
        rate, _ = speed(model, routing)
        count = library.logged_requests()
        library.log_requests(None, 0)
    steps = TOKENS - 2
    rows = stamps.rows(len(layers), steps)
    table.print(f"  profile, auto: {1e6 / rate:.0f} us a step with stamps; us of a layer, mean:")
    means = rows.flatten(0, 1)[:, :4].mean(0) * 1e6
    line = ", ".join(f"{name} {us:.1f}" for name, us in zip(STAMPS, means.tolist(), strict=False))
    table.print(f"    {line}; {STAMPS[4]} {rows[:, :-1, 4].mean() * 1e6:.1f}")
    table.print(f"    between two steps: {spread(rows[:, -1, 4] * 1e6)}")
    table.print(f"    layer with its wait: {spread(rows[..., :4].sum(-1).flatten() * 1e6)}")
    table.print(f"    wait for the CPU: {spread(rows[..., 3].flatten() * 1e6)}")
    table.print(f"    wait by layer: {(rows[..., 3].mean(0) * 1e6).round().int().tolist()}")
    log = log[max(0, count - steps * len(layers)) : count].double() * 1e-3
    busy, asked = log[:, 2] - log[:, 1], log[1:, 1] - log[:-1, 2]
    table.print(f"    CPU, a request: {spread(busy)}; {len(log) / steps:.2f} a step")
    table.print(f"    CPU, from an answer to the next request: {spread(asked)}")
    ids = (log[:, 0] * 1e3).round().int()
    table.print(f"    CPU by layer: {[round(busy[ids == n].mean().item()) for n in ids.unique()]}")


def spread(numbers: Tensor) -> str:
    """Return mean and quantiles of some microseconds."""
    if not len(numbers):
        return "none"
    ordered = sorted(numbers.tolist())
    at = lambda q: ordered[min(len(ordered) - 1, int(q * len(ordered)))]  # noqa: E731
    return (
        f"mean {fmean(ordered):.1f}, median {median(ordered):.1f}, 90% {at(0.9):.1f}, "
        f"99% {at(0.99):.1f}, most {ordered[-1]:.0f}"
    )


def speed(model: Transformer, routing: ReplayedRouting, together: int = 1) -> tuple[float, dict]:
    """Return steps/s of a session of its own, and what was copied."""
    free_memory(compiled=True)  # Dynamo runs a function eagerly after it was compiled 8 times
    return decode_speed(model, TOKENS, "auto", routing, together)[:2]


@contextmanager
def half_of_layers(model: Transformer) -> Iterator[None]:
    """Within, the model has the first half of its layers."""
    every = model.layers
    model.layers = every[: len(every) // 2]
    try:
        yield
    finally:
        model.layers = every


def set_boxes(layers: list[OffloadedExperts], boxes: list) -> None:
    """Let the layers ask the CPU for its share, or with None not."""
    for layer, box in zip(layers, boxes, strict=True):
        layer.box = box


# Rows ---------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """The table in progress."""

    device: torch.device
    started: float = field(default_factory=time.perf_counter)
    # The model in progress: bytes/s of the link and of both shares; seconds of a step without
    # misses, and those outside layers; layers
    link: float = 0.0
    joint: float = 0.0
    free: float = 0.0
    rest: float = 0.0
    all_layers: int = 0
    copies: dict[str, list[int] | None] = field(default_factory=dict)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def print(self, line: str) -> None:
        print(f"[{self.elapsed:5.1f} s] {line}", flush=True)

    def run(self, case: Case) -> None:
        """Print the rows of one model."""
        args = architecture(case.name)
        few = first_layers(args, case.layers)
        source = RepeatedExperts(RandomWeights(few, number_format(case.mode, few)), self.device)
        # "cpu" keeps the way to ask the CPU whatever was measured; copies are chosen below.
        settings = OffloadSettings(case.slots, compute="cpu")
        model = load_model(source, self.device, experts=settings)
        source.made.clear()
        layers, found = offloaded_layers(model), model.prediction
        boxes = [layer.box for layer in layers]
        balance, n = found.balance, found.balance.most
        choose = partial(choose_copies, balance, "auto", len(found.copies) - 1)
        self.copies = {
            "gpu": None,
            "cpu": found.copies,
            "auto": balance.split("auto", len(found.copies) - 1),
        }
        self.print(
            f"{case.name} {case.mode}, {case.layers} of {args.n_layer} layers, {case.slots} of "
            f"{args.n_expert} slots, an expert {balance.nbytes / 1e6:.3g} MB: loaded; target "
            f"{case.target}"
        )
        us = [f"{1e6 * min(row):.0f}" for row in balance.shared]
        alone = [f"{1e6 * time:.0f}" for time in balance.alone]
        none = [f"{1e6 * row[0]:.0f}" for row in balance.shared]
        chosen = [h for h in (0.0, 0.25, 0.5, 0.75, 0.9) if choose(h) is not None]
        self.print(
            f"  {balance.describe()}; copies of n misses {self.copies['auto'][: n + 1]}; us a "
            f"layer of paging by misses: copied {' '.join(alone)}, CPU {' '.join(none)}, best "
            f"{' '.join(us)}; auto asks the CPU with hits of {chosen}"
        )
        self.link = link_bandwidth(layers[0].storage.blobs, self.device)
        self.joint = self.joint_bandwidth(layers, model, n)
        self.all_layers = args.n_layer
        set_boxes(layers, [None] * len(layers))
        cached = self.routing(case, len(layers), "cached")
        self.free, self.rest = self.without_misses(model, cached)
        for name in case.routing:
            rates = {}
            for compute, copies in self.copies.items():
                if compute == "cpu" and not (case.details and name == case.routing[0]):
                    continue
                set_boxes(layers, boxes if copies is not None else [None] * len(layers))
                if copies is not None:
                    set_copies(layers, copies)
                rates[compute] = self.measure(case, model, name, compute)
            self.print(f"  {name}: auto makes {rates['auto'] / rates['gpu']:.2f} times gpu")
        self.extras(case, model, case.routing[-1])

    def routing(self, case: Case, layers: int, name: str, together: int = 1) -> ReplayedRouting:
        args = architecture(case.name)
        scores = scores_of(name, args.n_expert, case.slots)
        return ReplayedRouting(scores, args.n_active, layers, self.device, together)

    def without_misses(self, model: Transformer, routing: ReplayedRouting) -> tuple[float, float]:
        """Return the seconds of a step without misses, and those of it outside layers."""
        count = len(routing.now[0])
        full = 1 / speed(model, routing)[0]
        with half_of_layers(model):
            half = 1 / speed(model, routing.of_layers(count // 2))[0]
        rest = max(2 * half - full, 0.0)
        self.print(
            f"  without misses {1e6 * full:.0f} us a step, {1e6 * (full - rest) / count:.1f} us a "
            f"layer and {1e6 * rest:.0f} us beside layers"
        )
        return full, rest

    def joint_bandwidth(self, layers: list[OffloadedExperts], model: Transformer, n: int) -> float:
        """Return bytes/s of both shares, with 2 n misses, so that fixed costs count little."""
        copied = self.copies["auto"][n]
        copied = min(max(copied, 1), n, layers[0].storage.slots // 2)
        like = model.embedding.weight.new_empty(0, model.args.dim)
        with torch.inference_mode():
            rounds = Rounds(layers, like, 2 * n)
            seconds = rounds.seconds(2 * n, 2 * copied, True)
        return 2 * n * layers[0].storage.blobs.shape[1] / seconds

    def measure(self, case: Case, model: Transformer, name: str, compute: str) -> float:
        """Print one row -> steps/s."""
        layers = len(offloaded_layers(model))
        rate, traffic = speed(model, self.routing(case, layers, name))
        nbytes, found = offloaded_layers(model)[0].storage.blobs.shape[1], model.prediction
        missed = (traffic["misses"] + traffic["on_cpu"]) * nbytes / TOKENS
        bandwidth = self.link if compute == "gpu" else self.joint
        bound = 1 / max(missed / bandwidth, self.free)
        prediction = replace(found, copies=self.copies[compute])
        predicted = prediction.tokens_per_second(traffic["hit_ratio"])
        per_layer = (1 / rate - self.rest) / layers
        every = 1 / (self.rest + per_layer * self.all_layers)
        busy = f", CPU busy {traffic['busy'] * 1e6:.0f} us a step" if compute != "gpu" else ""
        self.print(
            f"  | {name} | {compute} | hits {traffic['hit_ratio']:.3f} | on the CPU "
            f"{traffic['cpu_ratio']:.3f} | {rate:.1f} tokens/s | predicted {predicted:.1f} | "
            f"{per_layer * 1e6:.0f} us a layer | {rate / bound:.2f} of the bound {bound:.0f} "
            f"({bandwidth / 1e9:.1f} GB/s) | all {self.all_layers} layers, us a layer times "
            f"layers: {every:.1f} tokens/s{busy} |"
        )
        return rate

    def extras(self, case: Case, model: Transformer, name: str) -> None:
        """Print the rows that not all models have."""
        layers = offloaded_layers(model)
        if case.details:
            profile(self, model, self.routing(case, len(layers), name))
        if case.drafts:
            alone, passes = (
                speed(model, self.routing(case, len(layers), name, n), n)[0]
                for n in (1, case.drafts)
            )
            self.print(
                f"  {name}, a pass of {case.drafts} tokens: {1e6 / passes:.0f} us, "
                f"{alone / passes:.2f} times a step of one ({1e6 / alone:.0f} us)"
            )
        if case.prompt:
            self.prompt(model, case.prompt)

    def prompt(self, model: Transformer, tokens: int) -> None:
        """Print a prompt's time, and that of all layers, computed from two numbers of layers."""
        seconds, copied = prompt_speed(model, tokens)
        with half_of_layers(model):
            half, half_copied = prompt_speed(model, tokens)
        self.print(
            f"  a prompt of {tokens} tokens: {seconds:.4f} s, {copied / 1e9:.2f} GB copied, "
            f"{copied / self.link / seconds:.2f} of the link's bound; half of the layers "
            f"{half:.4f} s, {half_copied / 1e9:.2f} GB"
        )
        layers = len(offloaded_layers(model))
        each, more = copied / layers, (seconds - half) / (copied - half_copied)
        every = each * self.all_layers
        total = seconds + more * (every - copied)
        self.print(
            f"    all {self.all_layers} layers, computed from both: {total:.3f} s, "
            f"{every / self.link / total:.2f} of the link's bound"
        )


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/offload_table.py",
            "python benchmarks/offload_table.py --arch Qwen3.6-35B-A3B --seconds 60",
        ),
    )
    known = [case.name for case in CASES]
    parser.add_argument("--arch", nargs="+", default=known, choices=known, help="models (all)")
    limit = "start no further model after this time (150)"
    parser.add_argument("--seconds", type=float, default=150.0, metavar="S", help=limit)
    return parser


def main() -> None:
    options = build_parser().parse_args()
    logging.basicConfig(format="  %(message)s", stream=sys.stdout)
    logging.getLogger("moe_fast").setLevel(logging.DEBUG)
    rows, seconds = Rows(pick_device("auto")), options.seconds
    for case in CASES:
        if case.name not in options.arch:
            continue
        if rows.elapsed > seconds:
            rows.print(f"{case.name}: left out, after {seconds:.0f} s")
            continue
        try:
            rows.run(case)
        except (RuntimeError, ValueError, AssertionError):  # the other models still run
            rows.print(f"{case.name} failed: {traceback.format_exc()}")
        free_memory(compiled=False)


if __name__ == "__main__":
    sys.exit(main())
