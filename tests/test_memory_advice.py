"""Advice where memory is short: each suggestion is accepted by the plan that refused."""

import dataclasses
import random
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cli import generate_options, serve_options
from formats import FORMATS
from memory import advice, commands
from memory.plan import GB, ModelSizes
from models import ARCHITECTURES
from models.random_weights import first_layers, number_format

CUDA = torch.device("cuda")
CARDS = 8, 12, 16, 24, 32, 48, 80, 141  # GB
MODES = "bf16", "int8", "int4", "hqq4", "mxfp4", "hqq2"
FEW = 6  # layers; memory is in proportion
REMOVED = "leave out --offload with its options"
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
    command: str  # generate or serve
    argv: tuple[str, ...]
    gpu: float  # GB
    host: float
    prompt: int = 30  # tokens
    layers: int | None = FEW

    @property
    def source(self) -> SimpleNamespace:
        return source(self.name, self.mode, self.layers)

    def plan(self) -> None:
        """Plan as the command does, from its options on. Raises ValueError as it."""
        parse = {"generate": generate_options, "serve": serve_options}[self.command]
        options = parse.build_parser().parse_args(list(self.argv))
        parse.check_options(options)
        limit = self.source.args["max_position"]
        if self.command == "serve":
            given = options.max_batch
            options.max_batch = given or (1 if options.offload else 8)
            assert (options.max_seq_len or 0) <= limit
            commands.plan_server(options, self.source, CUDA, given or 1)
            return
        length = generate_options.plan_lengths(self.prompt, options, limit)
        rows = min(options.batch_size, options.num_samples)
        commands.plan_generation(options, self.source, None, CUDA, length, rows, self.prompt)

    def follow(self, text: str) -> "Case":
        """Return the case with a suggestion followed. Texts that no suggestion has raise."""
        case, argv = self, list(self.argv)
        if REMOVED in text:
            argv = [a for a in argv if a != "--offload"]
            for option in OFFLOAD_VALUES:
                while option in argv:
                    del argv[argv.index(option) : argv.index(option) + 2]
        for part in text.replace(REMOVED, "").split(" and "):
            if found := re.search(r"quantize\.py.* --mode (\w+)|--model \S+:(\w+)", part):
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
    command = rng.choice(("generate", "serve"))
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
    return Case(name, mode, command, tuple(argv), gpu, host, layers=layers)


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
    assert "\n" not in message and "GB" in message, message
    if texts := suggestions(message):
        for text in texts:
            again = plan(case.follow(text))
            assert again is None, f"{case}\n{message}\n{text}: {again}"
        check_least_change(plan, case, texts)
        return "advised"
    least = re.search(
        r"no option makes it fit here; ([\d.]+) GB of free (GPU|host) memory(?: \(a card of \d+ GB"
        r"\))?(?: with (.*?))?(?:, or .*)? would do$",
        message,
    )
    assert least, message
    field = {"GPU": "gpu", "host": "host"}[least[2]]
    enough = dataclasses.replace(case.follow(least[3] or ""), **{field: float(least[1])})
    assert plan(enough) is None, f"{case}\n{message}\n{plan(enough)}"
    short = dataclasses.replace(case, **{field: float(least[1]) - 0.1})
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


@pytest.mark.parametrize("seed", range(2))
def test_following_the_advice_is_never_refused(plan, seed):
    rng = random.Random(seed)
    kinds = [check_case(plan, random_case(rng, FEW)) for _ in range(30)]
    assert {"accepted", "advised"} <= set(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_following_the_advice_is_never_refused_at_full_size(plan, seed):
    rng = random.Random(1000 + seed)
    for _ in range(20):
        check_case(plan, random_case(rng, None))
