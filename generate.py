"""Generate text: `python generate.py --checkpoint_path DIR --prompt TEXT --compile`.

Also the library's entry: `load_model`, `open_session`, `generate`. model.py makes one token,
runtime/session.py one token after the other.
"""

import argparse
import io
import json
import logging
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

import tp
from checkpoint import FORMAT_VERSION, Checkpoint
from cli.chat import ctrl_c_flag, read_lines
from cli.options import (
    add_model_options,
    check_counts,
    check_model_options,
    parse_size,
)
from cli.parser import Parser
from formats import FORMATS
from formats.kv_cache import KV_CACHES
from formats.packed import Packed
from formats.quantizer import DTYPES
from model import ModelArgs, Transformer
from models import args_of_checkpoint, family_of
from models.converter import convert
from offload.experts import COUNTERS, expert_counters
from offload.plan import OffloadSettings, offload_experts
from offload.runner import runner_class_for
from ops.attention import BLOCK
from parallel import process_group
from parallel.all_reduce import choose_all_reduce
from parallel.device import pick_device
from parallel.heartbeat import attempt, leave
from runtime.fused_attention import fuse_decode_attention
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import DRAFT_TOKENS, Speculation, check_drafting
from runtime.text import TextSettings, TextStream, check_stop, format_statistics
from runtime.weights import bytes_per_token, peak_bytes
from tokenizer import Tokenizer, load_tokenizer

EMBEDDED = Path(__file__).parent / "checkpoints" / "tiny-moe"
DEFAULT_PROMPT = "def read_lines(path):"
DEFAULT_CHAT_LENGTH = 4096  # positions of a chat's cache
DEFAULT_NEW_TOKENS = 200

log = logging.getLogger("moe_fast")


# Loading ------------------------------------------------------------------------------------------


def embedded_checkpoint() -> Path:
    """Return the model that comes with the project, converted on first use into the user's cache.

    Raises ValueError if that folder cannot be written.
    """
    stamp = FORMAT_VERSION
    for part in sorted(
        path for path in EMBEDDED.iterdir() if path.suffix in (".safetensors", ".json", ".model")
    ):
        stamp = zlib.crc32(part.read_bytes(), stamp)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-fast"
    target = cache / f"tiny-moe-{stamp:08x}" / "model_bf16"
    existed = target.exists()
    try:
        Checkpoint(target)
        return target
    except ValueError:
        pass
    try:
        if existed:  # damaged; otherwise another process may be making it
            shutil.rmtree(target)
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot write to {cache} ({error.strerror})"
        raise ValueError(f"{why}: set XDG_CACHE_HOME to a folder that can be written") from None
    made = convert(EMBEDDED, target.with_name(f"model_bf16.{os.getpid()}"), force=True)
    try:
        made.rename(target)
    except OSError:  # another process was as quick, and may be reading its own
        shutil.rmtree(made)
        Checkpoint(target)
    return target


def open_checkpoint(path: Path | None) -> Checkpoint:
    """Open a converted checkpoint; None: the embedded model, on every rank."""
    if path is None:
        process_group.share(embedded_checkpoint)  # other ranks of this host then find it made
        path = embedded_checkpoint()
    return Checkpoint(path)


def load_model(
    source,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    parallel: str = "tensor",
    experts: OffloadSettings | None = None,
) -> Transformer:
    """Build the model that `source` describes and read its weights to the device, one by one.

    source: the directory of a converted checkpoint, or any object with its `args`, `format` and
    `read(name, index, device)`. dtype: of floating-point weights; None: the checkpoint's.
    parallel: how several ranks (`process_group.start`) shard it. experts: how they are kept in
    host memory; None: on the device. Raises ValueError for what cannot be loaded.
    """
    source = Checkpoint(source) if isinstance(source, str | os.PathLike) else source
    device = pick_device(device) if isinstance(device, str) else device
    if device.index is not None:
        torch.cuda.set_device(device)  # streams, events and graphs belong to the current device
    shard = tp.ModelShard(args_of_checkpoint(source), source.format, parallel)
    loader = WeightLoader(shard, source, dtype)
    start, plan = time.perf_counter(), None
    with loader.progress:
        if experts:
            plain = dtype or DTYPES[source.format.get("dtype", source.format["name"])]
            plan = offload_experts(shard.model, experts, device, plain, loader.read)
        loader.fill(device)
    model = shard.model
    model.tie_weights()
    shard.insert_collectives()
    # One GPU decodes bf16, int8 and fp8 by Inductor's kernels alone; 4 bits have own kernels
    # anyway.
    modules = source.format.get("modules", {}).values()
    if shard.ranks > 1 or any(FORMATS[module["format"]].bits == 4 for module in modules):
        fuse_decode_attention(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    lazy = device.type == "cpu" and dtype is None  # mapped tensors are read when first used
    loader.report(time.perf_counter() - start, device, parallel, mapped=lazy and not experts)
    if plan:
        log.info(plan)
    return model.eval()


class WeightLoader:
    """Reads the parameters of a shard from a source, and checks their shapes and dtypes."""

    def __init__(self, shard: tp.ModelShard, source, dtype: torch.dtype | None):
        self.shard, self.source, self.dtype, self.nbytes = shard, source, dtype, 0
        self.parameters = dict(shard.model.named_parameters())
        self.modules = dict(shard.model.named_modules())
        self.progress = tqdm(
            total=len(self.parameters),
            desc="loading",
            unit="tensor",
            leave=False,
            file=sys.stderr,
            disable=None if process_group.is_main() else True,
        )

    def read(
        self, name: str, device: torch.device | str, expert: int | None = None
    ) -> torch.Tensor:
        """Read this rank's part of a parameter, or of one expert of it.

        Raises ValueError if it is missing, or not as the config says.
        """
        # One expert is read while the model runs: the file may have been replaced since.
        checked = expert is not None and isinstance(self.source, Checkpoint)
        try:
            if checked:
                self.source.check_unchanged(name)
            tensor = self.shard.read(self.source, name, device, expert)
            if checked:
                self.source.check_unchanged(name)
        except KeyError:
            raise ValueError(
                f"the checkpoint lacks {name}: convert the model again, or quantise it again"
            ) from None
        path, leaf = name.rsplit(".", 1)
        packed = isinstance(self.modules[path], Packed) and leaf in self.modules[path].layout
        self.check(name, tensor, packed, expert)
        if expert is None:
            self.nbytes += tensor.nbytes
            self.progress.update(1)
        keeps_dtype = self.dtype is None or packed or leaf == "score_bias"
        return tensor if keeps_dtype else tensor.to(self.dtype)

    def check(self, name: str, tensor: torch.Tensor, packed: bool, expert: int | None) -> None:
        """Raise ValueError unless the tensor has the parameter's shape and a known dtype."""
        due = self.parameters[name]
        shape = due.shape if expert is None else (1, *due.shape[1:])
        dtypes = (due.dtype,) if packed else tuple(DTYPES.values())
        if tensor.shape != shape or tensor.dtype not in dtypes:
            found = f"{list(tensor.shape)} {tensor.dtype}"
            expected = f"{list(shape)} {' or '.join(map(str, dtypes))}"
            raise ValueError(
                f"{name} is {found} where the config says {expected}: convert the model again"
            )

    def fill(self, device: torch.device) -> None:
        """Read every parameter that is still on the meta device."""
        model = self.shard.model
        for name in [name for name, tensor in model.named_parameters() if tensor.is_meta]:
            path, leaf = name.rsplit(".", 1)
            parameter = nn.Parameter(self.read(name, device), requires_grad=False)
            setattr(self.modules[path], leaf, parameter)

    def report(self, seconds: float, device: torch.device, parallel: str, mapped: bool) -> None:
        """Log what was loaded, and on several ranks how they all-reduce."""
        size = process_group.total(self.nbytes)
        lazy = device.type == "cpu" and self.dtype is None
        speed = "" if lazy else f" in {seconds:.1f} s, {size / 1e9 / seconds:.1f} GB/s"
        message = f"{'mapped' if mapped else 'loaded'} {size / 1e9:.2f} GB{speed}"
        if process_group.size() > 1:
            chosen = choose_all_reduce(self.shard.model.norm.weight.dtype, device)
            message += f", {parallel} parallel on {process_group.size()} ranks; {chosen}"
        if process_group.is_main():
            log.info(message)


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
    **options,
) -> dict:
    """`generate_all` for one prompt: text or token ids. Both callbacks get no prompt number."""
    options["on_text"] = lambda number, text: on_text(text)
    options["on_token"] = lambda number, token, begin: on_token(token, begin)
    return generate_all(session, tokenizer, [prompt], max_new_tokens, sampling, **options)[0]


def generate_all(
    session: Session | Speculation,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    sampling: Sampling | None = None,
    *,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    reply: bool = False,
    on_text: Callable[[int, str], None] = lambda number, text: None,
    on_token: Callable[[int, int, int], None] = lambda number, token, begin: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[dict]:
    """Continue each prompt, all at once, until EOS, a `stop` text or max_new_tokens.

    At most as many prompts as the session's batch. on_text gets a prompt's number and each piece
    of text as soon as it is certain; on_token, before that, the number, each token that does not
    end the text, and where in the text it begins. `interrupted` is called after every step. See
    runtime.text.TextSettings.

    Returns for each prompt: text, prompt_tokens, new_tokens, finish_reason ("stop", "length" or
    "interrupted"), ttft_s (time to first token), prefill_tok_s (of all tokens that the cache did
    not hold), decode_tok_s (None below two tokens), bytes_per_token (weights, all ranks), gb_s
    (of one sequence, one token a pass), peak_bytes; with a Speculation its "speculation", with
    offloaded experts "offload" (see `expert_traffic`). Raises ValueError as `Session.stream_all`,
    and for an empty stop text.
    """
    stop = [stop] if isinstance(stop, str) else stop
    check_stop(stop)
    ids = [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
    streams = []
    for number, prompt in enumerate(ids):
        callbacks = partial(on_text, number), partial(on_token, number)
        streams.append(
            TextStream(prompt, tokenizer, TextSettings(stop, ignore_eos, reply, *callbacks))
        )
    start, steps, counters = time.perf_counter(), 0, None
    for tokens in session.stream_all(ids, max_new_tokens, sampling or Sampling()):
        steps += 1
        counters = counters or expert_counters(session.model)  # excludes the prompt's copies
        for stream, token in zip(streams, tokens, strict=True):
            if stream.finish_reason is None:
                stream.push(token)
        if all(stream.finish_reason for stream in streams):
            break
        if interrupted():
            for stream in streams:
                stream.end("interrupted")
            break
    process_group.check_same_tokens(session.ids)
    traffic = expert_traffic(session.model, counters, (steps - 1) * len(ids)) if counters else None
    return text_results(session, streams, start, traffic)


def text_results(
    session: Session | Speculation,
    streams: Sequence[TextStream],
    start: float,
    traffic: dict | None,
) -> list[dict]:
    """Return the result of each stream, see `generate_all`."""
    size = process_group.total(bytes_per_token(session.model))
    shared = {"bytes_per_token": size, "peak_bytes": peak_bytes(session.device)}
    if isinstance(session, Speculation):
        shared["speculation"] = session.statistics()
    if traffic:
        shared["offload"] = traffic
    results = []
    for stream in streams:
        stream.end("length")
        result = stream.result(start)
        rate, ttft = result["decode_tok_s"], result["ttft_s"]
        alone = rate and len(streams) == 1 and "speculation" not in shared
        result["prefill_tok_s"] = session.prefilled / ttft if ttft else None
        result["gb_s"] = size * rate / 1e9 if alone else None
        results.append(result | shared)
    return results


def expert_traffic(model: Transformer, before: list[dict[str, int]], tokens: int) -> dict:
    """Return what all layers copied for `tokens` tokens, since `expert_counters` was `before`.

    hits, misses, speculative_hits (experts needed, once a layer and step), speculative_loads;
    hit_ratio and guessed_ratio (hits and speculative hits of all needed); bytes and
    bytes_moved_per_token (copied to the devices, all ranks). Ratios are None if nothing was
    needed.
    """
    after = expert_counters(model)
    found = {
        name: sum(new[name] - old[name] for new, old in zip(after, before, strict=True))
        for name in COUNTERS
    }
    found["bytes"] = process_group.total(found["bytes"])
    needed = found["hits"] + found["misses"] + found["speculative_hits"]
    return found | {
        "hit_ratio": found["hits"] / needed if needed else None,
        "guessed_ratio": found["speculative_hits"] / needed if needed else None,
        "bytes_moved_per_token": found["bytes"] / tokens if tokens else None,
    }


def plan_offload(
    options: argparse.Namespace, args: ModelArgs, itemsize: int, length: int, batch: int
) -> OffloadSettings:
    """Return the options as settings. args: one rank's; itemsize: bytes of an activation.

    Reserved are the cache, and what a chunk of a prompt or a step makes in one layer: x,
    attention's temporaries, and for each expert of each token its rows of x, w13's and w2's
    results and SwiGLU.
    """
    tokens = max(min(options.prefill_chunk, length), batch)
    per_position, extra = family_of(args).attention_memory(args, length)
    row = 4 * args.dim + 2 * (args.n_head * args.head_dim + per_position)
    row += args.n_active * 3 * (args.intermediate + args.dim)
    cache = args.n_layer * batch * (length + BLOCK) * per_position + extra
    reserve = (cache + tokens * row) * itemsize + batch * args.vocab_size * 16
    memory = None if options.gpu_memory is None else parse_size(options.gpu_memory)
    return OffloadSettings(
        options.gpu_experts,
        memory,
        options.cache_policy or OffloadSettings.policy,
        options.prefetch,
        options.offload_driver,
        reserve,
    )


def open_session(
    options: argparse.Namespace,
    checkpoint: Checkpoint,
    device: torch.device,
    length: int,
    batch: int = 1,
) -> Session:
    """Load the model as the options of `cli.options` say, with room for `batch` sequences."""
    dtype, experts = DTYPES.get(options.dtype), None
    if options.offload:
        stored = checkpoint.format.get("dtype", checkpoint.format["name"])
        itemsize = (dtype or DTYPES[stored]).itemsize
        args = tp.local_args(args_of_checkpoint(checkpoint), process_group.size(), options.parallel)
        experts = plan_offload(options, args, itemsize, length, batch)
    model = load_model(checkpoint, device, dtype, options.parallel, experts)
    return Session(
        model,
        length,
        SessionOptions(
            batch=batch,
            compile=options.compile,
            compile_prefill=options.compile_prefill,
            prefill_chunk=options.prefill_chunk,
            cache_class=KV_CACHES[options.kv_cache],
            runner_class=runner_class_for(model),
        ),
    )


# Command ------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(
        "Generate text from a converted Mixture-of-Experts checkpoint.",
        (
            "python generate.py --prompt 'def read_lines(path):' --temperature 0.6 --seed 1",
            "python generate.py --checkpoint_path checkpoints/OWNER/NAME/model_bf16 --interactive"
            " --compile",
            "python generate.py --checkpoint_path DIR --offload --gpu_memory 16GB"
            " --prompts_file prompts.txt --json",
            "torchrun --standalone --nproc_per_node=4 generate.py --checkpoint_path DIR"
            " --prompt 'Hello' --compile",
        ),
    )
    add_prompt_options(parser)
    add_sampling_options(parser)
    add = parser.add_argument
    add(
        "--speculate",
        choices=("lookup",),
        help="draft tokens from the text so far, verify several in one pass",
    )
    add(
        "--draft_checkpoint_path",
        type=Path,
        metavar="DIR",
        help="draft with this smaller model instead",
    )
    add("--draft_tokens", type=int, metavar="N", help=f"drafts a pass; default: {DRAFT_TOKENS}")
    add(
        "--profile",
        type=Path,
        metavar="FILE",
        help="write a trace of the generation for chrome://tracing",
    )
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add_model_options(parser)
    return parser


def add_prompt_options(parser: Parser) -> None:
    """What to continue, and how far."""
    add = parser.add_argument
    add(
        "--checkpoint_path",
        type=Path,
        metavar="DIR",
        help="converted checkpoint; default: the embedded tiny model",
    )
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue, '-' reads stdin; repeatable",
    )
    add(
        "--prompts_file",
        type=Path,
        metavar="FILE",
        help="one prompt a line; in a .jsonl a string or {'prompt': ...}",
    )
    add(
        "--batch_size",
        type=int,
        default=8,
        metavar="N",
        help="most prompts and samples continued at once (8)",
    )
    add(
        "--max_new_tokens",
        type=int,
        metavar="N",
        help="default: 200, or as many as fit into --max_seq_len",
    )
    add("--num_samples", type=int, default=1, metavar="N", help="samples of each prompt")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    add("--ignore_eos", action="store_true", help="do not end at the end-of-text token")
    add(
        "--max_seq_len",
        type=int,
        metavar="N",
        help="cache length; default: what prompt and new tokens need",
    )
    add(
        "--interactive",
        action="store_true",
        help="chat; /reset forgets, /exit ends, Ctrl-C stops an answer",
    )
    add(
        "--system",
        metavar="TEXT",
        help="system message; prompts then go through the model's chat template",
    )


def add_sampling_options(parser: Parser) -> None:
    """How a token is chosen."""
    add = parser.add_argument
    add("--temperature", type=float, default=Sampling.temperature, metavar="X", help="0 is greedy")
    add("--top_k", type=int, default=Sampling.top_k, metavar="N")
    add("--top_p", type=float, default=Sampling.top_p, metavar="X")
    add("--min_p", type=float, default=Sampling.min_p, metavar="X")
    add("--repetition_penalty", type=float, default=Sampling.repetition_penalty, metavar="X")
    add("--seed", type=int, metavar="N", help="same seed, same text")


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file, one a line; in a .jsonl each a string or an object's "prompt".

    Empty lines are skipped. Raises ValueError naming the option and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(
            f"--prompts_file {path}: {error.strerror}: give a file that can be read"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(
            f"--prompts_file {path}: it is not UTF-8 text: convert it to UTF-8"
        ) from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"--prompts_file {path}: line {number}"
            prompts.append(read_json_prompt(line, where) if path.suffix == ".jsonl" else line)
    if not prompts:
        raise ValueError(f"--prompts_file {path}: it holds no prompt")
    return prompts


def read_json_prompt(line: str, where: str) -> str:
    """Return the prompt of one line of a .jsonl file."""
    try:
        prompt = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is not JSON") from None
    prompt = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{where} is neither a text nor {{"prompt": a text}}')
    return prompt


def encode_prompts(options: argparse.Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of every prompt, through the chat template if --system is given."""
    prompts, stdin = [], sys.stdin or io.StringIO()  # a process may have no stdin
    texts = [stdin.read() if text == "-" else text for text in options.prompt or []]
    texts += read_prompts(options.prompts_file) if options.prompts_file else []
    for text in texts or [DEFAULT_PROMPT]:
        if not text:
            raise ValueError(
                "the prompt is empty: give --prompt some text, or pipe some in with --prompt -"
            )
        if options.system is None:
            prompts.append(tokenizer.encode(text))
        else:
            system = {"role": "system", "content": options.system}
            prompts.append(tokenizer.chat([system, {"role": "user", "content": text}]))
    return prompts


def plan_lengths(longest: int, options: argparse.Namespace, args: ModelArgs) -> int:
    """Set --max_new_tokens if it is not given; return the session's length.

    Raises ValueError if prompt and answer do not fit, before a weight is read.
    """
    given = options.max_seq_len
    limit, what = given or args.max_position, "--max_seq_len" if given else "the model's"
    if limit > args.max_position:
        raise ValueError(
            f"--max_seq_len {limit}: the model was made for {args.max_position} positions at most"
        )
    if options.interactive:
        options.max_new_tokens = options.max_new_tokens or DEFAULT_NEW_TOKENS
        return min(limit, given or DEFAULT_CHAT_LENGTH)
    room = max(0, limit - longest)
    if options.max_new_tokens is None:
        options.max_new_tokens = min(DEFAULT_NEW_TOKENS, room) or DEFAULT_NEW_TOKENS
    if options.max_new_tokens > room:
        raise ValueError(
            f"{longest} prompt tokens and {options.max_new_tokens} new ones exceed {what} {limit} "
            f"positions: shorten the prompt or ask for at most {room} with --max_new_tokens"
        )
    return given or longest + options.max_new_tokens


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options that cannot be, or cannot be together."""
    check_model_options(options)
    check_counts(options, "max_new_tokens", "num_samples", "max_seq_len", "batch_size")
    check_stop(options.stop)
    profile = options.profile
    if profile and (profile.is_dir() or not profile.absolute().parent.is_dir()):
        raise ValueError(f"--profile {profile}: it must be a file in a folder that is there")
    if options.speculate and options.draft_checkpoint_path:
        raise ValueError(
            "--speculate and --draft_checkpoint_path are two sources of drafts: "
            "leave one of them out"
        )
    drafts = options.speculate or options.draft_checkpoint_path
    if options.draft_tokens is not None and not drafts:
        raise ValueError(
            "--draft_tokens needs a source of drafts: add --speculate lookup or "
            "--draft_checkpoint_path"
        )
    for name in ("prompt", "prompts_file", "json"):
        if options.interactive and getattr(options, name):
            raise ValueError(f"--{name} does not go with --interactive: leave one of them out")


def run(options: argparse.Namespace) -> list[dict]:
    """Load the model, generate what the options ask for, return the results (none for a chat)."""
    device = process_group.start(options.device)
    check_options(options)
    sampling = Sampling(
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        options.repetition_penalty,
        process_group.common_seed(options.seed),
    )
    checkpoint = open_checkpoint(options.checkpoint_path)
    tokenizer, args = load_tokenizer(checkpoint.directory), args_of_checkpoint(checkpoint)
    if options.system is not None and not tokenizer.has_chat_template:
        raise ValueError(
            "--system needs a chat template, and this model has none: leave --system out"
        )
    prompts = []
    if not options.interactive:
        prompts = process_group.share(lambda: encode_prompts(options, tokenizer))
    length = plan_lengths(max(map(len, prompts), default=0), options, args)
    work = [ids for ids in prompts for _ in range(options.num_samples)]
    session = open_any_session(options, checkpoint, device, length, len(work))
    if options.compile or options.compile_prefill:
        compile_session(session, prompts[0] if prompts else [0], sampling)
    results, batch = [], session.batch
    with torch.profiler.profile() if options.profile else nullcontext() as profile:
        if options.interactive:
            chat(session, tokenizer, options, sampling)
        for first in range(0, len(work), batch):
            seed = None if sampling.seed is None else sampling.seed + first
            some = work[first : first + batch]
            results += answer_batch(session, tokenizer, some, options, replace(sampling, seed=seed))
    if options.profile and process_group.is_main():
        profile.export_chrome_trace(str(options.profile))
    return results


def open_any_session(
    options: argparse.Namespace,
    checkpoint: Checkpoint,
    device: torch.device,
    length: int,
    prompts: int,
) -> Session | Speculation:
    """`open_session` for this many prompts, with speculation if the options ask for it."""
    path = options.draft_checkpoint_path
    drafter = Checkpoint(path) if path else None
    drafts = DRAFT_TOKENS if options.draft_tokens is None else options.draft_tokens
    draft_args = args_of_checkpoint(drafter) if drafter else None
    check_drafting(drafts, args_of_checkpoint(checkpoint), draft_args)
    process_group.check_agreement(vars(options), checkpoint)
    if not (options.speculate or drafter):
        batch = min(options.batch_size, prompts) or 1
        return open_session(options, checkpoint, device, length, batch)
    session = open_session(options, checkpoint, device, length)
    draft = None
    if drafter:
        draft = load_model(drafter, device, DTYPES.get(options.dtype), options.parallel)
    return Speculation(session, drafts, draft)


def compile_session(session: Session | Speculation, ids: list[int], sampling: Sampling) -> None:
    """Compile and capture what an answer needs, and log how long it took."""
    start = time.perf_counter()
    for _ in session.stream_all([ids], 1, sampling):
        pass
    session.reset()
    if process_group.is_main():
        log.info(f"compiled in {time.perf_counter() - start:.1f} s")


def answer_batch(
    session: Session | Speculation,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    options: argparse.Namespace,
    sampling: Sampling,
) -> list[dict]:
    """Continue a batch: prompts go to stderr, answers to stdout (a single one as it comes)."""
    session.reset()  # prompts share nothing, so that their order does not matter
    streaming = len(prompts) == 1 and not options.json and process_group.is_main()

    def echo(ids: list[int]) -> None:  # on a terminal the answer continues the prompt's line
        end = "" if sys.stdout.isatty() else "\n"
        print(tokenizer.decode(ids), end=end, file=sys.stderr, flush=True)

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
        on_text=lambda number, text: print(text, end="", flush=True) if streaming else None,
    )
    seconds = time.perf_counter() - start
    if not process_group.is_main():
        return results
    for ids, result in zip(prompts, results, strict=True):
        if not options.json:
            if not streaming:
                echo(ids)
            print("" if streaming else result["text"], flush=True)
        print(format_statistics(result), file=sys.stderr)
    if len(results) > 1:
        new = sum(result["new_tokens"] for result in results)
        rate = f"{new / seconds:.1f}/s with the prompts"
        print(f"{len(results)} sequences, {new} new tokens, {rate}", file=sys.stderr)
    return results


def chat(
    session: Session | Speculation,
    tokenizer: Tokenizer,
    options: argparse.Namespace,
    sampling: Sampling,
) -> None:
    """Read lines, stream answers, keep the cache between turns.

    The text is simply continued if there is no chat template.
    """
    opening = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages, ids = list(opening), []
    show = print if process_group.is_main() else lambda *_, **__: None
    templated = tokenizer.has_chat_template
    for text in process_group.share_each(read_lines):
        if text.strip() == "/reset":
            messages, ids = list(opening), []
            continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            prompt = (
                tokenizer.chat(asked) if templated else ids + tokenizer.encode(text, bos=not ids)
            )
        except ValueError as error:  # bytes that are no text, or the template's own objection
            show(f"error: {error}", file=sys.stderr)
            continue
        room = session.max_seq_len - len(prompt)
        if room < 1:
            full = f"the context of {session.max_seq_len} positions is full: /reset starts anew"
            show(full, file=sys.stderr)
            continue
        with ctrl_c_flag() as interrupted:
            result = generate(
                session,
                tokenizer,
                prompt,
                min(options.max_new_tokens, room),
                sampling,
                stop=options.stop,
                ignore_eos=options.ignore_eos,
                reply=templated,
                on_text=lambda piece: show(piece, end="", flush=True),
                interrupted=interrupted,
            )
        show(flush=True)
        show(format_statistics(result), file=sys.stderr)
        messages = [*asked, {"role": "assistant", "content": result["text"]}]
        answer = session.ids[0][len(prompt) :]
        ids = prompt + (answer[:-1] if answer[-1] in tokenizer.stop_ids else answer)


def log_to_stderr() -> None:
    """Print this project's log messages to stderr, as they are."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers = [handler]
    log.setLevel(logging.INFO)


def command() -> int:
    options = build_parser().parse_args()
    log_to_stderr()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # show a question mark for what it cannot encode
            stream.reconfigure(errors="replace")
    try:
        results = run(options)
        if options.json and process_group.is_main():
            output = results[0] if len(results) == 1 else {"results": results}
            print(json.dumps(output), flush=True)
        process_group.stop()
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        leave(141)
        return 141
    return 0


def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    try:
        return attempt(command, out_of_memory="shorten --max_seq_len")
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
