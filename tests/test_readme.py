"""The README is true: its files exist, its options are the commands' own, its example runs, its figures are logged."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, COMMANDS = (ROOT / "README.md").read_text(), (ROOT / "docs" / "commands.md").read_text()


def section(title: str) -> str:
    return re.split(r"^## ", README.split(f"\n## {title}\n")[1], flags=re.M)[0]


def test_every_file_it_names_exists():
    tree = [line.split()[0] for line in section("The files").splitlines() if line.startswith("    ")]
    links = re.findall(r"\]\(([^)]+)\)", README)
    for name in tree + links:
        assert (ROOT / name).exists(), name
    rooms = {path.name for path in ROOT.glob("*.py")}
    assert rooms <= set(tree), "a room is not in the README's tree"


@pytest.mark.parametrize(
    "script", ("generate.py", "convert_hf_checkpoint.py", "checkpoint.py", "quantize.py", "eval.py", "benchmark.py",
               "serve.py", "scripts/download.py", "scripts/train_tiny_moe.py", "scripts/plot_roofline.py",
               "scripts/study_offload.py", "scripts/plot_experts.py", "scripts/compare_hf.py"),
)  # fmt: skip
def test_every_option_it_names_is_the_commands_own(script, build_parser):
    after = COMMANDS.split(f"**`{script}")[1]
    described = set(re.findall(r"--\w+", re.split(r"\n\*\*`", after)[0]))
    options = set(re.findall(r"--\w+", build_parser(script).format_help().split("\nexamples:")[0]))
    assert described <= options
    if script == "generate.py":  # its table is complete
        assert options - described <= {"--help"} | set(re.findall(r"--\w+", COMMANDS))


def test_it_names_every_command_and_stays_short():
    table = section("Commands")
    for script in re.findall(r"^\*\*`((?:scripts/)?\w+\.py)", COMMANDS, flags=re.M):
        assert f"`{script}`" in table, script
    assert len(README.splitlines()) < 300


def test_the_python_example_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert re.search(r"(length|stop) [\d.]+\n$", run.stdout)


def test_every_speed_it_states_is_in_the_log():
    log = (ROOT / "docs" / "LOG.md").read_text()
    rows = [line for line in section("Speed").splitlines() if re.match(r"\| \w.*\d", line)]
    assert len(rows) >= 3
    for row in rows:
        name, speed = (cell.strip() for cell in row.split("|")[1:3])
        assert any(name.split()[0] in line and speed in line for line in log.splitlines()), row
