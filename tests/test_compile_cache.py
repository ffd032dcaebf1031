"""--compile_cache: compiled code in a folder, which another machine may get a copy of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Decode two tokens, then print how many functions Inductor compiled, and found compiled.
SCRIPT = """
import json, sys
import generate
from torch._dynamo.utils import counters
code = generate.main()
found = counters["inductor"]
print(json.dumps([code, found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]]))
"""


def run(*options: str, home: Path) -> list[int]:
    given = "--prompt", "a", "--max_new_tokens", "2", "--compile", *options
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHIND", "TRITON"))}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment | {"TMPDIR": str(home)},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_copy_of_the_folder_spares_all_compiling(tmp_path):
    first, second = tmp_path / "new" / "first", tmp_path / "second"
    homes = [tmp_path / name for name in ("a", "b")]
    for home in homes:
        home.mkdir()
    code, compiled, found = run("--compile_cache", str(first), home=homes[0])
    assert code == 0 and compiled > 2 and found == 0
    first.rename(second)  # as on another machine: nothing refers to the old place
    assert run("--compile_cache", str(second), home=homes[1]) == [0, 0, compiled]


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (("--compile_cache", "new"), "add --compile"),
        (("--compile_cache", "file", "--compile"), "file"),
        pytest.param(("--compile_cache", "file/new", "--compile"), "file", marks=pytest.mark.slow),
    ),
)
def test_a_users_mistake_is_one_line(options, message, tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, ROOT / "generate.py", "--prompt", "a", *options]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.startswith("error: ") and ran.stderr.count("\n") == 1
    assert message in ran.stderr and not (tmp_path / "new").exists()
