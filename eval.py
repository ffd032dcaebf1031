"""Quality of a converted checkpoint: the perplexity of a text, or the tasks of lm-eval.

    python eval.py --checkpoint_path DIR --text_file FILE
    python eval.py --checkpoint_path DIR --tasks arc_easy,hellaswag --limit 100

Perplexity and lm-eval's log-likelihoods both call `score_windows`, with different windows. It
returns the nats (-ln p) of a window's last tokens, each given all tokens before it.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from cli.command import check_stdout, command
from cli.eval_options import DEFAULT_SEQ_LEN, build_parser, check_options
from cli.log import log_to_stderr
from cli.report import in_bytes
from cli.startup import check_arguments
from host.files import check_regular

if __name__ == "__main__":
    check_arguments(build_parser, check_options)

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from formats.kv_cache import KV_CACHES
from formats.quantizer import DTYPES
from generate import EMBEDDED, generate, open_model
from memory.commands import plan_evaluation
from model import Chunk, KVCache, ModelArgs, Runner, Transformer
from models import args_of_checkpoint, build_model
from parallel import process_group
from parallel.heartbeat import fail
from runtime.loading import load_model
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.snapshots import Snapshots
from runtime.weights import stored_bytes
from tokenizer import Tokenizer, load_tokenizer

LOGIT_POSITIONS = 256  # positions whose logits are in memory at a time
DEFAULT_GEN_TOKENS = 256  # if a task sets none, as in lm-eval
SAMPLING_SETTINGS = {"do_sample", "temperature", "top_k", "top_p"}
WINDOWS_IN_FLIGHT = 4  # that the GPU may be behind the progress bar
GENERATION_SETTINGS = SAMPLING_SETTINGS | {"until", "max_gen_toks", "max_new_tokens"}

log = logging.getLogger("moe_fast")


# Scoring ------------------------------------------------------------------------------------------


class ScoringRunner(Runner):
    """Returns nats of the last tokens instead of logits, which may be gigabytes."""

    def __init__(self, targets: Tensor):
        """targets: int64 [count], the ids after the last `count` queries."""
        self.targets = targets

    def logits(self, model: Transformer, normed: Tensor, last: None) -> tuple[Tensor, Tensor]:
        """Return nats fp32 [count], and whether each target is likeliest, bool [count]."""
        nats, greedy = [], []
        parts = normed[:, -len(self.targets) :].split(LOGIT_POSITIONS, 1)
        for part, targets in zip(parts, self.targets.split(LOGIT_POSITIONS), strict=True):
            logits = model.logits(part, None)[0]
            nats.append(F.cross_entropy(logits, targets, reduction="none"))
            greedy.append(logits.argmax(dim=-1) == targets)
        return torch.cat(nats), torch.cat(greedy)


def score(model: Transformer, ids: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """Score the last `count` of ids, each given all ids before it.

    Returns nats fp32 [count], and whether greedy decoding would choose it, bool [count]; both
    stay on the device. count is from 1 to len(ids) - 1. The model's cache must have len(ids) - 1
    positions, and is written from 0 on.
    """
    tokens = torch.tensor(ids, device=model.norm.weight.device)
    chunk = Chunk(tokens.new_zeros(1), len(ids) - 1)
    runner = ScoringRunner(tokens[-count:])
    return model(tokens[None, :-1], chunk, all_positions=True, runner=runner)


def score_windows(
    model: Transformer,
    windows: Sequence[tuple[Sequence[int], int]],
    cache_class: type[KVCache] = KVCache,
    progress: bool = True,
) -> list[tuple[float, bool]]:
    """Score (ids, count) of each window -> the sum of its nats, and whether all tokens are greedy.

    A window with count 0 gets (0, True). The host is at most WINDOWS_IN_FLIGHT ahead of the device,
    so that the progress bar is right. Raises ValueError for ids beyond the vocabulary, and if a sum
    is not finite.
    """
    if not windows:
        return []
    vocabulary, device = model.args.vocab_size, model.norm.weight.device
    if max(max(ids) for ids, _ in windows) >= vocabulary:
        cause = f"token ids must be below {vocabulary}"
        raise ValueError(f"{cause}: does the tokenizer belong to this model?")
    model.setup_cache(1, max(len(ids) for ids, _ in windows) - 1, cache_class)
    snapshots = Snapshots(model.states, 1)
    sums, total = [], sum(count for _, count in windows)
    hidden = None if progress else True  # None: hidden unless stderr is a terminal
    with tqdm(total=total, desc="scoring", unit="token", leave=False, disable=hidden) as bar:
        for ids, count in windows:
            nats, greedy = torch.empty(2, 0, device=device)
            if count:
                snapshots.go_back(0, 0)
                nats, greedy = score(model, ids, count)
            sums.append(torch.stack((nats.double().sum(), greedy.all().double())))
            if len(sums) > WINDOWS_IN_FLIGHT:
                sums[-WINDOWS_IN_FLIGHT] = sums[-WINDOWS_IN_FLIGHT].cpu()
            bar.update(count)
        scores = torch.stack([found.cpu() for found in sums]).tolist()
    if not all(math.isfinite(nats) for nats, _ in scores):
        raise ValueError("the model's output is not finite: use --dtype bf16 or fp32")
    return [(nats, greedy == 1) for nats, greedy in scores]


# Perplexity ---------------------------------------------------------------------------------------


def window_bounds(length: int, seq_len: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, count) of each window over `length` ids.

    A window has seq_len inputs and the id after them; its last `count` ids are in no earlier
    window. The first begins at 0, each other `stride` later.
    """
    start, held = 0, 1  # the first id has nothing before it
    while held < length:
        end = min(start + seq_len + 1, length)
        yield start, end, end - held
        start, held = start + stride, end


def check_seq_len(args: ModelArgs, seq_len: int) -> None:
    """Raise ValueError for a window that this model cannot have."""
    if seq_len < 2:
        raise ValueError(f"--seq_len {seq_len}: it must be at least 2")
    if seq_len > args.max_position:
        limit = f"the model was made for {args.max_position} positions at most"
        raise ValueError(f"--seq_len {seq_len}: {limit}")


def perplexity(
    model: Transformer,
    tokenizer: Tokenizer,
    text: str,
    seq_len: int,
    stride: int | None = None,
    *,
    cache_class: type[KVCache] = KVCache,
    progress: bool = True,
) -> dict:
    """Measure how well the model predicts a text, in windows of seq_len.

    The text is one sequence, with BOS once at its beginning if the tokenizer has one. Each token
    is scored once, in the first window that has it: with at least seq_len - stride tokens of
    context, later on.

    Returns perplexity (exp of nats per token), bits_per_byte (of UTF-8), tokens (scored ones:
    without BOS; without a BOS all but the first, whose bytes do not count either), seq_len,
    stride, seconds, tokens_per_second. Raises ValueError for a text without a token to predict
    and for bad windows.
    """
    check_seq_len(model.args, seq_len)
    stride = seq_len // 2 if stride is None else stride
    if not 1 <= stride <= seq_len:
        raise ValueError(f"stride {stride}: it must be from 1 to seq_len, {seq_len}")
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise ValueError("the text has no token to predict: give a longer one")
    begin = time.perf_counter()
    bounds = window_bounds(len(ids), seq_len, stride)
    windows = [(ids[start:end], count) for start, end, count in bounds]
    scores = score_windows(model, windows, cache_class, progress)
    nats = math.fsum(nats for nats, _ in scores)
    seconds = time.perf_counter() - begin
    tokens = len(ids) - 1
    size = len(text.encode()) - len(tokenizer.token_bytes(ids[0]))
    return {
        "perplexity": math.exp(nats / tokens),
        "bits_per_byte": nats / math.log(2) / size,
        "tokens": tokens,
        "seq_len": seq_len,
        "stride": stride,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def weight_size(model: Transformer) -> dict:
    """Return bytes of all that the model stores, with scales and zeros, and bits_per_weight.

    Weights are those of the plain model of the same args. Shared tensors count once.
    """
    weights = sum(parameter.numel() for parameter in build_model(model.args).parameters())
    size = stored_bytes(model)
    return {"bits_per_weight": 8 * size / weights, "bytes": size}


# lm-eval ------------------------------------------------------------------------------------------
# The three kinds of requests. Each function gets all requests at once; results keep their order.


def prefix_id(tokenizer: Tokenizer) -> int:
    """Return the token before a text that nothing precedes: BOS, else the end-of-text token."""
    for token in (tokenizer.bos_id, *tokenizer.stop_ids):
        if token is not None:
            return token
    raise ValueError("the tokenizer has neither a BOS nor an EOS token for a text to begin with")


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """Return the ids of both, and how many are the continuation's, as lm-eval counts.

    Spaces that end the context go to the continuation, both are encoded as one text, and what is
    longer than the context's own encoding is the continuation's: at least the last token, if that
    has changed.
    """
    begin = context.rstrip()
    if not begin:
        ids = tokenizer.encode(context + continuation, bos=False)
        return [prefix_id(tokenizer), *ids], len(ids)
    before, whole = tokenizer.encode(begin), tokenizer.encode(context + continuation)
    after = whole[len(before) :]
    return (before + after, len(after)) if after or whole == before else (whole, 1)


def loglikelihood(
    model: Transformer,
    tokenizer: Tokenizer,
    requests: Sequence[tuple[str, str]],
    max_length: int,
    cache_class: type[KVCache] = KVCache,
) -> list[tuple[float, bool]]:
    """(context, continuation) -> log-probability of the continuation, and whether it is greedy.

    A context too long for max_length inputs loses its beginning. Raises ValueError for a
    continuation that is too long.
    """
    joined = [encode_pair(tokenizer, *request) for request in requests]
    if (longest := max(count for _, count in joined)) > max_length:
        cause = f"a continuation of {longest} tokens is longer than the window"
        raise ValueError(f"{cause}: raise --seq_len {max_length}")
    if cut := sum(len(ids) > max_length + 1 for ids, _ in joined):
        log.warning(f"{cut} of {len(joined)} contexts are cut to --seq_len {max_length}")
    windows = [(ids[-max_length - 1 :], count) for ids, count in joined]
    return [(-nats, greedy) for nats, greedy in score_windows(model, windows, cache_class)]


def loglikelihood_rolling(
    model: Transformer,
    tokenizer: Tokenizer,
    requests: Sequence[tuple[str]],
    max_length: int,
    cache_class: type[KVCache] = KVCache,
) -> list[float]:
    """(text,) -> log-probability of the whole text after BOS (or EOS).

    Windows of max_length tokens follow each other; the last begins early enough to be full.
    """
    windows, owners = [], []
    for owner, (text,) in enumerate(requests):
        ids = [prefix_id(tokenizer), *tokenizer.encode(text, bos=False)]
        for _, end, count in window_bounds(len(ids), max_length, max_length):
            windows.append((ids[max(0, end - max_length - 1) : end], count))
            owners.append(owner)
    sums = [0.0] * len(requests)
    scores = score_windows(model, windows, cache_class)
    for owner, (nats, _) in zip(owners, scores, strict=True):
        sums[owner] -= nats
    return sums


def plan_generation(
    tokenizer: Tokenizer, context: str, settings: dict, max_length: int, seed: int
) -> tuple[list[int], int, Sampling, list[str]]:
    """Return prompt ids, new tokens, sampling and stop texts of one request.

    Raises ValueError for settings other than GENERATION_SETTINGS, and for a max_gen_toks that
    leaves no space for the prompt.
    """
    given = {name for name, value in settings.items() if (name, value) != ("num_beams", 1)}
    if others := given - GENERATION_SETTINGS:
        names = ", ".join(sorted(others))
        raise ValueError(f"a task asks for {names} in generation, which is not supported here")
    new = settings.get("max_gen_toks") or settings.get("max_new_tokens") or DEFAULT_GEN_TOKENS
    if not 0 < new < max_length:
        cause = f"max_gen_toks {new} must be from 1 to {max_length - 1}"
        raise ValueError(f"{cause}: raise --seq_len {max_length}")
    temperature = settings.get("temperature")
    sampled = settings.get("do_sample", bool(temperature))
    temperature = (1.0 if temperature is None else float(temperature)) if sampled else 0.0
    top_k, top_p = settings.get("top_k") or None, settings.get("top_p") or 1.0
    until = settings.get("until") or ()
    stop = [text for text in ([until] if isinstance(until, str) else until) if text]
    ids = tokenizer.encode(context) or [prefix_id(tokenizer)]
    return ids[new - max_length :], new, Sampling(temperature, top_k, top_p, seed=seed), stop


def generate_until(
    model: Transformer,
    tokenizer: Tokenizer,
    requests: Sequence[tuple[str, dict]],
    max_length: int,
    cache_class: type[KVCache] = KVCache,
) -> list[str]:
    """(context, settings) -> the text after the context, up to a stop text, EOS or max_gen_toks.

    settings are lm-eval's; greedy unless they say otherwise. A context too long loses its
    beginning. Raises ValueError as `plan_generation`.
    """
    plans = [
        plan_generation(tokenizer, context, settings, max_length, seed)
        for seed, (context, settings) in enumerate(requests)
    ]
    longest = max(len(ids) + new for ids, new, _, _ in plans)
    session = Session(model, longest, SessionOptions(cache_class=cache_class))
    texts = []
    bar = tqdm(plans, desc="generating", unit="text", leave=False, disable=None)
    for ids, new, sampling, stop in bar:
        session.reset()  # so that the order of requests does not matter
        texts.append(generate(session, tokenizer, ids, new, sampling, stop=stop)["text"])
    return texts


def lm_eval_model(
    load: Callable[[], Transformer],
    tokenizer: Tokenizer,
    max_length: int,
    cache_class: type[KVCache] = KVCache,
):
    """Return an `lm_eval.api.model.LM`; it calls `load` with its first requests.

    Raises ValueError unless lm-eval is installed.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise ValueError("--tasks needs lm-eval: pip install 'moe-fast[eval]'") from None

    class MoeFast(LM):
        has_requests = False

        def send(self, function: Callable, requests: list) -> list:
            self.has_requests = True
            arguments = [request.args for request in requests]
            return function(load(), tokenizer, arguments, max_length, cache_class)

        def loglikelihood(self, requests):
            return self.send(loglikelihood, requests)

        def loglikelihood_rolling(self, requests):
            return self.send(loglikelihood_rolling, requests)

        def generate_until(self, requests):
            return self.send(generate_until, requests)

    return MoeFast()


def run_tasks(
    adapter,
    tasks: Sequence[str],
    include_path: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> dict:
    """Run lm-eval's tasks, or those of the files in include_path, on `limit` documents of each.

    adapter: of `lm_eval_model`. Returns results (the metrics of each task), n-shot, and table,
    the same as text. Raises ValueError without lm-eval, and for tasks that cannot be loaded.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    manager = TaskManager(include_path=include_path and str(include_path))
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        fix = (
            "`lm-eval ls tasks` shows lm-eval's own, and --include_path DIR adds those of a folder"
        )
        raise ValueError(f"--tasks {','.join(unknown)}: there is no such task: {fix}")
    try:
        found = simple_evaluate(
            adapter,
            tasks=list(tasks),
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            log_samples=False,
        )
    except Exception as error:
        if adapter.has_requests:
            raise
        why = " ".join(str(error).split())
        raise ValueError(f"--tasks {','.join(tasks)} cannot be read: {why}") from error
    table = make_table(found).rstrip()
    return {"results": found["results"], "n-shot": found["n-shot"], "table": table}


# Command ------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """Return a file's text without a BOM.

    Raises ValueError if it cannot be read, is empty or not UTF-8.
    """
    name = f"--text_file {path}"
    try:
        check_regular(path)  # opening a FIFO waits for its writer
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}: give a file that can be read") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 at byte {error.start}: convert it to UTF-8"
        ) from None
    if not text:
        raise ValueError(f"{name} is empty: give a file with some text")
    return text


def run(options: argparse.Namespace) -> tuple[dict, str]:
    """Measure what the options ask for; return the result, and the same as text."""
    device = process_group.start(options.device)
    check_options(options)
    if options.tasks and process_group.size() > 1:
        raise ValueError("--tasks runs on one GPU: leave torchrun out")
    text = "" if options.tasks else read_text(options.text_file or EMBEDDED / "heldout.txt")
    checkpoint = open_model(options, device)
    tokenizer, args = load_tokenizer(checkpoint.directory), args_of_checkpoint(checkpoint)
    seq_len = options.seq_len
    if seq_len is None:
        seq_len = min(args.max_position, args.max_position if options.tasks else DEFAULT_SEQ_LEN)
    check_seq_len(args, seq_len)
    process_group.check_agreement(vars(options), checkpoint)
    plan_evaluation(options, checkpoint, device, seq_len)
    cache_class = KV_CACHES[options.kv_cache]

    @cache
    def load() -> Transformer:
        return load_model(checkpoint, device, DTYPES.get(options.dtype), options.parallel)

    if options.tasks:
        adapter = lm_eval_model(load, tokenizer, seq_len, cache_class)
        limits = options.include_path, options.limit, options.num_fewshot
        result = run_tasks(adapter, options.tasks.split(","), *limits)
        result["seq_len"], report = seq_len, result.pop("table")
    else:
        settings = {"cache_class": cache_class, "progress": process_group.is_main()}
        result = perplexity(load(), tokenizer, text, seq_len, **settings)
        report = (
            f"perplexity {result['perplexity']:.4f}, {result['bits_per_byte']:.4f} bits/byte, "
            f"{result['tokens']:,} tokens at {result['tokens_per_second']:,.0f}/s "
            f"in windows of {seq_len:,}"
        )
    result["kv_cache"] = options.kv_cache
    if process_group.size() == 1:  # one rank's size is that of its shard
        result |= weight_size(load())
        size = in_bytes(result["bytes"])
        report += f"\n{result['bits_per_weight']:.4g} bits/weight, {size} of weights"
    return result, report


@command(fail, out_of_memory="shorten --seq_len")
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    log_to_stderr()
    check_stdout()
    result, report = run(options)
    if process_group.is_main():
        print(json.dumps(result, default=str) if options.json else report, flush=True)
    process_group.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
