"""The plan for a card: the choice where options leave it open, and its three lines."""

import argparse
import dataclasses
import json
import logging
import multiprocessing
import random
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_server import REPO, TOKENIZER

import generate
import serve
from cli import generate_options, serve_options
from cli.model_name import ModelName
from hub import describe
from hub.describe import Described, describe_model
from memory import card_plan, cards
from memory.card_plan import Place, choose_format, freedom, plan_of, setup_of
from memory.cards import card_here, card_of_name, sold, token_seconds
from memory.choice import FEW_BITS, OURS, capacity_of, choose
from memory.plan import GB, Memory, reserve
from models import ARCHITECTURES, FAMILIES, args_of_checkpoint
from models.random_weights import first_layers, number_format
from ops import gpu
from parallel import process_group
from tests.plan_table import PAGE, block, written

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
COMMANDS = {"generate": generate_options, "serve": serve_options}
DOCS = Path(__file__).parents[1] / "docs"


def parse(command: str, *argv: str) -> argparse.Namespace:
    module = COMMANDS[command]
    options = module.build_parser().parse_args(argv)
    module.check_options(options)
    return options


def source(name: str, mode: str = "bf16", layers: int | None = None) -> Described:
    args = ARCHITECTURES[name]
    args = args if layers is None else first_layers(args, layers)
    return Described(dataclasses.asdict(args), number_format(mode, args), Path(name))


def place(size: float, host: float = 64, card: str = "RTX 4090") -> Place:
    return Place(sold(card), Memory(round(size * GB), round(host * GB)), False)


@pytest.fixture
def on_card(monkeypatch):
    """Return a function that puts a card of this size into the machine."""
    return lambda *size: monkeypatch.setattr(card_plan, "place_of", lambda *_: place(*size))


def run_main(module, monkeypatch, *argv: str) -> int:
    monkeypatch.setattr("sys.argv", [f"{module.__name__}.py", *argv])
    return module.main()


# Choosing -----------------------------------------------------------------------------------------


def chosen(size: float, name="Qwen3-30B-A3B", host=64.0, command="generate", mode="bf16", argv=()):
    """Return format and place that are chosen for --model NAME: "int4", "int4 offloaded"."""
    options = parse(command, "--model", f"a/{name}", "--dry_run", "--gpu", "T4", *argv)
    setup = setup_of(options, source(name, mode))
    found = choose(setup, place(size, host).memory, freedom(options, setup, True))
    if found is None:
        return None
    return found.setup.sizes.format["name"] + " offloaded" * bool(found.setup.offload)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("size", "host", "expected"),
    (
        (80, 64, "bf16"),
        (34, 64, "int8"),
        (24, 64, "int4"),
        (8, 64, "int4 offloaded"),
        (15, 8, "hqq3"),  # the experts in int4 are 14.9 GB
        (8, 13, "hqq2 offloaded"),
        (8, 8, None),
        (1, 64, None),
    ),
)
def test_the_best_that_fits_is_chosen(command, size, host, expected):
    assert chosen(size, host=host, command=command) == expected


def test_what_is_published_quantized_keeps_its_format():
    assert chosen(24, "gpt-oss-20b", mode="mxfp4") == "mxfp4"
    assert chosen(8, "gpt-oss-20b", mode="mxfp4") == "mxfp4 offloaded"
    assert chosen(24, "gpt-oss-20b", mode="bf16") == "int8"


@pytest.mark.parametrize(
    ("argv", "expected"),
    (
        (("--max_seq_len", "40960"), "int4 offloaded"),  # all weights would leave no place for it
        (("--max_seq_len", "2048"), "int4"),
        (("--decode_kernels", "fused", "--max_seq_len", "40960"), "int4 offloaded"),
        (("--offload", "--gpu_experts", "64"), "bf16 offloaded"),
    ),
)
def test_options_are_kept(argv, expected):
    size = 40 if "--gpu_experts" in argv else 17.5
    assert chosen(size, host=99, argv=argv) == expected


def test_a_servers_answers_side_by_side_are_kept():
    assert chosen(8, command="serve", argv=("--max_batch", "2")) is None
    assert chosen(8, command="serve", argv=("--max_batch", "1")) == "int4 offloaded"


def test_a_chats_context_is_shortened_last():
    name = "Mixtral-8x7B"
    options = parse("generate", "--model", f"a/{name}:hqq2", "--interactive")
    setup = setup_of(options, source(name, "hqq2"))
    sizes = setup.sizes
    memory = Memory(sizes.weights + sizes.cache(1, 1400, "plain") + 3 * 10**8, 0)  # no host memory
    found = choose(setup, memory, freedom(options, setup))
    assert found and found.setup.length == 1024 and found.mode is None
    fixed = parse("generate", "--model", f"a/{name}:hqq2", "--interactive", "--max_seq_len", "4096")
    assert choose(setup, memory, freedom(fixed, setup)) is None


def test_a_context_is_not_shortened_below_the_answer_that_is_asked_for():
    plain, short, long = (
        parse("generate", "--model", "a/b", "--dry_run", "--gpu", "T4", *argv)
        for argv in ((), ("--max_new_tokens", "100"), ("--max_new_tokens", "5000"))
    )
    mixtral = source("Mixtral-8x7B", layers=1)
    setup = setup_of(plain, mixtral)
    assert (setup.length, setup_of(long, mixtral).length) == (4096, 5001)
    free = setup.sizes.weights + reserve(dataclasses.replace(setup, length=300))
    for options, expected in ((plain, 256), (short, 256), (long, None)):
        found = choose(setup, Memory(free, 0), freedom(options, setup))
        assert (found and found.setup.length) == expected


def test_each_choice_is_accepted_by_the_plan_and_is_not_worse_with_more_memory():
    rng = random.Random(5)
    order = ["bf16", *OURS, f"{OURS[-1]} offloaded", *FEW_BITS, f"{FEW_BITS[-1]} offloaded", None]
    for name in ("Qwen3-30B-A3B", "OLMoE-1B-7B", "Qwen3.6-35B-A3B"):
        command = rng.choice(list(COMMANDS))
        options = parse(command, "--model", f"a/{name}", "--dry_run", "--gpu", "T4")
        setup, ranks = setup_of(options, source(name, layers=4)), []
        whole = setup.sizes.weights / GB
        for share in sorted(rng.uniform(0.02, 1.6) for _ in range(5)):
            memory = place(share * whole, whole).memory
            found = choose(setup, memory, freedom(options, setup, True))
            text = None
            if found:
                assert capacity_of(found.setup, memory, found.capacity.length) is not None
                text = found.setup.sizes.format["name"]
                text += " offloaded" * bool(found.setup.offload)
            ranks.append(order.index(text))
        assert ranks == sorted(ranks, reverse=True), (name, ranks)


# The commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", (generate, serve))
def test_a_dry_run_prints_three_lines_and_ends(module, monkeypatch, capsys):
    assert run_main(module, monkeypatch, "--dry_run", "--gpu", "rtx-4090") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("plan: ") for line in lines)
    assert lines[0] == "plan: RTX 4090, 24 GB: the embedded model in bf16"
    assert "predicted from 1,008 GB/s, not measured" in lines[2]


@pytest.mark.parametrize("module", (generate, serve))
@pytest.mark.parametrize(
    ("argv", "message"),
    (
        (("--gpu", "RTX 4090"), "--gpu is about a card that is not here: add --dry_run"),
        (("--dry_run", "--gpu", "RTX 1"), "--gpu RTX 1: it must be one of T4, "),
        (("--dry_run", "--device", "cpu"), "there is none here: add --gpu NAME"),
        (("--dry_run", "--eager", "--compile"), "--eager and --compile: leave one of them out"),
        (("--eager", "--compile_cache", "x"), "is about compiled code: add --compile"),
    ),
)
def test_a_users_mistake_is_one_line(module, argv, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_main(module, monkeypatch, *argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


def planned_lines(monkeypatch, capsys, *argv: str, module=generate) -> list[str]:
    """Return the plan for an H100."""
    assert run_main(module, monkeypatch, "--dry_run", "--gpu", "H100", *argv) == 0
    return capsys.readouterr().out.splitlines()


def test_a_dry_run_plans_what_the_options_run(monkeypatch, capsys, hybrid_directory):
    lines = partial(planned_lines, monkeypatch, capsys)
    assert lines("--eager")[2] == "plan: eager: no speed is predicted"
    kernels = lines("--compile", "--decode_kernels", "inductor")[2]
    assert kernels.startswith("plan: Inductor's kernels; about ")
    assert "fused kernels in 8 of 8" in lines()[2]
    assert lines("--decode_kernels", "fused") == lines("--compile_cache", "none") == lines()
    first, weights, _ = lines("--dtype", "fp32")
    assert first.endswith("the embedded model in fp32") and "35.7 MB of weights" in weights
    assert "17.9 MB of weights" in lines()[1]
    several = "--num_samples", "9", "--batch_size", "4"
    assert "4,096 tokens" in lines(*several)[1] and "sequences" not in lines(*several)[1]
    assert "of 512 tokens, 4 sequences" in lines(*several, "--max_seq_len", "512")[1]
    headed = "--checkpoint_path", str(hybrid_directory)
    server = partial(lines, *headed, module=serve)
    assert server("--speculate", "mtp")[1].endswith(", 1 conversation")
    assert server("--speculate", "auto", "--max_batch", "1")[1].endswith(", 1 conversation")
    assert server()[1].endswith(", 16 conversations")


def test_a_dry_run_refuses_what_a_run_refuses(monkeypatch, capsys, hybrid_directory, tmp_path):
    headed = "--checkpoint_path", str(hybrid_directory)
    of_generate = {"--json", "--draft_checkpoint_path", "--max_new_tokens", "--list", "--remove"}
    of_generate |= {"--draft_vocab"}
    for argv, message in (
        (("--max_seq_len", "9999"), "9999: the model was made for 4096 positions at most"),
        (("--speculate", "lookup", "--draft_tokens", "99"), "it must be from 1 to 15"),
        ((*headed, "--speculate", "mtp", "--draft_tokens", "8"), "drafts 1 to 7"),
        (("--speculate", "mtp"), "has no head for multi-token prediction"),
        (("--draft_checkpoint_path", str(tmp_path / "none")), "is not a directory"),
        (("--json",), "--json is about an answer, and --dry_run has none"),
        (("--offload", "--gpu_memory", "1MB"), "give at least 0.010GB"),
        (("--offload", "--gpu_experts", "9"), "it must be from 2 (active) to 8 (all)"),
        (("--offload", "--gpu_experts", "0"), "it must be from 2 (active) to 8 (all)"),
        (("--speculate", "auto", "--draft_vocab", "9"), "has no head for multi-token prediction"),
        (("--max_new_tokens", "4096"), "ask for at most 4095 with --max_new_tokens"),
        (("--decode_kernels", "fused", "--dtype", "fp32"), "in fp32 on H100: use auto"),
        (("--eager", "--decode_kernels", "fused"), "is about a compiled step: add --compile"),
        (("--device", "cpu"), "--gpu and --device cpu: leave one of them out"),
        (("--list",), "--dry_run prints a plan, and --list has none"),
        (("--remove", "a/b", "--yes"), "--dry_run prints a plan, and --remove has none"),
    ):
        for module in (generate, serve):
            if module is generate or not of_generate & set(argv):
                assert run_main(module, monkeypatch, "--dry_run", "--gpu", "H100", *argv) == 2
                out, err = capsys.readouterr()
                assert out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize("argv", (("--max_seq_len", "16"), ("--prefill_chunk", "100000")))
def test_a_longer_context_that_is_offered_fits(argv):
    argv = "--model", "a/GLM-4.7-Flash:int8", "--dry_run", "--gpu", "L4", *argv
    model = source("GLM-4.7-Flash", "int8", layers=2)
    options, where = parse("generate", *argv), place(3.5)
    found = card_plan.plan_setup(options, where, setup_of(options, model)).lines()[1]
    offered = re.search(r"--max_seq_len (\d+) fits", found)[1]
    options = parse("generate", *argv, "--max_seq_len", offered)
    again = card_plan.plan_setup(options, where, setup_of(options, model)).lines()[1]
    assert again == found.partition(";")[0] + f"; context of {int(offered):,} tokens"


def test_a_draft_model_takes_its_part_of_the_plan(directory):
    argv = "--dry_run", "--gpu", "T4", "--draft_checkpoint_path", str(directory)
    weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert setup_of(parse("generate", *argv), source("Qwen3-30B-A3B")).extra > weights


def put_on_hub(hub, directory: Path) -> None:
    files = (path for path in directory.iterdir() if path.is_file())
    hub.files = TOKENIZER | {path.name: path.read_bytes() for path in files}


def test_a_model_of_the_hub_is_planned_by_its_config_alone(
    hub, make_family, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    put_on_hub(hub, make_family("mixtral").hf_directory)
    argv = "--model", REPO, "--dry_run", "--gpu", "L4"
    assert run_main(generate, monkeypatch, *argv) == 0
    assert f"L4, 24 GB: {REPO} in bf16" in capsys.readouterr().out
    assert {name for _, name, _ in hub.requests} == {"api", "config.json"}
    assert not list(tmp_path.iterdir())
    assert run_main(generate, monkeypatch, "--model", f"{REPO}:int4", *argv[2:]) == 0
    assert f"{REPO}:int4 in int4" in capsys.readouterr().out
    assert run_main(generate, monkeypatch, "--model", "a/b-GGUF", *argv[2:]) == 2
    assert "a/b-GGUF is not on this disk yet" in capsys.readouterr().err


def test_the_chosen_format_is_downloaded_and_found_again(
    hub, make_family, on_card, monkeypatch, capsys, tmp_path
):
    """The second time the network is not needed."""
    monkeypatch.chdir(tmp_path)
    put_on_hub(hub, make_family("mixtral").hf_directory)
    options = parse("generate", "--model", REPO)
    setup = setup_of(options, generate.find_source(options))
    on_card((setup.sizes.weights + reserve(setup) - 1) / GB, 0)
    for _ in range(2):
        argv = "--model", REPO, "--prepare_only", "--device", "cpu"
        assert run_main(generate, monkeypatch, *argv) == 0
        assert capsys.readouterr().out.strip().endswith("model_int8")
        hub.requests, asked = [], hub.requests
    assert not asked


def share_as_ranks_do(monkeypatch) -> None:
    """Let rank 0 send what it shares. While it makes that, it shares nothing else."""
    shared, (end, other_end) = [], multiprocessing.Pipe()

    def share(make):
        assert not shared, "the other ranks do not come here"
        shared.append(make)
        end.send(make())
        shared.pop()
        return other_end.recv()

    monkeypatch.setattr(process_group, "share", share)


@pytest.mark.parametrize("module", (generate, serve))
def test_several_ranks_make_one_plan(module, monkeypatch, capsys, directory):
    share_as_ranks_do(monkeypatch)
    for argv in ((), ("--checkpoint_path", str(directory))):
        assert len(planned_lines(monkeypatch, capsys, *argv, module=module)) == 3
    monkeypatch.setattr(card_plan, "free_gpu_memory", lambda device: 10 * GB)
    monkeypatch.setattr(card_plan, "card_here", lambda device: sold("RTX 3080"))
    options = parse("generate", "--model", "a/Qwen3-30B-A3B:int4", "--interactive")
    setup = setup_of(options, source("Qwen3-30B-A3B", "int4", layers=1))
    assert card_plan.settle(options, CUDA, setup) == 4096


@pytest.mark.parametrize("command", COMMANDS)
def test_a_session_that_does_not_fit_is_offloaded(command, on_card, caplog):
    options = parse(command, "--model", "a/Qwen3-30B-A3B:int4")
    options.compile, options.max_batch = True, getattr(options, "max_batch", None) or 8
    if command == "generate":
        del options.max_batch
    setup = setup_of(options, source("Qwen3-30B-A3B", "int4"))
    on_card(10, 64)
    with caplog.at_level(logging.INFO, "moe_fast"):
        length = card_plan.settle(options, CUDA, dataclasses.replace(setup, batch=1))
    assert options.offload and options.gpu_memory == "9.5GB" and length == 4096
    assert getattr(options, "max_batch", 1) == 1
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3 and "--offload" in messages[1]
    again = setup_of(options, source("Qwen3-30B-A3B", "int4"))  # as the plan that follows
    assert again.offload and capacity_of(again, place(10).memory, 4096)


def test_a_cpu_and_named_formats_choose_nothing(on_card):
    options = parse("generate", "--model", "a/b")
    choose_format(options, CPU, lambda: pytest.fail("asked"))
    on_card(24)
    for name in ("a/b:int8", "a/b-GGUF"):
        options = parse("generate", "--model", name)
        choose_format(options, CUDA, lambda: pytest.fail("asked"))
        assert options.model == name
    options = parse("generate", "--model", "a/Qwen3-30B-A3B")
    choose_format(options, CUDA, lambda: source("Qwen3-30B-A3B"))
    assert options.model == "a/Qwen3-30B-A3B:int4"


def test_a_described_model_is_that_on_disk(make_family, monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_FAST_CHECKPOINTS", str(tmp_path))
    checkpoint = make_family("mixtral").directory
    target = tmp_path / "a" / "b" / "model_bf16"
    target.parent.mkdir(parents=True)
    target.symlink_to(checkpoint)
    name = card_plan.parse_model_name("a/b:int8")
    found = describe_model(name)
    config = json.loads((checkpoint / "config.json").read_text())
    assert args_of_checkpoint(found).dim == config["args"]["dim"]
    assert found.format["name"] == "int8" and found.format["modules"]
    assert describe_model(name._replace(format=None)).directory == target


# Cards and speed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    (
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX 4090"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.6, "RTX 4060 Ti"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 7.7, None),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA H100 NVL", 93.1, None),  # another size, another bandwidth
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100"),
        ("Something else", 24, None),
    ),
)
def test_a_card_is_known_by_its_name_and_size(name, gib, known, monkeypatch):
    properties = argparse.Namespace(name=name, total_memory=round(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setitem(gpu.found, 0, gpu.KNOWN["sm_80"])
    card = card_here(CUDA)
    assert card.name == name and card.gpu is gpu.KNOWN["sm_80"]
    assert card.bandwidth == (sold(known).bandwidth if known else 0)
    assert (token_seconds(card, GB, 0.0) > 0) == (known is not None)


def test_names_of_cards():
    assert card_of_name("geforce".replace("geforce", "rtx 3090")) == sold("RTX 3090")
    assert all(card_of_name(name.lower()) == sold(name) for name in cards.SOLD)


@pytest.mark.parametrize(
    ("name", "known"),
    (
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4060 Ti 16GB", "RTX 4060 Ti"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GeForce RTX 3080 12GB", None),
        ("NVIDIA GeForce RTX", None),
    ),
)
def test_a_plan_takes_the_name_that_a_driver_gives(name, known):
    if known:
        assert card_of_name(name) == sold(known)
    else:
        with pytest.raises(ValueError, match="it must be one of T4, "):
            card_of_name(name)


HUB = json.loads((Path(__file__).parent / "data" / "hub_configs.json").read_text())
PUBLISHED = {
    name: (family, {"architectures": [family], **HUB.get(name, shape)})
    for family, row in FAMILIES.items()
    for name, shape in row.shapes.items()
}
OF_AUTUMN = (
    *("NemotronHForCausalLM", "LagunaForCausalLM", "Lfm2MoeForCausalLM", "FlintForCausalLM"),
    *("MellumForCausalLM", "Kolibri1ForCausalLM", "GraniteMoeHybridForCausalLM"),
    *(
        "MiniMaxM2ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "AfmoeForCausalLM",
        "KimiLinearForCausalLM",
    ),
)


def planned() -> list:
    """Return model and card; quick: the first model of each newer family, on one card."""
    quick = {next(n for n, (of, _) in PUBLISHED.items() if of == family) for family in OF_AUTUMN}
    return [
        pytest.param(name, card, marks=() if name in quick and first else pytest.mark.slow)
        for name in PUBLISHED
        for first, card in ((True, "H200"), (False, "RTX 4090"))
    ]


def publish(monkeypatch, name: str) -> None:
    """Let the Hub have a model's config.json."""
    config = json.dumps(PUBLISHED[name][1])
    files = SimpleNamespace(sizes={"config.json": len(config)})
    monkeypatch.setattr(describe, "list_files", lambda *_: files)
    monkeypatch.setattr(describe, "fetch_file", lambda _, f, to, __: (to / f).write_text(config))


def test_a_format_that_a_quantized_model_cannot_be_had_in_has_no_plan(monkeypatch, tmp_path):
    publish(monkeypatch, "gpt-oss-20b")
    assert describe_model(ModelName("a/b", "mxfp4")).format["name"] == "mxfp4"
    for format in ("int4", "bf16", "int8-mxfp4"):
        with pytest.raises(ValueError, match=f"published in mxfp4, .* leave :{format} out"):
            describe_model(ModelName("a/b", format))


@pytest.mark.parametrize(("name", "card"), planned())
def test_a_published_model_has_a_plan_by_its_config_alone(name, card, monkeypatch):
    """A config.json of tests/data/, or else a model's sizes, which its family lists."""
    publish(monkeypatch, name)
    options = parse("generate", "--model", f"a/{name}", "--dry_run", "--gpu", card)
    model = describe_model(ModelName(f"a/{name}"))
    billions = re.search(r"-(\d+(?:\.\d+)?)B(?=-A\d|$)", name)
    if billions and model.format["name"] == "bf16":
        size = setup_of(options, model).sizes.weights
        assert size == pytest.approx(2e9 * float(billions[1]), rel=0.07)
    try:
        first, weights, kernels = card_plan.dry_run(options, CPU, lambda: model)
    except ValueError as error:
        assert re.fullmatch(
            rf"a/{name}: no plan fits {card} with .*; name a larger card", str(error)
        )
        assert name.startswith(("DeepSeek-V3", "MiniMax", "Qwen3.8"))
        return
    assert first.startswith(f"plan: {card}, ") and f"a/{name} in " in first
    assert "context of" in weights
    assert re.search(
        r"(fused kernels in \d+ of \d+ layers|Inductor's kernels); about [\d.,]+ t", kernels
    )


def measured() -> list[tuple[str, str, float]]:
    """Return the newest rows of docs/benchmarks.md of one H200: model, format, tokens/s.

    Not those of fp8: its instructions bind, and a plan expects 1.28 times what Nemotron 3 makes.
    """
    table = (DOCS / "benchmarks.md").read_text().partition("## Decode speed")[2]
    names = {name.replace("-8x", " 8x"): name for name in ARCHITECTURES}
    rows = []
    commits = "1afcd03|b5d3cc8|8f04c78|fdbca2e|c858efe"
    pattern = rf"\| (.+?)(?: as published)? \(?(\w+)\)? \| ([\d.]+) \|.* (?:{commits}) \|"
    for line in table.partition("## ")[0].splitlines():
        found = re.match(pattern, line)
        if found and found[1] in names and found[2] != "fp8":
            rows.append((names[found[1]], found[2], float(found[3])))
    return rows


def test_predictions_are_near_what_an_h200_measured():
    rows, errors = measured(), []
    assert len(rows) > 10
    for name, mode, speed in rows:
        options = parse("generate", "--model", f"a/{name}:{mode}", "--dry_run", "--gpu", "H200")
        setup = setup_of(options, source(name, mode))
        where = place(141, card="H200")
        found = choose(setup, where.memory, freedom(options, setup))
        assert found is not None, name
        errors.append(1 / plan_of(name, where, found, setup.sizes).seconds / speed)
    assert min(errors) > 0.75 and max(errors) < 1.25
    assert sorted(errors)[len(errors) // 2] == pytest.approx(1, abs=0.1)


def test_the_page_has_the_plans_of_six_cards():
    """After a change that is meant: `python -m tests.plan_table` writes the page again."""
    assert block() == written(PAGE.read_text())
