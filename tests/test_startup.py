"""Before torch is imported: --help, wrong arguments, missing packages, Ctrl-C."""

import ast
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = (
    "generate.py",
    "serve.py",
    "eval.py",
    "quantize.py",
    "convert_hf_checkpoint.py",
    "benchmark.py",
    "checkpoint.py",
    "scripts/compare_hf.py",
    "scripts/download.py",
    "scripts/plot_experts.py",
    "scripts/plot_roofline.py",
    "scripts/plot_speculation.py",
    "scripts/plot_timeline.py",
    "scripts/study_offload.py",
    "scripts/train_tiny_moe.py",
)
GROUPED = "generate.py", "serve.py", "eval.py", "quantize.py", "benchmark.py"
SLOW = "torch", "numpy", "transformers", "huggingface_hub", "safetensors", "matplotlib"
MAX_SECONDS = 1.0  # of CPU; it takes 0.1, or 3 with torch


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("script", COMMANDS)
def test_help_and_a_wrong_option_import_nothing_slow(script):
    for arguments, code in ((["--help"], 0), (["--zzz"], 2)):
        before = cpu_seconds()
        found = run("-X", "importtime", script, *arguments)
        seconds = cpu_seconds() - before
        assert found.returncode == code
        imported = set(re.findall(r"\| +(\w+)$", found.stderr, re.MULTILINE))
        assert "argparse" in imported and not imported & set(SLOW)
        assert seconds < MAX_SECONDS


@pytest.mark.parametrize("script", GROUPED)
def test_help_begins_with_at_most_ten_usual_options(script, build_parser):
    text = build_parser(script).format_help().split("\nexamples:")[0]
    usual = re.split(r"^\w.*:$", text.split("usual options:\n")[1], flags=re.MULTILINE)[0]
    assert 5 <= len(re.findall(r"^  --\w+", usual, re.MULTILINE)) <= 10
    titles = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert titles[:2] == ["options", "usual options"] and len(set(titles)) == len(titles) >= 4
    for title in titles[1:]:
        assert re.search(rf"^{title}:\n  \w.*\n\n  --", text, re.MULTILINE), "no line of help"


@pytest.mark.parametrize(
    ("line", "message"),
    (
        ("generate.py --yes", "--yes answers --remove"),
        ("generate.py --max_new_tokens 0", "--max_new_tokens 0: it must be at least 1"),
        ("serve.py --port 70000", "--port 70000: it must be from 0 to 65535"),
        ("eval.py --limit 3", "--limit needs --tasks: name the tasks, or leave it out"),
        ("quantize.py --mode int8", "nothing to quantize: give --checkpoint_path DIR"),
        ("benchmark.py --arch OLMoE-1B-7B --repeats 0", "--repeats 0: it must be at least 1"),
        ("scripts/plot_experts.py --output x.jpg", "its name must end in .png or .svg"),
    ),
)
def test_values_are_checked_before_torch_is_imported(line, message):
    found = run("-X", "importtime", *line.split())
    assert found.returncode == 2 and found.stdout == ""
    assert "torch" not in re.findall(r"\| +(\w+)$", found.stderr, re.MULTILINE)
    (error,) = re.findall("^error: (.*)$", found.stderr, re.MULTILINE)
    assert message in error


@pytest.mark.parametrize(
    ("line", "package", "message"),
    (
        ("serve.py", "starlette", "a server needs starlette: pip install 'moe-fast[serve]'"),
        ("serve.py", "llguidance", "a server needs llguidance: pip install 'moe-fast[serve]'"),
        ("eval.py --tasks x", "lm_eval", "--tasks needs lm-eval: pip install 'moe-fast[eval]'"),
        (
            "scripts/plot_experts.py",
            "matplotlib",
            "a picture needs matplotlib: pip install 'moe-fast[plot]'",
        ),
    ),
)
def test_a_missing_package_is_found_before_torch_is_imported(line, package, message, tmp_path):
    hide = (
        "import importlib.util as u; real = u.find_spec; "
        f"u.find_spec = lambda name, *a: None if name == {package!r} else real(name, *a)"
    )
    (tmp_path / "sitecustomize.py").write_text(hide)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    found = run("-X", "importtime", *line.split(), PYTHONPATH=path)
    assert found.returncode == 2 and f"error: {message}\n" in found.stderr
    assert "torch" not in re.findall(r"\| +(\w+)$", found.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("script", "name"),
    (
        *(("generate.py", "torch"), ("generate.py", "cli.chat"), ("serve.py", "cli.serve_options")),
        *(("quantize.py", "argparse"), ("eval.py", "cli.eval_options")),
        ("scripts/plot_timeline.py", "benchmarks.pictures"),
    ),
)
def test_ctrl_c_during_the_imports_is_one_line(script, name):
    """A module that takes long to import stands in for the real one."""
    code = (
        "import runpy, sys, time, types, importlib.abc\n"
        "class Slow(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, found, *rest):\n"
        f"        if found == {name!r}:\n"
        "            print('importing', flush=True)\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
        f"sys.argv = [{script!r}]\n"
        f"runpy.run_path({script!r}, run_name='__main__')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "importing\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "interrupted\n")


def test_ctrl_c_after_the_command_is_no_traceback():
    """A second Ctrl-C may come while Python ends: the first one was not quick enough."""
    code = (
        "import atexit, os, signal\n"
        "from cli.command import command\n"
        "from cli.ctrl_c import end_at_ctrl_c\n"
        "end_at_ctrl_c()\n"
        "@command()\n"
        "def main():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "raise SystemExit(main())\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=20
    )
    assert (process.returncode, process.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("script", (*COMMANDS, "scripts/capture_page.py"))
def test_ctrl_c_is_one_line_from_the_first_import_on(script):
    first, guard = ast.parse((ROOT / script).read_text()).body[1:3]  # after the docstring
    assert ast.unparse(first) == "from cli.ctrl_c import end_at_ctrl_c"
    assert ast.unparse(guard) == "if __name__ == '__main__':\n    end_at_ctrl_c()"


def test_every_script_with_slow_imports_checks_its_arguments_first():
    """The pattern of cli/startup.py, in every script that imports torch."""
    for script in COMMANDS:
        source = (ROOT / script).read_text()
        if "\nimport torch\n" in source:
            first = source.index("    check_arguments(build_parser")
            assert first < source.index("\nimport torch\n"), script
