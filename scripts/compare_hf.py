"""Compare this project and transformers on one prompt, operator by operator.

    python scripts/compare_hf.py checkpoints/R/model_fp32
    python scripts/compare_hf.py checkpoints/R/model_bf16 --device cuda --compile

CHECKPOINT is a converted checkpoint. Its Hugging Face checkpoint is the folder around it,
or --hf_dir. The command compares in each layer: norm, attention, residual, norm, router
logits, chosen experts, their weights, the weighted sum over experts, and the residual.

Our model runs the prompt in two calls: all tokens but the last (grouped experts), then the
last one (gathered experts). An error is the largest absolute difference, divided by
transformers' largest absolute value. Then both models continue the prompt greedily and are
timed per token. The exit code is 1 if they differ. Needs transformers.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cli.command import command
from cli.script_options import compare_parser as build_parser
from cli.startup import check_arguments

if __name__ == "__main__":
    check_arguments(build_parser)

import torch
from torch import Tensor, nn

from checkpoint import Checkpoint, read_json
from cli.command import first_line, is_out_of_memory
from formats.quantizer import DTYPES
from generate import load_model
from model import ModelArgs, Transformer
from models import args_from_hf, args_of_checkpoint
from parallel.device import pick_device
from parallel.heartbeat import fail
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from tokenizer import load_tokenizer

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROUTING = "chosen experts"


# Recording ----------------------------------------------------------------------------------------


class Recorder:
    """Records activations with forward hooks: (layer, operator) -> rows [tokens, n]."""

    def __init__(self):
        self.rows: dict[tuple[str, str], list[Tensor]] = {}
        self.handles = []

    def record(self, place: tuple[str, str], module: nn.Module, select: Callable) -> None:
        """Record `select(inputs, output)` at each call of the module."""

        def hook(_, inputs, output) -> None:
            found = select(inputs, output).detach().float().cpu()
            found = found.flatten(2) if found.dim() == 4 else found  # residual streams
            self.rows.setdefault(place, []).append(found.flatten(0, -2))

        self.handles.append(module.register_forward_hook(hook))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def sort_by_expert(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each token's experts, and their weights [T, A]: the order of ties is arbitrary."""
    experts, order = experts.sort(dim=-1)
    return experts, weights.gather(-1, order)


# Families whose shared expert stands beside the others in transformers' block.
SHARED_APART = ("granitemoehybrid",)


def record_ours(model: Transformer, recorder: Recorder) -> None:
    """Record all operators of our model."""
    record = recorder.record
    scale = getattr(model, "embedding_scale", {})  # Gemma 4's; transformers' embedding has it
    record(("", "embedding"), model.embedding, lambda i, o: o * scale.get(o.dtype, 1))
    for n, block in enumerate(model.layers):
        layer, ffn = f"layer {n}", block.ffn
        record((layer, "attention norm"), block.attention, lambda i, o: i[0])
        record((layer, "attention"), block.attention, lambda i, o: o)
        record((layer, "residual after attention"), block.add_attention, lambda i, o: o[0])
        if not hasattr(block, "ffn_norm"):  # a mixer alone
            continue
        record((layer, "ffn norm"), ffn, lambda i, o: i[0])
        if n not in model.args.dense_layers:
            record((layer, "router logits"), ffn.router, lambda i, o: o)
            record((layer, ROUTING), ffn, lambda i, o: sort_by_expert(*o[1:])[0])
            record((layer, "expert weights"), ffn, lambda i, o: sort_by_expert(*o[1:])[1])
        if model.args.family in SHARED_APART:
            record((layer, "sum of experts"), ffn.experts, lambda i, o: o)
        else:
            record((layer, "sum of experts"), ffn, lambda i, o: getattr(o[0], "experts", o[0]))
        record((layer, "residual after experts"), block.add_ffn, lambda i, o: o[0])
    record(("", "last norm"), model.norm, lambda i, o: o)
    record(("", "logits"), model.head, lambda i, o: o)


# Names of the norm before the FFN. With norms around sublayers the usual name is another norm's.
# A mixer of residual streams stands for the norm.
FFN_NORMS = "pre_mlp_layernorm", "ffn_norm", "post_attention_layernorm", "mlp_hyper_connection"


def part_of(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return the first of these submodules that there is."""
    parts = (getattr(module, name, None) for name in names)
    return next(part for part in parts if part is not None)


def record_peer(peer: nn.Module, recorder: Recorder) -> None:
    """Record the same operators of transformers' model."""
    record, scale = recorder.record, getattr(peer.config, "moe_routed_scaling_factor", 1.0)
    if hasattr(peer.model, "norm_f"):
        record_pairs(peer, recorder)
        return
    record(("", "embedding"), peer.model.embed_tokens, lambda i, o: o)
    for n, block in enumerate(peer.model.layers):
        layer, norm = f"layer {n}", part_of(block, FFN_NORMS)
        ffn = part_of(block, ("mlp", "block_sparse_moe", "feed_forward"))
        gate = scores = getattr(ffn, "gate", getattr(ffn, "router", None))
        ffn_norm, is_gemma4 = norm, hasattr(block, "pre_feedforward_layernorm_2")
        if is_gemma4:  # the router and the experts stand beside a dense FFN
            norm, gate, ffn = block.pre_feedforward_layernorm, block.router, block.experts
            ffn_norm, scores = gate.norm, gate.proj
        before = part_of(block, ("input_layernorm", "operator_norm", "attn_hyper_connection"))
        record((layer, "attention norm"), before, lambda i, o: o[0] if type(o) is tuple else o)
        attention = part_of(block, ("self_attn", "linear_attn", "mamba", "conv"))
        record((layer, "attention"), attention, lambda i, o: o[0] if isinstance(o, tuple) else o)
        record((layer, "residual after attention"), norm, lambda i, o: i[0])
        record((layer, "ffn norm"), ffn_norm, lambda i, o: o[0] if type(o) is tuple else o)
        if gate is not None:
            record((layer, "router logits"), scores, lambda i, o: o[0] if type(o) is tuple else o)
            record((layer, ROUTING), gate, lambda i, o: sort_by_expert(o[2], o[1])[0])
            # Laguna scales the sum of the experts instead of their weights.
            weights = lambda i, o: sort_by_expert(o[2], o[1] * scale)[1]  # noqa: E731
            record((layer, "expert weights"), gate, weights)
        record((layer, "sum of experts"), ffn, lambda i, o: o[0] if isinstance(o, tuple) else o)
        record((layer, "residual after experts"), block, lambda i, o: o)
    last = part_of(peer.model, ("norm", "embedding_norm", "hyper_connection_mixer"))
    record(("", "last norm"), last, lambda i, o: o)
    record(("", "logits"), peer.lm_head, lambda i, o: o)


def record_pairs(peer: nn.Module, recorder: Recorder) -> None:
    """Record a model with one mixer or FFN a layer (Nemotron), of which ours pairs two."""
    record, model, n = recorder.record, peer.model, -1
    record(("", "embedding"), model.embeddings, lambda i, o: o)
    for block in model.layers:
        is_ffn = block.block_type in ("moe", "mlp")
        n += not is_ffn
        layer, mixer = f"layer {n}", block.mixer
        kind, name = ("ffn", "sum of experts") if is_ffn else ("attention", "attention")
        record((layer, f"{kind} norm"), block.norm, lambda i, o: o)
        if block.block_type == "moe":
            gate = mixer.gate
            record((layer, "router logits"), gate, lambda i, o: o[0])
            record((layer, ROUTING), gate, lambda i, o: sort_by_expert(o[2], o[1])[0])
            record((layer, "expert weights"), gate, lambda i, o: sort_by_expert(o[2], o[1])[1])
        record((layer, name), mixer, lambda i, o: o[0] if isinstance(o, tuple) else o)
        after = "residual after experts" if is_ffn else "residual after attention"
        record((layer, after), block, lambda i, o: o)
    record(("", "last norm"), model.norm_f, lambda i, o: o)
    record(("", "logits"), peer.lm_head, lambda i, o: o)


# Comparing ----------------------------------------------------------------------------------------


@torch.inference_mode()
def compare(model: Transformer, peer: nn.Module, ids: list[int]) -> list[dict]:
    """Run both models -> layer, operator, error and worst token of each place, in model order.

    ids: at least two. The error of chosen experts is the fraction of tokens whose experts differ.
    """
    ours, theirs = Recorder(), Recorder()
    try:
        record_ours(model, ours)
        record_peer(peer, theirs)
        model.setup_cache(1, len(ids))
        tokens = torch.tensor([ids], device=model.norm.weight.device)
        where = torch.arange(len(ids), device=tokens.device)[None]
        for part in (slice(0, -1), slice(-1, None)):
            model(tokens[:, part], where[:, part], all_positions=True)
        peer(tokens, use_cache=False)
    finally:
        ours.remove()
        theirs.remove()
    found = [compare_place(place, rows, theirs.rows[place]) for place, rows in ours.rows.items()]
    order = list(theirs.rows)
    return sorted(found, key=lambda entry: order.index((entry["layer"], entry["operator"])))


def compare_place(place: tuple[str, str], ours: list[Tensor], theirs: list[Tensor]) -> dict:
    """Return the entry of one place for `compare`."""
    mine, other = torch.cat(ours), torch.cat(theirs)
    difference = (mine - other).abs().amax(dim=-1)  # [tokens]
    scale = other.abs().max().clamp(min=1e-12)
    layer, operator = place
    error = (difference > 0).float().mean() if operator == ROUTING else difference.max() / scale
    token = int(difference.argmax())
    return {"layer": layer, "operator": operator, "error": error.item(), "token": token}


@torch.inference_mode()
def continue_peer(peer: nn.Module, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """Return transformers' next tokens (eager, with a KV cache), and the times in seconds."""
    tokens, times, cache = [], [], None
    step = torch.tensor([ids], device=peer.device)
    for _ in range(count):
        found = peer(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, step = found.past_key_values, found.logits[:, -1:].argmax(dim=-1)
        tokens.append(int(step))
        times.append(time.perf_counter())
    return tokens, times


def continue_ours(session: Session, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """Return our next tokens, and the times in seconds."""
    tokens, times = [], []
    for token in session.stream(ids, count, Sampling(temperature=0)):
        tokens.append(token)
        times.append(time.perf_counter())
    return tokens, times


def median_latency(times: list[float]) -> float | None:
    """Return the median milliseconds between tokens; None for fewer than two tokens."""
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return statistics.median(steps) * 1e3 if steps else None


# Command ------------------------------------------------------------------------------------------


def hf_folder(options: argparse.Namespace, checkpoint: Checkpoint) -> Path:
    """Return the folder of the Hugging Face checkpoint.

    Raises ValueError if it is missing or of another model, or if our checkpoint is quantized.
    """
    folder = options.hf_dir or checkpoint.directory.absolute().parent
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} holds no config.json: name the Hugging Face checkpoint with --hf_dir"
        )
    ours = args_of_checkpoint(checkpoint)  # checks the format, too
    if checkpoint.format["name"] not in DTYPES:
        raise ValueError(
            f"{checkpoint.directory} is quantized: give the checkpoint that it was made from"
        )
    theirs = args_from_hf(read_json(folder / "config.json"))
    for name in ("family", "n_layer", "dim", "vocab_size", "n_head", "n_expert", "n_active"):
        pair = getattr(ours, name), getattr(theirs, name)
        if pair[0] != pair[1]:
            cause = f"{name} is {pair[0]!r} here and {pair[1]!r} in {folder}"
            raise ValueError(f"{checkpoint.directory} is another model ({cause}): give --hf_dir")
    return folder


def prompt_ids(options: argparse.Namespace, checkpoint: Checkpoint, args: ModelArgs) -> list[int]:
    """Return the prompt's token ids. Raises ValueError if the models cannot run them."""
    if options.new_tokens < 1:
        raise ValueError(f"--new_tokens {options.new_tokens}: it must be at least 1")
    if options.tolerance is not None and not options.tolerance >= 0:
        raise ValueError(f"--tolerance {options.tolerance}: it must be at least 0")
    if options.tokens:
        try:
            ids = [int(token) for token in options.tokens.split(",")]
        except ValueError:
            example = "give numbers with commas between, such as 3,14,15"
            raise ValueError(f"--tokens {options.tokens}: {example}") from None
    else:
        ids = load_tokenizer(checkpoint.directory).encode(options.prompt)
    if len(ids) < 2:
        raise ValueError(
            f"the prompt is {len(ids)} tokens: give at least 2, to compare grouped and gathered "
            "experts"
        )
    fits = len(ids) + options.new_tokens <= args.max_position
    if not fits or not all(0 <= token < args.vocab_size for token in ids):
        raise ValueError(
            f"the model takes up to {args.max_position} tokens with ids below {args.vocab_size}: "
            "shorten the prompt or --new_tokens"
        )
    return ids


def load_peer(auto_model, folder: Path, dtype: torch.dtype) -> nn.Module:
    """Load the Hugging Face checkpoint from safetensors alone: a pickle may run any program.

    Raises ValueError if transformers cannot.
    """
    try:
        return auto_model.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True
        )
    except Exception as error:  # transformers and safetensors raise many types
        if is_out_of_memory(error):
            raise
        fix = "download it again, or name another with --hf_dir"
        cause = f"transformers cannot load it ({first_line(error)})"
        raise ValueError(f"{folder}: {cause}: {fix}") from None


def run(options: argparse.Namespace) -> dict:
    """Run the comparison -> the JSON object of --json."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ValueError("this needs transformers: pip install 'transformers>=5.0,<6'") from None
    checkpoint = Checkpoint(options.checkpoint)
    folder = hf_folder(options, checkpoint)
    ids = prompt_ids(options, checkpoint, args_of_checkpoint(checkpoint))
    device = pick_device(options.device)
    model = load_model(checkpoint, device, DTYPES.get(options.dtype))
    dtype = model.embedding.weight.dtype
    peer = load_peer(AutoModelForCausalLM, folder, dtype).to(device).eval()
    places = compare(model, peer, ids)
    limit = TOLERANCE[dtype] if options.tolerance is None else options.tolerance
    limits = {ROUTING: 0}
    differing = (p for p in places if p["error"] > limits.get(p["operator"], limit))
    found = {
        "parts_at": next(differing, None),
        "tolerance": limit,
        "places": places,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
    }
    return found | continue_both(model, peer, ids, options)


def continue_both(
    model: Transformer, peer: nn.Module, ids: list[int], options: argparse.Namespace
) -> dict:
    """Continue the prompt with both models -> their tokens, and milliseconds per token."""
    count = options.new_tokens
    session = Session(model, len(ids) + count, SessionOptions(compile=options.compile))
    continue_ours(session, ids, min(count, 3))  # compiles and warms up
    session.reset()
    ours, our_times = continue_ours(session, ids, count)
    continue_peer(peer, ids, min(count, 3))
    theirs, peer_times = continue_peer(peer, ids, count)
    pairs = enumerate(zip(ours, theirs, strict=True))
    return {
        "tokens": ours,
        "peer_tokens": theirs,
        "same_tokens": next((n for n, (a, b) in pairs if a != b), count),
        "ms": median_latency(our_times),
        "peer_ms": median_latency(peer_times),
    }


def report(found: dict) -> str:
    """Format the result of `run` as text."""

    def describe(place: dict) -> str:
        name = f"{place['layer']} {place['operator']}".strip()
        return f"{name}, error {place['error']:.2g}"

    def number(ms: float | None) -> str:
        return "-" if ms is None else f"{ms:.2f} ms"

    if first := found["parts_at"]:
        verdict = f"they part at {describe(first)} (token {first['token']} of the prompt)"
    else:
        worst = max(found["places"], key=lambda place: place["error"])
        verdict = f"the same at all {len(found['places'])} places; the largest: {describe(worst)}"
    pairs = enumerate(zip(found["tokens"], found["peer_tokens"], strict=True))
    rows = [f"{n:5} {a:8} {b:8}{'' if a == b else '  <-'}" for n, (a, b) in pairs]
    lines = [
        f"{verdict}; tolerance {found['tolerance']:g}, {found['dtype']} on {found['device']}",
        f"greedy: the first {found['same_tokens']} of {len(found['tokens'])} tokens are equal",
        "token     ours     peer",
        *rows,
        f"time per token: ours {number(found['ms'])}, transformers {number(found['peer_ms'])} "
        "(medians; transformers is eager)",
    ]
    return "\n".join(lines)


def why_eager_is_slow(found: dict, options: argparse.Namespace) -> str:
    """Return why our eager step is the slower one; "" if it is not, or compiled."""
    ours, theirs = found["ms"], found["peer_ms"]
    if options.compile or ours is None or theirs is None or ours <= theirs:
        return ""
    return (
        "\nours was eager, too: weight[expert_indices] then copies the chosen experts' weights "
        "before each product,\nso a step reads them, writes them and reads them again; --compile "
        "fuses gather and product"
    )


@command(fail)
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    found = run(options)
    print(json.dumps(found) if options.json else report(found) + why_eager_is_slow(found, options))
    return 1 if found["parts_at"] else 0


if __name__ == "__main__":
    sys.exit(main())
