"""Generate text: `python generate.py --checkpoint_path DIR --prompt TEXT --compile`.

Library entry points: `load_model` (runtime/loading.py) and `generate`; `open_session` for parsed
options. To follow one token of an eager step, read `generate_all` here, `Session.stream_all`
(runtime/session.py), `DecodeSteps.decode` (runtime/session_steps.py), then `Transformer.forward`
and `Block.forward` in model.py. --compile runs other code, on an H100 the fused kernels: see "What
runs when" in docs/design.md.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import argparse
import json
import logging
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from cli.chat import Chat, greeting, model_name, read_requests
from cli.command import check_stdout, command, for_stream, suppress_ctrl_c
from cli.generate_options import (
    DEFAULT_NEW_TOKENS,
    DEFAULT_PROMPT,
    SAMPLING,
    build_parser,
    check_disk_options,
    check_options,
    plan_lengths,
)
from cli.log import log_to_stderr
from cli.model_name import parse_model_name
from cli.options import check_checkpoint_path, choose_compile
from cli.prompts import read_prompts
from cli.report import format_statistics, in_seconds
from cli.routing_file import RoutingRecorder
from cli.startup import check_arguments
from host.before_imports import create_context, hash_ahead, keep_bytecode
from host.compile_cache import use_compile_cache
from host.compile_helper import start_before_imports
from host.folders import model_folder, user_cache
from host.quick_imports import quicken
from host.staging import remove
from hub.manage import manage, manage_and_exit, read_model_ahead

if __name__ == "__main__":
    first = keep_bytecode, start_before_imports, create_context, quicken
    early = *first, hash_ahead, read_model_ahead
    check_arguments(build_parser, check_options, manage_and_exit, *early)

import torch

import tp
from checkpoint import FORMAT_VERSION, Checkpoint
from formats.kv_cache import KV_CACHES
from formats.quantizer import DTYPES
from gguf_files.opening import open_source
from memory.card_plan import choose_format, dry_run, settle
from memory.commands import generation_setup, offload_settings, plan_generation, uses_head
from model import Transformer
from models import args_of_checkpoint
from models.converter import convert
from offload.experts import COUNTERS, expert_counters
from parallel import process_group
from parallel.heartbeat import fail, leave
from runtime.compile_ahead import start_compiling
from runtime.draft_vocab import DRAFT_VOCAB
from runtime.loading import check_decode_kernels, head_source, load_head, load_model, stored_dtype
from runtime.mtp import check_mtp_drafts
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import (
    DRAFT_TOKENS,
    Speculation,
    capture_between_answers,
    check_drafting,
    passes_are_quick,
)
from runtime.text import TextSettings, TextStream, check_stop
from runtime.weights import bytes_per_token, peak_bytes
from tokenizer import Tokenizer, load_tokenizer
from tool_calls.reading import CallReader

OUT_OF_MEMORY = (
    "shorten --max_seq_len, lower --prefill_chunk, or with --offload --gpu_memory or --gpu_experts"
)
EMBEDDED = Path(__file__).parent / "checkpoints" / "tiny-moe"

log = logging.getLogger("moe_fast")


# Loading ------------------------------------------------------------------------------------------


def embedded_checkpoint() -> Path:
    """Return the model that comes with the project, converted on first use into the user's cache.

    Raises ValueError if that folder cannot be written.
    """
    stamp = FORMAT_VERSION
    for path in sorted(EMBEDDED.iterdir()):
        if path.suffix in (".safetensors", ".json", ".model"):
            stamp = zlib.crc32(path.read_bytes(), stamp)
    cache = user_cache()
    target = cache / f"tiny-moe-{stamp:08x}" / "model_bf16"
    existed = target.exists()
    with suppress(ValueError):
        Checkpoint(target)
        load_tokenizer(target)
        return target
    try:
        if existed:  # it is damaged; a target that appears later is another process's
            remove(target)
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot write to {cache} ({error.strerror})"
        raise ValueError(f"{why}: set XDG_CACHE_HOME to a folder that can be written") from None
    try:
        return convert(EMBEDDED, target)
    except ValueError:
        if not target.exists():
            raise
    Checkpoint(target)  # another process was first, and may be reading it
    return target


def open_checkpoint(path: Path | None) -> Checkpoint:
    """Open a converted checkpoint or a GGUF file; None: the embedded model, on every rank."""
    if path is None:
        process_group.share(embedded_checkpoint)  # rank 0 converts it, then the others find it
        path = embedded_checkpoint()
    checkpoint = open_source(path)
    process_group.share(lambda: str(checkpoint.directory))  # rank 0 makes a GGUF file's tokenizer
    return checkpoint


def open_model(options: argparse.Namespace, device: torch.device) -> Checkpoint:
    """Open the checkpoint of --checkpoint_path or --model; rank 0 downloads the latter if needed.

    device: where weights are packed. Raises ValueError as `open_checkpoint` and `prepare_for`.
    """
    check_checkpoint_path(options)
    if options.model is None:
        return open_checkpoint(options.checkpoint_path)
    from hub.prepare import prepare_for

    return open_checkpoint(process_group.share(lambda: prepare_for(options, device)))


def find_source(options: argparse.Namespace):
    """Return the model's checkpoint, or its description if it is not on this disk."""
    check_checkpoint_path(options)
    if options.model is None:
        return open_checkpoint(options.checkpoint_path)
    from hub.describe import describe_model

    return describe_model(parse_model_name(options.model), options.revision)


def begin_compiling(
    options: argparse.Namespace, checkpoint: Checkpoint, device: torch.device
) -> None:
    """Begin to compile what the first launches need, if the options compile.

    Called before the model is loaded, so that both happen at the same time.
    """
    if options.compile or options.compile_prefill:
        use_compile_cache(options.compile_cache)
        if process_group.size() == 1:
            start_compiling(checkpoint, device)


def open_session(
    options: argparse.Namespace,
    checkpoint: Checkpoint,
    device: torch.device,
    length: int,
    batch: int = 1,
    shard: tp.ModelShard | None = None,
    expected: SessionOptions | None = None,
) -> Session:
    """Load the model as the options of `cli.options` say, with memory for `batch` sequences.

    shard: as in `load_model`. expected: has `prompt_lengths` and `longest`; None: any may come.
    """
    dtype, experts = DTYPES.get(options.dtype), None
    if options.offload:
        args = tp.local_args(args_of_checkpoint(checkpoint), process_group.size(), options.parallel)
        plain = dtype or stored_dtype(checkpoint)
        experts = offload_settings(options, checkpoint, args, plain, length, batch)
    check_decode_kernels(options.decode_kernels, checkpoint, device, dtype, options.parallel)
    model = load_model(checkpoint, device, dtype, options.parallel, experts, shard=shard)
    settings = replace(
        expected or SessionOptions(),
        batch=batch,
        compile=options.compile,
        compile_prefill=options.compile_prefill,
        prefill_chunk=options.prefill_chunk,
        cache_class=KV_CACHES[options.kv_cache],
        decode_kernels=options.decode_kernels,
    )
    return Session(model, length, settings)


# Generation ---------------------------------------------------------------------------------------


def generate(
    session: Session | Speculation,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    sampling: Sampling | None = None,
    *,
    on_text: Callable[[str], None] = lambda text: None,
    on_token: Callable[[int, int], None] = lambda token, begin: None,
    on_reasoning: Callable[[str], None] | None = None,
    **options,
) -> dict:
    """`generate_all` for one prompt: text or token ids. The callbacks get no prompt number."""
    options["on_text"] = lambda number, text: on_text(text)
    options["on_token"] = lambda number, token, begin: on_token(token, begin)
    if on_reasoning:
        options["on_reasoning"] = lambda number, text: on_reasoning(text)
    return generate_all(session, tokenizer, [prompt], max_new_tokens, sampling, **options)[0]


def generate_all(
    session: Session | Speculation,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    sampling: Sampling | None = None,
    *,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    reply: bool = False,
    on_text: Callable[[int, str], None] = lambda number, text: None,
    on_token: Callable[[int, int, int], None] = lambda number, token, begin: None,
    on_reasoning: Callable[[int, str], None] | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    markers: Mapping[int, str] | None = None,
) -> list[dict]:
    """Continue each prompt, all at once, until EOS, a `stop` text or max_new_tokens.

    The session's batch limits the number of prompts. on_text gets a prompt's number and each piece
    of text as soon as it is certain. on_token gets the number, each token that does not end the
    text, and where in the text it begins; it is called before on_text. `interrupted` is called
    after every step. on_reasoning gets the number and each piece of a chat model's reasoning, which
    is then no part of the text; None: it is. reply, markers: see runtime.text.TextSettings.

    Returns for each prompt the fields of `TextStream.result` and `weight_statistics`, and with
    offloaded experts "offload" (see `expert_traffic`). Raises ValueError as `Session.stream_all`,
    and for an empty stop text.
    """
    stop = [stop] if isinstance(stop, str) else stop
    check_stop(stop)
    ids = [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
    streams = []
    for number, prompt in enumerate(ids):
        thoughts = partial(on_reasoning, number) if on_reasoning else None
        callbacks = partial(on_text, number), partial(on_token, number), thoughts
        settings = TextSettings(stop, ignore_eos, reply, *callbacks, markers=markers or {})
        streams.append(TextStream(prompt, tokenizer, settings))
    start, steps, counters = time.perf_counter(), 0, None
    for tokens in session.stream_all(ids, max_new_tokens, sampling or Sampling()):
        steps += 1
        counters = counters or expert_counters(session.model)  # excludes the prompt's copies
        for stream, token in zip(streams, tokens, strict=True):
            stream.push(token)
        if all(stream.finish_reason for stream in streams):
            break
        if interrupted():
            for stream in streams:
                stream.end("interrupted")
            break
    process_group.check_same_tokens(session.ids)
    common = weight_statistics(session)
    if counters:
        common["offload"] = expert_traffic(session.model, counters, (steps - 1) * len(ids))
    one_token = len(ids) == 1 and "speculation" not in common  # a pass
    read = common["bytes_per_token"] if one_token else None
    return [stream.result(start, session.prefilled, read) | common for stream in streams]


def weight_statistics(session: Session | Speculation) -> dict:
    """Return bytes_per_token (of weights, all ranks), peak_bytes, and a Speculation's counts.

    An automatic speculation that never drafted has no counts: its answer is that of plain steps.
    """
    size = process_group.total(bytes_per_token(session.model))
    common = {"bytes_per_token": size, "peak_bytes": peak_bytes(session.device)}
    if isinstance(session, Speculation) and not (session.auto and not session.drafted):
        common["speculation"] = session.statistics()
    return common


def expert_traffic(model: Transformer, before: list[dict[str, int]], tokens: int) -> dict:
    """Return the traffic of offloaded experts since `expert_counters` returned `before`.

    tokens: computed since then. hits, misses (copied) and on_cpu count the experts that were
    needed, once a layer and step; hit_ratio and cpu_ratio are shares of these, None if there are
    none. bytes and bytes_moved_per_token were copied to the devices, of all ranks.
    """
    layers = list(zip(expert_counters(model), before, strict=True))
    found = {name: sum(new[name] - old[name] for new, old in layers) for name in COUNTERS}
    found["bytes"] = process_group.total(found["bytes"])
    needed = found["hits"] + found["misses"] + found["on_cpu"]
    return found | {
        "hit_ratio": found["hits"] / needed if needed else None,
        "cpu_ratio": found["on_cpu"] / needed if needed else None,
        "bytes_moved_per_token": found["bytes"] / tokens if tokens else None,
    }


# Command ------------------------------------------------------------------------------------------


def print_plan(options: argparse.Namespace, device: torch.device) -> None:
    """Print what --dry_run asks for."""
    check_clocks(options.speculate)

    def find():
        source, path = find_source(options), vars(options).get("draft_checkpoint_path")
        check_speculation(options, source, path and open_source(path))
        return source

    lines = dry_run(options, device, find)
    if process_group.is_main():
        print("\n".join(lines), flush=True)


def encode_prompts(options: argparse.Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of every prompt, through the chat template if --system is given."""
    texts = read_prompts(options.prompt, options.prompts_file) or [DEFAULT_PROMPT]
    if options.system is None:
        return [tokenizer.encode(text) for text in texts]
    system = {"role": "system", "content": options.system}
    return [tokenizer.chat([system, {"role": "user", "content": text}]) for text in texts]


def run(options: argparse.Namespace) -> list[dict]:
    """Load the model, generate what the options ask for, return the results (none for a chat)."""
    device = process_group.start(options.device)
    check_options(options)
    check_stop(options.stop)
    options.seed = process_group.common_seed(options.seed)
    sampling = Sampling(**{name: getattr(options, name) for name in SAMPLING})
    # --prepare_only compiles if --compile is given.
    on_gpu = device.type == "cuda" or bool(options.gpu)
    choose_compile(options, on_gpu and not options.prepare_only)
    if options.dry_run:
        print_plan(options, device)
        return []
    choose_format(options, device, lambda: find_source(options))
    checkpoint = open_model(options, device)
    if options.prepare_only and process_group.is_main():
        print(getattr(checkpoint, "path", checkpoint.directory), flush=True)
    if options.prepare_only and not options.compile:
        return []
    begin_compiling(options, checkpoint, device)
    tokenizer, args = load_tokenizer(checkpoint.directory), args_of_checkpoint(checkpoint)
    if options.system is not None and not tokenizer.has_chat_template:
        why = "--system needs a chat template, and this model has none"
        raise ValueError(f"{why}: leave --system out")
    prompts = []
    if not options.interactive:
        prompts = process_group.share(lambda: encode_prompts(options, tokenizer))
    tokenizer.check_ids((id for ids in prompts for id in ids), args.vocab_size)
    longest = max(map(len, prompts), default=0)
    length = plan_lengths(longest, options, args.max_position)
    prompts = [ids for ids in prompts for _ in range(options.num_samples)]
    session = prepare_session(options, checkpoint, device, length, [*map(len, prompts)])
    recorder, folder = None, model_folder(checkpoint.directory)
    if options.save_routing:
        name, format = model_name(folder), checkpoint.format["name"]
        recorder = RoutingRecorder(options.save_routing, name, format)
        session.watch = True
    if options.compile or options.compile_prefill:
        compile_session(session, prompts[0] if prompts else [0], sampling)
    if options.prepare_only:
        return []
    results, batch = [], session.batch
    with torch.profiler.profile() if options.profile else nullcontext() as profile:
        if options.interactive:
            if process_group.is_main():
                format = checkpoint.format["name"]
                template = tokenizer.has_chat_template
                print(greeting(folder, format, session.max_seq_len, template), file=sys.stderr)
            chat(session, tokenizer, options, sampling)
        for first in range(0, len(prompts), batch):
            if sampling.seed is not None:
                sampling = replace(sampling, seed=options.seed + first)
            some = prompts[first : first + batch]
            results += generate_batch(session, tokenizer, some, options, sampling, recorder)
    if recorder and process_group.is_main():
        recorder.write()
    if options.profile and process_group.is_main():
        profile.export_chrome_trace(str(options.profile))
        check_trace(options.profile)
    return results


def check_trace(path: Path) -> None:
    """Raise ValueError unless a trace is whole: the profiler keeps silent about a full disk."""
    end = b""
    if path.is_file():
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 16))
            end = stream.read().rstrip()
    if not end.endswith(b"}"):
        path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)  # the profiler leaves it behind
        raise ValueError(f"--profile {path}: it could not be written; free some space")


def prepare_session(
    options: argparse.Namespace,
    checkpoint: Checkpoint,
    device: torch.device,
    length: int,
    lengths: Sequence[int],
) -> Session | Speculation:
    """`open_session` for prompts of these lengths, with speculation if the options ask for it.

    Raises ValueError if the session does not fit into memory, before weights are read.
    """
    prompts, longest = len(lengths), max(lengths, default=0)
    kind = choose_speculation(options, prompts)
    drafter = options.draft_checkpoint_path and open_source(options.draft_checkpoint_path)
    check_speculation(options, checkpoint, drafter)
    process_group.check_agreement(vars(options), checkpoint)
    batch = min(options.batch_size, prompts) or 1 if kind == "off" else 1
    setup = generation_setup(options, checkpoint, drafter, length, batch, longest)
    length = settle(options, device, setup) or length
    if options.offload:  # the plan may have chosen it
        kind = choose_speculation(options, prompts)
    plan_generation(options, checkpoint, drafter, device, length, batch, longest, setup.sizes)
    shard = setup.sizes.shard if process_group.size() == 1 else None
    expected = None
    if prompts and kind == "off" and not options.prepare_only:
        expected = SessionOptions(
            prompt_lengths=tuple(lengths), longest=longest + options.max_new_tokens
        )
    session = open_session(options, checkpoint, device, length, batch, shard, expected)
    is_default = not (options.speculate or drafter)
    if kind == "off" or (is_default and not passes_are_quick(session)):
        return session
    speculation = speculate(options, checkpoint, session, kind, drafter)
    if options.interactive:
        capture_between_answers(speculation)
    return speculation


def check_speculation(options: argparse.Namespace, checkpoint: Checkpoint, drafter=None) -> None:
    """Raise ValueError for drafts that cannot be made: their number, model or head, their ids."""
    drafts = DRAFT_TOKENS if options.draft_tokens is None else options.draft_tokens
    draft_args = drafter and args_of_checkpoint(drafter)
    check_drafting(drafts, args_of_checkpoint(checkpoint), draft_args)
    if uses_head(options, checkpoint):
        check_mtp_drafts(drafts)
        head_source(checkpoint)  # raises if there is none
    elif not drafter and (ids := vars(options).get("draft_vocab")):
        raise ValueError(
            f"--draft_vocab {ids}: this checkpoint has no head for multi-token prediction: add "
            "--draft_checkpoint_path, or leave it out"
        )


def speculate(
    options: argparse.Namespace, checkpoint: Checkpoint, session: Session, kind: str, drafter=None
) -> Speculation:
    """Let a session verify drafts. kind: "auto", or any other. drafter: a draft model's source."""
    dtype, has_head = DTYPES.get(options.dtype), uses_head(options, checkpoint)
    draft = drafter and load_model(drafter, session.device, dtype, options.parallel)
    head = load_head(checkpoint, session.model, dtype, options.parallel) if has_head else None
    ids: list[int] = []
    if draft or head:
        count = vars(options).get("draft_vocab") or DRAFT_VOCAB
        ids = load_tokenizer(checkpoint.directory).frequent_ids(count)
    drafts = options.draft_tokens or DRAFT_TOKENS
    return Speculation(session, drafts, draft, head, kind == "auto", ids)


def check_clocks(kind: str | None) -> None:
    """Raise ValueError for --speculate auto on several ranks.

    Their clocks differ, and so would their choices.
    """
    ranks = process_group.size()
    if kind == "auto" and ranks > 1:
        raise ValueError(
            f"--speculate auto measures time, on which {ranks} ranks would not agree: give "
            "--speculate lookup, or leave it out"
        )


def choose_speculation(options: argparse.Namespace, prompts: int) -> str:
    """Return how drafts are made: off, auto, or always by "lookup", "mtp" or "model".

    The default is auto for one sequence on one rank, where it cannot slow an answer down. It is
    off with offloaded experts: the experts of drafts would evict others. It is off for a single
    compiled answer, too: an H200 decodes 500 to 800 tokens in the time of four captures. A chat
    captures between its answers, if its passes are quick (`prepare_session`). Raises ValueError as
    `check_clocks`.
    """
    kind, ranks = options.speculate, process_group.size()
    check_clocks(kind)
    if kind:
        return kind
    if options.draft_checkpoint_path:
        return "model"
    if options.save_routing:  # drafts have no details
        return "off"
    one = max(1, min(options.batch_size, prompts)) == 1 and ranks == 1
    captures_first = options.compile and not options.interactive
    return "auto" if one and not (options.offload or captures_first) else "off"


def compile_session(session: Session | Speculation, ids: list[int], sampling: Sampling) -> None:
    """Compile and capture what an answer needs, and log how long it took."""
    start = time.perf_counter()
    for _ in session.stream_all([ids], 1, sampling):
        pass
    session.reset()
    if process_group.is_main():
        log.info(f"compiled in {in_seconds(time.perf_counter() - start)}")


def print_text(text: str, end: str, stream: TextIO) -> None:
    """Print a prompt or an answer."""
    print(for_stream(text, stream), end=end, file=stream, flush=True)


def generate_batch(
    session: Session | Speculation,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    options: argparse.Namespace,
    sampling: Sampling,
    recorder: RoutingRecorder | None = None,
) -> list[dict]:
    """Continue a batch: prompts go to stderr, answers to stdout (a single one as it comes).

    recorder: gets each token's experts, if the session is watched.
    """
    session.reset()  # results must not depend on the order of prompts, so share no prefix
    main = process_group.is_main()
    streaming = main and len(prompts) == 1 and not options.json

    def echo(ids: list[int]) -> None:  # on a terminal the answer continues the prompt's line
        end = "" if sys.stdout.isatty() else "\n"
        print_text(tokenizer.decode(ids), end, sys.stderr)

    def record(number: int, token: int, begin: int) -> None:
        text = tokenizer.token_bytes(token).decode(errors="replace")
        details = session.details[number]
        recorder.add(number, text, details.experts, details.weights)

    if recorder:
        recorder.begin([tokenizer.decode(ids) for ids in prompts])
    if streaming:
        echo(prompts[0])
    start = time.perf_counter()
    results = generate_all(
        session,
        tokenizer,
        prompts,
        options.max_new_tokens,
        sampling,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        reply=options.system is not None,
        on_text=lambda number, text: print_text(text, "", sys.stdout) if streaming else None,
        on_token=record if recorder else lambda number, token, begin: None,
    )
    seconds = time.perf_counter() - start
    for ids, result in zip(prompts, results, strict=True) if main else ():
        if streaming:
            print(flush=True)
        elif not options.json:
            echo(ids)
            print_text(result["text"], "\n", sys.stdout)
        print(format_statistics(result), file=sys.stderr)
    if main and len(results) > 1:
        new = sum(result["new_tokens"] for result in results)
        rate = f"{new / seconds:,.1f}/s, prompts included"
        print(f"{len(results)} sequences, {new:,} new tokens at {rate}", file=sys.stderr)
    return results


def chat(
    session: Session | Speculation,
    tokenizer: Tokenizer,
    options: argparse.Namespace,
    sampling: Sampling,
) -> None:
    """Read messages and commands, stream answers, keep the cache between turns."""
    answer, make_reader = partial(generate, session, tokenizer), partial(CallReader, tokenizer)
    turns = Chat(answer, session, tokenizer, options, sampling, make_reader)
    turns.silent = not process_group.is_main()
    for name, given in process_group.share_each(partial(read_requests, turns.last_message)):
        turns.handle(name, given)
        with suppress_ctrl_c():  # as at the prompt that follows
            while isinstance(session, Speculation) and session.captures.capture_next():
                pass  # the user reads the answer meanwhile


@command(fail, out_of_memory=OUT_OF_MEMORY)
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    log_to_stderr()
    check_stdout()
    if options.list or options.remove:
        check_disk_options(options)
        return manage(options)
    try:
        results = run(options)
        if options.json and process_group.is_main():
            output = results[0] if len(results) == 1 else {"results": results}
            print(json.dumps(output), flush=True)
    except BrokenPipeError:  # the reader of our output has left
        leave(141)
        raise
    process_group.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
