"""Text from a Mixture-of-Experts checkpoint: `python generate.py --checkpoint_path DIR --prompt TEXT --compile`.

Also a library: `load_model`, `generate`. How a token is made stands in model.py, how one follows another in session.py,
how they become text in answer.py.
"""

import argparse
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

import offload
import tp
import world
from answer import DEFAULT_NEW_TOKENS, check_stop, generate, generate_all, statistics
from args import ModelArgs
from attention import BLOCK, HEADS
from checkpoint import FORMAT_VERSION, Checkpoint, pick_device
from command import Parser
from convert_hf_checkpoint import convert
from model import Transformer
from offload import Offload
from quantize import DTYPES, KV_CACHES, Packed, model_args
from session import PREFILL_CHUNK, Sampling, Session
from slots import POLICIES
from speculate import DRAFT_TOKENS, Speculation, check_drafting
from tokenizer import Tokenizer, load_tokenizer

EMBEDDED = Path(__file__).parent / "checkpoints" / "tiny-moe"
DEFAULT_PROMPT = "def read_lines(path):"
DEFAULT_CHAT_LENGTH = 4096  # positions of a chat's cache


# Loading ------------------------------------------------------------------------------------------------------------


def embedded_checkpoint() -> Path:
    """The model that comes with the project, converted on first use into the user's cache folder.

    Raises ValueError where that folder cannot be written.
    """
    stamp = FORMAT_VERSION
    for part in sorted(p for p in EMBEDDED.iterdir() if p.suffix in (".safetensors", ".json", ".model")):
        stamp = zlib.crc32(part.read_bytes(), stamp)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-fast"
    target = cache / f"tiny-moe-{stamp:08x}" / "model_bf16"
    there = target.exists()
    try:
        Checkpoint(target)
    except ValueError:
        try:
            if there:  # damaged; else another process may be just making it
                shutil.rmtree(target)
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"cannot write to {cache} ({error.strerror})"
            raise ValueError(f"{why}: set XDG_CACHE_HOME to a folder that can be written") from None
        made = convert(EMBEDDED, target.with_name(f"model_bf16.{os.getpid()}"), force=True)
        try:
            made.rename(target)
        except OSError:  # another was as quick, and may have begun to read its own
            shutil.rmtree(made)
            Checkpoint(target)
    return target


def open_checkpoint(path: Path | None) -> Checkpoint:
    """The converted checkpoint in that directory; None: the embedded model, on every rank."""
    if path is None:
        world.share(embedded_checkpoint)  # the others of a host find it made
        path = embedded_checkpoint()
    return Checkpoint(path)


def load_model(source, device: str | torch.device = "auto", dtype: torch.dtype | None = None,
               parallel: str = "tensor", experts: Offload | None = None) -> Transformer:  # fmt: skip
    """Build the model that `source` describes and stream its weights to the device, one tensor at a time.

    source: the directory of a converted checkpoint, or anything with its `.args`, `.format` and `.read(name, ...)`.
    dtype: of the floating-point weights; None keeps the checkpoint's. parallel: of several processes (`world.start`),
    each of which gets its part. experts: how they are kept in host memory, None: on the device. Raises ValueError for
    what cannot be loaded.
    """
    source = Checkpoint(source) if isinstance(source, str | os.PathLike) else source
    device = pick_device(device) if isinstance(device, str) else device
    if device.index is not None:
        torch.cuda.set_device(device)  # streams, events and graphs are of the current device
    part = tp.Part(model_args(source), source.format, parallel)
    model, size = part.model, 0
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    bar = tqdm(total=len(parameters), desc="loading", unit="tensor", leave=False, file=sys.stderr,
               disable=None if world.is_main() else True)  # fmt: skip

    def read(name: str, where: torch.device | str, expert: int | None = None) -> torch.Tensor:
        nonlocal size
        changing = expert is not None and isinstance(source, Checkpoint)  # read while the model runs
        try:
            if changing:
                source.check_unchanged(name)
            tensor = part.read(source, name, where, expert)
            if changing:
                source.check_unchanged(name)
        except KeyError:
            raise ValueError(f"the checkpoint lacks {name}: convert the model again, or quantise it again") from None
        path, leaf = name.rsplit(".", 1)
        packed = isinstance(modules[path], Packed) and leaf in modules[path].layout
        shape, dtypes = parameters[name].shape, (parameters[name].dtype,) if packed else tuple(DTYPES.values())
        shape = shape if expert is None else (1, *shape[1:])
        if tensor.shape != shape or tensor.dtype not in dtypes:
            found, due = f"{list(tensor.shape)} {tensor.dtype}", f"{list(shape)} {' or '.join(map(str, dtypes))}"
            raise ValueError(f"{name} is {found} where the config says {due}: convert the model again")
        if expert is None:
            size += tensor.nbytes
            bar.update(1)
        return tensor if dtype is None or packed or leaf == "score_bias" else tensor.to(dtype)

    with bar:
        start = time.perf_counter()
        if experts:
            plain = dtype or DTYPES[source.format.get("dtype", source.format["name"])]
            plan = offload.apply(model, experts, device, plain, read)
        for name in [name for name, tensor in model.named_parameters() if tensor.is_meta]:
            path, leaf = name.rsplit(".", 1)
            setattr(modules[path], leaf, nn.Parameter(read(name, device), requires_grad=False))
    model.tie()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    size = world.total(size)
    seconds = time.perf_counter() - start
    speed = f" in {seconds:.1f} s, {size / 1e9 / seconds:.1f} GB/s"
    lazily = device.type == "cpu" and dtype is None  # mapped tensors are read from the file when first used
    said = f"{'mapped' if lazily and not experts else 'loaded'} {size / 1e9:.2f} GB{'' if lazily else speed}"
    if world.size() > 1:
        chosen = world.choose(model.norm.weight.dtype, device)
        said += f", {parallel} parallel on {world.size()} ranks; {chosen}"
    if world.is_main():
        print(said, *[plan] if experts else [], sep="\n", file=sys.stderr)
    return model.eval()


# Command ------------------------------------------------------------------------------------------------------------


def add_model_options(parser: Parser) -> None:
    """The options that `open_session` follows, of every command that continues text."""
    add = parser.add_argument
    add("--compile", action="store_true", help="compile the decode step (and record it as a CUDA graph)")
    add("--compile_prefill", action="store_true", help="compile the prompt's pass too")
    add("--prefill_chunk", type=int, default=PREFILL_CHUNK, metavar="N", help="prompt tokens that are computed at once")
    add("--kv_cache", choices=tuple(KV_CACHES), default="plain", help="int8: keys and values in half the bytes")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--dtype", choices=tuple(DTYPES), help="default: as the checkpoint has it")
    add("--parallel", default="tensor", choices=tp.PARALLEL, help="how torchrun's processes share the experts")
    add("--offload", action="store_true", help="experts in host memory, as many on the GPU as fit")
    add("--gpu_experts", type=int, metavar="R", help="experts of each layer that the GPU holds at a time")
    add("--gpu_memory", metavar="SIZE", help="16GB, or 900MB: R is what fits into this, beside everything else")
    add("--cache_policy", choices=POLICIES, help="which expert goes when another comes; default: lru")
    add("--prefetch", type=int, metavar="N", help="experts that are copied on a guess, a layer and token; default: 2 "
        "where experts are large, else 0")  # fmt: skip
    add("--offload_tier", choices=offload.TIERS, help="disk: nothing in host memory, misses are read from the files")
    add("--offload_driver", choices=offload.DRIVERS, help="who says what is copied; default: the device, but "
        "where there are guesses")  # fmt: skip


def build_parser() -> Parser:
    parser = Parser(
        "Generate text from a converted Mixture-of-Experts checkpoint.",
        (
            "python generate.py --prompt 'def read_lines(path):' --temperature 0.6 --seed 1",
            "python generate.py --checkpoint_path checkpoints/OWNER/NAME/model_bf16 --interactive --compile",
            "python generate.py --checkpoint_path DIR --offload --gpu_memory 16GB --prompts_file prompts.txt --json",
            "torchrun --standalone --nproc_per_node=4 generate.py --checkpoint_path DIR --prompt 'Hello' --compile",
        ),
    )
    add = parser.add_argument
    add("--checkpoint_path", type=Path, metavar="DIR", help="converted checkpoint; default: the embedded tiny model")
    add("--prompt", action="append", metavar="TEXT", help="text to continue, '-' reads stdin; repeatable")
    add("--prompts_file", type=Path, metavar="FILE", help="a prompt a line; in a .jsonl a string or {'prompt': ...}")
    add("--batch_size", type=int, default=8, metavar="N", help="most prompts and samples that are continued at once")
    add("--max_new_tokens", type=int, metavar="N", help="default: 200, or as many as --max_seq_len leaves room for")
    add("--temperature", type=float, default=Sampling.temperature, metavar="X", help="0 is greedy")
    add("--top_k", type=int, default=Sampling.top_k, metavar="N")
    add("--top_p", type=float, default=Sampling.top_p, metavar="X")
    add("--min_p", type=float, default=Sampling.min_p, metavar="X")
    add("--repetition_penalty", type=float, default=Sampling.repetition_penalty, metavar="X")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--seed", type=int, metavar="N", help="same seed, same text")
    add("--num_samples", type=int, default=1, metavar="N", help="samples of each prompt")
    add("--speculate", choices=("lookup",), help="draft tokens from the text so far, verify several in one pass")
    add("--draft_checkpoint_path", type=Path, metavar="DIR", help="draft with this smaller model instead")
    add("--draft_tokens", type=int, metavar="N", help=f"drafts a pass; default: {DRAFT_TOKENS}")
    add("--max_seq_len", type=int, metavar="N", help="cache length; default: what prompt and new tokens need")
    add("--interactive", action="store_true", help="chat; /reset forgets, /exit ends, Ctrl-C stops an answer")
    add("--system", metavar="TEXT", help="system message; prompts then go through the model's chat template")
    add("--ignore_eos", action="store_true", help="do not end at the end-of-text token")
    add("--profile", type=Path, metavar="FILE", help="write a trace of the generation for chrome://tracing")
    add("--json", action="store_true", help="print one JSON object in place of the text")
    add_model_options(parser)
    return parser


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file, one a line, empty lines left out; in a .jsonl each a string, or an object's "prompt"."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"--prompts_file {path}: {error.strerror}: give a file that can be read") from None
    except UnicodeDecodeError:
        raise ValueError(f"--prompts_file {path}: it is not UTF-8 text: convert it to UTF-8") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                line = json.loads(line)
            except (ValueError, RecursionError):
                raise ValueError(f"--prompts_file {path}: line {number} is not JSON") from None
            line = line.get("prompt") if isinstance(line, dict) else line
            if not isinstance(line, str) or not line:
                raise ValueError(f'--prompts_file {path}: line {number} is neither a text nor {{"prompt": a text}}')
        prompts.append(line)
    if not prompts:
        raise ValueError(f"--prompts_file {path}: it holds no prompt")
    return prompts


def encode_prompts(options: argparse.Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each --prompt and each of the file's, through the chat template where there is a --system."""
    prompts, stdin = [], sys.stdin or io.StringIO()  # there may be none
    texts = [stdin.read() if text == "-" else text for text in options.prompt or []]
    texts += read_prompts(options.prompts_file) if options.prompts_file else []
    for text in texts or [DEFAULT_PROMPT]:
        if not text:
            raise ValueError("the prompt is empty: give --prompt some text, or pipe some in with --prompt -")
        if options.system is None:
            prompts.append(tokenizer.encode(text))
        else:
            system, user = {"role": "system", "content": options.system}, {"role": "user", "content": text}
            prompts.append(tokenizer.chat([system, user]))
    return prompts


def plan_lengths(longest: int, options: argparse.Namespace, args: ModelArgs) -> int:
    """Settle --max_new_tokens where it is not given, and return the session's length.

    Raises ValueError where prompt and answer do not fit, before a weight is read.
    """
    limit, what = options.max_seq_len or args.max_position, "--max_seq_len" if options.max_seq_len else "the model's"
    if limit > args.max_position:
        raise ValueError(f"--max_seq_len {limit}: the model was made for {args.max_position} positions at most")
    if options.interactive:
        options.max_new_tokens = options.max_new_tokens or DEFAULT_NEW_TOKENS
        return min(limit, options.max_seq_len or DEFAULT_CHAT_LENGTH)
    room = max(0, limit - longest)
    if options.max_new_tokens is None:
        options.max_new_tokens = min(DEFAULT_NEW_TOKENS, room) or DEFAULT_NEW_TOKENS
    if options.max_new_tokens > room:
        raise ValueError(
            f"{longest} prompt tokens and {options.max_new_tokens} new ones exceed {what} {limit} positions: "
            f"shorten the prompt or ask for at most {room} with --max_new_tokens"
        )
    return options.max_seq_len or longest + options.max_new_tokens


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """Raises ValueError for one of these options that is given, and below 1."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value}: it must be at least 1")


def check_model_options(options: argparse.Namespace) -> None:
    """Raises ValueError for options of `add_model_options` that cannot be, or cannot be together."""
    check_counts(options, "prefill_chunk")
    for name in ("gpu_experts", "gpu_memory", "cache_policy", "prefetch", "offload_tier", "offload_driver"):
        if getattr(options, name) is not None and not options.offload:
            raise ValueError(f"--{name} is about experts in host memory: add --offload")


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for options that cannot be, or cannot be together."""
    check_model_options(options)
    check_counts(options, "max_new_tokens", "num_samples", "max_seq_len", "batch_size")
    check_stop(options.stop)
    if options.profile and (options.profile.is_dir() or not options.profile.absolute().parent.is_dir()):
        raise ValueError(f"--profile {options.profile}: it must be a file in a folder that is there")
    if options.speculate and options.draft_checkpoint_path:
        raise ValueError("--speculate and --draft_checkpoint_path are two sources of drafts: leave one of them out")
    if options.draft_tokens is not None and not (options.speculate or options.draft_checkpoint_path):
        raise ValueError("--draft_tokens needs a source of drafts: add --speculate lookup or --draft_checkpoint_path")
    for name in ("prompt", "prompts_file", "json"):
        if options.interactive and getattr(options, name):
            raise ValueError(f"--{name} does not go with --interactive: leave one of them out")


def parse_size(text: str) -> int:
    """Bytes in "16GB" or "900MB", of 1000s. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([GM])B?", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"--gpu_memory {text}: it must be a number of GB or MB, as in 16GB")
    return int(float(found[1]) * {"G": 1e9, "M": 1e6}[found[2].upper()])


def plan_offload(options: argparse.Namespace, part: ModelArgs, itemsize: int, length: int, batch: int) -> Offload:
    """The options as settings. part: the args of one rank's part; itemsize: of its activations; length: of a sequence.

    Set aside are keys and values, and what a chunk of a prompt, or a step, makes at a time in one layer: x and what
    attention makes of it, and for each expert of each token its rows of x, w13's, SwiGLU's and w2's results.
    """
    tokens = max(min(options.prefill_chunk, length), batch)
    kept = math.prod(part.kept)
    row = 4 * part.dim + 2 * (part.n_head * part.head_dim + kept) + part.n_active * 3 * (part.intermediate + part.dim)
    cache = part.n_layer * batch * (length + BLOCK) * kept * itemsize
    if part.kv_rank:  # the keys and values that a chunk's queries see, made and put together
        cache += 5 * min(part.n_head, HEADS) * length * part.head_dim * itemsize
    reserve = cache + tokens * row * itemsize + batch * part.vocab_size * 16
    memory = None if options.gpu_memory is None else parse_size(options.gpu_memory)
    return Offload(
        options.gpu_experts, memory, options.cache_policy or Offload.policy, options.prefetch,
        options.offload_driver, options.offload_tier or Offload.tier, reserve,
    )  # fmt: skip


def open_session(
    options: argparse.Namespace, checkpoint: Checkpoint, device: torch.device, length: int, batch: int = 1
) -> Session:
    """The model as the options of `add_model_options` have it, with room for so many sequences of this length."""
    dtype, experts = DTYPES.get(options.dtype), None
    if options.offload:
        itemsize = (dtype or DTYPES[checkpoint.format.get("dtype", checkpoint.format["name"])]).itemsize
        part = tp.local_args(model_args(checkpoint), world.size(), options.parallel)
        experts = plan_offload(options, part, itemsize, length, batch)
    model = load_model(checkpoint, device, dtype, options.parallel, experts)
    model.cache_kind = KV_CACHES[options.kv_cache]
    return Session(model, length, options.compile, options.compile_prefill, batch, options.prefill_chunk)


def run(options: argparse.Namespace) -> list[dict]:
    """Load the model, generate what the options ask for, return the results (none for a chat)."""
    device = world.start(options.device)
    check_options(options)
    sampling = Sampling(
        options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty,
        world.common_seed(options.seed),
    )  # fmt: skip
    checkpoint = open_checkpoint(options.checkpoint_path)
    tokenizer, args = load_tokenizer(checkpoint.directory), model_args(checkpoint)
    if options.system is not None and not tokenizer.has_chat_template:
        raise ValueError("--system needs a chat template, and this model has none: leave --system out")
    prompts = [] if options.interactive else world.share(lambda: encode_prompts(options, tokenizer))
    length = plan_lengths(max(map(len, prompts), default=0), options, args)
    drafter = Checkpoint(options.draft_checkpoint_path) if options.draft_checkpoint_path else None
    drafts = DRAFT_TOKENS if options.draft_tokens is None else options.draft_tokens
    check_drafting(drafts, args, model_args(drafter) if drafter else None)
    world.agree(vars(options), checkpoint)
    speculates = bool(options.speculate or drafter)
    work = [ids for ids in prompts for _ in range(options.num_samples)]
    batch = 1 if speculates else min(options.batch_size, len(work)) or 1
    session = open_session(options, checkpoint, device, length, batch)
    if speculates:
        dtype = DTYPES.get(options.dtype)
        session = Speculation(
            session, drafts, load_model(drafter, device, dtype, options.parallel) if drafter else None
        )
    if options.compile or options.compile_prefill:
        start = time.perf_counter()
        for _ in session.stream_all([prompts[0] if prompts else [0]], 1, sampling):
            pass
        session.reset()
        if world.is_main():
            print(f"compiled in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    results = []
    with torch.profiler.profile() if options.profile else nullcontext() as profile:
        if options.interactive:
            chat(session, tokenizer, options, sampling)
        for first in range(0, len(work), batch):
            seed = None if sampling.seed is None else sampling.seed + first
            some = work[first : first + batch]
            results += _answers(session, tokenizer, some, options, replace(sampling, seed=seed))
    if options.profile and world.is_main():
        profile.export_chrome_trace(str(options.profile))
    return results


def _answers(
    session: Session | Speculation, tokenizer: Tokenizer, prompts: list[list[int]], options, sampling: Sampling
) -> list[dict]:
    """A batch of results: prompts on stderr, answers on stdout (one alone as it comes), then the statistics."""
    session.reset()  # nothing is carried from one prompt to the next, so that order does not matter
    alone = len(prompts) == 1 and not options.json and world.is_main()

    def echo(ids: list[int]) -> None:  # on a terminal the answer goes on where the prompt ends
        print(tokenizer.decode(ids), end="" if sys.stdout.isatty() else "\n", file=sys.stderr, flush=True)

    if alone:
        echo(prompts[0])
    start = time.perf_counter()
    results = generate_all(
        session, tokenizer, prompts, options.max_new_tokens, sampling,
        stop=options.stop, ignore_eos=options.ignore_eos, reply=options.system is not None,
        on_text=lambda number, text: print(text, end="", flush=True) if alone else None,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    if not world.is_main():
        return results
    for ids, result in zip(prompts, results, strict=True):
        if not options.json:
            if not alone:
                echo(ids)
            print("" if alone else result["text"], flush=True)
        print(statistics(result), file=sys.stderr)
    if len(results) > 1:
        new = sum(result["new_tokens"] for result in results)
        print(f"{len(results)} sequences, {new} new tokens, {new / seconds:.1f}/s with the prompts", file=sys.stderr)
    return results


@contextmanager
def _ctrl_c_as_flag() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C only makes the yielded function true."""
    pressed = []
    previous = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)


def _lines() -> Iterator[str]:
    """What the user types, line by line, until /exit or the end; Ctrl-C drops the line begun."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline() if sys.stdin else ""
        except KeyboardInterrupt:
            print("  (/exit ends)", file=sys.stderr)
            continue
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield line.rstrip("\n")


def chat(session: Session | Speculation, tokenizer: Tokenizer, options: argparse.Namespace, sampling: Sampling) -> None:
    """Read lines, stream answers, keep the cache between turns. Without a template the text is simply continued."""
    opening = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages, ids = list(opening), []
    say = print if world.is_main() else lambda *_, **__: None
    for text in world.share_each(_lines):
        if text.strip() == "/reset":
            messages, ids = list(opening), []
            continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            templated = tokenizer.has_chat_template
            prompt = tokenizer.chat(asked) if templated else ids + tokenizer.encode(text, bos=not ids)
        except ValueError as error:  # bytes that are no text, or the template's own objection
            say(f"error: {error}", file=sys.stderr)
            continue
        room = session.max_seq_len - len(prompt)
        if room < 1:
            say(f"the context of {session.max_seq_len} positions is full: /reset starts anew", file=sys.stderr)
            continue
        with _ctrl_c_as_flag() as interrupted:
            result = generate(
                session, tokenizer, prompt, min(options.max_new_tokens, room), sampling,
                stop=options.stop, ignore_eos=options.ignore_eos, reply=templated,
                on_text=lambda piece: say(piece, end="", flush=True), interrupted=interrupted,
            )  # fmt: skip
        say(flush=True)
        say(statistics(result), file=sys.stderr)
        messages = [*asked, {"role": "assistant", "content": result["text"]}]
        answer = session.ids[0][len(prompt) :]
        ids = prompt + (answer[:-1] if answer[-1] in tokenizer.stop_ids else answer)


def command() -> int:
    options = build_parser().parse_args()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character shows a question mark
            stream.reconfigure(errors="replace")
    try:
        results = run(options)
        if options.json and world.is_main():
            print(json.dumps(results[0] if len(results) == 1 else {"results": results}), flush=True)
        world.stop()
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        world.leave(141)
        return 141
    return 0


def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    try:
        return world.attempt(command, out_of_memory="shorten --max_seq_len")
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
