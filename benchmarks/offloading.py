"""Decode speed with experts in host memory: fetching alone beside the CPU's share, in one run.

    python benchmarks/offloading.py --arch Qwen3.6-35B-A3B --mode int4 --gpu_experts 64

The weights are random. --routing says which experts are chosen: as the random weights do; with the
reuse that others report of text, a quarter of the experts having two thirds of the hits; or, for 8
experts, by the embedded model's scores on its held-out text. --check compares logits first: with
those of resident experts; if routing is replayed, with the first row's.

--layers 4 12 measures both numbers of layers and adds up the rest of the model: a step's seconds
grow by as much for each layer. A model that is larger than the machine's memory is measured so.

A run's bound is the longer of two times: a step with all experts on the GPU, and the bytes that
missed at the joint bandwidth of copies and CPU products. All are measured.
"""

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.decode_speed import token_logits
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
from offload.experts import expert_counters, offloaded_layers
from offload.plan import COMPUTE, OffloadSettings
from ops.step.cpu_share import BUSY
from parallel.device import pick_device
from runtime.kernel_choice import KERNELS, choose_runner
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from tokenizer import load_tokenizer

ROUTINGS = "random", "reuse", "text"
WARM_UP = 100  # steps before those that are timed: the caches fill
REPLAYED = 1500  # tokens of scores that are replayed
REPLAY_SHIFT = 61  # tokens by which layers that replay the same scores are apart
# Scores of "reuse": a random walk of each expert's score, which forgets itself by this factor a
# token. An LRU cache of a quarter of 128 or 256 experts then has two thirds of the hits.
MEMORY = 0.8
CHECKED = 12  # tokens
PROMPTS = 5


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


class ReplayedRouting:
    """Gives each layer the experts of the next row of a table, in place of its router's choice.

    The router's kernels run too. A step finds the choice in a buffer, which is set between steps.
    """

    def __init__(
        self, scores: Tensor, active: int, layers: int, device: torch.device, together: int = 1
    ):
        """scores [L, steps, E]: of layer n mod L; the same ones come shifted each time round.

        together: tokens of a step, consecutive ones.
        """
        turns = [
            scores[n % len(scores)].roll(REPLAY_SHIFT * (n // len(scores)), 0)
            for n in range(layers)
        ]
        best, indices = torch.stack(turns, 1).topk(active)
        tables = indices, best.float().softmax(-1)
        self.tables = [table.transpose(0, 1).contiguous().to(device) for table in tables]
        self.together, self.step = together, 0
        self.now = [table[:, :together].clone() for table in self.tables]  # [layers, together, A]

    def advance(self) -> None:
        """Set the choice of the next step's tokens."""
        end = self.step + self.together
        for now, table in zip(self.now, self.tables, strict=True):
            now.copy_(table[:, self.step : end])
        self.step = end if end + self.together <= self.tables[0].shape[1] else 0

    def of_layers(self, count: int) -> "ReplayedRouting":
        """Return the routing of the first layers alone."""
        fewer = copy.copy(self)
        fewer.tables = [table[:count] for table in self.tables]
        fewer.step, fewer.now = 0, [table[:count].clone() for table in self.now]
        return fewer

    def replace(self, runner: object) -> None:
        """Replace the choice of all layers. Raises ValueError unless the fused kernels run."""
        layers = getattr(runner, "layers", {})
        if len(layers) != len(self.now[0]):
            raise ValueError("--routing: routing is replayed with the fused kernels alone")
        for n, layer in enumerate(layers.values()):
            layer.experts.choose = partial(self.choose, layer.experts.choose, n)

    def choose(self, own: Callable, layer: int, scores: Tensor) -> tuple[Tensor, Tensor]:
        own(scores)
        return tuple(table[layer, : len(scores)] for table in self.now)


def embedded_scores(steps: int) -> Tensor:
    """Return the embedded model's router scores on its held-out text [L, steps, E]."""
    checkpoint, hidden = embedded_checkpoint(), []
    model = load_model(checkpoint, "cpu", torch.float32)
    text = (EMBEDDED / "heldout.txt").read_text()
    ids = load_tokenizer(checkpoint).encode(text)[:steps]
    layers = [block.ffn for block in model.layers]
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    model.setup_cache(1, steps)
    model(torch.tensor([ids]), Chunk(torch.zeros(1, dtype=torch.int64), steps))
    return torch.stack([layer.router(x) for layer, x in zip(layers, hidden, strict=True)])


def walking_scores(steps: int, experts: int, memory: float = MEMORY) -> Tensor:
    """Return random scores that change slowly from token to token [1, steps, E]."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(steps, experts, generator=generator) * (1 - memory**2) ** 0.5
    rows = [torch.randn(experts, generator=generator)]
    for step in noise:
        rows.append(memory * rows[-1] + step)
    return torch.stack(rows[1:])[None]


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


def decode_speed(
    model: Transformer,
    tokens: int,
    kernels: str,
    routing: ReplayedRouting | None = None,
    together: int = 1,
) -> tuple[float, dict, float]:
    """Return steps/s after WARM_UP others, what was copied in them, and the time to compile.

    together: sequences that are continued side by side.
    """
    start = time.perf_counter()
    options = SessionOptions(batch=together, compile=True, decode_kernels=kernels)
    session = Session(model, 16 + WARM_UP + tokens, options)
    session.short_chunks = ()  # the compiler would take half a minute for a captured prompt
    advance = lambda: None  # noqa: E731
    if routing is not None:
        routing.replace(session.runner)
        advance = routing.advance
    # One token: the kernels of a step, so that no others are compiled.
    prompts = [random_prompt(model.args, 1, seed) for seed in range(together)]
    sampling = Sampling(seed=0)
    compiled = [time.perf_counter() - start for _ in session.stream_all(prompts, 2, sampling)][-1]
    session.reset()
    stream = session.stream_all(prompts, WARM_UP + tokens, sampling)
    for _ in range(WARM_UP):
        next(stream)
        advance()
    before, busy, start = expert_counters(model), busy_seconds(model), time.perf_counter()
    for _ in range(tokens):
        next(stream)
        advance()
    rate = tokens / (time.perf_counter() - start)
    traffic = expert_traffic(model, before, tokens) if before else {}
    return rate, traffic | {"busy": (busy_seconds(model) - busy) / tokens}, compiled


def busy_seconds(model: Transformer) -> float:
    """Return how long the CPU has multiplied so far."""
    boxes = [layer.box for layer in offloaded_layers(model) if layer.box is not None]
    return boxes[0].flags[BUSY].item() * 1e-6 if boxes else 0.0


def check_logits(
    model: Transformer, kernels: str, routing: ReplayedRouting | None = None
) -> Tensor:
    """Return the logits [CHECKED, V] of tokens that are given one by one."""
    runner = choose_runner(model, kernels)(model)
    if routing is None:
        return token_logits(model, runner, CHECKED)
    routing.step = 0
    routing.replace(runner)
    return token_logits(model, runner, CHECKED, routing.advance)


def prompt_speed(model: Transformer, tokens: int) -> tuple[float, float]:
    """Return the seconds of a prompt, and the bytes that it copied.

    Of PROMPTS prompts it is the median by seconds a byte: they choose other experts.

    A wave's rows choose the tile of its product, and a tile that is used for the first time is
    compiled. So one prompt before is not enough for all of the others to run compiled kernels.
    """
    session = Session(model, tokens + 8, SessionOptions(compile=True))
    session.short_chunks = ()  # the compiler would take half a minute for a captured prompt
    found: list[tuple[float, int]] = []
    for seed in range(PROMPTS):
        session.reset()
        before, start = copied_bytes(model), time.perf_counter()
        next(session.stream(random_prompt(model.args, tokens, seed), 1, Sampling(seed=0)))
        found.append((time.perf_counter() - start, copied_bytes(model) - before))
    return sorted(found, key=lambda pair: pair[0] / max(pair[1], 1))[PROMPTS // 2]


def copied_bytes(model: Transformer) -> int:
    """Return the bytes that all layers have copied so far."""
    return sum(counters["bytes"] for counters in expert_counters(model))


class Measurement:
    """All rows of one model: random weights that stay in host memory, and replayed scores."""

    def __init__(self, args: ModelArgs, options):
        self.args, self.options = args, options
        self.device = pick_device("auto")
        source = RandomWeights(args, number_format(options.mode, args))
        self.source = CachedExperts(source, self.device)
        self.routings = {name: self.make_routing(name) for name in options.routing}
        self.logits: dict[str, Tensor] = {}  # by routing

    def make_routing(self, name: str) -> ReplayedRouting | None:
        """Return one of ROUTINGS; None: as the random weights choose."""
        if name == "random":
            return None
        args = self.args
        made = name == "reuse"
        scores = walking_scores(REPLAYED, args.n_expert) if made else embedded_scores(REPLAYED)
        layers = args.n_layer - len(args.dense_layers)
        return ReplayedRouting(scores, args.n_active, layers, self.device, self.options.together)

    def load(self, compute: str | None) -> Transformer:
        """Return the model, offloaded or, with None, resident."""
        settings = OffloadSettings(self.options.gpu_experts, compute=compute or "auto")
        if compute is None:  # these experts have to be made on the device
            return load_model(self.source.source, self.device)
        return load_model(self.source, self.device, experts=settings)

    def resident(self) -> tuple[float, float]:
        """Return steps/s with all experts on the device, and the time to compile."""
        model, options = self.load(None), self.options
        if options.check:
            self.logits["random"] = check_logits(model, options.decode_kernels)
        how = options.tokens, options.decode_kernels, None, options.together
        self.resident_rate, _, compiled = decode_speed(model, *how)
        return self.resident_rate, compiled

    def rows(self, compute: str) -> Iterator[tuple[dict, str]]:
        """Yield the figures of each routing, and the times of loading and compiling."""
        start = time.perf_counter()
        model = self.load(compute)
        loaded = time.perf_counter() - start
        for name, routing in self.routings.items():
            figures = {"compute": compute, "routing": name}
            if self.options.check:
                logits = check_logits(model, self.options.decode_kernels, routing)
                want = self.logits.setdefault(name, logits)
                figures["logit_error"] = ((logits - want).norm() / want.norm()).item()
            speed, compiled = self.speed(model, routing)
            times = f"loaded in {loaded:.0f} s, compiled in {compiled:.0f} s"
            yield figures | speed, times

    def speed(
        self, model: Transformer, routing: ReplayedRouting | None
    ) -> tuple[dict[str, float], float]:
        """Return a row's figures, and the time to compile."""
        options, layer = self.options, offloaded_layers(model)[0]
        how = options.tokens, options.decode_kernels, routing, options.together
        rate, traffic, compiled = decode_speed(model, *how)
        link = link_bandwidth(layer.storage.blobs, self.device)
        nbytes = layer.storage.blobs.shape[1]
        on_cpu = traffic["on_cpu"] * nbytes / options.tokens
        copied = traffic["bytes_moved_per_token"]
        figures = {
            "slots": options.gpu_experts,
            "tok_s": rate * options.together,
            "hit_ratio": traffic["hit_ratio"],
            "cpu_ratio": traffic["cpu_ratio"],
            "mb_copied": copied / 1e6,
            "mb_on_cpu": on_cpu / 1e6,
            "cpu_gb_s": on_cpu / traffic["busy"] / 1e9 if on_cpu else None,
            "link_gb_s": link / 1e9,
        }
        joint = link
        if (found := getattr(model, "prediction", None)) is not None:
            balance = found.balance
            if options.together == 1:
                figures["predicted"] = found.tokens_per_second(traffic["hit_ratio"])
            if found.copies is not None:
                figures["copies"] = found.copies[: balance.most + 1]
                joint = max(link, nbytes * balance.most / min(balance.shared[-1]))
            figures["shares"] = balance.describe()
        bound = 1 / max((copied + on_cpu) / joint, 1 / self.resident_rate)
        figures |= {"bound": bound * options.together, "of_bound": rate / bound}
        if options.prompt:
            seconds, copied = prompt_speed(model, options.prompt)
            figures |= {"prompt_s": seconds, "prompt_of_link": copied / link / seconds}
        return figures, compiled


# Command ------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/offloading.py --arch Qwen3.6-35B-A3B --mode int4 --gpu_experts 64",
            "python benchmarks/offloading.py --mode hqq4-hqq2 --gpu_experts 4 --routing text",
            "python benchmarks/offloading.py --arch gpt-oss-120b --mode mxfp4 --gpu_experts 40"
            " --routing reuse --rows gpu auto",
        ),
    )
    add = parser.add_argument
    add("--arch", default="Mixtral-8x7B")
    add("--layers", nargs="+", type=int, metavar="N", help="one number, or two (all)")
    add("--mode", default="hqq4-hqq2")
    add("--gpu_experts", type=int, default=4, metavar="R", help="slots a layer")
    add("--tokens", type=int, default=100)
    add("--together", type=int, default=1, metavar="N", help="tokens of a step: a pass of drafts")
    add("--prompt", type=int, default=0, metavar="N", help="also time a prompt of N tokens")
    chosen = f"which experts are chosen: {', '.join(ROUTINGS)} (random)"
    add("--routing", nargs="+", default=["random"], choices=ROUTINGS, metavar="HOW", help=chosen)
    add("--decode_kernels", default="auto", choices=KERNELS)
    add("--check", action="store_true", help="compare logits with those of resident experts")
    rows = f"of --offload_compute: {', '.join(COMPUTE)} (gpu auto)"
    add("--rows", nargs="+", default=["gpu", "auto"], choices=COMPUTE, metavar="ROW", help=rows)
    return parser


def main() -> None:
    options = build_parser().parse_args()
    args = architecture(options.arch)
    rates: dict[str, list[float]] = {}
    for count in options.layers or [args.n_layer]:
        for name, rate in measure_rows(first_layers(args, count), options).items():
            rates.setdefault(name, []).append(rate)
    if options.layers and len(options.layers) == 2:
        for name, two in rates.items():
            rate = of_all_layers(two, options.layers, args.n_layer)
            print(f"{name}: {rate:.1f} steps/s with all {args.n_layer} layers, if they are alike")


def measure_rows(args: ModelArgs, options) -> dict[str, float]:
    """Print all rows of a model -> steps/s of each."""
    measurement = Measurement(args, options)
    rate, compiled = measurement.resident()
    print(
        f"{options.arch} {options.mode}, {args.n_layer} layers, {options.gpu_experts} slots, "
        f"{options.together} tokens a step: {rate:.1f} steps/s with all experts on the device "
        f"(compiled in {compiled:.0f} s)",
        flush=True,
    )
    rates = {"resident": rate}
    for compute in options.rows:
        free_memory(compiled=True)
        for row, times in measurement.rows(compute):
            rates[f"{compute}, {row['routing']}"] = row["tok_s"] / options.together
            rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
            print(json.dumps(rounded), times, flush=True)
    free_memory(compiled=True)
    return rates


def of_all_layers(rates: list[float], counts: list[int], layers: int) -> float:
    """Return steps/s of all layers, from those of two numbers of layers."""
    few, many = (1 / rate for rate in rates)
    return 1 / (many + (many - few) / (counts[1] - counts[0]) * (layers - counts[1]))


if __name__ == "__main__":
    sys.exit(main())
