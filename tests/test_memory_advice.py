"""Advice where memory is short: each suggestion is accepted by the plan that refused."""

import dataclasses
import json
import random
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cli import benchmark_options, eval_options, generate_options, serve_options
from cli.command import MAX_MESSAGE
from formats import FORMATS
from memory import advice, commands
from memory.plan import GB, ModelSizes
from models import ARCHITECTURES
from models.random_weights import first_layers, number_format

PARSERS = {
    "generate": generate_options,
    "serve": serve_options,
    "eval": eval_options,
    "benchmark": benchmark_options,
}
CUDA = torch.device("cuda")
CARDS = 8, 12, 16, 24, 32, 48, 80, 141  # GB
MODES = "bf16", "int8", "int4", "hqq4", "mxfp4", "hqq2"
FEW = 4  # layers; memory is in proportion
REMOVED = "leave out --offload with its options"
BENCHMARK = "--arch any --prompt_len 100 --new_tokens 100"
DRAFT = "--draft_checkpoint_path draft"
NO_DRAFT = "leave --draft_checkpoint_path out"
OFFLOAD_VALUES = "--gpu_memory", "--gpu_experts"


@cache
def source(name: str, mode: str, layers: int | None) -> SimpleNamespace | None:
    """Return a checkpoint without tensors; None: the model does not have the format."""
    args = ARCHITECTURES[name]
    args = args if layers is None else first_layers(args, layers)
    try:
        format = number_format(mode, args)
    except ValueError:
        return None
    directory = Path("/checkpoints/model_" + mode)
    return SimpleNamespace(
        args=dataclasses.asdict(args), format=format, directory=directory, name=name, mode=mode
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line on a machine."""

    name: str
    mode: str
    command: str  # of PARSERS
    argv: tuple[str, ...]
    gpu: float  # GB
    host: float
    prompt: int = 30  # tokens
    layers: int | None = FEW
    draft: str | None = None  # a model in bf16

    @property
    def source(self) -> SimpleNamespace:
        return source(self.name, self.mode, self.layers)

    def plan(self) -> None:
        """Plan as the command does, from its options on. Raises ValueError as it."""
        parse = PARSERS[self.command]
        options = parse.build_parser().parse_args(list(self.argv))
        parse.check_options(options)
        limit = self.source.args["max_position"]
        if self.command == "serve":
            given = options.max_batch
            options.max_batch = given or (1 if options.offload else 8)
            assert (options.max_seq_len or 0) <= limit
            commands.plan_server(options, self.source, CUDA, given or 1)
            return
        if self.command == "eval":
            commands.plan_evaluation(options, self.source, CUDA, options.seq_len)
            return
        if self.command == "benchmark":
            commands.plan_benchmark(options, self.source, CUDA)
            return
        length = generate_options.plan_lengths(self.prompt, options, limit)
        rows = min(options.batch_size, options.num_samples)
        draft = self.draft and source(self.draft, "bf16", self.layers)
        commands.plan_generation(options, self.source, draft, CUDA, length, rows, self.prompt)

    def follow(self, text: str) -> "Case":
        """Return the case with a suggestion followed. Texts that no suggestion has raise."""
        case, argv = self, list(self.argv)
        if REMOVED in text:
            argv = [a for a in argv if a != "--offload"]
            for option in OFFLOAD_VALUES:
                while option in argv:
                    del argv[argv.index(option) : argv.index(option) + 2]
        if NO_DRAFT in text:
            case = dataclasses.replace(case, draft=None)
        for part in text.replace(REMOVED, "").replace(NO_DRAFT, "").split(" and "):
            if found := re.fullmatch(r"--(mode|layers) (\w+)", part):
                value = int(found[2]) if found[1] == "layers" else found[2]
                case = dataclasses.replace(case, **{found[1]: value})
            elif found := re.search(r"quantize\.py.* --mode (\w+)|--model \S+:(\w+)", part):
                case = dataclasses.replace(case, mode=found[1] or found[2])
            elif part.strip():
                words = part.split()
                assert words[0].startswith("--"), part
                argv += words
        return dataclasses.replace(case, argv=tuple(argv))


@pytest.fixture
def plan(monkeypatch):
    """Return a function: a case -> its error, or None if its plan is accepted."""

    @cache
    def sizes(name: str, mode: str, layers: int | None, dtype, parallel) -> ModelSizes:
        return make(source(name, mode, layers), dtype, parallel)

    make = commands.sizes_of
    monkeypatch.setattr(
        commands, "sizes_of", lambda s, *rest: sizes(s.name, s.mode, len_layers(s), *rest)
    )
    monkeypatch.setattr(advice, "smaller_formats", cache(advice.smaller_formats))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def planned(case: Case) -> str | None:
        monkeypatch.setattr(commands, "free_gpu_memory", lambda device: round(case.gpu * GB))
        monkeypatch.setattr(commands, "free_host_memory", lambda: round(case.host * GB))
        try:
            case.plan()
        except ValueError as error:
            return str(error)
        return None

    return planned


def len_layers(checkpoint: SimpleNamespace) -> int | None:
    count = checkpoint.args["n_layer"]
    return None if count == ARCHITECTURES[checkpoint.name].n_layer else count


def random_case(rng: random.Random, layers: int | None) -> Case:
    name = rng.choice(list(ARCHITECTURES))
    args = ARCHITECTURES[name]
    mode = rng.choice([mode for mode in MODES if source(name, mode, layers)])
    share = 1 if layers is None else layers / args.n_layer
    gpu = rng.choice(CARDS) * share * rng.choice((1, 1, 0.97, 0.05))
    host = rng.choice((16, 64, 256, 2000)) * share
    command = rng.choice(("generate", "serve", "generate", "serve", "eval", "benchmark"))
    if command == "benchmark":
        argv = [*BENCHMARK.split(), "--batch", str(rng.choice((1, 64)))]
        return Case(name, mode, command, tuple(argv), gpu, host, layers=layers)
    if command == "eval":
        argv = ["--seq_len", str(rng.choice((512, args.max_position)))]
        return Case(name, mode, command, tuple(argv), gpu, host, layers=layers)
    argv = []
    length = rng.choice((None, 512, 4096, args.max_position))
    if length is not None and length <= args.max_position:
        argv += ["--max_seq_len", str(length)]
    if rng.random() < 0.3:
        argv += ["--kv_cache", "int8"]
    if rng.random() < 0.2:
        argv += ["--compile", "--decode_kernels", "fused"]
    elif rng.random() < 0.4:
        argv += ["--offload"]
        if rng.random() < 0.5:
            argv += ["--gpu_experts", str(rng.randint(args.n_active, args.n_expert))]
        else:
            argv += ["--gpu_memory", advice.size_text(int(gpu * GB * rng.uniform(0.1, 1.2)))]
    if rng.random() < 0.3:
        several = ["--num_samples", "8"] if command == "generate" else ["--max_batch", "12"]
        argv += several if command == "generate" or "--offload" not in argv else []
    if command == "generate" and length and rng.random() < 0.5:
        argv += ["--max_new_tokens", str(length - 30)]
    draft = "OLMoE-1B-7B" if command == "generate" and rng.random() < 0.1 else None
    argv += DRAFT.split() if draft and "--num_samples" not in argv else []
    draft = draft if DRAFT.split()[0] in argv else None
    return Case(name, mode, command, tuple(argv), gpu, host, layers=layers, draft=draft)


def suggestions(message: str) -> list[str]:
    found = re.search(r"(?:this fits|each of these fits): (.*)$", message)
    return found[1].split("; or ") if found else []


def check_case(plan, case: Case) -> str:
    """Check that following the advice of a case's error is never refused; return the kind."""
    message = plan(case)
    if message is None:
        return "accepted"
    if "must be from" in message:  # --gpu_experts
        return "invalid"
    assert "\n" not in message and "GB" in message and len(message) <= MAX_MESSAGE, message
    if texts := suggestions(message):
        for text in texts:
            again = plan(case.follow(text))
            assert again is None, f"{case}\n{message}\n{text}: {again}"
        if case.command in ("generate", "serve") and case.draft is None:
            check_least_change(plan, case, texts)
        return "advised"
    least = re.search(
        r"no option makes it fit here; (?:([\d.]+) GB of free host memory and )?([\d.]+) GB "
        r"of free (GPU|host) memory(?: \(a card of \d+ GB\))?(?: with (.*?))?(?:, or .*)? "
        r"would do$",
        message,
    )
    assert least, message
    needs = {{"GPU": "gpu", "host": "host"}[least[3]]: float(least[2])}
    if least[1]:
        needs["host"] = float(least[1])
    enough = dataclasses.replace(case.follow(least[4] or ""), **needs)
    assert plan(enough) is None, f"{case}\n{message}\n{plan(enough)}"
    for field, need in needs.items():
        short = dataclasses.replace(case, **(needs | {field: need - 0.1}))
        assert "no option makes it fit" in plan(short), f"{case}\n{message}"
    return "hopeless"


def check_least_change(plan, case: Case, texts: list[str]) -> None:
    """Check that no single change of another kind would have done where several are suggested."""
    counts = {len(text.split(" and ")) for text in texts}
    assert len(counts) == 1, texts
    context = (*case.argv, "--max_seq_len", "256", "--max_new_tokens", "200")
    context = context if case.command == "generate" else context[:-2]
    shorter = plan(dataclasses.replace(case, argv=context)) is None
    if counts == {1}:
        assert shorter == texts[0].startswith("--max_seq_len"), (case, texts)
        return
    singles = [context, (*case.argv, "--kv_cache", "int8")]
    if "--offload" not in case.argv:
        memory = "--offload", "--gpu_memory", advice.size_text(int(case.gpu * GB))
        rest = ("--max_batch", "1") if case.command == "serve" else ()
        singles.append((*case.argv, *memory, *rest, "--decode_kernels", "auto"))
    tried = [dataclasses.replace(case, argv=argv) for argv in singles]
    if case.mode == "bf16":
        modes = [mode for mode in FORMATS if source(case.name, mode, case.layers)]
        tried += [dataclasses.replace(case, mode=mode) for mode in modes]
    for one in tried:
        assert plan(one) is not None, f"{one} fits, suggested were {texts}"


def test_memory_that_is_short_on_both_sides(plan):
    """A model with a table in host memory: more of one alone would not do."""
    case = Case("Qwen3.8-Flash-Next", "int4", "generate", ("--max_seq_len", "512"), 1, 16)
    messages = []

    def noting(case: Case) -> str | None:
        messages.append(plan(case))
        return messages[-1]

    assert check_case(noting, case) == "hopeless" and "GB of free host memory and" in messages[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_following_the_advice_is_never_refused(plan, seed):
    rng = random.Random(seed)
    kinds = [check_case(plan, random_case(rng, FEW)) for _ in range(20)]
    assert {"accepted", "advised"} <= set(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_following_the_advice_is_never_refused_at_full_size(plan, seed):
    rng = random.Random(1000 + seed)
    for _ in range(20):
        check_case(plan, random_case(rng, None))


# Cases ------------------------------------------------------------------------------------------


def example(name: str, mode: str, command: str, argv: str, gpu: float, **more) -> Case:
    """Return a case with 64 GB of host memory."""
    return Case(name, mode, command, tuple(argv.split()), gpu, **{"host": 64} | more)


EXAMPLES = {
    "context": (
        example("Mixtral-8x7B", "bf16", "generate", "--max_seq_len 30000", 12.5),
        "the KV cache of 1 sequence of 30,000 tokens and activations need 0.50 GB, and 0.37 GB are "
        "free for them beside the weights; each of these fits: --max_seq_len 21632; or the "
        "checkpoint of quantize.py --mode int8; or --offload --gpu_memory 11.8GB",
    ),
    "a server's weights": (
        example("Qwen3-30B-A3B", "int4", "serve", "", 1.2),
        "the weights need 2.2 GB and the GPU has 1.2 GB free; this fits: --max_seq_len 384 and "
        "--offload --gpu_memory 1140MB",
    ),
    "more than is free": (
        example("Qwen3-30B-A3B", "int4", "serve", "--offload --gpu_memory 24GB", 0.3),
        "--offload: the least experts, all other weights, the KV cache of 4,096 tokens and "
        "activations need 1.4 GB, and the GPU has 0.3 GB free: no option makes it fit here; 1.2 GB "
        "of free GPU memory (a card of 8 GB) with --max_seq_len 768 would do",
    ),
    "nothing": (
        example("DeepSeek-V3", "hqq2", "generate", "", 0.5, host=3),
        "the weights need 8.8 GB and the GPU has 0.5 GB free: no option makes it fit here; 8.9 GB "
        "of free GPU memory (a card of 12 GB) would do",
    ),
    "draft": (
        example("OLMoE-1B-7B", "hqq2", "generate", DRAFT, 3, draft="Mixtral-8x7B"),
        "the draft model and its cache need 12.1 GB and the GPU has 3.0 GB free; this fits: leave "
        "--draft_checkpoint_path out",
    ),
    "a draft and the weights": (
        example("OLMoE-1B-7B", "hqq2", "generate", DRAFT, 0.6, draft="Mixtral-8x7B"),
        "and leave --draft_checkpoint_path out",
    ),
    "beside a draft": (
        example("OLMoE-1B-7B", "bf16", "generate", DRAFT, 5, draft="OLMoE-1B-7B"),
        "free beside the draft model",
    ),
    "eval": (
        example("Mixtral-8x7B", "bf16", "eval", "--seq_len 32000", 13),
        "each of these fits: --seq_len 2816; or the checkpoint of quantize.py --mode int4",
    ),
    "eval's weights": (
        example("Mixtral-8x7B", "bf16", "eval", "--seq_len 512", 8),
        "this fits: the checkpoint of quantize.py --mode int8",
    ),
    "benchmark": (
        example("Mixtral-8x7B", "bf16", "benchmark", BENCHMARK, 8),
        "each of these fits: --layers 2; or --mode int8",
    ),
    "benchmark's batch": (
        example("Mixtral-8x7B", "hqq2", "benchmark", f"{BENCHMARK} --batch 900", 3.5),
        "each of these fits: --batch ",
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_message_names_what_binds_and_what_fits(plan, name):
    case, expected = EXAMPLES[name]
    message = plan(case)
    assert expected in message
    if case.command in ("eval", "benchmark"):
        assert "--offload" not in message
    check_case(plan, case)


@pytest.mark.parametrize("command", ("generate", "serve"))
@pytest.mark.parametrize(("given", "used"), (("0.7GB", "0.7GB"), ("24GB", "0.950000000GB")))
def test_a_gpu_memory_above_the_free_is_lowered(plan, command, given, used, caplog, monkeypatch):
    argv = f"--offload --gpu_memory {given} --max_seq_len 512"
    case = example("OLMoE-1B-7B", "int4", command, argv, 1)
    seen, lower = [], commands.lower_gpu_memory
    monkeypatch.setattr(commands, "lower_gpu_memory", lambda o, c: (lower(o, c), seen.append(o)))
    with caplog.at_level("INFO", "moe_fast"):
        assert plan(case) is None
    assert seen[0].gpu_memory == used
    lines = [r.message for r in caplog.records if "--gpu_memory" in r.message]
    log = [f"--gpu_memory {given}: more than is free, 0.9 GB are used"]
    assert lines == (log if given != used else [])


# How another format is had -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "origin", "model", "plain", "expected"),
    (
        ("bf16", {}, None, False, "the checkpoint of quantize.py --mode hqq2"),
        ("bf16", {}, "owner/name", False, "--model owner/name:hqq2"),
        ("int4", {}, None, True, "quantize.py --checkpoint_path {folder}/model_bf16 --mode hqq2"),
        ("int4", {"repo_id": "a/b"}, None, False, "--model a/b:hqq2 instead of --checkpoint_path"),
        ("int4", {}, "owner/name:int4", False, "--model owner/name:hqq2"),
        ("int4", {}, None, False, "quantize.py --mode hqq2, run on the unquantized one"),
        ("mxfp4", {}, None, False, None),  # as it was published: there is no smaller one
        ("int4", {"published": "int4"}, "owner/name", False, None),
    ),
)
def test_advice_of_another_format_names_where_it_comes_from(
    mode, origin, model, plain, expected, tmp_path
):
    directory = tmp_path / f"model_{mode}"
    directory.mkdir()
    (directory / commands.SOURCE).write_text(json.dumps(origin))
    if plain:
        (tmp_path / "model_bf16").mkdir()
        (tmp_path / "model_bf16" / "config.json").write_text('{"moe_fast": 1}')
    checkpoint = SimpleNamespace(
        format=source("Mixtral-8x7B", mode, FEW).format, directory=directory
    )
    advice = commands.format_advice(SimpleNamespace(model=model), checkpoint)
    if expected is None:
        assert advice is None
    else:
        assert advice("hqq2").endswith(expected.format(folder=tmp_path))
