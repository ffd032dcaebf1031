"""Decoding with experts in host memory, ingredient by ingredient: python benchmarks/offloading.py --mode hqq4-hqq2

Table 2 of Eliseev & Mazur 2023 with R slots a layer on the GPU, by both drivers. The weights are random; where a layer
has 8 experts, the routers' scores are those of the embedded model on its held-out text, layer by layer in turn, so that
caches and guesses are as right as they are there. A run's bound is the longer of two times: that of the bytes it copied
at the link's bandwidth, and that of a step with all experts on the GPU; both are measured.
"""

import gc
import json
import sys
import time
from functools import partial

import torch
from torch import Tensor, nn

import offload
from answer import moved
from attention import Chunk
from checkpoint import pick_device
from command import Parser
from generate import EMBEDDED, embedded_checkpoint, load_model
from model import Transformer
from offload import Offload, OffloadedExperts
from session import Sampling, Session
from shapes import RandomWeights, architecture, first_layers, number_format, random_prompt
from tokenizer import load_tokenizer

ROWS = {  # name: settings beside R, and what a layer forgets before each step
    "device": (dict(driver="device"), None),
    "device, lfu": (dict(driver="device", policy="lfu"), None),
    "host": (dict(driver="host", prefetch=0), None),
    "host, lfu": (dict(driver="host", policy="lfu", prefetch=0), None),
    "host, 1 guess": (dict(driver="host", prefetch=1), None),
    "host, 2 guesses": (dict(driver="host", prefetch=2), None),
    "no cache": (dict(driver="host", prefetch=0), "all"),
    "whole layers": (dict(driver="host", prefetch=0), "naive"),
}
WARM = 20  # steps before those that are timed: the caches fill


class Kept:
    """A source whose experts stay in host memory once they are made (on the GPU), for one run after the other."""

    def __init__(self, source: RandomWeights, device: torch.device):
        self.source, self.device, self.args, self.format, self.made = source, device, source.args, source.format, {}

    def read(self, name: str, index=None, device="cpu") -> Tensor:
        if ".experts." not in name:
            return self.source.read(name, index, device)
        if name not in self.made:
            self.made[name] = self.source.read(name, None, self.device).cpu()
        return self.made[name] if index is None else self.made[name][index]


class Scores(nn.Module):
    """In place of a router: the same work, but scores from a table [steps, E], the next row at each step."""

    def __init__(self, router: nn.Module, table: Tensor):
        super().__init__()
        self.router = router
        self.register_buffer("table", table)
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64, device=table.device))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(x.shape[0], device=x.device)
        rows = self.table[(self.at + tokens) % len(self.table)]
        self.at.add_(x.shape[0])
        return self.router(x) * 0 + rows.to(x.dtype)

    def score(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As `MoE.score` has it, for guesses."""
        scores = self(x).float()
        return scores, scores


def embedded_scores(steps: int) -> tuple[Tensor, Tensor]:
    """Of the embedded model over its held-out text: each layer's routing scores, and what the next layer's router says
    of that layer's hidden state, both [L, steps, E]."""
    model, seen = load_model(embedded_checkpoint(), "cpu", torch.float32), []
    ids = load_tokenizer(embedded_checkpoint()).encode((EMBEDDED / "heldout.txt").read_text())[:steps]
    layers = [block.ffn for block in model.layers]
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.setup_cache(1, steps)
    model(torch.tensor([ids]), Chunk(torch.zeros(1, dtype=torch.int64), steps))
    own = torch.stack([layer.router(x) for layer, x in zip(layers, seen, strict=True)])
    return own, torch.stack([layers[(n + 1) % len(layers)].router(x) for n, x in enumerate(seen)])


def replay_scores(model: Transformer, own: Tensor, ahead: Tensor) -> None:
    """Layer n gets the scores of the embedded model's layer n mod 8, another stretch of text each time round."""
    routers = [block.ffn.router for block in model.layers]
    for n, block in enumerate(model.layers):
        turn, layer = divmod(n, len(own))
        device = block.ffn_norm.weight.device
        own_table, ahead_table = (t[layer].roll(61 * turn, 0).to(device) for t in (own, ahead))
        block.ffn.router = Scores(block.ffn.router, own_table)
        if getattr(block.ffn.experts, "ahead", None):
            block.ffn.experts.ahead[0] = Scores(routers[(n + 1) % len(routers)], ahead_table)


def forgetting(experts: OffloadedExperts, whole: bool) -> None:
    """Make a layer forget what is in its slots before each call; whole: and ask for all experts."""
    planned = experts.plan

    def plan(asked: Tensor, pairs: int):
        experts.cache.slot = {~n: slot for n, slot in enumerate(experts.cache.slot.values())}
        waves, guesses = planned(asked, pairs)
        return [list(range(experts.total))] if whole else waves, guesses

    experts.plan = plan


def link_bandwidth(host: Tensor, device: torch.device, repeats: int = 5) -> float:
    """Bytes a second of copies from this registered memory, by the GPU's copy engine."""
    target, best = torch.empty_like(host, device=device), 0.0
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        target.copy_(host, non_blocking=True)
        wait()
        best = max(best, host.nbytes / (time.perf_counter() - start))
    return best


def speed(model: Transformer, tokens: int) -> tuple[float, dict, float]:
    """Steps a second after WARM others, what was copied in them, and the time to compile."""
    start = time.perf_counter()
    session = Session(model, 16 + WARM + tokens, compile=True)
    stream = session.stream(random_prompt(model.args, 8), 2, Sampling(seed=0))
    compiled = [time.perf_counter() - start for _ in stream][-1]
    session.reset()
    stream = session.stream(random_prompt(model.args, 8), WARM + tokens, Sampling(seed=0))
    for _ in range(WARM):
        next(stream)
    before, start = offload.counters(model), time.perf_counter()
    for _ in range(tokens):
        next(stream)
    rate = tokens / (time.perf_counter() - start)
    return rate, moved(model, before, tokens) if before else {}, compiled


def free() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python benchmarks/offloading.py --mode hqq4-hqq2",
            "python benchmarks/offloading.py --arch Qwen3-30B-A3B --mode int4 --gpu_experts 64 --rows device host",
            "python benchmarks/offloading.py --mode hqq4-hqq3 --rows 'host, 2 guesses' --under_way 1",
        ),
    )
    parser.add_argument("--arch", default="Mixtral-8x7B")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--mode", default="hqq4-hqq2")
    parser.add_argument("--gpu_experts", type=int, default=4, metavar="R")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--piece_mb", type=int, default=offload.PIECE >> 20, help="of a guess, copied at a time")
    parser.add_argument("--under_way", type=int, default=offload.UNDER_WAY, help="so many pieces at most")
    rows = f"of: {'; '.join(ROWS)}"
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS, metavar="ROW", help=rows)
    return parser


def main() -> None:
    options = build_parser().parse_args()
    offload.PIECE, offload.UNDER_WAY = options.piece_mb << 20, options.under_way
    device, args = pick_device("auto"), architecture(options.arch)
    args = first_layers(args, options.layers or args.n_layer)
    source = Kept(RandomWeights(args, number_format(options.mode, args)), device)
    replayed = embedded_scores(1500) if args.n_expert == 8 else None
    use = partial(replay_scores, own=replayed[0], ahead=replayed[1]) if replayed else lambda model: None
    model = load_model(source.source, device)
    use(model)
    resident, _, compiled = speed(model, options.tokens)
    print(f"{options.arch} {options.mode}, {args.n_layer} layers, {options.gpu_experts} slots: {resident:.1f} tokens/s "
          f"with all experts on the device (compiled in {compiled:.0f} s)", flush=True)  # fmt: skip
    del model
    free()
    link = None
    for name in options.rows:
        settings, forget = ROWS[name]
        slots = args.n_expert if forget == "naive" else options.gpu_experts
        start = time.perf_counter()
        model = load_model(source, device, experts=Offload(slots, **settings))
        loaded = time.perf_counter() - start
        use(model)
        layers = [module for module in model.modules() if isinstance(module, OffloadedExperts)]
        link = link or link_bandwidth(layers[0].blobs.__self__, device)
        if forget:
            for experts in layers:
                forgetting(experts, forget == "naive")
        rate, found, compiled = speed(model, options.tokens)
        bound = 1 / max(found["bytes_moved_per_token"] / link, 1 / resident)
        row = {
            "row": name, "slots": slots, "tok_s": rate, "hit_ratio": found["hit_ratio"],
            "guessed_ratio": found["guessed_ratio"], "mb_a_token": found["bytes_moved_per_token"] / 1e6,
            "link_gb_s": link / 1e9, "bound": bound, "of_bound": rate / bound,
        }  # fmt: skip
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}),
              f"loaded in {loaded:.0f} s, compiled in {compiled:.0f} s", flush=True)  # fmt: skip
        del model, layers
        free()


if __name__ == "__main__":
    sys.exit(main())
