"""Quality of a converted checkpoint: the perplexity of a text, or the tasks of lm-eval.

    python eval.py --checkpoint_path DIR --text_file FILE
    python eval.py --checkpoint_path DIR --tasks arc_easy,hellaswag --limit 100

Everything rests on `score`: the nats of the last tokens of a window, each given all before it. Perplexity and lm-eval's
log-likelihoods differ only in the windows they ask about. The last line of stdout under --json is one JSON object.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import tp
import world
from answer import generate
from args import ModelArgs
from attention import Chunk
from command import Parser
from generate import EMBEDDED, load_model, open_checkpoint
from model import Stages, Transformer, stored
from quantize import DTYPES, KV_CACHES, model_args
from session import Sampling, Session
from tokenizer import Tokenizer, load_tokenizer

DEFAULT_SEQ_LEN = 2048
LOGIT_POSITIONS = 256  # logits are made for so many positions at a time: those of a whole window may be gigabytes
DEFAULT_GEN_TOKENS = 256  # of a task that does not say, as in lm-eval
GENERATION_SETTINGS = {"until", "max_gen_toks", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p"}


# Scoring ------------------------------------------------------------------------------------------------------------


def score(model: Transformer, ids: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """The last `count` of ids, each given all ids before it: nats fp32 [count], and whether greedy decoding would have
    chosen it, bool [count]. Both stay on the model's device, and nothing is waited for.

    count is from 1 to len(ids) - 1. The model's cache must have len(ids) - 1 positions, and is written from 0 on.
    """
    ids = torch.tensor(ids, device=model.norm.weight.device)
    targets = ids[-count:]

    def finish(model: Transformer, normed: Tensor, last: None) -> tuple[Tensor, Tensor]:
        nats, greedy = [], []
        parts = normed[:, -count:].split(LOGIT_POSITIONS, 1)
        for part, wanted in zip(parts, targets.split(LOGIT_POSITIONS), strict=True):
            logits = Transformer.finish(model, part, None)[0]
            nats.append(F.cross_entropy(logits, wanted, reduction="none"))
            greedy.append(logits.argmax(dim=-1) == wanted)
        return torch.cat(nats), torch.cat(greedy)

    chunk = Chunk(ids.new_zeros(1), len(ids) - 1)
    return model(ids[None, :-1], chunk, all_positions=True, stages=Stages(finish=finish))


def score_windows(model: Transformer, windows: Sequence[tuple[Sequence[int], int]], progress: bool = True) -> list:
    """(ids, count) of each window, as `score` has them -> (nats of the count tokens, whether all are greedy) of each.

    No token at all is certain: (0, True). The device is waited for once, at the end. Raises ValueError for ids beyond
    the vocabulary, and where a sum is not finite.
    """
    vocabulary, device = model.args.vocab_size, model.norm.weight.device
    if not windows:
        return []
    if max(max(ids) for ids, _ in windows) >= vocabulary:
        raise ValueError(f"token ids must be below {vocabulary}: does the tokenizer belong to this model?")
    model.setup_cache(1, max(len(ids) for ids, _ in windows) - 1)
    sums = []
    with tqdm(
        total=sum(count for _, count in windows), desc="scoring", unit="token", leave=False, file=sys.stderr,
        disable=None if progress else True,
    ) as bar:  # fmt: skip
        for ids, count in windows:
            nats, greedy = score(model, ids, count) if count else torch.empty(2, 0, device=device)
            sums.append(torch.stack((nats.double().sum(), greedy.all().double())))
            bar.update(count)
        sums = torch.stack(sums).tolist()
    if not all(math.isfinite(nats) for nats, _ in sums):
        raise ValueError("the model's output is not finite: use --dtype bf16 or fp32")
    return [(nats, greedy == 1) for nats, greedy in sums]


# Perplexity ---------------------------------------------------------------------------------------------------------


def window_bounds(length: int, seq_len: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, count) of each window over `length` ids: seq_len inputs and the id that follows them; its last
    `count` ids are those that no window before it held. The first window begins at 0, each other `stride` further on.
    """
    start, held = 0, 1  # the first id has nothing before it
    while held < length:
        end = min(start + seq_len + 1, length)
        yield start, end, end - held
        start, held = start + stride, end


def check_seq_len(args: ModelArgs, seq_len: int) -> None:
    """Raises ValueError for a window that this model cannot have."""
    if seq_len < 2:
        raise ValueError(f"--seq_len {seq_len}: it must be at least 2")
    if seq_len > args.max_position:
        raise ValueError(f"--seq_len {seq_len}: the model was made for {args.max_position} positions at most")


def perplexity(model: Transformer, tokenizer: Tokenizer, text: str, seq_len: int, stride: int | None = None,
               progress: bool = True) -> dict:  # fmt: skip
    """How well the model predicts the text, cut into windows of seq_len tokens that move by `stride` (half a window).

    The text is one sequence: BOS once at its beginning where the tokenizer puts one. Each token is scored once, in the
    first window that holds it, so with at least seq_len - stride tokens of context once there are as many.
    Returns perplexity (exp of the nats a token), bits_per_byte (of UTF-8), tokens (scored: without BOS; without BOS in
    the tokenizer, all but the first, whose bytes then do not count either), seq_len, stride, seconds,
    tokens_per_second. Raises ValueError for a text with no token to predict, and for windows that cannot be.
    """
    check_seq_len(model.args, seq_len)
    stride = seq_len // 2 if stride is None else stride
    if not 1 <= stride <= seq_len:
        raise ValueError(f"stride {stride}: it must be from 1 to seq_len, {seq_len}")
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise ValueError("the text has no token to predict: give a longer one")
    begin = time.perf_counter()
    windows = [(ids[start:end], count) for start, end, count in window_bounds(len(ids), seq_len, stride)]
    nats = math.fsum(nats for nats, _ in score_windows(model, windows, progress))
    seconds = time.perf_counter() - begin
    tokens, size = len(ids) - 1, len(text.encode()) - len(tokenizer.token_bytes(ids[0]))
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
    """bytes: of everything the model stores, scales and zero points included; bits_per_weight: over the weights that
    the plain model of the same args has. Shared tensors count once."""
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in Transformer(model.args).parameters())
    size = sum(tensor.nbytes for tensor in stored(model))
    return {"bits_per_weight": 8 * size / weights, "bytes": size}


# lm-eval ------------------------------------------------------------------------------------------------------------
# The three questions of a task. Each takes all its requests at once, and results keep their order.


def prefix_id(tokenizer: Tokenizer) -> int:
    """What stands before a text that nothing precedes: BOS, else the end-of-text token."""
    for id in (tokenizer.bos_id, *tokenizer.stop_ids):
        if id is not None:
            return id
    raise ValueError("the tokenizer has neither a BOS nor an EOS token for a text to begin with")


def join(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """Ids of both, and how many of them are the continuation's, as lm-eval has it, so that its figures compare: spaces
    that end the context go to the continuation, both are encoded as one text, and what is longer than the context's own
    encoding is the continuation's. Where no token is, but the last one has changed, it is that one.
    """
    begin = context.rstrip()
    if not begin:
        ids = tokenizer.encode(context + continuation, bos=False)
        return [prefix_id(tokenizer), *ids], len(ids)
    before, whole = tokenizer.encode(begin), tokenizer.encode(context + continuation)
    after = whole[len(before) :]
    return (before + after, len(after)) if after or whole == before else (whole, 1)


def loglikelihood(model: Transformer, tokenizer: Tokenizer, requests: Sequence[tuple[str, str]],
                  max_length: int) -> list[tuple[float, bool]]:  # fmt: skip
    """(context, continuation) -> log-probability of the continuation, and whether it is what greedy decoding gives.

    A context too long for max_length inputs loses its beginning. Raises ValueError for a continuation that is too long.
    """
    joined = [join(tokenizer, *request) for request in requests]
    if (longest := max(count for _, count in joined)) > max_length:
        raise ValueError(f"a continuation of {longest} tokens is longer than the window: raise --seq_len {max_length}")
    if cut := sum(len(ids) > max_length + 1 for ids, _ in joined):
        print(f"{cut} of {len(joined)} contexts are cut to --seq_len {max_length}", file=sys.stderr)
    windows = [(ids[-max_length - 1 :], count) for ids, count in joined]
    return [(-nats, greedy) for nats, greedy in score_windows(model, windows)]


def loglikelihood_rolling(model: Transformer, tokenizer: Tokenizer, requests: Sequence[tuple[str]],
                          max_length: int) -> list[float]:  # fmt: skip
    """(text,) -> log-probability of the whole text after BOS (or EOS), in windows of max_length tokens that follow each
    other, the last one begun early enough to be full."""
    windows, owners = [], []
    for owner, (text,) in enumerate(requests):
        ids = [prefix_id(tokenizer), *tokenizer.encode(text, bos=False)]
        for _, end, count in window_bounds(len(ids), max_length, max_length):
            windows.append((ids[max(0, end - max_length - 1) : end], count))
            owners.append(owner)
    sums = [0.0] * len(requests)
    for owner, (nats, _) in zip(owners, score_windows(model, windows), strict=True):
        sums[owner] -= nats
    return sums


def generate_until(model: Transformer, tokenizer: Tokenizer, requests: Sequence[tuple[str, dict]],
                   max_length: int) -> list[str]:  # fmt: skip
    """(context, settings) -> the text generated after the context, up to a stop text, EOS or max_gen_toks.

    settings are lm-eval's, GENERATION_SETTINGS; greedy unless they say otherwise. A context too long loses its
    beginning. Raises ValueError for other settings, and where max_gen_toks leaves no room for a context.
    """
    plans = []
    for seed, (context, settings) in enumerate(requests):
        others = {name for name, value in settings.items() if (name, value) != ("num_beams", 1)} - GENERATION_SETTINGS
        if others:
            raise ValueError(f"a task asks for {', '.join(sorted(others))} in generation, which is not supported here")
        new = settings.get("max_gen_toks") or settings.get("max_new_tokens") or DEFAULT_GEN_TOKENS
        if not 0 < new < max_length:
            raise ValueError(f"max_gen_toks {new} must be from 1 to {max_length - 1}: raise --seq_len {max_length}")
        temperature = settings.get("temperature")
        sampled = settings.get("do_sample", bool(temperature))
        temperature = (1.0 if temperature is None else float(temperature)) if sampled else 0.0
        sampling = Sampling(temperature, settings.get("top_k") or None, settings.get("top_p") or 1.0, seed=seed)
        until = settings.get("until") or ()
        stop = [text for text in ([until] if isinstance(until, str) else until) if text]
        ids = tokenizer.encode(context) or [prefix_id(tokenizer)]
        plans.append((ids[new - max_length :], new, sampling, stop))
    session = Session(model, max(len(ids) + new for ids, new, _, _ in plans))
    texts = []
    for ids, new, sampling, stop in tqdm(plans, desc="generating", unit="text", leave=False, disable=None):
        session.reset()  # so that order does not matter
        texts.append(generate(session, tokenizer, ids, new, sampling, stop=stop)["text"])
    return texts


def lm_eval_model(load: Callable[[], Transformer], tokenizer: Tokenizer, max_length: int):
    """An `lm_eval.api.model.LM` over a model of ours, which is loaded when the first task asks something of it."""
    from lm_eval.api.model import LM

    class MoeFast(LM):
        asked = False

        def ask(self, question: Callable, requests: list) -> list:
            self.asked = True
            return question(load(), tokenizer, [request.args for request in requests], max_length)

        def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
            return self.ask(loglikelihood, requests)

        def loglikelihood_rolling(self, requests: list) -> list[float]:
            return self.ask(loglikelihood_rolling, requests)

        def generate_until(self, requests: list) -> list[str]:
            return self.ask(generate_until, requests)

    return MoeFast()


def run_tasks(load: Callable[[], Transformer], tokenizer: Tokenizer, max_length: int, tasks: Sequence[str],
              include_path: Path | None = None, limit: int | None = None, num_fewshot: int | None = None
              ) -> dict:  # fmt: skip
    """Run lm-eval's tasks, or those of the files in include_path, on the first `limit` documents of each.

    `load` gives the model, and is called once the tasks are ready. Returns results (the metrics of each task), n-shot,
    and table, the same for a reader. Raises ValueError without lm-eval, and for tasks that cannot be made ready.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError:
        raise ValueError("--tasks needs lm-eval: pip install 'moe-fast[eval]'") from None
    manager = TaskManager(include_path=include_path and str(include_path))
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise ValueError(
            f"--tasks {','.join(unknown)}: there is no such task: `lm-eval ls tasks` shows lm-eval's own, and "
            "--include_path DIR adds those of a folder"
        )
    adapter = lm_eval_model(load, tokenizer, max_length)
    try:
        found = simple_evaluate(
            adapter, tasks=list(tasks), task_manager=manager, num_fewshot=num_fewshot, limit=limit, log_samples=False
        )
    except Exception as error:
        if adapter.asked:
            raise
        raise ValueError(f"--tasks {','.join(tasks)} cannot be read: {' '.join(str(error).split())}") from error
    return {"results": found["results"], "n-shot": found["n-shot"], "table": make_table(found).rstrip()}


# Command ------------------------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(
        "Measure a converted checkpoint's quality: perplexity of a text, or lm-eval's tasks.",
        (
            "python eval.py",
            "python eval.py --checkpoint_path checkpoints/OWNER/NAME/model_int4 --text_file wiki.test.raw --json",
            "python eval.py --checkpoint_path checkpoints/OWNER/NAME/model_bf16 --tasks arc_easy,piqa --limit 100",
        ),
    )
    add = parser.add_argument
    add("--checkpoint_path", type=Path, metavar="DIR", help="converted checkpoint; default: the embedded tiny model")
    add("--text_file", type=Path, metavar="F", help="UTF-8 text; default with the embedded model: its held-out text")
    add("--seq_len", type=int, metavar="N",
        help=f"tokens of a window; default: {DEFAULT_SEQ_LEN}, with --tasks as many as the model has")  # fmt: skip
    add("--tasks", metavar="NAME[,NAME]", help="lm-eval tasks in place of a text (pip install 'moe-fast[eval]')")
    add("--include_path", type=Path, metavar="DIR", help="folder of task files of your own")
    add("--limit", type=int, metavar="N", help="only the first N documents of each task")
    add("--num_fewshot", type=int, metavar="N", help="examples in each prompt; default: as the task says")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--dtype", choices=tuple(DTYPES), help="default: as the checkpoint has it")
    add("--kv_cache", choices=tuple(KV_CACHES), default="plain", help="int8: keys and values in half the bytes")
    add("--parallel", default="tensor", choices=tp.PARALLEL, help="how torchrun's processes share the experts")
    add("--json", action="store_true", help="print one JSON object in place of the line or table")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for options that cannot be, or cannot be together."""
    if options.tasks is not None and world.size() > 1:
        raise ValueError("--tasks runs on one GPU: leave torchrun out")
    if options.tasks is None:
        for name in ("include_path", "limit", "num_fewshot"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} needs --tasks: name the tasks, or leave it out")
        if options.text_file is None and options.checkpoint_path is not None:
            raise ValueError("nothing to measure on: give --text_file FILE or --tasks NAME")
    elif options.text_file is not None:
        raise ValueError("--text_file does not go with --tasks: leave one of them out")
    elif not all(options.tasks.split(",")):
        raise ValueError(f"--tasks {options.tasks!r}: give names with commas between them")
    for name, least in (("limit", 1), ("num_fewshot", 0)):
        if (value := getattr(options, name)) is not None and value < least:
            raise ValueError(f"--{name} {value}: it must be at least {least}")
    if options.include_path is not None and not options.include_path.is_dir():
        raise ValueError(f"--include_path {options.include_path}: no such folder: give one that holds task files")


def read_text(path: Path) -> str:
    """The text of a file as it stands there. Raises ValueError for one that cannot be read, is empty or not UTF-8."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ValueError(f"--text_file {path}: {error.strerror}: give a file that can be read") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--text_file {path} is not UTF-8 at byte {error.start}: convert it to UTF-8") from None
    if not text:
        raise ValueError(f"--text_file {path} is empty: give a file with some text")
    return text


def run(options: argparse.Namespace) -> tuple[dict, str]:
    """Do what the options ask for; return the result, and the same for a reader."""
    device = world.start(options.device)
    check_options(options)
    text = None if options.tasks else read_text(options.text_file or EMBEDDED / "heldout.txt")
    checkpoint = open_checkpoint(options.checkpoint_path)
    tokenizer, args = load_tokenizer(checkpoint.directory), model_args(checkpoint)
    default = args.max_position if options.tasks else min(DEFAULT_SEQ_LEN, args.max_position)
    seq_len = default if options.seq_len is None else options.seq_len
    check_seq_len(args, seq_len)
    world.agree(vars(options), checkpoint)

    @cache
    def load() -> Transformer:
        model = load_model(checkpoint, device, DTYPES[options.dtype] if options.dtype else None, options.parallel)
        model.cache_kind = KV_CACHES[options.kv_cache]
        return model

    if options.tasks:
        names = options.tasks.split(",")
        result = run_tasks(
            load, tokenizer, seq_len, names, options.include_path, options.limit, options.num_fewshot
        )  # fmt: skip
        result["seq_len"], report = seq_len, result.pop("table")
    else:
        result = perplexity(load(), tokenizer, text, seq_len, progress=world.is_main())
        report = (
            f"perplexity {result['perplexity']:.4f}, {result['bits_per_byte']:.4f} bits a byte, "
            f"{result['tokens']} tokens at {result['tokens_per_second']:.0f}/s in windows of {seq_len}"
        )
    result["kv_cache"] = options.kv_cache
    if world.size() > 1:  # a part of a model says nothing of its size
        return result, report
    result |= weight_size(load())
    return result, f"{report}\n{result['bits_per_weight']:.4g} bits a weight, {result['bytes'] / 1e9:.4g} GB"


def command() -> int:
    options = build_parser().parse_args()
    result, report = run(options)
    if world.is_main():
        print(json.dumps(result, default=str) if options.json else report, flush=True)
    world.stop()
    return 0


def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    try:
        return world.attempt(command, out_of_memory="shorten --seq_len")
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
