"""Options shared by generate.py and serve.py: literal choices, no torch, the removed tier."""

import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import checkpoint
import tp
from cli import generate_options, model_name, options, quantize_options, train_options
from cli.parser import Parser
from formats import FORMATS, PLAIN, kv_cache, quantizer
from offload import plan
from runtime import draft_vocab, memory, sampling, speculation

ROOT = Path(__file__).parents[1]


@pytest.fixture
def parser() -> Parser:
    made = Parser("Test.", ("python x.py",), prog="x.py")
    options.add_compile(made)
    options.add_offload(made)
    options.add_model_options(made)
    return made


def test_choices_are_those_of_the_modules_that_implement_them():
    assert tuple(kv_cache.KV_CACHES) == options.KV_CACHES
    assert plan.COMPUTE == options.OFFLOAD_COMPUTE
    assert tuple(tp.PARALLEL) == options.PARALLEL
    assert tuple(quantizer.DTYPES) == options.DTYPES
    assert options.DTYPES == ("bf16", "fp16", "fp32")
    assert set(options.DTYPES) <= set(checkpoint.DTYPES)
    assert options.PREFILL_CHUNK == memory.PREFILL_CHUNK
    assert generate_options.DRAFT_TOKENS == speculation.DRAFT_TOKENS
    assert generate_options.DRAFT_VOCAB == draft_vocab.DRAFT_VOCAB
    defaults = asdict(sampling.Sampling())
    api_only = {"frequency_penalty", "presence_penalty", "logit_bias"}
    assert defaults.keys() - api_only == generate_options.SAMPLING.keys()
    assert defaults | generate_options.SAMPLING == defaults


def test_quantize_describes_the_formats_as_they_are():
    heads = {}
    for format in FORMATS.values():
        if format.head_format != PLAIN:
            heads.setdefault(format.head_format, []).append(format.name)
    others = "; ".join(f"{head} with {', '.join(names)}" for head, names in heads.items())
    assert f"{others}; {PLAIN} with the others" == quantize_options.HEADS
    assert (PLAIN, *heads) == quantize_options.HEAD_FORMATS
    names = {}
    for format in FORMATS.values():
        if not format.has_own_group:
            names.setdefault(format.group, []).append(format.name)
    sizes = sorted(names, reverse=True)
    listed = {
        size: " and ".join(names[size]).replace(" and ", ", ", len(names[size]) - 2)
        for size in sizes
    }
    groups = ", ".join(f"{size} for {listed[size]}" for size in sizes)
    assert groups == quantize_options.GROUPS
    assert (PLAIN, tuple(FORMATS)) == (model_name.PLAIN, model_name.format_names())


def test_families_to_train_are_the_scripts_own():
    source = (ROOT / "scripts" / "train_tiny_moe.py").read_text()
    (table,) = re.findall(r"^FAMILIES = \{.*?^\}", source, re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r'^    "(\w+)": ', table, re.MULTILINE)) == train_options.FAMILIES


def test_the_command_line_imports_no_torch():
    code = (
        "import sys, cli.chat, cli.generate_options, cli.log, cli.options, cli.parser; "
        "import cli.prompts; "
        "sys.exit(sorted({'torch', 'numpy'} & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_host_tier_is_accepted(parser):
    given = parser.parse_args(["--offload", "--gpu_experts", "2", "--offload_tier", "host"])
    options.check_model_options(given)
    assert given.offload_tier == "host"
    assert parser.parse_args([]).offload_tier is None


@pytest.mark.parametrize(
    ("tier", "message"),
    (
        ("disk", "--offload_tier: the disk tier was removed: use --offload_tier host"),
        ("tape", "--offload_tier tape: it must be one of host"),
    ),
)
def test_other_tiers_are_refused_in_one_line(parser, capsys, tier, message):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--offload", "--offload_tier", tier])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1


@pytest.mark.parametrize("name", options.OFFLOAD_OPTIONS)
def test_options_of_offloading_need_it(parser, name):
    value = {"offload_compute": "cpu", "offload_tier": "host"}.get(name, "1")
    given = parser.parse_args([f"--{name}", value])
    with pytest.raises(ValueError, match=f"--{name} is about experts in host memory: add --off"):
        options.check_model_options(given)


@pytest.mark.parametrize(
    ("more", "message"),
    (
        (("--device", "cpu"), "is about a compiled step: add --compile"),
        (("--eager",), "is about a compiled step: add --compile"),
    ),
)
def test_fused_kernels_need_a_compiled_step(parser, more, message):
    given = parser.parse_args(["--decode_kernels", "fused", *more])
    with pytest.raises(ValueError, match=message):
        options.check_model_options(given)


@pytest.mark.parametrize(
    ("argv", "on_gpu", "compiled"),
    (
        ((), True, True),
        ((), False, False),
        (("--compile",), True, True),
        (("--compile",), False, True),
        (("--eager",), True, False),
        (("--decode_kernels", "fused"), True, True),
        (("--compile_cache", "x"), True, True),
    ),
)
def test_a_gpu_compiles_by_default(parser, argv, on_gpu, compiled):
    given = parser.parse_args(argv)
    options.check_model_options(given)
    options.choose_compile(given, on_gpu)
    assert given.compile is compiled


@pytest.mark.parametrize("argv", (("--decode_kernels", "fused"), ("--compile_cache", "x")))
def test_options_of_compiled_code_need_it_on_a_cpu(parser, argv):
    given = parser.parse_args(argv)
    options.check_model_options(given)  # the device is not known yet
    with pytest.raises(ValueError, match=f"{argv[0]}.* is about .*: add --compile"):
        options.choose_compile(given, on_gpu=False)


@pytest.mark.parametrize(
    ("text", "size"),
    (("16GB", 16e9), ("900MB", 9e8), ("1.5 gb", 1.5e9), ("2G", 2e9), ("0.5m", 5e5)),
)
def test_sizes(text, size):
    assert options.parse_size(text) == size


@pytest.mark.parametrize("text", ("16", "GB", "16KB", "-1GB", "16 GB GB", ""))
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match="it must be a number of GB or MB, as in 16GB"):
        options.parse_size(text)
