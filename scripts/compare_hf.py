"""This project and transformers on the same prompt, operator by operator: the first place where they part.

    python scripts/compare_hf.py checkpoints/R/model_fp32
    python scripts/compare_hf.py checkpoints/R/model_bf16 --device cuda --compile

CHECKPOINT is a converted checkpoint; the Hugging Face one it was made from is the folder around it, or --hf_dir. In
each layer these are compared: norm, attention, residual, norm, router logits, chosen experts, their weights, the
experts' sum, residual. Ours runs the prompt but its last token at once, with grouped experts, and the last one by
itself, with gathered experts. An error is the largest difference over the largest number. After that each continues
the prompt greedily, and is timed token by token. Exit code 1 says that they part (needs transformers).
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import world
from checkpoint import Checkpoint, pick_device
from command import Parser
from generate import DEFAULT_PROMPT, load_model
from model import Transformer
from quantize import DTYPES, model_args
from session import Sampling, Session
from tokenizer import load_tokenizer

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROUTING = "chosen experts"


def watch(records: dict, hooks: list, place: tuple, module: nn.Module, take) -> None:
    """Record what `take(inputs, output)` finds at each call of the module, as rows [tokens, n]."""

    def hook(_, inputs, output) -> None:
        records.setdefault(place, []).append(take(inputs, output).detach().float().cpu().flatten(0, -2))

    hooks.append(module.register_forward_hook(hook))


def by_expert(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """experts, weights [T, A], each token's experts in rising order: which comes first in a tie says nothing."""
    experts, order = experts.sort(dim=-1)
    return experts, weights.gather(-1, order)


def our_places(model: Transformer, records: dict, hooks: list) -> None:
    watch(records, hooks, ("", "embedding"), model.embedding, lambda i, o: o)
    next_norms = [block.attention_norm for block in model.layers[1:]] + [model.norm]
    for n, (block, next_norm) in enumerate(zip(model.layers, next_norms, strict=True)):
        layer = f"layer {n}"
        watch(records, hooks, (layer, "attention norm"), block.attention_norm, lambda i, o: o)
        watch(records, hooks, (layer, "attention"), block.attention, lambda i, o: o)
        watch(records, hooks, (layer, "residual after attention"), block.ffn_norm, lambda i, o: i[0])
        watch(records, hooks, (layer, "ffn norm"), block.ffn_norm, lambda i, o: o)
        if n not in model.args.dense_layers:
            watch(records, hooks, (layer, "router logits"), block.ffn.router, lambda i, o: o)
            watch(records, hooks, (layer, ROUTING), block.ffn, lambda i, o: by_expert(*o[1:])[0])
            watch(records, hooks, (layer, "expert weights"), block.ffn, lambda i, o: by_expert(*o[1:])[1])
        watch(records, hooks, (layer, "sum of experts"), block.ffn, lambda i, o: o[0])
        watch(records, hooks, (layer, "residual after experts"), next_norm, lambda i, o: i[0])
    watch(records, hooks, ("", "last norm"), model.norm, lambda i, o: o)
    watch(records, hooks, ("", "logits"), model.head, lambda i, o: o)


def peer_places(peer: nn.Module, records: dict, hooks: list) -> None:
    watch(records, hooks, ("", "embedding"), peer.model.embed_tokens, lambda i, o: o)
    for n, block in enumerate(peer.model.layers):
        layer = f"layer {n}"
        watch(records, hooks, (layer, "attention norm"), block.input_layernorm, lambda i, o: o)
        watch(records, hooks, (layer, "attention"), block.self_attn, lambda i, o: o[0])
        watch(records, hooks, (layer, "residual after attention"), block.post_attention_layernorm, lambda i, o: i[0])
        watch(records, hooks, (layer, "ffn norm"), block.post_attention_layernorm, lambda i, o: o)
        ffn = block.mlp if hasattr(block, "mlp") else block.block_sparse_moe
        if (gate := getattr(ffn, "gate", getattr(ffn, "router", None))) is not None:
            watch(records, hooks, (layer, "router logits"), gate, lambda i, o: o[0])
            watch(records, hooks, (layer, ROUTING), gate, lambda i, o: by_expert(o[2], o[1])[0])
            watch(records, hooks, (layer, "expert weights"), gate, lambda i, o: by_expert(o[2], o[1])[1])
        watch(records, hooks, (layer, "sum of experts"), ffn, lambda i, o: o[0] if isinstance(o, tuple) else o)
        watch(records, hooks, (layer, "residual after experts"), block, lambda i, o: o)
    watch(records, hooks, ("", "last norm"), peer.model.norm, lambda i, o: o)
    watch(records, hooks, ("", "logits"), peer.lm_head, lambda i, o: o)


@torch.inference_mode()
def compare(model: Transformer, peer: nn.Module, ids: list[int]) -> list[dict]:
    """Each place in order: layer, operator, error, and the token where the error is largest. ids: at least two.

    The error of chosen experts is the share of tokens that chose others.
    """
    device, ours, theirs, hooks = model.norm.weight.device, {}, {}, []
    try:
        our_places(model, ours, hooks)
        peer_places(peer, theirs, hooks)
        model.setup_cache(1, len(ids))
        tokens, where = torch.tensor([ids], device=device), torch.arange(len(ids), device=device)[None]
        for part in (slice(0, -1), slice(-1, None)):
            model(tokens[:, part], where[:, part], all_positions=True)
        peer(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    for place, parts in ours.items():
        mine, other = torch.cat(parts), torch.cat(theirs[place])
        difference = (mine - other).abs().amax(dim=-1)  # of each token
        scale = other.abs().max().clamp(min=1e-12)
        error = (difference > 0).float().mean() if place[1] == ROUTING else difference.max() / scale
        entry = {"layer": place[0], "operator": place[1], "error": error.item(), "token": int(difference.argmax())}
        found.append(entry)
    return sorted(found, key=lambda entry: list(theirs).index((entry["layer"], entry["operator"])))


@torch.inference_mode()
def peer_greedy(peer: nn.Module, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """transformers' next tokens, eagerly with its dynamic cache, and when each was known."""
    tokens, times, cache = [], [], None
    step = torch.tensor([ids], device=peer.device)
    for _ in range(count):
        found = peer(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, step = found.past_key_values, found.logits[:, -1:].argmax(dim=-1)
        tokens.append(int(step))
        times.append(time.perf_counter())
    return tokens, times


def our_greedy(session: Session, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    pairs = [(token, time.perf_counter()) for token in session.stream(ids, count, Sampling(temperature=0))]
    return [token for token, _ in pairs], [moment for _, moment in pairs]


def latency(times: list[float]) -> float | None:
    """Milliseconds between two tokens, the median."""
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return statistics.median(steps) * 1e3 if steps else None


def run(options: argparse.Namespace) -> dict:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ValueError("this needs transformers: pip install 'transformers>=5.0,<6'") from None
    checkpoint = Checkpoint(options.checkpoint)
    folder = options.hf_dir or checkpoint.directory.absolute().parent
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: name the Hugging Face checkpoint with --hf_dir")
    if checkpoint.format["name"] not in DTYPES:
        raise ValueError(f"{checkpoint.directory} is quantised: give the checkpoint that it was made from")
    if options.new_tokens < 1:
        raise ValueError(f"--new_tokens {options.new_tokens}: it must be at least 1")
    if options.tokens:
        try:
            ids = [int(id) for id in options.tokens.split(",")]
        except ValueError:
            raise ValueError(f"--tokens {options.tokens}: give numbers with commas between, such as 3,14,15") from None
    else:
        ids = load_tokenizer(checkpoint.directory).encode(options.prompt)
    if len(ids) < 2:
        raise ValueError(f"the prompt is {len(ids)} tokens: give at least 2, so that both kinds of pass are compared")
    args, count = model_args(checkpoint), options.new_tokens
    if len(ids) + count > args.max_position or not all(0 <= id < args.vocab_size for id in ids):
        raise ValueError(f"the model is for {args.max_position} tokens below {args.vocab_size}: give it those")
    device, dtype = pick_device(options.device), DTYPES[options.dtype] if options.dtype else None
    model = load_model(checkpoint, device, dtype)
    dtype = model.norm.weight.dtype
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()
    places = compare(model, peer, ids)
    limit = TOLERANCE[dtype] if options.tolerance is None else options.tolerance
    parts = next((p for p in places if p["error"] > (0 if p["operator"] == ROUTING else limit)), None)
    session = Session(model, len(ids) + count, options.compile)
    our_greedy(session, ids, min(count, 3))  # compiles and warms up
    session.reset()
    ours, our_times = our_greedy(session, ids, count)
    peer_greedy(peer, ids, min(count, 3))
    theirs, peer_times = peer_greedy(peer, ids, count)
    pairs = zip(ours, theirs, strict=True)
    return {
        "parts_at": parts, "tolerance": limit, "places": places, "dtype": str(dtype).removeprefix("torch."),
        "device": str(device), "tokens": ours, "peer_tokens": theirs,
        "same_tokens": next((n for n, (a, b) in enumerate(pairs) if a != b), count),
        "ms": latency(our_times), "peer_ms": latency(peer_times),
    }  # fmt: skip


def report(found: dict) -> str:
    worst = max(found["places"], key=lambda place: place["error"])
    said = lambda place: f"{place['layer']} {place['operator']}".strip() + f", error {place['error']:.2g}"  # noqa: E731
    if found["parts_at"]:
        first = f"they part at {said(found['parts_at'])} (token {found['parts_at']['token']} of the prompt)"
    else:
        first = f"the same at all {len(found['places'])} places; the largest: {said(worst)}"
    number = lambda ms: "-" if ms is None else f"{ms:.2f} ms"  # noqa: E731
    same, count = found["same_tokens"], len(found["tokens"])
    rows = [f"{n:5} {a:8} {b:8}{'' if a == b else '  <-'}" for n, (a, b) in
            enumerate(zip(found["tokens"], found["peer_tokens"], strict=True))]  # fmt: skip
    return "\n".join([
        f"{first}; tolerance {found['tolerance']:g}, {found['dtype']} on {found['device']}",
        f"greedy: the first {same} of {count} tokens are the same", "token     ours     peer", *rows,
        f"a token: ours {number(found['ms'])}, transformers {number(found['peer_ms'])} (medians; transformers eagerly)",
    ])  # fmt: skip


def build_parser() -> Parser:
    parser = Parser(
        __doc__.partition("\n")[0],
        (
            "python scripts/compare_hf.py checkpoints/OWNER/NAME/model_fp32 --prompt 'import os'",
            "python scripts/compare_hf.py checkpoints/OWNER/NAME/model_bf16 --device cuda --compile --json",
        ),
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="converted, and not quantised")
    add("--hf_dir", type=Path, metavar="DIR", help="what it was made from; default: the folder it lies in")
    add("--prompt", default=DEFAULT_PROMPT, metavar="TEXT")
    add("--tokens", metavar="ID,ID", help="a prompt as token ids, for a checkpoint without a tokenizer")
    add("--new_tokens", type=int, default=128, metavar="N", help="tokens to continue greedily (128)")
    add("--tolerance", type=float, metavar="X", help="error from which they part; default: 1e-4 in fp32, 1e-2 in fp16, "
        "5e-2 in bf16")  # fmt: skip
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--dtype", choices=tuple(DTYPES), help="default: as the checkpoint has it")
    add("--compile", action="store_true", help="compile our decode step (transformers stays eager)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def command() -> int:
    options = build_parser().parse_args()
    found = run(options)
    print(json.dumps(found) if options.json else report(found))
    return 1 if found["parts_at"] else 0


def main() -> int:
    return world.attempt(command)


if __name__ == "__main__":
    sys.exit(main())
